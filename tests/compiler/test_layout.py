"""Layouts: who computes what, in which layer; depth is nesting, sharing is kept, and affine maps are exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnforge.box import Box
from attnforge.compiler.assemble import affine_map
from attnforge.compiler.layout import Layout, Site, forms, is_head, lay_out, levels
from attnforge.compiler.pipeline import compile
from attnforge.errors import ArgumentError
from attnforge.frontends.formula.program import lower_formula
from attnforge.programs.interpret import every_value
from attnforge.programs.program import Program

XY = Box(x=(-1, 1), y=(0.5, 2))


def laid_out(formula: str | list[str], box: Box = XY) -> Layout:
    program = lower_formula(formula, box)
    sites = {i: Site(i, "anchor", {}) for i in range(len(program.ops)) if is_head(program, i)}
    return lay_out(program, sites)


@pytest.mark.parametrize(
    ("formula", "depth"),
    [
        ("x + 2*y", 0),
        ("x*y", 1),
        ("sin(x) + cos(y) + exp(x)*1", 1),
        ("sin(x*y) + exp(-x**2)/y", 2),
        ("sin(sin(x*y)*y)", 4),
    ],
)
def test_depth_is_nesting_not_number(formula: str, depth: int) -> None:
    layout = laid_out(formula)
    assert len(layout.stages) == depth
    assert str(layout).count("layer ") >= depth


def test_balanced_products() -> None:
    names = [f"a{i}" for i in range(8)]
    layout = laid_out("*".join(names), Box({name: (1, 2) for name in names}))
    assert len(layout.stages) == 3 and len(layout.sites) == 7


def test_shared_subexpressions_are_computed_once() -> None:
    layout = laid_out(["sin(x*y)", "cos(x*y)", "x*y"])
    products = [site for site in layout.sites if layout.program.sites[site.op] == "x*y"]
    assert len(products) == 1 and len(layout.sites) == 3


def check(layout: Layout) -> None:
    """What holds for every layout."""
    program = layout.program
    placed = [site.op for site in layout.sites]
    assert sorted(placed) == [i for i in range(len(program.ops)) if is_head(program, i)], "each head once"
    level = levels(program, forms(program))
    state = layout.first
    for number, stage in enumerate(layout.stages, 1):
        assert stage.before == state and stage.sites
        assert all(level[site.op] == number for site in stage.sites)
        assert set(stage.carried) <= set(stage.before) and len(set(stage.columns)) == len(stage.columns)
        assert set(stage.writes) == {(s.op, c) for s in stage.sites for c in range(program.ops[s.op].width)}
        for site in stage.sites:
            for value in program.ops[site.op].inputs:
                assert all((value, c) in stage.columns for c in range(program.ops[value].width))
        state = stage.after
    assert layout.last == state


FORMULAS = st.sampled_from(
    ["x*y", "x/y + sin(x)", "exp(x*y)*x - y", "sqrt(x**2 + y**2)", "max(x, y)*x", "x**3*y**2 + x", "tanh(x)*sin(y)/y"]
)


@settings(max_examples=25)
@given(st.lists(FORMULAS, min_size=1, max_size=4))
def test_every_layout_is_sound(formulas: list[str]) -> None:
    check(laid_out(formulas))


@settings(max_examples=25)
@given(st.lists(FORMULAS, min_size=1, max_size=3), st.integers(0, 1000))
def test_affine_maps_make_the_columns_they_name(formulas: list[str], seed: int) -> None:
    """With exact heads, walking the stages gives the program's values: nothing that is needed is dropped."""
    layout = laid_out(formulas)
    program = layout.program
    values = every_value(program, program.box.sample(5, seed))
    of = forms(program)

    def columns(names: tuple[tuple[int, int], ...]) -> np.ndarray:
        return np.stack([values[v][:, 0, c].numpy() for v, c in names], -1) if names else np.zeros((5, 0))

    for before, after in [*((s.before, s.columns) for s in layout.stages), (layout.last, layout.output)]:
        matrix, bias = affine_map(of, before, after)
        assert np.allclose(columns(before) @ matrix + bias, columns(after), rtol=1e-12, atol=1e-12)


def test_only_what_is_needed_is_carried() -> None:
    layout = laid_out("sin(sin(sin(x*y)))*1 + 0*1")
    assert all(len(stage.carried) == 0 for stage in layout.stages)
    kept = laid_out("exp(sin(x*y)*y)*x*y")
    assert any(stage.carried for stage in kept.stages)


def test_unknown_families_are_refused() -> None:
    with pytest.raises(ArgumentError, match="family is one of"):
        Site(1, "anchr", {})


def test_the_network_has_the_layers_of_its_layout() -> None:
    net = compile("sin(x*y) + exp(-x**2)/y", XY, eps=1e-3)
    assert len(net.network.layers) == 2 * len(net.layout.stages) + 1
    state = XY.sample(3, dtype=torch.float32).unsqueeze(1)
    for index, stage in enumerate(net.layout.stages):
        state = net.network.layers[2 * index](state)
        assert state.shape[-1] == len(stage.columns)
        state = net.network.layers[2 * index + 1](state)
        assert state.shape[-1] == len(stage.after)
    assert net.network.layers[-1](state).shape[-1] == len(net.layout.output)
    check(net.layout)


def test_intermediate_values_are_where_the_layout_says() -> None:
    """Every column of the state is close to the value of the program that it is named after."""
    net = compile("sin(x*y) + exp(-x**2)/y", XY, eps=1e-3)
    points = XY.sample(100, dtype=torch.float32)
    exact = every_value(net.program, points.double())
    state = points.unsqueeze(1)
    with torch.no_grad():
        for index, stage in enumerate(net.layout.stages):
            state = net.network.layers[2 * index + 1](net.network.layers[2 * index](state))
            for i, (value, channel) in enumerate(stage.after):
                gap = (state[:, 0, i].double() - exact[value][:, 0, channel]).abs().max()
                assert gap <= 2e-3, net.program.sites[value]


def test_a_program_without_heads_is_one_affine_map() -> None:
    net = compile("2*x - y", XY, eps=1e-3)
    assert len(net.network.layers) == 1 and net.size.heads == 0
    assert isinstance(net.program, Program) and net.bound < 1e-5
