"""Runs where an RDMA device is: what mdas and what pyverbs read of it, in the same words, as JSON.

python compare_values.py FOLDER     where pyverbs is; nothing else of that folder is imported
"""

from __future__ import annotations

import ipaddress
import json
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

STATES = ["unknown", "down", "initializing", "armed", "active", "failing"]
LINK_LAYERS = ["InfiniBand", "InfiniBand", "Ethernet"]
KINDS = ["InfiniBand", "RoCE v1", "RoCE v2"]
"""By the numbers of infiniband/verbs.h."""

GRH_REQUIRED = 1


def of_mdas() -> list[dict[str, Any]]:
    from mdas import _core

    return [
        {
            "name": device.name,
            "guid": device.guid,
            "ports": [
                {
                    "number": port.number,
                    "state": port.state,
                    "link layer": port.link_layer,
                    "lid": port.lid,
                    "sm lid": port.sm_lid,
                    "grh required": port.grh_required,
                    "mtu": port.active_mtu,
                    "max message": port.max_msg_size,
                    "gids": [[gid.index, gid.address, gid.kind, gid.interface] for gid in port.gids],
                }
                for port in device.ports
            ],
        }
        for device in _core.verbs_devices()
    ]


def of_pyverbs() -> list[dict[str, Any]]:
    from pyverbs import device as pyverbs  # type: ignore[import-not-found]

    found = []
    for name in sorted(device.name.decode() for device in pyverbs.get_device_list()):
        context = pyverbs.Context(name=name)
        attributes = context.query_device()
        table = context.query_gid_table(256)
        ports = []
        for number in range(1, attributes.phys_port_cnt + 1):
            port = context.query_port(number)
            gids = [
                [
                    entry.gid_index,
                    address(context.query_gid(number, entry.gid_index).gid),
                    KINDS[entry.gid_type],
                    interface(entry.ndev_ifindex),
                ]
                for entry in table
                if entry.port_num == number
            ]
            ports.append(
                {
                    "number": number,
                    "state": STATES[port.state],
                    "link layer": LINK_LAYERS[port.link_layer],
                    "lid": port.lid,
                    "sm lid": port.sm_lid,
                    "grh required": bool(port.flags & GRH_REQUIRED),
                    "mtu": 128 << port.active_mtu,
                    "max message": port.max_msg_sz,
                    "gids": gids,
                }
            )
        guid = int.from_bytes(attributes.node_guid.to_bytes(8, sys.byteorder), "big")
        found.append({"name": name, "guid": guid, "ports": ports})
    return found


def address(gid: str) -> str:
    """In the spelling of mdas."""
    number = ipaddress.IPv6Address(gid)
    return str(number) if number.ipv4_mapped is None else f"::ffff:{number.ipv4_mapped}"


def interface(index: int) -> str | None:
    return socket.if_indextoname(index) if index else None


def main() -> None:
    with tempfile.TemporaryDirectory() as alone:
        (Path(alone) / "pyverbs").symlink_to(Path(sys.argv[1]) / "pyverbs")
        sys.path.append(alone)
        print(json.dumps({"mdas": of_mdas(), "pyverbs": of_pyverbs()}))


if __name__ == "__main__":
    main()
