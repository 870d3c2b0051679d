"""The theorems of arXiv 2504.15956 and 2504.19901 as networks that can be held in hand.

Every function returns a `Construction`: `m(X)`, `m.attention(X)`, `m.bound` (certified, rounding included),
`m.paper_bound` where the paper states one, `m.matrices` by the paper's names, `m.size`, `m.plot()`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .kinks import affine_maximum, splice
from .partition import MaxAffine, max_affine
from .ramps import Ramp, RampHeads, clipped_relu, hard_tanh, leaky_relu, ramp, ramp_heads, relu
from .result import Construction, Size
from .sizes import Plan, plan
from .spectral import Density, Strip
from .universal import Universal, attention_then_softmax, two_layer

if TYPE_CHECKING:
    from .in_context import emulate_head, gradient_descent, gradient_step

__all__ = [
    "Construction",
    "Density",
    "MaxAffine",
    "Plan",
    "Ramp",
    "RampHeads",
    "Size",
    "Strip",
    "Universal",
    "affine_maximum",
    "attention_then_softmax",
    "clipped_relu",
    "emulate_head",
    "gradient_descent",
    "gradient_step",
    "hard_tanh",
    "leaky_relu",
    "max_affine",
    "plan",
    "ramp",
    "ramp_heads",
    "relu",
    "splice",
    "two_layer",
]


def __getattr__(name: str) -> Any:
    if name not in ("emulate_head", "gradient_descent", "gradient_step"):
        raise AttributeError(f"module 'attnforge.theorems' has no attribute '{name}'")
    from . import in_context  # when used: it brings the learners along

    return getattr(in_context, name)
