"""A loop of Hugging Face Accelerate, with accumulation; mdas exchanges the gradients.

torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import mdas


def points(number: int) -> TensorDataset:
    """Points, and whether they lie within a sphere; the same on all ranks."""
    x = torch.randn(number, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.square().sum(1) < 15.3).long())


def train(accelerator: Accelerator, steps: int) -> float:
    """The training loop; the mean loss of the last ten batches over all ranks."""
    data = points(32 * accelerator.num_processes * accelerator.gradient_accumulation_steps * steps)
    model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 2))
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    distributed = mdas.DistributedOptimizer(inner, model, warmup_steps=10)
    # The loader is divided among the ranks, the optimizer steps when a step is full. The model is not passed:
    # Accelerate would wrap it in DistributedDataParallel, and the gradients would be averaged twice.
    loader, optimizer = accelerator.prepare(DataLoader(data, batch_size=32), distributed)
    losses = []
    for x, inside in loader:
        with accelerator.accumulate():
            with nullcontext() if accelerator.sync_gradients else distributed.no_sync():
                loss = F.cross_entropy(model(x), inside)
                accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    distributed.check_weights()  # that ranks have not parted
    distributed.close()
    return float(accelerator.reduce(torch.stack(losses[-10:]).mean(), "mean"))


def main(argv: Sequence[str] | None = None) -> None:
    """Trains and prints the loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--accumulate", type=int, default=2, help="backward passes per step (default: %(default)s)")
    options = parser.parse_args(argv)
    mdas.init()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.accumulate)
    loss = train(accelerator, options.steps)
    accelerator.print(f"{options.steps} steps of {options.accumulate} backward passes: loss {loss:.4f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
