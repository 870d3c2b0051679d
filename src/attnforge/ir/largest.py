"""Range queries: the largest of the numbers that belong to consecutive cells."""

from __future__ import annotations

import numpy as np

from .ops import Array


class Largest:
    """The largest of the numbers that belong to consecutive cells, over many ranges of cells at once."""

    def __init__(self, start: Array, number: Array):
        self.start, self.levels = start, [number]
        while 2 ** len(self.levels) <= len(start):  # largest of 2^k neighbours
            half, last = 2 ** (len(self.levels) - 1), self.levels[-1]
            self.levels.append(np.maximum(last[:-half], last[half:]))

    def over(self, low: Array, high: Array) -> Array:
        """The largest number of the cells that meet [low, high]; cells begin at `start`, the last one has no end."""
        first = np.clip(np.searchsorted(self.start, low, side="left") - 1, 0, len(self.start) - 1)
        final = np.clip(np.searchsorted(self.start, high, side="right") - 1, first, len(self.start) - 1)
        depth = np.floor(np.log2(final - first + 1)).astype(int)
        worst = np.empty(np.shape(low))
        for k, level in enumerate(self.levels):
            at = depth == k
            worst[at] = np.maximum(level[first[at]], level[final[at] - 2**k + 1])
        return worst
