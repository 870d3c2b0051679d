"""Kernel regression in context: Nadaraya-Watson is attention itself; kernel ridge is gradient descent on dual weights.

The Gaussian kernel exp(-gamma |x - x_i|^2) is a softmax logit 2 gamma x.x_i - gamma |x_i|^2 - gamma |x|^2, bilinear
but for the squared norms. `Norms`, a layer of self heads whose query and key are both x, writes |x|^2 into a channel by
hot pairs (C2). Then

    Nadaraya-Watson   one head, values y_i: the norm of the query drops out of the softmax
    kernel ridge      one head with a sink of logit log M: M times its weights are the kernel itself, up to 1/M; its
                      values are the dual weights a_i, so that every token reads sum_j k(x_i, x_j) a_j and takes the
                      step a_i <- a_i + beta (a_i - a_i') - s (sum_j k(x_i, x_j) a_j + alpha a_i - y_i).
"""

from __future__ import annotations

import functools
import math
import numbers
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ._sklearn import MultiOutputMixin, RegressorMixin
from .base import InContextEstimator
from .blocks import Momentum
from .certificate import ConvergenceCertificate, factors
from .extrapolation import LOG_SINK, pairs, shipped
from .prompt import MARGIN, Array, Scaling, doublings_for, step_size
from .reads import against_sink
from .solver import run

CHUNK = 256  # queries read at once, so that memory stays linear in the prompt


class Norms(nn.Module):
    """|x|^2 of each token, for |x| <= 1, by self heads whose query and key are x: logits s_j x.x against a sink."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        table = pairs(shipped(dtype))
        self.scales = nn.Parameter(torch.tensor(table.scales, dtype=dtype).unsqueeze(-1))
        self.values = nn.Parameter(2 * torch.tensor(table.weights, dtype=dtype).unsqueeze(-1))
        self.register_buffer("sink", torch.zeros((), dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        keys = x.unsqueeze(-2) * self.scales  # (..., n, head, d)
        weights = against_sink((keys @ x.unsqueeze(-1)).squeeze(-1), cast(Tensor, self.sink))
        return (weights[0] - weights[1]) @ self.values  # (..., n, 1)


class KernelBlock(nn.Module):
    """Queries read a kernel sum over the data tokens; with dual weights in the state it is also one step of descent.

    `read(x, rows, values)`: the kernel sum (method "ridge") or the kernel mean (method "mean") of `values` at x.
    `forward(state, tokens)`: one step; state (n, 2K) holds dual weights and their predecessors, tokens (n, d + K)
    hold sqrt(2 gamma) x and the labels. Rows are in units in which |x| <= `radius`.
    """

    def __init__(self, method: str, alpha: float, step: float, momentum: Momentum, radius: float, dtype: torch.dtype):
        super().__init__()
        self.method, self.momentum, self.step, self.alpha, self.radius = method, momentum, step, alpha, radius
        self.norms = Norms(dtype)
        self.own = nn.Parameter(torch.tensor(-0.5 * radius * radius, dtype=dtype))
        self.inner = nn.Parameter(torch.tensor(radius * radius, dtype=dtype))
        self.register_buffer("sink", torch.tensor([LOG_SINK[dtype]], dtype=dtype))
        self.mass = nn.Parameter(torch.tensor(math.exp(LOG_SINK[dtype]), dtype=dtype))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.own.dtype

    def read(self, x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
        """One kernel sum, or mean, for each row of x."""
        logits = x @ (self.inner * rows).transpose(-2, -1) + (self.own * self.norms(rows)).transpose(-2, -1)
        if self.method == "mean":
            return logits.softmax(-1) @ values
        logits = logits + self.own * self.norms(x)
        sink = cast(Tensor, self.sink).expand(*logits.shape[:-1], 1)
        return (torch.cat((logits, sink), dim=-1).softmax(-1)[..., :-1] @ values) * self.mass

    def weights_of(self, state: Tensor) -> Tensor:
        """The dual weights of a state."""
        return state[..., : state.shape[-1] // 2]

    def forward(self, state: Tensor, tokens: Tensor, penalties: Tensor | None = None) -> Tensor:
        width = state.shape[-1] // 2
        a, before = state[..., :width], state[..., width:]
        rows, labels = tokens[..., :-width], tokens[..., -width:]
        g = self.read(rows, rows, a) + self.alpha * a - labels
        beta = self.momentum.beta
        return torch.cat(((1 + beta) * a - beta * before - self.step * g, a), dim=-1)

    def example_input(self) -> tuple[Tensor, Tensor]:
        """An input of the right form, for `purity`."""
        generator = torch.Generator().manual_seed(0)
        return tuple(0.1 * torch.rand(s, generator=generator).to(self.dtype) for s in ((5, 2), (5, 3)))  # type: ignore[return-value]


@functools.lru_cache(maxsize=64)
def kernel_block(
    method: str, alpha: float, top: int, radius: float, dtype: torch.dtype
) -> tuple[KernelBlock, int]:
    """The block for kernel matrices with eigenvalues up to 2**top, and its class of condition numbers."""
    high = 2.0**top + alpha
    doublings = doublings_for(max(alpha, 1e-300), MARGIN * high)
    momentum = Momentum.optimal("heavy ball", 2.0**doublings)
    step = step_size("heavy ball", doublings, MARGIN * high)
    return KernelBlock(method, alpha, step, momentum, radius, dtype).eval().requires_grad_(False), doublings


class KernelRegressor(MultiOutputMixin, RegressorMixin, InContextEstimator):  # type: ignore[misc]
    """Regression with a Gaussian kernel: `method="mean"` is Nadaraya-Watson, `method="ridge"` kernel ridge regression.

    >>> X, y = np.linspace(0, 3, 20)[:, None], np.sin(np.linspace(0, 3, 20))
    >>> ridge = KernelRegressor(gamma=1.0, alpha=0.01).fit(X, y)
    >>> bool(abs(ridge.predict([[1.5]])[0] - 1.0) < 0.01)
    True

    `gamma` defaults to one over the number of columns. The data stay in the prompt: a fit of the mean has no weights.
    """

    def __init__(
        self,
        *,
        method: str = "ridge",
        gamma: float | None = None,
        alpha: float = 1.0,
        tol: float = 1e-12,
        max_iter: int = 20_000,
        dtype: str = "float64",
    ):
        self.method, self.gamma, self.alpha = method, gamma, alpha
        self.tol, self.max_iter, self.dtype = tol, max_iter, dtype

    condition = None  # the penalty alone bounds the spectrum from below

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = self.method == "mean"  # a kernel mean flattens
        return tags

    def fit(self, X: Any, y: Any) -> KernelRegressor:
        """Lay the data out as a prompt; for ridge, run the dual descent to its end."""
        self._check_common()
        if self.method not in ("ridge", "mean"):
            raise ArgumentError(f"method must be 'ridge' or 'mean', got {self.method!r}")
        for name, value in (("gamma", 1.0 if self.gamma is None else self.gamma), ("alpha", self.alpha)):
            if not isinstance(value, numbers.Real) or not 0 < float(value) < np.inf:
                raise ArgumentError(f"{name} must be a positive number, got {value!r}")
        X, y, _ = self._checked(X, y, multi_output=True, y_numeric=True)
        Y = np.asarray(y, dtype=np.float64).reshape(len(X), -1)
        x_mean = X.mean(axis=0)
        gamma = 1 / X.shape[1] if self.gamma is None else float(self.gamma)
        length = 1 / math.sqrt(2 * gamma)
        reach = float(np.linalg.norm((X - x_mean) / length, axis=1).max(initial=0.0))
        radius = 2.0 ** max(0, math.ceil(math.log2(max(reach, 1e-300))))
        y_scale = float(np.abs(Y).max(initial=0.0)) or 1.0
        self.single_ = np.ndim(y) == 1
        self.rows_ = (X - x_mean) / (length * radius)
        scaling = Scaling(x_mean, np.full(X.shape[1], length * radius), np.zeros(1), y_scale)
        dtype, self.n_iter_ = self._torch_dtype(), 1
        # The trace bounds the largest eigenvalue: n. Row sums do better, and cost one read.
        sums = _exact_sums(self.rows_, radius) if self.method == "ridge" else np.ones(1)
        top = math.ceil(math.log2(max(1.0, float(sums.max()))) - 1e-9)
        self.network_, doublings = kernel_block(self.method, float(self.alpha), top, radius, dtype)
        self.scaling_ = replace(scaling, spectrum=(float(self.alpha), 2.0**top + float(self.alpha)),
                                doublings=doublings, step=self.network_.step)  # fmt: skip
        self.values_ = Y / y_scale
        if self.method == "ridge":
            self._descend(dtype)
        return self

    def _descend(self, dtype: torch.dtype) -> None:
        tokens = torch.from_numpy(np.concatenate((self.rows_, self.values_), axis=1)).to(dtype)
        state = torch.zeros(len(tokens), 2 * self.values_.shape[1], dtype=dtype)
        root = 2.0 ** (self.scaling_.doublings / 2)
        rho = (root - 1) / (root + 1)
        done = run(self.network_, state, tokens, rho=rho, tol=self.tol, max_iter=self.max_iter)
        dual = done.path()[-1]
        exact = _exact_sums(self.rows_, self.network_.radius, dual)
        with torch.no_grad():
            keys = tokens[:, : self.rows_.shape[1]]
            inexact = self.network_.read(keys, keys, torch.from_numpy(dual).to(dtype)).double().numpy()
        g = exact + float(self.alpha) * dual - self.values_
        growth, amplification = factors("heavy ball", rho, done.steps)
        low, high = self.scaling_.spectrum
        left = float(np.linalg.norm(g, axis=0).max())
        self.certificate_ = ConvergenceCertificate(
            kind="calibrated",
            rho=rho,
            depth=done.steps,
            distance=float(np.linalg.norm(self.values_, axis=0).max()) / low,
            step_error=self.network_.step * float(np.linalg.norm(inexact - exact, axis=0).max()),
            growth=growth,
            amplification=amplification,
            measured=left / high,
            posterior=left / low,
            dtype=str(dtype).removeprefix("torch."),
            loss="kernel ridge",
        )
        self.n_iter_, self.dual_coef_ = done.steps, dual * self.scaling_.y_scale
        self.trajectory_ = done.path() * self.scaling_.y_scale
        self.values_ = dual
        self._warn(done.converged)

    @torch.no_grad()
    def predict(self, X: Any) -> Array:
        """Kernel sums or means at new rows: queries that attend to the prompt."""
        new = self._new_rows(X)
        new = self.scaling_.scaled(new)
        dtype, block, rows = self.network_.dtype, self.network_, self.rows_
        far = np.linalg.norm(new, axis=1)
        if self.method == "ridge" and (far > 1).any():
            # Norms are read for |x| <= 1: take the network of a larger radius. Where the kernel is 0 in every digit a
            # query may move inward as long as it stays 0.
            dead = 1 + 40 / block.radius
            new = new * np.minimum(1.0, dead / np.maximum(far, 1e-300))[:, None]
            factor = 2.0 ** math.ceil(math.log2(min(float(far.max()), dead)))
            top = round(math.log2(self.scaling_.spectrum[1] - float(self.alpha)))
            block = kernel_block(self.method, float(self.alpha), top, block.radius * factor, dtype)[0]
            new, rows = new / factor, rows / factor
        keys, values = torch.from_numpy(rows).to(dtype), torch.from_numpy(self.values_).to(dtype)
        parts = [block.read(part, keys, values) for part in torch.from_numpy(new).to(dtype).split(CHUNK)]
        out = torch.cat(parts).double().numpy() * self.scaling_.y_scale
        return out[:, 0] if self.single_ else out


def _exact_sums(rows: Array, radius: float, values: Array | None = None) -> Array:
    """Kernel sums without attention, in chunks; without values the row sums, which bound the kernel's eigenvalues."""
    norms, sums = np.einsum("ij,ij->i", rows, rows), []
    for part in np.split(rows, range(CHUNK, len(rows), CHUNK)):
        squares = np.einsum("ij,ij->i", part, part)[:, None] + norms - 2 * part @ rows.T
        kernel = np.exp(-0.5 * radius**2 * np.maximum(squares, 0))
        sums.append(kernel.sum(axis=1) if values is None else kernel @ values)
    return np.concatenate(sums)
