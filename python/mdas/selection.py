"""Which transport a job uses: a pure function of what all ranks know of each other, so that all decide alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mdas.errors import ConfigurationError
from mdas.rendezvous import ranges
from mdas.verbs import Offer

_REASONS_SHOWN = 4
"""Of a large job whose hosts all have reasons of their own."""


@dataclass(frozen=True)
class Decision:
    """What the job's connections are made of."""

    transport: str
    """"tcp" or "verbs"."""
    why: str
    rails: int = 1
    """Ports that every rank uses, over verbs."""


def decide(wanted: str, nodes: Sequence[int], offers: Sequence[Sequence[Offer] | str]) -> Decision:
    """Decides for the whole job.

    Args:
        wanted: the setting `transport`. "auto" takes verbs where the job spans several nodes and every rank can,
            else TCP; "verbs" and "tcp" mean what they say.
        nodes: node number of every rank.
        offers: what every rank could use over verbs, by rail, or in words why it has nothing.

    Raises:
        ConfigurationError: "verbs" is wanted, but some ranks cannot; names them and their reasons.
    """
    if wanted == "tcp":
        return Decision("tcp", "as MDAS_TRANSPORT says")
    rails = min((len(offer) for offer in offers if not isinstance(offer, str)), default=0)
    obstacle = _obstacle(offers, rails)
    if wanted == "verbs":
        if obstacle is not None:
            raise ConfigurationError(
                f'init: transport "verbs" (MDAS_TRANSPORT) cannot be used: {obstacle}. `mdas doctor` shows what a host '
                'has; transport "auto" would take TCP'
            )
        return Decision("verbs", "as MDAS_TRANSPORT says", rails)
    if len(set(nodes)) == 1:
        return Decision("tcp", "all ranks are on one node")
    if obstacle is not None:
        return Decision("tcp", f"not verbs, since {obstacle}")
    return Decision("verbs", "every rank offers it", rails)


def _obstacle(offers: Sequence[Sequence[Offer] | str], rails: int) -> str | None:
    """Why not all ranks can talk over verbs, on so many rails; None if they can."""
    reasons = _grouped([offer if isinstance(offer, str) else None for offer in offers])
    if reasons:
        return "; ".join(reasons)
    offered = (offer[:rails] for offer in offers if not isinstance(offer, str))
    kinds = _grouped([", ".join(dict.fromkeys(one.kind for one in offer)) for offer in offered])
    return None if len(kinds) == 1 else f"they do not understand each other: {'; '.join(kinds)}"


def _grouped(words: Sequence[str | None]) -> list[str]:
    """Words with the ranks that say them, None left out."""
    ranks: dict[str, list[int]] = {}
    for rank, word in enumerate(words):
        if word is not None:
            ranks.setdefault(word, []).append(rank)
    lines = [f"rank{'s' if len(who) > 1 else ''} {ranges(who)}: {word}" for word, who in ranks.items()]
    more = len(lines) - _REASONS_SHOWN
    return lines if more <= 0 else [*lines[:_REASONS_SHOWN], f"and {more} more"]
