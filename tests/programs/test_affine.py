"""Affine folding: one function for exact numbers and for matrices, and the bound on what float64 makes of it."""

from __future__ import annotations

import operator
from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from attnforge.box import Box
from attnforge.programs.affine import Affine, fold_affine, forms, is_head, levels
from attnforge.programs.program import Builder, Program

NUMBERS = st.fractions(-3, 3, max_denominator=9)
FORMS = st.dictionaries(st.sampled_from("abc"), NUMBERS, max_size=3)


@given(st.lists(st.tuples(FORMS, NUMBERS, NUMBERS), max_size=4), NUMBERS, st.tuples(NUMBERS, NUMBERS, NUMBERS))
def test_folding_is_substitution(parts: list[tuple[dict[str, Fraction], Fraction, Fraction]], bias: Fraction,
                                 point: tuple[Fraction, ...]) -> None:  # fmt: skip
    at = dict(zip("abc", point, strict=True))

    def value(form: Affine[str, Fraction]) -> Fraction:
        return sum((at[atom] * c for atom, c in form.weight.items()), form.bias)

    inner = [(Affine(weight, constant), factor) for weight, constant, factor in parts]
    folded = fold_affine([*inner, ("a", Fraction(2))], bias, operator.mul)
    assert value(folded) == sum((value(form) * factor for form, factor in inner), bias + 2 * at["a"])


def chain(depth: int, seed: int) -> Program:
    """Affine maps of affine maps of sin(x) and x, one of which reads a value twice."""
    draw = np.random.default_rng(seed)
    build = Builder(Box.cube(-1, 1, shape=3))
    values = [build.input, build.apply(build.input, "sin")]
    for _ in range(depth):
        i, j = draw.integers(len(values), size=2)
        pairs = [(values[i], draw.normal(size=(3, 3))), (values[j], draw.normal(size=(3, 3)) / 3)]
        values.append(build.linear(list(pairs), draw.normal(size=3)))
    return build.program(values[-1], "chain")


def exact(matrix: np.ndarray) -> np.ndarray:
    return np.vectorize(Fraction, otypes=[object])(matrix)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 10**6))
def test_float64_folding_stays_within_its_bound(depth: int, seed: int) -> None:
    program = chain(depth, seed)
    true: list[Affine[int, np.ndarray]] = []
    for i, op in enumerate(program.ops):
        if is_head(program, i) or i == 0:
            true.append(Affine({i: exact(np.eye(op.width))}, exact(np.zeros(op.width))))
        else:
            reads = [(true[j], exact(w)) for j, w in zip(op.inputs, op.weights, strict=True)]  # type: ignore[attr-defined]
            true.append(fold_affine(reads, exact(op.bias)))  # type: ignore[attr-defined]
    for form, wanted in zip(forms(program), true, strict=True):
        unit = Fraction(form.terms, 2**53)
        assert form.weight.keys() == wanted.weight.keys() == form.size.keys()
        for atom, weight in form.weight.items():
            assert (abs(exact(weight) - wanted.weight[atom]) <= unit * exact(form.size[atom])).all()
        assert (abs(exact(form.bias) - wanted.bias) <= unit * exact(form.bias_size)).all()


def test_weights_of_a_value_read_twice_are_rounded() -> None:
    build = Builder(Box.cube(-1, 1, shape=1))
    program = build.program(build.linear([(0, [[0.1]]), (0, [[0.7]])], [0.0]), "0.1 x + 0.7 x")
    form = forms(program)[program.output]
    off = abs(Fraction(float(form.weight[0][0, 0])) - Fraction(0.1) - Fraction(0.7))
    assert 0 < off <= Fraction(form.terms, 2**53) * Fraction(float(form.size[0][0, 0]))


def test_levels_count_what_is_not_affine() -> None:
    program = chain(4, 1)
    found = levels(program, forms(program))
    assert found[0] == 0 and set(found) <= {0, 1}
