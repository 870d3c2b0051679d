"""Random programs and formulas, from grammars whose sizes and types are stated here and in docs/catalogue.md.

A random program has one of three types, each a third of the time: tokens, flags (0 or 1) and counts. Its depth is 1 to
`DEEPEST`, evenly; an op of depth d is drawn evenly from those of its type, with operands of depth d - 1 at most. The
vocabulary has 3 to 5 letters, sequences have up to 4 to 6 tokens, evenly. A random formula is a tree with 2 to
`LARGEST` operations over one or two variables in [-1, 1]. What is constant, has no head or cannot be proved is drawn
again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..rasp.language import SOp, aggregate, apply, eq, indices, length, select, selector_width, tokens
from ..rasp.library import holding, so_far

DEEPEST = 3  # of a random program: deeper ones have tables of thousands of values
LARGEST = 5  # operations of a random formula: a network of some dozen heads
UNARY = ("sin({})", "tanh({})", "exp({})", "({})**2", "abs({})", "sqrt(2 + {})", "relu({})")
BINARY = ("({} + {})", "({} - {})", "({} * {})")


def program(rng: np.random.Generator) -> tuple[SOp, str, int]:
    """A program, its vocabulary and its largest length."""
    letters = "abcde"[: int(rng.integers(3, 6))]
    drawn = _Draw(rng, letters)
    make = (drawn.token, drawn.flag, drawn.count)[int(rng.integers(3))]
    return make(int(rng.integers(1, DEEPEST + 1))), letters, int(rng.integers(4, 7))


def formula(rng: np.random.Generator) -> str:
    """A formula in x, or in x and y."""
    variables = ["x", "y"][: int(rng.integers(1, 3))]

    def tree(size: int) -> str:
        if size == 0:
            return str(rng.choice(variables))
        if size == 1 or rng.random() < 0.5:
            return UNARY[int(rng.integers(len(UNARY)))].format(tree(size - 1))
        left = int(rng.integers(size))
        return BINARY[int(rng.integers(len(BINARY)))].format(tree(left), tree(size - 1 - left))

    return tree(int(rng.integers(2, LARGEST + 1)))


class _Draw:
    """Ops by type; those without operands where the depth is used up."""

    def __init__(self, rng: np.random.Generator, letters: str):
        self.rng, self.letters = rng, letters

    def _one(self, *makers: Callable[[], SOp]) -> SOp:
        return makers[int(self.rng.integers(len(makers)))]()

    def _letter(self) -> str:
        return str(self.rng.choice(list(self.letters)))

    def token(self, depth: int) -> SOp:
        """An op of letters."""
        if depth == 0:
            return tokens
        swapped = dict(zip(self.letters, map(str, self.rng.permutation(list(self.letters))), strict=True))
        step = int(self.rng.integers(1, 3))
        return self._one(
            lambda: apply(swapped, self.token(depth - 1)),
            lambda: aggregate(select(indices, indices - step, eq), self.token(depth - 1), self.letters[0]),
            lambda: aggregate(select(indices, length - 1 - indices, eq), self.token(depth - 1)),
        )

    def flag(self, depth: int) -> SOp:
        """An op of zeros and ones."""
        if depth == 0:
            return tokens.equals(self._letter())
        step, least = int(self.rng.integers(1, 3)), int(self.rng.integers(1, 4))
        return self._one(
            lambda: ~self.flag(depth - 1),
            lambda: self.flag(depth - 1) & self.flag(0),
            lambda: self.flag(depth - 1) | self.flag(0),
            lambda: aggregate(select(indices, indices - step, eq), self.flag(depth - 1), 0),
            lambda: self.count(depth - 1) >= least,
            lambda: self.token(depth - 1).equals(self._letter()),
        )

    def count(self, depth: int) -> SOp:
        """An op of whole numbers."""
        if depth == 0:
            return selector_width(holding(self.flag(0)))
        return self._one(
            lambda: selector_width(holding(self.flag(depth - 1))),
            lambda: selector_width(so_far & holding(self.flag(depth - 1))),
            lambda: selector_width(select(self.token(depth - 1), self.token(0), eq)),
            lambda: self.count(depth - 1) + self.count(0),
        )
