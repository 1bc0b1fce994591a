"""What the ranks of test_ddp_hook.py do: DistributedDataParallel with mdas's hook, in processes."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mdas

STEPS, WARMUP = 8, 3


def net() -> nn.Module:
    """The same weights on every call; its buckets hold one or two parameters each."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def loss(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(8, 12, generator=generator), torch.randint(4, (8,), generator=generator)
    return nn.functional.cross_entropy(model(x), y)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def hooked(*, static_graph: bool = False, **options: Any) -> tuple[DistributedDataParallel, mdas.DDPState]:
    model = DistributedDataParallel(net(), bucket_cap_mb=0.002, static_graph=static_graph)
    state = mdas.DDPState(model, **{"warmup_steps": WARMUP, **options})
    model.register_comm_hook(state, mdas.ddp_hook)
    return model, state


def train(
    model: DistributedDataParallel,
    state: mdas.DDPState,
    rank: int,
    *,
    last_synchronous: bool = False,
    accumulate: bool = False,
    poison: int = -1,
) -> list[list[float]]:
    """The weights after each step. `poison`: the step at which rank 1 has a NaN."""
    optimizer = sgd(model)
    weights = []
    for step in range(STEPS):
        if last_synchronous and step == STEPS - 1:
            state.delayed = False
        optimizer.zero_grad()
        if accumulate:
            with model.no_sync():
                loss(model, 100 + step, rank).backward()
        value = loss(model, step, rank)
        (value * math.nan if step == poison and rank == 1 else value).backward()
        optimizer.step()
        weights.append(flat(model.parameters()).tolist())
    return weights


def scenes(backend: str, communicator: str | None) -> dict[str, Any]:
    """Weights by step."""
    import mdas.torch_backend

    if communicator == "core":
        mdas.init()
    dist.init_process_group(backend)
    rank = dist.get_rank()
    result: dict[str, Any] = {}
    for name, options in {
        "none": {"predict": "none"},
        "history": {"predict": "history"},
        # More than the gradients have: they are sent whole, and predicted exactly.
        "whole sketch": {"sketch_rank": 64},
        "sketch": {},
        "static": {"predict": "history", "static_graph": True},
    }.items():
        model, state = hooked(communicator=communicator, **options)
        result[name] = train(model, state, rank)
        assert state.steps == STEPS
    for name, options in {
        "last_synchronous": {"last_synchronous": True},
        "accumulate": {"accumulate": True},
        "poison": {"poison": 5},
    }.items():
        model, state = hooked(communicator=communicator, predict="history")
        result[name] = train(model, state, rank, **options)
        assert state.skipped == (name == "poison")
        assert "history" in repr(state)
    result["debt"] = debt(rank)
    result["mismatch"] = mismatch(rank)
    dist.barrier()
    dist.destroy_process_group()
    return result


def debt(rank: int) -> list[float]:
    """How far what the optimizer has been given is from the sum of exact averages: after a delayed pass, from those
    before it; and after a synchronous one at the end, from all.
    """
    model, state = hooked(sketch_rank=2)
    optimizer = sgd(model)
    given, exact = torch.zeros(1), torch.zeros(1)
    distances = []
    for step in range(STEPS):
        own = torch.autograd.grad(loss(model.module, step, rank), list(model.parameters()))
        average = flat(own).double()
        dist.all_reduce(average)
        before, exact = exact, exact + average / dist.get_world_size()
        state.delayed = step < STEPS - 1
        optimizer.zero_grad()
        loss(model, step, rank).backward()
        given = given + flat(p.grad for p in model.parameters() if p.grad is not None).double()
        optimizer.step()
        distances.append(float((given - (before if WARMUP <= step < STEPS - 1 else exact)).norm()))
    return distances


def mismatch(rank: int) -> str:
    model = DistributedDataParallel(net())
    try:
        mdas.DDPState(model, sketch_rank=4 + rank)
    except mdas.MismatchError as error:
        return str(error)
    return "nothing"


def uneven() -> list[float]:
    """Rank 1 has two batches fewer, under torch's own join."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, state = hooked(predict="history")
    optimizer = sgd(model)
    with model.join():
        for step in range(STEPS - 2 * rank):
            optimizer.zero_grad()
            loss(model, step, rank).backward()
            optimizer.step()
    assert state.steps == STEPS
    weights: list[float] = flat(model.parameters()).tolist()
    dist.destroy_process_group()
    return weights


def killed() -> str:
    """Rank 1 leaves; what rank 0 is told by backward()."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, _ = hooked()
    for step in range(1000):
        if step == WARMUP + 2 and rank == 1:
            os._exit(0)  # at a regular exit Gloo's threads may abort the process
        try:
            loss(model, step, rank).backward()
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"
