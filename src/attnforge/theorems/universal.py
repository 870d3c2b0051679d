"""Universality: two attention layers, or one followed by a softmax (arXiv 2504.15956, v1 theorem 3.3, v2 theorem 3.14).

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
from torch import Tensor

from ..box import Box
from ..certify.certificate import Certificate, Source, total
from ..certify.rounding import ASSUMPTIONS, EXP_ULPS, TINY, gamma, unit, up
from ..errors import ArgumentError, PrecisionError
from .cold import ColdTable, anchors, cells, cold_table, distance, head_rounding, nearest
from .grid import Function, Grid, evaluated, grid_of, refuse_steeper
from .modulus import Modulus, modulus_of
from .result import DTYPES, Construction, Size, form_of, leak, number, sum_of, whole
from .universal_net import UniversalNet

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
