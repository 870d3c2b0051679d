"""Learning in context, as the papers state it: gradient steps (v1 4.1, v2 appendix B), heads that come in the prompt.

F5  *paper form*: f(w.x_i - y_i) x_i by one softmax for each i over its own p keys. With anchors L_k, x~ = (x, y) and
    w~ = (w, -1) the keys are beta (2 L_k x~_i, -L_k^2), the query is (w~, 1), the values f(L_k) x_i. The logits are
    those of an anchor head at t = w.x_i - y_i (A1), so for an f with Lipschitz constant Lip on [lo, hi] and
    kappa = beta Delta^2 >= 1 each sample errs by at most (Lip Delta/2 + 1.12 e^-kappa spread(f)) |x_i| in real
    arithmetic (A2).
F1-F3  *efficient form*: the state reads and aggregates; see `attnforge.incontext`.
F6  *a head that comes in the prompt* (2508.17550): the rows of W_Q, W_K, W_V are tokens, hot heads (C2) form the inner
    products W x, and one attention layer applies them.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ArgumentError, closest
from ..heads.anchor import AnchorHead
from ..incontext.blocks import Block, Gather, Loss, Momentum
from ..incontext.dense import dense_step
from ..incontext.extrapolation import shipped
from ..incontext.reads import READS, LinearRead
from ..ir import functions

DENSE = ("linear", "logistic", "poisson")


class PaperStep(nn.Module):
    """`step(w, X, y)`: f(w.x_i - y_i) x_i for each i, shape (n, d), by one softmax a sample over its own anchors (F5).

    `bound` is what an entry of the result can be off, divided by max |x_i|, in real arithmetic and for
    lo <= w.x_i - y_i <= hi.
    """

    def __init__(self, f: str, lo: float, hi: float, anchors: int, kappa: float, dtype: torch.dtype):
        super().__init__()
        function = functions.get(f)
        functions.check_domain(function, lo, hi)
        L = torch.linspace(lo, hi, anchors, dtype=torch.float64)
        gap = (hi - lo) / (anchors - 1)
        beta = kappa / gap**2
        self.lo, self.hi, self.kappa, self.name = lo, hi, kappa, function.name
        self.slopes = nn.Parameter((2 * beta * L).to(dtype))
        self.offsets = nn.Parameter((-beta * L * L).to(dtype))
        self.values = nn.Parameter(function.value(L).to(dtype))
        low, high = functions.enclose(function, np.array([lo]), np.array([hi]))
        self.spread = float(high[0] - low[0])
        self.gap = gap

    def bound(self, lipschitz: float) -> float:
        """The error of one sample over max |x_i|, for an f with this Lipschitz constant on [lo, hi]."""
        if not lipschitz >= 0:
            raise ArgumentError(f"a Lipschitz constant is a number >= 0, got {lipschitz!r}")
        return lipschitz * self.gap / 2 + 1.12 * math.exp(-self.kappa) * self.spread

    def weights(self, w: Tensor, X: Tensor, y: Tensor) -> Tensor:
        """The attention weights of every sample over its own anchors, (n, p)."""
        samples = torch.cat((X, y.unsqueeze(-1)), dim=-1)  # x~_i
        ones = torch.ones_like(samples[..., :1, None]).expand(*samples.shape[:-1], len(self.slopes), 1)
        keys = torch.cat((samples.unsqueeze(-2) * self.slopes.unsqueeze(-1), ones * self.offsets.unsqueeze(-1)), dim=-1)
        query = torch.cat((w, w.new_tensor([-1.0, 1.0])))
        return (keys @ query).softmax(-1)

    def forward(self, w: Tensor, X: Tensor, y: Tensor) -> Tensor:
        values = X.unsqueeze(-2) * self.values.unsqueeze(-1)  # (n, p, d): f(L_k) x_i
        return (self.weights(w, X, y).unsqueeze(-2) @ values).squeeze(-2)


class AnchoredStep(nn.Module):
    """`step(w, X, y)`: sum_i f(w.x_i - y_i) x_i for a general C^1 loss, by hot, anchor and aggregation heads (F3).

    w.x_i is read for |w.x_i| <= 1 and f must have values in [-1, 1] to keep the accuracy of the aggregation.
    """

    def __init__(self, f: str, lo: float, hi: float, anchors: int, dtype: torch.dtype):
        super().__init__()
        self.read, self.gather = LinearRead(dtype), Gather(dtype)
        self.head = AnchorHead.fit(f, lo, hi, anchors=anchors, dtype=dtype)

    def forward(self, w: Tensor, X: Tensor, y: Tensor) -> Tensor:
        r = self.read(w.unsqueeze(-2), X) - y.unsqueeze(-1)
        return self.gather(self.head.core(r), X).squeeze(-2)


class GradientDescent(nn.Module):
    """`descend(state, tokens)`: one frozen block applied `steps` times; the layout is that of `incontext.Block`."""

    def __init__(self, block: Block, steps: int):
        super().__init__()
        self.block, self.steps = block, steps

    def forward(self, state: Tensor, tokens: Tensor) -> Tensor:
        for _ in range(self.steps):
            state = self.block(state, tokens)
        return state


class EmulatedHead(nn.Module):
    """`head(X, W_Q, W_K, W_V)`: softmax(X W_Q^T (X W_K^T)^T) X W_V^T with weights that come in the prompt (F6).

    Entries of the projections up to `reach` are formed to the accuracy of C2. The module has no weights of its own but
    the hot heads' tables.
    """

    def __init__(self, reach: float, dtype: torch.dtype):
        super().__init__()
        self.read, self.reach = LinearRead(dtype), reach

    def project(self, X: Tensor, W: Tensor) -> Tensor:
        """X W^T by attention: tokens read the rows of W as keys."""
        return self.read(W / self.reach, X) * self.reach

    def forward(self, X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor) -> Tensor:
        q, k, v = (self.project(X, W) for W in (W_Q, W_K, W_V))
        return (q @ k.transpose(-2, -1)).softmax(-1) @ v


def gradient_step(
    loss: str,
    d: int,
    n: int | None = None,
    form: Literal["paper", "efficient"] = "efficient",
    *,
    interval: tuple[float, float] = (-2.0, 2.0),
    anchors: int = 64,
    kappa: float = 2.0,
    dtype: torch.dtype = torch.float64,
) -> nn.Module:
    """One gradient step in context, in the paper's form (F5) or the efficient one (F1 to F3).

    `form="paper"`: `loss` names the derivative f, a function of `attnforge.ir.functions` ("tanh", ...), and the module
    maps (w, X, y) to all f(w.x_i - y_i) x_i. `form="efficient"`: for "linear", "logistic" and "poisson" two ordinary
    attention layers on a sequence (`incontext.dense.Channels` lays it out); for any other name the derivative f goes
    through an anchor head and the module maps (w, X, y) to the sum over i. No form depends on n, the number of samples.

    >>> step = gradient_step("tanh", 2, form="paper")
    >>> w, X, y = torch.tensor([0.5, 0.25]).double(), torch.eye(2).double(), torch.zeros(2).double()
    >>> bool((step(w, X, y) - torch.tanh(X @ w)[:, None] * X).abs().max() <= step.bound(1.0))
    True
    """
    if type(d) is not int or d < 1:
        raise ArgumentError(f"d, the number of columns, must be a whole number >= 1, got {d!r}")
    if n is not None and (type(n) is not int or n < 1):
        raise ArgumentError(f"n, the number of samples, must be a whole number >= 1 or None, got {n!r}")
    if form not in ("paper", "efficient"):
        raise ArgumentError(f"form must be 'paper' or 'efficient', got {form!r}")
    lo, hi = map(float, interval)
    if not (lo < hi and type(anchors) is int and anchors >= 2 and kappa >= 1):
        raise ArgumentError(
            f"needs lo < hi, at least 2 anchors and kappa >= 1, got {interval}, {anchors!r} and {kappa!r}"
        )
    if form == "paper":
        return PaperStep(loss, lo, hi, anchors, float(kappa), shipped(dtype))
    if loss in DENSE:
        return dense_step(loss, d, 1, Momentum("plain"), shipped(dtype))  # type: ignore[arg-type]
    return AnchoredStep(loss, lo, hi, anchors, shipped(dtype))


def gradient_descent(
    loss: Loss, steps: int, accelerated: bool = True, *, condition: float = 64.0, dtype: torch.dtype = torch.float64
) -> GradientDescent:
    """Gradient descent in context: one frozen block, applied `steps` times.

    Accelerated: the heavy ball for the linear loss, Nesterov's scheme for the others, with the best constants for
    condition numbers up to `condition`. The step size is part of the prompt.
    """
    if loss not in READS:
        raise ArgumentError(f"unknown loss {loss!r}{closest(str(loss), READS)}; known: {', '.join(READS)}")
    if type(steps) is not int or steps < 1:
        raise ArgumentError(f"steps must be a whole number >= 1, got {steps!r}")
    kind: Literal["plain", "heavy ball", "nesterov"] = "heavy ball" if loss == "linear" else "nesterov"
    momentum = Momentum.optimal(kind, condition) if accelerated else Momentum("plain")
    return GradientDescent(Block(loss, momentum, shipped(dtype)), steps)


def emulate_head(reach: float = 8.0, dtype: torch.dtype = torch.float64) -> EmulatedHead:
    """A frozen module that reproduces any attention head whose weights come in the prompt (2508.17550).

    >>> generator = torch.Generator().manual_seed(0)
    >>> X, W = (torch.randn(s, generator=generator).double() for s in ((5, 4), (3, 3, 4)))
    >>> exact = (X @ W[0].mT @ (X @ W[1].mT).mT).softmax(-1) @ X @ W[2].mT
    >>> bool((emulate_head(16.0)(X, *W) - exact).abs().max() < 1e-11)
    True
    """
    if not 0 < reach < math.inf:
        raise ArgumentError(f"reach must be a positive number, got {reach!r}")
    return EmulatedHead(float(reach), shipped(dtype))
