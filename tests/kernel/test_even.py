"""Anchors of a network that may be read by a softmax or with one exponential (lemma K47)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from flint import arb

from attnforge.errors import CertificateError
from attnforge.functions.registry import parse
from attnforge.heads.anchor import fit
from attnforge.heads.anchor.bound import AnchorWeights
from attnforge.heads.fast.even import EvenTable
from attnforge.kernel.alone.fast import even, tables_named
from attnforge.kernel.balls import up, working
from attnforge.kernel.rounding import MACHINES
from attnforge.kernel.scalar import Cell, Head, HeadSum, error_on
from attnforge.network import Heads

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def table(dtype: torch.dtype) -> tuple[AnchorWeights, EvenTable, Heads]:
    """A table for gelu on [-2, 3], as it is named, and its head, which kernels for processors read with one
    exponential."""
    found = fit.quick(parse("gelu"), -2.0, 3.0, dtype, 1e-4, even=True)
    assert found is not None
    w = found.weights
    named = EvenTable.of(w, -2.0, 3.0)
    assert named is not None
    number = lambda x: torch.tensor(np.asarray(x), dtype=dtype)  # noqa: E731
    keys = np.stack([w.slope, w.offset], -1)[None]
    group = Heads("memory", W_Q=number([[[1.0, 0.0]]]), b_Q=number([[-w.centre, 1.0]]), M_K=number(keys),
                  M_V=number(w.value[None, :, None]), W_O=number([[[1.0]]])).requires_grad_(False)  # fmt: skip
    group.even = named
    return w, named, group


def exact(w: AnchorWeights, y: float) -> arb:
    q = arb(y) - arb(w.centre)
    powers = [(arb(a) * q + arb(b)).exp() for a, b in zip(w.slope, w.offset, strict=True)]
    return sum((p * arb(v) for p, v in zip(powers, w.value, strict=True)), arb(0)) / sum(powers, arb(0))


@DTYPES
def test_what_is_computed_is_within_the_bound(dtype: torch.dtype) -> None:
    """K47: on every cell both ways to compute the head are within its bound, which is near the analysis's."""
    (w, named, group), name = table(dtype), "float32" if dtype == torch.float32 else "float64"
    rows = tuple((float(a), float(b)) for a, b in zip(w.slope, w.offset, strict=True))
    head = Head(((1.0, -w.centre), (0.0, 1.0)), rows, False, (0.0,) * 3, tuple(map(float, w.value)), 1.0)
    analysed, cells = named.reading(w, -2.0, 3.0, dtype), MACHINES[name]
    assert analysed is not None
    with working():
        reading = even([head], named.numbers, name)
        site = HeadSum((head,), (0.0,) * 3, None, 0.0, name)
        for low in (-2.0, -0.7, w.centre - 0.02, w.centre, 1.3, 2.95):
            high = low + 0.05
            bound = up(reading(cells, Cell.of(low, high, None)))
            assert 0.2 < bound / float(analysed(np.array([low]), np.array([high]))[0]) < 2
            y = torch.linspace(low, high, 9, dtype=dtype)
            y = y[(y >= low) & (y <= high)]
            for x, fast in zip(y.tolist(), group(y.unsqueeze(-1)).squeeze(-1).tolist(), strict=True):
                assert abs(arb(fast) - exact(w, x)) <= bound
            both = error_on(replace(site, reading=reading), low, high)[1]
            assert both >= error_on(site, low, high)[1]


@DTYPES
def test_other_numbers_are_bounded_by_how_far_they_are(dtype: torch.dtype) -> None:
    """K47: a lattice that the keys are not has a large bound, or none; other queries are left to the softmax."""
    (w, named, _), name = table(dtype), "float32" if dtype == torch.float32 else "float64"
    rows = tuple((float(a), float(b)) for a, b in zip(w.slope, w.offset, strict=True))
    head = Head(((1.0, -w.centre), (0.0, 1.0)), rows, False, (0.0,) * 3, tuple(map(float, w.value)), 1.0)
    rate, kappa, centre, far = named.numbers
    cell, k = Cell.of(0.9, 0.95, None), np.arange(len(rows)) - (len(rows) - 1) / 2
    with working():
        right = up(even([head], named.numbers, name)(MACHINES[name], cell))
        for wrong in ((1.01 * rate, kappa, centre, far), (rate, 1.01 * kappa, centre, far), (rate, kappa, 0.6, far)):
            moved = AnchorWeights(wrong[0] * k, -wrong[1] * k * k, w.value, wrong[2])
            apart = abs(exact(moved, 0.925) - exact(w, 0.925))
            bound = up(even([head], wrong, name)(MACHINES[name], cell))
            assert bound > 10 * right and apart <= bound
        other = replace(head, query=((0.5, -w.centre), (0.0, 1.0)))
        assert up(even([other], named.numbers, name)(MACHINES[name], cell)) == 0.0
        with pytest.raises(CertificateError):
            even([head, head], named.numbers, name)
    sites = [[4, "some", {"even": [1.0, 0.5, 0.0, 2.0]}], [5, "other", {}]]
    assert tables_named({"sites": sites}) == {4: [1.0, 0.5, 0.0, 2.0]}
    for wrong_sites in ([[4, "some", {"even": ["x"]}]], [[4, "some", []], 3], None):
        with pytest.raises(CertificateError):
            tables_named({"sites": wrong_sites})
