"""Kernel regression as attention layers: Nadaraya-Watson is attention itself, kernel ridge descends on dual weights.

The Gaussian kernel exp(-R^2 |x - x'|^2 / 2) is a softmax logit, bilinear but for the squared norms. Tokens carry

    x d (|x| <= 1) | X d = R^2 x | size = R^2 | log s | log(alpha s) | y K | data | one | norm | a K | b K

    layer 1   self heads whose query and key are both x write norm = -R^2 |x|^2 / 2, by hot pairs (C2)
    layer 2   mean: one head over the data, logits X.x' + norm', values y; it is written into a
              ridge: one head with a sink of logit log M: M times its weights are s k(x, x'), up to s n/M; its values
              are the dual weights a, and one self head adds s alpha a:
                  a <- a + beta (a - b) - s (sum_j k(x, x_j) a_j + alpha a - y),   b <- a,   y is stored as s y

Queries are tokens that must not be seen as keys. Their `data` is 0 or less: 1 - data times OMEGA is what the mask takes
off their logits, and that it is enough follows from the reach of data and queries (`mask`), so it is in the prompt. The
radius R, the step size s and alpha are in the prompt too; the weights know d, K, the momentum and the dtype. The
estimator lays out prompts for `kernel_network`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..arguments import is_number
from ..dtypes import Array
from ..errors import ArgumentError
from ..kernel.incontext.prove import beyond_reach
from ..network import AttentionLayer, AttentionOnly, Heads
from .blocks import OMEGA, Momentum, NamedChannels, heads
from .certificate import Made, kernel_descent, kernel_mean
from .estimator import Given, InContextEstimator, MultiOutputMixin, RegressorMixin, too_wide
from .extrapolation import LOG_SINK, built, pairs
from .prompt import AFFINE, MARGIN, STOPPING, Scaling, doublings_for, step_size, tensor
from .solver import contraction, few_threads, repeat

METHODS = ("ridge", "mean")
MEAN = "a mean has no weights whose distance from an optimum the kernel could prove"
QUERIES = 256  # queries read at once, so that memory stays linear in the prompt
NETWORKS = 64  # frozen networks that are kept: more than the classes of condition numbers
MASK_SLACK = 1.01  # of the reach of logits: far above their rounding
LARGEST_LOGIT = 2.0**-8  # of the dtype's range: sums of a few logits stay within it
LARGEST_SUM = "the largest of the kernel's row sums, which attention computes and which picks step size and momentum"


@dataclass(frozen=True)
class KernelTokens(NamedChannels):
    """The parts of a token for d columns and K outputs."""

    d: int
    outputs: int

    def sizes(self) -> dict[str, int]:
        d, k = self.d, self.outputs
        return {"x": d, "X": d, "size": 1, "log s": 1, "log alpha s": 1, "y": k, "data": 1, "one": 1, "norm": 1,
                "a": k, "b": k}  # fmt: skip


class KernelNetwork(nn.Module):
    """One application: a sequence of tokens to the next one. Query tokens are tokens with data <= 0 and a = b = y = 0.

    >>> network = KernelNetwork("ridge", 2, 1, Momentum("plain"))
    >>> Z = network.example_input()
    >>> network(Z).shape == Z.shape
    True
    """

    def __init__(self, method: str, d: int, outputs: int, momentum: Momentum, dtype: torch.dtype = torch.float64):
        super().__init__()
        if method not in METHODS:
            raise ArgumentError(f"method must be 'ridge' or 'mean', got {method!r}")
        self.method, self.d, self.outputs, self.momentum = method, d, outputs, momentum
        self.at = KernelTokens(d, outputs)
        second = self._ridge(built(dtype)) if method == "ridge" else self._mean(built(dtype))
        self.body = AttentionOnly([self._norms(dtype), second])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.parameters()).dtype

    def part(self, name: str) -> list[int]:
        """The channels of a part of a token."""
        return self.at.at(name)

    def tokens(
        self, rows: Tensor, radius: float, *, step: float = 1.0, alpha: float = 1.0, data: float = 1.0
    ) -> Tensor:
        """Tokens of rows (n, d), |x| <= 1, without labels and dual weights; of queries where `data` is a `mask`."""
        Z = rows.new_zeros(*rows.shape[:-1], self.at.width)
        Z[..., self.part("x")] = rows
        Z[..., self.part("X")] = radius**2 * rows
        Z[..., self.part("size")] = radius**2
        Z[..., self.part("log s")], Z[..., self.part("log alpha s")] = math.log(step), math.log(alpha * step)
        Z[..., self.part("data")], Z[..., self.part("one")] = data, 1.0
        return Z

    def mask(self, radius: float, far: float) -> float:
        """The `data` of queries up to `far` from the middle that makes their weight as keys an exact 0.

        A query's logits are at least -R^2 (far + 1/2) at data and at most R^2 (far^2 + c) at queries: c bounds what the
        heads of layer 1 can write as a norm, saturated or not. A power of two, so that 1 - data times OMEGA is exact.
        """
        omega = OMEGA[self.dtype]
        apart = radius**2 * (far * far + far + 1 + pairs(self.dtype).amplification * 4) * MASK_SLACK + omega
        if not apart < LARGEST_LOGIT * torch.finfo(self.dtype).max:
            raise ArgumentError(
                f"a query lies {far * radius:.3g} lengths of the kernel away from the middle of the data, whose logits "
                f"{self.dtype} cannot hold; take a smaller gamma, or queries nearer to the data"
            )
        return 1 - 2.0 ** math.ceil(math.log2(apart / omega))

    def forward(self, Z: Tensor) -> Tensor:
        """The sequence after one application."""
        return self.body(Z)  # type: ignore[no-any-return]

    def read(self, Z: Tensor, rows: slice) -> Tensor:
        """What the tokens `rows` read in layer 2: kernel means, or kernel sums times s, (rows, K)."""
        first, second = self.body.layers
        out = second.groups[0].attend(first(Z), rows)[..., self.part("a")]  # type: ignore[operator, union-attr, index]
        return out if self.method == "mean" else -out

    def weights_of(self, Z: Tensor) -> Tensor:
        """The dual weights of a sequence."""
        return Z[..., self.part("a")]

    def example_input(self) -> Tensor:
        """A sequence of the right form, for `purity`."""
        generator = torch.Generator().manual_seed(0)
        Z = self.tokens((torch.rand(5, self.d, generator=generator) / self.d).to(self.dtype), 2.0, step=0.25)
        Z[..., self.part("y")] = torch.rand(5, self.outputs, generator=generator).to(self.dtype)
        return Z

    def _norms(self, dtype: torch.dtype) -> AttentionLayer:
        """norm = -R^2 |x|^2/2: sum_j 2 c_j tanh(s_j z/2) = z, and tanh(t/2) = 2 sigmoid(t) - 1."""
        table, c, d = pairs(dtype), self.at.width, self.d
        count = len(table.scales)
        W_Q, W_K, W_V = np.zeros((count, c, d)), np.zeros((1, c, d)), np.zeros((1, c, 1))
        M_K, M_V, W_O = np.zeros((1, 1, d)), np.zeros((1, 1, 1)), np.zeros((count, 1, c))
        W_K[0, self.part("x"), range(d)] = 1.0
        W_V[0, self.part("size"), 0] = 1.0
        for head, (scale, weight) in enumerate(zip(table.scales, table.weights, strict=True)):
            W_Q[head, self.part("x"), range(d)] = scale
            W_O[head, 0, self.part("norm")] = -0.5 * 4 * weight
        group = heads("self", "norm", dtype, W_Q=W_Q, W_K=W_K, W_V=W_V, M_K=M_K, M_V=M_V, W_O=W_O)
        skip = {("size", "norm"): 0.5 * 2 * math.fsum(table.weights)}
        return AttentionLayer([group], S=self.at.skip(skip, dtype))

    def _kernel(self, dtype: torch.dtype, value: str, factor: float, sink: bool) -> Heads:
        """The head of layer 2: logits X.x' + norm' (and with a sink + norm + log s, log M)."""
        c, d, k, omega = self.at.width, self.d, self.outputs, OMEGA[dtype]
        W_Q, W_K, b_K = np.zeros((1, c, d + 3)), np.zeros((1, c, d + 3)), np.zeros((1, d + 3))
        W_V, W_O = np.zeros((1, c, k)), np.zeros((1, k, c))
        W_Q[0, self.part("X"), range(d)] = W_K[0, self.part("x"), range(d)] = 1.0
        W_Q[0, self.part("one"), d], W_K[0, self.part("norm"), d] = 1.0, 1.0
        W_Q[0, self.part("one"), d + 2] = 1.0
        W_K[0, self.part("data"), d + 2], b_K[0, d + 2] = omega, -omega
        W_V[0, self.part(value), range(k)], W_O[0, range(k), self.part("a")] = 1.0, factor
        memory = {}
        if sink:
            W_Q[0, [*self.part("norm"), *self.part("log s")], d + 1] = 1.0
            b_K[0, d + 1] = 1.0
            memory = {"M_K": np.zeros((1, 1, d + 3)), "M_V": np.zeros((1, 1, k))}
            memory["M_K"][0, 0, d + 2] = LOG_SINK[dtype]
        return heads("tokens", "kernel", dtype, W_Q=W_Q, W_K=W_K, b_K=b_K, W_V=W_V, W_O=W_O, **memory)

    def _mean(self, dtype: torch.dtype) -> AttentionLayer:
        return AttentionLayer([self._kernel(dtype, "y", 1.0, False)], S=self.at.skip({("a", "a"): 0.0}, dtype))

    def _ridge(self, dtype: torch.dtype) -> AttentionLayer:
        c, k, beta, mass = self.at.width, self.outputs, self.momentum.beta, math.exp(LOG_SINK[dtype])
        W_Q, W_V, W_O = np.zeros((1, c, 2)), np.zeros((1, c, k)), np.zeros((1, k, c))
        W_Q[0, self.part("log alpha s"), 0] = W_Q[0, self.part("one"), 1] = 1.0
        W_V[0, self.part("a"), range(k)], W_O[0, range(k), self.part("a")] = 1.0, -mass
        own = heads("self", "penalty", dtype, W_Q=W_Q, b_K=np.array([[1.0, 0.0]]), W_V=W_V,
                    M_K=np.array([[[0.0, LOG_SINK[dtype]]]]), M_V=np.zeros((1, 1, k)), W_O=W_O)  # fmt: skip
        skip = {("a", "a"): 1 + beta, ("b", "a"): -beta, ("y", "a"): 1.0, ("a", "b"): 1.0}
        return AttentionLayer([self._kernel(dtype, "a", -mass, True), own], S=self.at.skip(skip, dtype))


@functools.lru_cache(maxsize=NETWORKS)
def kernel_network(method: str, d: int, outputs: int, doublings: int, dtype: torch.dtype) -> KernelNetwork:
    """The frozen network for condition numbers up to 2**doublings; the same object for everyone who asks."""
    momentum = Momentum.optimal("heavy ball", 2.0**doublings) if method == "ridge" else Momentum("plain")
    return KernelNetwork(method, d, outputs, momentum, dtype).eval().requires_grad_(False)


@dataclass(eq=False, repr=False, kw_only=True)
class KernelRegressor(MultiOutputMixin, RegressorMixin, InContextEstimator):  # type: ignore[misc]
    """Regression with a Gaussian kernel: `method="mean"` is Nadaraya-Watson, `method="ridge"` kernel ridge regression.

    >>> X, y = np.linspace(0, 3, 20)[:, None], np.sin(np.linspace(0, 3, 20))
    >>> ridge = KernelRegressor(gamma=1.0, alpha=0.01).fit(X, y)
    >>> bool(abs(ridge.predict([[1.5]])[0] - 1.0) < 0.01)
    True

    `gamma` defaults to one over the number of columns. The data stay in the prompt: a fit of the mean has no weights.
    """

    method: str = "ridge"
    gamma: float | None = None
    alpha: float = 1.0

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
            if not is_number(value) or not value > 0:
                raise ArgumentError(f"{name} must be a positive number, got {value!r}")
        X, y, _ = self._checked(X, y, multi_output=True, y_numeric=True)
        Y = np.asarray(y, dtype=np.float64).reshape(len(X), -1)
        self._given = Given.of(X, Y, np.ones(len(X)))
        x_mean = X.mean(axis=0)
        gamma = 1 / X.shape[1] if self.gamma is None else float(self.gamma)
        length = 1 / math.sqrt(2 * gamma)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # refused below
            reach = float(np.linalg.norm((X - x_mean) / length, axis=1).max(initial=0.0))
        dtype = self._torch_dtype()
        if not reach < math.sqrt(LARGEST_LOGIT * torch.finfo(dtype).max):
            raise ArgumentError(
                f"the rows lie {reach:.3g} lengths of the kernel apart, whose logits {self.dtype} cannot hold; "
                "take a smaller gamma"
            )
        radius = 2.0 ** max(0, math.ceil(math.log2(max(reach, 1e-300))))
        y_scale = float(np.abs(Y).max(initial=0.0)) or 1.0
        self.single_ = np.ndim(y) == 1
        self.rows_, self.values_, self.radius_ = (X - x_mean) / (length * radius), Y / y_scale, radius
        outside = (AFFINE, LARGEST_SUM, STOPPING) if self.method == "ridge" else (AFFINE,)
        scaling = Scaling(x_mean, np.full(X.shape[1], length * radius), np.zeros(1), y_scale, outside=outside)
        if self.method == "mean":
            self.network_, self.scaling_, self.n_iter_ = kernel_network("mean", *self._shape(), 0, dtype), scaling, 1
            self.certificate_ = kernel_mean(self.rows_, self.values_, radius, length * radius, dtype)
            self.prompt_, self._weights = self._prompt(self.network_, self.rows_, radius), self.values_.T[:, None]
            self.settled()
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

    def _beyond(self) -> str:
        far = beyond_reach(len(self._given.rows), self._given.rows.shape[1], pairs=True)
        return (too_wide(self._given) or far) if self.method == "ridge" else MEAN

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
        with few_threads(Z.numel()):
            done = repeat(self.network_, self.network_.weights_of, Z, rho, self.tol, self.max_iter)
        path = done.path()  # (T + 1, n, K)
        made = Made("heavy ball", self.network_.momentum.beta, self.scaling_.step, self.dtype, "kernel ridge")
        self.certificate_ = kernel_descent(self.rows_, self.radius_, path, self.values_, float(self.alpha), made)
        self.n_iter_, self.prompt_ = done.steps, done.state
        self.trajectory_, self._path = path * self.scaling_.y_scale, path
        self.dual_coef_ = self.trajectory_[-1]
        self.values_, self._weights = path[-1], path[-1].T[:, None]
        self.settled()
        self._warn(done.converged)

    @torch.no_grad()
    def predict(self, X: Any) -> Array:
        """Kernel sums or means at new rows: queries that attend to the prompt."""
        new = self._new_rows(X)
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
        mask = network.mask(radius, float(np.linalg.norm(new, axis=1).max()))
        count, parts = len(rows), []
        for part in tensor(new, dtype).split(QUERIES):
            Z = torch.cat((prompt, network.tokens(part, radius, data=mask)))
            parts.append(network.read(Z, slice(count, len(Z))))
        out = torch.cat(parts).double().numpy() * self.scaling_.y_scale
        return out[:, 0] if self.single_ else out
