"""Fast reading (lemma A8) as plain PyTorch that a compiler turns into one kernel, and that kernel for eager GPUs.

The operator of `fast` works in passes over pieces that fit a processor's cache; a compiler wants the opposite, one
expression per element. Here the denominator's coefficients are numbers in the program. The numerator's follow from the
values in one small sum, so that compiled modules train. Everything else is pointwise: one exponential, Horner's rule.

Sizes |x| are written as a choice of sides, with the derivative of the right side at 0: sums of such terms that are
smooth have the right gradient there, where that of `abs` would be 0.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .fast_read import Reading, Room, basis, form_of, known, working

LARGE = 1 << 18  # elements from which an eager GPU uses a compiled kernel, whose first call takes seconds
Number = float | Tensor


@known
def _total(anchors: int, kappa: float, dtype: torch.dtype) -> tuple[float, ...]:
    """The coefficients of Q, lowest power first, as numbers."""
    return tuple(basis(anchors, kappa, dtype, torch.device("cpu"))[0].tolist())


@known
def _matrix(anchors: int, kappa: float, dtype: torch.dtype, device: torch.device, even: bool) -> Tensor:
    """What takes a table to the coefficients of P and, unless `even`, R."""
    both = basis(anchors, kappa, dtype, device)[1]
    return both[:, : (anchors + 1) // 2].contiguous() if even else both


def read(
    y: Tensor, value: Tensor, rate: float, kappa: float, centre: float = 0.0, gate: float = 0.0, even: bool = False
) -> Tensor:
    """`fast.anchor_read` for compilers to fuse and differentiate; `even` promises value[i] = value[-1 - i].

    The numbers must be constants of the program that is compiled (`fast_read.unpacked` makes them so).

    >>> y, value = torch.linspace(-9, 9, 101), torch.linspace(-1, 1, 17)
    >>> compiled = torch.compile(read, backend="eager", fullgraph=True)
    >>> torch.equal(compiled(y, value, 1.0, 0.25), read(y, value, 1.0, 0.25))
    True
    """
    work, anchors = working(y.dtype), value.shape[0]
    x = y.to(work)
    if anchors and form_of(anchors, kappa, y.dtype) != "lattice":
        reading = Reading.of(value.unsqueeze(0), rate, kappa, centre, 0.0, y.dtype)
        head = reading.means(x.reshape(-1), Room())[0].reshape(y.shape)
        return (_gated(head, x, *_decayed(x, gate)) if gate else head).to(y.dtype)
    if not anchors:
        return _gated(None, x, *_decayed(x, gate)).to(y.dtype)
    matrix = _matrix(anchors, kappa, y.dtype, y.device, even)
    # a sum of products rather than a matrix product: compilers fuse it with what makes the values
    parts = (value.double().unsqueeze(-1) * matrix).sum(0).to(work).unbind()
    rows = (anchors + 1) // 2
    shared = gate == rate and not centre
    out = _lattice(
        x, _total(anchors, kappa, y.dtype), parts[:rows], parts[rows:], bool(anchors % 2), rate, centre, gate,
        bool(gate), shared,
    )  # fmt: skip
    return out.to(y.dtype)


def _lattice(
    x: Tensor, total: Sequence[Number], even: Sequence[Number], odd: Sequence[Number], whole: bool, rate: Number,
    centre: Number, gate: Number, gated: bool, shared: bool,
) -> Tensor:  # fmt: skip
    """The lattice form at x, with a gate where `gated`, whose exponential is the table's where `shared`."""
    at = x if shared else x - centre
    size, q = _decayed(at, rate)
    square = q * q
    low = square + 1.0
    inverse = 1.0 / low  # in a kernel off by 2 units in the last place: s is corrected once
    s = q * inverse
    s = s + (q - s * low) * inverse
    above = _horner(even, s)
    if odd:
        tilt = (1.0 - square) * inverse if whole else (1.0 - q) / (1.0 + q)
        above = above + _horner(odd, s) * torch.where(at < 0, -tilt, tilt)
    head = above / _horner(total, s)
    return _gated(head, x, *((size, q) if shared else _decayed(x, gate))) if gated else head


def _decayed(x: Tensor, rate: Number) -> tuple[Tensor, Tensor]:
    """|x| and exp(-rate |x|)."""
    size = torch.where(x < 0, -x, x)
    return size, torch.exp(size * -rate)


def _gated(head: Tensor | None, x: Tensor, size: Tensor, q: Tensor) -> Tensor:
    """head + x sigmoid(gate x), q = exp(-gate |x|)."""
    fall = size * (q / (q + 1.0))
    return torch.where(x < 0, 0.0, x) + (-fall if head is None else head - fall)


def _horner(coefficient: Sequence[Number], s: Tensor) -> Tensor:
    """sum_j coefficient_j s^j."""
    if len(coefficient) == 1:
        return torch.zeros_like(s) + coefficient[0]
    total = s * coefficient[-1] + coefficient[-2]
    for c in coefficient[-3::-1]:
        total = total * s + c
    return total


def fused(y: Tensor, value: Tensor, rate: float, kappa: float, centre: float, gate: float) -> Tensor | None:
    """`read` by a kernel compiled for its number of anchors, not its numbers; None where there is no such kernel."""
    anchors = value.shape[0]
    ready = y.is_cuda and y.numel() >= LARGE and anchors and form_of(anchors, kappa, y.dtype) == "lattice"
    if not ready or not _compiles(y.device):
        return None
    with torch.no_grad():
        numbers = _numbers(anchors, kappa, rate, centre, gate, working(y.dtype), y.device)
        parts = (value.detach().double() @ basis(anchors, kappa, y.dtype, y.device)[1]).to(numbers.dtype)
        shared = gate == rate and not centre
        out: Tensor = _kernel()(y.detach().reshape(-1), numbers, parts, bool(anchors % 2), bool(gate), shared)
    return out.reshape(y.shape)


def _flat(y: Tensor, numbers: Tensor, parts: Tensor, whole: bool, gated: bool, shared: bool) -> Tensor:
    rate, centre, gate, *total = numbers.unbind()
    made, rows = parts.unbind(), len(total)
    x = y.to(numbers.dtype)
    return _lattice(x, total, made[:rows], made[rows:], whole, rate, centre, gate, gated, shared).to(y.dtype)


@functools.lru_cache(maxsize=256)
def _numbers(
    anchors: int, kappa: float, rate: float, centre: float, gate: float, dtype: torch.dtype, device: torch.device
) -> Tensor:
    numbers = [rate, centre, gate, *_total(anchors, kappa, dtype)]
    return torch.tensor(numbers, dtype=torch.float64).to(device, dtype)


@functools.lru_cache(maxsize=1)
def _kernel() -> Callable[..., Tensor]:
    return torch.compile(_flat, dynamic=True)


@functools.lru_cache(maxsize=16)
def _compiles(device: torch.device) -> bool:
    """Whether this GPU's compiler is here."""
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (7, 0)
