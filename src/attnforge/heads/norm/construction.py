"""Norm heads for operations of a program."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ...certificates.rounding import unit
from ...dtypes import Array, dtype_name
from ...errors import DomainError, PrecisionError
from ...network import Heads
from ...programs.enclose import Range
from ...programs.ops import Normalise
from ..construction import Builder, Frame, Member, Order, Planned, embedded
from .bound import layer_error
from .fit import fit
from .site import MAX_HEADS, NormSite

ROOM = 2.0**-7  # how much further than the exact roots of variances a norm is fitted, for errors of earlier layers
COUNTS = (4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, MAX_HEADS)  # numbers of heads tried for a norm

Parts = tuple[Array, Array, Array]  # scales, shifts, amounts


class NormBuilder(Builder):
    """Norms of rows that are centred already, if they are to be."""

    def propose(self, order: Order, made: Sequence[Planned]) -> Planned | None:
        """The fewest heads whose fit keeps the budget, or the best fit if none does."""
        op, dtype, margin = order.op, order.dtype, order.tactics.margin
        if not isinstance(op, Normalise):
            return None
        name = f"the norm '{order.name}'" if order.name else f"the norm %{order.number}"
        low, high = variances(order.reads[0])
        low = max(0.0, math.sqrt(low) * (1 - ROOM) - margin * ROOM * math.sqrt(high)) ** 2
        high = max(high * (1 + max(ROOM, margin)) ** 2, 1e-30)  # rows that are 0 throughout still have an interval
        if low + op.eps == 0:
            raise DomainError(
                f"{name} may divide by 0: its variance cannot be shown to stay away from 0 and its eps is 0; "
                "give it an eps, or choose a box on which the variance is positive"
            )
        wanted = 0.5 * order.eps / math.sqrt(op.width)
        best: tuple[float, Parts] | None = None
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
                f"{dtype_name(dtype)}; give it a larger eps, or choose a smaller box"
            )
        return Planned(NormSite(order.number, (low, high), len(best[1][0])), best[1])

    def group(self, frame: Frame, members: Sequence[Member], purpose: str) -> Heads:
        (member,) = members
        return embedded(norm_heads(member.op.width, member.planned.parts, frame.dtype), member.place, frame, purpose)


def norm_heads(width: int, parts: Parts, dtype: torch.dtype) -> Heads:
    """G1: head j has a self slot of logit b_j - s_j c.c/d and value c, and a sink of logit and value 0."""
    scale, shift, amount = (torch.tensor(part, dtype=dtype) for part in parts)
    eye = torch.eye(width, dtype=dtype)
    wide = torch.eye(width, width + 1, dtype=dtype)
    one = torch.zeros(1, width + 1, dtype=dtype)
    one[0, -1] = 1.0
    return Heads(
        "self",
        W_Q=-scale[:, None, None] * wide,
        b_Q=shift[:, None] * one,
        W_K=wide.unsqueeze(0),
        b_K=one,
        W_V=eye.unsqueeze(0),
        M_K=torch.zeros(1, 1, width + 1, dtype=dtype),
        M_V=torch.zeros(1, 1, width, dtype=dtype),
        W_O=amount[:, None, None] * eye,
    )


def variances(r: Range) -> tuple[float, float]:
    """The smallest and the largest mean square of a row."""
    return float(np.min(np.mean(r.least**2, -1))), float(np.max(np.mean(r.size**2, -1)))


BUILDERS: dict[str, Builder] = {"norm": NormBuilder()}
