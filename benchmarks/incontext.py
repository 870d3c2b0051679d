"""In-context estimators next to scikit-learn's, in one run: accuracy, time, data sets, and the batch of prompts.

python benchmarks/incontext.py             prints the tables and writes benchmarks/results/incontext.json
python benchmarks/incontext.py --quick     fewer prompt lengths
python benchmarks/incontext.py --parts estimators depths      these again, the others as they are in the record
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn import linear_model as sk
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.kernel_ridge import KernelRidge
from sklearn.preprocessing import StandardScaler

from attnforge import incontext as af
from attnforge.incontext.saved import written
from attnforge.kernel.file import parse
from attnforge.kernel.incontext.prove import prove_estimator

RESULTS = Path(__file__).resolve().parent / "results"
TURNS = 3  # of which the best is taken
PARTS = ("estimators", "depths", "prompts")
Row = dict[str, Any]


def conditioned(condition: float, n: int = 200, d: int = 20) -> tuple[Any, Any]:
    """Data whose Gram matrix has the condition number condition^2, with noise."""
    rng = np.random.default_rng(0)
    U, V = np.linalg.qr(rng.normal(size=(n, d)))[0], np.linalg.qr(rng.normal(size=(d, d)))[0]
    X = U * np.geomspace(1, 1 / condition, d) @ V.T * math.sqrt(n)
    return X, X @ rng.normal(size=d) + 0.1 * rng.normal(size=n)


def timed(*fits: Callable[[], Any]) -> list[tuple[Any, float]]:
    """What each fit gives and the seconds of a processor that it takes: in turns, the best of a few."""
    best: list[tuple[Any, float]] = [(None, math.inf)] * len(fits)
    for _ in range(TURNS):
        for i, fit in enumerate(fits):
            begin = time.process_time()
            model = fit()
            best[i] = model, min(best[i][1], time.process_time() - begin)
    return best


def proved(model: Any) -> float:
    """How far the weights are from the optimum, in the prompt's units, as the kernel proves it."""
    return max(each.most for each in prove_estimator(parse(written(model))))


def compare(name: str, ours: Any, theirs: Any, X: Any, y: Any, objective: Any = None) -> Row:
    """One estimator against scikit-learn's on the same data."""
    (a, own), (b, other) = timed(lambda: ours.fit(X, y), lambda: theirs.fit(X, y))
    error = float(np.linalg.norm(a.coef_ - b.coef_) / np.linalg.norm(b.coef_))
    row: Row = {
        "task": name, "relative coefficient error": error, "steps": a.n_iter_, "seconds": own,
        "times scikit-learn": own / other, "score": a.score(X, y), "scikit-learn's score": b.score(X, y),
        "kind": a.certificate_.kind, "bound": a.certificate_.bound, "posterior": a.certificate_.posterior,
        "proved by the kernel": proved(a),
    }  # fmt: skip
    if objective is not None:
        row["objective over scikit-learn's, minus 1"] = objective(a) / objective(b) - 1
    return row


def huber_objective(model: Any, X: Any, y: Any) -> float:
    r = np.abs(y - X @ model.coef_ - model.intercept_) / model.scale_
    loss = np.where(r < 1.35, r * r, 2 * 1.35 * r - 1.35**2)
    return float(model.scale_ * (len(y) + loss.sum()) + 1e-4 * model.coef_ @ model.coef_)


def net_objective(model: Any, X: Any, y: Any, l1: float, l2: float) -> float:
    r, w = y - X @ model.coef_ - model.intercept_, model.coef_
    return float(r @ r / (2 * len(y)) + l1 * np.abs(w).sum() + 0.5 * l2 * w @ w)


def poisson_objective(model: Any, X: Any, y: Any, alpha: float) -> float:
    z = X @ model.coef_ + model.intercept_
    return float((np.exp(z) - y * z).mean() + 0.5 * alpha * model.coef_ @ model.coef_)


def tightest(X: Any, y: Any) -> sk.HuberRegressor:
    """scikit-learn's HuberRegressor as far as it goes: `tol` does not reach L-BFGS's own test of the objective, which
    stops it early, but warm starts go on until the line search fails or nothing moves."""
    model = sk.HuberRegressor(warm_start=True, tol=1e-12, max_iter=10**4)
    model.fit(X, y)
    for _ in range(50):
        before = model.coef_.copy()
        try:
            model.fit(X, y)
        except ValueError:  # L-BFGS gives up: no further decrease in float64
            break
        if np.array_equal(before, model.coef_):
            break
    return model


def huber_optimum(X: Any, y: Any, begin: Any) -> Any:
    """The same objective's optimum by Newton's method, gradients in extended precision: (coef, intercept, scale)."""
    A, long = np.concatenate([X, np.ones((len(X), 1))], axis=1).astype(np.longdouble), np.longdouble
    eps, ridge, v = long(1.35), np.append(np.full(X.shape[1], long(1e-4)), 0), begin.astype(long)
    for _ in range(50):
        u = (A @ v[:-1] - y) / v[-1]
        inside, clipped = np.abs(u) < eps, np.clip(u, -eps, eps)
        g = np.append(2 * clipped @ A + 2 * ridge * v[:-1], len(y) - (clipped * clipped).sum())
        rows = np.concatenate([A, -u[:, None]], axis=1)[inside]
        H = 2 * rows.T @ rows / v[-1] + np.diag(np.append(2 * ridge, 0))
        step = np.linalg.solve(H.astype(float), g.astype(float))
        v = v - step
        if np.abs(step).max() < 1e-18:
            break
    return v


def accuracy() -> list[Row]:
    rows = []
    for condition in (1.0, 10.0, 100.0):
        X, y = conditioned(condition)
        rows.append(compare(f"linear, cond(X) {condition:g}", af.LinearRegression(), sk.LinearRegression(), X, y))
        rows.append(compare(f"ridge 0.1, cond(X) {condition:g}", af.Ridge(0.1), sk.Ridge(0.1), X, y))
    rng = np.random.default_rng(1)
    X = rng.normal(size=(200, 20))
    w = rng.normal(size=20) * (rng.random(20) < 0.4)
    y = X @ w + 0.5 * rng.normal(size=200)
    counts = rng.poisson(np.exp(0.3 * y + 1)).astype(float)
    spoiled = y + 10 * (np.arange(200) % 17 == 0)
    exact = sk.LogisticRegression(solver="newton-cholesky", tol=1e-14, max_iter=1000)
    poisson = sk.PoissonRegressor(alpha=0.1, solver="newton-cholesky", tol=1e-14, max_iter=1000)
    net, tight = functools.partial(net_objective, X=X, y=y), {"tol": 1e-14, "max_iter": 10**5}
    rows.append(compare("logistic", af.LogisticRegression(), exact, X, (y > 0).astype(int)))
    rows.append(
        compare("lasso 0.1", af.Lasso(0.1), sk.Lasso(0.1, **tight), X, y, functools.partial(net, l1=0.1, l2=0.0))
    )
    rows.append(compare("elastic net 0.1", af.ElasticNet(0.1), sk.ElasticNet(0.1, **tight), X, y,
                        functools.partial(net, l1=0.05, l2=0.05)))  # fmt: skip
    rows.append(compare("poisson 0.1", af.PoissonRegressor(alpha=0.1), poisson, X, counts,
                        functools.partial(poisson_objective, X=X, y=counts, alpha=0.1)))  # fmt: skip
    huber = functools.partial(huber_objective, X=X, y=spoiled)
    rows.append(compare("huber, tol 1e-12", af.HuberRegressor(), sk.HuberRegressor(tol=1e-12, max_iter=10**4), X,
                        spoiled, huber))  # fmt: skip
    ours, ((best, other),) = af.HuberRegressor().fit(X, spoiled), timed(lambda: tightest(X, spoiled))
    start = np.concatenate([ours.coef_, [ours.intercept_, ours.scale_]])
    newton = huber_optimum(X, spoiled, start)
    size = float(np.linalg.norm(newton[:20].astype(float)))
    away = lambda model: float(np.linalg.norm((model.coef_ - newton[:20]).astype(float))) / size  # noqa: E731
    rows.append({
        "task": "huber, warm starts until L-BFGS fails", "seconds (scikit-learn)": other,
        "relative coefficient error": float(np.linalg.norm(ours.coef_ - best.coef_) / np.linalg.norm(best.coef_)),
        "objective over scikit-learn's, minus 1": huber(ours) / huber(best) - 1,
    })  # fmt: skip
    first = sk.HuberRegressor(tol=1e-12, max_iter=10**4).fit(X, spoiled)
    rows.append({
        "task": "huber against Newton in extended precision", "relative coefficient error": away(ours),
        "scikit-learn's, tol 1e-12": away(first), "scikit-learn's, warm starts": away(best),
        "scale, relative": float(ours.scale_ / newton[-1] - 1),
    })  # fmt: skip
    kernel = af.KernelRegressor(alpha=0.1), KernelRidge(alpha=0.1, kernel="rbf", gamma=1 / 20)
    (a, own), (b, other) = timed(lambda: kernel[0].fit(X, y), lambda: kernel[1].fit(X, y))
    dual = float(np.linalg.norm(a.dual_coef_[:, 0] - b.dual_coef_) / np.linalg.norm(b.dual_coef_))
    rows.append({
        "task": "kernel ridge 0.1", "relative coefficient error": dual, "steps": a.n_iter_, "seconds": own,
        "times scikit-learn": own / other, "score": a.score(X, y), "scikit-learn's score": b.score(X, y),
        "kind": a.certificate_.kind, "bound": a.certificate_.bound, "posterior": a.certificate_.posterior,
        "proved by the kernel": proved(a),
    })  # fmt: skip
    rows += single(X, y, counts, spoiled, exact, poisson, newton)
    X, y = rng.normal(size=(1000, 50)), rng.normal(size=1000)
    rows.append(compare("linear, n 1000, d 50", af.LinearRegression(), sk.LinearRegression(), X, y))
    rows.append(compare("logistic, n 1000, d 50", af.LogisticRegression(), exact, X, (y > 0).astype(int)))
    X, y = load_diabetes(return_X_y=True)
    rows.append(compare("diabetes, linear", af.LinearRegression(), sk.LinearRegression(), X, y))
    rows.append(compare("diabetes, lasso 0.1", af.Lasso(0.1), sk.Lasso(0.1, tol=1e-12, max_iter=10**5), X, y))
    X, y = load_breast_cancer(return_X_y=True)
    X = StandardScaler().fit_transform(X)
    rows.append(compare("breast cancer, logistic", af.LogisticRegression(), exact, X, y))
    return rows


def single(X: Any, y: Any, counts: Any, spoiled: Any, exact: Any, poisson: Any, newton: Any) -> list[Row]:
    """The same in float32, as it is."""
    short: dict[str, Any] = {"dtype": "float32", "tol": 1e-6}
    tight: dict[str, Any] = {"tol": 1e-14, "max_iter": 10**5}
    A, b = conditioned(3.0)
    rows = [compare("ridge 0.1, cond(X) 3, float32", af.Ridge(0.1, **short), sk.Ridge(0.1), A, b)]
    rows.append(compare("logistic, float32", af.LogisticRegression(**short), exact, X, y > 0))
    rows.append(compare("lasso 0.1, float32", af.Lasso(0.1, **short), sk.Lasso(0.1, **tight), X, y))
    rows.append(compare("elastic net 0.1, float32", af.ElasticNet(0.1, **short), sk.ElasticNet(0.1, **tight), X, y))
    rows.append(compare("poisson 0.1, float32", af.PoissonRegressor(alpha=0.1, **short), poisson, X, counts))
    huber = af.HuberRegressor(**short).fit(X, spoiled)
    error = np.linalg.norm((huber.coef_ - newton[:20]).astype(float)) / np.linalg.norm(newton[:20].astype(float))
    rows.append({
        "task": "huber, float32 (against Newton)", "relative coefficient error": float(error), "steps": huber.n_iter_,
        "kind": huber.certificate_.kind, "bound": huber.certificate_.bound, "posterior": huber.certificate_.posterior,
        "proved by the kernel": proved(huber),
    })  # fmt: skip
    kernel = af.KernelRegressor(alpha=0.1, **short).fit(X, y).dual_coef_[:, 0]
    want = KernelRidge(alpha=0.1, kernel="rbf", gamma=1 / 20).fit(X, y).dual_coef_
    error = np.linalg.norm(kernel - want) / np.linalg.norm(want)
    rows.append({"task": "kernel ridge 0.1, float32", "relative coefficient error": float(error)})
    return rows


def depths() -> list[Row]:
    """Distance to the optimum against depth, and the bound of the certificate, in the prompt's units."""
    rows = []
    rng = np.random.default_rng(5)
    for condition in (10.0, 100.0, 1000.0):
        X, y = conditioned(math.sqrt(condition), d=6)
        model = af.LinearRegression(tol=1e-15).fit(X, y)
        path, end = model._path[:, 0], sk.LinearRegression().fit(X, y).coef_
        rows.append(
            _falls(
                f"heavy ball, condition {condition:g}",
                model,
                path,
                end * model.scaling_.x_scale / model.scaling_.y_scale,
            )
        )
    X = rng.normal(size=(200, 6))
    labels = (X @ rng.normal(size=6) + rng.normal(size=200) > 0).astype(int)
    for C in (0.01, 1.0):
        model = af.LogisticRegression(C=C, tol=1e-15).fit(X, labels)
        best = sk.LogisticRegression(C=C, solver="newton-cholesky", tol=1e-15, max_iter=1000).fit(X, labels)
        rows.append(
            _falls(f"Nesterov, logistic, C {C:g}", model, model._path[:, 0, :6], best.coef_[0] * model.scaling_.x_scale)
        )
    return rows


def _falls(name: str, model: Any, path: Any, end: Any) -> Row:
    certificate, since = model.certificate_, np.arange(model.certificate_.depth + 1)
    heavy = model.network_.momentum.kind == "heavy ball"
    grown = 1 + (1 + certificate.rho) * since if heavy else certificate.growth
    bound = grown * certificate.rho**since * certificate.distance + certificate.steps
    own = np.linalg.norm(path - end, axis=1)
    begin = len(path) - 1 - certificate.depth
    return {"run": name, "kind": certificate.kind, "begin": begin, "distance": own.tolist(), "bound": bound.tolist()}


def figure(rows: list[Row], path: Path) -> None:
    """The picture of docs/theory.md, from the JSON alone."""
    from attnforge.charts.chart import Figure, Panel, Series
    from attnforge.charts.drawing import save

    panels = []
    for part, title in ((rows[:3], "F4b: least squares"), (rows[3:], "F4c: logistic")):
        series = []
        for row in part:
            name, begin, bound = row["run"].split(", ", 1)[-1], row["begin"], row["bound"]
            distance = np.maximum(row["distance"], 1e-17)  # below it there is only rounding
            series.append(Series(name, range(len(distance)), distance, group=name))
            at = range(begin, begin + len(bound))
            series.append(Series(f"{name}, certified bound", at, bound, style="bound", group=name))
        panels.append(Panel(title, "depth (applications of the block)", "distance to the optimum", series, log_y=True))
    caption = "Distance to the optimum against depth, with the bounds of F4b and F4c."
    save(Figure("incontext", caption, panels), path, force=True)


def prompts(lengths: list[int], batch: int = 1000, d: int = 20) -> list[Row]:
    """Squared error over d of in-context predictions and of the method they should match, by prompt length."""
    g = torch.Generator().manual_seed(0)
    X, w, q, noise = (
        torch.randn(s, generator=g).double() for s in ((batch, 40, d), (batch, d, 1), (batch, 1, d), (batch, 40))
    )
    sparse = w.clone()
    sparse[:, 3:] = 0.0
    rows = []
    for n in lengths:
        x = X[:, :n]
        clean, noisy, thin = (x @ w)[..., 0], (x @ w)[..., 0] + noise[:, :n], (x @ sparse)[..., 0]
        near = 14 <= n <= 28
        options: dict[str, Any] = dict(doublings=14 if near else 9, steps=600 if near else 200, tol=1e-5)
        row: Row = {"prompt length": n}
        begin = time.perf_counter()
        got = af.in_context(x, clean, q, **options)
        row["seconds"] = time.perf_counter() - begin
        want = (q @ torch.linalg.pinv(x) @ clean[..., None])[..., 0]
        row["in context"], row["least squares"] = (error(p, q @ w, d) for p in (got, want))
        got = af.in_context(x, noisy, q, method="ridge", alpha=1.0, doublings=7, steps=200, tol=1e-5)
        want = (q @ torch.linalg.solve(x.mT @ x + torch.eye(d), x.mT @ noisy[..., None]))[..., 0]
        row["in context, noisy"], row["ridge"] = (error(p, q @ w, d) for p in (got, want))
        got = af.in_context(x, thin, q, method="lasso", alpha=0.1, doublings=9, steps=400, tol=1e-5)
        model = sk.Lasso(0.1, fit_intercept=False, tol=1e-6, max_iter=10**4)
        fits = np.array([model.fit(a, b).coef_.copy() for a, b in zip(x.numpy(), thin.numpy(), strict=True)])
        want = (q @ torch.from_numpy(fits)[..., None])[..., 0]
        row["in context, sparse"], row["lasso"] = (error(p, q @ sparse, d) for p in (got, want))
        rows.append(row)
    return rows


def error(prediction: Any, truth: Any, d: int) -> float:
    return float(((prediction - truth[..., 0]) ** 2).mean()) / d


def table(rows: list[Row]) -> str:
    names = list(dict.fromkeys(key for row in rows for key in row))
    cells = [names] + [[_cell(row.get(name, "")) for name in names] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="five prompt lengths instead of forty")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is run again")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # operations are small: a pool of threads costs more than it gives
    record = RESULTS / "incontext.json"
    found: dict[str, list[Row]] = {} if set(given.parts) == set(PARTS) else json.loads(record.read_text("utf-8"))
    if "estimators" in given.parts:
        found["estimators"] = accuracy()
        sys.stdout.write(table(found["estimators"]) + "\n\n")
    if "depths" in given.parts:
        show_depths(found)
    if "prompts" in given.parts:
        show_prompts(found, given.quick)
    RESULTS.mkdir(exist_ok=True)
    record.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def show_depths(found: dict[str, list[Row]]) -> None:
    found["depths"] = depths()
    figure(found["depths"], RESULTS.parent.parent / "docs" / "images" / "incontext.svg")
    for row in found["depths"]:
        pairs = zip(row["distance"][row["begin"] :], row["bound"], strict=True)
        tight = max(d / b for d, b in pairs)
        sys.stdout.write(f"{row['run']}: {row['kind']}, distance at most {tight:.2g} of the bound at every depth\n")


def show_prompts(found: dict[str, list[Row]], quick: bool) -> None:
    begin = time.perf_counter()
    found["prompts"] = prompts([1, 10, 19, 20, 21, 40] if quick else list(range(1, 41)))
    sys.stdout.write(table(found["prompts"]) + "\n")
    methods = (("in context", "least squares"), ("in context, noisy", "ridge"), ("in context, sparse", "lasso"))
    worst = max(abs(row[a] - row[b]) for row in found["prompts"] for a, b in methods)
    spent = time.perf_counter() - begin
    sys.stdout.write(f"largest difference {worst:.2e}, all lengths and methods in {spent:.0f} s\n")


if __name__ == "__main__":
    main()
