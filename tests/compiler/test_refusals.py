"""What bounded formulas can have, they get: waves, kinks, roots; and a refusal names a tolerance that can be had."""

import itertools
import math
import runpy
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flint import arb, ctx

import attnforge as af
from attnforge import Box
from attnforge.certificates.rounding import TINY, UNIT, softmax_rounding
from attnforge.compiler.pipeline import capture, ways
from attnforge.compiler.shorten import pieces, shortened
from attnforge.errors import PrecisionError
from attnforge.functions.parts import rise_of
from attnforge.functions.registry import parse
from attnforge.heads.anchor import fit
from attnforge.heads.anchor.potential import Potential
from attnforge.programs.enclose import cells, ranges
from attnforge.programs.interpret import values

ROOT = Path(__file__).resolve().parents[2]
F32, F64 = torch.float32, torch.float64
WAVES = [
    ("sin(x)", (-30.0, 30.0), torch.sin),
    ("sin(x)", (-100.0, 100.0), torch.sin),
    ("sin(2*pi*x)", (0.0, 10.0), lambda x: torch.sin(2 * math.pi * x)),
    ("sin(30*x)", (-1.0, 1.0), lambda x: torch.sin(30 * x)),
    ("cos(20*x)*exp(-x**2)", (-2.0, 2.0), lambda x: torch.cos(20 * x) * torch.exp(-x * x)),
    ("sin(1/x)", (0.02, 1.0), lambda x: torch.sin(1 / x)),
]


@pytest.mark.parametrize(("formula", "interval", "truth"), WAVES)
def test_waves_compile(formula, interval, truth) -> None:
    net = af.compile(formula, Box(x=interval), eps=1e-3)
    x = torch.linspace(*interval, 20001, dtype=F64).float()[1:-1]
    assert (net(x[:, None]).double() - truth(x.double())).abs().max() <= net.bound <= 1e-3


def test_a_wave_head_is_not_refused_for_few_anchors() -> None:
    head = af.AnchorHead.fit("sin", -100, 100, eps=1e-3, dtype=F64)
    assert head.bound <= 1e-3 and head.size <= 128


def test_the_shape_of_a_head_that_saw_no_waves_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """cos on [0, 300] in float64: 101 anchors leave a quarter of it, and heads of that shape never reached 1e-4."""

    def coarse(q, count, like=None):
        shape = fit.HeadShape(Potential("square"), count, 5, 0.1) if like is None else replace(like, count=count)
        shape = replace(shape, guards=1) if count < 150 and like is None else shape
        error = 0.25 if count < 150 else 1e-4 if shape.guards == 1 else 1e-9
        return fit.Candidate(shape, None, error)

    monkeypatch.setattr(fit, "coarse", coarse)
    monkeypatch.setattr(fit, "refine", lambda q, best, rounds=4: best)
    q = fit.Question(parse("cos"), 0.0, 300.0, F64, False, (Potential("square"),))
    found, _ = fit.for_eps(q, 1e-6)
    assert found is not None and found.shape.guards == 5


@pytest.mark.parametrize(("formula", "truth"), [("cbrt(x)", np.cbrt), ("max(x, 0)**0.25", lambda x: x.clip(0) ** 0.25)])
def test_roots_of_gates_compile_in_float32(formula, truth) -> None:
    net = af.compile(formula, {"x": (-2, 2)}, eps=1e-3)
    x = np.concatenate([10.0 ** -np.linspace(0, 12, 200), [0.0, 2.0]]).astype(np.float32)
    x = np.concatenate([x, -x])
    assert np.abs(net.predict(x[:, None]) - truth(x.astype(float))).max() <= net.bound <= 1e-3


def test_logarithms_of_sums_of_exponentials_are_written_with_softplus() -> None:
    box = Box(x=(-20, 20), y=(-20, 20), z=(-20, 20))
    net = af.compile("log(exp(x) + exp(y) + 2*exp(z))", box, eps=0.04)
    points = torch.cat([box.sample(2000), box.corners()])
    truth = torch.logsumexp(points + torch.tensor([0.0, 0.0, math.log(2)]), -1)
    assert net.certificate.verified and np.abs(net.predict(points) - truth.numpy()).max() <= net.bound <= 0.04


def test_shares_of_sums_of_exponentials_are_written_with_sigmoids() -> None:
    box = Box(x=(-20, 20), y=(-20, 20), z=(-20, 20))
    net = af.compile("exp(y)/(exp(x) + exp(y) + exp(z))", box, eps=1e-3)
    points = torch.cat([box.sample(2000), box.corners()])
    truth = torch.softmax(points, -1)[:, 1].numpy()
    assert net.certificate.verified and np.abs(net.predict(points) - truth).max() <= net.bound <= 1e-3


#: name -> (formula, box, eps in float32, truth); each was refused while sums were added up before they were divided.
RATIOS = {
    "hill": ("x**4/(K**4 + x**4)", {"x": (0, 10), "K": (1, 5)}, 1e-3, lambda x, k: x**4 / (k**4 + x**4)),
    "interest": (
        "(1 + r/n)**(n*t)", {"r": (0.01, 0.1), "n": (1, 12), "t": (1, 30)}, 0.0188,
        lambda r, n, t: (1 + r / n) ** (n * t)),
    "inhibited": (
        "m*S/(K + S + S**2/I)", {"m": (0.1, 1), "S": (0, 10), "K": (0.1, 1), "I": (1, 10)}, 8.1e-4,
        lambda m, s, k, i: m * s / (k + s + s**2 / i)),
    "planck": ("x**3/(exp(x/T) - 1)", {"x": (0.05, 15), "T": (0.5, 3)}, 0.038, lambda x, t: x**3 / np.expm1(x / t)),
    "bivariate": (
        "exp(-(x**2 - 2*r*x*y + y**2)/(2*(1 - r**2)))", {"x": (-3, 3), "y": (-3, 3), "r": (-0.8, 0.8)}, 1e-3,
        lambda x, y, r: np.exp(-(x**2 - 2 * r * x * y + y**2) / (2 * (1 - r**2)))),
    "softmax": ("1/(1 + exp(x/T) + exp(y/T))", {"x": (-4, 4), "y": (-4, 4), "T": (0.2, 2)}, 1e-3,
                lambda x, y, t: 1 / (1 + np.exp(x / t) + np.exp(y / t))),
    "logarithm": ("log10(sqrt(a*c))", {"a": (1e-10, 1e-3), "c": (1e-4, 1)}, 0.0055, lambda a, c: np.log10(a * c) / 2),
    "folded": ("acos(cos(x)) + asin(sin(y))", {"x": (-6, 6), "y": (-7, 20)}, 5e-3,
               lambda x, y: np.arccos(np.cos(x)) + np.arcsin(np.sin(y))),
}  # fmt: skip


@pytest.mark.parametrize("name", RATIOS)
def test_ratios_are_divided_before_they_are_added(name: str) -> None:
    formula, sides, eps, truth = RATIOS[name]
    box = Box(sides)
    net = af.compile(formula, box, eps=eps)
    points = torch.cat([box.corners(dtype=F32), box.sample(4000, 1, F32)])
    wanted = truth(*points.double().numpy().T)
    assert net.certificate.verified and np.abs(net.predict(points) - wanted).max() <= net.bound <= eps


#: name -> (formula, box, eps, dtype, truth); each was refused, some after half a minute, while sums were rounded first.
ROOTS = {
    "cubes": ("(abs(x)**3 + abs(y)**3)**(1/3)", {"x": (-1, 1), "y": (-1, 1)}, 1.2e-3, F32,
              lambda x, y: (abs(x) ** 3 + abs(y) ** 3) ** (1 / 3)),
    "cubes, float64": ("(abs(x)**3 + abs(y)**3)**(1/3)", {"x": (-1, 1), "y": (-1, 1)}, 1.2e-6, F64,
                       lambda x, y: (abs(x) ** 3 + abs(y) ** 3) ** (1 / 3)),
    "horizon": ("sqrt(1 - 2/r)", {"r": (2, 20)}, 9e-4, F32, lambda r: np.sqrt((r - 2) / r)),
    "plasma": ("sqrt(1 - p**2/w**2)", {"p": (0, 1), "w": (1, 5)}, 1e-3, F32,
               lambda p, w: np.sqrt((w - p) * (w + p)) / w),
    "mass": ("sqrt(cosh(u) - cos(v))", {"u": (-2, 2), "v": (-2, 2)}, 2e-3, F32,
             lambda u, v: np.sqrt(2 * (np.sinh(u / 2) ** 2 + np.sin(v / 2) ** 2))),
    "polynomial": ("sqrt(x**2 - 3*x + 2)", {"x": (2, 5)}, 3e-6, F64, lambda x: np.sqrt((x - 1) * (x - 2))),
}  # fmt: skip


@pytest.mark.parametrize("name", ROOTS)
def test_roots_are_taken_of_factors_and_of_lengths(name: str) -> None:
    formula, sides, eps, dtype, truth = ROOTS[name]
    box = Box(sides)
    net = af.compile(formula, box, eps=eps, dtype=dtype)
    steps = 10.0 ** (-12 * torch.rand(2000, 1, generator=torch.Generator().manual_seed(0), dtype=F64))
    corner = box.corners()[torch.arange(2000) % 2**box.dim]
    near = corner + steps * (box.sample(2000, 2) - corner)  # ever nearer to a corner
    small = torch.minimum(torch.maximum(box.sample(2000, 3) * steps, box.lower), box.upper)  # and to 0
    points = torch.cat([box.corners(dtype=dtype), *(p.to(dtype) for p in (near, small))])
    wanted = truth(*points.double().numpy().T)
    assert net.certificate.verified and np.abs(net.predict(points) - wanted).max() <= net.bound <= eps


def test_what_is_continuous_at_0_is_taken_from_there() -> None:
    net = af.compile("-p*log2(p) - (1 - p)*log2(1 - p) + p*log(p/q)", {"p": (0, 1), "q": (0.2, 1)}, eps=3e-3)
    point = net.box.sample(2000, 0)
    point[:500, 0], point[500:1000, 0] = 10.0 ** (-40 * point[:500, 0]), 0.0
    p, q = point.float().double().T
    xlogy = torch.special.xlogy
    wanted = -(xlogy(p, p) + xlogy(1 - p, 1 - p)) / math.log(2) + xlogy(p, p / q)
    assert net.certificate.verified and np.abs(net.predict(point.float()) - wanted.numpy()).max() <= net.bound <= 3e-3


@pytest.mark.parametrize("low", [-20.0, -math.pi, 0.1])
def test_arcs_of_waves_are_folds(low: float) -> None:
    box = Box(x=(low, low + 7))
    waves = {"acos(sin(x))": lambda x: np.arccos(np.sin(x)), "asin(cos(x))": lambda x: np.arcsin(np.cos(x))}
    for formula, truth in waves.items():
        net = af.compile(formula, box, eps=1e-9, dtype=F64)
        x = np.linspace(low, low + 7, 2000)
        assert np.abs(net.predict(x[:, None]) - truth(x)).max() <= net.bound + 1e-7  # numpy's arcs err so much near 1


@pytest.mark.parametrize("formula", ["exp(x)*y", "cosh(x)/cosh(x + y)"])
def test_values_beyond_the_dtype_are_refused_with_advice(formula) -> None:
    with pytest.raises(PrecisionError, match=r"float32 holds numbers up to 3.4e\+38, and .* use dtype=torch.float64"):
        af.compile(formula, {"x": (90, 100), "y": (1, 2)}, eps=1e-3)


def test_a_relative_tolerance_below_the_roundoff_is_named_as_such() -> None:
    with pytest.raises(PrecisionError, match="rounds every number"):
        af.compile("exp(x)", {"x": (0, 1)}, rtol=1e-12)


KINKS = {
    "sqrt(abs(x))": (Box(x=(-1, 1)), lambda x: x[:, 0].abs().sqrt()),
    "abs(x - y)**1.5": (Box(x=(-1, 1), y=(-1, 1)), lambda x: (x[:, 0] - x[:, 1]).abs() ** 1.5),
    "x*abs(x)": (Box(x=(-2, 2)), lambda x: x[:, 0] * x[:, 0].abs()),
}


@pytest.mark.parametrize(("formula", "goal"), list(itertools.product(KINKS, [(F32, 1e-3), (F64, 1e-6)])))
def test_kinks_compile_in_both_dtypes(formula, goal) -> None:
    (box, truth), (dtype, eps) = KINKS[formula], goal
    net = af.compile(formula, box, eps=eps, dtype=dtype)
    point = box.sample(4000, 3, dtype)
    point[1000:2000] = 10.0 ** -(point[1000:2000].abs() * 12)  # on one side of the kink, ever nearer
    point[2000:2100, :] = point[2000:2100, :1]  # on it
    assert (net(point).double() - truth(point.double())).abs().max() <= net.bound <= eps


def _chord(row: list[float]) -> arb:
    x1, x2, t1, t2 = map(arb, row)
    half = ((t1 - t2) / 2).sin()
    return ((x1 - x2) ** 2 + 4 * x1 * x2 * half * half).sqrt()


@pytest.mark.parametrize(("dtype", "eps"), [(F32, 9.8e-3), (F64, 9.8e-6)])
def test_the_law_of_cosines_down_to_no_distance(dtype, eps) -> None:
    box = Box({name: (1, 5) for name in ("x1", "x2", "t1", "t2")})
    net = af.compile("sqrt(x1**2 - 2*x1*x2*cos(t1 - t2) + x2**2)", box, eps=eps, dtype=dtype)
    point = box.sample(400, 0, dtype)
    step = (10.0 ** -(12 * torch.rand(400, generator=torch.Generator().manual_seed(1)))).to(dtype)
    point[:, 1] = (point[:, 0] + step).clamp(1, 5)
    point[:, 3] = (point[:, 2] - step.flip(0)).clamp(1, 5)
    point[:40, 1], point[:40, 3] = point[:40, 0], point[:40, 2]
    found = net(point).double().tolist()
    ctx.dps = 60
    try:
        worst = max(abs(float(arb(y) - _chord(row))) for y, row in zip(found, point.double().tolist(), strict=True))
    finally:
        ctx.dps = 15
    assert worst <= net.bound <= eps


def test_squares_of_other_sizes_do_not_share_a_table() -> None:
    box = Box({name: (1, 5) for name in ("V", "q", "c", "m", "p", "A")})
    assert af.compile("V*q + sqrt(c**4*m**2 + c**2*(p - A*q)**2)", box, eps=0.02).bound <= 0.02


REFUSED = [
    ("sin(x)", Box(x=(-5, 5)), 1e-8, F32),
    ("exp(x)*y", Box(x=(-2, 2), y=(-1, 1)), 1e-8, F32),
    ("x**2/y", Box(x=(-1, 1), y=(0.1, 1)), 1e-8, F32),
    ("abs(x)*y + cos(x)", Box(x=(-1, 1), y=(0, 1)), 1e-17, F64),
]


@pytest.mark.parametrize(("formula", "box", "eps", "dtype"), REFUSED)
def test_advice_can_be_taken(formula, box, eps, dtype) -> None:
    with pytest.raises(PrecisionError) as refused:
        af.compile(formula, box, eps=eps, dtype=dtype)
    reachable = refused.value.reachable
    assert reachable is not None
    (program,) = capture(ways(formula, (box,))[:1], lambda stage: None)
    seen = values(program, box.sample(2000))
    assert eps < reachable <= float(seen.max() - seen.min()) and f"{reachable:g} can be" in str(refused.value)
    assert af.compile(formula, box, eps=reachable, dtype=dtype).bound <= reachable
    routes = {asked: af.plan(formula, box, eps=asked, dtype=dtype).routes for asked in (eps, reachable)}
    certified = {asked: [r for r in found if r.note == "certified"] for asked, found in routes.items()}
    assert not certified[eps] and certified[reachable]


def test_float64_is_never_worse_than_float32() -> None:
    cases = [("sin", -40, 40, 1e-3), ("sqrt", 0, 2, 1e-3), ("log", 1e-3, 4, 1e-5), ("asin", -1, 1, 1e-2)]
    for name, lo, hi, eps in cases:
        reach = {}
        for dtype in (F32, F64):
            try:
                reach[dtype] = max(eps, af.compile(f"{name}(x)", Box(x=(lo, hi)), eps=eps, dtype=dtype).bound)
            except PrecisionError as error:
                reach[dtype] = math.inf if error.reachable is None else error.reachable
        assert reach[F64] <= reach[F32], name


def test_pieces_add_up_to_the_function() -> None:
    rise = rise_of(parse("sin"), 0.75)
    assert parse(rise.name) == rise and abs(float(rise.ball(arb(2))) - (math.sin(2) - math.sin(0.75))) < 1e-15
    box = Box(x=(0.01, 2))
    (program,) = capture(ways("sin(1/x) + x", (box,))[:1], lambda stage: None)
    short = shortened(program, ranges(program, *cells(program, 256)))
    assert len(short.ops) > len(program.ops) and len(pieces(parse("sin"), -100.0, 100.0)) > 4
    x = box.sample(500)
    assert (values(short, x) - values(program, x)).abs().max() < 1e-12


def test_the_rounding_of_weights_that_underflow() -> None:
    """Logits that err in proportion to their gap, however far below the largest: bounded, and not by the spread."""
    rng, u, tiny = np.random.default_rng(0), UNIT[F32], TINY[F32]
    for _ in range(100):
        gap = np.concatenate([[0.0], 10.0 ** rng.uniform(-2, 11, 7)])
        log_weight = -gap - np.log(np.exp(-gap).sum())
        weight, error = np.exp(log_weight), 8 * u * (1 + gap)
        value = rng.normal(size=8)
        spread = np.abs(value - weight @ value)
        args = (weight[None], error[None], np.abs(value)[None], spread[None], u, tiny)
        bound, loose = softmax_rounding(*args, log_weight[None])[0], softmax_rounding(*args)[0]
        for _ in range(20):
            moved = -gap + error * rng.uniform(-1, 1, 8)
            again = np.exp(moved - moved.max())
            assert abs(again @ value / again.sum() - weight @ value) <= bound <= loose * (1 + 1e-12)
        assert bound < 1e-3
    net = af.compile("sqrt(x)", Box(x=(0, 1)), eps=5e-6)
    x = torch.cat([torch.linspace(0, 1, 5001), 10.0 ** -torch.linspace(0, 44, 2001)])
    assert (net(x[:, None]).double() - x.double().sqrt()).abs().max() <= net.bound <= 5e-6


@pytest.mark.parametrize(("name", "lo", "hi", "dtype"), [("sin", -1000, 1000, F64), ("abs", -1, 1, F32)])
def test_the_advice_of_a_head_can_be_taken(name, lo, hi, dtype) -> None:
    with pytest.raises(PrecisionError) as refused:
        af.AnchorHead.fit(name, lo, hi, eps=1e-7, dtype=dtype)
    reachable = refused.value.reachable
    assert reachable is not None
    assert 1e-7 < reachable < 2 and af.AnchorHead.fit(name, lo, hi, eps=reachable, dtype=dtype).bound <= reachable


@pytest.mark.parametrize(
    ("formula", "count", "eps"),
    [("sqrt({})", 30, 3e-4), ("sqrt({} + 1e-7)", 6, 1e-4), ("sqrt(0.1*x0**2 + 0.7*x1**2 + 3*x2**2)", 3, 1e-4)],
)
def test_roots_of_sums_of_squares_err_no_more_than_their_coordinates(formula: str, count: int, eps: float) -> None:
    """In float32, next to 0 and far from it: the sum's own rounding is relative, and errors add up as lengths do."""
    names = [f"x{i}" for i in range(count)]
    text = formula.format(" + ".join(f"{name}**2" for name in names))
    net = af.compile(text, Box({name: (-1, 1) for name in names}), eps)
    rng = np.random.default_rng(0)
    points = rng.uniform(-1, 1, (4000, count)) * 10.0 ** rng.integers(-30, 1, (4000, 1))
    points[:500] *= rng.random((500, count)) < 0.2
    points[500:1000] = np.sign(points[500:1000])
    points = points.astype(np.float32).astype(np.float64)
    weights = np.array([0.1, 0.7, 3.0]) if count == 3 else np.ones(count)
    truth = np.sqrt(points**2 @ weights + (1e-7 if "1e-7" in text else 0.0))
    with torch.no_grad():
        found = net(torch.from_numpy(points).float()).double().numpy()
    assert np.abs(found - truth).max() <= net.bound <= eps


@pytest.mark.parametrize(("name", "share"), [("gauss width", 1e-3), ("distance", 2e-3), ("gauss", 1e-9)])
def test_a_plan_is_what_compile_builds(name: str, share: float) -> None:
    """One of its routes has the layers, heads, anchors, parameters and bound of the network; none, if it is refused."""
    formula, sides = runpy.run_path(str(ROOT / "benchmarks" / "formulas.py"))["FORMULAS"][name]
    box = Box(sides)
    (program,) = capture(ways(formula, (box,))[:1], lambda stage: None)
    seen = values(program, box.sample(4000))
    eps = share * float(seen.max() - seen.min())
    routes = [r for r in af.plan(formula, box, eps=eps).routes if r.note == "certified"]
    if share < 1e-8:
        with pytest.raises(PrecisionError):
            af.compile(formula, box, eps)
        assert not routes
        return
    net = af.compile(formula, box, eps)
    size = net.size
    assert (size.layers, size.heads, size.anchors, size.parameters, net.bound) in [
        (r.layers, r.heads, r.anchors, r.parameters, math.nextafter(r.bound, math.inf)) for r in routes
    ]


@pytest.mark.parametrize(
    ("formula", "box", "dtype"),
    [
        ("sin(x)", (1e30, 1e30), F64), ("tan(x)", (1e30, 1e30), F64), ("cbrt(x)", (0.0, 5e-324), F64),
        ("log1p(x)", (5e-324, 5e-324), F64), ("abs(x)", (-1e-38, 3e38), F32), ("max(x, 1)", (0.0, 3.4028e38), F32),
    ],
)  # fmt: skip
def test_boxes_at_the_ends_of_a_dtype_are_refused_with_the_promised_error(formula, box, dtype) -> None:
    with suppress(PrecisionError):
        assert af.compile(formula, {"x": box}, eps=1e-2, dtype=dtype).bound <= 1e-2


@pytest.mark.parametrize("size", [1e-300, 1e-320, 1e-280])
def test_products_below_float64_have_a_bound_above_zero(size: float) -> None:
    """What is computed is 0, and x*y is not: a bound of 0 was certified once."""
    box = {"x": (-size, size), "y": (-size, size)}
    assert all(af.compile(formula, box, eps=1e-2, dtype=F64).bound > 0 for formula in ("x*y", "relu(x)*y"))


@pytest.mark.parametrize(
    ("formula", "target"),
    [
        ("sin(x) + abs(x)", lambda v: torch.sin(v[..., 0]) + v[..., 0].abs()),
        ("exp(-abs(x))", lambda v: torch.exp(-v[..., 0].abs())),
        ("abs(x)**3", lambda v: v[..., 0].abs() ** 3),
        ("tanh(3*abs(x) - 1)", lambda v: torch.tanh(3 * v[..., 0].abs() - 1)),
        ("sqrt(abs(x) + 0.01)", lambda v: torch.sqrt(v[..., 0].abs() + 0.01)),
        ("abs(x)*exp(-x**2)", lambda v: v[..., 0].abs() * torch.exp(-(v[..., 0] ** 2))),
    ],
)
def test_kinks_in_formulas_take_no_more_than_in_torch(formula, target) -> None:
    mine = af.compile(formula, Box(x=(-1, 1)), eps=1e-3)
    theirs = af.compile(target, Box.cube(-1, 1, shape=1), eps=1e-3)
    assert mine.size.anchors + 4 * mine.size.heads <= theirs.size.anchors + 4 * theirs.size.heads


def test_a_search_goes_on_while_a_try_halves_what_is_missing() -> None:
    """Squares under a clipped root: the fourth try leaves 1.2e-6, the fifth half of it."""
    net = af.compile("sqrt(max(1 - x**2 - y**2, 0))", Box(x=(-1, 1), y=(-1, 1)), eps=1e-6, dtype=F64)
    x = net.program.box.sample(4000)
    assert (net(x) - (1 - (x * x).sum(-1)).clamp(min=0).sqrt()).abs().max() <= net.bound <= 1e-6
