"""Handles of operations, as torch wants them: to wait for, to ask, and with a future."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.futures import Future

from mdas import _core
from mdas.errors import Error

if TYPE_CHECKING:
    from mdas.torch_backend.mesh import Mesh

Step = Callable[[], object]

_LEAST_SECONDS = 0.001

_CALLBACK_SECONDS = 10.0
"""For what a script has hung on its futures to end, when the process group is destroyed."""


def seconds(timeout: timedelta | None) -> float | None:
    """Seconds of a timeout; None where torch says "the default", which it does by zero or a negative one."""
    value = 0.0 if timeout is None else timeout.total_seconds()
    return value if value > 0 else None


class Work(dist.Work):
    """One or several operations of the engine, and what is to be done with their results."""

    def __init__(
        self,
        mesh: Mesh,
        group: int,
        parts: Sequence[_core.Work] = (),
        steps: Sequence[Step] = (),
        result: Sequence[torch.Tensor] = (),
    ) -> None:
        """What has been started.

        Args:
            mesh: whose engine does it.
            group: the engine's group within which futures are completed in order.
            parts: the operations.
            steps: run in order once, when all parts are over: copies from staging memory.
            result: the tensors that hold the outcome then; the value of the future.
        """
        super().__init__()
        self._mesh, self._group = mesh, group
        self._parts, self._steps, self._result = list(parts), list(steps), list(result)
        self._lock = threading.Lock()
        self._settled = False
        self._future: Future[Any] | None = None

    @classmethod
    def joined(cls, mesh: Mesh, group: int, works: Sequence[Work]) -> Work:
        """Several works as one."""
        parts = [part for work in works for part in work._parts]
        steps = [work._settle for work in works]
        return cls(mesh, group, parts, steps, [tensor for work in works for tensor in work._result])

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits, without holding the GIL, until the results are there. May be called again.

        Args:
            timeout: longest wait; None, zero or less: until the operation's own deadline, which counts time
                without progress.

        Returns:
            True.

        Raises:
            CollectiveTimeoutError: (a TimeoutError) `timeout` is over, and the operation goes on; or the
                operation's own deadline is, and it has failed.
            PeerLostError: a rank is gone.
            MismatchError: the ranks did not call the same operation.
        """
        limit = seconds(timeout)
        deadline = None if limit is None else time.monotonic() + limit
        for part in self._parts:
            part.wait(None if deadline is None else max(deadline - time.monotonic(), _LEAST_SECONDS))
        self._settle()
        return True

    def is_completed(self) -> bool:
        """Is it over, well or badly? Never waits."""
        if not all(part.done() for part in self._parts):
            return False
        with suppress(Error):  # told by wait() and exception()
            self.wait()
        return True

    def is_success(self) -> bool:
        """Is it over, and well?"""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Error | None:
        """What it failed with; None if it has not (yet)."""
        for part in self._parts:
            try:
                if part.done():
                    part.wait()
            except Error as error:
                return error
        return None

    def synchronize(self) -> None:
        """As `wait`: memory of the CPU has no streams to be ordered with."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the outcome, once it is over."""
        return self._result

    def get_future(self) -> Future[Any]:
        """A future of the list of tensors that hold the outcome; a thread of mdas completes it.

        An error becomes a RuntimeError that quotes it.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            over: Future[Any] = Future()
            # By a callback, since only what a callback raises is an error for torch's C++ as well.
            future = self._future = over.then(lambda _: self._outcome())
        self._mesh.completer(self._group).add(self, over)
        return future

    def await_parts(self) -> None:
        """Waits until the operations are over, well or badly."""
        for part in self._parts:
            with suppress(Error):  # told by wait()
                part.wait()

    def _outcome(self) -> list[torch.Tensor]:
        self.wait()
        return self._result

    def _settle(self) -> None:
        with self._lock:
            if self._settled:
                return
            with torch.no_grad():
                for step in self._steps:
                    step()
            self._settled = True


class Completer:
    """Completes futures in the order in which they were asked for, from a thread that the first one starts.

    What a script hangs on a future runs in that thread, and may itself ask for a future and wait for it, as
    PowerSGD's hook does. A new thread then takes the rest over, since the old one may not come back before.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: queue.SimpleQueue[tuple[Work, Future[Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        """The last one is in charge."""
        self._stopped = False
        self._lock = threading.Lock()

    def add(self, work: Work, over: Future[Any]) -> None:
        """Sets `over` when `work` is over."""
        with self._lock:
            if not self._stopped:
                if not self._threads or threading.current_thread() is self._threads[-1]:
                    thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._threads = [*(other for other in self._threads if other.is_alive()), thread]
                    thread.start()
                self._waiting.put((work, over))
                return
        over.set_result(None)

    def stop(self) -> None:
        """Returns when all futures are complete, if what hangs on them ends in time. When all operations are over."""
        with self._lock:
            self._stopped = True
            self._waiting.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_CALLBACK_SECONDS)

    def _run(self) -> None:
        while threading.current_thread() is self._threads[-1] and (item := self._waiting.get()) is not None:
            work, over = item
            work.await_parts()
            over.set_result(None)
