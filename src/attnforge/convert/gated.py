"""Gated units, down(act(gate(x)) * up(x)): SwiGLU, GEGLU and their kin, with the product as attention.

The product stands in the unit's own `forward`, where no submodule can be exchanged. So the whole unit is replaced by
one that computes the same with the same children under the same names, and with a product that is a module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """The children of a gated unit by role; without `up` the projection `gate` yields both halves.

    `first` says whether the activated half comes first.
    """

    gate: str
    up: str | None
    down: str
    act: str
    dropout: str | None = None
    first: bool = True

    def fits(self, module: nn.Module) -> bool:
        children = dict(module.named_children())
        wanted = {name for name in (self.gate, self.up, self.down, self.dropout) if name is not None}
        # An activation may be a plain function, which is no child.
        return wanted <= children.keys() and callable(getattr(module, self.act, None))


LAYOUTS = (
    Layout("gate_proj", "up_proj", "down_proj", "act_fn"),  # Llama, Mistral, Qwen, Gemma
    Layout("gate_up_proj", None, "down_proj", "activation_fn"),  # Phi-3
    Layout("wi_0", "wi_1", "wo", "act", "dropout"),  # T5 1.1
    Layout("w1", "w3", "w2", "act_fn"),  # experts of Mixtral
    Layout("Wi", None, "Wo", "act", "drop"),  # ModernBERT
)


class GatedUnit(nn.Module):
    """A gated unit whose product is the module `product`; all other children are those of the original."""

    def __init__(self, layout: Layout, children: Mapping[str, nn.Module], act: Any, product: nn.Module):
        super().__init__()
        self.layout = layout
        for name, child in children.items():
            self.add_module(name, child)
        setattr(self, layout.act, act)
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        layout = self.layout
        inner = self.get_submodule(layout.gate)(x)
        if layout.up is not None:
            gate, up = inner, self.get_submodule(layout.up)(x)
        else:
            halves = inner.chunk(2, dim=-1)
            gate, up = halves if layout.first else halves[::-1]
        hidden = self.product(getattr(self, layout.act)(gate), up)
        if layout.dropout is not None:
            hidden = self.get_submodule(layout.dropout)(hidden)
        return cast(Tensor, self.get_submodule(layout.down)(hidden))

    @staticmethod
    def config_of(layout: Layout) -> dict[str, Any]:
        """The layout as JSON holds it."""
        return asdict(layout)


class Multiply(nn.Module):
    """The plain product, for looking at what a unit multiplies before heads take over."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y


def rebuilt(module: nn.Module, layout: Layout, product: nn.Module) -> GatedUnit:
    """The unit with `product` in it, over the children of `module`."""
    children = dict(module.named_children())
    unit = GatedUnit(layout, children, getattr(module, layout.act), product)
    return unit.train(module.training)


@torch.no_grad()
def gated_layout(module: nn.Module) -> Layout | None:
    """How a module is a gated unit, or None: by its children's names, then by its values on random rows."""
    for layout in LAYOUTS:
        if not layout.fits(module):
            continue
        weight = module.get_submodule(layout.gate).get_parameter("weight")
        x = torch.randn(5, weight.shape[-1], generator=torch.Generator().manual_seed(0))
        x = x.to(weight.device, weight.dtype)
        training = module.training
        module.eval()
        try:
            for flipped in (layout, Layout(**{**asdict(layout), "first": False})):
                wanted, found = module(x), rebuilt(module, flipped, Multiply())(x)
                if torch.allclose(wanted, found, rtol=1e-5, atol=1e-6 * float(wanted.abs().max())):
                    return flipped
        except (RuntimeError, TypeError, ValueError, IndexError):  # takes other arguments: not such a unit
            continue
        finally:
            module.train(training)
    return None
