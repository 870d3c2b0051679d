"""Head families: one folder each, with construction, lemma, bound and inverse.

The heads themselves are loaded when they are asked for, so that whoever only checks bounds loads nothing that builds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..expressions.composite import composite  # noqa: F401 (heads are built for composites too, by name)

if TYPE_CHECKING:
    from .anchor.head import AnchorHead
    from .build import head_for
    from .chain.head import ChainHead
    from .fast.activation import FastActivation
    from .gate.head import GateHead
    from .norm.head import NormHead
    from .product.head import ProductHead
    from .token.head import TokenHead

_LAZY = {
    "AnchorHead": ".anchor.head",
    "ChainHead": ".chain.head",
    "FastActivation": ".fast.activation",
    "GateHead": ".gate.head",
    "NormHead": ".norm.head",
    "ProductHead": ".product.head",
    "TokenHead": ".token.head",
    "head_for": ".build",
}

__all__ = ["AnchorHead", "ChainHead", "FastActivation", "GateHead", "NormHead", "ProductHead", "TokenHead", "head_for"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'attnforge.heads' has no attribute '{name}'")
    return getattr(importlib.import_module(_LAZY[name], __name__), name)
