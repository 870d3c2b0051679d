"""The other estimators against scikit-learn, and the conventions of all of them."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pytest
from sklearn import linear_model
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_iris
from sklearn.exceptions import ConvergenceWarning
from sklearn.kernel_ridge import KernelRidge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from attnforge.errors import ArgumentError
from attnforge.incontext import (
    ElasticNet,
    HuberRegressor,
    KernelRegressor,
    Lasso,
    LinearRegression,
    LogisticRegression,
    PoissonRegressor,
    Ridge,
)

# The slow ones are checked at a coarser tolerance, which changes nothing about conventions.
ESTIMATORS = (
    LinearRegression(),
    Ridge(),
    Lasso(),
    ElasticNet(),
    LogisticRegression(tol=1e-6),
    PoissonRegressor(),
    HuberRegressor(tol=1e-4),
    KernelRegressor(tol=1e-5),
    KernelRegressor(method="mean"),
)


@pytest.fixture(scope="module")
def data() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 20))
    return X, X @ (rng.normal(size=20) * (rng.random(20) < 0.4)) + 0.5 * rng.normal(size=200)


def relative(a: Any, b: Any) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: f"{type(e).__name__}-{getattr(e, 'method', '')}")
def test_scikit_learn_accepts_it(estimator: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(estimator, on_skip=None, on_fail=None)
    assert [r["check_name"] for r in results if r["status"] == "failed"] == []
    assert sum(r["status"] == "passed" for r in results) > 30


def test_logistic(data: tuple[Any, Any]) -> None:
    X, y = data
    labels = np.where(y > 0, "yes", "no")
    theirs = linear_model.LogisticRegression(solver="newton-cholesky", tol=1e-14, max_iter=500).fit(X, labels)
    ours = LogisticRegression().fit(X, labels)
    assert relative(ours.coef_, theirs.coef_) < 1e-9
    assert np.abs(ours.predict_proba(X) - theirs.predict_proba(X)).max() < 1e-10
    assert (ours.predict(X) == theirs.predict(X)).all()
    X, y = load_iris(return_X_y=True)
    theirs = linear_model.LogisticRegression(solver="newton-cholesky", tol=1e-14, max_iter=500).fit(X, y)
    ours = LogisticRegression(class_weight="balanced").fit(X, y)
    assert relative(ours.coef_, theirs.coef_) < 1e-9
    assert ours.trajectory_.shape[1:] == (3, 4)


def test_breast_cancer_scores() -> None:
    X, y = load_breast_cancer(return_X_y=True)
    scaled = StandardScaler().fit_transform(X)
    theirs = linear_model.LogisticRegression(tol=1e-10, max_iter=10_000).fit(scaled, y)
    assert round(LogisticRegression(tol=1e-8).fit(scaled, y).score(scaled, y), 4) == round(theirs.score(scaled, y), 4)


def test_separable_and_single_classes() -> None:
    X, y = np.array([[-2.0], [-1.0], [1.0], [2.0]]), np.array([0, 0, 1, 1])
    with pytest.warns(ConvergenceWarning, match="separable"):
        model = LogisticRegression(C=np.inf, max_iter=200).fit(X, y)
    assert np.isfinite(model.coef_).all() and model.score(X, y) == 1
    with pytest.raises(ValueError, match="at least 2 classes"):
        LogisticRegression().fit(X, np.zeros(4))


@pytest.mark.parametrize("name", ["Lasso", "ElasticNet"])
def test_sparse_models(data: tuple[Any, Any], name: str) -> None:
    X, y = data
    ours = {"Lasso": Lasso, "ElasticNet": ElasticNet}[name](alpha=0.1).fit(X, y)
    theirs = getattr(linear_model, name)(alpha=0.1, tol=1e-13, max_iter=100_000).fit(X, y)
    assert relative(ours.coef_, theirs.coef_) < 1e-9
    assert ((ours.coef_ == 0) == (theirs.coef_ == 0)).all(), "zeros are exact"


def test_poisson(data: tuple[Any, Any]) -> None:
    X, y = data
    counts = np.random.default_rng(1).poisson(np.exp(0.2 * y + 1)).astype(float)
    for intercept in (True, False):
        options: dict[str, Any] = dict(alpha=0.1, fit_intercept=intercept)
        theirs = linear_model.PoissonRegressor(solver="newton-cholesky", tol=1e-12, **options).fit(X, counts)
        ours = PoissonRegressor(**options).fit(X, counts)
        assert relative(ours.coef_, theirs.coef_) < 1e-8
        assert relative(ours.predict(X), theirs.predict(X)) < 1e-8
        assert abs(ours.score(X, counts) - theirs.score(X, counts)) < 1e-8
    with pytest.raises(ValueError, match="out of the valid range"):
        PoissonRegressor().fit(X, -counts)


def huber_objective(model: Any, X: Any, y: Any) -> float:
    r = np.abs(y - X @ model.coef_ - model.intercept_) / model.scale_
    loss = np.where(r < 1.35, r * r, 2 * 1.35 * r - 1.35**2)
    return float(model.scale_ * (len(y) + loss.sum()) + 1e-4 * model.coef_ @ model.coef_)


def test_huber_finds_the_scale_and_a_lower_objective(data: tuple[Any, Any]) -> None:
    X, y = data
    y = y + 10 * (np.arange(len(y)) % 17 == 0)
    ours = HuberRegressor().fit(X, y)
    theirs = linear_model.HuberRegressor(tol=1e-10, max_iter=10_000).fit(X, y)
    assert abs(ours.scale_ / theirs.scale_ - 1) < 1e-4
    assert (ours.outliers_ == theirs.outliers_).all()
    assert huber_objective(ours, X, y) <= huber_objective(theirs, X, y) * (1 + 1e-12)
    clipped = np.minimum(np.abs(y - X @ ours.coef_ - ours.intercept_), 1.35 * ours.scale_)
    assert abs((clipped**2).mean() / ours.scale_**2 - 1) < 1e-8, "the scale is stationary"


def test_kernels() -> None:
    rng = np.random.default_rng(0)
    X, new = rng.normal(size=(60, 3)), np.concatenate([rng.normal(size=(9, 3)), [[9.0, 9, 9], [1e6, 0, 0]]])
    y = np.sin(X[:, 0]) + X[:, 1] ** 2
    ours = KernelRegressor(alpha=0.1, gamma=0.5).fit(X, y)
    theirs = KernelRidge(alpha=0.1, gamma=0.5, kernel="rbf").fit(X, y)
    assert np.abs(ours.predict(new) - theirs.predict(new)).max() < 1e-9
    kernel = np.exp(-0.5 * ((new[:9, None] - X) ** 2).sum(-1))
    mean = KernelRegressor(method="mean", gamma=0.5).fit(X, y)
    assert np.allclose(mean.predict(new[:9]), kernel @ y / kernel.sum(1), rtol=1e-11)
    with pytest.raises(ArgumentError, match="method"):
        KernelRegressor(method="median").fit(X, y)


def test_conventions(data: tuple[Any, Any]) -> None:
    X, y = data
    pipe = make_pipeline(StandardScaler(), Ridge())
    search = GridSearchCV(pipe, {"ridge__alpha": [0.1, 10.0]}, cv=2).fit(X, y)
    assert search.best_params_["ridge__alpha"] == 0.1
    fitted = Ridge(2.0).fit(X, y)
    again = pickle.loads(pickle.dumps(fitted))
    assert np.array_equal(again.predict(X), fitted.predict(X))
    assert clone(fitted).get_params()["alpha"] == 2.0 and not hasattr(clone(fitted), "coef_")
    assert "early stopping" in repr(fitted.scaling_)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: f"{type(e).__name__}-{getattr(e, 'method', '')}")
def test_pictures(data: tuple[Any, Any], estimator: Any) -> None:
    """Attention, error against depth with its bound, and the path of w where there are two columns."""
    pytest.importorskip("matplotlib")
    X, y = data
    if isinstance(estimator, (LogisticRegression, PoissonRegressor)):
        y = (y > 0).astype(float)
    model = clone(estimator)
    if "alpha" in model.get_params():
        model.set_params(alpha=0.1)
    figure = model.fit(X[:, :2], y).plot()
    kernel = isinstance(estimator, KernelRegressor)
    assert len(figure.axes) == (3 if kernel else 4), "panels and one colour bar"
    picture = figure.axes[0].images[0].get_array()
    assert picture.shape[0] == 64 and np.isfinite(picture).all() and picture.std() > 0
    if getattr(estimator, "method", "") != "mean":
        distance, bound = (line.get_ydata() for line in figure.axes[1].lines[:2])
        assert bound[-1] < bound.max() and distance[-1] < 1e-3 * distance[0]
    if not kernel:
        assert len(figure.axes[2].lines[0].get_xdata()) > 3 and len(figure.axes[2].collections) >= 1
