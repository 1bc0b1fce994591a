"""The step against references: a numpy recursion, a simulation in plain torch, synchronous training."""

import numpy as np
import pytest
import torch
from ranks import on_core_ranks, on_ranks
from reference import simulate
from torch import nn

from training import base, built, flat, loss, mlp, sgd, train, wrapped

OPTIMIZERS = {
    "sgd": sgd,
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.003, momentum=0.5),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.01),
}


def run(ranks, steps, make=sgd, runner=on_ranks, same_data=False, **options):
    """(base weights, forward weights, optimizer) per rank."""

    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, make, **options)
        train(optimizer, model, range(steps), 0 if same_data else communicator.rank)
        return base(model, optimizer), flat(model), optimizer

    return runner(ranks, body)


@pytest.mark.parametrize("runner", [on_ranks, on_core_ranks])
def test_plain_delay_is_the_numpy_recursion(runner):
    """b_{k+1} = U(b_k, gbar(b_{k-1}), lr_k), bit for bit, with momentum and a changing rate."""
    size, steps, ranks, momentum = 1000, 40, 2, np.float32(0.9)
    draw = np.random.default_rng(5).standard_normal
    start = draw(size).astype(np.float32)
    curvature = np.abs(draw((ranks, size))).astype(np.float32)
    target = draw((ranks, size)).astype(np.float32)
    rate = [0.05 / (1 + 0.1 * step) for step in range(steps)]

    def gradient(rank, w):
        return curvature[rank] * (w - target[rank])

    def body(communicator):
        model = nn.Module()
        model.w = nn.Parameter(torch.from_numpy(start.copy()))
        optimizer = wrapped(
            model,
            communicator,
            lambda m: torch.optim.SGD(m.parameters(), lr=1.0, momentum=0.9),
            predict="none",
            fused=True,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate[min(step, steps - 1)])

        def linear(model, step, rank):
            return (model.w * torch.from_numpy(gradient(rank, model.w.detach().numpy()))).sum()

        train(optimizer, model, range(steps), communicator.rank, loss=linear, scheduler=scheduler)
        return flat(model).numpy()

    weights = runner(ranks, body)

    before, b, velocity = start, start, None
    for step in range(steps - 1):
        g = sum(gradient(rank, before) for rank in range(ranks)) / np.float32(ranks)
        velocity = g if velocity is None else momentum * velocity + g
        before, b = b, b - np.float32(rate[step]) * velocity
    for got in weights:
        np.testing.assert_array_equal(got, b)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("predict", ["none", "history", "local"])
def test_generic_update_equals_the_simulation_bit_for_bit(predict, name):
    make = OPTIMIZERS[name]
    expected = simulate(mlp, make, loss, ranks=3, steps=12, predict=predict, warmup=4)
    for rank, (b, w, _) in enumerate(run(3, 12, make, predict=predict, warmup_steps=4)):
        assert torch.equal(b, expected.base)
        assert torch.equal(w, expected.forward[rank])


@pytest.mark.parametrize("warmup", [0, 5])
def test_blend_equals_the_simulation(warmup):
    """To rounding: the simulation sums its norms in another order."""
    expected = simulate(mlp, sgd, loss, ranks=3, steps=25, predict="blend", warmup=warmup)
    out = run(3, 25, predict="blend", warmup_steps=warmup)
    for rank, (b, w, _) in enumerate(out):
        torch.testing.assert_close(b, expected.base, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(w, expected.forward[rank], rtol=1e-4, atol=1e-5)
        assert torch.equal(b, out[0][0])
    assert 0.05 < out[0][2]._pipeline.confidence.alpha < 0.95  # it is a blend indeed


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_synchronous_training_equals_one_process(ranks):
    expected = simulate(mlp, sgd, loss, ranks=ranks, steps=20)
    for b, w, optimizer in run(ranks, 20, schedule="sync"):
        assert torch.equal(b, expected.base)
        assert torch.equal(w, b)
        assert optimizer.exposed_seconds >= 0.0


@pytest.mark.parametrize("predict", ["none", "sketch", "blend"])
def test_one_rank_trains_as_torch_does(predict):
    """Nothing to hide: a delay would only cost."""
    expected = simulate(mlp, sgd, loss, ranks=1, steps=10)
    ((b, _, _),) = run(1, 10, predict=predict, fused=None)
    assert torch.equal(b, expected.base)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("fused", [False, True])
def test_blend_of_equal_data_is_synchronous_training(ranks, fused):
    """No disagreement, so alpha = 0, and this rank's gradient is the average: bit for bit."""
    expected = run(ranks, 20, schedule="sync", same_data=True, fused=fused)
    for b, w, _ in run(ranks, 20, predict="blend", warmup_steps=3, same_data=True, fused=fused):
        assert torch.equal(b, expected[0][0])
        assert torch.equal(w, expected[0][0])


def test_sketch_of_full_rank_is_synchronous_training():
    """Two ranks with one sample each: differences of averages have rank 4 at most, and so has the sketch."""

    def one_sample(model, step, rank):
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(1, 8, generator=generator)
        return nn.functional.cross_entropy(model(x), torch.tensor([rank]))

    def body(communicator, **options):
        model = mlp()
        optimizer = wrapped(model, communicator, sketch_rank=4, **options)
        train(optimizer, model, range(25), communicator.rank, loss=one_sample)
        if options.get("predict") == "sketch":
            assert optimizer._pipeline.sketcher.matrices, "nothing is sketched"
        return base(model, optimizer), flat(model)

    expected = on_ranks(2, lambda c: body(c, schedule="sync"))[0][0]
    out = on_ranks(2, lambda c: body(c, predict="sketch"))
    for b, w in out:
        torch.testing.assert_close(b, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(w, expected, rtol=1e-4, atol=1e-5)
    none = on_ranks(2, lambda c: body(c, predict="none"))[0][1]
    assert (none - expected).abs().max() > 100 * (out[0][1] - expected).abs().max()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("runner", [on_ranks, on_core_ranks])
def test_shared_predictions_give_all_ranks_the_same_bits(runner, fused):
    for predict in ("none", "history", "sketch"):
        out = run(4, 15, runner=runner, predict=predict, sketch_rank=2, warmup_steps=3, fused=fused)
        for b, w, _ in out:
            assert torch.equal(b, out[0][0])
            assert torch.equal(w, out[0][1])


@pytest.mark.parametrize("predict", ["local", "blend", "sketch+blend"])
def test_own_predictions_give_all_ranks_the_same_base_weights(predict):
    out = run(4, 15, runner=on_core_ranks, predict=predict, sketch_rank=2, warmup_steps=3, fused=None)
    for b, _, _ in out:
        assert torch.equal(b, out[0][0])
    assert not torch.equal(out[0][1], out[1][1])


def test_loopback_equals_the_exchange_in_plain_torch():
    """Two ranks: a sum of two does not depend on the order."""
    for predict in ("none", "sketch+blend"):
        a, b = (run(2, 15, runner=runner, predict=predict, warmup_steps=3) for runner in (on_ranks, on_core_ranks))
        for (base_a, forward_a, _), (base_b, forward_b, _) in zip(a, b, strict=True):
            assert torch.equal(base_a, base_b)
            assert torch.equal(forward_a, forward_b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype):
    """float64 and bfloat16 parameters beside float32 ones: a bucket per type."""

    def mixed():
        model = built(
            lambda: nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))
        )
        model[2].to(dtype)
        model[2].register_forward_pre_hook(lambda m, args: (args[0].to(dtype),))
        model[2].register_forward_hook(lambda m, args, out: out.float())
        return model

    expected = simulate(mixed, sgd, loss, ranks=2, steps=10, predict="history", warmup=2)

    def body(communicator, predict):
        model = mixed()
        optimizer = wrapped(model, communicator, predict=predict, warmup_steps=2)
        train(optimizer, model, range(10), communicator.rank)
        return base(model, optimizer), flat(model)

    for b, w in on_ranks(2, lambda c: body(c, "history")):
        assert torch.equal(b, expected.base)
        assert torch.equal(w, expected.forward[0])
    out = on_ranks(2, lambda c: body(c, "sketch"))
    assert torch.equal(out[0][1], out[1][1])
    assert torch.isfinite(out[0][1]).all()
