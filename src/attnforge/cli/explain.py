"""`attnforge explain`: a saved network layer by layer, which head computes what, at what error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .. import files
from ..certificates.certificate import upper_text
from ..certificates.certified import CertifiedModule
from ..compiler.compiled import CompiledNetwork
from ..errors import ArgumentError
from ..report.structure import Structure, Unit, structure
from .common import say, table, waiting

HEADER = ("computes", "by", "heads", "anchors", "on", "temperature", "its error", "in the bound", "share")
RIGHT = ("heads", "anchors", "its error", "in the bound", "share")


def explain(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .safetensors file written by attnforge.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Take a saved network apart: layer by layer, which heads compute what, with which anchors, at what error.

    "its error" is what the heads of a row add themselves, at most; "in the bound" is what becomes of that at the
    output, at the place where the bound is largest. These numbers add up to the bound.
    """
    if not file.is_file():
        raise ArgumentError(f"there is no file '{file}'")
    with waiting(f"reading {file.name}"):
        net = files.load(file)
        parts = structure(net) if isinstance(net, CompiledNetwork) else None
    if parts is None or not isinstance(net, CompiledNetwork):
        _explain_head(net, as_json)
        return
    certificate = net.certificate
    if as_json:
        units = [unit.to_json() for unit in parts.units]
        shown = {"target": certificate.target, "bound": certificate.bound, "layers": parts.layers, "units": units}
        say(json.dumps({**shown, "affine": parts.affine}, allow_nan=False))
        return
    say(f"{certificate.target}\non {certificate.box!r}, {certificate.dtype}\n{net.size}")
    for number in range(1, parts.layers + 1):
        say(f"\nlayer {number}")
        table(HEADER, [row(unit, certificate.bound or 0.0) for unit in parts.layer(number)], right=RIGHT)
    say(f"\nread off by an affine map from {sources(parts)}")
    say(f"affine maps add at most {upper_text(parts.affine)}; all in all at most {upper_text(certificate.bound)}")


def row(unit: Unit, bound: float) -> tuple[str, ...]:
    """One line of the table."""
    by = unit.family if unit.operation in (unit.family, unit.name) else f"{unit.family}, {unit.operation}"
    share = f"{unit.share / bound:.0%}" if bound else "-"
    counts = (str(unit.heads), str(unit.anchors or "-"))
    errors = (upper_text(unit.error), upper_text(unit.share), share)
    return (f"%{unit.number} {unit.name}", by, *counts, unit.interval, unit.temperature or "-", *errors)


def sources(parts: Structure) -> str:
    """What the output is made of, in words."""
    names = [f"%{number}" for number in parts.output] + ["the input"] * bool(parts.direct)
    return ", ".join(names) or "constants"


def _explain_head(net: CertifiedModule, as_json: bool) -> None:
    """A single head has no layers: its description and certificate say all."""
    if as_json:
        say(json.dumps({"family": net.family, "certificate": net.certificate.to_json()}, allow_nan=False))
        return
    say(f"one head of the family '{net.family}'\n\n{net.certificate}")
