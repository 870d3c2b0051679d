"""One layer, one head: cells argmax_j a_j.x + b_j of a max-affine function (arXiv 2504.19901; lemma E4).

Centres c_j, a_j = 2 c_j, b_j = -|c_j|^2: the cells are the Voronoi cells of the centres. Keys beta (a_j, b_j), query
(x, 1), values f(c_j). In self-attention the keys are constants of the layer (memory slots; in the paper's form they
come from the columns that A appends); in cross-attention they are read off a second sequence, whose tokens carry
(beta a_j, beta b_j, f(c_j)).

With rho the largest distance of a point of the box from its nearest centre, tau > 0, J centres and logits computed with
errors of at most d: slots whose centre is at squared distance more than tau beyond the nearest weigh at most
exp(-beta tau + 2d) each, all others have |x - c_j|^2 <= rho^2 + tau. So

    |head - f| <= omega(sqrt(rho^2 + tau)) + J exp(-beta tau + 2d) max_j |f(c_j) - f(x)| + rounding of a mean.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..box import Box
from ..certify.certificate import Certificate, Source, total
from ..certify.rounding import ASSUMPTIONS, EXP_ULPS, TINY, gamma, unit, up
from ..errors import ArgumentError, CertificateError, PrecisionError
from ..network import AttentionLayer, Heads
from .cold import nearest
from .grid import SUSPECTS, Function, evaluated, refuse_between
from .modulus import Modulus, modulus_of
from .result import DTYPES, Construction, Size, leak, sum_of, tensor, whole

SOFTNESS = 0.1  # tau over rho^2
PROBES = (4096, 128, 32, 16)  # small boxes a side, by dimension, for the covering radius of scattered centres


def max_affine(
    f: Function,
    box: Box,
    cells: int | Any = 256,
    *,
    lipschitz: float | None = None,
    modulus: Modulus | None = None,
    attention: str = "self",
    eps0: float = 1e-9,
    dtype: torch.dtype = torch.float64,
) -> MaxAffine:
    """f by one attention layer with one head, one key per cell (arXiv 2504.19901).

    >>> norm = lambda x: x.norm(dim=-1, keepdim=True)
    >>> m = max_affine(norm, Box.cube(-1, 1, shape=2), cells=400, lipschitz=1.0)
    >>> X = torch.rand(3, 7, 2, dtype=torch.float64)  # every token is a point of the box
    >>> m.form, (m(X) - norm(X)).abs().max().item() <= m.bound < 0.08
    ('tokens', True)

    A box of shape (d,) makes a token-wise network: f maps (batch, d) to (batch, channels). A box of shape (n, d) makes
    the paper's form: f maps sequences to sequences. `cells` is the number of cells, or the centres themselves. With
    `attention="cross"` keys and values come from a second sequence, `m.context`.
    """
    if not isinstance(box, Box) or len(box.shape) not in (1, 2) or box.names:
        raise ArgumentError("box must be a Box of tokens, Box.cube(lo, hi, shape=d), or of sequences, shape=(n, d)")
    if attention not in ("self", "cross"):
        raise ArgumentError(f"attention must be 'self' or 'cross', got {attention!r}")
    if dtype not in DTYPES:
        raise ArgumentError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    centres, reach = _grid_centres(box, whole("cells", cells, 1)) if isinstance(cells, int) else _given(box, cells)
    values = evaluated(f, centres.reshape(-1, *box.shape), box)
    omega = modulus_of(lipschitz, modulus)
    m = MaxAffine(f, box, centres, values.flatten(1), reach, omega, leak(eps0), attention, dtype)
    if lipschitz is not None:
        _refuse_steeper(f, box, centres, values.flatten(1), float(lipschitz))
    m.attach(m.recertify())
    return m


class MaxAffine(Construction):
    """One head that picks the cell of x; `theorems.max_affine` builds it."""

    theorem = "arXiv 2504.19901, max-affine partition"

    def __init__(
        self, f: Function, box: Box, centres: Tensor, values: Tensor, reach: float, omega: Modulus | None, eps0: float,
        attention: str, dtype: torch.dtype,
    ):  # fmt: skip
        super().__init__()
        self.f, self.box, self.centres, self.samples, self.omega = f, box, centres, values, omega
        self.reach, self.eps0, self.form = reach, eps0, "tokens" if len(box.shape) == 1 else "paper"
        J, D = centres.shape
        self.middle = [Fraction(float(x)) for x in nearest(_middle(box), dtype)]
        self.tau = SOFTNESS * reach**2
        self.beta = Fraction(2.0 ** math.ceil(math.log2(math.log(J / eps0) / self.tau)))
        slopes, offsets = self.ideal_keys()
        keys = np.concatenate([nearest([x for row in slopes for x in row], dtype).reshape(J, D),
                               nearest(offsets, dtype)[:, None]], 1)  # fmt: skip
        query = torch.cat([torch.eye(D, dtype=dtype), torch.zeros(D, 1, dtype=dtype)], 1)[None]
        bias = torch.tensor([[*(-float(x) for x in self.middle), 1.0]], dtype=dtype)
        table, read = torch.from_numpy(keys).to(dtype), values.to(dtype)
        eye = torch.eye(read.shape[-1], dtype=dtype)[None]
        self.layer: AttentionLayer | Cross
        if attention == "self":
            group = Heads("memory", W_Q=query, b_Q=bias, M_K=table[None], M_V=read[None], W_O=eye, purpose="cells")
            self.layer = AttentionLayer([group])
        else:
            self.layer = Cross(query[0], bias[0], table, read)

    def ideal_keys(self) -> tuple[list[list[Fraction]], list[Fraction]]:
        """beta (2 c, -|c|^2), centred on the middle of the box, exactly."""
        rows = [[Fraction(x) - m for x, m in zip(row, self.middle, strict=True)] for row in self.centres.tolist()]
        return [[2 * self.beta * x for x in row] for row in rows], [
            -self.beta * sum(x * x for x in row) for row in rows
        ]

    @property
    def context(self) -> Tensor:
        """The second sequence of cross-attention: one token per cell, (beta a_j, beta b_j, f(c_j))."""
        if not isinstance(self.layer, Cross):
            raise ArgumentError("only attention='cross' has a second sequence")
        return self.layer.context.detach()

    def tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """W_Q, b_Q, keys and values as stored."""
        if isinstance(self.layer, Cross):
            D = len(self.middle)
            context = self.layer.context.detach()
            return self.layer.W_Q.detach(), self.layer.b_Q.detach(), context[:, : D + 1], context[:, D + 1 :]
        g = self.layer.heads()[0]
        return g.W_Q.detach()[0], g.b_Q.detach()[0], g.M_K.detach()[0], g.M_V.detach()[0]

    def check_shape(self, x: Tensor) -> None:
        wanted = ("tokens", *self.box.shape) if self.form == "tokens" else self.box.shape
        if x.dim() < 2 or tuple(x.shape[x.dim() - len(self.box.shape) :]) != self.box.shape:
            raise ArgumentError(f"expected X of shape (batch, {', '.join(map(str, wanted))}), got {tuple(x.shape)}")

    def guard(self, *inputs: Tensor) -> None:
        if len(inputs) == 2 and isinstance(self.layer, Cross):
            self.check_tensor(inputs[1], "context")
            inputs = inputs[:1]
        super().guard(*inputs)

    def core(self, *inputs: Tensor) -> Tensor:
        X = inputs[0]
        Z = X.flatten(-2).unsqueeze(-2) if self.form == "paper" else X
        out: Tensor = self.layer(Z, *inputs[1:]) if isinstance(self.layer, Cross) else self.layer(Z)
        return out.squeeze(-2).unflatten(-1, (self.box.shape[0], -1)) if self.form == "paper" else out

    def attention(self, X: Tensor) -> Tensor:
        """The softmax weights over cells: (batch, tokens, cells), or (batch, cells) for sequences."""
        Z = X.flatten(-2).unsqueeze(-2) if self.form == "paper" else X
        weights = (
            self.layer.weights(Z) if isinstance(self.layer, Cross) else self.layer.heads()[0].weights(Z)[..., 0, :]
        )
        return weights[..., 0, :] if self.form == "paper" else weights

    def target(self, X: Tensor) -> Tensor:
        flat = X.double().reshape(-1, *self.box.shape)
        lead = X.shape[: X.dim() - len(self.box.shape)]
        return evaluated(self.f, flat, self.box).reshape(*lead, *self.box.shape[:-1], -1)

    def points(self, count: int, seed: int = 0) -> Tensor:
        found = super().points(count, seed)
        return found if self.form == "paper" else found.unsqueeze(-2)

    def example_input(self) -> tuple[Tensor, ...]:
        return (self.points(2)[:2],)

    def recertify(self) -> Certificate:
        W_Q, b_Q, keys, values = (x.double() for x in self.tables())
        D, J, u = len(self.middle), len(keys), unit(self.dtype)
        expected = torch.cat([torch.eye(D), torch.zeros(D, 1)], 1).double()
        if not torch.equal(W_Q, expected) or b_Q.tolist() != [*(-float(x) for x in self.middle), 1.0]:
            raise CertificateError("the query must read (x - middle of the box, 1); it was changed")
        outward = self.box.outward(self.dtype)
        half = torch.maximum(outward.upper.flatten() - b_Q[:-1].neg(), b_Q[:-1].neg() - outward.lower.flatten())
        size = keys[:, :-1].abs() @ half + keys[:, -1].abs()
        slopes, offsets = self.ideal_keys()
        ideal = np.array([[*map(float, row), float(o)] for row, o in zip(slopes, offsets, strict=True)])
        off = np.abs(keys.numpy() - ideal) + 2.0**-52 * np.abs(ideal)
        stored = float(np.max(off[:, :-1] @ half.numpy() + off[:, -1]))
        logit = float(size.max())
        d = float(up(float(gamma(D + 5, u)) * 2 * logit + stored * (1 + 1e-9) + (EXP_ULPS + 1) * u, 8))
        beta, largest = float(self.beta), float(values.abs().max())
        spread = float((values.amax(0) - values.amin(0)).max())
        measured = self.measure_now()
        blank = Certificate("calibrated", None, DTYPES[self.dtype], "f", self.box, measured=measured)
        if self.omega is None:
            return blank
        if J * u > 0.125:
            raise PrecisionError(f"{J} cells are too many for sums in {DTYPES[self.dtype]}; use float64 or fewer cells")
        tau = max(self.tau, (2 * d + math.log(J / self.eps0)) / beta)  # rounded logits tell cells apart less sharply
        exponent = -beta * tau + 2 * d
        near = math.sqrt(self.reach**2 + tau) * (1 + 1e-12)
        others = J * math.exp(exponent) * (spread + self.omega(self.reach)) * (1 + 1e-9)
        rounding = float(gamma(2 * J + 4, u)) * largest + 2 * J * TINY[self.dtype] * (1 + largest)
        rounding += float((values - self.samples).abs().max())
        terms: dict[tuple[str, Source], float] = {
            ("cells", "interpolation"): float(up(self.omega(near) * (1 + 1e-12))),
            ("cells", "leak"): float(up(others)),
            ("head", "rounding"): float(up(rounding, 8)),
        }
        ledger = sum_of(terms, {("cells", "interpolation"): f"{J} cells within {self.reach:.3g} of their centres"})
        return Certificate(
            "certified", total(x.value for x in ledger), DTYPES[self.dtype], "f", self.box, ledger, measured=measured,
            lemmas=("E4", "R5"), assumptions=ASSUMPTIONS,
        )  # fmt: skip

    @torch.no_grad()
    def measure_now(self) -> float:
        """The largest error at points drawn from the box, corners included."""
        X = self.points(512)
        return float((self.core(X).double() - self.target(X)).abs().max())

    @property
    def size(self) -> Size:
        _, _, keys, _ = self.tables()
        half = float((self.box.upper - self.box.lower).max()) / 2
        logit = float((keys[:, :-1].abs().sum(-1) * half + keys[:, -1].abs()).max())
        return Size(1, 1, len(keys), sum(p.numel() for p in self.parameters()), logit)

    @property
    def matrices(self) -> dict[str, Tensor]:
        """Queries W_Q^T x + b_Q, one key and one value per row of W_K and W_V; W_O is the identity."""
        W_Q, b_Q, keys, values = self.tables()
        eye = torch.eye(values.shape[-1], dtype=self.dtype)
        return {
            "A": torch.eye(len(self.middle), dtype=self.dtype),
            "W_Q": W_Q,
            "b_Q": b_Q,
            "W_K": keys,
            "W_V": values,
            "W_O": eye,
        }


class Cross(nn.Module):
    """Queries from one sequence, keys and values from another."""

    def __init__(self, W_Q: Tensor, b_Q: Tensor, keys: Tensor, values: Tensor):
        super().__init__()
        width, inner, dtype = keys.shape[1] + values.shape[1], keys.shape[1], keys.dtype
        self.W_Q, self.b_Q = nn.Parameter(W_Q), nn.Parameter(b_Q)
        self.context = nn.Parameter(torch.cat([keys, values], 1))
        self.W_K = nn.Parameter(torch.eye(width, inner, dtype=dtype))
        self.W_V = nn.Parameter(torch.eye(width, dtype=dtype)[:, inner:].contiguous())

    def weights(self, Z: Tensor, context: Tensor | None = None) -> Tensor:
        keys = (self.context if context is None else context) @ self.W_K
        return torch.softmax((Z @ self.W_Q + self.b_Q) @ keys.transpose(-2, -1), -1)

    def forward(self, Z: Tensor, context: Tensor | None = None) -> Tensor:
        values = (self.context if context is None else context) @ self.W_V
        return self.weights(Z, context) @ values


def _middle(box: Box) -> list[Fraction]:
    return [(Fraction(low) + Fraction(high)) / 2 for low, high in box.intervals()]


def _grid_centres(box: Box, cells: int) -> tuple[Tensor, float]:
    """Middles of at most `cells` equal cells, and half of a cell's diagonal."""
    sides = [high - low for low, high in box.intervals()]
    if min(sides) <= 0:
        raise ArgumentError("every side of the box must have a positive length")
    counts = [1] * len(sides)
    while True:
        i = max(range(len(sides)), key=lambda k: sides[k] / counts[k])
        if math.prod(counts) // counts[i] * (counts[i] + 1) > cells:
            break
        counts[i] += 1
    axes = [
        torch.tensor([low + side * (2 * k + 1) / (2 * n) for k in range(n)], dtype=torch.float64)
        for (low, _), side, n in zip(box.intervals(), sides, counts, strict=True)
    ]
    reach = 0.5 * math.sqrt(sum((side / n) ** 2 for side, n in zip(sides, counts, strict=True)))
    return torch.cartesian_prod(*axes).reshape(-1, len(sides)), reach * (1 + 1e-12)


def _given(box: Box, centres: Any) -> tuple[Tensor, float]:
    """The user's centres, and the largest distance of a point of the box from them, rounded up."""
    found = tensor("cells", centres, torch.float64)
    if found.numel() == 0 or found.shape[-1] != box.shape[-1] or found.numel() % box.dim:
        raise ArgumentError(
            f"cells must be a number, or centres of shape (cells, {box.shape}), got {tuple(found.shape)}"
        )
    found = found.reshape(-1, box.dim)
    per_side = PROBES[box.dim - 1] if box.dim <= len(PROBES) else max(2, int(2 ** (16 / box.dim)))
    lower, width = box.lower.flatten(), (box.upper - box.lower).flatten()
    axes = [
        low + w * (torch.arange(per_side, dtype=torch.float64) + 0.5) / per_side
        for low, w in zip(lower, width, strict=True)
    ]
    probes = torch.cartesian_prod(*axes).reshape(-1, box.dim)
    nearest_ = torch.cat(
        [torch.cdist(part, found, compute_mode="donot_use_mm_for_euclid_dist").amin(-1) for part in probes.split(4096)]
    )
    return found, (float(nearest_.max()) + 0.5 * float((width / per_side).norm())) * (1 + 1e-9)


def _refuse_steeper(f: Function, box: Box, centres: Tensor, values: Tensor, lipschitz: float) -> None:
    """Raise when the steepest pairs among the first centres lead to a contradiction to the Lipschitz constant."""
    few = slice(0, 1024)
    apart = torch.cdist(centres[few], centres[few], compute_mode="donot_use_mm_for_euclid_dist")
    rise = torch.stack([(v[few, None] - v[None, few]).abs() for v in values.T]).amax(0)
    slope = torch.where(apart > 0, rise / apart.clamp_min(1e-300), 0.0).flatten()
    if len(slope) > 1:
        steepest = slope.topk(min(SUSPECTS, len(slope))).indices
        steepest = steepest[apart.flatten()[steepest] > 0]
        first, second = steepest // apart.shape[1], steepest % apart.shape[1]
        if len(first):
            refuse_between(f, box, centres[first], centres[second], lipschitz)
