"""The README's code does what it says: every python and bash block is run.

`make` only says what it would do (`make -n`): its targets would run these very tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mdtext import ROOT, Block, blocks

from processes import clean_environment

RUNNERS = {
    "python": [sys.executable, "-c"],
    "bash": ["bash", "-euo", "pipefail", "-c"],
}
BLOCKS = [block for block in blocks((ROOT / "README.md").read_text()) if block.language in RUNNERS]


def test_the_two_commands_come_first() -> None:
    commands = [line for block in BLOCKS if block.language == "bash" for line in block.text.splitlines()]
    assert [line.split("#")[0].strip() for line in commands[:2]] == ["make demo", "make test"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line {block.line}, {block.language}")
def test_code_runs(block: Block) -> None:
    text = block.text
    if block.language == "bash":
        text = 'make() { command make -n "$@" >/dev/null; }\n' + text
    binaries = str(Path(sys.executable).parent)
    environment = clean_environment() | {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [*RUNNERS[block.language], text],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
