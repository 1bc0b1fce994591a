"""What is refused, and how ranks come to start from the same weights."""

import contextlib
import gc
import math
import weakref

import pytest
import torch
from ranks import on_core_ranks, on_ranks
from torch import nn

import mdas
from mdas.communicator import AloneCommunicator
from mdas.errors import ConfigurationError, InvalidArgumentError, MismatchError
from mdas.optimizer import DistributedOptimizer
from training import base, batch, built, flat, mlp, sgd, train, wrapped


def test_all_ranks_start_from_rank_0s_weights_and_buffers():
    def body(communicator):
        model = built(
            lambda: nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Embedding(3, 2)), seed=communicator.rank
        )
        with torch.no_grad():
            model[1].running_mean.add_(communicator.rank + 1)
            model[1].num_batches_tracked.add_(communicator.rank + 3)
        model[2].weight.requires_grad_(False)
        wrapped(model, communicator, lambda m: torch.optim.SGD(m[0].parameters(), lr=0.1))
        return model

    models = on_core_ranks(3, body)
    for other in models[1:]:
        for key, value in models[0].state_dict().items():
            assert torch.equal(value, other.state_dict()[key]), key
    assert models[2][1].num_batches_tracked == 3


def frozen_bias(model):
    model[2].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("change", "ours", "theirs"),
    [
        (lambda m: nn.Sequential(m[0], m[1], nn.Linear(24, 25), m[3], nn.Linear(25, 3)), r"\(24, 24\)", r"\(25, 24\)"),
        (lambda m: m.double(), "torch.float32", "torch.float64"),
        (frozen_bias, "requires_grad=True", "requires_grad=False"),
        (lambda m: nn.Sequential(*m, nn.Linear(3, 3)), "nothing more", "parameter '5.weight'"),
        (lambda m: nn.Sequential(*m, nn.BatchNorm1d(3, affine=False)), "nothing more", "buffer '5.running_mean'"),
    ],
    ids=["shape", "dtype", "requires_grad", "layer", "buffer"],
)
@pytest.mark.parametrize("runner", [on_ranks, on_core_ranks])
def test_different_models_are_refused_on_all_ranks(runner, change, ours, theirs):
    def body(communicator):
        model = change(mlp()) if communicator.rank == 1 else mlp()
        with pytest.raises(MismatchError, match=rf"rank 0 has .*{ours}.*, but rank 1 has .*{theirs}") as caught:
            wrapped(model, communicator)
        return str(caught.value)

    messages = runner(3, body)
    assert len(set(messages)) == 1


@pytest.mark.parametrize(
    "options", [{"predict": "none"}, {"schedule": "sync"}, {"bucket_mb": 3}, {"max_norm": 1.0}, {"sketch_rank": 2}]
)
def test_different_options_are_refused_on_all_ranks(options):
    def body(communicator):
        with pytest.raises(MismatchError, match=f"but rank 1 has .*{next(iter(options))}="):
            wrapped(mlp(), communicator, **(options if communicator.rank else {}))

    on_ranks(2, body)


def test_different_hyper_parameters_are_refused_on_all_ranks():
    def body(communicator):
        with pytest.raises(MismatchError, match=r"rank 0 has parameter group 0: .*0.1.*rank 1 has .*0.2"):
            wrapped(mlp(), communicator, lambda m: sgd(m, 0.1 * (1 + communicator.rank)))

    on_ranks(2, body)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "later"}, '"delayed" or "sync"'),
        ({"predict": "oracle"}, "sketch, sketch\\+blend, blend"),
        ({"sketch_rank": 0}, "sketch_rank=0: .*at least 1"),
        ({"sketch_rank": 2.5}, "sketch_rank=2.5: an int"),
        ({"warmup_steps": -1}, "warmup_steps=-1: .*at least 0"),
        ({"warmup_steps": math.nan}, "warmup_steps=nan: .*at least 0"),
        ({"bucket_mb": 0}, "bucket_mb=0: .*more than 0"),
        ({"bucket_mb": math.nan}, "bucket_mb=nan: a finite number"),
        ({"bucket_mb": math.inf}, "bucket_mb=inf: a finite number"),
        ({"bucket_mb": "4"}, "bucket_mb='4': a finite number"),
        ({"max_norm": -1.0}, "max_norm=-1.0: .*more than 0"),
        ({"check_every": 0}, "check_every=0: .*at least 1"),
        ({"max_norm": math.nan}, "max_norm=nan: .*more than 0"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        DistributedOptimizer(sgd(mlp()), model := mlp(), communicator=None, **options)
    assert model is not None


def test_arguments_in_the_wrong_order():
    model = mlp()
    with pytest.raises(TypeError, match=r"first a torch.optim.Optimizer, then the nn.Module .* not Sequential and SGD"):
        DistributedOptimizer(model, sgd(model))


def test_wrapping_twice():
    def body(communicator):
        model = mlp()
        inner = sgd(model)
        optimizer = wrapped(model, communicator, lambda m: inner)
        with pytest.raises(InvalidArgumentError, match="is a DistributedOptimizer already"):
            DistributedOptimizer(optimizer, model, communicator=communicator)
        optimizer.close()
        train(wrapped(model, communicator, lambda m: inner), model, range(1), communicator.rank)

    on_ranks(2, body)


def test_parameters_of_another_optimizer_that_is_open():
    def body(communicator):
        model = mlp()
        first = wrapped(model, communicator)
        with pytest.raises(InvalidArgumentError, match=r"parameter '0.weight' belongs to another DistributedOptimizer"):
            wrapped(model, communicator)
        first.close()
        second = wrapped(model, communicator)
        train(second, model, range(2), communicator.rank)
        second.close()
        return True

    assert on_core_ranks(2, body) == [True, True]


@pytest.mark.parametrize("inside", [False, True])
def test_a_module_that_averages_by_itself(inside):
    with gloo_of_one():
        model = nn.parallel.DistributedDataParallel(mlp())
        whole = nn.Sequential(model, nn.Linear(3, 3)) if inside else model
        name = "'0' of the module" if inside else "the module"
        with pytest.raises(InvalidArgumentError, match=f"{name} is a DistributedDataParallel.*mdas.ddp_hook"):
            DistributedOptimizer(torch.optim.SGD(whole.parameters(), lr=0.1), whole)


@contextlib.contextmanager
def gloo_of_one():
    """A process group of one rank."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_models_that_cannot_be_trained_this_way():
    def body(communicator):
        sparse = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3))
        with pytest.raises(InvalidArgumentError, match=r"'0.weight' has sparse gradients: .*sparse=False"):
            wrapped(sparse, communicator)
        with pytest.raises(InvalidArgumentError, match="6 parameters that the module does not have"):
            DistributedOptimizer(sgd(mlp()), mlp(), communicator=communicator)
        frozen = mlp().requires_grad_(False)
        with pytest.raises(InvalidArgumentError, match="no parameter that requires a gradient"):
            wrapped(frozen, communicator)
        tiny = nn.ParameterList([nn.Parameter(torch.zeros(2, 2).to(torch.float8_e4m3fn))])
        with pytest.raises(InvalidArgumentError, match=r"torch\.float8_e4m3fn"):
            wrapped(tiny, communicator)
        with pytest.raises(InvalidArgumentError, match=r'LBFGS .*schedule="sync"'):
            wrapped(mlp(), communicator, lambda m: torch.optim.LBFGS(m.parameters()))

    on_ranks(2, body)


def test_groups_and_frozen_parameters_added_later():
    def body(communicator):
        model = mlp()
        model[4].requires_grad_(False)
        optimizer = wrapped(model, communicator)
        with pytest.raises(InvalidArgumentError, match="add the group to the one that it wraps"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        train(optimizer, model, range(2), communicator.rank)
        model[4].requires_grad_(True)
        with pytest.raises(RuntimeError, match="did not require a gradient when"):
            train(optimizer, model, range(2), communicator.rank)

    on_ranks(2, body)


def test_it_is_a_torch_optimizer():
    def body(communicator):
        model = mlp()
        inner = sgd(model)
        optimizer = wrapped(model, communicator, lambda m: inner)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.param_groups is inner.param_groups
        assert optimizer.state is inner.state
        assert optimizer.defaults is inner.defaults
        called = []
        optimizer.register_step_pre_hook(lambda *args: called.append("before"))
        optimizer.register_step_post_hook(lambda *args: called.append("after"))
        closed_over = []

        def closure():
            optimizer.zero_grad()
            value = model(batch(0, 0)[0]).square().sum()
            value.backward()
            closed_over.append(value.item())
            return value

        assert optimizer.step(closure).item() == closed_over[0]
        assert called == ["before", "after"]
        assert len(closed_over) == 1

    on_ranks(2, body)


def test_lbfgs_synchronously():
    """Its line search sees averaged losses and gradients: as one process that sees all data."""

    def make(model):
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    def closure(model, optimizer, ranks):
        def evaluate():
            optimizer.zero_grad()
            value = sum(model(batch(0, rank)[0]).square().mean() for rank in ranks) / len(ranks)
            value.backward()
            return value

        return evaluate

    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, make, schedule="sync")
        values = [optimizer.step(closure(model, optimizer, [communicator.rank])).item() for _ in range(3)]
        return base(model, optimizer), values

    model = mlp()
    plain = make(model)
    expected = [plain.step(closure(model, plain, [0, 1])).item() for _ in range(3)]
    for weights, values in on_ranks(2, body):
        torch.testing.assert_close(weights, flat(model), rtol=1e-3, atol=1e-4)
        assert values == pytest.approx(expected, rel=1e-3)


def test_in_the_world_and_in_a_group():
    """After `init` without a launcher: one rank, which trains as torch does."""
    model = mlp()
    plain = sgd(model)
    train(plain, model, range(3), 0)
    mdas.init()
    try:
        for options in ({}, {"group": mdas.new_group([0])}):
            net = mlp()
            optimizer = mdas.DistributedOptimizer(sgd(net), net, **options)
            assert "sync, generic update, rank 0 of 1" in repr(optimizer)
            train(optimizer, net, range(3), 0)
            assert torch.equal(flat(net), flat(model))
    finally:
        mdas.shutdown()


def test_without_init_it_says_what_to_call():
    with pytest.raises(mdas.NotInitializedError, match=r"mdas.init\(\)"):
        DistributedOptimizer(sgd(model := mlp()), model)


def test_a_deterministic_that_makes_no_sense_is_told_at_once(monkeypatch):
    monkeypatch.setenv("MDAS_DETERMINISTIC", "yes")
    with pytest.raises(ConfigurationError, match="MDAS_DETERMINISTIC"):
        wrapped(mlp(), AloneCommunicator())


@pytest.mark.parametrize("trained", [False, True])
def test_what_is_dropped_is_freed(trained):
    """Parameters as well: torch holds the hooks on them, and through those they would hold each other."""

    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, predict="sketch")
        if trained:
            train(optimizer, model, range(3), communicator.rank)
        return [weakref.ref(one) for one in (communicator, optimizer, model, *model.parameters())]

    dropped = on_ranks(2, body)
    gc.collect()
    assert [[one() for one in ours] for ours in dropped] == [[None] * 9] * 2
