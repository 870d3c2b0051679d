"""`head_for`: the head that computes a function on an interval, in the family that `choose` decides on."""

from __future__ import annotations

from typing import Any

import torch

from ..certificates.certified import CertifiedModule
from ..dtypes import by_name
from ..functions.registry import Univariate, get
from ..progress import shown
from .anchor.head import AnchorHead
from .chain.head import ChainHead
from .choose import Gate, GateProduct, Pieces, choose, fast_form, line_of
from .fast.activation import FastActivation
from .gate.head import GateHead


@shown("fitting")
@by_name
def head_for(
    fn: str | Univariate, lo: float, hi: float, eps: float | None = None, dtype: torch.dtype = torch.float32,
    *, fast: bool = False, **anchored: Any,
) -> CertifiedModule:  # fmt: skip
    """The head for a function on [lo, hi]: as small as certifies eps, or as accurate as its family is by default.

    `fast` asks for one exponential per element where there is such a form, right on the whole line. Options of
    `AnchorHead.fit` (anchors, relative, potential, temperature, kappa) ask for an anchor head, whatever the function.

    >>> [head_for(name, -8, 8).family for name in ("hardsigmoid", "hardswish", "exp")]
    ['gate', 'chain', 'anchor']
    >>> head_for("gelu", -8, 8, fast=True).family, head_for("relu", -8, 8, anchors=16).family
    ('fast', 'anchor')
    """
    function = get(fn)
    if anchored:
        return AnchorHead.fit(function, lo, hi, eps=eps, dtype=dtype, **anchored)
    if fast and fast_form(function) is not None:
        return FastActivation.fit(function.name, lo, hi, eps=eps, dtype=dtype)
    choice = choose(function, lo, hi)
    if isinstance(choice, Gate):
        return GateHead.fit(choice.name, lo, hi, eps, dtype=dtype, **choice.arguments)
    if isinstance(choice, (GateProduct, Pieces)):
        return ChainHead.fit(function, lo, hi, eps, dtype)
    return AnchorHead.fit(function, lo, hi, eps=eps, dtype=dtype)


def computes(head: CertifiedModule, function: Univariate) -> bool:
    """Whether a head's certificate speaks of this function: by name, or because its gate draws the same lines.

    >>> computes(GateHead.fit("ramp", -8, 8, a=0, b=6), get("relu6")), computes(GateHead.relu(-8, 8), get("relu6"))
    (True, False)
    """
    if not isinstance(head, GateHead):
        found: object = getattr(head, "function", None)
        return found == function
    choice, own = choose(function, head.lo, head.hi), head.config()
    if not isinstance(choice, Gate):
        return False
    drawn = line_of(own["name"], own["parameters"])
    if drawn is None or choice.line is None:
        return bool(own["name"] == choice.name)
    return drawn.draws(choice.line)
