"""Networks as ONNX files, and how to run those without losing accuracy.

Compiled networks, plain transformers and layers of heads are written node by node (`graph`); everything else goes
through `torch.onnx`. What is written is the core: attention and affine maps. The checks of the input stay behind: an
ONNX file neither warns about nor refuses points outside the box.

Float64 works. ONNX Runtime may replace parts of a graph by fused kernels, some of which compute in less than float64
(errors near 2e-8 have been seen; version 1.31 leaves the graphs written here alone), so `session` switches rewriting
off. Do the same in other programs:
`options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..box import Box
from ..census.graph import quiet_evaluation
from ..certificates.certified import CertifiedModule
from ..compiler.compiled import CompiledNetwork
from ..errors import ArgumentError
from ..extras import require
from ..network import AttentionLayer
from ..programs.ops import Mix
from ..rasp.network.compiled import CompiledProgram, token_rows
from ..saving import free_file, write_whole
from ..theorems.partition import MaxAffine
from ..theorems.ramps import Ramp
from ..theorems.result import Construction
from .fresh import open_session
from .graph import OnnxGraph, Shape, layer, network, transformer
from .plain.transformer import PlainTransformer
from .verification import Artefact, domain
from .writing import network_of, steps

if TYPE_CHECKING:
    import onnx
    import onnxruntime

OPSET = 23  # the first with the operator Attention
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
    graph = OnnxGraph(net.dtype)
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


def _compiled(graph: OnnxGraph, net: CompiledNetwork) -> onnx.ModelProto:
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


def _program(graph: OnnxGraph, net: CompiledProgram) -> onnx.ModelProto:
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


def _plain(graph: OnnxGraph, net: PlainTransformer) -> onnx.ModelProto:
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


def _side_by_side(graph: OnnxGraph, names: list[str], boxes: tuple[Box, ...]) -> str:
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


def _model(graph: OnnxGraph, inputs: dict[str, Shape], out: str, shape: Shape, whole: bool = False) -> onnx.ModelProto:
    """The model of a graph; its inputs are numbers of its dtype, or `whole` ones."""
    from onnx import TensorProto, helper

    graph.nodes.append(helper.make_node("Identity", [out], ["output"], name="output"))
    return graph.model(inputs, "output", shape, OPSET, int(TensorProto.INT64) if whole else 0)


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
    certificate, written = net.certificate, net.written_out()
    about: dict[str, Any] = {
        "target": certificate.target,
        "box": certificate.box.to_json(),
        "kind": "not certified" if written is None else written.kind,
        "bound": None if written is None else written.bound,
        "dtype": certificate.dtype,
    }
    entry = model.metadata_props.add()
    entry.key, entry.value = "attnforge", json.dumps(about, sort_keys=True)
    model.doc_string = f"{certificate.target} on {certificate.box!r}, by attention alone"
