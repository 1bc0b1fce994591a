"""Ranks that die, stop, leave or disagree: every other rank is told, in time, who it was."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import numpy as np
import pytest

import mdas
import processes
from processes import Ranks


def endless(timeout: float, in_group: bool) -> dict[str, Any]:
    """Exchanges until somebody is lost; tells what was raised, and how long the last operation took."""
    mdas.init(timeout=timeout, warn_after=timeout / 4)
    group = mdas.new_group(list(range(mdas.size()))[::-1]) if in_group else None
    data = np.ones(300_000, np.float32)
    print("running", flush=True)
    before = time.monotonic()
    try:
        while True:
            mdas.allreduce(data, "max", group=group)
            before = time.monotonic()
    except mdas.Error as error:
        seconds = time.monotonic() - before
        again = ""
        try:
            mdas.allreduce(data, "max", group=group)
        except mdas.Error as second:
            again = type(second).__name__
        peer = getattr(error, "peer", None)
        return {"class": type(error).__name__, "peer": peer, "text": str(error), "seconds": seconds, "again": again}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("in_group", [False, True])
def test_a_killed_rank_is_named_everywhere(size: int, in_group: bool) -> None:
    with Ranks(size, endless, 60.0, in_group) as ranks:
        for rank in range(size):
            ranks.wait_for_output(rank, "running")
        ranks.signal(1, signal.SIGKILL)
        others = [rank for rank in range(size) if rank != 1]
        for result in ranks.wait(15, others):
            assert result.value is not None, ranks.report()
            assert (result.value["class"], result.value["peer"]) == ("PeerLostError", 1), result.value
            assert "lost rank 1" in result.value["text"]
            assert result.value["seconds"] < 5
            # The group stays broken, and says the same.
            assert result.value["again"] == "PeerLostError"


def test_a_stopped_rank_is_named_when_the_timeout_is_over() -> None:
    timeout = 3.0
    with Ranks(3, endless, timeout, False) as ranks:
        for rank in range(3):
            ranks.wait_for_output(rank, "running")
        ranks.signal(2, signal.SIGSTOP)
        for result in ranks.wait(20, [0, 1]):
            assert result.value is not None, ranks.report()
            assert (result.value["class"], result.value["peer"]) == ("PeerLostError", 2), result.value
            assert result.value["seconds"] < timeout + 1
            warning = next(line for line in result.stderr.splitlines() if " WARN " in line)
            assert "rank 2" in warning, result.stderr
            assert "allreduce" in warning


def late() -> dict[str, Any]:
    """Rank 1 lives, but does not come: it waits for something else."""
    mdas.init(timeout=60, warn_after=0.5)
    patient = mdas.new_group([0, 1, 2], timeout=2.0)
    mdas.barrier()
    if mdas.rank() == 1:
        time.sleep(5)
        return {}
    started = time.monotonic()
    try:
        mdas.barrier(group=patient, timeout=None if mdas.rank() == 0 else 3.0)
    except TimeoutError as error:
        return {"class": type(error).__name__, "text": str(error), "seconds": time.monotonic() - started}
    return {"class": "nothing was raised"}


def test_a_rank_that_lives_but_does_not_come_is_named() -> None:
    for result in processes.run(3, late):
        if result.rank != 1:
            assert result.value["class"] == "CollectiveTimeoutError"
            assert "rank 1" in result.value["text"]
            # The shortest deadline, of the group at rank 0, ends it everywhere; an operation's own goes before.
            assert 1.9 < result.value["seconds"] < 5
            assert any("rank 1" in line and "barrier" in line for line in result.stderr.splitlines()), result.stderr


def disagreeing(what: str) -> str:
    mdas.init(timeout=30)
    mdas.barrier()
    first = mdas.rank() == 0
    try:
        match what:
            case "operation":
                mdas.allreduce(np.ones(10, np.float32)) if first else mdas.broadcast(np.ones(10, np.float32))
            case "reduction":
                mdas.allreduce(np.ones(10, np.float32), "sum" if first else "max")
            case "type":
                mdas.allreduce(np.ones(10, np.float32 if first else np.float64))
            case "count":
                mdas.allreduce(np.ones(100_000 if first else 100_001, np.float32))
            case "tag":
                mdas.allreduce(np.ones(10, np.float32), tag=7 if first else 8)
            case "empty":
                mdas.allreduce(np.ones(1 if first else 0, np.float32))
    except mdas.MismatchError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("what", "one", "other"),
    [
        ("operation", "allreduce(sum, 10 x float32)", "broadcast(root 0, 10 x float32)"),
        ("reduction", "allreduce(sum, 10 x float32)", "allreduce(max, 10 x float32)"),
        ("type", "allreduce(sum, 10 x float32)", "allreduce(sum, 10 x float64)"),
        ("count", "allreduce(sum, 100000 x float32)", "allreduce(sum, 100001 x float32)"),
        ("tag", "tag 0x7", "tag 0x8"),
    ],
)
def test_ranks_that_disagree_both_raise_and_show_both_sides(what: str, one: str, other: str) -> None:
    for result in processes.run(2, disagreeing, what):
        assert one in result.value
        assert other in result.value


def leaving_early() -> float:
    mdas.init(timeout=30)
    pair = mdas.new_group([0, 1])
    data = np.full(100_000, 1.0 + mdas.rank(), np.float32)
    mdas.allreduce(data)
    if mdas.rank() == 2:
        return float(data[0])
    time.sleep(1.0)  # rank 2 is gone by now
    for _ in range(20):
        mdas.allreduce(data, "average", group=pair)
    mdas.barrier(group=pair)
    return float(data[0])


def test_a_rank_that_finishes_early_breaks_nobody() -> None:
    assert [result.value for result in processes.run(3, leaving_early)] == [6.0, 6.0, 6.0]


def last_message() -> list[float]:
    """Rank 0 leaves as soon as its own part is done; its last bytes still arrive."""
    mdas.init(timeout=30)
    data = np.full(5_000_000, float(mdas.rank() == 0), np.float32)
    work = mdas.broadcast(data, async_op=True)
    if mdas.rank() == 0:
        return []
    time.sleep(0.5)
    work.wait(30)
    return [float(data.min()), float(data.max())]


def test_what_was_sent_before_leaving_arrives() -> None:
    first, *others = processes.run(3, last_message)
    assert first.value == []
    assert [other.value for other in others] == [[1.0, 1.0]] * 2


def never_shut_down() -> None:
    mdas.init()
    mdas.barrier()


@pytest.mark.parametrize("size", [1, 3])
def test_a_script_that_never_calls_shutdown_ends_well_and_soon(size: int) -> None:
    started = time.monotonic()
    for result in processes.run(size, never_shut_down):
        assert result.stderr == ""
    assert time.monotonic() - started < 15


def leaving_with_work() -> list[float]:
    """Rank 0 is at its end, without a shutdown, 2 s before rank 1 comes to the last operation."""
    mdas.init(timeout=30)
    array = np.ones(3)
    if mdas.rank() == 0:
        mdas.allreduce(array, async_op=True)
        return []
    time.sleep(2)
    return mdas.allreduce(array).tolist()


def test_what_is_in_flight_at_the_end_of_a_script_is_waited_for() -> None:
    assert processes.run(2, leaving_with_work)[1].value == [2.0, 2.0, 2.0]


def failing() -> str:
    mdas.init(timeout=60)
    mdas.barrier()
    if mdas.rank() == 1:
        raise SystemExit("this rank has a bug")
    try:
        mdas.barrier()
    except mdas.PeerLostError as error:
        return f"{error.peer}: {error}"
    return "nothing was raised"


def test_a_rank_that_ends_with_an_error_is_named() -> None:
    with Ranks(2, failing) as ranks:
        survivor, culprit = ranks.wait(20)
        assert culprit.returncode == 1
        assert survivor.value.startswith("1: "), survivor


def interrupted() -> list[str]:
    """Rank 0 is interrupted while it waits, and later waits again for the same operation."""
    mdas.init(timeout=60)
    told = []
    if mdas.rank() == 1:
        while not os.path.exists(os.environ["GO"]):
            time.sleep(0.01)
        mdas.allreduce(np.ones(3))
        return []
    data = np.ones(3)
    work = mdas.allreduce(data, async_op=True)
    print("waiting", flush=True)
    try:
        work.wait()
    except KeyboardInterrupt:
        told.append("interrupted")
    told.append(f"done: {work.done()}")
    print("interrupted", flush=True)
    work.wait(30)
    told.append(f"result: {data.tolist()}")
    return told


def test_ctrl_c_ends_a_wait_and_the_operation_goes_on(tmp_path: Any) -> None:
    go = tmp_path / "go"
    with Ranks(2, interrupted, env={"GO": str(go)}) as ranks:
        ranks.wait_for_output(0, "waiting")
        time.sleep(0.3)
        sent = time.monotonic()
        ranks.signal(0, signal.SIGINT)
        ranks.wait_for_output(0, "interrupted", 3)
        assert time.monotonic() - sent < 3
        go.touch()
        assert ranks.wait(20)[0].value == ["interrupted", "done: False", "result: [2.0, 2.0, 2.0]"]


def blocked() -> None:
    mdas.init(timeout=60)
    if mdas.rank() == 1:
        time.sleep(60)
    print("waiting", flush=True)
    mdas.barrier()


def test_ctrl_c_ends_a_script_that_waits() -> None:
    with Ranks(2, blocked) as ranks:
        ranks.wait_for_output(0, "waiting")
        time.sleep(0.3)
        sent = time.monotonic()
        ranks.signal(0, signal.SIGINT)
        (result,) = ranks.wait(10, [0])
        assert result.returncode == -signal.SIGINT
        assert "KeyboardInterrupt" in result.stderr
        assert time.monotonic() - sent < 6


def alone() -> None:
    print("joining", flush=True)
    mdas.init(timeout=60)


def test_ctrl_c_ends_the_wait_for_others_to_join() -> None:
    with Ranks(1, alone, env={"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}) as ranks:
        ranks.wait_for_output(0, "joining")
        time.sleep(0.5)
        sent = time.monotonic()
        ranks.signal(0, signal.SIGINT)
        (result,) = ranks.wait(10)
        assert result.returncode == -signal.SIGINT
        assert "KeyboardInterrupt" in result.stderr
        assert time.monotonic() - sent < 3


def forking(child: str) -> list[Any]:
    """A forked child asks for something; the parent goes on."""
    mdas.init(timeout=30)
    work = mdas.barrier(async_op=True)
    work.wait(30)
    pid = os.fork()
    if pid == 0:
        try:
            match child:
                case "collective":
                    mdas.allreduce(np.ones(1))
                case "handle":
                    work.wait(5)
                case "init":
                    mdas.init()
        except mdas.ClosedError as error:
            print(error, flush=True)
        sys.exit(7)  # with all of Python's farewells
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    time.sleep(0.5)
    return [status, mdas.allreduce(np.ones(3)).tolist()]


@pytest.mark.parametrize("child", ["collective", "handle", "init"])
def test_a_forked_child_is_refused_and_its_parent_goes_on(child: str) -> None:
    for result in processes.run(2, forking, child):
        assert result.value == [7, [2.0, 2.0, 2.0]]
        assert "forked from" in result.stdout


def orphaning() -> str:
    """Rank 1 dies while a forked child of it, such as a data loader's worker, lives on."""
    mdas.init(timeout=60)
    mdas.barrier()
    if mdas.rank() == 1:
        if os.fork() == 0:
            time.sleep(60)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        mdas.barrier()
    except mdas.PeerLostError as error:
        assert time.monotonic() - started < 5
        return f"lost {error.peer}"
    return "nothing was raised"


def test_a_childs_copies_of_the_sockets_do_not_hide_a_death() -> None:
    with Ranks(2, orphaning) as ranks:
        (result,) = ranks.wait(20, [0])
        assert result.value == "lost 1", ranks.report()
