"""The rounding of constants is part of the certificate: targets are the numbers that formulas and modules spell."""

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from flint import arb, fmpq
from torch import nn

import attnforge as af
from attnforge.functions.directed import precision
from attnforge.programs.program import Program

FORMULAS: tuple[tuple[str, tuple[float, float], Callable[[arb], arb]], ...] = (
    ("0.7*x", (0.5, 1), lambda x: x * fmpq(7, 10)),
    ("1.1*x", (0.5, 1), lambda x: x * fmpq(11, 10)),
    ("0.1 + 0*x", (-1, 1), lambda x: arb(fmpq(1, 10))),
    ("1e64*erfc(12)*x", (0.5, 1), lambda x: arb(10) ** 64 * arb(12).erfc() * x),
    ("pi*x - 3*x", (0.5, 1), lambda x: (arb.pi() - 3) * x),
    ("x/3 + 1/7", (0, 1), lambda x: x / 3 + arb(fmpq(1, 7))),
    ("1e-300*pi*x", (0.5, 1), lambda x: arb("1e-300") * arb.pi() * x),
    ("1e300*((1 + 1e-300*pi) - 1)*x", (0.5, 1), lambda x: arb.pi() * x),
    ("x**(1/3)", (0.5, 8), lambda x: x ** arb(fmpq(1, 3))),
    ("exp(-pi*x**2)", (0, 1), lambda x: (-arb.pi() * x**2).exp()),
    ("sinh(max(6.5, x))", (0, 6), lambda x: x.max(arb("6.5")).sinh()),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("formula", "ends", "truth"), FORMULAS, ids=[f for f, _, _ in FORMULAS])
def test_formulas(formula: str, ends: tuple[float, float], truth: Callable[[arb], arb], dtype: torch.dtype) -> None:
    net = af.compile(formula, af.Box(x=ends), 1e-4, dtype=dtype)
    x = torch.linspace(*ends, 301, dtype=dtype).unsqueeze(-1)
    bound = arb(net.bound or 0.0)
    with precision(2000):
        for at, value in zip(x.flatten().tolist(), net(x).tolist(), strict=True):
            assert abs(arb(value) - truth(arb(at))) <= bound
    kept = net.program
    assert Program.from_json(*kept.to_json()) == kept


def normed() -> nn.Module:
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(3).double()
    for tensor, (low, high) in ((norm.running_mean, (-1, 1)), (norm.running_var, (0.1, 2)), (norm.weight, (-1, 1))):
        nn.init.uniform_(tensor, low, high)  # type: ignore[arg-type]
    return nn.Sequential(norm, nn.Linear(3, 1, dtype=torch.float64)).eval()


def exact_norm(x: list[arb], module: nn.Module) -> arb:
    norm, line = module
    total = arb(line.bias[0].item())
    for i, at in enumerate(x):
        scale = arb(norm.weight[i].item()) / (arb(float(norm.running_var[i])) + arb(norm.eps)).sqrt()
        shifted = (at - arb(float(norm.running_mean[i]))) * scale + arb(norm.bias[i].item())
        total += arb(line.weight[0, i].item()) * shifted
    return total


MODULES: tuple[tuple[str, Callable[[], nn.Module], Callable[[list[arb], nn.Module], arb]], ...] = (
    ("batch norm", normed, exact_norm),
    ("mean", lambda: Of(lambda x: x.mean(-1, keepdim=True)), lambda x, _: sum(x, arb(0)) / 3),
    ("quotient", lambda: Of(lambda x: (x / 0.7).sum(-1, keepdim=True)), lambda x, _: sum(x, arb(0)) / arb(0.7)),
    ("folded", lambda: Of(lambda x: ((x * 1.1 + 0.3) * 0.7 - 0.1)[..., :1]),
     lambda x, _: (x[0] * arb(1.1) + arb(0.3)) * arb(0.7) - arb(0.1)),
)  # fmt: skip


class Of(nn.Module):
    """A function of tensors."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize(("make", "truth"), [row[1:] for row in MODULES], ids=[name for name, _, _ in MODULES])
def test_modules(make: Callable[[], nn.Module], truth: Callable[[list[arb], nn.Module], arb]) -> None:
    module = make()
    net = af.compile(module, af.Box.cube(-1, 1, shape=3), 1e-9, dtype=torch.float64)
    x = torch.cat([net.box.sample(300), net.box.corners(8)])
    bound, worst = arb(net.bound or 0.0), 0.0
    with precision(2000):
        for row, (value,) in zip(x.tolist(), net(x).tolist(), strict=True):
            gap = abs(arb(value) - truth([arb(at) for at in row], module))
            assert gap <= bound
            worst = max(worst, float(gap))
    assert (net.bound or 0.0) <= 32 * worst, "what is charged is what rounding may do, not much more"


def test_what_is_exact_is_not_charged() -> None:
    """Constants that float64 holds lose nothing: the program has no distances, and its file no word of them."""
    net = af.compile("0.5*x + 3", af.Box(x=(0, 1)), 1e-3)
    assert all(getattr(op, "off", None) is None for op in net.program.ops)
    assert not any("off" in op for op in net.program.to_json()[0]["ops"])


def test_a_distance_is_no_less_than_it_says(tmp_path: object) -> None:
    net = af.compile("x/3", af.Box(x=(0, 1)), 1e-3, dtype=torch.float64)
    (op,) = net.program.ops[1:]
    third, off = Fraction(float(op.weights[0][0, 0])), Fraction(float(op.off[0][0, 0]))
    assert abs(third - Fraction(1, 3)) <= off <= Fraction(1, 2**55)
