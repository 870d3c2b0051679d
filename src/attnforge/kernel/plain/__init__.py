"""The kernel's part for plain transformers (docs/kernel.md): files of the family "plain".

    stream.py       columns and heads of the stored tensors; what is hidden from a head weighs an exact 0
    fold.py         compiled networks: every coordinate against the fold of the network that the file describes
    variant.py      columns in another order, heads that are split, heads that nothing depends on
    words.py        token programs: the network that the tensors are, column by column
"""

from __future__ import annotations
