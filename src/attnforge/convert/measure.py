"""Measured end to end: how far the outputs of two models are apart on the same data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .batches import Batch
from .watch import evaluating


def outputs(value: Any) -> Iterator[Tensor]:
    """The floating tensors of a model's output, however nested; caches and other objects are passed over."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from outputs(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from outputs(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from outputs(getattr(value, field.name))


def largest_change(first: nn.Module, second: nn.Module, batches: Sequence[Batch]) -> tuple[float, float]:
    """The largest |difference| and the largest |output| over all outputs of all batches; equal infinities agree."""
    change = size = 0.0
    with evaluating(first, second):
        for batch in batches:
            pairs = zip(outputs(batch.run(first)), outputs(batch.run(second)), strict=True)
            for one, other in pairs:
                a, b = one.double(), other.double()
                same = (a == b) | (a.isnan() & b.isnan())
                apart = torch.where(same, torch.zeros_like(a), (a - b).abs())
                finite = a[a.isfinite()]
                change = max(change, float(apart.max()) if apart.numel() else 0.0)
                size = max(size, float(finite.abs().max()) if finite.numel() else 0.0)
    return change, size
