"""A LightningModule with manual optimization; mdas exchanges the gradients, Lightning runs the loop.

torchrun --nproc-per-node 2 examples/lightning_manual.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from pytorch_lightning import LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mdas


def points(number: int) -> TensorDataset:
    """Points, and whether they lie within a sphere; the same on all ranks."""
    x = torch.randn(number, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.square().sum(1) < 15.3).long())


class Spheres(LightningModule):
    """Learns which points lie within a sphere."""

    def __init__(self) -> None:
        """Nothing is exchanged yet."""
        super().__init__()
        self.automatic_optimization = False  # Lightning would clip and step as it sees fit
        self.net = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 2))
        self.losses: list[float] = []

    def configure_optimizers(self) -> mdas.DistributedOptimizer:
        """All ranks make it here, at the same point, and start from rank 0's weights."""
        inner = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        self.distributed = mdas.DistributedOptimizer(inner, self, warmup_steps=10)
        return self.distributed

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> None:
        """One step of the loop, spelled out."""
        optimizer = self.optimizers()  # Lightning's view of it, which counts the steps
        assert not isinstance(optimizer, list)
        x, inside = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(self.net(x), inside)
        self.manual_backward(loss)
        optimizer.step()
        self.losses.append(float(loss.detach()))

    def on_train_end(self) -> None:
        """Ends at the base weights, which are the same bits on all ranks."""
        self.distributed.check_weights()  # that ranks have not parted
        self.distributed.close()


def main(argv: Sequence[str] | None = None) -> None:
    """Trains and prints the loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args(argv)
    mdas.init()
    data = points(64 * mdas.size() * options.steps)
    loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data, mdas.size(), mdas.rank()))
    model = Spheres()
    # One device: to Lightning, every process trains alone. It shall not put another sampler over ours.
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, loader)
    loss = mdas.average({"loss": sum(model.losses[-10:]) / len(model.losses[-10:])})["loss"]
    if mdas.rank() == 0:
        print(f"{options.steps} steps: loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
