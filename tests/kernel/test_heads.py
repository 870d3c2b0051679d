"""Heads on their own before the kernel, and the law of families: proved, or the certificate says why not."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import attnforge as af
from attnforge import files
from attnforge.certificates import storage
from attnforge.certificates.certificate import weights_hash
from attnforge.certificates.certified import HOMES, CertifiedModule
from attnforge.compiler.alone import derive, proved
from attnforge.errors import CertificateError
from attnforge.heads.anchor.head import AnchorHead
from attnforge.heads.fast.activation import FastActivation
from attnforge.heads.gate.head import GateHead
from attnforge.heads.product.head import ProductHead
from attnforge.heads.token.head import TokenHead
from attnforge.kernel.file import Saved, Tensor, parse
from attnforge.kernel.prove import prove

Truth = Callable[..., torch.Tensor]
MIXED = [[0.5, 0.25, 0.25], [1.0, -0.5, 0.3], [0.0, 0.0, 1.0]]
HEADS: dict[str, tuple[Callable[[], CertifiedModule], Truth]] = {
    "anchor": (lambda: AnchorHead.fit("sin", -2, 2, anchors=16), torch.sin),
    "relu": (lambda: GateHead.relu(-1, 1, dtype=torch.float64), torch.relu),
    "product": (lambda: ProductHead.fit((0, 1), (-5, 1)), torch.mul),
    "max": (lambda: TokenHead.max(3, 2, -1, 1, eps=1e-2), lambda x: x.amax(-2, keepdim=True).expand_as(x)),
    "min": (lambda: TokenHead.min(3, 2, -1, 2, eps=1e-2), lambda x: x.amin(-2, keepdim=True).expand_as(x)),
    "relative": (lambda: AnchorHead.fit("exp", -2, 2, anchors=24, relative=True), torch.exp),
    "relative, negative": (lambda: AnchorHead.fit("log", 0.1, 0.5, anchors=9, relative=True, dtype=torch.float64),
                           torch.log),
    "mean": (lambda: TokenHead.mean(3, 2), lambda x: x.mean(-2, keepdim=True).expand_as(x)),
    "gather": (lambda: TokenHead.gather(3, 1, 2), lambda x: x[..., 1:2, :].expand_as(x)),
    "mix": (lambda: TokenHead.mix(torch.tensor(MIXED), 2, dtype=torch.float64),
            lambda x: torch.tensor(MIXED, dtype=torch.float32).double() @ x),
}  # fmt: skip


@torch.no_grad()
def largest_error(head: CertifiedModule, truth: Truth) -> float:
    """The largest error at many points of the box, its corners among them."""
    points = head.box.sample(4000, dtype=head.dtype)
    inputs = tuple(points.unbind(-1)) if head.box.names else (points,)
    wanted = truth(*(x.double() for x in inputs))
    error = (head.core(*inputs).double() - wanted).abs() / (wanted.abs() if getattr(head, "relative", False) else 1)
    return float(error.max()) if bool(error.isfinite().all()) else float("inf")


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_proved_and_its_changes_are_covered_or_refused(name: str) -> None:
    build, truth = HEADS[name]
    head = build()
    saved = parse(head.written())
    assert head.bound is not None
    chosen = derive(head, saved, head.bound)
    assert largest_error(head, truth) <= prove(saved, chosen).bound <= 2 * head.bound + 1e-36
    draw, state = random.Random(name), {key: t.clone() for key, t in head.state_dict().items()}
    changes = [lambda x: 1.01 * x, lambda x: x + 1, lambda x: 0.0, lambda x: float("nan")]
    keys, refused = sorted(key for key in saved.tensors if key != "anchors"), 0
    for change, key in zip(changes * 2, draw.choices(keys, k=8), strict=True):
        tensor = state[key].clone()
        at = draw.randrange(tensor.numel())
        tensor.view(-1)[at] = change(float(tensor.view(-1)[at]))
        head.load_state_dict({**state, key: tensor})
        try:
            found = prove(parse(_written(head, saved)), chosen).bound
        except CertificateError:
            refused += 1
            continue
        assert largest_error(head, truth) <= found
    assert refused >= 2  # NaN, twice


@pytest.mark.parametrize(
    "head",
    [
        AnchorHead.fit("sqrt", 0, 4, anchors=32), AnchorHead.fit("sin", -3, 3, anchors=9, temperature="cold", kappa=16),
        TokenHead.mean(7, 1), TokenHead.prefix_mean(5, 1, dtype=torch.float64), GateHead.hard_tanh(dtype=torch.float64),
        GateHead.piecewise_linear([-1, 0, 0.5, 2], [1, 0, 2, -1]), GateHead.silu(-4, 4),
    ],
    ids=["root", "cold", "mean", "prefix", "clip", "lines", "silu"],
)  # fmt: skip
def test_bounds_of_heads_are_those_of_the_analysis_or_less(head: CertifiedModule) -> None:
    saved = parse(head.written())
    assert head.bound is not None and prove(saved, derive(head, saved, head.bound)).bound <= 1.001 * head.bound


def _written(head: CertifiedModule, saved: Saved) -> bytes:
    """A changed head under its old header."""
    header = {key: value for key, value in saved.header.items() if key not in ("digest", "format")}
    return storage.written(header, weights_hash(head), head.state_dict())


def test_files_of_heads_are_checked_by_the_kernel(tmp_path: Path) -> None:
    head = AnchorHead.fit("gelu", -4, 4, anchors=16)
    head.save(tmp_path / "head.safetensors")
    found = af.check(tmp_path / "head.safetensors")
    assert found.kernel is not None and found.proof == ("kernel" if found.kernel <= found.bound else "analysis")
    beyond = AnchorHead.fit("exp", -1, 1, anchors=2100, temperature="cold")
    said = proved(beyond, beyond.certificate)
    assert said.kernel is None and said.proof == "analysis" and "beyond 2048 anchors" in said.remark


def test_other_scopes_than_the_head_has_are_refused() -> None:
    head = GateHead.relu(-1, 1)
    saved = parse(head.written())
    chosen: dict[str, Any] = derive(head, saved, 1.0)
    with pytest.raises(CertificateError, match="scopes"):
        prove(saved, {**chosen, "scopes": [[["memory", False]]]})


def test_a_relative_bound_needs_a_function_that_keeps_away_from_zero() -> None:
    head = AnchorHead.fit("exp", 1, 2, anchors=9, relative=True)
    saved = parse(head.written())
    chosen, config = derive(head, saved, 1.0), saved.header["config"]
    assert 0 < prove(saved, chosen).bound < 1
    through = replace(saved, header={**saved.header, "config": {**config, "function": "identity"}})
    wide = replace(saved, header={**saved.header, "config": {**config, "function": "sin", "interval": [-1.0, 2.0]}})
    edges = [[-1.0, 0.0, *chosen["tables"][0][1:]]]
    assert prove(through, chosen).bound > 0.5
    with pytest.raises(CertificateError, match="nothing can be proved"):
        prove(wide, {**chosen, "tables": edges, "tree": []})


def test_minima_that_read_more_than_their_tokens_are_refused() -> None:
    head = TokenHead.min(3, 1, -1, 1, eps=1e-2)
    saved = parse(head.written())
    name = next(key for key in saved.tensors if key.endswith("W_V"))
    shifted = {**saved.tensors, name.replace("W_V", "b_V"): Tensor("float32", (1, 1), (0.5,))}
    with pytest.raises(CertificateError, match="b_V"):
        prove(replace(saved, tensors=shifted), derive(head, saved, 1.0))


def test_every_family_is_proved_or_says_why_not(tmp_path: Path) -> None:
    for family in set(HOMES) - set(files.PROVED):
        import_module(HOMES[family])
        assert CertifiedModule.families[family].beyond is not CertifiedModule.beyond, family
    many = AnchorHead.fit("exp", 0, 1, anchors=2100, temperature="cold")
    assert many.beyond and many.beyond == many.certificate.remark
    assert str(many.certificate).startswith("analysed: |network - target| <= ")
    many.save(tmp_path / "many.safetensors")
    found = af.check(tmp_path / "many.safetensors")
    assert found.proof == "analysis" and found.kernel is None and found.kind == "analysed"
    heads = (
        FastActivation.fit("silu", -3, 3, dtype=torch.bfloat16), GateHead.max(-1, 1),
        AnchorHead.fit("exp", 0, 1, anchors=8, fast=True), ProductHead.fit((0, 1), (0, 1), width=2),
    )  # fmt: skip
    for i, head in enumerate(heads):
        head.save(tmp_path / f"{i}.safetensors")
        found = af.check(tmp_path / f"{i}.safetensors")
        assert not head.beyond and found.proof == "kernel" and found.word == "certified"
    assert GateHead.relu(-1, 1).certificate.word == "certified"
