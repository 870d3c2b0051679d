"""How errors travel through a network: from the columns of one stage to the next (section H of docs/theory.md).

For every value the analysis keeps, on many cells of the box at once, a bound on |computed - exact| split by the site
that caused
it. The rules are linear in what comes in, so the parts at the worst cell are a ledger that adds up to the bound.
What is
executed is read from the network itself: an affine map by the difference of its stored numbers from the exact ones,
a head by
the certified error of its stored table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import CertificateError
from ..heads.gate import gate_domain
from ..heads.gate_bounds import gate_error
from ..heads.gate_specs import gate_spec
from ..heads.product_bounds import Sides, product_error
from ..ir.clipped import clipped
from ..ir.enclose import Range
from ..ir.largest import Largest
from ..ir.ops import Apply, Array, Constant
from ..ir.positions import reads as values_read
from ..ir.slopes import lipschitz, modulus, spread
from ..ir.univariate import Univariate
from ..lower.assemble import affine_map, folding_error, site_spec, tables_of
from ..lower.forms import Column, forms
from ..lower.layout import Layout, Site, Stage
from ..network import AttentionLayer, AttentionOnly
from .interpolation import CELLS, AnchorBound, AnchorWeights, anchor_bound
from .rounding import gamma, unit

Errors = dict[int, Array]  # value -> (cell, token, channel, source); the last source is the affine maps


@dataclass(frozen=True)
class Local:
    """The certified error of one site's heads on the interval(s) they were built for."""

    intervals: tuple[tuple[float, float], ...]
    total: float
    rounding: float
    profile: AnchorBound | None = None
    scale: float | None = None  # of a product that is not centred: its error is proportional to one operand

    def over(self, low: Array, high: Array) -> Array:
        """The error for arguments in [low, high]."""
        return np.full(low.shape, self.total) if self.profile is None else self.profile.over(low, high)

    def share(self, size: Array) -> Array:
        """The error of a product whose first operand is at most `size`."""
        if self.scale is None:
            return np.full(size.shape, self.total)
        return self.total * np.minimum(size / self.scale * (1 + 2.0**-50), 1.0)


def anchor_edges(fn: Univariate, low: float, high: float, flat: Array | None = None) -> Array:
    """First cells for the bound of a table: dense where its anchors are, kinks on boundaries, crowded around kinks."""
    inner = np.linspace(low, high, CELLS + 1) if flat is None else flat
    knots = np.array([k for k in fn.knots if low < k < high])
    crowd = [k + (end - k) * 4.0 ** -np.arange(1.0, 28.0) for k in knots for end in (low, high)]
    places = np.concatenate([inner, knots, *crowd])
    return np.unique(np.concatenate([[low], places[(places > low) & (places < high)], [high]]))


@dataclass(frozen=True)
class Outcome:
    """Errors of the output on each cell: split by source at the worst output, what a relative tolerance allows
    there, and the
    largest error of any output."""

    parts: Array
    allowance: Array
    largest: Array


class Propagation:
    """The error analysis of one network: local bounds once, then the rules on as many cells as wanted."""

    def __init__(
        self,
        layout: Layout,
        network: AttentionOnly,
        flats: Sequence[Array],
        dtype: torch.dtype,
        origin: torch.dtype | None = None,
        stretch: float = 0.0,
    ):
        """`origin` is the dtype the weights were made in; heads are bounded `stretch` beyond their intervals."""
        self.layout, self.network, self.dtype, self.u = layout, network, dtype, unit(dtype)
        self.origin, self.stretch = origin or dtype, stretch
        self.forms = forms(layout.program)
        self.sites = layout.sites
        self.flats = flats
        self._cache: dict[tuple[int, str], AnchorBound] = {}
        self._steepness: dict[int, Largest] = {}
        self._maps: dict[int, tuple[Array, Array, Array, Array]] = {}
        self.local = {
            site.op: self._local(stage, i, site, flats) for i, stage in enumerate(layout.stages) for site in stage.sites
        }

    def layer(self, index: int) -> AttentionLayer:
        """One of the layers: affine maps are even, attention layers odd."""
        layer = self.network.layers[index]
        assert isinstance(layer, AttentionLayer)
        return layer

    def _stretched(self, interval: Sequence[float], fn: Univariate | None = None) -> tuple[float, float]:
        """An interval made longer by `stretch` of itself on both sides, as far as the function's domain allows."""
        low, high = (float(x) for x in interval)
        more = self.stretch * (high - low)
        wide_low, wide_high = low - more, high + more
        if fn is not None:
            for end in (fn.domain.lo, fn.domain.hi, *fn.domain.poles):
                if end < low:
                    wide_low = max(wide_low, 0.5 * (low + end))
                if end > high:
                    wide_high = min(wide_high, 0.5 * (high + end))
        return wide_low, wide_high

    def _local(self, stage: Stage, index: int, site: Site, flats: Sequence[Array]) -> Local:
        config = site.config
        if site.family == "anchor":
            number = int(config["table"])
            group = self.layer(2 * index + 1).heads()[list(tables_of(stage)).index(number)]
            keys, value = (t.detach().cpu().double().numpy()[0] for t in (group.M_K, group.M_V))
            slope, constant = rounded(rounded(np.array(config["skip"], dtype=np.float64), self.origin), self.dtype)
            skip = (float(slope), float(constant))
            table = AnchorWeights(keys[:, 0], keys[:, 1], value[:, 0], -float(group.b_Q[0, 0]), skip)
            op = self.layout.program.ops[site.op]
            assert isinstance(op, Apply)
            fn = clipped(op.function)
            low, high = self._stretched(config["interval"], op.function)
            key = (number, fn.name)
            if key not in self._cache:
                edges = anchor_edges(fn, low, high, flats[number])
                self._cache[key] = anchor_bound(table, fn, edges, self.dtype)
            found = self._cache[key]
            return Local(((low, high),), found.bound, found.rounding, found)
        if site.family == "gate":
            low, high = self._stretched(config["interval"])
            spec = gate_spec(config["name"], float(config["sharpness"]), **config["parameters"])
            error = gate_error(
                spec.heads.rounded(self.origin).rounded(self.dtype),
                spec.target,
                gate_domain(spec, low, high, self.dtype),
                self.dtype,
            )
            return Local(((low, high),), error.total, error.rounding)
        if site.family in ("product", "square"):
            x, y = (self._stretched(interval) for interval in config["intervals"])
            stored = site_spec(site).rounded(self.origin).rounded(self.dtype)
            found_product = product_error(stored, Sides(x, y), self.dtype)
            reads = (y, x) if config["swapped"] else (x, y)
            centred = config["centre"] != [0.0, 0.0]
            scale = None if centred else max(abs(v) for v in x)
            return Local(reads, found_product.total, found_product.rounding, scale=scale)
        if site.family not in LOCALS:
            raise CertificateError(f"there is no error rule for heads of the family '{site.family}'")
        return LOCALS[site.family](self, site, self.layer(2 * index + 1))

    def run(self, found: list[Range], rtol: float = 0.0) -> Outcome:
        """The error of the output on each cell; infinite on a cell where nothing can be said."""
        with np.errstate(invalid="ignore", over="ignore"):
            rows = self._run(found)
            output = found[self.layout.program.output]
            least = output.least if self.layout.program.output_rows == "all" else output.least[:, :1]
            cells, sources = len(rows), rows.shape[-1]
            totals, allowed = rows.sum(-1).reshape(cells, -1), rtol * least.reshape(cells, -1)
            at = np.argmax(totals - allowed, -1), np.arange(cells)
            parts, allowance = rows.reshape(cells, -1, sources)[at[1], at[0]], allowed[at[1], at[0]]
            largest = totals.max(-1)
        blind = np.isnan(parts).any(-1) | np.isnan(largest)
        for r in found:
            blind |= ~np.all(np.isfinite(r.low) & np.isfinite(r.high), axis=(1, 2))
        parts[blind], largest[blind] = np.inf, np.inf
        return Outcome(parts, allowance, largest)

    def _run(self, found: list[Range]) -> Array:
        """The errors of the outputs, shape (cell, token, channel, source)."""
        errors: Errors = {}
        cells, tokens = found[0].low.shape[:2]
        sources = len(self.sites) + 1
        for value in dict.fromkeys(value for value, _ in self.layout.first):
            op = self.layout.program.ops[value]
            errors[value] = np.zeros((cells, tokens, op.width, sources))
            if isinstance(op, Constant):  # stored in the dtype that ships
                errors[value][..., -1] = np.abs(rounded(rounded(op.value, self.origin), self.dtype) - op.value)
        for i, stage in enumerate(self.layout.stages):
            reads = self._affine(2 * i, stage.before, stage.columns, errors, found)
            for site in stage.sites:
                inputs = [
                    np.stack([reads[value, c] for c in range(self.layout.program.ops[value].width)], 2)
                    for value in values_read(self.layout.program, site.op)
                ]
                errors[site.op] = self._site(site, inputs, found)
        last = self._affine(2 * len(self.layout.stages), self.layout.last, self.layout.output, errors, found)
        output = np.stack([last[column] for column in self.layout.output], 2)
        return output if self.layout.program.output_rows == "all" else output[:, :1]

    def _affine(
        self, index: int, before: Sequence[Column], after: Sequence[Column], errors: Errors, found: list[Range]
    ) -> dict[Column, Array]:
        """The errors of the columns that an affine map makes."""
        if index not in self._maps:
            self._maps[index] = self._stored_map(index, before, after)
        stored, stored_bias, off, off_bias = self._maps[index]
        size = np.stack([found[v].size[..., c] for v, c in before], -1)
        coming = np.stack([errors[v][..., c, :] for v, c in before], 2)
        weight = np.abs(stored)
        out = np.einsum("ctbs,bw->ctws", coming, weight)
        terms = _roundings(stored, stored_bias)
        reach = (size + coming.sum(-1)) @ weight + np.abs(stored_bias)
        own = size @ off + off_bias + np.where(terms > 0, gamma(terms, self.u), 0.0) * reach
        out[..., -1] += own
        out *= 1 + (len(before) + out.shape[-1] + 8) * 2.0**-52
        return {column: out[:, :, i] for i, column in enumerate(after)}

    def _stored_map(
        self, index: int, before: Sequence[Column], after: Sequence[Column]
    ) -> tuple[Array, Array, Array, Array]:
        """An affine map as stored, and how far it is from the exact one, entry by entry."""
        layer = self.layer(index)
        assert layer.S is not None
        assert layer.s is not None
        stored, stored_bias = layer.S.detach().cpu().double().numpy(), layer.s.detach().cpu().double().numpy()
        exact, exact_bias = affine_map(self.forms, before, after)
        slack, slack_bias = folding_error(self.forms, before, after)
        off = np.abs(stored - exact) * (1 + 2.0**-50) + slack
        off_bias = np.abs(stored_bias - exact_bias) * (1 + 2.0**-50) + slack_bias
        return stored, stored_bias, off, off_bias

    def _site(self, site: Site, inputs: list[Array], found: list[Range]) -> Array:
        """The error of a site's result: what comes in, passed on, and what its own heads add."""
        ranges = [found[value] for value in values_read(self.layout.program, site.op)]
        out, added = PASSES[site.family](self, site, ranges, inputs)
        out = out * (1 + 2.0**-48)
        out[..., self.sites.index(site)] += added
        out[self._outside(site, ranges, [e.sum(-1) for e in inputs])] = np.inf
        return out

    def _outside(self, site: Site, ranges: list[Range], totals: list[Array]) -> Array:
        """The cells on which an argument, errors included, may leave the interval its heads are certified on."""
        bad = np.zeros(len(ranges[0].low), dtype=bool)
        for (low, high), r, e in zip(self.local[site.op].intervals, ranges, totals, strict=False):
            inner_low, inner_high = self._defined(site, r)
            bad |= np.any((inner_low - e < low) | (inner_high + e > high), axis=(1, 2))
        return bad

    def _defined(self, site: Site, r: Range) -> tuple[Array, Array]:
        """A range cut to the domain of the function that reads it: outside the target is not defined."""
        op = self.layout.program.ops[site.op]
        if not isinstance(op, Apply):
            return r.low, r.high
        domain = op.function.domain
        low = np.clip(r.low, domain.lo, domain.hi)
        return low, np.maximum(low, np.minimum(r.high, domain.hi))

    def apply(self, site: Site, ranges: list[Range], inputs: list[Array]) -> tuple[Array, Array]:
        """A univariate function: error times slope, or, where the slope is unbounded, what its range allows."""
        op, local, (r,), (e,) = self.layout.program.ops[site.op], self.local[site.op], ranges, inputs
        assert isinstance(op, Apply)
        total = e.sum(-1)
        widest = float(np.max(total)) * (1 + 2.0**-40)
        low, high = self._defined(site, r)
        low, high = low - widest, high + widest
        slope = self._slopes(site).over(low, high)
        loose = modulus(op.function, total)
        steep = ~np.isfinite(slope) & ~np.isfinite(loose)
        if steep.any():
            loose[steep] = spread(op.function, low[steep], high[steep])
        most = np.minimum(np.where(total > 0, slope * np.where(total > 0, total, 1.0), 0.0), loose)
        share = e / np.where(total > 0, total, 1.0)[..., None]
        return np.where(e > 0, share * most[..., None], 0.0), local.over(low, high)

    def _slopes(self, site: Site) -> Largest:
        """The slopes of a site's function on cells of its interval, for range queries."""
        if site.op not in self._steepness:
            op = self.layout.program.ops[site.op]
            assert isinstance(op, Apply)
            low, high = self.local[site.op].intervals[0]
            flat = self.flats[int(site.config["table"])] if site.family == "anchor" else None
            edges = anchor_edges(op.function, low, high, flat)
            self._steepness[site.op] = Largest(edges[:-1], lipschitz(op.function, edges[:-1], edges[1:]))
        return self._steepness[site.op]

    def product(self, site: Site, ranges: list[Range], inputs: list[Array]) -> tuple[Array, Array]:
        """|x y - x' y'| <= |x| |y - y'| + |y'| |x - x'|."""
        (x, y), (e_x, e_y), local = ranges, inputs, self.local[site.op]
        out = x.size[..., None] * e_y + (y.size + e_y.sum(-1))[..., None] * e_x
        value, e_value = (y, e_y) if site.config["swapped"] else (x, e_x)
        return out, local.share(value.size + e_value.sum(-1))

    def square(self, site: Site, ranges: list[Range], inputs: list[Array]) -> tuple[Array, Array]:
        """A square by product heads: |x^2 - x'^2| <= (2 |x| + e) e, and the heads' own error is proportional to |x|."""
        (x,), (e,), local = ranges, inputs, self.local[site.op]
        out = (2 * x.size + e.sum(-1))[..., None] * e
        return out, local.share(x.size + e.sum(-1))


def rounded(value: Array, dtype: torch.dtype) -> Array:
    """Numbers as a dtype stores them."""
    return torch.from_numpy(value.copy()).to(dtype).double().numpy()


def _roundings(matrix: Array, bias: Array) -> Array:
    """How many roundings a column of Z S + s can suffer: none when it is one entry times a power of two."""
    used = matrix != 0
    count = used.sum(0)
    mantissa, _ = np.frexp(np.abs(matrix))
    exact = np.all(~used | (mantissa == 0.5), 0)
    products = np.where(exact, 0, 1)
    return np.maximum(count - 1, 0) + products * (count > 0) + ((bias != 0) & (count > 0))


Pass = Callable[[Propagation, Site, list[Range], list[Array]], tuple[Array, Array]]
#: How each family passes errors on: (error coming in, multiplied; error its own heads add).
PASSES: dict[str, Pass] = {
    "anchor": Propagation.apply,
    "gate": Propagation.apply,
    "product": Propagation.product,
    "square": Propagation.square,
}
#: The certified error of one site's own heads, for families beyond anchors, gates and products.
LOCALS: dict[str, Callable[[Propagation, Site, AttentionLayer], Local]] = {}

from . import rules_tokens  # noqa: E402, F401 (adds its rules to the tables above)
