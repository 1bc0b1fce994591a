"""The scripts of docs/migrating.md: what the plus lines make of them runs, on two processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from mdtext import ROOT, Block, blocks

from processes import clean_environment

BLOCKS = blocks((ROOT / "docs" / "migrating.md").read_text())
DIFFERENCES = [block for block in BLOCKS if block.language == "diff"]


def side(block: Block, sign: str) -> str:
    """The script before ("-") or after ("+") the change."""
    return "\n".join(line[1:] for line in block.text.splitlines() if line[:1] in (" ", sign)) + "\n"


def launch(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "train.py"
    path.write_text(script)
    command = [sys.executable, "-m", "mdas.launch", "-n", "2", str(path)]
    return subprocess.run(
        command, cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=150, check=False
    )


def test_there_is_one_for_each() -> None:
    came_from = [re.findall(r"^-(?:import|from) ([\w.]+)", block.text, re.MULTILINE)[0] for block in DIFFERENCES]
    assert came_from == ["torch.distributed", "horovod.torch", "deepspeed"]


@pytest.mark.parametrize("block", DIFFERENCES, ids=lambda block: f"line {block.line}")
def test_the_new_script_runs(block: Block, tmp_path: Path) -> None:
    done = launch(side(block, "+"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "WARN" not in done.stderr


def test_the_hook_for_ddp_runs(tmp_path: Path) -> None:
    (block,) = [block for block in BLOCKS if block.language == "python"]
    done = launch(block.text, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "WARN" not in done.stderr


def test_the_old_script_runs_where_it_can(tmp_path: Path) -> None:
    done = launch(side(DIFFERENCES[0], "-"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model.pt").exists()


def test_every_line_is_old_new_or_both() -> None:
    for block in DIFFERENCES:
        assert all(line[:1] in ("+", "-", " ") for line in block.text.splitlines()), block
        for sign in "+-":
            compile(side(block, sign), f"line {block.line}, {sign}", "exec")
