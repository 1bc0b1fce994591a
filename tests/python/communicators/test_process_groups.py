"""The optimizer over process groups of torch.distributed, in real processes over Gloo."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch_ranks import CASES, all_cases, collectives, killed, late, net, run_case, sgd, train

import mdas
from mdas import _core
from mdas.communicator import AloneCommunicator, CoreCommunicator, TorchCommunicator
from processes import Ranks, run

ON_RANK_1 = "MismatchError: DistributedOptimizer: rank 0 has {}, but rank 1 has {}; all ranks must"


def over_core(size: int) -> dict[str, list[dict[str, Any]]]:
    """Every case, on ranks that are threads of this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    engines = _core.loopback(size, _core.EngineSettings(timeout=60))
    try:
        communicators = [CoreCommunicator(engine, 0, engine.rank, size) for engine in engines]
        with ThreadPoolExecutor(size) as pool:
            return {
                name: list(pool.map(lambda c, name=name: run_case(name, c, c.rank), communicators, timeout=120))
                for name in CASES
            }
    finally:
        torch.set_num_threads(before)
        for engine in engines:
            engine.shutdown(5.0)


def check_mismatches(ranks: list[dict[str, Any]]) -> None:
    for messages in (r["mismatch"] for r in ranks):
        model, options = messages
        assert model.startswith(
            ON_RANK_1.format(
                *(
                    f"parameter '0.weight' of shape ({n}, 8), torch.float32, requires_grad=True, group 0"
                    for n in (24, 25)
                )
            )
        )
        assert options.startswith("MismatchError: ")
        assert "rank 0 has schedule='delayed', predict='sketch'" in options
        assert "but rank 1 has schedule='delayed', predict='blend'" in options


def test_two_ranks_equal_the_core_bit_for_bit() -> None:
    ranks = [result.value for result in run(2, all_cases, timeout=120)]
    check_mismatches(ranks)
    expected = over_core(2)
    for name in CASES:
        for rank in range(2):
            assert ranks[rank][name] == expected[name][rank], (name, rank)
        assert ranks[0][name]["base"] == ranks[1][name]["base"], name
        assert ranks[0][name]["nonfinite"] == 0.0
    # What they compute differs, as it must.
    assert len({ranks[0][name]["base"]["bits"] for name in CASES}) >= 9
    assert ranks[0]["sketch"]["forward"] == ranks[1]["sketch"]["forward"]
    assert ranks[0]["blend"]["forward"] != ranks[1]["blend"]["forward"]


def test_four_ranks_equal_the_core_to_rounding() -> None:
    ranks = [result.value for result in run(4, all_cases, timeout=170)]
    check_mismatches(ranks)
    expected = over_core(4)
    for name in CASES:
        rtol, atol = (0.05, 0.02) if name == "bfloat16" else (1e-3, 1e-4)
        for rank in range(4):
            assert ranks[rank][name]["base"]["bits"] == ranks[0][name]["base"]["bits"], (name, rank)
            for what in ("forward", "base", "buffers", "gradient"):
                ours, theirs = (torch.tensor(r[what]["values"]) for r in (ranks[rank][name], expected[name][rank]))
                torch.testing.assert_close(
                    ours, theirs, rtol=rtol, atol=atol, msg=lambda m, n=name, w=what: f"{n}, {w}: {m}"
                )


def test_collectives() -> None:
    ranks = [result.value for result in run(3, collectives, timeout=90)]
    result = ranks[0]
    for dtype in ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8"):
        assert result[f"sum torch.{dtype}"] == [6, 6, 9]
        assert result[f"min torch.{dtype}"] == [1, 0, 3]
        assert result[f"max torch.{dtype}"] == [3, 4, 3]
        assert result[f"product torch.{dtype}"] == [6, 0, 27]
        if "float" in dtype:
            assert result[f"average torch.{dtype}"] == pytest.approx([2, 2, 3], rel=1e-7)
    assert result["rounded once"] == 258.0
    assert result["broadcast"] == [2] * 5
    assert result["allgather"] == [0, 0, 1, -1, 2, -2]
    for key in result.keys() - {"lanes", "pair", "errors"}:
        assert all(r[key] == result[key] for r in ranks), key
    for rank in range(3):
        total, urgent, waited = ranks[rank]["lanes"]
        assert (total, urgent) == (3000.0, 27.0)
        assert ("CollectiveTimeoutError: " in waited and "the operation goes on" in waited) == (rank != 1)
    assert ranks[0]["pair"] == [0, 2, 2.0]
    assert ranks[2]["pair"] == [1, 2, 2.0]
    integer, timeout, device, unknown = result["errors"]
    assert integer == "InvalidArgumentError: an average of torch.int32: only floating-point types have one"
    assert timeout == "InvalidArgumentError: timeout is 0, but must be a positive, finite number of seconds"
    assert "do not move xpu memory" in device
    assert unknown.startswith("Error: rank 0 of 3, bulk lane over torch's gloo: allreduce (sum) of 3 int16: failed: ")


def test_a_killed_rank() -> None:
    with Ranks(2, killed, 100_000) as ranks:
        ranks.wait_for_output(0, "step 20.")
        start = time.time()
        ranks.signal(1, signal.SIGKILL)
        (survivor,) = ranks.wait(30, ranks=[0])
        assert survivor.returncode == 0, ranks.report()
    value = survivor.value
    assert value["error"].startswith("rank 0 of 2, ")
    assert "lane over torch's gloo: allreduce (" in value["error"]
    assert "a rank is gone, or has given up: " in value["error"]
    assert value["error"].endswith(value["cause"])
    assert value["peer"] == -1
    assert 0 < value["at"] - start < 10
    assert value["saved steps"] >= 20
    assert value["finite"]


def test_a_rank_that_does_not_come() -> None:
    with Ranks(2, late, 20) as ranks:
        value = ranks.wait(60, ranks=[0])[0].value
    assert value["first"].startswith(
        "CollectiveTimeoutError: rank 0 of 2, bulk lane over torch's gloo: allreduce (sum)"
    )
    assert value["again"] == value["first"]
    assert value["done"]
    assert 1.5 < value["seconds"] < 10


def test_without_a_process_group_it_says_what_to_call() -> None:
    model = net()
    with pytest.raises(mdas.NotInitializedError, match=r"call torch\.distributed\.init_process_group"):
        mdas.DistributedOptimizer(sgd(model), model, communicator="torch")
    with pytest.raises(mdas.InvalidArgumentError, match=r"communicator='mpi': choose \"core\" or \"torch\""):
        mdas.DistributedOptimizer(sgd(model), model, communicator="mpi")
    with pytest.raises(mdas.NotInitializedError, match=r"mdas\.init\(\)"):
        mdas.DistributedOptimizer(sgd(model), model, communicator="core")


def test_one_rank_alone_trains_as_torch_does() -> None:
    plain, model = net(), net()
    train(sgd(plain), plain, range(3), 0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        optimizer = mdas.DistributedOptimizer(sgd(model), model, communicator=TorchCommunicator(dist.group.WORLD))
        assert "sync, generic update, rank 0 of 1" in repr(optimizer)
        train(optimizer, model, range(3), 0)
        optimizer.close()
        nowhere = net().to("meta")
        with pytest.raises(mdas.InvalidArgumentError, match=r"backends \(.*cpu:gloo.*\) do not move meta memory"):
            mdas.DistributedOptimizer(sgd(nowhere), nowhere, communicator="torch")
        with pytest.raises(mdas.InvalidArgumentError, match=r"'0.weight' is on meta, but what is exchanged is on cpu"):
            mdas.DistributedOptimizer(sgd(nowhere), nowhere, communicator=AloneCommunicator())
        with pytest.raises(mdas.InvalidArgumentError, match=r"TorchCommunicator\(process_group\) for some ranks"):
            mdas.init()
            mdas.DistributedOptimizer(sgd(model), model, communicator="torch", group=mdas.new_group([0]))
    finally:
        mdas.shutdown()
        dist.destroy_process_group()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
