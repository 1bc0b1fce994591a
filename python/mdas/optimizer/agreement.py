"""Before the first step: do all ranks train the same model? Then they start from the same weights."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from mdas.communicator import Communicator, tags
from mdas.errors import MismatchError
from mdas.optimizer.buckets import Vector
from mdas.optimizer.hooks import Round
from mdas.optimizer.shards import local

_DIGEST_BYTES = 16


def require_agreement(
    communicator: Communicator,
    lines: Sequence[str],
    remedy: str = "all ranks must build the same model, optimizer and options",
) -> None:
    """Compares a description, line by line, with those of the other ranks; one without lines agrees with all.

    Collective. Raises MismatchError on every rank, naming the first line in which a rank differs
    from the first one and what both have there; `remedy`: what to do about it.
    """
    if communicator.size == 1:
        return
    text = "\n".join(lines).encode()
    digest = hashlib.sha256(text).digest()
    header = torch.tensor(list(digest + len(text).to_bytes(8, "little")), dtype=torch.uint8)
    headers = [bytes(h.tolist()) for h in _gather(communicator, header)]
    if len(set(headers)) == 1:
        return
    longest = max(int.from_bytes(h[32:], "little") for h in headers)
    padded = torch.tensor(list(text.ljust(longest, b"\0")), dtype=torch.uint8)
    texts = [bytes(t.tolist()).rstrip(b"\0").decode() for t in _gather(communicator, padded)]
    told = [(rank, theirs.split("\n")) for rank, theirs in zip(communicator.ranks, texts, strict=True) if theirs]
    first, ours = told[0]
    for rank, theirs in told:
        if theirs != ours:
            one, other = _first_difference(ours, theirs)
            raise MismatchError(f"DistributedOptimizer: rank {first} has {one}, but rank {rank} has {other}; {remedy}")


def require_same_step(communicator: Communicator, names: Sequence[str], round: Round) -> None:
    """Loss scale and trained parameters of a step are the same on all ranks that had data. Collective, as
    `require_agreement`.
    """
    unit = [f"a loss multiplied by {round.unit:g} in step {round.number}"]
    trained = [
        f"requires_grad={flag} for parameter {name!r} in step {round.number}"
        for name, flag in zip(names, round.trained, strict=True)
    ]
    for lines, remedy in (
        (unit, "use a mdas.GradScaler with the same options and the same state on all ranks"),
        (trained, "freeze and unfreeze parameters on all ranks before the same backward pass"),
    ):
        require_agreement(communicator, [] if round.idle else lines, remedy)


class Comparison:
    """The bits of a vector, on their way to the other ranks. Making one is collective, and does not wait.

    None in its place: this rank's would say nothing; it takes part, and is not compared.
    """

    def __init__(self, communicator: Communicator, vector: Vector | None, what: str) -> None:
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for flat in vector.flats if vector is not None else []:
            digest.update(flat.detach().cpu().view(torch.uint8).numpy().data)
        self._what = what
        self._ranks = communicator.ranks
        own = torch.tensor([vector is not None, *digest.digest()], dtype=torch.uint8)
        self._everyone = torch.empty(communicator.size * own.numel(), dtype=torch.uint8)
        self._work = communicator.allgather(own, self._everyone, tag=tags.AGREEMENT)

    def require_equal(self) -> None:
        """Waits for those of the others. Raises MismatchError on every rank, naming those that differ from most."""
        self._work.wait()
        everyone = zip(self._ranks, self._everyone.view(len(self._ranks), -1).tolist(), strict=True)
        digests = {rank: bytes(digest) for rank, (compared, *digest) in everyone if compared}
        usual = Counter(digests.values()).most_common(1)
        parted = [rank for rank, found in digests.items() if found != usual[0][0]]
        if parted:
            raise MismatchError(
                f"{self._what} of ranks {parted} differ from those of the other {len(digests) - len(parted)}: "
                "something has changed weights or optimizer state on some ranks only (a seed, a file, faulty memory): "
                "restart from a checkpoint, and look at what these ranks do differently"
            )


class PeriodicComparison:
    """Compares base weights every so many steps; the outcome is read one step later, when it has long arrived."""

    def __init__(self, communicator: Communicator, every: int) -> None:
        self._communicator = communicator
        self._every = every
        self._steps = 0
        self._under_way: Comparison | None = None

    def after_step(self, base: Callable[[], Vector | None]) -> None:
        """All ranks call it after every step. Raises MismatchError on all of them, as `Comparison` does."""
        comparison, self._under_way = self._under_way, None
        if comparison is not None:
            comparison.require_equal()
        self._steps += 1
        if self._steps % self._every == 0:
            what = f"check_every: after {self._steps} steps, the base weights"
            self._under_way = Comparison(self._communicator, base(), what)


def broadcast_tensors(communicator: Communicator, tensors: Iterable[Tensor]) -> None:
    """Every tensor, of any dtype, becomes that of rank 0. Collective."""
    under_way = []
    for tensor in tensors:
        data = local(tensor.detach())
        if not data.numel():
            continue
        flat = data if data.is_contiguous() else data.contiguous()
        work = communicator.broadcast(flat.view(-1).view(torch.uint8), 0, tag=tags.AGREEMENT)
        under_way.append((data, flat, work))
    for data, flat, work in under_way:
        work.wait()
        if flat is not data:
            data.copy_(flat)


def average_tensors(communicator: Communicator, tensors: Sequence[Tensor]) -> None:
    """Every floating-point tensor becomes its average over the ranks. Collective."""
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            alike.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for group in alike.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        communicator.allreduce(flat, flat, op="average", tag=tags.AGREEMENT).wait()
        for tensor, part in zip(group, torch.split(flat, [t.numel() for t in group]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def _gather(communicator: Communicator, own: Tensor) -> list[Tensor]:
    everyone = torch.empty(communicator.size * own.numel(), dtype=own.dtype)
    communicator.allgather(own, everyone, tag=tags.AGREEMENT).wait()
    return list(everyone.view(communicator.size, -1))


def _first_difference(ours: list[str], theirs: list[str]) -> tuple[str, str]:
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            return a, b
    nothing = "nothing more"
    common = min(len(ours), len(theirs))
    return (ours[common:] or [nothing])[0], (theirs[common:] or [nothing])[0]
