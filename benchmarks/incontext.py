"""In-context estimators next to scikit-learn's, in one run: accuracy, time, data sets, and the batch of prompts.

python benchmarks/incontext.py             prints the tables and writes benchmarks/results/incontext.json
python benchmarks/incontext.py --quick     fewer prompt lengths
"""

from __future__ import annotations

import argparse
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
from sklearn.preprocessing import StandardScaler

from attnforge import incontext as af

RESULTS = Path(__file__).resolve().parent / "results"
Row = dict[str, Any]


def conditioned(condition: float, n: int = 200, d: int = 20) -> tuple[Any, Any]:
    """Data whose Gram matrix has the condition number condition^2, with noise."""
    rng = np.random.default_rng(0)
    U, V = np.linalg.qr(rng.normal(size=(n, d)))[0], np.linalg.qr(rng.normal(size=(d, d)))[0]
    X = U * np.geomspace(1, 1 / condition, d) @ V.T * math.sqrt(n)
    return X, X @ rng.normal(size=d) + 0.1 * rng.normal(size=n)


def timed(fit: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.perf_counter()
    model = fit()
    return model, time.perf_counter() - begin


def compare(name: str, ours: Any, theirs: Any, X: Any, y: Any) -> Row:
    """One estimator against scikit-learn's on the same data."""
    (a, own), (b, other) = timed(lambda: ours.fit(X, y)), timed(lambda: theirs.fit(X, y))
    error = float(np.linalg.norm(a.coef_ - b.coef_) / np.linalg.norm(b.coef_))
    row: Row = {
        "task": name, "relative coefficient error": error, "steps": a.n_iter_, "seconds": own,
        "times scikit-learn": own / other, "score": a.score(X, y), "scikit-learn's score": b.score(X, y),
    }  # fmt: skip
    return row


def huber_objective(model: Any, X: Any, y: Any) -> float:
    r = np.abs(y - X @ model.coef_ - model.intercept_) / model.scale_
    loss = np.where(r < 1.35, r * r, 2 * 1.35 * r - 1.35**2)
    return float(model.scale_ * (len(y) + loss.sum()) + 1e-4 * model.coef_ @ model.coef_)


def accuracy() -> list[Row]:
    rows = []
    for condition in (1.0, 10.0, 100.0):
        X, y = conditioned(condition)
        rows.append(compare(f"linear, cond(X) {condition:g}", af.LinearRegression(), sk.LinearRegression(), X, y))
        rows.append(compare(f"ridge 0.1, cond(X) {condition:g}", af.Ridge(0.1), sk.Ridge(0.1), X, y))
    X, y = conditioned(3.0)
    single = af.Ridge(0.1, dtype="float32", tol=1e-6)
    rows.append(compare("ridge 0.1, cond(X) 3, float32", single, sk.Ridge(0.1), X, y))
    rng = np.random.default_rng(1)
    X = rng.normal(size=(200, 20))
    w = rng.normal(size=20) * (rng.random(20) < 0.4)
    y = X @ w + 0.5 * rng.normal(size=200)
    exact = sk.LogisticRegression(solver="newton-cholesky", tol=1e-14, max_iter=1000)
    rows.append(compare("logistic", af.LogisticRegression(), exact, X, (y > 0).astype(int)))
    rows.append(compare("logistic, float32", af.LogisticRegression(dtype="float32", tol=1e-5), exact, X, y > 0))
    rows.append(compare("lasso 0.1", af.Lasso(0.1), sk.Lasso(0.1, tol=1e-14, max_iter=10**5), X, y))
    rows.append(compare("elastic net 0.1", af.ElasticNet(0.1), sk.ElasticNet(0.1, tol=1e-14, max_iter=10**5), X, y))
    counts = rng.poisson(np.exp(0.3 * y + 1)).astype(float)
    poisson = sk.PoissonRegressor(alpha=0.1, solver="newton-cholesky", tol=1e-14, max_iter=1000)
    rows.append(compare("poisson 0.1", af.PoissonRegressor(alpha=0.1), poisson, X, counts))
    spoiled = y + 10 * (np.arange(200) % 17 == 0)
    ours, theirs = af.HuberRegressor(), sk.HuberRegressor(tol=1e-12, max_iter=10**4)
    row = compare("huber", ours, theirs, X, spoiled)
    a, b = huber_objective(ours, X, spoiled), huber_objective(theirs, X, spoiled)
    row["objective relative to scikit-learn's, minus 1"] = a / b - 1
    rows.append(row)
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
    quick = parser.parse_args().quick
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # operations are small: a pool of threads costs more than it gives
    found: dict[str, list[Row]] = {"estimators": accuracy()}
    sys.stdout.write(table(found["estimators"]) + "\n\n")
    begin = time.perf_counter()
    found["prompts"] = prompts([1, 10, 19, 20, 21, 40] if quick else list(range(1, 41)))
    sys.stdout.write(table(found["prompts"]) + "\n")
    pairs = (("in context", "least squares"), ("in context, noisy", "ridge"), ("in context, sparse", "lasso"))
    worst = max(abs(row[a] - row[b]) for row in found["prompts"] for a, b in pairs)
    spent = time.perf_counter() - begin
    sys.stdout.write(f"largest difference {worst:.2e}, all lengths and methods in {spent:.0f} s\n")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "incontext.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
