"""How large the columns of the plain form can become, errors included: what its Omega must beat, and what rounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..certify.rules import Errors, Propagation
from ..certify.split import outward_cells
from ..compiled import CompiledNetwork
from ..ir.enclose import Range, ranges
from ..ir.ops import Array
from ..lower.forms import Column
from ..lower.layout import Site
from .plain_sizes import written_sizes


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
