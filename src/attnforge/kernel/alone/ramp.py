"""Ramps of the theorems in token-wise form (lemma K30): files of the family "theorem-ramp", clip(w.x + t, a, b)."""

from __future__ import annotations

from typing import Any

from ...errors import CertificateError
from ..balls import NotProved
from ..file import Saved, Tensor
from ..functions import function
from ..program import Op, Program, number, whole
from .heads import MEMORY, SELF, Alone

MOST = 1 << 12  # inputs of a ramp: each has a weight


def ramped(saved: Saved) -> Alone:
    """The network of an affine map and a clip that a ramp's file describes."""
    try:
        return _ramped(saved.header["config"], dict(saved.tensors))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise CertificateError(f"the file describes no ramp: {error!r}") from error


def _ramped(config: Any, tensors: dict[str, Tensor]) -> Alone:
    if config["body"] != "AfterAffine" or config["causal"] is not False or config["slope"] is not None:
        raise NotProved("the kernel has a rule for ramps as an affine map and a layer of heads, without a mask")
    if whole(config["channels"], 1) != 1:
        raise NotProved("the kernel has no rule for ramps of more than one channel")
    a, b, t, radius = (number(config[key]) for key in ("a", "b", "t", "radius"))
    w = [number(x) for x in config["w"]]
    if not a < b or not radius > 0 or not 1 <= len(w) <= MOST:
        raise ValueError("its numbers are not those of a ramp")
    for name in ("w", "t"):  # a description of what the layers hold themselves
        tensors.pop(name, None)
    renamed = {}
    for name, tensor in tensors.items():
        if not name.startswith("net.layers."):
            raise ValueError(f"it has the tensor {name}")
        renamed["network" + name.removeprefix("net")] = tensor
    d, clip = len(w), f"piecewise_linear({[2 * a - b, a, b, 2 * b - a]}, {[a, a, b, b]})"
    line = {"weights": [[[x] for x in w]], "bias": [t], "off": [[[0.0]] * d, [0.0]]}
    ops = (Op("input", (), d), Op("linear", (0,), 1, line), Op("apply", (1,), 1, {"function": function(clip)}))
    groups = sum(name.startswith("network.layers.1.groups.") and name.endswith(".W_Q") for name in renamed)
    seen = SELF if config["temperature"] == "gate" else MEMORY
    dtype = next(iter(renamed.values())).dtype
    return Alone(Program((-radius,) * d, (radius,) * d, 1, ops, 2, 1), renamed, ((), seen * groups), dtype)
