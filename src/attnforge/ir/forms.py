"""Affine forms over the values of a program under construction: affine operations are merged, not emitted singly."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from ..box import Box
from .ops import Apply, Constant, Input, Linear
from .program import Builder, Program
from .univariate import Univariate


@dataclass(frozen=True)
class Form:
    """constant + sum of coefficient * column j of the input + sum of coefficient * value i."""

    columns: dict[int, Fraction] = field(default_factory=dict)
    values: dict[int, Fraction] = field(default_factory=dict)
    constant: Fraction = Fraction(0)

    def plus(self, other: Form, factor: Fraction = Fraction(1)) -> Form:
        return Form(
            _merged(self.columns, other.columns, factor),
            _merged(self.values, other.values, factor),
            self.constant + factor * other.constant,
        )

    def scaled(self, factor: Fraction, offset: Fraction = Fraction(0)) -> Form:
        return Form(constant=offset).plus(self, factor)

    def lead(self) -> Fraction:
        """The coefficient, when the form is a number times one value or column; else 1."""
        parts = [*self.columns.values(), *self.values.values()]
        return parts[0] if len(parts) == 1 and not self.constant else Fraction(1)


def _merged(one: dict[int, Fraction], other: dict[int, Fraction], factor: Fraction) -> dict[int, Fraction]:
    out = dict(one)
    for key, c in other.items():
        out[key] = out.get(key, Fraction(0)) + factor * c
    return {key: c for key, c in out.items() if c}


class Emitter:
    """A program builder for values of width 1, with the depth of each value."""

    def __init__(self, box: Box):
        self.build = Builder(box)
        self.depth: dict[int, int] = {0: 0}

    def value(self, form: Form, site: str) -> int:
        """The index of a value that equals the form."""
        columns, values = form.columns, form.values
        if not columns and not values:
            return self._settle(self.build.constant([float(form.constant)], site))
        if not form.constant and list(columns.values()) + list(values.values()) == [1]:
            return self._settle(self.build.column(next(iter(columns))) if columns else next(iter(values)))
        return self._settle(self.build.linear(self._weights([form]), [float(form.constant)], site))

    def _weights(self, forms: list[Form]) -> list[tuple[int, npt.ArrayLike]]:
        """For every value that the forms read, the matrix of coefficients with one column for each form."""
        out: list[tuple[int, npt.ArrayLike]] = []
        if any(form.columns for form in forms):
            weight = np.zeros((self.build.width(0), len(forms)))
            for k, form in enumerate(forms):
                for j, c in form.columns.items():
                    weight[j, k] = float(c)
            out.append((0, weight))
        for i in sorted({i for form in forms for i in form.values}):
            out.append((i, np.array([[float(form.values.get(i, 0)) for form in forms]])))
        return out

    def apply(self, form: Form, function: Univariate, site: str, argument: str) -> Form:
        return self._form(self.build.apply(self.value(form, argument), function, site))

    def product(self, left: int, right: int, site: str) -> Form:
        return self._form(self.build.product(min(left, right), max(left, right), site))

    def _form(self, i: int) -> Form:
        return Form(values={self._settle(i): Fraction(1)})

    def _settle(self, i: int) -> int:
        if i not in self.depth:
            op = self.build.ops[i]
            below = max((self.depth[j] for j in op.inputs), default=0)
            self.depth[i] = below + (0 if isinstance(op, (Input, Constant, Linear)) else 1)
        return i

    def program(self, forms: list[Form], sites: list[str], source: str, several: bool) -> Program:
        if not several:
            return self.build.program(self.value(forms[0], sites[0]), source, ())
        weights = self._weights(forms)
        bias = np.array([float(form.constant) for form in forms])
        output = self.build.linear(weights, bias, "outputs") if weights else self.build.constant(bias, "outputs")
        return self.build.program(output, source, (len(forms),))


def applies(program: Program) -> list[str]:
    """The names of the functions that a program applies, for tests and reports."""
    return [op.function.name for op in program.ops if isinstance(op, Apply)]
