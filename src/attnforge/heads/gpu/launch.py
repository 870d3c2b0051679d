"""Launching kernels: what Triton works out anew at every call is kept here, since small models wait for launches.

A kernel is compiled for the dtypes of its tensors, whether their addresses and its whole numbers are multiples of 16,
whether a number is 1 or needs 64 bits, and its constants. `launch` keeps the compiled kernel under just that. What is
the same from call to call, the numbers of a table, a count, limits and constants, is one `Fixed`, looked at once. The
interpreter has no compiled kernels.
"""

from __future__ import annotations

from collections.abc import Callable
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


def launch(fixed: Fixed, programs: int, *varying: Any) -> None:
    """Run the kernel in a grid of so many programs: tensors, outputs among them, and lengths, then what is fixed."""
    if interprets():
        fixed.kernel[(programs,)](*varying, *fixed.last, num_warps=fixed.warps)
        return
    device = varying[0].device.index
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(fixed, programs, *varying)
        return
    key = (device, *[_kind(argument) for argument in varying])
    made = fixed.compiled.get(key)
    if made is None:
        fixed.compiled[key] = fixed.kernel[(programs,)](*varying, *fixed.last, num_warps=fixed.warps)
    else:
        made[(programs, 1, 1)](*varying, *fixed.last, stream=torch.cuda.current_stream(device).cuda_stream)


def _kind(argument: Any) -> Any:
    """What of an argument decides which compiled kernel is used."""
    if type(argument) is int:
        return argument & ALIGNED == 0, argument == 1, argument >= WIDE
    return argument.data_ptr() & ALIGNED == 0, argument.dtype


def relaunching(fixed: Fixed, block: int) -> Callable[[Tensor], Tensor | None]:
    """A function that runs the kernel on one tensor after another and returns what it wrote, or None.

    None means that the caller has to go the long way: the tensor has gaps, is empty, not on the current device, of
    another dtype, wants gradients, or is of a kind that was not seen yet. `block` elements make a program; negative, a
    row of so many does. Small models wait for launches, so everything is in one place here, and little of it.
    """
    compiled, last = fixed.compiled, fixed.last
    current: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # None without CUDA, where nothing is compiled
    whole = block > 0  # elementwise kernels take a length; rows, a program each, do not

    def call(x: Tensor) -> Tensor | None:
        if not x.is_contiguous() or (x.requires_grad and torch.is_grad_enabled()):
            return None
        n, place, dtype = x.numel(), x.data_ptr() & ALIGNED == 0, x.dtype
        device = x.get_device()
        if device != torch.cuda.current_device():
            return None
        first = place, dtype
        if whole:
            made = compiled.get((device, first, (True, dtype), (n & ALIGNED == 0, n == 1, n >= WIDE)))
        else:
            made = compiled.get((device, first, (True, dtype)))
        if made is None or not n:
            return None
        out = torch.empty_like(x)
        if whole:
            made[(-(-n // block), 1, 1)](x, out, n, *last, stream=current(device))
        else:
            made[(n // -block, 1, 1)](x, out, *last, stream=current(device))
        return out

    return call
