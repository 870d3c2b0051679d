"""The kernel's part for modules that are no network of layers (docs/kernel.md).

    norm.py         norms of rows, whose bound is relative to the row's largest result
    chain.py        gates that are followed by a product or by tables
"""

from __future__ import annotations
