"""Algorithms one after the other in one network (F8): what a plan promises holds for prompts it never saw."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch

from attnforge import incontext
from attnforge.errors import ArgumentError, PrecisionError
from attnforge.incontext.pipeline import Pipeline, PipelinePlan, curvatures, plan_pipeline, standardised
from attnforge.network import AttentionLayer, AttentionOnly, Heads

Array = np.ndarray
CASES = {
    "ridge": dict(n=24, d=2, eps=1e-6, penalty=0.5, deviation=0.05),
    "threshold": dict(n=24, d=3, eps=1e-6, penalty=0.5, deviation=0.05, threshold=0.1),
    "logistic": dict(n=24, d=2, eps=1e-6, penalty=0.2, deviation=0.05, fit="logistic"),
    "sparse logistic": dict(n=24, d=2, eps=1e-5, penalty=0.3, deviation=0.05, fit="logistic", threshold=0.05),
    "float32": dict(n=24, d=2, eps=0.3, penalty=1.0, deviation=0.3, dtype="float32"),
}


@cache
def network(case: str) -> Pipeline:
    return Pipeline(plan_pipeline(**CASES[case]))  # type: ignore[arg-type]


def exact(plan: PipelinePlan, X: Array, y: Array, query: Array) -> tuple[Array, Array]:
    """The same algorithms, solved in long doubles where numpy can: weights of standardised columns, predictions."""
    X, y, query = (a.astype(np.longdouble) for a in (X, y, query))
    mean = X.mean(0)
    deviation = np.sqrt(((X - mean) ** 2).mean(0))
    Z, n = (X - mean) / deviation, len(X)
    if plan.fit == "ridge":
        gram = Z.T @ Z / n + plan.penalty * np.eye(plan.columns)
        right = Z.T @ (y - y.mean()) / n
        w = np.linalg.solve(gram.astype(float), right.astype(float)).astype(np.longdouble)
        w += np.linalg.solve(gram.astype(float), (right - gram @ w).astype(float))
    else:
        w = np.zeros(plan.columns, np.longdouble)
        for _ in range(60):  # Newton
            p = 1 / (1 + np.exp(-Z @ w))
            hessian = (Z * (p * (1 - p))[:, None]).T @ Z / n + plan.penalty * np.eye(plan.columns)
            w = w - np.linalg.solve(hessian.astype(float), (Z.T @ (p - y) / n + plan.penalty * w).astype(float))
    w = np.sign(w) * np.maximum(np.abs(w) - plan.threshold, 0)
    z = (query - mean) / deviation @ w
    return w, z + y.mean() if plan.fit == "ridge" else 1 / (1 + np.exp(-z))


def prompts(plan: PipelinePlan) -> list[tuple[Array, Array]]:
    """Hostile data within the plan's sizes: one far row, equal columns, far from 0, two rows, labels at the ends."""
    rng, n, d, top = np.random.default_rng(3), plan.rows, plan.columns, plan.largest
    plain = top * rng.uniform(-1, 1, size=(n, d))
    outlier = np.full((n, d), 0.9 * top)
    outlier[0] = -top
    same = np.repeat(plain[:, :1], d, 1)
    far = top - 2.3 * plan.deviation * rng.uniform(0, 2, size=(n, d))
    two = top * np.array([[1.0] * d, [-1.0] * d])
    alternate = top * np.where(np.arange(n)[:, None] % 2 == 0, 1.0, -1.0) * np.ones((1, d))
    found = []
    for X in (plain, plain[: n // 3], outlier, same, far, two, alternate):
        raw = X @ rng.normal(size=d)
        y = np.where(raw > np.median(raw), 1.0, 0.0 if plan.fit == "logistic" else -1.0) * plan.label
        found += [(X, y), (X, np.full(len(X), plan.label))]
        if plan.fit == "ridge":
            found.append((X, plan.label * raw / np.abs(raw).max()))
    return [(X, y) for X, y in found if X.std(0).min() >= plan.deviation]


@pytest.mark.parametrize("case", CASES)
def test_every_prompt_ends_where_the_plan_says(case: str) -> None:
    net, worst = network(case), 0.0
    plan = net.plan
    stored = torch.float32 if plan.dtype == "float32" else torch.float64
    data = prompts(plan)
    assert len(data) >= 8
    for X, y in data:
        query = plan.largest * np.concatenate([np.ones((1, plan.columns)), -np.eye(plan.columns), X[:2]])
        w, f = exact(plan, X, y, query)
        found = net.weights(torch.from_numpy(X), torch.from_numpy(y)).numpy()
        away = float(np.linalg.norm(found - w))
        told = net(*(torch.from_numpy(a) for a in (X, y, query))).double().numpy()
        assert away <= plan.bound and float(np.abs(told - f).max()) <= plan.prediction
        worst = max(worst, away)
    assert worst > plan.bound * (1e-9 if stored == torch.float64 else 1e-5), "the promise is about something"
    assert plan.bound <= CASES[case]["eps"]


def test_sizes_of_data_do_not_matter() -> None:
    """Units of rows and labels change nothing but the units of the promise: powers of two, bit by bit."""
    rng = np.random.default_rng(0)
    X, y = rng.uniform(-1, 1, size=(24, 2)), rng.uniform(-1, 1, size=24)
    found, depths = [], []
    for rows, labels in ((1.0, 1.0), (2.0**60, 2.0**-50)):
        sizes = dict(largest=rows, deviation=0.05 * rows, label=labels)
        plan = plan_pipeline(24, 2, 1e-3 * labels, penalty=0.5, **sizes)
        found.append(Pipeline(plan).weights(torch.from_numpy(rows * X), torch.from_numpy(labels * y)) / labels)
        depths.append(plan.depth)
    assert torch.equal(*found) and depths[0] == depths[1]


def test_it_is_attention_and_nothing_else() -> None:
    for case in ("threshold", "logistic"):
        net = network(case)
        assert {type(module) for module in net.modules()} == {
            Pipeline, AttentionOnly, AttentionLayer, Heads, torch.nn.ModuleList,
        }  # fmt: skip
        assert len(net.body.layers) == net.plan.layers
        assert sum(group.heads for group in net.body.groups()) == net.plan.heads
        assert net.body(net.example_input()).isfinite().all()
    shown = str(network("threshold").plan)
    assert "standardised rows" in shown and "threshold" in shown


def test_ledger_and_depth() -> None:
    plan = plan_pipeline(100, 3, 1e-6, penalty=0.25, deviation=0.05)
    assert plan.bound == pytest.approx(math.fsum(v for _, v in plan.ledger), rel=1e-5) and plan.bound <= 1e-6
    depths = [plan_pipeline(100, 3, 1e-5, penalty=p, deviation=0.05).depth for p in (0.4, 0.1, 0.025)]
    ratio = [math.sqrt(curvatures(3, p, 0.0, "ridge")[1] / p) for p in (0.4, 0.1, 0.025)]
    assert all(0.8 < b / a * r / s < 1.25 for a, b, s, r in zip(depths, depths[1:], ratio[1:], ratio, strict=False))
    front = standardised(100, 1.0, 0.05, torch.float64)
    assert 0 < front.off < 1e-8 and front.factor == 0.25


def test_more_than_the_dtype_has_is_not_promised() -> None:
    with pytest.raises(PrecisionError, match="cannot be promised"):
        plan_pipeline(24, 2, 1e-13, penalty=0.5, deviation=0.05)
    with pytest.raises(PrecisionError, match=r"lost in|leave the heads|cannot be promised"):
        plan_pipeline(10_000, 5, 1e-3, penalty=0.1, deviation=0.01, dtype="float32")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (dict(fit="lasso"), "fit must be"), (dict(dtype="float16"), "dtype must be"),
        (dict(threshold=-1.0), "threshold"),
        (dict(deviation=2.0), "at most largest"), (dict(penalty=0.0), "penalty"), (dict(label=1e30), "scale the data"),
        (dict(fit="logistic", label=2.0), "labels 0 and 1"), (dict(n=1), "n must be"),
    ],
)  # fmt: skip
def test_wrong_plans_are_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        plan_pipeline(**{**dict(n=24, d=2, eps=1e-3, penalty=0.5, deviation=0.05), **wrong})  # type: ignore[arg-type]


def test_data_beyond_the_plan_are_refused() -> None:
    net, X = network("ridge"), torch.rand(20, 2, dtype=torch.float64)
    y = X[:, 0]
    for given, said in (
        ((3 * X, y, X), "largest"), ((X, 3 * y, X), "label"), ((X, y, 3 * X), "largest"),
        ((X[:, :1], y, X), "expected"), ((0.1 * X, y, X), "deviation"),
        ((X, y[:5], X), "expected"), ((X[:1], y[:1], X), "expected"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=said):
            net(*given)
    with pytest.raises(ArgumentError, match="labels 0 and 1"):
        network("logistic")(X, y, X)
    assert incontext.plan_pipeline is plan_pipeline and incontext.Pipeline is Pipeline
