"""All collectives x element types x edge counts, between real processes, against numpy."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import mdas
import processes

REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda parts: parts.sum(0),
    "average": lambda parts: parts.sum(0) / len(parts),
    "min": lambda parts: parts.min(0),
    "max": lambda parts: parts.max(0),
    "product": lambda parts: parts.prod(0),
}
FLOATS = ["float32", "float64", "float16"]
DTYPES = [*FLOATS, "int32", "int64", "uint8", "bool"]
COUNTS = [0, 1, 2, 3, 5, 64, 1000, 70_001]


def supported(op: str, dtype: str) -> bool:
    """Has the reduction a meaning for the type?"""
    return op in ("min", "max") or (dtype != "bool" and (op != "average" or dtype in FLOATS))


def inputs(dtype: str, count: int, size: int) -> Any:
    """What the ranks contribute, one row each: small integers, whose sums and products are exact in every type."""
    numbers = np.random.default_rng(zlib.crc32(f"{dtype} {count}".encode())).integers(0, 4, (size, count))
    return numbers.astype(dtype)


def expected(op: str, parts: Any) -> Any:
    """The reduction, rounded once to the type of its operands."""
    if op in ("min", "max") or parts.dtype.kind in "iu":
        with np.errstate(over="ignore"):
            return REDUCTIONS[op](parts).astype(parts.dtype)
    return REDUCTIONS[op](parts.astype(np.float64)).astype(parts.dtype)


def cases() -> Iterator[tuple[str, str, int]]:
    """All that are supported."""
    for op, dtype, count in itertools.product(REDUCTIONS, DTYPES, COUNTS):
        if supported(op, dtype):
            yield op, dtype, count


def check(what: str, got: Any, want: Any) -> list[str]:
    """What differs, in words."""
    same = (
        got.dtype == want.dtype
        and got.shape == want.shape
        and np.array_equal(got, want, equal_nan=got.dtype.kind == "f")
    )
    return [] if same else [f"{what}: {got!r} instead of {want!r}"]


def everything() -> list[str]:
    mdas.init(timeout=60)
    rank, size = mdas.rank(), mdas.size()
    wrong = []
    for op, dtype, count in cases():
        parts = inputs(dtype, count, size)
        want = expected(op, parts)
        what = f"allreduce {op} {dtype} {count}"
        array = parts[rank].copy()
        result = mdas.allreduce(array, op)
        assert result is array
        wrong += check(what, array, want)
        array, out = parts[rank].copy(), np.zeros(count, dtype)
        assert mdas.allreduce(array, op, out=out) is out
        wrong += check(f"{what} out of place", out, want) + check(f"{what} input", array, parts[rank])
        parts = inputs(dtype, count * size, size)
        array = parts[rank].copy()
        part = mdas.reduce_scatter(array, op) if count else mdas.reduce_scatter(array, op, out=np.zeros(0, dtype))
        wrong += check(f"reduce_scatter {op} {dtype} {count}", part, expected(op, parts).reshape(size, count)[rank])
        wrong += check(f"reduce_scatter {op} {dtype} {count} input", array, parts[rank])
    for dtype, count in itertools.product(DTYPES, COUNTS):
        parts = inputs(dtype, count, size)
        wrong += check(f"allgather {dtype} {count}", mdas.allgather(parts[rank].copy()), parts)
        for root in range(size):
            array = parts[rank].copy()
            mdas.broadcast(array, root)
            wrong += check(f"broadcast {dtype} {count} from {root}", array, parts[root])
        out = np.zeros(count, dtype)
        mdas.broadcast(parts[rank], size - 1, out=out)
        wrong += check(f"broadcast {dtype} {count} out of place", out, parts[size - 1])
    mdas.barrier()
    mdas.shutdown()
    return wrong


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_collective_equals_numpy(size: int) -> None:
    for result in processes.run(size, everything, timeout=120):
        assert result.value == []


def random_sums() -> list[str]:
    mdas.init(timeout=60)
    rank, size = mdas.rank(), mdas.size()
    digests = []
    for dtype, count in itertools.product(FLOATS, [3, 1000, 200_003]):
        parts = np.random.default_rng(count).standard_normal((size, count)).astype(dtype)
        total = mdas.allreduce(parts[rank].copy())
        exact, absolute = parts.astype(np.longdouble).sum(0), np.abs(parts.astype(np.longdouble)).sum(0)
        # One rounding to float16 after sums in float32; else one rounding per addition.
        allowed = {"float16": 1.01 * 2**-11, "float32": size * 2**-24, "float64": size * 2**-53}[dtype] * absolute
        assert np.all(np.abs(total - exact) <= allowed), dtype
        digests.append(f"{zlib.crc32(total.tobytes()):08x}")
    return digests


def test_sums_are_right_to_rounding_and_the_same_bits_on_all_ranks() -> None:
    first, *others = processes.run(3, random_sums)
    for other in others:
        assert other.value == first.value


def brain_floats() -> list[bool]:
    import torch

    mdas.init(timeout=60)
    rank, size = mdas.rank(), mdas.size()
    right = []
    for count in (1, 1000, 70_001):
        parts = torch.randn(size, count, generator=torch.Generator().manual_seed(count)).bfloat16()
        total = parts[rank].clone()
        mdas.allreduce(total)
        right.append(torch.equal(total, parts.float().sum(0).bfloat16()))
        mean = mdas.allreduce(parts[rank].clone(), "average")
        right.append(torch.equal(mean, (parts.float().sum(0) / size).bfloat16()))
        right.append(torch.equal(mdas.allgather(parts[rank]), parts))
    return right


def test_bfloat16_is_summed_in_float32_and_rounded_once() -> None:
    for result in processes.run(2, brain_floats, timeout=90):
        assert result.value == [True] * 9


def specials() -> list[list[str]]:
    mdas.init(timeout=60)
    rows = [[np.nan, 1.0, -0.0, np.inf], [2.0, np.nan, 0.0, -np.inf]]
    mine = np.array(rows[mdas.rank()], np.float32)
    return [[str(x) for x in mdas.allreduce(mine.copy(), op)] for op in ("min", "max", "sum")]


def test_not_a_number_propagates_and_minus_zero_is_less() -> None:
    for result in processes.run(2, specials):
        assert result.value == [
            ["nan", "nan", "-0.0", "-inf"],
            ["nan", "nan", "0.0", "inf"],
            ["nan", "nan", "0.0", "nan"],
        ]


def handles() -> list[float]:
    mdas.init(timeout=60)
    arrays = [np.full(50_000, 10.0 * k + mdas.rank(), np.float32) for k in range(20)]
    works = [mdas.allreduce(array, async_op=True) for array in arrays]
    urgent = mdas.allreduce(np.array([1.0]), lane="urgent", async_op=True)
    urgent.wait(60)
    # In another order than they were started in.
    for work in reversed(works):
        work.wait(60)
        assert work.done()
        work.wait()  # again
        submitted, started, finished = work.times() or (0, 0, 0)
        assert 0 < submitted <= started <= finished
    return [float(array[-1]) for array in arrays]


def test_handles_may_be_waited_for_in_any_order_and_again() -> None:
    for result in processes.run(2, handles):
        assert result.value == [20.0 * k + 1 for k in range(20)]


def dropped() -> float:
    """Neither handle nor array is kept: the operation still owns its memory."""
    mdas.init(timeout=60)
    for _ in range(50):
        mdas.allreduce(np.ones(100_000, np.float32), async_op=True)
    last = np.ones(1, np.float32)
    mdas.allreduce(last)
    return float(last[0])


def test_memory_outlives_a_dropped_handle() -> None:
    assert [result.value for result in processes.run(2, dropped)] == [2.0, 2.0]


def groups() -> dict[str, Any]:
    mdas.init(timeout=60)
    rank = mdas.rank()
    even, backwards = mdas.new_group([0, 2]), mdas.new_group([2, 1, 0], timeout=30)
    found: dict[str, Any] = {"backwards": mdas.allgather(np.array([rank]), group=backwards).ravel().tolist()}
    found["place"] = backwards.rank
    found["root"] = mdas.broadcast(np.array([rank]), 0, group=backwards).tolist()
    if rank == 1:
        with pytest.raises(mdas.InvalidArgumentError, match=r"rank 1 is not in the group of ranks \[0, 2\]"):
            mdas.allreduce(np.ones(1), group=even)
    else:
        found["even"] = mdas.allreduce(np.array([rank]), group=even).tolist()
    # Several groups at once, in different orders: groups do not wait for each other.
    works = [
        (mdas.allreduce(np.ones(1000), group=g, async_op=True))
        for g in ([backwards, None] if rank else [None, backwards])
    ]
    for work in works:
        work.wait(30)
    for ranks, message in [([0, 7], "rank is 7"), ([1, 1], "twice"), ([], "at least one")]:
        with pytest.raises(ValueError, match=message):
            mdas.new_group(ranks)
    return found


def test_groups_number_their_ranks_as_listed() -> None:
    values = [result.value for result in processes.run(3, groups)]
    assert values == [
        {"backwards": [2, 1, 0], "place": 2, "root": [2], "even": [2]},
        {"backwards": [2, 1, 0], "place": 1, "root": [2]},
        {"backwards": [2, 1, 0], "place": 0, "root": [2], "even": [2]},
    ]
