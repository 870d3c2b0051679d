"""Composites: named by their formula, sound in ball arithmetic, also at kinks, ends and removable singularities."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from flint import arb, arb_series
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnforge.errors import ArgumentError, DomainError, FormulaError
from attnforge.expressions import composite as composites
from attnforge.expressions.composite import VARIABLE, composed, composite
from attnforge.expressions.expression import Expr, Graph
from attnforge.expressions.grammar import read
from attnforge.expressions.interval import WHOLE
from attnforge.frontends.formula.defined import is_bounded
from attnforge.functions import registry as functions
from attnforge.functions.univariate import REALS
from attnforge.heads.anchor.head import AnchorHead

m = mpmath


def relu(y: Any) -> Any:
    return max(y, mpmath.mpf(0))


# formula in y, an independent meaning, the interval
CASES: tuple[tuple[str, Callable[[Any], Any], tuple[float, float]], ...] = (
    ("1/(exp(y) - 1)", lambda y: 1 / m.expm1(y), (0.1, 5.0)),
    ("y*exp(-y**2)", lambda y: y * m.exp(-y * y), (-3.0, 3.0)),
    ("sin(5*y) + cos(3*y)", lambda y: m.sin(5 * y) + m.cos(3 * y), (-2.0, 2.0)),
    ("sqrt(1 - y**2)", lambda y: m.sqrt(1 - y * y), (-1.0, 1.0)),
    ("sqrt(2 - y**4)*y", lambda y: m.sqrt(2 - y**4) * y, (-1.189, 1.189)),
    ("1/sqrt(1 - y**2/9)", lambda y: 1 / m.sqrt(1 - y * y / 9), (-2.5, 2.0)),
    ("sqrt(y)*sin(y)", lambda y: m.sqrt(y) * m.sin(y), (0.0, 4.0)),
    ("y**1.5 - y", lambda y: y ** m.mpf(1.5) - y, (0.0, 2.0)),
    ("log(y)/(1 + y)", lambda y: m.log(y) / (1 + y), (0.01, 9.0)),
    ("abs(y - 1)*exp(y)", lambda y: abs(y - 1) * m.exp(y), (-1.0, 3.0)),
    ("relu(2*y - 1) + clip(y, -0.5, 0.25)*y",
     lambda y: relu(2 * y - 1) + min(max(y, m.mpf(-0.5)), m.mpf(0.25)) * y, (-1.0, 1.0)),
    ("y**5 - 3*y**3 + y", lambda y: y**5 - 3 * y**3 + y, (-1.5, 1.5)),
    ("tanh(y)/(1 + tanh(y)**2)", lambda y: m.tanh(y) / (1 + m.tanh(y) ** 2), (-4.0, 4.0)),
    ("exp(sin(y)) - sigmoid(y)", lambda y: m.exp(m.sin(y)) - 1 / (1 + m.exp(-y)), (-3.0, 3.0)),
)  # fmt: skip

# formula, meaning away from the place, the place, the value there, the interval
REMOVABLE: tuple[tuple[str, Callable[[Any], Any], float, float, tuple[float, float]], ...] = (
    ("sin(y)/y", lambda y: m.sin(y) / y, 0.0, 1.0, (-3.0, 3.0)),
    ("y/(exp(y) - 1)", lambda y: y / m.expm1(y), 0.0, 1.0, (-2.0, 5.0)),
    ("(1 - cos(y))/y**2", lambda y: 2 * (m.sin(y / 2) / y) ** 2, 0.0, 0.5, (-4.0, 4.0)),
    ("log(y)/(y - 1)", lambda y: m.log(y) / (y - 1), 1.0, 1.0, (0.5, 2.0)),
    ("(y**2 - 1)/(y - 1)", lambda y: y + 1, 1.0, 2.0, (0.0, 3.0)),
    ("sin(y)**2/(y**2*(1 + y))", lambda y: (m.sin(y) / y) ** 2 / (1 + y), 0.0, 1.0, (-0.5, 1.0)),
    ("tan(y)/sin(3*y)", lambda y: m.tan(y) / m.sin(3 * y), 0.0, 1 / 3, (-0.8, 0.8)),
)


def everything() -> list[tuple[str, Callable[[Any], Any], tuple[float, float]]]:
    guarded = [
        (text, (lambda y, f=f, at=at, v=v: m.mpf(v) if y == at else f(y)), span) for text, f, at, v, span in REMOVABLE
    ]
    return [*CASES, *guarded]


IDS = [text for text, *_ in everything()]


@pytest.mark.parametrize(("text", "meaning", "span"), everything(), ids=IDS)
def test_values_and_ranges(text: str, meaning: Callable[[Any], Any], span: tuple[float, float]) -> None:
    fn = composite(text)
    low, high = functions.enclose(fn, *span)
    grid = np.unique(np.concatenate([np.linspace(*span, 201), [k for k in fn.knots if span[0] < k < span[1]]]))
    with mpmath.workdps(60):
        exact = [meaning(mpmath.mpf(y)) for y in grid.tolist()]
    got = fn(torch.from_numpy(grid)).numpy()
    size = max(abs(v) for v in exact)
    assert max(abs(a - b) for a, b in zip(got.tolist(), exact, strict=True)) <= 4e-15 * size
    assert all(low <= v <= high for v in exact)
    assert high - low <= (max(exact) - min(exact)) * (1 + 1e-3)
    assert functions.check_domain(fn, *span) is None
    cell_low, cell_high = functions.enclose(fn, grid[:-1], grid[1:])
    assert all(a <= v <= b for a, v, b in zip(cell_low, exact[:-1], cell_high, strict=True))
    assert all(a <= v <= b for a, v, b in zip(cell_low, exact[1:], cell_high, strict=True))


@pytest.mark.parametrize(("text", "meaning", "span"), everything(), ids=IDS)
def test_taylor_tables(text: str, meaning: Callable[[Any], Any], span: tuple[float, float]) -> None:
    fn = composite(text)
    ends = np.unique(np.concatenate([np.linspace(*span, 25), [k for k in fn.knots if span[0] < k < span[1]]]))
    table = functions.taylor(fn, ends[:-1], ends[1:], 5)
    finite = 0
    for i, (a, b) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
        if not math.isfinite(table.remainder[i]):
            continue  # at the end of a root's domain
        finite += 1
        for y in np.linspace(a, b, 7).tolist():
            with mpmath.workdps(60):
                t = mpmath.mpf(y) - mpmath.mpf(table.centre[i])
                polynomial = sum(mpmath.mpf(c) * t**j for j, c in enumerate(table.coefficient[i].tolist()))
                slack = sum(mpmath.mpf(e) * abs(t) ** j for j, e in enumerate(table.error[i].tolist()))
                slack += mpmath.mpf(table.remainder[i]) * abs(t) ** 6
                assert abs(meaning(mpmath.mpf(y)) - polynomial) <= slack, (y, a, b)
    assert finite >= len(ends) - 5


@pytest.mark.parametrize("text", IDS)
def test_the_name_is_the_function(text: str) -> None:
    fn = composite(text)
    again = functions.parse(fn.name)
    assert fn.name.startswith("expr: ") and again.name == fn.name and again == fn
    assert composite(f"expr:  {fn.name.removeprefix('expr:')} ").name == fn.name


@pytest.mark.parametrize(("text", "meaning", "place", "value", "span"), REMOVABLE, ids=[c[0] for c in REMOVABLE])
def test_removable_singularities(
    text: str, meaning: Callable[[Any], Any], place: float, value: float, span: tuple[float, float]
) -> None:
    fn = composite(text)
    assert is_bounded(fn, *span) and not fn.domain.poles.count(place)
    assert abs(float(fn(torch.tensor(place, dtype=torch.float64))) - value) < 1e-14
    near = [y for k in range(1, 17) for s in (1, -1) if (y := place + s * 10.0**-k) != place]
    got = fn(torch.tensor(near, dtype=torch.float64)).tolist()
    with mpmath.workdps(60):
        assert all(abs(g - meaning(mpmath.mpf(y))) < 1e-13 for g, y in zip(got, near, strict=True))
    y = torch.tensor([place, place + 1e-3], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(fn(y).sum(), y)
    assert torch.isfinite(slope).all()


@pytest.mark.parametrize("distance", [8.5, 10.0, 20.0, 40.0, 63.0])
def test_remainders_beside_a_removable_singularity_are_those_of_the_function(distance: float) -> None:
    """Coefficients over a ball of radius r that is some radii away: the seventh is near 1/9!, not (r / distance)^-7."""
    radius = 1e-3
    ball = arb(distance * radius, radius)
    found = composite("sin(y)/y").series(arb_series([ball, 1], prec=8))
    assert float(abs(found[7]).upper()) < 1e-5
    with mpmath.workdps(40):
        truth = mpmath.taylor(mpmath.sinc, mpmath.mpf(distance * radius), 7)
    assert all(found[j].contains(arb(str(c))) for j, c in enumerate(truth))


def test_tables_beside_a_removable_singularity_have_bounds_of_their_size() -> None:
    function = composite("sin(y)/y")
    for anchors in range(13, 19):
        head = AnchorHead.fit(function, -2.0078125, 2.0078125, anchors=anchors, dtype=torch.float64)
        assert head.certificate.bound < 1e-12


def test_poles_are_told_from_removable_singularities() -> None:
    assert composite("1/(exp(y) - 1)").domain.poles == (0.0,)
    assert composite("sin(y)/y**2").domain.poles == (0.0,)
    assert composite("1/(y*(y - 1))").domain.poles == (0.0, 1.0)
    for text, span in (("1/(exp(y) - 1)", (-1.0, 1.0)), ("1/(y**2 - 2)", (1.0, 2.0)), ("tan(y)*y", (1.0, 2.0))):
        assert not is_bounded(composite(text), *span)
        with pytest.raises(DomainError, match=r"pole|bounded"):
            functions.check_domain(composite(text), *span)


def test_domains() -> None:
    assert composite("sqrt(1 - y**2)").domain.lo == -1 and composite("sqrt(1 - y**2)").domain.hi_closed
    assert not composite("1/sqrt(1 - y**2)").domain.hi_closed
    assert composite("log(y)*y").domain.lo == 0 and not composite("log(y)*y").domain.lo_closed
    assert composite("sqrt(3 - 2*y - y**2)*y").domain.hi == 1 and composite("sqrt(3 - 2*y - y**2)*y").domain.lo == -3
    assert composite("exp(y) + y").domain == REALS
    root = composite("sqrt(2 - y**2)*y").domain  # the ends are no float64: the next ones inside stand for them
    assert Fraction(root.hi) ** 2 < 2 < Fraction(math.nextafter(root.hi, 2)) ** 2
    assert root.lo == -root.hi and root.hi_closed
    with pytest.raises(ArgumentError, match="defined nowhere"):
        composite("sqrt(y - 2)*sqrt(1 - y)")


def test_knots_must_be_exact() -> None:
    assert composite("abs(y - 1)*y").knots == (1.0,)
    assert composite("relu(y)*abs(y + 2)").knots == (-2.0, 0.0)
    for text in ("abs(3*y - 1)*y", "abs(sin(y))"):
        with pytest.raises(ArgumentError, match="kinks"):
            composite(text)


def test_a_ball_over_a_pole_knows_nothing() -> None:
    fn = composite("1/(exp(y) - 1)")
    assert not fn.ball(arb(0, 1)).is_finite()
    assert functions.enclose(fn, -1.0, 1.0) == (-math.inf, math.inf)


def test_bad_names_are_refused() -> None:
    for text in ("expr: ", "expr: z + 1", "expr: __import__(y)", "expr: " + "(" * 500):
        with pytest.raises((FormulaError, ArgumentError)):
            functions.parse(text)


ATOMS = st.sampled_from(["y", "2*y", "(y - 1)", "0.5", "3", "(y + 1/3)", "y/7"])
WRAPS = ("sin({})", "exp({}/4)", "({})**2", "1/(2 + ({})**2)", "tanh({})", "sqrt(1 + ({})**2)", "({})**3",
         "log(2 + cos({}))", "-({})", "cos({})")  # fmt: skip
JOINS = ("({} + {})", "({})*({})", "({} - {})", "({})/(3 + sin({}))")


def grow(children: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    one = st.tuples(st.sampled_from(WRAPS), children).map(lambda p: p[0].format(p[1]))
    return one | st.tuples(st.sampled_from(JOINS), children, children).map(lambda p: p[0].format(p[1], p[2]))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.recursive(ATOMS, grow, max_leaves=7), st.floats(-2, 2), st.floats(0.001, 0.5))
def test_random_composites_are_sound(text: str, start: float, width: float) -> None:
    if "y" not in text.replace("cos(", ""):
        return
    fn = composite(text)
    assert functions.parse(fn.name).name == fn.name
    lo, hi = np.array([start]), np.array([start + width])
    low, high = functions.enclose(fn, float(lo[0]), float(hi[0]))
    table = functions.taylor(fn, lo, hi, 4)
    for y in np.linspace(start, start + width, 9).tolist():
        value = functions.reference(fn, y)
        assert not (value < low) and not (value > high)
        t = arb(y) - arb(float(table.centre[0]))
        polynomial = sum((arb(c) * t**j for j, c in enumerate(table.coefficient[0].tolist())), arb(0))
        slack = sum((arb(e) * abs(t) ** j for j, e in enumerate(table.error[0].tolist())), arb(0))
        if math.isfinite(table.remainder[0]):
            assert not (abs(value - polynomial) > slack + arb(float(table.remainder[0])) * abs(t) ** 5)


def read_afresh(name: str) -> functions.Univariate:
    """What a file's reader makes of a name: nothing is remembered."""
    composites._read.cache_clear()
    composites._built.cache_clear()
    return functions.parse(name)


def known_of(fn: functions.Univariate, place: float) -> list[object]:
    """Everything that a certificate could read off a function near a place, to the last bit."""
    assert fn.series is not None
    terms = [fn.series(arb_series([arb(place, radius), 1], prec=4)).coeffs() for radius in (0.0, 1e-3)]
    value = fn(torch.tensor([place], dtype=torch.float64)).item()
    bits = [c.man_exp() if c.is_finite() else None for row in terms for x in row for c in (x.mid(), x.rad())]
    return [fn.name, fn.domain, fn.knots, fn.potentials, fn.image, repr(value), bits, str(fn.ball(arb(place, 0.01)))]


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.recursive(ATOMS, grow, max_leaves=7), st.fractions(-3, 3, max_denominator=10**9), st.floats(-2, 2))
def test_the_name_says_all(text: str, factor: Fraction, place: float) -> None:
    node, _ = read(text, graph := Graph({VARIABLE: WHOLE}), (VARIABLE,))
    if not node.variables or not factor:
        return
    fn = composed(graph.sum([(node, factor)], factor / 7) + graph.call("exp", node * factor))
    again = read_afresh(fn.name)
    assert again is not fn and again == fn
    assert known_of(again, place) == known_of(fn, place)


def nested(levels: int, step: Callable[[Expr], Expr]) -> Expr:
    node: Expr = Graph({VARIABLE: WHOLE}).variable(VARIABLE)
    for _ in range(levels):
        node = step(node)
    return node


@pytest.mark.parametrize(
    "step",
    [
        lambda u: np.sin(u),
        lambda u: np.tanh(0.5 + 0.3 * u),
        lambda u: 1 / (2 + u),
        lambda u: 0.3 - u ** Fraction(1, 3),
        lambda u: 1 / ((2 + u) * np.cosh(u.graph.variable(VARIABLE))),
    ],
)
def test_what_has_a_name_can_be_read_back(step: Callable[[Expr], Expr]) -> None:
    made = 0
    for levels in range(2, 150, 7):
        try:
            fn = composed(nested(levels, step))
        except ArgumentError:
            continue
        made = levels
        assert read_afresh(fn.name).name == fn.name
    assert made >= 9


def test_equal_factors_are_merged() -> None:
    """A name that is read again is the same name, whichever way it was written."""
    for text in ("(-(y - 1))*(-(y - 1))", "(1 - y)**2", "abs(1 - y)*abs(1 - y)"):
        assert composite(text).name == "expr: (y - 1)**2" == functions.parse(composite(text).name).name
    for text in ("exp(y/4)*exp(y/4)", "exp(y/4)**2", "exp(y/3)*exp(y/6)"):
        assert composite(text).name == "expr: exp(0.5*y)" == functions.parse(composite(text).name).name
