"""Kernels for GPUs, run by Triton's interpreter, and the operators they are behind.

What runs on a GPU is measured there by benchmarks/speed.py; here the same source is interpreted with NumPy's
arithmetic. Rounding is that of float32 in the same order, so bounds are held to; times mean nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attnforge.heads import NormHead, ProductHead
from attnforge.heads.fast import read as read_operators
from attnforge.heads.gpu import rows
from attnforge.heads.norm import fused as norm_operators
from attnforge.heads.norm.head import by_rows
from attnforge.heads.product import fused as product_operators
from attnforge.heads.product.fused import together

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found() -> dict[str, list[float]]:
    """What the interpreter computed: the largest error, and its excess over what is allowed, by name."""
    source = str(HERE.parents[1] / "src")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": source}
    ran = subprocess.run(
        [sys.executable, str(HERE / "interpreted.py")], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    checks: dict[str, list[float]] = json.loads(ran.stdout.splitlines()[-1])
    return checks


def test_kernels_are_within_the_bounds_of_their_heads(found: dict[str, list[float]]) -> None:
    assert len(found) > 60
    assert {name: excess for name, (_, excess) in found.items() if not excess <= 0.0} == {}


def test_kernels_compute_rather_than_return_what_is_allowed(found: dict[str, list[float]]) -> None:
    assert found["gelu torch.float32"][0] > 0.0  # an error of exactly 0 would be a comparison of a thing with itself
    assert found["gelu torch.bfloat16"][0] > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_operators_keep_the_rules_of_the_library(dtype: torch.dtype) -> None:
    y, value = torch.linspace(-3, 3, 64).to(dtype), torch.linspace(-1, 1, 17)
    count = torch.zeros((), dtype=torch.int64)
    scale, shift, mix = torch.rand(5), torch.rand(5), torch.rand(5)
    row, weight = torch.randn(4, 8).to(dtype), torch.randn(8).to(dtype)
    assert norm_operators.Table and read_operators.NAME  # importing them defines their operators
    ops = torch.ops.attnforge
    calls = [
        (ops.anchor_read, (y.clone().requires_grad_(), value, 1.0, 0.25, 0.0, 1.0)),
        (ops.anchor_read_watched, (y, value, count, 1.0, 0.25, 0.0, 1.0, False, -2.0, 2.0)),
        (ops.lattice_read, (y, torch.rand(18), 17, 1.0, 0.25, 0.0, 1.0, False)),
        (ops.product_watched, (y, y, count, 7, 0.25, 0.0, 0.0, -4.0, 4.0, -4.0, 4.0)),
        (ops.norm_watched, (row, scale, shift, mix, weight, weight, count, True, False, 0.1, 9.0, 10.0)),
    ]
    for op, arguments in calls:
        told = torch.library.opcheck(op.default, arguments, raise_exception=False)
        assert set(told.values()) == {"SUCCESS"}, (op, told)


def test_gradients_of_operators_have_gradients() -> None:
    count, wide = torch.zeros((), dtype=torch.int64), torch.float64
    torch.manual_seed(0)
    y, value, row, weight, bias = (torch.randn(*n, dtype=wide) for n in ((6,), (9,), (3, 8), (8,), (8,)))
    numbers, norm = (1.0, 0.25, 0.0, 1.0), NormHead.fit(8, (0.4, 130.0), dtype=wide)
    table = norm.scale, norm.shift, norm.mix
    calls: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
        "anchors": (lambda y, v: read_operators.anchor_read(y, v, *numbers), (y, value)),
        "anchors, watched": (lambda y, v: read_operators.watched_read(y, v, count, *numbers, False, -2, 2), (y, value)),
        "product": (
            lambda x, y: product_operators.watched_product(x, y, count, 7, 2.0, (0.0, 0.0), (-4.0, 4.0), (-4.0, 4.0)),
            (y, y.flip(0)),
        ),
        "norm": (
            lambda x, w, b: norm_operators.watched_norm(x, table, w, b, count, True, False, (0.1, 9.0, 10.0)),
            (row, weight, bias),
        ),
        "norm in pieces": (lambda x, w: by_rows(lambda part, t: part.sin() * t, x, (w,), 2), (row, weight)),
    }
    for name, (call, given) in calls.items():
        inputs = tuple(t.clone().requires_grad_() for t in given)
        assert torch.autograd.gradcheck(call, inputs) and torch.autograd.gradgradcheck(call, inputs), name


@pytest.mark.parametrize("sides", [((-1, 1), (-1, 1)), ((-3, 40), (-20, 22)), ((1, 2), (3, 4)), ((-1e-3, 1e3), (0, 7))])
def test_both_heads_together_are_within_their_bound(sides: tuple[tuple[float, float], tuple[float, float]]) -> None:
    for dtype in (torch.float32, torch.float64):
        head = ProductHead.fit(*sides, dtype=dtype)
        x, y = head.box.sample(20_000, dtype=dtype).unbind(-1)
        corners = torch.tensor([[a, b] for a in sides[0] for b in sides[1]], dtype=dtype).unbind(-1)
        x, y = torch.cat([x, corners[0]]), torch.cat([y, corners[1]])
        error = _product_error(together(head, x, y), x, y)
        assert 0.0 < float(error.max()) <= head.fused_bound()
        assert head.differing() == []


def _product_error(found: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """|found - x y| exactly up to float64's rounding of the last subtraction: products of halves have no error."""
    if found.dtype == torch.float32:
        return (found.double() - x.double() * y.double()).abs()
    high = (x * (2.0**27 + 1)) - (x * (2.0**27 + 1) - x)
    top = (y * (2.0**27 + 1)) - (y * (2.0**27 + 1) - y)
    low, bottom = x - high, y - top
    product = x * y
    rest = ((high * top - product) + high * bottom + low * top) + low * bottom
    return ((found - product) - rest).abs()


def test_sums_of_rows_take_few_roundings() -> None:
    assert [rows.roundings(n) for n in (1, 2, 8, 32, 64, 1024, 4096)] == [0, 1, 3, 5, 6, 36, 38]
