"""What a file says of a function that no file can hold: how steep it is, and where its samples were taken.

A proof from it speaks of every function f on the box of which this is so: |f(x) - f(y)| <= L |x - y| for all x and y in
the box, in the Euclidean norm, for each output; and for each point v of a stated set there is a point within `near` of
it at which f is within `within` of the stored sample. Beyond the box, where rounded inputs may lie, f goes on with its
value at the nearest point of the box, which keeps L.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flint import arb

from ...errors import CertificateError
from ..balls import NotProved, largest, size
from ..file import Saved, Tensor, outward
from ..program import ends, number, whole
from ..rounding import MACHINES, Machine

NEAR = 2.0**-50  # of the largest coordinate: a few roundings of float64, in which points of a grid are made
VALUE_ULPS, PLACE_ULPS = 4, 2  # roundoffs of the function's own dtype that its values, and their places, may be off
MOST_POINTS = 1 << 20  # of samples: a millisecond for each hundred


def words(rise: str, points: str, unit: float | None = None) -> str:
    """The hypothesis as certificates state it: by how much f changes between x and y at most, where samples were taken,
    and the roundoff of the function's own values, where they err."""
    exact = "places within 2^-50 of the largest" if unit is None else (
        f"values within {VALUE_ULPS} u of the largest, places within {PLACE_ULPS} u + 2^-50, u = {unit!r}"
    )  # fmt: skip
    return (
        f"for every f with |f(x) - f(y)| <= {rise} on the box (Euclidean norm, each output) and the "
        f"stored samples at the {points} ({exact})"
    )


def of_grid(counts: Sequence[int]) -> str:
    """Points of an even grid, its ends among them."""
    return f"{math.prod(counts)} points of a grid of {_shape(counts)}"


def of_cells(counts: Sequence[int]) -> str:
    """Middles of equal cells."""
    return f"{math.prod(counts)} middles of {_shape(counts)} cells"


def of_centres(count: int) -> str:
    """Centres that are listed."""
    return f"{count} listed centres"


def _shape(counts: Sequence[int]) -> str:
    """As many factors as fit on a line, equal ones as a power.

    >>> _shape([3, 4]), _shape([2] * 9)
    ('3 x 4', '2^9')
    """
    same = len(set(counts)) == 1 and len(counts) > 2
    return f"{counts[0]}^{len(counts)}" if same else " x ".join(map(str, counts))


@dataclass(frozen=True)
class Hypothesis:
    """The numbers of it; `samples` has a row for each point."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    lipschitz: float
    samples: list[list[float]]
    near: arb
    within: arb
    text: str

    def error(self, distance: arb) -> arb:
        """How far f at a point is from the samples of points at such a distance, in the mean."""
        return arb(self.lipschitz) * (distance + self.near) + self.within


def steepness(config: Any) -> float:
    """The Lipschitz constant that a file states; `NotProved` where it states none."""
    if config["lipschitz"] is None:
        raise NotProved("no Lipschitz constant was declared: there is nothing to prove")
    found = number(config["lipschitz"])
    if found < 0:
        raise ValueError("a Lipschitz constant is not negative")
    return found


def steep(lipschitz: float) -> str:
    """By how much a function with such a constant changes between x and y."""
    return f"{float(lipschitz)!r} |x - y|"


def stated(config: Any, points: str) -> Hypothesis:
    """The hypothesis of a theorem's file, for samples at such points."""
    low, high = ends(config["box"])
    samples = [[number(x) for x in row] for row in config["samples"]]
    if not 1 <= len(samples) <= MOST_POINTS or len({len(row) for row in samples}) != 1 or not samples[0]:
        raise ValueError("its samples are no table")
    slope = steepness(config)
    far = largest([size(arb(x)) for x in (*low, *high)])
    near = arb(NEAR) * arb(len(low)).sqrt() * far
    return Hypothesis(low, high, slope, samples, near, arb(0), words(steep(slope), points))


def widened(low: Sequence[float], high: Sequence[float], dtype: str) -> list[tuple[float, float]]:
    """The sides of the box, widened to numbers of the dtype: an input is one."""
    return [(outward(a, dtype, above=False), outward(b, dtype, above=True)) for a, b in zip(low, high, strict=True)]


def taken(saved: Saved, dtype: Any, kept: tuple[str, ...] = ()) -> tuple[dict[str, Tensor], Machine]:
    """The tensors of a network, finite and all of its dtype, but those that are no weights; and what computes them."""
    weights = {name: tensor for name, tensor in saved.tensors.items() if name not in kept}
    if dtype not in MACHINES or any(tensor.dtype != dtype for tensor in weights.values()):
        raise NotProved(f"the kernel speaks of networks stored and run in float32 or float64, not {dtype!r}")
    for name, tensor in weights.items():
        if not all(map(math.isfinite, tensor.numbers)):
            raise CertificateError(f"no bound holds for weights that are not finite: {name}")
    return weights, MACHINES[dtype]


def counted(given: Any, most: int = MOST_POINTS) -> list[int]:
    """Numbers of points of each side."""
    found = [whole(n, 1, most) for n in given]
    if math.prod(found) > MOST_POINTS:
        raise NotProved(f"the kernel takes its time beyond {MOST_POINTS} points")
    return found
