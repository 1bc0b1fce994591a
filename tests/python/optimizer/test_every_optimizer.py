"""Every optimizer and every scheduler of torch, bit for bit as the simulation in plain torch has it."""

import pytest
import torch
from ranks import on_ranks
from test_training_loop import check
from torch.optim import lr_scheduler

from training import exchanged, mlp, wrapped

OPTIMIZERS = {
    "ASGD": {"lr": 0.05},
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {"lr": 0.05},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "Muon": {"lr": 0.01},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Rprop": {"lr": 0.001},
    "SGD": {"lr": 0.05, "nesterov": True, "momentum": 0.9, "weight_decay": 0.01},
}
NOT_HERE = {"LBFGS", "SparseAdam"}
"""The first needs a closure (see test_construction), the second sparse gradients."""

SCHEDULERS = {
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.3, 1.0, 5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.95),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=12),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 10),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
}
BY_METRIC = {"LRScheduler", "_LRScheduler", "ReduceLROnPlateau"}


def make(name):
    def build(model):
        parameters = [p for p in model.parameters() if p.requires_grad]
        return getattr(torch.optim, name)(parameters, **OPTIMIZERS[name])

    return build


def only_matrices():
    """For Muon, which takes nothing else: vectors are not trained."""
    model = mlp()
    for p in model.parameters():
        p.requires_grad_(p.dim() == 2)
    return model


def test_none_is_forgotten():
    kinds = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    assert kinds - {"Optimizer"} == OPTIMIZERS.keys() | NOT_HERE
    schedulers = {
        name
        for name, kind in vars(lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler)
    }
    assert schedulers == SCHEDULERS.keys() | BY_METRIC


@exchanged("mode", ["sync", "none", "history"], ["history"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, mode):
    check(mode, make=make(name), steps=7, build=only_matrices if name == "Muon" else mlp)


@exchanged("name", SCHEDULERS, SCHEDULERS)
def test_schedulers(name):
    check("none", make_scheduler=SCHEDULERS[name], steps=9)


def test_repr_says_which_update_runs():
    def body(communicator):
        names = []
        for name in ("SGD", "Adam", "AdamW", "RMSprop"):
            names.append(repr(wrapped(mlp(), communicator, make(name), fused=None)))
        return names

    for names in on_ranks(2, body):
        assert [" fused update" in name for name in names] == [True, False, True, False]
        assert " generic update" in names[1], "amsgrad has no fused kernel"
