"""In-context learners: frozen attention-only networks that fit regressions from the prompt.

The estimators follow scikit-learn's conventions and need the extra `sklearn`; the networks (`Block`, `Momentum`,
`frozen`) and the loop around them (`run`) do not. Names are loaded when they are first used.

>>> from attnforge.incontext import Momentum
>>> Momentum("heavy ball", 0.5)
Momentum(kind='heavy ball', beta=0.5)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .blocks import Block, Momentum, frozen
    from .certificate import ConvergenceCertificate, depth_for
    from .generalised import HuberRegressor, LogisticRegression, PoissonRegressor
    from .kernel import KernelRegressor
    from .linear import ElasticNet, Lasso, LinearRegression, Ridge
    from .pipeline import Pipeline, PipelinePlan, plan_pipeline
    from .planning import DepthPlan, plan
    from .prompt import Scaling
    from .solver import Run, in_context, run

_LAZY = {
    name: module
    for module, names in {
        ".blocks": ("Block", "Momentum", "frozen"),
        ".certificate": ("ConvergenceCertificate", "depth_for"),
        ".generalised": ("HuberRegressor", "LogisticRegression", "PoissonRegressor"),
        ".kernel": ("KernelRegressor",),
        ".linear": ("ElasticNet", "Lasso", "LinearRegression", "Ridge"),
        ".pipeline": ("Pipeline", "PipelinePlan", "plan_pipeline"),
        ".planning": ("DepthPlan", "plan"),
        ".prompt": ("Scaling",),
        ".solver": ("Run", "in_context", "run"),
    }.items()
    for name in names
}

__all__ = [
    "Block",
    "ConvergenceCertificate",
    "DepthPlan",
    "ElasticNet",
    "HuberRegressor",
    "KernelRegressor",
    "Lasso",
    "LinearRegression",
    "LogisticRegression",
    "Momentum",
    "Pipeline",
    "PipelinePlan",
    "PoissonRegressor",
    "Ridge",
    "Run",
    "Scaling",
    "depth_for",
    "frozen",
    "in_context",
    "plan",
    "plan_pipeline",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'attnforge.incontext' has no attribute '{name}'")
    return getattr(importlib.import_module(_LAZY[name], __name__), name)


def __dir__() -> list[str]:
    return list(__all__)
