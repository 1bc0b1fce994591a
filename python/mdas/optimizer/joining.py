"""`mdas.join`: ranks that run out of data go on taking part, with nothing, until all have.

A rank that is done makes idle steps: it contributes no gradient, and is not counted in the average. When a
step comes in which every rank was idle, all stop, at the same step. Idle ranks have missed the changes of
hyper-parameters and of loss scales meanwhile; so a rank that had data to the last gives its state to them.
"""

from __future__ import annotations

import io
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from mdas.communicator import Communicator, tags
from mdas.errors import InvalidArgumentError

if TYPE_CHECKING:
    from mdas.optimizer.distributed import DistributedOptimizer


_open: list[weakref.ref[DistributedOptimizer]] = []


def opened(optimizer: DistributedOptimizer) -> None:
    """It is one of those that `join` is about if none is given."""
    _open.append(weakref.ref(optimizer))


def open_optimizers() -> list[DistributedOptimizer]:
    """Those of this process that are not closed, in the order of their construction."""
    alive = [(ref, optimizer) for ref in _open if (optimizer := ref()) is not None and not optimizer.closed]
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

    Args:
        optimizers: those that are used within; none: all `DistributedOptimizer`s of this process, in the order of
            their construction.

    Raises:
        InvalidArgumentError: there is none.
    """
    chosen = optimizers or tuple(open_optimizers())
    if not chosen:
        raise InvalidArgumentError("mdas.join(): there is no DistributedOptimizer yet; wrap the optimizer before")
    yield
    for optimizer in chosen:
        while not optimizer._idle_step():
            pass
        _level(optimizer)


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
    received = broadcast_state(communicator, state, source)
    if pipeline.last_active < last:
        if pipeline.base is None:
            with torch.no_grad():
                torch._foreach_copy_(parameters, received["parameters"])
        optimizer.load_state_dict(received["optimizer"])
        # A rank without a single batch has shown us none: unless it makes one like ours, the next step says so.
        if received["scaler"] and (scaler := _scaler(optimizer)) is not None:
            scaler.load_state_dict(received["scaler"])
        pipeline.last_active = last


def _scaler(optimizer: DistributedOptimizer) -> torch.amp.GradScaler | None:
    return None if optimizer._scaler is None else optimizer._scaler()


def broadcast_state(communicator: Communicator, state: object, source: int) -> dict[str, Any]:
    """What `source` has, on all ranks. As a file of torch.save, read without running anything in it."""
    buffer = io.BytesIO()
    if communicator.rank == source:
        torch.save(state, buffer)
    length = torch.tensor([buffer.tell()], dtype=torch.int64)
    communicator.broadcast(length, source, tag=tags.JOINING).wait()
    content = torch.frombuffer(bytearray(buffer.getvalue().ljust(int(length), b"\0")), dtype=torch.uint8)
    communicator.broadcast(content, source, tag=tags.JOINING).wait()
    received: dict[str, Any] = torch.load(io.BytesIO(bytes(content.numpy())), weights_only=True)
    return received
