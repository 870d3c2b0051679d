"""From a layout to the weights of a network.

Weights for operations on whole tokens and between tokens: softmax, attention, norm, fixed mixing, maximum.

Each family has heads in its own coordinates, the columns of the values it reads one after the other; `embedded` places
them among the columns of a layer. All selections are exact: a column times 1 plus zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..dtypes import Array
from ..heads.anchor.bound import AnchorWeights
from ..heads.gate.construction import gate_spec
from ..heads.product.construction import ProductSpec
from ..heads.self_head import SelfSpec, pack
from ..heads.token.construction import average_heads, mix_heads, peak_heads
from ..network import AttentionLayer, AttentionOnly, Heads
from ..programs.ops import Attention, Mix, Op
from ..programs.positions import average, reads
from .layout import Column, Form, Layout, Site, Stage, forms

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



TABLES = ("W_Q", "b_Q", "W_K", "b_K", "W_V", "b_V", "M_K", "M_V", "W_O")
READING = ("W_Q", "W_K", "W_V")


def softmax_heads(op: Op, site: Site, dtype: torch.dtype) -> Heads:
    """Softmax over channels: a query of all channels against the identity as keys and values."""
    eye = torch.eye(op.width, dtype=dtype).unsqueeze(0)
    return Heads("memory", W_Q=eye, M_K=eye, M_V=eye, W_O=eye)


def attention_heads(op: Op, site: Site, dtype: torch.dtype) -> Heads:
    """One head over tokens; reads queries, keys, values, and positions if there is a mask.

    The mask's row p is one more channel: queries carry their one-hot position, keys the entries of their column.
    """
    assert isinstance(op, Attention)
    width, mask = int(site.config["width"]), shipped_mask(op, site)
    n = 0 if mask is None else len(mask)
    query = np.zeros((2 * width + op.width + n, width + n))
    key, value = np.zeros_like(query), np.zeros((len(query), op.width))
    query[:width, :width] = op.scale * np.eye(width)
    key[width : 2 * width, :width] = np.eye(width)
    value[2 * width : 2 * width + op.width] = np.eye(op.width)
    if mask is not None:
        query[-n:, width:], key[-n:, width:] = np.eye(n), mask.T
    tables = [torch.from_numpy(x).to(dtype).unsqueeze(0) for x in (query, key, value, np.eye(op.width))]
    return Heads("tokens", W_Q=tables[0], W_K=tables[1], W_V=tables[2], W_O=tables[3], causal=op.causal)


def shipped_mask(op: Attention, site: Site) -> Array | None:
    """What is added to the logits: -Omega for what is hidden, 0 where the causal rule hides anyway."""
    if op.mask is None:
        return None
    mask = np.maximum(op.mask, -float(site.config["omega"]))
    return np.tril(mask) if op.causal else mask


def norm_heads(op: Op, site: Site, dtype: torch.dtype) -> Heads:
    """G1: head j has a self slot of logit b_j - s_j c.c/d and value c, and a sink of logit and value 0."""
    width = op.width
    scale, shift, amount = (torch.tensor(site.config[k], dtype=dtype) for k in ("scales", "shifts", "amounts"))
    eye = torch.eye(width, dtype=dtype)
    wide = torch.eye(width, width + 1, dtype=dtype)
    one = torch.zeros(1, width + 1, dtype=dtype)
    one[0, -1] = 1.0
    return Heads(
        "self",
        W_Q=-scale[:, None, None] * wide,
        b_Q=shift[:, None] * one,
        W_K=wide.unsqueeze(0),
        b_K=one,
        W_V=eye.unsqueeze(0),
        M_K=torch.zeros(1, 1, width + 1, dtype=dtype),
        M_V=torch.zeros(1, 1, width, dtype=dtype),
        W_O=amount[:, None, None] * eye,
    )


def mixing_heads(op: Op, site: Site, dtype: torch.dtype) -> Heads:
    """D2 for multiples of means, D3 for everything else (which holds D1, the rows with one entry, exactly)."""
    assert isinstance(op, Mix)
    plain = average(op.matrix)
    if plain is not None:
        gain, causal = plain
        return average_heads(op.width, causal, dtype, gain)
    return mix_heads(torch.from_numpy(op.matrix.copy()), op.width, dtype)


def max_heads(op: Op, site: Site, dtype: torch.dtype) -> Heads:
    """D4, one head per channel."""
    return peak_heads(op.width, float(site.config["sharpness"]), dtype)


#: The heads of each family, in the coordinates of the values they read.
HEADS: dict[str, Callable[[Op, Site, torch.dtype], Heads]] = {
    "softmax": softmax_heads,
    "attention": attention_heads,
    "norm": norm_heads,
    "mix": mixing_heads,
    "max": max_heads,
}


def embedded(frame: Frame, site: Site) -> list[Heads]:
    """The heads of a site among the columns of its layer."""
    program = frame.layout.program
    own = HEADS[site.family](program.ops[site.op], site, frame.dtype)
    columns = [frame.read[j, c] for j in reads(program, site.op) for c in range(program.ops[j].width)]
    targets = [frame.write[site.op, c] for c in range(program.ops[site.op].width)]
    tables: dict[str, Tensor | None] = {name: getattr(own, name) for name in TABLES}
    for name in READING:
        table = tables[name]
        if table is not None:
            place = table.new_zeros(table.shape[0], len(frame.read), table.shape[2])
            used = torch.tensor(columns[: table.shape[1]])
            tables[name] = place.index_add(1, used, table.detach())  # a value may be read twice, as query and as key
    output = own.W_O.new_zeros(*own.W_O.shape[:2], len(frame.write))
    output[..., targets] = own.W_O.detach()
    tables["W_O"] = output
    purpose = f"{site.family}: {frame.purpose([site])}"
    return [Heads(own.scope, causal=own.causal, purpose=purpose, **tables)]  # type: ignore[arg-type]


BUILDERS.update(dict.fromkeys(HEADS, embedded))
