"""Delayed training of n ranks in one process, spelled out with plain torch: what the optimizer is held to.

Averages are sums in rank order, divided by n. Nothing here is shared with the implementation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Weights = list[Tensor]
Gradient = list[Tensor | None]


@dataclass
class Outcome:
    base: Tensor
    """Base weights with the pending average applied, flat."""
    forward: list[Tensor]
    """Forward weights of every rank, flat."""
    models: list[nn.Module]
    """Every rank's module, for its buffers."""
    averages: list[Gradient]


def simulate(
    build: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor],
    *,
    ranks: int,
    steps: int,
    predict: str = "sync",
    warmup: int = 0,
    max_norm: float | None = None,
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> Outcome:
    models = [build() for _ in range(ranks)]
    holder = build()
    optimizer = make_optimizer(holder)
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    history: Gradient = [torch.zeros_like(p) for p in holder.parameters()]
    pending: tuple[Gradient, list[dict[str, Any]]] | None = None
    disagreement = error = 0.0
    informed = False
    averages = []

    def observe(average: Gradient, gradients: list[Gradient]) -> None:
        nonlocal disagreement, error
        if not informed:
            return
        e = distance(average, history)
        v = sum(distance(g, history) for g in gradients) / ranks - e
        disagreement = 0.9 * disagreement + 0.1 * max(v, 0.0)
        error = 0.9 * error + 0.1 * e

    earlier: list[Gradient] = []
    for step in range(steps):
        gradients = [gradient(model, loss(model, step, rank)) for rank, model in enumerate(models)]
        average = [mean(parts) for parts in zip(*gradients, strict=True)]
        averages.append(average)
        if predict == "sync" or step < warmup:
            if finite(average):
                observe(average, gradients)
                apply(holder, optimizer, average, max_norm)
                history, informed = average, True
            forward = [weights(holder)] * ranks
        else:
            if pending is not None and finite(pending[0]):
                observe(pending[0], earlier)
                with hyper(optimizer, pending[1]):
                    apply(holder, optimizer, pending[0], max_norm)
                history, informed = pending[0], True
            now = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            pending, earlier = (average, now), gradients
            alpha = {"history": 1.0, "local": 0.0}.get(predict, disagreement / (disagreement + error or 1.0))
            forward = []
            for own in gradients:
                if predict == "none":
                    forward.append(weights(holder))
                    continue
                guess = blend(history, own, alpha if finite(own) else 1.0)
                forward.append(look_ahead(holder, optimizer, make_optimizer, guess, None, max_norm))
        for model, values in zip(models, forward, strict=True):
            load(model, values)
        if scheduler is not None:
            scheduler.step()
    final = weights(holder)
    if pending is not None and finite(pending[0]):
        final = look_ahead(holder, optimizer, make_optimizer, pending[0], pending[1], max_norm)
    return Outcome(flatten(final), [flatten(values) for values in forward], models, averages)


def gradient(model: nn.Module, loss: Tensor) -> Gradient:
    for p in model.parameters():
        p.grad = None
    loss.backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def mean(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    some = next((part for part in parts if part is not None), None)
    if some is None:
        return None
    filled = [torch.zeros_like(some) if part is None else part for part in parts]
    total = filled[0].clone()
    for part in filled[1:]:
        total = total + part
    return total / len(parts)


def blend(history: Gradient, own: Gradient, alpha: float) -> Gradient:
    if alpha == 1.0:
        return history
    if alpha == 0.0:
        return own
    return [None if g is None else torch.lerp(g, h, alpha) for g, h in zip(own, history, strict=True)]


def apply(holder: nn.Module, optimizer: torch.optim.Optimizer, average: Gradient, max_norm: float | None) -> None:
    parameters = list(holder.parameters())
    for p, g in zip(parameters, average, strict=True):
        p.grad = None if g is None else g.clone()
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    optimizer.step()


def look_ahead(
    holder: nn.Module,
    optimizer: torch.optim.Optimizer,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    guess: Gradient,
    groups: list[dict[str, Any]] | None,
    max_norm: float | None,
) -> Weights:
    copied = copy.deepcopy(holder)
    throwaway = make_optimizer(copied)
    throwaway.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with hyper(throwaway, groups or [{} for _ in throwaway.param_groups]):
        apply(copied, throwaway, guess, max_norm)
    return weights(copied)


class hyper:
    """The groups have these values for a while."""

    def __init__(self, optimizer: torch.optim.Optimizer, values: list[dict[str, Any]]) -> None:
        self._optimizer, self._values = optimizer, values

    def __enter__(self) -> None:
        self._before = [dict(group) for group in self._optimizer.param_groups]
        for group, values in zip(self._optimizer.param_groups, self._values, strict=True):
            group.update(values)

    def __exit__(self, *args: object) -> None:
        for group, values in zip(self._optimizer.param_groups, self._before, strict=True):
            group.update(values)


def distance(a: Gradient, b: Gradient) -> float:
    total = 0.0
    for x, y in zip(a, b, strict=True):
        x, y = (torch.zeros(()) if z is None else z.double() for z in (x, y))
        total += float(((x - y) ** 2).sum())
    return total


def finite(gradient: Gradient) -> bool:
    return all(g is None or bool(torch.isfinite(g).all()) for g in gradient)


def weights(model: nn.Module) -> Weights:
    return [p.detach().clone() for p in model.parameters()]


def load(model: nn.Module, values: Weights) -> None:
    with torch.no_grad():
        for p, value in zip(model.parameters(), values, strict=True):
            p.copy_(value)


def flatten(values: Weights) -> Tensor:
    return torch.cat([value.reshape(-1) for value in values])
