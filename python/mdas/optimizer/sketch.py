"""A low-rank sketch of how the average in flight differs from the previous one.

Per weight matrix, seen as (rows, rest), with D_i = g_i - h on rank i and a basis R kept from the step
before: P = orthonormal(sum_i p_i D_i R), R' = sum_i p_i D_iᵀ P, and the sketch is P R'ᵀ; the next basis is
orthonormal(R'). It is one step of the power iteration of PowerSGD (Vogels et al. 2019), made to predict
only. Vectors, and matrices that would not shrink, are sent whole.

Since everything is linear in g_i, ranks exchange averages of g_i R and g_iᵀ P and subtract h R and hᵀ P
afterwards: the first exchange needs no h, and starts while that is still arriving. Two messages per step,
urgent, each batched over all parameters. All that is computed from them has the same bits on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mdas.communicator import Communicator, Work
from mdas.optimizer import kernels
from mdas.optimizer.buckets import Layout, Place, Vector

TAG = 0xFFFF_0100
SEED = 0x6D64_6173  # any, but equal on all ranks


@dataclass(slots=True)
class _Matrix:
    """A parameter that is sketched; buffers are float32 views into the two messages."""

    index: int
    rows: int
    rest: int
    basis: Tensor
    """R, of shape (rest, rank), orthonormal."""
    own_left: Tensor
    """g_i R, (rows, rank)"""
    left: Tensor
    """its average, then P"""
    own_right: Tensor
    """g_iᵀ P, (rest, rank)"""
    right: Tensor
    """its average, then R'"""
    scratch_left: Tensor
    scratch_right: Tensor

    def of(self, vector: Vector) -> Tensor:
        """The parameter's part as a float32 matrix."""
        return vector.views[self.index].view(self.rows, self.rest).float()


class Sketcher:
    """Keeps the bases, and makes c = h + Q once per step: `launch`, then `finish`."""

    def __init__(self, layout: Layout, communicator: Communicator, rank: int) -> None:
        self._communicator = communicator
        matrices = [p for p in layout.places if _shrinks(p, rank)]
        self._whole = [p for p in layout.places if not _shrinks(p, rank)]
        sizes = [(*_shape(p), min(rank, *_shape(p))) for p in matrices]
        # First message: all g_i R, what is sent whole, and a flag per parameter: has it a gradient?
        first = sum(rows * r for rows, _, r in sizes)
        whole = sum(p.parameter.numel() for p in self._whole)
        self._own_first, self._first = (
            communicator.memory(first + whole + len(layout.places), torch.float32) for _ in range(2)
        )
        second = sum(rest * r for _, rest, r in sizes)
        self._own_second, self._second = (communicator.memory(second, torch.float32) for _ in range(2))
        own_left, left = (_cutter(t) for t in (self._own_first, self._first))
        own_right, right = (_cutter(t) for t in (self._own_second, self._second))
        self.matrices: list[_Matrix] = []
        for place, (rows, rest, r) in zip(matrices, sizes, strict=True):
            basis = torch.zeros(rest, r)
            kernels.orthonormalize(basis, SEED + place.index)
            self.matrices.append(
                _Matrix(
                    place.index,
                    rows,
                    rest,
                    basis,
                    own_left((rows, r)),
                    left((rows, r)),
                    own_right((rest, r)),
                    right((rest, r)),
                    torch.zeros(rows, r),
                    torch.zeros(rest, r),
                )
            )
        self._own_whole = [own_left(p.parameter.shape) for p in self._whole]
        self._whole_average = [left(p.parameter.shape) for p in self._whole]
        self._own_used, self._used = own_left((len(layout.places),)), left((len(layout.places),))
        self._work: Work | None = None

    def launch(self, gradient: Vector, used: Sequence[bool]) -> None:
        """Starts the first exchange; needs nothing but this rank's gradient."""
        for m in self.matrices:
            kernels.times(m.of(gradient), m.basis, m.own_left)
        for own, place in zip(self._own_whole, self._whole, strict=True):
            own.copy_(gradient.views[place.index])
        self._own_used.copy_(torch.tensor(used, dtype=torch.float32))
        self._work = self._communicator.allreduce(self._own_first, self._first, op="average", lane="urgent", tag=TAG)

    def finish(self, gradient: Vector, history: Vector, into: Vector, wait: Callable[[Work], None]) -> list[bool]:
        """Writes c = h + Q; returns which parameters have a gradient on any rank in this step.

        Where the sketch is not finite, c = h and the bases stay.
        """
        assert self._work is not None
        wait(self._work)
        self._work = None
        for m in self.matrices:
            kernels.times(m.of(history), m.basis, m.scratch_left)
            m.left.sub_(m.scratch_left)
        finite = bool(torch.isfinite(self._first).all())
        for m in self.matrices:
            if finite:
                kernels.orthonormalize(m.left, SEED + m.index)
            kernels.transposed_times(m.of(gradient), m.left, m.own_right)
        # Also where it is of no use: communication never skips, so that ranks stay in step.
        work = self._communicator.allreduce(self._own_second, self._second, op="average", lane="urgent", tag=TAG + 1)
        wait(work)
        used = [count > 0 for count in self._used.tolist()]
        for m in self.matrices:
            kernels.transposed_times(m.of(history), m.left, m.scratch_right)
            m.right.sub_(m.scratch_right)
        if not (finite and bool(torch.isfinite(self._second).all())):
            into.copy_(history)
            return used
        for m in self.matrices:
            h, c = history.views[m.index], into.views[m.index].view(m.rows, m.rest)
            if c.dtype == torch.float32:
                kernels.expand(h.view(m.rows, m.rest), m.left, m.right, c)
            else:
                wide = torch.empty(m.rows, m.rest)
                kernels.expand(m.of(history), m.left, m.right, wide)
                c.copy_(wide)
            m.basis.copy_(m.right)
            kernels.orthonormalize(m.basis, SEED + m.index)
        for average, place in zip(self._whole_average, self._whole, strict=True):
            into.views[place.index].copy_(average)
        return used


def _shape(place: Place) -> tuple[int, int]:
    shape = place.parameter.shape
    rows = shape[0] if len(shape) > 1 else 1
    return rows, place.parameter.numel() // max(rows, 1)


def _shrinks(place: Place, rank: int) -> bool:
    rows, rest = _shape(place)
    return (rows + rest) * min(rank, rows, rest) < rows * rest


def _cutter(flat: Tensor) -> Callable[[Sequence[int]], Tensor]:
    """Takes one part after another off a flat tensor."""
    start = 0

    def cut(shape: Sequence[int]) -> Tensor:
        nonlocal start
        part = flat[start : start + int(torch.Size(shape).numel())].view(*shape)
        start += part.numel()
        return part

    return cut
