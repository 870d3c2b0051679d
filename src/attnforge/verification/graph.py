"""Networks as ONNX graphs of five operators: MatMul, Add, Softmax, Transpose, Reshape.

Verifiers know few operators. Here every head is spelled out with its stored numbers as they are: nothing is folded, so
that what the certificate says of the network it says of the file. Picking a row or a weight is a product with zeros and
ones, which is exact. The input is one row of numbers, (1, inputs), the output another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..compiler.compiled import CompiledNetwork
from ..errors import ArgumentError, CertificateError
from ..export.graph import OnnxGraph
from ..extras import require
from ..network import AttentionLayer, AttentionOnly, Heads

if TYPE_CHECKING:
    import onnx

OPSET = 13  # the first whose Softmax is along one axis; verifiers read up to 17
OPERATORS = ("MatMul", "Add", "Softmax", "Transpose", "Reshape")
MOST_BYTES = 1 << 26  # of a file that is read: the largest network of a pack takes a thousandth
MOST_NODES, MOST_ENTRIES = 1 << 16, 1 << 22  # operators of a file, and numbers of one value: each is a Python object


def model(net: CompiledNetwork) -> onnx.ModelProto:
    """The ONNX model of a compiled network; `ArgumentError` where a head has a form that these operators lack."""
    if any(group.causal for group in net.network.groups()):
        raise ArgumentError("a network with causal heads has no such graph: its mask is infinite")
    program = net.program
    every, outputs = program.output_rows == "all", int(np.prod(program.output_shape, dtype=int))
    return written(net.network, program.tokens, program.ops[0].width, net.constants, every, outputs, {})


def written(
    net: AttentionOnly, tokens: int, width: int, constants: Tensor | None, every: bool, outputs: int,
    masks: Mapping[tuple[int, int], float],
) -> onnx.ModelProto:  # fmt: skip
    """The ONNX model of layers on tokens of a width, constants beside them; puts out every row, or the first.

    `masks` says by how much the causal heads of a group (layer, group) put later keys behind.
    """
    require("onnx", "onnx")
    dtype = next(net.parameters()).dtype
    graph = OnnxGraph(dtype)
    Z = "X" if tokens == 1 else graph.reshape("X", 1, tokens, width)
    if constants is not None:
        kept = torch.eye(width, width + constants.shape[1], dtype=dtype)
        beside = torch.cat([torch.zeros(tokens, width, dtype=dtype), constants], -1)
        Z = graph.affine(Z, kept, beside if tokens == 1 else beside.unsqueeze(0))
    for index, part in enumerate(net.layers):
        assert isinstance(part, AttentionLayer)
        Z = _layer(graph, Z, part, tokens, f"layer {index}", {g: m for (at, g), m in masks.items() if at == index})
    if tokens > 1 and not every:
        Z = graph.node("MatMul", graph.number(torch.eye(1, tokens, dtype=dtype).unsqueeze(0)), Z, name="first row")
    graph.reshape(Z, 1, outputs)
    graph.nodes[-1].output[0] = "Y"
    return graph.model({"X": (1, tokens * width)}, "Y", (1, outputs), OPSET)


def _layer(
    graph: OnnxGraph, Z: str, layer: AttentionLayer, tokens: int, name: str, masks: Mapping[int, float]
) -> str:
    """Z S + s and the heads, one by one."""
    terms = [
        _head(graph, Z, group, h, tokens, f"{name}, {group.purpose or group.scope}, head {h}", masks.get(g, 0.0))
        for g, group in enumerate(layer.heads()) for h in range(group.heads)
    ]  # fmt: skip
    if layer.S is not None:
        terms.append(graph.node("MatMul", Z, graph.number(layer.S), name=f"{name}, skip"))
    out = terms[0]
    for term in terms[1:]:
        out = graph.node("Add", out, term)
    return out if layer.s is None else graph.node("Add", out, graph.number(layer.s))


def _head(graph: OnnxGraph, Z: str, group: Heads, h: int, tokens: int, name: str, mask: float) -> str:
    """One head: queries, logits, softmax, the mean of values, the output."""
    assert bool(mask) == group.causal

    def table(which: str) -> Tensor | None:
        found: Tensor | None = getattr(group, which)
        return None if found is None else found.detach()[h if found.shape[0] > 1 else 0]

    def projected(W: Tensor | None, b: Tensor | None) -> str:
        assert W is not None
        return graph.affine(Z, W, b)

    W_K, b_K, W_V, b_V, M_K, M_V = (table(word) for word in ("W_K", "b_K", "W_V", "b_V", "M_K", "M_V"))
    query, slots = projected(table("W_Q"), table("b_Q")), group.slots
    parts: list[str] = []  # logits: constant keys are one product
    constant = [] if M_K is None else [M_K]
    if group.scope != "memory" and W_K is None:
        assert b_K is not None
        constant.insert(0, b_K.expand(tokens if group.scope == "tokens" else 1, -1))
    elif group.scope == "tokens":
        turned = graph.node("Transpose", projected(W_K, b_K), perm=[0, 2, 1] if tokens > 1 else [1, 0])
        parts.append(graph.node("MatMul", query, turned))
    elif group.scope == "self":
        parts.append(_rows_times(graph, query, projected(W_K, b_K), tokens, turned=True))
    if constant:
        parts.append(graph.node("MatMul", query, graph.number(torch.cat(constant).T)))
    logits = parts[0] if len(parts) == 1 else _beside(graph, parts, [_own_slots(group, tokens), slots])
    if mask and tokens > 1:
        later = torch.triu(torch.full((tokens, tokens + slots), -mask, dtype=graph.dtype), 1)
        later[:, tokens:] = 0.0
        logits = graph.node("Add", logits, graph.number(later.unsqueeze(0)))
    weights = graph.node("Softmax", logits, axis=-1, name=name)
    count = _own_slots(group, tokens)
    terms = []
    if count and W_V is not None:
        own = weights if not slots else graph.node("MatMul", weights, graph.number(_pick(count, slots, group)))
        values = projected(W_V, b_V)
        terms.append(graph.node("MatMul", own, values) if group.scope == "tokens" or tokens == 1 else
                     _rows_times(graph, own, values, tokens))  # fmt: skip
    rows = [] if M_V is None else [M_V]
    if count and W_V is None:
        assert b_V is not None
        rows.insert(0, b_V.expand(count, -1))
    elif count and rows:
        rows.insert(0, torch.zeros(count, rows[0].shape[-1], dtype=group.W_Q.dtype))
    if rows:
        terms.append(graph.node("MatMul", weights, graph.number(torch.cat(rows))))
    read = terms[0] if len(terms) == 1 else graph.node("Add", *terms)
    W_O = table("W_O")
    assert W_O is not None
    return graph.node("MatMul", read, graph.number(W_O), name=f"{name}, out")


def _own_slots(group: Heads, tokens: int) -> int:
    """How many token slots a head sees."""
    return {"memory": 0, "self": 1, "tokens": tokens}[group.scope]


def _pick(count: int, slots: int, group: Heads) -> Tensor:
    """The matrix that keeps the first weights of a softmax."""
    return torch.eye(count + slots, count, dtype=group.W_Q.dtype)


def _rows_times(graph: OnnxGraph, a: str, b: str, tokens: int, turned: bool = False) -> str:
    """For each token the product of its row of a with its row of b, which is `turned` into a column."""
    if tokens == 1:
        return graph.node("MatMul", a, graph.node("Transpose", b, perm=[1, 0]) if turned else b)
    left, right = graph.reshape(a, tokens, 1, -1), graph.reshape(b, tokens, *((-1, 1) if turned else (1, -1)))
    return graph.reshape(graph.node("MatMul", left, right), 1, tokens, -1)


def _beside(graph: OnnxGraph, parts: list[str], widths: list[int]) -> str:
    """Logits side by side: each written into its place by a product with zeros and ones."""
    total, terms, first = sum(widths), [], 0
    for part, width in zip(parts, widths, strict=True):
        place = torch.zeros(width, total, dtype=graph.dtype)
        place[:, first : first + width] = torch.eye(width, dtype=graph.dtype)
        terms.append(graph.node("MatMul", part, graph.number(place)))
        first += width
    return graph.node("Add", *terms)


# -- reading --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OperatorNode:
    """An operator of a graph: what it reads, the name of its result, and its numbers (a shape, or an order of axes)."""

    op: str
    inputs: tuple[str, ...]
    output: str
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True)
class StoredGraph:
    """A graph as it is stored: operators in order, constants by name, the dtype, how much it takes and gives."""

    nodes: tuple[OperatorNode, ...]
    constants: dict[str, np.ndarray]
    dtype: str
    inputs: int
    outputs: int

    def same(self, other: StoredGraph) -> bool:
        """Whether two graphs are the same, number by number."""
        mine, theirs = self.constants, other.constants
        form = (self.nodes, self.dtype, self.inputs, self.outputs, mine.keys())
        return form == (other.nodes, other.dtype, other.inputs, other.outputs, theirs.keys()) and all(
            mine[k].dtype == theirs[k].dtype and mine[k].shape == theirs[k].shape
            and mine[k].tobytes() == theirs[k].tobytes() for k in mine
        )  # fmt: skip


def read(data: bytes | str | Path) -> StoredGraph:
    """The graph of an ONNX file, or of its bytes; `CertificateError` on anything that `model` does not write."""
    name = "the graph" if isinstance(data, bytes) else Path(data).name
    try:
        if not isinstance(data, bytes):
            if Path(data).stat().st_size > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
            data = Path(data).read_bytes()
        require("onnx", "onnx")
        import onnx

        return of_model(onnx.load_model_from_string(data))
    except OSError as error:
        raise CertificateError(f"cannot read {name}: {error.strerror}") from error
    except CertificateError:
        raise
    except Exception as error:  # whatever protobuf and numpy raise on bytes that are no model
        raise CertificateError(f"{name} is not an ONNX file of a pack: {str(error)[:200]}") from error


def of_model(found: onnx.ModelProto) -> StoredGraph:
    """The graph of a model."""
    from onnx import TensorProto, numpy_helper

    graph, kinds = found.graph, {1: "float32", 11: "float64"}
    if [(o.domain, o.version) for o in found.opset_import] != [("", OPSET)] or found.functions:
        raise ValueError(f"expected the operators of opset {OPSET} alone")
    if len(graph.node) > MOST_NODES or len(graph.input) != 1 or len(graph.output) != 1:
        raise ValueError("it has too many operators, or not one input and one output")
    ends = [graph.input[0], graph.output[0]]
    sizes = [[d.dim_value for d in end.type.tensor_type.shape.dim] for end in ends]
    dtypes = {kinds.get(end.type.tensor_type.elem_type) for end in ends}
    if [end.name for end in ends] != ["X", "Y"] or any(len(s) != 2 or s[0] != 1 or s[1] < 1 for s in sizes):
        raise ValueError("expected an input X and an output Y, one row each")
    if len(dtypes) != 1 or None in dtypes:
        raise ValueError("expected float32 or float64 for input and output")
    if any(tensor.data_location == TensorProto.EXTERNAL for tensor in graph.initializer):
        raise ValueError("its numbers lie in another file")
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    (dtype,) = dtypes
    known, nodes = {"X", *constants}, []
    for node in graph.node:
        given, kept = {a.name: a for a in node.attribute}, tuple(node.input)
        numbers: tuple[int, ...] = ()
        allowed = {"Softmax": {"axis"}, "Transpose": {"perm"}}.get(node.op_type, set())
        if node.op_type not in OPERATORS or node.domain or set(given) != allowed:
            raise ValueError(f"expected {', '.join(OPERATORS)}, got {node.op_type} with {sorted(given)}")
        if len(node.output) != 1 or node.output[0] in known or not known.issuperset(kept):
            raise ValueError(f"{node.op_type} reads what is not there yet, or writes what is")
        if len(kept) != (1 if allowed else 2):
            raise ValueError(f"{node.op_type} has {len(kept)} inputs")
        if node.op_type == "Softmax" and given["axis"].i != -1:
            raise ValueError("a softmax must be along the last axis")
        if node.op_type == "Transpose":
            numbers = tuple(given["perm"].ints)
        if node.op_type == "Reshape":
            if kept[1] not in constants or constants[kept[1]].dtype != np.int64:
                raise ValueError("a shape must be a constant of whole numbers")
            numbers, kept = tuple(constants[kept[1]].tolist()), kept[:1]
        nodes.append(OperatorNode(node.op_type, kept, node.output[0], numbers))
        known.add(node.output[0])
    floats = {name: table for name, table in constants.items() if table.dtype != np.int64}
    if any(str(t.dtype) != dtype or t.size > MOST_ENTRIES or not np.isfinite(t).all() for t in floats.values()):
        raise ValueError(f"a constant is not of {dtype}, too large, or not finite")
    if not nodes or nodes[-1].output != "Y":
        raise ValueError("its last operator does not give Y")
    return StoredGraph(tuple(nodes), floats, str(dtype), sizes[0][1], sizes[1][1])


def shaped(x: Any, node: OperatorNode) -> Any:
    """A value turned or reshaped as a node says."""
    return x.transpose(node.numbers) if node.op == "Transpose" else x.reshape(node.numbers)
