"""What a plain transformer is made from: the layers of a network in tier `memory`, and how tokens enter and leave.

Nothing is copied or changed: the layers are those of the network itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ...box import Box
from ...compiler.compiled import CompiledNetwork
from ...compiler.layout import Layout
from ...dtypes import Array
from ...errors import ArgumentError, UnsupportedOperation
from ...network import AttentionLayer, AttentionOnly
from ...programs.ops import Constant, Input
from ...rasp.network.compiled import CompiledProgram
from ...rasp.network.layout import Feature

#: Registers that stand for memory slots before the tokens of a program: as many as token ids may be given away for.
REGISTERS = 512


@dataclass(frozen=True, eq=False)
class Source:
    """Layers of tier `memory` with the names of their columns.

    `names[i]` are the columns that layer i writes, `kinds[i]` the families of heads that compute them. `lead` is an
    affine map in front, which the embedding carries out. `constants` (token, column) stand next to the input. `low` and
    `high` (token, column) bound the input. `fixed` says whether the network is for exactly `tokens` tokens; otherwise
    fewer will do.
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
    ids: bool = False  # the input may be token ids: one-hot rows with a flag, see `rasp.network.compiled.token_rows`

    @property
    def columns(self) -> tuple[str, ...]:
        """What the first layer with heads reads: columns of the embedding, then constants."""
        return (self.lead_names if self.lead is not None else self.inputs) + self.constant_names


def compiled_source(net: CompiledNetwork, tokens: int | None = None) -> Source:
    """The layers of a compiled network."""
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
        layers=tuple(layers_of(net.network.layers)),
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


def program_source(net: CompiledProgram, tokens: int | None = None) -> Source:
    """The layers of a token program, for sequences padded to its longest."""
    longest = net.domain.max_length
    if tokens not in (None, longest):
        raise ArgumentError(f"this program was compiled for {longest} tokens, not {tokens}: leave tokens out")
    box = net.box
    low, high = box.lower.numpy(), box.upper.numpy()
    names = [[_feature_name(net, f) for f in layer.after] for layer in net.layout.layers]
    outputs = (
        [f"{net.program.name or 'output'} = {v!r}" for v in net.outputs]
        if net.outputs
        else [net.program.name or "output"]
    )
    found = sequence_source(layers_of(net.network.layers), box, low, high, output_shape=None, ids=True)
    return replace(
        found,
        names=(*map(tuple, names), tuple(outputs)),
        inputs=(*map(str, net.vocabulary), "token"),
        constants=net.positions if net.layout.positions else None,
        constant_names=tuple(_feature_name(net, f) for f in net.layout.positions),
    )


def require_registers(net: CompiledProgram) -> None:
    """Raise where a head of a program has more memory slots than there can be registers."""
    largest = max(net.network.groups(), key=lambda group: group.slots, default=None)
    if largest is not None and largest.slots >= REGISTERS:
        raise UnsupportedOperation(
            f"'{largest.purpose}' has {largest.slots} memory slots, and at most {REGISTERS - 1} can be registers among "
            "the tokens; choose a smaller max_length, or export to ONNX, which keeps memory slots"
        )


def _feature_name(net: CompiledProgram, feature: Feature) -> str:
    """What a column of a program's network carries, in words."""
    if feature.op < 0:
        return "token"
    node = net.facts.sop(feature.op)
    name = node.name or node.label.strip("'")
    return f"{name} = {net.facts.values(node)[feature.value]!r}" if feature.kind == "is" else f"{name} ({feature.kind})"


def bare_source(net: AttentionOnly | AttentionLayer, tokens: int | None, box: Box | None) -> Source:
    """Layers without a target, on sequences of a box."""
    if not isinstance(box, Box) or len(box.shape) != 2 or tokens not in (None, box.shape[0]):
        raise ArgumentError(
            "layers alone do not know what they read: give box, a Box of shape (tokens, channels), as many tokens as "
            f"tokens says if that is given; got box = {box!r}, tokens = {tokens!r}"
        )
    layers = layers_of(net.layers if isinstance(net, AttentionOnly) else [net])
    first = layers[0].heads()[0].W_Q.shape[1] if layers[0].S is None else layers[0].S.shape[0]
    if box.shape[1] != first:
        raise ArgumentError(f"the layers read {first} channels, the box has {box.shape[1]}")
    wide = box.outward(next(net.parameters()).dtype)
    low, high = wide.lower.numpy(), wide.upper.numpy()
    return sequence_source(layers, box, low, high, output_shape=(box.shape[0], width_of(layers[-1])))


def sequence_source(layers: list[AttentionLayer], box: Box, low: Array, high: Array, **more: Any) -> Source:
    """Layers on sequences whose tokens lie between `low` and `high`, (token, channel); columns are named by number."""
    names = tuple(tuple(f"layer {i} output {c}" for c in range(width_of(layer))) for i, layer in enumerate(layers, 1))
    return Source(
        layers=tuple(layers),
        names=names,
        kinds=tuple(("",) * len(row) for row in names),
        tokens=low.shape[0],
        inputs=tuple(f"x[{c}]" for c in range(low.shape[1])),
        low=low,
        high=high,
        box=box,
        boxes=(box,),
        **more,
    )


def layers_of(layers: object) -> list[AttentionLayer]:
    """Modules that are known to be attention layers."""
    found = list(layers)  # type: ignore[call-overload]
    assert all(isinstance(layer, AttentionLayer) for layer in found)
    return found


def width_of(layer: AttentionLayer) -> int:
    """The number of columns a layer writes."""
    heads = layer.heads()
    if heads:
        return heads[0].W_O.shape[-1]
    assert layer.S is not None
    return layer.S.shape[-1]
