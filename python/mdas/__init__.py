"""mdas: data-parallel training whose gradient exchange hides behind computation."""

from __future__ import annotations

from mdas._core import __version__

__all__ = ["__version__"]
