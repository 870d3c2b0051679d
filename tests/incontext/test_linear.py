"""Least squares and ridge in context against closed forms, bad scales, and batches of prompts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import linear_model
from sklearn.datasets import load_diabetes
from sklearn.exceptions import ConvergenceWarning

from attnforge.incontext import LinearRegression, Ridge, in_context

Array = np.ndarray[Any, np.dtype[np.float64]]


def conditioned(condition: float, n: int = 200, d: int = 20, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    U, V = np.linalg.qr(rng.normal(size=(n, d)))[0], np.linalg.qr(rng.normal(size=(d, d)))[0]
    X = U * np.geomspace(1, 1 / condition, d) @ V.T * math.sqrt(n)
    return X, X @ rng.normal(size=d) + 0.1 * rng.normal(size=n) + 1.0


def relative(a: Array, b: Array) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("condition", [1.0, 10.0, 100.0])
def test_coefficients_match_the_closed_form(condition: float) -> None:
    X, y = conditioned(condition)
    for ours, theirs in ((LinearRegression(), linear_model.LinearRegression()), (Ridge(0.1), linear_model.Ridge(0.1))):
        ours.fit(X, y)
        theirs.fit(X, y)
        assert relative(ours.coef_, theirs.coef_) < 1e-11
        assert abs(ours.intercept_ - theirs.intercept_) < 1e-10
        assert np.allclose(ours.predict(X), theirs.predict(X), rtol=1e-11, atol=1e-11)
        assert len(ours.trajectory_) == ours.n_iter_ + 1
        assert np.allclose(ours.trajectory_[-1], ours.coef_)


def test_underdetermined_data_give_the_minimum_norm() -> None:
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(10, 20)), rng.normal(size=10)
    model = LinearRegression().fit(X, y)
    assert relative(model.coef_, linear_model.LinearRegression().fit(X, y).coef_) < 1e-10
    assert model.certificate_.kind == "calibrated"
    twice = np.concatenate([X[:, :3]] * 2, axis=1)
    assert relative(LinearRegression().fit(twice, y).coef_, linear_model.LinearRegression().fit(twice, y).coef_) < 1e-10


def test_extreme_scales_and_constant_columns() -> None:
    rng = np.random.default_rng(0)
    unit = rng.normal(size=(50, 4))
    unit[:, 3] = 7.0
    size = np.array([1e-8, 1.0, 1e8, 1.0])
    y = unit @ np.ones(4) + rng.normal(size=50)
    exact = linear_model.LinearRegression().fit(unit, y)
    model = LinearRegression().fit(unit * size, y)
    assert relative(model.coef_ * size, exact.coef_) < 1e-10
    assert model.coef_[3] == 0
    assert np.allclose(LinearRegression().fit(unit * size, 1e8 * y).predict(unit * size), 1e8 * exact.predict(unit))
    assert np.all(LinearRegression().fit(np.ones((5, 2)), np.arange(5.0)).coef_ == 0)


def test_hopeless_conditions_warn_clearly() -> None:
    """cond(X'X) beyond 2^26, the largest class of networks: a warning that says so, finite weights, no certificate."""
    X, y = conditioned(1e6, n=60, d=4)
    with pytest.warns(ConvergenceWarning, match=r"condition number .*2\^26"):
        model = LinearRegression(max_iter=3000).fit(X, y)
    assert np.isfinite(model.coef_).all() and model.certificate_.kind == "calibrated"
    assert "condition" in model.certificate_.reason
    assert model.score(X, y) > 0.9, "what the data determine well is found"
    X = np.vander(np.linspace(-1, 1, 50), 4) * 10.0 ** np.arange(-8, 8, 4)  # bad units are no bad condition
    assert relative(LinearRegression().fit(X, X[:, 0]).predict(X), X[:, 0]) < 1e-9


def test_targets_weights_and_penalties() -> None:
    rng = np.random.default_rng(1)
    X, Y, weight = rng.normal(size=(40, 3)), rng.normal(size=(40, 2)), rng.uniform(0, 2, 40)
    for alpha in (0.5, [0.1, 3.0]):
        ours = Ridge(alpha).fit(X, Y, weight)
        theirs = linear_model.Ridge(alpha).fit(X, Y, weight)
        assert relative(ours.coef_, theirs.coef_) < 1e-10
        assert np.allclose(ours.predict(X), theirs.predict(X), atol=1e-10)
    with pytest.raises(ValueError, match="alpha"):
        Ridge(-1.0).fit(X, Y)


def test_diabetes_and_float32() -> None:
    X, y = load_diabetes(return_X_y=True)
    theirs = linear_model.LinearRegression().fit(X, y)
    assert round(LinearRegression().fit(X, y).score(X, y), 4) == round(theirs.score(X, y), 4)
    X, y = conditioned(3.0)
    single = Ridge(0.1, dtype="float32", tol=1e-6).fit(X, y)
    assert 0 < relative(single.coef_, linear_model.Ridge(0.1).fit(X, y).coef_) < 1e-4
    with pytest.raises(ValueError, match="dtype"):
        Ridge(dtype="int8").fit(X, y)


def test_batches_of_prompts() -> None:
    generator = torch.Generator().manual_seed(0)
    X, w, q = (torch.randn(s, generator=generator).double() for s in ((30, 8, 5), (30, 5, 1), (30, 1, 5)))
    for n in (2, 8):
        got = in_context(X[:, :n], (X[:, :n] @ w)[..., 0], q, doublings=10)
        exact = (q @ torch.linalg.pinv(X[:, :n]) @ X[:, :n] @ w)[..., 0]
        assert (got - exact).abs().median() < 1e-4
    ridge = in_context(X, (X @ w)[..., 0], q, method="ridge", alpha=0.5, doublings=8)
    exact = (q @ torch.linalg.solve(X.mT @ X + 0.5 * torch.eye(5), X.mT @ X @ w))[..., 0]
    assert torch.allclose(ridge, exact, atol=1e-4)
    y = (X @ w)[..., 0]
    sparse = in_context(X, y, q, method="lasso", alpha=0.1, doublings=8)
    theirs = [linear_model.Lasso(0.1, fit_intercept=False, tol=1e-8).fit(a, b).coef_ for a, b in zip(X, y, strict=True)]
    assert np.allclose(sparse[:, 0], np.einsum("bd,bd->b", q[:, 0], np.array(theirs)), atol=1e-3)
    with pytest.raises(ValueError, match="queries"):
        in_context(X, y, q[0])
