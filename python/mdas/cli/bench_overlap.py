"""`mdas bench overlap`: how much of an exchange hides behind computation.

The columns are those of the OSU non-blocking benchmarks: overall time, compute time, time of the pure
exchange, and overlap = 100 * (1 - exposed / pure). `exposed` is the time during which a rank waits for
communication. The computation is a sleep, as an accelerator would leave the CPU free.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mdas import _core
from mdas.cli import local

if TYPE_CHECKING:
    from mdas.cli.payload import Payload
    from mdas.cli.record import Recorder

PREDICTIONS = ("none", "history", "local", "blend", "sketch", "sketch+blend")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `mdas bench overlap`."""
    local.add_arguments(parser)
    parser.add_argument("--mb", type=float, nargs="+", default=[16.0], help="MiB of gradients (default: 16)")
    parser.add_argument(
        "--predict", choices=PREDICTIONS, nargs="*", default=["blend", "sketch"], help="delayed schedules to measure"
    )
    parser.add_argument("--no-sync", action="store_true", help="leave out the synchronous schedule")
    parser.add_argument("--layers", type=int, default=8, help="square matrices that make up the model (default: 8)")
    parser.add_argument("--bucket-mb", type=float, default=4.0)
    parser.add_argument("--ratio", type=float, default=1.05, help="compute time / pure exchange (default: 1.05)")
    parser.add_argument("-n", "--iterations", type=int, default=20)
    parser.add_argument("-w", "--warmup", type=int, default=5)


def run(options: argparse.Namespace) -> int:
    """Measures, prints a table, returns an exit status."""
    if min(options.mb) <= 0 or options.iterations < 1 or options.layers < 1 or options.ratio < 0:
        print("need --mb > 0, --iterations >= 1, --layers >= 1 and --ratio >= 0", file=sys.stderr)
        return 2
    return local.run(__name__, options)


@dataclass(frozen=True)
class Row:
    """Means over iterations, of the slowest rank, in milliseconds."""

    what: str
    mb: float
    overall_ms: float
    compute_ms: float
    pure_ms: float
    exposed_ms: float

    @property
    def overlap(self) -> float:
        """Share of the pure exchange that was hidden, in percent."""
        return max(0.0, 100 * (1 - self.exposed_ms / self.pure_ms)) if self.pure_ms else 0.0

    @property
    def exposed(self) -> float:
        """Exposed time in percent of the overall time."""
        return 100 * self.exposed_ms / self.overall_ms


def measure(engine: _core.Engine, options: argparse.Namespace) -> None:
    """One rank's part. Rank 0 prints."""
    rows: list[Row] = []
    if engine.rank == 0:
        print(f"# overlap, {engine.size} ranks over {engine.transport}, compute {options.ratio} x the pure exchange")
        print(_line("what", "size", "overall", "compute", "pure comm", "overlap", "exposed", "exposed"))
        print(_line("", "(MiB)", "(ms)", "(ms)", "(ms)", "(%)", "(ms)", "(% step)"))
    for mb in options.mb:
        for row in _rows_of_size(engine, options, mb):
            rows.append(row)
            if engine.rank == 0:
                times = [f"{value:.2f}" for value in (row.overall_ms, row.compute_ms, row.pure_ms)]
                shares = [f"{row.overlap:.1f}", f"{row.exposed_ms:.2f}", f"{row.exposed:.2f}"]
                print(_line(row.what, f"{mb:g}", *times, *shares), flush=True)
    if engine.rank == 0:
        table = [asdict(row) | {"overlap": row.overlap, "exposed": row.exposed} for row in rows]
        results = {"benchmark": "overlap", "ranks": engine.size, "transport": engine.transport, "rows": table}
        local.write_json(options.json, results)


def _line(*cells: str) -> str:
    widths = (-22, 7, 10, 10, 10, 9, 9, 9)
    return " ".join(
        cell.ljust(-width) if width < 0 else cell.rjust(width) for cell, width in zip(cells, widths, strict=True)
    )


def _rows_of_size(engine: _core.Engine, options: argparse.Namespace, mb: float) -> Iterator[Row]:
    from mdas.cli.payload import Payload

    payload = Payload(int(mb * 2**20) // 4, "float32", engine.rank)
    pure = _raw(engine, payload, 0.0, options)
    # All ranks sleep equally long.
    compute = local.spread(engine, pure.overall_ms) * options.ratio / 1e3
    raw = _raw(engine, payload, compute, options)
    yield Row("allreduce", mb, raw.overall_ms, compute * 1e3, pure.overall_ms, raw.exposed_ms)
    if importlib.util.find_spec("torch") is None:
        if engine.rank == 0:
            print("# torch is not installed: no rows for mdas.DistributedOptimizer")
        return
    schedules = [] if options.no_sync else [("sync", "none")]
    schedules += [("delayed", predict) for predict in options.predict]
    for schedule, predict in schedules:
        step = _train(engine, options, mb, compute, schedule, predict)
        name = "sync" if schedule == "sync" else f"delayed, {predict}"
        yield Row(name, mb, step.overall_ms, compute * 1e3, pure.overall_ms, step.exposed_ms)


def _raw(engine: _core.Engine, payload: Payload, compute: float, options: argparse.Namespace) -> Row:
    source, result = payload.views()
    exposed = start = 0.0
    for iteration in range(-options.warmup, options.iterations):
        if iteration == 0:
            engine.barrier(0).wait()
            exposed, start = 0.0, time.perf_counter()
        work = engine.allreduce(0, source, result)
        time.sleep(compute)
        begin = time.perf_counter()
        work.wait()
        exposed += time.perf_counter() - begin
    return _slowest(engine, options, time.perf_counter() - start, exposed)


def _slowest(engine: _core.Engine, options: argparse.Namespace, taken: float, exposed: float) -> Row:
    scale = 1e3 / options.iterations
    return Row("", 0.0, local.spread(engine, taken) * scale, 0.0, 0.0, local.spread(engine, exposed) * scale)


def _train(
    engine: _core.Engine, options: argparse.Namespace, mb: float, compute: float, schedule: Any, predict: Any
) -> Row:
    """Steps of `mdas.DistributedOptimizer` on a model whose forward and backward pass sleep `compute` seconds."""
    import torch

    from mdas.cli.record import Recorder
    from mdas.cli.sleeper import Sleeper
    from mdas.communicator import CoreCommunicator
    from mdas.optimizer import DistributedOptimizer

    recorder: Recorder = Recorder(CoreCommunicator(engine, 0, engine.rank, engine.size))
    torch.set_num_threads(1)
    model = Sleeper(mb, options.layers, compute)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        model,
        schedule=schedule,
        predict=predict,
        bucket_mb=options.bucket_mb,
        warmup_steps=1,
        communicator=recorder,
    )
    start = 0.0
    for iteration in range(-options.warmup, options.iterations):
        if iteration == 0:
            recorder.forget()
            start = time.perf_counter()
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    row = _slowest(engine, options, time.perf_counter() - start, recorder.exposed())
    optimizer.close()
    return row
