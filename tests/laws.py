"""The contract of every head family: laws that a head obeys whatever it computes, and how to look for its worst point.

A family brings an `Instance`: how to build a head, the truth it approximates (python-flint, 60 digits) and where to
look. It then inherits every law. A law is a function that raises `AssertionError`; `test_laws.py` runs all laws over
all instances, and breaks one instance for each law to show that the law can fail.

Soundness has no tolerance: every error is computed with balls of 60 digits and compared with the stated bound exactly.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from flint import arb, ctx
from torch import Tensor

import attnforge as af
from attnforge.certificates.certified import CertifiedModule, check

DIGITS = 60
BITS = int(DIGITS * 3.33) + 64
Points = tuple[np.ndarray, ...]
#: One point (one array for each input, no batch) to the values there and the units that the bound is measured in.
Truth = Callable[..., tuple[list[arb], list[arb]]]
Build = Callable[[torch.dtype], CertifiedModule]


@dataclass(frozen=True)
class Space:
    """Where to look: `draw` spreads points over the domain, `near` moves points a little (0: by a few ulps)."""

    draw: Callable[[CertifiedModule, int, np.random.Generator], Points]
    near: Callable[[CertifiedModule, Points, float, np.random.Generator], Points]


@dataclass(frozen=True)
class Instance:
    """One head under the contract.

    `to_eps` builds a head of the same kind for a wanted accuracy, `eps` are accuracies to ask for, coarse to fine.
    `own` names tensors that are part of the target, so that changing them changes it.
    `soft` is a head that finite differences can follow, where `build` gives one that is too sharp for them; `effort`
    is how many points a search starts from.
    """

    name: str
    build: Build
    truth: Truth
    space: Space
    to_eps: Callable[[float, torch.dtype], CertifiedModule] | None = None
    eps: tuple[float, ...] = ()
    soft: Build | None = None
    effort: int = 1200
    own: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Found:
    """The worst point of a search: its error in units of the bound's scale, and whether all points kept the bound."""

    error: float
    at: tuple[object, ...]
    sound: bool


def tensors(points: Points) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(np.ascontiguousarray(p)) for p in points)


@torch.no_grad()
def errors(head: CertifiedModule, truth: Truth, points: Points, output: Tensor | None = None) -> list[arb]:
    """The error at every point of a batch (or of outputs computed elsewhere), as balls of 60 digits."""
    found = head(*tensors(points)) if output is None else output
    flat = found.detach().double().numpy().reshape(len(points[0]), -1)
    out = []
    with ctx.workprec(BITS):
        for i, row in enumerate(flat):
            values, units = truth(*(p[i].astype(np.float64) for p in points))
            assert len(values) == len(row), f"the truth has {len(values)} values, the head {len(row)}"
            out.append(worst([abs(arb(float(v)) - t) / unit for v, t, unit in zip(row, values, units, strict=True)]))
    return out


def worst(balls: list[arb]) -> arb:
    """The largest of some balls; NaN if there is one."""
    return next((b for b in balls if b.is_nan()), None) or max(balls, key=float)


def search(instance: Instance, head: CertifiedModule, seed: int = 0) -> Found:
    """Adversarial search: points all over the domain, then smaller and smaller moves around the worst, then ulps."""
    rng, count = np.random.default_rng(seed), instance.effort
    bound = head.bound
    assert bound is not None, "a soundness law needs a certified head"
    points = instance.space.draw(head, count, rng)
    found = errors(head, instance.truth, points)
    sound = all(e <= arb(bound) for e in found)
    for scale in (1.0 / count, 0.1 / count, 0.01 / count, 0.0, 0.0):
        rank = np.argsort([-math.inf if e.is_nan() else -float(e) for e in found])
        kept = rank[:8]
        copies = max(4, count // 50)
        moved = instance.space.near(head, tuple(np.repeat(p[kept], copies, axis=0) for p in points), scale, rng)
        more = errors(head, instance.truth, moved)
        sound = sound and all(e <= arb(bound) for e in more)
        points = tuple(np.concatenate([p[kept], m]) for p, m in zip(points, moved, strict=True))
        found = [found[i] for i in kept] + more
    top = int(np.argmax([math.inf if e.is_nan() else float(e) for e in found]))
    return Found(float(found[top]), tuple(p[top].tolist() for p in points), sound)


# --------------------------------------------------------------------------------------------- where to look


def ends(head: CertifiedModule) -> list[tuple[float, float]]:
    """The intervals of a head's box, widened to its dtype but not beyond the function's domain."""
    found = head.box.outward(head.dtype).intervals()
    function = getattr(head, "function", None)
    return found if function is None else [(max(a, function.domain.lo), min(b, function.domain.hi)) for a, b in found]


def scalars(*attract: float) -> Space:
    """Heads of one scalar: a dense grid in the potential's flat coordinate, and approaches to ends, kinks, anchors."""

    def draw(head: CertifiedModule, count: int, rng: np.random.Generator) -> Points:
        ((lo, hi),) = ends(head)
        potential = getattr(head, "potential", None)
        if potential is None or potential.name == "exact":
            grid, anchors = np.linspace(lo, hi, count), np.zeros(0)
        else:
            flat = np.sort(potential.flat(np.array([lo, hi])))
            grid, anchors = potential.unflat(np.linspace(*flat, count)), head.anchors.double().numpy()
        steps = np.concatenate([[0.0], np.geomspace(1e-19, 1, 80)]) * (hi - lo)
        near = [at + sign * steps for at in (lo, hi, 0.0, *attract) for sign in (-1, 1)]
        wild = rng.uniform(lo, hi, count // 8)
        return (_inside(np.concatenate([grid, anchors, *near, wild]), lo, hi, head),)

    return Space(draw, _shake)


def pairs(diagonal: bool = False) -> Space:
    """Heads of two scalars: a grid, the edges, small numbers and, on request, nearly equal ones."""

    def draw(head: CertifiedModule, count: int, rng: np.random.Generator) -> Points:
        (a, b), (c, d) = ends(head)
        side = max(4, math.isqrt(count // 2))
        x, y = (g.ravel() for g in np.meshgrid(np.linspace(a, b, side), np.linspace(c, d, side)))
        wild_x, wild_y = rng.uniform(a, b, (2, count // 4)), rng.uniform(c, d, (2, count // 4))
        shrink = np.exp2(-rng.uniform(0, 60, count // 4))
        near = wild_x[1] + shrink * (b - a) * rng.choice([-1.0, 1.0], count // 4) if diagonal else shrink * wild_y[1]
        edge = rng.choice([a, b], count // 4)
        xs = np.concatenate([x, wild_x[0], wild_x[1], edge])
        ys = np.concatenate([y, wild_y[0], near, wild_y[1]])
        keep = (xs >= a) & (xs <= b) & (ys >= c) & (ys <= d)
        return _inside(xs[keep], a, b, head, unique=False), _inside(ys[keep], c, d, head, unique=False)

    return Space(draw, _shake)


def vectors(width: int) -> Space:
    """A vector and a scalar: the pairs of `pairs`, with different entries in the vector."""

    def draw(head: CertifiedModule, count: int, rng: np.random.Generator) -> Points:
        x, y = pairs().draw(head, count, rng)
        return rng.permuted(np.repeat(x[:, None], width, axis=1), axis=0), y

    return Space(draw, _shake)


def cubes() -> Space:
    """Tensors between one lower and one upper bound: anywhere, corners, small numbers, and nearly equal ones."""

    def draw(head: CertifiedModule, count: int, rng: np.random.Generator) -> Points:
        (lo, hi), *_ = ends(head)
        shape = (max(4, count // 4), *head.box.shape)
        middle = rng.uniform(lo, hi, (shape[0], *(1 for _ in head.box.shape)))
        far = np.exp2(-rng.uniform(0, 50, middle.shape)) * (hi - lo)
        wild, corner = rng.uniform(lo, hi, shape), rng.choice([lo, hi], shape)
        near = middle + far * rng.choice([-1.0, 0.0, 1.0], shape)
        small = np.exp2(-rng.uniform(0, 50, shape)) * rng.uniform(lo, hi, shape)
        return (_inside(np.concatenate([wild, corner, near, small]), lo, hi, head, unique=False),)

    def near(head: CertifiedModule, points: Points, scale: float, rng: np.random.Generator) -> Points:
        ((lo, hi), *_), x = ends(head), points[0].astype(np.float64)
        ulp = np.spacing(np.abs(points[0])).astype(np.float64)
        step = ulp * rng.integers(-24, 25, x.shape) if scale == 0 else scale * (hi - lo) * rng.uniform(-1, 1, x.shape)
        return (_inside(np.where(rng.random(x.shape) < 0.5, x + step, x), lo, hi, head, unique=False),)

    return Space(draw, near)


def rows(channels: int, variance: tuple[float, float], offset: float) -> Space:
    """Rows of a norm: normal, two-valued, and with an outlier; every variance, means up to `offset` deviations."""
    lo, hi = variance[0] * (1 + 1e-5), variance[1] * (1 - 1e-5)

    def fitted(head: CertifiedModule, x: np.ndarray, v: np.ndarray, mean: np.ndarray) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True) * (offset > 0)
        centred /= np.sqrt(np.square(centred).mean(-1, keepdims=True))
        kind = torch.empty(0, dtype=head.dtype).numpy().dtype
        return (np.sqrt(v) * (centred + mean)).astype(kind)

    def draw(head: CertifiedModule, count: int, rng: np.random.Generator) -> Points:
        third = max(2, count // 3)
        normal = rng.standard_normal((third, channels))
        outlier = rng.standard_normal((third, channels)) * 10.0 ** rng.uniform(-4, 0, (third, 1))
        outlier[np.arange(third), rng.integers(0, channels, third)] = rng.choice([-1, 1], third) * np.sqrt(channels)
        level = rng.choice([-1.0, 1.0], (third, channels)) + 0.1 * rng.standard_normal((third, 1))
        x = np.concatenate([normal, outlier, level])
        v = np.exp(rng.uniform(np.log(lo), np.log(hi), (len(x), 1)))
        v[::7], v[3::7] = lo, hi
        mean = offset * rng.uniform(-1, 1, (len(x), 1)) * rng.choice([0.0, 0.01, 1.0], (len(x), 1))
        return (fitted(head, x, v, mean),)

    def near(head: CertifiedModule, points: Points, scale: float, rng: np.random.Generator) -> Points:
        x = points[0].astype(np.float64)
        if scale == 0:
            ulps = np.spacing(np.abs(points[0])) * rng.integers(-2, 3, x.shape)
            return ((points[0] + ulps).astype(points[0].dtype),)
        mean = x.mean(-1, keepdims=True) * (offset > 0)
        v = np.square(x - mean).mean(-1, keepdims=True)
        moved = x + np.sqrt(v) * rng.standard_normal(x.shape) * (rng.random(x.shape) < 0.2)
        wanted = np.clip(v * np.exp(20 * scale * rng.standard_normal(v.shape)), lo, hi)
        return (fitted(head, moved, wanted, mean / np.sqrt(v)),)

    return Space(draw, near)


def _inside(x: np.ndarray, lo: float, hi: float, head: CertifiedModule, unique: bool = True) -> np.ndarray:
    """Numbers of the head's dtype that lie in [lo, hi]."""
    kind = torch.empty(0, dtype=head.dtype).numpy().dtype
    fits = np.clip(x, lo, hi).astype(kind)
    fits = np.where(fits.astype(np.float64) < lo, np.nextafter(fits, kind.type(np.inf)), fits)
    fits = np.where(fits.astype(np.float64) > hi, np.nextafter(fits, kind.type(-np.inf)), fits)
    return np.unique(fits) if unique else fits


def _shake(head: CertifiedModule, points: Points, scale: float, rng: np.random.Generator) -> Points:
    """Points moved by a share of the interval, in the potential's flat coordinate where there is one."""
    potential, moved = getattr(head, "potential", None), []
    for p, (lo, hi) in zip(points, ends(head), strict=True):
        wide, share = p.astype(np.float64), scale * rng.uniform(-1, 1, p.shape)
        if scale == 0:
            wide = wide + np.spacing(np.abs(p)).astype(np.float64) * rng.integers(-24, 25, p.shape)
        elif potential is None or potential.name == "exact":
            wide = wide + share * (hi - lo)
        else:
            wide = potential.unflat(potential.flat(wide) + share * np.ptp(potential.flat(np.array([lo, hi]))))
        moved.append(_inside(wide, lo, hi, head, unique=False))
    return tuple(moved)


# ---------------------------------------------------------------------------------------- truths of one scalar


def _below_zero(left: Callable[[arb], arb]) -> Callable[[arb], arb]:
    return lambda y: y if y >= 0 else left(y)


def _clip(y: arb, lo: float, hi: float) -> arb:
    return arb(lo) if y < lo else arb(hi) if y > hi else y


def _sigmoid(y: arb) -> arb:
    return 1 / (1 + (-y).exp())


def _softplus(y: arb) -> arb:
    return y.exp().log1p()


def _selu(y: arb) -> arb:
    scale, alpha = arb(1.0507009873554805), arb(1.6732632423543772)
    return scale * (y if y >= 0 else alpha * y.expm1())


#: Every registered function once more, straight from its definition and without the registry's code.
FUNCTIONS: dict[str, Callable[[arb], arb]] = {
    "abs": abs,
    "acos": arb.acos,
    "acosh": arb.acosh,
    "asin": arb.asin,
    "asinh": arb.asinh,
    "atan": arb.atan,
    "atanh": arb.atanh,
    "cos": arb.cos,
    "cosh": arb.cosh,
    "cube": lambda y: y**3,
    "elu": _below_zero(arb.expm1),
    "erf": arb.erf,
    "erfc": arb.erfc,
    "exp": arb.exp,
    "exp2": lambda y: arb(2) ** y,
    "expm1": arb.expm1,
    "gelu": lambda y: y * (-y / arb(2).sqrt()).erfc() / 2,
    "gelu_tanh": lambda y: y * _sigmoid(2 * (2 / arb.pi()).sqrt() * (y + arb("0.044715") * y**3)),
    "hardsigmoid": lambda y: _clip((y + 3) / 6, 0, 1),
    "hardswish": lambda y: y * _clip((y + 3) / 6, 0, 1),
    "hardtanh": lambda y: _clip(y, -1, 1),
    "identity": lambda y: y,
    "leaky_relu": _below_zero(lambda y: y * 0.01),
    "log": arb.log,
    "log10": lambda y: y.log() / arb(10).log(),
    "xlogx": lambda y: y * y.log() if y > 0 else arb(0),
    "log1p": arb.log1p,
    "log2": lambda y: y.log() / arb(2).log(),
    "logsigmoid": lambda y: -_softplus(-y),
    "mish": lambda y: y * _softplus(y).tanh(),
    "quick_gelu": lambda y: y * _sigmoid(y * arb("1.702")),
    "reciprocal": lambda y: 1 / y,
    "relu": _below_zero(lambda y: arb(0)),
    "relu6": lambda y: _clip(y, 0, 6),
    "rsqrt": lambda y: 1 / y.sqrt(),
    "selu": _selu,
    "sigmoid": _sigmoid,
    "silu": lambda y: y * _sigmoid(y),
    "sin": arb.sin,
    "sinh": arb.sinh,
    "softplus": _softplus,
    "softsign": lambda y: y / (1 + abs(y)),
    "sqrt": arb.sqrt,
    "square": lambda y: y**2,
    "squared_relu": lambda y: y * y if y >= 0 else arb(0),
    "tan": arb.tan,
    "tanh": arb.tanh,
}


def of_scalar(function: Callable[[arb], arb], relative: bool = False) -> Truth:
    """The truth of a head of one scalar; with `relative` errors are measured in units of its size."""

    def truth(y: np.ndarray) -> tuple[list[arb], list[arb]]:
        value = function(arb(float(y)))
        return [value], [abs(value) if relative else arb(1)]

    return truth


# ---------------------------------------------------------------------------------------------------- the laws


def sound_in_float64(instance: Instance) -> None:
    """No point is found where the error exceeds the bound."""
    _sound(instance, instance.build(torch.float64))


def sound_in_float32(instance: Instance) -> None:
    """The same for the float32 head and its own certificate."""
    _sound(instance, instance.build(torch.float32))


def _sound(instance: Instance, head: CertifiedModule) -> None:
    found = search(instance, head)
    assert found.sound, f"{instance}: error {found.error:.6e} at {found.at}, certified {head.bound:.6e}"
    assert head.certificate.kind == "certified" and head.certificate.dtype == str(head.dtype).removeprefix("torch.")


def bound_shrinks_with_eps(instance: Instance) -> None:
    """Asking for less error gives a bound that keeps what was asked, and never a larger one."""
    if instance.to_eps is None:
        return
    bounds = [instance.to_eps(eps, torch.float64).bound for eps in instance.eps]
    for eps, bound in zip(instance.eps, bounds, strict=True):
        assert bound is not None and bound <= eps, f"{instance}: asked for {eps:g}, certified {bound}"
    assert bounds == sorted(bounds, reverse=True), f"{instance}: bounds {bounds} for eps {instance.eps}"


def batch_equals_loop(instance: Instance) -> None:
    """Any batch shape, contiguous or not, gives the shape of its batch and the same numbers up to the bound."""
    head, rng = instance.build(torch.float64), np.random.default_rng(1)
    points = tuple(p[rng.permutation(len(p))[:12]] for p in _together(instance.space.draw(head, 64, rng), rng))
    singles = [head(*(t[i] for t in tensors(points))) for i in range(12)]
    event = singles[0].shape
    _within(instance, head, points, torch.stack(singles))
    for shape in ((1,), (12,), (3, 4), (2, 1, 6), (2, 3, 1, 2)):
        size = math.prod(shape)
        taken = tuple(p[:size] for p in points)
        batched = head(*(t.reshape(*shape, *t.shape[1:]) for t in tensors(taken)))
        assert batched.shape == (*shape, *event), f"{instance}: batch {shape} gave {tuple(batched.shape)}"
        _within(instance, head, taken, batched)
    turned = head(*(t.reshape(3, 4, *t.shape[1:]).transpose(0, 1) for t in tensors(points)))
    _within(instance, head, points, turned.transpose(0, 1))
    empty = head(*(t[:0] for t in tensors(points)))
    assert empty.shape == (0, *event), f"{instance}: an empty batch gave {tuple(empty.shape)}"


def _together(points: Points, rng: np.random.Generator) -> Points:
    order = rng.permutation(len(points[0]))
    return tuple(p[order] for p in points)


def _within(instance: Instance, head: CertifiedModule, points: Points, output: Tensor) -> None:
    for i, error in enumerate(errors(head, instance.truth, points, output.reshape(len(points[0]), -1))):
        assert error <= arb(head.bound), f"{instance}: {float(error):.3e} > {head.bound:.3e} at point {i} of a batch"


def save_and_load_keep_every_bit(instance: Instance) -> None:
    """A file gives back the same weights, outputs and certificate, checks, and is written the same way twice."""
    for dtype in (torch.float32, torch.float64):
        head = instance.build(dtype)
        inputs = tensors(instance.space.draw(head, 50, np.random.default_rng(2)))
        with tempfile.TemporaryDirectory() as folder:
            first, second = Path(folder) / "a.safetensors", Path(folder) / "b.safetensors"
            head.save(first)
            again = af.load(first)
            again.save(second)
            assert first.read_bytes() == second.read_bytes(), f"{instance}: saving twice gives two files"
            assert check(first).bound == head.bound, f"{instance}: the checker finds another bound"
        assert again.certificate == head.certificate and again.dtype == dtype
        state, back = head.state_dict(), again.state_dict()
        assert state.keys() == back.keys() and all(torch.equal(state[k], back[k]) for k in state)
        assert torch.equal(head(*inputs), again(*inputs)), f"{instance}: the loaded head computes something else"


def gradients_are_right(instance: Instance) -> None:
    """Autograd agrees with finite differences, for inputs and for every trainable parameter."""
    head = copy.deepcopy((instance.soft or instance.build)(torch.float64))
    inputs = tuple(t.detach().clone().requires_grad_() for t in head.example_input())
    assert torch.autograd.gradcheck(head.core, inputs, raise_exception=False), f"{instance}: wrong gradient of inputs"
    names = [name for name, p in head.named_parameters() if p.requires_grad]
    assert names, f"{instance}: nothing to fine-tune"

    def by_parameters(*values: Tensor) -> Tensor:
        return torch.func.functional_call(head, dict(zip(names, values, strict=True)), inputs)

    state = dict(head.named_parameters())
    values = tuple(state[name].detach().clone().requires_grad_() for name in names)
    right = torch.autograd.gradcheck(by_parameters, values, raise_exception=False, fast_mode=True)
    assert right, f"{instance}: wrong gradient of parameters {names}"


def certificates_go_stale(instance: Instance) -> None:
    """Other weights or another dtype make the certificate raise, until `certify` makes one that holds."""
    original = instance.build(torch.float64)
    kept = {name: t.clone() for name, t in original.state_dict().items()}
    moved = copy.deepcopy((instance.soft or instance.build)(torch.float64)).to(torch.float32)
    _stale(instance, moved, "after .to(float32)")
    assert af.certify(moved).dtype == "float32" and moved.bound is not None
    _sound(instance, moved)
    trained = copy.deepcopy(original)
    optimiser = torch.optim.SGD([p for p in trained.parameters() if p.requires_grad], lr=1e-9)
    trained(*trained.example_input()).square().sum().backward()
    optimiser.step()
    changed = any(not torch.equal(kept[name], t) for name, t in trained.state_dict().items())
    assert changed, f"{instance}: the step changed nothing"
    _stale(instance, trained, "after an optimiser step")
    trained.load_state_dict(kept)
    assert trained.certificate.bound == original.bound, f"{instance}: the old weights keep their certificate"


def certificates_follow_the_tensors(instance: Instance) -> None:
    """After a cast, a trip through bfloat16 or a changed number a new certificate holds, or there is none."""
    for what, head in treated(instance):
        found = covered(instance, head)
        assert found is not False, f"{instance}: {what}, and the new bound {head.bound} does not hold"


def treated(instance: Instance, seed: int = 0) -> Iterator[tuple[str, CertifiedModule]]:
    """What can happen to stored numbers, in words, and the head afterwards: casts, and one changed entry of each
    tensor, one that is not 0 where there is one."""
    yield "float32 became float64", copy.deepcopy(instance.build(torch.float32)).to(torch.float64)
    yield "float64 became float32", copy.deepcopy(instance.build(torch.float64)).to(torch.float32)
    there = copy.deepcopy(instance.build(torch.float32)).to(torch.bfloat16)
    yield "bfloat16 in between", there.to(torch.float32)
    rng = np.random.default_rng(seed)
    for name, tensor in instance.build(torch.float32).state_dict().items():
        places = torch.nonzero(tensor) if tensor.count_nonzero() else torch.nonzero(tensor == 0)
        at = tuple(int(i) for i in places[rng.integers(len(places))]) if len(places) else ()
        for what, change in CHANGES.items():
            if name in instance.own and "nan" not in what:
                continue
            head = copy.deepcopy(instance.build(torch.float32))
            with torch.no_grad():
                number = head.state_dict()[name][at]
                number.copy_(change(number.clone()))
            yield f"{name}{list(at)} {what}", head


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "times 1.01": lambda x: x * 1.01,
    "plus 1": lambda x: x + 1,
    "made nan": lambda x: x * math.nan,
    "made 0": lambda x: x * 0,
}


def covered(instance: Instance, head: CertifiedModule, points: int = 48) -> bool | None:
    """Whether a certificate that is computed now holds at random points and the ends; None where there is none."""
    try:
        bound = af.certify(head).bound
    except af.CertificateError:
        return None
    rng = np.random.default_rng(3)
    drawn = instance.space.draw(head, points, rng)
    kept = np.unique(np.concatenate([[0, len(drawn[0]) - 1], rng.integers(0, len(drawn[0]), points)]))
    found = errors(head, instance.truth, tuple(p[kept] for p in drawn))
    return bound is not None and all(error <= arb(bound) for error in found)


def _stale(instance: Instance, head: CertifiedModule, when: str) -> None:
    try:
        bound = head.bound
    except af.CertificateError:
        return
    raise AssertionError(f"{instance}: the certificate still says {bound} {when}")


def export_equals_eager(instance: Instance) -> None:
    """What torch.export makes of a head computes the same."""
    head = instance.build(torch.float64).eval()
    example = head.example_input()
    _same(instance, head, torch.export.export(head, example).module()(*example), head(*example), "exported")


def compiled_equals_eager(
    instance: Instance, backend: str = "aot_eager", dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)
) -> None:
    """So does what torch.compile makes of it."""
    for dtype in dtypes:
        torch.compiler.reset()
        head = instance.build(dtype).eval()
        example = head.example_input()
        _same(instance, head, torch.compile(head, backend=backend, fullgraph=True)(*example), head(*example), backend)


def _same(instance: Instance, head: CertifiedModule, got: Tensor, wanted: Tensor, how: str) -> None:
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    if not torch.equal(got, wanted):  # another order of additions: then both must keep the bound
        _within(instance, head, tuple(t.detach().numpy() for t in head.example_input()), got)
        assert (got - wanted).abs().max() <= 1e-4 * wanted.abs().max(), f"{instance}: {how} differs from eager"


def purity_holds(instance: Instance) -> None:
    """The exported graph holds softmax attention and affine maps only."""
    try:
        census = af.purity(instance.build(torch.float32))
    except af.PurityError as error:
        raise AssertionError(f"{instance}: {error}") from error
    assert census.attention >= 1, f"{instance}: no attention at all"


#: What depends on the function that a head computes: for every head.
LAWS: tuple[Callable[[Instance], None], ...] = (
    sound_in_float64,
    sound_in_float32,
    bound_shrinks_with_eps,
    save_and_load_keep_every_bit,
    certificates_go_stale,
)
#: What depends on the operations alone: once for each form of head. So do `purity_holds` and `compiled_equals_eager`.
FORM_LAWS: tuple[Callable[[Instance], None], ...] = (batch_equals_loop, gradients_are_right, export_equals_eager)
