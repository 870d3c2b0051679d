"""Universality: two attention layers, or one followed by a softmax (arXiv 2504.15956, v1 theorem 3.3, v2 3.14).

Layer 1. For every coordinate x and neighbouring values v, v + delta of its grid one cold head makes the ramp
clip((x - v)/delta, 0, 1); differences of neighbouring ramps are hat functions, which are 1 at one value of the grid and
0 at all others. Layer 2. The sum of the hats of X's coordinates at a grid point v is the logit of v, times beta, and
f(v) its value (E1); or the logits are channels that a softmax acts on, and a linear map reads f(v) off (E2).

Paper form: all coordinates in one column. Token-wise form: a gather layer (D1) first gives every token all coordinates;
layer 2 then has a key for every grid point and token, and positions select the token's own value. Positions enter as
channels; dead keys weigh an exact 0.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..box import Box
from ..certificates.rounding import unit
from ..dtypes import Array, by_name, shipped, stored
from ..errors import ArgumentError
from ..kernel.sampled.hypothesis import of_grid
from ..network import AttentionLayer, Heads
from ..progress import shown
from .bounds import DEAD, LARGEST_HAT_ERROR, AnchorRow, Hats, hat_error, hats_ledger
from .grid import (
    FromSamples,
    Function,
    Grid,
    Modulus,
    Sampled,
    evaluated,
    grid_of,
    hypothesis_of,
    modulus_of,
    on_box,
    refuse_steeper,
    slope_of,
)
from .ramps import nearest, slot_keys
from .result import Curves, Indices, Ledger, Size, diagonal_picture, form_of, leak, number, tensor, whole

if TYPE_CHECKING:
    from .result import TheoremPicture

ROWS = 1 << 22  # entries of a softmax over channels alive at once: 32 MB in float64
ANCHORS = 65  # of the ramps that make hats, unless asked otherwise: then a hat errs by 1/64


class SoftmaxReadOut(nn.Module):
    """softmax over channels of Z W_1, then a linear map: no keys, no tokens, the softmax of the theorem."""

    def __init__(self, logits: Tensor, read: Tensor):
        super().__init__()
        self.logits, self.read = nn.Parameter(logits.clone()), nn.Parameter(read.clone())

    def weights(self, Z: Tensor) -> Tensor:
        """The softmax over channels."""
        return torch.softmax(Z @ self.logits, -1)

    def forward(self, Z: Tensor) -> Tensor:
        step = max(1, ROWS // self.logits.shape[-1])
        if torch.compiler.is_compiling() or Z[..., 0].numel() <= step:
            return self.weights(Z) @ self.read
        flat = Z.reshape(-1, Z.shape[-1])
        return torch.cat([self.weights(part) @ self.read for part in flat.split(step)]).reshape(*Z.shape[:-1], -1)


class UniversalNet(nn.Module):
    """(gather,) hats, selection."""

    def __init__(self, asked: Hats, form: str, dtype: torch.dtype):
        super().__init__()
        grid = asked.grid
        self.grid, self.form = grid, form
        self.tokens, self.width = grid.box.shape
        D, n, hats = len(grid.counts), self.tokens, sum(grid.counts)
        extra = asked.tokens  # channels that carry positions along
        W_Q, b_Q, W_O, constant = _hat_weights(grid, extra, dtype)
        keys = slot_keys(asked.places, Fraction(0), asked.ramp_beta, dtype)
        value = nearest([x + Fraction(1, 2) for x in asked.places], dtype)
        group = Heads("memory", W_Q=W_Q, b_Q=b_Q, M_K=keys[None], M_V=value[None, :, None], W_O=W_O, purpose="ramps")
        skip = torch.cat(
            [torch.zeros(D, hats + extra, dtype=dtype), torch.eye(extra, hats + extra, dtype=dtype).roll(hats, 1)]
        )
        self.first = AttentionLayer([group], S=skip if extra else None, s=constant)
        select = _selection_keys(grid, dtype)  # (grid point, hat)
        out = torch.from_numpy(asked.samples).to(dtype)  # (grid point, output)
        if extra:  # one key for every grid point and token
            dead = asked.dead * (torch.eye(n, dtype=dtype) - 1)
            select = torch.cat([select.repeat_interleave(n, 0), dead.repeat(grid.size, 1)], 1)
            out = out.reshape(grid.size * n, -1)
            self.positions = nn.Parameter(torch.eye(n, dtype=dtype))
            self.gather = gathering(n, self.width, asked.dead, dtype)
        scale = torch.cat([torch.full((hats,), asked.beta, dtype=dtype), torch.ones(extra, dtype=dtype)])
        self.select: AttentionLayer | SoftmaxReadOut
        if asked.softmax:
            self.select = SoftmaxReadOut((select * scale).T.contiguous(), out)
        else:
            eye, query = torch.eye(out.shape[-1], dtype=dtype)[None], torch.diag(scale)[None]
            picks = Heads("memory", W_Q=query, M_K=select[None], M_V=out[None], W_O=eye, purpose="selection")
            self.select = AttentionLayer([picks])

    def state(self, X: Tensor) -> Tensor:
        """What layer 1 reads: all coordinates in one column, or in every token with its position."""
        if self.form == "paper":
            return X.flatten(-2).unsqueeze(-2)
        return self.gather(torch.cat([X, self.positions.expand(*X.shape[:-2], -1, -1)], -1))

    def hats(self, X: Tensor) -> Tensor:
        """The hats of all coordinates, one after the other."""
        found: Tensor = self.first(self.state(X))
        return found[..., 0, : sum(self.grid.counts)]

    def selection(self, X: Tensor) -> Tensor:
        """The weights of the grid points."""
        Z = self.first(self.state(X))
        if isinstance(self.select, SoftmaxReadOut):
            weights = self.select.weights(Z)
        else:
            weights = self.select.heads()[0].weights(Z)[..., 0, :]
        if self.form == "paper":
            return weights[..., 0, :]
        return own_keys(weights, self.tokens)

    def forward(self, X: Tensor) -> Tensor:
        out: Tensor = self.select(self.first(self.state(X)))
        return out if self.form == "tokens" else out.squeeze(-2).unflatten(-1, (self.tokens, -1))

    @property
    def keys(self) -> Tensor:
        """(key, channel), beta not included for attention, included for a softmax."""
        if isinstance(self.select, SoftmaxReadOut):
            return self.select.logits.detach().T
        return self.select.heads()[0].M_K.detach()[0]

    def stored(self) -> dict[str, Array]:
        """The numbers of all tensors, by the names of the paper and those of the gather layer."""
        found = self.matrices()
        if self.form == "tokens":
            assert self.first.S is not None
            found |= {"S_1": self.first.S, **gathered(self.gather, self.positions)}
        names = {"W_O": "read"} if isinstance(self.select, SoftmaxReadOut) else {}
        return {names.get(name, name): stored(x) for name, x in found.items()}

    def matrices(self) -> dict[str, Tensor]:
        """The weights by the names of the paper."""
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
        rate = nearest([1 / step], dtype)[0]
        shifts = nearest([-at / step - Fraction(1, 2) for at in grid.axis(i)[:-1]], dtype)
        constant[hat] = 1.0
        for shift in shifts:
            W_Q[ramp, i, 0], b_Q[ramp, 0] = rate, shift
            W_O[ramp, 0, hat], W_O[ramp, 0, hat + 1] = -1.0, 1.0
            ramp, hat = ramp + 1, hat + 1
        hat += 1
    return W_Q, b_Q, W_O, constant


def _selection_keys(grid: Grid, dtype: torch.dtype) -> Tensor:
    """(grid point, hat): 1 for the hats of the point's coordinates."""
    starts = torch.tensor([0, *np.cumsum(grid.counts)[:-1].tolist()])
    keys = torch.zeros(grid.size, sum(grid.counts), dtype=dtype)
    return keys.scatter_(1, grid.index() + starts, 1.0)


def gathering(n: int, width: int, omega: float, dtype: torch.dtype) -> AttentionLayer:
    """The layer that gives every token all channels of all n tokens, and leaves its position (D1).

    Head j gives every token the channels of token j: other keys get -omega, an exact weight 0.
    """
    channels, D = width + n, n * width
    W_Q, b_Q = torch.zeros(n, channels, n, dtype=dtype), torch.eye(n, dtype=dtype)
    W_K, b_K = torch.zeros(n, channels, n, dtype=dtype), torch.full((n, n), -omega, dtype=dtype)
    W_K[:, width:] = omega * torch.eye(n, dtype=dtype)
    W_V, W_O = torch.zeros(n, channels, width, dtype=dtype), torch.zeros(n, width, D + n, dtype=dtype)
    W_V[:, :width] = torch.eye(width, dtype=dtype)
    for j in range(n):
        W_O[j, :, j * width : (j + 1) * width] = torch.eye(width, dtype=dtype)
    skip = torch.zeros(width + n, D + n, dtype=dtype)
    skip[width:, D:] = torch.eye(n, dtype=dtype)
    heads = Heads("tokens", W_Q=W_Q, b_Q=b_Q, W_K=W_K, b_K=b_K, W_V=W_V, W_O=W_O, purpose="gather")
    return AttentionLayer([heads], S=skip)


def own_keys(weights: Tensor, n: int) -> Tensor:
    """The weights of each token's own keys, where every cell has one for each of n tokens; all others weigh 0."""
    return torch.diagonal(weights.unflatten(-1, (-1, n)), dim1=-3, dim2=-1).transpose(-2, -1)


def gathered(layer: AttentionLayer, positions: Tensor) -> dict[str, Tensor]:
    """The tensors of such a layer by name, and the positions it leaves."""
    assert layer.S is not None
    group = {f"gather {name}": x for name, x in layer.heads()[0].named_parameters()}
    return {**group, "gather S": layer.S, "positions": positions}


@shown("building")
@by_name
def two_layer(
    f: Function,
    box: Box,
    spacing: float,
    *,
    lipschitz: float | None = None,
    modulus: Modulus | None = None,
    anchors: int = ANCHORS,
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


@shown("building")
@by_name
def attention_then_softmax(
    f: Function,
    box: Box,
    spacing: float,
    *,
    lipschitz: float | None = None,
    modulus: Modulus | None = None,
    anchors: int = ANCHORS,
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
    shipped(dtype)
    values = evaluated(f, grid.points(), box)
    omega = modulus_of(lipschitz, modulus)
    if lipschitz is not None:
        refuse_steeper(f, grid, values, float(lipschitz))
    size = whole("anchors", count, 3, " (p > 2)")
    if 1 / (size - 1) > LARGEST_HAT_ERROR * 0.9:  # leaves room for rounding
        raise ArgumentError(f"anchors must be at least 7, so that hats are told apart, got {size}")
    m = Universal(f, grid, values, omega, size, leak(eps0), form_of(form), second, dtype)
    m.attach(m.recertify())
    return m


class Universal(FromSamples):
    """Hats of every coordinate, then a selection among grid points: `two_layer` or `attention_then_softmax`."""

    family = "theorem-universal"
    called = "the two layers of the theorem"

    def __init__(
        self, f: Function, grid: Grid, values: Tensor, omega: Modulus | None, count: int, eps0: float, form: str,
        second: str, dtype: torch.dtype,
    ):  # fmt: skip
        super().__init__()
        self.made, self.eps0 = dtype, eps0
        self.f, self.grid, self.count, self.form, self.second, self.box = f, grid, count, form, second, grid.box
        kind = "two layers" if second == "attention" else "one layer and a softmax"
        self.theorem = f"arXiv 2504.15956 v1 theorem 3.3 (v2 theorem 3.14), {kind}"
        hat = 1 / (count - 1) + 0.01  # with room for rounding
        # so cold that all but the nearest grid points are lighter than a rounding, and s_i below eps0
        least = min(eps0, unit(dtype) / (grid.size * grid.box.shape[0]))
        wanted = math.log(max(grid.counts) ** 3 / least) / (0.5 - 2 * hat)
        self.beta = 2.0 ** math.ceil(math.log2(wanted))  # a power of two: beta times a hat is exact
        self.kappa = math.log(1 / eps0)
        self.ramp_beta = Fraction(self.kappa) * (count - 1) ** 2
        places = tuple(AnchorRow(Fraction(-1, 2), Fraction(1, 2), count).places)
        dead = 2.0 ** math.ceil(math.log2(2 * self.beta * len(grid.counts) + DEAD))
        tokens = grid.box.shape[0] if form == "tokens" else 0
        self.asked = Hats(
            grid, values.flatten(1).numpy(), omega, places, self.ramp_beta, self.beta, dead, tokens, second == "softmax"
        )
        self.net = UniversalNet(self.asked, form, dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self.net.keys.dtype

    def core(self, *inputs: Tensor) -> Tensor:
        return self.net(inputs[0])

    def target(self, X: Tensor) -> Tensor:
        return on_box(self.f, self.box, X)

    def attention(self, X: Tensor) -> Tensor:
        """The weights of the selection: (batch, grid point), or (batch, token, grid point) in token-wise form."""
        return self.net.selection(X)

    def hats(self, X: Tensor) -> Tensor:
        """The hats of layer 1, (batch, coordinate and grid value)."""
        return self.net.hats(X)

    def hat_error(self) -> float:
        """How far a computed hat can be from the hat function, on the box."""
        return hat_error(self.asked, self.net.stored(), self.dtype)

    @property
    def hypothesis(self) -> str:
        return hypothesis_of(self.asked.modulus, of_grid(self.grid.counts))

    def ledger(self) -> Ledger:
        measured = None if isinstance(self.f, Sampled) else self.largest_error(256)
        return hats_ledger(self.asked, self.net.stored(), self.dtype, measured)

    def asks(self) -> dict[str, Any]:
        return {
            "box": self.box.to_json(), "counts": list(self.grid.counts), "samples": self.asked.samples.tolist(),
            "lipschitz": slope_of(self.asked.modulus), "anchors": self.count, "eps0": self.eps0, "form": self.form,
            "second": self.second,
        }  # fmt: skip

    @classmethod
    def again(cls, asked: dict[str, Any], made: torch.dtype) -> Universal:
        box, samples = Box.from_json(asked["box"]), tensor("samples", asked["samples"], torch.float64)
        grid = Grid.even(box, [whole("counts", n, 2) for n in asked["counts"]])
        count = whole("anchors", asked["anchors"], 7)
        if len(box.shape) != 2 or len(samples) != grid.size or asked["second"] not in ("attention", "softmax"):
            raise ArgumentError("the samples do not fit the grid, or the second layer is unknown")
        if max(count, sum(grid.counts), samples.numel()) > asked["most"]:
            raise ArgumentError("the description is of a larger network than the tensors")
        return cls(
            Sampled(), grid, samples.reshape(grid.size, box.shape[0], -1),
            modulus_of(number("lipschitz", asked["lipschitz"], positive=True), None), count, leak(asked["eps0"]),
            form_of(asked["form"]), asked["second"], made,
        )  # fmt: skip

    @torch.no_grad()
    def picture(self) -> TheoremPicture:
        """Along the diagonal of the box."""

        def curves(X: Tensor, s: Array, used: Indices) -> Curves:
            hats = self.hats(X).double().numpy()[:, : self.grid.counts[0]]
            chosen = range(0, hats.shape[1], max(1, hats.shape[1] // 6))
            return tuple((f"hat {k + 1}", s, hats[:, k]) for k in chosen)

        return diagonal_picture(self, curves, "Hats of the first coordinate (layer 1)", "hat")

    @property
    def size(self) -> Size:
        ramps = sum(self.grid.counts) - len(self.grid.counts)
        heads = ramps + (self.second == "attention") + (self.box.shape[0] if self.form == "tokens" else 0)
        layers = (2 if self.second == "attention" else 1) + (self.form == "tokens")
        logit = max(self.beta * len(self.grid.counts), 2 * float(self.ramp_beta))
        count = sum(p.numel() for p in self.parameters())
        return Size(layers, heads, self.count + self.net.keys.shape[-2], count, logit)

    @property
    def matrices(self) -> dict[str, Tensor]:
        """Layer 1 with the suffix 1, then the selection; A makes one column out of X."""
        return self.net.matrices()
