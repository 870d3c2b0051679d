"""Norms of the input, whose heads centre the rows: errors are in proportion to the row (lemma G3)."""

from __future__ import annotations

import copy
from pathlib import Path

import mpmath
import pytest
import torch
from torch import Tensor, nn

import attnforge as af
from attnforge.export import to_plain


def flat_rows(box: af.Box, dtype: torch.dtype, seed: int) -> Tensor:
    """Rows that are nearly constant, down to a unit in the last place: there norms are steepest."""
    dice = torch.Generator().manual_seed(seed)
    low, high = (end.to(dtype) for end in (box.outward(dtype).lower, box.outward(dtype).upper))
    width = (high - low).max()
    level = low[:1] + width * torch.rand(200, 1, generator=dice).to(dtype)
    size = (10.0 ** (-9 * torch.rand(200, 1, generator=dice))).to(dtype)
    x = level + width * size * torch.randn(200, len(low), generator=dice).to(dtype)
    return torch.minimum(torch.maximum(torch.cat([x, box.sample(200, seed, dtype)]), low), high)


def exact(x: Tensor, eps: float) -> list[list[mpmath.mpf]]:
    rows = []
    for row in x.double().tolist():
        numbers = [mpmath.mpf(value) for value in row]
        mean = mpmath.fsum(numbers) / len(numbers)
        root = mpmath.sqrt(mpmath.fsum((value - mean) ** 2 for value in numbers) / len(numbers) + mpmath.mpf(eps))
        rows.append([(value - mean) / root for value in numbers])
    return rows


def error(net: af.CompiledNetwork, x: Tensor, eps: float) -> float:
    """The largest error against 60 digits."""
    with torch.no_grad(), mpmath.workdps(60):
        pairs = zip(net.core(x).double().tolist(), exact(x, eps), strict=True)
        return max(float(abs(mpmath.mpf(a) - b)) for made, row in pairs for a, b in zip(made, row, strict=True))


CASES = [  # width, low, high, eps, dtype
    (4, -1.0, 1.0, 1e-5, torch.float32),
    (3, 9.0, 11.0, 1e-5, torch.float32),
    (2, -1e-6, 1e-6, 1e-3, torch.float32),
    (5, -300.0, 500.0, 1e-2, torch.float32),
    (8, -1.0, 1.0, 1e-5, torch.float64),
]


@pytest.mark.parametrize(("width", "low", "high", "eps", "dtype"), CASES)
def test_rows_that_are_nearly_constant(
    width: int, low: float, high: float, eps: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Bounds hold there, also after casts and changes; the kernel proves nearly the same from the file."""
    box = af.Box.cube(low, high, width)
    net = af.compile(nn.LayerNorm(width, eps=eps, elementwise_affine=False).to(dtype), box, 1e-2, dtype=dtype)
    x = flat_rows(box, dtype, width)
    assert error(net, x, eps) <= net.bound
    path = tmp_path / "norm.safetensors"
    net.save(path)
    found = af.check(path)
    assert found.kernel is not None and found.kernel < 1.5 * net.bound
    other = copy.deepcopy(net).to(torch.float64 if dtype == torch.float32 else torch.float32)
    assert error(other, flat_rows(box, other.dtype, 1), eps) <= af.certify(other).bound
    dice, kept = torch.Generator().manual_seed(width), 0
    for by in (1e-7, 1e-4):
        for parameter in net.parameters():
            changed = copy.deepcopy(net)
            mine = next(p for p, q in zip(changed.parameters(), net.parameters(), strict=True) if q is parameter)
            with torch.no_grad():
                at = int(torch.randint(mine.numel(), (1,), generator=dice))
                mine.view(-1)[at] = mine.view(-1)[at] * (1 + by) + by * 1e-3
            try:
                bound = af.certify(changed).bound
            except (af.CertificateError, af.PrecisionError):
                continue
            kept += 1
            assert error(changed, x, eps) <= bound
    assert kept or width == 2


def test_the_centring_is_not_what_costs() -> None:
    """316 times the rounding of x - mean(x), 6e-8 or more, is 2e-5; a bound below that knows of proportions."""
    box = af.Box.cube(-1, 1, 4)
    net = af.compile(nn.LayerNorm(4), box, 1e-4)
    assert error(net, flat_rows(box, torch.float32, 0), 1e-5) <= net.bound < 1.5e-5
    far = af.compile(nn.LayerNorm(4), af.Box.cube(99, 101, 4), 1e-4)  # naively 100 times as much
    assert error(far, flat_rows(far.box, torch.float32, 0), 1e-5) <= far.bound < 1.5e-5


class TwoNorms(nn.Module):
    """A norm of a norm: at rows that are nearly constant its slope is 316 squared."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.LayerNorm(4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def test_two_norms_in_a_row() -> None:
    """Refused at 1e-3 of the range when centring was an affine map: 0.034 was proved."""
    module, box = TwoNorms(), af.Box.cube(-1, 1, 4)
    net = af.compile(module, box, 4.0e-3)
    x = flat_rows(box, torch.float32, 3)
    with torch.no_grad():
        assert float((net.core(x).double() - module.double()(x.double())).abs().max()) <= net.bound <= 4.0e-3


def test_plain_forms_and_slopes_of_norms_that_centre() -> None:
    """What else reads such heads: a plain transformer, whose coordinates are rounded apart, and Lipschitz constants."""
    box = af.Box.cube(-1, 1, 3)
    net = af.compile(nn.LayerNorm(3, eps=0.1), box, 1e-3)
    assert any(op.word == "normalise" and op.centred for op in net.program.ops)  # type: ignore[attr-defined]
    plain = to_plain(net)
    x = flat_rows(box, torch.float32, 4)
    with torch.no_grad(), mpmath.workdps(60):
        pairs = zip(plain(x).double().tolist(), exact(x, 0.1), strict=True)
        assert max(abs(a - b) for made, row in pairs for a, b in zip(made, row, strict=True)) <= plain.bound
    steep = net.lipschitz(effort=100)
    points = x.clone().requires_grad_(True)
    for channel in range(3):
        (slope,) = torch.autograd.grad(net(points)[:, channel].sum(), points)
        assert (slope.abs().max(0).values.double().numpy() <= steep.matrix[channel] * (1 + 1e-4)).all()
