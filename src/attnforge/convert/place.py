"""Putting modules where others were, and making sure that they are asked."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .find import Found
from .gated import Multiply, rebuilt


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
            assert site.layout is not None
            module = rebuilt(site.target, site.layout, Multiply())
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
