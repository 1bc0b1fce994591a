"""Trains a small CNN on Fashion-MNIST, data parallel.

python examples/fashion_mnist.py                            # one process
torchrun --nproc-per-node 2 examples/fashion_mnist.py       # two
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import mdas
from fashion_data import Data, Split, load
from mdas.communicator import Communicator


class Net(nn.Sequential):
    """Two convolutions and two dense layers, 206 922 parameters."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )


def batches(split: Split, batch: int, epoch: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's batches of an epoch: every rank shuffles alike and takes every size-th batch."""
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed * 1000 + epoch))
    for step in range(steps_per_epoch(split, batch)):
        start = (step * mdas.size() + mdas.rank()) * batch
        chosen = order[start : start + batch]
        yield split.images[chosen], split.labels[chosen]


def steps_per_epoch(split: Split, batch: int) -> int:
    """Batches that every rank gets; what is left over is dropped."""
    return len(split) // (batch * mdas.size())


def learning_rate(step: int, steps: int) -> float:
    """Factor of the peak rate: linear over the first 100 steps (or a tenth), then a cosine down to 0."""
    warmup = min(100, max(1, steps // 10))
    return min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / steps))


def accuracy(model: nn.Module, split: Split) -> float:
    """Share of pictures that are classified right. In evaluation mode a forward pass uses the base weights."""
    model.eval()
    with torch.no_grad():
        classes = torch.cat([model(images).argmax(1) for images in split.images.split(1000)])
    model.train()
    return (classes == split.labels).float().mean().item()


def train(
    options: argparse.Namespace,
    data: Data,
    *,
    communicator: Communicator | None = None,
    after_step: Callable[[int, nn.Module], None] = lambda step, model: None,
) -> nn.Module:
    """The training loop. The two lines that make it data parallel are marked.

    Args:
        options: see `arguments`.
        data: equal on all ranks; `batches` shares it out.
        communicator: what to exchange gradients through, if not mdas's own core.
        after_step: called with the number of steps done and the model.
    """
    torch.manual_seed(options.seed)
    model = Net()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum)
    optimizer = mdas.DistributedOptimizer(  # <- one (the other is mdas.init() below)
        optimizer,
        model,
        schedule=options.schedule,
        predict=options.predict,
        warmup_steps=options.warmup,
        communicator=communicator,
    )
    steps = steps_per_epoch(data.train, options.batch)
    total = steps * options.epochs
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, total))

    for epoch in range(options.epochs):
        start = time.perf_counter()
        for step, (images, labels) in enumerate(batches(data.train, options.batch, epoch, options.seed)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            after_step(epoch * steps + step + 1, model)
        seconds = time.perf_counter() - start
        if mdas.rank() == 0 and not options.quiet:
            rate = steps * options.batch * mdas.size() / seconds
            print(
                f"epoch {epoch + 1}/{options.epochs}: loss {loss.item():.3f}, "
                f"test accuracy {accuracy(model, data.test):.2%}, {rate:.0f} images/s",
                flush=True,
            )
    return model


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the training."""
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="pictures per rank and step (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.1, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schedule", choices=["delayed", "sync"], default="delayed")
    parser.add_argument(
        "--predict", choices=["sketch", "sketch+blend", "blend", "history", "local", "none"], default="sketch"
    )
    parser.add_argument("--warmup", type=int, default=100, help="synchronous steps at the start (default: %(default)s)")
    parser.add_argument("--data", type=Path, default=Path("out/data"), help="where the data set is unpacked")
    parser.add_argument("--digits", action="store_true", help="train on scikit-learn's digits: small, always there")
    parser.add_argument("--quiet", action="store_true")


def main(argv: Sequence[str] | None = None) -> None:
    """Trains and prints the accuracy after every epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments(parser)
    options = parser.parse_args(argv)
    mdas.init()  # <- two
    data = load(options.data, digits=options.digits)
    if mdas.rank() == 0:
        print(f"{data.source}; {mdas.size()} processes x {options.batch} pictures", flush=True)
    train(options, data)


if __name__ == "__main__":
    main()
