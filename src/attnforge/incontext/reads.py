"""Inner products by hot heads, on their own: what prompts with more than one matrix of keys are built from (C2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .extrapolation import pairs, shipped


class LinearRead(nn.Module):
    """w.x for every key w (..., K, d) and query x (..., n, d): heads {key: s_j w.x, sink: 0}, values {c_j, -c_j}.

    Meant for |w.x| <= 1, saturating far beyond.

    >>> w, x = torch.tensor([[0.5, -0.25]]).double(), torch.tensor([[1.0, 1.0], [0.5, 1.0]]).double()
    >>> LinearRead(torch.float64)(w, x).sub(x @ w.mT).abs().max().item() < 1e-13
    True
    """

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        table = pairs(shipped(dtype))
        self.scales = nn.Parameter(torch.tensor(table.scales, dtype=dtype).unsqueeze(-1))
        # tanh(s z/2) = z s/2 - ...: the weights of sinh, twice.
        self.values = nn.Parameter(2 * torch.tensor(table.weights, dtype=dtype).unsqueeze(-1))
        self.register_buffer("sink", torch.zeros((), dtype=dtype))

    def forward(self, w: Tensor, x: Tensor) -> Tensor:
        keys = w.unsqueeze(-2) * self.scales  # (..., K, head, d)
        logits = x @ keys.flatten(-3, -2).transpose(-2, -1)  # (..., n, K head)
        weights = torch.stack((logits, self.get_buffer("sink").expand(logits.shape))).softmax(0)
        read = (weights[0] - weights[1]).unflatten(-1, keys.shape[-3:-1])  # (..., n, K, head)
        return (read @ self.values).squeeze(-1)
