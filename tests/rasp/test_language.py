"""The language of token programs: meaning, equality, domains, and what mistakes are told."""

from __future__ import annotations

import copy
import operator
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnforge as af
from attnforge import rasp
from attnforge.errors import ArgumentError, DomainError, UnsupportedOperation
from attnforge.rasp import (
    Aggregate,
    Constant,
    Map,
    Node,
    Select,
    Sequences,
    SOp,
    Table,
    aggregate,
    apply,
    categorical,
    eq,
    evaluate,
    geq,
    gt,
    indices,
    length,
    leq,
    lt,
    ne,
    numerical,
    run_many,
    select,
    selector_width,
    tokens,
    true,
    walk,
    where,
)
from attnforge.rasp.values import canonical


@pytest.mark.parametrize(
    ("predicate", "row"),
    [(eq, [0, 1, 0]), (ne, [1, 0, 1]), (lt, [1, 0, 0]), (leq, [1, 1, 0]), (gt, [0, 0, 1]), (geq, [0, 1, 1]),
     (true, [1, 1, 1]), ("<", [1, 0, 0]), ("==", [0, 1, 0]), (operator.ge, [0, 1, 1]), (lambda k, q: k > q, [0, 0, 1])],
)  # fmt: skip
def test_the_predicate_is_asked_for_key_and_query(predicate: Any, row: list[int]) -> None:
    assert select(indices, indices, predicate)("abc")[1] == [bool(hit) for hit in row]
    assert select(indices, indices, predicate).at(0, 1) == bool(row[0])


def test_selectors_combine() -> None:
    early, same = select(indices, indices, lt), select(tokens, tokens, eq)
    assert (early & same)("aba")[2] == [True, False, False]
    assert (early | same)("aba")[0] == [True, False, True]
    assert (~same)("aba")[0] == [False, True, False]


def test_an_aggregate_has_four_rules() -> None:
    means = aggregate(select(indices, indices, leq), tokens, default=9)
    assert means([1, 2, 6]) == [1, Fraction(3, 2), 3], "the mean of numbers, exact"
    assert aggregate(select(indices, 7, eq), tokens, default="-")("ab") == ["-", "-"], "the default for nothing"
    assert aggregate(select(tokens, tokens, eq), tokens)("aba") == ["a", "b", "a"], "equal values need no mean"
    assert aggregate(select(tokens, "x", eq), tokens)("ab") == [None, None], "the default's default is None"
    with pytest.raises(
        DomainError, match=r"the op 'mix' selects 2 values that differ .* \('a', 1\), which have no mean"
    ):
        aggregate(select(indices, indices, true), tokens).named("mix")(["a", 1])
    with pytest.raises(DomainError, match=r"\(None, 1\)"):
        aggregate(select(indices, indices, true), tokens)([None, 1])


def test_numbers_are_exact() -> None:
    third = aggregate(select(indices, indices, true), tokens)
    assert third([0, 0, 1]) == [Fraction(1, 3)] * 3
    assert (third * 3)([0, 0, 1]) == [1, 1, 1]
    assert (tokens / 3)([1, 3]) == [Fraction(1, 3), 1]
    tenths = aggregate(select(indices, indices, true), tokens)([0.1, 0.2])[0]
    assert tenths == (Fraction(0.1) + Fraction(0.2)) / 2


@pytest.mark.parametrize("value", [True, 1.0, np.int64(1), np.bool_(True), Fraction(2, 2), np.float32(1)])
def test_equal_values_have_one_form(value: object) -> None:
    assert type(canonical(value)) is int and canonical(value) == 1
    assert apply(str, Constant(value))("a") == ["1"], "no function can tell them apart"
    assert Constant(value) == Constant(1)


@pytest.mark.parametrize("value", [[1], {"a"}, float("nan"), float("inf"), 1j, b"a", object(), 2**5000, "a" * 5000])
def test_what_is_no_value_is_refused(value: object) -> None:
    with pytest.raises(ArgumentError, match=r"value|number|string"):
        canonical(value)
    with pytest.raises(DomainError, match="the op 'odd' has no value for 'a'"):
        apply(lambda x: value, tokens).named("odd")("a")


def test_values_cannot_explode() -> None:
    program: SOp = tokens
    for _ in range(60):
        program = apply(lambda x: (x, x), program)
    with pytest.raises(DomainError, match="a tuple has at most"):
        program("a")
    number: SOp = Constant(3)
    for _ in range(60):
        number = number * number
    with pytest.raises(DomainError, match="at most 4096 bits"):
        number("a")
    with pytest.raises(DomainError, match="raises OverflowError"):
        (Constant(10) ** 10**9)("a")


def test_operators_are_elementwise() -> None:
    x, y = tokens, indices
    s = [5, 3, 4]
    assert (x + y)(s) == [5, 4, 6] and (10 - x)(s) == [5, 7, 6] and (x * 2)(s) == (2 * x)(s) == [10, 6, 8]
    assert (x // 2)(s) == [2, 1, 2] and (x % 2)(s) == [1, 1, 0] and (2**y)(s) == [1, 2, 4] and (-x)(s) == [-5, -3, -4]
    assert (x < 4)(s) == [0, 1, 0] and (x >= 4)(s) == [1, 0, 1] and (x > y)(s) == [1, 1, 1] and (x >= 5)(s) == [1, 0, 0]
    assert ((x > 3) & (y > 0))(s) == [0, 0, 1] and ((x > 4) | (y > 1))(s) == [1, 0, 1] and (~(x > 4))(s) == [0, 1, 1]
    assert x.equals(y + 2)(s) == [0, 1, 1] and x.differs(3)(s) == [1, 0, 1] and abs(y - 1)(s) == [1, 0, 1]
    assert apply(min, x, 4)(s) == [4, 3, 4] and where(y.equals(0), "first", x)(s) == ["first", 3, 4]
    assert apply(lambda a, b, c: (a, b, c), x, y, 7)(s)[1] == (3, 1, 7)
    assert (6 & Constant(1))("a") == [1], "logical, not of bits"


def test_programs_compare_by_structure() -> None:
    def make() -> SOp:
        return aggregate(select(indices, length - 1 - indices, eq), tokens)

    assert make() == make() and hash(make()) == hash(make()) and make() is not make()
    assert make() == make().named("reverse"), "names do not count"
    assert numerical(make()) != make() and numerical(tokens) != tokens, "marks do"
    assert categorical(numerical(make())) == categorical(make())
    assert make() != aggregate(select(indices, length - 1 - indices, eq), tokens, default="")
    assert select(tokens, indices, eq) != select(indices, tokens, eq)
    assert apply(operator.add, tokens, 1) == tokens + 1, "Python's operators are those of the language"
    one, two = (lambda x: x), (lambda x: x)
    assert apply(one, tokens) == apply(one, tokens) != apply(two, tokens), "other functions compare by identity"
    assert apply({"a": 1, "b": 2}, tokens) == apply({"b": 2.0, "a": True}, tokens)
    assert tokens != 3 and (tokens == "tokens") is False
    assert {make(): 1}[make()] == 1


def test_programs_are_frozen_and_travel() -> None:
    program = (tokens.equals("a") & (indices > 1)).named("found")
    with pytest.raises(AttributeError):
        program.name = "other"  # type: ignore[misc]
    for other in (pickle.loads(pickle.dumps(program)), copy.deepcopy(program)):
        assert other == program and hash(other) == hash(program) and other.name == "found"


def test_shared_parts_cost_once() -> None:
    def tower() -> SOp:
        op: SOp = indices
        for _ in range(3000):
            op = where(op > 1, op, op)
        return op

    a, b = tower(), tower()
    assert a == b and len(walk(a)) == 6002
    assert a("abc") == [0, 1, 2] and run_many(a, ["abc"]) == [[0, 1, 2]]
    assert len(repr(a)) < 5000
    order = {node: i for i, node in enumerate(walk(a))}
    assert all(order[child] < order[node] for node in order for child in node.children)


def test_evaluate_shows_every_op() -> None:
    same = select(tokens, tokens, eq)
    found = evaluate(selector_width(same) + 1, "aba")
    assert found[same] == ((True, False, True), (False, True, False), (True, False, True))
    assert found[selector_width(same)] == (2, 1, 2) and len(found) == 5


def test_repr_is_the_text_of_the_op() -> None:
    back = (length - 1 - indices).named("back")
    assert repr(aggregate(select(indices, back, eq), tokens, default=0)) == (
        "aggregate(select(indices, back, eq), tokens, default=0)"
    )
    assert repr(2 * (indices + 1) ** 2 - -indices) == "2 * (indices + 1) ** 2 - -indices"
    assert repr((indices < 2) & ~(indices > 0)) == "(indices < 2) & ~(indices > 0)"
    assert repr(numerical(tokens.equals("a"))) == "numerical(tokens == 'a')"
    assert repr(length) == "length"


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: aggregate(tokens, tokens), "must be a selector, made by rasp.select.*got the sequence op 'tokens'"),
        (lambda: tokens + select(tokens, tokens), "must be a sequence op, got the selector 'select"),
        (lambda: select(tokens, tokens) & tokens, "either side of And must be a selector"),
        (lambda: ~select(tokens, tokens) | 3, "either side of Or must be a selector.*got 3"),
        (lambda: selector_width(length), "what a selector_width counts must be a selector"),
        (lambda: tokens - [1], r"a sequence op or a constant.*list \[1\]; write a tuple"),
        (lambda: tokens + (lambda x: x), "got a function; write rasp.apply"),
        (lambda: apply(tokens, tokens), "must be a function of values, got tokens"),
        (lambda: apply(min, tokens), "takes 2 value.*and 1 come"),
        (lambda: apply(len), "a tuple of one or more sequence ops"),
        (lambda: Map(len, tokens), "a tuple of one or more sequence ops"),
        (lambda: select(tokens, tokens, "~"), "predicate of a select must be a function of values, got '~'"),
        (lambda: bool(tokens < 3), "no truth value of its own: write &"),
        (lambda: 0 < indices < 3, "no chained comparison"),
        (lambda: list(tokens), "is not a list; call it with a sequence"),
        (lambda: select(tokens, tokens) + 1, "the selector 'select.* is no sequence of values.*selector_width"),
        (lambda: select(tokens, tokens) > 2, "is no sequence of values"),
        (lambda: list(select(tokens, tokens)), "is no sequence of values"),
        (lambda: tokens.named("two\nlines"), "a name is a line"),
        (lambda: apply({}, tokens), "a table needs rows of 1 argument"),
        (lambda: apply({1: 2}, tokens, tokens), "a table needs rows of 2 argument"),
        (lambda: tokens(3), "runs on a sequence of tokens, got int"),
    ],
)  # fmt: skip
def test_mistakes_in_building(build: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        build()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (apply(lambda x: 1 // x, indices).named("inverse"), "'inverse' cannot be computed: .*of 0 raises ZeroDivision"),
        (tokens < 3, r"'tokens < 3' cannot be computed: lt of 'a', 3 raises TypeError"),
        (selector_width(select(tokens, indices, lt).named("less")), "the op 'less' .* lt of 'a', 0 raises TypeError"),
        (
            selector_width(select(tokens, tokens, lambda k, q: k)),
            "True or False .* gave 'a' for the key 'a' and the query",
        ),
        (apply({"b": 1}, tokens), "the table has no row for 'a'"),
        (tokens * 2, "both must be numbers"),
    ],
)
def test_mistakes_in_running(program: SOp, words: str) -> None:
    with pytest.raises(DomainError, match=words):
        program("a")
    with pytest.raises(DomainError, match=words):
        run_many(program, ["a"])


def test_empty_sequences_are_refused() -> None:
    with pytest.raises(DomainError, match="empty"):
        tokens("")
    with pytest.raises(DomainError, match="empty"):
        run_many(tokens, ["a", ""])
    with pytest.raises(ArgumentError, match="got Select"):
        run_many(select(tokens, tokens), ["a"])  # type: ignore[arg-type]


def test_a_text_needs_functions_that_have_one() -> None:
    with pytest.raises(UnsupportedOperation, match="the op 'odd' uses the Python function <lambda>, which has no text"):
        (apply(lambda x: x, tokens).named("odd") + 1).to_text()


# Random programs: small trees over whole numbers, so that every op is defined.

leaf = st.sampled_from([tokens, indices, length, Constant(1), Constant(2)])


def grown(parts: st.SearchStrategy[SOp]) -> st.SearchStrategy[SOp]:
    selectors = st.builds(Select, parts, parts, st.sampled_from([eq, ne, lt, leq, true]))
    selectors = selectors | st.builds(lambda a, b: a & b | ~a, selectors, selectors)
    return st.one_of(
        st.builds(lambda a, b: a + b, parts, parts),
        st.builds(lambda a, b: where(a < b, a - b, 3 * a), parts, parts),
        st.builds(selector_width, selectors),
        st.builds(Aggregate, selectors, parts, st.sampled_from([0, 5])),
    )


programs = st.recursive(leaf, grown, max_leaves=6)


@given(programs, st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=4))
def test_both_interpreters_agree(program: SOp, sequences: list[list[int]]) -> None:
    assert run_many(program, sequences) == [program(sequence) for sequence in sequences]


@given(programs)
def test_text_round_trips(program: SOp) -> None:
    again = rasp.parse(program.to_text())
    assert again == program and again.to_text() == program.to_text()


# Domains.


def test_a_domain_lists_its_sequences() -> None:
    domain = Sequences("ab", 3)
    assert domain.size == len(list(domain)) == 14 and all(s in domain for s in domain)
    assert Sequences([7], 5).size == 5
    assert (
        domain == Sequences(["a", "b"], 3) and hash(domain) == hash(Sequences("ab", 3)) and domain != Sequences("ba", 3)
    )
    assert repr(domain) == "Sequences(vocabulary=('a', 'b'), max_length=3, causal=False, bos=None)"
    assert domain.sample(5, seed=3) == domain.sample(5, seed=3) and all(s in domain for s in domain.sample(50))
    assert pickle.loads(pickle.dumps(domain)) == domain


def test_a_corpus_gives_its_domain() -> None:
    corpus = [["the", "cat"], ["a", "cat", "sat"], ["the"]]
    domain = Sequences.from_corpus(iter(corpus))
    assert domain == Sequences(["a", "cat", "sat", "the"], 3) == Sequences.from_corpus(corpus[::-1])
    assert all(sequence in domain for sequence in corpus)
    marked = Sequences.from_corpus(["^ab", "^b"], causal=True, bos="^")
    assert marked == Sequences("ab", 2, causal=True, bos="^")
    wrong: list[tuple[Any, type[Exception], str]] = [
        ("abc", ArgumentError, "a list of sequences of tokens, got str"), (3, ArgumentError, "got int"),
        ([], ArgumentError, "the corpus is empty"), (["ab", 3], ArgumentError, "sequence 1 of the corpus.*got int"),
        (["ab", ""], DomainError, "sequence 1 of the corpus has no tokens"),
        ([["a", ["b"]]], ArgumentError, "token 1 of sequence 0 of the corpus: .*list"),
        ([range(10**9)], DomainError, "a sequence has 1 to 65536"),
        (([i] for i in range(10**9)), ArgumentError, "more than 65536 different tokens, at sequence 65536"),
    ]  # fmt: skip
    for corpus_given, error, words in wrong:
        with pytest.raises(error, match=words):
            Sequences.from_corpus(corpus_given)
    with pytest.raises(DomainError, match="sequence 1 of the corpus does not begin with bos = '\\^': 'b'"):
        Sequences.from_corpus(["^a", "b"], bos="^")


def test_bos_stands_before_every_sequence() -> None:
    domain = Sequences("ab", 2, bos="BOS")
    assert domain.check(["BOS", "a", "b"]) == ("a", "b") and domain.size == 6
    with pytest.raises(DomainError, match="begin with bos = 'BOS', got 'a'"):
        domain.check(["a"])
    with pytest.raises(DomainError, match="the sequence is empty"):
        domain.check(["BOS"])
    with pytest.raises(ArgumentError, match="bos is 'a', which is also in the vocabulary"):
        Sequences("ab", 2, bos="a")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("aba", 3), "the vocabulary has 'a' twice"),
        (([1, True], 3), "the vocabulary has 1 twice"),
        (([None, "a", None], 3), "the vocabulary has None twice"),
        (("", 3), "the vocabulary is empty"),
        (([["a"]], 3), "token 0 of the vocabulary: .*list"),
        ((3, 3), "a string or a list of tokens, got int"),
        ((range(10**9), 3), "more than 65536 tokens"),
        (("ab", 0), "max_length must be a whole number from 1 to"),
        (("ab", 2.0), "max_length must be a whole number"),
        (("ab", 2, 1), "causal must be True or False"),
    ],
)
def test_mistakes_in_domains(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Sequences(*arguments)


def test_sequences_outside_of_a_domain() -> None:
    domain = Sequences(["red", "green"], 2)
    with pytest.raises(DomainError, match=r"token 1 of the sequence is 'gren'; .*did you mean 'green'"):
        domain.check(["red", "gren"])
    with pytest.raises(DomainError, match="has 3 tokens, and the domain ends at max_length = 2"):
        domain.check(["red"] * 3)
    with pytest.raises(DomainError, match="is empty"):
        domain.check([])
    with pytest.raises(ArgumentError, match="a list of tokens, got int"):
        domain.check(3)  # type: ignore[arg-type]
    assert 3 not in domain and [["red"]] not in domain and ["red"] in domain


def test_the_front_door_has_the_language() -> None:
    assert af.rasp is rasp
    missing = [name for name in rasp.__all__ if not hasattr(rasp, name)]
    assert missing == []
    assert isinstance(tokens, Node) and Table({1: 2})(1) == 2
