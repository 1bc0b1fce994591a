"""Arithmetic on vectors and thin matrices: kernels of the core in CPU memory, torch operations elsewhere.

This is the one place that chooses. The core's results are the same bits on every rank, whatever the machine;
torch's are where the devices are alike, and may differ in rounding otherwise, which base weights never see: what
is computed here clips, measures and predicts.

All work on float32; other types are converted first, so that a float64 beyond the range of float32 counts as
infinite here. What returns a float waits for the device's current stream, never for the whole device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mdas import _core
from mdas.optimizer.buckets import Vector, real


def in_core(x: Tensor) -> bool:
    """Do the kernels of the core reach this memory?"""
    return x.device.type == "cpu"


def squared_norm(vector: Vector) -> float:
    """|v|², accumulated in float64; not finite exactly if an element is not."""
    flats = list(map(_float32, vector.flats))
    if in_core(flats[0]):
        return sum(_core.sqnorm(x.data_ptr(), x.numel()) for x in flats)
    return sum(read([_square(x) for x in flats]))


def squared_distance(a: Vector, b: Vector) -> float:
    """|a - b|², accumulated in float64."""
    pairs = _pairs(a, b)
    if in_core(pairs[0][0]):
        return sum(_core.sqdist(x.data_ptr(), y.data_ptr(), x.numel()) for x, y in pairs)
    return sum(read([_square(x - y) for x, y in pairs]))


def squared_blend(shared: Vector, local: Vector | None, alpha: float) -> float:
    """|alpha shared + (1 - alpha) local|², accumulated in float64; local None: |shared|²."""
    if local is None:
        return squared_norm(shared)
    pairs = _pairs(shared, local)
    if in_core(pairs[0][0]):
        inner = sum(_core.dot(x.data_ptr(), y.data_ptr(), x.numel()) for x, y in pairs)
    else:
        inner = sum(read([(x * y).sum(dtype=torch.float64) for x, y in pairs]))
    beta = 1.0 - alpha
    square = alpha**2 * squared_norm(shared) + 2.0 * alpha * beta * inner + beta**2 * squared_norm(local)
    return max(square, 0.0)


def copy_squared(target: Tensor, source: Tensor) -> float | Tensor:
    """Copies to `target`, which is contiguous; returns |source|², to be read with `read`: as backward goes on, no
    device is waited for.
    """
    if not in_core(target):
        target.copy_(source.detach())
        return _square(_float32(real(target)))
    if source.dtype == torch.float32 and target.dtype == torch.float32 and source.is_contiguous():
        return _core.copy_sqnorm(target.data_ptr(), source.data_ptr(), target.numel())
    target.copy_(source.detach())
    wide = _float32(real(target))
    return _core.sqnorm(wide.data_ptr(), wide.numel())


def read(values: Sequence[float | Tensor]) -> list[float]:
    """Numbers, some of which may be tensors of one on a device: with one wait for all."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    known = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(known) if isinstance(value, Tensor) else value for value in values]


def times(rows: int, columns: int, d: Tensor, r: Tensor, p: Tensor) -> None:
    """P = D R. Like those below on contiguous float32: D and H of rows x columns, P of (rows, rank), R of
    (columns, rank).
    """
    if in_core(d):
        _core.times(rows, columns, r.shape[1], d.data_ptr(), r.data_ptr(), p.data_ptr())
    else:
        torch.mm(d.view(rows, columns), r, out=p)


def transposed_times(rows: int, columns: int, d: Tensor, p: Tensor, r: Tensor) -> None:
    """R = Dᵀ P."""
    if in_core(d):
        _core.transposed_times(rows, columns, p.shape[1], d.data_ptr(), p.data_ptr(), r.data_ptr())
    else:
        torch.mm(d.view(rows, columns).t(), p, out=r)


def expand(rows: int, columns: int, h: Tensor, p: Tensor, r: Tensor, c: Tensor) -> None:
    """C = H + P Rᵀ."""
    if in_core(h):
        _core.expand(rows, columns, p.shape[1], h.data_ptr(), p.data_ptr(), r.data_ptr(), c.data_ptr())
    else:
        torch.addmm(h.view(rows, columns), p, r.t(), out=c.view(rows, columns))


def orthonormalize(talls: Sequence[Tensor], seeds: Sequence[int]) -> None:
    """Makes the columns of every (rows, rank) matrix orthonormal. Dead columns are refilled, on every rank with the
    same directions.

    They are small, and travel to the core and back all at once: P and R are the same bits on all ranks.
    """
    if not talls:
        return
    if in_core(talls[0]):
        for tall, seed in zip(talls, seeds, strict=True):
            _core.orthonormalize(tall.shape[0], tall.shape[1], tall.data_ptr(), seed)
        return
    flat = torch.cat([tall.view(-1) for tall in talls])
    host = flat.to("cpu", copy=True)
    parts = [part.view(tall.shape) for part, tall in zip(_split(host, talls), talls, strict=True)]
    for part, seed in zip(parts, seeds, strict=True):
        _core.orthonormalize(part.shape[0], part.shape[1], part.data_ptr(), seed)
    flat.copy_(host)
    torch._foreach_copy_([tall.view(-1) for tall in talls], _split(flat, talls))


def _split(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.split(flat, [tensor.numel() for tensor in like]))


def _square(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm.square()


def _pairs(a: Vector, b: Vector) -> list[tuple[Tensor, Tensor]]:
    return list(zip(map(_float32, a.flats), map(_float32, b.flats), strict=True))


def _float32(x: Tensor) -> Tensor:
    return x.float()
