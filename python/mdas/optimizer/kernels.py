"""Arithmetic whose result must be the same bits on every rank, whatever the machine."""

from __future__ import annotations

import torch
from torch import Tensor

from mdas.optimizer.buckets import Vector


def squared_norm(vector: Vector) -> float:
    """|v|², accumulated in float64; not finite exactly if an element is not."""
    return sum(float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2 for x in vector.flats)


def squared_distance(a: Vector, b: Vector) -> float:
    """|a - b|², accumulated in float64."""
    return sum(
        float(torch.linalg.vector_norm(x - y, dtype=torch.float64)) ** 2 for x, y in zip(a.flats, b.flats, strict=True)
    )


def squared_blend(shared: Vector, local: Vector | None, alpha: float) -> float:
    """|shared + (1 - alpha) (local - shared)|², accumulated in float64; local None: |shared|²."""
    if local is None:
        return squared_norm(shared)
    return sum(
        float(torch.linalg.vector_norm(torch.lerp(g, c, alpha), dtype=torch.float64)) ** 2
        for c, g in zip(shared.flats, local.flats, strict=True)
    )


def times(matrix: Tensor, tall: Tensor, out: Tensor) -> None:
    """Writes out (m, r) = matrix (m, n) @ tall (n, r)."""
    torch.mm(matrix, tall, out=out)


def transposed_times(matrix: Tensor, tall: Tensor, out: Tensor) -> None:
    """Writes out (n, r) = matrix (m, n)ᵀ @ tall (m, r)."""
    torch.mm(matrix.t(), tall, out=out)


def orthonormalize(tall: Tensor, seed: int) -> None:
    """The columns of `tall` (n, r), r <= n, become orthonormal, in place; dead ones are refilled from `seed`."""
    dead = torch.linalg.vector_norm(tall, dim=0) == 0
    if bool(dead.any()):
        tall[:, dead] = torch.randn(tall.shape[0], int(dead.sum()), generator=torch.Generator().manual_seed(seed))
    tall.copy_(torch.linalg.qr(tall)[0])


def expand(shared: Tensor, left: Tensor, right: Tensor, out: Tensor) -> None:
    """Writes out (m, n) = shared (m, n) + left (m, r) @ right (n, r)ᵀ."""
    torch.addmm(shared, left, right.t(), out=out)
