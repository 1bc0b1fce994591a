"""The benchmarks tell the truth about results, find their ranks, and fail when a rank fails."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mdas import _core
from mdas.cli import local, main
from mdas.cli.payload import Payload
from mdas.cli.sizes import ITEMSIZE, OPS, parse_size, series
from processes import clean_environment

pytestmark = pytest.mark.timeout(120)


def allreduced(dtype: str, op: str, count: int, size: int = 3) -> list[Payload]:
    engines = _core.loopback(size)
    payloads = [Payload(count, dtype, rank) for rank in range(size)]
    works = []
    for engine, payload in zip(engines, payloads, strict=True):
        source, result = payload.views()
        works.append(engine.allreduce(0, source, result, op=op))
    for work in works:
        work.wait(30)
    for engine in engines:
        engine.shutdown(5.0)
    return payloads


INTEGERS = ("int32", "int64", "uint8")  # have no average
PAIRS = [(dtype, op) for dtype in ITEMSIZE for op in OPS if not (dtype in INTEGERS and op == "average")]


@pytest.mark.parametrize(("dtype", "op"), PAIRS)
def test_verification_accepts_right_results_and_counts_wrong_ones(dtype: str, op: str) -> None:
    for payload in allreduced(dtype, op, count=1000):
        assert payload.wrong(op, 3) == 0
        payload.output[7] = 0
        payload.output[999] = 0
        assert payload.wrong(op, 3) == 2


@pytest.mark.parametrize("count", [0, 1, 2])
def test_short_vectors_verify(count: int) -> None:
    for payload in allreduced("float32", "sum", count):
        assert payload.wrong("sum", 3) == 0
        payload.clear()
        assert payload.wrong("sum", 3) == count


@pytest.mark.parametrize(
    ("text", "size"), [("4", 4), ("64K", 65536), ("1.5M", 1572864), ("2G", 2 << 30), ("8MB", 8 << 20)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "-4", "infM", "4Q"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_size(text)


def test_series_ends_at_its_last_size() -> None:
    assert list(series(4, 64, 4)) == [4, 16, 64]
    assert list(series(4, 4, 2)) == [4]
    assert list(series(1, 4, 1.01)) == [1, 2, 3, 4]


def test_allreduce_in_processes_prints_and_writes_what_it_measured(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = "bench allreduce --world 2 -b 4 -e 64K -f 128 -n 3 -w 1 -d bfloat16 --json".split()
    done = subprocess.run(
        [sys.executable, "-m", "mdas.cli", *words, str(report)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(report.read_text())["rows"]
    assert [(row["size"], row["count"], row["wrong"]) for row in rows] == [(4, 2, 0), (512, 256, 0), (65536, 32768, 0)]
    assert all(row["busbw"] == row["algbw"] > 0 and row["cpu_s_per_gb"] > 0 for row in rows)  # n = 2: factor 1
    assert len(done.stdout.splitlines()) == 6


def test_allreduce_under_load_over_threads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    words = "bench allreduce --transport loopback --world 3 -e 64K --under-load --seconds 0.2 --json".split()
    assert main([*words, str(report)]) == 0
    result = json.loads(report.read_text())
    assert result["ranks"] == 3
    assert result["wrong"] == 0
    assert result["bulk_busbw"] > 0
    assert 0 < result["loaded_us"]["median"] <= result["loaded_us"]["p99"] <= result["loaded_us"]["max"]
    assert "beside bulk" in capsys.readouterr().out


def test_overlap_over_threads(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = (
        "bench overlap --transport loopback --mb 0.25 --layers 2 -n 3 -w 2 --predict none blend sketch --json".split()
    )
    assert main([*words, str(report)]) == 0
    rows = json.loads(report.read_text())["rows"]
    assert [row["what"] for row in rows] == ["allreduce", "sync", "delayed, none", "delayed, blend", "delayed, sketch"]
    assert all(row["overall_ms"] > row["exposed_ms"] >= 0 for row in rows)


def test_senseless_options_are_refused() -> None:
    assert main(["bench", "allreduce", "-b", "8", "-e", "4"]) == 2
    assert main(["bench", "allreduce", "--world", "0", "--transport", "loopback"]) == 2
    assert main(["bench", "overlap", "--mb", "0"]) == 2


def test_a_report_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "missing" / "report.json"
    assert main(["bench", "allreduce", "--transport", "loopback", "--json", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"--json {path}: No such file" in printed.err


# `measure` of this module, as a benchmark whose rank 1 breaks.
def measure(engine: _core.Engine, options: argparse.Namespace) -> None:
    if engine.rank == 1:
        sys.exit(7)
    engine.barrier(0).wait(60)


def test_a_failing_rank_fails_the_benchmark_and_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name not in clean_environment()]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    options = argparse.Namespace(world=2, transport="tcp", json=None)
    start = time.monotonic()
    assert local.run(__name__, options) != 0
    assert time.monotonic() - start < 60
