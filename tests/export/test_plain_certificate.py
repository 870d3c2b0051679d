"""The plain form's own certificate: its lemmas attacked, its premises broken, its file checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import attnforge as af
from attnforge.certificates.rounding import TINY, unit
from attnforge.compiler.compiled import CompiledNetwork
from attnforge.compiler.propagation import Propagation, network_bound
from attnforge.export import PlainTransformer, to_plain
from attnforge.export.plain.certificate import Fold, FoldedLayers, Stored, certificate_of, reaches
from attnforge.export.plain.source import compiled_source
from attnforge.export.plain.spec import FLAG
from attnforge.export.plain.stream import Stream, read, refuse_leaks
from attnforge.functions.registry import parse
from attnforge.heads.gate.construction import gate_spec
from attnforge.heads.gate.rule import GateRule
from attnforge.heads.gate.site import GateSite
from attnforge.heads.norm.bound import layer_error
from attnforge.heads.norm.construction import fit, norm_heads
from attnforge.heads.norm.rule import NormLocal, NormRule
from attnforge.heads.norm.site import NormSite
from attnforge.heads.product.bound import Sides, product_error
from attnforge.heads.product.construction import ProductSpec, gain_for
from attnforge.heads.product.rule import _erring, _self_gain
from attnforge.heads.rule import Copies, Moved, Setting
from attnforge.heads.stored import Place, SelfSpec, StoredHeads
from attnforge.network import AttentionLayer
from attnforge.programs.enclose import Range
from attnforge.programs.ops import Apply, Input, Normalise, Op
from attnforge.programs.program import Program

BOX = af.Box(x=(-1.0, 1.0), y=(0.5, 2.0))


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def net() -> CompiledNetwork:
    return af.compile("sin(x*y) + relu(x - y/2)", BOX, eps=1e-3)


@pytest.fixture(scope="module")
def sharp() -> CompiledNetwork:
    """A network whose bound is nothing but rounding."""
    return af.compile("max(x, y)*abs(x) + clip(x, -0.25, 0.5)*y", BOX, eps=1e-4)


def stream_of(net: CompiledNetwork) -> Stream:
    """The plain form of a network, as its tensors hold it."""
    plain = to_plain(net)
    return read(plain.spec, plain.state_dict(), compiled_source(net), reaches(net))


def setting(op: Op, dtype: torch.dtype = torch.float64) -> Setting:
    """A program of one operation, %1, on one token."""
    box = af.Box.cube(-1, 1, shape=(op.width,))
    program = Program(box, 1, (Input(op.width), op), 1, (op.width,), "all", "one operation", ("input", "it"))
    return Setting(program, dtype)


def held(spec: SelfSpec) -> StoredHeads:
    """Self heads as a layer would hold them."""
    tables = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.name not in ("S", "s")}
    return StoredHeads("self", False, "by hand", tables, spec.S, spec.s, tuple(range(spec.W_Q.shape[1])))


# -- the bound -------------------------------------------------------------------------------------------------------


def test_the_bound_holds_where_it_is_all_rounding(sharp: CompiledNetwork) -> None:
    plain = to_plain(sharp)
    x = torch.cat([sharp.box.sample(20000, dtype=torch.float32), sharp.box.corners(64, torch.float32)])
    near = x.clone()
    near[:, 0] = (near[:, 0] * 1e-6) + torch.tensor([0.0, -0.25, 0.5, 1.0])[torch.arange(len(x)) % 4]  # at the kinks
    x = torch.cat([x, near[near[:, 0].abs() <= 1]])
    a, b = x.double().unbind(-1)
    truth = torch.maximum(a, b) * a.abs() + a.clamp(-0.25, 0.5) * b
    measured = float((plain(x).double() - truth).abs().max())
    assert 0 < measured <= plain.certificate.bound < 100 * measured
    assert plain.certificate.bound < 10 * sharp.certificate.bound


def test_the_ledger_adds_up_and_names_what_it_counts_on(net: CompiledNetwork) -> None:
    certificate = to_plain(net).certificate
    assert certificate.kind == "certified"
    assert (
        math.fsum(t.value for t in certificate.terms)
        <= certificate.bound
        <= 1.01 * math.fsum(t.value for t in certificate.terms)
    )
    assert "B6" in certificate.lemmas
    assert any("underflows" in text for text in certificate.assumptions)
    assert any("need_weights" in text for text in certificate.assumptions)


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=40)
def test_folded_sums_err_by_at_most_rho(seed: int) -> None:
    """Random affine maps one after the other, folded and stored in float32, against exact rational arithmetic."""
    rng = np.random.default_rng(seed)
    width, inner, out = rng.integers(2, 7, 3)
    first, second = rng.normal(size=(width - 1, inner)), rng.normal(size=(inner, out))
    bias, last = rng.normal(size=inner), rng.normal(size=out)
    fold = Fold.columns(list(range(1, width)), width).then(first, bias).then(second, last)
    stored = torch.from_numpy(fold.matrix).float().double().numpy()
    u = unit(torch.float32)
    known = Stored.of(stored, fold, u, TINY[torch.float32])
    x = torch.from_numpy(np.concatenate([[1.0], rng.normal(size=width - 1)])).float()
    computed = (x @ torch.from_numpy(stored).float()).double().numpy()
    long = x.double().numpy().astype(np.longdouble)
    exact = (long[1:] @ first + bias) @ second + last
    assert (np.abs(computed - exact) <= known.error(np.abs(x.double().numpy()))).all()


def test_exact_selections_cost_nothing() -> None:
    fold = Fold.columns([1, 2], 4).then(np.array([[1.0, 0.0, 2.0], [0.0, -1.0, 0.0]]), None)
    known = Stored.of(fold.matrix, fold, unit(torch.float32), TINY[torch.float32])
    assert not known.error(np.ones(4)).any()
    hot = np.array([[0.0], [3.3], [-0.7], [128.1]])  # one-hot columns times any numbers: one product with 1
    known = Stored.of(hot, Fold(hot, np.abs(hot), np.zeros_like(hot)), 2.0**-24, TINY[torch.float32], (1, 2, 3))
    assert not known.error(np.array([1.0, 0.0, 1.0, 0.0])).any()
    several = Stored.of(hot, Fold(hot, np.abs(hot), np.zeros_like(hot)), 2.0**-24, TINY[torch.float32])
    assert several.error(np.ones(4)).any()


@given(st.integers(0, 2**32 - 1), st.sampled_from(["abs", "ramp", "leaky_relu", "silu"]), st.floats(1e-7, 1e-3))
@settings(deadline=None, max_examples=30)
def test_gates_whose_coordinates_err_separately(seed: int, name: str, most: float) -> None:
    """Every query coordinate and every value of every head gets an error of its own, in long arithmetic."""
    parameters = {"ramp": {"a": -0.5, "b": 0.25}, "leaky_relu": {"slope": 0.1}}.get(name, {})
    line = "piecewise_linear([-1.5, -0.5, 0.25, 1.25], [-0.5, -0.5, 0.25, 0.25])"
    function = parse({"ramp": line, "leaky_relu": "leaky_relu(0.1)"}.get(name, name))
    site = GateSite(1, name, parameters, 2.0**20, (-1.0, 1.0))
    spec = gate_spec(name, 2.0**20, **parameters).heads
    about, heads, rule = setting(Apply(0, function, 1)), [held(spec)], GateRule()
    local = rule._local(site, about, heads, most)
    if name != "silu":  # which has one coordinate, and takes errors as those of its argument
        assert rule.loosened(site, about, heads, {"query": most, "value": most / 2}).total == local.total
    rng = np.random.default_rng(seed)
    y = np.concatenate([rng.uniform(-1, 1, 200), *(k + rng.uniform(-4, 4, 200) * most for k in (0.0, -0.5, 0.25))])
    shape = (len(y), *spec.W_Q.shape[::2])
    query = y[:, None, None] * spec.W_Q[:, 0] + spec.b_Q + rng.choice([-most, most], shape) * (spec.W_Q[:, 0] != 0)
    value = y[:, None, None] * spec.W_V[:, 0] + spec.b_V
    value = value + rng.choice([-most, most], value.shape) * (spec.W_V[:, 0] != 0)
    keys = np.concatenate([spec.b_K[:, None], spec.M_K], 1)
    logits = np.einsum("nhk,hsk->nhs", query, keys)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    values = np.concatenate([value, np.broadcast_to(spec.M_V[..., 0], (len(y), *spec.M_V.shape[:2]))], -1)
    out = (weights * values).sum(-1) @ spec.W_O[:, 0, 0] + spec.s[0]
    truth = {
        "abs": np.abs(y), "ramp": np.clip(y, -0.5, 0.25), "leaky_relu": np.where(y > 0, y, 0.1 * y),
        "silu": y / (1 + np.exp(-y)),
    }[name]  # fmt: skip
    measured = np.abs(out - truth).max()
    assert measured <= local.total
    assert local.total < 40 * most


@given(st.integers(0, 2**32 - 1), st.floats(1e-8, 1e-4), st.booleans())
@settings(deadline=None, max_examples=20)
def test_products_whose_queries_and_values_err_separately(seed: int, most: float, centred: bool) -> None:
    sides = Sides((-2.0, 3.0), (-1.0, 1.5))
    spec = ProductSpec.build(10, gain_for(1.75 if centred else 1.5), (0.5, 0.25) if centred else (0.0, 0.0)).heads
    bound = product_error(_erring(spec, sides, most), sides, torch.float64).total
    gain = _self_gain(spec, sides, most)
    rng = np.random.default_rng(seed)
    x, y = rng.uniform(*sides.value, 500), rng.uniform(*sides.query, 500)
    x[:4], y[:4] = [-2, -2, 3, 3], [-1, 1.5, -1, 1.5]
    out, errors = np.stack([x, y], -1) @ spec.S[:, 0] + spec.s[0], 0.0
    for h in range(2):
        z = spec.W_Q[h, -1, 0] * y + spec.b_Q[h, 0] + rng.choice([-most, most], 500)
        v = x + spec.b_V[h, 0]
        wrong = rng.choice([-most, most], 500)
        logits = np.concatenate([z[:, None], z[:, None] * spec.M_K[h, :, 0] + spec.M_K[h, :, 1]], 1)
        weight = np.exp(logits)
        out = out + spec.W_O[h, 0, 0] * (v + wrong) * weight[:, 0] / weight.sum(-1)
        errors += gain * most
    assert np.abs(out - x * y).max() <= bound + errors
    assert bound + errors < 100 * most + 1e-12


@given(st.integers(0, 2**32 - 1), st.floats(1e-9, 1e-5))
@settings(deadline=None, max_examples=20)
def test_norms_whose_queries_keys_and_values_err_separately(seed: int, most: float) -> None:
    d, eps, low, high = 4, 1e-3, 0.0, 4.0
    scale, shift, amount = fit(low, high * 1.1, eps, 16, d, torch.float64)
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(400, d)) * rng.uniform(0, 1, (400, 1)) ** 3
    rows = np.clip(rows, -1.9, 1.9)
    op, site, every = Normalise(0, d, eps, centred=False), NormSite(1, (low, high * 1.1), len(scale)), tuple(range(d))
    fitted = sum(layer_error(scale, shift, amount, d, eps, low, high * 1.1, 2.0**-53)) * math.sqrt(d)
    layer = AttentionLayer([norm_heads(np.eye(d), (scale, shift, amount), torch.float64)])
    heads = [StoredHeads.read(layer, Place(0, 0, len(scale), every, every))]
    noise = np.full((len(rows), 1, d), most)
    zero = np.zeros((len(rows), 1, 1))
    copies = Copies(tuple(
        ({"query": np.concatenate([noise * scale[j], zero], -1), "key": np.concatenate([noise, zero], -1),
          "value": noise}, every) for j in range(len(scale))
    ), {})  # fmt: skip
    extra, broken = np.zeros((len(rows), 1, d)), np.zeros(len(rows), dtype=bool)
    here, moved = Range(rows[:, None], rows[:, None]), Moved([np.zeros((len(rows), 1, d, 1))], extra, broken)
    NormRule().copied(site, setting(op), NormLocal((), fitted, 0.0, 0.0), heads, copies, [here], moved)
    out = np.zeros((len(rows), d))
    for j in range(len(scale)):
        off = [rng.choice([-most, most], rows.shape) for _ in range(3)]
        logit = shift[j] - scale[j] * ((rows + off[0]) * (rows + off[1])).sum(-1)
        out += amount[j] * (rows + off[2]) / (1 + np.exp(np.minimum(-logit, 700.0)))[:, None]
    exact = rows / np.sqrt(np.mean(rows**2, -1, keepdims=True) + eps)
    assert not broken.all()
    assert (np.abs(out - exact) <= extra[:, 0] + fitted)[~broken].all()


# -- premises ---------------------------------------------------------------------------------------------------------


def test_a_smaller_omega_is_refused(net: CompiledNetwork) -> None:
    stream = stream_of(net)
    refuse_leaks(stream)
    head = stream.layers[1][0]
    stream.layers[1][0] = dataclasses.replace(head, omega=2 * head.logit + 90.0)
    with pytest.raises(af.PrecisionError, match="excluded"):
        refuse_leaks(stream)


def test_sizes_that_are_too_small_leave_no_bound(net: CompiledNetwork) -> None:
    stream = stream_of(net)
    stream.sizes[2][:, -1] = 1e-3  # what the first heads wrote is said to be smaller than it is
    with pytest.raises(af.PrecisionError, match="no bound can be proved"):
        certificate_of(net, stream)


def test_the_bound_reads_the_weights_that_are_there(net: CompiledNetwork) -> None:
    """Folded weights that are a little off cost what they are off by."""
    stream = stream_of(net)
    clean = network_bound(Propagation(FoldedLayers(net, stream)), net.eps, first=net.grid).bound
    out = stream.readout
    place = int(np.flatnonzero(out[1:, 0])[-1]) + 1
    assert place != FLAG
    out[place, 0] += 1e-2
    worse = network_bound(Propagation(FoldedLayers(net, stream)), net.eps, first=net.grid).bound
    assert worse >= clean + 1e-3


def test_changed_weights_make_the_certificate_stale_and_cost_what_they_are_off_by(net: CompiledNetwork) -> None:
    plain = to_plain(net)
    clean = plain.certificate.bound
    assert af.certify(plain).bound == clean
    plain.readout.weight[0, -1 - int(plain.readout.weight[0].flip(0).bool().byte().argmax())] += 1e-2
    with pytest.raises(af.CertificateError, match="stale"):
        _ = plain.certificate
    assert af.certify(plain).bound >= clean + 1e-3
    plain.blocks[0].attention.in_proj_weight[0, -1] += 2.0**-20
    with pytest.raises(af.CertificateError, match=r"it was changed.*export it again"):
        af.certify(plain)


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_file_checks_without_the_network(net: CompiledNetwork, tmp_path: Path) -> None:
    plain = to_plain(net)
    plain.save(tmp_path / "plain.safetensors")
    again = af.load(tmp_path / "plain.safetensors")
    assert isinstance(again, PlainTransformer)
    x = net.box.sample(50, dtype=torch.float32)
    assert torch.equal(again(x), plain(x))
    assert again.channels == plain.channels
    assert again.heads == plain.heads
    assert af.check(tmp_path / "plain.safetensors").bound == plain.certificate.bound
    again.save(tmp_path / "twice.safetensors")
    assert (tmp_path / "twice.safetensors").read_bytes() == (tmp_path / "plain.safetensors").read_bytes()


def test_a_trained_network_checks_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    net = af.compile(mlp, af.Box.cube(-1, 1, shape=(2,)), eps=1e-2)
    net.network.layers[-1].S += 1e-3
    af.certify(net)
    plain = to_plain(net)
    x = net.box.sample(100, dtype=torch.float32)
    assert float((plain(x) - net(x)).abs().max()) < 1e-6
    assert float((plain(x) - mlp(x)).abs().max()) <= plain.certificate.bound
    plain.save(tmp_path / "plain.safetensors")
    assert af.check(tmp_path / "plain.safetensors").bound == plain.certificate.bound


def test_a_theorem_read_from_a_file_is_certified_from_what_it_says(tmp_path: Path) -> None:
    net = af.theorems.ramp([1.0, -2.0], 0.5, -1, 1, anchors=9, form="tokens")
    plain = to_plain(net)
    plain.save(tmp_path / "ramp.safetensors")
    again = af.load(tmp_path / "ramp.safetensors")
    X = net.points(5)
    assert torch.equal(again(X), plain(X)) and af.certify(again).bound == plain.bound
    found = af.check(tmp_path / "ramp.safetensors")
    assert found.bound == plain.bound and found.kernel is not None and found.word == "certified"


def test_a_theorem_for_what_no_file_can_hold_runs_but_has_no_target(tmp_path: Path) -> None:
    box = af.Box.cube(-1, 1, shape=2)
    net = af.theorems.max_affine(lambda x: x.norm(dim=-1, keepdim=True), box, 9, modulus=lambda t: t)
    plain = to_plain(net)
    plain.save(tmp_path / "cells.safetensors")
    again = af.load(tmp_path / "cells.safetensors")
    X = net.points(5)
    assert torch.equal(again(X), plain(X)) and again.certificate.kind == "analysed"
    with pytest.raises(af.CertificateError, match="no file can hold"):
        af.check(tmp_path / "cells.safetensors")
