"""Data parallelism as one dimension of a DeviceMesh, beside torch's own tensor and pipeline parallelism."""

from __future__ import annotations

from typing import Any

import mesh_ranks
import pytest
import torch
from mesh_ranks import CASES, STEPS, loss, net, sgd
from reference import simulate

from processes import free_port, run

pytestmark = pytest.mark.timeout(200)


def expected(name: str) -> torch.Tensor:
    """Two ranks in one process, on the undivided model."""
    make: Any = CASES[name].get("make", sgd)
    predict = "sync" if name in ("sync", "whole sketch") else "history"
    return simulate(net, make, loss, ranks=2, steps=STEPS, predict=predict, warmup=2).base


@pytest.mark.parametrize("communicator", ["core", "torch"])
def test_tensor_parallelism(communicator: str) -> None:
    """Parts are averaged with the same parts, and never with each other."""
    ranks = [r.value for r in run(4, mesh_ranks.tensor_parallel, communicator, str(free_port()), timeout=170)]
    for name in CASES:
        assert all(rank[name] == ranks[0][name] for rank in ranks), name
        if name != "sketch":
            torch.testing.assert_close(torch.tensor(ranks[0][name]), expected(name), rtol=1e-3, atol=1e-5)
    # Of low rank it is near synchronous training, nearer than the history is.
    off = {
        name: float((torch.tensor(ranks[0][name]) - expected("sync")).norm()) for name in ("whole sketch", "history")
    }
    off["sketch"] = float((torch.tensor(ranks[0]["sketch"]) - expected("sync")).norm())
    assert off["whole sketch"] < off["sketch"] < off["history"], off
    for rank in ranks:
        blend, skip, norm, parts, mesh = rank["refused"]
        assert "each of which would blend in its own way" in blend
        assert 'pass nan_check="raise"' in skip
        assert "the norm of this rank's parts is not that of the whole" in norm
        assert "'0.weight' is divided among the ranks that are to average it" in parts
        assert 'one dimension of it, as in mesh["data"]' in mesh


def test_pipeline_parallelism() -> None:
    ranks = [r.value for r in run(4, mesh_ranks.pipelined, str(free_port()), timeout=150)]
    assert [rank["stage"] for rank in ranks] == [0, 1, 0, 1]
    for name in ("sync", "history"):
        assert ranks[0][name] == ranks[2][name]
        assert ranks[1][name] == ranks[3][name]
        whole = torch.tensor(ranks[0][name] + ranks[1][name])
        torch.testing.assert_close(whole, expected(name), rtol=1e-3, atol=1e-5)
