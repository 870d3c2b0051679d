"""Labels with their proofs (lemmas V1 and V2 of docs/verification.md).

*unsat*: the box is cut into cells; on each the program is enclosed, the certificate says how far the network can be
from it, and some comparison of every clause fails by a margin. *sat*: a witness, at which the graph's own numbers in
ball arithmetic make all comparisons of a clause true by a margin. Both hold for real numbers and for computed ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from flint import arb

from ..compiler.propagation import influence
from ..dtypes import Array
from ..functions.directed import U, up
from ..kernel import balls as numbers
from ..programs.enclose import Range, ranges
from ..programs.program import Program
from .balls import enclosed
from .graph import Reading
from .property import Atom, Property

EFFORT = 1 << 15  # cells that are looked at before giving up: some seconds for the networks of a pack
BATCH = 1 << 10  # cells at once: what stays in a processor's cache


@dataclass(frozen=True)
class Refutation:
    """By how much every input of the box misses the property, in the network, and how many cells showed it."""

    margin: float
    cells: int


def refuted(program: Program, bound: float, claim: Property, goal: float = 0.0, effort: int = EFFORT) -> Refutation:
    """By how much a network within `bound` of a program misses a property on its box; a margin above 0 makes it unsat.

    Cells are split until their margin is at least `goal`, or `effort` of them have been looked at: the margin that is
    returned is proved whatever was asked for, and below 0 where nothing was.
    """
    shape = (1, program.tokens, program.ops[0].width)
    waiting = [(np.array(claim.low).reshape(shape), np.array(claim.high).reshape(shape))]
    worst, cells = math.inf, 0
    while waiting:
        low, high = (np.concatenate(side) for side in zip(*waiting, strict=True))
        cells += len(low)
        looked = zip(*_looked_at(program, bound, claim, low, high), strict=True)
        margins, matters = (np.concatenate(part) for part in looked)
        open_ = margins < goal
        if cells + 2 * int(open_.sum()) > effort:
            return Refutation(min(worst, float(margins.min())), cells)
        worst = min(worst, float(margins[~open_].min(initial=math.inf)))
        flat = (high - low).reshape(len(low), -1)[open_]
        if not (flat > 0).any(-1).all():  # a point that misses by less than wanted
            return Refutation(min(worst, float(margins.min())), cells)
        waiting = [] if not open_.any() else list(_halves(low[open_], high[open_], matters[open_]))
    return Refutation(worst, cells)


def _looked_at(
    program: Program, bound: float, claim: Property, low: Array, high: Array
) -> Iterator[tuple[Array, Array]]:
    """For each cell its margin, and how much each coordinate matters there."""
    for first in range(0, len(low), BATCH):
        part = slice(first, first + BATCH)
        with np.errstate(invalid="ignore", over="ignore"):
            found = ranges(program, low[part], high[part])
            output, known = found[program.output], np.ones(len(found[0].low), dtype=bool)
            for r in found:
                known &= np.all(np.isfinite(r.low) & np.isfinite(r.high), axis=(1, 2))
            reached = [
                np.min([_reached(atom, output, bound) for atom in clause], axis=0) for clause in claim.clauses
            ]
            margins = -np.max(reached, axis=0)
        yield np.where(known & ~np.isnan(margins), margins, -np.inf), influence(found)


def _reached(atom: Atom, output: Range, bound: float) -> Array:
    """On each cell an upper bound of (weights . Y - number) for the network's outputs: above 0, the atom may hold."""
    weights, threshold = atom.form()
    width = output.low.shape[-1]
    places = [((slice(None), *divmod(i, width)), sign) for i, sign in weights.items()]
    top = sum((output.high[at] if sign > 0 else -output.low[at] for at, sign in places), np.zeros(1))
    top = up(top)
    if output.tilt is not None and len(places) > 1:  # a difference, in which what both share cancels
        tilt = output.tilt
        slope = sum((sign * tilt.slope[at] for at, sign in places), np.zeros(1))
        lost = 4 * U * sum((np.abs(tilt.slope[at]).sum(-1) for at, _ in places), np.zeros(1))
        reach = (np.abs(slope).sum(-1) + lost) * (1 + (slope.shape[-1] + 4) * U)
        rest = sum((tilt.high[at] if sign > 0 else -tilt.low[at] for at, sign in places), np.zeros(1))
        top = np.minimum(top, up(up(rest) + reach))
    return up(up(top - threshold) + np.nextafter(atom.outputs * bound, np.inf))


def _halves(low: Array, high: Array, matters: Array) -> Iterator[tuple[Array, Array]]:
    """Cells cut in two along the coordinate that matters most."""
    count, rows = len(low), np.arange(len(low))
    flat_low, flat_high = low.reshape(count, -1), high.reshape(count, -1)
    wide = flat_high > flat_low
    matters = np.where(matters.max(-1, keepdims=True) > 0, matters, flat_high - flat_low)
    at = np.argmax(np.where(wide, matters, -1.0), -1)
    middle = 0.5 * flat_low[rows, at] + 0.5 * flat_high[rows, at]
    left, right = flat_high.copy(), flat_low.copy()
    left[rows, at] = right[rows, at] = np.clip(middle, flat_low[rows, at], flat_high[rows, at])
    yield low, left.reshape(low.shape)
    yield right.reshape(low.shape), high


@dataclass(frozen=True)
class Witness:
    """By how much a point makes a property true, and where the outputs lie there."""

    margin: float
    outputs: tuple[tuple[float, float], ...]


def witnessed(graph: Reading, claim: Property, point: Sequence[float]) -> Witness:
    """By how much a point of the box makes a property true, in real numbers and as computed; above 0 makes it sat."""
    found = enclosed(graph, point, point)
    with numbers.working():
        margin = max(min(_least(atom, found) for atom in clause) for clause in claim.clauses)
        return Witness(margin, tuple((numbers.down(y), numbers.up(y)) for y in found))


def _least(atom: Atom, outputs: list[arb]) -> float:
    weights, threshold = atom.form()
    return numbers.down(sum((sign * outputs[i] for i, sign in weights.items()), numbers.ZERO) - arb(threshold))


def propagated(graph: Reading, claim: Property) -> bool:
    """Whether interval propagation alone shows that a property is unsat."""
    found = enclosed(graph, claim.low, claim.high)
    with numbers.working():
        return all(any(_most(atom, found) < 0 for atom in clause) for clause in claim.clauses)


def _most(atom: Atom, outputs: list[arb]) -> float:
    weights, threshold = atom.form()
    return numbers.up(sum((sign * outputs[i] for i, sign in weights.items()), numbers.ZERO) - arb(threshold))


