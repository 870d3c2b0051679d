"""Lemma A8: one exponential per element gives what the softmax gives, with gradients, in every dtype, within bounds."""

from __future__ import annotations

import pytest
import torch

import attnforge as af
from attnforge.errors import ArgumentError
from attnforge.heads.fast import anchor_read, read, softmax_read
from attnforge.heads.fast_activation import FastActivation
from attnforge.heads.fast_read import form_of

TABLES = [(2, 0.5), (3, 0.3), (16, 0.25), (29, 0.7), (33, 0.5), (200, 1.0), (301, 0.25), (9, 40.0), (400, 60.0)]


def table(p: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(p, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def points(p: int, kappa: float, dtype: torch.dtype, count: int = 1001) -> torch.Tensor:
    reach = kappa * (p - 1) * 1.3 + 5
    return torch.linspace(-reach, reach, count, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(("p", "kappa"), TABLES)
@pytest.mark.parametrize("gate", [0.0, 1.5])
def test_the_operator_is_the_softmax_head(p: int, kappa: float, gate: float) -> None:
    y, value = points(p, kappa, torch.float64), table(p, torch.float64)
    wanted = softmax_read(y, value, 1.0, kappa, 0.25, gate)
    for form in (anchor_read, read):
        assert (form(y, value, 1.0, kappa, 0.25, gate) - wanted).abs().max() < 1e-12 * p


def test_every_form_is_reached() -> None:
    for dtype in (torch.float32, torch.float64):
        assert {form_of(p, kappa, dtype) for p, kappa in TABLES} == {"lattice", "window", "pair"}


@pytest.mark.parametrize(("p", "kappa", "gate"), [(17, 0.3, 1.75), (16, 0.3, 0.0), (200, 1.0, 1.0)])
def test_gradients_and_registration(p: int, kappa: float, gate: float) -> None:
    y = (4 * table(24, torch.float64, 1)).reshape(4, 6).requires_grad_()
    value = table(p, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda y, v: anchor_read(y, v, 1.0, kappa, 0.25, gate), (y, value))
    found = torch.library.opcheck(torch.ops.attnforge.anchor_read.default, (y, value, 1.0, kappa, 0.25, gate))
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_are_computed_in_float32(dtype: torch.dtype) -> None:
    y, value = points(33, 0.5, dtype).reshape(7, 11, 13), table(33, torch.float32)
    out = anchor_read(y, value, 1.0, 0.5, 0.0, 1.5)
    assert out.dtype == dtype and out.shape == y.shape
    assert torch.equal(out, anchor_read(y.float(), value, 1.0, 0.5, 0.0, 1.5).to(dtype))


def test_shapes_strides_and_pieces_do_not_matter() -> None:
    value = table(17, torch.float32)
    y = torch.randn(3, 200_001)
    whole = anchor_read(y, value, 1.0, 0.5)
    assert torch.equal(anchor_read(y.t(), value, 1.0, 0.5), whole.t())
    assert torch.equal(anchor_read(y[:, :5], value, 1.0, 0.5), whole[:, :5])
    assert anchor_read(y[:0], value, 1.0, 0.5).shape == (0, 200_001)


def test_bad_arguments_are_named() -> None:
    value = table(5, torch.float32)
    with pytest.raises(ArgumentError, match="float64, float32 or bfloat16"):
        anchor_read(torch.arange(3), value, 1.0, 0.5)
    with pytest.raises(ArgumentError, match="at least 2"):
        anchor_read(torch.zeros(3), value[:1], 1.0, 0.5)
    with pytest.raises(ArgumentError, match="kappa"):
        anchor_read(torch.zeros(3), value, 1.0, -0.5)


ACTIVATIONS = ["gelu", "gelu_tanh", "softplus", "mish", "silu", "quick_gelu", "relu", "tanh", "sigmoid"]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_pure_and_within_their_certificates(name: str) -> None:
    head = FastActivation.fit(name, -34, 50)
    assert head.certificate.kind == "certified" and head.size <= 64
    y = torch.cat([torch.linspace(-34, 50, 20_001), torch.randn(20_000)])
    assert (head(y).double() - head.function.value(y.double())).abs().max() <= head.bound <= 5e-6
    assert af.purity(head).by_operation["softmax"] == len(head.layer.groups)
