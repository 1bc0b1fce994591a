"""Real SLURM, two nodes: srun, salloc, sbatch, and other launchers inside a step or an allocation."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from slurm_cluster import Cluster, ClusterError, unavailable

pytestmark = [
    pytest.mark.skipif(unavailable() is not None, reason=f"no SLURM here: {unavailable()}"),
    pytest.mark.timeout(200),
]

# One write per rank: whole lines, whoever prints meanwhile.
SCRIPT = """
import os, sys
import mdas
mdas.init(timeout=40)
total = bytearray(mdas.size())
mdas.allgather(bytearray([mdas.node()]), out=total)
job = mdas.session.current().job
line = [job.launcher, mdas.rank(), mdas.size(), mdas.local_rank(), mdas.local_size(), list(total)]
os.write(1, (" ".join(map(str, line)) + "\\n").encode())
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        try:
            started = stack.enter_context(Cluster(2, tmp_path_factory.mktemp("slurm")))
        except ClusterError as error:
            print(error)
            pytest.skip(f"SLURM does not start here: {str(error).splitlines()[0]}")
        yield started


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    """A command that joins and tells its place."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return [sys.executable, str(path)]


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.splitlines())


TWO_AND_ONE = ["slurm 0 3 0 2 [0, 0, 1]", "slurm 1 3 1 2 [0, 0, 1]", "slurm 2 3 0 1 [0, 0, 1]"]
"""Three tasks on two nodes."""


def test_srun_on_two_nodes(cluster: Cluster, script: list[str]) -> None:
    done = cluster.run(["srun", "--nodes=2", "--ntasks=3", *script], timeout=100)
    assert lines(done) == TWO_AND_ONE


def test_an_allocation_without_a_step_is_a_single_process(cluster: Cluster, script: list[str]) -> None:
    done = cluster.run(["salloc", "--nodes=2", "--ntasks=3", *script], timeout=100)
    assert lines(done) == ["single 0 1 0 1 [0]"]


def test_a_batch_script_is_a_single_process_and_its_steps_are_jobs(
    cluster: Cluster, script: list[str], tmp_path: Path
) -> None:
    batch, output = tmp_path / "batch.sh", tmp_path / "output"
    batch.write_text(f"#!/bin/sh\n{' '.join(script)}\nsrun {' '.join(script)}\n")
    done = cluster.run(["sbatch", "--wait", "-N2", "-n3", f"--output={output}", str(batch)], timeout=100)
    assert done.returncode == 0, done.stderr + output.read_text()
    assert sorted(output.read_text().splitlines()) == ["single 0 1 0 1 [0]", *TWO_AND_ONE]


def test_two_steps_of_one_job_do_not_meet(cluster: Cluster, script: list[str]) -> None:
    step = f"srun --exact -N2 -n2 {' '.join(script)}"
    done = cluster.run(
        ["salloc", "-N2", "-n4", "sh", "-c", f"{step} & {step}; status=$?; wait $! && exit $status"], timeout=100
    )
    assert lines(done) == sorted(2 * ["slurm 0 2 0 1 [0, 1]", "slurm 1 2 0 1 [0, 1]"])


def test_mpirun_in_an_allocation(cluster: Cluster, script: list[str]) -> None:
    if shutil.which("mpirun.openmpi") is None:
        pytest.skip("mpirun.openmpi is not installed")
    # mpirun starts a daemon per node as a step of two tasks, and both of its processes on the first node.
    mpirun = ["mpirun.openmpi", "--allow-run-as-root", "-n", "2", *script]
    done = cluster.run(["salloc", "-N2", "-n4", *mpirun], timeout=100)
    assert lines(done) == ["openmpi 0 2 0 2 [0, 0]", "openmpi 1 2 1 2 [0, 0]"]


@pytest.mark.parametrize(
    ("launcher", "mpirun"),
    [
        ("openmpi", ["mpirun.openmpi", "--allow-run-as-root", "-x", "MDAS_MASTER_ADDR", "-x", "MDAS_JOB_ID"]),
        ("mpich", ["mpirun.mpich"]),
    ],
)
def test_mpirun_on_two_nodes(cluster: Cluster, script: list[str], launcher: str, mpirun: list[str]) -> None:
    if shutil.which(mpirun[0]) is None:
        pytest.skip(f"{mpirun[0]} is not installed")
    meeting = {"MDAS_MASTER_ADDR": "n1", "MDAS_JOB_ID": "mpi"}
    done = cluster.run(["salloc", "-N2", "-n3", *mpirun, "-n", "3", *script], timeout=100, env=meeting)
    assert lines(done) == [line.replace("slurm", launcher) for line in TWO_AND_ONE]


@pytest.mark.timeout(240)
def test_torchrun_in_a_step(cluster: Cluster, script: list[str]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=n1:29400", "--rdzv-id=job"]
    done = cluster.run(["srun", "-N2", "-n2", "-c2", *torchrun, *meeting, *script[1:]], timeout=220)
    told = [line for line in lines(done) if line.startswith("torchrun")]
    assert [line.split()[1:5] for line in told] == [[str(r), "4", str(r % 2), "2"] for r in range(4)]
    assert all(line.endswith("[0, 0, 1, 1]") for line in told)
