"""Token programs that nobody wrote: random ones, compiled and compared with the interpreter on every sequence.

python benchmarks/random_programs.py                    2000 programs; writes benchmarks/results/random_programs.json
python benchmarks/random_programs.py --count 100 --seed 7
python benchmarks/random_programs.py --entries          every stored number of some networks changed alone
python benchmarks/random_programs.py --entries sort     of one

A program is made of every op of the language over a vocabulary of any values (None, numbers, texts, tuples), its
functions are tables and operators that often make no sense, and its domain is small enough to be run completely. Each
is compiled, in float32 or float64, causal or not, with a marker before every sequence or without. What may happen: a
refusal with one of our errors, or a network. What may not: any other error; a certificate `exact` beside a wrong
output; a number further off than its bound; a text or a file that reads back as something else; weights that were
changed, are proved again and give a wrong output.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

import attnforge as af  # noqa: E402
from attnforge import rasp  # noqa: E402
from attnforge.rasp import aggregate, apply, indices, length, library, select, selector_width, tokens, where  # noqa: E402
from attnforge.rasp.network.data import program_json, read_program  # noqa: E402

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
                lambda: indices, lambda: length, lambda: rasp.Constant(draw.choice(NUMBERS)),
                lambda: tokens.equals(draw.choice(self.vocabulary)), lambda: tokens if self.numeric else indices,
                lambda: self.table(tokens), lambda: draw.choice(self.made),
            )  # fmt: skip
        found = self.pick(
            lambda: self.number(d) + self.number(d), lambda: self.number(d) - self.number(d),
            lambda: self.number(d) * draw.choice(NUMBERS), lambda: self.number(d) * self.number(d),
            lambda: self.number(d) / draw.choice([2, 3, -1, 0.25]), lambda: self.number(d) // draw.choice([1, 2, -3]),
            lambda: self.number(d) % draw.choice([2, 3, 5]), lambda: -self.number(d), lambda: abs(self.number(d)),
            lambda: apply(draw.choice([min, max]), self.number(d), self.number(d)),
            lambda: draw.choice([self.number(d) < self.number(d), self.number(d) >= draw.choice(NUMBERS)]),
            lambda: self.value(d).equals(self.value(d)), lambda: self.value(d).differs(self.value(d)),
            lambda: where(self.number(d), self.number(d), self.number(d)),
            lambda: self.number(d) & self.number(d), lambda: self.number(d) | self.number(d), lambda: ~self.value(d),
            lambda: self.table(self.value(d)), lambda: apply(self.mixed, self.value(d), self.value(d)),
            lambda: selector_width(self.selector(d)), lambda: selector_width(self.selector(d)),
            lambda: aggregate(self.selector(d), self.number(d), default=draw.choice(NUMBERS)),
            lambda: aggregate(self.selector(d), self.number(d), default=draw.choice(NUMBERS)),
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

    def table(self, op: rasp.SOp, results: Sequence[Any] = NUMBERS) -> rasp.SOp:
        """A function without sense, yet the same for equal values."""
        salt = self.draw.randrange(10**6)
        return apply(lambda v: random.Random(f"{salt} {v!r}").choice(results), op)

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
    """The sequences on which the program is defined, and its values."""
    given, wanted = [], []
    for sequence in domain:
        try:
            wanted.append(program(sequence))
        except af.AttnforgeError:
            continue
        given.append(list(sequence))
    return given, wanted


def wrong(net: Any, given: list[list[Any]], wanted: list[list[Any]]) -> list[str]:
    """Where a network is wrong, or further off than its bound."""
    bos = [] if net.domain.bos is None else [net.domain.bos]
    found, bad = net.run([[*bos, *sequence] for sequence in given]) if given else [], []
    for sequence, ours, theirs in zip(given, found, wanted, strict=True):
        ours = ours[len(bos) :]
        if net.outputs is None:
            right = all(
                abs(Fraction(a) - Fraction(b)) <= Fraction(net.bound) for a, b in zip(ours, theirs, strict=True)
            )
        else:
            right = ours == theirs
        if not right:
            bad.append(f"{sequence!r}: {ours!r}, not {theirs!r}")
    return bad


def changed(net: Any, draw: random.Random) -> Iterator[Any]:
    """Copies of a network with one number changed."""
    for _ in range(CHANGES):
        other = copy.deepcopy(net)
        places = [p for p in (*other.network.parameters(), other.positions) if p.numel()]
        with torch.no_grad():
            flat = draw.choice(places).view(-1)
            at = draw.randrange(len(flat))
            flat[at] = draw.choice([flat[at] * 0.01, flat[at] + 1, -flat[at], flat[at] * 1.001, 0.0, 1e30, 1e-30, 0.5])
        yield other


def attack(seed: int) -> tuple[str, list[str]]:
    """What happens to one program: a word, and what should not have happened."""
    program, domain, dtype = made(seed)
    given, wanted = meant(program, domain)
    bad = [] if not given or rasp.run_many(program, given) == wanted else ["run_many differs from the interpreter"]
    try:
        net = af.compile(program, domain, dtype=dtype)
    except af.PrecisionError:
        return "not proved", bad
    except af.AttnforgeError as error:
        return f"refused ({type(error).__name__})", bad
    bad += wrong(net, given, wanted)
    if rasp.parse(net.program.to_text()) != net.program:
        bad.append("its text reads back as another program")
    if read_program(json.loads(json.dumps(program_json(net.program)))) != net.program:
        bad.append("its file reads back as another program")
    if given and net.outputs is not None:
        marker = [] if domain.bos is None else [domain.bos]
        rows = net.trace([*marker, *given[-1]]).rows
        bad += [f"the trace differs at {row.op}" for row in rows if not row.agrees]
    for other in changed(net, random.Random(seed)):
        try:
            other.attach(other.recertify())
        except af.CertificateError:
            continue
        bad += [f"changed: {text}" for text in wrong(other, given, wanted)]
    return net.certificate.kind, bad


def safely(seed: int) -> tuple[str, list[str]]:
    """`attack`, with any other error than ours as something that should not have happened."""
    try:
        return attack(seed)
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
            word, bad = safely(seed)
            words[word] += 1
            if bad:
                failures.append({"seed": seed, "program": word, "count": len(bad), "first": bad[0][:600]})
                print(json.dumps(failures[-1]), flush=True)
        found["programs"] = {"first": given.seed, "count": given.count, **dict(sorted(words.items()))}
        found["failures"] = failures
        print(json.dumps(found["programs"]), f"{len(failures)} failures")
    if given.entries == [] or (given.entries is None and given.count >= 2000):
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(found.get("failures")) or any(row["wrong"] for row in found.get("entries", ())))


if __name__ == "__main__":
    main()
