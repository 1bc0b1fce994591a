"""One check per row of the table in docs/torch-backend.md; each runs on mdas and, where it can, on Gloo.

A check does the same on any group and returns what came out, which must be equal bit for bit.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Check = Callable[[Any], list[torch.Tensor]]

ALLOWED: dict[str, Check] = {}
"""By the name of the table's row."""
ONLY_HERE: set[str] = set()
"""Rows whose checks know the right values themselves, since Gloo cannot do it."""
REFUSED: dict[str, tuple[Check, type[Exception], str]] = {}
"""Check, error, and what its message must contain."""


def row(name: str, *, only_here: bool = False) -> Callable[[Check], Check]:
    def keep(check: Check) -> Check:
        ALLOWED[name] = check
        if only_here:
            ONLY_HERE.add(name)
        return check

    return keep


def refused(name: str, error: type[Exception], text: str) -> Callable[[Check], Check]:
    def keep(check: Check) -> Check:
        REFUSED[name] = (check, error, text)
        return check

    return keep


def data(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Every rank's own, small whole numbers, so that sums are exact in any order."""
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return ((numbers * 7 + rank * 3) % 5 + 1).to(dtype)


def me(group: Any) -> tuple[int, int]:
    return dist.get_rank(group), dist.get_world_size(group)


@row("broadcast")
def broadcast(group: Any) -> list[torch.Tensor]:
    rank, size = me(group)
    tensors = [data(rank, 3, 4, dtype=d) for d in (torch.float32, torch.int64, torch.int8, torch.uint8)]
    for tensor in tensors:
        dist.broadcast(tensor, size - 1, group)
    assert torch.equal(tensors[0], data(size - 1, 3, 4))
    return tensors


def reduced(group: Any, op: Any, *dtypes: torch.dtype) -> list[torch.Tensor]:
    rank, _ = me(group)
    tensors = [data(rank, 4, 5, dtype=dtype) for dtype in dtypes]
    for tensor in tensors:
        dist.all_reduce(tensor, op, group)
    return tensors


def stacked(group: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.stack([data(rank, 4, 5, dtype=dtype) for rank in range(dist.get_world_size(group))])


@row("all_reduce SUM")
def sums(group: Any) -> list[torch.Tensor]:
    floats = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
    results = reduced(group, dist.ReduceOp.SUM, *floats, torch.int8, torch.uint8, torch.int32, torch.int64)
    assert torch.equal(results[0], stacked(group).sum(0))
    return results


@row("all_reduce AVG", only_here=True)
def averages(group: Any) -> list[torch.Tensor]:
    (result,) = reduced(group, dist.ReduceOp.AVG, torch.float32)
    assert torch.equal(result, stacked(group).sum(0) / dist.get_world_size(group))
    return [result]


@row("all_reduce PRODUCT, MIN, MAX")
def products(group: Any) -> list[torch.Tensor]:
    dtypes = (torch.float32, torch.int8, torch.int64)
    ops = (dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
    results = [result for op in ops for result in reduced(group, op, *dtypes)]
    assert torch.equal(results[0], stacked(group).prod(0)) and torch.equal(results[3], stacked(group).amin(0))
    return results


@row("all_reduce BAND, BOR, BXOR")
def bits(group: Any) -> list[torch.Tensor]:
    ops = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
    return [result for op in ops for result in reduced(group, op, torch.int32, torch.uint8, torch.int8)]


@row("all_reduce of bool, int16, complex128", only_here=True)
def other_types(group: Any) -> list[torch.Tensor]:
    rank, _ = me(group)
    flags = torch.tensor([rank == 0, False, True])
    dist.all_reduce(flags, group=group)
    assert flags.tolist() == [True, False, True]
    (shorts, numbers) = reduced(group, dist.ReduceOp.SUM, torch.int16, torch.complex128)
    assert torch.equal(shorts, stacked(group, torch.int16).sum(0).to(torch.int16))
    assert torch.equal(numbers.real, stacked(group, torch.float64).sum(0))
    return [flags, shorts, numbers]


@row("all_reduce PREMUL_SUM", only_here=True)
def scaled(group: Any) -> list[torch.Tensor]:
    rank, _ = me(group)
    tensor = data(rank, 4, 5)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5), group)
    assert torch.equal(tensor, stacked(group).sum(0) / 2)
    return [tensor]


@refused("all_reduce BXOR of floating point", TypeError, "integers")
def bits_of_floats(group: Any) -> list[torch.Tensor]:
    return reduced(group, dist.ReduceOp.BXOR, torch.float32)


@refused("all_reduce AVG of integers", TypeError, "SUM")
def integer_average(group: Any) -> list[torch.Tensor]:
    return reduced(group, dist.ReduceOp.AVG, torch.int64)


@row("reduce")
def reduce(group: Any) -> list[torch.Tensor]:
    rank, size = me(group)
    tensor = data(rank, 4, 5)
    dist.reduce(tensor, size - 1, group=group)
    if rank != size - 1:
        return []  # Gloo leaves intermediate sums here
    assert torch.equal(tensor, stacked(group).sum(0))
    return [tensor]


@row("all_gather")
def all_gather(group: Any) -> list[torch.Tensor]:
    rank, size = me(group)
    results = [torch.empty(2, 3, dtype=torch.int8) for _ in range(size)]
    dist.all_gather(results, data(rank, 2, 3, dtype=torch.int8), group)
    return results


@row("broadcast, all_gather of any type", only_here=True)
def moved_types(group: Any) -> list[torch.Tensor]:
    rank, size = me(group)
    everything = []
    for dtype in (torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn, torch.uint16):
        results = [torch.empty(2, 3, dtype=dtype) for _ in range(size)]
        dist.all_gather(results, data(rank, 2, 3).to(dtype), group)
        sent = data(rank, 2, 3).to(dtype)
        dist.broadcast(sent, 1, group)
        for other, result in enumerate(results):
            assert torch.equal(result.view(torch.uint8), data(other, 2, 3).to(dtype).view(torch.uint8))
        assert torch.equal(sent.view(torch.uint8), results[1].view(torch.uint8))
        everything += results
    return everything


@row("all_gather of different lengths", only_here=True)
def uneven_all_gather(group: Any) -> list[torch.Tensor]:
    rank, size = me(group)
    results = [torch.empty(1 + 2 * other) for other in range(size)]
    dist.all_gather(results, data(rank, 1 + 2 * rank), group)
    assert all(torch.equal(result, data(other, 1 + 2 * other)) for other, result in enumerate(results))
    return results


@row("all_gather_into_tensor")
def all_gather_into_tensor(group: Any) -> list[torch.Tensor]:
    rank, size = me(group)
    flat, deep = torch.empty(3 * size, 2), torch.empty(size, 3, 2)
    dist.all_gather_into_tensor(flat, data(rank, 3, 2), group)
    if dist.get_backend(group) == "mdas":  # Gloo wants the other shape
        dist.all_gather_into_tensor(deep, data(rank, 3, 2), group)
        assert torch.equal(deep.view(-1, 2), torch.cat([data(other, 3, 2) for other in range(size)]))
    whole = torch.zeros(3 * size, 2)
    own = whole[3 * rank : 3 * rank + 3].copy_(data(rank, 3, 2))
    dist.all_gather_into_tensor(whole, own, group)
    assert torch.equal(whole, flat)
    return [flat]


@row("all_gather_single, reduce_scatter_single")
def newer_names(group: Any) -> list[torch.Tensor]:
    rank, size = me(group)
    whole, part = torch.empty(2 * size, 3), torch.empty(2, 3)
    dist.all_gather_single(whole, data(rank, 2, 3), group)
    dist.reduce_scatter_single(part, data(rank, 2 * size, 3), group=group)
    assert torch.equal(whole, torch.cat([data(other, 2, 3) for other in range(size)]))
    return [whole, part]


@row("gather")
def gather(group: Any) -> list[torch.Tensor]:
    rank, size = me(group)
    results = [torch.empty(2, 3) for _ in range(size)] if rank == size - 1 else None
    dist.gather(data(rank, 2, 3), results, size - 1, group)
    return results or []


@row("gather_single", only_here=True)
def gather_single(group: Any) -> list[torch.Tensor]:
    rank, size = me(group)
    result = torch.empty(2 * size, 3) if rank == size - 1 else None
    dist.gather_single(data(rank, 2, 3), result, size - 1, group)
    assert result is None or torch.equal(result, torch.cat([data(other, 2, 3) for other in range(size)]))
    return [] if result is None else [result]


@row("scatter")
def scatter(group: Any) -> list[torch.Tensor]:
    rank, size = me(group)
    result = torch.empty(2, 3)
    dist.scatter(result, [data(10 + other, 2, 3) for other in range(size)] if rank == 0 else None, 0, group)
    assert torch.equal(result, data(10 + rank, 2, 3))
    return [result]


@row("reduce_scatter")
def reduce_scatter(group: Any) -> list[torch.Tensor]:
    rank, size = me(group)
    result = torch.empty(2, 3)
    dist.reduce_scatter(result, [data(rank + part, 2, 3) for part in range(size)], group=group)
    assert torch.equal(result, sum(data(other + rank, 2, 3) for other in range(size)))
    return [result]


@row("reduce_scatter of different lengths", only_here=True)
def uneven_reduce_scatter(group: Any) -> list[torch.Tensor]:
    rank, size = me(group)
    result = torch.empty(1 + rank, dtype=torch.int8)
    parts = [data(rank, 1 + part, dtype=torch.int8) for part in range(size)]
    dist.reduce_scatter(result, parts, group=group)
    assert torch.equal(result, sum(data(other, 1 + rank, dtype=torch.int8) for other in range(size)))
    return [result]


@row("reduce_scatter_tensor")
def reduce_scatter_tensor(group: Any) -> list[torch.Tensor]:
    rank, size = me(group)
    result, biggest = torch.empty(2, 3), torch.empty(2, 3)
    dist.reduce_scatter_tensor(result, data(rank, 2 * size, 3), group=group)
    dist.reduce_scatter_tensor(biggest, data(rank, 2 * size, 3), dist.ReduceOp.MAX, group)
    whole = data(rank, 2 * size, 3)
    own = whole[2 * rank : 2 * rank + 2]
    dist.reduce_scatter_tensor(own, whole, group=group)
    assert torch.equal(own, result)
    return [result, biggest]


@row("all_to_all", only_here=True)
def all_to_all(group: Any) -> list[torch.Tensor]:
    rank, size = me(group)
    results = [torch.empty(1 + other) for other in range(size)]
    dist.all_to_all(results, [data(10 * rank + other, 1 + rank) for other in range(size)], group)
    assert all(torch.equal(result, data(10 * other + rank, 1 + other)) for other, result in enumerate(results))
    return results


@row("all_to_all_single")
def all_to_all_single(group: Any) -> list[torch.Tensor]:
    rank, size = me(group)
    even, uneven = torch.empty(2 * size, 3), torch.empty(sum(other for other in range(size)), 2)
    dist.all_to_all_single(even, data(rank, 2 * size, 3), group=group)
    sizes = list(range(size))
    dist.all_to_all_single(uneven, data(rank, rank * size, 2), sizes, [rank] * size, group=group)
    return [even, uneven]


@row("barrier")
def barrier(group: Any) -> list[torch.Tensor]:
    dist.barrier(group)
    work = dist.barrier(group, async_op=True)
    work.wait()
    return []


@row("monitored_barrier")
def monitored_barrier(group: Any) -> list[torch.Tensor]:
    dist.monitored_barrier(group, timeout=timedelta(seconds=60))
    dist.monitored_barrier(group, timeout=timedelta(seconds=60), wait_all_ranks=True)
    return []


@row("send, recv")
def messages(group: Any) -> list[torch.Tensor]:
    rank, size = me(group)
    previous, following = (rank - 1) % size, (rank + 1) % size
    result = torch.empty(2, 3, dtype=torch.int16)
    own = data(rank, 2, 3, dtype=torch.int16)
    if rank % 2 == 0:
        dist.send(own, following, group)
        assert dist.recv(result, previous, group) == previous
    else:
        dist.recv(result, previous, group)
        dist.send(own, following, group)
    assert torch.equal(result, data(previous, 2, 3, dtype=torch.int16))
    return [result]


@row("isend, irecv with tags")
def tagged(group: Any) -> list[torch.Tensor]:
    rank, size = me(group)
    previous, following = (rank - 1) % size, (rank + 1) % size
    works = [dist.isend(data(100 * rank + tag, 4), following, group, tag) for tag in (1, 2, 2)]
    results = [torch.empty(4) for _ in range(3)]
    # In another order than they were sent; those of one tag come in the order of sending.
    works += [dist.irecv(result, previous, group, tag) for tag, result in zip((2, 1, 2), results, strict=True)]
    for work in works:
        work.wait()
    assert torch.equal(results[1], data(100 * previous + 1, 4))
    return results


@row("batch_isend_irecv")
def batch(group: Any) -> list[torch.Tensor]:
    rank, size = me(group)
    previous, following = (rank - 1) % size, (rank + 1) % size
    result = torch.empty(4)
    operations = [
        dist.P2POp(dist.irecv, result, previous, group),
        dist.P2POp(dist.isend, data(rank, 4), following, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [result]


@refused("recv from any rank", NotImplementedError, "src=")
def any_source(group: Any) -> list[torch.Tensor]:
    dist.recv(torch.empty(1), group=group)
    return []


@row("coalesced all_reduce, all_gather, reduce_scatter", only_here=True)
def coalesced(group: Any) -> list[torch.Tensor]:
    rank, size = me(group)
    tensors = [data(rank + n, 4, 5) for n in range(3)]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    manager.wait()
    assert torch.equal(tensors[0], stacked(group).sum(0))
    whole, parts = [torch.empty(2 * size) for _ in range(2)], [torch.empty(2) for _ in range(2)]
    with dist._coalescing_manager(group):
        for n, tensor in enumerate(whole):
            dist.all_gather_into_tensor(tensor, data(rank + n, 2), group)
    with dist._coalescing_manager(group):
        for n, part in enumerate(parts):
            dist.reduce_scatter_tensor(part, data(rank + n, 2 * size), group=group)
    assert torch.equal(whole[1], torch.cat([data(other + 1, 2) for other in range(size)]))
    assert torch.equal(parts[1], sum(data(other + 1, 2 * size)[2 * rank : 2 * rank + 2] for other in range(size)))
    with dist._coalescing_manager(group, torch.device("cpu"), async_ops=True) as manager:
        late = [data(rank, 3) for _ in range(2)]
        for tensor in late:
            dist.broadcast(tensor, 0, group, async_op=True)
    manager.wait()
    assert all(torch.equal(tensor, data(0, 3)) for tensor in late)
    return [*tensors, *whole, *parts]


@row("all_reduce_coalesced, all_gather_coalesced")
def by_lists(group: Any) -> list[torch.Tensor]:
    rank, size = me(group)
    summed = [data(rank + n, 4, 5) for n in range(2)]
    dist.all_reduce_coalesced(summed, group=group)
    assert torch.equal(summed[0], stacked(group).sum(0))
    gathered = [[torch.empty(2), torch.empty(3)] for _ in range(size)]
    dist.all_gather_coalesced(gathered, [data(rank, 2), data(rank, 3)], group)
    late = [[torch.empty(2), torch.empty(3)] for _ in range(size)]
    future = dist.all_gather_coalesced(late, [data(rank, 2), data(rank, 3)], group, async_op=True)
    future.wait()
    assert torch.equal(late[size - 1][1], data(size - 1, 3))
    return [*summed, *(tensor for row in gathered for tensor in row)]


@row("functional collectives, coalesced")
def functional_lists(group: Any) -> list[torch.Tensor]:
    from torch.distributed import _functional_collectives as functions

    rank, size = me(group)
    summed = functions.all_reduce_coalesced([data(rank, 4, 5), data(rank, 2)], "sum", group)
    gathered = functions.all_gather_into_tensor_coalesced([data(rank, 2), data(rank, 3)], group)
    parts = functions.reduce_scatter_tensor_coalesced([data(rank, 2 * size), data(rank, size)], "sum", [0, 0], group)
    results = [tensor + 0 for tensor in (*summed, *gathered, *parts)]
    assert torch.equal(results[0], stacked(group).sum(0))
    return results


@refused("split_group", NotImplementedError, "new_group")
def split(group: Any) -> list[torch.Tensor]:
    dist.split_group(group, [list(range(dist.get_world_size(group)))])
    return []


@refused("shrink_group", TypeError, "does not support shrinking")
def shrink(group: Any) -> list[torch.Tensor]:
    dist.shrink_group([dist.get_world_size(group) - 1], group)
    return []


@refused("completion hooks", NotImplementedError, "get_future")
def hooks(group: Any) -> list[torch.Tensor]:
    group._register_on_completion_hook(lambda work: None)
    return []


@refused("pending works of a group", NotImplementedError, "wait for the works")
def pending(group: Any) -> list[torch.Tensor]:
    group._wait_for_pending_works()
    return []


@refused("sequence numbers of a group", NotImplementedError, "MismatchError")
def sequence(group: Any) -> list[torch.Tensor]:
    group._get_sequence_number_for_group()
    return []


@row("object collectives")
def objects(group: Any) -> list[torch.Tensor]:
    rank, size = me(group)
    everything: list[Any] = [None] * size
    dist.all_gather_object(everything, {"rank": rank, "text": "x" * (10 + rank)}, group)
    assert everything == [{"rank": other, "text": "x" * (10 + other)} for other in range(size)]
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(("from", rank), gathered, 0, group)
    assert gathered == ([("from", other) for other in range(size)] if rank == 0 else None)
    sent: list[Any] = [{"a": 1}, "b"] if rank == 1 else [None, None]
    dist.broadcast_object_list(sent, 1, group)
    assert sent == [{"a": 1}, "b"]
    part: list[Any] = [None]
    dist.scatter_object_list(part, [f"for {other}" for other in range(size)] if rank == 0 else None, 0, group)
    assert part == [f"for {rank}"]
    if rank == 0:
        dist.send_object_list(["hello", 2], 1, group)
    elif rank == 1:
        received: list[Any] = [None, None]
        dist.recv_object_list(received, 0, group)
        assert received == ["hello", 2]
    return []


@row("strided tensors", only_here=True)
def strided(group: Any) -> list[torch.Tensor]:
    rank, size = me(group)
    tensor = data(rank, 5, 4).t()
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, sum(data(other, 5, 4) for other in range(size)).t())
    column = data(rank, 4, 3)
    dist.broadcast(column[:, 1], 1, group)
    expected = data(rank, 4, 3)
    expected[:, 1] = data(1, 4, 3)[:, 1]
    assert torch.equal(column, expected)
    wide = torch.zeros(size, 6)
    dist.all_gather_into_tensor(wide[:, ::2], data(rank, 3), group)
    assert torch.equal(wide[:, ::2], torch.stack([data(other, 3) for other in range(size)]))
    assert not wide[:, 1::2].any()
    return [tensor, column, wide]


@refused("sparse tensors", TypeError, "to_dense")
def sparse(group: Any) -> list[torch.Tensor]:
    dist.all_reduce(torch.eye(3).to_sparse(), group=group)
    return []


@row("asynchronous work: wait, is_completed, get_future")
def futures(group: Any) -> list[torch.Tensor]:
    rank, _ = me(group)
    tensors = [data(rank + n, 4, 5) for n in range(4)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    doubled = works[3].get_future().then(lambda future: [2 * tensor for tensor in _listed(future.value())])
    works[0].wait()
    assert works[0].is_completed()
    values = [_listed(work.get_future().wait())[0] for work in works[1:3]]
    assert torch.equal(values[0], tensors[1])
    return [*tensors, *doubled.wait()]


def _listed(value: Any) -> list[torch.Tensor]:
    return value if isinstance(value, list) else [value]


@row("functional collectives")
def functional(group: Any) -> list[torch.Tensor]:
    from torch.distributed import _functional_collectives as functions

    rank, size = me(group)
    summed = functions.all_reduce(data(rank, 4, 5), "sum", group) + 0
    gathered = functions.all_gather_tensor(data(rank, 2, 3), 0, group) + 0
    part = functions.reduce_scatter_tensor(data(rank, 2 * size, 3), "sum", 0, group) + 0
    moved = functions.all_to_all_single(data(rank, 2 * size), None, None, group) + 0
    assert torch.equal(summed, stacked(group).sum(0))
    return [summed, gathered, part, moved]


@row("new_group")
def sub_groups(group: Any) -> list[torch.Tensor]:
    rank, size = me(group)
    backend = dist.get_backend(group)
    tensor = data(rank, 3)
    for members in ([0, 1], [1, 0], [size - 1], list(range(size))):
        part = dist.new_group(members, backend=backend)
        if rank in members:
            dist.all_reduce(tensor, group=part)
            dist.destroy_process_group(part)
    return [tensor]


def run_all() -> dict[str, str]:
    """On every rank: row -> "" or what went wrong."""
    import mdas.torch_backend  # noqa: F401 - registers the backend

    dist.init_process_group("mdas", timeout=timedelta(seconds=60))
    here, gloo = dist.group.WORLD, dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    outcome = {}
    for name, check in ALLOWED.items():
        try:
            results = check(here)
            expected = results if name in ONLY_HERE else check(gloo)
            assert len(results) == len(expected)
            for result, other in zip(results, expected, strict=True):
                torch.testing.assert_close(result, other, rtol=0, atol=0)
            outcome[name] = ""
        except (AssertionError, RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError):
            outcome[name] = traceback.format_exc()
    for name, (check, error, text) in REFUSED.items():
        try:
            check(here)
            outcome[name] = "was not refused"
        except error as refusal:
            outcome[name] = "" if text in str(refusal) else f"does not say {text!r}: {refusal}"
    dist.destroy_process_group()
    return outcome
