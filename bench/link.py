"""How much of a link an allreduce uses: mdas and Gloo against one plain TCP stream, in one run.

    python bench/link.py --hosts 2 4 --rate 1gbit

Every round measures, on the same shaped links, a plain stream from host 0 to host 1, then allreduces
back to back, two in flight: busbw (size * 2 (n - 1) / n / time) is what every link carries in either
direction. Ratios are to the plain stream of the same round: median [smallest, largest]. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import netns

PORT = 29600
MEBIBYTE = 1 << 20


def stream(seconds: float) -> None:
    """Rank 0 sends for `seconds` to rank 1, which prints the goodput in bytes/s; the other ranks idle."""
    rank, address = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
    if rank == 0:
        with socket.create_server((address, PORT)) as server:
            server.settimeout(30)
            connection, _ = server.accept()
            chunk = bytes(MEBIBYTE)
            deadline = time.monotonic() + seconds + 1
            with connection:
                while time.monotonic() < deadline:
                    connection.sendall(chunk)
    elif rank == 1:
        connection = _connect(address)
        buffer = bytearray(MEBIBYTE)
        opened = start = end = time.monotonic()
        received = 0
        with connection:
            while count := connection.recv_into(buffer):
                now = time.monotonic()
                if now - opened < 0.5:  # slow start
                    start = now
                elif now - start < seconds:
                    received, end = received + count, now
        print(json.dumps(received / (end - start)))


def _connect(address: str) -> socket.socket:
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=30)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def gloo(sizes: Sequence[int], seconds: float) -> None:
    """Allreduces through torch.distributed; rank 0 prints busbw in bytes/s per size."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    size = distributed.get_world_size()
    rates = []
    for nbytes in sizes:
        tensors = [torch.ones(nbytes // 4) for _ in range(2)]

        def back_to_back(iterations: int, tensors: list[torch.Tensor] = tensors) -> float:
            distributed.barrier()
            flying: deque[distributed.Work] = deque()
            start = time.perf_counter()
            for iteration in range(iterations):
                if len(flying) == len(tensors):
                    flying.popleft().wait()
                flying.append(distributed.all_reduce(tensors[iteration % 2], async_op=True))
            for work in flying:
                work.wait()
            return time.perf_counter() - start

        wanted = torch.tensor([max(4, int(seconds / (back_to_back(5) / 5)))])
        distributed.all_reduce(wanted, distributed.ReduceOp.MAX)
        iterations = int(wanted)
        taken = torch.tensor([back_to_back(iterations)])
        distributed.all_reduce(taken, distributed.ReduceOp.MAX)
        rates.append(nbytes * 2 * (size - 1) / size * iterations / float(taken))
    if distributed.get_rank() == 0:
        print(json.dumps(rates))
    distributed.destroy_process_group()


@dataclass(frozen=True)
class Result:
    """One network: per round, goodputs in bytes/s (of allreduces: per size), and the report under load."""

    hosts: int
    mib: list[float]
    plain: list[float]
    mdas: list[list[float]]
    gloo: list[list[float]]
    under_load: list[dict[str, Any]]


def measure(hosts: int, options: argparse.Namespace) -> Result:
    """All rounds on one network."""
    sizes = [int(mib * MEBIBYTE) for mib in options.mib]
    here = [sys.executable, __file__]
    seconds = ["--seconds", str(options.seconds)]
    timeout = 120 + 4 * options.seconds * len(sizes)
    result = Result(hosts, options.mib, [], [], [], [])
    with netns.Network(hosts, options.rate) as network, tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            result.plain.append(json.loads(network.run([*here, "--stream", *seconds], timeout=timeout)[1]))
            rates = []
            for nbytes in sizes:
                report = Path(folder) / "report.json"
                _mdas(network, ["-b", str(nbytes), "-e", str(nbytes), "--in-flight", "2", *seconds], report, timeout)
                rates.append(json.loads(report.read_text())["rows"][0]["busbw"] * 1e9)
            result.mdas.append(rates)
            _mdas(network, ["-e", str(sizes[0]), "--under-load", *seconds], report, timeout)
            result.under_load.append(json.loads(report.read_text()))
            words = [*here, "--gloo", "--mib", *map(str, options.mib), *seconds]
            result.gloo.append(json.loads(network.run(words, timeout=timeout)[0].splitlines()[-1]))
    return result


def _mdas(network: netns.Network, arguments: list[str], report: Path, timeout: float) -> None:
    command = [sys.executable, "-m", "mdas.cli", "bench", "allreduce", *arguments, "--json", str(report)]
    network.run(command, timeout=timeout)


def ratios(values: Sequence[float], plain: Sequence[float]) -> str:
    """Median, smallest and largest of the rounds' ratios."""
    each = [value / base for value, base in zip(values, plain, strict=True)]
    return f"{median(each):.3f} [{min(each):.3f}, {max(each):.3f}]"


def show(result: Result, rate: str) -> str:
    """One network's results as Markdown."""
    plain, loads = result.plain, result.under_load
    lines = [
        f"{result.hosts} hosts, links of {rate}, plain stream {median(plain) / 1e6:.1f} MB/s ({len(plain)} rounds)\n",
        "| allreduce | mdas / plain stream | Gloo / plain stream |",
        "|---|---:|---:|",
    ]
    for k, mib in enumerate(result.mib):
        mine, other = [row[k] for row in result.mdas], [row[k] for row in result.gloo]
        lines.append(f"| {mib:g} MiB | {ratios(mine, plain)} | {ratios(other, plain)} |")
    idle = [load["idle_us"]["median"] for load in loads]
    loaded = [load["loaded_us"]["median"] for load in loads]
    worst = [load["loaded_us"]["p99"] for load in loads]
    goodput = ratios([load["bulk_busbw"] * 1e9 for load in loads], plain)
    lines.append(
        f"\n8-byte allreduce on the urgent lane: {median(idle):.0f} us on the idle link, {median(loaded):.0f} us "
        f"[{min(loaded):.0f}, {max(loaded):.0f}] beside bulk allreduces (99th percentile {median(worst):.0f} us), "
        f"which keep {goodput} of the plain stream.\n"
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; or is one of the measured processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--mib", type=float, nargs="+", default=[4, 16, 64])
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--stream", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--gloo", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.stream:
        stream(options.seconds)
        return 0
    if options.gloo:
        gloo([int(mib * MEBIBYTE) for mib in options.mib], options.seconds)
        return 0
    results = []
    for hosts in options.hosts:
        try:
            results.append(measure(hosts, options))
        except netns.LabError as error:
            print(error, file=sys.stderr)
            return 1
        print(show(results[-1], options.rate), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
