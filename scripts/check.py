"""Runs the repository's checks one after the other, stops at the first that fails, prints what each took.

Usage: check.py [STAGE ...]    (default: all; an unknown name lists them)
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
PYTEST_REPORT = ROOT / "out" / "pytest.xml"

# Cheap ones first. `{py}` is the interpreter of the virtual environment that runs this script.
STAGES = {
    "rustfmt": "cargo fmt --all --check",
    "ruff": "{py} -m ruff check .",
    "ruff-format": "{py} -m ruff format --check .",
    "mypy": "{py} -m mypy",
    "stubtest": "{py} -m mypy.stubtest mdas._core",
    "deny": "cargo deny --log-level warn check licenses bans sources",
    "clippy": "cargo clippy --workspace --all-targets --locked -- -D warnings",
    "rustdoc": "cargo doc --workspace --no-deps --document-private-items --locked",
    "nextest": "cargo nextest run --workspace --locked --no-fail-fast",
    "pytest": "{py} -m pytest --junitxml={report}",
}


def run(command: str) -> int:
    """Exit status of `command`, with the virtual environment's programs first in PATH."""
    words = [word.format(py=sys.executable, report=PYTEST_REPORT) for word in shlex.split(command)]
    environment = os.environ | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYO3_PYTHON": sys.executable,
        "RUSTDOCFLAGS": "-D warnings",
    }
    return subprocess.run(words, cwd=ROOT, env=environment, check=False).returncode


def skips() -> Counter[str]:
    """Reasons for which pytest skipped tests, and how many tests each."""
    if not PYTEST_REPORT.exists():
        return Counter()
    return Counter(node.get("message", "") for node in ET.parse(PYTEST_REPORT).iter("skipped"))


def main(names: list[str]) -> int:
    """Exit status 1 if a stage failed, 2 if there is none of that name."""
    if unknown := [name for name in names if name not in STAGES]:
        print(f"no such stage: {', '.join(unknown)}; there are: {', '.join(STAGES)}", file=sys.stderr)
        return 2
    PYTEST_REPORT.unlink(missing_ok=True)
    PYTEST_REPORT.parent.mkdir(exist_ok=True)
    took: dict[str, float] = {}
    failed = None
    for name in names or STAGES:
        print(f"\n=== {name}: {STAGES[name]}", flush=True)
        start = time.monotonic()
        status = run(STAGES[name])
        took[name] = time.monotonic() - start
        if status != 0:
            failed = name
            break
    print()
    for name, seconds in took.items():
        print(f"{name:12} {seconds:6.1f} s  {'FAILED' if name == failed else 'ok'}")
    print(f"{'total':12} {sum(took.values()):6.1f} s")
    for reason, count in skips().items():
        print(f"skipped {count}: {reason}")
    if failed:
        print(f"stage {failed} failed; alone: make test ONLY={failed}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
