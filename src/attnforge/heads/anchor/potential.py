"""Potentials: strictly convex functions whose tangents are the logits of an anchor head (lemma A1 of docs/theory.md).

For phi strictly convex and an anchor L, the tangent of phi at L is affine in y, and

    beta * (phi'(L) (y - L) + phi(L)) = -beta * D_phi(y, L) + beta * phi(y),

so a softmax over tangents weighs anchor L by exp(-beta * D_phi(y, L)): the last term is common to all anchors. Spacing
and potential match when phi''(y) ~ 1/h(y)^2 for local spacing h; then kappa = beta * phi'' * h^2 / 2 does not depend on
place or scale. It is the one temperature knob: large is cold (selection), small is warm (interpolation). Each potential
has a flat coordinate in which its anchors are evenly spaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ...dtypes import Array
from ...errors import ArgumentError

Name = Literal["square", "log", "atan", "ends", "exact"]
NAMES = ("square", "log", "atan", "ends")


@dataclass(frozen=True)
class Potential:
    """A potential, shifted and scaled: z = sign * (y - shift) / scale.

    Near a singular end the flat coordinate would run off to infinity; `floor` is how close to the end anchors go.

    square  phi = z^2                              even spacing
    log     phi = -log z, z > 0                    even spacing of log z: one relative resolution over decades
    atan    phi = z atan z - log(1 + z^2)/2        even spacing of asinh z: fine near 0, coarse far out
    ends    phi = z atanh(z) / 2, |z| < 1          even spacing of atanh z: fine near both ends
    exact   two keys that are the function itself (sigmoid, tanh): no spacing

    >>> Potential("log").anchors(0.01, 100.0, count=5).round(4).tolist()
    [0.01, 0.1, 1.0, 10.0, 100.0]
    """

    name: Name
    shift: float = 0.0
    scale: float = 1.0
    sign: int = 1
    floor: float = 1e-300

    def __post_init__(self) -> None:
        if self.name not in (*NAMES, "exact"):
            raise ArgumentError(f"potential must be one of {', '.join(NAMES)}, got {self.name!r}")
        if not (self.scale > 0 and self.sign in (1, -1)):
            raise ArgumentError(
                f"a potential's scale must be positive and its sign 1 or -1, got {self.scale}, {self.sign}"
            )

    def flat(self, y: Array) -> Array:
        """The coordinate in which anchors are evenly spaced."""
        z = self.sign * (np.asarray(y, dtype=np.float64) - self.shift) / self.scale
        match self.name:
            case "log":
                return np.log(np.maximum(z, self.floor))
            case "atan":
                return np.arcsinh(z)
            case "ends":
                return np.arctanh(np.clip(z, -1 + max(self.floor, 2.0**-53), 1 - max(self.floor, 2.0**-53)))
        return z

    def unflat(self, t: Array) -> Array:
        """The point with flat coordinate t."""
        match self.name:
            case "log":
                z = np.exp(t)
            case "atan":
                z = np.sinh(t)
            case "ends":
                z = np.tanh(t)
            case _:
                z = t
        return self.sign * self.scale * z + self.shift

    def anchors(self, lo: float, hi: float, count: int, guards: int = 0) -> Array:
        """`count` anchors, increasing; `guards` of them lie beyond each end of [lo, hi]."""
        return np.sort(self.unflat(self.flat_anchors(lo, hi, count, guards)))

    def flat_anchors(self, lo: float, hi: float, count: int, guards: int = 0) -> Array:
        """The flat coordinates of `anchors`, evenly spaced."""
        ends = np.sort(self.flat(np.array([lo, hi])))
        step = (ends[1] - ends[0]) / (count - 1 - 2 * guards)
        return ends[0] + step * (np.arange(count) - guards)

    def keys(self, flat: Array, kappa: float, centre: float) -> tuple[Array, Array]:
        """Slopes and offsets of the logits slope * (y - centre) + offset for anchors at flat coordinates `flat`.

        A common affine function of y is dropped from all of them, so that the largest |logit| stays small.
        """
        step = abs(flat[1] - flat[0])
        z0 = self.sign * (centre - self.shift) / self.scale
        match self.name:
            case "log":  # phi' = -1/z, phi - phi' z = 1 - log z
                beta, slope, offset = 2 * kappa / step**2, -np.exp(-flat), 1 - flat
            case "atan":
                z, angle = np.sinh(flat), np.arctan(np.sinh(flat))
                beta, slope = 2 * kappa / step**2, angle
                offset = z * angle - 0.5 * np.log1p(z * z) - angle * z
            case "ends":  # phi' = (z/(1-z^2) + atanh z)/2 with z/(1-z^2) = sinh(2t)/2, phi - phi' z = -sinh(t)^2/2
                beta, slope, offset = (
                    2 * kappa / step**2,
                    0.25 * np.sinh(2 * flat) + 0.5 * flat,
                    -0.5 * np.sinh(flat) ** 2,
                )
            case _:  # tangents of (z - z0)^2, which differs from z^2 by an affine function: logits are small about z0
                away = flat - z0
                beta, slope, offset = kappa / step**2, 2 * away, -away * (away + 2 * z0)
        offset = beta * (offset + slope * z0)
        slope = beta * slope * self.sign / self.scale
        order = np.argsort(self.sign * flat)
        middle = len(flat) // 2
        return slope[order], (offset - offset[middle])[order]

    def to_json(self) -> list[object]:
        """A description that `from_json` turns back into an equal potential."""
        return [self.name, self.shift, self.scale, self.sign, self.floor]

    @classmethod
    def from_json(cls, data: list[Any]) -> Potential:
        """The potential that `to_json` described."""
        name, shift, scale, sign, floor = data
        return cls(name, float(shift), float(scale), int(sign), float(floor))

    def __str__(self) -> str:
        z = "y" if self.shift == 0 else f"(y {'-' if self.shift > 0 else '+'} {abs(self.shift):g})"
        z = z if self.scale == 1 else f"{z}/{self.scale:g}"
        return f"{self.name} in {z if self.sign == 1 else '-' + z}" if z != "y" or self.sign == -1 else self.name
