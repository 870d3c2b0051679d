"""Labels with their proofs (lemmas V1 and V2 of docs/verification.md).

*unsat*: the box is cut into cells; on each the program is enclosed, the certificate says how far the network can be
from it, and some comparison of every clause fails by a margin. *sat*: a witness, at which the graph's own numbers in
ball arithmetic make all comparisons of a clause true by a margin. Both hold for real numbers and for computed ones.

`enclosed` is the graph in ball arithmetic: every value is enclosed by a ball that holds its real value and every value
that a machine may compute: operations rounded to nearest, fused or not, sums in any order, exponentials within the
allowance of the certificates. With a point for input this checks a witness; with a box it is interval propagation, the
simplest of verifiers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from flint import arb

from ..compiler.propagation import influence
from ..dtypes import Array
from ..errors import CertificateError
from ..functions.directed import U, up
from ..kernel import balls as numbers
from ..kernel.balls import ZERO, hull, largest, size, working
from ..kernel.rounding import EXPONENTIAL, MACHINES, Machine
from ..programs.enclose import Range, ranges
from ..programs.program import Program
from .graph import MOST_ENTRIES, OperatorNode, StoredGraph, shaped
from .property import Atom, Property

REAL = Machine(ZERO, ZERO, arb.pos_inf())  # real numbers: nothing is rounded, nothing too large
Balls = npt.NDArray[Any]  # of arb


def enclosed(graph: StoredGraph, low: Sequence[float], high: Sequence[float], real: bool = False) -> list[arb]:
    """A ball for each output: its value for every input low <= X <= high, real and as computed in the graph's dtype.

    With `real`, the value over the real numbers alone. `CertificateError` where numbers may overflow.
    """
    if not len(low) == len(high) == graph.inputs:
        raise CertificateError(f"the graph takes {graph.inputs} numbers, got {len(low)} and {len(high)}")
    machine = REAL if real else MACHINES[graph.dtype]
    with working():
        values: dict[str, Balls] = {name: _exact(table) for name, table in graph.constants.items()}
        values["X"] = _array([hull(a, b) for a, b in zip(low, high, strict=True)]).reshape(1, -1)
        means: set[str] = set()  # results of a softmax: rows that add up to 1
        for node in graph.nodes:
            values[node.output] = _kept(node, [values[name] for name in node.inputs], machine, node.inputs[0] in means)
            if node.op == "Softmax":
                means.add(node.output)
        found = list(values["Y"].ravel())
        if len(found) != graph.outputs:
            raise CertificateError(f"the graph gives {len(found)} numbers and says {graph.outputs}")
        return found


def _kept(node: OperatorNode, given: list[Balls], machine: Machine, mean: bool) -> Balls:
    try:
        found = _computed(node, given, machine, mean)
    except ValueError as error:
        raise CertificateError(f"the shapes of a graph do not fit at {node.op}: {error}") from error
    if not all(size(x) < machine.huge for x in found.flat):
        raise CertificateError(f"numbers may overflow at {node.op}, result {node.output}")
    return found


def _computed(node: OperatorNode, given: list[Balls], machine: Machine, mean: bool) -> Balls:
    if node.op in ("Transpose", "Reshape"):
        return np.asarray(shaped(given[0], node))
    if node.op == "Softmax":
        rows = given[0].reshape(-1, given[0].shape[-1])
        return _array([x for row in rows for x in _softmax(list(row), machine)]).reshape(given[0].shape)
    if node.op == "Add":
        both = given[0] + given[1]
        return _array([_rounded(x, machine) for x in both.flat]).reshape(both.shape)
    return _product(given[0], given[1], machine, mean)


def _product(a: Balls, b: Balls, machine: Machine, mean: bool) -> Balls:
    """a @ b; where rows of a are a softmax, a result is a mean of the entries of b, too."""
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"{a.shape} times {b.shape}")
    left, right = np.broadcast_arrays(a[..., :, :, None], b[..., None, :, :])
    if left.size > MOST_ENTRIES:
        raise ValueError(f"a product of {left.size:,} terms is too large")
    terms = np.asarray(_TIMES(left, right)).swapaxes(-2, -1)
    columns = np.asarray(right).swapaxes(-2, -1)
    out = [_sum(list(row), machine) for row in terms.reshape(-1, terms.shape[-1])]
    if mean:
        out = [
            _both(x, _mean(list(column), machine))
            for x, column in zip(out, columns.reshape(-1, terms.shape[-1]), strict=True)
        ]
    return _array(out).reshape(terms.shape[:-1])


def _sum(terms: list[arb], machine: Machine) -> arb:
    """A sum of products: as many roundings as there are terms that are not 0 (lemma K1), in any order."""
    used = [x for x in terms if not x.is_zero()]
    total = sum(used, ZERO)
    if not used:
        return total
    reach = sum((size(x) for x in used), ZERO)
    if not reach < machine.huge:  # a sum may be small where what is added up on the way is not
        raise CertificateError("numbers may overflow at MatMul, on the way to a sum")
    error = machine.gamma(len(used)) * reach + 2 * len(used) * machine.tiny
    return total + arb(0, 1) * size(error)


def _mean(values: list[arb], machine: Machine) -> arb:
    """Where a mean of values lies, whose weights are a softmax as computed."""
    count, ends = len(values), values[0]
    for value in values[1:]:
        ends = ends.union(value)
    most = largest([size(x) for x in values])
    return ends + arb(0, 1) * size(machine.gamma(3 * count + 8) * most + 8 * count * machine.tiny * (1 + most))


def _softmax(logits: list[arb], machine: Machine) -> list[arb]:
    """The weights of a softmax, each from the best and the worst case of all logits."""
    count, top = len(logits), logits[0].upper()
    for x in logits[1:]:
        top = top.max(x.upper()).upper()
    allowance = -(1 - EXPONENTIAL * machine.u).log()
    least, most = [], []
    for x in logits:  # subtracting the largest logit rounds once, the exponential errs by its allowance
        moved = size(machine.u * size(top - x.lower()) + allowance)
        least.append((x.lower() - top - moved).lower().exp())
        most.append((x.upper() - top + moved).upper().exp())
    roundings = machine.gamma(count + 2)
    out = []
    for i in range(count):
        others_least, others_most = (sum(t[:i] + t[i + 1 :], ZERO) for t in (least, most))
        first, last = least[i] / (least[i] + others_most), most[i] / (most[i] + others_least)
        ends = first.lower().union(last.upper())
        out.append(ends + arb(0, 1) * size(roundings * size(ends) + 4 * (count + 1) * machine.tiny))
    return out


def _times(a: arb, b: arb) -> arb:
    """A product by its corners where both sides are wide: balls alone would reach further."""
    if a.is_zero() or b.is_zero():
        return ZERO
    if a.is_exact() or b.is_exact():
        return a * b
    corners = [x * y for x, y in itertools.product((a.lower(), a.upper()), (b.lower(), b.upper()))]
    found = corners[0]
    for corner in corners[1:]:
        found = found.union(corner)
    return found


def _both(a: arb, b: arb) -> arb:
    """The numbers of two balls, one of which is tighter: a ball around what they share."""
    low, high = a.lower().max(b.lower()), a.upper().min(b.upper())
    return low.union(high)


def _rounded(x: arb, machine: Machine) -> arb:
    return x + arb(0, 1) * size(machine.u * size(x) + machine.tiny)


def _exact(table: np.ndarray) -> Balls:
    return _array([arb(float(x)) for x in table.flat]).reshape(table.shape)


def _array(balls: list[arb]) -> Balls:
    out = np.empty(len(balls), dtype=object)
    out[:] = balls
    return out


_TIMES = np.frompyfunc(_times, 2, 1)


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
class WitnessPoint:
    """By how much a point makes a property true, and where the outputs lie there."""

    margin: float
    outputs: tuple[tuple[float, float], ...]


def witnessed(graph: StoredGraph, claim: Property, point: Sequence[float]) -> WitnessPoint:
    """By how much a point of the box makes a property true, in real numbers and as computed; above 0 makes it sat."""
    found = enclosed(graph, point, point)
    with numbers.working():
        margin = max(min(_least(atom, found) for atom in clause) for clause in claim.clauses)
        return WitnessPoint(margin, tuple((numbers.down(y), numbers.up(y)) for y in found))


def _least(atom: Atom, outputs: list[arb]) -> float:
    weights, threshold = atom.form()
    return numbers.down(sum((sign * outputs[i] for i, sign in weights.items()), numbers.ZERO) - arb(threshold))


def propagated(graph: StoredGraph, claim: Property) -> bool:
    """Whether interval propagation alone shows that a property is unsat."""
    found = enclosed(graph, claim.low, claim.high)
    with numbers.working():
        return all(any(_most(atom, found) < 0 for atom in clause) for clause in claim.clauses)


def _most(atom: Atom, outputs: list[arb]) -> float:
    weights, threshold = atom.form()
    return numbers.up(sum((sign * outputs[i] for i, sign in weights.items()), numbers.ZERO) - arb(threshold))


