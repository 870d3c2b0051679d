"""The even lattice that stored keys of the square potential are, up to their rounding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ...certificates.rounding import up
from ...errors import ArgumentError
from ..anchor.bound import AnchorWeights
from .table import packed

MOST_OFF = 0.01  # logits further than this from an even lattice are not one
U = 2.0**-53  # roundoff of float64, in which the lattice is worked out


@dataclass(frozen=True)
class Lattice:
    """The even lattice of a table of keys: logits rate k (y - centre) - kappa k^2, right to `off` when it was made.

    A `mirrored` table holds its keys from the largest down.
    """

    rate: float
    kappa: float
    centre: float
    off: float
    mirrored: bool = False
    numbers: ClassVar[str]  # rate, kappa and centre for compilers: no field, it is not saved

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers", packed(self.rate, self.kappa, self.centre))

    @classmethod
    def of(cls, weights: AnchorWeights, reach: float) -> Lattice:
        """The lattice of stored keys, for |y - centre| <= reach; `ArgumentError` if the keys are not evenly spaced."""
        count = len(weights.slope)
        k = np.arange(count) - (count - 1) / 2
        rate = float(np.sum(k * weights.slope) / np.sum(k * k))
        curve = np.stack([np.ones(count), k * k], -1)
        # of two keys the offsets are equal, and any kappa will do
        bend = np.linalg.lstsq(curve, weights.offset, rcond=None)[0][1] if count > 2 else -0.25
        found = cls(abs(rate), -float(bend), weights.centre, 0.0, rate < 0)
        off = found.distance(weights, reach)
        if not (found.rate > 0 and found.kappa > 0 and off <= MOST_OFF):
            raise ArgumentError(
                f"fast=True reads evenly spaced anchors (potential='square'), but these logits are {off:.3g} away from "
                "an even lattice's; fit with potential='square', or leave fast out"
            )
        return replace(found, off=off)

    def distance(self, weights: AnchorWeights, reach: float) -> float:
        """How far any logit of stored keys is from this lattice's for |y - centre| <= reach, up to a common one."""
        count = len(weights.slope)
        k = np.arange(count) - (count - 1) / 2
        rate = -self.rate if self.mirrored else self.rate
        common = float(weights.slope.mean())
        slope_off = np.abs(weights.slope - common - rate * k) + 8 * U * (np.abs(weights.slope) + abs(common))
        above = weights.offset + self.kappa * k * k
        level = 0.5 * float(above.max() + above.min())
        offset_off = np.abs(above - level) + 16 * U * (np.abs(weights.offset) + abs(level) + abs(self.kappa) * k * k)
        off_centre = abs(weights.centre - self.centre)
        moved = 2 * np.abs(weights.slope).max() * off_centre
        return float(up(np.max(slope_off * (reach + off_centre) + offset_off) + moved, 8))
