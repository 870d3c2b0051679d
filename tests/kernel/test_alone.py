"""Norms and chains on their own before the kernel: against exact rows, at their limits, and changed."""

from __future__ import annotations

import contextlib
import json
import random

import pytest
import torch
from flint import arb

from attnforge import theorems
from attnforge.certificates import storage
from attnforge.certificates.certificate import weights_hash
from attnforge.certificates.certified import CertifiedModule
from attnforge.compiler.alone import derive
from attnforge.errors import CertificateError
from attnforge.heads.chain.head import ChainHead
from attnforge.heads.fast.activation import FastActivation
from attnforge.heads.fast.read import read
from attnforge.heads.norm.head import NormHead
from attnforge.kernel.balls import NotProved, working
from attnforge.kernel.file import Saved, parse
from attnforge.kernel.prove import prove

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


@pytest.mark.parametrize("variant", ["warm", "gate"])
def test_a_ramp_is_proved_and_its_changes_are_covered_or_refused(variant: str) -> None:
    ramp = theorems.ramp(torch.tensor([1.0, -2.0]), 0.3, -1, 1, 16, variant=variant, radius=2.0)
    saved = parse(ramp.written())
    chosen = derive(ramp, saved, ramp.bound or 0.0)
    points = torch.cat([ramp.box.sample(2000, dtype=torch.float32), ramp.box.corners(4, torch.float32)])[:, None]

    @torch.no_grad()
    def error() -> float:
        off = (ramp.core(points).double() - ramp.target(points)).abs()
        return float(off.max()) if bool(off.isfinite().all()) else float("inf")

    assert not ramp.beyond and error() <= prove(saved, chosen).bound <= 1.1 * (ramp.bound or 0.0)
    draw, state = random.Random(variant), {key: t.clone() for key, t in ramp.state_dict().items()}
    for change in CHANGES:
        key = draw.choice(sorted(k for k in state if k.startswith("net.")))
        tensor = state[key].clone()
        at = draw.randrange(tensor.numel())
        tensor.view(-1)[at] = change(float(tensor.view(-1)[at]))
        ramp.load_state_dict({**state, key: tensor})
        try:
            found = prove(_written(ramp, saved), chosen).bound
        except CertificateError:
            continue
        assert error() <= found
    paper = theorems.ramp(torch.tensor([1.0, -2.0]), 0.3, -1, 1, 16, radius=2.0)
    assert paper.beyond and paper.certificate.word == "certified by the analysis alone"
    with pytest.raises(NotProved):
        prove(parse(paper.written()), chosen)


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
