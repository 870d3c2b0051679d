"""From finished heads to what their figures show: sample points, outputs, weights and errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..charts.themes import Builder, Theme, new_figure
from ..dtypes import Array
from ..errors import ArgumentError
from ..heads.anchor.head import AnchorHead
from ..heads.chain.head import ChainHead
from ..heads.gate.head import GateHead
from ..heads.gate.target import Lines, Logistic
from .figures import HeadPicture, _draw_error, _interval, _ramp, _short, head_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = 401  # drawn; each is the worst of CROWD neighbours, so that no peak of the error is lost
CROWD = 11
NEAR = 16.0  # a gate is drawn where |sharpness * (y - kink)| is below this: beyond it one slot has all the weight


def figure_of(head: AnchorHead | GateHead | ChainHead) -> Builder:
    """The figure that suits a head: its anchors where it has some, else its slots."""
    if isinstance(head, AnchorHead) and head.potential.name != "exact":
        return head_figure(head_picture(head))
    return slots_figure(slots_picture(head))


@torch.no_grad()
def head_picture(head: AnchorHead, points: int = POINTS) -> HeadPicture:
    """An anchor head at points that are even between its anchors, evaluated as shipped, compared in float64."""
    ends = head.potential.flat(np.array([head.lo, head.hi]))
    y = _inside(head.potential.unflat(np.linspace(ends[0], ends[1], points * CROWD)), head)
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
def slots_picture(head: AnchorHead | GateHead | ChainHead, points: int = 2 * POINTS) -> SlotsPicture:
    """A gate near its first kink, or any head of few slots (of a chain the first) on all of its interval."""
    y = _inside(np.linspace(head.lo, head.hi, points), head)
    place, near = None, y
    if isinstance(head, GateHead) and isinstance(head.spec.target, Lines) and head.sharpness is not None:
        kinks = [k for k in head.spec.target.knots if head.lo <= k <= head.hi]
        if kinks:
            place = kinks[0]
            reach = max(NEAR / head.sharpness, 64 * float(np.spacing(np.float32(place)) if place else 0.0))
            near = _inside(place + np.linspace(-reach, reach, points), head)
    group = head.layer.heads()[0]
    weights = group.weights(near.unsqueeze(-1))
    error = (head.core(near).double() - torch.from_numpy(_target(head, near))).numpy()
    return SlotsPicture(
        head.name if isinstance(head, GateHead) else head.function.name, (head.lo, head.hi), y.double().numpy(),
        _target(head, y), place, near.double().numpy() - (place or 0.0), weights.double().flatten(1).numpy(),
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


def _target(head: AnchorHead | GateHead | ChainHead, y: torch.Tensor) -> Array:
    """The exact target at y, in float64."""
    at = y.double()
    if not isinstance(head, GateHead):
        return np.asarray(head.function.value(at).numpy())
    target = head.spec.target.shape
    if isinstance(target, Logistic):
        high, low = (float(line[0]) * at + float(line[1]) for line in (target.high, target.low))
        return np.asarray((torch.sigmoid(target.rate * at) * high + torch.sigmoid(-target.rate * at) * low).numpy())
    lines = np.array([[float(slope), float(intercept)] for slope, intercept in target.lines])
    slope, intercept = lines[np.searchsorted(target.knots, at.numpy())].T
    return np.asarray(slope * at.numpy() + intercept)


def slots_figure(data: SlotsPicture) -> Builder:
    """The function, the weights of its slots and the error below its bound; near the kink if there is one."""

    def build(theme: Theme) -> Figure:
        figure = new_figure(10, 3.5)
        function, weights, error = figure.subplots(1, 3)
        function.plot(data.y, data.target, color=theme.target)
        function.set_title(f"{_short(data.name, 20)} on {_interval(data.interval)}")
        function.set_xlabel("input y")
        function.set_ylabel("target")
        for label, weight, colour in zip(data.labels, data.weights.T, _ramp(theme, len(data.labels)), strict=True):
            weights.plot(data.offset, weight, color=colour, label=label)
        weights.set_ylim(-0.02, 1.3)
        weights.set_yticks([0, 0.5, 1])
        weights.set_title("Softmax weights of the slots")
        weights.legend(loc="upper center", ncols=2 if len(data.labels) > 2 else 1, fontsize=8.5)
        _draw_error(error, _as_head(data), theme)
        error.set_title(f"Error in {data.dtype}")
        for axes in (weights, error):
            axes.set_xlim(data.offset[0], data.offset[-1])
            axes.ticklabel_format(axis="x", style="sci", scilimits=(-3, 4), useMathText=True)
            axes.set_xlabel("input y" if data.place is None else _distance(data.place))
        return figure

    return build


def _distance(place: float) -> str:
    """The name of an axis that starts at `place`."""
    if place == 0:
        return "y, near 0"
    return f"y {'−' if place > 0 else '+'} {abs(place):g}"


def _as_head(data: SlotsPicture) -> HeadPicture:
    """The same error as a picture that the shared panel draws."""
    ends = (float(data.offset[0]), float(data.offset[-1]))
    blank = np.zeros(0)
    return HeadPicture(
        data.name, ends, data.offset, data.error, data.error, data.error, data.bound, blank, blank,
        np.zeros((len(data.offset), 0)), 1.0, "", data.dtype, data.relative,
    )  # fmt: skip
