"""`mdas bench allreduce`: time, bandwidth and correctness of an allreduce, size by size.

The columns are those of nccl-tests: algbw is size / time, busbw = algbw * 2 (n - 1) / n is what every
link carries in either direction, in GB/s (10^9 bytes). cpu is processor time (user and system, all
threads of a rank) per 10^9 bytes that a rank sends.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from mdas import _core
from mdas.cli import local
from mdas.cli.sizes import ITEMSIZE, OPS, parse_size, series

if TYPE_CHECKING:
    from mdas.cli.payload import Payload

URGENT_PACE = 0.002
"""Seconds between two urgent operations under load, so that they probe the load and do not replace it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `mdas bench allreduce`."""
    local.add_arguments(parser)
    parser.add_argument("-b", "--begin", type=parse_size, default=4, metavar="SIZE", help="smallest (default: 4)")
    parser.add_argument("-e", "--end", type=parse_size, default=64 << 20, metavar="SIZE", help="largest (64M)")
    parser.add_argument("-f", "--factor", type=float, default=4, help="between sizes (default: %(default)s)")
    parser.add_argument("-d", "--dtype", choices=list(ITEMSIZE), default="float32")
    parser.add_argument("-o", "--op", choices=OPS, default="sum")
    parser.add_argument("-n", "--iterations", type=int, default=20)
    parser.add_argument("-w", "--warmup", type=int, default=5, help="iterations before the clock starts")
    parser.add_argument("--seconds", type=float, default=0, help="run every size for at least this long")
    parser.add_argument("--in-flight", type=int, default=1, help="operations submitted ahead (default: 1)")
    parser.add_argument("--lane", choices=["bulk", "urgent"], default="bulk")
    parser.add_argument("-v", "--verbose", action="store_true", help="also how many bytes the processor copied")
    parser.add_argument(
        "--under-load",
        action="store_true",
        help="latency of an 8-byte urgent allreduce beside bulk allreduces of the largest size, and their goodput",
    )


def run(options: argparse.Namespace) -> int:
    """Measures, prints a table, returns an exit status: 1 if a result was wrong."""
    if options.factor <= 1 or options.begin > options.end or options.iterations < 1 or options.in_flight < 1:
        print("need --factor > 1, --begin <= --end, --iterations >= 1 and --in-flight >= 1", file=sys.stderr)
        return 2
    return local.run(__name__, options)


@dataclass(frozen=True)
class Row:
    """One line of the table; times in microseconds, bandwidths in GB/s, averaged over iterations."""

    size: int
    count: int
    type: str
    op: str
    iterations: int
    time_us: float
    algbw: float
    busbw: float
    wrong: int
    cpu_s_per_gb: float
    copied: float
    """Bytes that the processor of a rank copied per allreduce, beside the reduction; of the rank with most."""


def measure(engine: _core.Engine, options: argparse.Namespace) -> None:
    """One rank's part. Rank 0 prints.

    Raises:
        SystemExit: a result was wrong.
    """
    if options.under_load:
        _measure_under_load(engine, options)
        return
    rows = []
    if engine.rank == 0:
        print(f"# allreduce, {engine.size} ranks over {engine.transport}, {options.in_flight} in flight")
        print(_line("size", "count", "type", "op", "time", "algbw", "busbw", "#wrong", "cpu"))
        print(_line("(B)", "(elements)", "", "", "(us)", "(GB/s)", "(GB/s)", "", "(s/GB)"))
    for size in series(options.begin, options.end, options.factor):
        row = _measure_size(engine, options, size)
        rows.append(asdict(row))
        if engine.rank == 0:
            figures = (
                f"{row.time_us:.2f}",
                f"{row.algbw:.3f}",
                f"{row.busbw:.3f}",
                str(row.wrong),
                f"{row.cpu_s_per_gb:.3f}",
            )
            print(_line(str(row.size), str(row.count), row.type, row.op, *figures), flush=True)
            if options.verbose:
                print(f"# {row.copied:.0f} bytes copied by the processor per allreduce, beside the reduction")
    if engine.rank == 0:
        local.write_json(
            options.json, {"benchmark": "allreduce", "ranks": engine.size, "transport": engine.transport, "rows": rows}
        )
    if wrong := sum(row["wrong"] for row in rows):
        raise SystemExit(f"{wrong} elements were wrong")


def _line(*cells: str) -> str:
    widths = (12, 12, 9, 8, 11, 8, 8, 7, 8)
    return " ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _measure_size(engine: _core.Engine, options: argparse.Namespace, size: int) -> Row:
    from mdas.cli.payload import Payload

    count = size // ITEMSIZE[options.dtype]
    payloads = [Payload(count, options.dtype, engine.rank) for _ in range(options.in_flight)]
    warmup = max(1, options.warmup)
    taken, _ = _back_to_back(engine, payloads, options, warmup)
    wanted = max(options.iterations, int(options.seconds / max(taken / warmup, 1e-7)))
    iterations = int(local.spread(engine, wanted))
    for payload in payloads:
        payload.clear()
    engine.barrier(0).wait()
    copied = engine.counters()["bytes_copied"]
    taken, cpu = _back_to_back(engine, payloads, options, iterations)
    copied = engine.counters()["bytes_copied"] - copied
    seconds = local.spread(engine, taken) / iterations
    # One process holds all ranks of a loopback world: its time is theirs together.
    shared = engine.size if engine.transport == "loopback" else 1
    cpu = local.spread(engine, cpu / shared, "sum") / engine.size / iterations
    used = payloads[: min(iterations, len(payloads))]
    wrong = int(local.spread(engine, sum(payload.wrong(options.op, engine.size) for payload in used), "sum"))
    nbytes = payloads[0].nbytes
    sent = nbytes * 2 * (engine.size - 1) / engine.size
    return Row(
        size=nbytes,
        count=count,
        type=options.dtype,
        op=options.op,
        iterations=iterations,
        time_us=seconds * 1e6,
        algbw=nbytes / seconds / 1e9,
        busbw=sent / seconds / 1e9,
        wrong=wrong,
        cpu_s_per_gb=cpu / sent * 1e9 if sent else 0.0,
        copied=local.spread(engine, copied) / iterations,
    )


def _back_to_back(
    engine: _core.Engine, payloads: list[Payload], options: argparse.Namespace, iterations: int
) -> tuple[float, float]:
    """Wall and processor seconds of `iterations` allreduces, as many ahead as there are payloads."""
    views = [payload.views() for payload in payloads]
    flying: deque[_core.Work] = deque()
    cpu, start = time.process_time(), time.perf_counter()
    for iteration in range(iterations):
        if len(flying) == len(views):
            flying.popleft().wait()
        source, result = views[iteration % len(views)]
        blocking = len(views) == 1
        flying.append(engine.allreduce(0, source, result, op=options.op, lane=options.lane, blocking=blocking))
    for work in flying:
        work.wait()
    return time.perf_counter() - start, time.process_time() - cpu


def _measure_under_load(engine: _core.Engine, options: argparse.Namespace) -> None:
    from mdas.cli.payload import Payload

    seconds = options.seconds or 5.0
    count = options.end // ITEMSIZE[options.dtype]
    idle, _ = _latencies(engine, None, seconds / 5)
    load = _Load(engine, [Payload(count, options.dtype, engine.rank) for _ in range(max(3, options.in_flight))])
    _latencies(engine, load, seconds / 5)  # the link's queues and the sender's pace settle
    beside, goodput = _latencies(engine, load, seconds)
    wrong = load.finish()
    if engine.rank == 0:
        results = {
            "benchmark": "allreduce under load",
            "ranks": engine.size,
            "transport": engine.transport,
            "bulk_bytes": count * ITEMSIZE[options.dtype],
            "bulk_busbw": goodput,
            "wrong": wrong,
            "idle_us": _summary(idle),
            "loaded_us": _summary(beside),
        }
        print(f"# 8-byte urgent allreduce, {engine.size} ranks over {engine.transport}")
        print(f"{'':24} {'operations':>10} {'median us':>10} {'p99 us':>10}")
        for name, latencies in (("idle link", idle), ("beside bulk", beside)):
            summary = _summary(latencies)
            print(f"{name:24} {len(latencies):>10} {summary['median']:>10.1f} {summary['p99']:>10.1f}")
        print(f"bulk allreduces of {count * ITEMSIZE[options.dtype]} bytes: {goodput:.4f} GB/s per link, {wrong} wrong")
        local.write_json(options.json, results)
    if wrong:
        raise SystemExit(f"{wrong} elements were wrong")


def _summary(latencies: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    return {"median": cuts[49] * 1e6, "p99": cuts[98] * 1e6, "max": max(latencies) * 1e6}


class _Load:
    """Bulk allreduces, always some in flight. Ranks may be some operations apart until `finish`."""

    def __init__(self, engine: _core.Engine, payloads: list[Payload]) -> None:
        self._engine, self._payloads = engine, payloads
        self._views = [payload.views() for payload in payloads]
        self._flying: deque[_core.Work] = deque()
        self.submitted = 0

    def feed(self) -> None:
        """Replaces what is done."""
        while self._flying and self._flying[0].done():
            self._flying.popleft().wait()
        while len(self._flying) < len(self._views):
            self._submit()

    def _submit(self) -> None:
        source, result = self._views[self.submitted % len(self._views)]
        self._flying.append(self._engine.allreduce(0, source, result))
        self.submitted += 1

    def completed(self) -> int:
        """Operations that are over."""
        self.feed()
        return self.submitted - len(self._flying)

    @property
    def sent_each(self) -> float:
        """Bytes that a rank sends in one operation."""
        return self._payloads[0].nbytes * 2 * (self._engine.size - 1) / self._engine.size

    def finish(self) -> int:
        """Lets the ranks agree on a last operation, waits for it. Returns the number of wrong elements."""
        last = int(local.spread(self._engine, self.submitted))
        while self.submitted < last:
            self._flying.popleft().wait()
            self._submit()
        for work in self._flying:
            work.wait()
        wrong = sum(payload.wrong("sum", self._engine.size) for payload in self._payloads)
        return int(local.spread(self._engine, wrong, "sum"))


def _latencies(engine: _core.Engine, load: _Load | None, seconds: float) -> tuple[list[float], float]:
    """Seconds of each urgent 8-byte allreduce during `seconds`, and the load's GB/s per link meanwhile."""
    memory = _core.Memory(8)
    over = memoryview(memory).cast("d")
    view = _core.View.from_buffer(over, True)
    latencies: list[float] = []
    before = load.completed() if load else 0
    start = time.perf_counter()
    while True:
        # Rank 0's clock ends the loop on all ranks: the flag travels in the very operation that is timed.
        over[0] = float(engine.rank == 0 and time.perf_counter() - start >= seconds)
        begin = time.perf_counter()
        engine.allreduce(0, view, view, op="max", lane="urgent", blocking=True).wait()
        latencies.append(time.perf_counter() - begin)
        if over[0]:
            break
        if load:
            load.feed()
        time.sleep(URGENT_PACE)
    taken = time.perf_counter() - start
    return latencies, (load.completed() - before) * load.sent_each / taken / 1e9 if load else 0.0
