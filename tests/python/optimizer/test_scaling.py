"""Automatic mixed precision: bfloat16 autocast, and float16 with a GradScaler."""

import copy
import math

import pytest
import torch
from ranks import on_core_ranks, on_ranks

import mdas
from mdas.errors import MismatchError
from training import base, batch, both_exchanges, exchanged, loss, mlp, train, wrapped

MODES = {
    "sync": {"schedule": "sync"},
    "none": {"predict": "none"},
    "blend": {"predict": "blend"},
    "sketch": {"predict": "sketch", "sketch_rank": 2},
}
modes = exchanged("mode", MODES, ["sketch"])


def trained(mode, *, scaled, size=2, steps=12, spoil=lambda step, rank: False, **scaling):
    """Base weights, scaler, optimizer of every rank."""

    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, max_norm=1.0, warmup_steps=2, **MODES[mode])
        scaler = mdas.GradScaler("cpu", enabled=scaled, **scaling)
        scales = []
        for step in range(steps):
            optimizer.zero_grad()
            value = loss(model, step, communicator.rank)
            if spoil(step, communicator.rank):
                value = value * math.inf
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return base(model, optimizer), scales, scaler.state_dict(), optimizer

    return on_core_ranks(size, body)


@modes
def test_scaled_training_is_unscaled_training(mode):
    """Scales are powers of two, here with growth in between: the same bits, but for the clipping's norm."""
    plain = trained(mode, scaled=False)
    scaled = trained(mode, scaled=True, init_scale=2.0**10, growth_interval=3)
    assert scaled[0][1][-1] > 2.0**10, "the scale never grew"
    for (weights, *_), (expected, *_) in zip(scaled, plain, strict=True):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@modes
def test_an_overflow_on_one_rank_is_everybodys(mode):
    out = trained(mode, scaled=True, spoil=lambda step, rank: (step, rank) == (5, 1), init_scale=2.0**8)
    weights, scales, state, _ = out[0]
    first = 5 if mode == "sync" else 6
    assert scales == [2.0**8] * first + [2.0**7] * (12 - first)
    for other, theirs, counters, optimizer in out:
        assert optimizer.skipped_steps == 1
        assert (theirs, counters) == (scales, state)
        assert torch.isfinite(other).all()
        if mode != "blend":
            assert torch.equal(other, weights)


def test_statistics_and_averages_are_in_the_users_units():
    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, schedule="sync")
        scaler = mdas.GradScaler("cpu", init_scale=2.0**12)
        scaler.scale(loss(model, 0, communicator.rank)).backward()
        local = [p.grad / 2.0**12 for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        return local, [optimizer.averaged_grad(p) for p in model.parameters()], optimizer.tally

    (ours, average, tally), (theirs, _, _) = on_ranks(2, body)
    for a, b, mean in zip(ours, theirs, average, strict=True):
        torch.testing.assert_close(mean, (a + b) / 2)
    squares = sum(float(g.double().square().sum()) for g in [*ours, *theirs]) / 2
    assert tally.square == pytest.approx(squares, rel=1e-5)


def test_what_would_go_wrong_is_refused():
    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator)
        plain, ours = torch.amp.GradScaler("cpu"), mdas.GradScaler("cpu")
        for scaler in (plain, ours):
            scaler.scale(loss(model, 0, communicator.rank))
        with pytest.raises(RuntimeError, match=r"use mdas\.GradScaler"):
            plain.step(optimizer)
        with pytest.raises(RuntimeError, match=r"pass max_norm="):
            ours.unscale_(optimizer)
        train(optimizer, model, range(2), communicator.rank)

    on_ranks(2, body)


@pytest.mark.parametrize("mode", ["sync", "sketch"])
def test_different_scales_are_a_mismatch(mode):
    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, **MODES[mode])
        scaler = mdas.GradScaler("cpu", init_scale=[8.0, 4.0, 8.0][communicator.rank])
        with pytest.raises(MismatchError) as error:
            for step in range(3):
                scaler.scale(loss(model, step, communicator.rank)).backward()
                scaler.step(optimizer)
                scaler.update()
        return str(error.value)

    for message in on_core_ranks(3, body):
        assert "rank 0 has a loss multiplied by 8 in step 0, but rank 1 has a loss multiplied by 4 in step 0" in message
        assert "a mdas.GradScaler with the same options and the same state on all ranks" in message


def test_a_plain_optimizer_is_served_as_by_torch():
    results = []
    for kind in (torch.amp.GradScaler, mdas.GradScaler):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = kind("cpu", init_scale=2.0**6)
        scaler.scale(loss(model, 0, 0)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        results.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.equal(*results)


@both_exchanges
def test_resumes_with_its_scale():
    """A gradient in flight that was taken with an older scale included."""

    def body(communicator, halt):
        model, again = mlp(), mlp(1)
        options = {"predict": "sketch", "sketch_rank": 2}
        optimizer = wrapped(model, communicator, **options)
        scaler = mdas.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
        for step in range(8):
            if step == halt:
                saved, counters = copy.deepcopy((optimizer.state_dict(), scaler.state_dict()))
                optimizer.close()
                model = again
                optimizer = wrapped(model, communicator, **options)
                optimizer.load_state_dict(saved)
                scaler = mdas.GradScaler("cpu")
                scaler.load_state_dict(counters)
            optimizer.zero_grad()
            scaler.scale(loss(model, step, communicator.rank)).backward()
            scaler.step(optimizer)
            scaler.update()
        return base(model, optimizer)

    uninterrupted = on_core_ranks(2, lambda c: body(c, None))
    for halt in (4, 5):
        resumed = on_core_ranks(2, lambda c, halt=halt: body(c, halt))
        assert all(torch.equal(a, b) for a, b in zip(resumed, uninterrupted, strict=True))


@modes
def test_bfloat16_autocast(mode):
    """Autocast changes forward and backward only: ranks agree, and the loss falls."""

    def autocast(model, step, rank):
        x, y = batch(step, rank, 48)
        with torch.autocast("cpu", torch.bfloat16):
            return torch.nn.functional.cross_entropy(model(x), y)

    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, **MODES[mode])
        with torch.no_grad():
            before = float(autocast(model, 1000, 0))
        train(optimizer, model, range(60), communicator.rank, loss=autocast)
        weights = base(model, optimizer)
        with optimizer.base_weights(), torch.no_grad():
            return weights, before, float(autocast(model, 1000, 0))

    out = on_core_ranks(2, body)
    for weights, before, after in out:
        assert torch.equal(weights, out[0][0])
        assert after < 0.9 * before
