"""The proof of a norm head's bound, term by term (section G1 of docs/theory.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...certificates.certificate import Source, Term
from ...certificates.rounding import TINY, UNIT, gamma, up
from .fit import fit_error

if TYPE_CHECKING:
    from .head import NormHead

WIDEN = 2.0**-7  # fitted and certified on [lo (1 - WIDEN), hi (1 + WIDEN)]: room for the variance's own rounding


@dataclass(frozen=True)
class Roundings:
    """How many roundings a number goes through at most, one after the other, in one way of evaluating a norm head."""

    mean: int
    """From an entry of a row to the row's mean, the division included."""
    dot: int
    """From a product c_i c_i, its own rounding included, to c.c."""
    reads: int
    """From a sigmoid to the result: values, products and the sum over heads."""


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
        affine = up(gamma(2, u) * (1 + whole))
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
