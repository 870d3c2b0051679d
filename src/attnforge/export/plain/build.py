"""`to_plain`: lay out, pack, and fill the weights of a plain transformer.

How wide the stream and how many blocks: `torch.nn.MultiheadAttention` has head dimension = stream / heads, so a block
of head dimension d holds stream / d heads. A head's dimension is a power of 4, which makes the scale 1/sqrt(d) a power
of two. Heads of a layer that do not fit into one block go to the next: they read columns of earlier layers only. The
stream is the one that makes a pass cheapest: projections cost the square of the stream for every row, scores and means
the stream for every pair of rows, and the softmax something for every head, padding included, and pair of rows. Few
heads get wide ones, many share. Theorems in token-wise form are layers of tier `memory` first (`theorem_source`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ...arguments import is_whole
from ...box import Box
from ...certificates.certificate import Certificate
from ...certificates.certified import CertifiedModule
from ...compiler.compiled import CompiledNetwork
from ...dtypes import Array, dtype_name
from ...errors import ArgumentError, UnsupportedOperation
from ...network import AttentionLayer, AttentionOnly
from ...rasp.network.compiled import CompiledProgram
from ...rasp.network.several import CompiledPrograms
from ...theorems.result import Construction
from .certificate import certificate_of, reaches
from .source import Source, bare_source, compiled_source, program_source, require_registers
from .spec import FLAG, PlainHead, PlainSpec, scale_of
from .stream import HeadTables, Stream, first_rows, folded, read, refuse_overflow, spare
from .theorem import theorem_source
from .transformer import PlainTransformer

LIMIT = 2048  # registers and tokens together, and channels: blocks of 64 MiB in float32 at most
WIDE = 64  # the stream may grow to a multiple of this, so that few heads can be wide
SOFTMAX = 20  # operations that an entry of a softmax is worth: an exponential, a sum and a division, about
COMPARED = 256  # points at which layers without a target are compared with their plain form: a glance, no proof


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
    if isinstance(net, CompiledProgram):
        require_registers(net)
    source = source_of(net, tokens, box)
    dtype = net.dtype if isinstance(net, CertifiedModule) else next(net.parameters()).dtype
    sizes = reaches(net) if isinstance(net, CompiledNetwork) else ()
    built = assembled(source, _causal(source, causal), dtype, sizes, limit)
    stream = read(built.spec, built.state_dict(), source, sizes)
    if isinstance(net, CertifiedModule):
        built.made_from(net, source_of)
        built.attach(certificate_of(net, stream))
    else:
        built.attach(compared(built, net))
    return built


def source_of(net: nn.Module, tokens: int | None = None, box: Box | None = None) -> Source:
    """The layers of a network; `UnsupportedOperation` for what has no token-wise form."""
    if tokens is not None and not is_whole(tokens, 1):
        raise ArgumentError(f"tokens must be a whole number of at least 1, got {tokens!r}")
    if isinstance(net, (AttentionOnly, AttentionLayer)):
        return bare_source(net, tokens, box)
    if box is not None:
        raise ArgumentError("this network has a box of its own: leave box out")
    if isinstance(net, CompiledNetwork):
        return compiled_source(net, tokens)
    if isinstance(net, CompiledProgram):
        return program_source(net, tokens)
    if isinstance(net, CompiledPrograms):
        raise UnsupportedOperation("a network of several programs goes out one by one: take net['name'] of an output")
    if isinstance(net, Construction):
        return theorem_source(net, tokens)
    if isinstance(net, CertifiedModule):
        raise UnsupportedOperation(
            f"{type(net).__name__} is not exported by itself: the plain form is for networks of attnforge.compile and "
            "for theorems with form='tokens'; compile a formula that uses it"
        )
    raise ArgumentError(f"expected a network of attnforge.compile or of attnforge.theorems, got {type(net).__name__}")


def assembled(
    source: Source, causal: bool, dtype: torch.dtype, sizes: Sequence[Array | None], limit: int = LIMIT
) -> PlainTransformer:
    """The transformer without its certificate; `sizes` is how large what the heads of each layer write is."""
    stream = Stream(source, causal, dtype, spare(limit, limit, dtype))
    states = folded(stream, sizes)
    width, blocks = pack(stream, limit)
    built = PlainTransformer(_described(stream, states, width, blocks), dtype)
    fill(built, stream, blocks)
    return built.eval()


@torch.no_grad()
def compared(plain: PlainTransformer, net: nn.Module) -> Certificate:
    """For layers without a target: how far their plain form was from them at points of the box, measured."""
    points = torch.cat([plain.box.sample(COMPARED, dtype=plain.dtype), plain.box.corners(16, plain.dtype)])
    measured = float((plain.core(points).double() - net(points).double()).abs().max())
    name = dtype_name(plain.dtype)
    return Certificate("calibrated", None, name, "the layers it was made from", plain.box, measured=measured)


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


def _described(stream: Stream, states: list[Array], width: int, blocks: list[PackedBlock]) -> PlainSpec:
    source, fresh = stream.source, stream.fresh
    rows = []
    for block in blocks:
        row = []
        for head in block.heads:
            places = list(fresh[block.layer].values())
            writes = tuple(places[int(c)] for c in np.flatnonzero(head.output.any(0)))
            row.append(PlainHead(_purpose(stream, head), head.scope, head.slots, head.omega, head.logit, head.hiding,
                                 head.used, writes, head.place))  # fmt: skip
        rows.append(tuple(row + [PlainHead()] * (width // block.width - len(row))))
    names = list(stream.columns.names)
    for number, columns in enumerate(fresh):
        for c, place in columns.items():
            linear = np.delete(states[number + 1][:, c], place).any()
            names.append(source.names[number][c] + (", less its linear part" if linear else ""))
    names += ["unused"] * (width - stream.width)
    return PlainSpec(
        registers=stream.columns.registers,
        tokens=source.tokens,
        stream=width,
        outputs=stream.readout.shape[1],
        inputs=source.inputs,
        channels=tuple(names),
        heads=tuple(rows),
        causal=stream.causal,
        fixed=source.fixed,
        box=source.box,
        boxes=source.boxes,
        output_shape=source.output_shape,
        first_row=source.first_row,
        ids=source.ids,
        largest_activation=refuse_overflow(
            stream, (2 * head.omega * scale_of(block.width) for block in blocks for head in block.heads)
        ),
    )


def _purpose(stream: Stream, head: HeadTables) -> str:
    """The families of a head's results, and their names."""
    number, g, _ = head.place
    source, columns = stream.source, list(stream.fresh[number])
    targets = [columns[int(c)] for c in np.flatnonzero(head.output.any(0))]
    group, names = source.layers[number].heads()[g], [source.names[number][c] for c in targets]
    kind = ", ".join(sorted({source.kinds[number][c] for c in targets} - {""})) or group.purpose or group.scope
    return f"{kind}: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"


@torch.no_grad()
def fill(module: PlainTransformer, stream: Stream, blocks: list[PackedBlock]) -> None:
    """Write the weights of a stream into a module."""
    tables = {name: np.zeros(p.shape) for name, p in module.named_parameters()}
    embed, positions = first_rows(stream)
    tables["embed.weight"][: stream.width] = embed
    tables["positions"][:, : stream.width] = positions
    for b, packed in enumerate(blocks):
        into, out = (tables[f"blocks.{b}.attention.{name}"] for name in ("in_proj_weight", "out_proj.weight"))
        _fill_block(stream, packed, into, out)
    tables["readout.weight"][:, : stream.width] = stream.readout.T
    tables["readout.weight"][:, FLAG] = 0.0
    tables["readout.bias"][:] = stream.readout[FLAG]
    module.load_state_dict({name: torch.from_numpy(table).to(stream.dtype) for name, table in tables.items()})


def _fill_block(stream: Stream, packed: PackedBlock, into: Array, out: Array) -> None:
    """Queries, keys and values of head h are rows h d to (h+1) d of `in_proj_weight`, in its three thirds; the
    coordinates of queries and keys after a head's own are the exclusion."""
    d, width = packed.width, out.shape[0]
    for h, head in enumerate(packed.heads):
        hides = stream.exclusion(stream.source.layers[packed.layer].heads()[head.place[1]])
        scale, k = scale_of(d), head.query.shape[1]
        parts = ((0, scale * head.query, 0), (1, head.key, 0), (2, head.value, 0),
                 (0, scale * head.omega * hides[0], k), (1, hides[1], k))  # fmt: skip
        for third, table, after in parts:
            at = third * width + h * d + after
            into[at : at + table.shape[1], : len(table)] = table.T
        out[list(stream.fresh[packed.layer].values()), h * d : h * d + len(head.output)] = head.output.T


@dataclass(frozen=True, eq=False)
class PackedBlock:
    """One block: its head dimension, its heads, and the source layer they come from."""

    width: int
    heads: tuple[HeadTables, ...]
    layer: int


def power_of_four(width: int) -> int:
    """The smallest power of 4 that holds so many coordinates.

    >>> [power_of_four(n) for n in (1, 4, 5, 17)]
    [1, 4, 16, 64]
    """
    found = 1
    while found < width:
        found *= 4
    return found


def pack(stream: Stream, limit: int = LIMIT) -> tuple[int, list[PackedBlock]]:
    """The width of the stream, and the blocks; `ArgumentError` when that is too large."""
    needs = [[power_of_four(head.width) for head in heads] for heads in stream.layers]
    unit = max((w for layer in needs for w in layer), default=1)
    least = -(-max(stream.width, 1) // unit) * unit
    rows = stream.columns.registers + stream.columns.tokens
    if rows > limit or least > limit:
        raise ArgumentError(
            f"too large for a plain transformer: it would take {stream.columns.registers} registers, "
            f"{stream.columns.tokens} token(s) and {least} channels; the limit is {limit} rows and {limit} channels. "
            "Ask for a larger eps (fewer anchors and heads), or export a part of the function"
        )
    wide = -(-least // WIDE) * WIDE
    most = min(max([least, wide, *(sum(layer) for layer in needs)]), limit)
    best = min(range(least, most + 1, unit), key=lambda width: (_cost(needs, width, rows), width))
    blocks = []
    for number, (heads, wanted) in enumerate(zip(stream.layers, needs, strict=True)):
        for width, chosen in _dealt(wanted, best):
            blocks.append(PackedBlock(width, tuple(heads[i] for i in chosen), number))
    return best, blocks


def _cost(needs: Sequence[Sequence[int]], stream: int, rows: int) -> int:
    """Operations of a pass over `rows` rows, about."""
    widths = [width for layer in needs for width, _ in _dealt(layer, stream)]
    return sum(4 * stream**2 * rows + (2 * stream + SOFTMAX * (stream // width)) * rows**2 for width in widths)


def _dealt(needs: Sequence[int], stream: int) -> list[tuple[int, list[int]]]:
    """Head dimension and heads of each block: wide heads first, narrow ones where room is left."""
    order = sorted(range(len(needs)), key=lambda i: -needs[i])
    blocks: list[tuple[int, list[int]]] = []
    for i in order:
        if not blocks or len(blocks[-1][1]) >= stream // blocks[-1][0]:
            blocks.append((needs[i], []))
        blocks[-1][1].append(i)
    return [(_widened(width, len(chosen), stream), sorted(chosen)) for width, chosen in blocks]


def _widened(width: int, heads: int, stream: int) -> int:
    """The largest head dimension that leaves room for all heads: fewer of them are padding."""
    while stream % (4 * width) == 0 and stream // (4 * width) >= heads:
        width *= 4
    return width
