"""How large a learning rate each prediction stands, on quadratics: section 4 of the design, by bisection.

Gradient a w, rate 1, momentum 0.9. A model with many curvatures a is trained at once; where the largest one
that decays lies between two of them, the next model looks there.
"""

import numpy as np
import pytest
import torch
from ranks import on_ranks
from torch import nn

from training import train, wrapped

MOMENTUM = 0.9


class Vector(nn.Module):
    """A weight per curvature."""

    def __init__(self, curvatures, target):
        super().__init__()
        self.curvatures, self.target = curvatures, target
        self.w = nn.Parameter(torch.ones(len(curvatures)))

    def coordinates(self):
        return self.w.detach()

    def loss(self):
        """Linear in the weights: its gradient is what is written here, whatever autograd does."""
        return self.w @ (self.curvatures * (self.coordinates() - self.target).clamp(-1e6, 1e6))


class Matrices(nn.Module):
    """A matrix per curvature, of which the gradient sees one direction, u vᵀ."""

    def __init__(self, curvatures, target):
        super().__init__()
        self.curvatures, self.target = curvatures, target
        draw = torch.Generator().manual_seed(3)
        u, v = (nn.functional.normalize(torch.randn(len(curvatures), 8, generator=draw), dim=1) for _ in range(2))
        self.directions = torch.einsum("ki,kj->kij", u, v)
        self.w = nn.ParameterList(direction.clone() for direction in self.directions)

    def coordinates(self):
        return (torch.stack(list(self.w)).detach() * self.directions).sum((1, 2))

    def loss(self):
        """As above."""
        slopes = self.curvatures * (self.coordinates() - self.target).clamp(-1e6, 1e6)
        return (torch.stack(list(self.w)) * self.directions * slopes[:, None, None]).sum()


def decays(curvatures, model, spread, steps, options):
    """Which of the curvatures bring the weights to where they belong, from a distance of 1."""

    def body(communicator):
        net = model(torch.tensor(curvatures, dtype=torch.float32), spread * (1 if communicator.rank else -1))
        optimizer = wrapped(
            net,
            communicator,
            lambda m: torch.optim.SGD(m.parameters(), lr=1.0, momentum=MOMENTUM),
            fused=True,
            bucket_mb=1,
            **options,
        )
        train(optimizer, net, range(steps), communicator.rank, loss=lambda *_: net.loss())
        return [bool(w.abs() < 1 + 2 * spread) for w in net.coordinates()]

    return np.all(on_ranks(2, body), axis=0)


def largest_stable(low, high, *, model=Vector, count=12, spread=0.0, steps=800, **options):
    """To 1 % of the interval or better."""
    for _ in range(2):
        curvatures = np.linspace(low, high, count)
        stable = decays(curvatures, model, spread, steps, options)
        assert stable[0]
        assert not stable[-1]
        last = int(np.argmin(stable)) - 1
        low, high = curvatures[last], curvatures[last + 1]
    return (low + high) / 2


def limit_of_history():
    """Of the linear recursion, by the spectral radius of its matrix on (b, s, w_t, w_{t+1})."""

    def radius(a):
        m = MOMENTUM
        s = np.array([0, m, a, 0])
        b = np.array([1, 0, 0, 0]) - s
        ahead = b - m * s - np.array([0, 0, a, 0])
        return max(abs(np.linalg.eigvals(np.array([b, s, [0, 0, 0, 1], ahead]))))

    low, high = 0.01, 2.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if radius(middle) < 1 else (low, middle)
    return low


def test_history_of_the_design():
    assert limit_of_history() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": "sync", "steps": 400}, 2 * (1 + MOMENTUM)),
        ({"predict": "none"}, 1 - MOMENTUM),
        ({"predict": "history"}, limit_of_history()),
        ({"predict": "sketch", "steps": 400}, 2 * (1 + MOMENTUM)),  # a vector is sent whole
        ({"predict": "sketch", "model": Matrices, "count": 6, "sketch_rank": 1, "steps": 300}, 2 * (1 + MOMENTUM)),
        (
            {"predict": "sketch+blend", "model": Matrices, "count": 6, "sketch_rank": 1, "steps": 300},
            2 * (1 + MOMENTUM),
        ),
        ({"predict": "blend", "steps": 400}, 2 * (1 + MOMENTUM)),  # the ranks agree
        ({"predict": "local", "steps": 400}, 2 * (1 + MOMENTUM)),
        ({"predict": "local", "spread": 0.3, "steps": 400}, 1.0),  # they do not: the distance between them grows
    ],
    ids=["sync", "none", "history", "sketch whole", "sketch", "sketch+blend", "blend", "local", "local apart"],
)
def test_largest_stable_rate(options, expected):
    assert largest_stable(0.6 * expected, 1.4 * expected, **options) == pytest.approx(expected, rel=0.03)
