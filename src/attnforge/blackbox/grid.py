"""Route `grid`: one cold anchor head over a grid of the box, certified from a Lipschitz constant (lemma E3).

After flattening, the logits -sum_i beta_i (x_i - v_i)^2 are affine in x up to a common term, so ONE head with a key and
a value f(v) for each grid point v approximates any continuous f. With kappa = beta_i delta_i^2 for every axis i,

    E_w |x - v|^2 <= B sum_i delta_i^2,   B = 1/4 + 2 exp(-2 kappa),   kappa >= ln(3)/2,

and |f(x) - f(v)| <= L |x - v| gives sup |head - f| <= L sqrt(B sum_i delta_i^2), whatever the number of points.

Rounding. Computed logits are off by at most d, and the subtraction of their maximum by u times the gap G_k, so that
computed weights lie between exp(-(1 +- u) G_k -+ d), before normalisation. Hence a second moment grows at most by
exp(2 d) Z(1 - u) / Z(1 + u) with Z(t) = sum_k exp(-t G_k), and the logarithm of that quotient is the integral of the
mean gap, at most 2 u kappa D B. What remains is the rounding of one sum and one inner product.

A declared Lipschitz constant cannot be proved from values, but it can be refuted by them. A jump is found by bisection:
halving the segment between two points keeps the jump in one of the halves, while the distance shrinks, so that the
slope doubles with every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..box import Box
from ..certificates.certificate import Certificate, Term, total, upper_text
from ..certificates.rounding import TINY, UNIT, assumptions, exp_ulps, gamma, unit, up
from ..certificates.schema import Either, Whole
from ..dtypes import Array, dtype_name, rounded, stored
from ..errors import ArgumentError, CertificateError, PrecisionError
from ..kernel.sampled.hypothesis import of_grid, steep, words
from ..network import AttentionLayer
from .result import FORM, About, Held, TableApproximation, inside, stored_layer, table_head
from .target import VALUE_ULPS, Target, digest

STEEPEST = 24  # segments that are bisected, the steepest ones: so many times `HALVINGS` evaluations
HALVINGS = 30  # of a segment: a billionth of it is left, beyond the resolution of float32
PAIRS = 512  # segments in arbitrary directions, of lengths from a ten-thousandth of the box to all of it
KAPPAS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)  # tried for a grid: cold ones leak less, warm ones round less
KAPPA = 4.0  # of a grid whose size is given: next to nothing leaks, 2 exp(-8) beside 1/4 in lemma E3
LEAST_KAPPA = 0.5 * math.log(3) * (1 + 1e-6)  # where lemma E3 begins to hold
MEMORY = 1 << 30  # bytes that a table may take unless the caller says otherwise


# -- a declared constant against samples ----------------------------------------------------------------------------


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


# -- the grid and its head ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BoxGrid:
    """A grid that contains the ends of every side: `cells[i]` intervals of equal length on side i (0 for a point)."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    cells: tuple[int, ...]
    kappa: float

    def __post_init__(self) -> None:
        if not len(self.low) == len(self.high) == len(self.cells):
            raise ArgumentError("a grid needs a lower end, an upper end and a number of cells for every axis")
        if any((h > l) != (c > 0) for l, h, c in zip(self.low, self.high, self.cells, strict=True)):  # noqa: E741
            raise ArgumentError("a side of positive length needs at least one cell, a side of length 0 has none")
        if not LEAST_KAPPA <= self.kappa < math.inf:
            raise ArgumentError(f"kappa must be at least {LEAST_KAPPA:.6f} for a certified grid, got {self.kappa!r}")

    @classmethod
    def spaced(cls, box: Box, spacing: float, kappa: float) -> BoxGrid:
        """The coarsest grid whose spacing is at most `spacing` on every axis."""
        sides = box.intervals()
        cells = tuple(max(1, math.ceil((hi - lo) / spacing * (1 - 1e-12))) if hi > lo else 0 for lo, hi in sides)
        return cls(tuple(lo for lo, _ in sides), tuple(hi for _, hi in sides), cells, kappa)

    @property
    def count(self) -> int:
        """The number of grid points."""
        return math.prod(c + 1 for c in self.cells)

    @property
    def live(self) -> int:
        """The number of axes that are not a single point."""
        return sum(c > 0 for c in self.cells)

    @property
    def step(self) -> Array:
        """The spacing of every axis, rounded up; 0 for a point."""
        width = np.array(self.high) - np.array(self.low)
        return np.where(width > 0, up(width / np.maximum(self.cells, 1)), 0.0)

    @property
    def moment(self) -> float:
        """The factor B = 1/4 + 2 exp(-2 kappa) of lemma E3, rounded up."""
        return float(up(0.25 + float(up(2 * math.exp(-2 * self.kappa * (1 - 1e-6))))))

    def axis(self, i: int) -> Array:
        """The coordinates of the grid points along one axis."""
        return np.linspace(self.low[i], self.high[i], self.cells[i] + 1)

    def points(self, low: int, high: int) -> Array:
        """Grid points number `low` to `high`, the last axis running fastest."""
        index = np.unravel_index(np.arange(low, high), [c + 1 for c in self.cells])
        return np.stack([self.axis(i)[at] for i, at in enumerate(index)], -1)

    @property
    def log_count(self) -> float:
        """The logarithm of the number of points, which may itself be too large for a float."""
        return sum(math.log(c + 1) for c in self.cells)

    def heavy(self, log_weight: float) -> int:
        """At most how many grid points weigh more than exp(log_weight) anywhere in the box.

        Along one axis the j-th neighbour costs at least kappa (j^2 - j) on one side and kappa j^2 on the other.
        """
        most = int(max(0.0, -log_weight) / self.kappa) + 1
        one = np.zeros(most + 1)
        for j in range(math.isqrt(most) + 3):
            for cost in {j * j, j * j - j if j else 0}:
                if cost <= most:
                    one[cost] += 1
        ways = np.zeros(most + 1)
        ways[0] = 1
        for _ in range(self.live):
            ways = np.convolve(ways, one)[: most + 1]
        found = float(ways.sum()) * (1 + 1e-9)
        return self.count if self.count < found else math.ceil(found)

    def keys(self, centre: Array) -> Array:
        """Slopes and offsets of the logits for queries (x - centre, 1), shape (point, dim + 1), in float64."""
        beta = self.kappa / np.where(self.step > 0, self.step, np.inf) ** 2
        # j delta + (low - centre), not a difference of large numbers: exact to a few units of the side's length
        index = np.unravel_index(np.arange(self.count), [c + 1 for c in self.cells])
        away = np.stack(index, -1) * self.step + (np.array(self.low) - centre)
        return np.concatenate([2 * beta * away, -np.sum(beta * away * away, -1, keepdims=True)], -1)

    def estimate(self, lipschitz: float, scale: float, dtype: torch.dtype) -> float:
        """What the certificate will say, roughly and a little too much, without making the table."""
        u, dim = unit(dtype), len(self.cells)
        logit = 3 * self.kappa * sum((c / 2) ** 2 for c in self.cells)
        d = (dim + 4) * u * logit + exp_ulps() * u
        reach = math.sqrt(self.moment * float(np.sum(self.step**2)))
        factor = math.exp(min(d + u * self.kappa * self.live, 50.0))
        return lipschitz * reach * factor + u * (2 * self.heavy(math.log(u) - self.log_count) + 6) * scale

    def to_json(self) -> list[Any]:
        return [list(self.low), list(self.high), list(self.cells), self.kappa]

    @classmethod
    def from_json(cls, data: list[Any]) -> BoxGrid:
        low, high, cells, kappa = data
        return cls(tuple(map(float, low)), tuple(map(float, high)), tuple(map(int, cells)), float(kappa))


class GridApproximation(TableApproximation):
    """A black box by one cold head over a grid; certified when a Lipschitz constant was declared."""

    family: ClassVar[str] = "blackbox-grid"
    called = "a grid of anchors"
    schema: ClassVar[Any] = {**FORM, "grid": ([float], [float], [Whole(1)], float), "lipschitz": Either(None, float)}
    reference: Tensor

    def __init__(self, about: About, layer: AttentionLayer, points: Tensor, wanted: Tensor,
                 grid: BoxGrid, lipschitz: float | None, reference: Tensor):  # fmt: skip
        super().__init__(about, layer, points, wanted)
        self.grid, self.lipschitz = grid, lipschitz
        self.register_buffer("reference", reference)  # f at the grid points, as it was computed

    def recertify(self) -> Certificate:
        """The bound of the stored table from the stored values of f and the declared constant, computed anew."""
        measured = super().recertify()
        self._check_structure()
        if self.lipschitz is None:
            return measured
        terms = self._terms(self.lipschitz)
        bound = total(t.value for t in terms)
        if not math.isfinite(bound):
            raise PrecisionError(f"no finite bound for this grid in {self.dtype}: use float64 or a coarser grid")
        if measured.measured is not None and measured.measured > bound:
            raise CertificateError(
                f"the held-out sample contradicts lipschitz = {self.lipschitz:g}: an error of {measured.measured:.4g} "
                f"was measured, and the constant allows {bound:.4g}; declare a larger one"
            )
        trusted = (
            f"|f(x) - f(y)| <= {self.lipschitz:g} |x - y| on the box, declared and not contradicted by samples",
            f"values of f within {VALUE_ULPS:g} roundoffs",
        )
        assumed = (*trusted, *assumptions())
        steps = [cells + 1 for cells in self.grid.cells]
        return replace(
            measured, kind="certified", bound=bound, terms=terms, lemmas=("E3", "A5"), assumptions=assumed,
            hypothesis=words(steep(self.lipschitz), of_grid(steps), self.about.unit),
        )  # fmt: skip

    @property
    def beyond(self) -> str:
        return super().beyond if self.lipschitz is None else ""

    def _check_structure(self) -> None:
        """The query must be (x - c, 1), the output must be read as it is."""
        group, dim = self.group, self.box.dim
        eye = torch.eye(dim, dim + 1, dtype=group.W_Q.dtype, device=group.W_Q.device)
        outputs = group.M_V.shape[-1]
        plain = (
            torch.equal(group.W_Q.detach()[0], eye)
            and float(group.b_Q.detach()[0, -1]) == 1.0
            and torch.equal(group.W_O.detach()[0], torch.eye(outputs, dtype=eye.dtype, device=eye.device))
            and self.layer.S is None
            and self.layer.s is not None
            and group.slots == self.grid.count == len(self.reference)
        )
        if not plain:
            raise CertificateError("W_Q, b_Q or W_O of this grid were changed; only keys and values may be")
        box = self.box.outward(self.dtype)
        fits = all(g <= b for g, b in zip(self.grid.low, box.lower.reshape(-1).tolist(), strict=True)) and all(
            g >= b for g, b in zip(self.grid.high, box.upper.reshape(-1).tolist(), strict=True)
        )
        if not fits:
            raise CertificateError(f"the grid does not cover the box in {self.dtype}: build it again in that dtype")

    def _terms(self, lipschitz: float) -> tuple[Term, ...]:
        grid, u, dim = self.grid, unit(self.dtype), self.box.dim
        group = self.group
        assert self.layer.s is not None
        value, reference, middle = stored(group.M_V[0]), stored(self.reference), stored(self.layer.s)
        key, centre = stored(group.M_K[0]), -stored(group.b_Q)[0, :-1]
        # logits: one rounding of x - c, then an inner product of dim + 1 terms; and keys that were rounded
        reach = up(np.maximum(np.abs(np.array(grid.high) - centre), np.abs(np.array(grid.low) - centre)))
        ideal = grid.keys(centre)
        spread = np.append(reach, 1.0)
        size, exact = np.abs(key) @ spread, np.abs(ideal) @ spread
        off = np.abs(key - ideal) @ spread + 128 * (dim + 2) * 2.0**-53 * np.max(exact)
        d = float(up(np.max(off + gamma(dim + 2, u) * size), 64 + dim)) * (1 + 4 * u) + 1.01 * exp_ulps() * u
        moment, steps = grid.moment, float(up(np.sum(grid.step**2), dim + 4))
        best = float(up(lipschitz * float(up(math.sqrt(float(up(0.25 * steps)))))))
        real = float(up(lipschitz * float(up(math.sqrt(float(up(moment * steps)))))))
        exponent = d + 1.01 * u * grid.kappa * grid.live * moment
        moved = float(up(real * float(up(math.expm1(exponent))))) if exponent < 700 else math.inf
        heavy = grid.heavy(math.log(u) - grid.log_count - min(2.1 * d, 1e4))
        largest = float(np.max(np.abs(value)))
        inner = float(up(gamma(2 * heavy + 4, u) * largest + 4 * grid.count * TINY[self.dtype] * (1 + largest)))
        adding = float(up(inner + u * (inner + largest + float(np.max(np.abs(middle))))))
        top = float(np.max(np.abs(reference)))
        norm = _norm(grid)
        # files of older versions may hold values of f that were rounded along with the weights
        kept = 0.0 if self.reference.dtype == torch.float64 else UNIT[self.reference.dtype] * top
        off_by = float(up(np.max(np.abs(value + middle - reference)) + 4 * 2.0**-53 * top)) + kept
        trusted = VALUE_ULPS * self.about.unit * top + lipschitz * norm * (8 * 2.0**-53 + 2 * self.about.unit)
        site = f"grid of {' x '.join(str(c + 1) for c in grid.cells)}" if dim <= 4 else f"grid of {grid.count} points"
        return (
            Term(site, "interpolation", best, f"half a cell times {lipschitz:g}"),
            Term(site, "leak", float(up(real - best)), f"kappa {grid.kappa:g}"),
            Term("weights", "rounding", moved, f"logits off by at most {d:.2e}"),
            Term("sums", "rounding", adding, f"{heavy} weights that matter"),
            Term("values", "rounding", float(up(off_by + trusted)), "stored values of f"),
        )

    def config(self) -> dict[str, Any]:
        return {**super().config(), "grid": self.grid.to_json(), "lipschitz": self.lipschitz}

    @classmethod
    def rebuild(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> GridApproximation:
        about, constant = About.from_json(config["about"]), config["lipschitz"]
        if constant is not None and not 0 <= float(constant) < math.inf:
            raise ArgumentError(f"a Lipschitz constant is a finite number >= 0, got {constant!r}")
        held, grid = (tensors["points"], tensors["wanted"]), BoxGrid.from_json(config["grid"])
        net = cls(about, stored_layer(tensors), *held, grid, constant, tensors["reference"])
        net.strict = bool(config["strict"])
        return net


def _norm(grid: BoxGrid) -> float:
    """The largest |x| on the grid's box."""
    return float(up(math.hypot(*np.maximum(np.abs(grid.low), np.abs(grid.high)).tolist()), 16))


def bytes_of(count: int, dim: int, outputs: int, dtype: torch.dtype) -> int:
    """The memory of a table: keys and values in the dtype, and the values of f in float64."""
    return count * ((dim + 1 + outputs) * torch.finfo(dtype).bits // 8 + 8 * outputs)


def plan_grid(box: Box, eps: float, lipschitz: float, scale: float, dtype: torch.dtype, kappa: float | None) -> BoxGrid:
    """The smallest grid whose estimate is at most eps; `PrecisionError` with what can be reached if there is none."""
    best, reachable = None, math.inf
    wide = box.outward(dtype)
    longest = max(hi - lo for lo, hi in wide.intervals())
    for each in KAPPAS if kappa is None else (kappa,):
        spacing = min(ideal_spacing(wide, eps, lipschitz, each), longest or 1.0)
        for _ in range(200):
            grid = BoxGrid.spaced(wide, spacing, each)
            found = grid.estimate(lipschitz, scale, dtype)
            if found <= eps:
                best = grid if best is None or grid.count < best.count else best
                break
            if found > BoxGrid.spaced(wide, 2 * spacing, each).estimate(lipschitz, scale, dtype):
                break  # finer grids are worse: rounding
            spacing *= 0.97
        coarse = (BoxGrid.spaced(wide, spacing * 1.2**k, each).estimate(lipschitz, scale, dtype) for k in range(100))
        reachable = min(reachable, *coarse) if best is None else reachable
    if best is None:
        wider = "" if dtype == torch.float64 else ", use dtype=torch.float64"
        raise PrecisionError(
            f"eps = {eps:g} cannot be certified by a grid in {dtype_name(dtype)}: "
            f"about {upper_text(1.05 * reachable)} can be; ask for that{wider}",
            reachable=1.05 * reachable,
        )
    return best


def ideal_spacing(box: Box, eps: float, lipschitz: float, kappa: float = KAPPA) -> float:
    """The spacing that lemma E3 asks for, without rounding."""
    live = max(1, sum(hi > lo for lo, hi in box.intervals()))
    return eps / max(lipschitz * math.sqrt(live * (0.25 + 2 * math.exp(-2 * kappa))), 1e-300)


def build_grid(
    target: Target, grid: BoxGrid, lipschitz: float | None, held: Held, dtype: torch.dtype
) -> GridApproximation:
    """Evaluate f on the grid, refuse a constant that the values contradict, make the table and certify it."""
    key = f"grid-{digest(np.array([grid.low, grid.high, grid.cells]))}"
    label = f"f on {grid.count} grid points"
    values = target.table(grid.count, lambda a, b: inside(grid.points(a, b), target.box), label, key)
    if lipschitz is not None:
        refuse_table(target, [c + 1 for c in grid.cells], grid.points, values, lipschitz)
    middle = torch.from_numpy(0.5 * (values.max(0) + values.min(0))).to(dtype)  # centred values round less
    centre = rounded(0.5 * (np.array(grid.low) + np.array(grid.high)), dtype)
    purpose = f"{target.name} on a grid of {grid.count} points"
    group = table_head(centre, grid.keys(centre), values - stored(middle), purpose, dtype)
    for fixed in (group.W_Q, group.b_Q, group.W_O):
        fixed.requires_grad_(False)
    about, layer = About.of(target, held, "grid"), AttentionLayer([group], s=middle)
    return GridApproximation(about, layer, *held.tensors, grid, lipschitz, torch.from_numpy(values)).sealed()
