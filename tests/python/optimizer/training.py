"""Small models and loops that the tests of the optimizer share."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

_building = threading.Lock()


def mlp(seed: int = 0, width: int = 16) -> nn.Sequential:
    with _building, torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))


def batch(step: int, rank: int, size: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(size, 8, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] * x[:, 2] > 0).long()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    rank: int,
    after: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Plain loop; returns the losses. `after` is called with each step's number."""
    losses = []
    for step in steps:
        x, y = batch(step, rank)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after(step)
    return losses


def flat(model: nn.Module) -> Tensor:
    """All parameters as they are now."""
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


def base(model: nn.Module, optimizer) -> Tensor:
    """All base weights, with the pending average applied."""
    with optimizer.base_weights():
        return flat(model)
