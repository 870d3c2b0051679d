"""A program made ready for attention: positions next to the data, and norms of centred values.

Attention cannot tell tokens apart unless they carry their position. Operations that treat tokens differently (a mask,
a fixed mixing matrix) read one-hot positions, a constant value of the program. Layer norm becomes an affine map, the
centring, and an rms norm. Both rewrites keep the meaning of the program exactly (see `_centring` for eps).
"""

from __future__ import annotations

import math

import numpy as np

from ..dtypes import Array
from .ops import Attention, Constant, Linear, Mix, Normalise, Op
from .program import Program


def prepared(program: Program) -> Program:
    """The same function, with centring as affine maps and with a value that holds positions where one is needed.

    >>> from attnforge.box import Box
    >>> from attnforge.programs.program import Builder
    >>> build = Builder(Box.cube(-1, 1, shape=(2, 2)), tokens=2)
    >>> print(prepared(build.program(build.normalise(build.mix(0, [[0, 1], [1, 0]])), "swap, then norm")))
    program of 2 tokens: swap, then norm
      %0 = input : 2
      %1 = constant [2x2]          # positions
      %2 = mix %0 [2x2]
      %3 = linear %2 [2x2]         # centred
      %4 = normalise %3 eps 1e-05 uncentred
      output %4 : 2x2
    """
    wanted = any(needs_positions(op, program.tokens) for op in program.ops) and positions_of(program) is None
    if not wanted and not any(isinstance(op, Normalise) and op.centred for op in program.ops):
        return program
    ops: list[Op] = []
    labels: list[str] = []
    new: dict[int, int] = {}
    for i, (op, label) in enumerate(zip(program.ops, program.labels, strict=True)):
        moved = op.renamed(new)
        if isinstance(moved, Normalise) and moved.centred:
            matrix, eps = _centring(moved.width, moved.eps)
            ops.append(Linear((moved.input,), (matrix,), np.zeros(moved.width)))
            labels.append("centred")
            moved = Normalise(len(ops) - 1, moved.width, eps, centred=False)
        new[i] = len(ops)
        ops.append(moved)
        labels.append(label)
        if i == 0 and wanted:
            ops.append(Constant(np.eye(program.tokens)))
            labels.append("positions")
    shape, rows = program.output_shape, program.output_rows
    output = new[program.output]
    return Program(program.box, program.tokens, tuple(ops), output, shape, rows, program.source, tuple(labels))


def _centring(width: int, eps: float) -> tuple[Array, float]:
    """The centring matrix, exact in binary: scaled by the width unless that is a power of two; eps scales with it.

    Scaling eps may round it, by 2^-53 of itself; the error rule of norms counts that.
    """
    scale = 1.0 if math.log2(width).is_integer() else float(width)
    return scale * np.eye(width) - scale / width, scale * scale * eps


def needs_positions(op: Op, tokens: int) -> bool:
    """Whether an operation treats tokens differently, beyond a causal order."""
    if isinstance(op, Attention):
        return op.mask is not None
    return isinstance(op, Mix) and average(op.matrix) is None


def average(matrix: Array) -> tuple[float, bool] | None:
    """(gain, causal) of a matrix that is a multiple of the mean or the prefix mean of tokens: no positions needed.

    >>> average(np.ones((3, 3))), average(np.array([[1.0, 0.0], [0.5, 0.5]])), average(np.eye(2))
    ((3.0, False), (1.0, True), None)
    """
    n = len(matrix)
    if np.all(matrix == matrix[0, 0]):
        return n * float(matrix[0, 0]), False
    gain = float(matrix[0, 0])
    prefix = np.tril(np.ones((n, n))) * gain / np.arange(1, n + 1)[:, None]
    return (gain, True) if np.array_equal(matrix, prefix) else None


def positions_of(program: Program) -> int | None:
    """The value that holds one-hot positions, if there is one."""
    eye = np.eye(program.tokens)
    found = (i for i, op in enumerate(program.ops) if isinstance(op, Constant) and np.array_equal(op.value, eye))
    return next(found, None)


def reads(program: Program, i: int) -> tuple[int, ...]:
    """The values that the heads of operation i read: its inputs, then the positions if it needs them."""
    op = program.ops[i]
    if not needs_positions(op, program.tokens):
        return op.inputs
    place = positions_of(program)
    assert place is not None, "a program is prepared before it is laid out"
    return (*op.inputs, place)
