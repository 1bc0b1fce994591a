"""Rank 0 does something by itself, an evaluation say, for longer than the timeout."""

from __future__ import annotations

import time

import pytest

import mdas
import processes


def worker(patience: float | None) -> str:
    mdas.init(timeout=1.5, warn_after=1.0)
    mdas.barrier(timeout=30)
    if mdas.rank() == 0:
        time.sleep(4)
    try:
        mdas.barrier(timeout=patience)
    except (mdas.CollectiveTimeoutError, mdas.PeerLostError) as error:
        return type(error).__name__
    return f"{mdas.average(float(mdas.rank()))}"


@pytest.mark.timeout(60)
def test_a_barrier_of_its_own_timeout_allows_it() -> None:
    for result in processes.run(3, worker, 40.0, timeout=50):
        assert (result.returncode, result.value) == (0, "1.0"), result.stderr
        assert (result.rank == 0) != ("rank 0" in result.stderr), (
            "the others are warned of who is late, and rank 0 is not"
        )


@pytest.mark.timeout(60)
def test_without_it_the_others_time_out() -> None:
    results = processes.run(3, worker, None, timeout=50)
    assert "CollectiveTimeoutError" in [result.value for result in results[1:]]
