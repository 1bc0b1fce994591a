"""What networks, hosts and administrators do to a job."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import threading
import time

from host import HOST, Result, alone, job, left, link, logged, program, scenario, tc


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
        cut = threading.Timer(0.5, link, ("down",))
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
        link("up")
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
                link(state)
                time.sleep(2.0)
        else:
            time.sleep(4.0)
        after = mdas.allreduce(values, out=np.empty_like(values))
        exact = np.array_equal(before, after) and np.array_equal(after, np.arange(1_000_000, dtype="float32") * 3)
    return {"exact": bool(exact), "left": left(), "log": logged("port_flaps")}


@scenario
def memlock() -> Result:
    """Without the right to lock memory, and 64 KiB of it allowed; and that TCP is taken instead where it may be."""
    out: Result = {}
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    for transport in ("verbs", "tcp"):
        words = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"]
        words += program("faults", f"print_init({transport!r})")
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
