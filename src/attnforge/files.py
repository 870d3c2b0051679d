"""Reading networks back: `load` and `check`, for every family there is, and for the folders of converted models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .certificates import storage as networks
from .compiler import compiled  # noqa: F401  (registers the families that files may name)
from .conversion import storage as conversions

__all__ = ["check", "load"]


def load(path: str | Path) -> Any:
    """A network or head from its file, a converted model from its folder; raises `CertificateError` when they are
    unreadable, truncated or tampered with."""
    return conversions.load(path) if Path(path).is_dir() else networks.load(path)


def check(path: str | Path) -> Any:
    """Recompute what a file states: its `Certificate`, or the `Conversion` of a folder with every site certified
    again; raises `CertificateError` if it does not hold."""
    return conversions.check(path) if Path(path).is_dir() else networks.check(path)
