"""The networks of `universal`: hats, then a selection, in the paper's form (one column) or token-wise (gathered).

Universality: two attention layers, or one followed by a softmax (arXiv 2504.15956, v1 theorem 3.3, v2 theorem 3.14).

Layer 1. For every coordinate x and neighbouring values v, v + delta of its grid one cold head makes the ramp
clip((x - v)/delta, 0, 1); differences of neighbouring ramps are hat functions, which are 1 at one value of the grid and
0 at all others. Layer 2. The sum of the hats of X's coordinates at a grid point v is the logit of v, times beta, and
f(v) its value (E1); or the logits are channels that a softmax acts on, and a linear map reads f(v) off (E2).

Lemma E1 of docs/theory.md: hats have errors of at most e <= 1/5, beta >= ln 3, g_i values delta_i apart on side i. Then
|network - f| <= omega(sqrt(sum_i delta_i^2 (1/4 + e + e^2 + s_i))), s_i = g_i^3 exp(-beta (1/2 - 2e)), for f with
concave modulus omega in the Euclidean norm, apart from the rounding of layer 2.

Token-wise form: a gather layer (D1) first gives every token all coordinates; layer 2 then has a key for every grid
point and token, and positions select the token's own value. Positions enter as channels; dead keys weigh an exact 0.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor, nn

from ..box import Box
from ..certificates.certificate import Certificate, Source, total
from ..certificates.rounding import ASSUMPTIONS, EXP_ULPS, TINY, gamma, unit, up
from ..errors import ArgumentError, CertificateError, PrecisionError
from ..network import AttentionLayer, Heads
from .cold import ColdTable, anchors, cells, cold_table, distance, head_rounding, nearest
from .grid import Function, Grid, Modulus, evaluated, grid_of, modulus_of, refuse_steeper
from .result import DTYPES, Construction, Size, form_of, leak, number, sum_of, whole

ROWS = 1 << 22  # entries of a softmax over channels alive at once


class SoftmaxReadOut(nn.Module):
    """softmax over channels of Z W_1, then a linear map: no keys, no tokens, the softmax of the theorem."""

    def __init__(self, logits: Tensor, read: Tensor):
        super().__init__()
        self.logits, self.read = nn.Parameter(logits), nn.Parameter(read)

    def weights(self, Z: Tensor) -> Tensor:
        return torch.softmax(Z @ self.logits, -1)

    def forward(self, Z: Tensor) -> Tensor:
        step = max(1, ROWS // self.logits.shape[-1])
        if torch.compiler.is_compiling() or Z[..., 0].numel() <= step:
            return self.weights(Z) @ self.read
        flat = Z.reshape(-1, Z.shape[-1])
        return torch.cat([self.weights(part) @ self.read for part in flat.split(step)]).reshape(*Z.shape[:-1], -1)


class UniversalNet(nn.Module):
    """(gather,) hats, selection."""

    def __init__(
        self, grid: Grid, values: Tensor, table: tuple[np.ndarray, np.ndarray, np.ndarray], beta: float, form: str,
        second: str, dtype: torch.dtype,
    ):  # fmt: skip
        super().__init__()
        self.grid, self.form, self.second = grid, form, second
        self.tokens, self.width = grid.box.shape
        D, n, hats = len(grid.counts), self.tokens, sum(grid.counts)
        extra = n if form == "tokens" else 0  # channels that carry positions along
        W_Q, b_Q, W_O, constant = _hat_weights(grid, extra, dtype)
        keys, value = torch.from_numpy(np.stack(table[:2], -1)).to(dtype), torch.from_numpy(table[2]).to(dtype)
        group = Heads("memory", W_Q=W_Q, b_Q=b_Q, M_K=keys[None], M_V=value[None, :, None], W_O=W_O, purpose="ramps")
        skip = torch.cat(
            [torch.zeros(D, hats + extra, dtype=dtype), torch.eye(extra, hats + extra, dtype=dtype).roll(hats, 1)]
        )
        self.first = AttentionLayer([group], S=skip if extra else None, s=constant)
        self.omega = 2.0 ** math.ceil(math.log2(2 * beta * D + 1024))
        select = _selection_keys(grid, dtype)  # (grid point, hat)
        out = values.to(dtype)
        if extra:  # one key for every grid point and token
            dead = self.omega * (torch.eye(n, dtype=dtype) - 1)
            select = torch.cat([select.repeat_interleave(n, 0), dead.repeat(grid.size, 1)], 1)
            out = out.reshape(grid.size * n, -1)
            self.positions = nn.Parameter(torch.eye(n, dtype=dtype))
            self.gather = AttentionLayer(
                [gather_heads(n, self.width, self.omega, dtype)], S=carry(n, self.width, D, dtype)
            )
        else:
            out = out.reshape(grid.size, -1)
        scale = torch.cat([torch.full((hats,), beta, dtype=dtype), torch.ones(extra, dtype=dtype)])
        if second == "attention":
            eye = torch.eye(out.shape[-1], dtype=dtype)[None]
            self.select: AttentionLayer | SoftmaxReadOut = AttentionLayer(
                [
                    Heads(
                        "memory",
                        W_Q=torch.diag(scale)[None],
                        M_K=select[None],
                        M_V=out[None],
                        W_O=eye,
                        purpose="selection",
                    )
                ]
            )
        else:
            self.select = SoftmaxReadOut((select * scale).T.contiguous(), out)

    def state(self, X: Tensor) -> Tensor:
        """What layer 1 reads: all coordinates in one column, or in every token with its position."""
        if self.form == "paper":
            return X.flatten(-2).unsqueeze(-2)
        return self.gather(torch.cat([X, self.positions.expand(*X.shape[:-2], -1, -1)], -1))

    def hats(self, X: Tensor) -> Tensor:
        found: Tensor = self.first(self.state(X))
        return found[..., 0, : sum(self.grid.counts)]

    def selection(self, X: Tensor) -> Tensor:
        Z = self.first(self.state(X))
        if isinstance(self.select, SoftmaxReadOut):
            weights = self.select.weights(Z)
        else:
            weights = self.select.heads()[0].weights(Z)[..., 0, :]
        if self.form == "paper":
            return weights[..., 0, :]
        n = self.tokens  # each token's own keys; the others weigh an exact 0
        split = weights.unflatten(-1, (-1, n))
        return torch.diagonal(split, dim1=-3, dim2=-1).transpose(-2, -1)

    def forward(self, X: Tensor) -> Tensor:
        out: Tensor = self.select(self.first(self.state(X)))
        return out if self.form == "tokens" else out.squeeze(-2).unflatten(-1, (self.tokens, -1))

    @property
    def keys(self) -> Tensor:
        """(key, channel), beta not included for attention, included for a softmax."""
        if isinstance(self.select, SoftmaxReadOut):
            return self.select.logits.detach().T
        return self.select.heads()[0].M_K.detach()[0]

    def values(self) -> Tensor:
        """The stored f(v), float64, (grid point, tokens times channels)."""
        read = self.select.read if isinstance(self.select, SoftmaxReadOut) else self.select.heads()[0].M_V[0]
        return read.detach().double().reshape(self.grid.size, -1)

    def ramp_table(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slopes, offsets and values of the ramps, as stored."""
        group = self.first.heads()[0]
        keys, value = group.M_K.detach().double().numpy()[0], group.M_V.detach().double().numpy()[0]
        return keys[:, 0], keys[:, 1], value[:, 0]

    def queries(self) -> list[tuple[float, float]]:
        """Weight and bias of every ramp's query, as stored."""
        group = self.first.heads()[0]
        return list(zip(group.W_Q.detach()[:, :, 0].sum(-1).tolist(), group.b_Q.detach()[:, 0].tolist(), strict=True))

    def unchanged(self, beta: float) -> None:
        """Raise `CertificateError` unless all weights but tables, queries and values are the ones that were built."""
        dtype, extra = self.keys.dtype, self.tokens if self.form == "tokens" else 0
        W_Q, b_Q, W_O, constant = _hat_weights(self.grid, extra, dtype)
        group = self.first.heads()[0]
        assert self.first.s is not None
        select = _selection_keys(self.grid, dtype)
        hats = sum(self.grid.counts)
        stored = self.keys[:, :hats]
        expected = select.repeat_interleave(self.tokens, 0) if extra else select
        pairs = [
            ((group.W_Q.detach() != 0) & (W_Q == 0), torch.zeros_like(W_Q, dtype=torch.bool)),
            (group.b_Q.detach()[:, 1], b_Q[:, 1]),
            (group.W_O.detach(), W_O),
            (self.first.s.detach(), constant),
        ]
        if isinstance(self.select, SoftmaxReadOut):
            pairs.append((stored, beta * expected))
        else:
            scale = self.select.heads()[0].W_Q.detach()[0]
            ones = torch.cat([torch.full((hats,), beta, dtype=dtype), torch.ones(extra, dtype=dtype)])
            eye = torch.eye(self.select.heads()[0].W_O.shape[-1], dtype=dtype)
            pairs += [(stored, expected), (scale, torch.diag(ones)), (self.select.heads()[0].W_O.detach()[0], eye)]
        if extra:
            dead = (self.omega * (torch.eye(extra, dtype=dtype) - 1)).repeat(self.grid.size, 1)
            fresh = AttentionLayer(
                [gather_heads(extra, self.width, self.omega, dtype)],
                S=carry(extra, self.width, len(self.grid.counts), dtype),
            )
            pairs += [(self.keys[:, hats:], dead), (self.positions.detach(), torch.eye(extra, dtype=dtype))]
            pairs += list(zip((p.detach() for p in self.gather.parameters()), fresh.parameters(), strict=True))
        if not all(torch.equal(mine, built) for mine, built in pairs):
            raise CertificateError(
                "weights that select hats or grid points were changed: there is no certificate for these"
            )

    def matrices(self) -> dict[str, Tensor]:
        group = self.first.heads()[0]
        D, dtype = len(self.grid.counts), self.keys.dtype
        found = {"A": torch.eye(D, dtype=dtype), "W_Q1": group.W_Q.detach(), "b_Q1": group.b_Q.detach()}
        found |= {"W_K1": group.M_K.detach()[0], "W_V1": group.M_V.detach()[0], "W_O1": group.W_O.detach()}
        assert self.first.s is not None
        found["s_1"] = self.first.s.detach()
        if isinstance(self.select, SoftmaxReadOut):
            return found | {"W_1": self.select.logits.detach(), "W_O": self.select.read.detach()}
        head = self.select.heads()[0]
        found |= {"W_Q": head.W_Q.detach()[0], "W_K": head.M_K.detach()[0], "W_V": head.M_V.detach()[0]}
        return found | {"W_O": head.W_O.detach()[0]}


def _hat_weights(grid: Grid, extra: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries (x - v)/delta - 1/2 of all ramps, and the differences that make hats of them."""
    D, ramps, hats = len(grid.counts), sum(grid.counts) - len(grid.counts), sum(grid.counts)
    W_Q, b_Q = torch.zeros(ramps, D + extra, 2, dtype=dtype), torch.ones(ramps, 2, dtype=dtype)
    W_O, constant = torch.zeros(ramps, 1, hats + extra, dtype=dtype), torch.zeros(hats + extra, dtype=dtype)
    ramp = hat = 0
    for i, step in enumerate(grid.steps):
        rate = float(nearest([1 / step], dtype)[0])
        shifts = nearest([-at / step - type(step)(1, 2) for at in grid.axis(i)[:-1]], dtype)
        constant[hat] = 1.0
        for shift in shifts:
            W_Q[ramp, i, 0], b_Q[ramp, 0] = rate, float(shift)
            W_O[ramp, 0, hat], W_O[ramp, 0, hat + 1] = -1.0, 1.0
            ramp, hat = ramp + 1, hat + 1
        hat += 1
    return W_Q, b_Q, W_O, constant


def _selection_keys(grid: Grid, dtype: torch.dtype) -> Tensor:
    """(grid point, hat): 1 for the hats of the point's coordinates."""
    starts = torch.tensor([0, *np.cumsum(grid.counts)[:-1].tolist()])
    keys = torch.zeros(grid.size, sum(grid.counts), dtype=dtype)
    return keys.scatter_(1, grid.index() + starts, 1.0)


def gather_heads(n: int, width: int, omega: float, dtype: torch.dtype) -> Heads:
    """n heads; head j gives every token the channels of token j (D1): other keys get -omega, an exact weight 0."""
    channels, D = width + n, n * width
    W_Q, b_Q = torch.zeros(n, channels, n, dtype=dtype), torch.eye(n, dtype=dtype)
    W_K, b_K = torch.zeros(n, channels, n, dtype=dtype), torch.full((n, n), -omega, dtype=dtype)
    W_K[:, width:] = omega * torch.eye(n, dtype=dtype)
    W_V, W_O = torch.zeros(n, channels, width, dtype=dtype), torch.zeros(n, width, D + n, dtype=dtype)
    W_V[:, :width] = torch.eye(width, dtype=dtype)
    for j in range(n):
        W_O[j, :, j * width : (j + 1) * width] = torch.eye(width, dtype=dtype)
    return Heads("tokens", W_Q=W_Q, b_Q=b_Q, W_K=W_K, b_K=b_K, W_V=W_V, W_O=W_O, purpose="gather")


def carry(n: int, width: int, D: int, dtype: torch.dtype) -> Tensor:
    """The linear skip of the gather layer: positions stay."""
    skip = torch.zeros(width + n, D + n, dtype=dtype)
    skip[width:, D:] = torch.eye(n, dtype=dtype)
    return skip


LARGEST_HAT_ERROR = 0.2


def two_layer(
    f: Function,
    box: Box,
    spacing: float,
    *,
    lipschitz: float | None = None,
    modulus: Modulus | None = None,
    anchors: int = 65,
    eps0: float = 1e-9,
    form: str = "paper",
    dtype: torch.dtype = torch.float64,
) -> Universal:
    """A sequence map f by two attention layers (v1 theorem 3.3, v2 theorem 3.14).

    >>> swap = lambda X: X.flip(-2).sin()  # each token's output depends on the other token
    >>> m = two_layer(swap, Box.cube(-1, 1, shape=(2, 1)), spacing=0.25, lipschitz=1.0)
    >>> X = torch.rand(5, 2, 1, dtype=torch.float64)
    >>> (m(X) - swap(X)).abs().max().item() <= m.bound < 0.2
    True

    f takes a float64 batch (batch, n, d) and returns (batch, n, channels), numpy or torch. `lipschitz` (Euclidean norm
    of all of X against the largest change of an output) or a concave `modulus` of continuity make a certificate;
    without them the error is only measured and `bound` is None. `anchors` is the size of the ramps of layer 1.
    """
    return _built("attention", f, box, spacing, lipschitz, modulus, anchors, eps0, form, dtype)


def attention_then_softmax(
    f: Function,
    box: Box,
    spacing: float,
    *,
    lipschitz: float | None = None,
    modulus: Modulus | None = None,
    anchors: int = 65,
    eps0: float = 1e-9,
    form: str = "paper",
    dtype: torch.dtype = torch.float64,
) -> Universal:
    """A sequence map f by one attention layer followed by a softmax and a linear read-out (v1 3.3, v2 3.14).

    >>> m = attention_then_softmax(lambda X: X**2, Box.cube(0, 1, shape=(1, 1)), spacing=0.1, lipschitz=2.0)
    >>> m.size.layers, m.bound < 0.12
    (1, True)
    """
    return _built("softmax", f, box, spacing, lipschitz, modulus, anchors, eps0, form, dtype)


def _built(
    second: str, f: Function, box: Box, spacing: float, lipschitz: float | None, modulus: Modulus | None, count: int,
    eps0: float, form: str, dtype: torch.dtype,
) -> Universal:  # fmt: skip
    grid = grid_of(box, number("spacing", spacing, positive=True))
    if len(box.shape) != 2:
        raise ArgumentError(f"the box must be one of sequences, shape (tokens, channels), got {box.shape}")
    if dtype not in DTYPES:
        raise ArgumentError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    values = evaluated(f, grid.points(), box)
    omega = modulus_of(lipschitz, modulus)
    if lipschitz is not None:
        refuse_steeper(f, grid, values, float(lipschitz))
    size = whole("anchors", count, 3, " (p > 2)")
    if 1 / (size - 1) > LARGEST_HAT_ERROR * 0.9:
        raise ArgumentError(f"anchors must be at least 7, so that hats are told apart, got {size}")
    m = Universal(f, grid, values, omega, size, leak(eps0), form_of(form), second, dtype)
    m.attach(m.recertify())
    return m


class Universal(Construction):
    """Hats of every coordinate, then a selection among grid points: `two_layer` or `attention_then_softmax`."""

    def __init__(
        self, f: Function, grid: Grid, values: Tensor, omega: Modulus | None, count: int, eps0: float, form: str,
        second: str, dtype: torch.dtype,
    ):  # fmt: skip
        super().__init__()
        self.f, self.grid, self.samples, self.omega = f, grid, values, omega
        self.count, self.eps0, self.form, self.second, self.box = count, eps0, form, second, grid.box
        kind = "two layers" if second == "attention" else "one layer and a softmax"
        self.theorem = f"arXiv 2504.15956 v1 theorem 3.3 (v2 theorem 3.14), {kind}"
        u, longest = unit(dtype), max(grid.counts)
        hat = 1 / (count - 1) + 0.01
        # so cold that all but the nearest grid points are lighter than a rounding, and s_i below eps0
        wanted = math.log(longest**3 / min(eps0, u / (grid.size * grid.box.shape[0]))) / (0.5 - 2 * hat)
        self.beta = 2.0 ** math.ceil(math.log2(wanted))  # a power of two: beta times a hat is exact
        self.kappa = math.log(1 / eps0)
        self.places = anchors_of_hats(count)
        self.ramp_beta = Fraction(self.kappa) * (count - 1) ** 2
        slope = nearest([2 * self.ramp_beta * x for x in self.places], dtype)
        offset = nearest([-self.ramp_beta * x * x for x in self.places], dtype)
        value = nearest([x + Fraction(1, 2) for x in self.places], dtype)
        self.net = UniversalNet(grid, values, (slope, offset, value), self.beta, form, second, dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self.net.keys.dtype

    def check_shape(self, x: Tensor) -> None:
        if tuple(x.shape[-2:]) != self.box.shape or x.dim() < 2:
            raise ArgumentError(
                f"expected X of shape (batch, {self.box.shape[0]}, {self.box.shape[1]}), got {tuple(x.shape)}"
            )

    def core(self, *inputs: Tensor) -> Tensor:
        return self.net(inputs[0])

    def target(self, X: Tensor) -> Tensor:
        flat = X.double().reshape(-1, *self.box.shape)
        return evaluated(self.f, flat, self.box).reshape(*X.shape[:-2], self.box.shape[0], -1)

    def attention(self, X: Tensor) -> Tensor:
        """The weights of the selection: (batch, grid point), or (batch, token, grid point) in token-wise form."""
        return self.net.selection(X)

    def hats(self, X: Tensor) -> Tensor:
        """The hats of layer 1, (batch, coordinate and grid value)."""
        return self.net.hats(X)

    def hat_error(self) -> float:
        """How far a computed hat can be from the hat function, on the box."""
        u, most = unit(self.dtype), 0.0
        stored = self.net.ramp_table()
        table: ColdTable = cold_table(stored[0], stored[1], self.places, self.ramp_beta, Fraction(0))
        ideal = [x + Fraction(1, 2) for x in self.places]
        reach = 0.0
        for (weight, bias), (rate, shift, size) in zip(self.net.queries(), self._ideal_queries(), strict=True):
            lost = float(abs(Fraction(weight) - rate)) * size + float(abs(Fraction(bias) - shift))
            span = abs(weight) * size + abs(bias)
            most = max(most, float(up(lost + float(gamma(2, u)) * span + 4 * TINY[self.dtype], 8)))
            reach = max(reach, span * (1 + 1e-9))
        low, high = cells(table, -reach - most, reach + most)
        error = distance(stored[2], ideal)
        rounding = float(np.max(head_rounding(table, stored[2], error, low, high, self.dtype)))
        ramp = 0.5 / (self.count - 1) + rounding + most
        return float(up(2 * ramp + 8 * u, 8))

    def _ideal_queries(self) -> list[tuple[Fraction, Fraction, float]]:
        """For every ramp: rate, shift, and the largest |x| of its coordinate."""
        found = []
        outward = self.box.outward(self.dtype).intervals()
        for i, step in enumerate(self.grid.steps):
            size = max(abs(v) for v in outward[i])
            found += [(1 / step, -at / step - Fraction(1, 2), size) for at in self.grid.axis(i)[:-1]]
        return found

    def recertify(self) -> Certificate:
        self.net.unchanged(self.beta)
        hat, u, D = self.hat_error(), unit(self.dtype), len(self.grid.counts)
        if not hat <= LARGEST_HAT_ERROR:
            raise PrecisionError(f"hats are computed with errors up to {hat:.3g}, which is too much to tell them apart")
        away = math.exp(-self.beta * (0.5 - 2 * hat)) * (1 + 1e-9)
        square = sum(
            float(step) ** 2 * (0.25 + hat + hat**2 + count**3 * away)
            for step, count in zip(self.grid.steps, self.grid.counts, strict=True)
        )
        reach = float(up(math.sqrt(square) * (1 + 1e-12)))
        slots = self.net.keys.shape[-2]
        logit = self.beta * D * (1 + hat)
        d = float(up(float(gamma(D + 3, u)) * logit + (EXP_ULPS + 1) * u, 8))
        light = away * math.exp(min(2 * d, 50.0)) <= u / slots and slots * u < 0.125
        if not light or d > 0.2:
            raise PrecisionError(f"logits of {logit:.3g} over {slots} keys leave no bound in {DTYPES[self.dtype]}")
        values = self.net.values()
        largest, spread = float(values.abs().max()), float((values.amax(0) - values.amin(0)).max())
        heavy = 2 * 2**D + 4
        rounding = math.exp(d) * math.expm1(d) * spread + float(gamma(heavy, u)) * largest
        rounding += 2 * slots * TINY[self.dtype] * (1 + largest)
        stored = float((values - self.samples.flatten(1)).abs().max())
        note = f"{self.grid.size} grid points"
        measured = self.measure_now()
        blank = Certificate("calibrated", None, DTYPES[self.dtype], "f", self.box, measured=measured)
        if self.omega is None:
            return blank
        position = 2.0**-50 * math.sqrt(D) * max(abs(v) for pair in self.box.intervals() for v in pair)
        moved = self.omega(position) if position > 0 else 0.0
        terms: dict[tuple[str, Source], float] = {
            ("grid", "interpolation"): float(up(self.omega(reach) * (1 + 1e-12))),
            ("selection", "rounding"): float(up(rounding + stored + moved, 16)),
        }
        ledger = sum_of(terms, {("grid", "interpolation"): f"{note}, hats within {hat:.2g}"})
        return Certificate(
            "certified", total(x.value for x in ledger), DTYPES[self.dtype], "f", self.box, ledger, measured=measured,
            lemmas=("A2", "E1" if self.second == "attention" else "E2", "R5"), assumptions=ASSUMPTIONS,
        )  # fmt: skip

    @torch.no_grad()
    def measure_now(self) -> float:
        """The largest error at points drawn from the box, corners included."""
        X = self.points(256)
        return float((self.core(X).double() - self.target(X)).abs().max())

    @property
    def size(self) -> Size:
        ramps = len(self._ideal_queries())
        heads = ramps + (self.second == "attention") + (self.box.shape[0] if self.form == "tokens" else 0)
        layers = (2 if self.second == "attention" else 1) + (self.form == "tokens")
        logit = max(self.beta * len(self.grid.counts), 2 * float(self.ramp_beta))
        count = sum(p.numel() for p in self.parameters())
        return Size(layers, heads, self.count + self.net.keys.shape[-2], count, logit)

    @property
    def matrices(self) -> dict[str, Tensor]:
        """Layer 1 with the suffix 1, then the selection; A makes one column out of X."""
        return self.net.matrices()


def anchors_of_hats(count: int) -> list[Fraction]:
    """Anchors on [0, 1], centred on 0."""
    return anchors(Fraction(-1, 2), Fraction(1, 2), count)
