"""The formula front end: strings, lists, sympy expressions and callables; what is wrong with them, in words."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
import sympy
import torch

import attnforge as af
from attnforge.box import Box
from attnforge.errors import ArgumentError, AttnforgeError, DomainError, FormulaError, UnsupportedOperation
from attnforge.expressions import composite as composites
from attnforge.expressions import grammar
from attnforge.frontends.formula.program import capture_formula
from attnforge.programs.interpret import values
from attnforge.programs.ops import Apply, Linear

X, Y = sympy.symbols("x y")
BOX = Box(x=(0.5, 1.5), y=(1, 2))


def same(one: object, other: object) -> bool:
    points = BOX.sample(50, seed=2)
    a, b = values(capture_formula(one, BOX), points), values(capture_formula(other, BOX), points)
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(
    ("target", "formula"),
    [
        (sympy.sin(X * Y) + sympy.exp(-(X**2)) / Y, "sin(x*y) + exp(-x**2)/y"),
        (sympy.sqrt(X) * sympy.pi + sympy.E**Y + sympy.Rational(1, 3), "sqrt(x)*pi + exp(y) + 1/3"),
        (sympy.Max(X, Y) + sympy.Min(X, 1) + sympy.Abs(X - Y), "max(x, y) + min(x, 1) + abs(x - y)"),
        (sympy.atan2(Y, X) + sympy.log(X, 2) + sympy.sec(Y / 4), "atan2(y, x) + log2(x) + sec(y/4)"),
        (sympy.coth(X) + sympy.csch(Y) * sympy.sech(X), "1/tanh(x) + 1/(sinh(y)*cosh(x))"),
        (X**Y + sympy.Float("0.25") * X, "x**y + 0.25*x"),
        (lambda x, y: np.sin(x * y) + np.exp(-(x**2)) / y, "sin(x*y) + exp(-x**2)/y"),
        (lambda x, y: torch.tanh(x) * y.sqrt() - torch.clamp(x, 0.7, 1.0), "tanh(x)*sqrt(y) - clip(x, 0.7, 1.0)"),
        (lambda y, x: x / y, "x/y"),
        (lambda a, b: a / b, "x/y"),
        (lambda *p: p[0] - p[1] ** 2, "x - y**2"),
        (lambda x, y, k=3.0: x * y * k, "3*x*y"),
        (sympy.lambdify([X, Y], sympy.cos(X) * sympy.log(Y), "numpy"), "cos(x)*log(y)"),
        (lambda x, y: np.logaddexp(x, y) + np.sinc(y), "y + softplus(x - y) + sin(pi*y)/(pi*y)"),
        (lambda x, y: math.radians(x) + np.rad2deg(y) + np.clip(x, 0.7, y), "pi*x/180 + 180*y/pi + clip(x, 0.7, y)"),
        (lambda x, y: np.polyval([2, 1, 3], x) * y, "(2*x**2 + x + 3)*y"),
        (sympy.sinc(X * Y), "sin(x*y)/(x*y)"),
        ([X + Y, "x*y"], ["x + y", "x*y"]),
        (lambda x, y: (x + y, x * y, 2.0), ["x + y", "x*y", "2 + 0*x"]),
    ],
)
def test_objects_mean_what_their_formulas_mean(target: object, formula: object) -> None:
    assert same(target, formula)
    assert not same(target, formula + " + 1e-9" if isinstance(formula, str) else [*formula[:-1], "x - y"])


def test_outputs_and_source() -> None:
    one, two = capture_formula("x + y", BOX), capture_formula(["x + y", "x*y"], BOX)
    assert one.output_shape == () and two.output_shape == (2,)
    assert one.source == "x + y" and two.source == "[x + y, x*y]"
    assert capture_formula(["x*y"], BOX).output_shape == (1,)
    assert capture_formula(lambda x, y: x * y, BOX).source == "x*y"
    assert values(two, BOX.sample(7).reshape(7, 1, 2)).shape == (7, 1, 2)
    assert capture_formula("3 + 0*x + 0*y", BOX).depth() == 0


def test_points_outside_the_box_of_names_do_not_matter() -> None:
    program = capture_formula("x*y", BOX)
    assert float(values(program, torch.tensor([[2.0, 5.0]]))[0]) == 10


@pytest.mark.parametrize(
    ("target", "box", "error", "message"),
    [
        ("x + y", Box(x=(0, 1), y=(0, 1), z=(0, 1), w=(0, 1)), ArgumentError, "does not use z, w"),
        ("x + y + u + v", BOX, ArgumentError, "no interval for 'u'.*'v'"),
        ("x + Y", BOX, FormulaError, "did you mean 'y'"),
        (X + sympy.Symbol("q") + sympy.Symbol("r"), BOX, ArgumentError, "no interval for q, r"),
        (X, BOX, ArgumentError, "does not use y"),
        (lambda x, y: x, BOX, ArgumentError, "does not use y"),
        (lambda x: x, BOX, ArgumentError, "the function takes x, but the box has x, y"),
        (lambda x, y: float(x) + y, BOX, UnsupportedOperation, "numpy's functions"),
        (lambda x, y: np.sort(x) + y, BOX, UnsupportedOperation, "numpy.sort does not work on expressions"),
        (lambda x, y: x if x > y else y, BOX, UnsupportedOperation, "np.maximum"),
        (lambda x, y: "x", BOX, ArgumentError, "real number"),
        (sympy.gamma(X) + sympy.zeta(Y), BOX, UnsupportedOperation, r"gamma\(x\); zeta\(y\)|zeta\(y\); gamma\(x\)"),
        (sympy.Piecewise((X, X > Y), (1, True)), BOX, UnsupportedOperation, "one variable with a number"),
        (sympy.oo * X + Y, BOX, UnsupportedOperation, "oo"),
        (sympy.Eq(X, Y), BOX, ArgumentError, "sympy expression"),
        (sympy.I * X + Y, BOX, UnsupportedOperation, "I"),
        ("x + y", Box.cube(0, 1, shape=(2,)), ArgumentError, "box with names"),
        (3.0, BOX, ArgumentError, "got float"),
        (None, BOX, ArgumentError, "got NoneType"),
        ([], BOX, ArgumentError, "empty"),
        ("", BOX, FormulaError, "empty"),
        ("log(x - y)", BOX, DomainError, r"log\(x - y\) is undefined at x"),
        ("9**9**9**9", BOX, FormulaError, "too large"),
        ("x**1e308*y", BOX, FormulaError, "exponents"),
        ("__import__('os').system('true')", BOX, FormulaError, "__import__"),
        ("x" * 100_000, BOX, FormulaError, "characters"),
    ],
)
def test_bad_targets(target: object, box: Box, error: type[AttnforgeError], message: str) -> None:
    start = time.perf_counter()
    with pytest.raises(error, match=message):
        capture_formula(target, box)
    assert time.perf_counter() - start < 1.0


def test_deep_and_wide_formulas_are_lowered() -> None:
    deep = "x"
    for _ in range(45):
        deep = f"sin(y + {deep}*x)"
    assert capture_formula(deep, BOX).depth() > 45
    names = [f"v{i}" for i in range(40)]
    wide = " + ".join(f"{a}*{b}" for i, a in enumerate(names) for b in names[i:])
    start = time.perf_counter()
    program = capture_formula(wide, Box({name: (-1, 1) for name in names}))
    assert time.perf_counter() - start < 5.0
    points = program.box.sample(5)
    wanted = sum(points[:, i] * points[:, i:].sum(1) for i in range(40))
    assert torch.allclose(values(program, points), wanted, rtol=1e-12, atol=1e-12)


def test_typical_formulas_take_milliseconds() -> None:
    formula = "G*m1*m2/((x2-x1)**2 + (y2-y1)**2 + (z2-z1)**2)"
    box = Box({n: (1, 2) for n in ("G", "m1", "m2", "x1", "y1", "z1")} | {n: (3, 4) for n in ("x2", "y2", "z2")})
    capture_formula(formula, box)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        capture_formula(formula, box)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.05


def test_strings_need_no_sympy() -> None:
    code = (
        "import sys; import torch; before = 'sympy' in sys.modules\n"
        "from attnforge.box import Box; from attnforge.frontends.formula.program import capture_formula\n"
        "capture_formula('sin(x)/x', Box(x=(1, 2))); sys.exit(0 if before or 'sympy' not in sys.modules else 1)"
    )
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": "src"}, check=False).returncode == 0


def test_expressions_never_become_text_to_be_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box(x=(0.5, 1.5), y=(0.3, 0.7))
    text = "sin(x)/x + exp(-x**2)*y/(exp(y) - 1) + log(1 + (x + y)**2)*tanh(x + y)"
    reads: list[str] = []

    class Watched(grammar._Parser):
        def __init__(self, formula: str, *rest: Any):
            reads.append(formula)
            super().__init__(formula, *rest)

    composites._read.cache_clear()
    composites._built.cache_clear()
    monkeypatch.setattr(grammar, "_Parser", Watched)
    net = af.compile(text, box, eps=1e-2)
    assert set(reads) == {text}

    def traced(x: Any, y: Any) -> Any:
        return np.sin(x) / x + np.exp(-(x**2)) * y / (np.exp(y) - 1) + np.log(1 + (x + y) ** 2) * np.tanh(x + y)

    def refused(*_: object) -> None:
        raise AssertionError("the parser is for the names in files and the texts of users")

    composites._built.cache_clear()
    monkeypatch.setattr(grammar, "_Parser", refused)
    # a certificate reads the text of a target again, to say whether it is the program: that is not the compiler
    monkeypatch.setattr("attnforge.compiler.compiled.spells", lambda *_: False)
    again = af.compile(traced, box, eps=1e-2)
    names = [op.function.name for op in again.program.ops if isinstance(op, Apply)]
    assert sum(name.startswith("expr:") for name in names) >= 3
    assert again.program.ops == net.program.ops


def test_a_chain_too_deep_for_a_name_is_not_fused() -> None:
    def chain(x: Any) -> Any:
        for _ in range(60):
            x = 1 / (2 + x)
        return x

    assert capture_formula(chain, Box(x=(0, 1))).depth() > 1


def test_sympy_carries_out_what_was_written_down_only() -> None:
    x, k = sympy.symbols("x k")
    for target, same in (
        (sympy.Derivative(x * sympy.sin(x), x), x * sympy.cos(x) + sympy.sin(x)),
        (sympy.Integral(2 * x, (x, 0, x)), x**2),
        (sympy.Sum(x**k, (k, 0, 2)), 1 + x + x**2),
    ):
        assert capture_formula(target, Box(x=(0, 1))).ops == capture_formula(same, Box(x=(0, 1))).ops
    with pytest.raises(UnsupportedOperation, match="no form here"):
        capture_formula(sympy.Integral(sympy.exp(sympy.sin(x)), x), Box(x=(0, 1)))


def test_functions_of_sympy_that_nobody_defined_are_named() -> None:
    x = sympy.Symbol("x")
    with pytest.raises(UnsupportedOperation, match=r"g\(x\)"):
        af.compile(sympy.Function("g")(x), {x: (0, 1)}, eps=1e-3)


def test_floats_of_sympy_keep_their_digits() -> None:
    """0.1 to 50 digits is not the 0.1 of float64; a tenth of that is the error of a network with one weight."""
    program = capture_formula(sympy.Float("0.1", 50) * X, Box(x=(-1, 1)))
    (op,) = (op for op in program.ops if isinstance(op, Linear))
    assert op.weights[0].item() == 0.1 and 5e-18 < op.slack[0].item() < 6e-18
    for text, word in (("1e-400", "underflows"), ("1e-1000000000", "underflows"), ("1e400", "overflows")):
        with pytest.raises(ArgumentError, match=word):
            capture_formula(sympy.Float(text, 20) * X, Box(x=(-1, 1)))
