"""Composites: one univariate function made of many, such as 1/(exp(y) - 1) (fusion, mathematics H1, item 2).

A composite is made from an expression in y, and named by its text, "expr: 1/(exp(y) - 1)". The text spells every
constant exactly (a third is 1/3, pi is pi), so that the name says all: `composite` reads it back, from files and from
users, through the parser of the formula language; what has no such text is no composite. Series and ranges are
compositions in ball arithmetic.

*Removable singularities*: sin(y)/y, y/(exp(y) - 1), (1 - cos(y))/y**2 are analytic at 0. A product of powers of bases
b_i, of which some vanish at y0 to exact orders m_i, equals

    (y - y0)^(sum of m_i p_i) * product of q_i^(p_i),       q_i = b_i / (y - y0)^(m_i),

and by Taylor's formula with integral remainder the coefficients of q_i at any y lie in the hull of those of b_i, m_i
further up, over the segment from y0 to y. That an order is exact is decided in ball arithmetic: the coefficients below
it must be exact zeros, as sin(0), exp(0) - 1 and 1 - 1 are.

*The natural domain*, as far as it can be told without an interval.

*Turns*: small balls outside of which the derivative has a certain sign. Between them the function is monotone, so that
ranges come from its values at the ends and over the balls. Cells of undecided sign are halved, or bisected where the
second derivative has a certain sign; whatever is still undecided when the budget is spent is handed out as it is, which
is sound.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache, partial
from itertools import pairwise

import torch
from flint import arb, arb_series, ctx
from torch import Tensor

from ..errors import ArgumentError
from ..functions.directed import high_end, low_end, precision
from ..functions.piecewise import only_piece, series_between, touched
from ..functions.registry import parse, power, read_with
from ..functions.univariate import REALS, Domain, Searched, Series, Univariate
from . import evaluate
from .constants import Inexact, ball
from .evaluate import UNKNOWN, Formula, Special, plain_product, series
from .expression import Call, Expr, Graph, Monomial, Sum, Variable, reachable, rebuilt
from .grammar import DEEPEST, read
from .interval import WHOLE

PREFIX = "expr:"
VARIABLE = "y"
_KEPT = 512  # composites that are remembered: a handful for each formula, and building one takes milliseconds
_TERMS = 30  # of the Taylor polynomial that stands for a quotient next to its removable singularity
# what bends near 0 and is straight or flat far out, and what has a singularity: they choose the order of potentials
_BENT = {"atan", "tanh", "sigmoid", "erf", "erfc", "softplus", "gelu", "silu", "mish", "asinh", "logsigmoid"}
_SINGULAR = {"log", "log2", "log10", "log1p", "acosh", "atanh", "xlogx"}


def composite(text: str) -> Univariate:
    """The function of y that a formula spells: a name from a file, or a user's text.

    >>> bose = composite("expr: 1/(exp(y) - 1)")
    >>> bose.name, round(float(bose(torch.tensor(1.0, dtype=torch.float64))), 12)
    ('expr: 1/(exp(y) - 1)', 0.581976706869)
    >>> float(composite("sin(y)/y")(torch.tensor(0.0)))
    1.0
    """
    return _read(" ".join(text.removeprefix(PREFIX).split()))


@functools.lru_cache(maxsize=_KEPT)
def _read(text: str) -> Univariate:
    return _built(_spelt(read(text, Graph({VARIABLE: WHOLE}), (VARIABLE,))[0]))


def composed(node: Expr) -> Univariate:
    """The function of y that an expression in y is; `ArgumentError` where it has no name that could be read back.

    >>> y = Graph({VARIABLE: WHOLE}).variable(VARIABLE)
    >>> composed(1 / (y * 2 + 1) ** 2) == composite("(2*y + 1)**-2")
    True
    """
    spelt = _spelt(node)
    if _levels(spelt.root) > DEEPEST:
        raise ArgumentError("the composite function is nested too deeply to be read back from its name")
    return _built(spelt)


@dataclass(frozen=True)
class _Spelt:
    """An expression in y that stands for its text: two of one text are equal, as their functions are."""

    text: str
    root: Expr = field(compare=False)


def _spelt(node: Expr) -> _Spelt:
    """The expression with its text."""
    if node.graph.intervals != {VARIABLE: WHOLE}:
        (node,) = rebuilt(Graph({VARIABLE: WHOLE}), [node])
    if node.text is None:
        raise ArgumentError("the composite function is too long to be written down")
    return _Spelt(node.text, node)


def _levels(root: Expr) -> int:
    """How deep the parser goes to read the text of an expression, at most.

    The argument of a call is one level, a later term and a factor in it two, as is a factor in parentheses; several
    factors below the line are in parentheses, and a fractional exponent takes up to five levels of its own.
    """
    deep: dict[Expr, int] = {}
    for node in reachable([root]):
        inner = max((deep[child] for child in node.children), default=0)
        if isinstance(node, Monomial):
            deep[node] = max(5, inner + (4 if sum(p < 0 for _, p in node.factors) > 1 else 2))
        else:
            deep[node] = inner + (2 if isinstance(node, Sum) else 1)
    return deep[root]


@functools.lru_cache(maxsize=_KEPT)
def _built(spelt: _Spelt) -> Univariate:
    return _build(spelt.root, f"{PREFIX} {spelt.text}")


def _build(root: Expr, name: str) -> Univariate:
    variable = root.graph.variable(VARIABLE)
    formula = Formula.of(root)
    knots, choices = _kinks(formula, variable)
    singular = [points(formula, variable, pieces) for pieces in choices]
    branches = tuple(_series(formula, root, pieces, at) for pieces, at in zip(choices, singular, strict=True))

    def ball(x: arb) -> arb:
        if not x.is_finite():
            return arb.nan()
        if not any(p.order >= 0 and near(x, p.place) for at in singular for p in at):
            return centred(evaluate.balls(formula, {VARIABLE: x})[root], x)
        return touched(knots, branches, x)  # next to a removable singularity

    def centred(natural: arb, x: arb) -> arb:
        """The natural enclosure, cut by f(c) + f'(x) (x - c), whose width shrinks with the square of that of x."""
        k = None if x.is_exact() else only_piece(knots, x)
        if k is None or not natural.is_finite():
            return natural
        middle = x.mid()
        try:
            slope = branches[k](arb_series([x, 1], prec=2))[1]
        except evaluate.UNKNOWN:
            return natural
        other = evaluate.balls(formula, {VARIABLE: middle})[root] + slope * (x - middle)
        return natural.intersection(other) if other.is_finite() else natural

    return Univariate(
        name,
        _value(formula, root, [p for at in singular for p in at if p.order >= 0], branches, knots),
        series_between(knots, branches, ball),
        ball,
        natural_domain(formula, variable, [p for at in singular for p in at if p.order < 0]),
        knots,
        _potentials(formula),
        pieces=branches if knots else (),
        turns=turns_of(branches, knots),
        image=root.range,
    )


def _kinks(formula: Formula, variable: Variable) -> tuple[tuple[float, ...], list[dict[Expr, Series]]]:
    """The knots, and for each interval between them the analytic piece of each call that has kinks."""
    bent: dict[Call, tuple[Fraction, Fraction]] = {}
    found: set[float] = set()
    for node in formula.order:
        if not isinstance(node, Call) or not node.function.knots:
            continue
        line = affine(node.argument, variable)
        places = [] if line is None else [exact_float((Fraction(k) - line[1]) / line[0]) for k in node.function.knots]
        if line is None or None in places:
            raise ArgumentError(
                f"the kinks of {node.short()} are not at float64 numbers; it cannot be part of a composite"
            )
        bent[node] = line
        found |= {place for place in places if place is not None}
    knots = tuple(sorted(found))
    ends = [-math.inf, *knots, math.inf]
    choices = []
    for lo, hi in pairwise(ends):
        middle = Fraction(0) if not knots else Fraction(lo) + 1 if math.isinf(hi) else (
            Fraction(hi) - 1 if math.isinf(lo) else (Fraction(lo) + Fraction(hi)) / 2
        )  # fmt: skip
        pieces: dict[Expr, Series] = {}
        for node, (a, b) in bent.items():
            pieces[node] = node.function.branches[sum(a * middle + b > Fraction(k) for k in node.function.knots)]
        choices.append(pieces)
    return knots, choices


def _series(formula: Formula, root: Expr, pieces: dict[Expr, Series], known: list[Point]) -> Series:
    multiply = special(formula, known, pieces)

    def series(x: arb_series) -> arb_series:
        line = arb_series([x[0], 1], prec=x.prec)
        out = evaluate.series(formula, line, pieces, multiply).get(root)
        if out is None:
            raise ValueError("the series may not exist")
        rest = x - x[0]
        return out if x.prec < 2 or (x[1] == 1 and rest.length() <= 2) else out(rest)

    return series


def _potentials(formula: Formula) -> tuple[str, ...]:
    calls = {node.function.name for node in formula.order if isinstance(node, Call)}
    powers = {p for node in formula.order if isinstance(node, Monomial) for _, p in node.factors}
    if calls & _SINGULAR or any(p < 0 or p.denominator != 1 for p in powers):
        return ("log", "square", "atan")
    return ("atan", "square") if calls & _BENT else ("square", "atan")


@dataclass(frozen=True, eq=False)
class Composed:
    """Float values of an expression in y; `patches` are places, radii and Taylor polynomials next to removable
    singularities of products."""

    formula: Formula
    root: Expr
    patches: tuple[tuple[float, float, list[float]], ...]

    def __call__(self, y: Tensor) -> Tensor:
        near = [(y - place).abs() < radius for place, radius, _ in self.patches]
        safe = y
        for (place, radius, _), close in zip(self.patches, near, strict=True):
            safe = torch.where(close, place + radius, safe)  # keeps zeros out of the denominators, also of gradients
        out = evaluate.tensors(self.formula, {VARIABLE: safe})[self.root]
        for (place, _, coefficients), close in zip(self.patches, near, strict=True):
            out = torch.where(close, _horner(coefficients, y - place), out)
        return out


def _value(
    formula: Formula, root: Expr, removable: list[Point], branches: tuple[Series, ...], knots: tuple[float, ...]
) -> Composed:
    patches = (_patch(point, branches[sum(point.place >= k for k in knots)], root) for point in removable)
    return Composed(formula, root, tuple(patches))


def _patch(point: Point, series: Series, root: Expr) -> tuple[float, float, list[float]]:
    """Place, radius and coefficients of a polynomial that equals the function to 2^-53 within the radius."""
    with precision(256, _TERMS + 2):
        terms = [float(c) for c in series(arb_series([arb(point.place), 1], prec=_TERMS)).coeffs()]
    scale = max(abs(terms[0]), max((abs(c) for c in terms), default=0.0) * 1e-3) or 1.0
    limits = [(1e-17 * scale / abs(c)) ** (1 / j) for j, c in enumerate(terms) if j >= _TERMS - 8 and c]
    radius = min([0.5, *limits])
    return point.place, radius, terms


def _horner(coefficients: list[float], t: Tensor) -> Tensor:
    out = torch.full_like(t, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        out = out * t + c
    return out


_HIGHEST_ORDER = 6  # of a zero that is looked for: (1 - cos(y))**3 has one; beyond, a quotient counts as a pole


@dataclass(frozen=True)
class Point:
    """A product near a point where a base with a negative exponent vanishes; `order` < 0 means a pole."""

    node: Monomial
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
    if isinstance(value, Inexact):
        return None
    try:
        near = float(value)
    except OverflowError:
        return None
    return near if Fraction(near) == value else None


def points(formula: Formula, variable: Variable, pieces: Mapping[Expr, Series]) -> list[Point]:
    """Every place where a product of the formula divides by an exact zero."""
    found: list[Point] = []
    products = [n for n in formula.order if isinstance(n, Monomial) and any(p < 0 for _, p in n.factors)]
    for node in products:
        lines = [line for base in node.children if (line := affine(base, variable)) is not None]
        places = {0.0} | {at for a, b in lines if (at := exact_float(-b / a)) is not None}
        for place in sorted(places):
            point = _point(formula, node, place, pieces, special(formula, found, pieces))
            if point is not None:
                found.append(point)
    return found


def _point(
    formula: Formula, node: Monomial, place: float, pieces: Mapping[Expr, Series], known: Special
) -> Point | None:
    with precision(200, _HIGHEST_ORDER + 4):
        at = series(formula, arb_series([arb(place), 1], prec=_HIGHEST_ORDER), pieces, known)
    orders: dict[Expr, int] = {}
    for base, p in node.factors:
        order = _order(at.get(base)) or (_order_moved(base, place) if place and not pieces else 0)
        if order and p.denominator != 1:
            return None
        if order:
            orders[base] = order
    if not any(base in orders and p < 0 for base, p in node.factors):
        return None
    total = sum(orders.get(base, 0) * p for base, p in node.factors)
    return Point(node, place, orders, int(total), Formula.of(*orders))


def _order_moved(base: Expr, place: float) -> int:
    """The order of a base's zero, written in the distance from the place, where constants may cancel exactly:
    exp(-(t - 40)/10 - 4) is exp(-t/10), while balls do not tell that exp(4) exp(-4) is 1."""
    own = Graph({VARIABLE: WHOLE})
    t = own.variable(VARIABLE)
    with precision(200, _HIGHEST_ORDER + 4):
        (moved,) = rebuilt(own, [base], {base.graph.variable(VARIABLE): t + Fraction(place)})
        formula = Formula.of(moved)
        at = series(formula, arb_series([arb(0), 1], prec=_HIGHEST_ORDER), {}, partial(_plainly, formula))
    return _order(at.get(moved))


def _plainly(formula: Formula, node: Monomial, x: arb_series, found: Mapping[Expr, arb_series]) -> arb_series:
    return plain_product(formula, node, found)


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

    def multiply(node: Monomial, x: arb_series, found: Mapping[Expr, arb_series]) -> arb_series:
        for point in known:
            if point.node is not node or point.order < 0:
                continue
            if near(x[0], point.place):
                return _quotient(point, x, found, pieces, multiply)
            if near(x[0], point.place, _BESIDE):
                return _both(_quotient(point, x, found, pieces, multiply), plain_product(formula, node, found))
        return plain_product(formula, node, found)

    return multiply


_BESIDE = 64.0  # radii: the remainder of degree 7 that plain division of balls leaves there is about 64^-7


def near(c: arb, place: float, radii: float = 8.0) -> bool:
    """Whether the ball is wide compared to its distance from the place; plain division is then poor or undefined."""
    return not (abs(c - place) > radii * arb(c.rad()))


def _both(one: arb_series, other: arb_series) -> arb_series:
    """What two enclosures of the same coefficients have in common."""
    pairs = [(one[j], other[j]) for j in range(other.prec)]
    common = [b if not a.is_finite() else a if not b.is_finite() else a.intersection(b) for a, b in pairs]
    return arb_series(common, prec=other.prec)


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
            out = out * power(p).series(inner)  # type: ignore[misc]
    return out


def _shifted(x: arb_series, by: int, count: int) -> arb_series:
    return arb_series([x[by + j] for j in range(count)], prec=count)


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
        elif isinstance(node, Monomial):
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
        elif isinstance(term, Monomial) and term.children == (y,) and term.factors[0][1].denominator == 1:
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
    return (high_end(near) if up else low_end(near)), False


_HALVINGS = 40  # a turn is known to 2^-40 of the interval, and the function is flat there: to 2^-80 of its bend
_MOST_CELLS = 400  # looked at in search of turns; a function with many turns gets wider balls, not a longer search


def turns_of(branches: tuple[Series, ...], knots: tuple[float, ...]) -> Searched:
    """The turns of the function that equals branches[k] between knots k - 1 and k."""

    @lru_cache(maxsize=4096)
    def between(lo: float, hi: float) -> tuple[arb, ...]:
        inner = [k for k in knots if lo < k < hi]
        found = [arb(k) for k in inner]
        ends = [lo, *inner, hi]
        for a, b in itertools.pairwise(ends):
            found += _undecided(branches[sum(k <= a for k in knots)], a, b)
        return tuple(found)

    return Searched(lambda lo, hi: between(low_end(lo), high_end(hi)))


def _undecided(series: Series, lo: float, hi: float) -> list[arb]:
    """Balls that cover the part of [lo, hi] on which the derivative's sign is not certain."""
    smallest = (hi - lo) * 2.0**-_HALVINGS
    cells = deque([(lo, hi)])
    kept: list[tuple[float, float]] = []
    for count in itertools.count():
        if not cells:
            return _joined(kept)
        a, b = cells.popleft()  # the widest first: what is left when the budget is spent is small
        _, slope, bend = _taylor(series, arb(a).union(arb(b)))
        if slope > 0 or slope < 0 or slope.is_zero():
            continue
        if bend > 0 or bend < 0:  # the slope is monotone, so that there is at most one turn
            kept += _bracket(series, a, b, rising=bool(bend > 0), smallest=smallest)
            continue
        middle = 0.5 * a + 0.5 * b
        if b - a <= smallest or count > _MOST_CELLS or not a < middle < b:
            kept.append((a, b))
        else:
            cells += [(a, middle), (middle, b)]
    raise AssertionError("the loop ends with its cells")


def _bracket(series: Series, a: float, b: float, rising: bool, smallest: float) -> list[tuple[float, float]]:
    """A small cell around the only zero of a monotone slope on [a, b]; none when the slope has one sign."""

    def side(y: float) -> int:
        slope = _taylor(series, arb(y))[1] * (1 if rising else -1)
        return 1 if slope > 0 else -1 if slope < 0 else 0

    left, right = side(a), side(b)
    if left > 0 or right < 0:
        return []
    while b - a > smallest:
        middle = 0.5 * a + 0.5 * b
        here = side(middle)
        if not a < middle < b or here == 0:
            break
        a, b = (middle, b) if here < 0 else (a, middle)
    return [(a, b)]


def _taylor(series: Series, x: arb) -> list[arb]:
    """Enclosures of value, slope and half the second derivative over a ball."""
    try:
        out = series(arb_series([x, 1], prec=3))
    except UNKNOWN:
        return [arb.nan()] * 3
    return [out[0], out[1], out[2]]


def _joined(cells: list[tuple[float, float]]) -> list[arb]:
    """The cells from left to right, neighbours as one ball while that stays short."""
    out: list[tuple[float, float]] = []
    for a, b in sorted(cells):
        if out and (out[-1][1] == a and b - out[-1][0] <= 4 * (b - a)):
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return [arb(a).union(arb(b)) for a, b in out]


def named(text: str) -> Univariate:
    """The function that a name in a file stands for: one of the registry, or a composite."""
    return parse(text)


read_with(PREFIX, composite)
