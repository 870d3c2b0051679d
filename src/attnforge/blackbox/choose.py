"""`approximate`: a black box becomes an attention-only network, by the smallest route that reaches eps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ..arguments import is_number, whole
from ..box import Box, Interval, boxes_of
from ..certificates.certificate import upper_text
from ..certificates.rounding import unit
from ..dtypes import by_name, dtype_name, shipped
from ..errors import ArgumentError, PrecisionError, closest
from .grid import (
    KAPPA,
    MEMORY,
    BoxGrid,
    GridApproximation,
    build_grid,
    bytes_of,
    ideal_spacing,
    plan_grid,
    refuse_samples,
)
from .result import Approximation, Held
from .ridge import SAMPLES, WIDTHS, SampleRows, because, build_ridge, draw_rows, fit, largest_error
from .spectral import MOST_SAMPLES, PER_AXIS, build_additive, build_spectral, sample_count
from .target import Function, Progress, Target

Route = Literal["auto", "grid", "spectral", "ridge", "additive"]
ROUTES = ("auto", "grid", "spectral", "ridge", "additive")
ADDITIVE = (6, 8, 12, 16, 24, 32, 48, 64)  # anchors of each coordinate that are tried, in steps of about 1.4
GRIDS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)  # cells per axis of grids without a Lipschitz constant
MOST_POINTS = 1 << 20  # of a grid or a spectral table that is tried: each is a slot that every input looks at
WIDTH = 32  # of a ridge expansion whose size nobody gave: in the middle of those that are tried, a fit of seconds
SHORT, HOPE = 300, 30.0  # steps of a short ridge fit, and how many times eps it may stay away
HOPELESS = 300.0  # the same where no other route is left: the widest and longest fits are some ten times closer
STUCK, GAIN = 2, 0.8  # a route is given up when so many sizes in a row leave more than this share of the error
MARGIN = 0.98  # of eps that is aimed at, where what is built comes out a little worse than what was planned


@by_name
def approximate(
    f: Function | Any,
    box: Box | Mapping[str, Interval],
    eps: float | None = None,
    *,
    lipschitz: float | None = None,
    route: Route = "auto",
    dtype: torch.dtype = torch.float32,
    anchors: int | None = None,
    width: int | None = None,
    kappa: float | None = None,
    samples: int = SAMPLES,
    memory: int = MEMORY,
    resume: str | Path | None = None,
    batch: int = 4096,
    seed: int = 0,
    name: str | None = None,
    strict: bool = False,
    progress: bool | Progress = True,
) -> Approximation:
    """An attention-only network for a black box on a box.

    `f` is any callable on batches, of tensors or of arrays, or a fitted regressor with a method `predict`: it gets
    (batch, *box.shape), or one column per name where it has as many parameters as a named box has names, and gives
    (batch,) or (batch, k, ...).

    Routes: `grid`, one cold head over a grid, *certified* if `lipschitz` is declared (|f(x) - f(y)| <= lipschitz
    |x - y| in every output, Euclidean norm) and samples do not contradict it; `spectral`, one warm head with solved
    values, for smooth functions of few variables; `additive`, one head per coordinate; `ridge`, a ReLU expansion
    fitted to `samples`, for many variables. All but a grid with `lipschitz` are *calibrated*: eps is then compared
    with the largest error on a held-out sample, which is no proof. `auto` takes the smallest that reaches eps; with
    `lipschitz`, the certified grid if it fits into `memory` bytes. `result.reason` says why.

    Without eps give a route and its size: `anchors` per axis (grid, spectral, additive) or `width` (ridge). `resume`
    names a file that keeps the values of f, so that an interrupted evaluation can go on. `progress` is a callable that
    gets (label, done, count), or whether to show a bar on a terminal after two seconds.

    >>> net = approximate(lambda x, y: torch.sin(3 * x) * y, Box(x=(-1, 1), y=(0, 1)), eps=1e-4)
    >>> net.route, net.certificate.kind, net.measured <= 1e-4
    ('spectral', 'calibrated', True)
    >>> net = approximate(lambda x: abs(x).sum(-1), Box.cube(-1, 1, shape=2), eps=0.2, lipschitz=2**0.5)
    >>> net.route, net.certificate.kind, net.bound <= 0.2
    ('grid', 'certified', True)
    """
    (box,) = boxes_of(box)
    _check(eps, lipschitz, route, dtype, anchors, width, kappa, samples, memory)
    target = Target(f, box, name, resume, batch, progress)
    work = _Work(target, eps, lipschitz, dtype, anchors, width, kappa, samples, memory, seed)
    net = work.auto() if route == "auto" else work.one(route)
    net.strict = strict
    return net


@dataclass
class _Work:
    """One call of `approximate`: its arguments, and what several routes share."""

    target: Target
    eps: float | None
    lipschitz: float | None
    dtype: torch.dtype
    anchors: int | None
    width: int | None
    kappa: float | None
    samples: int
    memory: int
    seed: int
    held: Held = field(init=False)
    _rows: SampleRows | None = None

    def __post_init__(self) -> None:
        if self.lipschitz is not None:
            refuse_samples(self.target, self.lipschitz)
        self.held = Held.draw(self.target, self.dtype)

    @property
    def dim(self) -> int:
        return self.target.box.dim

    def rows(self) -> SampleRows:
        if self._rows is None:
            self._rows = draw_rows(self.target, self.samples, self.seed)
        return self._rows

    def one(self, route: str) -> Approximation:
        """The route that was asked for: of the given size, or the smallest of its kind that reaches eps."""
        if route == "grid":
            table = self.grid()
            return because(table, f"grid: asked for; {_result(table)}")
        if self.eps is None:
            size = self.width if route == "ridge" else self.anchors
            if size is None and route != "ridge":
                raise ArgumentError(f"route '{route}' needs eps=... or anchors=...")
            net = self._build(route, size or WIDTH)
            return because(net, f"{route}: asked for, with this size; {_result(net)}")
        found = self._ladder(route)
        if found.reached is None:
            raise self._unreachable([found])
        return because(found.reached, f"{route}: asked for; {_result(found.reached)}")

    def auto(self) -> Approximation:
        if self.eps is None:
            raise ArgumentError("route 'auto' needs eps=...; or name a route and its size, anchors=... or width=...")
        said = []
        if self.lipschitz is not None:
            try:
                net = self.grid()
                others = "spectral, additive and ridge could only be calibrated"
                return because(net, f"grid: the only route with a proof, and it fits; {_result(net)}; {others}")
            except PrecisionError as problem:
                said.append(f"grid: {problem}")
        tried: list[_Ladder] = []
        for route in ("additive", "spectral", "ridge"):
            best = min((t.parameters for t in tried if t.reached), default=math.inf)
            if route == "spectral" and not list(self._sizes("spectral")):
                said.append(f"spectral: too many variables ({self.dim})")
                continue
            if route == "ridge" and (self.dim + 1) * (WIDTHS[0] + self.dim) > best:
                said.append("ridge: not tried, already its smallest network would be larger")
                continue
            tried.append(self._ladder(route, best))
        if not any(t.reached for t in tried) and self.lipschitz is None and self.dim <= 3:
            tried.append(self._ladder("grid"))
        good = [t for t in tried if t.reached]
        if not good:
            raise self._unreachable(tried, said)
        chosen = min(good, key=lambda t: t.parameters)
        assert chosen.reached is not None
        rest = [f"{t.route}: {t.text}" for t in tried if t is not chosen]
        proof = [] if self.lipschitz is not None else ["without lipschitz nothing can be certified"]
        lead = f"{chosen.route}: the smallest that reaches {self.eps:g}; {_result(chosen.reached)}"
        return because(chosen.reached, "; ".join([lead, *rest, *said, *proof]))

    def grid(self) -> GridApproximation:
        """A grid: certified to eps from the Lipschitz constant, or of a given size."""
        target = self.target
        if self.eps is None or self.lipschitz is None:
            if self.anchors is None and self.eps is None:
                raise ArgumentError("route 'grid' needs eps=... or anchors=... (points per axis)")
            if self.anchors is None:
                found = self._ladder("grid")
                if not isinstance(found.reached, GridApproximation):
                    raise self._unreachable([found])
                return found.reached
            net = self._build("grid", self.anchors - 1)
            assert isinstance(net, GridApproximation)
            return net
        wide = target.box.outward(self.dtype)
        self._fits(BoxGrid.spaced(wide, ideal_spacing(wide, self.eps, self.lipschitz), KAPPA))
        spread, top = 0.6 * float(np.ptp(self.held.values, 0).max()), float(np.abs(self.held.values).max())
        aim = self.eps - 2 * unit(self.dtype) * top  # the last addition, of the middle of all values
        if aim <= 0:
            raise PrecisionError(f"eps = {self.eps:g} is below the rounding of values of size {top:g}", reachable=None)
        for _ in range(4):
            grid = plan_grid(target.box, aim, self.lipschitz, spread, self.dtype, self.kappa)
            self._fits(grid)
            net = build_grid(target, grid, self.lipschitz, self.held, self.dtype)
            if net.bound is not None and net.bound <= self.eps:
                return net
            assert net.bound is not None
            aim *= MARGIN * min(1.0, self.eps / net.bound)
        reached = f"{dtype_name(self.dtype)}: {upper_text(net.bound)} can be"
        raise PrecisionError(
            f"eps = {self.eps:g} cannot be certified by a grid in {reached}",
            reachable=net.bound,
        )

    def _fits(self, grid: BoxGrid) -> None:
        """Raise when a grid is larger than the memory budget, with the routes that are not."""
        need = bytes_of(grid.count, self.dim, self.target.outputs, self.dtype)
        if need <= self.memory:
            return
        most = max((p for p in self._sizes("spectral")), default=0)
        spectral = [f"spectral (up to {most} anchors per axis)"] if most else []
        routes = ", ".join([*spectral, "additive", "ridge"])
        raise PrecisionError(
            f"this grid has {_big(grid.count)} points ({max(grid.cells) + 1} per axis, {self.dim} axes) and needs "
            f"{_bytes(need)}, more than the budget memory={_bytes(self.memory)}; routes that fit: {routes} "
            "(calibrated, not certified), or ask for a larger eps"
        )

    def _build(self, route: str, size: int) -> Approximation:
        target, held, dtype = self.target, self.held, self.dtype
        if route == "ridge":
            return build_ridge(target, self.rows(), fit(self.rows(), size, self.seed), held, dtype, self.eps)
        if route == "additive":
            return build_additive(target, size, held, dtype, self.seed)
        if route == "spectral":
            if bytes_of(size**self.dim, self.dim, target.outputs, dtype) > self.memory:
                budget = _bytes(self.memory)
                raise ArgumentError(f"{size} anchors on each of {self.dim} axes are over the budget of {budget}")
            return build_spectral(target, size, held, dtype)
        if size < 1:
            raise ArgumentError(f"anchors must be at least 2 (grid points per axis), got {size + 1}")
        sides = target.box.outward(dtype).intervals()
        cells = tuple(size if hi > lo else 0 for lo, hi in sides)
        low, high = tuple(lo for lo, _ in sides), tuple(hi for _, hi in sides)
        grid = BoxGrid(low, high, cells, self.kappa or KAPPA)
        self._fits(grid)
        return build_grid(target, grid, self.lipschitz, held, dtype)

    def _sizes(self, route: str) -> Iterator[int]:
        """The sizes that a route tries, smallest first."""
        if route in ("ridge", "additive"):
            yield from WIDTHS if route == "ridge" else ADDITIVE
        for size in PER_AXIS if route == "spectral" else GRIDS if route == "grid" else ():
            count = (size + (route == "grid")) ** self.dim
            small = count <= MOST_POINTS and (route == "grid" or sample_count(size) ** self.dim <= MOST_SAMPLES)
            if small and bytes_of(count, self.dim, self.target.outputs, self.dtype) <= self.memory:
                yield size

    def _ladder(self, route: str, limit: float = math.inf) -> _Ladder:
        """Larger and larger networks of one route, until one reaches eps, is too large, or nothing is gained."""
        assert self.eps is not None
        if route == "ridge":
            return self._ridges(limit)
        best, stuck = math.inf, 0
        for size in self._sizes(route):
            net = self._build(route, size)
            measured = net.measured
            assert measured is not None
            if measured <= self.eps:
                return _Ladder(route, net, measured, f"{_result(net)}")
            if net.size.parameters > limit:
                return _Ladder(route, None, min(best, measured), "larger before it reaches eps")
            stuck = stuck + 1 if measured > GAIN * best else 0
            best = min(best, measured)
            if stuck >= STUCK:
                break
        return _Ladder(route, None, best, f"reaches {best:.3g} only")

    def _ridges(self, limit: float) -> _Ladder:
        """Wider and wider expansions; one that reaches eps is compiled. A short fit first says if there is hope."""
        assert self.eps is not None
        rows, best, stuck = self.rows(), math.inf, 0
        short = largest_error(fit(rows, WIDTH, self.seed, steps=SHORT), rows, self.held)
        if short > (HOPE if limit < math.inf else HOPELESS) * self.eps:
            return _Ladder("ridge", None, short, f"a short fit stays at {short:.3g}")
        for width in WIDTHS:
            if (self.dim + 1) * (width + self.dim) > limit:
                return _Ladder("ridge", None, best, "larger before it reaches eps")
            expansion = fit(rows, width, self.seed)
            measured = largest_error(expansion, rows, self.held)
            if measured <= MARGIN * self.eps:
                net = build_ridge(self.target, rows, expansion, self.held, self.dtype, self.eps)
                if net.measured is not None and net.measured <= self.eps:
                    return _Ladder("ridge", net, net.measured, _result(net))
            stuck = stuck + 1 if measured > GAIN * best else 0
            best = min(best, measured)
            if stuck >= STUCK:
                break
        return _Ladder("ridge", None, best, f"reaches {best:.3g} only")

    def _unreachable(self, tried: list[_Ladder], said: list[str] | None = None) -> PrecisionError:
        lines = [*(f"{t.route}: {t.text}" for t in tried), *(said or [])]
        best = min((t.best for t in tried), default=math.inf)
        where = f"on {self.target.box!r} in {dtype_name(self.dtype)}"
        return PrecisionError(
            f"eps = {self.eps:g} is not reached for {self.target.name} {where} "
            f"({'; '.join(lines)}): ask for more, give more samples, or use dtype=torch.float64",
            reachable=best if math.isfinite(best) else None,
        )


@dataclass(frozen=True)
class _Ladder:
    """What became of one route: the network that reaches eps, if there is one, and the smallest error seen."""

    route: str
    reached: Approximation | None
    best: float
    text: str

    @property
    def parameters(self) -> float:
        return self.reached.size.parameters if self.reached is not None else math.inf


def _result(net: Approximation) -> str:
    certificate = net.certificate
    if certificate.bound is not None:
        return f"{certificate.word} {upper_text(certificate.bound)} with {net.size.anchors} anchors"
    return f"measured {certificate.measured:.3g} with {net.size.parameters} parameters"


def _big(count: int) -> str:
    """A whole number in few digits, however large."""
    return f"{count:.4g}" if count < 10**300 else f"10^{len(str(count)) - 1}"


def _bytes(count: int) -> str:
    power = min((len(str(count)) - 1) // 3, 4)
    suffix = ("bytes", "KB", "MB", "GB", "TB")[power]
    shown = f"{count / 1000**power:.3g}" if count < 10**15 else _big(count // 1000**power)
    return f"{shown} {suffix}"


def _check(eps: object, lipschitz: object, route: object, dtype: torch.dtype, anchors: object, width: object,
           kappa: object, samples: object, memory: object) -> None:  # fmt: skip
    if route not in ROUTES:
        raise ArgumentError(f"route must be one of {', '.join(ROUTES)}, got {route!r}{closest(str(route), ROUTES)}")
    for name, value in (("eps", eps), ("kappa", kappa)):
        if value is not None and not (is_number(value) and value > 0):  # type: ignore[operator]
            raise ArgumentError(f"{name} must be a positive number, got {value!r}")
    if lipschitz is not None and not (is_number(lipschitz) and lipschitz >= 0):  # type: ignore[operator]
        raise ArgumentError(f"lipschitz must be a finite number >= 0, or None, got {lipschitz!r}")
    sizes = (("anchors", anchors, 2), ("width", width, 1), ("samples", samples, 64), ("memory", memory, 1))
    for name, value, least in sizes:
        if value is not None:
            whole(name, value, least)
    if eps is not None and (anchors is not None or width is not None):
        raise ArgumentError("give eps (how accurate) or a size (anchors or width), not both")
    shipped(dtype)
