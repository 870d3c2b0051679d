"""The ramp's head with token-wise maps only: what a transformer with memory slots, or with registers, can run."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..certificates.rounding import up
from ..errors import PrecisionError
from ..network import Heads
from .cold import ColdTable, cold_table, dot_error, nearest
from .ramp import Ramp
from .registers import over_slots, read_as_is, tables_of, weights_of
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
        group = Heads("memory", W_Q=W_Q, b_Q=b_Q, M_K=M_K, M_V=value[None], W_O=W_O, purpose="ramp")
        self.layer = over_slots(group, causal)

    def core(self, *inputs: Tensor) -> Tensor:
        return self.layer(inputs[0])

    def tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """W_Q, b_Q, keys and values as stored."""
        found = read_as_is(tables_of(self.layer))
        return found.W_Q[0], found.b_Q[0], found.M_K[0], found.M_V[0]

    def attention(self, X: Tensor) -> Tensor:
        """The softmax weights, (batch, tokens, anchors)."""
        return weights_of(self.layer, X)[..., 0, :]

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
