"""What is in a catalogue: recipes as plain data, and the networks that they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..box import Box
from ..certificates.certified import CertifiedModule
from ..compiler.pipeline import compile
from ..errors import AttnforgeError, PrecisionError
from ..export.plain.build import to_plain
from ..export.plain.transformer import PlainTransformer
from ..groundtruth.variants.build import vary
from ..rasp.domain import Sequences
from ..rasp.library import get
from ..rasp.network.compiled import CompiledProgram
from . import sampler

EXACT = ("permuted", "split", "distractor", "idle")
#: The two harder variants of each network, and what is taken where the first cannot be proved.
HARDER = {
    "program": (((*EXACT, "rotated"), EXACT), ((*EXACT, "superposed"), ("rotated",), ("permuted", "distractor"))),
    "formula": (((*EXACT, "rotated"), EXACT), (EXACT,)),
}
DTYPE = torch.float64
EPS = 1e-2  # of formulas: heads stay few enough to look at
DRAWS = 200  # random programs and formulas that are tried until one is fit: about one in three is
ROWS = 160  # registers and tokens of a plain form in the catalogue: patterns of more are no pleasure to look at
WIDEST = 512  # channels of one: a file of some megabytes
TRIED = 64  # inputs on which a random program must give two values at least

#: Programs of the library and the lengths they are compiled for.
LIBRARY = (
    *((name, n) for n in (4, 6) for name in (
        "reverse", "hist", "sort", "shift_by", "induction", "detect_pattern", "majority", "frac_prevs", "count",
        "length", "firsts", "lasts", "unique_copy", "sort_unique", "index_select", "bigram_copy")),
    *((name, 4) for name in ("hist2", "mode", "dyck1", "pair_balance", "parity", "count_less_freq", "median3",
                             "binary_increment")),
)  # fmt: skip
FORMULAS = (
    "sin(x)", "x*y", "exp(-x**2)", "sin(x*y) + x", "tanh(2*x - y)", "x**2 + y**2", "relu(x) - relu(y)", "abs(x - y)",
    "cos(x)*exp(y)", "max(x, y)", "sqrt(1 + x**2)", "sigmoid(3*x)*y",
)  # fmt: skip


def _smooth(x: Tensor) -> Tensor:
    return torch.softmax(x @ x.transpose(-2, -1), -1) @ x


def _clipped(x: Tensor) -> Tensor:
    return torch.relu(x - x.mean(-2, keepdim=True))


def _running(x: Tensor) -> Tensor:
    return torch.tanh(x).cumsum(-2)


def _largest(x: Tensor) -> Tensor:
    return x.amax(-2)


def _squared(x: Tensor) -> Tensor:
    return (x * x).mean(-2)


#: Functions of sequences of numbers, and the shapes (tokens, channels) that they are compiled for.
SEQUENCES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, int]]] = {
    "attention": (_smooth, (4, 2)), "above the mean": (_clipped, (4, 2)), "running sum of tanh": (_running, (4, 1)),
    "largest": (_largest, (4, 2)), "mean square": (_squared, (4, 2)),
}  # fmt: skip
#: Of every seven networks drawn in turn: how many come from each source, until the lists are used up.
TURNS = ("library", "formula", "library", "random program", "library", "sequence", "random formula")


@dataclass(frozen=True)
class Recipe:
    """One model: its number, the source and place of its network, and which of the three forms it is in."""

    number: int
    source: str
    place: int
    form: int  # 0 is plain, 1 and 2 the harder variants
    seed: int

    @property
    def id(self) -> str:
        """A name that tells nothing."""
        return f"m{self.number:04d}"

    @property
    def held_out(self) -> bool:
        """Whether the answers lie apart: every fifth network, in all of its forms, beginning with the third."""
        return self.number // 3 % 5 == 2


def recipes(count: int, seed: int) -> list[Recipe]:
    """The first `count` models of a catalogue; a longer one begins with the same."""
    lists = {"library": len(LIBRARY), "formula": len(FORMULAS), "sequence": len(SEQUENCES)}
    used = dict.fromkeys((*lists, "random program", "random formula"), 0)
    found: list[Recipe] = []
    turn = 0
    while len(found) < count:
        source = TURNS[turn % len(TURNS)]
        turn += 1
        if used[source] >= lists.get(source, turn):
            continue
        found += [Recipe(len(found) + form, source, used[source], form, seed) for form in range(3)]
        used[source] += 1
    return found[:count]


def network(recipe: Recipe) -> tuple[CertifiedModule, str]:
    """The network of a recipe before it is varied, and what it computes, in words; in float64, which a rotated stream
    asks for."""
    if recipe.source == "library":
        name, longest = LIBRARY[recipe.place]
        listed = get(name)
        domain = listed.domain(longest)
        return compile(listed.program(domain), domain, dtype=DTYPE), f"{name}, up to {longest} tokens"
    if recipe.source == "sequence":
        name = list(SEQUENCES)[recipe.place]
        function, shape = SEQUENCES[name]
        box = Box.cube(-1, 1, shape=shape)
        return compile(function, box, eps=EPS, dtype=DTYPE), f"{name}, {shape[0]} tokens of {shape[1]}"
    if recipe.source == "formula":
        text = FORMULAS[recipe.place]
        return compile(text, _box(text), eps=EPS, dtype=DTYPE), text
    return _drawn(recipe)


def _box(text: str) -> Box:
    return Box(x=(-1, 1), y=(-1, 1)) if "y" in text else Box(x=(-1, 1))


def _drawn(recipe: Recipe) -> tuple[CertifiedModule, str]:
    """The first random program or formula that is fit for the catalogue."""
    for attempt in range(DRAWS):
        rng = np.random.default_rng([recipe.seed, recipe.place, attempt, int(recipe.source == "random program")])
        try:
            if recipe.source == "random formula":
                text = sampler.formula(rng)
                net: CertifiedModule = compile(text, _box(text), eps=EPS, dtype=DTYPE)
            else:
                drawn, letters, longest = sampler.program(rng)
                net, text = compile(drawn, Sequences(letters, longest), dtype=DTYPE), repr(drawn)
            if _fit(net):
                return net, text
        except AttnforgeError:
            continue
    raise PrecisionError(f"none of {DRAWS} random draws for model {recipe.id} is fit for the catalogue")


def _fit(net: CertifiedModule) -> bool:
    """Whether a network has heads, is small in plain form, and does not give one value for all inputs."""
    plain = to_plain(net)
    if not len(plain.blocks) or plain.registers + plain.tokens > ROWS or plain.spec.stream > WIDEST:
        return False
    if isinstance(net, CompiledProgram):
        given = net.domain.sample(TRIED)
        return len({str(value) for row in net(list(given)) for value in row}) > 1
    return True


def model(recipe: Recipe) -> tuple[PlainTransformer, CertifiedModule, str]:
    """The model of a recipe, the network that it was made from, and what it computes."""
    net, text = network(recipe)
    if recipe.form == 0:
        return to_plain(net), net, text
    kind = "program" if isinstance(net, CompiledProgram) else "formula"
    problem: AttnforgeError | None = None
    for kinds in HARDER[kind][recipe.form - 1]:
        try:
            return vary(net, kinds, recipe.seed + recipe.number), net, text
        except PrecisionError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def described(recipe: Recipe) -> dict[str, Any]:
    """What the index says of a recipe."""
    return {"id": recipe.id, "source": recipe.source, "split": "held-out" if recipe.held_out else "open"}
