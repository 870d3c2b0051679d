"""Attention layers and stock transformers as nodes of an ONNX graph, with the operator `Attention` of opset 23.

Rows stand alone for heads over memory, so all rows of a batch are one sequence of queries against the slots. Self heads
see a different key and value at every row; they are spelled out as MatMul, Softmax, MatMul. Node names say the purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..network import AttentionLayer, AttentionOnly, Heads
from .plain.transformer import PlainTransformer

if TYPE_CHECKING:
    import onnx

Shape: TypeAlias = tuple[str | int, ...]  # a name for a free size, a number for a fixed one
FLOATS = {torch.float32: 1, torch.float64: 11}  # onnx.TensorProto.FLOAT and DOUBLE


class OnnxGraph:
    """Nodes and constants in the order they were added; every method returns the name of a value."""

    def __init__(self, dtype: torch.dtype):
        if dtype not in FLOATS:
            raise ArgumentError(f"an ONNX graph is written in float32 or float64, got {dtype}")
        self.dtype = dtype
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}

    def node(self, op: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        """One operator; the name of its output."""
        from onnx import helper

        out = f"v{len(self.nodes)}"
        label = f"{len(self.nodes)}: {name or op}"
        self.nodes.append(helper.make_node(op, list(inputs), [out], name=label, **attributes))
        return out

    def number(self, table: Tensor) -> str:
        """A constant of weights."""
        return self._constant(table.detach().to(self.dtype).cpu().contiguous().numpy())

    def whole(self, *values: int) -> str:
        """A constant vector of whole numbers: shapes, axes, starts."""
        return self._constant(np.array(values, dtype=np.int64))

    def _constant(self, array: np.ndarray) -> str:
        from onnx import numpy_helper

        key = f"c{len(self.constants)}"
        if array.dtype == np.int64:  # the same few shapes come again and again
            key = "w" + "_".join(str(v).replace("-", "m") for v in array)
        if key not in self.constants:
            self.constants[key] = numpy_helper.from_array(array, key)
        return key

    def model(
        self, inputs: Mapping[str, Shape], output: str, shape: Shape, opset: int, given: int = 0
    ) -> onnx.ModelProto:
        """The model of what was added, checked; its inputs are numbers of the dtype, or of the kind that is given."""
        from onnx import checker, helper

        kind = FLOATS[self.dtype]
        taken = [helper.make_tensor_value_info(name, given or kind, size) for name, size in inputs.items()]
        put_out = [helper.make_tensor_value_info(output, kind, shape)]
        body = helper.make_graph(self.nodes, "attnforge", taken, put_out, list(self.constants.values()))
        opsets = [helper.make_opsetid("", opset)]
        version = helper.find_min_ir_version_for(opsets)
        found = helper.make_model(body, opset_imports=opsets, producer_name="attnforge", ir_version=version)
        checker.check_model(found)
        return found

    def reshape(self, x: str, *shape: int) -> str:
        return self.node("Reshape", x, self.whole(*shape))

    def batch_of(self, x: str) -> str:
        """The leading size, as a vector of one number."""
        return self.node("Shape", x, start=0, end=1)

    def expand(self, x: str, batch: str, *shape: int) -> str:
        """A constant repeated for each entry of a batch."""
        return self.node("Expand", x, self.node("Concat", batch, self.whole(*shape), axis=0))

    def affine(self, x: str, W: Tensor, b: Tensor | None) -> str:
        out = self.node("MatMul", x, self.number(W))
        return out if b is None else self.node("Add", out, self.number(b))


def network(graph: OnnxGraph, Z: str, net: AttentionOnly) -> str:
    """The layers of a network on a state (batch, tokens, channels)."""
    for index, part in enumerate(net.layers):
        assert isinstance(part, AttentionLayer)
        Z = layer(graph, Z, part, f"layer {index}")
    return Z


def layer(graph: OnnxGraph, Z: str, part: AttentionLayer, name: str) -> str:
    """Z S + s and the heads, summed in the order of the runtime."""
    terms = [heads(graph, Z, group, f"{name}, {group.purpose or group.scope}") for group in part.heads()]
    if part.S is not None:
        terms.append(graph.node("MatMul", Z, graph.number(part.S), name=f"{name}, skip"))
    if part.s is not None:
        terms.append(graph.number(part.s))
    out = terms[0]
    for term in terms[1:]:
        out = graph.node("Add", out, term)
    return out


def heads(graph: OnnxGraph, Z: str, group: Heads, name: str) -> str:
    """One group of heads: (batch, tokens, channels) -> (batch, tokens, channels after)."""
    read = _tokens(graph, Z, group, name) if group.scope == "tokens" else _rows(graph, Z, group, name)
    W_O = group.W_O.expand(group.heads, -1, -1)
    out = graph.node("MatMul", read, graph.number(W_O.flatten(0, 1)), name=f"{name}, out")
    if group.scope == "tokens":
        return out
    first = graph.node("Shape", Z, start=0, end=2)
    shape = graph.node("Concat", first, graph.whole(W_O.shape[-1]), axis=0)
    return graph.node("Reshape", out, shape)


def _rows(graph: OnnxGraph, Z: str, group: Heads, name: str) -> str:
    """Heads that look at memory, or at memory and their own row: (row, head times value)."""
    rows = graph.reshape(Z, -1, group.W_Q.shape[1])
    if group.scope == "self":
        return _own(graph, rows, group, name)
    shared = group.M_K.shape[0] == group.M_V.shape[0] == 1
    keys, values = (t if shared else t.expand(group.heads, -1, -1) for t in (group.M_K, group.M_V))
    query = graph.reshape(_projected(graph, rows, group.W_Q, group.b_Q), 1, -1, group.heads * group.W_Q.shape[2])
    out = _attention(graph, query, _flat(graph, keys), _flat(graph, values), group.heads, len(keys), name)
    return graph.reshape(out, -1, group.heads * group.M_V.shape[2])


def _own(graph: OnnxGraph, rows: str, group: Heads, name: str) -> str:
    """Softmax over the row itself and memory, spelled out."""
    count, width = group.heads, group.W_Q.shape[2]
    query = graph.reshape(_projected(graph, rows, group.W_Q, group.b_Q), -1, count, 1, width)
    if group.W_K is None:
        own = graph.node("MatMul", query, graph.number(group.b_K.unsqueeze(0).unsqueeze(-1)))
    else:
        keys = graph.reshape(_projected(graph, rows, group.W_K, group.b_K), -1, group.W_K.shape[0], width, 1)
        own = graph.node("MatMul", query, keys)
    logits = own
    if group.slots:
        memory = graph.node("MatMul", query, graph.number(group.M_K.transpose(-2, -1).unsqueeze(0)))
        logits = graph.node("Concat", own, memory, axis=-1)
    weights = graph.node("Softmax", logits, axis=-1, name=name)
    value = group.b_V.shape[-1] if group.W_V is None else group.W_V.shape[2]
    shared = (group.b_V if group.W_V is None else group.W_V).shape[0]
    if group.W_V is None:
        values = graph.number(group.b_V.reshape(1, shared, 1, value))
    else:
        values = graph.reshape(_projected(graph, rows, group.W_V, group.b_V), -1, shared, 1, value)
    if not group.slots:
        return graph.reshape(graph.node("MatMul", weights, values), -1, count * value)
    ends = (graph.whole(0), graph.whole(1), graph.whole(-1))
    out = graph.node("MatMul", graph.node("Slice", weights, *ends), values)
    rest = graph.node("Slice", weights, graph.whole(1), graph.whole(1 + group.slots), graph.whole(-1))
    out = graph.node("Add", out, graph.node("MatMul", rest, graph.number(group.M_V.unsqueeze(0))))
    return graph.reshape(out, -1, count * value)


def _tokens(graph: OnnxGraph, Z: str, group: Heads, name: str) -> str:
    """Heads that look at all tokens, and at memory where there is some: (batch, token, head times value)."""
    tables = [t for t in (group.W_K, group.b_K, group.W_V, group.b_V, group.M_K, group.M_V) if t is not None]
    kv = max(t.shape[0] for t in tables)
    sizes = (group.W_Q.shape[2], group.W_O.shape[1])
    pairs = ((group.W_K, group.b_K, group.M_K), (group.W_V, group.b_V, group.M_V))
    sides = []
    for (W, b, memory), width in zip(pairs, sizes, strict=True):
        W, b = (None if t is None else t.expand(kv, *t.shape[1:]) for t in (W, b))
        if W is None:
            assert b is not None
            one = graph.number(b.reshape(1, 1, -1))
            side = graph.node("Expand", one, graph.node("Concat", graph.node("Shape", Z, start=0, end=2),
                                                        graph.whole(1), axis=0))  # fmt: skip
        else:
            side = _projected(graph, Z, W, b)
        if memory is not None:
            slots = _flat(graph, memory.expand(kv, -1, -1))
            repeated = graph.expand(slots, graph.batch_of(Z), group.slots, kv * width)
            side = graph.reshape(graph.node("Concat", side, repeated, axis=1), 0, -1, kv * width)  # a width to rely on
        sides.append(side)
    query = _projected(graph, Z, group.W_Q, group.b_Q)
    keys, values = sides
    if group.causal and group.slots:  # the operator's own mask does not know of slots after the tokens
        return _attention(graph, query, keys, values, group.heads, kv, name, mask=_mask(graph, Z, group.slots))
    return _attention(graph, query, keys, values, group.heads, kv, name, is_causal=int(group.causal))


def _mask(graph: OnnxGraph, Z: str, slots: int) -> str:
    """True where a token may look: at itself and earlier ones, and at every slot."""
    from onnx import helper

    count, one = graph.node("Shape", Z, start=1, end=2), helper.make_tensor("one", FLOATS[graph.dtype], [1], [1.0])
    square = graph.node("ConstantOfShape", graph.node("Concat", count, count, axis=0), value=one)
    seen = graph.node("Trilu", square, upper=0)
    beside = graph.node("ConstantOfShape", graph.node("Concat", count, graph.whole(slots), axis=0), value=one)
    return graph.node("Cast", graph.node("Concat", seen, beside, axis=1), to=9)  # onnx.TensorProto.BOOL


def transformer(graph: OnnxGraph, tokens: str, net: PlainTransformer) -> str:
    """A plain transformer on tokens (batch, tokens, inputs): what its read-out gives for every token."""
    table, first = net.positions.detach(), net.registers
    batch = graph.batch_of(tokens)
    count = graph.node("Shape", tokens, start=1, end=2)
    place = graph.node("Slice", graph.number(table[first:]), graph.whole(0), count, graph.whole(0))
    x = graph.node("Add", graph.affine(tokens, net.embed.weight.T, net.embed.bias), place, name="embed")
    if first:
        ahead = graph.expand(graph.number(table[:first].unsqueeze(0)), batch, first, net.spec.stream)
        x = graph.node("Concat", ahead, x, axis=1, name="registers first")
    for index, part in enumerate(net.blocks):
        attention = cast(nn.MultiheadAttention, part.attention)
        names = "; ".join(dict.fromkeys(head.purpose for head in net.heads[index] if head.purpose))
        x = graph.node("Add", x, _block(graph, x, attention, net.causal, f"block {index}, {names}"))
    x = graph.node("Slice", x, graph.whole(first), graph.whole(np.iinfo(np.int64).max), graph.whole(1))
    return graph.affine(x, net.readout.weight.T, net.readout.bias)


def _block(graph: OnnxGraph, x: str, attention: nn.MultiheadAttention, causal: bool, name: str) -> str:
    """MultiheadAttention(x, x, x). Its scale, a power of two, goes into the queries, where it is exact."""
    width, weight, bias = attention.embed_dim, attention.in_proj_weight.detach(), attention.in_proj_bias
    scale = torch.ones(3 * width, dtype=weight.dtype)
    scale[:width] = attention.head_dim**-0.5
    joined = graph.affine(x, (weight * scale.unsqueeze(-1)).T, None if bias is None else bias * scale)
    ends = [(graph.whole(i * width), graph.whole((i + 1) * width), graph.whole(2)) for i in range(3)]
    query, keys, values = (graph.node("Slice", joined, *end) for end in ends)
    count = attention.num_heads
    read = _attention(graph, query, keys, values, count, count, name, is_causal=int(causal))
    return graph.affine(read, attention.out_proj.weight.T, attention.out_proj.bias)


def _attention(
    graph: OnnxGraph, query: str, keys: str, values: str, count: int, shared: int, name: str, is_causal: int = 0,
    mask: str = "",
) -> str:  # fmt: skip
    given = [query, keys, values, *([mask] if mask else [])]
    return graph.node("Attention", *given, name=name, q_num_heads=count, kv_num_heads=shared, scale=1.0,
                      is_causal=is_causal)  # fmt: skip


def _projected(graph: OnnxGraph, x: str, W: Tensor, b: Tensor | None) -> str:
    """x W + b for all heads side by side."""
    wide = None if b is None else b.expand(W.shape[0], -1).reshape(-1)
    return graph.affine(x, W.transpose(0, 1).reshape(W.shape[1], -1), wide)


def _flat(graph: OnnxGraph, table: Tensor) -> str:
    """(head, slot, width) -> a constant (1, slot, head times width)."""
    return graph.number(table.transpose(0, 1).reshape(1, table.shape[1], -1))
