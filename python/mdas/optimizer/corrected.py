"""Delayed averages with prediction, for an optimizer that cannot take a step back.

It is given the prediction at once and, a step later, what was wrong with it: with gbar_t the average of step t and c_t
its prediction, the same on all ranks, step t gives it

    u_t = c_t + gbar_{t-1} - c_{t-1}

The sum of all u up to step t is the sum of the exact averages before it, plus c_t: what has been given too much or too
little never lasts longer than a step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mdas.communicator import Communicator, Work, tags
from mdas.optimizer import kernels
from mdas.optimizer.buckets import Layout, Vector
from mdas.optimizer.sketch import Sketcher

logger = logging.getLogger("mdas.optimizer")


class Corrected:
    """What is in flight, and what the optimizer has been given for it."""

    def __init__(self, layout: Layout, communicator: Communicator, predict: str, sketch_rank: int) -> None:
        self._layout = layout
        self._communicator = communicator
        self._predicts = predict != "none"
        self._sketcher: Sketcher | None = None
        self._sketched: Vector | None = None
        if predict == "sketch":
            self._sketcher, self._sketched = Sketcher(layout, communicator, sketch_rank), layout.vector()
        # One slot is filled while the other is in flight; and besides the average in flight there are the one before it
        # (h) and one that the next may overwrite.
        memory = communicator.memory
        self._slots = [layout.vector(memory) for _ in range(2)]
        self._free = [layout.vector(memory) for _ in range(2)]
        self._history = layout.vector(memory)
        """h: the last finite average."""
        self._owed = layout.vector()
        """To the optimizer, besides the average in flight: -c_{t-1}."""
        self._pending: tuple[Vector, list[Work]] | None = None
        """The average in flight."""
        self._target = self._history
        """Where the average of this pass is to arrive."""
        self._works: list[Work] = []
        self._used = [True] * len(layout.places)
        self.skipped = 0
        """Averages that were not finite, and left out."""

    def fits(self, k: int, parameters: Sequence[Tensor]) -> bool:
        """Are these the parameters of bucket k?"""
        members = self._layout.members
        return (
            k < len(members)
            and len(members[k]) == len(parameters)
            and all(place.parameter is p for place, p in zip(members[k], parameters, strict=True))
        )

    def launch(self, k: int, gradients: Sequence[Tensor]) -> None:
        """Takes over the gradients of bucket k, in bucket order, and starts what can be started. Never waits."""
        if k == 0:
            self._target = self._free.pop()
        own = self._slots[0]
        torch._foreach_copy_([own.views[place.index] for place in self._layout.members[k]], list(gradients))
        if self._sketcher is None:
            self._exchange(k)
            return
        self._sketcher.launch(own, self._used)
        if self._pending is None:
            self._sketcher.proceed(own, self._history, lambda bucket: True)
        else:
            average, works = self._pending
            self._sketcher.proceed(own, average, lambda bucket: works[bucket].done())
        # The last one has a whole step to arrive, and everybody waits for the sketch: that goes first.
        if k < len(self._layout.members) - 1:
            self._exchange(k)

    def finish(self, gradients: Sequence[Tensor], wait: Callable[[Work], None]) -> None:
        """All buckets are launched: waits for the average in flight and writes u to the gradients. What was launched
        is in flight from now on.
        """
        in_flight = self._pending is not None
        arrived = self._settle(wait)
        shared = self._history
        if self._sketcher is not None:
            assert self._sketched is not None
            shared, void = self._sketched, in_flight and not arrived
            last = len(self._layout.members) - 1
            self._sketcher.finish(self._slots[0], self._history, shared, wait, void=void).complete(last)
            self._exchange(last)
        owed = self._owed
        if self._predicts:
            torch._foreach_add_(owed.flats, shared.flats)
        torch._foreach_copy_(list(gradients), owed.views)
        self._void_debt()
        if self._predicts:
            torch._foreach_sub_(owed.flats, shared.flats)
        self._pending, self._works = (self._target, self._works), []
        self._slots.reverse()

    def finish_synchronously(self, gradients: Sequence[Tensor], wait: Callable[[Work], None]) -> None:
        """The gradients are the average of this very pass already. What is owed is added to them."""
        self._settle(wait)
        average = self._free.pop()
        torch._foreach_copy_(average.views, list(gradients))
        self._learn(average)
        torch._foreach_copy_(list(gradients), self._owed.views)
        self._void_debt()

    def _void_debt(self) -> None:
        torch._foreach_zero_(self._owed.flats)

    def _settle(self, wait: Callable[[Work], None]) -> bool:
        """Waits for the average in flight, if there is one. Is it finite?"""
        if self._pending is None:
            return False
        (average, works), self._pending = self._pending, None
        for work in works:
            wait(work)
        return self._learn(average)

    def _learn(self, average: Vector) -> bool:
        """It becomes the history, and is owed to the optimizer, if it is finite. Is it?"""
        if not math.isfinite(kernels.squared_norm(average)):
            self.skipped += 1
            if self.skipped.bit_count() == 1:  # the 1st, 2nd, 4th, ...: a run may be full of them
                logger.warning(
                    "ddp_hook: an average gradient is not finite and left out on all ranks, the %d. in this run",
                    self.skipped,
                )
            self._free.append(average)
            return False
        self._free.append(self._history)
        self._history = average
        torch._foreach_add_(self._owed.flats, average.flats)
        return True

    def _exchange(self, k: int) -> None:
        own, average = self._slots[0].flats[k], self._target.flats[k]
        self._works.append(self._communicator.allreduce(own, average, op="average", tag=tags.gradient(k)))
