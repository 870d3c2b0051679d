"""Gates of two numbers (lemma K37): files of the family "gate" for the larger or the smaller of x and y.

The heads read z = x - y alone, but for rounding, and the skip adds x or y: what is left is a relu of z or of -z.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from flint import arb

from ...errors import CertificateError
from ..balls import ZERO, NotProved, largest, size, up
from ..file import Saved, outward
from ..functions import function
from ..layers import Layer, layer_of
from ..program import number
from ..rounding import MACHINES, affine_rounding, power_of_two
from ..scalar import Cell, Head, HeadSum, cell_error
from .heads import SELF, on_cells, renamed

NAMES = ("max", "min")
Row = tuple[float, float, float]  # weights of x and y, and a bias
#: What is left of the larger and the smaller number less x, and less y, as a function of z = x - y.
REST = {
    ("max", 0): function("piecewise_linear([-1, 0, 1], [1, 0, 0])"), ("max", 1): function("relu"),
    ("min", 0): function("piecewise_linear([-1, 0, 1], [0, 0, -1])"),
    ("min", 1): function("piecewise_linear([-1, 0, 1], [-1, 0, 0])"),
}  # fmt: skip


def is_pair(saved: Saved) -> bool:
    """Whether a file is one of a gate that reads two numbers."""
    config = saved.header.get("config")
    return saved.header.get("family") == "gate" and isinstance(config, dict) and config.get("name") in NAMES


def prove_pair(saved: Saved, chosen: Any) -> tuple[float, str, tuple[str, ...], int]:
    """The bound of a gate of two numbers, the dtype, what it is, and its cells."""
    try:
        pair = Pair(saved)
        found, cells = on_cells(chosen, (-pair.span, pair.span), pair.error)
        return found, pair.dtype, (pair.name,), cells
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise CertificateError(f"the file describes no gate of two numbers: {error!r}") from error


class Pair:
    """A file's gate, and its error on cells of z."""

    def __init__(self, saved: Saved):
        config, tensors = saved.header["config"], renamed(dict(saved.tensors), "layer.", 0)
        self.name, self.dtype = str(config["name"]), next(iter(tensors.values())).dtype
        if self.dtype not in MACHINES or any(tensor.dtype != self.dtype for tensor in tensors.values()):
            raise NotProved(f"the kernel speaks of heads stored and run in float32 or float64, not {self.dtype!r}")
        if not all(math.isfinite(x) for tensor in tensors.values() for x in tensor.numbers):
            raise CertificateError("no bound holds for weights that are not finite")
        self.machine = MACHINES[self.dtype]
        layer = layer_of(tensors, 0, ((0, 0), (0, 1)), ((1, 0),), SELF, ())
        if tensors:
            raise CertificateError(f"a gate of two numbers has no {', '.join(sorted(tensors))}")
        ends = [outward(number(config[key]), self.dtype, above) for key, above in (("lo", False), ("hi", True))]
        if not ends[0] < ends[1]:
            raise ValueError("its interval is none")
        self.side, self.span = largest([size(arb(x)) for x in ends]), up(arb(ends[1]) - arb(ends[0]))
        (x,), (y,) = layer.skip
        self.skip, self.bias = (x, y), layer.bias[0]
        self.base = 0 if abs(x) > abs(y) else 1  # what the skip adds, and the heads bring to the result
        self.heads = _heads(layer)
        if not all(reach < self.machine.huge for head in self.heads for reach in self._reach(*head)):
            raise NotProved("numbers of a gate may overflow")

    def _reach(self, head: Head, rows: list[Row], value: Row) -> list[arb]:
        """Sizes that nothing of a head exceeds."""
        queries = [(size(arb(a)) + size(arb(b))) * self.side + size(arb(c)) for a, b, c in rows]
        logits = [sum((q * size(arb(k)) for q, k in zip(queries, key, strict=True)), ZERO) for key in head.keys]
        a, b, c = (size(arb(x)) for x in value)
        values = [(a + b) * self.side + c, *(size(arb(v)) for v in head.memory)]
        skip = (size(arb(self.skip[0])) + size(arb(self.skip[1]))) * self.side + size(arb(self.bias))
        return [*queries, *logits, *(v * (1 + size(arb(head.out))) * len(self.heads) for v in values), skip]

    def error(self, low: float, high: float) -> float:
        """How far what is computed is from the larger or smaller number where low <= x - y <= high, at most."""
        most = size(arb(low).union(arb(high)))
        heads = tuple(
            replace(head, loose=tuple(up(self._off(row, most)) for row in rows), lost=up(self._off(value, most)))
            for head, rows, value in self.heads
        )
        rest = REST[self.name, self.base]
        site = HeadSum(heads, (0.0, 0.0, 0.0), rest, 0.0, self.dtype)
        u, side, weights = self.machine.u, self.side, self.skip
        error = cell_error(site, self.machine, Cell.of(low, high, rest)).rest
        error += size(arb(weights[self.base]) - 1) * side + size(arb(weights[1 - self.base])) * side
        error += affine_rounding(self.machine, weights, 0.0, (size(arb(weights[0])) + size(arb(weights[1]))) * side)
        error += u * (side + error)  # the result is no larger than the numbers
        if self.bias != 0:
            error += size(arb(self.bias))
            error += u * (side + error)
        return up(error + 2 * self.machine.tiny)

    def _off(self, row: Row, most: arb) -> arb:
        """How far fl(a x + b y + c) is from a (x - y) + c, at most, where |x - y| <= most."""
        a, b, c = row
        length, u = size(arb(a)) * most, self.machine.u
        error = size(arb(a) + arb(b)) * self.side
        error += sum((u * size(arb(w)) * self.side for w in (a, b) if not power_of_two(w)), ZERO)
        if a != 0 and b != 0:
            error += u * (length + error)
        if c != 0 and (a != 0 or b != 0):
            error += u * (length + size(arb(c)) + error)
        return error + (3 * self.machine.tiny if a != 0 or b != 0 else ZERO)


def _heads(layer: Layer) -> list[tuple[Head, list[Row], Row]]:
    """The heads as ones of z, and what they read for queries and values: weights of x and y, and a bias."""
    (group,) = layer.groups
    if "W_K" in group.tables or "b_K" not in group.tables or "M_K" not in group.tables:
        raise CertificateError("a gate has a constant key, and memory")
    found = []
    for h in range(group.heads):
        (x, y), out = group.table("W_Q", h), group.table("W_O", h)
        rows = list(zip(x, y, group.table("b_Q", h) or [0.0] * len(x), strict=True))
        if len(out) != 1:
            raise CertificateError("a gate has one channel of values")
        (v,), (w,) = group.table("W_V", h) or [[0.0], [0.0]]
        value = v, w, (group.table("b_V", h) or [0.0])[0]
        keys = tuple(tuple(key) for key in (group.table("b_K", h), *group.table("M_K", h)))
        memory = tuple(row[0] for row in group.table("M_V", h))
        query = tuple((a, c) for a, _, c in rows)
        found.append((Head(query, keys, True, (0.0, v, value[2]), memory, out[0][0]), rows, value))
    return found
