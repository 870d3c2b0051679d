"""What the methods of every network show: `net.plot()`, `net.report()`, `net.explain()`, `net.measure()`.

What has no picture of its own is drawn along one line through what it is for: heads of several numbers, norms, rows of
tokens, plain transformers; and black boxes at the points that were held out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arguments import counted, whole
from ..blackbox.result import Approximation
from ..certificates.certificate import upper_text
from ..certificates.certified import CertifiedModule
from ..charts.chart import Figure, Level, Panel, Series, error_panel
from ..charts.drawing import matplotlib_figure, save
from ..compiler.compiled import CompiledNetwork
from ..errors import ArgumentError
from ..heads.anchor.head import AnchorHead
from ..heads.chain.head import ChainHead
from ..heads.fast.activation import FastActivation
from ..heads.gate.head import GateHead
from ..heads.norm.head import NormHead
from ..heads.product.head import ProductHead
from ..heads.token.head import TokenHead
from ..rasp.network.compiled import CompiledProgram
from ..rasp.network.several import CompiledPrograms
from ..theorems.grid import Sampled
from ..theorems.result import Construction, theorem_figure
from .heads import exact_gate, figure_of, target_of
from .html import Page
from .network import CENTRE, SLICE, SampledErrors, Slice, network_page, slices, slices_figure
from .network import measure as measured
from .program import program_page
from .structure import structure

HEADS = (AnchorHead, GateHead, ChainHead)  # of one scalar: what can be drawn beside its target
LOOKED_AT = 4096  # points that are looked at for a plot: the worst of them gets a slice of its own
SEED = 3  # of the two ends of a line between rows: any will do, and the same ones every time


def plot(net: CertifiedModule, path: str | Path | None = None, *, force: bool = False) -> Any:
    """The figure of a network, or where it was written."""
    figure = picture(net)
    if figure is None:
        raise ArgumentError(f"there is no picture of a {type(net).__name__}; networks of formulas and heads have one")
    return matplotlib_figure(figure) if path is None else save(figure, path, force=force)


def picture(net: CertifiedModule) -> Figure | None:
    """Function and network along lines through the box, or a head with its anchors; None for what has no picture."""
    if isinstance(net, CompiledNetwork):
        return slices_figure(slices(net, measured(net, LOOKED_AT)), net.bound or 0.0)
    return figure_of(net) if isinstance(net, HEADS) and net.box.dim == 1 else line_figure(net)


def report(net: CertifiedModule, path: str | Path | None = None, *, force: bool = False) -> Page | Path:
    """The page of a network, or where it was written."""
    if isinstance(net, CompiledNetwork):
        page = network_page(net)
    elif isinstance(net, (CompiledProgram, CompiledPrograms)):
        page = program_page(net)
    else:
        page = _head_page(net)
    return page if path is None else page.save(path, force=force)


def _head_page(net: CertifiedModule) -> Page:
    """The page of what is no compiled network: its bound, its picture, and where the bound comes from."""
    certificate = net.certificate
    size = "of the target's size, " if certificate.relative else ""
    claimed = "outside of it nothing is claimed" if certificate.bound is not None else "nothing is proved"
    page = Page(f"{certificate.target}: {net.called}", f"Softmax attention and affine maps only, {certificate.dtype}.")
    if certificate.bound is None:
        page.cards([("largest error seen", f"{certificate.measured:.3g}", f"{size}measured, not certified")])
    else:
        numbers = sum(p.numel() for p in net.parameters())
        page.cards([(f"{certificate.word} bound", upper_text(certificate.bound), f"{size}on all of the domain"),
                    ("lemmas", ", ".join(certificate.lemmas) or "–", "of the theory"),
                    ("numbers", f"{numbers:,}", f"of weights, {certificate.dtype}")])  # fmt: skip
    figure = picture(net)
    if figure is not None:
        page.section("Function and network")
        page.figure(figure)
    page.section("The certificate")
    page.text(f"On `{certificate.domain or repr(net.box)}`; {claimed}.")
    if certificate.hypothesis:
        page.text(f"The bound is proved {certificate.hypothesis}.")
    if certificate.terms:
        rows: list[tuple[object, ...]] = []
        rows += [(t.site, t.source, upper_text(t.value, 4), t.note or None) for t in certificate.terms]
        rows.append(("bound", "", upper_text(certificate.bound, 4), None))
        page.table(["site", "source", "at most", "note"], rows, "Where the bound comes from: the lines add up.", "llrl")
    page.details("All of it, as print(net.certificate) shows it").code(explain(net))
    return page


def explain(net: CertifiedModule) -> str:
    """Layer by layer which heads compute what, at what error; for a head its certificate."""
    if not isinstance(net, CompiledNetwork):
        return f"{net!r}\n\n{net.certificate}"
    parts, bound = structure(net), net.certificate.bound
    lines = [net.certificate.target, f"on {net.box!r}, {net.certificate.dtype}", str(net.size)]
    for number in range(1, parts.layers + 1):
        lines += ["", f"layer {number}"]
        for unit in parts.layer(number):
            size = counted(unit.heads, "head") + (f", {counted(unit.anchors, 'anchor')}" if unit.anchors else "")
            lines.append(
                f"  %{unit.number} {unit.name}: {unit.family}, {size}, on {unit.interval}; "
                f"adds at most {upper_text(unit.error)}, in the bound {upper_text(unit.share)}"
            )
    end = f"affine maps add at most {upper_text(parts.affine)}; all in all at most {upper_text(bound)}"
    return "\n".join([*lines, "", end])


def measure(net: CertifiedModule, count: int = LOOKED_AT, seed: int = 0) -> SampledErrors:
    """The errors at random points and at the ends of the box: a measurement, not a bound."""
    whole("count", count, 1)
    if isinstance(net, CompiledNetwork):
        return measured(net, count, seed)
    known = next((head for head in LINES if isinstance(net, head.kind)), None)
    if known is not None and not isinstance(net, HEADS if len(net.box.names or ()) == 1 else ()):
        return _at_random(net, known, count, seed)
    if not isinstance(net, HEADS):
        kind = type(net).__name__
        raise ArgumentError(f"the target of a {kind} is not known here: there is nothing to measure it against")
    points = torch.cat([net.box.sample(count, seed, net.dtype), net.box.corners(2, net.dtype)]).reshape(-1)
    target = target_of(net, points)
    error = np.abs(net.core(points).detach().double().numpy() - target)
    if net.certificate.relative:
        error /= np.abs(target)
    return SampledErrors(
        error, points[[int(error.argmax())]].double().numpy(), (float(target.min()), float(target.max()))
    )


# -- along one line ------------------------------------------------------------------------------------------------


@torch.no_grad()
def line_figure(net: CertifiedModule) -> Figure | None:
    """The figure of a network that is no head of one number; None where the target is not known or is no number."""
    if isinstance(net, Construction):
        return None if isinstance(getattr(net, "f", None), Sampled) else theorem_figure(net.picture())
    if isinstance(net, Approximation):
        return _held_out(net)
    if isinstance(origin := net.stands_for(), CompiledNetwork):
        found = measured(origin, LOOKED_AT, runs=net)
        return slices_figure(slices(origin, found, runs=net), net.bound or 0.0)
    known = next((head for head in LINES if isinstance(net, head.kind)), None)
    if known is None:
        return None
    label, inputs = known.along(net)
    target = known.exact(net, *inputs).reshape(SLICE, -1).numpy()
    output = net.core(*inputs).double().reshape(SLICE, -1).numpy()
    error = np.abs(output - target) / (_scale(net, target) if net.certificate.relative else 1.0)
    worst = int(error.max(0).argmax())
    x = np.linspace(0, 1, SLICE) if len(inputs) > 1 or inputs[0].dim() > 1 else inputs[0].double().numpy()
    line = Slice(label, CENTRE, x, target[:, worst], output[:, worst], error.max(-1))
    words = "Function and network along a line, of the output that errs most; below, the error"
    words += " as a part of the row's largest value" if net.certificate.relative else ""
    return replace(slices_figure([line], net.bound or 0.0), caption=f"{words}. The dashed line is the bound.")


@torch.no_grad()
def _at_random(net: CertifiedModule, known: KnownHead, count: int, seed: int) -> SampledErrors:
    """The errors of a head at inputs drawn from what its certificate speaks of."""
    inputs = known.drawn(net, count, seed)
    target = known.exact(net, *inputs).reshape(count, -1).numpy()
    output = net.core(*inputs).double().reshape(count, -1).numpy()
    error = (np.abs(output - target) / (_scale(net, target) if net.certificate.relative else 1.0)).max(-1)
    worst = torch.cat([x[[int(error.argmax())]].double().reshape(1, -1) for x in inputs], -1).numpy()
    return SampledErrors(error, worst, (float(target.min()), float(target.max())))


def _between(low: Any, high: Any, dtype: torch.dtype) -> Tensor:
    """Numbers of a dtype from one to the other, within."""
    return torch.linspace(low, high, SLICE, dtype=torch.float64).clamp(low, high).to(dtype)


Inputs = tuple[Tensor, ...]
Line = tuple[str, Inputs]
DIAGONAL = "from the lowest corner (0) to the highest (1)"
WITHIN = 1e-5  # of a variance's interval, at either end: rows are rounded after they were scaled


def _activation_line(net: FastActivation) -> Line:
    return "input y", (_between(net.lo, net.hi, net.dtype),)


def _columns(net: CertifiedModule, count: int, seed: int) -> Inputs:
    return net.box.sample(count, seed, net.dtype).unbind(-1)


def _pair_line(net: GateHead) -> Line:
    (low, high), (first, last) = net.box.intervals()
    x, y = _between(low, high, net.dtype), _between(first, last, net.dtype).flip(0)
    return "from the lowest x and highest y (0) to the other corner (1)", (x, y)


def _chosen(net: GateHead, x: Tensor, y: Tensor) -> Tensor:
    return y.double() + torch.from_numpy(exact_gate(net, (x.double() - y.double()).numpy()))


def _product_line(net: ProductHead) -> Line:
    x, y = (_between(*net.box[name], net.dtype) for name in ("x", "y"))
    return DIAGONAL, (x if net.width is None else x[:, None].repeat(1, net.width), y)


def _factors(net: ProductHead, count: int, seed: int) -> Inputs:
    x, y = _columns(net, count * (net.width or 1), seed)
    return (x, y) if net.width is None else (x.reshape(count, net.width), y[:count])


def _multiplied(net: ProductHead, x: Tensor, y: Tensor) -> Tensor:
    return x.double() * (y.double() if net.width is None else y.double()[:, None])


def _rows(count: int, width: int, seed: int = SEED) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _scaled(net: NormHead, rows: Tensor, variance: Tensor | float) -> Tensor:
    """Rows with the variance that is asked for, of the mean 0 where that is taken away."""
    rows = rows - (rows.mean(-1, keepdim=True) if net.kind == "layer" else 0.0)
    return (rows * (variance / rows.square().mean(-1, keepdim=True)).sqrt()).to(net.dtype)


def _norm_line(net: NormHead) -> Line:
    """From one row to another, at the variance in the middle of the interval."""
    share = torch.linspace(0, torch.pi / 2, SLICE, dtype=torch.float64)[:, None]
    one, other = _rows(2, net.channels)
    middle = (net.variance[0] * net.variance[1]) ** 0.5
    return "from one row (0) to another (1)", (_scaled(net, share.cos() * one + share.sin() * other, middle),)


def _norm_rows(net: NormHead, count: int, seed: int) -> Inputs:
    low, high = (torch.tensor(end, dtype=torch.float64).log() for end in net.variance)
    share = torch.rand(count, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    middle = (low + (WITHIN + (1 - 2 * WITHIN) * share) * (high - low)).exp()
    return (_scaled(net, _rows(count, net.channels, seed + 1), middle),)


def _normed(net: NormHead, x: Tensor) -> Tensor:
    exact = x.double()
    exact = exact - (exact.mean(-1, keepdim=True) if net.kind == "layer" else 0.0)
    exact = exact / (exact.square().mean(-1, keepdim=True) + net.eps_norm).sqrt()
    exact = exact if net.weight is None else exact * net.weight.double()
    return exact if net.bias is None else exact + net.bias.double()


def _scale(net: CertifiedModule, target: np.ndarray) -> np.ndarray | float:
    """What the errors of a norm are a part of (see `NormHead`); of other heads the target's size."""
    if not isinstance(net, NormHead):
        return np.abs(target).max(-1, keepdims=True)
    weight = np.ones(net.channels) if net.weight is None else net.weight.detach().double().numpy()
    bias = np.zeros(net.channels) if net.bias is None else net.bias.detach().double().numpy()
    some = weight != 0
    rows = np.abs((target - bias)[:, some] / weight[some]).max(-1, keepdims=True) if some.any() else 0.0
    return np.asarray(np.abs(weight) * rows + np.abs(bias))


def _token_line(net: TokenHead) -> Line:
    one, other = net.box.sample(2, SEED, torch.float64)
    share = torch.linspace(0, 1, SLICE, dtype=torch.float64)[:, None, None]
    return "from one sequence (0) to another (1)", (((1 - share) * one + share * other).to(net.dtype),)


def _mixed(net: TokenHead, x: Tensor) -> Tensor:
    if net.target is not None:
        return net.target.double() @ x.double()
    found: Tensor = getattr(x.double(), f"a{net.mode}")(-2, keepdim=True)
    return found.expand(x.shape)


@dataclass(frozen=True)
class KnownHead:
    """A head whose exact outputs are known: the inputs along one line with its label, inputs at random, and what is
    exact there, a row for each."""

    kind: type
    along: Callable[[Any], Line]
    drawn: Callable[[Any, int, int], Inputs]
    exact: Callable[..., Tensor]


LINES = (
    KnownHead(FastActivation, _activation_line, _columns, lambda net, y: net.function.value(y.double())),
    KnownHead(GateHead, _pair_line, _columns, _chosen),
    KnownHead(ProductHead, _product_line, _factors, _multiplied),
    KnownHead(NormHead, _norm_line, _norm_rows, _normed),
    KnownHead(TokenHead, _token_line, lambda net, count, seed: (net.box.sample(count, seed, net.dtype),), _mixed),
)


def _held_out(net: Approximation) -> Figure:
    """A black box is known where it was asked: its values in their order, those of the network, and the difference."""
    x = net.points.to(net.dtype).reshape(-1, *net.box.shape)[:SLICE]
    wanted = net.wanted.double().reshape(len(net.wanted), -1)[:SLICE, 0].cpu()
    found = net.core(x).double().reshape(len(x), -1)[:, 0].cpu()
    order = wanted.argsort()
    at, target, output = np.arange(1, len(order) + 1), wanted[order].numpy(), found[order].numpy()
    series = [Series("function", at, target, style="broad", role="target"),
              Series("network", at, output, role="output")]  # fmt: skip
    error, axis = np.abs(output - target), "held-out points, by the function's value"
    levels = [] if net.bound is None else [Level(net.bound, f"bound {upper_text(net.bound)}")]
    panels = (
        Panel("", "", "output", series, legend="inside"),
        error_panel(f"largest seen {error.max():.3g}", axis, "absolute error", at, error, levels),
    )
    caption = f"Function and network at {len(at)} points that were held out, and their difference: measured."
    return Figure("held-out", caption, panels, "Values of function and network, and their difference.", columns=(1,),
                  heights=(2.3, 2.6))  # fmt: skip
