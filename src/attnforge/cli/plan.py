"""`attnforge plan`: how large a network for a formula would be, by every route, before one is built."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from ..compiler.routes import plan as sizes_of
from .common import DType, box, number, say, waiting, whole
from .compile import BOX, FORMULAS, formulas_of


def plan(
    formulas: Annotated[list[str], FORMULAS],
    eps: Annotated[
        float | None, typer.Option(parser=number, metavar="NUMBER", help="The largest error allowed on the box.")
    ] = None,
    boxes: Annotated[list[str] | None, BOX] = None,
    anchors: Annotated[
        int | None, typer.Option(parser=whole, metavar="COUNT", help="Instead of --eps: what so many anchors reach.")
    ] = None,
    dtype: Annotated[DType, typer.Option(help="The dtype that ships and that bounds are for.")] = DType.float32,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Show the size of every route to a network for FORMULA, without building one.

    \b
    attnforge plan "sin(x*y) + exp(-x**2)/y" --box x=-1:1 --box y=0.5:2 --eps 1e-3
    """
    where = box(boxes or [])
    with waiting("planning"):
        found = sizes_of(formulas_of(formulas), where, eps, anchors=anchors, dtype=dtype.torch)
    if as_json:
        say(json.dumps(dataclasses.asdict(found), allow_nan=False))
        return
    say(str(found))
