"""Converted activations and products: a head, its range, and the dtype of the model around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..certify.certified import CertifiedModule
from ..certify.rounding import UNIT, up
from ..heads import ProductHead
from .site import SiteModule, full_precision, tracing, working


class ActivationSite(SiteModule):
    """An activation function as attention: one head (a few slots, shared by all channels) in the activation's place."""

    def __init__(
        self, head: CertifiedModule, function: str, low: float, high: float, path: str, strict: bool = False
    ):
        super().__init__(path, low, high, strict, "the input", everywhere=right_everywhere(head))
        self.function, self.head = function, head

    def forward(self, input: Tensor) -> Tensor:
        if not tracing():
            self.watch(input)
        y = input.to(self.head.dtype) if input.dtype != self.head.dtype else input
        with full_precision(y):
            out = self.head.core(y)
        return out.to(input.dtype) if out.dtype != input.dtype else out

    def extra_repr(self) -> str:
        return f"{self.function}, certified on [{self.low:.4g}, {self.high:.4g}]"


class ProductSite(SiteModule):
    """x times y by product heads (lemma C1), elementwise."""

    def __init__(self, head: ProductHead, path: str, strict: bool = False):
        super().__init__(path, *head.box["y"], strict, "the second factor")
        self.head = head

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not tracing():
            self.watch(x, *self.head.box["x"], "the first factor")
            self.watch(y)
        given, table = x.dtype, self.head.dtype
        if given != table:
            x, y = x.to(table), y.to(table)
        with full_precision(x):
            out = self.head.core(x, y)
        return out.to(given) if given != table else out


def right_everywhere(head: CertifiedModule) -> bool:
    """Whether a head goes on as its function does beyond its interval: a gate, and a bump that has decayed."""
    return head.family == "fast"


def handed_on(bound: float, size: float, dtype: torch.dtype) -> float:
    """A bound in the working precision, plus the rounding to the model's dtype of outputs up to `size`."""
    if dtype == working(dtype):
        return bound
    return float(up(bound + UNIT[dtype] * (size + bound), 8))


def describe(head: CertifiedModule) -> dict[str, Any]:
    """What `attnforge.certify.storage` would need to rebuild a head: its family and its configuration."""
    return {"family": head.family, "config": head.config()}
