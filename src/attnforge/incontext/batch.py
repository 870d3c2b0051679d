"""Many prompts at once: regressions of one shape, one frozen network, one batch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..errors import ArgumentError
from .blocks import Kind, Lean, frozen
from .heads import shipped
from .prompt import MARGIN, step_size

Method = Literal["least squares", "ridge", "lasso"]
PATIENCE = 16
ENTRIES = 1 << 17  # attention weights alive at once


@torch.no_grad()
def in_context(
    X: Tensor,
    y: Tensor,
    query: Tensor,
    *,
    method: Method = "least squares",
    alpha: float = 0.0,
    steps: int = 600,
    doublings: int = 14,
    tol: float = 1e-7,
) -> Tensor:
    """Predictions at `query` (B, m, d) of B regressions, each fitted in context from its own prompt (B, n, d), (B, n).

    One network for all of them: heavy ball for least squares (the minimum-norm solution where n < d) and ridge
    (||y - X w||^2 + alpha ||w||^2), proximal Nesterov steps for lasso (||y - X w||^2/(2n) + alpha ||w||_1). Each prompt
    is scaled by two numbers of its own, one for x and one for y; `doublings` is the class of condition numbers, and
    directions worse than 2**-doublings of the best are not resolved. Outside attention: those two numbers (the largest
    eigenvalue of each prompt and its largest label), and early stopping.

    >>> X = torch.eye(2).double().expand(3, 2, 2)
    >>> y = torch.tensor([[1.0, 2.0], [0.0, 1.0], [3.0, -1.0]]).double()
    >>> in_context(X, y, X[:, :1], doublings=1)[:, 0].round(decimals=8)
    tensor([1., 0., 3.], dtype=torch.float64)
    """
    if X.dim() != 3 or y.shape != X.shape[:2] or query.dim() != 3 or query.shape[0] != X.shape[0]:
        shapes = f"{tuple(X.shape)}, {tuple(y.shape)} and {tuple(query.shape)}"
        raise ArgumentError(f"expected prompts (B, n, d), labels (B, n) and queries (B, m, d), got {shapes}")
    if method not in ("least squares", "ridge", "lasso"):
        raise ArgumentError(f"method must be 'least squares', 'ridge' or 'lasso', got {method!r}")
    shipped(X.dtype)
    size = max(1, ENTRIES // (10 * (X.shape[1] + X.shape[2])))
    some = [
        _some(*parts, method, alpha, steps, doublings, tol)
        for parts in zip(X.split(size), y.split(size), query.split(size), strict=True)
    ]
    return torch.cat(some)


def _some(
    X: Tensor, y: Tensor, query: Tensor, method: Method, alpha: float, steps: int, doublings: int, tol: float
) -> Tensor:
    """As many prompts as a cache holds the attention of."""
    dtype, (batch, n, d) = X.dtype, X.shape
    y_scale = (2 * y.abs().amax(1)).clamp_min(1e-30)[:, None, None]
    rows, labels = X, y.unsqueeze(-1) / y_scale
    if method == "ridge":
        extra = (alpha**0.5 * torch.eye(d, dtype=dtype)).expand(batch, d, d)
        rows, labels = torch.cat((rows, extra), 1), torch.cat((labels, labels.new_zeros(batch, d, 1)), 1)
    top = torch.linalg.eigvalsh(rows @ rows.mT if rows.shape[1] < d else rows.mT @ rows)[:, -1].clamp_min(1e-30)
    x_scale = (top * MARGIN).sqrt()[:, None, None]  # curvatures are at most 1/MARGIN of the network's
    kind: Kind = "nesterov" if method == "lasso" else "heavy ball"
    block = frozen("linear", kind, doublings, d, dtype=dtype, shrink=method == "lasso")
    # Rows keep their size for the prediction; the two divisions by x_scale are both in the values.
    at = block.channels
    data = at.data(rows, rows * (step_size(kind, doublings, 1.0) / x_scale**2), labels)
    level = (alpha * n / x_scale**2 / y_scale).expand(batch, 1, d) if method == "lasso" else None
    state, lean = at.state(rows.new_zeros(batch, 1, d), level), Lean(block)
    for t in range(steps):
        following = lean(state, data)
        if t % PATIENCE == PATIENCE - 1:
            moved = (block.weights_of(following) - block.weights_of(state)).abs().amax()
            if moved <= tol * block.weights_of(following).abs().amax():
                state = following
                break
        state = following
    w = block.weights_of(state)
    size = (query.norm(dim=-1, keepdim=True) * w.norm(dim=-1, keepdim=True)).clamp_min(1e-30)
    shrink = torch.exp2(torch.ceil(torch.log2(size)))
    asked = at.data(query / shrink, torch.zeros_like(query), query.new_zeros(*query.shape[:-1], 1))
    return (lean.predict(at.state(w), asked) * shrink * y_scale).squeeze(-1)
