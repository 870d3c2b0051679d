"""Programs and weights that mean no good: refused with our words, or proved and right on every sequence."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

import attnforge as af
from attnforge import rasp
from attnforge.rasp import aggregate, apply, indices, length, library, numerical, select, selector_width, tokens, where
from attnforge.rasp.network.compiled import CompiledProgram, Other


def _random_programs() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "random_programs.py"
    spec = importlib.util.spec_from_file_location("random_programs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOSTILE = _random_programs()


def compiled(program: rasp.SOp, domain: rasp.Sequences, dtype: torch.dtype = torch.float32) -> CompiledProgram:
    net = af.compile(program, domain, dtype=dtype)
    assert isinstance(net, CompiledProgram)
    return net


#: Programs that once went wrong: a predicate nobody asked, thirds in float64, codes nobody wrote, letters among means,
#: a sink beside keys that are never selected, weights on tokens that the program does not read, sums of means beside
#: what they are made of.
KNOWN = (2125, 2254, 4154, 2234, 6090, 1014, 37, 20276, 20352, 900566)


@pytest.mark.parametrize("seeds", [KNOWN, range(20, 27), range(30, 37)], ids=["known", "a", "b"])
def test_random_programs(seeds: Any) -> None:
    """Compiled, compared on every sequence, written and read, traced, changed and proved again."""
    found = [HOSTILE.attack(seed) for seed in seeds]
    assert [bad for _, bad in found if bad] == []
    assert {"exact", "certified"} <= {word for word, _ in found}


def test_every_stored_number_changed_alone() -> None:
    for name in ("length", "frac_prevs"):
        counts = HOSTILE.entries(name, 2)
        assert counts["changes"] > 50 and counts["refused"] > counts["changes"] // 3 and counts["wrong"] == 0


def _fold(step: Callable[[Any, int], Any], count: int, first: Any) -> Any:
    return functools.reduce(step, range(count), first)


def test_odd_programs() -> None:
    """Every column within its error in three orders of summation, several outputs, casts, tables that cancel."""
    found = [HOSTILE.attack_odd(seed) for seed in (1015, 1023, 1032, 1034, 1056, 951816)]
    assert [bad for _, bad in found if bad] == []
    assert {"exact", "certified", "several: exact", "several: certified"} <= {word for word, _ in found}


def nearly_a_rank(slope: Any, constant: Any) -> rasp.SOp:
    """How many are smaller, and a multiple of how many equal ones came before: the rank for the slope 1 alone."""
    before = selector_width(select(tokens, tokens) & library.so_far)
    return selector_width(select(tokens, tokens, rasp.lt)) + before * slope + constant


def split(group: Any, by: float) -> None:
    """Two values for every value, one larger by a constant and one smaller, whose sum is what it was."""
    with torch.no_grad():
        for name in ("M_V", "W_V", "b_V"):
            old = getattr(group, name)
            if name == "b_V" and old is None:
                old = torch.zeros(1, group.W_O.shape[1])
            if old is not None:
                more = torch.full_like(old, 0.0 if name == "W_V" else by)
                setattr(group, name, torch.nn.Parameter(torch.cat([old + more, -more], -1)))
        group.W_O = torch.nn.Parameter(torch.cat([group.W_O, group.W_O], 1))


@pytest.mark.parametrize(
    ("program", "by"),
    [(aggregate(library.so_far, tokens), 2.0**20), (numerical(2 * selector_width(select(tokens, tokens))), 2.0**-15)],
    ids=["a mean", "a count, times 2^40"],
)
def test_values_that_cancel_each_other_are_rounded_before(program: rasp.SOp, by: float) -> None:
    """Sums of large numbers are rounded, though each is exact and another coordinate takes it away again."""
    domain = rasp.Sequences([0, 1], 10)
    net, (given, wanted) = compiled(program, domain), HOSTILE.meant(program, domain)
    before = net.bound
    assert before is not None and before < 1e-4
    split(next(net.network.groups()), by)
    net.attach(net.recertify())
    pairs = zip(net.run(given), wanted, strict=True)
    worst = max(abs(a - float(b)) for f, w in pairs for a, b in zip(f, w, strict=True))
    assert net.bound is not None and before < worst <= net.bound


def test_a_mean_is_compared_with_eps_where_one_is_given() -> None:
    mean = aggregate(library.so_far, tokens.equals("a"))
    assert af.compile(mean, ab, eps=1e-3).bound < 1e-3 and af.compile(library.sort(), ab, eps=1e-9).bound == 0
    with pytest.raises(af.PrecisionError, match="eps = 1e-12 was asked for"):
        af.compile(mean, ab, eps=1e-12)
    with pytest.raises(af.ArgumentError, match="neither rtol nor strict"):
        af.compile(mean, ab, rtol=1e-3)


fraction = numerical(aggregate(library.so_far, tokens.equals("a")))
nothing = select(tokens, tokens, rasp.false)
ab = rasp.Sequences("ab", 3)
RIGHT: dict[str, tuple[rasp.SOp, rasp.Sequences]] = {
    "tokens that look alike": (
        selector_width(select(tokens, tokens)), rasp.Sequences([1, "1", None, (1,), 0.5, ()], 2),
    ),
    "letters of all kinds": (library.reverse(), rasp.Sequences(["é", "e\u0301", "\U0001f600", "\u202e", "\x00"], 2)),
    "a default of another kind": (aggregate(select(indices, indices - 1), tokens, default=("x", None)), ab),
    "a number among letters": (aggregate(select(indices, indices - 1), tokens, default=0), ab),
    "None among numbers": (selector_width(select(aggregate(select(indices, indices - 1), indices), indices)), ab),
    "what agrees only": (aggregate(select(tokens, tokens, rasp.true), tokens), rasp.Sequences([1, "a"], 3)),
    "whole numbers and halves": (aggregate(library.everywhere, tokens), rasp.Sequences([1, 2.5, -3], 3)),
    "not nothing": (selector_width(~nothing) + aggregate(~nothing, indices), ab),
    "nothing or nothing": (aggregate(nothing | nothing & ~nothing, tokens, default="z"), ab),
    "one position": (aggregate(select(indices, indices, rasp.lt), indices, default=5), rasp.Sequences("ab", 1)),
    "causal, with a marker": (
        selector_width(select(tokens, tokens) & library.so_far), rasp.Sequences("ab", 3, causal=True, bos=0),
    ),
    "causal, through a map": (
        aggregate(select(indices, apply(lambda i: max(i - 1, 0), indices)), tokens),
        rasp.Sequences("ab", 3, causal=True),
    ),
    "a mean at its threshold": (fraction > Fraction(1, 3), rasp.Sequences("ab", 6)),
    "a mean beside its threshold": (fraction > 1 / 3, rasp.Sequences("ab", 6)),
    "a mean that is a threshold": (fraction.equals(Fraction(2, 5)), rasp.Sequences("ab", 6)),
    "means of means": (aggregate(library.so_far, fraction), rasp.Sequences("ab", 4)),
    "numbers closer than digits": (apply({"a": 1, "b": Fraction(10**30 + 1, 10**30)}, tokens) > 1, ab),
    "large numbers": (indices * 10**40, ab),
    "forty alternatives": (selector_width(_fold(lambda a, i: a | select(indices, i), 40, nothing)), ab),
    "forty exceptions": (selector_width(_fold(lambda a, i: a & ~select(indices, i + 1), 40, ~nothing)), ab),
    "nearly a rank": (
        aggregate(select(nearly_a_rank(1.5, -1.5), indices), tokens, default=7), rasp.Sequences([0, 1], 4),
    ),
    "a rank from a half": (
        aggregate(select(nearly_a_rank(1, -0.5), indices), tokens, default=7), rasp.Sequences([0, 1], 4),
    ),
    "a long sum": (_fold(lambda a, _: a + 1, 600, indices), ab),
    "a high tower": (_fold(lambda a, _: where(a > 1, a, a), 200, indices), ab),
    "a name with signs": (tokens.equals("a").named("a'b\"{}<script>\\ ü"), ab),
    "a name of the language": (tokens.equals("a").named("str") + tokens.equals("b").named("select"), ab),
    "one function, two arities": (apply(len_of := lambda *v: len(v), tokens, indices) + apply(len_of, tokens), ab),
}  # fmt: skip


@pytest.mark.parametrize("name", list(RIGHT))
def test_odd_programs_are_right(name: str) -> None:
    program, domain = RIGHT[name]
    net = compiled(program, domain)
    given, wanted = HOSTILE.meant(program, domain)
    assert given and HOSTILE.wrong(net, given, wanted) == [] and rasp.run_many(program, given) == wanted
    assert rasp.parse(net.program.to_text()) == net.program


def _never(*values: object) -> object:
    raise ValueError("boom")


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a function that raises": (lambda: af.compile(apply(_never, tokens), ab), "_never of 'a' raises ValueError"),
    "a function that raises, by the text of its op": (
        lambda: af.compile(selector_width(select(indices, indices, lambda k, q: 1 / (k - 1) > 0)), ab),
        "the op 'select\\(indices, indices, <lambda>\\)' cannot be computed: <lambda> of 1, 0 raises ZeroDivisionError",
    ),
    "a lambda of a text": (
        lambda: af.compile("apply(lambda t: t + 1, tokens)", ab),
        "the op 'apply\\(lambda t: t \\+ 1, tokens\\)' cannot be computed: lambda t: t \\+ 1 of 'a' raises TypeError",
    ),
    "a box": (lambda: af.compile(tokens, af.Box(x=(0, 1)), eps=1e-3), "a token program is compiled for sequences"),
    "without end": (lambda: af.compile(apply(lambda t: (f := lambda: f())(), tokens), ab), "RecursionError"),
    "no truth": (lambda: af.compile(selector_width(select(tokens, tokens, lambda k, q: 2)), ab), "gave 2 for the key"),
    "no number": (lambda: af.compile(apply(lambda t: math.nan, tokens), ab), "finite numbers, got nan"),
    "a list": (lambda: af.compile(apply(lambda t: [t], tokens), ab), "write a tuple"),
    "too many pairs": (
        lambda: af.compile(selector_width(select(tokens, tokens, lambda k, q: k < q)), rasp.Sequences(range(600), 2)),
        "would be asked for 360000 pairs, and the limit is",
    ),
    "too long a text": (lambda: af.compile(_fold(lambda a, _: a + a, 14, tokens), ab), "at most 4096 characters"),
    "one is True": (lambda: rasp.Sequences([1, True], 2), "1 twice"),
    "one is 1.0": (lambda: rasp.Sequences([1.0, 1], 2), "1 twice"),
    "not a number": (lambda: rasp.Sequences([1, math.nan], 2), "finite numbers, got nan"),
    "too many tokens": (lambda: rasp.Sequences(itertools.count(), 2), "more than 65536"),
    "letters in a mean": (
        lambda: af.compile(aggregate(library.everywhere, tokens), rasp.Sequences([1, 2, "a"], 3)), "may also be 'a'",
    ),
    "a default that is no number": (
        lambda: af.compile(aggregate(library.earlier, indices, default="none"), ab), "give it a number for default",
    ),
    "an order of all things": (
        lambda: af.compile(selector_width(select(tokens, tokens, rasp.lt)), rasp.Sequences([1, "1"], 2)),
        "lt of '1', 1",
    ),
    "later tokens": (
        lambda: af.compile(aggregate(library.later, tokens.equals("a"), 0), rasp.Sequences("ab", 3, causal=True)),
        "may look at later tokens",
    ),
    "a line in a name": (lambda: tokens.named("a\nb"), "a name is a line"),
    "numbers that are one in float64": (
        lambda: af.compile(apply(str, aggregate(library.so_far, tokens)), rasp.Sequences([2**53, 2**53 + 1], 6)),
        "has the values 9007199254740992 and 54043195528445953/6, which a map tells apart and no float64 does",
    ),
    "numbers that are too large for a table": (
        lambda: af.compile(_fold(lambda a, i: a * (indices + i), 40, rasp.Constant(1)), rasp.Sequences("ab", 60)),
        "'map: .*' has numbers that are too large for float32",
    ),
    "too many combinations to be numbered": (
        lambda: af.compile(selector_width(_fold(lambda a, i: a | select(tokens + indices, indices + i), 12, nothing)),
                           rasp.Sequences(range(30), 60)),
        "too many values to number their combinations",
    ),
    "half a character": (lambda: rasp.Sequences(["\ud800"], 2), "half a character"),
    "a default that is no constant": (lambda: aggregate(library.earlier, tokens, default=tokens), "the default of an"),
    "an index of an op": (lambda: tokens[0], "is not a list: aggregate\\(select\\(indices, 3\\), op\\)"),
    "a long text called often": (
        lambda: af.compile(f"apply(lambda a, b: max({'a, ' * 5000}b), indices, tokens)",
                           rasp.Sequences(range(100), 50)),
        "^the op .{0,2100}would be asked for 5000 combinations of values, and the limit is",
    ),
    "too large a number for a read-out": (
        lambda: af.compile(numerical(tokens + 1), rasp.Sequences([10**200, 1], 3)),
        r"the read-out of 'numerical\(tokens \+ 1\)' has numbers that are too large for float32",
    ),
    "too large a number": (lambda: af.compile(numerical(length * 1e37), rasp.Sequences("ab", 9)), "overflow"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_mistakes_are_told(name: str) -> None:
    ask, words = REFUSED[name]
    with pytest.raises(af.AttnforgeError, match=words):
        ask()


@pytest.mark.parametrize(("name", "by"), [("reverse", 1e34), ("tomita4", 1e36), ("reverse", 1e-30)])
def test_scaled_weights_do_not_overflow_unseen(name: str, by: float) -> None:
    """Logits of infinity are NaN, and no margin is large enough for that."""
    listed = library.get(name)
    domain = listed.domain(3)
    program = listed.program(domain)
    net, (given, wanted) = compiled(program, domain), HOSTILE.meant(program, domain)
    for tensor in (*net.network.state_dict().values(), net.positions):
        old = tensor.clone()
        tensor.mul_(by)
        try:
            net.attach(net.recertify())
        except af.CertificateError:
            pass
        else:
            assert HOSTILE.wrong(net, given, wanted) == []
        tensor.copy_(old)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-44, 1e-30, 1 / 3, 1e20])
def test_numbers_of_any_size_are_within_their_bound(size: float, dtype: torch.dtype) -> None:
    domain = rasp.Sequences([Fraction(size) / 3, 0, Fraction(size) * 7], 4)
    for program in (numerical(tokens), aggregate(library.so_far, tokens), aggregate(library.so_far, tokens) / 3 + 1):
        net, (given, wanted) = compiled(program, domain, dtype), HOSTILE.meant(program, domain)
        assert HOSTILE.wrong(net, given, wanted) == []


def test_a_trace_says_what_the_network_does_not_keep() -> None:
    """Of a count that is only compared with 1 no other value has a column."""
    once = select(selector_width(select(tokens, tokens)), tokens.equals("a"), rasp.ne)
    net = compiled(aggregate(once & library.so_far, tokens.equals("a"), default=0) > 0, rasp.Sequences("abc", 6))
    trace = net.trace("aabbbc")
    assert trace.agrees
    others = [value for row in trace.rows for value in row.network if isinstance(value, Other)]
    assert others and "other" in str(trace) and all(value.kept == {1} for value in others)


def test_large_tables_have_short_names() -> None:
    op = apply({i: i * 7919 % 5003 for i in range(5000)}, tokens)
    assert op.label == "'apply({5000 rows}, tokens)'" and rasp.parse(op.to_text()) == op
