"""Reading networks back: `load` and `check`, for every family there is, and for the folders of converted models."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from .certificates import certified as networks

__all__ = ["check", "load"]

networks.HOMES.update(
    {
        "anchor": "attnforge.heads.anchor.head",
        "gate": "attnforge.heads.gate.head",
        "product": "attnforge.heads.product.head",
        "norm": "attnforge.heads.norm.head",
        "token": "attnforge.heads.token.head",
        "fast": "attnforge.heads.fast.activation",
        "chain": "attnforge.heads.chain.head",
        "network": "attnforge.compiler.compiled",
        "plain": "attnforge.export.plain.transformer",
        "blackbox-grid": "attnforge.blackbox.grid",
        "blackbox-table": "attnforge.blackbox.result",
        "blackbox-ridge": "attnforge.blackbox.ridge",
        "theorem-ramp": "attnforge.theorems.ramps",
        "theorem-universal": "attnforge.theorems.universal",
        "theorem-cells": "attnforge.theorems.partition",
    }
)


def load(path: str | Path) -> Any:
    """A network or head from its file, a converted model from its folder; raises `CertificateError` when they are
    unreadable, truncated or tampered with."""
    return _conversions().load(path) if Path(path).is_dir() else networks.load(path)


def check(path: str | Path) -> Any:
    """Recompute what a file states: its `Certificate`, or the `Conversion` of a folder with every site certified
    again; raises `CertificateError` if it does not hold."""
    return _conversions().check(path) if Path(path).is_dir() else networks.check(path)


def _conversions() -> ModuleType:
    """Converted models, loaded for their folders alone."""
    from .conversion import storage

    return storage
