"""By what memory of others is known to be the same as before, so that over verbs it is registered once.

A device goes on reaching the pages that it was told of, whatever lies at their address by now. So memory may stay
registered only as long as something lives that cannot let go of it:

- the numpy array that owns it. As long as there is a weak reference to an array, numpy refuses to resize it in place;
- a torch storage that cannot be resized: one on a numpy array's memory or another buffer's, or one that
  `tensor.numpy()` has shown. Any other may free its memory and get other memory at the same address, behind every
  tensor's back (`storage.resize_(0)` and back, as FSDP does between steps).

Everything else is registered for each operation.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mdas import _core

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True, slots=True)
class _Known:
    owner: weakref.ref[Any]
    """Its callback takes the entry out, before the memory can be anybody else's."""
    place: tuple[object, ...]
    """Where its memory is; when that has changed, it is other memory."""
    identity: _core.Identity


_known: dict[int, _Known] = {}
"""By the id of what owns the memory."""


def of_array(array: np.ndarray[Any, Any]) -> _core.Identity | None:
    """Equal for arrays on the memory of the same array, as long as that lives; None where nothing is registered."""
    if not _core.verbs_in_use():
        return None
    numpy = sys.modules["numpy"]
    owner: Any = array
    while isinstance(owner.base, numpy.ndarray):
        owner = owner.base
    return _same(owner, (owner.__array_interface__["data"][0], owner.nbytes, id(owner.base)))


def of_tensor(tensor: torch.Tensor) -> _core.Identity | None:
    """Equal for tensors on the same storage; None where nothing is registered, or the storage can be resized."""
    if not _core.verbs_in_use():
        return None
    storage = tensor.untyped_storage()
    return None if storage.resizable() else _same(storage, (storage.data_ptr(), storage.nbytes()))


def _same(owner: object, place: tuple[object, ...]) -> _core.Identity:
    key = id(owner)
    known = _known.get(key)
    if known is not None and known.owner() is owner and known.place == place:
        return known.identity

    def forget(gone: weakref.ref[Any]) -> None:
        known = _known.get(key)
        if known is not None and known.owner is gone:  # else another object has got the id
            del _known[key]

    _known[key] = known = _Known(weakref.ref(owner, forget), place, _core.Identity())
    return known.identity
