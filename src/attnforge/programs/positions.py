"""A program made ready for attention: positions next to the data, and norms of centred values.

Attention cannot tell tokens apart unless they carry their position. Operations that treat tokens differently (a mask,
a fixed mixing matrix) read one-hot positions, a constant value of the program. Layer norm becomes an affine map, the
centring, and an rms norm. Rows of the input are centred by the heads themselves, which read how far its channels are
from the first: differences of numbers that are exact are rounded in proportion to what they are (lemma G3). These
rewrites keep the meaning of the program exactly (see `Normalise.centring` for eps).
"""

from __future__ import annotations

import numpy as np

from ..dtypes import Array
from .affine import selects
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
            exact = moved.width > 1 and _is_input(ops[moved.input], moved.input)
            matrix, eps = (_less_the_first(moved.width), moved.eps) if exact else moved.centring
            ops.append(Linear((moved.input,), (matrix,), np.zeros(moved.width)))
            labels.append("less the first" if exact else "centred")
            moved = Normalise(len(ops) - 1, moved.width, eps, centred=exact)
        new[i] = len(ops)
        ops.append(moved)
        labels.append(label)
        if i == 0 and wanted:
            ops.append(Constant(np.eye(program.tokens)))
            labels.append("positions")
    shape, rows = program.output_shape, program.output_rows
    output = new[program.output]
    return Program(program.box, program.tokens, tuple(ops), output, shape, rows, program.source, tuple(labels))


def _is_input(op: Op, input: int) -> bool:
    """Whether a value is the input of the program, or a selection of its channels times powers of two."""
    if isinstance(op, Linear):
        return op.inputs == (0,) and selects(op.weights[0]) and not op.bias.any() and op.off is None
    return input == 0


def _less_the_first(width: int) -> Array:
    """The matrix that takes the first channel from every channel, itself as well."""
    matrix = np.eye(width)
    matrix[0] -= 1.0
    return matrix


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
