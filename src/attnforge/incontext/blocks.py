"""One step of gradient descent as a block of attention layers, frozen: the data and the step size are in the prompt.

Tokens: K state tokens carry the weights w_k (and the previous ones, for momentum), data token i carries x_i, a value
vector v_i and its label y_i. One block is

    layer 1   data tokens attend to the state:     r_i = read(w.x_i) - y_i                       (F1, C2)
    layer 2   (Huber only) a ramp on each r_i by a gate of three slots                           (B2)
    layer 3   the state attends to the data:       g = sum_i r_i v_i, heavy sink, Richardson     (F2)
              and takes a step by linear maps:     momentum                                      (F3)
    layer 4   (lasso only) soft threshold by two gates per coordinate                            (B1)

With v_i = (step size) (sample weight) x_i / n the block takes a gradient step, whatever the step size: it is part of
the prompt, and so are penalties, which are tokens (sqrt(lambda_j) e_j, 0) that are always read linearly. So weights
depend on the loss, on the momentum and on the dtype, and on nothing else: not on data, not even on their number.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, closest
from .extrapolation import LOG_SINK, levels, shipped
from .reads import READS, LinearRead, against_sink

Loss = Literal["linear", "logistic", "softmax", "poisson", "huber"]
Kind = Literal["plain", "heavy ball", "nesterov"]
SHARPNESS = {torch.float64: 2.0**52, torch.float32: 2.0**24}  # of gates for numbers of size 1: 0.28/beta below rounding


@dataclass(frozen=True)
class Momentum:
    """How the new state follows from the old ones: `beta` times the last difference is added.

    Heavy ball: p' = p - g(p) + beta (p - a), a' = p. Nesterov: a' = prox(p - g(p)), p' = a' + beta (a' - a).
    """

    kind: Kind
    beta: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("plain", "heavy ball", "nesterov"):
            raise ArgumentError(f"momentum is 'plain', 'heavy ball' or 'nesterov', got {self.kind!r}")
        if not 0 <= self.beta < 1:
            raise ArgumentError(f"the momentum's beta must be in [0, 1), got {self.beta!r}")

    @classmethod
    def optimal(cls, kind: Kind, condition: float) -> Momentum:
        """The best constant for a quadratic whose curvatures lie in [1/condition, 1] (after scaling).

        >>> Momentum.optimal("nesterov", 9.0).beta
        0.5
        """
        if not condition >= 1:
            raise ArgumentError(f"a condition number is at least 1, got {condition!r}")
        ratio = (math.sqrt(condition) - 1) / (math.sqrt(condition) + 1)
        return cls(kind, {"plain": 0.0, "heavy ball": ratio * ratio, "nesterov": ratio}[kind])


class Gather(nn.Module):
    """sum_i r_i v_i at each state token: heads of logits +-s r_i against a sink of logit log M (F2).

    >>> r, v = torch.tensor([[0.5], [-1.0]]).double(), torch.tensor([[1.0, 2.0], [3.0, 4.0]]).double()
    >>> Gather(torch.float64)(r, v).sub(r.mT @ v).abs().max().item() < 1e-12
    True
    """

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        table, mass = levels(shipped(dtype)), math.exp(LOG_SINK[dtype])
        scales = [sign * s for sign in (1, -1) for s in table.scales]
        values = [sign * c * mass / 2 for sign in (1, -1) for c in table.weights]
        self.scales = nn.Parameter(torch.tensor(scales, dtype=dtype).unsqueeze(-1))
        self.values = nn.Parameter(torch.tensor([values], dtype=dtype))
        self.register_buffer("sink", torch.tensor([LOG_SINK[dtype]], dtype=dtype))

    def weights(self, r: Tensor) -> Tensor:
        """The attention weights, shape (..., K, head, n + 1); the last slot is the sink."""
        logits = r.transpose(-2, -1).unsqueeze(-2) * self.scales  # (..., K, head, n)
        sink = cast(Tensor, self.sink).expand(*logits.shape[:-1], 1)
        return torch.cat((logits, sink), dim=-1).softmax(-1)

    def forward(self, r: Tensor, v: Tensor) -> Tensor:
        weights = self.weights(r)[..., :-1]
        read = weights.flatten(-3, -2) @ v  # (..., K head, d)
        return (self.values @ read.unflatten(-2, weights.shape[-3:-1])).squeeze(-2)


class Ramp(nn.Module):
    """clip(r, -t, t) on each entry: slots of logits (beta(-t-r), 0, beta(r-t)) and values (-t, r, t) (B2)."""

    def __init__(self, dtype: torch.dtype, edge: float = 1.0):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(SHARPNESS[shipped(dtype)] / edge, dtype=dtype))
        self.edge = nn.Parameter(torch.tensor(edge, dtype=dtype))

    def forward(self, r: Tensor) -> Tensor:
        edge = self.edge.expand(r.shape)
        logits = torch.stack((-(r + edge) * self.slope, torch.zeros_like(r), (r - edge) * self.slope), dim=-1)
        values = torch.stack((-edge, r, edge), dim=-1)
        return (logits.softmax(-1).unsqueeze(-2) @ values.unsqueeze(-1)).squeeze(-1).squeeze(-1)


class Shrink(nn.Module):
    """The soft threshold sign(u) max(|u| - t, 0), by relu(u - t) - relu(-u - t): two gates a coordinate (B1)."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(SHARPNESS[shipped(dtype)], dtype=dtype))
        self.register_buffer("sink", torch.zeros((), dtype=dtype))

    def forward(self, u: Tensor, t: Tensor) -> Tensor:
        beyond = torch.stack((u - t, -u - t), dim=-1)
        weights = against_sink(beyond * self.slope, cast(Tensor, self.sink))[0]
        gated = weights.unsqueeze(-1).unsqueeze(-1) @ beyond.unsqueeze(-1).unsqueeze(-1)
        return gated[..., 0, 0, 0] - gated[..., 1, 0, 0]


class Block(nn.Module):
    """One step. Frozen: the weights know the loss, the momentum and the dtype, and nothing of the data.

    `forward(state, tokens, penalties)`: state (..., K, 2d) holds p and a (lasso: (..., K, 3d), thresholds last), tokens
    (..., n, 2d + K) hold x, v and y; penalties have the form of tokens. Returns the next state.
    """

    def __init__(
        self,
        loss: Loss,
        momentum: Momentum,
        dtype: torch.dtype = torch.float64,
        shrink: bool = False,
        edge: float = 1.0,
    ):
        super().__init__()
        if loss not in READS:
            raise ArgumentError(f"unknown loss {loss!r}{closest(str(loss), READS)}; known: {', '.join(READS)}")
        if shrink and momentum.kind == "heavy ball":
            raise ArgumentError("a soft threshold goes with momentum 'plain' or 'nesterov'")
        self.loss, self.momentum = loss, momentum
        self.read = READS[loss](dtype)
        self.ramp = Ramp(dtype, edge) if loss == "huber" else None
        self.linear = LinearRead(dtype)
        self.gather = Gather(dtype)
        self.shrink = Shrink(dtype) if shrink else None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.gather.values.dtype

    def residuals(self, w: Tensor, tokens: Tensor) -> Tensor:
        """Layer 1 (and 2): r_i for each data token and state token, shape (..., n, K)."""
        width = w.shape[-1]
        r = self.read(w, tokens[..., :width]) - tokens[..., 2 * width :]
        return r if self.ramp is None else self.ramp(r)

    def gradient(self, w: Tensor, tokens: Tensor, penalties: Tensor | None = None) -> Tensor:
        """Layers 1 to 3 without the step: sum_i r_i v_i over data and penalties, shape (..., K, d)."""
        width = w.shape[-1]
        total = self.gather(self.residuals(w, tokens), tokens[..., width : 2 * width])
        if penalties is not None:
            r = self.linear(w, penalties[..., :width])
            total = total + self.gather(r, penalties[..., width : 2 * width])
        return cast(Tensor, total)

    def forward(self, state: Tensor, tokens: Tensor, penalties: Tensor | None = None) -> Tensor:
        width = state.shape[-1] // (2 if self.shrink is None else 3)
        p, a = state[..., :width], state[..., width : 2 * width]
        beta = self.momentum.beta
        u = p - self.gradient(p, tokens, penalties)
        if self.momentum.kind == "heavy ball":
            return torch.cat((u + beta * p - beta * a, p), dim=-1)
        if self.shrink is None:
            return torch.cat(((1 + beta) * u - beta * a, u), dim=-1)
        t = state[..., 2 * width :]
        u = self.shrink(u, t)
        return torch.cat(((1 + beta) * u - beta * a, u, t), dim=-1)

    def weights_of(self, state: Tensor) -> Tensor:
        """The weights w that a state stands for."""
        width = state.shape[-1] // (2 if self.shrink is None else 3)
        return state[..., :width] if self.momentum.kind == "heavy ball" else state[..., width : 2 * width]

    def example_input(self) -> tuple[Tensor, Tensor, Tensor]:
        """An input of the right form, for `purity`."""
        classes = 3 if self.loss == "softmax" else 1
        generator = torch.Generator().manual_seed(0)
        shapes = ((classes, 4 if self.shrink is None else 6), (5, 4 + classes), (2, 4 + classes))
        state, tokens, penalties = (0.1 * torch.rand(s, generator=generator).to(self.dtype) for s in shapes)
        return state, tokens, penalties


@functools.lru_cache(maxsize=256)
def frozen(
    loss: Loss,
    kind: Kind,
    doublings: int,
    dtype: torch.dtype = torch.float64,
    shrink: bool = False,
    edge: float = 1.0,
) -> Block:
    """The block for condition numbers up to 2**doublings; the same object for everyone who asks."""
    block = Block(loss, Momentum.optimal(kind, 2.0**doublings), dtype, shrink, edge)
    return block.eval().requires_grad_(False)
