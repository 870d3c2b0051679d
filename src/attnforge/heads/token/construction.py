"""The heads that move information between tokens: weights for lemmas D1 to D4 of docs/theory.md, and those of softmax
over channels and of attention.

Heads of section D read tokens of `channels` data columns, followed, where positions matter, by n one-hot position
columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...certificates.certificate import total
from ...certificates.rounding import TINY, UNIT
from ...dtypes import Array, dtype_name
from ...errors import ArgumentError, PrecisionError
from ...network import Heads
from ...programs.ops import Attention, MaxTokens, Mix, Op, Softmax
from ...programs.positions import average
from ..construction import Frame, HeadBuilder, Member, Order, Planned, embedded
from ..site import Site
from .bound import DEAD, lambert_upper, peak_error
from .site import AttentionSite, MaxSite, MixSite, SoftmaxSite

OMEGA = {torch.float32: 128.0, torch.float64: 768.0}  # deeper than any exponential: 104 and 745.2


def gather_heads(tokens: int, source: int, channels: int, dtype: torch.dtype) -> Heads:
    """D1: every token reads token `source`: its key has an exact 0, the others -Omega."""
    key = torch.zeros(1, channels + tokens, 1, dtype=dtype)
    key[0, channels + source] = OMEGA[dtype]
    return Heads(
        "tokens",
        W_Q=torch.zeros_like(key),
        b_Q=torch.ones(1, 1, dtype=dtype),
        W_K=key,
        b_K=torch.full((1, 1), -OMEGA[dtype], dtype=dtype),
        W_V=torch.eye(channels + tokens, channels, dtype=dtype).unsqueeze(0),
        W_O=torch.eye(channels, dtype=dtype).unsqueeze(0),
        purpose="gather",
    )


def average_heads(channels: int, causal: bool, dtype: torch.dtype, gain: float = 1.0) -> Heads:
    """D2: `gain` times the mean over all tokens, or over tokens 0 to i: equal logits, no positions."""
    eye = torch.eye(channels, dtype=dtype).unsqueeze(0)
    return Heads(
        "tokens",
        W_Q=torch.zeros(1, channels, 1, dtype=dtype),
        b_K=torch.zeros(1, 1, dtype=dtype),
        W_V=eye,
        W_O=gain * eye,
        causal=causal,
        purpose="prefix_mean" if causal else "mean",
    )


def mix_heads(target: Tensor, channels: int, dtype: torch.dtype) -> Heads:
    """D3: token i reads sum_j target[i, j] x_j, target = c (P+ - P-): logits log P, missing mass on a sink."""
    n = target.shape[0]
    parts = [(sign, part) for sign in (1.0, -1.0) if (part := (sign * target).clamp(min=0)).any()]
    parts = parts or [(1.0, torch.zeros_like(target))]
    scale = float(max(part.sum(1).max() for _, part in parts)) or 1.0
    scale = float(torch.tensor(scale, dtype=dtype))
    if not 1e-30 < scale < 1e30:
        raise ArgumentError(f"matrix has rows of absolute sum {scale:g}; expected 1e-30 to 1e30: rescale it")
    dead = -(OMEGA[dtype] + math.ceil(math.log(n + 1)))
    keys, sinks = [], []
    for _, part in parts:
        share = part / scale
        missing = (1 - share.sum(1)).clamp(min=0)
        missing = torch.where(missing > 8 * n * 2.0**-53, missing, 0)
        logit = torch.where(share > 0, share.log().clamp(min=dead), dead)
        keys.append(torch.cat([torch.zeros(channels, n, dtype=torch.float64), logit.T]))
        sinks.append(torch.where(missing > 0, missing.log(), dead).unsqueeze(0))
    query = torch.cat([torch.zeros(channels, n), torch.eye(n)]).expand(len(parts), -1, -1)
    eye = torch.eye(channels, dtype=torch.float64)
    return Heads(
        "tokens",
        W_Q=query.to(dtype),
        W_K=torch.stack(keys).to(dtype),
        W_V=torch.eye(channels + n, channels, dtype=dtype).unsqueeze(0),
        M_K=torch.stack(sinks).to(dtype),
        M_V=torch.zeros(1, 1, channels, dtype=dtype),
        W_O=torch.stack([sign * scale * eye for sign, _ in parts]).to(dtype),
        purpose="mix",
    )


def peak_heads(channels: int, beta: float, dtype: torch.dtype) -> Heads:
    """D4: the maximum over tokens, one head per channel, logits beta x_j; the minimum for beta < 0."""
    eye = torch.eye(channels, dtype=dtype)
    return Heads(
        "tokens",
        W_Q=torch.zeros(channels, channels, 1, dtype=dtype),
        b_Q=torch.ones(channels, 1, dtype=dtype),
        W_K=(beta * eye).unsqueeze(-1),
        W_V=eye.unsqueeze(-1),
        W_O=eye.unsqueeze(1),
        purpose="max" if beta > 0 else "min",
    )


def sharpest(n: int, lo: float, hi: float, eps: float | None, dtype: torch.dtype) -> float:
    """The inverse of D4 with rounding: the smallest beta that certifies eps, or the beta with the smallest bound."""
    u, tiny = UNIT[dtype], TINY[dtype]
    size = max(abs(lo), abs(hi), hi - lo) or 1.0

    def bound(beta: float) -> float:
        return total(peak_error(n, float(torch.tensor(beta, dtype=dtype)), lo, hi, u, tiny))

    grid = [2.0 ** (k / 4) / size for k in range(0, int(-4 * math.log2(u)) + 8)]
    best = min(grid, key=bound)
    if eps is None or n == 1:
        return best
    if bound(best) > eps:
        raise PrecisionError(
            f"the maximum of {n} tokens in [{lo:g}, {hi:g}] is certified to {bound(best):.3g} in "
            f"{dtype_name(dtype)}, not to eps = {eps:g}; use float64 or a smaller interval",
            reachable=bound(best),
        )
    low, high = min(best, lambert_upper(n) / eps), best
    while high / low > 1 + 2.0**-10:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if bound(middle) <= eps else (middle, high)
    return high


def average_matrix(causal: bool, n: int) -> Tensor:
    """The matrix of the mean, or of the prefix mean."""
    if not causal:
        return torch.full((n, n), 1.0, dtype=torch.float64) / n
    return torch.ones(n, n, dtype=torch.float64).tril() / torch.arange(1, n + 1, dtype=torch.float64).unsqueeze(1)


class _Alone(HeadBuilder):
    """A family whose sites have a group of heads each, over coordinates of their own."""

    def group(self, frame: Frame, members: Sequence[Member], purpose: str) -> Heads:
        (member,) = members
        return embedded(self.heads(member.op, member.planned.site, frame.dtype), member.place, frame, purpose)

    def heads(self, op: Op, site: Site, dtype: torch.dtype) -> Heads:
        """The heads over the values they read, one after the other."""
        raise NotImplementedError


class SoftmaxBuilder(_Alone):
    """Softmax over channels: a query of all channels against the identity as keys and values."""

    def propose(self, order: Order, made: Sequence[Planned]) -> Planned | None:
        return Planned(SoftmaxSite(order.number, order.hull())) if isinstance(order.op, Softmax) else None

    def heads(self, op: Op, site: Site, dtype: torch.dtype) -> Heads:
        eye = torch.eye(op.width, dtype=dtype).unsqueeze(0)
        return Heads("memory", W_Q=eye, M_K=eye, M_V=eye, W_O=eye)


class MixBuilder(_Alone):
    """D2 for multiples of means, D3 for everything else (which holds D1, the rows with one entry, exactly)."""

    def propose(self, order: Order, made: Sequence[Planned]) -> Planned | None:
        return Planned(MixSite(order.number, order.hull())) if isinstance(order.op, Mix) else None

    def heads(self, op: Op, site: Site, dtype: torch.dtype) -> Heads:
        assert isinstance(op, Mix)
        plain = average(op.matrix)
        if plain is not None:
            gain, causal = plain
            return average_heads(op.width, causal, dtype, gain)
        return mix_heads(torch.from_numpy(op.matrix.copy()), op.width, dtype)


class MaxBuilder(_Alone):
    """D4, one head per channel."""

    def propose(self, order: Order, made: Sequence[Planned]) -> Planned | None:
        if not isinstance(order.op, MaxTokens):
            return None
        low, high = order.hull()
        beta = sharpest(order.reads[0].low.shape[1], low, high, None, order.dtype)
        return Planned(MaxSite(order.number, (low, high), float(torch.tensor(beta, dtype=order.dtype))))

    def heads(self, op: Op, site: Site, dtype: torch.dtype) -> Heads:
        assert isinstance(site, MaxSite)
        return peak_heads(op.width, site.sharpness, dtype)


class AttentionBuilder(_Alone):
    """One head over tokens; reads queries, keys, values, and positions if there is a mask."""

    def propose(self, order: Order, made: Sequence[Planned]) -> Planned | None:
        """Omega hides a token from every other one whatever the content says, with as much again for errors."""
        op, dtype = order.op, order.dtype
        if not isinstance(op, Attention):
            return None
        query, key, _ = order.reads
        logit = abs(op.scale) * float(np.max(np.einsum("cik,cjk->cij", query.size, key.size)))
        offsets = op.logit_mask(query.low.shape[1])
        finite = offsets[offsets > -4 * DEAD[dtype] - 4 * logit]
        omega = math.ceil(DEAD[dtype] + 4 * logit + 1 + 2 * float(np.abs(finite).max(initial=0.0)))
        reach = logit + float(omega if op.mask is not None else 0.0)
        hulls = (order.hull(0), order.hull(1), order.hull(2))
        return Planned(AttentionSite(order.number, key.low.shape[-1], float(omega), reach, hulls))

    def heads(self, op: Op, site: Site, dtype: torch.dtype) -> Heads:
        """The mask's row p is one more channel: queries carry their one-hot position, keys their column's entries."""
        assert isinstance(op, Attention)
        assert isinstance(site, AttentionSite)
        width, mask = site.width, shipped_mask(op, site.omega)
        n = 0 if mask is None else len(mask)
        query = np.zeros((2 * width + op.width + n, width + n))
        key, value = np.zeros_like(query), np.zeros((len(query), op.width))
        query[:width, :width] = op.scale * np.eye(width)
        key[width : 2 * width, :width] = np.eye(width)
        value[2 * width : 2 * width + op.width] = np.eye(op.width)
        if mask is not None:
            query[-n:, width:], key[-n:, width:] = np.eye(n), mask.T
        tables = [torch.from_numpy(x).to(dtype).unsqueeze(0) for x in (query, key, value, np.eye(op.width))]
        return Heads("tokens", W_Q=tables[0], W_K=tables[1], W_V=tables[2], W_O=tables[3], causal=op.causal)


def shipped_mask(op: Attention, omega: float) -> Array | None:
    """What is added to the logits: -Omega for what is hidden, 0 where the causal rule hides anyway."""
    if op.mask is None:
        return None
    mask: Array = np.maximum(op.mask, -omega)
    return np.tril(mask) if op.causal else mask


BUILDERS: dict[str, HeadBuilder] = {
    "softmax": SoftmaxBuilder(),
    "mix": MixBuilder(),
    "max": MaxBuilder(),
    "attention": AttentionBuilder(),
}
