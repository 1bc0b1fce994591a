"""Messages between two ranks, and the collectives that are made of them.

The engine has collectives only. A message is a broadcast in a group of two ranks; each direction, and each tag,
has a group of its own, so that a rank that sends first and one that receives first do not meet in the wrong
operation. Such a group is made by either side when it first needs it: its number follows from its purpose, which
both sides know.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch

from mdas import _core
from mdas.errors import CollectiveTimeoutError, Error, InvalidArgumentError
from mdas.torch_backend import tensors
from mdas.torch_backend.mesh import Mesh
from mdas.torch_backend.work import Step, Work


class Channels:
    """One process group's channels to its other ranks; what is sent into one comes out in the same order."""

    def __init__(self, mesh: Mesh, group: int, ranks: Sequence[int], rank: int) -> None:
        """Opens nothing yet.

        Args:
            mesh: whose engine carries the messages.
            group: the engine's number of the process group, which keeps its channels apart from others'.
            ranks: world ranks of the members.
            rank: of this process, within the group.
        """
        self._mesh, self._group, self._ranks, self.rank = mesh, group, tuple(ranks), rank
        self._channels: dict[tuple[int, int, str], int] = {}
        self._lock = threading.Lock()

    def _channel(self, source: int, destination: int, use: str) -> int:
        """Number of the engine's group for messages from one rank of the process group to another."""
        for rank in (source, destination):
            if not 0 <= rank < len(self._ranks):
                raise InvalidArgumentError(f"rank {rank} does not exist: the group has 0 to {len(self._ranks) - 1}")
        if source == destination:
            raise InvalidArgumentError(
                f"rank {source} cannot exchange messages with itself: copy the tensor, and leave out this message"
            )
        with self._lock:
            key = (source, destination, use)
            if key not in self._channels:
                members = [self._ranks[source], self._ranks[destination]]
                purpose = f"{self._group}:{use}:{members[0]}>{members[1]}"
                self._channels[key] = self._mesh.engine.new_group(members, purpose)
            return self._channels[key]

    def send(self, flat: torch.Tensor, destination: int, use: str, timeout: float) -> tuple[_core.Work, int]:
        """Starts a message from here. `flat` stays as it is until it is over. Also returns the channel's number."""
        channel = self._channel(self.rank, destination, use)
        return self._mesh.engine.broadcast(channel, tensors.view(flat), 0, timeout=timeout), channel

    def receive(self, flat: torch.Tensor, source: int, use: str, timeout: float) -> tuple[_core.Work, int]:
        """Starts a message to here; its length and type must be those of `flat`. Also returns the channel's number."""
        channel = self._channel(source, self.rank, use)
        return self._mesh.engine.broadcast(channel, tensors.view(flat), 0, timeout=timeout), channel

    def sending(self, tensor: torch.Tensor, destination: int, tag: int, timeout: float) -> Work:
        """`isend`."""
        part, channel = self.send(tensors.to_send(tensor), destination, f"tag {tag}", timeout)
        return Work(self._mesh, channel, [part], result=[tensor])

    def receiving(self, tensor: torch.Tensor, source: int, tag: int, timeout: float) -> Work:
        """`irecv`."""
        steps: list[Step] = []
        part, channel = self.receive(tensors.to_receive(tensor, steps), source, f"tag {tag}", timeout)
        return Work(self._mesh, channel, [part], steps, [tensor])

    def exchange(
        self,
        outgoing: dict[int, torch.Tensor],
        incoming: dict[int, torch.Tensor],
        timeout: float,
    ) -> Work:
        """Sends a tensor to each rank of `outgoing`, receives one from each of `incoming`, all at once.

        Part of a collective: every rank's messages fit those of the others. What a rank has for itself is copied.
        """
        steps: list[Step] = []
        sent = {rank: tensors.to_send(tensor) for rank, tensor in outgoing.items()}
        landing = {rank: tensors.to_receive(tensor, steps) for rank, tensor in incoming.items()}
        own, kept = landing.pop(self.rank, None), sent.pop(self.rank, None)
        if own is not None and kept is not None:
            if own.shape != kept.shape or own.dtype != kept.dtype:
                raise InvalidArgumentError(
                    f"a rank's part for itself has {kept.numel()} x {kept.dtype}, but the place for it "
                    f"{own.numel()} x {own.dtype}"
                )
            own.copy_(kept)
        parts = [self.send(flat, rank, "collective", timeout)[0] for rank, flat in sent.items()]
        parts += [self.receive(flat, rank, "collective", timeout)[0] for rank, flat in landing.items()]
        return Work(self._mesh, self._group, parts, steps, list(incoming.values()))

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        """Rank 0 hears from every other rank, then answers all. See `ProcessGroup.monitored_barrier`."""
        seconds, use, byte = timeout.total_seconds(), "monitored barrier", torch.zeros(1, dtype=torch.uint8)
        others = range(1, len(self._ranks))
        if self.rank != 0:
            try:
                self.send(byte, 0, use, seconds)[0].wait()
                self.receive(byte, 0, use, seconds)[0].wait()
            except Error as error:
                raise CollectiveTimeoutError(
                    f"monitored_barrier: rank {self.rank} was not let through by rank 0 within {seconds:g} s; "
                    f"another rank may be missing, which rank 0 names: {error}"
                ) from error
            return
        deadline = time.monotonic() + seconds
        arrivals = [self.receive(torch.empty_like(byte), rank, use, seconds)[0] for rank in others]
        missing: dict[int, Error] = {}
        for rank, arrival in zip(others, arrivals, strict=True):
            try:
                arrival.wait(max(deadline - time.monotonic(), 0.001))
            except Error as error:
                missing[rank] = error
                if not wait_all_ranks:
                    break
        if missing:
            names = ", ".join(str(rank) for rank in missing)
            more = "" if wait_all_ranks else " (the first one found; wait_all_ranks=True names all)"
            first = next(iter(missing.values()))
            raise CollectiveTimeoutError(
                f"monitored_barrier: ranks {names}{more} did not come within {seconds:g} s: {first}"
            ) from first
        for answer in [self.send(byte, rank, use, seconds)[0] for rank in others]:
            answer.wait()
