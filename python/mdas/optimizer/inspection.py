"""Can this optimizer, on this module, be trained with these options? And what all ranks must have in common."""

from __future__ import annotations

import inspect
import math

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mdas.errors import InvalidArgumentError
from mdas.optimizer.hooks import SPARSE
from mdas.optimizer.predict import PREDICTIONS
from mdas.optimizer.shards import division

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def check_types(optimizer: object, module: object) -> None:
    """Raises TypeError if they are not an optimizer and a module, in this order."""
    if not (isinstance(optimizer, torch.optim.Optimizer) and isinstance(module, nn.Module)):
        raise TypeError(
            "DistributedOptimizer(optimizer, module, ...): first a torch.optim.Optimizer, then the nn.Module that it "
            f"trains, not {type(optimizer).__name__} and {type(module).__name__}"
        )
    for name, part in module.named_modules():
        if isinstance(part, DistributedDataParallel):
            where = f"{name!r} of the module" if name else "the module"
            raise InvalidArgumentError(
                f"{where} is a DistributedDataParallel, so that gradients would be averaged twice: pass the module "
                "without it, or keep it and use mdas.ddp_hook instead"
            )


def check_options(
    optimizer: torch.optim.Optimizer,
    schedule: str,
    predict: str,
    sketch_rank: int,
    warmup_steps: int,
    bucket_mb: float,
    max_norm: float | None,
    max_value: float | None,
    nan_check: str,
    check_every: int | None,
) -> None:
    if schedule not in ("delayed", "sync"):
        raise InvalidArgumentError(f'schedule={schedule!r}: choose "delayed" or "sync"')
    if predict not in PREDICTIONS:
        raise InvalidArgumentError(f"predict={predict!r}: choose one of {', '.join(PREDICTIONS)}")
    # Written so that NaN passes none of them.
    if not (isinstance(sketch_rank, int) and sketch_rank >= 1):
        raise InvalidArgumentError(f"sketch_rank={sketch_rank!r}: an int, at least 1")
    if not (isinstance(warmup_steps, (int, float)) and warmup_steps >= 0):
        raise InvalidArgumentError(f"warmup_steps={warmup_steps!r}: a number, at least 0")
    if not (isinstance(bucket_mb, (int, float)) and 0 < bucket_mb < math.inf):
        raise InvalidArgumentError(f"bucket_mb={bucket_mb!r}: a finite number of MiB, more than 0")
    if not (max_norm is None or (isinstance(max_norm, (int, float)) and max_norm > 0)):
        raise InvalidArgumentError(f"max_norm={max_norm!r}: a number, more than 0, or None")
    if not (max_value is None or (isinstance(max_value, (int, float)) and max_value > 0)):
        raise InvalidArgumentError(f"max_value={max_value!r}: a number, more than 0, or None")
    if nan_check not in ("skip", "raise"):
        raise InvalidArgumentError(f'nan_check={nan_check!r}: choose "skip" or "raise"')
    if not (check_every is None or (isinstance(check_every, int) and check_every >= 1)):
        raise InvalidArgumentError(f"check_every={check_every!r}: a number of steps, at least 1, or None")
    if schedule == "delayed" and needs_closure(optimizer):
        raise InvalidArgumentError(
            f"{type(optimizer).__name__} evaluates the loss several times per step, at weights that depend on "
            'each other: use schedule="sync"'
        )


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Does `step()` insist on a closure, as LBFGS does?"""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def trained_parameters(optimizer: torch.optim.Optimizer, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of all that the optimizer moves, in order of registration."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = [(n, p) for n, p in module.named_parameters() if id(p) in held]
    if len(named) != len(held):
        raise InvalidArgumentError(
            f"the optimizer holds {len(held) - len(named)} parameters that the module does not have: pass the "
            "module that they belong to"
        )
    named = [(n, p) for n, p in named if p.requires_grad]
    if not named:
        raise InvalidArgumentError("the optimizer holds no parameter that requires a gradient")
    sparse = {id(m.weight) for m in module.modules() if isinstance(m, _EMBEDDINGS) and m.sparse}
    for name, p in named:
        if p.dtype not in _DTYPES:
            raise InvalidArgumentError(f"parameter {name!r} is {p.dtype}: trained are {', '.join(map(str, _DTYPES))}")
        if id(p) in sparse:
            raise InvalidArgumentError(f"parameter {name!r} has sparse gradients: {SPARSE}")
    return named


def check_device(named: list[tuple[str, nn.Parameter]], device: torch.device) -> None:
    """Raises InvalidArgumentError if a parameter is not where the communicator's memory is."""
    for name, p in named:
        if p.device != device:
            raise InvalidArgumentError(
                f"parameter {name!r} is on {p.device}, but what is exchanged is on {device}: mdas's own core exchanges "
                'CPU memory; communicator="torch" exchanges where the first parameter is, if the process group has a '
                "backend for that, and needs all parameters there"
            )


def describe(optimizer: torch.optim.Optimizer, module: nn.Module) -> list[str]:
    """What all ranks must have in common, a line per thing."""
    groups = {id(p): k for k, group in enumerate(optimizer.param_groups) for p in group["params"]}
    lines = [f"optimizer {type(optimizer).__name__}"]
    for k, group in enumerate(optimizer.param_groups):
        hyper = {key: value for key, value in group.items() if key != "params"}
        lines.append(f"parameter group {k}: {hyper}")
    for name, p in module.named_parameters():
        lines.append(
            f"parameter {name!r} of shape {tuple(p.shape)}, {p.dtype}, requires_grad={p.requires_grad}, "
            f"group {groups.get(id(p))}{division(p)}"
        )
    for name, b in module.named_buffers():
        lines.append(f"buffer {name!r} of shape {tuple(b.shape)}, {b.dtype}")
    return lines
