"""One layer, one head: cells argmax_j a_j.x + b_j of a max-affine function (arXiv 2504.19901; lemma E4).

Centres c_j, a_j = 2 c_j, b_j = -|c_j|^2: the cells are the Voronoi cells of the centres. Keys beta (a_j, b_j), query
(x, 1), values f(c_j). In self-attention the keys are constants of the layer (memory slots; in the paper's form they
come from the columns that A appends); in cross-attention they are read off a second sequence, whose tokens carry
(beta a_j, beta b_j, f(c_j)).

Sequences, token-wise: a gather layer (D1) first gives every token all of X; then there is a key for every cell and
token, and positions select the token's own value f(c_j)_i. Keys of other tokens get -Omega and weigh an exact 0.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..box import Box
from ..dtypes import Array, by_name, shipped, stored
from ..errors import ArgumentError
from ..kernel.sampled.hypothesis import of_cells, of_centres
from ..network import AttentionLayer, Heads
from ..progress import shown
from .bounds import DEAD, CellRow, cells_ledger
from .grid import (
    SUSPECTS,
    FromSamples,
    Function,
    Modulus,
    Sampled,
    evaluated,
    hypothesis_of,
    modulus_of,
    on_box,
    refuse_between,
    slope_of,
)
from .ramps import nearest
from .result import Curves, Indices, Ledger, Size, diagonal_picture, form_of, leak, number, tensor, whole
from .slots import Registers, depth_of, over_slots, read_as_is, weights_of
from .universal import gathered, gathering, own_keys

if TYPE_CHECKING:
    from .result import TheoremPicture

SOFTNESS = 0.1  # tau over rho^2: the radius that counts grows by 5 %
PROBES = (4096, 128, 32, 16)  # small boxes a side, by dimension, for the covering radius of scattered centres
FEW = 1024  # centres whose pairs are looked at for slopes: a million pairs


@shown("building")
@by_name
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
    shipped(dtype)
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
    m.cells = len(centres) if isinstance(cells, int) else centres.tolist()
    if lipschitz is not None:
        _refuse_steeper(f, box, centres, values.flatten(1), float(lipschitz))
    m.attach(m.recertify())
    return m


class MaxAffine(FromSamples):
    """One head that picks the cell of x; `theorems.max_affine` builds it."""

    family = "theorem-cells"
    called = "the cells of the theorem"
    theorem = "arXiv 2504.19901, max-affine partition"
    cells: int | list[list[float]]  # how many there are, or their centres

    def __init__(
        self, f: Function, box: Box, centres: Tensor, values: Tensor, reach: float, omega: Modulus | None, eps0: float,
        attention: str, form: str, causal: bool, dtype: torch.dtype,
    ):  # fmt: skip
        super().__init__()
        self.f, self.box, self.form, self.causal, self.made = f, box, form, causal, dtype
        n = box.shape[0] if form == "tokens" and len(box.shape) == 2 else 0  # gathered into each token
        J, D = centres.shape
        middle = nearest([(Fraction(low) + Fraction(high)) / 2 for low, high in box.intervals()], dtype)
        tau = SOFTNESS * reach**2
        beta = Fraction(2.0 ** math.ceil(math.log2(math.log(J / eps0) / tau)))
        exact = tuple(Fraction(x) for x in middle.double().tolist())
        ideal = CellRow(
            box, stored(centres).copy(), stored(values).copy(), omega, reach, eps0, exact, beta, tau, 0.0, n
        )
        slopes, offsets = ideal.keys()
        table = torch.cat(
            [nearest([x for row in slopes for x in row], dtype).reshape(J, D), nearest(offsets, dtype)[:, None]], 1
        )
        dead = 2.0 ** math.ceil(math.log2(8 * self.largest_logit(table) + 2 * DEAD))
        self.asked, self.beta, self.middle, self.tokens = replace(ideal, dead=dead), beta, exact, n
        read = values.to(dtype)
        if n:
            others = dead * (torch.eye(n, dtype=dtype) - 1)  # 0 at the token's own position
            table = torch.cat([table.repeat_interleave(n, 0), others.repeat(J, 1)], 1)
            read = read.reshape(J * n, -1)
            self.positions = nn.Parameter(torch.eye(n, dtype=dtype))
            self.gather = gathering(n, box.shape[1], dead, dtype)
        query = torch.zeros(D + n, D + 1 + n, dtype=dtype)  # (x - middle, 1), and the position behind it
        query[:D, :D], query[D:, D + 1 :] = torch.eye(D, dtype=dtype), torch.eye(n, dtype=dtype)
        bias = torch.cat([-middle, torch.eye(1, 1 + n, dtype=dtype)[0]])
        eye = torch.eye(read.shape[-1], dtype=dtype)[None]
        self.layer: AttentionLayer | Registers | Cross
        if attention == "self":
            group = Heads(
                "memory", W_Q=query[None], b_Q=bias[None], M_K=table[None], M_V=read[None], W_O=eye, purpose="cells"
            )
            self.layer = over_slots(group, causal)
        else:
            self.layer = Cross(query, bias, table, read)

    def state(self, X: Tensor) -> Tensor:
        """What the head reads: tokens, or the sequence in one column, or the sequence in every token."""
        if self.tokens:
            return self.gather(torch.cat([X, self.positions.expand(*X.shape[:-2], -1, -1)], -1))
        return X.flatten(-2).unsqueeze(-2) if self.form == "paper" else X

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
        found = read_as_is(self.layer)
        return found.W_Q[0], found.b_Q[0], found.M_K[0], found.M_V[0]

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
        if self.tokens:
            return own_keys(weights, self.tokens)
        return weights[..., 0, :] if self.form == "paper" else weights

    def target(self, X: Tensor) -> Tensor:
        return on_box(self.f, self.box, X)

    def points(self, count: int, seed: int = 0) -> Tensor:
        found = super().points(count, seed)
        return found if len(self.box.shape) == 2 else found.unsqueeze(-2)

    def example_input(self) -> tuple[Tensor, ...]:
        return (self.points(2)[:2],)

    @property
    def hypothesis(self) -> str:
        if not isinstance(self.cells, int):
            return hypothesis_of(self.asked.modulus, of_centres(len(self.cells)))
        counts = [len(set(axis.tolist())) for axis in self.asked.centres.T]
        return hypothesis_of(self.asked.modulus, of_cells(counts))

    def ledger(self) -> Ledger:
        found = dict(zip(("W_Q", "b_Q", "W_K", "W_V"), self.tables(), strict=True))
        if isinstance(self.layer, Cross):
            found["context reads"] = torch.cat([self.layer.W_K, self.layer.W_V], 1)
        if self.tokens:
            found |= gathered(self.gather, self.positions)
        numbers = {name: stored(x) for name, x in found.items()}
        measured = None if isinstance(self.f, Sampled) else self.largest_error(512)
        return cells_ledger(self.asked, numbers, self.dtype, depth_of(self.layer), measured)

    def asks(self) -> dict[str, Any]:
        return {
            "box": self.box.to_json(), "cells": self.cells, "samples": self.asked.samples.tolist(),
            "lipschitz": slope_of(self.asked.modulus), "eps0": self.asked.eps0, "form": self.form,
            "attention": "cross" if isinstance(self.layer, Cross) else "self", "causal": self.causal,
        }  # fmt: skip

    @classmethod
    def again(cls, asked: dict[str, Any], made: torch.dtype) -> MaxAffine:
        box, samples = Box.from_json(asked["box"]), tensor("samples", asked["samples"], torch.float64)
        cells, causal = asked["cells"], bool(asked["causal"])
        if samples.dim() != 2 or samples.numel() > asked["most"] or len(box.shape) not in (1, 2):
            raise ArgumentError("the samples do not fit the tensors, or the box is none of tokens or sequences")
        if (cells if isinstance(cells, int) else len(cells)) != len(samples):
            raise ArgumentError("there is not one sample for each cell")
        centres, reach = _grid_centres(box, cells) if isinstance(cells, int) else _given(box, cells)
        if len(centres) != len(samples) or asked["attention"] not in ("self", "cross"):
            raise ArgumentError("the samples do not fit the cells, or the kind of attention is unknown")
        omega = modulus_of(number("lipschitz", asked["lipschitz"], positive=True), None)
        m = cls(
            Sampled(), box, centres, samples, reach, omega, leak(asked["eps0"]), asked["attention"],
            form_of(asked["form"]), causal, made,
        )  # fmt: skip
        m.cells = cells
        return m

    @torch.no_grad()
    def picture(self) -> TheoremPicture:
        """Along the diagonal of the box."""

        def curves(X: Tensor, s: Array, used: Indices) -> Curves:
            _, b_Q, keys, _ = (stored(x) for x in self.tables())
            D, each = len(self.middle), max(1, self.tokens)  # a gathered sequence has a key for every cell and token
            flat = stored(X).reshape(len(s), -1) + b_Q[:D]
            logits = flat @ keys[used * each, :D].T + keys[used * each, D]
            some = range(0, len(used), max(1, len(used) // 6))
            return tuple((f"cell {used[k] + 1}", s, logits[:, k]) for k in some)

        return diagonal_picture(self, curves, "Affine logits of some cells", "logit")

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
        A = torch.eye(W_Q.shape[0], dtype=self.dtype)
        return {"A": A, "W_Q": W_Q, "b_Q": b_Q, "W_K": keys, "W_V": values, "W_O": eye}


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
        """The softmax weights over the second sequence."""
        keys = (self.context if context is None else context) @ self.W_K
        return torch.softmax((Z @ self.W_Q + self.b_Q) @ keys.transpose(-2, -1), -1)

    def forward(self, Z: Tensor, context: Tensor | None = None) -> Tensor:
        values = (self.context if context is None else context) @ self.W_V
        return self.weights(Z, context) @ values


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
    few = slice(0, FEW)
    apart = torch.cdist(centres[few], centres[few], compute_mode="donot_use_mm_for_euclid_dist")
    rise = torch.stack([(v[few, None] - v[None, few]).abs() for v in values.T]).amax(0)
    slope = torch.where(apart > 0, rise / apart.clamp_min(1e-300), 0.0).flatten()
    if len(slope) > 1:
        steepest = slope.topk(min(SUSPECTS, len(slope))).indices
        steepest = steepest[apart.flatten()[steepest] > 0]
        first, second = steepest // apart.shape[1], steepest % apart.shape[1]
        if len(first):
            refuse_between(f, box, centres[first], centres[second], lipschitz)
