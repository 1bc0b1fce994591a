"""From `param.grad` into buckets: a hook per parameter fills them, full ones are handed on in one order."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from mdas.communicator import Work
from mdas.errors import InvalidArgumentError
from mdas.optimizer import kernels
from mdas.optimizer.buckets import Layout, Place, Vector
from mdas.optimizer.shards import local, part_of_gradient
from mdas.optimizer.tally import Tally, TallyExchange
from mdas.optimizer.update import Clip

SPARSE = (
    "only dense gradients can be averaged in buckets; build the embedding with sparse=False, "
    "or leave it out of this optimizer"
)


_collectors: weakref.WeakSet[Collector] = weakref.WeakSet()
"""All that have hooks on parameters."""
_lock = threading.Lock()
"""Ranks may be threads."""


def require_free(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises InvalidArgumentError if another optimizer takes the gradient of one of these parameters."""
    with _lock:
        taken = {place.parameter for collector in _collectors for place in collector.layout.places}
    for name, parameter in named:
        if parameter in taken:
            raise InvalidArgumentError(
                f"parameter {name!r} belongs to another DistributedOptimizer already: close() that one first, or give "
                "each of them parameters of its own"
            )


@dataclass(slots=True)
class Round:
    """One step's gradient on its way to the average."""

    gradient: Vector
    """This rank's; read by the transport until `works` are done."""
    average: Vector
    """Of all ranks; complete once `works` are done."""
    used: list[bool]
    """Per parameter: has this rank a gradient? After `settle`: has any rank one?"""
    trained: list[bool] = field(default_factory=list)
    """Per parameter: did it require a gradient on this rank when the step was made?"""
    idle: bool = False
    """Had this rank no data?"""
    alike: bool = True
    """Did the same ones on all ranks, and with one unit? Known once the tally is."""
    works: list[Work] = field(default_factory=list)
    """One per bucket launched, in bucket order."""
    tally_work: Work | None = None
    tally: Tally | None = None
    number: int = 0
    """Of the step at which the gradient was taken, counted from 0."""
    clip: Clip = field(default_factory=Clip)
    """How its average is clipped when it is applied."""
    unit: float = 1.0
    """What the loss was multiplied by (see `GradScaler`), and so the gradient."""
    hyper: list[dict[str, object]] | None = None
    """The hyper-parameters of the step at which the gradient was taken."""
    squares: list[float] = field(default_factory=list)
    """|g|² of this rank's gradient, per parameter."""
    shared: Vector | None = None
    """c, where the confidence is adaptive."""

    whole: bool = False
    """Has `settle` been called?"""

    def settle(self, exchange: TallyExchange) -> None:
        """Waits until average and tally have arrived. May be called again."""
        for work in self.works:
            work.wait()
        tally = self.statistics(exchange)
        if not self.whole and tally is not None and 0 < tally.active < exchange.size:
            # The average of those that had data.
            share = exchange.size / tally.active
            torch._foreach_mul_(self.average.flats, share)
            tally.square *= share
            tally.spread *= share
        self.whole = True

    def statistics(self, exchange: TallyExchange) -> Tally | None:
        """Waits until the tally has arrived; None if none was launched. May be called again."""
        if self.tally is None and self.tally_work is not None:
            self.tally_work.wait()
            self.tally, self.used, self.alike = exchange.read()
        return self.tally


class Collector:
    """Fills the slot of one round, and hands on its buckets in bucket order.

    The order is the same on all ranks even where backward reaches parameters in different orders:
    bucket k waits for the buckets before it.
    """

    def __init__(self, layout: Layout, filled: Callable[[Round, int], None]) -> None:
        """`filled(round, k)`: bucket k is full, and so are those before it."""
        self.layout = layout
        self._filled = filled
        self._round: Round | None = None
        self._missing: list[int] = []
        self._next = 0
        self._squares: list[float | Tensor] = []
        self._taken: list[tuple[Tensor, int] | None] = []
        """Per parameter whose hook has fired: the `param.grad` that was copied, and its version then."""
        self._warned = False
        self._paused = False
        self._refusal: str | None = None
        self._why_ended = ""
        self._handles: list[RemovableHandle] = [
            place.parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), place.index))  # type: ignore[no-untyped-call]
            for place in layout.places
        ]
        with _lock:
            _collectors.add(self)

    def begin(self, round: Round) -> None:
        """From now on gradients go into this round."""
        self._round = round
        self._squares = [0.0] * len(round.used)
        self._missing = [len(members) for members in self.layout.members]
        self._next = 0
        self._taken = [None] * len(round.used)

    def finish(self, *, idle: bool = False) -> Round:
        """Fills in what no hook has brought, and hands the round over; `idle`: with nothing, whatever
        `param.grad` holds.

        Where no hook fired since the last step, `param.grad` counts as it stands, as it does for
        any torch optimizer; where it is None, the gradient is 0 and the parameter unused.
        """
        round = self._current()
        self._warn_of_changes()
        self._fill(round, idle=idle)
        round.squares = kernels.read(self._squares)
        self._round, self._taken = None, []
        return round

    def _fill(self, round: Round, *, idle: bool) -> None:
        if self._next == len(self._missing):
            return
        for place in self.layout.places:
            if not round.used[place.index]:
                gradient = place.parameter.grad
                if gradient is None or idle:
                    round.gradient.views[place.index].zero_()
                else:
                    self._take(round, place, gradient)
        self._missing = [0] * len(self._missing)
        self._hand_on(round)

    @property
    def started(self) -> bool:
        """Has a gradient come in since the last step?"""
        return self._round is not None and any(self._round.used)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Within it, backward only accumulates into `param.grad`."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @contextmanager
    def refuse(self, why: str) -> Iterator[None]:
        """Within it, a backward pass raises RuntimeError(why)."""
        before, self._refusal = self._refusal, why
        try:
            yield
        finally:
            self._refusal = before

    def complete(self) -> Round:
        """As `finish`, but the round stays until that is called; changes of `param.grad` come too late."""
        round = self._current()
        self._fill(round, idle=False)
        return round

    def require_round(self) -> None:
        """Raises RuntimeError, with the reason, after the end."""
        self._current()

    def end(self, why: str) -> None:
        """From now on gradients are refused, for this reason."""
        self._round, self._why_ended = None, why

    def close(self) -> None:
        """Removes the hooks."""
        self.end("this mdas.DistributedOptimizer is closed")
        for handle in self._handles:
            handle.remove()
        with _lock:
            _collectors.discard(self)

    def _current(self) -> Round:
        if self._round is None:
            raise RuntimeError(self._why_ended)
        return self._round

    def _collect(self, place: Place, gradient: Tensor) -> None:
        """Takes what backward has left in `param.grad`."""
        if self._paused:
            return
        if self._refusal is not None:
            raise RuntimeError(self._refusal)
        round = self._current()
        if round.used[place.index]:
            raise RuntimeError(
                f"parameter {place.name!r} got a second gradient before optimizer.step(): its first "
                "is already being exchanged. Accumulate over several backward passes under "
                "`with optimizer.no_sync():`, all but the last one; and call step() after every "
                "backward pass outside it (of this optimizer, not of the one that it wraps). If a backward "
                "pass has raised an exception, call step() for it all the same, since all ranks make the "
                "same number of steps: gradients it has not reached count as p.grad stands, None as zero."
            )
        self._take(round, place, gradient)
        self._taken[place.index] = gradient, local(gradient)._version
        self._missing[place.bucket] -= 1
        if not self._missing[place.bucket]:
            self._hand_on(round)

    def _warn_of_changes(self) -> None:
        """Clipping by hand, say, would otherwise do nothing, silently."""
        for place, taken in zip(self.layout.places, self._taken, strict=True):
            if taken is None or self._warned:
                continue
            gradient, version = taken
            if place.parameter.grad is gradient and local(gradient)._version == version:
                continue
            self._warned = True
            warnings.warn(
                f"p.grad of {place.name!r} was changed between backward() and step(); its exchange had already "
                "started, so the change has no effect. Clip with optimizer.clip_grad_norm_(...) or max_norm=, scale "
                "the loss instead of the gradients, and zero them after step() or before backward().",
                UserWarning,
                stacklevel=2,
            )

    def _take(self, round: Round, place: Place, gradient: Tensor) -> None:
        if gradient.layout != torch.strided:
            raise RuntimeError(f"parameter {place.name!r} got a {gradient.layout} gradient: {SPARSE}")
        part = part_of_gradient(gradient, place.parameter)
        self._squares[place.index] = kernels.copy_squared(round.gradient.views[place.index], part)
        round.used[place.index] = True

    def _hand_on(self, round: Round) -> None:
        """Every bucket that is full and whose predecessors were."""
        while self._next < len(self._missing) and not self._missing[self._next]:
            self._filled(round, self._next)
            self._next += 1


def _hook(collector: weakref.ref[Collector], index: int) -> Callable[[Tensor], None]:
    """For a parameter. It keeps nothing alive: torch holds it where the garbage collector does not look, and what leads
    back to the parameter from there would never be freed.
    """

    def collect(parameter: Tensor) -> None:
        taker = collector()
        if taker is not None:
            assert parameter.grad is not None
            taker._collect(taker.layout.places[index], parameter.grad)

    return collect
