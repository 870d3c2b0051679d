"""From a layout and what was planned to the weights of a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ..heads.construction import Frame, Member, Planned
from ..heads.families import builder_of
from ..network import AttentionLayer, AttentionOnly
from ..programs.affine import Column, Form, affine_map, forms
from .layout import Layout, Step


def assemble(layout: Layout, planned: Mapping[int, Planned], dtype: torch.dtype) -> AttentionOnly:
    """The network of a layout: an affine map and an attention layer for each step, then the read-out."""
    of = forms(layout.program)
    layers: list[AttentionLayer] = []
    for step in layout.steps:
        layers.append(_affine_layer(of, step.before, step.columns, dtype))
        layers.append(_attention_layer(layout, step, planned, dtype))
    layers.append(_affine_layer(of, layout.last, layout.output, dtype))
    return AttentionOnly(layers)


def _affine_layer(
    of: list[Form], before: Sequence[Column], after: Sequence[Column], dtype: torch.dtype
) -> AttentionLayer:
    matrix, bias = affine_map(of, before, after)
    return AttentionLayer([], S=torch.from_numpy(matrix).to(dtype), s=torch.from_numpy(bias).to(dtype))


def _attention_layer(
    layout: Layout, step: Step, planned: Mapping[int, Planned], dtype: torch.dtype
) -> AttentionLayer:
    """Columns that are carried on pass through the skip, exactly; every group of heads is its family's to build."""
    columns, outputs = len(step.columns), len(step.after)
    frame = Frame(columns, outputs, dtype, np.zeros((columns, outputs)), np.zeros(outputs))
    for i in range(len(step.carried)):
        frame.skip[i, i] = 1.0
    groups = []
    for group in step.groups:
        builder = builder_of(group.members[0][0].family)
        members = [Member(planned[site.op], layout.program.ops[site.op], place) for site, place in group.members]
        groups.append(builder.group(frame, members, group.purpose))
    return step.frozen(AttentionLayer(groups, S=frame.number(frame.skip), s=frame.number(frame.bias)))
