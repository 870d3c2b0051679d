"""Gates and tables for activation functions: what `fast_activation.FastActivation` is made of.

An activation that goes like 0 on one side and like y on the other is a gate y sigmoid(gate y), right on the whole line,
plus a bump: g(y) - y sigmoid(gate y) decays on both sides. So a short table of evenly spaced anchors whose last values
are about 0 serves every interval, however wide. The values solve a least squares problem on the whole live part; rate,
kappa and gate have few bits, so that every key rate k and kappa k^2 is exact in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ..certify.rounding import unit
from ..ir.functions import Univariate
from .fast_read import WIDEST, working
from .threads import one_thread

Array = np.ndarray
GATES = {  # slopes of the gate that leave a small bump, and where the bump's middle is
    "gelu": ((1.75, 1.875, 2.0, 2.125), 0.0),
    "gelu_tanh": ((1.75, 1.875, 2.0, 2.125), 0.0),
    "softplus": ((1.0,), 0.0),
    "mish": ((1.0,), 4.5),
}
RATES = (1.0, 1.25, 1.5)  # of the table, as multiples of the gate's; 1 shares its exponential
KAPPAS = tuple(k / 32 for k in (4, 5, 6, 8, 10, 12, 13, 14, 15, 16, 18))
HALVES = (6, 8, 10, 11, 12, 13, 14, 15, 16, 17, 18, 20, 22, 24, 26, 28, 31)  # (anchors - 1) / 2
FAR = 80.0  # the fit looks at the function this far out: beyond, both sides are straight to any precision


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


@dataclass(frozen=True)
class Fitted:
    """A table and the largest error on the sample."""

    table: Table
    error: float


@functools.lru_cache(maxsize=64)
def _sample(fn: Univariate, lo: float, hi: float) -> tuple[Array, Array]:
    live = np.linspace(-30.0, 30.0, 1201)
    far = np.concatenate([-np.geomspace(30.0, max(FAR, -lo), 40), np.geomspace(30.0, max(FAR, hi), 40)])
    y = np.unique(np.concatenate([live, far, [lo, hi]]))
    return y, fn.value(torch.from_numpy(y)).numpy()


def _solve(
    fn: Univariate, lo: float, hi: float, half: int, rate: float, kappa: float, centre: float, gate: float,
    dtype: torch.dtype,
) -> Fitted:  # fmt: skip
    y, wanted = _sample(fn, lo, hi)
    with np.errstate(over="ignore"):
        bump = wanted - y / (1 + np.exp(-gate * y))
    k = np.arange(-half, half + 1.0)
    logit = np.multiply.outer(rate * (y - centre), k) - kappa * k * k
    weight = np.exp(logit - logit.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    left, size, right = np.linalg.svd(weight, full_matrices=False)
    best: Fitted | None = None
    for cut in (1e-13, 1e-11, 1e-9):
        kept = size > cut * size[0]
        value = right.T[:, kept] @ ((left.T[kept] @ bump) / size[kept])
        if centre == 0 and np.abs(value - value[::-1]).max() < 1e-3 * np.abs(value).max():
            value = 0.5 * (value + value[::-1])  # the bump of an even function: half the work
        value = torch.from_numpy(value).to(dtype).double().numpy()
        # where the values are far larger than the bump, rounding decides
        error = float(np.abs(weight @ value - bump).max() + 4 * unit(working(dtype)) * np.abs(value).max())
        if best is None or error < best.error:
            best = Fitted(Table(tuple(value.tolist()), rate, kappa, centre, gate), error)
    assert best is not None
    return best


def fitted(fn: Univariate, lo: float, hi: float, dtype: torch.dtype, most: int) -> Iterator[Fitted]:
    """Ever larger tables, each better than the last by the error on the sample."""
    gates, centre = GATES[fn.name]
    reached = np.inf
    with one_thread():
        for half in HALVES:
            if 2 * half + 1 > most:
                return
            best: Fitted | None = None
            for gate in gates:
                for multiple in RATES if centre else (1.0,):
                    for kappa in KAPPAS:
                        wide = kappa * half * half > 0.98 * WIDEST[working(dtype)]
                        ends = 2 * kappa * half / (gate * multiple)
                        if wide or not 6.0 < ends < 30.0:
                            continue
                        one = _solve(fn, lo, hi, half, gate * multiple, kappa, centre, gate, dtype)
                        best = one if best is None or one.error < best.error else best
            if best is not None and best.error < 0.9 * reached:
                reached = best.error
                yield best
