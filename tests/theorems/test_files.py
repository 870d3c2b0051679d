"""Theorem networks save and load like all others: the same output, a certificate that is computed again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import attnforge as af
from attnforge import theorems
from attnforge.certificates.certificate import weights_hash
from attnforge.certificates.storage import digest
from attnforge.theorems.result import Construction


def swapped(X: Tensor) -> Tensor:
    return X.flip(-2).sin()


def norm(x: Tensor) -> Tensor:
    return x.norm(dim=-1, keepdim=True)


SEQUENCES, TOKENS = af.Box.cube(-1, 1, shape=(2, 1)), af.Box.cube(-1, 1, shape=2)
W = [1.0, -2.0]
BUILT: dict[str, Callable[[], Construction]] = {
    "ramp": lambda: theorems.ramp(W, 0.5, -1, 1, anchors=9),
    "one w a token": lambda: theorems.ramp(torch.tensor([W, [0.5, 1.0]]), torch.tensor([0.5, 0.0]), -1, 1, anchors=9),
    "tokens": lambda: theorems.ramp(W, 0.5, -1, 1, anchors=9, form="tokens"),
    "causal": lambda: theorems.ramp(W, 0.5, -1, 1, anchors=9, form="tokens", causal=True),
    "channels": lambda: theorems.ramp(W, 0.5, -1, 1, anchors=9, G=[0] * 4 + [1] * 5),
    "warm": lambda: theorems.ramp(W, 0.5, -1, 1, anchors=9, variant="warm"),
    "gate": lambda: theorems.ramp(W, 0.5, -1, 1, variant="gate"),
    "heads": lambda: theorems.ramp_heads(W, 0.5, -1, 1, heads=3, tokens=5),
    "warm heads": lambda: theorems.ramp_heads(W, 0.5, -1, 1, heads=2, tokens=12, variant="warm"),
    "leaky": lambda: theorems.leaky_relu(W, 0.0, radius=1.0, anchors=9, slope=0.1),
    "two layers": lambda: theorems.two_layer(swapped, SEQUENCES, spacing=0.5, lipschitz=1.0),
    "softmax": lambda: theorems.attention_then_softmax(swapped, SEQUENCES, spacing=0.5, lipschitz=1.0, form="tokens"),
    "cells": lambda: theorems.max_affine(norm, TOKENS, cells=25, lipschitz=1.0),
    "centres": lambda: theorems.max_affine(norm, TOKENS, torch.rand(9, 2) * 2 - 1, lipschitz=1.0, attention="cross"),
}


@pytest.mark.parametrize("name", BUILT)
def test_saved_and_loaded(name: str, tmp_path: Path) -> None:
    m, file = BUILT[name](), tmp_path / "m.safetensors"
    m.save(file)
    again = af.load(file)
    (X,) = m.example_input()
    assert type(again) is type(m) and torch.equal(again(X), m(X))
    assert again.certificate == m.certificate and af.check(file).bound == m.bound
    again.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == file.read_bytes()


def test_cast_and_trained_weights_are_certified_from_the_file(tmp_path: Path) -> None:
    m = theorems.ramp(W, 0.5, -1, 1, anchors=9).float()
    with torch.no_grad():
        m.value.mul_(1 + 1e-3)
    bound = af.certify(m).bound
    m.save(tmp_path / "m.safetensors")
    assert af.check(tmp_path / "m.safetensors").bound == bound
    assert af.load(tmp_path / "m.safetensors").dtype == torch.float32


def test_what_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    for m, words in (
        (theorems.max_affine(norm, TOKENS, cells=25), "only measured against f itself"),
        (theorems.max_affine(norm, TOKENS, cells=25, modulus=lambda t: t), "a modulus, a Python function"),
    ):
        with pytest.raises(af.ArgumentError, match=words):
            m.save(tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())
    BUILT["cells"]().save(tmp_path / "m.safetensors")
    with pytest.raises(af.ArgumentError, match="the samples of f and not f itself"):
        af.load(tmp_path / "m.safetensors").measure(10)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("ramp", {"keys": 10**9, "channel": [0] * 9}),
        ("ramp", {"temperature": "gate"}),
        ("ramp", {"kappa": 0.5}),
        ("warm", {"body": "Slots"}),
        ("cells", {"cells": 10**9}),
        ("cells", {"lipschitz": 0.0}),
        ("two layers", {"counts": [10**9, 10**9]}),
    ],
)
def test_descriptions_of_something_else_are_refused(name: str, change: dict[str, object], tmp_path: Path) -> None:
    m, file = BUILT[name](), tmp_path / "m.safetensors"
    m.save(file)
    with safe_open(str(file), framework="pt") as opened:
        header = json.loads(opened.metadata()["attnforge"])
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    header["config"].update(change)
    header["digest"] = digest(header, weights_hash(m))
    save_file(tensors, str(file), {"attnforge": json.dumps(header)})
    with pytest.raises(af.CertificateError):
        af.check(file)
