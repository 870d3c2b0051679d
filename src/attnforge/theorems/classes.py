"""How large a network must be and may be, for classes of functions (lemma E6 of docs/theory.md).

Compositions of a few operations and mixtures of ridges take polynomially many heads and anchors; all Lipschitz
functions of many variables take exponentially many bits, whatever the network is. Real arithmetic: certificates speak
of what is built.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..arguments import positive, whole
from ..dtypes import Array
from ..errors import ArgumentError
from ..heads.anchor.bound import AnchorWeights
from ..heads.product.construction import remainder
from ..network import AttentionLayer, Heads
from .spectral import Strip

MOST_NODES = 64  # of a product: far more than float64 has use for


@dataclass(frozen=True)
class CompositionNode:
    """One nonlinear operation of an expression: how much the output feels it (`sensitivity`), and what it is.

    With a `strip` it is a univariate function of that class on an interval of this `length`; without, a product of
    operands of at most `length`. `level` counts the nonlinear operations on the longest path to it, with itself.
    """

    sensitivity: float
    length: float
    strip: Strip | None = None
    level: int = 1


@dataclass(frozen=True)
class ClassSize:
    """Heads, anchors (or nodes of products), parameters and layers that suffice, and the error that they are for."""

    heads: int
    anchors: int
    parameters: int
    eps: float
    layers: int = 1


def composition(nodes: Sequence[CompositionNode], eps: float) -> ClassSize:
    """E6(a): a network for an expression with these nonlinear operations, each given eps/(number sensitivity).

    >>> wave = Strip(mass=math.exp(1.0), decay=1.0)
    >>> small, large = (composition([CompositionNode(1.0, 6.0, wave)] * 3, eps) for eps in (1e-3, 1e-6))
    >>> small.heads, large.heads, large.anchors < 2 * small.anchors
    (3, 3, True)
    """
    eps, heads, anchors, parameters = positive("eps", eps), 0, 0, 0
    for node in nodes:
        share = eps / (len(nodes) * positive("sensitivity", node.sensitivity))
        if node.strip is not None:
            count = node.strip.plan(node.length, share).anchors
            heads, anchors, parameters = heads + 1, anchors + count, parameters + 3 * count
            continue
        size, count = positive("length", node.length), 2
        while not size * size * remainder(count, 2.0) <= share:  # relative to |x| |y|, and |z| <= 2
            if count == MOST_NODES:
                raise ArgumentError(f"no product of numbers up to {size:g} within {share:g} in {MOST_NODES} nodes")
            count += 1
        heads, anchors, parameters = heads + 2, anchors + 2 * count, parameters + 4 * count
    layers = max((whole("level", node.level, 1) for node in nodes), default=0)
    return ClassSize(heads, anchors, parameters, eps, layers)


@dataclass(frozen=True)
class Ridges:
    """f(x) = integral of cos(w.x + b) over a signed measure of total mass `mass`, with integral |w|_1 at most `first`,
    on [-1, 1]^dim: a class of Barron's kind with a bound in the sup norm."""

    dim: int
    mass: float
    first: float

    def __post_init__(self) -> None:
        whole("dim", self.dim, 1)
        positive("mass", self.mass)
        positive("first", self.first)

    def count(self, eps: float) -> int:
        """E6(b): so many ridges reach eps in the sup norm.

        >>> Ridges(3, 1.0, 6.0).count(0.1), Ridges(30, 1.0, 60.0).count(0.1) < 16 * Ridges(3, 1.0, 6.0).count(0.1)
        (17078, True)
        """
        t = positive("eps", eps) / 2
        spread = max(1.0, 6 * self.first / t)
        return math.ceil(2 * self.mass**2 / t**2 * (self.dim * math.log(spread) + math.log(5)))

    def error(self, count: int) -> float:
        """The inverse: what so many ridges reach."""
        low, high = 0.0, 4 * self.mass
        for _ in range(80):
            middle = 0.5 * (low + high)
            low, high = (low, middle) if self.count(middle) <= count else (middle, high)
        return high


def bits_floor(lipschitz: float, side: float, dim: int, eps: float) -> float:
    """E6(c): any family of networks that has one within eps of every Lipschitz function on a cube stores so many bits.

    >>> bits_floor(1.0, 2.0, 2, 0.1), bits_floor(1.0, 2.0, 12, 0.1) > 1e11
    (81.0, True)
    """
    fit = positive("lipschitz", lipschitz) * positive("side", side) / (2 * positive("eps", eps))
    cells = max(math.ceil(fit * (1 - 1e-12)) - 1, 0) if fit < 1e300 else 1e300
    dim = whole("dim", dim, 1)
    if cells > 1 and dim * math.log(cells) >= 709:  # beyond float64, whose largest number is a lower bound still
        return sys.float_info.max
    return float(int(cells) ** dim) * (1.0 if int(cells) ** dim < 2**53 else 1 - 2.0**-52)


def ridge_layer(
    directions: Array, phases: Array, amounts: Array, table: AnchorWeights, dtype: torch.dtype
) -> AttentionLayer:
    """sum_j amounts_j cos(directions_j . x + phases_j) in one layer: one table of cos shared by all heads (A7)."""
    number = lambda x: torch.from_numpy(np.ascontiguousarray(x, dtype=np.float64)).to(dtype)  # noqa: E731
    count, dim = directions.shape
    query, shift = np.zeros((count, dim, 2)), np.ones((count, 2))
    query[:, :, 0], shift[:, 0] = directions, phases - table.centre
    slope, constant = table.skip
    group = Heads(
        "memory", W_Q=number(query), b_Q=number(shift), M_K=number(np.stack([table.slope, table.offset], -1)[None]),
        M_V=number(table.value[None, :, None]), W_O=number(amounts[:, None, None]), purpose="ridges",
    )  # fmt: skip
    skip: Tensor = number((slope * amounts @ directions)[:, None])
    return AttentionLayer([group], S=skip, s=number([float(amounts @ (slope * phases + constant))]))
