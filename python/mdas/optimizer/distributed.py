"""`mdas.DistributedOptimizer`: what a training script sees."""

from __future__ import annotations

import logging
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from mdas.communicator import Communicator, tags
from mdas.communicator.choice import choose
from mdas.errors import InvalidArgumentError
from mdas.optimizer import checkpoint, shards
from mdas.optimizer.agreement import (
    Comparison,
    PeriodicComparison,
    average_tensors,
    broadcast_tensors,
    require_agreement,
)
from mdas.optimizer.buckets import Layout
from mdas.optimizer.determinism import Circumstances, circumstances, deterministic, require_same
from mdas.optimizer.fused import FusedUpdate, choose_update
from mdas.optimizer.hooks import Collector, Round, require_free
from mdas.optimizer.inspection import (
    check_device,
    check_options,
    check_types,
    describe,
    needs_closure,
    trained_parameters,
)
from mdas.optimizer.joining import opened
from mdas.optimizer.pipeline import Pipeline
from mdas.optimizer.predict import PREDICTIONS
from mdas.optimizer.tally import Tally
from mdas.optimizer.update import Clip, snapshot
from mdas.optimizer.weights import BaseWeights

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from mdas.group import Group

logger = logging.getLogger("mdas.optimizer")

Predict = Literal["sketch", "sketch+blend", "blend", "history", "local", "none"]


class DistributedOptimizer(torch.optim.Optimizer):
    """Trains a module on all ranks of a group, with the gradient exchange hidden behind computation.

    It is a `torch.optim.Optimizer`: `param_groups` and `state` are those of the optimizer that it wraps,
    learning-rate schedulers accept it. All ranks construct it at the same point with the same model and
    options, and call `step()` equally often; parameters and buffers start as rank 0's.

    Under `schedule="delayed"`, step t applies the average gradient of step t - 1, which had a whole step
    to arrive, and puts *forward weights* into the module: the base weights after one more update with a
    prediction of the average in flight. An evaluation (`module.eval()`) and `module.state_dict()` see the
    base weights by themselves; anything else that must do so uses `base_weights()`. Gradients are always
    averaged over the ranks; the loss should be the mean over the rank's samples.

    Hooks on steps belong on this optimizer: those of the wrapped one run for predictions too, or, with the
    fused update, not at all. Memory beside module and optimizer state, in copies of the parameters: 3 for
    "sync", 6 for "delayed", one more with a sketch, and one more with the generic update.

    Args:
        optimizer: any torch optimizer on parameters of `module`. SGD, Adam and AdamW have a fused kernel;
            one whose `step()` needs a closure (LBFGS) works with `schedule="sync"` only.
        module: what is trained, on the CPU (or, with a communicator of torch.distributed, where that has a backend:
            CUDA), with dense gradients in a floating-point type.
        schedule: "delayed", or "sync" to wait for every average. One rank alone is always synchronous.
        predict: what stands in for the average in flight (see `mdas.optimizer.predict`): "sketch" (default),
            "sketch+blend", "blend", "history", "local", or "none" for plain delayed training.
        sketch_rank: rank of the sketch; its traffic is proportional.
        warmup_steps: synchronous steps at the start, where a delay hurts most and the averages behind the
            confidence settle.
        bucket_mb: size at which a bucket is closed and its exchange starts, in MiB.
        max_norm: clip the averaged gradient, over all parameters, to this 2-norm, as
            `torch.nn.utils.clip_grad_norm_` does; None: no clipping.
        max_value: clip every element of the averaged gradient to [-max_value, max_value], as
            `torch.nn.utils.clip_grad_value_` does (with the generic update); None: no clipping.
        nan_check: what to do about an average that is not finite: "skip" the update on all ranks, with a warning
            that names rank and parameter, or "raise" NonFiniteError on all ranks.
        fused: True or False to choose the update; None: fused where it fits, unless there is but one
            rank. Both give what torch gives; the generic one bit for bit, the fused one to rounding.
        check_every: compare the bits of the base weights over the ranks every so many steps, as `check_weights()` does,
            without waiting: ranks that have parted are named one step later. Costs a pass over the weights each
            time. None: never.
        group: the ranks that average: an `mdas` group, or one dimension of a `DeviceMesh` (`mesh["data"]`), within
            tensor or pipeline parallelism, say; None: all ranks of the job. The exchange has a group of its own of the
            same ranks, so that your collectives may come at any moment. Parameters may be divided among the other
            dimensions' ranks (DTensor), with predictions that need no blend, without clipping by norm, and with
            `nan_check="raise"`.
        communicator: what to exchange through. "core", as None: mdas's own engine, after `mdas.init()`.
            "torch": the default process group of `torch.distributed`, without `mdas.init()`; construction then makes
            three process groups of the same ranks, for the same reason; `group` stays None, or is a `DeviceMesh`.
            Or a communicator: `mdas.communicator.TorchCommunicator(process_group)` for other groups, timeouts, or
            several optimizers after each other; or one of your own (see `mdas.communicator.Communicator`).

    Raises:
        MismatchError: on every rank, if models or options differ; names the first difference.
        InvalidArgumentError: an option makes no sense, or the model cannot be trained this way.
        TypeError: not an optimizer and a module, in this order.
        NotInitializedError: neither `mdas.init()` nor a communicator; for "torch", no process group.
        PeerLostError, CollectiveTimeoutError: a rank left meanwhile, or did not come.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: nn.Module,
        *,
        schedule: Literal["delayed", "sync"] = "delayed",
        predict: Predict = "sketch",
        sketch_rank: int = 4,
        warmup_steps: int = 100,
        bucket_mb: float = 4.0,
        max_norm: float | None = None,
        max_value: float | None = None,
        nan_check: Literal["skip", "raise"] = "skip",
        fused: bool | None = None,
        check_every: int | None = None,
        group: Group | DeviceMesh | None = None,
        communicator: Communicator | Literal["core", "torch"] | None = None,
    ) -> None:
        check_types(optimizer, module)
        if isinstance(optimizer, DistributedOptimizer):
            raise InvalidArgumentError(
                "the optimizer is a DistributedOptimizer already: wrap a torch optimizer, once. To wrap it anew, "
                "close() the first DistributedOptimizer and pass the torch optimizer again"
            )
        check_options(
            optimizer,
            schedule,
            predict,
            sketch_rank,
            warmup_steps,
            bucket_mb,
            max_norm,
            max_value,
            nan_check,
            check_every,
        )
        named = trained_parameters(optimizer, module)
        require_free(named)
        communicator = choose(communicator, group, named[0][1].device)
        check_device(named, communicator.memory(0, torch.float32).device)
        options = (
            f"schedule={schedule!r}, predict={predict!r}, sketch_rank={sketch_rank}, "
            f"warmup_steps={warmup_steps}, bucket_mb={bucket_mb}, max_norm={max_norm}, "
            f"max_value={max_value}, nan_check={nan_check!r}, fused={fused}, check_every={check_every}"
        )
        require_agreement(communicator, [options, *describe(optimizer, module)])
        shards.check(named, communicator, predict, nan_check)
        if max_norm is not None:
            shards.refuse_norm(p for _, p in named)
        broadcast_tensors(communicator, [*module.parameters(), *module.buffers()])
        # With one rank there is nothing to hide.
        delayed = schedule == "delayed" and communicator.size > 1
        self._inner = optimizer
        self._module = module
        self._communicator = communicator
        self._predict = predict
        deterministic()  # a value that makes no sense is told now, not when the first checkpoint is loaded
        prediction = PREDICTIONS[predict] if delayed else None
        self._bits: Circumstances = {
            "schedule": "delayed" if delayed else "sync",
            "predict": predict if delayed else None,
            "sketch_rank": sketch_rank if prediction is not None and prediction.sketch else None,
            "warmup_steps": warmup_steps if delayed else None,
            "bucket_mb": bucket_mb,
            "max_norm": max_norm,
            "max_value": max_value,
        }
        self._comparison = None if check_every is None else PeriodicComparison(communicator, check_every)
        self._layout = Layout(named, int(bucket_mb * 2**20))
        clip = Clip(max_norm, max_value)
        self._update = choose_update(optimizer, self._layout, clip, communicator.size, fused)
        self._pipeline = Pipeline(
            self._layout,
            communicator,
            self._update,
            prediction,
            warmup_steps=warmup_steps if delayed else math.inf,
            sketch_rank=sketch_rank,
            clip=clip,
            raise_nonfinite=nan_check == "raise",
        )
        self._collector = Collector(self._layout, self._pipeline.filled)
        self._collector.begin(self._pipeline.new_round())
        self._weights = BaseWeights(module, self._layout, self._collector, self._pipeline)
        trained = {place.parameter for place in self._layout.places}
        self._frozen = [p for group in optimizer.param_groups for p in group["params"] if p not in trained]
        self._index: dict[Tensor, int] = {place.parameter: place.index for place in self._layout.places}
        self._scaler: weakref.ref[torch.amp.GradScaler] | None = None
        """The one that calls for steps, if any."""
        self.closed = False
        """Has `close()` been called?"""
        self._needs_closure = needs_closure(optimizer)
        # What unpickling a torch optimizer does: sets up hooks and profiling without parameter groups of
        # its own, since `param_groups` and `state` are those of the wrapped optimizer.
        super().__setstate__({"defaults": optimizer.defaults})
        opened(self)

    # torch.amp.GradScaler then calls step() whatever it has found, and tells us; see there.
    _step_supports_amp_scaling = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the wrapped optimizer."""
        return self._inner.param_groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """The state of the wrapped optimizer, per parameter."""
        return self._inner.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step with this rank's gradients. Every rank calls it equally often, whatever its gradients.

        A parameter that no rank has used does not move. If the average is not finite, no rank applies it.
        After a step that failed or was interrupted, none can follow: what it has done differs between ranks.
        `state_dict()` of module and optimizer still work, without an average that has been lost.
        `closure`, if given, is evaluated first (once; by LBFGS as often as it likes), and its value returned.
        """
        if vars(self).pop("grad_scale", None) is not None:
            vars(self).pop("found_inf", None)
            raise RuntimeError(
                "torch.amp.GradScaler looks for an overflow in this rank's gradient alone, so that scales and steps "
                "would part: use mdas.GradScaler, which takes the same arguments"
            )
        return self._step(closure, 1.0)

    def _step(self, closure: Callable[[], Any] | None, unit: float) -> Any:
        """`unit`: what the loss was multiplied by."""
        self._collector.require_round()
        if self._weights.lent:
            raise RuntimeError("optimizer.step() within base_weights(): leave it first")
        self._refuse_newcomers()
        self._weights.forget()
        if self._needs_closure:
            return self._step_by_closure(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._finished_round() as round:
            self._pipeline.step(round, snapshot(self.param_groups), unit)
            self._check()
        # A scheduler that was built on the wrapped optimizer asks it whether it has made a step.
        self._inner._opt_called = True  # type: ignore[attr-defined]
        return loss

    @torch.no_grad()
    def _scaled_step(self, scaler: torch.amp.GradScaler) -> None:
        """For `GradScaler`: a step whose loss was multiplied by its scale."""
        if self._needs_closure:
            raise RuntimeError(f"{type(self._inner).__name__} cannot be used with a GradScaler")
        self._scaler = weakref.ref(scaler)
        self._step(None, scaler.get_scale())

    def _step_by_closure(self, closure: Callable[[], Any] | None) -> Any:
        """The wrapped optimizer evaluates as often as it likes, with averaged loss and gradients."""
        if closure is None:
            raise TypeError(f"step(): {type(self._inner).__name__} needs a closure")

        def averaged() -> Tensor:
            with torch.enable_grad():
                loss = closure()
            with self._finished_round() as round:
                self._pipeline.average_into_grads(round)
            value = torch.as_tensor(loss).detach().reshape(1).double()
            self._communicator.allreduce(value, value, op="average", lane="urgent", tag=tags.LOSS).wait()
            return value[0].to(torch.as_tensor(loss).dtype)

        value = self._inner.step(averaged)  # type: ignore[arg-type]
        self._check()
        return value

    def _check(self) -> None:
        if self._comparison is not None:
            # Idle ranks have missed changes of hyper-parameters; see `joining`.
            pipeline = self._pipeline
            self._comparison.after_step(lambda: None if pipeline.idle else pipeline.current_base())

    @torch.no_grad()
    def _idle_step(self) -> bool:
        """A step without data, for `mdas.join`. Returns whether the newest average was made without any."""
        self._collector.require_round()
        if self._collector.started:
            raise RuntimeError(
                "backward() without step() at the end of mdas.join(): call step() after every backward()"
            )
        self._weights.forget()
        self._pipeline.idle = True
        try:
            with self._finished_round(idle=True) as round:
                self._pipeline.step(round, snapshot(self.param_groups), self._pipeline.unit)
                self._check()
        finally:
            self._pipeline.idle = False
        return self._pipeline.all_idle

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Bytes in flight are never the user's, so that it may be called at any time."""
        self._inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: buckets are laid out once.

        Raises InvalidArgumentError; add the group to the wrapped optimizer, `close()` this one, and wrap anew.
        """
        raise InvalidArgumentError(
            "add_param_group: the division into buckets is fixed. close() this optimizer, add the group to the "
            "one that it wraps, and wrap that again, on all ranks"
        )

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, backward only accumulates into `param.grad`; the first backward pass outside it
        exchanges the sum. All ranks use it alike.
        """
        return self._collector.pause()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips the average of this step's gradients to this 2-norm when it is applied, instead of `max_norm=`.

        Between `backward()` and `step()`, on all ranks, in place of `torch.nn.utils.clip_grad_norm_`. Returns the
        norm, before clipping, of the newest average that is known (0-dimensional, the same on all ranks): in a
        synchronous step that of this step, under the delayed schedule that of two steps ago.
        """
        _positive("max_norm", max_norm)
        shards.refuse_norm(self._index)
        round = self._collector.complete()
        round.clip = replace(round.clip, norm=max_norm)
        return torch.tensor(self._pipeline.norm(round))

    def clip_grad_value_(self, max_value: float) -> None:
        """Clips every element of the average of this step's gradients when it is applied, instead of `max_value=`.

        Between `backward()` and `step()`, on all ranks, in place of `torch.nn.utils.clip_grad_value_`; with the
        generic update only (`fused=False`), else RuntimeError.
        """
        _positive("max_value", max_value)
        if isinstance(self._update, FusedUpdate):
            raise RuntimeError(
                "clip_grad_value_: the fused update cannot; build DistributedOptimizer(..., fused=False)"
            )
        round = self._collector.complete()
        round.clip = replace(round.clip, value=max_value)

    def base_weights(self) -> AbstractContextManager[None]:
        """Within it, the module holds the base weights with the pending average applied: the same on all
        ranks, and what synchronous training would call its weights.

        Waits for the exchange in flight, is not collective, and leaves training as it was, bit for bit.
        The weights are a copy: what is written to them is lost. May be nested. Does nothing where
        the module holds base weights anyway (synchronous steps).
        """
        return self._weights.lend()

    def averaged_grad(self, parameter: Tensor) -> Tensor | None:
        """The newest average that has been applied, before clipping: a copy in the parameter's shape and dtype.

        None before the first one, and where no rank used the parameter. Under the delayed schedule this
        is, after step t, the average of the gradients of step t - 1.

        Raises InvalidArgumentError if this optimizer does not train the parameter.
        """
        index = self._index.get(parameter)
        if index is None:
            raise InvalidArgumentError("averaged_grad: not a parameter that this optimizer trains")
        pipeline = self._pipeline
        return shards.like(pipeline.history.views[index] / pipeline.unit, parameter) if pipeline.used[index] else None

    def sync_buffers(self) -> None:
        """Averages the module's floating-point buffers (BatchNorm statistics) over the ranks. Collective:
        all ranks call it between the same two steps, and not between `backward()` and `step()`.
        """
        if self._collector.started:
            raise RuntimeError("sync_buffers() between backward() and step(): call it after step()")
        average_tensors(self._communicator, list(self._module.buffers()))

    @torch.no_grad()
    def check_weights(self) -> None:
        """Raises MismatchError, on all ranks, if base weights are not the same bits everywhere; names those that
        have parted from the others. Collective: all ranks call it between the same two steps.
        """
        if self._collector.started:
            raise RuntimeError("check_weights() between backward() and step(): call it after step()")
        steps = self._pipeline.measured.steps
        base = self._pipeline.current_base()
        Comparison(self._communicator, base, f"after {steps} steps, the base weights").require_equal()

    def observe(self, *, loss: float | Tensor | None = None, samples: int | None = None) -> None:
        """Adds this rank's loss (mean over its samples) and number of samples to the next step's tally."""
        self._pipeline.observe(None if loss is None else float(loss), samples)

    @property
    def tally(self) -> Tally:
        """Statistics of the last average that has arrived, summed over the ranks."""
        return self._pipeline.tally

    @property
    def exposed_seconds(self) -> float:
        """Time for which `step()` on this rank waited for communication, from the start of training. For
        parameters in CUDA memory this includes the computation that the device had still to do.
        """
        return self._pipeline.measured.exposed

    @property
    def skipped_steps(self) -> int:
        """Averages that were not finite and therefore not applied."""
        return self._pipeline.measured.skipped

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, plus, under "mdas", all that training needs to go on bit for bit.

        Waits for the exchange in flight, is not collective, and leaves training as it was. Call it between
        steps: gradients since the last `step()` are not part of it. For "none", "history" and "sketch", rank
        0's file serves all ranks; with "local" and the blends every rank has forward weights of its own and
        saves its own file (from another rank's, training goes on with that rank's forward weights for one
        step, with a warning). Holds tensors, numbers, strings, lists and dictionaries only.
        """
        state = self._inner.state_dict()
        state["mdas"] = checkpoint.save(self._pipeline, self._communicator.rank, self._predict)
        state["mdas"]["circumstances"] = self._circumstances(state["mdas"])
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where `state_dict()` was called. Parameters become the forward weights of that step;
        load the module's own state (its buffers) before or after.

        From a state without our part (a plain torch optimizer's) the delay starts anew, with a warning.

        Raises InvalidArgumentError if it is of another model, or of another version's format, or, with
        MDAS_DETERMINISTIC=1, if training would not go on with the same bits: names what is different.
        """
        self._collector.require_round()
        if self._collector.started:
            raise RuntimeError("load_state_dict() between backward() and step(): call it between steps")
        if self._weights.lent:
            raise RuntimeError("load_state_dict() within base_weights(): leave it first")
        saved = state_dict.get("mdas")
        if saved is not None:
            checkpoint.check(self._layout, saved)
        require_same((saved or {}).get("circumstances"), self._circumstances(saved))
        if saved is not None:
            checkpoint.warn_of_another_rank(saved, self._communicator.rank)
        self._adopt(state_dict)

    @torch.no_grad()
    def _adopt(self, state_dict: dict[str, Any]) -> None:
        """Goes on with a state that fits, of whichever rank."""
        saved = state_dict.get("mdas")
        self._inner.load_state_dict({k: v for k, v in state_dict.items() if k != "mdas"})
        if saved is None:
            logger.warning("load_state_dict: a torch optimizer's state; delay and warm-up start anew")
            self._pipeline.restart()
            self._pipeline.measured.steps = 0
        else:
            checkpoint.load(self._pipeline, saved, self._predict)
        self._weights.forget()

    def _circumstances(self, saved: dict[str, Any] | None) -> Circumstances:
        """Those in which what is saved, or about to be, goes on here."""
        own = saved is not None and checkpoint.of_one_rank(saved)
        options = self._bits | {"rank whose forward weights they are": self._communicator.rank if own else None}
        return circumstances(self._communicator, self._update.name, options)

    @torch.no_grad()
    def close(self) -> None:
        """Ends training: applies the average in flight (unless it was lost with a rank), leaves the base
        weights in the module, and removes all hooks. Not collective. The wrapped optimizer can be used, or
        wrapped again, afterwards.
        """
        if self.closed:
            return
        if self._weights.lent:
            raise RuntimeError("close() within base_weights(): leave it first")
        self._pipeline.end()
        self._collector.close()
        self._weights.close()
        self.closed = True

    def __repr__(self) -> str:
        who = f"rank {self._communicator.rank} of {self._communicator.size}"
        how = "sync" if math.isinf(self._pipeline.warmup_steps) else f"delayed, predict={self._predict!r}"
        return f"DistributedOptimizer({how}, {self._update.name} update, {who}, of {self._inner!r})"

    @contextmanager
    def _finished_round(self, *, idle: bool = False) -> Iterator[Round]:
        """The round that a step uses up. If that fails, later uses say what happened."""
        round = self._collector.finish(idle=idle)
        try:
            yield round
        except BaseException as error:
            self._collector.end(
                f"the last step() failed with {type(error).__name__}: {str(error) or 'it was interrupted'}. The ranks "
                "are out of step, and this optimizer cannot go on: save what you need (state_dict() works), then "
                "restart all ranks from a checkpoint"
            )
            raise
        self._collector.begin(self._pipeline.new_round())

    def _refuse_newcomers(self) -> None:
        """A parameter that was frozen at the start has no bucket."""
        for parameter in self._frozen:
            if parameter.grad is not None:
                raise RuntimeError(
                    "a parameter that did not require a gradient when DistributedOptimizer was built has one "
                    "now: close() the optimizer and wrap it again, on all ranks"
                )


def _positive(name: str, value: float) -> None:
    if not (isinstance(value, (int, float)) and value > 0):
        raise InvalidArgumentError(f"{name}={value!r}: a number, more than 0")
