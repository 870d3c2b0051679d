"""Kernels for processors: within the bounds of their heads, and everything as before where there are none."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from flint import arb, ctx
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import attnforge as af
import attnforge.network
from attnforge import native
from attnforge.conversion.norm import NativeNorm
from attnforge.conversion.site import ConvertedActivation
from attnforge.heads import FastActivation
from attnforge.heads.fast.read import anchor_read, watched_read
from attnforge.heads.gate.head import GateHead
from attnforge.heads.norm.fused import stages
from attnforge.native import limits, whole
from attnforge.native import norm as rows
from attnforge.network import AttentionLayer, AttentionOnly, Heads

FUNCTIONS = {"gelu": torch.nn.functional.gelu, "mish": torch.nn.functional.mish, "silu": torch.nn.functional.silu,
             "tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu": torch.relu}  # fmt: skip
needed = pytest.mark.skipif(bool(native.trouble()), reason=native.trouble() or "kernels are there")


@pytest.fixture
def elsewhere() -> Iterator[pytest.MonkeyPatch]:
    """A machine with other kernels, or none: what is found out once is found out again, before and after."""
    with pytest.MonkeyPatch.context() as patch:
        native.library.cache_clear()
        yield patch
    native.library.cache_clear()
    native.library()


def numbers_like(dtype: torch.dtype) -> Tensor:
    """Arguments of all sizes: a grid, tails, ends of the dtype, zeros of both signs."""
    far = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e-45, 63.9, -63.9, 47.3, -47.3, 2.0**-126, -(2.0**-126)])
    return torch.cat([torch.linspace(-64, 64, 20_011), torch.linspace(-3, 3, 5003), far]).to(dtype)


@needed
def test_the_exponential_is_within_what_certificates_allow() -> None:
    found = native.library()
    assert found is not None
    torch.manual_seed(0)
    every = torch.cat(
        [torch.linspace(native.LOWEST + 1e-4, 88.0, 400_003), -torch.rand(100_000) * 1e-3, torch.zeros(1)]
    )
    assert 0.5 < native.exponential_error(found, every) < 2.6  # lemma R9
    wide = torch.linspace(-708.39, 0.0, 200_003, dtype=torch.float64)
    assert 0.5 < native.exponential_error(found, wide) < 2.6
    assert 0.5 < native.exponential_error(found, wide / 1e4) < 2.6
    ends = torch.tensor([0.0, -0.0, -87.34, -104.0, -1e30, -float("inf"), float("nan"), 1.0] * 8)
    out = torch.empty_like(ends)
    found.exp(ends.data_ptr(), out.data_ptr(), len(ends))
    assert out[:6].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0] and bool(out[6].isnan())


@needed
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_within_their_bounds(name: str, dtype: torch.dtype) -> None:
    y = numbers_like(dtype)
    exact = FUNCTIONS[name](y.double())
    for eps in (None, 1e-4) if name in ("gelu", "mish") else (None,):
        head = FastActivation.fit(name, -64, 64, eps=eps)
        head.requires_grad_(False)
        found = head(y.float()).double() if dtype == torch.float32 else watch(head, y)[0].double()
        half = 0.0 if dtype == torch.float32 else (2.0**-8) * exact.abs() + 2.0**-126 + 2.0**-8 * head.bound
        off = (found - exact).abs()
        assert bool((off <= head.bound + half).all()), (name, eps)
        assert bool(off.max() > 0)


def watch(head: FastActivation, y: Tensor, low: float = -2.0, high: float = 5.0) -> tuple[Tensor, int]:
    outside = torch.zeros((), dtype=torch.int64)
    with torch.no_grad():
        return head.watched(y, outside, low, high), int(outside)


@needed
def test_sixty_digits_agree() -> None:
    head = FastActivation.fit("gelu", -64, 64)
    y = torch.cat([torch.linspace(-9, 9, 301), torch.tensor([-38.5, -14.1, 17.0, 1e-30])])
    with ctx.workdps(60):
        for x, out in zip(y.tolist(), head(y).tolist(), strict=True):
            truth = arb(x) / 2 * (-arb(x) / arb(2).sqrt()).erfc()
            assert abs(arb(out) - truth) <= arb(head.bound)


@needed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ends_of_rows_counts_and_threads(dtype: torch.dtype) -> None:
    head, before = FastActivation.fit("mish", -64, 64), torch.get_num_threads()  # not symmetric: all polynomials
    torch.manual_seed(1)
    y = (4 * torch.randn(3 * native.GRAIN)).to(dtype)
    whole = watch(head, y)[0]
    for count in (1, 2, 15, 16, 17, 31, 32, 33, 63, 8191, 8193, 3 * native.GRAIN):
        part, outside = watch(head, y[:count])
        assert torch.equal(part, whole[:count]) and outside == int(((y[:count] < -2) | (y[:count] > 5)).sum()), count
    try:
        torch.set_num_threads(3)
        assert torch.equal(watch(head, y)[0], whole)
    finally:
        torch.set_num_threads(before)
    strange = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e38, -1e38, 0.0]).to(dtype)
    out, outside = watch(head, strange)
    assert outside == 5 and bool(out[0].isnan()) and out[3] == strange[3]
    assert bool((out[4:].abs() <= head.bound).all())


@needed
def test_memory_that_is_not_what_it_seems() -> None:
    """Gaps, a sign still to be changed, subclasses, nothing at all, torch.func: each is computed rightly."""
    head = FastActivation.fit("mish", -64, 64)
    torch.manual_seed(2)
    y = torch.randn(64, 33)
    plain = head(y)
    outside = torch.zeros((), dtype=torch.int64)
    with torch.no_grad():
        watched = lambda t: head.watched(t, outside, -64.0, 64.0)  # noqa: E731
        for run in (head, watched, watched):  # the second time what was made ready is used
            assert torch.equal(run(y.t()), plain.t()) and torch.equal(run(y[:, ::2]), plain[:, ::2])
            assert torch.allclose(run(torch._neg_view(-y)), plain, atol=1e-6)
            assert run(torch.zeros(0, 5)).shape == (0, 5) and torch.equal(run(y[3, 4]), plain[3, 4])
            assert torch.allclose(torch.func.vmap(run)(y), plain, atol=1e-6)
            assert torch.equal(run(torch.nn.Parameter(y, requires_grad=False)), plain)
        traced = make_fx(watched)(y)  # what was made ready is no constant of a graph
        assert torch.allclose(traced(2 * y), head(2 * y), atol=1e-6)


@needed
def test_changed_values_are_what_is_read() -> None:
    head = FastActivation.fit("gelu", -64, 64).requires_grad_(False)
    y = torch.linspace(-3, 3, 4096)
    first = watch(head, y)[0]
    changes: list[Callable[[Tensor], object]] = [
        lambda t: t.data.mul_(1.5), lambda t: t.add_(0.25), lambda t: setattr(t, "data", t.data + 1)
    ]  # fmt: skip
    for change in changes:
        change(head.layer.heads()[-1].M_V)
        now = watch(head, y)[0]
        assert not torch.equal(now, first)
        assert torch.allclose(now, head.plain()(y), atol=1e-5)
        first = now
    head.layer.heads()[-1].M_V.data[0, 3] += 0.5  # symmetric no more
    assert torch.allclose(watch(head, y)[0], head.plain()(y), atol=1e-5)


@needed
@pytest.mark.parametrize("channels", [1, 2, 3, 7, 16, 63, 64, 65, 100, 384, 769, 1024])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms_are_within_their_bounds(channels: int, kind: str) -> None:
    if channels == 1 and kind == "layer":
        return  # rows of one number are constant
    head = NativeNorm.fit(channels, (0.05, 60.0), kind=kind)
    torch.manual_seed(channels)
    x = torch.randn(301, channels) * (0.3 + 7 * torch.rand(301, 1)) + torch.randn(301, 1)
    weight, bias = torch.randn(channels), torch.randn(channels)
    table, outside = (head.scale, head.shift, head.mix), torch.zeros((), dtype=torch.int64)
    wide = x.double()
    c = wide - wide.mean(-1, keepdim=True) if kind == "layer" else wide
    v = (c * c).mean(-1, keepdim=True)
    exact = c / (v + head.eps_norm).sqrt()
    inside = ((v > 0.06) & (v < 59.0)).squeeze(-1)
    assert int(inside.sum()) > 30
    limits = (0.05, 60.0, 1e9)
    norming = rows.Norming(table, None, None, kind == "layer", False, channels, outside, limits)
    counted = rows.roundings(channels) + 1 <= sum(stages(channels)) - 1
    assert counted == head.on_a_processor()
    if counted:
        off = (norming(x).double() - exact).abs().amax(-1) / exact.abs().amax(-1)
        assert bool((off[inside] <= head.bound).all()) and bool(off.max() > 0)
    assert int(outside) == (int(((v < 0.05) | (v > 60.0)).sum()) if counted else 0)
    both = rows.Norming(table, weight, bias, kind == "layer", True, channels, None, limits)(x)
    assert torch.allclose(both[inside], (exact * (weight + 1) + bias)[inside].float(), rtol=1e-4, atol=1e-4)
    half = rows.Norming(table, weight, bias, kind == "layer", True, channels, None, limits)(x.bfloat16())
    assert half.dtype == torch.bfloat16 and bool((half.float() - both)[inside].abs().max() < 0.2)


@needed
def test_a_converted_model_is_within_its_report() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(24, 96), torch.nn.GELU(), torch.nn.LayerNorm(96), torch.nn.Linear(96, 5)
    )
    data = torch.randn(512, 24)
    converted, _ = af.convert(model, data, level="pure")
    for dtype in (torch.float32, torch.bfloat16):
        given, before, after = data.to(dtype), model.to(dtype), converted.to(dtype)
        with torch.no_grad():
            gap = (after(given) - before(given)).abs().max()
        assert bool(gap < (1e-5 if dtype == torch.float32 else 0.1))
        assert after[1].head._kept is not None and after[2]._kept is not None
        after(given).float().square().sum().backward()
        assert after[0].weight.grad is not None and after[2].weight.grad is not None


@needed
def test_ranges_are_watched_and_warned_of() -> None:
    torch.manual_seed(0)
    converted, _ = af.convert(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)), torch.randn(64, 8), level="pure"
    )
    with torch.no_grad(), pytest.warns(af.DomainWarning, match="variance reaches"):
        converted(1e4 * torch.randn(64, 8))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        converted(1e4 * torch.randn(64, 8))
    assert int(converted[1].outside) == 128
    assert isinstance(converted[1].head, NativeNorm) and not isinstance(converted[1], ConvertedActivation)


def group(scope: Any, heads: int, slots: int, keys: int, width: int, shared: bool, picks: bool, dtype: Any) -> Heads:
    """Heads of random tables over four channels; queries that pick channels, or mix them."""
    one = 1 if shared else heads
    draw = lambda *shape: torch.randn(*shape, dtype=dtype)  # noqa: E731
    query = torch.zeros(heads, 4, keys, dtype=dtype)
    for h in range(heads):
        query[h, h % 4, 0] = 1.5
    tables = dict(W_Q=query if picks else draw(heads, 4, keys), b_Q=draw(heads, keys), W_O=draw(heads, width, 3),
                  M_K=2 * draw(one, slots, keys), M_V=draw(one, slots, width))  # fmt: skip
    if scope == "self":
        tables |= dict(b_K=draw(heads, keys), W_V=draw(heads, 4, width), b_V=draw(heads, width))
    return Heads(scope, **tables).requires_grad_(False)


@needed
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scope", ["memory", "self"])
def test_softmax_heads_are_those_of_the_network(scope: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    for heads, slots, keys, width, shared, picks in (
        (5, 12, 2, 1, True, True), (4, 7, 1, 2, False, True), (3, 2, 3, 1, False, False), (2, 200, 2, 3, True, False),
        (1, 1000, 2, 1, True, True),
    ):  # fmt: skip
        made = group(scope, heads, slots, keys, width, shared, picks, dtype)
        Z = torch.randn(997, 4, dtype=dtype)
        assert whole.computed(made, made.stack, Z) is not None
        wide = copy.deepcopy(made).double()
        exact = torch.softmax(wide.scores(Z.double()), -1)
        reads = wide.M_V.expand(heads, -1, -1)
        read = torch.einsum("nhs,hsv->nhv", exact[..., -slots:], reads)
        if scope == "self":
            read = read + exact[..., :1] * (torch.einsum("nc,hcv->nhv", Z.double(), wide.W_V) + wide.b_V)
        truth = torch.einsum("nhv,hvo->no", read, wide.W_O)
        found = made(Z)
        gap = float((found.double() - truth).abs().max())
        assert 0 < gap < (2e-4 if dtype == torch.float32 else 4e-13)
        with torch.enable_grad():
            by_torch = made.requires_grad_()(Z)
        assert not torch.equal(found, by_torch) and torch.allclose(found, by_torch, rtol=1e-3, atol=gap * 20)
        made.requires_grad_(False)
        Z[7], Z[8, 1] = float("nan"), float("inf")
        spoilt = made(Z)
        rest = torch.arange(len(Z)) > 8
        assert bool(spoilt[7].isnan().all()) and torch.equal(spoilt[rest], found[rest])
        made.M_V.data.mul_(2)  # what is stored now is what is read
        assert scope == "self" or torch.allclose(made(Z)[9:], 2 * found[9:], atol=gap)


@needed
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_networks_keep_their_bounds(dtype: torch.dtype, elsewhere: pytest.MonkeyPatch) -> None:
    net = af.compile("sin(x*y) + exp(-x**2)/y + abs(x)", af.Box(x=(-1, 1), y=(0.5, 2)), eps=1e-3, dtype=dtype)
    Z = net.box.sample(20_001, dtype=dtype)
    x, y = Z.double().unbind(-1)
    truth = torch.sin(x * y) + torch.exp(-(x**2)) / y + x.abs()
    with torch.no_grad():
        found = net(Z).squeeze(-1)
        native.library.cache_clear()
        elsewhere.setenv("ATTNFORGE_NATIVE", "0")
        before = net(Z).squeeze(-1)
    assert not torch.equal(found, before)  # the kernels did it
    assert bool(((found.double() - truth).abs() <= net.bound).all())
    assert torch.allclose(found, before, atol=2e-5 if dtype == torch.float32 else 1e-12)


@needed
@pytest.mark.parametrize(
    ("scope", "slots", "held"), [("memory", 1024, True), ("memory", 1025, False), ("self", 1024, False)]
)
def test_tables_larger_than_kernels_hold_are_read_in_pieces(
    scope: str, slots: int, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without kernels a softmax keeps a number for every slot and row: only so many rows at once stay in a cache."""
    steps = []

    def pieces(module: Heads, Z: Tensor, step: int, width: int) -> Tensor:
        steps.append(step)
        return Z.new_zeros(len(Z), width)

    monkeypatch.setattr(attnforge.network, "_in_chunks", pieces)
    own = {"W_V": torch.ones(1, 1, 1), "b_K": torch.ones(1, 2)} if scope == "self" else {}
    table = {"M_K": torch.ones(1, slots, 2), "M_V": torch.ones(1, slots, 1), **own}
    group = Heads(scope, W_Q=torch.ones(3, 1, 2), W_O=torch.ones(3, 1, 1), **table)  # type: ignore[arg-type]
    with torch.no_grad():
        group(torch.zeros(1 << 12, 1))
    assert bool(steps) != held, "kernels keep nothing for a slot"
    assert all(step * 3 * (slots + 1) <= attnforge.network.CACHED for step in steps)


@needed
def test_a_slot_with_all_the_weight_is_read_exactly() -> None:
    relu = GateHead.relu(-4, 4).requires_grad_(False)
    y = torch.cat([torch.linspace(-4, 4, 4001), torch.linspace(0.5, 4, 1000)])
    with torch.no_grad():
        found = relu(y)
    assert torch.equal(found[y > 0.1], y[y > 0.1]) and not bool(found[y < -0.1].any())


def test_without_kernels_everything_is_computed_as_before(elsewhere: pytest.MonkeyPatch) -> None:
    y, value = torch.linspace(-9, 9, 1001), torch.linspace(-1, 1, 17)
    with_them = anchor_read(y, value, 1.0, 0.25)
    native.library.cache_clear()
    elsewhere.setenv("ATTNFORGE_NATIVE", "0")
    assert native.library() is None and "ATTNFORGE_NATIVE" in native.trouble() and not native.ready(y)
    assert torch.allclose(anchor_read(y, value, 1.0, 0.25), with_them, atol=1e-6)
    outside = torch.zeros((), dtype=torch.int64)
    watched_read(y, value, outside, 1.0, 0.25, 0.0, 0.0, False, -8.0, 8.0)
    assert int(outside) == int((y.abs() > 8).sum())


@pytest.mark.parametrize("compiler", ["/no/such/compiler", "false"])
def test_what_cannot_be_compiled_is_told(compiler: str, elsewhere: pytest.MonkeyPatch, tmp_path: Path) -> None:
    elsewhere.setenv("CC", compiler)
    elsewhere.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.library() is None and native.trouble()


@needed
def test_an_exponential_that_errs_is_refused(elsewhere: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = native.SOURCE.read_text("utf-8")
    wrong = source.replace("0x1.55548ep-3f", "0x1.56548ep-3f")
    assert wrong != source
    (tmp_path / "kernels.c").write_text(wrong, "utf-8")
    (tmp_path / "whole.h").write_bytes(native.INCLUDED.read_bytes())
    elsewhere.setattr(native, "SOURCE", tmp_path / "kernels.c")
    elsewhere.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.library() is None and "exponential errs" in native.trouble()


@needed
def test_only_folders_of_ones_own_are_used(elsewhere: pytest.MonkeyPatch, tmp_path: Path) -> None:
    elsewhere.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = native.library()
    assert found is not None and found.path.parent == tmp_path / "attnforge"
    assert (tmp_path / "attnforge").stat().st_mode & 0o077 == 0
    (tmp_path / "attnforge").chmod(0o777)
    native.library.cache_clear()
    other = native.library()
    assert other is not None and other.path.parent != tmp_path / "attnforge"


@needed
def test_a_child_of_a_process_with_threads_still_computes() -> None:
    code = (
        "import os, torch; torch.set_num_threads(1)\n"
        "from attnforge.heads import FastActivation\n"
        "head, y = FastActivation.fit('silu', -64, 64), torch.linspace(-3, 3, 100_000)\n"
        "wanted = head(y); pid = os.fork()\n"
        "if not pid: os._exit(0 if torch.equal(head(y), wanted) else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0"
    )
    source = str(Path(__file__).parents[1] / "src")
    ran = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": source}, check=False, timeout=120
    )
    assert ran.returncode == 0


def test_a_library_holds_what_the_source_defines() -> None:
    source = native.SOURCE.read_text("utf-8")
    names = {field.name for field in dataclasses.fields(native.Library)}
    names = {name for name in names - {"path"} if not name.endswith(("network_f", "network_d", "beyond_f", "beyond_d"))}
    assert names and all(f"void attnforge_{name}(" in source for name in names)
    most = {"MOST_SLOTS": whole.SLOTS, "MOST_COORDINATES": whole.COORDINATES, "DEEPEST": whole.POWERS}
    most["STEP"] = whole.STEP
    assert all(re.search(rf"#define {name} {number}\b", source) for name, number in most.items())
    steps = re.search(r"enum \{ DONE, (.*) \};", source)
    assert steps is not None
    assert [getattr(whole, name) for name in steps[1].split(", ")] == [1, 2, 3, 4, 5]
    assert f"#define LANES {rows.LANES} " in source


@pytest.fixture
def several() -> AttentionOnly:
    """Layers of several groups, queries and values of more than one channel, with a skip, a bias or neither."""
    torch.manual_seed(5)
    draw = torch.randn
    plain = AttentionLayer([], S=draw(3, 4), s=draw(4))
    dtype = torch.float64
    two = [group("memory", 5, 12, 2, 1, True, True, dtype), group("self", 3, 2, 3, 2, False, False, dtype)]
    both = AttentionLayer(two, S=torch.eye(4, 3), s=draw(3))
    mean = Heads("self", W_Q=draw(4, 3, 1), b_K=draw(1, 1), W_V=draw(1, 3, 2), M_K=draw(4, 1, 1),
                 M_V=torch.zeros(1, 1, 2), W_O=draw(1, 2, 3))  # fmt: skip
    summed = AttentionLayer([mean, copy.deepcopy(mean)], s=draw(3))
    last = AttentionLayer([], S=draw(3, 2))
    return AttentionOnly([plain, both, summed, last]).double().requires_grad_(False)


def by_torch(net: nn.Module, Z: Tensor) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole, "_takes", lambda Z: False)
        return net(Z)  # type: ignore[no-any-return]


@needed
def test_whole_networks_are_computed_in_one_call(several: AttentionOnly) -> None:
    for dtype, most in ((torch.float64, 1e-12), (torch.float32, 3e-4)):
        net = copy.deepcopy(several).to(dtype)
        for shape in ((1,), (15,), (16,), (17,), (63,), (64,), (65,), (2, 3, 33), (1000,)):
            Z = torch.randn(*shape, 3, dtype=dtype)
            found = net(Z)
            assert found.shape == (*shape, 2) and torch.equal(found, whole.again(net, Z))
            assert torch.allclose(found, by_torch(net, Z), atol=most, rtol=most)
            assert torch.equal(net(Z.reshape(-1, 3)[:1]), found.reshape(-1, 2)[:1])  # a row is a row
        wide = torch.randn(500, 6, dtype=dtype)
        assert torch.equal(net(wide[:, ::2]), net(wide[:, ::2].contiguous()))
        assert net(torch.zeros(0, 3, dtype=dtype)).shape == (0, 2)
        before, Z = torch.get_num_threads(), torch.randn(40_000, 3, dtype=dtype)
        try:
            alone = net(Z)
            torch.set_num_threads(3)
            assert torch.equal(net(Z), alone)
        finally:
            torch.set_num_threads(before)


@needed
def test_a_network_that_changed_is_computed_as_it_is(several: AttentionOnly) -> None:
    """Entries, tables, modules, hooks, dtypes, gradients: whatever is there now decides."""
    Z = torch.randn(50, 3, dtype=torch.float64)
    first = several(Z)

    def data(net: AttentionOnly) -> None:
        cast(Heads, cast(AttentionLayer, net.layers[1]).groups[0]).M_V.data[0, 3] += 1

    def whole_table(net: AttentionOnly) -> None:
        layer = cast(AttentionLayer, net.layers[1])
        layer.S = nn.Parameter(layer.S.detach() * 2, requires_grad=False)  # type: ignore[union-attr]

    def elsewhere_(net: AttentionOnly) -> None:
        net.layers[3].S.data = net.layers[3].S.data.clone() * 3  # type: ignore[union-attr]

    def module(net: AttentionOnly) -> None:
        net.layers[2] = AttentionLayer([], S=torch.eye(3).double()).requires_grad_(False)

    def state(net: AttentionOnly) -> None:
        net.load_state_dict({name: 1.5 * t for name, t in net.state_dict().items()})

    def one_more(net: AttentionOnly) -> None:  # where there was no group before
        table = torch.ones(1, 2, 1)
        head = Heads("memory", W_Q=torch.ones(1, 3, 1), M_K=table, M_V=table, W_O=torch.ones(1, 1, 2))
        cast(nn.ModuleList, net.layers[3].groups).append(head.double().requires_grad_(False))

    def watched(net: AttentionOnly) -> None:
        net.layers[1].register_forward_hook(lambda _, __, out: out + 1)

    def own(net: AttentionOnly) -> None:
        net.layers[2].forward = lambda Z: 2 * Z  # type: ignore[method-assign]

    def turned(net: AttentionOnly) -> None:
        first_layer = cast(AttentionLayer, net.layers[1])
        group = cast(Heads, first_layer.groups[1])
        group.W_V.data = group.W_V.data.flip(0)

    for change in (data, whole_table, elsewhere_, module, one_more, state, watched, own, turned):
        net = copy.deepcopy(several)
        assert torch.equal(net(Z), first)
        change(net)
        found = net(Z)
        assert not torch.allclose(found, first), change.__name__
        assert torch.allclose(found, by_torch(net, Z), rtol=1e-10, atol=1e-10), change.__name__
        assert torch.equal(several(Z), first)
    net = copy.deepcopy(several).requires_grad_()
    out = net(Z)
    assert out.requires_grad and torch.allclose(out, first)
    with torch.no_grad():
        assert torch.equal(net(Z), first)
    assert net(Z).requires_grad
    doubled = {name: 2 * t for name, t in several.state_dict().items()}
    called = torch.func.functional_call(several, doubled, (Z,))
    other = copy.deepcopy(several)
    other.load_state_dict(doubled)
    assert torch.allclose(called, other(Z)) and torch.equal(several(Z), first)
    assert torch.allclose(torch.func.vmap(several)(Z), first) and torch.equal(several(Z), first)
    assert torch.allclose(make_fx(several)(Z)(2 * Z), several(2 * Z))
    with FlopCounterMode(display=False) as counted:  # who counts operators sees them
        several(Z)
    assert counted.get_total_flops() > 0


@needed
def test_inputs_are_compared_with_their_limits() -> None:
    torch.manual_seed(6)
    for dtype in (torch.float32, torch.float64):
        low, high = torch.tensor([-1.0, 0.0, 2.0], dtype=dtype), torch.tensor([1.0, 0.0, 5.0], dtype=dtype)
        tall = limits.repeated(low), limits.repeated(high)
        x = low + (high - low) * torch.rand(101, 3, dtype=dtype)
        x[3], x[4] = low, high
        assert limits.within(x, *tall) and limits.within(x[:1], *tall)
        wrong = (0, 0, 1.0000002), (100, 2, 1.9999998), (50, 1, 1e-30), (7, 2, float("nan")), (9, 0, -float("inf"))
        for row, column, value in wrong:
            y = x.clone()
            y[row, column] = value
            assert not limits.within(y, *tall)
        assert not limits.within(x.t().contiguous().t(), *tall)  # nobody looked
    net = af.compile("x + y", {"x": (0, 1), "y": (0, 1)}, eps=1e-3)
    with pytest.warns(af.DomainWarning, match="'y' reaches 1.5"):
        net(torch.tensor([[0.5, 1.5]]))
    with pytest.raises(af.DomainError, match="NaN"):
        net(torch.tensor([[float("nan"), 0.5]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_heads_whose_own_keys_are_read_are_left_to_pytorch(dtype: torch.dtype, bias: bool) -> None:
    """Heads of scope "self" whose key is a column of the token itself: no kernel holds them, with a bias or without."""
    source = torch.Generator().manual_seed(0)

    def table(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64).to(dtype)

    tables = {"W_Q": table(2, 3, 2), "W_K": table(1, 3, 2), "M_K": table(1, 1, 2), "W_V": table(1, 3, 1),
              "M_V": table(1, 1, 1), "W_O": table(2, 1, 3)}  # fmt: skip
    tables |= {"b_K": table(1, 2)} if bias else {}
    group, Z = Heads("self", **tables).requires_grad_(False), table(9, 3)
    q = torch.einsum("nc,hcj->nhj", Z, group.W_Q)
    own = torch.einsum("nc,hcj->nhj", Z, group.W_K.expand(2, -1, -1)) + (tables["b_K"] if bias else 0.0)
    logits = torch.stack([(q * own).sum(-1), (q * tables["M_K"][0, 0]).sum(-1)], -1).softmax(-1)
    read = logits[..., :1] * (Z @ tables["W_V"][0])[:, None] + logits[..., 1:] * tables["M_V"][0]
    wanted = torch.einsum("nhj,hjc->nc", read, tables["W_O"])
    assert torch.allclose(group(Z), wanted, atol=1e-5 if dtype == torch.float32 else 1e-12)
