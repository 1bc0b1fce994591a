"""A low-rank sketch of how the average in flight differs from the previous one.

Per weight matrix, seen as (rows, rest), with D_i = g_i - h on rank i and a basis R kept from the step
before: P = orthonormal(sum_i p_i D_i R), R' = sum_i p_i D_iᵀ P, and the sketch is P R'ᵀ; the next basis is
orthonormal(R'). It is one step of the power iteration of PowerSGD (Vogels et al. 2019), made to predict
only. Vectors, and matrices that would not shrink, are sent whole.

Since everything is linear in g_i, ranks exchange averages of g_i R and g_iᵀ P and subtract h R and hᵀ P
afterwards: the first exchange needs no h, and starts while that is still arriving. Two urgent messages per
step and bucket: the first leaves as soon as backward has filled the bucket; the second, as soon as the first has
arrived and h is known, often still during backward, at a moment that differs from rank to rank (so that it has a
lane of its own). At the end of backward only the last bucket's are waited for. All that is computed from them has
the same bits on all ranks, whenever that was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mdas.communicator import Communicator, Work, tags
from mdas.communicator.protocol import Lane
from mdas.optimizer import kernels
from mdas.optimizer.buckets import Layout, Place, Vector, real

SEED = 0x6D64_6173  # any, but equal on all ranks


@dataclass(slots=True)
class _Matrix:
    """A parameter that is sketched. All tensors are contiguous float32."""

    index: int
    rows: int
    rest: int
    basis: Tensor
    """R, of shape (rest, rank), orthonormal."""
    own_p: Tensor
    """g_i R, (rows, rank)"""
    p: Tensor
    """its average, then P"""
    own_q: Tensor
    """g_iᵀ P, (rest, rank)"""
    q: Tensor
    """its average, then R'"""
    history_p: Tensor
    """h R"""
    history_q: Tensor
    """hᵀ P"""

    def times_basis(self, vector: Vector, out: Tensor) -> None:
        kernels.times(self.rows, self.rest, vector.views[self.index].float(), self.basis, out)

    def transposed_times_p(self, vector: Vector, out: Tensor) -> None:
        kernels.transposed_times(self.rows, self.rest, vector.views[self.index].float(), self.p, out)

    def expand(self, history: Vector, into: Vector) -> None:
        """Writes h + P R'ᵀ."""
        h, target = history.views[self.index].float(), into.views[self.index]
        c = target if target.dtype == torch.float32 else torch.empty_like(h)
        kernels.expand(self.rows, self.rest, h, self.p, self.q, c)
        if c is not target:
            target.copy_(c)


class _Part:
    """What one bucket contributes: its matrices, what is sent whole, and the messages of both exchanges."""

    def __init__(self, places: Sequence[Place], communicator: Communicator, rank: int, bucket: int) -> None:
        self._places = places
        self._communicator = communicator
        self._bucket = bucket
        matrices = [p for p in places if _shrinks(p, rank)]
        self._whole = [p for p in places if not _shrinks(p, rank)]
        sizes = [(*_shape(p), min(rank, *_shape(p))) for p in matrices]
        sketched = sum(rows * r for rows, _, r in sizes)
        second = sum(rest * r for _, rest, r in sizes)
        # First message: all g_i R, what is sent whole, and flags: has the rank data, has the parameter a gradient?
        first = sketched + sum(p.count for p in self._whole) + 1 + len(places)
        memory = communicator.memory
        self._own_first, self._first = memory(first, torch.float32), memory(first, torch.float32)
        self._own_second, self._second = memory(second, torch.float32), memory(second, torch.float32)
        device = self._first.device
        self._history_p = torch.zeros(sketched, device=device)
        self._history_q, self._bases = torch.zeros(second, device=device), torch.zeros(second, device=device)
        own_p, p, history_p = map(_cutter, (self._own_first, self._first, self._history_p))
        own_q, q, history_q, basis = map(_cutter, (self._own_second, self._second, self._history_q, self._bases))
        self.matrices: list[_Matrix] = []
        for place, (rows, rest, r) in zip(matrices, sizes, strict=True):
            p_shape, q_shape = (rows, r), (rest, r)
            self.matrices.append(
                _Matrix(
                    place.index,
                    rows,
                    rest,
                    basis=basis(q_shape),
                    own_p=own_p(p_shape),
                    p=p(p_shape),
                    own_q=own_q(q_shape),
                    q=q(q_shape),
                    history_p=history_p(p_shape),
                    history_q=history_q(q_shape),
                )
            )
        self._seeds = [SEED + m.index for m in self.matrices]
        # Bases of zeros are refilled altogether.
        kernels.orthonormalize([m.basis for m in self.matrices], self._seeds)
        self._average_p = self._first[:sketched]
        self._own_whole = [own_p((place.count,)) for place in self._whole]
        self._whole_average = [p((place.count,)) for place in self._whole]
        self._own_flags, self._flags = own_p((1 + len(places),)), p((1 + len(places),))
        self._finite, self._share = False, 1.0

    def launch_first(self, gradient: Vector, used: Sequence[bool], active: bool) -> Work:
        """Needs nothing but this rank's gradient."""
        for m in self.matrices:
            m.times_basis(gradient, m.own_p)
        _copy(self._own_whole, [real(gradient.views[p.index]).view(-1) for p in self._whole])
        flags = [active, *(used[p.index] for p in self._places)]
        self._own_flags.copy_(torch.tensor(flags, dtype=torch.float32))
        return self._allreduce(self._own_first, self._first, "urgent")

    def expect(self, history: Vector) -> None:
        """The share of h in the first exchange, h R, to be taken off what arrives."""
        for m in self.matrices:
            m.times_basis(history, m.history_p)

    def launch_second(self, gradient: Vector) -> Work:
        """The first exchange is over. Also where it is of no use: ranks stay in step."""
        share = self._share = float(self._flags[0])
        if 0 < share < 1:
            self._first.div_(share)  # the average of those that have data
        self._average_p.sub_(self._history_p)
        self._finite = bool(torch.isfinite(self._first).all())
        if self._finite:
            kernels.orthonormalize([m.p for m in self.matrices], self._seeds)
        for m in self.matrices:
            m.transposed_times_p(gradient, m.own_q)
        return self._allreduce(self._own_second, self._second, "second")

    def expect_second(self, history: Vector) -> None:
        """The share of h in the second exchange."""
        for m in self.matrices:
            m.transposed_times_p(history, m.history_q)

    def end(self) -> bool:
        """The second exchange is over. Is the sketch finite?"""
        if 0 < self._share < 1:
            self._second.div_(self._share)
        self._second.sub_(self._history_q)
        return self._finite and bool(torch.isfinite(self._second).all())

    def mark_used(self, used: list[bool]) -> None:
        """Writes which of its parameters have a gradient on any rank."""
        for place, count in zip(self._places, self._flags.tolist()[1:], strict=True):
            used[place.index] = count > 0

    def expand(self, history: Vector, into: Vector) -> None:
        """Writes its part of c = h + Q; the next bases are those of this sketch."""
        for m in self.matrices:
            m.expand(history, into)
        _copy([real(into.views[p.index]).view(-1) for p in self._whole], self._whole_average)
        self._bases.copy_(self._second)
        kernels.orthonormalize([m.basis for m in self.matrices], self._seeds)

    def _allreduce(self, own: Tensor, average: Tensor, lane: Lane) -> Work:
        tag = tags.sketch(self._bucket, second=lane == "second")
        return self._communicator.allreduce(own, average, op="average", lane=lane, tag=tag)


class Sketcher:
    """Keeps the bases, and makes c = h + Q once per step: `launch` for every bucket, `finish`, and what that gives."""

    def __init__(self, layout: Layout, communicator: Communicator, rank: int) -> None:
        self._parts = [_Part(members, communicator, rank, bucket) for bucket, members in enumerate(layout.members)]
        self.matrices = [m for part in self._parts for m in part.matrices]
        self._works: list[Work] = []
        self._second: list[Work] = []

    def launch(self, gradient: Vector, used: Sequence[bool], *, active: bool = True) -> None:
        """Starts the first exchange of the next bucket, in bucket order; it is full. `active`: this rank has data."""
        self._works.append(self._parts[len(self._works)].launch_first(gradient, used, active))

    def proceed(self, gradient: Vector, history: Vector, arrived: Callable[[int], bool]) -> None:
        """Starts the second exchange of the next buckets whose first is over, and whose h has arrived. Never waits."""
        while (k := len(self._second)) < len(self._works) and self._works[k].done() and arrived(k):
            self._works[k].wait()  # raises what it failed with
            self._parts[k].expect(history)
            self._second.append(self._parts[k].launch_second(gradient))
            self._parts[k].expect_second(history)

    def finish(
        self,
        gradient: Vector,
        history: Vector,
        into: Vector,
        wait: Callable[[Work], None],
        *,
        void: bool = False,
    ) -> Sketch:
        """Backward is over: what is still to be done for c = h + Q, which goes to `into`.

        Where the sketch of a bucket is not finite, its c = h and its bases stay; for all buckets if it is `void`:
        what `proceed` took for h has turned out not to be h.
        """
        works, self._works = self._works, []
        second, self._second = self._second, []
        for part in self._parts[len(second) :]:
            part.expect(history)
        return Sketch(self._parts, works, second, gradient, history, into, wait, void)


class Sketch:
    """One step's c = h + Q, completed bucket by bucket, so that other work can go on while the last ones fly."""

    def __init__(
        self,
        parts: Sequence[_Part],
        works: Sequence[Work],
        second: list[Work],
        gradient: Vector,
        history: Vector,
        into: Vector,
        wait: Callable[[Work], None],
        void: bool,
    ) -> None:
        self._parts, self._works, self._second = parts, works, second
        self._gradient, self._history, self.vector = gradient, history, into
        self._wait, self._void = wait, void
        self._complete = 0
        self.used = [False] * len(into.views)
        """Which parameters have a gradient on any rank in this step; of those in complete buckets."""

    def exchanged(self) -> bool:
        """Is there nothing of it on the wire any more?"""
        self._proceed()
        return len(self._second) == len(self._parts) and self._second[-1].done()

    def complete(self, bucket: int) -> None:
        """Waits until this bucket of `vector` is c, and all those before it."""
        self._proceed()
        while self._complete <= bucket:
            k, part = self._complete, self._parts[self._complete]
            if k == len(self._second):
                self._wait(self._works[k])
                self._launch_second()
            self._wait(self._second[k])
            if part.end() and not self._void:
                part.expand(self._history, self.vector)
            else:
                self.vector.flats[k].copy_(self._history.flats[k])
            part.mark_used(self.used)
            self._complete += 1

    def give_up(self) -> None:
        """Buckets that are not complete become h."""
        for k in range(self._complete, len(self._parts)):
            self.vector.flats[k].copy_(self._history.flats[k])
        self._complete = len(self._parts)

    def _proceed(self) -> None:
        while (k := len(self._second)) < len(self._parts) and self._works[k].done():
            self._works[k].wait()  # raises what it failed with
            self._launch_second()

    def _launch_second(self) -> None:
        part = self._parts[len(self._second)]
        self._second.append(part.launch_second(self._gradient))
        part.expect_second(self._history)  # while it flies


def _shape(place: Place) -> tuple[int, int]:
    shape = place.shape
    rows = shape[0] if len(shape) > 1 else 1
    return rows, shape.numel() // max(rows, 1)


def _shrinks(place: Place, rank: int) -> bool:
    rows, rest = _shape(place)
    if place.parameter.is_complex():
        return False
    return (rows + rest) * min(rank, rows, rest) < rows * rest


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Where all is matrices, nothing is sent whole; torch refuses an empty list."""
    if targets:
        torch._foreach_copy_(targets, sources)


def _cutter(flat: Tensor) -> Callable[[Sequence[int]], Tensor]:
    """Takes one part after another off a flat tensor."""
    start = 0

    def cut(shape: Sequence[int]) -> Tensor:
        nonlocal start
        part = flat[start : start + int(torch.Size(shape).numel())].view(shape)
        start += part.numel()
        return part

    return cut
