"""Rows and labels around their weighted means, and how far rounding takes them from the exact ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..certify.rounding import gamma
from .problem import Rounding, U
from .prompt import Array


@dataclass(frozen=True, eq=False)
class Centred:
    """Rows and labels around their weighted means, times sqrt(weight); the means; absolute errors of both."""

    rows: Array
    labels: Array
    x_mean: Array
    y_mean: Array
    x_error: Array
    y_error: float

    def rounding(self, x_scale: Array, y_scale: float) -> Rounding:
        """The errors in the prompt's units."""
        weight = (len(self.rows) + 8) * U  # sample weights were normalised
        return Rounding(12 * U, 1.01 * self.x_error / x_scale, 1.01 * self.y_error / y_scale, weight)


def centred(X: Array, Y: Array, weight: Array, intercept: bool) -> Centred:
    """The means are taken out where an intercept is fitted."""
    root = np.sqrt(weight)[:, None]
    most, slack = float(root.max()), float(gamma(len(X) + 4, U))
    x_error, y_error = np.zeros(X.shape[1]), 0.0
    if intercept:
        x_mean, y_mean = (np.average(each, axis=0, weights=weight) for each in (X, Y))
        # what rounding does to the means shifts all rows alike
        x_error = slack * most * np.average(np.abs(X), axis=0, weights=weight)
        y_error = slack * most * float(np.average(np.abs(Y), axis=0, weights=weight).max())
    else:
        x_mean, y_mean = np.zeros(X.shape[1]), np.zeros(Y.shape[1])
    rows, labels = (X - x_mean) * root, (Y - y_mean) * root
    # What is left of a constant column is rounding, and would otherwise be scaled up to a column of noise.
    noise = 8 * np.finfo(float).eps * np.sqrt(len(X)) * np.abs(X).max(axis=0, initial=0.0)
    dead = np.linalg.norm(rows, axis=0) <= noise * np.sqrt(weight.max())
    x_error = np.where(dead, x_error + np.abs(rows).max(axis=0, initial=0.0), x_error)
    rows[:, dead] = 0.0
    return Centred(rows, labels, x_mean, y_mean, x_error, y_error)
