"""Tables of compiled networks that are read with one exponential: within their bounds, and only while they are even."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flint import arb, ctx
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import attnforge as af
from attnforge import native
from attnforge.compiler.compiled import CompiledNetwork
from attnforge.heads.anchor.bound import AnchorWeights
from attnforge.heads.fast.even import EvenTable
from attnforge.network import AttentionLayer, Heads

needed = pytest.mark.skipif(bool(native.trouble()), reason=native.trouble() or "kernels are there")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def perceptron(dtype: torch.dtype, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 16), nn.GELU(), nn.Linear(16, 16), nn.Mish(), nn.Linear(16, 1)).to(dtype)


@pytest.fixture(scope="module")
def made() -> dict[torch.dtype, CompiledNetwork]:
    box = af.Box.cube(-1, 1, shape=3)
    return {d: af.compile(perceptron(d), box, eps=2e-3, dtype=d) for d in (torch.float32, torch.float64)}


def anchors(net: CompiledNetwork) -> list[Heads]:
    return [g for g in net.network.groups() if g.even is not None]


def alone(group: Heads) -> tuple[AttentionLayer, AnchorWeights]:
    """One head of a group, over one column, and its numbers."""
    query = torch.zeros(1, 1, 2, dtype=group.W_Q.dtype)
    query[0, 0, 0] = 1
    one = Heads("memory", W_Q=query, b_Q=group.b_Q, M_K=group.M_K, M_V=group.M_V,
                W_O=torch.ones(1, 1, 1, dtype=group.W_Q.dtype))  # fmt: skip
    one.even = group.even
    keys, values = (t.detach().double().numpy() for t in (one.M_K[0], one.M_V[0, :, 0]))
    return AttentionLayer([one]).requires_grad_(False), AnchorWeights(
        keys[:, 0], keys[:, 1], values, -float(one.b_Q[0, 0])
    )


def exact(weights: AnchorWeights, y: float) -> arb:
    """The softmax of the stored numbers, to sixty digits."""
    q = arb(y) - arb(weights.centre)
    powers = [(arb(a) * q + arb(b)).exp() for a, b in zip(weights.slope, weights.offset, strict=True)]
    return sum((p * arb(v) for p, v in zip(powers, weights.value, strict=True)), arb(0)) / sum(powers, arb(0))


def points(weights: AnchorWeights, reach: float, dtype: torch.dtype) -> Tensor:
    """Arguments of all kinds within reach of the centre: a grid, the centre and its neighbours, ends."""
    c = torch.tensor(weights.centre, dtype=dtype)
    near = [c, torch.nextafter(c, c + 1), torch.nextafter(c, c - 1), c + 1e-30, c * 0]
    grid = torch.linspace(weights.centre - reach * 0.999, weights.centre + reach * 0.999, 61, dtype=dtype)
    return torch.cat([grid, torch.stack(near)]).clamp(weights.centre - reach, weights.centre + reach).to(dtype)


def worst_share(layer: AttentionLayer, weights: AnchorWeights, dtype: torch.dtype) -> float:
    """The largest error of what is computed, of its bound there."""
    even = layer.heads()[0].even
    assert isinstance(even, EvenTable)
    low, high = weights.centre - even.reach, weights.centre + even.reach
    reading = even.reading(weights, low, high, dtype)
    assert reading is not None
    y, found = points(weights, even.reach, dtype), 0.0
    with torch.no_grad(), ctx.workdps(60):
        for x, out in zip(y.tolist(), layer(y.unsqueeze(-1)).squeeze(-1).tolist(), strict=True):
            bound = float(reading(np.array([x]), np.array([x]))[0])
            found = max(found, float(abs(arb(out) - exact(weights, x)) / arb(bound)))
    return found


@needed
@DTYPES
def test_networks_keep_their_bounds_by_both_readings(
    dtype: torch.dtype, made: dict[torch.dtype, CompiledNetwork], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, truth = made[dtype], copy.deepcopy(perceptron(dtype)).double()
    assert len(anchors(net)) == 2 and "A8" in net.certificate.lemmas
    x = torch.cat([net.box.sample(4001, dtype=dtype), torch.eye(3, dtype=dtype), -torch.ones(1, 3, dtype=dtype)])
    with torch.no_grad():
        wanted, fast = truth(x.double()), net(x)
        for group in anchors(net):
            monkeypatch.setattr(group, "even", None)
        soft = copy.deepcopy(net)(x)
        assert float((fast - soft).abs().max()) > 0  # they are two computations
        for found in (fast, soft):
            assert float((found.double() - wanted).abs().max()) <= net.bound
    assert float((fast - soft).abs().max()) < (1e-4 if dtype == torch.float32 else 1e-10)


@needed
@DTYPES
def test_the_exported_graph_is_softmax_attention_and_agrees(
    dtype: torch.dtype, made: dict[torch.dtype, CompiledNetwork]
) -> None:
    net = made[dtype]
    x = net.box.sample(257, dtype=dtype)
    program = torch.export.export(net, (x,))
    called = {str(node.target) for node in program.graph.nodes}
    assert any("softmax" in name for name in called) and not any("attnforge" in name for name in called)
    assert af.purity(net).attention > 0  # it would raise
    with torch.no_grad():
        fast, graph = net(x), program.module()(x)
    assert not torch.equal(fast, graph)
    assert float((fast - graph).abs().max()) < (1e-4 if dtype == torch.float32 else 1e-10) < net.bound


@needed
@DTYPES
def test_sixty_digits_agree(dtype: torch.dtype, made: dict[torch.dtype, CompiledNetwork]) -> None:
    for group in anchors(made[dtype]):
        assert 0 < worst_share(*alone(group), dtype) <= 1


@needed
@DTYPES
def test_changed_numbers_are_covered_or_left_to_the_softmax(
    dtype: torch.dtype, made: dict[torch.dtype, CompiledNetwork]
) -> None:
    """Values, keys and centres that are a little off what was named, and very much so."""
    group = anchors(made[dtype])[0]
    generator = torch.Generator().manual_seed(0)
    for tenth in (1e-7, 1e-4, 1e-3):
        layer, _ = alone(group)
        for name in ("M_K", "M_V", "b_Q"):
            table = getattr(layer.groups[0], name)
            noise = 1 + tenth * torch.rand(table.shape, generator=generator, dtype=dtype) / 10
            table.data.mul_(noise if name != "b_Q" else torch.where(table == 1, torch.ones_like(table), noise))
        layer, weights = alone(layer.heads()[0])
        assert worst_share(layer, weights, dtype) <= 1, tenth
    layer, _ = alone(group)
    layer.groups[0].M_K.data[0, 3, 1] += 0.5
    layer, weights = alone(layer.heads()[0])
    even = layer.heads()[0].even
    assert isinstance(even, EvenTable) and not even.reads(weights, dtype)
    y = points(weights, even.reach, dtype).unsqueeze(-1)
    before = copy.deepcopy(layer)
    before.heads()[0].even = None
    with torch.no_grad():
        assert torch.equal(layer(y), before(y))


@needed
def test_casts_and_training_are_certified_again(made: dict[torch.dtype, CompiledNetwork]) -> None:
    for net in (copy.deepcopy(made[torch.float64]).float(), copy.deepcopy(made[torch.float32]).double()):
        truth = perceptron(torch.float32 if net.dtype == torch.float64 else torch.float64).double()
        x = net.box.sample(999, dtype=net.dtype)
        af.certify(net)
        with torch.no_grad():
            assert float((net(x).double() - truth(x.double())).abs().max()) <= net.bound
    net = copy.deepcopy(made[torch.float32])
    x, truth = net.box.sample(999, dtype=torch.float32), perceptron(torch.float32).double()
    for size in (1e-6, 1e-2):  # still even; not any more
        generator = torch.Generator().manual_seed(1)
        for group in anchors(net):
            group.M_K.data.add_(size * torch.randn(group.M_K.shape, generator=generator))
        assert ("A8" in af.certify(net).lemmas) == (size < 1e-3)
        with torch.no_grad():
            assert float((net(x).double() - truth(x.double())).abs().max()) <= net.bound


def test_what_files_name_is_looked_at(made: dict[torch.dtype, CompiledNetwork], tmp_path: Path) -> None:
    net, path = made[torch.float32], tmp_path / "net.safetensors"
    net.save(path)
    same = af.load(path)
    assert isinstance(same, CompiledNetwork)
    assert [g.even for g in same.network.groups()] == [g.even for g in net.network.groups()]
    with safe_open(str(path), framework="pt") as file:
        header = json.loads(file.metadata()["attnforge"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    none: list[list[object]] = [[1e300, 0.25, 0.0, 1.0], [1.0, 0.25, 0.0], [1.0, -0.25, 0.0, 1.0], ["x", 0, 0, 0]]
    for wrong in (*none, [1.0, 0.25, 0.0, 1e400]):
        changed = json.loads(json.dumps(header))
        changed["config"]["sites"][0][2]["even"] = wrong
        save_file(tensors, tmp_path / "wrong.safetensors", metadata={"attnforge": json.dumps(changed)})
        with pytest.raises(af.CertificateError):
            af.load(tmp_path / "wrong.safetensors")
    assert EvenTable.named(()) is None
    with pytest.raises(af.ArgumentError):
        EvenTable.named((1.0, 0.25, 0.0, -1.0))


def test_tables_that_are_not_what_was_named_are_not_read() -> None:
    k = np.arange(9) - 4.0
    weights = AnchorWeights(0.8 * k, -0.3 * k * k, np.cos(k), 0.25)
    even = EvenTable.of(weights, -3.0, 3.5)
    assert even is not None and even.reads(weights, torch.float32)
    assert not EvenTable(even.rate, even.kappa, even.centre + 0.1, even.reach).reads(weights, torch.float32)
    assert not EvenTable(1.01 * even.rate, even.kappa, even.centre, even.reach).reads(weights, torch.float32)
    assert EvenTable.of(replace(weights, slope=-weights.slope), -3.0, 3.5) is None
    assert EvenTable.of(replace(weights, slope=np.sinh(weights.slope)), -3.0, 3.5) is None
    cold = replace(weights, offset=-20.0 * k * k)
    assert EvenTable(even.rate, 20.0, 0.25, 3.0).reads(cold, torch.float64) and not even.reads(cold, torch.float64)
    assert not EvenTable(even.rate, 20.0, 0.25, 3.0).reads(cold, torch.float32)  # pairs are no polynomials
