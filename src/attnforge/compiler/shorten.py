"""Functions that wave too often for one table, as a sum of rises over short pieces of their argument.

Logits of a table of n anchors reach n squared, and so does their rounding: a table of 128 anchors is right to 1e-3 in
float32, one of 32 to 5e-5. For points k_1 < ... < k_m inside of the range, exactly,

    f(y) = f(min(y, k_1)) + sum over i of (f(c_i) - f(k_i)),    c_i = y clipped to [k_i, k_i+1]:

left of its own piece a term is 0, right of it the rise over the piece. Each term is a short table of its own.
"""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np
import torch

from ..functions.parts import rise_of
from ..functions.univariate import Univariate
from ..heads.anchor.fit import candidates, resolving
from ..heads.choose import Anchors, choose, clip_of
from ..programs.enclose import Range
from ..programs.ops import Apply
from ..programs.program import Builder, Program, rewritten

WAVES = 24  # anchors that resolve a piece at most: a table that is right to eps has about twice as many
MOST_PIECES = 64  # of one function, so that work is bounded


def shortened(program: Program, found: list[Range]) -> Program:
    """The same program, functions that wave often written as sums over pieces; itself where there are none."""
    ways = {}
    for i, op in enumerate(program.ops):
        if isinstance(op, Apply) and not (op.function.knots or op.function.seam) and op.function.series is not None:
            r = found[op.input]
            low, high = float(np.min(r.low)), float(np.max(r.high))
            if isinstance(choose(op.function, low, high), Anchors) and len(at := pieces(op.function, low, high)) > 2:
                ways[i] = partial(_sum, op.function, at)
    return rewritten(program, ways)


def pieces(function: Univariate, low: float, high: float) -> list[float]:
    """The ends of pieces of [low, high], which few anchors resolve each: halved where they do not."""
    low, high = max(low, function.domain.lo), min(high, function.domain.hi)
    ends = [low, high]
    while len(ends) <= MOST_PIECES:
        middles = [_middle(a, b) for a, b in itertools.pairwise(ends) if _long(function, a, b)]
        if not middles:
            break
        ends = sorted({*ends, *middles})
    return ends


def _long(function: Univariate, low: float, high: float) -> bool:
    if not low < high:
        return False  # a box of one point
    return low < _middle(low, high) < high and resolving(function, low, high, candidates(function, low, high)) > WAVES


def _middle(low: float, high: float) -> float:
    """A number of few digits about half way between: exact in every dtype."""
    step = 2.0 ** (math.floor(math.log2(high - low)) - 4)
    return float(torch.tensor(round(0.5 * (low + high) / step) * step, dtype=torch.float32))


def _sum(function: Univariate, ends: list[float], build: Builder, y: int, site: str) -> int:
    parts = []
    inner = [None, *ends[1:-1], None]
    for low, high in itertools.pairwise(inner):
        clipped = build.apply(y, clip_of(low, high).function, f"clip of {site}")
        parts.append(build.apply(clipped, function if low is None else rise_of(function, low), f"piece of {site}"))
    return build.combination([(part, 1.0) for part in parts], label=site)
