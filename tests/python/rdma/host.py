"""What scenarios share: this host's rank, what is open, its network, and the other host."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HOST = int(os.environ.get("LAB_HOST", "0"))
NIC = os.environ.get("LAB_NIC", "")
FIRST = "192.0.2.1"
"""The address of host 0."""
PORT = 29500

Result = dict[str, Any]
SCENARIOS: dict[str, Callable[[], Result]] = {}


def scenario(body: Callable[[], Result]) -> Callable[[], Result]:
    """Registers it by its name."""
    SCENARIOS[body.__name__] = body
    return body


def be_rank(rank: int, size: int, local_rank: int = 0, local_size: int = 1) -> None:
    """Says in the environment which rank this process is."""
    ranks = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    os.environ.update(MASTER_ADDR=FIRST, MASTER_PORT=str(PORT))


@contextlib.contextmanager
def job(transport: str, timeout: float = 60.0) -> Iterator[Any]:
    """`mdas` as this host's rank."""
    import mdas

    be_rank(HOST, 2)
    mdas.init(transport=transport, timeout=timeout)
    try:
        yield mdas
    finally:
        mdas.shutdown()


def alone() -> None:
    """Joins a job of one rank, and leaves it."""
    import mdas

    be_rank(0, 1)
    mdas.init()
    mdas.shutdown()


def program(module: str, call: str) -> list[str]:
    """The words of a command that calls a function of a scenario's file in a process of its own."""
    text = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})"
    return [sys.executable, "-c", f"{text}; from scenarios import {module}; {module}.{call}"]


@contextlib.contextmanager
def rank_2(module: str, call: str) -> Iterator[bool]:
    """A third rank beside this one, on host 1 only: whether it is on this host."""
    if HOST != 1:
        yield False
        return
    third = subprocess.Popen(program(module, call))
    try:
        yield True
        status = third.wait(60)
    finally:
        third.kill()
        third.wait()
    if status != 0:
        raise RuntimeError(f"the third rank ended with {status}")


def left() -> Result:
    """What this process has open."""
    from mdas import _core

    return {
        "verbs": _core.verbs_live(),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
    }


def logged(name: str) -> str:
    """What a scenario has written to its log so far."""
    return (Path(os.environ["LAB_OUT"]) / f"{name}.log").read_text()


def digest(*arrays: Any) -> str:
    """Of their bytes."""
    whole = hashlib.sha256()
    for array in arrays:
        whole.update(array.tobytes())
    return whole.hexdigest()


def tc(*words: str) -> None:
    """Changes how packets leave this host."""
    subprocess.run(["tc", "qdisc", *words[:1], "dev", NIC, "root", *words[1:]], check=True, timeout=20)


def link(state: str) -> None:
    """Sets the link of this host "up" or "down"."""
    subprocess.run(["ip", "link", "set", NIC, state], check=True, timeout=20)


def mend() -> None:
    """The network as it was, whatever a scenario has left of it."""
    link("up")
    subprocess.run(["tc", "qdisc", "del", "dev", NIC, "root"], capture_output=True, timeout=20, check=False)


def meet(what: str, seconds: float) -> None:
    """Both hosts wait here for each other: one that is ahead would be taken for lost by the next scenario.

    Raises `TimeoutError` when the other one does not come, and `RuntimeError` when it is at something else.
    """
    deadline = time.monotonic() + seconds
    with _other(deadline) as other:
        other.settimeout(20)
        other.sendall(what.encode().ljust(64))
        theirs = other.recv(64, socket.MSG_WAITALL).decode().strip()
    if theirs != what:
        raise RuntimeError(f"host {HOST} is at {what!r}, host {1 - HOST} at {theirs!r}")


def _other(deadline: float) -> socket.socket:
    if HOST == 0:
        with socket.create_server(("", PORT - 1)) as server:
            server.settimeout(deadline - time.monotonic())
            return server.accept()[0]
    while True:
        try:
            return socket.create_connection((FIRST, PORT - 1), timeout=5)
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"host 0 does not come: {error}") from error
            time.sleep(0.1)
