"""Lowering: programs equal their formulas, in few operations, with what depends on one scalar fused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest
import sympy
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from attnforge.box import Box
from attnforge.errors import ArgumentError
from attnforge.frontends.formula.normal import WRITINGS, Writing, applies
from attnforge.frontends.formula.program import capture_formula
from attnforge.programs.interpret import values
from attnforge.programs.ops import Apply, Linear, Product
from attnforge.programs.program import Program

UNIT, POSITIVE, SMALL = (-1.0, 1.0), (1.0, 5.0), (0.2, 0.9)

# formula, intervals, the largest number of applications and products
FORMULAS: tuple[tuple[str, dict[str, tuple[float, float]], int], ...] = (
    ("exp(-theta**2/2)/sqrt(2*pi)", {"theta": (1, 3)}, 1),
    ("exp(-(theta/sigma)**2/2)/(sqrt(2*pi)*sigma)", {"sigma": (1, 3), "theta": (1, 3)}, 4),
    ("exp(-((theta-theta1)/sigma)**2/2)/sigma", {"sigma": (1, 3), "theta": (1, 3), "theta1": (1, 3)}, 4),
    ("sqrt((x2-x1)**2+(y2-y1)**2)", {v: POSITIVE for v in ("x1", "x2", "y1", "y2")}, 3),
    ("G*m1*m2/((x2-x1)**2+(y2-y1)**2)",
     {"G": (1, 2), "m1": (1, 2), "m2": (1, 2), "x1": (1, 2), "x2": (3, 4), "y1": (1, 2), "y2": (3, 4)}, 6),
    ("m0/sqrt(1-v**2/c**2)", {"m0": POSITIVE, "v": (1, 2), "c": (3, 10)}, 4),
    ("x1*y1+x2*y2+x3*y3", {v: POSITIVE for v in ("x1", "x2", "x3", "y1", "y2", "y3")}, 3),
    ("q1*q2/(4*pi*eps0*r**2)", {v: POSITIVE for v in ("q1", "q2", "eps0", "r")}, 6),
    ("m*(v**2+u**2+w**2)/2", {v: POSITIVE for v in "mvuw"}, 4),
    ("k*x**2/2", {"k": POSITIVE, "x": POSITIVE}, 2),
    ("(x-u*t)/sqrt(1-u**2/c**2)", {"x": (5, 10), "u": (1, 2), "c": (3, 20), "t": (1, 2)}, 5),
    ("(u+v)/(1+u*v/c**2)", {v: POSITIVE for v in "uvc"}, 5),
    ("(m1*r1+m2*r2)/(m1+m2)", {v: POSITIVE for v in ("m1", "m2", "r1", "r2")}, 4),
    ("r*F*sin(theta)", {"r": POSITIVE, "F": POSITIVE, "theta": (0, 5)}, 3),
    ("asin(n*sin(theta2))", {"n": (0, 1), "theta2": POSITIVE}, 3),
    ("1/(1/d1+n/d2)", {v: POSITIVE for v in ("d1", "d2", "n")}, 4),
    ("sqrt(x1**2+x2**2-2*x1*x2*cos(t1-t2))", {v: POSITIVE for v in ("x1", "x2", "t1", "t2")}, 6),
    ("I0*sin(n*theta/2)**2/sin(theta/2)**2", {"I0": POSITIVE, "n": POSITIVE, "theta": (1, 5)}, 5),
    ("n*k*T/V", {v: POSITIVE for v in ("n", "k", "T", "V")}, 4),
    ("n0*exp(-m*g*x/(k*T))", {v: POSITIVE for v in ("n0", "m", "g", "x", "k", "T")}, 7),
    ("h*f**3/(pi**2*c**2*(exp(h*f/(k*T))-1))", {v: POSITIVE for v in ("h", "f", "c", "k", "T")}, 10),
    ("h*f/(exp(h*f/(k*T))-1)", {v: POSITIVE for v in ("h", "f", "k", "T")}, 6),
    ("k*T*log(V2/V1)", {v: POSITIVE for v in ("k", "T", "V1", "V2")}, 4),
    ("sqrt(g*pr/rho)", {v: POSITIVE for v in ("g", "pr", "rho")}, 4),
    ("E*cos(w*t+phi)", {v: POSITIVE for v in ("E", "w", "t", "phi")}, 3),
    ("p*E*cos(t)**2", {v: POSITIVE for v in ("p", "E", "t")}, 3),
    ("x1*(cos(w*t)+a*cos(w*t)**2)", {v: (1, 3) for v in ("x1", "w", "t", "a")}, 5),
    ("sin(x)/x", {"x": UNIT}, 1),
    ("x/(exp(x)-1)", {"x": UNIT}, 1),
    ("(1-cos(x))/x**2*y", {"x": UNIT, "y": POSITIVE}, 2),
    ("sin(x*y)/(x*y)", {"x": UNIT, "y": UNIT}, 2),
    ("x*exp(-x**2)", {"x": UNIT}, 1),
    ("1/(exp(x)-1)", {"x": POSITIVE}, 1),
    ("sin(5*a)+cos(3*a)", {"a": UNIT}, 1),
    ("exp(-x/100)-exp(-(x+1)/100)", {"x": UNIT}, 1),
    ("x**5-3*x**3+x-1", {"x": UNIT}, 1),
    ("sqrt(1-v**2)", {"v": UNIT}, 1),
    ("log(x)*sqrt(x)/(1+x)", {"x": POSITIVE}, 1),
    ("sin(x+y)+cos(2*x+2*y)", {"x": UNIT, "y": UNIT}, 1),
    ("(x+y+1)*exp(-x-y)+z", {"x": UNIT, "y": UNIT, "z": UNIT}, 1),
    ("x*y*exp(-x*y)", {"x": UNIT, "y": UNIT}, 2),
    ("x**2+2*x*y+y**2", {"x": UNIT, "y": UNIT}, 1),
    ("x**2-4*y**2", {"x": UNIT, "y": UNIT}, 1),
    ("x*y+x*z+x*w", {v: UNIT for v in "xyzw"}, 1),
    ("x**2*y", {"x": UNIT, "y": UNIT}, 2),
    ("a*b*c*d", {v: UNIT for v in "abcd"}, 3),
    ("a/(b*c*d)", {v: POSITIVE for v in "abcd"}, 4),
    ("(a*b)**2+(a*b)", {"a": UNIT, "b": UNIT}, 2),
    ("a**2*b**2", {"a": UNIT, "b": UNIT}, 2),
    ("a**2/b**2", {"a": UNIT, "b": POSITIVE}, 3),
    ("exp(x)*exp(y)*exp(-2*z)", {"x": UNIT, "y": UNIT, "z": UNIT}, 1),
    ("x**y", {"x": POSITIVE, "y": UNIT}, 3),
    ("2**x+10**x", {"x": UNIT}, 1),
    ("x**2.5*y**2.5", {"x": POSITIVE, "y": POSITIVE}, 2),
    ("log(x*y**3/z)", {"x": POSITIVE, "y": POSITIVE, "z": POSITIVE}, 3),
    ("sqrt(x**2*y)", {"x": UNIT, "y": POSITIVE}, 3),
    ("tanh(x)*y/(1+tanh(x)**2)", {"x": UNIT, "y": UNIT}, 2),
    ("erf(x)*exp(-y)+atan(x*y)", {"x": UNIT, "y": UNIT}, 5),
    ("asin(x)*acos(x)+asinh(y)*acosh(z)", {"x": UNIT, "y": UNIT, "z": POSITIVE}, 4),
    ("abs(x)*sin(y)+max(x,y,z)+min(x,y)", {"x": UNIT, "y": UNIT, "z": UNIT}, 7),
    ("sinh(x)*cosh(y)-tan(x)*atanh(y*0.9)", {"x": UNIT, "y": UNIT}, 6),
    ("1/cos(x)+1/sin(y)+cos(y)/sin(y)", {"x": UNIT, "y": SMALL}, 2),
    ("x*exp(-x**2-y**2)", {"x": UNIT, "y": UNIT}, 3),
    ("x*exp(-x**2-y)", {"x": UNIT, "y": UNIT}, 3),
    ("x/(y*z)+w/(y*z)", {v: POSITIVE for v in "xyzw"}, 3),
    ("1/(1+exp(-(w*x+b)))", {v: UNIT for v in "wxb"}, 2),
    ("log(1+exp(x-y))", {"x": UNIT, "y": UNIT}, 1),
    ("max(x,y)*max(y,x)", {"x": UNIT, "y": UNIT}, 2),
    ("x-x+y-y", {"x": UNIT, "y": UNIT}, 0),
    ("3*x-y/7+1/3", {"x": UNIT, "y": UNIT}, 0),
    ("log(exp(3*x) + exp(y)/2 + 3) - log(1 + exp(x + y))", {"x": UNIT, "y": UNIT}, 4),
    ("y*exp(3*x)/(2*exp(3*x) + exp(y) + 3) + exp(x)/(1 + exp(y))", {"x": UNIT, "y": UNIT}, 9),
)  # fmt: skip


def truth(formula: str, box: Box, points: torch.Tensor) -> np.ndarray:
    """The formula at points, by sympy and mpmath with 40 digits."""
    names = {name: sympy.Symbol(name, real=True) for name in box.names or ()}
    expression = sympy.sympify(
        formula, locals={**names, "max": sympy.Max, "min": sympy.Min, "abs": sympy.Abs}, evaluate=False
    )
    function = sympy.lambdify(list(names.values()), expression, "mpmath")
    with mpmath.workdps(40):
        return np.array([float(function(*(mpmath.mpf(x) for x in row))) for row in points.tolist()])


def cost(program: Program) -> int:
    return program.count(Apply, Product)


@pytest.mark.parametrize(("formula", "intervals", "most"), FORMULAS, ids=[f for f, _, _ in FORMULAS])
def test_a_program_equals_its_formula_at_the_expected_cost(
    formula: str, intervals: dict[str, tuple[float, float]], most: int
) -> None:
    box = Box(intervals)
    points = box.sample(12, seed=3)
    wanted = truth(formula, box, points)
    scale = max(np.abs(wanted).max(), 1e-300)
    for writing in WRITINGS:
        program = capture_formula(formula, box, writing=writing)
        assert np.abs(values(program, points).numpy() - wanted).max() <= 1e-12 * scale, writing
    assert cost(capture_formula(formula, box)) <= most


def test_a_wrong_constant_would_be_seen() -> None:
    box = Box(x=UNIT)
    points = box.sample(12, seed=3)
    wanted = truth("sin(x) + 1.00000000001", box, points)
    got = values(capture_formula("sin(x) + 1", box), points).numpy()
    assert np.abs(got - wanted).max() > 1e-12 * np.abs(wanted).max()


def test_products_are_balanced() -> None:
    names = [f"x{i}" for i in range(8)]
    program = capture_formula("*".join(names), Box({name: UNIT for name in names}))
    assert program.depth() == 3 and cost(program) == 7


def test_functions_of_the_registry_are_recognised() -> None:
    box = Box(x=UNIT)
    assert applies(capture_formula("x/(1 + exp(-x))", box)) == ["silu"]
    assert applies(capture_formula("3/(2 + 2*exp(x))", box)) == ["sigmoid"]
    assert applies(capture_formula("log(1 + exp(x)) + 1/x**0.5", Box(x=POSITIVE))) != ["softplus"]
    assert applies(capture_formula("x*x*x", box)) == ["cube"] and applies(capture_formula("x**0.5", Box(x=(0, 1)))) == [
        "sqrt"
    ]


def test_equal_parts_are_computed_once() -> None:
    program = capture_formula(["sin(x*y)", "sin(y*x)**2", "exp(x*y)"], Box(x=UNIT, y=UNIT))
    assert program.count(Product) == 1 and program.count(Apply) == 3
    assert program.output_shape == (3,)


def test_affine_maps_are_merged() -> None:
    program = capture_formula("sin(2*(x + 3*(y - 1)) - x/2)", Box(x=UNIT, y=UNIT))
    assert program.count(Linear) == 1 and applies(program) == ["sin"]


def test_functions_of_one_name_serve_many_places() -> None:
    program = capture_formula("1/(exp(2*x)-1) + 5/(exp(y/3)-1)", Box(x=POSITIVE, y=POSITIVE))
    assert applies(program) == ["expr: 1/(exp(y) - 1)"] * 2


def test_fusion_stops_at_kinks_that_are_no_float64() -> None:
    assert len(applies(capture_formula("exp(abs(x - 1)) + x", Box(x=(0, 3))))) == 1
    program = capture_formula("exp(x)*abs(sin(x))", Box(x=UNIT))
    assert "abs" in applies(program)
    points = program.box.sample(50)[:, 0]
    wanted = points.exp() * points.sin().abs()
    assert torch.allclose(values(program, points[:, None]), wanted, rtol=1e-14, atol=0)


def test_the_log_style_takes_products_apart() -> None:
    box = Box({name: POSITIVE for name in "abcd"})
    program = capture_formula("a*b*c/d", box, writing="log")
    assert program.count(Product) == 0 and sorted(applies(program)) == ["exp", "log", "log", "log", "log"]
    mixed = capture_formula("a*b*c*x", Box({**{n: POSITIVE for n in "abc"}, "x": UNIT}), writing="log")
    assert mixed.count(Product) == 1
    with pytest.raises(ArgumentError, match="writing is one of"):
        capture_formula("x", Box(x=UNIT), writing="fast")  # type: ignore[arg-type]


def test_the_plain_style_uses_registered_functions_only() -> None:
    program = capture_formula("1/(exp(x)-1) + x*exp(-x**2)", Box(x=POSITIVE), writing="plain")
    assert not any(name.startswith("expr:") for name in applies(program))


def test_squares_are_completed_where_a_factor_is_below_one() -> None:
    formula = "sqrt(w**2*a**2 + (1 - w)**2*b**2 + 2*w*(1 - w)*a*b*r)"
    box = Box(w=(0, 1), a=(0.1, 0.4), b=(0.1, 0.4), r=(-0.9, 0.9))
    program = capture_formula(formula, box, writing="chord")
    assert applies(program).count("square") == 2 and "expr: sqrt(1 - y**2)" in applies(program)
    points = box.sample(200)
    w, a, b, r = points.T
    wanted = (w**2 * a**2 + (1 - w) ** 2 * b**2 + 2 * w * (1 - w) * a * b * r).sqrt()
    assert torch.allclose(values(program, points), wanted, rtol=1e-12, atol=1e-12)
    wider = Box(x=UNIT, y=UNIT, r=(-1.1, 1.1))  # the factor is not below one
    assert "expr: sqrt(1 - y**2)" not in applies(capture_formula("x**2 + y**2 + 2*x*y*r", wider, writing="chord"))


def test_programs_survive_files() -> None:
    for formula, intervals, _ in FORMULAS[::6]:
        program = capture_formula(formula, Box(intervals))
        assert Program.from_json(*program.to_json()) == program


# Random formulas as trees: each node has a text, and a meaning for numbers of any kind.
NODES: dict[str, tuple[str, Callable[..., Any]]] = {
    "sin": ("sin({})", lambda m, a: m.sin(a)),
    "cos": ("cos({})", lambda m, a: m.cos(a)),
    "tanh": ("tanh({})", lambda m, a: m.tanh(a)),
    "exp": ("exp(({})/8)", lambda m, a: m.exp(a / 8)),
    "square": ("({})**2", lambda m, a: a * a),
    "cube": ("({})**3/9", lambda m, a: a * a * a / 9),
    "abs": ("abs({})", lambda m, a: abs(a)),
    "lorentz": ("1/(2+({})**2)", lambda m, a: 1 / (2 + a * a)),
    "minus": ("-({})", lambda m, a: -a),
    "atan": ("atan({})", lambda m, a: m.atan(a)),
    "root": ("sqrt(1+({})**2)", lambda m, a: m.sqrt(1 + a * a)),
    "log": ("log(2+cos({}))", lambda m, a: m.log(2 + m.cos(a))),
    "relu": ("relu({})", lambda m, a: max(a, 0 * a)),
    "clip": ("clip({}, -0.5, 0.75)", lambda m, a: min(max(a, 0 * a - 0.5), 0 * a + 0.75)),
    "plus": ("({})+({})", lambda m, a, b: a + b),
    "less": ("({})-({})", lambda m, a, b: a - b),
    "times": ("({})*({})", lambda m, a, b: a * b),
    "over": ("({})/(3+sin({}))", lambda m, a, b: a / (3 + m.sin(b))),
    "max": ("max({}, {})", lambda m, a, b: max(a, b)),
    "min": ("min({}, {})", lambda m, a, b: min(a, b)),
    "hypot": ("hypot({}, {})", lambda m, a, b: m.sqrt(a * a + b * b)),
}
ONE = [name for name, (text, _) in NODES.items() if text.count("{}") == 1]
TWO = [name for name, (text, _) in NODES.items() if text.count("{}") == 2]
Tree = Any


def grow(children: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    two = st.tuples(st.sampled_from(TWO), children, children)
    return st.tuples(st.sampled_from(ONE), children) | two | two


TREES = st.recursive(st.sampled_from(["x", "y", "z", "2", "0.5", "1.25"]), grow, max_leaves=12)


def text_of(tree: Tree) -> str:
    return tree if isinstance(tree, str) else NODES[tree[0]][0].format(*map(text_of, tree[1:]))


def value_of(tree: Tree, library: Any, number: Callable[[Any], Any], point: dict[str, float]) -> Any:
    if isinstance(tree, str):
        return number(point.get(tree, tree))
    return NODES[tree[0]][1](library, *(value_of(child, library, number, point) for child in tree[1:]))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TREES, st.sampled_from(WRITINGS))
@example(("hypot", "x", ("hypot", "2", "0.5")), "product")  # a root that goes leaves a decimal
@example(("hypot", "x", ("hypot", "2", ("sin", "2"))), "product")  # or a sum
def test_random_formulas(tree: Tree, writing: Writing) -> None:
    formula = text_of(tree)
    used = [name for name in "xyz" if name in re.findall(r"[a-z]+", formula)]
    assume(used)
    box = Box({name: (-1.5, 2.0) for name in used})
    program = capture_formula(formula, box, writing=writing)
    assert Program.from_json(*program.to_json()) == program
    points = torch.cat([box.sample(4, seed=5), box.corners()])
    got = values(program, points).tolist()
    for row, value in zip(points.tolist(), got, strict=True):
        point = dict(zip(used, row, strict=True))
        with mpmath.workdps(50):
            wanted = value_of(tree, mpmath, mpmath.mpf, point)
        # what plain float64 loses on this formula tells how ill-conditioned it is
        plain = value_of(tree, math, float, point)
        allowed = 1e-12 * (1 + abs(wanted)) + 1000 * abs(plain - wanted)
        assert abs(value - wanted) <= allowed, f"{formula} at {point}"
