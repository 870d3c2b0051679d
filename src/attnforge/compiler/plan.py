"""`Plan`: which head family carries out each operation, on which interval, at what error.

Ranges come from `programs.enclose`; sensitivities run backwards through the program; eps is split over the operations
in proportion to what their errors do to the output; then each operation gets the smallest head that keeps its share.

Sites for operations on whole tokens and between tokens (softmax, attention, norm, fixed mixing, maximum).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..certificates.rounding import unit
from ..dtypes import Array
from ..errors import DomainError, PrecisionError, UnsupportedOperation
from ..functions.queries import lipschitz
from ..functions.registry import enclose
from ..functions.univariate import Univariate
from ..heads.anchor import fit as search
from ..heads.anchor.bound import CELLS, AnchorWeights
from ..heads.anchor.fit import Shape
from ..heads.gate.head import sharpness_for
from ..heads.norm.fit import fit, layer_error
from ..heads.norm.head import MAX_HEADS
from ..heads.product.bound import Sides
from ..heads.product.construction import gain_for
from ..heads.product.head import NODES, Arrangement, arrange
from ..heads.token.bound import DEAD
from ..heads.token.construction import sharpest
from ..programs.enclose import Range
from ..programs.ops import Apply, Attention, Constant, Input, Linear, MaxTokens, Mix, Normalise, Op, Product, Softmax
from ..programs.program import Program
from .layout import Site
from .sensitivity import sensitivities

MOST_DECADES = 1e4  # a table is fitted for relative error over at most so large a ratio of values
ROOM = {torch.float32: 2.0**-10, torch.float64: 2.0**-24}  # beyond a branch point errors cost their root: little room
EXACT_GATES = ("sigmoid", "tanh", "silu")
KINKS = {"relu": "relu", "abs": "abs", "hardtanh": "hard_tanh"}


@dataclass(frozen=True)
class Table:
    """An anchor table: the function and interval it is for, its shape, and its numbers."""

    function: str
    interval: tuple[float, float]
    shape: Shape | None
    weights: AnchorWeights
    flat: Array


@dataclass(frozen=True)
class Plan:
    """One site for each operation that heads carry out, the anchor tables they share, and the error each was given."""

    program: Program
    sites: Mapping[int, Site]
    tables: tuple[Table, ...]
    budget: Mapping[int, float]

    def __str__(self) -> str:
        lines = [f"plan of {len(self.sites)} sites, {len(self.tables)} tables: {self.program.source}"]
        for op, site in self.sites.items():
            size = f"{len(self.tables[site.config['table']].weights.slope)} anchors" if site.family == "anchor" else ""
            lines.append(f"  %{op} {site.family:9s} {self.program.sites[op]:30s} error {self.budget[op]:.2e} {size}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Style:
    """Choices that suit some programs and not others; a compiler tries more than one.

    `centred`: operands of products are centred, which halves their absolute error; otherwise a product's error vanishes
    with its operand. `relative`: tables of functions that keep away from 0 are fitted for relative error.
    `margin`: how far beyond its range an argument may go, as a share of the range: room for errors of earlier layers.
    """

    centred: bool = True
    relative: bool = False
    margin: float = 2.0**-9


@dataclass(frozen=True)
class Hull:
    """The interval of one operand over the whole box, widened so that errors of earlier layers stay inside."""

    low: float
    high: float

    @classmethod
    def of(cls, r: Range, fn: Univariate | None = None, margin: float = 2.0**-9, room: float = 2.0**-10) -> Hull:
        """The range widened by `margin` of itself, hardly towards a singularity, and by `room` of that beyond one."""
        low, high = float(np.min(r.low)), float(np.max(r.high))
        if fn is not None:  # an enclosure may reach a little beyond the domain
            low, high = max(low, fn.domain.lo), min(high, fn.domain.hi)
        wide = margin * max(high - low, 2.0**-9 * max(abs(low), abs(high)), 1e-30)
        below = above = wide
        if fn is not None:
            for end in (fn.domain.lo, fn.domain.hi, *fn.domain.poles):
                if not math.isfinite(end):
                    continue
                closed = (end == fn.domain.lo and fn.domain.lo_closed) or (end == fn.domain.hi and fn.domain.hi_closed)
                beyond = room * wide if closed else 0.0  # the function goes on as a constant
                if end <= low:
                    below = min(below, max(0.1 * (low - end), beyond))
                if end >= high:
                    above = min(above, max(0.1 * (end - high), beyond))
        return cls(low - below, high + above)


@dataclass(frozen=True)
class Order:
    """What one operation asks for: its number, its arguments' ranges, and the error it may make."""

    number: int
    op: Op
    reads: tuple[Range, ...]
    eps: float
    dtype: torch.dtype
    style: Style
    site: str = ""

    def hull(self, operand: int = 0, fn: Univariate | None = None) -> Hull:
        """The interval of one argument, with room for errors."""
        return Hull.of(self.reads[operand], fn, self.style.margin, ROOM[self.dtype])


def make_plan(
    program: Program, found: list[Range], eps: float, dtype: torch.dtype, shares: Mapping[int, float], style: Style
) -> Plan:
    """A plan that gives operation i the error shares[i] * eps / sensitivity of the output to it."""
    sensitivity = sensitivities(program, found)
    roots = under_roots(program, found)
    sites: dict[int, Site] = {}
    tables: list[Table] = []
    budget: dict[int, float] = {}
    for i, op in enumerate(program.ops):
        if isinstance(op, (Input, Constant, Linear)):
            continue
        budget[i] = shares.get(i, 0.0) * eps / max(sensitivity[i], 1e-300)
        choose = CHOICES.get(type(op))
        if choose is None:
            raise UnsupportedOperation(f"'{op.word}' ({program.sites[i]}) has no attention-only form here yet")
        order = Order(i, op, tuple(found[j] for j in op.inputs), budget[i], dtype, style, program.sites[i])
        rooted = i in roots and isinstance(op, Apply) and op.function.name == "square"
        sites[i] = _square(order) if rooted else choose(order, tables)
    return Plan(program, sites, tuple(tables), budget)


def _square(order: Order) -> Site:
    """A square by product heads: dearer than an anchor head, but its error vanishes at 0 with its argument."""
    hull = order.hull()
    side = _fat(hull.low, hull.high)
    config = {
        "nodes": NODES[order.dtype],
        "gain": gain_for(max(abs(v) for v in side)),
        "centre": [0.0, 0.0],
        "swapped": False,
        "intervals": [list(side), list(side)],
    }
    return Site(order.number, "square", config)


def under_roots(program: Program, found: list[Range]) -> frozenset[int]:
    """The squares whose sum is the argument of a function with infinite slope that the argument may reach."""
    marked: set[int] = set()
    for op in program.ops:
        if isinstance(op, Apply):
            r = found[op.inputs[0]]
            if not np.isfinite(lipschitz(op.function, r.low, r.high)).all():
                marked |= set(op.inputs)
    for i in range(len(program.ops) - 1, -1, -1):
        if i in marked and isinstance(program.ops[i], Linear):
            marked |= set(program.ops[i].inputs)
    return frozenset(marked)


def _apply(order: Order, tables: list[Table]) -> Site:
    i, op, dtype = order.number, order.op, order.dtype
    assert isinstance(op, Apply)
    fn = op.function
    hull = order.hull(0, fn)
    gate = _gate(fn)
    if gate is not None:
        name, parameters = gate
        beta = 1.0 if name in EXACT_GATES else sharpness_for(name, None, hull.low, hull.high, dtype, **parameters)
        config = {"name": name, "parameters": parameters, "sharpness": beta, "interval": [hull.low, hull.high]}
        return Site(i, "gate", config)
    table = _table(fn, hull, order, tables)
    chosen = tables[table]
    weights = chosen.weights
    config = {
        "table": table,
        "interval": list(chosen.interval),
        "anchors": len(weights.slope),
        "centre": weights.centre,
        "skip": list(weights.skip),
    }
    return Site(i, "anchor", config)


def _gate(fn: Univariate) -> tuple[str, dict[str, Any]] | None:
    """The gate that is this function, if there is one."""
    if fn.name in EXACT_GATES:
        return fn.name, {}
    if fn.name in KINKS:
        return KINKS[fn.name], {}
    if fn.name == "relu6":
        return "ramp", {"a": 0.0, "b": 6.0}
    if fn.name.startswith("leaky_relu("):
        return "leaky_relu", {"slope": float(fn.name[11:-1])}
    if fn.name.startswith("piecewise_linear("):
        xs = list(fn.knots)
        points = [xs[0] - 1.0, *xs, xs[-1] + 1.0]
        ys = fn.value(torch.tensor(points, dtype=torch.float64)).tolist()
        return "piecewise_linear", {"xs": points, "ys": ys}
    return None


def _table(fn: Univariate, hull: Hull, order: Order, tables: list[Table]) -> int:
    """The number of an anchor table for a function on an interval: one that is there already, or a new one."""
    for number, table in enumerate(tables):
        if table.function == fn.name and table.interval[0] <= hull.low and hull.high <= table.interval[1]:
            return number
    low, high = max(hull.low, fn.domain.lo), min(hull.high, fn.domain.hi)
    eps, relative = max(order.eps, 1e-300), False
    if order.style.relative:
        smallest, largest = enclose(fn, low, high)
        least, most = sorted((abs(smallest), abs(largest)))
        relative = (smallest > 0 or largest < 0) and most < MOST_DECADES * least
        eps = eps / max(abs(smallest), abs(largest)) if relative else eps
    found = search.quick(fn, hull.low, hull.high, order.dtype, float(f"{eps:.2g}"), relative)
    if found is None:
        raise PrecisionError(f"no anchor head was found for {fn.name} on [{low:g}, {high:g}]")
    ends = np.sort(found.shape.potential.flat(np.array([low, high])))
    flat = found.shape.potential.unflat(np.linspace(ends[0], ends[1], CELLS + 1))
    tables.append(Table(fn.name, (hull.low, hull.high), found.shape, found.weights, flat))
    return len(tables) - 1


def _product(order: Order, tables: list[Table]) -> Site:
    x, y = order.hull(0), order.hull(1)
    sides = Sides(_fat(x.low, x.high), _fat(y.low, y.high))
    arranged = arrange(sides, order.dtype) if order.style.centred else Arrangement(sides, (0.0, 0.0), False)
    config = {
        "nodes": NODES[order.dtype],
        "gain": gain_for(arranged.reach[1]),
        "centre": list(arranged.centre),
        "swapped": arranged.swapped,
        "intervals": [list(arranged.sides.value), list(arranged.sides.query)],
    }
    return Site(order.number, "product", config)


def _fat(low: float, high: float) -> tuple[float, float]:
    """An interval that is not a point."""
    return (low, high) if high > low else (low - 1e-9 * max(abs(low), 1e-9), high + 1e-9 * max(abs(high), 1e-9))


#: How each operation gets its site.
CHOICES: dict[type[Op], Callable[[Order, list[Table]], Site]] = {Apply: _apply, Product: _product}



NORM_ROOM = 2.0**-7  # how much further than the exact roots of variances a norm is fitted, for errors of earlier layers
COUNTS = (4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, MAX_HEADS)  # numbers of heads tried for a norm


def _interval(order: Order, operand: int = 0) -> list[float]:
    hull = order.hull(operand)
    return [hull.low, hull.high]


def _softmax(order: Order, tables: list[Table]) -> Site:
    return Site(order.number, "softmax", {"interval": _interval(order)})


def _mix(order: Order, tables: list[Table]) -> Site:
    return Site(order.number, "mix", {"interval": _interval(order)})


def _max(order: Order, tables: list[Table]) -> Site:
    low, high = _interval(order)
    beta = sharpest(order.reads[0].low.shape[1], low, high, None, order.dtype)
    beta = float(torch.tensor(beta, dtype=order.dtype))
    return Site(order.number, "max", {"interval": [low, high], "sharpness": beta})


def _attention(order: Order, tables: list[Table]) -> Site:
    """Omega hides a token from every other one whatever the content says, with as much again for errors."""
    op, dtype, (query, key, _) = order.op, order.dtype, order.reads
    assert isinstance(op, Attention)
    logit = abs(op.scale) * float(np.max(np.einsum("cik,cjk->cij", query.size, key.size)))
    offsets = op.logit_mask(query.low.shape[1])
    finite = offsets[offsets > -4 * DEAD[dtype] - 4 * logit]
    omega = math.ceil(DEAD[dtype] + 4 * logit + 1 + 2 * float(np.abs(finite).max(initial=0.0)))
    config = {
        "width": key.low.shape[-1],
        "omega": float(omega),
        "logit": logit + float(omega if op.mask is not None else 0.0),
        "intervals": [_interval(order, operand) for operand in range(3)],
    }
    return Site(order.number, "attention", config)


def _normalise(order: Order, tables: list[Table]) -> Site:
    """The fewest heads whose fit keeps the budget, or the best fit if none does."""
    op, dtype, margin = order.op, order.dtype, order.style.margin
    assert isinstance(op, Normalise)
    name = f"the norm '{order.site}'" if order.site else f"the norm %{order.number}"
    low, high = variances(order.reads[0])
    low = max(0.0, math.sqrt(low) * (1 - NORM_ROOM) - margin * NORM_ROOM * math.sqrt(high)) ** 2
    high = max(high * (1 + max(NORM_ROOM, margin)) ** 2, 1e-30)
    if low + op.eps == 0:
        raise DomainError(
            f"{name} may divide by 0: its variance cannot be shown to stay away from 0 and its eps is 0; "
            "give it an eps, or choose a box on which the variance is positive"
        )
    wanted = 0.5 * order.eps / math.sqrt(op.width)
    best: tuple[float, tuple[np.ndarray, ...]] | None = None
    for count in COUNTS:
        table = fit(low, high, op.eps, count, op.width, dtype)
        error, evaluation = layer_error(*table, op.width, op.eps, low, high, unit(dtype))
        if best is None or error + evaluation < best[0]:
            best = error + evaluation, table
        if error <= max(wanted, 0.1 * evaluation):
            break
    assert best is not None
    if not best[0] < 0.5:
        raise PrecisionError(
            f"{name} has no accurate head for variances from {low:g} to {high:g} with eps {op.eps:g} in "
            f"{str(dtype).removeprefix('torch.')}; give it a larger eps, or choose a smaller box"
        )
    scale, shift, amount = (x.tolist() for x in best[1])
    config = {"variance": [low, high], "scales": scale, "shifts": shift, "amounts": amount}
    return Site(order.number, "norm", config)


def variances(r: Range) -> tuple[float, float]:
    """The smallest and the largest mean square of a row."""
    return float(np.min(np.mean(r.least**2, -1))), float(np.max(np.mean(r.size**2, -1)))


CHOICES.update({Softmax: _softmax, Mix: _mix, MaxTokens: _max, Attention: _attention, Normalise: _normalise})
