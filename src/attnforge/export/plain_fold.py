"""Affine functions of the residual stream, exactly: what folded weights should be, and what rounding makes of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..certify.rounding import gamma
from ..certify.rules import _roundings as affine_roundings
from ..heads.self_head import power_of_two
from ..ir.ops import Array
from .plain_columns import FLAG


@dataclass(frozen=True, eq=False)
class Fold:
    """An affine function of the stream, (column, coordinate), constants in the flag's row.

    `matrix` is what float64 makes of it, within `error` of the exact one; `size` adds up absolute values.
    """

    matrix: Array
    size: Array
    error: Array

    @classmethod
    def columns(cls, places: list[int], width: int) -> Fold:
        """Columns of the stream themselves."""
        matrix = np.zeros((width, len(places)))
        matrix[places, range(len(places))] = 1.0
        return cls(matrix, matrix, np.zeros_like(matrix))

    def then(
        self, weight: Array, bias: Array | None, slack: Array | None = None, slack_bias: Array | None = None
    ) -> Fold:
        """This, times a weight that is itself only known up to `slack`, plus a bias."""
        matrix, size = self.matrix @ weight, self.size @ np.abs(weight)
        used = (self.matrix != 0) * 1.0 @ ((weight != 0) * 1.0)
        left, right = (self.matrix != 0) & power_of_two(self.matrix), (weight != 0) & power_of_two(weight)
        clean = (left * 1.0) @ ((weight != 0) * 1.0) + ((self.matrix != 0) * 1.0) @ (right * 1.0)
        exact = (used == 0) | ((used == 1) & (clean > 0))
        own = np.where(exact, 0.0, (weight.shape[0] + 4) * 2.0**-52 * size)
        error = self.error @ np.abs(weight) + own
        if slack is not None:
            error = error + self.size @ slack
        if bias is not None:
            added = (bias != 0) & (matrix[FLAG] != 0)
            matrix[FLAG] += bias
            size[FLAG] += np.abs(bias)
            error[FLAG] += added * 2.0**-52 * size[FLAG]
        if slack_bias is not None:
            error[FLAG] += slack_bias
        return Fold(matrix, size, error * (1 + weight.shape[0] * 2.0**-50))

    def with_fresh(self, fresh: dict[int, int]) -> Fold:
        """The same over a stream with more columns, fresh ones added to the coordinates they belong to."""
        more = np.zeros((len(fresh), self.matrix.shape[1]))
        matrix, size, error = (np.concatenate([x, more]) for x in (self.matrix, self.size, self.error))
        for coordinate, place in fresh.items():
            matrix[place, coordinate] = size[place, coordinate] = 1.0
        return Fold(matrix, size, error)


@dataclass(frozen=True, eq=False)
class Stored:
    """Folded weights as a dtype stores them, beside the exact ones: how far computed coordinates can be off."""

    off: Array  # (column, coordinate)
    weight: Array
    rate: Array  # (coordinate,)
    lost: Array

    @classmethod
    def of(cls, stored: Array, exact: Fold, u: float, tiny: float, hot: tuple[int, ...] = ()) -> Stored:
        """Rounding of sums in any order. The flag is 1 and of the columns `hot` one is 1, the others 0: such products
        are exact, and of all hot columns one is a term."""
        off = np.abs(stored - exact.matrix) * (1 + 2.0**-50) + exact.error
        fixed = np.stack([stored[FLAG] != 0, stored[list(hot)].any(0)]).sum(0)
        rest = stored.copy()
        rest[[FLAG, *hot]] = 0.0
        terms = affine_roundings(rest, fixed.astype(float)) + np.maximum(fixed - 1, 0)
        rate = np.where(terms > 0, gamma(terms, u), 0.0)
        return cls(off, np.abs(stored), rate, np.where(terms > 0, (terms + 2) * tiny, 0.0))

    @classmethod
    def joined(cls, parts: list[Stored]) -> Stored:
        """Side by side."""
        off, weight = (np.concatenate([getattr(p, name) for p in parts], 1) for name in ("off", "weight"))
        return cls(off, weight, np.concatenate([p.rate for p in parts]), np.concatenate([p.lost for p in parts]))

    def error(self, size: Array) -> Array:
        """|computed - exact| (..., coordinate) for columns of at most `size` (..., column); an exact 0 stays."""
        found = size @ self.off + self.rate * (size @ self.weight) + self.lost
        return found * (1 + (len(self.off) + 8) * 2.0**-51)
