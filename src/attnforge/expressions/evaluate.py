"""Values of expressions: float tensors, balls, and Taylor series by ball arithmetic.

Each evaluator walks the nodes once, children first. A `Formula` is an expression prepared for that: constants are
converted, powers looked up. The series evaluator works on one variable, at c + t with a ball c.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from flint import arb, arb_series, fmpq
from torch import Tensor

from ..functions.directed import BITS, precision
from ..functions.registry import power
from ..functions.univariate import Series, Univariate
from .constants import Inexact, ball
from .expression import Call, Expr, Monomial, Number, Sum, Variable, reachable

UNKNOWN = (ValueError, ZeroDivisionError)  # python-flint's way to say that a series may not exist
#: (product, x, series of the nodes before it) -> its series
Special = Callable[[Monomial, arb_series, Mapping[Expr, arb_series]], arb_series]


@dataclass(frozen=True, eq=False)
class Formula:
    """Expressions ready for evaluation; `powers` holds the registered power of each factor of each product."""

    roots: tuple[Expr, ...]
    order: tuple[Expr, ...] = ()
    powers: Mapping[Expr, tuple[tuple[Expr, Univariate], ...]] = field(default_factory=dict)
    exact: Mapping[Fraction, fmpq | arb] = field(default_factory=dict)

    @classmethod
    def of(cls, *roots: Expr) -> Formula:
        order = tuple(reachable(roots))
        constants = {node.value for node in order if isinstance(node, Number)}
        for node in order:
            if isinstance(node, Sum):
                constants |= {node.constant, *(c for _, c in node.terms)}
        powers: dict[Expr, tuple[tuple[Expr, Univariate], ...]] = {}
        powers |= {n: tuple((b, power(p)) for b, p in n.factors) for n in order if isinstance(n, Monomial)}
        with precision(2 * BITS):
            exact = {c: ball(c) if isinstance(c, Inexact) else fmpq(c.numerator, c.denominator) for c in constants}
        return cls(roots, order, powers, exact)


def inside(function: Univariate, u: Tensor) -> Tensor:
    """The argument moved into the closed ends of the domain, where only rounding can have left it (H1, item 8)."""
    domain = function.domain
    low = domain.lo if domain.lo_closed and domain.lo > -torch.inf else None
    high = domain.hi if domain.hi_closed and domain.hi < torch.inf else None
    return u if low is None and high is None else u.clamp(low, high)


def tensors(formula: Formula, inputs: Mapping[str, Tensor]) -> dict[Expr, Tensor]:
    """The value of every node at the points whose coordinates are given by name."""
    like = next(iter(inputs.values()))
    found: dict[Expr, Tensor] = {}
    for node in formula.order:
        match node:
            case Number():
                found[node] = torch.full_like(like, float(node.value))
            case Variable():
                found[node] = inputs[node.name]
            case Sum():
                found[node] = _tensor_sum(node, found)
            case Monomial():
                factors = [fn(inside(fn, found[base])) for base, fn in formula.powers[node]]
                found[node] = factors[0]
                for factor in factors[1:]:
                    found[node] = found[node] * factor
            case Call():
                found[node] = _tensor_call(node, found)
    return found


def _tensor_sum(node: Sum, found: Mapping[Expr, Tensor]) -> Tensor:
    """A sum; exp(u) - 1 and 1 - cos(u) keep their relative accuracy near 0."""
    constant, total = node.constant, None
    for term, coefficient in node.terms:
        part, factor = found[term], float(coefficient)
        if constant and constant == -coefficient and isinstance(term, Call) and term.function.name in ("exp", "cos"):
            u, constant = found[term.argument], Fraction(0)
            part, factor = (u.expm1(), factor) if term.function.name == "exp" else (torch.sin(u / 2) ** 2, -2 * factor)
        scaled = part if factor == 1 else part * factor
        total = scaled if total is None else total + scaled
    assert total is not None
    return total + float(constant) if constant else total


def _tensor_call(node: Call, found: Mapping[Expr, Tensor]) -> Tensor:
    u = node.argument
    if node.function.name == "log" and isinstance(u, Sum) and u.constant == 1:
        return torch.log1p(sum((found[term] * float(c) for term, c in u.terms), start=torch.zeros_like(found[u])))
    return node.function(inside(node.function, found[u]))


def balls(formula: Formula, inputs: Mapping[str, arb]) -> dict[Expr, arb]:
    """Enclosures of every node over the balls of the inputs, cut to where the functions are defined."""
    found: dict[Expr, arb] = {}
    for node in formula.order:
        match node:
            case Number():
                found[node] = arb(formula.exact[node.value])
            case Variable():
                found[node] = inputs[node.name]
            case Sum():
                total = arb(formula.exact[node.constant])
                for term, coefficient in node.terms:
                    total += found[term] * formula.exact[coefficient]
                found[node] = total
            case Monomial():
                out = arb(1)
                for base, fn in formula.powers[node]:
                    out *= _ball(fn, found[base])
                found[node] = out
            case Call():
                found[node] = _ball(node.function, found[node.argument])
    return found


def _ball(function: Univariate, u: arb) -> arb:
    return function.ball(u) if u.is_finite() else arb.nan()


def series(formula: Formula, x: arb_series, pieces: Mapping[Expr, Series], special: Special) -> dict[Expr, arb_series]:
    """Taylor series of every node at x = c + t; `pieces` says which analytic piece a call with kinks stands for.

    `special` has the last word on products: it knows the removable singularities. A node whose series may not exist
    is left out, with all that depend on it.
    """
    found: dict[Expr, arb_series] = {}
    for node in formula.order:
        try:
            match node:
                case Number():
                    found[node] = arb_series([formula.exact[node.value]], prec=x.prec)
                case Variable():
                    found[node] = x
                case Sum():
                    total = arb_series([formula.exact[node.constant]], prec=x.prec)
                    for term, coefficient in node.terms:
                        total += found[term] * formula.exact[coefficient]
                    found[node] = total
                case Monomial():
                    found[node] = special(node, x, found)
                case Call():
                    found[node] = pieces.get(node, node.function.series)(found[node.argument])  # type: ignore[misc]
        except (KeyError, *UNKNOWN):  # a child without a series
            continue
    return found


def plain_product(formula: Formula, node: Monomial, found: Mapping[Expr, arb_series]) -> arb_series:
    """The series of a product from those of its bases."""
    factors = [fn.series(found[base]) for base, fn in formula.powers[node] if fn.series is not None]
    return functools.reduce(operator.mul, factors)
