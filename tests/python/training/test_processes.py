"""Training in real processes over TCP, against DDP over Gloo and against ranks as threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from workers import train_ddp, train_mdas

from processes import run

DELAYED = {"schedule": "delayed", "warmup_steps": 10, "bucket_mb": 0.004}


def in_processes(size: int, kind: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    return [result.value for result in run(size, train_mdas, kind, options, timeout=120)]


def in_threads(size: int, kind: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    from mdas import _core
    from mdas.communicator import CoreCommunicator

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    engines = _core.loopback(size)
    try:
        with ThreadPoolExecutor(size) as pool:
            communicators = [CoreCommunicator(engine, 0, rank, size) for rank, engine in enumerate(engines)]
            futures = [
                pool.submit(train_mdas, kind, options, communicator, rank)
                for rank, communicator in enumerate(communicators)
            ]
            return [future.result(timeout=120) for future in futures]
    finally:
        torch.set_num_threads(before)
        for engine in engines:
            engine.shutdown(1.0)


@pytest.mark.parametrize("kind", ["momentum", "nesterov", "adamw"])
def test_sync_with_two_ranks_equals_ddp_over_gloo_bit_for_bit(kind: str) -> None:
    ddp = [result.value for result in run(2, train_ddp, kind, timeout=120)]
    ours = in_processes(2, kind, {"schedule": "sync", "fused": False})
    assert {r["bits"] for r in ddp} == {r["forward"]["bits"] for r in ours}
    assert {r["base"]["bits"] for r in ours} == {r["forward"]["bits"] for r in ours}


@pytest.mark.parametrize("size", [3, 4])
def test_sync_with_more_ranks_equals_ddp_to_rounding(size: int) -> None:
    ddp = [result.value for result in run(size, train_ddp, "momentum", timeout=120)]
    ours = in_processes(size, "momentum", {"schedule": "sync", "fused": False})
    assert len({r["forward"]["bits"] for r in ours}) == 1
    torch.testing.assert_close(
        torch.tensor(ours[0]["forward"]["values"]), torch.tensor(ddp[0]["values"]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("predict", ["sketch", "blend", "sketch+blend", "none"])
def test_threads_over_loopback_equal_processes_over_tcp_bit_for_bit(predict: str) -> None:
    options = {**DELAYED, "predict": predict}
    processes, threads = in_processes(3, "momentum", options), in_threads(3, "momentum", options)
    for rank in range(3):
        for weights in ("forward", "base"):
            assert processes[rank][weights]["bits"] == threads[rank][weights]["bits"], (rank, weights)
    assert len({r["base"]["bits"] for r in processes}) == 1
    # The sketch's forward weights are everybody's; a blend's are each rank's own.
    shared = predict in ("sketch", "none")
    assert len({r["forward"]["bits"] for r in processes}) == (1 if shared else 3)


def test_threads_and_processes_agree_on_adamw() -> None:
    options = {**DELAYED, "predict": "sketch", "max_norm": 1.0}
    processes, threads = in_processes(2, "adamw", options), in_threads(2, "adamw", options)
    assert [r["base"]["bits"] for r in processes] == [r["base"]["bits"] for r in threads]
