"""Ranges of affine maps of normed rows: a normed row lies in a ball, which is much smaller than the box around it.

n = c / sqrt(mean c^2 + eps) has |n|^2 <= d, so n @ w stays within sqrt(d) |w|_2; entry by entry one would get
sqrt(d) |w|_1. A `Ball` follows a value through affine maps as a sum of normed rows times folded weights, plus a rest.

Where every value of a program lives: sound ranges over many cells of the box at once.

Each value is enclosed twice, and the intersection is kept: by outward-rounded intervals, and by an affine form
`slope . t + [low, high]` with t in [-1, 1]^d, the position inside the cell. Intervals forget that x - x is 0; affine
forms do not, and they make the ranges of affine maps and of nearly linear functions exact to second order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..dtypes import Array
from ..functions.queries import lookup
from ..functions.registry import enclose, taylor
from ..functions.univariate import Univariate
from .ops import Apply, Attention, Constant, Input, Linear, MaxTokens, Mix, Normalise, Op, Product, Softmax
from .program import Program

U = 2.0**-53


@dataclass(frozen=True)
class Part:
    """A normed row, |n|_2 <= radius (cell, token), times a weight (channel, width) that is within `slip` of exact."""

    radius: Array
    weight: Array
    slip: Array


@dataclass(frozen=True)
class Ball:
    """value = sum of n @ weight over the parts + a rest in [low, high], shapes (cell, token, width)."""

    parts: dict[int, Part]
    low: Array
    high: Array

    def interval(self) -> tuple[Array, Array]:
        """The range of the value that the ball shows."""
        reach = np.zeros_like(self.low)
        for part in self.parts.values():
            length = np.sqrt(np.sum(part.weight**2, 0)) + np.sqrt(np.sum(part.slip**2, 0))
            reach = reach + part.radius[..., None] * length * (1 + (len(part.weight) + 8) * U)
        reach = reach * (1 + (len(self.parts) + 4) * U)
        return np.nextafter(self.low - reach, -np.inf), np.nextafter(self.high + reach, np.inf)


def normed(i: int, largest: Array, eps: float, width: int) -> Ball:
    """The ball of operation i, a norm of rows whose mean square is at most `largest` (cell, token)."""
    share = largest / (largest + eps) if eps > 0 else np.ones_like(largest)
    radius = np.sqrt(width * share) * (1 + 16 * U)
    nothing = np.zeros((*largest.shape, width))
    return Ball({i: Part(radius, np.eye(width), np.zeros((width, width)))}, nothing, nothing)


def affine(reads: list[tuple[Ball | None, Array, Array]], weights: tuple[Array, ...], bias: Array) -> Ball | None:
    """The ball of sum_i value_i @ weight_i + bias; a value without a ball joins the rest with its interval."""
    if all(ball is None for ball, _, _ in reads):
        return None
    parts: dict[int, Part] = {}
    low, high, size = bias, bias, np.abs(bias)
    for (ball, first, last), weight in zip(reads, weights, strict=True):
        if ball is not None:
            first, last = ball.low, ball.high
            for i, part in ball.parts.items():
                steps = (len(weight) + len(weights) + 2) * U
                new = part.weight @ weight
                slip = part.slip @ np.abs(weight) * (1 + steps) + steps * (np.abs(part.weight) @ np.abs(weight))
                old = parts.get(i)
                if old is not None:
                    slip = slip + old.slip + 2 * U * (np.abs(new) + np.abs(old.weight))
                    new = new + old.weight
                parts[i] = Part(part.radius, new, slip)
        up, down = np.maximum(weight, 0.0), np.minimum(weight, 0.0)
        low, high = low + first @ up + last @ down, high + last @ up + first @ down
        size = size + np.maximum(np.abs(first), np.abs(last)) @ np.abs(weight)
    margin = (sum(len(w) for w in weights) + 2 * len(weights) + 3) * U * size
    return Ball(parts, low - margin, high + margin)


U = 2.0**-53
MANY = 300  # with more distinct intervals than this, one table answers for all
MOST_SYMBOLS = 64  # with more input coordinates than this, only intervals are kept


@dataclass(frozen=True)
class Range:
    """Enclosures of one value, shape (cell, token, channel): low <= z <= high, z in slope . t + form_low..form_high."""

    low: Array
    high: Array
    slope: Array | None = None
    form_low: Array | None = None
    form_high: Array | None = None
    ball: Ball | None = None

    @property
    def size(self) -> Array:
        """The largest |z|."""
        return np.maximum(np.abs(self.low), np.abs(self.high))

    @property
    def least(self) -> Array:
        """The smallest |z|."""
        return np.maximum(np.maximum(self.low, -self.high), 0.0)


def ranges(program: Program, low: Array, high: Array) -> list[Range]:
    """The range of every value on the cells [low_i, high_i]; low and high have shape (cell, token, channel)."""
    found: list[Range] = []
    for i, op in enumerate(program.ops):
        reads = [found[j] for j in op.inputs]
        found.append(_in_ball(i, op, reads, RULES[type(op)](op, reads, low, high)))
    return found


def _in_ball(i: int, op: Op, reads: list[Range], r: Range) -> Range:
    """The range of a norm or of an affine map of norms, cut to what the ball around a normed row allows."""
    if isinstance(op, Normalise):
        largest = np.mean(reads[0].size ** 2, -1) * (1 + (op.width + 4) * U)
        return replace(r, ball=normed(i, largest, 0.0 if op.centred else op.eps, op.width))
    if not isinstance(op, Linear):
        return r
    ball = affine([(read.ball, read.low, read.high) for read in reads], op.weights, op.bias)
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


def _made(low: Array, high: Array, slope: Array | None, form_low: Array | None, form_high: Array | None) -> Range:
    """A range whose interval is cut to what its affine form says."""
    if slope is None or form_low is None or form_high is None:
        return Range(low, high)
    reach = np.sum(np.abs(slope), -1)
    reach = reach * (1 + (slope.shape[-1] + 4) * U)
    low = np.maximum(low, np.nextafter(form_low - reach, -np.inf))
    high = np.minimum(high, np.nextafter(form_high + reach, np.inf))
    return Range(low, high, slope, form_low, form_high)


def _input(op: Op, reads: list[Range], low: Array, high: Array) -> Range:
    symbols = low.shape[1] * low.shape[2]
    if symbols > MOST_SYMBOLS:
        return Range(low, high)
    middle = 0.5 * (low + high)
    radius = np.nextafter(np.maximum(high - middle, middle - low), np.inf)
    slope = np.zeros((*low.shape, symbols))
    slope.reshape(len(low), symbols, symbols)[:, np.arange(symbols), np.arange(symbols)] = radius.reshape(len(low), -1)
    return Range(low, high, slope, middle, middle.copy())


def _constant(op: Op, reads: list[Range], low: Array, high: Array) -> Range:
    assert isinstance(op, Constant)
    value = np.broadcast_to(op.value, (len(low), *op.value.shape))
    symbols = low.shape[1] * low.shape[2]
    slope = np.zeros((*value.shape, symbols)) if symbols <= MOST_SYMBOLS else None
    return Range(value, value, slope, value, value)


def _linear(op: Op, reads: list[Range], low: Array, high: Array) -> Range:
    assert isinstance(op, Linear)
    total_low, total_high, size = op.bias.copy(), op.bias.copy(), np.abs(op.bias)
    slope: Array | None = None
    form_low, form_high = op.bias.copy(), op.bias.copy()
    formed = all(r.slope is not None for r in reads)
    for read, weight in zip(reads, op.weights, strict=True):
        up, down = np.maximum(weight, 0.0), np.minimum(weight, 0.0)
        total_low = total_low + read.low @ up + read.high @ down
        total_high = total_high + read.high @ up + read.low @ down
        size = size + read.size @ np.abs(weight)
        if formed:
            assert read.slope is not None
            assert read.form_low is not None
            assert read.form_high is not None
            part = np.einsum("ctks,kw->ctws", read.slope, weight)
            slope = part if slope is None else slope + part
            form_low = form_low + read.form_low @ up + read.form_high @ down
            form_high = form_high + read.form_high @ up + read.form_low @ down
    terms = sum(w.shape[0] for w in op.weights) + 3
    margin = terms * U * size
    if slope is not None:
        own = margin + terms * U * _form_size(reads, op.weights)
        return _made(total_low - margin, total_high + margin, slope, form_low - own, form_high + own)
    return Range(total_low - margin, total_high + margin)


def _form_size(reads: list[Range], weights: tuple[Array, ...]) -> Array:
    """Sizes that the rounding of an affine form is relative to."""
    total: Array | float = 0.0
    for read, weight in zip(reads, weights, strict=True):
        assert read.slope is not None
        assert read.form_low is not None
        assert read.form_high is not None
        size = np.sum(np.abs(read.slope), -1) + np.maximum(np.abs(read.form_low), np.abs(read.form_high))
        total = total + size @ np.abs(weight)
    return np.asarray(total)


def _mix(op: Op, reads: list[Range], low: Array, high: Array) -> Range:
    assert isinstance(op, Mix)
    read, up, down = reads[0], np.maximum(op.matrix, 0.0), np.minimum(op.matrix, 0.0)
    margin = (len(op.matrix) + 2) * U * (np.abs(op.matrix) @ read.size)
    out_low, out_high = up @ read.low + down @ read.high - margin, up @ read.high + down @ read.low + margin
    if read.slope is None or read.form_low is None or read.form_high is None:
        return Range(out_low, out_high)
    slope = np.einsum("ij,cjws->ciws", op.matrix, read.slope)
    size = np.sum(np.abs(read.slope), -1) + np.maximum(np.abs(read.form_low), np.abs(read.form_high))
    own = (len(op.matrix) + 2) * U * (np.abs(op.matrix) @ size)
    form_low, form_high = up @ read.form_low + down @ read.form_high, up @ read.form_high + down @ read.form_low
    return _made(out_low, out_high, slope, form_low - own, form_high + own)


def _apply(op: Op, reads: list[Range], low: Array, high: Array) -> Range:
    assert isinstance(op, Apply)
    read, fn = reads[0], op.function
    inside_low, inside_high = np.maximum(read.low, fn.domain.lo), np.minimum(read.high, fn.domain.hi)
    inside_high = np.maximum(inside_low, inside_high)
    pairs = np.stack([inside_low.ravel(), inside_high.ravel()], -1)
    unique, where = np.unique(pairs, axis=0, return_inverse=True)  # cells that differ elsewhere share an interval here
    where = where.reshape(read.low.shape)
    flat_low, flat_high = unique[:, 0].copy(), unique[:, 1].copy()
    formed = read.slope is not None and not _straddles(fn.knots, flat_low, flat_high)
    if len(unique) > MANY and fn.certifiable and bool(np.isfinite(unique).all()):
        table = lookup(fn, float(flat_low.min()), float(flat_high.max()))
        out_low, out_high = table.range(flat_low, flat_high)
        line = table.line(flat_low, flat_high) if formed else None
    else:
        out_low, out_high = enclose(fn, flat_low, flat_high)
        line = _tangent(fn, flat_low, flat_high) if formed else None
    out_low, out_high = out_low[where], out_high[where]
    if read.slope is None or read.form_low is None or read.form_high is None:
        return Range(out_low, out_high)
    if line is None:
        return Range(out_low, out_high, np.zeros_like(read.slope), out_low, out_high)
    at, constant, first, rest = (part[where] for part in line)
    with np.errstate(invalid="ignore", over="ignore"):
        # g(y) = constant + first (y - at) + rest, and y - at = slope . t + [form - at]
        ends = first * (read.form_low - at), first * (read.form_high - at)
        lifted = np.sum(np.abs(read.slope), -1) + np.abs(read.form_low) + np.abs(read.form_high) + np.abs(at)
        own = rest + 8 * U * (np.abs(first) * lifted + np.abs(constant))
        form_low, form_high = constant + np.minimum(*ends) - own, constant + np.maximum(*ends) + own
        good = np.isfinite(form_low) & np.isfinite(form_high) & (own * 2 < out_high - out_low)
    slope = np.where(good[..., None], first[..., None] * read.slope, 0.0)
    return _made(out_low, out_high, slope, np.where(good, form_low, out_low), np.where(good, form_high, out_high))


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
    out_low, out_high = np.nextafter(corners.min(0), -np.inf), np.nextafter(corners.max(0), np.inf)
    if x.slope is None or y.slope is None or x.form_low is None or y.form_low is None:
        return Range(out_low, out_high)
    assert x.form_high is not None
    assert y.form_high is not None
    # around the middles a, b of the forms: x y = a y + b x - a b + (x - a)(y - b)
    a, b = 0.5 * (x.form_low + x.form_high), 0.5 * (y.form_low + y.form_high)
    slope = a[..., None] * y.slope + b[..., None] * x.slope
    half_x, half_y = np.maximum(x.form_high - a, a - x.form_low), np.maximum(y.form_high - b, b - y.form_low)
    reach_x = np.sum(np.abs(x.slope), -1) + half_x
    reach_y = np.sum(np.abs(y.slope), -1) + half_y
    size = (np.abs(a) + reach_x) * (np.abs(b) + reach_y)
    own = np.abs(a) * half_y + np.abs(b) * half_x + reach_x * reach_y + (12 + 2 * slope.shape[-1]) * U * size
    return _made(out_low, out_high, slope, a * b - own, a * b + own)


def _softmax(op: Op, reads: list[Range], low: Array, high: Array) -> Range:
    z = reads[0]
    shift = np.max(z.high, -1, keepdims=True)
    small, large = np.exp(z.low - shift), np.exp(z.high - shift)
    others_large, others_small = large.sum(-1, keepdims=True) - large, small.sum(-1, keepdims=True) - small
    margin = (z.low.shape[-1] + 16) * 8 * U
    out_low = small / (small + np.maximum(others_large, 0) * (1 + margin) + margin * large) * (1 - margin)
    out_high = large / (large + np.maximum(others_small * (1 - margin) - margin * small, 0)) * (1 + margin)
    return _plain(np.maximum(out_low, 0.0), np.minimum(out_high, 1.0), z)


def _attention(op: Op, reads: list[Range], low: Array, high: Array) -> Range:
    value = reads[2]
    shape = value.low.shape
    out_low = np.broadcast_to(value.low.min(1, keepdims=True), shape)
    out_high = np.broadcast_to(value.high.max(1, keepdims=True), shape)
    return _plain(out_low, out_high, value)


def _normalise(op: Op, reads: list[Range], low: Array, high: Array) -> Range:
    assert isinstance(op, Normalise)
    z = reads[0]
    if op.centred:
        most = np.nextafter(np.sqrt(op.width - 1.0), np.inf) * (1 + 4 * U)
        return _plain(np.full(z.low.shape, -most), np.full(z.low.shape, most), z)
    return _plain(-_normalised(-z.low, z, op.eps), _normalised(z.high, z, op.eps), z)


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
    return np.minimum(found + 16 * U * np.abs(found), np.nextafter(np.sqrt(float(width)), np.inf) * (1 + 4 * U))


def normalised_size(r: Range, eps: float) -> Array:
    """An upper bound of |c_i| / sqrt(mean c^2 + eps)."""
    return np.maximum(_normalised(r.high, r, eps), _normalised(-r.low, r, eps))


def _max_tokens(op: Op, reads: list[Range], low: Array, high: Array) -> Range:
    z = reads[0]
    out_low = np.broadcast_to(z.low.max(1, keepdims=True), z.low.shape)
    return _plain(out_low, np.broadcast_to(z.high.max(1, keepdims=True), z.low.shape), z)


def _plain(low: Array, high: Array, like: Range) -> Range:
    """An interval as a range that keeps the number of symbols of another."""
    if like.slope is None:
        return Range(low, high)
    return Range(low, high, np.zeros((*low.shape, like.slope.shape[-1])), low, high)


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
