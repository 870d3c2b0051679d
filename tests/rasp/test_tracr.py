"""Programs of Tracr's shape are read and mean what Tracr's evaluator says."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import pytest

import attnforge as af
import tracr_shapes as t
from attnforge.errors import ArgumentError, UnsupportedOperation
from attnforge.rasp import Aggregate, Sequences, Table, as_program, eq, from_tracr, library, select, tokens, walk

PROGRAMS: dict[str, tuple[Any, Any, int]] = {
    "length": (t.make_length(), "ab", 5),
    "primitive length": (t.length - t.indices, "ab", 5),
    "reverse": (t.make_reverse(), "abc", 5),
    "hist": (t.make_hist(), "abc", 5),
    "sort": (t.make_sort(t.tokens), (1, 2, 3), 5),
    "sort_freq": (t.make_sort(t.Map(lambda x: -x, t.make_hist())), "abc", 5),
    "frac_prevs": (t.make_frac_prevs(t.tokens == "a"), "ab", 6),
    "pair_balance": (t.make_pair_balance("(", ")"), "()a", 5),
    "shuffle_dyck2": (t.make_shuffle_dyck(["()", "{}"]), "(){}", 4),
    "detect_pattern": (t.detect_pattern("ab"), "abc", 5),
    "full": (t.SequenceMap(lambda x, y: x + y, t.tokens, t.Full("!")), "ab", 3),
    "constant": (t.SequenceMap(lambda x, y: (x, y), t.tokens, t.ConstantSOp([3, 1, 2])), "ab", 3),
    "selectors": (
        t.SelectorWidth(
            t.SelectorOr(
                t.SelectorNot(t.Select(t.tokens, t.tokens, t.Comparison.GT)),
                t.SelectorAnd(t.Select(t.indices, t.tokens, lambda k, q: k == ord(q) - 97), t.ConstantSelector(
                    [[(i + j) % 2 == 0 for i in range(4)] for j in range(4)])),
            )
        ), "abc", 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_meaning_is_that_of_tracr(name: str) -> None:
    expr, vocabulary, most = PROGRAMS[name]
    program = from_tracr(expr)
    exact = name in ("constant", "selectors")  # these are tied to one length
    for n in range(most if exact else 1, most + 1):
        for sequence in itertools.product(vocabulary, repeat=n):
            got, wanted = program(sequence), t.evaluate(expr, sequence)
            assert len(got) == len(wanted)
            for a, b in zip(got, wanted, strict=True):
                assert a == b or (isinstance(b, float) and abs(a - b) < 1e-12), (sequence, got, wanted)  # type: ignore[operator]


def test_names_marks_and_operators_are_kept() -> None:
    program = from_tracr(t.make_pair_balance("(", ")"))
    assert program.name == "pair_balance" and program.mark == "numerical"
    assert {node.name for node in walk(program) if isinstance(node, Aggregate)} == {"frac_prevs"}
    assert from_tracr(t.make_hist()) == library.hist()
    assert [node.name for node in walk(from_tracr(t.make_reverse()))][-1] == "reverse"
    assert select(tokens, tokens, eq) in walk(from_tracr(t.make_hist()))


def test_none_is_not_mapped() -> None:
    expr = t.Map(lambda x: x.upper(), t.shift_by(1, t.tokens))
    assert from_tracr(expr)("ab") == [None, "A"]


def test_linear_maps_of_none_are_none() -> None:
    shifted = t.Aggregate(t.Select(t.indices, t.indices - 1, t.Comparison.EQ), t.indices)
    expr = t.LinearSequenceMap(shifted, t.indices, 2, -1)
    program = from_tracr(expr)
    assert program("abc") == t.evaluate(expr, "abc") == [None, -1, 0]
    net = af.compile(expr, Sequences("ab", 4))
    assert net.certificate.kind == "exact" and net("abab") == [None, -1, 0, 1]


def test_as_program_takes_all_three() -> None:
    assert (
        as_program(t.make_hist()) == as_program(library.hist()) == as_program("selector_width(select(tokens, tokens))")
    )
    with pytest.raises(ArgumentError, match="a program is"):
        as_program(3)


def test_mistakes() -> None:
    class Novelty(t.SOp):
        pass

    with pytest.raises(UnsupportedOperation, match="holds Novelty, which is none of Aggregate"):
        from_tracr(t.SelectorWidth(t.Select(Novelty(), t.tokens, t.Comparison.EQ)))
    with pytest.raises(ArgumentError, match="got a selector of Tracr"):
        from_tracr(t.Select(t.tokens, t.tokens, t.Comparison.EQ))
    with pytest.raises(ArgumentError, match="a program of Tracr is expected, got str"):
        from_tracr("tokens")
    loop = t.Map(lambda x: x, t.tokens)
    loop.inner = loop
    with pytest.raises(ArgumentError, match="never ends: Map holds itself"):
        from_tracr(loop)


def test_table_of_a_constant_says_where_it_ends() -> None:
    program = from_tracr(t.ConstantSOp([5, 6]))
    assert isinstance(program.function, Table)  # type: ignore[attr-defined]
    assert program("ab") == [5, 6]
    with pytest.raises(ValueError, match="the table has no row for 2"):
        program("abc")


@pytest.mark.parametrize("name", ["length", "reverse", "hist", "sort", "sort_freq", "shuffle_dyck2", "detect_pattern"])
def test_tracr_programs_compile_unchanged(name: str) -> None:
    expr, vocabulary, _ = PROGRAMS[name]
    domain = Sequences(vocabulary, 3)
    net = af.compile(expr, domain)
    assert net.certificate.kind == "exact"
    for sequence in domain:
        assert net(list(sequence)) == t.evaluate(expr, sequence), sequence


@pytest.mark.parametrize("name", ["frac_prevs", "pair_balance"])
def test_numerical_tracr_programs_compile_with_a_bound(name: str) -> None:
    expr, vocabulary, _ = PROGRAMS[name]
    domain = Sequences(vocabulary, 4)
    net = af.compile(expr, domain)
    assert net.certificate.kind == "certified" and net.bound < 1e-5
    for sequence in domain:
        exact = from_tracr(expr)(sequence)
        assert max(abs(Fraction(a) - b) for a, b in zip(net(list(sequence)), exact, strict=True)) <= net.bound
