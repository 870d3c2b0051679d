"""Both heads of a product evaluated together (lemma C1): x (e^z - e^-z) / (g D(z)), for compilers and for GPUs.

    out = together(head, x, y)            # plain PyTorch, for compilers to fuse and differentiate
    out = watched_product(x, y, outside, nodes, gain, centre, first, second)     # `attnforge::product_watched`

The second is an operator that counts, in `outside`, the pairs that leave the ranges of the two factors; on a GPU it is
one kernel. Both have the numbers of the lemma in them rather than a head's stored tensors, whose equality with those
numbers is part of a certificate; `bound.fused_error` bounds what they compute.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...dtypes import Array, transformed
from ...network import known
from ..gpu import ready
from .construction import gauss_lobatto

if TYPE_CHECKING:
    from .head import ProductHead

Interval = tuple[float, float]


@known
def numbers_of(nodes: int) -> tuple[float, ...]:
    """w_1, the weight of the node 0 (0 where there is none), then tau and w of each inner pair, outermost first.

    >>> [round(x, 4) for x in numbers_of(5)]
    [0.1, 0.7111, 0.6547, 0.5444]
    """
    return _numbers(nodes)


@functools.lru_cache(maxsize=32)
def _numbers(nodes: int) -> tuple[float, ...]:
    tau, logs = (np.array(column) for column in gauss_lobatto(nodes))
    weight: Array = np.exp(logs) * 2 / (nodes * (nodes - 1))
    pairs = [number for i in range(1, nodes // 2) for number in (-tau[i], weight[i])]
    return float(weight[0]), float(weight[nodes // 2]) if nodes % 2 else 0.0, *map(float, pairs)


@functools.lru_cache(maxsize=32)
def _on(nodes: int, device: torch.device) -> Tensor:
    return torch.tensor(numbers_of(nodes), dtype=torch.float64).to(device, torch.float32)


def _ratio(z: Tensor, nodes: int) -> Tensor:
    """(e^z - e^-z) / D(z)."""
    end, middle, *inner = numbers_of(nodes)
    up, down = _both(z)
    total = (up + down) * end
    for tau, weight in zip(inner[::2], inner[1::2], strict=True):
        one, other = _both(z * tau)
        total = total + (one + other) * weight
    return (up - down) / (total + middle if middle else total)


def _both(z: Tensor) -> tuple[Tensor, Tensor]:
    up = torch.exp(z)
    down = 1.0 / up
    return up, down + down * (1.0 - up * down)


def _product(x: Tensor, y: Tensor, nodes: int, gain: float, a: float, b: float) -> Tensor:
    out = ((x - a) if a else x) * _ratio(((y - b) if b else y) * gain, nodes) * (1.0 / gain)
    return out + (x * b + (y * a - a * b)) if a or b else out


def together(head: ProductHead, x: Tensor, y: Tensor) -> Tensor:
    """The product of a head's two operands, in their dtype."""
    one, other = (y, x) if head.swapped else (x, y)
    return _product(one, other, head.nodes, head.spec.gain, *head.spec.centre)


def _outside(values: Tensor, low: float, high: float) -> Tensor:
    return (values < low) | (values > high) | values.isnan()


def _watched(
    x: Tensor, y: Tensor, outside: Tensor, nodes: int, gain: float, a: float, b: float, x_low: float, x_high: float,
    y_low: float, y_high: float,
) -> Tensor:  # fmt: skip
    if ready(x) and x.device == y.device:
        from ..gpu import product

        sides = (x_low, x_high), (y_low, y_high)
        return product.forward(x, y, product.multiplying(_on(nodes, x.device), gain, nodes, (a, b), outside, *sides))
    outside += (_outside(x, x_low, x_high) | _outside(y, y_low, y_high)).sum()
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    return _product(x.to(work), y.to(work), nodes, gain, a, b).to(x.dtype)


class _Watched(torch.autograd.Function):
    """The operator with gradients: one that counts has none of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, *rest: Any) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.numbers = rest[1:5]
        out: Tensor = torch.ops.attnforge.product_watched(x, y, *rest)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, y), (nodes, gain, a, b) = ctx.saved_tensors, ctx.numbers
        needed, twice = ctx.needs_input_grad[:2], torch.is_grad_enabled()
        if ready(x) and not twice:
            from ..gpu import product

            return *product.backward(grads[0], x, y, _on(nodes, x.device), gain, nodes, (a, b)), *[None] * 9
        pairs = zip((x, y), needed, strict=True)
        one, other = (t if twice else t.detach().requires_grad_(need) for t, need in pairs)
        with torch.enable_grad():
            out = _product(one, other, nodes, gain, a, b)
        wanted = [t for t, need in zip((one, other), needed, strict=True) if need]
        found = iter(torch.autograd.grad(out, wanted, grads[0], create_graph=twice))
        return *(next(found) if need else None for need in needed), *[None] * 9


def watched_product(
    x: Tensor, y: Tensor, outside: Tensor, nodes: int, gain: float, centre: Interval, first: Interval, second: Interval
) -> Tensor:
    """The product of two tensors of one shape and dtype; pairs outside `first` x `second` are added to `outside`.

    >>> outside = torch.zeros((), dtype=torch.int64)
    >>> x, y = torch.tensor([0.5, 3.0]), torch.tensor([0.5, 0.25])
    >>> watched_product(x, y, outside, 7, 2.0, (0.0, 0.0), (-1.0, 1.0), (-1.0, 1.0)).allclose(x * y), int(outside)
    (True, 1)
    """
    if transformed(x, y):  # nobody can count there
        work = torch.float64 if x.dtype == torch.float64 else torch.float32
        return _product(x.to(work), y.to(work), nodes, gain, *centre).to(x.dtype)
    wanted = torch.is_grad_enabled() and (x.requires_grad or y.requires_grad)
    call = _Watched.apply if wanted else torch.ops.attnforge.product_watched
    out: Tensor = call(x, y, outside, nodes, gain, *centre, *first, *second)
    return out


def kept_product(
    x: Tensor, outside: Tensor, nodes: int, gain: float, centre: Interval, first: Interval, second: Interval
) -> Callable[[Tensor, Tensor], Tensor]:
    """`watched_product` for tensors like x on a GPU, where no gradients are wanted, with all that can be kept kept."""
    from ..gpu import product

    fixed = product.multiplying(_on(nodes, x.device), gain, nodes, centre, outside, first, second)
    return functools.partial(product.forward, product=fixed)


_LIBRARY = torch.library.Library("attnforge", "FRAGMENT")
_LIBRARY.define(
    "product_watched(Tensor x, Tensor y, Tensor(a!) outside, int nodes, float gain, float a, float b, float x_low, "
    "float x_high, float y_low, float y_high) -> Tensor"
)
_LIBRARY.impl("product_watched", _watched, "CompositeExplicitAutograd")
torch.library.register_fake(
    "attnforge::product_watched",
    lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
    lib=_LIBRARY,
)
