"""Over mdas's own engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch

from mdas import buffers
from mdas.communicator.protocol import Lane, Op, Work

if TYPE_CHECKING:
    from mdas import _core

EngineLane = Literal["bulk", "urgent"]
SECOND = "second lane"
"""Purpose of the groups that order it."""


class CoreCommunicator:
    """A group of mdas's own engine.

    `engine` is a `_core.Engine`, `group` the id of one of its groups (0: its world), in which this process has rank
    `rank` of `size`; `second`, the id of another group of the same ranks, orders the second urgent lane (None: one is
    made, of the world). `ranks`: see the protocol (None: counted from 0). `timeout`: seconds without progress after
    which an operation fails (None: the engine's own). `summation`: see the protocol.
    """

    def __init__(
        self,
        engine: _core.Engine,
        group: int,
        rank: int,
        size: int,
        timeout: float | None = None,
        *,
        second: int | None = None,
        ranks: Sequence[int] | None = None,
        summation: str = "mdas",
    ) -> None:
        self._engine = engine
        if second is None:
            second = engine.new_group(list(range(engine.size)), SECOND)
        self._lanes: dict[Lane, tuple[int, EngineLane]] = {
            "bulk": (group, "bulk"),
            "urgent": (group, "urgent"),
            "second": (second, "urgent"),
        }
        self._timeout = timeout
        self.summation = summation
        self.rank = rank
        self.size = size
        self.ranks = range(size) if ranks is None else ranks

    @property
    def closed(self) -> bool:
        return self._engine.closed

    def memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        from mdas import _core

        if numel == 0:
            return torch.zeros(0, dtype=dtype)
        return torch.frombuffer(_core.Memory(numel * dtype.itemsize), dtype=dtype)

    def allreduce(
        self, input: torch.Tensor, output: torch.Tensor, *, op: Op = "sum", lane: Lane = "bulk", tag: int = 0
    ) -> Work:
        group, lane_of = self._lanes[lane]
        return self._engine.allreduce(group, _view(input), _view(output), op, lane_of, tag, self._timeout)

    def broadcast(self, tensor: torch.Tensor, root: int, *, lane: Lane = "bulk", tag: int = 0) -> Work:
        group, lane_of = self._lanes[lane]
        return self._engine.broadcast(group, _view(tensor), root, lane_of, tag, self._timeout)

    def allgather(self, input: torch.Tensor, output: torch.Tensor, *, lane: Lane = "urgent", tag: int = 0) -> Work:
        group, lane_of = self._lanes[lane]
        return self._engine.allgather(group, _view(input), _view(output), lane_of, tag, self._timeout)


def _view(tensor: torch.Tensor) -> _core.View:
    """The tensor's memory, kept alive by the view."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise TypeError(f"a communicator takes contiguous CPU tensors, not {tensor.device} {tensor.stride()}")
    return buffers.storage_view(tensor)
