"""From a function or module to a graph of operators: torch.export, or a trace where gradients are taken inside.

With it, how a target takes its input, its values in float64, whatever the dtype of its parameters and constants, and
whether a program and its target agree.
"""

from __future__ import annotations

import copy
import functools
import inspect
import io
import math
import operator
import traceback
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ...box import Box
from ...census.graph import SourceLines, TracedGraph, evaluate, is_foreign, shown_place
from ...census.graph import capture as export_graph
from ...errors import ArgumentError, DomainError, PurityError, UnsupportedOperation
from ...programs.interpret import every_value, values
from ...programs.program import Program
from .constants import promoted
from .pieces import join_pieces
from .walk import Places, ancestors

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node


@dataclass(frozen=True)
class Captured:
    """A graph, the constants of its placeholders by name, the names of its inputs in order, and its one output."""

    module: GraphModule
    constants: dict[str, Tensor]
    inputs: tuple[str, ...]
    output: Node
    stored: tuple[Node, ...]
    """Nodes whose results the target keeps for its next call."""
    places: Places

    def run(self, points: tuple[Tensor, ...]) -> Tensor:
        """What the graph gives at points; constants are float64."""
        from torch.fx import Interpreter

        given = iter(points)
        names = (node.name for node in self.module.graph.nodes if node.op == "placeholder")
        inputs = [self.constants[name] if name in self.constants else next(given) for name in names]
        found: dict[str, Tensor] = {}

        class Watched(Interpreter):
            def run_node(self, n: Node) -> Any:
                found[n.name] = result = super().run_node(n)
                return result

        Watched(self.module).run(*inputs)
        return found[self.output.name]


class CaptureError(Exception):
    """The target could not be captured with this example; `error` is what the user should be told."""

    def __init__(self, error: Exception):
        super().__init__(str(error))
        self.error = error


class FunctionModule(nn.Module):
    """A function as a module, together with the modules that it uses."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function
        self.used = nn.ModuleDict(_used_modules(function))

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


def _used_modules(function: Callable[..., Any]) -> dict[str, nn.Module]:
    """Modules that a function closes over, by name: they must be in evaluation mode, too."""
    plain: Any = function
    found: dict[str, Any] = {}
    while isinstance(plain, functools.partial):
        found |= {f"argument{i}": value for i, value in enumerate(plain.args)} | plain.keywords
        plain = plain.func
    found["self"] = owner = getattr(plain, "__self__", None)
    found |= {} if isinstance(owner, nn.Module) else getattr(owner, "__dict__", {})
    try:
        names = inspect.getclosurevars(inspect.unwrap(getattr(plain, "__func__", plain)))
        found |= {**names.globals, **names.nonlocals}
    except TypeError:  # a callable object or a builtin closes over nothing
        found |= getattr(plain, "__dict__", {})
    return {name: module for name, module in found.items() if isinstance(module, nn.Module)}


def describe(target: object) -> str:
    """How the target is called in messages and in its program."""
    if isinstance(target, FunctionModule):
        target = target.function
    if isinstance(target, nn.Module):
        return type(target).__name__
    while isinstance(target, functools.partial):
        target = target.func
    return str(getattr(target, "__name__", type(target).__name__))


def warn_of_training(net: nn.Module) -> None:
    """Say that a module is in training mode, where that changes what it computes."""
    differing = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm, nn.RNNBase)
    kinds = {type(m).__name__ for m in net.modules() if m.training and isinstance(m, differing)
             and not (isinstance(m, nn.RNNBase) and not m.dropout)}  # fmt: skip
    if kinds:
        warnings.warn(
            f"the module is in training mode, where {', '.join(sorted(kinds))} differs; what is captured is its "
            "evaluation mode: call module.eval() first",
            UserWarning,
            stacklevel=2,
        )


@contextmanager
def evaluation(net: nn.Module) -> Iterator[None]:
    """Evaluation mode and plain attention layers; everything restored afterwards.

    The epsilon of an RMSNorm that names none is that of its own dtype, not of the float64 that it is captured in.
    """
    flags = [(module, module.training) for module in net.modules()]
    small = [module for module in net.modules() if isinstance(module, nn.RMSNorm) and module.eps is None]
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        evaluate(net)
        for norm in small:
            dtype = torch.get_default_dtype() if norm.weight is None else norm.weight.dtype
            norm.eps = torch.finfo(dtype).eps
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for module, training in flags:
            module.training = training
        for norm in small:
            norm.eps = None


@contextmanager
def _transforms_restored() -> Iterator[None]:
    """Ends transforms such as torch.func.grad that a failed export has entered and not left."""
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        if forward_ad._current_level < 0:
            with suppress(RuntimeError):  # raised where no level was entered
                torch._C._exit_dual_level(level=0)


def exported(net: nn.Module, examples: tuple[Tensor, ...]) -> Captured:
    """The graph by torch.export, composites such as attention and layer norm in one piece."""
    _refuse_learning(net, examples)
    try:
        # torch prints the graph it had when something goes wrong.
        with redirect_stderr(io.StringIO()), _transforms_restored(), unchanged(net):
            trace = export_graph(net, examples)
    except PurityError as error:
        cause = error.__cause__
        raise CaptureError(_explained(net, cause if isinstance(cause, Exception) else error)) from error
    program = trace.program
    signature = program.graph_signature
    constants: dict[str, Tensor] = {}
    for spec in signature.input_specs:
        if spec.kind.name != "USER_INPUT" and spec.target is not None:
            store = program.state_dict if spec.target in program.state_dict else program.constants
            constants[spec.arg.name] = _real(store[spec.target])
    join_pieces(program.graph_module, constants)
    names = {node.name: node for node in program.graph.nodes}
    results = [spec for spec in signature.output_specs if spec.kind.name == "USER_OUTPUT"]
    kept = [spec for spec in signature.output_specs if spec.kind.name.endswith("MUTATION")]
    if len(results) != 1 or program.call_spec.out_spec is None or not program.call_spec.out_spec.is_leaf():
        raise ArgumentError(_outputs(net, len(results)))
    for node in program.graph.nodes:
        if node.op == "call_function" and not _is_operator(node.target):
            raise CaptureError(RuntimeError(f"{node.target} was captured, which is no operator"))
    return Captured(
        program.graph_module,
        constants,
        tuple(spec.arg.name for spec in signature.input_specs if spec.kind.name == "USER_INPUT"),
        _output(net, names.get(getattr(results[0].arg, "name", ""))),
        tuple(names[spec.arg.name] for spec in kept),
        _places(trace),
    )


def _refuse_learning(net: nn.Module, examples: tuple[Tensor, ...]) -> None:
    """Refuse a target that changes its own parameters when it is called (by .data, which no graph shows)."""
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    with unchanged(net), torch.no_grad(), suppress(Exception):  # what it raises is told by whoever captures it
        net(*examples)
    for name, parameter in net.named_parameters():
        if not torch.equal(parameter.nan_to_num(), before[name].nan_to_num()):
            parameter.data.copy_(before[name])
            raise ArgumentError(
                f"{describe(net)} changes its parameter {name.removeprefix('used.')!r} when it is called: "
                "the target must give the same numbers every time"
            )


def _places(trace: TracedGraph) -> Places:
    own = "/".join(Path(__file__).parts[-3:])  # the frame that calls a function of the user

    def source(node: Node) -> str:
        place = trace.source(node)
        return "" if f"{own}:" in place else place  # a builtin function has no line of its own

    return Places(source, lambda node: trace.module(node).removeprefix("used").removeprefix("."))


def _is_operator(target: object) -> bool:
    return isinstance(target, (OpOverload, torch._ops.HigherOrderOperator)) or target is operator.getitem


def _real(tensor: Tensor) -> Tensor:
    """A constant of the exported graph; gradients taken inside the target leave some without a value."""
    from torch._subclasses.fake_tensor import FakeTensor

    if not isinstance(tensor, Tensor):
        raise CaptureError(UnsupportedOperation(f"the target uses a {type(tensor).__name__}, which is no tensor"))
    try:
        plain: Tensor = promoted(tensor)
        plain.data_ptr()
    except (RuntimeError, NotImplementedError) as error:
        raise CaptureError(error) from error
    if isinstance(plain, FakeTensor):
        raise CaptureError(RuntimeError("a constant of the exported graph has no value"))
    return plain


#: How the numbers of a tensor leave torch, where a tracer does not see what becomes of them.
LEAVING = {
    getattr(Tensor, name)
    for name in ("__array__", "__dlpack__", "data_ptr", "numpy", "storage", "tolist", "untyped_storage")
}


class _Followed(TorchFunctionMode):
    """Data of the target stays with torch while it is traced: what Python does with numbers is in no graph."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in LEAVING and _depends_on_data(args[0]):
            raise UnsupportedOperation(
                f"{func.__name__} takes numbers that depend on data out of torch; "
                "write it with functions of torch alone"
            )
        return func(*args, **kwargs or {})


def _depends_on_data(tensor: Tensor) -> bool:
    """Whether a tensor of a trace comes from an input."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode = get_proxy_mode()
    found = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    nodes = ancestors([found.proxy.node]) if found is not None else ()
    return any(node.op == "placeholder" for node in nodes)


def traced(net: nn.Module, examples: tuple[Tensor, ...]) -> Captured:
    """The graph by running the target once: gradients taken inside of it are in the graph as what they compute."""
    from torch.fx import Interpreter
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        with fx_traceback.preserve_node_meta():
            with SourceLines(), _Followed(), unchanged(net):
                raw = make_fx(lambda *tensors: net(*tensors), tracing_mode="real")(*examples)
            # Once more, without operators that write into tensors.
            pure = torch.func.functionalize(lambda *tensors: Interpreter(raw).run(*tensors))
            graph = make_fx(pure, tracing_mode="real")(*(e.detach() for e in examples))
    except Exception as error:  # whatever the target raises
        raise CaptureError(_explained(net, error)) from error
    output = graph.graph.output_node().args[0]
    names = tuple(node.name for node in graph.graph.nodes if node.op == "placeholder")
    trace = TracedGraph(None, {})  # type: ignore[arg-type]
    return Captured(graph, {}, names, _output(net, output), (), _places(trace))


def _output(net: nn.Module, node: Any) -> Node:
    from torch.fx import Node

    if not isinstance(node, Node):
        raise ArgumentError(_outputs(net, len(node) if isinstance(node, (list, tuple)) else 0))
    return node


def _outputs(net: nn.Module, count: int) -> str:
    what = f"{count} tensors" if count > 1 else "no tensor"
    return f"{describe(net)} must return one tensor that depends on its input, but returns {what}; choose one of them"


def _explained(net: nn.Module, error: Exception) -> Exception:
    """The error for the user, with the line of the target where it arose."""
    frames = [(f.filename, f.lineno or 0, f.line or "") for f in traceback.extract_tb(error.__traceback__)]
    own = [frame for frame in frames if not is_foreign(frame[0]) and frame[0] != __file__]
    place = f"\n      {shown_place(own)}" if own else ""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, UnsupportedOperation):
        return UnsupportedOperation(f"{describe(net)} cannot be followed: {text}{place}")
    kinds = " ".join(base.__name__ for base in type(error).__mro__)
    hints = ("data-dependent", "unbacked", "value out of a tracing tensor")
    if "DataDependent" in kinds or "HigherOrderOp" in kinds or any(hint in str(error).lower() for hint in hints):
        return UnsupportedOperation(
            f"the control flow of {describe(net)}, or a shape in it, depends on data{place}\n"
            "networks of attention heads do the same operations for every input; use torch.where with a constant mask"
        )
    if text.startswith("Guard failed"):  # of a module made by torch.export
        place += "\nit was exported for one size of batch: give torch.export.export dynamic_shapes=({0: "
        place += "torch.export.Dim('batch')},)"
    return ArgumentError(f"{describe(net)} cannot be run on points of the box: {type(error).__name__}: {text}{place}")


class _Calls(TorchFunctionMode):
    """Every function of torch is called with float64 in place of any other floating dtype: some compare dtypes."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*_wide(args), **_wide(kwargs or {}))


class _Operators(TorchDispatchMode):
    """Every operator sees and gives float64, also those that torch's functions are made of."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _wide(func(*_wide(args), **_wide(kwargs or {})))


def _wide(tree: Any) -> Any:
    def widen(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64:
            return leaf.double()
        return torch.float64 if isinstance(leaf, torch.dtype) and leaf.is_floating_point else leaf

    return tree_map(widen, tree)


def double(net: nn.Module, points: tuple[Tensor, ...]) -> Tensor:
    """What a module gives at points, computed in float64."""
    device = next((p.device for p in net.parameters()), torch.device("cpu"))
    try:
        with unchanged(net), _Operators(), _Calls():
            out: Tensor = net(*(p.to(device) for p in points))
    except Exception as error:  # whatever the target raises
        raise CaptureError(_explained(net, error)) from error
    return out.detach().cpu().double()


@contextmanager
def unchanged(net: nn.Module) -> Iterator[None]:
    """What a module keeps in attributes while it runs is forgotten: every call finds what the first one found."""
    kept = [(module, {name: _copied(value) for name, value in vars(module).items()}) for module in net.modules()]
    try:
        yield
    finally:
        for module, attributes in kept:
            vars(module).clear()
            vars(module).update(attributes)


def _copied(value: Any) -> Any:
    """A container with the same contents; anything else is itself."""
    return copy.copy(value) if type(value) in (dict, list, set, OrderedDict, deque) else value


#: Points of the example batch: two show whether points are mixed.
BATCH = 2
#: Points at which program and target are compared afterwards; another number than BATCH, so that its use is noticed.
CHECKED = 64


@dataclass(frozen=True)
class Convention:
    """How the target takes its input: a batch of points, or one point at a time."""

    net: nn.Module
    boxes: tuple[Box, ...]
    batch: int | None
    unproved: set[str]
    """Operators that made constants of the target, and of which nothing says how they round; filled while reading."""

    @property
    def own(self) -> torch.dtype:
        """The dtype of the target's parameters: the one that it is made for."""
        found = next((p.dtype for p in self.net.parameters() if p.is_floating_point()), torch.get_default_dtype())
        return found

    def examples(self, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
        device = next((p.device for p in self.net.parameters()), torch.device("cpu"))
        points = [box.sample(self.batch or 1, seed=seed + i, dtype=dtype) for i, box in enumerate(self.boxes)]
        return tuple((p if self.batch else p[0]).to(device) for p in points)

    def truth(self, points: tuple[Tensor, ...]) -> Tensor:
        """What the target gives at points with one batch dimension, computed in float64."""
        if self.batch is None:
            return torch.stack([double(self.net, tuple(p[i] for p in points)) for i in range(len(points[0]))])
        return double(self.net, points)


def join(program: Program, *tensors: Tensor) -> Tensor:
    """The tensors of a function of several arguments, batch dimension first, as the one input of its program."""
    if len(tensors) == 1:
        return tensors[0]
    joined = torch.cat([t.reshape(len(t), -1) for t in tensors], -1)
    return joined.reshape(-1, *program.box.shape)


def probes(box: Box) -> Tensor:
    """Points where functions like to have no value: lower and upper corner, the centre, 0 wherever it is allowed."""
    middle = 0.5 * (box.lower + box.upper)
    origin = torch.where((box.lower <= 0) & (box.upper >= 0), torch.zeros_like(middle), middle)
    return torch.stack([box.lower, box.upper, middle, origin])


def no_value(reading: Convention, points: tuple[Tensor, ...], truth: Tensor) -> DomainError | None:
    """An error that names a point at which the target gives NaN or infinity, if it does at one of these."""
    if len(truth) != len(points[0]):
        return None
    bad = ~torch.isfinite(truth.reshape(len(truth), -1)).all(1)
    if not bad.any():
        return None
    here = int(bad.int().argmax())
    number = truth[here].reshape(-1)
    value = float(number[~torch.isfinite(number)][0])
    where = point_text(tuple(p[here] for p in points))
    return DomainError(
        f"{describe(reading.net)} has no value at {where}: it gives {value}; choose a box on which it is defined"
    )


def point_text(point: tuple[Tensor, ...]) -> str:
    """The entries of a point, the first few of a large one."""
    flat = torch.cat([p.reshape(-1) for p in point]).tolist()
    return f"({', '.join(f'{x:.6g}' for x in flat[:8])}{', ...' if len(flat) > 8 else ''})"


def difference(program: Program, reading: Convention) -> Exception | None:
    """What the program and the target disagree about, at random points of the box; None when they agree."""
    special = tuple(probes(box) for box in reading.boxes)
    undefined = no_value(reading, special, reading.truth(special))
    if undefined is not None:
        return undefined
    for count in (CHECKED, BATCH):
        points = tuple(box.sample(count, seed=100 + i) for i, box in enumerate(reading.boxes))
        joined = join(program, *points)
        truth, found = reading.truth(points), values(program, joined)
        undefined = no_value(reading, points, truth)
        if undefined is not None:
            return undefined
        if truth.shape == found.shape:
            inner = max(_size(v) for v in every_value(program, joined))
            slack = 1e-9 * _size(truth) + 1e-13 * inner
            gap = _size(torch.nan_to_num(truth) - torch.nan_to_num(found))
            if gap <= slack:
                if count == CHECKED:
                    return None
                return ArgumentError(
                    f"what {describe(reading.net)} does to a point depends on how many points are in the batch"
                )
        else:
            gap = math.inf
        if not torch.equal(torch.nan_to_num(reading.truth(points)), torch.nan_to_num(truth)):
            return ArgumentError(f"{describe(reading.net)} gives other numbers when it is called again")
    return AssertionError(
        f"the program of {describe(reading.net)} differs from it by {gap:.3g}: this is a mistake in attnforge"
    )


def unfaithful(captured: Captured, reading: Convention) -> Exception | None:
    """An error if even the captured graph does not do what the target does: something happens outside of torch."""
    points = reading.examples(torch.float64, seed=200)
    try:
        with _Operators(), _Calls():
            found = captured.run(points)
    except RuntimeError:  # the graph insists on another dtype
        return None
    truth = double(reading.net, points)
    if found.shape == truth.shape and _size(found.double() - truth) <= 1e-9 * _size(truth):
        return None
    return ArgumentError(
        f"{describe(reading.net)} computes with numbers that torch does not see (numpy, .data, a cache, a file): "
        "write it with functions of torch alone"
    )


def _size(x: Tensor) -> float:
    finite = x[torch.isfinite(x)].abs()
    return float(finite.max()) if finite.numel() else 0.0
