"""Ranks as threads of one process: over an exchange in plain torch, mdas's own engine, or torch's Gloo."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as worlds_of_threads

from mdas import _core
from mdas.communicator import CoreCommunicator, TorchCommunicator
from mdas.errors import PeerLostError

T = TypeVar("T")
DEADLINE = 60.0
through_torch = False
"""Do ranks exchange through torch's Gloo, whatever the test calls? Set by the fixture `exchange`."""
_REDUCE = {"min": torch.minimum, "max": torch.maximum, "product": torch.mul}


class FakeNetwork:
    """What the communicators of one group share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: dict[tuple[str, int], list[Any]] = {}
        self.changed = threading.Condition()
        self.broken = False
        self.log: list[list[str]] = [[] for _ in range(size)]

    def communicators(self) -> list[FakeCommunicator]:
        return [FakeCommunicator(self, rank) for rank in range(self.size)]

    def fail(self, rank: int) -> None:
        with self.changed:
            self.broken = True
            self.changed.notify_all()


class FakeWork:
    """Finished by whichever rank's call completes the set."""

    def __init__(self, network: FakeNetwork) -> None:
        self._network = network
        self.finished = False
        self.start = self.end = time.monotonic_ns()

    def done(self) -> bool:
        return self.finished

    def wait(self, timeout: float | None = None) -> None:
        network = self._network
        with network.changed:
            came = network.changed.wait_for(lambda: self.finished or network.broken, timeout or DEADLINE)
            if not self.finished:
                raise PeerLostError("a rank failed") if came else TimeoutError("a rank did not come")

    def times(self) -> tuple[int, int, int] | None:
        return (self.start, self.start, self.end) if self.finished else None


class FakeCommunicator:
    """One rank's end. The result appears when the last rank has called."""

    summation = "in rank order"
    closed = False

    def __init__(self, network: FakeNetwork, rank: int) -> None:
        self._network = network
        self.rank = rank
        self.size = network.size
        self.ranks = range(network.size)
        self._next = {"bulk": 0, "urgent": 0, "second": 0}

    def memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype)

    def allreduce(self, input, output, *, op="sum", lane="bulk", tag=0) -> FakeWork:
        def combine(calls):
            inputs = [call[0] for call in calls]
            total = inputs[0].clone()
            for x in inputs[1:]:
                total = _REDUCE[op](total, x) if op in _REDUCE else total + x
            if op == "average":
                total = total / len(inputs)
            for _, out in calls:
                out.copy_(total)

        return self._submit(f"allreduce {op} {input.dtype} {input.numel()} {tag}", lane, (input, output), combine)

    def broadcast(self, tensor, root, *, lane="bulk", tag=0) -> FakeWork:
        def combine(calls):
            for rank, (out,) in enumerate(calls):
                if rank != root:
                    out.copy_(calls[root][0])

        return self._submit(f"broadcast {root} {tensor.dtype} {tensor.numel()} {tag}", lane, (tensor,), combine)

    def allgather(self, input, output, *, lane="urgent", tag=0) -> FakeWork:
        def combine(calls):
            everyone = torch.cat([call[0] for call in calls])
            for _, out in calls:
                out.copy_(everyone)

        return self._submit(f"allgather {input.dtype} {input.numel()} {tag}", lane, (input, output), combine)

    def _submit(self, what: str, lane: str, tensors: tuple[torch.Tensor, ...], combine) -> FakeWork:
        network = self._network
        assert all(t.is_contiguous() for t in tensors)
        with network.changed, torch.no_grad():
            key = (lane, self._next[lane])
            self._next[lane] += 1
            network.log[self.rank].append(f"{lane} {what}")
            calls = network.calls.setdefault(key, [None] * self.size)
            work = FakeWork(network)
            calls[self.rank] = (what, tensors, work)
            if all(calls):
                del network.calls[key]
                whats = {call[0] for call in calls}
                assert len(whats) == 1, f"ranks are out of step: {whats}"
                combine([call[1] for call in calls])
                for call in calls:
                    call[2].finished, call[2].end = True, time.monotonic_ns()
                network.changed.notify_all()
        return work


def on_ranks(size: int, body: Callable[[FakeCommunicator], T], network: FakeNetwork | None = None) -> list[T]:
    """Runs body(communicator) on `size` threads; results in rank order. The first error is raised."""
    if through_torch and network is None:
        return on_torch_ranks(size, body)
    network = network or FakeNetwork(size)
    return _run(network.communicators(), body, network.fail)


def on_core_ranks(size: int, body: Callable[[CoreCommunicator], T]) -> list[T]:
    """The same over mdas's own engine and its loopback transport."""
    if through_torch:
        return on_torch_ranks(size, body)
    engines = _core.loopback(size, _core.EngineSettings(timeout=DEADLINE))
    try:
        communicators = [CoreCommunicator(engine, 0, engine.rank, size) for engine in engines]
        # A rank that fails leaves: the others are told so instead of waiting for it.
        return _run(communicators, body, lambda rank: engines[rank].shutdown(1.0))
    finally:
        for engine in engines:
            engine.shutdown(5.0)


def on_torch_ranks(size: int, body: Callable[[TorchCommunicator], T]) -> list[T]:
    """The same over process groups of torch's Gloo; every thread has a `torch.distributed` of its own."""
    store, limit = dist.HashStore(), timedelta(seconds=DEADLINE)

    def join(place: Any) -> T:
        dist.init_process_group("gloo", store=store, rank=place.rank, world_size=size, timeout=limit)
        try:
            result = body(TorchCommunicator(timeout=DEADLINE))
            dist.barrier()  # whoever leaves first would break off what others are still exchanging
            return result
        finally:
            # Of a rank that fails, too: the others are told so instead of waiting for it.
            dist.destroy_process_group()

    worlds_of_threads._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        return _run([SimpleNamespace(rank=rank) for rank in range(size)], join, lambda rank: None)
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        worlds_of_threads._uninstall_threaded_pg()


def _run(communicators: list[Any], body: Callable[[Any], T], fail: Callable[[int], None]) -> list[T]:
    failed: list[int] = []

    def run(communicator: Any) -> T:
        ended = False
        try:
            result = body(communicator)
            ended = True
            return result
        finally:
            if not ended:
                failed.append(communicator.rank)
                fail(communicator.rank)

    with ThreadPoolExecutor(len(communicators)) as pool:
        futures = [pool.submit(run, communicator) for communicator in communicators]
    for rank in failed:
        futures[rank].result()  # raises what came first; the others' errors follow from it
    return [future.result() for future in futures]
