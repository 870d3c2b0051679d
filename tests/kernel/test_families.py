"""No family is forgotten: whatever can carry a certificate that says "certified" has an example here which the kernel
proves, or stands in a short table of what is still open, and says itself that it is proved by the analysis alone."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import attnforge as af
from attnforge import rasp, theorems
from attnforge.certificates.certified import HOMES
from attnforge.compiler.derivation import proved
from attnforge.groundtruth import vary
from attnforge.heads.anchor.fit import MOST_ANCHORS
from attnforge.heads.chain.head import ChainHead
from attnforge.heads.fast.activation import FastActivation
from attnforge.heads.gate.head import GateHead
from attnforge.heads.norm.head import NormHead
from attnforge.heads.product.head import ProductHead
from attnforge.heads.token.head import TokenHead
from attnforge.kernel.alone.fast import MOST as anchors_at_most

SRC = Path(__file__).resolve().parents[2] / "src" / "attnforge"
W = torch.tensor([1.0, -2.0])


def wave(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1, keepdim=True).sin()


def formula(dtype: torch.dtype = torch.float32) -> Any:
    return af.compile("x*y", af.Box(x=(-1, 1), y=(0, 1)), eps=1e-2, dtype=dtype)


def several() -> Any:
    domain = rasp.Sequences("ab", 3)
    return af.compile({"reverse": rasp.library.reverse(), "count": rasp.library.get("hist2").build()}, domain)


#: Every family of a file -> what of it the kernel proves.
PROVED: dict[str, dict[str, Callable[[], Any]]] = {
    "anchor": {
        "anchors": lambda: af.AnchorHead.fit("sin", -2, 2, anchors=16),
        "many anchors": lambda: af.AnchorHead.fit("sin", -2, 2, anchors=150, kappa=0.5),
        "many anchors, read with one exponential": lambda: af.AnchorHead.fit(
            "sin", -2, 2, anchors=150, kappa=0.5, potential="square", fast=True
        ),
        "read with one exponential": lambda: af.AnchorHead.fit("tanh", -2, 2, anchors=9, fast=True),
    },
    "gate": {"one number": lambda: GateHead.silu(-2, 2), "two numbers": lambda: GateHead.max(-1, 1)},
    "product": {
        "numbers": lambda: ProductHead.fit((0, 1), (-1, 1)),
        "vectors": lambda: ProductHead.fit((0, 1), (-1, 1), width=2),
        "long vectors": lambda: ProductHead.fit((0, 1), (-1, 1), width=260),
    },
    "norm": {"layer": lambda: NormHead.fit(4, (0.5, 2.0), heads=5)},
    "token": {"maximum": lambda: TokenHead.max(3, 1, -1, 1, eps=1e-2)},
    "fast": {
        "float32": lambda: FastActivation.fit("tanh", -2, 2),
        "half precision": lambda: FastActivation.fit("tanh", -2, 2, dtype=torch.bfloat16),
    },
    "chain": {"gates and tables": lambda: ChainHead.fit("elu", -3, 3, eps=1e-2)},
    "network": {"a formula": formula},
    "program": {"reverse": lambda: af.compile(rasp.library.reverse(), rasp.Sequences("ab", 3))},
    "programs": {"two": several},
    "plain": {
        "a formula": lambda: af.export.to_plain(formula()),
        "cells": lambda: af.export.to_plain(PROVED["theorem-cells"]["cells"]()),
        "hats": lambda: af.export.to_plain(PROVED["theorem-universal"]["token-wise"]()),
        "a ramp": lambda: af.export.to_plain(PROVED["theorem-ramp"]["token-wise"]()),
        "a ramp of several channels": lambda: af.export.to_plain(
            theorems.ramp(W, 0.3, -1, 1, 9, G=[k % 2 for k in range(9)], radius=1.0, form="tokens")
        ),
        "a ramp beside a channel of zeros": lambda: af.export.to_plain(
            theorems.ramp(W, 0.3, -1, 1, 9, radius=1.0, variant="gate", channels=2)
        ),
    },
    "variant": {"permuted": lambda: vary(af.export.to_plain(formula()), ["permuted"], seed=1)},
    "theorem-ramp": {
        "token-wise": lambda: theorems.ramp(W, 0.3, -1, 1, 9, variant="warm", radius=1.0),
        "several channels": lambda: theorems.ramp(W, 0.3, -1, 1, 9, G=[k % 2 for k in range(9)], radius=1.0),
        "the paper's": lambda: theorems.ramp(W, 0.3, -1, 1, 9, radius=1.0),
    },
    "theorem-universal": {
        "hats": lambda: theorems.two_layer(wave, af.Box.cube(-1, 1, shape=(1, 1)), 0.5, lipschitz=1.0, anchors=9),
        "token-wise": lambda: theorems.attention_then_softmax(
            wave, af.Box.cube(-1, 1, shape=(2, 1)), 1.0, lipschitz=2**0.5, anchors=9, form="tokens"
        ),
    },
    "theorem-cells": {"cells": lambda: theorems.max_affine(wave, af.Box.cube(-1, 1, shape=2), 16, lipschitz=2**0.5)},
    "blackbox-grid": {
        "a constant": lambda: af.approximate(wave, af.Box.cube(-1, 1, shape=1), 0.2, lipschitz=1.0, route="grid"),
    },
}  # fmt: skip
#: Families whose certificates are calibrated: what is measured needs no proof.
CALIBRATED: dict[str, Callable[[], Any]] = {
    "blackbox-table": lambda: af.approximate(wave, af.Box.cube(-1, 1, shape=1), route="spectral", anchors=8),
    "blackbox-ridge": lambda: af.approximate(
        wave, af.Box.cube(-1, 1, shape=1), route="ridge", width=2, samples=200, progress=False
    ),
}
#: What is certified and what the kernel has no rule for yet: a rule takes its line away.
OPEN: dict[str, Callable[[], Any]] = {
    "mixed columns of a variant": lambda: vary(af.export.to_plain(formula(torch.float64)), ["rotated"], seed=1),
    "a modulus, which is a Python function": lambda: theorems.max_affine(
        wave, af.Box.cube(-1, 1, shape=2), 16, modulus=lambda t: 2**0.5 * t
    ),
}
#: Modules that say "certified" of a result -> the families whose certificates they make.
SPEAKERS = {
    "blackbox/grid": {"blackbox-grid"}, "compiler/compiled": {"network", "plain", "variant"},
    "heads/anchor/head": {"anchor"}, "heads/chain/head": {"chain"}, "heads/fast/activation": {"fast"},
    "heads/fast/anchor": {"anchor"}, "heads/gate/head": {"gate"}, "heads/norm/head": {"norm"},
    "heads/product/head": {"product"}, "heads/token/head": {"token"}, "rasp/network/compiled": {"program"},
    "rasp/network/several": {"programs"},
    "theorems/result": {"theorem-ramp", "theorem-universal", "theorem-cells"},
    # of others' certificates
    **{key: set() for key in ("certificates/certificate", "compiler/routes", "demo", "groundtruth/manifest")},
    **{f"incontext/{key}": set() for key in ("certificate", "saved")},  # of estimators: tests/incontext/test_saved.py
}  # fmt: skip


def sources(word: str) -> Iterator[tuple[str, ast.Module]]:
    """The modules that hold a word, and what they say."""
    for path in sorted(SRC.rglob("*.py")):
        text = path.read_text("utf-8")
        if word in text:
            yield path.relative_to(SRC).with_suffix("").as_posix(), ast.parse(text)


def test_every_family_has_an_example() -> None:
    importlib.import_module("attnforge.files")
    named = set()
    for module, tree in sources(" family"):
        if module.endswith("/site"):  # heads within networks, which have no files of their own
            continue
        for node in (inner for one in ast.walk(tree) if isinstance(one, ast.ClassDef) for inner in one.body):
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                named |= {node.value.value} if isinstance(target, ast.Name) and target.id == "family" else set()
    assert named - {""} == set(HOMES) == set(PROVED) | set(CALIBRATED) and not set(PROVED) & set(CALIBRATED)


def test_whatever_says_certified_has_a_family() -> None:
    found = set()
    for module, tree in sources('"certified"'):
        asked = {id(inner) for node in ast.walk(tree) if isinstance(node, (ast.Compare, ast.Subscript))
                 for inner in ast.walk(node)}  # fmt: skip
        said = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value == "certified"]
        found |= {module} if any(id(node) not in asked for node in said) else set()
    assert found == set(SPEAKERS)
    assert set().union(*SPEAKERS.values()) == set(PROVED)


def test_limits_of_work_are_beyond_what_the_package_builds_by_itself() -> None:
    assert anchors_at_most >= MOST_ANCHORS  # which eps may ask for
    wide = ProductHead.fit((0, 1), (-1, 1), width=260)
    assert not wide.beyond and wide.certificate.kind == "certified"
    with torch.no_grad():
        wide.layer.heads()[0].W_O.mul_(torch.linspace(1, 1.01, 260))
    trained = af.certify(wide)
    assert trained.kind == "analysed" and trained.remark == wide.beyond != ""
    cold = af.AnchorHead.fit("exp", 0, 1, anchors=anchors_at_most + 1, temperature="cold")
    assert cold.certificate.kind == "analysed" and str(anchors_at_most) in cold.beyond


@pytest.mark.parametrize(("family", "form"), [(family, form) for family in PROVED for form in PROVED[family]])
def test_the_kernel_proves_an_example_of_every_family(family: str, form: str, tmp_path: Path) -> None:
    net = PROVED[family][form]()
    assert net.family == family and not net.beyond and net.certificate.kind in ("certified", "exact")
    net.save(tmp_path / "net.safetensors")
    found = af.check(tmp_path / "net.safetensors")
    assert found.kernel is not None and found.bound is not None and not found.remark
    assert found.kernel <= 1.5 * found.bound and found.word == found.kind == net.certificate.kind


@pytest.mark.parametrize("family", CALIBRATED)
def test_what_is_measured_does_not_say_certified(family: str, tmp_path: Path) -> None:
    net = CALIBRATED[family]()
    assert net.family == family and net.certificate.kind == "calibrated" and net.bound is None
    net.save(tmp_path / "net.safetensors")
    found = af.check(tmp_path / "net.safetensors")
    assert found.kind == found.word == "calibrated" and found.kernel is None
    if family == "blackbox-ridge":  # the network in it is certified against what was fitted
        again = proved(net.network, net.expansion)
        assert net.expansion.kind == "certified" and again.kernel is not None


@pytest.mark.parametrize("name", OPEN)
def test_what_is_open_says_so(name: str) -> None:
    net = OPEN[name]()
    certificate = net.certificate
    assert certificate.kind == certificate.word == "analysed" and net.beyond == certificate.remark != ""
    assert certificate.bound is not None and str(certificate).startswith("analysed: |network - target| <= ")
