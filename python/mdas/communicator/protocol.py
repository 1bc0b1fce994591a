"""The protocol, and its simplest implementation: nobody to exchange with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch

Lane = Literal["bulk", "urgent", "second"]
"""Operations of one lane run in the order of their calls, which is the same on all ranks; lanes do not wait for each
other. "second" is as urgent as "urgent", for answers to what has come there: when they are called differs from rank
to rank.
"""
Op = Literal["sum", "average", "min", "max", "product"]


class Work(Protocol):
    """An operation under way. Its tensors must be neither written nor freed before it is done."""

    def done(self) -> bool:
        """True once the output may be read. Never blocks."""
        ...

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until done, without holding the GIL; `timeout` in seconds of no progress
        (None: the group's own). Raises what the operation failed with. May be called again.
        """
        ...

    def times(self) -> tuple[int, int, int] | None:
        """(submitted, started, finished), in ns of one clock of this process; None while under way."""
        ...


class Communicator(Protocol):
    """Asynchronous collectives within one group of ranks, on contiguous tensors.

    `rank` and `size` count within the group. All operations but `memory` are collective.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def ranks(self) -> Sequence[int]:
        """The group's ranks, in its order, as the job counts them: what errors call them."""
        ...

    @property
    def summation(self) -> str:
        """What decides the order of summation, beside operation, type, length and `size`, in words: where it is the
        same, so are the bits.
        """
        ...

    @property
    def closed(self) -> bool:
        """Is nothing to be exchanged through it any more: has this process left, or closed it?"""
        ...

    def memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory of shape (numel,) that the transport reaches without a copy."""
        ...

    def allreduce(
        self, input: torch.Tensor, output: torch.Tensor, *, op: Op = "sum", lane: Lane = "bulk", tag: int = 0
    ) -> Work:
        """Writes output = op over all ranks' inputs; same shape and dtype; in place if both are one tensor."""
        ...

    def broadcast(self, tensor: torch.Tensor, root: int, *, lane: Lane = "bulk", tag: int = 0) -> Work:
        """Every rank's tensor becomes that of `root`."""
        ...

    def allgather(self, input: torch.Tensor, output: torch.Tensor, *, lane: Lane = "urgent", tag: int = 0) -> Work:
        """output, of size * input.numel() elements, holds all ranks' inputs in rank order."""
        ...


class Done:
    """The work of an operation that needed none."""

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        pass

    def times(self) -> tuple[int, int, int] | None:
        return None


class AloneCommunicator:
    """A group of one rank: every average is the rank's own value."""

    rank = 0
    size = 1
    ranks = (0,)
    summation = "none"
    closed = False

    def memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype)

    def allreduce(
        self, input: torch.Tensor, output: torch.Tensor, *, op: Op = "sum", lane: Lane = "bulk", tag: int = 0
    ) -> Work:
        if output is not input:
            output.copy_(input)
        return Done()

    def broadcast(self, tensor: torch.Tensor, root: int, *, lane: Lane = "bulk", tag: int = 0) -> Work:
        return Done()

    def allgather(self, input: torch.Tensor, output: torch.Tensor, *, lane: Lane = "urgent", tag: int = 0) -> Work:
        output.copy_(input)
        return Done()
