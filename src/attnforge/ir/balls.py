"""Ranges of affine maps of normed rows: a normed row lies in a ball, which is much smaller than the box around it.

n = c / sqrt(mean c^2 + eps) has |n|^2 <= d, so n @ w stays within sqrt(d) |w|_2; entry by entry one would get
sqrt(d) |w|_1. A `Ball` follows a value through affine maps as a sum of normed rows times folded weights, plus a rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .ops import Array

U = 2.0**-53


@dataclass(frozen=True)
class Part:
    """A normed row, |n|_2 <= radius (cell, token), times a weight (channel, width) that is within `slip` of exact."""

    radius: Array
    weight: Array
    slip: Array


@dataclass(frozen=True)
class Ball:
    """value = sum of n @ weight over the parts + a rest in [low, high], shapes (cell, token, width)."""

    parts: dict[int, Part]
    low: Array
    high: Array

    def interval(self) -> tuple[Array, Array]:
        """The range of the value that the ball shows."""
        reach = np.zeros_like(self.low)
        for part in self.parts.values():
            length = np.sqrt(np.sum(part.weight**2, 0)) + np.sqrt(np.sum(part.slip**2, 0))
            reach = reach + part.radius[..., None] * length * (1 + (len(part.weight) + 8) * U)
        reach = reach * (1 + (len(self.parts) + 4) * U)
        return np.nextafter(self.low - reach, -np.inf), np.nextafter(self.high + reach, np.inf)


def normed(i: int, largest: Array, eps: float, width: int) -> Ball:
    """The ball of operation i, a norm of rows whose mean square is at most `largest` (cell, token)."""
    share = largest / (largest + eps) if eps > 0 else np.ones_like(largest)
    radius = np.sqrt(width * share) * (1 + 16 * U)
    nothing = np.zeros((*largest.shape, width))
    return Ball({i: Part(radius, np.eye(width), np.zeros((width, width)))}, nothing, nothing)


def affine(reads: list[tuple[Ball | None, Array, Array]], weights: tuple[Array, ...], bias: Array) -> Ball | None:
    """The ball of sum_i value_i @ weight_i + bias; a value without a ball joins the rest with its interval."""
    if all(ball is None for ball, _, _ in reads):
        return None
    parts: dict[int, Part] = {}
    low, high, size = bias, bias, np.abs(bias)
    for (ball, first, last), weight in zip(reads, weights, strict=True):
        if ball is not None:
            first, last = ball.low, ball.high
            for i, part in ball.parts.items():
                steps = (len(weight) + len(weights) + 2) * U
                new = part.weight @ weight
                slip = part.slip @ np.abs(weight) * (1 + steps) + steps * (np.abs(part.weight) @ np.abs(weight))
                old = parts.get(i)
                if old is not None:
                    slip = slip + old.slip + 2 * U * (np.abs(new) + np.abs(old.weight))
                    new = new + old.weight
                parts[i] = Part(part.radius, new, slip)
        up, down = np.maximum(weight, 0.0), np.minimum(weight, 0.0)
        low, high = low + first @ up + last @ down, high + last @ up + first @ down
        size = size + np.maximum(np.abs(first), np.abs(last)) @ np.abs(weight)
    margin = (sum(len(w) for w in weights) + 2 * len(weights) + 3) * U * size
    return Ball(parts, low - margin, high + margin)
