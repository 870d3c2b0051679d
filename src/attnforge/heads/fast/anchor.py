"""Anchor heads of the square potential read with one exponential per element: what `fast=True` does (lemma A8).

The stored keys are those of an even lattice up to their rounding. What is left, at most `Lattice.distance` in any
logit, is part of the bound, so that the certificate speaks of the stored weights: interpolation by the stored keys in
exact arithmetic, plus everything that the fast evaluation does differently.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from ...certificates.certificate import Certificate, Term, total
from ...certificates.rounding import assumptions, gamma, unit, up
from ...errors import ArgumentError, CertificateError
from ...functions.registry import enclose
from ..anchor.bound import AnchorWeights, anchor_bound
from .bound import DIVISIONS, read_error
from .read import anchor_read, packed, read, unpacked

if TYPE_CHECKING:
    from ..anchor.head import AnchorHead

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


def lattice_of(head: AnchorHead) -> Lattice:
    """The lattice of a head's stored keys on its interval."""
    return Lattice.of(*_read(head))


def _read(head: AnchorHead) -> tuple[AnchorWeights, float]:
    """The stored weights, and how far from the centre the interval reaches in the dtype in hand."""
    weights = head.weights_in_float64()
    return weights, float(np.max(np.abs(head.cells()[[0, -1]] - weights.centre)) * (1 + 4 * U))


def fast_core(head: AnchorHead, y: Tensor, lattice: Lattice) -> Tensor:
    """The head at y, the linear skip included."""
    value = head.group.M_V[0, :, 0]
    value = value.flip(0) if lattice.mirrored else value
    if torch.compiler.is_compiling():
        rate, kappa, centre = unpacked(lattice.numbers)
        out = read(y, value, rate, kappa, centre)
    else:
        out = anchor_read(y, value, lattice.rate, lattice.kappa, lattice.centre)
    slope, constant = head.layer.S, head.layer.s
    return out if slope is None or constant is None else out + (y * slope[0, 0] + constant[0])


def fast_certificate(head: AnchorHead, lattice: Lattice, blank: Certificate) -> Certificate:
    """Interpolation by the stored weights in exact arithmetic, plus the bound of the fast evaluation."""
    (weights, reach), dtype, cells = _read(head), head.dtype, head.cells()
    off = lattice.distance(weights, reach)
    if not off <= MOST_OFF:
        raise CertificateError(
            f"the keys have changed since fast=True was set: logits are {off:.3g} away from those of {lattice}; set it "
            "again"
        )
    found = anchor_bound(weights, head.function, cells, torch.float64, head.relative)
    lo, hi = float(cells[0]), float(cells[-1])
    value = weights.value[::-1] if lattice.mirrored else weights.value
    reading = read_error(value, lattice.rate, lattice.kappa, lo, hi, dtype, lattice.centre, logit_error=off)
    error = reading.rounding
    a, b = weights.skip
    if weights.skip != (0.0, 0.0):
        size = np.max(np.abs(weights.value)) + abs(a) * max(abs(lo), abs(hi)) + abs(b)
        error = error + gamma(3, unit(dtype)) * (size + error)
    leak = np.full_like(error, reading.leak)
    if head.relative:
        low, high = enclose(head.function, reading.low, reading.high)
        least = np.maximum(np.maximum(low, -high), 0.0)
        error, leak = error / least, leak / least
    site = f"{head.function.name}, {head.size} anchors"
    terms = [Term(site, "interpolation", found.bound, f"worst near y = {found.where:.6g}")]
    if reading.leak:
        terms.append(Term(site, "leak", float(up(leak.max(), 4)), "anchors outside the window"))
    terms.append(Term(site, "rounding", float(up(error.max(), 8)), f"{blank.dtype}, one exponential per element"))
    return replace(
        blank, kind="certified", bound=total(t.value for t in terms), terms=tuple(terms),
        lemmas=("A1", "A4", "A8"), assumptions=(*assumptions(), DIVISIONS),
    )  # fmt: skip
