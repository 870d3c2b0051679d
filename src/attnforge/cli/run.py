"""`attnforge run`: a saved network evaluated at the points of a file."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from .. import files
from ..box import Box
from ..certify.certified import CertifiedModule
from ..compiled import CompiledNetwork
from ..errors import ArgumentError, DomainError, DomainWarning
from ..export.plain import PlainTransformer
from .common import console, refuse_overwriting, say
from .compile import FORCE
from .points import PIPE, Array, read_points, write_numbers

ROWS = 1 << 16  # evaluated at once


def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .safetensors file written by attnforge.")],
    points: Annotated[
        Path, typer.Option("--input", "-i", metavar="FILE", help="Points: .csv, .npy or .parquet; - is a pipe of csv.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where the numbers go, likewise.")
    ] = PIPE,
    force: Annotated[bool, FORCE] = False,
) -> None:
    """Evaluate a saved network at the points of a file, a row of the output for each.

    The columns of a csv or parquet file are named after the variables, in any order; other columns are left out. Rows
    outside of the network's box are counted and warned about: there the certificate says nothing.

    \b
    attnforge run net.safetensors --input points.csv -o out.csv
    """
    if not file.is_file():
        raise ArgumentError(f"there is no file '{file}'")
    if output != PIPE:
        refuse_overwriting({output.suffix.lower(): output}, force)
    net = files.load(file)
    boxes = _boxes(net)
    names = net.box.names
    table = read_points(points, names, sum(box.dim for box in boxes))
    _refuse_not_finite(table, names, points)
    _warn_outside(table, boxes, net.dtype)
    result = _evaluate(net, boxes, torch.from_numpy(table).to(net.dtype))
    columns = ["output"] if result.shape[1] == 1 else [f"output{i}" for i in range(result.shape[1])]
    write_numbers(output, columns, result)
    if output != PIPE:
        say(f"wrote {output}, {len(table):,} rows")


def _boxes(net: CertifiedModule) -> tuple[Box, ...]:
    if isinstance(net, PlainTransformer):
        return net.spec.boxes
    return net.boxes if isinstance(net, CompiledNetwork) else (net.box,)


@torch.no_grad()
def _evaluate(net: CertifiedModule, boxes: tuple[Box, ...], table: torch.Tensor) -> Array:
    outputs = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DomainWarning)  # said once already, with a count
        for rows in table.split(ROWS):
            if isinstance(net, CompiledNetwork | PlainTransformer):
                parts = rows.split([box.dim for box in boxes], -1)
                inputs = tuple(part.reshape(-1, *box.shape) for part, box in zip(parts, boxes, strict=True))
            else:
                inputs = tuple(rows.unbind(-1)) if net.box.names else (rows.reshape(-1, *net.box.shape),)
            found = net(*inputs)
            outputs.append(found.reshape(len(rows), math.prod(found.shape[1:])).numpy())
    return np.concatenate(outputs)


def _refuse_not_finite(table: Array, names: tuple[str, ...] | None, path: Path) -> None:
    bad = np.argwhere(~np.isfinite(table))
    if len(bad):
        row, column = map(int, bad[0])
        name = names[column] if names else f"number {column + 1}"
        raise DomainError(f"row {row + 1} of '{path}' has {name} = {table[row, column]}; every number must be finite")


def _warn_outside(table: Array, boxes: tuple[Box, ...], dtype: torch.dtype) -> None:
    wide = [box.outward(dtype) for box in boxes]
    low, high = (np.concatenate([getattr(b, side).numpy().reshape(-1) for b in wide]) for side in ("lower", "upper"))
    outside = (table < low) | (table > high)
    rows = np.flatnonzero(outside.any(-1))
    if not len(rows):
        return
    row, column = int(rows[0]), int(np.argmax(outside[rows[0]]))
    names = boxes[0].names
    name = names[column] if names else f"number {column + 1}"
    place = f"row {row + 1} with {name} = {table[row, column]:.9g}, outside [{low[column]:.9g}, {high[column]:.9g}]"
    console(stderr=True).out(
        f"warning: {len(rows):,} of {len(table):,} rows lie outside of the box, where the certificate says nothing; "
        f"the first is {place}",
        highlight=False,
    )
