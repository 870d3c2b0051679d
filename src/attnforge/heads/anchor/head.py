"""Anchor heads: functions of one scalar by softmax over a constant table (lemmas A1 to A5 of docs/theory.md).

One head, query (y - c, 1), keys (slope, offset) from the tangents of a convex potential, and a value for each anchor.
Cold heads select the nearest anchor (the paper's regime, error about half a spacing); warm heads interpolate to
spectral accuracy with values solved by least squares. `fit` picks potential, temperature and guards, then certifies
what it built.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ...arguments import is_number, is_whole
from ...box import Box, round_outward
from ...certificates.certificate import Certificate, Term, total, upper_text
from ...certificates.certified import CertifiedModule
from ...certificates.rounding import assumptions
from ...certificates.schema import PAIR, Whole
from ...dtypes import DTYPES, SHIPPED, by_name, dtype_name, shipped
from ...errors import ArgumentError, CertificateError, PrecisionError
from ...functions.registry import Univariate, check_domain, from_callable, get, parse
from ...kernel.alone.fast import MOST
from ...network import AttentionLayer, Heads, exporting
from ...progress import shown
from ...threads import one_thread
from ..fast.anchor import fast_certificate, fast_core, lattice_of
from ..fast.lattice import Lattice
from ..slopes import Steepness
from ..stored import refuse_endless, refuse_overflow
from . import fit as search
from .bound import CELLS, AnchorWeights, anchor_bound, steepness_of
from .fit import HeadShape, cold_values, keys
from .potential import NAMES, Potential

TWO_KEYS = {
    "sigmoid": (0.5, 1.0, 0.0),
    "tanh": (1.0, 1.0, -1.0),
}  # slope of the first key (the second has minus it), values


def two_keys(function: Univariate, dtype: torch.dtype) -> tuple[AnchorWeights, HeadShape, np.ndarray] | None:
    """sigmoid and tanh are softmax over two keys: no interpolation at all."""
    if function.name not in TWO_KEYS:
        return None
    slope, first, second = TWO_KEYS[function.name]
    weights = AnchorWeights(np.array([slope, -slope]), np.zeros(2), np.array([first, second]))
    return weights, HeadShape(Potential("exact"), 2, 0, 1.0), np.array([1.0, -1.0])


def is_two_keys(function: Univariate, weights: AnchorWeights) -> bool:
    """Whether stored weights are still exactly those of `two_keys`: then the head equals the function (lemma B4)."""
    if function.name not in TWO_KEYS or len(weights.slope) != 2:
        return False
    slope, first, second = TWO_KEYS[function.name]
    stored = (*weights.slope, *weights.offset, *weights.value, weights.centre, *weights.skip)
    return stored == (slope, -slope, 0.0, 0.0, first, second, 0.0, 0.0, 0.0)


def function_of(fn: str | Univariate | Callable[[Tensor], Tensor], second_derivative: float | None) -> Univariate:
    if isinstance(fn, (str, Univariate)):
        return get(fn)
    if not callable(fn):
        raise ArgumentError(f"fn must be a function's name or a callable on tensors, got {type(fn).__name__}")
    return from_callable(fn, second_derivative=second_derivative)


def potentials_of(potential: str | Potential, function: Univariate, lo: float, hi: float) -> tuple[Potential, ...]:
    if isinstance(potential, Potential):
        return (potential,)
    everything = search.candidates(function, lo, hi)
    if potential == "auto":
        return everything
    if potential not in NAMES:
        raise ArgumentError(f"potential must be 'auto', a Potential or one of {', '.join(NAMES)}, got {potential!r}")
    chosen = tuple(p for p in everything if p.name == potential)
    if chosen or potential == "square":
        return chosen or (Potential("square"),)
    if potential == "log" and lo <= 0 < hi:
        raise ArgumentError(f"the log potential needs an interval on one side of 0, got [{lo:g}, {hi:g}]")
    return {
        "log": (Potential("log", sign=1 if lo > 0 else -1),),
        "atan": (Potential("atan", 0.0, 0.25 * (hi - lo)), Potential("atan", 0.0, 0.06 * (hi - lo))),
        "ends": (Potential("ends", 0.5 * (lo + hi), 0.5 * (hi - lo), floor=1e-5),),
    }[potential]


def checked(
    lo: float,
    hi: float,
    anchors: int | None,
    eps: float | None,
    dtype: torch.dtype,
    kappa: float | None,
    temperature: str,
    relative: bool,
) -> tuple[float, float]:
    """The interval as floats, or an error that names the argument, what it was and what it may be."""
    try:
        low, high = float(lo), float(hi)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"lo and hi must be numbers, got {lo!r} and {hi!r}") from error
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ArgumentError(f"lo and hi must be finite, got lo = {low} and hi = {high}")
    if low >= high:
        raise ArgumentError(f"lo must be smaller than hi, got lo = {low:g} and hi = {high:g}")
    if anchors is not None and eps is not None:
        raise ArgumentError("give anchors (how large) or eps (how accurate), not both")
    if anchors is not None and not is_whole(anchors, 2):
        raise ArgumentError(f"anchors must be a whole number, at least 2, got {anchors!r}")
    if anchors is not None and anchors > 1 << 16:
        raise ArgumentError(f"anchors must be at most {1 << 16}, got {anchors}")
    for name, number in (("eps", eps), ("kappa", kappa)):
        if number is not None and not (is_number(number) and number > 0):
            raise ArgumentError(f"{name} must be a positive number, got {number!r}")
    if dtype not in SHIPPED:
        raise ArgumentError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    if temperature not in ("auto", "warm", "cold"):
        raise ArgumentError(f"temperature must be 'auto', 'warm' or 'cold', got {temperature!r}")
    if temperature == "cold" and kappa is not None and kappa < 1:
        raise ArgumentError(f"a cold head has kappa >= 1, got {kappa:g}; temperature='warm' allows less")
    if not isinstance(relative, bool):
        raise ArgumentError(f"relative must be True or False, got {relative!r}")
    return low, high


Temperature = Literal["auto", "warm", "cold"]
MOST_SOLVED = 2048  # with more anchors than this, values are not solved for but taken from the function
HALVED = 2.0 ** -np.arange(2.0, 54.0)  # of the interval: how far from a kink cells end, down to a roundoff
MEASURED = 4097  # points where the largest error is looked for: a hundred and more for each of forty anchors
COLD = 20.0  # kappa of a cold head unless one is given: weight outside the two nearest anchors is below 1e-8


class AnchorHead(CertifiedModule):
    """A function of one scalar as one softmax head over constant anchors, with a certificate.

    >>> head = AnchorHead.fit("gelu", -8, 8, anchors=32)
    >>> head(torch.tensor([-1.0, 0.0, 2.0])).shape, head.certificate.kind, head.bound < 1e-5
    (torch.Size([3]), 'certified', True)

    Outside its interval a head is not wrong but undefined: it goes on as the nearest anchor's value plus the linear
    skip, warns once (`DomainWarning`), and raises `DomainError` when `strict` is set. NaN and infinity always raise.
    """

    family = "anchor"
    called = "an attention head with anchors"
    schema: ClassVar[Any] = {
        "function": str, "interval": PAIR, "dtype": str, "relative": bool, "strict": bool, "skip": bool,
        "shape": ((str, float, float, Whole(-1, 1), float), Whole(), Whole(), float),
        "fast?": (float, float, float, float, bool),
    }  # fmt: skip
    anchors: Tensor
    lattice: Lattice | None = None  # set where the head is read with one exponential per element

    def __init__(
        self,
        function: Univariate,
        lo: float,
        hi: float,
        weights: AnchorWeights,
        shape: HeadShape,
        anchors: np.ndarray,
        dtype: torch.dtype = torch.float32,
        relative: bool = False,
        strict: bool = False,
    ):
        super().__init__()
        self.function, self.lo, self.hi, self.relative, self.strict = function, lo, hi, relative, strict
        self.shape, self.box = shape, Box(y=(lo, hi))
        number = lambda x: torch.tensor(x, dtype=dtype)  # noqa: E731
        table = torch.from_numpy(np.stack([weights.slope, weights.offset], -1)).to(dtype)
        group = Heads(
            "memory",
            W_Q=number([[[1.0, 0.0]]]),
            b_Q=number([[-weights.centre, 1.0]]),
            M_K=table[None],
            M_V=torch.from_numpy(np.ascontiguousarray(weights.value)).to(dtype)[None, :, None],
            W_O=number([[[1.0]]]),
            purpose=f"{function.name} on [{lo:g}, {hi:g}]",
        )
        skip = weights.skip != (0.0, 0.0)
        self.layer: AttentionLayer = AttentionLayer(
            [group], S=number([[weights.skip[0]]]) if skip else None, s=number([weights.skip[1]]) if skip else None
        )
        for fixed in (group.W_Q, group.b_Q, group.W_O):
            fixed.requires_grad_(False)  # the certificate reads keys, values and skip; the query stays (y - c, 1)
        self.register_buffer("anchors", torch.from_numpy(np.ascontiguousarray(anchors)))

    @classmethod
    @shown("fitting")
    @by_name
    def fit(
        cls,
        fn: str | Univariate | Callable[[Tensor], Tensor],
        lo: float,
        hi: float,
        *,
        anchors: int | None = None,
        eps: float | None = None,
        dtype: torch.dtype = torch.float32,
        relative: bool = False,
        potential: str | Potential = "auto",
        temperature: Temperature = "auto",
        kappa: float | None = None,
        second_derivative: float | None = None,
        strict: bool = False,
        fast: bool = False,
    ) -> AnchorHead:
        """The best head with so many `anchors` (default 32), or the smallest whose certified bound is at most `eps`.

        `relative` asks for a bound on |head - fn| / |fn|. `dtype` is what ships and what the bound is for.
        `temperature` "cold" gives the paper's head (values are the function at the anchors, `kappa` at least 1), "warm"
        and "auto" solve for the values. A callable that is not in the registry is certified if `second_derivative`
        bounds |fn''|; without it the head has no bound, only `measured`. `fast` takes evenly spaced anchors and reads
        them with one exponential per element (lemma A8): the same attention, with a certificate of its own.
        """
        if fast:
            even = "square" if potential == "auto" and fn not in TWO_KEYS else potential
            slow = cls.fit(
                fn, lo, hi, anchors=anchors, eps=eps, dtype=dtype, relative=relative, potential=even,
                temperature=temperature, kappa=kappa, second_derivative=second_derivative, strict=strict,
            )  # fmt: skip
            slow.fast = True
            return slow._judged(eps)
        lo, hi = checked(lo, hi, anchors, eps, dtype, kappa, temperature, relative)
        function = function_of(fn, second_derivative)
        low, high = (float(x) for x in round_outward(np.array(lo), np.array(hi), dtype))
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ArgumentError(f"lo = {lo:g} and hi = {hi:g} go beyond the numbers of {dtype_name(dtype)}")
        check_domain(function, max(low, function.domain.lo) if lo >= function.domain.lo else low,
                     min(high, function.domain.hi) if hi <= function.domain.hi else high)  # fmt: skip
        exact = two_keys(function, dtype) if potential == "auto" and temperature != "cold" and kappa is None else None
        if exact is not None:
            head = cls(function, lo, hi, *exact, dtype=dtype, relative=relative, strict=strict)
            head.attach(head.recertify())
            return head._judged(eps)
        if anchors is not None and anchors > MOST_SOLVED and temperature != "warm":
            temperature, kappa = "cold", max(kappa or 1.0, 1.0)
        if temperature == "cold" and potential == "auto":
            potential = "square"  # the paper's head: evenly spaced anchors
        chosen = potentials_of(potential, function, lo, hi)
        if temperature == "cold":
            return cls._cold(function, lo, hi, anchors, eps, dtype, relative, chosen[0], kappa or COLD, strict)
        if anchors is not None and anchors > MOST_SOLVED:
            raise ArgumentError(
                f"a warm head solves for its values, with at most {MOST_SOLVED} anchors; got anchors = {anchors}: "
                "use fewer (32 are often enough), or temperature='cold'"
            )
        question = search.Question(function, lo, hi, dtype, relative, chosen, kappa, even=potential == "square")
        if eps is None:
            with one_thread():
                found = search.for_count(question, anchors or 32)
            return cls._built(question, found, strict)._judged(None)
        if not function.certifiable:
            raise ArgumentError(
                f"eps needs a certificate, and nothing is known about {function.name} but its values: "
                "declare second_derivative=..., or give anchors=... and read head.measured"
            )
        return cls._smallest(question, eps, strict)

    @classmethod
    def _smallest(cls, question: search.Question, eps: float, strict: bool) -> AnchorHead:
        """The smallest head for eps, or `PrecisionError` with a larger eps that was tried and can be reached."""
        head = cls._searched(question, eps, strict)
        reachable = head.bound
        while reachable is not None and head._misses(eps):
            reachable = float(upper_text(reachable))
            if not cls._searched(question, reachable, strict)._misses(reachable):
                break
            reachable *= 2  # ends, because half the function's range can always be reached
        return head._judged(eps, reachable)

    @classmethod
    def _searched(cls, question: search.Question, eps: float, strict: bool) -> AnchorHead:
        """The smallest head whose bound is at most eps, or the best one found."""
        aim = eps
        for _ in range(6):
            with one_thread():
                found, best_seen = search.for_eps(question, aim)
            if found is None:
                break
            head = cls._built(question, found, strict)
            bound = head.bound
            assert bound is not None
            if bound <= eps:
                return head
            aim *= max(0.5, min(0.97, 0.97 * eps / bound))
        return cls._built(question, best_seen, strict)

    @classmethod
    def _cold(
        cls,
        function: Univariate,
        lo: float,
        hi: float,
        anchors: int | None,
        eps: float | None,
        dtype: torch.dtype,
        relative: bool,
        potential: Potential,
        kappa: float,
        strict: bool,
    ) -> AnchorHead:
        def build(count: int) -> AnchorHead:
            shape = HeadShape(potential, count, 0, kappa)
            places = potential.anchors(lo, hi, count)
            weights = cold_values(keys(shape, lo, hi, dtype), places, function, lo, hi, dtype)
            head = cls(function, lo, hi, weights, shape, places, dtype, relative, strict)
            head.attach(head.recertify())
            return head

        if eps is None:
            return build(anchors or 32)
        count = 8
        head = build(count)
        while (
            head.bound is not None and head.bound > eps and count < 4096
        ):  # the error of selection is proportional to 1/count
            count = min(4096, max(count + 1, math.ceil(count * min(4.0, 1.02 * head.bound / eps))))
            head = build(count)
        return head._judged(eps)

    @classmethod
    def _built(cls, question: search.Question, found: search.Candidate | None, strict: bool) -> AnchorHead:
        if found is None:
            raise PrecisionError(
                f"no anchor head was found for {question.fn.name} on [{question.lo:g}, {question.hi:g}]"
            )
        shape = found.shape
        places = shape.potential.anchors(question.lo, question.hi, shape.count, shape.guards)
        head = cls(
            question.fn,
            question.lo,
            question.hi,
            found.weights,
            shape,
            places,
            question.dtype,
            question.relative,
            strict,
        )
        head.attach(head.recertify())
        return head

    def _misses(self, eps: float) -> bool:
        return self.bound is None or self.bound > eps

    def _judged(self, eps: float | None, reachable: float | None = None) -> AnchorHead:
        """This head if it has a finite bound that reaches eps; `PrecisionError` says what can be reached otherwise."""
        if eps is not None and self._misses(eps):
            reachable = self.bound if reachable is None else reachable
            name = dtype_name(self.dtype)
            wider = "" if self.dtype == torch.float64 else ", use dtype=torch.float64"
            wanted = search.candidates(self.function, self.lo, self.hi, eps)
            anchors = search.resolving(self.function, self.lo, self.hi, wanted)
            if anchors > search.MOST_ANCHORS >= self.shape.count:  # what is left is as large as the function: no advice
                most = f"more than {search.MOST_ANCHORS}" if anchors >= search.SPECTRUM else f"about {anchors}"
                raise PrecisionError(
                    f"eps = {eps:g} cannot be reached for {self.function.name} on [{self.lo:g}, {self.hi:g}] in "
                    f"{name}: it takes {most} anchors to follow the function at all, and eps may ask for at most "
                    f"{search.MOST_ANCHORS}; give anchors=, shrink the interval, or use attnforge.compile, which has "
                    "heads for many waves",
                    reachable=reachable,
                )
            kink = " (it has a kink inside: GateHead builds kinks exactly)" if self._kinked() else ""
            raise PrecisionError(
                f"eps = {eps:g} cannot be reached for {self.function.name} on [{self.lo:g}, {self.hi:g}] in {name} "
                f"with at most {search.MOST_ANCHORS} anchors{kink}; the smallest bound found is "
                f"{upper_text(reachable)}: ask for that{wider}, or shrink the interval",
                reachable=reachable,
            )
        return self

    def _kinked(self) -> bool:
        return any(self.lo < k < self.hi for k in self.function.knots)

    @property
    def fast(self) -> bool:
        """Whether the head is read with one exponential per element; setting it certifies the head again."""
        return self.lattice is not None

    @fast.setter
    def fast(self, wanted: bool) -> None:
        self.lattice = lattice_of(self) if wanted else None
        self.attach(self.recertify())

    def written_out(self) -> Certificate | None:
        if not self.fast:
            return self.certificate
        softmax = copy.deepcopy(self)
        softmax.fast = False
        return softmax.certificate

    @property
    def group(self) -> Heads:
        """The head itself, as a group of one."""
        return self.layer.heads()[0]

    @property
    def values(self) -> Tensor:
        """The value of each anchor, in the dtype that ships."""
        return self.group.M_V.detach()[0, :, 0]

    @property
    def kappa(self) -> float:
        """The scale-free inverse temperature: large is cold."""
        return self.shape.kappa

    @property
    def potential(self) -> Potential:
        """The convex function whose tangents are the logits."""
        return self.shape.potential

    @property
    def size(self) -> int:
        """The number of anchors."""
        return int(self.group.slots)

    @property
    def beyond(self) -> str:
        return f"it takes its time beyond {MOST} anchors" if self.size > MOST else ""

    def core(self, *inputs: Tensor) -> Tensor:
        """The attention itself: one token per scalar, one channel."""
        if self.lattice is not None and not exporting():
            return fast_core(self, inputs[0], self.lattice)
        return self.layer(inputs[0].unsqueeze(-1)).squeeze(-1)

    def attention(self, y: Tensor) -> Tensor:
        """The softmax weights, shape (..., anchor)."""
        return self.group.weights(y.unsqueeze(-1)).squeeze(-2)

    def weights_in_float64(self) -> AnchorWeights:
        """The stored numbers, exactly; raises `CertificateError` when the query or output was changed."""
        group = self.group
        fixed = (group.W_Q.flatten().tolist(), group.b_Q.flatten().tolist()[1], group.W_O.item())
        if fixed != ([1.0, 0.0], 1.0, 1.0):
            raise CertificateError(
                f"an anchor head reads the query (y - c, 1) and its output as it is; "
                f"W_Q, b_Q or W_O were changed to {fixed}"
            )
        slope, constant = self.layer.S, self.layer.s
        skip = (0.0, 0.0) if slope is None or constant is None else (float(slope.item()), float(constant.item()))
        table, value = (t.detach().cpu().double().numpy()[0] for t in (group.M_K, group.M_V))
        return AnchorWeights(table[:, 0], table[:, 1], value[:, 0], -float(group.b_Q.detach()[0, 0]), skip)

    def cells(self) -> np.ndarray:
        """The boundaries of the first cells of the bound: even in the potential's flat coordinate, kinks on
        boundaries and, so that sharp ones are seen, finer and finer towards them."""
        dtype = self.dtype
        lo, hi = (float(x) for x in round_outward(np.array(self.lo), np.array(self.hi), dtype))
        domain = self.function.domain
        lo, hi = max(lo, domain.lo), min(hi, domain.hi)
        ends = np.sort(self.potential.flat(np.array([lo, hi])))
        count = max(CELLS, min(int(self.size * max(4.0, self.kappa)), 64 * CELLS))  # cold heads turn quickly
        inner = self.potential.unflat(np.linspace(ends[0], ends[1], count + 1)[1:-1])
        knots = [k for k in self.function.knots if lo < k < hi]
        near = [k + side * (hi - lo) * HALVED for k in knots for side in (-1, 1)]
        return np.unique(np.clip(np.concatenate([[lo], inner, knots, *near, [hi]]), lo, hi))

    def recertify(self) -> Certificate:
        """The bound of the stored weights in their dtype, computed anew."""
        refuse_endless(self)
        weights, dtype = self.weights_in_float64(), dtype_name(self.dtype)
        if self.dtype not in SHIPPED:
            raise CertificateError(f"certificates are for float32 and float64 weights, these are {self.dtype}")
        measured = self._measure()
        blank = Certificate(
            "calibrated", None, dtype, self.function.name, self.box, relative=self.relative, measured=measured
        )
        if not self.function.certifiable:
            return blank
        refuse_overflow(self.layer, max(abs(self.lo), abs(self.hi)), self.dtype)
        if self.lattice is not None:
            return fast_certificate(self, self.lattice, blank)
        found = anchor_bound(weights, self.function, self.cells(), self.dtype, self.relative)
        if not math.isfinite(found.bound):
            zero = " (relative error has no bound where the function is 0)" if self.relative else ""
            raise PrecisionError(
                f"no finite bound can be given for {self.function.name} on [{self.lo:g}, {self.hi:g}]{zero}",
                reachable=None,
            )
        site, where = f"{self.function.name}, {self.size} anchors", f"worst near y = {found.where:.6g}"
        if is_two_keys(self.function, weights):  # lemma B4: the head is the function, only rounding is left
            term = Term(site, "rounding", found.worst_rounding, dtype)
            bound = total([term.value])
            return replace(
                blank, kind="certified", bound=bound, terms=(term,), lemmas=("B4", "A5"), assumptions=assumptions()
            )
        terms = (Term(site, "interpolation", found.interpolation, where), Term(site, "rounding", found.rounding, dtype))
        lemmas = ("A1", "A4", "A5")
        stated = assumptions()
        return replace(blank, kind="certified", bound=found.bound, terms=terms, lemmas=lemmas, assumptions=stated)

    def lipschitz(self) -> float:
        """How steep the stored head is on its interval, at most (lemma H2): certified, for real arithmetic.

        >>> round(AnchorHead.fit("sin", -3, 3, anchors=24, dtype=torch.float64).lipschitz(), 1)
        1.0
        """
        return self.steepness().constant

    def steepness(self) -> Steepness:
        """Enclosures of the stored head's derivative and values, cell by cell."""
        return steepness_of(self.weights_in_float64(), self.cells())

    @torch.no_grad()
    def _measure(self) -> float:
        """The largest error on a dense grid, evaluated as shipped, compared in float64."""
        lo, hi = self.cells()[[0, -1]]
        ends = np.sort(self.potential.flat(np.array([lo, hi])))
        y = np.unique(np.clip(self.potential.unflat(np.linspace(ends[0], ends[1], MEASURED)), lo, hi))
        inside = torch.from_numpy(y).to(self.values.device, self.dtype)
        inside = inside[(inside.double() >= lo) & (inside.double() <= hi)]
        wanted = self.function.value(inside.double().cpu())
        error = (self.core(inside).double().cpu() - wanted).abs()
        return float((error / wanted.abs() if self.relative else error).max())

    def config(self) -> dict[str, Any]:
        """Function, interval and shape; a user's callable cannot be written to a file."""
        if self.function.source is not None:
            raise ArgumentError(
                f"{self.function.name} is a Python callable, which no file can hold: save the state_dict instead"
            )
        shape = self.shape
        return {
            "function": self.function.name,
            "interval": [self.lo, self.hi],
            "relative": self.relative,
            "strict": self.strict,
            "shape": [shape.potential.to_json(), shape.count, shape.guards, shape.kappa],
            "skip": self.layer.S is not None,
            "dtype": dtype_name(self.dtype),
            **({} if self.lattice is None else {"fast": [*astuple(self.lattice)]}),
        }

    @classmethod
    def rebuild(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> AnchorHead:
        """An empty head of the right form; `load` then fills in the tensors."""
        potential, count, guards, kappa = config["shape"]
        shape = HeadShape(Potential.from_json(potential), int(count), int(guards), float(kappa))
        lo, hi = (float(x) for x in config["interval"])
        dtype = shipped(DTYPES[config["dtype"]])
        empty = np.zeros(tensors["anchors"].shape[0])
        weights = AnchorWeights(empty, empty, empty, skip=(1.0, 1.0) if config["skip"] else (0.0, 0.0))
        function = parse(str(config["function"]))
        head = cls(function, lo, hi, weights, shape, empty, dtype, bool(config["relative"]), bool(config["strict"]))
        head.lattice = Lattice(*config["fast"]) if "fast" in config else None
        return head

    def extra_repr(self) -> str:
        interval = f"{self.function.name} on [{self.lo:g}, {self.hi:g}]"
        return f"{interval}, {self.size} anchors, {self.potential}, kappa={self.kappa:.3g}"
