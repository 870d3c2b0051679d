"""The natural domain of a composite, as far as it can be told without an interval."""

from __future__ import annotations

import math
from fractions import Fraction

from flint import arb

from ..errors import ArgumentError
from .constants import ball
from .domain import REALS, Domain
from .evaluate import Formula
from .expression import Call, Expr, Product, Sum, Variable
from .removable import Point
from .rounding import lower, precision, upper

_End = Fraction | arb


def natural_domain(formula: Formula, variable: Variable, poles: list[Point]) -> Domain:
    """An interval from functions of linear, quadratic and pure even arguments, less the poles that were found.

    The part outside of it is certainly not in the domain; the part inside may still not be. An end that is no float64
    is rounded to the next one inside, which belongs to the domain.
    """
    low, high, low_closed, high_closed = -math.inf, math.inf, True, True
    for argument, domain in _restrictions(formula):
        for end, closed, above in ((domain.lo, domain.lo_closed, True), (domain.hi, domain.hi_closed, False)):
            if not math.isfinite(end):
                continue
            left, right = _where(argument, variable, Fraction(end), above)
            at, exact = (-math.inf, True) if left is None else _inside(left, up=True)
            if at > low or (at == low and low_closed):
                low, low_closed = at, closed or not exact
            at, exact = (math.inf, True) if right is None else _inside(right, up=False)
            if at < high or (at == high and high_closed):
                high, high_closed = at, closed or not exact
    low_closed, high_closed = low_closed or math.isinf(low), high_closed or math.isinf(high)
    if not low < high:
        raise ArgumentError(f"{formula.roots[0].short()} is defined nowhere")
    where = tuple(sorted({p.place for p in poles if low <= p.place <= high}))
    return (
        Domain(low, high, low_closed, high_closed, where) if (low, high, where) != (-math.inf, math.inf, ()) else REALS
    )


def _restrictions(formula: Formula) -> list[tuple[Expr, Domain]]:
    """The arguments that must lie in an interval."""
    found: list[tuple[Expr, Domain]] = []
    for node in formula.order:
        if isinstance(node, Call):
            found.append((node.argument, node.function.domain))
        elif isinstance(node, Product):
            # a root in the denominator may meet a zero above the line, so it counts as open only when it is alone
            alone = len(node.factors) == 1
            found += [(b, Domain(0.0, lo_closed=p > 0 or not alone)) for b, p in node.factors if p.denominator != 1]
    return found


def _where(argument: Expr, variable: Variable, end: Fraction, above: bool) -> tuple[_End | None, _End | None]:
    """The interval on which argument >= end (<= end unless `above`), where that is one; None for an end that is not."""
    shape = _polynomial(argument, variable)
    if shape is None:
        return None, None
    n, a, b, c = shape  # a y^n + b y + c
    c -= end
    if not above:
        a, b, c = -a, -b, -c
    if n == 1:
        return (-c / a, None) if a > 0 else (None, -c / a)
    if a > 0:
        return None, None
    with precision(160):
        if n > 2:
            if c < 0:
                return None, None
            end_point = ball(-c / a) ** (arb(1) / n)
            return -end_point, end_point
        square = b * b - 4 * a * c
        if square < 0:
            return None, None
        root, middle = _square_root(square), -b / (2 * a)
        if isinstance(root, Fraction):
            return middle + root / (2 * a), middle - root / (2 * a)
        half = root / ball(-2 * a)
        return ball(middle) - half, ball(middle) + half


def _polynomial(node: Expr, y: Variable) -> tuple[int, Fraction, Fraction, Fraction] | None:
    """(n, a, b, c) when the node is a y^n + b y + c with n = 1, n = 2, or n even and b = 0; a is not 0."""
    if node is y:
        return 1, Fraction(1), Fraction(0), Fraction(0)
    terms, constant = (node.terms, node.constant) if isinstance(node, Sum) else (((node, Fraction(1)),), Fraction(0))
    powers: dict[int, Fraction] = {}
    for term, c in terms:
        if term is y:
            powers[1] = c
        elif isinstance(term, Product) and term.children == (y,) and term.factors[0][1].denominator == 1:
            powers[int(term.factors[0][1])] = c
        else:
            return None
    n = max(powers)
    if set(powers) - {1, n} or (n != 1 and n % 2) or min(powers) < 1 or (n > 2 and 1 in powers):
        return None
    return n, powers[n], powers.get(1, Fraction(0)) if n > 1 else Fraction(0), constant


def _square_root(x: Fraction) -> _End:
    root = Fraction(math.isqrt(x.numerator), math.isqrt(x.denominator))
    return root if root * root == x else ball(x).sqrt()


def _inside(end: _End, up: bool) -> tuple[float, bool]:
    """The end itself where it is a float64, else the next float64 inside; and which of the two it is."""
    exact = isinstance(end, Fraction) and Fraction(float(end)) == end
    if exact:
        return float(end), True
    with precision(160):
        near = ball(end) if isinstance(end, Fraction) else end
    return (upper(near) if up else lower(near)), False
