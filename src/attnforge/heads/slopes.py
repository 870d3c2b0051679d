"""How steep a stored head is: enclosures of its derivative, cell by cell (lemma H2 of docs/theory.md).

A head of one scalar y has logits a_k y + b_k and values V_k + U_k y (U is not 0 for a self slot). On a cell with centre
c and radius r, with the weights w at c and s = a - E_w a, its derivative is E_w U + Cov_w(a, V + U c) at c and moves by
at most r times a bound of the second derivative, which comes from the weights at c as well. Cells are halved where that
is loose. Everything is computed in float64 with what its own rounding can do.

Heads that mix channels or tokens are sums of derivatives of what they read, with coefficients that are enclosed
themselves (`combined`); that coefficients of a softmax add up to 0 or 1 is used, and so is a bound of their sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..certificates.rounding import two_product, two_sum
from ..dtypes import Array
from ..functions.queries import Largest
from .stored import SelfSpec

Enclosure = tuple[Array, Array]  # smallest and largest
U = 2.0**-53  # the roundoff of what is computed here
OWN = 64 * U  # relative error of products and of sums of few terms here, beyond that of the logits
MOST_CELLS = 1 << 14  # of one head: where kinks are sharper than that, a bound is loose but holds
ROUNDS = 64  # halvings of a cell at the most: below the resolution of float64
LOST = 1e-290  # of a weight that underflows: more than any such weight is
TIGHT = 1 / 128  # cells are halved while their remainder is more than this share of the steepest slope


@dataclass(frozen=True, eq=False)
class SlotLines:
    """The slots of a head of one scalar: logits a y + b, values V + U y. Where b is a sum of products, `low` is what it
    lacks, and a and b + low are off by at most `slack`[0] and `slack`[1]."""

    a: Array
    b: Array
    V: Array
    U: Array
    low: Array = field(default_factory=lambda: np.zeros(0))
    slack: tuple[float, float] = (0.0, 0.0)

    def logits(self, c: Array, reach: Array) -> tuple[Array, Array]:
        """The logarithms of the weights at c, and how far they can be off for what `reach` bounds |c| by.

        Slopes are as large as 1e16, and all there is of a kink are differences of such logits: they are formed without
        errors of the first order. What remains is relative to the distance from the largest logit, but for 2nd orders.
        """
        product, product_low = two_product(c[:, None], self.a)
        logits, logits_low = two_sum(product, self.b)
        below = product_low + logits_low + (self.low if self.low.size else 0.0)
        top = np.argmax(logits, -1)[:, None]
        gap, gap_low = two_sum(logits, -np.take_along_axis(logits, top, -1))
        gap = gap + (gap_low + (below - np.take_along_axis(below, top, -1)))
        common = 32 * U**2 * (np.abs(product) + np.abs(self.b)) + self.slack[0] * reach[:, None] + self.slack[1]
        off = 4 * U * np.abs(gap) + common + common.max(-1, keepdims=True)
        gap -= np.log(np.exp(gap).sum(-1, keepdims=True))
        moved = (np.exp(gap) * np.expm1(off)).sum(-1, keepdims=True)  # of the sum of all exponentials, relatively
        return gap, off + np.where(moved < 0.5, 2 * moved, off.max(-1, keepdims=True)) + OWN + 4 * U * len(self.a)

    def enclose(self, low: Array, high: Array) -> tuple[Array, Array, Array, Array]:
        """On each cell the derivative at its centre, how far it can be from it within the cell, the value at the
        centre, and how far that can be off."""
        few = OWN + 4 * U * len(self.a)  # of sums over all slots, in whatever order they are added up
        c, r = 0.5 * (low + high), 0.5 * (high - low) * (1 + 4 * U)
        with np.errstate(over="ignore", invalid="ignore"):
            logits, off = self.logits(c, np.abs(c) + r)
            weight = np.exp(logits)
            mean = (weight @ self.a)[:, None]
            s, value, moves = self.a - mean, self.V + np.multiply.outer(c, self.U), np.abs(self.U)
            h0 = (weight * value).sum(-1, keepdims=True)
            slope = weight @ self.U + (weight * s * (value - h0)).sum(-1)
            wrong = np.expm1(2 * off)  # of a weight, relatively; the largest is off by no more than the others are
            size = np.abs(s) + self.slack[0]
            rest = np.abs((weight * s).sum(-1, keepdims=True))  # of the mean, whatever is added to all of s
            lean = (weight * wrong * size).sum(-1, keepdims=True) + rest  # of E_w s
            most = np.exp(np.minimum(logits + (size + lean) * r[:, None] + off, 0.0)) * (1 + few) + LOST  # in the cell
            loss = most * wrong + LOST
            first = np.arange(len(self.a)) == np.argmax(logits, -1)[:, None]
            others = np.where(first, 0.0, loss).sum(-1, keepdims=True) + few
            loss = np.where(first, np.fmin(loss, others), loss)
            tilt = size + (most * size).sum(-1, keepdims=True)
            blur = 2 * U * np.where(moves > 0, np.abs(value) + np.abs(np.multiply.outer(c, self.U)), 0.0)  # of a value
            away = np.abs(value - h0) + r[:, None] * moves + blur
            away = away + (most * away).sum(-1, keepdims=True)
            bend = (most * (tilt**2 * away + 2 * tilt * moves)).sum(-1)
            rounded = (loss * (moves + tilt * away) + most * (tilt * blur + (self.slack[0] + rest) * away)).sum(-1)
            astray = np.nextafter((loss * away + most * (blur + few * np.abs(value))).sum(-1), np.inf)
        far = np.nextafter((r * bend + rounded) * (1 + few), np.inf)
        return slope, np.where(np.isfinite(far), far, np.inf), h0[:, 0], np.where(np.isfinite(astray), astray, np.inf)


@dataclass(frozen=True, eq=False)
class Steepness:
    """Enclosures of a derivative and of the values, on cells, for range queries."""

    edges: Array
    slope: Enclosure
    value: Enclosure
    shift: float = 0.0  # cells are those of y - shift

    def slopes(self, low: Array, high: Array) -> Enclosure:
        """The smallest and the largest the derivative can be on [low, high], which must lie inside."""
        return self._over(self.slope, low, high)

    def values(self, low: Array, high: Array) -> Enclosure:
        """The smallest and the largest the value can be."""
        return self._over(self.value, low, high)

    def _over(self, numbers: Enclosure, low: Array, high: Array) -> Enclosure:
        start, (low, high) = self.edges[:-1], (low - self.shift, high - self.shift)
        low, high = (np.nextafter(x, side) for x, side in ((low, -np.inf), (high, np.inf)))
        return -Largest(start, -numbers[0]).over(low, high), Largest(start, numbers[1]).over(low, high)

    @property
    def constant(self) -> float:
        """A Lipschitz constant on all cells."""
        return float(np.maximum(-self.slope[0], self.slope[1]).max())


def steepness(parts: list[tuple[float, SlotLines]], skip: float, edges: Array) -> Steepness:
    """The derivative of skip y + sum_i factor_i head_i on cells that begin with these edges and are halved where it
    helps. Values are those of the heads alone."""
    numbers = tuple((f, tuple(x.tobytes() for x in (h.a, h.b, h.V, h.U, h.low)), h.slack) for f, h in parts)
    return _steepness(numbers, skip, np.unique(edges).tobytes())


@functools.lru_cache(maxsize=512)
def _steepness(
    numbers: tuple[tuple[float, tuple[bytes, ...], tuple[float, float]], ...], skip: float, places: bytes
) -> Steepness:
    """`steepness` of numbers that can be looked up: a network asks for the same heads on many cells of its box."""
    read = np.frombuffer
    parts = [
        (f, SlotLines(read(x[0]), read(x[1]), read(x[2]), read(x[3]), read(x[4]), slack)) for f, x, slack in numbers
    ]
    edges = np.frombuffer(places)
    centre, rest, value, off = _sum(parts, skip, edges[:-1], edges[1:])
    for _ in range(ROUNDS):
        scale = float(np.max(np.abs(centre), initial=0.0))
        middle = 0.5 * (edges[:-1] + edges[1:])
        loose = (rest > TIGHT * scale) & (np.abs(centre) + rest > scale)
        loose &= (middle > edges[:-1]) & (middle < edges[1:])
        if not loose.any() or len(edges) + int(loose.sum()) > MOST_CELLS:
            break
        new = middle[loose]
        found = _sum(parts, skip, np.concatenate([edges[:-1][loose], new]), np.concatenate([new, edges[1:][loose]]))
        lows = np.concatenate([edges[:-1][~loose], edges[:-1][loose], new])
        order = np.argsort(lows, kind="stable")
        known = zip((centre, rest, value, off), found, strict=True)
        centre, rest, value, off = (np.concatenate([old[~loose], more])[order] for old, more in known)
        edges = np.append(lows[order], edges[-1])
    radius = 0.5 * np.diff(edges) * (1 + 4 * U)
    reach = radius * (np.abs(centre) + rest + abs(skip)) * (1 + OWN) + off
    return Steepness(edges, (centre - rest, centre + rest), (value - reach, value + reach))


def _sum(
    parts: list[tuple[float, SlotLines]], skip: float, low: Array, high: Array
) -> tuple[Array, Array, Array, Array]:
    few = OWN + 2 * U * len(parts)
    centre, rest = np.full(len(low), skip), np.full(len(low), few * abs(skip))
    value, off = np.zeros(len(low)), np.zeros(len(low))
    for factor, lines in parts:
        slope, left, h0, wrong = lines.enclose(low, high)
        centre, rest = centre + factor * slope, rest + abs(factor) * left + few * np.abs(factor * slope)
        value, off = value + factor * h0, off + abs(factor) * wrong + few * np.abs(factor * h0)
    return centre, rest, value, off


def lines_of(spec: SelfSpec, query: int, value: int | None, constant: bool = True) -> list[tuple[float, SlotLines]]:
    """Self heads as functions of their coordinate `query`: their values are that of the coordinate `value`, which is
    not written (or 0, if None), the coordinate `query` itself, and constants; the last two only if `constant`."""
    found = []
    for h in range(len(spec.W_Q)):
        key = np.concatenate([spec.b_K[h][None], spec.M_K[h]])
        (a, a_low, a_off), (b, b_low, b_off) = _dots(key, spec.W_Q[h, query]), _dots(key, spec.b_Q[h])
        slack = float((np.abs(a_low) + a_off).max()) * (1 + 2 * U), float(b_off.max())
        for v in range(spec.W_V.shape[2]):
            V, moves = np.zeros(len(a)), np.zeros(len(a))
            if value is not None:
                V[0] = spec.W_V[h, value, v]
            if constant:
                V += np.concatenate([spec.b_V[h, v : v + 1], spec.M_V[h, :, v]])
                moves[0] = spec.W_V[h, query, v]
            found.append((float(spec.W_O[h, v, 0]), SlotLines(a, b, V, moves, b_low, slack)))
    return found


def _dots(rows: Array, by: Array) -> tuple[Array, Array, Array]:
    """Inner products, what they lack, and how far their sum can be off: not at all where there is but one product."""
    product, low = two_product(rows, by)
    several = (product != 0).sum(-1) > 1
    off = len(by) * U * (np.abs(product).sum(-1) + np.abs(low).sum(-1)) * (1 + 4 * U)
    return product.sum(-1), low.sum(-1), np.where(several, off, 0.0)


@dataclass(frozen=True, eq=False)
class Tangent:
    """Derivatives of something by the inputs of the network: the smallest and the largest, (..., input), and a bound of
    the sum of their sizes over all inputs, (...): together they move less than each of them can."""

    low: Array
    high: Array
    total: Array

    @classmethod
    def of(cls, ends: Enclosure, total: Array) -> Tangent:
        """Enclosures and some bound of the sum; what is no number is endless, and the sum is at most that of sizes."""
        low, high = np.where(np.isnan(ends[0]), -np.inf, ends[0]), np.where(np.isnan(ends[1]), np.inf, ends[1])
        sizes = np.maximum(np.abs(low), np.abs(high)).sum(-1) * (1 + (low.shape[-1] + 2) * U)
        return cls(low, high, np.fmin(sizes, np.where(np.isnan(total), np.inf, total)))

    @property
    def ends(self) -> Enclosure:
        """The smallest and the largest."""
        return self.low, self.high

    def __getitem__(self, index: Any) -> Tangent:
        """Part of it, by the leading axes of what is derived."""
        return Tangent(self.low[index], self.high[index], self.total[index])

    def __add__(self, other: Tangent) -> Tangent:
        return Tangent.of(plus(self.ends, other.ends), (self.total + other.total) * (1 + 2 * U))

    def where(self, known: Array) -> Tangent:
        """The same on cells where it is known, endless elsewhere."""
        endless = np.where(known, 0.0, np.inf).reshape(-1, *[1] * (self.total.ndim - 1))
        return Tangent(self.low - endless[..., None], self.high + endless[..., None], self.total + endless)


def stacked(parts: Sequence[Tangent], axis: int) -> Tangent:
    """Tangents beside each other, along an axis of what is derived."""
    low, high = (np.stack([part.ends[side] for part in parts], axis) for side in (0, 1))
    return Tangent(low, high, np.stack([part.total for part in parts], axis))


def combined(by: Enclosure, of: Tangent, add_up: float | None = None, most: Array | None = None) -> Tangent:
    """sum_m f_m t_m over the last axis of the coefficients f, (..., m), and that of what is derived in t, (..., m).

    Where all f add up to `add_up` it is add_up p + sum_m f_m (t_m - p) for every p; the middle of all t_m makes that
    small. `most` bounds sum_m |f_m| where that is less than the sum of the bounds.
    """
    size = np.maximum(np.abs(by[0]), np.abs(by[1]))
    count = size.shape[-1]
    over = size.sum(-1) * (1 + count * U)
    most = over if most is None else np.fmin(over, most)
    products = times((by[0][..., None], by[1][..., None]), of.ends)
    with np.errstate(invalid="ignore", over="ignore"):
        low, high = added((products[0].swapaxes(-1, -2), products[1].swapaxes(-1, -2)))
        total = np.fmin((size * of.total).sum(-1), most * of.total.max(-1)) * (1 + 2 * count * U)
        if add_up is not None:
            middle = 0.5 * (of.low.min(-2) + of.high.max(-2))
            away = np.maximum(np.abs(of.low - middle[..., None, :]), np.abs(of.high - middle[..., None, :]))
            away = away * (1 + 2 * U)
            reach = np.fmin((size[..., None] * away).sum(-2), most[..., None] * away.max(-2))
            reach = reach * (1 + 2 * count * U) + 4 * U * np.abs(add_up * middle)
            low, high = np.fmax(low, add_up * middle - reach), np.fmin(high, add_up * middle + reach)
    return Tangent.of((low, high), total)


def shares(low: Array, high: Array) -> Enclosure:
    """The weights of a softmax over the last axis, for logits within [low, high]; -inf is a slot that is not there."""
    off = 4 * U * (np.abs(np.where(np.isfinite(low), low, 0.0)) + np.abs(np.where(np.isfinite(high), high, 0.0)))
    off = (off.max(-1, keepdims=True) * 2 + OWN) * low.shape[-1]
    others = ~np.eye(low.shape[-1], dtype=bool)
    ends = []
    for own, rest in ((low, high), (high, low)):
        with np.errstate(over="ignore", invalid="ignore"):
            gap = rest[..., None, :] - own[..., :, None]
            ends.append(1 / (1 + np.where(others & (rest != -np.inf)[..., None, :], np.exp(gap), 0.0).sum(-1)))
    absent, wild = high == -np.inf, off > 0.25  # logits so large that nothing is known
    least = np.where(absent | wild | np.isnan(ends[0]), 0.0, ends[0] * (1 - 2 * off))
    most = np.minimum(ends[1] * (1 + 2 * off) + 1e-300, 1.0)  # may have underflowed
    most = np.where(wild | np.isnan(ends[1]), 1.0, most)
    return least, np.where(absent, 0.0, most)


def spread_of(weight: Enclosure) -> Enclosure:
    """w (1 - w) for weights w of a softmax: largest at a half."""
    ends = np.stack([w * (1 - w) for w in weight])
    over = (weight[0] <= 0.5) & (weight[1] >= 0.5)
    return np.maximum(ends.min(0) * (1 - 4 * U) - U, 0.0), np.where(over, 0.25, ends.max(0) * (1 + 4 * U) + U)


def scaled_by(a: Enclosure, factor: float | Array) -> Enclosure:
    """An enclosure times exact numbers."""
    return times(a, (np.asarray(factor), np.asarray(factor)))


def added(a: Enclosure) -> Enclosure:
    """The sum of enclosures over the last axis."""
    slack = 2 * a[0].shape[-1] * U * np.maximum(np.abs(a[0]), np.abs(a[1])).sum(-1)
    return a[0].sum(-1) - slack, a[1].sum(-1) + slack


def within(a: Enclosure, b: Enclosure) -> Enclosure:
    """What two enclosures of the same numbers say together."""
    return np.fmax(a[0], b[0]), np.fmin(a[1], b[1])


def times(a: Enclosure, b: Enclosure) -> Enclosure:
    """Products of enclosures, rounded outward."""
    with np.errstate(invalid="ignore"):
        found = np.stack([x * y for x in a for y in b])
    low, high = found.min(0), found.max(0)
    low, high = np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high)
    return low - 2 * U * np.abs(low), high + 2 * U * np.abs(high)


def plus(*parts: Enclosure) -> Enclosure:
    """Sums of enclosures, rounded outward."""
    low, high = (np.sum([p[side] for p in parts], 0) for side in (0, 1))
    slack = 2 * len(parts) * U * np.sum([np.maximum(np.abs(p[0]), np.abs(p[1])) for p in parts], 0)
    return low - slack, high + slack
