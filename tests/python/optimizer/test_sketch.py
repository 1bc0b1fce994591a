"""The sketch by itself: what it holds, what it sends, and what it does with values that are not finite."""

import math
import time

import pytest
import torch
from ranks import FakeNetwork, on_core_ranks, on_ranks
from torch import nn

from mdas.optimizer.buckets import Layout
from mdas.optimizer.sketch import Sketcher
from training import flat, loss, mlp, wrapped


def layout():
    shapes = {"conv": (6, 4, 3, 3), "wide": (20, 30), "small": (3, 3), "bias": (20,)}
    return Layout([(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()], 1000)


def random_vector(layout, seed, scale=1.0):
    vector = layout.vector()
    generator = torch.Generator().manual_seed(seed)
    for view in vector.views:
        view.copy_(scale * torch.randn(view.shape, generator=generator))
    return vector


def finish(sketcher, gradient, history, into, **options):
    """All buckets; which parameters are used."""
    sketch = sketcher.finish(gradient, history, into, lambda work: work.wait(), **options)
    sketch.complete(len(into.flats) - 1)
    assert sketch.exchanged()
    return sketch.used


def sketch(gradients, history, rank, rounds=1, sketchers=None):
    """C on every rank after `rounds` rounds of the same gradients."""

    def body(communicator):
        own = layout()
        sketcher = Sketcher(own, communicator, rank)
        into = own.vector()
        for _ in range(rounds):
            for _ in own.members:
                sketcher.launch(gradients[communicator.rank], [True] * 4)
            assert finish(sketcher, gradients[communicator.rank], history, into) == [True] * 4
        return into, sketcher

    return on_ranks(len(gradients), body)


def views(vector):
    """By name."""
    return dict(zip(["bias", "small", "wide", "conv"], vector.views, strict=True))


def test_vectors_and_small_matrices_are_sent_whole():
    gradients = [random_vector(layout(), seed) for seed in range(3)]
    history = random_vector(layout(), 9)
    for c, sketcher in sketch(gradients, history, 2):
        for name in ("bias", "small"):
            mean = sum(views(g)[name] for g in gradients) / 3
            torch.testing.assert_close(views(c)[name], mean)
        assert len(sketcher.matrices) == 2


def test_low_rank_differences_are_held_exactly():
    history = random_vector(layout(), 9)
    gradients = []
    for seed in range(2):
        g = random_vector(layout(), seed)
        for name in ("wide", "conv"):
            v, h = views(g)[name], views(history)[name]
            rows, rest = v.shape[0], v[0].numel()
            draw = torch.Generator().manual_seed(seed)
            v.copy_(h + (torch.randn(rows, 1, generator=draw) @ torch.randn(1, rest, generator=draw)).view(h.shape))
        gradients.append(g)
    out = sketch(gradients, history, 2)
    for c, _ in out:
        for name in ("wide", "conv"):
            mean = sum(views(g)[name] for g in gradients) / 2
            torch.testing.assert_close(views(c)[name], mean, rtol=1e-4, atol=1e-4)
    for ours, other in zip(out[0][0].flats, out[1][0].flats, strict=True):
        assert torch.equal(ours, other)


def test_power_iteration_finds_the_best_approximation():
    """Repeated on the same gradients, it converges to the truncated singular value decomposition."""
    gradients = [random_vector(layout(), seed) for seed in range(2)]
    history = random_vector(layout(), 9, 0.1)
    c, _ = sketch(gradients, history, 3, rounds=150)[0]
    d = sum(views(g)["wide"] for g in gradients) / 2 - views(history)["wide"]
    u, s, v = torch.linalg.svd(d, full_matrices=False)
    best = u[:, :3] @ torch.diag(s[:3]) @ v[:3]
    torch.testing.assert_close(views(c)["wide"] - views(history)["wide"], best, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_not_finite_means_no_sketch_and_the_same_basis(bad):
    """Of that bucket; the other one has its sketch. 3e38 is finite itself, and its products are not."""
    history = random_vector(layout(), 9)
    gradients = [random_vector(layout(), seed) for seed in range(2)]
    fresh = sketch(gradients, history, 2, rounds=0)[0][1]
    whole, moved = sketch(gradients, history, 2)[0]
    views(gradients[1])["wide"].fill_(bad)
    for c, sketcher in sketch(gradients, history, 2):
        assert torch.equal(c.flats[0], history.flats[0])
        assert torch.equal(c.flats[1], whole.flats[1])
        for m, other in zip(sketcher.matrices, [fresh.matrices[0], moved.matrices[1]], strict=True):
            assert torch.equal(m.basis, other.basis)
            torch.testing.assert_close(m.basis.T @ m.basis, torch.eye(2))


def test_two_messages_per_bucket_of_the_expected_size():
    network = FakeNetwork(2)
    own = layout()
    gradient = own.vector()

    def body(communicator):
        sketcher = Sketcher(own, communicator, 2)
        for _ in own.members:
            sketcher.launch(gradient, [True, False, True, True])
        return finish(sketcher, gradient, gradient, own.vector())

    for used in on_ranks(2, body, network):
        assert used == [True, False, True, True]
    # Buckets: bias, small, wide; conv. First P, what is whole, a flag per rank and parameter; then R'.
    first, second = [2 * 20 + 9 + 20 + 4, 2 * 6 + 2], [2 * 30, 2 * 36]
    assert [line.split()[-2] for line in network.log[0]] == [str(count) for count in first + second]
    assert [line.split()[0] for line in network.log[0]] == ["urgent", "urgent", "second", "second"]


def test_going_on_early_changes_nothing():
    """Rank 0 goes on with every bucket as soon as it may, rank 1 with the first one, rank 2 never."""
    gradients = [random_vector(layout(), seed) for seed in range(3)]
    history = random_vector(layout(), 9)

    def body(communicator, early):
        own = layout()
        sketcher, into = Sketcher(own, communicator, 2), own.vector()
        gradient, left = gradients[communicator.rank], 2 - communicator.rank if early else 0
        for _ in range(3):
            for _ in own.members:
                sketcher.launch(gradient, [True] * 4)
            while len(sketcher._second) < left:
                sketcher.proceed(gradient, history, lambda bucket: bucket < left)
            assert finish(sketcher, gradient, history, into) == [True] * 4
        return torch.cat(into.flats)

    late = on_core_ranks(3, lambda communicator: body(communicator, False))
    early = on_core_ranks(3, lambda communicator: body(communicator, True))
    assert all(torch.equal(a, late[0]) for a in [*early, *late])


def test_a_void_sketch_is_the_history():
    gradients = [random_vector(layout(), seed) for seed in range(2)]
    history = random_vector(layout(), 9)

    def body(communicator):
        own = layout()
        sketcher, into = Sketcher(own, communicator, 2), own.vector()
        bases = [m.basis.clone() for m in sketcher.matrices]
        for _ in own.members:
            sketcher.launch(gradients[communicator.rank], [True] * 4)
        finish(sketcher, gradients[communicator.rank], history, into, void=True)
        assert all(torch.equal(a, b) for a, b in zip(into.flats, history.flats, strict=True))
        assert all(torch.equal(a, m.basis) for a, m in zip(bases, sketcher.matrices, strict=True))

    on_ranks(2, body)


@pytest.mark.parametrize("slow", [None, 0, 1])
def test_ranks_agree_whatever_their_pace_also_beside_a_nan(slow):
    """An average that is not finite was no history for those that have gone on with it, nor for the others."""

    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, predict="sketch", sketch_rank=2, warmup_steps=1)
        seen = []
        for step in range(8):
            optimizer.zero_grad()
            value = loss(model, step, communicator.rank)
            if communicator.rank == slow:
                time.sleep(0.05)
            spoiled = []
            if (step, communicator.rank) == (4, 1):
                spoiled.append(model[0].weight.register_hook(lambda g: g * math.nan))
            value.backward()
            optimizer.step()
            for handle in spoiled:
                handle.remove()
            seen.append(flat(model))
        return seen, optimizer.skipped_steps

    out = on_core_ranks(3, body)
    for seen, skipped in out:
        assert skipped == 1
        for mine, first in zip(seen, out[0][0], strict=True):
            assert torch.isfinite(mine).all()
            assert torch.equal(mine, first)
