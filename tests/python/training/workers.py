"""What the ranks of these tests do: train a small network and report the weights, bit for bit."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import torch
from torch import nn

STEPS = 50


# torch's random state belongs to the process, of which ranks as threads share one.
_building = threading.Lock()


def small_net() -> nn.Module:
    """The same weights on every call. No BatchNorm: a run is a function of the gradients alone."""
    with _building:
        torch.manual_seed(7)
        return SmallNet()


class SmallNet(nn.Module):
    """One convolution, two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(4 * 49, 24), nn.ReLU(), nn.Linear(24, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's data of one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 1, 14, 14, generator=generator), torch.randint(5, (8,), generator=generator)


def inner(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=kind == "nesterov")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = STEPS) -> None:
    for step in range(steps):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def report(model: nn.Module) -> dict[str, Any]:
    """All parameters: their bits as a digest, and their values."""
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"bits": hashlib.sha256(flat.numpy().tobytes()).hexdigest(), "values": flat.tolist()}


def train_mdas(kind: str, options: dict[str, Any], communicator: Any = None, rank: int | None = None) -> dict[str, Any]:
    """One rank: forward weights and base weights after the last step."""
    import mdas

    if communicator is None:
        mdas.init(timeout=60)
        rank = mdas.rank()
    assert rank is not None
    model = small_net()
    optimizer = mdas.DistributedOptimizer(inner(model, kind), model, communicator=communicator, **options)
    train(model, optimizer, rank)
    forward = report(model)
    with optimizer.base_weights():
        base = report(model)
    return {"forward": forward, "base": base}


def train_ddp(kind: str) -> dict[str, Any]:
    """One rank of the same training with DistributedDataParallel over Gloo."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = small_net()
    ddp = DistributedDataParallel(model)
    train(ddp, inner(model, kind), dist.get_rank())
    result = report(model)
    dist.destroy_process_group()
    return result
