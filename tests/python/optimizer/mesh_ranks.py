"""What the ranks of test_device_mesh.py do: 2 x 2 processes, one dimension of which averages."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import mdas
from training import batch, built

STEPS = 7


def net() -> nn.Module:
    return built(
        lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12), nn.LayerNorm(12), nn.Linear(12, 3))
    )


def loss(model: nn.Module, step: int, rank: int) -> Tensor:
    x, y = batch(step, rank)
    return nn.functional.cross_entropy(model(x), y)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


CASES: dict[str, dict[str, Any]] = {
    "sync": {"schedule": "sync"},
    "history": {"predict": "history"},
    "adamw": {"predict": "history", "make": adamw},
    # More than the gradients have: they are predicted exactly.
    "whole sketch": {"sketch_rank": 16},
    "sketch": {"sketch_rank": 2},
}


def divided(mesh: DeviceMesh) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = net()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def whole(tensors: Any) -> list[float]:
    """All numbers of the whole model, on every rank."""
    parts = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    numbers: list[float] = torch.cat([p.detach().reshape(-1) for p in parts]).tolist()
    return numbers


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    read: dict[str, Any] = torch.load(file, weights_only=True)
    return read


def tensor_parallel(communicator: str, port: str) -> dict[str, Any]:
    import os

    if communicator == "core":
        os.environ["MDAS_MASTER_PORT"] = port
        mdas.init(timeout=60)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    rank = mesh["data"].get_local_rank()
    result: dict[str, Any] = {}
    for name, given in CASES.items():
        options = {"bucket_mb": 0.001, "warmup_steps": 2, "nan_check": "raise", **given}
        make = options.pop("make", sgd)
        model = divided(mesh)
        optimizer = mdas.DistributedOptimizer(
            make(model), model, group=mesh["data"], communicator=communicator, **options
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(model, step, rank).backward()
            optimizer.step()
            if step == 4:  # neither an evaluation nor a checkpoint leaves a trace
                model.eval()
                with torch.no_grad():
                    loss(model, step, rank)
                model.train()
                saved, model_state = through_a_file(optimizer.state_dict()), through_a_file(model.state_dict())
                optimizer.load_state_dict(saved)
                if name == "history":
                    model.load_state_dict(model_state)
        optimizer.check_weights()
        with optimizer.base_weights():
            base = whole(model.parameters())
        stated = whole(model.state_dict().values())
        average = optimizer.averaged_grad(model[0].weight)
        assert isinstance(average, DTensor)
        assert average.shape == (16, 8)
        optimizer.close()
        assert whole(model.parameters()) == base == stated
        result[name] = base
    result["refused"] = refused(mesh, communicator)
    dist.barrier()
    dist.destroy_process_group()
    return result


def refused(mesh: DeviceMesh, communicator: str) -> list[str]:
    messages = []
    for options in (
        {"predict": "blend", "nan_check": "raise"},
        {},
        {"max_norm": 1.0, "nan_check": "raise"},
        {"group": mesh["tensor"], "nan_check": "raise"},
        {"group": mesh},
    ):
        model = divided(mesh)
        arguments: dict[str, Any] = {"group": mesh["data"], "communicator": communicator, **options}
        try:
            mdas.DistributedOptimizer(sgd(model), model, **arguments)
        except mdas.InvalidArgumentError as error:
            messages.append(str(error))
    return messages


def pipelined(port: str) -> dict[str, Any]:
    """Two stages of two replicas each, by torch's pipelining, with two microbatches."""
    import os

    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    os.environ["MDAS_MASTER_PORT"] = port
    mdas.init(timeout=60)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
    rank, stage = mesh["data"].get_local_rank(), mesh["stage"].get_local_rank()
    result = {}
    for name in ("sync", "history"):
        layers = net()
        part = nn.Sequential(*list(layers)[:2]) if stage == 0 else nn.Sequential(*list(layers)[2:])
        options = {k: v for k, v in CASES[name].items() if k != "make"}
        optimizer = mdas.DistributedOptimizer(sgd(part), part, group=mesh["data"], warmup_steps=2, **options)
        schedule = ScheduleGPipe(
            PipelineStage(part, stage, 2, torch.device("cpu"), group=mesh["stage"].get_group()),
            n_microbatches=2,
            loss_fn=nn.functional.cross_entropy,
        )
        for step in range(STEPS):
            x, y = batch(step, rank)
            optimizer.zero_grad()
            with optimizer.no_sync():
                schedule.step(x) if stage == 0 else schedule.step(target=y)
            optimizer.step()
        optimizer.close()
        result[name] = whole(part.parameters())
    dist.barrier()
    dist.destroy_process_group()
    return {"stage": stage, **result}
