"""Products as data: the Gauss-Lobatto rule and the slots, keys and values made from it (lemmas C1, C2 of `product`)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from flint import arb

from ...dtypes import Array
from ...errors import ArgumentError
from ...functions.directed import precision
from ..self_head import SelfSpec

MOST_NODES = 24
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
    """One product as data: its heads over the channels (x_1 .. x_v, y), for `self_head.pack`.

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
        slopes = _as(dtype, np.array(PAIRS[dtype]) / size)
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


def _as(dtype: torch.dtype, array: Array) -> Array:
    return torch.as_tensor(array).to(dtype).double().numpy()
