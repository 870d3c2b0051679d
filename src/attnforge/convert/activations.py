"""Which registered function a module or a callable computes, found by its values.

A candidate is evaluated in float64 on a few hundred points and compared with the functions of the registry, so that
`nn.GELU(approximate="tanh")`, a `functools.partial`, an activation of Hugging Face and a user's own `QuickGELU` are all
recognised, and options that change the function are never missed.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..ir.functions import Univariate, get

Pointwise = Callable[[Tensor], Tensor]
NAMES = (
    "gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "tanh", "sigmoid", "mish", "softplus", "softsign", "logsigmoid",
    "relu6", "squared_relu", "hardtanh", "hardswish", "hardsigmoid", "selu", "sin", "cos", "exp", "erf", "abs",
    "square", "atan", "expm1", "identity",
)  # fmt: skip
TELLING = ("act", "nonlin", "gelu", "relu", "silu", "swish", "tanh", "sigm")
CLOSE = 1e-8  # some implementations carry constants of ten digits
FAR = (-300.0, -100.0, -40.0, -20.0, -12.0, 12.0, 20.0, 40.0, 100.0, 300.0)  # where clipped variants show


def recognise(candidate: Any) -> Univariate | None:
    """The registered function that a module or callable computes elementwise, or None.

    >>> recognise(nn.GELU(approximate="tanh")).name, recognise(torch.tanh).name, recognise(nn.Softmax(-1))
    ('gelu_tanh', 'tanh', None)
    """
    values = _values(candidate)
    if values is None:
        return None
    grid, found = values
    for name in (*NAMES, *_with_options(candidate)):
        function = get(name)
        wanted = function.value(grid)
        if bool(((found - wanted).abs() <= CLOSE * (1 + wanted.abs())).all()):
            return function
    return None


def may_activate(name: str, value: object) -> bool:
    """Whether the attribute `name` holds a function that may be asked for its values: one of torch or Hugging Face, or
    one whose place says that it is an activation. A stranger's callback is not called."""
    if isinstance(value, functools.partial):
        return may_activate(name, value.func)
    if not isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
        return False
    origin = (getattr(value, "__module__", None) or "torch").split(".")[0]
    return origin in ("torch", "transformers") or any(word in name.lower() for word in TELLING)


def is_bare(module: nn.Module) -> bool:
    """Whether a module holds nothing: no children, parameters or buffers. Then it can be asked for its values."""
    return not any(True for _ in module.children()) and not any(True for _ in module.state_dict(keep_vars=True))


@torch.no_grad()
def _values(candidate: Any) -> tuple[Tensor, Tensor] | None:
    """Its values on the probe, if it maps every number by itself: the same in another shape and order."""
    grid = torch.cat([torch.linspace(-9.0, 9.0, 446, dtype=torch.float64), torch.tensor(FAR, dtype=torch.float64)])
    first = _call(candidate, grid.clone())
    second = _call(candidate, grid.flip(0).reshape(8, 57).clone())
    if first is None or second is None or first.shape != grid.shape or second.shape != (8, 57):
        return None
    same = torch.allclose(second.flatten().flip(0), first, rtol=1e-12, atol=1e-12)
    return (grid, first) if same else None


def _call(candidate: Any, x: Tensor) -> Tensor | None:
    training = candidate.training if isinstance(candidate, nn.Module) else None
    try:
        if training:
            candidate.eval()  # a randomised activation has a plain form in evaluation
        out = candidate(x)
    except Exception:  # whatever a stranger's code raises on a plain vector: then it is no pointwise function
        return None
    finally:
        if training:
            candidate.train()
    return out.double() if isinstance(out, Tensor) and out.is_floating_point() else None


def _with_options(candidate: Any) -> list[str]:
    """Functions with a number in them, where the candidate has such a number."""
    names = []
    slope, alpha = getattr(candidate, "negative_slope", None), getattr(candidate, "alpha", None)
    options = candidate.keywords if isinstance(candidate, functools.partial) else {}
    slope, alpha = options.get("negative_slope", slope), options.get("alpha", alpha)
    names += [f"leaky_relu({float(s)!r})" for s in (slope, 0.01) if isinstance(s, (int, float))]
    names += [f"elu({float(a)!r})" for a in (alpha, 1.0) if isinstance(a, (int, float)) and a > 0]
    low, high = getattr(candidate, "min_val", None), getattr(candidate, "max_val", None)
    if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low < high:
        ends = [float(low), float(high)]
        names.append(f"piecewise_linear({[ends[0] - 1, *ends, ends[1] + 1]}, {[ends[0], *ends, ends[1]]})")
    return names
