"""Errors of a product by tanh pairs: those of any product, for heads with one query coordinate."""

from __future__ import annotations

from attnforge.heads.product.rule import ProductRule


class PairRule(ProductRule):
    coordinates = 1


RULES = {"tanh product": PairRule()}
