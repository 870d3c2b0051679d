"""Sizes before anything is built: from a wanted error to anchors, heads and logits, or from a budget to an error."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..certificates.certificate import upper_text
from ..certificates.rounding import unit
from ..dtypes import by_name, dtype_name, shipped
from ..errors import ArgumentError, PrecisionError, closest
from .ramps import GUARDS, VARIANTS, ramp, ramp_heads
from .result import Construction, ends, leak, number, whole
from .universal import ANCHORS

THEOREMS = ("ramp", "ramp_heads", "two_layer", "attention_then_softmax", "max_affine")
MOST_ANCHORS = 1 << 15  # a table of this size takes seconds to certify
TRIES = 12  # sizes that are tried, each at most half as large again: from the guess to beyond MOST_ANCHORS
#: Spacings that one head errs by, about: half of one when cold (A2), 0.062 when warm (A3), none for a gate.
SHARES = {"cold": 0.5, "warm": 0.0625, "gate": 0.0}
TWO_WARM = 0.124  # spacings that two neighbouring warm heads err by together


@dataclass(frozen=True)
class Plan:
    """What a theorem needs for an error of at most `eps`, rounding included; `str` is a table."""

    theorem: str
    eps: float
    anchors: int
    heads: int
    beta: float
    layers: int
    parameters: int
    logit: float
    dtype: str
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        rows = [
            ("error at most", upper_text(self.eps, 4)), ("anchors (keys)", f"{self.anchors}"),
            ("heads", f"{self.heads}"),
            ("layers", f"{self.layers}"), ("parameters", f"{self.parameters}"), ("beta", f"{self.beta:.4g}"),
            ("largest |logit|", f"{self.logit:.3g}"), ("dtype", self.dtype),
        ]  # fmt: skip
        lines = [self.theorem, *(f"  {name:<16} {value}" for name, value in rows)]
        return "\n".join([*lines, f"  {self.note}"] if self.note else lines)


@by_name
def plan(
    eps: float | None = None,
    theorem: str = "ramp",
    *,
    budget: int | None = None,
    a: float = -1.0,
    b: float = 1.0,
    d: int = 1,
    eps0: float = 1e-9,
    form: str = "paper",
    variant: str = "cold",
    tokens: int = 50,
    dtype: torch.dtype = torch.float64,
    dim: int = 2,
    side: float = 1.0,
    lipschitz: float = 1.0,
    outputs: int = 1,
) -> Plan:
    """eps -> the smallest size that certifies it; budget (parameters) -> the smallest error that fits.

    >>> plan(1e-2, "ramp", a=-1, b=1).anchors
    102
    >>> plan(theorem="ramp_heads", budget=2000, tokens=50).heads
    13
    >>> plan(0.1, "two_layer", dim=2, lipschitz=1.0).eps <= 0.1
    True

    Ramps take a, b, d (channels of x; w is taken as ones and |x| up to the default radius), form, variant and, for many
    heads, tokens (keys per head). The universal constructions take the dimension n*d as `dim`, the box's side, the
    Lipschitz constant and the number of output channels n*channels.
    """
    if theorem not in THEOREMS:
        raise ArgumentError(
            f"theorem must be one of {', '.join(THEOREMS)}, got {theorem!r}{closest(str(theorem), THEOREMS)}"
        )
    if (eps is None) == (budget is None):
        raise ArgumentError("give eps (how accurate) or budget (how many parameters), one of the two")
    wanted = None if eps is None else number("eps", eps, positive=True)
    most = None if budget is None else whole("budget", budget, 1)
    shipped(dtype)
    if theorem in ("ramp", "ramp_heads"):
        low, high = ends(a, b)
        w = torch.ones(whole("d", d, 1), dtype=dtype)
        if theorem == "ramp":
            if variant not in VARIANTS:
                raise ArgumentError(f"variant must be one of {', '.join(VARIANTS)}, got {variant!r}")
            options: dict[str, Any] = {"form": form} if variant == "cold" else {"variant": variant}
            build = lambda size: ramp(w, 0.0, low, high, size, eps0, **options)  # noqa: E731
            scale = SHARES[variant] * (high - low)
            return _sized(build, wanted, most, 3, lambda e: 1 + scale / e, theorem, dtype)
        keys = whole("tokens", tokens, 3, " (n >= 3)")
        chosen: dict[str, Any] = {"form": form} if variant == "cold" else {"variant": variant}
        many = lambda size: ramp_heads(w, 0.0, low, high, size, keys, eps0, **chosen)  # noqa: E731
        each = {"cold": 2.0 * (keys - 2), "warm": (keys - 1 - 2 * GUARDS) / TWO_WARM}.get(variant, 1.0)
        return _sized(many, wanted, most, 1, lambda e: (high - low) / (each * e) - 1, theorem, dtype)
    D, length = whole("dim", dim, 1), number("side", side, positive=True)
    slope, width = number("lipschitz", lipschitz, positive=True), whole("outputs", outputs, 1)
    return _universal(theorem, wanted, most, D, length, slope, width, leak(eps0), dtype)


def _sized(
    build: Any, eps: float | None, budget: int | None, least: int, guess: Any, theorem: str, dtype: torch.dtype
) -> Plan:
    """The smallest construction with bound <= eps, or the most accurate one within the budget."""
    tried: dict[int, Construction | None] = {}

    def attempt(size: int) -> Construction | None:
        if size not in tried:
            try:
                tried[size] = build(size)
            except PrecisionError:
                tried[size] = None
        return tried[size]

    if eps is not None:
        size = max(least, math.floor(guess(eps)))
        for _ in range(TRIES):
            if size > MOST_ANCHORS:
                break
            built = attempt(size)
            if built is not None and built.bound is not None and built.bound <= eps:
                return _plan(theorem, built, size, dtype)
            if built is None or sum(v for k, v in built.bound_terms.items() if k.endswith("rounding")) > eps:
                break  # a larger table is only rounded more
            short = 1.0 if built.bound is None else built.bound / eps
            size = max(size + 1, math.floor(size * min(short, 1.5)))
        bounds = [x.bound for x in tried.values() if x is not None and x.bound is not None]
        reachable = min([*bounds, *_floor(attempt, least)], default=None)
        raise PrecisionError(
            f"{theorem} does not reach eps = {eps:g} in {dtype_name(dtype)}: rounding grows with the logits; the "
            f"smallest bound found is {upper_text(reachable)}, with at most {MOST_ANCHORS} anchors; "
            "use dtype=torch.float64 or variant='gate'",
            reachable=reachable,
        )
    assert budget is not None
    low = attempt(least)
    if low is None or low.size.parameters > budget:
        need = low.size.parameters if low is not None else 0
        raise ArgumentError(f"budget = {budget} parameters is too small: the smallest {theorem} has {need}")
    following = attempt(least + 1)
    each = max(1, (following.size.parameters if following is not None else 0) - low.size.parameters)
    size = min(MOST_ANCHORS, least + (budget - low.size.parameters) // each)
    candidates = sorted({size, *(max(least, size >> k) for k in range(1, 8))}, reverse=True)
    built_ones = [(x.bound, s, x) for s in candidates if (x := attempt(s)) is not None and x.bound is not None]
    _, size, best = min(built_ones, key=lambda item: item[0])
    return _plan(theorem, best, size, dtype)


def _floor(attempt: Any, least: int) -> list[float]:
    found = [attempt(least + (1 << k)) for k in range(1, 11, 2)]
    return [x.bound for x in found if x is not None and x.bound is not None]


def _plan(theorem: str, built: Any, size: int, dtype: torch.dtype) -> Plan:
    s = built.size
    beta = float(built.beta) if hasattr(built, "beta") else 0.0
    note = f"{size} heads" if theorem == "ramp_heads" else ""
    paper = "" if built.paper_bound is None else f"the paper states {built.paper_bound:.4g} for this size"
    return Plan(theorem, built.bound, s.anchors, s.heads, beta, s.layers, s.parameters, s.logit, dtype_name(dtype),
                "; ".join(x for x in (note, paper) if x))  # fmt: skip


def _universal(
    theorem: str, eps: float | None, budget: int | None, D: int, side: float, slope: float, outputs: int, eps0: float,
    dtype: torch.dtype,
) -> Plan:  # fmt: skip
    """Grid routes in closed form (E1, E2, E4), without the rounding of f's values."""
    hat = 1 / (ANCHORS - 1)
    factor = 0.5 * math.sqrt(1.1) if theorem == "max_affine" else math.sqrt(0.25 + hat + hat**2 + eps0)
    error = lambda pieces: slope * factor * math.sqrt(D) * side / pieces * (1 + 1e-6)  # noqa: E731

    def parameters(pieces: int) -> int:
        if theorem == "max_affine":
            return pieces**D * (D + 1 + outputs) + D * (D + 1) + D + 1 + outputs**2
        hats, keys = D * (pieces + 1), (pieces + 1) ** D
        ramps = D * pieces
        first = ramps * (2 * D + 2) + 3 * ANCHORS + ramps * hats + hats
        second = hats**2 + keys * (hats + outputs) + outputs**2 if theorem == "two_layer" else keys * (hats + outputs)
        return first + second

    if eps is not None:
        pieces = max(1, math.ceil(error(1) / eps))
    else:
        assert budget is not None
        pieces = 0
        while parameters(pieces + 1) <= budget:
            pieces += 1
        if pieces == 0:
            raise ArgumentError(
                f"budget = {budget} parameters is too small: the smallest {theorem} has {parameters(1)}"
            )
    keys = pieces**D if theorem == "max_affine" else (pieces + 1) ** D
    u = unit(dtype)
    if theorem == "max_affine":
        beta = math.log(keys / eps0) / (0.1 * D * (side / pieces / 2) ** 2)
        heads, layers, logit, anchors = 1, 1, 2 * beta * D * side**2 / 4, keys
    else:
        beta = 2.0 ** math.ceil(math.log2(math.log((pieces + 1) ** 3 * keys / min(eps0, u)) / (0.5 - 2 * hat)))
        heads, layers = D * pieces + (theorem == "two_layer"), 2 if theorem == "two_layer" else 1
        logit, anchors = max(beta * D, 2 * math.log(1 / eps0) * (ANCHORS - 1) ** 2), keys + ANCHORS
    note = f"spacing {side / pieces:.4g}; the grid is exponential in the dimension {D}"
    return Plan(
        theorem, error(pieces), anchors, heads, beta, layers, parameters(pieces), logit, dtype_name(dtype), note
    )
