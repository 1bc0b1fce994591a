"""The part of `mdas doctor` about RDMA: devices, ports, GIDs, what would be chosen, and which transport follows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from mdas import _core, env, network, verbs
from mdas.cli.findings import Finding, in_bytes
from mdas.errors import Error
from mdas.settings import Settings


def examine(job: env.Job, chosen: Settings) -> Iterator[Finding]:
    """The devices of this host, this process's choice among them, and the transport that follows."""
    try:
        for device in _core.verbs_devices():
            yield from _device(device)
        address, place = _own_address(job, chosen), verbs.place(job.rank, job.local_rank)
        choices: list[_core.VerbsChoice] | str = verbs.choose(chosen.verbs, address, place)
    except Error as error:
        choices = str(error)
    yield from _choice(choices, chosen)
    yield _transport(job, chosen, choices)


def _own_address(job: env.Job, chosen: Settings) -> str | None:
    if job.size > 1:
        with suppress(Error):  # which another finding shows
            host, port = str(job.master_addr), int(job.master_port or 0)
            return network.advertised_address(host, port, chosen.interface, job.local_size == job.size)
    return None


def _device(device: _core.VerbsDevice) -> Iterator[Finding]:
    if device.fault is not None:
        yield Finding("rdma", device.name, "cannot be opened", note=device.fault)
        return
    speaks = "" if device.protocol == "InfiniBand" else f", speaks {device.protocol}"
    numa = "" if device.numa_node is None else f", NUMA node {device.numa_node}"
    firmware = f", firmware {device.firmware}" if device.firmware else ""
    place = device.pci_path.rpartition("/")[2] if device.pci_path else "not a PCI device"
    yield Finding("rdma", device.name, f"GUID {_guid(device.guid)}", note=f"{place}{numa}{firmware}{speaks}")
    for port in device.ports:
        name = f"{device.name} port {port.number}"
        speed = f", {port.mbit_per_s / 1000:g} Gbit/s" if port.mbit_per_s else ""
        lids = f", LID {port.lid}, subnet manager at LID {port.sm_lid}" if port.link_layer == "InfiniBand" else ""
        limits = f"MTU {port.active_mtu}, messages up to {in_bytes(port.max_msg_size)}"
        yield Finding("rdma", name, f"{port.state}, {port.link_layer}", note=f"{limits}{speed}{lids}")
        for gid in port.gids:
            interface = f" on {gid.interface}" if gid.interface else ""
            yield Finding("rdma", f"{name} GID {gid.index}", gid.address, note=f"{gid.kind}{interface}")


def _guid(number: int) -> str:
    digits = f"{number:016x}"
    return ":".join(digits[at : at + 4] for at in range(0, 16, 4))


def _choice(choices: list[_core.VerbsChoice] | str, chosen: Settings) -> Iterator[Finding]:
    if isinstance(choices, str):
        # That there is no RDMA is a failure only where somebody asked for it.
        named = chosen.verbs.device or chosen.verbs.port or chosen.verbs.gid_index is not None
        asked = chosen.transport == "verbs" or (chosen.transport == "auto" and named)
        yield Finding("rdma", "choice", "none", "fail" if asked else "ok", choices)
        return
    for choice in choices:
        place = f"{choice.device} port {choice.port} GID {choice.gid_index}"
        yield Finding("rdma", "choice", place, note="; ".join([choice.why, *choice.warnings]))


def _transport(job: env.Job, chosen: Settings, choices: list[_core.VerbsChoice] | str) -> Finding:
    setting = f"MDAS_TRANSPORT is {chosen.transport}"
    if job.size == 1:
        return Finding("transports", "used", "none", note="a single process opens no sockets")
    if chosen.transport != "auto":
        return Finding("transports", "used", chosen.transport, note=setting)
    if job.local_size == job.size:
        return Finding("transports", "used", "tcp", note=f"{setting}, and all ranks are on one node")
    if isinstance(choices, str):
        return Finding("transports", "used", "tcp", note=f"{setting}, and this rank has no RDMA")
    return Finding("transports", "used", "verbs", note=f"{setting}: between ranks that can, else tcp")
