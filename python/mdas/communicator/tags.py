"""What the optimizer's operations are for: a number that travels with the call, and words for it in errors."""

from __future__ import annotations

from mdas import _core

TALLY = 0xFFFF_0000
AGREEMENT = 0xFFFF_0001
LOSS = 0xFFFF_0002
JOINING = 0xFFFF_0003
SHARDS = 0xFFFF_0004

_WORDS = {
    TALLY: "tally",
    AGREEMENT: "model, options or weights of all ranks",
    LOSS: "loss of a closure",
    JOINING: "end of a join",
    SHARDS: "mesh of the DTensor parameters",
}
# One more for each bucket.
_GRADIENT, _FIRST, _SECOND = 0xFFFC_0000, 0xFFFD_0000, 0xFFFE_0000
_BUCKETS = {
    _GRADIENT: "gradient bucket {}",
    _FIRST: "sketch of bucket {}, first exchange",
    _SECOND: "sketch of bucket {}, second exchange",
}
for _tag, _words in _WORDS.items():
    _core.name_tags(_tag, _tag, _words)
for _first, _words in _BUCKETS.items():
    _core.name_tags(_first, _first + 0xFFFF, _words)


def gradient(bucket: int) -> int:
    """The average of a bucket's gradients."""
    return _GRADIENT + bucket


def sketch(bucket: int, *, second: bool) -> int:
    """One of the two exchanges of a bucket's sketch."""
    return (_SECOND if second else _FIRST) + bucket


def words(tag: int) -> str | None:
    """What it is for; None if it is none of these."""
    pattern = _BUCKETS.get(tag & 0xFFFF_0000)
    return _WORDS.get(tag) if pattern is None else pattern.format(tag & 0xFFFF)
