"""Reading networks back: `load` and `check`, for every family there is."""

from __future__ import annotations

from . import blackbox, compiled, heads  # noqa: F401  (registers the families that files may name)
from .certify.storage import check, load

__all__ = ["check", "load"]
