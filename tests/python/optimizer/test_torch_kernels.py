"""The torch operations that stand in for the core's kernels on other devices, in CPU memory."""

import pytest
import torch
from ranks import on_core_ranks
from torch import nn

from mdas.optimizer import kernels
from mdas.optimizer.buckets import Layout
from training import base, flat, mlp, train, wrapped


@pytest.fixture
def torch_only(monkeypatch):
    """Whatever the memory, torch computes."""

    def switch():
        monkeypatch.setattr(kernels, "in_core", lambda x: False)

    return switch


def vectors(dtype, count=2):
    layout = Layout([(str(n), nn.Parameter(torch.zeros(n, 7, dtype=dtype))) for n in (3, 50, 20)], 1000)
    assert len(layout.members) > 1
    made = [layout.vector() for _ in range(count)]
    generator = torch.Generator().manual_seed(3)
    for vector in made:
        for view in vector.views:
            view.copy_(torch.randn(view.shape, generator=generator))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_norms_and_distances(dtype, torch_only):
    a, b = vectors(dtype)
    target = torch.zeros_like(a.views[0])

    def all_of_them():
        copied = kernels.read([kernels.copy_squared(target, a.views[0]), 7.0])
        assert torch.equal(target, a.views[0])
        return [
            kernels.squared_norm(a),
            kernels.squared_distance(a, b),
            kernels.squared_blend(a, b, 0.3),
            kernels.squared_blend(a, None, 1.0),
            *copied,
        ]

    expected = all_of_them()
    torch_only()
    assert all_of_them() == pytest.approx(expected, rel=1e-6)
    assert isinstance(kernels.copy_squared(target, a.views[0]), torch.Tensor)
    assert kernels.read([]) == []
    a.views[1][0] = float("nan")
    assert kernels.squared_norm(a) != kernels.squared_norm(a)


def test_products_and_bases(torch_only):
    generator = torch.Generator().manual_seed(5)
    d, r, p = (torch.randn(shape, generator=generator) for shape in ((6, 10), (10, 2), (6, 2)))

    def all_of_them():
        out_p, out_r, c = torch.zeros(6, 2), torch.zeros(10, 2), torch.zeros(6, 10)
        kernels.times(6, 10, d, r, out_p)
        kernels.transposed_times(6, 10, d, p, out_r)
        kernels.expand(6, 10, d, p, r, c)
        talls = [p.clone(), r.clone(), torch.zeros(5, 2)]
        kernels.orthonormalize(talls, [1, 2, 3])
        kernels.orthonormalize([], [])
        return [out_p, out_r, c], talls

    products, bases = all_of_them()
    torch_only()
    ours, our_bases = all_of_them()
    torch.testing.assert_close(ours, products)
    for one, other in zip(our_bases, bases, strict=True):
        assert torch.equal(one, other)  # made by the core in any case
        torch.testing.assert_close(one.T @ one, torch.eye(2))


@pytest.mark.parametrize("predict", ["none", "history", "blend", "sketch", "sketch+blend"])
def test_training(predict, torch_only):
    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, predict=predict, sketch_rank=2, warmup_steps=2, max_norm=0.5)
        train(optimizer, model, range(10), communicator.rank)
        return base(model, optimizer), flat(model), optimizer.tally.square

    expected = on_core_ranks(2, body)
    torch_only()
    ours = on_core_ranks(2, body)
    for (b, w, square), (base_weights, forward, tally) in zip(ours, expected, strict=True):
        torch.testing.assert_close(b, base_weights, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(w, forward, rtol=1e-4, atol=1e-5)
        assert square == pytest.approx(tally, rel=1e-4)
    assert torch.equal(ours[0][0], ours[1][0])
