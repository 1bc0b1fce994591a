"""A process that has imported torch and forks when asked: the import takes seconds, and there are thousands of ranks.

    child = of(rank).start(command, environment, out, err)      # as subprocess.Popen(...): pid, poll(), wait(), ...

A child is a process as any other: it leads a session of its own, has its own environment and output, runs
`processes.work(...)`, and ends as an interpreter ends, with everything that happens then. mdas it imports itself.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

import processes

LARGEST = 1 << 17
"""Bytes of a message."""


class Child:
    """What `subprocess.Popen` is to a process, for one that a nursery has forked."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        """`pid` is a child of that nursery's process."""
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery

    def poll(self) -> int | None:
        """Its exit status, minus the signal's number if one ended it; None while it runs."""
        if self.returncode is None:
            self.returncode = self._nursery.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float = 60) -> int:
        """Until it has ended; raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Nursery:
    """The side of those who ask."""

    def __init__(self) -> None:
        """Starts the process, which ends, and kills what it has forked, when this one ends."""
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.settimeout(120)
        self._one_at_a_time = threading.Lock()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env=processes.clean_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the one who asks
            )

    def start(self, command: Sequence[str], environment: Mapping[str, str], out: IO[bytes], err: IO[bytes]) -> Child:
        """A process that calls `processes.work(*command)`."""
        request = {"command": command, "environment": environment, "folder": os.getcwd()}
        return Child(self, self.ask(request, out.fileno(), err.fileno()))

    def ask(self, request: Mapping[str, Any], *descriptors: int) -> Any:
        """The answer; raises `RuntimeError` if the process is gone, `TimeoutError` if it does not answer."""
        message = json.dumps(request).encode()
        if len(message) > LARGEST:
            raise ValueError(f"a request of {len(message)} bytes, at most {LARGEST}")
        with self._one_at_a_time:
            socket.send_fds(self._ours, [message], descriptors)
            answer = self._ours.recv(LARGEST)
        if not answer:
            raise RuntimeError(f"the process that forks ranks has ended with status {self.process.wait(60)}")
        return json.loads(answer)

    def close(self) -> None:
        """Ends it, and what it has forked."""
        self._ours.close()
        self.process.wait(60)


@functools.cache
def _all() -> tuple[Nursery, Nursery]:
    both = Nursery(), Nursery()
    for one in both:
        atexit.register(one.close)
    return both


def of(rank: int) -> Nursery:
    """Neighbours come from different ones, whose strings hash differently: so do those of ranks on a cluster."""
    return _all()[rank % 2]


def serve(connection: socket.socket) -> list[str] | None:
    """Forks for those who ask. Returns in a child: its command; and here, None, when nobody can ask any more."""
    alive: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, LARGEST, 2)
        if not message:
            break
        request = json.loads(message)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            alive.discard(pid)
            answer = os.waitstatus_to_exitcode(status) if pid else None
            connection.sendall(json.dumps(answer).encode())
            continue
        pid = os.fork()
        if pid == 0:
            _begin(request, descriptors)
            connection.sendall(json.dumps(os.getpid()).encode())
            connection.close()
            command: list[str] = request["command"]
            return command
        alive.add(pid)
        for descriptor in descriptors:
            os.close(descriptor)
    for pid in alive:
        os.killpg(pid, signal.SIGKILL)
    return None


def _begin(request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Makes a forked process one of its own."""
    import numpy

    os.setsid()
    for target, descriptor in enumerate(descriptors, 1):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    numpy.random.seed()  # Python's own generator does so by itself


if __name__ == "__main__":
    importlib.import_module("torch._dynamo")  # torch, and what the first optimizer of a process imports anyway
    command = serve(socket.socket(fileno=int(sys.argv[1])))
    if command is not None:
        processes.work(*command)
