"""Objects, metrics and flags, in processes of one world."""

from __future__ import annotations

import math

import pytest

import mdas
import processes


def raises(kind: type[Exception], words: str, call: object) -> None:
    """Calls; the error must be of the kind and hold the words."""
    assert callable(call)
    with pytest.raises(kind) as caught:
        call()
    assert words in str(caught.value)


def worker() -> str:
    mdas.init(timeout=20)
    rank = mdas.rank()

    sent = {"epoch": 3, "best": [0.5, None, True], "name": "ü", "nested": {"": -1e300}}
    assert mdas.broadcast_object(sent if rank == 1 else "ignored", 1) == sent
    assert mdas.broadcast_object([] if rank == 0 else None) == []
    assert math.isnan(mdas.broadcast_object(math.nan))
    for bad, words in [({"a": [1, (2,)]}, "the object['a'][1] is of type tuple"), ({1: 2}, "a key of the object is 1")]:
        raises(TypeError, words, lambda bad=bad: mdas.broadcast_object(bad if rank == 0 else None))

    assert mdas.average(rank) == (mdas.size() - 1) / 2
    assert mdas.average({"b": 1.0, "a": rank}) == {"a": (mdas.size() - 1) / 2, "b": 1.0}
    assert mdas.average({}) == {}
    raises(TypeError, "not a number", lambda: mdas.average({"a": "x"}))  # type: ignore[call-overload]

    assert mdas.any(rank == 1) and not mdas.any(False)
    part = mdas.new_group([0, 2])
    if rank != 1:
        assert mdas.average(float(rank), group=part) == 1.0
        assert mdas.broadcast_object(rank, 1, group=part) == 2
    try:
        mdas.barrier()  # a rank may still be in it when the others disagree: that breaks the whole group
        mdas.average({"loss" if rank else "los": 1.0})
    except mdas.MismatchError:
        return "mismatch"
    return "not noticed"


@pytest.mark.timeout(60)
def test_objects_metrics_and_flags() -> None:
    for result in processes.run(3, worker, timeout=40):
        assert (result.returncode, result.value) == (0, "mismatch"), result.stderr
