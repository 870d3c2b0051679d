"""A rigorous bound of |anchor head - function| over an interval, in milliseconds (lemma A4 of docs/theory.md).

A head with logits a_k (y - c) + b_k, values V_k and a linear skip is compared with g on cells of the interval. On a
cell with centre m and radius r, with w_k the weights at m, s_k = a_k - E_w a and any constant h0,

    h(m+t) - g(m+t) = [ E_w (V - h0) e^{st} - (g(m+t) - h0) E_w e^{st} ] / E_w e^{st},     denominator >= 1 (Jensen).

The numerator is a power series in t whose coefficients are moments of the weights and the Taylor coefficients of g
(rigorous, from `functions.registry`), so its largest value is a short sum. Everything here runs in float64 and pays for
its own rounding: logits at the centre are computed without error (two-sum, two-product), and what remains is one
relative error of at most `OWN` for each weight, which the bound includes. Rounding of the head's own evaluation is
lemma A5, `rounding.softmax_rounding`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from ...certificates.rounding import TINY, gamma, largest_mean, softmax_rounding, two_product, two_sum, unit, up
from ...dtypes import Array
from ...functions.queries import Largest
from ...functions.registry import Taylor, Univariate, taylor
from ..slopes import SlotLines, Steepness, steepness

ORDER = 8  # Taylor order of the cell expansion
CELLS = 512  # cells of the first pass: sixteen between the anchors of a table of 32
HOPELESS = 6  # halvings in a row after which most parts of cells without a bound have none: no target is there
PATIENCE = 2  # with so many times the first cells, halving the worst must gain 5 % to go on
MOST_CELLS = 1 << 17  # of a bound: beyond, memory goes into gigabytes, and the bound has long settled
LENGTHS = 40  # the 17th power of radii between 2^-40 and 2^40 is far inside float64, with what it is multiplied by
WINDOW = 96  # above this many anchors only those that matter near a cell are gathered
NEGLIGIBLE = 60.0  # anchors whose logit is this far below the largest count as leaked mass exp(-60)
U = 2.0**-53  # the roundoff of what is computed here
LONG = float(np.finfo(np.longdouble).eps)  # sums here run in extended precision where the machine has it
#: Relative error of a weight computed here: exp (4 u), correction of its argument (2 u), normalisation (2 u).
OWN = 8.0 * U


Reading = Callable[[Array, Array], Array]  # the error of an evaluation on each of some intervals, given by their ends


@dataclass(frozen=True)
class AnchorWeights:
    """The numbers of one anchor head, exactly as stored: q = y - centre; logits slope*q + offset; values; skip a*y +
    b."""

    slope: Array
    offset: Array
    value: Array
    centre: float = 0.0
    skip: tuple[float, float] = (0.0, 0.0)

    def evaluate(self, y: Array) -> Array:
        """The head in float64, for fitting and drawing; not rigorous."""
        return self.weights(y) @ self.value + self.skip[0] * y + self.skip[1]

    def weights(self, y: Array) -> Array:
        """The softmax weights in float64, shape (point, anchor)."""
        logits = np.multiply.outer(y - self.centre, self.slope) + self.offset
        logits -= logits.max(-1, keepdims=True)
        np.exp(logits, out=logits)
        return logits / logits.sum(-1, keepdims=True)


@dataclass(frozen=True)
class AnchorBound:
    """The worst cell: where it is, and how its error splits."""

    bound: float
    interpolation: float
    rounding: float
    worst_rounding: float
    where: float
    low: Array
    high: Array
    error: Array

    @property
    def cells(self) -> int:
        """How many cells the bound took."""
        return len(self.low)

    def over(self, low: Array, high: Array) -> Array:
        """The bound on each of the intervals [low, high], which must lie inside: the largest error of their cells."""
        order = np.argsort(self.low)
        return Largest(self.low[order], self.error[order]).over(low, high)


def anchor_bound(
    head: AnchorWeights, fn: Univariate, edges: Array, dtype: torch.dtype, relative: bool = False,
    reading: Reading | None = None,
) -> AnchorBound:  # fmt: skip
    """An upper bound of |head - fn| on [edges[0], edges[-1]], evaluation in `dtype` included.

    `edges` are the boundaries of the first cells; cells that look bad are halved until the bound stops improving.
    With `relative` the bound is on |head - fn| / |fn|. `reading` bounds the error of another evaluation than the
    softmax on intervals, given by their ends: then the bound holds for both.
    """
    low, high = edges[:-1], edges[1:]
    interpolation, rounding = _cells(head, fn, low, high, dtype, relative, reading)
    stuck, hopeless = 0, 0
    for _ in range(40):
        sums = interpolation + rounding
        worst = float(np.max(sums))
        open_cells = sums > (0.9 * worst if np.isfinite(worst) else np.finfo(float).max)
        middle = 0.5 * (low + high)
        splittable = open_cells & (middle > low) & (middle < high)
        if not splittable.any() or len(low) + int(splittable.sum()) > MOST_CELLS:
            break
        at = middle[splittable]
        new_low, new_high = np.concatenate([low[splittable], at]), np.concatenate([at, high[splittable]])
        found = _cells(head, fn, new_low, new_high, dtype, relative, reading)
        endless = np.count_nonzero(np.isinf(found[0] + found[1]))
        hopeless = hopeless + 1 if not np.isfinite(worst) and endless > 1.5 * splittable.sum() else 0
        if hopeless == HOPELESS:
            break
        keep = ~splittable
        low, high = np.concatenate([low[keep], new_low]), np.concatenate([high[keep], new_high])
        interpolation = np.concatenate([interpolation[keep], found[0]])
        rounding = np.concatenate([rounding[keep], found[1]])
        now, many = interpolation + rounding, len(low) > PATIENCE * len(edges)
        stuck = stuck + 1 if float(np.max(now)) > (0.95 if many else 0.985) * worst else 0
        enough = many or stuck > 8
        if stuck and np.isfinite(worst) and (enough or _settled(head, fn, low, high, now, rounding, relative)):
            break
    at_worst = int(np.argmax(interpolation + rounding))
    parts = float(interpolation[at_worst]), float(rounding[at_worst])
    bound = float(up(sum(parts), 2))
    where = float(0.5 * (low[at_worst] + high[at_worst]))
    worst_rounding = float(up(np.max(rounding), 2))
    return AnchorBound(bound, *parts, worst_rounding, where, low, high, up(interpolation + rounding, 2))


def _settled(
    head: AnchorWeights, fn: Univariate, low: Array, high: Array, error: Array, rounding: Array, relative: bool
) -> bool:
    """Whether the worst cell's bound is about the error in its middle, so that splitting will not lower it."""
    at = int(np.argmax(error))
    middle = np.array([0.5 * (low[at] + high[at])])
    wanted = fn.value(torch.from_numpy(middle)).numpy()
    there = float(np.abs(head.evaluate(middle) - wanted)[0] / (abs(float(wanted[0])) if relative else 1.0))
    return bool(error[at] <= 1.1 * there + 1.2 * rounding[at])


def _cells(
    head: AnchorWeights, fn: Univariate, low: Array, high: Array, dtype: torch.dtype, relative: bool,
    reading: Reading | None,
) -> tuple[Array, Array]:  # fmt: skip
    table = _constant_where_better(taylor(fn, low, high, ORDER))
    step = max(1, (1 << 22) // len(head.slope))
    with np.errstate(
        over="ignore", invalid="ignore", divide="ignore"
    ):  # a cell that is too wide gives an infinite bound
        rows = [slice(i, i + step) for i in range(0, len(low), step)]
        parts = [_chunk(head, _rows(table, some), dtype, relative, reading) for some in rows]
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


def _chunk(
    head: AnchorWeights, table: Taylor, dtype: torch.dtype, relative: bool, reading: Reading | None
) -> tuple[Array, Array]:
    """Interpolation and rounding bounds for the cells of a table, one number each per cell."""
    r, u = table.radius[:, None], unit(dtype)
    slope, offset, value, dropped = _window(head, table.centre, table.radius, u)
    weight, gap, logit, rest, scale = _weights_at(table.centre, head.centre, slope, offset)
    s = slope - np.sum(weight * slope, -1, keepdims=True)
    sr = np.abs(s) * r
    exponent = up(sr - gap, 8)
    lifted = np.exp(exponent) * (scale * (1 + 16 * U))  # weight times e^{|s| r}, formed without overflow
    slots = weight.shape[-1]
    # relative error of a weight, of s in the exponent, and of each term of a moment, whose sums run in extended
    # precision
    own = OWN + (6 + 3 * sr) * U + rest * (rest + 8 * U) + slots * LONG
    drift = np.abs(np.sum(weight * s, -1)) + (slots + 4) * U * np.sum(weight * np.abs(s), -1)
    least = 1 - np.sum(weight * own, -1) - (slots + 4) * U  # of the denominator, by Jensen
    least = np.where(least > 0.5, least * np.exp(-drift * table.radius) * (1 - 8 * U), np.nan)  # NaN: an infinite bound

    # g minus the skip, as a series around the cell's centre; on very long and very short cells in another unit
    a, b = head.skip
    unit_length = _unit_length(table.radius)
    coefficient, error = _in_units(table.coefficient, unit_length), _in_units(table.error, unit_length)
    lost = np.where(unit_length == 0, 0.0, np.finfo(float).smallest_subnormal)  # where one underflows
    error += lost[:, None]
    remainder = np.ldexp(table.remainder, (ORDER + 1) * unit_length) + lost
    line = a * table.centre + b
    h0 = np.sum(weight * value, -1)
    own_zero = 4 * U * (np.abs(coefficient[:, 0]) + np.abs(a * table.centre) + abs(b) + np.abs(line) + np.abs(h0))
    coefficient[:, 0] -= line + h0
    error[:, 0] += own_zero
    coefficient[:, 1] -= np.ldexp(a, unit_length)
    error[:, 1] += U * np.abs(coefficient[:, 1])
    s_unit, radius = np.ldexp(s, unit_length[:, None]), np.ldexp(table.radius, -unit_length)

    # moments of the weights: nu_j = E (V - h0) s^j / j!, mu_j = E s^j / j!, and their sizes without signs
    away = value - h0[:, None]
    away_size = np.abs(away) * (1 + 2 * U)
    nu, mu = np.empty_like(coefficient), np.empty_like(coefficient)
    power, factor = weight.copy(), 1.0
    for j in range(ORDER + 1):
        nu[:, j] = np.sum(power * away, -1, dtype=np.longdouble) / factor
        mu[:, j] = np.sum(power, -1, dtype=np.longdouble) / factor
        power *= s_unit
        factor *= j + 1
    tail = sr ** (ORDER + 1) / factor * lifted  # what the series of e^{st} leaves out
    nu_tail, mu_tail = np.sum(tail * away_size, -1), np.sum(tail, -1)
    mu_size = np.sum(lifted, -1)

    # the numerator: coefficients nu_j - sum_i gamma_i mu_{j-i}, each at most |.| r^j
    powers = radius[:, None] ** np.arange(2 * ORDER + 1)
    numerator = np.zeros((len(h0), 2 * ORDER + 1))
    numerator[:, : ORDER + 1] = nu
    for i in range(ORDER + 1):
        numerator[:, i : i + ORDER + 1] -= coefficient[:, i : i + 1] * mu
    main = np.sum(np.abs(numerator) * powers, -1)
    g_size = np.sum((np.abs(coefficient) + error) * powers[:, : ORDER + 1], -1) + remainder * powers[:, ORDER + 1]
    g_error = np.sum(error * powers[:, : ORDER + 1], -1) + remainder * powers[:, ORDER + 1]
    arithmetic = np.sum(lifted * own * (away_size + g_size[:, None]), -1)
    spread_dropped = dropped * (np.max(np.abs(head.value)) + np.abs(h0) + g_size)
    interpolation = main + nu_tail + g_size * mu_tail + g_error * mu_size + arithmetic + spread_dropped
    anywhere = largest_mean(up(lifted / least[:, None]), away_size) + spread_dropped  # |h - h0| on a cell of any width
    interpolation = up(np.fmin(interpolation / least, anywhere + g_size), 32)

    # rounding of the head's evaluation in dtype
    moved = (np.sum(np.abs(nu) * powers[:, : ORDER + 1], -1) + nu_tail + arithmetic + spread_dropped) / least
    moved = np.fmin(moved, anywhere)
    reach = (np.abs(table.centre - head.centre) + table.radius)[:, None] * (1 + 4 * U)
    bump = np.max(sr - gap, -1, keepdims=True)
    logit_size = np.abs(logit) + np.abs(slope) * r
    position = reach * np.abs(s) if head.centre else 0.0
    d = u * (np.abs(slope) * reach + logit_size + gap + bump + sr + position) * (1 + 8 * u) * (1 + 16 * U)
    spread = away_size + moved[:, None]
    # The largest logit is subtracted as computed: it may be that of an anchor whose error bridges its gap to the top.
    top = np.argmin(gap, -1)[:, None]
    d_top, sr_top = (np.take_along_axis(np.broadcast_to(x, gap.shape), top, -1) for x in (d, sr))
    largest = gap - sr <= (d + d_top + sr_top) * (1 + 16 * U) + 16 * U * gap
    d = d + u * np.max(np.where(largest, d, 0.0), -1, keepdims=True)
    log_weight = up(exponent + np.log(scale * (1 + 32 * U) / least[:, None]), 8)
    inner = softmax_rounding(lifted / least[:, None], d, np.abs(value), spread, u, TINY[dtype], log_weight)
    inner += dropped * 8 * (np.max(np.abs(head.value)) + np.abs(h0) + moved)
    if reading is not None:
        wide = up(table.radius, 2) + 2 * U * np.abs(table.centre)
        inner = np.maximum(inner, reading(table.centre - wide, table.centre + wide))
    attention = np.abs(h0) + moved + inner
    through_skip = np.abs(a) * (np.abs(table.centre) + table.radius)
    outer = np.zeros_like(inner) if a == 0 and b == 0 else gamma(3, u) * (attention + through_skip + abs(b))
    rounding = up(inner + outer, 16)

    if relative:
        size = np.maximum(np.maximum(table.low, -table.high), 0.0)  # least |g| on the cell
        interpolation, rounding = up(interpolation / size), up(rounding / size)
    clean = lambda x: np.where(np.isfinite(x), x, np.inf)  # noqa: E731
    return clean(interpolation), clean(rounding)


def _unit_length(radius: Array) -> Array:
    """The exponents of the powers of two that are taken for 1 on cells of these radii, so that no power of a radius
    leaves float64: 0 for all but very long and very short cells. Powers of two scale without rounding."""
    exponent = np.frexp(radius)[1]
    return np.where(np.abs(exponent) > LENGTHS, exponent, 0)


def _in_units(coefficient: Array, unit_length: Array) -> Array:
    """Taylor coefficients for a unit of length 2^unit_length."""
    return np.ldexp(coefficient, unit_length[:, None] * np.arange(coefficient.shape[1]))


def _weights_at(at: Array, centre: float, slope: Array, offset: Array) -> tuple[Array, Array, Array, Array, Array]:
    """Weights at a point, gaps to the largest logit, logits, sizes of what float64 logits leave out, weight at gap 0.

    Shape (cell, anchor). Weights are right to OWN relative error plus the square of the last.
    """
    q, q_low = two_sum(at[:, None], np.array(-centre))
    product, product_low = two_product(slope, q)
    logit, logit_low = two_sum(product, offset)
    rest = product_low + logit_low + slope * q_low
    largest = np.max(logit, -1, keepdims=True)
    below, below_low = two_sum(logit, -largest)
    rest = rest + below_low
    weight = np.exp(below) * (1 + rest)
    scale = 1 / np.sum(weight, -1, keepdims=True)
    return weight * scale, -below, logit, np.abs(rest), scale


def _window(head: AnchorWeights, at: Array, radius: Array, u: float) -> tuple[Array, Array, Array, Array]:
    """Slopes, offsets and values of the anchors that matter near each cell, and a bound on the weight of all others,
    also when evaluated with roundoff u: the errors of logits must not lift what is left out."""
    count = len(head.slope)
    if count <= WINDOW:
        return head.slope[None, :], head.offset[None, :], head.value[None, :], np.zeros(len(at))
    logit = np.multiply.outer(at - head.centre, head.slope) + head.offset
    top = np.argmax(logit, -1)
    spread = np.abs(head.slope - head.slope[top][:, None]) * radius[:, None]
    reach = np.abs(at - head.centre) + radius
    unsure = 8 * u * (np.max(np.abs(head.slope)) * reach + np.max(np.abs(head.offset)) + 1)
    matters = logit + 2 * spread > np.max(logit, -1, keepdims=True) - (NEGLIGIBLE + unsure[:, None])
    first, last = np.argmax(matters, -1), count - 1 - np.argmax(matters[:, ::-1], -1)
    width = int(np.max(last - first)) + 1
    index = np.minimum(first, count - width)[:, None] + np.arange(width)
    dropped = np.full(len(at), count * 1.01 * np.exp(-NEGLIGIBLE))
    return head.slope[index], head.offset[index], head.value[index], dropped


def _constant_where_better(table: Taylor) -> Taylor:
    """Rows whose remainder is useless (a branch point, a pole nearby) become g = middle +- half its range."""
    powers = _unit_length(table.radius)
    with np.errstate(over="ignore", invalid="ignore"):  # endless and unknown ranges and remainders are useless too
        middle = 0.5 * (table.low + table.high)
        half = up(np.maximum(table.high - middle, middle - table.low), 2)
        count = table.coefficient.shape[1]
        reach = np.ldexp(table.remainder, count * powers) * np.ldexp(table.radius, -powers) ** count
    worse = ~(reach < half) & np.isfinite(half)
    if not worse.any():
        return table
    coefficient, error, remainder = table.coefficient.copy(), table.error.copy(), table.remainder.copy()
    coefficient[worse], error[worse], remainder[worse] = 0.0, 0.0, 0.0
    coefficient[worse, 0], error[worse, 0] = middle[worse], half[worse]
    return replace(table, coefficient=coefficient, error=error, remainder=remainder)


def _rows(table: Taylor, rows: slice) -> Taylor:
    return Taylor(*(getattr(table, name)[rows] for name in Taylor.__dataclass_fields__))


def steepness_of(weights: AnchorWeights, edges: Array) -> Steepness:
    """The derivative of an anchor head and its skip on [edges[0], edges[-1]] (lemma H2)."""
    lines, moved = SlotLines(weights.slope, weights.offset, weights.value, 0 * weights.value), edges - weights.centre
    moved[0], moved[-1] = np.nextafter(moved[0], -np.inf), np.nextafter(moved[-1], np.inf)
    return replace(steepness([(1.0, lines)], weights.skip[0], moved), shift=weights.centre)
