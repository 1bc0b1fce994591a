"""Ranks as real processes on this host, with time limits, and killed whatever happens.

    results = run(2, worker, "float32", timeout=30)      # worker(rank-independent arguments)

`worker` is a module-level function of a test file; it runs in each process under a plain
`env://` environment, and what it returns (JSON) comes back in `Result.value`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import nursery

LAUNCHER_VARIABLES = ("MDAS_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_", "MPI_")
LAUNCHER_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}

IMPORTS_TORCH = re.compile(r"^\s*(import|from) torch\b", re.MULTILINE)
"""A worker whose file says so starts in a process that already has it."""


@dataclass(frozen=True)
class Result:
    """How one rank ended."""

    rank: int
    returncode: int
    value: Any
    """What the worker returned; None if it did not."""
    stdout: str
    stderr: str
    seconds: float
    """From the start of all ranks to the end of this one."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def clean_environment() -> dict[str, str]:
    """This process's environment without any launcher's variables, one thread per process."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_NAMES and not name.startswith(LAUNCHER_VARIABLES)
    }
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}


class Ranks:
    """Processes of one job. A context manager: on exit, whoever still lives is killed."""

    def __init__(
        self,
        size: int,
        worker: Callable[..., Any] | Sequence[str],
        *arguments: Any,
        env: Mapping[str, str] | None = None,
        rank_env: Callable[[int], Mapping[str, str]] = lambda rank: {},
    ) -> None:
        """Starts them.

        Args:
            size: number of ranks.
            worker: a module-level function of a file, or a command line.
            arguments: JSON-able arguments for the function.
            env: more variables for all ranks.
            rank_env: more variables for one rank.
        """
        self.port = free_port()
        self._stack = ExitStack()
        self._started = time.monotonic()
        self._ended: dict[int, float] = {}
        self._files = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="mdas-ranks-")))
        self.processes: list[subprocess.Popen[bytes] | nursery.Child] = []
        try:
            for rank in range(size):
                self.processes.append(self._spawn(rank, size, worker, arguments, {**(env or {}), **rank_env(rank)}))
        except BaseException:
            self.close()
            raise

    def _spawn(
        self,
        rank: int,
        size: int,
        worker: Callable[..., Any] | Sequence[str],
        arguments: Sequence[Any],
        env: Mapping[str, str],
    ) -> subprocess.Popen[bytes] | nursery.Child:
        if callable(worker):
            file = Path(worker.__code__.co_filename)
            work = [str(file), worker.__name__, json.dumps(arguments)]
            command = [sys.executable, __file__, *work]
        else:
            file = None
            command = [*worker, *(str(argument) for argument in arguments)]
        place = {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "MDAS_TEST_RESULT": str(self._files / f"{rank}.json"),
        }
        environment = {**clean_environment(), **place, **env}
        with open(self._files / f"{rank}.out", "wb") as out, open(self._files / f"{rank}.err", "wb") as err:
            if file is not None and IMPORTS_TORCH.search(file.read_text()):
                import nursery

                return nursery.of(rank).start(work, environment, out, err)
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                # A session of its own: a rank's children can be killed with it.
                start_new_session=True,
            )

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to one rank, if it still runs."""
        self.processes[rank].send_signal(number)

    def stdout(self, rank: int) -> str:
        """What a rank has printed so far."""
        return (self._files / f"{rank}.out").read_text(errors="replace")

    def stderr(self, rank: int) -> str:
        """What a rank has complained about so far."""
        return (self._files / f"{rank}.err").read_text(errors="replace")

    def wait_for_output(self, rank: int, text: str, timeout: float = 60) -> None:
        """Returns as soon as a rank has printed `text`; fails if it ends or the time is over before."""
        deadline = time.monotonic() + timeout
        while text not in self.stdout(rank):
            over = time.monotonic() > deadline
            if over or self.processes[rank].poll() is not None:
                reason = "in time" if over else "before it ended"
                raise AssertionError(f"rank {rank} did not print {text!r} {reason}\n{self.report()}")
            time.sleep(0.01)

    def wait(self, timeout: float = 60, ranks: Sequence[int] | None = None) -> list[Result]:
        """Waits until these ranks (default: all) have ended, at most `timeout` seconds.

        Raises:
            AssertionError: some did not end; with everybody's output.
        """
        waited_for = range(len(self.processes)) if ranks is None else ranks
        deadline = time.monotonic() + timeout
        while pending := [rank for rank in waited_for if rank not in self._ended]:
            for rank in pending:
                if self.processes[rank].poll() is not None:
                    self._ended[rank] = time.monotonic() - self._started
            if time.monotonic() > deadline and not all(rank in self._ended for rank in pending):
                raise AssertionError(f"ranks {pending} did not end within {timeout} s\n{self.report()}")
            time.sleep(0.01)
        return [self._result(rank) for rank in waited_for]

    def _result(self, rank: int) -> Result:
        file = self._files / f"{rank}.json"
        return Result(
            rank=rank,
            returncode=self.processes[rank].returncode,
            value=json.loads(file.read_text()) if file.exists() else None,
            stdout=self.stdout(rank),
            stderr=self.stderr(rank),
            seconds=self._ended[rank],
        )

    def report(self) -> str:
        """Everybody's status and the ends of their output, for failure messages."""
        return "\n".join(
            f"--- rank {rank}: exit status {process.poll()}\n{self.stdout(rank)[-2000:]}\n{self.stderr(rank)[-4000:]}"
            for rank, process in enumerate(self.processes)
        )

    def close(self) -> None:
        """Kills who is left, and the children of all."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def run(
    size: int,
    worker: Callable[..., Any] | Sequence[str],
    *arguments: Any,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    rank_env: Callable[[int], Mapping[str, str]] = lambda rank: {},
) -> list[Result]:
    """Runs `worker` on `size` ranks; all must end with status 0 within `timeout` seconds."""
    with Ranks(size, worker, *arguments, env=env, rank_env=rank_env) as ranks:
        results = ranks.wait(timeout)
        assert all(result.returncode == 0 for result in results), ranks.report()
        return results


def work(file: str, function: str, arguments: str) -> None:
    """Calls the worker, in its own process, and keeps what it returns."""
    sys.path[:0] = [str(Path(__file__).parent), str(Path(file).parent)]
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    value = getattr(module, function)(*json.loads(arguments))
    result = Path(os.environ["MDAS_TEST_RESULT"])
    partial = result.with_suffix(".partial")
    partial.write_text(json.dumps(value))
    partial.replace(result)


if __name__ == "__main__":
    work(*sys.argv[1:])
