"""Anchors on an even lattice with a gate (lemma A8) through the kernel for processors: one pass over the elements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import INPUTS, Library, library, plain, threads

HEAD = 3  # numbers before the polynomials': rate, centre and gate


@dataclass(frozen=True)
class ReadyTable:
    """A table ready to be read; with `outside`, values outside [low, high] are added to that count."""

    numbers: Tensor  # [rate, centre, gate, Q, P, R] in float32
    terms: int
    odd: bool  # R is not 0
    whole: bool
    shared: bool
    gated: bool
    outside: Tensor | None
    low: float
    high: float

    def __call__(self, y: Tensor) -> Tensor:
        """The head at y, in the dtype of y."""
        found = library()
        assert found is not None, "`ready` was not asked"
        return self._run(found, y if y.is_contiguous() else y.contiguous())

    def again(self) -> Callable[[Tensor], Tensor | None]:
        """The same for one tensor after another; None where the long way is to be gone."""
        found = library()

        def call(y: Tensor) -> Tensor | None:
            if found is None or y.device.type != "cpu" or y.dtype not in INPUTS or not plain(y):
                return None
            if not y.numel() or not y.is_contiguous() or (y.requires_grad and torch.is_grad_enabled()):
                return None
            return self._run(found, y)

        return call

    def _run(self, found: Library, y: Tensor) -> Tensor:
        out, n = torch.empty_like(y), y.numel()
        found.activation(
            y.data_ptr(), out.data_ptr(), n, y.dtype == torch.bfloat16, self.numbers.data_ptr(), self.terms, self.odd,
            self.whole, self.shared, self.gated, self.low, self.high,
            None if self.outside is None else self.outside.data_ptr(), threads(n),
        )  # fmt: skip
        return out


def prepared(value: Tensor, matrix: Tensor | None, constant: Tensor) -> Tensor:
    """[rate, centre, gate, Q, P, R]: `constant` holds the first four, `matrix` takes the values to P and R."""
    if matrix is None:
        return constant
    return torch.cat([constant, (value.double() @ matrix).float()])


def reading(
    numbers: Tensor, anchors: int, rate: float, centre: float, gate: float, even: bool = False,
    outside: Tensor | None = None, low: float = 0.0, high: float = 0.0,
) -> ReadyTable:  # fmt: skip
    """A table of so many anchors, ready to be read; `even` promises R = 0."""
    shared = anchors > 0 and gate == rate and not centre
    return ReadyTable(
        numbers, (anchors + 1) // 2, anchors > 1 and not even, anchors % 2 == 1, shared, gate != 0.0, outside, low, high
    )
