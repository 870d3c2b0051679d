"""`SelfSpec`: the numbers of a few self heads, as plain frozen arrays that a layer can pack with others.

A self head sees its own token and memory slots. Gates (section B) and products (section C) are one or two of them
plus a linear skip:

    out = Z S + s + sum_h softmax(q K^T) V O,   q = Z W_Q + b_Q,   K = [b_K ; M_K],   V = [Z W_V + b_V ; M_V]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Real

import numpy as np
import numpy.typing as npt
import torch

from ..dtypes import Array
from ..errors import ArgumentError, CertificateError
from ..network import AttentionLayer, Heads

SHIPPED = (torch.float32, torch.float64)


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
        return SelfSpec(**{f.name: _round(getattr(self, f.name), dtype) for f in fields(self)})

    def layer(self, dtype: torch.dtype, purpose: str = "") -> AttentionLayer:
        """The attention layer with these numbers; biases and skips that are zero throughout are left out."""
        given = {f.name: torch.as_tensor(getattr(self, f.name)).to(dtype) for f in fields(self)}
        always = ("W_Q", "b_K", "W_V", "M_K", "M_V", "W_O")
        kept = {name: t for name, t in given.items() if name in always or bool((t != 0).any())}
        skip, bias = kept.pop("S", None), kept.pop("s", None)
        heads = Heads("self", W_Q=kept.pop("W_Q"), W_O=kept.pop("W_O"), purpose=purpose, causal=False, **kept)
        return AttentionLayer([heads], S=skip, s=bias)

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
            out[field.name] = np.zeros(zero[field.name]) if tensor is None else tensor.detach().cpu().double().numpy()
        broken = [name for name, array in out.items() if not np.isfinite(array).all()]
        if broken:
            raise CertificateError(f"no bound holds for weights that are not finite: {', '.join(broken)}")
        return cls(**out)


def pack(placed: Sequence[tuple[SelfSpec, Sequence[int], Sequence[int]]], channels: int, outputs: int) -> SelfSpec:
    """Several specs of one kind as one: each with the input channels it reads and the output channels it writes."""
    kinds = {spec.kind for spec, _, _ in placed}
    if len(kinds) != 1:
        raise ArgumentError(f"only specs of one kind share a group of heads; got kinds {sorted(kinds)}")

    def wide(array: Array, axis: int, index: Sequence[int], size: int) -> Array:
        shape = list(array.shape)
        shape[axis] = size
        out = np.zeros(shape)
        np.add.at(np.moveaxis(out, axis, 0), list(index), np.moveaxis(array, axis, 0))  # adds into the view
        return out

    parts: dict[str, list[Array]] = {f.name: [] for f in fields(SelfSpec)}
    for spec, inputs, targets in placed:
        for name in ("b_Q", "b_K", "b_V", "M_K", "M_V"):
            parts[name].append(getattr(spec, name))
        for name in ("W_Q", "W_V"):
            parts[name].append(wide(getattr(spec, name), 1, inputs, channels))
        parts["W_O"].append(wide(spec.W_O, 2, targets, outputs))
        parts["S"].append(wide(wide(spec.S, 0, inputs, channels), 1, targets, outputs))
        parts["s"].append(wide(spec.s, 0, targets, outputs))
    joined = {n: np.sum(arrays, 0) if n in ("S", "s") else np.concatenate(arrays) for n, arrays in parts.items()}
    return SelfSpec(**joined)


def power_of_two(x: Array) -> npt.NDArray[np.bool_]:
    """Where multiplying by x is exact: x is 0 or plus or minus a power of two."""
    mantissa, _ = np.frexp(np.abs(x))
    return (mantissa == 0.5) | (x == 0)


def shipped(dtype: torch.dtype) -> torch.dtype:
    """The dtype itself, if heads ship in it."""
    if dtype not in SHIPPED:
        raise ArgumentError(f"dtype must be torch.float32 or torch.float64, got {dtype!r}")
    return dtype


def number(name: str, value: object) -> float:
    """A finite number, or an error that names the argument."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ArgumentError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def positive(name: str, value: object) -> float:
    """A finite number greater than 0, or an error that names the argument."""
    given = number(name, value)
    if given <= 0:
        raise ArgumentError(f"{name} must be greater than 0, got {value!r}")
    return given


def interval(lo: object, hi: object) -> tuple[float, float]:
    """Two finite numbers lo < hi, or an error that names them."""
    low, high = number("lo", lo), number("hi", hi)
    if low >= high:
        raise ArgumentError(f"the interval needs lo < hi, got lo = {low:g} and hi = {high:g}")
    return low, high


def _round(array: Array, dtype: torch.dtype) -> Array:
    return torch.as_tensor(array).to(dtype).double().numpy()
