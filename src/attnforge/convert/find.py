"""Where a model computes something nonlinear: activations, norms and gated units, with every path they hang at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from ..ir.functions import Univariate
from .activations import is_bare, may_activate, recognise
from .gated import GatedUnit, Layout, gated_layout
from .pointwise import ProductSite
from .site import SiteModule

Kind = Literal["activation", "norm", "gated"]
ATTENTION = (nn.Softmax, nn.Softmax2d, nn.MultiheadAttention)  # softmax attention of the source stays (section D5)


@dataclass(frozen=True)
class Norm:
    """What is known of a norm: its kind, shape and epsilon, and whether its weight is stored minus 1."""

    kind: Literal["layer", "rms"]
    shape: tuple[int, ...]
    eps: float
    unit: bool = False


@dataclass(frozen=True)
class Found:
    """One nonlinear thing: the paths it hangs at (several where a module is shared), and what it is.

    Exactly one of `function`, `norm` and `layout` is set; none of them where nothing is known: then `why` says more.
    """

    paths: tuple[str, ...]
    operation: str
    target: Any
    function: Univariate | None = None
    norm: Norm | None = None
    layout: Layout | None = None
    why: str = ""

    @property
    def path(self) -> str:
        return self.paths[0]

    @property
    def kind(self) -> Kind | None:
        if self.function is not None:
            return "activation"
        return "norm" if self.norm is not None else "gated" if self.layout is not None else None


def find(model: nn.Module) -> list[Found]:
    """Everything nonlinear that can be told by modules and attributes, in the order of the model."""
    places: dict[int, list[str]] = {}
    objects: dict[int, Any] = {}
    for path, value in _everything(model):
        places.setdefault(id(value), []).append(path)
        objects[id(value)] = value
    found = []
    for key, value in objects.items():
        one = _examine(tuple(places[key]), value)
        if one is not None:
            found.append(one)
    # What an activation or a norm keeps inside is part of it.
    whole = [f"{path}." for one in found if one.kind != "gated" for path in one.paths]
    return [one for one in found if not one.path.startswith(tuple(whole))]


def _everything(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """All submodules and all functions stored as attributes, under all their paths; a function is new at each place."""
    for path, module in model.named_modules(remove_duplicate=False):
        if path:
            yield path, module
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if not name.startswith("_") and name != "forward" and may_activate(name, value):
                yield (f"{path}.{name}" if path else name), Attribute(value)


@dataclass(frozen=True, eq=False)
class Attribute:
    """A function that a module keeps as an attribute; its own object for every place, unlike the function."""

    function: Any


def _examine(paths: tuple[str, ...], value: Any) -> Found | None:
    if isinstance(value, Attribute):
        function = recognise(value.function)
        if function is None or function.name == "identity":
            return None
        return Found(paths, function.name, value.function, function=function)
    kind = type(value)
    converted = isinstance(value, GatedUnit) and isinstance(value.product, ProductSite)
    if isinstance(value, (*ATTENTION, SiteModule)) or converted:
        return None
    norm = norm_of(value)
    if norm is not None:
        return Found(paths, f"{norm.kind}_norm", value, norm=norm)
    layout = gated_layout(value)
    if layout is not None:
        return Found(paths, "product", value, layout=layout)
    if is_bare(value):
        function = recognise(value)
        if function is not None:
            return None if function.name == "identity" else Found(paths, function.name, value, function=function)
    if kind.__module__ == "torch.nn.modules.activation" or isinstance(value, nn.GLU):
        learned = " with learned parameters" if any(True for _ in value.parameters()) else ""
        return Found(paths, kind.__name__, value, why=f"no registered function has the values of this module{learned}")
    if isinstance(value, (nn.RNNBase, nn.RNNCellBase)):
        return Found(paths, kind.__name__, value, why="a recurrent network gates its state with data")
    if kind.__module__ == "transformers.activations":
        return Found(paths, kind.__name__, value, why="no registered function has the values of this module")
    return None


@torch.no_grad()
def norm_of(module: nn.Module) -> Norm | None:
    """What kind of norm a module is, or None. Classes other than PyTorch's are compared by their values."""
    if type(module) is nn.LayerNorm:
        return Norm("layer", tuple(module.normalized_shape), module.eps)
    if type(module) is nn.RMSNorm:
        weight = module.weight
        dtype = torch.get_default_dtype() if weight is None else weight.dtype
        eps = torch.finfo(dtype).eps if module.eps is None else module.eps
        return Norm("rms", tuple(module.normalized_shape), eps)
    names = set(module.state_dict(keep_vars=True))
    if "norm" not in type(module).__name__.lower() or not names <= {"weight", "bias"} or "weight" not in names:
        return None
    weight = module.get_parameter("weight")
    if weight.dim() != 1:
        return None
    for name in ("variance_epsilon", "eps", "epsilon"):
        small = getattr(module, name, None)
        if isinstance(small, float):
            return _by_values(module, weight, small)
    return None


def _by_values(module: nn.Module, weight: nn.Parameter, eps: float) -> Norm | None:
    """The norm whose formula gives what the module gives on random rows, small ones included."""
    d = weight.shape[0]
    x = torch.randn(6, d, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 6)[:, None] + 0.1
    x = x.to(weight.device, weight.dtype)
    try:
        wanted = module(x)
    except (RuntimeError, TypeError, ValueError):  # takes other arguments: not a plain norm
        return None
    bias = module._parameters.get("bias")
    wide = x.double()
    for kind in ("rms", "layer"):
        for unit in (False, True):
            c = wide if kind == "rms" else wide - wide.mean(-1, keepdim=True)
            out = c * (c.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight.double() + float(unit))
            out = out if bias is None else out + bias.double()
            close = 64 * torch.finfo(weight.dtype).eps * (1 + out.abs().amax())
            if wanted.shape == out.shape and bool(((wanted.double() - out).abs() <= close).all()):
                return Norm("rms" if kind == "rms" else "layer", (d,), eps, unit)
    return None
