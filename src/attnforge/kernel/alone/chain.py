"""Chains (lemma K29): files of the family "chain", gates that are followed by a product or by tables.

The heads of a chain side by side are a network of two layers and a sum, whose program is y g(y), or lines(y) and the
function at clipped arguments. How far that program is from the function itself is bounded apart, on cells.
"""

from __future__ import annotations

import itertools
from typing import Any

from flint import arb

from ...errors import CertificateError
from ..balls import ORDER, ZERO, NotProved, down, largest, supremum, up
from ..file import Saved, Tensor, outward
from ..functions import Function, Node, evaluate, function
from ..program import Op, Program, number
from .heads import MEMORY, SELF, Alone, gate_function

CELLS = 64  # between two knots: pieces that are polynomials need one, others are compared with themselves
Tables = dict[str, Tensor]


def chained(saved: Saved) -> Alone:
    """The network that a chain's file describes; `CertificateError` where it describes none."""
    try:
        return _chained(saved.header["config"], dict(saved.tensors))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise CertificateError(f"the file describes no chain: {error!r}") from error


def _chained(config: Any, tensors: Tables) -> Alone:
    heads = {key: config["heads"][key] for key in sorted(config["heads"])}
    target = function(str(config["function"]))
    low, high = map(number, config["interval"])
    dtype = next(iter(tensors.values())).dtype
    own: dict[str, Tables] = {}
    for key, about in heads.items():
        wanted = "product" if key == "product" else "anchor" if key.startswith("table") else "gate"
        if about["family"] != wanted or (wanted == "anchor" and "fast" in about["config"]):
            raise NotProved(f"the kernel has no rule for a chain whose {key} is of the family {about['family']!r}")
        tensors.pop(f"heads.{key}.anchors", None)  # where the anchors are is not read by anyone
        start = f"heads.{key}.layer."
        own[key] = {name.removeprefix(start): tensors.pop(name) for name in sorted(tensors) if name.startswith(start)}
    if tensors:
        raise ValueError(f"it has the tensors {', '.join(sorted(tensors))}")
    gates = {key: function(gate_function(heads[key]["config"])) for key in heads if heads[key]["family"] == "gate"}
    ops = [Op("input", (), 1), *(Op("apply", (0,), 1, {"function": gate}) for gate in gates.values())]
    made = _Merged(dtype, [(0, 0)])
    if set(heads) == {"gate", "product"}:
        swapped = heads["product"]["config"]["swapped"]
        if heads["product"]["config"]["width"] not in (None, 1) or type(swapped) is not bool:
            raise NotProved("the kernel has no rule for products of vectors")
        order = (1, 0) if swapped else (0, 1)
        ops.append(Op("product", order, 1))
        made.layer([(own["gate"], [(0, 0)], (1, 0))], [(v, 0) for v in order])
        made.layer([(own["product"], [(v, 0) for v in order], (2, 0))], [(2, 0)])
        scopes: Any = ((SELF[0],), (SELF[0],))
        apart = _apart(low, high, dtype, target, gates, product=True)
    else:
        clips = [key for key in gates if key != "lines"]
        if set(heads) != {*gates, *(key.replace("clip", "table") for key in clips)} or not clips:
            raise ValueError(f"it has the heads {', '.join(sorted(heads))}")
        at = {key: i for i, key in enumerate(gates, 1)}
        results = []
        for key in gates:
            if key != "lines":
                ops.append(Op("apply", (at[key],), 1, {"function": target}))
            results.append(at[key] if key == "lines" else len(ops) - 1)
        made.layer([(own[key], [(0, 0)], (at[key], 0)) for key in gates], [(at[key], 0) for key in gates])
        tables = [(own[key.replace("clip", "table")], [(at[key], 0)], (v, 0))
                  for key, v in zip(gates, results, strict=True) if key != "lines"]  # fmt: skip
        made.layer(tables, [(v, 0) for v in results])
        extra = {"weights": [[[1.0]]] * len(results), "bias": [0.0], "off": [*([[0.0]] for _ in results), [0.0]]}
        ops.append(Op("linear", tuple(results), 1, extra))
        made.layer([], [(len(ops) - 1, 0)], sums=True)
        scopes = ((SELF[0],) * len(gates), (MEMORY[0],) * len(clips), ())
        apart = _apart(low, high, dtype, target, gates, product=False)
    return Alone(Program((low,), (high,), 1, tuple(ops), len(ops) - 1, 1), made.tensors, scopes, dtype, up(apart))


class _Merged:
    """Layers of heads side by side: each reads its own columns, and writes one."""

    def __init__(self, dtype: str, state: list[tuple[int, int]]):
        self.dtype, self.state, self.count = dtype, state, 0
        self.tensors: Tables = {}

    def layer(
        self, heads: list[tuple[Tables, list[tuple[int, int]], tuple[int, int]]], after: list[tuple[int, int]],
        sums: bool = False,
    ) -> None:  # fmt: skip
        """Heads as tables, the columns that they read, and the one that they write; other columns go on as they are,
        or add up."""
        prefix, n, m = f"network.layers.{self.count}.", len(self.state), len(after)
        skip = [[float(sums or before == column) for column in after] for before in self.state]
        bias = [0.0] * m
        for group, (tables, reads, writes) in enumerate(heads):
            rows, column, left = [self.state.index(c) for c in reads], after.index(writes), dict(tables)
            own, shift = left.pop("S", None), left.pop("s", None)
            if (own and own.shape != (len(rows), 1)) or (shift and shift.shape != (1,)):
                raise ValueError("the skip of a head does not fit")
            for i, x in zip(rows, own.numbers if own else (), strict=False):
                skip[i][column] = x
            bias[column] = shift.numbers[0] if shift else 0.0
            for name, tensor in left.items():
                _, number_of, table = name.split(".")
                if number_of != "0":
                    raise ValueError("a head has more than one group")
                self.tensors[f"{prefix}groups.{group}.{table}"] = self._wide(table, tensor, rows, n, column, m)
        self.tensors[prefix + "S"] = Tensor(self.dtype, (n, m), tuple(x for row in skip for x in row))
        self.tensors[prefix + "s"] = Tensor(self.dtype, (m,), tuple(bias))
        self.state, self.count = after, self.count + 1

    def _wide(self, name: str, tensor: Tensor, rows: list[int], n: int, column: int, m: int) -> Tensor:
        """A table over all columns of the layer, zeros where a head reads or writes nothing."""
        if name in ("W_Q", "W_K", "W_V"):
            h, reads, k = tensor.shape
            if reads != len(rows):
                raise ValueError(f"{name} of a head does not fit")
            wide = [[[0.0] * k for _ in range(n)] for _ in range(h)]
            for mine, given in zip(wide, tensor.rows(), strict=True):
                for i, row in zip(rows, given, strict=True):
                    mine[i] = row
            return Tensor(tensor.dtype, (h, n, k), tuple(x for head in wide for row in head for x in row))
        if name == "W_O":
            h, reads, one = tensor.shape
            if one != 1:
                raise ValueError("a head writes more than one column")
            numbers = (x if c == column else 0.0 for x in tensor.numbers for c in range(m))
            return Tensor(tensor.dtype, (h, reads, m), tuple(numbers))
        return tensor


def _apart(low: float, high: float, dtype: str, target: Function, gates: dict[str, Function], product: bool) -> arb:
    """How far the program of a chain is from its function, on the interval as the dtype has it."""
    first, last = outward(low, dtype, above=False), outward(high, dtype, above=True)
    knots = {k for f in (target, *gates.values()) for k in f.knots if first < k < last}
    found = []
    for a, b in itertools.pairwise(sorted({first, last} | knots)):
        edges = sorted({a, b, *(min(max(a + (b - a) * i / CELLS, a), b) for i in range(1, CELLS))})
        found += [_cell(*pair, target, gates, product) for pair in itertools.pairwise(edges)]
    return largest(found)


def _cell(low: float, high: float, target: Function, gates: dict[str, Function], product: bool) -> arb:
    middle = 0.5 * low + 0.5 * high
    radius = arb(max(up(arb(high) - middle), up(arb(middle) - low)))
    wanted = target.piece(low, high)
    lines = {key: gate.piece(low, high) for key, gate in gates.items()}
    if wanted is None or any(line is None for line in lines.values()):
        raise CertificateError("a chain is compared across a knot")
    terms: list[tuple[int, Node]] = [(-1, wanted)]
    fixed = ZERO
    for key, line in lines.items():
        assert line is not None
        if product:
            terms.append((1, ("*", ("y",), line)))
            continue
        if key == "lines":
            terms.append((1, line))
            continue
        at, slope, bent = evaluate(line, arb(middle) + arb(0, up(radius)), 3)
        if slope.is_zero() and bent.is_zero():
            fixed += target.range(down(at), up(at))
        elif (slope - 1).is_zero() and bent.is_zero() and evaluate(line, ZERO, 1)[0].is_zero():
            terms.append((1, wanted))
        else:
            raise NotProved("a part of a chain is neither the argument nor a constant")
    if (1, wanted) in terms:  # a function less itself
        terms.remove((1, wanted))
        terms.remove((-1, wanted))
    thin, wide = [fixed, *[ZERO] * (ORDER + 1)], [fixed, *[ZERO] * (ORDER + 1)]
    for sign, node in terms:
        for total, ball in ((thin, arb(middle)), (wide, arb(middle) + arb(0, up(radius)))):
            for j, x in enumerate(evaluate(node, ball, ORDER + 2)):
                total[j] += sign * x
    return supremum(thin[:-1], wide[-1], radius)
