"""The ramp at other temperatures, token-wise: warm anchors (A3), and a gate without anchors (B2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..box import Box
from ..certificates.certificate import Certificate, Term, total
from ..certificates.rounding import ASSUMPTIONS, up
from ..errors import ArgumentError, CertificateError, PrecisionError
from ..functions.registry import piecewise_linear
from ..heads.anchor.bound import AnchorWeights, anchor_bound
from ..heads.gate.head import GateHead
from ..network import AttentionLayer, Heads
from .cold import anchors, dot_error, nearest
from .ramp import ScalarTarget, scalars
from .registers import Registers, over_slots, parts, read_as_is, stacked, tables_of, weights_of
from .result import DTYPES, Construction, Size, number

BALANCED = 2.72  # where the kink at the end of the table errs as much as the interior: 0.062 of a spacing


class SmoothRamp(Construction):
    """An affine layer makes y = w.x + t, a second layer makes the ramp of it."""

    form = "tokens"
    w: Tensor
    t: Tensor

    def __init__(
        self, w: Tensor, t: Tensor, shape: ScalarTarget, count: int, radius: float, channels: int,
        kappa: float | None, causal: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.causal = causal
        self.shape, self.count, self.radius, self.channels = shape, count, radius, channels
        self.register_buffer("w", w)
        self.register_buffer("t", t)
        self.box = Box.cube(-radius, radius, shape=w.shape[-1])
        self.net = stacked(AttentionLayer([], S=w[:, None], s=t.reshape(1)), self.second(kappa))
        self.judged(float(shape.b - shape.a) / 2, "use float64 or a smaller radius")

    @property
    def dtype(self) -> torch.dtype:
        return self.w.dtype

    def second(self, kappa: float | None) -> AttentionLayer | Registers:
        """The layer that makes the ramp of y."""
        raise NotImplementedError

    def error(self) -> tuple[float, float]:
        """The second layer's error over the range of y: interpolation and rounding."""
        raise NotImplementedError

    def reach(self) -> tuple[float, float]:
        """The largest |y| that can be computed, and the rounding of y."""
        w, t = (x.detach().double() for x in (self.w, self.t))
        size = float(up(float(w.abs().sum()) * self.radius + abs(float(t)), w.shape[-1] + 4))
        error = dot_error(w.shape[-1] + 1, size, self.dtype)
        return size + error, error

    def check_shape(self, x: Tensor) -> None:
        if x.dim() < 2 or x.shape[-1] != self.w.shape[-1]:
            raise ArgumentError(f"expected X of shape (batch, tokens, {self.w.shape[-1]}), got {tuple(x.shape)}")

    def core(self, *inputs: Tensor) -> Tensor:
        return self.net(inputs[0])

    def scalar(self, X: Tensor) -> Tensor:
        """y = w.x + t in float64."""
        return scalars(X.double(), self.w.double(), self.t.double())

    def target(self, X: Tensor) -> Tensor:
        y = self.shape.value(self.scalar(X))
        return torch.nn.functional.pad(y.unsqueeze(-1), (0, self.channels - 1))

    def attention(self, X: Tensor) -> Tensor:
        """The softmax weights, (batch, tokens, slots)."""
        first, second = parts(self.net)
        return weights_of(second, first(X))[..., 0, :]

    def recertify(self) -> Certificate:
        interpolation, rounding = self.error()
        w, t, first = self.w.double(), self.t.double(), parts(self.net)[0]
        assert first.S is not None
        assert first.s is not None
        changed = float((first.S.detach().double()[:, 0] - w).abs().sum()) * self.radius
        changed += abs(float(first.s.detach().double() - t))  # 0 unless somebody changed the first layer
        query = float(up(self.reach()[1] + changed, 4))
        terms = (
            Term("head", "interpolation", interpolation),
            Term("head", "rounding", rounding),
            Term("w.x + t", "rounding", query, f"|x| at most {self.radius:g}"),
        )
        return Certificate(
            "certified", total(x.value for x in terms), DTYPES[self.dtype], self.shape.text(), self.box, terms,
            lemmas=("A4", "A5", "B2"), assumptions=(*ASSUMPTIONS, "exp(0) = 1"),
        )  # fmt: skip

    def points(self, count: int, seed: int = 0) -> Tensor:
        return super().points(4 * count, seed)[: 4 * count].reshape(count, 4, -1)

    @property
    def size(self) -> Size:
        W_Q, b_Q, M_K, *_ = tables_of(parts(self.net)[1])
        reach = self.reach()[0] * float(W_Q.abs().max()) + float(b_Q.abs().max())
        parameters = sum(p.numel() for p in self.parameters())
        return Size(2, len(W_Q), M_K.shape[-2], parameters, float(M_K.abs().sum(-1).max()) * reach)

    @property
    def matrices(self) -> dict[str, Tensor]:
        """The tables of the second layer, and w, t of the first."""
        second = parts(self.net)[1]
        group = second.heads()[0] if isinstance(second, AttentionLayer) else second.heads
        return {"w": self.w, "t": self.t, **{name: p.detach() for name, p in group.named_parameters()}}


class WarmRamp(SmoothRamp):
    """The same anchors at kappa = 2.72: error about 0.062 of a spacing instead of half of one."""

    theorem = "warm anchors (A3) in place of arXiv 2504.15956 v1 theorem 3.1"

    def second(self, kappa: float | None) -> AttentionLayer | Registers:
        dtype = self.w.dtype
        self.kappa = BALANCED if kappa is None else number("kappa", kappa, positive=True)
        self.places = anchors(self.shape.a, self.shape.b, self.count)
        step = float(self.places[1] - self.places[0])
        at = np.array([float(x) for x in self.places])
        beta = self.kappa / step**2
        middle = 0.5 * (at[0] + at[-1])
        centre = float(torch.tensor(middle, dtype=dtype))
        away = at - centre
        tables = np.stack([2 * beta * away, -beta * away**2], -1)
        number_ = lambda x: torch.tensor(x, dtype=dtype)  # noqa: E731
        value = torch.zeros(1, self.count, self.channels, dtype=dtype)
        value[0, :, 0] = torch.from_numpy(nearest(self.places, dtype)).to(dtype)
        group = Heads(
            "memory", W_Q=number_([[[1.0, 0.0]]]), b_Q=number_([[-centre, 1.0]]),
            M_K=torch.from_numpy(tables).to(dtype)[None], M_V=value, W_O=torch.eye(self.channels, dtype=dtype)[None],
            purpose="warm ramp",
        )  # fmt: skip
        return over_slots(group, self.causal)

    @property
    def anchors(self) -> np.ndarray:
        """The anchors L_k."""
        return np.array([float(place) for place in self.places])

    def error(self) -> tuple[float, float]:
        tables = read_as_is(tables_of(parts(self.net)[1]))
        keys, value = (x.double().numpy()[0] for x in (tables.M_K, tables.M_V))
        if tables.W_Q.flatten().tolist() != [1.0, 0.0] or float(tables.b_Q[0, 1]) != 1.0 or bool(value[:, 1:].any()):
            raise CertificateError("the query must read (y - centre, 1) and values fill one channel; they were changed")
        weights = AnchorWeights(keys[:, 0], keys[:, 1], value[:, 0], -float(tables.b_Q[0, 0]))
        a, b, most = float(self.shape.a), float(self.shape.b), self.reach()[0]
        width = b - a
        target = piecewise_linear([a - width, a, b, b + width], [a, a, b, b])
        steps = np.linspace(a, b, 8 * self.count + 1)
        outside = width * 2.0 ** np.arange(-12, 60)
        edges = np.unique(np.concatenate([a - outside[::-1], steps, b + outside, [-most, most]]))
        edges = edges[(edges >= -most) & (edges <= most)]
        edges = np.unique(np.concatenate([edges, [x for x in (a - width, b + width) if -most < x < most]]))
        found = anchor_bound(weights, target, edges, self.dtype)
        if not np.isfinite(found.bound):
            raise PrecisionError("no finite bound can be given for this warm ramp; use float64 or a smaller radius")
        return found.interpolation, found.rounding


class GateRamp(SmoothRamp):
    """Logits (beta (a - y), 0, beta (y - b)), values (a, y, b): two constants and the token itself (B2)."""

    theorem = "a gate (B2) in place of arXiv 2504.15956 v1 theorem 3.1"

    def second(self, kappa: float | None) -> AttentionLayer:
        if kappa is not None:
            raise ArgumentError("a gate has no anchors and takes no kappa")
        most = self.reach()[0]
        gate = GateHead.ramp(
            float(self.shape.a), float(self.shape.b), min(-most, float(self.shape.a)), max(most, float(self.shape.b)),
            dtype=self.w.dtype,
        )  # fmt: skip
        self.gate = [gate]  # in a list: it describes the layer and is no part of the network
        layer = gate.layer
        if self.channels > 1:
            for group in layer.heads():
                wide = torch.nn.functional.pad(group.W_O.detach(), (0, self.channels - 1))
                group.W_O = nn.Parameter(wide)
            if layer.S is not None:
                layer.S = nn.Parameter(torch.nn.functional.pad(layer.S.detach(), (0, self.channels - 1)))
            if layer.s is not None:
                layer.s = nn.Parameter(torch.nn.functional.pad(layer.s.detach(), (0, self.channels - 1)))
        return layer

    @property
    def anchors(self) -> np.ndarray:
        """The two constants."""
        return np.array([float(self.shape.a), float(self.shape.b)])

    def error(self) -> tuple[float, float]:
        gate: Any = self.gate[0]
        if self.channels > 1:
            narrow = GateHead.ramp(float(self.shape.a), float(self.shape.b), gate.lo, gate.hi, dtype=self.dtype)
            stored, fresh = parts(self.net)[1], narrow.layer
            for mine, built in zip(stored.parameters(), fresh.parameters(), strict=True):
                cut = mine.detach()[..., : built.shape[-1]]
                if not torch.equal(cut, built.detach()):
                    raise PrecisionError(
                        "the gate's weights were changed: with several channels it cannot be certified anew"
                    )
            gate = narrow
        found = gate.error()
        return found.mismatch + found.leak, found.rounding
