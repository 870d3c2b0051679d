"""Head families: construction, lemma, bound and inverse together, one family per file."""

from .anchor import AnchorHead

__all__ = ["AnchorHead"]
