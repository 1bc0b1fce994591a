"""What `mdas doctor` says of RDMA: on hosts with recorded devices, and on this one without a library."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import pytest

import recorded_devices as recorded
from mdas import _core
from mdas.cli import doctor
from mdas.cli.findings import Finding
from processes import clean_environment


class Host:
    """This process under another environment, with other devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def has(self, *devices: _core.VerbsDevice) -> None:
        self._monkeypatch.setattr(_core, "verbs_devices", lambda: list(devices))
        self._monkeypatch.setattr(_core, "try_verbs", lambda device, nbytes: None)

    def examine(self, **variables: str) -> dict[str, Finding]:
        """Findings by name."""
        for name in os.environ.keys() - clean_environment().keys():
            self._monkeypatch.delenv(name)
        for name, value in variables.items():
            self._monkeypatch.setenv(name, value)
        found = {finding.name: finding for finding in doctor.examine() if finding.topic in ("rdma", "transports")}
        for name in variables:
            self._monkeypatch.delenv(name)
        return found


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


TWO_NODES = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711"}


def test_devices_ports_and_gids_are_listed(host: Host) -> None:
    host.has(*recorded.rxe("127.0.0.1"), *recorded.fabric())
    found = host.examine()
    listed = [(finding.name, finding.value, finding.note) for finding in found.values() if finding.topic == "rdma"]
    assert listed[:-1] == [
        ("rxe0", "GUID 506b:4b03:00a1:b2c3", "not a PCI device, firmware 20.31.1014"),
        ("rxe0 port 1", "active, Ethernet", "MTU 4096, messages up to 1 GiB, 100 Gbit/s"),
        ("rxe0 port 1 GID 0", "fe80::5054:ff:fe12:3456", "RoCE v2 on eth0"),
        ("rxe0 port 1 GID 1", "::ffff:127.0.0.1", "RoCE v2 on eth0"),
        ("mlx5_0", "GUID 506b:4b03:00a1:b2c3", "not a PCI device, firmware 20.31.1014"),
        (
            "mlx5_0 port 1",
            "active, InfiniBand",
            "MTU 4096, messages up to 1 GiB, 100 Gbit/s, LID 10, subnet manager at LID 1",
        ),
        ("mlx5_0 port 1 GID 0", "fe80::1", "InfiniBand"),
    ]
    assert found["choice"].value == "mlx5_0 port 1 GID 0"
    assert found["choice"].note == "the best of 2 usable ports, addressed by LID 10"


def test_a_device_that_cannot_be_opened_is_listed_among_the_others(host: Host) -> None:
    fault = "ibv_open_device on mlx5_9: no access to /dev/infiniband/uverbs*"
    host.has(*recorded.rxe("127.0.0.1"), recorded.faulty("mlx5_9", fault))
    found = host.examine()
    assert (found["mlx5_9"].value, found["mlx5_9"].note) == ("cannot be opened", fault)
    assert found["choice"].value == "rxe0 port 1 GID 1"
    host.has(recorded.faulty("mlx5_9", fault))
    assert host.examine()["choice"].note == f"mlx5_9: {fault}"


def test_the_choice_decides_about_the_transport(host: Host) -> None:
    host.has(*recorded.rxe("127.0.0.1"))
    found = host.examine(**TWO_NODES)
    assert found["choice"].value == "rxe0 port 1 GID 1"
    assert found["choice"].note == "the only usable port, GID of the address on the route to the peers"
    assert found["used"].value == "verbs"
    assert found["used"].note == "MDAS_TRANSPORT is auto: between ranks that can, else tcp"
    assert host.examine(**TWO_NODES, MDAS_TRANSPORT="tcp")["used"].value == "tcp"
    assert host.examine(**TWO_NODES, MDAS_TRANSPORT="verbs")["used"].value == "verbs"
    one_node = {**TWO_NODES, "LOCAL_WORLD_SIZE": "2"}
    found = host.examine(**one_node)
    assert (found["used"].value, found["used"].note) == ("tcp", "MDAS_TRANSPORT is auto, and all ranks are on one node")


@pytest.mark.parametrize("place", [{}, TWO_NODES])
@pytest.mark.parametrize(
    ("variables", "status"),
    [
        ({}, "ok"),
        ({"MDAS_TRANSPORT": "tcp"}, "ok"),
        ({"MDAS_TRANSPORT": "tcp", "MDAS_IB_DEVICE": "mlx5_0"}, "ok"),
        ({"MDAS_TRANSPORT": "verbs"}, "fail"),
        ({"MDAS_IB_DEVICE": "mlx5_0"}, "fail"),
        ({"MDAS_IB_GID_INDEX": "0"}, "fail"),
    ],
)
def test_no_usable_port_is_a_failure_where_one_was_asked_for(
    host: Host, variables: dict[str, str], status: str, place: dict[str, str]
) -> None:
    host.has(*recorded.fabric(state="initializing"))
    found = host.examine(**place, **variables)
    assert found["mlx5_0 port 1"].value == "initializing, InfiniBand"
    assert (found["choice"].value, found["choice"].status) == ("none", status)
    assert found["choice"].note == "mlx5_0 port 1: no subnet manager has configured it: is one running?"


def test_a_failure_makes_status_1(
    host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host.has()
    monkeypatch.setenv("MDAS_TRANSPORT", "verbs")
    assert doctor.run(argparse.Namespace(json=True)) == 1
    assert json.loads(capsys.readouterr().out)["failed"] == ["rdma: choice"]
    monkeypatch.delenv("MDAS_TRANSPORT")
    assert doctor.run(argparse.Namespace(json=True)) == 0


def test_without_the_library_it_says_so() -> None:
    missing = "/nonexistent/libibverbs.so.1"
    done = subprocess.run(
        [sys.executable, "-m", "mdas.cli", "doctor"],
        env={**clean_environment(), "MDAS_IBVERBS_LIB": missing},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = [line for line in done.stdout.splitlines() if "rdma" in line]
    assert line.split()[:3] == ["rdma", "choice", "none"]
    assert missing in line
