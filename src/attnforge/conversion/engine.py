"""`convert` on one page: copy, find, watch, build, place, measure, prove."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..census import examine
from ..dtypes import dtype_name
from ..errors import ArgumentError
from ..progress import stages
from .build import Options, checked
from .find import LEFT, Found, Leave, choose, computes_in_less, find, kept, level_of, unsupported
from .ranges import Batch, Batches, Seen, evaluating, read, sound_ranges, watch
from .record import Conversion, Left, Replacement
from .replace import dtype_of, prepare, refuse_unreadable, replace, twin
from .site import SiteModule, working
from .storage import remember

EXAMPLE = 2  # rows of the batch that a pure model is exported with: a batch, and no larger than need be


def convert(
    model: nn.Module,
    calibration: Any = None,
    *,
    level: str = "ffn",
    eps: float = 1e-4,
    anchors: int | None = None,
    cold: bool = False,
    margin: float = 2.0,
    variance_margin: float = 30.0,
    leave: Any = (),
    strict: bool = False,
    fast: bool = True,
) -> tuple[nn.Module, Conversion]:
    """A copy of `model` whose nonlinearities are attention heads, and the report of what was done.

    `level="ffn"` replaces activation functions, `"pure"` every nonlinearity, norms and gated units included, so that
    softmax attention is the only nonlinear operation left. `calibration` is an iterable of batches (dict = keyword
    arguments, tuple or tensor), or a single batch; ranges come from it, widened by `margin` (activations) and
    `variance_margin` (norms). `eps` is the sup error of each site relative to the site's output scale. `anchors` forces
    the size of the tables, `cold` builds the paper's cold heads. `leave` names paths (patterns such as "*.pooler.*")
    that stay as they are. `strict` raises on values outside a site's range instead of warning once.

    Weights that do not change are shared with the original, which is not touched.

    >>> import torch
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    >>> converted, report = convert(mlp, torch.randn(64, 2), eps=1e-5)
    >>> report.by_operation, report.worst <= 1e-5, converted[0].weight is mlp[0].weight
    ({'gelu': 1}, True, True)
    """
    started = time.perf_counter()
    refuse_unreadable(model)
    level, data = level_of(level), read(calibration)
    checked(eps, margin, variance_margin, anchors)
    dtype, device = dtype_of(model), next(model.parameters()).device
    if data is not None:
        data = Batches(_moved(data.seen, device, dtype), _moved(data.held, device, dtype), data.note)
    kept = Leave.read(leave, model)
    options = Options(float(eps), working(dtype), anchors, bool(cold), bool(fast), dtype)
    with stages(None, "converting") as stage:
        stage("copy")
        result = twin(model)
        stage("find")
        chosen = choose(find(result), level, kept)
        if not chosen.sites:
            raise _nothing(model, level, chosen.left)
        modules = prepare(result, chosen.sites)
        stage("watch")
        left = list(chosen.left)
        if data is None:
            seen = sound_ranges(result, chosen.sites, modules)
        else:
            seen, called = _watched(result, chosen.sites, modules, data, kept, left)
            left += called
        stage("build")
        sites = replace(result, chosen.sites, seen, options, dtype, margin, variance_margin, strict)
        stage("measure")
        change = size = None
        if data is not None:
            change, size = largest_change(model, result, data.held)
        census: dict[str, int] = {}
        if level == "pure":
            stage("prove")
            impure, census = _examined(result, data, kept)
            left += impure
    notes = _notes(model, sites, data, dtype)
    kept_on = sum(one.reason == LEFT for one in left)
    if level == "pure":
        notes.append(
            f"not pure: {kept_on} operations stay as leave= asks"
            if kept_on
            else "pure: on the exported graph softmax attention is the only nonlinear operation (attnforge.purity)"
        )
    conversion = Conversion(
        model=type(model).__name__,
        level=level,
        eps=float(eps),
        dtype=dtype_name(dtype),
        sites=tuple(sites),
        left=tuple(left),
        parameters_before=sum(p.numel() for p in model.parameters()),
        parameters_after=sum(p.numel() for p in result.parameters()),
        change=change,
        output=size,
        batches=len(data.seen) if data else 0,
        held_out=len(data.held) if data else 0,
        seconds=time.perf_counter() - started,
        census={} if kept_on else census,
        notes=tuple(notes),
    )
    remember(result, conversion)
    return result, conversion


def outputs(value: Any) -> Iterator[Tensor]:
    """The floating tensors of a model's output, however nested; caches and other objects are passed over."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from outputs(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from outputs(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from outputs(getattr(value, field.name))


def largest_change(first: nn.Module, second: nn.Module, batches: Sequence[Batch]) -> tuple[float, float]:
    """The largest |difference| and the largest |output| over all outputs of all batches; equal infinities agree."""
    change = size = 0.0
    with evaluating(first, second):
        for batch in batches:
            pairs = zip(outputs(batch.run(first)), outputs(batch.run(second)), strict=True)
            for one, other in pairs:
                a, b = one.double(), other.double()
                same = (a == b) | (a.isnan() & b.isnan())
                apart = torch.where(same, torch.zeros_like(a), (a - b).abs())
                finite = a[a.isfinite()]
                change = max(change, float(apart.max()) if apart.numel() else 0.0)
                size = max(size, float(finite.abs().max()) if finite.numel() else 0.0)
    return change, size


def _moved(batches: Sequence[Batch], device: torch.device, dtype: torch.dtype) -> tuple[Batch, ...]:
    return tuple(batch.to(device, dtype) for batch in batches)


def _watched(
    model: nn.Module,
    sites: Sequence[Found],
    modules: dict[str, nn.Module],
    data: Batches,
    kept: Leave,
    left: list[Left],
) -> tuple[dict[str, Seen], list[Left]]:
    """Ranges by path; functions called in a `forward` that may stay. Raises for those that may not, and for sites that
    no batch reached."""
    known = [path for site in sites if site.kind != "gated" for path in site.paths] + [one.path for one in left]
    known += [path for path, module in model.named_modules() if isinstance(module, SiteModule)]
    seen, calls = watch(model, sites, modules, known, data.seen)
    missed = [path for path, found in seen.items() if not found.calls]
    if missed:
        raise ArgumentError(
            f"calibration never reaches {len(missed)} site{'s' if len(missed) > 1 else ''}: {', '.join(missed)}; "
            "give batches that do (all inputs the model uses), or name them in leave=[...]"
        )
    wrong = [
        f"{call.path or 'the model itself'}: {call.operation}, called as a function at {call.source}: "
        "only modules and functions kept as attributes can be replaced"
        for call in calls
        if not kept.holds(call.path)
    ]
    if wrong:
        raise unsupported(wrong)
    return seen, [Left(call.path, call.operation, LEFT) for call in calls]


def _examined(model: nn.Module, data: Batches | None, kept: Leave) -> tuple[list[Left], dict[str, int]]:
    """What the exported graph computes besides attention, all of which must be named in `leave`; and its census."""
    if data is None:
        raise ArgumentError("level='pure' examines the exported graph, which needs a batch: give calibration=batches")
    batch = data.held[0]
    example = batch.part(slice(0, EXAMPLE)) if batch.rows else batch
    census, offences = examine(model, example.example)
    found = dict.fromkeys(offences)
    refused = [one for one in found if not kept.holds(one.module)]
    modules = dict(model.named_modules())
    short = {path for one in refused if (path := one.module) in modules and computes_in_less(modules[path])}
    wrong = [
        f"{path}: {type(modules[path]).__name__}: it computes in float32 whatever it is given, no norm to float64: "
        "convert the model in float32, then take it to float64"
        for path in modules
        if path in short
    ]
    wrong += [
        f"{one.module or 'the model itself'}: {one.operation}: {one.why}{f' ({one.source})' if one.source else ''}"
        for one in refused
        if one.module not in short
    ]
    if wrong:
        raise unsupported(wrong)
    return [Left(one.module, one.operation, LEFT) for one in found], census.by_category


def _nothing(model: nn.Module, level: str, left: Sequence[Left]) -> ArgumentError:
    there = f"; {len(left)} stay: {', '.join(f'{one.path} ({one.operation})' for one in left[:8])}" if left else ""
    kept_on = "; ".join(kept(model)[:8])
    hint = f" {kept_on}." if kept_on else ""
    hint += " Functions that a forward calls itself are not seen: make them modules, nn.GELU() for F.gelu."
    hint += " level='pure' converts norms and gated units too" if level == "ffn" and left else ""
    return ArgumentError(
        f"{type(model).__name__} has no site to convert at level '{level}': no submodule or attribute is a known "
        f"activation function{' or norm' if level == 'pure' else ''}{there}.{hint}"
    )


def _notes(model: nn.Module, sites: Sequence[Replacement], data: Batches | None, dtype: torch.dtype) -> list[str]:
    notes = []
    dropping = [m for m in model.modules() if m.training and isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0]
    batched = [m for m in model.modules() if m.training and isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if dropping or batched:
        what = " and ".join(word for word, found in (("dropout", dropping), ("batch norm", batched)) if found)
        kinds = ", ".join(sorted({type(m).__name__ for m in (*dropping, *batched)}))
        notes.append(
            f"the model is in training mode and stays in it: its {what} ({kinds}) act so until model.eval(); ranges "
            "and the measured change were taken in evaluation mode"
        )
    if data is None:
        notes.append("no calibration: ranges follow from the weights; functions called in a forward were not seen")
    elif data.note:
        notes.append(data.note)
    shared = [site.path for site in sites if site.calls > (len(data.seen) if data else 0) > 0]
    if shared:
        notes.append(f"{len(shared)} sites run several times in a pass (shared layers): their ranges cover all of them")
    before = sum(isinstance(module, SiteModule) for module in model.modules())
    if before:
        notes.append(f"{before} sites were attention before: this report speaks of the others")
    if dtype != working(dtype):
        wide = dtype_name(working(dtype))
        notes.append(
            f"heads are evaluated in {wide} and their results rounded to {dtype_name(dtype)}; the bounds include that"
        )
    notes.append("weights that did not change are shared with the original model: training one trains the other")
    return notes
