"""Groups of ranks, and the collectives on tensors, arrays and buffers.

Every function here is called by all ranks of the group, in the same order per lane. Arrays may
have any shape and number of elements, zero included; the counts must be equal on all ranks.
With `async_op=True` a function returns a `Work` at once: `work.wait(timeout)` waits and raises
what went wrong, `work.done()` does not wait. The memory stays alive as long as the operation
needs it; do not change it before that.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, overload

from mdas import _core, buffers
from mdas._core import Work
from mdas.errors import InvalidArgumentError
from mdas.session import current

Array = TypeVar("Array")
Result = TypeVar("Result")
Op = Literal["sum", "average", "min", "max", "product"]
Lane = Literal["bulk", "urgent"]


@dataclass(frozen=True)
class Group:
    """Some ranks of a world, in the order that gives them their ranks within the group."""

    engine: _core.Engine = field(repr=False)
    id: int
    """Number of the group in the engine; the world is 0."""
    ranks: tuple[int, ...]
    """World ranks of the members."""
    timeout: float | None = None
    """Seconds without progress after which its operations fail; None: as given to `init`."""

    @classmethod
    def world(cls, engine: _core.Engine) -> Group:
        """All ranks."""
        return cls(engine, 0, tuple(range(engine.size)))

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This process's rank within the group.

        Raises:
            InvalidArgumentError: it is not in the group.
        """
        if self.engine.rank not in self.ranks:
            raise InvalidArgumentError(f"rank {self.engine.rank} is not in the group of ranks {list(self.ranks)}")
        return self.ranks.index(self.engine.rank)

    def _options(self, lane: Lane, tag: int, timeout: float | None, async_op: bool) -> dict[str, Any]:
        _check_number("tag", tag, 0xFFFF_FFFF, "tags run from")
        timeout = self.timeout if timeout is None else timeout
        return {"lane": lane, "tag": tag, "timeout": timeout, "blocking": not async_op}


def new_group(ranks: Sequence[int], timeout: float | None = None) -> Group:
    """Makes a group of these world ranks. Its members all call it; others may. Nothing is sent.

    Members that make several groups of the same set of ranks make those in the same order.

    Args:
        ranks: world ranks, in the order of their ranks within the group.
        timeout: seconds without progress after which an operation of the group fails; None: as
            given to `init`.

    Raises:
        TypeError: `ranks` is no sequence of integers.
        InvalidArgumentError: a rank does not exist or is named twice, or there is none, or `timeout` is not positive.
    """
    engine = current().engine
    if not isinstance(ranks, Iterable):
        raise TypeError(f"ranks is {ranks!r}, but must be a sequence of world ranks")
    members = [_check_number("rank", rank, engine.size - 1, "the world has ranks") for rank in ranks]
    if timeout is not None and not 0 < timeout < math.inf:
        raise InvalidArgumentError(f"timeout is {timeout}, but must be a positive, finite number of seconds")
    return Group(engine, engine.new_group(members), tuple(members), timeout)


def _check_number(name: str, value: object, last: int, what: str) -> int:
    """An argument that must be an integer from 0 to `last`."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}: {value!r} is not an integer, but a {type(value).__name__}") from None
    if not 0 <= number <= last:
        raise InvalidArgumentError(f"{name} is {number}, but {what} 0 to {last}")
    return number


def _chosen(group: Group | None) -> Group:
    """The group that is meant, in which this process must be."""
    session = current()
    if group is None:
        return Group.world(session.engine)
    if not isinstance(group, Group):
        raise TypeError(f"group is {group!r}: pass a Group that mdas.new_group() made, or None for all ranks")
    if group.engine is not session.engine:
        raise InvalidArgumentError("the group was made before mdas.shutdown(): make it again with mdas.new_group()")
    _ = group.rank
    return group


def _finish(work: Work, result: Any, async_op: bool) -> Any:
    if async_op:
        return work
    work.wait()
    return result


@overload
def allreduce(
    array: Array,
    op: Op = ...,
    *,
    group: Group | None = ...,
    out: None = ...,
    async_op: Literal[False] = ...,
    timeout: float | None = ...,
    lane: Lane = ...,
    tag: int = ...,
) -> Array: ...
@overload
def allreduce(
    array: object,
    op: Op = ...,
    *,
    group: Group | None = ...,
    out: Result,
    async_op: Literal[False] = ...,
    timeout: float | None = ...,
    lane: Lane = ...,
    tag: int = ...,
) -> Result: ...
@overload
def allreduce(
    array: object,
    op: Op = ...,
    *,
    group: Group | None = ...,
    out: object = ...,
    async_op: Literal[True],
    timeout: float | None = ...,
    lane: Lane = ...,
    tag: int = ...,
) -> Work: ...
def allreduce(
    array: Any,
    op: Op = "sum",
    *,
    group: Group | None = None,
    out: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
    lane: Lane = "bulk",
    tag: int = 0,
) -> Any:
    """Reduces the arrays of all ranks, element by element; every rank gets the same bits.

    float16 and bfloat16 are summed in float32 and rounded once. min and max: NaN propagates,
    -0 < +0. bool: max is a logical or, min a logical and.

    Args:
        array: a contiguous tensor, array or buffer; overwritten with the result unless `out`.
        op: "average" divides by the group's size, for floating-point types.
        group: who takes part; default: all ranks.
        out: where the result goes instead, of the same type and number of elements.
        async_op: return a `Work` at once.
        timeout: seconds without progress after which the operation fails.
        lane: "urgent" for small messages that must not queue behind large ones.
        tag: any number that is equal on all ranks, to have mix-ups noticed.

    Returns:
        `out`, else `array`; a `Work` if `async_op`.

    Raises:
        TypeError: an array is strided, overlapping, read-only or of an unsupported type.
        InvalidArgumentError: (a ValueError) `out` differs in type or size, `op` does not fit the type.
        MismatchError: the ranks did not call the same operation.
        PeerLostError: a rank is gone.
        CollectiveTimeoutError: (a TimeoutError) a rank did not come in time.
    """
    chosen = _chosen(group)
    source, target = _views(array, out)
    if out is not None:
        buffers.check_count("out", target, source.count, "the input has")
    options = chosen._options(lane, tag, timeout, async_op)
    work = chosen.engine.allreduce(chosen.id, source, target, op, **options)
    return _finish(work, array if out is None else out, async_op)


@overload
def broadcast(
    array: Array,
    root: int = ...,
    *,
    group: Group | None = ...,
    out: None = ...,
    async_op: Literal[False] = ...,
    timeout: float | None = ...,
    lane: Lane = ...,
    tag: int = ...,
) -> Array: ...
@overload
def broadcast(
    array: object,
    root: int = ...,
    *,
    group: Group | None = ...,
    out: Result,
    async_op: Literal[False] = ...,
    timeout: float | None = ...,
    lane: Lane = ...,
    tag: int = ...,
) -> Result: ...
@overload
def broadcast(
    array: object,
    root: int = ...,
    *,
    group: Group | None = ...,
    out: object = ...,
    async_op: Literal[True],
    timeout: float | None = ...,
    lane: Lane = ...,
    tag: int = ...,
) -> Work: ...
def broadcast(
    array: Any,
    root: int = 0,
    *,
    group: Group | None = None,
    out: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
    lane: Lane = "bulk",
    tag: int = 0,
) -> Any:
    """Gives every rank the array of rank `root` of the group.

    Arguments, result and errors as for `allreduce`.
    """
    chosen = _chosen(group)
    root = _check_number("root", root, chosen.size - 1, "the group has ranks")
    source, target = _views(array, out)
    if out is not None:
        buffers.check_count("out", target, source.count, "the input has")
    options = chosen._options(lane, tag, timeout, async_op)
    work = chosen.engine.broadcast(chosen.id, source, root, output=target, **options)
    return _finish(work, array if out is None else out, async_op)


@overload
def allgather(
    array: Array,
    *,
    group: Group | None = ...,
    out: None = ...,
    async_op: Literal[False] = ...,
    timeout: float | None = ...,
    lane: Lane = ...,
    tag: int = ...,
) -> Array: ...
@overload
def allgather(
    array: object,
    *,
    group: Group | None = ...,
    out: Result,
    async_op: Literal[False] = ...,
    timeout: float | None = ...,
    lane: Lane = ...,
    tag: int = ...,
) -> Result: ...
@overload
def allgather(
    array: object,
    *,
    group: Group | None = ...,
    out: object,
    async_op: Literal[True],
    timeout: float | None = ...,
    lane: Lane = ...,
    tag: int = ...,
) -> Work: ...
def allgather(
    array: Any,
    *,
    group: Group | None = None,
    out: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
    lane: Lane = "bulk",
    tag: int = 0,
) -> Any:
    """Collects the arrays of all ranks, in rank order.

    Args:
        array: this rank's part; its number of elements is equal on all ranks.
        out: room for size x as many elements, of any shape. Default: a new tensor or numpy array
            of shape (size, *array.shape); required for other buffers, and with `async_op`.
        group: as for `allreduce`, like all that follow.
        async_op: needs `out`.
        timeout: see there.
        lane: see there.
        tag: see there.

    Returns:
        `out`, or the new array; a `Work` if `async_op`.

    Raises:
        As `allreduce`.
    """
    chosen = _chosen(group)
    result = _result(out, array, async_op, lambda shape: (chosen.size, *shape))
    source, target = _views(array, result)
    buffers.check_count("out", target, source.count * chosen.size, f"{chosen.size} ranks x {source.count} make")
    work = chosen.engine.allgather(chosen.id, source, target, **chosen._options(lane, tag, timeout, async_op))
    return _finish(work, result, async_op)


@overload
def reduce_scatter(
    array: Array,
    op: Op = ...,
    *,
    group: Group | None = ...,
    out: None = ...,
    async_op: Literal[False] = ...,
    timeout: float | None = ...,
    lane: Lane = ...,
    tag: int = ...,
) -> Array: ...
@overload
def reduce_scatter(
    array: object,
    op: Op = ...,
    *,
    group: Group | None = ...,
    out: Result,
    async_op: Literal[False] = ...,
    timeout: float | None = ...,
    lane: Lane = ...,
    tag: int = ...,
) -> Result: ...
@overload
def reduce_scatter(
    array: object,
    op: Op = ...,
    *,
    group: Group | None = ...,
    out: object,
    async_op: Literal[True],
    timeout: float | None = ...,
    lane: Lane = ...,
    tag: int = ...,
) -> Work: ...
def reduce_scatter(
    array: Any,
    op: Op = "sum",
    *,
    group: Group | None = None,
    out: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
    lane: Lane = "bulk",
    tag: int = 0,
) -> Any:
    """Reduces the arrays of all ranks as `allreduce` does; rank r of the group gets part r of `size` equal parts.

    Args:
        array: the input, which stays as it is; its number of elements is a multiple of the group's size.
        op: as for `allreduce`.
        out: room for a part, of any shape. Default: a new tensor or numpy array, where the first
            dimension of `array` is divided by the size; required for other buffers, and with `async_op`.
        group: as for `allreduce`, like all that follow.
        async_op: needs `out`.
        timeout: see there.
        lane: see there.
        tag: see there.

    Returns:
        `out`, or the new array; a `Work` if `async_op`.

    Raises:
        As `allreduce`.
    """
    chosen = _chosen(group)
    result = _result(out, array, async_op, lambda shape: buffers.split_shape(shape, chosen.size))
    source, target = _views(array, result)
    buffers.check_count("the input", source, target.count * chosen.size, f"{chosen.size} ranks x {target.count} make")
    options = chosen._options(lane, tag, timeout, async_op)
    work = chosen.engine.reduce_scatter(chosen.id, source, target, op, **options)
    return _finish(work, result, async_op)


@overload
def barrier(
    *,
    group: Group | None = ...,
    async_op: Literal[False] = ...,
    timeout: float | None = ...,
    lane: Lane = ...,
    tag: int = ...,
) -> None: ...
@overload
def barrier(
    *,
    group: Group | None = ...,
    async_op: Literal[True],
    timeout: float | None = ...,
    lane: Lane = ...,
    tag: int = ...,
) -> Work: ...
def barrier(
    *,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    lane: Lane = "bulk",
    tag: int = 0,
) -> Any:
    """Returns when every rank of the group has called it. Arguments and errors as for `allreduce`."""
    chosen = _chosen(group)
    work = chosen.engine.barrier(chosen.id, **chosen._options(lane, tag, timeout, async_op))
    return _finish(work, None, async_op)


def _views(array: Any, out: Any) -> tuple[_core.View, _core.View]:
    """Views of input and output; the same one if the operation is in place."""
    if out is None or out is array:
        both = buffers.view(array, writable=True)
        return both, both
    return buffers.view(array, writable=False), buffers.view(out, writable=True)


def _result(out: Any, array: Any, async_op: bool, shape: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Any:
    """`out`, or a new array like `array`."""
    if out is not None:
        return out
    if async_op:
        raise TypeError("async_op=True needs out=: the result would otherwise be lost")
    return buffers.empty_like(array, shape(buffers.shape_of(array)))
