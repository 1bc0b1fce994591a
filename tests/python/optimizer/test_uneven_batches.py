"""Ranks with different numbers of batches, under `mdas.join`."""

import pytest
import torch
from ranks import on_core_ranks, on_ranks

import mdas
from mdas.errors import InvalidArgumentError, MismatchError
from training import base, both_exchanges, exchanged, loss, mlp, sgd, train, wrapped

BATCHES = (3, 9, 6)
"""Of each rank."""


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def reference(make):
    """Plain torch: every step's gradient is the mean over the ranks that still have a batch."""
    model = mlp()
    optimizer = make(model)
    for step in range(max(BATCHES)):
        optimizer.zero_grad()
        having = [rank for rank, count in enumerate(BATCHES) if step < count]
        sum(loss(model, step, rank) / len(having) for rank in having).backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def joined(make, epochs=1, **options):
    """Base weights of every rank after training under `join`, and the optimizers' state."""

    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, make, **options)
        for _ in range(epochs):
            with mdas.join(optimizer):
                train(optimizer, model, range(BATCHES[communicator.rank]), communicator.rank)
        return base(model, optimizer), optimizer.state_dict(), optimizer

    return on_core_ranks(len(BATCHES), body)


@both_exchanges
@pytest.mark.parametrize("make", [sgd, adam])
def test_averages_are_over_the_ranks_that_have_data(make):
    for weights, _, _ in joined(make, schedule="sync"):
        torch.testing.assert_close(weights, reference(make), rtol=1e-4, atol=1e-5)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fused", [False, True])
@exchanged("predict", ["none", "blend", "sketch", "sketch+blend"], ["sketch"])
def test_delayed_ranks_end_together(predict, fused):
    """With the same bits everywhere, twice in a row, and where training would have come to on its own."""
    out = joined(sgd, epochs=2, predict=predict, fused=fused, sketch_rank=2, warmup_steps=2)
    for weights, state, _ in out:
        assert torch.equal(weights, out[0][0])
        assert state["mdas"]["steps"] == out[0][1]["mdas"]["steps"]
        momentum = [entry["momentum_buffer"] for entry in state["state"].values()]
        others = [entry["momentum_buffer"] for entry in out[0][1]["state"].values()]
        assert all(torch.equal(a, b) for a, b in zip(momentum, others, strict=True))


@both_exchanges
def test_a_sketch_of_full_rank_predicts_the_average_of_those_with_data():
    """Then the delay changes nothing, to rounding."""
    out = joined(sgd, predict="sketch", sketch_rank=24)
    for weights, _, _ in out:
        torch.testing.assert_close(weights, reference(sgd), rtol=1e-3, atol=1e-4)


def test_ranks_that_were_done_early_get_the_hyper_parameters_of_the_last():
    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, schedule="sync")
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        with mdas.join(optimizer):
            train(optimizer, model, range(BATCHES[communicator.rank]), communicator.rank, scheduler=scheduler)
        return optimizer.param_groups[0]["lr"], base(model, optimizer)

    out = on_core_ranks(3, body)
    assert [lr for lr, _ in out] == [pytest.approx(0.05 * 0.5**9)] * 3
    assert all(torch.equal(weights, out[0][1]) for _, weights in out)


@pytest.mark.parametrize("options", [{"schedule": "sync"}, {"predict": "sketch", "warmup_steps": 2}])
def test_ranks_that_were_done_early_get_the_loss_scale_of_the_last(options):
    """And go on with it, the weights' bits compared after every step."""

    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, check_every=1, **options)
        scaler = mdas.GradScaler("cpu", init_scale=4.0, growth_interval=3)

        def steps(numbers):
            for step in numbers:
                optimizer.zero_grad()
                scaler.scale(loss(model, step, communicator.rank)).backward()
                scaler.step(optimizer)
                scaler.update()

        with mdas.join(optimizer):
            steps(range(BATCHES[communicator.rank]))
        joined = scaler.get_scale()
        steps(range(20, 26))
        return joined, scaler.get_scale(), base(model, optimizer)

    out = on_core_ranks(3, body)
    assert [(joined, last) for joined, last, _ in out] == [(32.0, 128.0)] * 3
    assert all(torch.equal(weights, out[0][2]) for _, _, weights in out)


def test_ranks_without_data_have_no_say_in_what_is_trained():
    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator)
        with mdas.join(optimizer):
            for step in range(BATCHES[communicator.rank]):
                model[0].weight.requires_grad_(step < 4)  # rank 0 never comes here
                optimizer.zero_grad()
                loss(model, step, communicator.rank).backward()
                optimizer.step()
        return base(model, optimizer)

    out = on_core_ranks(3, body)
    assert all(torch.equal(weights, out[0]) for weights in out)


def test_ranks_without_data_are_not_compared():
    """They have not heard of the learning rate's changes."""

    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, predict="sketch", check_every=1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        with mdas.join(optimizer):
            train(optimizer, model, range(BATCHES[communicator.rank]), communicator.rank, scheduler=scheduler)
        if communicator.rank == 1:
            with torch.no_grad():
                optimizer._pipeline.base.flats[0][0] += 1
        with pytest.raises(MismatchError, match=r"base weights of ranks \[1\] differ"):
            train(optimizer, model, range(20, 24), communicator.rank)

    on_core_ranks(3, body)


def test_without_an_optimizer_it_says_so(monkeypatch):
    monkeypatch.setattr("mdas.optimizer.joining._open", [])
    with pytest.raises(InvalidArgumentError, match="no DistributedOptimizer yet"), mdas.join():
        pass


def test_an_unfinished_step_is_refused():
    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator)
        with pytest.raises(RuntimeError, match="without step"), mdas.join(optimizer):
            loss(model, 0, communicator.rank).backward()

    on_ranks(2, body)
