"""A user's function on a grid of its box, and how much it can change: a Lipschitz constant or a concave modulus.

What was said about smoothness cannot be proved from values, but it can be refuted: steep neighbours are looked at.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..box import Box
from ..errors import ArgumentError, DomainError
from ..kernel.sampled.hypothesis import steep, words
from .result import Construction, finite_values, number

Modulus = Callable[[float], float]
Function = Callable[[Any], Any]
MOST_POINTS = 1 << 20  # of a grid: its tables then take about a gigabyte
BATCH = 1 << 14  # points that f sees at once: a few megabytes for it to work on
SUSPECTS = 32  # pairs of neighbours with the steepest slopes that are looked at closely
HALVINGS, NARROW = 40, 1e-9  # of a suspect segment at the most, and the length at which rounding of f takes over
LADDER = [2.0**k for k in range(-20, 1)]  # distances at which a modulus is looked at: those of cells of a box
OWN_ROUNDING, SLACK = 1e-13, 1e-9  # relative errors granted to f's values, and to the constant that was given


@dataclass(frozen=True)
class LipschitzModulus:
    """The modulus of continuity of a function with a Lipschitz constant."""

    slope: float

    def __call__(self, t: float) -> float:
        return self.slope * t


class Sampled:
    """What a file holds of a function: its samples, which the certificate is made of, and no more."""

    def __call__(self, X: Tensor) -> Tensor:
        raise ArgumentError(
            "this network was read from a file, which holds the samples of f and not f itself: evaluate f beside it"
        )


class FromSamples(Construction):
    """A network made from samples: `asked` holds them, and what is known of how fast the function moves."""

    asked: Any

    @property
    def beyond(self) -> str:
        known = self.asked.modulus is None or isinstance(self.asked.modulus, LipschitzModulus)
        return "" if known else "its modulus of continuity is a Python function, which no file can hold"

    @property
    def storable(self) -> bool:
        return isinstance(self.asked.modulus, LipschitzModulus)


def hypothesis_of(modulus: Modulus | None, points: str) -> str:
    """Of which functions a bound speaks that was made from samples at such points."""
    if modulus is None:
        return ""
    known = isinstance(modulus, LipschitzModulus)
    return words(steep(modulus.slope) if known else "modulus(|x - y|)", points)  # type: ignore[attr-defined]


def slope_of(modulus: Modulus | None) -> float:
    """The Lipschitz constant that a file holds; refuses what no file can hold."""
    if not isinstance(modulus, LipschitzModulus):
        held = "only measured against f itself" if modulus is None else "certified by a modulus, a Python function"
        raise ArgumentError(
            f"this network is {held}, which no file can hold: build it with lipschitz=..., or keep its state_dict"
        )
    return modulus.slope


def modulus_of(lipschitz: float | None, modulus: Modulus | None) -> Modulus | None:
    """omega from what was given; None when nothing was, and then there is no certificate."""
    if lipschitz is not None and modulus is not None:
        raise ArgumentError("give lipschitz or modulus, not both")
    if lipschitz is not None:
        return LipschitzModulus(number("lipschitz", lipschitz, positive=True))
    if modulus is None:
        return None
    if not callable(modulus):
        raise ArgumentError(f"modulus must be a function of a distance, got {type(modulus).__name__}")
    steps = [(0.0, 0.0)] + [(t, float(modulus(t))) for t in LADDER]
    fine, before = all(math.isfinite(v) and v >= 0 for _, v in steps), math.inf
    for (s, x), (t, y) in itertools.pairwise(steps):  # an increment may not exceed what the slope before it allows
        fine = fine and x <= y <= x + before * (t - s) + SLACK * y
        before = (y - x) / (t - s)
    if not fine:
        raise ArgumentError("modulus must be a concave function that grows from 0, such as lambda t: 2 * t**0.5")
    return modulus


@dataclass(frozen=True, eq=False)
class Grid:
    """Even points on every side of a box, ends included; `steps` are exact."""

    box: Box
    counts: tuple[int, ...]
    steps: tuple[Fraction, ...]

    @classmethod
    def even(cls, box: Box, counts: Sequence[int]) -> Grid:
        """The grid of so many points on each side."""
        if len(counts) != box.dim or min(counts) < 2 or math.prod(counts) > MOST_POINTS:
            raise ArgumentError(f"a grid of a box of dimension {box.dim} cannot have {list(counts)} points a side")
        sides = [Fraction(high) - Fraction(low) for low, high in box.intervals()]
        steps = tuple(side / (count - 1) for side, count in zip(sides, counts, strict=True))
        return cls(box, tuple(counts), steps)

    @property
    def size(self) -> int:
        return math.prod(self.counts)

    def axis(self, i: int) -> list[Fraction]:
        """The grid's values of coordinate i, exactly."""
        low = Fraction(self.box.intervals()[i][0])
        return [low + k * self.steps[i] for k in range(self.counts[i])]

    def index(self) -> Tensor:
        """(point, coordinate): which value of each axis; the last coordinate runs fastest."""
        axes = [torch.arange(count) for count in self.counts]
        return torch.cartesian_prod(*axes).reshape(self.size, len(self.counts))

    def points(self) -> Tensor:
        """All points, float64, (point, *box.shape)."""
        axes = [torch.tensor([float(x) for x in self.axis(i)], dtype=torch.float64) for i in range(len(self.counts))]
        return torch.cartesian_prod(*axes).reshape(self.size, *self.box.shape)


def grid_of(box: Box, spacing: float) -> Grid:
    """The coarsest even grid whose spacing is at most `spacing` on every side."""
    if not isinstance(box, Box):
        raise ArgumentError(f"box must be a Box, such as Box.cube(0, 1, shape=(n, d)), got {type(box).__name__}")
    sides = [Fraction(high) - Fraction(low) for low, high in box.intervals()]
    if min(sides) <= 0:
        raise ArgumentError("every side of the box must have a positive length")
    pieces = [max(1, math.ceil(side / Fraction(spacing))) for side in sides]
    size = math.prod(count + 1 for count in pieces)
    if size > MOST_POINTS:
        most = float(max(sides)) / (MOST_POINTS ** (1 / len(sides)) - 1)
        raise ArgumentError(
            f"spacing = {spacing:g} on a box of dimension {len(sides)} needs {size:.3g} grid points, more than "
            f"{MOST_POINTS}; the grid is exponential in the dimension: spacing >= {most:.2g} fits, or use fewer tokens"
        )
    return Grid.even(box, [count + 1 for count in pieces])


def evaluated(f: Function, points: Tensor, box: Box) -> Tensor:
    """f at points, in batches, float64; an error names what is wrong with what it returned."""
    if not callable(f):
        raise ArgumentError(f"f must be a function of a batch of inputs, got {type(f).__name__}")
    parts = []
    for part in points.split(BATCH):
        try:
            found = torch.as_tensor(f(part))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ArgumentError(f"f failed on a float64 tensor of shape {tuple(part.shape)}: {error}") from error
        rows = box.shape[:-1]
        if found.dim() != len(rows) + 2 or found.shape[0] != len(part) or tuple(found.shape[1:-1]) != rows:
            wanted = ", ".join(["batch", *map(str, rows), "channels"])
            raise ArgumentError(
                f"f must return a tensor of shape ({wanted}); for an input of shape {tuple(part.shape)} "
                f"it returned {tuple(found.shape)}"
            )
        parts.append(finite_values("f", found.detach().double()))
    return torch.cat(parts)


def on_box(f: Function, box: Box, X: Tensor) -> Tensor:
    """f at inputs of any leading shape, float64."""
    lead = X.shape[: X.dim() - len(box.shape)]
    return evaluated(f, X.double().reshape(-1, *box.shape), box).reshape(*lead, *box.shape[:-1], -1)


def refuse_steeper(f: Function, grid: Grid, values: Tensor, lipschitz: float) -> None:
    """Raise `DomainError` with two points where f rises faster than `lipschitz`, if steep neighbours lead to some."""
    box, points = grid.box, grid.points().reshape(grid.size, -1)
    flat = values.reshape(*grid.counts, -1)
    index = torch.arange(grid.size).reshape(grid.counts)
    pairs, rises = [], []
    for i, step in enumerate(grid.steps):
        rise = flat.diff(dim=i).abs().amax(-1).flatten() / float(step)
        first = index.narrow(i, 0, grid.counts[i] - 1).flatten()
        second = index.narrow(i, 1, grid.counts[i] - 1).flatten()
        best = rise.topk(min(SUSPECTS, len(rise))).indices
        pairs.append(torch.stack([points[first[best]], points[second[best]]], 1))
        rises.append(rise[best])
    ends = torch.cat(pairs)
    ends = ends[torch.cat(rises).topk(min(SUSPECTS, len(ends))).indices]
    refuse_between(f, box, ends[:, 0], ends[:, 1], lipschitz)


def refuse_between(f: Function, box: Box, left: Tensor, right: Tensor, lipschitz: float) -> None:
    """Raise `DomainError` if f rises faster than `lipschitz` between two of these points, or somewhere between.

    The segment from left to right is halved again and again, keeping the half with the larger rise.
    """
    call = lambda x: evaluated(f, x.reshape(-1, *box.shape), box).flatten(1)  # noqa: E731
    low, high = call(left), call(right)
    for _ in range(HALVINGS):
        width = (right - left).norm(dim=-1)
        slope = (high - low).abs().amax(-1) / width
        size = torch.maximum(high.abs().amax(-1), low.abs().amax(-1)) * OWN_ROUNDING / width
        worst = int((slope - size).argmax())
        if float(slope[worst] - size[worst]) > lipschitz * (1 + SLACK):
            x, y = (np.array2string(p[worst].numpy(), precision=6) for p in (left, right))
            raise DomainError(
                f"f is steeper than lipschitz = {lipschitz:g}: it changes by "
                f"{float((high - low)[worst].abs().max()):.3g} between {x} and {y}, {float(width[worst]):.3g} apart; "
                "a jump has no certificate, and a smooth f needs a larger lipschitz. Without lipschitz "
                "the construction is built and only measured"
            )
        middle = 0.5 * (left + right)
        if bool((width < NARROW).all()):
            return
        value = call(middle)
        go_left = ((value - low).abs().amax(-1) >= (high - value).abs().amax(-1))[:, None]
        left, right = torch.where(go_left, left, middle), torch.where(go_left, middle, right)
        low, high = torch.where(go_left, low, value), torch.where(go_left, value, high)
