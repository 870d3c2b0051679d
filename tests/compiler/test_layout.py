"""Layouts: who computes what, in which layer; depth is nesting, sharing is kept, and affine maps are exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnforge.box import Box
from attnforge.compiler.layout import Layout, lower
from attnforge.compiler.pipeline import compile
from attnforge.errors import ArgumentError
from attnforge.frontends.formula.program import capture_formula
from attnforge.heads import families
from attnforge.heads.site import Seat, Site, Span
from attnforge.programs.affine import affine_map, forms, is_head, levels
from attnforge.programs.interpret import every_value
from attnforge.programs.program import Program

XY = Box(x=(-1, 1), y=(0.5, 2))


@dataclass(frozen=True)
class Lookup(Site):
    """A site for any operation of scalars: one memory head of its own for each channel."""

    family: ClassVar[str] = "lookup"

    @property
    def spans(self) -> tuple[Span, ...]:
        return ()

    def seat(self, program: Program) -> Seat:
        return Seat("memory", 1)

    @classmethod
    def read(cls, op: int, config: Mapping[str, Any]) -> Lookup:
        return cls(op)


def laid_out(formula: str | list[str], box: Box = XY) -> Layout:
    program = capture_formula(formula, box)
    sites = {i: Lookup(i) for i in range(len(program.ops)) if is_head(program, i)}
    return lower(program, sites)


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
    assert len(layout.steps) == depth
    assert str(layout).count("layer ") >= depth


def test_balanced_products() -> None:
    names = [f"a{i}" for i in range(8)]
    layout = laid_out("*".join(names), Box({name: (1, 2) for name in names}))
    assert len(layout.steps) == 3 and len(layout.sites) == 7


def test_shared_subexpressions_are_computed_once() -> None:
    layout = laid_out(["sin(x*y)", "cos(x*y)", "x*y"])
    products = [site for site in layout.sites if layout.program.labels[site.op] == "x*y"]
    assert len(products) == 1 and len(layout.sites) == 3


def check(layout: Layout) -> None:
    """What holds for every layout."""
    program = layout.program
    placed = [site.op for site in layout.sites]
    assert sorted(placed) == [i for i in range(len(program.ops)) if is_head(program, i)], "each head once"
    level = levels(program, forms(program))
    state = layout.first
    for number, step in enumerate(layout.steps, 1):
        assert step.before == state and step.sites
        assert all(level[site.op] == number for site in step.sites)
        assert set(step.carried) <= set(step.before) and len(set(step.columns)) == len(step.columns)
        assert set(step.writes) == {(s.op, c) for s in step.sites for c in range(program.ops[s.op].width)}
        for site in step.sites:
            for value in program.ops[site.op].inputs:
                assert all((value, c) in step.columns for c in range(program.ops[value].width))
            for place in step.places(site):
                assert {step.after[i][0] for i in place.writes} == {site.op}
                assert [step.columns[i][0] for i in place.reads] == list(site.operands(program))
        seats = [(p.group, p.first + h) for site in step.sites for p in step.places(site) for h in range(p.heads)]
        assert len(set(seats)) == len(seats), "no head serves two sites"
        state = step.after
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
    """With exact heads, walking the steps gives the program's values: nothing that is needed is dropped."""
    layout = laid_out(formulas)
    program = layout.program
    values = every_value(program, program.box.sample(5, seed))
    of = forms(program)

    def columns(names: tuple[tuple[int, int], ...]) -> np.ndarray:
        return np.stack([values[v][:, 0, c].numpy() for v, c in names], -1) if names else np.zeros((5, 0))

    for before, after in [*((s.before, s.columns) for s in layout.steps), (layout.last, layout.output)]:
        matrix, bias = affine_map(of, before, after)
        assert np.allclose(columns(before) @ matrix + bias, columns(after), rtol=1e-12, atol=1e-12)


def test_only_what_is_needed_is_carried() -> None:
    layout = laid_out("sin(sin(sin(x*y)))*1 + 0*1")
    assert all(len(step.carried) == 0 for step in layout.steps)
    kept = laid_out("exp(sin(x*y)*y)*x*y")
    assert any(step.carried for step in kept.steps)


def test_unknown_families_are_refused() -> None:
    for ask in (families.site_type, families.rule_of, families.builder_of):
        with pytest.raises(ArgumentError, match=r"no head family 'anchr'; did you mean 'anchor'"):
            ask("anchr")


def test_the_network_has_the_layers_of_its_layout() -> None:
    net = compile("sin(x*y) + exp(-x**2)/y", XY, eps=1e-3)
    assert len(net.network.layers) == 2 * len(net.layout.steps) + 1
    state = XY.sample(3, dtype=torch.float32).unsqueeze(1)
    for index, step in enumerate(net.layout.steps):
        state = net.network.layers[2 * index](state)
        assert state.shape[-1] == len(step.columns)
        state = net.network.layers[2 * index + 1](state)
        assert state.shape[-1] == len(step.after)
    assert net.network.layers[-1](state).shape[-1] == len(net.layout.output)
    check(net.layout)


def test_intermediate_values_are_where_the_layout_says() -> None:
    """Every column of the state is close to the value of the program that it is named after."""
    net = compile("sin(x*y) + exp(-x**2)/y", XY, eps=1e-3)
    points = XY.sample(100, dtype=torch.float32)
    exact = every_value(net.program, points.double())
    state = points.unsqueeze(1)
    with torch.no_grad():
        for index, step in enumerate(net.layout.steps):
            state = net.network.layers[2 * index + 1](net.network.layers[2 * index](state))
            for i, (value, channel) in enumerate(step.after):
                gap = (state[:, 0, i].double() - exact[value][:, 0, channel]).abs().max()
                assert gap <= 2e-3, net.program.labels[value]


def test_a_program_without_heads_is_one_affine_map() -> None:
    net = compile("2*x - y", XY, eps=1e-3)
    assert len(net.network.layers) == 1 and net.size.heads == 0
    assert isinstance(net.program, Program) and net.bound < 1e-5
