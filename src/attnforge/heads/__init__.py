"""Head families: construction, lemma, bound and inverse together, one family per file."""

from .anchor.head import AnchorHead
from .fast.activation import FastActivation
from .gate.head import GateHead
from .norm.head import NormHead
from .product.head import ProductHead
from .token.head import TokenHead

__all__ = ["AnchorHead", "FastActivation", "GateHead", "NormHead", "ProductHead", "TokenHead"]
