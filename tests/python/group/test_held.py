"""What is left of a job while somebody still holds its handles."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mdas
import processes
from mdas.errors import ClosedError


def descriptors() -> list[str]:
    """What this process has open."""
    links = []
    for number in sorted(os.listdir("/proc/self/fd")):
        path = Path("/proc/self/fd", number)
        if path.is_symlink():  # not the one of the list itself
            links.append(os.readlink(path).split(":")[0])
    return links


def holds_handles() -> dict[str, Any]:
    """Runs on each rank."""
    kept: list[Any] = []
    left = []
    for _ in range(3):
        mdas.init(timeout=60)
        group = mdas.new_group([0, 1])
        work = mdas.allreduce(np.ones(100_000), group=group, async_op=True)
        work.wait()
        kept += [group, work, mdas.session.current()]
        mdas.shutdown()
        left.append(descriptors())
    group, work, _ = kept[-3:]
    work.wait()
    with pytest.raises(ClosedError):
        group.engine.new_group([0])
    return {"left": left, "done": work.done(), "operations": group.engine.counters()["operations"]}


def test_no_socket_stays_open_for_those_who_hold_handles_of_a_job_that_is_over() -> None:
    for result in processes.run(2, holds_handles, timeout=120):
        first, *others = result.value["left"]
        assert others == [first, first]
        assert not {"socket", "anon_inode"} & set(first)
        assert result.value["done"]
        assert result.value["operations"] == 1
