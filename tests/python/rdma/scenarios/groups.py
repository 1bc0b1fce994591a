"""Groups that break while MiBs are in flight in both directions."""

from __future__ import annotations

import contextlib
import os
import time

from host import HOST, Result, be_rank, left, rank_2, scenario


@scenario
def broken_groups() -> Result:
    """Groups of two ranks that break while MiBs are in flight in both directions."""
    return breaks(HOST, 2) | {"left": left()}


@scenario
def broken_groups_of_three() -> Result:
    """The same with a third rank, on host 1."""
    with rank_2("groups", "breaks(2, 3)"):
        out = breaks(HOST, 3)
    return out | {"left": left()}


def breaks(rank: int, size: int) -> Result:
    """The same on all ranks: what broke each group, and whether all others went on, and nobody wrote afterwards."""
    import numpy as np

    import mdas
    from mdas.errors import Error

    be_rank(rank, size, int(rank == 2), (size - 1) if rank > 0 else 1)
    # Of two ranks on one host each would take another device, and those do not reach each other.
    os.environ["MDAS_IB_DEVICE"] = "rxe0"
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
