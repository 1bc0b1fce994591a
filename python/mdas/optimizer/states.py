"""State dicts, from one rank to all: of a checkpoint that one rank alone has read, or at the end of a `join`."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mdas.group import Group, _chosen, broadcast

_UNKNOWN_TYPE = re.compile(r"GLOBAL ([\w.]+)")


def broadcast_state(state: Any = None, root: int = 0, *, group: Group | None = None) -> Any:
    """What rank `root` of the group passes, on all ranks: a checkpoint that it alone has read, say.

        state = torch.load("checkpoint.pt", weights_only=True) if mdas.rank() == 0 else None
        state = mdas.broadcast_state(state)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    Args:
        state: on `root`, anything that `torch.save` writes and `torch.load(weights_only=True)` reads: tensors, numbers,
            strings, and dictionaries, lists and tuples of these. Ignored on the others.
        root: a rank of the group.
        group: None: all ranks.

    Returns:
        A copy, on the root, too; tensors are in CPU memory. Nothing but data is unpickled. While it travels, each rank
        holds it twice.

    Raises:
        TypeError: on all ranks, if the root's state holds anything else.
        MismatchError, PeerLostError, CollectiveTimeoutError: as `mdas.broadcast`.
    """
    return sent(state, _chosen(group).rank == root, lambda tensor: broadcast(tensor, root, group=group))


def sent(state: Any, from_here: bool, broadcast: Callable[[Tensor], object]) -> Any:
    """The same through any `broadcast`, which fills a tensor of bytes or lengths with that of the sending rank."""
    file, problem = io.BytesIO(), b""
    if from_here:
        try:
            torch.save(state, file)
            _loaded(file)
        except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
            # The others must hear of it, too, instead of waiting for bytes that never come.
            unknown = _UNKNOWN_TYPE.search(str(error))
            problem = (f"a {unknown[1]}" if unknown else str(error).partition("\n")[0]).encode()
            file = io.BytesIO(problem)
    lengths = torch.tensor([file.getbuffer().nbytes, len(problem)])
    broadcast(lengths)
    if not from_here:
        file = io.BytesIO(bytes(int(lengths[0])))
    broadcast(torch.frombuffer(file.getbuffer(), dtype=torch.uint8))
    if lengths[1]:
        raise TypeError(
            f"broadcast_state: the state holds what torch.load(weights_only=True) does not read: "
            f"{file.getvalue().decode()}; send tensors, numbers, strings, and dictionaries, lists and tuples of these"
        )
    return _loaded(file)


def _loaded(file: io.BytesIO) -> Any:
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)
