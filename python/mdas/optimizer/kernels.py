"""Arithmetic whose result must be the same bits on every rank, whatever the machine."""

from __future__ import annotations

import torch

from mdas.optimizer.buckets import Vector


def squared_norm(vector: Vector) -> float:
    """|v|², accumulated in float64; not finite exactly if an element is not."""
    return sum(float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2 for x in vector.flats)


def squared_distance(a: Vector, b: Vector) -> float:
    """|a - b|², accumulated in float64."""
    return sum(
        float(torch.linalg.vector_norm(x - y, dtype=torch.float64)) ** 2
        for x, y in zip(a.flats, b.flats, strict=True)
    )
