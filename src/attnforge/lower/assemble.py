"""From a layout to the weights of a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ..certify.interpolation import AnchorWeights
from ..heads.gate_specs import gate_spec
from ..heads.product_specs import ProductSpec
from ..heads.self_head import SelfSpec, pack
from ..ir.ops import Array
from ..network import AttentionLayer, AttentionOnly, Heads
from .forms import Column, Form, forms
from .layout import Layout, Site, Stage

Index = Mapping[Column, int]
TRAINABLE = ("M_K", "M_V")  # of an anchor head; and the affine maps. Everything else is structure.


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
    return reads[::-1] if site.config.get("swapped") else reads


def _affine_layer(
    of: list[Form], before: Sequence[Column], after: Sequence[Column], dtype: torch.dtype
) -> AttentionLayer:
    matrix, bias = affine_map(of, before, after)
    return AttentionLayer([], S=torch.from_numpy(matrix).to(dtype), s=torch.from_numpy(bias).to(dtype))


def _attention_layer(
    layout: Layout, stage: Stage, tables: Sequence[AnchorWeights], dtype: torch.dtype
) -> AttentionLayer:
    read = {column: i for i, column in enumerate(stage.columns)}
    write = {column: i for i, column in enumerate(stage.after)}
    skip, bias = np.zeros((len(read), len(write))), np.zeros(len(write))
    for column in stage.carried:
        skip[read[column], write[column]] = 1.0
    groups: list[Heads] = []
    for number, sites in tables_of(stage).items():
        table = tables[number]
        places = [
            (read[operands(layout, site, c)[0]], write[site.op, c])
            for site in sites
            for c in range(layout.program.ops[site.op].width)
        ]
        groups.append(_anchor_group(table, places, len(read), len(write), dtype, _purpose(layout, sites)))
        for source, target in places:
            skip[source, target], bias[target] = table.skip
    kinds: dict[tuple[int, int, int], list[tuple[SelfSpec, list[int], list[int]]]] = {}
    named: dict[tuple[int, int, int], list[Site]] = {}
    for site in stage.sites:
        if site.family in ("gate", "product"):
            spec = site_spec(site)
            named.setdefault(spec.kind, []).append(site)
            for c in range(layout.program.ops[site.op].width):
                columns = [read[column] for column in operands(layout, site, c)]
                kinds.setdefault(spec.kind, []).append((spec, columns, [write[site.op, c]]))
    for kind, placed in kinds.items():
        packed = pack(placed, len(read), len(write))
        skip, bias = skip + packed.S, bias + packed.s
        groups.append(_self_group(packed, dtype, _purpose(layout, named[kind])))
    layer = AttentionLayer(groups, S=torch.from_numpy(skip).to(dtype), s=torch.from_numpy(bias).to(dtype))
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name.endswith(TRAINABLE) and layer.heads()[int(name.split(".")[1])].scope == "memory")
    return layer


def _purpose(layout: Layout, sites: Sequence[Site]) -> str:
    return "; ".join(layout.program.sites[site.op] or f"%{site.op}" for site in sites)


def _anchor_group(
    table: AnchorWeights, places: Sequence[tuple[int, int]], columns: int, writes: int, dtype: torch.dtype, purpose: str
) -> Heads:
    heads = len(places)
    query, output = np.zeros((heads, columns, 2)), np.zeros((heads, 1, writes))
    for h, (source, target) in enumerate(places):
        query[h, source, 0] = 1.0
        output[h, 0, target] = 1.0
    number = lambda x: torch.from_numpy(np.asarray(x, dtype=np.float64)).to(dtype)  # noqa: E731
    return Heads(
        "memory",
        W_Q=number(query),
        b_Q=number([[-table.centre, 1.0]]),
        M_K=number(np.stack([table.slope, table.offset], -1)[None]),
        M_V=number(table.value[None, :, None]),
        W_O=number(output),
        purpose=purpose,
    )


def _self_group(spec: SelfSpec, dtype: torch.dtype, purpose: str) -> Heads:
    number = lambda x: torch.from_numpy(np.ascontiguousarray(x)).to(dtype)  # noqa: E731
    named = {name: number(getattr(spec, name)) for name in ("W_Q", "b_Q", "b_K", "W_V", "b_V", "M_K", "M_V", "W_O")}
    return Heads("self", purpose=purpose, **named)
