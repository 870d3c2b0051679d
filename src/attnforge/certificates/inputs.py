"""What people hand to a network: numbers, lists, arrays, data frames and keyword arguments, as the tensors it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ArgumentError, closest


def tensors(
    inputs: Sequence[Any], named: Mapping[str, Any], names: Sequence[str] | None, stacked: bool, like: Tensor
) -> tuple[Tensor, ...]:
    """The input tensors of a network, in the dtype and on the device of `like`, a tensor of its own.

    Tensors stay as they are; numbers, lists and arrays are rounded to the dtype. Columns of a data frame, entries of a
    dict and keyword arguments go by `names`: as the last dimension of one tensor where `stacked`, else one tensor each.
    """
    if not named and len(inputs) == 1 and _is_frame(inputs[0]):
        frame = inputs[0]
        columns = list(frame) if isinstance(frame, Mapping) else [str(c) for c in frame.columns]
        named, inputs = {name: frame[name] for name in (names or columns) if name in columns}, ()
        if names is not None and len(named) < len(names):
            missing = [name for name in names if name not in named]
            raise ArgumentError(
                f"there is no column '{missing[0]}'{closest(missing[0], columns)}; the network takes {', '.join(names)}"
            )
    if not named:
        return tuple(_tensor(f"input {i}", x, like) for i, x in enumerate(inputs))
    if names is None:
        raise ArgumentError("the inputs of this network have no names: give one tensor, array or list for each")
    strange = [name for name in named if name not in names]
    missing = [name for name in names if name not in named]
    if strange or missing or inputs:
        what = "give the inputs by name or by place, not both"
        if strange or missing:
            hint = f"{closest(strange[0], names)}" if strange else ""
            what = f"'{strange[0]}' is not an input{hint}" if strange else f"the input '{missing[0]}' is missing"
        raise ArgumentError(f"{what}; the network takes {', '.join(names)}")
    found = [_tensor(name, named[name], like) for name in names]
    if not stacked:
        return tuple(found)
    try:
        return (torch.stack(torch.broadcast_tensors(*found), -1),)
    except RuntimeError as error:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip(names, found, strict=True))
        raise ArgumentError(f"the inputs must have one shape, or shapes that broadcast, got {shapes}") from error


def _is_frame(x: object) -> bool:
    """Whether an argument holds columns by name."""
    return isinstance(x, Mapping) or (hasattr(x, "columns") and hasattr(x, "to_numpy"))


def _tensor(name: str, x: Any, like: Tensor) -> Tensor:
    if isinstance(x, Tensor):
        return x
    try:
        array = np.asarray(x)
        if array.dtype.kind not in "fiu":
            raise TypeError(f"it holds {array.dtype}")
        return torch.from_numpy(np.array(array, dtype=np.float64)).to(like.device, like.dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"'{name}' must be a tensor, an array, a list or a number, got {type(x).__name__}: {error}"
        ) from error
