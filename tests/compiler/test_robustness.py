"""Lipschitz constants (H2) and few bits (H3): certified, compared with what can be found, and refused where unknown."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import mpmath as mp
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import attnforge as af
from attnforge.cli import app
from attnforge.compiler.compiled import CompiledNetwork
from attnforge.compiler.quantise import few_bits
from attnforge.errors import ArgumentError, CertificateError
from attnforge.heads.chain.head import ChainHead
from attnforge.heads.fast.activation import FastActivation
from attnforge.heads.norm.head import NormHead
from attnforge.heads.slopes import SlotLines, Tangent, combined, plus, shares, spread_of, steepness, times
from attnforge.heads.token.head import TokenHead
from attnforge.heads.token.rule import peak_slopes

BOX = {"x": (-1.0, 1.0), "y": (-2.0, 2.0)}
FORMULAS = ("x*sin(y)", "sqrt(x**2 + y**2 + 1)", "relu(x - y) + abs(x)", "exp(x)/(3 + y)**2 - x", "tanh(5*x)*y")


@pytest.fixture(scope="module")
def net() -> CompiledNetwork:
    return af.compile("x*sin(y)", af.Box(**BOX), eps=1e-4)


@pytest.mark.parametrize(
    ("formula", "dtype"), [*((f, torch.float32) for f in FORMULAS), *((f, torch.float64) for f in FORMULAS[:2])]
)
def test_no_difference_quotient_is_steeper(formula: str, dtype: torch.dtype) -> None:
    net = af.compile(formula, af.Box(**BOX), eps=1e-3, dtype=dtype)
    steep = net.lipschitz(effort=400)
    wide = copy.deepcopy(net.network).double()  # the stored numbers, computed without visible rounding
    x = net.box.sample(4000, dtype=torch.float64)
    near = x.roll(1, 0) * 0.01 + 0.99 * x
    near[:1000] = x[:1000] + 1e-6 * (x[:1000].roll(1, 0) - x[:1000])

    def value(points: torch.Tensor) -> torch.Tensor:
        tokens = points.unsqueeze(1)
        return wide(tokens)[:, 0, 0].detach()

    moved, allowed = (value(x) - value(near)).abs(), torch.from_numpy(steep.matrix[0]) * (x - near).abs()
    assert (moved <= allowed.sum(-1) + 1e-13).all()  # the last is the rounding of this comparison
    assert (moved <= steep.constant * (x - near).abs().amax(-1) + 1e-13).all()


def test_the_constant_is_close_and_follows_the_weights(net: CompiledNetwork) -> None:
    before = net.lipschitz().constant
    assert 2**0.5 <= before < 1.06 * 2**0.5  # of x sin y on this box
    changed = copy.deepcopy(net)
    with torch.no_grad():
        changed.network.layers[-1].S *= 3.0
    assert changed.lipschitz().constant == pytest.approx(3 * before, rel=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_heads_at_any_scale(scale: float) -> None:
    k = np.arange(-20.0, 21.0)
    lines = SlotLines(2 * k / scale, -k * k, scale * k, 0 * k)  # kappa = 1, spacing and values `scale`
    found = steepness([(1.0, lines)], 0.0, scale * np.linspace(-3, 3, 33)).constant
    assert 1.00204 <= found < 1.02
    gate = SlotLines(
        np.array([1e6 / scale, 0.0]), np.zeros(2), np.zeros(2), np.array([1.0, 0.0])
    )  # y sigmoid(1e6 y/scale)
    edges = scale * np.unique(np.concatenate([s * 2.0 ** -np.arange(0, 60.0) for s in (-1, 1)]))
    assert 1.0998 < steepness([(1.0, gate)], 0.0, edges).constant < 1.12


def digits(lines: SlotLines, at: float) -> tuple[mp.mpf, mp.mpf]:
    """The derivative and the value of a head of one scalar, to 80 digits."""
    y = mp.mpf(at)
    logits = [mp.mpf(float(a)) * y + mp.mpf(float(b)) for a, b in zip(lines.a, lines.b, strict=True)]
    weight = [mp.exp(l - max(logits)) for l in logits]
    w, values = [x / sum(weight) for x in weight], [mp.mpf(float(v)) + mp.mpf(float(u)) * y
                                                    for v, u in zip(lines.V, lines.U, strict=True)]  # fmt: skip
    mean = sum(p * x for p, x in zip(w, values, strict=True))
    tilt = sum(p * mp.mpf(float(a)) for p, a in zip(w, lines.a, strict=True))
    parts = zip(w, lines.a, lines.U, values, strict=True)
    return sum(p * (mp.mpf(float(u)) + (mp.mpf(float(a)) - tilt) * (x - mean)) for p, a, u, x in parts), mean


def test_enclosures_hold_in_high_precision_for_heads_of_every_size() -> None:
    """Slopes up to 1e16 (and 1e16 beside each other), values far from 0, weights that underflow."""
    rng = np.random.default_rng(0)
    with mp.workdps(80):
        for trial in range(40):
            n, (sharp, far, size) = int(rng.integers(1, 7)), 10.0 ** rng.uniform([-3, -3, -5], [16, 9, 5])
            a, b = rng.normal(size=n) * sharp + rng.choice([0.0, 1e16]) * (trial % 2), rng.normal(size=n) * far
            V = rng.normal(size=n) * size + rng.choice([0.0, 1e9])
            lines = SlotLines(a, b, V, rng.normal(size=n) * (rng.uniform(size=n) < 0.5))
            centre = rng.choice([0.0, 0.3, rng.normal() * 1e4])
            edges = np.unique(centre + 10.0 ** rng.uniform(-9, 1) * np.linspace(-1, 1, 5))
            found = steepness([(1.0, lines)], 0.0, edges)
            for i in rng.integers(0, len(found.edges) - 1, 4):
                low, high = found.edges[i], found.edges[i + 1]
                slope, value = digits(lines, float(rng.choice([low, high, np.clip(0.5 * (low + high), low, high)])))
                assert mp.mpf(found.slope[0][i]) <= slope <= mp.mpf(found.slope[1][i])
                assert mp.mpf(found.value[0][i]) <= value <= mp.mpf(found.value[1][i])


@pytest.mark.parametrize("formula", ["relu(x)", "relu(x + 0.3)", "x*abs(x - 0.7)"])
def test_kinks_in_float64_are_as_steep_as_they_are(formula: str) -> None:
    """Logits of 1e16: only their differences say where a kink is."""
    net = af.compile(formula, af.Box(x=(-1, 1)), eps=1e-3, dtype=torch.float64)
    assert net.size.largest_logit > 1e15
    assert net.lipschitz(effort=200).constant < 1.12 * (2.7 if "abs" in formula else 1.0)


def test_single_heads() -> None:
    gelu = af.AnchorHead.fit("gelu", -8, 8, anchors=32, dtype=torch.float64)
    y = torch.linspace(-8, 8, 20001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(gelu(y).sum(), y)
    assert slope.abs().max() <= gelu.lipschitz() < 1.04 * slope.abs().max()
    assert 1.0998 < af.GateHead.relu(-2, 3, sharpness=1e5).lipschitz() < 1.12
    assert 1.0 <= af.GateHead.tanh(-2, 3).lipschitz() < 1.02
    with pytest.raises(ArgumentError, match="two numbers"):
        af.GateHead.max(-1, 1).lipschitz()


def steepest(head: torch.nn.Module, low: float, high: float, count: int = 20001) -> float:
    """The largest slope of a head of one number as softmax attention written out, in float64."""
    head = copy.deepcopy(head).double()
    core = head.plain() if isinstance(head, FastActivation) else head.core
    y = torch.linspace(low, high, count, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(core(y).sum(), y)
    return float(slope.abs().max())


@pytest.mark.parametrize("name", ["gelu", "mish", "silu", "tanh"])
def test_fast_heads_are_as_steep_as_certified(name: str) -> None:
    head = FastActivation.fit(name, -20, 30)
    found = steepest(head, -20, 30)
    assert found <= head.lipschitz() < 1.02 * found
    with torch.no_grad():
        for p in head.parameters():
            if p.requires_grad:
                p += 0.5 * torch.sin(torch.arange(p.numel(), dtype=p.dtype)).reshape(p.shape)
    assert steepest(head, -20, 30) <= head.lipschitz()


@pytest.mark.parametrize(("name", "loose"), [("hardswish", 1.1), ("elu", 2.1), ("softsign", 2.1)])
def test_chains_are_no_steeper_than_certified(name: str, loose: float) -> None:
    head = ChainHead.fit(name, -6, 6)
    found = steepest(head, -6, 6)
    assert found <= head.lipschitz() < loose * found


@pytest.mark.parametrize(
    ("x", "y"), [((-1.0, 1.0), (-1.0, 1.0)), ((0.5, 3.0), (-2.0, 7.0)), ((-5.0, 1.0), (100.0, 101.0))]
)
def test_products_are_as_steep_as_their_operands(x: tuple[float, float], y: tuple[float, float]) -> None:
    head = af.ProductHead.fit(x=x, y=y, dtype=torch.float64)
    for stretched in (1.0, 1.5):
        with torch.no_grad():
            head.layer.heads()[0].W_O *= stretched
        at = [torch.linspace(*side, 101, dtype=torch.float64) for side in (x, y)]
        both = [part.flatten().requires_grad_(True) for part in torch.meshgrid(*at, indexing="ij")]
        slopes = torch.autograd.grad(head.core(*both).sum(), both)
        for slope, limit, side in zip(slopes, head.lipschitz(), (y, x), strict=True):
            assert slope.abs().max() <= limit * (1 + 1e-13)  # computed slopes are rounded
            assert limit < 1.1 * stretched * max(map(abs, side))
    with pytest.raises(ArgumentError, match="a product of vectors"):
        af.ProductHead.fit(x=x, y=y, width=3).lipschitz()


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms_are_as_steep_as_their_shortest_rows(kind: str) -> None:
    head = NormHead.fit(8, variance=(0.25, 9.0), kind=kind, weight=torch.linspace(0.5, 2.0, 8), dtype=torch.float64)
    rows = torch.randn(60, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = rows - rows.mean(-1, keepdim=True)
    sizes = torch.linspace(0.51, 2.99, 60, dtype=torch.float64)
    rows = rows / rows.square().mean(-1, keepdim=True).sqrt() * sizes[:, None]
    slopes = [torch.func.jacrev(head.core)(row[None])[0, :, 0].detach() for row in rows]
    steep = max(float(torch.linalg.matrix_norm(slope, 2)) for slope in slopes)
    assert 0.8 * head.lipschitz() < steep <= head.lipschitz() < 2 / math.sqrt(0.25) * 1.001


def test_token_heads_are_as_steep_as_their_rows() -> None:
    matrix = torch.tensor([[0.5, -1.0, 2.0], [0.0, 2.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    heads = [TokenHead.mean(5, 1), TokenHead.prefix_mean(4, 2), TokenHead.gather(4, 1, 2), TokenHead.mix(matrix, 1)]
    for head, rows in zip(heads, (1.0, 1.0, 1.0, 3.5), strict=True):
        x = torch.zeros(head.tokens, head.channels, dtype=torch.float64)
        jacobian = torch.func.jacrev(copy.deepcopy(head).double().core)(x).flatten(2).abs().sum(-1)
        jacobian = jacobian.detach()
        assert float(jacobian.max()) <= head.lipschitz() * (1 + 1e-15)  # computed slopes are rounded
        assert head.lipschitz() == pytest.approx(rows, rel=1e-6)
    for head in (TokenHead.max(5, 1, lo=-1, hi=1, eps=1e-2), TokenHead.min(3, 2, lo=-1, hi=1, eps=1e-2)):
        x = 2 * torch.rand(300, head.tokens, head.channels, generator=torch.Generator().manual_seed(1)).double() - 1
        x[:, 1:] = x[:, :1] + (x[:, 1:] - x[:, :1]) * 0.02  # within the reach of the soft maximum
        jacobian = torch.func.vmap(torch.func.jacrev(copy.deepcopy(head).double().core))(x).flatten(3).abs().sum(-1)
        assert 1.05 < float(jacobian.detach().max()) <= head.lipschitz()
    with torch.no_grad():
        heads[3].attention.W_Q[..., 0, :] += 0.1
    with pytest.raises(CertificateError, match="depend on tokens"):
        heads[3].lipschitz()


def slopes_of(net: CompiledNetwork, points: torch.Tensor) -> np.ndarray:
    """|d output / d input| of the stored numbers at points, computed in float64."""
    wide, rows = copy.deepcopy(net.network).double(), slice(None if net.program.output_rows == "all" else 1)

    x = points.detach().double().requires_grad_(True)
    state = x.reshape(len(x), net.program.tokens, -1)
    if net.constants is not None:
        state = torch.cat([state, net.constants.double().expand(len(x), -1, -1)], -1)
    values = wide(state)[:, rows].reshape(len(x), -1)
    found = [torch.autograd.grad(column.sum(), x, retain_graph=True)[0] for column in values.unbind(-1)]
    return torch.stack(found, 1).reshape(len(x), len(found), -1).abs().numpy()


@pytest.mark.parametrize(
    ("name", "factor"), [("softmax", 1.2), ("attention", 6), ("maximum", 2), ("mix", 1.1), ("normed", 3)]
)
def test_networks_that_mix_channels_and_tokens(name: str, factor: float) -> None:
    net = af.load(Path(__file__).parents[1] / "files" / f"{name}.safetensors")
    assert isinstance(net, CompiledNetwork)
    steep, x = net.lipschitz(effort=400), net.box.sample(300, dtype=net.dtype)
    if name == "maximum":  # where tokens are nearly equal: the heads are sharp
        near = x[:, :1] + torch.logspace(-7, 0, 300, dtype=net.dtype)[:, None, None] * (x - x[:, :1])
        x = torch.cat([x, near])
    found = slopes_of(net, x)
    assert (found <= steep.matrix + 1e-12).all()  # this comparison's own rounding
    assert found.sum(-1).max() <= steep.constant * (1 + 1e-12) < factor * found.sum(-1).max()
    other = x.roll(1, 0)
    with torch.no_grad():
        moved = (net.core(x).double() - net.core(other).double()).abs().reshape(len(x), -1).amax(-1)
    assert (moved <= steep.constant * (x - other).double().abs().reshape(len(x), -1).amax(-1) + 2 * net.bound).all()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 40.0])
def test_coefficients_of_means_are_enclosed(scale: float) -> None:
    """Weights, spreads, maxima and means: at every point of an interval of logits, what is enclosed is there."""
    rng = np.random.default_rng(2)
    for _ in range(100):
        n = int(rng.integers(1, 6))
        low = scale * rng.normal(size=(1, n))
        high = low + scale * rng.uniform(0, 1, size=(1, n)) * rng.integers(0, 2)
        inner = low + rng.uniform(size=(200, n)) * (high - low)
        inner[:1], inner[1:2] = low, high
        weight = np.exp(inner - inner.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        slope = weight * (1 + inner - (weight * inner).sum(-1, keepdims=True))
        for enclosed, real in ((shares(low, high), weight), (peak_slopes(low, high), slope),
                               (spread_of(shares(low, high)), weight * (1 - weight))):  # fmt: skip
            own = 1e-15 * (1 + scale)  # the rounding of these numbers themselves
            assert (enclosed[0] <= real + own).all() and (real <= enclosed[1] + own).all()
        moving = rng.normal(size=(2, 1, n, 4))
        tangent = Tangent(moving.min(0), moving.max(0), np.abs(moving).max(0).sum(-1))
        mean = combined(shares(low, high), tangent, 1.0, np.ones(1))
        real = np.einsum("pm,mi->pi", weight, moving[0, 0])
        assert (mean.low <= real + 1e-15).all() and (real <= mean.high + 1e-15).all()
        assert np.abs(real).sum(-1).max() <= mean.total[0] * (1 + 1e-12)
    hidden = np.array([[0.0, -np.inf, 1.0]])
    assert shares(hidden, hidden)[1][0, 1] == 0 and shares(hidden, hidden)[0][0, 2] > 0.73
    endless = shares(np.array([[-np.inf, 0.0]]), np.array([[np.inf, 0.0]]))
    assert (endless[0] == 0).all() and (endless[1] == 1).all()


def test_a_norm_is_steep_where_rows_are_small_and_says_so() -> None:
    net = af.compile(torch.nn.RMSNorm(3, eps=1e-2), af.Box.cube(-1, 1, shape=3), eps=0.05, dtype=torch.float64)
    steep = net.lipschitz()
    x = torch.cat([net.box.sample(200, dtype=net.dtype), torch.zeros(1, 3, dtype=net.dtype)])
    found = slopes_of(net, x).sum(-1).max()
    assert 9.9 < found <= steep.constant < 1.7 * found  # 1/sqrt(eps) at 0


def test_changed_masks_and_positions_are_not_overlooked() -> None:
    net = af.load(Path(__file__).parents[1] / "files" / "attention.safetensors")
    before = net.lipschitz(effort=64).constant
    scaled = copy.deepcopy(net)
    with torch.no_grad():
        scaled.network.layers[-1].S *= 2.0
    assert scaled.lipschitz(effort=64).constant == pytest.approx(2 * before, rel=1e-6)
    masked = af.compile(Masked(), af.Box.cube(-1, 1, shape=(3, 2)), eps=1e-2)
    steep = masked.lipschitz()
    assert (slopes_of(masked, masked.box.sample(200, dtype=torch.float32)) <= steep.matrix + 1e-12).all()
    reads = steep.matrix.reshape(3, 2, 3, 2)
    assert reads[:2, :, 2].max() < 1e-30 < 0.1 < reads[2, :, 2].max(), "the third token asks, and tells nobody"


class Masked(torch.nn.Module):
    """One head that sees the first two tokens alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.tensor([[0.0, 0.5, -torch.inf]] * 3)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def test_enclosures_contain_products_and_sums() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        a, b = (np.sort(rng.normal(size=(2, 40)), 0) for _ in range(2))
        inner = [part[0] + rng.uniform(size=40) * (part[1] - part[0]) for part in (a, b)]
        low, high = times((a[0], a[1]), (b[0], b[1]))
        assert ((low <= inner[0] * inner[1]) & (inner[0] * inner[1] <= high)).all()
        low, high = plus((a[0], a[1]), (b[0], b[1]))
        assert ((low <= inner[0] + inner[1]) & (inner[0] + inner[1] <= high)).all()
    low, high = times((np.array([-np.inf]), np.array([np.inf])), (np.zeros(1), np.ones(1)))
    assert low[0] == -np.inf and high[0] == np.inf


@pytest.mark.parametrize("bits", [4, 8, 12, "bfloat16"])
def test_few_bits_are_certified_from_what_is_stored(net: CompiledNetwork, bits: int | str) -> None:
    small = af.quantise(net, bits)  # type: ignore[arg-type]
    x = net.box.sample(20000, dtype=net.dtype)
    exact = x[:, 0].double() * torch.sin(x[:, 1].double())
    assert (small.network(x).detach().double() - exact).abs().max() <= small.bound
    assert small.bytes_after < small.bytes_before and small.bound_before == net.bound
    state = small.network.network.state_dict()
    for name, few in small.tables.items():
        assert np.array_equal(few.numbers, state[name].double().numpy()), "integers times powers of two, exactly"
        assert np.array_equal(few.integers, np.rint(few.integers)) and np.abs(few.integers).max() < 2 ** (int(bits) - 1)
    assert bool(small.tables) == (bits != "bfloat16")
    assert net.recertify().bound == net.bound, "the network itself is as it was"


def test_more_bits_are_better_and_integers_can_be_spoiled(net: CompiledNetwork) -> None:
    found = [af.quantise(net, bits).bound for bits in (6, 8, 10, 14)]
    extra = [bound - net.bound for bound in found]
    assert extra == sorted(extra, reverse=True) and 0 < extra[-1] < extra[0] / 2**6  # a bit halves the step
    small = af.quantise(net, 8)
    honest = small.bound
    with torch.no_grad():
        small.network.network.layers[1].groups[0].M_V[0, 3, 0] += 0.1
    assert small.network.recertify().bound > 2 * honest


@pytest.mark.parametrize("axis", [0, 1])
def test_integers_fit_their_bits_at_every_scale(axis: int) -> None:
    rng = np.random.default_rng(1)
    for bits in (2, 4, 8, 16):
        for scale in (1e-30, 1.0, 1e30):
            numbers = scale * rng.normal(size=(6, 5))
            numbers[0] = scale * 2.0 ** np.arange(5)  # on the edge of a step
            few = few_bits(numbers, bits, axis)
            assert np.abs(few.integers).max() <= 2 ** (bits - 1) - 1
            assert (np.abs(few.numbers - numbers) <= 0.5 * np.ldexp(1.0, few.exponent)).all()
    assert (few_bits(np.zeros((2, 2)), 8, axis).numbers == 0).all()


def test_wrong_use_is_refused(net: CompiledNetwork) -> None:
    for bits in (1, 17, 8.0, True, "int8"):
        with pytest.raises(ArgumentError, match="bits must be"):
            af.quantise(net, bits)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"attnforge\.compile made"):
        af.quantise(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_on_the_command_line(net: CompiledNetwork, tmp_path: Path) -> None:
    file, small = tmp_path / "net.safetensors", tmp_path / "small.safetensors"
    net.save(file)

    def call(*args: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, list(args), prog_name="attnforge")
        return result.exit_code, result.output

    code, told = call("lipschitz", str(file), "--json")
    assert code == 0 and json.loads(told)["constant"] == net.lipschitz().constant
    code, told = call("quantise", str(file), "--bits", "8", "-o", str(small), "--json")
    assert code == 0 and json.loads(told)["bound"] == af.load(small).bound
    code, told = call("quantise", str(file), "--bits", "eight", "-o", str(small.with_name("eight.safetensors")))
    assert code == 2 and "bits must be" in told
    af.GateHead.relu(-1, 1).save(small, force=True)
    code, told = call("lipschitz", str(small))
    assert code == 2 and "takes a compiled network" in told


def test_a_head_whose_interval_leaves_the_domain_is_bounded_where_it_is_used(tmp_path: Path) -> None:
    net = af.compile("sqrt(1 - 1/x)", {"x": (1.001, 3)}, 1e-3, dtype=torch.float64)
    x = 1.001 + torch.logspace(-12, math.log10(1.999), 500, dtype=torch.float64)
    x = x.clamp(max=3)
    error = (net(x[:, None]).flatten() - (1 - 1 / x).sqrt()).abs().max()
    assert float(error.detach()) <= net.certificate.bound <= 1e-3
    assert math.isclose(sum(term.value for term in net.certificate.terms), net.certificate.bound, rel_tol=1e-12)
    net.save(tmp_path / "root.attn")
    assert af.check(tmp_path / "root.attn").bound <= 1e-3


@pytest.mark.parametrize("bits", [4, 8])
def test_what_reaches_beyond_its_intervals_is_certified_as_often_as_asked(bits: int, tmp_path: Path) -> None:
    """Rounding moves arguments out of the intervals of heads: the bound that was found once is found again."""
    net = af.quantise(af.compile("sin(x)*y", af.Box(x=(-1, 1), y=(0.5, 2)), eps=1e-2), bits).network
    net.save(tmp_path / "few.safetensors")
    again = af.load(tmp_path / "few.safetensors")
    bounds = {af.check(tmp_path / "few.safetensors").bound, af.certify(again).bound, af.certify(again).bound, net.bound}
    assert bounds == {net.bound} and again.measure(500).worst <= net.bound
    plain = af.export.to_plain(again)
    assert net.bound <= plain.bound <= 1.01 * net.bound
