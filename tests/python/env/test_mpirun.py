"""Real MPI launchers, where there are any."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

import processes

SCRIPT = """
import mdas
mdas.init(timeout=60)
places = bytearray(3 * mdas.size())
mdas.allgather(bytearray([mdas.rank(), mdas.size(), mdas.local_rank()]), out=places)
if mdas.rank() == 0:
    print(mdas.session.current().job.launcher, list(places))
"""


@pytest.mark.parametrize(
    ("launcher", "command"),
    [
        ("openmpi", ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"]),
        ("mpich", ["mpirun.mpich"]),
    ],
)
def test_mpirun_on_this_host(launcher: str, command: list[str]) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(
        [*command, "-n", "3", sys.executable, "-c", SCRIPT],
        # Jobs of MPICH have no id: two on one host would meet at one port.
        env=processes.clean_environment() | {"MDAS_MASTER_PORT": str(processes.free_port())},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{launcher} [0, 3, 0, 1, 3, 1, 2, 3, 2]\n"
