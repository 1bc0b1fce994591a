"""Which transport a job uses: a pure function of what all ranks know of each other, so that all decide alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address

from mdas.errors import ConfigurationError
from mdas.rendezvous import ranges
from mdas.verbs import Offer

_REASONS_SHOWN = 4
"""Of a large job whose hosts all have reasons of their own."""


@dataclass(frozen=True)
class Decision:
    """What the job's connections are made of."""

    kinds: tuple[str | None, ...]
    """What every rank talks over verbs, in words; None: nothing. Two that talk the same use it, all other pairs TCP."""
    why: str
    rails: int = 1
    """Ports that every rank uses, over verbs."""

    @property
    def transport(self) -> str:
        """Of all pairs: "tcp", "verbs", or "mixed"."""
        kinds = set(self.kinds)
        return "tcp" if kinds == {None} else "verbs" if len(kinds) == 1 else "mixed"

    def over_verbs(self, rank: int) -> list[bool]:
        """Which peers this rank reaches over verbs."""
        own = self.kinds[rank]
        return [own is not None and kind == own and peer != rank for peer, kind in enumerate(self.kinds)]


def decide(wanted: str, nodes: Sequence[int], offers: Sequence[Sequence[Offer] | str]) -> Decision:
    """Decides for the whole job.

    Args:
        wanted: the setting `transport`. "auto" takes verbs where the job spans several nodes, for all ranks that can
            and have somebody on another node to talk to, and TCP for the rest; "verbs" and "tcp" mean what they say.
        nodes: node number of every rank.
        offers: what every rank could use over verbs, by rail, or in words why it has nothing.

    Raises:
        ConfigurationError: "verbs" is wanted, but some ranks cannot; names them and their reasons.
    """
    nothing = (None,) * len(offers)
    if wanted == "tcp":
        return Decision(nothing, "as MDAS_TRANSPORT says")
    rails = min((len(offer) for offer in offers if not isinstance(offer, str)), default=1)
    kinds = tuple(None if isinstance(offer, str) else _kind(offer[:rails]) for offer in offers)
    obstacle = _obstacle(offers, kinds)
    if wanted == "verbs":
        if obstacle is not None:
            raise ConfigurationError(
                f'init: transport "verbs" (MDAS_TRANSPORT) cannot be used: {obstacle}. `mdas doctor` shows what a host '
                'has; transport "auto" would take TCP where it must'
            )
        return Decision(kinds, "as MDAS_TRANSPORT says", rails)
    if len(set(nodes)) == 1:
        return Decision(nothing, "all ranks are on one node")
    if obstacle is None:
        return Decision(kinds, "every rank offers it", rails)
    places = {kind: {node for node, other in zip(nodes, kinds, strict=True) if other == kind} for kind in set(kinds)}
    talking = tuple(kind if len(places[kind]) > 1 else None for kind in kinds)
    if not any(talking):
        return Decision(nothing, f"not verbs, since {obstacle}")
    return Decision(talking, f"verbs ({'; '.join(_grouped(talking))}), else TCP, since {obstacle}", rails)


def _obstacle(offers: Sequence[Sequence[Offer] | str], kinds: Sequence[str | None]) -> str | None:
    """Why not all ranks can talk over verbs; None if they can."""
    reasons = _grouped([offer if isinstance(offer, str) else None for offer in offers])
    if reasons:
        return "; ".join(reasons)
    different = _grouped(kinds)
    return None if len(different) == 1 else f"they do not understand each other: {'; '.join(different)}"


def _kind(rails: Sequence[Offer]) -> str:
    words = [_word(offer) for offer in rails]
    # The n-th rail of one rank talks to the n-th of another.
    return words[0] if len(set(words)) == 1 else ", ".join(words)


def _word(offer: Offer) -> str:
    """What must be equal at both ends of a connection. On RoCE a GID is an address, and reaches those of its family."""
    if offer.kind == "InfiniBand":
        return offer.kind
    address = IPv6Address(offer.gid)
    inner = address.ipv4_mapped or address
    local = "link-local " if inner.is_link_local else ""
    return f"{offer.kind} over {local}IPv{inner.version}"


def _grouped(words: Sequence[str | None]) -> list[str]:
    """Words with the ranks that say them, None left out."""
    ranks: dict[str, list[int]] = {}
    for rank, word in enumerate(words):
        if word is not None:
            ranks.setdefault(word, []).append(rank)
    lines = [f"rank{'s' if len(who) > 1 else ''} {ranges(who)}: {word}" for word, who in ranks.items()]
    more = len(lines) - _REASONS_SHOWN
    return lines if more <= 0 else [*lines[:_REASONS_SHOWN], f"and {more} more"]
