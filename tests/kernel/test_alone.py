"""Norms and chains on their own before the kernel: against exact rows, at their limits, and changed."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from flint import arb

from attnforge import theorems
from attnforge.certificates import storage
from attnforge.certificates.certificate import weights_hash
from attnforge.certificates.certified import CertifiedModule
from attnforge.compiler.alone import derive
from attnforge.errors import CertificateError
from attnforge.heads.anchor.head import AnchorHead
from attnforge.heads.chain.head import ChainHead
from attnforge.heads.fast.activation import FastActivation
from attnforge.heads.fast.read import read
from attnforge.heads.gate.head import GateHead
from attnforge.heads.norm.head import NormHead
from attnforge.heads.product.head import ProductHead
from attnforge.heads.token.bound import UNDERFLOW
from attnforge.kernel.alone.heads import entries, picked
from attnforge.kernel.balls import NotProved, working
from attnforge.kernel.file import Saved, parse
from attnforge.kernel.prove import prove
from attnforge.theorems.ramps import Ramp

CHANGES = [
    lambda x: 1.01 * x, lambda x: x + 1, lambda x: float("nan"), lambda x: 0.0, lambda x: 1e30, lambda x: 1e-30,
]  # fmt: skip
NORMS = {
    "layer": lambda: NormHead.fit(6, (0.4, 5.0), heads=6),
    "rms": lambda: NormHead.fit(
        5, (0.5, 2.0), heads=5, kind="rms", weight=torch.linspace(-2, 3, 5), bias=torch.ones(5)
    ),
    "float64": lambda: NormHead.fit(4, (0.5, 2.0), heads=6, dtype=torch.float64),
}


FAST = {
    "tanh": lambda: FastActivation.fit("tanh", -3, 3),
    "silu": lambda: FastActivation.fit("silu", -2, 2, dtype=torch.float64),
    "relu": lambda: FastActivation.fit("relu", -1, 1),
    "gelu": lambda: FastActivation.fit("gelu", -2, 3, anchors=12),
    "mish": lambda: FastActivation.fit("mish", -2, 2, anchors=15),
}


def _norm_error(head: NormHead, rows: torch.Tensor) -> float:
    """The largest error of rows in the certificate's own unit, in ball arithmetic."""
    d, worst = head.channels, 0.0
    weight = [1.0] * d if head.weight is None else head.weight.tolist()
    bias = [0.0] * d if head.bias is None else head.bias.tolist()
    with torch.no_grad(), working():
        for row, out in zip(rows.tolist(), head.core(rows).tolist(), strict=True):
            x = [arb(v) for v in row]
            mean = sum(x, arb(0)) / d if head.kind == "layer" else arb(0)
            c = [v - mean for v in x]
            root = (sum((v * v for v in c), arb(0)) / d + arb(head.eps_norm)).sqrt()
            n = [v / root for v in c]
            top = max(abs(float(v)) for v in n)
            for got, v, w, b in zip(out, n, weight, bias, strict=True):
                scale = abs(w) * top + abs(b)
                off = abs(float(arb(got) - v * arb(w) - arb(b))) if got == got else float("inf")
                worst = max(worst, 0.0 if off == 0 else off / scale if scale else float("inf"))
    return worst


def _rows(head: NormHead, count: int) -> torch.Tensor:
    """Rows of variances up to the ends of the interval, and as far from 0 as they may be."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, head.channels, generator=generator, dtype=torch.float64) ** 3
    x = x - x.mean(-1, keepdim=True) if head.kind == "layer" else x
    low, high = head.variance
    share = torch.linspace(0, 1, count, dtype=torch.float64)[:, None]
    x = x / x.square().mean(-1, keepdim=True).sqrt() * (low * (high / low) ** share).sqrt()
    far = torch.tensor([0.0, head.offset, -0.5])[torch.arange(count) % 3, None] if head.kind == "layer" else 0.0
    return (x + far * x.square().mean(-1, keepdim=True).sqrt()).to(head.dtype)


def _written(head: CertifiedModule, saved: Saved) -> Saved:
    header = {key: value for key, value in saved.header.items() if key not in ("digest", "format")}
    return parse(storage.written(header, weights_hash(head), head.state_dict()))


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_proved_and_its_changes_are_covered_or_refused(name: str) -> None:
    head = NORMS[name]()
    saved = parse(head.written())
    chosen = derive(head, saved, head.bound or 0.0)
    rows, bound = _rows(head, 60), prove(saved, chosen).bound
    assert _norm_error(head, rows) <= bound <= 1.1 * (head.bound or 0.0)
    draw, state = random.Random(name), {key: t.clone() for key, t in head.state_dict().items()}
    for change in CHANGES:
        key = draw.choice(sorted(state))
        tensor = state[key].clone()
        tensor[draw.randrange(len(tensor))] = change(float(tensor[0]))
        head.load_state_dict({**state, key: tensor})
        try:
            found = prove(_written(head, saved), chosen).bound
        except CertificateError:
            continue
        assert _norm_error(head, rows) <= found  # weight and bias are the target's too
    with pytest.raises(CertificateError, match="cover"):
        prove(saved, {"edges": chosen["edges"][:-1]})


def test_weights_too_small_for_a_normal_number_are_charged() -> None:
    head = NormHead.fit(4, (0.4, 5.0), heads=6, weight=torch.full((4,), 1e-44))
    error = _norm_error(head, _rows(head, 60))
    saved = parse(head.written())
    assert error > 1e-3  # a product of two such numbers has a few bits
    assert head.bound is not None and error <= head.bound and error <= prove(saved, derive(head, saved, 1.0)).bound


@pytest.mark.parametrize("name", ["hardswish", "elu"])
def test_a_chain_is_proved_and_its_changes_are_covered_or_refused(name: str) -> None:
    head, truth = ChainHead.fit(name, -4, 4, eps=1e-2), getattr(torch.nn.functional, name)
    saved = parse(head.written())
    chosen = derive(head, saved, head.bound or 0.0)
    points = torch.cat([torch.linspace(-4, 4, 4001), torch.linspace(-1e-6, 1e-6, 101)])

    @torch.no_grad()
    def error() -> float:
        off = (head.core(points).double() - truth(points.double())).abs()
        return float(off.max()) if bool(off.isfinite().all()) else float("inf")

    assert error() <= prove(saved, chosen).bound <= 1.1 * (head.bound or 0.0)
    draw, state = random.Random(name), {key: t.clone() for key, t in head.state_dict().items()}
    for change in CHANGES:
        key = draw.choice(sorted(k for k in state if not k.endswith("anchors")))
        tensor = state[key].clone()
        at = draw.randrange(tensor.numel())
        tensor.view(-1)[at] = change(float(tensor.view(-1)[at]))
        head.load_state_dict({**state, key: tensor})
        try:
            found = prove(_written(head, saved), chosen).bound
        except CertificateError:
            continue
        assert error() <= found


@pytest.mark.parametrize("name", FAST)
def test_a_fast_activation_is_proved_and_its_changes_are_covered_or_refused(name: str) -> None:
    """Lemma K36, in both dtypes: odd and even tables, a centre, gates alone; as operators and as plain PyTorch."""
    head = FAST[name]()
    saved = parse(head.written())
    chosen, truth = derive(head, saved, head.bound or 0.0), head.function.value
    y = torch.cat([torch.linspace(head.lo, head.hi, 3001), torch.linspace(-1e-3, 1e-3, 101)]).to(head.dtype)
    low, high = head.interval_in_dtype()
    y = y.clamp(low, high)

    @torch.no_grad()
    def error() -> float:
        value, t = head.values, head.table
        both = (head.core(y), read(y, value, t.rate, t.kappa, t.centre, t.gate))
        off = [(out.double() - truth(y.double())).abs() for out in both]
        return max(float(x.max()) if bool(x.isfinite().all()) else float("inf") for x in off)

    assert error() <= prove(saved, chosen).bound <= 1.1 * (head.bound or 0.0)
    draw, state = random.Random(name), {key: t.clone() for key, t in head.state_dict().items()}
    for change in CHANGES:
        for key in (draw.choice(sorted(state)), sorted(state)[-1 if head.size else 0]):
            tensor = state[key].clone()
            at = draw.randrange(tensor.numel())
            tensor.view(-1)[at] = change(float(tensor.view(-1)[at]))
            head.load_state_dict({**state, key: tensor})
            try:
                found = prove(_written(head, saved), chosen).bound
            except CertificateError:
                continue
            assert error() <= found
    head.load_state_dict(state)
    others = {"rate": 3.0, "kappa": 0.3125, "centre": 0.5, "gate": 0.75, "anchors": 3}
    for key in others if head.size else ("gate", "anchors"):  # the heads are not those of such a table
        header = json.loads(json.dumps(saved.header))
        header["config"]["table"][key] = others[key]
        with pytest.raises(CertificateError):
            prove(Saved(header, saved.tensors, ""), chosen)
    header = json.loads(json.dumps(saved.header))
    header["config"] |= {"function": "hardtanh"}
    with contextlib.suppress(CertificateError):
        assert prove(Saved(header, saved.tensors, ""), chosen).bound > 0.1
    for edges in ([-1.0, 1.0], [low, high], chosen["edges"][:-1], chosen["edges"][::-1], "x", None):
        with pytest.raises(CertificateError):
            prove(saved, {"edges": edges})


def _square(low: float, high: float, anchors: int, **options: Any) -> Callable[[], AnchorHead]:
    return lambda: AnchorHead.fit("sin", low, high, anchors=anchors, potential="square", fast=True, **options)


ALONE: dict[str, Callable[[], CertifiedModule]] = {
    "larger": lambda: GateHead.max(-2, 3),
    "smaller": lambda: GateHead.min(5, 6, eps=1e-3, dtype=torch.float64),
    "product of a vector": lambda: ProductHead.fit((-1, 2), (-1, 1), width=3),
    "product of one entry": lambda: ProductHead.fit((-1, 1), (7, 9), width=1, dtype=torch.float64),
    "one quotient": _square(-2, 3, 10),
    "relative": lambda: AnchorHead.fit("exp", -2, 2, anchors=15, potential="square", fast=True, relative=True),
    "a window": _square(-2, 2, 36, kappa=0.5),
    "a pair in float64": _square(-2, 2, 11, kappa=50.0, temperature="cold", dtype=torch.float64),
    "a pair": _square(-2, 2, 10, kappa=18.0, temperature="cold"),
    "half precision": lambda: FastActivation.fit("gelu", -3, 3, dtype=torch.bfloat16),
    "a gate in half precision": lambda: FastActivation.fit("silu", -3, 3, dtype=torch.bfloat16),
}


def _largest(head: Any, count: int = 4000) -> float:
    """The largest error of a head at points of its box, corners and where numbers are alike among them."""
    wide = head.box.outward(head.dtype)
    low, high = (end.reshape(-1).double() for end in (wide.lower, wide.upper))
    share = torch.rand(count, len(low), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    share[: count // 4] = share[: count // 4].round()
    share[count // 4 : count // 2] = share[count // 4 : count // 2, :1] + 1e-7 * share[count // 4 : count // 2]
    x = (low + (high - low) * share).to(head.dtype)
    x = torch.minimum(torch.maximum(x, low.to(head.dtype)), high.to(head.dtype))
    exact, unit = x.double(), 1.0
    with torch.no_grad():
        if isinstance(head, ProductHead):
            rows = x[:, :1].repeat(1, head.width or 1) * torch.linspace(0.5, 1, head.width or 1, dtype=head.dtype)
            rows = torch.minimum(torch.maximum(rows, low[0].to(head.dtype)), high[0].to(head.dtype))
            found, wanted = head.core(rows, x[:, 1]), rows.double() * exact[:, 1:]
        elif isinstance(head, GateHead):
            found = head.core(*x.unbind(-1))
            wanted = exact.amax(-1) if head.name == "max" else exact.amin(-1)
        else:
            found, wanted = head.core(x[:, 0]), head.function.value(exact[:, 0])
            unit = wanted.abs() if getattr(head, "relative", False) else 1.0
    off = (found.double() - wanted).abs() / unit
    return float(off.max()) if bool(off.isfinite().all()) else float("inf")


@pytest.mark.parametrize("name", ALONE)
def test_a_head_is_proved_and_its_changes_are_covered_or_refused(name: str) -> None:
    """Lemmas K27, K37, K38 and K39 on what is stored."""
    head = ALONE[name]()
    saved = parse(head.written())
    chosen, bound = derive(head, saved, head.bound or 0.0), head.bound or 0.0
    assert _largest(head) <= prove(saved, chosen).bound <= 1.01 * bound
    draw, state, refused = random.Random(name), {key: t.clone() for key, t in head.state_dict().items()}, 0
    for change in CHANGES:
        for key in draw.choices(sorted(set(state) - {"anchors"}), k=2):
            tensor = state[key].clone()
            at = draw.randrange(tensor.numel())
            tensor.view(-1)[at] = change(float(tensor.view(-1)[at]))
            head.load_state_dict({**state, key: tensor})
            try:
                found = prove(_written(head, saved), chosen).bound
            except CertificateError:
                refused += 1
                continue
            assert _largest(head) <= found
    assert 2 <= refused < 2 * len(CHANGES) or name == "a gate in half precision"
    for wrong in ({}, None, {"edges": []}, {"edges": [1.0, -1.0]}, {"edges": [-0.25, 0.0, 0.25]}):
        with pytest.raises(CertificateError):
            prove(saved, wrong)


def test_a_description_that_does_not_fit_its_head_is_refused_or_covered() -> None:
    head = ALONE["a window"]()
    saved = parse(head.written())
    chosen, config = derive(head, saved, 1.0), saved.header["config"]
    for i, value in ((0, 1.01 * config["fast"][0]), (1, 0.75), (2, 0.5), (4, True), (4, 1), (0, "x"), (1, -1.0)):
        fast = [value if j == i else x for j, x in enumerate(config["fast"])]
        header = {**saved.header, "config": {**config, "fast": fast}}
        try:
            found = prove(Saved(header, saved.tensors, ""), chosen).bound
        except CertificateError:
            continue
        head.lattice = type(head.lattice)(*fast)  # type: ignore[misc]
        assert _largest(head) <= found
    for name, change in (("larger", {"name": "min"}), ("smaller", {"name": "max"}), ("larger", {"lo": 9.0})):
        head = ALONE[name]()
        saved = parse(head.written())
        chosen = derive(head, saved, 1.0)
        header = {**saved.header, "config": {**saved.header["config"], **change}}
        with contextlib.suppress(CertificateError):
            assert prove(Saved(header, saved.tensors, ""), chosen).bound > 0.9
    swapped = ProductHead.fit((-1, 1), (7, 9), width=1)
    swapped.swapped = True  # what runs does not look at it
    with pytest.raises(CertificateError, match="order"):
        type(swapped).rebuild(swapped.config(), swapped.state_dict())


W, EACH = torch.tensor([1.0, -2.0]), torch.tensor([[1.0, -2.0], [0.5, 1.0]])
RAMPS: dict[str, Callable[[], Ramp]] = {
    "warm": lambda: theorems.ramp(W, 0.3, -1, 1, 16, variant="warm", radius=2.0),
    "gate": lambda: theorems.ramp(W, 0.3, -1, 1, 16, variant="gate", radius=2.0, channels=2),
    "paper": lambda: theorems.ramp(W, 0.3, -1, 1, 7, radius=2.0, G=1, channels=3),
    "tokens": lambda: theorems.ramp(W.double(), 0.3, -1, 1.3, 6, radius=2.0, form="tokens"),
    "tokens, causal": lambda: theorems.ramp(W, 0.3, -1, 1.3, 6, radius=2.0, form="tokens", causal=True, channels=2),
    "warm, causal": lambda: theorems.ramp(W, 0.3, -1, 1, 8, variant="warm", radius=2.0, causal=True),
    "leaky": lambda: theorems.leaky_relu(W, 0.3, 2.0, 9, slope=-0.25),
    "weights of their own": lambda: theorems.ramp(EACH, [0.3, 0.1], -1, 1, 6, radius=2.0),
    "heads": lambda: theorems.ramp_heads(W, 0.3, -1, 1, 2, 5, radius=2.0, channels=2),
    "heads, warm, causal": lambda: theorems.ramp_heads(W, 0.3, -1, 1, 2, 7, radius=2.0, variant="warm", causal=True),
}


@pytest.mark.parametrize("name", RAMPS)
def test_a_ramp_is_proved_and_its_changes_are_covered_or_refused(name: str) -> None:
    """Lemmas K30 and K45, in every form."""
    ramp = RAMPS[name]()
    saved = parse(ramp.written())
    chosen, n = derive(ramp, saved, ramp.bound or 0.0), ramp.scalars
    drawn = torch.cat([ramp.box.sample(2000, dtype=ramp.dtype), ramp.box.corners(4, ramp.dtype)])
    points = drawn[: len(drawn) // n * n].reshape(-1, n, 2)

    @torch.no_grad()
    def error() -> float:
        off = (ramp.core(points).double() - ramp.target(points)).abs()
        return float(off.max()) if bool(off.isfinite().all()) else float("inf")

    assert not ramp.beyond and error() <= prove(saved, chosen).bound <= 1.1 * (ramp.bound or 0.0)
    assert (UNDERFLOW in ramp.certificate.assumptions) == ramp.causal  # what hides data, and is assumed of exponentials
    draw, state, refused = random.Random(name), {key: t.clone() for key, t in ramp.state_dict().items()}, 0
    run = sorted(key for key in state if key not in ("w", "t") or ramp.form == "paper")
    for change in CHANGES:
        for key in draw.choices(run, k=2):
            tensor = state[key].clone()
            at = draw.randrange(tensor.numel())
            tensor.view(-1)[at] = change(float(tensor.view(-1)[at]))
            ramp.load_state_dict({**state, key: tensor})
            try:
                found = prove(_written(ramp, saved), chosen).bound
            except CertificateError:
                refused += 1
                continue
            assert error() <= found
    assert 1 <= refused < 2 * len(CHANGES)
    ramp.load_state_dict({**state, run[0]: torch.full_like(state[run[0]], float("nan"))})
    with pytest.raises(CertificateError):
        derive(ramp, _written(ramp, saved), 1.0)
    ramp.load_state_dict(state)
    for change in ({"dtype": "float16"}, {"w": [1.0]}, {"channel": [9]}, {"radius": -1.0}, {"causal": 1}, {"a": 9.0}):
        header = {**saved.header, "config": {**saved.header["config"], **change}}
        with pytest.raises(CertificateError):
            prove(Saved(header, saved.tensors, ""), chosen)
    for change in ({"t": 1.3}, {"b": 2.5}, {"slope": 0.5}):
        header = {**saved.header, "config": {**saved.header["config"], **change}}
        with contextlib.suppress(CertificateError):
            assert prove(Saved(header, saved.tensors, ""), chosen).bound > 0.2


def test_a_ramp_of_several_channels_holds_only_where_the_certificate_speaks() -> None:
    """K48: changed channels, margins and values are refused or covered, outside of the middles; within, nothing is."""
    ramp = theorems.ramp(W, 0.3, -1, 1, 8, radius=2.0, G=[0] * 4 + [1, 2, 2, 2], form="tokens")
    saved = parse(ramp.written())
    chosen = derive(ramp, saved, 1.0)
    assert prove(saved, chosen).bound <= 1.1 * ramp.bound  # type: ignore[operator]
    for change, least in (
        ({"margin": 1e-4}, 0.2), ({"channel": [0] * 5 + [2] * 3}, 0.2), ({"channel": [0, 1] * 4}, 0.9),
        ({"channel": [0, 1]}, 0.4), ({"b": 1.5}, 0.4), ({"w": [1.0, 1.0]}, 2.0),
    ):  # fmt: skip
        header = {**saved.header, "config": {**saved.header["config"], **change}}
        with contextlib.suppress(CertificateError):
            assert prove(Saved(header, saved.tensors, ""), chosen).bound > least, change
    for change in ({"margin": 0.5}, {"margin": -1.0}, {"channels": 2}, {"channel": [0] * 7 + [9]}):
        header = {**saved.header, "config": {**saved.header["config"], **change}}
        with pytest.raises(CertificateError):
            prove(Saved(header, saved.tensors, ""), chosen)
    edges = {"edges": chosen["edges"][1:]}
    with pytest.raises(CertificateError, match="cover"):
        prove(saved, edges)


def test_entries_of_a_vector_with_equal_numbers_stand_for_each_other() -> None:
    """K27: a number of one entry makes it another one; entries that read each other are none that stand alone."""
    head = ProductHead.fit((0, 1), (-1, 1), width=9)
    saved = parse(head.written())
    config = saved.header["config"]
    assert entries(config, saved.tensors) == [0]
    for name, tensor in saved.tensors.items():
        for k in range(0, len(tensor.numbers), 3):
            new = replace(tensor, numbers=(*tensor.numbers[:k], tensor.numbers[k] + 0.25, *tensor.numbers[k + 1 :]))
            tensors = {**saved.tensors, name: new}
            try:
                kept = entries(config, tensors)
            except NotProved:
                row, column = k // tensor.shape[-1] % tensor.shape[-2], k % tensor.shape[-1]
                assert name[-3:] in ("W_Q", "W_V", "W_O", "r.S") and row < 9 and (name.endswith("W_Q") or row != column)
                continue
            shared = name.endswith(("W_Q", "b_Q", "b_K", "M_K"))  # what all entries read
            entry = k % 9
            assert kept == ([0] if shared else [0, 1] if entry == 0 else [0, entry])
            some = picked(tensors, kept)
            assert all(len(x.numbers) <= len(tensors[one].numbers) for one, x in some.items())



def test_a_chain_for_another_function_has_the_difference_in_its_bound() -> None:
    head = ChainHead.fit("hardswish", -4, 4, eps=1e-2)
    saved = parse(head.written())
    chosen = derive(head, saved, 1.0)
    header = json.loads(json.dumps(saved.header))
    header["config"]["function"] = "relu"
    wrong = Saved(header, saved.tensors, saved.weights)
    assert 0.375 <= prove(wrong, chosen).bound <= 0.4  # |hardswish - relu| is 3/8 at its largest, at 1.5 and -1.5
    header["config"]["function"] = "softsign"
    with pytest.raises(CertificateError):
        prove(Saved({**header, "config": {**header["config"], "heads": {}}}, saved.tensors, ""), chosen)
