"""`FastActivation`: activation functions over wide intervals as attention that costs one exponential per element.

gelu, gelu_tanh, softplus and mish are a gate y sigmoid(gate y), one self head, plus an anchor head for the bump that is
left, which decays on both sides (see `construction`): right on the whole line, with 21 to 53 anchors. silu, quick_gelu
and relu are a gate alone, tanh and sigmoid an anchor head with two keys. Called, the module runs `read.anchor_read`;
under `torch.compile` the same as plain PyTorch; exported it is its `layer`, softmax attention written out. Frozen, with
`requires_grad_(False)`, symmetric tables (gelu) compile to fewer operations: what counts is the symmetry of the weights
that were certified last.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ...arguments import interval, is_whole, positive
from ...box import Box, round_outward
from ...certificates.certificate import Certificate, Term, total, upper_text
from ...certificates.certified import CertifiedModule
from ...certificates.rounding import assumptions, up
from ...certificates.schema import PAIR, Whole
from ...dtypes import DTYPES, dtype_name, stored
from ...errors import ArgumentError, CertificateError, PrecisionError, closest
from ...functions.registry import Univariate, parse
from ...network import AttentionLayer, Heads, exporting
from ..choose import FAST, Fast, fast_form
from ..slopes import SlotLines, steepness
from .bound import DIVISIONS, ReadError, activation_error, bump_of, differing, read_error
from .construction import tables
from .expression import basis
from .read import Kept, anchor_read, read, watched_read
from .table import Table, packed, unpacked

KINDS = tuple(dtype for dtype in DTYPES.values() if dtype != torch.float16)  # float16 overflows in the lattice form
LEAST, MOST = 5, 64  # anchors of a table: with fewer a bump is not one, and with 64 rounding decides in every dtype
SHORT, FINE = 17, 1e-5  # tables of fewer anchors are tried where asked for, or for an eps that they can reach
CELLS = 512  # first cells of the derivative, of the interval and of where logits differ by less than NEAR
NEAR = 40.0  # beyond, one slot has all the weight
WORTH = 0.95  # a larger table is kept when its expected bound is at most so much of the best
WORSE = 1.1  # and the search ends when it is so much above: rounding decides, more anchors do not help


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
    called = "an activation read as attention"
    schema: ClassVar[Any] = {
        "function": str, "interval": PAIR, "strict": bool, "dtype": str,
        "table": {"rate": float, "kappa": float, "centre": float, "gate": float, "anchors": Whole(0, MOST)},
    }  # fmt: skip
    _matrix: Tensor | None = None
    _kept: Kept | None = None
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
        self._keep_matrix()

    @classmethod
    def fit(
        cls, name: str, lo: float, hi: float, *, eps: float | None = None, anchors: int | None = None,
        dtype: torch.dtype = torch.float32, strict: bool = False,
    ) -> FastActivation:  # fmt: skip
        """The activation `name` on [lo, hi]: the smallest table that certifies `eps`, or the best of at most `anchors`.

        Raises `PrecisionError`, saying what can be reached, when eps is out of reach with 64 anchors (or `anchors`).
        """
        low, high = interval(lo, hi)
        if dtype not in KINDS:
            raise ArgumentError(f"dtype must be one of {', '.join(DTYPES)} but float16, got {dtype}")
        if name not in FAST:
            raise ArgumentError(
                f"there is no fast form of {name!r}{closest(str(name), FAST)}; known are {', '.join(FAST)}: "
                "use AnchorHead or, for kinks, GateHead"
            )
        if anchors is not None and not is_whole(anchors, LEAST):
            raise ArgumentError(f"anchors must be a whole number, at least {LEAST}, got {anchors!r}")
        if eps is not None:
            positive("eps", eps)
        function, best = parse(name), math.inf
        chosen: FastActivation | None = None
        expected = math.inf
        short = (eps is not None and eps >= FINE) or (anchors is not None and anchors < SHORT)
        for one in tables(function, _form(function), low, high, dtype, anchors or MOST, short):
            made = cls(function, low, high, one.table, dtype, strict)
            guess = one.error + made.reading().bound
            if eps is not None and guess <= eps:  # certified only where it looks good
                bound = made.attach(made.recertify()).bound
                assert bound is not None
                if bound <= eps:
                    return made
                best = min(best, bound)
            if guess < WORTH * expected:
                chosen, expected = made, guess
            elif eps is None and guess > WORSE * expected:
                break
        if chosen is not None:
            best = min(best, chosen.attach(chosen.recertify()).bound or math.inf)
        if eps is not None or chosen is None:
            wanted = "a table" if eps is None else f"eps = {eps:g}"
            raise PrecisionError(
                f"{wanted} cannot be reached for {name} on [{low:g}, {high:g}] in {dtype_name(dtype)} with at most "
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

    def written_out(self) -> Certificate | None:
        return None

    def core(self, *inputs: Tensor) -> Tensor:
        (y,) = inputs
        if exporting():
            return self.layer(y.unsqueeze(-1)).squeeze(-1)
        value, t = self._values(), self.table
        value = value if value.dtype == torch.float64 else value.float()
        if torch.compiler.is_compiling():
            rate, kappa, centre, gate = unpacked(self._numbers)
            return read(y, value, rate, kappa, centre, gate, self._symmetric(), self._matrix)
        return anchor_read(y, value, t.rate, t.kappa, t.centre, t.gate)

    def watched(self, y: Tensor, outside: Tensor, low: float, high: float) -> Tensor:
        """The heads at y, in the dtype of y, counting in `outside` the values that leave [low, high].

        What a kernel reads is worked out once for a table that is not being trained, and again when it is certified,
        loaded, moved or written to.
        """
        if self._kept is not None and (out := self._kept(y, outside, low, high)) is not None:
            return out
        value, group, t = self._values(), self.layer.heads()[-1], self.table
        value = value if value.dtype == torch.float64 else value.float()
        training = group.M_V.requires_grad and torch.is_grad_enabled()
        numbers = (t.rate, t.kappa, t.centre, t.gate, self._symmetric(), low, high)
        self._kept = None if training else Kept.of(y, value, group.M_V, outside, *numbers)
        return watched_read(y, value, outside, *numbers)

    def _symmetric(self) -> bool:
        return self._even and not any(p.requires_grad for p in self.layer.parameters())

    def _keep_matrix(self) -> None:
        """For compilers, on the device of the values: what takes them to coefficients; not saved."""
        value = self._values()
        self._matrix = basis(self.size, self.table.kappa, value.dtype, value.device)[1] if self.size else None

    def _apply(self, fn: Any, recurse: bool = True) -> FastActivation:
        super()._apply(fn, recurse)
        self._kept = None
        self._keep_matrix()
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "table":  # another gate or lattice: what was made ready is of the one before
            self.__dict__["_kept"] = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}  # a kernel that was made ready is of this process and this device

    def attach(self, certificate: Certificate) -> Certificate:
        self._even = bool(torch.equal(self.values, self.values.flip(0)))
        self._kept = None
        return super().attach(certificate)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._even, self._kept = False, None
        super()._load_from_state_dict(*args, **kwargs)

    def plain(self) -> nn.Module:
        """The same heads as softmax attention written out: a module without the fast path, sharing these weights."""
        return WrittenOut(self.layer)

    def interval_in_dtype(self) -> tuple[float, float]:
        """[lo, hi] widened to numbers of the dtype."""
        low, high = (float(x) for x in round_outward(np.array(self.lo), np.array(self.hi), self.dtype))
        return low, high

    def stored_table(self) -> Table:
        """The table with its values as they are stored now."""
        return replace(self.table, value=tuple(stored(self._values()).tolist()))

    def reading(self) -> ReadError:
        """How far the evaluation can be from the same heads in exact arithmetic (lemma A8)."""
        t = self.stored_table()
        lo, hi = self.interval_in_dtype()
        return read_error(np.array(t.value), t.rate, t.kappa, lo, hi, self.dtype, t.centre, t.gate)

    def bump(self) -> Univariate:
        """What the anchors stand for: the function less the gate."""
        return bump_of(self.function, self.table.gate)

    def interpolation(self) -> float:
        """A bound of |heads in exact arithmetic - function| on the interval."""
        return activation_error(self.function, _form(self.function), self.stored_table(), *self.interval_in_dtype())

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
            dtype=dtype_name(self.dtype),
            target=self.function.name,
            box=self.box,
            terms=tuple(terms),
            measured=None if self.dtype == torch.float64 else self._measure(),  # float64 has no finer reference
            lemmas=lemmas,
            assumptions=(*assumptions(), DIVISIONS),
        )

    def _check_keys(self) -> None:
        """Raise `CertificateError` when anything but the values was changed: the evaluation has them as numbers."""
        dtypes = {parameter.dtype for parameter in self.parameters()}
        if not (len(dtypes) == 1 and dtypes <= {*KINDS}):
            names = ", ".join(map(dtype_name, KINDS))
            raise CertificateError(f"certificates are for one of {names}, these weights are {self.dtype}")
        if not bool(self._values().isfinite().all()):
            raise CertificateError("no bound holds for values that are not finite")
        changed = [f"layer.{name}" for name in differing(self.layer, self.table)]
        if changed:
            raise CertificateError(
                f"the keys, queries and outputs of a fast activation are fixed, and {', '.join(changed)} changed; "
                "train the values only, or use AnchorHead"
            )

    def lipschitz(self) -> float:
        """How steep the stored heads are on the interval, at most (lemma H2): certified, for real arithmetic.

        >>> round(FastActivation.fit("gelu", -8, 8).lipschitz(), 2)
        1.14
        """
        self._check_keys()
        t, (low, high) = self.stored_table(), self.interval_in_dtype()
        none, parts, edges = np.zeros(2), [], [np.linspace(low, high, CELLS + 1), np.array([low, high])]
        if t.gate:
            parts.append((1.0, SlotLines(np.array([t.gate, 0.0]), none, none, np.array([1.0, 0.0]))))
            edges.append(np.linspace(-NEAR, NEAR, CELLS + 1) / t.gate)
        if t.anchors:
            (slope, offset), value = t.keys().T, np.array(t.value)
            moved = slope * t.centre
            most = float((np.abs(moved) + np.abs(offset)).max())  # each is rounded, and so is their difference
            slack = 2 * 2.0**-53 * float(np.abs(slope).max()), 4 * 2.0**-53 * most
            parts.append((1.0, SlotLines(slope, offset - moved, value, 0 * value, slack=slack)))
            last = NEAR + t.kappa * t.anchors
            edges.append(t.centre + np.linspace(-last, last, CELLS + 1) / t.rate)
        return steepness(parts, 0.0, np.unique(np.clip(np.concatenate(edges), low, high))).constant

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
        return {**where, "dtype": dtype_name(self.dtype), "table": numbers}

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


def _form(function: Univariate) -> Fast:
    form = fast_form(function)
    if form is None:
        raise CertificateError(f"there is no fast form of {function.name}")
    return form
