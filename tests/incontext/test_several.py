"""Several targets: each has units and a certificate of its own, and the one that is kept says which it speaks of."""

from typing import Any

import numpy as np
import pytest
from flint import fmpq, fmpq_mat

from attnforge.incontext import Lasso, LinearRegression, Ridge


def exact(X: np.ndarray, y: np.ndarray, alpha: float, weight: np.ndarray) -> np.ndarray:
    """The ridge solution, in rationals."""

    def q(x: float) -> fmpq:
        top, bottom = float(x).as_integer_ratio()
        return fmpq(top, bottom)

    n, d = X.shape
    left = [sum((q(weight[i]) * q(X[i, a]) * q(X[i, b]) for i in range(n)), q(alpha) if a == b else q(0))
            for a in range(d) for b in range(d)]  # fmt: skip
    right = [sum((q(weight[i]) * q(X[i, a]) * q(y[i]) for i in range(n)), q(0)) for a in range(d)]
    found = fmpq_mat(d, d, left).solve(fmpq_mat(d, 1, right))
    return np.array([int(found[a, 0].p) / int(found[a, 0].q) for a in range(d)])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("weighted", [False, True], ids=["even", "weighted"])
def test_every_target_has_its_certificate(dtype: str, weighted: bool) -> None:
    rng = np.random.default_rng(5)
    X = rng.standard_normal((12, 3)) * [1.0, 1e-3, 1e4]
    Y = np.stack([X @ [1.0, 2.0, 3e-4], 1e6 * rng.standard_normal(12), rng.standard_normal(12)], 1)
    weight = rng.uniform(0.1, 3.0, 12) if weighted else np.ones(12)
    alphas = (0.5, 3.0, 1e-3)
    model: Any = Ridge(alpha=alphas, fit_intercept=False, dtype=dtype).fit(X, Y, weight if weighted else None)
    assert len(model.certificates_) == len(model.scalings_) == 3
    reach = []
    for k, (stated, scaling) in enumerate(zip(model.certificates_, model.scalings_, strict=True)):
        wanted = exact(X, Y[:, k], alphas[k], weight)
        gap = np.linalg.norm((model.coef_[k] - wanted) * scaling.x_scale / scaling.y_scale)
        assert stated.kind == "certified" and gap <= stated.bound
        reach.append(stated.bound * scaling.y_scale / scaling.x_scale.min())
    most = int(np.argmax(reach))
    assert model.certificate_.bound == model.certificates_[most].bound
    assert f"target {most} of 3" in str(model.certificate_)


def test_one_problem_needs_no_such_word() -> None:
    X = np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [2.0, 0.5]])
    for model in (LinearRegression(), Ridge(alpha=0.5), Lasso(alpha=0.1)):
        fitted: Any = model.fit(X, np.array([2.0, 1.0, 3.0, 3.0]))
        assert fitted.certificate_ == fitted.certificates_[0] and not fitted.certificate_.domain
    both: Any = Ridge(alpha=0.5).fit(X, np.array([[2.0, 1.0], [1.0, 0.0], [3.0, 2.0], [3.0, 1.0]]))
    assert both.certificates_[0] == both.certificates_[1] == both.certificate_, "one penalty, one problem"
