"""`Sequences`: the finite set of inputs on which a token program and its network are compared."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..arguments import flag, whole
from ..errors import ArgumentError, DomainError, closest
from .values import Value, canonical, sorted_values

#: The longest sequences of any domain: beyond, the squares of positions leave the whole numbers of float64's codes.
LONGEST = 2**16
#: The largest vocabulary: a table of predicates over pairs of tokens would have 2**32 entries.
LARGEST = 2**16


@dataclass(frozen=True, init=False)
class Sequences:
    """Every sequence of 1 to `max_length` tokens of a vocabulary.

    `vocabulary` is a string (its characters are the tokens) or any iterable of values: strings, numbers, None, tuples
    of these. `causal=True` asks that no position depend on later ones; it does not change what a program means. `bos`
    is a marker that stands before every sequence, given and returned by the network and not seen by the program: its
    position is not counted.

    >>> domain = Sequences("abcd", max_length=40)
    >>> domain.vocabulary, domain.max_length, "abba" in domain, "xyz" in domain
    (('a', 'b', 'c', 'd'), 40, True, False)
    >>> Sequences("ab", 2).size, ["".join(s) for s in Sequences("ab", 2)]
    (6, ['a', 'b', 'aa', 'ab', 'ba', 'bb'])
    """

    vocabulary: tuple[Value, ...]
    max_length: int
    causal: bool = False
    bos: Value = None

    def __init__(self, vocabulary: Iterable[object], max_length: int, causal: bool = False, bos: object = None):
        tokens = _vocabulary(vocabulary)
        marker = None if bos is None else _token("bos", bos)
        if marker is not None and marker in tokens:
            raise ArgumentError(f"bos is {marker!r}, which is also in the vocabulary; it needs a name of its own")
        length = whole("max_length", max_length, 1, LONGEST)
        values = {"vocabulary": tokens, "max_length": length, "causal": flag("causal", causal), "bos": marker}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_corpus(cls, corpus: Iterable[Iterable[object]], causal: bool = False, bos: object = None) -> Sequences:
        """The smallest domain that holds every sequence of a corpus: its tokens in order, its longest length.

        Where `bos` is given, the sequences of the corpus begin with it.

        >>> Sequences.from_corpus(["abba", "cab"])
        Sequences(vocabulary=('a', 'b', 'c'), max_length=4, causal=False, bos=None)
        """
        marker = None if bos is None else _token("bos", bos)
        if isinstance(corpus, str) or not isinstance(corpus, Iterable):
            raise ArgumentError(f"a corpus is a list of sequences of tokens, got {type(corpus).__name__}")
        seen: set[Value] = set()
        longest = count = 0
        for sequence in corpus:
            place, count = f"sequence {count} of the corpus", count + 1
            if not isinstance(sequence, Iterable):
                raise ArgumentError(f"{place} must be a list of tokens, got {type(sequence).__name__}")
            own = [_token(f"token {i} of {place}", t) for i, t in enumerate(itertools.islice(sequence, LONGEST + 2))]
            if marker is not None and own[:1] != [marker]:
                raise DomainError(f"{place} does not begin with bos = {marker!r}: {_shown(own)}")
            own = own[marker is not None :]
            if not 1 <= len(own) <= LONGEST:
                raise DomainError(f"{place} has {len(own) or 'no'} tokens; a sequence has 1 to {LONGEST}")
            seen.update(own)
            longest = max(longest, len(own))
            if len(seen) > LARGEST:
                raise ArgumentError(f"the corpus has more than {LARGEST} different tokens, at {place}")
        if not count:
            raise ArgumentError("the corpus is empty: there is no sequence to take a vocabulary from")
        return cls(sorted_values(seen), longest, causal, marker)

    def check(self, sequence: Iterable[object]) -> tuple[Value, ...]:
        """The tokens of a sequence without its `bos`, or a `DomainError` that says why it is not one of the domain."""
        if not isinstance(sequence, Iterable):
            raise ArgumentError(f"a sequence is a list of tokens, got {type(sequence).__name__}")
        tokens = [_token(f"token {i} of the sequence", token) for i, token in enumerate(sequence)]
        if self.bos is not None:
            if not tokens or tokens[0] != self.bos:
                raise DomainError(f"sequences of this domain begin with bos = {self.bos!r}, got {_shown(tokens)}")
            tokens = tokens[1:]
        if not tokens:
            raise DomainError(f"the sequence is empty; sequences have 1 to {self.max_length} tokens")
        if len(tokens) > self.max_length:
            raise DomainError(
                f"the sequence has {len(tokens)} tokens, and the domain ends at max_length = {self.max_length}"
            )
        for i, token in enumerate(tokens):
            if token not in self._known:
                words = [word for word in self.vocabulary if isinstance(word, str)]
                hint = closest(token, words) if isinstance(token, str) else ""
                known = _shown(self.vocabulary)
                raise DomainError(f"token {i} of the sequence is {token!r}; the vocabulary is {known}{hint}")
        return tuple(tokens)

    @property
    def _known(self) -> frozenset[Value]:
        known: frozenset[Value] | None = self.__dict__.get("_set")
        if known is None:
            known = frozenset(self.vocabulary)
            self.__dict__["_set"] = known  # a cache beside the fields: neither compared nor printed
        return known

    @property
    def size(self) -> int:
        """How many sequences the domain has."""
        count = len(self.vocabulary)
        return self.max_length if count == 1 else count * (count**self.max_length - 1) // (count - 1)

    def __iter__(self) -> Iterator[tuple[Value, ...]]:
        """Every sequence (without its `bos`), shorter ones first."""
        for length in range(1, self.max_length + 1):
            yield from itertools.product(self.vocabulary, repeat=length)

    def __contains__(self, sequence: object) -> bool:
        try:
            self.check(sequence)  # type: ignore[arg-type]
        except (ArgumentError, DomainError):
            return False
        return True

    def sample(self, count: int, seed: int = 0) -> list[tuple[Value, ...]]:
        """Random sequences (without `bos`), lengths and tokens uniform, the same for the same seed."""
        draw = random.Random(seed)
        lengths = [draw.randint(1, self.max_length) for _ in range(whole("count", count))]
        return [tuple(draw.choices(self.vocabulary, k=length)) for length in lengths]


def _vocabulary(given: object) -> tuple[Value, ...]:
    if not isinstance(given, Iterable):
        raise ArgumentError(f"the vocabulary is a string or a list of tokens, got {type(given).__name__}")
    some = itertools.islice(given, LARGEST + 1)
    tokens = [_token(f"token {i} of the vocabulary", token) for i, token in enumerate(some)]
    if not tokens:
        raise ArgumentError("the vocabulary is empty; give at least one token, for example Sequences('abcd', 10)")
    if len(tokens) > LARGEST:
        raise ArgumentError(f"the vocabulary has more than {LARGEST} tokens")
    seen: set[Value] = set()
    twice = next((token for token in tokens if token in seen or seen.add(token)), None)  # type: ignore[func-returns-value]
    if len(seen) < len(tokens):
        raise ArgumentError(f"the vocabulary has {twice!r} twice; every token stands in it once")
    return tuple(tokens)


def _token(place: str, token: object) -> Value:
    try:
        return canonical(token)
    except ArgumentError as error:
        raise ArgumentError(f"{place}: {error}") from error


def _shown(tokens: Iterable[Value], most: int = 12) -> str:
    shown = [repr(token) for token in itertools.islice(tokens, most + 1)]
    return ", ".join(shown[:most]) + (", ..." if len(shown) > most else "")
