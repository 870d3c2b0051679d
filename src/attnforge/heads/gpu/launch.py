"""Launching kernels: what Triton works out anew at every call is kept here, since small models wait for launches.

A kernel is compiled for the dtypes of its tensors, whether their addresses and its whole numbers are multiples of 16,
whether a number is 1 or needs 64 bits, and its constants. `launch` keeps the compiled kernel under just that. What is
the same from call to call, the numbers of a table, a count, limits and constants, is one `Fixed`, looked at once. The
interpreter has no compiled kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import interprets

ALIGNED = 15  # the low bits that are 0 in a multiple of 16
WIDE = 1 << 31  # from which a whole number takes 64 bits


@dataclass(eq=False)
class Fixed:
    """The last arguments of a kernel, its constants and its warps; and what was compiled for them, by the first."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: tuple[Any, ...]
    warps: int = 4
    compiled: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.last = (*self.arguments, *self.constants)


def launch(fixed: Fixed, programs: int, first: Tensor, *varying: Any) -> None:
    """Run the kernel in a grid of so many programs: `first`, the other tensors of its kind, a length, then the rest.

    All of `varying` but whole numbers are tensors, outputs among them.
    """
    if interprets():
        fixed.kernel[(programs,)](first, *varying, *fixed.last, num_warps=fixed.warps)
        return
    device = first.device.index
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(fixed, programs, first, *varying)
        return
    key = (device, first.dtype, *[_kind(argument) for argument in (first, *varying)])
    made = fixed.compiled.get(key)
    if made is None:
        fixed.compiled[key] = fixed.kernel[(programs,)](first, *varying, *fixed.last, num_warps=fixed.warps)
    else:
        made[(programs, 1, 1)](first, *varying, *fixed.last, stream=torch._C._cuda_getCurrentRawStream(device))


def _kind(argument: Tensor | int) -> Any:
    """What of an argument decides which compiled kernel is used."""
    if type(argument) is int:
        return argument & ALIGNED == 0, argument == 1, argument >= WIDE
    return argument.data_ptr() & ALIGNED == 0, argument.dtype  # type: ignore[union-attr]
