"""What collectives accept: torch CPU tensors, numpy arrays, and any object with the buffer protocol.

Nothing is imported for it: who holds a tensor has imported torch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from mdas import _core, identity
from mdas.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch


def view(array: object, *, writable: bool) -> _core.View:
    """The memory of a tensor, array or buffer; zero copy.

    Args:
        array: a contiguous torch CPU tensor (data only, autograd is not told), numpy array or
            buffer, of any shape, of float32, float64, float16, bfloat16 (tensors only), int32,
            int64, uint8 or bool.
        writable: the result will be written to it.

    Raises:
        TypeError: it is none of these, strided or overlapping, on another device, or read-only.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(array, torch.Tensor):
        return _tensor_view(array, writable=writable)
    if numpy is not None and isinstance(array, numpy.ndarray) and array.ndim == 0:
        array = array.reshape(1)  # a view; buffers without a shape have none to check
    same = identity.of_array(array) if numpy is not None and isinstance(array, numpy.ndarray) else None
    return _core.View.from_buffer(array, writable, same)


def _tensor_view(tensor: torch.Tensor, *, writable: bool) -> _core.View:
    import torch

    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise TypeError(
            f"tensor of layout {tensor.layout} on {tensor.device}: mdas moves dense tensors in CPU memory, "
            "pass tensor.to_dense().cpu()"
        )
    if not tensor.is_contiguous():
        overlapping = any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        kind = "an expanded tensor, whose elements share memory," if overlapping else "a strided tensor"
        raise TypeError(
            f"{kind} of shape {tuple(tensor.shape)} with strides {tensor.stride()}: pass tensor.contiguous() "
            "and copy the result back"
        )
    if tensor.is_neg() or tensor.is_conj():
        raise TypeError("a lazily negated tensor: pass tensor.resolve_neg() and copy the result back")
    if writable and not tensor.is_inference():
        # In-place results must make autograd refuse what it had saved, as torch's own operations do.
        torch.autograd.graph.increment_version(tensor)
    return storage_view(tensor)


def storage_view(tensor: torch.Tensor) -> _core.View:
    """The memory of a contiguous CPU tensor, kept alive by the view even if the tensor gets another storage."""
    # Not `tensor` itself: `tensor.data = ...` and `tensor.set_()` would let go of the memory.
    held = tensor.detach()
    dtype = str(held.dtype).removeprefix("torch.")
    return _core.View.from_address(held.data_ptr(), held.numel(), dtype, held, identity.of_tensor(held))


def empty_like(array: Any, shape: tuple[int, ...]) -> Any:
    """A new array of the same kind, type and device.

    Raises:
        TypeError: `array` is neither a tensor nor a numpy array, so that `out=` is needed.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(array, torch.Tensor):
        return torch.empty(shape, dtype=array.dtype)
    if numpy is not None and isinstance(array, numpy.ndarray):
        return numpy.empty(shape, dtype=array.dtype)
    raise TypeError(f"cannot make a result like a {type(array).__name__}: pass a writable buffer as out=")


def shape_of(array: Any) -> tuple[int, ...]:
    """Shape of a tensor, an array or a buffer."""
    shape = getattr(array, "shape", None)
    return tuple(memoryview(array).shape or ()) if shape is None else tuple(shape)


def check_count(what: str, view: _core.View, count: int, because: str) -> None:
    """Raises InvalidArgumentError (a ValueError) if a view has not `count` elements."""
    if view.count != count:
        raise InvalidArgumentError(f"{what} has {view.count} elements, but {because}: {count}")


def split_shape(shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """Shape of one of `parts` equal parts along the first dimension.

    Raises:
        InvalidArgumentError: the first dimension cannot be divided.
    """
    if not shape or shape[0] % parts:
        raise InvalidArgumentError(
            f"an input of shape {shape} cannot be scattered to {parts} ranks along its first dimension: "
            "pad it, or pass out= of the right size"
        )
    return (shape[0] // parts, *shape[1:])
