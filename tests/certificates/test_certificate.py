"""Certificates: valid by construction, tied to the weights, readable, and the same after a trip through JSON."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnforge as af
from attnforge.certificates.certificate import Certificate, Term, total, weights_hash
from attnforge.certificates.certified import CertifiedModule, certify

BOX = af.Box(y=(-1, 2))
GOOD: dict[str, Any] = dict(kind="certified", bound=1e-3, dtype="float32", target="gelu", box=BOX)


def head() -> af.AnchorHead:
    return af.AnchorHead.fit("sin", -2, 2, anchors=10)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(kind="proved"), "'exact', 'certified', 'analysed' or 'calibrated'"),
        (dict(dtype="int8"), "unknown dtype 'int8'"),
        (dict(bound=None), "a certified result has a bound, an exact one"),
        (dict(kind="calibrated"), "a calibrated one has none"),
        (dict(kind="calibrated", bound=None), "states what was measured"),
        (dict(bound=-1e-3), "finite number >= 0"),
        (dict(bound=math.inf), "finite number >= 0"),
        (dict(bound=math.nan), "finite number >= 0"),
        (dict(terms=(Term("a", "rounding", 9e-4), Term("b", "leak", 2e-4))), "add up to more than the bound"),
    ],
)
def test_a_certificate_is_valid_or_not_made(change: dict[str, Any], words: str) -> None:
    with pytest.raises(af.ArgumentError, match=words):
        Certificate(**{**GOOD, **change})


@pytest.mark.parametrize("bad", [("a", "guess", 1.0), ("a", "rounding", -1.0), ("a", "rounding", math.nan)])
def test_a_term_is_valid_or_not_made(bad: tuple[Any, ...]) -> None:
    with pytest.raises(af.ArgumentError):
        Term(*bad)


def test_certificates_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Certificate(**GOOD).bound = 1e-9  # type: ignore[misc]


def test_the_two_kinds_are_never_confused() -> None:
    certified, calibrated = Certificate(**GOOD), Certificate("calibrated", None, "float32", "f", BOX, measured=2e-4)
    assert str(certified).startswith("certified: |network - target| <= ")
    assert "calibrated, not certified" in str(calibrated) and "<=" not in str(calibrated)


def test_the_printed_bound_is_never_below_the_bound() -> None:
    bound = 1.0000001e-3
    shown = str(Certificate(**{**GOOD, "bound": bound})).split("<= ")[1].split()[0]
    assert float(shown) >= bound


def test_the_table_adds_up_and_names_its_lemmas() -> None:
    certificate = head().certificate
    text = str(certificate)
    for word in ("sin", "interpolation", "rounding", "total", "float32", "A4", "worst near y ="):
        assert word in text
    assert certificate.bound is not None
    assert total(certificate.by_source().values()) >= total(t.value for t in certificate.terms)
    assert total(t.value for t in certificate.terms) <= certificate.bound
    assert any("exponential" in line for line in certificate.assumptions)


def test_a_bound_that_the_kernel_cannot_prove_is_not_certified() -> None:
    alone = Certificate(**GOOD, remark="it has no rule")
    assert alone.kind == alone.word == "analysed" and str(alone).startswith("analysed: |network - target| <= ")
    assert "by the analysis alone: it has no rule" in str(alone) and alone.says_as(Certificate(**GOOD))
    assert Certificate.from_json(json.loads(json.dumps(alone.to_json()))).kind == "analysed"
    earlier = {**alone.to_json(), "kind": "certified"}  # as earlier files say it
    assert Certificate.from_json(earlier) == alone != Certificate(**GOOD)
    assert replace(alone, kernel=1e-3, remark="").kind == "certified"
    assert Certificate(**{**GOOD, "kind": "analysed"}).kind == "certified"  # nothing speaks against the kernel
    exact = Certificate(**{**GOOD, "kind": "exact", "bound": 0}, remark="it has no rule")
    assert exact.kind == "exact" and exact.word == "exact by the analysis alone"
    assert not alone.says_as(exact) and not alone.says_as(replace(alone, target="relu"))


@given(st.lists(st.floats(0, 1e300), max_size=20))
def test_totals_are_rounded_up(values: list[float]) -> None:
    assert Fraction(total(values)) >= sum(map(Fraction, values))


@given(
    st.floats(0, 1e300),
    st.lists(st.tuples(st.text(), st.sampled_from(["interpolation", "leak"]), st.floats(0, 1), st.text()), max_size=4),
    st.booleans(),
    st.one_of(st.none(), st.floats(0, 1)),
)
def test_json_gives_an_equal_certificate(
    bound: float, terms: list[Any], relative: bool, measured: float | None
) -> None:
    ledger = tuple(Term(*t) for t in terms)
    bound = max(bound, total(t.value for t in ledger))
    made = Certificate(**{**GOOD, "bound": bound, "terms": ledger, "relative": relative, "measured": measured})
    assert Certificate.from_json(json.loads(json.dumps(made.to_json()))) == made


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "proved"}, {"bound": "x"}, {"bound": -1}, {"box": None}, {"box": {"names": None}}, {"terms": [["a"]]},
        {"terms": None}, {"dtype": "int8"}, {"lemmas": 3}, None, {"bound": 0.0, "terms": [["a", "leak", 1.0, ""]]},
    ],
)  # fmt: skip
def test_a_description_of_something_else_is_refused(change: dict[str, Any] | None) -> None:
    data: Any = {} if change is None else {**Certificate(**GOOD).to_json(), **change}
    with pytest.raises(af.ArgumentError):
        Certificate.from_json(data)


def test_a_changed_weight_makes_the_certificate_stale_and_only_that() -> None:
    sine = head()
    bound = sine.bound
    sine.train(), sine.eval(), sine.zero_grad(), sine.requires_grad_(True)
    assert sine.bound == bound
    with torch.no_grad():
        sine.values[3] += 1e-3
    for ask in (lambda: sine.bound, lambda: sine.certificate, lambda: sine.measured):
        with pytest.raises(af.CertificateError, match=r"stale.*certify"):
            ask()
    assert certify(sine).bound == sine.bound and sine.bound is not None and sine.bound > 1e-4


def test_the_hash_sees_names_dtypes_shapes_and_every_bit() -> None:
    def net(**weights: torch.Tensor) -> torch.nn.Module:
        module = torch.nn.Module()
        for name, tensor in weights.items():
            module.register_buffer(name, tensor)
        return module

    x = torch.tensor([1.0, 2.0])
    base = weights_hash(net(a=x))
    assert base == weights_hash(net(a=x.clone()))
    assert base == weights_hash(net(a=torch.tensor([1.0, 0.0, 2.0])[::2])), "not how it lies in memory"
    others = [net(b=x), net(a=x.double()), net(a=x[:, None]), net(a=x, b=x[:0]), net(a=torch.nextafter(x, x + 1))]
    assert base not in [weights_hash(other) for other in others]
    assert weights_hash(net(a=torch.tensor(0.0))) != weights_hash(net(a=torch.tensor(-0.0)))


def test_certify_takes_networks_of_ours_only() -> None:
    with pytest.raises(af.ArgumentError, match="Linear"):
        certify(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    bare = CertifiedModule()
    with pytest.raises(af.CertificateError, match="no certificate yet"):
        _ = bare.certificate


def test_an_attached_certificate_is_that_of_the_weights() -> None:
    sine = head()
    attached = sine.attach(replace(sine.certificate, weights="something else"))
    assert attached.weights == weights_hash(sine)
