"""Launchers' variables -> Job. A table: no process is started."""

from __future__ import annotations

import re

import pytest

from mdas.env import Job, derived_port, detect, first_host
from mdas.errors import ConfigurationError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job7",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
ENV = {name: value for name, value in TORCHRUN.items() if not name.startswith("TORCHELASTIC")}
ALLOCATION = {"SLURM_JOB_ID": "42", "SLURM_NTASKS": "8", "SLURM_NODELIST": "n[01-04]", "SLURM_NNODES": "4"}
STEP = ALLOCATION | {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "n[02-03,07]",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-1@1",
}
OPENMPI_IN_STEP = OPENMPI | {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def place(job: Job) -> tuple[object, ...]:
    return (job.launcher, job.rank, job.size, job.local_rank, job.local_size, job.master_addr, job.master_port)


STEP_PORT = derived_port("slurm-42.0")
OPENMPI_PORT = derived_port("openmpi-prterun-host-1@1")
HYDRA_PORT = derived_port("mpich")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, ("single", 0, 1, 0, 1, None, None), id="nothing"),
        pytest.param(ALLOCATION, ("single", 0, 1, 0, 1, None, None), id="allocation without a step"),
        pytest.param(
            STEP | {"SLURM_STEP_ID": "4294967290"}, ("single", 0, 1, 0, 1, None, None), id="salloc's interactive step"
        ),
        pytest.param(STEP | {"SLURM_STEP_ID": "4294967291"}, ("single", 0, 1, 0, 1, None, None), id="batch script"),
        pytest.param(
            ALLOCATION | {"PMIX_RANK": "0", "SLURM_STEP_ID": "4294967290"},
            ("single", 0, 1, 0, 1, None, None),
            id="salloc's interactive step with PMIx",
        ),
        pytest.param({"WORLD_SIZE": "1"}, ("single", 0, 1, 0, 1, None, None), id="world size 1 alone"),
        pytest.param(TORCHRUN, ("torchrun", 5, 8, 1, 4, "n1", 29500), id="torchrun"),
        pytest.param(ENV, ("env", 5, 8, 1, 4, "n1", 29500), id="env://"),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "1"}, ("env", 0, 1, None, None, None, None), id="env:// of one needs no address"
        ),
        pytest.param(
            ENV | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": ""},
            ("env", 5, 8, 0, None, "n1", 29500),
            id="local rank 0 everywhere: init counts the ranks of a host",
        ),
        pytest.param(
            ALLOCATION | TORCHRUN, ("torchrun", 5, 8, 1, 4, "n1", 29500), id="torchrun in an allocation without a step"
        ),
        pytest.param(
            ALLOCATION | OPENMPI,
            ("openmpi", 2, 4, 2, 4, "127.0.0.1", OPENMPI_PORT),
            id="mpirun in an allocation without a step",
        ),
        pytest.param(
            ALLOCATION | {"MASTER_ADDR": "n1", "MASTER_PORT": "29500", "LOCAL_RANK": "0"},
            ("single", 0, 1, 0, 1, None, None),
            id="a meeting point, but no rank",
        ),
        pytest.param(
            STEP | ENV | {"SLURM_PROCID": "0"}, ("env", 5, 8, 1, 4, "n1", 29500), id="env:// in a step of another size"
        ),
        pytest.param(STEP, ("slurm", 3, 5, 1, 2, "n02", STEP_PORT), id="slurm step"),
        pytest.param(
            STEP | {"SLURM_NODEID": "2", "SLURM_PROCID": "4", "SLURM_LOCALID": "0"},
            ("slurm", 4, 5, 0, 1, "n02", STEP_PORT),
            id="slurm step, last node",
        ),
        pytest.param(
            STEP | {"MASTER_ADDR": "ib1", "MASTER_PORT": "7000", "WORLD_SIZE": "5"},
            ("slurm", 3, 5, 1, 2, "n02", 7000),
            id="slurm step with a batch script's variables for torch",
        ),
        pytest.param(
            STEP | {"MDAS_MASTER_ADDR": "ib1", "MDAS_MASTER_PORT": "7001"},
            ("slurm", 3, 5, 1, 2, "ib1", 7001),
            id="slurm step, overridden",
        ),
        pytest.param(OPENMPI, ("openmpi", 2, 4, 2, 4, "127.0.0.1", OPENMPI_PORT), id="Open MPI on one host"),
        pytest.param(
            OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "MDAS_MASTER_ADDR": "n1"},
            ("openmpi", 2, 4, 0, 2, "n1", OPENMPI_PORT),
            id="Open MPI on two hosts",
        ),
        pytest.param(HYDRA, ("mpich", 1, 2, 1, 2, "127.0.0.1", HYDRA_PORT), id="MPICH"),
        # Precedence.
        pytest.param(TORCHRUN | STEP | OPENMPI | HYDRA, ("torchrun", 5, 8, 1, 4, "n1", 29500), id="torchrun in a step"),
        pytest.param(
            STEP | OPENMPI_IN_STEP,
            ("slurm", 3, 5, 1, 2, "n02", STEP_PORT),
            id="slurm before Open MPI, where they agree",
        ),
        pytest.param(
            STEP | {"PMI_RANK": "3", "PMI_SIZE": "5"}, ("slurm", 3, 5, 1, 2, "n02", STEP_PORT), id="srun --mpi=pmi2"
        ),
        pytest.param(
            STEP | OPENMPI_IN_STEP | {"OMPI_COMM_WORLD_RANK": "2", "MDAS_MASTER_ADDR": "n1"},
            ("openmpi", 2, 5, 1, 2, "n1", OPENMPI_PORT),
            id="the step of mpirun's daemons, which has the same size and another rank",
        ),
        pytest.param(
            STEP | OPENMPI_IN_STEP | {"OMPI_COMM_WORLD_LOCAL_SIZE": "5"},
            ("openmpi", 3, 5, 1, 5, "127.0.0.1", OPENMPI_PORT),
            id="the step of mpirun's daemons, which runs fewer processes here",
        ),
        pytest.param(
            STEP | OPENMPI,
            ("openmpi", 2, 4, 2, 4, "127.0.0.1", OPENMPI_PORT),
            id="the step of mpirun's daemons, which has another size",
        ),
        pytest.param(
            OPENMPI | {"PMI_RANK": "2", "PMI_SIZE": "4"},
            ("openmpi", 2, 4, 2, 4, "127.0.0.1", OPENMPI_PORT),
            id="Open MPI before MPICH",
        ),
        pytest.param(
            STEP | OPENMPI | {"PMI_RANK": "3", "PMI_SIZE": "5"},
            ("openmpi", 2, 4, 2, 4, "127.0.0.1", OPENMPI_PORT),
            id="the step of mpirun's daemons, srun --mpi=pmi2",
        ),
        pytest.param(
            STEP | {"RANK": "3", "WORLD_SIZE": "5", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
            ("env", 3, 5, None, None, "n1", 29500),
            id="env:// from a step's own variables",
        ),
        pytest.param(MVAPICH, ("mvapich", 1, 2, 1, 2, "127.0.0.1", derived_port("mvapich")), id="MVAPICH"),
        pytest.param(
            {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "0", "PMI_LOCAL_SIZE": "1", "PALS_RANKID": "1"}
            | {"MASTER_ADDR": "n1"},
            ("mpich", 1, 2, 0, 1, "n1", HYDRA_PORT),
            id="Cray's PALS",
        ),
        pytest.param(ENV | {"TORCHELASTIC_RUN_ID": ""}, ("env", 5, 8, 1, 4, "n1", 29500), id="empty counts as unset"),
    ],
)
def test_who_launched_us(environ: dict[str, str], expected: tuple[object, ...]) -> None:
    assert place(detect(environ)) == expected


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({"RANK": "0"}, ["RANK is 0", "WORLD_SIZE is missing"]),
        ({"WORLD_SIZE": "4"}, ["WORLD_SIZE is 4", "RANK is missing"]),
        (ENV | {"MASTER_PORT": ""}, ["MASTER_PORT", "MDAS_MASTER_PORT"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["MASTER_ADDR and MASTER_PORT"]),
        (ENV | {"RANK": "8"}, ["RANK and WORLD_SIZE", "rank 8 of 8"]),
        (ENV | {"WORLD_SIZE": "0"}, ["0 processes"]),
        (ENV | {"RANK": "-1"}, ["RANK='-1'"]),
        (ENV | {"RANK": "two"}, ["RANK='two'"]),
        (ENV | {"LOCAL_RANK": "4"}, ["local rank 4 of 4"]),
        (ENV | {"LOCAL_WORLD_SIZE": "9"}, ["9 processes on this host", "8 in all"]),
        (ENV | {"MASTER_PORT": "70000"}, ["port 70000"]),
        (ENV | {"MDAS_MASTER_PORT": "0"}, ["port 0", "MDAS_MASTER_PORT"]),
        (STEP | {"SLURM_PROCID": ""}, ["SLURM_STEP_ID is 0", "SLURM_PROCID"]),
        (STEP | {"WORLD_SIZE": "9"}, ["WORLD_SIZE is 9", "SLURM_STEP_NUM_TASKS", "5 processes"]),
        (OPENMPI | {"WORLD_SIZE": "2"}, ["WORLD_SIZE is 2", "OMPI_COMM_WORLD_SIZE", "4 processes"]),
        (HYDRA | {"WORLD_SIZE": "3"}, ["WORLD_SIZE is 3", "PMI_SIZE", "2 processes"]),
        (HYDRA | {"MPI_LOCALNRANKS": "3"}, ["3 processes on this host", "2 in all", "PMI_SIZE"]),
        (ALLOCATION | {"WORLD_SIZE": "8"}, ["WORLD_SIZE is 8", "RANK is missing"]),
        (STEP | {"SLURM_PROCID": "5"}, ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "rank 5 of 5"]),
        (STEP | {"SLURM_LOCALID": "2"}, ["local rank 2 of 2"]),
        (STEP | {"SLURM_STEP_NODELIST": "n[01"}, ["'n[01'"]),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "many"}, ["SLURM_STEP_TASKS_PER_NODE='many'"]),
        (OPENMPI | {"OMPI_COMM_WORLD_SIZE": ""}, ["OMPI_COMM_WORLD_RANK is 2", "OMPI_COMM_WORLD_SIZE is missing"]),
        (OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, ["MASTER_ADDR", "MDAS_MASTER_ADDR"]),
        (
            STEP | {"RANK": "0", "WORLD_SIZE": "1"},
            ["RANK and WORLD_SIZE say rank 0 of 1", "SLURM_PROCID", "rank 3 of 5"],
        ),
        (OPENMPI | {"RANK": "0", "WORLD_SIZE": "1"}, ["rank 0 of 1", "OMPI_COMM_WORLD_RANK", "rank 2 of 4"]),
        (HYDRA | {"RANK": "0", "WORLD_SIZE": "2"}, ["rank 0 of 2", "PMI_RANK", "rank 1 of 2"]),
        (OPENMPI | HYDRA, ["OMPI_COMM_WORLD_RANK", "rank 2 of 4", "PMI_RANK", "rank 1 of 2"]),
        ({"PMIX_RANK": "3"}, ["PMIX_RANK is 3", "set RANK and WORLD_SIZE"]),
        ({"PALS_RANKID": "0"}, ["PALS_RANKID is 0", "set RANK and WORLD_SIZE"]),
        (HYDRA | {"PMI_SIZE": ""}, ["PMI_RANK is 1", "PMI_SIZE is missing"]),
    ],
)
def test_what_is_missing_or_contradicts_is_named(environ: dict[str, str], names: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        detect(environ)
    for name in names:
        assert name in str(caught.value)


def test_the_agents_store_is_used_unless_the_meeting_point_is_overridden() -> None:
    assert detect(TORCHRUN).uses_agent_store
    assert not detect(TORCHRUN | {"MDAS_MASTER_PORT": "7000"}).uses_agent_store
    assert not detect(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).uses_agent_store
    assert not detect(ENV).uses_agent_store


def test_jobs_and_restarts_have_different_ids() -> None:
    environments = [
        TORCHRUN,
        TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "3"},
        TORCHRUN | {"TORCHELASTIC_RUN_ID": "job8"},
        ENV,
        ENV | {"MASTER_PORT": "29501"},
        STEP,
        STEP | {"SLURM_STEP_ID": "1"},
        OPENMPI,
    ]
    assert len({detect(environ).job_id for environ in environments}) == len(environments)
    assert detect(TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}).job_id == detect(TORCHRUN).job_id
    assert detect(STEP | {"MDAS_JOB_ID": "mine"}).job_id == "mine"


def test_derived_ports_stay_out_of_the_ephemeral_range() -> None:
    ports = [derived_port(f"slurm-{job}.0") for job in range(1000)]
    assert all(15000 <= port < 30000 for port in ports)
    assert len(set(ports)) > 900


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("n01", "n01"),
        ("n01,n02", "n01"),
        ("n[01-03,7],m2", "n01"),
        ("n[7,01-03]", "n7"),
        ("rack[1-2]node[003-004]-ib,x", "rack1node003-ib"),
        ("gpu-a100-[0012]", "gpu-a100-0012"),
    ],
)
def test_first_host(nodelist: str, first: str) -> None:
    assert first_host(nodelist) == first


@pytest.mark.parametrize("nodelist", ["", "n[1-2", "n1-2]", "n[],m", "[", ",n1"])
def test_malformed_node_lists_are_refused(nodelist: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(repr(nodelist))):
        first_host(nodelist)
