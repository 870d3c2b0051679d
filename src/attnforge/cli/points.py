"""Points in and numbers out: csv, npy and parquet files, and csv through pipes."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ArgumentError, MissingExtra, closest

Array = np.ndarray[Any, np.dtype[np.float64]]
KINDS = (".csv", ".npy", ".parquet")
PIPE = Path("-")


def read_points(path: Path, names: Sequence[str] | None, size: int) -> Array:
    """The points of a file, one row each, columns in the order of `names`; without names, `size` columns as they come.

    Columns that no variable has the name of are left out.
    """
    kind = _kind(path)
    if path != PIPE and not path.is_file():
        raise ArgumentError(f"there is no file '{path}'")
    if kind == ".npy":
        return _read_npy(path, size)
    header, table = _read_parquet(path) if kind == ".parquet" else _read_csv(path)
    if names is None:
        if table.shape[1] != size:
            raise ArgumentError(f"'{path}' has {table.shape[1]} columns, but the network takes {size} numbers a row")
        return table
    missing = [name for name in names if name not in header]
    if missing:
        hint = closest(missing[0], header)
        raise ArgumentError(f"'{path}' has no column {_listed(missing)}{hint}; its columns are {_listed(header)}")
    return table[:, [header.index(name) for name in names]]


def write_numbers(path: Path, columns: Sequence[str], table: Array) -> None:
    """Rows of numbers, to a file or, as csv, to the standard output; as many digits as tell them apart."""
    kind = _kind(path)
    if kind == ".npy":
        np.save(path, table[:, 0] if len(columns) == 1 else table)
        return
    if kind == ".parquet":
        arrow = _pyarrow()
        arrow.parquet.write_table(arrow.table({name: table[:, i] for i, name in enumerate(columns)}), path)
        return
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(table.astype(str).tolist())
    if path == PIPE:
        sys.stdout.write(text.getvalue())
    else:
        path.write_text(text.getvalue(), encoding="utf-8", newline="\n")


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


def _read_csv(path: Path) -> tuple[list[str], Array]:
    try:
        text = sys.stdin.read() if path == PIPE else path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"'{path}' is not text in UTF-8: {error}") from error
    lines = [row for row in csv.reader(text.splitlines())]
    rows = [(number, row) for number, row in enumerate(lines, 1) if any(cell.strip() for cell in row)]
    if not rows:
        raise ArgumentError(f"'{path}' is empty; expected a line of column names and then rows of numbers")
    header = [cell.strip() for cell in rows[0][1]]
    table = np.empty((len(rows) - 1, len(header)))
    for i, (number, row) in enumerate(rows[1:]):
        if len(row) != len(header):
            raise ArgumentError(f"line {number} of '{path}' has {len(row)} cells, the header {len(header)}")
        for j, cell in enumerate(row):
            try:
                table[i, j] = float(cell)
            except ValueError:
                where = f"line {number}, column {header[j]}, of '{path}'"
                raise ArgumentError(f"{where} is {cell!r}, which is not a number") from None
    return header, table


def _read_parquet(path: Path) -> tuple[list[str], Array]:
    arrow = _pyarrow()
    try:
        found = arrow.parquet.read_table(path)
        table = np.stack([np.asarray(column, dtype=np.float64) for column in found.columns], -1)
    except (arrow.ArrowException, ValueError, TypeError) as error:
        raise ArgumentError(f"'{path}' is not a parquet file of numbers: {error}") from error
    return list(found.column_names), table


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra("pyarrow", "parquet") from error
    return pyarrow


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
