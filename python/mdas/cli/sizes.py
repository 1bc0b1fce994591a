"""What can be asked of a benchmark: element types, reductions, sizes."""

from __future__ import annotations

from collections.abc import Iterator

ITEMSIZE = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8, "uint8": 1}
"""Element types and their bytes."""
OPS = ("sum", "average", "min", "max", "product")


def parse_size(text: str) -> int:
    """Bytes from "4", "64K", "1.5M", "2G" (powers of 1024).

    Raises:
        ValueError: not a size.
    """
    factors = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    digits = text.upper().removesuffix("B")
    factor = factors.get(digits[-1:], 1)
    value = float(digits.rstrip("KMG")) * factor
    if not (0 <= value < float("inf")):
        raise ValueError(f"{text!r} is not a size")
    return int(value)


def series(begin: int, end: int, factor: float) -> Iterator[int]:
    """Bytes from `begin` to `end`, each `factor` times the one before."""
    size = float(begin)
    while size <= end:
        yield int(size)
        size = max(size * factor, size + 1)
