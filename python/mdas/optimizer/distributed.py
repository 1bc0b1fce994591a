"""`mdas.DistributedOptimizer`: what a training script sees."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mdas.communicator import AloneCommunicator, Communicator
from mdas.errors import InvalidArgumentError
from mdas.optimizer.agreement import average_tensors, broadcast_tensors, require_agreement
from mdas.optimizer.buckets import Layout
from mdas.optimizer.hooks import Collector
from mdas.optimizer.pipeline import Pipeline
from mdas.optimizer.predict import PREDICTIONS
from mdas.optimizer.update import GenericUpdate, snapshot
from mdas.optimizer.weights import BaseWeights

Predict = Literal["sketch", "sketch+blend", "blend", "history", "local", "none"]


class DistributedOptimizer(torch.optim.Optimizer):
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
        communicator: Communicator | None = None,
    ) -> None:
        _check_options(optimizer, schedule, predict, sketch_rank, warmup_steps, bucket_mb, max_norm)
        communicator = communicator or AloneCommunicator()
        self._inner = optimizer
        self._module = module
        self._communicator = communicator
        named = _trained_parameters(optimizer, module)
        require_agreement(
            communicator,
            [
                f"schedule={schedule!r}, predict={predict!r}, sketch_rank={sketch_rank}, "
                f"warmup_steps={warmup_steps}, bucket_mb={bucket_mb}, max_norm={max_norm}",
                *_describe(optimizer, module),
            ],
        )
        broadcast_tensors(communicator, [*module.parameters(), *module.buffers()])

        # With one rank there is nothing to hide.
        delayed = schedule == "delayed" and communicator.size > 1
        self._warmup_steps: float = warmup_steps if delayed else math.inf
        self._layout = Layout(named, int(bucket_mb * 2**20))
        self._update = GenericUpdate(optimizer, self._layout)
        self._pipeline = Pipeline(
            self._layout,
            communicator,
            self._update,
            PREDICTIONS[predict] if delayed else None,
            delayed=delayed,
            sketch_rank=sketch_rank,
            max_norm=max_norm,
        )
        self._collector = Collector(self._layout, communicator)
        self._collector.begin(self._pipeline.new_round())
        self._weights = BaseWeights(module, self._layout, self._collector, self._pipeline.preview)
        self._where = {p: place for p, place in zip(self._layout.parameters, self._layout.places, strict=True)}
        # What unpickling a torch optimizer does: sets up hooks and profiling without parameter groups of
        # its own, since `param_groups` and `state` are those of the wrapped optimizer.
        super().__setstate__({"defaults": optimizer.defaults})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the wrapped optimizer."""
        return self._inner.param_groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """The state of the wrapped optimizer, per parameter."""
        return self._inner.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        if self._weights.lent:
            raise RuntimeError("optimizer.step() within base_weights(): leave it first")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        together = self._pipeline.measured.steps < self._warmup_steps
        self._pipeline.step(self._collector.finish(), snapshot(self.param_groups), together=together)
        self._weights.forget()
        self._collector.begin(self._pipeline.new_round())
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Never touches bytes in flight."""
        self._inner.zero_grad(set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, backward only accumulates into `param.grad`; the first backward pass outside it
        exchanges the sum."""
        return self._collector.pause()

    def base_weights(self) -> AbstractContextManager[None]:
        return self._weights.lend()

    def averaged_grad(self, parameter: Tensor) -> Tensor | None:
        """The newest average that has been applied, as a copy in the parameter's shape and dtype.

        None before the first one, and where no rank used the parameter. Under the delayed schedule
        this is, after step t, the average gradient of step t - 1.
        """
        place = self._where.get(parameter)  # type: ignore[call-overload]
        if place is None:
            raise InvalidArgumentError("averaged_grad: not a parameter that this optimizer trains")
        if not self._pipeline.used[place.index]:
            return None
        return self._pipeline.history.views[place.index].clone()

    def sync_buffers(self) -> None:
        """Averages the module's floating-point buffers over the ranks. Collective."""
        average_tensors(self._communicator, list(self._module.buffers()))

    def close(self) -> None:
        self._weights.close()
        self._collector.close()


def _check_options(
    optimizer: torch.optim.Optimizer,
    schedule: str,
    predict: str,
    sketch_rank: int,
    warmup_steps: int,
    bucket_mb: float,
    max_norm: float | None,
) -> None:
    if schedule not in ("delayed", "sync"):
        raise InvalidArgumentError(f'schedule={schedule!r}: choose "delayed" or "sync"')
    if predict not in PREDICTIONS:
        raise InvalidArgumentError(f"predict={predict!r}: choose one of {', '.join(PREDICTIONS)}")
    if sketch_rank < 1:
        raise InvalidArgumentError(f"sketch_rank={sketch_rank}: at least 1")
    if warmup_steps < 0:
        raise InvalidArgumentError(f"warmup_steps={warmup_steps}: at least 0")
    if bucket_mb <= 0:
        raise InvalidArgumentError(f"bucket_mb={bucket_mb}: more than 0")
    if max_norm is not None and not max_norm > 0:
        raise InvalidArgumentError(f"max_norm={max_norm}: more than 0, or None")


def _trained_parameters(
    optimizer: torch.optim.Optimizer, module: nn.Module
) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of all that the optimizer moves, in order of registration."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = [(n, p) for n, p in module.named_parameters() if id(p) in held]
    if len(named) != len(held):
        raise InvalidArgumentError(
            f"the optimizer holds {len(held) - len(named)} parameters that the module does not have: pass the "
            "module that they belong to"
        )
    return [(n, p) for n, p in named if p.requires_grad]


def _describe(optimizer: torch.optim.Optimizer, module: nn.Module) -> list[str]:
    """What all ranks must have in common, a line per thing."""
    groups = {id(p): k for k, group in enumerate(optimizer.param_groups) for p in group["params"]}
    lines = [f"optimizer {type(optimizer).__name__}"]
    for k, group in enumerate(optimizer.param_groups):
        hyper = {key: value for key, value in group.items() if key != "params"}
        lines.append(f"parameter group {k}: {hyper}")
    for name, p in module.named_parameters():
        lines.append(
            f"parameter {name!r} of shape {tuple(p.shape)}, {p.dtype}, requires_grad={p.requires_grad}, "
            f"group {groups.get(id(p))}"
        )
    for name, b in module.named_buffers():
        lines.append(f"buffer {name!r} of shape {tuple(b.shape)}, {b.dtype}")
    return lines
