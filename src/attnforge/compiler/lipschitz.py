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
from ..heads.slopes import Enclosure, plus, times
from ..heads.stored import skip_of
from ..programs.affine import Column
from ..programs.enclose import ranges
from ..programs.ops import Input
from ..programs.positions import reads as values_read
from .propagation import Propagation, outward_cells

FIRST = 64  # cells of the first pass
EFFORT = 1500  # cells that are looked at before giving up
BATCH = 48  # of the steepest cells are split in one round
CLOSE = 1.01  # cells are split until the constant is so close to what some cell is at least
U = 2.0**-53  # the roundoff of what is computed here

State = dict[Column, Enclosure]  # column -> derivatives by the inputs, each (cell, input)


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
    if program.tokens != 1:
        raise CertificateError(
            f"Lipschitz constants are for networks of one token so far, this one has {program.tokens}; "
            "heads have their own: head.lipschitz()"
        )
    low, high = outward_cells(program, FIRST, propagation.setting.dtype)
    shape, low, high = low.shape[1:], low.reshape(len(low), -1), high.reshape(len(high), -1)
    wide = np.maximum(high.max(0) - low.min(0), 1e-300)
    known, looked = _derivatives(propagation, low.reshape(-1, *shape), high.reshape(-1, *shape)), len(low)
    while looked < effort:
        rows = known[0].sum(-1).max(-1)
        worst = float(rows.max())
        if worst <= CLOSE * float(known[1].sum(-1).max()):
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
        known = np.concatenate([known[:, keep], more], 1)
        looked += more.shape[1]
    found = known[0]
    matrix = found.max(0) * (1 + 4 * U)
    if not np.isfinite(matrix).all():
        raise CertificateError("no finite Lipschitz constant can be proved for these weights")
    total = float(found.sum(-1).max() * (1 + 4 * matrix.shape[1] * U))
    return Lipschitz(matrix, total, program.box.names or tuple(f"x{i}" for i in range(matrix.shape[1])), looked)


def _derivatives(propagation: Propagation, low: Array, high: Array) -> Array:
    """What |d output / d input| is at most and at least on cells, (2, cell, output, input)."""
    layout, reading, setting = propagation.layout, propagation.reading, propagation.setting
    program, count, inputs = layout.program, len(low), low[0].size
    with np.errstate(invalid="ignore", over="ignore"):
        found = ranges(program, low, high)
        errors: list[dict[Column, Array]] = []
        propagation.errors(found, errors)
    state: State = {}
    for value, channel in layout.first:
        start = np.zeros((count, inputs))
        if isinstance(program.ops[value], Input):
            start[:, channel] = 1.0
        state[value, channel] = start, start
    for number, step in enumerate(layout.steps):
        seen = _through(skip_of(reading.layer(2 * number), len(step.before))[0], step.before, step.columns, state)
        carry = skip_of(reading.layer(2 * number + 1), len(step.columns))[0][:, : len(step.carried)]
        state = _through(carry, step.columns, step.carried, seen)
        known = errors[2 * number]
        for site in step.sites:
            values, width = values_read(program, site.op), program.ops[site.op].width
            rule, local = rule_of(site.family), propagation.local[site.op]
            arguments = []
            for v in values:
                off = np.stack([known[v, c].sum(-1) for c in range(program.ops[v].width)], -1) * (1 + 8 * U)
                least, most = rule.defined(site, setting, found[v])
                arguments.append((least - off, most + off))
            inside = [_inside(a, span) for a, span in zip(arguments, local.intervals, strict=False)]
            partials = rule.slopes(site, setting, reading.heads[site.op], [_clipped(a, s) for a, s in
                                   zip(arguments, local.intervals, strict=False)])  # fmt: skip
            for c in range(width):
                parts = []
                for v, (least, most), good in zip(values, partials, inside, strict=True):
                    ends = np.where(good, least[:, 0, c], -np.inf), np.where(good, most[:, 0, c], np.inf)
                    parts.append(times((ends[0][:, None], ends[1][:, None]), seen[v, c]))
                state[site.op, c] = plus(*parts)
    read_off = skip_of(reading.layer(2 * len(layout.steps)), len(layout.last))[0]
    last = _through(read_off, layout.last, layout.output, state)
    low, high = (np.stack([last[column][side] for column in layout.output], 1) for side in (0, 1))
    return np.stack([np.maximum(-low, high), np.maximum(np.maximum(low, -high), 0.0)])


def _inside(argument: Enclosure, span: tuple[float, float]) -> Array:
    """Cells on which an argument stays where its heads are known."""
    return np.asarray(((argument[0] >= span[0]) & (argument[1] <= span[1])).all((1, 2)))


def _clipped(argument: Enclosure, span: tuple[float, float]) -> Enclosure:
    with np.errstate(invalid="ignore"):
        low, high = (np.clip(np.nan_to_num(a, nan=span[0]), *span) for a in argument)
    return low, np.maximum(low, high)


def _through(matrix: Array, before: tuple[Column, ...], after: tuple[Column, ...], state: State) -> State:
    """Derivatives through a stored matrix, row b to column a."""
    low, high = (np.stack([state[column][side] for column in before], 1) for side in (0, 1))
    up, down = np.maximum(matrix, 0.0), np.minimum(matrix, 0.0)
    with np.errstate(invalid="ignore"):
        least = np.einsum("cbi,ba->cai", low, up) + np.einsum("cbi,ba->cai", high, down)
        most = np.einsum("cbi,ba->cai", high, up) + np.einsum("cbi,ba->cai", low, down)
        size = np.einsum("cbi,ba->cai", np.maximum(np.abs(low), np.abs(high)), np.abs(matrix))
    slack = 2 * (len(before) + 4) * U * size
    least, most = least - slack, most + slack
    least, most = np.where(np.isnan(least), -np.inf, least), np.where(np.isnan(most), np.inf, most)
    return {column: (least[:, i], most[:, i]) for i, column in enumerate(after)}
