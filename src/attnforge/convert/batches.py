"""Calibration data: batches as the model takes them, checked, and a part of them held out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError

HELD = 5  # one batch in so many is held out


@dataclass(frozen=True)
class Batch:
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in [*((f"argument {i}", v) for i, v in enumerate(self.args)), *self.kwargs.items()]:
            if isinstance(value, Tensor):
                yield name, value

    @property
    def rows(self) -> int:
        """The size of the first dimension, 0 where tensors disagree or there are none."""
        sizes = {t.shape[0] if t.dim() else 0 for _, t in self.tensors()}
        return sizes.pop() if len(sizes) == 1 else 0

    def part(self, rows: slice) -> Batch:
        """The same call for some of the rows."""

        def cut(value: Any) -> Any:
            return value[rows] if isinstance(value, Tensor) else value

        return Batch(tuple(map(cut, self.args)), {name: cut(value) for name, value in self.kwargs.items()})

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """The same call on the model's device, floating tensors in the model's dtype."""

        def move(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(device, dtype if value.is_floating_point() else None)

        return Batch(tuple(map(move, self.args)), {name: move(value) for name, value in self.kwargs.items()})

    def run(self, model: nn.Module) -> Any:
        return model(*self.args, **self.kwargs)

    @property
    def example(self) -> tuple[Any, ...] | dict[str, Any]:
        """The call as `attnforge.purity` takes it."""
        return self.args if self.args else dict(self.kwargs)


@dataclass(frozen=True)
class Data:
    """Batches that set the ranges, batches that were held out, and what is to be said about the split."""

    seen: tuple[Batch, ...]
    held: tuple[Batch, ...]
    note: str = ""


def read(calibration: object) -> Data | None:
    """The batches of `calibration`, split; None for None.

    >>> data = read(torch.zeros(4, 2))
    >>> data.seen[0].args[0].shape, data.held[0].args[0].shape
    (torch.Size([3, 2]), torch.Size([1, 2]))
    """
    if calibration is None:
        return None
    single = isinstance(calibration, (Tensor, Mapping))
    if not single and (isinstance(calibration, (str, bytes)) or not isinstance(calibration, Iterable)):
        raise ArgumentError(
            f"calibration must be an iterable of batches (dict, tuple or tensor), or one batch, "
            f"got {type(calibration).__name__}"
        )
    given = [calibration] if single else list(calibration)  # type: ignore[call-overload]
    batches = tuple(_batch(number, each) for number, each in enumerate(given))
    if not batches:
        raise ArgumentError("calibration holds no batch; give at least one, or None for ranges without data")
    if len(batches) > 1:
        held = max(1, len(batches) // HELD)
        return Data(batches[:-held], batches[-held:])
    (only,) = batches
    if only.rows < 2:
        why = "one batch that cannot be split: the change was measured on the calibration data itself, nothing held out"
        return Data(batches, batches, why)
    cut = only.rows - max(1, only.rows // HELD)
    return Data((only.part(slice(0, cut)),), (only.part(slice(cut, None)),))


def _batch(number: int, given: object) -> Batch:
    if isinstance(given, Tensor):
        batch = Batch((given,), {})
    elif isinstance(given, Mapping):
        batch = Batch((), {str(name): value for name, value in given.items()})
    elif isinstance(given, (tuple, list)):
        batch = Batch(tuple(given), {})
    else:
        raise ArgumentError(
            f"calibration batch {number} must be a dict of keyword arguments, a tuple or a tensor, "
            f"got {type(given).__name__}"
        )
    for name, tensor in batch.tensors():
        if not tensor.numel():
            raise ArgumentError(f"calibration batch {number}: '{name}' is empty, its shape is {tuple(tensor.shape)}")
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise ArgumentError(f"calibration batch {number}: '{name}' holds NaN")
    return batch
