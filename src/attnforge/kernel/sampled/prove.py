"""Networks for functions that are known by samples: a bound for all functions of which the hypothesis is so."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from flint import arb

from ...errors import CertificateError
from ..balls import NotProved, up
from ..file import Saved
from .cells import prove_cells
from .grid import prove_grid
from .hats import prove_hats

SAMPLED: dict[str, Callable[[Saved, Any], tuple[arb, str, str]]] = {
    "blackbox-grid": prove_grid, "theorem-cells": prove_cells, "theorem-universal": prove_hats,
}  # fmt: skip


def prove_sampled(saved: Saved, chosen: Any) -> tuple[float, str, tuple[str, ...], int, str]:
    """The bound, the dtype, what it is, one part, and the hypothesis."""
    family = str(saved.header["family"])
    try:
        found, dtype, hypothesis = SAMPLED[family](saved, chosen)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, ZeroDivisionError) as error:
        raise CertificateError(f"the file holds no samples, or a derivation that does not fit: {error!r}") from error
    bound = up(found)
    if not math.isfinite(bound):
        raise NotProved("nothing can be proved of this selection")
    return bound, dtype, (family,), 1, hypothesis
