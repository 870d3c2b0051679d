"""Bound code rounds outward: what is rounded to nearest, and widened by nobody, is found.

A number that a bound is made of may come from a function of numpy or math, which errs by a few units, or from 1 - e,
which loses e altogether where it is small. Both must be widened: inside of `up` or `down`, or times (1 + something), in
the same statement. What is not is listed here with what widens it elsewhere.
"""

import ast
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent / "src" / "attnforge"
CODE = (
    *sorted(ROOT.glob("heads/*/bound.py")), *sorted(ROOT.glob("heads/*/rule.py")), ROOT / "heads/rule.py",
    *(ROOT / f"programs/{name}.py" for name in ("affine", "enclose")),
    *(ROOT / f"compiler/{name}.py" for name in ("propagation", "adjoint")),
    ROOT / "certificates/rounding.py", ROOT / "theorems/bounds.py", ROOT / "incontext/certificate.py",
    ROOT / "blackbox/grid.py", ROOT / "functions/queries.py", ROOT / "export/plain/certificate.py",
)  # fmt: skip
ROUGH = {
    *("exp", "expm1", "exp2", "log", "log1p", "log2", "log10", "arccos", "arcsin", "arctan", "acos", "asin", "atan"),
    *("sin", "cos", "tan", "tanh", "sinh", "cosh", "hypot"),
}
OUTWARD = {"up", "down", "upper", "lower", "dot_up"}
#: How many such places a function has, and why they are wide enough: the count keeps new ones from joining them.
#: Functions of numpy and math are within 4 U of themselves, which a test below measures.
READ: dict[str, dict[str, tuple[int, str]]] = {
    "heads/anchor/bound.py": {
        "weights": (1, "for fitting and drawing: no bound comes from it"),
        "_chunk": (3, "OWN counts the exponential; lifted is times 1 + 16 U, 1 - 8 U is exact"),
        "_window": (1, "times 1.01"),
    },
    "heads/fast/bound.py": {
        "_around": (1, "lifted is times 1 + 1e-10, turn times SLACK"),
        "_lattice": (
            5, "s is times 1 + 8 U, 16 U of every term pay for the tilt, and the sum of positive terms is times SLACK"
        ),
        "_least_total": (7, "times 1 - 1e-10, and divided by SLACK where it is used"),
        "_window": (4, "terms of a sum of positive ones, which is times SLACK; gamma is below 1, or infinite: refused"),
        "_gated": (1, "a term of a sum of positive ones, which is times SLACK: exponents of 700 err by 1e-13"),
    },
    "heads/gate/bound.py": {
        "_sigmoid": (1, "up, 8 steps, in the next line"),
        "settled": (1, "up, 8 steps, before it is compared"),
        "read_rounding": (
            1, "says who is light: those take 1/32 of a rounding of the 1/8 that is charged; what they add is charged"
        ),
    },
    "heads/gate/rule.py": {
        "_local": (1, "a skip that does not add up to 1 is counted exactly, by `stray`; the others are moved up"),
    },
    "heads/norm/bound.py": {
        "fit_error": (
            7, "edges from lo to hi cover it, wherever those between are; slip counts the sigmoid, 1.1 is 1/sin 2 and "
            "2e-4 more, a ratio is below 1/2 or the bound infinite, and the sum is moved up by 64 steps"
        ),
        "ledger": (1, "WIDEN is a power of two: exact"),
        "slopes_of": (1, "a number of cells"),
    },
    "heads/norm/rule.py": {
        "edges": (2, "where the kernel's cells begin and end: it covers the range whatever they are"),
        "passes": (3, "near is times 1 + 2^-20, far times 1 + slip"),
        "copied": (1, "1 - 2 u is exact; what comes of it is times 1.01"),
        "_apart": (8, "1 - 2^-40 is exact, and widens v; 1 - k and 1 - theta are at least 7/8; the sum is times 1.01"),
    },
    "heads/product/bound.py": {
        "rounding": (1, "up, 32 steps and 8 for each unit of the logits"), "fused_error": (1, "times 1.001"),
    },
    "heads/product/rule.py": {"_self_gain": (1, "times 1 + 2^-10")},
    "heads/token/bound.py": {
        "fixed_terms": (2, "16 U, and 8 U of every gap, are added to the error of the logits"),
        "mixing": (2, "errors of logits hold 6 U of the largest, a slot 8 U; what sums lose is counted twice"),
        "lambert_upper": (3, "w e^w, computed to 1e-15, is above the goal by 1e-14"),
        "sharpnesses": (1, "of entries 0 and 1: exact"),
    },
    "heads/token/rule.py": {
        "copied": (1, "1 - 2 u is exact"),
        "peak_slopes": (3, "1 - U is exact; ends are moved outward by 1e-12 of 1 and their size"),
        "slope": (2, "1e-12 of 1 and the entropy is added to what is below 2 and the entropy"),
        "_peak": (1, "decides where a slope turns: next to its extremum it is flat"),
    },
    "programs/enclose.py": {
        "_weights": (3, "the margin: 8 U for each channel, for each unit of the logits, and 16 more"),
        "_logits": (1, "4 U of their size for each channel, token and symbol are added to the reach of logits"),
    },
    "compiler/adjoint.py": {
        "_normalise": (1, "times slow, divided by slip"),
        "steepest": (2, "1 - 4 U is exact, the quotient times it is below; times 1 + 2^-20"),
        "_attention": (2, "1 - low and 1 - high in shares, times 1 + unit"),
    },
    "compiler/propagation.py": {"_norm": (3, "1 - g is at least 1/2; what is passed on is times 1 + 2^-36")},
    "certificates/rounding.py": {
        "largest_mean": (1, "slots * 2^-50 of the largest is added"),
        "softmax_rounding": (2, "up, 4 steps for each slot and 16 more, in the next line"),
    },
    "theorems/bounds.py": {
        "seams": (2, "q is below 0.99 and times 1 + 1e-12, and so is the result"),
        "cold_heads": (1, "1.9 stands for 2 in the exponent, and the result is times 1 + 1e-12"),
        "hats_ledger": (3, "away is times 1 + 1e-9, and the term is moved up by 16 steps"),
        "cells_ledger": (1, "chooses tau, which the two terms share"),
    },
    "incontext/certificate.py": {
        "factors": (4, "rho comes moved up by 4 U, more than rho^2 loses; results are times GROWN"),
        "quadratic": (1, "1 - beta is rounded once, and compared times GROWN"),
        "composite": (2, "root_q is times 1 - 8 U, rho times 1 + 4 U"),
        "with_scale": (3, "16 U are added, the norm is times GROWN, 1 - 8 U is exact"),
        "kernel_descent": (3, "wrong counts 6 U of every entry, times 1.01"),
        "kernel_mean": (1, "the error is times GROWN"),
    },
    "blackbox/grid.py": {
        "log_count": (1, "says who is light, `_terms` to 1e-13: of n - 1 light ones that are 1/n the n-th is missing"),
        "estimate": (2, "an estimate for the planner"),
        "_terms": (1, "as log_count"),
        "ideal_spacing": (1, "an estimate for the planner"),
    },
    "functions/queries.py": {
        "among": (1, "of a number of cells, far too few for the logarithm to miss a power of two"),
        "lookup": (1, "the pitch of a grid"),
        "_steepest_on_grid": (1, "the pitch of a grid"),
    },
}


def bare(source: str) -> list[tuple[str, int, str]]:
    """Functions of numpy and math, and differences from 1, that their statement does not widen: where, line, what."""
    found: list[tuple[str, int, str]] = []

    def one(node: ast.AST) -> bool:
        return isinstance(node, ast.Constant) and node.value == 1 and not isinstance(node.value, bool)

    def visit(node: ast.AST, widened: bool, where: str) -> None:
        widened = widened and not isinstance(node, ast.stmt)
        where = node.name if isinstance(node, ast.FunctionDef) else where
        if isinstance(node, ast.Call):
            called = node.func
            library = isinstance(called, ast.Attribute) and ast.unparse(called.value) in ("np", "math")
            if library and called.attr in ROUGH and not widened:
                found.append((where, node.lineno, called.attr))
            widened = widened or (isinstance(called, ast.Name) and called.id in OUTWARD)
        less = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and one(node.left)
        if less and not widened and not isinstance(node.right, ast.Constant):
            found.append((where, node.lineno, "1 -"))
        for child in ast.iter_child_nodes(node):
            factor = None
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                factor = node.right if child is node.left else node.left if child is node.right else None
            grown = isinstance(factor, ast.BinOp) and isinstance(factor.op, ast.Add | ast.Sub) and one(factor.left)
            visit(child, widened or grown, where)

    visit(ast.parse(source), False, "")
    return found


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_bound_code_rounds_outward(path: Path) -> None:
    found = Counter(where for where, _, _ in bare(path.read_text("utf-8")))
    known = {where: count for where, (count, _) in READ.get(str(path.relative_to(ROOT)), {}).items()}
    assert found == known, [entry for entry in bare(path.read_text("utf-8")) if found[entry[0]] != known.get(entry[0])]


MUTANTS = {
    "def f(e):\n    return np.arccos(1 - e)": ["arccos", "1 -"],
    "def f(d):\n    return up(np.exp(d)) + np.exp(d)": ["exp"],
    "def f(d):\n    return np.exp(d) * (1 + 8 * U)": [],
    "def f(d):\n    return up(np.expm1(d) * np.sum(d), 8)": [],
    "def f(d):\n    return np.exp(d) * (2 + 8 * U)": ["exp"],
    "def f(d):\n    share = math.log1p(d)\n    return up(share)": ["log1p"],
    "def f(e):\n    return x / (1.0 - e)": ["1 -"],
    "def f(e):\n    return up(lambda: 1)(np.tanh(e))": ["tanh"],
    "def f(e):\n    return 1 - 0.5": [],
}


@pytest.mark.parametrize("source", MUTANTS)
def test_what_is_not_widened_is_found(source: str) -> None:
    assert [what for _, _, what in bare(source)] == MUTANTS[source]


def test_a_bare_exponential_in_bound_code_is_found() -> None:
    """Every widening that is taken off in the code itself is noticed."""
    source = (ROOT / "heads/rule.py").read_text("utf-8")
    assert "up(np.tanh(0.5 * d), 8)" in source and bare(source) == []
    assert [what for _, _, what in bare(source.replace("up(np.tanh(0.5 * d), 8)", "np.tanh(0.5 * d)"))] == ["tanh"]


FUNCTIONS = {"exp": (-740.0, 709.0), "expm1": (1e-12, 700.0), "log": (1e-300, 1e300), "log1p": (1e-12, 1e6),
             "tanh": (1e-12, 20.0)}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numpy_is_as_accurate_as_bounds_assume(name: str) -> None:
    """4 units of roundoff: measured against extended precision, near the ends of the range and between."""
    low, high = FUNCTIONS[name]
    rng = np.random.default_rng(1)
    x = rng.uniform(low, high, 200_000)
    if low > 0:
        x = np.concatenate([x, np.exp(rng.uniform(np.log(low), np.log(high), 200_000))])
    x = x[np.abs(x) < 708] if name == "exp" else x  # below, results are subnormal and counted as `tiny`
    exact = getattr(np, name)(x.astype(np.longdouble))
    if np.finfo(np.longdouble).eps > 2.0**-60:
        pytest.skip("this machine has no extended precision to compare with")
    off = np.abs(getattr(np, name)(x).astype(np.longdouble) / exact - 1)
    assert float(off[exact != 0].max()) <= 4 * 2.0**-53
