"""The losses of regressions, one frozen object each: mathematics for the audit, and what a block has to build.

A loss l(z, y) is convex in its prediction z = w.x. `value`, `slope` and `curvature` are it and its derivatives by z;
`slope_error` and the two ends of `curvature` bound what rounding and a ball around w do to them. The class attributes
say how attention computes the slope; nothing here builds a weight.

>>> named("logistic").slope(np.array([[0.0]]), np.array([[1.0]]))
array([[-0.5]])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from ..certificates.rounding import unit
from ..dtypes import Array
from ..errors import ArgumentError, closest

U = unit(torch.float64)  # audits are computed in float64, whatever the dtype of the network
EDGE = 0.5  # Huber's kink in the prompt's units: residuals on the slope then stay where hot heads are accurate


@dataclass(frozen=True, eq=False)
class Doubt:
    """How far predictions and labels can be off, and how large they can be: (n, K)."""

    z: Array
    y: Array
    reach: Array  # bounds |z| + |y|
    largest: Callable[[], Array]  # the largest prediction, where a loss asks for it


@dataclass(frozen=True)
class Loss(ABC):
    """l(z, y), for predictions z and labels y of shape (n, ..., K)."""

    name: ClassVar[str]
    quadratic: ClassVar[bool] = False  # the slope is z - y: the state's own logit, one layer and one stage
    hot: ClassVar[bool] = False  # z is read by hot pairs (C2); otherwise one head reads the mean itself (F1)
    heavy: ClassVar[bool] = False  # that head's sink is heavy, so that it reads an exponential
    joint: ClassVar[bool] = False  # the states of all classes share a sequence, and one head attends to them together
    clipped: ClassVar[bool] = False  # the slope is z - y cut at EDGE, and the scale of the residuals is fitted too
    fitted: ClassVar[bool] = False  # the slope is a fitted head's, which comes with the block
    classes: ClassVar[bool] = False  # a sequence may hold several state tokens
    flat: ClassVar[float] = 1e-13  # curvatures below this part of the largest count as 0: rounding of an eigensolver
    aside: ClassVar[str] = ""  # what a certificate's `aside` stands for

    @abstractmethod
    def value(self, z: Array, y: Array) -> Array:
        """l of each sample, all outputs together: (n, K) to (n,)."""

    @abstractmethod
    def slope(self, z: Array, y: Array) -> Array:
        """The derivative by z."""

    @abstractmethod
    def slope_error(self, y: Array, off: Doubt) -> tuple[Array, Array]:
        """What a slope can be off the exact one, and how large it can be: (n, K)."""

    @abstractmethod
    def curvature(self, z: Array, y: Array, within: Array) -> tuple[Array, Array]:
        """The least and the largest second derivative of each sample, for predictions within `within` of z (n,)."""

    def hessians(self, x: Array, z: Array, y: Array, weight: Array, within: Array) -> tuple[Array, Array]:
        """Matrices that bound the Hessian by w of the weighted sum from below and above."""
        low, high = ((x * (weight * c)[:, None]).T @ x for c in self.curvature(z[:, 0], y[:, 0], within))
        return low, high

    def grounded(self, points: Array) -> Array:
        """Points (..., K, d) without what the loss does not see of them."""
        return points


@dataclass(frozen=True)
class SquaredLoss(Loss):
    """(z - y)^2 / 2."""

    name, quadratic, hot = "linear", True, True

    def value(self, z: Array, y: Array) -> Array:
        r = np.abs(z - y)
        return np.asarray((0.5 * r * r).sum(axis=1))

    def slope(self, z: Array, y: Array) -> Array:
        return z - y

    def slope_error(self, y: Array, off: Doubt) -> tuple[Array, Array]:
        return off.z + off.y + 2 * U * off.reach, off.reach

    def curvature(self, z: Array, y: Array, within: Array) -> tuple[Array, Array]:
        return np.ones_like(z), np.ones_like(z)


@dataclass(frozen=True)
class LogisticLoss(Loss):
    """log(1 + exp(z)) - y z: attention to {state, sink} is its mean, a sigmoid."""

    name, classes = "logistic", True

    def value(self, z: Array, y: Array) -> Array:
        return np.asarray((np.logaddexp(0.0, z) - y * z).sum(axis=1))

    def slope(self, z: Array, y: Array) -> Array:
        with np.errstate(over="ignore"):
            return np.asarray(1 / (1 + np.exp(-z)) - y)

    def slope_error(self, y: Array, off: Doubt) -> tuple[Array, Array]:
        return 0.26 * off.z + 8 * U, np.ones_like(off.z)

    def curvature(self, z: Array, y: Array, within: Array) -> tuple[Array, Array]:
        ends = np.abs(z) + within, np.maximum(np.abs(z) - within, 0)
        low, high = (1 / (2 + 2 * np.cosh(np.minimum(t, 700))) for t in ends)
        return low, high


@dataclass(frozen=True)
class SoftmaxLoss(Loss):
    """log sum_k exp(z_k) - y.z: attention to the state tokens of all classes is its mean."""

    name, joint, classes, aside = "softmax", True, True, "what all classes share and should not"

    def value(self, z: Array, y: Array) -> Array:
        top = z.max(axis=1)
        return np.asarray(top + np.log(np.exp(z - top[:, None]).sum(axis=1)) - (y * z).sum(axis=1))

    def mean(self, z: Array) -> Array:
        """The probabilities of all classes."""
        e = np.exp(z - z.max(axis=-1, keepdims=True))
        return np.asarray(e / e.sum(axis=-1, keepdims=True))

    def slope(self, z: Array, y: Array) -> Array:
        return self.mean(z) - y

    def slope_error(self, y: Array, off: Doubt) -> tuple[Array, Array]:
        worst = off.z.max(axis=1, keepdims=True)
        return 2.1 * worst + (8 + off.z.shape[1]) * U + 0 * off.z, np.ones_like(off.z)

    def curvature(self, z: Array, y: Array, within: Array) -> tuple[Array, Array]:
        """Factors by which probabilities p_a (1{a = b} - p_b), and so the Hessian, can change."""
        return np.exp(-4 * within), np.exp(4 * within)

    def hessians(self, x: Array, z: Array, y: Array, weight: Array, within: Array) -> tuple[Array, Array]:
        p, k = self.mean(z), range(z.shape[1])
        found = []
        for factor in self.curvature(z, y, within):
            share = weight * factor
            rows = [[(x * (share * p[:, a] * ((a == b) - p[:, b]))[:, None]).T @ x for b in k] for a in k]
            found.append(np.asarray(np.block(rows)))
        return found[0], found[1]

    def grounded(self, points: Array) -> Array:
        """Softmax does not see what all classes share, and at the optimum that is 0 where it is penalised."""
        return np.asarray(points - points.mean(axis=-2, keepdims=True))


@dataclass(frozen=True)
class Poisson(Loss):
    """exp(z) - y z: against a heavy sink the weight of the state is exp(z), up to a constant."""

    name, heavy, aside = "poisson", True, "how far the offset, which is not fitted, is from its value"

    def value(self, z: Array, y: Array) -> Array:
        with np.errstate(over="ignore"):
            return np.asarray((np.exp(z) - y * z).sum(axis=1))

    def slope(self, z: Array, y: Array) -> Array:
        with np.errstate(over="ignore"):
            return np.asarray(np.exp(z) - y)

    def slope_error(self, y: Array, off: Doubt) -> tuple[Array, Array]:
        with np.errstate(over="ignore"):
            bound = np.exp(off.largest() + off.z) * 1.001 + np.abs(y)
        return bound * (1.1 * off.z + 8 * U) + off.y, bound

    def curvature(self, z: Array, y: Array, within: Array) -> tuple[Array, Array]:
        return np.exp(z - within), np.exp(z + within)


@dataclass(frozen=True)
class Huber(Loss):
    """(z - y)^2 / 2 up to |z - y| = EDGE, and on from there along its tangents: a ramp gate cuts the residual (B2)."""

    name, hot, clipped, aside = "huber", True, True, "what the error of the fitted scale adds"
    flat = 1e-12  # samples come and go at the kink: directions that hardly any of them supports are left alone

    def value(self, z: Array, y: Array) -> Array:
        r = np.abs(z - y)
        return np.asarray(np.where(r <= EDGE, 0.5 * r * r, EDGE * (r - 0.5 * EDGE)).sum(axis=1))

    def slope(self, z: Array, y: Array) -> Array:
        return np.clip(z - y, -EDGE, EDGE)

    def slope_error(self, y: Array, off: Doubt) -> tuple[Array, Array]:
        return off.z + off.y + 2 * U * off.reach, np.full_like(off.z, EDGE)

    def curvature(self, z: Array, y: Array, within: Array) -> tuple[Array, Array]:
        r = np.abs(z - y)
        return (r + within < EDGE).astype(float), (r - within <= EDGE).astype(float)


@dataclass(frozen=True)
class Anchored(Loss):
    """A loss whose slope at z - y is a fitted anchor head of the block (A3); no audit knows its value."""

    name, hot, fitted = "anchors", True, True

    def value(self, z: Array, y: Array) -> Array:
        raise ArgumentError("the slope of loss 'anchors' is a fitted head of the block: it has no formula to audit")

    def slope(self, z: Array, y: Array) -> Array:
        return self.value(z, y)

    def slope_error(self, y: Array, off: Doubt) -> tuple[Array, Array]:
        return self.value(off.z, y), off.reach

    def curvature(self, z: Array, y: Array, within: Array) -> tuple[Array, Array]:
        return self.value(z, y), within


LINEAR, LOGISTIC, SOFTMAX, POISSON, HUBER, ANCHORS = (
    SquaredLoss(),
    LogisticLoss(),
    SoftmaxLoss(),
    Poisson(),
    Huber(),
    Anchored(),
)
LOSSES: dict[str, Loss] = {each.name: each for each in (LINEAR, LOGISTIC, SOFTMAX, POISSON, HUBER, ANCHORS)}
#: Those that one state token and no fitted head are enough for.
SIMPLE = tuple(name for name, each in LOSSES.items() if not (each.joint or each.fitted))


def named(loss: Loss | str) -> Loss:
    """The loss of a name; a loss is itself.

    >>> named("huber") is HUBER
    True
    """
    if isinstance(loss, Loss):
        return loss
    if loss not in LOSSES:
        raise ArgumentError(f"unknown loss {loss!r}{closest(str(loss), LOSSES)}; known: {', '.join(LOSSES)}")
    return LOSSES[loss]
