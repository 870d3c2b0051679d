"""Composites: one univariate function made of many, such as 1/(exp(y) - 1) (fusion, mathematics H1, item 2).

A composite is named by its formula in y, "expr: 1/(exp(y) - 1)", and is nothing but what the name says: `composite`
reads the formula through the parser of the formula language. Its series and ranges are compositions in ball arithmetic.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from itertools import pairwise

import torch
from flint import arb, arb_series
from torch import Tensor

from ..errors import ArgumentError
from . import evaluate
from .constants import settled
from .evaluate import Formula
from .expression import Call, Expr, Product, Variable
from .grammar import read
from .graph import Graph
from .interval import WHOLE
from .natural import natural_domain
from .rebuild import rebuilt
from .removable import Point, affine, exact_float, near, points, special
from .rounding import precision
from .turning import turns_of
from .univariate import Series, Univariate, Value

PREFIX = "expr:"
VARIABLE = "y"
_TERMS = 30  # of the Taylor polynomial that stands for a quotient next to its removable singularity
_BENT = {"atan", "tanh", "sigmoid", "erf", "erfc", "softplus", "gelu", "silu", "mish", "asinh", "logsigmoid"}
_SINGULAR = {"log", "log2", "log10", "log1p", "acosh", "atanh"}


def composite(text: str) -> Univariate:
    """The function of y that a formula spells.

    >>> bose = composite("expr: 1/(exp(y) - 1)")
    >>> bose.name, round(float(bose(torch.tensor(1.0, dtype=torch.float64))), 12)
    ('expr: 1/(exp(y) - 1)', 0.581976706869)
    >>> float(composite("sin(y)/y")(torch.tensor(0.0)))
    1.0
    """
    return _composite(" ".join(text.removeprefix(PREFIX).split()))


@functools.lru_cache(maxsize=512)
def _composite(text: str) -> Univariate:
    graph = Graph({VARIABLE: WHOLE})
    node, _ = read(text, graph, (VARIABLE,))
    node = spelled_out(graph, node)
    if node.text is None:
        raise ArgumentError("the composite function is too long to be written down")
    return _build(node, f"{PREFIX} {node.text}")


def spelled_out(graph: Graph, node: Expr) -> Expr:
    """The same expression with every constant replaced by the one that its text spells."""
    return rebuilt(graph, [node], settled)[0]


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
        # next to a removable singularity: every piece that the ball may touch
        touched = [
            branch(arb_series([x, 1], prec=1))[0]
            for k, branch in enumerate(branches)
            if not ((k > 0 and x < knots[k - 1]) or (k < len(knots) and x > knots[k]))
        ]
        return functools.reduce(arb.union, touched)

    def centred(natural: arb, x: arb) -> arb:
        """The natural enclosure, cut by f(c) + f'(x) (x - c), whose width shrinks with the square of that of x."""
        k = None if x.is_exact() else next((k for k in range(len(knots) + 1) if _clear(x, knots, k)), None)
        if k is None or not natural.is_finite():
            return natural
        middle = x.mid()
        try:
            slope = branches[k](arb_series([x, 1], prec=2))[1]
        except evaluate.UNKNOWN:
            return natural
        other = evaluate.balls(formula, {VARIABLE: middle})[root] + slope * (x - middle)
        return natural.intersection(other) if other.is_finite() else natural

    def series(x: arb_series) -> arb_series:
        k = next((k for k in range(len(knots) + 1) if _clear(x[0], knots, k)), None)
        if k is None:
            return arb_series([ball(x[0])] + [arb.nan()] * (x.prec - 1), prec=x.prec)
        return branches[k](x)

    return Univariate(
        name,
        _value(formula, root, [p for at in singular for p in at if p.order >= 0], branches, knots),
        series,
        ball,
        natural_domain(formula, variable, [p for at in singular for p in at if p.order < 0]),
        knots,
        _potentials(formula),
        pieces=branches if knots else (),
        turns=turns_of(branches, knots),
        image=root.range,
    )


def _clear(c: arb, knots: tuple[float, ...], k: int) -> bool:
    return (k == 0 or c > knots[k - 1]) and (k == len(knots) or c < knots[k])


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
    powers = {p for node in formula.order if isinstance(node, Product) for _, p in node.factors}
    if calls & _SINGULAR or any(p < 0 or p.denominator != 1 for p in powers):
        return ("log", "square", "atan")
    return ("atan", "square") if calls & _BENT else ("square", "atan")


def _value(
    formula: Formula, root: Expr, removable: list[Point], branches: tuple[Series, ...], knots: tuple[float, ...]
) -> Value:
    """Float values; close to a removable singularity of a product, its Taylor polynomial there."""
    patches = [_patch(point, branches[sum(point.place >= k for k in knots)], root) for point in removable]

    def value(y: Tensor) -> Tensor:
        near = [(y - place).abs() < radius for place, radius, _ in patches]
        safe = y
        for (place, radius, _), close in zip(patches, near, strict=True):
            safe = torch.where(close, place + radius, safe)  # keeps zeros out of the denominators, also of gradients
        out = evaluate.tensors(formula, {VARIABLE: safe})[root]
        for (place, _, coefficients), close in zip(patches, near, strict=True):
            out = torch.where(close, _horner(coefficients, y - place), out)
        return out

    return value


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
