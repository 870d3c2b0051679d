"""The kernel's part for functions that are known by samples and by their steepness (docs/kernel.md).

    hypothesis.py   what a file says of such a function, in numbers and in words
    selection.py    what a softmax over constant slots computes, and layers that only move numbers
    grid.py         one head over a grid of a box
    cells.py        one head over scattered or even centres
    hats.py         hats of every coordinate, then a selection among grid points
"""

from __future__ import annotations
