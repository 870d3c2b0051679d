"""The kernel's part for heads on their own (docs/kernel.md).

    heads.py        anchors, gates, products and heads over tokens as networks of one operation
    pair.py         gates of two numbers
    fast.py         anchors and activations that are read with one exponential per element
    norm.py         norms of rows, whose bound is relative to the row's largest result
    ramp.py         an affine map and a clip, as a theorem has it
    chain.py        gates that are followed by a product or by tables
    rules.py        which of these speaks of a file
"""

from __future__ import annotations
