"""The ramp by H warm heads with telescoping values (lemma A6, warm): token-wise, error about an eighth of a spacing.

The segment [a, b] is cut into H equal parts [s_h, e_h]. Head h makes clip(y, s_h, e_h) - s_h out of n anchors, g of
them on either side of its part, where values stay constant; parts add up to clip(y, a, b) - a, and head 0 carries a.
Where the neighbour takes over, this head's values do not jump to 0 as those of a cold head do: what a missing
anchor costs is a fraction of a spacing, not of max|a|, |b|.

**Bound.** |sum_h head_h - ramp| <= sum_h |head_h - (clip(y, s_h, e_h) - s_h)|. Every y lies within half a part's length
of at most two parts; there each term is at most the largest error `near`, elsewhere at most `far` (both computed from
the stored tables, A4 and A5). So the sum is at most 2 near + (H - 2) far, plus the rounding of the sum.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from torch import Tensor

from ..certificates.certificate import Certificate, Source, total
from ..certificates.rounding import ASSUMPTIONS, gamma, unit, up
from ..errors import ArgumentError, PrecisionError
from ..functions.registry import piecewise_linear
from ..heads.anchor.bound import AnchorWeights, anchor_bound
from .cold import anchors
from .heads import TokenHeads
from .result import DTYPES, number, sum_of
from .variants import BALANCED

GUARDS = 2  # anchors beyond either end of a head's part
CELLS = 8  # first cells between neighbouring anchors


class WarmHeads(TokenHeads):
    """Warm anchors, telescoping values; `theorems.ramp_heads(..., variant="warm")` builds it."""

    theorem = "warm anchors with telescoping values (A3, A6) in place of arXiv 2504.15956 v1 theorem 3.2"

    def __init__(self, *arguments: Any, causal: bool = False):
        super().__init__(*arguments, causal=causal)
        self.paper_bound = None

    @classmethod
    def checked(
        cls, w: Tensor, t: Tensor, a: float, b: float, heads: int, keys: int, kappa: float | None, eps0: float,
        radius: float, channels: int, causal: bool,
    ) -> WarmHeads:  # fmt: skip
        """Built, with its certificate, or refused."""
        least = 2 * GUARDS + 2
        if keys < least:
            raise ArgumentError(
                f"tokens must be at least {least} for warm heads (two own anchors, {GUARDS} guards a side), got {keys}"
            )
        warm = BALANCED if kappa is None else number("kappa", kappa, positive=True)
        built = cls(w, t, a, b, heads, keys, warm, eps0, radius, channels, causal=causal)
        built.judged((b - a) / 2, "use float64, fewer heads or a smaller radius")
        return built

    @property
    def part(self) -> int:
        """Spacings in a head's part of [a, b]."""
        return self.keys - 1 - 2 * GUARDS

    def dealt(self) -> list[Fraction]:
        a, b, count = Fraction(self.a), Fraction(self.b), self.part * self.heads
        step = (b - a) / count
        return anchors(a - GUARDS * step, b + GUARDS * step, count + 1 + 2 * GUARDS)

    def window(self, h: int) -> list[Fraction]:
        return self.places[h * self.part : h * self.part + self.keys]

    def ends_of(self, h: int) -> tuple[Fraction, Fraction]:
        """The ends of head h's part of [a, b]."""
        start = GUARDS + h * self.part
        return self.places[start], self.places[start + self.part]

    def ideal_values(self, h: int) -> list[Fraction]:
        start, stop = self.ends_of(h)
        base = Fraction(self.a) if h == 0 else Fraction(0)
        return [min(max(place, start), stop) - start + base for place in self.window(h)]

    def recertify(self) -> Certificate:
        most, query = self.reach()
        found = [self._head(h, most) for h in range(self.heads)]
        near = max(found, key=lambda x: x[0] + x[1])
        far = max(x[2] for x in found)
        each = min(2, self.heads)
        size = max(abs(self.a), abs(self.b)) + 2 * (self.b - self.a)
        added = float(gamma(self.heads + 1, unit(self.dtype))) * size if self.heads > 1 else 0.0
        terms: dict[tuple[str, Source], float] = {
            ("heads", "interpolation"): float(up(each * near[0], 2)),
            ("heads", "rounding"): float(up(each * near[1] + (self.heads - each) * far + added, 4)),
            ("w.x + t", "rounding"): query,
        }
        notes: dict[tuple[str, Source], str] = {
            ("heads", "interpolation"): f"of two neighbours, spacing {float(self.step):.3g}",
            ("w.x + t", "rounding"): f"|x| at most {self.radius:g}",
        }
        ledger = sum_of({key: value for key, value in terms.items() if value > 1e-300}, notes)
        return Certificate(
            "certified", total(x.value for x in ledger), DTYPES[self.dtype], f"clip(w.x + t, {self.a:g}, {self.b:g})",
            self.box, ledger, lemmas=("A4", "A5", "A6"), assumptions=ASSUMPTIONS,
        )  # fmt: skip

    def _head(self, h: int, most: float) -> tuple[float, float, float]:
        """Head h within half a part's length of its part: interpolation, rounding; and its error elsewhere."""
        table, values, shift = self.stored(h)
        weights = AnchorWeights(table.slope, table.offset, values, shift)
        low, high = (float(x) for x in self.ends_of(h))
        base, width = self.a if h == 0 else 0.0, high - low
        target = piecewise_linear([low - width, low, high, high + width], [base, base, base + width, base + width])
        # the rounding of the ends themselves: how far this target can be from the exact part of the ramp
        moved = 4 * 2.0**-52 * (abs(low) + abs(high) + abs(base) + width)
        left, right = low - width / 2, high + width / 2
        inside = np.linspace(low, high, CELLS * self.part + 1)
        tails = width / 2 * 2.0 ** -np.arange(0.0, 16.0)
        edges = np.unique(np.clip(np.concatenate([low - tails, inside, high + tails]), -most, most))
        here = anchor_bound(weights, target, edges, self.dtype) if len(edges) > 1 else None
        growing = width / 2 * 2.0 ** np.arange(0.0, 60.0)
        rest = 0.0
        for outside in (np.append(left - growing[growing < left + most][::-1], left), right + growing[growing < most]):
            kept = np.unique(np.clip(np.concatenate([outside, [-most if outside[-1] <= left else most]]), -most, most))
            if len(kept) > 1:
                rest = max(rest, anchor_bound(weights, target, kept, self.dtype).bound)
        near = (here.interpolation, here.rounding) if here is not None else (0.0, 0.0)
        if not np.isfinite([*near, rest]).all():
            raise PrecisionError("no finite bound can be given for these warm heads; use float64 or a smaller radius")
        return near[0] + moved, near[1], rest + moved
