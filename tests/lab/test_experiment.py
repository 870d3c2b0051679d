"""Cells, records, fits and verdicts: the same settings have the same name, and rules give the verdict they state."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnforge.charts.chart import Figure, Heat, Panel, Series
from attnforge.errors import ArgumentError
from attnforge.lab import verdicts
from attnforge.lab.experiment import AGREES, BETTER, FAILS, Cell, Finding, Record, find, grid, names, plain
from attnforge.lab.verdicts import Mean, Slope, mean, slope, student
from lab.toy import TOY

SETTINGS = st.dictionaries(
    st.text("abcpH_", min_size=1, max_size=6),
    st.one_of(
        st.integers(-99, 99), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=8), st.booleans()
    ),
    max_size=4,
)


@given(SETTINGS, st.integers(0, 10**6))
def test_a_key_is_a_file_name_and_depends_on_settings_and_seed_alone(settings: dict[str, Any], seed: int) -> None:
    cell = Cell(settings, seed)
    assert re.fullmatch(r"[A-Za-z0-9.-]{1,90}", cell.key) and not cell.key.startswith(".")
    again = Cell(dict(reversed(settings.items())), seed)
    assert again.key == cell.key and again == cell and hash(again) == hash(cell)
    assert Cell(settings, seed + 1).key != cell.key
    assert Cell({**settings, "another": 1}, seed).key != cell.key


@given(SETTINGS, st.dictionaries(st.text("xyz", min_size=1), st.floats(), max_size=3))
def test_records_come_back_as_they_were(settings: dict[str, Any], values: dict[str, float]) -> None:
    record = Record("toy", settings, 3, values, 1, True, 0.5, 12.0, "cpu", 1, {"torch": "2"}, {"cores": 2}, "now")
    text = json.dumps(record.to_json(), allow_nan=False)
    assert Record.from_json(json.loads(text)) == record
    assert all(record.values[n] == v if math.isfinite(v) else record.values[n] is None for n, v in values.items())


def test_values_become_plain_and_strange_ones_are_refused() -> None:
    value = {"a": np.float32(0.5), "b": torch.tensor([1.0, math.inf]), "c": (1, "x"), 4: None, "e": np.int64(3)}
    assert plain(value) == {"a": 0.5, "b": [1.0, None], "c": [1, "x"], "4": None, "e": 3}
    with pytest.raises(ArgumentError, match="numbers, texts, lists and mappings, got object"):
        plain(object())
    with pytest.raises(ArgumentError, match="names of their own; both have p"):
        Record("toy", {"p": 1}, 0, {"p": 2})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "JSON object, got list"),
        ({}, "wrong here: device"),
        ({**Record("toy", {}, 0, {}).to_json(), "more": 1}, "wrong here: more"),
        ({**Record("toy", {}, 0, {}).to_json(), "seed": "x"}, "'seed' of a record is a int"),
    ],
)
def test_what_is_no_record_is_said(data: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(words)):
        Record.from_json(data)


def test_a_grid_is_a_product_and_has_no_cell_twice() -> None:
    cells = grid((1, 2), p=(3, 4), kind=("a",))
    assert [(c.settings["p"], c.seed) for c in cells] == [(3, 1), (3, 2), (4, 1), (4, 2)]
    with pytest.raises(ArgumentError, match=r"cell twice: p3-s0"):
        replace(TOY, cells=lambda quick: grid(p=(3, 3))).grid(True)
    with pytest.raises(ArgumentError, match="empty"):
        replace(TOY, cells=lambda quick: ()).grid(True)
    with pytest.raises(ArgumentError, match="does not say: claim"):
        replace(TOY, claim="")
    with pytest.raises(ArgumentError, match="seed is a whole number"):
        Cell({}, -1)


@given(st.floats(-3, 3), st.floats(-5, 5), st.integers(2, 9))
def test_an_exact_power_law_is_found(exponent: float, shift: float, count: int) -> None:
    x = [2.0**i for i in range(count)]
    fit = slope(x, [math.exp(shift) * v**exponent for v in x])
    assert math.isclose(fit.value, exponent, abs_tol=1e-9) and fit.low <= fit.value <= fit.high
    assert math.isclose(fit.at([4.0])[0], math.exp(shift) * 4.0**exponent, rel_tol=1e-8)
    assert fit.n == count and (count > 2) == math.isfinite(fit.high)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng, hits, trials = np.random.default_rng(0), 0, 600
    x = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    for _ in range(trials):
        fit = slope(x, np.exp(-1.5 * np.log(x) + 0.3 * rng.standard_normal(5)))
        hits += fit.low <= -1.5 <= fit.high
    assert 0.92 < hits / trials < 0.98
    stats = pytest.importorskip("scipy.stats")
    found = stats.linregress(np.log(x), np.log([3.0, 1.1, 0.6, 0.2, 0.12]))
    ours = slope(x, [3.0, 1.1, 0.6, 0.2, 0.12])
    assert math.isclose(ours.value, found.slope, rel_tol=1e-12)
    assert math.isclose(ours.high - ours.value, stats.t.ppf(0.975, 3) * found.stderr, rel_tol=1e-9)
    assert all(math.isclose(student(0.9, n), stats.t.ppf(0.95, n), rel_tol=1e-9) for n in (1, 2, 7, 40, 1000))


def test_means_leave_gaps_out_and_bad_points_are_refused() -> None:
    assert mean([1.0, None, 3.0, math.nan]).value == 2.0 and mean([1.0]).high == math.inf
    assert slope([1, 2, 3], [1.0, None, 1 / 3]).n == 2
    for x, y, words in (([1], [1.0], "two x"), ([1, 2], [0.0, 1.0], "positive"), ([1, 2], [1.0], "as many")):
        with pytest.raises(ArgumentError, match=words):
            slope(x, y)
    with pytest.raises(ArgumentError, match="one finite value"):
        mean([None])


@given(st.floats(-3, 1), st.floats(0, 1), st.floats(0, 1))
def test_rates_are_judged_by_the_rule_they_state(value: float, down: float, up: float) -> None:
    found = verdicts.rate("q", -1, Slope(value, value - down, value + up, 9))
    low, high = value - down, value + up
    expected = BETTER if high < -1.1 else AGREES if low <= -0.9 else FAILS
    if high - low > 1:
        expected = BETTER if value < -1.3 else AGREES if value <= -0.7 else FAILS
    assert found.verdict == expected and "-1 ± 0.1" in found.rule and found.interval == (value - down, value + up)
    cost = verdicts.growth("q", -1, Slope(value, value - down, value + up, 9))
    assert cost.verdict == expected and cost.relation == "at most" and "more slowly" in cost.rule


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 10)), min_size=1, max_size=6))
def test_bounds_have_no_tolerance(pairs: list[tuple[float, float]]) -> None:
    verdict = verdicts.bound("q", pairs).verdict
    assert (verdict == FAILS) == any(m > b for m, b in pairs)
    assert (verdict == BETTER) == all(10 * m < b for m, b in pairs)
    limit = pairs[0][1]
    assert verdicts.bound("q", [(math.nextafter(limit, math.inf), limit)]).verdict == FAILS


def test_the_other_rules() -> None:
    near = Mean(1.0, 0.9, 1.1, 0.1, 11)
    assert [verdicts.equal("q", p, near).verdict for p in (1.15, 1.3, 0.7)] == [AGREES, BETTER, FAILS]
    assert [verdicts.close("q", 2.0, m, 0.05).verdict for m in (2.09, 1.91, 2.2)] == [AGREES, AGREES, FAILS]
    assert [verdicts.threshold("q", 1.0, m).verdict for m in (1.0, 1.1)] == [AGREES, FAILS]
    assert [verdicts.threshold("q", 1.0, m, at_least=True).verdict for m in (1.0, 0.9)] == [AGREES, FAILS]
    with pytest.raises(ArgumentError, match="bound from 0"):
        verdicts.bound("q", [])
    with pytest.raises(ArgumentError, match="verdict is one of agrees, better than predicted, does not hold"):
        Finding("q", 1.0, 1.0, None, "roughly", "rule")


def test_charts_are_checked_when_they_are_made() -> None:
    line = Series("a", [1, 2], [1.0, math.nan])
    assert line.y == (1.0, None)
    for wrong, words in (
        (lambda: Series("a", [1], [1.0, 2.0]), "1 places and 2 values of y"),
        (lambda: Series("a", [1], [1.0], style="dotted"), "line, points, bound"),
        (lambda: Series("a", [1], [1.0], low=[0.5]), "one end of its interval"),
        (lambda: Heat([[1.0], [1.0, 2.0]], "w"), "rows of one length"),
        (lambda: Panel("t", "x", "y"), "either series or a heat map"),
        (lambda: Panel("t", "x", "y", [line, line]), "two series of one name"),
        (lambda: Panel("t", "x", "y", [Series("a", [0], [1.0])], log_x=True), "a place <= 0"),
        (lambda: Figure("A figure", "c", [Panel("t", "x", "y", [line])]), "lower-case words"),
        (lambda: Figure("f", "c", []), "no panel"),
    ):
        with pytest.raises(ArgumentError, match=re.escape(words)):
            wrong()


def test_experiments_are_found_by_name_or_a_near_one_is_suggested() -> None:
    for name in names():
        experiment = find(name)
        assert experiment.name == name and set(experiment.grid(True)) and set(experiment.grid(False))
        assert find(name.replace("-", "_").upper()) is experiment
    with pytest.raises(ArgumentError, match=r"'rate-ancors'; did you mean 'rate-anchors'\?.*and all"):
        find("rate-ancors")
