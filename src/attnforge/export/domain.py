"""Where a network is evaluated when it is compared with an artefact: its inputs, as flat points between two corners."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..box import Box
from ..certify.certified import CertifiedModule
from ..compiled import CompiledNetwork
from ..heads.norm import NormHead
from ..theorems.result import Construction
from .plain import PlainTransformer

TOKENS = 2  # of a sequence, where any number will do


@dataclass(frozen=True, eq=False)
class Domain:
    """The inputs of a network: the shape of each without its batch, and the box of all of them one after the other."""

    shapes: tuple[tuple[int, ...], ...]
    lower: Tensor
    upper: Tensor
    dtype: torch.dtype

    @property
    def dim(self) -> int:
        """How many numbers one point has."""
        return self.lower.numel()

    def split(self, points: Tensor) -> tuple[Tensor, ...]:
        """Flat points (count, dim) as the inputs of the network."""
        sizes = [math.prod(shape) for shape in self.shapes]
        parts = points.to(self.dtype).split(sizes, -1)
        return tuple(part.reshape(-1, *shape) for part, shape in zip(parts, self.shapes, strict=True))

    def sample(self, count: int, seed: int = 0) -> Tensor:
        """Points drawn uniformly, numbers of the network's dtype."""
        return self.box.sample(count, seed, self.dtype)

    def corners(self, limit: int) -> Tensor:
        """Corners of the box, at most `limit` of them, spread evenly."""
        return self.box.corners(limit, self.dtype)

    @property
    def box(self) -> Box:
        """The box of flat points, its bounds numbers of the network's dtype."""
        return Box.between(self.lower, self.upper)


def domain(net: CertifiedModule) -> Domain:
    """What a network takes, from its own example and its box.

    >>> import attnforge as af
    >>> found = domain(af.ProductHead.symmetric(2, 3))
    >>> found.shapes, found.lower.tolist()
    (((), ()), [-2.0, -3.0])
    """
    shapes = tuple(tuple(x.shape[1:]) for x in net.example_input())
    if isinstance(net, Construction) and len(shapes[0]) == 1:  # a theorem takes sequences, whatever its example
        shapes = ((TOKENS, *shapes[0]),)
    sides = [side for box in _boxes(net, shapes) for side in [box.outward(net.dtype)]]
    lower = torch.cat([s.lower.expand(shape).reshape(-1) for s, shape in zip(sides, shapes, strict=True)])
    upper = torch.cat([s.upper.expand(shape).reshape(-1) for s, shape in zip(sides, shapes, strict=True)])
    return Domain(shapes, lower, upper, net.dtype)


def _boxes(net: CertifiedModule, shapes: Sequence[tuple[int, ...]]) -> list[Box]:
    """One box for each input, whose shape can be repeated to that of the input."""
    if isinstance(net, NormHead):  # its box is of the variance: rows drawn from here have the middle one on average
        side = math.sqrt(3.0 * math.sqrt(net.variance[0] * net.variance[1]))
        return [Box.cube(-side, side, shape=(net.channels,))]
    if isinstance(net, CompiledNetwork):
        return list(net.boxes)
    if isinstance(net, PlainTransformer):
        return list(net.spec.boxes)
    box = net.box
    if box.names and len(box.names) == len(shapes) and shapes[0][-1:] != box.shape:
        return [Box.cube(lo, hi, shape=()) for lo, hi in box.intervals()]
    return [box]
