"""Gradient accumulation and mixed precision: several backward passes per exchange, in bfloat16.

torchrun --nproc-per-node 2 examples/accumulation_amp.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F

import mdas


def batch(step: int, part: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's data of one backward pass: points, and whether they lie within a sphere."""
    generator = torch.Generator().manual_seed((1000 * step + part) * 1000 + rank)
    points = torch.randn(32, 16, generator=generator)
    return points, (points.square().sum(1) < 15.3).long()


def train(options: argparse.Namespace) -> float:
    """The training loop; the mean loss of the last ten steps on this rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = mdas.DistributedOptimizer(inner, model, warmup_steps=10)
    losses = []
    for step in range(options.steps):
        optimizer.zero_grad()
        total = 0.0
        for part in range(options.accumulate):
            points, inside = batch(step, part, mdas.rank())
            # Only the last backward pass of a step exchanges; the others add to the gradients.
            last = part + 1 == options.accumulate
            with nullcontext() if last else optimizer.no_sync():
                # Parameters and gradients stay float32, so that no loss scaling is needed.
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = F.cross_entropy(model(points), inside) / options.accumulate
                loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return sum(losses[-10:]) / len(losses[-10:])


def main(argv: Sequence[str] | None = None) -> None:
    """Trains and prints the loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--accumulate", type=int, default=4, help="backward passes per step (default: %(default)s)")
    options = parser.parse_args(argv)
    mdas.init()
    loss = train(options)
    if mdas.rank() == 0:
        print(f"{options.steps} steps of {options.accumulate} backward passes: loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
