import pytest
import torch
from mdas.optimizer import DistributedOptimizer
from ranks import on_ranks
from training import base, batch, flat, mlp, train


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def reference(n, steps):
    """One process that averages the gradients of n batches in rank order."""
    model = mlp()
    opt = sgd(model)
    for s in range(steps):
        gs = []
        for r in range(n):
            model.zero_grad()
            x, y = batch(s, r)
            torch.nn.functional.cross_entropy(model(x), y).backward()
            gs.append([p.grad.clone() for p in model.parameters()])
        for i, p in enumerate(model.parameters()):
            t = gs[0][i]
            for r in range(1, n):
                t = t + gs[r][i]
            p.grad = t / n
        opt.step()
    return flat(model)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_sync(n):
    def body(c):
        m = mlp(seed=c.rank)
        if c.rank == 0:
            m = mlp()
        o = DistributedOptimizer(sgd(m), m, schedule="sync", fused=False, communicator=c, bucket_mb=0.001)
        train(m, o, range(10), c.rank)
        return base(m, o)

    out = on_ranks(n, body)
    ref = reference(n, 10)
    for o in out:
        assert torch.equal(o, ref)


@pytest.mark.parametrize("predict", ["none", "history", "blend", "local", "sketch", "sketch+blend"])
def test_runs(predict):
    def body(c):
        m = mlp()
        o = DistributedOptimizer(sgd(m, 0.02), m, predict=predict, warmup_steps=5, communicator=c, bucket_mb=0.001)
        l = train(m, o, range(40), c.rank)
        return base(m, o), flat(m), l, o._pipeline.confidence.alpha

    out = on_ranks(3, body)
    for o in out:
        print(o[2][-1], o[3])
        assert torch.equal(o[0], out[0][0])
        if predict in ("none", "history", "sketch"):
            assert torch.equal(o[1], out[0][1])


def test_blend_same_data():
    for n in (2, 4):

        def body(c, sync):
            m = mlp()
            o = DistributedOptimizer(
                sgd(m), m, predict="blend", schedule="sync" if sync else "delayed", warmup_steps=3, communicator=c
            )
            train(m, o, range(20), 0)
            return base(m, o)

        a = on_ranks(n, lambda c: body(c, True))
        b = on_ranks(n, lambda c: body(c, False))
        assert torch.equal(a[0], b[0])
