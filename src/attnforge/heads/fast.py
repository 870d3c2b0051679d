"""`attnforge::anchor_read`: an anchor head on an even lattice with one exponential per element (lemma A8).

    h = anchor_read(y, value, rate, kappa)                  # softmax over p keys (rate k, -kappa k^2), values `value`
    h = anchor_read(y, value, rate, kappa, centre, gate)    # around `centre`, plus y sigmoid(gate y)

y has any shape, float64, float32 or bfloat16 (computed in float32 inside); `value` is a table of p >= 2 numbers,
float32 or float64; rate, kappa > 0, centre and gate are Python numbers. k runs from -(p-1)/2 to (p-1)/2, so the anchors
are centre + 2 kappa k / rate. gate = 0 means no gate; with a gate the table may be empty. Gradients flow to y and to
`value`. The result equals `softmax_read` with the same arguments up to `fast_bound.read_error`; far outside its anchors
the head goes on as the last value (plus y or 0 from the gate), as the softmax does.

On a processor the operator works through pieces that stay in its cache, on a GPU large inputs go through one compiled
kernel. `read` is the same computation as plain PyTorch: call it inside `torch.compile`, which fuses it with what is
around it. `softmax_read` is the attention written out: call it while exporting. `evaluate` picks among the three.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..purity import allow_custom
from .fast_compiled import fused, read
from .fast_read import Reading, Room, exporting, working

CACHED = 1 << 17  # elements a thread works on at once: a handful of temporaries stay in its cache
SOFTMAX = 1 << 20  # weights alive at once where the gradient of the values needs all of them
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
NAME = "attnforge::anchor_read"


def anchor_read(y: Tensor, value: Tensor, rate: float, kappa: float, centre: float = 0.0, gate: float = 0.0) -> Tensor:
    """The softmax mean of `value` over keys (rate k, -kappa k^2) at y - centre; plus y sigmoid(gate y) with a gate.

    >>> y, value = torch.linspace(-9, 9, 1001), torch.linspace(-1, 1, 17)
    >>> fast = anchor_read(y, value, 1.0, 0.25)
    >>> bool((fast - softmax_read(y, value, 1.0, 0.25)).abs().max() < 1e-6)
    True
    """
    _check(y, value, rate, kappa, gate)
    out: Tensor = torch.ops.attnforge.anchor_read(y, value, rate, kappa, centre, gate)
    return out


def _anchor_read(y: Tensor, value: Tensor, rate: float, kappa: float, centre: float, gate: float) -> Tensor:
    work = working(y.dtype)
    if (whole := fused(y, value, rate, kappa, centre, gate)) is not None:
        return whole
    reading = Reading.of(value.unsqueeze(0), rate, kappa, centre, gate, y.dtype)
    flat = y.reshape(-1)
    if y.device.type != "cpu":
        return _finish(reading, flat.to(work), Room()).to(y.dtype).reshape(y.shape)
    out = torch.empty_like(y, memory_format=torch.contiguous_format)
    step = CACHED * torch.get_num_threads()
    room = Room(flat.new_empty(0, dtype=work), min(step, flat.numel()))
    for part, into in zip(flat.split(step), out.view(-1).split(step), strict=True):
        if part.dtype == work:
            _finish(reading, part, room, into)
        else:
            into.copy_(_finish(reading, part.to(work), room))
    return out


def _anchor_read_backward(
    grad: Tensor, y: Tensor, value: Tensor, rate: float, kappa: float, centre: float, gate: float, of_value: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of `anchor_read` with respect to y and, where `of_value`, the table (else zeros)."""
    work = working(y.dtype)
    anchors = value.shape[0]
    k = torch.arange(anchors, dtype=torch.float64, device=value.device) - (anchors - 1) / 2
    exact = value.double()
    reading = Reading.of(torch.stack([exact, k * exact, k]), rate, kappa, centre, gate, y.dtype)
    flat, slope = y.reshape(-1), grad.reshape(-1)
    to_y = torch.empty_like(y, memory_format=torch.contiguous_format)
    to_value = torch.zeros_like(value, dtype=torch.float64 if of_value else value.dtype)
    cpu = y.device.type == "cpu"
    step = CACHED * torch.get_num_threads() if cpu else max(1, flat.numel())
    room = Room(flat.new_empty(0, dtype=work), min(step, flat.numel())) if cpu else Room()
    for part, out, into in zip(flat.split(step), slope.split(step), to_y.view(-1).split(step), strict=True):
        at = part.to(work)
        mean, moment, place = reading.means(at, room) if anchors else [torch.zeros_like(at)] * 3
        change = rate * (moment - place * mean)  # the covariance of key and value
        if gate:
            share = torch.sigmoid(gate * at)
            change = change + share * (1 + gate * at * (1 - share))
        into.copy_(out.to(work) * change)
        if of_value and reading.form == "lattice" and anchors:
            to_value += reading.pulled_back(at, out.to(work), room)
    if of_value and reading.form != "lattice":
        step = max(1, SOFTMAX // anchors)
        for part, out in zip(flat.split(step), slope.split(step), strict=True):
            to_value += (_weights(part.to(work), anchors, rate, kappa, centre) @ out.to(work)).double()
    return to_y, to_value.to(value.dtype)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, value, *ctx.numbers = inputs
    ctx.save_for_backward(y, value)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    y, value = ctx.saved_tensors
    to_y, to_value = torch.ops.attnforge.anchor_read_backward(grad, y, value, *ctx.numbers, ctx.needs_input_grad[1])
    return to_y, to_value if ctx.needs_input_grad[1] else None, None, None, None, None


def _like(y: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(y, memory_format=torch.contiguous_format)


def _like_both(grad: Tensor, y: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _like(y), torch.empty_like(value)


# `torch.library.custom_op` would say the same in fewer words, and load the compiler, for seconds, at the first call
_LIBRARY = torch.library.Library("attnforge", "FRAGMENT")
_NUMBERS = "float rate, float kappa, float centre"
_LIBRARY.define(f"anchor_read(Tensor y, Tensor value, {_NUMBERS}, float gate) -> Tensor")
_LIBRARY.define(
    f"anchor_read_backward(Tensor grad, Tensor y, Tensor value, {_NUMBERS}, float gate, bool of_value) "
    "-> (Tensor, Tensor)"
)
_LIBRARY.impl("anchor_read", _anchor_read, "CompositeExplicitAutograd")
_LIBRARY.impl("anchor_read_backward", _anchor_read_backward, "CompositeExplicitAutograd")
torch.library.register_fake(NAME, _like, lib=_LIBRARY)
torch.library.register_fake(f"{NAME}_backward", _like_both, lib=_LIBRARY)
torch.library.register_autograd(NAME, _backward, setup_context=_remember, lib=_LIBRARY)
allow_custom(NAME, "softmax attention over evenly spaced anchors and, with a gate, one self head (lemmas A8 and B4)")


def softmax_read(y: Tensor, value: Tensor, rate: float, kappa: float, centre: float = 0.0, gate: float = 0.0) -> Tensor:
    """The attention that `anchor_read` evaluates, written out: a softmax over p keys, and one over {self, sink}."""
    work = working(y.dtype)
    flat = y.reshape(-1).to(work)
    anchors = value.shape[0]
    out = value.to(work) @ _weights(flat, anchors, rate, kappa, centre) if anchors else torch.zeros_like(flat)
    if gate:
        pair = torch.softmax(torch.stack([gate * flat, torch.zeros_like(flat)], -1), -1)
        out = out + (pair.unsqueeze(-2) @ torch.stack([flat, torch.zeros_like(flat)], -1).unsqueeze(-1)).flatten()
    return out.to(y.dtype).reshape(y.shape)


def evaluate(y: Tensor, value: Tensor, rate: float, kappa: float, centre: float = 0.0, gate: float = 0.0) -> Tensor:
    """The head at y: written out while exporting, plain PyTorch while compiling, the operator otherwise."""
    if exporting():
        return softmax_read(y, value, rate, kappa, centre, gate)
    if torch.compiler.is_compiling():
        return read(y, value, rate, kappa, centre, gate)
    return anchor_read(y, value, rate, kappa, centre, gate)


def _finish(reading: Reading, y: Tensor, room: Room, out: Tensor | None = None) -> Tensor:
    head = reading.means(y, room)[0] if reading.anchors else None
    if reading.gate or head is None:
        return reading.gated(head, y, room, out)
    return head if out is None else out.copy_(head)


def _weights(y: Tensor, anchors: int, rate: float, kappa: float, centre: float) -> Tensor:
    """The softmax weights, shape (anchor, element)."""
    k = torch.arange(anchors, dtype=y.dtype, device=y.device) - (anchors - 1) / 2
    return torch.softmax(torch.outer(rate * k, y - centre) - (kappa * k * k).unsqueeze(-1), 0)


def _check(y: Tensor, value: Tensor, rate: float, kappa: float, gate: float) -> None:
    if y.dtype not in DTYPES:
        raise ArgumentError(f"y must be float64, float32 or bfloat16, got {y.dtype}")
    if value.dim() != 1 or value.shape[0] < (0 if gate else 2) or value.dtype not in (torch.float64, torch.float32):
        raise ArgumentError(
            f"value must be a table of at least 2 float32 or float64 numbers, got {value.dtype}, {tuple(value.shape)}"
        )
    if not 0 <= gate < float("inf"):
        raise ArgumentError(f"gate must be 0 (none) or a positive number, got {gate!r}")
    if not (0 < rate < float("inf") and 0 < kappa < float("inf")):
        raise ArgumentError(f"rate and kappa must be positive numbers, got rate = {rate!r} and kappa = {kappa!r}")
