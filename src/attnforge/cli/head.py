"""`attnforge head`: one function of one scalar becomes one head; its certificate is shown, drawn, saved."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ArgumentError
from ..functions.registry import get
from ..heads.anchor.head import AnchorHead
from ..heads.gate.head import GateHead
from ..report.figures import save
from ..report.pictures import figure_of
from .common import DType, number, say, waiting, whole


class PotentialName(StrEnum):
    """The potentials an anchor head can be asked to use."""

    auto = "auto"
    square = "square"
    log = "log"
    atan = "atan"
    ends = "ends"


# Functions with kinks that are gates (section B of the mathematics), where anchors converge slowly.
GATES: dict[str, tuple[str, dict[str, float]]] = {
    "abs": ("abs", {}),
    "hardtanh": ("ramp", {"a": -1.0, "b": 1.0}),
    "leaky_relu": ("leaky_relu", {"slope": 0.01}),
    "relu": ("relu", {}),
    "relu6": ("ramp", {"a": 0.0, "b": 6.0}),
}


def head(
    function: Annotated[
        str, typer.Argument(metavar="FUNCTION", help="A name such as gelu or 'power(-1.5)': attnforge functions")
    ],
    lo: Annotated[float, typer.Option(parser=number, metavar="NUMBER", help="Where the interval begins.")],
    hi: Annotated[float, typer.Option(parser=number, metavar="NUMBER", help="Where it ends.")],
    anchors: Annotated[
        int | None, typer.Option(parser=whole, metavar="COUNT", help="How many anchors; 32 when --eps is not given.")
    ] = None,
    eps: Annotated[
        float | None, typer.Option(parser=number, metavar="NUMBER", help="Use as few anchors as certify this error.")
    ] = None,
    dtype: Annotated[DType, typer.Option(help="The dtype that ships and that the bound is for.")] = DType.float32,
    relative: Annotated[bool, typer.Option("--relative", help="Bound |head - f| / |f| instead.")] = False,
    cold: Annotated[bool, typer.Option("--cold", help="Select the nearest anchor, as in the paper.")] = False,
    potential: Annotated[PotentialName, typer.Option(help="How anchors are spaced.")] = PotentialName.auto,
    kappa: Annotated[
        float | None, typer.Option(parser=number, metavar="NUMBER", help="Inverse temperature, scale free.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the head: .png, .svg or .pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Save the head as .safetensors.")
    ] = None,
) -> None:
    """Fit one softmax head to FUNCTION on [lo, hi] and print its certificate.

    Functions with kinks (relu, abs, ...) become gate heads, sharp up to rounding, unless --anchors, --relative, --cold,
    --potential or --kappa ask for an anchor head.

    \b
    attnforge head gelu --lo -8 --hi 8 --eps 1e-6 --dtype float64 --plot gelu.png
    """
    if output is not None and output.suffix != ".safetensors":
        raise ArgumentError(f"a head is saved as .safetensors, got '{output}'")
    name = get(function).name
    plain = anchors is None and kappa is None and not (cold or relative) and potential is PotentialName.auto
    built: AnchorHead | GateHead
    with waiting(f"fitting {name}"):
        if plain and name in GATES:
            gate, parameters = GATES[name]
            built = GateHead.fit(gate, lo, hi, eps, dtype=dtype.torch, **parameters)
        else:
            built = AnchorHead.fit(
                name,
                lo,
                hi,
                anchors=anchors,
                eps=eps,
                dtype=dtype.torch,
                relative=relative,
                potential=potential.value,
                temperature="cold" if cold else "auto",
                kappa=kappa,
            )
    written: list[Path] = []
    if output is not None:
        built.save(output)
        written.append(output)
    if plot is not None:
        with waiting("drawing"):
            written.append(save(figure_of(built), plot))
    if as_json:
        say(json.dumps(description(built), allow_nan=False))
        return
    say(f"{summary(built)}\n\n{built.certificate}")
    if built.measured is not None:
        say(f"largest error measured {built.measured:.3e}")
    for path in written:
        say(f"wrote {path}")


def summary(built: AnchorHead | GateHead) -> str:
    """One line on what was built."""
    where = f"on [{built.lo:g}, {built.hi:g}]"
    dtype = built.certificate.dtype
    if isinstance(built, GateHead):
        sharp = "exact" if built.sharpness is None else f"sharpness {built.sharpness:.4g}"
        return f"{built.name} {where} by a gate head: {sharp}, {dtype}"
    shape = f"{built.size} anchors, potential {built.potential}, kappa {built.kappa:.3g}"
    return f"{built.function.name} {where} by an anchor head: {shape}, {dtype}"


def description(built: AnchorHead | GateHead) -> dict[str, Any]:
    """What --json prints."""
    certificate = built.certificate
    shared = {
        "function": certificate.target,
        "family": built.family,
        "interval": [built.lo, built.hi],
        "dtype": certificate.dtype,
        "relative": certificate.relative,
        "bound": certificate.bound,
        "measured": certificate.measured,
        "certificate": certificate.to_json(),
    }
    if isinstance(built, GateHead):
        return {**shared, "anchors": 0, "kappa": None, "potential": None, "sharpness": built.sharpness}
    return {
        **shared,
        "anchors": built.size,
        "kappa": built.kappa,
        "potential": str(built.potential),
        "places": built.anchors.tolist(),
        "values": built.values.tolist(),
    }
