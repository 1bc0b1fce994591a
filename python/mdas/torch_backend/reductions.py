"""Which of torch's reductions there are, and for which types.

The engine knows sum, average, minimum, maximum and product. The bitwise ones are made by collecting everybody's
elements and combining them here, in rank order; PREMUL_SUM by scaling first; types that the engine does not
reduce are widened to one that it does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from mdas.torch_backend import tensors
from mdas.torch_backend.work import Step

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

SUPPORTED = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")

_CORE = {"SUM": "sum", "AVG": "average", "PRODUCT": "product", "MIN": "min", "MAX": "max", "PREMUL_SUM": "sum"}
_BITWISE: dict[str, Combine] = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
# As in torch, where True + True is True.
_OF_BOOLS = {"SUM": "max", "PRODUCT": "min", "MIN": "min", "MAX": "max"}
_WIDENED = {torch.int8: torch.int32, torch.int16: torch.int32}
_LINEAR = ("SUM", "AVG", "PREMUL_SUM")


@dataclass(frozen=True)
class Reduction:
    """One of torch's reductions."""

    name: str
    factor: Any = None
    """Of PREMUL_SUM: a number or a tensor."""

    @classmethod
    def of(cls, op: Any) -> Reduction:
        """From a `torch.distributed.ReduceOp`.

        Raises:
            NotImplementedError: there is no such reduction here; says which there are.
        """
        kind = getattr(op, "op", op)
        name = next((name for name in SUPPORTED if kind == getattr(dist.ReduceOp, name)), None)
        if name is None:
            raise NotImplementedError(f"the backend mdas has no reduction {kind}; it has {', '.join(SUPPORTED)}")
        return cls(name, op.factor if name == "PREMUL_SUM" else None)

    def core_op(self, dtype: torch.dtype) -> str | None:
        """The engine's name for it; None if elements are to be collected and combined by `combine`.

        Raises:
            TypeError: this reduction does not fit the type; says what does.
        """
        if self.name in _BITWISE:
            if dtype.is_floating_point or dtype.is_complex:
                raise TypeError(f"{self.name} works on integers and booleans, not on {dtype}")
            return None
        if dtype == torch.bool:
            if self.name not in _OF_BOOLS:
                raise TypeError(f"{self.name} does not work on booleans; {', '.join([*_OF_BOOLS, *_BITWISE])} do")
            return _OF_BOOLS[self.name]
        if dtype.is_complex and self.name not in _LINEAR:
            raise TypeError(f"{self.name} does not work on {dtype}: only {', '.join(_LINEAR)} reduce complex numbers")
        if self.name == "AVG" and not (dtype.is_floating_point or dtype.is_complex):
            raise TypeError(f"AVG does not work on {dtype}: use SUM, and divide with the rounding that you want")
        if dtype not in tensors.NATIVE and dtype not in _WIDENED and dtype not in (torch.complex64, torch.complex128):
            raise TypeError(
                f"the backend mdas does not reduce {dtype}; it reduces float32, float64, float16, bfloat16, "
                "complex64, complex128, int8, int16, int32, int64, uint8 and bool"
            )
        return _CORE[self.name]

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Combines the rows of a matrix, first to last: the bitwise reductions."""
        return reduce(_BITWISE[self.name], rows.unbind(0))


def source(tensor: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """What the engine reduces: flat, of a type that it knows; the tensor's own memory where that is possible."""
    flat = tensors.plain(tensor)
    if reduction.factor is not None:
        flat = (flat * reduction.factor).to(flat.dtype)
    if flat.dtype.is_complex:
        return torch.view_as_real(flat).view(-1)
    if reduction.name not in _BITWISE and flat.dtype in _WIDENED:
        return flat.to(_WIDENED[flat.dtype])
    return flat


def target(tensor: torch.Tensor, reduction: Reduction, steps: list[Step]) -> torch.Tensor:
    """Where its result goes: flat, of the type of `source`; the tensor's own memory, or a step copies it there."""
    tensors.check(tensor)
    dtype = tensor.dtype
    widened = reduction.name not in _BITWISE and dtype in _WIDENED
    if tensors.is_plain(tensor) and not widened:
        flat = tensor.detach().view(-1)
        return torch.view_as_real(flat).view(-1) if dtype.is_complex else flat
    staging = torch.empty(tensor.numel(), dtype=_WIDENED[dtype] if widened else dtype)
    steps.append(lambda: tensor.detach().copy_(staging.view(tensor.shape)))
    return torch.view_as_real(staging).view(-1) if dtype.is_complex else staging
