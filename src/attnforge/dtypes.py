"""Dtypes by name, the two that networks ship in, and arrays as a dtype stores them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from .errors import ArgumentError

Array = npt.NDArray[np.float64]

#: Every dtype that a certificate can speak of, by the name it has in files.
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: What heads and compiled networks ship in: the dtypes whose rounding the lemmas are worked out for.
SHIPPED = (torch.float32, torch.float64)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in files and messages.

    >>> dtype_name(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


def shipped(dtype: torch.dtype) -> torch.dtype:
    """The dtype itself, if networks ship in it."""
    if dtype not in SHIPPED:
        raise ArgumentError(f"dtype must be torch.float32 or torch.float64, got {dtype!r}")
    return dtype


def rounded(value: Array, dtype: torch.dtype) -> Array:
    """Numbers as a dtype stores them, in float64."""
    return torch.from_numpy(np.array(value, dtype=np.float64)).to(dtype).double().numpy()


def stored(tensor: torch.Tensor) -> Array:
    """The numbers that a tensor holds, exactly, in float64 and on the processor."""
    return tensor.detach().cpu().double().numpy()
