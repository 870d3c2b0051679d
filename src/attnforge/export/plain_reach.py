"""How large the values of a compiled network can become, errors included: what the plain form's Omega must beat."""

from __future__ import annotations

import numpy as np

from ..certify.rules import Propagation
from ..certify.split import outward_cells
from ..compiled import CompiledNetwork
from ..ir.enclose import Range, ranges
from ..ir.ops import Array
from ..lower.layout import Site


class _Recording(Propagation):
    """The error analysis of the network itself, which remembers how large errors were."""

    largest: dict[int, Array]

    def _site(self, site: Site, inputs: list[Array], found: list[Range]) -> Array:
        out = super()._site(site, inputs, found)
        self.largest[site.op] = out.sum(-1).max(0)
        return out


def reaches(net: CompiledNetwork) -> list[Array]:
    """For every value of the program a bound of its size, (token, channel): range and error; infinite where unknown.

    An estimate: the certificate of the plain form proves its own sizes.
    """
    program = net.program
    with np.errstate(invalid="ignore", over="ignore"):
        found = ranges(program, *outward_cells(program, net.grid, net.dtype))
    analysis = _Recording(net.layout, net.network, net.flats, net.dtype, net.origin)
    analysis.largest = {}
    analysis.run(found)
    sizes = [r.size.max(0) for r in found]
    for value, error in analysis.largest.items():
        sizes[value] = sizes[value] + np.where(np.isnan(error), np.inf, error)
    return sizes
