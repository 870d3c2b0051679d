"""A function continued beyond the closed ends of its domain by its values there: sqrt(max(y, 0)).

Rounding may push an argument a little outside the domain of the function that reads it. A head is still defined
there, and it
is compared with this continuation.
"""

from __future__ import annotations

import math
from functools import lru_cache

from flint import arb, arb_series
from torch import Tensor

from .domain import REALS
from .univariate import Series, Univariate


@lru_cache(maxsize=512)
def clipped(fn: Univariate) -> Univariate:
    """`fn` continued by constants; `fn` itself when its domain has no closed end.

    >>> import torch
    >>> from attnforge.ir.functions import get
    >>> clipped(get("sqrt")).value(torch.tensor([-1.0, 4.0]))
    tensor([0., 2.])
    """
    lo = fn.domain.lo if fn.domain.lo_closed and math.isfinite(fn.domain.lo) else None
    hi = fn.domain.hi if fn.domain.hi_closed and math.isfinite(fn.domain.hi) else None
    if lo is None and hi is None:
        return fn
    inner = [k for k in fn.knots if (lo is None or k > lo) and (hi is None or k < hi)]
    branches = fn.branches
    skipped = len([k for k in fn.knots if lo is not None and k <= lo])
    middle = branches[skipped : skipped + len(inner) + 1]
    pieces: list[Series] = [*middle]
    knots = [*inner]
    if lo is not None:
        pieces.insert(0, _constant(fn, lo))
        knots.insert(0, lo)
    if hi is not None:
        pieces.append(_constant(fn, hi))
        knots.append(hi)

    def value(y: Tensor) -> Tensor:
        return fn.value(y.clamp(lo, hi))

    def ball(x: arb) -> arb:
        low, high = x.lower(), x.upper()
        if lo is not None and high <= lo:
            return fn.ball(arb(lo))
        if hi is not None and low >= hi:
            return fn.ball(arb(hi))
        left = arb(lo) if lo is not None and low < lo else low
        right = arb(hi) if hi is not None and high > hi else high
        return fn.ball(left.union(right))

    return Univariate(
        f"clipped({fn.name})", value, middle[0], ball, REALS, tuple(knots), fn.potentials,
        pieces=tuple(pieces), source=fn, image=fn.image,
    )  # fmt: skip


def _constant(fn: Univariate, at: float) -> Series:
    def series(x: arb_series) -> arb_series:
        return arb_series([fn.ball(arb(at))])

    return series
