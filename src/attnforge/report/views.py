"""What the methods of every network show: `net.plot()`, `net.report()`, `net.explain()`, `net.measure()`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..arguments import counted, whole
from ..certificates.certificate import upper_text
from ..certificates.certified import CertifiedModule
from ..charts.chart import Figure
from ..charts.drawing import matplotlib_figure, save
from ..compiler.compiled import CompiledNetwork
from ..errors import ArgumentError
from ..heads.anchor.head import AnchorHead
from ..heads.chain.head import ChainHead
from ..heads.gate.head import GateHead
from ..rasp.network.compiled import CompiledProgram
from ..rasp.network.several import CompiledPrograms
from .heads import figure_of, target_of
from .html import Page
from .lines import LOOKED_AT, line_figure
from .network import SampledErrors, network_page, slices, slices_figure
from .network import measure as measured
from .program import program_page
from .structure import structure

HEADS = (AnchorHead, GateHead, ChainHead)  # of one scalar: what can be drawn beside its target


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
        page.cards([("certified bound", upper_text(certificate.bound), f"{size}on all of the domain"),
                    ("lemmas", ", ".join(certificate.lemmas) or "–", "of the theory"),
                    ("numbers", f"{numbers:,}", f"of weights, {certificate.dtype}")])  # fmt: skip
    figure = picture(net)
    if figure is not None:
        page.section("Function and network")
        page.figure(figure)
    page.section("The certificate")
    page.text(f"On `{certificate.domain or repr(net.box)}`; {claimed}.")
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
