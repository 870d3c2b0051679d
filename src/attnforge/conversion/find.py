"""Where a model computes something nonlinear: activations, norms and gated units, with every path they hang at; what
of that is converted at a level, what stays, and what nobody knows how to convert.

Functions are found by their values. A candidate is evaluated in float64 on a few hundred points and compared with the
functions of the registry, so that `nn.GELU(approximate="tanh")`, a `functools.partial`, an activation of Hugging Face
and a user's own `QuickGELU` are all recognised, and options that change the function are never missed.
"""

from __future__ import annotations

import copy
import fnmatch
import functools
import math
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, UnsupportedOperation, closest
from ..functions.registry import Univariate, get
from .record import LEVELS, Left
from .site import ConvertedProduct, GatedUnit, Roles, SiteModule, gated_roles

Pointwise = Callable[[Tensor], Tensor]
NAMES = (
    "gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "tanh", "sigmoid", "mish", "softplus", "softsign", "logsigmoid",
    "relu6", "squared_relu", "hardtanh", "hardswish", "hardsigmoid", "selu", "sin", "cos", "exp", "erf", "abs",
    "square", "atan", "expm1", "identity",
)  # fmt: skip
TELLING = ("act", "nonlin", "gelu", "relu", "silu", "swish", "tanh", "sigm")
CLOSE = 1e-8  # of a value and 1: some implementations carry constants of ten digits
EXACT = 2.0**-48  # of a value of softplus: 16 roundings, where 1e-8 would not see that it jumps
ROUNDED = 2.0**-44  # of a value and 1: what two implementations of one function may round differently
DENSE = 4001  # points of a range where a recognised function is compared: differences of constants are smooth
FAR = (-300.0, -100.0, -40.0, -20.0, -12.0, 12.0, 20.0, 40.0, 100.0, 300.0)  # where clipped variants show
NEAR = 446  # points of [-9, 9], where functions differ: 456 with those far away, which is 8 rows of 57


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
            return None if name == "softplus" and _threshold(candidate) is None else function
    return None


@torch.no_grad()
def _threshold(candidate: Any) -> float | None:
    """Beyond which number a softplus is the identity, as PyTorch's is; infinity for none, None where no one fits."""
    options = candidate.keywords if isinstance(candidate, functools.partial) else {}
    own = options.get("threshold", getattr(candidate, "threshold", 20.0))
    for threshold in (float(own), 20.0, math.inf):
        # around the threshold, and as far as float64 can tell the two branches apart
        ends = [threshold + d for d in (-1e-6, 0.0, 1e-6, 0.5)] if threshold < 50 else []
        grid = torch.cat([torch.linspace(0.0, 40.0, 641, dtype=torch.float64), torch.tensor(ends, dtype=torch.float64)])
        found = _call(candidate, grid.clone())
        wanted = torch.where(grid > threshold, grid, torch.logaddexp(grid, torch.zeros_like(grid)))
        if found is not None and found.shape == grid.shape and bool(((found - wanted).abs() <= EXACT * wanted).all()):
            return threshold
    return None


@torch.no_grad()
def jump_of(candidate: Any, function: Univariate, low: float, high: float) -> float:
    """By how much a candidate may differ on [low, high] from what it is recognised as: the jump of a softplus, or twice
    the largest difference measured, where constants of few digits make one that is more than rounding."""
    if function.name != "softplus":
        grid = torch.linspace(low, high, DENSE, dtype=torch.float64)
        exact = copy.deepcopy(candidate).double().cpu() if isinstance(candidate, nn.Module) else candidate
        found, wanted = _call(exact, grid.clone()), function.value(grid)
        assert found is not None, "it was recognised"
        gap = (found - wanted).abs()
        return 0.0 if bool((gap <= ROUNDED * (1 + wanted.abs())).all()) else 2 * float(gap.max())
    threshold = _threshold(candidate)
    assert threshold is not None, "it was recognised"
    return 0.0 if high <= threshold else math.log1p(math.exp(-threshold)) * (1 + 2.0**-40)  # rounded up


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
    grid = torch.cat([torch.linspace(-9.0, 9.0, NEAR, dtype=torch.float64), torch.tensor(FAR, dtype=torch.float64)])
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
    given = options.get("lambd", getattr(candidate, "lambd", 0.5))
    limit = float(given) if isinstance(given, (int, float)) else 0.0
    if 0 < 2 * limit < math.inf:  # 2 limit - limit is exact, so that the slopes are 1
        names.append(f"piecewise_linear({[-2.0 * limit, -limit, limit, 2.0 * limit]}, {[-limit, 0.0, 0.0, limit]})")
    low, high = getattr(candidate, "min_val", None), getattr(candidate, "max_val", None)
    if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low < high:
        ends = [float(low), float(high)]
        names.append(f"piecewise_linear({[ends[0] - 1, *ends, ends[1] + 1]}, {[ends[0], *ends, ends[1]]})")
    return names


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

    Exactly one of `function`, `norm` and `roles` is set; none of them where nothing is known: then `why` says more.
    """

    paths: tuple[str, ...]
    operation: str
    target: Any
    function: Univariate | None = None
    norm: Norm | None = None
    roles: Roles | None = None
    why: str = ""

    @property
    def path(self) -> str:
        return self.paths[0]

    @property
    def kind(self) -> Kind | None:
        if self.function is not None:
            return "activation"
        return "norm" if self.norm is not None else "gated" if self.roles is not None else None


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
    converted = isinstance(value, GatedUnit) and isinstance(value.product, ConvertedProduct)
    if isinstance(value, (*ATTENTION, SiteModule)) or converted:
        return None
    norm = norm_of(value)
    if norm is not None:
        return Found(paths, f"{norm.kind}_norm", value, norm=norm)
    roles = gated_roles(value)
    if roles is not None:
        return Found(paths, "product", value, roles=roles)
    if is_bare(value):
        function = recognise(value)
        if function is not None:
            return None if function.name == "identity" else Found(paths, function.name, value, function=function)
    if isinstance(value, nn.PReLU) and value.num_parameters == 1:
        function = get(f"leaky_relu({float(value.weight.detach())!r})")
        return Found(paths, function.name, value, function=function)
    if isinstance(value, nn.PReLU):
        why = f"it has a slope for each of {value.num_parameters} channels, and a site is one function of one number"
        return Found(paths, kind.__name__, value, why=why)
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


def computes_in_less(module: nn.Module) -> bool:
    """Whether a module of float64 weights is a norm only as float32 tells: it computes in float32, as Llama's do."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dtype != torch.float64 or norm_of(module) is not None:
        return False
    return norm_of(copy.deepcopy(module).float()) is not None


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


LEFT = "named in leave"
#: Modules that are nonlinear and that nothing here replaces, and why.
KEPT: dict[Any, str] = {
    nn.GroupNorm: "normalises over channels and positions at once, for which there is no head",
    nn.modules.instancenorm._InstanceNorm: "normalises over positions, for which there is no head",
    nn.modules.pooling._MaxPoolNd: "takes the largest of several numbers, which only attnforge.compile builds",
    nn.modules.pooling._AdaptiveMaxPoolNd: "takes the largest of several numbers, which only attnforge.compile builds",
    nn.RNNBase: "gates its state with data, step by step",
    nn.RNNCellBase: "gates its state with data",
    ATTENTION: "is softmax attention already",
}


def kept(model: nn.Module) -> list[str]:
    """The nonlinear modules of a model that stay as they are whatever is asked for, each with the reason."""
    reasons = ((path, m, why) for path, m in model.named_modules() for kind, why in KEPT.items() if isinstance(m, kind))
    return [f"{path or 'the model'} ({type(m).__name__}) {why}" for path, m, why in reasons]


@dataclass(frozen=True)
class Leave:
    """The user's patterns for paths that stay as they are."""

    patterns: tuple[str, ...]

    @classmethod
    def read(cls, leave: object, model: nn.Module) -> Leave:
        """Patterns as given, each of which must match something in the model."""
        given = (leave,) if isinstance(leave, str) else leave
        if not isinstance(given, Iterable):
            raise ArgumentError(f"leave must be a path or a sequence of paths, got {type(leave).__name__}")
        patterns = tuple(given)
        wrong = [p for p in patterns if not isinstance(p, str)]
        if wrong:
            raise ArgumentError(f"leave must hold paths as text, got {wrong[0]!r}")
        paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
        paths += [f"{path}.{name}" if path else name for path, m in model.named_modules() for name in vars(m)]
        found = cls(patterns)
        for pattern in patterns:
            if not any(cls((pattern,)).holds(path) for path in paths if path or pattern == ""):
                hint = closest(pattern, paths)
                raise ArgumentError(f"leave names '{pattern}', and no such path is in the model{hint}")
        return found

    def holds(self, path: str) -> bool:
        """Whether a path is one of the patterns, matches one, or lies below one."""
        return any(
            path == p or fnmatch.fnmatchcase(path, p) or (p != "" and path.startswith(f"{p}."))
            or fnmatch.fnmatchcase(path, f"{p}.*")
            for p in self.patterns
        )  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """Sites to convert, and what stays with its reason."""

    sites: tuple[Found, ...]
    left: tuple[Left, ...]


def choose(found: Sequence[Found], level: str, leave: Leave) -> Choice:
    """Sort what was found; every unknown module that may not stay is listed in one `UnsupportedOperation`."""
    sites, left, unknown = [], [], []
    for one in found:
        if any(leave.holds(path) for path in one.paths):
            left.append(Left(one.path, one.operation, LEFT))
        elif one.kind == "activation" or (one.kind is not None and level == "pure"):
            sites.append(one)
        elif one.kind is not None:
            left.append(Left(one.path, one.operation, "level 'ffn' replaces activations; level='pure' replaces this"))
        else:
            unknown.append(f"{one.path}: {type(one.target).__name__}: {one.why}")
    if unknown:
        raise unsupported(unknown)
    return Choice(tuple(sites), tuple(left))


def unsupported(lines: Sequence[str]) -> UnsupportedOperation:
    """One error for all operations that have no attention form here."""
    number = f"{len(lines)} operation{'s' if len(lines) > 1 else ''}"
    head = f"{number} of this model cannot be converted (nothing was changed):"
    hint = "name their paths in leave=[...] to keep them as they are, or use an activation that is registered"
    return UnsupportedOperation("\n".join([head, *(f"  {line}" for line in lines), hint]))


def level_of(level: object) -> str:
    if level not in LEVELS:
        hint = closest(str(level), LEVELS)
        raise ArgumentError(f"level must be 'ffn' (activations) or 'pure' (everything), got {level!r}{hint}")
    return str(level)
