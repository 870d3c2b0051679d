"""The range at every site: from calibration data that runs through the model, or from the weights alone.

Calibration data are batches as the model takes them, checked, with a part of them held out. Hooks take down the range
at every site while the batches run, and a mode of PyTorch the functions that a module calls in its own `forward`.

Without data, ranges are known where a norm and a linear map come before an activation (section H of docs/theory.md): a
normalised row n has |n|^2 <= d, so a layer norm's output weight * n + bias, through a linear map with rows w_j and
biases b_j, stays within |w_j . bias + b_j| + sqrt(d) |w_j * weight|_2 (Cauchy's inequality), whatever the input.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ..census.findings import reason
from ..errors import ArgumentError
from .find import Found, Norm, norm_of
from .site import GatedUnit

HELD = 5  # one batch in so many is held out: most of the data sets the ranges, and no fewer than one batch measures
ACTIVATION = reason("relu")  # what the census says of every activation function
SLACK = 1e-3  # by which a range from the weights is widened, of its parts: far more than their evaluation errs
TINY = 1e-6  # and where all of them are 0

# -- calibration data -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in [*((f"argument {i}", v) for i, v in enumerate(self.args)), *self.kwargs.items()]:
            if isinstance(value, Tensor):
                yield name, value

    @property
    def rows(self) -> int:
        """The size of the first dimension, 0 where tensors disagree or there are none."""
        sizes = {t.shape[0] if t.dim() else 0 for _, t in self.tensors()}
        return sizes.pop() if len(sizes) == 1 else 0

    def part(self, rows: slice) -> Batch:
        """The same call for some of the rows."""

        def cut(value: Any) -> Any:
            return value[rows] if isinstance(value, Tensor) else value

        return Batch(tuple(map(cut, self.args)), {name: cut(value) for name, value in self.kwargs.items()})

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """The same call on the model's device, floating tensors in the model's dtype."""

        def move(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(device, dtype if value.is_floating_point() else None)

        return Batch(tuple(map(move, self.args)), {name: move(value) for name, value in self.kwargs.items()})

    def run(self, model: nn.Module) -> Any:
        return model(*self.args, **self.kwargs)

    @property
    def example(self) -> tuple[Any, ...] | dict[str, Any]:
        """The call as `attnforge.purity` takes it."""
        return self.args if self.args else dict(self.kwargs)


@dataclass(frozen=True)
class Batches:
    """Batches that set the ranges, batches that were held out, and what is to be said about the split."""

    seen: tuple[Batch, ...]
    held: tuple[Batch, ...]
    note: str = ""


def read(calibration: object) -> Batches | None:
    """The batches of `calibration`, split; None for None.

    >>> data = read(torch.zeros(4, 2))
    >>> data.seen[0].args[0].shape, data.held[0].args[0].shape
    (torch.Size([3, 2]), torch.Size([1, 2]))
    """
    if calibration is None:
        return None
    single = isinstance(calibration, (Tensor, Mapping))
    if not single and (isinstance(calibration, (str, bytes)) or not isinstance(calibration, Iterable)):
        raise ArgumentError(
            f"calibration must be an iterable of batches (dict, tuple or tensor), or one batch, "
            f"got {type(calibration).__name__}"
        )
    given = [calibration] if single else list(calibration)  # type: ignore[call-overload]
    batches = tuple(_batch(number, each) for number, each in enumerate(given))
    if not batches:
        raise ArgumentError("calibration holds no batch; give at least one, or None for ranges without data")
    if len(batches) > 1:
        held = max(1, len(batches) // HELD)
        return Batches(batches[:-held], batches[-held:])
    (only,) = batches
    if only.rows < 2:
        why = "one batch that cannot be split: the change was measured on the calibration data itself, nothing held out"
        return Batches(batches, batches, why)
    cut = only.rows - max(1, only.rows // HELD)
    return Batches((only.part(slice(0, cut)),), (only.part(slice(cut, None)),))


def _batch(number: int, given: object) -> Batch:
    if isinstance(given, Tensor):
        batch = Batch((given,), {})
    elif isinstance(given, Mapping):
        batch = Batch((), {str(name): value for name, value in given.items()})
    elif isinstance(given, (tuple, list)):
        batch = Batch(tuple(given), {})
    else:
        raise ArgumentError(
            f"calibration batch {number} must be a dict of keyword arguments, a tuple or a tensor, "
            f"got {type(given).__name__}"
        )
    for name, tensor in batch.tensors():
        if not tensor.numel():
            raise ArgumentError(f"calibration batch {number}: '{name}' is empty, its shape is {tuple(tensor.shape)}")
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise ArgumentError(f"calibration batch {number}: '{name}' holds NaN")
    return batch


# -- looking at a model while batches run through it ----------------------------------------------------------------


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

    def take_factors(self, path: str, first: Tensor, second: Tensor) -> None:
        """The factors of a product: the range of a site is that of the second."""
        low, high = _ends(path, first)
        self.take(path, second)
        self.other = min(self.other[0], low), max(self.other[1], high)

    def take_rows(self, path: str, given: Tensor, norm: Norm) -> None:
        """The rows of a norm. Constant ones leave any norm as its bias: they say nothing about the range."""
        rows = _wide(given).flatten(-len(norm.shape))
        _ends(path, rows)
        mean = rows.mean(-1, keepdim=True) if norm.kind == "layer" else torch.zeros_like(rows[..., :1])
        variance = (rows - mean).square().mean(-1)
        live = variance > torch.finfo(rows.dtype).eps ** 2 * rows.square().mean(-1)
        if bool(live.any()):
            self.take(path, variance[live])
            self.offset = max(self.offset, float((mean.squeeze(-1).abs()[live] / variance[live].sqrt()).max()))


def _wide(values: Tensor) -> Tensor:
    return values.detach() if values.dtype == torch.float64 else values.detach().float()


def _ends(path: str, values: Tensor) -> tuple[float, float]:
    low, high = (float(v) for v in torch.aminmax(_wide(values)))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ArgumentError(f"calibration brings NaN or infinity to '{path}': look at the data, or the model's masks")
    return low, high


@dataclass(frozen=True)
class FunctionCall:
    """A nonlinear function that a module calls in its own `forward`."""

    path: str
    operation: str
    source: str


class Calls(TorchFunctionMode):
    """Records calls of activation functions, with the path of the module whose `forward` is running."""

    def __init__(self, model: nn.Module, known: Sequence[str]):
        super().__init__()
        self.known, self.stack, self.found = frozenset(known), [""], set[FunctionCall]()
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
            self.found.add(FunctionCall(self.stack[-1], name, source))
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


def watch(
    model: nn.Module,
    sites: Sequence[Found],
    modules: Mapping[str, nn.Module],
    known: Sequence[str],
    batches: Sequence[Batch],
) -> tuple[dict[str, Seen], list[FunctionCall]]:
    """Run the batches: the range at every site, and the calls of activation functions outside the `known` paths."""
    seen = {site.path: Seen() for site in sites}
    handles = [_hooked(site, modules[site.path], seen[site.path]) for site in sites]
    calls = Calls(model, known)
    try:
        with evaluating(model):
            with calls:
                _run(model, batches[0], 0)
            calls.close()
            for number, batch in enumerate(batches[1:], 1):
                _run(model, batch, number)
    finally:
        calls.close()
        for handle in handles:
            handle.remove()
    return seen, sorted(calls.found, key=lambda call: (call.path, call.operation, call.source))


def _hooked(site: Found, module: nn.Module, seen: Seen) -> RemovableHandle:
    """Take down what enters a site."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else next(iter(kwargs.values()))
        if site.norm is not None:
            seen.take_rows(site.path, given, site.norm)
        elif site.roles is not None:
            seen.take_factors(site.path, *args)
        elif given.numel():
            seen.take(site.path, given)

    watched = module.product if isinstance(module, GatedUnit) else module
    return watched.register_forward_pre_hook(hook, with_kwargs=True)


def _run(model: nn.Module, batch: Batch, number: int) -> None:
    try:
        batch.run(model)
    except (TypeError, RuntimeError, IndexError, AttributeError, KeyError) as error:
        text = str(error).strip().splitlines()
        raise ArgumentError(
            f"the model does not take calibration batch {number}: {type(error).__name__}: {text[0] if text else ''}; "
            "a batch is a dict of keyword arguments, a tuple of positional ones, or a tensor"
        ) from error


# -- ranges without data --------------------------------------------------------------------------------------------


def sound_ranges(model: nn.Module, sites: Sequence[Found], modules: Mapping[str, nn.Module]) -> dict[str, Seen]:
    """The range at every site, from the weights; `ArgumentError` names the sites that need data."""
    sources = _sources(model, [modules[site.path] for site in sites if site.kind == "activation"])
    ranges: dict[str, Seen] = {}
    open_: list[str] = []
    for site in sites:
        found = [_reach(*pair) for pair in sources.get(modules[site.path], ())] if site.kind == "activation" else []
        if not found or None in found:
            open_.append(f"{site.path} ({site.operation})")
            continue
        known = [pair for pair in found if pair is not None]
        ranges[site.path] = Seen(min(low for low, _ in known), max(high for _, high in known))
    if open_:
        raise ArgumentError(
            f"without calibration the range of {len(open_)} site{'s' if len(open_) > 1 else ''} is not known: "
            f"{', '.join(open_)}; ranges follow from the weights only where a norm and a linear map come before an "
            "activation: give calibration=batches"
        )
    return ranges


def _dummy(model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """An input to follow the data with: its values do not matter."""
    own = getattr(model, "dummy_inputs", None)
    if isinstance(own, Mapping):
        return (), dict(own)
    parameter = next(model.parameters())
    if isinstance(model, (nn.TransformerEncoder, nn.TransformerEncoderLayer)):
        layer = model.layers[0] if isinstance(model, nn.TransformerEncoder) else model
        assert isinstance(layer, nn.TransformerEncoderLayer)
        width = layer.linear1.in_features
        # numbers of which none is 0: what changes a tensor in place changes them
        rows = torch.linspace(0.5, 1.5, 4 * width, dtype=parameter.dtype, device=parameter.device)
        return (rows.sin().reshape(2, 2, width),), {}
    return None


@dataclass(frozen=True)
class _Made:
    """Who made a tensor, from what, and what it held then; the tensors stay alive, so that their ids stay theirs."""

    module: nn.Module
    given: Tensor
    output: Tensor
    version: int
    copy: Tensor

    def unchanged(self) -> bool:
        """Whether nobody has written to the tensor since, by PyTorch's count and by its values."""
        return self.output._version == self.version and torch.equal(self.output, self.copy)


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling a module is what its class `kind` computes: no other forward, no hooks that change something."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    own = "forward" in vars(module) or type(module).forward is not kind.forward
    return not own and type(module).__call__ is nn.Module.__call__ and not any(hooks)


def _sources(model: nn.Module, targets: Sequence[nn.Module]) -> dict[nn.Module, list[tuple[Any, Any]]]:
    """For each activation the (norm, linear map) that its input came through, once for each time it is called.

    Data is followed by the identity of tensors: an activation's input is a linear map's output, whose input is a
    norm's, and nobody has written to them in between.
    """
    given = _dummy(model)
    if given is None:
        return {}
    made: dict[int, _Made] = {}  # by the output's identity
    linears: dict[int, _Made | None] = {}  # by a linear map's output: who made its input, unless that was changed
    found: dict[nn.Module, list[tuple[Any, Any]]] = {}

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor) and output is not args[0]:
            before = made.get(id(args[0]))
            linears[id(output)] = before if before is not None and before.unchanged() else None
            made[id(output)] = _Made(module, args[0], output, output._version, output.clone())

    def ask(module: nn.Module, args: Any) -> None:
        linear = made.get(id(args[0])) if args else None
        if linear is None or not linear.unchanged():
            found.setdefault(module, []).append((None, None))
            return
        norm = linears[id(args[0])]
        found.setdefault(module, []).append((None if norm is None else norm.module, linear.module))

    wanted = [m for m in model.modules() if _is_norm(m) or _matrix(m) is not None]
    if any(t._forward_pre_hooks for t in targets):  # they may change what an activation is given
        return {}
    handles = [m.register_forward_hook(note) for m in wanted] + [t.register_forward_pre_hook(ask) for t in targets]
    args, kwargs = given
    try:
        with evaluating(model):
            model(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError):  # the model wants other inputs than its dummy
        return {}
    finally:
        for handle in handles:
            handle.remove()
    return found


def _is_norm(module: nn.Module) -> bool:
    return norm_of(module) is not None and _is_plain(module, type(module))


def _matrix(module: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Weight (output, input) and bias of a linear map; Hugging Face's Conv1D stores the transpose.

    A subclass of `nn.Linear` with a forward of its own, or a module with hooks, may compute anything.
    """
    if not _is_plain(module, nn.Linear if isinstance(module, nn.Linear) else type(module)):
        return None
    if isinstance(module, nn.Linear):
        return module.weight, module.bias
    if type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers."):
        return module.get_parameter("weight").t(), module.get_parameter("bias")
    return None


@torch.no_grad()
def _reach(norm: nn.Module | None, linear: nn.Module | None) -> tuple[float, float] | None:
    """The range of a linear map of a norm's output, rounded outward by far more than its evaluation errs."""
    known = None if norm is None else norm_of(norm)
    table = None if linear is None else _matrix(linear)
    if norm is None or known is None or table is None:
        return None
    matrix, bias = table[0].double().cpu(), table[1]
    weight, shift = _affine(norm, known)
    middle = matrix @ shift + (0.0 if bias is None else bias.double().cpu())
    spread = math.sqrt(math.prod(known.shape)) * (matrix * weight).norm(dim=-1)
    slack = spread + SLACK * (spread + (matrix * shift).abs().sum(-1) + middle.abs()) + TINY
    return float((middle - slack).min()), float((middle + slack).max())


def _affine(norm: nn.Module, known: Norm) -> tuple[Tensor, Tensor]:
    size = math.prod(known.shape)
    weight, bias = norm._parameters.get("weight"), norm._parameters.get("bias")
    gain = torch.ones(size, dtype=torch.float64) if weight is None else weight.double().cpu().flatten()
    shift = torch.zeros(size, dtype=torch.float64) if bias is None else bias.double().cpu().flatten()
    return gain + float(known.unit), shift
