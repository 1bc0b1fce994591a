"""Survives the loss of a worker: torchrun starts all of them again, and they go on from a checkpoint.

torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic.py
torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic.py --fail-at 25     # tries it out

The result is the same as without the loss, bit for bit. The checkpoint must lie where all hosts see it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import mdas


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's data of a step. A function of the step, so that a restart sees the same."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    points = torch.rand(64, 2, generator=generator) * 4 - 2
    return points, (points.square().sum(1) < 2).long()  # inside or outside of a circle


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Replaces the checkpoint as a whole: whoever is lost meanwhile leaves the old one behind."""
    partial = path.with_suffix(".partial")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, partial)
    partial.replace(path)


def digest(model: nn.Module) -> str:
    """A fingerprint of the base weights, which are the same bits on all ranks."""
    parts = [tensor.numpy().tobytes() for tensor in model.state_dict().values()]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def train(options: argparse.Namespace) -> nn.Module:
    """The training loop, from the checkpoint on if there is one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = mdas.DistributedOptimizer(optimizer, model, warmup_steps=10)
    first = 0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
        if mdas.rank() == 0:
            print(f"going on from step {first}", flush=True)
    first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    for step in range(first, options.steps):
        points, inside = batch(step, mdas.rank())
        optimizer.zero_grad()
        loss = F.cross_entropy(model(points), inside)
        loss.backward()
        optimizer.step()
        if mdas.rank() == 0 and (step + 1) % options.save_every == 0:
            save(options.checkpoint, step + 1, model, optimizer)
        if first_start and step + 1 == options.fail_at and mdas.rank() == mdas.size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    if mdas.rank() == 0:
        print(f"{options.steps} steps, loss {loss.item():.4f}, weights {digest(model)}", flush=True)
    return model


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, and prints what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10, help="steps (default: %(default)s)")
    parser.add_argument("--checkpoint", type=Path, default=Path("out/elastic.pt"))
    parser.add_argument("--fail-at", type=int, help="the last rank kills itself after this step, once")
    options = parser.parse_args(argv)
    options.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    mdas.init()
    train(options)


if __name__ == "__main__":
    main()
