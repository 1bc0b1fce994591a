"""Launchers: from environment variables to a `Job`. A pure function, no I/O."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mdas.errors import ConfigurationError

_PORT_FROM, _PORT_COUNT = 15000, 15000
"""Ports derived from job ids: below Linux' ephemeral range (from 32768 on)."""

_SLURM_RESERVED_STEPS = 0xFFFFFFF0
"""Step ids from here on are SLURM's own (batch script, interactive shell, extern), not an `srun`."""


@dataclass(frozen=True)
class Job:
    """This process's place in a job, as its launcher describes it.

    `local_rank` and `local_size` are None where the launcher does not tell; `init` then counts
    the ranks on this host. `master_addr` and `master_port` are None only where nobody has to
    meet (`size` 1).
    """

    launcher: str
    """"torchrun", "env", "slurm", "openmpi", "mpich" or "single"."""
    why: str
    """The variables that told, for people."""
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    master_addr: str | None
    master_port: int | None
    uses_agent_store: bool
    """The launcher's agent owns `master_port`, and serves a torch `TCPStore` there."""
    job_id: str
    """Equal on all ranks of a job, different between jobs as far as the launcher allows."""


class _Variables:
    """Typed reading of the environment; an empty value counts as unset."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, *names: str) -> str | None:
        """The first of these that is set."""
        return next((value for name in names if (value := self._environ.get(name))), None)

    def number(self, *names: str) -> int | None:
        for name in names:
            if value := self._environ.get(name):
                if not re.fullmatch(r"\d{1,10}", value):
                    raise ConfigurationError(f"{name}={value!r} is not a non-negative integer")
                return int(value)
        return None

    def need(self, *names: str, because: str) -> int:
        value = self.number(*names)
        if value is None:
            missing = " or ".join(names)
            raise ConfigurationError(f"{because}, but {missing} is missing: set it, or use a launcher that does")
        return value


def detect(environ: Mapping[str, str]) -> Job:
    """Finds out who launched this process, and as which rank of how many.

    In order of precedence: torchrun and plain `env://`, SLURM step variables, Open MPI,
    MPICH and Intel MPI, a single process. An allocation without a step is a single process.
    A SLURM step that places us elsewhere than the MPI job inside it is that of `mpirun`'s
    daemons, so there the MPI's variables count. `MDAS_MASTER_ADDR`, `MDAS_MASTER_PORT` and
    `MDAS_JOB_ID` override what the launcher says.

    Raises:
        ConfigurationError: variables are missing, malformed or contradict each other; the
            message names them.
    """
    variables = _Variables(environ)
    job = _env(variables)
    if job is None:
        slurm, mpi = _slurm(variables), _openmpi(variables) or _mpich(variables)
        job = mpi if slurm is None or (mpi is not None and not _same_place(slurm, mpi)) else slurm
        world_size = variables.number("WORLD_SIZE")
        if job is None and world_size is not None and world_size > 1:
            variables.need("RANK", because=f"WORLD_SIZE is {world_size}")
        if job is not None and world_size is not None and world_size != job.size:
            raise ConfigurationError(
                f"WORLD_SIZE is {world_size}, but {job.why} say {job.size} processes: "
                "unset WORLD_SIZE, or set RANK, too"
            )
    if job is None:
        return Job("single", "no launcher's variables are set", 0, 1, 0, 1, None, None, False, "single")
    return _meeting_place(_checked(job), variables)


def _same_place(one: Job, other: Job) -> bool:
    """Do two launchers put this process at one place of one job, as far as both tell?"""
    places = ((one.rank, other.rank), (one.size, other.size), (one.local_size, other.local_size))
    return all(a == b for a, b in places if a is not None and b is not None)


def _env(variables: _Variables) -> Job | None:
    rank = variables.number("RANK")
    if rank is None:
        return None
    run_id = variables.text("TORCHELASTIC_RUN_ID")
    address = variables.text("MASTER_ADDR")
    port = variables.number("MASTER_PORT")
    restarts = variables.number("TORCHELASTIC_RESTART_COUNT") or 0
    return Job(
        launcher="env" if run_id is None else "torchrun",
        why="RANK and WORLD_SIZE" if run_id is None else "RANK, WORLD_SIZE and TORCHELASTIC_RUN_ID",
        rank=rank,
        size=variables.need("WORLD_SIZE", because=f"RANK is {rank}"),
        local_rank=variables.number("LOCAL_RANK"),
        local_size=variables.number("LOCAL_WORLD_SIZE"),
        master_addr=address,
        master_port=port,
        uses_agent_store=variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True",
        # Without the address: rank 0 may know itself by another name than the others do.
        job_id=f"env-{port}" if run_id is None else f"torchrun-{run_id}/{restarts}-{port}",
    )


def _slurm(variables: _Variables) -> Job | None:
    step = variables.number("SLURM_STEP_ID", "SLURM_STEPID")
    if step is None or step >= _SLURM_RESERVED_STEPS:
        return None
    because = f"SLURM_STEP_ID is {step}"
    nodes = variables.text("SLURM_STEP_NODELIST", "SLURM_NODELIST")
    tasks_per_node = variables.text("SLURM_STEP_TASKS_PER_NODE")
    node = variables.number("SLURM_NODEID")
    job_id = variables.number("SLURM_JOB_ID", "SLURM_JOBID")
    return Job(
        launcher="slurm",
        why="SLURM_STEP_ID, SLURM_PROCID and SLURM_STEP_NUM_TASKS",
        rank=variables.need("SLURM_PROCID", because=because),
        size=variables.need("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", because=because),
        local_rank=variables.number("SLURM_LOCALID"),
        local_size=None if tasks_per_node is None or node is None else _tasks_on(tasks_per_node, node),
        master_addr=None if nodes is None else first_host(nodes),
        master_port=None,
        uses_agent_store=False,
        job_id=f"slurm-{job_id}.{step}",
    )


def _openmpi(variables: _Variables) -> Job | None:
    rank = variables.number("OMPI_COMM_WORLD_RANK")
    if rank is None:
        return None
    return _mpi(
        variables,
        launcher="openmpi",
        rank=rank,
        names=("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        why="OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE",
        job_id=variables.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"),
    )


def _mpich(variables: _Variables) -> Job | None:
    rank = variables.number("PMI_RANK")
    if rank is None:
        return None
    return _mpi(
        variables,
        launcher="mpich",
        rank=rank,
        names=("PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        why="PMI_RANK and PMI_SIZE",
        job_id=variables.text("PMI_JOBID", "I_MPI_JOB_ID"),
    )


def _mpi(
    variables: _Variables, launcher: str, rank: int, names: tuple[str, str, str], why: str, job_id: str | None
) -> Job:
    size = variables.need(names[0], because=f"{why.split()[0]} is {rank}")
    local_size = variables.number(names[2])
    return Job(
        launcher=launcher,
        why=why,
        rank=rank,
        size=size,
        local_rank=variables.number(names[1]),
        local_size=local_size,
        # mpirun does not tell where rank 0 runs, except when it can only be here.
        master_addr="127.0.0.1" if local_size == size else None,
        master_port=None,
        uses_agent_store=False,
        job_id=launcher if job_id is None else f"{launcher}-{job_id}",
    )


def _checked(job: Job) -> Job:
    if job.size < 1:
        raise ConfigurationError(f"{job.why} say {job.size} processes, but a job has at least one")
    if job.rank >= job.size:
        raise ConfigurationError(f"{job.why} say rank {job.rank} of {job.size}, but ranks run from 0 to {job.size - 1}")
    if job.local_size is not None and not 1 <= job.local_size <= job.size:
        raise ConfigurationError(
            f"{job.launcher} says {job.local_size} processes on this host, but {job.size} in all (from {job.why})"
        )
    if job.local_rank is not None and job.local_rank >= (job.local_size or job.size):
        raise ConfigurationError(
            f"{job.launcher} says local rank {job.local_rank} of {job.local_size or job.size} processes on this host"
        )
    return job


def _meeting_place(job: Job, variables: _Variables) -> Job:
    own_address, own_port = variables.text("MDAS_MASTER_ADDR"), variables.number("MDAS_MASTER_PORT")
    job_id = variables.text("MDAS_JOB_ID") or job.job_id
    address = own_address or job.master_addr or variables.text("MASTER_ADDR")
    port = next((p for p in (own_port, job.master_port, variables.number("MASTER_PORT")) if p is not None), None)
    if port is None and job.launcher not in ("env", "torchrun"):
        port = derived_port(job_id)
    if job.size > 1:
        missing = [name for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if value is None]
        if missing:
            raise ConfigurationError(
                f"{job.why} say {job.size} processes, but {' and '.join(missing)} is missing: set it (or "
                f"{' and '.join('MDAS_' + name for name in missing)}) to a host and a free port of rank 0"
            )
    if port is not None and not 0 < port < 65536:
        raise ConfigurationError(f"port {port} (from MDAS_MASTER_PORT or MASTER_PORT) is not between 1 and 65535")
    return replace(
        job,
        master_addr=address,
        master_port=port,
        uses_agent_store=job.uses_agent_store and own_address is None and own_port is None,
        job_id=job_id,
    )


def derived_port(job_id: str) -> int:
    """A port that all ranks of a job derive from its id without talking to each other."""
    digest = hashlib.sha256(job_id.encode()).digest()
    return _PORT_FROM + int.from_bytes(digest[:4], "big") % _PORT_COUNT


def first_host(nodelist: str) -> str:
    """The first host of a SLURM node list: `n[01-03,7],m2` -> `n01`.

    Raises:
        ConfigurationError: the list is not well-formed.
    """
    # Up to the first comma that is not within brackets; then each bracket's first number.
    head = re.match(r"(?:[^\[\],]|\[[^\[\]]+\])+(?=,|$)", nodelist.strip())
    if head is None:
        raise ConfigurationError(f"cannot read the SLURM node list {nodelist!r}: expected something like n[01-03,7],m2")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", head[0])


def _tasks_on(tasks_per_node: str, node: int) -> int | None:
    """Tasks on the node-th node of e.g. `2(x3),1` (three nodes with two, one with one)."""
    first = 0
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigurationError(f"cannot read SLURM_STEP_TASKS_PER_NODE={tasks_per_node!r}: expected e.g. 2(x3),1")
        first += int(match[2] or 1)
        if node < first:
            return int(match[1])
    return None
