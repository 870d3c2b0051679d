"""Certificates against solutions of extended precision: the measured distance is below the bound, without slack."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning

from attnforge.errors import ArgumentError
from attnforge.incontext import (
    ConvergenceCertificate,
    ElasticNet,
    HuberRegressor,
    KernelRegressor,
    Lasso,
    LinearRegression,
    LogisticRegression,
    PoissonRegressor,
    Ridge,
    depth_for,
)
from attnforge.incontext.certificate import Made, audit, factors, quadratic
from attnforge.incontext.losses import POISSON, U
from attnforge.incontext.problem import Rounding, StatedProblem, enclosure
from attnforge.incontext.saved import written
from attnforge.kernel.file import parse
from attnforge.kernel.incontext.prove import prove_estimator

Long = np.longdouble
Array = np.ndarray[Any, Any]
pytestmark = pytest.mark.skipif(np.finfo(Long).eps > 1e-18, reason="needs an extended float type as reference")


def newton(w: Array, gradient: Callable[[Array], Array], hessian: Callable[[Array], Array]) -> Array:
    """A zero of the gradient in extended precision: gradients in it, Hessians in float64, until nothing moves."""
    w = w.astype(Long)
    for _ in range(60):
        step = np.linalg.lstsq(hessian(w).astype(float), gradient(w).astype(float), rcond=1e-15)[0]
        w = w - step.astype(Long)
        if np.abs(step).max() <= 1e-19 * np.abs(w).max():
            break
    assert np.abs(step).max() <= 1e-16 * max(np.abs(w).max(), 1e-3), "the reference has converged"
    return w


def data(seed: int) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    n, d = int(rng.integers(25, 70)), int(rng.integers(1, 6))
    X = rng.normal(size=(n, d)) @ (np.eye(d) + 0.4 * rng.normal(size=(d, d))) * 10.0 ** rng.uniform(-2, 2, d)
    X = X + rng.normal(size=d) * np.abs(X).max(axis=0)
    z = (X - X.mean(axis=0)) / X.std(axis=0) @ rng.normal(size=d)
    return X, z, rng.normal(size=n)


def check(model: Any, exact: Array) -> bool:
    """Distance of coef_ in the prompt's units against both bounds; whether they were certified."""
    own, certificate = np.atleast_2d(model.coef_).astype(Long), model.certificate_
    unit = 1.0 if isinstance(model, PoissonRegressor) else model.scaling_.y_scale  # there it shifts the intercept
    distance = np.sqrt((((own - exact) * (model.scaling_.x_scale / unit)) ** 2).sum(axis=1).max())
    assert certificate.measured <= certificate.posterior
    if not isinstance(model, (LogisticRegression, PoissonRegressor)):  # there the intercept is part of the distance
        assert certificate.kind != "certified" or certificate.measured <= distance
    off = np.abs(own - exact).astype(float).ravel()
    for far in prove_estimator(parse(written(model))) if certificate.kind == "certified" else ():
        assert (np.abs(off - far.coefficients) <= 1e-15 * np.abs(own.ravel()).astype(float)).all(), "as the kernel says"
        assert far.most <= min(certificate.bound, certificate.posterior)
    if certificate.kind == "certified":
        assert distance <= certificate.bound
        assert distance <= certificate.posterior
    else:
        assert len(certificate.reason) > 10
    return bool(certificate.kind == "certified")


def fitted(model: Any, X: Array, y: Array) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(X, y)


def options(seed: int) -> dict[str, Any]:
    """Runs that are cut short, runs in float32, and runs to the end."""
    return ({}, {"max_iter": 5 + seed}, {"dtype": "float32", "tol": 1e-6})[seed % 3]


@pytest.mark.parametrize("seed", range(12))
def test_least_squares_and_ridge(seed: int) -> None:
    X, z, noise = data(seed)
    y = 3 * z + noise + 5
    for alpha, intercept in ((0.0, True), (0.7, True), (1e-3, False)):
        Xc, yc = X.astype(Long), y.astype(Long)
        if intercept:
            Xc, yc = Xc - Xc.mean(axis=0), yc - yc.mean()
        size = np.sqrt((Xc**2).sum(axis=0))
        A = Xc / size
        hessian = A.T @ A + alpha * np.diag(1 / size**2)
        exact = newton(np.zeros(X.shape[1]), lambda v: hessian @ v - A.T @ yc, lambda v: hessian) / size  # noqa: B023
        model = Ridge(alpha, fit_intercept=intercept, **options(seed)) if alpha else LinearRegression(**options(seed))
        assert check(fitted(model, X, y), exact)


@pytest.mark.parametrize("seed", range(12))
def test_sparse_models(seed: int) -> None:
    X, z, noise = data(seed)
    X = np.concatenate([X, np.random.default_rng(seed).normal(size=(len(X), 3))], axis=1)
    y = 3 * z + noise + 5
    Xc, yc = X.astype(Long) - X.astype(Long).mean(axis=0), y.astype(Long) - y.astype(Long).mean()
    n, certified = len(X), 0
    for model, ratio in ((Lasso(0.2, **options(seed)), 1.0), (ElasticNet(0.2, **options(seed)), 0.5)):
        w = fitted(type(model)(0.2), X, y).coef_
        live, l1, l2 = w != 0, 0.2 * ratio, 0.2 * (1 - ratio)
        size = np.sqrt((Xc[:, live] ** 2).mean(axis=0))
        A = Xc[:, live] / size
        hessian, right = A.T @ A / n + l2 * np.diag(1 / size**2), A.T @ yc / n - l1 * np.sign(w[live]) / size
        exact = np.zeros(X.shape[1], dtype=Long)
        exact[live] = newton(np.zeros(live.sum()), lambda v: hessian @ v - right, lambda v: hessian) / size  # noqa: B023
        slope = np.abs(Xc.T @ (Xc @ exact - yc) / n + l2 * exact)
        assert (slope[~live] <= l1).all() and (np.sign(exact[live]) == np.sign(w[live])).all(), (
            "the reference is optimal"
        )
        certified += check(fitted(model, X, y), exact)
    assert certified >= (2 if options(seed) == {} else 0)


@pytest.mark.parametrize("seed", range(12))
def test_logistic_and_poisson(seed: int) -> None:
    X, z, noise = data(seed)
    A = np.concatenate([X.astype(Long), np.ones((len(X), 1), dtype=Long)], axis=1)
    size = np.sqrt((A**2).mean(axis=0))
    A, d, n = A / size, X.shape[1], len(X)
    for C in (1.0, 0.05):
        y = (z + noise > 0).astype(int)
        ridge = np.append(1 / (C * n) / size[:d] ** 2, 0)

        def gradient(v: Array) -> Array:
            return (1 / (1 + np.exp(-(A @ v))) - y) @ A / n + ridge * v  # noqa: B023

        def hessian(v: Array) -> Array:
            p = 1 / (1 + np.exp(-(A @ v)))
            return (A * (p * (1 - p))[:, None]).T @ A / n + np.diag(ridge)  # noqa: B023

        model = fitted(LogisticRegression(C, **options(seed)), X, y)
        begin = np.append(model.coef_[0] * size[:d], model.intercept_[0])
        assert check(model, newton(begin, gradient, hessian)[:d] / size[:d]) or options(seed) != {}
    counts = np.random.default_rng(seed).poisson(np.exp(0.5 * z + 1)).astype(float)
    ridge = np.append(0.3 / size[:d] ** 2, 0)
    model = fitted(PoissonRegressor(alpha=0.3, **options(seed)), X, counts)
    begin = np.append(model.coef_ * size[:d], model.intercept_)
    exact = newton(
        begin,
        lambda v: (np.exp(A @ v) - counts) @ A / n + ridge * v,
        lambda v: (A * np.exp(A @ v)[:, None]).T @ A / n + np.diag(ridge),
    )
    assert check(model, exact[:d] / size[:d]) or options(seed) != {}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("labels", [(73_000.0, 146_000.0), (2.0, 5.0), (2.0, 1e7), (1e-5, 3e-5)])
def test_poisson_without_intercept_keeps_its_offset(dtype: str, labels: tuple[float, float]) -> None:
    """Rows of ones: the optimum is the logarithm of the labels' mean."""
    y = np.array(labels)
    model = fitted(PoissonRegressor(alpha=0.0, fit_intercept=False, dtype=dtype), np.ones((2, 1)), y)
    exact = np.log(y.astype(Long).mean()).reshape(1, 1)
    certified = check(model, exact)
    assert certified or not 3 < labels[1] < 1e6
    if certified:
        assert abs(model.coef_[0] - float(exact[0, 0])) < (1e-3 if dtype == "float32" else 1e-8)


def test_coordinates_that_are_not_fitted_are_audited() -> None:
    """A run whose offset drifts, as rounding or anything else may let it, is not certified for where it ends."""
    x, y, w = np.ones((2, 2)), np.array([[0.5], [1.0]]), float(np.log(0.75)) + 1.0
    for drift in (0.0, 1e-9, 1e-3, 0.5):
        problem = StatedProblem(POISSON, x, y, np.full(2, 0.5), np.zeros(2), np.array([[w, -1.0]]),
                          Rounding(8 * U, np.zeros(2)), fixed=(1,))  # fmt: skip
        # optimal at every step, for the offset that it has
        path = np.array([[[w - drift * t / 9, -1.0 + drift * t / 9]] for t in range(10)])
        found = audit(problem, path, Made("nesterov", 0.1, 1.0, "float64", "poisson"))
        distance = float(np.hypot(drift, drift))
        assert found.posterior >= distance and (found.kind == "calibrated" or found.bound >= distance)
        assert found.aside >= drift and (drift == 0 or found.step_error >= 0.1 * drift)
        assert drift > 1e-3 or (found.kind == "certified" and found.posterior <= 3 * distance + 1e-13)


@pytest.mark.parametrize("seed", [1, 2, 3, 5, 6])
def test_curvatures_beyond_float64_are_no_certificate(seed: int) -> None:
    rng = np.random.default_rng(seed)
    X, y = rng.normal(size=(7, 4)) * 10.0 ** rng.uniform(-6, 6, 4), rng.poisson(3, size=7) * 10.0 ** rng.uniform(-6, 6)
    for dtype in ("float32", "float64"):
        model = fitted(PoissonRegressor(alpha=0.0, fit_intercept=False, max_iter=300, dtype=dtype), X, y)
        certificate = model.certificate_
        assert certificate.kind == "calibrated" and len(certificate.reason) > 10
        assert certificate.bound >= 0 and certificate.measured <= certificate.posterior, "no NaN is stated"
    assert enclosure(np.array([[np.inf, 0.0], [0.0, np.nan]])) == (-np.inf, np.inf)
    assert enclosure(np.eye(2), np.inf) == (-np.inf, np.inf)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("alpha", [1e-12, 1e-6, 1e-2])
def test_columns_that_hardly_vary_are_data(alpha: float, dtype: str) -> None:
    """Variation of a few units in the last place of a large column, which a weak penalty lets the weights use."""
    k, y = np.array([0.0, 1.0, 3.0, 2.0, 0.0, 1.0]), np.array([1.0, 2.0, 7.0, 3.0, 2.0, 0.0])
    X = (2.0**40 + k * 2.0**-12)[:, None]
    A = np.stack([(k - k.mean()) * 2.0**-12, np.ones(6)], axis=1).astype(Long)
    size = np.array([np.sqrt((A[:, 0] ** 2).mean() + alpha), 1.0])
    A, ridge = A / size, np.array([alpha / size[0] ** 2, 0.0])
    exact = newton(
        np.array([0.0, np.log(y.mean())]),
        lambda v: (np.exp(A @ v) - y) @ A / 6 + ridge * v,
        lambda v: (A * np.exp(A @ v)[:, None]).T @ A / 6 + np.diag(ridge),
    )
    assert check(fitted(PoissonRegressor(alpha=alpha, dtype=dtype), X, y), exact[:1] / size[:1])
    labels = (y > 2).astype(int)

    def mean(v: Array) -> Array:
        return np.asarray(1 / (1 + np.exp(-(A @ v))))

    exact = newton(
        np.zeros(2),
        lambda v: (mean(v) - labels) @ A / 6 + ridge * v,
        lambda v: (A * (mean(v) * (1 - mean(v)))[:, None]).T @ A / 6 + np.diag(ridge),
    )
    logistic = fitted(LogisticRegression(1 / (6 * alpha), dtype=dtype), X, labels)
    assert check(logistic, exact[:1] / size[:1]) or alpha < 1e-9


@pytest.mark.parametrize("seed", range(6))
def test_softmax(seed: int) -> None:
    X, z, noise = data(seed)
    y, K, n, d = np.digitize(z + noise, [-0.7, 0.7]), 3, len(X), X.shape[1]
    A = np.concatenate([X.astype(Long) - X.astype(Long).mean(axis=0), np.ones((n, 1), dtype=Long)], axis=1)
    size = np.sqrt((A**2).mean(axis=0))
    A, ridge = A / size, np.append(1 / n / size[:d] ** 2, 0)

    def probabilities(v: Array) -> Array:
        e = np.exp(A @ v.reshape(K, d + 1).T)
        return e / e.sum(axis=1, keepdims=True)

    def gradient(v: Array) -> Array:
        g = (probabilities(v) - np.eye(K)[y]).T @ A / n + ridge * v.reshape(K, d + 1)
        return (g - g.mean(axis=0)).ravel()

    def hessian(v: Array) -> Array:
        p = probabilities(v)
        rows = [[(A * (p[:, a] * ((a == b) - p[:, b]))[:, None]).T @ A / n for b in range(K)] for a in range(K)]
        shared = np.kron(np.full((K, K), 1 / K), np.eye(d + 1))  # no loss sees this direction; it is 0 by symmetry
        return np.block(rows) + np.diag(np.tile(ridge, K)) + shared

    model = fitted(LogisticRegression(**options(seed)), X, y)
    offset = model.intercept_[:, None] + model.coef_ @ X.mean(axis=0)[:, None]
    begin = np.concatenate([model.coef_ * size[:d], offset], axis=1)
    begin = (begin - begin.mean(axis=0)).ravel()
    exact = newton(begin, gradient, hessian).reshape(K, d + 1)[:, :d] / size[:d]
    own = model.coef_.astype(Long)
    distance = np.sqrt((((own - exact) * model.scaling_.x_scale) ** 2).sum())
    assert model.certificate_.kind == "certified" or options(seed) != {}
    if model.certificate_.kind == "certified":
        assert distance <= model.certificate_.bound and distance <= model.certificate_.posterior


@pytest.mark.parametrize("seed", range(9))
def test_huber_with_its_scale(seed: int) -> None:
    X, z, noise = data(seed)
    y = 3 * z + noise + 8 * (np.arange(len(X)) % 11 == 0)
    A = np.concatenate([X.astype(Long), np.ones((len(X), 1), dtype=Long)], axis=1)
    size = np.sqrt((A**2).mean(axis=0))
    A, d, n, eps = A / size, X.shape[1], len(X), Long(1.35)
    ridge = np.append(Long(1e-4) / size[:d] ** 2, 0)

    def gradient(v: Array) -> Array:
        u = np.clip((A @ v[:-1] - y) / v[-1], -eps, eps)
        return np.append(2 * u @ A + 2 * ridge * v[:-1], n - (u * u).sum())

    def hessian(v: Array) -> Array:
        u = (A @ v[:-1] - y) / v[-1]
        rows = np.concatenate([A, -u[:, None]], axis=1) * (np.abs(u) < eps)[:, None]
        return 2 * rows.T @ rows / v[-1] + np.diag(np.append(2 * ridge, 0))

    model = fitted(HuberRegressor(**options(seed)), X, y)
    best = fitted(HuberRegressor(), X, y)
    begin = np.append(best.coef_ * size[:d], [best.intercept_, best.scale_])
    exact = newton(begin, gradient, hessian)
    assert check(model, exact[:d] / size[:d]) or options(seed) != {}
    assert abs(best.scale_ / exact[-1] - 1) < 1e-9
    assert np.linalg.norm((best.coef_ - exact[:d] / size[:d]).astype(float)) < 1e-9 * np.linalg.norm(best.coef_)


@pytest.mark.parametrize("seed", range(6))
def test_kernels(seed: int) -> None:
    X, z, noise = data(seed)
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    y = np.stack([np.sin(z) + noise, z], axis=1)
    model = fitted(KernelRegressor(gamma=0.3, alpha=0.2, **options(seed)), X, y)
    wide = X.astype(Long)
    kernel = np.exp(-Long(0.3) * ((wide[:, None] - wide) ** 2).sum(-1))
    matrix = kernel + Long(0.2) * np.eye(len(X))
    certificate = model.certificate_
    for k in range(2):
        exact = newton(np.zeros(len(X)), lambda v: matrix @ v - y[:, k], lambda v: matrix)  # noqa: B023
        distance = np.linalg.norm((model.dual_coef_[:, k] - exact).astype(float)) / model.scaling_.y_scale
        assert certificate.kind == "certified" and distance <= certificate.bound and distance <= certificate.posterior
    assert certificate.measured <= certificate.posterior
    dtype = options(seed).get("dtype", "float64")
    mean = KernelRegressor(method="mean", gamma=0.3, dtype=dtype).fit(X, y)
    exact = kernel @ y.astype(Long) / kernel.sum(axis=1, keepdims=True)
    assert np.abs(mean.predict(X) - exact).max() / mean.scaling_.y_scale <= mean.certificate_.bound
    assert mean.certificate_.start == 0 and mean.certificate_.kind == "analysed"


def test_what_the_distance_is_at_least() -> None:
    """Rounding of gradients is no distance: far from zero the prompt's numbers hide where the optimum is."""
    x = 1e6 + np.array([[0.1], [-0.7], [1.3], [0.2]])
    y = np.array([1.0, 2.0, 4.0, 3.0])
    for model, alpha in ((LinearRegression(), 0.0), (Ridge(1e-3), 1e-3), (Lasso(1e-3), 0.0)):
        fitted(model, x, y)
        wide, right = x[:, 0].astype(Long) - x[:, 0].astype(Long).mean(), y.astype(Long) - y.astype(Long).mean()
        less = 4e-3 * np.sign(wide @ right) if isinstance(model, Lasso) else Long(0)
        exact = (wide @ right - Long(less)) / (wide @ wide + Long(alpha))
        distance = abs(Long(model.coef_[0]) - exact) * model.scaling_.x_scale[0] / model.scaling_.y_scale
        certificate = model.certificate_
        assert certificate.kind == "certified" and certificate.measured <= distance <= certificate.posterior
    nothing = fitted(Lasso(1e6), x, y).certificate_
    assert nothing.kind == "certified" and nothing.bound == 0 == nothing.start == nothing.steps


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("gamma", [0.5, 10.0, 1e3, 5e3, 1e8])
def test_masks_of_kernel_means_follow_from_the_reach(gamma: float, dtype: str) -> None:
    """Queries far from all data, alone and among others, near and far: no query is ever seen as a key."""
    X, y = np.array([[-1.0], [1.0]]), np.array([3.0, 5.0])
    new = np.array([0.1, 0.05, -0.05, 1.0, -1.0, 20.0, -20.0, 300.0])
    model = KernelRegressor(method="mean", gamma=gamma, dtype=dtype).fit(X, y)
    apart = -Long(gamma) * ((new.astype(Long)[:, None] - X[:, 0]) ** 2)
    kernel = np.exp(apart - apart.max(axis=1, keepdims=True))
    exact = kernel @ y.astype(Long) / kernel.sum(axis=1)
    bound = model.certificate_.bound * model.scaling_.y_scale
    assert model.certificate_.kind == "analysed" and bound <= 2.001 and "queries within" in str(model.certificate_)
    for asked in (np.arange(len(new)), *np.arange(len(new))[:, None]):
        assert np.abs(model.predict(new[asked, None]) - exact[asked]).max() <= bound


def test_kernels_whose_logits_do_not_fit_are_refused() -> None:
    X, y = np.array([[-1.0], [1.0]]), np.array([3.0, 5.0])
    for method, gamma in (("mean", 1e38), ("ridge", 1e38), ("mean", 1e308)):
        with pytest.raises(ArgumentError, match="smaller gamma"):
            KernelRegressor(method=method, gamma=gamma, dtype="float32").fit(X, y)
    with pytest.raises(ArgumentError, match="nearer"):
        KernelRegressor(method="mean", gamma=1e3, dtype="float32").fit(X, y).predict([[1e18]])


def test_data_whose_squares_leave_float64_are_refused() -> None:
    X, y = np.arange(4.0)[:, None], np.array([1.0, 2.0, 3.0, 9.0])
    for model in (LinearRegression(), Ridge(), Lasso(), HuberRegressor(), PoissonRegressor(), KernelRegressor()):
        for rows, labels in ((1e200 * X, y), (1e-200 * X, y), (X, 1e160 * y), (X, 1e-200 * y)):
            with pytest.raises(ArgumentError, match="scale the data"):
                model.fit(rows, labels)
        assert fitted(model, 0 * X, y).certificate_.bound >= 0, "zeros are data"


def test_calibrated_certificates_say_why() -> None:
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(10, 20)), rng.normal(size=10)
    assert "determine" in LinearRegression().fit(X, y).certificate_.reason
    with pytest.warns(ConvergenceWarning):
        separable = LogisticRegression(C=np.inf, max_iter=50).fit(X[:, :1], X[:, 0] > 0)
    assert separable.certificate_.kind == "calibrated" and separable.certificate_.reason in str(separable.certificate_)
    certificate = Ridge().fit(X, y).certificate_
    assert "certified" in str(certificate) and "rho^T" in str(certificate) and "residual" in str(certificate)
    with pytest.raises(ArgumentError, match="reason"):
        ConvergenceCertificate("calibrated", 0.5, 1, 1.0, 0.0, 1.0, 2.0, 0.0, 0.0, 0.0, (1.0, 1.0), "float64", "linear")


def test_a_spoiled_run_is_seen_by_the_audit() -> None:
    curvature, alpha, beta = np.array([0.5, 1.0]), 1.3, 0.05
    path = [np.ones((1, 2))]
    for t in range(30):
        before = path[-2] if t else path[-1]
        path.append((1 + beta) * path[-1] - beta * before - alpha * curvature * path[-1])
    exact = np.array(path)
    for where, size in ((10, 0.0), (10, 1e-3), (29, 1e-5)):
        spoiled = exact.copy()
        spoiled[where + 1 :] += size
        made = Made("heavy ball", beta, alpha, "float64", "linear")
        found = quadratic(spoiled, curvature * spoiled, np.zeros((1, 2)), (0.5, 1.0), made)
        assert found.kind == "certified" and np.linalg.norm(spoiled[-1]) <= found.bound
        assert found.step_error >= 0.9 * size
    slow = quadratic(exact, curvature * exact, np.zeros((1, 2)), (1e-6, 1.0), made)
    assert slow.kind == "calibrated" and "condition" in slow.reason


@pytest.mark.parametrize("kind", ["plain", "heavy ball", "nesterov"])
def test_depth_for_is_the_inverse(kind: str) -> None:
    for rho in (0.3, 0.9, 0.99):
        T = depth_for(1e-8, rho, kind)
        assert factors(kind, rho, T)[0] * rho**T <= 1e-8
        assert factors(kind, rho, T - 1)[0] * rho ** (T - 1) > 1e-8
