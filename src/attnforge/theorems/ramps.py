"""Ramps: clip(w.x + t, a, b) for every token, by heads, a temperature and a form that are put together.

*Heads.* One head holds p anchors (arXiv 2504.15956, v1 theorem 3.1, v2 theorem 3.4), or H heads hold n each (v1 theorem
3.2, v2 theorem 3.9): `bounds.AnchorRow`.

*Temperature.* Cold, as in the theorems: the head selects the nearest anchor (A2). Warm: it interpolates (A3), with
telescoping values where there are many heads (A6): where the neighbour takes over, this head's values do not jump to 0
as those of a cold head do, so that a missing anchor costs a fraction of a spacing, not of max |a|, |b|. Or a gate in
place of anchors: two constants and the token itself (B2).

*Form.* The paper's (linear maps along the sequence) or token-wise: keys as memory slots or, if causal, as tokens that
come first.

Paper form, one head, lemma A2. The affine map A makes p columns out of n tokens, p >= n: column i holds y_i = w_i.x_i +
t_i and 1 (i <= n), column k holds k, k (L_k + L_0) and L_k e_G(k), where L_k = a + k (b-a)/(p-1), k = 0, ..., p-1. With
B = beta (b-a)/(p-1) the logit of key k for query i is

    B (2 k y_i - k (L_k + L_0)) = -beta ((y_i - L_k)^2 - (y_i - L_0)^2),

W_V reads L_k e_G(k), and W_O keeps the first n columns. Paper form, many heads: A is token-wise and appends the
identity, Z = [X; I_n], and W_K, W_V read keys and values off the identity block.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..box import Box
from ..dtypes import Array, dtype_name, rounded, stored
from ..errors import ArgumentError, CertificateError
from ..heads.gate.head import GateHead
from ..heads.stored import SelfSpec
from ..heads.token.bound import UNDERFLOW
from ..network import CHUNK, AttentionLayer, AttentionOnly, Heads
from . import bounds
from .bounds import AnchorRow, ColdTable, ScalarTarget, StoredHead, StoredRamp, Wanted
from .result import Construction, Ledger, Size, TheoremPicture, ends, form_of, leak, number, tensor, whole
from .slots import Registers, depth_of, over_slots, parts, read_as_is, stacked, tables_of, weights_of

ChannelMap = int | Sequence[int] | Callable[[int], int] | None
VARIANTS = ("cold", "warm", "gate")
MARGIN = 0.05  # where G changes, this share of a spacing on each side of the middle is excluded: ten times as cold then
FARTHEST = 16.0  # |x| is at most this unless a radius is given, or more where the ramp's ends are farther away
BALANCED = 2.72  # kappa where the kink at the end of the table errs as much as the interior: 0.062 of a spacing
GUARDS = 2  # anchors of a warm head beyond either end of its part: their weight at the end is below exp(-4 kappa)
SHOWN = 4  # tokens of an example
PICTURED, COLUMNS = 1200, 120  # points of a picture's curves, queries of its heat map
PAPER_IS_NOT_CAUSAL = (
    "the paper's form has no causal variant: token i would see only the anchors in columns up to i; "
    "use form='tokens', where the anchors come first"
)


class Kind(NamedTuple):
    """What goes with a temperature and a number of heads: the theorem, its layers, its bound, what to do about one."""

    theorem: str
    layers: int
    ledger: Callable[[Wanted, AnchorRow, Fraction, StoredRamp], Ledger]
    advice: str


COLD = "use float64, fewer anchors or a smaller radius"
COLD_PAPER = "use float64, fewer anchors, a smaller radius or form='tokens', whose logits are smaller"
MANY = "use float64, fewer heads or a smaller radius"
SMOOTH = "use float64 or a smaller radius"
KINDS = {  # (temperature, whether the theorem is that of many heads)
    ("cold", False): Kind("arXiv 2504.15956 v1 theorem 3.1 (v2 theorem 3.4)", 1, bounds.cold_head, COLD),
    ("cold", True): Kind("arXiv 2504.15956 v1 theorem 3.2 (v2 theorem 3.9)", 1, bounds.cold_heads, MANY),
    ("warm", False): Kind(
        "warm anchors (A3) in place of arXiv 2504.15956 v1 theorem 3.1", 2, bounds.warm_head, SMOOTH
    ),
    ("warm", True): Kind(
        "warm anchors with telescoping values (A3, A6) in place of arXiv 2504.15956 v1 theorem 3.2", 1,
        bounds.warm_heads, MANY,
    ),
    ("gate", False): Kind("a gate (B2) in place of arXiv 2504.15956 v1 theorem 3.1", 2, bounds.gate_head, SMOOTH),
}  # fmt: skip


def nearest(numbers: Sequence[Fraction], dtype: torch.dtype) -> Tensor:
    """These numbers as the dtype stores them."""
    return torch.from_numpy(rounded(np.array([float(x) for x in numbers]), dtype)).to(dtype)


def scalars(X: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """y_i = w_i . x_i + t_i, for one w or one per token."""
    return (X * w).sum(-1) + t if w.dim() == 2 else X @ w + t


@dataclass(frozen=True)
class Temperature:
    """Cold, warm or a gate, and the scale-free inverse temperature kappa = beta spacing^2: large is cold."""

    name: str
    kappa: float = 0.0


# -- forms ---------------------------------------------------------------------------------------------------------


class Body(ABC):
    """How a ramp's tables become tensors of a module, are run, and are read back."""

    name: str

    def __init__(self, causal: bool = False):
        self.causal = causal

    def beta(self, kappa: float, step: Fraction, dtype: torch.dtype) -> Fraction:
        """The inverse temperature that is aimed at."""
        return Fraction(kappa) / step**2

    @abstractmethod
    def build(self, m: Ramp, w: Tensor, t: Tensor) -> None:
        """Give the module its tensors."""

    @abstractmethod
    def run(self, m: Ramp, X: Tensor) -> Tensor:
        """The outputs, (batch, tokens, channels)."""

    @abstractmethod
    def weights(self, m: Ramp, X: Tensor) -> Tensor:
        """The softmax weights, (batch, tokens, anchors), or (batch, heads, tokens, keys) for many heads."""

    @abstractmethod
    def read(self, m: Ramp) -> StoredRamp:
        """The numbers of the tensors."""

    @abstractmethod
    def matrices(self, m: Ramp) -> dict[str, Tensor]:
        """The tensors by the names of the paper."""


class PaperHead(Body):
    """One head in the paper's form: A extends the sequence to p columns; keys are B (k, k (L_k + L_0))."""

    name = "paper"

    def beta(self, kappa: float, step: Fraction, dtype: torch.dtype) -> Fraction:
        B = float(nearest([Fraction(kappa) / step], dtype)[0])
        while Fraction(B) * step < Fraction(kappa) and kappa == 1.0:  # rounded up, so that A2 still speaks
            B = float(torch.nextafter(torch.tensor(B, dtype=dtype), torch.tensor(math.inf, dtype=dtype)))
        return Fraction(B) / step

    def build(self, m: Ramp, w: Tensor, t: Tensor) -> None:
        dtype, places = w.dtype, m.places
        m.B = nn.Parameter(nearest([m.beta * m.step], dtype)[0])
        m.index = nn.Parameter(torch.arange(m.keys, dtype=dtype))
        m.square = nn.Parameter(nearest([k * (place + places[0]) for k, place in enumerate(places)], dtype))
        m.value = nn.Parameter(m.value_table(dtype))

    def key_table(self, m: Ramp) -> Tensor:
        """K, one row per anchor."""
        return torch.stack([m.B * m.index, m.B * m.square], -1)

    def weights(self, m: Ramp, X: Tensor) -> Tensor:
        return selecting(scalars(X, m.w, m.t), self.key_table(m))

    def run(self, m: Ramp, X: Tensor) -> Tensor:
        keys = self.key_table(m)
        return chunked(lambda y: selecting(y, keys) @ m.value, scalars(X, m.w, m.t), m.keys)

    def read(self, m: Ramp) -> StoredRamp:
        keys = stored(self.key_table(m))
        head = StoredHead(2 * keys[:, 0], -keys[:, 1], stored(m.value), reference=m.places[0])
        return StoredRamp(m.dtype, stored(m.w), stored(m.t), (head,))

    def matrices(self, m: Ramp) -> dict[str, Tensor]:
        """A is (rows, p, n, d) with constant part A_0 (rows, p): A(X) = sum_id A[:, :, i, d] X[i, d] + A_0.

        The rows of A(X) are y, 1, k, k (L_k + L_0) and the channels. Then the output is
        W_V A(X) softmax((W_K A(X))^T W_Q A(X)) W_O, softmax over each column, (channels, n).
        """
        n, p, d, dtype, channels = m.tokens_shown(), m.keys, m.w.shape[-1], m.dtype, m.channels
        rows = 4 + channels
        w, t = m.w.detach().expand(n, d), m.t.detach().expand(n)
        A, A_0 = torch.zeros(rows, p, n, d, dtype=dtype), torch.zeros(rows, p, dtype=dtype)
        A[0, range(n), range(n)] = w
        A_0[0, :n], A_0[1, :n] = t, 1.0
        A_0[2], A_0[3], A_0[4:] = m.index.detach(), m.square.detach(), m.value.detach().T
        W_Q, W_K = torch.zeros(2, rows, dtype=dtype), torch.zeros(2, rows, dtype=dtype)
        W_Q[0, 0], W_Q[1, 1], W_K[0, 2], W_K[1, 3] = 2.0, -1.0, m.B.item(), m.B.item()
        W_V = torch.cat([torch.zeros(channels, 4, dtype=dtype), torch.eye(channels, dtype=dtype)], 1)
        return {"A": A, "A_0": A_0, "W_K": W_K, "W_Q": W_Q, "W_V": W_V, "W_O": torch.eye(p, n, dtype=dtype)}


class PaperHeads(Body):
    """Z = [X; I_n]; every head reads the same query (2y, -1) and its own keys B (k, k (L_k + L_0))."""

    name = "paper"

    def build(self, m: Ramp, w: Tensor, t: Tensor) -> None:
        B, dtype, keys, values = m.beta * m.step, w.dtype, [], []
        for h in range(m.heads):
            window = m.held.window(h)
            pairs = [(B * k, B * k * (place + window[0])) for k, place in enumerate(window)]
            keys.append(torch.stack([nearest([x[i] for x in pairs], dtype) for i in (0, 1)], -1))
            values.append(nearest(m.held.values(h, m.shape), dtype))
        m.key = nn.Parameter(torch.stack(keys))  # (head, key, 2)
        m.value = nn.Parameter(torch.stack(values))  # (head, key)

    def weights(self, m: Ramp, X: Tensor) -> Tensor:
        return selecting(scalars(X, m.w, m.t), m.key)

    def run(self, m: Ramp, X: Tensor) -> Tensor:
        added = lambda y: (selecting(y, m.key) @ m.value.unsqueeze(-1)).sum(-3)  # noqa: E731
        return nn.functional.pad(chunked(added, scalars(X, m.w, m.t), m.heads * m.keys), (0, m.channels - 1))

    def read(self, m: Ramp) -> StoredRamp:
        keys, values = stored(m.key), stored(m.value)
        heads = [
            StoredHead(2 * keys[h, :, 0], -keys[h, :, 1], values[h][:, None], reference=m.held.window(h)[0])
            for h in range(m.heads)
        ]
        return StoredRamp(m.dtype, stored(m.w), stored(m.t), tuple(heads))

    def matrices(self, m: Ramp) -> dict[str, Tensor]:
        """A(X) = [X; I_n] (or [y; I_n], one w per token); W_K, W_Q, W_V, W_O have one slice per head.

        The output is sum_h W_O[h] W_V[h] Z softmax((W_K[h] Z)^T W_Q[h] Z), Z = sum_id A[:, :, i, d] X[i, d] + A_0.
        """
        n, H, d, dtype, each = m.keys, m.heads, m.w.shape[-1], m.dtype, m.w.dim() == 2
        inner = 1 if each else d
        A, A_0 = torch.zeros(inner + n, n, n, d, dtype=dtype), torch.zeros(inner + n, n, dtype=dtype)
        for i in range(n):
            A[:inner, i, i] = m.w[i][None] if each else torch.eye(d, dtype=dtype)
        A_0[inner:] = torch.eye(n, dtype=dtype)
        W_Q = torch.zeros(H, 2, inner + n, dtype=dtype)
        W_Q[:, 0, :inner] = 2 * (torch.ones(1, dtype=dtype) if each else m.w)
        W_Q[:, 0, inner:], W_Q[:, 1, inner:] = 2 * m.t, -1.0
        W_K = torch.cat([torch.zeros(H, 2, inner, dtype=dtype), m.key.detach().transpose(1, 2)], -1)
        W_V = torch.cat([torch.zeros(H, 1, inner, dtype=dtype), m.value.detach()[:, None]], -1)
        W_O = torch.eye(m.channels, 1, dtype=dtype).expand(H, -1, -1)
        return {"A": A, "A_0": A_0, "W_K": W_K, "W_Q": W_Q, "W_V": W_V, "W_O": W_O}


class Slots(Body):
    """One layer, token-wise: the query is w.x + t less the middle of [a, b], the keys are constant slots."""

    name = "tokens"

    def build(self, m: Ramp, w: Tensor, t: Tensor) -> None:
        dtype = w.dtype
        centre = Fraction(float(nearest([(m.shape.a + m.shape.b) / 2], dtype)[0]))
        W_Q = torch.zeros(1, len(w), 2, dtype=dtype)
        W_Q[0, :, 0] = w
        b_Q = torch.stack([nearest([Fraction(float(t)) - centre], dtype)[0], torch.ones((), dtype=dtype)])[None]
        keys, values = slot_keys(m.places, centre, m.beta, dtype)[None], m.value_table(dtype)[None]
        W_O = torch.eye(m.channels, dtype=dtype)[None]
        group = Heads("memory", W_Q=W_Q, b_Q=b_Q, M_K=keys, M_V=values, W_O=W_O, purpose="ramp")
        m.centre, m.layer = centre, over_slots(group, self.causal)

    def run(self, m: Ramp, X: Tensor) -> Tensor:
        return m.layer(X)

    def weights(self, m: Ramp, X: Tensor) -> Tensor:
        return weights_of(m.layer, X)[..., 0, :]

    def read(self, m: Ramp) -> StoredRamp:
        W_Q, b_Q, keys, values, _ = (stored(x[0]) for x in read_as_is(m.layer))
        if b_Q[1] != 1.0 or W_Q[:, 1].any():
            raise CertificateError("the query's second coordinate must be 1, it was changed")
        head = StoredHead(keys[:, 0], keys[:, 1], values, m.centre)
        return StoredRamp(m.dtype, W_Q[:, 0], b_Q[0], (head,), bias=m.centre, depth=depth_of(m.layer))

    def matrices(self, m: Ramp) -> dict[str, Tensor]:
        """W_Q, b_Q, memory keys M_K and values M_V, W_O; queries are W_Q x + b_Q, keys the rows of M_K."""
        W_Q, b_Q, keys, values, W_O = (x[0] for x in read_as_is(m.layer))
        return {"W_Q": W_Q.T, "b_Q": b_Q, "M_K": keys, "M_V": values, "W_O": W_O}


class AfterAffine(Body):
    """Token-wise: an affine layer makes y, a second one has heads over slots, each centred on its window, or a gate."""

    name = "tokens"

    def build(self, m: Ramp, w: Tensor, t: Tensor) -> None:
        first = AttentionLayer([], S=w[:, None], s=t.reshape(1))
        m.net = stacked(first, self.gate(m, w, t) if m.temperature == "gate" else self.slots(m, w.dtype))

    def slots(self, m: Ramp, dtype: torch.dtype) -> AttentionLayer | Registers:
        """The layer of heads over slots; many heads write their one value to the first channel."""
        H, keys, values, biases = m.heads, [], [], []
        for h in range(H):
            window = m.held.window(h)
            centre = nearest([(window[0] + window[-1]) / 2], dtype)[0]
            keys.append(slot_keys(window, Fraction(float(centre)), m.beta, dtype))
            values.append(nearest(m.held.values(h, m.shape), dtype)[:, None] if m.many else m.value_table(dtype))
            biases.append(torch.stack([-centre, torch.ones((), dtype=dtype)]))
        width = values[0].shape[-1]
        group = Heads(
            "memory", W_Q=torch.eye(1, 2, dtype=dtype).expand(H, 1, 2), b_Q=torch.stack(biases), M_K=torch.stack(keys),
            M_V=torch.stack(values), W_O=torch.eye(width, m.channels, dtype=dtype).expand(H, width, -1),
            purpose="ramp" if m.many else "warm ramp",
        )  # fmt: skip
        return over_slots(group, self.causal)

    def gate(self, m: Ramp, w: Tensor, t: Tensor) -> AttentionLayer:
        """The gate on all y that can be computed."""
        plain = StoredRamp(w.dtype, stored(w), stored(t), (), spare=1)
        a, b, most = float(m.shape.a), float(m.shape.b), plain.query(m.wanted).most
        layer = GateHead.ramp(a, b, min(-most, a), max(most, b), dtype=w.dtype).layer
        group = layer.heads()[0]
        group.W_O = nn.Parameter(nn.functional.pad(group.W_O.detach(), (0, m.channels - 1)))
        return layer

    def run(self, m: Ramp, X: Tensor) -> Tensor:
        return m.net(X)

    def weights(self, m: Ramp, X: Tensor) -> Tensor:
        first, second = parts(m.net)
        found = weights_of(second, first(X))
        return found.transpose(-3, -2) if m.many else found[..., 0, :]

    def read(self, m: Ramp) -> StoredRamp:
        first, second = parts(m.net)
        assert first.S is not None and first.s is not None  # noqa: PT018
        w, t, spare = stored(first.S)[:, 0], stored(first.s).reshape(()), int(not m.many)
        if m.temperature == "gate":
            return StoredRamp(m.dtype, w, t, (), spare=spare, gate=SelfSpec.read(cast(AttentionLayer, second)))
        W_Q, b_Q, keys, values, _ = (stored(x) for x in read_as_is(second))
        if not (W_Q == [1.0, 0.0]).all() or not (b_Q[:, 1] == 1.0).all():
            raise CertificateError("the query of a head was changed: it must read (y - centre, 1)")
        heads = [
            StoredHead(keys[h, :, 0], keys[h, :, 1], values[h], Fraction(-float(b_Q[h, 0]))) for h in range(m.heads)
        ]
        return StoredRamp(m.dtype, w, t, tuple(heads), spare=spare, depth=depth_of(second))

    def matrices(self, m: Ramp) -> dict[str, Tensor]:
        """The tables of the second layer, and w, t of the first."""
        second = parts(m.net)[1]
        if m.many:
            return {"w": m.w, "t": m.t, **read_as_is(second)._asdict()}
        group = second.heads()[0] if isinstance(second, AttentionLayer) else second.heads
        return {"w": m.w, "t": m.t, **{name: p.detach() for name, p in group.named_parameters()}}


def selecting(y: Tensor, keys: Tensor) -> Tensor:
    """The softmax of the query (2y, -1) over keys (key, 2), or (head, key, 2)."""
    query = torch.stack([2 * y, -torch.ones_like(y)], -1)
    return torch.softmax((query if keys.dim() == 2 else query.unsqueeze(-3)) @ keys.transpose(-2, -1), -1)


def slot_keys(places: Sequence[Fraction], centre: Fraction, beta: Fraction, dtype: torch.dtype) -> Tensor:
    """Keys (2 beta x, -beta x^2), x the anchors as seen from the centre, (anchor, 2)."""
    away = [place - centre for place in places]
    slopes, offsets = [2 * beta * x for x in away], [-beta * x * x for x in away]
    return torch.stack([nearest(slopes, dtype), nearest(offsets, dtype)], -1)


def chunked(rows: Callable[[Tensor], Tensor], y: Tensor, each: int) -> Tensor:
    """rows(y), some scalars at a time where there are many, so that memory does not grow with tokens times keys."""
    step = max(1, CHUNK // each)
    if torch.compiler.is_compiling() or y.numel() <= step:
        return rows(y)
    return torch.cat([rows(part) for part in y.flatten().split(step)]).reshape(*y.shape, -1)


# -- the construction ----------------------------------------------------------------------------------------------


#: The forms of every kind of ramp, one head or many; and all of them by the names that files have for them.
LAID_OUT: dict[tuple[str, bool], tuple[type[Body], ...]] = {
    ("cold", False): (PaperHead, Slots),
    ("cold", True): (PaperHeads, AfterAffine),
    ("warm", False): (AfterAffine,),
    ("warm", True): (AfterAffine,),
    ("gate", False): (AfterAffine,),
}
BODIES: dict[str, type[Body]] = {form.__name__: form for form in (PaperHead, PaperHeads, Slots, AfterAffine)}


class Ramp(Construction):
    """clip(w.x + t, a, b) of given heads, temperature and form; `theorems.ramp` and `theorems.ramp_heads` build it.

    `excluded` lists the intervals of y where the bound does not speak, which is only where the output channel map G
    changes between neighbouring anchors.
    """

    family = "theorem-ramp"
    called = "the ramp of the theorem"
    # tensors of the forms
    w: Tensor
    t: Tensor
    B: Tensor
    index: Tensor
    square: Tensor
    key: Tensor
    value: Tensor
    layer: AttentionLayer | Registers
    net: AttentionOnly | nn.Sequential
    centre: Fraction
    # of all temperatures but a gate
    beta: Fraction
    kappa: float

    def __init__(
        self, w: Tensor, t: Tensor, wanted: Wanted, held: AnchorRow, temperature: Temperature, form: Body, many: bool,
        eps0: float = 0.0,
    ):  # fmt: skip
        super().__init__()
        self.wanted, self.shape, self.radius, self.channels = wanted, wanted.shape, wanted.radius, wanted.channels
        self.held, self.heads, self.keys, self.places, self.step = held, held.heads, held.keys, held.places, held.step
        self.temperature, self.many, self.eps0, self.channel = temperature.name, many, eps0, wanted.channel
        self.body, self.form, self.causal, self.made = form, form.name, form.causal, w.dtype
        self.asked_kappa = temperature.kappa
        kind = KINDS[self.temperature, many]
        self.theorem = kind.theorem
        self.box = Box.cube(-wanted.radius, wanted.radius, shape=w.shape[-1])
        if self.temperature == "cold":
            a, b = float(wanted.shape.a), float(wanted.shape.b)
            apart = held.own * held.heads if many else held.keys
            self.paper_bound = max(abs(a), abs(b)) * eps0 + float(wanted.shape.b - wanted.shape.a) / apart
        if self.temperature != "gate":
            self.beta = form.beta(temperature.kappa, held.step, w.dtype)
            self.kappa = float(self.beta * held.step**2)
        if isinstance(form, PaperHead):  # all weights of the theorem are free
            self.w, self.t = nn.Parameter(w), nn.Parameter(t)
        else:
            self.register_buffer("w", w)  # in token-wise forms a description; the layers have their own
            self.register_buffer("t", t)
        form.build(self, w, t)
        advice = COLD_PAPER if kind.advice == COLD and self.form == "paper" else kind.advice
        self.judged(float(wanted.shape.b - wanted.shape.a) / 2 * wanted.shape.lipschitz, advice)

    @property
    def beyond(self) -> str:
        return ""

    @property
    def alone(self) -> bool:
        """Whether the heads make y themselves, less the middle of the ramp: one layer in all."""
        return isinstance(self.body, Slots)

    @property
    def scalars(self) -> int:
        """How many y there are: one for each token where these have weights of their own."""
        return max(len(np.atleast_2d(self.wanted.w)), self.wanted.t.size)

    def asks(self) -> dict[str, Any]:
        wanted, held = self.wanted, self.held
        slope = self.shape.slope
        return {
            "w": wanted.w.tolist(), "t": wanted.t.tolist(), "a": float(self.shape.a), "b": float(self.shape.b),
            "slope": None if slope is None else float(slope), "radius": self.radius, "channel": list(wanted.channel),
            "channels": wanted.channels, "margin": wanted.margin, "keys": held.keys, "heads": held.heads,
            "guards": held.guards, "temperature": self.temperature, "kappa": self.asked_kappa,
            "body": type(self.body).__name__, "causal": self.causal, "many": self.many, "eps0": self.eps0,
        }  # fmt: skip

    @classmethod
    def again(cls, asked: dict[str, Any], made: torch.dtype) -> Ramp:
        low, high = ends(asked["a"], asked["b"])
        slope = None if asked["slope"] is None else number("slope", asked["slope"])
        w, t = _query(tensor("w", asked["w"], made), tensor("t", asked["t"], made))
        keys, heads = (whole(name, asked[name], 1) for name in ("keys", "heads"))
        channels, guards = whole("channels", asked["channels"], 1), whole("guards", asked["guards"], 0)
        channel = tuple(whole("channel", k, 0) for k in asked["channel"])
        large = max(keys * heads // 4, channels) > asked["most"]
        if large or len(channel) != keys or max(channel) >= channels:
            raise ArgumentError("the description is not of the network that the tensors are of")
        many, temperature = bool(asked["many"]), Temperature(str(asked["temperature"]), number("kappa", asked["kappa"]))
        warm = temperature.name != "cold"
        fits = asked["body"] in BODIES and BODIES[asked["body"]] in LAID_OUT.get((temperature.name, many), ())
        if not fits or guards != (GUARDS if warm and many else 0) or keys < max(3, 2 * guards + 2) or (warm and slope):
            raise ArgumentError(f"there is no ramp {asked['temperature']!r} of the form {asked['body']!r}")
        if not warm and temperature.kappa < 1:
            raise ArgumentError(f"kappa must be at least 1 for a cold head, got {temperature.kappa:g}")
        if not asked["body"].startswith("Paper"):
            _token_wise(w, t, "the token-wise form")
        shape = ScalarTarget(low, high, slope)
        wanted = Wanted(
            stored(w), stored(t), shape, number("radius", asked["radius"], positive=True), channel, channels,
            number("margin", asked["margin"], positive=True),
        )  # fmt: skip
        held = AnchorRow(shape.a, shape.b, keys, heads, guards)
        body = BODIES[asked["body"]](bool(asked["causal"]))
        return cls(w, t, wanted, held, temperature, body, many, number("eps0", asked["eps0"]))

    @property
    def anchors(self) -> Array:
        """The anchors L_k, heads one after the other without repeats; the two constants of a gate."""
        gate = self.temperature == "gate"
        return np.array([float(x) for x in ((self.shape.a, self.shape.b) if gate else self.places)])

    @property
    def dtype(self) -> torch.dtype:
        return self.w.dtype

    @property
    def excluded(self) -> tuple[tuple[float, float], ...]:
        """Where anchors of different channels are about equally near; empty for a constant channel map."""
        return () if self.wanted.constant else self.wanted.excluded(self.held, self.stored().query(self.wanted).error)

    def value_table(self, dtype: torch.dtype) -> Tensor:
        """The values of one head, each on its anchor's channel, (anchor, channel)."""
        table = torch.zeros(self.keys, self.channels, dtype=dtype)
        table[torch.arange(self.keys), torch.tensor(self.wanted.channel)] = nearest(
            self.held.values(0, self.shape), dtype
        )
        return table

    def scalar(self, X: Tensor) -> Tensor:
        """y = w.x + t in float64, for the w and t that were asked for."""
        return scalars(X.double(), torch.from_numpy(self.wanted.w), torch.from_numpy(self.wanted.t))

    def target(self, X: Tensor) -> Tensor:
        y = self.scalar(X)
        out = torch.zeros(*y.shape, self.channels, dtype=torch.float64)
        if self.wanted.constant:
            out[..., self.wanted.channel[0]] = self.shape.value(y)
            return out
        where = ((y - float(self.shape.a)) / float(self.step)).round().clamp(0, self.keys - 1).long()
        channel = torch.tensor(self.wanted.channel)[where].unsqueeze(-1)
        return out.scatter(-1, channel, self.shape.value(y).unsqueeze(-1))

    # what there is
    def core(self, *inputs: Tensor) -> Tensor:
        return self.body.run(self, inputs[0])

    def attention(self, X: Tensor) -> Tensor:
        """The softmax weights, (batch, tokens, anchors), or (batch, heads, tokens, keys) for many heads."""
        return self.body.weights(self, X)

    @property
    def matrices(self) -> dict[str, Tensor]:
        """The weights by the names of the paper, as the form lays them out."""
        return self.body.matrices(self)

    def layers(self) -> tuple[AttentionLayer | None, AttentionLayer | Registers]:
        """In token-wise form: the affine layer in front, where there is one, and the layer with heads."""
        return (None, self.layer) if isinstance(self.body, Slots) else parts(self.net)

    def stored(self) -> StoredRamp:
        """The numbers of the tensors as they are now."""
        return self.body.read(self)

    def table(self, h: int = 0) -> ColdTable:
        """Head h's stored keys next to the ideal ones, in the coordinate of the query."""
        return self.stored().heads[h].beside(self.held.window(h), self.beta)

    def ledger(self) -> Ledger:
        beta = Fraction(0) if self.temperature == "gate" else self.beta
        found = KINDS[self.temperature, self.many].ledger(self.wanted, self.held, beta, self.stored())
        return replace(found, assumptions=(*found.assumptions, UNDERFLOW)) if self.causal else found

    @property
    def size(self) -> Size:
        count, layers = sum(p.numel() for p in self.parameters()), KINDS[self.temperature, self.many].layers
        found = self.stored()
        most = found.query(self.wanted).most
        if self.temperature == "cold" or self.many:
            last = found.heads[-1]
            reach = most + abs(float(last.shift)) if self.many else most
            return Size(layers, self.heads, self.heads * self.keys, count, last.logit(reach))
        W_Q, b_Q, M_K, *_ = tables_of(parts(self.net)[1])
        reach = most * float(W_Q.abs().max()) + float(b_Q.abs().max())
        return Size(layers, len(W_Q), M_K.shape[-2], count, float(M_K.abs().sum(-1).max()) * reach)

    # inputs
    def tokens_shown(self) -> int:
        """How many tokens an example has."""
        fixed = self._tokens()
        return fixed if fixed is not None else min(SHOWN, self.keys)

    def _tokens(self) -> int | None:
        """How many tokens there have to be, where that is fixed."""
        if self.many:
            return self.keys
        sizes = [len(x) for x, single in ((self.wanted.w, 1), (self.wanted.t, 0)) if x.ndim > single]
        return max(sizes, default=None)

    def check_shape(self, x: Tensor) -> None:
        d, n = self.w.shape[-1], None if self.many and self.form == "tokens" else self._tokens()
        if x.dim() < 2 or x.shape[-1] != d or n not in (None, x.shape[-2]):
            raise ArgumentError(f"expected X of shape (batch, {n or 'tokens'}, {d}), got {tuple(x.shape)}")
        if self.form == "paper" and x.shape[-2] > self.keys:
            raise ArgumentError(
                f"the paper's form needs at least as many anchors as tokens, got {self.keys} anchors and "
                f"{x.shape[-2]} tokens; use more anchors or form='tokens'"
            )

    def points(self, count: int, seed: int = 0) -> Tensor:
        n = self.tokens_shown()
        rows = max(1, count // n) if self.many else count
        return super().points(rows * n, seed)[: rows * n].reshape(rows, n, -1)

    def example_input(self) -> tuple[Tensor, ...]:
        if not self.many and self.temperature != "cold":
            return super().example_input()
        return (self.points(2 * self.keys if self.many else 2),)

    def _line(self, count: int) -> tuple[Tensor, Array]:
        """Tokens whose y = w.x + t runs evenly from below a to above b, and these y as they are."""
        n, a, b = self.tokens_shown(), float(self.anchors[0]), float(self.anchors[-1])
        rows = -(-count // n)
        wanted = torch.linspace(a - 0.12 * (b - a), b + 0.12 * (b - a), rows * n, dtype=torch.float64).reshape(rows, n)
        w, t = (torch.from_numpy(x) for x in (self.wanted.w, self.wanted.t))
        w, t = w.expand(n, -1), t.expand(n)
        X = ((wanted - t) / (w * w).sum(-1).clamp_min(1e-300)).unsqueeze(-1) * w
        X = X.clamp(-self.radius, self.radius).to(self.dtype)
        return X, scalars(X.double(), w, t).flatten().numpy()

    @torch.no_grad()
    def picture(self) -> TheoremPicture:
        """Along y, from below a to above b."""
        X, y = self._line(PICTURED)
        order = np.argsort(y, kind="stable")
        output, target = (v.double().flatten(0, 1).numpy()[order] for v in (self.core(X), self.target(X)))
        few, at = self._line(COLUMNS)
        weights = self.attention(few).double()
        if self.many:  # (batch, head, token, key) -> all keys of all heads in a row
            weights = weights.transpose(-3, -2).flatten(-2)
        table = weights.flatten(0, 1).numpy()[np.argsort(at, kind="stable")]
        places = self.anchors
        a, b = float(places[0]), float(places[-1])
        if self.temperature == "gate":
            curves = tuple((label, np.sort(at), w) for label, w in zip(("own token", "a", "b"), table.T, strict=False))
            second = ("Softmax weights of the slots", "y = w.x + t", "weight")
        else:
            step, kappa = (b - a) / (len(places) - 1), self.kappa
            some = [a + share * (b - a) for share in (0.15, 0.5, 0.85)]
            curves = tuple((f"y = {v:.3g}", places, -kappa * ((v - places) / step) ** 2) for v in some)
            second = (f"Logits below the largest, κ = {kappa:.3g}", "anchor L", "logit")
        kept = sorted(set(self.wanted.channel))
        return TheoremPicture(
            f"{self.theorem}, {self.form} form", "y = w.x + t", y[order], target[:, kept], output[:, kept],
            np.abs(output - target).max(-1), self.bound, self.paper_bound, table,
            "key, head after head" if self.many else "key", curves, *second, dtype_name(self.dtype),
        )  # fmt: skip


#: The name under which many-head ramps were known; heads are a part of every ramp, and one head is H = 1.
RampHeads = Ramp


# -- what users call -----------------------------------------------------------------------------------------------


def ramp(
    w: Any,
    t: Any,
    a: float,
    b: float,
    anchors: int = 32,
    eps0: float = 1e-9,
    *,
    form: str = "paper",
    G: ChannelMap = None,
    channels: int | None = None,
    radius: float | None = None,
    variant: str = "cold",
    kappa: float | None = None,
    margin: float = MARGIN,
    causal: bool = False,
) -> Ramp:
    """clip(w.x + t, a, b) for every token, by one head with `anchors` keys (v1 theorem 3.1, v2 theorem 3.4).

    >>> import torch
    >>> m = ramp([1.0, -2.0], 0.5, a=-1, b=1, anchors=33)
    >>> X = torch.tensor([[[0.1, 0.4], [2.0, 0.0]]], dtype=torch.float64)
    >>> (m(X) - m.target(X)).abs().max().item() <= m.bound <= m.paper_bound
    True

    `w` is one vector (d,) or one per token (n, d), `t` a number or one per token (n,); dtype follows w. `G` maps an
    anchor's number to an output channel. `radius` bounds |x| (for the rounding of w.x). `variant` "warm" is the same
    head at the temperature where kink and interior err alike, "gate" replaces the anchors by two constants and the
    token itself (B2); both are token-wise. `causal` makes the anchors tokens that come first (token-wise forms).
    """
    weight, shift = _query(w, t)
    low, high = ends(a, b)
    count, small = whole("anchors", anchors, 3, " (p > 2)"), leak(eps0)
    if variant not in VARIANTS:
        raise ArgumentError(f"variant must be one of {', '.join(VARIANTS)}, got {variant!r}")
    shape, reach = ScalarTarget(low, high), _radius(radius, weight, shift, low, high)
    if variant == "cold":
        return _cold(weight, shift, shape, count, small, form, G, channels, reach, kappa, margin, causal)
    _token_wise(weight, shift, f"variant='{variant}'")
    if G is not None:
        raise ArgumentError(f"variant='{variant}' writes one channel: leave G out")
    if causal and variant == "gate":
        raise ArgumentError(
            "a gate has no anchors that could come first, and is causal as it is: a token sees itself and two "
            "constants; leave causal out (as a stock causal transformer: attnforge.export.to_plain)"
        )
    width = 1 if channels is None else whole("channels", channels, 1)
    if variant == "gate" and kappa is not None:
        raise ArgumentError("a gate has no anchors and takes no kappa")
    warm = BALANCED if kappa is None else number("kappa", kappa, positive=True)
    wanted = Wanted(stored(weight), stored(shift), shape, reach, (0,) * count, width, MARGIN)
    return Ramp(
        weight,
        shift,
        wanted,
        AnchorRow(shape.a, shape.b, count),
        Temperature(variant, warm),
        AfterAffine(causal),
        False,
    )


def ramp_heads(
    w: Any,
    t: Any,
    a: float,
    b: float,
    heads: int,
    tokens: int,
    eps0: float = 1e-9,
    *,
    form: str = "paper",
    channels: int = 1,
    radius: float | None = None,
    kappa: float | None = None,
    variant: str = "cold",
    causal: bool = False,
) -> Ramp:
    """clip(w.x + t, a, b) by `heads` heads of `tokens` keys each (v1 theorem 3.2, v2 theorem 3.9).

    >>> m = ramp_heads([1.0, -2.0], 0.5, a=-1, b=1, heads=4, tokens=10)
    >>> X = torch.zeros(1, 10, 2, dtype=torch.float64)
    >>> (m(X) - m.target(X)).abs().max().item() <= m.bound <= m.paper_bound
    True

    `form="tokens"` keeps the keys in memory slots; with `causal` they are tokens that come first. `variant="warm"` is
    token-wise, with telescoping values at the temperature where kink and interior err alike.
    """
    weight, shift = _query(w, t)
    low, high = ends(a, b)
    count = whole("heads", heads, 1, " (H >= 1)")
    keys = whole("tokens", tokens, 3, " (n >= 3: one own anchor and two sentinels)")
    small, width = leak(eps0), whole("channels", channels, 1)
    for name, given in (
        ("w", weight.shape[0] if weight.dim() == 2 else keys),
        ("t", shift.numel() if shift.dim() else keys),
    ):
        if given != keys:
            raise ArgumentError(f"{name} is for {given} tokens, tokens = {keys}; they must agree")
    if variant not in ("cold", "warm"):
        raise ArgumentError(f"variant must be 'cold' or 'warm', got {variant!r}")
    shape, reach = ScalarTarget(low, high), _radius(radius, weight, shift, low, high)
    wanted = Wanted(stored(weight), stored(shift), shape, reach, (0,) * keys, width, MARGIN)
    if variant == "warm":
        _token_wise(weight, shift, "variant='warm'")
        least = 2 * GUARDS + 2
        if keys < least:
            raise ArgumentError(
                f"tokens must be at least {least} for warm heads (two own anchors, {GUARDS} guards a side), got {keys}"
            )
        warm = BALANCED if kappa is None else number("kappa", kappa, positive=True)
        held = AnchorRow(shape.a, shape.b, keys, count, GUARDS)
        return Ramp(weight, shift, wanted, held, Temperature("warm", warm), AfterAffine(causal), True)
    cold = math.log(2 / small) if kappa is None else number("kappa", kappa, positive=True)
    if cold < 1:
        raise ArgumentError(f"kappa must be at least 1 for cold heads, got {cold:g}")
    if form_of(form) == "tokens":
        _token_wise(weight, shift, "form='tokens'")
    elif causal:
        raise ArgumentError(PAPER_IS_NOT_CAUSAL)
    laid_out: Body = PaperHeads() if form == "paper" else AfterAffine(causal)
    held = AnchorRow(shape.a, shape.b, keys, count)
    return Ramp(weight, shift, wanted, held, Temperature("cold", cold), laid_out, True, small)


def relu(w: Any, t: Any, radius: float, anchors: int = 32, eps0: float = 1e-9, **options: Any) -> Ramp:
    """max(w.x + t, 0) for |x| <= radius: the ramp with a = 0 and b the largest that w.x + t can be.

    >>> relu([1.0, -2.0], 0.0, radius=1.0, anchors=31).bound < 0.051
    True
    """
    weight, shift, most = _most(w, t, radius)
    return ramp(weight, shift, 0.0, most, anchors, eps0, radius=radius, **options)


def leaky_relu(
    w: Any, t: Any, radius: float, anchors: int = 32, eps0: float = 1e-9, slope: float = 0.01, **options: Any
) -> Ramp:
    """max(y, 0) + slope min(y, 0), y = w.x + t, for |x| <= radius: anchors on both sides, bent values.

    >>> leaky_relu([1.0, -2.0], 0.0, radius=1.0, anchors=31).bound < 0.11
    True
    """
    weight, shift, most = _most(w, t, radius)
    shape = ScalarTarget(-most, most, number("slope", slope))
    known = {"form": "paper", "G": None, "channels": None, "kappa": None, "margin": MARGIN, "causal": False}
    strange = sorted(set(options) - set(known))
    if strange:
        raise ArgumentError(f"leaky_relu does not take {', '.join(strange)}; it takes {', '.join(known)}")
    count, small = whole("anchors", anchors, 3, " (p > 2)"), leak(eps0)
    return _cold(weight, shift, shape, count, small, radius=number("radius", radius), **{**known, **options})


def hard_tanh(w: Any, t: Any, anchors: int = 32, eps0: float = 1e-9, **options: Any) -> Ramp:
    """clip(w.x + t, -1, 1)."""
    return ramp(w, t, -1.0, 1.0, anchors, eps0, **options)


def clipped_relu(w: Any, t: Any, cap: float, anchors: int = 32, eps0: float = 1e-9, **options: Any) -> Ramp:
    """min(max(w.x + t, 0), cap)."""
    return ramp(w, t, 0.0, number("cap", cap, positive=True), anchors, eps0, **options)


def _cold(
    w: Tensor, t: Tensor, shape: ScalarTarget, count: int, eps0: float, form: str, G: ChannelMap, channels: int | None,
    radius: float, kappa: float | None, margin: float, causal: bool,
) -> Ramp:  # fmt: skip
    channel = _channel_map(G, count)
    width = max(channel) + 1 if channels is None else whole("channels", channels, 1)
    if max(channel) >= width:
        raise ArgumentError(f"G sends an anchor to channel {max(channel)}, but there are {width} channels (from 0)")
    cold = number("kappa", kappa, positive=True) if kappa is not None else math.log(1 / eps0)
    share = number("margin", margin, positive=True)
    if share >= 0.5:
        raise ArgumentError(f"margin must be below 0.5, half of a spacing, got {share:g}")
    if len(set(channel)) > 1 and kappa is None:
        cold /= 2 * share  # so that the other channel's anchor weighs at most eps0 outside of the excluded set
    if cold < 1:
        raise ArgumentError(f"kappa must be at least 1 for a cold head, got {cold:g}; variant='warm' takes less")
    laid_out: Body
    if form_of(form) == "paper":
        if causal:
            raise ArgumentError(PAPER_IS_NOT_CAUSAL)
        tokens = max([x.shape[0] for x in (w, t) if x.dim() == (2 if x is w else 1)], default=1)
        if count < tokens:
            raise ArgumentError(
                f"anchors must be at least the number of tokens ({tokens}) in the paper's form, got {count}"
            )
        laid_out = PaperHead()
    else:
        _token_wise(w, t, "form='tokens'")
        laid_out = Slots(causal)
    wanted = Wanted(stored(w), stored(t), shape, radius, channel, width, share)
    held = AnchorRow(shape.a, shape.b, count)
    return Ramp(w, t, wanted, held, Temperature("cold", cold), laid_out, False, eps0)


def _query(w: Any, t: Any) -> tuple[Tensor, Tensor]:
    weight = tensor("w", w)
    shift = tensor("t", t, weight.dtype)
    if weight.dim() not in (1, 2) or weight.numel() == 0:
        raise ArgumentError(f"w must have shape (d,) or, one per token, (n, d), got {tuple(weight.shape)}")
    if shift.dim() > 1 or shift.numel() == 0:
        raise ArgumentError(f"t must be a number or, one per token, have shape (n,), got {tuple(shift.shape)}")
    if weight.dim() == 2 and shift.dim() == 1 and weight.shape[0] != shift.shape[0]:
        raise ArgumentError(f"w is for {weight.shape[0]} tokens and t for {shift.shape[0]}; they must agree")
    return weight, shift


def _token_wise(w: Tensor, t: Tensor, what: str) -> None:
    if w.dim() == 2 or t.dim() == 1:
        raise ArgumentError(
            f"{what} shares its weights between tokens, so w must be one vector (d,) and t one number; "
            f"got w of shape {tuple(w.shape)} and t of shape {tuple(t.shape)}. Different w_i for each token exist "
            "only in form='paper', where A is not token-wise"
        )


def _radius(radius: float | None, w: Tensor, t: Tensor, a: float, b: float) -> float:
    if radius is not None:
        return number("radius", radius, positive=True)
    norm = float(w.detach().double().abs().sum(-1).min())
    needed = 8 * (max(abs(a), abs(b)) + float(t.detach().double().abs().max())) / norm if norm > 0 else 0.0
    return max(FARTHEST, needed)


def _most(w: Any, t: Any, radius: float) -> tuple[Tensor, Tensor, float]:
    """w, t, and the largest |w.x + t| for |x| <= radius, with room for its rounding."""
    weight, shift = _query(w, t)
    reach = weight.double().abs().sum(-1) * number("radius", radius, positive=True) + shift.double().abs()
    most = float(reach.max()) * (1 + 2.0**-18)
    if most == 0:
        raise ArgumentError("w and t are zero: there is nothing to approximate")
    return weight, shift, most


def _channel_map(G: ChannelMap, count: int) -> tuple[int, ...]:
    if G is None or isinstance(G, int):
        found = [G or 0] * count
    elif callable(G):
        found = [G(k) for k in range(count)]
    else:
        found = [int(g) for g in G]
    if len(found) != count:
        raise ArgumentError(f"G must name a channel for each of the {count} anchors, got {len(found)}")
    if not all(isinstance(g, int) and g >= 0 for g in found):
        raise ArgumentError("G must map anchors to channels 0, 1, ...; got a negative number or something else")
    return tuple(found)
