"""Arithmetic whose result must be the same bits on every rank, whatever the machine: kernels of the core.

They work on float32; other types are converted first, so that a float64 beyond the range of float32 counts
as infinite here.
"""

from __future__ import annotations

from torch import Tensor

from mdas import _core
from mdas.optimizer.buckets import Vector


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


def times(matrix: Tensor, tall: Tensor, out: Tensor) -> None:
    """Writes out (m, r) = matrix (m, n) @ tall (n, r). All contiguous float32."""
    rows, columns = matrix.shape
    _core.times(rows, columns, tall.shape[1], matrix.data_ptr(), tall.data_ptr(), out.data_ptr())


def transposed_times(matrix: Tensor, tall: Tensor, out: Tensor) -> None:
    """Writes out (n, r) = matrix (m, n)ᵀ @ tall (m, r). All contiguous float32."""
    rows, columns = matrix.shape
    _core.transposed_times(rows, columns, tall.shape[1], matrix.data_ptr(), tall.data_ptr(), out.data_ptr())


def expand(shared: Tensor, left: Tensor, right: Tensor, out: Tensor) -> None:
    """Writes out (m, n) = shared (m, n) + left (m, r) @ right (n, r)ᵀ. All contiguous float32."""
    rows, columns = shared.shape
    h, p, r, c = (tensor.data_ptr() for tensor in (shared, left, right, out))
    _core.expand(rows, columns, left.shape[1], h, p, r, c)


def orthonormalize(tall: Tensor, seed: int) -> None:
    """Makes the columns of `tall` (n, r), r <= n, orthonormal, in place.

    Columns that are zero, or depend on those before them, are refilled from `seed`.
    """
    rows, rank = tall.shape
    _core.orthonormalize(rows, rank, tall.data_ptr(), seed)


def _float32(x: Tensor) -> Tensor:
    return x.float()
