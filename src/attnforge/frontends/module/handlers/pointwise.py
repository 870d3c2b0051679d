"""Handlers for operations that act entry by entry: registered functions, arithmetic, maxima and clamps."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....functions import registry as functions
from ....functions.univariate import Univariate
from ..atoms import Refusal, Tape
from ..values import (
    Value,
    add,
    apply,
    as_value,
    divide,
    log_add_exp,
    maximum,
    minimum,
    multiply,
    rescale,
    shape,
    subtract,
)
from .reduce import mean, total
from .table import STEP, Operation, handles, words

_UNARY = {
    name: name
    for name in words(
        """abs acos acosh asin asinh atan atanh cos cosh erf erfc exp exp2 expm1 hardsigmoid hardswish log
    log10 log1p log2 mish reciprocal relu relu6 rsqrt selu sigmoid silu sin sinh sqrt square tan tanh"""
    )
} | {"log_sigmoid": "logsigmoid", "special_erf": "erf", "special_erfc": "erfc"}


@handles(*_UNARY, note="a registered function, entry by entry")
def _function(tape: Tape, call: Operation) -> Value:
    return apply(tape, call["self"], _UNARY[call.name])


@handles("log_sigmoid_forward", note="log(sigmoid(x)), entry by entry")
def _log_sigmoid(tape: Tape, call: Operation) -> list[Value]:
    return [apply(tape, call["self"], "logsigmoid"), torch.zeros(0)]


@handles("gelu", note="exact and tanh form")
def _gelu(tape: Tape, call: Operation) -> Value:
    return apply(tape, call["self"], "gelu" if call.get("approximate") in (None, "none") else "gelu_tanh")


@handles("special_entr", note="-x log(x), from 0")
def _entr(tape: Tape, call: Operation) -> Value:
    return rescale(tape, apply(tape, call["self"], "xlogx"), -1.0)


@handles("leaky_relu", note="any slope")
def _leaky_relu(tape: Tape, call: Operation) -> Value:
    return apply(tape, call["self"], functions.leaky_relu(float(call["negative_slope"])))


@handles("prelu", "_prelu_kernel", note="constant slopes")
def _prelu(tape: Tape, call: Operation) -> Value:
    x, slope = call["self"], call.constant("weight")
    if call.name == "prelu" and slope.numel() > 1:
        slope = slope.reshape(-1, *[1] * (len(x.ids.shape) - 2))
    below = apply(tape, rescale(tape, x, -1.0), "relu")
    return subtract(tape, apply(tape, x, "relu"), rescale(tape, below, slope))


@handles("elu", note="any alpha and scales")
def _elu(tape: Tape, call: Operation) -> Value:
    scale, inner = float(call.get("scale", 1)), float(call.get("input_scale", 1))
    alpha = float(call.get("alpha", 1))
    if inner == 1:
        return rescale(tape, apply(tape, call["self"], functions.elu(alpha)), scale)
    # relu(x) + alpha (exp(inner min(x, 0)) - 1): elu of inner x agrees with it below zero, unless inner is below zero
    if inner < 0:
        rising = rescale(tape, apply(tape, rescale(tape, call["self"], -1.0), "relu"), -inner)
        bent = rescale(tape, rescale(tape, apply(tape, rising, "expm1"), alpha), scale)
        return add(tape, bent, rescale(tape, apply(tape, call["self"], "relu"), scale))
    bent = rescale(tape, apply(tape, rescale(tape, call["self"], inner), functions.elu(alpha)), scale)
    rest = rescale(tape, rescale(tape, as_value(inner), -1.0, 1.0), scale)
    return add(tape, bent, multiply(tape, apply(tape, call["self"], "relu"), rest))


@handles("softplus", note="any beta, any threshold >= 1")
def _softplus(tape: Tape, call: Operation) -> Value:
    beta, threshold = float(call.get("beta", 1)), float(call.get("threshold", 20))
    if threshold < 1:
        raise Refusal(f"it jumps at its threshold {threshold:g}: {STEP}")
    bent = apply(tape, rescale(tape, call["self"], beta), functions.softplus(threshold))
    return rescale(tape, bent, tape.reciprocal(beta))


@handles("softshrink", note="relu(x - lambd) - relu(-x - lambd)")
def _softshrink(tape: Tape, call: Operation) -> Value:
    limit = float(call.get("lambd", 0.5))
    above, below = (apply(tape, rescale(tape, call["self"], side, -limit), "relu") for side in (1.0, -1.0))
    return subtract(tape, above, below)


@handles("celu", note="any alpha but 0")
def _celu(tape: Tape, call: Operation) -> Value:
    alpha = float(call.get("alpha", 1))
    if alpha == 0 or not math.isfinite(alpha):
        raise Refusal(f"its alpha is {alpha:g}; it must be a finite number other than 0")
    inner = tape.reciprocal(alpha)
    return _elu(tape, Operation("elu", None, {"self": call["self"], "alpha": alpha, "input_scale": inner}))


@handles("rrelu", note="in evaluation mode")
def _rrelu(tape: Tape, call: Operation) -> Value:
    if call.get("training"):
        raise Refusal("it draws random numbers")
    return apply(tape, call["self"], functions.leaky_relu((float(call["lower"]) + float(call["upper"])) / 2))


@handles("clamp", "clip", "clamp_min", "clamp_max", "hardtanh", note="constant or data bounds")
def _clamp(tape: Tape, call: Operation) -> Value:
    low, high = (call.get(key, call.get(f"{key}_val")) for key in ("min", "max"))
    x = call["self"]
    if isinstance(low, (int, float)) and isinstance(high, (int, float)) and -math.inf < low < high < math.inf:
        return apply(tape, x, _clip(float(low), float(high)))
    if low is not None and not (isinstance(low, (int, float)) and low == -math.inf):
        x = maximum(tape, x, as_value(low))
    if high is not None and not (isinstance(high, (int, float)) and high == math.inf):
        x = minimum(tape, x, as_value(high))
    return x


def _clip(low: float, high: float) -> str | Univariate:
    named = {(-1.0, 1.0): "hardtanh", (0.0, 6.0): "relu6"}.get((low, high))
    return named or functions.piecewise_linear([low - 1, low, high, high + 1], [low, low, high, high])


@handles("huber_loss", "smooth_l1_loss", note="through clamps; any delta, any reduction over one point")
def _huber(tape: Tape, call: Operation) -> Value:
    # with c = clip(d, -delta, delta): huber(d) = c^2/2 + delta (|d| - |c|), and |d| - |c| = relu(|d| - delta)
    d = subtract(tape, as_value(call["self"]), as_value(call["target"]))
    delta = float(call["delta"] if call.name == "huber_loss" else call["beta"])
    far = apply(tape, rescale(tape, apply(tape, d, "abs"), 1.0, -delta), "relu")
    if delta > 0:
        near = rescale(tape, apply(tape, apply(tape, d, _clip(-delta, delta)), "square"), 0.5)
        far = add(tape, near, rescale(tape, far, delta))
        far = far if call.name == "huber_loss" else rescale(tape, far, tape.reciprocal(delta))
    if call.get("reduction", 1) == 0:
        return far
    dims = list(range(len(shape(far))))[::-1]
    return (mean if call["reduction"] == 1 else total)(tape, far, dims)


@handles("threshold", note="where it is continuous: threshold = value")
def _threshold(tape: Tape, call: Operation) -> Value:
    if call["threshold"] != call["value"]:
        raise Refusal(f"it jumps: {STEP}")
    return maximum(tape, call["self"], as_value(call["value"]))


@handles("neg", "negative", note="affine")
def _neg(tape: Tape, call: Operation) -> Value:
    return rescale(tape, call["self"], -1.0)


@handles("add", "sub", "subtract", "rsub", note="affine; constants and data, broadcast")
def _sum(tape: Tape, call: Operation) -> Value:
    x, y, alpha = as_value(call["self"]), as_value(call["other"]), float(call.get("alpha", 1))
    if call.name == "rsub":
        return add(tape, y, x, -alpha)
    return add(tape, x, y, alpha if call.name == "add" else -alpha)


@handles("mul", "multiply", note="a product of data, or affine")
def _product(tape: Tape, call: Operation) -> Value:
    return multiply(tape, as_value(call["self"]), as_value(call["other"]))


@handles("div", "divide", "true_divide", note="by constants, or by data through its reciprocal")
def _quotient(tape: Tape, call: Operation) -> Value:
    if call.get("rounding_mode"):
        raise Refusal(f"it jumps: {STEP}")
    return divide(tape, as_value(call["self"]), as_value(call["other"]))


@handles("pow", note="constant exponents; constant or positive bases for others")
def _power(tape: Tape, call: Operation) -> Value:
    base, exponent = as_value(call["self"]), as_value(call["exponent"])
    if isinstance(exponent, Tensor):
        if exponent.unique().numel() != 1:
            raise Refusal("its exponents differ from entry to entry")
        p = float(exponent.reshape(-1)[0])
        if tape.off(np.array(p)) > 0:  # a number that was rounded is no parameter of a function
            return apply(tape, multiply(tape, apply(tape, base, "log"), exponent), "exp")
        if p == 0:
            return rescale(tape, base, 0.0, 1.0)
        return base if p == 1 else apply(tape, base, functions.power(p))
    if isinstance(base, Tensor):
        if bool((base == 2).all()) and not tape.off(base.double().numpy()).any():
            return apply(tape, exponent, "exp2")
        if not (base.double().numpy() > tape.off(base.double().numpy())).all():
            raise Refusal("its base is not positive")
        return apply(tape, multiply(tape, exponent, apply(tape, base, "log")), "exp")
    return apply(tape, multiply(tape, exponent, apply(tape, base, "log")), "exp")


@handles("maximum", "fmax", note="through relu")
def _maximum(tape: Tape, call: Operation) -> Value:
    return maximum(tape, as_value(call["self"]), as_value(call["other"]))


@handles("minimum", "fmin", note="through relu")
def _minimum(tape: Tape, call: Operation) -> Value:
    return minimum(tape, as_value(call["self"]), as_value(call["other"]))


@handles("logaddexp", note="through softplus")
def _log_add_exp(tape: Tape, call: Operation) -> Value:
    return log_add_exp(tape, call["self"], call["other"])


#: Below it 1 - eps is rounded to 1 in float32, and where 1 - eps lies in float64 shows in the logit's tenth digit.
_LEAST = 2.0**-25


@handles("logit", "special_logit", note="log(x) - log(1 - x); with eps after a clamp")
def _logit(tape: Tape, call: Operation) -> Value:
    x, eps = call["self"], call.get("eps")
    if eps is not None:
        if not _LEAST <= eps < 0.5:
            raise Refusal(f"its eps is {eps:g}; it must lie between {_LEAST:.1e} (where 1 - eps is not 1) and 1/2")
        high = 1 - float(eps)
        ends = [apply(tape, side, _clip(float(eps), high)) for side in (x, rescale(tape, x, -1.0, 1.0))]
        odds = subtract(tape, *(apply(tape, end, "log") for end in ends))
        # The upper ends are off by 2^-54, their logarithms by 2^-53 at most, since they are above 1/2.
        off = 0.0 if Fraction(high) == 1 - Fraction(eps) else 2.0**-51
        return rescale(tape, odds, 1.0, float(tape.doubt(np.array(0.0), np.array(off))))
    return subtract(tape, apply(tape, x, "log"), apply(tape, rescale(tape, x, -1.0, 1.0), "log"))


@handles("logaddexp2", note="through softplus")
def _log_add_exp2(tape: Tape, call: Operation) -> Value:
    ln2 = _log_two(tape)
    x, y = (rescale(tape, as_value(call[key]), ln2) for key in ("self", "other"))
    return divide(tape, log_add_exp(tape, x, y), torch.tensor(ln2, dtype=torch.float64))


def _log_two(tape: Tape) -> float:
    near = math.log(2)  # within a unit in the last place of the number that is meant
    return float(tape.doubt(np.array(near), np.array(math.ulp(near))))


@handles("hypot", note="sqrt(x^2 + y^2)")
def _hypot(tape: Tape, call: Operation) -> Value:
    x, y = (apply(tape, call[key], "square") for key in ("self", "other"))
    return apply(tape, add(tape, x, y), "sqrt")


@handles("addcmul", "addcdiv", note="a sum with a product or a quotient")
def _add_product(tape: Tape, call: Operation) -> Value:
    join: Any = multiply if call.name == "addcmul" else divide
    return add(tape, call["self"], join(tape, call["tensor1"], call["tensor2"]), float(call.get("value", 1)))


@handles("lerp", note="constant or data weights")
def _lerp(tape: Tape, call: Operation) -> Value:
    step = multiply(tape, as_value(call["weight"]), subtract(tape, call["end"], call["self"]))
    return add(tape, call["self"], step)
