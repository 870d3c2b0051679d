"""The weights of products: the Gauss-Lobatto rule and the slots, keys and values made from it (lemmas C1 and C2 of
`head`), how operands are arranged, and which operations of a program they carry out."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from flint import arb

from ...arguments import positive
from ...dtypes import rounded, shipped
from ...errors import ArgumentError, PrecisionError
from ...functions.directed import precision
from ...programs.ops import Apply, Product
from ..construction import HeadBuilder, Order, Planned, SelfBuilder, fat
from ..stored import SelfSpec
from .bound import Sides, product_error, rounding
from .site import MOST_NODES, ProductSite, SquareSite

NODES = {torch.float32: 7, torch.float64: 10}  # where the truncation at s = 2 falls below rounding
CENTRE_BITS = {torch.float32: 11, torch.float64: 26}  # products of two centres stay exact
PAIRS = {torch.float32: (0.1006, 0.2636), torch.float64: (0.0018, 0.0047)}  # slopes of lemma C2


@functools.lru_cache(maxsize=64)
def gauss_lobatto(n: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The n nodes, ascending, and the logarithms of their weights relative to the end node's.

    >>> gauss_lobatto(3)
    ((-1.0, 0.0, 1.0), (0.0, 1.3862943611198906, 0.0))
    """
    if not 2 <= n <= MOST_NODES:
        raise ArgumentError(f"nodes must be a whole number from 2 to {MOST_NODES}, got {n!r}")
    last = np.zeros(n)
    last[-1] = 1.0
    start = np.sort(np.polynomial.legendre.legroots(np.polynomial.legendre.legder(last)))
    nodes, logs = [], []
    with precision(160):
        for guess in start:
            tau = arb(float(np.real(guess)))
            for _ in range(4):  # Newton on P'_{n-1}, by (1 - t^2) P'' = 2 t P' - n (n-1) P
                value, slope = _legendre(n - 1, tau)
                tau = (tau - slope * (1 - tau * tau) / (2 * tau * slope - n * (n - 1) * value)).mid()
            nodes.append(0.0 if abs(float(tau)) < 1e-30 else float(tau))
            logs.append(float(-2 * abs(_legendre(n - 1, tau)[0]).log()))
    return (-1.0, *nodes, 1.0), (0.0, *logs, 0.0)


def _legendre(degree: int, t: arb) -> tuple[arb, arb]:
    """P_degree(t) and its derivative, |t| < 1."""
    before, value = arb(1), t
    for k in range(2, degree + 1):
        before, value = value, ((2 * k - 1) * t * value - (k - 1) * before) / k
    return value, degree * (before - t * value) / (1 - t * t)


def remainder(nodes: int, s: float) -> float:
    """The bound of lemma C1 on the relative truncation error for |z| <= s."""
    top = nodes * (nodes - 1) ** 3 * 2 ** (2 * nodes - 1) * math.factorial(nodes - 2) ** 4
    return top / ((2 * nodes - 1) * math.factorial(2 * nodes - 2) ** 3) * s ** (2 * nodes - 1) / -math.expm1(-2 * s)


@dataclass(frozen=True)
class ProductSpec:
    """One product as data: its heads over the channels (x_1 .. x_v, y), for `packing.pack`.

    `gain` is g of lemma C1 and `centre` is (a, b): the value operand is taken relative to a, the query operand to b.
    """

    heads: SelfSpec
    nodes: int
    gain: float
    centre: tuple[float, float]

    @classmethod
    def build(cls, nodes: int, gain: float, centre: tuple[float, float] = (0.0, 0.0), width: int = 1) -> ProductSpec:
        """Lemma C1 with z = gain * (y - b)."""
        a, b = centre
        tau, logs = (np.array(column[:-1]) for column in gauss_lobatto(nodes))
        sign = np.array([1.0, -1.0])
        eye = np.eye(width)
        query = np.zeros((2, width + 1, 2))
        query[:, -1, 0] = sign * gain
        keys = np.stack([tau, logs], 1)
        heads = SelfSpec(
            W_Q=query,
            b_Q=np.stack([-sign * gain * b, np.ones(2)], 1),
            b_K=np.array([[1.0, 0.0]] * 2),
            W_V=np.stack([np.vstack([eye, np.zeros((1, width))])] * 2),
            b_V=np.full((2, width), -a),
            M_K=np.stack([keys, keys]),
            M_V=np.zeros((2, nodes - 1, width)),
            W_O=sign[:, None, None] * eye * (nodes * (nodes - 1) / (2 * gain)),
            S=np.vstack([eye * b, np.full((1, width), a)]),
            s=np.full(width, -a * b),
        )
        return cls(heads, nodes, gain, centre)

    @classmethod
    def tanh(cls, size: float, dtype: torch.dtype, width: int = 1) -> ProductSpec:
        """Lemma C2: four heads, two for each slope; the coefficients cancel the cubic term for the slopes as stored."""
        slopes = rounded(np.array(PAIRS[dtype]) / size, dtype)
        weight = np.linalg.solve(np.stack([slopes, slopes**3]), np.array([2.0, 0.0]))
        sign, eye = np.array([1.0, -1.0, 1.0, -1.0]), np.eye(width)
        query = np.zeros((4, width + 1, 1))
        query[:, -1, 0] = sign * np.repeat(slopes, 2)
        heads = SelfSpec(
            W_Q=query, b_Q=np.zeros((4, 1)), b_K=np.ones((4, 1)),
            W_V=np.stack([np.vstack([eye, np.zeros((1, width))])] * 4), b_V=np.zeros((4, width)),
            M_K=np.zeros((4, 1, 1)), M_V=np.zeros((4, 1, width)),
            W_O=(sign * np.repeat(weight, 2))[:, None, None] * eye, S=np.zeros((width + 1, width)), s=np.zeros(width),
        )  # fmt: skip
        return cls(heads, 0, float(slopes.max()), (0.0, 0.0))


def gain_for(size: float, halvings: int = 0) -> float:
    """The power of two g with 1 < g * size <= 2, halved a few times where fewer nodes shall do."""
    return math.ldexp(1.0, 1 - halvings - math.ceil(math.log2(size)))


@functools.lru_cache(maxsize=1024)
def _constant(nodes: int, steps: int, dtype: torch.dtype) -> float:
    spec = ProductSpec.build(nodes, 2.0).heads.rounded(dtype)
    side = steps / 16
    return product_error(spec, Sides((-1.0, 1.0), (-side, side)), dtype).total / side


def product_constant(nodes: int, s: float, dtype: torch.dtype = torch.float32) -> float:
    """C with |head - x y| <= C X Y for |x| <= X, |y| <= Y, g Y = s, not centred; cached, for s rounded up to eighths.

    >>> product_constant(7, 2.0) < 1.7e-6, product_constant(10, 2.0, torch.float64) < 3.9e-15
    (True, True)
    """
    if not 0 < s <= 2:
        raise ArgumentError(f"s must be in (0, 2], got {s!r}")
    steps = math.ceil(8 * s)
    return math.nextafter(_constant(nodes, steps, shipped(dtype)) * (steps / 8) / s * (1 + 1e-15), math.inf)


@dataclass(frozen=True)
class Arrangement:
    """How two operands enter a product head: which of them is the query, and what is subtracted from them first."""

    sides: Sides
    centre: tuple[float, float]
    swapped: bool

    @property
    def reach(self) -> tuple[float, float]:
        """Largest |value - a| and |query - b|."""
        (a, b), (value, query) = self.centre, (self.sides.value, self.sides.query)
        return max(abs(v - a) for v in value), max(abs(v - b) for v in query)


@functools.lru_cache(maxsize=1024)
def arrange(x: Sides, dtype: torch.dtype, swap: bool = True) -> Arrangement:
    """The arrangement with the least certified rounding: with or without centring either operand, or swapping them."""
    nodes, best = NODES[dtype], (math.inf, Arrangement(x, (0.0, 0.0), False))
    for swapped in (False, True) if swap else (False,):
        sides = Sides(x.query, x.value) if swapped else x
        a, b = (_middle(side, CENTRE_BITS[dtype]) for side in (sides.value, sides.query))
        for centre in itertools.product({0.0, a}, {0.0, b}):
            found = Arrangement(sides, centre, swapped)
            spec = ProductSpec.build(nodes, gain_for(found.reach[1]), centre)
            bound = rounding(spec.heads.rounded(dtype), sides, dtype, 0.0)
            best = min(best, (bound, found), key=lambda pair: pair[0])
    return best[1]


def nodes_for(eps: float, arranged: Arrangement, dtype: torch.dtype = torch.float32) -> tuple[int, float]:
    """The fewest nodes, and their gain, that certify eps; raises `PrecisionError` with what can be reached."""
    size_x, size_y = arranged.reach
    reached = math.inf
    positive("eps", eps)
    for nodes in range(2, NODES[dtype] + 2):
        for halvings in range(8):
            gain = gain_for(size_y, halvings)
            if remainder(nodes, gain * size_y) * size_x * size_y > eps:
                continue
            spec = ProductSpec.build(nodes, gain, arranged.centre).heads.rounded(dtype)
            bound = product_error(spec, arranged.sides, dtype).total
            if bound <= eps:
                return nodes, gain
            reached = min(bound, reached)
            break  # a smaller gain only rounds worse
    if not math.isfinite(reached):
        spec = ProductSpec.build(NODES[dtype], gain_for(size_y), arranged.centre).heads.rounded(dtype)
        reached = product_error(spec, arranged.sides, dtype).total
    raise PrecisionError(
        f"a product of numbers up to {arranged.sides.sizes[0]:g} and {arranged.sides.sizes[1]:g} in {dtype} reaches "
        f"{reached:.3e}, not eps = {eps:g}; ask for that much, or use dtype=torch.float64",
        reachable=reached,
    )


def _middle(side: tuple[float, float], bits: int) -> float:
    """The middle of an interval, rounded to so many bits; 0 where the interval is about symmetric."""
    middle = 0.5 * (side[0] + side[1])
    if abs(middle) < 0.01 * (side[1] - side[0]):
        return 0.0
    mantissa, exponent = math.frexp(middle)
    return math.ldexp(round(math.ldexp(mantissa, bits)), exponent - bits)


class ProductBuilder(SelfBuilder):
    """Products of two values."""

    def propose(self, order: Order, made: Sequence[Planned]) -> Planned | None:
        if not isinstance(order.op, Product):
            return None
        sides = Sides(fat(order.hull(0)), fat(order.hull(1)))
        centred = order.tactics.centred
        arranged = arrange(sides, order.dtype) if centred else Arrangement(sides, (0.0, 0.0), False)
        gain, intervals = gain_for(arranged.reach[1]), (arranged.sides.value, arranged.sides.query)
        site = ProductSite(
            order.number, NODES[order.dtype], gain, arranged.centre, arranged.swapped, intervals
        )  # fmt: skip
        return Planned(site)

    def spec(self, planned: Planned) -> SelfSpec:
        site = planned.site
        assert isinstance(site, ProductSite)
        return ProductSpec.build(site.nodes, site.gain, site.centre).heads


class SquareBuilder(ProductBuilder):
    """Squares under a root: dearer than an anchor head, but their error vanishes at 0 with the argument."""

    def propose(self, order: Order, made: Sequence[Planned]) -> Planned | None:
        if not (order.rooted and isinstance(order.op, Apply) and order.op.function.name == "square"):
            return None
        side = fat(order.hull())
        gain = gain_for(max(abs(v) for v in side))
        return Planned(SquareSite(order.number, NODES[order.dtype], gain, (0.0, 0.0), False, (side, side)))


BUILDERS: dict[str, HeadBuilder] = {"product": ProductBuilder(), "square": SquareBuilder()}
