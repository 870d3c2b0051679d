"""How products err in a network: the bound of `bound` for the stored heads, and what becomes of errors that come in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...certificates.rounding import up
from ...dtypes import Array
from ...errors import CertificateError
from ...programs.enclose import Range
from ...programs.ops import Apply, Product
from ..rule import SMOOTH_CELLS, Copies, Local, Moved, Passed, Rule, Setting, or_endless
from ..slopes import Enclosure, plus
from ..stored import SelfSpec, StoredHeads
from .bound import Sides, partials, product_error
from .site import ProductSite

LEAST = 2.0**-1074  # the smallest positive number: what a product of ours loses by underflow is at most half of it


@dataclass(frozen=True)
class ProductLocal(Local):
    """`scale` is the size of the value operand where the error is proportional to it; None where it is not. `lost` is
    what underflow may take, whatever the operands are."""

    scale: float | None
    lost: float

    def share(self, size: Array) -> Array:
        """The error of a product whose value operand is at most `size`."""
        if self.scale is None:
            return np.full(size.shape, self.total)
        return self.total * np.minimum(size / self.scale * (1 + 2.0**-50), 1.0) + self.lost


def proportional(spec: SelfSpec) -> bool:
    """Whether all that heads compute vanishes with x: nothing is added to it, read beside it or stored in memory."""
    rest = (spec.b_V, spec.M_V, spec.S, spec.s, spec.W_V[:, 1:], spec.W_Q[:, :-1])
    return not any(part.any() for part in rest)


class ProductRule(Rule):
    """|x y - x' y'| <= |x| |y - y'| + |y'| |x - x'|, and the heads' own error, which may be proportional to |x|."""

    coordinates = 2  # of a query: z, and a constant that weights are added to in memory slots

    def edges(self, site: ProductSite, setting: Setting, heads: StoredHeads) -> tuple[float, ...]:
        low, high = site.intervals[1]
        step = (high - low) / SMOOTH_CELLS  # a cell more at both ends, where errors may push an argument
        return tuple(np.unique(np.linspace(low - step, high + step, SMOOTH_CELLS + 3)).tolist())

    def _specs(self, site: ProductSite, setting: Setting, heads: Sequence[StoredHeads]) -> list[SelfSpec]:
        self._fits(site, setting)
        found = list({each.identity: each.self_spec() for each in heads}.values())
        for spec in found:
            if spec.W_Q.shape[1:] != (2, self.coordinates) or spec.W_O.shape[1:] != (1, 1):
                raise CertificateError(f"the heads of %{site.op} are not those of a product")
        return found

    def _fits(self, site: ProductSite, setting: Setting) -> None:
        op = setting.op(site)
        if not isinstance(op, Product):
            raise CertificateError(f"operation %{site.op} is {op.word}, its heads compute a product")

    def local(self, site: ProductSite, setting: Setting, heads: Sequence[StoredHeads]) -> ProductLocal:
        return self._local(site, setting, heads, 0.0)

    def _local(self, site: ProductSite, setting: Setting, heads: Sequence[StoredHeads], most: float) -> ProductLocal:
        """The error when queries err by at most `most`: as if they also read x, which the bound counts as an error."""
        x, y = (setting.stretched(interval) for interval in site.intervals)
        sides = Sides(x, y)
        specs = self._specs(site, setting, heads)
        errors = [product_error(_erring(spec, sides, most), sides, setting.dtype) for spec in specs]
        scale = max(abs(v) for v in x) if all(map(proportional, specs)) else None
        # every slot's weight and value, every head's output and both sums may underflow once
        # and so may what is computed here, which is no zero for that
        lost = 16 * setting.tiny * max(float(np.abs(spec.W_O).sum()) * (1 + spec.M_K.shape[1]) for spec in specs)
        lost += 2 * LEAST
        intervals = (x,) if len(site.spans) == 1 else (y, x) if site.swapped else (x, y)
        worst = max(errors, key=lambda error: or_endless(error.total))
        return ProductLocal(intervals, worst.total, worst.rounding, scale, lost)

    def passes(
        self, site: ProductSite, setting: Setting, local: Any, ranges: list[Range], inputs: list[Array]
    ) -> Passed:
        (x, y), (e_x, e_y) = ranges, inputs
        out = x.size[..., None] * e_y + (y.size + e_y.sum(-1))[..., None] * e_x
        out = out + np.where((e_x > 0) | (e_y > 0), 2 * LEAST, 0.0)
        value, e_value = (y, e_y) if site.swapped else (x, e_x)
        return out, local.share(value.size + e_value.sum(-1))

    def _partials(
        self, site: ProductSite, setting: Setting, heads: StoredHeads, x: Enclosure, y: Enclosure
    ) -> tuple[Enclosure, Enclosure]:
        """Derivatives by the value operand and by the query operand: x G(y) + H(y) plus the skip (lemma H2)."""
        return partials(heads.self_spec(), setting.stretched(site.intervals[1]), x, y)

    def slopes(
        self, site: ProductSite, setting: Setting, heads: Sequence[StoredHeads], inputs: list[Enclosure]
    ) -> list[Enclosure]:
        first, second = (inputs[-1], inputs[0]) if site.swapped else (inputs[0], inputs[-1])
        found = []
        for c, each in enumerate(heads):
            x, y = ((low[..., c], high[..., c]) for low, high in (first, second))
            found.append(self._partials(site, setting, each, x, y))
        partials = [(np.stack([f[i][0] for f in found], -1), np.stack([f[i][1] for f in found], -1)) for i in (0, 1)]
        if len(inputs) == 1:  # a square: both operands are one value
            return [plus(*partials)]
        return partials[::-1] if site.swapped else partials

    def describe(self, site: ProductSite, heads: Sequence[StoredHeads]) -> str:
        return f"{heads[0].tables['M_K'].shape[1] + 1} nodes"

    # -- the plain form -------------------------------------------------------------------------------------------

    def written(self, reads: list[tuple[Array, Array]], skip: list[float], bias: float, once: bool) -> Array | None:
        """A product has the linear part c_1 x + c_2 y + s, so that its column is (x - c_2)(y - c_1) - (c_1 c_2 + s)."""
        one, two = (skip[0] / 2, skip[0] / 2) if once else skip
        first, second = (_away(ends, shift) for ends, shift in zip(reads, (two, one), strict=True))
        rest = abs(one * two + bias) + 2.0**-46 * (abs(one * two) + abs(bias))
        return first * second + rest

    def loosened(
        self, site: ProductSite, setting: Setting, heads: Sequence[StoredHeads], known: dict[str, float]
    ) -> ProductLocal:
        return self._local(site, setting, heads, known["query"])

    def copied(
        self, site: ProductSite, setting: Setting, local: Any, heads: Sequence[StoredHeads], copies: Copies,
        ranges: list[Range], moved: Moved,
    ) -> None:  # fmt: skip
        """`loosened` has counted the queries; a value's error goes through |W_O| times the self slot's weight."""
        sides = Sides(*(setting.stretched(interval) for interval in site.intervals))
        gain = max(_self_gain(spec, sides, copies.known["query"]) for spec in self._specs(site, setting, heads))
        for rho, (c,) in copies.heads:
            moved.broken[:] |= rho["query"][..., 1:].any((1, 2)) | rho["key"].any((1, 2))
            moved.extra[..., c] += gain * rho["value"][..., 0]


class SquareRule(ProductRule):
    """A square by product heads: |x^2 - x'^2| <= (2 |x| + e) e, and the heads' own error is proportional to |x|."""

    def _fits(self, site: ProductSite, setting: Setting) -> None:
        op = setting.op(site)
        if not isinstance(op, Apply) or op.function.name != "square" or op.function.source is not None:
            raise CertificateError(f"operation %{site.op} is {op.word}, its heads compute a square")

    def squared(self, local: Any) -> tuple[float, float] | None:
        return None if local.scale is None else (float(up(local.total / local.scale)), local.lost)

    def passes(
        self, site: ProductSite, setting: Setting, local: Any, ranges: list[Range], inputs: list[Array]
    ) -> Passed:
        (x,), (e,) = ranges, inputs
        passed = (2 * x.size + e.sum(-1))[..., None] * e
        return passed + np.where(e > 0, LEAST, 0.0), local.share(x.size + e.sum(-1))


def _away(ends: tuple[Array, Array], shift: float) -> Array:
    """The largest |x - shift|, rounded up."""
    found = np.maximum(np.abs(ends[0] - shift), np.abs(ends[1] - shift))
    return up(found + 2.0**-50 * abs(shift), 8)


def _erring(spec: SelfSpec, sides: Sides, most: float) -> SelfSpec:
    """The same heads with queries that also read x, which `product_error` counts as an error: one of size `most`."""
    if most == 0:
        return spec
    query = spec.W_Q.copy()
    query[:, 0, 0] += most / sides.sizes[0] * (1 + 2.0**-40)
    return replace(spec, W_Q=query)


def _self_gain(spec: SelfSpec, sides: Sides, most: float) -> float:
    """How much of an error of its value a head passes on: |W_O| times the self slot's weight at the largest logit."""
    known = np.array_equal(spec.b_K, [[1.0, 0.0]] * len(spec.b_K)) and np.all(spec.b_Q[:, 1] == 1)
    if not known or not np.all(np.abs(spec.M_K[..., 0]) <= 1):
        return float(np.abs(spec.W_O).max())  # no weight is more than 1
    gains = []
    for h in range(len(spec.W_Q)):
        z = max(abs(float(spec.W_Q[h, -1, 0]) * y + float(spec.b_Q[h, 0])) for y in sides.query) + most
        rest = math.fsum(math.exp((tau - 1) * z + log) for tau, log in spec.M_K[h])
        gains.append(abs(float(spec.W_O[h, 0, 0])) / (1 + rest))
    return max(gains) * (1 + 2.0**-20) * (1 + 2.0**-10)


RULES: dict[str, Rule] = {"product": ProductRule(), "square": SquareRule()}
