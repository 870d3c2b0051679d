"""Whether numbers lie between limits, in one pass: for guards of networks that take less time than PyTorch's minima."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..dtypes import SHIPPED
from . import library, plain

TIMES = 32  # that limits are repeated, so that a processor compares many numbers at once


def repeated(limit: Tensor) -> Tensor:
    """The limits of one point as `within` takes them."""
    return limit.repeat(TIMES)


def within(x: Tensor, low: Tensor, high: Tensor) -> bool:
    """Whether it is known that all numbers lie in their limits, which `repeated` made, ends included; False for NaN,
    and where nobody looked.

    >>> low, high = repeated(torch.zeros(2)), repeated(torch.ones(2))
    >>> within(torch.tensor([0.0, 2.0]), low, high)
    False
    """
    if x.device.type != "cpu" or x.dtype not in SHIPPED or x.dtype != low.dtype or not plain(x):
        return False
    found = library() if x.is_contiguous() else None
    if found is None:
        return False
    outside, call = ctypes.c_int64(0), found.beyond_f if x.dtype == torch.float32 else found.beyond_d
    call(x.data_ptr(), x.numel(), low.data_ptr(), high.data_ptr(), low.numel(), ctypes.byref(outside))
    return outside.value == 0
