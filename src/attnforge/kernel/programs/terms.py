"""One form for ops that mean the same on every sequence (lemma K18), so that a program and its rewritten form compare.

Numbers are polynomials of atoms, with rational coefficients: sums, multiples, and products of truth values are worked
out; selectors are polynomials of selects, in which a select is its own square: "not" is 1 - x, "and" x y, "or"
x + y - x y. The width of a selector is linear in that polynomial. What compares positions of key and query is brought
to "not later" and "the same", and the width of x times "the same position" is x at the own position. Means of numbers
are linear in what is averaged. Everything else is an atom: a map of terms, an aggregate of a selector and a term.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from ..balls import NotProved
from .language import Domain, Function, Op, Undefined, Value, hit, is_number

Term = Any  # a polynomial, as a frozenset of (monomial, coefficient), of numbers; or the number of an atom
Monomial = tuple[int, ...]
Selection = frozenset[tuple[frozenset[int], int]]  # a polynomial of selects

MOST = 4096  # monomials of a polynomial: disjunctions of twelve selects
SAME = {"eq": 1, "lt": 0, "gt": 0}  # what comparing a value with itself gives
OPPOSITE = {"ne": "eq", "leq": "gt", "geq": "lt"}
BITS = {*SAME, *OPPOSITE, "true", "false", "logical_and", "logical_or", "logical_not"}
NUMBERS = {*BITS, "mul", "div", "mod", "pow"}  # operators that give numbers, or nothing
KEPT = {"sub", "neg", "abs", "min", "max", "floordiv"}  # and those that give numbers for numbers
PROBED = 256  # positions up to which a table that compares positions is recognised

ALL: Selection = frozenset({(frozenset(), 1)})


class Terms:
    """The terms of the ops of one or several programs on a domain; equal terms mean the same on every sequence."""

    def __init__(self, domain: Domain):
        self.domain = domain
        self.atoms: dict[Any, int] = {}
        self.keys: list[Any] = []
        self.bits: set[Term] = set()
        self.asked: set[Any] = set()  # functions and what they are asked for, in what has been read so far
        number = all(map(is_number, domain.vocabulary))
        self.tokens = self._atom(("tokens",), number)
        self.indices = self._atom(("indices",), True)
        self.leq, self.same = (self._leaf((name, self.indices, self.indices)) for name in ("leq", "eq"))
        self.length = self.width(ALL)

    def read(self, ops: Sequence[Op]) -> list[Term]:
        """The terms of a list of ops."""
        found: list[Term] = []
        for op in ops:
            found.append(self._of(op, [found[child] for child in op.children]))
        return found

    def _of(self, op: Op, given: list[Term]) -> Term:
        if op.kind in ("Tokens", "Indices"):
            return self.tokens if op.kind == "Tokens" else self.indices
        if op.kind == "Constant":
            return self.constant(op.value)
        if op.kind == "Map":
            assert op.function is not None
            self.asked.add((base(op.function), *given))
            return self.map(op.function, given)
        if op.kind == "Select":
            assert op.function is not None
            self.asked.add((base(op.function), *given))
            return self.select(op.function, given[0], given[1])
        if op.kind == "Not":
            return _sum((1, ALL), (-1, given[0]))
        if op.kind in ("And", "Or"):
            both = _times(given[0], given[1])
            return both if op.kind == "And" else _sum((1, given[0]), (1, given[1]), (-1, both))
        if op.kind == "SelectorWidth":
            return self.width(given[0])
        return self.aggregate(given[0], given[1], op.value)

    # ---- atoms and numbers

    def _atom(self, key: Any, number: bool, bit: bool = False) -> Term:
        if key not in self.atoms:
            self.atoms[key] = len(self.keys)
            self.keys.append(key)
        at = self.atoms[key]
        found: Term = frozenset({((at,), Fraction(1))}) if number else at
        if bit:
            self.bits.add(found)
        return found

    def constant(self, value: Value) -> Term:
        """The term of a constant."""
        if is_number(value):
            return frozenset({((), Fraction(value))} if value else ())  # type: ignore[arg-type]
        return self._atom(("constant", value), False)

    def known(self, term: Term) -> tuple[Value] | None:
        """The value of a term that is constant."""
        if isinstance(term, int):
            key = self.keys[term]
            return (key[1],) if key[0] == "constant" else None
        if all(monomial == () for monomial, _ in term):
            value = sum((c for _, c in term), Fraction(0))
            return (int(value) if value.denominator == 1 else value,)
        return None

    def _is_bit(self, term: Term) -> bool:
        return term in self.bits or self.known(term) in ((0,), (1,))

    def _product(self, a: Term, b: Term) -> Term:
        """The product of two truth values, whose atoms are truth values if their monomials are."""
        parts: dict[Monomial, Fraction] = {}
        for one, x in a:
            for other, y in b:
                monomial = tuple(sorted({*one, *other}))
                parts[monomial] = parts.get(monomial, Fraction(0)) + x * y
        return _kept(parts)

    def map(self, function: Function, given: Sequence[Term]) -> Term:
        """The term of a function of terms."""
        name = function.name
        values = [self.known(term) for term in given]
        if all(value is not None for value in values):
            try:
                return self.constant(function(*(value[0] for value in values)))  # type: ignore[index]
            except Undefined:
                pass
        polynomials = not any(isinstance(term, int) for term in given)
        if name in OPPOSITE:
            turned = OPPOSITE[name]
            return self._bit(combined((1, self.constant(1)), (-1, self.map(Function(turned, turned, None), given))))
        if name in SAME and given[0] == given[1]:
            return self.constant(SAME[name])
        if name in ("add", "sub", "neg") and polynomials:
            signs = {"add": (1, 1), "sub": (1, -1), "neg": (-1,)}[name]
            return combined(*zip(signs, given, strict=True))
        if name in ("mul", "div") and polynomials:
            for scale, term in ((values[1], given[0]), (values[0], given[1])):
                if scale is not None and (name == "mul" or (scale is values[1] and scale[0] != 0)):
                    by = Fraction(scale[0])  # type: ignore[arg-type]
                    return combined((by if name == "mul" else 1 / by, term))
        # a truth value may be a sum of atoms that are not: products are worked out of single ones alone
        if name.startswith("logical_") and all(map(self._is_bit, given)) and all(map(self._plain, given)):
            if name == "logical_not":
                return self._bit(combined((1, self.constant(1)), (-1, given[0])))
            both = self._product(given[0], given[1])
            either = combined((1, given[0]), (1, given[1]), (-1, both))
            return self._bit(both if name == "logical_and" else either)
        results = list(function.table.values()) if function.table is not None else None
        bit = name in BITS or (results is not None and all(v in (0, 1) and is_number(v) for v in results))
        number = name in NUMBERS or (name in KEPT and polynomials)
        number |= name == "add" and any(not isinstance(term, int) for term in given)
        number |= name == "where" and not any(isinstance(term, int) for term in given[1:])
        number |= results is not None and all(map(is_number, results))
        if given and all(term == self.tokens for term in given) and not number:
            number = self._of_tokens(function, len(given))
        return self._atom(("map", function.key, *given), number or bit, bit)

    def _of_tokens(self, function: Function, count: int) -> bool:
        try:
            return all(is_number(function(*[token] * count)) for token in self.domain.vocabulary)
        except Undefined:
            return False

    def _bit(self, term: Term) -> Term:
        self.bits.add(term)
        return term

    def _plain(self, term: Term) -> bool:
        """Whether all atoms of a truth value are truth values themselves."""
        return all(frozenset({((at,), Fraction(1))}) in self.bits for monomial, _ in term for at in monomial)

    # ---- selectors

    def _leaf(self, key: Any) -> Selection:
        if ("select", *key) not in self.atoms:
            self.atoms["select", *key] = len(self.keys)
            self.keys.append(("select", *key))
        return frozenset({(frozenset({self.atoms["select", *key]}), 1)})

    def select(self, function: Function, keys: Term, queries: Term) -> Selection:
        """The term of a select."""
        name = function.name
        if keys == queries == self.indices and function.table is not None:
            name = self._compared(function)
        if name in ("true", "false"):
            return ALL if name == "true" else frozenset()
        if name in OPPOSITE and not (name == "leq" and keys == queries == self.indices):
            turned = OPPOSITE[name]
            return _sum((1, ALL), (-1, self.select(Function(turned, turned, None), keys, queries)))
        if name in ("lt", "gt") and keys == queries == self.indices:
            return _sum((1, self.leq), (-1, self.same)) if name == "lt" else _sum((1, ALL), (-1, self.leq))
        return self._leaf((name or function.key, keys, queries))

    def _compared(self, function: Function) -> str:
        """The operator that compares positions as a table does, where there is one."""
        at = range(self.domain.length)
        if len(at) > PROBED:
            return ""
        try:
            found = [[hit(function, key, query) for key in at] for query in at]
        except Undefined:
            return ""
        tables = {
            "true": [[True for _ in at] for _ in at], "leq": [[k <= q for k in at] for q in at],
            "lt": [[k < q for k in at] for q in at], "gt": [[k > q for k in at] for q in at],
            "geq": [[k >= q for k in at] for q in at], "eq": [[k == q for k in at] for q in at],
        }  # fmt: skip
        return next((name for name, table in tables.items() if table == found), "")

    def width(self, selection: Selection) -> Term:
        """How many keys are selected: linear in the selection; at the own position alone where it must be the same."""
        (same, _), *_ = self.same
        parts = []
        for monomial, c in selection:
            here = same <= monomial
            parts.append((c, self._own(monomial - same) if here else self._atom(("width", monomial), True)))
        return combined(*parts)

    def _own(self, monomial: frozenset[int]) -> Term:
        """1 where selects all select the own position, 0 elsewhere."""
        own = self.constant(1)
        for leaf in monomial:
            _, key, *sides = self.keys[leaf]
            function = Function(key, key, None) if isinstance(key, str) else Function(key, "", dict(key))
            self.asked.add((base(function), *sides))
            own = self._product(own, self.map(function, sides))
        return own

    def aggregate(self, selection: Selection, operand: Term, default: Value) -> Term:
        """What is selected: linear in numbers, and the default where nothing is."""
        if not isinstance(operand, int) and not is_number(default):  # it does not count where the own key is selected
            own = combined(*((c, self._own(monomial)) for monomial, c in selection))
            constant = next((c for monomial, c in operand if monomial == ()), 0)
            default = constant if own == self.constant(1) else default
        if isinstance(operand, int) or not is_number(default):
            return self._atom(("aggregate", selection, operand, default), False)
        parts: list[tuple[Any, Term]] = []
        constant = Fraction(0)
        for monomial, c in operand:
            if monomial == ():
                constant = c
            else:
                parts.append((c, self._atom(("mean", selection, monomial), True)))
        empty = Fraction(default) - constant  # type: ignore[arg-type]
        if empty:
            parts.append((empty, self._atom(("nothing", selection), True, bit=True)))
        return combined(*parts, (constant, self.constant(1)))


def base(function: Function) -> object:
    """What decides where a function is defined: of two opposite comparisons, both are, or none."""
    return OPPOSITE.get(function.name, function.key) if function.name else function.key


def combined(*parts: tuple[Any, Term]) -> Term:
    """A linear combination of numbers."""
    total: dict[Monomial, Fraction] = {}
    for by, term in parts:
        for monomial, c in term:
            total[monomial] = total.get(monomial, Fraction(0)) + by * c
    return _kept(total)


def _kept(parts: dict[Any, Any]) -> frozenset[tuple[Any, Any]]:
    if len(parts) > MOST:
        raise NotProved(f"a count or a selector of the program has more than {MOST} terms")
    return frozenset((monomial, c) for monomial, c in parts.items() if c)


def _sum(*parts: tuple[int, Selection]) -> Selection:
    total: dict[frozenset[int], int] = {}
    for by, selection in parts:
        for monomial, c in selection:
            total[monomial] = total.get(monomial, 0) + by * c
    return _kept(total)


def _times(a: Selection, b: Selection) -> Selection:
    total: dict[frozenset[int], int] = {}
    for one, x in a:
        for other, y in b:
            total[one | other] = total.get(one | other, 0) + x * y
    return _kept(total)
