"""`attnforge compile`: formulas become a certified network, saved and shown on a page; `attnforge plan`: how large
networks for them would be, by every route, before one is built."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ArgumentError
from .common import (
    BOX,
    COUNT,
    FORMULAS,
    NUMBER,
    AsJson,
    DType,
    Force,
    Shipped,
    box,
    formulas_of,
    keep,
    refuse_overwriting,
    require_pages,
    say,
    say_certificate,
    say_json,
    table,
    waiting,
)

if TYPE_CHECKING:
    from ..compiler.compiled import CompiledNetwork

EPS = typer.Option(help="The largest error allowed on the box.", **NUMBER)


def compile(
    formulas: Annotated[list[str], FORMULAS],
    eps: Annotated[float | None, EPS] = None,
    boxes: Annotated[list[str] | None, BOX] = None,
    rtol: Annotated[float, typer.Option(help="Allow so much of the target's size beside --eps.", **NUMBER)] = 0.0,
    dtype: Shipped = DType.float32,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Save the network as .safetensors.")
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page about it, as .html.")] = None,
    as_json: AsJson = False,
    force: Force = False,
) -> None:
    """Compile FORMULA into an attention-only network and print its certificate.

    The certificate bounds |network - formula| on the whole box, rounding included. If --eps cannot be reached, nothing
    is written and the message says what would work.

    \b
    attnforge compile "sin(x*y) + exp(-x**2)/y" --box x=-1:1 --box y=0.5:2 --eps 1e-3 -o net.safetensors
    """
    from ..compiler.pipeline import compile as build
    from ..report.network import measure

    if eps is None and not rtol:
        raise ArgumentError("how large may the error be? give --eps, --rtol or both, such as --eps 1e-3")
    where = box(boxes or [])
    written = refuse_overwriting({".safetensors": output, ".html": report}, force)
    if report is not None:
        require_pages()
    start = time.perf_counter()
    net = build(formulas_of(formulas), where, eps, rtol=rtol, dtype=dtype.torch)
    seconds = time.perf_counter() - start
    keep(net, output, report, force)
    if as_json:
        say_json(description(net, seconds, written))
        return
    found = measure(net)
    say(f"{net.size}, compiled in {seconds:.1f} s\n")
    say_certificate(net.certificate)
    say(f"largest error measured {found.worst:.3e}, on {found.count:,} points of the box")
    for path in written:
        say(f"wrote {path}")


def description(net: CompiledNetwork, seconds: float, written: list[Path]) -> dict[str, Any]:
    """What --json prints."""
    from ..certificates.certificate import upper_text
    from ..report.network import measure

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


def plan(
    formulas: Annotated[list[str], FORMULAS],
    eps: Annotated[float | None, EPS] = None,
    boxes: Annotated[list[str] | None, BOX] = None,
    anchors: Annotated[int | None, typer.Option(help="Instead of --eps: what so many anchors reach.", **COUNT)] = None,
    dtype: Shipped = DType.float32,
    as_json: AsJson = False,
) -> None:
    """Show the size of every route to a network for FORMULA, without building one.

    \b
    attnforge plan "sin(x*y) + exp(-x**2)/y" --box x=-1:1 --box y=0.5:2 --eps 1e-3
    """
    from ..compiler.routes import plan as sizes_of

    where = box(boxes or [])
    with waiting("planning"):
        found = sizes_of(formulas_of(formulas), where, eps, anchors=anchors, dtype=dtype.torch)
    if as_json:
        say_json(dataclasses.asdict(found))
        return
    say(found.title)
    table(found.HEADER, found.rows, right=found.HEADER[1:-1])
