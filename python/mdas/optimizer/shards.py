"""Parameters of which each rank holds a part: torch's DTensor, as tensor parallelism makes them.

What the optimizer exchanges, keeps and writes are this rank's parts; only where torch's own optimizers and autograd
look at a parameter does the whole of it matter. Ranks that average hold the same part; those that hold its other parts
belong to other groups, and know nothing of what this group measures.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mdas.communicator import Communicator, tags
from mdas.errors import InvalidArgumentError


def sharded(tensor: Tensor) -> bool:
    """Is it a DTensor? Where none has been made yet, nothing is imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def division(parameter: Tensor) -> str:
    """How it is divided, for a description of the parameter; nothing, if it is not."""
    divided: Any = parameter
    return f", {divided.placements}" if sharded(parameter) else ""


def local(tensor: Tensor) -> Tensor:
    """This rank's part of it, in the same memory; of an ordinary tensor, itself."""
    if not sharded(tensor):
        return tensor
    part: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return part


def like(part: Tensor, whole: Tensor) -> Tensor:
    """A part, as a tensor of the kind of `whole`, divided as that is."""
    if not sharded(whole):
        return part
    divided: Any = whole
    result: Tensor = type(divided).from_local(
        part, divided.device_mesh, divided.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return result


def part_of_gradient(gradient: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part, divided as the parameter is. Where autograd has left it otherwise, the ranks that share the
    parameter exchange what is needed.
    """
    if sharded(gradient) and sharded(parameter):
        divided: Any = gradient
        wanted: Any = parameter
        if divided.placements != wanted.placements:
            gradient = divided.redistribute(wanted.device_mesh, wanted.placements)
    return local(gradient)


def put(parameter: Tensor, part: Tensor) -> None:
    """From now on the parameter lies in this memory."""
    if sharded(parameter):
        parameter._local_tensor = part  # type: ignore[attr-defined]
    else:
        parameter.data = part


def check(named: Iterable[tuple[str, Tensor]], communicator: Communicator, predict: str, nan_check: str) -> None:
    """Can parameters in parts be trained like this? Collective, if there are any.

    Raises:
        InvalidArgumentError: what the options ask for would need to know the other parts, or the ranks that average are
            those that hold the parts.
    """
    first = next(((name, p) for name, p in named if sharded(p)), None)
    if first is None:
        return
    name, parameter = first
    if predict not in ("sketch", "history", "none"):
        raise InvalidArgumentError(
            f"predict={predict!r}: parameter {name!r} is divided among ranks (DTensor), each of which would blend in "
            'its own way; choose "sketch", "history" or "none"'
        )
    if nan_check != "raise":
        raise InvalidArgumentError(
            f"nan_check={nan_check!r}: parameter {name!r} is divided among ranks (DTensor), and those with the other "
            'parts would not skip the update; pass nan_check="raise"'
        )
    divided: Any = parameter
    mesh = torch.tensor([int(divided.device_mesh.mesh.min())])
    meshes = torch.empty(communicator.size, dtype=torch.int64)
    communicator.allgather(mesh, meshes, tag=tags.SHARDS).wait()
    if len(set(meshes.tolist())) < communicator.size:
        raise InvalidArgumentError(
            f"parameter {name!r} is divided among the ranks that are to average it: pass the ranks that hold the same "
            'part, as in group=mesh["data"]. (fully_shard averages by itself, and is not for this optimizer.)'
        )


def refuse_norm(parameters: Iterable[Tensor]) -> None:
    """Raises InvalidArgumentError if one is divided: its norm would be that of a part."""
    if any(map(sharded, parameters)):
        raise InvalidArgumentError(
            "clipping by norm: parameters are divided among ranks (DTensor), and the norm of this rank's parts is not "
            "that of the whole; clip by value (max_value=)"
        )
