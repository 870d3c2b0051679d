"""The ramp's head with token-wise maps only: what a transformer with memory slots, or with registers, can run."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ..certify.rounding import up
from ..errors import PrecisionError
from ..network import AttentionLayer, Heads
from .cold import ColdTable, cold_table, dot_error, nearest
from .ramp import Ramp
from .result import Size


class TokenRamp(Ramp):
    """The same head with token-wise maps: anchors are memory slots, or, if causal, tokens that come first."""

    form = "tokens"

    def __init__(self, *arguments: Any, causal: bool = False):
        super().__init__(*arguments)
        dtype, d, t = self.w.dtype, self.w.shape[-1], self.t.detach()
        self.centre = Fraction(float(nearest([(self.shape.a + self.shape.b) / 2], dtype)[0]))
        self.beta = Fraction(self.wanted_kappa) / self.step**2
        away = [place - self.centre for place in self.places]
        slope, offset = (
            nearest([2 * self.beta * x for x in away], dtype),
            nearest([-self.beta * x * x for x in away], dtype),
        )
        value = torch.zeros(self.count, self.channels, dtype=dtype)
        value[torch.arange(self.count), torch.tensor(self.channel)] = torch.from_numpy(
            nearest([self.shape.exact(place) for place in self.places], dtype)
        ).to(dtype)
        bias = float(nearest([Fraction(float(t)) - self.centre], dtype)[0])
        W_Q = torch.zeros(1, d, 2, dtype=dtype)
        W_Q[0, :, 0] = self.w.detach()
        b_Q = torch.tensor([[bias, 1.0]], dtype=dtype)
        M_K = torch.from_numpy(np.stack([slope, offset], -1)).to(dtype)[None]
        W_O = torch.eye(self.channels, dtype=dtype)[None]
        self.causal = causal
        self.w.requires_grad_(False)  # the query's weights are those of the layer; these describe the target
        self.t.requires_grad_(False)
        self.layer: nn.Module = (
            Registers(W_Q, b_Q, M_K, value[None], W_O) if causal
            else AttentionLayer([Heads("memory", W_Q=W_Q, b_Q=b_Q, M_K=M_K, M_V=value[None], W_O=W_O, purpose="ramp")])
        )  # fmt: skip

    def core(self, *inputs: Tensor) -> Tensor:
        return self.layer(inputs[0])

    def tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """W_Q, b_Q, keys and values as stored."""
        if isinstance(self.layer, Registers):
            return self.layer.tables()
        assert isinstance(self.layer, AttentionLayer)
        group = self.layer.heads()[0]
        return group.W_Q.detach()[0], group.b_Q.detach()[0], group.M_K.detach()[0], group.M_V.detach()[0]

    def attention(self, X: Tensor) -> Tensor:
        """The softmax weights, (batch, tokens, anchors)."""
        if isinstance(self.layer, Registers):
            return self.layer.attention(X)
        assert isinstance(self.layer, AttentionLayer)
        return self.layer.heads()[0].weights(X)[..., 0, :]

    def table(self) -> ColdTable:
        keys = self.tables()[2].double().numpy()
        away = [place - self.centre for place in self.places]
        return cold_table(keys[:, 0], keys[:, 1], away, self.beta, Fraction(0))

    def stored_values(self) -> np.ndarray:
        return np.asarray(self.tables()[3].double().numpy())

    def query(self) -> tuple[float, float, float]:
        W_Q, b_Q = (x.double() for x in self.tables()[:2])
        w, t = self.w.detach().double(), self.t.detach().double()
        lost = float((W_Q[:, 0] - w).abs().sum()) * self.radius  # 0 unless somebody changed a weight
        lost += float(abs(Fraction(float(b_Q[0])) - (Fraction(float(t)) - self.centre)))
        if float(b_Q[1]) != 1.0 or bool((W_Q[:, 1] != 0).any()):
            raise PrecisionError("the query's second coordinate must be 1, it was changed")
        size = float(up(float(W_Q[:, 0].abs().sum()) * self.radius + abs(float(b_Q[0])), w.shape[-1] + 4))
        error = float(up(dot_error(w.shape[-1], size, self.dtype) + lost, 8))
        return -size - error, size + error, error

    @property
    def size(self) -> Size:
        parameters = sum(p.numel() for p in self.layer.parameters())
        return Size(1, 1, self.count, parameters, self.largest_logit())

    @property
    def matrices(self) -> dict[str, Tensor]:
        """W_Q, b_Q, memory keys M_K and values M_V, W_O; queries are W_Q x + b_Q, keys the rows of M_K."""
        W_Q, b_Q, keys, value = self.tables()
        return {"W_Q": W_Q.T, "b_Q": b_Q, "M_K": keys, "M_V": value, "W_O": torch.eye(self.channels, dtype=self.dtype)}


class Registers(nn.Module):
    """Anchors as tokens that come first, under a causal mask: no data token is a key of another.

    Channels are x, a mark of data, and the anchor's key and value. Data tokens get the logit -Omega, whose exponential
    is an exact 0, also for themselves.
    """

    OMEGA: ClassVar[dict[torch.dtype, float]] = {torch.float32: 2.0**40, torch.float64: 2.0**60}

    def __init__(self, W_Q: Tensor, b_Q: Tensor, M_K: Tensor, M_V: Tensor, W_O: Tensor):
        super().__init__()
        dtype, d, (_, count, width) = W_Q.dtype, W_Q.shape[1], M_V.shape
        channels = d + 1 + 2 + width
        first = torch.zeros(count, channels, dtype=dtype)
        first[:, d + 1 : d + 3], first[:, d + 3 :] = M_K[0], M_V[0]
        self.first = nn.Parameter(first)
        self.mark = nn.Parameter(torch.cat([torch.ones(1, dtype=dtype), torch.zeros(2 + width, dtype=dtype)]))
        query = torch.zeros(1, channels, 3, dtype=dtype)
        query[0, :d, :2] = W_Q[0]
        key = torch.zeros(1, channels, 3, dtype=dtype)
        key[0, d + 1, 0], key[0, d + 2, 1], key[0, d, 2] = 1.0, 1.0, -self.OMEGA[dtype]
        read = torch.zeros(1, channels, width, dtype=dtype)
        read[0, d + 3 :] = torch.eye(width, dtype=dtype)
        bias = torch.cat([b_Q, torch.ones(1, 1, dtype=dtype)], -1)
        self.d, self.count = d, count
        self.heads = Heads("tokens", W_Q=query, b_Q=bias, W_K=key, W_V=read, W_O=W_O, causal=True, purpose="ramp")

    def state(self, X: Tensor) -> Tensor:
        data = torch.cat([X, self.mark.expand(*X.shape[:-1], -1)], -1)
        return torch.cat([self.first.expand(*X.shape[:-2], *self.first.shape), data], -2)

    def forward(self, X: Tensor) -> Tensor:
        return self.heads(self.state(X))[..., self.count :, :]

    def attention(self, X: Tensor) -> Tensor:
        return self.heads.weights(self.state(X))[..., self.count :, 0, : self.count]

    def tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        first, W_Q, b_Q = self.first.detach(), self.heads.W_Q.detach()[0], self.heads.b_Q.detach()[0]
        return W_Q[: self.d, :2], b_Q[:2], first[:, self.d + 1 : self.d + 3], first[:, self.d + 3 :]
