"""Launching kernels: what Triton works out anew at every call is kept here, since small models wait for launches.

A kernel is compiled for the dtypes of its tensors, whether their addresses and its whole numbers are multiples of 16,
whether a number is 1 or needs 64 bits, and its constants. `launch` keeps the compiled kernel under just that. What is
the same from call to call, the numbers of a table, a count, limits and constants, is one `Fixed`, looked at once; two
that are alike in those respects, as in the steps of a training, share what was compiled. The interpreter has no
compiled kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import interprets

ALIGNED = 15  # the low bits that are 0 in a multiple of 16
WIDE = 1 << 31  # from which a whole number takes 64 bits
_COMPILED: dict[Any, dict[Any, Any]] = {}  # by kernel, constants and kinds of the last arguments; then by the first


@dataclass(eq=False)
class Fixed:
    """The last arguments of a kernel, its constants and its warps; and what was compiled for such, by the first."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: tuple[Any, ...]
    warps: int = 4

    def __post_init__(self) -> None:
        self.last = (*self.arguments, *self.constants)
        kinds = tuple([_kind(argument) for argument in self.arguments])
        self.compiled = _COMPILED.setdefault((id(self.kernel), self.constants, self.warps, kinds), {})


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
    if type(argument) is float:
        return None
    return argument.data_ptr() & ALIGNED == 0, argument.dtype


def relaunching(fixed: Fixed, block: int) -> Callable[[Tensor], Tensor | None]:
    """A function that runs the kernel on one tensor after another and returns what it wrote, or None.

    None means that the caller has to go the long way: the tensor has gaps, is empty, not on the current device, of
    another dtype, wants gradients, is of a kind that was not seen yet, or a fixed tensor has moved. `block` elements
    make a program; negative, a row of so many does. Small models wait for launches, so everything is in one place here,
    and little of it; tensors are handed over as addresses, which a launch need not ask for.
    """
    compiled = fixed.compiled
    tensors = [argument for argument in fixed.arguments if isinstance(argument, Tensor)]
    places = [tensor.data_ptr() for tensor in tensors]
    last = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in fixed.last]
    current: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # None without CUDA, where nothing is compiled
    device_now: Any = getattr(torch._C, "_cuda_getDevice", None)
    whole = block > 0  # elementwise kernels take a length; rows, a program each, do not

    def call(x: Tensor) -> Tensor | None:
        if not x.is_contiguous() or (x.requires_grad and torch.is_grad_enabled()):
            return None
        device, place, dtype, n = x.get_device(), x.data_ptr(), x.dtype, x.numel()
        first = place & ALIGNED == 0, dtype
        if whole:
            made = compiled.get((device, first, (True, dtype), (n & ALIGNED == 0, n == 1, n >= WIDE)))
        else:
            made = compiled.get((device, first, (True, dtype)))
        if made is None or not n or device != device_now():
            return None
        if [tensor.data_ptr() for tensor in tensors] != places:
            return None
        out = torch.empty_like(x)
        if whole:
            made[(-(-n // block), 1, 1)](place, out.data_ptr(), n, *last, stream=current(device))
        else:
            made[(n // -block, 1, 1)](place, out.data_ptr(), *last, stream=current(device))
        return out

    return call
