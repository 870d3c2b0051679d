"""What an estimator minimises, in the coordinates of a fit: gradients and Hessians in ball arithmetic.

A fit has coordinates v, coefficients c_j = v_j y_scale / x_scale_j; the stored means and scales choose them, exactly,
and claim nothing (lemma K60). Data, sample weights and parameters are the exact numbers that the file holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from flint import arb, arb_mat

from ..balls import ONE, ZERO

Vector = list[arb]
HALF = arb(0.5)


class Stationary(Protocol):
    """A convex objective: its gradient at a point, and a matrix that holds all of its Hessians on a box."""

    def gradient(self, at: Vector) -> Vector: ...

    def hessian(self, box: Vector) -> arb_mat: ...


@dataclass(frozen=True)
class Loss:
    """l(z, y), convex in its prediction: slope and curvature by z."""

    slope: Callable[[arb, arb], arb]
    curvature: Callable[[arb], arb]


SQUARE = Loss(lambda z, y: z - y, lambda z: ONE)
LOGISTIC = Loss(lambda z, y: 1 / (1 + (-z).exp()) - y, lambda z: 1 / (2 + 2 * z.cosh()))
POISSON = Loss(lambda z, y: z.exp() - y, lambda z: z.exp())


@dataclass(frozen=True)
class Linear:
    """sum_i weight_i l(offset + row_i.v, label_i) + sum_j penalty_j v_j^2 / 2 (lemma K60)."""

    rows: arb_mat
    labels: Vector
    weight: Vector
    penalty: Vector
    loss: Loss = SQUARE
    offset: arb = ZERO

    def _predictions(self, at: Vector) -> Vector:
        return [z + self.offset for z in product(self.rows, at)]

    def gradient(self, at: Vector) -> Vector:
        seen = zip(self.weight, self._predictions(at), self.labels, strict=True)
        sums = product(self.rows.transpose(), [w * self.loss.slope(z, y) for w, z, y in seen])
        return [s + p * v for s, p, v in zip(sums, self.penalty, at, strict=True)]

    def hessian(self, box: Vector) -> arb_mat:
        shares = [w * self.loss.curvature(z) for w, z in zip(self.weight, self._predictions(box), strict=True)]
        return gram(self.rows, shares) + diagonal(self.penalty)


@dataclass(frozen=True)
class Softmax:
    """sum_i weight_i (log sum_k exp z_ik - z_i,label) + penalties, v the classes' coordinates one after the other.

    The sum does not see what all classes share: half of its square is added, which is 0 at the minimiser where that is
    penalised, and picks the one at which it is 0 where it is not (lemma K63).
    """

    rows: arb_mat
    labels: Sequence[int]
    weight: Vector
    penalty: Vector
    classes: int

    def _means(self, at: Vector) -> list[Vector]:
        """The probabilities, a list for every class: 1 over 1 and the exponentials of differences."""
        width = self.rows.ncols()
        z = [product(self.rows, at[k * width : (k + 1) * width]) for k in range(self.classes)]
        return [
            [1 / sum([(other - own).exp() for m, other in enumerate(all_z) if m != k], ONE)
             for all_z in zip(*z, strict=True) for own in (all_z[k],)] for k in range(self.classes)
        ]  # fmt: skip

    def gradient(self, at: Vector) -> Vector:
        out: Vector = []
        shared = self._shared(at)
        for k, means in enumerate(self._means(at)):
            apart = [w * (p - (label == k)) for w, p, label in zip(self.weight, means, self.labels, strict=True)]
            own = at[k * len(self.penalty) : (k + 1) * len(self.penalty)]
            sums = product(self.rows.transpose(), apart)
            out += [s + p * v + c for s, p, v, c in zip(sums, self.penalty, own, shared, strict=True)]
        return out

    def _shared(self, at: Vector) -> Vector:
        width = len(self.penalty)
        return [sum(at[j::width], ZERO) for j in range(width)]

    def hessian(self, box: Vector) -> arb_mat:
        means, width = self._means(box), len(self.penalty)
        out = [[ZERO] * (self.classes * width) for _ in range(self.classes * width)]
        common = diagonal([ONE] * width)
        for a in range(self.classes):
            for b in range(a + 1):
                factor = [w * (p * (1 - p) if a == b else -p * q)
                          for w, p, q in zip(self.weight, means[a], means[b], strict=True)]  # fmt: skip
                block = gram(self.rows, factor) + common
                if a == b:
                    block = block + diagonal(self.penalty)
                for i in range(width):
                    for j in range(width):
                        out[a * width + i][b * width + j] = out[b * width + j][a * width + i] = block[i, j]
        return arb_mat(out)


@dataclass(frozen=True)
class Huber:
    """sum_i weight_i (t + t H(r_i/t)) + sum_j penalty_j v_j^2 in (v, t), H(u) = u^2 up to |u| = epsilon and straight
    beyond: convex in both together; half of its gradient (lemma K64)."""

    rows: arb_mat
    labels: Vector
    weight: Vector
    penalty: Vector
    epsilon: arb

    def _residuals(self, at: Vector) -> Vector:
        """r_i / t."""
        *v, scale = at
        return [(z - y) / scale for z, y in zip(product(self.rows, v), self.labels, strict=True)]

    def gradient(self, at: Vector) -> Vector:
        clipped = [u.max(-self.epsilon).min(self.epsilon) for u in self._residuals(at)]
        sums = product(self.rows.transpose(), [w * c for w, c in zip(self.weight, clipped, strict=True)])
        own = [s + p * v for s, p, v in zip(sums, self.penalty, at, strict=False)]
        return [*own, HALF * sum([w * (1 - c * c) for w, c in zip(self.weight, clipped, strict=True)], ZERO)]

    def hessian(self, box: Vector) -> arb_mat:
        """Samples at the kink have every curvature between 0 and 1."""
        scale, residuals = box[-1], self._residuals(box)
        inside = [ONE if abs(u) < self.epsilon else ZERO if abs(u) > self.epsilon else arb(0.5, 0.5) for u in residuals]
        table = self.rows.tolist()
        rows = arb_mat([[*row, -u] for row, u in zip(table, residuals, strict=True)])
        return gram(rows, [w * c / scale for w, c in zip(self.weight, inside, strict=True)]) + diagonal(
            [*self.penalty, ZERO]
        )


def product(matrix: arb_mat, vector: Vector) -> Vector:
    """A matrix times a vector."""
    return list((matrix * arb_mat(len(vector), 1, vector)).entries())


def gram(rows: arb_mat, factor: Vector) -> arb_mat:
    """sum_i factor_i row_i row_i^T."""
    table, width = rows.entries(), rows.ncols()
    scaled = [x * factor[i // width] for i, x in enumerate(table)]
    return rows.transpose() * arb_mat(rows.nrows(), width, scaled)


def diagonal(entries: Vector) -> arb_mat:
    """A diagonal matrix."""
    n = len(entries)
    return arb_mat(n, n, [entries[i // n] if i // n == i % n else ZERO for i in range(n * n)])
