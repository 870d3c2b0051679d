"""Anchor heads of the square potential read with one exponential per element: what `fast=True` does (lemma A8).

The stored keys are those of an even lattice up to their rounding. What is left, at most `Lattice.distance` in any
logit, is part of the bound, so that the certificate speaks of the stored weights: interpolation by the stored keys in
exact arithmetic, plus everything that the fast evaluation does differently.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...certificates.certificate import Certificate, Term, total
from ...certificates.rounding import assumptions, gamma, unit, up
from ...errors import CertificateError
from ...functions.registry import enclose
from ..anchor.bound import AnchorWeights, anchor_bound
from .bound import DIVISIONS, read_error
from .lattice import MOST_OFF, Lattice, U
from .read import anchor_read, read
from .table import unpacked

if TYPE_CHECKING:
    from ..anchor.head import AnchorHead



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
