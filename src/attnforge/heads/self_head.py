"""`SelfSpec`: the numbers of a few self heads, as plain frozen arrays.

A self head sees its own token and memory slots. Gates (section B) and products (section C) are one or two of them
plus a linear skip:

    out = Z S + s + sum_h softmax(q K^T) V O,   q = Z W_Q + b_Q,   K = [b_K ; M_K],   V = [Z W_V + b_V ; M_V]
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch

from ..dtypes import Array, rounded, stored
from ..errors import ArgumentError, CertificateError
from ..network import AttentionLayer, Heads


@dataclass(frozen=True, eq=False)
class SelfSpec:
    """Heads over `c` input channels with `k` key coordinates, `m` memory slots, `v` value channels and `o` outputs.

    Shapes: W_Q (head, c, k), b_Q (head, k), b_K (head, k), W_V (head, c, v), b_V (head, v), M_K (head, m, k),
    M_V (head, m, v), W_O (head, v, o), S (c, o), s (o,).
    """

    W_Q: Array
    b_Q: Array
    b_K: Array
    W_V: Array
    b_V: Array
    M_K: Array
    M_V: Array
    W_O: Array
    S: Array
    s: Array

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, np.asarray(getattr(self, field.name), dtype=np.float64))
        h, c, k = self.W_Q.shape
        m, v, o = self.M_K.shape[1], self.W_V.shape[2], self.W_O.shape[2]
        expected = dict(b_Q=(h, k), b_K=(h, k), W_V=(h, c, v), b_V=(h, v), M_K=(h, m, k), M_V=(h, m, v))
        expected |= dict(W_O=(h, v, o), S=(c, o), s=(o,))
        wrong = {n: getattr(self, n).shape for n, shape in expected.items() if getattr(self, n).shape != shape}
        if wrong:
            raise ArgumentError(f"these arrays of a SelfSpec do not fit W_Q of shape {self.W_Q.shape}: {wrong}")

    @property
    def kind(self) -> tuple[int, int, int]:
        """(key coordinates, memory slots, value channels): specs of one kind fit into one group of heads."""
        return self.W_Q.shape[2], self.M_K.shape[1], self.W_V.shape[2]

    def rounded(self, dtype: torch.dtype) -> SelfSpec:
        """The numbers as a dtype stores them."""
        return SelfSpec(**{f.name: rounded(getattr(self, f.name), dtype) for f in fields(self)})

    @classmethod
    def read(cls, layer: AttentionLayer) -> SelfSpec:
        """The numbers that a layer holds now; raises `CertificateError` if they are not finite."""
        heads = layer.groups[0]
        assert isinstance(heads, Heads)
        shapes = {name: tuple(tensor.shape) for name, tensor in heads.named_parameters()}
        (h, c, k), v, o = shapes["W_Q"], shapes["W_V"][2], shapes["W_O"][2]
        zero = dict(b_Q=(h, k), b_V=(h, v), S=(c, o), s=(o,))
        out: dict[str, Array] = {}
        for field in fields(cls):
            tensor = getattr(layer if field.name in ("S", "s") else heads, field.name)
            out[field.name] = np.zeros(zero[field.name]) if tensor is None else stored(tensor)
        broken = [name for name, array in out.items() if not np.isfinite(array).all()]
        if broken:
            raise CertificateError(f"no bound holds for weights that are not finite: {', '.join(broken)}")
        return cls(**out)


def power_of_two(x: Array) -> npt.NDArray[np.bool_]:
    """Where multiplying by x is exact: x is 0 or plus or minus a power of two."""
    mantissa, _ = np.frexp(np.abs(x))
    return (mantissa == 0.5) | (x == 0)
