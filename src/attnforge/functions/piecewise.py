"""Functions with kinks: analytic between their knots, continuous across them.

Among them functions continued beyond the closed ends of their domain by their values there, sqrt(max(y, 0)): rounding
may push an argument a little outside the domain of the function that reads it. A head is still defined there, and it is
compared with this continuation.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from flint import arb, arb_series
from torch import Tensor

from ..arguments import number
from ..errors import ArgumentError
from .analytic import expm1_series
from .univariate import REALS, BallMap, Series, Univariate, Value, ball_by_turns

_POTENTIALS = ("square", "atan")


def piecewise(
    name: str,
    value: Value,
    knots: tuple[float, ...],
    pieces: tuple[Series, ...],
    turns: tuple[float, ...] = (),
    potentials: tuple[str, ...] = _POTENTIALS,
    image: tuple[float, float] = (-math.inf, math.inf),
) -> Univariate:
    """A continuous function that equals pieces[k] between knots k-1 and k and is monotone between its turns."""
    corners = tuple(arb(t) for t in turns)
    ball = ball_by_turns(lambda x: touched(knots, pieces, x), corners, REALS)
    series = series_between(knots, pieces, ball)
    return Univariate(name, value, series, ball, REALS, knots, potentials, pieces=pieces, turns=corners, image=image)


def touched(knots: tuple[float, ...], pieces: Sequence[Series], x: arb) -> arb:
    """The values over a ball of every piece that it may touch; for an exact number one, or two that agree at a knot."""
    near = [
        piece(arb_series([x], prec=1))[0]
        for k, piece in enumerate(pieces)
        if not ((k > 0 and x < knots[k - 1]) or (k < len(knots) and x > knots[k]))
    ]
    return functools.reduce(arb.union, near) if near else arb.nan()


def only_piece(knots: tuple[float, ...], x: arb) -> int | None:
    """The number of the only piece that a ball touches; None where it is not clear of a knot."""
    inside = (k for k in range(len(knots) + 1) if (k == 0 or x > knots[k - 1]) and (k == len(knots) or x < knots[k]))
    return next(inside, None)


def series_between(knots: tuple[float, ...], pieces: Sequence[Series], ball: BallMap) -> Series:
    """One series for all of the line: known where the constant term's ball is clear of the knots.

    Tables use the pieces themselves instead, and so does whoever composes this function with another.
    """

    def series(x: arb_series) -> arb_series:
        k = only_piece(knots, x[0])
        if k is None:
            return arb_series([ball(x[0])] + [arb.nan()] * (x.prec - 1), prec=x.prec)
        return pieces[k](x)

    return series


def _line(x0: float, y0: float, x1: float, y1: float) -> Series:
    def series(x: arb_series) -> arb_series:
        return (x - x0) * ((arb(y1) - y0) / (arb(x1) - x0)) + y0

    return series


def _read_from(x0: float, y0: float, x1: float, y1: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """Two points of a line to compute it from: 0 is one of a line through 0, whose small values then lose nothing."""
    if Fraction(x0) * Fraction(y1) != Fraction(x1) * Fraction(y0):
        return (x0, y0), (x1, y1)
    return (0.0, 0.0), max((x0, y0), (x1, y1), key=lambda point: abs(point[0]))


@functools.lru_cache(maxsize=256)
def _piecewise_linear(xs: tuple[float, ...], ys: tuple[float, ...]) -> Univariate:
    lines = tuple(_line(*a, *b) for a, b in itertools.pairwise(zip(xs, ys, strict=True)))
    inner = torch.tensor(xs[1:-1], dtype=torch.float64)
    ends = [_read_from(*a, *b) for a, b in itertools.pairwise(zip(xs, ys, strict=True))]
    left, right = torch.tensor(ends, dtype=torch.float64).permute(1, 2, 0).contiguous()

    def value(y: Tensor) -> Tensor:
        index = torch.bucketize(y.detach(), inner.to(y), right=True)
        (x0, y0), (x1, y1) = left.to(y)[:, index], right.to(y)[:, index]
        out: Tensor = y0 + (y1 - y0) / (x1 - x0) * (y - x0)
        return out

    name = f"piecewise_linear({list(xs)}, {list(ys)})"
    return piecewise(name, value, xs[1:-1], lines, turns=xs[1:-1])


def piecewise_linear(xs: Sequence[float], ys: Sequence[float]) -> Univariate:
    """The continuous function through the points (xs, ys), linear between them.

    Outside of [xs[0], xs[-1]] the first and the last line go on, so only the points between are kinks.

    >>> hat = piecewise_linear([-1, 0, 1], [0, 1, 0])
    >>> hat(torch.tensor([-2.0, -0.5, 0.0, 0.25])), hat.knots
    (tensor([-1.0000,  0.5000,  1.0000,  0.7500]), (0.0,))
    """
    try:
        x, y = np.asarray(xs, dtype=np.float64), np.asarray(ys, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"piecewise_linear needs two sequences of numbers, got {xs!r} and {ys!r}") from error
    if x.ndim != 1 or x.shape != y.shape or len(x) < 2:
        raise ArgumentError(f"piecewise_linear needs xs and ys of one length >= 2, got shapes {x.shape} and {y.shape}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ArgumentError("piecewise_linear needs finite xs and ys")
    if not (np.diff(x) > 0).all():
        raise ArgumentError(f"piecewise_linear needs increasing xs, got {x.tolist()}")
    return _piecewise_linear(tuple(x.tolist()), tuple(y.tolist()))


def _zero(x: arb_series) -> arb_series:
    return x * 0


def _same(x: arb_series) -> arb_series:
    return x


def _level(height: float) -> Series:
    return lambda x: x * 0 + height


@functools.lru_cache(maxsize=64)
def leaky_relu(slope: float = 0.01) -> Univariate:
    """max(y, 0) + slope * min(y, 0)."""
    rate = number("slope", slope)
    pieces: tuple[Series, ...] = (lambda x: x * rate, _same)
    name = "leaky_relu" if rate == 0.01 else f"leaky_relu({rate!r})"
    return piecewise(name, lambda y: torch.where(y > 0, y, rate * y), (0.0,), pieces, turns=(0.0,))


@functools.lru_cache(maxsize=64)
def elu(alpha: float = 1.0) -> Univariate:
    """y for y > 0, alpha (exp(y) - 1) below."""
    a = number("alpha", alpha)
    pieces: tuple[Series, ...] = (lambda x: expm1_series(x) * a, _same)

    def value(y: Tensor) -> Tensor:
        return torch.where(y > 0, y, a * torch.expm1(y.clamp(max=0)))

    return piecewise("elu" if a == 1 else f"elu({a!r})", value, (0.0,), pieces, (0.0,), ("atan", "square"))


# what makes activations of mean 0 and variance 1 a fixed point (Klambauer et al. 2017), to the digits that torch has
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


def _selu_below(x: arb_series) -> arb_series:
    return expm1_series(x) * (arb(_SELU_ALPHA) * _SELU_SCALE)


PIECEWISE: tuple[Univariate, ...] = (
    piecewise("relu", torch.relu, (0.0,), (_zero, _same), image=(0.0, math.inf)),
    piecewise("abs", torch.abs, (0.0,), (lambda x: -x, _same), turns=(0.0,), image=(0.0, math.inf)),
    piecewise("relu6", lambda y: y.clamp(0, 6), (0.0, 6.0), (_zero, _same, _level(6)), image=(0.0, 6.0)),
    piecewise("hardtanh", lambda y: y.clamp(-1, 1), (-1.0, 1.0), (_level(-1), _same, _level(1)), image=(-1.0, 1.0)),
    piecewise(
        "hardsigmoid",
        lambda y: ((y + 3) / 6).clamp(0, 1),
        (-3.0, 3.0),
        (_zero, lambda x: (x + 3) / 6, _level(1)),
    ),
    piecewise(
        "hardswish",
        lambda y: y * (y + 3).clamp(0, 6) / 6,
        (-3.0, 3.0),
        (_zero, lambda x: x * (x + 3) / 6, _same),
        turns=(-3.0, -1.5, 3.0),
        potentials=("atan", "square"),
    ),
    piecewise("squared_relu", lambda y: torch.relu(y) ** 2, (0.0,), (_zero, lambda x: x * x)),
    piecewise(
        "softsign",
        lambda y: y / (1 + y.abs()),
        (0.0,),
        (lambda x: x * (1 - x).inv(), lambda x: x * (1 + x).inv()),
        potentials=("atan", "square"),
    ),
    piecewise(
        "selu",
        lambda y: torch.where(y > 0, _SELU_SCALE * y, _SELU_SCALE * _SELU_ALPHA * torch.expm1(y.clamp(max=0))),
        (0.0,),
        (_selu_below, lambda x: x * _SELU_SCALE),
        potentials=("atan", "square"),
    ),
    leaky_relu(),
    elu(),
)


@functools.lru_cache(maxsize=512)
def clipped(fn: Univariate) -> Univariate:
    """`fn` continued by constants; `fn` itself when its domain has no closed end.

    >>> import torch
    >>> from attnforge.functions.registry import get
    >>> clipped(get("sqrt")).value(torch.tensor([-1.0, 4.0]))
    tensor([0., 2.])
    """
    lo = fn.domain.lo if fn.domain.lo_closed and math.isfinite(fn.domain.lo) else None
    hi = fn.domain.hi if fn.domain.hi_closed and math.isfinite(fn.domain.hi) else None
    if lo is None and hi is None:
        return fn
    inner = [k for k in fn.knots if (lo is None or k > lo) and (hi is None or k < hi)]
    branches = fn.branches
    skipped = len([k for k in fn.knots if lo is not None and k <= lo])
    middle = branches[skipped : skipped + len(inner) + 1]
    pieces: list[Series] = [*middle]
    knots = [*inner]
    if lo is not None:
        pieces.insert(0, _constant(fn, lo))
        knots.insert(0, lo)
    if hi is not None:
        pieces.append(_constant(fn, hi))
        knots.append(hi)

    def value(y: Tensor) -> Tensor:
        return fn.value(y.clamp(lo, hi))

    def ball(x: arb) -> arb:
        low, high = x.lower(), x.upper()
        if lo is not None and high <= lo:
            return fn.ball(arb(lo))
        if hi is not None and low >= hi:
            return fn.ball(arb(hi))
        left = arb(lo) if lo is not None and low < lo else low
        right = arb(hi) if hi is not None and high > hi else high
        return fn.ball(left.union(right))

    return Univariate(
        f"clipped({fn.name})", value, middle[0], ball, REALS, tuple(knots), fn.potentials,
        pieces=tuple(pieces), source=fn, image=fn.image,
    )  # fmt: skip


def _constant(fn: Univariate, at: float) -> Series:
    def series(x: arb_series) -> arb_series:
        return arb_series([fn.ball(arb(at))])

    return series
