"""One head over a grid of a box (lemmas K40 and K42): files of the family "blackbox-grid"."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

from flint import arb, fmpq

from ...errors import CertificateError
from ..balls import ZERO, NotProved, largest, size
from ..file import Saved
from ..program import ends, exact, number, whole
from ..rounding import Machine
from . import hypothesis as hypotheses
from .hypothesis import NEAR, PLACE_ULPS, VALUE_ULPS, Hypothesis, counted, taken, widened
from .selection import Slots, averaged, expect, eye, first, logit_errors, loosened, settled, values_error

PARTS = 1024  # of half a cell, on each of which the spread of the selection is bounded
FURTHEST = 64  # grid points from the nearest that are looked at one by one
FAINT = 2.0**-20  # of a grid point, beside the one before it: where one looks no further
KEPT = ("points", "wanted", "reference")  # besides weights: a sample that was measured, f's values
COUNTED = 1 << 12  # sums of costs that are counted, beyond which all slots are heavy


def prove_grid(saved: Saved, chosen: Any) -> tuple[arb, str, str]:
    """The bound of a grid's file, its dtype, and the hypothesis; there is nothing to choose."""
    if chosen != {}:
        raise ValueError("a grid leaves no choices")
    config = saved.header["config"]
    about, (low, high, cells, kappa) = config["about"], config["grid"]
    tensors, machine = taken(saved, config["dtype"], KEPT)
    pieces = [whole(n, 0) for n in cells]
    counts, D = counted([n + 1 for n in pieces]), len(cells)
    lower, upper = ([exact(number(x)) for x in end] for end in (low, high))
    box = ends(about["box"])
    sides = widened(*box, config["dtype"])
    if not len(sides) == len(lower) == len(upper) == D or any(
        not (a <= exact(x) and exact(y) <= b and (a < b) == (n > 0))
        for (x, y), a, b, n in zip(sides, lower, upper, pieces, strict=True)
    ):
        raise CertificateError("the grid does not cover the box")
    given = _hypothesis(config, saved, box, counts)
    outputs = len(given.samples[0])
    start = "layer.groups.0."
    expect(tensors, start + "W_Q", (1, D, D + 1), first(eye((D, D + 1))))
    expect(tensors, start + "W_O", (1, outputs, outputs), first(eye((outputs, outputs))))
    (bias,), (keys,), (values,) = (tensors.pop(start + name).rows() for name in ("b_Q", "M_K", "M_V"))
    added = list(tensors.pop("layer.s").numbers)
    if tensors or len(bias) != D + 1 or bias[D] != 1 or len(keys) != math.prod(counts) or len(added) != outputs:
        raise CertificateError("the tensors of the grid do not fit it, or its query reads more than x and 1")
    slots = Slots([-x for x in bias[:D]], keys, values)
    sharp = exact(number(kappa))
    if not sharp > 0:
        raise ValueError("its inverse temperature is not positive")
    steps = [(b - a) / n if n else fmpq(0) for a, b, n in zip(lower, upper, pieces, strict=True)]
    wanted = _keys(lower, steps, counts, slots.middle, sharp)
    error, logit = logit_errors(machine, slots, wanted, sides)
    off, most = values_error(values, added, given.samples, range(outputs))
    if not largest([logit, 4 * most, *(size(arb(x)) for side in sides for x in side)]) < machine.huge:
        raise NotProved("numbers of a grid may overflow")
    d, live = loosened(machine, error), sum(n > 0 for n in pieces)
    spread = nearby(machine, arb(sharp), d, live)
    square = arb(sum((h * h for h in steps), fmpq(0))) * spread
    count = math.prod(counts)
    heavy = min(count, weighty(machine, arb(sharp), d, live, count))
    rounding = averaged(machine, count, heavy, machine.u / 8, most)
    return settled(machine, given, square, off, most, rounding, added), config["dtype"], given.text


def _hypothesis(config: Any, saved: Saved, box: Any, counts: list[int]) -> Hypothesis:
    """What the file says of its black box: values are off by roundoffs of its own dtype, and so are points."""
    unit, samples = number(config["about"]["unit"]), saved.tensors["reference"]
    if not 2.0**-53 <= unit < 1 or samples.dtype != "float64" or samples.shape[0] != math.prod(counts):
        raise NotProved("the values of f are not one for each point of the grid, in float64")
    if not all(map(math.isfinite, samples.numbers)):
        raise CertificateError("the values of f are not finite")
    slope = hypotheses.steepness(config)
    top = largest([arb(abs(x)) for x in samples.numbers])
    far = sum((size(arb(x)).max(size(arb(y))) ** 2 for x, y in zip(*config["grid"][:2], strict=True)), ZERO).sqrt()
    near = far * (NEAR + PLACE_ULPS * arb(unit))
    text = hypotheses.words(hypotheses.steep(slope), hypotheses.of_grid(counts), unit)
    return Hypothesis(box[0], box[1], slope, samples.rows(), near, VALUE_ULPS * arb(unit) * top, text)


def _keys(low: list[fmpq], steps: list[fmpq], counts: list[int], middle: list[float], kappa: fmpq) -> list[list[arb]]:
    """2 beta (v - c) and -beta |v - c|^2 for every point v of the grid, the last coordinate running fastest."""
    axes = []
    for a, h, n, m in zip(low, steps, counts, map(exact, middle), strict=True):
        beta = kappa / (h * h) if h else fmpq(0)
        places = [a + j * h - m for j in range(n)]
        axes.append([(arb(2 * beta * x), arb(beta * x * x)) for x in places])
    return [[*(s for s, _ in pairs), -sum((t for _, t in pairs), ZERO)] for pairs in itertools.product(*axes)]


def nearby(machine: Machine, kappa: arb, d: arb, axes: int) -> arb:
    """B of lemma K42: E|x - v|^2 for the weights as computed is at most B times the sum of the squares of the steps."""
    colder, warmer, lifted = kappa * (1 - machine.u), kappa * (1 + machine.u), (2 * d).exp()
    rest = ZERO
    cells = [arb(i, 0).union(arb(i + 1)) / (2 * PARTS) for i in range(PARTS)]
    others = []
    for t in cells:
        least = 1 + (-warmer * (1 - 2 * t)).exp().lower()
        others.append(_others(colder, t) / least)
        rest = rest.max(2 * machine.u * kappa * others[-1])
    share = lifted * (1 + rest) ** max(axes - 1, 0)
    return largest([t.upper() ** 2 + size(share * x) for t, x in zip(cells, others, strict=True)])


def _others(kappa: arb, t: arb) -> arb:
    """The sum of c exp(-kappa c), c = j^2 - 2jt, over all j but 0."""
    total = ZERO
    for j in range(1, FURTHEST):
        right, left = (j * j - 2 * j * t).max(ZERO), j * j + 2 * j * t
        total += right * (-kappa * right).exp() + left * (-kappa * left).exp()
        after = arb((j + 1) * j)  # beyond, c is at least that on either side, and c exp(-kappa c) falls
        fall = arb(j + 2) / j * (-2 * kappa * (j + 1)).exp()
        if fall < FAINT and kappa * after >= 1:
            return total + 4 * after * (-kappa * after).exp()
    raise NotProved("a grid is too warm for its cells")


@functools.lru_cache(maxsize=64)
def _ways(axes: int, most: int) -> int:
    """How many grid points can have costs (in kappa) of at most `most` together, wherever x is."""
    one = dict.fromkeys(range(most + 1), 0)
    for j in range(math.isqrt(most) + 2):
        for cost in (j * j, *([j * j - j] if j else [])):
            if cost <= most:
                one[cost] += 1
    ways = {0: 1}
    for _ in range(axes):
        after: dict[int, int] = {}
        for (a, x), (b, y) in itertools.product(ways.items(), one.items()):
            if y and a + b <= most:
                after[a + b] = after.get(a + b, 0) + x * y
        ways = after
    return sum(ways.values())


def weighty(machine: Machine, kappa: arb, d: arb, axes: int, slots: int) -> int:
    """How many grid points can weigh more than u / 8 slots at one place of the box, at most (lemma K42)."""
    most = (2 * d + (8 * slots / machine.u).log()) / ((1 - machine.u) * kappa)
    return _ways(axes, math.ceil(float(most.upper())) + 1) if most < COUNTED / max(axes, 1) else slots
