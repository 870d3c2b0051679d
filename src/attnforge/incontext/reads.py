"""What a data token reads off the state: w.x, sigmoid(w.x), softmax over classes, exp(w.x) (lemmas F1 and C2).

Queries are the data tokens' x, keys the state tokens' w: inner products are native to attention. Every head of this
file sees state tokens and memory slots only; the data tokens, which a full attention matrix would mask, are left out.
`dense` builds the same heads with the mask written into positions.

    LinearRead     L heads {state: s_j w.x, sink: 0}, values {c_j, -c_j}: w.x up to O(s^2L), see `extrapolation`
    SigmoidRead    one head {state: w.x, sink: 0}, values {1, 0}: exact
    SoftmaxRead    one head over all state tokens: exact
    ExpRead        one head {state: w.x, sink: log M}, values {M, 0}: exp(w.x) / (1 + exp(w.x)/M)
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from .extrapolation import LOG_SINK, pairs, shipped


def against_sink(logits: Tensor, sink: Tensor) -> Tensor:
    """softmax over two slots, a token of these logits and a sink: shape (2, ...)."""
    return torch.stack((logits, sink.expand(logits.shape))).softmax(0)


class Read(nn.Module):
    """A prediction layer: state (..., K, d) and x (..., n, d) to (..., n, K)."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.register_buffer("sink", torch.zeros((), dtype=shipped(dtype)))

    @property
    def nothing(self) -> Tensor:
        """The sink's logit."""
        return cast(Tensor, self.sink)


class LinearRead(Read):
    """w.x itself, by hot heads (C2); meant for |w.x| <= 1, saturating far beyond.

    >>> w, x = torch.tensor([[0.5, -0.25]]).double(), torch.tensor([[1.0, 1.0], [0.5, 1.0]]).double()
    >>> LinearRead(torch.float64)(w, x).sub(x @ w.mT).abs().max().item() < 1e-13
    True
    """

    def __init__(self, dtype: torch.dtype):
        super().__init__(dtype)
        table = pairs(dtype)
        self.scales = nn.Parameter(torch.tensor(table.scales, dtype=dtype).unsqueeze(-1))
        # tanh(s z/2) = z s/2 - ...: the weights of sinh, twice.
        self.values = nn.Parameter(2 * torch.tensor(table.weights, dtype=dtype).unsqueeze(-1))

    def forward(self, w: Tensor, x: Tensor) -> Tensor:
        keys = w.unsqueeze(-2) * self.scales  # (..., K, head, d)
        logits = x @ keys.flatten(-3, -2).transpose(-2, -1)  # (..., n, K head)
        weights = against_sink(logits, self.nothing)
        read = (weights[0] - weights[1]).unflatten(-1, keys.shape[-3:-1])  # (..., n, K, head)
        return (read @ self.values).squeeze(-1)


class SigmoidRead(Read):
    """sigmoid(w.x), exactly (F1)."""

    def forward(self, w: Tensor, x: Tensor) -> Tensor:
        return against_sink(x @ w.transpose(-2, -1), self.nothing)[0]


class SoftmaxRead(Read):
    """softmax over the state tokens, exactly: attention itself."""

    def forward(self, w: Tensor, x: Tensor) -> Tensor:
        return (x @ w.transpose(-2, -1)).softmax(-1)


class ExpRead(Read):
    """exp(w.x): the weight of the state against a sink so heavy that it does not feel the state."""

    def __init__(self, dtype: torch.dtype):
        super().__init__(dtype)
        self.sink = torch.tensor(LOG_SINK[dtype], dtype=dtype)
        self.value = nn.Parameter(torch.tensor(math.exp(LOG_SINK[dtype]), dtype=dtype))

    def forward(self, w: Tensor, x: Tensor) -> Tensor:
        return against_sink(x @ w.transpose(-2, -1), self.nothing)[0] * self.value


READS: dict[str, type[Read]] = {
    "linear": LinearRead,
    "huber": LinearRead,
    "logistic": SigmoidRead,
    "softmax": SoftmaxRead,
    "poisson": ExpRead,
}
