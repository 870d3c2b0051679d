"""The README.md of an exported folder: what the network computes, where, how well, how large, how to load it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..certify.certificate import Certificate, upper_text
from ..certify.certified import CertifiedModule
from ..compiled import CompiledNetwork
from ..errors import MissingExtra
from ..ir.interpret import values
from ..report._optional import require
from ..report.style import Builder, Theme, new_figure, save
from ..theorems.result import Construction
from .domain import domain
from .plain import PlainTransformer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .verify import Verification

FIGURE = "error.png"
POINTS = 801  # along the diagonal
SHOWN = 12  # variables, sites and heads listed before the rest is counted


def card(
    net: CertifiedModule,
    figures: Mapping[str, object],
    verification: Verification | None,
    loading: str,
    picture: str | None = None,
) -> str:
    """A model card as Markdown with the header that the Hub reads; `figures` are rows of the table of sizes."""
    found = net.certificate
    lines = [
        "---", "library_name: transformers", "tags:", "- attnforge", "- attention-only", "- certified", "---", "",
        f"# {_title(found.target)}", "",
        "An attention-only transformer: softmax attention and affine maps, no activation, no norm. Its weights were "
        "compiled, not trained.", "",
        "## Target", "", "```text", found.target, "```", "", *_box(found), "",
        "## Accuracy", "", *_accuracy(found, verification), "",
    ]  # fmt: skip
    if picture is not None:
        lines += [f"![Output and error along a diagonal of the box]({picture})", ""]
    lines += ["## Figures", "", "| figure | value |", "|---|---|"]
    lines += [f"| {_cell(name)} | {value} |" for name, value in figures.items()]
    lines.append("")
    lines += ["## Use", "", "```python", loading.strip(), "```", ""]
    if found.terms:
        lines += ["## Where the bound comes from", "", "| site | source | at most |", "|---|---|---|"]
        terms = sorted(found.terms, key=lambda term: -term.value)
        lines += [f"| {_cell(t.site)} | {t.source} | {upper_text(t.value)} |" for t in terms[:SHOWN]]
        if len(terms) > SHOWN:
            rest = upper_text(sum(t.value for t in terms[SHOWN:]) * (1 + 1e-9))
            lines.append(f"| {len(terms) - SHOWN} more | | {rest} |")
        lines.append("")
    if found.assumptions:
        lines += ["The bound assumes:", "", *(f"- {line}" for line in found.assumptions), ""]
    return "\n".join(lines)


def draw(net: CertifiedModule, path: Path) -> str | None:
    """The figure of a card beside it, if matplotlib is there and the target can be evaluated: its file name."""
    builder = _picture(net)
    if builder is None:
        return None
    try:
        require("matplotlib", "report")
    except MissingExtra:  # a card without a picture is still a card
        return None
    save(builder, path)
    return path.name


def _title(target: str) -> str:
    return target if len(target) <= 60 else f"{target[:57]}..."


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _box(found: Certificate) -> list[str]:
    box = found.box
    if box.names is None:
        return [f"on `{box!r}`: tensors of shape {box.shape}, batch dimensions first."]
    sides = list(zip(box.names, box.intervals(), strict=True))
    rows = ["| variable | from | to |", "|---|---|---|"]
    rows += [f"| {name} | {lo:.9g} | {hi:.9g} |" for name, (lo, hi) in sides[:SHOWN]]
    return rows + ([f"| {len(sides) - SHOWN} more | | |"] if len(sides) > SHOWN else [])


def _accuracy(found: Certificate, verification: Verification | None) -> list[str]:
    unit = " of the target's size" if found.relative else ""
    if found.bound is None:
        lines = [f"Calibrated, not certified: the largest error measured is {found.measured:.3e}{unit}."]
    else:
        lines = [
            f"Certified: |network - target| is at most **{upper_text(found.bound)}**{unit} everywhere on the box, "
            f"rounding of {found.dtype} included. Outside the box the certificate says nothing."
        ]
    if verification is not None:
        lines += [
            "",
            f"Measured: these files, loaded by a fresh process, differ from the network they were exported from by at "
            f"most {verification.largest:.2e} at {verification.points:,} random, corner and adversarial points.",
        ]
    return lines


@torch.no_grad()
def _picture(net: CertifiedModule) -> Builder | None:
    """Output and target, and the error below its bound, from the lowest to the highest corner of the box."""
    if isinstance(net, PlainTransformer) and net._source:
        net = net._source[0]
    where = domain(net)
    t = torch.linspace(0, 1, POINTS, dtype=torch.float64).unsqueeze(-1)
    points = (where.lower + t * (where.upper - where.lower)).to(net.dtype)
    inputs = where.split(points)
    if isinstance(net, CompiledNetwork):
        target = values(net.program, points.double().reshape(-1, *net.program.box.shape))
    elif isinstance(net, Construction):
        target = net.target(inputs[0])
    else:
        return None
    output = net.core(*inputs).double()
    truth, found = (x.reshape(POINTS, -1).numpy() for x in (target, output))
    error = np.abs(found - truth).max(-1)
    bound = None if net.certificate.relative else net.certificate.bound
    at = t.squeeze(-1).numpy()

    def build(theme: Theme) -> Figure:
        figure = new_figure(8.0, 3.2)
        left, right = figure.subplots(1, 2)
        left.plot(at, truth[:, 0], color=theme.target, linewidth=3, alpha=0.5, label="target")
        left.plot(at, found[:, 0], color=theme.output, linewidth=1.2, label="network")
        left.set_title("output" if truth.shape[1] == 1 else f"output 1 of {truth.shape[1]}")
        right.semilogy(at, np.maximum(error, 1e-18), color=theme.output, linewidth=1, label="|network - target|")
        if bound is not None:
            right.axhline(bound, color=theme.bound, linewidth=1.5, linestyle="--", label="certified bound")
        right.set_title("error")
        for axes in (left, right):
            axes.set_xlabel("from the lowest to the highest corner of the box")
            axes.legend(loc="best")
        return figure

    return build
