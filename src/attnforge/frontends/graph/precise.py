"""A target's values in float64, whatever the dtype of its parameters and constants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


class _Calls(TorchFunctionMode):
    """Every function of torch is called with float64 in place of any other floating dtype: some compare dtypes."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*_wide(args), **_wide(kwargs or {}))


class _Operators(TorchDispatchMode):
    """Every operator sees and gives float64, also those that torch's functions are made of."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _wide(func(*_wide(args), **_wide(kwargs or {})))


def _wide(tree: Any) -> Any:
    def widen(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64:
            return leaf.double()
        return torch.float64 if isinstance(leaf, torch.dtype) and leaf.is_floating_point else leaf

    return tree_map(widen, tree)


def double(net: nn.Module, points: tuple[Tensor, ...]) -> Tensor:
    """What a module gives at points, computed in float64."""
    device = next((p.device for p in net.parameters()), torch.device("cpu"))
    with _Operators(), _Calls():
        out = net(*(p.to(device) for p in points))
    return out.detach().cpu().double()
