"""Runs in a virtual machine with an RDMA device: one scenario on each of two hosts, which are ranks 0 and 1.

    python guest.py SCENARIO...      each in a process of its own; writes $LAB_OUT/SCENARIO.json

A scenario returns what the tests look at. A torch-free one imports in seconds, torch takes minutes in here.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HOST = int(os.environ.get("LAB_HOST", "0"))
NIC = os.environ.get("LAB_NIC", "")
LIMIT = {"training": 900.0}
"""Seconds for a scenario, if not 300."""
PORT = 29500

Result = dict[str, Any]
SCENARIOS: dict[str, Callable[[], Result]] = {}


def scenario(body: Callable[[], Result]) -> Callable[[], Result]:
    """Registers it by its name."""
    SCENARIOS[body.__name__] = body
    return body


@contextlib.contextmanager
def job(transport: str, timeout: float = 60.0) -> Iterator[Any]:
    """`mdas` as this host's rank."""
    import mdas

    ranks = {"RANK": str(HOST), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(ranks | {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": str(PORT)})
    mdas.init(transport=transport, timeout=timeout)
    try:
        yield mdas
    finally:
        mdas.shutdown()


def alone() -> None:
    """Joins a job of one rank, and leaves it."""
    import mdas

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    mdas.init()
    mdas.shutdown()


def left() -> Result:
    """What this process has open."""
    from mdas import _core

    return {
        "verbs": _core.verbs_live(),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
    }


def tc(*words: str) -> None:
    """Changes how packets leave this host."""
    subprocess.run(["tc", "qdisc", *words[:1], "dev", NIC, "root", *words[1:]], check=True, timeout=20)


def digest(*arrays: Any) -> str:
    """Of their bytes."""
    whole = hashlib.sha256()
    for array in arrays:
        whole.update(array.tobytes())
    return whole.hexdigest()


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
def device_tests() -> Result:
    """The tests in Rust that need a device; the machine has no cargo, but sees what was built outside."""
    words = [os.environ["MDAS_DEVICE_TESTS"], "verbs::tests", "--ignored", "--test-threads=1", "--nocapture"]
    done = subprocess.run([*words, "--skip", "foreign"], capture_output=True, text=True, timeout=280, check=False)
    return {"status": done.returncode, "text": done.stdout + done.stderr}


@scenario
def foreign_peer() -> Result:
    """The transport's queue pairs and a program over pyverbs, which the system's Python has."""
    words = [os.environ["MDAS_DEVICE_TESTS"], "verbs::tests::a_foreign", "--ignored", "--nocapture"]
    environment = os.environ | {"MDAS_FOREIGN_PEER": f"/usr/bin/python3 {Path(__file__).with_name('foreign_peer.py')}"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False, env=environment)
    return {"status": done.returncode, "text": done.stdout + done.stderr}


@scenario
def zero_copy() -> Result:
    """A registered bucket over verbs: only the reduction touches it."""
    from mdas import _core, session

    with job("verbs") as mdas:
        engine = session.current().engine
        memories = [_core.Memory(1_000_000), _core.Memory(1_000_000)]
        views = [_core.View.from_buffer(memoryview(memory).cast("f"), True) for memory in memories]
        before = engine.counters()["bytes_copied"]
        for _ in range(3):
            engine.allreduce(0, *views, op="average").wait(60)
        copied = engine.counters()["bytes_copied"] - before
        mdas.barrier()
        return {"copied": copied}


@scenario
def registrations() -> Result:
    """How often memory of others is registered: arrays that stay, that die, that take the place of another."""
    import numpy as np

    from mdas import _core, session

    out: Result = {}
    with job("verbs") as mdas:
        engine = session.current().engine

        def regions() -> int:
            return _core.verbs_live()["memory_regions"]

        def counted(*arrays: Any, times: int = 4, **options: Any) -> list[int]:
            """Registrations for each of some allreduces."""
            counts = [engine.counters()["registrations"]]
            for _ in range(times):
                mdas.allreduce(*arrays, **options)
                counts.append(engine.counters()["registrations"])
            return [after - before for before, after in itertools.pairwise(counts)]

        for name in ("float32", "float16"):  # what the engine itself needs
            counted(np.ones(100_000, name))
            counted(np.ones(100_000, name), times=1)
        for name in ("float32", "float16"):
            array = np.ones(100_000, name)
            out[name] = counted(array)
            out[f"{name} value"] = float(array[-1])
            out[f"{name} part"] = counted(array[10_000:90_000])
            out[f"{name} out"] = counted(array, out=np.empty_like(array), op="average")
        out["bytearray"] = counted(bytearray(100_000))
        # What nobody keeps goes within about a second: this long nothing has gone any more.
        del array
        before, since, until = regions(), time.monotonic(), time.monotonic() + 30
        while time.monotonic() < min(since + 3, until):
            time.sleep(0.1)
            if regions() != before:
                before, since = regions(), time.monotonic()
        # So large that malloc gives it pages of its own, which go back at once.
        large = np.full(10_000_000, 1.0 + HOST, "float32")
        place = large.ctypes.data
        out["large"] = counted(large[:200_000], times=2)
        out["registered"] = regions() - before
        del large
        for _ in range(50):
            if regions() <= before:
                break
            time.sleep(0.1)
        out["deregistered"] = regions() <= before
        for name in ("first", "second"):
            large = np.full(10_000_000, 1.0 + HOST, "float32")
            out[f"{name} at the same place"] = large.ctypes.data == place
            out[f"{name} counted"] = counted(large[:200_000], times=1)
            out[f"{name} value"] = bool((large[:200_000] == 3.0).all())
            if name == "second":
                try:
                    large.resize(100, refcheck=False)
                except ValueError as error:
                    out["resize"] = str(error)
                out["resized"] = counted(np.resize(large, 300_000), times=1)
            del large
        kept = np.ones(100_000, "float32")
        mdas.allreduce(kept)
        out["kept"] = regions()
        mdas.barrier()
    out["left"] = left()
    with job("verbs") as mdas:
        again = mdas.allreduce(kept, op="average")
        out["again"] = bool((again == 2.0).all())
    return out


@scenario
def read_only() -> Result:
    """An input that is mapped for reading only, which the device cannot be told of."""
    import numpy as np

    from mdas import session

    os.environ["MDAS_LOG"] = "debug"
    file = Path(tempfile.gettempdir()) / "mapped"
    np.arange(300_000, dtype="float32").tofile(file)
    out: Result = {"exact": [], "copied": []}
    for transport in ("verbs", "tcp"):
        with job(transport) as mdas:
            mapped = np.memmap(file, "float32", mode="r")
            engine = session.current().engine
            for _ in range(2):
                before = engine.counters()["bytes_copied"]
                total = mdas.allreduce(mapped, out=np.empty(300_000, "float32"))
                out["copied"].append(engine.counters()["bytes_copied"] - before)
                out["exact"].append(bool(np.array_equal(total, np.arange(300_000, dtype="float32") * 2)))
                both = mdas.allgather(mapped)
                out["exact"].append(bool(np.array_equal(both, [mapped, mapped])))
            mdas.barrier()
    out["left"] = left()
    out["log"] = (Path(os.environ["LAB_OUT"]) / "read_only.log").read_text()
    return out


@scenario
def held() -> Result:
    """Two jobs after each other, of which everything that a script can hold is held."""
    import numpy as np

    from mdas import session

    kept: list[Any] = []
    out: Result = {"left": [], "exact": []}
    for transport in ("verbs", "verbs", "tcp", "tcp"):
        with job(transport) as mdas:
            group = mdas.new_group([1, 0])
            values = np.ones(100_000, "float16")
            work = mdas.allreduce(values, group=group, async_op=True)
            work.wait()
            kept += [group, work, values, session.current()]
            out["exact"].append(bool((values == 2.0).all()))
            mdas.barrier()
        out["left"].append(left())
    return out


@scenario
def mixed() -> Result:
    """Three ranks, of which the last one, on host 1, has no RDMA; what ranks 0 and 1 found."""
    program = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import guest; guest.third()"
    third = subprocess.Popen([sys.executable, "-c", program]) if HOST == 1 else None
    found = mixed_rank(HOST, third is not None)
    if third is not None and third.wait(60) != 0:
        raise RuntimeError(f"the third rank ended with {third.returncode}")
    return found


def third() -> None:
    """For `mixed`."""
    os.environ["MDAS_IB_DEVICE"] = "none"
    mixed_rank(2, True)


def mixed_rank(rank: int, shares: bool) -> Result:
    """The same on all three ranks. `shares`: another one is on this host."""
    import numpy as np

    import mdas
    from mdas import _core, session

    local = {"LOCAL_RANK": str(int(rank == 2)), "LOCAL_WORLD_SIZE": str(1 + shares)}
    os.environ.update(
        {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": str(PORT)} | local
    )
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
def broken_groups() -> Result:
    """Groups of two ranks that break while MiBs are in flight in both directions."""
    return breaks(HOST, 2) | {"left": left()}


@scenario
def broken_groups_of_three() -> Result:
    """The same with a third rank, on host 1."""
    program = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import guest; guest.breaks(2, 3)"
    third = subprocess.Popen([sys.executable, "-c", program]) if HOST == 1 else None
    out = breaks(HOST, 3)
    if third is not None and third.wait(60) != 0:
        raise RuntimeError(f"the third rank ended with {third.returncode}")
    return out | {"left": left()}


def breaks(rank: int, size: int) -> Result:
    """The same on all ranks: what broke each group, and whether all others went on, and nobody wrote afterwards."""
    import numpy as np

    import mdas
    from mdas.errors import Error

    together = (size - 1) if rank > 0 else 1
    local = {"LOCAL_RANK": str(int(rank == 2)), "LOCAL_WORLD_SIZE": str(together)}
    os.environ.update(
        {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": str(PORT)}
    )
    # Of two ranks on one host each would take another device, and those do not reach each other.
    os.environ.update(local | {"MDAS_IB_DEVICE": "rxe0"})
    mdas.init(transport="verbs", timeout=60.0)
    everybody = list(range(size))
    other = mdas.new_group(everybody)
    kinds: list[str] = []
    marked, exact = [], True
    for turn in range(24 if size == 2 else 12):
        group = mdas.new_group(everybody)
        timeout = 0.7 if turn % 4 == 3 else None  # then rank 1 calls nothing until the others have given up
        large = np.ones((400_000, 1_500_000, 60_000)[turn % 3], "float32")
        odd = np.ones(30_000 + 1000 * (rank == size - 1 and timeout is None), "float32")
        raised = ""
        try:
            if timeout is not None and rank == 1:
                time.sleep(1.5)
            works = []
            for array in (large, large.copy(), odd):
                works.append(mdas.allreduce(array, group=group, async_op=True, timeout=timeout))
                marked.append((array, works[-1]))
                time.sleep(0.02 * (turn % 5) * (1 + rank))
            for work in works:
                work.wait(60)
        except Error as error:
            raised = type(error).__name__
        kinds.append(raised)
        for array, work in marked[-3:]:
            with contextlib.suppress(Error):
                work.wait(60)
            array[:] = -1
        for usable in (other, None):
            values = np.arange(50_000, dtype="float32") * (1 + rank)
            mdas.allreduce(values, group=usable)
            total = size * (size + 1) // 2
            exact = exact and np.array_equal(values, np.arange(50_000, dtype="float32") * total)
    mdas.barrier()
    untouched = all(bool((array == -1).all()) for array, _ in marked)
    mdas.shutdown()
    return {"kinds": kinds, "exact": bool(exact), "untouched": untouched}


@scenario
def forks() -> Result:
    """Children that are forked while a job is up: one calls mdas, one uses the memory that it was given."""
    import numpy as np

    from mdas.errors import ClosedError

    def child(work: Callable[[], None]) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                work()
            finally:
                os._exit(0 if sys.exc_info()[0] is None else 1)
        return os.waitpid(pid, 0)[1]

    with job("verbs") as mdas:
        values = np.full(300_000, 1.0 + HOST, "float32")
        total = mdas.allreduce(values, out=np.empty_like(values))

        def call() -> None:
            try:
                mdas.allreduce(np.ones(10, "float32"))
            except ClosedError:
                os._exit(7)

        def write() -> None:
            values[:] = 0
            total[:] = 0
            _ = [{"number": number} for number in range(20_000)]

        ended = [child(call), child(write)]
        mdas.barrier()
        again = mdas.allreduce(values, out=total)
        return {"ended": ended, "exact": bool((again == 3.0).all())}


@scenario
def loss() -> Result:
    """The network loses packets, which the devices send again."""
    import numpy as np

    out: Result = {}
    for percent in (1, 5):
        tc("add", "netem", "loss", f"{percent}%")
        try:
            with job("verbs", timeout=120.0) as mdas:
                values = np.arange(200_000, dtype="float32") * (1 + HOST)
                mdas.allreduce(values)
                out[str(percent)] = bool(np.array_equal(values, np.arange(200_000, dtype="float32") * 3))
        finally:
            tc("del")
    return out


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
    out["log"] = (Path(os.environ["LAB_OUT"]) / "families.log").read_text()
    return out


@scenario
def killed() -> Result:
    """Rank 1 is killed while rank 0 waits for it. Then both start anew."""
    import numpy as np

    values = np.ones(100_000, "float32")
    if HOST == 1:
        child = os.fork()
        if child == 0:
            with job("verbs") as mdas:
                mdas.allreduce(values)
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        out: Result = {}
        alone()  # ranks count how often they have joined, and rank 0 is at its second time
    else:
        out = {}
        from mdas.errors import PeerLostError

        with job("verbs") as mdas:
            mdas.allreduce(values)
            start = time.monotonic()
            try:
                mdas.allreduce(values)
            except PeerLostError as error:
                out = {"error": str(error), "seconds": time.monotonic() - start}
        out["left"] = left()
    with job("verbs") as mdas:
        out["again"] = float(mdas.allreduce(np.ones(100_000, "float32"))[-1])
    out["after"] = left()
    return out


@scenario
def stopped() -> Result:
    """Rank 1 is stopped in the middle of allreduces, and so can neither write on nor say that it will not."""
    import numpy as np

    from mdas.errors import Error

    values = np.ones(2_000_000, "float32")
    out = Result()
    if HOST == 1:
        child = os.fork()
        if child == 0:
            with job("verbs") as mdas:
                mdas.allreduce(values)
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSTOP)).start()
                while True:
                    mdas.allreduce(values)
        os.waitpid(child, os.WUNTRACED)
        time.sleep(10)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    else:
        with job("verbs", timeout=3.0) as mdas:
            mdas.allreduce(values)
            try:
                while True:
                    before = time.monotonic()
                    mdas.allreduce(values)
            except Error as error:
                out = {"error": str(error), "kind": type(error).__name__, "seconds": time.monotonic() - before}
    return out | {"left": left()}


@scenario
def link_down() -> Result:
    """The link of host 1 goes down for longer than the devices try, in the middle of allreduces."""
    import numpy as np

    from mdas.errors import Error

    os.environ.update(MDAS_IB_TIMEOUT="14", MDAS_IB_RETRY_COUNT="3")
    values, out = np.ones(2_000_000, "float32"), Result()
    with job("verbs", timeout=60.0) as mdas:
        mdas.allreduce(values)
        cut = threading.Timer(0.5, lambda: subprocess.run(["ip", "link", "set", NIC, "down"], check=True, timeout=20))
        if HOST == 1:
            cut.start()
        start = time.monotonic()
        try:
            while time.monotonic() - start < 90:
                mdas.allreduce(values)
        except Error as error:
            out = {"error": str(error), "kind": type(error).__name__, "seconds": time.monotonic() - start}
        cut.join(30) if HOST == 1 else None
    if HOST == 1:
        subprocess.run(["ip", "link", "set", NIC, "up"], check=True, timeout=20)
    out["left"] = left()
    with job("verbs") as mdas:
        out["again"] = float(mdas.allreduce(np.ones(100_000, "float32"))[-1])
    out["after"] = left()
    return out


@scenario
def port_flaps() -> Result:
    """The port of host 1 goes down and comes up again between two allreduces. (Soft-RoCE gives a connection up at once
    if it has something to send meanwhile; adapters send again.)
    """
    import numpy as np

    os.environ["MDAS_LOG"] = "info"
    with job("verbs", timeout=60.0) as mdas:
        values = np.arange(1_000_000, dtype="float32") * (1 + HOST)
        before = mdas.allreduce(values, out=np.empty_like(values))
        mdas.barrier()
        time.sleep(1.0)
        if HOST == 1:
            for state in ("down", "up"):
                subprocess.run(["ip", "link", "set", NIC, state], check=True, timeout=20)
                time.sleep(2.0)
        else:
            time.sleep(4.0)
        after = mdas.allreduce(values, out=np.empty_like(values))
        exact = np.array_equal(before, after) and np.array_equal(after, np.arange(1_000_000, dtype="float32") * 3)
    log = Path(os.environ["LAB_OUT"]) / "port_flaps.log"
    return {"exact": bool(exact), "left": left(), "log": log.read_text()}


@scenario
def memlock() -> Result:
    """Without the right to lock memory, and 64 KiB of it allowed; and that TCP is taken instead where it may be."""
    out: Result = {}
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    program = "import sys; sys.path.insert(0, {!r}); import guest; guest.print_init({!r})"
    for transport in ("verbs", "tcp"):
        words = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", sys.executable, "-c"]
        words.append(program.format(str(Path(__file__).parent), transport))
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
        out[transport] = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-500:]
    return out


def print_init(transport: str) -> None:
    """For `memlock`: joins, adds up, and says how that went."""
    import numpy as np

    from mdas.errors import Error

    try:
        with job(transport, timeout=30.0) as mdas:
            print("sum", float(mdas.allreduce(np.ones(1_000_000, "float32"))[-1]))
    except Error as error:
        print(f"{type(error).__name__}: {error}")


@scenario
def doctor() -> Result:
    """What `mdas doctor` says."""
    words = [sys.executable, "-m", "mdas.cli", "doctor"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    return {"text": done.stdout, "status": done.returncode}


@scenario
def training() -> Result:
    """The example of the README over verbs and over TCP: delayed, predicted by the sketch."""
    import torch

    sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
    import fashion_data
    import fashion_mnist

    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    fashion_mnist.arguments(parser)
    options = parser.parse_args(["--epochs", "1", "--batch", "8", "--warmup", "10", "--quiet"])
    with tempfile.TemporaryDirectory() as folder:
        whole = fashion_data.load(Path(folder))
    # Of its 60 000 pictures enough for 10 synchronous steps and 40 delayed ones.
    first = fashion_data.Split(whole.train.images[:800], whole.train.labels[:800])
    data = fashion_data.Data(first, whole.test, whole.source)
    out: Result = {"source": whole.source}
    for transport in ("verbs", "tcp"):
        done: list[int] = []
        with job(transport, timeout=120.0) as mdas:
            model = fashion_mnist.train(options, data, after_step=lambda step, model, done=done: done.append(step))
            mdas.barrier()
            state = model.state_dict()  # the base weights, with what is in flight applied
            out[transport] = digest(*(tensor.numpy() for tensor in state.values()))
            out[f"{transport} steps"] = len(done)
    return out


def main(names: list[str]) -> int:
    """Each scenario in a process of its own, both hosts in the same order."""
    folder = Path(os.environ["LAB_OUT"])
    if len(names) == 1:
        (folder / f"{names[0]}.json").write_text(json.dumps(SCENARIOS[names[0]](), indent=1))
        return 0
    status = 0
    for name in names:
        start = time.monotonic()
        with (folder / f"{name}.log").open("w") as log:
            try:
                code = subprocess.run(
                    [sys.executable, __file__, name],
                    stdout=log,
                    stderr=log,
                    timeout=LIMIT.get(name, 300.0),
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code = 124
        print(f"{name}: {code} after {time.monotonic() - start:.0f} s", flush=True)
        status = status or code
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
