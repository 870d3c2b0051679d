"""Expression graphs: shared nodes, exact constants, rewrites only where they are sound, traced callables."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from flint import arb
from hypothesis import given
from hypothesis import strategies as st

import attnforge as af
from attnforge.errors import ArgumentError, AttnforgeError, DomainError, UnsupportedOperation
from attnforge.expressions.constants import constant_call, constant_pi, constant_power, constant_text, rational
from attnforge.expressions.evaluate import Formula, tensors
from attnforge.expressions.expression import Expr, Graph, reachable
from attnforge.expressions.interval import added, product
from attnforge.functions.directed import precision
from attnforge.functions.registry import get


def graph() -> tuple[Graph, Expr, Expr, Expr]:
    g = Graph({"x": (0.0, 2.0), "y": (-1.0, 1.0), "z": (0.5, 3.0)})
    return g, g.variable("x"), g.variable("y"), g.variable("z")


def test_equal_expressions_are_one_node() -> None:
    _, x, y, z = graph()
    assert (x + y) * z is z * (y + x)
    assert np.sin(x * y) is torch.sin(y * x)
    assert x * x * x is x**3 and x / z * z is x
    assert (x - y) ** 2 is (y - x) ** 2 and np.cos(x - y) is np.cos(y - x)
    assert np.sin(y - x) is -np.sin(x - y)
    assert x + 0.5 is not x + 0.25


@pytest.mark.parametrize(
    ("build", "wanted"),
    [
        (lambda x, y, z: x - x, "0"),
        (lambda x, y, z: x * y - y * x, "0"),
        (lambda x, y, z: (4 * x**2 * y) / (2 * x), "2*x*y"),
        (lambda x, y, z: np.sqrt(x * z), "sqrt(x)*sqrt(z)"),
        (lambda x, y, z: np.sqrt(x * x), "x"),
        (lambda x, y, z: np.sqrt(y * y), "abs(y)"),
        (lambda x, y, z: np.sqrt(x * y), "sqrt(x)*sqrt(y)"),
        (lambda x, y, z: (y**2) ** 1.5, "abs(y)**3"),
        (lambda x, y, z: (y**4) ** 0.5, "y**2"),
        (lambda x, y, z: np.log(z * z * (x + 1)), "log(x + 1) + 2*log(z)"),
        (lambda x, y, z: np.log(y * z), "log(y*z)"),
        (lambda x, y, z: np.log(np.exp(y)) + np.exp(np.log(z)), "y + z"),
        (lambda x, y, z: np.exp(x) * np.exp(y) * np.exp(-x), "exp(y)"),
        (lambda x, y, z: np.exp(y) ** 3, "exp(3*y)"),
        (lambda x, y, z: np.exp(x + 1) - math.e * np.exp(x), None),
        (lambda x, y, z: np.maximum(z, -1), "z"),
        (lambda x, y, z: np.maximum(y, 0), "relu(y)"),
        (lambda x, y, z: np.minimum(x, 5), "x"),
        (lambda x, y, z: abs(x) + abs(-z), "x + z"),
        (lambda x, y, z: abs(-3 * y), "3*abs(y)"),
        (lambda x, y, z: abs(y) ** 2, "y**2"),
        (lambda x, y, z: np.clip(y, -0.5, 0.5), "0.5*hardtanh(2*y)"),
        (lambda x, y, z: y.clamp(min=0), "relu(y)"),
        (lambda x, y, z: y.sigmoid() - torch.sigmoid(y), "0"),
        (lambda x, y, z: np.float64(2) * x + np.int64(1), "2*x + 1"),
        (lambda x, y, z: np.arctan2(y, z) - np.arctan(y / z), "0"),
        (lambda x, y, z: np.square(x) + np.reciprocal(z), "1/z + x**2"),
        (lambda x, y, z: 2**y, "exp(log(2)*y)"),
    ],
)
def test_rewrites(build: object, wanted: str | None) -> None:
    _, x, y, z = graph()
    node = build(x, y, z)  # type: ignore[operator]
    if wanted is not None:
        assert node.text == wanted
    else:
        assert abs(node.range[0]) < 1e-15


def test_rewrites_that_need_a_sign_wait_for_it() -> None:
    _, _, y, z = graph()
    unknown = np.sqrt((y - 0.5) * (y + 0.5))
    assert unknown.text == "sqrt((y + 0.5)*(y - 0.5))"
    assert np.log(y * y * z).text == "log(y**2*z)"


def test_ranges_hold() -> None:
    g, x, y, z = graph()
    node = np.sin(x * y) / (z + x**2) - abs(y) * np.sqrt(x)
    points = {name: torch.rand(2000, dtype=torch.float64) * (b - a) + a for name, (a, b) in g.intervals.items()}
    found = tensors(Formula.of(node), points)
    for part in reachable([node]):
        low, high = part.range
        assert low - 1e-15 <= float(found[part].min()) and float(found[part].max()) <= high + 1e-15
    assert all(child.index < part.index for part in reachable([node]) for child in part.children)


@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9), st.floats(-1e9, 1e9), st.floats(-1e9, 1e9))
def test_intervals_round_outward(a: float, b: float, c: float, d: float) -> None:
    one, other = (min(a, b), max(a, b)), (min(c, d), max(c, d))
    low, high = added(one, other)
    assert Fraction(low) <= Fraction(one[0]) + Fraction(other[0]) and Fraction(one[1]) + Fraction(other[1]) <= Fraction(
        high
    )
    low, high = product(one, other)
    ends = [Fraction(p) * Fraction(q) for p in one for q in other]
    assert Fraction(low) <= min(ends) and max(ends) <= Fraction(high)


def test_constants_are_exact() -> None:
    assert rational(0.1) == Fraction(0.1) != Fraction(1, 10)
    tenth = np.longdouble(1) / 10  # of more digits than float64, where the machine has such
    assert rational(tenth) == Fraction(*map(int, tenth.as_integer_ratio()))
    assert constant_call(get("cos"), constant_pi()) == -1
    assert constant_power(Fraction(4, 9), Fraction(1, 2)) == Fraction(2, 3)
    assert constant_power(Fraction(-2), Fraction(3)) == -8
    assert abs(constant_power(Fraction(2), Fraction(1, 2)) ** 2 - 2) < Fraction(1, 2**180)
    assert constant_power(Fraction(3), Fraction(-500)) > 0
    for bad in (math.nan, math.inf, "1", True, 1j, None):
        with pytest.raises(ArgumentError):
            rational(bad)
    with pytest.raises(DomainError):
        constant_power(Fraction(-2), Fraction(1, 2))


SMALL: tuple[tuple[str, int, Callable[[], arb]], ...] = (
    ("exp(-120)", 52, lambda: arb(-120).exp()),
    ("exp(-700)", 304, lambda: arb(-700).exp()),
    ("erfc(12)", 64, lambda: arb(12).erfc()),
    ("(1 - tanh(90))", 78, lambda: 1 - arb(90).tanh()),
    ("(tanh(90) - tanh(89))", 77, lambda: arb(90).tanh() - arb(89).tanh()),
    ("(6.6e-34)**1.5", 50, lambda: arb("6.6e-34") ** arb("1.5")),
    ("softplus(-300)", 130, lambda: arb(-300).exp().log1p()),
    ("(sigmoid(200) - 1)", 87, lambda: -1 / (1 + arb(200).exp())),
    ("(cos(1e-40) - 1)", 80, lambda: -2 * (arb("1e-40") / 2).sin() ** 2),
)


@pytest.mark.parametrize(("constant", "decades", "truth"), SMALL, ids=[c for c, _, _ in SMALL])
def test_small_constants_keep_their_value(constant: str, decades: int, truth: Callable[[], arb]) -> None:
    """Relatively, whatever multiplies them: nothing is 0 because it is small."""
    net = af.compile(f"1e{decades}*{constant}*x", af.Box(x=(-1, 1)), 1e-3, dtype=torch.float64)
    x = torch.tensor([[-1.0], [-0.3], [0.7], [1.0]], dtype=torch.float64)
    with precision(2000):
        for at, value in zip(x.flatten().tolist(), net(x).tolist(), strict=True):
            wanted = arb(10) ** decades * truth() * arb(at)
            assert abs(wanted) > 1e-2 and abs(arb(value) - wanted) <= arb(2) ** -50 * abs(wanted)


def test_constants_that_cancel() -> None:
    """Zero where it is zero; charged where it cannot be told from a small number, and refused where it must be told."""
    box = af.Box(x=(-1, 1))
    for zero in ("sin(pi)", "cos(pi/2)", "tan(1000*pi)", "(sqrt(2)**2 - 2)", "(log(e) - 1)", "(abs(1/3) - 1/3)"):
        net = af.compile(f"x + 1e200*{zero}", box, 1e-9, dtype=torch.float64)
        assert net(torch.zeros(1, 1, dtype=torch.float64)).tolist() == [0.0]
    for unknown in ("1 - tanh(2000)", "tanh(2000)**2 - 1", "tanh(2000) - tanh(3000)", "sin(pi*tanh(2000))"):
        net = af.compile(f"x + 1e200*1e308*({unknown})", box, 1e-9)
        assert net(torch.zeros(1, 1)).tolist() == [0.0] and 0 < (net.bound or 0) < 1e-300
        refused = r"ask for that|cannot be told from|no bound can be certified|below the range"
        with pytest.raises(AttnforgeError, match=refused):
            af.compile(f"x + 1e308*(1e308*(1e308*(1e308*(1e308*({unknown})))))", box, 1e-9)
        with pytest.raises(AttnforgeError, match="cannot be told from 0"):
            af.compile(f"x/({unknown})", box, 1e-9)
    af.compile("x*tanh(2000) + 4*atan(1)", box, 1e-3)
    assert af.compile("x + 1e308*(1e308*(4*atan(1) - pi))", box, 1e-9).bound == af.compile("x", box, 1e-9).bound


@given(st.fractions() | st.floats(allow_nan=False, allow_infinity=False).map(Fraction))
def test_constants_are_spelled_so_that_they_read_back(value: Fraction) -> None:
    text = constant_text(value)
    top, _, bottom = text.partition("/")
    assert "?" in text or Fraction(top) / Fraction(bottom or 1) == value
    if "?" in text:
        assert max(value.numerator, value.denominator) > 10**400


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda x: math.sin(x), "numpy's functions"),
        (lambda x: x if x > 0 else -x, "comparison"),
        (lambda x: max(x, 1), "comparison"),
        (lambda x: 1 if x else 0, "an if"),
        (lambda x: x == 0, "comparison with =="),
        (lambda x: int(x), "int"),
        (lambda x: np.floor(x), "jumps on the box"),
        (lambda x: np.add(x, 1, where=True), "options"),
        (lambda x: torch.fmod(x, 2), "fmod has no form"),
    ],
)
def test_what_needs_a_number_is_refused(build: object, message: str) -> None:
    _, x, _, _ = graph()
    with pytest.raises(UnsupportedOperation, match=message):
        build(x)  # type: ignore[operator]


def test_graphs_do_not_mix() -> None:
    with pytest.raises(ArgumentError, match="different formulas"):
        graph()[1] + graph()[1]
    with pytest.raises(AttributeError):
        graph()[1].shape  # noqa: B018
    with pytest.raises(ArgumentError):
        graph()[1] + "1"


def test_limits() -> None:
    _, x, y, _ = graph()

    def deep(node: Expr) -> None:
        for _ in range(1000):
            node = np.sin(node + y)

    def many(node: Expr) -> None:
        for i in range(100_000):
            node + i

    with pytest.raises(ArgumentError, match="nested more than"):
        deep(x)
    with pytest.raises(ArgumentError, match="different subexpressions"):
        many(x)


def test_sharing_keeps_texts_short() -> None:
    g = Graph({"x": (0.0, 0.5)})
    node = g.variable("x")
    for _ in range(60):  # a text of 2^60 characters
        node = node * (1 - node)
    assert len(reachable([node])) < 400 and len(node.short()) < 100
    assert isinstance(node.order[1], str) and node.text is None
