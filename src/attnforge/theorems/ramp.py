"""One head, p anchors: clip(w.x + t, a, b) for every token (arXiv 2504.15956, v1 theorem 3.1, v2 theorem 3.4).

Paper form, lemma A2. The affine map A makes p columns out of n tokens, p >= n: column i holds y_i = w_i.x_i + t_i and
1 (i <= n), column k holds k, k (L_k + L_0) and L_k e_G(k), where L_k = a + k (b-a)/(p-1), k = 0, ..., p-1. With
B = beta (b-a)/(p-1) the logit of key k for query i is

    B (2 k y_i - k (L_k + L_0)) = -beta ((y_i - L_k)^2 - (y_i - L_0)^2),

W_V reads L_k e_G(k), and W_O keeps the first n columns. Token-wise form: the same anchors, centred, as memory slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..box import Box
from ..certificates.certificate import Certificate, Source, total
from ..certificates.rounding import ASSUMPTIONS, up
from ..errors import ArgumentError, PrecisionError
from ..network import CHUNK
from .cold import ColdTable, anchors, cells, cold_table, distance, dot_error, head_rounding, nearest
from .result import DTYPES, Construction, Size, sum_of


def scalars(X: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """y_i = w_i . x_i + t_i, for one w or one per token."""
    return (X * w).sum(-1) + t if w.dim() == 2 else X @ w + t


class ScalarTarget:
    """A monotone piecewise linear function of y = w.x + t: clip(y, a, b), bent by `slope` below 0."""

    def __init__(self, a: float, b: float, slope: float | None = None):
        self.a, self.b, self.slope = Fraction(a), Fraction(b), None if slope is None else Fraction(slope)

    def exact(self, at: Fraction) -> Fraction:
        return at if self.slope is None or at >= 0 else self.slope * at

    def value(self, y: Tensor) -> Tensor:
        kept = y.clamp(float(self.a), float(self.b))
        return kept if self.slope is None else torch.where(kept >= 0, kept, float(self.slope) * kept)

    @property
    def lipschitz(self) -> float:
        return 1.0 if self.slope is None else max(1.0, abs(float(self.slope)))

    @property
    def largest(self) -> float:
        return max(abs(float(self.exact(self.a))), abs(float(self.exact(self.b))))

    @property
    def spread(self) -> float:
        if self.slope is None:
            return 0.0  # lemma A2(b) needs no leak term for the ramp itself
        found = [float(self.exact(x)) for x in (self.a, self.b, Fraction(0))]
        return max(found) - min(found)

    def text(self) -> str:
        ramp = f"clip(w.x + t, {float(self.a):g}, {float(self.b):g})"
        return ramp if self.slope is None else f"leaky_relu(w.x + t, {float(self.slope):g}) on |x| <= radius"


class Ramp(Construction):
    """The cold head of v1 3.1 / v2 3.4 and its relatives; `theorems.ramp` builds it.

    `excluded` lists the intervals of y where the bound does not speak, which is only where the output channel map G
    changes between neighbouring anchors.
    """

    theorem = "arXiv 2504.15956 v1 theorem 3.1 (v2 theorem 3.4)"
    w: Tensor
    t: Tensor

    def __init__(
        self, w: Tensor, t: Tensor, shape: ScalarTarget, count: int, kappa: float, eps0: float, radius: float,
        channel: Sequence[int], channels: int, margin: float,
    ):  # fmt: skip
        super().__init__()
        self.w, self.t = nn.Parameter(w), nn.Parameter(t)
        self.shape, self.count, self.eps0, self.radius, self.margin = shape, count, eps0, radius, margin
        self.channel, self.channels = tuple(channel), channels
        self.places = anchors(shape.a, shape.b, count)
        self.step = self.places[1] - self.places[0]
        self.wanted_kappa = kappa
        self.box = Box.cube(-radius, radius, shape=w.shape[-1])
        self.paper_bound = max(abs(float(shape.a)), abs(float(shape.b))) * eps0 + float(shape.b - shape.a) / count

    # what the two forms answer differently
    beta: Fraction

    def table(self) -> ColdTable:
        """The stored keys next to the ideal ones, in the coordinate of the query."""
        raise NotImplementedError

    def stored_values(self) -> np.ndarray:
        """The stored values, (anchor, channel)."""
        raise NotImplementedError

    def query(self) -> tuple[float, float, float]:
        """Least and largest computed query, and how far it can be from the exact one."""
        raise NotImplementedError

    @property
    def kappa(self) -> float:
        """The scale-free inverse temperature beta (b-a)^2/(p-1)^2: large is cold."""
        return float(self.beta * self.step**2)

    @property
    def anchors(self) -> np.ndarray:
        """The anchors L_k."""
        return np.array([float(place) for place in self.places])

    def check_shape(self, x: Tensor) -> None:
        d, per_token = self.w.shape[-1], self.w.dim() == 2 or self.t.dim() == 1
        n = max(self.w.shape[0] if self.w.dim() == 2 else 1, self.t.shape[0] if self.t.dim() == 1 else 1)
        if x.dim() < 2 or x.shape[-1] != d or (per_token and x.shape[-2] != n):
            wanted = f"(batch, {n if per_token else 'tokens'}, {d})"
            raise ArgumentError(f"expected X of shape {wanted}, got {tuple(x.shape)}")
        if self.form == "paper" and x.shape[-2] > self.count:
            raise ArgumentError(
                f"the paper's form needs at least as many anchors as tokens, got {self.count} anchors and "
                f"{x.shape[-2]} tokens; use more anchors or form='tokens'"
            )

    def scalar(self, X: Tensor) -> Tensor:
        """y = w.x + t in float64."""
        return scalars(X.double(), self.w.detach().double(), self.t.detach().double())

    @property
    def constant(self) -> bool:
        """Whether all anchors write to one channel."""
        return len(set(self.channel)) == 1

    def target(self, X: Tensor) -> Tensor:
        y = self.scalar(X)
        out = torch.zeros(*y.shape, self.channels, dtype=torch.float64)
        where = ((y - float(self.shape.a)) / float(self.step)).round().clamp(0, self.count - 1).long()
        return out.scatter(-1, torch.tensor(self.channel)[where].unsqueeze(-1), self.shape.value(y).unsqueeze(-1))

    @property
    def excluded(self) -> tuple[tuple[float, float], ...]:
        """Where anchors of different channels are about equally near; empty for a constant channel map."""
        if self.constant:
            return ()
        wide = self.margin * float(self.step) + self.query()[2]
        middles = [float((x + y) / 2) for x, y in zip(self.places, self.places[1:], strict=False)]
        turns = [m for m, g, h in zip(middles, self.channel, self.channel[1:], strict=False) if g != h]
        return tuple((float(np.nextafter(m - wide, -np.inf)), float(np.nextafter(m + wide, np.inf))) for m in turns)

    def recertify(self) -> Certificate:
        table, values = self.table(), self.stored_values()
        least, most, query = self.query()
        shift = float(self.places[0]) - table.first  # of y against the query's coordinate
        low, high = cells(table, least, most)
        if not self.constant:
            # the computed query may enter an excluded interval by its own error, but not the core of it
            low, high = _without(low, high, [(x - shift + query, y - shift - query) for x, y in self.excluded])
        rounding = 0.0
        for c in sorted({0, *self.channel}):
            ideal = [
                self.shape.exact(x) if g == c else Fraction(0) for x, g in zip(self.places, self.channel, strict=True)
            ]
            error = distance(values[:, c], ideal)
            rounding = max(rounding, float(np.max(head_rounding(table, values[:, c], error, low, high, self.dtype))))
        lipschitz, kappa = self.shape.lipschitz, self.kappa
        if self.beta * self.step**2 < 1:
            raise PrecisionError(f"kappa = {kappa:.3g} is not cold; lemma A2 needs kappa >= 1")
        astray = float(up(math.exp(-kappa) * (1 + 1e-9)))
        lost = astray * self.shape.spread
        if not self.constant:
            lost += (astray + math.exp(-2 * kappa * self.margin) * (1 + 1e-9)) * self.shape.largest
        terms: dict[tuple[str, Source], float] = {
            ("selection", "interpolation"): float(up(lipschitz * float(self.step) / 2)),
            ("selection", "leak"): float(up(lost)) if lost else 0.0,
            ("head", "rounding"): rounding,
            ("w.x + t", "rounding"): float(up(lipschitz * query)),
        }
        notes: dict[tuple[str, Source], str] = {
            ("selection", "interpolation"): f"half of the spacing {float(self.step):.3g}",
            ("head", "rounding"): f"keys and values as stored, {DTYPES[self.dtype]}",
            ("w.x + t", "rounding"): f"|x| at most {self.radius:g}",
        }
        terms = {key: value for key, value in terms.items() if value > 0}
        ledger = sum_of(terms, notes)
        return Certificate(
            "certified", total(term.value for term in ledger), DTYPES[self.dtype], self.shape.text(), self.box, ledger,
            lemmas=("A2", "A5", "R5"), assumptions=ASSUMPTIONS,
        )  # fmt: skip

    def points(self, count: int, seed: int = 0) -> Tensor:
        n = self.tokens_shown()
        return super().points(count * n, seed)[: count * n].reshape(count, n, -1)

    def tokens_shown(self) -> int:
        """How many tokens an example has."""
        if self.w.dim() == 2 or self.t.dim() == 1:
            return int(self.w.shape[0] if self.w.dim() == 2 else self.t.shape[0])
        return min(4, self.count)

    def example_input(self) -> tuple[Tensor, ...]:
        return (self.points(2),)

    def largest_logit(self) -> float:
        table = self.table()
        reach = max(abs(x) for x in self.query()[:2])
        return float(np.max(np.abs(table.slope)) * reach + np.max(np.abs(table.offset)))


class PaperRamp(Ramp):
    """The paper's own matrices: A extends the sequence to p columns."""

    form = "paper"

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        dtype = self.w.dtype
        B = float(nearest([Fraction(self.wanted_kappa) / self.step], dtype)[0])
        while Fraction(B) * self.step < Fraction(self.wanted_kappa) and self.wanted_kappa == 1.0:
            B = float(torch.nextafter(torch.tensor(B, dtype=dtype), torch.tensor(math.inf, dtype=dtype)))
        index = torch.arange(self.count, dtype=dtype)
        square = nearest([k * (place + self.places[0]) for k, place in enumerate(self.places)], dtype)
        value = nearest([self.shape.exact(place) for place in self.places], dtype)
        self.beta = Fraction(B) / self.step
        self.B = nn.Parameter(torch.tensor(B, dtype=dtype))
        self.index = nn.Parameter(index)
        self.square = nn.Parameter(torch.from_numpy(square).to(dtype))
        table = torch.zeros(self.count, self.channels, dtype=dtype)
        table[torch.arange(self.count), torch.tensor(self.channel)] = torch.from_numpy(value).to(dtype)
        self.value = nn.Parameter(table)

    def keys(self) -> Tensor:
        """K, one row per anchor: B (k, k (L_k + L_0))."""
        return torch.stack([self.B * self.index, self.B * self.square], -1)

    def attention(self, X: Tensor) -> Tensor:
        """The softmax weights, (batch, tokens, anchors): each token's column of the paper's softmax."""
        return self._weights(scalars(X, self.w, self.t))

    def _weights(self, y: Tensor) -> Tensor:
        query = torch.stack([2 * y, -torch.ones_like(y)], -1)
        return torch.softmax(query @ self.keys().T, -1)

    def core(self, *inputs: Tensor) -> Tensor:
        y = scalars(inputs[0], self.w, self.t)
        step = max(1, CHUNK // self.count)
        if torch.compiler.is_compiling() or y.numel() <= step:
            return self._weights(y) @ self.value
        rows = torch.cat([self._weights(part) @ self.value for part in y.flatten().split(step)])
        return rows.reshape(*y.shape, -1)

    def table(self) -> ColdTable:
        keys = self.keys().detach().double().numpy()
        return cold_table(2 * keys[:, 0], -keys[:, 1], self.places, self.beta, self.places[0])

    def stored_values(self) -> np.ndarray:
        return np.asarray(self.value.detach().double().numpy())

    def query(self) -> tuple[float, float, float]:
        w, t = self.w.detach().double(), self.t.detach().double()
        size = float(up(float((w.abs().sum(-1) * self.radius + t.abs()).max()), w.shape[-1] + 4))
        error = dot_error(w.shape[-1], size, self.dtype)
        return -size - error, size + error, error

    @property
    def size(self) -> Size:
        parameters = sum(p.numel() for p in self.parameters())
        return Size(1, 1, self.count, parameters, self.largest_logit())

    @property
    def matrices(self) -> dict[str, Tensor]:
        """A is (rows, p, n, d) with constant part A_0 (rows, p): A(X) = sum_id A[:, :, i, d] X[i, d] + A_0.

        The rows of A(X) are y, 1, k, k (L_k + L_0) and the channels. Then the output is
        W_V A(X) softmax((W_K A(X))^T W_Q A(X)) W_O, softmax over each column, (channels, n).
        """
        n, p, d, dtype = self.tokens_shown(), self.count, self.w.shape[-1], self.dtype
        rows = 4 + self.channels
        w, t = self.w.detach().expand(n, d), self.t.detach().expand(n)
        A, A_0 = torch.zeros(rows, p, n, d, dtype=dtype), torch.zeros(rows, p, dtype=dtype)
        A[0, range(n), range(n)] = w
        A_0[0, :n], A_0[1, :n] = t, 1.0
        A_0[2], A_0[3], A_0[4:] = self.index.detach(), self.square.detach(), self.value.detach().T
        W_Q, W_K = torch.zeros(2, rows, dtype=dtype), torch.zeros(2, rows, dtype=dtype)
        W_Q[0, 0], W_Q[1, 1], W_K[0, 2], W_K[1, 3] = 2.0, -1.0, self.B.item(), self.B.item()
        W_V = torch.cat([torch.zeros(self.channels, 4, dtype=dtype), torch.eye(self.channels, dtype=dtype)], 1)
        return {"A": A, "A_0": A_0, "W_K": W_K, "W_Q": W_Q, "W_V": W_V, "W_O": torch.eye(p, n, dtype=dtype)}


def _without(low: np.ndarray, high: np.ndarray, holes: Sequence[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    """The parts of cells outside of the holes."""
    edges = np.unique(np.concatenate([low, high[-1:], *(np.array(hole) for hole in holes)]))
    edges = edges[(edges >= low[0]) & (edges <= high[-1])]
    left, right = edges[:-1], edges[1:]
    kept = np.ones(len(left), dtype=bool)
    for start, stop in holes:
        kept &= ~((left >= start) & (right <= stop))
    if not kept.any():
        raise PrecisionError("G changes the channel so often that no input is left where the bound holds; lower margin")
    return left[kept], right[kept]
