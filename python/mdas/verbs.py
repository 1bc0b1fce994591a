"""RDMA: what this rank could use over verbs, from what its host has and what it was told."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mdas import _core
from mdas.errors import Error
from mdas.settings import VerbsSettings

_SYSFS = Path("/sys")

_TRIED_BYTES = 16 << 20
"""Registered to see whether a training could: its first two buckets take as much, with two slots each."""


@dataclass(frozen=True)
class Offer:
    """A port that a rank could use over verbs, as it tells the others."""

    device: str
    port: int
    gid_index: int
    gid: str
    """Written as the IPv6 address whose bytes it has."""
    kind: str
    """"InfiniBand", "RoCE v1" or "RoCE v2"."""
    lid: int
    """0 on Ethernet."""
    mtu: int
    """Path MTU of the port, in bytes."""


def choose(settings: VerbsSettings, address: str | None, local_rank: int) -> list[_core.VerbsChoice]:
    """The devices, ports and GIDs that this process would use, tried out; as many as it is set to use, or has.

    Args:
        settings: those of this process.
        address: this host's own on the route to the other ranks; None if unknown.
        local_rank: this rank's place among those of its host.

    Raises:
        ConfigurationError: there is no libibverbs, no port will do (with the reason for each), or one that was chosen
            does not work, for want of memory that may be locked, say.
    """
    choices = _core.choose_verbs(
        _core.verbs_devices(),
        settings.device,
        settings.port,
        settings.gid_index,
        address,
        local_rank,
        numa_node(),
        gpu_path(),
        settings.rails,
    )
    for choice in choices:
        _core.try_verbs(choice.device, _TRIED_BYTES)
    return choices


def offer(
    settings: VerbsSettings, address: str, local_rank: int
) -> tuple[list[_core.VerbsChoice], tuple[Offer, ...] | str]:
    """What `choose` finds, and what the other ranks are told: what is offered, or why nothing is."""
    try:
        choices = choose(settings, address, local_rank)
    except Error as error:
        return [], str(error)
    return choices, tuple(
        Offer(choice.device, choice.port, choice.gid_index, choice.gid, choice.gid_kind, choice.lid, choice.mtu)
        for choice in choices
    )


def place(rank: int, local_rank: int | None) -> int:
    """A rank's place among those of its host: the launcher's; else its rank, since a host's are often consecutive."""
    return rank if local_rank is None else local_rank


def options(settings: VerbsSettings, rails: Sequence[_core.VerbsChoice]) -> _core.VerbsOptions:
    """What the transport needs to know."""
    return _core.VerbsOptions(
        rails,
        settings.timeout,
        settings.retry_count,
        settings.traffic_class,
        settings.service_level,
        bool(settings.relaxed_ordering),
    )


def numa_node(sysfs: Path = _SYSFS) -> int | None:
    """The NUMA node that this process is bound to; None if it may run on several, or the kernel does not tell."""
    cpus = sysfs / "devices/system/cpu"
    nodes = {node.name for cpu in os.sched_getaffinity(0) for node in (cpus / f"cpu{cpu}").glob("node[0-9]*")}
    return int(nodes.pop().removeprefix("node")) if len(nodes) == 1 else None


def gpu_path(sysfs: Path = _SYSFS) -> str | None:
    """Where this process's CUDA device is, from its host bridge on; None if it uses none so far."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        domain, bus, device = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    except AttributeError:  # an older torch
        return None
    link = sysfs / f"bus/pci/devices/{domain:04x}:{bus:02x}:{device:02x}.0"
    if not link.exists():  # a container may show other devices
        return None
    below = itertools.dropwhile(lambda part: not part.startswith("pci"), link.resolve().parts)
    return "/".join(below) or None
