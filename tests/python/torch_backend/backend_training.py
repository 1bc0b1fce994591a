"""What the ranks of the training tests do: the same on any backend, reported bit for bit."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 5


def net(normalized: bool = False) -> nn.Module:
    """The same weights on every call."""
    torch.manual_seed(7)
    between: list[nn.Module] = [nn.BatchNorm1d(32)] if normalized else []
    return nn.Sequential(nn.Linear(12, 32), *between, nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x, y = torch.randn(8, 12, generator=generator), torch.randint(4, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def report(tensors: Iterable[torch.Tensor]) -> dict[str, Any]:
    flat = torch.cat([tensor.detach().flatten().float() for tensor in tensors])
    return {"bits": hashlib.sha256(flat.numpy().tobytes()).hexdigest(), "values": flat.tolist()}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def ddp(rank: int, hook: Callable[..., Any] | None = None, state: Any = None, cap: float = 0.002) -> dict[str, Any]:
    # Small buckets: several are under way at once.
    model = DistributedDataParallel(net(normalized=True), bucket_cap_mb=cap)
    if hook is not None:
        model.register_comm_hook(state, hook)
    train(model, sgd(model), rank)
    return report(model.module.state_dict().values())


def ddp_hook(rank: int) -> dict[str, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    return ddp(rank, allreduce_hook, None)


def ddp_half_hook(rank: int) -> dict[str, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    return ddp(rank, bf16_compress_hook, None)


def ddp_power_hook(rank: int) -> dict[str, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    state = power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
    # One bucket: the hook starts collectives when others end, and nothing orders those of several buckets.
    return ddp(rank, power.powerSGD_hook, state, cap=25)


def join(rank: int) -> dict[str, Any]:
    """Uneven inputs: rank 0 has one batch more."""
    model = DistributedDataParallel(net())
    optimizer = sgd(model)
    with model.join():
        for step in range(2 + (rank == 0)):
            generator = torch.Generator().manual_seed(step)
            optimizer.zero_grad()
            model(torch.randn(8, 12, generator=generator)).square().mean().backward()
            optimizer.step()
    return report(model.parameters())


def fsdp(rank: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01), rank)
    whole = []
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        whole.append(parameter.full_tensor())
    return report(whole)


def zero(rank: int) -> dict[str, Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    train(model, optimizer, rank)
    optimizer.consolidate_state_dict(0)
    state = optimizer.state_dict()["state"] if rank == 0 else {}
    return report([*model.parameters(), *(s["exp_avg"] for s in state.values())])


def sync_batch_norm(rank: int) -> dict[str, Any]:
    """It exists for accelerators only: torch refuses it on the CPU, over any backend."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(net(normalized=True))
    try:
        model(torch.zeros(8, 12))
    except ValueError as error:
        return {"bits": str(error)}
    return {"bits": "works"}


def loader(rank: int) -> dict[str, Any]:
    """Forked workers of a DataLoader, which inherit the engine, do not disturb it."""
    data = torch.utils.data.TensorDataset(torch.arange(40.0).view(20, 2))
    sampler: Any = torch.utils.data.DistributedSampler(data)
    total = torch.zeros(2)
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=5, sampler=sampler, num_workers=1):
        part = batch.sum(0)
        dist.all_reduce(part)
        total += part
    return report([total])


SCENES = {
    scene.__name__: scene
    for scene in (ddp, ddp_hook, ddp_half_hook, ddp_power_hook, join, fsdp, zero, sync_batch_norm, loader)
}


def run_all(port: int, scenes: list[str], backends: list[str]) -> list[dict[str, Any]]:
    """Scenes over each of the backends, one process group after the other."""
    import mdas.torch_backend  # noqa: F401 - registers the backend

    warnings.simplefilter("ignore")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=60))
    results: list[dict[str, Any]] = []
    for number, backend in enumerate(backends):
        own = dist.PrefixStore(str(number), store)
        dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timedelta(seconds=100))
        results.append(
            {name: SCENES[name](rank) for name in scenes if backend not in backends[:number] or name == "ddp"}
        )
        dist.barrier()
        dist.destroy_process_group()
    return results
