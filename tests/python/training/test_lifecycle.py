"""What a process goes through: several jobs, two models, data loaders with workers, torch.compile."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from workers import batch, inner, report, small_net, train

from processes import run

OPTIONS = {"predict": "sketch", "warmup_steps": 1, "bucket_mb": 0.004}


class Batches(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """This rank's batches, made in the loader's workers; one that calls mdas is told off."""

    def __init__(self, rank: int, forked: bool) -> None:
        self.rank, self.forked = rank, forked

    def __len__(self) -> int:
        return 6

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        import mdas

        with pytest.raises(mdas.Error, match="was forked from process" if self.forked else r"mdas\.init\(\)"):
            mdas.barrier()
        return batch(step, self.rank)


def train_with(loader: Any, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def loaders() -> list[str]:
    """Bits after training with batches from the main process, from forked and from spawned workers."""
    import mdas

    mdas.init(timeout=60)
    bits = []
    for context in (None, "fork", "spawn"):
        data = Batches(mdas.rank(), context == "fork")
        model = small_net()
        optimizer = mdas.DistributedOptimizer(inner(model, "momentum"), model, **OPTIONS)  # type: ignore[arg-type]
        if context is None:
            train_with([batch(step, mdas.rank()) for step in range(len(data))], optimizer, model)
        else:
            loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=context)
            train_with(loader, optimizer, model)
        optimizer.close()
        bits.append(report(model)["bits"])
    return bits


@pytest.mark.timeout(180)
def test_data_loaders_with_workers() -> None:
    for result in run(2, loaders, timeout=170):
        assert result.returncode == 0, result.stderr
        assert len(set(result.value)) == 1, "the loader has changed the training"


def five_jobs() -> list[Any]:
    """Init, train, shut down, five times; the third one with two models at once."""
    import mdas

    seen = []
    for job in range(5):
        mdas.init(timeout=60)
        models = [small_net() for _ in range(2 if job == 2 else 1)]
        optimizers = [
            mdas.DistributedOptimizer(inner(model, "momentum"), model, **OPTIONS)  # type: ignore[arg-type]
            for model in models
        ]
        for step in range(6):
            x, y = batch(step, mdas.rank())
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.close()
            seen.append(report(model)["bits"])
        mdas.shutdown()
        with pytest.raises(mdas.NotInitializedError):
            mdas.barrier()
    return seen


@pytest.mark.timeout(120)
def test_five_jobs_in_one_process() -> None:
    results = run(2, five_jobs, timeout=110)
    for result in results:
        assert result.returncode == 0, result.stderr
        assert len(result.value) == 6
        assert len({*result.value, *results[0].value}) == 1


def compiled(backend: str) -> dict[str, list[float]]:
    """Weights after training without and with torch.compile, at each schedule."""
    import mdas

    mdas.init(timeout=60)
    schedules = {"sync": {"schedule": "sync"}, "sketch": OPTIONS, "blend": {**OPTIONS, "predict": "blend"}}
    weights = {}
    for name, options in schedules.items():
        for compile_it in (False, True):
            model = small_net()
            optimizer = mdas.DistributedOptimizer(inner(model, "momentum"), model, **options)  # type: ignore[arg-type]
            train(torch.compile(model, backend=backend) if compile_it else model, optimizer, mdas.rank(), steps=5)
            optimizer.close()
            weights[f"{name}, {compile_it}"] = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return weights


def evaluated(whole: bool) -> tuple[list[list[float]], list[str], list[str]]:
    """What a compiled module computes in evaluation mode before and after training, beside what it should; what was
    compiled meanwhile; and the warnings.
    """
    import mdas

    mdas.init(timeout=60)
    model = small_net()
    optimizer = mdas.DistributedOptimizer(inner(model, "momentum"), model, **OPTIONS)  # type: ignore[arg-type]
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(str(graph.code))
        return graph.forward

    if whole:
        model.compile(backend=backend)
        compiled: nn.Module = model
    else:
        compiled = torch.compile(model, backend=backend)
    x, outputs = batch(0, 0)[0], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            train(compiled, optimizer, mdas.rank(), steps=3)
            model.eval()
            with torch.no_grad():
                outputs.append(compiled(x).flatten().tolist())
                with optimizer.base_weights():
                    outputs.append(model._call_impl(x).flatten().tolist())  # type: ignore[no-untyped-call]
            model.train()
    optimizer.close()
    return outputs, graphs, [str(warning.message) for warning in caught]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_model_sees_base_weights_in_evaluation(whole: bool) -> None:
    """And nothing of ours is compiled with it."""
    for result in run(2, evaluated, whole, timeout=110):
        (first, wanted, second, wanted_later), graphs, told = result.value
        assert (first, second) == (wanted, wanted_later)
        assert first != second
        assert not [message for message in told if "mdas" in message or "Dynamo" in message], told
        assert "recompile_limit" not in result.stderr
        assert 1 <= len(graphs) <= 4


@pytest.mark.timeout(240)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model(backend: str, tmp_path: Path) -> None:
    """Traced and differentiated it computes the same bits; turned into machine code, the same to rounding."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("no C++ compiler for inductor: apt-get install g++")
    # A cache of its own, for what another run has compiled shall not stand in for compiling; and no children for it.
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    results = [result.value for result in run(2, compiled, backend, timeout=230, env=caches)]
    for weights in results:
        assert weights == results[0], "ranks have parted"
        for name in ("sync", "sketch", "blend"):
            plain, ours = weights[f"{name}, False"], weights[f"{name}, True"]
            if backend == "aot_eager":
                assert ours == plain
            else:
                assert ours == pytest.approx(plain, rel=1e-4, abs=1e-6)
    assert any(tmp_path.rglob("*.so")) == (backend == "inductor"), "was anything compiled?"
