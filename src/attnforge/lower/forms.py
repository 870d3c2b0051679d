"""Every value of a program as an affine form in *atoms*: the input, constants, and the results of operations that
are heads.

Atoms are what the state of a network carries from layer to layer; everything affine in between folds into one map.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..ir.ops import Array, Constant, Input, Linear
from ..ir.program import Program

Column = tuple[int, int]  # (value, channel)


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
        weight: dict[int, Array] = {}
        size: dict[int, Array] = {}
        bias, bias_size, terms = op.bias.copy(), np.abs(op.bias), 0
        for j, matrix in zip(op.inputs, op.weights, strict=True):
            inner = found[j]
            folded = isinstance(program.ops[j], Linear)
            terms = max(terms, inner.terms + (matrix.shape[0] + len(op.inputs) + 2 if folded else 0))
            for atom, w in inner.weight.items():
                weight[atom] = weight.get(atom, 0.0) + (w @ matrix if folded else matrix)
                size[atom] = size.get(atom, 0.0) + inner.size[atom] @ np.abs(matrix)
            bias = bias + inner.bias @ matrix
            bias_size = bias_size + inner.bias_size @ np.abs(matrix)
        found.append(Form(weight, size, bias, bias_size, terms))
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
