"""A communicator that notes when its rank waits and when its exchanges are under way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mdas.communicator import Communicator, Lane, Op, Work

Interval = tuple[int, int]
"""(begin, end) in ns of `time.monotonic_ns()`."""


@dataclass
class Exchange:
    """One operation. `finished` is what the communicator says, else when its end was noticed."""

    what: str
    lane: Lane
    nbytes: int
    submitted: int
    finished: int | None = None


@dataclass
class Recorder:
    """Passes everything on to `inner`. A rank waits where it calls `Work.wait`."""

    inner: Communicator
    waits: list[Interval] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """As `inner`'s."""
        return self.inner.rank

    @property
    def size(self) -> int:
        """As `inner`'s."""
        return self.inner.size

    @property
    def ranks(self) -> Sequence[int]:
        """As `inner`'s."""
        return self.inner.ranks

    @property
    def summation(self) -> str:
        """As `inner`'s."""
        return self.inner.summation

    @property
    def closed(self) -> bool:
        """As `inner`'s."""
        return self.inner.closed

    def forget(self) -> None:
        """Starts anew."""
        self.waits.clear()
        self.exchanges.clear()

    def exposed(self) -> float:
        """Seconds waited since the start, or since `forget`."""
        return sum(end - begin for begin, end in self.waits) / 1e9

    def memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """As `inner`'s."""
        return self.inner.memory(numel, dtype)

    def allreduce(
        self, input: torch.Tensor, output: torch.Tensor, *, op: Op = "sum", lane: Lane = "bulk", tag: int = 0
    ) -> Work:
        """As `inner`'s."""
        exchange = self._open("allreduce", lane, input)
        return RecordedWork(self, exchange, self.inner.allreduce(input, output, op=op, lane=lane, tag=tag))

    def broadcast(self, tensor: torch.Tensor, root: int, *, lane: Lane = "bulk", tag: int = 0) -> Work:
        """As `inner`'s."""
        exchange = self._open("broadcast", lane, tensor)
        return RecordedWork(self, exchange, self.inner.broadcast(tensor, root, lane=lane, tag=tag))

    def allgather(self, input: torch.Tensor, output: torch.Tensor, *, lane: Lane = "urgent", tag: int = 0) -> Work:
        """As `inner`'s."""
        exchange = self._open("allgather", lane, output)
        return RecordedWork(self, exchange, self.inner.allgather(input, output, lane=lane, tag=tag))

    def _open(self, what: str, lane: Lane, tensor: torch.Tensor) -> Exchange:
        exchange = Exchange(what, lane, tensor.numel() * tensor.element_size(), time.monotonic_ns())
        self.exchanges.append(exchange)
        return exchange


@dataclass
class RecordedWork:
    """The work of an exchange that is being recorded."""

    recorder: Recorder
    exchange: Exchange
    inner: Work

    def done(self) -> bool:
        """As `inner`'s."""
        done = self.inner.done()
        if done:
            self._close()
        return done

    def wait(self, timeout: float | None = None) -> None:
        """As `inner`'s; counts as exposed time."""
        begin = time.monotonic_ns()
        try:
            self.inner.wait(timeout)
        finally:
            self.recorder.waits.append((begin, time.monotonic_ns()))
        self._close()

    def times(self) -> tuple[int, int, int] | None:
        """As `inner`'s."""
        return self.inner.times()

    def _close(self) -> None:
        if self.exchange.finished is None:
            times = self.inner.times()
            self.exchange.finished = time.monotonic_ns() if times is None else times[2]
