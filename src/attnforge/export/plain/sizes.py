"""How large the columns of the stream are on cells of the box, as computed: what rounding of folded sums depends on.

A column that heads have written is a result less its linear part. Its size is at most that of the heads' values (every
result is a mean of them), and it lies in the result's interval less the linear part's. A family may know
better (`Rule.written`).

How large the columns of the plain form can become, errors included: what its Omega must beat, and what rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...certificates.rounding import up
from ...compiler.compiled import CompiledNetwork
from ...compiler.layout import Layout
from ...compiler.propagation import Errors, Propagation
from ...compiler.split import outward_cells
from ...dtypes import Array
from ...heads.families import rule_of
from ...heads.stored import skip_of
from ...network import AttentionLayer
from ...programs.affine import Column
from ...programs.enclose import Range, ranges
from .spec import FLAG, Columns


def first_sizes(layout: Layout, columns: Columns, errors: Errors, found: list[Range]) -> Array:
    """The columns that there are before any head: flag, positions, input, constants; (cell, token, column)."""
    size = np.zeros((*found[0].low.shape[:2], columns.first))
    size[..., FLAG] = 1.0
    for token, place in enumerate(columns.positions):
        size[:, token, place] = 1.0
    given = [found[v].size[..., c] + errors[v, c].sum(-1) for v, c in layout.first]
    size[..., [*columns.inputs, *columns.constants]] = np.stack(given, -1)
    return size


def written_sizes(
    layout: Layout,
    number: int,
    layer: AttentionLayer,
    wanted: Sequence[int],
    coming: Mapping[Column, Array],
    errors: Errors,
    found: list[Range],
) -> Array:
    """What heads of step `number` have written to columns `wanted` of its state, (cell, token, column).

    `coming` are the errors of what the heads read, by column, `errors` those of their results.
    """
    plan = layout.steps[number]
    skip, bias = skip_of(layer, len(plan.columns))
    sites = {site.op: site for site in plan.sites}
    place = {column: i for i, column in enumerate(plan.columns)}
    reads = {column: _widened(found, coming, column) for column in plan.columns}
    grown = []
    for c in wanted:
        value, channel = plan.after[c]
        error = errors[value, channel].sum(-1)
        low, high = found[value].low[..., channel] - error, found[value].high[..., channel] + error
        slip = np.abs(low) + np.abs(high)
        for column, weight in ((column, float(skip[at, c])) for column, at in place.items() if skip[at, c]):
            ends = [weight * end for end in reads[column]]
            low, high = low - np.maximum(*ends), high - np.minimum(*ends)
            slip = slip + np.abs(ends[0]) + np.abs(ends[1])
        low, high = low - bias[c], high - bias[c]
        size = np.maximum(np.abs(low), np.abs(high)) + 2.0**-46 * (slip + abs(bias[c]))
        site = sites[value]
        own = next(p.reads for p in plan.places(site) if c in p.writes)
        around, weights = [reads[plan.columns[i]] for i in own], [float(skip[i, c]) for i in own]
        better = rule_of(site.family).written(around, weights, float(bias[c]), len(set(own)) == 1)
        if better is not None:
            size = np.fmin(size, up(better + error, 16))
        grown.append(up(size, 8))
    return np.stack(grown, -1)


def _widened(found: list[Range], coming: Mapping[Column, Array], column: Column) -> tuple[Array, Array]:
    value, channel = column
    error = coming[column]
    return found[value].low[..., channel] - error, found[value].high[..., channel] + error


def reaches(net: CompiledNetwork) -> list[Array | None]:
    """For every layer of a compiled network the sizes of what its heads write, less linear parts, (token, column).

    Estimates, infinite where nothing is known: the certificate of the plain form proves its own sizes.
    """
    program = net.program
    with np.errstate(invalid="ignore", over="ignore"):
        found = ranges(program, *outward_cells(program, net.grid, net.dtype))
        analysis = Propagation(net.reading())
        seen: list[Errors] = []
        analysis.errors(found, seen)
        sizes: list[Array | None] = []
        for i, step in enumerate(net.layout.steps):
            wanted = list(range(len(step.carried), len(step.after)))
            layer = analysis.reading.layer(2 * i + 1)
            coming = {column: error.sum(-1) for column, error in seen[2 * i].items()}
            some = written_sizes(net.layout, i, layer, wanted, coming, seen[2 * i + 1], found).max(0)
            every = np.full((some.shape[0], len(step.after)), np.inf)
            every[:, wanted] = np.where(np.isnan(some), np.inf, some)
            sizes += [None, every]
    return [*sizes, None]
