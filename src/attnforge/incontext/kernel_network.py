"""Kernel regression as attention layers: Nadaraya-Watson is attention itself, kernel ridge descends on dual weights.

The Gaussian kernel exp(-R^2 |x - x'|^2 / 2) is a softmax logit, bilinear but for the squared norms. Tokens carry

    x d (|x| <= 1) | X d = R^2 x | size = R^2 | log s | log(alpha s) | y K | data | one | norm | a K | b K

    layer 1   self heads whose query and key are both x write norm = -R^2 |x|^2 / 2, by hot pairs (C2)
    layer 2   mean: one head over the data, logits X.x' + norm', values y; it is written into a
              ridge: one head with a sink of logit log M: M times its weights are s k(x, x'), up to s n/M; its values
              are the dual weights a, and one self head adds s alpha a:
                  a <- a + beta (a - b) - s (sum_j k(x, x_j) a_j + alpha a - y),   b <- a,   y is stored as s y

The radius R, the step size s and alpha are in the prompt; the weights know d, K, the momentum and the dtype.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..network import AttentionLayer, AttentionOnly, Heads
from .blocks import Momentum
from .extrapolation import LOG_SINK, pairs, shipped
from .tables import OMEGA, heads

METHODS = ("ridge", "mean")


class KernelNetwork(nn.Module):
    """One application: a sequence of tokens to the next one. Query tokens are tokens with data = 0 and a = b = y = 0.

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
        self.loss = f"kernel {method}"
        second = self._ridge(shipped(dtype)) if method == "ridge" else self._mean(shipped(dtype))
        self.body = AttentionOnly([self._norms(dtype), second])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.parameters()).dtype

    def part(self, name: str) -> list[int]:
        """The channels of a part of a token."""
        d, k = self.d, self.outputs
        sizes = {"x": d, "X": d, "size": 1, "log s": 1, "log alpha s": 1, "y": k, "data": 1, "one": 1, "norm": 1,
                 "a": k, "b": k}  # fmt: skip
        begin = 0
        for key, count in sizes.items():
            if key == name:
                return list(range(begin, begin + count))
            begin += count
        raise ArgumentError(f"kernel tokens have no part {name!r}; they have {', '.join(sizes)}")

    @property
    def width(self) -> int:
        """The number of channels."""
        return self.part("b")[-1] + 1

    def tokens(
        self, rows: Tensor, radius: float, *, step: float = 1.0, alpha: float = 1.0, data: bool = True
    ) -> Tensor:
        """Tokens of rows (n, d), |x| <= 1, without labels and dual weights."""
        Z = rows.new_zeros(*rows.shape[:-1], self.width)
        Z[..., self.part("x")] = rows
        Z[..., self.part("X")] = radius**2 * rows
        Z[..., self.part("size")] = radius**2
        Z[..., self.part("log s")], Z[..., self.part("log alpha s")] = math.log(step), math.log(alpha * step)
        Z[..., self.part("data")], Z[..., self.part("one")] = float(data), 1.0
        return Z

    def forward(self, Z: Tensor) -> Tensor:
        """The sequence after one application."""
        return self.body(Z)  # type: ignore[no-any-return]

    def read(self, Z: Tensor, rows: slice) -> Tensor:
        """What the tokens `rows` read in layer 2: kernel means, or kernel sums times s, (rows, K)."""
        first, second = self.body.layers
        out = second.groups[0](first(Z), rows)[..., self.part("a")]  # type: ignore[operator, union-attr, index]
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

    def _skip(self, changes: dict[tuple[str, str], float], dtype: torch.dtype) -> Tensor:
        S = np.eye(self.width)
        for _, to in changes:
            S[:, self.part(to)] = 0.0
        for (source, to), factor in changes.items():
            S[self.part(source), self.part(to)] = factor
        return torch.from_numpy(S).to(dtype)

    def _norms(self, dtype: torch.dtype) -> AttentionLayer:
        """norm = -R^2 |x|^2/2: sum_j 2 c_j tanh(s_j z/2) = z, and tanh(t/2) = 2 sigmoid(t) - 1."""
        table, c, d = pairs(dtype), self.width, self.d
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
        return AttentionLayer([group], S=self._skip(skip, dtype))

    def _kernel(self, dtype: torch.dtype, value: str, factor: float, sink: bool) -> Heads:
        """The head of layer 2: logits X.x' + norm' (and with a sink + norm + log s, log M)."""
        c, d, k, omega = self.width, self.d, self.outputs, OMEGA[dtype]
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
        return AttentionLayer([self._kernel(dtype, "y", 1.0, False)], S=self._skip({("a", "a"): 0.0}, dtype))

    def _ridge(self, dtype: torch.dtype) -> AttentionLayer:
        c, k, beta, mass = self.width, self.outputs, self.momentum.beta, math.exp(LOG_SINK[dtype])
        W_Q, W_V, W_O = np.zeros((1, c, 2)), np.zeros((1, c, k)), np.zeros((1, k, c))
        W_Q[0, self.part("log alpha s"), 0] = W_Q[0, self.part("one"), 1] = 1.0
        W_V[0, self.part("a"), range(k)], W_O[0, range(k), self.part("a")] = 1.0, -mass
        own = heads("self", "penalty", dtype, W_Q=W_Q, b_K=np.array([[1.0, 0.0]]), W_V=W_V,
                    M_K=np.array([[[0.0, LOG_SINK[dtype]]]]), M_V=np.zeros((1, 1, k)), W_O=W_O)  # fmt: skip
        skip = {("a", "a"): 1 + beta, ("b", "a"): -beta, ("y", "a"): 1.0, ("a", "b"): 1.0}
        return AttentionLayer([self._kernel(dtype, "a", -mass, True), own], S=self._skip(skip, dtype))


@functools.lru_cache(maxsize=64)
def kernel_network(method: str, d: int, outputs: int, doublings: int, dtype: torch.dtype) -> KernelNetwork:
    """The frozen network for condition numbers up to 2**doublings; the same object for everyone who asks."""
    momentum = Momentum.optimal("heavy ball", 2.0**doublings) if method == "ridge" else Momentum("plain")
    return KernelNetwork(method, d, outputs, momentum, dtype).eval().requires_grad_(False)
