"""How large the columns of the stream are on cells of the box, as computed: what rounding of folded sums depends on.

A column that heads have written is a result less its linear part. Its size is at most that of the heads' values (every
result is a mean of them), and it lies in the result's interval less the linear part's. A product has the linear part
c_1 x + c_2 y + s, so that its column is (x - c_2)(y - c_1) - (c_1 c_2 + s), which is smaller.

How large the columns of the plain form can become, errors included: what its Omega must beat, and what rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...certificates.rounding import up
from ...compiler.assemble import operands
from ...compiler.compiled import CompiledNetwork
from ...compiler.layout import Column, Layout, Site
from ...compiler.propagation import Errors, Propagation
from ...compiler.split import outward_cells
from ...dtypes import Array
from ...network import AttentionLayer
from ...programs.enclose import Range, ranges
from .spec import FLAG, Columns


def first_sizes(layout: Layout, columns: Columns, errors: Mapping[int, Array], found: list[Range]) -> Array:
    """The columns that there are before any head: flag, positions, input, constants; (cell, token, column)."""
    size = np.zeros((*found[0].low.shape[:2], columns.first))
    size[..., FLAG] = 1.0
    for token, place in enumerate(columns.positions):
        size[:, token, place] = 1.0
    given = [found[v].size[..., c] + errors[v][..., c, :].sum(-1) for v, c in layout.first]
    size[..., [*columns.inputs, *columns.constants]] = np.stack(given, -1)
    return size


def written_sizes(
    layout: Layout,
    number: int,
    layer: AttentionLayer,
    wanted: Sequence[int],
    coming: Mapping[Column, Array],
    errors: Mapping[int, Array],
    found: list[Range],
) -> Array:
    """What heads of stage `number` have written to columns `wanted` of its state, (cell, token, column).

    `coming` are the errors of what the heads read, by column, `errors` those of their results.
    """
    plan = layout.stages[number]
    assert layer.S is not None
    assert layer.s is not None
    skip, bias = (x.detach().cpu().double().numpy() for x in (layer.S, layer.s))
    sites = {site.op: site for site in plan.sites}
    place = {column: i for i, column in enumerate(plan.columns)}
    reads = {column: _widened(found, coming, column) for column in plan.columns}
    grown = []
    for c in wanted:
        value, channel = plan.after[c]
        error = errors[value][..., channel, :].sum(-1)
        low, high = found[value].low[..., channel] - error, found[value].high[..., channel] + error
        slip = np.abs(low) + np.abs(high)
        for column, weight in ((column, float(skip[at, c])) for column, at in place.items() if skip[at, c]):
            ends = [weight * end for end in reads[column]]
            low, high = low - np.maximum(*ends), high - np.minimum(*ends)
            slip = slip + np.abs(ends[0]) + np.abs(ends[1])
        low, high = low - bias[c], high - bias[c]
        size = np.maximum(np.abs(low), np.abs(high)) + 2.0**-46 * (slip + abs(bias[c]))
        site = sites[value]
        if site.family in ("product", "square"):
            x, y = operands(layout, site, channel)
            one, two = float(skip[place[x], c]), float(skip[place[y], c])
            if x == y:
                one = two = one / 2
            first, second = (_away(reads[column], shift) for column, shift in ((x, two), (y, one)))
            rest = abs(one * two + float(bias[c])) + 2.0**-46 * (abs(one * two) + abs(float(bias[c])))
            size = np.fmin(size, up(first * second + rest + error, 16))
        grown.append(up(size, 8))
    return np.stack(grown, -1)


def _widened(found: list[Range], coming: Mapping[Column, Array], column: Column) -> tuple[Array, Array]:
    value, channel = column
    error = coming[column]
    return found[value].low[..., channel] - error, found[value].high[..., channel] + error


def _away(ends: tuple[Array, Array], shift: float) -> Array:
    """The largest |x - shift|, rounded up."""
    found = np.maximum(np.abs(ends[0] - shift), np.abs(ends[1] - shift))
    return up(found + 2.0**-50 * abs(shift), 8)


class _Recording(Propagation):
    """The error analysis of the network itself, which remembers errors of reads and results."""

    coming: list[dict[Column, Array]]
    errors: dict[int, Array]

    def _affine(
        self, index: int, before: Sequence[Column], after: Sequence[Column], errors: Errors, found: list[Range]
    ) -> dict[Column, Array]:
        out = super()._affine(index, before, after, errors, found)
        self.coming.append({column: error.sum(-1) for column, error in out.items()})
        return out

    def _site(self, site: Site, inputs: list[Array], found: list[Range]) -> Array:
        self.errors[site.op] = super()._site(site, inputs, found)
        return self.errors[site.op]


def reaches(net: CompiledNetwork) -> list[Array | None]:
    """For every layer of a compiled network the sizes of what its heads write, less linear parts, (token, column).

    Estimates, infinite where nothing is known: the certificate of the plain form proves its own sizes.
    """
    program = net.program
    with np.errstate(invalid="ignore", over="ignore"):
        found = ranges(program, *outward_cells(program, net.grid, net.dtype))
        analysis = _Recording(net.layout, net.network, net.flats, net.dtype, net.origin)
        analysis.coming, analysis.errors = [], {}
        analysis.run(found)
        sizes: list[Array | None] = []
        for i, stage in enumerate(net.layout.stages):
            wanted = list(range(len(stage.carried), len(stage.after)))
            layer = analysis.layer(2 * i + 1)
            some = written_sizes(net.layout, i, layer, wanted, analysis.coming[i], analysis.errors, found).max(0)
            every = np.full((some.shape[0], len(stage.after)), np.inf)
            every[:, wanted] = np.where(np.isnan(some), np.inf, some)
            sizes += [None, every]
    return [*sizes, None]
