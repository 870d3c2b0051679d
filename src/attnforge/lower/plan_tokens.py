"""Sites for operations on whole tokens and between tokens (softmax, attention, norm, fixed mixing, maximum)."""

from __future__ import annotations

import math

import numpy as np
import torch

from ..certify.rounding import unit
from ..errors import DomainError, PrecisionError
from ..heads.norm import MAX_HEADS
from ..heads.norm_fit import fit, layer_error
from ..heads.token_bounds import DEAD
from ..heads.token_weights import sharpest
from ..ir.enclose import Range
from ..ir.ops import Attention, MaxTokens, Mix, Normalise, Softmax
from .layout import Site
from .plan import CHOICES, Order, Table

ROOM = 2.0**-7  # how much further than the exact roots of variances a norm is fitted, for errors of earlier layers
COUNTS = (4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, MAX_HEADS)  # numbers of heads tried for a norm


def _interval(order: Order, operand: int = 0) -> list[float]:
    hull = order.hull(operand)
    return [hull.low, hull.high]


def _softmax(order: Order, tables: list[Table]) -> Site:
    return Site(order.number, "softmax", {"interval": _interval(order)})


def _mix(order: Order, tables: list[Table]) -> Site:
    return Site(order.number, "mix", {"interval": _interval(order)})


def _max(order: Order, tables: list[Table]) -> Site:
    low, high = _interval(order)
    beta = sharpest(order.reads[0].low.shape[1], low, high, None, order.dtype)
    beta = float(torch.tensor(beta, dtype=order.dtype))
    return Site(order.number, "max", {"interval": [low, high], "sharpness": beta})


def _attention(order: Order, tables: list[Table]) -> Site:
    """Omega hides a token from every other one whatever the content says, with as much again for errors."""
    op, dtype, (query, key, _) = order.op, order.dtype, order.reads
    assert isinstance(op, Attention)
    logit = abs(op.scale) * float(np.max(np.einsum("cik,cjk->cij", query.size, key.size)))
    offsets = op.logit_mask(query.low.shape[1])
    finite = offsets[offsets > -4 * DEAD[dtype] - 4 * logit]
    omega = math.ceil(DEAD[dtype] + 4 * logit + 1 + 2 * float(np.abs(finite).max(initial=0.0)))
    config = {
        "width": key.low.shape[-1],
        "omega": float(omega),
        "logit": logit + float(omega if op.mask is not None else 0.0),
        "intervals": [_interval(order, operand) for operand in range(3)],
    }
    return Site(order.number, "attention", config)


def _normalise(order: Order, tables: list[Table]) -> Site:
    """The fewest heads whose fit keeps the budget, or the best fit if none does."""
    op, dtype, margin = order.op, order.dtype, order.style.margin
    assert isinstance(op, Normalise)
    name = f"the norm '{order.site}'" if order.site else f"the norm %{order.number}"
    low, high = variances(order.reads[0])
    low = max(0.0, math.sqrt(low) * (1 - ROOM) - margin * ROOM * math.sqrt(high)) ** 2
    high = max(high * (1 + max(ROOM, margin)) ** 2, 1e-30)
    if low + op.eps == 0:
        raise DomainError(
            f"{name} may divide by 0: its variance cannot be shown to stay away from 0 and its eps is 0; "
            "give it an eps, or choose a box on which the variance is positive"
        )
    wanted = 0.5 * order.eps / math.sqrt(op.width)
    best: tuple[float, tuple[np.ndarray, ...]] | None = None
    for count in COUNTS:
        table = fit(low, high, op.eps, count, op.width, dtype)
        error, evaluation = layer_error(*table, op.width, op.eps, low, high, unit(dtype))
        if best is None or error + evaluation < best[0]:
            best = error + evaluation, table
        if error <= max(wanted, 0.1 * evaluation):
            break
    assert best is not None
    if not best[0] < 0.5:
        raise PrecisionError(
            f"{name} has no accurate head for variances from {low:g} to {high:g} with eps {op.eps:g} in "
            f"{str(dtype).removeprefix('torch.')}; give it a larger eps, or choose a smaller box"
        )
    scale, shift, amount = (x.tolist() for x in best[1])
    config = {"variance": [low, high], "scales": scale, "shifts": shift, "amounts": amount}
    return Site(order.number, "norm", config)


def variances(r: Range) -> tuple[float, float]:
    """The smallest and the largest mean square of a row."""
    return float(np.min(np.mean(r.least**2, -1))), float(np.max(np.mean(r.size**2, -1)))


CHOICES.update({Softmax: _softmax, Mix: _mix, MaxTokens: _max, Attention: _attention, Normalise: _normalise})
