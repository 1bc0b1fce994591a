"""DistributedDataParallel, unchanged, with mdas as the backend of torch.distributed in place of Gloo.

torchrun --nproc-per-node 2 examples/ddp.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mdas.torch_backend  # noqa: F401  registers the backend


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's data of one step: points, and whether they lie within a sphere."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    points = torch.randn(128, 16, generator=generator)
    return points, (points.square().sum(1) < 15.3).long()


def train(steps: int) -> float:
    """The training loop; the mean loss of the last ten steps over all ranks."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        points, inside = batch(step, dist.get_rank())
        optimizer.zero_grad()
        loss = F.cross_entropy(model(points), inside)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    mean = torch.stack(losses[-10:]).mean()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    return float(mean)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains and prints the loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args(argv)
    dist.init_process_group("mdas")
    loss = train(options.steps)
    if dist.get_rank() == 0:
        print(f"{options.steps} steps: loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
