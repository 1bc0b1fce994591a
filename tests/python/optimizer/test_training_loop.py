"""What people write in a training loop, against one process in plain torch."""

import itertools
import math
import warnings

import pytest
import torch
from ranks import FakeNetwork, on_core_ranks, on_ranks
from reference import simulate
from torch import nn

from mdas.errors import InvalidArgumentError, NonFiniteError
from training import base, built, exchanged, flat, loss, mlp, sgd, train, wrapped

MODES = {
    "sync": {"schedule": "sync"},
    "none": {"predict": "none", "warmup_steps": 2},
    "history": {"predict": "history", "warmup_steps": 2},
    "local": {"predict": "local", "warmup_steps": 2},
    # Of full rank: it predicts what is to come, and the delay changes nothing but roundings.
    "sketch": {"predict": "sketch", "sketch_rank": 24, "warmup_steps": 2},
}
pytestmark = exchanged("mode", [mode for mode in MODES if mode != "sketch"], ["sketch"])


def expectation(mode, *arguments, **options):
    """What one process comes to that sees all ranks' batches."""
    return simulate(*arguments, predict="sync" if mode == "sketch" else mode, warmup=2, **options)


def agrees(mode, ours, theirs, within=1e-4):
    """Bit for bit; to rounding, or as near as is said, where a sketch is in between."""
    if mode == "sketch":
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=within)
    else:
        assert torch.equal(ours, theirs)


def check(
    mode,
    *,
    ranks=2,
    steps=10,
    build=mlp,
    make=sgd,
    loss=loss,
    make_scheduler=None,
    max_norm=None,
    body=train,
    within=1e-4,
):
    """Product and simulation. Returns both outcomes."""
    expected = expectation(
        mode, build, make, loss, ranks=ranks, steps=steps, max_norm=max_norm, make_scheduler=make_scheduler
    )

    def rank(communicator):
        model = build()
        optimizer = wrapped(model, communicator, make, max_norm=max_norm, **MODES[mode])
        scheduler = make_scheduler(optimizer) if make_scheduler else None
        body(optimizer, model, range(steps), communicator.rank, loss=loss, scheduler=scheduler)
        return base(model, optimizer), flat(model), model, optimizer

    out = on_ranks(ranks, rank)
    for i, (b, w, _, _) in enumerate(out):
        agrees(mode, b, expected.base, within)
        agrees(mode, w, expected.forward[i], within)
    return out, expected


@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=12),
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3),
    ],
    ids=["cosine", "one cycle", "step"],
)
def test_schedulers(mode, make_scheduler):
    """OneCycleLR changes the momentum as well."""
    check(mode, make_scheduler=make_scheduler)


def test_scheduler_on_the_wrapped_optimizer(mode):
    """Built before wrapping; nobody is warned of a missing step."""

    def body(communicator):
        model = mlp()
        inner = sgd(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
        optimizer = wrapped(model, communicator, lambda m: inner, fused=True, **MODES[mode])
        train(optimizer, model, range(4), communicator.rank, scheduler=scheduler)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / 16)

    on_ranks(2, body)


def test_two_groups(mode):
    def make(model):
        layers = list(model.children())
        return torch.optim.SGD(
            [
                {"params": layers[0].parameters(), "lr": 0.1, "momentum": 0.5},
                {"params": itertools.chain(layers[2].parameters(), layers[4].parameters()), "weight_decay": 0.1},
            ],
            lr=0.02,
        )

    check(mode, make=make)


class Branches(nn.Module):
    """Uses one of two layers, or a third one never."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.never = nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(8, 3)
        self.chosen = "a"

    def forward(self, x):
        return getattr(self, self.chosen)(x)


def test_unused_parameters_do_not_move(mode):
    """Not by momentum nor by decay; used by one rank only, they get half the gradient."""

    def branch_loss(model, step, rank):
        model.chosen = "a" if step % 3 or rank else "b"
        return loss(model, step, rank)

    def make(model):
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)

    out, _ = check(mode, build=lambda: built(Branches), make=make, loss=branch_loss)
    start = built(Branches)
    for _, _, model, optimizer in out:
        assert torch.equal(model.never.weight, start.never.weight)
        assert model.never.weight.grad is None
        assert optimizer.averaged_grad(model.never.weight) is None


def test_batch_norm_statistics_are_each_ranks_own(mode):
    def build():
        return built(lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)))

    out, expected = check(mode, build=build)
    for (_, _, model, _), reference in zip(out, expected.models, strict=True):
        for ours, theirs in zip(model.buffers(), reference.buffers(), strict=True):
            agrees(mode, ours, theirs)
    assert not torch.equal(out[0][2][1].running_mean, out[1][2][1].running_mean)


def test_sync_buffers(mode):
    def body(communicator):
        model = built(lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)))
        optimizer = wrapped(model, communicator, **MODES[mode])
        train(optimizer, model, range(3), communicator.rank)
        before = model[1].running_mean.clone(), model[1].running_var.clone()
        optimizer.sync_buffers()
        return before, (model[1].running_mean, model[1].running_var), model[1].num_batches_tracked

    out = on_ranks(3, body)
    for kind in range(2):
        mean = sum(before[kind] for before, _, _ in out) / 3
        for _, after, count in out:
            torch.testing.assert_close(after[kind], mean)
            assert count == 3


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_and_overwritten_gradients(mode, set_to_none):
    """Right after backward the user overwrites `p.grad`: what is in flight is not the user's."""

    def body(optimizer, model, steps, rank, *, loss, scheduler):
        for step in steps:
            loss(model, step, rank).backward()
            for p in model.parameters():
                p.grad.fill_(math.nan)
            optimizer.step()
            for p in model.parameters():
                assert torch.isnan(p.grad).all()  # it still is the user's
                p.grad.fill_(7.0)
            optimizer.zero_grad(set_to_none=set_to_none)

    with pytest.warns(UserWarning, match="the change has no effect"):
        check(mode, body=body)


CHANGES = {
    "clip": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "scale": lambda model: model[2].weight.grad.mul_(0.5),
    "None": lambda model: model.zero_grad(),
    "zero": lambda model: model.zero_grad(set_to_none=False),
    "another": lambda model: setattr(model[2].weight, "grad", torch.zeros(24, 24)),
    "nothing": lambda model: model[2].weight.grad.norm(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_backward_and_step_are_warned_of_once(mode, change):
    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, **MODES[mode])
        for step in range(4):
            loss(model, step, communicator.rank).backward()
            with optimizer.base_weights():
                pass  # looks, and leaves everything as it was
            CHANGES[change](model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_ranks(2, body)
    messages = [str(w.message) for w in caught if "between backward() and step()" in str(w.message)]
    assert len(messages) == (0 if change == "nothing" else 2)  # once per optimizer
    assert all("max_norm=" in m for m in messages)
    if change in ("scale", "another"):
        assert all("'2.weight'" in m for m in messages)


def test_gradients_without_a_backward_pass(mode):
    """What no hook has brought counts as it stands, as for any torch optimizer."""

    def body(optimizer, model, steps, rank, *, loss, scheduler):
        for step in steps:
            parameters = list(model.parameters())
            for p, g in zip(parameters, torch.autograd.grad(loss(model, step, rank), parameters), strict=True):
                p.grad = g
            optimizer.step()

    check(mode, body=body)


@pytest.mark.parametrize("fused", [False, True])
def test_max_norm(mode, fused):
    """Of the average and of its prediction; torch computes norms in another order."""
    steps, norm = 10, 0.05
    expected = expectation(mode, mlp, sgd, loss, ranks=2, steps=steps, max_norm=norm)
    unclipped = expectation(mode, mlp, sgd, loss, ranks=2, steps=steps)

    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, max_norm=norm, fused=fused, **MODES[mode])
        train(optimizer, model, range(steps), communicator.rank)
        return base(model, optimizer), flat(model)

    for rank, (b, w) in enumerate(on_ranks(2, body)):
        torch.testing.assert_close(b, expected.base, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(w, expected.forward[rank], rtol=1e-5, atol=1e-6)
        assert (b - unclipped.base).abs().max() > 1e-3


@pytest.mark.parametrize("fused", [False, True])
def test_clip_grad_norm(mode, fused):
    """The same weights as with max_norm=, and the same norms on all ranks."""

    def body(communicator, by_call):
        model = mlp()
        optimizer = wrapped(model, communicator, fused=fused, max_norm=None if by_call else 0.1, **MODES[mode])
        norms = []
        for step in range(8):
            optimizer.zero_grad()
            loss(model, step, communicator.rank).backward()
            if by_call:
                norms.append(float(optimizer.clip_grad_norm_(0.1)))
            optimizer.step()
        return base(model, optimizer), norms

    expected = expectation(mode, mlp, sgd, loss, ranks=2, steps=8, max_norm=0.1).averages
    called, given = (on_ranks(2, lambda c, by_call=by_call: body(c, by_call)) for by_call in (True, False))
    for (weights, norms), (same, _) in zip(called, given, strict=True):
        assert torch.equal(weights, same)
        known = [step if mode == "sync" or step < 2 else max(step - 2, 1) for step in range(8)]
        squares = [sum(float(g.double().square().sum()) for g in expected[step]) for step in known]
        assert norms == pytest.approx([math.sqrt(square) for square in squares], rel=1e-5)


def test_clip_grad_value(mode):
    """By option and by call alike; in synchronous training exactly what torch would do."""

    def body(communicator, by_call):
        model = mlp()
        optimizer = wrapped(model, communicator, max_value=None if by_call else 0.01, **MODES[mode])
        for step in range(6):
            optimizer.zero_grad()
            loss(model, step, communicator.rank).backward()
            if by_call:
                optimizer.clip_grad_value_(0.01)
            optimizer.step()
        return base(model, optimizer)

    called, given = (on_ranks(2, lambda c, by_call=by_call: body(c, by_call)) for by_call in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(called, given, strict=True))
    if mode != "sync":
        return
    model = mlp()
    optimizer = sgd(model)
    for step in range(6):
        optimizer.zero_grad()
        ((loss(model, step, 0) + loss(model, step, 1)) / 2).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
    torch.testing.assert_close(called[0], flat(model))


def test_clipping_by_value_needs_the_generic_update(mode):
    def body(communicator):
        model = mlp()
        with pytest.raises(InvalidArgumentError, match="fused=True"):
            wrapped(model, communicator, fused=True, max_value=1.0, **MODES[mode])
        optimizer = wrapped(model, communicator, fused=True, **MODES[mode])
        with pytest.raises(RuntimeError, match="fused=False"):
            optimizer.clip_grad_value_(1.0)
        for bad in (0, -1.0, math.nan, "1"):
            with pytest.raises(InvalidArgumentError, match="more than 0"):
                optimizer.clip_grad_norm_(bad)

    on_ranks(2, body)


def test_accumulation_under_no_sync(mode):
    def twice(model, step, rank):
        return loss(model, 2 * step, rank) + loss(model, 2 * step + 1, rank)

    def body(optimizer, model, steps, rank, **_):
        for step in steps:
            optimizer.zero_grad()
            with optimizer.no_sync():
                loss(model, 2 * step, rank).backward()
            loss(model, 2 * step + 1, rank).backward()
            optimizer.step()

    expected = expectation(mode, mlp, sgd, twice, ranks=2, steps=6)

    def rank(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, **MODES[mode])
        body(optimizer, model, range(6), communicator.rank)
        return base(model, optimizer)

    for b in on_ranks(2, rank):
        torch.testing.assert_close(b, expected.base, rtol=1e-5, atol=1e-6)


def test_a_second_backward_pass_is_refused(mode):
    def body(communicator):
        model = mlp()
        wrapped(model, communicator, **MODES[mode])
        loss(model, 0, 0).backward()
        with pytest.raises(RuntimeError, match=r"second gradient before optimizer.step\(\).*no_sync"):
            loss(model, 1, 0).backward()

    on_ranks(2, body)


def test_a_backward_pass_that_raises_still_needs_its_step(mode):
    """As the message says; zeroing gradients does not take back what has been launched."""

    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, **MODES[mode])
        for step in range(6):
            optimizer.zero_grad()
            if (step, communicator.rank) == (3, 1):
                handle = model[2].weight.register_hook(lambda grad: 1 // 0)
                with pytest.raises(ZeroDivisionError):
                    loss(model, step, 1).backward()
                handle.remove()
                with pytest.raises(RuntimeError, match=r"has raised an exception, call step\(\) for it all the same"):
                    loss(model, step, 1).backward()
            else:
                loss(model, step, communicator.rank).backward()
            optimizer.step()
        return base(model, optimizer)

    out = on_ranks(2, body)
    assert torch.equal(out[0], out[1])


def test_averaged_grad(mode):
    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, **MODES[mode])
        parameter = model[2].weight
        assert optimizer.averaged_grad(parameter) is None
        seen = []
        train(
            optimizer,
            model,
            range(6),
            communicator.rank,
            after=lambda step: seen.append(optimizer.averaged_grad(parameter)),
        )
        return seen

    expected = expectation(mode, mlp, sgd, loss, ranks=2, steps=6).averages
    weight = [name for name, _ in mlp().named_parameters()].index("2.weight")
    for seen in on_ranks(2, body):
        for step in range(6):
            applied = step if mode == "sync" or step < 2 else step - 1
            agrees(mode, seen[step], expected[applied][weight])


def test_a_nan_on_one_rank_is_skipped_by_all(mode):
    """And poisons nothing: the run goes on as the simulation's, which drops that average."""

    def with_nan(model, step, rank):
        value = loss(model, step, rank)
        return value * math.nan if (step, rank) == (4, 1) else value

    # A sketch of a NaN predicts nothing, so that step 5 is taken from elsewhere.
    out, _ = check(mode, ranks=3, steps=12, loss=with_nan, within=1e-2)
    for _, w, _, optimizer in out:
        assert torch.isfinite(w).all()
        assert optimizer.skipped_steps == 1


def test_the_culprit_of_a_nan_is_named(mode, caplog):
    """And with nan_check="raise" all ranks stop, and say the same."""

    def with_nan(model, step, rank):
        if (step, rank) == (4, 1):
            model[2].weight.register_hook(lambda g: g * math.nan)
        return loss(model, step, rank)

    def body(communicator, nan_check):
        model = mlp()
        optimizer = wrapped(model, communicator, nan_check=nan_check, **MODES[mode])
        train(optimizer, model, range(5), communicator.rank, loss=with_nan)
        train(optimizer, model, range(5, 6), communicator.rank)

    with caplog.at_level("WARNING", "mdas.optimizer"):
        on_ranks(3, lambda communicator: body(communicator, "skip"))
    where = "step 4: the gradient of parameter '2.weight' on rank 1 has a NaN or an infinity"
    assert [record.getMessage().startswith(where) for record in caplog.records[:3]] == [True] * 3

    def stops(communicator):
        with pytest.raises(NonFiniteError, match=where):
            body(communicator, "raise")

    on_ranks(3, stops)


def test_step_without_backward(mode):
    """One rank has run out of data: the others go on, and it follows."""

    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, **MODES[mode])
        for step in range(6):
            optimizer.zero_grad()
            if communicator.rank == 0 or step < 3:
                loss(model, step, communicator.rank).backward()
            optimizer.step()
        return base(model, optimizer)

    out = on_ranks(2, body)
    assert torch.equal(out[0], out[1])


def test_buckets_go_out_in_one_order_whatever_backward_does(mode):
    """Rank 1 reaches its layers in another order than rank 0."""

    class Order(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            order = self.layers if self.forwards else list(self.layers)[::-1]
            for layer in order:
                x = torch.tanh(layer(x))
            return x[:, :3]

    network = FakeNetwork(2)

    def lane(line):
        return line.split()[0]

    def body(communicator):
        model = built(Order)
        model.forwards = communicator.rank == 0
        optimizer = wrapped(model, communicator, bucket_mb=0.0002, **MODES[mode])
        train(optimizer, model, range(4), communicator.rank)
        return base(model, optimizer)

    out = on_ranks(2, body, network)
    assert torch.equal(out[0], out[1])
    # Per lane, which is what ranks have to agree on.
    assert sorted(network.log[0], key=lane) == sorted(network.log[1], key=lane)
    assert sum("allreduce average" in line and "bulk" in line for line in network.log[0]) >= 4 * 4


def test_buckets_are_launched_during_backward(mode):
    network = FakeNetwork(2)

    def body(communicator):
        model = mlp()
        wrapped(model, communicator, bucket_mb=0.0002, **MODES[mode])
        loss(model, 0, communicator.rank).backward()
        return len([line for line in network.log[communicator.rank] if "allreduce average" in line])

    assert min(on_ranks(2, body, network)) >= 2


def test_observe_and_tally(mode):
    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, **MODES[mode])
        for step in range(5):
            optimizer.observe(loss=1.0 + communicator.rank, samples=10 * (1 + communicator.rank))
            optimizer.zero_grad()
            loss(model, step, communicator.rank).backward()
            optimizer.step()
        return optimizer.tally

    for tally in on_core_ranks(2, body):
        assert tally.samples == 30
        assert tally.loss / tally.weight == pytest.approx((10 * 1 + 20 * 2) / 30)
        assert tally.square > 0
        assert tally.average_square > 0
        assert tally.nonfinite == 0
        assert (tally.bulk > 0) == (mode != "sketch")  # torch does not tell how long its operations took


def test_close_leaves_the_base_weights(mode):
    expected = expectation(mode, mlp, sgd, loss, ranks=2, steps=6)

    def body(communicator):
        model = mlp()
        inner = sgd(model)
        optimizer = wrapped(model, communicator, lambda m: inner, **MODES[mode])
        train(optimizer, model, range(6), communicator.rank)
        optimizer.close()
        optimizer.close()
        agrees(mode, flat(model), expected.base)
        with pytest.raises(RuntimeError, match="is closed"):
            optimizer.step()
        loss(model, 6, 0).backward()  # no hook is left
        inner.step()
        assert not torch.equal(flat(model), expected.base)

    on_ranks(2, body)
