"""The rounding of constants is part of the certificate: targets are the numbers that formulas and modules spell."""

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from flint import arb, fmpq

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
