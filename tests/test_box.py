"""Boxes: valid by construction, exact, and never smaller after rounding."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnforge as af
from attnforge.box import Box, round_outward

SMALL = (torch.float32, torch.bfloat16, torch.float16)
FINITE = st.floats(-6e4, 6e4)  # inside the range of every dtype


@st.composite
def intervals(draw: st.DrawFn) -> tuple[float, float]:
    a, b = draw(FINITE), draw(FINITE)
    return min(a, b), max(a, b)


def test_names_and_order() -> None:
    box = Box(x=(-1, 1), y=(0.5, 2))
    assert box.names == ("x", "y") and [*box] == ["x", "y"] and box.dim == 2 and box.shape == (2,)
    assert box["y"] == (0.5, 2.0) and box.intervals() == [(-1.0, 1.0), (0.5, 2.0)]
    assert box == Box({"x": (-1, 1), "y": (0.5, 2)}) == Box({"x": (-1, 1)}, y=(0.5, 2))
    assert box != Box(y=(0.5, 2), x=(-1, 1)), "the order of names is the order of columns"
    assert repr(box) == "Box(x=(-1, 1), y=(0.5, 2))" and hash(box) == hash(Box(x=(-1, 1), y=(0.5, 2)))
    assert box.lower.dtype == torch.float64 and box.upper.tolist() == [1.0, 2.0]
    with pytest.raises(FrozenInstanceError):
        box.names = ("a", "b")  # type: ignore[misc]


def test_shapes() -> None:
    cube = Box.cube(-1, 1, shape=(3, 2))
    assert cube.names is None and cube.shape == (3, 2) and cube.dim == 6 and cube.lower.shape == (3, 2)
    assert Box.cube(0, 1, shape=4).shape == (4,) and "cube" in repr(cube)
    between = Box.between(torch.zeros(2, 2), torch.arange(4.0).reshape(2, 2))
    assert between.upper.tolist() == [[0.0, 1.0], [2.0, 3.0]] and "within" in repr(between)
    assert Box.between(np.zeros(2), np.ones(2)) == Box.cube(0, 1, shape=2)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Box(), "at least one interval"),
        (lambda: Box({}), "at least one interval"),
        (lambda: Box([(-1, 1)]), "by name"),  # type: ignore[arg-type]
        (lambda: Box(x=1), "pair of numbers"),  # type: ignore[arg-type]
        (lambda: Box(x=(1, 2, 3)), "pair of numbers"),  # type: ignore[arg-type]
        (lambda: Box(x=("a", "b")), "pair of numbers"),  # type: ignore[arg-type]
        (lambda: Box(x=(0, math.inf)), "'x' must be finite"),
        (lambda: Box(x=(math.nan, 0)), "'x' must be finite"),
        (lambda: Box(x=(1, -1)), "'x' is empty"),
        (lambda: Box.cube(1, 0, shape=2), "empty"),
        (lambda: Box.cube(0, 1, shape=(2, 0)), "positive whole numbers"),
        (lambda: Box.cube(0, 1, shape=(2, 1.5)), "positive whole numbers"),  # type: ignore[arg-type]
        (lambda: Box.between(np.zeros(2), np.zeros(3)), "must agree"),
        (lambda: Box.between(np.zeros(0), np.zeros(0)), "not be empty"),
        (lambda: Box.between(np.array([0.0, 1.0]), np.array([1.0, 0.0])), "entry 1"),
        (lambda: Box(x=(0, 1))["y"], "no interval 'y'"),
        (lambda: Box.cube(0, 1, shape=2)["x"], "no names"),
        (lambda: Box.cube(0, 1, shape=(2, 3)).contains(torch.zeros(3, 2)), "expected points of shape"),
    ],
)
def test_bad_arguments(build: Any, words: str) -> None:
    with pytest.raises(af.ArgumentError, match=words):
        build()


@given(intervals(), st.sampled_from(SMALL))
def test_outward_rounding_never_shrinks_and_is_tight(pair: tuple[float, float], dtype: torch.dtype) -> None:
    low, high = Box(y=pair).outward(dtype)["y"]
    assert low <= pair[0] and pair[1] <= high
    for end, inner, toward in ((low, pair[0], math.inf), (high, pair[1], -math.inf)):
        stored = torch.tensor(end, dtype=torch.float64).to(dtype)
        assert float(stored.double()) == end, "a number of the dtype"
        further = float(torch.nextafter(stored, torch.tensor(toward, dtype=dtype)).double())
        assert end == inner or (further > inner if toward > 0 else further < inner), "the next one would be inside"
    assert Box(y=pair).outward(torch.float64) == Box(y=pair)


def test_what_rounds_up_is_still_inside() -> None:
    assert float(torch.tensor(0.8)) > 0.8
    box = Box(y=(0.1, 0.8))
    assert bool(box.outward(torch.float32).contains(torch.tensor([0.8])))
    assert not bool(box.contains(torch.tensor([0.8])))
    low, high = round_outward(np.array([0.1]), np.array([1.0]), torch.float32)
    assert low[0] < 0.1 and high[0] == 1.0


@given(intervals(), st.sampled_from((torch.float64, *SMALL)), st.integers(0, 5))
def test_samples_and_corners_are_inside(pair: tuple[float, float], dtype: torch.dtype, seed: int) -> None:
    box = Box(x=pair, y=(-1, 1))
    inside = box.outward(dtype)
    sample = box.sample(20, seed=seed, dtype=dtype)
    assert sample.dtype == dtype and bool(inside.contains(sample).all())
    assert torch.equal(sample, box.sample(20, seed=seed, dtype=dtype)), "reproducible"
    corners = box.corners(dtype=dtype)
    assert corners.shape == (4, 2) and bool(inside.contains(corners).all())
    assert {tuple(c) for c in corners.double().tolist()} == {
        (x, y) for x in inside["x"] for y in inside["y"]
    }  # fmt: skip


def test_corners_of_a_large_box_are_limited_and_spread() -> None:
    corners = Box.cube(-1, 1, shape=40).corners(limit=64)
    assert corners.shape == (64, 40) and len({tuple(c) for c in corners.tolist()}) == 64


def test_contains_by_batch() -> None:
    box = Box.cube(0, 1, shape=(2,))
    points = torch.tensor([[[0.0, 1.0], [0.5, 1.5]], [[math.nan, 0.5], [math.inf, 0.0]]])
    assert box.contains(points).tolist() == [[True, False], [False, False]]
    assert box.contains(torch.zeros(0, 2)).shape == (0,)
    assert Box.cube(0, 1, shape=()).contains(torch.tensor([0.5, 2.0])).tolist() == [True, False]


@given(st.dictionaries(st.text(min_size=1, max_size=4), intervals(), min_size=1, max_size=3))
def test_json_gives_an_equal_box(pairs: dict[str, tuple[float, float]]) -> None:
    others = Box.cube(-1, 1, shape=(2, 3)), Box.cube(0, 1, shape=()), Box.between(np.zeros(2), np.ones(2))
    for box in (Box(pairs), *others):
        assert Box.from_json(json.loads(json.dumps(box.to_json()))) == box


@pytest.mark.parametrize(
    "change",
    [
        {"names": ["a"]}, {"names": 3}, {"shape": [3]}, {"shape": None}, {"shape": ["a"]}, {"shape": [-1, -2]},
        {"lower": [0.0]}, {"lower": None}, {"lower": ["a", "b"]}, {"lower": [2.0, 2.0]}, {"upper": [math.inf, 1.0]},
        {"names": [1, 2]}, {"names": [[1], [2]]}, {"names": ["a", "a"]}, {"names": "ab"}, None,
    ],
)  # fmt: skip
def test_a_description_of_something_else_is_refused(change: dict[str, Any] | None) -> None:
    data: Any = {} if change is None else {**Box(x=(0, 1), y=(0, 1)).to_json(), **change}
    with pytest.raises(af.ArgumentError):
        Box.from_json(data)


def test_keys_of_a_box_are_names_or_symbols() -> None:
    x = sympy.Symbol("x")
    assert Box({x: (0, 1)}) == Box(x=(0, 1))
    with pytest.raises(af.ArgumentError, match=r"go by name, .* got the key 1"):
        Box({1: (0, 1)})  # type: ignore[dict-item]
