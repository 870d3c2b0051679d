"""Where a network's error was looked for, and what was found: random points, corners, edges, slices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..compiler.compiled import CompiledNetwork
from ..dtypes import Array
from ..programs.interpret import values

POINTS = 20_000
SLICE = 1201


@dataclass(frozen=True, eq=False)
class Measured:
    """Errors at points of the box, the largest over all outputs at each, and where the worst of them was."""

    errors: Array
    point: Array
    target: tuple[float, float]

    @property
    def count(self) -> int:
        """How many points were looked at."""
        return len(self.errors)

    @property
    def worst(self) -> float:
        """The largest error seen: a measurement, not a bound."""
        return float(self.errors.max())


@dataclass(frozen=True, eq=False)
class Slice:
    """The error along one coordinate of the box through a point."""

    label: str
    through: str
    x: Array
    target: Array
    error: Array


@torch.no_grad()
def evaluate(net: CompiledNetwork, points: Tensor) -> tuple[Array, Array]:
    """Target and |network - target| at points of the program's box, each flattened to (point, output)."""
    program = net.program
    outputs, truths = [], []
    for some in points.to(net.dtype).split(4096):
        inputs, start, flat = [], 0, some.reshape(len(some), -1)
        for box in net.boxes:
            inputs.append(flat[:, start : start + box.dim].reshape(-1, *box.shape))
            start += box.dim
        outputs.append(net.core(*inputs).double().reshape(len(some), -1))
        truths.append(values(program, some.double()).reshape(len(some), -1))
    truth = torch.cat(truths)
    return truth.numpy(), (torch.cat(outputs) - truth).abs().numpy()


def measure(net: CompiledNetwork, count: int = POINTS, seed: int = 0) -> Measured:
    """The errors at random points, at corners and on edges of the box."""
    box = net.program.box
    random = box.sample(count, seed, net.dtype)
    corners = box.corners(min(count // 10, 1024), net.dtype)
    edges = box.sample(count // 10, seed + 1, net.dtype)
    wide, rows = box.outward(net.dtype), torch.arange(len(edges))
    generator = torch.Generator().manual_seed(seed)
    flat = edges.reshape(len(edges), -1)
    at = torch.randint(box.dim, (len(edges),), generator=generator)
    side = torch.randint(2, (len(edges),), generator=generator).bool()
    ends = torch.where(side, wide.upper.reshape(-1)[at], wide.lower.reshape(-1)[at])
    flat[rows, at] = ends.to(net.dtype)
    points = torch.cat([random, corners, edges])
    target, error = evaluate(net, points)
    worst = error.max(-1)
    point = points[int(worst.argmax())].double().numpy().reshape(-1)
    return Measured(worst, point, (float(target.min()), float(target.max())))


def slices(net: CompiledNetwork, measured: Measured) -> list[Slice]:
    """The error along coordinates of the box, through its centre and through the worst point seen.

    Variables of a formula are worth a look each, the entries of a tensor are much alike: a few of them will do.
    """
    box = net.program.box
    most = 9 if box.names else 3
    low, high = (side.numpy().reshape(-1) for side in (box.lower, box.upper))
    centre = 0.5 * (low + high)
    places = (np.unravel_index(i, box.shape) for i in range(box.dim))
    names = box.names or tuple(f"x[{', '.join(str(int(p)) for p in place)}]" for place in places)
    wide = box.outward(net.dtype)
    live = [i for i in range(box.dim) if high[i] > low[i]][:most]
    found = []
    for i in live:
        x = np.linspace(low[i], high[i], SLICE)
        for through, middle in (("the centre", centre), ("the worst point", measured.point)):
            rows = np.tile(middle, (SLICE, 1))
            rows[:, i] = x
            points = torch.from_numpy(rows).reshape(-1, *box.shape)
            inside = torch.minimum(torch.maximum(points, wide.lower), wide.upper)
            target, error = evaluate(net, inside)
            at = error.max(-1)
            found.append(Slice(names[i], through, x, target[:, int(error.max(0).argmax())], at))
    return found
