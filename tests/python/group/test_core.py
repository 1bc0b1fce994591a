"""The bindings themselves: handles, memory, and addresses that cannot be right."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from mdas import _core
from mdas.errors import ClosedError, CollectiveTimeoutError, Error, InvalidArgumentError, PeerLostError


def test_every_error_is_ours_and_also_what_python_would_raise() -> None:
    assert issubclass(Error, RuntimeError)
    assert issubclass(InvalidArgumentError, (Error, ValueError))
    assert issubclass(CollectiveTimeoutError, Error)
    assert issubclass(CollectiveTimeoutError, TimeoutError)
    assert (PeerLostError.__module__, PeerLostError.__qualname__, PeerLostError.peer) == ("mdas", "PeerLostError", -1)


def test_memory_is_zeroed_page_aligned_and_kept_by_its_views() -> None:
    memory = _core.Memory(10_000)
    assert (memory.nbytes, len(memory), memory.address % 4096) == (10_000, 10_000, 0)
    numbers = np.frombuffer(memory, np.float32)
    del memory
    assert not numbers.any()
    numbers[:] = 1
    assert numbers.sum() == 2500
    assert len(_core.Memory(0)) == 0
    with pytest.raises(MemoryError):
        _core.Memory(2**62)


def test_a_wait_that_ends_early_leaves_the_operation_in_flight() -> None:
    zero, one = _core.loopback(2)
    work = zero.barrier(0)
    with pytest.raises(CollectiveTimeoutError, match="still in flight after 200ms"):
        work.wait(0.2)
    assert not work.done()
    assert work.times() is None
    one.barrier(0).wait(30)
    work.wait(30)
    assert work.done()


def test_waiting_releases_the_interpreter() -> None:
    zero, one = _core.loopback(2)
    waiting = threading.Thread(target=lambda: zero.barrier(0, blocking=True).wait(30))
    waiting.start()
    one.barrier(0, blocking=True).wait(30)  # would never be called, did the other thread hold the GIL
    waiting.join(30)
    assert not waiting.is_alive()


def test_shutdown_refuses_later_calls_and_may_be_repeated() -> None:
    (engine,) = _core.loopback(1)
    engine.shutdown(1.0)
    engine.shutdown(1.0)
    with pytest.raises(ClosedError, match="shut down"):
        engine.barrier(0)


def test_counters_grow() -> None:
    engines = _core.loopback(2)
    data = [np.ones(100_000, np.float32) for _ in engines]
    views = [_core.View.from_buffer(array, True) for array in data]
    for work in [engine.allreduce(0, view, view) for engine, view in zip(engines, views, strict=True)]:
        work.wait(30)
    counters = engines[0].counters()
    assert counters["operations"] >= 1
    assert counters["bytes_sent"] >= 400_000
    assert counters["bytes_received"] >= 400_000


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_ring_copies_nothing(size: int) -> None:
    """Beside the reduction: what arrives lands where it is added, or where it stays."""
    engines = _core.loopback(size, _core.EngineSettings(algorithm="ring"))
    memories = [(_core.Memory(4_000_000), _core.Memory(4_000_000)) for _ in engines]
    views = [[_core.View.from_buffer(memoryview(m).cast("f"), True) for m in pair] for pair in memories]
    for work in [e.allreduce(0, *pair, op="average") for e, pair in zip(engines, views, strict=True)]:
        work.wait(30)
    assert [engine.counters()["bytes_copied"] for engine in engines] == [0] * size
    for work in [e.broadcast(0, pair[0], 0, output=pair[1]) for e, pair in zip(engines, views, strict=True)]:
        work.wait(30)
    # The root's own copy, to its output.
    assert [engine.counters()["bytes_copied"] for engine in engines] == [4_000_000, *[0] * (size - 1)]


def test_loopback_settings_are_checked() -> None:
    with pytest.raises(InvalidArgumentError, match='algorithm is "best", but must be one of ring, tree'):
        _core.EngineSettings(algorithm="best")
    with pytest.raises(InvalidArgumentError, match="timeout is -1"):
        _core.EngineSettings(timeout=-1)
    with pytest.raises(InvalidArgumentError, match="2 ranks, but 1 node numbers"):
        _core.loopback(2, nodes=[0])


def test_the_fused_update_moves_base_and_state_and_predicts() -> None:
    base, momentum, gradient, forward = (np.full(5, x, np.float32) for x in (1.0, 0.5, 2.0, 0.0))
    rule = _core.Sgd(lr=0.5, momentum=0.5)
    update = _core.Update(rule, gradient.ctypes.data)
    arguments = (base.ctypes.data, [momentum.ctypes.data], update, forward.ctypes.data, update)
    _core.fused_update(5, *arguments)
    # Momentum 0.5 * 0.5 + 2 = 2.25; one more for the prediction: 0.5 * 2.25 + 2 = 3.125.
    assert momentum.tolist() == [2.25] * 5
    assert base.tolist() == [1 - 0.5 * 2.25] * 5
    assert forward.tolist() == [1 - 0.5 * 2.25 - 0.5 * 3.125] * 5
    _core.fused_update(0, 0, [0], _core.Update(rule, 0))  # nothing, anywhere


def test_addresses_that_cannot_be_right_are_refused() -> None:
    a, b = np.ones(8, np.float32), np.ones(8, np.float32)
    at, other = a.ctypes.data, b.ctypes.data
    sgd, adam = _core.Sgd(lr=0.1), _core.Adam(0.1, 0.9, 0.999, 1e-8, 0.0, False, 1)
    plain = _core.Update(sgd, other)
    for message, call in [
        ("base at 0x0 is not the address of 8 float32 elements", lambda: _core.fused_update(8, 0, [], plain)),
        ("not the address", lambda: _core.fused_update(8, at + 1, [], plain)),
        ("not the address", lambda: _core.fused_update(2**62, at, [], plain)),
        ("base overlaps gradient", lambda: _core.fused_update(8, at, [], _core.Update(sgd, at))),
        ("base overlaps forward", lambda: _core.fused_update(8, at, [], plain, at)),
        ("keeps 0 numbers of state per element, but got 1", lambda: _core.fused_update(8, at, [other], None, None)),
        ("different rules", lambda: _core.fused_update(0, 0, [0, 0], plain, 0, _core.Update(adam, 0))),
        ("prediction needs forward weights", lambda: _core.fused_update(8, at, [], None, None, plain)),
        ("target overlaps source", lambda: _core.copy_sqnorm(at, at + 4, 7)),
        ("p overlaps d", lambda: _core.times(2, 2, 1, at, other, at)),
        ("too large", lambda: _core.times(2**40, 2**40, 1, at, other, at)),
    ]:
        with pytest.raises(InvalidArgumentError, match=message):
            call()
    assert a.tolist() == [1.0] * 8


def test_kernels_of_statistics_and_sketches() -> None:
    random = np.random.default_rng(1)
    d, r = (random.standard_normal(shape).astype(np.float32) for shape in ((7, 5), (5, 2)))
    p, q, c = np.zeros((7, 2), np.float32), np.zeros((5, 2), np.float32), np.zeros((7, 5), np.float32)
    _core.times(7, 5, 2, d.ctypes.data, r.ctypes.data, p.ctypes.data)
    np.testing.assert_allclose(p, d @ r, rtol=1e-5)
    _core.transposed_times(7, 5, 2, d.ctypes.data, p.ctypes.data, q.ctypes.data)
    np.testing.assert_allclose(q, d.T @ p, rtol=1e-5)
    _core.expand(7, 5, 2, d.ctypes.data, p.ctypes.data, q.ctypes.data, c.ctypes.data)
    np.testing.assert_allclose(c, d + p @ q.T, rtol=1e-5)
    assert _core.orthonormalize(7, 2, p.ctypes.data, 3) == (0, 0)
    np.testing.assert_allclose(p.T @ p, np.eye(2), atol=1e-6)
    x, y, z = d.ravel(), random.standard_normal(35).astype(np.float32), np.zeros(35, np.float32)
    assert _core.copy_sqnorm(z.ctypes.data, x.ctypes.data, 35) == pytest.approx((x.astype(float) ** 2).sum())
    assert z.tolist() == x.tolist()
    assert _core.sqnorm(y.ctypes.data, 35) == pytest.approx((y.astype(float) ** 2).sum())
    assert _core.sqdist(x.ctypes.data, y.ctypes.data, 35) == pytest.approx(((x - y).astype(float) ** 2).sum(), rel=1e-5)
    assert _core.dot(x.ctypes.data, y.ctypes.data, 35) == pytest.approx(x.astype(float) @ y.astype(float))


def test_groups_of_different_purposes_do_not_depend_on_each_others_order() -> None:
    engines = _core.loopback(2)
    first = {purpose: engines[0].new_group([0, 1], purpose) for purpose in ("", "there", "back")}
    second = {purpose: engines[1].new_group([0, 1], purpose) for purpose in ("back", "", "there")}
    assert first == second and len(set(first.values())) == 3
    assert engines[0].new_group([0, 1], "back") not in first.values()
    for engine in engines:
        engine.shutdown(1.0)
