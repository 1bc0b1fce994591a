"""More ranks than this machine has processors."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import mdas
from processes import run

RANKS = 64


def busy() -> dict[str, Any]:
    """All collectives once, and every other rank's sum in a group of its own."""
    mdas.init(timeout=150)
    rank, size = mdas.rank(), mdas.size()
    large = mdas.allreduce(np.arange(100_000, dtype=np.float32) + rank)
    small = mdas.allreduce(np.array([rank], np.int64), "max")
    gathered = mdas.allgather(np.array([rank], np.int32))
    half = mdas.allreduce(np.array([rank], np.int64), group=mdas.new_group(list(range(rank % 2, size, 2))))
    mdas.barrier()
    return {
        "large": bool((large == size * np.arange(100_000, dtype=np.float32) + sum(range(size))).all()),
        "small": small.tolist(),
        "gathered": gathered.ravel().tolist(),
        "half": half.tolist(),
        "place": [mdas.local_rank(), mdas.local_size(), mdas.node()],
        "torch": "torch" in sys.modules,
    }


@pytest.mark.timeout(200)
def test_64_ranks_on_one_machine() -> None:
    for result in run(RANKS, busy, timeout=180):
        assert result.value == {
            "large": True,
            "small": [RANKS - 1],
            "gathered": list(range(RANKS)),
            "half": [sum(range(result.rank % 2, RANKS, 2))],
            "place": [result.rank, RANKS, 0],
            "torch": False,
        }
