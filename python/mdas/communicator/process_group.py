"""Over a process group of `torch.distributed`."""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from mdas.communicator import tags
from mdas.communicator.protocol import Done, Lane, Op, Work
from mdas.errors import (
    CollectiveTimeoutError,
    Error,
    InvalidArgumentError,
    NotInitializedError,
    PeerLostError,
)

# Ctrl-C is answered between two slices of a wait.
_SLICE_SECONDS = 0.5
# Backends that time out themselves know better what happened: they are given this long to say so.
_GRACE_SECONDS = 5.0
_TIMED_OUT = re.compile("timed out|time-?out", re.IGNORECASE)
_LOST = re.compile("connection|peer|broken pipe|socket|network|remote|abort|closed", re.IGNORECASE)
_HALVES = (torch.float16, torch.bfloat16)


class TorchCommunicator:
    """The ranks of a `torch.distributed` process group, whatever its backend: Gloo, NCCL, MPI, UCC.

    Constructing it is collective: all ranks of `process_group` do so at the same point, since each lane gets
    a process group of its own (the same ranks and backend), in which it is ordered independently of the other
    lane and of what the script exchanges. (MPI alone makes a group of some ranks only if all ranks of the job
    take part: there, all construct it.) Of a group of some ranks, the others do not take part; from then on torch
    counts process groups differently here and there, and a `torch.distributed.new_group()` of all ranks fails or
    waits in vain: make all groups that the script needs before. Those groups of the lanes last until `close()`,
    or until `torch.distributed.destroy_process_group()`: to build several optimizers after each other, share one.

    "average" divides every rank's input before it is summed, as DistributedDataParallel does: the same bits as
    dividing the sum, where the group's size is a power of two. float16 and bfloat16 in CPU memory are reduced
    in float32 and rounded once; on other devices the backend adds them as it does. The order of summation, too,
    is the backend's.

    A torch error becomes the mdas error of what happened, with torch's as its cause: a PeerLostError (its `peer`
    is -1, since torch does not say which), a CollectiveTimeoutError, or else an Error. Torch notices no
    mismatches; ranks that are out of step can make Gloo end the process.

    Args:
        process_group: this process is in it; None: the default group.
        timeout: seconds without progress after which an operation fails, for backends that have timeouts
            (all but MPI), and after which a wait gives up, for all of them.
        device: of the memory that is exchanged, "cpu" or "cuda"; the group has a backend for it. Beside CUDA memory,
            small tensors in CPU memory may be exchanged; they are moved there and back, and waited for. A wait for
            CUDA memory makes the current stream wait, not the caller.

    Raises:
        NotInitializedError: `torch.distributed` has no process group yet.
        InvalidArgumentError: this process is not in the group, its backend does not fit the device, or `timeout`
            is not positive and finite.
        PeerLostError, CollectiveTimeoutError: other ranks did not do the same.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        timeout: float = 300.0,
        device: torch.device | str = "cpu",
    ) -> None:
        if not 0 < timeout < math.inf:
            raise InvalidArgumentError(f"timeout is {timeout}, but must be a positive, finite number of seconds")
        if not (dist.is_available() and dist.is_initialized()):
            raise NotInitializedError(
                "torch.distributed has no process group: call torch.distributed.init_process_group() first"
            )
        if process_group is not None and dist.get_rank(process_group) < 0:
            raise InvalidArgumentError("this process is not in the process group: construct it on its ranks only")
        config = dist.get_backend_config(process_group)
        backends = dict(pair.split(":") for pair in config.split(","))
        self._device = torch.device(device)
        if str(self._device) == "cuda":
            self._device = torch.device("cuda", torch.cuda.current_device())
        kind = self._device.type
        if kind not in backends:
            raise InvalidArgumentError(
                f"the process group's backends ({config}) do not move {kind} memory: make one that does, as with "
                f'torch.distributed.new_group(backend="{"gloo" if kind == "cpu" else "nccl"}")'
            )
        self.summation = f"torch {torch.__version__}, {config}"
        self._lanes: dict[Lane, _TorchLane] = {}
        lanes: tuple[Lane, ...] = ("bulk", "urgent", "second")
        for lane in lanes:
            group = _group_like(process_group, config, timeout)
            self._lanes[lane] = _TorchLane(lane, group, backends[kind], timeout, blocking=kind == "cpu")
        # Of the lanes: torch sorts the ranks of a group, if it is not told otherwise when it is made.
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group)

    @property
    def closed(self) -> bool:
        return not self._lanes or not all(_known(lane.group) for lane in self._lanes.values())

    def memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=self._device)

    def allreduce(
        self, input: torch.Tensor, output: torch.Tensor, *, op: Op = "sum", lane: Lane = "bulk", tag: int = 0
    ) -> Work:
        if self._elsewhere(input, output):
            moved = input.to(self._device)
            self.allreduce(moved, moved, op=op, lane=lane, tag=tag).wait()
            output.copy_(moved)
            return Done()
        self._check(input, output)
        if input.shape != output.shape or input.dtype != output.dtype:
            raise TypeError(
                f"allreduce of {input.dtype} {tuple(input.shape)} into {output.dtype} {tuple(output.shape)}: both "
                "must be equal"
            )
        if op == "average" and not input.is_floating_point():
            raise InvalidArgumentError(f"an average of {input.dtype}: only floating-point types have one")
        input, target = input.detach(), output.detach()
        after: Callable[[], object] | None = None
        if self._device.type == "cpu" and input.dtype in _HALVES:
            wide = input.float()
            after = partial(target.copy_, wide)
            input = target = wide
        if op == "average":
            torch.div(input, self.size, out=target)
        elif target.data_ptr() != input.data_ptr():
            target.copy_(input)
        operation = {
            "sum": dist.ReduceOp.SUM,
            "average": dist.ReduceOp.SUM,
            "min": dist.ReduceOp.MIN,
            "max": dist.ReduceOp.MAX,
            "product": dist.ReduceOp.PRODUCT,
        }[op]
        chosen = self._lanes[lane]
        return chosen.launch(
            f"allreduce ({op}{_purpose(tag)})",
            target,
            lambda: dist.all_reduce(target, operation, chosen.group, async_op=True),
            after,
        )

    def broadcast(self, tensor: torch.Tensor, root: int, *, lane: Lane = "bulk", tag: int = 0) -> Work:
        if self._elsewhere(tensor):
            moved = tensor.to(self._device)
            self.broadcast(moved, root, lane=lane, tag=tag).wait()
            tensor.copy_(moved)
            return Done()
        self._check(tensor)
        chosen, tensor = self._lanes[lane], tensor.detach()
        source = dist.get_global_rank(chosen.group, root)
        return chosen.launch(
            f"broadcast from rank {root}{_purpose(tag)}",
            tensor,
            lambda: dist.broadcast(tensor, source, chosen.group, async_op=True),
        )

    def allgather(self, input: torch.Tensor, output: torch.Tensor, *, lane: Lane = "urgent", tag: int = 0) -> Work:
        if self._elsewhere(input, output):
            moved = output.to(self._device)
            self.allgather(input.to(self._device), moved, lane=lane, tag=tag).wait()
            output.copy_(moved)
            return Done()
        self._check(input, output)
        if output.numel() != self.size * input.numel() or input.dtype != output.dtype:
            raise TypeError(
                f"allgather of {input.numel()} {input.dtype} from {self.size} ranks into {output.numel()} "
                f"{output.dtype}"
            )
        chosen, input = self._lanes[lane], input.detach().view(-1)
        # Into a list, since not all backends can gather into one tensor.
        parts = list(output.detach().view(self.size, -1).unbind())
        return chosen.launch(
            f"allgather{_purpose(tag)}", input, lambda: dist.all_gather(parts, input, chosen.group, async_op=True)
        )

    def close(self) -> None:
        """Gives the process groups of the lanes back. All ranks do so once none exchanges any more. May be
        called again; nothing can be exchanged afterwards.
        """
        for lane in self._lanes.values():
            dist.destroy_process_group(lane.group)
        self._lanes = {}

    def _elsewhere(self, *tensors: torch.Tensor) -> bool:
        """Are they in CPU memory, which the backend may not reach, though this one is for a device?"""
        return self._device.type != "cpu" and all(tensor.device.type == "cpu" for tensor in tensors)

    def _check(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            if not tensor.is_contiguous() or tensor.device.type != self._device.type:
                raise TypeError(
                    f"this communicator takes contiguous tensors in {self._device.type} memory, not {tensor.device} "
                    f"{tensor.stride()}"
                )


class _TorchLane:
    """One process group, whose operations follow one another."""

    def __init__(self, name: Lane, group: dist.ProcessGroup, backend: str, timeout: float, *, blocking: bool) -> None:
        self.group = group
        self.timeout = timeout
        self.blocking = blocking
        """Does a wait last until the output is there? Otherwise it makes the current stream wait."""
        self._where = f"rank {dist.get_rank(group)} of {dist.get_world_size(group)}, {name} lane over torch's {backend}"
        self._under_way: deque[dist.Work] = deque()
        self._finished = 0

    def launch(
        self,
        what: str,
        tensor: torch.Tensor,
        start: Callable[[], dist.Work | None],
        after: Callable[[], object] | None = None,
    ) -> Work:
        """`after` is called once the operation has succeeded."""
        what = f"{what} of {tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"
        if not tensor.numel():
            return Done()  # not all backends take nothing
        try:
            work = start()
        except RuntimeError as error:
            raise self.failure(what, error) from error
        assert work is not None  # only on ranks outside the group
        self.finished()
        self._under_way.append(work)
        return _TorchWork(self, work, what, after)

    def finished(self) -> int:
        """Operations that have ended so far."""
        while self._under_way and self._under_way[0].is_completed():
            self._under_way.popleft()
            self._finished += 1
        return self._finished

    def failure(self, what: str, error: RuntimeError) -> Error:
        """The error of mdas for one of torch."""
        return _failure(f"{self._where}: {what}", error)


class _TorchWork:
    def __init__(self, lane: _TorchLane, work: dist.Work, what: str, after: Callable[[], object] | None) -> None:
        self._lane = lane
        self._work: dist.Work | None = work
        self._what = what
        self._after = after
        self._cause: RuntimeError | None = None

    def done(self) -> bool:
        if self._work is not None and self._work.is_completed():
            with suppress(Error):  # wait() raises it again
                self._end(self._work)
        return self._work is None

    def wait(self, timeout: float | None = None) -> None:
        if self._work is not None:
            if self._lane.blocking:
                self._block(self._work, timeout)
            self._end(self._work)
        elif self._cause is not None:
            raise self._lane.failure(self._what, self._cause) from self._cause

    def times(self) -> tuple[int, int, int] | None:
        return None  # torch does not tell

    def _block(self, work: dist.Work, timeout: float | None) -> None:
        limit = self._lane.timeout + _GRACE_SECONDS if timeout is None else timeout
        finished, deadline = self._lane.finished(), time.monotonic() + limit
        while not work.is_completed():
            left = deadline - time.monotonic()
            # Raises if it is over first, or if the operation failed: is_completed() tells which. 0 would be forever.
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=max(min(left, _SLICE_SECONDS), 0.001)))
            if self._lane.finished() != finished:
                finished, deadline = self._lane.finished(), time.monotonic() + limit
            elif time.monotonic() >= deadline and not work.is_completed():
                raise CollectiveTimeoutError(
                    f"{self._what}: still in flight after {limit:g} s without progress: the operation goes on, "
                    "wait again"
                )

    def _end(self, work: dist.Work) -> None:
        self._work = None
        try:
            work.wait()
        except RuntimeError as error:
            self._cause = error
            raise self._lane.failure(self._what, error) from error
        if self._after is not None:
            self._after()
            self._after = None


def _purpose(tag: int) -> str:
    found = tags.words(tag)
    return "" if found is None else f", {found}"


def _known(group: dist.ProcessGroup) -> bool:
    """Or has it been destroyed?"""
    try:
        dist.get_backend(group)
    except ValueError:
        return False
    return True


def _group_like(process_group: dist.ProcessGroup | None, config: str, timeout: float) -> dist.ProcessGroup:
    """Another group of the same ranks and backends."""
    ranks = dist.get_process_group_ranks(process_group)
    everybody = len(ranks) == dist.get_world_size()
    try:
        group = dist.new_group(
            ranks,
            timeout=timedelta(seconds=timeout),
            backend=config,
            # Otherwise ranks outside the group would have to come, too. MPI cannot do without them.
            use_local_synchronization=not everybody and "mpi" not in config,
        )
    except RuntimeError as error:
        raise _failure(f"TorchCommunicator: a process group ({config}) of ranks {ranks}", error) from error
    assert isinstance(group, dist.ProcessGroup)  # torch answers others to ranks outside the group
    return group


def _failure(what: str, error: RuntimeError) -> Error:
    kind: type[Error] = Error
    happened = "failed"
    if _TIMED_OUT.search(str(error)):
        kind, happened = CollectiveTimeoutError, "a rank did not come in time"
    elif _LOST.search(str(error)):
        kind, happened = PeerLostError, "a rank is gone, or has given up"
    return kind(f"{what}: {happened}: {error}")
