"""Affine folding: values as affine functions of *atoms*, with everything affine in between put into one map.

`fold_affine` is the one place where that is done: with exact numbers while a formula is written down, with matrices
while the graph of a module is simplified, and for every value of a program in `forms`, which also bounds what float64
makes of the folded weights. There the atoms are the input, constants, and the results of operations that are heads:
what the state of a network carries from layer to layer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Generic, TypeVar

import numpy as np

from ..dtypes import Array
from .ops import Constant, Input, Linear
from .program import Program

Column = tuple[int, int]  # (value, channel)
Atom = TypeVar("Atom", bound=Hashable)
Factor = TypeVar("Factor", Array, Fraction)


@dataclass(frozen=True)
class Affine(Generic[Atom, Factor]):
    """The sum over atoms of atom * weight, plus a bias."""

    weight: dict[Atom, Factor]
    bias: Factor


def fold_affine(
    reads: Iterable[tuple[Atom | Affine[Atom, Factor], Factor]],
    bias: Factor,
    times: Callable[[Factor, Factor], Factor] = operator.matmul,
) -> Affine[Atom, Factor]:
    """The sum of value * factor over the pairs read, plus a bias, as one affine function of the values' atoms.

    A value is an atom, or an affine function of atoms. Weights are kept where they cancel. `times` multiplies weights
    by factors: matrices from the right, unless it says otherwise.

    >>> inner = fold_affine([("x", Fraction(2)), ("y", Fraction(3))], Fraction(1), operator.mul)
    >>> outer = fold_affine([(inner, Fraction(1, 2)), ("x", Fraction(-1))], Fraction(5), operator.mul)
    >>> {atom: str(weight) for atom, weight in outer.weight.items()}, str(outer.bias)
    ({'x': '0', 'y': '3/2'}, '11/2')
    """
    total: dict[Atom, Factor] = {}
    for value, factor in reads:
        if isinstance(value, Affine):
            parts = {atom: times(weight, factor) for atom, weight in value.weight.items()}
            bias = bias + times(value.bias, factor)
        else:
            parts = {value: factor}
        for atom, part in parts.items():
            total[atom] = total[atom] + part if atom in total else part
    return Affine(total, bias)


@dataclass(frozen=True)
class Form:
    """value = sum over atoms of atom @ weight + bias; `size` and `terms` bound how far float64 folding may be off.

    The folded weight is within `terms` * 2^-53 * size of the exact product of the program's own matrices.
    """

    weight: dict[int, Array]
    size: dict[int, Array]
    bias: Array
    bias_size: Array
    terms: int

    @property
    def atoms(self) -> tuple[int, ...]:
        """The atoms with a weight that is not zero."""
        return tuple(a for a, w in self.weight.items() if np.any(w))


def forms(program: Program) -> list[Form]:
    """One form for each value of the program."""
    found: list[Form] = []
    for i, op in enumerate(program.ops):
        if not isinstance(op, Linear):
            eye = np.eye(op.width)
            found.append(Form({i: eye}, {i: eye}, np.zeros(op.width), np.zeros(op.width), 0))
            continue
        exact: list[tuple[int | Affine[int, Array], Array]] = []
        sizes: list[tuple[int | Affine[int, Array], Array]] = []
        terms = len(op.inputs) if len(set(op.inputs)) < len(op.inputs) else 0  # weights of one atom are added up
        for j, matrix in zip(op.inputs, op.weights, strict=True):
            inner, folded = found[j], isinstance(program.ops[j], Linear)
            exact.append((Affine(inner.weight, inner.bias) if folded else j, matrix))
            sizes.append((Affine(inner.size, inner.bias_size) if folded else j, np.abs(matrix)))
            # an inner product of matrix.shape[0] terms, the sum over the inputs, and the bias
            terms = max(terms, inner.terms + matrix.shape[0] + len(op.inputs) + 2 if folded else 0)
        value, size = fold_affine(exact, op.bias), fold_affine(sizes, np.abs(op.bias))
        found.append(Form(value.weight, size.weight, value.bias, size.bias, terms))
    return found


def levels(program: Program, of: list[Form]) -> list[int]:
    """The layer after which each value is available: 0 for what is affine in the input."""
    level: list[int] = []
    for i, op in enumerate(program.ops):
        if isinstance(op, (Input, Constant)):
            level.append(0)
        elif isinstance(op, Linear):
            level.append(max((level[a] for a in of[i].atoms), default=0))
        else:
            level.append(1 + max(level[j] for j in op.inputs))
    return level


def is_head(program: Program, i: int) -> bool:
    """Whether operation i is carried out by heads."""
    return not isinstance(program.ops[i], (Input, Constant, Linear))


def affine_map(of: list[Form], before: Sequence[Column], after: Sequence[Column]) -> tuple[Array, Array]:
    """The matrix and bias that make the columns `after` out of the atoms `before`, in float64."""
    rows = {column: i for i, column in enumerate(before)}
    matrix, bias = np.zeros((len(before), len(after))), np.zeros(len(after))
    for i, (value, channel) in enumerate(after):
        bias[i] = of[value].bias[channel]
        for atom, weight in of[value].weight.items():
            for k in np.flatnonzero(weight[:, channel]):
                matrix[rows[atom, int(k)], i] = weight[k, channel]
    return matrix, bias


def folding_error(of: list[Form], before: Sequence[Column], after: Sequence[Column]) -> tuple[Array, Array]:
    """How far `affine_map` can be from the exact product of the program's matrices, entry by entry."""
    rows = {column: i for i, column in enumerate(before)}
    matrix, bias = np.zeros((len(before), len(after))), np.zeros(len(after))
    for i, (value, channel) in enumerate(after):
        form = of[value]
        unit = form.terms * 2.0**-52
        bias[i] = unit * form.bias_size[channel]
        if form.terms:
            for atom, size in form.size.items():
                for k in np.flatnonzero(size[:, channel]):
                    if (atom, int(k)) in rows:
                        matrix[rows[atom, int(k)], i] = unit * size[k, channel]
    return matrix, bias
