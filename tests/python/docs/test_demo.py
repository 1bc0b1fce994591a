"""The demo from end to end, on a data set small enough for a test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mdtext import ROOT

from demo import parse_rate
from processes import clean_environment


@pytest.mark.timeout(400)
def test_the_demo_trains_four_times_and_draws(tmp_path: Path) -> None:
    words = ["--digits", "--epochs", "3", "--batch", "32", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py"), *words],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    names = [row.split("|")[1].strip() for row in rows]
    assert names == ["one process alone", "synchronous", "delayed, no prediction", "delayed, sketch"]
    assert "digits" in done.stdout
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_rates_are_read_as_tc_does() -> None:
    assert parse_rate("200mbit") == 200_000_000
    assert parse_rate("1.5gbit") == 1_500_000_000
    with pytest.raises(ValueError, match="200Mb"):
        parse_rate("200Mb")
