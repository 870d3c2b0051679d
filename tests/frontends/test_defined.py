"""Formulas that are undefined or unbounded on their box are refused with a point; all others pass."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import sympy
import torch
from flint import arb
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import attnforge as af
from attnforge.box import Box
from attnforge.errors import DomainError
from attnforge.frontends.formula.program import capture_formula
from attnforge.functions.directed import precision
from attnforge.programs.interpret import values

Intervals = dict[str, tuple[float, float]]

# formula, intervals, what the message must name
REFUSED: tuple[tuple[str, Intervals, str], ...] = (
    ("1/x + 1/tanh(x)", {"x": (-2, 2)}, "1/x is unbounded: x is 0 at x = 0"),
    ("1/x - 1/x**2", {"x": (-2, 2)}, "is unbounded: x is 0 at x = 0"),
    ("(v + 41)/(1 - exp(-(v + 40)/10))", {"v": (-100, 50)}, "is 0 at v = -40"),
    ("1/x", {"x": (-1, 1)}, "1/x is unbounded: x is 0 at x = 0"),
    ("1/x", {"x": (0, 1)}, "x is 0 at x = 0"),
    ("y/x**2", {"x": (0, 1), "y": (1, 2)}, "1/x**2 is unbounded"),
    ("1/(x - y)", {"x": (1, 2), "y": (1.5, 3)}, "x - y is 0 at"),
    ("log(x)", {"x": (-1, 1)}, "log(x) is undefined at x = -1"),
    ("log(x)", {"x": (0, 1)}, "must be > 0"),
    ("log(x*y - 1)", {"x": (0, 2), "y": (0, 1)}, "log(x*y - 1) is undefined"),
    ("sqrt(x - y)", {"x": (0, 1), "y": (0, 1)}, "sqrt(x - y) is undefined at x = 0, y = 1"),
    ("sqrt(x**2 + y**2 - 0.0001)", {"x": (-1, 1), "y": (-1, 1)}, "is -0.0001"),
    ("sqrt((x - 0.317)**2 + (y - 0.119)**2 - 1e-6)", {"x": (-1, 1), "y": (-1, 1)}, "is undefined"),
    ("1/sqrt(1 - v**2)", {"v": (0, 1)}, "1/sqrt(1 - v**2) is undefined at v = 1"),
    ("m/sqrt(1 - v**2/c**2)", {"m": (1, 2), "v": (0, 1), "c": (1, 2)}, "at m = 1, v = 1, c = 1"),
    ("x**-0.5", {"x": (0, 1)}, "must be > 0"),
    ("x**1.5", {"x": (-1, 1)}, "x**1.5 is undefined at x = -1"),
    ("x**y", {"x": (-1, 1), "y": (1, 2)}, "x**y, which is exp(y * log(x)) here, is undefined"),
    ("tan(x)", {"x": (1, 2)}, "x is 1.570796327"),
    ("tan(x*y)", {"x": (1, 2), "y": (0, 1)}, "tan(x*y) is unbounded"),
    ("asin(x*y)", {"x": (0, 2), "y": (0, 1)}, "x*y is 2, but it must be <= 1"),
    ("acosh(x)", {"x": (0, 2)}, "must be >= 1"),
    ("atanh(x)", {"x": (0, 1)}, "must be < 1"),
    ("1/(exp(x) - 1)", {"x": (-1, 1)}, "exp(x) - 1 is 0 at x = 0"),
    ("1/(x**2 + y**2)", {"x": (-1, 1), "y": (-1, 1)}, "is 0 at x = 0, y = 0"),
    ("1/(x**2 - 2*x + 1)", {"x": (0, 2)}, "at x = 1"),
    ("1/(sin(x) - y)", {"x": (0, 1), "y": (0, 1)}, "is 0 at"),
    ("sin(x)/x**2", {"x": (-1, 1)}, "is unbounded"),
    ("sqrt(x)*sqrt(x)", {"x": (-1, 1)}, "sqrt(x) is undefined"),
    ("log(x) - log(x) + y", {"x": (-1, 1), "y": (0, 1)}, "log(x) is undefined"),
    ("0*sqrt(x) + x", {"x": (-1, 1)}, "sqrt(x) is undefined"),
    # cancelled or not, there is no value
    ("x/x", {"x": (-1, 1)}, "1/x is unbounded: x is 0 at x = 0"),
    ("0/x", {"x": (-1, 1)}, "x is 0 at x = 0"),
    ("1/x - 1/x", {"x": (-1, 1)}, "x is 0 at x = 0"),
    ("1/x - 1/x", {"x": (0, 1)}, "x is 0 at x = 0"),
    ("abs(x)/abs(x)", {"x": (-1, 1)}, "abs(x) is 0 at x = 0"),
    ("(x - 0.3)/(x - 0.3) + y", {"x": (0, 1), "y": (0, 1)}, "x - 0.3 is 0 at x = 0.3"),
    ("x**3/x**2", {"x": (-1, 1)}, "1/x**2 is unbounded"),
    ("1/(1/x)", {"x": (-1, 1)}, "1/x is unbounded"),
    ("0*log(x)", {"x": (0, 1)}, "log(x) is undefined at x = 0"),
    ("0*log(x) + sin(x)/x", {"x": (0, 1)}, "log(x) is undefined at x = 0"),
    ("exp(log(x))", {"x": (0, 1)}, "log(x) is undefined at x = 0"),
    ("x + log(x)", {"x": (0, 2)}, "choose a box on which it is, such as x from 0.002 to 2"),
    ("x*log(x) + log(x)", {"x": (0, 2)}, "log(x) is undefined at x = 0"),
    ("x*log(x)", {"x": (-1, 2)}, "log(x) is undefined at x = -1"),
    ("log(x) - log(x) + x*log(x)", {"x": (0, 2)}, "log(x) is undefined at x = 0"),
    ("exp(log(x))*log(x)", {"x": (0, 2)}, "log(x) is undefined at x = 0"),
    ("x*log(x**2)", {"x": (-1, 1)}, "log(x**2) is undefined at x = 0"),
    ("log(x)/x", {"x": (0, 2)}, "is unbounded: x is 0"),
    ("x**sqrt(2)", {"x": (-1, 1)}, "x**sqrt(2) is undefined at x = -1"),
    ("x**y", {"x": (0, 1), "y": (0, 1)}, "choose a box on which it is, such as x from 0.001 to 1"),
    ("x**y", {"x": (0, 1), "y": (-1, 1)}, "begins at 0 only where y stays above 0, is undefined at x = 0"),
    ("x**(y - 1)", {"x": (-1, 1), "y": (1, 2)}, "which is exp((y - 1) * log(x)) here, is undefined"),
    ("x/sqrt(x)", {"x": (0, 1)}, "1/sqrt(x) is undefined at x = 0"),
    ("x/sqrt(x**2 + y**2)", {"x": (-1, 1), "y": (-1, 1)}, "is undefined at x = 0, y = 0"),
    ("x**-0.5*x**0.5", {"x": (0, 1)}, "1/sqrt(x) is undefined at x = 0"),
    ("tan(x) - tan(x)", {"x": (1, 2)}, "x is 1.570796327"),
    ("cot(x)", {"x": (-1, 1)}, "sin(x) is 0"),
    ("coth(x)", {"x": (-1, 1)}, "tanh(x) is 0 at x = 0"),
    ("csch(x)", {"x": (0, 1)}, "sinh(x) is 0 at x = 0"),
    ("atan2(y, x)", {"x": (-1, 1), "y": (-1, 1)}, "jumps at the negative x axis"),
    ("exp(x)*y", {"x": (0, 1000), "y": (0, 1)}, "exp(x) overflows float64"),
    ("exp(exp(exp(x)))", {"x": (0, 8)}, "exp(exp(x)) overflows float64"),
)
ACCEPTED: tuple[tuple[str, Intervals], ...] = (
    ("sqrt(x)", {"x": (0, 1)}),
    ("sqrt(1 - v**2)", {"v": (-1, 1)}),
    ("sqrt(x - y)", {"x": (1, 2), "y": (0, 1)}),
    ("sqrt(x - 0.1)", {"x": (0.1, 1)}),  # float32(0.1) lies outside of the box
    ("sqrt(b**2 - 4*a*c)", {"a": (1, 2), "b": (3, 4), "c": (1, 1.1)}),
    ("1/(x**2 - 2*x + 1.01)", {"x": (0, 2)}),
    ("1/(1.5 + sin(x)*cos(x))", {"x": (-9, 9)}),
    ("x**1.5 + abs(x)**0.1", {"x": (0, 1)}),
    ("sin(x)/x", {"x": (-1, 1)}),
    ("sin(sqrt(x**2 + y**2))/sqrt(x**2 + y**2)", {"x": (-1, 1), "y": (-1, 1)}),
    ("x**y + x**sqrt(2)", {"x": (0, 1), "y": (0.5, 1)}),
    ("y*sin(x)/x", {"x": (-1, 1), "y": (0, 1)}),
    ("sin(x*y)/(x*y)", {"x": (-1, 1), "y": (-1, 1)}),
    ("x/(exp(x) - 1)", {"x": (-1, 1)}),
    ("(exp(x - y) - 1)/(x - y)", {"x": (0, 1), "y": (0, 1)}),
    ("0.1*(v + 40)/(1 - exp(-(v + 40)/10))", {"v": (-100, 50)}),  # exp(4) exp(-4) is exactly 1
    ("0.01*(10 - v)/(exp((10 - v)/10) - 1)", {"v": (-50, 100)}),
    ("1/tanh(x) - 1/x", {"x": (-10, 10)}),  # poles that cancel
    ("2 + y*x**2 + 3*(1/x - 1/sin(x))**2", {"x": (-2, 2), "y": (0, 1)}),
    ("1/sin(x)**2 - 1/x**2", {"x": (-2, 2)}),
    ("x/x + 0/x + 0*log(x) + abs(x)/abs(x) + 1/x - 1/x", {"x": (1e-3, 1)}),
    ("x + 0/(x**2 - x + 0.26)", {"x": (-1, 1)}),  # intervals alone do not keep it away from 0
    ("0*tan(x) + x", {"x": (-1.5, 1.5)}),
    ("asin(x)*acos(x)", {"x": (-1, 1)}),
    ("-p*log2(p) - (1 - p)*log2(1 - p) + p*log(p/q) + x**x", {"p": (0, 1), "q": (0.1, 1), "x": (0, 1)}),
    ("acosh(x)", {"x": (1, 2)}),
    ("atan2(y, x)", {"x": (0.5, 1), "y": (-1, 1)}),
    ("atan2(y, x)", {"x": (-1, 1), "y": (0.5, 1)}),
    ("atan2(y, x)", {"x": (-1, 1), "y": (-2, -0.5)}),
)


@pytest.mark.parametrize(("formula", "intervals", "words"), REFUSED, ids=[f"{f} {i}" for f, i, _ in REFUSED])
def test_refused_with_a_witness(formula: str, intervals: Intervals, words: str) -> None:
    with pytest.raises(DomainError, match=re.escape(words)):
        capture_formula(formula, Box(intervals))


CANCELLED: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: 0 * torch.log(x),
    lambda x: 1 / x - 1 / x,
    lambda x: x / x,
    lambda x: 0 / x,
    lambda x: torch.abs(x) / torch.abs(x),
)


@pytest.mark.parametrize("function", CANCELLED)
@pytest.mark.parametrize("low", [-1.0, 0.0])
def test_traced_functions_that_cancel_are_refused_too(function: Callable[[Tensor], Tensor], low: float) -> None:
    with pytest.raises(DomainError, match=r"at x = (-1|0)\b"):
        capture_formula(function, Box(x=(low, 1)))


@pytest.mark.parametrize(("formula", "intervals"), ACCEPTED, ids=[f"{f} {i}" for f, i in ACCEPTED])
def test_accepted(formula: str, intervals: Intervals) -> None:
    assert capture_formula(formula, Box(intervals)).box == Box(intervals)


@settings(max_examples=60, deadline=None)
@given(st.floats(-2, 2), st.floats(0.01, 2), st.floats(-3, 3))
def test_a_linear_denominator_is_refused_exactly_when_it_vanishes(low: float, width: float, place: float) -> None:
    box = Box(x=(low, low + width), y=(0, 1))
    formula = f"(1 + y)/(x - ({place!r}))"
    if low <= place <= low + width:
        with pytest.raises(DomainError, match="unbounded"):
            capture_formula(formula, box)
    elif min(abs(low - place), abs(low + width - place)) > 1e-6:
        assert math.isfinite(capture_formula(formula, box).depth())


def test_a_logarithm_that_python_uses_twice_is_guarded() -> None:
    """l - l + x*l has no value at 0, where x*l alone is taken for 0."""

    def target(x):
        found = np.log(x)
        return found - found + x * found

    with pytest.raises(af.DomainError, match="undefined at x = 0"):
        af.compile(target, {"x": (0, 2)}, eps=1e-2)


def _later(x):
    found = x * np.log(x)
    return found + np.log(x) - np.log(x)


def _negated(x):
    found = -np.log(x)
    return found - found + x * found


def _sum_used_twice(x):
    found = np.log(x) + 1
    return found - found + x * found


def _inside_a_function(x):
    found = np.log(x)
    return np.sin(found) - np.sin(found) + x * found


@pytest.mark.parametrize("target", [_later, _negated, _sum_used_twice, _inside_a_function])
def test_a_logarithm_used_once_more_in_any_way_is_guarded(target) -> None:
    with pytest.raises(DomainError, match="undefined at x = 0"):
        capture_formula(target, Box(x=(0, 2)))


def test_products_with_logarithms_from_zero_are_taken_from_python_and_sympy_too() -> None:
    x = sympy.Symbol("x")
    targets = (
        lambda x: -x * np.log(x) - (1 - x) * np.log(1 - x),
        lambda x: x * torch.log(x) + x**2 * torch.log(x),
        lambda x: (x * math.log(x)) ** 2,
        -x * sympy.log(x) - (1 - x) * sympy.log(1 - x),
        x * sympy.log(x) + x**2 * sympy.log(x),
    )
    for target in targets:
        program = capture_formula(target, Box(x=(0, 1)))
        at = torch.tensor([0.25], dtype=torch.float64)
        wanted = float(target.subs(x, 0.25)) if isinstance(target, sympy.Expr) else float(_at(target, 0.25))
        assert float(values(program, at[None])) == pytest.approx(wanted, rel=1e-12)


def _at(target, x: float) -> float:
    try:
        return target(x)
    except TypeError:
        return target(torch.tensor(x, dtype=torch.float64))


HOSTILE_POWERS = (
    ("x**y", {"x": (0, 2), "y": (0.5, 2)}, lambda x, y: x**y),
    ("x**y", {"x": (1e-25, 1e6), "y": (1.5, 2.5)}, lambda x, y: x**y),
    ("x**sqrt(2)", {"x": (0, 3)}, lambda x: x ** arb(2).sqrt()),
    ("y*x**sqrt(2)", {"x": (0, 3), "y": (0.5, 2)}, lambda x, y: y * x ** arb(2).sqrt()),
    ("y*x**1.2345", {"x": (0, 3), "y": (0.5, 2)}, lambda x, y: y * x ** (arb(12345) / 10000)),
    ("x**n/(1 + x**n)", {"x": (0, 5), "n": (1, 4)}, lambda x, n: x**n / (1 + x**n)),
    ("sin(3*x**y) + x**y/2", {"x": (0, 2), "y": (0.7, 1.5)}, lambda x, y: (3 * x**y).sin() + x**y / 2),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("formula", "intervals", "truth"), HOSTILE_POWERS, ids=[f for f, *_ in HOSTILE_POWERS])
def test_powers_from_zero_keep_their_bounds_at_every_scale(formula, intervals, truth, dtype) -> None:
    box = Box(intervals)
    size = 1 + box.upper[0].item() ** (box.upper[1].item() if box.dim > 1 else 1.5)
    net = af.compile(formula, box, eps=(1e-3 if dtype is torch.float32 else 1e-6) * size, dtype=dtype)
    near = box.lower[0] + (box.upper[0] - box.lower[0]) * 10.0 ** torch.linspace(-40, 0, 81, dtype=torch.float64)
    rest = [torch.linspace(*side, 5, dtype=torch.float64) for side in list(intervals.values())[1:]]
    points = torch.cartesian_prod(torch.cat([box.lower[:1], near]), *rest).reshape(-1, box.dim).to(dtype)
    points = torch.minimum(torch.maximum(points, box.lower.to(dtype)), box.upper.to(dtype))
    with precision(300):
        for point, out in zip(points.double().tolist(), net.predict(points.numpy()).tolist(), strict=True):
            x, rest = (arb(point[0]) if point[0] else arb("1e-2000")), map(arb, point[1:])
            assert abs(arb(out) - truth(x, *rest)) <= net.bound


@pytest.mark.parametrize("power", [3, 4, 5])
def test_logarithms_of_squares_keep_the_sign_of_what_they_are_multiplied_with(power: int) -> None:
    """x**3*log(x**2) is odd: as |x|**3*log(x**2) it was certified once."""
    net = af.compile(f"x**{power}*log(x**2)", {"x": (-1, 1)}, eps=1e-2, dtype="float64")
    x = np.linspace(-1, 1, 201)[np.linspace(-1, 1, 201) != 0]
    assert np.abs(net.predict(x[:, None]) - x**power * np.log(x**2)).max() <= net.bound + 1e-15
