"""The rules of the kernel for fitted estimators, against optima that are known or found apart."""

from __future__ import annotations

import math
import random

import pytest
from flint import arb, arb_mat, ctx

from attnforge.kernel.balls import ZERO, NotProved, working
from attnforge.kernel.incontext.enclosure import lengths, minimiser, thresholded
from attnforge.kernel.incontext.objective import LOGISTIC, POISSON, SQUARE, Huber, Linear, Softmax, diagonal

SIZES = [1e-60, 1e-30, 1e-10, 1e-4, 1e-1]  # of distances, of weights around 1: float64 weights are 1e-16 off at best


def table(source: random.Random, n: int, d: int) -> arb_mat:
    return arb_mat([[arb(source.gauss(0, 1)) for _ in range(d)] for _ in range(n)])


def vector(source: random.Random, n: int) -> list[arb]:
    return [arb(source.gauss(0, 1)) for _ in range(n)]


@pytest.mark.parametrize("size", SIZES)
def test_distances_are_those_that_were_made(size: float) -> None:
    """K60, K61: losses whose optimum is v by construction, looked at from v + e: the balls hold -e, and hardly more."""
    for seed, loss in enumerate((SQUARE, LOGISTIC, POISSON) * 2):
        source = random.Random(seed)
        with working():
            ctx.prec = 256
            rows, weight, penalty = table(source, 12, 3), [arb(source.random()) for _ in range(12)], [arb(0.01)] * 3
            v, e = vector(source, 3), [arb(size) * x for x in vector(source, 3)]
            bare = Linear(rows, [ZERO] * 12, weight, penalty, loss)
            # a label more moves the gradient by weight times row: choose three that make it 0 at v
            pulled = arb_mat([[weight[i] * rows[i, j] for i in range(3)] for j in range(3)])
            three = pulled.solve(arb_mat(3, 1, bare.gradient(v))).entries()
            problem = Linear(rows, [*three, *[ZERO] * 9], weight, penalty, loss)
            found = minimiser(problem, [a + b for a, b in zip(v, e, strict=True)])
            assert all((-b).overlaps(f) for f, b in zip(found, e, strict=True))
            low, high = lengths(found)
            meant = sum((b * b for b in e), ZERO).sqrt()
            assert low <= meant.upper() and meant.lower() <= high and high < meant * 1.000001


def test_what_has_no_single_optimum_is_not_proved() -> None:
    """K61: columns that are multiples, separable classes, an optimum at infinity."""
    with working():
        twice = arb_mat([[1, 2], [2, 4], [3, 6]])
        for loss, rows, labels in ((SQUARE, twice, [1, 2, 4]), (LOGISTIC, arb_mat([[-1], [1], [2]]), [0, 1, 1]),
                                   (POISSON, arb_mat([[1], [2], [3]]), [0, 0, 0])):  # fmt: skip
            width = rows.ncols()
            problem = Linear(rows, [arb(y) for y in labels], [arb(1)] * 3, [ZERO] * width, loss)
            with pytest.raises(NotProved):
                minimiser(problem, [arb(0.1)] * width)
            strong = Linear(rows, [arb(y) for y in labels], [arb(1)] * 3, [arb(0.01)] * width, loss)
            assert all(x.is_finite() for x in minimiser(strong, [arb(0.1)] * width))


@pytest.mark.parametrize("size", SIZES)
def test_thresholds_find_the_columns_in_use(size: float) -> None:
    """K62: an optimum with signs and columns that are not in use, made by choosing labels and thresholds."""
    source = random.Random(1)
    with working():
        ctx.prec = 256
        for _ in range(10):
            rows, d = table(source, 9, 5), 5
            v = [arb(source.choice([-1, 0, 1])) * (arb(size) + abs(x)) for x in vector(source, d)]
            bare = Linear(rows, vector(source, 9), [arb(1)] * 9, [arb(0.1)] * d)
            slopes = bare.gradient(v)
            shift = [arb(source.choice([0.9, -0.5, 0])) if x.is_zero() else -x.sgn() for x in v]
            threshold = [arb(1)] * d
            # gradient g(v) of labels y; moved to `shift` by a linear term: labels that differ by rows times u
            gram = rows.transpose() * rows
            u = gram.solve(arb_mat(d, 1, [s - w for s, w in zip(slopes, shift, strict=True)]))
            labels = [y + x for y, x in zip(bare.labels, (rows * u).entries(), strict=True)]
            problem = Linear(rows, labels, bare.weight, bare.penalty)
            at = [x + arb(size) * arb(source.gauss(0, 1)) for x in v]
            found = thresholded(problem, threshold, at)
            assert all((a + f - x).contains(0) for a, f, x in zip(at, found, v, strict=True))
            slack = [t if abs(s) == 1 else t * 0.4 for s, t in zip(shift, threshold, strict=True)]
            if any(0.4 < abs(float(s)) < 1 for s in shift):
                other = thresholded(problem, slack, at)
                assert not all((a + f - x).contains(0) for a, f, x in zip(at, other, v, strict=True))


def test_classes_share_what_they_may() -> None:
    """K63: the same probabilities for weights that are shifted alike; the optimum has no shared part."""
    source = random.Random(2)
    with working():
        rows, labels = table(source, 15, 2), [source.randrange(3) for _ in range(15)]
        problem = Softmax(rows, labels, [arb(1)] * 15, [arb(0.3), ZERO], 3)
        start = [x / 8 for x in vector(source, 6)]
        found = [a + b for a, b in zip(start, minimiser(problem, start), strict=True)]
        assert all(sum(found[j::2], ZERO).contains(0) for j in range(2))
        alone = [g - s for g, s in zip(problem.gradient(found), problem._shared(found) * 3, strict=True)]
        assert all(x.contains(0) for x in alone), "and without what was added the gradient is 0 as well"
        two = Softmax(rows, [y % 2 for y in labels], [arb(1)] * 15, [arb(0.3), arb(0.3)], 2)
        pair = minimiser(two, [ZERO] * 4)
        single = Linear(rows, [arb(y % 2) for y in labels], [arb(1)] * 15, [arb(0.15)] * 2, LOGISTIC)
        one = minimiser(single, [ZERO] * 2)
        assert all((pair[2 + j] - pair[j] - one[j]).contains(0) for j in range(2))


def test_samples_at_the_kink_have_every_curvature() -> None:
    """K64: the gradient of a joint objective by differences; a sample exactly at its kink is not guessed."""
    rows, ones = arb_mat([[arb(x)] for x in (-1, 0, 1, 2, 3)]), [arb(1)] * 5
    with working():
        for labels in ([0, 0, 1, 1, 9], [1, -1, 1, -1, 1]):
            problem = Huber(rows, [arb(y) for y in labels], ones, [arb(0.1)], arb(1.35))
            at = [arb(0.7), arb(0.9)]

            def value(v: arb, t: arb, labels: list[int] = labels) -> arb:
                total = arb(0.1) * v * v
                for x, y in zip((-1, 0, 1, 2, 3), labels, strict=True):
                    u = abs(v * x - y) / t
                    total += t + t * (u * u if u <= 1.35 else 2 * arb(1.35) * u - arb(1.35) ** 2)
                return total

            h = arb(2) ** -40
            slopes = ((value(at[0] + h, at[1]) - value(at[0] - h, at[1])) / (4 * h),
                      (value(at[0], at[1] + h) - value(at[0], at[1] - h)) / (4 * h))  # fmt: skip
            for meant, got in zip(slopes, problem.gradient(at), strict=True):
                assert abs(meant - got) < 1e-20
        kink = Huber(arb_mat([[1]]), [arb(0)], [arb(1)], [ZERO], arb(1.5))
        held = kink.hessian([arb(1.5), arb(1)])
        assert held[0, 0].contains(0) and held[0, 0].contains(1), "neither side is taken for granted"
        assert kink.hessian([arb(1.4), arb(1)])[0, 0] == 1 and kink.hessian([arb(1.6), arb(1)])[0, 0] == 0


def test_a_gaussian_kernel_has_no_negative_eigenvalue() -> None:
    """K65: its least eigenvalue is at least the penalty's, so a residual bounds the distance; both ways agree."""
    source = random.Random(3)
    with working():
        for gamma in (1e-3, 0.5, 20.0):
            x = [source.gauss(0, 1) for _ in range(8)]
            gram = arb_mat([[(-arb(gamma) * (arb(a) - arb(b)) ** 2).exp() for b in x] for a in x])
            for alpha in (1e-6, 0.5):
                matrix = gram + diagonal([arb(alpha)] * 8)
                residual = vector(source, 8)
                off = matrix.solve(arb_mat(8, 1, residual)).entries()
                assert lengths(off)[1] <= lengths(residual)[1] / alpha * (1 + 1e-20)
                assert math.isfinite(float(lengths(off)[1]))
