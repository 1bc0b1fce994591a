"""Accuracy under every prediction, measured with the product itself: ranks as threads over loopback.

    python bench/convergence.py --jobs 2          # cells that are missing in results/convergence.jsonl
    python bench/convergence.py --table           # only print the table

Fashion-MNIST, SGD with momentum 0.9, the CNN of examples/fashion_mnist.py, 100 synchronous steps, cosine
rate. A cell is one training with one seed; an interrupted run resumes with the cells that are missing.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import cycle
from multiprocessing import get_context
from multiprocessing.queues import Queue
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from mdas import _core
from mdas.cli.local import spread
from mdas.communicator import CoreCommunicator
from mdas.optimizer import DistributedOptimizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from fashion_data import Data, load  # noqa: E402
from fashion_mnist import Net, accuracy, learning_rate  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "convergence.jsonl"
PREDICTIONS = [
    "sync",
    "none",
    "history",
    "local",
    "blend",
    "sketch rank 1",
    "sketch rank 2",
    "sketch rank 4",
    "sketch+blend rank 1",
    "sketch+blend rank 2",
]
CLAIM = ("sync", "sketch rank 4")
COLUMNS = [
    (4, 32, 4, 0.1, False),
    (4, 32, 4, 0.1, True),
    (4, 32, 4, 0.2, False),
    (4, 32, 4, 0.2, True),
    (32, 4, 1, 0.1, False),
]
"""Workers, batch of each, epochs, learning rate, by class?"""
WINDOW = 25
"""Steps between two looks at the loss."""
CHANCE = 0.15
"""A network at or below this accuracy has learned nothing: ten classes, one right in ten."""


@dataclass(frozen=True)
class Cell:
    """One training. `by_class`: every worker sees pictures of its own classes only."""

    workers: int
    batch: int
    epochs: int
    lr: float
    by_class: bool
    predict: str
    seed: int

    @property
    def column(self) -> tuple[int, int, int, float, bool]:
        """Where it stands in the table."""
        return self.workers, self.batch, self.epochs, self.lr, self.by_class


def cells(seeds: int) -> list[Cell]:
    """All of the table. First what the claim rests on (the default beside synchronous training), then the rest, seed by
    seed: a part of it is a table, too.
    """
    whole = [Cell(*column, predict, seed) for seed in range(seeds) for column in COLUMNS for predict in PREDICTIONS]
    return sorted(whole, key=lambda cell: (cell.predict not in CLAIM, cell.seed))


def train(cell: Cell, data: Data) -> dict[str, object]:
    """Trains all ranks of a cell. Returns its line of the results."""
    start = time.perf_counter()
    torch.manual_seed(cell.seed)
    model = Net()
    engines = _core.loopback(cell.workers)
    with ThreadPoolExecutor(cell.workers) as threads:
        futures = [threads.submit(_rank, cell, data, copy.deepcopy(model), engine) for engine in engines]
        outcomes = [future.result() for future in futures]
    made = {"seconds": round(time.perf_counter() - start, 1), "commit": _commit()}
    return asdict(cell) | outcomes[0] | made


def _commit() -> str:
    """What is measured, so that the lines of a table that grows over weeks can be told apart."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


def _rank(cell: Cell, data: Data, model: Net, engine: _core.Engine) -> dict[str, object]:
    try:
        return _train_rank(cell, data, model, engine)
    finally:
        engine.shutdown(5.0)


def _train_rank(cell: Cell, data: Data, model: Net, engine: _core.Engine) -> dict[str, object]:
    steps = cell.epochs * len(data.train) // (cell.batch * cell.workers)
    predict, _, rank = cell.predict.partition(" rank ")
    sync = predict == "sync"
    prediction: Any = "none" if sync else predict
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=cell.lr, momentum=0.9),
        model,
        schedule="sync" if sync else "delayed",
        predict=prediction,
        sketch_rank=int(rank or 4),
        warmup_steps=min(100, steps // 10),
        communicator=CoreCommunicator(engine, 0, engine.rank, engine.size),
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, steps))
    mine = np.arange(len(data.train))
    if cell.by_class:
        order = np.argsort(data.train.labels.numpy(), kind="stable")
        mine = np.array_split(order, cell.workers)[engine.rank]
    choose = np.random.default_rng((cell.seed, engine.rank))
    losses: list[float] = []
    first, bad = math.inf, 0
    for step in range(steps):
        picked = torch.from_numpy(choose.choice(mine, cell.batch))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.train.images[picked]), data.train.labels[picked])
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if (step + 1) % WINDOW == 0:
            average = spread(engine, mean(losses[-WINDOW:]), "sum") / engine.size
            first = min(first, average)
            bad = bad + 1 if not average < 10 * max(first, 0.23) else 0
            if not math.isfinite(average) or bad >= 8:
                return {"accuracy": None, "diverged_at": step + 1}
    engine.barrier(0).wait()
    return {"accuracy": accuracy(model, data.test), "loss": round(mean(losses[-50:]), 4)}


def read(path: Path) -> dict[Cell, dict[str, object]]:
    """Lines of the results by cell."""
    lines = path.read_text().splitlines() if path.exists() else []
    fields = Cell.__dataclass_fields__
    parsed = [json.loads(line) for line in lines]
    return {Cell(**{name: line[name] for name in fields}): line for line in parsed}


def table(results: dict[Cell, dict[str, object]]) -> str:
    """Markdown: mean of the seeds' test accuracies in percent, and their standard deviation."""
    columns = sorted({cell.column for cell in results})
    heads = [
        f"{workers} x {batch}, lr {lr:g}{', by class' if by_class else ''}, {epochs} epoch{'s' if epochs > 1 else ''}"
        for workers, batch, epochs, lr, by_class in columns
    ]
    lines = ["| predict | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(columns)]
    for predict in PREDICTIONS:
        row = []
        for column in columns:
            lines_of = [line for cell, line in results.items() if cell.column == column and cell.predict == predict]
            row.append(_entry([line["accuracy"] for line in lines_of]))
        lines.append(f"| {predict} | " + " | ".join(row) + " |")
    seeds = len({cell.seed for cell in results})
    return "\n".join(lines) + (
        f"\n\nTest accuracy in %, mean ± standard deviation where there are several seeds (up to {seeds}); "
        f"an empty cell has not been measured. "
        '"-": diverged, or no better than chance; "k of n": so many seeds did.\n'
    )


def _entry(accuracies: Sequence[object]) -> str:
    good = [100 * value for value in accuracies if isinstance(value, float) and value > CHANCE]
    if not accuracies:
        return ""
    if not good:
        return "-"
    text = f"{mean(good):.2f}" + (f" ± {stdev(good):.2f}" if len(good) > 1 else "")
    lost = len(accuracies) - len(good)
    return text + (f" ({lost} of {len(accuracies)} diverged)" if lost else "")


def _prepare(data: Path, processors: Queue[int]) -> None:
    """Once per process: one thread, one processor, last in line for it, and the data at hand.

    Ranks that are threads of one interpreter take turns anyway; on two processors they spend ten times as long, handing
    its lock from one to the other.
    """
    os.sched_setaffinity(0, {processors.get()})
    os.nice(10)
    torch.set_num_threads(1)
    _Loaded.data = load(data)


class _Loaded:
    data: Data


def _run(cell: Cell) -> dict[str, object]:
    return train(cell, _Loaded.data)


def _run_all(todo: Sequence[Cell], jobs: int, data: Path) -> None:
    """Cells in `jobs` processes; results are appended as they come."""
    RESULTS.parent.mkdir(exist_ok=True)
    context = get_context("spawn")
    processors = context.Queue()
    for _, processor in zip(range(jobs), cycle(sorted(os.sched_getaffinity(0))), strict=False):
        processors.put(processor)
    with ProcessPoolExecutor(jobs, context, _prepare, (data, processors)) as pool:
        for future in as_completed([pool.submit(_run, cell) for cell in todo]):
            line = json.dumps(future.result())
            with RESULTS.open("a") as file:
                file.write(line + "\n")
            print(line, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is missing, then prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--data", type=Path, default=ROOT / "out" / "data")
    options = parser.parse_args(argv)
    if not options.table:
        load(options.data)
        known = read(RESULTS)
        _run_all([cell for cell in cells(options.seeds) if cell not in known], options.jobs, options.data)
    text = table(read(RESULTS))
    RESULTS.with_suffix(".md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
