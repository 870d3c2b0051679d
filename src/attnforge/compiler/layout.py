"""Every value of a program as an affine form in *atoms*: the input, constants, and the results of operations that
are heads.

Atoms are what the state of a network carries from layer to layer; everything affine in between folds into one map.

`Layout`: which head computes what, in which layer, from which columns of the state to which.

A network is a chain of stages. Each stage first applies an affine map, which makes the columns its heads read (and
carries on what later stages need), then one attention layer, whose heads read single columns and write fresh ones.
An affine map
reads the output off the last state. So the depth is the nesting depth of the program's operations, not their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..dtypes import Array
from ..errors import ArgumentError
from ..programs.ops import Constant, Input, Linear
from ..programs.positions import reads
from ..programs.program import Program

Column = tuple[int, int]  # (value, channel)


@dataclass(frozen=True)
class Form:
    """value = sum over atoms of atom @ weight + bias; `size` and `terms` bound how far float64 folding may be off.

    The folded weight is within `terms` * 2^-53 * size of the exact product of the program's own matrices.
    """

    weight: dict[int, Array]
    size: dict[int, Array]
    bias: Array
    bias_size: Array
    terms: int

    @property
    def atoms(self) -> tuple[int, ...]:
        """The atoms with a weight that is not zero."""
        return tuple(a for a, w in self.weight.items() if np.any(w))


def forms(program: Program) -> list[Form]:
    """One form for each value of the program."""
    found: list[Form] = []
    for i, op in enumerate(program.ops):
        if not isinstance(op, Linear):
            eye = np.eye(op.width)
            found.append(Form({i: eye}, {i: eye}, np.zeros(op.width), np.zeros(op.width), 0))
            continue
        weight: dict[int, Array] = {}
        size: dict[int, Array] = {}
        bias, bias_size, terms = op.bias.copy(), np.abs(op.bias), 0
        for j, matrix in zip(op.inputs, op.weights, strict=True):
            inner = found[j]
            folded = isinstance(program.ops[j], Linear)
            terms = max(terms, inner.terms + (matrix.shape[0] + len(op.inputs) + 2 if folded else 0))
            for atom, w in inner.weight.items():
                weight[atom] = weight.get(atom, 0.0) + (w @ matrix if folded else matrix)
                size[atom] = size.get(atom, 0.0) + inner.size[atom] @ np.abs(matrix)
            bias = bias + inner.bias @ matrix
            bias_size = bias_size + inner.bias_size @ np.abs(matrix)
        found.append(Form(weight, size, bias, bias_size, terms))
    return found


def levels(program: Program, of: list[Form]) -> list[int]:
    """The layer after which each value is available: 0 for what is affine in the input."""
    level: list[int] = []
    for i, op in enumerate(program.ops):
        if isinstance(op, (Input, Constant)):
            level.append(0)
        elif isinstance(op, Linear):
            level.append(max((level[a] for a in of[i].atoms), default=0))
        else:
            level.append(1 + max(level[j] for j in op.inputs))
    return level


def is_head(program: Program, i: int) -> bool:
    """Whether operation i is carried out by heads."""
    return not isinstance(program.ops[i], (Input, Constant, Linear))


FAMILIES = ("anchor", "gate", "product", "square", "softmax", "attention", "norm", "mix", "max")


@dataclass(frozen=True)
class Site:
    """One operation and the head family that carries it out; `config` is plain JSON that the family understands."""

    op: int
    family: str
    config: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ArgumentError(f"a site's family is one of {', '.join(FAMILIES)}, not {self.family!r}")


@dataclass(frozen=True)
class Stage:
    """An affine map to `carried` + `reads` columns, then an attention layer to `carried` + the sites' results."""

    before: tuple[Column, ...]
    carried: tuple[Column, ...]
    reads: tuple[Column, ...]
    sites: tuple[Site, ...]
    writes: tuple[Column, ...]

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns that the heads see."""
        return self.carried + self.reads

    @property
    def after(self) -> tuple[Column, ...]:
        """The columns of the state after this stage."""
        return self.carried + self.writes


@dataclass(frozen=True)
class Layout:
    """All stages of a program, and the columns of the output."""

    program: Program
    stages: tuple[Stage, ...]
    first: tuple[Column, ...]
    output: tuple[Column, ...]

    @property
    def sites(self) -> tuple[Site, ...]:
        """All sites, first layer first."""
        return tuple(site for stage in self.stages for site in stage.sites)

    @property
    def last(self) -> tuple[Column, ...]:
        """The columns of the state that the output is read from."""
        return self.stages[-1].after if self.stages else self.first

    def __str__(self) -> str:
        lines = [f"layout of {len(self.stages)} layers, {len(self.sites)} sites: {self.program.source}"]
        for number, stage in enumerate(self.stages, 1):
            lines.append(f"  layer {number}: {len(stage.before)} columns -> {len(stage.after)}")
            for site in stage.sites:
                lines.append(f"    %{site.op} {site.family:9s} {self.program.sites[site.op]}")
        return "\n".join(lines)


def lay_out(program: Program, sites: Mapping[int, Site]) -> Layout:
    """Place every site in the earliest layer that its inputs allow, and carry on only what later layers need."""
    of = forms(program)
    level = levels(program, of)
    heads = [i for i in range(len(program.ops)) if is_head(program, i)]
    depth = max((level[i] for i in heads), default=0)
    last_use = _last_use(program, of, level, depth)
    first = tuple(
        (i, c) for i, op in enumerate(program.ops) if isinstance(op, (Input, Constant)) for c in range(op.width)
    )
    state, stages = first, []
    for number in range(1, depth + 1):
        here = [i for i in heads if level[i] == number]
        carried = tuple(column for column in state if last_use.get(column, 0) > number)
        wanted = dict.fromkeys((j, c) for i in here for j in reads(program, i) for c in range(program.ops[j].width))
        read = tuple(column for column in wanted if column not in carried)
        writes = tuple((i, c) for i in here for c in range(program.ops[i].width))
        stages.append(Stage(state, carried, read, tuple(sites[i] for i in here), writes))
        state = stages[-1].after
    output = tuple((program.output, c) for c in range(program.ops[program.output].width))
    return Layout(program, tuple(stages), first, output)


def _last_use(program: Program, of: list[Form], level: list[int], depth: int) -> dict[Column, int]:
    """For each atom's column the last stage whose affine map reads it; depth + 1 is the read-out."""
    last: dict[Column, int] = {}
    readers = [(j, level[i]) for i in range(len(program.ops)) if is_head(program, i) for j in reads(program, i)]
    for value, stage in [*readers, (program.output, depth + 1)]:
        for atom, weight in of[value].weight.items():
            for channel in range(weight.shape[0]):
                if weight[channel].any():
                    last[atom, channel] = max(last.get((atom, channel), 0), stage)
    return last
