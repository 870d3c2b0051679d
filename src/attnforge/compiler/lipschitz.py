"""How far a network's output can move when its input does: certified Lipschitz constants (lemma H2 of docs/theory.md).

The chain rule over the stored network, with enclosures. For cells of the box the error analysis says which arguments
the heads of every site can see; their stored tables say how steep they are there (`Rule.slopes`); affine maps are the
stored matrices. What comes out are enclosures of the derivative of every output by every input, cell by cell, and cells
are split where they are widest. It is a statement about the stored numbers in real arithmetic: computed outputs of two
inputs differ by that and by twice the rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..dtypes import Array
from ..errors import CertificateError
from ..heads.families import rule_of
from ..heads.slopes import Tangent, stacked
from ..heads.stored import skip_of
from ..programs.affine import Column
from ..programs.enclose import centred, ranges
from ..programs.ops import Input, Normalise
from ..programs.positions import reads as values_read
from .course import Course
from .propagation import Propagation, outward_cells

FIRST = 64  # cells of the first pass: all of them at once cost little more than one
EFFORT = 1500  # cells that are looked at before giving up: a second for a formula of nine variables
BATCH = 48  # of the steepest cells are split in one round, for the same reason
CLOSE = 1.01  # cells are split until the constant is so close to what some cell is at least
U = 2.0**-53  # the roundoff of what is computed here

State = dict[Column, Tangent]  # column -> derivatives by the inputs, each (cell, token)


@dataclass(frozen=True, eq=False)
class SlopeBounds:
    """On cells what |d output / d input| is at most, (cell, output, input), what its sum over the inputs is at most,
    (cell, output), and what each is at least."""

    most: Array
    total: Array
    least: Array

    def kept(self, index: Array, more: SlopeBounds) -> SlopeBounds:
        """Some of the cells, and others."""
        pairs = zip((self.most, self.total, self.least), (more.most, more.total, more.least), strict=True)
        return SlopeBounds(*(np.concatenate([old[index], new]) for old, new in pairs))


@dataclass(frozen=True, eq=False)
class Lipschitz:
    """`matrix` bounds |d output_i / d input_j| on the whole box; `constant` is the largest sum of a row: a Lipschitz
    constant from the largest change of an input to the largest change of an output. `cells` were looked at."""

    matrix: Array
    constant: float
    inputs: tuple[str, ...]
    cells: int

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {most:.4g}" for name, most in zip(self.inputs, self.matrix.max(0), strict=True))
        return f"Lipschitz constant {self.constant:.6g} in the largest norm ({parts})"


def lipschitz(propagation: Propagation, effort: int = EFFORT) -> Lipschitz:
    """The certified constants of a stored network on its box."""
    program = propagation.layout.program
    low, high = outward_cells(program, FIRST, propagation.setting.dtype)
    shape, low, high = low.shape[1:], low.reshape(len(low), -1), high.reshape(len(high), -1)
    wide = np.maximum(high.max(0) - low.min(0), 1e-300)
    known, looked = _derivatives(propagation, low.reshape(-1, *shape), high.reshape(-1, *shape)), len(low)
    while looked < effort:
        rows = known.total.max(-1)
        worst = float(rows.max())
        if worst <= CLOSE * float(known.least.sum(-1).max()):
            break
        chosen = np.argsort(rows)[::-1][:BATCH]
        chosen = chosen[rows[chosen] >= (worst / CLOSE if np.isfinite(worst) else worst)]
        at, index = np.argmax((high[chosen] - low[chosen]) / wide, -1), 2 * np.arange(len(chosen))
        middle = 0.5 * (low[chosen, at] + high[chosen, at])
        new_low, new_high = np.repeat(low[chosen], 2, 0), np.repeat(high[chosen], 2, 0)
        new_high[index, at], new_low[index + 1, at] = middle, middle
        more = _derivatives(propagation, new_low.reshape(-1, *shape), new_high.reshape(-1, *shape))
        keep = np.ones(len(low), dtype=bool)
        keep[chosen] = False
        low, high = np.concatenate([low[keep], new_low]), np.concatenate([high[keep], new_high])
        known = known.kept(keep, more)
        looked += len(more.most)
    matrix = known.most.max(0) * (1 + 4 * U)
    if not np.isfinite(matrix).all():
        raise CertificateError("no finite Lipschitz constant can be proved for these weights")
    total = float(known.total.max() * (1 + 4 * matrix.shape[1] * U))
    return Lipschitz(matrix, total, program.box.names or tuple(f"x{i}" for i in range(matrix.shape[1])), looked)


def _derivatives(propagation: Propagation, low: Array, high: Array) -> SlopeBounds:
    """What is known on cells of |d output / d input|."""
    layout, reading, setting = propagation.layout, propagation.reading, propagation.setting
    program, count, inputs = layout.program, len(low), low[0].size
    with np.errstate(invalid="ignore", over="ignore"):
        found = ranges(program, low, high)
        course = Course([], [], {})
        propagation.errors(found, course)
    state: State = {}
    for value, channel in layout.first:
        start = np.zeros((count, program.tokens, inputs))
        if isinstance(program.ops[value], Input):
            at = np.arange(program.tokens)
            start[:, at, at * program.ops[value].width + channel] = 1.0
        state[value, channel] = Tangent(start, start, start.sum(-1))
    for number, step in enumerate(layout.steps):
        seen = _through(skip_of(reading.layer(2 * number), len(step.before))[0], step.before, step.columns, state)
        carry = skip_of(reading.layer(2 * number + 1), len(step.columns))[0][:, : len(step.carried)]
        state = _through(carry, step.columns, step.carried, seen)
        known = course.reads[number]
        for site in step.sites:
            rule, arguments, tangents = rule_of(site.family), [], []
            for v in values_read(program, site.op):
                columns = tuple((v, c) for c in range(program.ops[v].width))
                off = np.stack([known[column].sum(-1) for column in columns], -1) * (1 + 8 * U)
                r, op, moving = found[v], program.ops[site.op], {column: seen[column] for column in columns}
                if isinstance(op, Normalise) and op.centred:  # the heads do that first
                    matrix = op.centring[0]
                    r, off = centred(op, r), off @ np.abs(matrix) * (1 + 2.0**-40)
                    moving = _through(matrix, columns, columns, moving)
                least, most = rule.defined(site, setting, r)
                arguments.append((least - off, most + off))
                tangents.append(stacked([moving[column] for column in columns], 2))
            stored = reading.heads[site.op]
            out = rule.through(site, setting, propagation.local[site.op], stored, arguments, tangents)
            state |= {(site.op, c): out[:, :, c] for c in range(program.ops[site.op].width)}
    read_off = skip_of(reading.layer(2 * len(layout.steps)), len(layout.last))[0]
    last = stacked(list(_through(read_off, layout.last, layout.output, state).values()), 2)
    rows = slice(None) if program.output_rows == "all" else slice(1)
    low, high = (end[:, rows].reshape(count, -1, inputs) for end in last.ends)
    least = np.maximum(np.maximum(low, -high), 0.0)
    return SlopeBounds(np.maximum(-low, high), last.total[:, rows].reshape(count, -1), least)


def _through(matrix: Array, before: tuple[Column, ...], after: tuple[Column, ...], state: State) -> State:
    """Derivatives through a stored matrix, row b to column a."""
    if not after:
        return {}
    coming = stacked([state[column] for column in before], 2)
    up, down, size = np.maximum(matrix, 0.0), np.minimum(matrix, 0.0), np.abs(matrix)
    with np.errstate(invalid="ignore"):
        least = np.einsum("ctbi,ba->ctai", coming.low, up) + np.einsum("ctbi,ba->ctai", coming.high, down)
        most = np.einsum("ctbi,ba->ctai", coming.high, up) + np.einsum("ctbi,ba->ctai", coming.low, down)
        slack = np.einsum("ctbi,ba->ctai", np.maximum(np.abs(coming.low), np.abs(coming.high)), size)
        slack = 2 * (len(before) + 4) * U * slack
        total = np.einsum("ctb,ba->cta", coming.total, size) * (1 + (len(before) + 4) * U)
        through = Tangent.of((least - slack, most + slack), total)
    return {column: through[:, :, i] for i, column in enumerate(after)}
