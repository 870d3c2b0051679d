"""Gates and tables for activation functions: what `fast_activation.FastActivation` is made of.

An activation that goes like 0 on one side and like y on the other is a gate y sigmoid(gate y), right on the whole line,
plus a bump: g(y) - y sigmoid(gate y) decays on both sides. So a short table of evenly spaced anchors whose last values
are about 0 serves every interval, however wide. The values solve a least squares problem on the whole live part; rate,
kappa and gate have few bits, so that every key rate k and kappa k^2 is exact in float32.

`FastActivation`: activation functions over wide intervals as attention that costs one exponential per element.

gelu, gelu_tanh, softplus and mish are a gate y sigmoid(gate y), one self head, plus an anchor head for the bump that is
left, which decays on both sides (see `fast_fit`): right on the whole line, with 21 to 53 anchors. silu, quick_gelu and
relu are a gate alone, tanh and sigmoid an anchor head with two keys. Called, the module runs `fast.anchor_read`; under
`torch.compile` the same as plain PyTorch; exported it is its `layer`, softmax attention written out. Frozen, with
`requires_grad_(False)`, symmetric tables (gelu) compile to fewer operations: what counts is the symmetry of the weights
that were certified last.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...arguments import interval, positive
from ...box import Box, round_outward
from ...certificates.certificate import DTYPES, Certificate, Term, total, upper_text
from ...certificates.certified import CertifiedModule
from ...certificates.rounding import ASSUMPTIONS, unit, up
from ...dtypes import Array
from ...errors import ArgumentError, CertificateError, PrecisionError, closest
from ...functions.registry import Univariate, parse
from ...network import AttentionLayer, Heads
from ...threads import one_thread
from ..anchor.bound import CELLS, AnchorWeights, anchor_bound
from ..gate.bound import KINK
from . import read as fast
from .bound import DIVISIONS, ReadError, read_error
from .read import WIDEST, exporting, packed, read, unpacked, working

GATES = {  # slopes of the gate that leave a small bump, and where the bump's middle is
    "gelu": ((1.75, 1.875, 2.0, 2.125), 0.0),
    "gelu_tanh": ((1.75, 1.875, 2.0, 2.125), 0.0),
    "softplus": ((1.0,), 0.0),
    "mish": ((1.0,), 4.5),
}
RATES = (1.0, 1.25, 1.5)  # of the table, as multiples of the gate's; 1 shares its exponential
KAPPAS = tuple(k / 32 for k in (4, 5, 6, 8, 10, 12, 13, 14, 15, 16, 18))
HALVES = (6, 8, 10, 11, 12, 13, 14, 15, 16, 17, 18, 20, 22, 24, 26, 28, 31)  # (anchors - 1) / 2
FAR = 80.0  # the fit looks at the function this far out: beyond, both sides are straight to any precision


@dataclass(frozen=True)
class Table:
    """An evenly spaced table and a gate: the arguments of `anchor_read`. Without values there is only the gate."""

    value: tuple[float, ...]
    rate: float = 1.0
    kappa: float = 1.0
    centre: float = 0.0
    gate: float = 0.0

    @property
    def anchors(self) -> int:
        """How many there are."""
        return len(self.value)

    def keys(self) -> Array:
        """Slopes and offsets of the logits, exactly: (anchor, 2)."""
        k = np.arange(self.anchors) - (self.anchors - 1) / 2
        return np.stack([self.rate * k, -self.kappa * k * k], -1).reshape(-1, 2)


@dataclass(frozen=True)
class Fitted:
    """A table and the largest error on the sample."""

    table: Table
    error: float


@functools.lru_cache(maxsize=64)
def _sample(fn: Univariate, lo: float, hi: float) -> tuple[Array, Array]:
    live = np.linspace(-30.0, 30.0, 1201)
    far = np.concatenate([-np.geomspace(30.0, max(FAR, -lo), 40), np.geomspace(30.0, max(FAR, hi), 40)])
    y = np.unique(np.concatenate([live, far, [lo, hi]]))
    return y, fn.value(torch.from_numpy(y)).numpy()


def _solve(
    fn: Univariate, lo: float, hi: float, half: int, rate: float, kappa: float, centre: float, gate: float,
    dtype: torch.dtype,
) -> Fitted:  # fmt: skip
    y, wanted = _sample(fn, lo, hi)
    with np.errstate(over="ignore"):
        bump = wanted - y / (1 + np.exp(-gate * y))
    k = np.arange(-half, half + 1.0)
    logit = np.multiply.outer(rate * (y - centre), k) - kappa * k * k
    weight = np.exp(logit - logit.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    left, size, right = np.linalg.svd(weight, full_matrices=False)
    best: Fitted | None = None
    for cut in (1e-13, 1e-11, 1e-9):
        kept = size > cut * size[0]
        value = right.T[:, kept] @ ((left.T[kept] @ bump) / size[kept])
        if centre == 0 and np.abs(value - value[::-1]).max() < 1e-3 * np.abs(value).max():
            value = 0.5 * (value + value[::-1])  # the bump of an even function: half the work
        value = torch.from_numpy(value).to(dtype).double().numpy()
        # where the values are far larger than the bump, rounding decides
        error = float(np.abs(weight @ value - bump).max() + 4 * unit(working(dtype)) * np.abs(value).max())
        if best is None or error < best.error:
            best = Fitted(Table(tuple(value.tolist()), rate, kappa, centre, gate), error)
    assert best is not None
    return best


def fitted(fn: Univariate, lo: float, hi: float, dtype: torch.dtype, most: int) -> Iterator[Fitted]:
    """Ever larger tables, each better than the last by the error on the sample."""
    gates, centre = GATES[fn.name]
    reached = np.inf
    with one_thread():
        for half in HALVES:
            if 2 * half + 1 > most:
                return
            best: Fitted | None = None
            for gate in gates:
                for multiple in RATES if centre else (1.0,):
                    for kappa in KAPPAS:
                        wide = kappa * half * half > 0.98 * WIDEST[working(dtype)]
                        ends = 2 * kappa * half / (gate * multiple)
                        if wide or not 6.0 < ends < 30.0:
                            continue
                        one = _solve(fn, lo, hi, half, gate * multiple, kappa, centre, gate, dtype)
                        best = one if best is None or one.error < best.error else best
            if best is not None and best.error < 0.9 * reached:
                reached = best.error
                yield best


NAMES = {dtype: name for name, dtype in DTYPES.items() if dtype != torch.float16}
QUICK = 1.702  # the slope of quick_gelu
EXACT = ("sigmoid", "tanh", "silu", "quick_gelu", "relu")
MOST = 64
SHARPNESS = {torch.float32: 2.0**30, torch.bfloat16: 2.0**30, torch.float64: 2.0**60}  # of a relu, at scale 1


class FastActivation(CertifiedModule):
    """An activation function as attention with a certificate, evaluated with one exponential per element.

    >>> gelu = FastActivation.fit("gelu", -34, 50)
    >>> gelu.certificate.kind, gelu.bound < 1e-6, gelu.size <= 40
    ('certified', True, True)
    >>> y = torch.linspace(-34, 50, 1001)
    >>> bool((gelu(y).double() - torch.nn.functional.gelu(y.double())).abs().max() <= gelu.bound)
    True
    """

    family = "fast"
    _even = False  # values certified last were symmetric: compilers leave half of the numerator out, once it is frozen

    def __init__(
        self, function: Univariate, lo: float, hi: float, table: Table, dtype: torch.dtype, strict: bool = False
    ):
        super().__init__()
        self.function, self.lo, self.hi, self.table, self.strict = function, lo, hi, table, strict
        self.box = Box(y=(lo, hi))
        self._numbers = packed(table.rate, table.kappa, table.centre, table.gate)
        number = lambda x: torch.tensor(x, dtype=torch.float64).to(dtype)  # noqa: E731
        one, groups = number([[[1.0]]]), []
        purpose = f"{function.name} on [{lo:g}, {hi:g}]"
        if table.gate:
            gate, zero = number([[table.gate]]), number([[[0.0]]])
            groups.append(Heads("self", W_Q=one, b_K=gate, W_V=one, M_K=zero, M_V=zero, W_O=one, purpose=purpose))
        if table.anchors:
            value = number(table.value)[None, :, None]
            query, shift = number([[[1.0, 0.0]]]), number([[-table.centre, 1.0]])
            keys = number(table.keys().tolist())[None]
            groups.append(Heads("memory", W_Q=query, b_Q=shift, M_K=keys, M_V=value, W_O=one, purpose=purpose))
        self.layer: AttentionLayer = AttentionLayer(groups)
        for name, parameter in self.layer.named_parameters():  # only the values of the anchors train
            parameter.requires_grad_(name.endswith("M_V") and parameter.shape[1] == table.anchors > 0)

    @classmethod
    def fit(
        cls, name: str, lo: float, hi: float, *, eps: float | None = None, anchors: int | None = None,
        dtype: torch.dtype = torch.float32, strict: bool = False,
    ) -> FastActivation:  # fmt: skip
        """The activation `name` on [lo, hi]: the smallest table that certifies `eps`, or the best of at most `anchors`.

        Raises `PrecisionError`, saying what can be reached, when eps is out of reach with 64 anchors (or `anchors`).
        """
        low, high = interval(lo, hi)
        if dtype not in NAMES:
            raise ArgumentError(f"dtype must be one of {', '.join(DTYPES)} but float16, got {dtype}")
        if name not in (*EXACT, *GATES):
            known = (*EXACT, *GATES)
            raise ArgumentError(
                f"there is no fast form of {name!r}{closest(str(name), known)}; known are {', '.join(known)}: "
                "use AnchorHead or, for kinks, GateHead"
            )
        if anchors is not None and (isinstance(anchors, bool) or not isinstance(anchors, int) or anchors < 21):
            raise ArgumentError(f"anchors must be a whole number, at least 21, got {anchors!r}")
        if eps is not None:
            positive("eps", eps)
        function, best = parse(name), math.inf
        chosen: FastActivation | None = None
        expected = math.inf
        for table, error in _tables(function, low, high, dtype, anchors or MOST):
            made = cls(function, low, high, table, dtype, strict)
            guess = error + made.reading().bound
            if eps is not None and guess <= eps:  # certified only where it looks good
                bound = made.attach(made.recertify()).bound
                assert bound is not None
                if bound <= eps:
                    return made
                best = min(best, bound)
            if guess < 0.95 * expected:
                chosen, expected = made, guess
            elif eps is None and guess > 1.1 * expected:
                break  # rounding decides: more anchors do not help
        if chosen is not None:
            best = min(best, chosen.attach(chosen.recertify()).bound or math.inf)
        if eps is not None or chosen is None:
            wanted = "a table" if eps is None else f"eps = {eps:g}"
            raise PrecisionError(
                f"{wanted} cannot be reached for {name} on [{low:g}, {high:g}] in {NAMES[dtype]} with at most "
                f"{anchors or MOST} anchors; the smallest bound found is {upper_text(best)}: ask for that"
                f"{'' if dtype == torch.float64 else ', use dtype=torch.float64'}, or shrink the interval",
                reachable=best if math.isfinite(best) else None,
            )
        return chosen

    @property
    def size(self) -> int:
        """The number of anchors; 0 for a gate alone."""
        return self.table.anchors

    @property
    def anchors(self) -> Tensor:
        """Where the anchors are."""
        t = self.table
        return torch.tensor([t.centre + 2 * t.kappa / t.rate * (i - (self.size - 1) / 2) for i in range(self.size)])

    @property
    def values(self) -> Tensor:
        """The value of each anchor, as stored."""
        return self._values().detach()

    def _values(self) -> Tensor:
        group = self.layer.heads()[-1]
        return group.M_V[0, :, 0] if self.size else group.M_V.new_zeros(0)

    def core(self, *inputs: Tensor) -> Tensor:
        (y,) = inputs
        if exporting():
            return self.layer(y.unsqueeze(-1)).squeeze(-1)
        value, t = self._values(), self.table
        value = value if value.dtype == torch.float64 else value.float()
        if torch.compiler.is_compiling():
            even = self._even and not any(p.requires_grad for p in self.layer.parameters())
            rate, kappa, centre, gate = unpacked(self._numbers)
            return read(y, value, rate, kappa, centre, gate, even)
        return fast.anchor_read(y, value, t.rate, t.kappa, t.centre, t.gate)

    def attach(self, certificate: Certificate) -> Certificate:
        self._even = bool(torch.equal(self.values, self.values.flip(0)))
        return super().attach(certificate)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._even = False
        super()._load_from_state_dict(*args, **kwargs)

    def plain(self) -> nn.Module:
        """The same heads as softmax attention written out: a module without the fast path, sharing these weights."""
        return WrittenOut(self.layer)

    def interval_in_dtype(self) -> tuple[float, float]:
        """[lo, hi] widened to numbers of the dtype."""
        low, high = (float(x) for x in round_outward(np.array(self.lo), np.array(self.hi), self.dtype))
        return low, high

    def reading(self) -> ReadError:
        """How far the evaluation can be from the same heads in exact arithmetic (lemma A8)."""
        t, stored = self.table, self.values.cpu().double().numpy()
        return read_error(stored, t.rate, t.kappa, *self.interval_in_dtype(), self.dtype, t.centre, t.gate)

    def bump(self) -> Univariate:
        """What the anchors stand for: the function less the gate."""
        return parse(f"expr: {self.function.name}(y) - y*sigmoid({self.table.gate!r}*y)")

    def interpolation(self) -> float:
        """A bound of |heads in exact arithmetic - function| on the interval."""
        t = self.table
        low, high = self.interval_in_dtype()
        if self.function.name in EXACT:
            return self._mismatch()
        keys = t.keys()
        stored = self.values.cpu().double().numpy()
        weights = AnchorWeights(keys[:, 0], keys[:, 1], stored, t.centre)
        ends = t.centre - t.kappa * (self.size - 1) / t.rate, t.centre + t.kappa * (self.size - 1) / t.rate
        places = np.concatenate([np.linspace(low, high, 65), np.linspace(ends[0] - 2, ends[1] + 2, CELLS)])
        edges = np.unique(np.concatenate([[low, high], places[(places > low) & (places < high)]]))
        return anchor_bound(weights, self.bump(), edges, torch.float64).bound

    def _mismatch(self) -> float:
        """The error of a function that the heads are, but for stored numbers and the kink of a relu."""
        name, gate = self.function.name, self.table.gate
        if name in ("sigmoid", "tanh"):
            off = np.abs(self.values.cpu().double().numpy() - ((0.0, 1.0) if name == "sigmoid" else (-1.0, 1.0))).max()
            return float(up(off, 2)) if off else 0.0
        if name == "relu":
            return float(up(KINK / gate, 4))  # lemma B1
        wanted_gate = QUICK if name == "quick_gelu" else 1.0
        # y sigmoid(a y) moves with a by y^2 sigmoid'(a y) <= 0.44 / a^2
        return (
            0.0 if gate == wanted_gate else float(up(0.45 * abs(gate - wanted_gate) / min(gate, wanted_gate) ** 2, 8))
        )

    def recertify(self) -> Certificate:
        self._check_keys()
        reading, t = self.reading(), self.table
        what = f"{self.function.name}, {self.size} anchors" if self.size else f"{self.function.name}, gate"
        terms = [Term(what, "interpolation", self.interpolation(), "heads in exact arithmetic against the function")]
        if reading.leak:
            terms.append(Term(what, "leak", reading.leak, "anchors outside the window"))
        rounding = float(up(reading.bound - reading.leak, 4))
        terms.append(
            Term(what, "rounding", rounding, f"one exponential per element, worst near y = {reading.where:.4g}")
        )
        lemmas = (
            ("B1", "A8") if self.function.name == "relu" else ("B4", "A8") if not t.anchors > 2 else ("A4", "B4", "A8")
        )
        return Certificate(
            kind="certified",
            bound=total(term.value for term in terms),
            dtype=NAMES[self.dtype],
            target=self.function.name,
            box=self.box,
            terms=tuple(terms),
            measured=None if self.dtype == torch.float64 else self._measure(),  # float64 has no finer reference
            lemmas=lemmas,
            assumptions=(*ASSUMPTIONS, DIVISIONS),
        )

    def _check_keys(self) -> None:
        """Raise `CertificateError` when anything but the values was changed: the evaluation has them as numbers."""
        if self.dtype not in NAMES:
            raise CertificateError(f"certificates are for {', '.join(NAMES.values())}, these weights are {self.dtype}")
        fresh = FastActivation(self.function, self.lo, self.hi, self.table, self.dtype).state_dict()
        values = f"layer.groups.{len(self.layer.groups) - 1}.M_V" if self.size else ""
        changed = [n for n, t in self.state_dict().items() if n != values and not torch.equal(t.cpu(), fresh[n])]
        if changed:
            raise CertificateError(
                f"the keys, queries and outputs of a fast activation are fixed, and {', '.join(changed)} changed; "
                "train the values only, or use AnchorHead"
            )

    @torch.no_grad()
    def _measure(self, points: int = 4097) -> float:
        low, high = self.interval_in_dtype()
        y = torch.from_numpy(np.linspace(low, high, points)).to(self.dtype).clamp(low, high)
        out = self.core(y.to(self.values.device)).double().cpu()
        return float((out - self.function.value(y.double())).abs().max())

    def config(self) -> dict[str, Any]:
        t = self.table
        numbers = {"rate": t.rate, "kappa": t.kappa, "centre": t.centre, "gate": t.gate, "anchors": t.anchors}
        where = {"function": self.function.name, "interval": [self.lo, self.hi], "strict": self.strict}
        return {**where, "dtype": NAMES[self.dtype], "table": numbers}

    @classmethod
    def rebuild(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> FastActivation:
        numbers = {key: float(config["table"][key]) for key in ("rate", "kappa", "centre", "gate")}
        table = Table((0.0,) * int(config["table"]["anchors"]), **numbers)
        lo, hi = (float(x) for x in config["interval"])
        return cls(parse(str(config["function"])), lo, hi, table, DTYPES[config["dtype"]], bool(config["strict"]))

    def extra_repr(self) -> str:
        t = self.table
        gate = f", gate {t.gate:g}" if t.gate else ""
        return f"{self.function.name} on [{self.lo:g}, {self.hi:g}], {self.size} anchors, kappa={t.kappa:g}{gate}"


class WrittenOut(nn.Module):
    """A layer of heads as a function of single numbers, by softmax."""

    def __init__(self, layer: AttentionLayer):
        super().__init__()
        self.layer = layer

    def forward(self, y: Tensor) -> Tensor:
        out: Tensor = self.layer(y.unsqueeze(-1)).squeeze(-1)
        return out

    def example_input(self) -> tuple[Tensor, ...]:
        """A small input for tracing."""
        return (torch.zeros(2, dtype=next(self.parameters()).dtype),)


def _tables(function: Univariate, lo: float, hi: float, dtype: torch.dtype, most: int) -> Iterator[tuple[Table, float]]:
    """The tables to try for a function, smallest first, each with its error on a sample."""
    match function.name:
        case "sigmoid":
            yield Table((0.0, 1.0), rate=1.0, kappa=0.25), 0.0
        case "tanh":
            yield Table((-1.0, 1.0), rate=2.0, kappa=0.25), 0.0
        case "silu":
            yield Table((), gate=1.0), 0.0
        case "quick_gelu":
            yield Table((), gate=float(torch.tensor(QUICK, dtype=torch.float64).to(dtype))), 0.0
        case "relu":
            scale = max(abs(lo), abs(hi))
            yield Table((), gate=SHARPNESS[dtype] / 2.0 ** math.ceil(math.log2(scale))), 0.0
        case _:
            yield from ((one.table, one.error) for one in fitted(function, lo, hi, dtype, most))
