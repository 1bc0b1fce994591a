"""What people train, against one process in plain torch that sees all ranks' batches."""

import pytest
import torch
from ranks import on_core_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from mdas.errors import MismatchError
from training import batch, built, exchanged, wrapped

SCHEDULES = {
    "sync": {"schedule": "sync"},
    "blend": {"predict": "blend"},
    "sketch": {"predict": "sketch", "sketch_rank": 32},
}
schedules = exchanged("schedule", SCHEDULES, ["sketch"])
SIZE = 2


class Twice(nn.Module):
    """One layer used twice in a forward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.last(self.layer(torch.tanh(self.layer(torch.tanh(self.first(x))))))


class Tied(nn.Module):
    """Two layers that share a weight, as an embedding and the output of a language model do."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(8, 3), nn.Linear(8, 3)
        self.out.weight = self.into.weight

    def forward(self, x):
        return self.into(x) + self.out(torch.tanh(x))


class Checkpointed(nn.Module):
    """Activations are computed anew during backward."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.middle, self.last = (
            nn.Linear(8, 16),
            nn.Sequential(nn.Linear(16, 16), nn.Tanh()),
            nn.Linear(16, 3),
        )
        self.reentrant = reentrant

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.last(checkpoint(self.middle, x, use_reentrant=self.reentrant))


class Complex(nn.Module):
    """A complex layer between real ones."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 3)
        self.turn = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))

    def forward(self, x):
        return self.last((self.first(x).to(torch.complex64) @ self.turn).abs())


class Mixed(nn.Module):
    """Parameters in float32, float64 and bfloat16."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 16), nn.Linear(16, 16).double(), nn.Linear(16, 3).bfloat16()

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)).double())).bfloat16()).float()


class Pictures(nn.Module):
    """Convolutions whose weights lie channels last."""

    def __init__(self):
        super().__init__()
        self.convolution, self.last = nn.Conv2d(2, 6, 3, padding=1), nn.Linear(24, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        x = x.view(-1, 2, 2, 2).to(memory_format=torch.channels_last)
        return self.last(torch.tanh(self.convolution(x)).flatten(1))


MODELS = {
    "module used twice": Twice,
    "tied weights": Tied,
    "activation checkpointing": lambda: Checkpointed(False),
    "activation checkpointing, reentrant": lambda: Checkpointed(True),
    "complex": Complex,
    "several types": Mixed,
    "channels last": Pictures,
    "an empty parameter": lambda: nn.Sequential(nn.Linear(8, 3), nn.Linear(0, 3)),
}


def loss(model, step, rank):
    x, y = batch(step, rank)
    if isinstance(model, nn.Sequential):
        out = model[0](x) + model[1](x[:, :0])
    else:
        out = model(x)
    return nn.functional.cross_entropy(out, y)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def reference(make, steps):
    """Synchronous training in plain torch."""
    model = built(make)
    optimizer = sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        sum(loss(model, step, rank) / SIZE for rank in range(SIZE)).backward()
        optimizer.step()
    return torch.cat(
        [
            torch.view_as_real(p).reshape(-1) if p.is_complex() else p.detach().reshape(-1).float()
            for p in model.parameters()
        ]
    ).detach()


def numbers(model):
    parts = [torch.view_as_real(p) if p.is_complex() else p for p in model.parameters()]
    return torch.cat([p.detach().reshape(-1).float().clone() for p in parts])


@pytest.mark.timeout(120)
@schedules
@pytest.mark.parametrize("name", MODELS)
def test_models(name, schedule):
    """Synchronous training gives what one process gives; a delayed one ends near it, the same on all ranks.

    A sketch of full rank predicts exactly what it sketches; vectors are sent whole.
    """
    steps = 6

    def body(communicator):
        model = built(MODELS[name])
        optimizer = wrapped(model, communicator, sgd, **SCHEDULES[schedule])
        for step in range(steps):
            optimizer.zero_grad()
            loss(model, step, communicator.rank).backward()
            optimizer.step()
        with optimizer.base_weights():
            return numbers(model)

    ours, theirs = on_core_ranks(SIZE, body)
    assert torch.equal(ours, theirs)
    # bfloat16 keeps 8 bits.
    tolerance = 3e-2 if name == "several types" else 1e-4
    if schedule != "blend":
        torch.testing.assert_close(ours, reference(MODELS[name], steps), rtol=10 * tolerance, atol=tolerance)
    else:
        assert torch.isfinite(ours).all()


@schedules
def test_two_optimizers_over_disjoint_parameters(schedule):
    def body(communicator):
        model = built(Twice)
        halves = [model.first, nn.ModuleList([model.layer, model.last])]
        optimizers = [wrapped(half, communicator, sgd, **SCHEDULES[schedule]) for half in halves]
        for step in range(5):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss(model, step, communicator.rank).backward()
            for optimizer in optimizers:
                optimizer.step()
        with optimizers[0].base_weights(), optimizers[1].base_weights():
            return numbers(model)

    ours, theirs = on_core_ranks(SIZE, body)
    assert torch.equal(ours, theirs)
    if schedule != "blend":
        torch.testing.assert_close(ours, reference(Twice, 5), rtol=1e-3, atol=1e-4)


@schedules
def test_parameters_frozen_midway_on_all_ranks(schedule):
    """They stay where they are, but for the average that was in flight; and move again once unfrozen."""

    def body(communicator):
        model = built(Twice)
        optimizer = wrapped(model, communicator, sgd, **SCHEDULES[schedule])
        seen = []
        for step in range(9):
            model.first.requires_grad_(not 3 <= step < 6)
            optimizer.zero_grad()
            loss(model, step, communicator.rank).backward()
            optimizer.step()
            with optimizer.base_weights():
                seen.append(model.first.weight.detach().clone())
        return seen

    ours, theirs = on_core_ranks(SIZE, body)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(ours[3], ours[5]), "moved while frozen"
    assert not torch.equal(ours[2], ours[1])
    assert not torch.equal(ours[8], ours[6])


@schedules
def test_unused_on_some_ranks_and_changing(schedule):
    """A rank that does not use a parameter contributes nothing to its average; nobody hangs."""

    def picked(model, step, rank):
        x, y = batch(step, rank)
        out = model[0](x)
        if (step + rank) % 3:
            out = out + model[1](x)
        return nn.functional.cross_entropy(out, y)

    def make():
        return nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(8, 3)])

    def body(communicator):
        model = built(make)
        optimizer = wrapped(model, communicator, sgd, **SCHEDULES[schedule])
        for step in range(7):
            optimizer.zero_grad()
            picked(model, step, communicator.rank).backward()
            assert model[2].weight.grad is None
            optimizer.step()
        with optimizer.base_weights():
            return numbers(model)

    ours, theirs = on_core_ranks(SIZE, body)
    assert torch.equal(ours, theirs)
    model = built(make)
    never = model[2].weight.detach().reshape(-1).clone()
    assert torch.equal(ours[54:78], never), "a parameter that nobody uses has moved"
    if schedule == "blend":
        return
    optimizer = sgd(model)
    for step in range(7):
        optimizer.zero_grad()
        (sum(picked(model, step, rank) for rank in range(SIZE)) / SIZE).backward()
        optimizer.step()
    torch.testing.assert_close(ours, numbers(model), rtol=1e-3, atol=1e-4)


def test_frozen_on_one_rank_only_is_an_error():
    """At construction."""

    def body(communicator):
        model = built(Twice)
        model.first.requires_grad_(communicator.rank == 0)
        with pytest.raises(MismatchError, match=r"first\.weight.*requires_grad"):
            wrapped(model, communicator, sgd)

    on_core_ranks(SIZE, body)


@schedules
@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_or_unfrozen_midway_on_one_rank_only_is_an_error(schedule, frozen):
    """Told to all ranks as soon as that step's tally is read: in this step or, if it is delayed, the next."""

    def body(communicator):
        model = built(Twice)
        optimizer = wrapped(model, communicator, sgd, **SCHEDULES[schedule])

        def step(number):
            optimizer.zero_grad()
            loss(model, number, communicator.rank).backward()
            optimizer.step()

        for number in range(6):
            if number == 2:
                model.last.bias.requires_grad_(not frozen)
            if number == 4:
                model.last.bias.requires_grad_(frozen if communicator.rank == 1 else not frozen)
            if number == (4 if schedule == "sync" else 5):
                break
            step(number)
        with pytest.raises(MismatchError) as caught:
            step(number)
        # What there is can still be saved.
        assert optimizer.state_dict()["mdas"]["steps"] == number
        optimizer.close()
        return str(caught.value)

    expected = (
        f"DistributedOptimizer: rank 0 has requires_grad={not frozen} for parameter 'last.bias' in step 4, but rank 1 "
        f"has requires_grad={frozen} for parameter 'last.bias' in step 4; freeze and unfreeze parameters on all ranks "
        "before the same backward pass"
    )
    assert on_core_ranks(SIZE, body) == [expected, expected]
