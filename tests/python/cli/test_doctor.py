"""`mdas doctor`: what it says, and its exit status."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import Any

import mdas
import processes


def doctor(*options: str, **variables: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "mdas.cli", "doctor", *options],
        env=processes.clean_environment() | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def findings(**variables: str) -> tuple[int, dict[str, dict[str, Any]], list[str]]:
    status, output = doctor("--json", **variables)
    report = json.loads(output)
    return status, {finding["name"]: finding for finding in report["findings"]}, report["failed"]


def test_a_single_process_is_fine() -> None:
    status, found, failed = findings()
    assert (status, failed) == (0, [])
    assert found["mdas"]["value"] == mdas.__version__
    assert found["found"]["value"] == "single"
    assert "127.0.0.1" in found["lo"]["value"]
    assert found["vector instructions"]["value"] == mdas._core.cpu_level()
    for name in ("congestion control", "open files (nofile)", "locked memory (memlock)", "/dev/shm", "torch", "python"):
        assert found[name]["value"]


def test_a_job_shows_where_it_would_meet_and_listen() -> None:
    port = processes.free_port()
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    status, found, failed = findings(**place)
    assert (status, failed) == (0, [])
    assert found["own address"]["value"] == "127.0.0.1"
    assert "routes to 127.0.0.1" in found["own address"]["note"]
    assert found["meeting point"]["value"] == f"127.0.0.1:{port}"
    assert found["used"]["value"] == "tcp"


def test_what_would_fail_is_named_and_makes_status_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        place = {"RANK": "0", "WORLD_SIZE": "90000", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        status, found, failed = findings(**place, MDAS_SOCKET_IFNAME="nosuch")
    assert status == 1
    assert failed == ["network: own address", "network: meeting point", "limits: open files (nofile)"]
    assert "nosuch" in found["own address"]["note"]
    assert "lo (127.0.0.1)" in found["own address"]["note"]
    assert "MASTER_PORT" in found["meeting point"]["note"]
    assert "ulimit -n" in found["open files (nofile)"]["note"]


def test_contradictory_variables_are_named() -> None:
    status, output = doctor(RANK="3")
    assert status == 1
    assert "FAIL launcher, job: unusable environment" in output
    assert "WORLD_SIZE is missing" in output
