"""The weights of a product by tanh pairs."""

from __future__ import annotations

from collections.abc import Sequence

from attnforge.heads.construction import Order, Planned, SelfBuilder, fat
from attnforge.heads.product.construction import ProductSpec
from attnforge.heads.stored import SelfSpec
from attnforge.programs.ops import Product

from .site import PairSite


class PairBuilder(SelfBuilder):
    def propose(self, order: Order, made: Sequence[Planned]) -> Planned | None:
        if not isinstance(order.op, Product):
            return None
        x, y = fat(order.hull(0)), fat(order.hull(1))
        spec = ProductSpec.tanh(max(abs(v) for v in y), order.dtype).heads
        return Planned(PairSite(order.number, (x, y)), spec)

    def spec(self, planned: Planned) -> SelfSpec:
        assert isinstance(planned.parts, SelfSpec)
        return planned.parts


BUILDERS = {"tanh product": PairBuilder()}
