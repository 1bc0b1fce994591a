"""What a rank finds on its host and offers the others."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import recorded_devices as recorded
from mdas import _core, verbs
from mdas.errors import ConfigurationError, InvalidArgumentError
from mdas.settings import VerbsSettings
from mdas.verbs import Offer


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This host with other devices, which nobody can open."""
    monkeypatch.setattr(_core, "try_verbs", lambda device, nbytes: None)
    monkeypatch.setattr(verbs, "numa_node", lambda: 0)
    monkeypatch.setattr(verbs, "gpu_path", lambda: None)
    return monkeypatch


def has(host: pytest.MonkeyPatch, devices: list[_core.VerbsDevice]) -> None:
    host.setattr(_core, "verbs_devices", lambda: devices)


def test_soft_roce_is_offered_with_the_gid_of_the_route(host: pytest.MonkeyPatch) -> None:
    has(host, recorded.rxe("10.0.0.5"))
    (choice,), offers = verbs.offer(VerbsSettings(), "10.0.0.5", 0)
    assert offers == (Offer("rxe0", 1, 1, "::ffff:10.0.0.5", "RoCE v2", 0, 4096),)
    assert choice.why == "the only usable port, GID of the address on the route to the peers"
    assert choice.warnings == []


def test_settings_and_place_reach_the_chooser(host: pytest.MonkeyPatch) -> None:
    has(host, recorded.fabric(4))

    def device(local_rank: int, **settings: object) -> str:
        _, offers = verbs.offer(VerbsSettings(**settings), "10.0.0.5", local_rank)  # type: ignore[arg-type]
        return offers if isinstance(offers, str) else " ".join(offer.device for offer in offers)

    assert [device(rank) for rank in range(5)] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "mlx5_0"]
    assert [device(rank, device="mlx5_1,mlx5_3") for rank in range(3)] == ["mlx5_1", "mlx5_3", "mlx5_1"]
    assert [device(rank, device="^mlx5_1,mlx5_3") for rank in range(3)] == ["mlx5_0", "mlx5_2", "mlx5_0"]
    assert [device(rank, rails=2) for rank in range(3)] == ["mlx5_0 mlx5_1", "mlx5_2 mlx5_3", "mlx5_0 mlx5_1"]
    assert device(0, rails=8) == "mlx5_0 mlx5_1 mlx5_2 mlx5_3"
    assert device(0, device="mlx4") == (
        "MDAS_IB_DEVICE=mlx4: no device has such a name; this host has mlx5_0, mlx5_1, mlx5_2, mlx5_3"
    )
    assert device(0, port=2).startswith("MDAS_IB_PORT=2: no device has a port 2")
    assert "MDAS_IB_GID_INDEX=3: its GID table has no such entry, but 0 (InfiniBand, fe80::1)" in device(0, gid_index=3)


def test_the_socket_of_the_process_counts(host: pytest.MonkeyPatch) -> None:
    address = [recorded.gid(1, "RoCE v2", "::ffff:10.0.0.5")]
    devices = [recorded.device(f"mlx5_{n}", recorded.port(gids=address), numa_node=1 - n) for n in range(2)]
    has(host, devices)
    assert verbs.choose(VerbsSettings(), None, 0)[0].device == "mlx5_1"


def test_a_link_local_choice_warns(host: pytest.MonkeyPatch) -> None:
    has(host, [recorded.device("rxe0", recorded.port(gids=[recorded.gid(0, "RoCE v2", "fe80::1")]))])
    (warning,) = verbs.choose(VerbsSettings(), "10.0.0.5", 0)[0].warnings
    assert "link-local" in warning


def test_a_device_that_does_not_work_is_no_offer(host: pytest.MonkeyPatch) -> None:
    def refuse(device: str, nbytes: int) -> None:
        raise ConfigurationError(f"{device}: no memory for {nbytes} bytes")

    has(host, recorded.rxe("10.0.0.5"))
    host.setattr(_core, "try_verbs", refuse)
    assert verbs.offer(VerbsSettings(), "10.0.0.5", 0) == ([], "rxe0: no memory for 16777216 bytes")


def test_trying_a_device_that_does_not_exist_says_so() -> None:
    with pytest.raises(ConfigurationError, match=r"nosuch0|ibv_get_device_list|cannot load"):
        _core.try_verbs("nosuch0", 4096)


def test_words_that_are_in_no_table_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match='"snoozing" is not one of unknown, down, initializing, armed'):
        _core.choose_verbs(recorded.fabric(state="snoozing"))
    with pytest.raises(InvalidArgumentError, match=r'"10\.0\.0\.5" is not an IPv6 address'):
        _core.choose_verbs([recorded.device("rxe0", recorded.port(gids=[recorded.gid(0, "RoCE v2", "10.0.0.5")]))])


def sysfs(folder: Path, nodes: dict[int, int]) -> Path:
    """A fake /sys in which each processor is on a node."""
    for cpu, node in nodes.items():
        (folder / f"devices/system/cpu/cpu{cpu}/node{node}").mkdir(parents=True)
    return folder


def test_the_numa_node_of_a_bound_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = sysfs(tmp_path, {0: 0, 1: 0, 2: 1, 3: 1})
    for cpus, expected in (({2, 3}, 1), ({0}, 0), ({1, 2}, None), ({7}, None)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cpus=cpus: cpus)
        assert verbs.numa_node(fake) == expected


def test_the_pci_path_of_the_cuda_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = "pci0000:3a/0000:3a:00.0/0000:3b:00.0"
    (tmp_path / "devices" / place).mkdir(parents=True)
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    (tmp_path / "bus/pci/devices/0000:3b:00.0").symlink_to(tmp_path / "devices" / place)
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_device=lambda: 2,
        get_device_properties=[None, None, properties].__getitem__,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert verbs.gpu_path(tmp_path) == place
    properties.pci_bus_id = 0x99  # in a container, sysfs may show no such device
    assert verbs.gpu_path(tmp_path) is None
    del properties.pci_bus_id  # an older torch
    assert verbs.gpu_path(tmp_path) is None
    cuda.is_initialized = lambda: False
    assert verbs.gpu_path(tmp_path) is None
    monkeypatch.delitem(sys.modules, "torch")
    assert verbs.gpu_path(tmp_path) is None
