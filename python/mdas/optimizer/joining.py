"""`mdas.join`: ranks that run out of data go on taking part, with nothing, until all have.

A rank that is done makes idle steps: it contributes no gradient, and is not counted in the average. When a
step comes in which every rank was idle, all stop, at the same step. Idle ranks have missed the changes of
hyper-parameters and of loss scales meanwhile; so a rank that had data to the last gives its state to them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from mdas.communicator import tags
from mdas.errors import InvalidArgumentError
from mdas.optimizer.states import sent

if TYPE_CHECKING:
    from mdas.optimizer.distributed import DistributedOptimizer


_open: list[weakref.ref[DistributedOptimizer]] = []


def opened(optimizer: DistributedOptimizer) -> None:
    """It is one of those that `join` is about if none is given."""
    _open.append(weakref.ref(optimizer))


def open_optimizers() -> list[DistributedOptimizer]:
    """Those of this process that are not closed, nor their communicator, in the order of their construction."""
    alive = [
        (ref, optimizer)
        for ref in _open
        if (optimizer := ref()) is not None and not optimizer.closed and not optimizer._communicator.closed
    ]
    _open[:] = [ref for ref, _ in alive]
    return [optimizer for _, optimizer in alive]


@contextmanager
def join(*optimizers: DistributedOptimizer) -> Iterator[None]:
    """A block at whose end ranks wait for each other, however many batches each has had.

    Within it every rank trains on as many batches as it has: averages are over the ranks that still have
    data. At its end all ranks hold the same base weights, optimizer state and loss scale. Every rank of the
    optimizers' groups enters it; other collectives within it must still be called equally often by all.
    Step schedulers per epoch, after the block: a rank that is done early does not step those within.

    An exception leaves the block at once, without waiting; the other ranks learn of it as usual.

    Of several optimizers, each may be used as often as the script likes, in the same order on all ranks; but a rank
    that is done waits for the next step of each, so none may rest for longer than the communicator's timeout.

    Args:
        optimizers: those that are used within; none: all open `DistributedOptimizer`s of this process.

    Raises:
        InvalidArgumentError: there is none, or two of them share a communicator.
    """
    chosen = tuple(dict.fromkeys(optimizers)) or tuple(open_optimizers())
    if not chosen:
        raise InvalidArgumentError("mdas.join(): there is no DistributedOptimizer yet; wrap the optimizer before")
    exchanging = [id(optimizer._communicator) for optimizer in chosen if optimizer._communicator.size > 1]
    if len(set(exchanging)) < len(exchanging):
        raise InvalidArgumentError(
            "mdas.join(): two of the optimizers share a communicator, whose operations all ranks call in one order; "
            "but a rank without data does not know which of them comes next. Build each with a communicator of its own"
        )
    yield
    _until_all_are_idle(chosen)
    for optimizer in chosen:
        _level(optimizer)


def _until_all_are_idle(optimizers: Sequence[DistributedOptimizer]) -> None:
    """Idle steps of each, until all ranks make some.

    Which of several comes next, only ranks with data know; so each has a thread of its own that waits for its turn.
    Nothing orders what different optimizers exchange.
    """
    if len(optimizers) == 1:
        _be_idle(optimizers[0])
        return
    ends: list[_End] = []
    for optimizer in optimizers:
        ends.append(end := _End())
        # Daemons, so that Ctrl-C, which comes to this thread, need not wait for them.
        threading.Thread(target=_answer, args=(end, optimizer, _stream(optimizer)), daemon=True).start()
    wait(ends, return_when=FIRST_EXCEPTION)
    for end in ends:
        if end.done():
            end.result()


class _End(Future[None]):
    """Of a block in another thread: whoever waits gets what it raised, whatever it is."""

    def __enter__(self) -> None:
        self.set_running_or_notify_cancel()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is None:
            self.set_result(None)
        else:
            self.set_exception(error)
        return True


def _answer(end: _End, optimizer: DistributedOptimizer, stream: torch.cuda.Stream | None) -> None:
    with end, torch.cuda.stream(stream):
        _be_idle(optimizer)


def _be_idle(optimizer: DistributedOptimizer) -> None:
    while not optimizer._idle_step():
        pass


def _stream(optimizer: DistributedOptimizer) -> torch.cuda.Stream | None:
    """That of this thread for its parameters; a new thread would have another."""
    device = optimizer._pipeline.layout.parameters[0].device
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _level(optimizer: DistributedOptimizer) -> None:
    """Every rank has the state of those that had data last."""
    communicator, pipeline = optimizer._communicator, optimizer._pipeline
    own = pipeline.last_active * communicator.size + communicator.rank
    newest = torch.tensor([own], dtype=torch.int64)
    communicator.allreduce(newest, newest, op="max", lane="urgent", tag=tags.JOINING).wait()
    last, source = divmod(int(newest), communicator.size)
    behind = torch.tensor([pipeline.last_active < last], dtype=torch.uint8)
    communicator.allreduce(behind, behind, op="max", lane="urgent", tag=tags.JOINING).wait()
    if not int(behind):
        return
    parameters = pipeline.layout.parameters
    state: dict[str, Any] | None = None
    if communicator.rank == source:
        # Base weights are part of the state only where the parameters are not these weights themselves.
        state = {"optimizer": optimizer.state_dict(), "parameters": [p.detach() for p in parameters], "scaler": None}
        if (scaler := _scaler(optimizer)) is not None:
            state["scaler"] = scaler.state_dict()
    received = sent(
        state,
        communicator.rank == source,
        lambda tensor: communicator.broadcast(tensor, source, tag=tags.JOINING).wait(),
    )
    if pipeline.last_active < last:
        if pipeline.base is None:
            with torch.no_grad():
                torch._foreach_copy_(parameters, received["parameters"])
        optimizer._adopt(received["optimizer"])
        # A rank without a single batch has shown us none: unless it makes one like ours, the next step says so.
        if received["scaler"] and (scaler := _scaler(optimizer)) is not None:
            scaler.load_state_dict(received["scaler"])
        pipeline.last_active = last


def _scaler(optimizer: DistributedOptimizer) -> torch.amp.GradScaler | None:
    return None if optimizer._scaler is None else optimizer._scaler()
