"""A second model over the same weights: everything is copied but the parameters, which both share."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import nn

from ..errors import ArgumentError, UnsupportedOperation

QUANTISED = ("torch.ao.nn.quantized", "torch.nn.quantized", "torch.ao.nn.intrinsic", "bitsandbytes", "torchao")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


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
    if dtype not in FLOATS:
        raise ArgumentError(f"parameters are {dtype}; expected one of {', '.join(map(str, FLOATS))}")
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
