"""Programs as text: what is read, what is refused with a caret, and that nothing is executed."""

from __future__ import annotations

import pickle
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnforge.errors import ArgumentError, AttnforgeError, DomainError, FormulaError
from attnforge.rasp import Lambda, library, parse, walk
from attnforge.rasp.library import PROGRAMS

SORT_FREQ = """
# the tokens by how often they occur
hist  = selector_width(select(tokens, tokens, eq))
place = selector_width(select(hist, hist, gt) | select(hist, hist, eq) & select(indices, indices, lt))
aggregate(select(place, indices, eq), tokens)
"""


def test_a_program_is_read() -> None:
    program = parse(SORT_FREQ)
    assert program("bdba") == ["b", "b", "d", "a"]
    assert {node.name for node in walk(program)} >= {"hist", "place"}
    assert program == library.sort_freq()


def test_the_last_line_may_have_a_name() -> None:
    assert parse("twice = 2 * indices").name == "twice"
    assert parse("a = tokens\na")("xy") == ["x", "y"]


@pytest.mark.parametrize(
    ("text", "sequence", "wanted"),
    [
        ("tokens == 'a'", "ab", [1, 0]),
        ("~(tokens != 'a') | (indices > 5)", "ab", [1, 0]),
        ("where(tokens < 'b', -1, +indices)", "ab", [-1, 1]),
        ("third = 1 / 3\nindices * third", "aaaa", [0, Fraction(1, 3), Fraction(2, 3), 1]),
        ("apply({'a': 1, 'b': (2, None)}, tokens)", "ab", [1, (2, None)]),
        ("f = lambda x: x + 1\napply(f, indices)", "ab", [1, 2]),
        ("n = 2\napply(lambda x: (x, n)[x % n], indices)", "aaa", [0, 2, 2]),
        ("t = {'a': 'z'}\napply(lambda x: t[x] if x in t else x, tokens)", "ab", ["z", "b"]),
        ("apply(lambda a, b: a < b <= 2 and not b == 1 or 'no', indices, length)", "aa", [1, 1]),
        ("apply(lambda x: chr(ord(x) + 1) + str(len(x)), tokens)", "ab", ["b1", "c1"]),
        ("apply(lambda x: max(x, 1) - min((x, 1)) + abs(-x) + sum((x, x)), indices)", "aa", [1, 3]),
        ("apply(lambda x: x is None, aggregate(select(indices, indices - 1), tokens))", "aa", [1, 0]),
        ("selector_width(select(tokens, 'a', lambda k, q: k == q))", "aba", [2, 2, 2]),
        (
            "selector_width(select(tokens, tokens, {('a', 'a'): 1, ('a', 'b'): 0, ('b', 'a'): 0, ('b', 'b'): 1}))",
            "ab",
            [1, 1],
        ),
        ("numerical(aggregate(select(indices, indices, true), tokens == 'a', default=0))", "ab", [Fraction(1, 2)] * 2),
        ("max(indices, 1) + abs(indices - 2)", "aaa", [3, 2, 2]),
        ("apply(lambda x: tuple(sorted((x, 1)))[0], indices)", "aaa", [0, 1, 1]),
    ],
)
def test_what_lines_mean(text: str, sequence: str, wanted: list[object]) -> None:
    program = parse(text)
    assert program(sequence) == wanted
    assert parse(program.to_text()) == program
    assert parse(program.to_text())(sequence) == wanted


@pytest.mark.parametrize(
    "name", ["reverse", "sort", "hist2", "shuffle_dyck2", "tomita3", "caesar", "unique_copy", "parity_scan"]
)
def test_programs_of_the_library_round_trip(name: str) -> None:
    program = PROGRAMS[name].program(PROGRAMS[name].domain(12))
    again = parse(program.to_text())
    assert again == program and again.name == name


def caret(error: FormulaError) -> str:
    """What stands above the caret."""
    *_, line, mark = str(error).splitlines()
    return line[mark.index("^") :]


@pytest.mark.parametrize(
    ("text", "words", "place"),
    [
        ("", "the text is empty", None),
        ("tokens +", "line 1: this is not an expression of Python", None),
        ("x = 1\ny = tokenz + x\ny", "line 2: the name tokenz means nothing; did you mean 'tokens'?", "tokenz + x"),
        ("aggregate(tokens, tokens)", "must be a selector", "aggregate(tokens, tokens)"),
        ("select(tokens, tokens)", "ends with a selector", "select(tokens, tokens)"),
        ("f = lambda x: x", "the last line must be a sequence op", "f = lambda x: x"),
        ("tokens\ntokens", "only the last line stands without a name", "tokens"),
        ("tokens = indices", "tokens is a word of the language", "tokens = indices"),
        ("a = 1\na = 2\na", "a has a meaning already", "a = 2"),
        ("a, b = 1, 2\na", "a line names one thing", "a, b = 1, 2"),
        ("a = b = 1\na", "lines of the form name = expression", "a = b = 1"),
        ("import os\nos", "lines of the form name = expression", "import os"),
        ("def f(x): return x\nf", "lines of the form name = expression", "def f(x): return x"),
        ("a += 1\na", "lines of the form", "a += 1"),
        ("tokens and indices", "write & for and", "tokens and indices"),
        ("not tokens", "write ~ for not", "not tokens"),
        ("1 if tokens else 2", "write where(condition, a, b)", "1 if tokens else 2"),
        ("0 < indices < 3", "comparisons are not chained", "0 < indices < 3"),
        ("tokens[0]", "sequence ops are not indexed", "tokens[0]"),
        ("tokens.name", "attributes are not part", "tokens.name"),
        ("tokens == ['a']", "write a tuple", "['a']"),
        ("tokens @ tokens", "the operator MatMult", "tokens @ tokens"),
        ("tokens + eq", "a function stands where", "eq"),
        ("select(tokens, tokens) + 1", "combined with &, | and ~ only", "select(tokens, tokens) + 1"),
        ("select(tokens, tokens) & tokens", "must be a selector", "select(tokens, tokens) & tokens"),
        ("select", "select is called with arguments", "select"),
        ("open('x')", "only select, aggregate", "open('x')"),
        ("selct(tokens, tokens)", "did you mean 'select'", "selct(tokens, tokens)"),
        ("tokens.__class__()", "only select, aggregate", "tokens.__class__()"),
        ("aggregate(*tokens)", "arguments are written one by one", "aggregate(*tokens)"),
        ("aggregate(select(tokens, tokens), tokens, other=3)", "unexpected keyword", "aggregate(select"),
        ("apply(lambda: 1, tokens)", "one or more plain arguments", "lambda: 1"),
        ("apply(lambda *x: 1, tokens)", "one or more plain arguments", "lambda *x"),
        ("apply(lambda x=1: 1, tokens)", "one or more plain arguments", "lambda x=1"),
        ("apply(lambda x: y, tokens)", "y is neither an argument nor a constant", "y, tokens"),
        ("apply(lambda x: tokens, tokens)", "tokens is neither an argument", "tokens, tokens"),
        ("a = tokens + 1\napply(lambda x: a, tokens)", "a is no constant", "a, tokens"),
        ("apply(lambda x: x.upper(), tokens)", "a function may call abs, chr", "x.upper()"),
        ("apply(lambda x: x.__class__, tokens)", "Attribute is not part of a function", "x.__class__"),
        ("apply(lambda x: [i for i in x], tokens)", "ListComp is not part of a function", "[i for i"),
        ("apply(lambda x: (y := 3), tokens)", "NamedExpr is not part of a function", "y := 3"),
        ("apply(lambda x: lambda y: x, tokens)", "Lambda is not part of a function", "lambda y"),
        ("apply(lambda x: f'{x}', tokens)", "JoinedStr is not part of a function", "f'{x}'"),
        ("apply(lambda x: x[1:], tokens)", "Slice is not part of a function", "1:"),
        ("apply(lambda x: b'a', tokens)", "a value is None, a number", "b'a'"),
        ("apply(lambda x: 1j, tokens)", "a value is None, a number", "1j"),
        ("apply(lambda x: {**x}, tokens)", "a dictionary here is a list of values", "{**x}"),
        ("tokens + {**{}}", "a dictionary here is a list of values", "{**{}}"),
        ("apply({tokens: 1}, tokens)", "a constant is expected here", "tokens: 1"),
        ("indices + 1 // 0", "ZeroDivisionError", "1 // 0"),
        ("indices + 9 ** 9 ** 9", "OverflowError", "9 ** 9 ** 9"),
        ("indices + 'a' * 100", "both must be numbers", "'a' * 100"),
        ("indices + 1e400", "values are finite numbers", "1e400"),
        ("apply(lambda x: x, tokens, tokens)", "takes 1 value(s), and 2 come", "apply("),
        ("f = {'ä': 1}\nfür = ungültig\ntokens", "line 2: the name ungültig", "ungültig"),
    ],
)  # fmt: skip
def test_mistakes_have_a_caret(text: str, words: str, place: str | None) -> None:
    with pytest.raises(FormulaError) as caught:
        parse(text)
    assert words in str(caught.value)
    if place is not None:
        assert caret(caught.value).startswith(place), str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 5000 + "tokens" + ")" * 5000,
        "-" * 15000 + "indices",
        "tokens" + " + 1" * 4000,
        "apply(lambda x: " + "not " * 4000 + "x, tokens)",
        "apply(lambda x: x" + " + 1" * 4000 + ", tokens)",
        "x" * 300000,
        "tokens\0",
        "[" * 190 + "]" * 190,
        "a = 1\n" * 3000,
        "{" * 150 + "1: 2" + "}" * 150,
        "\ud800",
        "a = tokens\n" + "\n".join(f"a{i} = a{i - 1} + a{i - 1}" if i else "a0 = a + 'x'" for i in range(40)) + "\n!",
    ],
    ids=range(12),
)  # fmt: skip
def test_hostile_texts_are_refused_at_once(text: str) -> None:
    start = time.perf_counter()
    with pytest.raises((FormulaError, ArgumentError)):
        parse(text)
    assert time.perf_counter() - start < 3


def test_work_is_bounded() -> None:
    lines = ["a0 = tokens + 'x'", *(f"a{i} = a{i - 1} + a{i - 1}" for i in range(1, 60)), "a59"]
    program = parse("\n".join(lines))  # shared parts: sixty lines stand for 2**60 characters
    with pytest.raises(DomainError, match="at most 4096 characters"):
        program("ab")
    with pytest.raises(DomainError, match="at most 4096 bits"):
        parse("\n".join(["b0 = indices + 3", *(f"b{i} = b{i - 1} * b{i - 1}" for i in range(1, 60)), "b59"]))("a")
    nested = "apply(lambda x: " + "(" * 20 + "x" + ",)" * 20 + ", tokens)"
    with pytest.raises(DomainError, match="within another"):
        parse(nested)("a")


def test_functions_stand_for_themselves() -> None:
    f = Lambda.read("lambda x, y:   x+y")
    assert f == Lambda.read("lambda x, y: x + y") != Lambda.read("lambda y, x: y + x")
    assert f(1, 2) == 3 and f.arity == 2 and f.text == "lambda x, y: x + y"
    assert pickle.loads(pickle.dumps(f)) == f and pickle.loads(pickle.dumps(f))(3, 4) == 7
    with pytest.raises(FormulaError, match="a function is expected"):
        Lambda.read("3")
    with pytest.raises(TypeError, match="takes 2 value"):
        f(1)


def test_constants_in_functions_do_not_multiply_a_text() -> None:
    """A dictionary is written into each function that reads it: 16 kB, ten thousand times, would be 160 MB."""
    rows = ", ".join(f"{i}: {i}" for i in range(1500))
    uses = "\n".join(f"a{i} = apply(lambda x: d[x], indices)" for i in range(12))
    assert parse(f"d = {{{rows}}}\n{uses}\na1")("aa") == [0, 1]
    with pytest.raises(FormulaError, match="line 14: constants written into functions have more than 200000 char"):
        parse(f"d = {{{rows}}}\n{uses}\nb = apply(lambda x: d[x], indices)\na1")


def test_long_functions_are_cut_in_messages() -> None:
    program = parse(f"apply(lambda x: max({'x, ' * 5000}x), tokens)")
    assert len(repr(program)) < 3000 and program("b") == ["b"] and parse(program.to_text()) == program
    with pytest.raises(DomainError) as caught:
        parse(f"apply(lambda x: min({'x, ' * 5000}1), tokens)")("b")
    assert len(str(caught.value)) < 5000


def test_what_a_function_raises_names_the_op() -> None:
    with pytest.raises(
        DomainError, match="the op 'bad' cannot be computed: lambda x: 1 // x of 0 raises ZeroDivisionError"
    ):
        parse("bad = apply(lambda x: 1 // x, indices)")("a")
    with pytest.raises(DomainError, match="KeyError"):
        parse("apply(lambda x: {'b': 1}[x], tokens)")("a")


WORDS = (
    "tokens indices length select( aggregate( selector_width( apply( where( lambda x : eq lt 'a' 1 2 0.5 + - * / ** =="
    " < & | ~ ( ) , [ ] { } = a b x y None True not if else in import . __class__ @ # ;"
)


@given(st.lists(st.sampled_from([*WORDS.split(), "\n"]), max_size=25).map(" ".join))
def test_any_text_gives_a_program_or_our_error(text: str) -> None:
    try:
        program = parse(text)
    except AttnforgeError:
        return
    try:
        program("ab")
    except AttnforgeError:
        return
