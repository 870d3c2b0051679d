"""Rigorous bounds of |gate head - target| over an interval, for the weights as stored, rounding included.

The interval is cut into cells, finely around the points where two slots of a head weigh the same. On a cell let k be
the slot that wins at its middle. For ANY weights w that add up to 1

    sum_j w_j V_j = V_k + sum_{j != k} w_j (V_j - V_k),      w_j <= sigmoid(l_j - l_k),

the logits l and the values V are affine in y, and so is V_k minus the target between two knots. So three numbers bound
the error on a cell: the *mismatch* of the winner (0 as built; exact rational arithmetic), the *leak* of the losers, and
*rounding*. Errors of the computed logits only widen l_j - l_k before the sigmoid, however large they are. Rounding
follows `certificates.rounding`, and three facts that make a saturated gate exact:

- a product with 0 or with a power of two is exact;
- when all losers together weigh at most u/2, the sum of the exponentials is exp(0) = 1 and the winner's weight is 1;
- fl(a + b) is off by at most min(|a|, |b|), so adding what has leaked costs at most as much again.

`Lines` are piecewise linear targets, reached as sharpness grows; `Logistic` targets are what a head with two slots
computes exactly. Weights that have drifted from the construction (fine-tuning) only give larger numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch

from ...box import round_outward
from ...certificates.rounding import TINY, exp_ulps, gamma, unit, up
from ...dtypes import Array
from ..slopes import Steepness, lines_of, steepness
from ..stored import SelfSpec, power_of_two
from .target import GateTarget, Line, Lines, Logistic

LONG = np.longdouble  # cancelling differences are formed in extended precision where the machine has it
OWN = float(np.finfo(np.longdouble).eps)  # roundoff of that
#: Cell edges around a crossing, in units of the logit: fine where weights move, then each twice as far as the one
#: before, so that what a computed logit errs by on a cell (u times its largest) stays far below its smallest.
NEAR = np.concatenate([np.arange(0.0, 4.0, 0.01), np.geomspace(4.0, 2000.0, 160), 2000.0 * 2.0 ** np.arange(1.0, 64.0)])
UNIFORM = 64  # cells of equal width besides: where no logits cross, few do
NOTHING = 1e-300  # below this a part of the ledger is shown as an exact 0, and paid for by the rounding part
KINK = 0.27846454276107380  # W(1/e) = 0.278464542761073795...: what a gate of sharpness 1 costs at its kink (B1)


@dataclass(frozen=True)
class GateDomain:
    """Where the scalar lives. A gate of two inputs x and y is one of x - y plus y: `sizes` bounds |x| and |y|."""

    lo: float
    hi: float
    sizes: tuple[float, float] | None = None
    largest: float = math.inf  # of |target|, where known


@dataclass(frozen=True)
class GateError:
    """The worst cell: how its bound splits, and where it is."""

    mismatch: float
    leak: float
    rounding: float
    at: float

    @property
    def total(self) -> float:
        """The bound itself, rounded up."""
        return float(up(self.mismatch + self.leak + self.rounding))


def gate_domain(target: GateTarget, lo: float, hi: float, dtype: torch.dtype) -> GateDomain:
    """Where the gate's scalar lives when every input is in [lo, hi], widened to numbers of `dtype`."""
    most = torch.finfo(dtype).max  # beyond it there are no numbers of the dtype
    low, high = (min(max(float(v[0]), -most), most) for v in round_outward(np.array([lo]), np.array([hi]), dtype))
    size = max(abs(low), abs(high))
    if target.pair:
        span = math.nextafter(high - low, math.inf)
        return GateDomain(-span, span, (size, size), size)
    if isinstance(target.shape, Logistic):
        return GateDomain(low, high)
    places = [Fraction(at) for at in (low, high, *target.shape.knots)]
    heights = [abs(float(slope * at + intercept)) for at in places for slope, intercept in target.shape.lines]
    return GateDomain(low, high, None, math.nextafter(max(heights), math.inf))


def gate_error(spec: SelfSpec, target: Lines | Logistic, domain: GateDomain, dtype: torch.dtype) -> GateError:
    """A bound on |head - target| over the domain for the stored weights `spec`, evaluated in `dtype`."""
    knots = target.knots if isinstance(target, Lines) else ()
    edges = _edges(spec, knots, domain)
    state = _State.of(spec, edges, domain, dtype)
    mismatch, leak = _lines(state, target) if isinstance(target, Lines) else _logistic(state, target)
    widened = state.leak(rounded=True) if isinstance(target, Lines) else _moved(state, target, rounded=True)
    reading = state.read_rounding()
    adding = state.sum_rounding(mismatch + widened + reading)
    rounding = up(np.maximum(widened - leak, 0.0) + reading + adding, 8)
    total = mismatch + leak + rounding
    worst = int(np.argmax(total))
    at = float(edges[worst : worst + 2].mean())
    slack = float(up(total[worst], 8) - total[worst]) + NOTHING  # pays for our own sums and for the zeros below
    parts = (float(part[worst]) for part in (mismatch, leak))
    first, second = (part if part > NOTHING / 4 else 0.0 for part in parts)
    return GateError(first, second, float(rounding[worst]) + slack, at)


def _edges(spec: SelfSpec, knots: tuple[float, ...], domain: GateDomain) -> Array:
    """Cell edges: the knots, and ever coarser steps away from where two logits of a head cross."""
    steep, level = spec.crossings
    for knot in knots:  # a crossing that only rounding here keeps from a knot is that knot
        level = np.where(np.abs(level - knot) <= 8 * OWN * abs(knot), knot, level)
    steps = NEAR / steep[:, None]
    inner = [np.array(knots), (level[:, None] + steps).ravel(), (level[:, None] - steps).ravel()]
    inner.append(np.linspace(domain.lo, domain.hi, UNIFORM + 1))
    every = np.concatenate(inner)
    every = every[(every > domain.lo) & (every < domain.hi)]
    return np.unique(np.concatenate([[domain.lo, domain.hi], every]))


def _pick(array: Array, winner: npt.NDArray[np.intp]) -> Array:
    """The winner's entry of (2, cell, head, slot), for both ends of a cell."""
    return np.take_along_axis(array, np.broadcast_to(winner, (2, *winner.shape)), -1)


def _sigmoid(x: Array) -> Array:
    """sigmoid(x), rounded up."""
    e = np.exp(-np.abs(x))
    return up(np.where(x >= 0, 1.0, e) / (1.0 + e), 8)


def _affine_error(weight: Array, bias: Array, size: Array, reach: Array, domain: GateDomain, u: float) -> Array:
    """How far a computed Z W + b is from slope * scalar + b: rounding, and what of W reads y besides x - y.

    weight (head, channel, key), size: largest |slope * scalar + bias| on the cell, reach: largest |scalar|, (cell,).
    """
    inexact = ~power_of_two(weight)
    at = reach[:, None, None]
    if domain.sizes is None:
        error = u * np.abs(weight[:, 0]) * inexact[:, 0] * at
    else:
        first, other = domain.sizes
        stray = up(np.abs(weight[:, 0] + weight[:, 1]) * other)
        products = u * (np.abs(weight[:, 0]) * inexact[:, 0] * first + np.abs(weight[:, 1]) * inexact[:, 1] * other)
        both = (weight[:, 0] != 0) & (weight[:, 1] != 0)
        error = stray + products + both * u * (np.abs(weight[:, 0]) * at + stray + products)
    added = (bias != 0) & (weight != 0).any(1)
    total = (error + added * u * (size + error)) * (1 + 8 * u)
    return np.where(total == 0, 0.0, up(total, 16))


@dataclass(frozen=True)
class _State:
    """Everything about the cells that the bounds need; arrays are (cell, head, slot) or (cell, head)."""

    spec: SelfSpec
    domain: GateDomain
    ends: Array  # (2, cell)
    u: float
    tiny: float
    winner: npt.NDArray[np.intp]  # index of the slot that wins at the middle
    values: Array  # (2, cell, head, slot): at the ends of the cells
    value_error: Array  # (cell, head): of the computed value of the self slot
    difference: Array  # (2, cell): l_0 - l_1 of the first head at the ends
    gap: Array  # largest l_j - l_winner on the cell, for the stored weights
    gap_error: Array  # and how far the computed one can be above it
    others: Array  # 1 for the losers, 0 for the winner

    @classmethod
    def of(cls, spec: SelfSpec, edges: Array, domain: GateDomain, dtype: torch.dtype) -> _State:
        """Evaluate logits and values at the edges of the cells; `both` pays for the head's rounding and for ours."""
        u, tiny = unit(dtype), TINY[dtype]
        both = u + 2 * OWN
        ends = np.stack([edges[:-1], edges[1:]])
        reach = np.abs(ends).max(0)
        query = ends[..., None, None].astype(LONG) * spec.W_Q[:, 0] + spec.b_Q
        size = up(np.abs(query).max(0))
        query_error = _affine_error(spec.W_Q, spec.b_Q, size, reach, domain, both) + tiny
        keys = np.concatenate([spec.b_K[:, None], spec.M_K], 1)
        logits = (query[..., None, :] * keys).sum(-1)
        products = np.einsum("nhk,hsk->nhs", size + query_error, np.abs(keys))
        used = np.count_nonzero(keys, axis=-1)
        rate = np.where(used <= 1, np.where(power_of_two(keys).all(-1), 0.0, both), gamma(used, both))
        logit_error = up(np.einsum("nhk,hsk->nhs", query_error, np.abs(keys)) + rate * products + tiny, 16)

        winner = logits.sum(0).argmax(-1)[..., None]
        gap = logits - _pick(logits, winner)
        others = np.ones(gap.shape[1:])
        np.put_along_axis(others, winner, 0.0, -1)
        highest = up(gap.max(0))
        gap_error = logit_error + np.take_along_axis(logit_error, winner, -1)
        above = np.maximum((highest + gap_error).max(-1, keepdims=True), 0.0)
        # the softmax subtracts the largest logit, which may be a third one, and takes two exponentials
        gap_error = gap_error + both * (up(np.abs(gap).max(0)) + 2 * above) + 2 * exp_ulps() * u
        gap_error = up(gap_error * (1 + 16 * u), 16)

        first = ends[..., None].astype(LONG) * spec.W_V[:, 0, 0] + spec.b_V[:, 0]
        memory = np.broadcast_to(spec.M_V[:, :, 0], (*first.shape, spec.M_V.shape[1]))
        values = np.concatenate([first[..., None], memory], -1)
        value_size = up(np.abs(first).max(0))[..., None]
        value_error = _affine_error(spec.W_V, spec.b_V, value_size, reach, domain, both)[..., 0]
        difference = logits[:, :, 0, 0] - logits[:, :, 0, 1]
        return cls(spec, domain, ends, u, tiny, winner, values, value_error, difference, highest, gap_error, others)

    def losers(self, rounded: bool) -> Array:
        """Upper bounds of the weights of all slots but the winner."""
        return _sigmoid(self.gap + self.gap_error if rounded else self.gap) * self.others

    def leak(self, rounded: bool) -> Array:
        """What the losers add to the output: sum over heads and slots of |O| w |V - V_winner|."""
        spread = up(np.abs(self.values - _pick(self.values, self.winner)).max(0))
        touched = (np.arange(spread.shape[-1]) == 0) | (self.winner == 0)  # our own value of the self slot is rounded
        spread = spread + touched * self.value_error[..., None]
        heads = up((self.losers(rounded) * spread).sum(-1), 8)
        return up(heads @ np.abs(self.spec.W_O[:, 0, 0]), 8)

    def settled(self) -> Array:
        """Where the computed weight of the winner is exactly 1, (cell, head)."""
        top = self.gap + self.gap_error
        share = (np.exp(np.minimum(top, 0.0)) * self.others).sum(-1)
        return (up(share, 8) <= self.u / 2) & ((top < 0) | (self.others == 0)).all(-1)

    def parts(self) -> tuple[Array, Array]:
        """Upper bounds of |w V| over the losers together and for the winner, (cell, head)."""
        size = self.sizes()
        small = up((self.losers(True) * size).sum(-1) * (1 + 16 * self.u), 8)
        large = np.take_along_axis(size, self.winner, -1)[..., 0]
        return small, np.where(large == 0, 0.0, up(large * (1 + 16 * self.u)))

    def sizes(self) -> Array:
        """Upper bounds of the computed values, exactly 0 where they are."""
        size = np.abs(self.values).max(0).astype(np.float64)
        size[..., 0] += self.value_error
        return np.where(size == 0, 0.0, up(size))

    def read_rounding(self) -> Array:
        """Rounding between the exponentials and the output of the heads, times |O|.

        In a sum taken in any order, every addition of a part that is `light` is off by at most that part, and at most
        (heavy terms - 1) additions join two heavy parts.
        """
        small, large = self.parts()
        size, losers = self.sizes(), self.losers(True)
        slots = size.shape[-1]
        heavy = (np.exp(np.minimum(self.gap + self.gap_error, 0.0)) > self.u / (8 * slots**2)) & (self.others > 0)
        # E|V| <= |V_winner| + sum w (|V| - |V_winner|)+, since the weights add up to 1
        best = np.take_along_axis(size, self.winner, -1)
        mean = up(large + (losers * np.maximum(size - best, 0.0)).sum(-1), 8)
        fixed = (self.spec.W_V[:, 0] == 0) & power_of_two(self.spec.b_V)
        exact = np.concatenate([fixed, power_of_two(self.spec.M_V[..., 0])], 1)
        blunt = up((np.where(self.others > 0, losers, 1.0) * size * ~exact).sum(-1), 8)
        normalise = gamma(heavy.sum(-1) + 2.125, self.u) * mean  # adding the exponentials; dividing: two operations
        products = self.u * np.minimum(blunt, mean)
        joined = (heavy | (self.others == 0)) & (size > 0)
        reading = gamma(np.maximum(joined.sum(-1) - 1, 0), self.u) * mean
        stray = slots * 1.01 * (losers * size * ~heavy).sum(-1)  # light parts
        settled = self.settled()
        # settled: the winner's weight is 1 although the losers have some, then their parts and adding them
        light = losers.sum(-1) * large + gamma(slots + 4, self.u) * small
        light = light + np.minimum(gamma(slots, self.u) * mean, slots * 1.01 * small)
        rough = (normalise + products + reading) * (1 + 16 * self.u) + stray
        own = self.value_error * np.where(self.winner[..., 0] == 0, 1.0, losers[..., 0])
        lost = self.tiny * 4 * slots * (1 + size.max(-1))
        heads = up(np.where(settled, light, rough) + own + lost, 16)
        return up(heads @ np.abs(self.spec.W_O[:, 0, 0]), 8)

    def sum_rounding(self, error: Array) -> Array:
        """Rounding of the output projection, the skip and their sum; terms that are 0 throughout do not count.

        `error` is how far their exact sum can be from the target: of two terms, the size of the result counts.
        """
        small, large = self.parts()
        out = np.abs(self.spec.W_O[:, 0, 0])
        terms = [out * (small + large)]
        exact = [power_of_two(self.spec.W_O[:, 0, 0])]
        reach = np.abs(self.ends).max(0)
        if self.domain.sizes is None:
            terms.append(np.abs(self.spec.S[0]) * reach[:, None])
        else:
            terms.append(np.broadcast_to(np.abs(self.spec.S[:, 0]) * np.array(self.domain.sizes), (len(reach), 2)))
        terms.append(np.broadcast_to(np.abs(self.spec.s), (len(reach), 1)))
        exact += [power_of_two(self.spec.S[:, 0]), np.array([True])]
        size = up(np.concatenate(terms, 1), 4)
        size = np.where(size <= 8 * 5e-324, 0.0, size)
        products = self.u * size @ (~np.concatenate(exact)).astype(float)
        count, total = np.count_nonzero(size, axis=-1), size.sum(-1)
        light = size <= size.max(-1, keepdims=True) * (self.u / 64)
        heavy = np.count_nonzero((size > 0) & ~light, axis=-1)
        adding = gamma(np.maximum(heavy - 1, 0), self.u) * total + count * 1.01 * (size * light).sum(-1)
        two = np.where(count == 2, self.u * (self.domain.largest + error + products), np.inf)
        return up(products * (1 + 8 * self.u) + np.minimum(adding, two) + self.tiny * 4 * count, 16)

    def affine(self, line: Line) -> Array:
        """Largest |slope y + intercept| on every cell, rounded up; exactly 0 for the zero line."""
        if not any(line):
            return np.zeros(self.ends.shape[1])
        slope, intercept = (LONG(float(c)) + LONG(float(c - Fraction(float(c)))) for c in line)
        ends = self.ends.astype(LONG)
        size = np.abs(slope * ends) + abs(intercept)
        return up((np.abs(slope * ends + intercept) + 4 * OWN * size).max(0), 4)

    def line(self, head: int, slot: int) -> Line:
        """What a head adds to the output while one slot has all the weight, exactly."""
        out = Fraction(float(self.spec.W_O[head, 0, 0]))
        if slot:
            return Fraction(0), out * Fraction(float(self.spec.M_V[head, slot - 1, 0]))
        return out * Fraction(float(self.spec.W_V[head, 0, 0])), out * Fraction(float(self.spec.b_V[head, 0]))

    def skip(self) -> Line:
        """What the skip adds, as a line of the scalar."""
        return Fraction(float(self.spec.S[0, 0])), Fraction(float(self.spec.s[0]))

    def stray(self) -> float:
        """What a skip of two inputs reads of y besides its share of x - y + y."""
        if self.domain.sizes is None:
            return 0.0
        off = sum(Fraction(float(v)) for v in self.spec.S[:, 0]) - 1
        return float(up(abs(float(off)) * self.domain.sizes[1]))


def _plus(a: Line, b: Line, sign: int = 1) -> Line:
    return a[0] + sign * b[0], a[1] + sign * b[1]


def _lines(state: _State, target: Lines) -> tuple[Array, Array]:
    """Mismatch and leak of every cell for a piecewise linear target."""
    piece = np.searchsorted(np.array(target.knots), state.ends[0], side="right")  # knots are edges
    pattern = np.concatenate([piece[:, None], state.winner[..., 0]], 1)
    rows, where = np.unique(pattern, axis=0, return_inverse=True)
    mismatch = np.zeros(len(piece))
    for index, (at, *winners) in enumerate(rows):
        line = _plus(state.skip(), target.lines[at], -1)
        for head, slot in enumerate(winners):
            line = _plus(line, state.line(head, int(slot)))
        here = where.reshape(-1) == index
        mismatch[here] = state.affine(line)[here]
    return up(mismatch + state.stray()), state.leak(rounded=False)


def _logistic(state: _State, target: Logistic) -> tuple[Array, Array]:
    """Mismatch and drift of every cell for w high + (1 - w) low, w = sigmoid(rate y); one head of two slots."""
    first, second = state.line(0, 0), state.line(0, 1)
    low = _plus(_plus(state.skip(), second), target.low, -1)
    rise = _plus(_plus(first, second, -1), _plus(target.high, target.low, -1), -1)
    weight = _sigmoid(np.max(target.rate * state.ends, axis=0))
    return up(state.affine(low) + weight * state.affine(rise), 4), _moved(state, target, rounded=False)


def _moved(state: _State, target: Logistic, rounded: bool) -> Array:
    """|O| |w' - w| |V_0 - V_1| when the logit difference is off by at most D: |w' - w| <= w (1 - w) expm1(D).

    Because sigmoid'(x) <= sigmoid'(y) exp(|x - y|).
    """
    ideal = target.rate * state.ends
    nearest = np.where(ideal.min(0) * ideal.max(0) < 0, 0.0, np.abs(ideal).min(0))
    slope = up(_sigmoid(nearest) * _sigmoid(-nearest))
    offset = up(np.abs(state.difference - target.rate * state.ends.astype(LONG)).max(0), 0)
    offset = np.where(offset == 0, 0.0, up(offset, 8) + 4 * OWN * np.abs(ideal).max(0))
    off = up(offset + (state.gap_error[:, 0].max(-1) if rounded else 0.0))
    change = np.where(off == 0, 0.0, np.minimum(up(slope * np.expm1(np.minimum(off, 700.0)), 8), 1.0))
    spread = up(np.abs(state.values[..., 0, 0] - state.values[..., 0, 1]).max(0) + state.value_error[:, 0])
    return up(change * spread * abs(state.spec.W_O[0, 0, 0]), 8)


def steepness_of(spec: SelfSpec, edges: Array) -> Steepness:
    """The derivative of self heads of one scalar and their skip (lemma H2)."""
    return steepness(lines_of(spec, 0, None), float(spec.S[0, 0]), edges)
