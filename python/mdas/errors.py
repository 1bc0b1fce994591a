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


__all__ = [
    "ClosedError",
    "CollectiveTimeoutError",
    "ConfigurationError",
    "Error",
    "InvalidArgumentError",
    "MismatchError",
    "NotInitializedError",
    "PeerLostError",
]
