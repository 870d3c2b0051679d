"""Theorems in token-wise form as stock transformers: same outputs, same bound, and a clear no to the paper's form."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import attnforge as af
from attnforge import theorems
from attnforge.export import to_plain
from attnforge.network import AttentionOnly
from attnforge.theorems import Construction

W = [1.0, -2.0]


def swapped(X: Tensor) -> Tensor:
    return X.flip(-2).sin()


def norm(x: Tensor) -> Tensor:
    return x.norm(dim=-1, keepdim=True)


PAIRS = af.Box.cube(-1, 1, shape=(2, 1))
THEOREMS: dict[str, Callable[[], Construction]] = {
    "ramp": lambda: theorems.ramp(W, 0.5, -1, 1, anchors=33, form="tokens"),
    "ramp, causal": lambda: theorems.ramp(W, 0.5, -1, 1, anchors=33, form="tokens", causal=True),
    "ramp, two channels": lambda: theorems.ramp(W, 0.5, -1, 1, anchors=9, form="tokens", G=[0] * 4 + [1] * 5),
    "leaky relu": lambda: theorems.leaky_relu(W, 0.0, radius=1.0, form="tokens"),
    "warm ramp": lambda: theorems.ramp(W, 0.5, -1, 1, anchors=33, variant="warm"),
    "gate": lambda: theorems.ramp(W, 0.5, -1, 1, variant="gate"),
    "many heads": lambda: theorems.ramp_heads(W, 0.5, -1, 1, heads=4, tokens=10, form="tokens"),
    "two layers": lambda: theorems.two_layer(swapped, PAIRS, 0.5, lipschitz=1.0, form="tokens"),
    "softmax": lambda: theorems.attention_then_softmax(swapped, PAIRS, 0.5, lipschitz=1.0, form="tokens"),
    "max-affine": lambda: theorems.max_affine(norm, af.Box.cube(-1, 1, shape=2), cells=100, lipschitz=1.0),
}


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", THEOREMS)
def test_a_theorem_as_a_transformer(name: str) -> None:
    net = THEOREMS[name]()
    plain = to_plain(net)
    X = net.points(60)
    assert plain(X).shape == net(X).shape
    assert float((plain(X) - net(X)).abs().max()) <= 1e-10
    assert plain.certificate.bound == net.certificate.bound
    assert "B6" in plain.certificate.lemmas
    if name != "ramp, two channels":  # where G changes the channel, the bound excludes small intervals
        assert float((plain(X) - net.target(X)).abs().max()) <= plain.certificate.bound
    assert plain.causal == ("causal" in name)


@pytest.mark.parametrize("name", ["ramp", "many heads"])
def test_float32(name: str) -> None:
    w = torch.tensor(W)
    if name == "ramp":
        net: Construction = theorems.ramp(w, 0.5, -1, 1, anchors=17, eps0=1e-3, form="tokens", radius=2.0)
    else:
        net = theorems.ramp_heads(w, 0.5, -1, 1, heads=2, tokens=8, eps0=1e-3, form="tokens", radius=2.0)
    plain = to_plain(net)
    X = net.points(200)
    assert plain.dtype == torch.float32
    assert float((plain(X) - net(X)).abs().max()) <= 1e-5
    assert float((plain(X).double() - net.target(X)).abs().max()) <= plain.certificate.bound


def test_as_many_tokens_as_wanted_and_fewer() -> None:
    net = THEOREMS["gate"]()
    plain = to_plain(net, tokens=7)
    X = net.points(20)[:8, :1].expand(8, 7, 2) * torch.linspace(0, 1, 7, dtype=torch.float64)[:, None]
    assert plain.tokens == 7
    for count in (1, 3, 7):
        assert float((plain(X[:, :count]) - net(X[:, :count])).abs().max()) <= 1e-12
    with pytest.raises(af.ArgumentError, match="or fewer tokens"):
        plain(torch.zeros(1, 8, 2, dtype=torch.float64))
    with pytest.raises(af.ArgumentError, match="sequences of 2 tokens"):
        to_plain(THEOREMS["two layers"](), tokens=3)


def test_causal_registers_see_no_data() -> None:
    plain = to_plain(THEOREMS["ramp, causal"]())
    (weights,) = plain.attention(plain.example_input()[0])
    assert float(weights.triu(1).abs().max()) == 0.0
    assert float(weights[:, 0, :, plain.registers :].abs().max()) == 0.0, "an anchor head sees registers only"


def test_without_a_lipschitz_constant_it_stays_calibrated() -> None:
    net = theorems.max_affine(norm, af.Box.cube(-1, 1, shape=2), cells=25)
    plain = to_plain(net)
    assert plain.certificate.kind == net.certificate.kind == "calibrated"
    assert plain.certificate.bound is None


def test_forms_that_no_transformer_has_are_refused_with_the_one_to_take() -> None:
    with pytest.raises(af.UnsupportedOperation, match="form='tokens'"):
        to_plain(theorems.ramp(W, 0.5, -1, 1))
    with pytest.raises(af.UnsupportedOperation, match="form='tokens'"):
        to_plain(theorems.two_layer(swapped, PAIRS, 0.5, lipschitz=1.0))
    cross = theorems.max_affine(norm, af.Box.cube(-1, 1, shape=2), cells=25, attention="cross")
    with pytest.raises(af.UnsupportedOperation, match="attention='self'"):
        to_plain(cross)


def test_layers_without_a_target_are_measured_against_themselves() -> None:
    step = theorems.gradient_step("linear", 2)
    body = step.body
    assert isinstance(body, AttentionOnly)
    channels = body.layers[0].heads()[0].W_Q.shape[1]
    box = af.Box.cube(-1, 1, shape=(4, channels))
    plain = to_plain(body, box=box)
    X = box.sample(50, dtype=torch.float64)
    assert plain(X).shape == body(X).shape
    size = float(body(X).abs().max())
    assert float((plain(X) - body(X)).abs().max()) <= 1e-10 * max(1.0, size)
    assert plain.certificate.kind == "calibrated"
    assert plain.certificate.bound is None
    with pytest.raises(af.ArgumentError, match="give box"):
        to_plain(body)
    with pytest.raises(af.ArgumentError, match="channels"):
        to_plain(body, box=af.Box.cube(-1, 1, shape=(4, channels + 1)))
    with pytest.raises(af.ArgumentError, match="box of its own"):
        to_plain(THEOREMS["ramp"](), box=box)
