"""`attnforge compile`: formulas become a certified network, saved to a file and shown on a page."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ..certificates.certificate import upper_text
from ..compiler.compiled import CompiledNetwork
from ..compiler.pipeline import compile as build
from ..errors import ArgumentError
from ..extras import require
from ..report.network import measure, network_page
from .common import DType, box, number, refuse_overwriting, say, waiting

FORMULAS = typer.Argument(metavar="FORMULA...", help="Such as 'sin(x*y) + exp(-x**2)/y'; several give several outputs.")
BOX = typer.Option("--box", metavar="NAME=LO:HI", help="The interval of one variable; once for each.")
FORCE = typer.Option("--force", help="Overwrite files that are there already.")


def compile(
    formulas: Annotated[list[str], FORMULAS],
    eps: Annotated[
        float | None, typer.Option(parser=number, metavar="NUMBER", help="The largest error allowed on the box.")
    ] = None,
    boxes: Annotated[list[str] | None, BOX] = None,
    rtol: Annotated[
        float, typer.Option(parser=number, metavar="NUMBER", help="Allow so much of the target's size beside --eps.")
    ] = 0.0,
    dtype: Annotated[DType, typer.Option(help="The dtype that ships and that the bound is for.")] = DType.float32,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Save the network as .safetensors.")
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page about it, as .html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    force: Annotated[bool, FORCE] = False,
) -> None:
    """Compile FORMULA into an attention-only network and print its certificate.

    The certificate bounds |network - formula| on the whole box, rounding included. If --eps cannot be reached, nothing
    is written and the message says what would work.

    \b
    attnforge compile "sin(x*y) + exp(-x**2)/y" --box x=-1:1 --box y=0.5:2 --eps 1e-3 -o net.safetensors
    """
    if eps is None and not rtol:
        raise ArgumentError("how large may the error be? give --eps, --rtol or both, such as --eps 1e-3")
    where = box(boxes or [])
    written = refuse_overwriting({".safetensors": output, ".html": report}, force)
    if report is not None:  # found out now, not after the work
        require("jinja2", "report")
        require("matplotlib", "report")
    start = time.perf_counter()
    net = build(formulas_of(formulas), where, eps, rtol=rtol, dtype=dtype.torch)
    seconds = time.perf_counter() - start
    if output is not None:
        net.save(output)
    if report is not None:
        with waiting("writing the page"):
            network_page(net).save(report)
    if as_json:
        say(json.dumps(description(net, seconds, written), allow_nan=False))
        return
    found = measure(net)
    say(f"{net.size}, compiled in {seconds:.1f} s\n\n{net.certificate}")
    say(f"largest error measured {found.worst:.3e}, on {found.count:,} points of the box")
    for path in written:
        say(f"wrote {path}")


def formulas_of(texts: list[str]) -> str | list[str]:
    """One formula is a number at each point, several a row."""
    return texts[0].strip() if len(texts) == 1 else [text.strip() for text in texts]


def description(net: CompiledNetwork, seconds: float, written: list[Path]) -> dict[str, Any]:
    """What --json prints."""
    certificate = net.certificate
    return {
        "target": certificate.target,
        "bound": certificate.bound,
        "shown": upper_text(certificate.bound),
        "eps": net.eps,
        "rtol": net.rtol,
        "dtype": certificate.dtype,
        "box": certificate.box.to_json(),
        "size": vars(net.size),
        "measured": measure(net).worst,
        "seconds": seconds,
        "certificate": certificate.to_json(),
        "written": [str(path) for path in written],
    }
