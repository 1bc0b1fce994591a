"""Jobs over several hosts that are not as simple as one interface and one address."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import netns

pytestmark = [
    pytest.mark.skipif(netns.unavailable() is not None, reason=f"no namespaces here: {netns.unavailable()}"),
    pytest.mark.timeout(90),
]

# Joins, sums, and tells who listens where, and over which interfaces the bytes went.
SCRIPT = """
import json, os, sys, time
import numpy as np
import mdas
from mdas import rendezvous

address = []
decode = rendezvous.Card.decode
def noted(data):
    card = decode(data)
    address.append([card.address, card.port])
    return card
rendezvous.Card.decode = noted

time.sleep(float(os.environ.get("LATE", "0")))
try:
    mdas.init(timeout=float(os.environ.get("WITHIN", "40")), warn_after=1.0)
    total = mdas.allreduce(np.full(300_000, mdas.rank() + 1.0, np.float32))
    mdas.barrier()
except mdas.Error as error:
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
    sys.exit()
sent = {name: int(open(f"/sys/class/net/{name}/statistics/tx_bytes").read()) for name in os.listdir("/sys/class/net")}
print(json.dumps({"total": set(total.tolist()).pop(), "node": mdas.node(), "addresses": address, "sent": sent}))
"""


def told(printed: Sequence[str]) -> list[Any]:
    """What each rank found; warnings come before it."""
    return [json.loads(text.splitlines()[-1]) for text in printed]


def join(network: netns.Network, before: str = ":", **env: str) -> list[dict[str, Any]]:
    """Runs the script once per host, after a line of shell."""
    command = f"{before}\nexec {shlex.join([sys.executable, '-c', SCRIPT])}"
    return told(network.run(["sh", "-ec", command], env=env, timeout=80))


def on(network: netns.Network, host: int, *words: str) -> None:
    """Runs a command on a host, which must succeed."""
    subprocess.run(["ip", "netns", "exec", network.names[host], *words], check=True, capture_output=True, timeout=20)


def addresses(result: Mapping[str, Any]) -> list[str]:
    return [address for address, _ in result["addresses"]]


def test_a_host_name_that_is_loopback_on_its_own_host(tmp_path: Path) -> None:
    # As Debian writes it: rank 0's own name is 127.0.1.1 there, and its address elsewhere.
    for rank, first in enumerate(["127.0.1.1", "10.77.0.1"]):
        (tmp_path / str(rank)).write_text(f"127.0.0.1 localhost\n{first} head\n10.77.0.2 second\n")
    with netns.Network(2, None) as network:
        # A mount within `ip netns exec` is that process's own.
        results = join(network, f"mount --bind {tmp_path}/$RANK /etc/hosts", MASTER_ADDR="head")
    for rank, result in enumerate(results):
        assert (result.get("total"), result.get("node")) == (3.0, rank), result
        assert addresses(result)[1] == "10.77.0.2"


@pytest.mark.parametrize(("spec", "chosen"), [(None, "10.77.0"), ("eth1", "10.78.0"), ("^eth0,lo", "10.78.0")])
def test_of_several_interfaces_the_one_is_used_that_is_asked_for(spec: str | None, chosen: str) -> None:
    with netns.Network(2, None) as network:
        ends = [["eth1", "netns", name] for name in network.names]
        subprocess.run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]], check=True, timeout=20)
        for host in range(2):
            on(network, host, "ip", "address", "add", f"10.78.0.{host + 1}/24", "dev", "eth1")
            on(network, host, "ip", "link", "set", "eth1", "up")
        results = join(network, **({} if spec is None else {"MDAS_SOCKET_IFNAME": spec}))
    busy, idle = ("eth0", "eth1") if spec is None else ("eth1", "eth0")
    for result in results:
        assert result.get("total") == 3.0, result
        assert addresses(result) == [f"{chosen}.1", f"{chosen}.2"]
        assert result["sent"][busy] > 1_000_000 > 100_000 > result["sent"][idle]


def test_ipv6_only() -> None:
    with netns.Network(2, None) as network:
        for host in range(2):
            on(network, host, "sysctl", "-q", "-w", "net.ipv6.conf.all.disable_ipv6=0")
            on(network, host, "ip", "address", "flush", "dev", "eth0")
            on(network, host, "ip", "address", "add", f"fd77::{host + 1}/64", "dev", "eth0", "nodad")
        results = join(network, MASTER_ADDR="fd77::1")
    for rank, result in enumerate(results):
        assert (result.get("total"), result.get("node")) == (3.0, rank), result
        assert addresses(result) == ["fd77::1", "fd77::2"]


def test_two_jobs_at_once_on_the_same_hosts() -> None:
    command = [sys.executable, "-c", SCRIPT]
    ports = {"MDAS_PORT_RANGE": "20000-20003"}
    with netns.Network(2, None) as network:
        other = [network.start(host, command, {**ports, "MASTER_PORT": "29600"}) for host in range(2)]
        results = told(network.run(command, ports, timeout=80))
        results += told([process.communicate(timeout=60)[0] for process in other])
    for result in results:
        assert result.get("total") == 3.0, result
    # Nobody's listener is another's.
    used = {tuple(place) for result in results for place in result["addresses"]}
    assert len(used) == 4
    assert all(20000 <= port <= 20003 for _, port in used)


def test_two_jobs_with_one_meeting_point_are_told_what_to_do() -> None:
    with netns.Network(2, None) as network:
        holder = "import socket, time; s = socket.create_server(('', 29517)); print('there', flush=1); time.sleep(60)"
        process = network.start(0, [sys.executable, "-c", holder])
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        first, second = join(network, WITHIN="4")
    for part in ("10.77.0.1:29517", "in use", "set another MASTER_PORT"):
        assert part in first["error"]
    assert "rank 1 of 2 cannot join rank 0 at 10.77.0.1:29517" in second["error"]


def test_a_range_of_ports_that_is_used_up_is_named() -> None:
    with netns.Network(1, None) as network:
        two = {"MDAS_PORT_RANGE": "20000-20001", "WORLD_SIZE": "3", "WITHIN": "6"}
        started = [network.start(0, [sys.executable, "-c", SCRIPT], two | {"RANK": str(rank)}) for rank in range(3)]
        results = told([process.communicate(timeout=60)[0] for process in started])
    errors = [result["error"] for result in results]
    (refused,) = (error for error in errors if "listening at 10.77.0.1, ports 20000 to 20001" in error)
    assert "in use" in refused
    assert "a wider MDAS_PORT_RANGE" in refused


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_late_is_waited_for(late: int) -> None:
    with netns.Network(2, None) as network:
        results = join(network, f"[ $RANK = {late} ] && export LATE=4; :", WITHIN="30")
    assert [result.get("total") for result in results] == [3.0, 3.0], results


def test_a_rank_that_comes_too_late_is_told_why() -> None:
    with netns.Network(2, None) as network:
        early, late = join(network, "[ $RANK = 1 ] && export LATE=6; :", WITHIN="3")
    assert "rank 1 of 2 did not join at 10.77.0.1:29517" in early["error"]
    assert "rank 1 of 2 cannot join rank 0 at 10.77.0.1:29517" in late["error"]
    assert "is rank 0 started" in late["error"]


FIREWALL = (
    "add table inet wall; add chain inet wall in { type filter hook input priority 0; }; "
    "add rule inet wall in iif eth0 tcp flags & (syn | ack) == syn tcp dport != 20000-20009 drop"
)
"""Nobody may connect to other ports than these."""


@pytest.mark.skipif(shutil.which("nft") is None, reason="nft not found: apt-get install nftables")
def test_a_firewall_that_lets_a_range_of_ports_through() -> None:
    with netns.Network(2, None) as network:
        for host in range(2):
            on(network, host, "nft", FIREWALL)
        meeting = {"MASTER_PORT": "20000"}
        inside = join(network, **meeting, MDAS_PORT_RANGE="20001-20009")
        outside = join(network, **meeting, WITHIN="5")
    assert [result.get("total") for result in inside] == [3.0, 3.0], inside
    assert all(20001 <= port <= 20009 for _, port in inside[0]["addresses"])
    assert all("error" in result for result in outside), outside
    assert any("MDAS_PORT_RANGE" in result["error"] for result in outside), outside


# DistributedDataParallel over both backends; tells the weights' bits, and the bytes that left this host meanwhile.
DDP_SCRIPT = """
import hashlib, json
import torch
import torch.distributed as dist
from torch import nn
import mdas.torch_backend

def sent():
    return int(open("/sys/class/net/eth0/statistics/tx_bytes").read())

told = []
for backend in ("mdas", "gloo"):
    dist.init_process_group(backend)
    torch.manual_seed(7)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = sent()
    for step in range(5):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x, y = torch.randn(8, 64, generator=generator), torch.randint(8, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    told.append([hashlib.sha256(weights.numpy().tobytes()).hexdigest(), sent() - before])
    del model, optimizer  # it holds the group: Gloo's threads must not outlive it into the exit
    dist.destroy_process_group()
print(json.dumps(told))
"""


def test_ddp_over_the_backend_on_two_hosts_equals_gloo() -> None:
    with netns.Network(2, None) as network:
        results = told(network.run([sys.executable, "-c", DDP_SCRIPT], timeout=80))
    gradients = 4 * (64 * 512 + 512 + 512 * 8 + 8)
    for (bits, sent), (expected, _) in results:
        assert bits == expected == results[0][0][0]
        assert sent > 5 * gradients, "the gradients did not cross the link"
