"""Looking at a model while calibration data runs through it: the range at every site, and calls of functions."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import ArgumentError
from ..purity.tables import reason
from .batches import Batch

ACTIVATION = reason("relu")


@dataclass
class Seen:
    """What calibration met at one site: of an activation its input, of a norm the variance of rows and |mean|/std."""

    low: float = math.inf
    high: float = -math.inf
    other: tuple[float, float] = (math.inf, -math.inf)
    offset: float = 0.0
    calls: int = 0
    device: torch.device | None = None
    """Where the site computes: models may be spread over several devices."""

    def take(self, path: str, values: Tensor) -> None:
        low, high = _ends(path, values)
        self.device = values.device
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.calls += 1

    def take_other(self, path: str, values: Tensor) -> None:
        low, high = _ends(path, values)
        self.other = min(self.other[0], low), max(self.other[1], high)


def _ends(path: str, values: Tensor) -> tuple[float, float]:
    low, high = (float(v) for v in torch.aminmax(values.detach().float() if values.dtype != torch.float64 else values))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ArgumentError(f"calibration brings NaN or infinity to '{path}': look at the data, or the model's masks")
    return low, high


def activation_hook(path: str, seen: Seen) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = args[0] if args else next(iter(kwargs.values()))
        if values.numel():
            seen.take(path, values)

    return hook


def product_hook(path: str, seen: Seen) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.take(path, args[1])
        seen.take_other(path, args[0])

    return hook


def norm_hook(path: str, seen: Seen, layer: bool, dims: int) -> Callable[..., None]:
    """Rows that are constant have no variance and leave any norm as its bias: they say nothing about the range."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else next(iter(kwargs.values()))
        rows = (given.detach().float() if given.dtype != torch.float64 else given.detach()).flatten(-dims)
        _ends(path, rows)
        mean = rows.mean(-1, keepdim=True) if layer else torch.zeros_like(rows[..., :1])
        variance = (rows - mean).square().mean(-1)
        live = variance > torch.finfo(rows.dtype).eps ** 2 * rows.square().mean(-1)
        if bool(live.any()):
            seen.take(path, variance[live])
            seen.offset = max(seen.offset, float((mean.squeeze(-1).abs()[live] / variance[live].sqrt()).max()))

    return hook


@dataclass(frozen=True)
class Call:
    """A nonlinear function that a module calls in its own `forward`."""

    path: str
    operation: str
    source: str


class Calls(TorchFunctionMode):
    """Records calls of activation functions, with the path of the module whose `forward` is running."""

    def __init__(self, model: nn.Module, known: Sequence[str]):
        super().__init__()
        self.known, self.stack, self.found = frozenset(known), [""], set[Call]()
        self._handles = []
        for path, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._enter(path)))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def _enter(self, path: str) -> Callable[..., None]:
        return lambda module, args: self.stack.append(path)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.stack.pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "").rstrip("_")
        if reason(name) == ACTIVATION and not self.known.intersection(self.stack):
            frame = sys._getframe(1)
            while frame.f_back is not None and "torch" in frame.f_globals.get("__name__", "").split("."):
                frame = frame.f_back
            source = f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
            self.found.add(Call(self.stack[-1], name, source))
        return func(*args, **(kwargs or {}))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module gets its own mode back."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def look(model: nn.Module, hooks: Sequence[tuple[nn.Module, Callable[..., None]]], known: Sequence[str],
         batches: Sequence[Batch]) -> list[Call]:  # fmt: skip
    """Run the batches with the hooks in place; the calls of activation functions outside the `known` paths."""
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in hooks]
    calls = Calls(model, known)
    try:
        with evaluating(model):
            for number, batch in enumerate(batches):
                if number == 0:
                    with calls:
                        _run(model, batch, number)
                    calls.close()
                else:
                    _run(model, batch, number)
    finally:
        calls.close()
        for handle in handles:
            handle.remove()
    return sorted(calls.found, key=lambda call: (call.path, call.operation, call.source))


def _run(model: nn.Module, batch: Batch, number: int) -> None:
    try:
        batch.run(model)
    except (TypeError, RuntimeError, IndexError, AttributeError, KeyError) as error:
        text = str(error).strip().splitlines()
        raise ArgumentError(
            f"the model does not take calibration batch {number}: {type(error).__name__}: {text[0] if text else ''}; "
            "a batch is a dict of keyword arguments, a tuple of positional ones, or a tensor"
        ) from error
