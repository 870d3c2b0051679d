"""Handlers for comparisons and steps: they are captured where their outcome is the same on all of the box."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ....programs.enclose import cells, ranges
from ....programs.program import Program, live
from ..atoms import Refusal, Tape
from ..values import Value, apply, as_value, atoms, divide, multiply, rescale, shape, subtract
from .table import STEP, Operation, handles

#: Cells of the box for the ranges that decide a comparison: four cuts for each of four coordinates.
CELLS = 256


def bounds(tape: Tape, x: Value) -> tuple[Tensor, Tensor]:
    """Sound bounds of each entry over the box, also after its ends were rounded to float32."""
    ids = atoms(tape, x)
    parts = tape.unpack(ids)
    slots, position = np.unique(parts.slot, return_inverse=True)
    position = position.reshape(parts.slot.shape)
    ops, labels, output = live(tape.build.ops, tape.build.labels, tape.columns(slots))
    box = tape.build.box.outward(torch.float32)
    program = Program(box, tape.tokens, ops, output, (tape.tokens, len(slots)), "all", "", labels)
    found = ranges(program, *cells(program, CELLS))[output]
    low, high = np.asarray(found.low.min(0)), np.asarray(found.high.max(0))
    low, high = (np.concatenate([end[None], side]) for end, side in ((low.min(0), low), (high.max(0), high)))
    ends = (np.asarray(end[parts.token, position]) for end in (low, high))
    below, above = (torch.from_numpy(end) for end in ends)
    return below, above


def _undecided(what: str, low: Tensor, high: Tensor) -> Refusal:
    return Refusal(f"{what} on the box, where it takes values between {low.min():.4g} and {high.max():.4g}")


Verdict = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
#: Of a difference in [low, high]: where the comparison certainly holds, and where it certainly does not.
_COMPARISONS: dict[str, Verdict] = {
    "gt": lambda low, high: (low > 0, high <= 0),
    "ge": lambda low, high: (low >= 0, high < 0),
    "lt": lambda low, high: (high < 0, low >= 0),
    "le": lambda low, high: (high <= 0, low > 0),
    "eq": lambda low, high: ((low == 0) & (high == 0), (low > 0) | (high < 0)),
    "ne": lambda low, high: ((low > 0) | (high < 0), (low == 0) & (high == 0)),
}


def decide(tape: Tape, name: str, x: Value, y: Value) -> Tensor:
    """The outcome of a comparison, where it is the same on all of the box."""
    low, high = bounds(tape, subtract(tape, x, y))
    yes, no = _COMPARISONS[name](low, high)
    open_ = ~(yes | no)
    if open_.any():
        raise _undecided(
            "it compares data (torch.where has a form where it compares x with a number and chooses between functions "
            "of x that are equal there), and the sign of the difference is not settled", low[open_], high[open_],
        )  # fmt: skip
    return yes


@handles(*_COMPARISONS, note="where the outcome is the same on all of the box")
def _compare(tape: Tape, call: Operation) -> Value:
    return decide(tape, call.name, as_value(call["self"]), as_value(call["other"]))


@handles("isnan", "isinf", "isfinite", note="numbers on the box are finite")
def _finite(tape: Tape, call: Operation) -> Value:
    low, high = bounds(tape, call["self"])
    if not (torch.isfinite(low) & torch.isfinite(high)).all():
        raise Refusal("it asks whether data is finite, which cannot be shown on all of the box")
    return torch.full(tuple(shape(call["self"])), call.name == "isfinite")


@handles("nan_to_num", note="the value itself: numbers on the box are finite")
def _nan_to_num(tape: Tape, call: Operation) -> Value:
    low, high = bounds(tape, call["self"])
    if not (torch.isfinite(low) & torch.isfinite(high)).all():
        raise Refusal("it replaces what is not finite; that its argument is finite cannot be shown on all of the box")
    return call["self"]


_STEPS = {
    "sign": torch.sign,
    "sgn": torch.sign,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
    "signbit": torch.signbit,
}


def step(tape: Tape, x: Value, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A monotone step function, where it is constant on all of the box."""
    low, high = bounds(tape, x)
    at_low, at_high = function(low), function(high)
    open_ = at_low != at_high
    if function is torch.signbit:
        open_ = (low <= 0) & (high >= 0)  # 0 has two signs
    if open_.any():
        raise _undecided("it jumps: its argument is not settled", low[open_], high[open_])
    return at_low


@handles(*_STEPS, note="where it is constant on all of the box")
def _step(tape: Tape, call: Operation) -> Value:
    if call.get("decimals"):
        raise Refusal("it jumps: only rounding to whole numbers can be constant on the box")
    return step(tape, call["self"], _STEPS[call.name])


@handles("hardshrink", note="where it is settled which entries it keeps")
def _hardshrink(tape: Tape, call: Operation) -> Value:
    limit = float(call.get("lambd", 0.5))
    if limit <= 0:
        return call["self"]
    low, high = bounds(tape, call["self"])
    kept = (low > limit) | (high < -limit)
    open_ = ~(kept | ((low >= -limit) & (high <= limit)))
    if open_.any():
        why = f"it jumps at {-limit:g} and {limit:g}, and {STEP}: its argument crosses that"
        raise _undecided(why, low[open_], high[open_])
    return rescale(tape, call["self"], kept.double())


@handles("copysign", note="where the sign that is copied is settled on the box")
def _copysign(tape: Tape, call: Operation) -> Value:
    x, other = as_value(call["self"]), as_value(call["other"])
    low, high = bounds(tape, other)
    open_ = ~((low > 0) | (high < 0))  # 0 has two signs
    if open_.any():
        raise _undecided(f"it jumps, and {STEP}: the sign that it copies is not settled", low[open_], high[open_])
    sign = torch.where(high < 0, -1.0, 1.0).double()
    return rescale(tape, apply(tape, x, "abs"), sign)


@handles("remainder", "fmod", "floor_divide", "frac", note="where the whole quotient is constant on all of the box")
def _remainder(tape: Tape, call: Operation) -> Value:
    x, y = as_value(call["self"]), as_value(call.get("other", 1.0))
    down = torch.floor if call.name in ("remainder", "floor_divide") else torch.trunc
    whole = step(tape, divide(tape, x, y), down)
    return whole if call.name == "floor_divide" else subtract(tape, x, multiply(tape, y, whole))


@handles("atan2", note="where the box keeps clear of the origin and the branch cut")
def _atan2(tape: Tape, call: Operation) -> Value:
    y, x = as_value(call["self"]), as_value(call["other"])
    (x_low, _), (y_low, y_high) = bounds(tape, x), bounds(tape, y)
    if bool((x_low > 0).all()):
        return apply(tape, divide(tape, y, x), "atan")
    if bool((y_low > 0).all()) or bool((y_high < 0).all()):
        near = math.copysign(math.pi / 2, float(y_low.reshape(-1)[0]))
        quarter = float(tape.doubt(np.array(near), np.array(math.ulp(near))))
        return rescale(tape, apply(tape, divide(tape, x, y), "atan"), -1.0, quarter)
    raise Refusal("it is not smooth on the box: x > 0, y > 0 or y < 0 must hold everywhere (for atan2(y, x))")


@handles("threshold_backward", note="the gradient of relu, where the sign of its argument is settled on the box")
def _threshold_backward(tape: Tape, call: Operation) -> Value:
    mask = decide(tape, "gt", call["self"], as_value(call["threshold"]))
    return multiply(tape, call["grad_output"], mask.double())


@handles("softplus_backward", note="a product with a sigmoid")
def _softplus_backward(tape: Tape, call: Operation) -> Value:
    slope = apply(tape, rescale(tape, call["self"], float(call["beta"])), "sigmoid")
    return multiply(tape, call["grad_output"], slope)
