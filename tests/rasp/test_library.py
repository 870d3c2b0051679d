"""Every program of the library against plain Python, on all sequences of small domains."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest

from attnforge.errors import ArgumentError
from attnforge.rasp import Sequences, Value, library
from attnforge.rasp.interpret import run_many
from attnforge.rasp.library import PROGRAMS

Oracle = Callable[[Sequence[Any]], Sequence[object]]
ORACLES: dict[str, Oracle] = {}
SIZES: dict[str, tuple[Any, int]] = {}  # another vocabulary or length than the four letters up to 5 tokens


def oracle(vocabulary: Any = "abc", most: int = 6) -> Callable[[Oracle], Oracle]:
    def add(function: Oracle) -> Oracle:
        name = function.__name__.removeprefix("plain_")
        ORACLES[name], SIZES[name] = function, (vocabulary, most)
        return function

    return add


def prefixes(s: Sequence[Any]) -> list[Sequence[Any]]:
    return [s[: i + 1] for i in range(len(s))]


@oracle()
def plain_length(s):
    return [len(s)] * len(s)


@oracle()
def plain_reverse(s):
    return s[::-1]


@oracle()
def plain_hist(s):
    return [s.count(t) for t in s]


@oracle("$abc")
def plain_hist_bos(s):
    return [0 if t == "$" else s.count(t) for t in s]


@oracle()
def plain_hist2(s):
    return [len({u for u in s if s.count(u) == s.count(t)}) for t in s]


@oracle()
def plain_count(s):
    return [s.count("a")] * len(s)


@oracle()
def plain_count_less_freq(s):
    return [sum(s.count(t) <= 2 for t in s)] * len(s)


@oracle("abcd", 5)
def plain_sort(s):
    return sorted(s)


@oracle("abcdef", 5)
def plain_sort_unique(s):
    """With repetitions: one of several equal tokens stands where the smaller ones leave it."""
    found: list[Any] = [None] * len(s)
    for t in s:
        found[sum(u < t for u in s)] = t
    return found


@oracle("abcd", 5)
def plain_sort_freq(s):
    return sorted(s, key=lambda t: -s.count(t))


@oracle("abcd", 5)
def plain_mode(s):
    return [Counter(s).most_common(1)[0][0]] * len(s)


@oracle("01", 9)
def plain_majority(s):
    return [int(2 * s.count("1") > len(s))] * len(s)


@oracle()
def plain_firsts(s):
    return [int(t not in s[:i]) for i, t in enumerate(s)]


@oracle()
def plain_lasts(s):
    return [int(t not in s[i + 1 :]) for i, t in enumerate(s)]


@oracle()
def plain_shift_by(s):
    return [None, *s[:-1]]


@oracle(range(6), 4)
def plain_index_select(s):
    return [s[t] if t < len(s) else None for t in s]


@oracle()
def plain_unique_copy(s):
    once = list(dict.fromkeys(s))
    return once + [None] * (len(s) - len(once))


@oracle()
def plain_induction(s):
    found: list[Any] = []
    for i, t in enumerate(s):
        places = [j for j in range(i) if s[j] == t]
        found.append(s[places[-1] + 1] if places else None)
    return found


@oracle("abc", 7)
def plain_bigram_copy(s):
    padded, found = (None, *s), []
    for i in range(len(s)):
        places = [j for j in range(i) if padded[j : j + 2] == padded[i : i + 2]]
        found.append(s[places[-1] + 1] if places else None)
    return found


@oracle("abcde", 4)
def plain_caesar(s):
    return ["abcde"[("abcde".index(t) + 3) % 5] for t in s]


@oracle()
def plain_median3(s):
    return [sorted([s[max(i - 1, 0)], t, s[min(i + 1, len(s) - 1)]])[1] for i, t in enumerate(s)]


@oracle()
def plain_frac_prevs(s):
    return [Fraction(p.count("a"), len(p)) for p in prefixes(s)]


@oracle("abc", 7)
def plain_detect_pattern(s):
    return [int(tuple(p[-3:]) == ("a", "b", "c")) for p in prefixes(s)]


@oracle("()a", 6)
def plain_pair_balance(s):
    return [Fraction(p.count("(") - p.count(")"), len(p)) for p in prefixes(s)]


def shuffled(s, pairs):
    fine = all(p.count(a) >= p.count(b) for a, b in pairs for p in prefixes(s))
    return [int(fine and all(s.count(a) == s.count(b) for a, b in pairs))] * len(s)


@oracle("()", 10)
def plain_shuffle_dyck1(s):
    return shuffled(s, ["()"])


@oracle("(){}", 6)
def plain_shuffle_dyck2(s):
    return shuffled(s, ["()", "{}"])


@oracle("(){}[]", 4)
def plain_shuffle_dyck3(s):
    return shuffled(s, ["()", "{}", "[]"])


def nested(s, pairs):
    partner, stack, found = {b: a for a, b in pairs}, [], []
    for t in s:
        if found and found[-1] == "F":
            found.append("F")
        elif t not in partner:
            stack.append(t)
            found.append("P")
        else:
            fine = bool(stack) and stack.pop() == partner[t]
            found.append("F" if not fine else "P" if stack else "T")
    return found


@oracle("()", 10)
def plain_dyck1(s):
    return nested(s, ["()"])


@oracle("(){}", 6)
def plain_dyck2(s):
    return nested(s, ["()", "{}"])


@oracle("(){}[]", 5)
def plain_dyck3(s):
    return nested(s, ["()", "{}", "[]"])


@oracle("01", 10)
def plain_parity(s):
    return [p.count("1") % 2 for p in prefixes(s)]


@oracle(range(4), 5)
def plain_cumulative_sum(s):
    return [sum(p) for p in prefixes(s)]


@oracle("01", 10)
def plain_binary_increment(s):
    return list(format((int("".join(s), 2) + 1) % 2 ** len(s), f"0{len(s)}b"))


def added(s, base):
    total = sum((a + b) * base**i for i, (a, b) in enumerate(s))
    return [total // base**i % base for i in range(len(s))]


@oracle(list(itertools.product(range(3), repeat=2)), 4)
def plain_long_addition(s):
    return added(s, 3)


@oracle("01+", 7)
def plain_digit_addition(s):
    n = s.index("+") if "+" in s else len(s)
    bits = [int(t == "1") for t in s]
    one, two = bits[:n], (bits[n + 1 :] + [0] * n)[:n]
    total = int("0" + "".join(map(str, one)), 2) + int("0" + "".join(map(str, two)), 2)
    digits = format(total % 2**n, f"0{n}b") if n else ""
    return [*digits, *[None] * (len(s) - n)]


@oracle("01", 10)
def plain_parity_scan(s):
    return plain_parity(s)


@oracle(list(itertools.product(range(3), repeat=2)), 4)
def plain_addition_scan(s):
    return added(s, 3)


@oracle("01", 10)
def plain_tomita1(s):
    return [int("0" not in p) for p in prefixes(s)]


@oracle("01", 10)
def plain_tomita2(s):
    return [int("".join(p) == "10" * (len(p) // 2)) for p in prefixes(s)]


@oracle("01", 10)
def plain_tomita3(s):
    found = []
    for p in prefixes(s):
        runs = [(t, len(list(group))) for t, group in itertools.groupby(p)]
        bad = any(a == "1" and m % 2 and n % 2 for (a, m), (_, n) in itertools.pairwise(runs))
        found.append(int(not bad))
    return found


@oracle("01", 10)
def plain_tomita4(s):
    return [int("000" not in "".join(p)) for p in prefixes(s)]


@oracle("01", 10)
def plain_tomita5(s):
    return [int(p.count("0") % 2 == 0 and p.count("1") % 2 == 0) for p in prefixes(s)]


@oracle("01", 10)
def plain_tomita6(s):
    return [int((p.count("0") - p.count("1")) % 3 == 0) for p in prefixes(s)]


@oracle("01", 10)
def plain_tomita7(s):
    return [int("".join(p).count("10") <= 1) for p in prefixes(s)]


def test_every_program_has_an_oracle_and_a_docstring() -> None:
    assert set(ORACLES) == set(PROGRAMS)
    assert len(PROGRAMS) >= 44
    assert all(entry.summary.endswith(".") for entry in PROGRAMS.values())


@pytest.mark.parametrize("name", PROGRAMS)
def test_cases(name: str) -> None:
    entry = PROGRAMS[name]
    program = entry.program(entry.domain(max_length=10))
    assert entry.cases and program.name == name
    for given, wanted in entry.cases.items():
        assert program(given) == list(wanted), given


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_sequences(name: str) -> None:
    vocabulary, most = SIZES[name]
    domain = PROGRAMS[name].domain(most, vocabulary)
    program = PROGRAMS[name].program(domain)
    everything = list(domain)
    assert len(everything) == domain.size
    for given, got in zip(everything, run_many(program, everything), strict=True):
        assert got == list(ORACLES[name](given)), given


@pytest.mark.parametrize("name", ["sort", "dyck2", "digit_addition", "addition_scan", "tomita3", "bigram_copy"])
def test_long_sequences(name: str) -> None:
    domain = PROGRAMS[name].domain(40)
    program = PROGRAMS[name].program(domain)
    sample = domain.sample(60, seed=1)
    longest = [tuple(domain.vocabulary[:1]) * 40, (domain.vocabulary * 40)[:40]]
    for given, got in zip(sample + longest, run_many(program, sample + longest), strict=True):
        assert got == list(ORACLES[name](given)), given


@pytest.mark.parametrize(
    "name", ["reverse", "sort_freq", "frac_prevs", "shuffle_dyck2", "dyck2", "index_select", "median3"]
)
def test_plain_and_vectorised_interpreters_agree(name: str) -> None:
    domain = PROGRAMS[name].domain(9)
    program = PROGRAMS[name].program(domain)
    sample = domain.sample(40, seed=2)
    got = run_many(program, sample)
    assert got == [program(s) for s in sample]
    assert [[type(v) for v in row] for row in got] == [[type(v) for v in program(s)] for s in sample]


def test_parameters() -> None:
    domain = Sequences("abcd", 6)
    assert PROGRAMS["count"].program(domain, token="b")("abb") == [2, 2, 2]
    assert PROGRAMS["caesar"].program(domain, shift=-1)("abc") == ["d", "a", "b"]
    assert PROGRAMS["count"].parameters == ("token",) and PROGRAMS["parity_scan"].parameters == ()
    with pytest.raises(ArgumentError, match=r"count has no parameter 'letter' \(its parameters: token\)"):
        PROGRAMS["count"].program(domain, letter="b")
    with pytest.raises(ArgumentError, match="no program 'revrse'; did you mean 'reverse'"):
        library.get("revrse")
    with pytest.raises(ArgumentError, match="the pattern is empty"):
        library.detect_pattern("")
    with pytest.raises(ArgumentError, match="token 0 of the vocabulary must be a whole number"):
        PROGRAMS["cumulative_sum"].program(domain)


def test_a_loop_has_logarithmic_depth() -> None:
    def depth(program: library.SOp) -> int:
        levels: dict[object, int] = {}
        for node in library.language.walk(program):
            own = isinstance(node, library.language.Aggregate)
            levels[node] = own + max((levels[child] for child in node.children), default=0)
        return levels[program]

    depths = [depth(PROGRAMS["parity_scan"].program(Sequences("01", n))) for n in (1, 2, 8, 9, 200)]
    assert depths == [0, 1, 3, 4, 8]


def test_values_are_values() -> None:
    for entry in PROGRAMS.values():
        given: Value = entry.vocabulary[0]
        assert entry.program(entry.domain(3))([given] * 3)
