"""Parts of functions as functions of their own, by their names in programs: "piece 0 of elu", "rise from 1.0 of exp".

A piece is what a function is between two neighbouring kinks, continued smoothly beyond them; a rise is what a function
adds from a point on. Whoever reads programs reads these names: `expressions.composite.named`.
"""

from __future__ import annotations

import functools
import math

import torch
from flint import arb, arb_series
from torch import Tensor

from ..errors import ArgumentError
from .directed import precision
from .piecewise import series_between, touched
from .registry import parse, read_with
from .univariate import REALS, Series, Univariate

BITS = 256  # of the proofs and of the points read off: float64 and its products are exact, with room for one quotient
SMOOTH = 3  # derivatives: a jump of the fourth costs a table less than rounding of a wide interval does


def tail_at(piece: Series, at: float) -> list[arb]:
    """Value and `SMOOTH` derivatives over their factorials, of a piece at a point."""
    with precision(BITS, SMOOTH + 1):
        found = piece(arb_series([arb(at), 1], prec=SMOOTH + 1))
        return [found[j] for j in range(SMOOTH + 1)]


@functools.lru_cache(maxsize=512)
def piece_of(function: Univariate, index: int) -> Univariate:
    """One piece of a function, continued beyond its ends by its Taylor polynomials of degree `SMOOTH` there.

    >>> piece = piece_of(parse("elu"), 0)
    >>> piece.name, parse(piece.name) == piece, piece.knots, round(float(piece.ball(arb(0.5))), 4)
    ('piece 0 of elu', True, (0.0,), 0.6458)
    """
    if not (function.domain == REALS and 0 <= index < len(function.branches)):
        raise ArgumentError(f"{function.name} has no piece {index} of its own")
    low, high = (-math.inf, *function.knots, math.inf)[index : index + 2]
    own = function.branches[index]
    knots = [end for end in (low, high) if math.isfinite(end)]
    tails = {end: tail_at(own, end) for end in knots}
    pieces = [*(_polynomial_at(end, tails[end]) for end in knots if end == low), own]
    pieces += [_polynomial_at(end, tails[end]) for end in knots if end == high]
    steps = {end: [float(c) for c in tail] for end, tail in tails.items()}

    def value(y: Tensor) -> Tensor:
        inside = y.clamp(low, high)
        out = function.value(inside)
        for end, beyond in ((low, y < low), (high, y > high)):
            if end in steps:
                tail = torch.stack([c * (y - end) ** j for j, c in enumerate(steps[end])]).sum(0)
                out = torch.where(beyond, tail, out)
        return out

    def ball(x: arb) -> arb:
        return touched(tuple(knots), pieces, x)

    series = series_between(tuple(knots), pieces, ball)
    return Univariate(
        f"piece {index} of {function.name}", value, series, ball, REALS, tuple(knots), function.potentials,
        pieces=tuple(pieces), source=function.source,
    )  # fmt: skip


def _polynomial_at(place: float, coefficients: list[arb]) -> Series:
    """The polynomial with these coefficients in powers of y - place, lowest first."""

    def series(x: arb_series) -> arb_series:
        h, total = x - place, x * 0 + coefficients[-1]
        for c in coefficients[-2::-1]:
            total = total * h + c
        return total

    return series


def _read_piece(text: str) -> Univariate:
    """The function that a name such as 'piece 0 of elu' stands for."""
    index, _, name = text.removeprefix("piece ").partition(" of ")
    if not index.isdigit():
        raise ArgumentError(f"cannot read {text!r}; expected something like 'piece 0 of elu'")
    return piece_of(parse(name), int(index))


read_with("piece ", _read_piece)


@functools.lru_cache(maxsize=512)
def rise_of(function: Univariate, start: float) -> Univariate:
    """function(y) - function(start): what a function without knots adds from a point on.

    >>> rise = rise_of(parse("exp"), 1.0)
    >>> rise.name, parse(rise.name) == rise, round(float(rise.ball(arb(2.0))), 4)
    ('rise from 1.0 of exp', True, 4.6708)
    """
    series = function.series
    if series is None or function.knots or not function.ball(arb(start)).is_finite():
        raise ArgumentError(f"{function.name} has no rise from {start!r} on")
    below = function.value(torch.tensor(start, dtype=torch.float64))

    def level() -> arb:
        return function.ball(arb(start))  # in the precision of whoever asks

    return Univariate(
        f"rise from {start!r} of {function.name}",
        lambda y: function.value(y) - below.to(y),
        lambda x: series(x) - level(),
        lambda x: function.ball(x) - level(),
        function.domain, (), function.potentials, turns=function.turns, source=function.source,
    )  # fmt: skip


def _read_rise(text: str) -> Univariate:
    """The function that a name such as 'rise from 1.0 of exp' stands for."""
    start, _, name = text.removeprefix("rise from ").partition(" of ")
    try:
        if name.startswith("rise "):  # no rise is of a rise: a name has no depth
            raise ValueError(name)
        return rise_of(parse(name), float(start))
    except ValueError as error:
        raise ArgumentError(f"cannot read {text!r}; expected something like 'rise from 1.0 of exp'") from error


read_with("rise from ", _read_rise)
