"""The same step as ordinary attention layers over one sequence of tokens, masks written into positions.

`Block` leaves out what a mask would hide. Here nothing is left out: `dense_step` gives `network.AttentionLayer`s that
act on the sequence (state, data) with these channels,

    x d | v d | y K | r K | p d | a d | id K (state token k: e_k) | data (1 on data tokens) | one

Keys that a head must not see carry -OMEGA, which makes their weight an exact 0 (B4): a data token sees one state token
and the sink, a state token sees the data and the sink, and what a data token would write into its state channels is the
sink's value, an exact 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import ArgumentError
from ..network import AttentionLayer, AttentionOnly, Heads
from .blocks import Block, Loss, Momentum
from .extrapolation import LOG_SINK, levels, pairs
from .prompt import Array

OMEGA = {torch.float64: 2.0**11, torch.float32: 2.0**8}  # beyond the range of exp, below the range where logits round


@dataclass(frozen=True)
class Channels:
    """Where the parts of a token are, for d columns and K outputs."""

    d: int
    classes: int = 1

    def __post_init__(self) -> None:
        if self.d < 1 or self.classes < 1:
            raise ArgumentError(f"tokens need at least one column and one output, got {self.d} and {self.classes}")

    def part(self, name: str) -> range:
        """The channels of a part."""
        sizes = {"x": self.d, "v": self.d, "y": self.classes, "r": self.classes, "p": self.d, "a": self.d,
                 "id": self.classes, "data": 1, "one": 1}  # fmt: skip
        begin = 0
        for key, size in sizes.items():
            if key == name:
                return range(begin, begin + size)
            begin += size
        raise ArgumentError(f"tokens have no part {name!r}; they have {', '.join(sizes)}")

    @property
    def width(self) -> int:
        """The number of channels."""
        return self.part("one")[-1] + 1

    def sequence(self, state: Tensor, tokens: Tensor) -> Tensor:
        """One sequence out of a block's state (K, 2d) and data tokens (n, 2d + K)."""
        d, k, n = self.d, self.classes, tokens.shape[-2]
        Z = tokens.new_zeros(*tokens.shape[:-2], k + n, self.width)
        Z[..., :k, self.part("p")[0] : self.part("a")[-1] + 1] = state[..., : 2 * d]
        Z[..., k:, : 2 * d + k] = tokens
        for j, channel in enumerate(self.part("id")):
            Z[..., j, channel] = 1.0
        Z[..., k:, self.part("data")[0]] = 1.0
        Z[..., self.part("one")[0]] = 1.0
        return Z

    def state(self, Z: Tensor) -> Tensor:
        """The block's state out of a sequence."""
        return Z[..., : self.classes, self.part("p")[0] : self.part("a")[-1] + 1]


def dense_step(
    loss: Loss, d: int, classes: int, momentum: Momentum, dtype: torch.dtype = torch.float64
) -> AttentionOnly:
    """Two attention layers that do what `Block(loss, momentum)` does, without penalties and gates.

    >>> step = dense_step("linear", 3, 1, Momentum("plain"))
    >>> len(step.layers), [type(layer).__name__ for layer in step.layers]
    (2, ['AttentionLayer', 'AttentionLayer'])
    """
    if loss not in ("linear", "logistic", "poisson"):
        raise ArgumentError(f"the dense form exists for linear, logistic and poisson losses, not {loss!r}")
    channels = Channels(d, classes)
    return AttentionOnly([_predict(loss, channels, dtype), _update(channels, momentum, dtype)])


def _tensor(array: Array, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(array).to(dtype)


def _predict(loss: Loss, at: Channels, dtype: torch.dtype) -> AttentionLayer:
    """Data tokens read the state: r <- read(p.x) - y."""
    d, c, omega = at.d, at.width, OMEGA[dtype]
    if loss == "linear":
        table = pairs(dtype)
        scales, up, down, sink = table.scales, [2 * w for w in table.weights], [-2 * w for w in table.weights], 0.0
    elif loss == "logistic":
        scales, up, down, sink = (1.0,), [1.0], [0.0], 0.0
    else:
        scales, up, down, sink = (1.0,), [math.exp(LOG_SINK[dtype])], [0.0], LOG_SINK[dtype]
    heads = len(scales) * at.classes
    W_Q, W_K, b_K = np.zeros((heads, c, d + 1)), np.zeros((heads, c, d + 1)), np.zeros((heads, d + 1))
    M_K, b_V, M_V, W_O = (np.zeros(s) for s in ((heads, 1, d + 1), (heads, 1), (heads, 1, 1), (heads, 1, c)))
    for k in range(at.classes):
        for j, scale in enumerate(scales):
            h = k * len(scales) + j
            W_Q[h, list(at.part("x")), range(d)] = 1.0
            W_Q[h, at.part("one")[0], d] = 1.0
            W_K[h, list(at.part("p")), range(d)] = scale
            W_K[h, at.part("id")[k], d], b_K[h, d] = omega, -omega  # every token but state token k is masked
            M_K[h, 0, d] = sink
            b_V[h, 0], M_V[h, 0, 0] = up[j], down[j]
            W_O[h, 0, at.part("r")[k]] = 1.0
    S = np.eye(c)
    for k in range(at.classes):
        S[at.part("r")[k], at.part("r")[k]] = 0.0
        S[at.part("y")[k], at.part("r")[k]] = -1.0
    group = Heads("tokens", W_Q=_tensor(W_Q, dtype), W_K=_tensor(W_K, dtype), b_K=_tensor(b_K, dtype),
                  b_V=_tensor(b_V, dtype), M_K=_tensor(M_K, dtype), M_V=_tensor(M_V, dtype), W_O=_tensor(W_O, dtype),
                  purpose="prediction")  # fmt: skip
    return AttentionLayer([group], S=_tensor(S, dtype))


def _update(at: Channels, momentum: Momentum, dtype: torch.dtype) -> AttentionLayer:
    """The state aggregates the data and takes its step; data tokens forget r."""
    d, c, K, omega = at.d, at.width, at.classes, OMEGA[dtype]
    table, mass = levels(dtype), math.exp(LOG_SINK[dtype])
    scales = [sign * s for sign in (1, -1) for s in table.scales]
    values = [sign * w * mass / 2 for sign in (1, -1) for w in table.weights]
    heads, beta, one = len(scales), momentum.beta, at.part("one")[0]
    W_Q, W_K, b_K = np.zeros((heads, c, K + 2)), np.zeros((heads, c, K + 2)), np.zeros((heads, K + 2))
    W_V, M_K, M_V, W_O = (np.zeros(s) for s in ((heads, c, d), (heads, 1, K + 2), (heads, 1, d), (heads, d, c)))
    for h, scale in enumerate(scales):
        W_Q[h, list(at.part("id")), range(K)] = scale
        W_K[h, list(at.part("r")), range(K)] = 1.0
        W_Q[h, one, K] = 1.0
        W_K[h, at.part("data")[0], K], b_K[h, K] = omega, -omega  # state tokens are masked as keys
        W_Q[h, at.part("data")[0], K + 1], b_K[h, K + 1] = 1.0, -omega  # data tokens see the sink only
        M_K[h, 0, K] = LOG_SINK[dtype]
        W_V[h, list(at.part("v")), range(d)] = 1.0
        to_p = 1.0 if momentum.kind == "heavy ball" else 1 + beta
        W_O[h, range(d), list(at.part("p"))] = -to_p * values[h]
        if momentum.kind != "heavy ball":
            W_O[h, range(d), list(at.part("a"))] = -values[h]
    S, p, a = np.eye(c), list(at.part("p")), list(at.part("a"))
    S[p, p], S[a, p], S[p, a], S[a, a] = 1 + beta, -beta, 1.0, 0.0
    for channel in at.part("r"):
        S[channel, channel] = 0.0
    group = Heads("tokens", W_Q=_tensor(W_Q, dtype), W_K=_tensor(W_K, dtype), b_K=_tensor(b_K, dtype),
                  W_V=_tensor(W_V, dtype), M_K=_tensor(M_K, dtype), M_V=_tensor(M_V, dtype), W_O=_tensor(W_O, dtype),
                  purpose="aggregation")  # fmt: skip
    return AttentionLayer([group], S=_tensor(S, dtype))


def dense_of(block: Block, d: int, classes: int = 1) -> AttentionOnly:
    """The dense form of a block without gates."""
    if block.ramp is not None or block.shrink is not None:
        raise ArgumentError("the dense form exists for blocks without gates")
    return dense_step(block.loss, d, classes, block.momentum, block.dtype)
