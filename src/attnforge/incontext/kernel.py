"""Kernel regression in context, as an estimator: `kernel_network` is the network, this lays out prompts for it."""

from __future__ import annotations

import math
import numbers
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..certify.rounding import UNIT, gamma
from ..errors import ArgumentError
from ._sklearn import MultiOutputMixin, RegressorMixin
from .audit import Made, quadratic
from .base import InContextEstimator
from .certificate import ConvergenceCertificate, prediction_error
from .kernel_network import METHODS, KernelNetwork, kernel_network
from .problem import U
from .prompt import AFFINE, MARGIN, STOPPING, Array, Scaling, doublings_for, step_size, tensor
from .solver import contraction, run

QUERIES = 256  # queries read at once, so that memory stays linear in the prompt
ENTRIES = 1 << 20
LARGEST_SUM = "the largest of the kernel's row sums, which attention computes and which picks step size and momentum"


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
        condition: float | None = None,
        dtype: str = "float64",
    ):
        self.method, self.gamma, self.alpha = method, gamma, alpha
        self.tol, self.max_iter, self.condition, self.dtype = tol, max_iter, condition, dtype

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = self.method == "mean"  # a kernel mean flattens
        return tags

    def fit(self, X: Any, y: Any) -> KernelRegressor:
        """Lay the data out as a prompt; for ridge, run the dual descent to its end."""
        self._check_common()
        if self.method not in METHODS:
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
        self.rows_, self.values_, self.radius_ = (X - x_mean) / (length * radius), Y / y_scale, radius
        outside = (AFFINE, LARGEST_SUM, STOPPING) if self.method == "ridge" else (AFFINE,)
        scaling = Scaling(x_mean, np.full(X.shape[1], length * radius), np.zeros(1), y_scale, outside=outside)
        dtype = self._torch_dtype()
        if self.method == "mean":
            self.network_, self.scaling_, self.n_iter_ = kernel_network("mean", *self._shape(), 0, dtype), scaling, 1
            self.certificate_ = _one_layer(self.rows_, self.values_, radius, dtype)
            self.prompt_ = self._prompt(self.network_, self.rows_, radius)
            return self
        sums = self._sums(dtype)
        # Entries of the kernel are positive: its largest row sum bounds its eigenvalues.
        high = MARGIN * max(1.0, float(sums.max())) + float(self.alpha)
        bounds = (float(self.alpha) * (1 - 1e-9), high) if self.condition is None else (1.0, self.condition)
        doublings = doublings_for(*bounds)
        step = step_size("heavy ball", doublings, high)
        self.scaling_ = replace(scaling, spectrum=(float(self.alpha), high), doublings=doublings, step=step)
        self.network_ = kernel_network("ridge", *self._shape(), doublings, dtype)
        self._descend(dtype)
        return self

    def _shape(self) -> tuple[int, int]:
        return self.rows_.shape[1], self.values_.shape[1]

    @torch.no_grad()
    def _sums(self, dtype: torch.dtype) -> Array:
        """Row sums of the kernel, read by the network with dual weights 1."""
        network = kernel_network("ridge", self.rows_.shape[1], 1, 1, dtype)
        Z = network.tokens(tensor(self.rows_, dtype), self.radius_)
        Z[..., network.part("a")] = 1.0
        parts = [network.read(Z, slice(i, i + QUERIES)) for i in range(0, len(Z), QUERIES)]
        return torch.cat(parts).double().numpy()

    def _prompt(self, network: KernelNetwork, rows: Array, radius: float) -> Tensor:
        """Data tokens with labels; for ridge with the step size."""
        Z = network.tokens(tensor(rows, network.dtype), radius, step=self.scaling_.step, alpha=float(self.alpha))
        Z[..., network.part("y")] = tensor(self.scaling_.step * self.values_, network.dtype)
        return Z

    def _descend(self, dtype: torch.dtype) -> None:
        Z = self._prompt(self.network_, self.rows_, self.radius_)  # dual weights 0
        rho = contraction("heavy ball", self.scaling_.doublings)
        done = run(_Whole(self.network_), Z, Z, rho=rho, tol=self.tol, max_iter=self.max_iter)
        path = done.path()  # (T + 1, n, K)
        gradients, error, top = _audited(self.rows_, self.radius_, path, self.values_, float(self.alpha))
        made = Made("heavy ball", self.network_.momentum.beta, self.scaling_.step, self.dtype, "kernel ridge")
        curvature = (float(self.alpha) * (1 - 8 * U), top)
        found = [
            quadratic(path[..., [k]], gradients[..., [k]], error[..., [k]], curvature, made)
            for k in range(path.shape[2])
        ]
        self.certificate_ = max(found, key=lambda certificate: certificate.bound)
        self.n_iter_, self.prompt_ = done.steps, done.state
        self.trajectory_, self._path = path * self.scaling_.y_scale, path
        self.dual_coef_ = self.trajectory_[-1]
        self.values_ = path[-1]
        self._warn(done.converged)

    @torch.no_grad()
    def predict(self, X: Any) -> Array:
        """Kernel sums or means at new rows: queries that attend to the prompt."""
        new = self._new_rows(X)
        new = self.scaling_.scaled(new)
        network, rows, radius, dtype = self.network_, self.rows_, self.radius_, self.network_.dtype
        far = np.linalg.norm(new, axis=1)
        if self.method == "ridge" and (far > 1).any():
            # Norms are read for |x| <= 1: a larger radius goes into the prompt. Where the kernel is 0 in every digit a
            # query may move inward as long as it stays 0.
            dead = 1 + 40 / radius
            new = new * np.minimum(1.0, dead / np.maximum(far, 1e-300))[:, None]
            factor = 2.0 ** math.ceil(math.log2(min(float(far.max()), dead)))
            new, rows, radius = new / factor, rows / factor, radius * factor
        prompt = network.tokens(tensor(rows, dtype), radius)
        prompt[..., network.part("a" if self.method == "ridge" else "y")] = tensor(self.values_, dtype)
        count, parts = len(rows), []
        for part in tensor(new, dtype).split(QUERIES):
            Z = torch.cat((prompt, network.tokens(part, radius, data=False)))
            parts.append(network.read(Z, slice(count, len(Z))))
        out = torch.cat(parts).double().numpy() * self.scaling_.y_scale
        return out[:, 0] if self.single_ else out


class _Whole:
    """A kernel network as `run` wants it: the sequence itself is the state."""

    def __init__(self, network: KernelNetwork):
        self.network = network

    @property
    def dtype(self) -> torch.dtype:
        return self.network.dtype

    def weights_of(self, state: Tensor) -> Tensor:
        return self.network.weights_of(state)

    def __call__(self, state: Tensor, data: Tensor, penalties: Tensor | None) -> Tensor:
        return self.network(state)  # type: ignore[no-any-return]


def _audited(rows: Array, radius: float, path: Array, labels: Array, alpha: float) -> tuple[Array, Array, float]:
    """Gradients K a + alpha a - y along a path (T + 1, n, K), a bound of their entries' errors, and of the curvature.

    All in chunks, without attention. Rows are off the exact ones by 4 u |x|, and so is what is under the exponential.
    """
    n, d = rows.shape
    flat, most, size = path.transpose(1, 0, 2).reshape(n, -1), np.abs(path).max(axis=0), np.linalg.norm(rows, axis=1)
    out, error, sums = np.empty_like(flat), np.empty_like(most), np.empty(n)
    for i in range(0, n, max(1, ENTRIES // (n * d))):
        part = slice(i, i + max(1, ENTRIES // (n * d)))
        squares = ((rows[part, None] - rows) ** 2).sum(axis=-1)
        kernel = np.exp(-0.5 * radius**2 * squares)
        off = radius**2 * (5 * U * np.sqrt(squares) * (size[part, None] + size) + float(gamma(d + 8, U)) * squares)
        wrong = 1.01 * kernel * np.expm1(off + 6 * U)
        out[part] = kernel @ flat
        error[part] = wrong @ most + float(gamma(n + 2, U)) * (kernel @ most)
        sums[part] = (kernel + wrong).sum(axis=1)
    gradients = out.reshape(n, len(path), -1).transpose(1, 0, 2) + alpha * path - labels
    error = 1.001 * error + 8 * U * (alpha * most + np.abs(labels) + most * sums[:, None])
    return gradients, error, float(sums.max()) * (1 + (n + 4) * U) + alpha


def _one_layer(rows: Array, values: Array, radius: float, dtype: torch.dtype) -> ConvergenceCertificate:
    """Nadaraya-Watson has no steps: the error of its one head, for queries within the radius of the data (A5, R5).

    Logits are off by the norm's read, by the rounding of the inner product and by that of the prompt.
    """
    (n, d), u = rows.shape, UNIT[dtype]
    off = radius**2 * (prediction_error(1.0, d, 1.0, dtype) + 4 * (d + 8) * u) + 4 * u
    spread = float((values.max(axis=0) - values.min(axis=0)).max(initial=0.0))
    error = 0.5 * math.expm1(2 * off) * spread + (2 * n + 16) * u * float(np.abs(values).max(initial=0.0))
    return ConvergenceCertificate(
        kind="certified", rho=0.0, depth=1, distance=spread, step_error=error, growth=1.0, amplification=1.0,
        residual=0.0, measured=0.0, posterior=error, curvature=(1.0, 1.0), dtype=str(dtype).removeprefix("torch."),
        loss="kernel mean",
    )  # fmt: skip
