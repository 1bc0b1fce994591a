"""The step itself: what happens to an average once it has arrived, and what the module runs on meanwhile.

Words and symbols as in the design: b base weights, w forward weights, s optimizer state, g this rank's
gradient, gbar the average, h the previous average, c the shared part of the prediction.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mdas.communicator import Communicator, Work, tags
from mdas.errors import Error, NonFiniteError
from mdas.optimizer import kernels
from mdas.optimizer.agreement import require_same_step
from mdas.optimizer.buckets import Layout, Vector
from mdas.optimizer.hooks import Round
from mdas.optimizer.predict import Confidence, Prediction
from mdas.optimizer.shards import like
from mdas.optimizer.sketch import Sketch, Sketcher
from mdas.optimizer.tally import Tally, TallyExchange
from mdas.optimizer.update import Change, Clip, Hyper, Update

logger = logging.getLogger("mdas.optimizer")


@dataclass(slots=True)
class Measured:
    """Counted from the start of training, on this rank."""

    steps: int = 0
    skipped: int = 0
    """Steps whose average was not finite."""
    exposed: float = 0.0
    """Seconds for which this rank waited for communication and did nothing else."""


class Pipeline:
    """Base weights, history, and at most one round in flight."""

    def __init__(
        self,
        layout: Layout,
        communicator: Communicator,
        update: Update,
        prediction: Prediction | None,
        *,
        warmup_steps: float,
        sketch_rank: int,
        clip: Clip,
        raise_nonfinite: bool = False,
    ) -> None:
        self.layout = layout
        self._update = update
        self._prediction = prediction
        self._communicator = communicator
        self.warmup_steps = warmup_steps
        """Steps that are synchronous; infinity: all of them."""
        delayed = self._delayed = math.isfinite(warmup_steps)
        self.clip = clip
        self._raise_nonfinite = raise_nonfinite
        self._rank, self.size = communicator.rank, communicator.size
        self.exchange = TallyExchange(communicator, len(layout.places))
        self.base: Vector | None = None
        """b. None while the parameters themselves are the base weights."""
        self.pending: Round | None = None
        self.adaptive = prediction is not None and prediction.alpha is None
        self.confidence = Confidence()
        self.measured = Measured()
        self.tally = Tally()
        """That of the last average that has arrived."""
        # Delayed: one slot is filled while the other is in flight; and besides the average in flight
        # there are the one before it (h) and one that the next round may overwrite.
        memory = communicator.memory
        self._slots = [layout.vector(memory) for _ in range(2 if delayed else 1)]
        self._free = [layout.vector(memory) for _ in range(2 if delayed else 1)]
        self.history = layout.vector(memory)
        """h: the last finite average."""
        self.used = [False] * len(layout.places)
        """Which parameters had a gradient on any rank in `history`."""
        self.informed = False
        """Has any finite average arrived yet?"""
        self.sketcher: Sketcher | None = None
        self.sketched: Vector | None = None
        """c = h + Q of the last delayed step."""
        if prediction is not None and prediction.sketch:
            self.sketcher, self.sketched = Sketcher(layout, communicator, sketch_rank), layout.vector()
        self.unit = 1.0
        """What gradients, averages and history are multiplied by, all alike (loss scaling)."""
        self.overflowed = False
        """Was the average that arrived in the last step not finite, and taken with the present unit?"""
        self.idle = False
        """This rank has no data (see `joining`)."""
        self.last_active = -1
        """The last step for which it had."""
        self.all_idle = False
        """Had no rank data when the newest average was made?"""
        self._lost = False
        self._void = False
        """Is this step's sketch of no use?"""
        self._torn = False
        """Was an update interrupted while it changed the weights?"""
        self._contribution = Tally()
        self._ended = time.perf_counter()

    def new_round(self) -> Round:
        """Memory for the next step's gradient and its average."""
        self._slots.reverse()
        return Round(self._slots[-1], self._free.pop(), [False] * len(self.layout.places), clip=self.clip)

    def other_round(self) -> Round:
        """A round beside the one that is being filled; for one that has arrived already."""
        average = self._free.pop() if self._delayed else self.layout.vector()
        return Round(self._slots[0], average, [False] * len(self.layout.places), clip=self.clip)

    def observe(self, loss: float | None, samples: int | None) -> None:
        """Adds to the next step's tally."""
        own = self._contribution
        own.samples += samples or 0
        if loss is not None:
            weight = 1 if samples is None else samples
            own.loss += weight * loss
            own.weight += weight

    @property
    def _together(self) -> bool:
        """Is the current step synchronous?"""
        return self.measured.steps < self.warmup_steps

    def filled(self, round: Round, bucket: int) -> None:
        """Backward has filled a bucket; those before it are full, too."""
        sketching = self.sketcher is not None and not self._together
        if self.sketcher is not None and sketching:
            self.sketcher.launch(round.gradient, round.used, active=not self.idle)
            self._proceed(self.sketcher, round)
        # The last one has a whole step to arrive, and everybody waits for the sketch: that goes first.
        if not (sketching and bucket == len(self.layout.members) - 1):
            self._exchange(round, bucket)

    def _proceed(self, sketcher: Sketcher, round: Round) -> None:
        """Goes on with the sketch during backward, as far as what it needs has arrived. Nothing is waited for: another
        rank may come to this bucket only after backward, in which it may wait for us (within tensor parallelism, say).
        """
        if self.unit != 1.0:
            return  # the scale of this step's gradient is not known yet
        pending = self.pending
        if pending is None:
            sketcher.proceed(round.gradient, self.history, lambda bucket: True)
            return
        if pending.tally is None and pending.tally_work is not None and not pending.tally_work.done():
            return
        tally = pending.statistics(self.exchange)
        if tally is None or (not pending.whole and 0 < tally.active < self.size):
            return  # the average is still to be divided among those that had data
        works = pending.works
        sketcher.proceed(round.gradient, pending.average, lambda bucket: not works or works[bucket].done())

    def _exchange(self, round: Round, bucket: int) -> None:
        own, average = round.gradient.flats[bucket], round.average.flats[bucket]
        round.works.append(
            self._communicator.allreduce(own, average, op="average", lane="bulk", tag=tags.gradient(bucket))
        )

    def step(self, round: Round, hyper: Hyper, unit: float = 1.0) -> None:
        """Takes a round all of whose buckets are full, of a loss that was multiplied by `unit`."""
        round.number, round.unit, self.overflowed = self.measured.steps, unit, False
        round.idle = self.idle
        # During backward the sketch may have gone on with a gradient and a history of different units.
        self._void = unit != self.unit and self.unit == 1.0
        if unit != self.unit:
            self._change_unit(unit)
        if not self.idle:
            self.last_active = round.number
        self._contribution.compute = time.perf_counter() - self._ended
        failure = None
        if self._together:
            self._step_together(round, hyper)
        else:
            failure = self._step_delayed(round, hyper)
        self.measured.steps += 1
        self._ended = time.perf_counter()
        if failure is not None:
            raise failure

    def norm(self, round: Round) -> float:
        """The 2-norm, out of its unit, of the newest average that is known: in a synchronous step that of this very
        round, all of whose buckets are full; it is waited for.
        """
        if not self._together:
            return math.sqrt(kernels.squared_norm(self.history)) / self.unit
        start = time.perf_counter()
        for work in round.works:
            work.wait()
        self._waited(start)
        return math.sqrt(kernels.squared_norm(round.average)) / self.unit

    def average_into_grads(self, round: Round) -> None:
        """Waits for a round all of whose buckets are full; `param.grad` becomes the average."""
        self._launch_tally(round, self.history)
        if self._arrive(round) is None:
            return  # the line search sees the loss, which is not finite either
        for place in self.layout.places:
            if self.used[place.index]:
                place.parameter.grad = like(self.history.views[place.index].clone(), place.parameter)

    def preview(self) -> Vector | None:
        """The base weights with the pending average applied, in memory of their own.

        Waits for the exchange in flight, and changes nothing. None where the parameters already are
        those weights.
        """
        if self.base is None:
            return None
        weights = self.layout.vector()
        change, pending = None, self.settled()
        if pending is not None:
            square = kernels.squared_norm(pending.average)
            if math.isfinite(square):
                change = self._real(pending, square)
        self._update.run(self.base, None, weights.views, change)
        return weights

    def current_base(self) -> Vector:
        """The base weights as they are, without what is in flight. Not to be changed."""
        if self.base is not None:
            return self.base
        weights = self.layout.vector()
        torch._foreach_copy_(weights.views, [p.detach() for p in self.layout.parameters])
        return weights

    def settled(self) -> Round | None:
        """The round in flight, once its average has arrived; None if there is none, or if it never will,
        because a rank is gone: what can be saved then is what there was before it.

        Raises RuntimeError if an update was interrupted.
        """
        if self._torn:
            raise RuntimeError(
                "a step was interrupted while it changed the weights: they and the optimizer's state are neither those "
                "before it nor those after it. Go on from the last checkpoint"
            )
        if self.pending is None:
            return None
        try:
            self.pending.settle(self.exchange)
        except Error as error:
            if not self._lost:
                self._lost = True
                logger.warning("the last average gradient is lost, base weights are those before it: %s", error)
            return None
        return self.pending

    def end(self) -> None:
        """As `finish`, but an average that is lost is left out."""
        self.pending = self.settled()
        if self.pending is not None:
            self.pending.alike = True  # there is no step to come that could differ, and ranks end when they like
        self.finish()

    def restart(self) -> None:
        """The parameters as they are become the base weights; what is in flight is dropped."""
        if self.pending is not None:
            self.pending.settle(self.exchange)
            self._free.append(self.pending.average)
            self.pending = None
        self.base = None

    def resume(self, base: Vector, pending: Round | None) -> None:
        """Goes on from these base weights; the parameters are the forward weights already."""
        self.base, self.pending = base, pending
        if not self._delayed:
            self.finish()

    def finish(self) -> None:
        """Applies what is pending; the parameters become the base weights."""
        if self.pending is not None:
            real = self._arrive(self.pending)
            self.pending = None
            self._run(self.base, real)
        if self.base is not None:
            self._run(self.base, None, self.layout.parameters)
            self.base = None

    def _change_unit(self, unit: float) -> None:
        """Differences between gradients make sense in one unit only. (Exact for powers of two.)"""
        vectors = [self.history]
        if self.sketched is not None:
            vectors.append(self.sketched)
        if self.pending is not None:
            start = time.perf_counter()
            self.pending.settle(self.exchange)
            self._waited(start)
            vectors.append(self.pending.average)
        for vector in vectors:
            torch._foreach_mul_(vector.flats, unit / self.unit)
        self.unit = unit

    def _step_together(self, round: Round, hyper: Hyper) -> None:
        self.finish()
        round.hyper = hyper
        self._launch_tally(round, self.history)
        self._run(None, self._arrive(round))

    def _step_delayed(self, round: Round, hyper: Hyper) -> BaseException | None:
        """Returns what went wrong with the prediction, if the step is otherwise whole."""
        if self.base is None:
            self.base = self.layout.vector()
            self._update.run(None, None, self.base.views)
        real = None if self.pending is None else self._arrive(self.pending)
        round.hyper = hyper
        shared, used, rest = self.history, self.used, None
        if self.sketcher is not None:
            assert self.sketched is not None
            # The same on all ranks, whether or not they have gone on with the sketch of what is now no history.
            void = self._void or (self.pending is not None and real is None)
            sketch = self.sketcher.finish(round.gradient, self.history, self.sketched, self._wait, void=void)
            shared, used, rest = sketch.vector, sketch.used, _Rest(sketch, partial(self._exchange_rest, round))
            if self.adaptive or round.clip.norm is not None:
                sketch.complete(len(shared.flats) - 1)  # what these need of it, they need of all buckets
        self._launch_tally(round, shared)
        prediction = self._predict(round, shared, used)
        if prediction is not None and rest is not None:
            prediction.complete = rest.complete
        self.pending = None
        self._run(self.base, real, self.layout.parameters, prediction)
        self._exchange_rest(round)
        self.pending = round
        return None if rest is None else rest.failure

    def _exchange_rest(self, round: Round) -> None:
        for bucket in range(len(round.works), len(self.layout.members)):
            self._exchange(round, bucket)

    def _run(
        self,
        base: Vector | None,
        real: Change | None,
        forward: Sequence[Tensor] | None = None,
        prediction: Change | None = None,
    ) -> None:
        """An update for good. If it is interrupted midway (Ctrl-C), nobody knows any more what the weights are."""
        self._torn = True
        self._update.run(base, real, forward, prediction)
        self._torn = False

    def _arrive(self, round: Round) -> Change | None:
        """Waits for a round. Its average becomes the history, and is returned to be applied; None if
        it is not finite: then nothing is learnt from it.
        """
        start = time.perf_counter()
        round.settle(self.exchange)
        self._waited(start)
        if not round.alike:
            names = [place.name for place in self.layout.places]
            require_same_step(self._communicator, names, round)
        assert round.tally is not None
        self.tally = round.tally
        self.all_idle = self.tally.active == 0
        own = self._contribution
        own.bulk, own.urgent = in_flight(round.works), in_flight([round.tally_work])
        square = kernels.squared_norm(round.average)
        if not math.isfinite(square):
            self.measured.skipped += 1
            # One that was taken with another unit has changed that already.
            self.overflowed = round.unit == self.unit
            where = self._culprit(self.tally)
            if self._raise_nonfinite:
                raise NonFiniteError(f"step {round.number}: {where}")
            if self.measured.skipped.bit_count() == 1:  # the 1st, 2nd, 4th, ...: a run may be full of them
                logger.warning(
                    "step %d: %s; update skipped on all ranks, the %d. in this run",
                    round.number,
                    where,
                    self.measured.skipped,
                )
            self._free.append(round.average)
            return None
        if self.adaptive and self.informed:
            assert round.shared is not None
            error = kernels.squared_distance(round.average, round.shared) / self.unit**2
            self.confidence.observe(round.tally.spread, error)
            if self._rank == 0:
                own.error = error
        if self._rank == 0:
            own.average_square = square / self.unit**2
        self._free.append(self.history)
        self.history, self.used, self.informed = round.average, round.used, True
        return self._real(round, square)

    def _culprit(self, tally: Tally) -> str:
        """Whose gradient made an average that is not finite."""
        ranks = int(tally.nonfinite)
        if ranks == 0:
            return "the average gradient is not finite, though every rank's own is: their sum overflows"
        if ranks > 1:
            return f"the gradients of {ranks} ranks have a NaN or an infinity"
        name = self.layout.places[int(tally.parameter)].name
        rank = self._communicator.ranks[int(tally.culprit)]
        return f"the gradient of parameter {name!r} on rank {rank} has a NaN or an infinity"

    def _real(self, round: Round, square: float) -> Change:
        scale, limit = self._scale(square, round.clip), round.clip.value
        return Change(round.average, round.used, scale=scale, limit=limit, hyper=round.hyper)

    def _launch_tally(self, round: Round, shared: Vector) -> None:
        own, self._contribution = self._contribution, Tally()
        own.square = sum(round.squares) / self.unit**2 / self.size
        bad = [index for index, square in enumerate(round.squares) if not math.isfinite(square)]
        if bad:
            own.nonfinite, own.culprit, own.parameter = 1.0, float(self._rank), float(bad[0])
        if self.adaptive:
            round.shared = shared
            own.spread = kernels.squared_distance(round.gradient, shared) / self.unit**2 / self.size
        if not round.idle:
            own.active, own.unit, own.unit_square = 1.0, self.unit, self.unit**2
        # What an idle rank trains says nothing: it has not come to where the others are.
        round.trained = [place.parameter.requires_grad and not round.idle for place in self.layout.places]
        round.tally_work = self.exchange.launch(own, round.used, round.trained)

    def _predict(self, round: Round, shared: Vector, used: list[bool]) -> Change | None:
        """ghat, as what a second update is to be made with."""
        if self._prediction is None:
            return None
        alpha = self.confidence.alpha if self._prediction.alpha is None else self._prediction.alpha
        if not math.isfinite(sum(round.squares)):
            alpha = 1.0  # this rank's gradient must not reach its weights
        change = Change(shared, used, scale=1.0 / self.unit)
        if alpha == 0.0:
            change = Change(round.gradient, round.used, scale=1.0 / self.unit)  # as it is, not to rounding
        elif alpha < 1.0:
            change.used = [a or b for a, b in zip(used, round.used, strict=True)]
            change.local, change.alpha = round.gradient, alpha
        if round.clip.norm is not None:
            change.scale = self._scale(kernels.squared_blend(change.shared, change.local, change.alpha), round.clip)
        change.limit = round.clip.value
        return change

    def _scale(self, square: float, clip: Clip) -> float:
        """Factor for a gradient of this squared norm: out of its unit, and clipped as
        torch.nn.utils.clip_grad_norm_ would clip what it then is.
        """
        if clip.norm is None:
            return 1.0 / self.unit
        return min(1.0, clip.norm / (math.sqrt(square) / self.unit + 1e-6)) / self.unit

    def _wait(self, work: Work) -> None:
        start = time.perf_counter()
        work.wait()
        self._waited(start)

    def _waited(self, start: float) -> None:
        seconds = time.perf_counter() - start
        self.measured.exposed += seconds
        self._contribution.exposed += seconds


def in_flight(works: Sequence[Work | None]) -> float:
    """Seconds from the first submission to the last completion; 0 where that is not known."""
    times = [t for work in works if work is not None and (t := work.times()) is not None]
    if not times:
        return 0.0
    return (max(t[2] for t in times) - min(t[0] for t in times)) * 1e-9


class _Rest:
    """What of a sketch is completed within the update.

    That is not to be left half done: where the sketch fails, or a signal ends the wait for it, the update goes on
    with h instead, and what has happened is told afterwards.
    """

    def __init__(self, sketch: Sketch, exchanged: Callable[[], None]) -> None:
        self._sketch = sketch
        self._exchanged = exchanged
        """Called as soon as nothing of the sketch is on the wire any more."""
        self.failure: BaseException | None = None

    def complete(self, bucket: int) -> None:
        """See `Change.complete`."""
        if self.failure is not None:
            return
        try:
            self._sketch.complete(bucket)
            if self._sketch.exchanged():
                self._exchanged()
        except (Error, KeyboardInterrupt, SystemExit) as failure:
            self.failure = failure
            self._sketch.give_up()
