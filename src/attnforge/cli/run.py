"""`attnforge run`: a saved network evaluated at the points of a csv, npy or parquet file, or of csv through a pipe; a
saved token program at sequences, given as words or as the lines of a file."""

from __future__ import annotations

import csv
import io
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from ..errors import ArgumentError, DomainError, DomainWarning, MissingExtra, closest
from ..saving import write_whole
from .common import Force, Saved, console, existing, refuse_overwriting, say

if TYPE_CHECKING:
    import torch

    from ..box import Box
    from ..certificates.certified import CertifiedModule
    from ..dtypes import Array
    from ..rasp.network.compiled import TokenNetwork

KINDS = (".csv", ".npy", ".parquet")
PIPE = Path("-")
Column = Callable[[int], "Array"]  # the numbers of a column, which are looked at only where it is wanted
ROWS = 1 << 16  # evaluated at once: logits of a thousand slots for all of them take 256 MB in float32


def read_points(path: Path, names: Sequence[str] | None, size: int) -> Array:
    """The points of a file, one row each, columns in the order of `names`; without names, `size` columns as they come.

    Columns that no variable has the name of are left out.
    """
    kind = _kind(path)
    if path != PIPE:
        existing(path)
    if kind == ".npy":
        return _read_npy(path, size)
    header, columns = _read_parquet(path) if kind == ".parquet" else _read_csv(path)
    if names is None:
        if len(header) != size:
            raise ArgumentError(f"'{path}' has {len(header)} columns, but the network takes {size} numbers a row")
        wanted = list(range(size))
    else:
        missing = [name for name in names if name not in header]
        if missing:
            hint = closest(missing[0], header)
            if any(mark in name for name in header for mark in ";\t"):
                hint = "; columns are separated by commas"
            elif header and all(map(_is_number, header)):
                hint = "; its first line must be the names of the columns"
            raise ArgumentError(f"'{path}' has no column {_listed(missing)}{hint}; its columns are {_listed(header)}")
        twice = [name for name in names if header.count(name) > 1]
        if twice:
            raise ArgumentError(f"'{path}' has the column {_listed(twice[:1])} more than once: which one is meant?")
        wanted = [header.index(name) for name in names]
    return np.stack([columns(i) for i in wanted], -1)


def write_numbers(path: Path, columns: Sequence[str], table: Array) -> None:
    """Rows of numbers, to a file or, as csv, to the standard output; as many digits as tell them apart."""
    kind, held, text = _kind(path), io.BytesIO(), io.StringIO()
    if kind == ".npy":
        np.save(held, table[:, 0] if len(columns) == 1 else table)
    elif kind == ".parquet":
        arrow = _pyarrow()
        arrow.parquet.write_table(arrow.table({name: table[:, i] for i, name in enumerate(columns)}), held)
    else:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(table.astype(str).tolist())
    if path == PIPE:
        sys.stdout.write(text.getvalue())
    else:
        write_whole(path, held.getvalue() or text.getvalue())


def _kind(path: Path) -> str:
    kind = ".csv" if path == PIPE else path.suffix.lower()
    if kind not in KINDS:
        raise ArgumentError(f"expected a file that ends with {', '.join(KINDS)}, or -, got '{path}'")
    return kind


def _read_npy(path: Path, size: int) -> Array:
    try:
        found = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ArgumentError(f"'{path}' is not an array that numpy saved: {error}") from error
    if found.dtype.kind not in "fiu" or found.ndim < 1:
        raise ArgumentError(f"'{path}' must hold rows of numbers, got {found.dtype} of shape {found.shape}")
    table = found.reshape(len(found), -1) if found.size else found.reshape(0, size)
    if table.shape[1] != size:
        raise ArgumentError(f"'{path}' has rows of {table.shape[1]} numbers, but the network takes {size}")
    return np.asarray(table, dtype=np.float64)


def _read_csv(path: Path) -> tuple[list[str], Column]:
    try:
        lines = [row for row in csv.reader(_text(path).splitlines())]
    except csv.Error as error:
        raise ArgumentError(f"'{path}' cannot be read as csv: {error}") from error
    rows = [(number, row) for number, row in enumerate(lines, 1) if any(cell.strip() for cell in row)]
    if not rows:
        raise ArgumentError(f"'{path}' is empty; expected a line of column names and then rows of numbers")
    header = [cell.strip() for cell in rows[0][1]]
    for number, row in rows[1:]:
        if len(row) != len(header):
            cells = f"{len(row)} cell{'' if len(row) == 1 else 's'}"
            raise ArgumentError(f"line {number} of '{path}' has {cells}, the header {len(header)}")

    def column(j: int) -> Array:
        found = np.empty(len(rows) - 1)
        for i, (number, row) in enumerate(rows[1:]):
            try:
                found[i] = float(row[j].replace("_", "?"))  # 1_0 is a number in Python alone
            except ValueError:
                where = f"line {number}, column {header[j]}, of '{path}'"
                raise ArgumentError(f"{where} is {row[j]!r}, which is not a number") from None
        return found

    return header, column


def _text(path: Path) -> str:
    """The text of a file, or of the standard input, in UTF-8 whatever the locale says, without a byte order mark."""
    try:
        return (sys.stdin.buffer.read() if path == PIPE else existing(path).read_bytes()).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"'{path}' is not text in UTF-8: {error}") from error


def _read_parquet(path: Path) -> tuple[list[str], Column]:
    arrow = _pyarrow()
    try:
        found = arrow.parquet.read_table(path)
    except (arrow.ArrowException, ValueError, TypeError) as error:
        raise ArgumentError(f"'{path}' is not a parquet file: {error}") from error

    def column(j: int) -> Array:
        try:
            return np.asarray(found.column(j), dtype=np.float64)
        except (arrow.ArrowException, ValueError, TypeError) as error:
            name = found.column_names[j]
            raise ArgumentError(f"the column '{name}' of '{path}' does not hold numbers: {error}") from error

    return list(found.column_names), column


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra("pyarrow", "parquet") from error
    return pyarrow


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def run(
    file: Saved,
    sequences: Annotated[
        list[str] | None, typer.Argument(metavar="[SEQUENCE]...", help="For a token program: abcd, or 1,2,3.")
    ] = None,
    points: Annotated[
        Path | None,
        typer.Option("--input", "-i", metavar="FILE", help="Points: .csv, .npy or .parquet; - is a pipe of csv."),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where the numbers go, likewise.")
    ] = PIPE,
    force: Force = False,
) -> None:
    """Evaluate a saved network at the points of a file, a row of the output for each.

    The columns of a csv or parquet file are named after the variables, in any order; other columns are left out. Rows
    outside of the network's box are counted and warned about: there the certificate says nothing. A token program takes
    sequences, as words or as the lines of a text file, and a line comes out for each.

    \b
    attnforge run net.safetensors --input points.csv -o out.csv
    attnforge run reverse.safetensors abcd
    """
    import torch

    from .. import files
    from ..rasp.network.compiled import TokenNetwork

    existing(file)
    if output != PIPE:
        refuse_overwriting({output.suffix.lower(): output}, force)
    net = files.network(file)
    if isinstance(net, TokenNetwork):
        _run_program(net, list(sequences or []), points, output)
        return
    if sequences:
        raise ArgumentError(
            f"'{file}' is no token program: it takes numbers, as --input points.csv, not '{sequences[0]}'"
        )
    if points is None:
        raise ArgumentError("where are the points? give --input, such as --input points.csv")
    boxes = _boxes(net)
    names = net.box.names
    table = read_points(points, names, sum(box.dim for box in boxes))
    _refuse_not_finite(table, names, points)
    _warn_outside(table, boxes, net.dtype)
    with torch.no_grad():
        result = _evaluate(net, boxes, torch.from_numpy(table).to(net.dtype))
    named = getattr(net, "outputs", ())
    columns = list(named) if len(named) == result.shape[1] else (
        ["output"] if result.shape[1] == 1 else [f"output{i}" for i in range(result.shape[1])])  # fmt: skip
    write_numbers(output, columns, result)
    if output != PIPE:
        say(f"wrote {output}, {len(table):,} rows")


def _run_program(net: TokenNetwork, sequences: list[str], lines: Path | None, output: Path) -> None:
    """A line for each sequence: characters together where all are such, else words with commas between them."""
    if lines is not None:
        sequences = [*sequences, *(line for line in _text(lines).splitlines() if line)]
    if not sequences:
        raise ArgumentError("which sequences? give some, such as abcd, or --input with a file of one a line")
    domain = net.domain
    known = {_word(token): token for token in (*domain.vocabulary, *(() if domain.bos is None else (domain.bos,)))}
    letters = all(len(word) == 1 for word in known)
    commas = [not letters or ("," in text and "," not in known) for text in sequences]
    split = [text.split(",") if comma else list(text) for text, comma in zip(sequences, commas, strict=True)]
    given = [[known.get(word, word) for word in words] for words in split]
    if domain.bos is not None:  # nobody types the marker
        given = [row if row[:1] == [domain.bos] else [domain.bos, *row] for row in given]
    found = [
        line for row in net.run(given)
        for line in ([f"{name}: {_line_of(own)}" for name, own in row.items()] if isinstance(row, dict) else
                     [_line_of(row)])
    ]  # fmt: skip
    if output == PIPE:
        say("\n".join(found))
    else:
        write_whole(output, "\n".join(found) + "\n")
        say(f"wrote {output}, {len(found):,} sequences")


def _word(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.9g}" if isinstance(value, float) else str(value)


def _line_of(values: Sequence[Any]) -> str:
    words = [_word(value) for value in values]
    return "".join(words) if all(isinstance(v, str) and len(v) == 1 for v in values) else ",".join(words)


def _boxes(net: CertifiedModule) -> tuple[Box, ...]:
    """One box for each input."""
    from ..compiler.compiled import CompiledNetwork
    from ..export import PlainTransformer

    if isinstance(net, PlainTransformer):
        return net.spec.boxes
    return net.boxes if isinstance(net, CompiledNetwork) else (net.box,)


def _evaluate(net: CertifiedModule, boxes: tuple[Box, ...], table: torch.Tensor) -> Array:
    outputs = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DomainWarning)  # said once already, with a count
        for rows in table.split(ROWS):
            if net.stacked:
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
