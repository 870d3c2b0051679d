"""From a target to a certified network and back: compile, purity, save, load, check, run, train, certify again."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import attnforge as af
from attnforge.compiler.compiled import CompiledNetwork
from attnforge.programs.interpret import values

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from formulas import FORMULAS  # noqa: E402

XY = af.Box(x=(-1, 1), y=(0.5, 2))
#: Forty of the formulas that are measured in benchmarks/compile.py: those that take long are left to it.
SLOW = ("snell", "interference")
CHOSEN = [name for name in FORMULAS if name not in SLOW][::2][:40]


def errors(net: CompiledNetwork, points: Tensor, target: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """|network - target| at points of the box, the target in float64 at the very points that the network gets."""
    shipped = points.to(net.dtype)
    with torch.no_grad():
        found = net(shipped).double()
        exact = (target or (lambda x: values(net.program, x)))(shipped.double())
    assert found.shape == exact.shape
    return (found - exact).abs()


def climb(net: CompiledNetwork, starts: Tensor, steps: int = 15) -> Tensor:
    """Points with larger errors, by signed gradient steps on the error from the given ones, inside the box."""
    wide = net.box.outward(net.dtype)
    low, high = wide.lower.to(net.dtype), wide.upper.to(net.dtype)
    best, most = starts.to(net.dtype), errors(net, starts).reshape(len(starts), -1).amax(-1)
    x = best.clone()
    for i in range(steps):
        x = x.detach().requires_grad_()
        gap = (net.core(x).double() - values(net.program, x.double())).abs().sum()
        (slope,) = torch.autograd.grad(gap, x)
        with torch.no_grad():
            moved = x + 0.1 * 0.7**i * (high - low) * torch.nan_to_num(slope).sign()
            x = torch.minimum(torch.maximum(moved, low), high)
        now = errors(net, x.detach()).reshape(len(x), -1).amax(-1)
        best = torch.where((now > most).reshape(-1, *[1] * (x.dim() - 1)), x.detach(), best)
        most = torch.maximum(now, most)
    return best


def attacked(net: CompiledNetwork, count: int = 4000) -> float:
    """The largest error found at random points, at corners, and by climbing from the worst of them."""
    points = torch.cat([net.box.sample(count, 1, net.dtype), net.box.corners(512, net.dtype)])
    found = errors(net, points).reshape(len(points), -1).amax(-1)
    worst = points[found.argsort(descending=True)[:64]]
    return max(float(found.max()), float(errors(net, climb(net, worst)).max()))


def target_range(formula: str, box: af.Box) -> float:
    from attnforge.frontends.formula.program import capture_formula

    seen = values(capture_formula(formula, box), torch.cat([box.sample(4000), box.corners(512)]))
    return float(seen.max() - seen.min())


@pytest.fixture(scope="module")
def net() -> CompiledNetwork:
    return af.compile("sin(x*y) + exp(-x**2)/y", XY, eps=1e-3)


def test_the_whole_way(net: CompiledNetwork, tmp_path: Path) -> None:
    assert net.certificate.kind == "certified" and net.bound <= 1e-3
    assert af.purity(net).by_operation["softmax"] >= 2
    points = XY.sample(1000, dtype=torch.float32)
    x, y = points.double().unbind(-1)
    assert (net(points).double() - (torch.sin(x * y) + torch.exp(-x * x) / y)).abs().max() <= net.bound
    assert net(points).shape == (1000,) and net(points.reshape(10, 100, 2)).shape == (10, 100)
    assert net(points[0]).shape == () and net(points[:0]).shape == (0,)
    net.save(tmp_path / "net.safetensors")
    back = af.load(tmp_path / "net.safetensors")
    assert torch.equal(back(points), net(points)) and back.certificate == net.certificate
    assert af.check(tmp_path / "net.safetensors") == net.certificate
    assert str(back.program) == str(net.program) and back.size == net.size


def test_the_ledger_adds_up(net: CompiledNetwork) -> None:
    total = math.fsum(term.value for term in net.certificate.terms)
    assert total <= net.certificate.bound <= 1.0001 * total
    shown = str(net.certificate)
    assert all(word in shown for word in ("1/y", "sin(x*y)", "affine maps", "rounding", "interpolation", "total"))


@pytest.mark.parametrize("name", CHOSEN)
def test_formulas_keep_their_bound(name: str) -> None:
    formula, sides = FORMULAS[name]
    box = af.Box(sides)
    eps = 1e-3 * target_range(formula, box)
    net = af.compile(formula, box, eps=eps)
    assert net.bound <= eps
    assert net.size.heads <= 60 and net.size.layers <= 8
    assert attacked(net, 2000) <= net.bound


@pytest.mark.parametrize("formula", ["x*exp(-x**2)*y", "sqrt(x**2 + y**2)", "max(x, y) - abs(x*y)"])
def test_float64_reaches_a_millionth(formula: str) -> None:
    net = af.compile(formula, af.Box(x=(-1, 1), y=(-1, 1)), eps=1e-6, dtype=torch.float64)
    assert net.certificate.dtype == "float64" and attacked(net, 2000) <= net.bound <= 1e-6


def test_what_other_tools_drop_or_blow_up() -> None:
    waves = af.compile("sin(5*a) + cos(3*a)", af.Box(a=(-1, 1)), eps=1e-3)
    a = torch.linspace(-1, 1, 2001)
    exact = torch.sin(5 * a.double()) + torch.cos(3 * a.double())
    assert (waves(a[:, None]).double() - exact).abs().max() <= waves.bound <= 1e-3
    decay = af.compile("exp(-x/100) - exp(-(x+1)/100)", af.Box(x=(0, 100)), eps=1e-6)
    x = torch.linspace(0, 100, 2001)
    gap = torch.exp(-x.double() / 100) - torch.exp(-(x.double() + 1) / 100)
    assert (decay(x[:, None]).double() - gap).abs().max() <= decay.bound <= 1e-6
    nothing = af.compile("x - x", af.Box(x=(-1, 1)), eps=1e-3)
    assert torch.equal(nothing(a[:, None]), torch.zeros(2001)) and nothing.bound < 1e-300


def test_several_outputs() -> None:
    net = af.compile(["x*y", "x + y", "2"], XY, eps=1e-3)
    points = XY.sample(100, dtype=torch.float32)
    x, y = points.double().unbind(-1)
    assert net(points).shape == (100, 3)
    assert (net(points).double() - torch.stack([x * y, x + y, torch.full_like(x, 2)], -1)).abs().max() <= net.bound


def test_several_tensors(tmp_path: Path) -> None:
    boxes = (af.Box.cube(-1, 1, shape=3), af.Box.cube(0, 1, shape=(2, 3)))
    net = af.compile(lambda a, b: (b * a.unsqueeze(1)).sum(-1), boxes, eps=1e-3)
    a, b = (box.sample(50, seed=i, dtype=torch.float32) for i, box in enumerate(boxes))
    exact = (b.double() * a.double().unsqueeze(1)).sum(-1)
    assert net(a, b).shape == (50, 2) and (net(a, b).double() - exact).abs().max() <= net.bound <= 1e-3
    net.save(tmp_path / "two.safetensors")
    assert torch.equal(af.load(tmp_path / "two.safetensors")(a, b), net(a, b))
    assert af.check(tmp_path / "two.safetensors").bound == net.bound
    with pytest.raises(af.ArgumentError, match="expected 2 input tensor"):
        net(a)


def test_relative_tolerance() -> None:
    box = af.Box(x=(0, 8))
    points = box.sample(5000, dtype=torch.float32)
    exact = torch.exp(points[:, 0].double())
    for eps, rtol in ((1e-4, 1e-3), (None, 1e-3), (1e-3, 1e-2)):
        net = af.compile("exp(x)", box, eps, rtol=rtol)
        error = (net(points).double() - exact).abs()
        assert (error <= (eps or 0.0) + rtol * exact).all() and error.max() <= net.bound
    with pytest.raises(af.PrecisionError):
        af.compile("exp(x)", box, eps=1e-4)  # what the relative part allows is needed
    crossing = af.Box(x=(-1, 1))
    with pytest.raises(af.PrecisionError):
        af.compile("sin(x)", crossing, rtol=1e-3)  # where the target is 0, nothing is allowed


def test_sympy_and_callables_give_what_formulas_give() -> None:
    x, y = sympy.symbols("x y")
    points = XY.sample(200, dtype=torch.float32)
    exact = torch.sin(points[:, 0].double() * points[:, 1].double()) + points[:, 1].double() ** 2
    targets: list[Any] = [
        "sin(x*y) + y**2",
        sympy.sin(x * y) + y**2,
        lambda x, y: torch.sin(x * y) + y**2,
        lambda y, x: af_sin(x * y) + y**2,
    ]
    for target in targets:
        net = af.compile(target, XY, eps=1e-3)
        assert (net(points).double() - exact).abs().max() <= net.bound <= 1e-3


def af_sin(x: Any) -> Any:
    return x.sin()


class Block(nn.Module):
    """A tiny attention block with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x)))


MODULES: dict[str, tuple[Callable[[], nn.Module], af.Box, float]] = {
    "gelu": (lambda: nn.Sequential(nn.Linear(5, 12), nn.GELU(), nn.Linear(12, 2)), af.Box.cube(-1, 1, shape=5), 1e-3),
    "relu": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), af.Box.cube(-1, 1, shape=4), 1e-4),
    "block": (Block, af.Box.cube(-1, 1, shape=(4, 3)), 1e-3),
    "classifier": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1)), af.Box.cube(-1, 1, shape=4), 1e-4),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, box, eps = MODULES[name]
    module = make()
    net = af.compile(module, box, eps=eps)
    points = box.sample(500, dtype=torch.float32)
    with torch.no_grad():
        exact = module.double()(points.double())
        assert net(points).shape == exact.shape
        assert (net(points).double() - exact).abs().max() <= net.bound <= eps
    assert af.purity(net).by_operation["softmax"] >= 1
    assert attacked(net, 500) <= net.bound
    net.save(tmp_path / "m.safetensors")
    assert af.check(tmp_path / "m.safetensors").bound == net.bound


def test_fine_tune_then_certify(tmp_path: Path) -> None:
    net = af.compile("sin(x*y) + exp(-x**2)/y", XY, eps=1e-3)
    before, points = net.bound, XY.sample(256, dtype=torch.float32)
    trained = [p for p in net.parameters() if p.requires_grad]
    names = {name for name, p in net.named_parameters() if p.requires_grad}
    assert any(".M_V" in name for name in names) and any(name.endswith(".S") for name in names)
    exact = values(net.program, points.double()).float()
    optimizer = torch.optim.SGD(trained, lr=1e-4)
    for _ in range(3):
        optimizer.zero_grad()
        loss = (net(points) - 1.001 * exact).square().mean()
        loss.backward()
        optimizer.step()
    with pytest.raises(af.CertificateError, match="stale"):
        _ = net.certificate
    with pytest.raises(af.CertificateError, match="stale"):
        net.save(tmp_path / "stale.safetensors")
    after = af.certify(net)
    assert after.kind == "certified" and after.bound != before
    assert attacked(net, 2000) <= net.bound
    net.save(tmp_path / "tuned.safetensors")
    assert af.check(tmp_path / "tuned.safetensors").bound == net.bound


def test_changed_structure_is_refused_or_paid_for() -> None:
    net = af.compile("x*y", XY, eps=1e-3)
    before, outcomes = net.bound, set()
    for frozen in [p for p in net.parameters() if not p.requires_grad]:
        with torch.no_grad():
            frozen.add_(1e-3)
        try:
            bound = af.certify(net).bound
            assert bound > before and attacked(net, 500) <= bound
            outcomes.add("paid for")
        except af.CertificateError:
            outcomes.add("refused")
        with torch.no_grad():
            frozen.sub_(1e-3)
    assert outcomes
    net = af.compile("sin(x)", af.Box(x=(-1, 1)), eps=1e-3)
    with torch.no_grad():
        next(net.network.groups()).W_Q.add_(1e-3)
    with pytest.raises(af.CertificateError, match="structure"):
        af.certify(net)


def test_other_dtypes_are_certified_anew() -> None:
    net = af.compile("sin(x)*y", XY, eps=1e-9, dtype=torch.float64)
    assert net.bound <= 1e-9
    net.float()
    with pytest.raises(af.CertificateError, match="stale"):
        _ = net.bound
    assert af.certify(net).dtype == "float32" and attacked(net, 1000) <= net.bound < 1e-3


def test_outside_of_the_box(net: CompiledNetwork) -> None:
    net._warned = False
    with pytest.warns(af.DomainWarning, match="'x' reaches 3, outside"):
        net(torch.tensor([[3.0, 1.0]]))
    strict = af.compile("x*y", XY, eps=1e-3, strict=True)
    with pytest.raises(af.DomainError, match="'y' reaches 9"):
        strict(torch.tensor([[0.0, 9.0]]))
    for bad in (math.nan, math.inf):
        with pytest.raises(af.DomainError, match="NaN or infinity"):
            net(torch.tensor([[bad, 1.0]]))
    with pytest.raises(af.ArgumentError, match="columns x, y"):
        net(torch.zeros(4, 3))


TWICE = """
import sys, torch, attnforge as af
torch.manual_seed(0)
box = af.Box(x=(-1, 1), y=(0.5, 2))
af.compile("sin(x*y) + x**3/y", box, eps=1e-3).save(sys.argv[1] + "/formula.safetensors")
mlp = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 2))
af.compile(mlp, af.Box.cube(-1, 1, shape=3), eps=1e-3).save(sys.argv[1] + "/module.safetensors")
"""


def test_the_same_input_gives_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process that has compiled other things before and in a fresh one, whose hashes have another seed."""
    folders = [tmp_path / "here", tmp_path / "there"]
    for folder in folders:
        folder.mkdir()
    monkeypatch.setattr(sys, "argv", ["", str(folders[0])])
    exec(TWICE, {})
    seed = next(str(seed) for seed in (0, 1) if os.environ.get("PYTHONHASHSEED") != str(seed))
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", TWICE, str(folders[1])], env=env, check=True, timeout=300)
    for name in ("formula", "module"):
        one, two = ((folder / f"{name}.safetensors").read_bytes() for folder in folders)
        assert one == two and len(one) > 1000


def test_tampering_is_found(net: CompiledNetwork, tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    net.save(path)
    data = path.read_bytes()
    with safe_open(path, framework="pt") as file:
        text = file.metadata()["attnforge"]
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    header = json.loads(text)

    def rewritten(change: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> bytes:
        new, weights = json.loads(text), {name: tensor.clone() for name, tensor in tensors.items()}
        change(new, weights)
        save_file(weights, path, metadata={"attnforge": json.dumps(new)})
        return path.read_bytes()

    def bound(new: dict[str, Any], weights: dict[str, Tensor]) -> None:
        new["certificate"]["bound"] /= 2

    def weight(new: dict[str, Any], weights: dict[str, Tensor]) -> None:
        name = next(n for n in weights if n.endswith("M_V"))
        weights[name].view(-1)[0] += 1e-3

    def box(new: dict[str, Any], weights: dict[str, Tensor]) -> None:
        new["config"]["boxes"][0]["upper"][0] = 3.0

    def missing(new: dict[str, Any], weights: dict[str, Tensor]) -> None:
        weights.popitem()

    def format_(new: dict[str, Any], weights: dict[str, Tensor]) -> None:
        new["format"] = 99

    assert header["family"] == "network"
    spoiled = [rewritten(change) for change in (bound, weight, box, missing, format_)]
    spoiled += [data[: len(data) // 2], data[:-1], data[:4], b"", b"{}" * 50, data[:-1] + bytes([data[-1] ^ 1])]
    for some in spoiled:
        path.write_bytes(some)
        with pytest.raises(af.CertificateError):
            af.check(path)
    with pytest.raises(af.CertificateError, match="no file"):
        af.check(tmp_path / "nowhere.safetensors")
    path.write_bytes(data)
    assert af.check(path).bound == net.bound, "the file itself was fine"


def test_a_forged_digest_does_not_help(net: CompiledNetwork, tmp_path: Path) -> None:
    """Whoever can compute the digest can state a smaller bound; `check` computes the bound itself."""
    import dataclasses

    path = tmp_path / "forged.safetensors"
    honest = net.certificate
    terms = tuple(dataclasses.replace(t, value=t.value / 4) for t in honest.terms)
    forged = dataclasses.replace(honest, bound=honest.bound / 2, terms=terms)
    try:
        net.attach(forged)
        net.save(path)
    finally:
        net.attach(honest)
    assert af.load(path).certificate.bound == forged.bound, "loading trusts what is signed"
    with pytest.raises(af.CertificateError, match="can be proved"):
        af.check(path)


BAD: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
    ("x*z", XY, {"eps": 1e-3}, af.FormulaError, "no interval for 'z'"),
    ("x", XY, {"eps": 1e-3}, af.ArgumentError, "does not use y"),
    ("1/x", af.Box(x=(-1, 1)), {"eps": 1e-3}, af.DomainError, "x = 0"),
    ("log(x)", af.Box(x=(-1, 1)), {"eps": 1e-3}, af.DomainError, "log"),
    ("1/sqrt(1 - v**2)", af.Box(v=(0, 1)), {"eps": 1e-3}, af.DomainError, "v = 1"),
    ("sin(x)", af.Box(x=(0, 1)), {"eps": 1e-12}, af.PrecisionError, "float64"),
    ("sin(x)", af.Box(x=(0, 1)), {"eps": 1e-30, "dtype": torch.float64}, af.PrecisionError, "can be"),
    ("x*y" * 33_334, XY, {"eps": 1e-3}, af.FormulaError, "characters"),
    ("(" * 9_000 + "x" + ")" * 9_000, af.Box(x=(0, 1)), {"eps": 1e-3}, af.FormulaError, "nested"),
    ("9**9**9**9*x", af.Box(x=(0, 1)), {"eps": 1e-3}, af.FormulaError, "too large"),
    ("x**1e308", af.Box(x=(0, 1)), {"eps": 1e-3}, af.FormulaError, "exponents"),
    ("1e999*x", af.Box(x=(0, 1)), {"eps": 1e-3}, af.FormulaError, "float64"),
    ("__import__('os')", af.Box(x=(0, 1)), {"eps": 1e-3}, af.FormulaError, "__import__"),
    ("x.__class__", af.Box(x=(0, 1)), {"eps": 1e-3}, af.FormulaError, "attributes"),
    ("x", af.Box(x=(0, 1)), {}, af.ArgumentError, "eps"),
    ("x", af.Box(x=(0, 1)), {"eps": math.nan}, af.ArgumentError, "eps"),
    ("x", af.Box(x=(0, 1)), {"eps": 1e-3, "dtype": torch.float16}, af.ArgumentError, "dtype"),
    ("x", af.Box.cube(0, 1, shape=2), {"eps": 1e-3}, af.ArgumentError, "names"),
    ("x", {"x"}, {"eps": 1e-3}, af.ArgumentError, "must be a Box"),
    ([], XY, {"eps": 1e-3}, af.ArgumentError, "empty"),
    (3.5, XY, {"eps": 1e-3}, af.ArgumentError, "float"),
    (torch.argsort, af.Box.cube(0, 1, shape=3), {"eps": 1e-3}, af.UnsupportedOperation, "sort"),
]


@pytest.mark.parametrize(
    ("target", "box", "options", "error", "words"), BAD, ids=[str(case[0])[:24] + f" {i}" for i, case in enumerate(BAD)]
)
def test_bad_input_is_refused_with_reasons(
    target: Any, box: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        af.compile(target, box, **options)
    assert words in str(caught.value) and len(str(caught.value)) < 2000


@pytest.mark.parametrize("formula", ["1e999*x", "9**9**9**9*x", "x**1e308", "x+" * 50_000 + "x", "__import__('os')"])
def test_refused_within_a_second(formula: str) -> None:
    start = time.perf_counter()
    with pytest.raises(af.FormulaError):
        af.compile(formula, af.Box(x=(0, 1)), eps=1e-3)
    assert time.perf_counter() - start < 1


def test_what_is_said_to_be_reachable_is() -> None:
    with pytest.raises(af.PrecisionError) as caught:
        af.compile("sin(x*y)*y", XY, eps=1e-9)
    assert caught.value.reachable is not None and 1e-9 < caught.value.reachable < 1e-4
    assert af.compile("sin(x*y)*y", XY, eps=caught.value.reachable).bound <= caught.value.reachable


@pytest.mark.parametrize(("lo", "hi"), [(1, 0), (0, math.inf), (math.nan, 1)])
def test_boxes_are_checked(lo: float, hi: float) -> None:
    with pytest.raises(af.ArgumentError, match="interval of 'x'"):
        af.Box(x=(lo, hi))
