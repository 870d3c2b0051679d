"""Dtypes by name, the two that networks ship in, and arrays as a dtype stores them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from .errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")
Array = npt.NDArray[np.float64]

#: Every dtype that a certificate can speak of, by the name it has in files.
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: What heads and compiled networks ship in: the dtypes whose rounding the lemmas are worked out for.
SHIPPED = (torch.float32, torch.float64)


def transformed(*tensors: torch.Tensor) -> bool:
    """Whether torch.func is at work on one of some tensors: operators of our own have no rules for it, where plain
    PyTorch has.

    >>> torch.func.vmap(lambda x: x + transformed(x))(torch.zeros(2)), transformed(torch.zeros(2))
    (tensor([1., 1.]), False)
    """
    return any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors)


def underlying(x: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor that torch.func is at work on, with what vmap runs over as leading dimensions.

    >>> shapes = []
    >>> _ = torch.func.vmap(lambda x: shapes.append(underlying(x).shape) or x, in_dims=1)(torch.zeros(2, 3))
    >>> shapes
    [torch.Size([3, 2])]
    """
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    batches: list[int] = []
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x):
            batches.append(torch._C._functorch.maybe_get_bdim(x))
        x = torch._C._functorch.get_unwrapped(x)
    with temporarily_clear_interpreter_stack():  # type: ignore[no-untyped-call]
        x = x.detach()
        for moved, at in enumerate(reversed(batches)):
            x = x.movedim(at + moved, 0)
    return x


def transforming() -> bool:
    """Whether torch.func is at work around this call: what a tracer asks, whose tensors do not tell."""
    return torch._C._functorch.maybe_current_level() is not None


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in files and messages.

    >>> dtype_name(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


def shipped(dtype: torch.dtype | str) -> torch.dtype:
    """The dtype, also by its name or as numpy has it, if networks ship in it.

    >>> shipped("float64"), shipped(np.float32)
    (torch.float64, torch.float32)
    """
    if isinstance(dtype, np.dtype) or (isinstance(dtype, type) and issubclass(dtype, np.generic)):
        dtype = np.dtype(dtype).name
    found = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if found not in SHIPPED:
        raise ArgumentError(f"dtype must be torch.float32 or torch.float64, or its name, got {dtype!r}")
    return found


def by_name(build: Callable[P, R]) -> Callable[P, R]:
    """A function whose keyword `dtype` may also be a name, `dtype="float64"`, or a type of numpy."""

    @functools.wraps(build)
    def called(*arguments: P.args, **options: P.kwargs) -> R:
        if isinstance(options.get("dtype"), (str, type, np.dtype)):
            options["dtype"] = shipped(options["dtype"])  # type: ignore[arg-type]
        return build(*arguments, **options)

    return called


def rounded(value: Array, dtype: torch.dtype) -> Array:
    """Numbers as a dtype stores them, in float64."""
    return torch.from_numpy(np.array(value, dtype=np.float64)).to(dtype).double().numpy()


def stored(tensor: torch.Tensor) -> Array:
    """The numbers that a tensor holds, exactly, in float64 and on the processor."""
    return tensor.detach().cpu().double().numpy()
