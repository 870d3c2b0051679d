"""How the certified errors of a chain's heads add up, in the dtype that they are evaluated in.

*y times a gate.* With a gate head G, |G - g| <= a, and a product head P, |P(x, t) - x t| <= b for |x| <= X and t in
the range of g widened by a: |P(y, G(y)) - y g(y)| <= b + X a.

*pieces.* With gate heads C_i, |C_i - c_i| <= a_i, tables T_i, |T_i - f| <= b_i on the piece widened by a_i, where f
turns by at most L_i, and a gate head G for the lines: |G + sum_i T_i(C_i) - f| <= a + sum_i (b_i + L_i a_i), and
adding n parts rounds by gamma(n - 1) times their sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...box import round_outward
from ...certificates.rounding import gamma, unit, up
from ...errors import CertificateError
from ...functions.queries import lipschitz
from ...functions.registry import enclose
from ...functions.univariate import Univariate

Interval = tuple[float, float]


def reach(function: Univariate, lo: float, hi: float, off: float, dtype: torch.dtype) -> Interval:
    """Where a head for a function on [lo, hi] can get to when it is off by at most `off`."""
    ends = enclose(function, *_outward((lo, hi), dtype))
    return float(up(ends[0] - off, -4)), float(up(ends[1] + off, 4))


def carried(factor: float, off: float) -> float:
    """An error that counts `factor` times."""
    return float(up(factor * off, 4))


def moved(function: Univariate, box: Interval, off: float, dtype: torch.dtype) -> float:
    """How far the function can go on an interval while its argument moves by `off`."""
    low, high = (np.array([v]) for v in _outward(box, dtype))
    return float(up(lipschitz(function, low, high)[0] * off, 4))


def sum_error(sizes: Sequence[float], dtype: torch.dtype) -> float:
    """Rounding of a sum of parts of these sizes, in any order."""
    return float(up(gamma(len(sizes) - 1, unit(dtype)) * sum(sizes), 8)) if len(sizes) > 1 else 0.0


def size_of(function: Univariate, box: Interval, off: float, dtype: torch.dtype) -> float:
    """The largest a head for a function can be on an interval when it is off by at most `off`."""
    return max(map(abs, reach(function, *box, off, dtype)))


def covered(what: str, box: Interval, wanted: Interval, dtype: torch.dtype) -> None:
    """Raise unless a head's interval holds all that it is given."""
    low, high = _outward(box, dtype)
    if not (low <= wanted[0] and wanted[1] <= high):
        raise CertificateError(
            f"{what} is certified on [{low:.9g}, {high:.9g}] and reads numbers in [{wanted[0]:.9g}, {wanted[1]:.9g}]"
        )


def _outward(box: Interval, dtype: torch.dtype) -> Interval:
    low, high = round_outward(np.array([box[0]]), np.array([box[1]]), dtype)
    return float(low[0]), float(high[0])
