"""A graph in ball arithmetic: at a point, or interval by interval over a box (lemma V2 of docs/verification.md).

Every value of the graph is enclosed by a ball that holds its real value and every value that a machine may compute:
operations rounded to nearest, fused or not, sums in any order, exponentials within the allowance of the certificates.
With a point for input this checks a witness; with a box it is interval propagation, the simplest of verifiers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from flint import arb

from ..errors import CertificateError
from ..kernel.balls import ZERO, hull, largest, size, working
from ..kernel.rounding import EXPONENTIAL, MACHINES, Machine
from .graph import MOST_ENTRIES, Node, Reading, shaped

REAL = Machine(ZERO, ZERO, arb.pos_inf())  # real numbers: nothing is rounded, nothing too large
Balls = npt.NDArray[Any]  # of arb


def enclosed(graph: Reading, low: Sequence[float], high: Sequence[float], real: bool = False) -> list[arb]:
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


def _kept(node: Node, given: list[Balls], machine: Machine, mean: bool) -> Balls:
    try:
        found = _computed(node, given, machine, mean)
    except ValueError as error:
        raise CertificateError(f"the shapes of a graph do not fit at {node.op}: {error}") from error
    if not all(size(x) < machine.huge for x in found.flat):
        raise CertificateError(f"numbers may overflow at {node.op}, result {node.output}")
    return found


def _computed(node: Node, given: list[Balls], machine: Machine, mean: bool) -> Balls:
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
