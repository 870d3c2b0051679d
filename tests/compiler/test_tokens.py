"""Operations on whole tokens and between tokens: what is compiled, against the program, without tolerance."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import attnforge as af
from attnforge.compiler.compiled import CompiledNetwork
from attnforge.compiler.pipeline import compile_program as build
from attnforge.errors import CertificateError, DomainError, PrecisionError
from attnforge.programs.interpret import values
from attnforge.programs.ops import Apply, Attention, Constant, Linear, MaxTokens, Mix, Normalise, Product, Softmax
from attnforge.programs.positions import average, positions_of, prepared, reads
from attnforge.programs.program import Builder, Program

DTYPES = (torch.float32, torch.float64)
N, D = 4, 6
Long = np.ndarray


def maker(tokens: int = N, width: int = D, size: float = 1.0) -> Builder:
    return Builder(af.Box.cube(-size, size, shape=(tokens, width)), tokens=tokens)


def linear(make: Builder, i: int, out: int, rng: np.random.Generator, site: str = "") -> int:
    limit = 1 / math.sqrt(make.width(i))
    return make.linear([(i, rng.uniform(-limit, limit, (make.width(i), out)))], rng.uniform(-limit, limit, out), site)


def masked(causal: bool = False) -> Program:
    rng = np.random.default_rng(1)
    mask = np.where(rng.random((N, N)) < 0.4, -np.inf, rng.normal(size=(N, N)))
    mask[np.arange(N), np.arange(N)] = 0.25
    mask[0, 1] = -1e9  # what people write for minus infinity
    make = maker()
    q, k, v = (linear(make, 0, 4, rng) for _ in range(3))
    return make.program(make.attention(q, k, v, scale=0.5, causal=causal, mask=mask), "masked attention")


def attention(causal: bool = False, scale: float = 8**-0.5) -> Program:
    rng = np.random.default_rng(2)
    make = maker()
    q, k, v = (linear(make, 0, w, rng) for w in (3, 3, 5))
    return make.program(make.attention(q, k, v, scale=scale, causal=causal), "attention")


def one(op: Callable[[Builder], int], size: float = 1.0, **shape: int) -> Callable[[], Program]:
    def made() -> Program:
        make = maker(size=size, **shape)
        return make.program(op(make), "one operation")

    return made


def shifted_norm() -> Program:
    """A norm whose variance stays away from 0."""
    make = maker(size=0.5)
    far = make.linear([(0, np.eye(D))], np.array([2.0, -2.0, 1.0, -1.0, 3.0, -3.0]))
    return make.program(make.normalise(far), "layer norm of what is never flat")


def classifier() -> Program:
    """Mean over tokens, a hidden layer, class probabilities."""
    rng = np.random.default_rng(3)
    make = maker()
    hidden = make.apply(linear(make, make.mix(0, np.full((N, N), 1 / N)), 8, rng), "tanh")
    out = make.softmax(linear(make, hidden, 3, rng))
    return make.program(out, "softmax classifier", output_shape=(3,), output_rows="first")


def polynomial() -> Program:
    """Maximum over tokens of x_t y_t, a cumulative sum of it, and a product with itself."""
    make = maker(width=2)
    x, y = make.column(0), make.column(1)
    xy = make.product(x, y)
    top = make.max_tokens(xy)
    total = make.mix(xy, np.tril(np.ones((N, N))))
    return make.program(make.product(top, total), "max times cumsum")


RANDOM = np.random.default_rng(0).normal(size=(N, N))
ALONE: dict[str, Callable[[], Program]] = {
    "softmax": one(lambda make: make.softmax(make.combination([(0, 3.0)]))),
    "softmax, sharp": one(lambda make: make.softmax(make.combination([(0, 60.0)]))),
    "mean": one(lambda make: make.mix(0, np.full((N, N), 1 / N))),
    "sum": one(lambda make: make.mix(0, np.ones((N, N)))),
    "prefix mean": one(lambda make: make.mix(0, np.tril(np.ones((N, N))) / np.arange(1, N + 1)[:, None])),
    "cumsum": one(lambda make: make.mix(0, np.tril(np.ones((N, N))))),
    "reverse": one(lambda make: make.mix(0, np.eye(N)[::-1])),
    "gather": one(lambda make: make.mix(0, np.eye(N)[[2] * N])),
    "any matrix": one(lambda make: make.mix(0, RANDOM)),
    "one token": one(lambda make: make.mix(0, [[-3.0]]), tokens=1),
    "max": one(lambda make: make.max_tokens(0)),
    "rms norm": one(lambda make: make.normalise(0, 1e-3, centred=False)),
    "layer norm": one(lambda make: make.normalise(0, 1e-3)),
    "layer norm, width 8": one(lambda make: make.normalise(0, 1e-2), width=8),
    "layer norm, far from 0": shifted_norm,
    "attention": attention,
    "attention, power of two": lambda: attention(scale=0.5),
    "attention, causal": lambda: attention(causal=True),
    "attention, self": one(lambda make: make.attention(0, 0, 0, scale=D**-0.5)),
    "attention, masked": masked,
    "attention, masked and causal": lambda: masked(causal=True),
    "classifier": classifier,
    "polynomial": polynomial,
}
EXACT = ("reverse", "gather")


def reference(program: Program, x: Tensor) -> Long:
    """The program in long double, written down once more; univariate functions in double."""
    start = x.double().numpy().astype(np.longdouble).reshape(len(x), program.tokens, -1)
    found: list[Long] = []
    for op in program.ops:
        given = [found[i] for i in op.inputs]
        if isinstance(op, Constant):
            out = np.broadcast_to(op.value.astype(np.longdouble), (len(x), *op.value.shape))
        elif isinstance(op, Linear):
            out = sum((v @ w.astype(np.longdouble) for v, w in zip(given, op.weights, strict=True)), op.bias)
        elif isinstance(op, Mix):
            out = op.matrix.astype(np.longdouble) @ given[0]
        elif isinstance(op, Apply):
            out = op.function(torch.from_numpy(given[0].astype(np.float64))).numpy().astype(np.longdouble)
        elif isinstance(op, Product):
            out = given[0] * given[1]
        elif isinstance(op, Softmax):
            out = soft(given[0])
        elif isinstance(op, Attention):
            logits = np.longdouble(op.scale) * given[0] @ given[1].swapaxes(-1, -2) + op.logit_mask(program.tokens)
            out = soft(logits) @ given[2]
        elif isinstance(op, Normalise):
            centre = given[0] - given[0].mean(-1, keepdims=True) if op.centred else given[0]
            out = centre / np.sqrt((centre**2).mean(-1, keepdims=True) + np.longdouble(op.eps))
        elif isinstance(op, MaxTokens):
            out = np.broadcast_to(given[0].max(-2, keepdims=True), given[0].shape)
        else:
            out = start
        found.append(out)
    rows = found[program.output] if program.output_rows == "all" else found[program.output][:, :1]
    return rows.reshape(len(x), *program.output_shape)


def soft(z: Long) -> Long:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def errors(net: CompiledNetwork, program: Program, x: Tensor) -> np.ndarray:
    with torch.no_grad():
        out = net(x).double().numpy().astype(np.longdouble)
    return np.abs(out - reference(program, x)).reshape(len(x), -1).max(-1).astype(np.float64)


def attack(net: CompiledNetwork, program: Program, count: int = 400, rounds: int = 6) -> float:
    """The largest error found: random points, corners, flat and tiny ones, local search, gradient ascent."""
    rng = np.random.default_rng(5)
    low, high = limits(program, net.dtype)
    shape = (count, *program.box.shape)
    draw = [rng.uniform(low, high, shape), np.where(rng.random(shape) < 0.5, low, high)]
    draw.append(rng.uniform(low, high, shape) * 10.0 ** rng.uniform(-6, 0, (count, *[1] * (len(shape) - 1))))
    draw.append(np.broadcast_to(rng.uniform(low, high, (count, *[1] * (len(shape) - 1))), shape))
    points = torch.from_numpy(np.clip(np.concatenate(draw), low, high)).to(net.dtype)
    found = errors(net, program, points)
    worst = float(found.max())
    for k in range(rounds):  # small changes of the worst points, and steps along the error's gradient
        top = points[torch.from_numpy(np.argsort(found)[-40:].copy())].double()
        step = (high - low) * 10.0 ** (-1 - k / 2)
        moved = [top + step * torch.from_numpy(rng.standard_normal(top.shape)) for _ in range(4)]
        moved.append(top + step * ascent(net, program, top))
        points = torch.cat([top, *moved]).clamp(low, high).to(net.dtype)
        found = errors(net, program, points)
        worst = max(worst, float(found.max()))
    return worst


def ascent(net: CompiledNetwork, program: Program, x: Tensor) -> Tensor:
    """The direction in which the largest error of each point grows, as signs."""
    at = x.to(net.dtype).clone().requires_grad_(True)
    gap = (net(at).double() - values(program, at.double())).abs().reshape(len(x), -1)
    (slope,) = torch.autograd.grad(gap.amax(-1).sum(), at)
    return slope.double().sign()


def limits(program: Program, dtype: torch.dtype) -> tuple[float, float]:
    box = program.box.outward(dtype)
    return float(box.lower.min()), float(box.upper.max())


def wanted(name: str, dtype: torch.dtype) -> float:
    if dtype == torch.float64:
        return 1e-9 if "norm" not in name else 1e-6
    return 1e-4 if "norm" not in name else 1e-2


@pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "float64"))
@pytest.mark.parametrize("name", ALONE)
def test_no_violation(name: str, dtype: torch.dtype) -> None:
    program, eps = ALONE[name](), wanted(name, dtype)
    net = build(program, eps, dtype)
    bound = net.certificate.bound
    assert bound is not None
    assert bound <= eps
    found = attack(net, program)
    assert found <= bound
    if name in EXACT:
        assert bound < 1e-300
    else:
        assert found > 1e-3 * bound or bound < 1e-14, "a bound that nothing comes near says little"


@pytest.mark.parametrize("name", ["cumsum", "attention, masked", "layer norm", "max", "classifier"])
def test_pure_and_stored(name: str, tmp_path: Path) -> None:
    program = ALONE[name]()
    net = build(program, 1e-2, torch.float32)
    assert af.purity(net)
    path = tmp_path / "net.safetensors"
    net.save(path)
    again = af.load(path)
    (x,) = net.example_input()
    assert torch.equal(again(x), net(x))
    assert af.check(path).bound == net.certificate.bound == again.certificate.bound


@pytest.mark.parametrize("name", ["softmax", "cumsum", "attention", "attention, masked", "layer norm", "max"])
def test_a_changed_weight_is_noticed(name: str) -> None:
    program, refusals = ALONE[name](), list[str]()
    net = build(program, 1e-2, torch.float32)
    net_bound = net.bound
    group = next(iter(net.network.groups()))
    for table in ("W_Q", "W_K", "W_V", "W_O", "M_K", "b_Q"):
        stored = getattr(group, table)
        if stored is None or not bool(stored.any()):
            continue
        with torch.no_grad():
            place = tuple(torch.nonzero(stored)[0])
            kept = stored[place].clone()
            stored[place] = kept * 1.01
        try:
            found, error = af.certify(net).bound, attack(net, program, 100, 2)
            assert error <= found
            assert found > net_bound or error <= net_bound, f"the bound of a changed {table} stayed"
        except CertificateError as refused:
            refusals.append(str(refused))
        with torch.no_grad():
            stored[place] = kept
    assert net.recertify().bound == net_bound
    assert all("changed" in words for words in refusals)


@pytest.mark.parametrize("name", ["cumsum", "attention, masked", "softmax", "max"])
def test_trained_affine_maps_are_certified_again(name: str) -> None:
    program = ALONE[name]()
    net = build(program, 1e-2, torch.float64)
    before = net.certificate.bound
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.requires_grad:  # positions move as well
                parameter += 1e-7 * torch.randn(parameter.shape, generator=rng, dtype=parameter.dtype)
    after = af.certify(net).bound
    assert before is not None
    assert after is not None
    assert before < attack(net, program, 100, 2) <= after < 0.1


def test_a_mask_hides_exactly() -> None:
    """Hidden tokens have weight 0, bit by bit: changing them changes nothing."""
    program = masked()
    net = build(program, 1e-3, torch.float32)
    op = next(op for op in program.ops if isinstance(op, Attention))
    hidden = op.logit_mask(N) < -1e6
    assert hidden.any()
    x = torch.rand(8, N, D) * 2 - 1
    for i, j in np.argwhere(hidden):
        y = x.clone()
        y[:, j] = -y[:, j]
        assert torch.equal(net(x)[:, i], net(y)[:, i])
        assert i == j or not torch.equal(net(x)[:, j], net(y)[:, j])


def test_norms_that_cannot_be() -> None:
    make = maker()
    with pytest.raises(DomainError, match=r"'the second norm' may divide by 0"):
        build(make.program(make.normalise(0, 0.0, label="the second norm"), "x"), 1e-3, torch.float64)
    with pytest.raises(PrecisionError, match=r"'tiny' has no accurate head"):
        build(make.program(make.normalise(0, 1e-30, label="tiny"), "x"), 1e-3, torch.float64)


def test_a_norm_down_to_its_own_eps() -> None:
    """Variances from 0 on: what is fitted is a function of v + eps, over five decades here."""
    make = maker(width=8)
    net = build(make.program(make.normalise(0, 1e-5, centred=False), "rms norm"), 1e-8, torch.float64)
    assert net.size.heads <= 40
    flat = torch.zeros(1, N, 8, dtype=torch.float64)
    assert torch.equal(net(flat), flat)


def test_constants_are_rounded_and_counted() -> None:
    """Position embeddings that float32 cannot hold, and nothing else to blame."""
    make = maker()
    embedding = np.random.default_rng(9).uniform(-1, 1, (N, D))
    both = make.combination([(0, 1.0), (make.constant(embedding), 1.0)])
    program = make.program(make.max_tokens(both), "with positions")
    net = build(program, 1e-4, torch.float32)
    assert net.certificate.bound is not None
    assert np.abs(np.float32(embedding) - embedding).max() < attack(net, program, 100, 2) <= net.certificate.bound
    assert net.constants is not None
    before = net.bound
    with torch.no_grad():
        net.constants[0, 0] += 1e-3
    assert net.recertify().bound >= attack(net, program, 100, 2) > 5e-4 > before
    with torch.no_grad():
        net.constants[0, 0] = float("nan")
    with pytest.raises(CertificateError, match="constants"):
        net.recertify()


def test_positions_appear_once_and_only_where_needed() -> None:
    make = maker()
    assert positions_of(prepared(make.program(make.mix(0, np.ones((N, N))), "sum"))) is None
    both = make.mix(make.mix(0, RANDOM), np.eye(N)[::-1])
    program = prepared(make.program(both, "two"))
    assert prepared(program) is program
    assert program.count(Constant) == 1
    place = positions_of(program)
    assert place is not None
    assert all(place in reads(program, i) for i, op in enumerate(program.ops) if isinstance(op, Mix))
    assert average(np.eye(N)) is None


def test_kinks_beside_mixtures_of_tokens_keep_the_positions() -> None:
    """Taking a kink apart leaves out what no value reads, and positions are read by heads alone."""
    make = maker(2, 1)
    program = make.program(make.mix(make.apply(0, "elu"), [[0.0, 1.0], [0.5, 0.5]]), "elu, then a mixture")
    net = build(program, eps=1e-2)
    x = torch.rand(200, 2, 1) * 2 - 1
    with torch.no_grad():
        error = (net(x).double() - values(program, x.double())).abs().max()
    assert net.bound is not None and float(error) <= net.bound


@pytest.mark.parametrize("inner", [False, True], ids=["by an affine map", "by the heads"])
def test_centring_keeps_the_meaning(inner: bool) -> None:
    """Rows of the input are centred by the heads themselves (G3), others by an affine map before them."""
    make = maker(width=6)
    row = 0 if inner else make.linear([(0, np.diag([1.0, 0.5, 0.25, 2.0, 1.0, 3.0]))], np.zeros(6))
    program = make.program(make.normalise(row, 1e-4), "layer norm")
    x = torch.rand(50, N, 6, dtype=torch.float64) * 2 - 1
    new = prepared(program)
    assert [op.centred for op in new.ops if isinstance(op, Normalise)] == [inner]
    assert np.abs(reference(new, x) - reference(program, x)).max() < 1e-15


def block(norm: str, tokens: int = 5, width: int = 8, heads: int = 2, hidden: int = 16) -> Program:
    """A transformer encoder block with random weights of the usual size; norm is "none", "pre" or "post"."""
    rng = np.random.default_rng(7)
    make = maker(tokens, width)

    def normed(i: int, when: str, site: str) -> int:
        if norm != when:
            return i
        gain = np.diag(rng.uniform(0.8, 1.2, width))
        return make.linear([(make.normalise(i, label=site), gain)], rng.uniform(-0.1, 0.1, width))

    def residual(i: int, parts: list[int], site: str) -> int:
        limit = 1 / math.sqrt(sum(make.width(p) for p in parts))
        terms = [(p, rng.uniform(-limit, limit, (make.width(p), width))) for p in parts]
        return make.linear([(i, np.eye(width)), *terms], rng.uniform(-limit, limit, width), site)

    x = make.input
    h = normed(x, "pre", "norm1")
    each = width // heads
    read = [[linear(make, h, each, rng, f"{part}{k}") for part in "qkv"] for k in range(heads)]
    seen = [make.attention(*qkv, scale=each**-0.5, label=f"head{k}") for k, qkv in enumerate(read)]
    x = normed(residual(x, seen, "residual1"), "post", "norm1")
    h = normed(x, "pre", "norm2")
    x = residual(x, [make.apply(linear(make, h, hidden, rng, "up"), "gelu", "gelu")], "residual2")
    return make.program(normed(x, "post", "norm2"), f"encoder block, norm {norm}")


@pytest.mark.parametrize("norm", ["none", "pre", "post"])
def test_encoder_block(norm: str) -> None:
    program = block(norm)
    net = build(program, 1e-4, torch.float64)
    bound = net.certificate.bound
    assert bound is not None
    assert bound <= 1e-4
    assert attack(net, program, 150, 4) <= bound
    assert net.size.layers == (2 if norm == "none" else 4)
    assert af.purity(net)
    assert {"%" not in t.site or t.site.split()[1] for t in net.certificate.terms} >= {"head0", "head1", "gelu"}


def test_encoder_block_in_float32() -> None:
    program = block("none")
    net = build(program, 1e-3, torch.float32)
    assert net.certificate.bound is not None
    assert attack(net, program, 150, 4) <= net.certificate.bound <= 1e-3


def random_program(seed: int) -> Program:
    """A few operations of any kind on each other's results."""
    rng = np.random.default_rng(seed)
    tokens, width = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    make = maker(tokens, width, float(10 ** rng.uniform(-1, 0.5)))
    found = [make.input]

    def attend() -> int:
        mask = np.where(rng.random((tokens, tokens)) < 0.4, -np.inf, rng.normal(size=(tokens, tokens)))
        np.fill_diagonal(mask, 0.0)
        read = [linear(make, int(rng.choice(found)), w, rng) for w in (2, 2, 3)]
        scale, causal = float(rng.choice([1.0, 0.7, -1.3])), bool(rng.random() < 0.5)
        return make.attention(*read, scale=scale, causal=causal, mask=mask if rng.random() < 0.5 else None)

    kinds: dict[str, Callable[[int], int]] = {
        "attention": lambda i: attend(),
        "linear": lambda i: linear(make, i, 3, rng),
        "softmax": make.softmax,
        "mix": lambda i: make.mix(i, rng.normal(size=(tokens, tokens))),
        "max": make.max_tokens,
        "norm": lambda i: make.normalise(i, float(10 ** rng.uniform(-3, 0)), bool(rng.random() < 0.5)),
        "square": lambda i: make.product(i, i),
        "function": lambda i: make.apply(i, str(rng.choice(["gelu", "tanh", "relu"]))),
        "shift": lambda i: make.combination([(i, 1.0), (make.constant(rng.normal(size=(tokens, make.width(i)))), 1.0)]),
    }
    for kind in rng.choice(list(kinds), 5):
        found.append(kinds[kind](int(rng.choice(found))))
    return make.program(found[-1], f"random program {seed}")


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed: int) -> None:
    program = random_program(seed)
    for dtype, eps in ((torch.float32, 1e-2), (torch.float64, 1e-6)):
        net = build(program, eps, dtype)
        assert net.certificate.bound is not None
        assert attack(net, program, 80, 2) <= net.certificate.bound <= eps


@pytest.mark.parametrize("seed", [0, 1])
def test_an_encoder_layer_keeps_a_thousandth_in_float32_where_its_rows_differ(seed: int) -> None:
    """Next to rows that are nearly constant two norms after each other multiply rounding by 1e5; away from them what
    attention gives must be known well enough to see that."""
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    centre = torch.tensor([[0.7, -0.4, 0.2, -0.6], [-0.3, 0.8, -0.7, 0.1]])
    box = af.Box.between(centre - 0.05, centre + 0.05)
    net = af.compile(layer, box, eps=2e-3, proof="kernel" if seed else "analysis")
    truth, points = copy.deepcopy(layer).double(), torch.cat([box.sample(4000), box.corners(256)]).float()
    with torch.no_grad():
        found = float((net(points).double() - truth(points.double())).abs().max())
    assert 0 < found <= net.bound <= 2e-3
