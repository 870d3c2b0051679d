"""The weights of gates: the slots, keys and values of a relu, a ramp, a maximum, a sigmoid (lemmas B1 to B4 of `head`),
how sharp they have to be, and which operations of a program they carry out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...arguments import positive
from ...errors import PrecisionError
from ...programs.ops import Apply
from ..construction import HeadBuilder, Order, Planned, SelfBuilder
from ..stored import SelfSpec
from .bound import KINK, gate_domain, gate_error
from .site import GateSite
from .target import GateTarget, Logistic, Relu, gate_for, gate_target

SHARPNESS_BITS = {torch.float32: 26, torch.float64: 55}  # beta * scale = 2^26: the kink costs u/14 of the scale
ROOTED_BITS = {torch.float32: 64, torch.float64: 72}  # where a root follows: the third root of 2^-26 is 2e-3
MOST_BITS = {torch.float32: 64, torch.float64: 256}  # logits stay far from overflow, also well outside the interval
LARGEST_BITS = {torch.float32: 100, torch.float64: 900}  # of the interval and of beta itself


@dataclass(frozen=True)
class GateSpec:
    """One gate as data: its heads, and the target that they are compared with.

    `sharpness` is beta, None where the head is exact; for a pair the input channels are (x, y), else (y,).
    """

    target: GateTarget
    heads: SelfSpec
    sharpness: float | None


def gate_spec(name: str, sharpness: float, **parameters: Any) -> GateSpec:
    """The gate of this name with beta = sharpness.

    >>> gate_spec("ramp", 1024.0, a=-1, b=1).heads.kind
    (2, 2, 1)
    """
    target = gate_target(name, **parameters)
    beta = positive("sharpness", sharpness)
    return GateSpec(target, _heads(target, beta), None if target.exact else beta)


def _heads(target: GateTarget, beta: float) -> SelfSpec:
    shape = target.shape
    if isinstance(shape, Logistic):
        return _logistic(shape)
    if target.pair:
        return _extremum(1.0 if target.name == "max" else -1.0, beta)
    if target.relus:
        return _relus(target.relus, target.level, beta)
    low, high = shape.knots
    return _ramp(low, high, beta)


def _relus(parts: Sequence[Relu], bias: float, beta: float) -> SelfSpec:
    """bias + the sum of weight * relu(side * (y - knot)), lemma B1."""
    rows = [(part.knot, part.side, part.weight) for part in parts]
    knot, side, weight = (np.array(column, dtype=np.float64).reshape(-1, 1, 1) for column in zip(*rows, strict=True))
    count = len(parts)
    zero = np.zeros((count, 1, 1))
    return SelfSpec(
        W_Q=side, b_Q=(-side * knot)[:, 0], b_K=np.full((count, 1), beta), W_V=side, b_V=(-side * knot)[:, 0],
        M_K=zero, M_V=zero, W_O=weight, S=np.zeros((1, 1)), s=np.array([bias]),
    )  # fmt: skip


def _ramp(low: float, high: float, beta: float) -> SelfSpec:
    return SelfSpec(
        W_Q=np.ones((1, 1, 2)), b_Q=np.array([[-low, -high]]), b_K=np.zeros((1, 2)), W_V=np.ones((1, 1, 1)),
        b_V=np.zeros((1, 1)), M_K=np.array([[[-beta, 0.0], [0.0, beta]]]), M_V=np.array([[[low], [high]]]),
        W_O=np.ones((1, 1, 1)), S=np.zeros((1, 1)), s=np.zeros(1),
    )  # fmt: skip


def _extremum(sign: float, beta: float) -> SelfSpec:
    both = np.array([[[1.0], [-1.0]]])
    return SelfSpec(
        W_Q=both, b_Q=np.zeros((1, 1)), b_K=np.full((1, 1), beta), W_V=both, b_V=np.zeros((1, 1)),
        M_K=np.zeros((1, 1, 1)), M_V=np.zeros((1, 1, 1)), W_O=np.full((1, 1, 1), sign),
        S=np.array([[0.0], [1.0]] if sign > 0 else [[1.0], [0.0]]), s=np.zeros(1),
    )  # fmt: skip


def _logistic(shape: Logistic) -> SelfSpec:
    slope, level = (float(v) for v in shape.high)
    return SelfSpec(
        W_Q=np.ones((1, 1, 1)), b_Q=np.zeros((1, 1)), b_K=np.full((1, 1), shape.rate), W_V=np.full((1, 1, 1), slope),
        b_V=np.full((1, 1), level), M_K=np.zeros((1, 1, 1)), M_V=np.full((1, 1, 1), float(shape.low[1])),
        W_O=np.ones((1, 1, 1)), S=np.zeros((1, 1)), s=np.zeros(1),
    )  # fmt: skip


def gate_bound(
    name: str, lo: float, hi: float, sharpness: float, dtype: torch.dtype = torch.float32, **parameters: Any
) -> float:
    """The certified sup error of a gate before building it.

    >>> gate_bound("relu", -1, 1, 2.0**26) < 1.01 * KINK / 2**26
    True
    """
    spec = gate_spec(name, sharpness, **parameters)
    domain = gate_domain(spec.target, lo, hi, dtype)
    return gate_error(spec.heads.rounded(dtype), spec.target.shape, domain, dtype).total


def sharpness_for(
    name: str, eps: float | None, lo: float, hi: float, dtype: torch.dtype = torch.float32, **parameters: Any
) -> float:
    """The smallest power of two whose certificate reaches eps; without eps, where the kink costs less than rounding.

    >>> sharpness_for("relu", 1e-3, -1, 1)
    512.0
    """
    places = [parameters[key] for key in ("a", "b") if key in parameters] + list(parameters.get("xs", ()))
    scale = max(abs(float(place)) for place in (lo, hi, *places, 1e-30))
    whole, largest = math.ceil(math.log2(scale)), LARGEST_BITS[dtype]
    if eps is None:
        return math.ldexp(1.0, min(SHARPNESS_BITS[dtype] - whole, largest))
    positive("eps", eps)
    most, reached = min(MOST_BITS[dtype] - whole, largest), math.inf
    first = max(min(math.ceil(math.log2(KINK / eps)) - 2, most), -largest)
    for bits in range(first, most + 1):
        bound = gate_bound(name, lo, hi, math.ldexp(1.0, bits), dtype, **parameters)
        if bound <= eps:
            return math.ldexp(1.0, bits)
        if bound > 0.999 * reached:  # sharper does not help any more: rounding decides
            break
        reached = min(bound, reached)
    raise PrecisionError(
        f"a {name} gate on [{lo:g}, {hi:g}] in {dtype} reaches {reached:.3e}, not eps = {eps:g}; "
        "ask for that much, or use dtype=torch.float64",
        reachable=reached,
    )


class GateBuilder(SelfBuilder):
    """Univariate functions that are gates."""

    def propose(self, order: Order, made: Sequence[Planned]) -> Planned | None:
        found = gate_for(order.op.function) if isinstance(order.op, Apply) else None
        if found is None:
            return None
        name, parameters = found
        low, high = order.hull(0, order.op.function)  # type: ignore[attr-defined]
        exact = gate_target(name, **parameters).exact
        beta = 1.0 if exact else sharpness_for(name, None, low, high, order.dtype, **parameters)
        if order.rooted and not exact:
            beta = math.ldexp(beta, ROOTED_BITS[order.dtype] - SHARPNESS_BITS[order.dtype])
        return Planned(GateSite(order.number, name, parameters, beta, (low, high)))

    def spec(self, planned: Planned) -> SelfSpec:
        site = planned.site
        assert isinstance(site, GateSite)
        return gate_spec(site.name, site.sharpness, **site.parameters).heads


BUILDERS: dict[str, HeadBuilder] = {"gate": GateBuilder()}
