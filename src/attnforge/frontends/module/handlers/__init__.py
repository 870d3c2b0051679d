"""All handlers together, and the table of them that the documentation prints."""

from __future__ import annotations

from . import attention as ops_attention
from . import compare as ops_compare
from . import interpolate as ops_interpolate
from . import linear as ops_linear
from . import movement as ops_movement
from . import order as ops_order
from . import pointwise as ops_pointwise
from . import reduce as ops_reduce
from . import scatter as ops_scatter
from .table import TABLE

__all__ = ["TABLE", "supported_operations"]

# Importing them fills the table.
_FILES = (
    ops_movement, ops_pointwise, ops_compare, ops_reduce, ops_linear, ops_attention, ops_order, ops_scatter,
    ops_interpolate,
)  # fmt: skip


def supported_operations() -> list[tuple[str, str]]:
    """Every operation that a function or module may use, with a note; composites of them are supported as well.

    >>> ("relu", "a registered function, entry by entry") in supported_operations()
    True
    """
    return sorted((name, handler.note) for name, handler in TABLE.items())
