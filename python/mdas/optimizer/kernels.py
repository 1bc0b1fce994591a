"""Arithmetic whose result must be the same bits on every rank, whatever the machine: kernels of the core.

They work on float32; other types are converted first, so that a float64 beyond the range of float32 counts
as infinite here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mdas import _core
from mdas.optimizer.buckets import Vector, real


def squared_norm(vector: Vector) -> float:
    """|v|², accumulated in float64; not finite exactly if an element is not."""
    return sum(_core.sqnorm(x.data_ptr(), x.numel()) for x in map(_float32, vector.flats))


def squared_distance(a: Vector, b: Vector) -> float:
    """|a - b|², accumulated in float64."""
    return sum(
        _core.sqdist(x.data_ptr(), y.data_ptr(), x.numel())
        for x, y in zip(map(_float32, a.flats), map(_float32, b.flats), strict=True)
    )


def squared_blend(shared: Vector, local: Vector | None, alpha: float) -> float:
    """|alpha shared + (1 - alpha) local|², accumulated in float64; local None: |shared|²."""
    if local is None:
        return squared_norm(shared)
    inner = sum(
        _core.dot(x.data_ptr(), y.data_ptr(), x.numel())
        for x, y in zip(map(_float32, shared.flats), map(_float32, local.flats), strict=True)
    )
    beta = 1.0 - alpha
    square = alpha**2 * squared_norm(shared) + 2.0 * alpha * beta * inner + beta**2 * squared_norm(local)
    return max(square, 0.0)


def copy_squared(target: Tensor, source: Tensor) -> float:
    """Copies to `target`, which is contiguous; returns |source|²."""
    if source.dtype == torch.float32 and target.dtype == torch.float32 and source.is_contiguous():
        return _core.copy_sqnorm(target.data_ptr(), source.data_ptr(), target.numel())
    target.copy_(source.detach())
    wide = _float32(real(target))
    return _core.sqnorm(wide.data_ptr(), wide.numel())


def _float32(x: Tensor) -> Tensor:
    return x.float()
