"""Trains Fashion-MNIST four times on a slow network, and shows what hiding the exchange brings.

    python examples/demo.py

One process alone; then two processes over slow links: synchronous, plainly delayed, and delayed with
prediction. Unless `--rate` says otherwise, the links are such that exchanging the gradients takes most of
a step of the one process, whatever this machine's speed. As root the processes run in network namespaces
whose links are shaped as a switch would (bench/netns.py); else mdas's TCP transport limits its own rate.
Ends with a table and a picture; everything in them is measured in this run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))

import fashion_mnist  # noqa: E402
import mdas  # noqa: E402
import netns  # noqa: E402
from fashion_data import Split, load  # noqa: E402
from mdas.cli.record import Recorder  # noqa: E402
from mdas.communicator import AloneCommunicator, CoreCommunicator  # noqa: E402
from mdas.session import current  # noqa: E402

CURVE_POINTS = 16
"""Evaluations per training, on part of the test set and off the clock."""
TIMELINE_STEPS = 4
WARMUP = 110
"""Steps that are not part of the steady state: the 100 synchronous ones, and some to get into stride."""
EXCHANGE_SHARE = 0.8
"""Of a step: enough to hurt where it is not hidden, little enough to hide."""


@dataclass(frozen=True)
class Mode:
    """One of the trainings that are compared."""

    name: str
    ranks: int
    schedule: str
    predict: str


def modes(ranks: int, predict: str) -> list[Mode]:
    """What the demo compares."""
    return [
        Mode("one process alone", 1, "sync", "none"),
        Mode("synchronous", ranks, "sync", "none"),
        Mode("delayed, no prediction", ranks, "delayed", "none"),
        Mode(f"delayed, {predict}", ranks, "delayed", predict),
    ]


class Watch:
    """Follows a training from inside: progress, accuracy curve, and what the steady state is made of.

    The clock stands still during evaluations, and starts after `warmup` steps, which are synchronous
    under every schedule.
    """

    def __init__(self, options: argparse.Namespace, test: Split, steps: int, recorder: Recorder) -> None:
        self._options, self._steps, self._recorder = options, steps, recorder
        self._probe = Split(test.images[:2000], test.labels[:2000])
        self._warmup = min(WARMUP, steps // 2)
        self._between = max(1, steps // CURVE_POINTS)
        self._begin = self._mark = time.monotonic_ns()
        self._paused = self._paused_at_warmup = 0
        self._steady_from = self._begin
        self.curve: list[tuple[int, float, float]] = []
        self.step_ends: list[int] = []

    def after_step(self, step: int, model: nn.Module) -> None:
        """Called by the training loop."""
        self.step_ends.append(time.monotonic_ns())
        if step == self._warmup:
            self._recorder.forget()
            self._steady_from, self._paused_at_warmup = time.monotonic_ns(), self._paused
        if step % self._between == 0 or step == self._steps:
            self._evaluate(step, model)

    def _evaluate(self, step: int, model: nn.Module) -> None:
        begin = time.monotonic_ns()
        waits = len(self._recorder.waits)
        if mdas.rank() == 0:
            accuracy = fashion_mnist.accuracy(model, self._probe)
            images = step * self._options.batch * mdas.size()
            self.curve.append((images, (begin - self._begin - self._paused) / 1e9, accuracy))
            print(f"progress {step} {self._steps} {accuracy}", flush=True)
        mdas.barrier()
        del self._recorder.waits[waits:]
        self._paused += time.monotonic_ns() - begin
        self.step_ends[-1] = time.monotonic_ns()

    def report(self, model: nn.Module, test: Split, source: str) -> dict[str, object]:
        """What one rank has seen."""
        seconds = (self.step_ends[-1] - self._steady_from - self._paused + self._paused_at_warmup) / 1e9
        steps = self._steps - self._warmup
        first, last = self._typical()
        return {
            "source": source,
            "images_per_second": steps * self._options.batch * mdas.size() / seconds,
            "step_ms": seconds / steps * 1e3,
            "exposed": self._recorder.exposed() / seconds,
            "accuracy": fashion_mnist.accuracy(model, test),
            "curve": self.curve,
            "timeline": {
                "steps": [end - first for end in self.step_ends if first <= end <= last],
                "waits": [(a - first, b - first) for a, b in self._recorder.waits if first <= a and b <= last],
                "exchanges": [
                    (exchange.submitted - first, exchange.finished - first)
                    for exchange in self._recorder.exchanges
                    if exchange.finished is not None and exchange.finished >= first and exchange.submitted <= last
                ],
            },
        }

    def _typical(self) -> tuple[int, int]:
        """When a few steps began and ended that took neither longer nor shorter than most."""
        paused = {step for step in range(1, self._steps + 1) if step % self._between == 0 or step == self._steps}
        windows = [
            (self.step_ends[step + TIMELINE_STEPS - 1] - self.step_ends[step - 1], step)
            for step in range(self._warmup, self._steps - TIMELINE_STEPS)
            if paused.isdisjoint(range(step + 1, step + TIMELINE_STEPS + 1))
        ]
        _, step = sorted(windows)[len(windows) // 2] if windows else (0, self._steps - TIMELINE_STEPS)
        return self.step_ends[step - 1], self.step_ends[step + TIMELINE_STEPS - 1]


def worker(options: argparse.Namespace) -> None:
    """One rank of one training."""
    mdas.init()
    data = load(options.data, digits=options.digits)
    engine = current().engine
    alone = engine.size == 1
    recorder = Recorder(AloneCommunicator() if alone else CoreCommunicator(engine, 0, engine.rank, engine.size))
    steps = fashion_mnist.steps_per_epoch(data.train, options.batch) * options.epochs
    watch = Watch(options, data.test, steps, recorder)
    options.quiet = True
    model = fashion_mnist.train(options, data, communicator=recorder, after_step=watch.after_step)
    report = watch.report(model, data.test, data.source)
    if mdas.rank() == 0:
        options.report.write_text(json.dumps(report))
    mdas.barrier()
    mdas.shutdown()


def run(options: argparse.Namespace, mode: Mode) -> dict[str, object]:
    """Trains in one mode and returns rank 0's report.

    Raises:
        netns.LabError: a process failed; the message holds what it printed.
    """
    report = options.out / f"{mode.name.replace(' ', '-').replace(',', '')}.json"
    command = [sys.executable, __file__, "--worker", "--report", str(report), "--data", str(options.data)]
    for name in ("epochs", "batch", "lr", "momentum", "seed", "warmup"):
        command += [f"--{name}", str(getattr(options, name))]
    command += ["--schedule", mode.schedule, "--predict", mode.predict, *(["--digits"] if options.digits else [])]
    start = time.monotonic()

    def on_line(host: int, line: str) -> None:
        if host == 0 and line.startswith("progress "):
            step, steps, accuracy = line.split()[1:]
            show(f"{mode.name}: step {step}/{steps}, {float(accuracy):.1%}, {time.monotonic() - start:.0f} s")

    show(f"{mode.name}: starting")
    with lab(mode.ranks, options.rate) as hosts:
        hosts.run(command, limit(mode.ranks, options.rate), timeout=600, on_line=on_line)
    print(file=sys.stderr)
    result: dict[str, object] = json.loads(report.read_text())
    return result


def slow_rate(step_seconds: float, ranks: int) -> str:
    """Links on which a ring allreduce of the gradients takes `EXCHANGE_SHARE` of a step, in tc's notation."""
    nbytes = sum(parameter.nbytes for parameter in fashion_mnist.Net().parameters()) * 2 * (ranks - 1) / ranks
    return f"{max(1, round(8 * nbytes / (EXCHANGE_SHARE * step_seconds) / 1e6))}mbit"


def lab(ranks: int, rate: str | None) -> netns.Hosts:
    """Hosts behind slow links where this machine can have them, else processes of this host."""
    if ranks == 1 or netns.unavailable():
        return netns.Localhost(ranks)
    return netns.Network(ranks, rate)


def limit(ranks: int, rate: str | None) -> dict[str, str]:
    """Without namespaces: the transport's own limit, in bytes per second."""
    if ranks == 1 or rate is None or not netns.unavailable():
        return {}
    return {"MDAS_TCP_RATE_LIMIT": str(parse_rate(rate) // 8)}


def parse_rate(rate: str) -> int:
    """Bits per second from tc's notation: "200mbit", "1gbit".

    Raises:
        ValueError: another notation.
    """
    for unit, factor in (("gbit", 10**9), ("mbit", 10**6), ("kbit", 10**3)):
        if rate.endswith(unit):
            return int(float(rate.removesuffix(unit)) * factor)
    raise ValueError(f"{rate!r} is not a rate such as 200mbit or 1gbit")


def show(text: str) -> None:
    """A progress line: overwritten on a terminal, else one line each."""
    terminal = sys.stderr.isatty()
    print(f"\r{text:<78}" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)


def table(compared: Sequence[tuple[Mode, dict[str, object]]]) -> str:
    """The result as Markdown."""
    lines = [
        "| | images/s | scaling efficiency | exposed communication, % of the step | test accuracy |",
        "|---|---:|---:|---:|---:|",
    ]
    alone = _number(compared[0][1], "images_per_second")
    for mode, report in compared:
        rate = _number(report, "images_per_second")
        efficiency = "" if mode.ranks == 1 else f"{rate / alone / mode.ranks:.0%}"
        exposed = "" if mode.ranks == 1 else f"{100 * _number(report, 'exposed'):.1f}"
        lines.append(f"| {mode.name} | {rate:.0f} | {efficiency} | {exposed} | {_number(report, 'accuracy'):.2%} |")
    return "\n".join(lines)


def _number(report: dict[str, object], name: str) -> float:
    value = report[name]
    assert isinstance(value, float)
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Compares the modes; or trains in one of them, as `--worker`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    fashion_mnist.arguments(parser)
    parser.set_defaults(batch=128, epochs=3)
    parser.add_argument("--rate", help="of every link, such as 200mbit (default: by the speed of this machine)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="where reports and picture go")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        torch.set_num_threads(1)
        worker(options)
        return 0

    options.out.mkdir(parents=True, exist_ok=True)
    reason = netns.unavailable()
    how = "network namespaces, tbf on the bridge's ports" if reason is None else f"the transport's own limit ({reason})"
    print(f"{os.cpu_count()} cores; links by {how}", file=sys.stderr)
    load(options.data, digits=options.digits)
    start = time.monotonic()
    compared: list[tuple[Mode, dict[str, object]]] = []
    for mode in modes(options.ranks, options.predict):
        if compared and options.rate is None:
            options.rate = slow_rate(_number(compared[0][1], "step_ms") / 1e3, options.ranks)
        try:
            compared.append((mode, run(options, mode)))
        except netns.LabError as error:
            print(f"\n{error}", file=sys.stderr)
            return 1
    from demo_picture import draw

    picture = options.out / "demo.png"
    draw(compared, options, picture)
    setup = f"{options.epochs} epochs, {options.batch} pictures per process and step, links of {options.rate}"
    steady = f"images/s without the first {WARMUP} steps, which are synchronous in every row"
    text = f"{table(compared)}\n\n{compared[0][1]['source']}; {setup}; {steady}\n"
    (options.out / "table.md").write_text(text)
    print(f"\n{text}")
    print(f"\naccuracy curves and timeline: {picture} ({time.monotonic() - start:.0f} s in all)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
