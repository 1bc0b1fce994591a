"""torchrun on several nodes, and its restarts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import netns
import processes

ROOT = Path(__file__).resolve().parents[3]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

PLACES = """
import os
import mdas
mdas.init(timeout=60)
nodes = bytearray(mdas.size())
mdas.allgather(bytearray([mdas.node()]), out=nodes)
place = [mdas.session.current().job.launcher, mdas.rank(), mdas.size(), mdas.local_rank(), mdas.local_size()]
os.write(1, (" ".join(map(str, [*place, list(nodes)])) + "\\n").encode())
"""


@pytest.mark.timeout(150)
@pytest.mark.skipif(netns.unavailable() is not None, reason=f"no namespaces here: {netns.unavailable()}")
def test_two_nodes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PLACES)
    words = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=2", "--master-addr=10.77.0.1", "--master-port=29400"]
    with netns.Network(2, None) as network:
        # Every host's RANK becomes its torchrun's node rank.
        printed = network.run(["sh", "-c", f"exec {' '.join(words)} --node-rank=$RANK {script}"], timeout=120)
    for node in range(2):
        told = sorted(line for line in printed[node].splitlines() if line.startswith("torchrun "))
        assert told == [f"torchrun {2 * node + local} 4 {local} 2 [0, 0, 1, 1]" for local in range(2)], printed


@pytest.mark.timeout(270)
def test_a_restart_after_a_killed_worker_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    script = [str(ROOT / "examples" / "elastic.py"), "--steps=40"]
    undisturbed, _ = processes.run(2, [sys.executable, *script, f"--checkpoint={tmp_path / 'one'}"], timeout=90)
    words = ["--nproc-per-node=2", "--max-restarts=1", f"--master-port={processes.free_port()}"]
    restarted = subprocess.run(
        [*TORCHRUN, *words, *script, f"--checkpoint={tmp_path / 'two'}", "--fail-at=25"],
        env=processes.clean_environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert restarted.returncode == 0, restarted.stderr
    assert "exitcode: -9" in restarted.stderr
    # Nobody gets from step 25 to the next checkpoint without the one that was lost.
    assert restarted.stdout.splitlines() == ["going on from step 20", *undisturbed.stdout.splitlines()]
    assert undisturbed.stdout.startswith("40 steps, loss 0.")
