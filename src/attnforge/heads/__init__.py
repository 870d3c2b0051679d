"""Head families: construction, lemma, bound and inverse together, one family per file."""

from .anchor import AnchorHead
from .fast_activation import FastActivation
from .gate import GateHead
from .norm import NormHead
from .product import ProductHead
from .token import TokenHead

__all__ = ["AnchorHead", "FastActivation", "GateHead", "NormHead", "ProductHead", "TokenHead"]
