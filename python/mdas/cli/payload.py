"""What the benchmarks send, and what must come out: values that every rank can predict."""

from __future__ import annotations

from typing import Any

import numpy as np

from mdas import _core

STORAGE: dict[str, type[np.generic]] = {
    "float32": np.float32,
    "float64": np.float64,
    "float16": np.float16,
    "bfloat16": np.uint16,  # numpy has none: kept as bits
    "int32": np.int32,
    "int64": np.int64,
    "uint8": np.uint8,
}

Array = np.ndarray[Any, np.dtype[Any]]


class Payload:
    """Registered input and output of one rank, of `count` elements of type `dtype`.

    Element i of rank r is 1 + (i + r) mod 3: small enough that sums of 16-bit floats are exact for
    up to 85 ranks.
    """

    def __init__(self, count: int, dtype: str, rank: int) -> None:
        self.count, self.dtype = count, dtype
        self._storage = np.dtype(STORAGE[dtype])
        self.nbytes = count * self._storage.itemsize
        self._memories = [_core.Memory(max(1, self.nbytes)) for _ in range(2)]
        self._input, self.output = (
            np.frombuffer(memoryview(memory), dtype=self._storage, count=count) for memory in self._memories
        )
        self._input[:] = self._encode(self._values(rank))

    def _values(self, rank: int) -> Array:
        return np.resize(np.roll(np.array([1.0, 2.0, 3.0], dtype=np.float32), -(rank % 3)), self.count)

    def _encode(self, values: Array) -> Array:
        if self.dtype != "bfloat16":
            return values.astype(self._storage)
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # round to nearest, ties to even

    def views(self) -> tuple[_core.View, _core.View]:
        """Input and output for the engine."""
        views = [
            _core.View.from_address(array.ctypes.data, self.count, self.dtype, memory)
            for array, memory in zip((self._input, self.output), self._memories, strict=True)
        ]
        return views[0], views[1]

    def clear(self) -> None:
        """Forgets the output, so that an old result does not pass for a new one."""
        self.output[:] = 0

    def wrong(self, op: str, size: int) -> int:
        """Elements of the output that are not the allreduce over ranks 0 to `size` - 1."""
        period = min(self.count, 3)
        ranks = np.stack([self._values(rank)[:period].astype(np.float64) for rank in range(size)])
        reduce = {"min": np.minimum, "max": np.maximum, "product": np.multiply}.get(op, np.add).reduce
        expected = reduce(ranks, axis=0) / (size if op == "average" else 1)
        if self.dtype in ("int32", "int64", "uint8"):
            # Integers wrap; products of up to 3 ** size need Python's own.
            bits = 8 * self._storage.itemsize
            exact = [
                _product(ranks[:, column]) if op == "product" else int(expected[column]) for column in range(period)
            ]
            signed = 0 if self._storage.kind == "u" else 1 << (bits - 1)
            wrapped = [((value + signed) % (1 << bits)) - signed for value in exact]
            return int((self.output != np.resize(np.array(wrapped, dtype=self._storage), self.count)).sum())
        encoded = np.resize(self._encode(expected), self.count)
        if op in ("sum", "min", "max"):
            return int((self.output != encoded).sum())
        # A quotient and a long product may round differently in the last place.
        bits_type = f"i{self._storage.itemsize}"
        apart = np.abs(self.output.view(bits_type).astype(np.int64) - encoded.view(bits_type).astype(np.int64))
        return int((apart > 1).sum())


def _product(column: Array) -> int:
    result = 1
    for value in column:
        result *= int(value)
    return result
