"""Which rule speaks of a file of a head on its own: most are networks of a few operations, some are proved by cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..file import Saved
from .chain import chained
from .fast import is_fast, prove_fast
from .norm import prove_norm
from .pair import is_pair, prove_pair
from .ramp import prove_channels, ramped, writes_several

ALONE = {"chain": chained, "theorem-ramp": ramped}
BY_CELLS = (is_fast, prove_fast), (is_pair, prove_pair), (writes_several, prove_channels)


def rule_of(saved: Saved) -> Callable[[Saved, Any], tuple[Any, ...]] | None:
    """What proves a file by cells of its own; None where it is a network, or something else."""
    if saved.header.get("family") == "norm":
        return prove_norm
    return next((rule for asked, rule in BY_CELLS if asked(saved)), None)
