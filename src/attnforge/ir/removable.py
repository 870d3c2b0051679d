"""Removable singularities: sin(y)/y, y/(exp(y) - 1), (1 - cos(y))/y**2 as functions that are analytic at 0.

A product of powers of bases b_i, of which some vanish at y0 to exact orders m_i, equals

    (y - y0)^(sum of m_i p_i) * product of q_i^(p_i),       q_i = b_i / (y - y0)^(m_i),

and by Taylor's formula with integral remainder the coefficients of q_i at any y lie in the hull of those of b_i, m_i
further up, over the segment from y0 to y. That an order is exact is decided in ball arithmetic: the coefficients below
it must be exact zeros, as sin(0), exp(0) - 1 and 1 - 1 are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from flint import arb, arb_series, ctx

from .evaluate import Formula, Special, plain_product, series
from .expression import Expr, Product, Sum, Variable
from .functions import power
from .rounding import precision
from .univariate import Series

_HIGHEST_ORDER = 6


@dataclass(frozen=True)
class Point:
    """A product near a point where a base with a negative exponent vanishes; `order` < 0 means a pole."""

    node: Product
    place: float
    orders: Mapping[Expr, int]
    order: int
    bases: Formula


def affine(node: Expr, variable: Variable) -> tuple[Fraction, Fraction] | None:
    """(a, b) when the node is a * variable + b with a != 0."""
    if node is variable:
        return Fraction(1), Fraction(0)
    if isinstance(node, Sum) and node.children == (variable,):
        return node.terms[0][1], node.constant
    return None


def exact_float(value: Fraction) -> float | None:
    """The float64 equal to a rational, if there is one."""
    try:
        near = float(value)
    except OverflowError:
        return None
    return near if Fraction(near) == value else None


def points(formula: Formula, variable: Variable, pieces: Mapping[Expr, Series]) -> list[Point]:
    """Every place where a product of the formula divides by an exact zero."""
    found: list[Point] = []
    products = [n for n in formula.order if isinstance(n, Product) and any(p < 0 for _, p in n.factors)]
    for node in products:
        lines = [line for base in node.children if (line := affine(base, variable)) is not None]
        places = {0.0} | {at for a, b in lines if (at := exact_float(-b / a)) is not None}
        for place in sorted(places):
            point = _point(formula, node, place, pieces, special(formula, found, pieces))
            if point is not None:
                found.append(point)
    return found


def _point(
    formula: Formula, node: Product, place: float, pieces: Mapping[Expr, Series], known: Special
) -> Point | None:
    with precision(200, _HIGHEST_ORDER + 4):
        at = series(formula, arb_series([arb(place), 1], prec=_HIGHEST_ORDER), pieces, known)
    orders: dict[Expr, int] = {}
    for base, p in node.factors:
        order = _order(at.get(base))
        if order and p.denominator != 1:
            return None
        if order:
            orders[base] = order
    if not any(base in orders and p < 0 for base, p in node.factors):
        return None
    total = sum(orders.get(base, 0) * p for base, p in node.factors)
    return Point(node, place, orders, int(total), Formula.of(*orders))


def _order(x: arb_series | None) -> int:
    """How many of the first coefficients are exact zeros; 0 when that cannot be told."""
    if x is None:
        return 0
    for j in range(_HIGHEST_ORDER):
        if not x[j].is_finite() or not x[j].is_zero():
            return j if x[j].is_finite() and not x[j].contains(0) else 0
    return 0


def special(formula: Formula, known: list[Point], pieces: Mapping[Expr, Series]) -> Special:
    """How to multiply: as usual, but by the lemma above close to a removable singularity."""

    def multiply(node: Product, x: arb_series, found: Mapping[Expr, arb_series]) -> arb_series:
        for point in known:
            if point.node is node and point.order >= 0 and near(x[0], point.place):
                return _quotient(point, x, found, pieces, multiply)
        return plain_product(formula, node, found)

    return multiply


def near(c: arb, place: float) -> bool:
    """Whether the ball is wide compared to its distance from the place; plain division is then poor or undefined."""
    return not (abs(c - place) > 8 * arb(c.rad()))


def _quotient(
    point: Point,
    x: arb_series,
    found: Mapping[Expr, arb_series],
    pieces: Mapping[Expr, Series],
    multiply: Special,
) -> arb_series:
    count, extra = x.prec, max(point.orders.values())
    with precision(ctx.prec, count + extra + 2):
        around = x[0].union(arb(point.place))
        above = series(point.bases, arb_series([around, 1], prec=count + extra), pieces, multiply)
        out = (arb_series([x[0] - point.place, 1], prec=count)) ** point.order
        for base, p in point.node.factors:
            order = point.orders.get(base)
            inner = found[base] if order is None else _shifted(above[base], order, count)
            out = out * power(float(p)).series(inner)  # type: ignore[misc]
    return out


def _shifted(x: arb_series, by: int, count: int) -> arb_series:
    return arb_series([x[by + j] for j in range(count)], prec=count)
