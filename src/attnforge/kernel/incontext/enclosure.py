"""Where the gradient of a convex objective vanishes: a box around a point that holds the one minimiser."""

from __future__ import annotations

from collections.abc import Sequence

from flint import arb, arb_mat

from ..balls import ZERO, NotProved, largest, size
from .objective import Linear, Stationary, Vector, diagonal, product

NEWTON = 12  # steps from the stored weights: near the optimum each doubles the digits, 256 bits are 5 from float32
ROUNDS = 12  # boxes that are tried: each is half as wide again as what the last one asked for, so 100 times in all
ACTIVE = 24  # sets of coordinates that are tried for a soft threshold: each mends all that was wrong with the last
TINY = arb(2) ** -180  # of the largest coordinate: far above the rounding of 256 bits, far below a float64's


def minimiser(problem: Stationary, at: Vector) -> Vector:
    """Balls that hold v* - at, v* the only minimiser (lemma K61, Newton and Krawczyk); `NotProved` where no box around
    the point that Newton's steps lead to can be shown to hold one."""
    point, one = at, diagonal([arb(1)] * len(at))
    try:
        for _ in range(NEWTON):
            inverse = problem.hessian(point).inv().mid()
            step = product(inverse, problem.gradient(point))
            least = TINY * largest([abs(x) for x in (*point, *step)]) + arb(2) ** -2000
            if all(size(s) <= least for s in step):
                break
            point = [(p - s).mid() for p, s in zip(point, step, strict=True)]
        step = product(inverse, problem.gradient(point))
        radius = [2 * size(s) + least for s in step]
        for _ in range(ROUNDS):
            around = [(-r).union(r) for r in radius]
            rest = one - inverse * problem.hessian([p + r for p, r in zip(point, around, strict=True)])
            found = [m - s for m, s in zip(product(rest, around), step, strict=True)]
            if all(size(f) < r for f, r in zip(found, radius, strict=True)):
                return [f + p - a for f, p, a in zip(found, point, at, strict=True)]
            radius = [3 * size(f) / 2 + least for f in found]
    except ZeroDivisionError:
        raise NotProved("the data do not determine the weights") from None
    raise NotProved("no box around the weights could be shown to hold an optimum")


def thresholded(problem: Linear, threshold: Vector, at: Vector) -> Vector:
    """The same for a quadratic plus sum_j threshold_j |v_j|: a set of coordinates with signs, guessed and shown to be
    the optimum's (lemma K62)."""
    signs = [0 if v == 0 else 1 if v > 0 else -1 for v in at]
    whole = gram_of(problem)
    right = [-g for g in problem.gradient([ZERO] * len(at))]
    for _ in range(ACTIVE):
        used = [j for j, t in enumerate(threshold) if signs[j] or t.is_zero()]
        found = [ZERO] * len(at)
        if used:
            small = arb_mat([[whole[i, j] for j in used] for i in used])
            try:
                solved = small.solve(arb_mat(len(used), 1, [right[j] - signs[j] * threshold[j] for j in used]))
            except ZeroDivisionError:
                raise NotProved("the columns in use do not determine the weights") from None
            for j, v in zip(used, solved.entries(), strict=True):
                found[j] = v
        slopes = [s - r for s, r in zip(product(whole, found), right, strict=True)]
        wrong = [j for j in used if not threshold[j].is_zero() and not signs[j] * found[j] > 0]
        pulled = [j for j in range(len(at)) if j not in used and not size(slopes[j]) < threshold[j]]
        if not wrong and not pulled:
            return [f - v for f, v in zip(found, at, strict=True)]
        for j in wrong:
            signs[j] = 0
        for j in pulled:
            signs[j] = -1 if slopes[j] > 0 else 1
    raise NotProved("which columns are in use at the optimum could not be settled")


def gram_of(problem: Linear) -> arb_mat:
    """The Hessian of a quadratic, which is the same everywhere."""
    return problem.hessian([ZERO] * problem.rows.ncols())


def lengths(found: Sequence[arb]) -> tuple[arb, arb]:
    """The least and the largest length of a vector of balls."""
    low = sum([x.abs_lower() ** 2 for x in found], ZERO).sqrt()
    high = sum([size(x) ** 2 for x in found], ZERO).sqrt()
    return low.lower(), high.upper()
