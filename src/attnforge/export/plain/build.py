"""`to_plain`: lay out, pack, and fill the weights of a plain transformer."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from ...box import Box
from ...certificates.certified import CertifiedModule
from ...dtypes import Array
from ...errors import ArgumentError, PrecisionError, UnsupportedOperation
from .certificate import certificate_of, compared
from .layout import LIMIT, Packed, PlainLayout, lay_plain, pack
from .source import Source, source_of
from .spec import FLAG, PlainHead, PlainSpec
from .transformer import PlainBlock, PlainTransformer, scale_of


def to_plain(
    net: nn.Module,
    tokens: int | None = None,
    *,
    causal: bool | None = None,
    box: Box | None = None,
    limit: int = LIMIT,
) -> PlainTransformer:
    """A network of `attnforge.compile`, or a theorem in token-wise form, as a stock attention-only transformer.

    >>> import attnforge as af
    >>> net = af.compile("sin(x*y)", af.Box(x=(-1, 1), y=(0, 2)), eps=1e-3)
    >>> plain = to_plain(net)
    >>> x = net.box.sample(100, dtype=torch.float32)
    >>> bool((plain(x) - net(x)).abs().max() < 1e-5), [head.purpose for head in plain.heads[-1] if head.purpose]
    (True, ['anchor: sin(x*y)'])

    `tokens` is how many tokens a theorem's network is for (a compiled one knows). `causal` asks for a causal mask; left
    out, it is used where every head between tokens is causal already. More than `limit` rows or channels are refused.
    Any other `network.AttentionOnly` or `network.AttentionLayer` needs a `box` of sequences, shape (tokens, channels),
    and is measured against itself instead of certified.
    """
    built, layout = assembled(net, tokens, causal, limit, box)
    if isinstance(net, CertifiedModule):
        built.attach(certificate_of(net, layout))
    else:
        built.attach(compared(built, net, layout))
    return built


def assembled(
    net: nn.Module, tokens: int | None, causal: bool | None, limit: int = LIMIT, box: Box | None = None
) -> tuple[PlainTransformer, PlainLayout]:
    """The transformer without its certificate, and the layout it was made from."""
    source = source_of(net, tokens, box)
    dtype = net.dtype if isinstance(net, CertifiedModule) else next(net.parameters()).dtype
    layout = lay_plain(source, _causal(source, causal), dtype)
    stream, blocks = pack(layout, limit)
    built = PlainTransformer(_described(layout, stream, blocks), dtype)
    fill(built, layout, blocks)
    built._source = (net,) if isinstance(net, CertifiedModule) else ()
    return built.eval(), layout


def _causal(source: Source, wanted: bool | None) -> bool:
    """Whether there is a causal mask; refuses one that would hide what a head must see."""
    groups = [group for layer in source.layers for group in layer.heads() if group.scope == "tokens"]
    if wanted is None:
        return source.causal or (bool(groups) and all(group.causal for group in groups))
    if not isinstance(wanted, bool):
        raise ArgumentError(f"causal must be True, False or None, got {wanted!r}")
    looking = [group.purpose or "a head between tokens" for group in groups if not group.causal]
    if wanted and looking and source.tokens > 1:
        raise UnsupportedOperation(
            f"a causal mask would hide later tokens from: {'; '.join(dict.fromkeys(looking))}. "
            "Leave causal out, or compile a function whose tokens look back only"
        )
    return wanted


def _described(layout: PlainLayout, stream: int, blocks: list[Packed]) -> PlainSpec:
    source = layout.source
    rows = []
    for block in blocks:
        row = [
            PlainHead(
                head.purpose, head.scope, head.slots, head.omega, head.logit, head.hiding, head.key.shape[1],
                tuple(int(c) for c in np.flatnonzero(head.output.any(0))), head.place,
            )
            for head in block.heads
        ]  # fmt: skip
        rows.append(tuple(row + [PlainHead()] * (stream // block.width - len(row))))
    names = [*layout.names, *("unused" for _ in range(stream - layout.width))]
    largest = float(layout.sizes[-1].max(initial=1.0))
    limit = torch.finfo(layout.dtype).max / 16
    reach = [2 * head.omega * scale_of(block.width) for block in blocks for head in block.heads]
    if not max([largest, *reach]) < limit:
        raise PrecisionError(
            f"{layout.dtype} cannot hold this network in plain form: its logits and activations reach "
            f"{max([largest, *reach]):.3g}; compile it with dtype=torch.float64"
        )
    return PlainSpec(
        registers=layout.columns.registers,
        tokens=source.tokens,
        stream=stream,
        outputs=layout.states[-1].shape[1],
        inputs=source.inputs,
        channels=tuple(names),
        heads=tuple(rows),
        causal=layout.causal,
        fixed=source.fixed,
        box=source.box,
        boxes=source.boxes,
        output_shape=source.output_shape,
        first_row=source.first_row,
        largest_activation=largest,
    )


@torch.no_grad()
def fill(module: PlainTransformer, layout: PlainLayout, blocks: list[Packed]) -> None:
    """Write the weights of a layout into a module."""
    columns, source = layout.columns, layout.source
    embed, positions = torch.zeros_like(module.embed.weight), torch.zeros_like(module.positions)
    inputs = list(columns.inputs)
    token = slice(columns.registers, None)
    positions[range(columns.registers), list(columns.ids)] = 1.0
    positions[token, FLAG] = 1.0
    if source.lead is None:
        embed[inputs, range(len(inputs))] = 1.0
    else:
        assert source.lead.S is not None
        embed[inputs] = source.lead.S.T
        if source.lead.s is not None:
            positions[token, inputs] = source.lead.s
    if source.constants is not None:
        positions[token, columns.constants.start : columns.constants.stop] = source.constants.to(positions)
    if columns.positions:
        positions[range(columns.registers, len(positions)), list(columns.positions)] = 1.0
    module.embed.weight.copy_(embed)
    module.positions.copy_(positions)
    for block, packed in zip(module.blocks, blocks, strict=True):
        assert isinstance(block, PlainBlock)
        _fill_block(block, packed, layout.dtype)
    last = layout.states[-1].copy()
    module.readout.bias.copy_(torch.from_numpy(last[FLAG]).to(layout.dtype))
    last[FLAG] = 0.0
    module.readout.weight.zero_()
    module.readout.weight[:, : len(last)] = torch.from_numpy(last.T).to(layout.dtype)


def _fill_block(block: PlainBlock, packed: Packed, dtype: torch.dtype) -> None:
    """Queries, keys and values of head h are rows h d to (h+1) d of `in_proj_weight`, in its three thirds."""
    into, out = block.attention.in_proj_weight, block.attention.out_proj.weight
    into.zero_()
    out.zero_()
    stream, d = into.shape[1], packed.width
    for h, head in enumerate(packed.heads):
        tables: tuple[Array, ...] = (scale_of(d) * head.query, head.key, head.value)
        for third, table in enumerate(tables):
            at = third * stream + h * d
            into[at : at + table.shape[1], : len(table)] = torch.from_numpy(table.T.copy()).to(dtype)
        rows, columns = head.output.shape
        out[:columns, h * d : h * d + rows] = torch.from_numpy(head.output.T.copy()).to(dtype)
