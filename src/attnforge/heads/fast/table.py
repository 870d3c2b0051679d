"""Tables of evenly spaced anchors as numbers, and how they are read (lemma A8): what evaluation and bound agree on.

The head has p keys k = -(p-1)/2, ..., (p-1)/2 (whole or half numbers), logits rate k (y - centre) - kappa k^2 and one
value a key: evenly spaced anchors, 2 kappa / rate apart. Optionally a gate y sigmoid(gate y), a self head of its own
(lemma B4), is added. With theta = rate (y - centre) and q = exp(-|theta|):

- *lattice form* (few anchors): sum_k c_k V_k e^(k theta) is a polynomial in q + 1/q plus sinh(theta) times another.
  With s = q/(1 + q^2) and t = tanh(theta) the head is (P(s) + t R(s)) / Q(s), three polynomials of degree (p-1)/2: no
  gathers, no truncation, and R = 0 where the values are symmetric.
- *window form* (many anchors, or cold ones): 2J+1 anchors around the nearest, always inside the table, so that nothing
  is masked: a polynomial of degree 2J in q = exp(-2 kappa |r|), r the distance to the window's middle in anchors.
- *pair form* (cold anchors): only the two that y lies between matter, one sigmoid.

`read.anchor_read` is the operator made of this; how far it can be from the softmax is `bound.read_error`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from ...dtypes import Array
from ...network import known

#: Log of the largest coefficient of the lattice form: e^75 and e^600 leave room for sums and products below overflow.
LARGEST = {torch.float32: 75.0, torch.float64: 600.0}
#: kappa K^2 up to which the lattice form is used: its coefficients then span about all that a dtype has.
WIDEST = {torch.float32: 140.0, torch.float64: 1200.0}
COLD = {torch.float32: 17.0, torch.float64: 37.0}  # kappa from which exp(-kappa) is below a roundoff
MOST_LATTICE = 129  # anchors: beyond, a window is shorter


def packed(*numbers: float) -> str:
    """Numbers as text: compilers may make a number of a module a variable of the program, never a text."""
    return " ".join(float(number).hex() for number in numbers)


@known
def unpacked(text: str) -> tuple[float, ...]:
    """The numbers, as constants of a compiled program.

    >>> unpacked(packed(0.1, -2.0))
    (0.1, -2.0)
    """
    return tuple(float.fromhex(number) for number in text.split())


@dataclass(frozen=True)
class Table:
    """An evenly spaced table and a gate: the arguments of `anchor_read`. Without values there is only the gate."""

    value: tuple[float, ...]
    rate: float = 1.0
    kappa: float = 1.0
    centre: float = 0.0
    gate: float = 0.0

    @property
    def anchors(self) -> int:
        """How many there are."""
        return len(self.value)

    def keys(self) -> Array:
        """Slopes and offsets of the logits, exactly: (anchor, 2)."""
        k = np.arange(self.anchors) - (self.anchors - 1) / 2
        return np.stack([self.rate * k, -self.kappa * k * k], -1).reshape(-1, 2)


def working(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a head of this dtype is computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dropped(kappa: float, reach: int, off: float = 0.0) -> float:
    """Upper bound of the weight outside a window, m_J of lemma A8; `off`: how far beyond 1/2 |r| may be.

    >>> dropped(0.25, 8) < 3.2e-8
    True
    """
    total, i = 0.0, reach + 1
    while True:
        term = math.exp(-kappa * (i * i - i * (1.0 + 2.0 * off)))
        total += 2.0 * term
        if term < 1e-30 * total or term < 1e-320:
            return total * (1 + 1e-12) + 1e-300  # what is left is far below the slack: terms more than halve
        i += 1


@known
def reach_for(kappa: float, dtype: torch.dtype) -> int:
    """The smallest J whose window leaves out less than a roundoff."""
    return _reach_for(kappa, 2.0**-24 if working(dtype) == torch.float32 else 2.0**-53)


@functools.lru_cache(maxsize=512)
def _reach_for(kappa: float, wanted: float) -> int:
    reach = 1
    while dropped(kappa, reach) > wanted:
        reach += 1
    return reach


TableForm = Literal["lattice", "window", "pair"]


@known
def form_of(anchors: int, kappa: float, dtype: torch.dtype) -> TableForm:
    """How a table is read: all of it, through a window, or by pairs.

    >>> [form_of(p, kappa, torch.float32) for p, kappa in ((33, 0.5), (1000, 0.5), (33, 20.0))]
    ['lattice', 'window', 'pair']
    """
    work = working(dtype)
    if anchors == 0:
        return "lattice"
    if kappa >= COLD[work]:
        return "pair"
    wide = kappa * ((anchors - 1) / 2) ** 2 > WIDEST[work] or anchors > MOST_LATTICE
    return "window" if wide and anchors > 2 * reach_for(kappa, dtype) + 1 else "lattice"


@functools.lru_cache(maxsize=64)
def lattice(anchors: int) -> tuple[Array, Array]:
    """Coefficients in s, lowest first, of s^K 2 cosh(k theta) and of s^K 2 sinh(k theta) / t; rows: k >= 0.

    Both follow X_(k+1) = X_k / s - X_(k-1), in whole numbers. With an even number of anchors k is half a number, and
    both are divided by 2 cosh(theta/2), so that t = tanh(theta/2).

    >>> lattice(5)[0].astype(int).tolist()
    [[0, 0, 1], [0, 1, 0], [1, 0, -2]]
    """
    rows = (anchors + 1) // 2
    degree = rows - 1
    if anchors % 2:  # 2 cosh: 2, X, ...; 2 sinh: 0, 2 sinh theta, ...  (t / s = 2 sinh theta)
        even, odd = [[2.0], [0.0, 1.0]], [[0.0], [0.0, 1.0]]
    else:  # divided by 2 cosh(theta/2): 1, X - 1, ... and 1, X + 1, ...
        even, odd = [[1.0], [-1.0, 1.0]], [[1.0], [1.0, 1.0]]
    for family in (even, odd):
        for k in range(2, rows):
            up, down = [0.0, *family[k - 1]], [*family[k - 2], 0.0, 0.0]
            family.append([a - b for a, b in zip(up, down, strict=True)])
    if anchors % 2:
        even[0] = [1.0]  # k = 0 is there once
    tables = np.zeros((2, rows, rows))
    for table, family in zip(tables, (even, odd), strict=True):
        for k in range(rows):
            table[k, degree - np.arange(len(family[k]))] = family[k]
    return tables[0], tables[1]


@functools.lru_cache(maxsize=256)
def masses(anchors: int, kappa: float, dtype: torch.dtype) -> Array:
    """exp(-kappa k^2) for k >= 0, times a constant that keeps the smallest away from underflow in `dtype`."""
    k = np.arange((anchors + 1) // 2) + (0.0 if anchors % 2 else 0.5)
    shift = min(kappa * float(k[-1]) ** 2, LARGEST[working(dtype)])
    return np.exp(shift - kappa * k * k)
