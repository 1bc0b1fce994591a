"""What the ranks of these tests do, in processes over torch.distributed and as threads over mdas's own engine."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import mdas
from mdas.communicator import Communicator, TorchCommunicator

_building = threading.Lock()


def net(width: int = 24, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same weights on every call; with a BatchNorm, whose statistics differ between ranks."""
    with _building, torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return nn.Sequential(
            nn.Linear(8, width, bias=False),  # a bias would get rounding noise only: BatchNorm takes it off
            nn.BatchNorm1d(width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, 3),
        ).to(dtype)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(12, 8, generator=generator), torch.randint(3, (12,), generator=generator)


def loss(model: nn.Module, step: int, rank: int) -> Tensor:
    x, y = batch(step, rank)
    like = next(model.parameters())
    return nn.functional.cross_entropy(model(x.to(like)).float(), y.to(like.device))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(optimizer: torch.optim.Optimizer, model: nn.Module, steps: range, rank: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(model, step, rank).backward()
        optimizer.step()


DELAYED = {"schedule": "delayed", "warmup_steps": 3}
CASES: dict[str, dict[str, Any]] = {
    "sync": {"schedule": "sync", "fused": False},
    "sync fused": {"schedule": "sync", "fused": True},
    "none": {**DELAYED, "predict": "none"},
    "history": {**DELAYED, "predict": "history", "fused": False},
    "blend": {**DELAYED, "predict": "blend"},
    "sketch": {**DELAYED, "predict": "sketch", "sketch_rank": 2},
    "sketch+blend": {**DELAYED, "predict": "sketch+blend"},
    "adamw": {**DELAYED, "make": adamw, "max_norm": 0.5},
    "bfloat16": {**DELAYED, "dtype": torch.bfloat16, "predict": "sketch"},
    "resumed": {**DELAYED, "resume": True},
    "accumulated": {**DELAYED, "accumulate": True},
}


def report(tensors: list[Tensor]) -> dict[str, Any]:
    """Their bits as a digest, and their values."""
    flat = torch.cat([t.detach().double().flatten() for t in tensors]).cpu()
    return {"bits": hashlib.sha256(flat.numpy().tobytes()).hexdigest(), "values": flat.tolist()}


def run_case(name: str, communicator: Communicator | str, rank: int, device: str = "cpu") -> dict[str, Any]:
    """Trains; forward weights, base weights, optimizer state and averaged buffers afterwards."""
    options = {"bucket_mb": 0.002, **CASES[name]}
    if device != "cpu":
        options["fused"] = None
    make, dtype = options.pop("make", sgd), options.pop("dtype", torch.float32)
    resume, accumulate = options.pop("resume", False), options.pop("accumulate", False)
    model = net(dtype=dtype).to(device)
    optimizer = mdas.DistributedOptimizer(make(model), model, communicator=communicator, **options)
    train(optimizer, model, range(6), rank)
    if accumulate:
        for step in range(6, 9):
            optimizer.zero_grad()
            with optimizer.no_sync():
                loss(model, 100 + step, rank).backward()
            loss(model, step, rank).backward()
            optimizer.step()
    if resume:
        model_state, state = model.state_dict(), optimizer.state_dict()
        optimizer.close()
        model = net(dtype=dtype).to(device)
        optimizer = mdas.DistributedOptimizer(make(model), model, communicator=communicator, **options)
        model.load_state_dict(model_state)
        optimizer.load_state_dict(state)
    train(optimizer, model, range(6, 12), rank)
    parameters = list(model.parameters())
    forward = report(parameters)
    with optimizer.base_weights():
        base = report(parameters)
    optimizer.sync_buffers()
    buffers = report([b for b in model.buffers() if b.is_floating_point()])
    tally = optimizer.tally
    gradient = optimizer.averaged_grad(parameters[0])
    assert gradient is not None
    optimizer.close()
    assert report(parameters)["bits"] == base["bits"]
    return {
        "forward": forward,
        "base": base,
        "buffers": buffers,
        "gradient": report([gradient]),
        "square": tally.square,
        "nonfinite": tally.nonfinite,
    }


def all_cases() -> dict[str, Any]:
    """A rank in a process of its own, over Gloo and without mdas.init()."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    result: dict[str, Any] = {"mismatch": refused(rank)}
    shared = TorchCommunicator(timeout=30)
    for number, name in enumerate(CASES):
        # Both ways of saying it; sharing saves making groups.
        result[name] = run_case(name, shared if number else "torch", rank)
    shared.close()
    shared.close()
    assert not mdas.is_initialized()
    dist.destroy_process_group()
    return result


def on_cuda() -> dict[str, Any]:
    """Every case in CPU memory and on the GPU that the ranks share."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    result = {}
    for device in ("cpu", "cuda"):
        shared = TorchCommunicator(timeout=60, device=device)
        result[device] = {name: run_case(name, shared, rank, device) for name in CASES}
        shared.close()
    dist.destroy_process_group()
    return result


def one_on_nccl() -> list[float]:
    """Weights after three steps of one rank; construction and tally go through NCCL."""
    dist.init_process_group("nccl")
    model = net().to("cuda")
    optimizer = mdas.DistributedOptimizer(sgd(model), model, communicator="torch")
    train(optimizer, model, range(3), 0)
    optimizer.close()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu().tolist()
    dist.destroy_process_group()
    return weights


def refused(rank: int) -> list[str]:
    """What a rank with another model, then one with other options, is told."""
    communicator = TorchCommunicator()
    model = net(24 + rank)
    messages = [raised(lambda: mdas.DistributedOptimizer(sgd(model), model, communicator=communicator))]
    same, predict = net(), "blend" if rank else "sketch"
    messages.append(
        raised(lambda: mdas.DistributedOptimizer(sgd(same), same, predict=predict, communicator=communicator))
    )
    communicator.close()
    return messages


def raised(action: Callable[[], Any]) -> str:
    """Type and text of the mdas error."""
    try:
        action()
    except mdas.Error as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def collectives() -> dict[str, Any]:
    """Three ranks: what each operation gives, in both lanes; what late ranks do to either; a group of two."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    both = TorchCommunicator(timeout=30)
    assert (both.rank, both.size) == (rank, size)
    result: dict[str, Any] = {}
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8):
        for op in ("sum", "average", "min", "max", "product"):
            if op == "average" and not dtype.is_floating_point:
                continue
            own = torch.tensor([rank + 1, 2 * rank, 3], dtype=dtype)
            out = torch.zeros_like(own)
            for lane in ("bulk", "urgent"):
                work = both.allreduce(own, out, op=op, lane=lane, tag=5)
                work.wait(20)
                assert work.done()
                assert work.times() is None
                work.wait()
                in_place = own.clone()
                both.allreduce(in_place, in_place, op=op, lane=lane).wait()
                assert torch.equal(in_place, out)
            assert own.tolist() == [rank + 1, 2 * rank, 3]
            result[f"{op} {dtype}"] = out.double().tolist()
    # 256 + 1 + 1 is 258 in float32 and in bfloat16; adding one after the other in bfloat16 stays at 256.
    half = torch.tensor([256.0 if rank == 0 else 1.0], dtype=torch.bfloat16)
    both.allreduce(half, half).wait()
    result["rounded once"] = half.item()
    told = torch.full((5,), rank, dtype=torch.uint8)
    both.broadcast(told, 2).wait()
    result["broadcast"] = told.tolist()
    gathered = torch.zeros(3 * 2)
    both.allgather(torch.tensor([rank, -rank]).float(), gathered).wait()
    result["allgather"] = gathered.tolist()
    both.allreduce(torch.zeros(0), torch.zeros(0)).wait()
    result["lanes"] = lanes(both, rank)
    if rank != 1:
        pair = TorchCommunicator(dist.new_group([0, 2], use_local_synchronization=True), timeout=30)
        value = torch.tensor([float(rank)])
        pair.broadcast(value, 1).wait()
        result["pair"] = [pair.rank, pair.size, value.item()]
    result["errors"] = [
        raised(
            lambda: both.allreduce(torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), op="average")
        ),
        raised(lambda: TorchCommunicator(timeout=0)),
        raised(lambda: TorchCommunicator(device="xpu")),
        raised(lambda: both.allreduce(torch.zeros(3, dtype=torch.int16), torch.zeros(3, dtype=torch.int16)).wait()),
    ]
    dist.barrier()
    return result


def lanes(both: TorchCommunicator, rank: int) -> list[Any]:
    """Rank 1 comes late with a bulk operation; urgent ones of all ranks pass it meanwhile."""
    bulk, urgent = torch.ones(1000), torch.ones(1)
    work = None
    if rank != 1:
        work = both.allreduce(bulk, bulk)
        assert not work.done()
    for _ in range(3):
        both.allreduce(urgent, urgent, lane="urgent").wait(20)
    waited = ""
    if work is not None:
        assert not work.done()
        start = time.monotonic()
        waited = raised(lambda: work.wait(0.3))
        assert 0.25 < time.monotonic() - start < 5
    dist.barrier()
    if work is None:
        work = both.allreduce(bulk, bulk)
    work.wait(20)
    return [bulk.sum().item(), urgent.item(), waited]


def killed(steps: int) -> dict[str, Any]:
    """Trains until rank 1 is killed."""
    dist.init_process_group("gloo")
    model = net()
    optimizer = mdas.DistributedOptimizer(sgd(model), model, communicator="torch", bucket_mb=0.002, warmup_steps=0)
    for step in range(steps):
        print(f"step {step}.", flush=True)
        try:
            train(optimizer, model, range(step, step + 1), dist.get_rank())
        except mdas.PeerLostError as error:
            saved = optimizer.state_dict()["mdas"]
            optimizer.close()
            return {
                "error": str(error),
                "peer": error.peer,
                "cause": str(error.__cause__),
                "at": time.time(),
                "saved steps": saved["steps"],
                "finite": all(bool(p.isfinite().all()) for p in model.parameters()),
            }
    return {"error": "nothing"}


def late(seconds: float) -> dict[str, Any]:
    """Rank 1 sleeps instead of taking part."""
    dist.init_process_group("gloo")
    communicator = TorchCommunicator(timeout=2)
    if dist.get_rank() == 1:
        time.sleep(seconds)
        os._exit(0)
    value = torch.ones(4)
    work = communicator.allreduce(value, value)
    start = time.monotonic()
    first = raised(work.wait)
    return {"first": first, "seconds": time.monotonic() - start, "again": raised(work.wait), "done": work.done()}
