"""The lattice form of a table (lemma A8) as one expression per element, for compilers to fuse; and as one node.

`lattice` is the expression: one exponential, Horner's rule and two quotients, in PyTorch or in the arithmetic of a
compiler. Spelled out it is some fifty operations a site, which compilers walk through again and again; the operator
`attnforge::lattice_read` is one node of a compiled program, which Inductor writes into the kernels around it all the
same. `lowers` tells Inductor how, when a program is first compiled; where its interface is another one, programs spell
the table out. Run by itself the operator evaluates the expression.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...census import allow_custom
from ...dtypes import transforming
from ...network import known
from .table import lattice as lattice_of
from .table import masses, working

NAME = "attnforge::lattice_read"


@dataclass(frozen=True)
class Arithmetic:
    """What an expression is written in, besides sums, products and quotients."""

    number: Callable[[float], Any]
    exp: Callable[[Any], Any]
    where: Callable[[Any, Any, Any], Any]
    negative: Callable[[Any], Any]


PYTORCH = Arithmetic(float, torch.exp, torch.where, lambda x: x < 0)


_BASES: dict[tuple[int, float, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}


def basis(anchors: int, kappa: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Q, and the matrix that takes a table of values to [P, R], in float64 on a device; made once."""
    key = (anchors, kappa, working(dtype), device)
    if key not in _BASES:
        even, odd = lattice_of(anchors)
        mass = masses(anchors, kappa, dtype)[:, None]
        halves = np.concatenate([mass * even, mass * odd], 1) / 2  # halving is exact
        right = np.concatenate([np.zeros((anchors // 2, halves.shape[1])), halves])
        left = right[::-1] * np.repeat([1.0, -1.0], len(mass))  # k and -k: the same in P, opposite in R
        total = torch.as_tensor((mass * even).sum(0), dtype=torch.float64, device=device)
        _BASES[key] = total, torch.as_tensor(np.ascontiguousarray(right + left), dtype=torch.float64, device=device)
    return _BASES[key]


@known
def totals(anchors: int, kappa: float, dtype: torch.dtype) -> tuple[float, ...]:
    """The coefficients of Q, lowest power first, as numbers."""
    return tuple(basis(anchors, kappa, dtype, torch.device("cpu"))[0].tolist())


def lattice(
    x: Any, total: Sequence[Any], even: Sequence[Any], odd: Sequence[Any], anchors: int, rate: float, centre: float,
    gate: float, given: Arithmetic = PYTORCH,
) -> Any:  # fmt: skip
    """The table at x, plus x sigmoid(gate x) with a gate, from the coefficients of Q, P and R (none where R = 0).

    Sizes are choices of sides, with the derivative of the right side at 0: sums that are smooth have the right gradient
    there.
    """
    one, shared = given.number(1.0), gate == rate and not centre
    at = x if shared or not centre else x - given.number(centre)
    size, q = decayed(at, rate, given)
    square = q * q
    low = square + one
    inverse = one / low  # in a kernel off by 2 units in the last place: s is corrected once
    s = q * inverse
    s = s + (q - s * low) * inverse
    above = _horner(even, s)
    if odd:
        tilt = (one - square) * inverse if anchors % 2 else (one - q) / (one + q)
        above = above + _horner(odd, s) * given.where(given.negative(at), -tilt, tilt)
    below = _horner([given.number(c) for c in total], s)
    if not gate:
        return above / below
    size, q = (size, q) if shared else decayed(x, gate, given)
    both = one + q  # head and gate over one denominator: quotients are what costs here
    return given.where(given.negative(x), given.number(0.0), x) + (above * both - size * q * below) / (below * both)


def decayed(x: Any, rate: float, given: Arithmetic = PYTORCH) -> tuple[Any, Any]:
    """|x| and exp(-rate |x|)."""
    size = given.where(given.negative(x), -x, x)
    return size, given.exp(size * given.number(-rate))


def _horner(coefficient: Sequence[Any], s: Any) -> Any:
    """sum_j coefficient_j s^j."""
    if len(coefficient) == 1:
        return s * 0.0 + coefficient[0] if isinstance(s, Tensor) else coefficient[0]
    total = s * coefficient[-1] + coefficient[-2]
    for c in coefficient[-3::-1]:
        total = total * s + c
    return total


def _read(
    y: Tensor, parts: Tensor, anchors: int, rate: float, kappa: float, centre: float, gate: float, even: bool
) -> Tensor:
    """The operator by itself: `parts` are the coefficients of P and R."""
    rows, numbers = (anchors + 1) // 2, parts.unbind()
    x, total = y.to(working(y.dtype)), totals(anchors, kappa, y.dtype)
    out: Tensor = lattice(x, total, numbers[:rows], () if even else numbers[rows:], anchors, rate, centre, gate)
    return out.to(y.dtype)


@known
def lowers() -> bool:
    """Whether Inductor has been told what the operator is, and no torch.func is at work, which would take an operator
    without rules for a constant; asked while a program is traced, not traced."""
    return not transforming() and _told()


@functools.lru_cache(maxsize=1)
def _told() -> bool:
    try:
        from torch._inductor import ir, lowering
        from torch._inductor.virtualized import ops
    except ImportError:
        return False

    def lowered(
        y: Any, parts: Any, anchors: int, rate: float, kappa: float, centre: float, gate: float, even: bool
    ) -> Any:
        parts.realize()
        place, table, dtype = y.make_loader(), parts.make_loader(), y.get_dtype()
        work, rows, total = working(dtype), (anchors + 1) // 2, totals(anchors, kappa, dtype)
        number = functools.partial(ops.constant, dtype=work)
        given = Arithmetic(number, ops.exp, ops.where, lambda x: ops.lt(x, number(0.0)))

        def element(index: Any) -> Any:
            numbers = [table([i]) for i in range(rows if even else 2 * rows)]
            x = ops.to_dtype(place(index), work)
            out = lattice(x, total, numbers[:rows], numbers[rows:], anchors, rate, centre, gate, given)
            return ops.to_dtype(out, dtype)

        return ir.Pointwise.create(device=y.get_device(), dtype=dtype, inner_fn=element, ranges=list(y.get_size()))

    lowering.register_lowering(torch.ops.attnforge.lattice_read.default, type_promotion_kind=None)(lowered)
    return True


_LIBRARY = torch.library.Library("attnforge", "FRAGMENT")
_LIBRARY.define(
    "lattice_read(Tensor y, Tensor parts, int anchors, float rate, float kappa, float centre, float gate, bool even) "
    "-> Tensor"
)
_LIBRARY.impl("lattice_read", _read, "CompositeExplicitAutograd")
torch.library.register_fake(
    NAME, lambda y, *_: torch.empty_like(y, memory_format=torch.contiguous_format), lib=_LIBRARY
)
allow_custom(NAME, "softmax attention over evenly spaced anchors and, with a gate, one self head (lemmas A8 and B4)")
