"""RDMA devices of hosts that are not this one."""

from __future__ import annotations

from mdas import _core


def gid(index: int, kind: str, address: str) -> _core.VerbsGid:
    """An entry of a GID table."""
    return _core.VerbsGid(index, address, kind, None if kind == "InfiniBand" else "eth0")


def port(
    number: int = 1,
    *,
    state: str = "active",
    link_layer: str = "Ethernet",
    lid: int = 0,
    mtu: int = 4096,
    gids: list[_core.VerbsGid],
) -> _core.VerbsPort:
    """A port, by default of RoCE."""
    return _core.VerbsPort(number, state, link_layer, lid, min(lid, 1), False, mtu, 1 << 30, 100_000, gids)


def device(name: str, *ports: _core.VerbsPort, numa_node: int | None = None) -> _core.VerbsDevice:
    """A device that speaks InfiniBand or RoCE."""
    return _core.VerbsDevice(name, "InfiniBand", 0x506B4B0300A1B2C3, "20.31.1014", numa_node, None, list(ports), None)


def faulty(name: str, fault: str) -> _core.VerbsDevice:
    """A device that cannot be opened."""
    return _core.VerbsDevice(name, "a vendor's own", 0, "", None, None, [], fault)


def rxe(address: str) -> list[_core.VerbsDevice]:
    """A host with Soft-RoCE on an interface with this IPv4 address."""
    gids = [gid(0, "RoCE v2", "fe80::5054:ff:fe12:3456"), gid(1, "RoCE v2", f"::ffff:{address}")]
    return [device("rxe0", port(gids=gids))]


def fabric(count: int = 1, state: str = "active") -> list[_core.VerbsDevice]:
    """A host with devices on InfiniBand."""
    return [
        device(
            f"mlx5_{n}",
            port(state=state, link_layer="InfiniBand", lid=10 + n, gids=[gid(0, "InfiniBand", f"fe80::{n + 1}")]),
        )
        for n in range(count)
    ]
