"""Base weights where they are asked for, and training undisturbed, bit for bit."""

import copy
import logging
import pickle

import pytest
import torch
from ranks import on_core_ranks, on_ranks
from torch import nn

from training import base, batch, both_exchanges, built, exchanged, flat, loss, mlp, sgd, train, wrapped

PREDICTIONS = ["none", "history", "local", "blend", "sketch", "sketch+blend"]


def undisturbed(disturb, *, predict="sketch", fused=None, ranks=2, steps=12, build=mlp):
    """Trains twice, once with `disturb(model, optimizer, step)` on rank 0 after each step; the same bits?"""

    def body(communicator, disturb):
        model = build()
        optimizer = wrapped(model, communicator, predict=predict, warmup_steps=2, sketch_rank=1, fused=fused)

        def after(step):
            if communicator.rank == 0:
                disturb(model, optimizer, step)

        train(optimizer, model, range(steps), communicator.rank, after=after)
        return base(model, optimizer), flat(model)

    calm = on_ranks(ranks, lambda c: body(c, lambda *args: None))
    disturbed = on_ranks(ranks, lambda c: body(c, disturb))
    for (b, w), (b2, w2) in zip(calm, disturbed, strict=True):
        assert torch.equal(b, b2)
        assert torch.equal(w, w2)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("predict", PREDICTIONS)
def test_evaluation_on_one_rank_changes_nothing(predict, fused):
    def evaluate(model, optimizer, step):
        forward = flat(model)
        model.eval()
        with torch.no_grad():
            first = model(batch(step, 9)[0])
            again = model(batch(step, 9)[0])
        assert torch.equal(first, again)
        assert torch.equal(flat(model), forward)
        model.train()
        model.state_dict()
        optimizer.state_dict()

    undisturbed(evaluate, predict=predict, fused=fused)


@exchanged("predict", PREDICTIONS, ["sketch"])
def test_they_are_what_the_next_step_makes_real(predict):
    """And the same on all ranks."""

    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, predict=predict, fused=True)
        foreseen = []
        for step in range(6):
            optimizer.zero_grad()
            loss(model, step, communicator.rank).backward()
            optimizer.step()
            if foreseen:
                real = torch.cat([optimizer._pipeline.base.views[i].reshape(-1) for i in reversed(range(6))])
                assert torch.equal(real, foreseen[-1])
            foreseen.append(base(model, optimizer))
            assert not torch.equal(foreseen[-1], flat(model))
        return foreseen

    out = on_core_ranks(3, body)
    for a, b in zip(out[0], out[2], strict=True):
        assert torch.equal(a, b)


@both_exchanges
def test_evaluation_and_state_dict_see_them():
    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, predict="history")
        train(optimizer, model, range(5), communicator.rank)
        x = batch(0, 0)[0]
        with optimizer.base_weights():
            model.train()
            expected = model(x)
            weights = flat(model)
        assert not torch.equal(model(x), expected)
        model.eval()
        with torch.no_grad():
            assert torch.equal(model(x), expected)
        with torch.inference_mode():
            assert torch.equal(model(x), expected)
        state = model.state_dict()
        assert torch.equal(torch.cat([value.reshape(-1) for value in state.values()]), weights)
        prefixed = model.state_dict(prefix="net.")
        assert torch.equal(prefixed["net.0.weight"], state["0.weight"])
        assert isinstance(model.state_dict(keep_vars=True)["0.weight"], nn.Parameter)
        # Kept by the caller: later steps do not reach it.
        model.train()
        train(optimizer, model, range(5, 8), communicator.rank)
        assert torch.equal(torch.cat([value.reshape(-1) for value in state.values()]), weights)

    on_ranks(2, body)


def test_shared_parameters_in_state_dict():
    def tied():
        def make():
            model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
            model[2].weight = model[0].weight
            return model

        return built(make)

    def body(communicator):
        model = tied()
        optimizer = wrapped(model, communicator, predict="history")
        train(optimizer, model, range(4), communicator.rank)
        state = model.state_dict()
        assert torch.equal(state["0.weight"], state["2.weight"])
        assert not torch.equal(state["0.weight"], model[0].weight)

    on_ranks(2, body)


def test_forward_weights_come_back_whatever_happens():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.fail = nn.Linear(8, 3), False

        def forward(self, x):
            if self.fail:
                raise KeyError("a bad batch")
            return self.layer(x)

    def body(communicator):
        model = built(Fails)
        optimizer = wrapped(model, communicator, predict="history")
        train(optimizer, model, range(3), communicator.rank)
        forward = flat(model)
        model.eval()
        model.fail = True
        for _ in range(2):
            with pytest.raises(KeyError, match="a bad batch"):
                model(batch(0, 0)[0])
            assert torch.equal(flat(model), forward)
        with pytest.raises(ZeroDivisionError), optimizer.base_weights():
            raise ZeroDivisionError
        assert torch.equal(flat(model), forward)
        with optimizer.base_weights(), optimizer.base_weights():
            inner = flat(model)
        assert not torch.equal(inner, forward)
        assert torch.equal(flat(model), forward)
        model.fail = False
        model.train()
        train(optimizer, model, range(3, 5), communicator.rank)

    on_ranks(2, body)


def test_steps_and_backward_within_are_refused():
    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, predict="history")
        train(optimizer, model, range(3), communicator.rank)
        with optimizer.base_weights():
            with pytest.raises(RuntimeError, match="within base_weights"):
                optimizer.step()
            with pytest.raises(RuntimeError, match="while the module holds base weights"):
                loss(model, 3, 0).backward()
            torch.autograd.grad(loss(model, 3, 0), model[0].weight)
            late = loss(model, 3, 0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            late.backward()

    on_ranks(2, body)


def test_gradients_of_an_evaluation_are_warned_of_and_refused(caplog):
    """Not mixed silently out of two sets of weights."""

    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, predict="history")
        train(optimizer, model, range(3), communicator.rank)
        model.eval()
        for _ in range(2):
            late = loss(model, 3, 0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            late.backward()
        model.train()
        for layer in model:
            layer.eval()
        train(optimizer, model, range(3, 5), communicator.rank)

    with caplog.at_level(logging.WARNING, "mdas.optimizer"):
        on_ranks(2, body)
    assert ["torch.no_grad()" in record.getMessage() for record in caplog.records] == [True, True]


def test_synchronous_training_holds_them_anyway():
    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, schedule="sync")
        train(optimizer, model, range(3), communicator.rank)
        with optimizer.base_weights():
            loss(model, 3, communicator.rank).backward()
        optimizer.step()
        assert model.state_dict()["0.weight"].data_ptr() == model[0].weight.data_ptr()

    on_ranks(2, body)


def test_copies_and_pickles_of_the_module_are_their_own():
    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, predict="history")
        train(optimizer, model, range(3), communicator.rank)
        with optimizer.base_weights():
            twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        weights = base(model, optimizer)
        train(optimizer, model, range(3, 5), communicator.rank)
        for twin in twins:
            assert torch.equal(flat(twin), weights)
            assert torch.equal(twin.eval().state_dict()["0.weight"], twin[0].weight)
            twin(batch(0, 0)[0]).sum().backward()

    on_ranks(2, body)


@both_exchanges
def test_averaging_of_weights_over_time():
    """Torch's own EMA and SWA of the base weights."""

    def body(communicator, schedule):
        model = mlp()
        optimizer = wrapped(model, communicator, schedule=schedule, predict="blend", warmup_steps=2)
        averaged = torch.optim.swa_utils.AveragedModel(model)

        def after(step):
            with optimizer.base_weights():
                averaged.update_parameters(model)

        # The same data on all ranks: then a blend is synchronous training, and so must the averages be.
        train(optimizer, model, range(8), 0, after=after)
        return flat(averaged)

    delayed = on_ranks(2, lambda c: body(c, "delayed"))
    assert torch.equal(delayed[0], on_ranks(2, lambda c: body(c, "sync"))[0])


def test_loading_new_weights_restarts_the_delay():
    """And loading the base weights of this very step changes nothing."""
    other = mlp(seed=7)

    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, predict="history")
        train(optimizer, model, range(4), communicator.rank)
        forward, same = flat(model), {k: v.clone() for k, v in model.state_dict().items()}
        model.load_state_dict(same)
        assert torch.equal(flat(model), forward)
        model.load_state_dict(other.state_dict())
        assert torch.equal(flat(model), flat(other))
        assert torch.equal(base(model, optimizer), flat(other))
        partial = {"0.bias": torch.ones(24)}
        train(optimizer, model, range(4, 6), communicator.rank)
        before = base(model, optimizer)
        model.load_state_dict(partial, strict=False)
        after = base(model, optimizer)
        assert torch.equal(after[8 * 24 : 9 * 24], torch.ones(24))
        assert torch.equal(after[9 * 24 :], before[9 * 24 :])
        train(optimizer, model, range(6, 9), communicator.rank)
        return base(model, optimizer)

    out = on_ranks(2, body)
    assert torch.equal(out[0], out[1])


def test_close_after_an_evaluation():
    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, sgd, predict="history")
        train(optimizer, model, range(4), communicator.rank)
        expected = base(model, optimizer)
        optimizer.close()
        assert torch.equal(flat(model.eval()), expected)

    on_ranks(2, body)
