"""Head families: one folder each, with construction, lemma, bound and inverse."""

from ..expressions.composite import composite  # noqa: F401 (heads are built for composites too, by name)
from .anchor.head import AnchorHead
from .fast.activation import FastActivation
from .gate.head import GateHead
from .norm.head import NormHead
from .product.head import ProductHead
from .token.head import TokenHead

__all__ = ["AnchorHead", "FastActivation", "GateHead", "NormHead", "ProductHead", "TokenHead"]
