"""The registry: values against 60 digits, names, domains, ranges."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from flint import arb
from hypothesis import given
from hypothesis import strategies as st

from attnforge.errors import ArgumentError, AttnforgeError, DomainError
from attnforge.functions import registry as F

# Where each function is tried; everything else is tried on [-30, 30].
SPAN = {
    "log": (1e-6, 1e6),
    "log2": (1e-6, 1e6),
    "log10": (1e-6, 1e6),
    "log1p": (-0.999, 1e4),
    "sqrt": (0.0, 1e6),
    "xlogx": (0.0, 1e6),
    "rsqrt": (1e-6, 1e6),
    "reciprocal": (1e-4, 1e4),
    "asin": (-1.0, 1.0),
    "acos": (-1.0, 1.0),
    "acosh": (1.0, 1e3),
    "atanh": (-0.999, 0.999),
    "tan": (-1.57, 1.57),
    "power(2.5)": (0.0, 100.0),
    "power(-0.3)": (1e-3, 100.0),
    "power(-3)": (-50.0, -1e-3),
    "shifted_log(1e-20)": (0.0, 1e6),
}
EXTRA = (
    "power(0)",
    "power(4)",
    "power(5)",
    "power(-3)",
    "power(2.5)",
    "power(-0.3)",
    "leaky_relu(0.2)",
    "elu(1.5)",
    "shifted_log(1e-20)",
    "piecewise_linear([-2.0, -0.5, 1.0, 4.0], [1.0, -1.0, 0.25, 0.5])",
)
ALL = (*F.names(), *EXTRA)


def span(name: str) -> tuple[float, float]:
    return SPAN.get(name, (-30.0, 30.0))


@st.composite
def function_and_point(draw: st.DrawFn) -> tuple[str, float]:
    name = draw(st.sampled_from(ALL))
    lo, hi = span(name)
    return name, draw(st.floats(lo, hi, allow_subnormal=False))


def condition(name: str, y: float) -> float:
    """Ulps lost to the rounding of a scaled argument: gelu and its kin have a tail far left of 0."""
    return {"gelu": 3 * y * y, "gelu_tanh": 2 * y * y + abs(0.3 * y**3)}.get(name, 4 * abs(y)) if y < 0 else 0.0


@given(function_and_point())
def test_value_agrees_with_sixty_digits(case: tuple[str, float]) -> None:
    name, y = case
    fn = F.get(name)
    exact = F.reference(fn, y)
    got = fn.value(torch.tensor([y], dtype=torch.float64)).item()
    scale = max(float(abs(exact)), 1e-290)
    # a piecewise linear function or a shifted exponential cancels: its error is in ulps of its terms
    terms = 8.0 if "linear" in name or name in ("hardsigmoid", "hardswish") else 0.0
    ulps = float(abs(exact - got)) / np.spacing(scale + terms)
    assert ulps <= 4 + condition(name, y)


@pytest.mark.parametrize("name", ALL)
def test_parse_gives_an_equal_function_back(name: str) -> None:
    fn = F.get(name)
    assert F.parse(fn.name) == fn
    assert hash(F.parse(fn.name)) == hash(fn)
    assert fn.certifiable


@pytest.mark.parametrize("name", ALL)
def test_value_keeps_dtype_and_shape_and_is_differentiable(name: str) -> None:
    lo, hi = span(name)
    y = torch.linspace(lo + 0.3 * (hi - lo) + 0.0123, lo + 0.61 * (hi - lo), 6, dtype=torch.float64).reshape(2, 3)
    fn = F.get(name)
    for dtype in (torch.float32, torch.float64):
        out = fn(y.to(dtype))
        assert out.dtype == dtype and out.shape == y.shape
    assert torch.autograd.gradcheck(fn.value, (y.clone().requires_grad_(),), rtol=1e-3)


def test_softplus_has_slope_one_half_at_zero() -> None:
    y = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    F.get("softplus")(y).backward()
    assert y.grad is not None and y.grad.item() == 0.5


@given(function_and_point(), st.floats(0, 1), st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_enclosure_holds_the_function(case: tuple[str, float], stretch: float, inner: list[float]) -> None:
    name, a = case
    b = a + stretch * (span(name)[1] - a)
    low, high = F.enclose(name, a, b)
    for s in (0.0, 1.0, *inner):
        value = F.reference(name, min(max(a + s * (b - a), a), b))
        assert arb(low) <= value.upper() and value.lower() <= arb(high)
    # As arrays the cells get the same enclosure, or a wider one where it comes from subdivision.
    lows, highs = F.enclose(name, np.array([a, a]), np.array([b, a]))
    assert lows[0] <= low and high <= highs[0]


@pytest.mark.parametrize(
    ("name", "lo", "hi", "low", "high"),
    [
        ("square", -1.0, 2.0, 0.0, 4.0),
        ("sqrt", 0.0, 4.0, 0.0, 2.0),
        ("sin", 0.0, 10.0, -1.0, 1.0),
        ("sin", 0.1, 3.0, math.sin(0.1), 1.0),
        ("cos", -1e15, 1e15, -1.0, 1.0),
        ("gelu", -8.0, 8.0, -0.16997120747990369, 8.0),
        ("abs", -3.0, 2.0, 0.0, 3.0),
        ("power(4)", -2.0, 1.0, 0.0, 16.0),
        ("hardswish", -4.0, 4.0, -0.375, 4.0),
        ("acos", -1.0, 1.0, 0.0, math.pi),
    ],
)
def test_enclosure_is_tight(name: str, lo: float, hi: float, low: float, high: float) -> None:
    got_low, got_high = F.enclose(name, lo, hi)
    assert got_low == pytest.approx(low, rel=1e-15, abs=1e-300)
    assert got_high == pytest.approx(high, rel=1e-15)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "quick_gelu", "silu", "mish"])
def test_the_turn_is_the_only_one(name: str) -> None:
    """The derivative is certainly negative left of the stored turn and positive right of it."""
    fn = F.get(name)
    assert isinstance(fn.turns, tuple)
    turn = float(fn.turns[0])
    near = np.geomspace(1e-13, 40, 1500)
    for sign, ends in ((-1, turn - near), (1, turn + near)):
        left, right = np.minimum(ends[:-1], ends[1:]), np.maximum(ends[:-1], ends[1:])
        table = F.taylor(fn, left, right, 2)
        # |g'(y) - c1 - 2 c2 t| <= 3 sup|g'''/6| t^2
        slack = table.error[:, 1] + 2 * (abs(table.coefficient[:, 2]) + table.error[:, 2]) * table.radius
        slack += 3 * table.remainder * table.radius**2
        assert (sign * table.coefficient[:, 1] > slack).mean() > 0.9
        assert not (-sign * table.coefficient[:, 1] > slack).any()


@pytest.mark.parametrize(
    ("name", "lo", "hi", "words"),
    [
        ("log", -1, 2, "log is undefined for y <= 0, and the interval [-1, 2] contains y = 0;"),
        ("log", -3, -2, "contains y = -2"),
        ("log", 0, 1, "contains y = 0"),
        ("sqrt", -1, 1, "undefined for y < 0"),
        ("reciprocal", -1, 1, "pole at y = 0"),
        ("reciprocal", 0, 1, "pole at y = 0"),
        ("power(-2)", -1, 0, "pole at y = 0"),
        ("power(-0.5)", 0, 1, "undefined for y <= 0"),
        ("power(2.5)", -1, 1, "undefined for y < 0"),
        ("tan", 1, 2, "pole at y = 1.5707963"),
        ("tan", 100, 104, "pole at y = 102.101761"),
        ("tan", -2, 0, "pole at y = -1.5707963"),
        ("asin", 0, 1.5, "undefined for y > 1"),
        ("acos", -2, 0, "contains y = -2"),
        ("exp", 0, 1000, "overflows float64"),
        ("exp", 0, 1000, "709.78271"),
        ("cosh", -1000, 1000, "overflows float64"),
        ("power(400)", 0, 10, "overflows float64"),
    ],
)
def test_a_bad_interval_names_the_point(name: str, lo: float, hi: float, words: str) -> None:
    with pytest.raises(DomainError) as caught:
        F.check_domain(name, lo, hi)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ALL)
def test_good_intervals_pass(name: str) -> None:
    assert F.check_domain(name, *span(name)) is None
    assert F.check_domain("tan", -1.5, 1.5) is None
    assert F.check_domain("exp", -1000, 700) is None


def test_powers_have_one_name_each() -> None:
    assert F.power(2) is F.get("square") and F.power(-0.5) is F.get("rsqrt") and F.power(1.0) is F.get("identity")
    assert F.power(4.0).name == "power(4)" and F.power(2.5) == F.parse("power(2.5)") != F.power(2.25)
    assert F.power(5)(torch.tensor([-2.0])).item() == -32 and F.power(-3)(torch.tensor([-2.0])).item() == -0.125


def test_potentials_fit() -> None:
    assert F.get("gelu").potentials[0] == "atan" and F.get("sin").potentials[0] == "square"
    for name in ("reciprocal", "rsqrt", "log", "sqrt", "power(-1.5)", "power(0.3)"):
        assert F.get(name).potentials[0] == "log"


def test_piecewise_linear_goes_on_outside() -> None:
    fn = F.piecewise_linear([-1, 0, 2], [0, 1, 0])
    y = torch.tensor([-3.0, -1.0, 0.0, 1.0, 4.0])
    assert fn(y).tolist() == [-2.0, 0.0, 1.0, 0.5, -1.0] and fn.knots == (0.0,)
    assert F.enclose(fn, -3.0, 4.0) == (-2.0, 1.0)


@pytest.mark.parametrize(
    "build",
    [
        lambda: F.get("gleu"),
        lambda: F.get(3),  # type: ignore[arg-type]
        lambda: F.parse("power"),
        lambda: F.parse("power(x)"),
        lambda: F.parse("power(1, 2, 3)"),
        lambda: F.parse("__import__('os')"),
        lambda: F.power(math.inf),
        lambda: F.power(True),
        lambda: F.piecewise_linear([0, 0, 1], [1, 2, 3]),
        lambda: F.piecewise_linear([0], [1]),
        lambda: F.piecewise_linear([0, 1], [1, math.nan]),
        lambda: F.leaky_relu(math.nan),
        lambda: F.enclose("sin", 2, 1),
        lambda: F.enclose("sin", 0, math.inf),
        lambda: F.enclose("sin", "a", 1),  # type: ignore[call-overload]
        lambda: F.check_domain("sin", math.nan, 1),
        lambda: F.from_callable(torch.sin, second_derivative=-1.0),
        lambda: F.from_callable(torch.sin, second_derivative=math.inf),
        lambda: F.from_callable(3),  # type: ignore[arg-type]
        lambda: F.Domain(1.0, 1.0),
        lambda: F.Univariate("f", torch.sin, None, arb.sin, potentials=("cube",)),
        lambda: F.Univariate("f", torch.sin, None, arb.sin, knots=(1.0, 0.0)),
    ],
)
def test_bad_arguments_raise_our_error(build: object) -> None:
    with pytest.raises(ArgumentError):
        build()  # type: ignore[operator]


def test_an_unknown_name_gets_a_hint() -> None:
    with pytest.raises(ArgumentError, match="did you mean 'gelu'"):
        F.get("gleu")
    with pytest.raises(AttnforgeError, match=r"power\(2.5\)"):
        F.parse("power(two)")


def test_images_hold_after_rounding() -> None:
    for name in ("sin", "cos", "tanh", "erf", "sigmoid"):
        low, high = F.enclose(name, -40.0, 40.0)
        assert low >= F.get(name).image[0] and high <= 1.0


@pytest.mark.parametrize("name", ["piece 0 of elu", "rise from 1.0 of exp"])
def test_names_of_parts_are_read_without_what_makes_heads(name: str) -> None:
    """Reading a program's functions does not hang on which modules were imported before."""
    code = (
        "import sys\nfrom attnforge.functions.registry import parse\n"
        f"assert parse({name!r}).name == {name!r} and 'attnforge.heads.choose' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
