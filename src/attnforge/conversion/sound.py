"""Ranges without data, where the weights alone bound them: norm, linear map, activation (section H of docs/theory.md).

A normalised row n has |n|^2 <= d, so a layer norm's output weight * n + bias, through a linear map with rows w_j and
biases b_j, stays within |w_j . bias + b_j| + sqrt(d) |w_j * weight|_2 (Cauchy's inequality), whatever the input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from .find import Found, Norm, norm_of
from .watch import Seen, evaluating


def sound_ranges(
    model: nn.Module, sites: Sequence[Found], modules: Mapping[str, nn.Module], margin: float
) -> dict[str, Seen]:
    """The range at every site, from the weights; `ArgumentError` names the sites that need data."""
    sources = _sources(model, [modules[site.path] for site in sites if site.kind == "activation"])
    ranges: dict[str, Seen] = {}
    open_: list[str] = []
    for site in sites:
        found = [_reach(*pair) for pair in sources.get(modules[site.path], ())] if site.kind == "activation" else []
        if not found or None in found:
            open_.append(f"{site.path} ({site.operation})")
            continue
        known = [pair for pair in found if pair is not None]
        ranges[site.path] = Seen(min(low for low, _ in known), max(high for _, high in known))
    if open_:
        raise ArgumentError(
            f"without calibration the range of {len(open_)} site{'s' if len(open_) > 1 else ''} is not known: "
            f"{', '.join(open_)}; ranges follow from the weights only where a norm and a linear map come before an "
            "activation: give calibration=batches"
        )
    return ranges


def _dummy(model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """An input to follow the data with: its values do not matter."""
    own = getattr(model, "dummy_inputs", None)
    if isinstance(own, Mapping):
        return (), dict(own)
    parameter = next(model.parameters())
    if isinstance(model, (nn.TransformerEncoder, nn.TransformerEncoderLayer)):
        layer = model.layers[0] if isinstance(model, nn.TransformerEncoder) else model
        assert isinstance(layer, nn.TransformerEncoderLayer)
        width = layer.linear1.in_features
        return (torch.zeros(2, 2, width, dtype=parameter.dtype, device=parameter.device),), {}
    return None


def _sources(model: nn.Module, targets: Sequence[nn.Module]) -> dict[nn.Module, list[tuple[Any, Any]]]:
    """For each activation the (norm, linear map) that its input came through, once for each time it is called.

    Data is followed by the identity of tensors: an activation's input is a linear map's output, whose input is a
    norm's.
    """
    given = _dummy(model)
    if given is None:
        return {}
    made: dict[int, tuple[nn.Module, Tensor, Tensor]] = {}  # by output: who made it, from what; tensors stay alive
    found: dict[nn.Module, list[tuple[Any, Any]]] = {}

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor) and output is not args[0]:
            made[id(output)] = (module, args[0], output)

    def ask(module: nn.Module, args: Any) -> None:
        linear = made.get(id(args[0]))
        norm = None if linear is None else made.get(id(linear[1]))
        pair = (None if norm is None else norm[0], None if linear is None else linear[0])
        found.setdefault(module, []).append(pair)

    wanted = [m for m in model.modules() if norm_of(m) is not None or _matrix(m) is not None]
    handles = [m.register_forward_hook(note) for m in wanted] + [t.register_forward_pre_hook(ask) for t in targets]
    args, kwargs = given
    try:
        with evaluating(model):
            model(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError):  # the model wants other inputs than its dummy
        return {}
    finally:
        for handle in handles:
            handle.remove()
    return found


def _matrix(module: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Weight (output, input) and bias of a linear map; Hugging Face's Conv1D stores the transpose."""
    if isinstance(module, nn.Linear):
        return module.weight, module.bias
    if type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers."):
        return module.get_parameter("weight").t(), module.get_parameter("bias")
    return None


@torch.no_grad()
def _reach(norm: nn.Module | None, linear: nn.Module | None) -> tuple[float, float] | None:
    """The range of a linear map of a norm's output, rounded outward by far more than its evaluation errs."""
    known = None if norm is None else norm_of(norm)
    table = None if linear is None else _matrix(linear)
    if norm is None or known is None or table is None:
        return None
    matrix, bias = table[0].double().cpu(), table[1]
    weight, shift = _affine(norm, known)
    middle = matrix @ shift + (0.0 if bias is None else bias.double().cpu())
    spread = math.sqrt(math.prod(known.shape)) * (matrix * weight).norm(dim=-1)
    slack = 1.001 * spread + 0.001 * ((matrix * shift).abs().sum(-1) + middle.abs()) + 1e-6
    return float((middle - slack).min()), float((middle + slack).max())


def _affine(norm: nn.Module, known: Norm) -> tuple[Tensor, Tensor]:
    size = math.prod(known.shape)
    weight, bias = norm._parameters.get("weight"), norm._parameters.get("bias")
    gain = torch.ones(size, dtype=torch.float64) if weight is None else weight.double().cpu().flatten()
    shift = torch.zeros(size, dtype=torch.float64) if bias is None else bias.double().cpu().flatten()
    return gain + float(known.unit), shift
