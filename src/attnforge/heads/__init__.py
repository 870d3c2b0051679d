"""Head families: construction, lemma, bound and inverse together, one family per file."""

from .anchor import AnchorHead
from .gate import GateHead
from .norm import NormHead
from .product import ProductHead
from .token import TokenHead

__all__ = ["AnchorHead", "GateHead", "NormHead", "ProductHead", "TokenHead"]
