"""The figures of heads: one head as it ships, several side by side, and why warm heads.

From a finished head comes what its figure shows: sample points, outputs, weights and errors. Nothing is fitted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..arguments import shortened
from ..certificates.certificate import upper_text
from ..charts.chart import Fan, Figure, Level, Panel, Series, Spans, error_panel
from ..dtypes import Array
from ..errors import ArgumentError
from ..heads.anchor.head import AnchorHead
from ..heads.chain.head import ChainHead
from ..heads.gate.head import GateHead
from ..heads.gate.target import Lines, Logistic

POINTS = 401  # drawn; each is the worst of CROWD neighbours, so that no peak of the error is lost
CROWD = 11  # numbers looked at for each that is drawn: the peaks between two anchors are wider than that
NEAR = 16.0  # a gate is drawn where |sharpness * (y - kink)| is below this: beyond it one slot has all the weight
DECADES = 50.0  # high over low: an interval that spans more is drawn on a logarithmic axis
GUARDS = 30.0  # times the target: values that are larger would flatten the others on a linear axis
ROW, ROWS = 0.46, 1.2  # inches of a function in a comparison, and of its axis


@dataclass(frozen=True, eq=False)
class HeadPicture:
    """All that a head's figure shows. `weights` has a row for each sample of `y` and a column for each anchor.

    `bound` is None for a head that is only calibrated. `error` may carry signs; with `relative=True` it is an error
    relative to the target's size, and so is the bound.
    """

    name: str
    interval: tuple[float, float]
    y: Array
    target: Array
    output: Array
    error: Array
    bound: float | None
    anchors: Array
    values: Array
    weights: Array
    kappa: float
    potential: str
    dtype: str
    relative: bool = False

    def __post_init__(self) -> None:
        for field in ("y", "target", "output", "error", "anchors", "values", "weights"):
            object.__setattr__(self, field, np.asarray(getattr(self, field), dtype=np.float64))
        if self.y.ndim != 1 or len(self.y) < 2 or not (np.diff(self.y) > 0).all():
            raise ArgumentError("y is a rising row of at least two sample points")
        shapes = {"target": self.y.shape, "output": self.y.shape, "error": self.y.shape, "values": self.anchors.shape}
        shapes["weights"] = (*self.y.shape, *self.anchors.shape)
        for field, shape in shapes.items():
            if getattr(self, field).shape != shape:
                raise ArgumentError(f"{field} has shape {getattr(self, field).shape}, expected {shape}")
        if not self.interval[0] < self.interval[1]:
            raise ArgumentError(f"the interval is (lo, hi) with lo < hi, got {self.interval}")

    @property
    def logarithmic(self) -> bool:
        """Whether the interval spans decades, so that a linear axis would hide most of the anchors."""
        lo, hi = self.interval
        return lo > 0 and hi / lo >= DECADES


def figure_of(head: AnchorHead | GateHead | ChainHead) -> Figure:
    """The figure that suits a head: its anchors where it has some, else its slots."""
    if isinstance(head, AnchorHead) and head.potential.name != "exact":
        return head_figure(head_picture(head))
    return slots_figure(slots_picture(head))


@torch.no_grad()
def head_picture(head: AnchorHead) -> HeadPicture:
    """An anchor head at points that are even between its anchors, evaluated as shipped, compared in float64."""
    ends = head.potential.flat(np.array([head.lo, head.hi]))
    y = _inside(head.potential.unflat(np.linspace(ends[0], ends[1], POINTS * CROWD)), head)
    target, output = head.function.value(y.double()), head.core(y).double()
    error = (output - target) / (target.abs() if head.relative else 1.0)
    kept = _worst(error.abs())
    y, target, output, error = y[kept], target[kept], output[kept], error[kept]
    weights = head.attention(y).double()
    return HeadPicture(
        name=head.function.name,
        interval=(head.lo, head.hi),
        y=y.double().numpy(),
        target=target.numpy(),
        output=output.numpy(),
        error=error.numpy(),
        bound=head.bound,
        anchors=head.anchors.numpy(),
        values=head.values.double().numpy(),
        weights=weights.numpy(),
        kappa=head.kappa,
        potential=str(head.potential),
        dtype=head.certificate.dtype,
        relative=head.relative,
    )


def _worst(error: torch.Tensor) -> torch.Tensor:
    """The places of the ends, and of the largest error in each crowd."""
    crowds = torch.nn.functional.pad(error, (0, -len(error) % CROWD), value=-1.0).reshape(-1, CROWD)
    places = crowds.argmax(-1) + CROWD * torch.arange(len(crowds))
    return torch.cat([torch.tensor([0]), places, torch.tensor([len(error) - 1])]).unique()


def _inside(y: Array, head: AnchorHead | GateHead | ChainHead) -> torch.Tensor:
    """The numbers of the head's dtype next to y, each once, within its interval."""
    kept = torch.from_numpy(np.clip(y, head.lo, head.hi)).to(head.dtype).unique()
    within = kept[(kept.double() >= head.lo) & (kept.double() <= head.hi)]
    if len(within) < 2:
        raise ArgumentError(f"[{head.lo!r}, {head.hi!r}] holds fewer than two numbers of {head.dtype}: nothing to draw")
    return within


@dataclass(frozen=True, eq=False)
class SlotsPicture:
    """A head of a few slots: its target on the whole interval; weights and error where something happens.

    `place` is where the offsets are counted from: a kink, drawn from nearby; None when all of the interval is drawn.
    """

    name: str
    interval: tuple[float, float]
    y: Array
    target: Array
    output: Array
    place: float | None
    offset: Array
    weights: Array
    labels: tuple[str, ...]
    error: Array
    bound: float | None
    dtype: str
    relative: bool = False

    def __post_init__(self) -> None:
        if self.weights.shape != (*self.offset.shape, len(self.labels)) or self.error.shape != self.offset.shape:
            raise ArgumentError(
                f"{len(self.offset)} offsets and {len(self.labels)} labels do not fit weights of shape "
                f"{self.weights.shape} and errors of shape {self.error.shape}"
            )


@torch.no_grad()
def slots_picture(head: AnchorHead | GateHead | ChainHead) -> SlotsPicture:
    """A gate near its first kink, or any head of few slots (of a chain the first) on all of its interval."""
    y = _inside(np.linspace(head.lo, head.hi, 2 * POINTS), head)
    place, near = None, y
    if isinstance(head, GateHead) and isinstance(head.spec.target.shape, Lines) and head.sharpness is not None:
        kinks = [k for k in head.spec.target.shape.knots if head.lo <= k <= head.hi]
        if kinks:
            place = kinks[0]
            reach = max(NEAR / head.sharpness, 64 * float(np.spacing(np.float32(place)) if place else 0.0))
            near = _inside(place + np.linspace(-reach, reach, 2 * POINTS), head)
    group = head.layer.heads()[0]
    weights = group.weights(near.unsqueeze(-1))
    error = (head.core(near).double() - torch.from_numpy(target_of(head, near))).numpy()
    return SlotsPicture(
        head.name if isinstance(head, GateHead) else head.function.name, (head.lo, head.hi), y.double().numpy(),
        target_of(head, y), head.core(y).double().numpy(), place, near.double().numpy() - (place or 0.0),
        weights.double().flatten(1).numpy(),
        _labels(group), error, head.bound, head.certificate.dtype,
    )  # fmt: skip


def _labels(group: Any) -> tuple[str, ...]:
    """Every slot of every head, in the order of its weights."""
    own = ["own token"] if group.scope == "self" else []
    names = []
    for h in range(group.heads):
        memory = group.M_V[h if group.M_V.shape[0] > 1 else 0, :, 0].tolist()
        suffix = f" ({h + 1})" if group.heads > 1 else ""
        names += [f"{slot}{suffix}" for slot in (*own, *(f"value {v:g}" for v in memory))]
    return tuple(names)


def target_of(head: AnchorHead | GateHead | ChainHead, y: torch.Tensor) -> Array:
    """The exact target at y, in float64."""
    at = y.double()
    if not isinstance(head, GateHead):
        return np.asarray(head.function.value(at).numpy())
    return exact_gate(head, at.numpy())


def exact_gate(head: GateHead, at: Array) -> Array:
    """What a gate should give at y; of a pair x and y, what is added to y at x - y."""
    target = head.spec.target.shape
    if isinstance(target, Logistic):
        high, low = (float(line[0]) * at + float(line[1]) for line in (target.high, target.low))
        up, down = (torch.sigmoid(torch.from_numpy(sign * target.rate * at)).numpy() for sign in (1, -1))
        return np.asarray(up * high + down * low)
    lines = np.array([[float(slope), float(intercept)] for slope, intercept in target.lines])
    slope, intercept = lines[np.searchsorted(target.knots, at)].T
    return np.asarray(slope * at + intercept)


def head_figure(data: HeadPicture) -> Figure:
    """The function with its anchors, the values, the error below its bound, and the softmax weights."""
    inside = (data.anchors >= data.interval[0]) & (data.anchors <= data.interval[1])
    index, scale = np.arange(1, len(data.anchors) + 1), float(np.abs(data.target).max())
    axis: dict[str, Any] = {"log_x": data.logarithmic, "x_range": data.interval}
    positive = data.logarithmic and data.target.min() > 0
    on_curve = np.interp(data.anchors[inside], data.y, data.target)
    function = [
        Series("target", data.y, data.target, style="broad", role="target"),
        Series("head", data.y, data.output, role="output"),
        Series("anchors", data.anchors[inside], on_curve, style="points", role="anchor"),
    ]
    values = [
        Series("", index, data.values, style="stems", role="anchor"),
        Series("", index[~inside], data.values[~inside], style="hollow", role="anchor"),
    ]
    large = np.abs(data.values).max() > GUARDS * scale > 0
    counted = "anchor number" if inside.all() else "anchor number (hollow: guard outside)"
    highest = float(data.weights.max())
    return Figure(
        "head",
        f"{data.name} as one attention head: the function with its anchors, their values, the error, the weights.",
        (
            Panel(
                f"{_short(data.name)} on {_interval(data.interval)}", "input y", "output", function, legend="inside",
                log_y=positive and data.target.max() > DECADES * data.target.min(), **axis,
            ),
            Panel(
                f"{len(index)} values, κ = {data.kappa:.3g}", counted, "value", values,
                linear_y=10 ** np.ceil(np.log10(scale)) if large else None,
            ),
            _error(data.error, data.bound, data.dtype, "input y", data.y, data.relative, **axis),
            Panel(
                f"Weights, potential {data.potential}", "input y", "softmax weight of each anchor",
                marks=[Fan(data.y, data.weights.T)], y_range=(0, min(1.02, 1.08 * highest)), **axis,
            ),
        ),
        columns=(3, 2),
        heights=(3.3, 3.3),
    )  # fmt: skip


def _error(
    error: Array, bound: float | None, dtype: str, axis: str, at: Array, relative: bool = False, **options: Any
) -> Panel:
    """The error of a head below its bound; of a calibrated one below the largest error seen, in grey."""
    worst = float(np.abs(error).max())
    level = (
        Level(worst, "largest measured: calibrated, not certified", "soft") if bound is None
        else Level(bound, f"certified bound {upper_text(bound)}")
    )  # fmt: skip
    kind = "relative error" if relative else "absolute error"
    return error_panel(f"Error in {dtype}, largest seen {worst:.3g}", axis, kind, at, np.abs(error), [level], **options)


def _interval(interval: tuple[float, float]) -> str:
    return "[{:g}, {:g}]".format(*interval).replace("-", "−")


def _short(name: str, width: int = 34) -> str:
    return shortened(name, width, "…")


def slots_figure(data: SlotsPicture) -> Figure:
    """The function, the weights of its slots and the error below its bound; near the kink if there is one."""
    near = "input y" if data.place is None else _distance(data.place)
    ends = (float(data.offset[0]), float(data.offset[-1]))
    error = _error(data.error, data.bound, data.dtype, near, data.offset, data.relative, x_range=ends)
    weights = [Fan(data.offset, data.weights.T, data.labels)]
    return Figure(
        "slots",
        f"{data.name} from a few slots: the function, the weights, the error.",
        (
            Panel(
                f"{_short(data.name, 20)} on {_interval(data.interval)}", "input y", "output",
                [Series("target", data.y, data.target, style="broad", role="target"),
                 Series("head", data.y, data.output, role="output")], legend="inside",
            ),
            Panel(
                "Weights of the slots", near, "weight", marks=weights, x_range=ends, y_range=(-0.02, 1.02),
                legend="top",
            ),
            replace(error, title=f"Error in {data.dtype}"),
        ),
    )  # fmt: skip


def _distance(place: float) -> str:
    """The name of an axis that starts at `place`."""
    if place == 0:
        return "y, near 0"
    return f"y {'−' if place > 0 else '+'} {abs(place):g}"


@dataclass(frozen=True)
class Comparison:
    """One function's bounds: float64, float32, and the error of cold selection with the same anchors."""

    name: str
    interval: tuple[float, float]
    float64: float
    float32: float
    cold: float

    def __post_init__(self) -> None:
        for field in ("float64", "float32", "cold"):
            if not 0 < getattr(self, field) < np.inf:
                raise ArgumentError(f"{self.name}: {field} is a positive number, got {getattr(self, field)}")


def comparison_figure(rows: Sequence[Comparison]) -> Figure:
    """A dot plot of bounds on a log axis, one line per function: float64, float32 and cold selection."""
    if not rows:
        raise ArgumentError("a comparison needs at least one function")
    of = {role: [getattr(row, role) for row in rows] for role in SWEPT}
    lows, highs = ([f(numbers) for numbers in zip(*of.values(), strict=True)] for f in (min, max))
    places = range(len(rows))
    panel = Panel(
        "", "error at most (smaller is better)", "",
        [Series(LABELS[name], of[name], places, style="points", role=role) for name, role in SWEPT.items()],
        log_x=True, x_range=(min(lows) / 6, max(highs) * 6), marks=[Spans("", places, lows, highs, "rule")],
        rows=[f"{_short(r.name)}  {_interval(r.interval)}" for r in rows],
    )  # fmt: skip
    caption = "The certified bound in float64 and float32, and cold selection with as many anchors."
    return Figure("bounds", caption, (panel,), columns=(1,), heights=(ROWS + ROW * len(rows),))


#: The roles of what is compared: bounds in two dtypes, and the error of cold selection with the same anchors.
SWEPT = {"float64": "target", "float32": "output", "cold": "bound"}
LABELS = {"float64": "certified, float64", "float32": "certified, float32", "cold": "cold selection, same anchors"}


def swept(label: str, kind: str, points: Sequence[tuple[float, float]]) -> Series:
    """Errors against a knob, in the colour that its kind has in every comparison: float64, float32 or cold."""
    if kind not in SWEPT:
        raise ArgumentError(f"a curve's kind is one of {', '.join(SWEPT)}, got {kind!r}")
    if len(points) < 2 or not all(y > 0 for _, y in points):
        raise ArgumentError(f"the curve '{label}' needs at least two points, with positive errors")
    return Series(label, [x for x, _ in points], [y for _, y in points], role=SWEPT[kind])


@dataclass(frozen=True, eq=False)
class Shapes:
    """A target at points y, and what a cold and a warm head with the same few anchors make of it."""

    title: str
    y: Array
    target: Array
    cold: Array
    warm: Array
    anchors: Array

    def __post_init__(self) -> None:
        lengths = {len(row) for row in (self.y, self.target, self.cold, self.warm)}
        if len(lengths) != 1:
            raise ArgumentError(f"y, target, cold and warm have one length, got {sorted(lengths)}")


def sweep_figure(panels: Sequence[Panel], shapes: Shapes | None = None) -> Figure:
    """Panels of errors side by side on one axis, after the shapes if there are any, with one legend."""
    if not panels:
        raise ArgumentError("a sweep needs at least one panel")
    errors = [error for panel in panels for series in panel.series for error in series.y if error is not None]
    ends = (min(errors) / 4, max(errors) * 4)
    shown = [
        replace(panel, y="" if number else "largest error (smaller is better)", log_y=True, y_range=ends)
        for number, panel in enumerate(panels)
    ]
    caption = "What a cold and a warm head compute, and bounds against one knob."
    widths = (0.9,) * (shapes is not None) + (1.0,) * len(panels)
    return Figure("sweep", caption, (*([_shapes(shapes)] if shapes is not None else []), *shown), columns=widths)


def _shapes(shapes: Shapes) -> Panel:
    low, high = float(shapes.target.min()), float(shapes.target.max())
    series = [
        Series("", shapes.y, shapes.target, style="broad", role="soft"),
        Series("", shapes.y, shapes.cold, role="bound"),
        Series("", shapes.y, shapes.warm, role="target"),
        Series("", shapes.anchors, np.interp(shapes.anchors, shapes.y, shapes.target), style="points", role="anchor"),
    ]
    margin, ends = 0.12 * (high - low), (float(shapes.y[0]), float(shapes.y[-1]))
    return Panel(shapes.title, "input y", "output", series, x_range=ends, y_range=(low - margin, high + margin))
