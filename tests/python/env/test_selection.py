"""Which transport a job takes: the same on all ranks, from what all of them offer."""

from __future__ import annotations

import pytest

from mdas.errors import ConfigurationError
from mdas.rendezvous import Card
from mdas.selection import decide
from mdas.verbs import Offer

Offers = tuple[Offer, ...] | str

ROCE = (Offer("rxe0", 1, 1, "::ffff:10.0.0.5", "RoCE v2", 0, 4096),)
ROCE_1 = (Offer("mlx4_0", 1, 0, "::ffff:10.0.0.5", "RoCE v1", 0, 1024),)
FABRIC = (Offer("mlx5_0", 1, 0, "fe80::1", "InfiniBand", 17, 4096),)
ROCE_6 = (Offer("mlx5_2", 1, 3, "2001:db8::5", "RoCE v2", 0, 4096),)
LOCAL_6 = (Offer("mlx5_2", 1, 0, "fe80::5054:ff:fe12:3456", "RoCE v2", 0, 4096),)
LOCAL_4 = (Offer("mlx5_2", 1, 0, "::ffff:169.254.3.4", "RoCE v2", 0, 4096),)
NONE = "this host has no RDMA device"
DOWN = "mlx5_0 port 1: it is down: no cable, or its network interface is down"

DECISIONS: list[tuple[str, tuple[int, ...], list[Offers], str, str]] = [
    ("tcp", (0, 1), [FABRIC, FABRIC], "tcp", "as MDAS_TRANSPORT says"),
    ("verbs", (0, 1), [FABRIC, FABRIC], "verbs", "as MDAS_TRANSPORT says"),
    ("verbs", (0, 0), [ROCE, ROCE], "verbs", "as MDAS_TRANSPORT says"),
    ("auto", (0, 1), [ROCE, ROCE], "verbs", "every rank offers it"),
    ("auto", (0, 0, 1, 1), [FABRIC] * 4, "verbs", "every rank offers it"),
    ("auto", (0, 0), [ROCE, ROCE], "tcp", "all ranks are on one node"),
    ("auto", (0, 0), [NONE, NONE], "tcp", "all ranks are on one node"),
    ("auto", (0, 1), [NONE, NONE], "tcp", f"not verbs, since ranks 0-1: {NONE}"),
    ("auto", (0, 1), [FABRIC, DOWN], "tcp", f"not verbs, since rank 1: {DOWN}"),
    ("auto", (0, 1, 2, 3), [NONE, ROCE, DOWN, NONE], "tcp", f"not verbs, since ranks 0, 3: {NONE}; rank 2: {DOWN}"),
    (
        "auto",
        (0, 1, 1),
        [FABRIC, ROCE, ROCE],
        "tcp",
        "not verbs, since they do not understand each other: rank 0: InfiniBand; ranks 1-2: RoCE v2 over IPv4",
    ),
    (
        "auto",
        (0, 1, 2),
        [FABRIC, FABRIC, NONE],
        "mixed",
        f"verbs (ranks 0-1: InfiniBand), else TCP, since rank 2: {NONE}",
    ),
    (
        "auto",
        (0, 0, 1, 2, 2),
        [FABRIC, ROCE, FABRIC, ROCE, DOWN],
        "mixed",
        f"verbs (ranks 0, 2: InfiniBand; ranks 1, 3: RoCE v2 over IPv4), else TCP, since rank 4: {DOWN}",
    ),
    (
        "auto",
        (0, 1),
        [ROCE_1, ROCE],
        "tcp",
        "not verbs, since they do not understand each other: rank 0: RoCE v1 over IPv4; rank 1: RoCE v2 over IPv4",
    ),
]
_MIXED = "not verbs, since they do not understand each other: rank 0: RoCE v2 over {}; rank 1: RoCE v2 over {}"
_EVEN = "ranks 0, 2: RoCE v2 over IPv4"
DECISIONS += [
    ("auto", (0, 1), [ROCE_6, ROCE_6], "verbs", "every rank offers it"),
    ("auto", (0, 1), [LOCAL_6, LOCAL_6], "verbs", "every rank offers it"),
    ("auto", (0, 1), [LOCAL_4, LOCAL_4], "verbs", "every rank offers it"),
    ("auto", (0, 1), [ROCE, ROCE_6], "tcp", _MIXED.format("IPv4", "IPv6")),
    ("auto", (0, 1), [ROCE, LOCAL_6], "tcp", _MIXED.format("IPv4", "link-local IPv6")),
    ("auto", (0, 1), [LOCAL_6, ROCE_6], "tcp", _MIXED.format("link-local IPv6", "IPv6")),
    ("auto", (0, 1), [ROCE, LOCAL_4], "tcp", _MIXED.format("IPv4", "link-local IPv4")),
    (
        "auto",
        (0, 1, 2),
        [ROCE, ROCE_6, ROCE],
        "mixed",
        f"verbs ({_EVEN}), else TCP, since they do not understand each other: {_EVEN}; rank 1: RoCE v2 over IPv6",
    ),
]


@pytest.mark.parametrize(("wanted", "nodes", "offers", "transport", "why"), DECISIONS)
def test_decisions(wanted: str, nodes: tuple[int, ...], offers: list[Offers], transport: str, why: str) -> None:
    decision = decide(wanted, nodes, offers)
    assert (decision.transport, decision.why) == (transport, why)


def test_both_ends_of_a_pair_take_the_same() -> None:
    offers: list[Offers] = [FABRIC, ROCE, FABRIC, ROCE, DOWN, ROCE_1]
    decision = decide("auto", (0, 0, 1, 1, 2, 2), offers)
    # The only one that talks RoCE v1 has nobody to talk to.
    assert decision.kinds == ("InfiniBand", "RoCE v2 over IPv4", "InfiniBand", "RoCE v2 over IPv4", None, None)
    table = [decision.over_verbs(rank) for rank in range(6)]
    assert [[peer for peer in range(6) if row[peer]] for row in table] == [[2], [3], [0], [1], [], []]
    assert decide("verbs", (0, 0), [ROCE, ROCE]).over_verbs(0) == [False, True]
    assert decide("tcp", (0, 1), [ROCE, ROCE]).over_verbs(0) == [False, False]


def test_those_that_share_a_node_only_need_no_verbs() -> None:
    assert decide("auto", (0, 0, 1), [ROCE, ROCE, NONE]).transport == "tcp"


def test_the_job_takes_as_many_rails_as_every_rank_offers() -> None:
    decision = decide("auto", (0, 1, 2), [FABRIC * 3, FABRIC * 2, FABRIC * 4])
    assert (decision.transport, decision.why, decision.rails) == ("verbs", "every rank offers it", 2)
    assert decide("verbs", (0, 1), [ROCE * 2, ROCE]).rails == 1
    assert decide("auto", (0, 1), [ROCE + ROCE_1, ROCE]).transport == "verbs"
    assert decide("auto", (0, 1), [ROCE + ROCE_1, ROCE * 2]).why == (
        "not verbs, since they do not understand each other: rank 0: RoCE v2 over IPv4, RoCE v1 over IPv4; "
        "rank 1: RoCE v2 over IPv4"
    )
    # Each rail must reach its counterpart.
    assert decide("auto", (0, 1), [ROCE + ROCE + ROCE_6, ROCE + ROCE_6 + ROCE_6]).transport == "tcp"
    assert decide("auto", (0, 1), [ROCE + ROCE_6, ROCE + ROCE_6]).transport == "verbs"


@pytest.mark.parametrize(
    ("offers", "reason"),
    [
        ([ROCE, NONE], f"rank 1: {NONE}"),
        ([FABRIC, ROCE], "they do not understand each other: rank 0: InfiniBand; rank 1: RoCE v2 over IPv4"),
        ([ROCE, ROCE_6], "they do not understand each other: rank 0: RoCE v2 over IPv4; rank 1: RoCE v2 over IPv6"),
    ],
)
@pytest.mark.parametrize("nodes", [(0, 0), (0, 1)])
def test_verbs_that_some_cannot_use_fails_with_their_reasons(
    offers: list[Offers], reason: str, nodes: tuple[int, ...]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        decide("verbs", nodes, offers)
    assert str(caught.value).startswith(
        f'init: transport "verbs" (MDAS_TRANSPORT) cannot be used: {reason}. `mdas doctor`'
    )


def test_a_thousand_reasons_are_not_all_told() -> None:
    offers: list[Offers] = [f"host {rank} has no RDMA device" for rank in range(1000)]
    why = decide("auto", range(1000), offers).why
    assert why.endswith("rank 3: host 3 has no RDMA device; and 996 more")


@pytest.mark.parametrize("offer", [FABRIC, ROCE + ROCE_1, NONE])
def test_an_offer_survives_its_card(offer: Offers) -> None:
    card = Card("10.0.0.5", 4711, "host/net", "0.1.0", {"transport": "auto"}, offer)
    assert Card.decode(card.encode()) == card


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{}", b'{"verbs": {"device": "mlx5_0"}}', b'{"verbs": 7}'])
def test_what_is_no_card_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigurationError, match="another rank's card makes no sense"):
        Card.decode(data)
