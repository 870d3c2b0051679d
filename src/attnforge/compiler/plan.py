"""`Plan`: which head family carries out each operation, on which interval, at what error.

Ranges come from `programs.enclose`; sensitivities run backwards through the program; eps is split over the operations
in proportion to what their errors do to the output; then each operation gets the smallest head that keeps its share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import UnsupportedOperation
from ..functions.queries import lipschitz
from ..heads.construction import Order, Planned, Tactics
from ..heads.families import FAMILIES, builder_of
from ..heads.site import Site
from ..programs.affine import is_head
from ..programs.enclose import Range
from ..programs.ops import Apply, Linear
from ..programs.program import Program
from .sensitivity import sensitivities


@dataclass(frozen=True)
class Plan:
    """A site for each operation that heads carry out, with the parts of its weights, and the error each was given."""

    program: Program
    planned: Mapping[int, Planned]
    budget: Mapping[int, float]

    @property
    def sites(self) -> dict[int, Site]:
        """The sites by the number of their operation."""
        return {op: each.site for op, each in self.planned.items()}

    def __str__(self) -> str:
        lines = [f"plan of {len(self.planned)} sites: {self.program.source}"]
        for op, site in self.sites.items():
            lines.append(f"  %{op} {site.family:9s} {self.program.labels[op]:30s} error {self.budget[op]:.2e}")
        return "\n".join(lines)


def make_plan(
    program: Program, found: list[Range], eps: float, dtype: torch.dtype, shares: Mapping[int, float], tactics: Tactics
) -> Plan:
    """A plan that gives operation i the error shares[i] * eps / sensitivity of the output to it."""
    sensitivity = sensitivities(program, found)
    roots = under_roots(program, found)
    planned: dict[int, Planned] = {}
    budget: dict[int, float] = {}
    for i, op in enumerate(program.ops):
        if not is_head(program, i):
            continue
        budget[i] = shares.get(i, 0.0) * eps / max(sensitivity[i], 1e-300)  # what does not matter has no limit
        reads = tuple(found[j] for j in op.inputs)
        order = Order(i, op, reads, budget[i], dtype, tactics, program.labels[i], rooted=i in roots)
        made = tuple(planned.values())
        proposals = (builder_of(family).propose(order, made) for family in FAMILIES)
        chosen = next((proposal for proposal in proposals if proposal is not None), None)
        if chosen is None:
            raise UnsupportedOperation(f"'{op.word}' ({program.labels[i]}) has no attention-only form here yet")
        planned[i] = chosen
    return Plan(program, planned, budget)


def under_roots(program: Program, found: list[Range]) -> frozenset[int]:
    """The squares whose sum is the argument of a function with infinite slope that the argument may reach."""
    marked: set[int] = set()
    for op in program.ops:
        if isinstance(op, Apply):
            r = found[op.inputs[0]]
            if not np.isfinite(lipschitz(op.function, r.low, r.high)).all():
                marked |= set(op.inputs)
    for i in range(len(program.ops) - 1, -1, -1):
        if i in marked and isinstance(program.ops[i], Linear):
            marked |= set(program.ops[i].inputs)
    return frozenset(marked)
