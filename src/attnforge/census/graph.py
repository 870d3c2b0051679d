"""From a module to a flat, functional graph of operators, each with the source line that called it; and small questions
about a node of the graph: its operator, its arguments by name, its shape and dtype."""

from __future__ import annotations

import linecache
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from ..errors import ArgumentError, PurityError

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)[^\n]*(?:\n(?P<code>(?!\s*File ")[^\n]*))?')
_GENERATED = "<eval_with_key>"
_PLACE = "attnforge_place"
_annotate = getattr(fx_traceback, "annotate", None)  # older releases of torch lack it: then only `forward` has lines
_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIBRARY = str(Path(traceback.__file__).parent) + os.sep


def operator_name(node: Node) -> str:
    """`relu` for aten's relu, `namespace::name` for an operator of another library."""
    target = node.target
    if isinstance(target, OpOverload):
        return target._schema.name.removeprefix("aten::")
    return str(getattr(target, "__name__", target))


def named(node: Node) -> dict[str, Any]:
    """The arguments that were given, by the names of the operator's schema."""
    if not isinstance(node.target, OpOverload):
        return {str(position): value for position, value in enumerate(node.args)} | dict(node.kwargs)
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def leaves(argument: object) -> Iterator[Node]:
    """The nodes in an argument, however deeply nested."""
    if isinstance(argument, Node):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from leaves(item)
    elif isinstance(argument, dict):
        yield from leaves(list(argument.values()))


def tensor(node: Node) -> Tensor | None:
    """The fake tensor that stands for the node's value, None for a tuple or a number."""
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def shape(node: Node) -> tuple[int, ...]:
    value = tensor(node)
    assert value is not None, f"{node} is not a tensor"
    return tuple(int(size) for size in value.shape)


def is_number(node: Node) -> bool:
    """A size or another scalar, as opposed to a tensor."""
    kinds = (bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat)
    return isinstance(node.meta.get("val"), kinds)


def is_integral(node: Node) -> bool:
    """A tensor of integers or truth values."""
    value = tensor(node)
    return value is not None and not (value.dtype.is_floating_point or value.dtype.is_complex)


@dataclass(frozen=True)
class TracedGraph:
    """The exported program of a network, and where each of its nodes was written."""

    program: ExportedProgram
    hidden: Mapping[str, Node]
    """The nodes of regions such as `torch.no_grad()`, by name: flattening takes their places from them."""

    def source(self, node: Node) -> str:
        """`file:line  code` of the innermost frame outside torch, or inside it where there is no other."""
        frames = _frames(str(node.meta.get("stack_trace") or ""))
        if frames and frames[-1][0].startswith(_GENERATED):
            name = frames[-1][2].split("=")[0].split(":")[0].strip()
            return self.source(self.hidden[name]) if name in self.hidden else ""
        file, line = node.meta.get("custom", {}).get(_PLACE) or ("", 0)
        return shown_place([(file, line, linecache.getline(file, line).strip())] if file else frames)

    def module(self, node: Node) -> str:
        """The dotted path of the innermost submodule that the node belongs to."""
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        path = stack[-1][0] if stack else ""
        return str(path).removeprefix("L['self'].").replace("slice(None, None, None)", "")


def capture(net: nn.Module, example: object = None) -> TracedGraph:
    """Export `net` in evaluation mode, without changing it, and make the graph functional.

    Functional means that no operator writes into a tensor: what `x.relu_()` or `y[0] = x` do is in the graph as a
    value, so dependence on the input can be followed along the edges alone.
    """
    args, kwargs = _arguments(net, example)
    try:
        with quiet_evaluation(net):
            try:
                program = _exported(net, args, kwargs)
            except RuntimeError as error:
                if "cache_utils" not in str(error):
                    raise
                with _without_cache(net):
                    program = _exported(net, args, kwargs)
            flat = program.run_decompositions({})
    except Exception as error:  # export wraps whatever the module raises in errors of many families
        raise _export_error(net, error) from error
    hidden = {
        node.name: node
        for graph in program.graph_module.modules()
        if graph is not program.graph_module
        for node in _nodes(graph)
    }
    return TracedGraph(flat, hidden)


def _exported(net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    from torch.export import export  # takes a while to load, and only this function needs it

    with fx_traceback.preserve_node_meta(), SourceLines() if _annotate else nullcontext():
        return export(net, args, kwargs, strict=False)


@contextmanager
def _without_cache(net: nn.Module) -> Iterator[None]:
    """Decoders of Hugging Face return the keys and values they keep for the next token in an object that export cannot
    read. They are results of operations that are in the graph anyway: the object is not asked for."""
    found: dict[int, Any] = {id(c): c for m in net.modules() if (c := getattr(m, "config", None)) is not None}
    kept = [c for c in found.values() if getattr(c, "use_cache", None) is True]
    configs = [c for c in kept if type(c).__module__.startswith("transformers.")]
    try:
        for config in configs:
            config.use_cache = False
        yield
    finally:
        for config in configs:
            config.use_cache = True


class SourceLines(TorchFunctionMode):
    """Notes on every node the line of the user's code that called for it, in helper functions too.

    Export's own stack traces hold the frames of functions called `forward` and no others.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert _annotate is not None
        with _annotate({_PLACE: _calling_line()}):
            return func(*args, **(kwargs or {}))


def _calling_line() -> tuple[str, int] | None:
    """The innermost line outside torch, on the way up to this module's call of export."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != __file__:
        if not is_foreign(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def _nodes(graph: nn.Module) -> Iterator[Node]:
    from torch.fx import GraphModule

    if isinstance(graph, GraphModule):
        yield from graph.graph.nodes


def _arguments(net: nn.Module, example: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if example is None:
        own = getattr(net, "example_input", None)
        if not callable(own):
            raise ArgumentError(
                f"{type(net).__name__} has no method example_input(), so an example of its input is needed: "
                "pass example= (a tensor, a tuple of positional or a dict of keyword arguments)"
            )
        example = own()
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    if isinstance(example, dict):
        return (), dict(example)
    raise ArgumentError(
        f"example must be a tensor, a tuple of positional or a dict of keyword arguments: got {type(example).__name__}"
    )


def evaluate(net: nn.Module) -> None:
    """Put a module in evaluation mode; those that torch.export makes know no modes, and have none to be put in."""
    try:
        net.eval()
    except NotImplementedError:
        for module in net.modules():
            module.training = False


@contextmanager
def quiet_evaluation(net: nn.Module) -> Iterator[None]:
    """Evaluation mode, no fused layers that hide their operations, no chatter; everything restored afterwards."""
    flags = [(module, module.training) for module in net.modules()]
    fused = torch.backends.mha.get_fastpath_enabled()
    silenced = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            logging.disable(logging.CRITICAL)  # torch logs pages on a failed export; our error says what matters
            evaluate(net)
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
            logging.disable(silenced)
            for module, training in flags:
                module.training = training


def _export_error(net: nn.Module, error: Exception) -> PurityError:
    frames = [(f.filename, f.lineno or 0, f.line or "") for f in traceback.extract_tb(error.__traceback__)]
    own = [frame for frame in frames if not is_foreign(frame[0])]
    place = f"\n  {shown_place(own)}" if own else ""
    text = str(error).strip() or type(error).__name__
    kinds = " ".join(base.__name__ for base in type(error).__mro__)
    if "DataDependent" in kinds or "data-dependent" in text.lower() or "unbacked" in text.lower():
        return PurityError(
            f"{type(net).__name__} is not attention-only: its control flow, or a shape, depends on data{place}\n"
            f"  {text.splitlines()[0]}\nattention-only networks do the same operations for every input"
        )
    return PurityError(
        f"{type(net).__name__} cannot be exported, so its operations cannot be listed{place}\n"
        f"  {type(error).__name__}: {text.splitlines()[0]}\n"
        "pass an example that the network accepts with example=; if it accepts this one, it does something that "
        "torch.export cannot follow, such as a detour over NumPy"
    )


def _frames(trace: str) -> list[tuple[str, int, str]]:
    return [(m["file"], int(m["line"]), (m["code"] or "").strip()) for m in _FRAME.finditer(trace)]


def is_foreign(file: str) -> bool:
    """A frame that says nothing about the user's network: torch, the standard library, this package's own tracer."""
    return file.startswith((_TORCH, _LIBRARY, "<")) or file == __file__


def shown_place(frames: list[tuple[str, int, str]]) -> str:
    if not frames:
        return ""
    file, line, code = next((frame for frame in reversed(frames) if not is_foreign(frame[0])), frames[-1])
    return f"{_short(file)}:{line}  {code}".rstrip()


def _short(file: str) -> str:
    """The path below the import root or the working directory that holds the file, else the bare file name."""
    path = Path(file)
    if "site-packages" in path.parts:
        return "/".join(path.parts[path.parts.index("site-packages") + 1 :])
    for root in (Path.cwd(), *map(Path, filter(None, sys.path))):
        if path.is_relative_to(root) and root != Path(root.anchor):
            return path.relative_to(root).as_posix()
    return path.name
