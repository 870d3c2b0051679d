"""From a layout to the weights of a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..certify.interpolation import AnchorWeights
from ..heads.gate_specs import gate_spec
from ..heads.product_specs import ProductSpec
from ..heads.self_head import SelfSpec, pack
from ..ir.ops import Array
from ..network import AttentionLayer, AttentionOnly, Heads
from .forms import Column, Form, forms
from .layout import Layout, Site, Stage

Index = Mapping[Column, int]
ANCHORS = "anchors: "  # how the purpose of a group with a trainable table begins


def assemble(layout: Layout, tables: Sequence[AnchorWeights], dtype: torch.dtype) -> AttentionOnly:
    """The network of a layout: an affine map and an attention layer for each stage, then the read-out."""
    of = forms(layout.program)
    layers: list[AttentionLayer] = []
    for stage in layout.stages:
        layers.append(_affine_layer(of, stage.before, stage.columns, dtype))
        layers.append(_attention_layer(layout, stage, tables, dtype))
    layers.append(_affine_layer(of, layout.last, layout.output, dtype))
    return AttentionOnly(layers)


def affine_map(of: list[Form], before: Sequence[Column], after: Sequence[Column]) -> tuple[Array, Array]:
    """The matrix and bias that make the columns `after` out of the atoms `before`, in float64."""
    rows = {column: i for i, column in enumerate(before)}
    matrix, bias = np.zeros((len(before), len(after))), np.zeros(len(after))
    for i, (value, channel) in enumerate(after):
        bias[i] = of[value].bias[channel]
        for atom, weight in of[value].weight.items():
            for k in np.flatnonzero(weight[:, channel]):
                matrix[rows[atom, int(k)], i] = weight[k, channel]
    return matrix, bias


def folding_error(of: list[Form], before: Sequence[Column], after: Sequence[Column]) -> tuple[Array, Array]:
    """How far `affine_map` can be from the exact product of the program's matrices, entry by entry."""
    rows = {column: i for i, column in enumerate(before)}
    matrix, bias = np.zeros((len(before), len(after))), np.zeros(len(after))
    for i, (value, channel) in enumerate(after):
        form = of[value]
        unit = form.terms * 2.0**-52
        bias[i] = unit * form.bias_size[channel]
        if form.terms:
            for atom, size in form.size.items():
                for k in np.flatnonzero(size[:, channel]):
                    if (atom, int(k)) in rows:
                        matrix[rows[atom, int(k)], i] = unit * size[k, channel]
    return matrix, bias


def tables_of(stage: Stage) -> dict[int, list[Site]]:
    """The anchor sites of a stage by the table they share."""
    shared: dict[int, list[Site]] = {}
    for site in stage.sites:
        if site.family == "anchor":
            shared.setdefault(int(site.config["table"]), []).append(site)
    return shared


def site_spec(site: Site) -> SelfSpec:
    """The self heads of a gate or product site, reading its operands and writing one number."""
    config = site.config
    if site.family == "gate":
        return gate_spec(config["name"], float(config["sharpness"]), **config["parameters"]).heads
    a, b = config["centre"]
    return ProductSpec.build(int(config["nodes"]), float(config["gain"]), (float(a), float(b))).heads


def operands(layout: Layout, site: Site, channel: int) -> list[Column]:
    """The columns that one channel of a site reads, in the order its heads expect."""
    reads = [(value, channel) for value in layout.program.ops[site.op].inputs]
    if site.family == "square":
        return reads * 2
    return reads[::-1] if site.config.get("swapped") else reads


def _affine_layer(
    of: list[Form], before: Sequence[Column], after: Sequence[Column], dtype: torch.dtype
) -> AttentionLayer:
    matrix, bias = affine_map(of, before, after)
    return AttentionLayer([], S=torch.from_numpy(matrix).to(dtype), s=torch.from_numpy(bias).to(dtype))


@dataclass
class Frame:
    """What the heads of a stage are built into: where columns are read and written, and the linear skip, which they
    extend."""

    layout: Layout
    stage: Stage
    dtype: torch.dtype
    read: Index
    write: Index
    skip: Array
    bias: Array

    @classmethod
    def of(cls, layout: Layout, stage: Stage, dtype: torch.dtype) -> Frame:
        read = {column: i for i, column in enumerate(stage.columns)}
        write = {column: i for i, column in enumerate(stage.after)}
        skip = np.zeros((len(read), len(write)))
        for column in stage.carried:
            skip[read[column], write[column]] = 1.0
        return cls(layout, stage, dtype, read, write, skip, np.zeros(len(write)))

    def width(self, site: Site) -> int:
        """The number of channels of a site."""
        return self.layout.program.ops[site.op].width

    def number(self, x: object) -> Tensor:
        """An array as a tensor of the dtype that ships."""
        return torch.from_numpy(np.ascontiguousarray(np.asarray(x, dtype=np.float64))).to(self.dtype)

    def purpose(self, sites: Sequence[Site]) -> str:
        """What a group of heads is for: the names of its sites."""
        return "; ".join(self.layout.program.sites[site.op] or f"%{site.op}" for site in sites)


def _attention_layer(
    layout: Layout, stage: Stage, tables: Sequence[AnchorWeights], dtype: torch.dtype
) -> AttentionLayer:
    frame = Frame.of(layout, stage, dtype)
    groups = _anchor_groups(frame, tables) + _self_groups(frame)
    for site in stage.sites:
        if site.family in BUILDERS:
            groups += BUILDERS[site.family](frame, site)
    layer = AttentionLayer(groups, S=frame.number(frame.skip), s=frame.number(frame.bias))
    for name, parameter in layer.named_parameters():
        anchors = ".M_" in name and layer.heads()[int(name.split(".")[1])].purpose.startswith(ANCHORS)
        parameter.requires_grad_(anchors)  # everything else of an attention layer is structure
    return layer


def _anchor_groups(frame: Frame, tables: Sequence[AnchorWeights]) -> list[Heads]:
    """One group of heads for each table: a head for each scalar that is looked up in it."""
    groups = []
    for number, sites in tables_of(frame.stage).items():
        table = tables[number]
        places = [
            (frame.read[operands(frame.layout, site, c)[0]], frame.write[site.op, c])
            for site in sites
            for c in range(frame.width(site))
        ]
        query = np.zeros((len(places), len(frame.read), 2))
        output = np.zeros((len(places), 1, len(frame.write)))
        for h, (source, target) in enumerate(places):
            query[h, source, 0], output[h, 0, target] = 1.0, 1.0
            frame.skip[source, target], frame.bias[target] = table.skip
        groups.append(
            Heads(
                "memory",
                W_Q=frame.number(query),
                b_Q=frame.number([[-table.centre, 1.0]]),
                M_K=frame.number(np.stack([table.slope, table.offset], -1)[None]),
                M_V=frame.number(table.value[None, :, None]),
                W_O=frame.number(output),
                purpose=ANCHORS + frame.purpose(sites),
            )
        )
    return groups


def _self_groups(frame: Frame) -> list[Heads]:
    """Gates and products, packed into as few groups as their shapes allow."""
    kinds: dict[tuple[int, int, int], list[tuple[SelfSpec, list[int], list[int]]]] = {}
    named: dict[tuple[int, int, int], list[Site]] = {}
    for site in frame.stage.sites:
        if site.family in ("gate", "product", "square"):
            spec = site_spec(site)
            named.setdefault(spec.kind, []).append(site)
            for c in range(frame.width(site)):
                columns = [frame.read[column] for column in operands(frame.layout, site, c)]
                kinds.setdefault(spec.kind, []).append((spec, columns, [frame.write[site.op, c]]))
    groups = []
    for kind, placed in kinds.items():
        packed = pack(placed, len(frame.read), len(frame.write))
        frame.skip += packed.S
        frame.bias += packed.s
        names = ("W_Q", "b_Q", "b_K", "W_V", "b_V", "M_K", "M_V", "W_O")
        numbers: dict[str, Any] = {name: frame.number(getattr(packed, name)) for name in names}
        groups.append(Heads("self", purpose=frame.purpose(named[kind]), **numbers))
    return groups


#: Families whose heads see other tokens or whole vectors: each site builds its own groups.
BUILDERS: dict[str, Callable[[Frame, Site], list[Heads]]] = {}

from . import assemble_tokens  # noqa: E402, F401 (adds its builders to the tables above)
