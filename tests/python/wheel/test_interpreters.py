"""The release wheel, one for all of CPython from 3.11 on, in fresh environments without torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import mdas
from processes import clean_environment, run

ROOT = Path(__file__).resolve().parents[3]
MAY_BUILD = pytest.mark.timeout(900)  # with the wheel's build, which `make test` has done before
OWN_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"

ALLREDUCE = """
import importlib.util, json, sys
import numpy as np
import mdas

mdas.init(timeout=60)
total = mdas.allreduce(np.arange(5, dtype=np.float32) * (mdas.rank() + 1))
print(json.dumps({
    "python": "%d.%d" % sys.version_info[:2],
    "file": mdas.__file__,
    "torch": importlib.util.find_spec("torch") is not None,
    "total": total.tolist(),
}))
"""


def call(command: Sequence[str | Path], timeout: float, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs it without the repository on the import path."""
    environment = clean_environment() | variables
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )


def sources() -> Iterator[Path]:
    """What the wheel is made of, as the Makefile says."""
    yield from (ROOT / name for name in ("Cargo.toml", "Cargo.lock", "pyproject.toml", "README.md"))
    for folder in (ROOT / "rust", ROOT / "python"):
        yield from (path for path in folder.rglob("*") if path.suffix in {".rs", ".toml", ".py", ".pyi"})


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The one that `make` has built; built here if it is missing or older than the sources."""
    built = list((ROOT / "dist").glob("mdas-*.whl"))
    if not built or built[0].stat().st_mtime < max(path.stat().st_mtime for path in sources()):
        done = call(
            [ROOT / "scripts" / "setup", "build-wheel"], timeout=840, VENV=str(Path(sys.executable).parent.parent)
        )
        assert done.returncode == 0, done.stderr
        built = list((ROOT / "dist").glob("mdas-*.whl"))
    (one,) = built
    return one


def interpreter(version: str) -> str:
    """A CPython of this version, or a skip that says why there is none."""
    if version == OWN_VERSION:
        return sys.executable
    on_path = shutil.which(f"python{version}")
    # pyenv's shims on PATH refuse what is installed but not chosen, so look at its versions themselves, too.
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = [on_path] if on_path else []
    candidates += map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}")))
    for candidate in candidates:
        if subprocess.run([candidate, "-c", ""], capture_output=True, timeout=30, check=False).returncode == 0:
            return candidate
    pytest.skip(f"no python{version} on PATH" + (f" that runs: {candidates[0]} does not" if candidates else ""))


@pytest.fixture(params=["3.11", "3.12", "3.13"])
def environment(request: pytest.FixtureRequest, wheel: Path, tmp_path: Path) -> Path:
    """A fresh virtual environment with the wheel and numpy, and nothing else."""
    python = interpreter(request.param)
    made = call([python, "-m", "venv", "--without-pip", tmp_path / "venv"], timeout=60)
    assert made.returncode == 0, made.stderr
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", tmp_path / "venv", "install"]
    pip.append("--no-compile")  # most of an installation's time
    lock = ROOT / "requirements-dev.lock"
    numpy = call([*pip, "--only-binary=:all:", "--retries=1", "--constraint", lock, "numpy"], timeout=150)
    if numpy.returncode != 0:
        pytest.skip(f"numpy cannot be fetched for CPython {request.param}: {numpy.stderr.strip().splitlines()[-1]}")
    installed = call([*pip, "--no-index", wheel], timeout=60)
    assert installed.returncode == 0, installed.stderr
    return tmp_path / "venv"


@MAY_BUILD
def test_one_wheel_serves_all_versions(wheel: Path) -> None:
    assert wheel.name.startswith(f"mdas-{mdas.__version__}-cp311-abi3-manylinux_2_28_")


@MAY_BUILD
def test_ranks_reduce_numpy_arrays_without_torch(environment: Path, request: pytest.FixtureRequest) -> None:
    python = environment / "bin" / "python"
    # -I: neither PYTHONPATH nor this directory, so that it is the wheel that is imported.
    for result in run(2, [str(python), "-I", "-c", ALLREDUCE], timeout=90):
        told = json.loads(result.stdout)
        assert told["total"] == [0.0, 3.0, 6.0, 9.0, 12.0]
        assert not told["torch"]
        assert Path(told["file"]).is_relative_to(environment)
        assert told["python"] == request.node.callspec.params["environment"]
    doctor = call([environment / "bin" / "mdas", "doctor", "--json"], timeout=60)
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    found = {finding["name"]: finding["value"] for finding in json.loads(doctor.stdout)["findings"]}
    assert (found["mdas"], found["torch"], found["found"]) == (mdas.__version__, "not installed", "single")
