"""Affine folding: values as affine functions of *atoms*, with everything affine in between put into one map.

`fold_affine` is the one place where that is done: with exact numbers while a formula is written down, with matrices
while the graph of a module is simplified, and for every value of a program in `forms`, which also bounds what float64
makes of the folded weights. There the atoms are the input, constants, and the results of operations that are heads:
what the state of a network carries from layer to layer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from ..dtypes import Array
from ..functions.directed import dot_up, up
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
    """value = sum over atoms of atom @ weight + bias; `size`, `terms` and `slip` bound how far that may be off.

    The folded weight is within `terms` * 2^-53 * size of the exact product of the program's own matrices, and that
    within `slip` of the product of the matrices that are meant.
    """

    weight: dict[int, Array]
    size: dict[int, Array]
    slip: dict[int, Array]
    bias: Array
    bias_size: Array
    bias_slip: Array
    terms: int

    def error(self, atom: int | None = None) -> Array:
        """How far the weight of an atom, or the bias, can be from the one that is meant, entry by entry."""
        size, slip = (self.bias_size, self.bias_slip) if atom is None else (self.size[atom], self.slip[atom])
        off = self.terms * 2.0**-52 * size + slip
        return np.where(off > 0, up(up(off)), 0.0)

    @property
    def atoms(self) -> tuple[int, ...]:
        """The atoms with a weight that is not zero."""
        return tuple(a for a, w in self.weight.items() if np.any(w))


def folded(reads: Sequence[tuple[int | Form, Array, Array]], bias: Array, bias_off: Array) -> Form:
    """The sum of value @ matrix over what is read, plus a bias; each with how far the numbers meant may be from it.

    A value is an atom, or a form of atoms, which is put in its place.
    """
    exact: list[tuple[int | Affine[int, Array], Array]] = []
    sizes: list[tuple[int | Affine[int, Array], Array]] = []
    atoms = [value for value, _, _ in reads if not isinstance(value, Form)]
    few = sum(len(m) for _, m, _ in reads) < 32 and all(coarse(m) for _, m, _ in reads) and coarse(bias)
    terms = len(reads) if len(set(atoms)) < len(atoms) and not few else 0  # weights of one atom are added up
    slip: dict[int, Array] = {}
    for value, matrix, off in reads:
        if not isinstance(value, Form):
            slip[value] = _sum_up(slip[value], off) if value in slip else off
            exact.append((value, matrix))
            sizes.append((value, np.abs(matrix)))
            continue
        exact.append((Affine(value.weight, value.bias), matrix))
        sizes.append((Affine(value.size, value.bias_size), np.abs(matrix)))
        for atom, own in value.slip.items():
            more = _slipped(value.size[atom], own, value.terms, matrix, off)
            slip[atom] = _sum_up(slip[atom], more) if atom in slip else more
        bias_off = _sum_up(bias_off, _slipped(value.bias_size, value.bias_slip, value.terms, matrix, off))
        # an inner product of the entries that a column reads, the sum over the inputs, and the bias
        rounds = len(reads) > 1 or not selects(matrix) or bool(bias.any() and value.bias.any())
        rounds = rounds and not (few and all(map(coarse, (*value.weight.values(), value.bias))))
        most = int((matrix != 0).sum(0).max())
        terms = max(terms, value.terms + (most + len(reads) + 2 if rounds else 0))
    total, size = fold_affine(exact, bias), fold_affine(sizes, np.abs(bias))
    return Form(total.weight, size.weight, slip, total.bias, size.bias, bias_off, terms)


def coarse(numbers: Array) -> bool:
    """Whether all are multiples of 2^-20 of at most 16: of such numbers, 32 products and their sum are exact."""
    return bool(numbers.shape[0] <= 32 and (np.abs(numbers) <= 16).all() and (numbers * 2.0**20 % 1 == 0).all())


def selects(matrix: Array) -> bool:
    """Whether every column reads one entry, times a power of two: nothing is rounded by that."""
    return bool(((matrix != 0).sum(0) <= 1).all() and (np.abs(np.frexp(matrix[matrix != 0])[0]) == 0.5).all())


def forms(program: Program) -> list[Form]:
    """One form for each value of the program."""
    found: list[Form] = []
    for i, op in enumerate(program.ops):
        if isinstance(op, Linear):
            values = [found[j] if isinstance(program.ops[j], Linear) else j for j in op.inputs]
            *offs, bias_off = op.slack
            found.append(folded(list(zip(values, op.weights, offs, strict=True)), op.bias, bias_off))
        else:
            eye, nothing = np.eye(op.width), np.zeros(op.width)
            found.append(Form({i: eye}, {i: eye}, {i: np.zeros_like(eye)}, nothing, nothing, nothing, 0))
    return found


def _slipped(size: Array, slip: Array, terms: int, matrix: Array, off: Array) -> Array:
    """How far (w + d)(m + o) can be from w m, for |w| of at most `size`, |d| of at most `slip` and |o| of `off`."""
    if not (slip.any() or off.any()):
        return np.zeros((*size.shape[:-1], matrix.shape[1]))
    wide = _sum_up(size * (1 + (terms + 2) * 2.0**-52), slip)
    return _sum_up(dot_up(slip, np.abs(matrix)), dot_up(wide, off))


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
    matrix, bias = np.zeros((len(before), len(after))), np.zeros(len(after))
    places = _places(before)
    for value, made, channels in _by_value(after):
        bias[made] = of[value].bias[channels]
        for atom, weight in of[value].weight.items():
            some = weight[:, channels]
            read = np.flatnonzero(some.any(1))
            matrix[_grid([places[atom, int(k)] for k in read], made)] = some[read]
    return matrix, bias


def folding_error(of: list[Form], before: Sequence[Column], after: Sequence[Column]) -> tuple[Array, Array]:
    """How far `affine_map` can be from the product of the matrices that are meant, entry by entry."""
    matrix, bias = np.zeros((len(before), len(after))), np.array([of[value].error()[c] for value, c in after])
    places = _places(before)
    for atom, made, error in _errors(of, after):
        read = [k for k in np.flatnonzero(error.any(1)) if (atom, int(k)) in places]
        matrix[_grid([places[atom, int(k)] for k in read], made)] = error[read]
    return matrix, bias


def dropped(of: list[Form], before: Sequence[Column], after: Sequence[Column]) -> list[tuple[int, Column, float]]:
    """Which column of `after` should read which atom that is not `before`, since its weight cancels in float64, and
    how large that weight may be."""
    known = set(before)
    return [
        (int(made[i]), (atom, int(k)), float(error[k, i]))
        for atom, made, error in _errors(of, after)
        for k in np.flatnonzero(error.any(1))
        if (atom, int(k)) not in known
        for i in np.flatnonzero(error[k])
    ]


def _grid(rows: list[int], columns: list[int]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """An index for all of these rows and columns."""
    return np.array(rows, dtype=np.intp)[:, None], np.array(columns, dtype=np.intp)[None]


def _places(columns: Sequence[Column]) -> dict[Column, int]:
    return {column: i for i, column in enumerate(columns)}


def _by_value(columns: Sequence[Column]) -> Iterator[tuple[int, list[int], list[int]]]:
    """Columns by the value they belong to: the value, their places and their channels."""
    groups: dict[int, tuple[list[int], list[int]]] = {}
    for i, (value, channel) in enumerate(columns):
        made, channels = groups.setdefault(value, ([], []))
        made.append(i)
        channels.append(channel)
    for value, (made, channels) in groups.items():
        yield value, made, channels


def _errors(of: list[Form], after: Sequence[Column]) -> Iterator[tuple[int, list[int], Array]]:
    """How far weights of an atom may be off: the atom, the places of the columns that are made, (row, column)."""
    for value, made, channels in _by_value(after):
        for atom in of[value].size:
            error = of[value].error(atom)[:, channels]
            if error.any():
                yield atom, made, error


def _sum_up(a: Array, b: Array) -> Array:
    """An upper bound of a + b for non-negative numbers; 0 where both are."""
    return np.where(a + b > 0, up(a + b), 0.0)
