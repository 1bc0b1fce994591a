"""From ranks that can exchange a few bytes to a connected engine."""

from __future__ import annotations

import json
import time
from typing import Protocol

from mdas import _core, rendezvous
from mdas.settings import Settings


class Meeting(Protocol):
    """Where the ranks show each other their cards."""

    @property
    def name(self) -> str:
        """Of the job, equal on all its ranks and of no other job."""
        ...

    def exchange(self, blob: bytes, secret: bytes) -> list[bytes]:
        """All ranks' blobs, in rank order, among those who know the secret. Collective."""
        ...


def alone(settings: Settings) -> _core.Engine:
    """The engine of a job of one rank, which opens no sockets."""
    return _core.loopback(1, _engine_settings(settings))[0]


def connect(
    meeting: Meeting, rank: int, size: int, address: str, secret: bytes, settings: Settings, deadline: float
) -> tuple[_core.Engine, tuple[int, ...]]:
    """Connects every rank with every other one. Collective.

    Args:
        meeting: where cards are exchanged.
        rank: of this process.
        size: number of ranks.
        address: the one of this host that the others can reach.
        secret: what the connections authenticate with, equal on all ranks.
        settings: those of this process.
        deadline: on the clock of `time.monotonic()`.

    Returns:
        The engine, and the node number of every rank.

    Raises:
        ConfigurationError: settings or versions differ between ranks, or some ranks did not come.
        PeerLostError: a rank was lost meanwhile.
    """
    listener = _core.Listener(address, settings.ports, rank, size, meeting.name, secret)
    try:
        card = rendezvous.Card(address, listener.port, _core.host_identity(), _core.__version__, settings.shared())
        cards = [rendezvous.Card.decode(blob) for blob in meeting.exchange(card.encode(), secret)]
        rendezvous.check_agreement(cards)
        nodes = rendezvous.nodes([card.host for card in cards])
        members = [(card.address, card.port) for card in cards]
        configuration = json.dumps(settings.shared())
        left = max(deadline - time.monotonic(), 0.0)
        return listener.connect(members, list(nodes), _engine_settings(settings), configuration, left), nodes
    finally:
        listener.close()


def _engine_settings(settings: Settings) -> _core.EngineSettings:
    return _core.EngineSettings(
        settings.timeout,
        settings.warn_after,
        settings.small_bytes,
        settings.algorithm,
        list(settings.progress_cpus),
        settings.rate_limit,
    )
