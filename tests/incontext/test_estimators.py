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


def test_objectives_equal_scikit_learns(data: tuple[Any, Any]) -> None:
    """The same objective value, to 1e-10 relatively, at tight tolerances."""
    X, y = data
    counts, spoiled = (
        np.random.default_rng(0).poisson(np.exp(0.2 * y)).astype(float),
        y + 10 * (np.arange(200) % 17 == 0),
    )

    def net(model: Any, l1: float, l2: float) -> float:
        r, w = y - X @ model.coef_ - model.intercept_, model.coef_
        return float(r @ r / 400 + l1 * np.abs(w).sum() + 0.5 * l2 * w @ w)

    def poisson(model: Any) -> float:
        z = X @ model.coef_ + model.intercept_
        return float((np.exp(z) - counts * z).mean() + 0.05 * model.coef_ @ model.coef_)

    tight = {"tol": 1e-14, "max_iter": 100_000}
    pairs = [
        (net(Lasso(0.1).fit(X, y), 0.1, 0), net(linear_model.Lasso(0.1, **tight).fit(X, y), 0.1, 0)),
        (net(ElasticNet(0.1).fit(X, y), 0.05, 0.05), net(linear_model.ElasticNet(0.1, **tight).fit(X, y), 0.05, 0.05)),
        (
            poisson(PoissonRegressor(alpha=0.1).fit(X, counts)),
            poisson(linear_model.PoissonRegressor(alpha=0.1, solver="newton-cholesky", **tight).fit(X, counts)),
        ),
        (
            huber_objective(HuberRegressor().fit(X, spoiled), X, spoiled),
            huber_objective(tightest(X, spoiled), X, spoiled),
        ),
    ]
    for ours, theirs in pairs:
        assert abs(ours / theirs - 1) < 1e-10


def tightest(X: Any, y: Any) -> Any:
    """scikit-learn stops on L-BFGS's own test of the objective, whatever tol says: start it again where it ended."""
    model = linear_model.HuberRegressor(warm_start=True, tol=1e-12, max_iter=10_000).fit(X, y)
    for _ in range(50):
        before = model.coef_.copy()
        try:
            model.fit(X, y)
        except ValueError:  # its line search finds nothing lower in float64
            break
        if np.array_equal(before, model.coef_):
            break
    return model


def test_huber_agrees_with_scikit_learn_as_far_as_that_goes(data: tuple[Any, Any]) -> None:
    X, y = data
    y = y + 10 * (np.arange(len(y)) % 17 == 0)
    ours, theirs = HuberRegressor().fit(X, y), tightest(X, y)
    assert relative(ours.coef_, theirs.coef_) < 1e-6
    assert abs(ours.scale_ / theirs.scale_ - 1) < 1e-6


def test_sparse_models_with_several_targets(data: tuple[Any, Any]) -> None:
    """As scikit-learn: every target is a problem of its own, coef_ (targets, columns), intercept_ (targets,)."""
    X, y = data
    Y = np.stack([y, -2 * y + X[:, 0], X[:, 1] ** 2], axis=1)
    for ours, theirs in ((Lasso(0.1), linear_model.Lasso), (ElasticNet(0.1), linear_model.ElasticNet)):
        exact = theirs(0.1, tol=1e-13, max_iter=100_000).fit(X, Y)
        ours.fit(X, Y)
        assert ours.coef_.shape == exact.coef_.shape == (3, 20) and ours.intercept_.shape == exact.intercept_.shape
        assert relative(ours.coef_, exact.coef_) < 1e-9 and np.allclose(ours.intercept_, exact.intercept_, atol=1e-9)
        assert np.allclose(ours.predict(X), exact.predict(X), atol=1e-8)
        assert ((ours.coef_ == 0) == (exact.coef_ == 0)).all()


@pytest.mark.parametrize("name", ["Ridge", "Logistic", "Lasso", "ElasticNet", "Poisson", "Huber", "Kernel"])
def test_float32_networks(data: tuple[Any, Any], name: str) -> None:
    X, y = data
    if name in ("Logistic", "Poisson"):
        y = (y > 0).astype(float)
    alpha = {} if name in ("Logistic", "Huber") else {"alpha": 0.1}
    kind = {type(e).__name__.removesuffix("Regression").removesuffix("Regressor"): type(e) for e in ESTIMATORS}[name]
    single, double = (kind(dtype=d, tol=t, **alpha).fit(X, y) for d, t in (("float32", 1e-6), ("float64", 1e-11)))
    if name == "Kernel":
        assert 0 < relative(single.dual_coef_, double.dual_coef_) < 1e-4
        assert relative(single.predict(X), double.predict(X)) < 1e-4
    else:
        assert 0 < relative(single.coef_, double.coef_) < 1e-4
    assert single.network_.dtype != double.network_.dtype


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
