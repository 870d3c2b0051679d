"""A declared Lipschitz constant against samples: it cannot be proved from values, but it can be refuted.

A jump is found by bisection: halving the segment between two points keeps the jump in one of the halves, while the
distance shrinks, so that the slope doubles with every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..errors import ArgumentError
from .target import VALUE_ULPS, Array, Target

STEEPEST = 24  # segments that are bisected
HALVINGS = 30
PAIRS = 512  # segments in arbitrary directions


def refuse_samples(target: Target, lipschitz: float) -> None:
    """Raise `ArgumentError` with a witness when pairs of samples in arbitrary directions contradict the constant."""
    low, high = _ends(target)
    rng = np.random.default_rng(5)
    a = low + rng.random((PAIRS, len(low))) * (high - low)
    reach = 10.0 ** rng.uniform(-4, 0, (PAIRS, 1))
    b = np.clip(a + reach * rng.normal(size=a.shape) * (high - low), low, high)
    f_a, f_b = target(a, "Lipschitz check"), target(b, "Lipschitz check")
    _refuse(target, a, b, f_a, f_b, lipschitz)
    steep = np.argsort(_slopes(a, b, f_a, f_b))[::-1][:STEEPEST]
    _bisect(target, a[steep], b[steep], f_a[steep], f_b[steep], lipschitz)


def refuse_table(
    target: Target, shape: Sequence[int], points: Callable[[int, int], Array], values: Array, lipschitz: float
) -> None:
    """The same for neighbours of a grid, of which the steepest are bisected."""
    low, high = _ends(target)
    table = values.reshape(*shape, -1)
    ends: list[list[Array]] = []
    for axis, size in enumerate(shape):
        if size < 2:
            continue
        change = np.abs(np.diff(table, axis=axis)).max(-1)
        worst = np.argsort(change, axis=None)[::-1][:STEEPEST]
        first = np.stack(np.unravel_index(worst, change.shape), -1)
        second = first.copy()
        second[:, axis] += 1
        rows = [np.ravel_multi_index(tuple(index.T), tuple(shape)) for index in (first, second)]
        places = [np.concatenate([points(int(i), int(i) + 1) for i in row]) for row in rows]
        ends.append([*(np.clip(p, low, high) for p in places), *(values[row] for row in rows)])
    if ends:
        a, b, f_a, f_b = (np.concatenate([each[k] for each in ends]) for k in range(4))
        _refuse(target, a, b, f_a, f_b, lipschitz)
        _bisect(target, a, b, f_a, f_b, lipschitz)


def _bisect(target: Target, a: Array, b: Array, f_a: Array, f_b: Array, lipschitz: float) -> None:
    for _ in range(HALVINGS):
        middle = 0.5 * (a + b)
        f_m = target.fresh(middle)
        left = (_slopes(a, middle, f_a, f_m) >= _slopes(middle, b, f_m, f_b))[:, None]
        a, b = np.where(left, a, middle), np.where(left, middle, b)
        f_a, f_b = np.where(left, f_a, f_m), np.where(left, f_m, f_b)
        _refuse(target, a, b, f_a, f_b, lipschitz)


def _ends(target: Target) -> tuple[Array, Array]:
    return target.box.lower.reshape(-1).numpy(), target.box.upper.reshape(-1).numpy()


def _slopes(a: Array, b: Array, f_a: Array, f_b: Array) -> Array:
    far = np.linalg.norm(a - b, axis=-1)
    return np.abs(f_a - f_b).max(-1) / np.maximum(far, 1e-300) * (far > 0)


def _refuse(target: Target, a: Array, b: Array, f_a: Array, f_b: Array, lipschitz: float) -> None:
    noise = 4 * VALUE_ULPS * target.unit * max(float(np.abs(f_a).max()), float(np.abs(f_b).max()))
    place = 4 * target.unit * (np.linalg.norm(a, axis=-1) + np.linalg.norm(b, axis=-1))
    far = np.linalg.norm(a - b, axis=-1) + place
    excess = np.abs(f_a - f_b).max(-1) - noise - lipschitz * far * (1 + 1e-12)
    at = int(np.argmax(excess))
    if excess[at] > 0:
        slope = float(np.abs(f_a[at] - f_b[at]).max()) / max(float(np.linalg.norm(a[at] - b[at])), 1e-300)
        shown = [np.array2string(p[at], precision=8, threshold=8) for p in (a, b)]
        jump = " (a jump, it seems: no constant is large enough)" if slope > 1e3 * max(lipschitz, 1.0) else ""
        raise ArgumentError(
            f"lipschitz = {lipschitz:g} is contradicted by samples of {target.name}: between {shown[0]} and {shown[1]} "
            f"it changes {slope:.4g} times the distance{jump}; declare a larger constant, or leave it out and get a "
            "calibrated result"
        )
