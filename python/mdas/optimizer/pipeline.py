"""The step itself: what happens to an average once it has arrived, and what the module runs on meanwhile.

Words and symbols as in the design: b base weights, w forward weights, s optimizer state, g this rank's
gradient, gbar the average, h the previous average, c the shared part of the prediction.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch

from mdas.communicator import Communicator
from mdas.optimizer import kernels
from mdas.optimizer.buckets import Layout, Vector
from mdas.optimizer.hooks import Round
from mdas.optimizer.predict import Confidence, Prediction
from mdas.optimizer.tally import Tally, TallyExchange
from mdas.optimizer.update import Hyper, Update


@dataclass(slots=True)
class Measured:
    """Seconds, counted from the start of training."""

    exposed: float = 0.0
    """This rank waited for communication and did nothing else."""
    steps: int = 0
    skipped: int = 0
    """Steps whose average was not finite."""


class Pipeline:
    """Base weights, history, and at most one round in flight."""

    def __init__(
        self,
        layout: Layout,
        communicator: Communicator,
        update: Update,
        prediction: Prediction | None,
        *,
        delayed: bool,
        max_norm: float | None,
    ) -> None:
        self._layout = layout
        self._update = update
        self._prediction = prediction
        self._max_norm = max_norm
        self._size = communicator.size
        self.exchange = TallyExchange(communicator, len(layout.places))
        self.base: Vector | None = None
        """b. None while the parameters themselves are the base weights."""
        self.pending: Round | None = None
        self.confidence = Confidence()
        self.measured = Measured()
        self.tally = Tally()
        # Delayed: one slot is filled while the other is in flight; and besides the average in flight
        # there are the one before it (h) and one that the next round may overwrite.
        self._slots = [layout.vector(communicator.memory) for _ in range(2 if delayed else 1)]
        self._free = [layout.vector(communicator.memory) for _ in range(2 if delayed else 1)]
        self.history = layout.vector(communicator.memory)
        """h: the last finite average."""
        self.used = [False] * len(layout.places)
        """Which parameters had a gradient on any rank in `history`."""
        self.informed = False
        """Has any average arrived yet?"""
        self._guess = layout.vector() if prediction is not None and prediction.alpha is None else None

    def new_round(self) -> Round:
        """Memory for the next step's gradient and its average."""
        self._slots.reverse()
        return Round(self._slots[-1], self._free.pop(), [False] * len(self._layout.places))

    def step(self, round: Round, hyper: Hyper, *, together: bool) -> None:
        """Takes a round all of whose buckets are launched; `together`: waits for its average."""
        if self.pending is not None:
            self._absorb(self.pending)
            self.pending = None
        round.hyper = hyper
        self._launch_tally(round)
        if together:
            self._absorb(round)
            if self.base is not None:
                self._layout.load(self.base)
                self.base = None
        else:
            if self.base is None:
                self.base = self._layout.vector()
                self._layout.save(self.base)
            self.pending = round
            self._predict(self.base, round)
        self.measured.steps += 1

    def preview(self) -> Vector | None:
        """The base weights with the pending average applied, in memory of their own.

        Waits for the exchange in flight, and changes nothing. None where the parameters already are
        those weights.
        """
        if self.base is None:
            return None
        weights = self._layout.vector()
        round = self.pending
        if round is not None:
            round.settle(self.exchange)
            square = kernels.squared_norm(round.average)
            if math.isfinite(square):
                self._update.preview(
                    self.base, round.average, self._scale(square), round.used, round.hyper, weights
                )
                return weights
        weights.copy_(self.base)
        return weights

    def _absorb(self, round: Round) -> None:
        """Real update with the round's average, unless that is not finite."""
        start = time.perf_counter()
        round.settle(self.exchange)
        self.measured.exposed += time.perf_counter() - start
        assert round.tally is not None
        self.tally = round.tally
        square = kernels.squared_norm(round.average)
        if not math.isfinite(square):
            self.measured.skipped += 1
            self._free.append(round.average)
            return
        if self._guess is not None and self.informed:
            error = kernels.squared_distance(round.average, self.history)
            self.confidence.observe(round.tally.spread, error)
        self._update.step(self.base, round.average, self._scale(square), round.used, round.hyper)
        self._free.append(self.history)
        self.history, self.used, self.informed = round.average, round.used, True

    def _launch_tally(self, round: Round) -> None:
        own = Tally()
        own.square = kernels.squared_norm(round.gradient) / self._size
        own.nonfinite = float(not math.isfinite(own.square))
        if self._guess is not None:
            own.spread = kernels.squared_distance(round.gradient, self.history) / self._size
        round.tally_work = self.exchange.launch(own, round.used)

    def _predict(self, base: Vector, round: Round) -> None:
        """Forward weights: U(b, s, ghat), whose state is thrown away."""
        if self._prediction is None:
            self._layout.load(base)
            return
        alpha = self._prediction.alpha
        if alpha is None:
            alpha = self.confidence.alpha
        ghat, used = self.history, self.used
        # A gradient of this rank that is not finite must not reach its weights.
        if alpha < 1.0 and math.isfinite(kernels.squared_norm(round.gradient)):
            used = [a or b for a, b in zip(self.used, round.used, strict=True)]
            if alpha == 0.0:
                ghat = round.gradient
            else:
                assert self._guess is not None
                ghat = self._guess
                for out, g, c in zip(ghat.flats, round.gradient.flats, self.history.flats, strict=True):
                    torch.lerp(g, c, alpha, out=out)
        self._update.preview(base, ghat, self._scale(None, ghat), used, None, None)

    def _scale(self, square: float | None, vector: Vector | None = None) -> float:
        """Factor of clipping, as torch.nn.utils.clip_grad_norm_ computes it."""
        if self._max_norm is None:
            return 1.0
        if square is None:
            assert vector is not None
            square = kernels.squared_norm(vector)
        return min(1.0, self._max_norm / (math.sqrt(square) + 1e-6))
