"""The one table of head families, and a family that comes from outside: a folder and one line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import attnforge as af
from attnforge import groundtruth
from attnforge.compiler.compiled import CompiledNetwork
from attnforge.heads import families
from attnforge.heads.construction import HeadBuilder, Order, Tactics
from attnforge.heads.rule import Rule
from attnforge.heads.site import Site
from attnforge.programs import ops
from attnforge.programs.enclose import Range
from attnforge.report.structure import structure

BOX = af.Box(x=(-1, 1), y=(-2, 2))
OPERATIONS = {t for t in vars(ops).values() if isinstance(t, type) and issubclass(t, ops.Op) and t.word}
AFFINE = {ops.Input, ops.Constant, ops.Linear}  # done by affine maps: no head, no choice of one


@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_family_has_a_site_a_rule_and_a_builder(family: str) -> None:
    site = families.site_type(family)
    assert issubclass(site, Site) and site.family == family and site.lemmas
    assert isinstance(families.rule_of(family), Rule) and isinstance(families.builder_of(family), HeadBuilder)


def orders() -> Iterator[Order]:
    """Every operation that is not affine, on arguments around 1."""
    made = [
        ops.Mix(0, np.eye(2), 3), ops.Apply(0, "sin", 3), ops.Product(0, 0, 3), ops.Softmax(0, 3),
        ops.Attention(0, 0, 0, 3), ops.Normalise(0, 3, 1e-2, centred=False), ops.MaxTokens(0, 3),
    ]  # fmt: skip
    read = Range(np.full((1, 2, 3), 0.5), np.full((1, 2, 3), 1.5))
    for op in made:
        yield Order(1, op, (read,) * len(op.inputs), 1e-3, torch.float64, Tactics())


def test_every_operation_that_is_not_affine_has_a_family() -> None:
    asked = {type(order.op): order for order in orders()}
    assert set(asked) == OPERATIONS - AFFINE
    for order in asked.values():
        found = [f for f in families.FAMILIES if families.builder_of(f).propose(order, ()) is not None]
        assert found, order.op.word


@pytest.fixture
def toy() -> Iterator[str]:
    before = dict(families.FAMILIES)
    families.register("tanh product", "toy_family")
    yield "tanh product"
    families.FAMILIES.clear()
    families.FAMILIES.update(before)


@pytest.fixture
def net(toy: str) -> CompiledNetwork:
    return af.compile("x*y + sin(x) + relu(y)*1", BOX, eps=1e-2)


def truth(x: torch.Tensor) -> torch.Tensor:
    a, b = x.double().unbind(-1)
    return a * b + a.sin() + b.relu()


def test_a_family_from_outside_compiles_and_its_bound_holds(net: CompiledNetwork, toy: str) -> None:
    assert [site.family for site in net.layout.sites].count(toy) == 1
    assert not any(site.family == "product" for site in net.layout.sites)
    x = torch.cat([BOX.sample(5000, dtype=torch.float32), BOX.corners(dtype=torch.float32)])
    measured = float((net(x).detach().double() - truth(x)).abs().max())
    assert 0 < measured <= net.bound <= 1e-2
    assert af.purity(net)


def test_it_is_certified_saved_loaded_and_checked(net: CompiledNetwork, tmp_path: Path) -> None:
    bound, path = net.bound, tmp_path / "toy.safetensors"
    assert af.certify(net).bound == bound
    net.save(path)
    again = af.load(path)
    assert af.check(path).bound == bound == again.bound
    x = BOX.sample(50, dtype=torch.float32)
    assert torch.equal(again(x), net(x))
    with torch.no_grad():
        for group in net.network.groups():
            if group.scope == "self":
                group.W_O *= 1.001
    assert bound is not None and af.certify(net).bound > bound


def test_it_is_explained_and_exported(net: CompiledNetwork, toy: str, tmp_path: Path) -> None:
    unit = next(unit for unit in structure(net).units if unit.family == toy)
    assert unit.heads == 4 and unit.operation == "product" and unit.error > 0
    plain = af.export.to_plain(net)
    x = BOX.sample(500, dtype=torch.float32)
    assert float((plain(x).detach().double() - truth(x)).abs().max()) <= plain.bound
    plain.save(tmp_path / "plain.safetensors")
    assert af.check(tmp_path / "plain.safetensors").bound == plain.bound
    onnx = af.export.to_onnx(net, tmp_path / "toy.onnx")
    assert np.allclose(af.export.run_onnx(onnx.path, x), net(x).detach().numpy(), atol=1e-5)


def test_every_other_room_takes_it(net: CompiledNetwork, tmp_path: Path) -> None:
    x = BOX.sample(500, dtype=torch.float32)
    few = af.quantise(net, 12)
    assert float((few.network(x).detach().double() - truth(x)).abs().max()) <= few.bound
    varied = groundtruth.vary(net, kinds=("permuted", "idle"), seed=1)
    assert float((varied(x).detach().double() - truth(x)).abs().max()) <= varied.bound
    heads = af.manifest(net).heads
    assert len(heads) == 6 and all(head.role for head in heads)
    assert "tanh product" in net.report().html() and "attnforge" in net.explore()


def test_the_kernel_proves_it_where_it_names_cells(
    net: CompiledNetwork, toy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells come with the rule that it inherits; without them the kernel says which operation it has no proof of."""
    net.save(tmp_path / "net.safetensors")
    found = af.check(tmp_path / "net.safetensors")
    assert found.verified and not found.remark
    monkeypatch.setattr(type(families.rule_of(toy)), "edges", lambda *_: None)
    af.certify(net)
    net.save(tmp_path / "other.safetensors")
    assert "operation" in af.check(tmp_path / "other.safetensors").remark


def test_without_the_line_in_the_table_its_files_are_refused(net: CompiledNetwork, toy: str, tmp_path: Path) -> None:
    net.save(tmp_path / "toy.safetensors")
    del families.FAMILIES[toy]
    with pytest.raises(af.CertificateError, match="no head family 'tanh product'"):
        af.load(tmp_path / "toy.safetensors")


def test_a_name_is_taken_once(toy: str) -> None:
    families.register(toy, "toy_family")  # again, the same: fine
    with pytest.raises(af.ArgumentError, match="there is a family 'gate' already"):
        families.register("gate", "toy_family")


def test_checking_a_file_loads_nothing_that_builds(tmp_path: Path) -> None:
    """A fresh process checks a compiled network, and no construction, fit or planner was imported for it."""
    af.compile("sin(x*y) + relu(x) + sqrt(x**2 + y**2)", BOX, eps=1e-1).save(tmp_path / "net.safetensors")
    code = (
        "import sys, attnforge as af; af.check(sys.argv[1]);"
        "sys.stdout.write(' '.join(m for m in sys.modules if m.startswith('attnforge')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "net.safetensors")], check=True, capture_output=True, text=True
    )
    loaded = done.stdout.split()
    assert "attnforge.compiler.propagation" in loaded and "attnforge.heads.anchor.rule" in loaded
    builders = ("construction", "fit", "packing", "assemble", "plan", "search", "pipeline", "head")
    assert [m for m in loaded if m.split(".")[-1] in builders] == []
