"""The right values, over every way from one host to the other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from host import HOST, Result, be_rank, digest, job, left, logged, rank_2, scenario


def collectives(mdas: Any) -> dict[str, str]:
    """Digests of what every operation gives."""
    import numpy as np

    random = np.random.default_rng(7 + HOST)
    found = {}
    for name in ("float32", "float16", "float64", "int32"):
        for count in (0, 1, 3, 1000, 5000, 300_001):
            values = random.integers(-50, 50, count).astype(name) / np.asarray(8 if "float" in name else 1, name)
            values = values.astype(name)
            kept = values.copy()
            total = mdas.allreduce(values, out=np.empty_like(values))
            best = mdas.allreduce(values, op="max", out=np.empty_like(values))
            root = mdas.broadcast(values.copy(), root=1)
            both = mdas.allgather(values)
            pair = mdas.reduce_scatter(np.concatenate([values, values]))
            assert np.array_equal(values, kept)
            found[f"{name} {count}"] = digest(total, best, root, both, pair)
    mdas.barrier()
    return found


@scenario
def exactness() -> Result:
    """Every operation over verbs and over TCP, for the ring and the tree, and what is left afterwards."""
    out: Result = {"digests": {}, "left": []}
    with job("verbs"):
        pass
    out["left"].append(left())
    for transport in ("verbs", "tcp", "verbs"):
        for algorithm in ("", "ring", "tree"):
            os.environ["MDAS_ALGORITHM"] = algorithm
            with job(transport) as mdas:
                out["digests"].setdefault(algorithm or "auto", []).append(collectives(mdas))
            out["left"].append(left())
    os.environ["MDAS_ALGORITHM"] = ""
    return out


def packets() -> dict[str, int]:
    """Sent by each device so far."""
    counters = sorted(Path("/sys/class/infiniband").glob("*/ports/1/hw_counters/sent_pkts"))
    return {counter.parts[4]: int(counter.read_text()) for counter in counters}


@scenario
def rails() -> Result:
    """Over both devices at once, and over TCP; then host 1 would use one only."""
    import numpy as np

    out: Result = {"digests": [], "left": []}
    os.environ["MDAS_IB_RAILS"] = "2"
    for transport in ("verbs", "tcp", "verbs"):
        os.environ["MDAS_IB_RELAXED_ORDERING"] = str(len(out["left"]) // 2)
        with job(transport) as mdas:
            before = packets()
            out["digests"].append(collectives(mdas))
            values = np.arange(2_000_000, dtype="float32") * (1 + HOST)
            mdas.allreduce(values)
            exact = np.array_equal(values, np.arange(2_000_000, dtype="float32") * 3)
            out.setdefault("exact", []).append(bool(exact))
            out.setdefault("packets", []).append({name: count - before[name] for name, count in packets().items()})
        out["left"].append(left())
    os.environ["MDAS_IB_RAILS"] = str(2 - HOST)
    with job("verbs") as mdas:
        before = packets()
        out["fewer"] = float(mdas.allreduce(np.ones(1_000_000, "float32"))[-1])
        out["fewer packets"] = {name: count - before[name] for name, count in packets().items()}
    out["left"].append(left())
    return out


@scenario
def mixed() -> Result:
    """Three ranks, of which the last one, on host 1, has no RDMA; what ranks 0 and 1 found."""
    with rank_2("exchange", "third()") as shares:
        return mixed_rank(HOST, shares)


def third() -> None:
    """For `mixed`."""
    os.environ["MDAS_IB_DEVICE"] = "none"
    mixed_rank(2, True)


def mixed_rank(rank: int, shares: bool) -> Result:
    """The same on all three ranks. `shares`: another one is on this host."""
    import numpy as np

    import mdas
    from mdas import _core, session

    be_rank(rank, 3, int(rank == 2), 1 + shares)
    values = np.arange(100_000, dtype="float32") * (1 + rank)
    digests = []
    for transport in ("auto", "tcp"):
        mdas.init(transport=transport, timeout=60.0)
        if transport == "auto":
            used, pairs = session.current().engine.transport, _core.verbs_live()["queue_pairs"]
        total = mdas.allreduce(values, out=np.empty_like(values), op="average")
        digests.append(digest(total, mdas.allgather(values), mdas.allreduce(values * 1.1)))
        mdas.barrier()
        mdas.shutdown()
    return {"transport": used, "queue pairs": pairs, "digests": digests, "left": left()}


@scenario
def families() -> Result:
    """Host 1 has the GID of a link-local address, host 0 that of an IPv4 one; then both have link-local ones."""
    import numpy as np

    from mdas import session
    from mdas.errors import ConfigurationError

    os.environ.update(MDAS_LOG="info", MDAS_IB_DEVICE="rxe0:1", MDAS_IB_GID_INDEX=str(1 - HOST))
    out: Result = {"used": [], "sums": []}
    try:
        with job("verbs"):
            pass
    except ConfigurationError as error:
        out["error"] = str(error)
    for _ in range(2):
        with job("auto") as mdas:
            out["used"].append(session.current().engine.transport)
            out["sums"].append(float(mdas.allreduce(np.ones(100_000, "float32"))[-1]))
        os.environ["MDAS_IB_GID_INDEX"] = "0"
    out["log"] = logged("families")
    return out
