"""Rules about token programs and plain transformers alone, with errors from 1e-300 to 1 (docs/kernel.md): what heads
compute is worked out here once more, in thousands of bits, and programs are run on every sequence of a domain."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from flint import arb, ctx, fmpq

import attnforge as af
from attnforge import rasp
from attnforge.kernel.balls import ZERO, NotProved, working
from attnforge.kernel.file import parse
from attnforge.kernel.layers import Layer
from attnforge.kernel.programs.facts import Facts
from attnforge.kernel.programs.language import Domain, Op, Undefined, hit, is_number, reached, read_ops
from attnforge.kernel.programs.prove import DEAD, Column, Head, Prover
from attnforge.kernel.programs.terms import Terms
from attnforge.kernel.rounding import Machine
from attnforge.rasp import aggregate, indices, length, library, select, selector_width, tokens
from attnforge.rasp.network.compiled import CompiledProgram
from attnforge.rasp.network.data import program_json
from attnforge.rasp.network.derivation import derive

SIZES = [1e-300, 1e-100, 1e-30, 1e-10, 1e-4, 1e-1, 1.0]
EXACT = 3000
QUIET = Machine(arb(2) ** -1100, ZERO, arb(2.0**1015))  # rounds next to nothing: nothing else covers an error

PROGRAMS = {
    "map": library.get("hist2").build(), "mean": library.frac_prevs(), "one key": library.reverse(),
    "count": library.hist(), "default": aggregate(select(indices, indices - 1), tokens, default="b"),
    "numbers": selector_width(select(tokens, "a")) * 2 + aggregate(select(tokens, tokens), indices),
}  # fmt: skip
#: By program and kind of column: a part of the bound that is too little for an error that is found.
TIGHT = {
    "map": {"carried": 0.99, "count": 0.99}, "mean": {"aggregate": 0.99}, "one key": {"carried": 0.99, "count": 0.99},
    "count": {"count": 0.99}, "default": {"aggregate": 0.99}, "numbers": {"count": 0.99},
}  # fmt: skip
DOMAIN = rasp.Sequences("ab", 3)


def meaning(ops: list[Op], sequence: tuple[Any, ...]) -> list[Any]:
    """The values of ops at every position of a sequence; of selectors, rows of flags for each query."""
    found: list[Any] = []
    here = range(len(sequence))
    for op in ops:
        given = [found[child] for child in op.children]
        if op.kind == "Tokens":
            found.append(list(sequence))
        elif op.kind == "Indices":
            found.append(list(here))
        elif op.kind == "Constant":
            found.append([op.value for _ in here])
        elif op.kind == "Map":
            assert op.function is not None
            found.append([op.function(*values) for values in zip(*given, strict=True)])
        elif op.kind == "Select":
            assert op.function is not None
            found.append([[hit(op.function, given[0][k], given[1][q]) for k in here] for q in here])
        elif op.kind in ("And", "Or", "Not"):
            rule = {"And": all, "Or": any, "Not": lambda flags: not flags[0]}[op.kind]
            found.append([[rule([one[q][k] for one in given]) for k in here] for q in here])
        elif op.kind == "SelectorWidth":
            found.append([sum(row) for row in given[0]])
        else:
            found.append([_average([given[1][k] for k in here if row[k]], op.value) for row in given[0]])
    return found


def _average(values: list[Any], default: Any) -> Any:
    if not values:
        return default
    if len(set(values)) == 1:
        return values[0]
    if not all(map(is_number, values)):
        raise Undefined
    mean = Fraction(sum(map(Fraction, values))) / len(values)
    return int(mean) if mean.denominator == 1 else mean


def softly(head: Head, rows: list[list[arb]], t: int, shown: int, dead: float) -> list[arb]:
    """What a head writes at a token, whose queries, keys and values are read from rows of the state."""
    table = head.tables

    def read(row: list[arb], third: str) -> list[arb]:
        weights, bias = table[f"W_{third}"], table[f"b_{third}"]
        return [sum((x * arb(w[j]) for x, w in zip(row, weights, strict=True) if w[j]), arb(b))
                for j, b in enumerate(bias)]  # fmt: skip

    query = read(rows[t], "Q")
    seen = rows[:shown] if head.kind != "map" else []
    keys = [*(read(row, "K") for row in seen), *([arb(x) for x in row] for row in table["M_K"])]
    values = [*(read(row, "V") for row in seen), *([arb(x) for x in row] for row in table["M_V"])]
    logits = [sum((a * b for a, b in zip(query, key, strict=True)), ZERO) for key in keys]
    top = max(logits, key=lambda x: x.mid().fmpq())
    powers = [(x - top).exp() if x - top > -dead else ZERO for x in logits]
    total = sum(powers, ZERO)
    means = [sum((p * v[j] for p, v in zip(powers, values, strict=True)), ZERO) / total for j in range(len(values[0]))]
    return [sum((m * arb(row[c]) for m, row in zip(means, table["W_O"], strict=True)), ZERO) for c in head.columns]


@functools.cache
def compiled(name: str) -> tuple[CompiledProgram, Any, Any]:
    net = af.compile(PROGRAMS[name], DOMAIN, dtype=torch.float64)
    return net, parse(net.written()), derive(net)


def layers_of(prover: Prover) -> Iterator[tuple[Layer, list[Head], tuple[Column, ...]]]:
    """The layers of a proof as it goes through them: heads, and what columns mean after it."""
    for number, (stated, words) in enumerate(zip(prover.layout, prover.layers, strict=True)):
        after = tuple(prover._word(data) for data in words["after"])
        scopes = tuple(("memory" if kind == "map" else "tokens", causal) for kind, _, causal in stated["heads"])
        layer = prover._layer(number, len(after), scopes)
        given = zip(stated["heads"], words["heads"], layer.groups, strict=True)
        yield layer, [prover._head(kind, op, group) for (kind, _, _), op, group in given], after


@pytest.mark.parametrize("name", PROGRAMS)
def test_heads_of_programs_err_by_no_more_than_their_lemmas_say(name: str) -> None:
    """K22 to K26: columns off by e, padding as large as it may be, on all sequences; a rule covers that, or refuses."""
    _, saved, chosen = compiled(name)
    draw = random.Random(name)
    ratios: dict[tuple[str, float], arb] = {}
    for e in SIZES:
        with working():
            prover = Prover(saved.header["config"], chosen, saved)
            prover.machine = QUIET
            for layer, heads, after in layers_of(prover):
                prover.state = [Column(c.kind, c.op, c.value, arb(e), c.pad.max(arb(e))) for c in prover.state]
                before = prover.state
                try:
                    found = prover._through(layer, heads, after)
                except NotProved:
                    assert e > 1e-5
                    break
                for kind, true, error in _errors(prover, before, layer, heads, after, found, draw):
                    assert true.is_finite() and true.lower() <= error.upper(), (name, e, kind)
                    share = true / error if error > 0 else ZERO
                    ratios[kind, e] = max(ratios.get((kind, e), ZERO), share, key=lambda x: x.upper().fmpq())
                prover.state = found
    for kind, weak in TIGHT[name].items():
        assert ratios[kind, SIZES[0]] > weak, (kind, "far above the truth")  # that part of the bound is too little


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_read_off_is_right_or_refused(name: str) -> None:
    """K26: columns off by e before the read-out: it names the program's value, or a number that is off by no more."""
    _, saved, chosen = compiled(name)
    draw, seen = random.Random(name), dict.fromkeys(SIZES, "refused")
    for e in SIZES:
        with working():
            prover = Prover(saved.header["config"], chosen, saved)
            prover.machine = QUIET
            for layer, heads, after in layers_of(prover):
                prover.state = prover._through(layer, heads, after)
            prover.state = [Column(c.kind, c.op, c.value, arb(e), c.pad) for c in prover.state]
            last = len(prover.layout)
            layer = prover._layer(last, prover.left[f"network.layers.{last}.S"].shape[1], ())
            try:
                bound = prover._decoded(layer) if prover.outputs is not None else prover._number(layer)
            except NotProved:
                continue
            seen[e] = "proved"
            worst = max((_read_off(prover, layer, draw) for _ in range(3)), key=lambda x: x.upper().fmpq())
            assert worst.lower() <= bound and (prover.outputs is not None or worst > 0.3 * bound or e < 1e-20)
    assert seen[1e-10] == "proved" and (prover.outputs is None or seen[1.0] == "refused")


def _read_off(prover: Prover, layer: Layer, draw: random.Random) -> arb:
    """How wrong the read-out is on any sequence: 1 for another value than the program's."""
    worst = ZERO
    for sequence in DOMAIN:
        meant = meaning(list(prover.facts.ops), sequence)
        for t in range(len(sequence)):
            with ctx.workprec(EXACT):
                row = [arb(prover.meant(c, prover.facts.place(c.op, meant[c.op][t])) if c.op >= 0 else 1)
                       + draw.choice([-1, 1]) * c.error for c in prover.state]  # fmt: skip
                logits = [sum((x * arb(w[j]) for x, w in zip(row, layer.skip, strict=True)), arb(b))
                          for j, b in enumerate(layer.bias)]  # fmt: skip
                value = meant[prover.output][t]
                if prover.outputs is None:
                    off = abs(logits[0] - arb(fmpq(*Fraction(value).as_integer_ratio())))
                else:
                    own = logits[prover.outputs.index(value)]
                    off = arb(int(sum(bool(own > x) for x in logits) < len(logits) - 1))
            worst = max(worst, off, key=lambda x: x.upper().fmpq())
    return worst


def _errors(
    prover: Prover, before: list[Column], layer: Layer, heads: list[Head], after: tuple[Column, ...],
    found: list[Column], draw: random.Random,
) -> Iterator[tuple[str, arb, arb]]:  # fmt: skip
    facts, most = prover.facts, prover.domain.length
    for sequence in DOMAIN:
        try:
            meant = meaning(list(facts.ops), sequence)
        except Undefined:
            continue

        def mean(word: Column, t: int, meant: Any = meant) -> arb:
            return arb(prover.meant(word, facts.place(word.op, meant[word.op][t])) if word.op >= 0 else 1)

        with ctx.workprec(EXACT):
            rows = [[mean(c, t) + draw.choice([-1, 1]) * c.error for c in before] for t in range(len(sequence))]
            rows += [[draw.choice([-1, 0, 1]) * c.pad for c in before] for _ in range(most - len(sequence))]
            for t in range(len(sequence)):
                for c, word in enumerate(after):
                    carried = [j for j in range(len(before)) if layer.skip[j][c]]
                    if carried:
                        j = carried[0]
                        yield "carried", abs(arb(layer.skip[j][c]) * rows[t][j] - mean(word, t)), found[c].error
                for head in heads:
                    shown = t + 1 if head.causal else most
                    written = softly(head, rows, t, shown, DEAD[prover.dtype])
                    for c, value in zip(head.columns, written, strict=True):
                        yield head.kind, abs(value - mean(after[c], t)), found[c].error


# -- what is said of programs ------------------------------------------------------------------------------------------

WHOLE = rasp.Sequences((0, 1), 3)


def facts_of(program: Any) -> Facts:
    ops = reached(read_ops(json.loads(json.dumps(program_json(program)))))
    terms = Terms(Domain(tuple(WHOLE.vocabulary), WHOLE.max_length))
    found = terms.read(ops)
    given = {*terms.asked, *(t for t, op in zip(found, ops, strict=True) if op.kind == "Aggregate")}
    return Facts(ops, terms, found, terms.domain, given)


def same(one: Any, other: Any) -> bool:
    """Whether two programs have one term."""
    terms = Terms(Domain(tuple(WHOLE.vocabulary), WHOLE.max_length))
    first, second = (terms.read(reached(read_ops(json.loads(json.dumps(program_json(p))))))[-1] for p in (one, other))
    return bool(first == second)


def outputs(program: Any) -> list[Any]:
    """The values of a program at all positions of all sequences of the domain."""
    ops = reached(read_ops(json.loads(json.dumps(program_json(program)))))
    return [value for sequence in WHOLE for value in meaning(list(ops), sequence)[-1]]


def scaled(e: float) -> tuple[Any, Any]:
    """Constants of the size of e."""
    return rasp.Constant(Fraction(e)), rasp.Constant(3 * Fraction(e))


@pytest.mark.parametrize("e", SIZES)
def test_terms_are_equal_only_of_what_means_the_same(e: float) -> None:
    """K18: sums and multiples by numbers of every size go through means; numbers that differ by 2^-60 do not agree."""
    c, d = scaled(e)
    near = rasp.Constant(Fraction(e) * (1 + Fraction(1, 2**60)))
    before = select(indices, indices, "<=")
    some = select(tokens, 1) & select(indices, indices, "!=")
    mean_of = functools.partial(aggregate, some, default=0)
    pairs = [
        (aggregate(before, tokens * c + d), aggregate(before, tokens) * c + d),
        (mean_of(tokens * c + indices * d), mean_of(tokens) * c + mean_of(indices) * d),
        (selector_width(~some) * c, (length - selector_width(some)) * c),
    ]  # fmt: skip
    for one, other in pairs:
        assert same(one, other) and outputs(one) == outputs(other)
    for one, other in (
        (aggregate(before, tokens * c + d), aggregate(before, tokens) * near + d),
        (mean_of(tokens * c + d), mean_of(tokens) * c + d),  # nothing may be selected: 0, not d
        (selector_width(~some) * c, (length - selector_width(some)) * near),
    ):
        assert not same(one, other) and outputs(one) != outputs(other)


@pytest.mark.parametrize("e", SIZES)
def test_values_are_in_their_sets(e: float) -> None:
    """K19: values, their span and their combinations, of programs whose numbers are of the size of e."""
    c, d = scaled(e)
    some = select(tokens, 1)
    for program in (tokens * c + d, aggregate(select(indices, indices, "<="), tokens) * c - d, selector_width(some) * c,
                    aggregate(some, indices, default=7) * d):  # fmt: skip
        facts = facts_of(program)
        last, seen = len(facts.ops) - 1, outputs(program)
        most = max(abs(Fraction(x)) for x in seen)
        assert most <= facts.span(last) <= 4 * most
        assert set(seen) <= set(facts.values(last)) and not set(seen) <= set(facts.values(last)[1:])
        joint = facts.joint([0, last])
        assert len(joint) <= len(facts.values(0)) * len(facts.values(last))
        for sequence in WHOLE:
            meant = meaning(list(facts.ops), sequence)
            for a, b in zip(meant[0], meant[last], strict=True) if not facts.ops[0].selects else ():
                assert (facts.place(0, a), facts.place(last, b)) in joint


@pytest.mark.parametrize("e", SIZES)
def test_what_is_said_to_differ_does(e: float) -> None:
    """K20: multiples of an index, with the length and constants of every size, differ at all positions."""
    c, d = scaled(e)
    for program, differs in ((indices * c + length * d + c, True), ((length - 1 - indices) * d, True),
                             (tokens * c, False), (indices * c - indices * c, False)):  # fmt: skip
        facts = facts_of(program)
        ops = [list(row) for row in (meaning(list(facts.ops), s)[-1] for s in WHOLE)]
        assert facts.distinct(len(facts.ops) - 1) == differs
        assert all(len(set(row)) == len(row) for row in ops) == differs
    picked = aggregate(select(indices * c, indices * c, "=="), tokens)
    selector = next(i for i, op in enumerate(facts_of(picked).ops) if op.selects)
    facts = facts_of(picked)
    assert facts.single(selector) and facts.nonempty(selector) and facts.until(selector) in ("", "not later")
    later = facts_of(aggregate(select(indices * c, indices * c + d, "=="), tokens))
    assert not later.nonempty(next(i for i, op in enumerate(later.ops) if op.selects))
