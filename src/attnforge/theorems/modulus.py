"""How much f can change: a Lipschitz constant or a concave modulus of continuity."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from ..errors import ArgumentError
from .result import number

Modulus = Callable[[float], float]


def modulus_of(lipschitz: float | None, modulus: Modulus | None) -> Modulus | None:
    """omega from what was given; None when nothing was, and then there is no certificate."""
    if lipschitz is not None and modulus is not None:
        raise ArgumentError("give lipschitz or modulus, not both")
    if lipschitz is not None:
        slope = number("lipschitz", lipschitz, positive=True)
        return lambda t: slope * t
    if modulus is None:
        return None
    if not callable(modulus):
        raise ArgumentError(f"modulus must be a function of a distance, got {type(modulus).__name__}")
    probe = [float(modulus(10.0**-k)) for k in range(6)]
    if not all(math.isfinite(v) and v >= 0 for v in probe) or any(x < y for x, y in itertools.pairwise(probe)):
        raise ArgumentError("modulus must be a concave function that grows from 0, such as lambda t: 2 * t**0.5")
    return modulus
