"""The derivation: choices that a proof needs and would otherwise have to search for. It holds no claims: whatever it
says, what comes out is a bound that holds, or none.

    states   for each layer the columns of the state after it, as [value, channel] of the program
    scopes   for each layer and group of heads [scope, causal], as the network is built
    sites    which heads make which result: layer, op, channel (null for all), group, first head, how many heads;
             and for heads that read a scalar the number of their table, which operand is the query, and a pivot
    tables   the edges of cells for functions of one scalar
    tree     how the box is split: [] for a part that is looked at as it is, [coordinate, at, below, above] otherwise
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from ..errors import CertificateError
from .program import Column, Program, number, whole

MOST_EDGES, MOST_LEAVES, DEEPEST = 1 << 16, 1 << 17, 400  # work is bounded for every file; benchmarks need a tenth
SCOPES = ("memory", "self", "tokens")


@dataclass(frozen=True)
class Place:
    """The heads of one result, or of all channels of one operation where `channel` is None."""

    layer: int
    op: int
    channel: int | None
    group: int
    first: int
    heads: int
    table: int | None
    swapped: bool
    pivot: float


@dataclass(frozen=True)
class Derivation:
    """The choices of one proof, of the right types and inside of their bounds."""

    states: tuple[tuple[Column, ...], ...]
    scopes: tuple[tuple[tuple[str, bool], ...], ...]
    places: tuple[Place, ...]
    tables: tuple[tuple[float, ...], ...]
    tree: list[Any]


def read(data: Any, program: Program) -> Derivation:
    """The derivation that a file holds; `CertificateError` on anything that is not one for this program."""
    try:
        if set(data) != {"states", "scopes", "sites", "tables", "tree"}:
            raise ValueError(f"its entries are {sorted(data)}")
        states = tuple(tuple(_column(c, program) for c in _list(columns)) for columns in _list(data["states"]))
        scopes = tuple(tuple(_scope(pair) for pair in _list(groups)) for groups in _list(data["scopes"]))
        tables = tuple(_edges(table) for table in _list(data["tables"]))
        places = tuple(_place(site, program, len(tables)) for site in _list(data["sites"]))
        _tree(data["tree"], len(program.low))
        return Derivation(states, scopes, places, tables, data["tree"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CertificateError(f"the derivation of the file does not fit it: {error}") from error


def _list(x: Any) -> list[Any]:
    if not isinstance(x, list):
        raise ValueError(f"{x!r} is not a list")
    return x


def _column(pair: Any, program: Program) -> Column:
    value, channel = _list(pair)
    value = whole(value, 0, len(program.ops) - 1)
    return value, whole(channel, 0, program.ops[value].width - 1)


def _scope(pair: Any) -> tuple[str, bool]:
    scope, causal = _list(pair)
    if scope not in SCOPES or type(causal) is not bool:
        raise ValueError(f"{pair!r} is not a scope and whether it is causal")
    return scope, causal


def _edges(table: Any) -> tuple[float, ...]:
    edges = tuple(number(x) for x in _list(table))
    if not 2 <= len(edges) <= MOST_EDGES or any(not a < b for a, b in itertools.pairwise(edges)):
        raise ValueError("the edges of a table are not in order, or too many")
    return edges


def _place(site: Any, program: Program, tables: int) -> Place:
    layer, op, channel, group, first, heads, table, swapped, pivot = (
        site[key] for key in ("layer", "op", "channel", "group", "first", "heads", "table", "swapped", "pivot")
    )
    if len(site) != 9 or type(swapped) is not bool:
        raise ValueError(f"a site has the entries {sorted(site)}")
    op = whole(op, 0, len(program.ops) - 1)
    return Place(
        whole(layer, 0), op, None if channel is None else whole(channel, 0, program.ops[op].width - 1),
        whole(group, 0), whole(first, 0), whole(heads, 0),
        None if table is None else whole(table, 0, tables - 1), swapped, number(pivot),
    )  # fmt: skip


def _tree(tree: Any, coordinates: int) -> None:
    leaves, waiting = 0, [(tree, 0)]
    while waiting:
        node, depth = waiting.pop()
        if node == []:
            leaves += 1
        else:
            coordinate, at, below, above = _list(node)
            whole(coordinate, 0, coordinates - 1)
            number(at)
            waiting += [(below, depth + 1), (above, depth + 1)]
        if leaves > MOST_LEAVES or depth > DEEPEST:
            raise ValueError("the tree is too large")
