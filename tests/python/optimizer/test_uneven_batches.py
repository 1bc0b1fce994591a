"""Ranks with different numbers of batches, under `mdas.join`."""

import time

import pytest
import torch
from ranks import on_core_ranks, on_ranks

import mdas
from mdas import _core
from mdas.communicator import CoreCommunicator
from mdas.errors import InvalidArgumentError, MismatchError, PeerLostError
from training import base, both_exchanges, exchanged, flat, loss, mlp, sgd, train, wrapped

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


EVERY = (1, 2)
"""The first optimizer makes a step for every batch, the second one for every other."""


def two_references():
    """As `reference`, of two models with an optimizer each."""
    models = [mlp(seed) for seed in range(2)]
    optimizers = [sgd(model) for model in models]
    for step in range(max(BATCHES)):
        having = [rank for rank, count in enumerate(BATCHES) if step < count]
        for model, optimizer, every in zip(models, optimizers, EVERY, strict=True):
            if step % every == 0:
                optimizer.zero_grad()
                sum(loss(model, step, rank) / len(having) for rank in having).backward()
                optimizer.step()
    return [flat(model) for model in models]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "options", [{"schedule": "sync"}, {"predict": "sketch", "sketch_rank": 24}, {"predict": "blend"}], ids=str
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_two_optimizers_each_at_its_own_pace(options, interleaved):
    def body(communicator):
        models = [mlp(seed) for seed in range(2)]
        engine, everyone = communicator._engine, list(range(communicator.size))
        own = [CoreCommunicator(engine, engine.new_group(everyone), communicator.rank, len(everyone)) for _ in models]
        optimizers = [wrapped(model, exchange, **options) for model, exchange in zip(models, own, strict=True)]
        with mdas.join(*optimizers):
            for step in range(BATCHES[communicator.rank]):
                pairs = zip(models, optimizers, EVERY, strict=True)
                using = [(model, optimizer) for model, optimizer, every in pairs if step % every == 0]
                for model, optimizer in using:
                    optimizer.zero_grad()
                    loss(model, step, communicator.rank).backward()
                    if not interleaved:
                        optimizer.step()
                if interleaved:
                    for _, optimizer in reversed(using):
                        optimizer.step()
        return [base(*pair) for pair in zip(models, optimizers, strict=True)]

    out = on_core_ranks(3, body)
    for weights in out:
        assert all(torch.equal(ours, first) for ours, first in zip(weights, out[0], strict=True))
        if options != {"predict": "blend"}:  # the others equal training without a delay, to rounding
            for ours, theirs in zip(weights, two_references(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_two_optimizers_of_one_communicator_are_refused():
    def body(communicator):
        optimizers = [wrapped(mlp(seed), communicator, schedule="sync") for seed in range(2)]
        with pytest.raises(InvalidArgumentError, match="share a communicator"), mdas.join(*optimizers):
            pass

    on_ranks(2, body)


@pytest.mark.timeout(120)
def test_a_failure_of_one_of_two_optimizers_ends_the_wait_for_both():
    def body(communicator):
        engine = communicator._engine
        own = [CoreCommunicator(engine, engine.new_group([0, 1]), communicator.rank, 2) for _ in range(2)]
        first, second = [wrapped(mlp(seed), own[seed], schedule="sync") for seed in range(2)]
        if communicator.rank == 1:
            time.sleep(1.0)  # meanwhile rank 0 waits for a step of either
            engine.shutdown(1.0)
            return
        with pytest.raises(PeerLostError), mdas.join(first, second):
            pass

    on_core_ranks(2, body)


def test_ranks_that_were_done_early_take_the_state_of_another_without_a_word_of_files(caplog, monkeypatch):
    """With "blend" forward weights are each rank's own; here that of another rank is wanted."""
    monkeypatch.setenv("MDAS_DETERMINISTIC", "1")
    for weights, _, _ in (out := joined(sgd, predict="blend")):
        assert torch.equal(weights, out[0][0])
    assert "resumes from the file" not in caplog.text


def test_those_of_a_job_that_has_ended_are_not_meant(monkeypatch):
    monkeypatch.setattr("mdas.optimizer.joining._open", [])
    engine = _core.loopback(1, _core.EngineSettings())[0]
    optimizer = wrapped(mlp(), CoreCommunicator(engine, 0, 0, 1))
    with mdas.join():
        pass
    engine.shutdown(1.0)
    with pytest.raises(InvalidArgumentError, match="no DistributedOptimizer yet"), mdas.join():
        pass
    assert not optimizer.closed


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
