"""Trains a small GPT on bytes: the sources of Python's own standard library.

python examples/language_model.py                           # one process
torchrun --nproc-per-node 2 examples/language_model.py      # two
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import mdas

CONTEXT = 128
"""Bytes that the model sees at once."""


class Block(nn.Module):
    """Attention to what came before, then two dense layers; both added to what goes in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_dense = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, time, width) to the same shape."""
        batch, time, width = x.shape
        parts = self.query_key_value(self.before_attention(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        result: torch.Tensor = x + self.dense(self.before_dense(x))
        return result


class GPT(nn.Module):
    """Bytes to scores of the next byte."""

    def __init__(self, width: int, layers: int, heads: int = 4) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        for table in (self.byte, self.place):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """(batch, time) to (batch, time, 256)."""
        x = self.byte(text) + self.place(torch.arange(text.shape[1]))
        scores: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return scores


def corpus(megabytes: float) -> torch.Tensor:
    """The standard library's modules, in alphabetical order, so that all ranks read the same."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= megabytes * 1e6:
            break
    return torch.frombuffer(text, dtype=torch.uint8)


def batch(text: torch.Tensor, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of the text, and the same one byte on."""
    starts = torch.randint(len(text) - CONTEXT - 1, (size,), generator=torch.Generator().manual_seed(seed))
    windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the next byte, in nats."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def learning_rate(step: int, steps: int) -> float:
    """Factor of the peak rate: linear over the first tenth, then a cosine down to a tenth."""
    warmup = max(1, steps // 10)
    return min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def train(options: argparse.Namespace) -> None:
    """The training loop; every rank draws its own windows."""
    text = corpus(options.megabytes)
    learned, held_back = text[: -len(text) // 10], text[-len(text) // 10 :]
    torch.manual_seed(options.seed)
    model = GPT(options.width, options.layers)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1)
    optimizer = mdas.DistributedOptimizer(
        optimizer, model, max_norm=1.0, schedule=options.schedule, warmup_steps=min(100, options.steps // 4)
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, options.steps))
    start = time.perf_counter()
    for step in range(options.steps):
        seed = (options.seed * options.steps + step) * mdas.size() + mdas.rank()
        optimizer.zero_grad()
        loss_of(model, *batch(learned, options.batch, seed)).backward()
        optimizer.step()
        scheduler.step()
        if (step + 1) % options.report_every == 0 or step + 1 == options.steps:
            model.eval()  # evaluation uses the base weights
            with torch.no_grad():
                loss = loss_of(model, *batch(held_back, 16, seed=0)).item()
            model.train()
            rate = (step + 1) * options.batch * CONTEXT * mdas.size() / (time.perf_counter() - start)
            if mdas.rank() == 0:
                print(f"step {step + 1}: {loss / math.log(2):.3f} bits per byte, {rate:.0f} bytes/s", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains and prints how well the held-back text is predicted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=8, help="windows per rank and step (default: %(default)s)")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--megabytes", type=float, default=4.0, help="of text (default: %(default)s)")
    parser.add_argument("--report-every", type=int, default=50, help="steps (default: %(default)s)")
    parser.add_argument("--schedule", choices=["delayed", "sync"], default="delayed")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    mdas.init()
    train(options)


if __name__ == "__main__":
    main()
