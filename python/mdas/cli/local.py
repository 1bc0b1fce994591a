"""Starts a benchmark's ranks: as processes of this host, as threads over the loopback transport, or not at all
because a launcher has done it.

A benchmark is a module with `measure(engine, options) -> None`, called once per rank.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mdas import _core, env
from mdas.launch import launch
from mdas.settings import TRANSPORTS

Measure = Callable[[_core.Engine, argparse.Namespace], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that say who takes part."""
    parser.add_argument(
        "--world", type=int, help="start this many local processes (default: the launcher's ranks, else 2)"
    )
    parser.add_argument(
        "--transport",
        choices=[*TRANSPORTS, "loopback"],
        help="default: MDAS_TRANSPORT, else auto; loopback: ranks are threads of one process",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")


def run(module: str, options: argparse.Namespace) -> int:
    """Runs the benchmark `module` on all ranks and waits for them. Returns the exit status."""
    if importlib.util.find_spec("numpy") is None:
        print("the benchmarks need numpy: pip install numpy", file=sys.stderr)
        return 1
    job = env.detect(os.environ)
    launched = job.launcher != "single"
    if options.json and job.rank == 0:
        try:
            open(options.json, "a", encoding="utf-8").close()
        except OSError as error:
            # Now, not after minutes of measuring.
            print(f"--json {options.json}: {error.strerror}", file=sys.stderr)
            return 2
    if launched and options.world is None and options.transport != "loopback":
        return _run_here(module, options)
    world = 2 if options.world is None else options.world
    if world < 1:
        print(f"--world is {world}, but there must be at least one rank", file=sys.stderr)
        return 2
    start = _run_threads if options.transport == "loopback" else _run_processes
    return start(module, options, world)


def _measure_of(module: str) -> Measure:
    measure: Measure = importlib.import_module(module).measure
    return measure


def _run_here(module: str, options: argparse.Namespace) -> int:
    import mdas
    from mdas.session import current

    mdas.init(transport=options.transport)
    _measure_of(module)(current().engine, options)
    mdas.shutdown()
    return 0


def _run_threads(module: str, options: argparse.Namespace, world: int) -> int:
    measure = _measure_of(module)

    def rank(engine: _core.Engine) -> None:
        try:
            measure(engine, options)
        finally:
            engine.shutdown(5.0)

    with ThreadPoolExecutor(world) as threads:
        for future in [threads.submit(rank, engine) for engine in _core.loopback(world)]:
            future.result()
    return 0


def _run_processes(module: str, options: argparse.Namespace, world: int) -> int:
    here = vars(options) | {"world": None}
    return launch([sys.executable, "-m", "mdas.cli.local", module, json.dumps(here)], world)


def spread(engine: _core.Engine, value: float, op: str = "max") -> float:
    """The maximum, sum, ... of one number over all ranks, known to all of them."""
    memory = _core.Memory(8)
    number = memoryview(memory).cast("d")
    number[0] = value
    view = _core.View.from_buffer(number, True)
    engine.allreduce(0, view, view, op=op, lane="urgent").wait()
    return number[0]


def write_json(path: str | None, results: dict[str, Any]) -> None:
    """Writes the results where a file was asked for."""
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    sys.exit(_run_here(sys.argv[1], argparse.Namespace(**json.loads(sys.argv[2]))))
