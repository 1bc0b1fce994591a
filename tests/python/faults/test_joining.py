"""Joining: strangers at the door, wrong settings, missing ranks, launchers."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

import mdas
import processes
from mdas import rendezvous
from processes import Ranks


def lifecycle() -> list[str]:
    told = []
    for call in (mdas.rank, mdas.barrier, lambda: mdas.new_group([0])):
        with pytest.raises(mdas.NotInitializedError, match=r"call mdas.init\(\) first"):
            call()
    mdas.shutdown()  # harmless
    for _ in range(3):
        mdas.init(timeout=30)
        with pytest.raises(mdas.Error, match="already"):
            mdas.init()
        old = mdas.new_group([0, 1])
        told.append(str(mdas.allreduce(np.ones(2)).tolist()))
        mdas.shutdown()
        mdas.shutdown()
    mdas.init(timeout=30)
    with pytest.raises(ValueError, match=r"before mdas.shutdown\(\)"):
        mdas.barrier(group=old)
    told.append(f"{mdas.rank()} of {mdas.size()}, {mdas.local_rank()} of {mdas.local_size()} on {mdas.node()}")
    return told


def test_init_and_shutdown_may_alternate() -> None:
    for result in processes.run(2, lifecycle):
        assert result.value == ["[2.0, 2.0]"] * 3 + [f"{result.rank} of 2, {result.rank} of 2 on 0"]


def test_places_are_counted_where_the_launcher_does_not_tell() -> None:
    for result in processes.run(2, lifecycle, env={"LOCAL_RANK": "", "LOCAL_WORLD_SIZE": ""}):
        assert result.value[-1] == f"{result.rank} of 2, {result.rank} of 2 on 0"


def places() -> list[int]:
    mdas.init(timeout=30)
    return [mdas.rank(), mdas.local_rank(), mdas.node(), *mdas.allgather(np.array([mdas.node()])).ravel().tolist()]


def test_a_local_rank_of_0_everywhere_does_not_make_several_nodes() -> None:
    # As where every process sees one device only.
    for result in processes.run(3, places, env={"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}):
        assert result.value == [result.rank, 0, 0, 0, 0, 0]


def beside_torch() -> list[float]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    mdas.init(timeout=60)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    mdas.allreduce(tensor)
    mdas.shutdown()
    dist.destroy_process_group()
    return tensor.tolist()


def test_torchs_process_groups_in_the_same_processes() -> None:
    for result in processes.run(2, beside_torch, env={"MDAS_MASTER_PORT": str(processes.free_port())}, timeout=120):
        assert result.value == [4.0, 4.0]


GARBAGE = {
    "random bytes": bytes(range(256)) * 8,
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a length of 2^63": struct.pack("<Q", 2**63) * 20,
    "our magic, then a length of 2^63": b"mdasjoin" + struct.pack("<I", 1) + struct.pack("<Q", 2**63) * 20,
    "nothing": b"",
}


def patient() -> list[float]:
    mdas.init(timeout=40)
    return mdas.allreduce(np.ones(2)).tolist()


def knock(port: int) -> None:
    """Sends all kinds of garbage to a port; some connections stay open."""
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, f"nobody listens on port {port}"
            time.sleep(0.02)
    for garbage in GARBAGE.values():
        with socket.create_connection(("127.0.0.1", port), 5) as stranger:
            stranger.sendall(garbage)


def test_garbage_on_any_port_is_logged_and_the_job_goes_on() -> None:
    ports = processes.free_port()
    late = {"MDAS_SECRET": "s", "MDAS_PORT_RANGE": f"{ports}-{ports}"}
    # Rank 1 comes only after rank 0 has been bothered, at its meeting point and at the port of its mesh.
    with Ranks(1, patient, env={**late, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}) as first:
        knock(first.port)
        knock(ports)
        with socket.create_connection(("127.0.0.1", first.port), 5), socket.create_connection(("127.0.0.1", ports), 5):
            place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MDAS_SECRET": "s"}
            with Ranks(1, patient, env={**place, "MASTER_PORT": str(first.port)}) as second:
                (two,) = second.wait(40)
                (one,) = first.wait(40)
    assert (one.value, two.value) == ([2.0, 2.0], [2.0, 2.0])
    assert one.stderr.count("closed a connection from 127.0.0.1") >= 2 * (len(GARBAGE) - 1), one.stderr
    assert "GET / HT" in one.stderr


def joining(timeout: float) -> str:
    started = time.monotonic()
    try:
        mdas.init(timeout=timeout)
        mdas.barrier()
    except mdas.Error as error:
        return f"{type(error).__name__} after {time.monotonic() - started:.0f} s: {error}"
    return "joined"


def test_a_wrong_secret_is_refused_and_said_so() -> None:
    with Ranks(2, joining, 6.0, rank_env=lambda rank: {"MDAS_SECRET": "right" if rank == 0 else "wrong"}) as ranks:
        right, wrong = ranks.wait(40)
    assert wrong.value.startswith("ConfigurationError"), wrong
    assert "MDAS_SECRET" in wrong.value
    assert "right" not in wrong.value + wrong.stderr
    assert right.value.startswith(("ConfigurationError", "CollectiveTimeoutError")), right
    assert "rank 1" in right.value
    assert "secret" in right.stderr


@pytest.mark.parametrize("with_secret", [0, 1])
def test_a_secret_on_some_ranks_only_is_suspected(with_secret: int) -> None:
    own = {with_secret: {"MDAS_SECRET": "s"}}
    with Ranks(2, joining, 6.0, rank_env=lambda rank: own.get(rank, {})) as ranks:
        zero, one = ranks.wait(40)
    assert one.value.startswith("CollectiveTimeoutError"), one
    assert "is MDAS_SECRET set on all ranks" in one.value
    assert "is MDAS_SECRET set on all ranks" in zero.stderr
    assert "MDAS_SECRET" in zero.value


def impatient(timeouts: list[float]) -> str:
    return joining(timeouts[int(os.environ["RANK"])])


def test_a_rank_that_leaves_while_others_are_waited_for_is_named_to_all() -> None:
    # Rank 3 does not come, and rank 1 waits for it less long than the others.
    world = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    with Ranks(3, impatient, [60.0, 10.0, 60.0], env=world) as ranks:
        for result in ranks.wait(40, ranks=[0, 2]):
            assert result.value.startswith("PeerLostError"), result
            assert "rank 1" in result.value
            assert "hung up" in result.value


def test_a_missing_rank_is_named() -> None:
    with Ranks(2, joining, 3.0, env={"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}) as ranks:
        for result in ranks.wait(30):
            assert "ranks 2, 3 of 4" in result.value, result


def test_a_missing_rank_0_is_named() -> None:
    with Ranks(
        1, joining, 2.0, env={"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ) as ranks:
        (result,) = ranks.wait(30)
    assert "rank 0" in result.value
    assert f"127.0.0.1:{ranks.port}" in result.value


@pytest.mark.parametrize(
    ("variable", "values"), [("MDAS_SMALL_BYTES", ("1000", "2000")), ("MDAS_ALGORITHM", ("ring", "tree"))]
)
def test_settings_that_differ_are_named_on_all_ranks(variable: str, values: tuple[str, str]) -> None:
    with Ranks(3, joining, 20.0, rank_env=lambda rank: {variable: values[rank == 1]}) as ranks:
        for result in ranks.wait(30):
            assert result.value.startswith("ConfigurationError"), result
            assert f"{variable.removeprefix('MDAS_').lower()} differs between ranks" in result.value
            assert "on ranks 0, 2" in result.value
            assert "on ranks 1" in result.value
            assert all(value in result.value for value in values)


def other_version() -> str:
    if os.environ["RANK"] == "1":
        mdas._core.__version__ = "0.0.9"
    return joining(20.0)


def test_versions_that_differ_are_named_on_all_ranks() -> None:
    with Ranks(2, other_version) as ranks:
        for result in ranks.wait(30):
            assert (
                f"version of mdas differs between ranks: '{mdas.__version__}' on ranks 0; '0.0.9' on ranks 1"
                in result.value
            )


def test_one_rank_twice_is_refused() -> None:
    world = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    with Ranks(1, joining, 4.0, env=world) as zero:
        meeting = {"MASTER_PORT": str(zero.port), "RANK": "1", "LOCAL_RANK": "1"}
        with Ranks(2, joining, 4.0, env=world | meeting) as twins:
            (first,) = zero.wait(30)
            values = [result.value for result in twins.wait(30)]
    assert "rank 2 of 3" in first.value
    assert any("rank 1 has joined already" in value for value in values), values


def test_a_taken_port_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        env = {"MASTER_PORT": str(taken.getsockname()[1]), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        with Ranks(1, joining, 5.0, env=env) as ranks:
            (result,) = ranks.wait(30)
    assert "MASTER_PORT" in result.value
    assert "in use" in result.value


TORCHRUN = """
    import os, sys, mdas
    mdas.init(timeout=60)
    import torch
    t = torch.full((3,), float(mdas.rank()))
    mdas.allreduce(t)
    line = (mdas.rank(), mdas.size(), mdas.local_rank(), mdas.local_size(), t.tolist())
    os.write(1, (" ".join(map(str, line)) + "\\n").encode())  # one write: whole lines, also unbuffered
    mdas.shutdown()
    mdas.init()
    mdas.barrier()
"""


def test_torchrun_meets_through_its_agents_store(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(TORCHRUN))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*torchrun, "--master-port", str(processes.free_port()), str(script)]
    done = subprocess.run(
        command, env=processes.clean_environment(), capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line]
    assert sorted(lines) == ["0 2 0 2 [1.0, 1.0, 1.0]", "1 2 1 2 [1.0, 1.0, 1.0]"]


LAUNCHED = """
    import os, sys, time, mdas
    mdas.init(timeout=60)
    mdas.barrier()
    os.write(1, f"{mdas.rank()} {sys.argv[1:]}\\n".encode())  # one write: whole lines, also unbuffered
    if sys.argv[1] == "fail" and mdas.rank() == 1:
        sys.exit(3)
    if sys.argv[1] == "fail":
        time.sleep(60)
"""


def launch(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(LAUNCHED))
    command = [sys.executable, "-m", "mdas.launch", "-n", "3", str(script), *arguments]
    environment = processes.clean_environment() | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_local_launcher_runs_a_script_with_its_arguments(tmp_path: Path) -> None:
    done = launch(tmp_path, "well", "--n", "2")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} ['well', '--n', '2']" for rank in range(3)]


def test_the_local_launcher_within_other_launchers(tmp_path: Path) -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "outer", "TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "0", "WORLD_SIZE": "9"}
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "9"}
    mpirun = {"PMI_RANK": "1", "PMI_SIZE": "9", "PMIX_RANK": "3"}
    done = launch(tmp_path, "well", **torchrun, **step, **mpirun)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} ['well']" for rank in range(3)]


def test_the_local_launcher_ends_everybody_when_one_fails(tmp_path: Path) -> None:
    started = time.monotonic()
    done = launch(tmp_path, "fail")
    assert done.returncode == 3
    assert "rank 1 ended with exit status 3" in done.stderr
    assert time.monotonic() - started < 45


def dies_while_joining() -> str:
    if os.environ["RANK"] == "1":
        rendezvous.check_agreement = lambda cards: os._exit(0)  # after the meeting
    try:
        mdas.init(timeout=120)
    except mdas.PeerLostError as error:
        return str(error)
    return "joined"


def test_a_rank_that_dies_between_meeting_and_connecting_is_named_at_once() -> None:
    with Ranks(3, dies_while_joining) as ranks:
        first, dead, last = ranks.wait(60)
    assert dead.value is None
    assert "init: lost rank" in first.value and "init: lost rank" in last.value
    assert "lost rank 1: connection refused at" in first.value + last.value
