"""Tables for activation functions: what `FastActivation` is made of.

An activation that goes like 0 on one side and like y on the other is a gate y sigmoid(gate y), right on the whole line,
plus a bump: g(y) - y sigmoid(gate y) decays on both sides. So a short table of evenly spaced anchors whose last values
are about 0 serves every interval, however wide. The values solve a least squares problem on the whole live part; rate,
kappa and gate have few bits, so that every key rate k and kappa k^2 is exact in float32. Which functions are made so is
decided by `heads.choose.fast_form`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ...certificates.rounding import unit
from ...dtypes import Array
from ...functions.univariate import Univariate
from ...threads import one_thread
from ..choose import Fast
from .table import WIDEST, Table, working

RATES = (1.0, 1.25, 1.5)  # of the table, as multiples of the gate's; 1 shares its exponential
KAPPAS = tuple(k / 32 for k in (4, 5, 6, 8, 10, 12, 13, 14, 15, 16, 18))  # warm, with few bits: 1/8 to 9/16
SHORT = (2, 3, 4, 5, 6, 7)  # (anchors - 1) / 2 of tables for half precision: 11 anchors reach 1e-4 of gelu
SHORT_KAPPAS = tuple(k / 16 for k in range(9, 21))  # with few anchors spread over the same ends: 9/16 to 5/4
HALVES = (8, 10, 11, 12, 13, 14, 15, 16, 17, 18, 20, 22, 24, 26, 28, 31)  # (anchors - 1) / 2, up to 63 anchors
ENDS = (6.0, 30.0)  # where the last anchors may be: inside of it the bump is alive, beyond it has long decayed
SHORT_END = 3.0  # nearer for short tables, whose last values are small rather than nothing
LIVE = 30.0  # the sample is dense on [-30, 30], where the function bends
FAR = 80.0  # and goes on this far out: beyond, both sides are straight to any precision
CUTS = (1e-13, 1e-11, 1e-9)  # singular values below these shares of the largest are left out, whichever errs least
EVEN = 1e-3  # values that differ by less from their mirror image, relatively, are those of an even bump
BETTER = 0.9  # a larger table is worth trying when its error is at most so much of the last
TWO_KAPPA = 0.25  # of two keys it does not matter: both have the same offset
#: Of a relu, at scale 1: the kink then costs 2^-32, or 2^-62, of the scale, and logits stay far from overflow.
SHARPNESS = {torch.float32: 2.0**30, torch.bfloat16: 2.0**30, torch.float64: 2.0**60}


@dataclass(frozen=True)
class Fitted:
    """A table and the largest error on the sample."""

    table: Table
    error: float


@functools.lru_cache(maxsize=64)
def _sample(fn: Univariate, lo: float, hi: float) -> tuple[Array, Array]:
    live = np.linspace(-LIVE, LIVE, 1201)
    far = np.concatenate([-np.geomspace(LIVE, max(FAR, -lo), 40), np.geomspace(LIVE, max(FAR, hi), 40)])
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
    for cut in CUTS:
        kept = size > cut * size[0]
        value = right.T[:, kept] @ ((left.T[kept] @ bump) / size[kept])
        if centre == 0 and np.abs(value - value[::-1]).max() < EVEN * np.abs(value).max():
            value = 0.5 * (value + value[::-1])  # the bump of an even function: half the work
        value = torch.from_numpy(value).to(dtype).double().numpy()
        # where the values are far larger than the bump, rounding decides
        error = float(np.abs(weight @ value - bump).max() + 4 * unit(working(dtype)) * np.abs(value).max())
        if best is None or error < best.error:
            best = Fitted(Table(tuple(value.tolist()), rate, kappa, centre, gate), error)
    assert best is not None
    return best


def _fitted(
    fn: Univariate, form: Fast, lo: float, hi: float, dtype: torch.dtype, most: int, short: bool
) -> Iterator[Fitted]:
    """Ever larger tables, each better than the last by the error on the sample."""
    centre = form.centre
    reached = np.inf
    with one_thread():
        for half in (*(SHORT if short else ()), *HALVES):
            if 2 * half + 1 > most:
                return
            best: Fitted | None = None
            for gate in form.slopes:
                for multiple in RATES if centre or half in SHORT else (1.0,):
                    for kappa in SHORT_KAPPAS if half in SHORT else KAPPAS:
                        wide = kappa * half * half > 0.98 * WIDEST[working(dtype)]
                        ends = 2 * kappa * half / (gate * multiple)
                        if wide or not (SHORT_END if half in SHORT else ENDS[0]) < ends < ENDS[1]:
                            continue
                        one = _solve(fn, lo, hi, half, gate * multiple, kappa, centre, gate, dtype)
                        best = one if best is None or one.error < best.error else best
            if best is not None and best.error < BETTER * reached:
                reached = best.error
                yield best


def tables(
    fn: Univariate, form: Fast, lo: float, hi: float, dtype: torch.dtype, most: int, short: bool = False
) -> Iterator[Fitted]:
    """The tables to try for a function, smallest first, each with its error on a sample; `short` ones only if asked."""
    if form.bump:
        yield from _fitted(fn, form, lo, hi, dtype, most, short)
        return
    if form.table is not None:
        yield Fitted(Table(form.table, rate=form.rate, kappa=TWO_KAPPA), 0.0)
        return
    (slope,) = form.slopes
    if math.isinf(slope):
        scale = max(abs(lo), abs(hi))
        slope = SHARPNESS[dtype] / 2.0 ** math.ceil(math.log2(scale))
    yield Fitted(Table((), gate=float(torch.tensor(slope, dtype=torch.float64).to(dtype))), 0.0)
