"""Starts a script as several ranks on this host: `python -m mdas.launch -n 4 train.py --epochs 3`.

Each process gets the environment that torchrun would give it (`env://`, without an agent). The first one
that fails takes the others with it, and its exit status becomes the launcher's.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from mdas import env

_GRACE_SECONDS = 5.0
"""For the others to notice a failure themselves and to say what they saw, and then to obey SIGTERM."""

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and launches; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m mdas.launch", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("-n", "--ranks", type=int, required=True, help="number of processes")
    parser.add_argument("--master-port", type=int, help="where they meet, on 127.0.0.1 (default: a free port)")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if options.ranks < 1:
        parser.error("--ranks must be at least 1")
    return launch([sys.executable, options.script, *options.args], options.ranks, options.master_port)


def launch(command: Sequence[str], ranks: int, master_port: int | None = None) -> int:
    """Runs `command` as `ranks` processes and waits for all.

    Signals for this process go to all of them meanwhile. Returns the exit status of the first that
    failed (128 + number if a signal ended it), else 0.
    """
    port = _free_port() if master_port is None else master_port
    processes: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        _signal_all(processes, signal.Signals(number))

    handlers = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        for rank in range(ranks):
            environment = _outer_environment() | _place(rank, ranks, port)
            # A session of its own: the terminal's Ctrl-C comes once, through us.
            processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
        return _wait(processes)
    finally:
        _signal_all(processes, signal.SIGKILL)
        for process in processes:
            process.wait()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _outer_environment() -> dict[str, str]:
    """Ours, without what would contradict us, or make our ranks look for the agent of an outer torchrun."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TORCHELASTIC_") and name not in env.PLACES
    }


def _place(rank: int, ranks: int, port: int) -> dict[str, str]:
    place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}}


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    while True:
        states = [process.poll() for process in processes]
        failed = [(rank, state) for rank, state in enumerate(states) if state]
        if failed:
            break
        if None not in states:
            return 0
        time.sleep(0.02)
    rank, state = failed[0]
    print(f"mdas.launch: rank {rank} ended with {_described(state)}; ending the others", file=sys.stderr)
    for number in (None, signal.SIGTERM):
        if number is not None:
            _signal_all(processes, number)
        deadline = time.monotonic() + _GRACE_SECONDS
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.02)
    return 128 - state if state < 0 else state


def _described(state: int) -> str:
    return f"signal {signal.Signals(-state).name}" if state < 0 else f"exit status {state}"


def _signal_all(processes: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in processes:
        process.send_signal(number)  # does nothing to those that have ended


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
