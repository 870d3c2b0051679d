"""How errors travel through a network: from the columns of one stage to the next (section H of docs/theory.md).

For every value the analysis keeps, on many cells of the box at once, a bound on |computed - exact| split by the site
that caused
it. The rules are linear in what comes in, so the parts at the worst cell are a ledger that adds up to the bound.
What is
executed is read from the network itself: an affine map by the difference of its stored numbers from the exact ones,
a head by
the certified error of its stored table.

How errors travel through operations on whole tokens and between tokens (sections A5, D, G and H of docs/theory.md).

Every rule has two halves. *Passed*: how far the exact operation moves when its arguments do, linear in the parts of
what comes in; where a bound is not linear (tanh), the parts are scaled so that they add up to it. *Added*: how far the
heads are from the exact operation at the arguments they really see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..certificates.rounding import EXP_ULPS, TINY, gamma, unit, up
from ..dtypes import Array
from ..errors import CertificateError
from ..functions.piecewise import clipped
from ..functions.queries import Largest, lipschitz, modulus, spread
from ..functions.univariate import Univariate
from ..heads.anchor.bound import CELLS, AnchorBound, AnchorWeights, anchor_bound
from ..heads.gate.bound import gate_error
from ..heads.gate.construction import gate_spec
from ..heads.gate.head import gate_domain
from ..heads.norm.fit import layer_error
from ..heads.product.bound import Sides, product_error
from ..heads.token.bound import DEAD, fixed_terms, peak_error
from ..network import AttentionLayer, AttentionOnly
from ..programs.enclose import RULES, Range, normalised_size
from ..programs.ops import Apply, Attention, Constant, Mix, Normalise
from ..programs.positions import reads as values_read
from .assemble import HEADS, affine_map, folding_error, shipped_mask, site_spec, tables_of
from .layout import Column, Layout, Site, Stage, forms

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



Passed = tuple[Array, Array]


def worst(e: Array, axis: int, among: npt.NDArray[np.bool_] | None = None) -> Array:
    """The parts of the largest total along an axis: they add up to the maximum, which a maximum of parts does not.

    `among` picks the candidates; at least one must be left.
    """
    total = e.sum(-1)
    if among is not None:
        total = np.where(among, total, -1.0)
    at = np.argmax(total, axis)
    return np.take_along_axis(e, np.expand_dims(at, (axis, -1)), axis).squeeze(axis)


def scaled(parts: Array, bound: Array) -> Array:
    """Parts (..., source) made to add up to a bound (...) of what all of them do together."""
    total = parts.sum(-1)
    factor = np.where(total > 0, bound / np.where(total > 0, total, 1.0), 0.0)
    return np.where(parts > 0, factor[..., None] * parts, 0.0) * (1 + (parts.shape[-1] + 8) * 2.0**-52)


def _weights_move(d: Array) -> Array:
    """Total variation of a softmax whose logits move by at most d (A5)."""
    return np.minimum(up(np.tanh(0.5 * d), 8), 1.0)


def _softmax_local(propagation: Propagation, site: Site, layer: AttentionLayer) -> Local:
    low, high = (float(x) for x in site.config["interval"])
    width = propagation.layout.program.ops[site.op].width
    own = float(_softmax_rounding(propagation, width, np.array(high - low), np.array(1.0)))
    return Local(((low, high),), own, own)


def _softmax_rounding(propagation: Propagation, width: int, reach: Array, weight: Array) -> Array:
    """What evaluating a softmax costs a weight: shifted logits err by u reach, the exponential by 2 u, sum and quotient
    by `width` + 3 roundings, underflow by `tiny`; keys, values and projections are identities and cost nothing."""
    d = up(propagation.u * reach + EXP_ULPS * propagation.u)
    moved = np.minimum(up(weight * np.expm1(2 * d), 8), _weights_move(d))
    return up(moved + gamma(width + 3, propagation.u) * (weight + moved) + 4 * width * TINY[propagation.dtype], 8)


def _softmax(propagation: Propagation, site: Site, ranges: list[Range], inputs: list[Array]) -> Passed:
    """Logits that err by at most d change p_i by at most p_i (e^2d - 1), and by at most tanh(d/2)."""
    (z,), (e,) = ranges, inputs
    op = propagation.layout.program.ops[site.op]
    weight = RULES[type(op)](op, ranges, z.low, z.high).high
    parts, total = worst(e, 2), e.sum(-1)
    d = up(parts.sum(-1), parts.shape[-1] + 4)[..., None]
    with np.errstate(over="ignore"):
        moved = np.minimum(up(weight * np.expm1(2 * d), 8), _weights_move(d))
    passed = scaled(np.broadcast_to(parts[:, :, None], e.shape), moved)
    reach = np.max(z.high + total, -1, keepdims=True) - np.min(z.low - total, -1, keepdims=True)
    return passed, _softmax_rounding(propagation, op.width, up(reach), np.minimum(weight + moved, 1.0))


def _attention_local(propagation: Propagation, site: Site, layer: AttentionLayer) -> Local:
    intervals = tuple((float(a), float(b)) for a, b in site.config["intervals"])
    op = propagation.layout.program.ops[site.op]
    assert isinstance(op, Attention)
    tokens = propagation.layout.program.tokens
    query, key, value = (np.full((1, tokens, 1), max(abs(a), abs(b))) for a, b in intervals)
    width = int(site.config["width"])
    logit = abs(op.scale) * width * query * key.transpose(0, 2, 1)
    mask = op.logit_mask(tokens)
    visible = mask > -float(site.config["omega"])
    offset = np.where(visible, np.abs(np.where(visible, mask, 0.0)), 0.0)
    d = np.where(visible, _logit_rounding(propagation, op, logit, offset, width + 2), 0.0).max(-1)[..., None]
    own = float(np.max(_reading(propagation, d, intervals[2][1] - intervals[2][0], value[:, :1])))
    return Local(intervals, own, own)


def _logit_rounding(propagation: Propagation, op: Attention, content: Array, offset: Array, terms: int) -> Array:
    """How far computed logits (cell, query, key) are from the exact ones of the same queries and keys.

    `content` bounds |scale| sum |q| |k|, `offset` is |mask|. An inner product in any order, the rounded scale and mask,
    and, for the softmax, the difference to the largest logit and the exponential.
    """
    u = propagation.u
    size = content + offset
    largest = size.max(-1, keepdims=True)
    return up((gamma(terms, u) + 2 * u) * size + 2 * u * (size + largest) + EXP_ULPS * u, 16)


def _reading(propagation: Propagation, d: Array, spread: Array | float, value: Array) -> Array:
    """What evaluating a head over n tokens adds: weights off by logits, their sum, and the sum over values."""
    n, tiny = propagation.layout.program.tokens, TINY[propagation.dtype]
    return up(_weights_move(d) * spread + gamma(2 * n + 4, propagation.u) * value + 4 * n * tiny * (1 + value), 8)


def _attention(propagation: Propagation, site: Site, ranges: list[Range], inputs: list[Array]) -> Passed:
    """softmax(s q.k + m) v. Logits err by d_ij = |s| sum (|q_i| e_kj + |k_j + e_kj| e_qi), the weights of token i by
    tanh(max_j d_ij / 2) in total variation, so the result by that times the spread of v, and by max_j e_vj.

    The mask is the product of one-hot positions with its rows, and joins q and k as further channels. Hidden tokens
    must lie so far below the best visible one that their exponential is an exact 0; else nothing is certified.
    """
    op = propagation.layout.program.ops[site.op]
    assert isinstance(op, Attention)
    value, e_v = ranges[2], inputs[2]
    q, e_q = abs(op.scale) * ranges[0].size, abs(op.scale) * inputs[0]
    k, e_k = ranges[1].size, inputs[1]
    tokens, width = value.low.shape[1], q.shape[-1]
    content = np.einsum("cik,cjk->cij", q + e_q.sum(-1), k + e_k.sum(-1)) * (1 + (width + 16) * 2.0**-52)
    terms = width + 2
    mask = shipped_mask(op, site)
    if mask is not None:
        e_p = inputs[3]
        e_row = np.einsum("cjts,pt->cjps", e_p, np.abs(mask))
        q, k = _wider(q, np.eye(tokens)), _wider(k, np.abs(mask).T)
        e_q, e_k = np.concatenate([e_q, e_p], 2), np.concatenate([e_k, e_row], 2)
        terms += 2 * tokens if e_p.any() else 1
    parts = np.einsum("cik,cjks->cijs", q, e_k) + np.einsum("cjk,ciks->cijs", k + e_k.sum(-1), e_q)
    parts *= 1 + (2 * q.shape[-1] + parts.shape[-1] + 8) * 2.0**-52
    exact_mask = op.logit_mask(tokens)
    omega = float(site.config["omega"])
    visible = exact_mask > -omega
    offset = np.where(visible, exact_mask, -omega)
    rounding = _logit_rounding(propagation, op, content, np.abs(offset) * visible, terms)
    moving = worst(parts, 2, visible)
    d = up(moving.sum(-1), parts.shape[-1] + 4)[..., None]
    shown = visible[None, :, :, None]
    high = np.where(shown, value.high[:, None], -np.inf).max(2)
    low = np.where(shown, value.low[:, None], np.inf).min(2)
    spread = up(high - low)
    passed = scaled(np.broadcast_to(moving[:, :, None], (*spread.shape, parts.shape[-1])), _weights_move(d) * spread)
    wide = np.broadcast_to(e_v[:, None], (len(e_v), tokens, *e_v.shape[1:]))
    passed = passed + worst(wide, 2, shown)
    size = np.where(shown, (value.size + e_v.sum(-1))[:, None], 0.0).max(2)
    own = np.where(visible, rounding, 0.0).max(-1)[..., None]
    added = _reading(propagation, own, spread + 2 * e_v.sum(-1).max(1)[:, None], size)
    if mask is not None and not visible.all():
        slip = content + parts.sum(-1) + 4 * gamma(terms + 4, propagation.u) * (content + omega)
        hidden = ~visible & (np.tril(np.ones_like(visible)) if op.causal else True)
        above = np.where(hidden, slip - omega, -np.inf).max(-1)
        best = np.where(visible, offset - slip, -np.inf).max(-1)
        added = np.where((above + DEAD[propagation.dtype] < best)[..., None], added, np.inf)
    return passed, added


def _wider(x: Array, more: Array) -> Array:
    return np.concatenate([x, np.broadcast_to(more, (len(x), *more.shape))], -1)


def _mix_local(propagation: Propagation, site: Site, layer: AttentionLayer) -> Local:
    op = propagation.layout.program.ops[site.op]
    assert isinstance(op, Mix)
    low, high = (float(x) for x in site.config["interval"])
    heads = HEADS[site.family](op, site, propagation.dtype)
    terms = fixed_terms(heads, op.matrix, op.width, low, high)
    rounding = math.fsum(t.value for t in terms if t.source == "rounding")
    return Local(((low, high),), float(up(math.fsum(t.value for t in terms))), rounding)


def _mix(propagation: Propagation, site: Site, ranges: list[Range], inputs: list[Array]) -> Passed:
    """|M| e; where positions do not arrive exactly (after training), what that does to the weights of the heads."""
    op = propagation.layout.program.ops[site.op]
    assert isinstance(op, Mix)
    passed = np.einsum("ij,cjks->ciks", np.abs(op.matrix), inputs[0]) * (1 + (len(op.matrix) + 4) * 2.0**-52)
    if len(inputs) > 1 and inputs[1].any():
        size = (ranges[0].size + inputs[0].sum(-1)).max(1, keepdims=True)
        passed = passed + _moved_positions(propagation, op, site, inputs[1], size)
    return passed, np.full(passed.shape[:-1], propagation.local[site.op].total)


def _moved_positions(propagation: Propagation, op: Mix, site: Site, e: Array, size: Array) -> Array:
    """How far a fixed mixing of values of at most `size` moves when one-hot positions err by e.

    Head h has logits p_i . (p_j L) and p_i . sink. They err by d, rounding of what is no longer one-hot included; its
    values lie among [-size, size] and 0, so its result moves by 2 tanh(d/2) size times its gain.
    """
    heads = HEADS[site.family](op, site, propagation.dtype)
    keys, sinks = (t.detach().double().numpy() for t in (heads.W_K[:, op.width :], heads.M_K[:, 0]))
    gains = np.abs(heads.W_O.detach().double().numpy()).max((1, 2))
    n, total = len(op.matrix), e.sum(-1)
    out = np.zeros((*e.shape[:2], op.width, e.shape[-1]))
    for key, sink, gain in zip(np.abs(keys), np.abs(sinks), gains, strict=True):
        row = np.einsum("cjts,tp->cjps", e, key)  # of the keys
        tokens = np.einsum("cjps,ip->cijs", row, np.eye(n)) + np.einsum("cjp,cips->cijs", key + row.sum(-1), e)
        parts = worst(np.concatenate([tokens, np.einsum("p,cips->cis", sink, e)[:, :, None]], 2), 2)
        largest = max(float(key.max()), float(sink.max())) * (1 + total.sum(-1).max(1, keepdims=True)) ** 2
        slip = 4 * gamma(2 * n + 4, propagation.u) * largest[..., None] * np.ones_like(total[..., :1])
        parts[..., -1] += slip[..., 0]
        moved = 2 * gain * _weights_move(up(parts.sum(-1), 64 + 8 * n))[..., None] * size
        out += scaled(np.broadcast_to(parts[:, :, None], out.shape), moved)
    return out * (1 + (8 * n + 64) * 2.0**-52)


def _max_local(propagation: Propagation, site: Site, layer: AttentionLayer) -> Local:
    low, high = (float(x) for x in site.config["interval"])
    tokens, beta = propagation.layout.program.tokens, float(site.config["sharpness"])
    leak, rounding = peak_error(tokens, beta, low, high, propagation.u, TINY[propagation.dtype])
    return Local(((low, high),), float(up(leak + rounding)), rounding)


def _max(propagation: Propagation, site: Site, ranges: list[Range], inputs: list[Array]) -> Passed:
    """The maximum moves by at most what the token that moves most does."""
    (e,) = inputs
    passed = np.broadcast_to(worst(e, 1)[:, None], e.shape).copy()
    return passed, np.full(e.shape[:-1], propagation.local[site.op].total)


def _norm_local(propagation: Propagation, site: Site, layer: AttentionLayer) -> Local:
    """The relative error of the norm's heads; `Local.total` is that of the largest entry a normed row can have."""
    op = propagation.layout.program.ops[site.op]
    assert isinstance(op, Normalise)
    heads = HEADS[site.family](op, site, propagation.dtype)
    scale = -heads.W_Q.detach().double().numpy()[:, 0, 0]
    shift, amount = heads.b_Q.detach().double().numpy()[:, -1], heads.W_O.detach().double().numpy()[:, 0, 0]
    low, high = (float(x) for x in site.config["variance"])
    error, evaluation = layer_error(scale, shift, amount, op.width, op.eps, low, high, propagation.u)
    dying = 4 * TINY[propagation.dtype] * (len(amount) + np.abs(amount).sum() * math.sqrt(high + op.eps))
    most = math.sqrt(op.width) * (1 + 2.0**-50)
    total = float(up((error + evaluation + dying + 2.0**-50) * most + _norm_lost(propagation, site), 16))
    return Local((), total, float(up(evaluation * most)))


def _norm_lost(propagation: Propagation, site: Site) -> float:
    """What underflow can take from an entry: once after the value, once after the output projection, in every head."""
    amounts = site.config["amounts"]
    return 4 * TINY[propagation.dtype] * (len(amounts) + math.fsum(abs(float(a)) for a in amounts))


def _norm(propagation: Propagation, site: Site, ranges: list[Range], inputs: list[Array]) -> Passed:
    """n(c) = c / r, r = sqrt(v + eps), v = mean c^2, has the derivative J h = (h - n (n.h)/d) / r.

    |J h|_i <= (|h_i| + |n_i| |m| |h| / d) / r with m the other entries of n. Two bounds of |n_i| |m| / d: half of
    |n|^2 / d = v / (v + eps), and the largest |n_i| over sqrt(d). With the first, the largest (|h_i| + t |h| / 2) / r,
    t = v / (v + eps), is where t = 2/3 (1 - |h_i| / |h|), or at an end of v's range. By the mean value theorem a row
    that errs by e moves by at most that on the way, and by at most 2 |n_i|. (eps may have been rounded by 2^-53 of
    itself when a centred row was scaled; `Local` counts that.)
    """
    (c,), (e,) = ranges, inputs
    op = propagation.layout.program.ops[site.op]
    assert isinstance(op, Normalise)
    slip = (op.width + 16) * 2.0**-52
    total = e.sum(-1) * (1 + e.shape[-1] * 2.0**-52)
    wide = Range(c.low - total, c.high + total)
    size = normalised_size(wide, op.eps)
    least = np.mean(wide.least**2, -1, keepdims=True) * (1 - slip)
    most = np.mean(wide.size**2, -1, keepdims=True) * (1 + slip)
    length = np.sqrt(np.sum(total**2, -1, keepdims=True)) * (1 + slip)
    far = (size / math.sqrt(op.width) * length + total) / np.sqrt(least + op.eps)
    share = np.clip((1 - total / np.where(length > 0, length, 1.0)) / 1.5, 0.0, 1.0)
    at = np.clip(op.eps * share / (1 - share), least, most)
    root = np.sqrt(at + op.eps)
    near = (total + 0.5 * length * at / (at + op.eps)) / root
    bound = np.minimum(np.minimum(near * (1 + 2.0**-20), far * (1 + slip)), 2 * size)
    low, high = (float(x) for x in site.config["variance"])
    known = (least >= low) & (most <= high)
    relative = propagation.local[site.op].total / math.sqrt(op.width)
    own = up(relative * size + _norm_lost(propagation, site), 8)
    parts = e + np.sqrt(np.mean(e**2, 2))[:, :, None] * (1 + slip)  # how the sources share it
    return scaled(parts, bound), np.where(known, own, np.inf)


LOCALS.update(
    {
        "softmax": _softmax_local,
        "attention": _attention_local,
        "mix": _mix_local,
        "max": _max_local,
        "norm": _norm_local,
    }
)
PASSES.update({"softmax": _softmax, "attention": _attention, "mix": _mix, "max": _max, "norm": _norm})
