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
    """"torchrun", "env", "slurm", "openmpi", "mvapich", "mpich" or "single"."""
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

    In order of precedence: torchrun and plain `env://`, SLURM step variables, Open MPI, MVAPICH,
    MPICH and its kin, a single process. An allocation without a step is a single process.
    A SLURM step that places us elsewhere than the MPI job inside it is that of `mpirun`'s
    daemons, so there the MPI's variables count. Otherwise two launchers that place us differently are an
    error, except that torchrun counts always, and `env://` where it tells of more processes.
    `MDAS_MASTER_ADDR`, `MDAS_MASTER_PORT` and `MDAS_JOB_ID` override what the launcher says.

    Raises:
        ConfigurationError: variables are missing, malformed or contradict each other; the
            message names them.
    """
    variables = _Variables(environ)
    job = _env(variables)
    if job is None:
        job = _launched(variables)
        _check_leftovers(variables, job)
    elif job.launcher == "env":
        outer = _launched(variables)
        # A step of one process, or of fewer, may start a job of its own: one per node, for instance.
        if outer is not None and job.size <= outer.size > 1 and (job.rank, job.size) != (outer.rank, outer.size):
            raise _contradiction(job, outer)
    if job is None:
        return Job("single", "no launcher's variables are set", 0, 1, 0, 1, None, None, False, "single")
    return _meeting_place(_checked(job), variables)


def _launched(variables: _Variables) -> Job | None:
    """What SLURM and the MPIs say."""
    slurm = _slurm(variables)
    mpis = [job for mpi in _MPIS if (job := mpi.job(variables))]
    if slurm is not None:
        return next((mpi for mpi in mpis if not _same_place(slurm, mpi)), slurm)
    for other in mpis[1:]:
        if not _same_place(mpis[0], other):
            raise _contradiction(mpis[0], other)
    return mpis[0] if mpis else None


def _contradiction(one: Job, other: Job) -> ConfigurationError:
    return ConfigurationError(
        f"{one.why} say rank {one.rank} of {one.size}, but {other.why} say rank {other.rank} of {other.size}: unset "
        "those that are left over, or that tell of an outer job"
    )


def _check_leftovers(variables: _Variables, job: Job | None) -> None:
    """Variables that do not tell our place must not contradict it."""
    size = variables.number("WORLD_SIZE")
    if job is not None and size is not None and size != job.size:
        raise ConfigurationError(
            f"WORLD_SIZE is {size}, but {job.why} say {job.size} processes: unset WORLD_SIZE, or set RANK, too"
        )
    if job is None and size is not None and size > 1:
        variables.need("RANK", because=f"WORLD_SIZE is {size}")
    # Within an allocation they are those of the interactive step, where there is one.
    alone = job is None and variables.number("SLURM_JOB_ID", "SLURM_JOBID") is None
    for name in _RANK_ALONE if alone else ():
        rank = variables.number(name)
        if rank is not None:
            raise ConfigurationError(
                f"{name} is {rank}, but no variable tells how many processes there are: set RANK and WORLD_SIZE"
            )


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


@dataclass(frozen=True)
class _Mpi:
    """What an MPI's launcher calls things."""

    launcher: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    job_id: tuple[str, ...]

    def job(self, variables: _Variables) -> Job | None:
        rank = variables.number(self.rank)
        if rank is None:
            return None
        size = variables.need(self.size, because=f"{self.rank} is {rank}")
        local_size, job_id = variables.number(*self.local_size), variables.text(*self.job_id)
        return Job(
            launcher=self.launcher,
            why=f"{self.rank} and {self.size}",
            rank=rank,
            size=size,
            local_rank=variables.number(*self.local_rank),
            local_size=local_size,
            # mpirun does not tell where rank 0 runs, except when it can only be here.
            master_addr="127.0.0.1" if local_size == size else None,
            master_port=None,
            uses_agent_store=False,
            job_id=self.launcher if job_id is None else f"{self.launcher}-{job_id}",
        )


_MPIS = (
    _Mpi(
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"),
    ),
    _Mpi(
        "mvapich",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
        ("PMI_JOBID",),
    ),
    # MPICH and what descends from it: Intel MPI, Cray's.
    _Mpi(
        "mpich",
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        ("PMI_JOBID", "I_MPI_JOB_ID"),
    ),
)
_RANK_ALONE = ("PMIX_RANK", "PALS_RANKID")
"""Of launchers that tell by themselves who we are, but not how many there are."""

PLACES = ("SLURM_STEP_ID", "SLURM_STEPID", *(mpi.rank for mpi in _MPIS), *_RANK_ALONE)
"""Variables of a process that some launcher other than torchrun has started. A launcher within removes them."""


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
