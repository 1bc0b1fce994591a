"""The fused update: torch's own optimizers, to rounding, with their state in torch's form."""

import pytest
import torch
from ranks import on_core_ranks, on_ranks
from reference import simulate
from torch import nn

from mdas.errors import InvalidArgumentError
from training import base, exchanged, flat, loss, mlp, sgd, train, wrapped


def sgd_with(**options):
    return lambda model: torch.optim.SGD(model.parameters(), lr=0.05, **options)


OPTIMIZERS = {
    "sgd": sgd_with(),
    "weight decay": sgd_with(weight_decay=0.02),
    "momentum": sgd_with(momentum=0.9),
    "dampening": sgd_with(momentum=0.9, dampening=0.3, weight_decay=0.01),
    "nesterov": sgd_with(momentum=0.9, nesterov=True, weight_decay=0.01),
    "maximize": sgd_with(momentum=0.5, maximize=True),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.02),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, betas=(0.8, 0.99)),
    "adam maximize": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4, maximize=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@exchanged("predict", ["sync", "none", "history", "local", "blend"], ["blend"])
def test_equals_torch_to_rounding(predict, name):
    make = OPTIMIZERS[name]
    options = {"schedule": "sync"} if predict == "sync" else {"predict": predict, "warmup_steps": 3}
    expected = simulate(mlp, make, loss, ranks=2, steps=10, predict=predict, warmup=3)

    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, make, fused=True, **options)
        train(optimizer, model, range(10), communicator.rank)
        return base(model, optimizer), flat(model)

    for rank, (b, w) in enumerate(on_ranks(2, body)):
        torch.testing.assert_close(b, expected.base, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(w, expected.forward[rank], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["momentum", "adam", "adamw"])
def test_state_is_what_torch_would_hold(name):
    """The wrapped optimizer's state_dict, and training that goes on from it without mdas."""
    make = OPTIMIZERS[name]

    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, make, schedule="sync", fused=True)
        train(optimizer, model, range(5), 0)
        optimizer.close()
        state = {k: v for k, v in optimizer.state_dict().items() if k != "mdas"}
        return model, state

    model, state = on_ranks(2, body)[0]
    plain = mlp()
    torch_optimizer = make(plain)
    train(torch_optimizer, plain, range(5), 0)
    theirs = torch_optimizer.state_dict()
    assert state["param_groups"] == theirs["param_groups"]
    assert state["state"].keys() == theirs["state"].keys()
    for index, other in theirs["state"].items():
        ours = state["state"][index]
        assert list(ours) == list(other)
        for key in ours:
            assert ours[key].dtype == other[key].dtype
            torch.testing.assert_close(ours[key], other[key], rtol=1e-4, atol=1e-6)

    goes_on = make(model)
    goes_on.load_state_dict(state)
    train(goes_on, model, range(5, 8), 0)
    train(torch_optimizer, plain, range(5, 8), 0)
    torch.testing.assert_close(flat(model), flat(plain), rtol=1e-4, atol=1e-5)


def test_momentum_switched_on_and_off():
    """Real update and prediction under different rules: two kernels, the same arithmetic."""

    def make_scheduler(optimizer):
        def factor(step):
            for group in optimizer.param_groups:
                group["momentum"] = 0.9 if step % 4 < 2 else 0.0
            return 1.0

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    expected = simulate(mlp, sgd, loss, ranks=2, steps=12, predict="history", make_scheduler=make_scheduler)

    def body(communicator):
        model = mlp()
        optimizer = wrapped(model, communicator, fused=True, predict="history")
        train(optimizer, model, range(12), communicator.rank, scheduler=make_scheduler(optimizer))
        return base(model, optimizer), flat(model)

    for b, w in on_ranks(2, body):
        torch.testing.assert_close(b, expected.base, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(w, expected.forward[0], rtol=1e-4, atol=1e-5)


def test_chosen_where_it_fits():
    class Mine(torch.optim.SGD):
        pass

    def chosen(make, model=mlp, fused=None):
        def body(communicator):
            net = model()
            return repr(wrapped(net, communicator, make, fused=fused))

        return on_core_ranks(2, body)[1]

    assert "fused update" in chosen(sgd)
    assert "rank 1 of 2" in chosen(sgd)
    assert "generic update" in chosen(sgd, fused=False)
    assert "generic update" in chosen(lambda m: Mine(m.parameters(), lr=0.1))
    assert "generic update" in chosen(lambda m: torch.optim.Adam(m.parameters(), amsgrad=True))
    assert "generic update" in chosen(sgd, lambda: nn.Linear(3, 3).double())
    with pytest.raises(InvalidArgumentError, match="no fused kernel for RMSprop"):
        chosen(lambda m: torch.optim.RMSprop(m.parameters()), fused=True)


def test_a_model_changed_after_wrapping_is_refused():
    def body(communicator):
        model = nn.Sequential(nn.Linear(8, 3))
        optimizer = wrapped(model, communicator, fused=True, schedule="sync")
        model.double()
        optimizer.step()

    with pytest.raises(InvalidArgumentError, match=r"'0.bias' has become torch.float64"):
        on_ranks(2, body)
