"""The kernel's part for token programs (docs/kernel.md): files of the family "program".

    language.py     ops out of a file, their values and functions; what has no value
    terms.py        one form for ops that mean the same: a program and its rewritten form are compared by it
    facts.py        the values of every op, combinations of them at one position, what selectors can select
    logits.py       exact inner products of queries and keys, and how far computed ones can be off
    prove.py        columns from layer to layer, and the read-out
"""

from __future__ import annotations
