"""Norm heads, c S(c.c), through the kernel for processors: one pass over the rows.

Sums of a row are `LANES` sums side by side and a tree over them; `roundings` says how many additions a term goes
through, and the kernel is used where a certificate counts at least as many.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import INPUTS, Library, library, plain, threads

LANES = 64  # partial sums of a row, as in kernels.c
Table = tuple[Tensor, Tensor, Tensor]  # scale, shift and mix of the heads


def roundings(channels: int) -> int:
    """Additions that a term of a row's sum goes through at most: adding to 0 or adding 0 rounds nothing.

    >>> [roundings(n) for n in (1, 2, 64, 65, 384, 4096)]
    [0, 1, 6, 7, 11, 69]
    """
    return -(-channels // LANES) - 1 + (min(channels, LANES) - 1).bit_length()


@dataclass(frozen=True)
class Norming:
    """A norm ready to be used; rows outside the limits are added to `outside`."""

    table: Table
    weight: Tensor | None
    bias: Tensor | None
    layer: bool
    unit: bool
    channels: int
    outside: Tensor | None
    limits: tuple[float, float, float]

    def __call__(self, x: Tensor) -> Tensor:
        """The normed rows, in the dtype of x."""
        found = library()
        assert found is not None, "`ready` was not asked"
        return self._run(found, x if x.is_contiguous() else x.contiguous())

    def again(self) -> Callable[[Tensor], Tensor | None]:
        """The same for one tensor after another; None where the long way is to be gone."""
        found = library()

        def call(x: Tensor) -> Tensor | None:
            if found is None or x.device.type != "cpu" or x.dtype not in INPUTS or not plain(x):
                return None
            if not x.numel() or not x.is_contiguous() or (x.requires_grad and torch.is_grad_enabled()):
                return None
            return self._run(found, x)

        return call

    def _run(self, found: Library, x: Tensor) -> Tensor:
        out, n, channels = torch.empty_like(x), x.numel(), self.channels
        count = threads(n)
        padded = -(-channels // LANES) * LANES
        weight, bias = _beside(self.weight, padded), _beside(self.bias, padded)
        scale, shift, mix = self.table
        room = torch.empty(count * padded, dtype=torch.float32)
        low, high, far = self.limits
        found.norm(
            x.data_ptr(), out.data_ptr(), n // channels, channels, x.dtype == torch.bfloat16, _place(weight),
            _place(bias), self.unit, self.layer, scale.data_ptr(), shift.data_ptr(), mix.data_ptr(), len(scale), low,
            high, far if self.layer else math.inf, _place(self.outside), room.data_ptr(), count,
        )  # fmt: skip
        return out


def _place(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _beside(table: Tensor | None, padded: int) -> Tensor | None:
    """A weight or a bias in float32, as it is stored now, with numbers behind its end that may be read."""
    if table is None:
        return None
    given = table.detach().float().contiguous()
    return given if len(given) == padded else torch.nn.functional.pad(given, (0, padded - len(given)))
