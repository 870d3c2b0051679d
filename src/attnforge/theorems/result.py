"""`Construction`: what every theorem returns. A network in the theorem's form, its bound, the paper's bound beside, and
one figure: attention, logits, output beside the target, error below the bound.

Tensors are (batch, tokens, channels). The paper writes a sequence as a matrix with one column per token and multiplies
weights from the left; here tokens are rows. `matrices` gives the paper's own matrices, which act on columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..arguments import is_whole
from ..certificates.certificate import Certificate, Term, total, upper_text
from ..certificates.certified import CertifiedModule
from ..certificates.rounding import assumptions
from ..charts.chart import Figure, Heat, Level, Panel, Series, error_panel
from ..charts.drawing import matplotlib_figure, save
from ..dtypes import SHIPPED, Array, dtype_name, shipped
from ..errors import ArgumentError, CertificateError, DomainError, PrecisionError

SLOTS = 64  # the most keys in use that a heat map shows; twice as many have a row of their own, where all are shown


@dataclass(frozen=True, eq=False)
class TheoremPicture:
    """All that the figure shows. `curves` are the second panel: (label, x, y) each."""

    title: str
    axis: str
    x: Array
    target: Array
    output: Array
    error: Array
    bound: float | None
    paper_bound: float | None
    weights: Array
    key: str
    curves: tuple[tuple[str, Array, Array], ...]
    curve_title: str
    curve_axis: str
    curve_label: str
    dtype: str

    def __post_init__(self) -> None:
        rows = len(self.x)
        if self.target.shape != self.output.shape or len(self.target) != rows or self.error.shape != (rows,):
            raise ArgumentError("target, output and error need a row for each x")


def drawn(data: TheoremPicture, path: str | Path | None = None, force: bool = False) -> Any:
    """The figure itself, or where it was written."""
    figure = theorem_figure(data)
    return matplotlib_figure(figure) if path is None else save(figure, path, force=force)


def theorem_figure(data: TheoremPicture) -> Figure:
    """Four panels on one page: where attention goes, what makes it go there, the output, and the error."""
    keys = data.weights.shape[1]
    together = -(-keys // (2 * SLOTS))  # many keys: neighbours are shown together, their weights added
    weights = np.add.reduceat(data.weights, np.arange(0, keys, together), axis=1)
    ends = (float(data.x[0]), float(data.x[-1]))
    heat = Heat(weights.T, "softmax weight", 0, 1, x=ends, y=(0.5, keys + 0.5), sparse=True)
    key = data.key if together == 1 else f"{data.key}, {together} together"
    output = []
    for c, (wanted, found) in enumerate(zip(data.target.T, data.output.T, strict=True)):
        output += [
            Series("" if c else "target", data.x, wanted, style="broad", role="target"),
            Series("" if c else "network", data.x, found, role="output"),
        ]
    bounds = (("bound", data.bound, "bound"), ("the paper's", data.paper_bound, "soft"))
    both = all(at is not None for _, at, _ in bounds)  # two lines are too near each other for names beside them
    levels = [Level(at, f"{words} {upper_text(at)}", role, named=both) for words, at, role in bounds if at is not None]
    worst = f"Error in {data.dtype}, largest seen {float(data.error.max()):.3g}"
    return Figure(
        "theorem",
        f"{data.title}: attention, logits or hats, output and error.",
        (
            Panel("Attention: one column for each query", data.axis, key, heat=heat),
            Panel(
                data.curve_title, data.curve_axis, data.curve_label, [Series(*curve) for curve in data.curves],
                legend="top",
            ),
            Panel("Output", data.axis, "output", output, legend="inside"),
            error_panel(worst, data.axis, "absolute error", data.x, data.error, levels,
                        legend="top" if both else "above"),
        ),
        columns=(1, 1),
        heights=(3.4, 3.4),
        title=data.title,
    )  # fmt: skip


FORMS = ("paper", "tokens")
#: The largest eps0, about 1/e: then kappa = log(1/eps0) >= 1, which lemma A2 asks of a cold head.
MOST_LEAK = 0.36
NOTHING = 1e-300  # terms below are no line of the ledger: the sum, rounded up, is larger by more than that


@dataclass(frozen=True)
class Size:
    """What a construction costs; `logit` bounds the largest |logit| on the box."""

    layers: int
    heads: int
    anchors: int
    parameters: int
    logit: float

    def to_json(self) -> dict[str, float]:
        """The numbers by name."""
        return asdict(self)


@dataclass(frozen=True)
class Ledger:
    """What a bound is made of; without `certified` there is only `measured`, the largest error seen."""

    target: str
    terms: tuple[Term, ...] = ()
    lemmas: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()  # beyond those of every certificate
    certified: bool = True
    measured: float | None = None


@dataclass(frozen=True)
class Measured:
    """Errors at sampled points: largest, and the mean of |error|^p, with what the bound allows for each."""

    largest: float
    mean: float
    p: float
    points: int
    bound: float | None

    def __str__(self) -> str:
        allowed = upper_text(self.bound)
        return (
            f"L-infinity {self.largest:.3e}, L{self.p:g} {self.mean:.3e} (each at most {allowed}), {self.points} points"
        )


class Construction(CertifiedModule):
    """A theorem's network. `m(X)` runs it, `m.attention(X)` are its softmax weights, `m.bound` what it guarantees."""

    made: torch.dtype  # in which it was built; what it is asked to be does not change with later casts
    theorem: str = ""  # which statement, with version and number
    form: str = "paper"  # "paper" or "tokens": linear maps along the sequence, or token-wise only
    paper_bound: float | None = None  # the bound that the paper states, in real arithmetic

    def target(self, X: Tensor) -> Tensor:
        """What the network approximates, in float64."""
        raise NotImplementedError

    def attention(self, X: Tensor) -> Tensor:
        """The softmax weights of the selecting heads."""
        raise NotImplementedError

    @property
    def matrices(self) -> dict[str, Tensor]:
        """The weights by the names of the paper, acting on columns."""
        raise NotImplementedError

    @property
    def size(self) -> Size:
        """What it costs."""
        raise NotImplementedError

    def ledger(self) -> Ledger:
        """The terms of the bound, from the tensors as they are stored now."""
        raise NotImplementedError

    def picture(self) -> TheoremPicture:
        """What there is to see of this construction, as plain data."""
        raise NotImplementedError

    @property
    def beyond(self) -> str:
        return "the target is a function that no file can hold"

    @property
    def hypothesis(self) -> str:
        """Of which functions the bound speaks, where it was made from samples of one."""
        return ""

    def recertify(self) -> Certificate:
        tensors = self.state_dict()
        kinds = {x.dtype for x in tensors.values()}
        if kinds != {self.dtype} or self.dtype not in SHIPPED:
            raise CertificateError(
                "bounds of theorems are worked out for weights that are all float32 or all float64, here they are "
                f"{', '.join(sorted(map(dtype_name, kinds)))}: use .float() or .double(), then af.certify"
            )
        broken = [name for name, x in tensors.items() if not torch.isfinite(x).all()]
        if broken:
            raise CertificateError(f"no bound holds for weights that are not finite: {', '.join(broken)}")
        found, name = self.ledger(), dtype_name(self.dtype)
        if not found.certified:
            return Certificate("calibrated", None, name, found.target, self.box, measured=found.measured)
        return Certificate(
            "certified", total(term.value for term in found.terms), name, found.target, self.box, found.terms,
            measured=found.measured, lemmas=found.lemmas, assumptions=(*assumptions(), *found.assumptions),
            hypothesis=self.hypothesis,
        )  # fmt: skip

    @property
    def bound_terms(self) -> dict[str, float]:
        """The bound split by where it comes from; the terms add up to at most `bound`."""
        return {f"{term.site}: {term.source}": term.value for term in self.certificate.terms}

    def config(self) -> dict[str, Any]:
        return {"made": dtype_name(self.made), "dtype": dtype_name(self.dtype), "strict": self.strict, **self.asks()}

    def asks(self) -> dict[str, Any]:
        """What was asked for, as JSON from which `again` builds it."""
        raise NotImplementedError

    @classmethod
    def again(cls, asked: dict[str, Any], made: torch.dtype) -> Construction:
        """The construction that `asks` describes, as it was built first, in the dtype of that time."""
        raise NotImplementedError

    @classmethod
    def rebuild(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> Construction:
        most = sum(x.numel() for x in tensors.values())
        m = cls.again({**config, "most": most}, shipped(str(config["made"]))).to(shipped(str(config["dtype"])))
        m.strict = bool(config["strict"])
        return m

    def guard(self, *inputs: Tensor) -> None:
        if len(inputs) != 1:
            raise ArgumentError(f"expected one input tensor X of shape (batch, tokens, channels), got {len(inputs)}")
        X = inputs[0]
        self.check_tensor(X, "X")
        self.check_shape(X)
        if X.numel():
            low, high = (float(v) for v in torch.aminmax(X.detach()))
            outward = self.box.outward(self.dtype)
            self.check_range("X", low, high, float(outward.lower.min()), float(outward.upper.max()))

    def check_shape(self, x: Tensor) -> None:
        shape: tuple[Any, ...] = self.box.shape
        if x.dim() < 2 or tuple(x.shape[x.dim() - len(shape) :]) != shape:
            wanted = ("batch", *(shape if len(shape) == 2 else ("tokens", *shape)))
            raise ArgumentError(f"expected X of shape ({', '.join(map(str, wanted))}), got {tuple(x.shape)}")

    @torch.no_grad()
    def measure(self, points: int = 4096, p: float = 2.0, seed: int = 0) -> Measured:
        """The error at points drawn from the box and at its corners: largest, and the L^p norm of the mean measure."""
        X = self.points(points, seed)
        error = (self.core(X).double() - self.target(X)).abs().flatten(1).amax(-1)
        return Measured(float(error.max()), float((error**p).mean() ** (1 / p)), p, len(error), self.bound)

    def points(self, count: int, seed: int = 0) -> Tensor:
        """Inputs to look at: drawn from the box, and some of its corners."""
        drawn = self.box.sample(count, seed, self.dtype)
        return torch.cat([drawn, self.box.corners(64, self.dtype)])

    @torch.no_grad()
    def largest_error(self, count: int) -> float:
        """The largest error at points drawn from the box, corners included."""
        X = self.points(count)
        return float((self.core(X).double() - self.target(X)).abs().max())

    def plot(self, path: str | Path | None = None, *, force: bool = False) -> Any:
        """Attention, logits, output and error as one figure; written to `path` (.png, .svg, .pdf) if one is given.

        A file that is there already is refused unless `force=True`.
        """
        with torch.no_grad():
            return drawn(self.picture(), path, force)

    def judged(self, trivial: float, advice: str) -> None:
        """Attach the certificate; refuse a bound that says no more than a constant would."""
        certificate = self.attach(self.recertify())
        if certificate.bound is not None and certificate.bound >= trivial:
            name = dtype_name(self.dtype)
            raise PrecisionError(
                f"{self.theorem}: in {name} the bound is {upper_text(certificate.bound)}, no better than the "
                f"{trivial:.3g} that a constant reaches; {advice}",
                reachable=certificate.bound,
            )


def finite(*terms: Term) -> tuple[Term, ...]:
    """The terms that add to a bound; infinite ones refuse."""
    if not all(math.isfinite(term.value) for term in terms):
        raise PrecisionError(
            "no finite bound can be given: logits are rounded by more than they differ; "
            "use dtype=torch.float64, fewer anchors or a smaller radius"
        )
    return tuple(term for term in terms if term.value > NOTHING)


# -- pictures ------------------------------------------------------------------------------------------------------

Indices = npt.NDArray[np.intp]
#: A label, and the coordinates of a curve.
Curves = tuple[tuple[str, Array, Array], ...]
DIAGONAL, COLUMNS = 600, 120  # points of the curves, queries of the heat map
IN_USE = 1e-2  # a key is in use if its weight is larger somewhere


def diagonal_picture(
    m: Construction, curves: Callable[[Tensor, Array, Indices], Curves], title: str, label: str
) -> TheoremPicture:
    """A construction along the diagonal of its box; `curves` gets the inputs, where they are, and the keys in use."""
    s = torch.linspace(0, 1, DIAGONAL, dtype=torch.float64)
    X = m.box.lower + s.reshape(-1, *[1] * len(m.box.shape)) * (m.box.upper - m.box.lower)
    X = X.to(m.dtype)
    X = X.unsqueeze(-2) if len(m.box.shape) == 1 else X
    output, target = (v.double().flatten(1).numpy() for v in (m.core(X), m.target(X)))
    found = m.attention(X)
    weights: Array = (found[:, 0] if found.dim() == 3 else found).double().numpy()
    used: Indices = np.argsort(-np.max(weights, 0), kind="stable")[:SLOTS]
    used = used[np.max(weights, 0)[used] > IN_USE]
    used = used[np.argsort((weights[:, used] * s.numpy()[:, None]).sum(0) / (weights[:, used].sum(0) + 1e-300))]
    step, axis = max(1, len(s) // COLUMNS), "position on the diagonal"
    return TheoremPicture(
        f"{m.theorem}, {m.form} form", f"{axis} of the box", s.numpy(), target[:, :3], output[:, :3],
        np.abs(output - target).max(-1), m.bound, m.paper_bound, weights[::step][:, used], "key, those in use",
        curves(X, s.numpy(), used), title, axis, label, dtype_name(m.dtype),
    )  # fmt: skip


# -- arguments ------------------------------------------------------------------------------------------------------


def tensor(name: str, value: Any, dtype: torch.dtype | None = None) -> Tensor:
    """A finite float tensor from a tensor, an array, a list or a number; lists become float64."""
    if isinstance(value, Tensor):
        found = value.detach().clone()
    else:
        try:
            found = torch.as_tensor(value, dtype=None if hasattr(value, "dtype") else torch.float64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ArgumentError(f"{name} must be a number, a list or a tensor of numbers, got {value!r}") from error
    if not found.is_floating_point():
        found = found.to(torch.float64)
    found = found if dtype is None else found.to(dtype)
    if found.dtype not in SHIPPED:
        raise ArgumentError(f"{name} must be float32 or float64, got {found.dtype}")
    if not torch.isfinite(found).all():
        raise ArgumentError(f"{name} must be finite, it holds NaN or infinity")
    return found


def number(name: str, value: Any, positive: bool = False) -> float:
    """A finite number, positive if asked."""
    try:
        found = float(value)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{name} must be a number, got {value!r}") from error
    if not math.isfinite(found):
        raise ArgumentError(f"{name} must be finite, got {found}")
    if positive and found <= 0:
        raise ArgumentError(f"{name} must be positive, got {found:g}")
    return found


def whole(name: str, value: Any, least: int, why: str = "") -> int:
    """A whole number, at least `least`."""
    if not is_whole(value, least):
        raise ArgumentError(f"{name} must be a whole number, at least {least}{why}, got {value!r}")
    return int(value)


def leak(eps0: Any) -> float:
    """eps0, the weight that may go astray: a number in (0, 0.36]."""
    found = number("eps0", eps0, positive=True)
    if found > MOST_LEAK:
        raise ArgumentError(f"eps0 must be at most {MOST_LEAK:g}, so that the head is cold (kappa >= 1), got {found:g}")
    return found


def ends(a: Any, b: Any) -> tuple[float, float]:
    """The ends of the ramp, a < b."""
    low, high = number("a", a), number("b", b)
    if low >= high:
        raise ArgumentError(f"a must be smaller than b, got a = {low:g} and b = {high:g}")
    return low, high


def form_of(form: str) -> str:
    """The name of a form, one of the two."""
    if form not in FORMS:
        raise ArgumentError(f"form must be 'paper' or 'tokens', got {form!r}")
    return form


def finite_values(name: str, found: Tensor) -> Tensor:
    """What a user's function returned, refused when it is not finite."""
    if not torch.isfinite(found).all():
        raise DomainError(f"{name} returned NaN or infinity on its box; a construction needs finite values")
    return found
