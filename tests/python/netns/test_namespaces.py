"""The laboratory itself: hosts reach each other, links are shaped, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import netns

pytestmark = [
    pytest.mark.skipif(netns.unavailable() is not None, reason=f"no namespaces here: {netns.unavailable()}"),
    pytest.mark.timeout(60),
]

MEET = """
import os, socket
rank = int(os.environ["RANK"])
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    with socket.create_server(address) as server:
        server.settimeout(30)
        peer, (host, _) = server.accept()
        print(host, peer.recv(100).decode())
else:
    for attempt in range(300):
        try:
            socket.create_connection(address, timeout=0.1).sendall(b"hello")
            break
        except OSError:
            __import__("time").sleep(0.1)
"""

LAB = """
import netns
with netns.Network(2) as network:
    print(network.names[0], flush=True)
    network.run(["sleep", "50"], timeout=50)
"""


def left_behind(tag: str) -> list[str]:
    """Namespaces and links whose name holds `tag`."""
    return [path.name for folder in ("/run/netns", "/sys/class/net") for path in Path(folder).glob(f"*{tag}*")]


def test_hosts_reach_each_other_and_vanish_afterwards() -> None:
    with netns.Network(2, None) as network:
        printed = network.run([sys.executable, "-c", MEET], timeout=30)
        tag = network.names[0].split("-")[1]
        assert left_behind(tag)
    assert printed == ["10.77.0.2 hello\n", ""]
    assert left_behind(tag) == []


def test_links_are_shaped_as_asked_and_congestion_control_is_cubic() -> None:
    with netns.Network(1, "50mbit", egress=True) as network:
        (port,) = (name for name in os.listdir("/sys/class/net") if name in network.ports)
        outside = subprocess.run(["tc", "qdisc", "show", "dev", port], capture_output=True, text=True, check=True)
        (inside,) = network.run(["tc", "qdisc", "show", "dev", "eth0"], timeout=10)
        (control,) = network.run(["cat", "/proc/sys/net/ipv4/tcp_congestion_control"], timeout=10)
    assert "tbf" in outside.stdout
    assert "rate 50Mbit" in outside.stdout
    assert "rate 50Mbit" in inside
    assert control == "cubic\n"


def test_a_host_that_fails_is_named_and_the_others_are_ended() -> None:
    start = time.monotonic()
    with netns.Network(2, None) as network, pytest.raises(netns.LabError, match=r"host 1: exit status 3"):
        network.run(["sh", "-c", "[ $RANK = 0 ] && sleep 50; exit 3"], timeout=40)
    assert time.monotonic() - start < 30


def test_a_command_that_hangs_runs_out_of_time() -> None:
    with netns.Network(1, None) as network, pytest.raises(netns.LabError, match="not finished after 0 s"):
        network.run(["sleep", "50"], timeout=0.1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_leaves_nothing_behind(number: signal.Signals) -> None:
    lab = subprocess.Popen(
        [sys.executable, "-c", LAB],
        env=os.environ | {"PYTHONPATH": str(Path(netns.__file__).parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert lab.stdout is not None
        tag = lab.stdout.readline().strip().split("-")[1]
        lab.send_signal(number)
        lab.wait(30)
    finally:
        lab.kill()
    if number == signal.SIGKILL:  # cannot be caught: the next run sweeps
        with netns.Network(1, None):
            pass
    assert left_behind(tag) == []
