"""Depth before the run (F7): what a plan promises holds for runs it never saw; nothing is promised beyond the dtype."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from attnforge import incontext
from attnforge.errors import ArgumentError, PrecisionError
from attnforge.incontext.blocks import frozen
from attnforge.incontext.losses import LINEAR
from attnforge.incontext.planning import largest_growth, step_error
from attnforge.incontext.prompt import column_scale, doublings_for, step_size
from attnforge.incontext.solver import run


@pytest.mark.parametrize(("n", "d", "share", "eps"), [(60, 3, 0.0, 1e-6), (400, 6, 0.9, 1e-5), (1500, 4, 0.99, 1e-3)])
def test_runs_keep_the_promise_at_every_step(n: int, d: int, share: float, eps: float) -> None:
    rng = np.random.default_rng(n)
    x = math.sqrt(share) * rng.normal(size=(n, 1)) + math.sqrt(1 - share) * rng.normal(size=(n, d))
    x = x / column_scale(x, 0.0)
    y = x @ rng.normal(size=d) + rng.normal(size=n)
    gram = x.T @ x / n
    values, best = np.linalg.eigvalsh(gram), np.linalg.solve(gram, x.T @ y / n)
    condition = float(values[-1] / values[0]) * (1 + 1e-6)
    grown = 1 + 1e-9
    found = incontext.plan(
        n, d, condition, eps, radius=float(np.linalg.norm(x, axis=1).max()) * grown,
        distance=float(np.linalg.norm(best)) * grown, residual=float(np.abs(x @ best - y).max()) * grown,
    )  # fmt: skip
    assert found.bound <= eps
    doublings = doublings_for(1.0, condition)
    block = frozen(LINEAR, "heavy ball", doublings, d, dtype=torch.float64)
    step, at = step_size("heavy ball", doublings, float(values[-1]) * grown), block.channels
    rows = torch.from_numpy(x)
    data = at.data(rows, step / n * rows, torch.from_numpy(y / found.scale).unsqueeze(1))
    start = at.state(torch.zeros(1, d, dtype=torch.float64))
    path = run(block, start, data, rho=found.rho, tol=0.0, max_iter=found.depth).path().reshape(-1, d)
    away = np.linalg.norm(found.scale * path - best, axis=1)
    t = np.arange(len(path))
    promised = (1 + (1 + found.rho) * t) * found.rho**t * np.linalg.norm(best) * grown + found.steps
    assert (away <= promised).all() and away[-1] <= found.bound
    assert np.linalg.norm(found.weights(x, y) - best) <= found.bound
    residuals = np.abs(path @ x.T - y / found.scale).max()
    assert 0.01 < residuals <= 1, "every residual stays where the heads are linear"
    heavy = path[1:-1] - step * (path[1:-1] @ gram - x.T @ y / n / found.scale)
    heavy += block.momentum.beta * (path[1:-1] - path[:-2])
    assert np.linalg.norm(path[2:] - heavy, axis=1).max() <= found.step_error + 1e-14


def test_depth_grows_with_the_root_of_the_condition_number_and_the_logarithm() -> None:
    depths = [incontext.plan(100, 4, c, 1e-4).depth for c in (4.0, 16.0, 64.0, 256.0)]
    assert all(1.8 < b / a < 2.4 for a, b in itertools.pairwise(depths))
    digits = [incontext.plan(100, 4, 16.0, 10.0**-k).depth for k in (2, 4, 6)]
    assert digits[2] - digits[1] == pytest.approx(digits[1] - digits[0], abs=2)


def test_nothing_is_promised_beyond_the_dtype() -> None:
    with pytest.raises(PrecisionError, match="cannot be promised") as raised:
        incontext.plan(1000, 10, 100.0, 1e-9)
    assert raised.value.reachable is not None
    assert incontext.plan(1000, 10, 100.0, 1.5 * raised.value.reachable).bound <= 1.5 * raised.value.reachable
    with pytest.raises(PrecisionError, match="leave the heads' reach"):
        incontext.plan(1000, 10, 100.0, 0.1, dtype="float32")
    assert step_error(100, 4, 6.0, 1.0) < step_error(10_000, 4, 6.0, 1.0) < step_error(100, 4, 6.0, 1.0, "float32")
    assert math.isinf(step_error(2**60, 4, 6.0, 1.0))


def test_data_beyond_the_plan_are_refused() -> None:
    x = np.random.default_rng(0).normal(size=(40, 3))
    x = x / np.sqrt((x**2).mean(0))
    found = incontext.plan(40, 3, 6.0, 1e-3, distance=3.0, residual=3.0)
    assert found.weights(x, x[:, 0]) == pytest.approx([1, 0, 0], abs=found.bound)
    thin = np.concatenate([x[:, :2], x[:, 1:2] + 1e-3 * x[:, 2:]], 1)
    long = x * np.where(np.arange(40) == 7, 6.0, 1.0)[:, None]
    for X, word in ((2 * x, "root mean square 1"), (x[:, :2], "up to 40 rows of 3 columns"),
                    (np.tile(x, (2, 1)), "up to 40"), (x * np.nan, "finite"),
                    (thin / np.sqrt((thin**2).mean(0)), "condition numbers up to 6"),
                    (long / np.sqrt((long**2).mean(0)), "rows up to 5.19615")):  # fmt: skip
        with pytest.raises(ArgumentError, match=word):
            found.weights(X, X[:, 0])


def test_wrong_use_is_refused() -> None:
    for options, word in (({"n": 0}, "n must be"), ({"condition": 0.5}, "condition must"), ({"eps": 0.0}, "eps must"),
                          ({"dtype": "bfloat16"}, "dtype must be"), ({"distance": -1.0}, "distance must"),
                          ({"n": 1}, "no condition number"), ({"radius": 1.4}, "radius must be at least"),
                          ({"condition": 2.0**27}, "condition must be between")):  # fmt: skip
        with pytest.raises(ArgumentError, match=word):
            incontext.plan(**{"n": 10, "d": 2, "condition": 4.0, "eps": 1e-3, **options})  # type: ignore[arg-type]
    rho = 0.9
    assert largest_growth(rho) >= max((1 + 1.9 * t) * rho**t for t in range(100)) and largest_growth(0.0) >= 1
