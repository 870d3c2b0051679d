"""A fitted estimator's file: how far its weights, coefficients and intercepts are from the optimum of its data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from flint import arb, arb_mat, ctx

from ...errors import CertificateError
from ..balls import ONE, ZERO, NotProved, down, largest, up, working
from ..file import Saved
from .enclosure import lengths, minimiser, thresholded
from .objective import LOGISTIC, POISSON, Huber, Linear, Softmax, Stationary, Vector

WIDE = 256  # bits: centring may cost 53, the worst Gram matrix that a network is made for 52, its square the same again
MOST_WORK = 1 << 26  # multiplications of a Hessian and its inverse: half a minute
MOST_PAIRS = 1 << 23  # of rows, times their columns, for a kernel between all of them: seconds
SMALL = 8  # columns that cost as much as one number does by itself
ROUNDED = arb(2) ** -49  # of a coefficient: the rounding of three operations, and room
TINY = arb(2) ** -1020  # what underflow may have cost besides
SOLVED = 256  # rows up to which a kernel's system is solved; beyond, its least eigenvalue is at least the penalty
WRONG = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, ZeroDivisionError)


@dataclass(frozen=True)
class Distance:
    """Of one fit: ||w - w*|| in the prompt's units lies between `least` and `most`; coefficients, intercepts and
    Huber's scale (in the prompt's units) are off by no more than what is listed."""

    least: float
    most: float
    coefficients: tuple[float, ...]
    intercepts: tuple[float, ...]
    scale: float = 0.0


def prove_estimator(saved: Saved) -> tuple[Distance, ...]:
    """The distances of all fits of a file; `NotProved` where there is no proof, `CertificateError` where the file is
    not one of an estimator."""
    with _wide():
        try:
            fit = _Fit(saved)
            return tuple(fit.distance(k) for k in range(fit.count))
        except WRONG as error:
            raise CertificateError(f"the file does not hold the data of an estimator: {error!r}") from error


def beyond_reach(samples: int, unknowns: int, fits: int = 1, pairs: bool = False) -> str:
    """Why so many fits of so many samples and unknowns are too much for a proof; empty where they are not.

    `pairs`: a kernel between all rows, of which `unknowns` counts the columns.
    """
    work = samples * samples * (unknowns + SMALL) if pairs else fits * (samples + unknowns) * (unknowns + SMALL) ** 2
    if work > (MOST_PAIRS if pairs else MOST_WORK):
        return (
            f"{samples:,} rows and {unknowns:,} {'columns' if pairs else 'unknowns'} are more than the kernel looks at"
        )
    return ""


@contextmanager
def _wide() -> Iterator[None]:
    with working():
        ctx.prec = WIDE
        yield


class _Fit:
    """A file's numbers, and the objectives that they state."""

    def __init__(self, saved: Saved):
        config = saved.header["config"]
        self.name, self.params = str(config["estimator"]), config["params"]
        if self.name not in OBJECTIVES:
            raise NotProved(f"the kernel has no rule for {self.name}")
        tensors = saved.tensors
        if any(not all(map(math.isfinite, t.numbers)) for t in tensors.values()):
            raise CertificateError("a number of the file is not finite")
        self.rows = tensors["rows"].rows()
        self.samples, self.width = tensors["rows"].shape
        self.count, self.states, self.unknowns = tensors["weights"].shape
        pairs = self.name == KERNEL
        why = beyond_reach(self.samples, self.width if pairs else self.unknowns * self.states, self.count, pairs)
        if why:
            raise NotProved(why)
        self.labels = _exact(tensors["labels"].rows(), self.samples)
        self.sample_weight = [arb(w) for w in tensors["sample weight"].numbers]
        if len(self.sample_weight) != self.samples or any(w < 0 for w in self.sample_weight):
            raise CertificateError("sample weights are numbers that are not negative, one for each row")
        self.total = sum(self.sample_weight, ZERO)
        self.weights = tensors["weights"].rows()
        self.coefficients, self.intercepts = tensors["coefficients"].rows(), tensors["intercepts"].rows()
        self.mean, self.scale = tensors["x mean"].rows(), tensors["x scale"].rows()
        self.unit, self.label_mean = tensors["y scale"].rows(), tensors["y mean"].rows()
        self.typical: Vector | None = None  # mean sizes of the columns of rows and labels
        self.matrix: arb_mat | None = None  # of a kernel between all rows, the same for all fits
        self.label_scale = arb(tensors["scale"].numbers[0])
        self.intercept = bool(self.params.get("fit_intercept", False))
        if any(not s > 0 for s in (*self.unit, *(s for row in self.scale for s in row))):
            raise CertificateError("scales are positive")

    def number(self, name: str) -> arb:
        """A parameter, exactly."""
        value = self.params[name]
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            raise CertificateError(f"{name} must be a number that is not negative, got {value!r}")
        return arb(value)

    def distance(self, k: int) -> Distance:
        """Of fit k."""
        return OBJECTIVES[self.name](self, k)

    def moved(self, k: int, mean: Vector) -> arb_mat:
        """Rows less a mean, over the scales of fit k; a column of ones behind them where there are more unknowns."""
        scale = [arb(s) for s in self.scale[k]]
        ones = [ONE] if self.intercept and self.name in SHIFTED else []
        return arb_mat([[(arb(x) - m) / s for x, m, s in zip(row, mean, scale, strict=True)] + ones
                        for row in self.rows])  # fmt: skip

    def penalties(self, k: int, strength: arb) -> Vector:
        """strength / x_scale^2, and 0 for an intercept."""
        free = [ZERO] if self.intercept and self.name in SHIFTED else []
        return [strength / arb(s) ** 2 for s in self.scale[k]] + free

    def stated(self, k: int, found: list[Vector], mean: Vector, shift: Vector) -> Distance:
        """Distances from v* - w for every state: `shift` is what an intercept is more than its coordinate, over the
        unit, at coefficients 0; where there is no such coordinate, all of it."""
        coefficients, intercepts, apart = [], [], []
        for state, off in enumerate(found):
            at, number = [arb(w) for w in self.weights[k][state]], k * self.states + state
            apart += off
            own, best = (self.in_units(k, w, mean, shift[state])
                         for w in (at, [a + o for a, o in zip(at, off, strict=False)]))  # fmt: skip
            stored = [arb(c) for c in self.coefficients[number]]
            _same(stored, own[0], [abs(c) for c in stored], ROUNDED)
            coefficients += [up(abs(c - b)) for c, b in zip(stored, best[0], strict=True)]
            if self.intercept:
                stored = [arb(self.intercepts[number])]
                _same(stored, [own[1]], [self.sizes(own[0], mean) + abs(shift[state]) + abs(own[1])],
                      ROUNDED * (self.samples + self.width))  # fmt: skip
                intercepts.append(up(abs(stored[0] - best[1])))
        return _stated(apart, coefficients, intercepts)

    def in_units(self, k: int, w: Vector, mean: Vector, shift: arb) -> tuple[Vector, arb]:
        """Weights of fit k in the units of the data: coefficients, and the intercept."""
        factor = ONE if self.name == "PoissonRegressor" else arb(self.unit[k])
        slopes = [a * factor / arb(s) for a, s in zip(w, self.scale[k], strict=False)]
        offset = w[-1] * factor if self.name in SHIFTED else ZERO
        return slopes, shift + offset - sum([s * m for s, m in zip(slopes, mean, strict=True)], ZERO)

    def sizes(self, slopes: Vector, mean: Vector) -> arb:
        """What the rounding of means and of an intercept is measured by: the mean sizes of all that it is made of."""
        if self.typical is None:
            count = max(self.total.mid(), arb(2) ** -2000)
            columns = [*zip(*self.rows, strict=True), *zip(*self.labels, strict=True)]
            self.typical = [
                sum([w * abs(arb(x)) for w, x in zip(self.sample_weight, column, strict=True)], ZERO) / count
                for column in columns
            ]
        labels = largest(self.typical[self.width :])
        seen = zip(slopes, mean, self.typical, strict=False)
        return sum([abs(s) * (abs(m) + t) for s, m, t in seen], ZERO) + labels

    def means(self) -> tuple[Vector, arb_mat]:
        """The weighted means of rows and labels, zeros where no intercept is fitted."""
        outputs = len(self.labels[0])
        if not self.intercept:
            return [ZERO] * self.width, arb_mat(1, outputs)
        share = [w / self.total for w in self.sample_weight]
        columns = zip(*self.rows, strict=True)
        mean = [sum([s * arb(x) for s, x in zip(share, column, strict=True)], ZERO) for column in columns]
        return mean, arb_mat(1, self.samples, share) * arb_mat(self.labels)

    def squares(self, k: int, strength: arb) -> tuple[Linear, Vector, arb]:
        """Half the sum of squares of fit k, a penalty strength c^2 / 2 beside it; the means."""
        mean, label = self.means()
        labels = [(row[k] - label[0, k]) / arb(self.unit[k]) for row in self.labels]
        return Linear(self.moved(k, mean), labels, self.sample_weight, self.penalties(k, strength)), mean, label[0, k]

    def given(self) -> Vector:
        """The means that a file names, for which an intercept that is fitted makes up."""
        return [arb(m) if self.intercept else ZERO for m in self.mean]

    def at(self, k: int) -> Vector:
        """The weights of fit k whose coordinates are fitted, all states one after the other."""
        kept = self.width + (self.intercept and self.name in SHIFTED)
        return [arb(w) for state in self.weights[k] for w in state[:kept]]

    def pinned(self, k: int, must: arb) -> Vector:
        """How far the last coordinate is from what it must be, where it is not fitted."""
        return [] if self.intercept else [must - arb(self.weights[k][0][-1])]


def _least_squares(fit: _Fit, k: int) -> Distance:
    alpha = fit.params.get("alpha", 0.0)
    strength = (
        arb(alpha[k]) if isinstance(alpha, list) else arb(0) if "alpha" not in fit.params else fit.number("alpha")
    )
    if strength < 0:
        raise CertificateError("alpha is not negative")
    problem, mean, label = fit.squares(k, strength)
    return fit.stated(k, [minimiser(problem, fit.at(k))], mean, [label])


def _elastic_net(fit: _Fit, k: int) -> Distance:
    alpha, ratio = fit.number("alpha"), ONE if fit.name == "Lasso" else fit.number("l1_ratio")
    if ratio > 1:
        raise CertificateError("l1_ratio is at most 1")
    problem, mean, label = fit.squares(k, fit.total * alpha * (1 - ratio))
    threshold = [fit.total * alpha * ratio / (arb(s) * arb(fit.unit[k])) for s in fit.scale[k]]
    return fit.stated(k, [thresholded(problem, threshold, fit.at(k))], mean, [label])


def _logistic(fit: _Fit, k: int) -> Distance:
    free = fit.params["C"] is None  # infinity, which no header holds
    penalty = fit.penalties(k, ZERO if free else 1 / fit.number("C"))
    mean, classes = fit.given(), len(fit.labels[0])
    labels, at, shift = [row[0] for row in fit.labels], fit.at(k), [ZERO] * fit.states
    rows, width = fit.moved(k, mean), len(penalty)
    if fit.unit[k] != 1 or classes != 1:
        raise CertificateError("classes have no unit, and every row is of one class")
    problem: Stationary
    rest = [] if fit.intercept else [-arb(state[-1]) for state in fit.weights[k]]
    if fit.states == 1:
        if any(y not in (0.0, 1.0) for y in map(float, labels)):
            raise CertificateError("labels of two classes are 0 and 1")
        problem = Linear(rows, labels, fit.sample_weight, penalty, LOGISTIC)
        found = minimiser(problem, at)
        return fit.stated(k, [[*found, *rest]], mean, shift)
    index = [int(float(y)) for y in labels]
    if any(i != y or not 0 <= i < fit.states for i, y in zip(index, map(float, labels), strict=True)):
        raise CertificateError("a label is the number of its class")
    problem = Softmax(rows, index, fit.sample_weight, penalty, fit.states)
    common = [sum(at[j::width], ZERO) / fit.states if p.is_zero() else ZERO for j, p in enumerate(penalty)]
    found = minimiser(problem, [v - c for v, c in zip(at, common * fit.states, strict=True)])
    parts = [found[i * width : (i + 1) * width] for i in range(fit.states)]
    near = fit.stated(k, parts, mean, shift)
    return near if not rest else _stated([*found, *rest], list(near.coefficients), [])


def _poisson(fit: _Fit, k: int) -> Distance:
    unit, mean = arb(fit.unit[k]), fit.given()
    offset = ZERO if fit.intercept else -unit.log()
    penalty = fit.penalties(k, fit.total * fit.number("alpha") / unit)
    problem = Linear(
        fit.moved(k, mean), [row[0] / unit for row in fit.labels], fit.sample_weight, penalty, POISSON, offset
    )
    return fit.stated(k, [minimiser(problem, fit.at(k)) + fit.pinned(k, offset)], mean, [unit.log()])


def _huber(fit: _Fit, k: int) -> Distance:
    unit, mean, label = arb(fit.unit[k]), fit.given(), arb(fit.label_mean[k]) if fit.intercept else ZERO
    penalty, epsilon = fit.penalties(k, fit.number("alpha") * unit), fit.number("epsilon")
    scale = fit.label_scale
    if not scale > 0 or not epsilon >= 1:
        raise NotProved("a scale of 0, or an epsilon below 1")
    labels = [(row[0] - label) / unit for row in fit.labels]
    problem = Huber(fit.moved(k, mean), labels, fit.sample_weight, penalty, epsilon)
    *found, off = minimiser(problem, [*fit.at(k), scale / unit])
    near = fit.stated(k, [found + fit.pinned(k, ZERO)], mean, [label])
    return replace(near, scale=up(abs(off)))


def _kernel_ridge(fit: _Fit, k: int) -> Distance:
    """Dual weights: (K + alpha) a = y with K_ij = exp(-gamma |x_i - x_j|^2) positive semidefinite (lemma K65)."""
    if fit.params["method"] != "ridge":
        raise NotProved("a mean has no weights: what its network computes, the kernel does not look at")
    alpha, gamma = fit.number("alpha"), arb(1 / fit.width) if fit.params["gamma"] is None else fit.number("gamma")
    n, unit, at = fit.samples, arb(fit.unit[k]), [arb(w) for w in fit.weights[k][0]]
    if fit.matrix is None:
        points = [[arb(x) for x in row] for row in fit.rows]
        table = [[ZERO] * n for _ in range(n)]
        for i in range(n):
            table[i][i] = ONE + alpha
            for j in range(i):
                apart = sum([(a - b) ** 2 for a, b in zip(points[i], points[j], strict=True)], ZERO)
                table[i][j] = table[j][i] = (-gamma * apart).exp()
        fit.matrix = arb_mat(table)
    matrix = fit.matrix
    rest = [row[k] / unit - s for row, s in zip(fit.labels, (matrix * arb_mat(n, 1, at)).entries(), strict=True)]
    stored = [arb(c) / unit for c in fit.coefficients[k]]
    _same(stored, at, [abs(c) for c in stored], ROUNDED)
    if n <= SOLVED:
        try:
            off = matrix.solve(arb_mat(n, 1, rest)).entries()
        except ZeroDivisionError:
            raise NotProved("the kernel's matrix could not be shown to be regular") from None
        return _stated(off, [up(abs(a + o - c) * unit) for a, o, c in zip(at, off, stored, strict=True)], [])
    if not alpha > 0:
        raise NotProved("without a penalty nothing is known of the least eigenvalue of so many rows")
    most = lengths(rest)[1] / alpha
    whole = [up((most + abs(a - c)) * unit) for a, c in zip(at, stored, strict=True)]
    return Distance(0.0, up(most), tuple(whole), ())


def _stated(apart: Vector, coefficients: list[float], intercepts: list[float]) -> Distance:
    least, most = lengths(apart)
    if not math.isfinite(up(most)):
        raise NotProved("the distance from the optimum could not be bounded")
    return Distance(max(down(least), 0.0), up(most), tuple(coefficients), tuple(intercepts))


def _same(stored: Vector, meant: Vector, sizes: Vector, much: arb) -> None:
    """Refuse numbers in the units of the data that are not those of the weights, up to their rounding."""
    for s, m, size in zip(stored, meant, sizes, strict=True):
        if not abs(s - m) <= much * size + TINY:
            raise CertificateError("coefficients or intercepts are not those of the weights")


def _exact(table: Any, samples: int) -> list[Vector]:
    if len(table) != samples:
        raise CertificateError("there are not as many labels as rows")
    return [[arb(y) for y in row] for row in table]


KERNEL = "KernelRegressor"
SHIFTED = ("LogisticRegression", "PoissonRegressor", "HuberRegressor")  # an intercept is a coordinate of theirs
OBJECTIVES: dict[str, Callable[[_Fit, int], Distance]] = {
    "LinearRegression": _least_squares, "Ridge": _least_squares, "ElasticNet": _elastic_net, "Lasso": _elastic_net,
    "LogisticRegression": _logistic, "PoissonRegressor": _poisson, "HuberRegressor": _huber, KERNEL: _kernel_ridge,
}  # fmt: skip
