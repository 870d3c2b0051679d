"""Token programs that everyone knows, each a few lines, with the vocabulary it is for and cases that say what it does.

>>> from attnforge.rasp import library
>>> library.reverse()("abc")
['c', 'b', 'a']
>>> library.PROGRAMS["sort"].domain(max_length=10).vocabulary
('a', 'b', 'c', 'd')

Every program is defined on every sequence of its vocabulary, also on those that make no sense as an input. Where a
program says "so far", position i depends on positions 0 to i alone. Loops become depth: `automaton` unrolls one for a
given `max_length` in a logarithmic number of steps.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from ..arguments import whole
from ..errors import ArgumentError, closest
from . import language
from .domain import Sequences
from .language import (
    Selector,
    SOp,
    aggregate,
    apply,
    eq,
    geq,
    gt,
    indices,
    leq,
    lt,
    numerical,
    select,
    selector_width,
    tokens,
    true,
    where,
)
from .values import Value


@dataclass(frozen=True)
class Listed:
    """A program of the library: how it is built, the vocabulary it is for, and what it gives on some sequences."""

    name: str
    build: Callable[..., SOp] = field(repr=False)
    vocabulary: tuple[Value, ...]
    cases: Mapping[Any, Sequence[object]] = field(repr=False)

    @property
    def summary(self) -> str:
        """The first line of the program's docstring."""
        return (self.build.__doc__ or "").strip().splitlines()[0]

    @property
    def parameters(self) -> tuple[str, ...]:
        """What can be set when the program is built, besides the domain."""
        return tuple(
            name for name in inspect.signature(self.build).parameters if name not in ("max_length", "vocabulary")
        )

    def domain(self, max_length: int, vocabulary: Iterable[object] | None = None) -> Sequences:
        """The sequences of up to `max_length` tokens of a vocabulary, by default of the program's own."""
        return Sequences(self.vocabulary if vocabulary is None else vocabulary, max_length)

    def program(self, domain: Sequences, **parameters: object) -> SOp:
        """The program for a domain, under its name."""
        wrong = [name for name in parameters if name not in self.parameters]
        if wrong:
            known = ", ".join(self.parameters) or "none"
            raise ArgumentError(f"{self.name} has no parameter {wrong[0]!r} (its parameters: {known})")
        offered = {"max_length": domain.max_length, "vocabulary": domain.vocabulary}
        wanted = {name: offered[name] for name in inspect.signature(self.build).parameters if name in offered}
        return self.build(**wanted, **parameters).named(self.name)


#: Every program of the library by its name.
PROGRAMS: dict[str, Listed] = {}


def get(name: str) -> Listed:
    """The program of that name, or an error that names the nearest one."""
    if name not in PROGRAMS:
        raise ArgumentError(f"the library has no program {name!r}{closest(name, PROGRAMS)}")
    return PROGRAMS[name]


Builder = Callable[..., SOp]


def _listed(vocabulary: Iterable[Any], cases: Mapping[Any, Sequence[object]]) -> Callable[[Builder], Builder]:
    def add(build: Builder) -> Builder:
        name = build.__name__
        PROGRAMS[name] = Listed(name, build, tuple(vocabulary), cases)
        return build

    return add


# Selectors and small parts that many programs share.

everywhere = select(tokens, tokens, true).named("everywhere")
so_far = select(indices, indices, leq).named("so_far")
earlier = select(indices, indices, lt).named("earlier")
later = select(indices, indices, gt).named("later")
same_token = select(tokens, tokens, eq).named("same_token")
last = select(indices, language.length - 1, eq).named("last")


def holding(condition: SOp, value: object = 1) -> Selector:
    """The keys at which an op has a value."""
    return select(condition, value, eq)


def before(values: object = tokens, offset: int = 1, default: object = None) -> SOp:
    """The values `offset` positions to the left, the default where there are none."""
    return aggregate(select(indices, indices - offset, eq), values, default)


# Counting and ordering.


@_listed("abcd", {"a": [1], "abc": [3, 3, 3]})
def length() -> SOp:
    """How many tokens the sequence has."""
    return language.length


@_listed("abcd", {"abc": "cba", "abcd": "dcba"})
def reverse() -> SOp:
    """The tokens from the last to the first."""
    return aggregate(select(indices, language.length - 1 - indices, eq), tokens)


@_listed("abcd", {"abac": [2, 1, 2, 1]})
def hist() -> SOp:
    """How often each token occurs."""
    return selector_width(same_token)


@_listed("$abcd", {"$abac": [0, 2, 1, 2, 1]})
def hist_bos(bos: Value = "$") -> SOp:
    """How often each token occurs, 0 at the token that marks the beginning."""
    return where(tokens.equals(bos), 0, selector_width(same_token))


@_listed("abcd", {"abbc": [2, 1, 1, 2], "abab": [2, 2, 2, 2]})
def hist2() -> SOp:
    """How many different tokens occur as often as this one."""
    return selector_width(select(hist(), hist(), eq) & holding(firsts()))


@_listed("abcd", {"abac": [2, 2, 2, 2], "b": [0]})
def count(token: Value = "a") -> SOp:
    """How often one token occurs."""
    return selector_width(select(tokens, token, eq))


@_listed("abcd", {"aaabbc": [3] * 6, "aacbbc": [6] * 6})
def count_less_freq(n: int = 2) -> SOp:
    """How many tokens stand in the sequence that occur at most n times."""
    return selector_width(holding(hist() <= n))


def ranked(smaller: Selector, same: Selector) -> SOp:
    """The place of each position in an order: what is smaller, and among equals what is earlier."""
    return selector_width(smaller | (same & earlier))


@_listed("abcd", {"dabac": "aabcd", "a": "a"})
def sort() -> SOp:
    """The tokens in ascending order."""
    return aggregate(select(ranked(select(tokens, tokens, lt), same_token), indices, eq), tokens)


@_listed("abcdefgh", {"cab": "abc", "bab": ["a", "b", None]})
def sort_unique() -> SOp:
    """The tokens in ascending order, for sequences without repetition (None after the first of several equal ones)."""
    return aggregate(select(selector_width(select(tokens, tokens, lt)), indices, eq), tokens)


@_listed("abcd", {"bdba": "bbda", "abcc": "ccab"})
def sort_freq() -> SOp:
    """The tokens by how often they occur, most frequent first, in their own order otherwise."""
    place = ranked(select(hist(), hist(), gt), select(hist(), hist(), eq))
    return aggregate(select(place, indices, eq), tokens)


@_listed("abcd", {"abbc": "bbbb", "ba": "bb"})
def mode() -> SOp:
    """The token that occurs most often, the first of them where several do."""
    place = ranked(select(hist(), hist(), gt), select(hist(), hist(), eq))
    return aggregate(select(place, 0, eq), tokens)


@_listed("01", {"011": [1, 1, 1], "01": [0, 0], "100": [0, 0, 0]})
def majority(token: Value = "1") -> SOp:
    """1 where more than half of the sequence is one token."""
    return numerical(aggregate(everywhere, tokens.equals(token))) > 0.5


@_listed("abcd", {"abac": [1, 1, 0, 1]})
def firsts() -> SOp:
    """1 where a token occurs for the first time."""
    return selector_width(same_token & earlier).equals(0)


@_listed("abcd", {"abac": [0, 1, 1, 1]})
def lasts() -> SOp:
    """1 where a token occurs for the last time."""
    return selector_width(same_token & later).equals(0)


# Moving tokens.


@_listed("abcd", {"abc": [None, "a", "b"]})
def shift_by(offset: int = 1) -> SOp:
    """The tokens moved to the right, None where there were none."""
    return before(tokens, offset)


@_listed(range(10), {(1, 2, 0): [2, 0, 1], (5,): [None]})
def index_select() -> SOp:
    """The token at the position that each token names, None beyond the end."""
    return aggregate(select(indices, tokens, eq), tokens)


@_listed("abcd", {"abac": ["a", "b", "c", None], "aab": ["a", "b", None]})
def unique_copy() -> SOp:
    """Each token once, in the order of first occurrence, None after the last."""
    place = where(firsts(), selector_width(holding(firsts()) & earlier), -1)
    return aggregate(select(place, indices, eq), tokens)


def followed(key: SOp) -> SOp:
    """What followed the last earlier position with the same key; None where there is none."""
    seen = selector_width(select(key, key, eq) & so_far)  # the n-th position with this key, n = 1, 2, ...
    match = select(before(key), key, eq) & select(before(seen, default=-1), seen - 1, eq)
    return aggregate(match, tokens)


@_listed("abcd", {"abca": [None, None, None, "b"], "aab": [None, "a", None]})
def induction() -> SOp:
    """What followed the last earlier occurrence of the token."""
    return followed(tokens)


@_listed("abc", {"abcab": [None, None, None, None, "c"]})
def bigram_copy() -> SOp:
    """What followed the last earlier occurrence of the token and the one before it."""
    return followed(apply(lambda left, token: (left, token), before(tokens), tokens))


@_listed("abcdefghijklmnopqrstuvwxyz", {"xyz": "abc", "abc": "def"})
def caesar(vocabulary: Sequence[Value], shift: int = 3) -> SOp:
    """Each token replaced by the one `shift` places on in the vocabulary, which is a circle."""
    return apply({token: vocabulary[(i + shift) % len(vocabulary)] for i, token in enumerate(vocabulary)}, tokens)


@_listed("abcd", {"adbc": "abcc", "bbdb": "bbbb"})
def median3() -> SOp:
    """The middle one of a token and its two neighbours, which are the token itself beyond the ends."""
    left, right = before(tokens), before(tokens, -1)

    def middle(a: Any, b: Any, c: Any) -> object:
        return sorted((b if a is None else a, b, b if c is None else c))[1]

    return apply(middle, left, tokens, right)


# Fractions, patterns and brackets.


def frac_of(values: SOp) -> SOp:
    """The mean of the values so far."""
    return numerical(aggregate(so_far, values, default=0))


@_listed("abcd", {"abaa": [1, Fraction(1, 2), Fraction(2, 3), Fraction(3, 4)]})
def frac_prevs(token: Value = "a") -> SOp:
    """Which fraction of the tokens so far is one token."""
    return frac_of(tokens.equals(token))


@_listed("abcd", {"aabcabc": [0, 0, 0, 1, 0, 0, 1]})
def detect_pattern(pattern: Sequence[Any] = "abc") -> SOp:
    """1 at the last token of each occurrence of a pattern."""
    if not pattern:
        raise ArgumentError("the pattern is empty; it needs one token or more")
    found = tokens.equals(pattern[-1])
    for offset, token in enumerate(reversed(pattern[:-1]), 1):
        found &= before(tokens.equals(token), offset, default=0)
    return found


def balance(opening: Value, closing: Value) -> SOp:
    """The number of opening minus the number of closing brackets so far, over the number of tokens so far."""
    return frac_of(where(tokens.equals(opening), 1, where(tokens.equals(closing), -1, 0)))


@_listed("()a", {"a()(": [0, Fraction(1, 2), 0, Fraction(1, 4)], ")(": [-1, 0]})
def pair_balance(opening: Value = "(", closing: Value = ")") -> SOp:
    """Which fraction of the tokens so far opens a bracket, minus the fraction that closes one."""
    return balance(opening, closing)


def shuffled(pairs: Sequence[str]) -> SOp:
    """1 where every kind of bracket is balanced for itself in the whole sequence."""
    balances = [balance(*pair) for pair in pairs]
    fell = balances[0] < 0
    ends = balances[0].equals(0)
    for other in balances[1:]:
        fell, ends = fell | (other < 0), ends & other.equals(0)
    return aggregate(last, ends, default=0) & selector_width(holding(fell)).equals(0)


@_listed("()", {"(())": [1] * 4, "())(": [0] * 4, "(": [0]})
def shuffle_dyck1() -> SOp:
    """1 where the brackets of the whole sequence are balanced."""
    return shuffled(["()"])


@_listed("(){}", {"({)}": [1] * 4, "(){)}": [0] * 5})
def shuffle_dyck2() -> SOp:
    """1 where both kinds of brackets are balanced, each for itself."""
    return shuffled(["()", "{}"])


@_listed("(){}[]", {"({[)}]": [1] * 6, "([)(": [0] * 4})
def shuffle_dyck3() -> SOp:
    """1 where all three kinds of brackets are balanced, each for itself."""
    return shuffled(["()", "{}", "[]"])


def prefixes(pairs: Sequence[str]) -> SOp:
    """For each prefix of nested brackets: "T" where it is balanced, "P" where it can still be, "F" where it cannot."""
    opens = apply({bracket: int(bracket == pair[0]) for pair in pairs for bracket in pair}, tokens)
    depth = 2 * selector_width(holding(opens) & so_far) - indices - 1  # after the token
    failed: SOp = selector_width(holding(depth < 0) & so_far)
    if len(pairs) > 1:
        # At each level brackets open and close in turn, so the first that does not fit its partner is the first with
        # which its kind has been closed more often than opened at this level.
        level = apply(max, where(opens, depth, depth + 1), 0)  # the same for a bracket and its partner
        kind = apply({bracket: pair for pair in pairs for bracket in pair}, tokens)
        alike = select(level, level, eq) & select(kind, kind, eq) & so_far
        left = selector_width(alike & holding(opens)) - selector_width(alike & holding(opens, 0))
        failed = failed + selector_width(holding(left < 0) & so_far)
    return where(failed > 0, "F", where(depth.equals(0), "T", "P"))


@_listed("()", {"())(": "PTFF", "(()": "PPP"})
def dyck1() -> SOp:
    """For each prefix of one kind of brackets: T where balanced, P where it can still be, F where it cannot."""
    return prefixes(["()"])


@_listed("(){}", {"({})": "PPPT", "({)}": "PPFF", "(){": "PTP"})
def dyck2() -> SOp:
    """For each prefix of two kinds of nested brackets: T where balanced, P where it can still be, F where it cannot."""
    return prefixes(["()", "{}"])


@_listed("(){}[]", {"[({})]": "PPPPPT", "[}": "PF"})
def dyck3() -> SOp:
    """For each prefix of three kinds of nested brackets: T where balanced, P where it can still be, F where not."""
    return prefixes(["()", "{}", "[]"])


# Numbers and automata.


def counted(token: Value) -> SOp:
    """How often a token occurred so far."""
    return selector_width(select(tokens, token, eq) & so_far)


@_listed("01", {"1101": [1, 0, 0, 1]})
def parity() -> SOp:
    """Whether the number of ones so far is odd."""
    return counted("1") % 2


@_listed(range(3), {(1, 2, 0, 2): [1, 3, 3, 5]})
def cumulative_sum(vocabulary: Sequence[Value]) -> SOp:
    """The sum of the tokens so far, which are whole numbers from 0."""
    most = max(whole(f"token {i} of the vocabulary", token) for i, token in enumerate(vocabulary))
    counts = [selector_width(select(tokens, least, geq) & so_far) for least in range(1, most + 1)]
    total: SOp = counts[0] if counts else selector_width(everywhere) * 0
    for more in counts[1:]:
        total = total + more
    return total


@_listed("01", {"011": "100", "111": "000", "100": "101"})
def binary_increment() -> SOp:
    """The next binary number, most significant digit first; ones alone become zeros."""
    zeros_after = selector_width(select(tokens, "0", eq) & later)
    return where(zeros_after.equals(0), where(tokens.equals("0"), "1", "0"), tokens)


def carried(sums: SOp, base: int, onward: bool) -> SOp:
    """The digits of a number from sums of two digits: a carry comes from the nearest sum that is not base - 1.

    The carry moves from left to right where `onward` holds, else from right to left.
    """
    stops = sums.differs(base - 1)
    place = selector_width(holding(stops) & so_far)  # how many stops there are up to here
    stop = where(stops, place, -2)  # which is nobody's nearest
    nearest = where(stops, place - 1, place) if onward else place + 1
    carry = aggregate(select(stop, nearest, eq), where(sums >= base, "one", "none"))
    return apply(lambda s, c: (s + (c == "one")) % base, sums, carry)


_PAIRS = tuple(itertools.product(range(3), repeat=2))


@_listed(_PAIRS, {((2, 2), (1, 1), (0, 0)): [1, 0, 1], ((1, 0), (2, 2)): [1, 1]})
def long_addition(base: int = 3) -> SOp:
    """The digits of the sum of two numbers, given as pairs of digits, least significant first."""
    return carried(apply(lambda pair: pair[0] + pair[1], tokens), base, onward=True)


@_listed("01+", {"01+11": ["0", "0", None, None, None], "101+001": ["1", "1", "0", None, None, None, None]})
def digit_addition(base: int = 2) -> SOp:
    """The sum of two numbers of n digits, most significant first, written a+b; it stands below the first number.

    The sum is taken modulo base ** n. Digits that are missing or are no digits count as zeros.
    """
    first = counted("+").equals(0)
    other = aggregate(select(indices, indices + selector_width(holding(first)) + 1, eq), tokens)
    digits = {str(digit): digit for digit in range(base)}

    def added(a: Any, b: Any, inside: Any) -> int:
        return digits.get(a, 0) + digits.get(b, 0) if inside else 0

    sums = carried(apply(added, tokens, other, first), base, onward=False)
    return where(first, apply({digit: str(digit) for digit in range(base)}, sums), None)


def automaton(
    steps: Mapping[Any, Sequence[int]], start: int, accepting: Iterable[int], max_length: int, of: SOp = tokens
) -> SOp:
    """1 where a finite automaton accepts the tokens so far, in a logarithmic number of steps.

    `steps` gives for each token the state that follows each state. Every position holds what the last 1, 2, 4, ...
    tokens do to the states: two of these are composed by a map of two values, which are numbers of transformations.
    """
    states = len(next(iter(steps.values())))
    idle = tuple(range(states))
    known: dict[tuple[int, ...], int] = {idle: 0}
    effect = {token: known.setdefault(tuple(row), len(known)) for token, row in steps.items()}
    composed: dict[tuple[int, int], int] = {}
    pending = list(known)
    for first in pending:  # the monoid of the automaton: it grows while it is walked
        for second in list(known):
            for left, right in ((first, second), (second, first)):
                both = tuple(right[state] for state in left)
                if both not in known:
                    known[both] = len(known)
                    pending.append(both)
                composed[known[left], known[right]] = known[both]
    done: SOp = apply(effect, of)
    reach = 1
    while reach < max_length:
        done = apply(composed, before(done, reach, default=0), done)
        reach *= 2
    accepts = set(accepting)
    return apply({number: int(row[start] in accepts) for row, number in known.items()}, done)


@_listed("01", {"1101": [1, 0, 0, 1]})
def parity_scan(max_length: int) -> SOp:
    """Whether the number of ones so far is odd, by a loop of logarithmic depth instead of a count."""
    return automaton({"0": (0, 1), "1": (1, 0)}, 0, [1], max_length)


@_listed(_PAIRS, {((2, 2), (1, 1), (0, 0)): [1, 0, 1], ((1, 0), (2, 2)): [1, 1]})
def addition_scan(max_length: int, base: int = 3) -> SOp:
    """The sum of two numbers as in long_addition, with the carry from a loop of logarithmic depth."""
    sums = apply(lambda pair: pair[0] + pair[1], tokens)
    steps = {s: (int(s >= base), int(s + 1 >= base)) for s in range(2 * base - 1)}
    carry = before(automaton(steps, 0, [1], max_length, of=sums), default=0)
    return apply(lambda s, c: (s + c) % base, sums, carry)


@_listed("01", {"110": [1, 1, 0]})
def tomita1() -> SOp:
    """1 where the tokens so far are ones alone."""
    return counted("0").equals(0)


@_listed("01", {"1010": [0, 1, 0, 1], "1001": [0, 1, 0, 0]})
def tomita2() -> SOp:
    """1 where the tokens so far are 10 repeated."""
    wrong = tokens.equals("1").equals(indices % 2)
    return selector_width(select(wrong, indices % 2, geq) & so_far).equals(0)  # at even positions all are selected


@_listed("01", {"1001": [1, 0, 1, 1], "101": [1, 0, 0]})
def tomita3(max_length: int) -> SOp:
    """1 where so far no odd run of ones is followed by an odd run of zeros."""
    return automaton({"0": (0, 2, 3, 2, 4), "1": (1, 0, 4, 1, 4)}, 0, [0, 1, 3], max_length)


@_listed("01", {"10001": [1, 1, 1, 0, 0]})
def tomita4() -> SOp:
    """1 where no three zeros in a row have come so far."""
    return selector_width(holding(detect_pattern("000")) & so_far).equals(0)


@_listed("01", {"0101": [0, 0, 0, 1], "11": [0, 1]})
def tomita5() -> SOp:
    """1 where the numbers of zeros and of ones so far are both even."""
    return (counted("0") % 2).equals(0) & (indices % 2)


@_listed("01", {"000110": [0, 0, 1, 0, 0, 0], "01": [0, 1]})
def tomita6() -> SOp:
    """1 where the numbers of zeros and of ones so far differ by a multiple of three."""
    return (2 * counted("0") % 3).equals((indices + 1) % 3)


@_listed("01", {"010110": [1, 1, 1, 1, 1, 0]})
def tomita7() -> SOp:
    """1 where the tokens so far are zeros, then ones, then zeros, then ones, each possibly none."""
    return selector_width(holding(detect_pattern("10")) & so_far) <= 1
