"""What is registered with the device, how long, and what may use it."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from host import HOST, Result, job, left, logged, scenario


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
    out["log"] = logged("read_only")
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
