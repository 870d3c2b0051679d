"""Tables of anchors for operations of a program, and their heads in a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from flint import arb

from ...dtypes import dtype_name
from ...errors import PrecisionError
from ...functions.registry import enclose
from ...functions.univariate import Univariate
from ...network import Heads
from ...programs.ops import Apply
from ..construction import Frame, HeadBuilder, Member, Order, Planned
from ..fast.even import EvenTable
from ..site import Span
from . import fit
from .bound import CELLS, AnchorWeights
from .site import AnchorSite

SHARED = 1.25  # a table for an interval so many times as wide rounds hardly more than one of its own
MANY = 16  # channels of an operation from which on its table should be one that is read with one exponential
LARGER = 2.0  # times as many anchors such a table may have
SHARES = (1.0, 0.5, 0.25)  # of its error that are tried for it: what reading loses is left
LOST = 0.25  # of the error that reading may take: where rounding decides, the softmax rounds less
MOST_DECADES = 1e6  # a table is fitted for relative error over at most so large a ratio of values


@dataclass(frozen=True, eq=False)
class AnchorTable:
    """An anchor table: the function and interval it is for, its numbers, and its error, roughly; sites may share it."""

    function: str
    interval: Span
    weights: AnchorWeights
    edges: tuple[float, ...]
    error: float
    even: tuple[float, ...] = ()

    def serves(self, function: str, hull: Span, eps: float) -> bool:
        """Whether the table does for the function on `hull`: no wider one reaches eps better than one of its own."""
        (low, high), (first, last) = self.interval, hull
        inside = low <= first and last <= high and self.function == function
        return inside and (self.error <= eps or high - low <= SHARED * (last - first))


class AnchorBuilder(HeadBuilder):
    """Any univariate function."""

    def propose(self, order: Order, made: Sequence[Planned]) -> Planned | None:
        if not isinstance(order.op, Apply):
            return None
        fn = order.op.function
        hull = order.hull(0, fn)
        tables = list({id(p.parts): p.parts for p in made if isinstance(p.parts, AnchorTable)}.values())
        table = next((t for t in tables if t.serves(fn.name, hull, order.eps)), None)
        number = len(tables) if table is None else tables.index(table)
        table = table or _fitted(fn, hull, order)
        anchors = len(table.weights.slope)
        return Planned(AnchorSite(order.number, number, table.interval, anchors, table.edges, table.even), table)

    def group(self, frame: Frame, members: Sequence[Member], purpose: str) -> Heads:
        """A head for each scalar that is looked up in the one table."""
        table = members[0].planned.parts
        assert isinstance(table, AnchorTable)
        weights = table.weights
        query = np.zeros((len(members), frame.columns, 2))
        output = np.zeros((len(members), 1, frame.outputs))
        for h, member in enumerate(members):
            (source,), (target,) = member.place.reads, member.place.writes
            query[h, source, 0], output[h, 0, target] = 1.0, 1.0
            frame.skip[source, target], frame.bias[target] = weights.skip
        return Heads(
            "memory",
            W_Q=frame.number(query),
            b_Q=frame.number([[-weights.centre, 1.0]]),
            M_K=frame.number(np.stack([weights.slope, weights.offset], -1)[None]),
            M_V=frame.number(weights.value[None, :, None]),
            W_O=frame.number(output),
            purpose=purpose,
        )


def _fitted(fn: Univariate, hull: Span, order: Order) -> AnchorTable:
    """A new table, as small as the order's error allows."""
    low, high = max(hull[0], fn.domain.lo), min(hull[1], fn.domain.hi)
    for end in (low, high) if fn.series is not None else ():
        if not fn.ball(arb(end)).is_finite():  # as sqrt(1 - 2/y) a little below y = 2: no table has a bound there
            raise PrecisionError(
                f"no head can be built for {fn.name} on [{low:g}, {high:g}], with room for errors of what it reads: "
                f"it has no value at y = {end:.17g}; choose a smaller box"
            )
    eps, relative = max(order.eps, 1e-300), False  # no share of the tolerance is 0: a fit needs something to aim at
    if order.tactics.relative:
        smallest, largest = enclose(fn, low, high)
        least, most = sorted((abs(smallest), abs(largest)))
        relative = (smallest > 0 or largest < 0) and most < MOST_DECADES * least
        eps = eps / max(abs(smallest), abs(largest)) if relative else eps
    found = fit.quick(fn, *hull, order.dtype, float(f"{eps:.2g}"), relative)  # two digits: equal questions meet a cache
    if found is None:
        reach, most = max(map(abs, enclose(fn, low, high))), torch.finfo(order.dtype).max
        wider = "" if order.dtype == torch.float64 else ", or use dtype=torch.float64"
        why = f"{dtype_name(order.dtype)} holds numbers up to {most:.2g}, and it may reach {reach:.2g}"
        raise PrecisionError(
            f"no anchor head was found for {fn.name} on [{low:g}, {high:g}]"
            + (f": {why}; choose a smaller box{wider}" if not reach <= most else "")
        )
    even = _even(found, fn, hull, order, eps) if order.op.width >= MANY and not relative else None
    found, numbers = (found, ()) if even is None else even
    ends = np.sort(found.shape.potential.flat(np.array([low, high])))
    edges = found.shape.potential.unflat(np.linspace(ends[0], ends[1], CELLS + 1))
    size = max(abs(smallest), abs(largest)) if relative else 1.0
    return AnchorTable(fn.name, hull, found.weights, tuple(edges.tolist()), size * found.estimate, numbers)


def _even(
    found: fit.Candidate, fn: Univariate, hull: Span, order: Order, eps: float
) -> tuple[fit.Candidate, tuple[float, ...]] | None:
    """An evenly spaced table that serves as well when it is read with one exponential, and its numbers; None where
    there is none that is not much larger than the one that was found."""
    for share in SHARES:
        goal = float(f"{share * eps:.2g}")
        one = fit.quick(fn, *hull, order.dtype, goal, even=True)
        if one is None or one.shape.count > LARGER * found.shape.count:
            return None
        table = EvenTable.of(one.weights, *hull)
        reading = None if table is None else table.reading(one.weights, *hull, order.dtype)
        if table is None or reading is None:
            return None
        lost = float(reading(np.array([hull[0]]), np.array([hull[1]]))[0])
        if lost <= LOST * eps and one.estimate + lost <= eps:
            return one, table.numbers
    return None


BUILDERS: dict[str, HeadBuilder] = {"anchor": AnchorBuilder()}
