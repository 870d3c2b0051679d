"""Where every value of a program lives: sound ranges over many cells of the box at once.

Each value is enclosed twice, and the intersection is kept: by outward-rounded intervals, and by an affine form
`slope . t + [low, high]` with t in [-1, 1]^d, the position inside the cell. Intervals forget that x - x is 0; affine
forms do not, and they make the ranges of affine maps and of nearly linear functions exact to second order.

A normed row lies in a ball, which is much smaller than the box around it: n = c / sqrt(mean c^2 + eps) has |n|^2 <= d,
so n @ w stays within sqrt(d) |w|_2; entry by entry one would get sqrt(d) |w|_1. A `Ball` follows a value through affine
maps as a sum of normed rows times folded weights, plus a rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..dtypes import Array
from ..functions.directed import U, dot_up, down, up
from ..functions.queries import lookup
from ..functions.registry import enclose, taylor
from ..functions.univariate import Univariate
from .ops import (
    MEANT,
    Apply,
    Attention,
    Constant,
    Input,
    Linear,
    MaxTokens,
    Mix,
    Normalise,
    Op,
    Product,
    Softmax,
    meant_within,
)
from .program import Program

MANY = 300  # with more distinct intervals than this, one table, which is remembered, answers for all
LEAST = 2.0**-1073  # twice the smallest positive float64: more than a product that underflows loses
MOST_SYMBOLS = 64  # with more input coordinates than this, only intervals are kept: forms cost memory for each


@dataclass(frozen=True)
class NormedRow:
    """A normed row, |n|_2 <= radius (cell, token), times a weight (channel, width) that is within `slip` of exact."""

    radius: Array
    weight: Array
    slip: Array


@dataclass(frozen=True)
class Ball:
    """value = sum of n @ weight over the parts + a rest in [low, high], shapes (cell, token, width)."""

    parts: dict[int, NormedRow]
    low: Array
    high: Array

    def interval(self) -> tuple[Array, Array]:
        """The range of the value that the ball shows."""
        reach = np.zeros_like(self.low)
        for part in self.parts.values():
            length = np.sqrt(np.sum(part.weight**2, 0)) + np.sqrt(np.sum(part.slip**2, 0))
            reach = reach + part.radius[..., None] * length * (1 + (len(part.weight) + 8) * U)
        reach = reach * (1 + (len(self.parts) + 4) * U)
        return down(self.low - reach), up(self.high + reach)


def normed(i: int, largest: Array, eps: float, width: int) -> Ball:
    """The ball of operation i, a norm of rows whose mean square is at most `largest` (cell, token)."""
    share = largest / (largest + eps) if eps > 0 else np.ones_like(largest)
    radius = np.sqrt(width * share) * (1 + 16 * U)
    nothing = np.zeros((*largest.shape, width))
    return Ball({i: NormedRow(radius, np.eye(width), np.zeros((width, width)))}, nothing, nothing)


def affine(
    reads: list[tuple[Ball | None, Array, Array]],
    weights: tuple[Array, ...],
    bias: Array,
    off: tuple[Array, ...] | None = None,
) -> Ball | None:
    """The ball of sum_i value_i @ weight_i + bias; a value without a ball joins the rest with its interval.

    `off` is as `Linear` has it: how far the numbers that are meant may be from weights and bias.
    """
    if all(ball is None for ball, _, _ in reads):
        return None
    parts: dict[int, NormedRow] = {}
    low, high, size = bias, bias, np.abs(bias)
    spread = 0.0 if off is None else off[-1]
    for at, ((ball, first, last), weight) in enumerate(zip(reads, weights, strict=True)):
        if ball is not None:
            first, last = ball.low, ball.high
            for i, part in ball.parts.items():
                steps = (len(weight) + len(weights) + 2) * U
                new = part.weight @ weight
                slip = part.slip @ np.abs(weight) * (1 + steps) + steps * (np.abs(part.weight) @ np.abs(weight))
                if off is not None:
                    slip = up(slip + dot_up(up(np.abs(part.weight) + part.slip), off[at]))
                old = parts.get(i)
                if old is not None:
                    slip = slip + old.slip + 2 * U * (np.abs(new) + np.abs(old.weight))
                    new = new + old.weight
                parts[i] = NormedRow(part.radius, new, slip)
        plus, minus = _signs(weight)
        low, high = low + first @ plus + last @ minus, high + last @ plus + first @ minus
        reach = np.maximum(np.abs(first), np.abs(last))
        size = size + reach @ np.abs(weight)
        spread = spread if off is None else up(spread + dot_up(reach, off[at]))
    margin = (sum(len(w) for w in weights) + 2 * len(weights) + 3) * U * size + spread
    return Ball(parts, low - margin, high + margin)


@dataclass(frozen=True)
class Tilt:
    """z in slope . t + [low, high] for t in [-1, 1]^symbols; slope has shape (cell, token, channel, symbol)."""

    slope: Array
    low: Array
    high: Array

    @property
    def reach(self) -> Array:
        """The largest |slope . t|."""
        return np.sum(np.abs(self.slope), -1)

    @property
    def size(self) -> Array:
        """What the rounding of operations on it is relative to."""
        return self.reach + np.maximum(np.abs(self.low), np.abs(self.high))


@dataclass(frozen=True)
class Range:
    """Enclosures of one value, shape (cell, token, channel): low <= z <= high, its affine form, and its ball."""

    low: Array
    high: Array
    tilt: Tilt | None = None
    ball: Ball | None = None

    @property
    def slope(self) -> Array | None:
        """How the value depends on the position inside the cell, where an affine form is kept."""
        return None if self.tilt is None else self.tilt.slope

    @property
    def size(self) -> Array:
        """The largest |z|."""
        return np.maximum(np.abs(self.low), np.abs(self.high))

    @property
    def least(self) -> Array:
        """The smallest |z|."""
        return np.maximum(np.maximum(self.low, -self.high), 0.0)


def ranges(program: Program, low: Array, high: Array, given: Mapping[int, Range] | None = None) -> list[Range]:
    """The range of every value on the cells [low_i, high_i]; low and high have shape (cell, token, channel).

    Values that are `given` have that range, whatever they would be computed from.
    """
    found: list[Range] = []
    for i, op in enumerate(program.ops):
        reads = [found[j] for j in op.inputs]
        fixed = None if given is None else given.get(i)
        found.append(fixed or _in_ball(i, op, reads, RULES[type(op)](op, reads, low, high)))
    return found


def centred(op: Normalise, r: Range) -> Range:
    """The range of the rows that a norm divides by their length, from that of what it reads."""
    if not op.centred:
        return r
    centring = Linear((0,), (op.centring[0],), np.zeros(op.width))
    return _in_ball(-1, centring, [r], _linear(centring, [r], r.low, r.high))


def _in_ball(i: int, op: Op, reads: list[Range], r: Range) -> Range:
    """The range of a norm or of an affine map of norms, cut to what the ball around a normed row allows."""
    if isinstance(op, Normalise):
        largest = np.mean(centred(op, reads[0]).size ** 2, -1) * (1 + (op.width + 4) * U)
        return replace(r, ball=normed(i, largest, op.centring[1], op.width))
    if not isinstance(op, Linear):
        return r
    ball = affine([(read.ball, read.low, read.high) for read in reads], op.weights, op.bias, op.off)
    if ball is None:
        return r
    low, high = ball.interval()
    return replace(r, low=np.maximum(r.low, low), high=np.minimum(r.high, high), ball=ball)


def cells(program: Program, wanted: int) -> tuple[Array, Array]:
    """The box cut evenly into about `wanted` cells, every coordinate alike; a coordinate of width 0 is not cut."""
    low = program.box.lower.numpy().reshape(-1)
    high = program.box.upper.numpy().reshape(-1)
    live = np.flatnonzero(high > low)
    cuts = np.ones(len(low), dtype=int)
    while len(live):  # one more cut for each coordinate in turn, as long as the product allows
        at = live[int(np.argmin(cuts[live]))]
        if np.prod(cuts.astype(float)) / cuts[at] * (cuts[at] + 1) > wanted:
            break
        cuts[at] += 1
    edges = [np.linspace(a, b, n + 1) for a, b, n in zip(low, high, cuts, strict=True)]
    corner = np.zeros((int(np.prod(cuts)), len(low)), dtype=int)
    cut = np.flatnonzero(cuts > 1)  # few, however many coordinates there are
    if len(cut):
        corner[:, cut] = np.stack(np.unravel_index(np.arange(len(corner)), cuts[cut]), -1)
    lows = np.stack([edges[d][corner[:, d]] for d in range(len(low))], -1)
    highs = np.stack([edges[d][corner[:, d] + 1] for d in range(len(low))], -1)
    shape = (len(corner), program.tokens, program.ops[0].width)
    return lows.reshape(shape), highs.reshape(shape)


def _made(low: Array, high: Array, tilt: Tilt) -> Range:
    """A range whose interval is cut to what its affine form says."""
    reach = tilt.reach * (1 + (tilt.slope.shape[-1] + 4) * U)
    return Range(np.maximum(low, down(tilt.low - reach)), np.minimum(high, up(tilt.high + reach)), tilt)


def _signs(weight: Array) -> tuple[Array, Array]:
    """The positive and the negative part of a matrix: ends of intervals are read through one or the other."""
    return np.maximum(weight, 0.0), np.minimum(weight, 0.0)


def _input(op: Op, reads: list[Range], low: Array, high: Array) -> Range:
    symbols = low.shape[1] * low.shape[2]
    if symbols > MOST_SYMBOLS:
        return Range(low, high)
    middle = 0.5 * (low + high)
    radius = up(np.maximum(high - middle, middle - low))
    slope = np.zeros((*low.shape, symbols))
    slope.reshape(len(low), symbols, symbols)[:, np.arange(symbols), np.arange(symbols)] = radius.reshape(len(low), -1)
    return Range(low, high, Tilt(slope, middle, middle.copy()))


def _constant(op: Op, reads: list[Range], low: Array, high: Array) -> Range:
    assert isinstance(op, Constant)
    ends = (op.value, op.value) if op.off is None else (down(op.value - op.slack), up(op.value + op.slack))
    least, most = (np.broadcast_to(end, (len(low), *end.shape)) for end in ends)
    symbols = low.shape[1] * low.shape[2]
    tilted = symbols <= MOST_SYMBOLS
    return Range(least, most, Tilt(np.zeros((*least.shape, symbols)), least, most) if tilted else None)


def _linear(op: Op, reads: list[Range], low: Array, high: Array) -> Range:
    assert isinstance(op, Linear)
    total_low, total_high, size = op.bias.copy(), op.bias.copy(), np.abs(op.bias)
    for read, weight in zip(reads, op.weights, strict=True):
        plus, minus = _signs(weight)
        total_low = total_low + read.low @ plus + read.high @ minus
        total_high = total_high + read.high @ plus + read.low @ minus
        size = size + read.size @ np.abs(weight)
    terms = sum(w.shape[0] for w in op.weights) + 3
    margin = terms * U * size
    alone = _alone(op)
    low_margin, high_margin = (np.where(alone, 4 * U * np.abs(x) + LEAST, margin) for x in (total_low, total_high))
    if op.off is not None:
        lost = np.broadcast_to(op.off[-1], margin.shape)
        for read, off in zip(reads, op.off, strict=False):
            lost = up(lost + dot_up(read.size, off))
        margin, low_margin, high_margin = (up(each + lost) for each in (margin, low_margin, high_margin))
    total_low, total_high = total_low - low_margin, total_high + high_margin
    tilts = [read.tilt for read in reads if read.tilt is not None]
    if len(tilts) < len(reads):
        return Range(total_low, total_high)
    slope, form_low, form_high, form_size = 0.0, op.bias, op.bias, 0.0
    for tilt, weight in zip(tilts, op.weights, strict=True):
        plus, minus = _signs(weight)
        slope = slope + weight.T @ tilt.slope
        form_low = form_low + tilt.low @ plus + tilt.high @ minus
        form_high = form_high + tilt.high @ plus + tilt.low @ minus
        form_size = form_size + tilt.size @ np.abs(weight)
    own = margin + terms * U * form_size
    return _made(total_low, total_high, Tilt(np.asarray(slope), form_low - own, form_high + own))


def _alone(op: Linear) -> Array:
    """The columns that are one entry times a number: they are rounded once, in proportion to what they are themselves,
    however far the cell reaches."""
    return (sum((weight != 0).sum(0) for weight in op.weights) == 1) & (op.bias == 0)


def _mix(op: Op, reads: list[Range], low: Array, high: Array) -> Range:
    assert isinstance(op, Mix)
    read, tilt, (plus, minus) = reads[0], reads[0].tilt, _signs(op.matrix)
    unit, size, meant = (len(op.matrix) + 4) * U, np.abs(op.matrix), meant_within(op.matrix)
    margin = unit * (size @ read.size) + meant @ read.size
    out_low, out_high = plus @ read.low + minus @ read.high - margin, plus @ read.high + minus @ read.low + margin
    if tilt is None:
        return Range(out_low, out_high)
    own = unit * (size @ tilt.size) + meant @ tilt.size
    form_low, form_high = plus @ tilt.low + minus @ tilt.high, plus @ tilt.high + minus @ tilt.low
    slope = np.einsum("ij,cjws->ciws", op.matrix, tilt.slope)
    return _made(out_low, out_high, Tilt(slope, form_low - own, form_high + own))


def _apply(op: Op, reads: list[Range], low: Array, high: Array) -> Range:
    assert isinstance(op, Apply)
    read, tilt, fn = reads[0], reads[0].tilt, op.function
    inside_low, inside_high = np.maximum(read.low, fn.domain.lo), np.minimum(read.high, fn.domain.hi)
    inside_high = np.maximum(inside_low, inside_high)
    pairs = np.stack([inside_low.ravel(), inside_high.ravel()], -1)
    unique, where = np.unique(pairs, axis=0, return_inverse=True)  # cells that differ elsewhere share an interval here
    where = where.reshape(read.low.shape)
    flat_low, flat_high = unique[:, 0].copy(), unique[:, 1].copy()
    formed = tilt is not None and not _straddles(fn.knots, flat_low, flat_high)
    if len(unique) > MANY and fn.certifiable and bool(np.isfinite(unique).all()):
        table = lookup(fn, float(flat_low.min()), float(flat_high.max()))
        out_low, out_high = table.range(flat_low, flat_high)
        line = table.line(flat_low, flat_high) if formed else None
    else:
        out_low, out_high = enclose(fn, flat_low, flat_high)
        line = _tangent(fn, flat_low, flat_high) if formed else None
    out_low, out_high = out_low[where], out_high[where]
    if tilt is None or line is None:
        return _plain(out_low, out_high, read)
    at, constant, first, rest = (part[where] for part in line)
    with np.errstate(invalid="ignore", over="ignore"):
        # g(y) = constant + first (y - at) + rest, and y - at = slope . t + [form - at]
        ends = first * (tilt.low - at), first * (tilt.high - at)
        lifted = tilt.reach + np.abs(tilt.low) + np.abs(tilt.high) + np.abs(at)
        own = rest + 8 * U * (np.abs(first) * lifted + np.abs(constant))
        form_low, form_high = constant + np.minimum(*ends) - own, constant + np.maximum(*ends) + own
        good = np.isfinite(form_low) & np.isfinite(form_high) & (own * 2 < out_high - out_low)
    slope = np.where(good[..., None], first[..., None] * tilt.slope, 0.0)
    return _made(out_low, out_high, Tilt(slope, np.where(good, form_low, out_low), np.where(good, form_high, out_high)))


def _tangent(fn: Univariate, low: Array, high: Array) -> tuple[Array, Array, Array, Array]:
    """A point c, g(c), g'(c), and r with |g(y) - g(c) - g'(c) (y - c)| <= r on each interval."""
    table = taylor(fn, low, high, 1)
    zero, one, radius = table.coefficient[:, 0], table.coefficient[:, 1], table.radius
    with np.errstate(invalid="ignore", over="ignore"):
        rest = table.error[:, 0] + table.error[:, 1] * radius + table.remainder * radius * radius
        rest = rest + 8 * U * (np.abs(zero) + np.abs(one) * radius)
    return table.centre, zero, one, rest


def _straddles(knots: tuple[float, ...], low: Array, high: Array) -> bool:
    return any(bool(np.any((low < k) & (k < high))) for k in knots)


def _product(op: Op, reads: list[Range], low: Array, high: Array) -> Range:
    x, y = reads
    corners = np.stack([x.low * y.low, x.low * y.high, x.high * y.low, x.high * y.high])
    out_low, out_high = down(corners.min(0)), up(corners.max(0))
    if x.tilt is None or y.tilt is None:
        return Range(out_low, out_high)
    # around the middles a, b of the forms: x y = a y + b x - a b + (x - a)(y - b)
    (a, half_x), (b, half_y) = _middle(x.tilt.low, x.tilt.high), _middle(y.tilt.low, y.tilt.high)
    slope = a[..., None] * y.tilt.slope + b[..., None] * x.tilt.slope
    reach_x, reach_y = x.tilt.reach + half_x, y.tilt.reach + half_y
    size = (np.abs(a) + reach_x) * (np.abs(b) + reach_y)
    own = np.abs(a) * half_y + np.abs(b) * half_x + reach_x * reach_y + (12 + 2 * slope.shape[-1]) * U * size
    return _made(out_low, out_high, Tilt(slope, a * b - own, a * b + own))


def _middle(low: Array, high: Array) -> tuple[Array, Array]:
    """The middles of intervals, and how far their ends are from these."""
    middle = 0.5 * low + 0.5 * high
    return middle, up(np.maximum(high - middle, middle - low))


def _weights(low: Array, high: Array) -> tuple[Array, Array]:
    """Enclosures of softmax weights (..., slot) from those of the logits; a logit may be -inf, but not all of a row.

    Arguments of the exponential are rounded, which moves it by as much relatively; what is below 2^-1000 is not told
    from nothing.
    """
    shift = np.max(high, -1, keepdims=True)
    small, large = np.exp(low - shift), np.exp(high - shift)
    others_large, others_small = large.sum(-1, keepdims=True) - large, small.sum(-1, keepdims=True) - small
    deepest = np.where(low > -np.inf, low, np.where(high > -np.inf, high, shift))  # what is -inf is not rounded
    depth = np.minimum(shift - deepest, 746.0)  # below, the exponential is 0
    margin = (low.shape[-1] + np.maximum(16.0, 8 + depth.max(-1, keepdims=True) / 4)) * 8 * U
    least = small / (small + np.maximum(others_large, 0) * (1 + margin) + margin * large) * (1 - margin)
    most = large / (large + np.maximum(others_small * (1 - margin) - margin * small, 0)) * (1 + margin)
    return np.maximum(least - 2.0**-1000, 0.0), np.minimum(most + 2.0**-1000, 1.0)


def _softmax(op: Op, reads: list[Range], low: Array, high: Array) -> Range:
    return _plain(*_weights(reads[0].low, reads[0].high), reads[0])


def _attention(op: Op, reads: list[Range], low: Array, high: Array) -> Range:
    """A mean of the values: with fixed weights p0 of sum 1, sum_j p_j v_j = sum_j p0_j v_j + sum_j (p_j - p0_j)(v_j -
    c) for any c, since the p_j add up to 1 as well."""
    assert isinstance(op, Attention)
    value, tokens = reads[2], reads[2].low.shape[1]
    mask = op.logit_mask(tokens)
    shown = (mask > -np.inf)[None, :, :, None]
    first = np.where(shown, value.low[:, None], np.inf).min(2)
    last = np.where(shown, value.high[:, None], -np.inf).max(2)
    with np.errstate(invalid="ignore", over="ignore"):
        least, most = attention_weights(op, reads[0], reads[1])
        middle = np.where(mask > -np.inf, 0.5 * (least + most), 0.0)
        middle = middle / middle.sum(-1, keepdims=True)
        moves = np.where(mask > -np.inf, up(np.maximum(most - middle, middle - least)), 0.0)
        centre = 0.5 * first + 0.5 * last
        away = up(np.maximum(value.high[:, None] - centre[:, :, None], centre[:, :, None] - value.low[:, None]))
        unit = (4 * tokens + 16) * U
        own = np.einsum("cij,cijk->cik", moves, away) * (1 + unit) + unit * np.abs(centre)
        ends = (value.low, value.high) if value.tilt is None else (value.tilt.low, value.tilt.high)
        size = value.size if value.tilt is None else value.tilt.size
        own = own + unit * np.einsum("cij,cjk->cik", middle, size) + 2.0**-1000
        below, above = (np.einsum("cij,cjk->cik", middle, end) for end in ends)
        below, above = below - own, above + own
    good = np.isfinite(below) & np.isfinite(above)
    below, above = np.where(good, below, first), np.where(good, above, last)
    if value.tilt is None:
        return Range(np.maximum(first, below), np.minimum(last, above))
    slope = np.einsum("cij,cjks->ciks", np.nan_to_num(middle), value.tilt.slope) * good[..., None]
    return _made(first, last, Tilt(slope, below, above))


def attention_weights(op: Attention, query: Range, key: Range) -> tuple[Array, Array]:
    """Enclosures (cell, query, key) of the weights of an attention head."""
    return _weights(*_logits(op, query, key, op.logit_mask(key.low.shape[1])))


def _logits(op: Attention, query: Range, key: Range, mask: Array) -> tuple[Array, Array]:
    """Enclosures (cell, query, key) of the logits less what all keys have in common: q.(k_j - k) with k their mean."""
    views: list[tuple[tuple[Array, Array] | None, Array, Array, Array, Array]]
    views = [(None, query.low, query.high, key.low, key.high)]
    if query.tilt is not None and key.tilt is not None:
        views.append(((query.tilt.slope, key.tilt.slope), query.tilt.low, query.tilt.high, key.tilt.low, key.tilt.high))
    tokens, width = key.low.shape[1:]
    low, high = np.full(mask.shape, -np.inf), np.full(mask.shape, np.inf)
    for slopes, q_low, q_high, k_low, k_high in views:
        (q, q_half), (k, k_half) = _middle(q_low, q_high), _middle(k_low, k_high)
        slip = (2 * tokens + 8) * U * np.abs(k).max(1, keepdims=True)  # of centred keys
        k, k_half = k - k.mean(1, keepdims=True), k_half * (1 - 2 / tokens) + k_half.mean(1, keepdims=True) + slip
        q_reach, k_reach, tilted = q_half, k_half, 0.0
        if slopes is not None:
            k_slope = slopes[1] - slopes[1].mean(1, keepdims=True)
            k_half = k_half + (2 * tokens + 8) * U * np.abs(slopes[1]).max(1, keepdims=True).sum(-1)
            q_reach, k_reach = np.abs(slopes[0]).sum(-1) + q_half, np.abs(k_slope).sum(-1) + k_half
            tilted = np.einsum("cik,cjks->cijs", q, k_slope) + np.einsum("cjk,ciks->cijs", k, slopes[0])
            tilted = np.abs(tilted).sum(-1)
        pairs = ((np.abs(q), k_half), (q_half, np.abs(k)), (q_reach, k_reach))
        reach = tilted + sum(np.einsum("cik,cjk->cij", *pair) for pair in pairs)
        size = np.einsum("cik,cjk->cij", np.abs(q) + q_reach, np.abs(k) + k_reach)
        symbols = 0 if slopes is None else slopes[0].shape[-1]
        slack = (2 * width + 2 * tokens + symbols + 16) * 4 * U + MEANT
        shown = np.where(mask > -np.inf, mask, 0.0)
        reach = abs(op.scale) * (reach + slack * size) + meant_within(shown) + 4 * U * np.abs(shown)
        centre = op.scale * np.einsum("cik,cjk->cij", q, k) + shown
        low, high = np.fmax(low, centre - reach), np.fmin(high, centre + reach)
    return np.where(mask > -np.inf, low, -np.inf), np.where(mask > -np.inf, high, -np.inf)


def _normalise(op: Op, reads: list[Range], low: Array, high: Array) -> Range:
    assert isinstance(op, Normalise)
    z, eps = centred(op, reads[0]), op.centring[1]
    least, most = -_normalised(-z.low, z, eps), _normalised(z.high, z, eps)
    if op.centred:
        top = up(np.sqrt(op.width - 1.0)) * (1 + 4 * U)
        least, most = np.maximum(least, -top), np.minimum(most, top)
    if z.tilt is None:
        return Range(least, most)
    # c times g = (mean c^2 + eps)^(-1/2) = middle +- half
    slip = (op.width + 16) * U
    ends = (np.mean(side**2, -1, keepdims=True) + eps for side in (z.size, z.least))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        down_g, up_g = (np.sqrt(end) ** -1.0 * (1 + sign * slip) for end, sign in zip(ends, (-1, 1), strict=True))
        middle, half = _middle(down_g, up_g)
        own = (half * z.size + 8 * U * middle * z.tilt.size) * (1 + 8 * U)
        first, last = middle * z.tilt.low - own, middle * z.tilt.high + own
        good = np.isfinite(first) & np.isfinite(last) & (2 * own < most - least)
        slope = np.where(good[..., None], middle[..., None] * z.tilt.slope, 0.0)
    return _made(least, most, Tilt(slope, np.where(good, first, least), np.where(good, last, most)))


def _normalised(top: Array, r: Range, eps: float) -> Array:
    """An upper bound of c_i / sqrt(mean c^2 + eps) for c_i <= top: it grows with c_i, and shrinks with the others'
    squares while c_i is positive."""
    width = top.shape[-1]
    small, large = r.least**2, r.size**2
    rest = np.where(top > 0, small.sum(-1, keepdims=True) - small, large.sum(-1, keepdims=True) - large)
    slip = (width + 4) * U * np.where(top > 0, small, large).sum(-1, keepdims=True)
    rest = np.maximum(np.where(top > 0, rest - slip, rest + slip), 0.0)
    root = np.sqrt((top * top + rest) / width + eps)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(root > 0, top / root, 0.0)
    return np.minimum(found + 16 * U * np.abs(found), up(np.sqrt(float(width))) * (1 + 4 * U))


def normalised_size(r: Range, eps: float) -> Array:
    """An upper bound of |c_i| / sqrt(mean c^2 + eps)."""
    return np.maximum(_normalised(r.high, r, eps), _normalised(-r.low, r, eps))


def _max_tokens(op: Op, reads: list[Range], low: Array, high: Array) -> Range:
    z = reads[0]
    out_low = np.broadcast_to(z.low.max(1, keepdims=True), z.low.shape)
    return _plain(out_low, np.broadcast_to(z.high.max(1, keepdims=True), z.low.shape), z)


def _plain(low: Array, high: Array, like: Range) -> Range:
    """An interval as a range that keeps the number of symbols of another."""
    if like.tilt is None:
        return Range(low, high)
    return Range(low, high, Tilt(np.zeros((*low.shape, like.tilt.slope.shape[-1])), low, high))


#: How each operation encloses its result.
RULES: dict[type[Op], Callable[[Op, list[Range], Array, Array], Range]] = {
    Input: _input,
    Constant: _constant,
    Linear: _linear,
    Mix: _mix,
    Apply: _apply,
    Product: _product,
    Softmax: _softmax,
    Attention: _attention,
    Normalise: _normalise,
    MaxTokens: _max_tokens,
}
