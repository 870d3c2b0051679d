"""What is certified about the networks of the theorems: bounds of stored numbers, by A2 to A6, B2, E1, E2 and E4.

Nothing here builds a weight. A bound gets what was asked for (exact rational numbers: the target, the anchors and who
holds them, a grid) and the numbers of the tensors in hand, and answers how far the network that computes with these
numbers in their dtype can be from the target.

**Cold heads.** The ideal head has evenly spaced anchors L_k, logits -beta (y - L_k)^2 and real arithmetic; A2 and A6
bound its error. What is stored has other keys and values and is computed in a dtype: its logits differ from the ideal
ones by what was lost in storing them (known exactly: everything stored is compared with rational numbers) and by R6. R5
turns that into a distance of outputs, cell by cell over the range of y.

**Seams of many heads.** The heads add up to one head over all anchors but for max(|a|, |b|) S, where S is the sum of
lemma A6(a). For n >= 4, S <= 2 G^2 q^(3/2) + 6 G q^3/(1 - q^(2(n-2))), q = exp(-kappa), G = 1 + q + q^4 + ... (A6(b)
with one guard). For n = 3 blocks have one anchor (the outermost two). Let a head's last own anchor be at 0, its
sentinel at 1, y = t.
- t <= 1/2: what is out begins at 2 on the right and, for a block of one, at -2 on the left. Relative to the nearest
  anchor that is at most G q^2 and G q^4 (or the same with the sides exchanged).
- 1/2 <= t <= 3/2: own/window <= G q^(2t-1), out/all <= G q^(3-2t) + G q^6: together at most G^2 (q^2 + q^6).
- t > 3/2: own/window <= G q^(2t-1) <= G q^2, G q^4, ... for one head after the other.
One head is in the first case, two in the second, the rest on both sides in the third:
S <= G (q^2 + q^4) + 2 G^2 (q^2 + q^6) + 2 G q^2/(1 - q^2).

**Warm heads that telescope.** |sum_h head_h - ramp| <= sum_h |head_h - (clip(y, s_h, e_h) - s_h)|. Every y lies within
half a part's length of at most two parts; there each term is at most the largest error `near`, elsewhere at most `far`
(both computed from the stored tables, A4 and A5). So the sum is at most 2 max(near, far) + (H - 2) far, plus its
rounding.

**Hats and grid points** (E1). Hats have errors of at most e <= 1/5, beta >= ln 3, g_i values delta_i apart on side i.
Then |network - f| <= omega(sqrt(sum_i delta_i^2 (1/4 + e + e^2 + s_i))), s_i = g_i^3 exp(-beta (1/2 - 2e)), for f with
concave modulus omega in the Euclidean norm, apart from the rounding of layer 2.

**Cells** (E4). With rho the largest distance of a point of the box from its nearest centre, tau > 0, J centres and
logits computed with errors of at most d: slots whose centre is at squared distance more than tau beyond the nearest
weigh at most exp(-beta tau + 2d) each, all others have |x - c_j|^2 <= rho^2 + tau. So
|head - f| <= omega(sqrt(rho^2 + tau)) + J exp(-beta tau + 2d) max_j |f(c_j) - f(x)| + rounding of a mean.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..box import Box, round_outward
from ..certificates.certificate import Term
from ..certificates.rounding import TINY, exp_ulps, gamma, largest_mean, softmax_rounding, unit, up
from ..dtypes import Array, dtype_name
from ..errors import CertificateError, PrecisionError
from ..functions.registry import piecewise_linear
from ..heads.anchor.bound import AnchorWeights, anchor_bound
from ..heads.gate.bound import GateDomain, gate_error
from ..heads.gate.target import Lines
from ..heads.stored import ROOM, SelfSpec, refuse_beyond
from ..heads.token.bound import UNDERFLOW
from .grid import Grid, Modulus
from .result import Ledger, finite

GONE = 100.0  # slots whose logit is this far below, after all errors, together weigh less than slots * exp(-100)
PER_STEP = 4  # cells of a cold head between neighbouring anchors: the bound of a cell is taken at its worse end
WIDE = 1 << 22  # entries of an array at once: 32 MB in float64
NEAR = 8  # a cold head is looked at closely where y is at most this many spacings away from its keys
FINE = 8  # first cells of a warm head between neighbouring anchors
LARGEST_HAT_ERROR = 0.2  # e of lemma E1
DEAD = 1024  # a logit this far below the largest has an exponential of exactly 0, in float64 too (below exp(-745))
MOST_TERMS = 0.125  # slots times u: R5 counts on sums of not too many terms


# -- what a ramp is asked to be ------------------------------------------------------------------------------------


class ScalarTarget:
    """A monotone piecewise linear function of y = w.x + t: clip(y, a, b), bent by `slope` below 0."""

    def __init__(self, a: float, b: float, slope: float | None = None):
        self.a, self.b, self.slope = Fraction(a), Fraction(b), None if slope is None else Fraction(slope)

    def exact(self, at: Fraction) -> Fraction:
        """The value at a point between a and b."""
        return at if self.slope is None or at >= 0 else self.slope * at

    def value(self, y: Tensor) -> Tensor:
        """The values at any points, in float64."""
        kept = y.clamp(float(self.a), float(self.b))
        return kept if self.slope is None else torch.where(kept >= 0, kept, float(self.slope) * kept)

    @property
    def lipschitz(self) -> float:
        """The steepest slope."""
        return 1.0 if self.slope is None else max(1.0, abs(float(self.slope)))

    @property
    def largest(self) -> float:
        """The largest |value|."""
        return max(abs(float(self.exact(self.a))), abs(float(self.exact(self.b))))

    @property
    def spread(self) -> float:
        """How far apart values are that weight gone astray may mix."""
        if self.slope is None:
            return 0.0  # lemma A2(b) needs no leak term for the ramp itself
        found = [float(self.exact(x)) for x in (self.a, self.b, Fraction(0))]
        return max(found) - min(found)

    def text(self) -> str:
        """The target in words."""
        ramp = f"clip(w.x + t, {float(self.a):g}, {float(self.b):g})"
        return ramp if self.slope is None else f"leaky_relu(w.x + t, {float(self.slope):g}) on |x| <= radius"


@dataclass(frozen=True)
class AnchorRow:
    """Evenly spaced anchors of [a, b] and the heads that hold them: one head all of them, or each head a window.

    With `guards` = 0 a head has keys - 2 anchors of its own and a sentinel on each side, its neighbour's anchor with
    value 0; the outermost sentinels carry a and b. With guards, [a, b] is cut into H equal parts [s_h, e_h]; head h
    makes clip(y, s_h, e_h) - s_h, with so many anchors beyond either end of its part, and head 0 adds a.
    """

    a: Fraction
    b: Fraction
    keys: int
    heads: int = 1
    guards: int = 0

    @property
    def own(self) -> int:
        """How many anchors further the next head's window begins."""
        return self.keys - 1 - 2 * self.guards if self.guards else self.keys - 2

    @cached_property
    def places(self) -> list[Fraction]:
        """All anchors, exactly."""
        between = self.own * self.heads + (0 if self.guards else 1)  # spacings of [a, b]
        step = (self.b - self.a) / between
        return [self.a + k * step for k in range(-self.guards, between + self.guards + 1)]

    @property
    def step(self) -> Fraction:
        """The spacing."""
        return self.places[1] - self.places[0]

    def window(self, h: int) -> list[Fraction]:
        """The anchors that head h sees."""
        return self.places[h * self.own : h * self.own + self.keys]

    def part(self, h: int) -> tuple[Fraction, Fraction]:
        """With guards: the ends of head h's part of [a, b]."""
        start = self.guards + h * self.own
        return self.places[start], self.places[start + self.own]

    def values(self, h: int, shape: ScalarTarget) -> list[Fraction]:
        """The values of head h."""
        if self.guards:
            (start, stop), base = self.part(h), self.a if h == 0 else Fraction(0)
            return [min(max(place, start), stop) - start + base for place in self.window(h)]
        found = [shape.exact(place) for place in self.window(h)]
        found[0] = found[0] if h == 0 else Fraction(0)
        found[-1] = found[-1] if h == self.heads - 1 else Fraction(0)
        return found


@dataclass(frozen=True, eq=False)
class Wanted:
    """A function of y = w.x + t for |x| <= radius, near anchor k on channel channel[k], and 0 on all other channels.

    w and t are the numbers that were asked for, whatever becomes of the tensors. Where the channel changes between
    neighbouring anchors, `margin` spacings on each side of their middle are excluded.
    """

    w: Array
    t: Array
    shape: ScalarTarget
    radius: float
    channel: tuple[int, ...]
    channels: int
    margin: float

    def __post_init__(self) -> None:
        for name in ("w", "t"):  # copies: the tensors they come from may change
            object.__setattr__(self, name, np.array(getattr(self, name), dtype=np.float64))

    @property
    def constant(self) -> bool:
        """Whether all anchors write to one channel."""
        return len(set(self.channel)) == 1

    def excluded(self, anchors: AnchorRow, error: float) -> tuple[tuple[float, float], ...]:
        """Where anchors of different channels are about equally near, for a query that can be off by `error`."""
        if self.constant:
            return ()
        wide, places = self.margin * float(anchors.step) + error, anchors.places
        middles = [float((x + y) / 2) for x, y in itertools.pairwise(places)]
        turns = [m for m, (g, h) in zip(middles, itertools.pairwise(self.channel), strict=True) if g != h]
        return tuple((float(np.nextafter(m - wide, -np.inf)), float(np.nextafter(m + wide, np.inf))) for m in turns)


# -- what is stored ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class StoredHead:
    """Logits slope q + offset of a query q = y - shift, and values (key, channel).

    The ideal slopes are 2 beta (L - r), the ideal offsets -beta (L^2 - r^2), for anchors L as q sees them and a
    `reference` r.
    """

    slope: Array
    offset: Array
    value: Array
    shift: Fraction = Fraction(0)
    reference: Fraction = Fraction(0)

    def beside(self, places: Sequence[Fraction], beta: Fraction) -> ColdTable:
        """The stored keys beside the ideal ones."""
        seen = [place - self.shift for place in places]
        return cold_table(self.slope, self.offset, seen, beta, self.reference)

    def logit(self, reach: float) -> float:
        """The largest |logit| for |q| <= reach."""
        return float(np.max(np.abs(self.slope)) * reach + np.max(np.abs(self.offset)))


@dataclass(frozen=True, eq=False)
class StoredRamp:
    """The numbers of a ramp's tensors. The query is computed as w.x + t, and stands for y - `bias`.

    `spare` counts roundings of the query beyond those of the sum, `depth` is how far below 0 dead keys are.
    """

    dtype: torch.dtype
    w: Array
    t: Array
    heads: tuple[StoredHead, ...]
    bias: Fraction = Fraction(0)
    spare: int = 0
    depth: float = math.inf
    gate: SelfSpec | None = None

    def query(self, wanted: Wanted) -> Query:
        """How large the computed query can be, and how far from the one that was asked for."""
        d, radius = self.w.shape[-1], float(round_outward(np.zeros(1), np.array([wanted.radius]), self.dtype)[1][0])
        size = float(up(float(np.max(np.abs(self.w).sum(-1) * radius + np.abs(self.t))), d + 4))
        moved = np.abs(self.w - wanted.w).sum(-1) * radius  # 0 unless weights were rounded or changed
        shifts = [
            float(abs(Fraction(mine) - (Fraction(asked) - self.bias)))
            for mine, asked in zip(self.t.ravel().tolist(), wanted.t.ravel().tolist(), strict=True)
        ]
        lost = float(np.max(moved)) + max(shifts)
        error = float(up(dot_error(d + self.spare, size, self.dtype) + lost, d + 8))
        logits = [head.logit(size + error + abs(float(head.shift))) for head in self.heads]
        values = sum(float(np.max(np.abs(head.value))) for head in self.heads)
        refuse_beyond("ramp", 2 * ROOM * max(size + error, values, *logits), self.dtype)  # and their differences
        return Query(size + error, error, wanted.radius)


@dataclass(frozen=True)
class Query:
    """|q| is at most `most`, and off by at most `error`, for |x| <= radius."""

    most: float
    error: float
    radius: float

    def term(self, lipschitz: float = 1.0) -> Term:
        """What that adds to a bound."""
        return Term("w.x + t", "rounding", float(up(lipschitz * self.error)), f"|x| at most {self.radius:g}")


# -- cold heads, cell by cell --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ColdTable:
    """Stored keys and values of one head, with their distance from the ideal ones.

    Logits are slope q + offset. The ideal anchors are first + k step, k = 0, ..., in the coordinate q of the query, and
    kappa = beta step^2.
    """

    slope: Array
    offset: Array
    slope_error: Array
    offset_error: Array
    first: float
    step: float
    kappa: float

    @property
    def count(self) -> int:
        return len(self.slope)


def distance(stored: Array, ideal: Sequence[Fraction]) -> Array:
    """|stored - ideal|, rounded up."""
    if not np.isfinite(stored).all():
        raise CertificateError("products of the weights are beyond float64: no bound")
    found = np.array([float(abs(Fraction(float(s)) - x)) for s, x in zip(stored, ideal, strict=True)])
    return np.where(found > 0, up(found, 1), 0.0)


def cold_table(
    slope: Array, offset: Array, places: Sequence[Fraction], beta: Fraction, reference: Fraction
) -> ColdTable:
    """The stored table next to the ideal one: slopes 2 beta (L - r), offsets -beta (L^2 - r^2) for a reference r."""
    slopes = [2 * beta * (place - reference) for place in places]
    offsets = [-beta * (place**2 - reference**2) for place in places]
    step = places[1] - places[0]
    return ColdTable(
        slope, offset, distance(slope, slopes), distance(offset, offsets),
        float(places[0]), float(step), float(beta * step**2),
    )  # fmt: skip


def dot_error(width: int, size: float, dtype: torch.dtype) -> float:
    """The error of w.x + t computed in any order, |w|.|x| + |t| <= size."""
    u = unit(dtype)
    return float(up(float(gamma(width + 1, u)) * size + (width + 2) * TINY[dtype], 4))


def cells(table: ColdTable, low: float, high: float) -> tuple[Array, Array]:
    """Cells that cover [low, high]: several between neighbouring anchors, growing outside of the table."""
    first, last = table.first, table.first + (table.count - 1) * table.step
    inside = first + table.step * np.arange((table.count - 1) * PER_STEP + 1) / PER_STEP
    reach = table.step * 2.0 ** np.arange(0, 64)
    edges = np.concatenate([first - reach[::-1], inside, last + reach])
    edges = edges[(edges > low) & (edges < high)]
    edges = np.concatenate([[low], edges, [high]])
    return edges[:-1], edges[1:]


def head_rounding(
    table: ColdTable, value: Array, value_error: Array, low: Array, high: Array, dtype: torch.dtype,
    inexact: bool = False,
) -> Array:  # fmt: skip
    """For each cell [low, high] of the query an upper bound of |computed head - ideal head|.

    The query is a number of the dtype, or, if `inexact`, rounded once more on the way into the head (R6).
    """
    half = math.ceil(math.sqrt(GONE / table.kappa)) + 3
    while True:
        half = min(half, table.count)
        step = max(1, WIDE // (2 * half + 1))
        parts = [
            _window(table, value, value_error, low[i : i + step], high[i : i + step], half, dtype, inexact)
            for i in range(0, len(low), step)
        ]
        found = np.concatenate(parts)
        if np.isfinite(found).all() or half >= table.count:
            return found
        half *= 2


def _window(
    t: ColdTable, value: Array, value_error: Array, low: Array, high: Array, half: int, dtype: torch.dtype,
    inexact: bool,
) -> Array:  # fmt: skip
    """The same for anchors at most `half` away from the nearest; infinite where others might matter."""
    u, p = unit(dtype), t.count
    middle, radius = 0.5 * (low + high), 0.5 * (high - low) * (1 + 2.0**-50)
    nearest_ = np.clip(np.rint((middle - t.first) / t.step), 0, p - 1).astype(int)
    far = np.maximum(np.abs(low), np.abs(high))  # |q| on the cell
    slack = 2.0**-48 * ((far + abs(t.first)) / t.step + p)  # of positions in steps, computed here in float64
    right = (high - t.first) / t.step - nearest_ + slack
    left = (low - t.first) / t.step - nearest_ - slack
    j = np.arange(-half, half + 1)[None, :]
    index = nearest_[:, None] + j
    there = (index >= 0) & (index < p)
    index = np.clip(index, 0, p - 1)

    def gaps(steps: Array) -> Array:  # least ideal logit of the nearest anchor minus that of the anchor `steps` away
        toward = np.where(steps > 0, right[:, None], left[:, None])
        found = t.kappa * (steps**2 - 2.0 * steps * toward)
        return found - np.abs(found) * 2.0**-46

    gap = np.where(there, gaps(j.astype(float)), np.inf)
    reach = np.maximum(np.abs(left), np.abs(right))[:, None]
    slope, offset = np.abs(t.slope[index]), t.offset[index]
    product = slope * far[:, None]
    logit = np.abs(t.slope[index] * middle[:, None] + offset) + slope * radius[:, None]
    logit += 2.0**-50 * (product + np.abs(offset))
    stored = t.slope_error[index] * far[:, None] + t.offset_error[index]
    rise = np.maximum(-np.min(np.where(there, gap, 0.0), -1, keepdims=True), 0.0)
    centre = stored[:, half : half + 1]
    away = t.kappa * (j**2 + 2.0 * np.abs(j) * reach) + rise + stored + centre
    away = away + np.max(np.where(there, stored, 0.0), -1, keepdims=True)
    if inexact:
        turned = np.abs(t.slope[index] - t.slope[nearest_][:, None]) * far[:, None]
        product = product + turned * (1 + 2.0**-40)
    error = (stored + u * (product + logit + away) * (1 + 8 * u)) * (1 + 2.0**-40)
    error = np.where(there, error, 0.0)
    may_win = there & (gap <= 2 * (error + error[:, half : half + 1]))
    error = error + 1.01 * u * np.max(np.where(may_win, error, 0.0), -1, keepdims=True)
    most = np.max(np.where(may_win, error, 0.0), -1, keepdims=True)
    alive = there & (gap - 2 * error - 2 * most <= GONE)
    # what lies beyond the window: gaps grow faster than errors, so the first anchor outside decides
    beyond = np.concatenate([gaps(np.array([[-half - 1.0]])), gaps(np.array([[half + 1.0]]))], -1)
    outside = np.stack([nearest_ - half - 1 >= 0, nearest_ + half + 1 < p], -1)
    steep = np.max(np.abs(t.slope)) * far + np.max(np.abs(t.offset))
    every = (np.max(t.slope_error) * far + np.max(t.offset_error) + 8 * u * steep)[:, None]
    every = every + 4 * u * t.kappa * ((half + 1.0) ** 2 + 2 * (half + 1.0) * reach)
    unsafe = np.any(outside & (beyond - 2 * every - 2 * most <= GONE), -1)

    weight = np.where(alive, np.minimum(1.0, np.exp(-np.maximum(gap, 0.0)) * (1 + 2.0**-46)), 0.0)
    error = np.where(alive, error, 0.0)
    near = np.abs(value[index] - value[nearest_][:, None])
    moved = largest_mean(weight, near)
    found = softmax_rounding(weight, error, np.abs(value[index]), up(near + moved[:, None]), u, TINY[dtype])
    largest = float(np.max(np.abs(value)) + np.max(value_error))
    lost = 4 * p * (math.exp(-GONE) + TINY[dtype]) * (1 + largest)
    found = up(found + np.max(np.where(there, value_error[index], 0.0), -1) + lost, 4)
    if p * u > MOST_TERMS:
        return np.full(len(low), np.inf)
    return np.where(unsafe, np.inf, found)


# -- ramps ---------------------------------------------------------------------------------------------------------


def seams(kappa: float, own: int, heads: int) -> float:
    """S, an upper bound: how much of max|value| the heads lose against one head over all anchors."""
    if heads == 1:
        return 0.0
    q = math.exp(-kappa) * (1 + 1e-12)
    if not q < 0.99:  # 1 - q^2 would be rounding: no head is as warm as that
        return math.inf
    series = math.fsum(q ** (j * j) for j in range(40)) + 1e-12
    if own == 1:
        found = series * (q**2 + q**4) + 2 * series**2 * (q**2 + q**6) + 2 * series * q**2 / (1 - q**2)
    else:
        found = 2 * series**2 * q**1.5 + 6 * series * q**3 / (1 - q ** (2 * own))
    return found * (1 + 1e-12)


def cold_head(wanted: Wanted, anchors: AnchorRow, beta: Fraction, stored: StoredRamp) -> Ledger:
    """One cold head: half a spacing (A2), and what storing and computing add (A5, R5)."""
    (head,), query, shape = stored.heads, stored.query(wanted), wanted.shape
    table = head.beside(anchors.places, beta)
    _alive(head.logit(query.most), stored.depth)
    low, high = cells(table, -query.most, query.most)
    if not wanted.constant:
        # the computed query may enter an excluded interval by its own error, but not the core of it
        shift, inner = float(anchors.places[0]) - table.first, query.error
        holes = [(x - shift + inner, y - shift - inner) for x, y in wanted.excluded(anchors, query.error)]
        low, high = _without(low, high, holes)
    rounding, ideal = 0.0, anchors.values(0, shape)
    for c in sorted({0, *wanted.channel, *np.flatnonzero(head.value.any(0)).tolist()}):
        value = head.value[:, c]
        error = distance(value, [x if g == c else Fraction(0) for x, g in zip(ideal, wanted.channel, strict=True)])
        rounding = max(rounding, float(np.max(head_rounding(table, value, error, low, high, stored.dtype))))
    kappa, step = float(beta * anchors.step**2), float(anchors.step)
    if beta * anchors.step**2 < 1:
        raise PrecisionError(f"kappa = {kappa:.3g} is not cold; lemma A2 needs kappa >= 1")
    astray = float(up(math.exp(-kappa) * (1 + 1e-9)))
    lost = astray * shape.spread
    if not wanted.constant:
        lost += (astray + math.exp(-2 * kappa * wanted.margin) * (1 + 1e-9)) * shape.largest
    terms = finite(
        Term("selection", "interpolation", float(up(shape.lipschitz * step / 2)), f"half of the spacing {step:.3g}"),
        Term("selection", "leak", float(up(lost))),
        Term("head", "rounding", rounding, f"keys and values as stored, {dtype_name(stored.dtype)}"),
        query.term(shape.lipschitz),
    )
    return Ledger(shape.text(), terms, ("A2", "A5", "R5"))


def cold_heads(wanted: Wanted, anchors: AnchorRow, beta: Fraction, stored: StoredRamp) -> Ledger:
    """Many cold heads: as one head over all anchors (A2), and the seams between them (A6)."""
    query, u, shape = stored.query(wanted), unit(stored.dtype), wanted.shape
    step, kappa = float(anchors.step), float(beta * anchors.step**2)
    top, stray = max(abs(float(shape.a)), abs(float(shape.b))), 0.0
    edges = _edges(anchors, query.most)
    rounding, far, largest, changed = np.zeros(len(edges) - 1), 0.0, top, 0.0
    for h, head in enumerate(stored.heads):
        window, values, shift = anchors.window(h), head.value[:, 0], float(head.shift)
        table, error = head.beside(window, beta), distance(values, anchors.values(h, shape))
        _alive(head.logit(query.most + abs(shift)), stored.depth)
        start, stop = float(window[0]) - NEAR * step, float(window[-1]) + NEAR * step
        low, high = edges[:-1] - shift, edges[1:] - shift
        slack = 2.0**-50 * (np.abs(edges[:-1]) + np.abs(edges[1:]) + abs(shift)) if shift else 0.0
        near = (edges[1:] > start) & (edges[:-1] < stop)
        near |= (h == 0) & (edges[:-1] < start) | (h == anchors.heads - 1) & (edges[1:] > stop)
        rounding[near] += head_rounding(
            table, values, error, (low - slack)[near], (high + slack)[near], stored.dtype, inexact=bool(shift)
        )
        # elsewhere the sentinel wins by kappa (1 + 2 s), s >= NEAR spacings, and errors grow far slower with s
        reach = top + NEAR * step + abs(shift)
        rate = float(np.max(table.slope_error)) + 8 * u * float(np.max(np.abs(table.slope)))
        off = rate * reach + float(np.max(table.offset_error)) + 8 * u * float(np.max(np.abs(table.offset)))
        gap = kappa * (1 + 1.9 * NEAR) - 4 * off
        safe = gap > 0 and 4 * rate * step <= 0.1 * kappa and 32 * u * anchors.keys < 0.05
        far = max(far, 4 * anchors.keys * math.exp(-gap) if safe else math.inf)
        largest = max(largest, float(np.max(np.abs(values))))
        stray += float(max(error[0] if h else 0.0, error[-1] if h < anchors.heads - 1 else 0.0))
        changed += float(np.max(error))
    far = far / -math.expm1(-1.9 * kappa) * 2 * (largest + 1) * (1 + 1e-12) + float(up(stray, anchors.heads))
    size = 2 * top + step  # of what is added up: neighbours share a value
    added = float(gamma(anchors.heads + 1, u)) * max(1.01 * size, size + changed)
    together = (far + added) if anchors.heads > 1 else 0.0
    terms = finite(
        Term("selection", "interpolation", float(up(step / 2)), f"half of the spacing {step:.3g}"),
        Term("seams", "leak", float(up(top * seams(kappa, anchors.own, anchors.heads)))),
        Term("heads", "rounding", float(up(np.max(rounding) * (1 + 2.0**-40) + together))),
        query.term(),
    )
    return Ledger(shape.text(), terms, ("A2", "A5", "A6", "R5"))


def warm_head(wanted: Wanted, anchors: AnchorRow, beta: Fraction, stored: StoredRamp) -> Ledger:
    """One warm head over its range, cell by cell (A4, A5)."""
    (head,), query = stored.heads, stored.query(wanted)
    if head.value[:, 1:].any():
        raise CertificateError("the query must read (y - centre, 1) and values fill one channel; they were changed")
    _alive(head.logit(query.most + abs(float(head.shift))), stored.depth)
    weights = AnchorWeights(head.slope, head.offset, head.value[:, 0], float(head.shift))
    a, b, most = float(wanted.shape.a), float(wanted.shape.b), query.most
    width = b - a
    target = piecewise_linear([a - width, a, b, b + width], [a, a, b, b])
    steps = np.linspace(a, b, FINE * anchors.keys + 1)
    outside = width * 2.0 ** np.arange(-12, 60)  # from far finer than a spacing to beyond every radius
    edges = np.unique(np.concatenate([a - outside[::-1], steps, b + outside, [-most, most]]))
    edges = edges[(edges >= -most) & (edges <= most)]
    edges = np.unique(np.concatenate([edges, [x for x in (a - width, b + width) if -most < x < most]]))
    found = anchor_bound(weights, target, edges, stored.dtype)
    if not np.isfinite(found.bound):
        raise PrecisionError("no finite bound can be given for this warm ramp; use float64 or a smaller radius")
    return _smooth(wanted, found.interpolation, found.rounding, query)


def warm_heads(wanted: Wanted, anchors: AnchorRow, beta: Fraction, stored: StoredRamp) -> Ledger:
    """Warm heads that telescope: two neighbours err by the most of one, the others by what is left far away."""
    query, a, b = stored.query(wanted), float(wanted.shape.a), float(wanted.shape.b)
    found = [_warm_part(h, head, anchors, query.most, stored) for h, head in enumerate(stored.heads)]
    near, far = max((x[:2] for x in found), key=sum), max(x[2] for x in found)
    H, each = anchors.heads, min(2, anchors.heads)
    beyond = max(0.0, far - near[0] - near[1])  # A6(d) takes the most of one head over all y, far ones included
    near = (near[0], near[1] + beyond)
    largest, errors = max(abs(a), abs(b)), each * (near[0] + near[1]) + (H - each) * far
    size = max(largest + 2 * (b - a), largest + (b - a) + errors)  # of what is added up
    added = float(gamma(H + 1, unit(stored.dtype))) * size if H > 1 else 0.0
    spacing = f"of two neighbours, spacing {float(anchors.step):.3g}"
    terms = finite(
        Term("heads", "interpolation", float(up(each * near[0], 2)), spacing),
        Term("heads", "rounding", float(up(each * near[1] + (H - each) * far + added, 4))),
        query.term(),
    )
    return Ledger(wanted.shape.text(), terms, ("A4", "A5", "A6"))


def _warm_part(
    h: int, head: StoredHead, anchors: AnchorRow, most: float, stored: StoredRamp
) -> tuple[float, float, float]:
    """Head h within half a part's length of its part: interpolation, rounding; and its error elsewhere."""
    _alive(head.logit(most + abs(float(head.shift))), stored.depth)
    weights = AnchorWeights(head.slope, head.offset, head.value[:, 0], float(head.shift))
    low, high = (float(x) for x in anchors.part(h))
    base, width = float(anchors.a) if h == 0 else 0.0, high - low
    target = piecewise_linear([low - width, low, high, high + width], [base, base, base + width, base + width])
    # the rounding of the ends themselves: how far this target can be from the exact part of the ramp
    moved = 4 * 2.0**-52 * (abs(low) + abs(high) + abs(base) + width)
    left, right = low - width / 2, high + width / 2
    inside = np.linspace(low, high, FINE * anchors.own + 1)
    tails = width / 2 * 2.0 ** -np.arange(0.0, 16.0)
    edges = np.unique(np.clip(np.concatenate([low - tails, inside, high + tails]), -most, most))
    here = anchor_bound(weights, target, edges, stored.dtype) if len(edges) > 1 else None
    growing = width / 2 * 2.0 ** np.arange(0.0, 60.0)
    rest = 0.0
    for outside in (np.append(left - growing[growing < left + most][::-1], left), right + growing[growing < most]):
        kept = np.unique(np.clip(np.concatenate([outside, [-most if outside[-1] <= left else most]]), -most, most))
        if len(kept) > 1:
            rest = max(rest, anchor_bound(weights, target, kept, stored.dtype).bound)
    near = (here.interpolation, here.rounding) if here is not None else (0.0, 0.0)
    if not np.isfinite([*near, rest]).all():
        raise PrecisionError("no finite bound can be given for these warm heads; use float64 or a smaller radius")
    return near[0] + moved, near[1], rest + moved


def gate_head(wanted: Wanted, anchors: AnchorRow, beta: Fraction, stored: StoredRamp) -> Ledger:
    """Two constants and the token itself (B2)."""
    query, spec, a, b = stored.query(wanted), stored.gate, wanted.shape.a, wanted.shape.b
    assert spec is not None
    if spec.W_O[..., 1:].any() or spec.S[:, 1:].any() or spec.s[1:].any():
        raise CertificateError("a gate writes to one channel; weights of other channels were changed")
    first = SelfSpec(**{**vars(spec), "W_O": spec.W_O[..., :1], "S": spec.S[:, :1], "s": spec.s[:1]})
    ends = np.array([min(-query.most, float(a))]), np.array([max(query.most, float(b))])
    low, high = (float(v[0]) for v in round_outward(*ends, stored.dtype))
    largest = math.nextafter(max(abs(low), abs(high), abs(float(a)), abs(float(b))), math.inf)
    one, zero = Fraction(1), Fraction(0)
    target = Lines((float(a), float(b)), ((zero, a), (one, zero), (zero, b)))
    keys = np.abs(np.concatenate([first.b_K[:, None], first.M_K], 1)).max(1)
    query_size = np.abs(first.W_Q[:, 0]) * largest + np.abs(first.b_Q)
    refuse_beyond("gate", 2 * ROOM * float(np.max(np.sum(query_size * keys, -1))), stored.dtype)
    found = gate_error(first, target, GateDomain(low, high, None, largest), stored.dtype)
    return _smooth(wanted, found.mismatch + found.leak, found.rounding, query)


def _smooth(wanted: Wanted, interpolation: float, rounding: float, query: Query) -> Ledger:
    """The ledger of one head after an affine layer."""
    terms = finite(
        Term("head", "interpolation", interpolation), Term("head", "rounding", rounding), query.term()
    )
    return Ledger(wanted.shape.text(), terms, ("A4", "A5", "B2"), ("exp(0) = 1",))


def _alive(logit: float, depth: float) -> None:
    """Raise unless keys at -depth weigh an exact 0 beside logits of this size."""
    if not logit <= depth / 2:
        raise CertificateError(f"logits of up to {logit:.3g} come near to those of keys that must weigh nothing")


def _edges(anchors: AnchorRow, most: float) -> Array:
    """Cells of many cold heads: several between neighbouring anchors, then growing up to `most`."""
    step, first, last = float(anchors.step), float(anchors.a), float(anchors.b)
    inside = first + step * np.arange((len(anchors.places) - 1) * PER_STEP + 1) / PER_STEP
    outside = step * np.concatenate([np.arange(1, NEAR + 2), (NEAR + 2) * 2.0 ** np.arange(0, 60)])
    edges = np.concatenate([first - outside[::-1], inside, last + outside])
    return np.concatenate([[-most], edges[(edges > -most) & (edges < most)], [most]])


def _without(low: Array, high: Array, holes: Sequence[tuple[float, float]]) -> tuple[Array, Array]:
    """The parts of cells outside of the holes."""
    edges = np.unique(np.concatenate([low, high[-1:], *(np.array(hole) for hole in holes)]))
    edges = edges[(edges >= low[0]) & (edges <= high[-1])]
    left, right = edges[:-1], edges[1:]
    kept = np.ones(len(left), dtype=bool)
    for start, stop in holes:
        kept &= ~((left >= start) & (right <= stop))
    if not kept.any():
        raise PrecisionError("G changes the channel so often that no input is left where the bound holds; lower margin")
    return left[kept], right[kept]


# -- selections among grid points and cells -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Hats:
    """What a network of hats is asked to be: f's samples at the points of a grid, told apart by hats of its axes.

    `places` are the anchors of the ramps, centred, at the inverse temperature ramp_beta; `beta` sharpens the selection.
    With `tokens` > 0 every token gathers the sequence first, and dead keys are at -dead. `softmax` selects by channels.
    """

    grid: Grid
    samples: Array  # (grid point, output)
    modulus: Modulus | None
    places: tuple[Fraction, ...]
    ramp_beta: Fraction
    beta: float
    dead: float
    tokens: int
    softmax: bool

    def queries(self, dtype: torch.dtype) -> list[tuple[Fraction, Fraction, float]]:
        """For every ramp: rate, shift, and the largest |x| of its coordinate."""
        found: list[tuple[Fraction, Fraction, float]] = []
        outward = self.grid.box.outward(dtype).intervals()
        for i, step in enumerate(self.grid.steps):
            size = max(abs(v) for v in outward[i])
            found += [(1 / step, -at / step - Fraction(1, 2), size) for at in self.grid.axis(i)[:-1]]
        return found


def hats_unchanged(asked: Hats, stored: Mapping[str, Array]) -> None:
    """Raise `CertificateError` unless all weights but ramps, queries and values do what the lemma says, exactly."""
    grid, n = asked.grid, asked.tokens
    hats, D = sum(grid.counts), len(grid.counts)
    reads, differences = np.zeros(stored["W_Q1"].shape, dtype=bool), np.zeros(stored["W_O1"].shape)
    constant, skip = np.zeros(hats + n), np.zeros((D + n, hats + n))
    ramp = hat = 0
    for i, count in enumerate(grid.counts):  # hat k of a coordinate is ramp k - 1 less ramp k, the first one 1 - ramp 0
        constant[hat] = 1.0
        for k in range(count - 1):
            reads[ramp + k, i, 0] = True
            differences[ramp + k, 0, hat + k : hat + k + 2] = -1.0, 1.0
        ramp, hat = ramp + count - 1, hat + count
    skip[D:, hats:] = np.eye(n)
    points = np.zeros((grid.size, hats))
    starts = np.cumsum([0, *grid.counts[:-1]])
    np.put_along_axis(points, grid.index().numpy() + starts, 1.0, 1)
    keys = np.concatenate([points.repeat(max(1, n), 0), _dead_keys(grid.size, n, asked.dead)], 1)
    scale = np.array([asked.beta] * hats + [1.0] * n)
    pairs = [
        (np.where(reads, 0.0, stored["W_Q1"]), np.zeros(reads.shape)), (stored["b_Q1"][:, 1], np.ones(len(reads))),
        (stored["W_O1"], differences), (stored["s_1"], constant),
    ]  # fmt: skip
    if n:
        pairs += [(stored["S_1"], skip), *_gathering(stored, n, grid.box.shape[1], asked.dead)]
    if asked.softmax:
        pairs.append((stored["W_1"], (keys * scale).T))
    else:
        width = stored["W_O"].shape[-1]
        pairs += [(stored["W_K"], keys), (stored["W_Q"], np.diag(scale)), (stored["W_O"], np.eye(width))]
    if not all(np.array_equal(mine, expected) for mine, expected in pairs):
        raise CertificateError(
            "weights that select hats or grid points were changed: there is no certificate for these"
        )


def _beyond(box: Box, dtype: torch.dtype) -> float:
    """How far outside of the box a number of the dtype may lie that counts as inside."""
    wide = box.outward(dtype)
    over = torch.maximum(box.lower - wide.lower, wide.upper - box.upper).clamp_min(0.0)
    return float(up(float(over.norm()), box.dim + 4)) if bool(over.any()) else 0.0


def _dead_keys(cells: int, tokens: int, dead: float) -> Array:
    """For every cell and token: 0 at that token's position, -dead at the others."""
    return np.tile(dead * (np.eye(tokens) - 1), (cells, 1)) if tokens else np.zeros((cells, 0))


def _gathering(stored: Mapping[str, Array], n: int, width: int, dead: float) -> list[tuple[Array, Array]]:
    """Pairs that agree if the gather layer gives every token the channels of all, in order, and its position (D1)."""
    D = n * width
    key, read = np.zeros((n, width + n, n)), np.zeros((n, width + n, width))
    key[:, width:], read[:, :width] = dead * np.eye(n), np.eye(width)
    out, skip = np.eye(D, D + n).reshape(n, width, D + n), np.zeros((width + n, D + n))
    skip[width:, D:] = np.eye(n)
    expected = {
        "gather W_Q": np.zeros((n, width + n, n)), "gather b_Q": np.eye(n), "gather W_K": key,
        "gather b_K": np.full((n, n), -dead), "gather W_V": read, "gather W_O": out, "gather S": skip,
        "positions": np.eye(n),
    }  # fmt: skip
    return [(stored[name], array) for name, array in expected.items()]


def hat_error(asked: Hats, stored: Mapping[str, Array], dtype: torch.dtype) -> float:
    """How far a computed hat can be from the hat function, on the box."""
    u, most, reach = unit(dtype), 0.0, 0.0
    slope, offset = stored["W_K1"].T
    table = cold_table(slope, offset, asked.places, asked.ramp_beta, Fraction(0))
    rates, biases = stored["W_Q1"][..., 0].sum(-1).tolist(), stored["b_Q1"][:, 0].tolist()
    for weight, bias, (rate, shift, size) in zip(rates, biases, asked.queries(dtype), strict=True):
        lost = float(abs(Fraction(weight) - rate)) * size + float(abs(Fraction(bias) - shift))
        span = abs(weight) * size + abs(bias)
        most = max(most, float(up(lost + float(gamma(2, u)) * span + 4 * TINY[dtype], 8)))
        reach = max(reach, span * (1 + 1e-9))
    low, high = cells(table, -reach - most, reach + most)
    value = stored["W_V1"][:, 0]
    error = distance(value, [x + Fraction(1, 2) for x in asked.places])
    rounding = float(np.max(head_rounding(table, value, error, low, high, dtype)))
    return float(up(2 * (0.5 / (len(asked.places) - 1) + rounding + most) + 8 * u, 8))


def hats_ledger(asked: Hats, stored: Mapping[str, Array], dtype: torch.dtype, measured: float | None) -> Ledger:
    """Hats of every coordinate, then a selection among grid points (E1, E2)."""
    hats_unchanged(asked, stored)
    hat, u, D, grid = hat_error(asked, stored, dtype), unit(dtype), len(asked.grid.counts), asked.grid
    if not hat <= LARGEST_HAT_ERROR:
        raise PrecisionError(f"hats are computed with errors up to {hat:.3g}, which is too much to tell them apart")
    away = math.exp(-asked.beta * (0.5 - 2 * hat)) * (1 + 1e-9)
    square = sum(
        float(step) ** 2 * (0.25 + hat + hat**2 + count**3 * away)
        for step, count in zip(grid.steps, grid.counts, strict=True)
    )
    reach = float(up(math.sqrt(square) * (1 + 1e-12)))
    slots, logit = grid.size * max(1, asked.tokens), asked.beta * D * (1 + hat)
    sizes = (float(np.max(np.abs(x), initial=0.0)) for x in stored.values())
    refuse_beyond("hats", 2 * ROOM * max(logit, *sizes), dtype)
    d = float(up(float(gamma(D + 3, u)) * logit + (exp_ulps() + 1) * u, 8))
    if d > 0.2 or slots * u >= MOST_TERMS:
        raise PrecisionError(f"logits of {logit:.3g} over {slots} keys leave no bound in {dtype_name(dtype)}")
    if asked.modulus is None:
        return Ledger("f", certified=False, measured=measured)
    values = stored["read" if asked.softmax else "W_V"].reshape(grid.size, -1)
    largest, lost = float(np.max(np.abs(values))), float(np.max(np.abs(values - asked.samples)))
    spread = float(np.max(np.max(values, 0) - np.min(values, 0)))
    # as built, all but the corners of a cell are lighter than a rounding, also after their logits are rounded
    light = away * math.exp(2 * d) <= u / slots
    heavy = 2 * (2**D if light else slots) + 4  # slots that are added up, twice, and four operations
    rounding = math.exp(d) * math.expm1(d) * spread + float(gamma(heavy, u)) * largest
    rounding += 2 * slots * TINY[dtype] * (1 + largest)
    position = 2.0**-50 * math.sqrt(D) * max(abs(v) for pair in grid.box.intervals() for v in pair)
    position += _beyond(grid.box, dtype)  # grid points are rounded before f sees them, inputs to numbers of the dtype
    moved = asked.modulus(position) if position > 0 else 0.0
    points = f"{grid.size} grid points, hats within {hat:.2g}"
    terms = finite(
        Term("grid", "interpolation", float(up(asked.modulus(reach) * (1 + 1e-12))), points),
        Term("selection", "rounding", float(up(rounding + lost + moved, 16))),
    )
    dead = (UNDERFLOW,) if asked.tokens else ()
    return Ledger("f", terms, ("A2", "E2" if asked.softmax else "E1", "R5"), dead, measured=measured)


@dataclass(frozen=True, eq=False)
class CellRow:
    """What a network of cells is asked to be: f's samples at centres, the nearest of which is to be selected.

    Every point of the box is within `reach` of a centre. With `tokens` > 0 every token gathers the sequence first, and
    dead keys are at -dead.
    """

    box: Box
    centres: Array  # (cell, coordinate)
    samples: Array  # (cell, output)
    modulus: Modulus | None
    reach: float
    eps0: float
    middle: tuple[Fraction, ...]  # of the box, as it was stored first
    beta: Fraction
    tau: float
    dead: float
    tokens: int

    def keys(self) -> tuple[list[list[Fraction]], list[Fraction]]:
        """beta (2 c, -|c|^2), centred on the middle of the box, exactly."""
        rows = [[Fraction(x) - m for x, m in zip(row, self.middle, strict=True)] for row in self.centres.tolist()]
        return [[2 * self.beta * x for x in row] for row in rows], [
            -self.beta * sum(x * x for x in row) for row in rows
        ]


def cells_unchanged(asked: CellRow, stored: Mapping[str, Array]) -> None:
    """Raise `CertificateError` unless all weights but keys and values do what the lemma says, exactly."""
    D, n = len(asked.middle), asked.tokens
    query = np.zeros((D + n, D + 1 + n))
    query[:D, :D], query[D:, D + 1 :] = np.eye(D), np.eye(n)
    pairs = [(stored["W_Q"], query), (stored["b_Q"][D:], np.eye(1, 1 + n)[0])]
    if "context reads" in stored:  # the two parts of a token of the second sequence
        pairs.append((stored["context reads"], np.eye(len(stored["context reads"]))))
    if n:
        pairs += [(stored["W_K"][:, -n:], _dead_keys(len(asked.centres), n, asked.dead))]
        pairs += _gathering(stored, n, asked.box.shape[1], asked.dead)
    if not all(np.array_equal(mine, expected) for mine, expected in pairs):
        raise CertificateError(
            "the query must read (x - middle of the box, 1), and cells and positions must be told apart; "
            "weights that do so were changed"
        )


def cells_ledger(
    asked: CellRow, stored: Mapping[str, Array], dtype: torch.dtype, depth: float, measured: float | None
) -> Ledger:
    """One head that picks the nearest centre (E4)."""
    cells_unchanged(asked, stored)
    D, n, u, J = len(asked.middle), max(1, asked.tokens), unit(dtype), len(asked.centres)
    keys, values = stored["W_K"][:, : D + 1], stored["W_V"].reshape(J, -1)
    outward, middle = asked.box.outward(dtype), -stored["b_Q"][:D]
    lower, upper = outward.lower.flatten().numpy(), outward.upper.flatten().numpy()
    half = np.maximum(upper - middle, middle - lower)
    logit = float(np.max(np.abs(keys[:, :-1]) @ half + np.abs(keys[:, -1])))
    slopes, offsets = asked.keys()
    ideal = np.array([[*map(float, row), float(o)] for row, o in zip(slopes, offsets, strict=True)]).repeat(n, 0)
    off = np.abs(keys - ideal) + 2.0**-52 * np.abs(ideal)
    moved = np.array([float(abs(Fraction(x) - m)) for x, m in zip(middle.tolist(), asked.middle, strict=True)])
    lost = float(np.max(off[:, :-1] @ half + off[:, -1] + np.abs(keys[:, :-1]) @ moved))
    d = float(up(float(gamma(D + 5, u)) * 2 * logit + lost * (1 + 1e-9) + (exp_ulps() + 1) * u, 8))
    if asked.tokens and asked.dead < 4 * logit + DEAD:
        raise PrecisionError(f"logits of up to {logit:.3g} are too large for keys at -{asked.dead:.3g}")
    _alive(logit, depth)
    refuse_beyond("cells", 2 * ROOM * max(logit, float(np.max(np.abs(values)))), dtype)
    if asked.modulus is None:
        return Ledger("f", certified=False, measured=measured)
    if J * u > MOST_TERMS:
        raise PrecisionError(f"{J} cells are too many for sums in {dtype_name(dtype)}; use float64 or fewer cells")
    reach = asked.reach + _beyond(asked.box, dtype)
    beta, largest = float(asked.beta), float(np.max(np.abs(values)))
    wrong = float(np.max(np.abs(values - asked.samples)))
    spread = float(np.max(np.max(values, 0) - np.min(values, 0))) + 2 * wrong
    tau = max(asked.tau, (2 * d + math.log(J / asked.eps0)) / beta)  # rounded logits tell cells apart less sharply
    near = math.sqrt(reach**2 + tau) * (1 + 1e-12)
    others = J * math.exp(-beta * tau + 2 * d) * (spread + asked.modulus(reach)) * (1 + 1e-9)
    rounding = float(gamma(2 * J + 4, u)) * largest + 2 * J * TINY[dtype] * (1 + largest) + wrong
    around = f"{J} cells within {asked.reach:.3g} of their centres"
    terms = finite(
        Term("cells", "interpolation", float(up(asked.modulus(near) * (1 + 1e-12))), around),
        Term("cells", "leak", float(up(others))),
        Term("head", "rounding", float(up(rounding, 8))),
    )
    dead = (UNDERFLOW,) if asked.tokens or depth < math.inf else ()
    return Ledger("f", terms, ("E4", "R5"), dead, measured=measured)
