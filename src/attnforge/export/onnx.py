"""Networks as ONNX files, and how to run those without losing accuracy.

Compiled networks, plain transformers and layers of heads are written node by node (`Graph`), with the operator
`Attention` of opset 23; everything else goes through `torch.onnx`. What is written is the core: attention and affine
maps. The checks of the input stay behind: an ONNX file neither warns about nor refuses points outside the box.

Float64 works. ONNX Runtime may replace parts of a graph by fused kernels, some of which compute in less than float64
(errors near 2e-8 have been seen; version 1.31 leaves the graphs written here alone), so `session` switches rewriting
off. Do the same in other programs:
`options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL`.

Rows stand alone for heads over memory, so all rows of a batch are one sequence of queries against the slots. Self heads
see a different key and value at every row; they are spelled out as MatMul, Softmax, MatMul. Node names say the purpose.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..box import Box
from ..census.graph import quiet_evaluation
from ..certificates.certified import CertifiedModule
from ..compiler.compiled import CompiledNetwork
from ..errors import ArgumentError
from ..extras import require
from ..network import AttentionLayer, AttentionOnly, Heads
from ..programs.ops import Mix
from ..rasp.network.compiled import CompiledProgram, token_rows
from ..saving import free_file, write_whole
from ..theorems.partition import MaxAffine
from ..theorems.ramps import Ramp
from ..theorems.result import Construction
from .fresh import open_session
from .plain.transformer import PlainTransformer
from .verification import Artefact, domain
from .writing import network_of, steps

if TYPE_CHECKING:
    import onnx
    import onnxruntime

OPSET = 23  # the first with the operator Attention
FLOATS = {torch.float32: 1, torch.float64: 11}  # onnx.TensorProto.FLOAT and DOUBLE


class Graph:
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


def network(graph: Graph, Z: str, net: AttentionOnly) -> str:
    """The layers of a network on a state (batch, tokens, channels)."""
    for index, part in enumerate(net.layers):
        assert isinstance(part, AttentionLayer)
        Z = layer(graph, Z, part, f"layer {index}")
    return Z


def layer(graph: Graph, Z: str, part: AttentionLayer, name: str) -> str:
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


def heads(graph: Graph, Z: str, group: Heads, name: str) -> str:
    """One group of heads: (batch, tokens, channels) -> (batch, tokens, channels after)."""
    read = _tokens(graph, Z, group, name) if group.scope == "tokens" else _rows(graph, Z, group, name)
    W_O = group.W_O.expand(group.heads, -1, -1)
    out = graph.node("MatMul", read, graph.number(W_O.flatten(0, 1)), name=f"{name}, out")
    if group.scope == "tokens":
        return out
    first = graph.node("Shape", Z, start=0, end=2)
    shape = graph.node("Concat", first, graph.whole(W_O.shape[-1]), axis=0)
    return graph.node("Reshape", out, shape)


def _rows(graph: Graph, Z: str, group: Heads, name: str) -> str:
    """Heads that look at memory, or at memory and their own row: (row, head times value)."""
    rows = graph.reshape(Z, -1, group.W_Q.shape[1])
    if group.scope == "self":
        return _own(graph, rows, group, name)
    shared = group.M_K.shape[0] == group.M_V.shape[0] == 1
    keys, values = (t if shared else t.expand(group.heads, -1, -1) for t in (group.M_K, group.M_V))
    query = graph.reshape(_projected(graph, rows, group.W_Q, group.b_Q), 1, -1, group.heads * group.W_Q.shape[2])
    out = _attention(graph, query, _flat(graph, keys), _flat(graph, values), group.heads, len(keys), name)
    return graph.reshape(out, -1, group.heads * group.M_V.shape[2])


def _own(graph: Graph, rows: str, group: Heads, name: str) -> str:
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


def _tokens(graph: Graph, Z: str, group: Heads, name: str) -> str:
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


def _mask(graph: Graph, Z: str, slots: int) -> str:
    """True where a token may look: at itself and earlier ones, and at every slot."""
    from onnx import helper

    count, one = graph.node("Shape", Z, start=1, end=2), helper.make_tensor("one", FLOATS[graph.dtype], [1], [1.0])
    square = graph.node("ConstantOfShape", graph.node("Concat", count, count, axis=0), value=one)
    seen = graph.node("Trilu", square, upper=0)
    beside = graph.node("ConstantOfShape", graph.node("Concat", count, graph.whole(slots), axis=0), value=one)
    return graph.node("Cast", graph.node("Concat", seen, beside, axis=1), to=9)  # onnx.TensorProto.BOOL


def transformer(graph: Graph, tokens: str, net: PlainTransformer) -> str:
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


def _block(graph: Graph, x: str, attention: nn.MultiheadAttention, causal: bool, name: str) -> str:
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
    graph: Graph, query: str, keys: str, values: str, count: int, shared: int, name: str, is_causal: int = 0,
    mask: str = "",
) -> str:  # fmt: skip
    given = [query, keys, values, *([mask] if mask else [])]
    return graph.node("Attention", *given, name=name, q_num_heads=count, kv_num_heads=shared, scale=1.0,
                      is_causal=is_causal)  # fmt: skip


def _projected(graph: Graph, x: str, W: Tensor, b: Tensor | None) -> str:
    """x W + b for all heads side by side."""
    wide = None if b is None else b.expand(W.shape[0], -1).reshape(-1)
    return graph.affine(x, W.transpose(0, 1).reshape(W.shape[1], -1), wide)


def _flat(graph: Graph, table: Tensor) -> str:
    """(head, slot, width) -> a constant (1, slot, head times width)."""
    return graph.number(table.transpose(0, 1).reshape(1, table.shape[1], -1))


Shape: TypeAlias = tuple[str | int, ...]  # a name for a free size, a number for a fixed one
MAX_BYTES = 1 << 31  # the largest file that protobuf can hold


def to_onnx(net: CertifiedModule, path: str | Path, *, verify: bool = True, force: bool = False) -> Artefact:
    """Write a network to an ONNX file (opset 23); the batch size is free, the number of tokens where it can be.

    The file takes what the network takes, with one batch dimension first. It is then read back by ONNX Runtime in a
    fresh process and compared with the network, unless `verify=False`. A file that is there already is refused unless
    `force=True`.

    >>> import attnforge as af, tempfile
    >>> net = af.compile("x**2", af.Box(x=(-1, 1)), eps=1e-3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = to_onnx(net, f"{folder}/square.onnx", verify=False)
    ...     y = run_onnx(file, torch.tensor([[0.5]]))
    >>> abs(float(y) - 0.25) < 2e-3
    True
    """
    network_of(net)
    target = free_file(path, ".onnx", force)
    with steps() as step:
        step("writing ONNX")
        require("onnx", "onnx")
        model = _written(net) or _traced(net)
        _describe(model, net)
        data = model.SerializeToString()
        if len(data) >= MAX_BYTES:
            raise ArgumentError(f"this network takes {len(data):,} bytes as ONNX; a file holds less than {MAX_BYTES:,}")
        write_whole(target, data)
        return Artefact("onnx", target).verified(net, verify)


def session(path: str | Path | Artefact, threads: int | None = None) -> onnxruntime.InferenceSession:
    """A file in ONNX Runtime on the processor, its graph left as it is: rewriting it could cost float64 accuracy."""
    require("onnxruntime", "onnx")
    source = Path(path)
    if not source.is_file():
        raise ArgumentError(f"there is no file '{source}'")
    try:
        return open_session(str(source), threads)
    except Exception as error:  # the runtime's exceptions share no base class of their own
        raise ArgumentError(f"ONNX Runtime cannot read '{source}': {str(error).splitlines()[0]}") from error


def run_onnx(source: str | Path | Artefact | onnxruntime.InferenceSession, *inputs: Tensor) -> Tensor:
    """The output of an ONNX file, or of an open session, for tensors with one batch dimension first."""
    opened = session(source) if isinstance(source, str | Path | Artefact) else source
    names = [entry.name for entry in opened.get_inputs()]
    if len(names) != len(inputs):
        raise ArgumentError(f"expected {len(names)} input tensor(s) ({', '.join(names)}), got {len(inputs)}")
    given = {name: x.detach().cpu().contiguous().numpy() for name, x in zip(names, inputs, strict=True)}
    return torch.from_numpy(opened.run(None, given)[0])


# -- written node by node -------------------------------------------------------------------------------------------


def _written(net: CertifiedModule) -> onnx.ModelProto | None:
    """The model of a compiled network or of one attention layer over tokens; None for anything else."""
    graph = Graph(net.dtype)
    if isinstance(net, CompiledProgram):
        return _program(graph, net)
    if isinstance(net, CompiledNetwork) and not any(g.causal and g.slots for g in net.network.groups()):
        return _compiled(graph, net)
    if isinstance(net, PlainTransformer):
        return _plain(graph, net)
    only = getattr(net, "layer", None) if isinstance(net, Ramp | MaxAffine) else None
    if isinstance(only, AttentionLayer) and len(net.box.shape) == 1:
        width = only.heads()[0].W_O.shape[-1]  # the layer is all of the core
        out = layer(graph, "x", only, "layer 0")
        return _model(graph, {"x": ("batch", "tokens", net.box.dim)}, out, ("batch", "tokens", width))
    return None


def _compiled(graph: Graph, net: CompiledNetwork) -> onnx.ModelProto:
    program = net.program
    if any_tokens(net):
        out = network(graph, "x", net.network)
        shape = net.boxes[0].shape
        return _model(graph, {"x": ("batch", "tokens", shape[1])}, out, ("batch", "tokens", program.output_shape[1]))
    names = _names(net, len(net.boxes))
    Z = graph.reshape(_side_by_side(graph, names, net.boxes), -1, program.tokens, program.ops[0].width)
    if net.constants is not None:
        beside = graph.expand(graph.number(net.constants.unsqueeze(0)), graph.batch_of(Z), *net.constants.shape)
        Z = graph.node("Concat", Z, beside, axis=-1)
    out = network(graph, Z, net.network)
    if program.output_rows != "all":
        out = graph.node("Slice", out, graph.whole(0), graph.whole(1), graph.whole(1))
    out = graph.reshape(out, -1, *program.output_shape)
    taken: dict[str, Shape] = {name: ("batch", *box.shape) for name, box in zip(names, net.boxes, strict=True)}
    return _model(graph, taken, out, ("batch", *program.output_shape))


def _program(graph: Graph, net: CompiledProgram) -> onnx.ModelProto:
    """A token program: ids in, logits out, for any number of positions up to the longest."""
    known = len(net.vocabulary)
    Z = graph.node("Gather", graph.number(token_rows(torch.arange(known + 1), known, net.dtype)), "ids", name="embed")
    if net.positions.shape[1]:
        count = graph.node("Shape", "ids", start=1, end=2)
        place = graph.node("Slice", graph.number(net.positions), graph.whole(0), count, graph.whole(0))
        shape = graph.node("Concat", graph.node("Shape", "ids"), graph.whole(net.positions.shape[1]), axis=0)
        Z = graph.node("Concat", Z, graph.node("Expand", place, shape), axis=-1, name="positions")
    out = network(graph, Z, net.network)
    width = 1 if net.outputs is None else len(net.outputs)
    return _model(graph, {"ids": ("batch", "tokens")}, out, ("batch", "tokens", width), whole=True)


def _plain(graph: Graph, net: PlainTransformer) -> onnx.ModelProto:
    spec = net.spec
    if spec.ids:
        rows = token_rows(torch.arange(len(spec.inputs)), len(spec.inputs) - 1, net.dtype)
        out = transformer(graph, graph.node("Gather", graph.number(rows), "ids", name="tokens"), net)
        return _model(graph, {"ids": ("batch", spec.tokens)}, out, ("batch", spec.tokens, spec.outputs), whole=True)
    if not spec.fixed:
        out = transformer(graph, "x", net)
        return _model(graph, {"x": ("batch", "tokens", len(spec.inputs))}, out, ("batch", "tokens", spec.outputs))
    names = _names(net, len(spec.boxes))
    x = _side_by_side(graph, names, spec.boxes)
    out = transformer(graph, graph.reshape(x, -1, spec.tokens, len(spec.inputs)), net)
    if spec.first_row:
        out = graph.node("Slice", out, graph.whole(0), graph.whole(1), graph.whole(1))
    shape = (spec.tokens, spec.outputs) if spec.output_shape is None else spec.output_shape
    taken: dict[str, Shape] = {name: ("batch", *box.shape) for name, box in zip(names, spec.boxes, strict=True)}
    return _model(graph, taken, graph.reshape(out, -1, *shape), ("batch", *shape))


def _side_by_side(graph: Graph, names: list[str], boxes: tuple[Box, ...]) -> str:
    """All inputs as one row of numbers for each point."""
    flat = [graph.reshape(name, -1, box.dim) for name, box in zip(names, boxes, strict=True)]
    return flat[0] if len(flat) == 1 else graph.node("Concat", *flat, axis=-1)


def any_tokens(net: CompiledNetwork) -> bool:
    """Whether the layers mean the same for any number of tokens: a sequence in, one out, no positions, no fixed mix."""
    program, shape = net.program, net.boxes[0].shape
    return (
        len(net.boxes) == 1
        and net.constants is None
        and program.output_rows == "all"
        and len(shape) == len(program.output_shape) == 2
        and shape == (program.tokens, program.ops[0].width)
        and program.output_shape[0] == program.tokens
        and not program.count(Mix)
    )


def _names(net: CertifiedModule, count: int) -> list[str]:
    if net.box.names and len(net.box.names) == count > 1:
        return list(net.box.names)
    return ["x"] if count == 1 else [f"x{i}" for i in range(count)]


def _model(graph: Graph, inputs: dict[str, Shape], out: str, shape: Shape, whole: bool = False) -> onnx.ModelProto:
    """The model of a graph; its inputs are numbers of its dtype, or `whole` ones."""
    from onnx import TensorProto, checker, helper

    kind = FLOATS[graph.dtype]
    given = int(TensorProto.INT64) if whole else kind
    graph.nodes.append(helper.make_node("Identity", [out], ["output"], name="output"))
    body = helper.make_graph(
        graph.nodes,
        "attnforge",
        [helper.make_tensor_value_info(name, given, size) for name, size in inputs.items()],
        [helper.make_tensor_value_info("output", kind, shape)],
        list(graph.constants.values()),
    )
    opsets = [helper.make_opsetid("", OPSET)]
    version = helper.find_min_ir_version_for(opsets)
    model = helper.make_model(body, opset_imports=opsets, producer_name="attnforge", ir_version=version)
    checker.check_model(model)
    return model


# -- traced ---------------------------------------------------------------------------------------------------------


class _Core(nn.Module):
    """The core of a network as a module of its own: what is exported."""

    def __init__(self, net: CertifiedModule):
        super().__init__()
        self.net = net

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.net.core(*inputs)


def _traced(net: CertifiedModule) -> onnx.ModelProto:
    """The model that torch.onnx makes of a core."""
    require("onnxscript", "onnx")
    from torch.export import Dim

    where = domain(net)
    examples = where.split(where.sample(3))
    names = _names(net, len(examples))
    free = [{0: Dim.DYNAMIC} for _ in examples]
    if isinstance(net, Construction) and net.form == "tokens" and examples[0].dim() == 3:
        free[0][1] = Dim.AUTO  # fixed by the exporter itself where the graph depends on it
    core = _Core(net)
    with quiet_evaluation(core), torch.no_grad():
        program = torch.onnx.export(
            core, examples, dynamo=True, opset_version=OPSET, dynamic_shapes=(tuple(free),), input_names=names,
            output_names=["output"], verbose=False,
        )  # fmt: skip
    assert program is not None
    model: onnx.ModelProto = program.model_proto
    _name_axes(model)
    return model


def _name_axes(model: onnx.ModelProto) -> None:
    """The free axes under the names that readers know, batch and tokens, in place of the tracer's symbols."""
    symbols = [d.dim_param for entry in model.graph.input for d in entry.type.tensor_type.shape.dim if d.dim_param]
    known = dict(zip(dict.fromkeys(symbols), ("batch", "tokens"), strict=False))
    for entry in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for size in entry.type.tensor_type.shape.dim:
            size.dim_param = known.get(size.dim_param, size.dim_param) if size.dim_param else size.dim_param


def _describe(model: onnx.ModelProto, net: CertifiedModule) -> None:
    """What the network is for, in the file's own metadata."""
    certificate = net.certificate
    about: dict[str, Any] = {
        "target": certificate.target,
        "box": certificate.box.to_json(),
        "kind": certificate.kind,
        "bound": certificate.bound,
        "dtype": certificate.dtype,
    }
    entry = model.metadata_props.add()
    entry.key, entry.value = "attnforge", json.dumps(about, sort_keys=True)
    model.doc_string = f"{certificate.target} on {certificate.box!r}, by attention alone"
