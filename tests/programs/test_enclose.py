"""Ranges hold what they enclose, at points of every cell; and every operation is in every table."""

from __future__ import annotations

import itertools
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnforge.box import Box
from attnforge.compiler import plan as sensitivity
from attnforge.frontends.formula.program import capture_formula
from attnforge.programs import enclose, interpret, ops
from attnforge.programs.enclose import Range, cells, ranges
from attnforge.programs.interpret import every_value
from attnforge.programs.program import Builder, Program

OPERATIONS = {
    thing for thing in vars(ops).values() if isinstance(thing, type) and issubclass(thing, ops.Op) and thing.word
}


@pytest.mark.parametrize("table", [interpret.VALUES, enclose.RULES, sensitivity.RULES], ids=["value", "range", "slope"])
def test_every_operation_is_in_every_table(table: dict[type[ops.Op], Any]) -> None:
    assert len(OPERATIONS) >= 10 and set(table) == OPERATIONS


def tokens_program() -> Program:
    """Every operation between tokens and over channels, once."""
    build = Builder(Box.cube(-1, 1, shape=(3, 2)), tokens=3)
    x = build.input
    mixed = build.mix(x, np.array([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [-1.0, 0.3, 0.7]]), "mix")
    soft = build.softmax(x, "softmax")
    seen = build.attention(x, mixed, soft, 0.7, label="attention")
    high = build.max_tokens(mixed, "max")
    shifted = build.linear([(x, np.array([[1.0, -2.0], [0.5, 1.0]]))], np.array([3.0, -3.0]), "shift")
    norm = build.normalise(shifted, 0.1, label="norm")
    fixed = build.constant(np.arange(6.0).reshape(3, 2), "constant")
    total = build.combination([(seen, 1.0), (high, -0.5), (norm, 2.0), (fixed, 0.1)], 0.3, "sum")
    out = build.apply(build.product(total, mixed, "product"), "tanh", "tanh")
    return build.program(out, "everything", (3, 2))


FORMULAS: dict[str, tuple[str, Box]] = {
    "mixed": ("sin(x*y) + exp(-x**2)/y", Box(x=(-1, 1), y=(0.5, 2))),
    "kinks": ("max(x, y) - abs(x*y) + clip(3*x, -1, 1)", Box(x=(-1, 1), y=(-1, 1))),
    "roots": ("sqrt(x**2 + y**2)*x**1.5 + log(1 + x)", Box(x=(0, 2), y=(-1, 1))),
    "quotients": ("(a + b)/(1 + a*b/c**2)", Box(a=(1, 5), b=(1, 5), c=(1, 5))),
}


def program_of(name: str) -> Program:
    return tokens_program() if name == "tokens" else capture_formula(*FORMULAS[name])


def inside(found: list[Range], program: Program, low: np.ndarray, high: np.ndarray, count: int, seed: int) -> None:
    """Random points of every cell, and its two extreme corners; the truth is float64, off by a few units."""
    rng = np.random.default_rng(seed)
    share = np.concatenate([rng.random((count, *low.shape)), np.zeros((1, *low.shape)), np.ones((1, *low.shape))])
    points = low + share * (high - low)
    flat = torch.from_numpy(np.clip(points, low, high)).reshape(-1, *program.box.shape)
    for number, (value, r) in enumerate(zip(every_value(program, flat), found, strict=True)):
        seen = value.numpy().reshape(len(share), *r.low.shape)
        slack = 1e-13 * (1 + np.abs(seen))
        assert (seen >= r.low - slack).all() and (seen <= r.high + slack).all(), program.labels[number]
        if r.tilt is not None:
            t = (2 * share - 1).reshape(len(share), len(low), -1)
            line = np.einsum("pcs,ctks->pctk", t, r.tilt.slope)
            assert (seen >= line + r.tilt.low - slack).all() and (seen <= line + r.tilt.high + slack).all()


@pytest.mark.parametrize("name", [*FORMULAS, "tokens"])
@pytest.mark.parametrize("count", [1, 64])
def test_ranges_hold_their_values(name: str, count: int) -> None:
    program = program_of(name)
    low, high = cells(program, count)
    inside(ranges(program, low, high), program, low, high, 40, 0)


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.sampled_from([*FORMULAS, "tokens"]), st.floats(0.0, 1.0))
def test_ranges_hold_on_any_cell(seed: int, name: str, width: float) -> None:
    program = program_of(name)
    rng = np.random.default_rng(seed)
    shape = (5, program.tokens, program.ops[0].width)
    lower, upper = (side.numpy().reshape(shape[1:]) for side in (program.box.lower, program.box.upper))
    low = lower + rng.random(shape) * (upper - lower)
    high = np.minimum(low + width * rng.random(shape) * (upper - lower), upper)
    inside(ranges(program, low, high), program, low, high, 10, seed)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 30.0])
@pytest.mark.parametrize("width", [0.0, 1e-9, 0.1, 1.0])
@pytest.mark.parametrize("away", [0.0, 1e5])
def test_ranges_of_attention_and_norms_hold_to_the_last_bit(scale: float, width: float, away: float) -> None:
    """Against 60 digits, without any slack: logits of all sizes, values far from 0, hidden tokens, rows near 0."""
    rng = np.random.default_rng(int(1e3 * width + away + scale))
    build = Builder(Box.cube(-1, 1, shape=(3, 2)), tokens=3)
    first, second = rng.normal(size=(2, 2, 2))
    key = build.linear([(build.input, scale * first)], np.array([away, 1.0]), "key")
    value = build.linear([(build.input, second)], np.array([away, -away]), "value")
    mask = np.array([[0.0, -np.inf, 0.3], [-40.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    seen = build.attention(build.input, key, value, 0.7, mask=mask, label="attention")
    norm = build.normalise(build.input, 1e-5, centred=False, label="norm")
    program = build.program(build.combination([(seen, 1.0), (norm, 1.0)], 0.0, "sum"), "attention and norm", (3, 2))
    low = rng.uniform(-1, 1, size=(4, 3, 2)) * np.array([1.0, 1e-3, 1.0, 0.0])[:, None, None]
    high = np.minimum(low + width, 1.0)
    found = ranges(program, low, high)
    op = program.ops[seen]
    with mpmath.workdps(60):
        for c, share in itertools.product(range(4), [*rng.random((6, 3, 2)), np.zeros((3, 2)), np.ones((3, 2))]):
            point = np.clip(low[c] + share * (high[c] - low[c]), low[c], high[c])
            x = mpmath.matrix(point.tolist())
            k, v = (x * mpmath.matrix(w.tolist()) + mpmath.matrix([list(b)] * 3) for w, b in (
                (scale * first, (away, 1.0)), (second, (away, -away))))  # fmt: skip
            for i in range(3):
                logit = [mpmath.mpf(op.scale) * (x[i, 0] * k[j, 0] + x[i, 1] * k[j, 1]) for j in range(3)]
                weight = [mpmath.exp(z + mpmath.mpf(m)) if m > -np.inf else mpmath.mpf(0)
                          for z, m in zip(logit, mask[i], strict=True)]  # fmt: skip
                root = mpmath.sqrt((x[i, 0] ** 2 + x[i, 1] ** 2) / 2 + mpmath.mpf(1e-5))
                for channel in range(2):
                    mean = sum(w * v[j, channel] for j, w in enumerate(weight)) / sum(weight)
                    for number, truth in ((seen, mean), (norm, x[i, channel] / root)):
                        r = found[number]
                        assert mpmath.mpf(r.low[c, i, channel]) <= truth <= mpmath.mpf(r.high[c, i, channel])
    if width == 0:
        assert (found[seen].high - found[seen].low).max() <= 1e-12 * (1 + away) * (1 + away * scale)


def test_a_range_that_is_too_small_is_noticed() -> None:
    program = program_of("mixed")
    low, high = cells(program, 1)
    found = ranges(program, low, high)
    r = found[program.output]
    found[program.output] = Range(r.low + 0.3 * (r.high - r.low), r.high)
    with pytest.raises(AssertionError):
        inside(found, program, low, high, 200, 0)


def test_affine_forms_know_that_x_minus_x_is_nothing() -> None:
    build = Builder(Box(x=(-1, 1), y=(0, 2)))
    x, y = build.column(0), build.column(1)
    first = build.combination([(x, 1.0), (y, 1.0)])
    out = build.combination([(first, 1.0), (x, -1.0), (y, -1.0)])
    program = build.program(out, "x + y - x - y")
    r = ranges(program, *cells(program, 1))[program.output]
    assert abs(float(r.low.min())) < 1e-13 and abs(float(r.high.max())) < 1e-13, "rounding is all that is left"
    wide = Builder(Box.cube(-1, 1, shape=(1, 100)), tokens=1)
    pair = wide.combination([(wide.input, 1.0), (wide.input, -0.5)])
    loose = wide.program(pair, "intervals only", (100,))
    assert ranges(loose, *cells(loose, 1))[loose.output].slope is None, "too many inputs for forms"


@pytest.mark.parametrize("name", [*FORMULAS, "tokens"])
def test_finer_cells_give_narrower_ranges(name: str) -> None:
    program = program_of(name)
    coarse = ranges(program, *cells(program, 1))[program.output]
    fine = ranges(program, *cells(program, 256))[program.output]
    assert fine.low.min() >= coarse.low.min() - 1e-12 and fine.high.max() <= coarse.high.max() + 1e-12


@given(st.integers(1, 500))
def test_cells_cover_the_box(wanted: int) -> None:
    program = program_of("quotients")
    low, high = cells(program, wanted)
    assert 1 <= len(low) <= wanted and (high > low).all()
    volume = np.prod(high - low, axis=(1, 2)).sum()
    assert volume == pytest.approx(4.0**3) and low.min() == 1 and high.max() == 5


def test_slopes_bound_what_an_error_does() -> None:
    program = program_of("mixed")
    found = ranges(program, *cells(program, 64))
    slopes = sensitivity.sensitivities(program, found)
    assert slopes[program.output] == 1
    names = dict(zip(program.labels, slopes, strict=True))
    assert 1 <= names["exp(-x**2)"] <= 2.01, "it is divided by y >= 0.5"
    assert 0.99 <= names["x*y"] <= 1.01, "the slope of a sine"
