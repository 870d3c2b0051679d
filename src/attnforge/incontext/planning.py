"""Depth before the run: what a frozen least-squares network will have reached after T applications (lemma F7).

Nothing is run. From the size of the data, their condition number and three sizes of the problem (`radius`, `distance`,
`residual`) follow the scale of the labels that keeps every residual where the heads are linear, the error of one step
in the dtype, how much of it accumulates, and the depth for a tolerance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from ..arguments import positive, whole
from ..certificates.certificate import upper_text
from ..certificates.rounding import UNIT, exp_ulps, gamma, up
from ..dtypes import DTYPES, SHIPPED, Array
from ..errors import ArgumentError, PrecisionError
from .blocks import frozen
from .certificate import depth_for, factors
from .extrapolation import LOG_SINK, levels
from .losses import LINEAR
from .problem import enclosure
from .prompt import LARGEST_DOUBLINGS, doublings_for, step_size, tensor
from .solver import run

STEP = 4.0  # the step size at most: (1 + sqrt(beta))^2 / L, and L >= 1 where columns have root mean square 1
SCALED = 1e-6  # by which mean squares may differ from 1: far inside the hundredth by which a step's error is rounded up
ROOM = 1.01  # labels are scaled down by so much more than exact iterates need: errors of steps must fit as well


@dataclass(frozen=True)
class DepthPlan:
    """What a network of `depth` applications will do: ||w_T - w*|| <= bound = start + steps, in the units of the data.

    `scale` divides labels; `layers` and `heads` count the whole network; `step_error` is e, in scaled units.
    """

    depth: int
    layers: int
    heads: int
    rho: float
    growth: float
    amplification: float
    step_error: float
    scale: float
    start: float
    steps: float
    dtype: str
    rows: int
    columns: int
    condition: float
    radius: float

    def weights(self, X: Array, y: Array) -> Array:
        """What the planned network makes of a prompt: its weights after exactly `depth` applications, (columns,).

        X has columns of root mean square 1 and no more than the planned rows; that, their lengths and the condition
        number are checked. `distance` and `residual` speak of the optimum, which nobody knows before the run.

        >>> rng = np.random.default_rng(0)
        >>> X = rng.choice([-1.0, 1.0], size=(50, 2))
        >>> planned = plan(50, 2, condition=2.0, eps=1e-6, distance=3.0, residual=1e-3)
        >>> bool(np.linalg.norm(planned.weights(X, X @ [1.0, -2.0]) - [1.0, -2.0]) <= planned.bound)
        True
        """
        X, y = np.asarray(X, dtype=np.float64), np.asarray(y, dtype=np.float64)
        if X.ndim != 2 or not 1 <= len(X) <= self.rows or X.shape[1] != self.columns or y.shape != X.shape[:1]:
            raise ArgumentError(
                f"the plan is for up to {self.rows} rows of {self.columns} columns and a label each, got {X.shape} "
                f"and {y.shape}"
            )
        if not (np.isfinite(X).all() and np.isfinite(y).all()):
            raise ArgumentError("rows and labels must be finite")
        squares = np.mean(X**2, 0)
        if not np.abs(squares - 1).max() <= SCALED:
            raise ArgumentError(f"columns must have root mean square 1, got {np.sqrt(squares).tolist()}: divide by it")
        longest = float(up(math.sqrt(float((X**2).sum(1).max())), self.columns + 4))
        if longest > self.radius:
            raise ArgumentError(f"the plan is for rows up to {self.radius:g}, one has the length {longest:g}")
        low, high = enclosure(X.T @ X / len(X), (len(X) + 4) * 2.0**-52 * float(squares.sum()))
        if not 0 < high <= low * self.condition:
            found = f"{high / low:.6g}" if low > 0 else "no finite one"
            raise ArgumentError(f"the plan is for condition numbers up to {self.condition:g}, these data have {found}")
        kind, doublings = DTYPES[self.dtype], doublings_for(1.0, self.condition)
        block = frozen(LINEAR, "heavy ball", doublings, self.columns, dtype=kind)
        step = step_size("heavy ball", doublings, high) / len(X)
        data = block.channels.data(tensor(X, kind), tensor(step * X, kind), tensor(y[:, None] / self.scale, kind))
        state = block.channels.state(torch.zeros(1, self.columns, dtype=kind))
        done = run(block, state, data, rho=self.rho, tol=0.0, max_iter=self.depth)
        return np.asarray(self.scale * np.asarray(done.path()[-1], dtype=np.float64).reshape(-1))

    @property
    def bound(self) -> float:
        """The distance from the optimum at most, before anything is run."""
        return math.nextafter((self.start + self.steps) * (1 + 1e-15), math.inf)

    def __str__(self) -> str:
        return (
            f"{self.depth} applications ({self.layers} layers, {self.heads} heads): the weights will be within "
            f"{upper_text(self.bound, 4)} of the optimum, {self.dtype}\n"
            f"  start {upper_text(self.start, 4)}, steps {upper_text(self.steps, 4)} "
            f"(e = {upper_text(self.step_error, 4)}, times {self.amplification:.4g}; labels over {self.scale:.4g})"
        )


def largest_growth(rho: float) -> float:
    """sup over t of (1 + (1 + rho) t) rho^t: how far heavy ball may move away before it converges."""
    at = max(0.0, -1 / math.log(rho) - 1 / (1 + rho)) if 0 < rho < 1 else 0.0
    return max((1 + (1 + rho) * t) * rho**t for t in (0, math.floor(at), math.ceil(at))) * (1 + 1e-12)


def step_error(
    n: int, d: int, radius: float, size: float, dtype: str = "float64", *, width: float = 0.0, spread: float = 0.0
) -> float:
    """e of lemma F7: the error of one application for residuals up to 1, rows up to `radius`, weights up to `size`.

    `width` bounds sum_i ||v_i||, 4 sqrt(d) unless given; `spread` is what is added to the logit of the sink.
    """
    kind = DTYPES[dtype]
    u, table = UNIT[kind], levels(kind)
    count, sharp, seen = len(table.scales), max(table.scales), radius * size + 1.0
    reach = 1 + u * seen
    grown, mass = math.exp(sharp * reach), math.exp(LOG_SINK[kind])
    rounding = float(gamma(2 * n + 10, u)), float(gamma(d + 8, u)), float(gamma(2 * count + 8, u))
    if not all(map(math.isfinite, rounding)):
        return math.inf
    logit = rounding[1] * sharp * seen + 2 * u * (LOG_SINK[kind] + sharp * reach) + (exp_ulps() + 0.1) * u
    logit += 8 * u * (LOG_SINK[kind] + spread) if spread else 0.0  # it is a sum and a product more
    read = table.truncation(reach) + u * seen + 4 * u * reach
    read += table.amplification * grown * (n * grown / mass + math.expm1(logit) + rounding[0])
    width = (width or STEP * math.sqrt(d)) * (1 + 8 * u)
    return 1.01 * (width * read + rounding[2] * (table.amplification * grown * width + 6 * size))


def plan(
    n: int,
    d: int,
    condition: float,
    eps: float,
    *,
    radius: float | None = None,
    distance: float = 1.0,
    residual: float = 1.0,
    dtype: str = "float64",
) -> DepthPlan:
    """How deep a network for least squares or ridge must be, and what it will have reached, before it is run (F7).

    The data are `n` rows of `d` columns, each of root mean square 1, with condition number at most `condition`;
    penalties count as rows. No row is longer than `radius` (3 sqrt(d) unless given), the optimum is at most
    `distance` from the start, and no residual there exceeds `residual`.

    >>> found = plan(1000, 10, condition=100.0, eps=1e-6)
    >>> found.depth, found.bound <= 1e-6
    (110, True)
    """
    n, d = whole("n", n, 1), whole("d", d, 1)
    eps, distance, residual = positive("eps", eps), positive("distance", distance), positive("residual", residual)
    radius = 3 * math.sqrt(d) if radius is None else positive("radius", radius)
    if DTYPES.get(dtype) not in SHIPPED:
        raise ArgumentError(f"dtype must be 'float64' or 'float32', got {dtype!r}")
    if not 1 <= positive("condition", condition) <= 2.0**LARGEST_DOUBLINGS:
        raise ArgumentError(
            f"condition must be between 1 and 2^{LARGEST_DOUBLINGS}, for which the largest network is made, got "
            f"{condition!r}; a penalty lowers it"
        )
    if n < d:
        raise ArgumentError(
            f"{n} rows of {d} columns have no condition number: give at least as many rows as columns; penalties count"
        )
    if radius < math.sqrt(d) * (1 - 1e-9):
        raise ArgumentError(
            f"radius must be at least sqrt(d) = {math.sqrt(d):.6g}, the mean length of rows whose columns have root "
            f"mean square 1, got {radius:g}"
        )
    root = 2.0 ** (doublings_for(1.0, condition) / 2)
    rho = math.nextafter((root - 1) / (root + 1) * (1 + 4 * 2.0**-53), 1.0)
    worst = largest_growth(rho)
    amplification = factors("heavy ball", rho, 1)[1] * (1 + 1e-12)
    scale = ROOM * (residual + radius * worst * distance)
    size = ROOM * (1 + worst) * distance / scale
    e = step_error(n, d, radius, size, dtype)
    steps = scale * amplification * e
    if not (radius * amplification * e <= (ROOM - 1) / ROOM and amplification * e <= (ROOM - 1) * distance / scale):
        raise PrecisionError(f"errors of steps would leave the heads' reach in {dtype}: e = {e:.3g}", reachable=None)
    if not steps < eps:
        raise PrecisionError(
            f"eps = {eps:g} cannot be promised in {dtype}: steps alone add up to {upper_text(steps)}; ask for more, or "
            "use float64", reachable=steps,
        )  # fmt: skip
    left = min((eps - steps) / distance, 0.999)
    depth = depth_for(left, rho)
    growth = factors("heavy ball", rho, depth)[0]
    start = growth * rho**depth * distance * (1 + (depth + 8) * 2.0**-52)
    heads = 2 * len(levels(DTYPES[dtype]).scales)
    return DepthPlan(depth, depth, depth * heads, rho, growth, amplification, e, scale, start, steps, dtype, n, d,
                     float(condition), radius)  # fmt: skip
