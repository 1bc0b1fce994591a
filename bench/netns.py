"""Several hosts on one machine: network namespaces on a bridge, their links shaped by token buckets.

    python bench/netns.py --hosts 2 --rate 200mbit -- python examples/fashion_mnist.py

Every host is a namespace with one interface, `eth0`. The bucket (tbf) sits on the bridge's port
towards the host, as a switch would shape it, so that a sender sees a queue and losses that are not its
own; `egress=True` shapes what a host sends, too. Congestion control is cubic, whatever this machine's
default. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

PREFIX = "mdas"
_serial = itertools.count()


class LabError(RuntimeError):
    """The laboratory cannot be built here; the message says what is missing."""


def unavailable() -> str | None:
    """Why namespaces cannot be made here, or None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not found: apt-get install iproute2"
    probe = f"{PREFIX}-{os.getpid()}-probe"
    tried = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True, check=False)
    return None if tried.returncode == 0 else f"ip netns add: {tried.stderr.strip()}"


def _do(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LabError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _sweep() -> None:
    """Removes what a run that was killed (SIGKILL) has left behind: its names carry its process id."""
    for folder, pattern, remove in (
        ("/run/netns", f"{PREFIX}-*x*", _remove_namespace),
        ("/sys/class/net", f"{PREFIX}[0-9]*x*b", _remove_link),
    ):
        for path in Path(folder).glob(pattern):
            owner = path.name.removeprefix(PREFIX).lstrip("-").split("x")[0]
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                remove(path.name)


def _allow_cubic() -> None:
    """A namespace may only choose what the host lists as allowed; adding to the list changes nothing else."""
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    names = allowed.read_text().split()
    if "cubic" not in names:
        allowed.write_text(" ".join([*names, "cubic"]))


def _remove_namespace(name: str) -> None:
    inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    for pid in inside.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _remove_link(name: str) -> None:
    subprocess.run(["ip", "link", "delete", name], capture_output=True, check=False)


class Hosts:
    """Runs one rank per address. This base class: all on this machine, as any launcher would start them."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = list(addresses)
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill_all()

    def _kill_all(self) -> None:
        for process in self._processes:
            _kill(process)

    def _enter(self, host: int) -> list[str]:
        """Command that runs the command after it on a host."""
        return []

    def environment(self, rank: int) -> dict[str, str]:
        """What a launcher would set for `rank`, the one rank of its host."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self.addresses)),
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": "29517",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Starts `command` as rank `host`. Killed when the block ends."""
        process = subprocess.Popen(
            [*self._enter(host), *command],
            env=os.environ | self.environment(host) | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        timeout: float,
        on_line: Callable[[int, str], None] = lambda host, line: None,
    ) -> list[str]:
        """Runs `command` once per host and returns what each printed (stdout and stderr together).

        Args:
            command: program and arguments, the same on all hosts.
            env: added to `environment`.
            timeout: seconds for all of it.
            on_line: called for every line as it comes, with the host's number; from several threads.

        Raises:
            LabError: a host's command failed or ran out of time; the others are killed.
        """
        processes = [self.start(host, command, env) for host in range(len(self.addresses))]
        lines: list[list[str]] = [[] for _ in processes]

        def drain(host: int) -> None:
            for line in processes[host].stdout or ():
                lines[host].append(line)
                on_line(host, line)

        readers = [threading.Thread(target=drain, args=(host,), daemon=True) for host in range(len(processes))]
        for reader in readers:
            reader.start()
        try:
            failure = _wait_all(processes, timeout)
        finally:
            for process in processes:
                _kill(process)
        for reader in readers:
            reader.join(5)
        printed = ["".join(part) for part in lines]
        if failure is not None:
            host, what = failure
            raise LabError(f"host {host}: {what}: {' '.join(command)}\n{printed[host]}")
        return printed


class Localhost(Hosts):
    """`ranks` processes of this machine, on 127.0.0.1 and a port that was free a moment ago."""

    def __init__(self, ranks: int) -> None:
        super().__init__(["127.0.0.1"] * ranks)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]

    def environment(self, rank: int) -> dict[str, str]:
        """As a launcher's for `rank`."""
        place = {"MASTER_PORT": str(self._port), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(len(self.addresses))}
        return super().environment(rank) | place


class Network(Hosts):
    """`hosts` namespaces on a bridge, for the length of a `with` block.

    Args:
        hosts: how many, 1 to 250.
        rate: of every link, in tc's notation ("1gbit"); None leaves the links as fast as memory.
        egress: shape what a host sends, too.
        queue: longest time that a packet waits in a bucket's queue, in tc's notation.
        burst: size of a bucket, in tc's notation. Smaller than a segment of the sender's offload (64 KiB and
            headers), the bucket would split all of them, and this machine's processors become the bottleneck.

    Raises:
        LabError: no root, no iproute2, or the kernel refuses.
    """

    def __init__(
        self,
        hosts: int,
        rate: str | None = "1gbit",
        *,
        egress: bool = False,
        queue: str = "50ms",
        burst: str = "128kb",
    ) -> None:
        super().__init__([f"10.77.0.{host + 1}" for host in range(hosts)])
        tag = f"{os.getpid()}x{next(_serial)}"
        self.names = [f"{PREFIX}-{tag}-{host}" for host in range(hosts)]
        self.ports = [f"{PREFIX}{tag}p{host}" for host in range(hosts)]
        self._bridge = f"{PREFIX}{tag}b"
        self._tbf = ["tbf", "rate", rate, "burst", burst, "latency", queue] if rate else None
        self._egress = egress
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> Self:
        if reason := unavailable():
            raise LabError(reason)
        _sweep()
        self._catch_signals()
        try:
            self._build()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _build(self) -> None:
        _allow_cubic()
        _do("ip", "link", "add", self._bridge, "type", "bridge", "stp_state", "0", "forward_delay", "0")
        _do("ip", "link", "set", self._bridge, "up")
        for name, address, port in zip(self.names, self.addresses, self.ports, strict=True):
            inside = ["ip", "-n", name]
            _do("ip", "netns", "add", name)
            _do("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _do("ip", "link", "set", port, "master", self._bridge, "up")
            for setting in ("net.ipv6.conf.all.disable_ipv6=1", "net.ipv4.tcp_congestion_control=cubic"):
                _do("ip", "netns", "exec", name, "sysctl", "-q", "-w", setting)
            _do(*inside, "address", "add", f"{address}/24", "dev", "eth0")
            _do(*inside, "link", "set", "lo", "up")
            _do(*inside, "link", "set", "eth0", "up")
            if self._tbf:
                _do("tc", "qdisc", "add", "dev", port, "root", *self._tbf)
                if self._egress:
                    _do("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *self._tbf)

    def _close(self) -> None:
        # A second signal must not interrupt the clearing away.
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)
        self._kill_all()
        for name in self.names:
            _remove_namespace(name)
        for link in (*self.ports, self._bridge):
            _remove_link(link)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._handlers.clear()

    def _catch_signals(self) -> None:
        """SIGTERM and SIGHUP leave through the `with` block, as Ctrl-C does."""
        if threading.current_thread() is not threading.main_thread():
            return

        def leave(number: int, _frame: FrameType | None) -> None:
            raise SystemExit(128 + number)

        for number in (signal.SIGTERM, signal.SIGHUP):
            self._handlers[number] = signal.signal(number, leave)

    def _enter(self, host: int) -> list[str]:
        return ["ip", "netns", "exec", self.names[host]]

    def environment(self, rank: int) -> dict[str, str]:
        """As a launcher's for `rank`, the one rank of its host."""
        return super().environment(rank) | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "eth0"}


def _wait_all(processes: Sequence[subprocess.Popen[str]], timeout: float) -> tuple[int, str] | None:
    """Waits for all; the first failure (host, what) as soon as there is one."""
    deadline = time.monotonic() + timeout
    while True:
        states = [process.poll() for process in processes]
        for host, state in enumerate(states):
            if state not in (None, 0):
                return host, f"exit status {state}"
        if None not in states:
            return None
        if time.monotonic() > deadline:
            return states.index(None), f"not finished after {timeout:.0f} s"
        time.sleep(0.02)


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _show(host: int, line: str) -> None:
    print(f"[{host}] {line}", end="", flush=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="of every link, tc's notation (default: %(default)s)")
    parser.add_argument("--egress", action="store_true", help="shape what hosts send, too")
    parser.add_argument("--queue", default="50ms", help="longest wait in a queue (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds (default: %(default)s)")
    parser.add_argument("command", nargs="+")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command on every host; exit status 1 if one of them failed."""
    options = _arguments(argv)
    try:
        with Network(options.hosts, options.rate, egress=options.egress, queue=options.queue) as network:
            network.run(options.command, timeout=options.timeout, on_line=_show)
    except LabError as error:
        print(str(error).split("\n", 1)[0], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
