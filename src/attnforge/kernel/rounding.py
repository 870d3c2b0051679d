"""The rounding model, and what it does to sums and to a softmax (lemmas K1, K2 and K4 of docs/kernel.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flint import arb

from .balls import ONE, ZERO, largest, up

EXPONENTIAL = 3  # a computed exponential is right to so many u: devices measured reach 2.56


@dataclass(frozen=True)
class Machine:
    """A dtype: its unit roundoff, and what a result loses at most when it is too small for a normal number."""

    u: arb
    tiny: arb
    huge: arb  # far enough below overflow for a sum of 256 such numbers

    def gamma(self, roundings: int) -> arb:
        """The relative error of so many roundings in a row (lemma K1); infinite where they are too many."""
        k = roundings * self.u
        return k / (1 - k) if roundings * self.u < 0.5 else arb.pos_inf()


MACHINES = {  # 2^-p, 2^(1 - bias) and 2^-9 of the largest power of the formats
    "float32": Machine(arb(2.0**-24), arb(2.0**-126), arb(2.0**119)),
    "float64": Machine(arb(2.0**-53), arb(2.0**-1022), arb(2.0**1015)),
}


def power_of_two(x: float) -> bool:
    """Whether a product with x is exact, underflow aside (lemma K2)."""
    return x == 0 or abs(math.frexp(x)[0]) == 0.5


def sum_roundings(weights: Sequence[float], bias: float) -> int:
    """How many roundings in a row a term of sum x_i w_i + bias goes through at most (lemma K2)."""
    used = [w for w in weights if w != 0]
    return len(used) - 1 + (not all(map(power_of_two, used))) + (bias != 0) if used else 0


def half_unit(machine: Machine, x: float) -> arb:
    """The most that rounding a number of at most x to nearest takes: u times the power of two below (lemma K2)."""
    return machine.u * (math.ldexp(0.5, math.frexp(x)[1]) if x < math.inf else math.inf)


def affine_rounding(machine: Machine, weights: Sequence[float], bias: float, most: arb, part: arb | None = None) -> arb:
    """What rounding adds to sum x_i w_i + bias (lemma K2): sum |x_i w_i| + |bias| <= most, one sign's <= part."""
    count, exact = sum_roundings(weights, bias), all(map(power_of_two, weights))
    shrinks, rounding = count > 0 or any(0 < abs(w) < 1 for w in weights), machine.gamma(count) * most
    if part is not None and count:
        once = count * half_unit(machine, up(part + rounding))
        rounding = rounding.min(once if exact else once + machine.u * most)
    return rounding + ((count + 1) * machine.tiny if shrinks else ZERO)


@dataclass(frozen=True)
class Softmax:
    """A softmax as computed: upper bounds of the weights of the slots, and of what moving logits does to them."""

    machine: Machine
    exact: list[arb]  # upper bounds of the exact weights
    computed: list[arb]  # and of the computed ones
    moves: list[arb]  # expm1(d_k) times the exact weight, and the factor of Jensen's inequality
    summed: int  # additions of heavy exponentials in a row
    light: arb  # the sum of the other weights, at most
    settled: bool  # one slot is heavy, and its computed weight is 1

    @classmethod
    def of(
        cls, machine: Machine, weights: Sequence[arb], logit_errors: Sequence[arb], even: bool = False
    ) -> Softmax:
        """From upper bounds of exact weights, and of the errors of the logits before the exponential (lemma K4).

        Where all logits are computed to be the same number, `even`, all exponentials are exp(0) = 1, and so is no sum
        of them rounded.
        """
        extra = -(1 - EXPONENTIAL * machine.u).log()
        d = [ZERO for _ in logit_errors] if even else [e + extra for e in logit_errors]
        mean = sum((w * x for w, x in zip(weights, d, strict=True)), ZERO)
        top = largest(d)
        shift = mean if mean < top else top
        limit = machine.u / (8 * len(d))
        computed, moves, heavy, light, factor = [], [], 0, ZERO, shift.exp()
        for w, x in zip(weights, d, strict=True):
            most = w * (x + shift).exp()
            most = most if most < 1 else ONE
            computed.append(most)
            moves.append(factor * w * x.expm1())
            if most <= limit:
                light += most
            else:
                heavy += 1
        return cls(machine, list(weights), computed, moves, 0 if even else heavy - 1, light,
                   heavy == 1 and bool(light <= machine.u / 2))  # fmt: skip

    def mean(self, size: Sequence[arb]) -> arb:
        """An upper bound of the computed mean of |V_k| <= size."""
        total = sum((w * v for w, v in zip(self.computed, size, strict=True)), ZERO)
        most = largest(size)
        return total if total < most else most

    def weighty(self, size: Sequence[arb]) -> set[int]:
        """The slots whose part of the mean is not too small to be worth a rounding of its own."""
        limit = self.machine.u * self.mean(size) / (8 * len(size))
        return {k for k, (w, v) in enumerate(zip(self.computed, size, strict=True)) if not w * v <= limit}

    def error(
        self, spread: Sequence[arb], size: Sequence[arb], lost: arb = ZERO, weighty: set[int] | None = None
    ) -> tuple[arb, arb]:
        """How far the computed mean of values is from the exact one, and how large the computed one is at most.

        `spread` bounds |V_k - mean|, `size` the computed |V_k|; `lost` is the error of the first value. `weighty` are
        the slots to count where the values are only a part of what is summed (lemma K4).
        """
        slots, machine = len(size), self.machine
        moved = sum((m * s for m, s in zip(self.moves, spread, strict=True)), ZERO)
        widest = largest(spread)
        widest = widest.min(2 * self.light * widest) if self.settled else widest
        moved = moved if moved < widest else widest
        most, mean = largest(size), self.mean(size)
        heavy = self.weighty(size) if weighty is None else weighty
        light = sum((w * v for k, (w, v) in enumerate(zip(self.computed, size, strict=True)) if k not in heavy), ZERO)
        count = 0 if self.settled and len(heavy) < 2 else self.summed + max(len(heavy) - 1, 0) + 3
        roundings = machine.gamma(count) if 8 * slots * machine.u < 1 else arb.pos_inf()
        error = moved + (roundings + 3 * self.light) * mean + 3 * light
        error += self.computed[0] * lost + 2 * slots * (1 + most) * machine.tiny
        return error, mean + error
