"""`network_` of all eight estimators: attention layers, frozen, and of use for other data of the same shape."""

from __future__ import annotations

import copy
import io
import pickle
import tracemalloc
from typing import Any

import joblib
import numpy as np
import pytest
import torch

from attnforge import incontext
from attnforge.census import purity, structural
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
from attnforge.network import AttentionLayer, Heads

ALL = (
    LinearRegression(condition=64.0), Ridge(0.5, condition=64.0), Lasso(0.05, condition=64.0),
    ElasticNet(0.05, condition=64.0), LogisticRegression(condition=256.0), PoissonRegressor(alpha=0.1, condition=256.0),
    HuberRegressor(condition=64.0), KernelRegressor(alpha=1.0, condition=64.0), KernelRegressor(method="mean"),
)  # fmt: skip


def name(model: Any) -> str:
    return f"{type(model).__name__}-{getattr(model, 'method', '')}"


def draw(model: Any, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(40, 3)) * (1 + seed)
    z = X @ rng.normal(size=3) / (1 + seed) + 0.3 * rng.normal(size=40)
    if isinstance(model, LogisticRegression):
        return X, (z > 0).astype(int)
    return X, rng.poisson(np.exp(0.5 * z)).astype(float) if isinstance(model, PoissonRegressor) else z


@pytest.mark.parametrize("model", ALL, ids=name)
def test_one_frozen_network_serves_other_data(model: Any) -> None:
    model = copy.deepcopy(model)
    X, y = draw(model, 0)
    first = model.fit(X, y).network_
    before = {key: value.clone() for key, value in first.state_dict().items()}
    here = model.predict(X)
    if name(model) != "KernelRegressor-mean":  # which has no state
        moved = first.weights_of(first(model.prompt_)) - first.weights_of(model.prompt_)
        assert float(moved.abs().max()) < 1e-9, "the fit is a fixed point of the whole sequence's network"
    X, y = draw(model, 3)
    second = model.fit(X, y).network_
    assert second is first, "other data of the same shape, the very same object"
    assert model.score(X, y) > 0.3 and not np.array_equal(model.predict(X), here)
    for key, value in first.state_dict().items():
        assert torch.equal(value, before[key])
    assert not any(parameter.requires_grad for parameter in first.parameters())
    for layer in first.body.layers:
        assert type(layer) is AttentionLayer and all(type(group) is Heads for group in layer.groups)
    structural(first.body)
    assert purity(first).attention >= 4
    assert {"centring and scaling of columns and labels"} <= set(model.scaling_.outside)


def test_what_is_outside_is_named() -> None:
    named = {}
    for model in ALL:
        X, y = draw(model, 0)
        named[name(model)] = " | ".join(copy.deepcopy(model).fit(X, y).scaling_.outside)
    assert "smallest curvature" in named["LinearRegression-"] and "early stopping" in named["Ridge-"]
    assert "columns in use" in named["Lasso-"] and "Hessian" in named["LogisticRegression-"]
    assert "secant steps on the scale" in named["HuberRegressor-"]
    assert "row sums" in named["KernelRegressor-ridge"] and "early" not in named["KernelRegressor-mean"]


@pytest.mark.parametrize("model", ALL, ids=name)
def test_estimators_survive_pickle_and_joblib(model: Any) -> None:
    X, y = draw(model, 1)
    model = copy.deepcopy(model).fit(X, y)
    file = io.BytesIO()
    joblib.dump(model, file)
    file.seek(0)
    for again in (pickle.loads(pickle.dumps(model)), joblib.load(file)):
        assert np.array_equal(again.predict(X), model.predict(X))
        assert again.certificate_ == model.certificate_
        assert np.array_equal(again.fit(X, y).predict(X), model.predict(X))


@pytest.mark.parametrize("name", ["Ridge", "LogisticRegression", "KernelRegressor"])
def test_memory_is_linear_in_the_number_of_samples(name: str) -> None:
    """Peak memory of a fit that is cut short, by tracemalloc (arrays) and the tensors of the largest step."""
    rng, peaks = np.random.default_rng(0), []
    sizes = (1000, 4000) if name == "KernelRegressor" else (2000, 16_000)
    for n in sizes:
        X = rng.normal(size=(n, 4))
        y = (X[:, 0] > 0).astype(int) if name == "LogisticRegression" else X[:, 0]
        model = getattr(incontext, name)(max_iter=2, tol=1e300)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
            tracemalloc.start()
            model.fit(X, y)
            arrays = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        largest = max((event.self_cpu_memory_usage for event in seen.events()), default=0)
        peaks.append(arrays + largest)
    # the chunks of a kernel are a constant beside what grows
    assert peaks[1] - peaks[0] <= 1.1 * peaks[0] * (sizes[1] / sizes[0] - 1)
    assert peaks[1] < 0.5 * 8 * sizes[1] ** 2, "not even half of one matrix of n x n weights"
