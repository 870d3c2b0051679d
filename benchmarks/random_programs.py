"""Token programs that nobody wrote: random ones, compiled and compared with the interpreter on every sequence.

python benchmarks/random_programs.py                    2000 programs; writes benchmarks/results/random_programs.json
python benchmarks/random_programs.py --count 100 --seed 7
python benchmarks/random_programs.py --odd --count 3000 programs of other kinds, and more ways to be wrong (see `Odd`)
python benchmarks/random_programs.py --entries          every stored number of some networks changed alone
python benchmarks/random_programs.py --entries sort     of one

A program is made of every op of the language over a vocabulary of any values (None, numbers, texts, tuples), its
functions are tables and operators that often make no sense, and its domain is small enough to be run completely. Each
is compiled, in float32 or float64, causal or not, with a marker before every sequence or without. What may happen: a
refusal with one of our errors, or a network. What may not: any other error; a certificate `exact` beside a wrong
output; a number further off than its bound; a text or a file that reads back as something else; weights that were
changed, are proved again and give a wrong output.

With `--odd` programs are of kinds that the others seldom are (means of means, comparisons at ties, keys that are ranks
nearly, counts of counts, several outputs, numbers from 1e-30 to 1e30, vocabularies of 1 and of 200), and networks are
looked at more closely: every column of the state after every layer, on tokens and on padding, must be within the error
that the proof keeps of it, computed by PyTorch and by numpy in two other orders of summation; outputs must be right in
80-bit arithmetic; after casts to other dtypes and back, and after changes to tables as a whole, what the analysis or
the kernel proves must be right.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import random
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

import attnforge as af  # noqa: E402
from attnforge import rasp  # noqa: E402
from attnforge.kernel.file import parse as parsed  # noqa: E402
from attnforge.kernel.prove import prove as kernel_proof  # noqa: E402
from attnforge.rasp import aggregate, apply, indices, length, library, select, selector_width, tokens, where  # noqa: E402
from attnforge.rasp.network.data import program_json, read_program  # noqa: E402
from attnforge.rasp.network.derivation import derive  # noqa: E402
from attnforge.rasp.network.proof import prove  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "random_programs.json"
MOST = 400  # sequences of a domain, which is run completely
CHANGES = 4  # changed numbers a network
#: Vocabularies of any values: equal ones would be one token (True is 1), others only look alike.
VOCABULARIES: tuple[tuple[Any, ...], ...] = (
    ("a", "b"), ("a", "b", "c"), (0, 1), (0, 1, 2), (-1, 0, 2), (True, False), (1, "1"), (None, "None", 0), (0.5, 1, 2),
    ((), (1,), (1, 2)), ("é", "e\u0301"), ("", " "), ("\u202e", "\U0001f600", "0"), (Fraction(1, 3), Fraction(2, 3)),
    (10**9, -(10**9)), ("a",), (2.0**40, 2.0**-40), ("\n", "'", '"'), (("a", None), ("a", 0)), (3, 4, 7),
)  # fmt: skip
ENTRIES = ("length", "hist", "reverse", "sort", "shift_by", "parity", "frac_prevs", "majority", "induction", "dyck1")
PREDICATES = (rasp.eq, rasp.ne, rasp.lt, rasp.leq, rasp.gt, rasp.geq, rasp.true, rasp.false)
NUMBERS = (0, 1, 2, -1, 3, 0.5, Fraction(1, 3), 10, -7)
TEXTS = ("a", "b", "", "one")


class Maker:
    """Random ops over a vocabulary: `number`, `value` (anything) and `selector`, of a depth."""

    numbers: tuple[Any, ...] = NUMBERS

    def __init__(self, draw: random.Random, vocabulary: Sequence[Any]):
        self.draw, self.vocabulary = draw, vocabulary
        self.made: list[rasp.SOp] = [indices, length]
        self.selectors: list[rasp.Selector] = []
        self.numeric = all(isinstance(token, (int, float, Fraction)) for token in vocabulary)

    def pick(self, *options: Any) -> Any:
        return self.draw.choice(options)()

    def number(self, depth: int) -> rasp.SOp:
        d, draw = depth - 1, self.draw
        if depth <= 0:
            return self.pick(
                lambda: indices, lambda: length, lambda: rasp.Constant(draw.choice(self.numbers)),
                lambda: tokens.equals(draw.choice(self.vocabulary)), lambda: tokens if self.numeric else indices,
                lambda: self.table(tokens), lambda: draw.choice(self.made),
            )  # fmt: skip
        found = self.pick(
            lambda: self.number(d) + self.number(d), lambda: self.number(d) - self.number(d),
            lambda: self.number(d) * draw.choice(self.numbers), lambda: self.number(d) * self.number(d),
            lambda: self.number(d) / draw.choice([2, 3, -1, 0.25]), lambda: self.number(d) // draw.choice([1, 2, -3]),
            lambda: self.number(d) % draw.choice([2, 3, 5]), lambda: -self.number(d), lambda: abs(self.number(d)),
            lambda: apply(draw.choice([min, max]), self.number(d), self.number(d)),
            lambda: draw.choice([self.number(d) < self.number(d), self.number(d) >= draw.choice(self.numbers)]),
            lambda: self.value(d).equals(self.value(d)), lambda: self.value(d).differs(self.value(d)),
            lambda: where(self.number(d), self.number(d), self.number(d)),
            lambda: self.number(d) & self.number(d), lambda: self.number(d) | self.number(d), lambda: ~self.value(d),
            lambda: self.table(self.value(d)), lambda: apply(self.mixed, self.value(d), self.value(d)),
            lambda: selector_width(self.selector(d)), lambda: selector_width(self.selector(d)),
            lambda: aggregate(self.selector(d), self.number(d), default=draw.choice(self.numbers)),
            lambda: aggregate(self.selector(d), self.number(d), default=draw.choice(self.numbers)),
            lambda: rasp.numerical(self.number(d)), lambda: rasp.categorical(self.number(d)),
            lambda: self.number(d) ** draw.choice([0, 1, 2]),
        )  # fmt: skip
        self.made.append(found)
        return found  # type: ignore[no-any-return]

    def value(self, depth: int) -> rasp.SOp:
        d, draw = depth - 1, self.draw
        if depth <= 0:
            return self.pick(
                lambda: tokens, lambda: tokens, lambda: indices, lambda: rasp.Constant(draw.choice(TEXTS)),
                lambda: rasp.Constant(None), lambda: rasp.Constant(draw.choice(self.vocabulary)),
            )  # fmt: skip
        return self.pick(  # type: ignore[no-any-return]
            lambda: self.number(d), lambda: apply(lambda a, b: (a, b), self.value(d), self.value(d)),
            lambda: where(self.number(d), self.value(d), self.value(d)),
            lambda: aggregate(self.selector(d), self.value(d), default=draw.choice([*self.vocabulary, None, "?", 0])),
            lambda: aggregate(self.one(d), self.value(d), default=draw.choice([*self.vocabulary, None, "?", 0])),
            lambda: apply(str, self.value(d)), lambda: self.table(self.value(d), TEXTS),
        )  # fmt: skip

    def table(self, op: rasp.SOp, results: Sequence[Any] = ()) -> rasp.SOp:
        """A function without sense, yet the same for equal values."""
        salt, numbers = self.draw.randrange(10**6), self.numbers
        return apply(lambda v: random.Random(f"{salt} {v!r}").choice(results or numbers), op)

    def mixed(self, a: Any, b: Any) -> int:
        return len(repr((a, b))) % 4

    def one(self, depth: int) -> rasp.Selector:
        """A selector that often selects one key."""
        return self.pick(  # type: ignore[no-any-return]
            lambda: select(indices, indices - self.draw.choice([-2, -1, 0, 1, 2])), lambda: select(indices, 0),
            lambda: select(indices, length - 1 - indices), lambda: select(indices, self.number(depth)),
            lambda: select(self.rank(), indices), lambda: select(self.number(depth), indices),
            lambda: self.one(depth) & self.selector(depth),
        )  # fmt: skip

    def rank(self) -> rasp.SOp:
        order = self.draw.choice([rasp.lt, rasp.gt]) if self.numeric or self.text else rasp.ne
        return selector_width(
            select(tokens, tokens, order) | select(tokens, tokens) & select(indices, indices, rasp.lt)
        )

    @property
    def text(self) -> bool:
        return all(isinstance(token, str) for token in self.vocabulary)

    def selector(self, depth: int) -> rasp.Selector:
        d, draw = depth - 1, self.draw
        if depth <= 0:
            predicate = draw.choice(PREDICATES)
            same = predicate if self.numeric or self.text else draw.choice([rasp.eq, rasp.ne])
            found = self.pick(lambda: select(tokens, tokens, same), lambda: select(indices, indices, predicate),
                              lambda: select(tokens, draw.choice(self.vocabulary)),
                              lambda: draw.choice(self.selectors or [select(tokens, tokens)]))  # fmt: skip
        else:
            predicate = draw.choice(PREDICATES)
            salt = draw.randrange(10**6)
            found = self.pick(
                lambda: self.selector(d) & self.selector(d), lambda: self.selector(d) | self.selector(d),
                lambda: ~self.selector(d), lambda: select(self.number(d), self.number(d), predicate),
                lambda: select(self.value(d), self.value(d), draw.choice([rasp.eq, rasp.ne])), lambda: self.one(d),
                lambda: select(self.value(d), self.value(d),
                               lambda k, q: random.Random(f"{salt} {(k, q)!r}").random() < 0.4),
            )  # fmt: skip
        self.selectors.append(found)
        return found  # type: ignore[no-any-return]


def made(seed: int) -> tuple[rasp.SOp, rasp.Sequences, torch.dtype]:
    """A program, its domain and a dtype."""
    draw = random.Random(seed)
    vocabulary = draw.choice(VOCABULARIES)
    longest = next(n for n in (6, 5, 4, 3, 2, 1) if rasp.Sequences(vocabulary, n).size <= MOST)
    domain = rasp.Sequences(
        vocabulary,
        draw.choice([longest, longest, longest, 1, 2]),
        draw.random() < 0.15,
        draw.choice([None] * 5 + ["^"]),
    )
    maker = Maker(draw, vocabulary)
    program = draw.choice([maker.number, maker.number, maker.value])(draw.choice([1, 2, 2, 3, 3, 4]))
    return program, domain, draw.choice([torch.float32, torch.float32, torch.float64])


def meant(program: rasp.SOp, domain: rasp.Sequences) -> tuple[list[list[Any]], list[list[Any]]]:
    """The sequences on which the program is defined, and its values: of all, or of some of a large domain."""
    given, wanted = [], []
    for sequence in domain if domain.size <= MOST else domain.sample(_tried(domain)):
        try:
            wanted.append(program(sequence))
        except af.AttnforgeError:
            continue
        given.append(list(sequence))
    return given, wanted


def _tried(domain: rasp.Sequences) -> int:
    """How many sequences of a domain `meant` tries."""
    return domain.size if domain.size <= MOST else MOST // 2


def wrong(net: Any, given: list[list[Any]], wanted: list[list[Any]]) -> list[str]:
    """Where a network is wrong, or further off than its bound."""
    behind = len(_behind(net, ()))
    found = net.run([_behind(net, sequence) for sequence in given]) if given else []
    return _differ(net, given, [ours[behind:] for ours in found], wanted)


def _copied(net: Any) -> Any:
    """A copy with tensors of its own, and the same facts of its program."""
    return copy.deepcopy(net, {id(net.facts): net.facts})


def changed(net: Any, draw: random.Random) -> Iterator[Any]:
    """Copies of a network with one number changed."""
    for _ in range(CHANGES):
        other = _copied(net)
        places = [p for p in (*other.network.parameters(), other.positions) if p.numel()]
        with torch.no_grad():
            flat = draw.choice(places).view(-1)
            at = draw.randrange(len(flat))
            flat[at] = draw.choice([flat[at] * 0.01, flat[at] + 1, -flat[at], flat[at] * 1.001, 0.0, 1e30, 1e-30, 0.5])
        yield other


def basics(
    program: rasp.SOp, domain: rasp.Sequences, dtype: torch.dtype, given: list[list[Any]], wanted: list[list[Any]]
) -> tuple[str, list[str], Any]:
    """Compiled, compared, written and read, traced: a word, what should not have happened, and the network."""
    bad = [] if not given or rasp.run_many(program, given) == wanted else ["run_many differs from the interpreter"]
    try:
        net = af.compile(program, domain, dtype=dtype)
    except af.PrecisionError:
        return "not proved", bad, None
    except af.AttnforgeError as error:
        return f"refused ({type(error).__name__})", bad, None
    bad += wrong(net, given, wanted)
    if net.certificate.domain == repr(domain) and len(given) < _tried(domain):
        bad.append("the certificate leaves no sequence out, and the program has no value on some")
    if rasp.parse(net.program.to_text()) != net.program:
        bad.append("its text reads back as another program")
    if read_program(json.loads(json.dumps(program_json(net.program)))) != net.program:
        bad.append("its file reads back as another program")
    if given and net.outputs is not None:
        marker = [] if domain.bos is None else [domain.bos]
        rows = net.trace([*marker, *given[-1]]).rows
        bad += [f"the trace differs at {row.op}" for row in rows if not row.agrees]
    return net.certificate.kind, bad, net


def attack(seed: int) -> tuple[str, list[str]]:
    """What happens to one program: a word, and what should not have happened."""
    program, domain, dtype = made(seed)
    given, wanted = meant(program, domain)
    word, bad, net = basics(program, domain, dtype, given, wanted)
    for other in () if net is None else changed(net, random.Random(seed)):
        try:
            other.attach(other.recertify())
        except af.CertificateError:
            continue
        bad += [f"changed: {text}" for text in wrong(other, given, wanted)]
    return word, bad


#: Vocabularies for odd programs: one token, two hundred, ties, sizes far apart, kinds mixed.
ODD: tuple[tuple[Any, ...], ...] = (
    ("a",), (0,), (None,), (-2.5,), tuple(range(-100, 100)),
    (*"abc", *range(190), None, ("a",), 0.5, -1, -1e30, 1e-30, ""),
    (1e30, -1e30, 0), (1e-30, 2e-30, 0), (1e30, 1e-30, 1), (-1, -0.5, True, 0), (None, "a", 1, (1, "a"), -2.5),
    (1, 1 + 2.0**-20, 1 + 2.0**-40), (Fraction(1, 3), 0.333333, Fraction(333, 1000)), (-3, 5, 7), (2**24, 2**24 + 1),
    (2**53, 2**53 + 1), (0, 1), (0, 1, 2), ("a", "b"), ("a", "b", "c"), (-1, 1), (0, Fraction(1, 7)),
)  # fmt: skip
ODD_NUMBERS = (0, 1, -1, 2, 0.5, Fraction(1, 3), -2.5, 7, 1e-30, 1e30, 1 / 3, 2**24 + 1, Fraction(-2, 7), True)
DEFAULTS = (None, "?", ("x", None), True, -0.5, Fraction(1, 3), 1e30, 1e-30, 0, -7, "", ())
EACH = 12  # one program in so many is also cast and changed, which takes far longer than all else
CHECKED = 60  # sequences whose columns are looked at


class Odd(Maker):
    """Programs of kinds that `Maker` seldom draws."""

    numbers = ODD_NUMBERS

    def mean(self, depth: int) -> rasp.SOp:
        """A mean of numbers, or of means."""
        inner = self.pick(
            lambda: self.token_number(), lambda: self.token_number(), lambda: indices,
            *([lambda: self.mean(depth - 1)] * 3 if depth > 0 else ()), lambda: self.count(0),
        )  # fmt: skip
        found = aggregate(self.wide(), inner, default=self.draw.choice([0, 0, 1, -1, *self.numbers]))
        self.made.append(found)
        return found

    def token_number(self) -> rasp.SOp:
        """A number for each token."""
        numbers = self.draw.choices([0, 1, 2, -1], k=len(self.vocabulary))
        return self.pick(  # type: ignore[no-any-return]
            lambda: tokens.equals(self.draw.choice(self.vocabulary)), lambda: self.table(tokens),
            lambda: apply(dict(zip(self.vocabulary, numbers, strict=True)), tokens),
            lambda: tokens if self.numeric else indices,
        )  # fmt: skip

    def wide(self) -> rasp.Selector:
        """A selector that often selects several keys."""
        draw = self.draw
        token = draw.choice(self.vocabulary)
        order = draw.choice(PREDICATES if self.numeric or self.text else (rasp.eq, rasp.ne))
        return self.pick(  # type: ignore[no-any-return]
            lambda: select(indices, indices, draw.choice([rasp.leq, rasp.lt, rasp.geq, rasp.ne, rasp.true])),
            lambda: select(tokens, tokens, order), lambda: select(tokens, token), lambda: self.selector(0),
            lambda: select(self.count(0), self.count(0), draw.choice(PREDICATES)),
            lambda: select(indices, draw.choice([1, 2, 3]), draw.choice([rasp.leq, rasp.gt, rasp.ne])),
            lambda: select(indices, indices, rasp.leq) & select(tokens, tokens, rasp.eq),
            lambda: ~select(indices, indices + draw.choice([-1, 0, 1])),
        )  # fmt: skip

    def count(self, depth: int) -> rasp.SOp:
        """A count, or a count by counts."""
        draw = self.draw
        if depth <= 0:
            return selector_width(self.pick(
                lambda: select(tokens, tokens), lambda: select(tokens, tokens) & select(indices, indices, rasp.leq),
                lambda: select(tokens, draw.choice(self.vocabulary)), lambda: self.selector(0),
                lambda: select(tokens, tokens) & select(indices, indices, rasp.gt),
            ))  # fmt: skip
        other = self.pick(lambda: self.count(depth - 1), lambda: indices, lambda: length - indices)
        by = select(self.count(depth - 1), other, draw.choice(PREDICATES))
        return selector_width(self.pick(lambda: by, lambda: by & self.wide(), lambda: by | self.wide(), lambda: ~by))

    def nearly_rank(self) -> rasp.SOp:
        """Counts that add up to a rank, or nearly: the difference is what a proof must see."""
        draw = self.draw
        order = draw.choice([rasp.lt, rasp.gt] if self.numeric or self.text else [rasp.ne])
        key = self.pick(lambda: tokens, lambda: tokens, lambda: self.count(0), lambda: self.token_number())
        if key is not tokens:
            order = draw.choice([rasp.lt, rasp.gt])
        tie = select(key, key) & select(indices, indices, draw.choice([rasp.lt, rasp.lt, rasp.leq, rasp.gt]))
        more = draw.choice([0, 0, 0, -1, 1, -1.5, 0.5])
        first, second = draw.choice([1, 1, 1, 2, -1, 1.5]), draw.choice([1, 1, 1, 0, 1.5, 0.5, -1, 2, Fraction(3, 2)])
        both = selector_width(select(key, key, order)) * first + selector_width(tie) * second + more
        return draw.choice([both, both, selector_width(select(key, key, order) | tie), length - 1 - both, both % 3])

    def program(self) -> rasp.SOp:
        """A program of one of the kinds."""
        draw, d = self.draw, self.draw.choice([0, 1, 1, 2])
        predicate = draw.choice(PREDICATES[:6])
        default = draw.choice([*DEFAULTS, *self.vocabulary[:3]])
        shifted = self.pick(lambda: indices, lambda: indices - 1, lambda: self.nearly_rank(), lambda: length - indices)
        thresholds: list[Any] = [Fraction(p, q) for q in (1, 2, 3, 4, 5, 6) for p in range(-1, q + 1)]
        near = draw.choice(thresholds) + draw.choice([0, 0, 0, 2.0**-20, -(2.0**-20), 1e-9, Fraction(1, 10**12)])
        return self.pick(  # type: ignore[no-any-return]
            lambda: self.mean(d), lambda: self.mean(d), lambda: rasp.numerical(self.mean(d) - self.mean(d) * near),
            lambda: apply(predicate, self.mean(d), near), lambda: apply(predicate, self.mean(d), self.mean(0)),
            lambda: where(self.mean(0) >= near, tokens, default), lambda: self.mean(d) * draw.choice(self.numbers),
            lambda: aggregate(select(self.nearly_rank(), shifted), tokens, default=default),
            lambda: aggregate(select(self.nearly_rank(), shifted), tokens, default=default),
            lambda: aggregate(select(self.nearly_rank(), shifted) & self.wide(), self.value(1), default=default),
            lambda: selector_width(select(self.nearly_rank(), shifted, predicate)),
            lambda: aggregate(self.one(1), self.value(1), default=default),
            lambda: aggregate(self.one(1), tokens, default=default), lambda: self.count(d), lambda: self.count(2),
            lambda: self.count(1) * draw.choice(self.numbers) + self.mean(0), lambda: self.value(d),
            lambda: self.number(d), lambda: self.number(d + 1),
            lambda: apply(lambda *v: v, self.value(0), self.count(0)), lambda: self.mean(0) ** 2,
            lambda: apply(self.mixed, self.count(0), self.value(1)), lambda: self.mean(0) % 1,
        )  # fmt: skip


def odd(seed: int) -> tuple[Any, rasp.Sequences, torch.dtype]:
    """An odd program, or several by name, with a domain and a dtype."""
    draw = random.Random(f"odd {seed}")
    vocabulary = draw.choice(ODD)
    if len(vocabulary) < 9:
        longest = next(n for n in (6, 5, 4, 3, 2, 1) if n == 1 or rasp.Sequences(vocabulary, n).size <= MOST // 3)
        longest = draw.choice([longest, longest, longest, 1, 2] if len(vocabulary) > 1 else [1, 2, 9])
    else:
        longest = draw.choice([1, 1, 2])
    causal = draw.random() < 0.2
    domain = rasp.Sequences(vocabulary, longest, causal, draw.choice([None] * 3 + ["^"]))
    maker = Odd(draw, vocabulary)
    program: Any = maker.program()
    if causal:
        program = _masked(program)
    if draw.random() < 0.2:
        more = [maker.program() for _ in range(draw.choice([1, 1, 2]))]
        program = {f"out {i}": _masked(p) if causal else p for i, p in enumerate([program, *more])}
    return program, domain, draw.choice([torch.float32, torch.float32, torch.float64])


def _masked(program: rasp.SOp) -> rasp.SOp:
    """The program with every selector kept from later keys."""
    done: dict[Any, Any] = {}
    for node in rasp.walk(program):
        new = {name: done[child] for name, child in vars(node).items() if isinstance(child, rasp.Node)}
        if isinstance(node, rasp.Map):
            new["operands"] = tuple(done[child] for child in node.operands)
        if isinstance(node, rasp.Aggregate | rasp.SelectorWidth):
            new["selector"] = new["selector"] & library.so_far
        done[node] = replace(node, **new) if new else node
    return done[program]  # type: ignore[no-any-return]


def _dot(a: Any, b: Any, turned: bool) -> Any:
    """(..., i) times (i, j) or (..., i, j), added up one by one, from the front or from the back."""
    terms = a[..., None] * b
    terms = terms[..., ::-1, :] if turned else terms
    return np.cumsum(terms, axis=-2, dtype=terms.dtype)[..., -1, :] if terms.shape[-2] else terms.sum(-2)


def _head(group: Any, Z: Any, dtype: Any, turned: bool) -> Any:
    t = {name: p.detach().numpy()[0].astype(dtype) for name, p in group.named_parameters()}

    def project(letter: str) -> Any:
        found = _dot(Z, t[f"W_{letter}"], turned) if f"W_{letter}" in t else dtype(0)
        found = found + t.get(f"b_{letter}", dtype(0))
        return found if found.ndim == 3 else np.broadcast_to(found, (*Z.shape[:2], found.shape[-1]))

    q, logits = project("Q"), []
    if group.scope == "tokens":
        own = _dot(q, project("K").swapaxes(-1, -2)[:, None], turned)
        later = np.triu(np.ones(own.shape[-2:], dtype=bool), 1)
        logits.append(np.where(later, -np.inf, own) if group.causal else own)
    if "M_K" in t:
        logits.append(_dot(q, t["M_K"].T, turned))
    row = np.concatenate(logits, -1)
    weights = np.exp(row - row.max(-1, keepdims=True))
    weights = weights / _dot(weights, np.ones((row.shape[-1], 1), dtype), turned)
    values = project("V")[:, None] if group.scope == "tokens" else np.zeros((len(Z), 1, 0, t["M_V"].shape[1]), dtype)
    if "M_V" in t:
        values = np.concatenate([values, np.broadcast_to(t["M_V"], (len(Z), 1, *t["M_V"].shape))], -2)
    return _dot(_dot(weights, values, turned), t["W_O"], turned)


def layers_by_numpy(net: Any, x: Any, dtype: Any, turned: bool) -> Iterator[Any]:
    """The state after every layer, computed anew from the stored numbers."""
    places = net.positions.numpy()[: x.shape[1]].astype(dtype)
    Z = np.concatenate([x.astype(dtype), np.broadcast_to(places, (len(x), *places.shape))], -1)
    for layer in net.network.layers:
        terms = [_head(group, Z, dtype, turned) for group in layer.heads()]
        if layer.S is not None:
            terms.append(_dot(Z, layer.S.detach().numpy().astype(dtype), turned))
        if layer.s is not None:
            terms.append(np.broadcast_to(layer.s.detach().numpy().astype(dtype), (*Z.shape[:2], layer.s.shape[0])))
        Z = sum(terms[1:], terms[0])
        yield Z


def layers_by_torch(net: Any, x: Any) -> Iterator[Any]:
    """The same by PyTorch."""
    Z = torch.cat([x, net.positions[: x.shape[1]].expand(len(x), -1, -1)], -1)
    with torch.no_grad():
        for layer in net.network.layers:
            Z = layer(Z)
            yield Z.numpy()


class Spy:
    """Hears what the proof keeps of the state after each layer."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def head(self, layer: int, group: int, state: Any) -> None:
        """Nothing is loose."""

    def after(self, layer: int, state: Any, sizes: Any) -> None:
        """Remember the columns."""
        self.states.append(state)

    def readout(self, state: Any) -> Any:
        """Nothing is loose."""
        return 0.0 if self.numeric else np.zeros(self.width)

    numeric, width = False, 0


def columns_wrong(net: Any, given: list[list[Any]], seed: int) -> list[str]:
    """Columns further from what they stand for than the proof says, and outputs wrong in other orders or in 80 bits."""
    rows, meant_at, ideal = _meanings(net.facts, given, seed)
    if not rows:
        return []
    spy = Spy()
    spy.width = 1 if net.outputs is None else len(net.outputs)
    prove(net.facts, net.layout, net.network, net.positions, by=spy)  # type: ignore[arg-type]
    x = net.encode(rows)
    lengths, real = [len(row) for row in rows], x[..., -1].numpy() == 1
    kind = np.float32 if net.dtype == torch.float32 else np.float64
    ways = {
        "torch": layers_by_torch(net, x), "forward": layers_by_numpy(net, x.numpy(), kind, False),
        "backward": layers_by_numpy(net, x.numpy(), kind, True),
        "80 bits": layers_by_numpy(net, x.numpy(), np.longdouble, False),
    }  # fmt: skip
    bad = []
    for way, states in ways.items():
        found = list(states)
        for number, (state, columns) in enumerate(zip(found, spy.states, strict=False)):
            if way == "80 bits":
                continue  # exponentials are no exact zeros there
            for c, column in enumerate(columns):
                at = state[..., c]
                if (np.abs(at[~real]).max(initial=0.0) > column.pad).any():
                    bad.append(f"{way}: column {c} after layer {number} is large on padding")
                if column.feature not in ideal:
                    exact = [v for ops, n in meant_at for v in _ideal(net.facts, column.feature, ops, n)]
                    ideal[column.feature] = exact, np.array([float(v) for v in exact])
                exact, near = ideal[column.feature]
                off = np.abs(at[real].astype(np.float64) - near)
                for i in np.flatnonzero(~(off < column.error * 0.999) & (off > 0))[:64].tolist():
                    if not abs(Fraction(float(at[real][i])) - exact[i]) <= Fraction(column.error):
                        bad.append(f"{way}: column {c} {column.feature} after layer {number} is {at[real][i]!r}, not "
                                   f"{exact[i]!r}, beyond {column.error:.3g}")  # fmt: skip
                        break
        last = torch.from_numpy(found[-1].astype(np.float64))
        wanted = [ops[net.facts.program] for ops, _ in meant_at]
        slack = 2.0**-50 if way == "80 bits" else 0  # there the bound is of what else is computed
        bad += [f"{way}: {text}" for text in _differ(net, rows, net.decode(last, lengths), wanted, slack)]
    return bad


@functools.lru_cache(maxsize=2)
def _looked_up(facts: Any, given: tuple[Any, ...], seed: int) -> tuple[list[Any], list[Any], dict[Any, Any]]:
    found = []
    for sequence in given if len(given) <= CHECKED else random.Random(seed).sample(given, CHECKED):
        try:
            ops: dict[Any, Any] = {}
            for output in facts.outputs:
                ops |= rasp.evaluate(output, sequence, ops)
        except af.AttnforgeError:
            continue
        found.append((sequence, (ops, len(sequence))))
    return [sequence for sequence, _ in found], [ops for _, ops in found], {}


def _meanings(facts: Any, given: list[list[Any]], seed: int) -> tuple[list[Any], list[Any], dict[Any, Any]]:
    """Some sequences, what every op of the normal form means on each, and a place to keep what columns mean."""
    return _looked_up(facts, tuple(map(tuple, given)), seed)


def _ideal(facts: Any, feature: Any, ops: Any, n: int) -> list[Any]:
    if feature.kind == "real":
        return [1] * n
    if feature.op < 0:  # the program does not speak of tokens
        return [0] * n
    node = facts.order[feature.op]
    found = list(ops[node])
    if feature.kind == "is":
        return [int(v == facts.values(node)[feature.value]) for v in found]
    return [v * v if feature.kind == "square" else v for v in found]


def _behind(net: Any, sequence: Sequence[Any]) -> list[Any]:
    return [*([] if net.domain.bos is None else [net.domain.bos]), *sequence]


def _differ(
    net: Any, given: Sequence[Any], found: Sequence[Any], wanted: Sequence[Any], slack: float = 0.0
) -> list[str]:
    """Where outputs are not those that are wanted, or further off than the bound."""
    bad, more = [], Fraction(slack)
    bound = Fraction(net.bound) if net.outputs is None else None
    for sequence, ours, theirs in zip(given, found, wanted, strict=True):
        right = list(ours) == list(theirs)
        if bound is not None:
            right = all(abs(Fraction(a) - b) <= bound + more * (1 + abs(b)) for a, b in zip(ours, theirs, strict=True))
        if not right:
            bad.append(f"{sequence!r}: {ours!r}, not {theirs!r}")
    return bad


def twisted(net: Any, draw: random.Random) -> Iterator[tuple[str, Any]]:
    """Copies of a network with tables changed as a whole: scaled, rounded, permuted, values that cancel each other."""
    groups = range(len(list(net.network.groups())))
    for _ in range(CHANGES if groups else 0):
        other = _copied(net)
        group = list(other.network.groups())[draw.choice(groups)]
        kind = draw.choice(["cancel", "scale", "round", "roll", "swap"])
        tables = dict(group.named_parameters())
        with torch.no_grad():
            if kind == "cancel":
                by, width = 2.0 ** draw.choice([10, 16, 20, 21]), group.W_O.shape[1]
                for name in ("b_V", "M_V", "W_V"):
                    if name in tables or (name == "b_V" and group.scope == "tokens"):
                        old = tables.get(name, torch.zeros(1, width, dtype=net.dtype))
                        one = torch.zeros_like(old) if name == "W_V" else torch.full_like(old, by)
                        setattr(group, name, torch.nn.Parameter(torch.cat([old + one, -one], -1)))
                group.W_O = torch.nn.Parameter(torch.cat([group.W_O, group.W_O], 1))
            else:
                name = draw.choice(sorted(tables))
                table = tables[name]
                if kind == "scale":
                    table.mul_(draw.choice([0.01, 0.41, 2.0, -1.0, 1.0001, 0.0, 1e20]))
                elif kind == "round":
                    table.copy_(table.to(torch.bfloat16).to(net.dtype))
                elif table.shape[-1] > 1:
                    table.copy_(table.roll(1, -1) if kind == "roll" else table.flip(-1))
        yield f"{kind}", other


def cast(net: Any) -> Iterator[tuple[str, Any]]:
    """Copies of a network in other dtypes, and back again."""
    away = torch.float64 if net.dtype == torch.float32 else torch.float32
    yield f"to {away}", _copied(net).to(away)
    yield f"to {away} and back", _copied(net).to(away).to(net.dtype)
    yield "to bfloat16 and back", _copied(net).to(torch.bfloat16).to(net.dtype)


def attack_odd(seed: int) -> tuple[str, list[str]]:
    """What happens to one odd program, or several in one network."""
    programs, domain, dtype = odd(seed)
    if not isinstance(programs, dict):
        return attack_one(programs, domain, dtype, seed)
    try:
        net = af.compile(programs, domain, dtype=dtype)
    except af.PrecisionError:
        return "several: not proved", []
    except af.AttnforgeError as error:
        return f"several: refused ({type(error).__name__})", []
    bad: list[str] = []
    for name, program in programs.items():
        given, wanted = meant(program, domain)
        together = net.run([_behind(net, sequence) for sequence in given]) if given else []
        found = [row[name][domain.bos is not None :] for row in together]
        one = net[name]
        bad += [f"{name}: {text}" for text in (*_differ(one, given, found, wanted), *wrong(one, given, wanted))]
        bad += [f"{name}: {text}" for text in columns_wrong(one, given, seed)]
        if one.certificate.bound > net.certificate.bound:
            bad.append(f"{name}: the bound of all is below its own")
    every = [] if seed % EACH else [*cast(net), *(("one", one) for one in changed(net, random.Random(seed)))]
    for what, other in every:
        try:
            other.attach(other.recertify())
        except af.CertificateError:
            continue
        for name, program in programs.items():
            bad += [f"{what}, {name}: {text}" for text in wrong(other[name], *meant(program, domain))]
    return f"several: {net.certificate.kind}", bad


def attack_one(program: rasp.SOp, domain: rasp.Sequences, dtype: torch.dtype, seed: int) -> tuple[str, list[str]]:
    """What happens to one odd program."""
    given, wanted = meant(program, domain)
    word, bad, net = basics(program, domain, dtype, given, wanted)
    if net is None:
        return word, bad
    bad += columns_wrong(net, given, seed)
    draw = random.Random(seed)
    certificate = net.certificate
    each = EACH if len(domain.vocabulary) < 9 else 10 * EACH
    kernel = seed % (2 * each) == 0
    every = [] if seed % each else [*cast(net), *twisted(net, draw), *(("one", one) for one in changed(net, draw))]
    for what, other in [("as it is", net), *every]:
        proved: list[tuple[str, Any]] = []
        try:
            proved += [] if other is net else [("analysis", other.attach(other.recertify()).bound)]
        except af.CertificateError:
            other.attach(certificate)
        if kernel and other.dtype in (torch.float32, torch.float64):
            with suppress(af.CertificateError):
                proved.append(("kernel", kernel_proof(parsed(other.written()), derive(other)).bound))
        for by, bound in proved:
            other.attach(replace(certificate, bound=bound, terms=()))
            bad += [f"{what}, by {by}: {text}" for text in wrong(other, given, wanted)[:2]]
            if by == "analysis" and other is not net and not bad:
                bad += [f"{what}: {text}" for text in columns_wrong(other, given, seed)[:2]]
    return word, bad


def safely(seed: int, what: Any = attack) -> tuple[str, list[str]]:
    """An attack, with any other error than ours as something that should not have happened."""
    try:
        return what(seed)  # type: ignore[no-any-return]
    except Exception:
        return "failed", [traceback.format_exc(limit=-3)]


def entries(name: str, longest: int = 5) -> dict[str, Any]:
    """Every stored number of a program's network changed alone, in several ways: what is proved again must be right."""
    listed = library.get(name)
    domain = next(d for d in map(listed.domain, range(longest, 0, -1)) if d.size <= MOST)
    program = listed.program(domain)
    net = af.compile(program, domain)
    given, wanted = meant(program, domain)
    counts: dict[str, Any] = {"program": name, "changes": 0, "refused": 0, "still right": 0, "wrong": 0}
    for tensor in (*net.network.state_dict().values(), net.positions):
        flat = tensor.view(-1)
        for at, old in enumerate(flat.tolist()):
            news = (old * 0.01, old + 1, math.nan, 0.0, old * 1e25, -old, old * (1 + 2.0**-20), math.inf)
            for new in {torch.tensor(new, dtype=tensor.dtype).item() for new in news} - {old}:
                flat[at] = new
                counts["changes"] += 1
                try:
                    net.attach(net.recertify())
                except af.CertificateError:
                    counts["refused"] += 1
                else:
                    counts["wrong" if wrong(net, given, wanted) else "still right"] += 1
            flat[at] = old
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="how many programs")
    parser.add_argument("--seed", type=int, default=0, help="the number of the first")
    parser.add_argument("--odd", action="store_true", help="programs of other kinds, looked at more closely")
    parser.add_argument("--entries", nargs="*", metavar="PROGRAM", help="change every number of these programs instead")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    if given.entries is not None:
        found["entries"] = []
        for name in given.entries or ENTRIES:
            found["entries"].append(entries(name))
            print(json.dumps(found["entries"][-1]), flush=True)
    else:
        words, failures = Counter[str](), []
        for seed in range(given.seed, given.seed + given.count):
            word, bad = safely(seed, attack_odd if given.odd else attack)
            words[word] += 1
            if bad:
                failures.append({"seed": seed, "program": word, "count": len(bad), "first": bad[0][:600]})
                print(json.dumps(failures[-1]), flush=True)
        name = "odd" if given.odd else "programs"
        found[name] = {"first": given.seed, "count": given.count, **dict(sorted(words.items()))}
        found["odd failures" if given.odd else "failures"] = failures
        print(json.dumps(found[name]), f"{len(failures)} failures")
    if given.entries == [] or (given.entries is None and given.count >= 2000):
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    failed = any(found.get(name) for name in ("failures", "odd failures"))
    sys.exit(failed or any(row["wrong"] for row in found.get("entries", ())))


if __name__ == "__main__":
    main()
