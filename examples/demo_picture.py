"""The demo's picture: accuracy curves, and a timeline of a few steps of every mode."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Patch

COLOURS = ("#7f7f7f", "#d95f02", "#7570b3", "#1b9e77")
COMPUTE, WAIT, EXCHANGE = "#4c78a8", "#e45756", "#f2b134"


def draw(compared: Sequence[tuple[Any, dict[str, Any]]], options: argparse.Namespace, path: Path) -> None:
    """Writes the picture of what `examples/demo.py` has measured."""
    figure, (curves, timeline) = plt.subplots(1, 2, figsize=(11, 3.6), width_ratios=(1, 1.25), layout="constrained")
    for (mode, report), colour in zip(compared, COLOURS, strict=True):
        seconds = [point[1] for point in report["curve"]]
        accuracy = [100 * point[2] for point in report["curve"]]
        curves.plot(seconds, accuracy, color=colour, label=mode.name, linewidth=1.8)
    title = f"{options.epochs} epoch{'s' if options.epochs > 1 else ''}, links of {options.rate}"
    curves.set(
        xlabel="seconds of training, from its first step on", ylabel="accuracy on 2000 test pictures, %", title=title
    )
    curves.legend(fontsize=8, loc="center right")
    curves.grid(alpha=0.3)
    _timeline(timeline, [(mode, report) for mode, report in compared if mode.ranks > 1])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _timeline(axes: Any, compared: Sequence[tuple[Any, dict[str, Any]]]) -> None:
    """Per mode an upper bar (what rank 0 does) and a lower one (what its links carry), in milliseconds."""
    labels = []
    for row, (mode, report) in enumerate(compared):
        line = report["timeline"]
        steps, top = [step / 1e6 for step in line["steps"]], -3.0 * row
        axes.broken_barh([(0, steps[-1])], (top, 1), color=COMPUTE)
        axes.broken_barh(_bars(line["waits"], steps[-1]), (top, 1), color=WAIT)
        axes.broken_barh(_bars(line["exchanges"], steps[-1]), (top - 1, 0.9), color=EXCHANGE)
        axes.vlines(steps, top - 1, top + 1, color="black", linewidth=0.8)
        labels.append((top, mode.name))
    axes.set_yticks([top for top, _ in labels], [name for _, name in labels], fontsize=8)
    axes.set(xlabel="milliseconds", title="a few steps of one process, of typical length")
    axes.legend(
        handles=[
            Patch(color=COMPUTE, label="computes"),
            Patch(color=WAIT, label="waits"),
            Patch(color=EXCHANGE, label="exchange under way"),
        ],
        fontsize=8,
        ncols=3,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
    )


def _bars(intervals: Sequence[tuple[int, int]], end: float) -> list[tuple[float, float]]:
    """(begin, width) in milliseconds, cut to the picture."""
    cut = [(max(0.0, a / 1e6), min(end, b / 1e6)) for a, b in intervals]
    return [(a, b - a) for a, b in cut if b > a]
