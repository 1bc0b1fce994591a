"""Small models and loops that the tests of the optimizer share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mdas.optimizer import DistributedOptimizer

_building = threading.Lock()

both_exchanges = pytest.mark.parametrize("exchange", ["ours", "torch"], indirect=True)
"""Runs a test over what it calls and over torch.distributed's Gloo."""


def exchanged(argument: str, ours: Iterable[str], over_torch: Iterable[str]) -> pytest.MarkDecorator:
    """Values of an argument: some over what the test calls, some over torch.distributed's Gloo."""
    cases = [pytest.param(value, "ours", id=value) for value in ours]
    cases += [pytest.param(value, "torch", id=f"{value} over torch") for value in over_torch]
    return pytest.mark.parametrize((argument, "exchange"), cases, indirect=["exchange"])


def built(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A module made from a seed; ranks are threads and share the generator."""
    with _building, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def mlp(seed: int = 0) -> nn.Module:
    return built(
        lambda: nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3)), seed
    )


def batch(step: int, rank: int, size: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(size, 8, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] * x[:, 2] > 0).long()


def loss(model: nn.Module, step: int, rank: int) -> Tensor:
    x, y = batch(step, rank)
    return nn.functional.cross_entropy(model(x), y)


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def train(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    steps: range,
    rank: int,
    *,
    loss: Callable[[nn.Module, int, int], Tensor] = loss,
    scheduler: Any = None,
    after: Callable[[int], None] = lambda step: None,
) -> None:
    """The plain loop. `after` is called with each step's number."""
    for step in steps:
        optimizer.zero_grad()
        loss(model, step, rank).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        after(step)


def wrapped(model: nn.Module, communicator: Any, make: Any = sgd, **options: Any) -> DistributedOptimizer:
    """With small buckets, so that there are several, and no warm-up unless asked for."""
    options = {"bucket_mb": 0.001, "warmup_steps": 0, "fused": False} | options
    return DistributedOptimizer(make(model), model, communicator=communicator, **options)


def flat(model: nn.Module) -> Tensor:
    """All parameters as they are now."""
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


def base(model: nn.Module, optimizer: DistributedOptimizer) -> Tensor:
    """All base weights, with the pending average applied."""
    with optimizer.base_weights():
        return flat(model)
