"""Roots of sums of squares: what the squares err adds up as a length, however small the sum is (lemma K35)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from flint import arb, fmpq

from .balls import ZERO, largest, size
from .program import Column, Form, exact
from .rounding import Machine, sum_roundings
from .scalar import HeadSum

#: By token, operation and channel: how far what heads square errs, and k and m of lemma K35.
Squares = dict[tuple[int, int, int], tuple[arb, arb, arb]]


@dataclass(frozen=True)
class Sum:
    """A column computed from squares p: upper bounds of the weights c, and g and a of lemma K35."""

    weights: Mapping[Column, arb]
    relative: arb
    lost: arb

    def moved(self, token: int, ends: tuple[float, float], power: Fraction, squares: Squares) -> arb:
        """How far a power of the computed column is from that of the sum that is meant, which is in [low, high]."""
        low, high = (arb(max(end, 0.0)).sqrt() for end in ends)
        parts = [(c, squares[token, *column]) for column, c in self.weights.items()]
        length, steep = (size(sum((c * part[i] ** 2 for c, part in parts), ZERO)).sqrt() for i in (0, 1))
        left, g = sum((c * part[2] for c, part in parts), self.lost), self.relative
        own = g * (high + length) + (1 + g) * steep + size((1 + g) * left).sqrt()
        far, p = length + own / (1 - g), arb(fmpq(2 * power.numerator, power.denominator))
        at = low - far if p < 1 else high + far
        by_slope = size(p * at ** (p - 1) * far) if at > 0 else arb.pos_inf()
        return by_slope if p >= 1 else by_slope.min(size(far**p))


def sum_of(
    machine: Machine, form: Form, columns: Sequence[Column], stored: tuple[list[float], float],
    known: Collection[Column],
) -> Sum | None:  # fmt: skip
    """The sum that a column with these stored weights and bias computes; None unless all its terms are known squares
    with positive weights."""
    (weights, bias), parts, drifts = stored, {}, [ZERO]
    for column, w in (*zip(columns, weights, strict=True), (None, bias)):
        meant = form.bias if column is None else form.weights.get(column, fmpq(0))
        off = form.off_bias if column is None else form.off.get(column, fmpq(0))
        if w == 0 and meant == 0 and off == 0:
            continue
        away = size(arb(abs(exact(w) - meant) + off))
        if not arb(w) > away or not (column is None or column in known):
            return None
        drifts.append(away / (arb(w) - away))
        if column is not None:
            parts[column] = arb(w) + away
    count, drift = sum_roundings(weights, bias), largest(drifts)
    relative = machine.gamma(count) * (1 + drift) + drift
    return Sum(parts, relative, (count + 1) * machine.tiny) if parts and relative < 0.5 else None


def halved(site: HeadSum) -> HeadSum:
    """Heads that square y as heads that multiply x and y: the value and the skip are of x, which is y."""
    heads = tuple(replace(head, value=(head.value[1], 0.0, head.value[2])) for head in site.heads)
    return replace(site, heads=heads, skip=(site.skip[1], 0.0, site.skip[2]), function=None)
