"""Heads on GPUs: one Triton kernel where PyTorch would run a dozen, behind the operators of `heads.fast` and `norm`.

A kernel computes what the certified head computes, in the same order and with the same number of roundings; what it may
do differently (exponentials within 3 u, quotients within 4 u) is what the bounds allow for. Inputs are float32,
bfloat16 or float16 and are worked on in float32; each element, or row, is read once and written once. Values outside
the range of a certificate are counted on the way. `ready` says whether a tensor can be handed to them. Triton is
imported by the modules beside this one, which are imported when a kernel is wanted; with TRITON_INTERPRET=1 they run on
a CPU, slowly.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

from ...dtypes import transformed

INPUTS = (torch.float32, torch.bfloat16, torch.float16)  # what kernels read and write; they compute in float32


def ready(x: Tensor) -> bool:
    """Whether kernels run on the device of this tensor, for its dtype.

    >>> ready(torch.zeros(3, dtype=torch.float64))
    False
    """
    there = compiles(x.device) if x.is_cuda else interprets()
    return there and x.dtype in INPUTS and x.numel() > 0 and not transformed(x)


@functools.lru_cache(maxsize=16)
def compiles(device: torch.device) -> bool:
    """Whether kernels can be compiled for a CUDA device."""
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (7, 0)


@functools.lru_cache(maxsize=1)
def interprets() -> bool:
    """Whether kernels are interpreted on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
