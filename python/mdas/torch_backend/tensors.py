"""Tensors as the engine takes them: flat, contiguous, of a type that it knows; copies only where that needs one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mdas import _core, buffers
from mdas.errors import InvalidArgumentError
from mdas.torch_backend.work import Step

NATIVE = frozenset(
    (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.bool,
    )
)
"""What the engine reduces. Other types can only be moved: as bytes, and so without a check of the type."""


def check(tensor: torch.Tensor) -> None:
    """Raises TypeError unless the tensor is a dense one in CPU memory."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise TypeError(
            f"the backend mdas moves dense tensors in CPU memory, not a {kind} one on {tensor.device}: "
            "pass tensor.to_dense() or tensor.cpu(), or use a group of another backend for it"
        )


def is_plain(tensor: torch.Tensor) -> bool:
    """Do its elements lie one after the other in memory, as they are?"""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements one after the other, shape (numel,): the same memory if they lie so, else a copy."""
    check(tensor)
    held = tensor.detach()
    return held.resolve_conj().resolve_neg().contiguous().view(-1)


def to_send(tensor: torch.Tensor) -> torch.Tensor:
    """What an operation that only moves elements reads: flat, of a type that the engine knows."""
    return as_native(plain(tensor))


def as_native(flat: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that the engine knows: bytes if need be."""
    return flat if flat.dtype in NATIVE else flat.view(torch.uint8)


def to_receive(tensor: torch.Tensor, steps: list[Step]) -> torch.Tensor:
    """Where an operation that only moves elements writes: the tensor's memory, or a staging area.

    For the latter a step is added that copies it into the tensor.
    """
    check(tensor)
    if is_plain(tensor):
        return as_native(tensor.detach().view(-1))
    staging = torch.empty(tensor.numel(), dtype=tensor.dtype)
    steps.append(lambda: tensor.detach().copy_(staging.view(tensor.shape)))
    return as_native(staging)


def in_place(tensor: torch.Tensor, steps: list[Step]) -> torch.Tensor:
    """What an operation reads and writes, in one."""
    area = to_receive(tensor, steps)
    if not is_plain(tensor):
        area.copy_(to_send(tensor))
    return area


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Do two flat tensors share memory?"""
    start, other = a.data_ptr(), b.data_ptr()
    return start < other + b.nbytes and other < start + a.nbytes


def view(flat: torch.Tensor) -> _core.View:
    """For the engine."""
    return buffers.storage_view(flat)


def check_length(what: str, tensors: Sequence[object], count: int) -> None:
    """Raises InvalidArgumentError (a ValueError) unless there are `count` tensors."""
    if len(tensors) != count:
        raise InvalidArgumentError(f"{what} has {len(tensors)} tensors, but there must be {count}: one per rank")


def check_same_dtype(what: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raises InvalidArgumentError (a ValueError) if the tensors differ in type."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise InvalidArgumentError(f"{what}: tensors of different types ({names}) cannot take part in one operation")


def split(tensor: torch.Tensor, sizes: Sequence[int], parts: int, what: str) -> list[torch.Tensor]:
    """Cuts a tensor along its first dimension: by sizes, or equally if there are none.

    Raises:
        InvalidArgumentError: the sizes do not fit.
    """
    if not sizes:
        rows = tensor.shape[0] if tensor.dim() else 0
        if rows % parts or not tensor.dim():
            raise InvalidArgumentError(
                f"{what} of shape {tuple(tensor.shape)} cannot be cut into {parts} equal parts along its first "
                "dimension: pass sizes of the parts, or pad it"
            )
        sizes = [rows // parts] * parts
    if len(sizes) != parts or min(sizes) < 0 or sum(sizes) != tensor.shape[0]:
        raise InvalidArgumentError(
            f"{what} of shape {tuple(tensor.shape)} cannot be cut into parts of {list(sizes)} rows for {parts} ranks"
        )
    return list(torch.split(tensor, list(sizes)))
