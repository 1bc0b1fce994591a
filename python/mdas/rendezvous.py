"""The first meeting: every rank shows its card, and gets the cards of all.

Under torchrun through the agent's store; elsewhere at rank 0, on MASTER_ADDR:MASTER_PORT.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from mdas import _core, network
from mdas.env import Job
from mdas.errors import ConfigurationError, Error
from mdas.verbs import Offer

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_POLL_SECONDS = 0.02
"""Between looks into the store, so that Ctrl-C works: torch's own waits do not look for signals."""


@dataclass(frozen=True)
class Card:
    """What a rank tells the others about itself."""

    address: str
    port: int
    host: str
    """Equal for ranks of one node."""
    version: str
    settings: dict[str, object] = field(default_factory=dict)
    """Those that must be equal on all ranks."""
    verbs: tuple[Offer, ...] | str = ""
    """What the rank could use over RDMA, by rail, or in words why it has nothing."""

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Card:
        """Reads what `encode` wrote.

        Raises:
            ConfigurationError: it did not write this.
        """
        try:
            card = json.loads(data)
            told = card["verbs"]
            return cls(**{**card, "verbs": told if isinstance(told, str) else tuple(Offer(**offer) for offer in told)})
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigurationError(f"init: another rank's card makes no sense ({data[:200]!r}): {error}") from error


class Place:
    """Where the ranks of a job meet."""

    def __init__(self, job: Job, generation: int, deadline: float) -> None:
        """Goes there.

        Args:
            job: who we are; of more than one rank.
            generation: how often this process has called `init`, so that a late rank cannot meet
                those who are one `init` further.
            deadline: on the clock of `time.monotonic()`.

        Raises:
            ConfigurationError: the job has no meeting point.
            Error: torchrun's store does not answer.
        """
        if job.master_addr is None or job.master_port is None:
            raise ConfigurationError("MASTER_ADDR or MASTER_PORT is missing")
        self.host = job.master_addr
        self.port = job.master_port
        self.name = f"{job.job_id}#{generation}"
        self._job = job
        self._deadline = deadline
        self._store = self._agent_store() if job.uses_agent_store else None

    def secret(self, own: str | None) -> bytes:
        """The job's secret: `own`, else a random one that rank 0 hands out. Collective."""
        if own is not None:
            return own.encode()
        fresh = secrets.token_hex(32).encode() if self._job.rank == 0 else b""
        # Whoever knows the job's name may come and fetch it.
        return self._exchange("secret", fresh, self.name.encode())[0]

    def exchange(self, blob: bytes, secret: bytes) -> list[bytes]:
        """All ranks' blobs, in rank order, among those who know the secret. Collective."""
        return self._exchange("card", blob, secret)

    def _exchange(self, what: str, blob: bytes, secret: bytes) -> list[bytes]:
        if self._store is not None:
            return self._through_store(self._store, what, blob)
        address = network.endpoint(self.host, self.port)
        left = max(self._deadline - time.monotonic(), 0.0)
        return _core.meet(self._job.rank, self._job.size, f"{self.name}/{what}", secret, address, blob, left)

    def _agent_store(self) -> Store:
        from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

        left = timedelta(seconds=max(self._deadline - time.monotonic(), 1.0))
        try:
            return TCPStore(self.host, self.port, is_master=False, timeout=left)
        except DistError as error:
            raise Error(f"init: torchrun's store at {network.endpoint(self.host, self.port)}: {error}") from error

    def _through_store(self, store: Store, what: str, blob: bytes) -> list[bytes]:
        keys = [f"mdas/{self.name}/{what}/{rank}" for rank in range(self._job.size)]
        store.set(keys[self._job.rank], blob.decode())
        missing = await_keys(store, keys, self._deadline)
        if missing:
            raise ConfigurationError(
                f"init: ranks {ranges(missing)} of {self._job.size} did not come to torchrun's store at "
                f"{network.endpoint(self.host, self.port)} in time: do they all call "
                "mdas.init(), with MDAS_SECRET set on all ranks or on none?"
            )
        return [store.get(key) for key in keys]


def await_keys(store: Store, keys: Sequence[str], deadline: float) -> list[int]:
    """Returns when a store of torch's has all these keys, or at `deadline` (of `time.monotonic()`).

    Returns:
        Indices of the keys that are missing then.
    """
    while not store.check(list(keys)):
        if time.monotonic() > deadline:
            return [index for index, key in enumerate(keys) if not store.check([key])]
        time.sleep(_POLL_SECONDS)
    return []


def check_agreement(cards: Sequence[Card]) -> None:
    """Raises on all ranks if their versions or settings differ.

    Raises:
        ConfigurationError: names what differs, and who has which value.
    """
    described = [{"version of mdas": card.version, **card.settings} for card in cards]
    for name in described[0]:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, values in enumerate(described):
            ranks_by_value.setdefault(repr(values.get(name)), []).append(rank)
        if len(ranks_by_value) > 1:
            who = "; ".join(f"{value} on ranks {ranges(ranks)}" for value, ranks in ranks_by_value.items())
            raise ConfigurationError(f"init: {name} differs between ranks: {who}. It must be the same on all ranks")


def ranges(ranks: Sequence[int]) -> str:
    """Ascending ranks, shortened: 0-3, 7."""
    parts: list[tuple[int, int]] = []
    for rank in ranks:
        if parts and parts[-1][1] == rank - 1:
            parts[-1] = (parts[-1][0], rank)
        else:
            parts.append((rank, rank))
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def nodes(hosts: Sequence[str]) -> tuple[int, ...]:
    """Node number of each rank: hosts counted in the order in which their first ranks come."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(host, len(numbers)) for host in hosts)
