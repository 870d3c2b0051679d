"""Tables of a compiled network that are read with one exponential (lemma A8): which they are, and what that costs.

Such a table is named when it is built (`AnchorSite.even`); whether it is still what was named is found out from its
stored numbers, by the same words here for evaluation and bound. Where it is, processors read it by polynomials and
everything else by the softmax, and the bound covers both; where a changed entry or training moved it, there is only the
softmax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...errors import ArgumentError, PrecisionError
from ...functions.queries import Largest
from ..anchor.bound import AnchorWeights, Reading
from .bound import read_error
from .expression import basis
from .lattice import MOST_OFF, Lattice
from .table import MOST_LATTICE, form_of


@dataclass(frozen=True)
class EvenTable:
    """Keys at rate k, -kappa k^2 around `centre`, arguments at most `reach` away from it."""

    rate: float
    kappa: float
    centre: float
    reach: float

    @classmethod
    def named(cls, numbers: tuple[float, ...]) -> EvenTable | None:
        """The table that a site names, if any: numbers out of a file; `ArgumentError` unless they are some of a table.

        >>> EvenTable.named(()) is None, EvenTable.named((1.0, 0.25, 0.0, 4.0)).kappa
        (True, 0.25)
        """
        if not numbers:
            return None
        if len(numbers) != 4 or not all(math.isfinite(x) for x in numbers):
            raise ArgumentError(f"an even table has a rate, a kappa, a centre and a reach, got {numbers!r}")
        found = cls(*numbers)
        sizes = (found.rate, found.kappa, found.rate / found.kappa if found.kappa else 0.0)
        if not all(2.0**-100 < x < 2.0**100 for x in sizes) or not found.reach >= 0:
            raise ArgumentError(f"rate and kappa of an even table are positive, and neither huge nor tiny: {found}")
        return found

    @classmethod
    def of(cls, weights: AnchorWeights, low: float, high: float) -> EvenTable | None:
        """The table that stored weights are on [low, high]; None where they are none."""
        reach = max(abs(low - weights.centre), abs(high - weights.centre))
        try:
            lattice = Lattice.of(weights, reach)
            return None if lattice.mirrored else cls.named((lattice.rate, lattice.kappa, lattice.centre, reach))
        except ArgumentError:
            return None

    @property
    def numbers(self) -> tuple[float, ...]:
        """What `named` takes."""
        return self.rate, self.kappa, self.centre, self.reach

    def off(self, weights: AnchorWeights, reach: float) -> float:
        """How far the logits of stored weights are from this table's."""
        return Lattice(self.rate, self.kappa, self.centre, 0.0).distance(weights, reach)

    def reads(self, weights: AnchorWeights, dtype: torch.dtype) -> bool:
        """Whether stored weights are read by polynomials in this dtype: the question of evaluation and of bound."""
        count = len(weights.slope)
        if not 2 <= count <= MOST_LATTICE or form_of(count, self.kappa, dtype) != "lattice":
            return False
        return self.off(weights, self.reach) <= MOST_OFF

    def read(self, keys: Tensor, values: Tensor, centre: float) -> tuple[Tensor, int, bool, bool] | None:
        """[rate, centre, Q, P, R] of stored keys (slot, 2) and values (slot), the number of powers, whether there is R,
        and whether k are whole numbers; None where the softmax has to read them."""
        slope, offset = keys.double().numpy().T
        weights = AnchorWeights(slope, offset, values.double().numpy(), centre)
        if not self.reads(weights, values.dtype):
            return None
        count = len(values)
        total, matrix = basis(count, self.kappa, values.dtype, values.device)
        odd = not torch.equal(values, values.flip(0))
        first = torch.tensor([self.rate, self.centre], dtype=torch.float64)
        found = torch.cat([first, total, values.double() @ matrix])
        return found.to(values.dtype), (count + 1) // 2, odd, count % 2 == 1

    def reading(self, weights: AnchorWeights, low: float, high: float, dtype: torch.dtype) -> Reading | None:
        """How far reading stored weights by polynomials on [low, high] is from reading them exactly; None where they
        are not read so. Infinite where nothing can be proved."""
        if not self.reads(weights, dtype):
            return None
        reach = max(abs(low - weights.centre), abs(high - weights.centre)) * (1 + 2.0**-50)
        off = self.off(weights, reach)
        try:
            found = read_error(weights.value, self.rate, self.kappa, low, high, dtype, self.centre, logit_error=off)
        except PrecisionError:
            return lambda first, last: np.full(np.shape(first), np.inf)
        return Largest(found.low, found.rounding + found.leak).over
