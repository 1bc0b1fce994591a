"""What mdas reads of a device equals what pyverbs, which is not ours, reads of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LAB = ROOT / "tests" / "rdma" / "lab"
PYVERBS = Path("/usr/lib/python3/dist-packages")
"""Where Debian's python3-pyverbs is. Only its own folder is made importable."""
EXTENSION = PYVERBS / "pyverbs" / f"device{sysconfig.get_config_var('EXT_SUFFIX')}"

pytestmark = [
    pytest.mark.skipif(not EXTENSION.exists(), reason="no pyverbs for this Python (Debian: python3-pyverbs)"),
    pytest.mark.skipif(shutil.which("qemu-system-x86_64") is None, reason="no qemu for a virtual machine with RDMA"),
    pytest.mark.timeout(400),
]


def test_every_value_equals_that_of_pyverbs() -> None:
    script = Path(__file__).with_name("compare_values.py")
    command = [sys.executable, str(script), str(PYVERBS)]
    place = f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [str(LAB), "--memory", "2G", "--limit", "300", "--", "env", place, *command],
        capture_output=True,
        text=True,
        timeout=360,  # past the laboratory's own limit
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads(done.stdout)
    assert values["mdas"] == values["pyverbs"]
    (device,) = values["mdas"]
    (port,) = device["ports"]
    assert (device["name"], port["state"], port["link layer"], port["mtu"]) == ("rxe0", "active", "Ethernet", 4096)
    assert [kind for _, _, kind, _ in port["gids"]] == ["RoCE v2", "RoCE v2"]
    assert "::ffff:192.0.2.1" in [address for _, address, _, _ in port["gids"]]
