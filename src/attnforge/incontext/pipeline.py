"""Algorithms one after the other in one network, with what they will reach known before any run (lemma F8).

A pipeline standardises the columns of its prompt, fits a ridge or a penalised logistic regression to them, may shrink
the weights by a soft threshold, and predicts: attention layers over one sequence (the state, the data, the queries).

    layer 1    means of rows and labels over the data are taken off                                   (D2)
    layer 2    squares of what is left, two product heads a column                                    (C1)
    layer 3    their means, the variances                                                             (D2)
    layer 4    1/sqrt of them, one anchor table for all columns                                       (A3)
    layer 5    rows times that, two product heads a column                                            (C1)
    then       `depth` steps: heavy ball in one layer each, Nesterov's scheme in two for logistic     (F1 to F3)
    then       (threshold) two gates a coordinate                                                     (B1)
    last       queries read the state: w.x by hot pairs, or its sigmoid                               (F1)

Standardised columns have curvatures of at most d, the penalty keeps them above itself: the condition number, the step
size and the momentum are known without looking at data, and so are the size of the optimum and how far it moves when
rows err. Data are asked for three sizes: the largest |x|, the smallest deviation of a column, the largest |y|.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from ..arguments import positive, whole
from ..certificates.certificate import upper_text
from ..certificates.rounding import UNIT, gamma
from ..dtypes import DTYPES, SHIPPED
from ..errors import ArgumentError, PrecisionError
from ..heads.anchor.head import AnchorHead
from ..heads.product.head import ProductHead
from ..network import AttentionLayer, AttentionOnly, Heads
from .blocks import OMEGA, SHARPNESS, Channels, aggregation, heads, prediction, soft_threshold
from .certificate import depth_for, factors
from .extrapolation import LOG_SINK, levels, pairs, prediction_error
from .losses import LINEAR, LOGISTIC
from .planning import ROOM, largest_growth, step_error

Fit = Literal["ridge", "logistic"]
ROOMS = (ROOM, 1.1, 2.0)  # labels are scaled down by so much more than exact iterates need, the first that is enough
HALF = 0.5  # scaled and centred entries are at most that, by a power of two: what heads for squares are built for
WIDER = 1 + 2.0**-10  # heads are built for so much more: what rounding before them may move
SIZES = (1e-25, 1e25)  # of data: sums of a million of them, and their quotients, stay inside float32
ANCHORS = 96  # of 1/sqrt: four decades of variances to a relative 1e-13 in float64
SLACK = 1 + 2.0**-20  # for the rounding of these bounds themselves, sums and products of a few dozen positive numbers
RAMP = 0.2785  # W(1/e) rounded up: what a gate of sharpness 1 is off by (B1)


@dataclass(frozen=True)
class PipelinePlan:
    """What a pipeline will do to every prompt of at most `rows` rows within the stated sizes, before it is run.

    `ledger` says where the distance of its weights from the exact ones comes from, in units of standardised columns;
    `bound` is their sum, `prediction` what predictions are off by, in the units of the labels.
    """

    fit: Fit
    rows: int
    columns: int
    penalty: float
    threshold: float
    largest: float
    deviation: float
    label: float
    dtype: str
    depth: int
    layers: int
    heads: int
    rho: float
    scale: float
    shrink: float
    ledger: tuple[tuple[str, float], ...]
    prediction: float

    @property
    def bound(self) -> float:
        """The Euclidean distance of the weights from the exact pipeline's, at most."""
        return math.fsum(value for _, value in self.ledger) * SLACK

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {upper_text(value, 3)}" for name, value in self.ledger)
        return (
            f"standardise, {self.fit}{', threshold' if self.threshold else ''}: {self.depth} steps "
            f"({self.layers} layers, {self.heads} heads) will be within {upper_text(self.bound, 4)} of the exact "
            f"weights and {upper_text(self.prediction, 4)} of the exact predictions, {self.dtype}\n  {parts}"
        )


@dataclass(frozen=True)
class Standardised:
    """The parts of the front: heads for squares, for 1/sqrt and for the product, the power of two that scales rows;
    `off` bounds how far a standardised entry is from the exact one, `most` how large it is."""

    square: ProductHead
    root: AnchorHead
    product: ProductHead
    factor: float
    off: float
    most: float


@lru_cache(maxsize=32)
def standardised(rows: int, largest: float, deviation: float, dtype: torch.dtype) -> Standardised:
    """Heads for entries up to `largest` and deviations from `deviation` on, and what they do to an entry (F8(a))."""
    u, factor = UNIT[dtype], 2.0 ** -math.ceil(math.log2(4 * largest))
    least = (factor * deviation) ** 2
    sums = float(gamma(rows + 8, u))
    centre = HALF * sums * SLACK
    reach = HALF * WIDER
    square = ProductHead.fit(x=(-reach, reach), y=(-reach, reach), dtype=dtype)
    variance = (float(square.bound or math.inf) + (1 + centre) * centre + reach * reach * sums) * SLACK
    share = variance / least
    if not (share < 1e-2 and centre < HALF * (WIDER - 1) and variance < reach * reach - HALF * HALF):
        raise PrecisionError(
            f"a deviation of {deviation:g} beside entries of {largest:g} is lost in {dtype}", reachable=None
        )
    root = _root(least, dtype)
    fitted = float(root.bound or math.inf)
    if not fitted < (WIDER - 1) / 2:
        raise PrecisionError(f"1/sqrt of variances is not known well enough in {dtype}: {fitted:.3g}", reachable=None)
    relative = ((1 - share) ** -0.5 * (1 + fitted) - 1) * SLACK + 4 * u
    ends = ((reach * reach) ** -0.5 / WIDER, (0.98 * least) ** -0.5 * WIDER)
    product = ProductHead.fit(x=(-reach, reach), y=ends, dtype=dtype)
    most = min(math.sqrt(rows), HALF / math.sqrt(least))
    steep = HALF / math.sqrt(least)  # of a query, which the deviations do not know
    off = float(product.bound or math.inf) + steep * relative + centre * least**-0.5 * (1 + relative)
    return Standardised(square, root, product, factor, off * SLACK, most)


@lru_cache(maxsize=32)
def _root(least: float, dtype: torch.dtype) -> AnchorHead:
    """1/sqrt of variances from `least` on, with room for what they err by: the same for all units of data."""
    most = (HALF * WIDER) ** 2
    return AnchorHead.fit("rsqrt", 0.98 * least, most, anchors=ANCHORS, dtype=dtype, relative=True)


def plan_pipeline(
    n: int,
    d: int,
    eps: float,
    *,
    penalty: float,
    fit: Fit = "ridge",
    threshold: float = 0.0,
    largest: float = 1.0,
    deviation: float = 0.1,
    label: float = 1.0,
    dtype: str = "float64",
) -> PipelinePlan:
    """A pipeline for prompts of at most `n` rows of `d` columns, with entries up to `largest`, deviations of columns
    (root mean squares around the mean) from `deviation` on and labels up to `label`, whatever they are (lemma F8).

    Ridge minimises mean (w.z - y)^2 / 2 + penalty |w|^2 / 2 over standardised rows z and centred labels; logistic the
    mean logistic loss of labels 0 and 1, with the same penalty and no intercept. `threshold` then shrinks weights.

    >>> plan = plan_pipeline(100, 3, 1e-4, penalty=0.5)
    >>> plan.bound <= 1e-4, plan.depth
    (True, 16)
    """
    n, d = whole("n", n, 2), whole("d", d, 1)
    eps, penalty, label = positive("eps", eps), positive("penalty", penalty), positive("label", label)
    largest, deviation = positive("largest", largest), positive("deviation", deviation)
    if fit not in get_args(Fit):
        raise ArgumentError(f"fit must be 'ridge' or 'logistic', got {fit!r}")
    if DTYPES.get(dtype) not in SHIPPED:
        raise ArgumentError(f"dtype must be 'float64' or 'float32', got {dtype!r}")
    if not (isinstance(threshold, (int, float)) and 0 <= threshold < math.inf):
        raise ArgumentError(f"threshold must be a number >= 0, got {threshold!r}")
    low, high = SIZES
    for name, given in (("largest", largest), ("deviation", deviation), ("label", label), ("penalty", penalty)):
        if not low <= given <= high:
            raise ArgumentError(f"{name} must be between {low:g} and {high:g}, got {given:g}; scale the data")
    if deviation > largest:
        raise ArgumentError(f"no column within {largest:g} deviates by {deviation:g}: deviation is at most largest")
    if fit != "ridge" and label != 1:
        raise ArgumentError(f"logistic regression has labels 0 and 1, got label={label:g}")
    kind = DTYPES[dtype]
    u, front = UNIT[kind], standardised(n, largest, deviation, kind)
    off, root_d = front.off, math.sqrt(d)
    row = root_d * (front.most + off) * SLACK
    stated = _ridge if fit == "ridge" else _logistic
    found = stated(n, d, penalty, label, front, row, dtype)
    spent = found.moved + found.steps
    size = found.distance / found.scale + 1.0
    cut = root_d * found.scale * (2 * (RAMP + u) / SHARPNESS[kind] + 16 * u * size) if threshold else 0.0
    if not spent + cut < eps:
        raise PrecisionError(
            f"eps = {eps:g} cannot be promised in {dtype}: rows and steps alone cost {upper_text(spent + cut)}",
            reachable=spent + cut,
        )
    depth = found.depth(eps - (spent + cut) * SLACK)
    ledger = [("standardised rows", found.moved), ("start", found.start(depth)), ("steps", found.steps)]
    ledger += [("threshold", cut)] if threshold else []
    total = math.fsum(value for _, value in ledger) * SLACK
    query = root_d * (HALF * (front.factor * deviation) ** -1.0 + off) * SLACK
    weights = found.distance + total
    shrink = 2.0 ** max(0, math.ceil(math.log2(query * weights / found.scale * SLACK)))  # brings |w.z| below 1
    read = (found.scale * shrink * prediction_error(1.0, d + 2, 1.0, kind) if fit == "ridge"
            else 0.26 * float(gamma(d + 8, u)) * query * weights + 12 * u)  # fmt: skip
    slope = 1.0 if fit == "ridge" else 0.25
    means = (float(gamma(n + 8, u)) * label + 4 * u * (query * weights + label)) if fit == "ridge" else 0.0
    predicted = (slope * (query * total + found.distance * root_d * off) + read + means) * SLACK
    steps, hot = 2 * len(levels(kind).scales), 1 if fit != "ridge" else len(pairs(kind).scales)
    layers = 6 + depth * (2 if fit != "ridge" else 1) + bool(threshold)
    count = 2 + 5 * d + depth * (steps + (fit != "ridge")) + 2 * d * bool(threshold) + hot
    return PipelinePlan(fit, n, d, penalty, float(threshold), largest, deviation, label, dtype, depth, layers, count,
                        found.rho, found.scale, shrink, tuple(ledger), predicted)  # fmt: skip


@dataclass(frozen=True)
class Descent:
    """A regression on rows that err: the momentum's rate, the scale of its labels, how far its optimum can be from 0
    and from that of the exact rows, what all steps add, and what is left of the start."""

    kind: str
    rho: float
    scale: float
    distance: float
    moved: float
    steps: float
    begin: float

    def start(self, depth: int) -> float:
        """What is left of the start after so many steps."""
        growth = factors("heavy ball", self.rho, depth)[0] if self.kind == "heavy ball" else 1.0
        return growth * self.rho**depth * self.begin * SLACK

    def depth(self, left: float) -> int:
        """Steps after which what is left of the start is at most `left`."""
        depth = depth_for(min(left / self.begin, 0.999), self.rho) if self.kind == "heavy ball" else max(
            1, math.ceil(math.log(left / self.begin) / math.log(self.rho)) if left < self.begin else 1)  # fmt: skip
        while self.start(depth) > left:
            depth += 1
        return depth


def curvatures(d: int, penalty: float, off: float, fit: Fit) -> tuple[float, float]:
    """Between which curvatures of standardised rows lie, with room for the rounding of step sizes (F8(b))."""
    most = d * (1 + off) ** 2 * (0.25 if fit != "ridge" else 1.0)
    return penalty * (1 - 1e-3), (most + penalty) * (1 + 1e-3)


def _ridge(n: int, d: int, penalty: float, label: float, front: Standardised, row: float, dtype: str) -> Descent:
    """Ridge by heavy ball: F7 for the rows that the front has computed, whose optimum has moved (F8(b))."""
    u, off, root_d = UNIT[DTYPES[dtype]], front.off, math.sqrt(d)
    low, high = curvatures(d, penalty, off, "ridge")
    root = math.sqrt(high / low) * (1 + 1e-12)
    rho = (root - 1) / (root + 1) * (1 + 1e-12)
    noise = 2 * label * float(gamma(n + 8, u))  # of centred labels
    distance = (label + noise) / (2 * math.sqrt(penalty)) * SLACK
    moved = root_d * off * (label + root_d * (2 + off) * distance) / penalty + noise / (2 * math.sqrt(penalty))
    moved *= SLACK
    worst, amplification = largest_growth(rho), factors("heavy ball", rho, 1)[1] * (1 + 1e-12)
    step = 4 / (math.sqrt(high) + math.sqrt(low)) ** 2
    for room in ROOMS:
        least = room * (2 * label + noise + row * (1 + worst) * distance)
        scale = 2.0 ** math.ceil(math.log2(least))
        size = room * (1 + worst) * distance / scale
        e = step_error(n + 2, d, row, size, dtype, width=step * root_d * (1 + off) * SLACK, spread=math.log(n))
        left = min((room - 1) / (room * row), (room - 1) * (1 + worst) * distance / scale)
        if amplification * e <= left / SLACK:
            return Descent("heavy ball", rho, scale, distance, moved, scale * amplification * e * SLACK, distance)
    raise PrecisionError(f"errors of steps would leave the heads' reach in {dtype}: e = {e:.3g}", reachable=None)


def _logistic(n: int, d: int, penalty: float, label: float, front: Standardised, row: float, dtype: str) -> Descent:
    """Logistic regression by Nesterov's scheme: residuals are differences of a sigmoid and a label (F8(c))."""
    u, off, root_d = UNIT[DTYPES[dtype]], front.off, math.sqrt(d)
    low, high = curvatures(d, penalty, off, "logistic")
    q = low / high
    rho = math.sqrt(1 - math.sqrt(q)) * (1 + 1e-12)
    distance, begin = math.sqrt(2 * math.log(2) / penalty) * SLACK, math.sqrt(4 * math.log(2) / low) * SLACK
    moved = root_d * off * (1 + 0.25 * distance * root_d * (1 + off)) / penalty * SLACK
    amplification = 2 / (math.sqrt(q) * (1 - rho)) * (1 + 1e-12)
    size = (distance + 3 * begin) * ROOM
    width = root_d * (1 + off) / high * SLACK
    e = step_error(n + 2, d, 0.0, size, dtype, width=width, spread=math.log(n))
    e += width * (0.26 * float(gamma(d + 8, u)) * row * size + 16 * u) * SLACK
    steps = amplification * e * SLACK
    if not 3 * steps <= (ROOM - 1) * (distance + 3 * begin):
        raise PrecisionError(f"errors of steps would not stay small in {dtype}: e = {e:.3g}", reachable=None)
    return Descent("nesterov", rho, 1.0, distance, moved, steps, begin)


@dataclass(frozen=True)
class Sheet(Channels):
    """The parts of a token of a pipeline: those of a block, the squares or variances z of rows, their roots g, the mean
    label b, and ln n."""

    def sizes(self) -> dict[str, int]:
        return {**Channels(self.d, 1, True).sizes(), "z": self.d, "g": self.d, "b": 1, "ln": 1}


class Pipeline(nn.Module):
    """The network of a plan. `network(X, y, query)` are its predictions; `weights(X, y)` the weights it ends with.

    >>> plan = plan_pipeline(50, 2, 1e-4, penalty=0.5)
    >>> network, rng = Pipeline(plan), np.random.default_rng(0)
    >>> X = torch.from_numpy(rng.uniform(-1, 1, size=(50, 2)))
    >>> y = 0.3 * X[:, 0]
    >>> Z = (X - X.mean(0)) / X.std(0, correction=0)
    >>> exact = torch.linalg.solve(Z.T @ Z / 50 + 0.5 * torch.eye(2), Z.T @ (y - y.mean()) / 50)
    >>> bool((network.weights(X, y) - exact).norm() <= plan.bound)
    True
    """

    def __init__(self, plan: PipelinePlan):
        super().__init__()
        self.plan, self.channels, dtype = plan, Sheet(plan.columns), DTYPES[plan.dtype]
        front = standardised(plan.rows, plan.largest, plan.deviation, dtype)
        steps = [layer for t in range(plan.depth) for layer in self._step(front, t == plan.depth - 1, dtype)]
        cut = [soft_threshold(self.channels, 0.0, dtype)] if plan.threshold else []
        self.body = AttentionOnly([*self._front(front, dtype), *steps, *cut, self._read(dtype)])

    def sequence(self, X: Tensor, y: Tensor, query: Tensor) -> Tensor:
        """The prompt: the state first, then the data, then the queries."""
        at, dtype, plan = self.channels, DTYPES[self.plan.dtype], self.plan
        X, y, query = (torch.as_tensor(t) for t in (X, y, query))
        good = X.dim() == 2 and y.shape == X.shape[:1] and query.dim() == 2
        if not (good and X.shape[1] == query.shape[1] == plan.columns and 2 <= len(X) <= plan.rows):
            shapes = f"{tuple(X.shape)}, {tuple(y.shape)} and {tuple(query.shape)}"
            raise ArgumentError(
                f"expected rows (n, {plan.columns}), n from 2 to {plan.rows}, labels (n,) and queries (m, "
                f"{plan.columns}), got {shapes}"
            )
        spread = float(X.double().std(0, correction=0).min())
        sizes = {"largest": max(float(X.abs().max()), float(query.abs().max()) if len(query) else 0.0),
                 "label": float(y.abs().max())}  # fmt: skip
        for name, found in sizes.items():
            if not found <= getattr(plan, name):
                raise ArgumentError(f"the plan is for {name} = {getattr(plan, name):g}, these data have {found:g}")
        if not spread >= plan.deviation:
            raise ArgumentError(f"the plan is for deviation = {plan.deviation:g}, a column here has {spread:g}")
        if plan.fit != "ridge" and not bool(((y == 0) | (y == 1)).all()):
            raise ArgumentError("logistic regression has labels 0 and 1")
        threshold = torch.full((1, plan.columns), plan.threshold / plan.scale, dtype=dtype)
        state = at.state(torch.zeros(1, plan.columns, dtype=dtype), threshold)
        data, asked = (t.to(dtype) for t in (X, query))
        data = at.data(data, torch.zeros_like(data), y.to(dtype)[:, None])
        asked = at.data(asked, torch.zeros_like(asked), asked.new_zeros(len(asked), 1), "pen")
        Z = at.sequence(state, data, asked)
        Z[:, at.part("ln")] = math.log(len(X))
        return Z

    @torch.no_grad()
    def forward(self, X: Tensor, y: Tensor, query: Tensor) -> Tensor:
        """Predictions at the queries, in the units of the labels (probabilities, for logistic)."""
        Z = self.body(self.sequence(X, y, query))
        return Z[1 + len(X) :, self.channels.part("r")].squeeze(-1)  # type: ignore[no-any-return]

    @torch.no_grad()
    def weights(self, X: Tensor, y: Tensor) -> Tensor:
        """The weights for standardised columns, (d,): what the state holds when queries read it."""
        Z = self.sequence(X, y, X[:0])
        for layer in list(self.body.layers)[:-1]:
            Z = layer(Z)
        return Z[0, self.channels.part("p")].double() * self.plan.scale

    def example_input(self) -> Tensor:
        """A prompt of the right form, for `purity`."""
        generator, d = torch.Generator().manual_seed(0), self.plan.columns
        X = self.plan.largest * (2 * torch.rand(8, d, generator=generator, dtype=torch.float64) - 1)
        X[0], X[1] = self.plan.largest, -self.plan.largest
        return self.sequence(X, (X[:, 0] > 0).double() * self.plan.label, X[:2])

    # -- layers ---------------------------------------------------------------------------------------------------

    def _front(self, front: Standardised, dtype: torch.dtype) -> list[AttentionLayer]:
        at, d, ridge = self.channels, self.plan.columns, self.plan.fit == "ridge"
        x, y, z, g = at.at("x"), at.at("y"), at.at("z"), at.at("g")
        factor, label = front.factor, 1 / self.plan.scale
        skip = at.skip({("x", "x"): factor, ("y", "y"): label}, dtype)
        read = {(column, column): -factor for column in x}
        if ridge:
            read |= {(y[0], y[0]): -label, (y[0], at.at("b")[0]): 1.0}
        centre = AttentionLayer([self._mean(read, dtype)], S=skip)
        square = AttentionLayer([_placed(front.square, at, [(c, c) for c in x], [(c,) for c in z], dtype)],
                                S=at.skip({}, dtype))  # fmt: skip
        mean = AttentionLayer([self._mean({(c, c): 1.0 for c in z}, dtype)], S=at.skip({("z", "z"): 0.0}, dtype))
        table = front.root.group
        W_Q, W_O = np.zeros((d, at.width, 2)), np.zeros((d, 1, at.width))
        W_Q[range(d), z, 0] = W_O[range(d), 0, g] = 1.0
        W_Q *= table.W_Q.detach().double().numpy()[0, 0, 0]
        roots = Heads("memory", W_Q=torch.from_numpy(W_Q).to(dtype), b_Q=table.b_Q, M_K=table.M_K, M_V=table.M_V,
                      W_O=torch.from_numpy(W_O).to(dtype), purpose="1/sqrt")  # fmt: skip
        chord, shift = front.root.layer.S, torch.zeros(at.width, dtype=dtype)
        if front.root.layer.s is not None:
            shift[at.part("g")] = front.root.layer.s.detach()
        root = AttentionLayer([roots], S=at.skip({("z", "g"): 0.0 if chord is None else float(chord)}, dtype), s=shift)
        pairs = list(zip(x, g, strict=True))
        pairs = [pair[::-1] for pair in pairs] if front.product.swapped else pairs
        writes = [(at.at("x")[j], at.at("v")[j]) for j in range(d)]
        skip = at.skip({("x", "x"): 0.0, ("x", "v"): 0.0}, dtype)
        if front.product.layer.S is not None:
            for pair, targets in zip(pairs, writes, strict=True):
                for target in targets:
                    skip[list(pair), target] += front.product.layer.S.detach()[:, 0]
        times = AttentionLayer([_placed(front.product, at, pairs, writes, dtype)], S=skip)
        return [centre, square, mean, root, times]

    def _mean(self, read: dict[tuple[int, int], float], dtype: torch.dtype) -> Heads:
        """One head over the data tokens, all logits 0: means of channels, written with factors."""
        at, omega, sources = self.channels, OMEGA[dtype], list(dict.fromkeys(source for source, _ in read))
        W_Q, W_K = np.zeros((1, at.width, 1)), np.zeros((1, at.width, 1))
        W_V, W_O = np.zeros((1, at.width, len(sources))), np.zeros((1, len(sources), at.width))
        W_K[0, at.at("data"), 0] = omega
        for (source, target), factor in read.items():
            W_V[0, source, sources.index(source)] = 1.0
            W_O[0, sources.index(source), target] = factor
        return heads("tokens", "mean", dtype, W_Q=W_Q, b_Q=np.ones((1, 1)), W_K=W_K, b_K=np.full((1, 1), -omega),
                     W_V=W_V, W_O=W_O)  # fmt: skip

    def _step(self, front: Standardised, last: bool, dtype: torch.dtype) -> list[AttentionLayer]:
        """One step with the penalty in its linear map, and ln n on top of the sink's logit: sums become means. The last
        step of Nesterov's scheme stays where it is: p is then the point whose distance is known."""
        at, plan, ridge = self.channels, self.plan, self.plan.fit == "ridge"
        low, high = curvatures(plan.columns, plan.penalty, front.off, plan.fit)
        root = math.sqrt(high / low)
        ratio = (root - 1) / (root + 1)
        if ridge:
            step, beta = 4 / (math.sqrt(high) + math.sqrt(low)) ** 2, ratio * ratio
            to, keep = {"p": -step}, 1 - step * plan.penalty
            skip = {("p", "p"): keep + beta, ("a", "p"): -beta, ("p", "a"): 1.0}
        else:
            step, beta = 1 / high, 0.0 if last else ratio
            to, keep = {"p": -(1 + beta) * step, "a": -step}, 1 - step * plan.penalty
            skip = {("p", "p"): (1 + beta) * keep, ("a", "p"): -beta, ("p", "a"): keep}
        gather = aggregation(at, dtype, to, keyed="data", native=ridge)
        with torch.no_grad():
            gather.W_Q[:, at.at("ln")[0], at.d + at.classes] = 1 / LOG_SINK[dtype]
        descend = AttentionLayer([gather], S=at.skip(skip, dtype))
        if ridge:
            return [descend]
        return [AttentionLayer([prediction(LOGISTIC, at, dtype)], S=at.skip({("y", "r"): -1.0}, dtype)), descend]

    def _read(self, dtype: torch.dtype) -> AttentionLayer:
        """Queries read the state: hot pairs scaled by a power of two and back, the mean label on top; or a sigmoid."""
        at, plan = self.channels, self.plan
        if plan.fit != "ridge":
            return AttentionLayer([prediction(LOGISTIC, at, dtype)], S=at.skip({("r", "r"): 0.0}, dtype))
        group = prediction(LINEAR, at, dtype)
        with torch.no_grad():
            group.W_K[:, at.part("p")] /= plan.shrink
            group.W_O *= plan.shrink * plan.scale
        return AttentionLayer([group], S=at.skip({("b", "r"): 1.0}, dtype))


def _placed(head: ProductHead, at: Channels, pairs: Sequence[tuple[int, int]], writes: Sequence[tuple[int, ...]],
            dtype: torch.dtype) -> Heads:  # fmt: skip
    """The heads of a product, once for each pair of channels, written to the same channels."""
    own, count = head.layer.heads()[0], len(pairs)
    each = own.heads

    def repeated(table: Tensor | None) -> np.ndarray | None:
        if table is None:
            return None
        array = table.detach().double().numpy()
        return np.tile(np.broadcast_to(array, (each, *array.shape[1:])), (count, *[1] * (array.ndim - 1)))

    tables = {name: repeated(getattr(own, name)) for name in ("b_Q", "b_K", "b_V", "M_K", "M_V")}
    for name in ("W_Q", "W_V"):
        array = getattr(own, name).detach().double().numpy()
        table = np.zeros((each * count, at.width, array.shape[2]))
        for k, pair in enumerate(pairs):
            for side, channel in enumerate(pair):
                table[k * each : (k + 1) * each, channel] += array[:, side]
        tables[name] = table
    out = own.W_O.detach().double().numpy()
    W_O = np.zeros((each * count, out.shape[1], at.width))
    for k, targets in enumerate(writes):
        for target in targets:
            W_O[k * each : (k + 1) * each, :, target] = out[:, :, 0]
    given = {name: table for name, table in tables.items() if table is not None}
    return heads("self", "products", dtype, W_O=W_O, **given)
