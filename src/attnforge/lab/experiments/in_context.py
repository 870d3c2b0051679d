"""Gradient descent in context: a frozen network steps through regressions that come in the prompt (F1 to F4, v1 4.1).

Its iterates beside those of exact gradient descent from the same start, over depth, conditioning and noise; linear
regression with and without momentum, and logistic regression.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flint
import torch
from torch import Tensor

from ...charts.chart import Figure, Series
from ...theorems import gradient_descent
from ..experiment import Cell, Experiment, Finding, Record, grid
from ..verdicts import bound, threshold
from .shared import figure, grows, line, panel, where

SAMPLES, COLUMNS = 64, 6  # of the regressions: small, for hundreds of steps are taken on each
METHODS = {"linear": "linear, plain", "heavy ball": "linear, heavy ball", "logistic": "logistic, plain"}
CONDITIONS = (2.0, 8.0, 32.0, 128.0)  # of the Gram matrix: from easy to where plain descent crawls
NOISES = (0.0, 0.1, 1.0)  # standard deviations of the signal: none, some, as much as there is signal
SAME = {"float64": 1e-11, "float32": 1e-2}  # distance from exact iterates that counts as the same, of their size
REFERENCE = 1e-15  # of the optimum as a floating number, and of the distance to it


def cells(quick: bool) -> tuple[Cell, ...]:
    depth, seeds = (100, (0,)) if quick else (400, (0, 1, 2))
    fixed: dict[str, Any] = {"method": tuple(METHODS), "depth": (depth,), "dtype": tuple(SAME)}
    found = grid(seeds, **fixed, condition=CONDITIONS[: 3 if quick else None], noise=(0.1,))
    return found + grid(seeds, **fixed, condition=(8.0,), noise=tuple(x for x in NOISES if x != 0.1))


def task(condition: float, noise: float, logistic: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Data whose Gram matrix X^T X/n has its eigenvalues between 1/condition and 1; labels of size at most 1/2."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    U, V = orthonormal(normal(SAMPLES, COLUMNS)), orthonormal(normal(COLUMNS, COLUMNS))
    spread = torch.logspace(0, -math.log10(condition) / 2, COLUMNS, dtype=torch.float64)
    X = U * spread @ V.T * math.sqrt(SAMPLES)
    signal = X @ normal(COLUMNS)
    y = signal + noise * float(signal.std()) * normal(SAMPLES)
    return X, (y > 0).double() if logistic else y / (2 * y.abs().max())


def orthonormal(columns: Tensor) -> Tensor:
    """Columns made orthonormal one after the other, twice over, with sums in a fixed order: a seed fixes every bit."""
    found = columns.clone()
    for _ in range(2):
        for j in range(found.shape[1]):
            for i in range(j):
                found[:, j] -= (found[:, i] * found[:, j]).sum() * found[:, i]
            found[:, j] /= found[:, j].square().sum().sqrt()
    return found


def optimum(X: Tensor, y: Tensor) -> Tensor:
    """The least-squares solution in rational arithmetic: these floating numbers' own, to the last bit."""
    rational = lambda x: flint.fmpq(*x.as_integer_ratio())  # noqa: E731
    rows, labels = ([[rational(float(v)) for v in row] for row in part] for part in (X, y[:, None]))
    A, b = flint.fmpq_mat(rows), flint.fmpq_mat(labels)
    solved = (A.transpose() * A).solve(A.transpose() * b)
    return torch.tensor([int(v.p) / int(v.q) for v in solved.entries()], dtype=torch.float64)


def exact_step(X: Tensor, y: Tensor, step: float, beta: float, logistic: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """One step of gradient descent as a textbook has it: from w and the w before it."""

    def moved(w: Tensor, before: Tensor) -> Tensor:
        score = X @ w
        residual = (torch.sigmoid(score) if logistic else score) - y
        return w - step / len(X) * (X.T @ residual) + beta * (w - before)

    return moved


@torch.no_grad()
def measure(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    method, condition, depth = settings["method"], settings["condition"], settings["depth"]
    logistic, ball = method == "logistic", method == "heavy ball"
    dtype = getattr(torch, settings["dtype"])
    X, y = task(condition, settings["noise"], logistic, seed)
    root = math.sqrt(condition)
    rho = (root - 1) / (root + 1) if ball else 1 - 1 / condition
    step, beta = ((2 / (1 + 1 / root)) ** 2, rho**2) if ball else (1.0, 0.0)
    network = gradient_descent("logistic" if logistic else "linear", 1, ball, condition=condition, dtype=dtype)
    X, y = X.to(dtype).double(), y.to(dtype).double()  # both see the numbers that the prompt holds
    exact = exact_step(X, y, step, beta, logistic)
    best = optimum(X, y)
    w = before = mine = mine_before = torch.zeros(COLUMNS, dtype=torch.float64)
    Z = network.sequence(w.to(dtype), X.to(dtype), y.to(dtype), step)
    apart, left, left_exact, each, residual = [0.0], [float(best.norm())], [float(best.norm())], 0.0, 0.0
    for _ in range(depth):
        Z = network(Z)
        found = network.weights_of(Z).double()
        each = max(each, float((found - exact(mine, mine_before)).norm()))
        mine, mine_before = found, mine
        w, before = exact(w, before), w
        residual = max(residual, float((X @ w - y).abs().max()))
        apart.append(float((mine - w).norm()))
        left.append(float((mine - best).norm()))
        left_exact.append(float((w - best).norm()))
    size = max(float(w.norm()), 1e-30)
    return {
        "apart": [x / size for x in apart], "left": left, "left_exact": left_exact, "rho": rho,
        "largest_apart": max(apart) / size, "step_error": each / size, "each": each,
        "largest_residual": residual,
    }  # fmt: skip


def allowed(record: Record) -> list[float]:
    """F4: what may be left after T steps: rho^T |w_0 - w*| with the growth of the method, and all steps' errors."""
    rho, start, steps = record["rho"], record["left"][0], range(len(record["left"]))
    ball = record["method"] == "heavy ball"
    errors = record["each"] / ((1 - rho) ** 2 if ball else 1 - rho) + REFERENCE
    return [(1 + (1 + rho) * t if ball else 1.0) * rho**t * start + errors for t in steps]


def figures(records: Sequence[Record]) -> list[Figure]:
    made = []
    panels = []
    for method in ("linear", "heavy ball"):
        series: list[Series] = []
        for record in where(records, method=method, dtype="float64", noise=0.1):
            if record.seed == 0:
                depth, name = list(range(len(record["left"]))), f"condition {record['condition']:g}"
                series.append(Series(name, depth, positive(record["left"]), group=name))
                series.append(Series(f"{name}, F4", depth, allowed(record), style="bound", group=name))
        panels += panel(METHODS[method], "depth (steps)", "distance to the optimum", series, log_y=True)
    caption = (
        "Distance of in-context weights to the optimum, and the bound of F4: what is left of the start plus what "
        "the measured errors of all steps add up to."
    )
    made += figure("depth", caption, panels, "Weights converge at the predicted rate to the bound's floor.")
    panels = []
    for x, label in (("condition", "condition number"), ("noise", "noise over signal")):
        series = []
        for method, name in METHODS.items():
            for dtype in SAME:
                chosen = where(records, method=method, dtype=dtype)
                chosen = where(chosen, noise=0.1) if x == "condition" else where(chosen, condition=8.0)
                series += line(f"{name}, {dtype}", chosen, x, "largest_apart", group=f"{name} {dtype}")
        y = "distance from exact iterates, relative"
        panels += panel(label, label, y, series, log_x=x == "condition", log_y=True)
    caption = "How far in-context iterates ever are from those of exact gradient descent, relative to its last."
    alt = "Distances stay near rounding whatever the conditioning and the noise."
    made += figure("apart", caption, panels, alt)
    return made


def positive(values: Sequence[float]) -> list[float | None]:
    return [v if v > 0 else None for v in values]


def judge(records: Sequence[Record]) -> list[Finding]:
    found: list[Finding] = []
    for method, name in METHODS.items():
        for dtype, same in SAME.items():
            chosen = where(records, method=method, dtype=dtype)
            if chosen:
                worst = max(r["largest_apart"] for r in chosen)
                quantity = f"{name}, {dtype}: largest distance from exact iterates, any depth, condition and noise"
                steep = max(chosen, key=lambda r: float(r["largest_apart"]))
                note = f"at condition {steep['condition']:g}, with residuals up to {steep['largest_residual']:.2g}"
                one = threshold(quantity, same, worst, note=f"{note}; F2 is made for residuals of about 1")
                found.append(one.laid_to("theory" if dtype == "float64" else "float32"))
        exact = where(records, method=method, dtype="float64", noise=0.1)
        quantity = f"{name}, float64: error of a step against the condition number"
        found += grows(quantity, 0.0, exact, "condition", "step_error")
    limits = [
        pair
        for record in where(records, method=("linear", "heavy ball"))
        for pair in zip(record["left"], allowed(record), strict=True)
    ]
    if limits:
        note = "with the measured error of a step; every depth of every linear run"
        found.append(bound("distance to the optimum after T steps against F4", limits, note=note))
    return found


EXPERIMENT = Experiment(
    name="in-context",
    title="Gradient descent in context",
    claim="A frozen attention-only network takes gradient steps on data in its prompt: its iterates are those of exact "
    "gradient descent up to rounding, and its distance to the optimum obeys rho^T |w_0 - w*| + e/(1 - rho).",
    label="F1, F2, F3, F4 (v1 theorem 4.1)",
    varies="Depth up to 100 (400 in full), condition number 2 to 128, noise 0 to 1 of the signal; linear regression "
    "without momentum and with the heavy ball, logistic regression; float64 and float32.",
    measured_how="One frozen block applied again and again to a prompt of 64 samples with 6 columns, beside the same "
    "steps computed directly in float64 from the same start: distance of the weights at every depth, and of every "
    "single step.",
    judged_how="Largest distance from exact iterates at most 1e-11 of their size in float64 and 1e-2 in float32, at "
    "any depth, condition and noise; distance to the optimum against F4 at every depth without tolerance; the error of "
    "a step does not grow with the condition number (its exponent's 95 % interval meets 0 ± 0.1).",
    cells=cells,
    measure=measure,
    figures=figures,
    judge=judge,
    revision=2,
)
