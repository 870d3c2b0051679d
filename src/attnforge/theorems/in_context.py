"""Learning in context, as the papers state it: gradient steps (v1 4.1, v2 appendix B), heads that come in the prompt.

F5  *paper form*: f(w.x_i - y_i) x_i by one softmax for each i over its own p keys. With anchors L_k, x~ = (x, y) and
    w~ = (w, -1) the keys are beta (2 L_k x~_i, -L_k^2), the query is (w~, 1), the values f(L_k) x_i. The logits are
    those of an anchor head at t = w.x_i - y_i (A1), so A2 bounds the error in real arithmetic and A5 that of rounding.
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

from ..arguments import is_number, is_whole
from ..certificates.rounding import exp_ulps, gamma, unit
from ..errors import ArgumentError, closest
from ..functions import registry as functions
from ..heads.anchor.head import AnchorHead
from ..incontext.blocks import Block, Kind, LinearRead, Momentum
from ..incontext.extrapolation import built, prediction_error
from ..incontext.losses import SIMPLE, Loss, named

MOST_ANCHORS = 96  # of a derivative's head: its fit is direct up to here, and rounding is what is left of its error


class PaperStep(nn.Module):
    """`step(w, X, y)`: f(w.x_i - y_i) x_i for each i, shape (n, d), by one softmax a sample over its own anchors (F5).

    `bound` is what an entry of the result can be off, divided by max |x_i|, for lo <= w.x_i - y_i <= hi.
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

    def bound(self, lipschitz: float, absolute: float, d: int) -> float:
        """The error of one sample over max_j |x_ij|, rounding included, for an f with this Lipschitz constant.

        `absolute` bounds sum_j |w_j x_ij| + |y_i| and d is the number of columns: they decide what rounding does to the
        logits (F5).
        """
        if not lipschitz >= 0 or not absolute >= 0:
            raise ArgumentError(f"needs numbers >= 0, got {lipschitz!r} and {absolute!r}")
        u, top = unit(self.values.dtype), max(abs(self.lo), abs(self.hi))
        beta, largest = self.kappa / self.gap**2, float(self.values.detach().double().abs().max())
        real = lipschitz * self.gap / 2 + 1.12 * math.exp(-self.kappa) * self.spread
        reach = 2 * beta * top * absolute + beta * top * top  # of a logit, all its terms taken positive
        off = float(gamma(d + 6, u)) * reach + 2 * u * reach + exp_ulps() * u
        moved = 0.5 * math.expm1(2 * off) * self.spread if off < 300 else math.inf
        rounding = min(moved, self.spread) + float(gamma(2 * len(self.values) + 12, u)) * largest
        return 1.0000001 * (real + rounding)

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


class GradientDescent(nn.Module):
    """`descend(Z)`: one frozen block applied `steps` times to a sequence of tokens (`incontext.blocks.Channels`).

    `sequence(w, X, y, step)` lays out a prompt; the block is built for as many columns as the first prompt has.
    """

    def __init__(self, loss: Loss, momentum: Momentum, steps: int, dtype: torch.dtype):
        super().__init__()
        self.loss, self.momentum, self.steps, self.dtype = loss, momentum, steps, dtype
        self.block: Block | None = None

    def sequence(self, w: Tensor, X: Tensor, y: Tensor, step: float) -> Tensor:
        """State w (d,) or (1, d), data X (n, d) and labels y (n,); the step size becomes part of the prompt."""
        if self.block is None:
            self.block = Block(self.loss, X.shape[-1], self.momentum, dtype=self.dtype).requires_grad_(False)
        at = self.block.channels
        if at.d != X.shape[-1]:
            raise ArgumentError(f"this network was built for {at.d} columns, got {X.shape[-1]}: build another one")
        return at.sequence(at.state(w.reshape(1, -1)), at.data(X, X * (step / len(X)), y.unsqueeze(-1)))

    def weights_of(self, Z: Tensor) -> Tensor:
        """The weights that a sequence carries, (d,)."""
        return self._built().weights_of(Z)[0]

    def _built(self) -> Block:
        if self.block is None:
            raise ArgumentError("the network learns the number of columns from its first prompt: call sequence() first")
        return self.block

    def forward(self, Z: Tensor) -> Tensor:
        block = self._built()
        for _ in range(self.steps):
            Z = block(Z)
        return Z


class EmulatedHead(nn.Module):
    """`head(X, W_Q, W_K, W_V)`: softmax(X W_Q^T (X W_K^T)^T) X W_V^T with weights that come in the prompt (F6).

    Entries of the projections up to `reach` are formed to the accuracy of C2. The module has no weights of its own but
    the hot heads' tables. `bound` is lemma F6.
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

    @torch.no_grad()
    def bound(self, X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor) -> float:
        """What an entry of the output can be off the exact head of these weights, rounding included (F6)."""
        dtype = self.read.values.dtype
        u, (n, d) = unit(dtype), X.shape[-2:]
        exact, errors = [], []
        for W in (W_Q, W_K, W_V):
            exact.append(X.double() @ W.double().mT)
            absolute = float((X.double().abs() @ W.double().abs().mT).max()) * (1 + 1e-9)
            largest = float(exact[-1].abs().max()) * (1 + 1e-9)
            if largest > self.reach:
                raise ArgumentError(f"a projection reaches {largest:.3g}, beyond the head's reach {self.reach:g}")
            relative = prediction_error(largest / self.reach, d, absolute / self.reach, dtype)
            errors.append(self.reach * relative + 4 * u * largest)
        (q, k, v), (e_q, e_k, e_v) = exact, errors
        size_q, size_k = (float(t.abs().sum(-1).max()) * (1 + 1e-9) for t in (q, k))
        width = q.shape[-1]
        cross = float((q.abs() @ k.abs().mT).max()) * (1 + 1e-9)
        logits = e_q * size_k + e_k * size_q + width * e_q * e_k
        logits += (float(gamma(width, u)) + 2 * u) * (cross + logits) + exp_ulps() * u
        spread = float((v.amax(-2) - v.amin(-2)).max()) + 2 * e_v
        moved = min(spread, 0.5 * math.expm1(min(2 * logits, 600.0)) * spread)
        return 1.0000001 * (moved + e_v + float(gamma(2 * n + 8, u)) * (float(v.abs().max()) + e_v))


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

    `form="paper"`: `loss` names the derivative f, a function of `attnforge.functions.registry` ("tanh", ...), and the
    module maps (w, X, y) to all f(w.x_i - y_i) x_i. `form="efficient"`: attention layers on a sequence of tokens, an
    `incontext.Block` (`block.channels` lays it out), for "linear", "logistic", "poisson" and "huber"; for any other
    name the derivative f goes through an anchor head on `interval`. No form depends on n, the number of samples.

    >>> step = gradient_step("tanh", 2, form="paper")
    >>> w, X, y = torch.tensor([0.5, 0.25]).double(), torch.eye(2).double(), torch.zeros(2).double()
    >>> bool((step(w, X, y) - torch.tanh(X @ w)[:, None] * X).abs().max() <= step.bound(1.0, 0.5, 2))
    True
    """
    if not is_whole(d, 1):
        raise ArgumentError(f"d, the number of columns, must be a whole number >= 1, got {d!r}")
    if n is not None and not is_whole(n, 1):
        raise ArgumentError(f"n, the number of samples, must be a whole number >= 1 or None, got {n!r}")
    if form not in ("paper", "efficient"):
        raise ArgumentError(f"form must be 'paper' or 'efficient', got {form!r}")
    lo, hi = map(float, interval)
    if not (lo < hi and is_whole(anchors, 2) and kappa >= 1):
        raise ArgumentError(
            f"needs lo < hi, at least 2 anchors and kappa >= 1, got {interval}, {anchors!r} and {kappa!r}"
        )
    if form == "paper":
        return PaperStep(loss, lo, hi, anchors, float(kappa), built(dtype))
    if loss in SIMPLE:
        return Block(loss, d, Momentum("plain"), dtype=dtype)
    head = AnchorHead.fit(loss, lo, hi, anchors=min(anchors, MOST_ANCHORS), dtype=built(dtype))
    return Block("anchors", d, Momentum("plain"), dtype=dtype, derivative=head)


def gradient_descent(
    loss: str, steps: int, accelerated: bool = True, *, condition: float = 64.0, dtype: torch.dtype = torch.float64
) -> GradientDescent:
    """Gradient descent in context: one frozen block, applied `steps` times.

    Accelerated: the heavy ball for the linear loss, Nesterov's scheme for the others, with the best constants for
    condition numbers up to `condition`. The step size is part of the prompt.

    >>> descent = gradient_descent("linear", 40, condition=2.0)
    >>> X, y = torch.eye(2).double(), torch.tensor([0.5, -0.25]).double()
    >>> Z = descent.sequence(torch.zeros(2).double(), X, y, step=2.0)
    >>> descent.weights_of(descent(Z)).detach().round(decimals=6)
    tensor([ 0.5000, -0.2500], dtype=torch.float64)
    """
    if loss not in SIMPLE:
        raise ArgumentError(f"unknown loss {loss!r}{closest(str(loss), SIMPLE)}; known: {', '.join(SIMPLE)}")
    if not is_whole(steps, 1):
        raise ArgumentError(f"steps must be a whole number >= 1, got {steps!r}")
    own = named(loss)
    kind: Kind = "heavy ball" if own.quadratic else "nesterov"
    momentum = Momentum.optimal(kind, condition) if accelerated else Momentum("plain")
    return GradientDescent(own, momentum, steps, built(dtype))


def emulate_head(reach: float = 8.0, dtype: torch.dtype = torch.float64) -> EmulatedHead:
    """A frozen module that reproduces any attention head whose weights come in the prompt (2508.17550).

    >>> generator = torch.Generator().manual_seed(0)
    >>> X, W = (torch.randn(s, generator=generator).double() for s in ((5, 4), (3, 3, 4)))
    >>> exact = (X @ W[0].mT @ (X @ W[1].mT).mT).softmax(-1) @ X @ W[2].mT
    >>> head = emulate_head(16.0)
    >>> bool((head(X, *W) - exact).abs().max() <= head.bound(X, *W) < 1e-8)
    True
    """
    if not is_number(reach) or not reach > 0:
        raise ArgumentError(f"reach must be a positive number, got {reach!r}")
    return EmulatedHead(float(reach), built(dtype))
