"""What a target asks of where it is called: whether gradients are recorded, whether it is being compiled.

A program is one function for every call. A target whose code asks such things is read once more where the answers are
others, and refused where that gives another program. Code of torch itself may ask: its answers round differently, at
most. Settings of the whole process (the default dtype, autocast, deterministic algorithms) are what they are.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...programs.program import Program
from .capture import unchanged

_TORCH = os.path.dirname(torch.__file__) + os.sep
#: Names of questions -> what is true of the surroundings in which the target is read once more.
_RECORDED = {"is_grad_enabled": "gradients are not recorded"}
_INFERENCE = {"is_inference_mode_enabled": "in inference mode", "is_inference": "in inference mode"}
_COMPILED = dict.fromkeys(
    ("is_compiling", "is_dynamo_compiling", "is_exporting", "is_tracing", "is_scripting", "_get_tracing_state"),
    "it is not being compiled",
)
_LEARNING = dict.fromkeys(("requires_grad", "is_leaf", "grad_fn"), "its input has a gradient")
QUESTIONS = {**_RECORDED, **_INFERENCE, **_COMPILED, **_LEARNING}
_BUILTIN = {torch.is_grad_enabled, torch.is_inference_mode_enabled, torch._C._get_tracing_state}
#: The same questions as functions in Python, by the modules that offer them.
_OFFERED: list[tuple[Any, str]] = [
    (torch.compiler, "is_compiling"), (torch.compiler, "is_dynamo_compiling"), (torch.compiler, "is_exporting"),
    (torch.jit, "is_tracing"), (torch.jit, "is_scripting"), (torch._dynamo, "is_compiling"),
]  # fmt: skip
_PYTHON = {getattr(home, name).__code__ for home, name in _OFFERED}
_GETTERS: Any = Tensor
_OF_TENSORS = {
    **{getattr(_GETTERS, name).__get__: name for name in ("requires_grad", "is_leaf", "grad_fn")},
    Tensor.is_inference: "is_inference",
}


@dataclass(frozen=True)
class Elsewhere:
    """Surroundings in which the answer to a question is another one."""

    question: str
    where: str
    enter: Callable[[], AbstractContextManager[Any]]


class _Getters(TorchFunctionMode):
    """Notes what code outside of torch asks tensors."""

    def __init__(self, found: set[str]):
        super().__init__()
        self.found = found

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _OF_TENSORS and not _own(sys._getframe(1)):
            self.found.add(_OF_TENSORS[func])
        return func(*args, **kwargs or {})


def _own(frame: FrameType | None) -> bool:
    """Whether code is torch's."""
    return frame is None or frame.f_code.co_filename.startswith((_TORCH, "<"))


def asked(net: nn.Module, points: tuple[Tensor, ...]) -> set[str]:
    """What the code of a target asks of its surroundings, when it is called with points and with learning ones.

    >>> target = nn.Identity()
    >>> asked(target, (torch.ones(2, 1),))
    set()
    """
    found: set[str] = set()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call" and arg in _BUILTIN and not _own(frame):
            found.add(arg.__name__)
        elif event == "call" and frame.f_code in _PYTHON and not _own(frame.f_back):
            found.add(frame.f_code.co_name)

    before = sys.getprofile()
    for enter in (torch.enable_grad, lambda: _learning(net)):
        with enter(), unchanged(net), _Getters(found), suppress(Exception):  # told by whoever reads it
            sys.setprofile(note)
            try:
                net(*points)
            finally:
                sys.setprofile(before)
    return found


@contextmanager
def _learning(net: nn.Module) -> Iterator[None]:
    """Calls get inputs that have a gradient, as those of a layer in the middle of a network."""

    def learning(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(x.detach().requires_grad_().view_as(x) if isinstance(x, Tensor) else x for x in given)

    handle = net.register_forward_pre_hook(learning)
    try:
        with torch.enable_grad():
            yield
    finally:
        handle.remove()


@contextmanager
def _eager(_: nn.Module) -> Iterator[None]:
    """Code outside of torch is told that nothing is compiled."""
    places = [*_OFFERED, (torch._C, "_get_tracing_state")]
    kept = [(home, name, getattr(home, name)) for home, name in places]

    def answering(true: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: true() if _own(sys._getframe(1)) else False

    try:
        for home, name, true in kept:
            setattr(home, name, answering(true))
        yield
    finally:
        for home, name, true in kept:
            setattr(home, name, true)


def others(net: nn.Module, questions: set[str]) -> list[Elsewhere]:
    """For every question the surroundings with another answer; none twice."""
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "is_grad_enabled": lambda: torch.set_grad_enabled(not torch.is_grad_enabled()),
        **dict.fromkeys(_INFERENCE, torch.inference_mode),
        **dict.fromkeys(_COMPILED, lambda: _eager(net)),
        **dict.fromkeys(_LEARNING, lambda: _learning(net)),
    }
    found: dict[str, Elsewhere] = {}
    for question in sorted(questions):
        where = QUESTIONS[question]
        if question == "is_grad_enabled" and not torch.is_grad_enabled():
            where = "gradients are recorded"
        found.setdefault(where, Elsewhere(question, where, ways[question]))
    return list(found.values())


def read_training(net: nn.Module) -> set[str]:
    """The kinds of modules in training mode whose own code, outside of torch, reads which mode they are in."""
    found = set()
    for module in net.modules():
        kinds = [kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.")]
        codes = [value.__code__ for kind in kinds for value in vars(kind).values() if isinstance(value, FunctionType)]
        if module.training and any("training" in code.co_names for code in _inner(codes)):
            found.add(type(module).__name__)
    return found


def _inner(codes: list[CodeType]) -> Iterator[CodeType]:
    """Code, and that of functions inside."""
    for code in codes:
        yield code
        yield from _inner([inner for inner in code.co_consts if isinstance(inner, CodeType)])


def same(one: Program, other: Program) -> bool:
    """Whether two programs are the same, number by number."""
    (header, arrays), (header_too, arrays_too) = one.to_json(), other.to_json()
    return header == header_too and all(np.array_equal(a, arrays_too[name]) for name, a in arrays.items())
