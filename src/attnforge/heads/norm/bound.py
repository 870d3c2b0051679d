"""How far a norm head can be from its target: the univariate part, then the proof term by term (section G1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ...certificates.certificate import Source, Term
from ...certificates.rounding import TINY, UNIT, exp_ulps, gamma, up
from ...dtypes import Array, stored
from ..slopes import SlotLines, Steepness, steepness

if TYPE_CHECKING:
    from .head import NormHead

WIDEN = 2.0**-7  # fitted and certified on [lo (1 - WIDEN), hi (1 + WIDEN)]: room for the variance's own rounding
ORDER = 10  # of the Taylor polynomials in `fit_error`
CELLS = 64  # per factor e of v + eps: of its root 128^-11 is left on each, 1e-23
SLOPE_CELLS = 64  # first cells of the derivative for every factor e of v + eps: it turns by a small share in each


def fit_error(
    s: Array, b: Array, a: Array, eps: float, lo: float, hi: float, u: float, reads: float, dot: int = 0
) -> tuple[float, float]:
    """For v in [lo, hi] upper bounds of |S(v) sqrt(v + eps) - 1| and of what evaluating the heads adds to it.

    *Fit.* Cells with centre c and half width w. With D_k the difference of the Taylor coefficients of S and
    (v + eps)^(-1/2) at c, |S - f| <= sum_k |D_k| w^k + tails. The coefficients of a sigmoid are polynomials in it.
    Tails: on |Im z| <= 2 a sigmoid is at most 1.1 min(1, e^(Re z)), so Cauchy's estimate with radius 2 bounds its k-th
    coefficient by 1.1 min(1, e^(z+2)) / 2^k; those of (t+x)^(-1/2) are at most t^(-1/2-k), a geometric tail. This
    float64 evaluation itself errs: every sigmoid by 4 u64 (|b| + |s v|) + 8 u64 relatively, and a polynomial of degree
    k+1 that many times more, against the sum of its absolute terms.

    *Evaluation* with roundoff u (lemma A5). Logits err by d = u|s v| + u|z|; the larger of the logit and 0 is
    subtracted exactly; two exponentials, a sum and a quotient follow: a sigmoid errs by
    (1 - sigmoid) expm1(d + 2 exp_ulps() u) + gamma(3) relatively. `reads` more roundings for values, products and the
    sum over heads. Where the logit is one inner product of `dot` roundings instead (shift included, in any order), it
    errs by d = gamma(dot) (|s v| + |b|).
    """
    u64 = 2.0**-53
    count = max(16, math.ceil(CELLS * math.log((hi + eps) / (lo + eps))))
    edge = np.exp(np.linspace(math.log(lo + eps), math.log(hi + eps), count + 1)) - eps
    edge[0], edge[-1] = lo, hi
    left, right = edge[:-1, None], edge[1:, None]
    centre = (left + right) / 2
    half = up(np.maximum(centre - left, right - centre))
    t = centre + eps
    top = np.sqrt(right[:, 0] + eps)
    with np.errstate(over="ignore", under="ignore"):
        sigmoid = 1 / (1 + np.exp(s * centre - b))
        slip = 4 * u64 * (np.abs(b) + np.abs(s * right)) + 8 * u64
        powers = np.cumprod(np.broadcast_to(sigmoid, (ORDER + 1, *sigmoid.shape)), axis=0)
        bound, reach = np.zeros(count), np.ones(count)
        for k, row in enumerate(_sigmoid_coefficients(ORDER)):
            size = np.abs(a) * np.abs(s) ** k * np.tensordot(np.abs(row), powers[: k + 1], 1)
            ours = (a * (-s) ** k * np.tensordot(row, powers[: k + 1], 1)).sum(-1)
            target = math.comb(2 * k, k) * (-0.25) ** k * t[:, 0] ** (-0.5 - k)
            noise = (size * (slip * (k + 1) + (4 * (k + 3) + 4 * len(a)) * u64)).sum(-1)
            bound += (np.abs(ours - target) + noise + (4 * k + 16) * u64 * np.abs(target)) * reach
            reach = up(reach * half[:, 0])
        ends = np.stack([b - s * left, b - s * right])
        worst = np.minimum(1.0, np.exp(ends.max(0) + slip + 2))
        tail = (1.1 * np.abs(a) * worst * (np.abs(s) * half / 2) ** (ORDER + 1)).sum(-1)
        ratio = (half / (t - half))[:, 0]
        tail += np.where(ratio < 0.5, t[:, 0] ** -0.5 * ratio ** (ORDER + 1) / (1 - ratio), np.inf)
        fitted = up((bound + tail) * top, 64 + 4 * len(a))
        # A sigmoid and one minus it are largest at an end of the cell.
        high = up(1 / (1 + np.exp(-(ends.max(0) + slip))), 16)
        rest = up(1 / (1 + np.exp(ends.min(0) - slip)), 16)
        d = u * np.abs(s) * right * (1 + u) + u * (np.abs(ends).max(0) + slip)
        d = np.maximum(d, gamma(dot, u) * (np.abs(s) * right + np.abs(b)))
        d = up(d + 2 * exp_ulps() * u, 16)
        relative = up(rest * np.expm1(d) * (1 + gamma(3, u)) + gamma(3, u), 16)
        read = gamma(reads, u)
        evaluated = up((np.abs(a) * high * (relative + read * (1 + relative))).sum(-1) * top, 4 * len(a) + 32)
    return float(fitted.max()), float(evaluated.max())


def layer_error(
    scale: Array, b: Array, a: Array, width: int, eps: float, lo: float, hi: float, u: float
) -> tuple[float, float]:
    """`fit_error` of heads in a layer of `network.AttentionLayer` that norm rows of `width` channels.

    Logit: the query scale * c, its inner product with the key, the shift as one more term: width + 2 roundings.
    Result: weight times value, and the output projection, an inner product with one term for each head.
    """
    return fit_error(scale * width, b, a, eps, lo, hi, u, reads=len(scale) + 1, dot=width + 2)


@lru_cache(maxsize=4)
def _sigmoid_coefficients(order: int) -> tuple[Array, ...]:
    """Row k: the coefficients, from sigma^1 on, of the polynomial sigma^(k)/k! in sigma; sigma' = sigma - sigma^2."""
    poly, rows = np.array([0.0, 1.0]), []
    for k in range(order + 1):
        rows.append(poly[1:] / math.factorial(k))
        poly = np.convolve(poly[1:] * np.arange(1, len(poly)), [0.0, 1.0, -1.0])
    return tuple(rows)


@dataclass(frozen=True)
class Roundings:
    """How many roundings a number goes through at most, one after the other, in one way of evaluating a norm head."""

    mean: int
    """From an entry of a row to the row's mean, the division included."""
    dot: int
    """From a product c_i c_i, its own rounding included, to c.c."""
    reads: int
    """From a sigmoid to the result: values, products and the sum over heads."""


def largest(head: NormHead) -> float:
    """A bound of all numbers that a norm forms: rows, squares, logits, values, results; twice, with room for rounding.

    Entries of a row are at most sqrt(d v), as they come sqrt(d v) + offset sqrt(v); a normed one is at most sqrt(d).
    """
    s, b, a = (np.abs(table) for table in head.table())
    d, v = head.channels, head.variance[1]
    row = np.sqrt(d * v)
    weight, bias = (0.0 if x is None else float(x.detach().abs().max()) for x in (head.weight, head.bias))
    mean = np.sqrt(v) * (2 * head.offset + 1) * d if head.kind == "layer" else 0.0
    with np.errstate(over="ignore"):
        results = a.sum() * row * (1 + weight) + weight * np.sqrt(d) + bias
        return 2.0 * max(float(x) for x in (row * d + mean, d * v, (s * d * v + b).max(), results))


def ledger(head: NormHead) -> tuple[Term, ...]:
    """The bound, term by term, in units of the row's largest |c_i|, which is at least std = sqrt(v).

    1. *Centring.* The first mean errs by D1 <= gamma(K) mean|x| <= gamma(K) sqrt(1 + offset^2) std (K roundings in a
       row); the second is the mean of a row centred up to D1 and errs by
       D2 <= gamma(K) (1+u) (1+D1) std, and D1 itself is removed by it. Both subtractions round:
       c'_i = (c_i + l_i + theta)(1 + r), |l_i| <= u(|c_i| + D1), |r| <= u, and |theta| <= u(1 + D1) + D2 is the same
       for the whole row. (The guard admits means a little beyond `offset`: 2 offset + 1 covers that and costs nothing,
       since D1 is of second order.)
    2. *Variance.* c sums to 0, so theta enters c'.c' only squared: |c'.c'/c.c - 1| <= 2u(1+D1) + (u(1+D1) + theta)^2,
       then (1+u)^2, then the gamma of the inner product. v' = v(1 + eta) moves 1/sqrt(v + eps) by at most
       (1 - eta)^(-1/2) - 1 <= eta (1 + eta)/2.
    3. *Fit* and *heads* at v': `fit_error`, then the reads.
    4. *Underflow*: an operation may lose `tiny`, against a result of at least sqrt(lo/(lo + eps)).
    """
    u, tiny, count = UNIT[head.dtype], TINY[head.dtype], head.roundings()
    lo, hi = head.variance[0] * (1 - WIDEN), head.variance[1] * (1 + WIDEN)
    s, b, a = head.table()
    centring = moved = affine = np.zeros(())
    if head.kind == "layer":
        g = gamma(count.mean, u)
        first = up(g * np.sqrt(1 + (2 * head.offset + 1) ** 2), 8)
        second = up(g * (1 + u) * (1 + first))
        theta = up(u * (1 + first) + second + 8 * tiny / np.sqrt(lo), 8)
        centring = up((u * (1 + first) + theta) * (1 + u) + u, 8)
        moved = up(2 * u * (1 + first) + (u * (1 + first) + theta) ** 2, 16)
        moved = up(moved + 3 * u * (1 + moved), 8)
    dot = up(gamma(count.dot, u) + 2 * tiny / lo)
    eta = up(moved + dot + moved * dot, 8)
    if not eta < WIDEN / 4:
        return (Term("variance", "rounding", math.inf),)
    drift = up(eta / 2 * (1 + eta), 8)
    error, evaluation = fit_error(s, b, a, head.eps_norm, lo, hi, u, count.reads)
    smallest = np.sqrt(1 + head.eps_norm / lo)
    lost = up(4 * tiny * (np.abs(a).sum() * np.sqrt(hi + head.eps_norm) + head.heads * smallest), 64 + head.heads)
    whole = up(centring + (1 + centring) * (error + drift + error * drift + (1 + drift) * evaluation) + lost, 16)
    if head.weight is not None or head.bias is not None:
        weight, bias = (np.zeros(1) if x is None else np.abs(stored(x)) for x in (head.weight, head.bias))
        with np.errstate(over="ignore", divide="ignore"):  # a product may be too small for a normal number
            sunk = np.where(weight > 0, 2 * tiny / (weight / smallest + bias), 0.0).max()
        affine = up(gamma(2, u) * (1 + whole) + sunk, 8)
    rows: list[tuple[str, Source, float, str]] = [
        ("fit", "interpolation", error, f"{head.heads} heads"),
        ("centring", "rounding", float(centring), ""),
        ("variance", "rounding", float(drift), ""),
        ("heads", "rounding", evaluation, ""),
        ("weight and bias", "rounding", float(affine), ""),
        ("underflow", "leak", float(lost), ""),
    ]
    cross = max(0.0, float(up(whole + affine)) - math.fsum(row[2] for row in rows))
    rows.append(("second order", "propagation", float(up(cross)), ""))
    return tuple(Term(*row) for row in rows if row[2] > 0)


def slopes_of(scale: Array, shift: Array, amount: Array, variance: tuple[float, float], eps: float) -> Steepness:
    """S(v) = sum_j amount_j sigmoid(shift_j - scale_j v) and its derivative, on cells of the mean square v (lemma H2).

    `scale` may be a product that was rounded once.
    """
    start, end = variance
    count = max(16, math.ceil(SLOPE_CELLS * math.log((end + eps) / (start + eps))))
    edges = np.clip(np.geomspace(start + eps, end + eps, count + 1) - eps, start, end)
    edges[0], edges[-1] = start, end
    rounded = float(2.0**-53 * np.abs(scale).max()) * (1 + 2.0**-50)
    own_slot = np.array([1.0, 0.0])
    lines = [(float(a), SlotLines(-s * own_slot, b * own_slot, own_slot, 0 * own_slot, slack=(rounded, 0.0)))
             for s, b, a in zip(scale, shift, amount, strict=True)]  # fmt: skip
    return steepness(lines, 0.0, np.unique(edges))
