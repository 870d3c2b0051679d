"""The formula language: what it reads, and how it refuses, always with a caret at the place."""

from __future__ import annotations

import math
import string
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnforge.errors import ArgumentError, AttnforgeError, DomainError, FormulaError
from attnforge.expressions.expression import Graph
from attnforge.expressions.grammar import DEEPEST, LONGEST, read
from attnforge.expressions.special import words

NAMES = {"x": (0.5, 2.0), "y": (-1.0, 1.0), "z": (0.5, 3.0)}


def text(formula: str) -> str | None:
    return read(formula, Graph(NAMES), tuple(NAMES))[0].text


@pytest.mark.parametrize(
    ("formula", "wanted"),
    [
        ("-x**2", "-x**2"),
        ("(-x)**2", "x**2"),
        ("2**-1", "0.5"),
        ("x**2**3", "x**8"),
        ("x - y - z", "x - y - z"),
        ("x/y/z", "x/(y*z)"),
        ("3*-x", "-3*x"),
        ("+x", "x"),
        ("--x", "x"),
        ("2*(x + y)*3", "6*x + 6*y"),
        (" x\n+\ty ", "x + y"),
        ("1e-3*x + .5 + 2.", "0.001*x + 2.5"),
        ("1E3", "1000"),
        ("cos(pi)", "-1"),
        ("log(e)", "1"),
        ("sqrt(4)", "2"),
        ("x/3 + x/6", "0.5*x"),
        ("0.1 + 0.2", "0.3"),
        ("ln(x) - log(x)", "0"),
        ("arcsin(y) - asin(y)", "0"),
        ("pow(x, 3) - x**3", "0"),
        ("min(x, x)", "x"),
        ("clip(x, 0, 9)", "x"),
        ("leaky_relu(y, 0.2)", "leaky_relu(y, 0.2)"),
        ("sec(y)*cos(y)", "1"),
        ("coth(y) + csch(z) - sech(x)", "-1/cosh(x) + 1/sinh(z) + 1/tanh(y)"),
        ("hypot(y, y)", "sqrt(2)*abs(y)"),
        ("atan2(y, x)", "atan(y/x)"),
        ("square(x) + reciprocal(z) + cube(y)", "1/z + x**2 + y**3"),
    ],
)
def test_meaning(formula: str, wanted: str) -> None:
    assert text(formula) == wanted


def test_names_of_the_box_win_over_constants() -> None:
    graph = Graph({"e": (0.0, 1.0), "pi": (0.0, 1.0)})
    node, mentioned = read("e*pi", graph, ("e", "pi"))
    assert node.text == "e*pi" and mentioned == {"e", "pi"}
    assert read("e", Graph({}), ())[0].range[0] == pytest.approx(math.e)


def test_cancelled_variables_are_mentioned() -> None:
    assert read("x - x + 0*y", Graph(NAMES), tuple(NAMES))[1] == {"x", "y"}


@pytest.mark.parametrize("name", words())
def test_every_function_of_the_registry_can_be_called(name: str) -> None:
    counts = {"pow": 2, "hypot": 2, "atan2": 2, "clip": 3, "logaddexp": 2, "mod": 2}
    arguments = ["x", "1" if name == "mod" else "z", "5"][: counts.get(name, 1)]
    constant = name in ("ceil", "floor", "mod", "round", "trunc")  # where the argument stays between two steps
    scale = "/8 + 9/8" if constant else "/4" if name in ("asin", "acos", "atanh") else "+1" if name == "acosh" else ""
    assert text(f"{name}({arguments[0]}{scale}{''.join(', ' + a for a in arguments[1:])})")


# formula, what is wrong, where
ERRORS = [
    ("", "is empty", 0),
    ("   ", "is empty", 3),
    ("x^2", r"write \*\* for a power", 1),
    ("^x", r"write \*\* for a power", 0),
    ("2x", r"multiplication sign is missing: write 2\*x", 1),
    ("x y", r"multiplication sign is missing: write x\*y", 2),
    ("2(x)", r"multiplication sign is missing: write 2\*\(", 1),
    ("(x)(y)", "multiplication sign is missing", 3),
    ("x +", "ends where", 3),
    ("x + * y", "expected here, not '\\*'", 4),
    ("(x + 1", "never closed", 0),
    ("sin(x", "never closed", 3),
    ("x)", "has no opening", 1),
    ("sin(x))", "has no opening", 6),
    ("sin()", "takes one argument", 0),
    ("sin(x, y)", "takes one argument, got 2", 0),
    ("clip(x, 1)", "takes 3 arguments, as in", 0),
    ("clip(x, 2, 1)", "lo <= hi", 0),
    ("sin", r"is a function: write sin\(", 0),
    ("x(y)", "not a function: for a product", 0),
    ("sinn(x)", "did you mean 'sin'", 0),
    ("x, y", "a list of formulas", 1),
    ("sign(x - 1)", "jumps", 0),
    ("1 + floor(x)", "jumps", 4),
    ("x = 3", "without 'y ='", 2),
    ("x == 1", "no comparisons: a formula has no conditions", 2),
    ("1,5*x", "decimals have a point: write 1.5", 1),
    ("1.5.2*x", "between 1.5 and .2", 3),
    ("sin²(x)", r"write sin\(...\)\*\*2", 0),
    ("sin^2(x)", r"write sin\(...\)\*\*2", 0),
    ("lg(x)", r"write log10\(x\)", 0),
    ("2*cosec(x)", r"write csc\(x\)", 2),
    ("gamma(x)", "attnforge.approximate", 0),
    ("if(x > 0, x, 0)", "no conditions", 0),
    ("∞*x", "finite", 0),
    ("x; y", "a list of formulas", 1),
    ("“x”", "quotation marks", 0),
    ("x + 1 # one", "no comments", 6),
    ("cosinus(x)", "unknown function 'cosinus'; did you mean 'cos'\\?\n", 0),
    ("x.real", "attributes", 1),
    ("x[0]", "own name", 1),
    ("x % 2", "remainder", 2),
    ("2*math.sin(x)", r"leave 'math\.' out", 6),
    ("np.sin(x)", r"leave 'np\.' out", 2),
    ("f(x) = x", r"without 'f\(x\) ='", 0),
    ("where(x > 0, x, 0)", "no conditions", 0),
    ("x ÷ 2", "write / for a quotient", 2),
    ("x₁ + 1", "x1", 1),
    ("1_000*x", "write 1000", 1),
    ("x + nan", "nan is no number", 4),
    ("True*x", "truth values", 0),
    ("1 + expit(x)", r"write sigmoid\(x\)", 4),
    ("sinc(x)", r"write sin\(x\)/x", 0),
    ("|x|", "abs", 0),
    ("2 − x", "typographic minus", 2),
    ("__import__('os')", "unknown function '__import__'", 0),
    ("x.__class__", "attributes", 1),
    ("eval(x)", "unknown function 'eval'", 0),
    ("lambda: x", "multiplication|has no meaning", 6),
    ("'x'", "has no meaning", 0),
    ("1e999", "beyond float64", 0),
    ("x + 1e-999", "beyond float64", 4),
    ("1e999999999999", "too long or too large", 0),
    ("1" * 500, "too long or too large", 0),
    ("9**9**9**9", "too large", 4),
    ("x**1e308", "exponents must lie", 1),
    ("x**1001", "exponents must lie", 1),
    ("(x**900)**900", "exponents must lie", 8),
    ("1e200*1e200*x", "overflows", 11),
    ("exp(1e9)*x", "overflows", 0),
    ("erfc(1e6)*x", "underflows", 0),
    ("cosh(exp(600))*x", "overflows", 0),
    ("(" * 5000 + "x" + ")" * 5000, "nested more than", DEEPEST),
    ("-" * 5000 + "x", "nested more than", DEEPEST),
    ("sin(" * 3000 + "x" + ")" * 3000, "nested more than", 4 * DEEPEST),
    ("2**" * 3000 + "x", "nested more than", 3 * DEEPEST),
    ("x+" * 50_000 + "x", "characters", LONGEST),
]


@pytest.mark.parametrize(("formula", "problem", "position"), ERRORS, ids=[repr(f[:20]) for f, _, _ in ERRORS])
def test_refusals_point_at_the_place(formula: str, problem: str, position: int) -> None:
    start = time.perf_counter()
    with pytest.raises(FormulaError, match=problem) as caught:
        text(formula)
    assert time.perf_counter() - start < 1.0
    assert caught.value.position == position
    lines = str(caught.value).splitlines()
    assert lines[-1].strip() == "^"
    if position < len(formula) and formula[position] not in "\n\t":
        assert lines[-2][lines[-1].index("^")] == formula[position]


def test_unknown_names_are_all_listed_with_hints() -> None:
    graph = Graph({"mass": (0.0, 1.0)})
    with pytest.raises(FormulaError, match=r"'mas'; did you mean 'mass'.*'speed'") as caught:
        read("mas*speed**2", graph, ("mass",))
    assert isinstance(caught.value, ArgumentError) and caught.value.position == 0


@pytest.mark.parametrize(
    "formula", ["1/0", "0**-1", "log(0)", "sqrt(-1)", "(-8)**(1/3)", "asin(2)", "x/(2-2)", "log(-x+x)"]
)
def test_constants_outside_of_a_domain(formula: str) -> None:
    with pytest.raises(DomainError):
        text(formula)


def test_not_a_string() -> None:
    with pytest.raises(ArgumentError, match="a formula is a string"):
        read(3, Graph({}), ())  # type: ignore[arg-type]


ALPHABET = st.text(alphabet=string.ascii_lowercase[:3] + "xyz0123456789.+-*/^(),e _'\"[]=\\\n∞é", max_size=60)


@settings(max_examples=300, deadline=2000)
@given(ALPHABET)
def test_any_text_is_read_or_refused(formula: str) -> None:
    try:
        node, mentioned = read(formula, Graph(NAMES), tuple(NAMES))
    except AttnforgeError:
        return
    assert {v.name for v in node.variables} <= mentioned <= set(NAMES)


PIECES = st.lists(
    st.sampled_from(["x", "y", "2", "1e3", "**", "*", "/", "+", "-", "(", ")", "sin(", ",", "exp(", "9", "max("]),
    max_size=25,
)


@settings(max_examples=300, deadline=2000)
@given(PIECES)
def test_any_pieces_are_read_or_refused(pieces: list[str]) -> None:
    formula = "".join(pieces)
    try:
        node, _ = read(formula, Graph(NAMES), tuple(NAMES))
    except AttnforgeError:
        return
    assert text(node.text or "0") == node.text, "what is printed reads back as itself"
