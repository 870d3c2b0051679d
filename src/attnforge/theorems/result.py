"""`Construction`: what every theorem returns. A network in the theorem's form, its bound, and the paper's bound beside.

Tensors are (batch, tokens, channels). The paper writes a sequence as a matrix with one column per token and multiplies
weights from the left; here tokens are rows. `matrices` gives the paper's own matrices, which act on columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..certificates.certificate import Certificate, Source, Term, upper_text
from ..certificates.certified import CertifiedModule
from ..errors import ArgumentError, DomainError, PrecisionError

FORMS = ("paper", "tokens")
DTYPES = {torch.float32: "float32", torch.float64: "float64"}


@dataclass(frozen=True)
class Size:
    """What a construction costs; `logit` bounds the largest |logit| on the box."""

    layers: int
    heads: int
    anchors: int
    parameters: int
    logit: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


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
        raise NotImplementedError

    @property
    def bound_terms(self) -> dict[str, float]:
        """The bound split by where it comes from; the terms add up to at most `bound`."""
        return {f"{term.site}: {term.source}": term.value for term in self.certificate.terms}

    def config(self) -> dict[str, Any]:
        raise ArgumentError("a theorem's construction is not saved to a file: keep its arguments, or its state_dict")

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

    def plot(self, path: str | Path | None = None) -> Any:
        """Attention, logits, output and error as one figure; written to `path` (.png, .svg, .pdf) if one is given."""
        from .figures import drawn

        return drawn(self, path)

    def judged(self, trivial: float, advice: str) -> None:
        """Attach the certificate; refuse a bound that says no more than a constant would."""
        certificate = self.attach(self.recertify())
        if certificate.bound is not None and certificate.bound >= trivial:
            name = DTYPES[self.dtype]
            raise PrecisionError(
                f"{self.theorem}: in {name} the bound is {upper_text(certificate.bound)}, no better than the "
                f"{trivial:.3g} that a constant reaches; {advice}",
                reachable=certificate.bound,
            )


def sum_of(
    terms: Mapping[tuple[str, Source], float], notes: Mapping[tuple[str, Source], str] | None = None
) -> tuple[Term, ...]:
    """Ledger terms from (site, source) -> value; infinite values refuse."""
    if not all(math.isfinite(v) for v in terms.values()):
        raise PrecisionError(
            "no finite bound can be given: logits are rounded by more than they differ; "
            "use dtype=torch.float64, fewer anchors or a smaller radius"
        )
    return tuple(Term(*key, value, (notes or {}).get(key, "")) for key, value in terms.items())


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
    if found.dtype not in DTYPES:
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
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(f"{name} must be a whole number, at least {least}{why}, got {value!r}")
    return value


def leak(eps0: Any) -> float:
    """eps0, the weight that may go astray: a number in (0, 0.36]."""
    found = number("eps0", eps0, positive=True)
    if found > 0.36:
        raise ArgumentError(f"eps0 must be at most 0.36, so that the head is cold (kappa >= 1), got {found:g}")
    return found


def ends(a: Any, b: Any) -> tuple[float, float]:
    """The ends of the ramp, a < b."""
    low, high = number("a", a), number("b", b)
    if low >= high:
        raise ArgumentError(f"a must be smaller than b, got a = {low:g} and b = {high:g}")
    return low, high


def form_of(form: str) -> str:
    if form not in FORMS:
        raise ArgumentError(f"form must be 'paper' or 'tokens', got {form!r}")
    return form


def finite_values(name: str, found: Tensor) -> Tensor:
    """What a user's function returned, refused when it is not finite."""
    if not torch.isfinite(found).all():
        raise DomainError(f"{name} returned NaN or infinity on its box; a construction needs finite values")
    return found


__all__ = ["Certificate", "Construction", "Measured", "Size"]
