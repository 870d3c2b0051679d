"""The kernel: a second, independent way to a bound, small enough to be read in a day (docs/kernel.md).

It reads a saved network, takes the stored numbers of every layer and the program, and proves how far the two can differ
on the box, in ball arithmetic. It shares with the rest of the package the file format and the errors, nothing else.

    file.py         the bytes of a saved network: header and exact numbers
    balls.py        ball arithmetic: precision, upper ends, series of few terms
    program.py      what is computed, and its values as exact affine forms of atoms
    functions.py    univariate functions: names, formulas, series, ranges
    derivation.py   choices that the proof needs, validated; never claims
    rounding.py     the rounding model, sums, softmax
    scalar.py       the one lemma of heads that read one scalar: anchors, gates, squares, products
    roots.py        roots of sums of squares, whose errors add up as lengths
    tokens.py       heads over tokens and channels: attention, mixing, maxima, softmax, norms
    values.py       ranges of all values of the program on a part of the box
    alone/          heads, norms, chains, ramps and fast activations on their own
    plain/          plain transformers and their variants, a part of its own
    incontext/      fitted estimators, a part of its own
    programs/       token programs, a part of its own
    prove.py        errors from layer to layer, the split tree of the box, the bound
"""

from __future__ import annotations
