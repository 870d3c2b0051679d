"""What a plain transformer is built from: the layers of a network in tier `memory`, and how tokens enter and leave.

`source_of` reads them off a compiled network or off a theorem's construction in token-wise form. Nothing is copied or
changed: the layers are those of the network itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ...arguments import is_whole
from ...box import Box
from ...certificates.certified import CertifiedModule
from ...compiler.compiled import CompiledNetwork
from ...compiler.layout import Layout
from ...dtypes import Array
from ...errors import ArgumentError, UnsupportedOperation
from ...network import AttentionLayer, AttentionOnly, Heads
from ...programs.ops import Constant, Input
from ...theorems.partition import Cross, MaxAffine
from ...theorems.ramps import Ramp
from ...theorems.result import Construction
from ...theorems.slots import Registers
from ...theorems.universal import SoftmaxReadOut, Universal
from .sizes import reaches


@dataclass(frozen=True, eq=False)
class Source:
    """Layers of tier `memory` with the names of their columns.

    `names[i]` are the columns that layer i writes, `kinds[i]` the families of heads that compute them, and `sizes[i]`
    (token, column), where known, how large what heads write to them is. `lead` is an affine map in front, which the
    embedding carries out. `constants` (token, column) stand next to the input. `low` and `high` (token, column) bound
    the input. `fixed` says whether the network is for exactly `tokens` tokens; otherwise fewer will do.
    """

    layers: tuple[AttentionLayer, ...]
    names: tuple[tuple[str, ...], ...]
    kinds: tuple[tuple[str, ...], ...]
    tokens: int
    inputs: tuple[str, ...]
    low: Array
    high: Array
    box: Box
    boxes: tuple[Box, ...]
    output_shape: tuple[int, ...] | None  # None: (tokens, columns of the last layer)
    first_row: bool = False
    lead: AttentionLayer | None = None
    lead_names: tuple[str, ...] = ()
    constants: Tensor | None = None
    constant_names: tuple[str, ...] = ()
    fixed: bool = True
    causal: bool = False
    sizes: tuple[Array | None, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """What the first layer with heads reads: columns of the embedding, then constants."""
        return (self.lead_names if self.lead is not None else self.inputs) + self.constant_names


def source_of(net: nn.Module, tokens: int | None = None, box: Box | None = None) -> Source:
    """The layers of a network; `UnsupportedOperation` for what has no token-wise form."""
    if tokens is not None and not is_whole(tokens, 1):
        raise ArgumentError(f"tokens must be a whole number of at least 1, got {tokens!r}")
    if isinstance(net, (AttentionOnly, AttentionLayer)):
        return _bare(net, tokens, box)
    if box is not None:
        raise ArgumentError("this network has a box of its own: leave box out")
    if isinstance(net, CompiledNetwork):
        return _compiled(net, tokens)
    if isinstance(net, Construction):
        return _theorem(net, tokens)
    if isinstance(net, CertifiedModule):
        raise UnsupportedOperation(
            f"{type(net).__name__} is not exported by itself: the plain form is for networks of attnforge.compile and "
            "for theorems with form='tokens'; compile a formula that uses it"
        )
    raise ArgumentError(f"expected a network of attnforge.compile or of attnforge.theorems, got {type(net).__name__}")


def _compiled(net: CompiledNetwork, tokens: int | None) -> Source:
    program, layout = net.program, net.layout
    if tokens not in (None, program.tokens):
        raise ArgumentError(f"this network was compiled for {program.tokens} token(s), not {tokens}: leave tokens out")
    wide, width = program.box.outward(net.dtype), program.ops[0].width
    low, high = (x.numpy().reshape(program.tokens, width) for x in (wide.lower, wide.upper))
    names = program.box.names if program.tokens == 1 and program.box.names else None
    inputs = tuple(names or (f"input[{c}]" if width > 1 else "input" for c in range(width)))
    constants = [
        f"{program.labels[i] or 'constant'}[{c}]"
        for i, op in enumerate(program.ops) if isinstance(op, Constant) for c in range(op.width)
    ]  # fmt: skip
    found: list[tuple[tuple[int, int], ...]] = []
    kinds: list[tuple[str, ...]] = []
    for step in layout.steps:
        found += [step.columns, step.after]
        family = {site.op: site.family for site in step.sites}
        kinds += [("",) * len(step.columns), tuple(family.get(value, "") for value, _ in step.after)]
    found.append(layout.output)
    kinds.append(("",) * len(layout.output))
    return Source(
        layers=tuple(_layers(net.network.layers)),
        names=tuple(tuple(column_name(layout, *column) for column in columns) for columns in found),
        kinds=tuple(kinds),
        tokens=program.tokens,
        inputs=inputs,
        low=low,
        high=high,
        box=net.box,
        boxes=net.boxes,
        output_shape=tuple(program.output_shape),
        first_row=program.output_rows != "all",
        constants=net.constants,
        constant_names=tuple(constants),
        sizes=tuple(reaches(net)),
    )


def column_name(layout: Layout, value: int, channel: int) -> str:
    """What a column of a compiled network carries, in the words of its source."""
    program = layout.program
    op = program.ops[value]
    if isinstance(op, Input):
        named = program.box.names if program.tokens == 1 else None
        return named[channel] if named else f"input[{channel}]" if op.width > 1 else "input"
    name = program.labels[value] or f"%{value} {op.word}"
    return f"{name}[{channel}]" if op.width > 1 else name


def _theorem(net: Construction, tokens: int | None) -> Source:
    if net.form != "tokens":
        other = "a box of tokens, Box.cube(lo, hi, shape=d)" if isinstance(net, MaxAffine) else "form='tokens'"
        raise UnsupportedOperation(
            f"{net.theorem}: the paper's form mixes tokens by linear maps, which no transformer has; build it with "
            f"{other}, where all maps are token-wise, and export that"
        )
    lead: AttentionLayer | None = None
    constants: Tensor | None = None
    causal = False
    if isinstance(net, Ramp):
        lead, second = net.layers()
        causal, layers = net.causal, [_in_memory(second)]
    elif isinstance(net, MaxAffine):
        if isinstance(net.layer, Cross):
            raise UnsupportedOperation(
                "cross-attention reads its keys from a second sequence, which a plain transformer does not have; "
                "build it with attention='self'"
            )
        causal, layers = net.causal, [_in_memory(net.layer)]
        if net.tokens:  # sequences: gathered into every token first
            constants, layers = net.positions.detach(), [net.gather, *layers]
    elif isinstance(net, Universal):
        inner, constants = net.net, net.net.positions.detach()
        layers = [inner.gather, inner.first, _selection(inner.select)]
    else:
        raise UnsupportedOperation(f"{type(net).__name__} has no token-wise form that could be exported")
    shape = net.box.shape
    fixed = len(shape) == 2
    wanted = shape[0] if fixed else int(net.points(1).shape[-2])
    if fixed and tokens not in (None, wanted):
        raise ArgumentError(f"this construction is for sequences of {wanted} tokens, not {tokens}: leave tokens out")
    count = wanted if tokens is None else tokens
    wide = net.box.outward(net.dtype)
    low, high = (np.broadcast_to(x.numpy(), (count, shape[-1])).copy() for x in (wide.lower, wide.upper))
    layer_list = _layers(layers)
    names = [tuple(f"layer {i} output {c}" for c in range(_width(layer))) for i, layer in enumerate(layer_list, 1)]
    return Source(
        layers=tuple(layer_list),
        names=tuple(names),
        kinds=tuple(("",) * len(row) for row in names),
        tokens=count,
        inputs=tuple(f"x[{c}]" for c in range(shape[-1])),
        low=low,
        high=high,
        box=net.box,
        boxes=(net.box,),
        output_shape=None,
        lead=lead,
        lead_names=("w.x + t",) if lead is not None else (),
        constants=constants,
        constant_names=tuple(f"position {i}" for i in range(0 if constants is None else len(constants))),
        fixed=fixed,
        causal=causal,
    )


def _bare(net: AttentionOnly | AttentionLayer, tokens: int | None, box: Box | None) -> Source:
    """Layers without a target, on sequences of a box."""
    if not isinstance(box, Box) or len(box.shape) != 2 or tokens not in (None, box.shape[0]):
        raise ArgumentError(
            "layers alone do not know what they read: give box, a Box of shape (tokens, channels), as many tokens as "
            f"tokens says if that is given; got box = {box!r}, tokens = {tokens!r}"
        )
    layers = _layers(net.layers if isinstance(net, AttentionOnly) else [net])
    first = layers[0].heads()[0].W_Q.shape[1] if layers[0].S is None else layers[0].S.shape[0]
    if box.shape[1] != first:
        raise ArgumentError(f"the layers read {first} channels, the box has {box.shape[1]}")
    wide = box.outward(next(net.parameters()).dtype)
    names = [tuple(f"layer {i} output {c}" for c in range(_width(layer))) for i, layer in enumerate(layers, 1)]
    return Source(
        layers=tuple(layers),
        names=tuple(names),
        kinds=tuple(("",) * len(row) for row in names),
        tokens=box.shape[0],
        inputs=tuple(f"x[{c}]" for c in range(box.shape[1])),
        low=wide.lower.numpy(),
        high=wide.upper.numpy(),
        box=box,
        boxes=(box,),
        output_shape=(box.shape[0], len(names[-1])),
    )


def _layers(layers: object) -> list[AttentionLayer]:
    found = list(layers)  # type: ignore[call-overload]
    assert all(isinstance(layer, AttentionLayer) for layer in found)
    return found


def _width(layer: AttentionLayer) -> int:
    """The number of columns a layer writes."""
    heads = layer.heads()
    if heads:
        return heads[0].W_O.shape[-1]
    assert layer.S is not None
    return layer.S.shape[-1]


def _in_memory(layer: AttentionLayer | Registers) -> AttentionLayer:
    """Anchors that are tokens already, as memory slots again: `to_plain` makes registers of them."""
    if isinstance(layer, AttentionLayer):
        return layer
    return AttentionLayer([Heads("memory", purpose=layer.heads.purpose, **layer.tables()._asdict())])


def _selection(select: AttentionLayer | SoftmaxReadOut) -> AttentionLayer:
    """The last layer of a universal network; a softmax over channels is a head whose keys are the columns."""
    if isinstance(select, AttentionLayer):
        return select
    logits, read = select.logits.detach(), select.read.detach()
    eye = torch.eye(len(logits), dtype=logits.dtype).unsqueeze(0)
    out = torch.eye(read.shape[-1], dtype=read.dtype).unsqueeze(0)
    group = Heads("memory", W_Q=eye, M_K=logits.T.unsqueeze(0), M_V=read.unsqueeze(0), W_O=out, purpose="selection")
    return AttentionLayer([group])
