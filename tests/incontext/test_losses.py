"""Loss objects: derivatives, and bounds of them that hold; who may import what; one road for every regression."""

from __future__ import annotations

import ast
import math
import pickle
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.exceptions import ConvergenceWarning

import attnforge.incontext as room
from attnforge.errors import ArgumentError
from attnforge.incontext import Block, ConvergenceCertificate, LinearRegression, Momentum, Ridge, frozen
from attnforge.incontext.certificate import worst
from attnforge.incontext.extrapolation import prediction_error
from attnforge.incontext.losses import ANCHORS, EDGE, HUBER, LINEAR, LOSSES, SIMPLE, SOFTMAX, Doubt, Loss, named
from attnforge.incontext.problem import Rounding, StatedProblem
from attnforge.incontext.prompt import Scaling, outside
from attnforge.incontext.solver import solve

Array = np.ndarray[Any, np.dtype[np.float64]]
FORMULAS = tuple(loss for loss in LOSSES.values() if not loss.fitted)


def labels(loss: Loss, rng: np.random.Generator, n: int, outputs: int) -> Array:
    if loss.joint:
        return np.eye(outputs)[rng.integers(outputs, size=n)]
    return rng.random((n, 1)) if not loss.clipped else rng.normal(size=(n, 1))


def sample(loss: Loss, seed: int, n: int = 12, scale: float = 2.0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    outputs = 3 if loss.joint else 1
    return scale * rng.normal(size=(n, outputs)), labels(loss, rng, n, outputs)


def exact_slope(loss: Loss, z: list[Any], y: list[Any]) -> list[Any]:
    """Slopes of one sample in 40 digits, written down once more."""
    if loss.joint:
        total = mpmath.fsum(mpmath.exp(each) for each in z)
        return [mpmath.exp(each) / total - own for each, own in zip(z, y, strict=True)]
    mean = {"logistic": lambda t: 1 / (1 + mpmath.exp(-t)), "poisson": mpmath.exp}.get(loss.name, lambda t: t)
    r = mean(z[0]) - y[0]
    return [max(-mpmath.mpf(EDGE), min(mpmath.mpf(EDGE), r)) if loss.clipped else r]


@pytest.mark.parametrize("loss", FORMULAS, ids=lambda loss: loss.name)
def test_slopes_are_derivatives_and_curvatures_theirs(loss: Loss) -> None:
    z, y = sample(loss, 0)
    h, outputs = 1e-5, z.shape[1]
    moved = [h * np.eye(outputs)[k] for k in range(outputs)]
    slope = np.stack([(loss.value(z + e, y) - loss.value(z - e, y)) / (2 * h) for e in moved], axis=1)
    assert np.abs(slope - loss.slope(z, y)).max() < 1e-8
    x, weight, none = np.random.default_rng(1).normal(size=(len(z), 2)), np.full(len(z), 0.1), np.zeros(len(z))
    low, high = loss.hessians(x, z, y, weight, none)
    assert np.allclose(low, high, atol=1e-15), "without a ball both ends are the Hessian itself"
    for k, e in enumerate(moved):  # columns of the Hessian by w_k, in the direction of the first column of x
        change = (loss.slope(z + e * x[:, :1], y) - loss.slope(z - e * x[:, :1], y)) / (2 * h)
        column = np.concatenate([(weight * change[:, a]) @ x for a in range(outputs)])
        assert np.abs(column - low[:, 2 * k]).max() < 1e-7


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6), loss=st.sampled_from(FORMULAS), off=st.floats(-12, -1), size=st.floats(-1, 1),
)  # fmt: skip
def test_errors_of_slopes_are_bounded(seed: int, loss: Loss, off: float, size: float) -> None:
    """The slope at rounded predictions and labels against the one in 40 digits at the exact ones."""
    z, y = sample(loss, seed, scale=10.0**size)
    rng = np.random.default_rng(seed + 1)
    z_error, y_error = (
        10.0**off * rng.random(z.shape),
        np.zeros_like(y) if loss.classes else 10.0**off * rng.random(y.shape),
    )
    doubt = Doubt(z_error, y_error, np.abs(z) + np.abs(y) + z_error + y_error, lambda: z)
    error, bound = loss.slope_error(y, doubt)
    got = loss.slope(z, y)
    with mpmath.workdps(40):
        for i in range(len(z)):
            signs = rng.choice([-1, 1], size=(2, z.shape[1]))
            true_z, true_y = (
                [mpmath.mpf(float(v)) + int(s) * mpmath.mpf(float(e)) for v, s, e in zip(*row, strict=True)]
                for row in ((z[i], signs[0], z_error[i]), (y[i], signs[1], y_error[i]))
            )
            for k, exact in enumerate(exact_slope(loss, true_z, true_y)):
                assert abs(exact - mpmath.mpf(float(got[i, k]))) <= float(error[i, k])
                assert abs(got[i, k]) <= bound[i, k]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), loss=st.sampled_from(FORMULAS), ball=st.floats(0, 2))
def test_hessians_on_a_ball_lie_between_their_bounds(seed: int, loss: Loss, ball: float) -> None:
    z, y = sample(loss, seed)
    rng = np.random.default_rng(seed + 1)
    x, weight, within = rng.normal(size=(len(z), 3)), rng.random(len(z)), np.full(len(z), ball)
    low, high = loss.hessians(x, z, y, weight, within)
    there = z + ball * rng.uniform(-1, 1, size=z.shape)
    own = loss.hessians(x, there, y, weight, np.zeros(len(z)))[0]
    slack = 1e-12 * np.trace(high)  # of the eigenvalue solver
    assert np.linalg.eigvalsh(own - low)[0] >= -slack
    assert np.linalg.eigvalsh(high - own)[0] >= -slack


def test_a_loss_is_a_value() -> None:
    for name, loss in LOSSES.items():
        assert named(name) is loss and named(loss) is loss and loss.name == name
        again = pickle.loads(pickle.dumps(loss))
        assert again == loss and hash(again) == hash(loss)
        with pytest.raises(FrozenInstanceError):
            loss.name = "other"  # type: ignore[misc]
    assert LINEAR != HUBER and SIMPLE == ("linear", "logistic", "poisson", "huber")
    assert frozen("linear", "plain", 0, 3) is frozen(LINEAR, "plain", 0, 3), "a name and its loss are one network"
    assert Block("softmax", 2, Momentum("plain"), classes=3).loss is SOFTMAX
    with pytest.raises(ArgumentError, match="did you mean 'poisson'"):
        named("poison")
    for ask in (ANCHORS.value, ANCHORS.slope):
        with pytest.raises(ArgumentError, match="no formula to audit"):
            ask(np.zeros((1, 1)), np.zeros((1, 1)))


def imports(module: str) -> set[str]:
    """The modules of the room that a module imports when it runs."""
    tree = ast.parse((Path(room.__file__).parent / f"{module}.py").read_text(encoding="utf-8"))
    typing = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    never = {id(each) for node in typing for each in ast.walk(node)}
    found = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1)
    return {node.module for node in found if node.module and id(node) not in never}


def reached(module: str) -> set[str]:
    """What a module imports, directly and through others."""
    seen: set[str] = set()
    left = list(imports(module))
    while left:
        each = left.pop()
        if each not in seen:
            seen.add(each)
            left += imports(each)
    return seen


def test_audits_import_nothing_that_builds_weights_and_nothing_goes_round() -> None:
    for module in ("losses", "extrapolation", "problem", "certificate"):
        assert reached(module) <= {"losses", "extrapolation", "problem"}
    assert {"blocks", "certificate", "extrapolation"} <= reached("solver"), "the walk sees imports"
    modules = [path.stem for path in Path(room.__file__).parent.glob("*.py") if path.stem != "__init__"]
    assert len(modules) > 8 and [module for module in modules if module in reached(module)] == []


def test_no_module_compares_the_name_of_a_loss() -> None:
    for path in Path(room.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                words = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
                assert not words & set(LOSSES), f"{path.name}, line {node.lineno}"


def quadratic(threshold: Array | None) -> tuple[StatedProblem, Scaling]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 3)), rng.normal(size=(30, 1)) / 8
    problem = StatedProblem(
        LINEAR, x, y, np.full(30, 1 / 30), np.full(3, 0.1), np.zeros((1, 3)), Rounding(0.0, np.zeros(3)), threshold
    )
    return problem, Scaling(np.zeros(3), np.ones(3), np.zeros(1), 1.0)


def test_every_regression_takes_the_same_road() -> None:
    """One stage of the heavy ball where nothing bends, stages of Nesterov's scheme where there are corners."""
    exact = None
    for threshold, kind in ((None, "heavy ball"), (np.zeros(3), "nesterov")):
        problem, scaling = quadratic(threshold)
        done = solve(problem, scaling, tol=1e-13, max_iter=10_000, dtype=torch.float64)
        hessian = problem.x.T @ problem.x / 30 + 0.1 * np.eye(3)
        exact = np.linalg.solve(hessian, problem.x.T @ problem.y[:, 0] / 30)
        assert done.network.momentum.kind == kind and done.scaling.outside == outside(problem)
        assert len(done.last) == done.steps + 1 if kind == "heavy ball" else len(done.last) < done.steps + 1
        assert done.certificate().kind == "certified"
        assert np.abs(done.w[0] - exact).max() < 1e-12 and done.trajectory.shape == (done.steps + 1, 1, 3)


def test_several_targets_are_a_batch_of_one_run() -> None:
    rng = np.random.default_rng(2)
    X, Y = rng.normal(size=(40, 3)), rng.normal(size=(40, 2))
    both = LinearRegression().fit(X, Y)
    assert both.trajectory_.shape == (both.n_iter_ + 1, 2, 3)
    for k in range(2):
        assert np.allclose(both.coef_[k], LinearRegression().fit(X, Y[:, k]).coef_, atol=1e-12)
    at = both.network_.channels
    assert both.prompt_.shape == (41, at.width) and torch.equal(
        both.prompt_[0, at.part("p")], both.prompt_[0, at.part("a")]
    )


def test_the_certificate_of_many_penalties_is_the_worst_of_them() -> None:
    rng = np.random.default_rng(3)
    X, Y = rng.normal(size=(40, 3)), rng.normal(size=(40, 3)) * np.array([1.0, 50.0, 0.1])
    alphas = [0.1, 1.0, 10.0]
    asked = [(Ridge(alphas, max_iter=6), Y), *((Ridge(alpha, max_iter=6), Y[:, k]) for k, alpha in enumerate(alphas))]
    with pytest.warns(ConvergenceWarning):
        together, *own = (model.fit(X, y) for model, y in asked)
    for found, alone in zip(together.certificates_, own, strict=True):
        assert math.isclose(found.bound, alone.certificate_.bound, rel_tol=1e-6)
    # every target has units of its own: the worst is the one that is furthest off in those of the data
    far = [model.certificate_.bound * model.scaling_.y_scale / model.scaling_.x_scale.min() for model in own]
    assert math.isclose(together.certificate_.bound, own[int(np.argmax(far))].certificate_.bound, rel_tol=1e-6)


def test_a_target_that_proves_nothing_speaks_for_all() -> None:
    values: dict[str, Any] = dict(rho=0.5, depth=1, distance=0.0, growth=1.0, amplification=2.0, residual=0.0)
    values |= dict(measured=0.0, posterior=0.0, curvature=(1.0, 1.0), dtype="float64", loss="linear")
    small, large = (ConvergenceCertificate(kind="certified", step_error=e, **values) for e in (1e-9, 1e-3))
    doubtful = ConvergenceCertificate(kind="calibrated", step_error=1e-12, reason="measured only", **values)
    assert worst([small, large]) == large and worst([small, doubtful, large]) == doubtful
    farther = replace(small, posterior=1e-10)
    assert worst([farther, large]) == replace(large, posterior=1e-10), "the posterior is one of all targets"


def test_nothing_is_promised_beyond_the_poles_of_tanh() -> None:
    for dtype in (torch.float64, torch.float32):
        errors = [prediction_error(reach, 3, reach, dtype) for reach in (0.5, 1.0, 5.0, 1e3)]
        assert errors == sorted(errors) and errors[-1] == math.inf
