"""Files with one thing changed, and how wrong the networks are that they hold: what benchmarks/kernel.py proves anew.

A number of a tensor, a choice of the derivation or a field of the description is changed alone; the kernel must refuse
such a file, or prove a bound that covers the error measured against what the changed file says that it is for.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

import attnforge as af
from attnforge.blackbox.grid import GridApproximation
from attnforge.certificates.certified import WRONG, CertifiedModule, family_of, rebuilt
from attnforge.certificates.schema import require
from attnforge.compiler.alone import derive as derive_head
from attnforge.compiler.compiled import CompiledNetwork
from attnforge.errors import AttnforgeError, CertificateError
from attnforge.export.plain.derivation import derive as derive_plain
from attnforge.export.plain.transformer import PlainTransformer, network_of
from attnforge.heads.gate.head import GateHead
from attnforge.heads.norm.head import NormHead
from attnforge.heads.product.head import ProductHead
from attnforge.heads.token.head import TokenHead
from attnforge.kernel.file import Saved, Tensor, parse
from attnforge.kernel.prove import prove
from attnforge.programs.interpret import values
from attnforge.programs.program import Program
from attnforge.rasp.network.compiled import CompiledProgram
from attnforge.report.heads import target_of
from attnforge.theorems.derivation import derive as derive_theorem
from attnforge.theorems.partition import MaxAffine
from attnforge.theorems.ramps import Ramp
from attnforge.theorems.universal import Universal

POINTS = 20_000  # at which the error of a mutant is measured
FEWER = 1_000  # of a plain transformer, where a point takes a hundred times as long
PLAIN_EFFORT = 8  # parts of the box that the derivation of a plain transformer looks at
ROOM = 1e-9  # what float64 makes of distances and of functions between samples, generously
USED = 0.7  # how often an entry that is not 0 is changed: nearly all of a plain transformer's are
EDITS: dict[str, Callable[[float, float], float]] = {
    "times 1.01": lambda x, other: x * 1.01,
    "plus 1": lambda x, other: x + 1.0,
    "NaN": lambda x, other: math.nan,
    "zero": lambda x, other: 0.0,
    "swapped": lambda x, other: other,
}
KINDS = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


# -- what is changed ---------------------------------------------------------------------------------------------------


def verdict(bound: Callable[[], float], error: Callable[[], float]) -> str:
    """Whether a mutant is refused, covered, or proved to be better than it is."""
    try:
        proved = bound()
    except CertificateError:
        return "refused"
    try:
        return "covered" if error() <= proved else "BROKEN"
    except AttnforgeError:  # the file does not even load
        return "refused"


def leaves_of(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all numbers, words and flags in plain JSON."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    found = False
    for key, value in inner:
        found = True
        yield from leaves_of(value, (*path, key))
    if not found and path:
        yield path


def somewhere(data: Any, source: random.Random) -> tuple[Any, ...]:
    """The path of a number, word or flag; long lists are no likelier than short ones."""
    path: list[Any] = []
    while isinstance(data, (dict, list)) and data:
        path.append(source.choice(sorted(data) if isinstance(data, dict) else range(len(data))))
        data = data[path[-1]]
    return tuple(path)


def changed_at(data: Any, path: tuple[Any, ...], source: random.Random) -> Any:
    """A copy with one entry changed."""
    out = copy.deepcopy(data)
    inner = out
    for key in path[:-1]:
        inner = inner[key]
    old = inner[path[-1]]
    new: Any = source.choice([None, "x", -1, [], {}])
    if isinstance(old, bool):
        new = not old
    elif isinstance(old, (int, float)):
        choices = [old * 1.01 if isinstance(old, float) else old + 1, old + 1, 0, -old, 1e300, new]
        new = source.choice(choices)
    elif isinstance(old, str):
        new = source.choice(["sin", "tanh", "square", "expr: y", "product", "apply", "all", "first", new])
    inner[path[-1]] = new
    return out


def edited(saved: Saved, name: str, i: int, edit: str) -> Saved:
    """The file with entry i of one tensor changed."""
    old = saved.tensors[name]
    numbers = torch.tensor(old.numbers, dtype=KINDS[old.dtype])
    numbers[i] = EDITS[edit](float(numbers[i]), float(numbers[(i + 1) % len(numbers)]))
    new = Tensor(old.dtype, old.shape, tuple(numbers.double().tolist()))
    return Saved(saved.header, {**saved.tensors, name: new}, saved.weights)


def module_of(saved: Saved) -> CertifiedModule:
    """The network that the contents of a file describe, as `load` makes it; `CertificateError` where it makes none."""
    tensors = {
        name: torch.tensor(one.numbers, dtype=KINDS[one.dtype]).reshape(one.shape)
        for name, one in saved.tensors.items()
    }
    try:
        kind = family_of(saved.header["family"], "the file")
        require(saved.header["config"], kind.schema, "the description")
        module = rebuilt(kind, saved.header["config"], tensors)
        module.load_state_dict(tensors, strict=True)
    except WRONG as problem:
        raise CertificateError("the file does not load") from problem
    return module


# -- how wrong a network is --------------------------------------------------------------------------------------------


def points_of(box: af.Box, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Points of a box, corners among them, in the dtype: (point, *shape)."""
    wide = box.outward(dtype)
    low, high = (end.reshape(-1).double() for end in (wide.lower, wide.upper))
    share = torch.rand(count, len(low), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    corners = torch.rand(count // 4, len(low), generator=torch.Generator().manual_seed(2)).round().double()
    x = (low + (high - low) * torch.cat([share, corners])).to(dtype)
    return torch.minimum(torch.maximum(x, low.to(dtype)), high.to(dtype)).reshape(-1, *box.shape)


def largest(found: torch.Tensor, exact: torch.Tensor, unit: torch.Tensor | float = 1.0) -> float:
    """The largest |found - exact| / unit where the target has a value; infinity for NaN."""
    if not bool(torch.isfinite(found).all()):
        return math.inf
    off = (found.double() - exact).abs()
    off = torch.where(off == 0, 0.0, off / unit)  # an error of 0 is none of a value of 0 either
    return float(off[torch.isfinite(exact)].max())


@torch.no_grad()
def network_error(net: CertifiedModule, program: Program, points: int = POINTS) -> float:
    """The largest |network - program| at points of the program's box."""
    x = points_of(program.box, net.dtype, points)
    found, exact = (out.double().reshape(len(x), -1) for out in (net.core(x), values(program, x.double())))
    return largest(found, exact)


@torch.no_grad()
def head_error(head: CertifiedModule, runs: CertifiedModule | None = None) -> float:
    """The largest error of a head on its own, or of another form of it, in the unit of its certificate."""
    if isinstance(head, NormHead):
        return _norm_error(head)
    x = points_of(head.box, head.dtype, POINTS if runs is None else FEWER)
    if isinstance(head, ProductHead) and head.width is not None:
        return _vector_error(head, x)
    if isinstance(head, Ramp):  # tokens may have weights of their own
        x = x[: len(x) // head.scalars * head.scalars].reshape(-1, head.scalars, x.shape[-1])
    inputs = x.unbind(-1) if head.box.names else (x,)
    exact = _meant(head, x)
    if isinstance(runs, PlainTransformer):  # rows of so many tokens
        x, exact = (t[: len(t) - len(t) % runs.tokens] for t in (x, exact))
        inputs = (x.reshape(-1, runs.tokens, x.shape[-1]),)
    found = (runs or head).core(*inputs).reshape(exact.shape)
    return largest(found, exact, exact.abs() if getattr(head, "relative", False) else 1.0)


def _vector_error(head: ProductHead, x: torch.Tensor) -> float:
    """Of a vector times a number: its entries are points one after the other."""
    assert head.width is not None
    rows = torch.stack([x[:, 0].roll(k) for k in range(head.width)], -1)
    return largest(head.core(rows, x[:, 1]), rows.double() * x[:, 1:].double())


def _meant(head: Any, x: torch.Tensor) -> torch.Tensor:
    """What a head is for at these points, in float64."""
    exact = x.double()
    if isinstance(head, Ramp):  # where its channel changes, nothing is said
        y, found = head.scalar(x), head.target(x)
        for low, high in head.wanted.excluded(head.held, ROOM):
            found[(y > low) & (y < high)] = math.nan
        return found
    if isinstance(head, ProductHead):
        return exact[:, 0] * exact[:, 1]
    if isinstance(head, GateHead) and head.spec.target.pair:
        return exact.amax(-1) if head.name == "max" else exact.amin(-1)
    if not isinstance(head, TokenHead):
        return torch.from_numpy(target_of(head, x[:, 0]))
    about, n = head.config(), head.tokens
    if about["mode"] == "max":
        return exact.amax(-2, keepdim=True).expand_as(exact)
    if about["mode"] == "min":
        return exact.amin(-2, keepdim=True).expand_as(exact)
    mixtures = {"mean": torch.ones(n, n), "prefix_mean": torch.ones(n, n).tril()}
    if about["mode"] in mixtures:
        matrix = mixtures[about["mode"]].double()
        return matrix / matrix.sum(-1, keepdim=True) @ exact
    return torch.tensor(about["matrix"], dtype=torch.float64) @ exact


def _norm_error(head: NormHead) -> float:
    """Of rows of variances up to the ends of the interval, and as far from 0 as they may be: parts of the largest."""
    count = FEWER
    x = torch.randn(count, head.channels, generator=torch.Generator().manual_seed(3), dtype=torch.float64) ** 3
    x = x - x.mean(-1, keepdim=True) if head.kind == "layer" else x
    low, high = head.variance
    share = torch.linspace(0, 1, count, dtype=torch.float64)[:, None]
    x = x / x.square().mean(-1, keepdim=True).sqrt() * (low * (high / low) ** share).sqrt()
    if head.kind == "layer":
        far = torch.tensor([0.0, head.offset, -0.5])[torch.arange(count) % 3, None]
        x = x + far * x.square().mean(-1, keepdim=True).sqrt()
    rows = x.to(head.dtype)
    exact = rows.double()
    exact = exact - exact.mean(-1, keepdim=True) if head.kind == "layer" else exact
    exact = exact / (exact.square().mean(-1, keepdim=True) + head.eps_norm).sqrt()
    return largest(head.core(rows), exact, exact.abs().amax(-1, keepdim=True))


@torch.no_grad()
def plain_error(plain: PlainTransformer) -> float:
    """The largest error of a plain transformer, or 1 where it puts out another sequence than its program."""
    net = network_of(plain)
    if isinstance(net, CompiledNetwork):
        return network_error(plain, net.program, FEWER)
    if isinstance(net, (MaxAffine, Universal)):
        return envelope_error(net, plain)
    if isinstance(net, Ramp):
        return head_error(net, plain)
    if not isinstance(net, CompiledProgram):
        raise CertificateError("the file does not say what it is for")
    given = list(net.domain)
    rows = plain.core(net.ids(given, plain.tokens))
    if not bool(torch.isfinite(rows).all()):
        return math.inf
    worst = 0.0
    for sequence, row in zip(given, rows, strict=True):
        meant, got = net.program(sequence), row[: len(sequence)]
        if net.outputs is None:
            pairs = zip(got[:, 0].tolist(), meant, strict=True)
            worst = max([worst, *(abs(a - float(b)) for a, b in pairs)])  # type: ignore[arg-type]
        else:
            read = [net.outputs[int(i)] for i in got.argmax(-1)]
            worst = max(worst, float(read != list(meant)))
    return worst


@torch.no_grad()
def envelope_error(net: CertifiedModule, runs: CertifiedModule | None = None) -> float:
    """How far a network made from samples is from a function that has them and is no steeper than its file says, at the
    worst: the largest and the least of all such functions are looked at. 0 where there is none. What runs is the
    network, or another form of it."""
    if isinstance(net, GridApproximation):
        places, samples, slope = net.grid.points(0, net.grid.count), net.reference.double(), net.lipschitz
    elif isinstance(net, (MaxAffine, Universal)):
        given = net.asked
        places = given.centres if isinstance(net, MaxAffine) else net.grid.points().numpy()
        samples, slope = torch.from_numpy(given.samples), getattr(given.modulus, "slope", None)
    else:
        raise CertificateError("the file holds no samples")
    if slope is None:
        raise CertificateError("the file states no constant")
    v, x = torch.as_tensor(places).reshape(len(places), -1), points_of(net.box, net.dtype, FEWER)
    low, high = net.box.lower.reshape(-1), net.box.upper.reshape(-1)
    apart = torch.cdist(v, v, compute_mode="donot_use_mm_for_euclid_dist")
    rises = (samples[:, None] - samples[None]).abs().amax(-1)
    if not bool((rises <= slope * apart * (1 + ROOM) + ROOM).all()):
        return 0.0  # no function has these samples: all that is said of such is so
    rows = x.unsqueeze(-2) if isinstance(net, MaxAffine) and len(net.box.shape) == 1 else x
    found = (runs or net).core(rows).double().reshape(len(x), -1)
    if not bool(torch.isfinite(found).all()):
        return math.inf
    inside = x.double().reshape(len(x), -1).clamp(low, high)
    away = slope * torch.cdist(inside, v, compute_mode="donot_use_mm_for_euclid_dist")[..., None]
    ends = (samples + away).amin(1), (samples - away).amax(1)
    return max(float((found - end).abs().max()) for end in ends) * (1 - ROOM)


def error_of(module: CertifiedModule) -> float:
    """The largest error of the network of a file."""
    if isinstance(module, (GridApproximation, MaxAffine, Universal)):
        return envelope_error(module)
    return plain_error(module) if isinstance(module, PlainTransformer) else head_error(module)


# -- mutants of heads, plain transformers and variants -----------------------------------------------------------------


def chosen_for(module: CertifiedModule, saved: Saved, goal: float) -> dict[str, Any]:
    """A derivation for what a file holds."""
    try:
        if isinstance(module, PlainTransformer):
            return derive_plain(module, saved, goal, PLAIN_EFFORT)
        if isinstance(module, (MaxAffine, Universal)):
            return derive_theorem(module, saved, goal)
        return {} if isinstance(module, GridApproximation) else derive_head(module, saved, goal)
    except AttnforgeError as problem:
        raise CertificateError(f"no derivation can be made for these weights: {problem}") from problem


def file_mutants(net: CertifiedModule, count: int, source: random.Random) -> Iterator[tuple[str, str]]:
    """Entries of stored tensors, with the old and a fresh derivation; choices of the derivation; the description."""
    saved, goal = parse(net.written()), net.bound or 0.0
    chosen = chosen_for(net, saved, goal)
    places = [(name, i) for name, tensor in saved.tensors.items() for i in range(len(tensor.numbers))]
    used = [(name, i) for name, i in places if saved.tensors[name].numbers[i] != 0]
    for _ in range(min(count, len(places))):
        name, i = source.choice(used if source.random() < USED else places)
        mutant = edited(saved, name, i, source.choice(sorted(EDITS)))
        kind = name.split(".")[-1]

        def error(mutant: Saved = mutant) -> float:
            return error_of(module_of(mutant))

        def fresh(mutant: Saved = mutant) -> float:
            return prove(mutant, chosen_for(module_of(mutant), mutant, goal)).bound

        yield kind, verdict(lambda: prove(mutant, chosen).bound, error)  # noqa: B023
        yield f"{kind}, fresh", verdict(fresh, error)
    right = error_of(module_of(saved))
    for _ in range(count if chosen else 0):
        path = somewhere(chosen, source)
        wrong = changed_at(chosen, path, source)
        if wrong.get("outputs") == chosen.get("outputs"):  # else `check` refuses it before the kernel is asked
            yield f"derivation, {path[0]}", verdict(lambda: prove(saved, wrong).bound, lambda: right)  # noqa: B023
    for _ in range(count):
        path = somewhere(saved.header["config"], source)
        config = changed_at(saved.header["config"], path, source)
        changed = replace(saved, header={**saved.header, "config": config})

        def stated(changed: Saved = changed) -> float:
            return error_of(module_of(changed))

        yield f"header, {path[0]}", verdict(lambda: prove(changed, chosen).bound, stated)  # noqa: B023
