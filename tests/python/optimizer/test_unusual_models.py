"""Models that a sketch has nothing to hold back for, or nothing to sketch of."""

import pytest
import torch
from ranks import on_core_ranks
from torch import nn

from training import base, batch, built, wrapped


class Temperature(nn.Module):
    """A parameter without dimensions."""

    def __init__(self):
        super().__init__()
        self.layer, self.temperature = nn.Linear(8, 24), nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.layer(x) * self.temperature


MODELS = {
    "0-d parameter": Temperature,
    "only matrices": lambda: nn.Sequential(nn.Linear(8, 24, bias=False), nn.Linear(24, 24, bias=False)),
    "only vectors": lambda: nn.LayerNorm(8),
    "nothing in it": lambda: nn.ParameterList([nn.Parameter(torch.zeros(0)), nn.Parameter(torch.ones(8))]),
}


@pytest.mark.timeout(90)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_sketched_training_ends_at_the_same_weights_on_all_ranks(model, fused):
    def body(communicator):
        net = built(MODELS[model])
        optimizer = wrapped(net, communicator, predict="sketch", sketch_rank=1, warmup_steps=1, fused=fused)
        start = base(net, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            x, _ = batch(step, communicator.rank)
            (x * net[1] if isinstance(net, nn.ParameterList) else net(x)).square().mean().backward()
            optimizer.step()
        return start, base(net, optimizer)

    (start, ours), (_, theirs) = on_core_ranks(2, body)
    assert torch.isfinite(ours).all()
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, start)
