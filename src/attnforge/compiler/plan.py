"""`Plan`: which head family carries out each operation, on which interval, at what error.

Ranges come from `programs.enclose`; sensitivities, how much the output moves when a value does, are bounds on
derivatives that run backwards through the program (section H); eps is split over the operations in proportion to what
their errors do to the output; then each operation gets the smallest head that keeps its share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ..dtypes import Array
from ..errors import UnsupportedOperation
from ..functions.queries import lipschitz, spread
from ..heads.construction import Order, Planned, Tactics
from ..heads.families import FAMILIES, builder_of
from ..heads.site import Site
from ..programs.affine import is_head
from ..programs.enclose import Range, centred, normalised_size
from ..programs.ops import Apply, Attention, Constant, Input, Linear, MaxTokens, Mix, Normalise, Op, Product, Softmax
from ..programs.program import Program

STEEP = 100.0  # times a function's mean slope: what a square's table errs near 0, such a slope multiplies
Backward = Callable[[Op, Array, list[Range]], list[Array]]


def sensitivities(program: Program, found: list[Range]) -> list[float]:
    """For each value the largest change of an output per unit change of all its entries, over the cells of `found`.

    A planning figure, not a bound: slopes that are infinite at a point (sqrt at 0) are replaced by secants.
    """
    shape = found[0].low.shape[:2]
    adjoint = [np.zeros((*shape, op.width)) for op in program.ops]
    adjoint[program.output][:] = 1.0 / max(1, program.ops[program.output].width)
    for i in range(len(program.ops) - 1, -1, -1):
        op = program.ops[i]
        parts = RULES[type(op)](op, adjoint[i], [found[j] for j in op.inputs])
        for j, part in zip(op.inputs, parts, strict=True):
            adjoint[j] = adjoint[j] + part
    return [float(np.max(a.sum((1, 2)))) for a in adjoint]


def _nothing(op: Op, out: Array, reads: list[Range]) -> list[Array]:
    return []


def _linear(op: Op, out: Array, reads: list[Range]) -> list[Array]:
    assert isinstance(op, Linear)
    return [out @ np.abs(w).T for w in op.weights]


def _mix(op: Op, out: Array, reads: list[Range]) -> list[Array]:
    assert isinstance(op, Mix)
    return [np.abs(op.matrix).T @ out]


def _apply(op: Op, out: Array, reads: list[Range]) -> list[Array]:
    assert isinstance(op, Apply)
    r, domain = reads[0], op.function.domain
    slope = lipschitz(op.function, r.low, r.high)
    if np.isfinite(slope).all():
        return [out * slope]
    low, high = max(float(np.min(r.low)), domain.lo), min(float(np.max(r.high)), domain.hi)
    rise = float(np.max(spread(op.function, np.array([low]), np.array([high]))))
    return [out * np.minimum(slope, max(100.0 * rise / max(high - low, 1e-300), 1.0))]


def _product(op: Op, out: Array, reads: list[Range]) -> list[Array]:
    x, y = reads
    return [out * y.size, out * x.size]


def _softmax(op: Op, out: Array, reads: list[Range]) -> list[Array]:
    """All logits moved by d move no weight by more than tanh(d/2)."""
    return [np.broadcast_to(0.5 * out.mean(-1, keepdims=True), out.shape)]


def _attention(op: Op, out: Array, reads: list[Range]) -> list[Array]:
    """Logits moved by d move the result by tanh(d/2) times the spread of the values; these move it as they do."""
    assert isinstance(op, Attention)
    query, key, value = reads
    spread = value.high.max(1, keepdims=True) - value.low.min(1, keepdims=True)
    pull = 0.5 * abs(op.scale) * (out * spread).sum(-1, keepdims=True)  # (cell, query, 1)
    to_query = pull * key.size.max(1, keepdims=True)
    to_key = (pull * query.size).mean(1, keepdims=True)
    to_value = out.mean(1, keepdims=True)
    pairs = zip((to_query, to_key, to_value), reads, strict=True)
    return [np.broadcast_to(part, read.low.shape) for part, read in pairs]


def _normalise(op: Op, out: Array, reads: list[Range]) -> list[Array]:
    """The derivative of c/r is (h - n (n.h)/d) / r: each entry's own share, and one of the row's."""
    assert isinstance(op, Normalise)
    c, (matrix, eps) = centred(op, reads[0]), op.centring
    least = np.mean(c.least**2, -1, keepdims=True)
    moved = (out + (out * normalised_size(c, eps)).mean(-1, keepdims=True)) / np.sqrt(np.maximum(least + eps, 1e-12))
    return [moved @ np.abs(matrix).T if op.centred else moved]


def _max_tokens(op: Op, out: Array, reads: list[Range]) -> list[Array]:
    return [np.broadcast_to(out.mean(1, keepdims=True), out.shape)]


#: How each operation hands its sensitivity to what it reads.
RULES: dict[type[Op], Backward] = {
    Input: _nothing,
    Constant: _nothing,
    Linear: _linear,
    Mix: _mix,
    Apply: _apply,
    Product: _product,
    Softmax: _softmax,
    Attention: _attention,
    Normalise: _normalise,
    MaxTokens: _max_tokens,
}


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
    """The squares, and squares of squares, whose sum is the argument of a function that is very steep somewhere: a root
    at 0, 1/y near 0."""
    marked: set[int] = set()
    for op in program.ops:
        if isinstance(op, Apply):
            r = found[op.inputs[0]]
            low, high = float(np.min(r.low)), float(np.max(r.high))
            rise = float(np.max(spread(op.function, np.array([low]), np.array([high]))))
            if not np.max(lipschitz(op.function, r.low, r.high)) * (high - low) <= STEEP * rise:
                marked |= set(op.inputs)
    for i in range(len(program.ops) - 1, -1, -1):
        op = program.ops[i]
        again = isinstance(op, Apply) and op.function.name == "square" and isinstance(program.ops[op.input], Apply)
        if i in marked and (isinstance(op, Linear) or again):
            marked |= set(op.inputs)
    return frozenset(marked)
