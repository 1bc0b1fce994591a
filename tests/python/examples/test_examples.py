"""Every example trains on two processes, at a size small enough for a test."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from processes import run

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"

# Words after the script, the figure that rank 0 prints last, and what it must have fallen below.
SMALL = {
    "language_model": (
        ["--steps=20", "--width=32", "--layers=2", "--batch=4", "--megabytes=0.2", "--lr=1e-2", "--report-every=10"],
        r"step 20: ([\d.]+) bits per byte",
        6.5,  # 8 without having learned anything
    ),
    "accumulation_amp": (["--steps=20"], r"20 steps of 4 backward passes: loss ([\d.]+)", 0.68),  # 0.693: a coin
    "accelerate_loop": (["--steps=20"], r"20 steps of 2 backward passes: loss ([\d.]+)", 0.68),
    "lightning_manual": (["--steps=20"], r"20 steps: loss ([\d.]+)", 0.68),
    "ddp": (["--steps=20"], r"20 steps: loss ([\d.]+)", 0.68),
    "elastic": (["--steps=20"], r"20 steps, loss ([\d.]+), weights", 0.68),
}


@pytest.mark.parametrize("name", SMALL)
def test_two_processes_learn(name: str, tmp_path: Path) -> None:
    words, figure, below = SMALL[name]
    if name == "elastic":
        words = [*words, f"--checkpoint={tmp_path / 'checkpoint'}"]
    first, second = run(2, [sys.executable, str(EXAMPLES / f"{name}.py"), *words], timeout=150)
    found = re.findall(figure, first.stdout)
    assert len(found) == 1, first.stdout
    assert float(found[0]) < below
    assert second.stdout == ""
