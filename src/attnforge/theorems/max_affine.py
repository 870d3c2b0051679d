"""One layer, one head: cells argmax_j a_j.x + b_j of a max-affine function (arXiv 2504.19901; lemma E4).

Centres c_j, a_j = 2 c_j, b_j = -|c_j|^2: the cells are the Voronoi cells of the centres. Keys beta (a_j, b_j), query
(x, 1), values f(c_j). In self-attention the keys are constants of the layer (memory slots; in the paper's form they
come from the columns that A appends); in cross-attention they are read off a second sequence, whose tokens carry
(beta a_j, beta b_j, f(c_j)).

With rho the largest distance of a point of the box from its nearest centre, tau > 0, J centres and logits computed with
errors of at most d: slots whose centre is at squared distance more than tau beyond the nearest weigh at most
exp(-beta tau + 2d) each, all others have |x - c_j|^2 <= rho^2 + tau. So

    |head - f| <= omega(sqrt(rho^2 + tau)) + J exp(-beta tau + 2d) max_j |f(c_j) - f(x)| + rounding of a mean.

Sequences, token-wise: a gather layer (D1) first gives every token all of X; then there is a key for every cell and
token, and positions select the token's own value f(c_j)_i. Keys of other tokens get -Omega and weigh an exact 0.
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
from ..certificates.rounding import ASSUMPTIONS, EXP_ULPS, TINY, gamma, unit, up
from ..errors import ArgumentError, CertificateError, PrecisionError
from ..network import AttentionLayer, Heads
from .cold import nearest
from .grid import SUSPECTS, Function, Modulus, evaluated, modulus_of, refuse_between
from .registers import Registers, over_slots, read_as_is, tables_of, weights_of
from .result import DTYPES, Construction, Size, form_of, leak, sum_of, tensor, whole
from .universal import carry, gather_heads

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
    form: str | None = None,
    causal: bool = False,
    eps0: float = 1e-9,
    dtype: torch.dtype = torch.float64,
) -> MaxAffine:
    """f by one attention layer with one head, one key per cell (arXiv 2504.19901).

    >>> norm = lambda x: x.norm(dim=-1, keepdim=True)
    >>> m = max_affine(norm, Box.cube(-1, 1, shape=2), cells=400, lipschitz=1.0)
    >>> X = torch.rand(3, 7, 2, dtype=torch.float64)  # every token is a point of the box
    >>> m.form, (m(X) - norm(X)).abs().max().item() <= m.bound < 0.08
    ('tokens', True)

    A box of shape (d,) makes a token-wise network: f maps (batch, d) to (batch, channels); with `causal` its cells are
    tokens that come first. A box of shape (n, d) makes the paper's form: f maps sequences to sequences; `form="tokens"`
    gathers the sequence into every token first. `cells` is the number of cells, or the centres themselves. With
    `attention="cross"` keys and values come from a second sequence, `m.context`.
    """
    if not isinstance(box, Box) or len(box.shape) not in (1, 2) or box.names:
        raise ArgumentError("box must be a Box of tokens, Box.cube(lo, hi, shape=d), or of sequences, shape=(n, d)")
    if attention not in ("self", "cross"):
        raise ArgumentError(f"attention must be 'self' or 'cross', got {attention!r}")
    if dtype not in DTYPES:
        raise ArgumentError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    shape = form_of(form or ("tokens" if len(box.shape) == 1 else "paper"))
    if shape == "paper" and len(box.shape) == 1:
        raise ArgumentError("a box of tokens, shape=d, makes a token-wise network: leave form out")
    if causal and (len(box.shape) == 2 or attention == "cross"):
        raise ArgumentError(
            "only self-attention on a box of tokens, shape=d, has a causal form: outputs of a sequence map depend on "
            "later tokens, and cross-attention reads its cells off another sequence"
        )
    centres, reach = _grid_centres(box, whole("cells", cells, 1)) if isinstance(cells, int) else _given(box, cells)
    values = evaluated(f, centres.reshape(-1, *box.shape), box)
    omega = modulus_of(lipschitz, modulus)
    m = MaxAffine(f, box, centres, values.flatten(1), reach, omega, leak(eps0), attention, shape, causal, dtype)
    if lipschitz is not None:
        _refuse_steeper(f, box, centres, values.flatten(1), float(lipschitz))
    m.attach(m.recertify())
    return m


class MaxAffine(Construction):
    """One head that picks the cell of x; `theorems.max_affine` builds it."""

    theorem = "arXiv 2504.19901, max-affine partition"

    def __init__(
        self, f: Function, box: Box, centres: Tensor, values: Tensor, reach: float, omega: Modulus | None, eps0: float,
        attention: str, form: str, causal: bool, dtype: torch.dtype,
    ):  # fmt: skip
        super().__init__()
        self.f, self.box, self.centres, self.samples, self.omega = f, box, centres, values, omega
        self.reach, self.eps0, self.form, self.causal = reach, eps0, form, causal
        self.tokens = box.shape[0] if form == "tokens" and len(box.shape) == 2 else 0  # gathered into each token
        J, D, n = *centres.shape, self.tokens
        self.middle = [Fraction(float(x)) for x in nearest(_middle(box), dtype)]
        self.tau = SOFTNESS * reach**2
        self.beta = Fraction(2.0 ** math.ceil(math.log2(math.log(J / eps0) / self.tau)))
        slopes, offsets = self.ideal_keys()
        keys = np.concatenate([nearest([x for row in slopes for x in row], dtype).reshape(J, D),
                               nearest(offsets, dtype)[:, None]], 1)  # fmt: skip
        table, read = torch.from_numpy(keys).to(dtype), values.to(dtype)
        self.omega_dead = 2.0 ** math.ceil(math.log2(8 * self.largest_logit(table) + 2048))
        if n:
            table = torch.cat([table.repeat_interleave(n, 0), self.dead_keys(J, dtype)], 1)
            read = read.reshape(J * n, -1)
            self.positions = nn.Parameter(torch.eye(n, dtype=dtype))
            self.gather = self.gathering(dtype)
        query, bias = self.ideal_query(dtype)
        eye = torch.eye(read.shape[-1], dtype=dtype)[None]
        self.layer: AttentionLayer | Registers | Cross
        if attention == "self":
            group = Heads(
                "memory", W_Q=query[None], b_Q=bias[None], M_K=table[None], M_V=read[None], W_O=eye, purpose="cells"
            )
            self.layer = over_slots(group, causal)
        else:
            self.layer = Cross(query, bias, table, read)

    def ideal_query(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(x - middle, 1), and the position behind it."""
        D, n = len(self.middle), self.tokens
        query = torch.zeros(D + n, D + 1 + n, dtype=dtype)
        query[:D, :D], query[D:, D + 1 :] = torch.eye(D, dtype=dtype), torch.eye(n, dtype=dtype)
        bias = torch.tensor([*(-float(x) for x in self.middle), 1.0, *[0.0] * n], dtype=dtype)
        return query, bias

    def dead_keys(self, cells: int, dtype: torch.dtype) -> Tensor:
        """For every cell and token: 0 at that token's position, -Omega at the others."""
        return (self.omega_dead * (torch.eye(self.tokens, dtype=dtype) - 1)).repeat(cells, 1)

    def gathering(self, dtype: torch.dtype) -> AttentionLayer:
        """The layer that gives every token all of X and leaves its position."""
        n, d = self.box.shape
        return AttentionLayer([gather_heads(n, d, self.omega_dead, dtype)], S=carry(n, d, n * d, dtype))

    def state(self, X: Tensor) -> Tensor:
        """What the head reads: tokens, or the sequence in one column, or the sequence in every token."""
        if self.tokens:
            return self.gather(torch.cat([X, self.positions.expand(*X.shape[:-2], -1, -1)], -1))
        return X.flatten(-2).unsqueeze(-2) if self.form == "paper" else X

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
            context, inner = self.layer.context.detach(), len(self.middle) + 1 + self.tokens
            return self.layer.W_Q.detach(), self.layer.b_Q.detach(), context[:, :inner], context[:, inner:]
        found = read_as_is(tables_of(self.layer))
        return found.W_Q[0], found.b_Q[0], found.M_K[0], found.M_V[0]

    def check_shape(self, x: Tensor) -> None:
        wanted = ("tokens", *self.box.shape) if len(self.box.shape) == 1 else self.box.shape
        if x.dim() < 2 or tuple(x.shape[x.dim() - len(self.box.shape) :]) != self.box.shape:
            raise ArgumentError(f"expected X of shape (batch, {', '.join(map(str, wanted))}), got {tuple(x.shape)}")

    def guard(self, *inputs: Tensor) -> None:
        if len(inputs) == 2 and isinstance(self.layer, Cross):
            self.check_tensor(inputs[1], "context")
            inputs = inputs[:1]
        super().guard(*inputs)

    def core(self, *inputs: Tensor) -> Tensor:
        Z = self.state(inputs[0])
        out: Tensor = self.layer(Z, *inputs[1:]) if isinstance(self.layer, Cross) else self.layer(Z)
        return out.squeeze(-2).unflatten(-1, (self.box.shape[0], -1)) if self.form == "paper" else out

    def attention(self, X: Tensor) -> Tensor:
        """The softmax weights over cells: (batch, tokens, cells), or (batch, cells) for the paper's sequences."""
        Z = self.state(X)
        weights = self.layer.weights(Z) if isinstance(self.layer, Cross) else weights_of(self.layer, Z)[..., 0, :]
        if self.tokens:  # each token's own keys; the others weigh an exact 0
            split = weights.unflatten(-1, (-1, self.tokens))
            return torch.diagonal(split, dim1=-3, dim2=-1).transpose(-2, -1)
        return weights[..., 0, :] if self.form == "paper" else weights

    def target(self, X: Tensor) -> Tensor:
        flat = X.double().reshape(-1, *self.box.shape)
        lead = X.shape[: X.dim() - len(self.box.shape)]
        return evaluated(self.f, flat, self.box).reshape(*lead, *self.box.shape[:-1], -1)

    def points(self, count: int, seed: int = 0) -> Tensor:
        found = super().points(count, seed)
        return found if len(self.box.shape) == 2 else found.unsqueeze(-2)

    def example_input(self) -> tuple[Tensor, ...]:
        return (self.points(2)[:2],)

    def recertify(self) -> Certificate:
        self.unchanged()
        _, b_Q, keys, values = (x.double() for x in self.tables())
        D, n, u = len(self.middle), max(1, self.tokens), unit(self.dtype)
        keys, J = keys[:, : D + 1], len(keys) // n
        values = values.reshape(J, -1)
        outward, middle = self.box.outward(self.dtype), b_Q[:D].neg()
        half = torch.maximum(outward.upper.flatten() - middle, middle - outward.lower.flatten())
        size = keys[:, :-1].abs() @ half + keys[:, -1].abs()
        slopes, offsets = self.ideal_keys()
        ideal = np.array([[*map(float, row), float(o)] for row, o in zip(slopes, offsets, strict=True)]).repeat(n, 0)
        off = np.abs(keys.numpy() - ideal) + 2.0**-52 * np.abs(ideal)
        stored = float(np.max(off[:, :-1] @ half.numpy() + off[:, -1]))
        logit = float(size.max())
        d = float(up(float(gamma(D + 5, u)) * 2 * logit + stored * (1 + 1e-9) + (EXP_ULPS + 1) * u, 8))
        if self.tokens and self.omega_dead < 4 * logit + 1024:
            raise PrecisionError(f"logits of up to {logit:.3g} are too large for keys at -{self.omega_dead:.3g}")
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

    def unchanged(self) -> None:
        """Raise `CertificateError` unless all weights but keys and values are the ones that were built."""
        W_Q, b_Q, keys, _ = self.tables()
        pairs = list(zip((W_Q, b_Q), self.ideal_query(self.dtype), strict=True))
        if isinstance(self.layer, Cross):
            stored = (self.layer.W_K.detach(), self.layer.W_V.detach())
            pairs += list(zip(stored, self.layer.reads(), strict=True))
        if n := self.tokens:
            pairs += [(keys[:, -n:], self.dead_keys(len(keys) // n, self.dtype))]
            pairs += [(self.positions.detach(), torch.eye(n, dtype=self.dtype))]
            fresh = self.gathering(self.dtype)
            pairs += list(zip(self.gather.parameters(), fresh.parameters(), strict=True))
        if not all(torch.equal(mine, built) for mine, built in pairs):
            raise CertificateError(
                "the query must read (x - middle of the box, 1), and cells and positions must be told apart; "
                "weights that do so were changed"
            )

    @torch.no_grad()
    def measure_now(self) -> float:
        """The largest error at points drawn from the box, corners included."""
        X = self.points(512)
        return float((self.core(X).double() - self.target(X)).abs().max())

    @property
    def size(self) -> Size:
        D, keys = len(self.middle), self.tables()[2]
        layers, heads = (2, 1 + self.tokens) if self.tokens else (1, 1)
        parameters = sum(p.numel() for p in self.parameters())
        return Size(layers, heads, len(keys), parameters, self.largest_logit(keys[:, : D + 1]))

    def largest_logit(self, keys: Tensor) -> float:
        """An upper bound of |logit| on the box, for keys (slope, offset)."""
        half = float((self.box.upper - self.box.lower).max()) / 2
        return float((keys[:, :-1].abs().sum(-1) * half + keys[:, -1].abs()).max())

    @property
    def matrices(self) -> dict[str, Tensor]:
        """Queries W_Q^T x + b_Q, one key and one value per row of W_K and W_V; W_O is the identity."""
        W_Q, b_Q, keys, values = self.tables()
        eye = torch.eye(values.shape[-1], dtype=self.dtype)
        return {
            "A": torch.eye(W_Q.shape[0], dtype=self.dtype),
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
        self.W_Q, self.b_Q = nn.Parameter(W_Q), nn.Parameter(b_Q)
        self.context, self.inner = nn.Parameter(torch.cat([keys, values], 1)), keys.shape[1]
        self.W_K, self.W_V = (nn.Parameter(x) for x in self.reads())

    def reads(self) -> tuple[Tensor, Tensor]:
        """W_K and W_V: the two parts of a token of the second sequence."""
        both = torch.eye(self.context.shape[1], dtype=self.context.dtype)
        return both[:, : self.inner].contiguous(), both[:, self.inner :].contiguous()

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
