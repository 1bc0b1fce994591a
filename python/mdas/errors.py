"""What mdas raises. All are subclasses of `Error`, which is a `RuntimeError`."""

from __future__ import annotations

from mdas._core import (
    ClosedError,
    CollectiveTimeoutError,
    ConfigurationError,
    Error,
    InvalidArgumentError,
    MismatchError,
    PeerLostError,
)


class NotInitializedError(Error):
    """A call that needs a group, before `mdas.init()`."""


class NonFiniteError(Error):
    """A gradient had a NaN or an infinity, and the optimizer was told to stop then (`nan_check="raise"`)."""


__all__ = [
    "ClosedError",
    "CollectiveTimeoutError",
    "ConfigurationError",
    "Error",
    "InvalidArgumentError",
    "MismatchError",
    "NonFiniteError",
    "NotInitializedError",
    "PeerLostError",
]
