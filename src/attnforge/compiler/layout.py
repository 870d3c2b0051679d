"""Lowering: which head computes what, in which layer, from which columns of the state to which.

A network is a chain of steps. Each step first applies an affine map, which makes the columns its heads read (and
carries on what later steps need), then one attention layer, whose heads read single columns and write fresh ones. An
affine map reads the output off the last state. So the depth is the nesting depth of the program's operations, not
their number.

A layout is structure: it says where the heads of every site sit, and holds no weights. What builds the weights and what
checks them both read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..heads.site import Seat, Site
from ..heads.stored import Place
from ..network import AttentionLayer
from ..programs.affine import Column, Form, forms, is_head, levels
from ..programs.ops import Constant, Input
from ..programs.positions import reads
from ..programs.program import Program


@dataclass(frozen=True)
class Group:
    """Sites that share a group of heads, each (or each of its channels) with its place in the layer."""

    seat: Seat
    purpose: str
    members: tuple[tuple[Site, Place], ...]


@dataclass(frozen=True)
class Step:
    """An affine map to `carried` + `reads` columns, then an attention layer to `carried` + the sites' results."""

    before: tuple[Column, ...]
    carried: tuple[Column, ...]
    reads: tuple[Column, ...]
    sites: tuple[Site, ...]
    writes: tuple[Column, ...]
    groups: tuple[Group, ...]

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns that the heads see."""
        return self.carried + self.reads

    @property
    def after(self) -> tuple[Column, ...]:
        """The columns of the state after this step."""
        return self.carried + self.writes

    def frozen(self, layer: AttentionLayer) -> AttentionLayer:
        """The attention layer with everything fixed that is structure: training changes tables of anchors alone."""
        layer.requires_grad_(False)
        for heads, group in zip(layer.heads(), self.groups, strict=True):
            for name in group.seat.trainable:
                getattr(heads, name).requires_grad_(True)
        return layer

    def places(self, site: Site) -> tuple[Place, ...]:
        """Where the heads of a site are: one place for each channel, or one for all."""
        return tuple(place for group in self.groups for member, place in group.members if member is site)


@dataclass(frozen=True)
class Layout:
    """All steps of a program, and the columns of the output."""

    program: Program
    steps: tuple[Step, ...]
    first: tuple[Column, ...]
    output: tuple[Column, ...]

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """All sites, first layer first."""
        return tuple(site for step in self.steps for site in step.sites)

    @cached_property
    def order(self) -> dict[int, int]:
        """The place of every site among all of them, by the number of its operation."""
        return {site.op: i for i, site in enumerate(self.sites)}

    @property
    def last(self) -> tuple[Column, ...]:
        """The columns of the state that the output is read from."""
        return self.steps[-1].after if self.steps else self.first

    def __str__(self) -> str:
        lines = [f"layout of {len(self.steps)} layers, {len(self.sites)} sites: {self.program.source}"]
        for number, step in enumerate(self.steps, 1):
            lines.append(f"  layer {number}: {len(step.before)} columns -> {len(step.after)}")
            for site in step.sites:
                lines.append(f"    %{site.op} {site.family:9s} {self.program.labels[site.op]}")
        return "\n".join(lines)


def lower(program: Program, sites: Mapping[int, Site]) -> Layout:
    """Place every site in the earliest layer that its inputs allow, and carry on only what later layers need."""
    of = forms(program)
    level = levels(program, of)
    heads = [i for i in range(len(program.ops)) if is_head(program, i)]
    depth = max((level[i] for i in heads), default=0)
    last_use = _last_use(program, of, [(j, level[i]) for i in heads for j in reads(program, i)], depth)
    first = tuple(
        (i, c) for i, op in enumerate(program.ops) if isinstance(op, (Input, Constant)) for c in range(op.width)
    )
    state, steps = first, []
    for number in range(1, depth + 1):
        here = [i for i in heads if level[i] == number]
        carried = tuple(column for column in state if last_use.get(column, 0) > number)
        wanted = dict.fromkeys((j, c) for i in here for j in reads(program, i) for c in range(program.ops[j].width))
        read = tuple(column for column in wanted if column not in carried)
        writes = tuple((i, c) for i in here for c in range(program.ops[i].width))
        placed = tuple(sites[i] for i in here)
        groups = _groups(program, placed, carried + read, carried + writes)
        steps.append(Step(state, carried, read, placed, writes, groups))
        state = steps[-1].after
    output = tuple((program.output, c) for c in range(program.ops[program.output].width))
    return Layout(program, tuple(steps), first, output)


def _groups(
    program: Program, sites: Sequence[Site], columns: Sequence[Column], after: Sequence[Column]
) -> tuple[Group, ...]:
    """The groups of heads of a layer: shared tables first, then self heads by kind, then sites with a group each."""
    read = {column: i for i, column in enumerate(columns)}
    write = {column: i for i, column in enumerate(after)}
    shared: dict[object, list[Site]] = {}
    for site in sites:
        seat = site.seat(program)
        shared.setdefault(site.op if seat.share is None else seat.share, []).append(site)
    ranked = sorted(shared.values(), key=lambda members: _rank(members[0].seat(program)))
    groups = []
    for number, together in enumerate(ranked):
        members, start = [], 0
        for site in together:
            heads, width = site.seat(program).heads, program.ops[site.op].width
            operands = site.operands(program)
            for c in range(width) if site.channelwise else (None,):
                if c is None:
                    source = tuple(read[j, k] for j in operands for k in range(program.ops[j].width))
                    target = tuple(write[site.op, k] for k in range(width))
                else:
                    source, target = tuple(read[j, c] for j in operands), (write[site.op, c],)
                members.append((site, Place(number, start, heads, source, target)))
                start += heads
        seat = together[0].seat(program)
        purpose = "; ".join(program.labels[site.op] or f"%{site.op}" for site in together)
        groups.append(Group(seat, seat.label + purpose, tuple(members)))
    return tuple(groups)


def _rank(seat: Seat) -> int:
    if seat.share is None:
        return 2
    return 0 if seat.scope == "memory" else 1


def _last_use(
    program: Program, of: list[Form], readers: Sequence[tuple[int, int]], depth: int
) -> dict[Column, int]:
    """For each atom's column the last step whose affine map reads it; depth + 1 is the read-out."""
    last: dict[Column, int] = {}
    for value, step in [*readers, (program.output, depth + 1)]:
        for atom, weight in of[value].weight.items():
            for channel in range(weight.shape[0]):
                if weight[channel].any():
                    last[atom, channel] = max(last.get((atom, channel), 0), step)
    return last
