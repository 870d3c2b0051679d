"""How a target reads its input, and whether a program and its target agree."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...box import Box
from ...errors import ArgumentError
from ...ir.interpret import every_value, values
from ...ir.program import Program
from .capture import Captured, describe
from .precise import double

#: How many points the example batch holds, and how many are compared afterwards.
BATCH, CHECKED = 2, 64


@dataclass(frozen=True)
class Reading:
    """How the target takes its input: a batch of points, or one point at a time."""

    net: nn.Module
    boxes: tuple[Box, ...]
    batch: int | None

    def examples(self, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
        device = next((p.device for p in self.net.parameters()), torch.device("cpu"))
        points = [box.sample(self.batch or 1, seed=seed + i, dtype=dtype) for i, box in enumerate(self.boxes)]
        return tuple((p if self.batch else p[0]).to(device) for p in points)

    def truth(self, points: tuple[Tensor, ...]) -> Tensor:
        """What the target gives at points with one batch dimension, computed in float64."""
        if self.batch is None:
            return torch.stack([double(self.net, tuple(p[i] for p in points)) for i in range(len(points[0]))])
        return double(self.net, points)


def join(program: Program, *tensors: Tensor) -> Tensor:
    """The tensors of a function of several arguments, batch dimension first, as the one input of its program."""
    if len(tensors) == 1:
        return tensors[0]
    joined = torch.cat([t.reshape(len(t), -1) for t in tensors], -1)
    return joined.reshape(-1, *program.box.shape)


def difference(program: Program, reading: Reading) -> Exception | None:
    """What the program and the target disagree about, at random points of the box; None when they agree."""
    for count in (CHECKED, BATCH):
        points = tuple(box.sample(count, seed=100 + i) for i, box in enumerate(reading.boxes))
        joined = join(program, *points)
        truth, found = reading.truth(points), values(program, joined)
        if truth.shape == found.shape:
            inner = max(_size(v) for v in every_value(program, joined))
            slack = 1e-9 * _size(truth) + 1e-13 * inner
            gap = _size(torch.nan_to_num(truth) - torch.nan_to_num(found))
            if gap <= slack:
                if count == CHECKED:
                    return None
                return ArgumentError(
                    f"what {describe(reading.net)} does to a point depends on how many points are in the batch"
                )
        else:
            gap = math.inf
        if not torch.equal(torch.nan_to_num(reading.truth(points)), torch.nan_to_num(truth)):
            return ArgumentError(f"{describe(reading.net)} gives other numbers when it is called again")
    return AssertionError(
        f"the program lowered from {describe(reading.net)} differs from it by {gap:.3g}: this is a mistake in attnforge"
    )


def unfaithful(captured: Captured, reading: Reading) -> Exception | None:
    """An error if even the captured graph does not do what the target does: something happens outside of torch."""
    points = reading.examples(torch.float64, seed=200)
    try:
        found = captured.run(points)
    except RuntimeError:  # the graph insists on another dtype
        return None
    truth = double(reading.net, points)
    if found.shape == truth.shape and _size(found.double() - truth) <= 1e-3 * _size(truth):
        return None
    return ArgumentError(
        f"{describe(reading.net)} computes with numbers that torch does not see (numpy, .data, a cache, a file): "
        "write it with functions of torch alone"
    )


def _size(x: Tensor) -> float:
    finite = x[torch.isfinite(x)].abs()
    return float(finite.max()) if finite.numel() else 0.0
