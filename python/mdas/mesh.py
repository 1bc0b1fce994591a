"""From ranks that can exchange a few bytes to a connected engine."""

from __future__ import annotations

import json
import time
from typing import Protocol

from mdas import _core, rendezvous, selection, verbs
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
    meeting: Meeting,
    rank: int,
    size: int,
    address: str,
    secret: bytes,
    settings: Settings,
    deadline: float,
    local_rank: int | None = None,
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
        local_rank: this rank's place among those of its host, which share out its RDMA devices; None if unknown.

    Returns:
        The engine, and the node number of every rank.

    Raises:
        ConfigurationError: settings or versions differ between ranks, some ranks did not come, or some cannot use
            the transport that is asked for.
        PeerLostError: a rank was lost meanwhile.
    """
    listener = _core.Listener(address, settings.ports, rank, size, meeting.name, secret)
    try:
        choices, offer = _offer(settings, address, verbs.place(rank, local_rank))
        card = rendezvous.Card(
            address, listener.port, _core.host_identity(), _core.__version__, settings.shared(), offer
        )
        cards = [rendezvous.Card.decode(blob) for blob in meeting.exchange(card.encode(), secret)]
        rendezvous.check_agreement(cards)
        nodes = rendezvous.nodes([card.host for card in cards])
        decision = selection.decide(settings.transport, nodes, [card.verbs for card in cards])
        if rank == 0:
            where = f"{size} ranks on {len(set(nodes))} node{'s' if len(set(nodes)) > 1 else ''}"
            over = decision.transport if decision.rails == 1 else f"{decision.transport} on {decision.rails} rails"
            _core.log("info", f"init: {where} over {over}: {decision.why}")
        members = [(card.address, card.port) for card in cards]
        configuration = json.dumps(settings.shared())
        left = max(deadline - time.monotonic(), 0.0)
        options, over_verbs = None, decision.over_verbs(rank)
        if any(over_verbs):
            rails = choices[: decision.rails]
            for choice in rails:
                _announce(choice)
            options = verbs.options(settings.verbs, rails)
        engine_settings = _engine_settings(settings)
        engine = listener.connect(members, list(nodes), engine_settings, configuration, left, options, over_verbs)
        return engine, nodes
    finally:
        listener.close()


def _offer(
    settings: Settings, address: str, local_rank: int
) -> tuple[list[_core.VerbsChoice], tuple[verbs.Offer, ...] | str]:
    if settings.transport == "tcp":  # devices that nobody asked for stay closed
        return [], "MDAS_TRANSPORT is tcp"
    return verbs.offer(settings.verbs, address, local_rank)


def _announce(choice: _core.VerbsChoice) -> None:
    place = f"{choice.device} port {choice.port} GID {choice.gid_index} ({choice.gid})"
    _core.log("debug", f"init: uses {place}: {choice.why}")
    for warning in choice.warnings:
        _core.log("warn", f"init: {place}: {warning}")


def _engine_settings(settings: Settings) -> _core.EngineSettings:
    return _core.EngineSettings(
        settings.timeout,
        settings.warn_after,
        settings.small_bytes,
        settings.algorithm,
        list(settings.progress_cpus),
        settings.rate_limit,
    )
