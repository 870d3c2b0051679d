"""The bound of a network over its box: sound on every cell, better with more of them, and a ledger that adds up."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import attnforge as af
from attnforge.compiler.compiled import CompiledNetwork
from attnforge.compiler.propagation import FIRST, NetworkBound, Propagation, network_bound, outward_cells
from attnforge.programs.enclose import ranges
from attnforge.programs.interpret import values

XY = af.Box(x=(-1, 1), y=(0.5, 2))


@pytest.fixture(scope="module")
def net() -> CompiledNetwork:
    return af.compile("sin(x*y) + exp(-x**2)/y", XY, eps=1e-3)


@pytest.fixture(scope="module")
def analysis(net: CompiledNetwork) -> Propagation:
    return Propagation(net.reading())


def test_the_parts_add_up_to_the_bound(analysis: Propagation) -> None:
    found = network_bound(analysis, 1e-3, 0.0, 2000, FIRST)
    assert found.parts.sum() <= found.bound <= found.parts.sum() * (1 + 1e-9)
    assert len(found.parts) == len(analysis.layout.sites) + 1 and (found.parts >= 0).all()
    assert found.excess == pytest.approx(found.bound)


def test_more_cells_never_hurt(analysis: Propagation) -> None:
    bounds = [network_bound(analysis, 0.0, 0.0, effort, FIRST).bound for effort in (FIRST, 300, 2000)]
    assert bounds[0] >= bounds[1] >= bounds[2] > 0


def test_it_stops_once_the_goal_is_reached(analysis: Propagation) -> None:
    easy = network_bound(analysis, 1.0, 0.0, 2000, FIRST)
    hard = network_bound(analysis, 0.0, 0.0, 2000, FIRST)
    assert easy.evaluated <= FIRST < hard.evaluated and hard.bound <= easy.bound


def test_every_cell_is_sound(net: CompiledNetwork, analysis: Propagation) -> None:
    """The error at points of a cell is at most what the rules give for that very cell."""
    low, high = outward_cells(net.program, 48, net.dtype)
    outcome = analysis.run(ranges(net.program, low, high))
    share = torch.rand((200, *low.shape), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for i in range(len(low)):
        points = torch.from_numpy(low[i]) + share[:, i] * torch.from_numpy(high[i] - low[i])
        shipped = points.reshape(-1, 2).to(net.dtype)
        exact = shipped.double().numpy()
        kept = shipped[torch.from_numpy(((exact >= low[i]) & (exact <= high[i])).all(-1))]
        with torch.no_grad():
            error = (net.core(kept).double() - values(net.program, kept.double())).abs()
        assert float(error.max()) <= outcome.largest[i]
    assert outcome.largest.max() > 1.5 * outcome.largest.min(), "cells differ: splitting is worth it"


def test_cells_reach_the_next_number_of_the_dtype() -> None:
    box = af.Box(x=(0.1, 0.8))
    net = af.compile("sin(x)", box, eps=1e-3)
    low, high = outward_cells(net.program, 8, torch.float32)
    assert float(low.min()) <= float(np.float32(0.1)) and float(high.max()) >= float(np.float32(0.8)) > 0.8
    assert float(low.min()) == float(box.outward(torch.float32).lower[0])


def test_the_worst_cell_lies_in_the_box(analysis: Propagation) -> None:
    found = network_bound(analysis, 0.0, 0.0, 500, FIRST)
    assert isinstance(found, NetworkBound)
    assert (found.low >= [[-1, 0.5]]).all() and (found.high <= [[1, 2]]).all() and (found.low < found.high).all()


def test_a_worse_weight_gives_a_larger_bound() -> None:
    """Sabotage: what is certified is what is stored, whatever the plan wanted."""
    net = af.compile("sin(x*y) + exp(-x**2)/y", XY, eps=1e-3)
    before = net.bound
    group = [g for g in net.network.groups() if g.scope == "memory"][-1]  # no head reads its results
    with torch.no_grad():
        group.M_V[0, 2] += 0.01
    after = af.certify(net).bound
    assert after is not None and after > before + 1e-3
    points = XY.sample(20_000, dtype=torch.float32)
    with torch.no_grad():
        error = (net(points).double() - values(net.program, points.double())).abs().max()
    assert before < float(error) <= after


def test_affine_maps_are_compared_with_the_exact_ones() -> None:
    net = af.compile("x*y + 3*x", XY, eps=1e-3)
    before = net.bound
    last = net.network.layers[-1]
    with torch.no_grad():
        last.S += 1e-2
    after = af.certify(net).bound
    assert after is not None and after >= 1e-2 > before


def test_a_relative_tolerance_is_judged_where_the_target_is() -> None:
    net = af.compile("exp(x)", af.Box(x=(0, 8)), eps=1e-4, rtol=1e-3)
    analysis = Propagation(net.reading())
    found = network_bound(analysis, net.eps, net.rtol, 2000, FIRST)
    assert found.excess <= net.eps < found.bound, "beyond eps only where exp is large"
    assert not math.isinf(found.bound)
