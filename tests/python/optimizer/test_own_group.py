"""Collectives of the user's own while buckets are leaving."""

from types import SimpleNamespace

import pytest
import torch
from ranks import DEADLINE
from ranks import _run as run_ranks
from torch import nn

from mdas import _core
from mdas.communicator import CoreCommunicator
from mdas.group import Group
from mdas.optimizer import DistributedOptimizer
from training import batch, built, flat, sgd


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x, both):
        return self.a(x) + (self.b(x) if both else 0)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("predict", ["none", "sketch"])
def test_between_backward_and_step(predict, monkeypatch):
    """A rank that does not use a layer launches its bucket at `step()`, after the user's allreduce; the
    others before it.
    """
    # Ranks are threads, and share the process's session.
    monkeypatch.setattr("mdas.session.current", lambda: SimpleNamespace(summation="mdas"))
    engines = _core.loopback(2, _core.EngineSettings(timeout=DEADLINE))

    def body(user):
        model = built(Branch)
        group = Group.world(engines[user.rank])
        optimizer = DistributedOptimizer(
            sgd(model), model, group=group, predict=predict, warmup_steps=2, bucket_mb=1e-4, sketch_rank=1
        )
        losses = []
        for step in range(5):
            optimizer.zero_grad()
            loss = model(batch(step, user.rank)[0], user.rank == 0 or step % 2 == 0).square().mean()
            loss.backward()
            for lane in ("bulk", "urgent"):
                mean = loss.detach().reshape(1).clone()
                user.allreduce(mean, mean, op="average", lane=lane).wait()
                losses.append(mean.item())
            optimizer.step()
        optimizer.close()
        return losses, flat(model)

    try:
        communicators = [CoreCommunicator(engine, 0, engine.rank, 2) for engine in engines]
        out = run_ranks(communicators, body, lambda rank: engines[rank].shutdown(1.0))
    finally:
        for engine in engines:
            engine.shutdown(5.0)
    assert out[0][0] == out[1][0]
    assert torch.equal(out[0][1], out[1][1])
