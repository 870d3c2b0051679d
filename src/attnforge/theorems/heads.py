"""The ramp by H heads of n keys each (arXiv 2504.15956, v1 theorem 3.2, v2 theorem 3.9; lemma A6 of docs/theory.md).

The (n-2) H + 2 anchors of [a, b] are dealt out: head h holds n-2 of its own and one sentinel on each side, the
neighbour's anchor with value 0; the outermost sentinels carry a and b. Paper form: A is token-wise and appends the
identity, Z = [X; I_n], and W_K, W_V read keys and values off the identity block.

**Seams.** The heads add up to one head over all anchors but for max(|a|, |b|) S, where S is the sum of lemma A6(a). For
n >= 4, S <= 2 G^2 q^(3/2) + 6 G q^3/(1 - q^(2(n-2))), q = exp(-kappa), G = 1 + q + q^4 + ... (A6(b) with one guard).

For n = 3 blocks have one anchor (the outermost two). Let a head's last own anchor be at 0, its sentinel at 1, y = t.
- t <= 1/2: what is out begins at 2 on the right and, for a block of one, at -2 on the left. Relative to the nearest
  anchor that is at most G q^2 and G q^4 (or the same with the sides exchanged).
- 1/2 <= t <= 3/2: own/window <= G q^(2t-1), out/all <= G q^(3-2t) + G q^6: together at most G^2 (q^2 + q^6).
- t > 3/2: own/window <= G q^(2t-1) <= G q^2, G q^4, ... for one head after the other.
One head is in the first case, two in the second, the rest on both sides in the third:
S <= G (q^2 + q^4) + 2 G^2 (q^2 + q^6) + 2 G q^2/(1 - q^2).
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..box import Box
from ..certificates.certificate import Certificate, Source, total
from ..certificates.rounding import ASSUMPTIONS, gamma, unit, up
from ..errors import ArgumentError
from ..network import CHUNK, AttentionLayer, Heads
from .cold import PER_STEP, ColdTable, anchors, cold_table, distance, dot_error, head_rounding, nearest
from .instances import PAPER_IS_NOT_CAUSAL, _query, _radius, _token_wise
from .ramp import scalars
from .registers import Tables, over_slots, parts, read_as_is, stacked, tables_of, weights_of
from .result import DTYPES, Construction, Size, ends, form_of, leak, number, sum_of, tensor, whole

NEAR = 8  # a head is looked at closely where y is at most this many spacings away from its keys


def seams(kappa: float, own: int, heads: int) -> float:
    """S, an upper bound: how much of max|value| the heads lose against one head over all anchors."""
    if heads == 1:
        return 0.0
    q = math.exp(-kappa) * (1 + 1e-12)
    series = math.fsum(q ** (j * j) for j in range(40)) + 1e-12
    if own == 1:
        found = series * (q**2 + q**4) + 2 * series**2 * (q**2 + q**6) + 2 * series * q**2 / (1 - q**2)
    else:
        found = 2 * series**2 * q**1.5 + 6 * series * q**3 / (1 - q ** (2 * own))
    return found * (1 + 1e-12)


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
) -> RampHeads:
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
    reach = _radius(radius, weight, shift, low, high)
    if variant == "warm":
        from .warm_heads import WarmHeads

        _token_wise(weight, shift, "variant='warm'")
        return WarmHeads.checked(weight, shift, low, high, count, keys, kappa, small, reach, width, causal)
    cold = math.log(2 / small) if kappa is None else number("kappa", kappa, positive=True)
    if cold < 1:
        raise ArgumentError(f"kappa must be at least 1 for cold heads, got {cold:g}")
    if form_of(form) == "tokens":
        _token_wise(weight, shift, "form='tokens'")
    elif causal:
        raise ArgumentError(PAPER_IS_NOT_CAUSAL)
    arguments = (weight, shift, low, high, count, keys, cold, small, reach, width)
    built = PaperHeads(*arguments) if form == "paper" else TokenHeads(*arguments, causal=causal)
    built.judged((high - low) / 2, "use float64, fewer heads or a smaller radius")
    return built


class RampHeads(Construction):
    """The many-head ramp; `theorems.ramp_heads` builds it."""

    theorem = "arXiv 2504.15956 v1 theorem 3.2 (v2 theorem 3.9)"
    w: Tensor
    t: Tensor

    def __init__(
        self, w: Tensor, t: Tensor, a: float, b: float, heads: int, keys: int, kappa: float, eps0: float, radius: float,
        channels: int,
    ):  # fmt: skip
        super().__init__()
        self.a, self.b, self.heads, self.keys, self.kappa = a, b, heads, keys, kappa
        self.eps0, self.radius, self.channels = eps0, radius, channels
        self.register_buffer("w", w)
        self.register_buffer("t", t)
        self.box = Box.cube(-radius, radius, shape=w.shape[-1])
        self.places = self.dealt()
        self.step = self.places[1] - self.places[0]
        self.beta = Fraction(kappa) / self.step**2
        self.paper_bound = max(abs(a), abs(b)) * eps0 + (b - a) / ((keys - 2) * heads)

    def dealt(self) -> list[Fraction]:
        """All anchors."""
        return anchors(Fraction(self.a), Fraction(self.b), (self.keys - 2) * self.heads + 2)

    def window(self, h: int) -> list[Fraction]:
        """The anchors that head h sees."""
        return self.places[h * (self.keys - 2) : h * (self.keys - 2) + self.keys]

    def ideal_values(self, h: int) -> list[Fraction]:
        """The values of head h: its own anchors, 0 for sentinels, a and b at the very ends."""
        found = list(self.window(h))
        found[0] = found[0] if h == 0 else Fraction(0)
        found[-1] = found[-1] if h == self.heads - 1 else Fraction(0)
        return found

    @property
    def dtype(self) -> torch.dtype:
        return self.w.dtype

    @property
    def anchors(self) -> np.ndarray:
        """All anchors, heads one after the other without repeats."""
        return np.array([float(place) for place in self.places])

    def stored(self, h: int) -> tuple[ColdTable, np.ndarray, float]:
        """Head h's stored keys beside the ideal ones, its values, and where its query's 0 lies."""
        raise NotImplementedError

    def extra_query(self) -> float:
        """How far the computed w.x + t can be from the exact one beyond the rounding of the sum."""
        return 0.0

    def scalar(self, X: Tensor) -> Tensor:
        """y = w.x + t in float64."""
        return scalars(X.double(), self.w.double(), self.t.double())

    def target(self, X: Tensor) -> Tensor:
        y = self.scalar(X).clamp(self.a, self.b)
        return torch.nn.functional.pad(y.unsqueeze(-1), (0, self.channels - 1))

    def check_shape(self, x: Tensor) -> None:
        n, d = self.keys if self.form == "paper" else "tokens", self.w.shape[-1]
        if x.dim() < 2 or x.shape[-1] != d or (self.form == "paper" and x.shape[-2] != n):
            raise ArgumentError(f"expected X of shape (batch, {n}, {d}), got {tuple(x.shape)}")

    def points(self, count: int, seed: int = 0) -> Tensor:
        n = self.keys
        rows = max(1, count // n)
        return super().points(rows * n, seed)[: rows * n].reshape(rows, n, -1)

    def example_input(self) -> tuple[Tensor, ...]:
        return (self.points(2 * self.keys),)

    def reach(self) -> tuple[float, float]:
        """The largest |y| that can be computed, and how far y can be off."""
        w, t = self.w.double(), self.t.double()
        size = float(up(float((w.abs().sum(-1) * self.radius + t.abs()).max()), w.shape[-1] + 4))
        error = dot_error(w.shape[-1], size, self.dtype)
        return size + error, float(up(error + self.extra_query(), 2))

    def _edges(self, most: float) -> np.ndarray:
        step, first, last = float(self.step), self.a, self.b
        inside = first + step * np.arange((len(self.places) - 1) * PER_STEP + 1) / PER_STEP
        outside = step * np.concatenate([np.arange(1, NEAR + 2), (NEAR + 2) * 2.0 ** np.arange(0, 60)])
        edges = np.concatenate([first - outside[::-1], inside, last + outside])
        return np.concatenate([[-most], edges[(edges > -most) & (edges < most)], [most]])

    def recertify(self) -> Certificate:
        most, query = self.reach()
        edges, step, u = self._edges(most), float(self.step), unit(self.dtype)
        rounding, far, largest = np.zeros(len(edges) - 1), 0.0, max(abs(self.a), abs(self.b))
        for h in range(self.heads):
            table, values, shift = self.stored(h)
            window, error = self.window(h), distance(values, self.ideal_values(h))
            start, stop = float(window[0]) - NEAR * step, float(window[-1]) + NEAR * step
            low, high = edges[:-1] - shift, edges[1:] - shift
            slack = 2.0**-50 * (np.abs(edges[:-1]) + np.abs(edges[1:]) + abs(shift)) if shift else 0.0
            near = (edges[1:] > start) & (edges[:-1] < stop)
            near |= (h == 0) & (edges[:-1] < start) | (h == self.heads - 1) & (edges[1:] > stop)
            found = head_rounding(
                table, values, error, (low - slack)[near], (high + slack)[near], self.dtype, inexact=bool(shift)
            )
            rounding[near] += found
            # elsewhere the sentinel wins by kappa (1 + 2 s), s >= NEAR spacings, and errors grow far slower with s
            reach = max(abs(self.a), abs(self.b)) + NEAR * step + abs(shift)
            logits = float(np.max(np.abs(table.slope))) * reach + float(np.max(np.abs(table.offset)))
            off = float(np.max(table.slope_error)) * reach + float(np.max(table.offset_error)) + 8 * u * logits
            gap = self.kappa * (1 + 1.9 * NEAR) - 4 * off
            far = max(far, 4 * self.keys * math.exp(-gap) if gap > 0 and 32 * u * self.keys < 0.05 else math.inf)
        far = far / (1 - math.exp(-1.9 * self.kappa)) * 2 * (largest + 1)
        added = float(gamma(self.heads + 1, u)) * 1.01 * (2 * largest + step) if self.heads > 1 else 0.0
        terms: dict[tuple[str, Source], float] = {
            ("selection", "interpolation"): float(up(step / 2)),
            ("seams", "leak"): float(up(largest * seams(self.kappa, self.keys - 2, self.heads))),
            ("heads", "rounding"): float(
                up(np.max(rounding) * (1 + 2.0**-40) + (far if self.heads > 1 else 0.0) + added)
            ),
            ("w.x + t", "rounding"): query,
        }
        notes: dict[tuple[str, Source], str] = {
            ("selection", "interpolation"): f"half of the spacing {step:.3g}",
            ("w.x + t", "rounding"): f"|x| at most {self.radius:g}",
        }
        ledger = sum_of({key: value for key, value in terms.items() if value > 1e-300}, notes)
        return Certificate(
            "certified", total(x.value for x in ledger), DTYPES[self.dtype], f"clip(w.x + t, {self.a:g}, {self.b:g})",
            self.box, ledger, lemmas=("A2", "A5", "A6", "R5"), assumptions=ASSUMPTIONS,
        )  # fmt: skip

    @property
    def size(self) -> Size:
        table, _, shift = self.stored(self.heads - 1)
        reach = self.reach()[0] + abs(shift)
        logit = float(np.max(np.abs(table.slope)) * reach + np.max(np.abs(table.offset)))
        count = sum(p.numel() for p in self.parameters())
        return Size(1, self.heads, self.heads * self.keys, count, logit)


class PaperHeads(RampHeads):
    """Z = [X; I_n]; every head reads the same query (2y, -1) and its own keys B (k, k (L_k + L_0))."""

    form = "paper"

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        B, dtype, keys, values = self.beta * self.step, self.w.dtype, [], []
        for h in range(self.heads):
            window = self.window(h)
            pairs = [(B * k, B * k * (place + window[0])) for k, place in enumerate(window)]
            keys.append(np.stack([nearest([x[i] for x in pairs], dtype) for i in (0, 1)], -1))
            values.append(nearest(self.ideal_values(h), dtype))
        self.key = nn.Parameter(torch.from_numpy(np.stack(keys)).to(dtype))  # (head, key, 2)
        self.value = nn.Parameter(torch.from_numpy(np.stack(values)).to(dtype))  # (head, key)

    def attention(self, X: Tensor) -> Tensor:
        """The softmax weights, (batch, heads, tokens, keys)."""
        return self._weights(scalars(X, self.w, self.t))

    def _weights(self, y: Tensor) -> Tensor:
        query = torch.stack([2 * y, -torch.ones_like(y)], -1).unsqueeze(-3)
        return torch.softmax(query @ self.key.transpose(-2, -1), -1)

    def _sum(self, y: Tensor) -> Tensor:
        return (self._weights(y) @ self.value.unsqueeze(-1)).sum(-3)

    def core(self, *inputs: Tensor) -> Tensor:
        y = scalars(inputs[0], self.w, self.t)
        step = max(1, CHUNK // (self.heads * self.keys))
        if torch.compiler.is_compiling() or y.numel() <= step:
            total_ = self._sum(y)
        else:
            total_ = torch.cat([self._sum(part) for part in y.flatten().split(step)]).reshape(*y.shape, 1)
        return torch.nn.functional.pad(total_, (0, self.channels - 1))

    def stored(self, h: int) -> tuple[ColdTable, np.ndarray, float]:
        key, window = self.key.detach()[h].double().numpy(), self.window(h)
        table = cold_table(2 * key[:, 0], -key[:, 1], window, self.beta, window[0])
        return table, self.value.detach()[h].double().numpy(), 0.0

    @property
    def matrices(self) -> dict[str, Tensor]:
        """A(X) = [X; I_n] (or [y; I_n], one w per token); W_K, W_Q, W_V, W_O have one slice per head.

        The output is sum_h W_O[h] W_V[h] Z softmax((W_K[h] Z)^T W_Q[h] Z), Z = sum_id A[:, :, i, d] X[i, d] + A_0.
        """
        n, d, dtype = self.keys, self.w.shape[-1], self.dtype
        inner = 1 if self.w.dim() == 2 else d
        A, A_0 = torch.zeros(inner + n, n, n, d, dtype=dtype), torch.zeros(inner + n, n, dtype=dtype)
        for i in range(n):
            A[:inner, i, i] = self.w[i][None] if self.w.dim() == 2 else torch.eye(d, dtype=dtype)
        A_0[inner:] = torch.eye(n, dtype=dtype)
        W_Q = torch.zeros(self.heads, 2, inner + n, dtype=dtype)
        W_Q[:, 0, :inner] = 2 * (torch.ones(1, dtype=dtype) if self.w.dim() == 2 else self.w)
        W_Q[:, 0, inner:], W_Q[:, 1, inner:] = 2 * self.t, -1.0
        W_K = torch.cat([torch.zeros(self.heads, 2, inner, dtype=dtype), self.key.detach().transpose(1, 2)], -1)
        W_V = torch.cat([torch.zeros(self.heads, 1, inner, dtype=dtype), self.value.detach()[:, None]], -1)
        W_O = torch.eye(self.channels, 1, dtype=dtype).expand(self.heads, -1, -1)
        return {"A": A, "A_0": A_0, "W_K": W_K, "W_Q": W_Q, "W_V": W_V, "W_O": W_O}


class TokenHeads(RampHeads):
    """An affine layer makes y, a second layer has H heads over memory slots, each centred on its own block."""

    form = "tokens"

    def __init__(self, *arguments: Any, causal: bool = False):
        super().__init__(*arguments)
        self.causal = causal
        dtype, keys, values, biases, self.centres = self.w.dtype, [], [], [], []
        for h in range(self.heads):
            window = self.window(h)
            centre = Fraction(float(nearest([(window[0] + window[-1]) / 2], dtype)[0]))
            away = [place - centre for place in window]
            keys.append(np.stack([nearest([2 * self.beta * x for x in away], dtype),
                                  nearest([-self.beta * x * x for x in away], dtype)], -1))  # fmt: skip
            values.append(nearest(self.ideal_values(h), dtype)[:, None])
            biases.append([-float(centre), 1.0])
            self.centres.append(centre)
        H = self.heads
        group = Heads(
            "memory", W_Q=torch.tensor([[[1.0, 0.0]]], dtype=dtype).expand(H, 1, 2), b_Q=tensor("b", biases, dtype),
            M_K=torch.from_numpy(np.stack(keys)).to(dtype), M_V=torch.from_numpy(np.stack(values)).to(dtype),
            W_O=torch.eye(1, self.channels, dtype=dtype).expand(H, 1, -1), purpose="ramp",
        )  # fmt: skip
        self.net = stacked(AttentionLayer([], S=self.w[:, None], s=self.t.reshape(1)), over_slots(group, causal))

    def tables(self) -> Tables:
        """The tables of the heads as stored."""
        return read_as_is(tables_of(parts(self.net)[1]))

    def core(self, *inputs: Tensor) -> Tensor:
        return self.net(inputs[0])

    def attention(self, X: Tensor) -> Tensor:
        """The softmax weights, (batch, heads, tokens, keys)."""
        first, second = parts(self.net)
        return weights_of(second, first(X)).transpose(-3, -2)

    def stored(self, h: int) -> tuple[ColdTable, np.ndarray, float]:
        found, shift = self.tables(), self.centres[h]
        key, value = found.M_K[h].double().numpy(), found.M_V[h, :, 0].double().numpy()
        if found.b_Q[h].tolist() != [-float(shift), 1.0] or found.W_Q[h].flatten().tolist() != [1.0, 0.0]:
            raise ArgumentError(f"the query of head {h} was changed: it must read (y - {float(shift):g}, 1)")
        table = cold_table(key[:, 0], key[:, 1], [x - shift for x in self.window(h)], self.beta, Fraction(0))
        return table, value, float(shift)

    def extra_query(self) -> float:
        first = parts(self.net)[0]
        assert first.S is not None
        assert first.s is not None
        changed = float((first.S.detach().double()[:, 0] - self.w.double()).abs().sum()) * self.radius
        return changed + abs(float(first.s.detach().double() - self.t.double()))

    @property
    def matrices(self) -> dict[str, Tensor]:
        """The tables of the heads, and w, t of the affine layer."""
        return {"w": self.w, "t": self.t, **self.tables()._asdict()}
