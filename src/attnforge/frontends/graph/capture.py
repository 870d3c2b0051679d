"""From a function or module to a graph of operators: torch.export, or a trace where gradients are taken inside."""

from __future__ import annotations

import functools
import inspect
import io
import operator
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd import forward_ad

from ...errors import ArgumentError, PurityError, UnsupportedOperation
from ...purity.trace import Trace, _foreign, _place, _Places
from ...purity.trace import capture as export_graph
from .walk import Places, promoted

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


@contextmanager
def evaluation(net: nn.Module) -> Iterator[None]:
    """Evaluation mode and plain attention layers; everything restored afterwards."""
    flags = [(module, module.training) for module in net.modules()]
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        net.eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for module, training in flags:
            module.training = training


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
    try:
        # torch prints the graph it had when something goes wrong.
        with redirect_stderr(io.StringIO()), _transforms_restored():
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


def _places(trace: Trace) -> Places:
    def source(node: Node) -> str:
        place = trace.source(node)
        return "" if "frontends/graph/capture.py:" in place else place  # a builtin function has no line of its own

    return Places(source, lambda node: trace.module(node).removeprefix("used").removeprefix("."))


def _is_operator(target: object) -> bool:
    return isinstance(target, (OpOverload, torch._ops.HigherOrderOperator)) or target is operator.getitem


def _real(tensor: Tensor) -> Tensor:
    """A constant of the exported graph; gradients taken inside the target leave some without a value."""
    from torch._subclasses.fake_tensor import FakeTensor

    try:
        plain: Tensor = promoted(tensor)
        plain.data_ptr()
    except (RuntimeError, NotImplementedError) as error:
        raise CaptureError(error) from error
    if isinstance(plain, FakeTensor):
        raise CaptureError(RuntimeError("a constant of the exported graph has no value"))
    return plain


def traced(net: nn.Module, examples: tuple[Tensor, ...]) -> Captured:
    """The graph by running the target once: gradients taken inside of it are in the graph as what they compute."""
    from torch.fx import Interpreter
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        with fx_traceback.preserve_node_meta():
            with _Places():
                raw = make_fx(lambda *tensors: net(*tensors), tracing_mode="real")(*examples)
            # Once more, without operators that write into tensors.
            pure = torch.func.functionalize(lambda *tensors: Interpreter(raw).run(*tensors))
            graph = make_fx(pure, tracing_mode="real")(*(e.detach() for e in examples))
    except Exception as error:  # whatever the target raises
        raise CaptureError(_explained(net, error)) from error
    output = graph.graph.output_node().args[0]
    names = tuple(node.name for node in graph.graph.nodes if node.op == "placeholder")
    trace = Trace(None, {})  # type: ignore[arg-type]
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
    own = [frame for frame in frames if not _foreign(frame[0]) and frame[0] != __file__]
    place = f"\n      {_place(own)}" if own else ""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    kinds = " ".join(base.__name__ for base in type(error).__mro__)
    hints = ("data-dependent", "unbacked", "value out of a tracing tensor")
    if "DataDependent" in kinds or "HigherOrderOp" in kinds or any(hint in str(error).lower() for hint in hints):
        return UnsupportedOperation(
            f"the control flow of {describe(net)}, or a shape in it, depends on data{place}\n"
            "networks of attention heads do the same operations for every input; use torch.where with a constant mask"
        )
    return ArgumentError(f"{describe(net)} cannot be run on points of the box: {type(error).__name__}: {text}{place}")
