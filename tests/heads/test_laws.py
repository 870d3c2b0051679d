"""Every law over every head family; and for every law a broken head that it catches."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flint import arb
from hypothesis import given, settings
from hypothesis import strategies as st

import attnforge as af
from attnforge.certificates.certificate import Certificate
from attnforge.certificates.certified import CertifiedModule
from attnforge.functions import registry as F
from attnforge.heads.chain.head import ChainHead
from attnforge.heads.fast.activation import FastActivation
from attnforge.heads.gate.head import GateHead
from attnforge.heads.norm.head import NormHead
from attnforge.heads.product.head import ProductHead
from attnforge.heads.token.head import TokenHead
from laws import (
    FORM_LAWS,
    FUNCTIONS,
    LAWS,
    Instance,
    batch_equals_loop,
    bound_shrinks_with_eps,
    certificates_follow_the_tensors,
    certificates_go_stale,
    compiled_equals_eager,
    cubes,
    export_equals_eager,
    gradients_are_right,
    of_scalar,
    pairs,
    purity_holds,
    rows,
    save_and_load_keep_every_bit,
    scalars,
    sound_in_float32,
    sound_in_float64,
    vectors,
)

# Where each registered function is tried; everything else on [-4, 4].
INTERVALS = {
    "acos": (-1.0, 1.0),
    "acosh": (1.0, 50.0),
    "asin": (-1.0, 1.0),
    "atanh": (-0.99, 0.99),
    "exp": (-4.0, 2.0),
    "gelu": (-8.0, 8.0),
    "log": (1e-3, 1e3),
    "log10": (0.1, 40.0),
    "xlogx": (0.0, 4.0),
    "log1p": (-0.9, 30.0),
    "log2": (0.1, 40.0),
    "reciprocal": (0.3, 200.0),
    "relu6": (-2.0, 8.0),
    "rsqrt": (1e-3, 1e3),
    "sigmoid": (-30.0, 30.0),
    "sin": (-6.3, 6.3),
    "sqrt": (0.0, 1.0),
    "tan": (-1.3, 1.3),
    "tanh": (-12.0, 12.0),
}
RELATIVE = ("reciprocal", "rsqrt")


def once(build: Callable[..., CertifiedModule]) -> Callable[..., Any]:
    """Build each head once per process: the laws that change a head work on copies."""
    return functools.lru_cache(maxsize=None)(build)


def anchor(name: str) -> Instance:
    lo, hi = INTERVALS.get(name, (-4.0, 4.0))
    relative = name in RELATIVE
    knots = F.get(name).knots

    def build(dtype: torch.dtype) -> CertifiedModule:
        return af.AnchorHead.fit(name, lo, hi, anchors=24, dtype=dtype, relative=relative)

    def to_eps(eps: float, dtype: torch.dtype) -> CertifiedModule:
        return af.AnchorHead.fit(name, lo, hi, eps=eps, dtype=dtype, relative=relative)

    low, high = F.enclose(name, lo, hi)
    scale = 1.0 if relative else high - low
    eps = (0.03 * scale, 0.01 * scale) if knots else (1e-2 * scale, 1e-5 * scale)
    truth = of_scalar(FUNCTIONS[name], relative)
    return Instance(f"anchor-{name}", once(build), truth, scalars(*knots), once(to_eps), eps)


def gate(
    name: str, lo: float, hi: float, truth: Callable[..., arb], knots: tuple[float, ...] = (), **options: Any
) -> Instance:
    def build(dtype: torch.dtype) -> CertifiedModule:
        return GateHead.fit(name, lo, hi, dtype=dtype, **options)

    def to_eps(eps: float, dtype: torch.dtype) -> CertifiedModule:
        return GateHead.fit(name, lo, hi, eps=eps, dtype=dtype, **options)

    def both(*point: np.ndarray) -> tuple[list[arb], list[arb]]:
        return [truth(*(arb(float(v)) for v in point))], [arb(1)]

    space = pairs(diagonal=True) if name in ("max", "min") else scalars(*knots)
    soft = functools.partial(to_eps, 1e-2 * hi)
    return Instance(f"gate-{name}", once(build), both, space, once(to_eps), (1e-2 * hi, 1e-5 * hi), soft)


def product(
    name: str, x: tuple[float, float], y: tuple[float, float], width: int | None = None, **options: Any
) -> Instance:
    def build(dtype: torch.dtype) -> CertifiedModule:
        return ProductHead.fit(x, y, dtype=dtype, width=width, **options)

    def to_eps(eps: float, dtype: torch.dtype) -> CertifiedModule:
        return ProductHead.fit(x, y, eps=eps, dtype=dtype, width=width, **options)

    def truth(a: np.ndarray, b: np.ndarray) -> tuple[list[arb], list[arb]]:
        values = [arb(float(v)) * arb(float(b)) for v in np.atleast_1d(a)]
        return values, [arb(1)] * len(values)

    size = max(map(abs, x)) * max(map(abs, y))
    space = pairs() if width is None else vectors(width)
    return Instance(f"product-{name}", once(build), truth, space, once(to_eps), (1e-2 * size, 1e-9 * size))


def norm(kind: str, channels: int, variance: tuple[float, float], affine: bool = False, effort: int = 300) -> Instance:
    offset = 100.0 if kind == "layer" else 0.0
    weight = torch.linspace(-2, 3, channels).round(decimals=0) / 4 if affine else None
    bias = torch.linspace(1, -1, channels).round(decimals=0) / 8 if affine else None
    options: dict[str, Any] = dict(kind=kind, weight=weight, bias=bias)

    def build(dtype: torch.dtype) -> CertifiedModule:
        return NormHead.fit(channels, variance, dtype=dtype, **options)

    def to_eps(eps: float, dtype: torch.dtype) -> CertifiedModule:
        return NormHead.fit(channels, variance, eps=eps, dtype=dtype, **options)

    def truth(row: np.ndarray) -> tuple[list[arb], list[arb]]:
        x = [arb(float(v)) for v in row]
        mean = sum(x, arb(0)) / channels if kind == "layer" else arb(0)
        c = [v - mean for v in x]
        deviation = (sum((v * v for v in c), arb(0)) / channels + arb(1e-5)).sqrt()
        n = [v / deviation for v in c]
        largest = max((abs(v) for v in n), key=float)
        if weight is None or bias is None:
            return n, [largest] * channels
        w, b = ([arb(float(v)) for v in t] for t in (weight, bias))
        values = [w[i] * n[i] + b[i] for i in range(channels)]
        return values, [abs(w[i]) * largest + abs(b[i]) + arb(1e-40) for i in range(channels)]

    name = f"norm-{kind}-{channels}{'-affine' if affine else ''}"
    space = rows(channels, variance, offset)
    own = ("weight", "bias") if affine else ()
    return Instance(name, once(build), truth, space, once(to_eps), (1e-2, 1e-8), effort=effort, own=own)


def token(mode: str, tokens: int = 4, channels: int = 3) -> Instance:
    generator = torch.Generator().manual_seed(5)
    matrix = torch.randn(tokens, tokens, generator=generator, dtype=torch.float64)

    def build(dtype: torch.dtype, **options: Any) -> CertifiedModule:
        sizes = dict(channels=channels, lo=-2.0, hi=3.0, dtype=dtype)
        match mode:
            case "gather":
                return TokenHead.gather(tokens, 2, **sizes)
            case "mix":
                return TokenHead.mix(matrix, **sizes)
        return getattr(TokenHead, mode)(tokens, **sizes, **options)

    def to_eps(eps: float, dtype: torch.dtype) -> CertifiedModule:
        return build(dtype, eps=eps)

    def truth(x: np.ndarray) -> tuple[list[arb], list[arb]]:
        column = [[arb(float(v)) for v in x[:, c]] for c in range(channels)]
        out = [one(column[c], i) for i in range(tokens) for c in range(channels)]
        return out, [arb(1)] * len(out)

    def one(values: list[arb], i: int) -> arb:
        match mode:
            case "gather":
                return values[2]
            case "mean":
                return sum(values, arb(0)) / tokens
            case "prefix_mean":
                return sum(values[: i + 1], arb(0)) / (i + 1)
            case "mix":
                return sum((arb(float(m)) * v for m, v in zip(matrix[i], values, strict=True)), arb(0))
        return (max if mode == "max" else min)(values, key=float)

    peak = mode in ("max", "min")
    soft = functools.partial(to_eps, 0.1) if peak else None
    extra = (once(to_eps), (1e-1, 1e-4)) if peak else (None, ())
    return Instance(f"token-{mode}", once(build), truth, cubes(), *extra, soft, effort=400)


def fast(name: str) -> Instance:
    build = functools.partial(FastActivation.fit, name, -9, 9)
    return Instance(f"fast-{name}", once(lambda dtype: build(dtype=dtype)), of_scalar(FUNCTIONS[name]), scalars())


def chain(name: str) -> Instance:
    build = functools.partial(ChainHead.fit, name, -8, 8, 1e-4)
    return Instance(f"chain-{name}", once(lambda dtype: build(dtype=dtype)), of_scalar(FUNCTIONS[name]), scalars())


def tent(y: arb) -> arb:
    return (y + 2) * 0.75 - 1 if y <= 0 else arb(0.5) - y if y <= 1.5 else (y - 1.5) * 2 - 1


GATES = [
    gate("relu", -4, 4, FUNCTIONS["relu"], (0.0,)),
    gate("ramp", -3, 5, lambda y: arb(-0.7) if y <= -0.7 else arb(1.3) if y >= 1.3 else y, (-0.7, 1.3), a=-0.7, b=1.3),
    gate("abs", -10, 10, abs, (0.0,)),
    gate("leaky_relu", -4, 4, lambda y: y if y >= 0 else y * arb(0.2), (0.0,), slope=0.2),
    gate("hard_tanh", -3, 3, FUNCTIONS["hardtanh"], (-1.0, 1.0)),
    gate("max", -5, 5, lambda x, y: x if x > y else y),
    gate("min", -5, 5, lambda x, y: x if x < y else y),
    gate("silu", -20, 20, FUNCTIONS["silu"]),
    gate("sigmoid", -30, 30, FUNCTIONS["sigmoid"]),
    gate("tanh", -12, 12, FUNCTIONS["tanh"]),
    gate("piecewise_linear", -3, 3, tent, (0.0, 1.5), xs=[-2.0, 0.0, 1.5, 2.5], ys=[-1.0, 0.5, -1.0, 1.0]),
]
PRODUCTS = [
    product("unit", (-1, 1), (-1, 1)),
    product("wide", (-1000, 1000), (-0.3, 0.3)),
    product("one-sided", (2.0, 9.0), (100.0, 104.0)),
    product("vector", (-2, 2), (-5, 1), width=3),
    product("tanh", (-1, 1), (-1, 1), method="tanh"),
]
NORMS = [norm("layer", 24, (0.4, 130.0)), norm("rms", 10, (1e-2, 1e2)), norm("layer", 16, (0.5, 4.0), affine=True)]
TOKENS = [token(mode) for mode in ("gather", "mean", "prefix_mean", "mix", "max", "min")]
ANCHORS = [anchor(name) for name in F.names()]
INSTANCES = [*ANCHORS, *GATES, *PRODUCTS, *NORMS, *TOKENS]
OTHERS = [*map(fast, ("gelu", "tanh", "quick_gelu", "relu")), *map(chain, ("hardswish", "selu"))]
#: One of each form of stored numbers; anchors take long, since every change is another function to them.
STORED = [*(i for i in ANCHORS if i.name == "anchor-relu"), *GATES, *PRODUCTS, *NORMS, *TOKENS, *OTHERS]


def test_every_registered_function_has_a_truth() -> None:
    assert set(F.names()) == set(FUNCTIONS)


# Which operations a head uses depends on its family and form, not on the function: one instance of each form will do.
FORMS = ("gelu", "reciprocal", "sigmoid", "relu", "ramp", "abs", "max", "unit", "vector", "24", "affine", "mix", "mean")


@pytest.mark.parametrize("instance", INSTANCES, ids=str)
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_law(law: Callable[[Instance], None], instance: Instance) -> None:
    law(instance)


# The function of an anchor head is in its stored numbers; its operations differ with kinks and relative errors at most.
TYPICAL = ("anchor-gelu", "anchor-reciprocal", "anchor-rsqrt", "anchor-relu")
FORMED = [instance for instance in INSTANCES if instance.name in TYPICAL or not instance.name.startswith("anchor-")]


@pytest.mark.parametrize("instance", FORMED, ids=str)
@pytest.mark.parametrize("law", FORM_LAWS, ids=lambda law: law.__name__)
def test_law_of_a_form(law: Callable[[Instance], None], instance: Instance) -> None:
    law(instance)


TRIED = ("gate-ramp", "gate-max", "product-vector", "norm-layer-16-affine", "token-mix", "token-max", "fast-gelu")


@pytest.mark.parametrize("instance", [i for i in STORED if i.name in TRIED], ids=str)
def test_certificates_follow_the_tensors(instance: Instance) -> None:
    """A few of each family: `benchmarks/house.py` tries them all."""
    certificates_follow_the_tensors(instance)


@pytest.mark.parametrize("instance", [i for i in INSTANCES if i.name.split("-")[-1] in FORMS], ids=str)
def test_purity_holds(instance: Instance) -> None:
    purity_holds(instance)


@pytest.mark.parametrize("instance", [anchor("gelu"), GATES[1], PRODUCTS[0], NORMS[0], TOKENS[3]], ids=str)
def test_compiled_equals_eager(instance: Instance) -> None:
    compiled_equals_eager(instance)


def test_a_large_norm_is_sound() -> None:
    instance = norm("layer", 384, (0.4, 130.0), effort=40)
    sound_in_float32(instance)
    sound_in_float64(instance)


# ------------------------------------------------------------------------------------- intervals that nobody chose

SIZES = st.floats(1e-3, 30.0)


@st.composite
def problem(draw: st.DrawFn) -> Instance:
    name = draw(st.sampled_from(["gelu", "sin", "exp", "softplus", "relu", "log", "reciprocal", "sqrt", "tanh"]))
    if name in ("log", "reciprocal", "sqrt"):
        lo = draw(st.floats(1e-4, 10.0) if name != "sqrt" else st.one_of(st.just(0.0), st.floats(1e-6, 10.0)))
    else:
        lo = draw(st.floats(-20.0, 10.0))
    hi = lo + draw(SIZES)
    count, relative = draw(st.integers(2, 40)), name == "reciprocal"
    cold = draw(st.booleans())

    def build(dtype: torch.dtype) -> CertifiedModule:
        options: dict[str, Any] = dict(anchors=count, dtype=dtype, relative=relative)
        return af.AnchorHead.fit(name, lo, hi, temperature="cold" if cold else "auto", **options)

    truth = of_scalar(FUNCTIONS[name], relative)
    how = f"{name} on [{lo!r}, {hi!r}], {count} {'cold' if cold else 'warm'} anchors"
    return Instance(how, once(build), truth, scalars(*F.get(name).knots), effort=300)


@given(problem())
@settings(max_examples=25, derandomize=True, deadline=None)
def test_any_interval_is_sound(instance: Instance) -> None:
    sound_in_float64(instance)
    sound_in_float32(instance)


@given(st.floats(-50, 50), SIZES, st.floats(-50, 50), SIZES)
@settings(max_examples=25, derandomize=True, deadline=None)
def test_any_product_is_sound(x: float, width: float, y: float, height: float) -> None:
    instance = replace(product("any", (x, x + width), (y, y + height)), effort=200)
    sound_in_float64(instance)
    sound_in_float32(instance)


# -------------------------------------------------------------------------------------------- each law can fail


def sabotage(instance: Instance, spoil: Callable[[Any], None], **changes: Any) -> Instance:
    """The instance with every head spoilt after it was certified."""

    def build(dtype: torch.dtype) -> CertifiedModule:
        head = copy.deepcopy(instance.build(dtype))
        spoil(head)
        return head

    return replace(instance, name=f"spoilt {instance}", build=once(build), **changes)


@torch.no_grad()
def nudge(head: Any, weight: str, amount: float) -> None:
    """Move one number of a head's weights by `amount` bounds and keep the certificate as if nothing had happened."""
    certificate = head.certificate
    tensor = head.get_parameter(weight).reshape(-1)
    tensor[len(tensor) // 2] += amount * certificate.bound
    head.attach(certificate)


def overclaim(head: Any) -> None:
    certificate = head.certificate
    head.attach(replace(certificate, bound=certificate.bound / 2, terms=()))


GELU = anchor("gelu")


@pytest.mark.parametrize(
    ("instance", "weight", "amount"),
    [
        (GELU, "layer.groups.0.M_V", 10.0),  # a value
        (GELU, "layer.groups.0.M_K", 1e3),  # an offset, which moves the weights of all anchors a little
        (GELU, "layer.S", 10.0),  # the linear skip
        (GATES[0], "layer.groups.0.W_V", 10.0),
        (PRODUCTS[0], "layer.groups.0.W_O", 1e3),
        (NORMS[0], "mix", 1e3),
        (TOKENS[1], "attention.W_O", 10.0),
    ],
    ids=lambda value: str(value),
)
def test_soundness_catches_a_nudged_weight(instance: Instance, weight: str, amount: float) -> None:
    spoilt = sabotage(instance, lambda head: nudge(head, weight, amount))
    with pytest.raises(AssertionError, match="certified"):
        sound_in_float64(spoilt)
    with pytest.raises(AssertionError, match="certified"):
        sound_in_float32(spoilt)


def test_soundness_catches_half_a_bound() -> None:
    with pytest.raises(AssertionError, match="certified"):
        sound_in_float64(sabotage(GELU, overclaim))


def test_soundness_catches_nan() -> None:
    with pytest.raises(AssertionError, match="certified"):
        sound_in_float64(sabotage(GELU, lambda head: setattr(head, "core", lambda y: y / 0 * 0)))


def test_shrinking_catches_a_head_that_ignores_eps() -> None:
    always = lambda eps, dtype: af.AnchorHead.fit("gelu", -8, 8, anchors=4, dtype=dtype)  # noqa: E731
    with pytest.raises(AssertionError, match="asked for"):
        bound_shrinks_with_eps(replace(GELU, to_eps=always))
    finer_first = replace(GELU, eps=GELU.eps[::-1])
    with pytest.raises(AssertionError, match="bounds"):
        bound_shrinks_with_eps(finer_first)


def test_batching_catches_a_head_that_ignores_the_batch() -> None:
    def first_only(head: Any) -> None:
        core = head.core
        head.core = lambda y: core(y.reshape(-1)[:1]).reshape(()).expand(y.shape)

    def flat_only(head: Any) -> None:
        core = head.core
        head.core = lambda y: core(y).reshape(-1) if y.dim() else core(y)

    for spoil in (first_only, flat_only):
        with pytest.raises(AssertionError, match="batch"):
            batch_equals_loop(sabotage(GELU, spoil))


def test_saving_catches_what_no_file_holds() -> None:
    def unsaved(head: Any) -> None:
        core = head.core
        head.core = lambda y: core(y) + 2.0**-20

    with pytest.raises(AssertionError, match="something else"):
        save_and_load_keep_every_bit(sabotage(GELU, unsaved))


def test_gradients_catch_a_detached_input() -> None:
    def detached(head: Any) -> None:
        core = head.core
        head.core = lambda y: core(y.detach()) + 0 * y

    with pytest.raises(AssertionError, match="gradient of inputs"):
        gradients_are_right(sabotage(GELU, detached))
    with pytest.raises(AssertionError, match="nothing to fine-tune"):
        gradients_are_right(sabotage(GELU, lambda head: head.requires_grad_(False)))


class Forgetful(af.AnchorHead):
    """A head that never looks whether its certificate is still that of its weights."""

    family = ""
    certificate = property(lambda self: self._certificate)  # type: ignore[assignment]


def test_staleness_catches_a_certificate_that_never_expires() -> None:
    def forget(head: Any) -> None:
        head.__class__ = Forgetful

    with pytest.raises(AssertionError, match="still says"):
        certificates_go_stale(sabotage(GELU, forget))


def test_following_catches_a_certificate_of_what_was_stored_once() -> None:
    class Believing(GateHead):
        """A head that certifies the weights it was built with."""

        family = ""

        def recertify(self) -> Certificate:
            return GATES[1].build(self.dtype).certificate

    def believe(head: Any) -> None:
        head.__class__ = Believing

    with pytest.raises(AssertionError, match="does not hold"):
        certificates_follow_the_tensors(sabotage(GATES[1], believe))


def test_export_and_compile_catch_a_head_that_knows_it_is_traced() -> None:
    def traced(head: Any) -> None:
        core = head.core
        head.core = lambda y: core(y) + 1e-3 if torch.compiler.is_compiling() else core(y)

    with pytest.raises(AssertionError):
        export_equals_eager(sabotage(GELU, traced))
    with pytest.raises(AssertionError):
        compiled_equals_eager(sabotage(GELU, traced))


def test_purity_catches_another_nonlinearity() -> None:
    def impure(head: Any) -> None:
        core = head.core
        head.core = lambda y: core(y).sin()

    with pytest.raises(AssertionError, match="sin"):
        purity_holds(sabotage(GELU, impure))
    with pytest.raises(AssertionError):
        purity_holds(sabotage(GELU, lambda head: setattr(head, "core", lambda y: 2 * y)))
