"""Joining, failing and leaving as a backend of torch.distributed."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import backend_lifecycle
import pytest

from processes import clean_environment, free_port, run

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def failures() -> list[dict[str, Any]]:
    return [result.value for result in run(2, backend_lifecycle.failures, timeout=150)]


def test_a_wait_that_is_over_leaves_the_operation_in_flight(failures: list[dict[str, Any]]) -> None:
    name, _, completed = failures[0]["early"]
    assert (name, completed) == ("CollectiveTimeoutError", False)
    assert failures[0]["finally"] == [True, True, True, [2.0, 2.0, 2.0]]


def test_an_absent_rank_is_named_after_the_groups_timeout(failures: list[dict[str, Any]]) -> None:
    name, text = failures[0]["timeout"]
    assert name == "CollectiveTimeoutError" and "rank" in text and "1" in text
    name, text = failures[0]["future"]
    assert name == "RuntimeError" and "CollectiveTimeoutError" in text
    assert failures[0]["state"] == [True, False, "CollectiveTimeoutError"]


def test_a_monitored_barrier_names_who_is_missing(failures: list[dict[str, Any]]) -> None:
    name, text = failures[0]["monitored"]
    assert name == "CollectiveTimeoutError" and "ranks 1 did not come within 2 s" in text


def test_calls_that_do_not_fit_are_told(failures: list[dict[str, Any]]) -> None:
    for seen in failures:
        assert seen["mismatch"][0] == "MismatchError" and "allreduce" in seen["mismatch"][1]
        assert seen["self"][0] == "InvalidArgumentError" and "itself" in seen["self"][1]
        assert seen["sizes"][0] == "InvalidArgumentError" and "2 ranks x 2 are 4" in seen["sizes"][1]
        assert seen["types"][0] == "InvalidArgumentError" and "2 ranks" in seen["types"][1]


def test_failures_of_groups_leave_the_world_sound(failures: list[dict[str, Any]]) -> None:
    assert [seen["world"] for seen in failures] == [3.0, 3.0]


def test_a_lost_rank_is_named() -> None:
    survivor, _ = run(2, backend_lifecycle.lost, timeout=100)
    name, text = survivor.value
    assert name == "PeerLostError" and "rank 1" in text


def test_an_abort_ends_what_is_in_flight_and_a_new_group_can_be_made() -> None:
    first, second = [result.value for result in run(2, backend_lifecycle.aborting, free_port(), timeout=100)]
    assert second.pop("other")[0] == "PeerLostError"
    assert first == {
        "in flight": ["ClosedError", "ClosedError"],
        "initialized": False,
        "again": 3.0,
        "shared": "CollectiveTimeoutError",
        "world": 3.0,
    }
    assert second == {"again": 3.0, "world": 3.0}


def test_any_store_and_mdas_init_beside(tmp_path: Path) -> None:
    for result in run(2, backend_lifecycle.joining, str(tmp_path / "meet"), free_port(), timeout=150):
        options = result.value.pop("options")
        assert options[0] == "TypeError" and "pg_options" in options[1]
        assert result.value == {
            "file 0": 3.0,
            "file 1": 3.0,
            "core": [2.0, 2.0],
            "store 0": 3.0,
            "store 1": 3.0,
            "within gloo": 3.0,
            "gloo": 3.0,
            "alone": [1.0, 1.0],
        }


def test_under_torchrun_twice_through_the_agents_store() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*command, backend_lifecycle.__file__],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = sorted(line for line in ended.stdout.splitlines() if line.startswith("rank"))
    assert lines == [f"rank {rank} attempt {attempt}: 3.0" for rank in range(2) for attempt in range(2)]


def test_torch_finds_the_backend_of_an_installed_mdas_by_itself(tmp_path: Path) -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["torch.distributed.backends"]
    installed = tmp_path / "mdas_as_installed-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: mdas-as-installed\nVersion: 0\n")
    lines = ["[torch.distributed.backends]", *(f"{name} = {target}" for name, target in points.items())]
    (installed / "entry_points.txt").write_text("\n".join(lines))
    script = (
        "import torch.distributed as dist\n"
        "dist.init_process_group('mdas', store=dist.HashStore(), rank=0, world_size=1)\n"
        "print(type(dist.group.WORLD).__module__)"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**clean_environment(), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.stdout.split() == ["mdas.torch_backend.group"], ended.stderr
