"""What the networks of a pack compute: formulas of one to six inputs, small perceptrons, functions of tokens, and token
programs of the library, where they are asked for.

Every number is a multiple of a power of two and comes from the generator that is given, so that a seed means the same
pack everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..box import Box
from ..rasp.domain import Sequences
from ..rasp.library import PROGRAMS as PROGRAMS_BY_NAME

NAMES = "abcdef"
SIDES = ((-1.0, 1.0), (0.0, 1.0), (-0.5, 1.5), (-2.0, 2.0))  # of the box: exact in every dtype, signs of every kind
TOLERANCES = (1e-1, 3e-2, 1e-2, 3e-3)  # coarse enough for float32, where most verifiers work
FAMILIES = ("formula", "mlp", "tokens")
EVERY = (*FAMILIES, "program")
#: Programs whose outputs change with their tokens, and how long their sequences may be: some tens of numbers come in.
PROGRAMS = {
    "reverse": 4, "sort": 4, "hist": 4, "shift_by": 4, "count": 4, "majority": 4, "parity": 5, "firsts": 4, "lasts": 4,
    "induction": 5, "detect_pattern": 4, "sort_unique": 4, "dyck1": 4, "unique_copy": 4, "binary_increment": 4,
    "tomita1": 5, "tomita2": 4, "tomita4": 4, "cumulative_sum": 4,
}  # fmt: skip
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "ReLU": nn.ReLU, "Tanh": nn.Tanh, "Sigmoid": nn.Sigmoid, "GELU": nn.GELU, "SiLU": nn.SiLU,
}  # fmt: skip
SHAPES = ("sin({})", "cos({})", "tanh({})", "exp(-({})**2)", "abs({})", "({})**2", "sigmoid({})", "max({}, 0)", "{}")


@dataclass(frozen=True)
class PackTarget:
    """Something to compile: its family, what it is in words, what `af.compile` takes."""

    family: str
    text: str
    target: Any
    box: Box | Sequences
    eps: float | None


def sampled(family: str, rng: np.random.Generator) -> PackTarget:
    """A target of a family."""
    made = {"formula": _formula, "mlp": _perceptron, "tokens": _tokens, "program": _program}
    return made[family](rng)


def _program(rng: np.random.Generator) -> PackTarget:
    """A program of the library on short sequences of few tokens, often a causal one."""
    entry = PROGRAMS_BY_NAME[str(rng.choice(list(PROGRAMS)))]
    domain = entry.domain(int(rng.integers(3, PROGRAMS[entry.name] + 1)), entry.vocabulary[:3])
    domain = Sequences(domain.vocabulary, domain.max_length, bool(rng.random() < 0.5))
    shown = "".join(map(str, domain.vocabulary))
    text = f"{entry.name} of {domain.max_length} tokens of {shown}{', causal' if domain.causal else ''}"
    return PackTarget("program", text, entry.program(domain), domain, None)


def _eighths(rng: np.random.Generator, *shape: int, most: int = 12) -> np.ndarray:
    """Multiples of 1/8, none of them 0."""
    return rng.integers(1, most + 1, shape) * rng.choice([-0.125, 0.125], shape)


def _formula(rng: np.random.Generator) -> PackTarget:
    names = NAMES[: int(rng.integers(1, 7))]
    box = Box({name: SIDES[int(rng.integers(len(SIDES)))] for name in names})
    count = int(rng.choice([1, 1, 2, 3]))
    formulas = [_sum(rng, names) for _ in range(count)]
    text = formulas[0] if count == 1 else f"[{', '.join(formulas)}]"
    return PackTarget("formula", text, formulas[0] if count == 1 else formulas, box, float(rng.choice(TOLERANCES)))


def _sum(rng: np.random.Generator, names: str) -> str:
    """Two or three terms, of one shape or a product of two, in which every variable occurs."""
    order, terms = list(rng.permutation(list(names))), int(rng.integers(1, 4))
    groups: list[list[str]] = [order[i::terms] or [str(rng.choice(list(names)))] for i in range(terms)]
    found = []
    for group in groups:
        parts = [group[i::2] for i in range(min(2, len(group)))] if rng.random() < 0.5 else [group]
        factors = [_shape(rng, part) for part in parts]
        found.append(f"{float(_eighths(rng, 1)[0])!r}*" + "*".join(factors))
    return " + ".join(found)


def _shape(rng: np.random.Generator, group: list[str]) -> str:
    inner = " + ".join(f"{float(c)!r}*{name}" for c, name in zip(_eighths(rng, len(group)), group, strict=True))
    shape = str(rng.choice(SHAPES))
    return shape.format(inner) if shape != "{}" else f"({inner})"


def _linear(rng: np.random.Generator, inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, dtype=torch.float64)
    layer.weight.data = torch.from_numpy(_eighths(rng, outputs, inputs, most=8))
    layer.bias.data = torch.from_numpy(_eighths(rng, outputs, most=4))
    return layer.float()  # eighths are exact in every dtype


def _perceptron(rng: np.random.Generator) -> PackTarget:
    inputs, hidden, outputs = int(rng.integers(2, 6)), int(rng.integers(3, 8)), int(rng.integers(1, 4))
    word = str(rng.choice(list(ACTIVATIONS)))
    layers: list[nn.Module] = [_linear(rng, inputs, hidden), ACTIVATIONS[word]()]
    sizes = [inputs, hidden]
    if rng.random() < 0.3:
        layers += [_linear(rng, hidden, 3), ACTIVATIONS[word]()]
        sizes.append(3)
    layers.append(_linear(rng, sizes[-1], outputs))
    text = f"perceptron {'-'.join(map(str, [*sizes, outputs]))}, {word}"
    return PackTarget(
        "mlp", text, nn.Sequential(*layers), Box.cube(-1, 1, shape=(inputs,)), float(rng.choice(TOLERANCES))
    )


class _Tokens(nn.Module):
    """A function of a sequence of tokens, by its word."""

    def __init__(self, word: str, weight: np.ndarray):
        super().__init__()
        self.word = word
        self.weight = nn.Parameter(torch.from_numpy(weight).float())

    def forward(self, x: Tensor) -> Tensor:
        if self.word == "attention":
            return torch.softmax((x @ self.weight) @ x.T, -1) @ x
        if self.word == "largest":
            return (x @ self.weight).amax(0)
        if self.word == "mean":
            return torch.sin(x @ self.weight).mean(0)
        return torch.softmax(x @ self.weight, -1)


WORDS = {
    "attention": "softmax(x W x^T) x", "largest": "max over tokens of x W", "mean": "mean over tokens of sin(x W)",
    "softmax": "softmax over channels of x W",
}  # fmt: skip


def _tokens(rng: np.random.Generator) -> PackTarget:
    word, tokens, width = str(rng.choice(list(WORDS))), int(rng.integers(2, 4)), int(rng.integers(1, 3))
    if word == "softmax":
        width = 2
    text = f"{WORDS[word]}, {tokens} tokens of {width}"
    target = _Tokens(word, _eighths(rng, width, width))
    return PackTarget("tokens", text, target, Box.cube(-1, 1, shape=(tokens, width)), float(rng.choice(TOLERANCES)))
