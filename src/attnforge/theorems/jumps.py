"""True jumps: what a head can do about them in the mean, and what it cannot in the largest error (lemma B8).

A head is continuous, so at a jump it is off by half of it, whatever its logits are: certificates of the largest error
refuse functions with jumps. In L^p a sigmoid of sharpness beta is off by (2 c_p / beta)^(1/p) times the jump, and no
head whose slopes span as much does better than by a constant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ..arguments import number, positive
from ..dtypes import shipped
from ..errors import ArgumentError
from ..network import AttentionLayer, Heads

TERMS = 80  # of a series whose terms are halved: 2^-80 is left


def jump_constant(p: float) -> float:
    """c_p = int_0^inf (1 + e^t)^-p dt = int_0^(1/2) s^(p-1) / (1-s) ds, rounded up.

    >>> 0 < jump_constant(1.0) - math.log(2) < 1e-11
    True
    """
    p = _exponent(p)
    terms = [2.0 ** -(p + k) / (p + k) for k in range(TERMS)]
    return math.fsum(terms) * (1 + 1e-12) + 2.0**-TERMS


def jump_error(sharpness: float, p: float, jumps: Sequence[float] = (1.0,)) -> float:
    """B8(a): the L^p distance over the line, at most, of sigmoids of this sharpness from steps of these heights.

    >>> jump_error(1e4, 1.0) < 1.4e-4, jump_error(1e4, 2.0) < 6.3e-3
    (True, True)
    """
    one = (2 * jump_constant(p) / positive("sharpness", sharpness)) ** (1 / p)
    return math.fsum(abs(number("a jump", j)) for j in jumps) * one * (1 + 1e-12)


def sharpness_for(eps: float, p: float, jumps: Sequence[float] = (1.0,)) -> float:
    """The inverse of `jump_error`: how sharp sigmoids must be for an L^p distance of eps.

    >>> jump_error(sharpness_for(1e-3, 2.0), 2.0) <= 1e-3
    True
    """
    total = math.fsum(abs(number("a jump", j)) for j in jumps)
    return 2 * jump_constant(p) * (total / positive("eps", eps)) ** p * (1 + 1e-9) + 1e-300


def jump_floor(span: float, spread: float, p: float, jump: float = 1.0) -> float:
    """B8(b): the L^p distance, at least, of every head of memory slots from a jump, if its slopes lie in an interval of
    length `span`, its values in one of length `spread`, and it may use as much room on either side as it wants.

    >>> jump_floor(1e4, 1.0, 1.0) <= jump_error(1e4, 1.0) < 1.4 * jump_floor(1e4, 1.0, 1.0)
    True
    """
    p, size = _exponent(p), positive("jump", jump)
    steep = 0.25 * positive("span", span) * positive("spread", spread)
    return float((size ** (p + 1) * 2.0**-p / ((p + 1) * steep)) ** (1 / p) * (1 - 1e-12))


def staircase(
    places: Sequence[float], jumps: Sequence[float], sharpness: float, dtype: torch.dtype = torch.float64
) -> AttentionLayer:
    """One attention layer, a head of two memory slots for each jump: sum_i J_i sigmoid(sharpness (y - x_i)).

    >>> stairs = staircase([0.0, 1.0], [1.0, -2.0], 1e3)
    >>> stairs(torch.tensor([[-1.0], [0.5], [2.0]], dtype=torch.float64)).detach().squeeze(-1).tolist()
    [0.0, 1.0, -1.0]
    """
    if len(places) != len(jumps) or not places:
        raise ArgumentError(f"give a place for each jump, got {len(places)} places and {len(jumps)} jumps")
    beta, kind = positive("sharpness", sharpness), shipped(dtype)
    at, height = np.array([number("a place", x) for x in places]), np.array([number("a jump", j) for j in jumps])
    count = len(at)
    keys, values = np.zeros((count, 2, 2)), np.zeros((count, 2, 1))
    keys[:, 0, 0], keys[:, 0, 1], values[:, 0, 0] = beta, -beta * at, height
    tables = {
        "W_Q": np.tile([[[1.0, 0.0]]], (count, 1, 1)), "b_Q": np.tile([[0.0, 1.0]], (count, 1)), "M_K": keys,
        "M_V": values, "W_O": np.ones((count, 1, 1)),
    }  # fmt: skip
    made = {name: torch.from_numpy(table).to(kind) for name, table in tables.items()}
    return AttentionLayer([Heads("memory", purpose="jumps", **made)])  # type: ignore[arg-type]


def _exponent(p: float) -> float:
    if not number("p", p) >= 1:
        raise ArgumentError(f"p must be a number >= 1: the largest error has no limit at a jump, got {p!r}")
    return float(p)
