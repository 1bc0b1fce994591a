"""Which communicator an optimizer exchanges through."""

from __future__ import annotations

import torch

from mdas import session
from mdas.communicator.core import SECOND, CoreCommunicator
from mdas.communicator.process_group import TorchCommunicator
from mdas.communicator.protocol import Communicator
from mdas.errors import InvalidArgumentError
from mdas.group import Group


def choose(chosen: Communicator | str | None, group: Group | None, device: torch.device) -> Communicator:
    """The communicator for `communicator=` and `group=` of an optimizer of parameters on `device`.

    Raises:
        InvalidArgumentError: another name than "core" and "torch", or a group beside what is not the core.
        NotInitializedError: what is chosen has not been initialized.
    """
    if chosen is None or chosen == "core":
        return _core(group)
    if group is not None:
        raise InvalidArgumentError(
            "group= is a group of mdas's own engine: leave it out, and pass "
            "communicator=mdas.communicator.TorchCommunicator(process_group) for some ranks of torch.distributed"
        )
    if chosen == "torch":
        return TorchCommunicator(device=device)
    if isinstance(chosen, str):
        raise InvalidArgumentError(f'communicator={chosen!r}: choose "core" or "torch", or pass a communicator')
    return chosen


def _core(group: Group | None) -> Communicator:
    chosen = group or Group.world(session.current().engine)
    # Buckets leave during backward, at moments that differ from rank to rank: in a group of their own,
    # what the user exchanges at that time cannot get between them.
    own = chosen.engine.new_group(list(chosen.ranks))
    second = chosen.engine.new_group(list(chosen.ranks), SECOND)
    return CoreCommunicator(chosen.engine, own, chosen.rank, chosen.size, chosen.timeout, second=second)
