"""Where gradients, averages and base weights lie.

Parameters are packed into buckets, in reverse order of registration, since backward reaches them in
about that order. A `Vector` holds one number per parameter element: a flat tensor per bucket for
whatever treats all elements alike, and a view per parameter for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mdas.optimizer.shards import local

# Every parameter starts on a cache line: kernels and copies then never share one.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter lies: `count` elements from `start` of bucket `bucket`."""

    index: int
    name: str
    parameter: torch.nn.Parameter
    shape: torch.Size
    """Of this rank's part, where it is divided among ranks."""
    bucket: int
    start: int

    @property
    def count(self) -> int:
        """Real numbers: a complex one is two."""
        return self.shape.numel() * (2 if self.parameter.is_complex() else 1)

    def view(self, flat: Tensor) -> Tensor:
        """The parameter's part of a bucket, in the parameter's shape."""
        part = flat[self.start : self.start + self.count]
        if self.parameter.is_complex():
            return torch.view_as_complex(part.view(*self.shape, 2))
        return part.view(self.shape)


def real(tensor: Tensor) -> Tensor:
    """The same memory as real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class Vector:
    """One number per element of every parameter.

    `flats[k]` is bucket k, 1-d, the padding between parameters included (always 0); `views[i]` is
    parameter i of the layout, in its shape, sharing that memory.
    """

    __slots__ = ("flats", "views")

    def __init__(self, flats: list[Tensor], places: Sequence[Place]) -> None:
        self.flats = flats
        self.views = [place.view(flats[place.bucket]) for place in places]

    def copy_(self, other: Vector) -> None:
        """Takes over the values of another vector of the same layout."""
        torch._foreach_copy_(self.flats, other.flats)


class Layout:
    """The division of parameters into buckets; equal on all ranks.

    `named` are (name, parameter) in order of registration; a bucket is closed when it holds
    `capacity_bytes` or more.
    """

    def __init__(self, named: Sequence[tuple[str, torch.nn.Parameter]], capacity_bytes: int) -> None:
        self.places: list[Place] = []
        self.sizes: list[tuple[int, torch.dtype]] = []
        self.parameters: list[Tensor] = []
        """Where they lie: this rank's parts."""
        self.members: list[list[Place]] = []
        open_buckets: dict[torch.dtype, int] = {}
        for name, parameter in reversed(named):
            dtype = parameter.real.dtype
            if dtype not in open_buckets:
                open_buckets[dtype] = self._open(dtype)
            bucket = open_buckets[dtype]
            self._append(bucket, name, parameter)
            if self.sizes[bucket][0] * dtype.itemsize >= capacity_bytes:
                del open_buckets[dtype]

    @classmethod
    def of(cls, buckets: Sequence[Sequence[tuple[str, torch.nn.Parameter]]]) -> Layout:
        """A division that somebody else has made: the parameters of each bucket, of one type."""
        layout = cls([], 0)
        for members in buckets:
            bucket = layout._open(members[0][1].real.dtype)
            for name, parameter in members:
                layout._append(bucket, name, parameter)
        return layout

    def _open(self, dtype: torch.dtype) -> int:
        self.sizes.append((0, dtype))
        self.members.append([])
        return len(self.sizes) - 1

    def _append(self, bucket: int, name: str, parameter: torch.nn.Parameter) -> None:
        start, dtype = self.sizes[bucket]
        place = Place(len(self.places), name, parameter, local(parameter).shape, bucket, start)
        self.places.append(place)
        self.parameters.append(local(parameter))
        self.members[bucket].append(place)
        self.sizes[bucket] = (_align(start + place.count, ALIGNMENT_BYTES // dtype.itemsize), dtype)

    def vector(self, memory: Callable[[int, torch.dtype], Tensor] | None = None) -> Vector:
        """A vector of zeros, in `memory(numel, dtype)` (default: plain memory, where the parameters are)."""
        memory = memory or (lambda numel, dtype: torch.zeros(numel, dtype=dtype, device=self.parameters[0].device))
        return Vector([memory(numel, dtype) for numel, dtype in self.sizes], self.places)


def _align(count: int, unit: int) -> int:
    return -(-count // unit) * unit
