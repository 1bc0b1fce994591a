"""Which communicator an optimizer exchanges through."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from mdas import session
from mdas.communicator.core import SECOND, CoreCommunicator
from mdas.communicator.process_group import TorchCommunicator
from mdas.communicator.protocol import Communicator
from mdas.errors import InvalidArgumentError
from mdas.group import Group, new_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def choose(chosen: Communicator | str | None, group: Group | DeviceMesh | None, device: torch.device) -> Communicator:
    """The communicator for `communicator=` and `group=` of an optimizer of parameters on `device`.

    Raises:
        InvalidArgumentError: another name than "core" and "torch", a group beside what is not the core, or a mesh that
            is not one dimension of the job's ranks.
        NotInitializedError: what is chosen has not been initialized.
    """
    mesh = sys.modules.get("torch.distributed.device_mesh")
    if mesh is not None and isinstance(group, mesh.DeviceMesh):
        if group.ndim != 1:
            raise InvalidArgumentError(f'group={group}: one dimension of it, as in mesh["data"]')
        if chosen == "torch":
            return TorchCommunicator(group.get_group(), device=device)
        ranks: Group | None = _ranks_of(group)
    else:
        ranks = cast("Group | None", group)
    if chosen is None or chosen == "core":
        return _core(ranks)
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


def _ranks_of(mesh: DeviceMesh) -> Group:
    """The same ranks: mdas numbers them as the launcher does, and so does torch, unless told otherwise."""
    engine = session.current().engine
    ours, theirs = (engine.rank, engine.size), (dist.get_rank(), dist.get_world_size())
    if ours != theirs:
        raise InvalidArgumentError(
            f"group={mesh}: this process has rank {ours[0]} of {ours[1]} in mdas, but {theirs[0]} of {theirs[1]} in "
            'torch.distributed; pass communicator="torch", or make the group with mdas.new_group()'
        )
    return new_group(mesh.mesh.tolist())


def _core(group: Group | None) -> Communicator:
    here = session.current()
    chosen, summation = group or Group.world(here.engine), here.summation
    # Buckets leave during backward, at moments that differ from rank to rank: in a group of their own,
    # what the user exchanges at that time cannot get between them.
    own = chosen.engine.new_group(list(chosen.ranks))
    second = chosen.engine.new_group(list(chosen.ranks), SECOND)
    return CoreCommunicator(
        chosen.engine,
        own,
        chosen.rank,
        chosen.size,
        chosen.timeout,
        second=second,
        ranks=chosen.ranks,
        summation=summation,
    )
