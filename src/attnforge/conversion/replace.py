"""A second model over the same weights, with heads in their places and one record of each.

Everything is copied but the parameters, which both models share. Modules are put where others, or plain functions,
were, and fused paths that would not ask them are switched off.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..certificates.certificate import upper_text
from ..certificates.certified import CertifiedModule
from ..dtypes import DTYPES
from ..errors import ArgumentError, AttnforgeError, PrecisionError, UnsupportedOperation
from ..heads import AnchorHead
from ..heads.fast.activation import FastActivation
from ..network import Heads
from .build import Options, activation_head, norm_head, product_head, scale_of, whole_line, widened, widened_ratio
from .find import Found, jump_of
from .norm import ConvertedNorm
from .ranges import Seen
from .record import Replacement
from .site import (
    ConvertedActivation,
    ConvertedProduct,
    GatedUnit,
    Multiply,
    describe,
    handed_on,
    rebuilt,
    right_everywhere,
    with_jump,
    working,
)

QUANTISED = ("torch.ao.nn.quantized", "torch.nn.quantized", "torch.ao.nn.intrinsic", "bitsandbytes", "torchao")
LEAST_OFFSET = 100.0  # standard deviations that the mean of a row may be away from 0, however few calibration saw


def twin(model: nn.Module) -> nn.Module:
    """A deep copy whose parameters are the very tensors of the original; buffers are copied.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> other = twin(model)
    >>> other[0].weight is model[0].weight, other[1] is model[1]
    (True, False)
    """
    memo: dict[int, object] = {id(parameter): parameter for parameter in model.parameters()}
    try:
        return copy.deepcopy(model, memo)
    except (RuntimeError, TypeError) as error:  # tensors that are results of a computation, locks, files
        raise ArgumentError(
            f"{type(model).__name__} cannot be copied with copy.deepcopy: {str(error).splitlines()[0]}"
        ) from error


def dtype_of(model: nn.Module) -> torch.dtype:
    """The one floating dtype of the model's parameters; `ArgumentError` where there is none, or several."""
    found = {p.dtype: name for name, p in model.named_parameters() if p.is_floating_point()}
    if not found:
        raise ArgumentError(f"{type(model).__name__} has no floating parameters, so its dtype is not known")
    if len(found) > 1:
        shown = ", ".join(f"{name} is {dtype}" for dtype, name in found.items())
        raise ArgumentError(f"the parameters have several dtypes ({shown}); convert the model with model.to(dtype)")
    (dtype,) = found
    if dtype not in DTYPES.values():
        raise ArgumentError(f"parameters are {dtype}; expected one of {', '.join(map(str, DTYPES.values()))}")
    return dtype


def refuse_unreadable(model: object) -> None:
    """Raise for what cannot be taken apart: no module at all, scripted, compiled, quantised or empty modules."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    problems = list(_unreadable(model))
    if problems:
        raise UnsupportedOperation("\n".join([f"{type(model).__name__} cannot be converted:", *problems]))


def _unreadable(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        place, kind = path or "the model itself", f"{type(module).__module__}.{type(module).__qualname__}"
        if isinstance(module, torch.jit.ScriptModule):
            yield f"  {place} is scripted ({kind}): convert the Python module, then script the result"
            return  # everything below it is scripted as well
        if kind.startswith(QUANTISED) or ".quantized." in kind:
            yield f"  {place} is quantised ({kind}): convert the floating-point model"
        if hasattr(module, "_orig_mod"):
            yield f"  {place} is the result of torch.compile: convert the module itself, model._orig_mod"
            return
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            yield f"  {name} is on the meta device and has no values: load the weights first"
        elif parameter.is_quantized:
            yield f"  {name} is quantised ({parameter.dtype}): convert the floating-point model"


class Called(nn.Module):
    """A plain function as a module, so that it has a place and hooks."""

    def __init__(self, function: Any):
        super().__init__()
        self.function = function

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = self.function(input, *args, **kwargs)
        return out


def put(model: nn.Module, path: str, module: nn.Module) -> None:
    """Hang `module` at `path`, instead of what is there: a submodule or a function kept as an attribute."""
    parent, _, name = path.rpartition(".")
    holder = model.get_submodule(parent)
    old = getattr(holder, name)
    if isinstance(old, nn.Module):
        module.train(old.training)
    setattr(holder, name, module)


def prepare(model: nn.Module, sites: tuple[Found, ...]) -> dict[str, nn.Module]:
    """Turn every site into a module that can be watched; the modules by path."""
    placed: dict[str, nn.Module] = {}
    for site in sorted(sites, key=lambda site: site.kind == "gated"):  # functions first: units take their children over
        module = site.target
        if site.kind == "gated":
            assert site.roles is not None
            module = rebuilt(site.target, site.roles, Multiply())
        elif not isinstance(module, nn.Module):
            module = Called(site.target)
        if module is not site.target:
            for path in site.paths:
                put(model, path, module)
        placed[site.path] = module
    unfuse(model)
    return placed


def unfuse(model: nn.Module) -> None:
    """PyTorch's encoder layers have a fused evaluation path that computes relu or gelu itself and asks no submodule."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
            module.enable_nested_tensor = False


def replace(
    model: nn.Module,
    sites: Sequence[Found],
    seen: Mapping[str, Seen],
    options: Options,
    dtype: torch.dtype,
    margin: float,
    variance_margin: float,
    strict: bool,
) -> list[Replacement]:
    """Build every site's heads, hang them into the model, and say what was built; all failures are told at once."""
    device = next(model.parameters()).device
    records, failed = [], []
    for site in sites:
        try:
            if site.norm is not None:
                made, record = _norm(site, seen[site.path], options, dtype, variance_margin, strict)
            elif site.function is not None:
                made, record = _activation(site, seen[site.path], options, dtype, margin, strict)
            else:
                made, record = _product(site, seen[site.path], options, dtype, margin, strict)
        except AttnforgeError as error:
            failed.append(f"{site.path}: {error}")
            continue
        asked = options.anchors is None and not options.cold and dtype == working(dtype)
        if asked and record.bound > options.eps * record.scale:
            where = f"[{record.low:g}, {record.high:g}]"
            reached = f"reaches {upper_text(record.relative)} of its output's scale on {where}"
            failed.append(f"{site.path}: {record.operation} {reached}, not eps = {options.eps:g} ({dtype})")
            continue
        made = made.to(seen[site.path].device or device)
        if site.roles is not None:
            unit = model.get_submodule(site.path)
            assert isinstance(unit, GatedUnit)
            unit.product = made.train(unit.training)
        else:
            for path in site.paths:
                put(model, path, made)
        records.append(record)
    if failed:
        raise PrecisionError("\n".join(["some sites cannot be built as asked:", *(f"  {line}" for line in failed)]))
    return records


def _record(
    site: Found, seen: Seen, head: CertifiedModule, ends: tuple[float, float], margin: float, **own: Any
) -> Replacement:
    """What is said of a site, whatever its kind; `own` is the rest."""
    return Replacement(
        path=site.path,
        operation=site.operation,
        low=ends[0],
        high=ends[1],
        margin=margin,
        parameters=sum(p.numel() for p in head.parameters()),
        calls=seen.calls,
        aliases=site.paths[1:],
        **{"low_seen": seen.low, "high_seen": seen.high, **own},
    )


def _activation(
    site: Found, seen: Seen, options: Options, dtype: torch.dtype, margin: float, strict: bool
) -> tuple[nn.Module, Replacement]:
    function = site.function
    assert function is not None
    known = seen.calls > 0
    low, high = widened(seen.low, seen.high, margin) if known else (seen.low, seen.high)
    low, high = max(low, function.domain.lo), min(high, function.domain.hi)
    scale = scale_of(function, seen.low, seen.high)
    wide = whole_line(low, high) if options.everywhere(function) else (low, high)
    jump = jump_of(site.target, function, *wide)
    if jump >= options.eps * scale:
        what = "jumps by" if function.name == "softplus" else "is known only up to"
        raise PrecisionError(f"{function.name} {what} {jump:.3g} here: more than eps = {options.eps:g} of its scale")
    head = activation_head(function, *wide, options.eps * scale - jump, options)
    assert head.bound is not None
    if dtype == working(dtype):  # in half precision the bound is that of rounding the result: it grows with the range
        low, high = wide
    unknown = {} if known else {"low_seen": None, "high_seen": None}
    return ConvertedActivation(head, function.name, low, high, site.path, strict), _record(
        site, seen, head, (low, high), margin if known else 1.0,
        level="ffn",
        family=head.family,
        anchors=_anchors(head),
        bound=handed_on(with_jump(head.bound, jump), scale_of(function, low, high), dtype),
        scale=scale,
        kappa=_kappa(head),
        everywhere=right_everywhere(head),
        config={"function": function.name, **({"jump": jump} if jump else {}), **describe(head)},
        **unknown,
    )  # fmt: skip


def _anchors(head: CertifiedModule) -> int:
    """The slots of the largest head: anchors, or the two of a gate."""
    heads = [group for group in head.modules() if isinstance(group, Heads)]
    return max(group.slots + (group.scope == "self") for group in heads)


def _kappa(head: CertifiedModule) -> float | None:
    if isinstance(head, AnchorHead):
        return head.kappa
    return head.table.kappa if isinstance(head, FastActivation) and head.table.anchors > 2 else None


def _norm(
    site: Found, seen: Seen, options: Options, dtype: torch.dtype, margin: float, strict: bool
) -> tuple[nn.Module, Replacement]:
    norm, module = site.norm, site.target
    assert norm is not None
    ends = widened_ratio(seen.low, seen.high, margin)
    offset = 2.0 ** math.ceil(math.log2(max(LEAST_OFFSET, margin * seen.offset)))
    head = norm_head(math.prod(norm.shape), *ends, norm.eps, norm.kind, offset, options)
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    made = ConvertedNorm(head, norm.shape, weight, bias, site.path, strict, norm.unit)
    bound, scale = made.site_bound(dtype)
    return made, _record(
        site, seen, head, ends, margin, level="pure", family="norm", anchors=head.heads, bound=bound, scale=scale,
        kind="norm", ranged=made.what, config=made.config(),
    )  # fmt: skip


def _product(
    site: Found, seen: Seen, options: Options, dtype: torch.dtype, margin: float, strict: bool
) -> tuple[nn.Module, Replacement]:
    first, second = widened(*seen.other, margin), widened(seen.low, seen.high, margin)
    head = product_head(first, second, options)
    assert head.bound is not None
    assert site.roles is not None
    largest = [max(abs(low), abs(high)) for low, high in (seen.other, (seen.low, seen.high))]
    made = ConvertedProduct(head, f"{site.path}.product", strict)
    return made, _record(
        site, seen, head, second, margin, level="pure", family="product", anchors=head.nodes,
        bound=made.site_bound(dtype), scale=(largest[0] * largest[1]) or 1.0, kind="gated", ranged="second factor",
        config={"layout": GatedUnit.config_of(site.roles), "fused": made.fused, **describe(head)},
    )  # fmt: skip
