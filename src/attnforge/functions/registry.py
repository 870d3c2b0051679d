"""The registry of univariate functions, and what can be asked of them.

fn = get("gelu")                          a name, also "power(-1.5)", "piecewise_linear([0, 1, 2], [0, 1, 0])"
check_domain(fn, lo, hi)                  raises `DomainError` naming the point
enclose(fn, lo, hi)                       rigorous range
taylor(fn, lo, hi, order)                 rigorous Taylor tables, one row for each cell

Tables and ranges are computed by ball arithmetic (python-flint). One evaluation of the function's series at the exact
centre of a cell gives the coefficients; one at a ball that holds the whole cell gives, as its coefficient of degree
order + 1, the Lagrange remainder (lemma A4).
"""

from __future__ import annotations

import copyreg
import functools
import json
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import overload

import numpy as np
import torch
from flint import arb, arb_series, fmpq
from torch import Tensor

from ..arguments import is_number, is_whole
from ..dtypes import Array
from ..errors import ArgumentError, DomainError, closest
from .analytic import ANALYTIC, analytic, shifted_log, softplus
from .callables import evaluate, from_callable, interpolant_table
from .directed import BITS, high_end, low_end, polynomial_upper, precision, split, up
from .piecewise import PIECEWISE, elu, leaky_relu, piecewise_linear
from .univariate import (
    NON_NEGATIVE,
    POSITIVE,
    REALS,
    Domain,
    Searched,
    Series,
    Taylor,
    Univariate,
    centre_and_radius,
    intersect,
    overlapping,
    spread,
)


@functools.lru_cache(maxsize=128)
def taylor_table(fn: Univariate, lo_bytes: bytes, hi_bytes: bytes, order: int) -> Taylor:
    """The table of a function on the cells whose ends are these float64 bytes; the arguments are the cache's key."""
    lo, hi = np.frombuffer(lo_bytes), np.frombuffer(hi_bytes)
    if not fn.branches:
        return interpolant_table(fn, lo, hi, order)
    centre, radius = centre_and_radius(lo, hi)
    # A cell that touches a knot belongs to the piece on its own side. The piece's ball sticks out over the knot by the
    # rounding of its radius; that is harmless: the piece is analytic there, and the table speaks of [lo, hi] only.
    branch = [fn.branches[i] for i in np.searchsorted(fn.knots, lo, side="right")]
    if fn.seam is not None:
        place, both = fn.seam
        branch = [both if end >= place else series for series, end in zip(branch, hi.tolist(), strict=True)]
    cells = list(zip(branch, centre.tolist(), radius.tolist(), strict=True))
    with precision(BITS, order + 4):
        coefficients = [ball for series, c, _ in cells for ball in _coefficients(series, arb(c), order + 1)]
        wide = [_coefficients(series, arb(c, r), order + 2) for series, c, r in cells]
        coefficient, error = (x.reshape(len(cells), order + 1) for x in split(coefficients))
        last, last_error = split([row[-1] for row in wide])
        natural = spread(*split([row[0] for row in wide]))
        with np.errstate(over="ignore"):
            remainder = up(np.abs(last) + last_error)
            reach = np.column_stack([error[:, 0], up(np.abs(coefficient[:, 1:]) + error[:, 1:]), remainder])
        low, high = intersect(*natural, *spread(coefficient[:, 0], polynomial_upper(reach, radius)))
        # At a branch point (sqrt at 0) both enclosures are infinite while the function is not.
        poor = ~(np.isfinite(low) & np.isfinite(high))
        low[poor], high[poor] = intersect(low[poor], high[poor], *_by_balls(fn, lo[poor], hi[poor]))
    return Taylor(centre, radius, coefficient, error, remainder, *_clip(fn, low, high))


def _coefficients(series: Series, constant: arb, count: int) -> list[arb]:
    """The first `count` coefficients of the composition with constant + t; NaN where the series does not say."""
    try:
        out = series(arb_series([constant, 1], prec=count))
    except (ValueError, ZeroDivisionError):  # python-flint divides by a series whose constant term may be 0
        return [arb.nan()] * count
    known = out.coeffs()
    # Coefficients beyond the length are exact zeros, those beyond the series' own precision unknown.
    known += [arb(0)] * (min(out.prec, count) - len(known))
    return (known + [arb.nan()] * (count - len(known)))[:count]


def ranges(fn: Univariate, lo: Array, hi: Array) -> tuple[Array, Array]:
    """Outward rounded enclosures of the function over cells that may straddle knots.

    By monotonicity where the turns are known (then as tight as float64 allows), else by one Taylor form and one ball
    for each cell.
    """
    if not fn.branches:
        table = interpolant_table(fn, lo, hi, 1)
        return table.low, table.high
    with precision():
        low, high = _clip(fn, *_by_balls(fn, lo, hi))
    if fn.turns is None and not any(((lo < k) & (k < hi)).any() for k in fn.knots):
        table = taylor_table(fn, lo.tobytes(), hi.tobytes(), 3)
        low, high = intersect(low, high, table.low, table.high)
    return low, high


FIRST = 16  # cells of an interval whose range is refined: all of them at once cost little more than one


def refined_range(fn: Univariate, lo: float, hi: float) -> tuple[float, float]:
    """Range over one interval by branch and bound: split the cells that can still widen the range seen at points.

    Stops when no cell can widen it by more than 1e-9 of itself, or when splitting no longer helps: a cell whose
    enclosure is dominated by rounding or by a pole never settles.
    """
    ends = np.unique(np.concatenate([np.linspace(lo, hi, FIRST + 1), [k for k in fn.knots if lo < k < hi]]))
    left, right = ends[:-1], ends[1:]
    settled_low, settled_high, before = np.inf, -np.inf, np.inf
    while True:
        low, high = ranges(fn, left, right)
        # Every cell holds its left end, so the result cannot be tighter than the enclosure of the value there.
        point_low, point_high = ranges(fn, left, left)
        seen_low, seen_high = min(settled_low, point_high.min()), max(settled_high, point_low.max())
        excess = np.maximum(seen_low - low, high - seen_high)
        unsettled = excess > 1e-9 * (seen_high - seen_low)
        worst = float(excess.max())
        if not unsettled.any() or not worst < 0.9 * before or unsettled.sum() > 512:
            return float(min(settled_low, low.min())), float(max(settled_high, high.max()))
        before = worst if np.isfinite(worst) else before
        settled_low = min(settled_low, low[~unsettled].min(initial=np.inf))
        settled_high = max(settled_high, high[~unsettled].max(initial=-np.inf))
        middle = np.clip(0.5 * left + 0.5 * right, left, right)[unsettled]
        left, right = np.concatenate([left[unsettled], middle]), np.concatenate([middle, right[unsettled]])


def _clip(fn: Univariate, low: Array, high: Array) -> tuple[Array, Array]:
    """No enclosure is wider than the function's image: sin stays in [-1, 1] after rounding outward."""
    return np.maximum(low, fn.image[0]), np.minimum(high, fn.image[1])


def _by_balls(fn: Univariate, lo: Array, hi: Array) -> tuple[Array, Array]:
    """Enclosures by `fn.ball`: at the ends and turns where the turns are known, over the whole cell otherwise."""
    if fn.turns is None:
        balls = [fn.ball(arb(c, r)) for c, r in zip(*(x.tolist() for x in centre_and_radius(lo, hi)), strict=True)]
        return np.array([low_end(b) for b in balls]), np.array([high_end(b) for b in balls])
    points, index = np.unique(np.concatenate([lo, hi]), return_inverse=True)
    values = [fn.ball(arb(p)) for p in points.tolist()]
    value_low = np.array([low_end(v) for v in values])[index].reshape(2, -1)
    value_high = np.array([high_end(v) for v in values])[index].reshape(2, -1)
    low, high = value_low.min(0), value_high.max(0)
    if isinstance(fn.turns, Searched) and len(lo) > 4:
        for turn in fn.turns(arb(float(lo.min())), arb(float(hi.max()))):
            met = (lo <= high_end(turn)) & (hi >= low_end(turn))
            value = fn.ball(turn)
            low[met], high[met] = np.minimum(low[met], low_end(value)), np.maximum(high[met], high_end(value))
    elif fn.turns:
        for i, (a, b) in enumerate(zip(lo.tolist(), hi.tolist(), strict=True)):
            for turn in overlapping(fn.turns, arb(a), arb(b)) if a < b else ():
                value = fn.ball(turn)
                low[i], high[i] = min(low[i], low_end(value)), max(high[i], high_end(value))
    if fn.domain.poles:
        crossed = np.array([fn.domain.pole_in(a, b) is not None for a, b in zip(lo, hi, strict=True)], dtype=bool)
        low[crossed], high[crossed] = -np.inf, np.inf
    return low, high


__all__ = [
    "Domain",
    "Taylor",
    "Univariate",
    "check_domain",
    "elu",
    "enclose",
    "from_callable",
    "get",
    "leaky_relu",
    "names",
    "parse",
    "piecewise_linear",
    "power",
    "reference",
    "softplus",
    "taylor",
]

Function = str | Univariate | Callable[[Tensor], Tensor]

_REGISTRY: dict[str, Univariate] = {fn.name: fn for fn in (*ANALYTIC, *PIECEWISE)}
_ALIASES = {
    "arccos": "acos",
    "arcsin": "asin",
    "arctan": "atan",
    "gelu_erf": "gelu",
    "gelu_new": "gelu_tanh",
    "inverse": "reciprocal",
    "ln": "log",
    "relu2": "squared_relu",
    "swish": "silu",
}
_READERS: dict[str, Callable[[str], Univariate]] = {}  # names that begin so are read by somebody else
#: Exponents whose power is a registered function.
_SPECIAL_POWERS = {1.0: "identity", 2.0: "square", 3.0: "cube", 0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}
_RATIO = re.compile(r"-?[0-9]{1,400}/[0-9]{1,400}")  # an exponent that is no float64
_CALL = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:\((.*)\))?\s*", re.DOTALL)


def read_with(prefix: str, reader: Callable[[str], Univariate]) -> None:
    """Let `parse` hand every name that begins with `prefix` to `reader`.

    Composites are made of functions and named by formulas: `expressions.composite` enters itself here.
    """
    _READERS[prefix] = reader


def names() -> tuple[str, ...]:
    """The names of all registered functions, sorted; `parse` also reads those with arguments."""
    return tuple(sorted(_REGISTRY))


def get(fn: Function) -> Univariate:
    """The function meant by a name, a `Univariate`, or a callable (which then has no certificate).

    >>> get("gelu")
    Univariate(gelu)
    """
    if isinstance(fn, Univariate):
        return fn
    if isinstance(fn, str):
        return parse(fn)
    if callable(fn):
        return from_callable(fn)
    raise ArgumentError(f"expected the name of a function, a Univariate or a callable, got {type(fn).__name__}")


def parse(text: str) -> Univariate:
    """The function that a name stands for: parse(fn.name) == fn for every function but a user's callable.

    >>> parse("power(2.5)").name, parse("power(2)").name
    ('power(2.5)', 'square')
    """
    for prefix, reader in _READERS.items():
        if text.startswith(prefix):
            return reader(text)
    match = _CALL.fullmatch(text)
    word, arguments = (match[1], match[2]) if match else (text.strip(), None)
    word = _ALIASES.get(word, word)
    if arguments is None and word in _REGISTRY:
        return _REGISTRY[word]
    if word not in _MAKERS:
        if arguments is not None and re.search(r"[-+*/]|\w\(", text):
            raise ArgumentError(
                f"{text!r} is a formula, and a head computes one function by its name: compile it, "
                f"attnforge.compile({text!r}, {{'x': (lo, hi)}}, eps)"
            )
        hint = closest(word, (*names(), *_MAKERS, *_ALIASES))
        raise ArgumentError(f"unknown function {text!r}{hint}; known are {', '.join(names())} and power(p)")
    if arguments is None:
        raise ArgumentError(f"{word} needs its arguments, for example {_EXAMPLES[word]}")
    try:
        if word == "power" and _RATIO.fullmatch(arguments):
            return power(Fraction(arguments))
        return _MAKERS[word](*json.loads(f"[{arguments}]"))
    except (json.JSONDecodeError, TypeError, ZeroDivisionError) as error:
        raise ArgumentError(f"cannot read {text!r}; expected something like {_EXAMPLES[word]}") from error


def _reduced(fn: Univariate) -> tuple[Callable[..., Univariate], tuple[object, ...]]:
    """How copies and pickles keep a function: by its name, or by the user's callable, never by what it is made of."""
    if fn.source is not None:
        return from_callable, (fn.source, fn.second_derivative, fn.name)
    reader = next((reader for prefix, reader in _READERS.items() if fn.name.startswith(prefix)), parse)
    return reader, (fn.name,)


copyreg.pickle(Univariate, _reduced)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=256)
def _power(p: Fraction) -> Univariate:
    whole, near = p.denominator == 1, float(p)
    exponent = int(p) if whole else fmpq(p.numerator, p.denominator)
    even = whole and int(p) % 2 == 0
    return analytic(
        f"power({exponent if whole else near if Fraction(near) == p else p!s})",
        lambda y: torch.pow(y, int(p) if whole else near),
        lambda x: x**exponent,
        lambda x: x**exponent if whole else x ** arb(exponent),
        (Domain(poles=(0.0,)) if p < 0 else REALS) if whole else NON_NEGATIVE if p > 0 else POSITIVE,
        ("square", "atan") if whole and p > 0 else ("log", "square"),
        (arb(0),) if even and p > 0 else (),
        (0.0, math.inf) if even or not whole else (-math.inf, math.inf),
    )


def power(exponent: float | Fraction) -> Univariate:
    """y ** exponent for a constant real exponent.

    Whole exponents take any y (negative ones have a pole at 0), others y >= 0, where 0 itself needs exponent > 0. A
    fraction is taken as it is: power(Fraction(1, 3)) is the cube root, power(1 / 3) is not.

    >>> power(-2), power(0.5), power(Fraction(1, 3))
    (Univariate(power(-2)), Univariate(sqrt), Univariate(power(1/3)))
    """
    if not is_number(exponent):
        raise ArgumentError(f"the exponent must be a finite real number, got {exponent!r}")
    if abs(float(exponent)) > 1000:
        raise ArgumentError(f"the exponent must lie in [-1000, 1000], got {exponent!r}")
    special = _SPECIAL_POWERS.get(float(exponent)) if float(exponent) == exponent else None
    return _REGISTRY[special] if special else _power(Fraction(exponent))


_MAKERS: dict[str, Callable[..., Univariate]] = {
    "power": power,
    "piecewise_linear": piecewise_linear,
    "leaky_relu": leaky_relu,
    "elu": elu,
    "shifted_log": shifted_log,
    "softplus": softplus,
}
_EXAMPLES = {
    "power": "power(2.5)",
    "piecewise_linear": "piecewise_linear([-1, 0, 1], [0, 1, 0])",
    "leaky_relu": "leaky_relu(0.2)",
    "elu": "elu(1.5)",
    "shifted_log": "shifted_log(1e-12)",
    "softplus": "softplus(20.0)",
}


def check_domain(fn: Function, lo: float, hi: float) -> None:
    """Raise `DomainError` when the function is undefined, unbounded or beyond float64 somewhere on [lo, hi].

    >>> check_domain("tan", 1.0, 2.0)
    Traceback (most recent call last):
    attnforge.errors.DomainError: tan has a pole at y = 1.570796327, and the interval [1, 2] contains it; ...
    """
    function, (a, b) = get(fn), _interval(lo, hi)
    problem = function.domain.offence(function.name, a, b)
    if problem is not None:
        raise DomainError(problem)
    if not function.certifiable:
        evaluate(function, np.linspace(a, b, 257))
        return
    low, high = enclose(function, a, b)
    if math.isfinite(low) and math.isfinite(high):
        return
    where = f"the interval [{a:.10g}, {b:.10g}]"
    bad = [y for y in (b, a) if not _finite_at(function, y)]
    if not bad:
        raise DomainError(f"{function.name} cannot be shown to be bounded on {where}; it may have a pole there")
    point = _first_bad(function, a + b - bad[0], bad[0]) if len(bad) == 1 else bad[0]
    raise DomainError(
        f"{function.name} overflows float64 (beyond 1.8e308) on {where}, at y = {point:.10g}; choose a smaller interval"
    )


def _finite_at(fn: Univariate, y: float) -> bool:
    low, high = ranges(fn, np.array([y]), np.array([y]))
    return bool(np.isfinite(low[0]) and np.isfinite(high[0]))


def _first_bad(fn: Univariate, good: float, bad: float) -> float:
    """A point near which the function leaves float64, by bisection."""
    for _ in range(64):
        middle = 0.5 * (good + bad)
        good, bad = (middle, bad) if _finite_at(fn, middle) else (good, middle)
    return bad


@overload
def enclose(fn: Function, lo: float, hi: float) -> tuple[float, float]: ...
@overload
def enclose(fn: Function, lo: Array, hi: Array) -> tuple[Array, Array]: ...
def enclose(fn: Function, lo: float | Array, hi: float | Array) -> tuple[float, float] | tuple[Array, Array]:
    """Outward rounded (low, high) with low <= fn(y) <= high on [lo, hi]; for arrays, cell by cell.

    Tight to a few ulps for registered functions (by monotonicity), to about 1e-9 of the range by branch and bound for
    others; arrays of cells of such others get one Taylor form each. Infinite where the function is unbounded.

    >>> enclose("square", -1.0, 2.0)
    (0.0, 4.0)
    """
    function = get(fn)
    if isinstance(lo, np.ndarray) or isinstance(hi, np.ndarray):
        return ranges(function, *_cells(lo, hi))
    a, b = _interval(lo, hi)
    if function.turns is None and a < b:
        return refined_range(function, a, b)
    low, high = ranges(function, np.array([a]), np.array([b]))
    return float(low[0]), float(high[0])


def taylor(fn: Function, lo: Array, hi: Array, order: int) -> Taylor:
    """Rigorous Taylor tables on the cells [lo_i, hi_i]: see `Taylor` for what each column means.

    No knot of the function may lie strictly inside a cell. Results are cached and read-only.
    """
    function, (left, right) = get(fn), _cells(lo, hi)
    if not is_whole(order, 0, 64):
        raise ArgumentError(f"order must be a whole number from 0 to 64, got {order!r}")
    for knot in function.knots:
        inside = (left < knot) & (knot < right)
        if inside.any():
            i = int(np.flatnonzero(inside)[0])
            raise ArgumentError(
                f"cell {i}, [{left[i]!r}, {right[i]!r}], has the kink of {function.name} at {knot!r} inside; "
                f"end the cells at the knots {function.knots}"
            )
    return taylor_table(function, left.tobytes(), right.tobytes(), order)


def reference(fn: Function, y: float, digits: int = 60) -> arb:
    """The value at one float64 point as a ball of about `digits` correct digits, for tests and benchmarks."""
    function = get(fn)
    if not function.branches:
        raise ArgumentError(f"{function.name} is a callable; only registered functions have high-precision values")
    with precision(int(digits * 3.33) + 64):
        return function.ball(arb(y))


def _interval(lo: float, hi: float) -> tuple[float, float]:
    left, right = _cells(np.array([lo]), np.array([hi]))
    return float(left[0]), float(right[0])


def _cells(lo: object, hi: object) -> tuple[Array, Array]:
    try:
        left, right = np.asarray(lo, dtype=np.float64), np.asarray(hi, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"lo and hi must be numbers, got {lo!r} and {hi!r}") from error
    if left.ndim != 1 or left.shape != right.shape or not len(left):
        raise ArgumentError(f"lo and hi must be arrays of one length >= 1, got shapes {left.shape} and {right.shape}")
    if not (np.isfinite(left).all() and np.isfinite(right).all()):
        raise ArgumentError("lo and hi must be finite")
    if (left > right).any():
        i = int(np.flatnonzero(left > right)[0])
        raise ArgumentError(f"lo must not be larger than hi, got [{left[i]!r}, {right[i]!r}]")
    return np.ascontiguousarray(left), np.ascontiguousarray(right)
