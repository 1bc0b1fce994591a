"""A real SLURM cluster for the length of a `with` block: every node is a network namespace.

Munge, the controller and one slurmd per node run from a folder of their own, beside whatever SLURM this
machine has. Namespaces take their processes with them, so that nothing outlives the block.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import netns
import processes

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sbatch", "sinfo")
_START_SECONDS = 40.0

CONFIGURATION = """\
ClusterName=mdas
SlurmctldHost=login
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP
"""


def unavailable() -> str | None:
    """Why there can be no cluster here, or None."""
    if reason := netns.unavailable():
        return reason
    if missing := [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]:
        return f"{', '.join(missing)} not found: apt-get install slurmctld slurmd slurm-client munge"
    return None


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


class ClusterError(RuntimeError):
    """SLURM does not start on this machine. The first line says why, the logs follow."""


class Cluster:
    """Nodes n1, n2, ... with four (pretended) processors each, and a host for logging in that is no node.

    Args:
        nodes: how many.
        folder: an empty one for configuration, keys, state and logs.
    """

    def __init__(self, nodes: int, folder: Path) -> None:
        self._nodes = nodes
        self._names = [*(f"n{node + 1}" for node in range(nodes)), "login"]
        self._folder = folder
        self._stack = ExitStack()
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self._network = self._stack.enter_context(netns.Network(self._nodes + 1, None))
            self._configure()
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:  # what they have started ends with them, if they have the time
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._stack.close()

    def _configure(self) -> None:
        addresses = dict(zip(self._names, self._network.addresses, strict=True))
        lines = [f"NodeName={name} NodeAddr={addresses[name]} CPUs=4 State=UNKNOWN" for name in self._names[:-1]]
        (self._folder / "slurm.conf").write_text(CONFIGURATION.format(folder=self._folder, nodes="\n".join(lines)))
        for name in ("state", *(f"spool-{name}" for name in self._names[:-1])):
            (self._folder / name).mkdir()
        key = self._folder / "munge.key"
        key.touch(mode=0o400)
        key.write_bytes(os.urandom(64))
        hosts = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in addresses.items())
        (self._folder / "hosts").write_text(hosts)

    def _start(self) -> None:
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed", "log-file": "txt"}
        munge = [f"--{option}={self._folder}/munge.{ending}" for option, ending in files.items()]
        self._daemon("munged", ["munged", "--foreground", "--force", *munge])
        self._until("munge's socket", lambda: (self._folder / "munge.socket").exists())
        conf = str(self._folder / "slurm.conf")
        self._daemon("slurmctld", [*self._inside(-1), "slurmctld", "-D", "-f", conf])
        for node in range(self._nodes):
            self._daemon(f"slurmd-{node}", [*self._inside(node), "slurmd", "-D", "-f", conf, "-N", f"n{node + 1}"])
        self._until("idle nodes", self._idle)

    def _daemon(self, name: str, command: Sequence[str]) -> None:
        with open(self._folder / f"{name}.log", "wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    command, env=self._environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
                )
            )

    def _idle(self) -> bool:
        told = self.run(["sinfo", "--noheader", "--format=%D %T"], timeout=20)
        return told.stdout.strip() == f"{self._nodes} idle"

    def _until(self, what: str, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not there():
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in self._daemons):
                logs = [f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self._folder.glob("*.log"))]
                errors = [line for log in logs for line in log.splitlines() if "error: " in line]
                raise ClusterError("\n".join([f"no {what}: {(errors or ['(no error in its logs)'])[-1]}", *logs]))
            time.sleep(0.1)

    def _inside(self, node: int) -> list[str]:
        # Not `ip netns exec`: it hides /sys/fs/cgroup, without which slurmd does not start.
        enter = 'mount --bind "$1" /etc/hosts; hostname "$2"; net=$3; shift 3; exec nsenter --net="$net" "$@"'
        unshared = ["unshare", "--mount", "--uts", "--propagation", "private", "sh", "-ec", enter, "sh"]
        return [*unshared, str(self._folder / "hosts"), self._names[node], f"/run/netns/{self._network.names[node]}"]

    def _environment(self) -> dict[str, str]:
        variables = {"SLURM_CONF": str(self._folder / "slurm.conf"), "PATH": _path()}
        return processes.clean_environment() | variables

    def run(
        self, command: Sequence[str], *, timeout: float, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command where one logs in, and waits for it."""
        return subprocess.run(
            [*self._inside(-1), *command],
            env=self._environment() | dict(env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
