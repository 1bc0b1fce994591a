"""The engine behind a process group: made through the store that torch hands out, closed at exit at the latest."""

from __future__ import annotations

import atexit
import json
import os
import secrets
import threading
import time
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from mdas import _core, mesh, network, rendezvous, settings
from mdas.errors import ConfigurationError, Error
from mdas.torch_backend.work import Completer

_EXIT_SECONDS = 3.5
"""A script that never calls `destroy_process_group` leaves others' last bytes this long without progress."""

_ELSEWHERE = "192.0.2.1:9"
"""A documentation address (RFC 5737): routed like any other host that is not here."""


class Mesh:
    """An engine, and the threads that complete the futures of its operations."""

    def __init__(self, engine: _core.Engine) -> None:
        self.engine = engine
        self._completers: dict[int, Completer] = {}
        self._lock = threading.Lock()
        _open.append(self)

    @classmethod
    def through_store(cls, store: Store, rank: int, size: int, timeout: timedelta) -> Mesh:
        """Meets the other ranks in a store and connects with them. Collective.

        Raises:
            ConfigurationError: the settings in the environment make no sense or differ between ranks, or some
                ranks did not come in time.
            PeerLostError: a rank was lost meanwhile.
            Error: the store does not answer.
        """
        chosen = settings.read(os.environ, timeout=timeout.total_seconds())
        _core.start_logging(rank, chosen.log)
        if size == 1:
            return cls(mesh.alone(chosen))
        deadline = time.monotonic() + chosen.timeout
        try:
            meeting = StoreMeeting(store, rank, size, deadline)
            secret = meeting.secret if chosen.secret is None else chosen.secret.encode()
            address = _address(store, chosen.interface, meeting.all_on_this_host)
            engine, _ = mesh.connect(meeting, rank, size, address, secret, chosen, deadline)
        except DistError as error:
            raise Error(f"init_process_group: torch's store does not answer: {error}") from error
        return cls(engine)

    def completer(self, group: int) -> Completer:
        """Who completes the futures of a group of the engine, whose operations end in order."""
        with self._lock:
            return self._completers.setdefault(group, Completer(f"mdas-futures-{group}"))

    def shutdown(self, seconds: float) -> None:
        """Lets what is in flight finish, as long as something moves every `seconds`, and leaves. May be repeated."""
        if self not in _open:
            return
        _open.remove(self)
        self.engine.shutdown(seconds)
        for completer in self._completers.values():
            completer.stop()


class StoreMeeting:
    """The ranks' meeting in a store of torch's.

    The store may outlive the process group (an agent's, or a file), so that what was written is deleted as soon as
    everybody has read it: the next process group would read it otherwise. Nobody can have left by then, since
    whoever reads connects afterwards, and nobody's mesh is complete before.
    """

    def __init__(self, store: Store, rank: int, size: int, deadline: float) -> None:
        self._store, self._rank, self._size, self._deadline = store, rank, size, deadline
        start = {"host": _core.host_identity(), "name": secrets.token_hex(8), "secret": secrets.token_hex(32)}
        blobs = [json.loads(blob) for blob in self._exchange("start", json.dumps(start))]
        self.name = f"torch/{blobs[0]['name']}"
        self.secret: bytes = blobs[0]["secret"].encode()
        self.all_on_this_host = len({blob["host"] for blob in blobs}) == 1

    def exchange(self, blob: bytes, secret: bytes) -> list[bytes]:
        """All ranks' blobs, in rank order. Collective."""
        return self._exchange("card", blob.decode())

    def _exchange(self, what: str, text: str) -> list[bytes]:
        keys = [f"mdas/{what}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], text)
        missing = rendezvous.await_keys(self._store, keys, self._deadline)
        if missing:
            raise ConfigurationError(
                f"init_process_group: ranks {rendezvous.ranges(missing)} of {self._size} did not come to the store in "
                'time: do they all make the process group, with backend "mdas"?'
            )
        blobs = [self._store.get(key) for key in keys]
        counter = f"mdas/{what}/read"
        if self._store.add(counter, 1) == self._size:
            for key in (*keys, counter):
                self._store.delete_key(key)
        return blobs


def _address(store: Store, interface: str | None, all_on_this_host: bool) -> str:
    """The address of this host that the other ranks can reach."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return network.advertised_address(store.host, store.port, interface, all_on_this_host)
    # A file, say, has no address that routing could be asked for.
    routed = "127.0.0.1" if all_on_this_host else _core.local_address_towards(_ELSEWHERE)
    return network.choose(network.interfaces(), interface, routed)


_open: list[Mesh] = []
_inherited: list[Mesh] = []


def _at_exit() -> None:
    for one in list(_open):
        one.shutdown(_EXIT_SECONDS)


def _after_fork_in_child() -> None:
    for one in _open:
        one.engine.abandon()
    # Never freed: their locks may be held by threads that do not exist here.
    _inherited.extend(_open)
    _open.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
