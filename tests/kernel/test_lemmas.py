"""The rules of the kernel against what they speak of, one by one (docs/kernel.md)."""

from __future__ import annotations

import ast
import importlib
import itertools
import math
import random
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from flint import arb, ctx, fmpq

from attnforge.expressions.composite import named
from attnforge.functions import registry
from attnforge.kernel.balls import NotProved, coefficients, down, reach, series, supremum, up, working
from attnforge.kernel.file import outward
from attnforge.kernel.functions import evaluate, function
from attnforge.kernel.program import Form
from attnforge.kernel.prove import _moved
from attnforge.kernel.roots import sum_of
from attnforge.kernel.rounding import EXPONENTIAL, MACHINES, Machine, Softmax, affine_rounding
from attnforge.kernel.scalar import Cell, Head, HeadSum, Table, Weights, _logit_errors, _near, cell_error, error_on
from attnforge.kernel.values import plain

ROOT = Path(__file__).resolve().parents[2]
SIZES = [1e-300, 1e-100, 1e-30, 1e-10, 1e-4, 1e-1, 1.0]  # of errors: from what hardly is one to all there is
FLOAT32, FLOAT64 = MACHINES["float32"], MACHINES["float64"]


def test_every_lemma_names_functions_that_exist() -> None:
    page = (ROOT / "docs" / "kernel.md").read_text("utf-8")
    named = re.findall(r"`kernel\.((?:(?:alone|incontext|plain|programs|sampled)\.)?\w+)\.([\w.]+)`", page)
    assert len(named) > 15
    for module, path in named:
        found = importlib.import_module(f"attnforge.kernel.{module}")
        for part in path.split("."):
            found = getattr(found, part)
    labels = re.findall(r"^\*\*(K\d+)\*\*", page, re.MULTILINE)
    assert [int(label[1:]) for label in labels] == sorted({int(label[1:]) for label in labels}), "in order, once each"
    cited = {
        label for path in (ROOT / "src" / "attnforge" / "kernel").rglob("*.py")
        for label in re.findall(r"\bK\d+\b", path.read_text("utf-8"))
    }  # fmt: skip
    assert cited and cited <= set(labels)


def _named(text: str) -> set[str]:
    """The lemmas that a text names, "K13 to K17" and "K18-K20" being all between."""
    found: set[str] = set()
    for first, last in re.findall(r"\bK(\d+)(?:\s*(?:to|-)\s*K(\d+))?", text):
        found |= {f"K{i}" for i in range(int(first), int(last or first) + 1)}
    return found


def test_slots_left_out_weigh_nothing_that_is_not_counted() -> None:
    """K8: heads of many slots, whose far ones are left out on wider intervals first, against all slots in 400 bits."""
    source = random.Random(8)
    with working():
        for machine, scale in ((FLOAT32, 1e-30), (FLOAT32, 1.0), (FLOAT64, 1.0), (FLOAT64, 1e30)):
            places = sorted(scale * source.uniform(-9, 9) for _ in range(90))
            keys = tuple((40.0 * x / scale**2, -20.0 * (x / scale) ** 2) for x in places)
            values = tuple(source.choice((-1.0, 1.0)) * 10.0 ** source.randrange(-3, 6) for _ in places)
            head = Head(((1.0, 0.0), (0.0, 1.0)), keys, False, (0.0,) * 3, values, 1.0)
            for _ in range(40):
                y, r = arb(scale * source.uniform(-12, 12)), arb(scale * 10.0 ** source.uniform(-12, 1))
                fewer, lost = _near(head, machine, y, r)
                assert set(fewer.keys) <= set(keys) and (len(fewer.keys) < 60 or not r < scale)
                with ctx.workprec(400):
                    for at in (y - r, y, y + r):
                        means = []
                        for one in (head, fewer):
                            powers = [(arb(a) * at + arb(b)).exp() for a, b in one.keys]
                            means.append(sum(p * arb(v) for p, v in zip(powers, one.memory, strict=True)) / sum(powers))
                        assert (means[0] - means[1]).abs_lower() <= lost.upper()


def test_every_lemma_has_a_test_that_names_it() -> None:
    page = (ROOT / "docs" / "kernel.md").read_text("utf-8")
    named: set[str] = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                named |= _named(ast.get_docstring(node) or "")
    assert named == set(re.findall(r"^\*\*(K\d+)\*\*", page, re.MULTILINE))


def test_roundings_in_a_row_are_within_gamma() -> None:
    """K1: any k factors 1 + d or 1 / (1 + d), |d| <= u, the worst ones among them."""
    source = random.Random(2)
    with working():
        for machine in (FLOAT32, FLOAT64):
            for k in (1, 2, 7, 100, 1000):
                for sign in (-1, 1, 0):
                    product = arb(1)
                    for _ in range(k):
                        d = machine.u * (sign or source.uniform(-1, 1))
                        product = product * (1 + d) if sign > 0 or source.random() < 0.5 else product / (1 + d)
                    assert abs(product - 1) <= machine.gamma(k) * (1 + arb(2) ** -100)  # 1 / (1 - u) is as far
            assert (1 + machine.gamma(3)) * (1 + machine.gamma(5)) <= 1 + machine.gamma(8) < 1 + 8.001 * machine.u


@pytest.mark.parametrize("size", SIZES)
def test_logits_move_by_no_more_than_their_lemma_says(size: float) -> None:
    """K3 where nothing rounds: queries that err by up to size move logits, up to a number common to all slots."""
    source, still = random.Random(4), Machine(arb(0), arb(0), FLOAT64.huge)
    with working():
        for _ in range(30):
            keys = tuple((source.gauss(0, 3), source.gauss(0, 3)) for _ in range(5))
            loose = (size, size * source.random())
            head = Head(((1.0, 0.0), (0.5, 1.0)), keys, False, (0.0, 0.0, 0.0), (0.0,) * 5, 1.0, loose)
            y, r = arb(source.gauss(0, 1)), arb(source.random())
            errors = _logit_errors(head, still, Weights.of(head, y, r), y, r)
            with ctx.workprec(1200):
                moves = [arb(e) * source.choice([-1, 1, source.uniform(-1, 1)]) for e in loose]
                moved = [arb(a) * moves[0] + arb(b) * moves[1] for a, b in keys]
                for i in range(5):
                    apart = [abs(moved[i] - moved[j]) * (1 - arb(2) ** -100) for j in range(i)]  # may be all there is
                    assert all(x <= errors[i] + errors[j] for j, x in enumerate(apart))
            assert all(e < 30 * size for e in errors)


@pytest.mark.parametrize("size", SIZES)
def test_quotients_of_what_vanishes_at_0_are_known_there(size: float) -> None:
    """K7: values and slopes at 1e-300 to 1 from 0, where a / b itself is 0 / 0, against 4500 bits."""
    for text, quotient in (("sin(y)/y", lambda y: y.sin() / y), ("(1 - cos(y))/y**2", lambda y: (1 - y.cos()) / y**2)):
        for place in (size, -size):
            with working():
                found = evaluate(function(f"expr: {text}").pieces[0], arb(place), 2)
                with ctx.workprec(4500):
                    y, step = arb(place), arb(2) ** -1300
                    slope = (quotient(y + step) - quotient(y - step)) / (2 * step)
                    assert found[0].overlaps(quotient(y)) and (found[1] + arb(0, 2.0**-1000)).overlaps(slope)
                assert found[0].rad() < 1e-6 + size and found[1].rad() < 1e-6 + size


MOVED = {"sin": arb.sin, "exp": arb.exp, "tanh": arb.tanh, "sqrt": arb.sqrt, "log": arb.log,
         "relu": lambda y: y if y > 0 else arb(0), "power(0.25)": lambda y: y.sqrt().sqrt(),
         "power(1/3)": lambda y: (y.log() / 3).exp() if y > 0 else arb(0),
         "power(1.5)": lambda y: y * y.sqrt()}  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MOVED)
def test_functions_move_by_no_more_than_their_lemma_says(name: str, size: float) -> None:
    """K11: arguments that err by up to size, at kinks and at the end of a root, whose slope has no bound."""
    low = 0.0 if name == "sqrt" or name.startswith("power") else 0.25 if name == "log" else -2.0
    source, exact = random.Random(name), MOVED[name]
    with working():
        table = Table(function(name), [low + k / 16 for k in range(65)])
        for start in (low, 0.5, source.uniform(low, low + 3), 1e-310 if low <= 0 else 1.0):
            end = min(math.nextafter(start + size, math.inf), table.edges[-1])
            cells = table.between(start, end)
            assert cells is not None and table.function is not None
            with ctx.workprec(2400):
                other = (arb(start) + arb(size) * source.choice([1.0, source.random()])).min(arb(end))
                apart = abs(exact(other) - exact(arb(start)))
            entry = plain(start, end, None)
            assert apart <= _moved(table.function, table, *cells, entry, arb(size))


@pytest.mark.parametrize("size", SIZES)
def test_a_softmax_moves_no_more_than_its_lemma_says(size: float) -> None:
    """K4 before rounding: logits moved by up to d, exact means in 400 bits."""
    source = random.Random(1)
    with working():
        for _ in range(30):
            n = source.randint(2, 7)
            logits, values = ([arb(source.gauss(0, 3)) for _ in range(n)] for _ in "ab")
            errors = [arb(size * source.random()) for _ in range(n)]
            slack = -(1 - EXPONENTIAL * FLOAT64.u).log()
            moved = [x + source.choice([-1, 1]) * (e + slack) for x, e in zip(logits, errors, strict=True)]
            weights, other = _weights(logits), _weights(moved)
            mean = sum((w * v for w, v in zip(weights, values, strict=True)), arb(0))
            apart = abs(sum((w * v for w, v in zip(other, values, strict=True)), arb(0)) - mean)
            spread = [abs(v - mean) for v in values]
            bound, _ = Softmax.of(FLOAT64, weights, errors).error(spread, [abs(v) for v in values])
            assert apart <= bound


def _weights(logits: list[arb]) -> list[arb]:
    powers = [x.exp() for x in logits]
    total = sum(powers, arb(0))
    return [p / total for p in powers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_computed_softmax_is_within_its_bound(dtype: torch.dtype) -> None:
    machine = FLOAT32 if dtype == torch.float32 else FLOAT64
    generator = torch.Generator().manual_seed(3)
    with working():
        for n in (2, 5, 40):
            logits, values = (torch.randn(n, generator=generator, dtype=dtype) * s for s in (4, 3))
            found = float(torch.softmax(logits, 0) @ values)
            exact = [arb(x) for x in logits.tolist()]
            weights, top = _weights(exact), max(logits.tolist())
            errors = [machine.u * abs(arb(top) - x) for x in exact]  # the largest is subtracted
            mean = sum((w * arb(v) for w, v in zip(weights, values.tolist(), strict=True)), arb(0))
            sizes = [abs(arb(v)) for v in values.tolist()]
            spread = [abs(arb(v) - mean) for v in values.tolist()]
            bound, most = Softmax.of(machine, weights, errors).error(spread, sizes)
            assert abs(arb(found) - mean) <= bound and abs(arb(found)) <= most
            assert bound < 200 * n * machine.u


def _added(terms: list[np.float32], source: random.Random) -> np.float32:
    """A sum in float32, two random parts at a time."""
    left = list(terms)
    while len(left) > 1:
        a, b = (left.pop(source.randrange(len(left))) for _ in "ab")
        left.append(np.float32(a + b))
    return left[0]


@pytest.mark.parametrize("lightest", [1.0, 1e-6, 1e-8, 1e-9, 1e-12, 1e-30])
def test_sums_in_any_order_with_slots_that_weigh_little(lightest: float) -> None:
    """K4's roundings alone: exponentials are exact, sums are taken in random orders, some values are 0 or huge."""
    source = random.Random(5)
    with working():
        for _ in range(60):
            n = source.randint(2, 24)
            scales = [source.choice([1.0, lightest]) * source.uniform(0.5, 2) for _ in range(n)]
            powers = [np.float32(1.0), *(np.float32(min(x, 1.0)) for x in scales[1:])]
            values = [np.float32(source.choice([0.0, 1.0, -1.0, 1e6, 1e-6]) * source.random()) for _ in range(n)]
            inverse = np.float32(1) / _added(powers, source)
            parts = [np.float32(np.float32(p * inverse) * v) for p, v in zip(powers, values, strict=True)]
            found = _added(parts, source)
            exact = [arb(float(p)) for p in powers]
            weights = [p / sum(exact, arb(0)) for p in exact]
            numbers = [arb(float(v)) for v in values]
            mean = sum((w * v for w, v in zip(weights, numbers, strict=True)), arb(0))
            softmax = Softmax.of(FLOAT32, weights, [arb(0)] * n, even=False)
            nothing = [arb(0)] * n  # of the logits' errors: what is left is what sums, quotients and products round
            bound, most = softmax.error(nothing, [abs(v) for v in numbers])
            assert abs(arb(float(found)) - mean) <= bound and abs(arb(float(found))) <= most


@pytest.mark.parametrize("steep", [1.0, 30.0, 1e4])
def test_slots_that_weigh_nothing_are_left_out(steep: float) -> None:
    """K8 with 60 slots, warm and cold, on narrow and wide cells: what is computed there is within the bound."""
    places = [k / 8 for k in range(60)]
    keys = tuple((float(np.float32(2 * steep * a)), float(np.float32(-steep * a * a))) for a in places)
    values = tuple(float(np.float32(math.sin(a))) for a in places)
    head = Head(((1.0, 0.0), (0.0, 1.0)), keys, False, (0.0, 0.0, 0.0), values, 1.0)
    site = HeadSum((head,), (0.0, 0.0, 0.0), function("sin"), 0.0, "float32")
    table = torch.tensor(keys)
    with working():
        for low, high in ((3.0, 3.001), (3.05, 3.08), (2.0, 2.5), (0.0, 7.375)):
            fewer, lost = _near(head, FLOAT32, arb((low + high) / 2), arb((high - low) / 2))
            assert (len(fewer.keys) < 60) == (steep > 1 and high - low < 7) and lost < 1e-9
            y = torch.linspace(low, high, 501)
            y = y[(y >= low) & (y <= high)]
            found = torch.softmax(y[:, None] * table[:, 0] + table[:, 1], -1) @ torch.tensor(values)
            bound = error_on(site, low, high)[1]
            worst = max(up(abs(arb(f) - arb(x).sin())) for f, x in zip(found.tolist(), y.tolist(), strict=True))
            assert worst <= bound


@pytest.mark.parametrize("size", SIZES)
def test_affine_sums_round_by_no_more_than_said(size: float) -> None:
    """K2: sums of four products and a bias in float32, of numbers of every size."""
    source = np.random.default_rng(0)
    with working():
        for _ in range(50):
            x, w = ((source.normal(size=4) * s).astype(np.float32) for s in (size, 1.0))
            w[source.integers(4)] = source.choice([0, 0.5, 2, 1])
            bias = np.float32(source.choice([0, size]))
            found = arb(float(np.float32(x @ w) + bias))
            exact = [arb(float(a)) * arb(float(b)) for a, b in zip(x, w, strict=True)]
            total = sum((abs(e) for e in exact), abs(arb(float(bias))))
            bound = affine_rounding(FLOAT32, w.astype(float).tolist(), float(bias), total)
            assert abs(found - sum(exact, arb(float(bias)))) <= bound
            signs = [sum(((s * e).max(arb(0)) for e in (*exact, arb(float(bias)))), arb(0)) for s in (1, -1)]
            signed = affine_rounding(FLOAT32, w.astype(float).tolist(), float(bias), total, signs[0].max(signs[1]))
            assert abs(found - sum(exact, arb(float(bias)))) <= signed and signed.upper() <= bound.upper() * 1.000001
        ones = np.where(np.arange(99) % 2, -1.5, 1.5)  # one sign first: partial sums of up to 75, of 150
        worst = float(np.add.accumulate(np.sort(1.1 * ones).astype(np.float32))[-1]) - 1.5 * float(np.float32(1.1))
        signed = affine_rounding(FLOAT32, ones.tolist(), 0.0, arb(1.1 * 148.5), arb(1.1 * 75))
        assert abs(worst) <= signed < 0.52 * affine_rounding(FLOAT32, ones.tolist(), 0.0, arb(1.1 * 148.5))
        assert affine_rounding(FLOAT32, [0.0, 1.0, 0.0], 0.0, arb(7)) == 0  # a selection
        assert affine_rounding(FLOAT32, [0.0, 0.5], 0.0, arb(7)) > 0  # may underflow


NAMES = (*registry.names(), "power(-1.5)", "power(2.5)", "power(1/3)", "expr: sin(y)/y", "expr: (1 - cos(y))/y**2",
         "leaky_relu(0.2)", "shifted_log(1e-9)", "expr: log(1 - y)*(1 - y) + y*log(y)",
         "piecewise_linear([-1, 0, 1], [0, 1, 0])")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_functions_are_those_of_the_registry(name: str) -> None:
    """Two tables of functions that share no code: values, series, ranges."""
    mine, theirs = function(name), named(name)
    with working():
        for y in np.linspace(-2.9, 2.9, 30).tolist():
            value = float(theirs(torch.tensor(y, dtype=torch.float64)))
            if math.isfinite(value):
                node = mine.piece(y, y)
                assert node is not None
                assert abs(float(evaluate(node, arb(y), 1)[0]) - value) <= 1e-12 * max(1.0, abs(value))
                whole = mine.range(y - 0.01, y + 0.01)
                room = 1e-12 * max(1.0, abs(value))  # of the other's float64 value
                assert not whole.is_finite() or down(whole) - room <= value <= up(whole) + room
        for low in (0.11, 0.52):
            node = mine.piece(low, low + 0.1)
            if theirs.domain.lo >= low or node is None:
                continue
            table = registry.taylor(theirs, np.array([low]), np.array([low + 0.1]), 4)
            found = evaluate(node, arb(float(table.centre[0])), 5)
            for j in range(5):
                off = abs(float(found[j]) - table.coefficient[0, j])
                assert off <= table.error[0, j] + 1e-11 * max(1.0, abs(table.coefficient[0, j]))


def test_unknown_functions_are_refused() -> None:
    for name in ("softplus(20.0)", "nothing", "expr: nothing(y)", "expr: y**pi", "expr: __import__(y)"):
        with pytest.raises(NotProved), working():
            evaluate(function(name).pieces[0], arb(1), 2)


@pytest.mark.parametrize("name", ["elu", "selu", "softsign", "elu(0.5)", "hardswish"])
def test_pieces_are_read_between_their_ends_alone(name: str) -> None:
    """A piece by the kernel's formula is the registry's between its ends, and proves nothing beyond them."""
    whole = function(name)
    ends = (-4.0, *whole.knots, 4.0)
    for i, (low, high) in enumerate(itertools.pairwise(ends)):
        text = f"piece {i} of {name}"
        mine, theirs = function(text), named(text)
        assert mine.own == (-math.inf, *whole.knots, math.inf)[i : i + 2] and not mine.knots
        with working():
            for y in np.linspace(low, high, 9).tolist():
                value = float(theirs(torch.tensor(y, dtype=torch.float64)))
                assert abs(float(evaluate(mine.pieces[0], arb(y), 1)[0]) - value) <= 1e-12 * max(1.0, abs(value))
    for wrong in ("piece 9 of elu", "piece 0 of piece 0 of elu", "piece -1 of elu", "piece 0 of nothing"):
        with pytest.raises(NotProved):
            function(wrong)


def test_a_root_goes_on_beyond_its_end() -> None:
    with working():
        root, arc = function("sqrt"), function("asin")
        assert root.range(-1.0, 4.0).contains(0) and root.range(-1.0, 4.0).contains(2) and root.range(-2.0, -1.0) == 0
        assert up(arc.range(0.5, 3.0)) >= math.pi / 2 > down(arc.range(0.5, 3.0))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_largest_value_of_a_polynomial(scale: float) -> None:
    source = random.Random(5)
    with working():
        for _ in range(20):
            thin = [arb(scale * source.gauss(0, 1)) for _ in range(6)]
            r = arb(0.7)
            bound = supremum(thin, arb(0), r)
            seen = max(abs(sum(float(c) * (0.7 * t) ** j for j, c in enumerate(thin))) for t in np.linspace(-1, 1, 101))
            assert seen <= up(bound) and bound <= reach(thin, arb(0), r) * 1.0001
            assert len(coefficients(series(thin), 9)) == 9 and coefficients(series(thin), 9)[8].is_nan()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_a_box_is_widened_to_numbers_of_the_dtype(dtype: str) -> None:
    kind = getattr(torch, dtype)
    for x in (0.1, -0.1, 1.0, 0.0, 1 / 3, -2 / 3, 1e-3, 60000.0, 2.0**-140, -(2.0**-145)):
        low, high = outward(x, dtype, above=False), outward(x, dtype, above=True)
        for end in (low, high):
            assert float(torch.tensor(end, dtype=torch.float64).to(kind)) == end
        assert low <= x <= high
        nearest = float(torch.tensor(x, dtype=torch.float64).to(kind))
        assert nearest in (low, high)


def _site(weights: tuple[float, ...], name: str) -> HeadSum:
    """A softmax over memory slots with these values, compared with a function."""
    keys = tuple((float(k), -0.5 * k * k) for k in range(len(weights)))
    return HeadSum((Head(((1.0, 0.0), (0.0, 1.0)), keys, False, (0.0, 0.0, 0.0), weights, 1.0),), (0.0, 0.0, 0.0),
                function(name), 0.0, "float32")  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_what_a_head_computes_is_within_the_bound_of_its_cell(size: float) -> None:
    """K8, with errors of every size: the head is a mean of values around those of the function, scaled."""
    values = tuple(float(np.float32(size * math.sin(k))) for k in range(4))
    site = _site(values, f"expr: {Fraction(size)}*sin(y)")
    y = torch.linspace(0.4, 0.6, 2001)
    logits = y[:, None] * torch.arange(4.0) - 0.5 * torch.arange(4.0) ** 2
    found = (torch.softmax(logits, -1) @ torch.tensor(values)).double().tolist()
    with working():
        bound = cell_error(site, FLOAT32, Cell.of(0.3999, 0.6001, site.function))
        worst = max((abs(arb(f) - arb(size) * arb(x).sin()) for f, x in zip(found, y.double().tolist(), strict=True)),
                    key=up)  # fmt: skip
        assert worst <= bound.rest and bound.slope == 0
        assert bound.rest < 1.5 * worst + arb(2.0**-110)


def test_a_head_that_adds_next_to_nothing_costs_no_rounding() -> None:
    """K8: of three heads with constant values 3, -2 and 1e-12 the sum rounds once, by u times 1 and little more."""
    heads = tuple(Head(((0.0, 1.0),), ((0.0,),), False, (0.0, 0.0, 0.0), (v,), 1.0) for v in (3.0, 1e-12, -2.0))
    with working():
        for chosen, roundings in ((heads, 1), (heads[::2], 1), ((*heads, heads[0]), 2 * 8)):
            wanted = function(f"expr: {Fraction(sum(Fraction(h.memory[0]) for h in chosen))}")
            own = error_on(HeadSum(chosen, (0.0, 0.0, 0.0), wanted, 0.0, "float32"), 0.0, 1.0)[1]
            alone = sum(3 * abs(h.memory[0]) for h in chosen)  # each head: one slot, three roundings
            assert own <= (roundings + alone) * 2.0**-24 * 1.001 + 1e-11


def test_a_settled_gate_is_exact() -> None:
    """K9: far from its kink a relu of sharpness 2^26 computes its argument, bit by bit; at the kink it does not."""
    head = Head(((1.0, 0.0),), ((2.0**26,), (0.0,)), True, (0.0, 1.0, 0.0), (0.0,), 1.0)
    site = HeadSum((head,), (0.0, 0.0, 0.0), function("relu"), 0.0, "float32")
    with working():
        far = cell_error(site, FLOAT32, Cell.of(0.5, 0.75, site.function)).rest
        table = Table(site.function, [-1.0, *(k * 2.0**-29 for k in range(-300, 301)), 1.0])
        rests = table.errors(site)[1]
        assert far < 2.0**-110 and 0.27 < max(rests[1:-1]) * 2.0**26 < 0.32


@pytest.mark.parametrize("size", SIZES)
def test_roots_of_squares_err_by_lengths(size: float) -> None:
    """K35 in 128 bits: squares near and far from 0, sums that round as they may, roots that go on as 0."""
    source = random.Random(size)
    columns = [(2, 0), (3, 0), (5, 0)]
    with working():
        for _ in range(60):
            c = [source.choice([1.0, 0.3, 4.0, 1e-8]) for _ in columns]
            b = source.choice([0.0, size, 1.0])
            meant = [fmpq(*x.as_integer_ratio()) * fmpq(source.randint(-9, 9) + 10**17, 10**17) for x in c]
            form = Form(dict(zip(columns, meant, strict=True)), fmpq(*b.as_integer_ratio()))
            found = sum_of(FLOAT64, form, columns, (c, b), columns)
            assert found is not None
            q = [arb(source.gauss(0, 1) * 10.0 ** source.uniform(-8, 1)) * source.choice([0, 1]) for _ in columns]
            e, k, m = ([arb(size * source.random()) for _ in columns] for _ in "abc")
            squares = {(0, *column): one for column, one in zip(columns, zip(e, k, m, strict=True), strict=True)}
            near = [x + source.choice([-1, 0, 1]) * y for x, y in zip(q, e, strict=True)]
            side = source.choice([-1, 1])
            p = [x * x + side * (abs(x) * y + z) for x, y, z in zip(near, k, m, strict=True)]
            heavy = sum((arb(w) * abs(x) for w, x in zip(c, p, strict=True)), arb(b))
            read = sum((arb(w) * x for w, x in zip(c, p, strict=True)), arb(b)) + side * FLOAT64.gamma(3) * heavy
            exact = sum((arb(w) * x * x for w, x in zip(meant, q, strict=True)), arb(form.bias))
            root = read.sqrt() if read > 0 else arb(0)
            ends = down(exact), up(exact)
            moved = found.moved(0, ends, Fraction(1, 2), squares)
            assert abs(root - exact.sqrt()) <= moved
            for power in (Fraction(1, 4), Fraction(1, 3), Fraction(7, 10)):
                p = arb(power.numerator) / power.denominator
                apart = abs(root ** (2 * p) - exact.sqrt() ** (2 * p)) if root > 0 and exact > 0 else arb(0)
                assert apart <= found.moved(0, ends, power, squares)
            assert moved < 4 * (sum(e, arb(0)) + sum(k, arb(0)) + sum(m, arb(0)).sqrt()) + 1e-13  # of weights up to 4


def test_what_is_no_sum_of_squares_is_none() -> None:
    """K35 speaks of positive weights of squares by heads; a weight that is as far off as it is large is none."""
    one, form = (2, 0), Form({(2, 0): fmpq(1)}, fmpq(0))
    with working():
        assert sum_of(FLOAT64, form, [one, (3, 0)], ([1.0, 0.0], 0.0), [one]) is not None
        wrong = [([-1.0, 0.0], 0.0, [one]), ([1.0, 1e-30], 0.0, [one, (3, 0)]), ([1.0, 0.0], 0.0, []),
                 ([1.0, 0.0], 1e-30, [one]), ([0.4, 0.0], 0.0, [one]), ([3.0, 0.0], 0.0, [one])]  # fmt: skip
        for weights, bias, known in wrong:
            assert sum_of(FLOAT64, form, [one, (3, 0)], (weights, bias), known) is None


def test_between_neighbours_a_cell_errs_as_its_ends() -> None:
    """K8: a gate whose kink is steeper than the numbers are dense, at the only two points that there are."""
    head = Head(((1.0, 0.0),), ((2.0**53,), (0.0,)), True, (0.0, 1.0, 0.0), (0.0,), 1.0)
    site, low = HeadSum((head,), (0.0, 0.0, 0.0), function("relu"), 0.0, "float64"), 0.5
    with working():
        ends = [error_on(site, x, x)[1] for x in (low, math.nextafter(low, 1.0))]
        assert error_on(site, low, math.nextafter(low, 1.0))[1] == max(ends)
