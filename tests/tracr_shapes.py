"""Objects of the same shape as those of Tracr's rasp module: class names, fields, annotations and evaluation rules."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


class Encoding(enum.Enum):
    CATEGORICAL = "categorical"
    NUMERICAL = "numerical"


class Comparison(enum.Enum):
    EQ = "=="
    LT = "<"
    LEQ = "<="
    GT = ">"
    TRUE = "True"

    def __call__(self, key: Any, query: Any) -> bool:
        if key is None or query is None:
            raise ValueError("key or query is None!")
        if self is Comparison.TRUE:
            return True
        return {"==": key == query, "<": key < query, "<=": key <= query, ">": key > query}[self.value]


class Annotations(Mapping[str, Any]):
    """Asked for a name or an encoding that nobody gave, it makes one up; a selector has no encoding and says so."""

    def __init__(self, expr: RASPExpr, **given: Any):
        self.expr, self.given = expr, given

    def __getitem__(self, key: str) -> Any:
        if key in self.given:
            return self.given[key]
        if key == "name":
            return self.expr.plain_name
        if key == "encoding":
            if not isinstance(self.expr, SOp):
                raise TypeError("not a SOp")
            return Encoding.CATEGORICAL
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.given)

    def __len__(self) -> int:
        return len(self.given)


class RASPExpr:
    plain_name = ""

    def __init__(self) -> None:
        self.annotations: Any = Annotations(self)

    def named(self, name: str) -> Any:
        self.annotations = Annotations(self, **{**self.annotations.given, "name": name})
        return self


class SOp(RASPExpr):
    def __eq__(self, other: object) -> Map:  # type: ignore[override]
        return Map(lambda x: x == other, self)

    def __lt__(self, other: Any) -> Map:
        return Map(lambda x: x < other, self)

    def __sub__(self, other: Any) -> SOp:
        if isinstance(other, SOp):
            return SequenceMap(lambda x, y: x - y, self, other)
        return Map(lambda x: x - other, self)

    def __and__(self, other: Any) -> SOp:
        return SequenceMap(lambda x, y: x and y, self, other)

    def __or__(self, other: Any) -> SOp:
        return SequenceMap(lambda x, y: x or y, self, other)

    def __invert__(self) -> SOp:
        return Map(lambda x: not x, self)


class TokensType(SOp):
    plain_name = "tokens"


class IndicesType(SOp):
    plain_name = "indices"


class LengthType(SOp):
    plain_name = "length"


tokens, indices, length = TokensType(), IndicesType(), LengthType()


class Map(SOp):
    plain_name = "map"

    def __init__(self, f: Callable[..., Any], inner: SOp):
        super().__init__()
        self.f, self.inner = f, inner


class SequenceMap(SOp):
    plain_name = "sequence_map"

    def __init__(self, f: Callable[..., Any], fst: SOp, snd: SOp):
        super().__init__()
        self.f, self.fst, self.snd = f, fst, snd


class LinearSequenceMap(SequenceMap):
    plain_name = "linear_sequence_map"

    def __init__(self, fst: SOp, snd: SOp, fst_fac: float, snd_fac: float):
        super().__init__(lambda x, y: fst_fac * x + snd_fac * y, fst, snd)
        self.fst_fac, self.snd_fac = fst_fac, snd_fac


class Full(SOp):
    plain_name = "full"

    def __init__(self, fill: Any):
        super().__init__()
        self.fill = fill


class ConstantSOp(SOp):
    plain_name = "constant_sop"

    def __init__(self, value: Sequence[Any], check_length: bool = True):
        super().__init__()
        self.value, self.check_length = value, check_length


class Selector(RASPExpr):
    pass


class Select(Selector):
    plain_name = "select"

    def __init__(self, keys: SOp, queries: SOp, predicate: Callable[..., Any]):
        super().__init__()
        self.keys, self.queries, self.predicate = keys, queries, predicate


class ConstantSelector(Selector):
    plain_name = "constant_selector"

    def __init__(self, value: Sequence[Sequence[bool]]):
        super().__init__()
        self.value = value


class SelectorAnd(Selector):
    plain_name = "selector_and"

    def __init__(self, fst: Selector, snd: Selector):
        super().__init__()
        self.fst, self.snd = fst, snd


class SelectorOr(SelectorAnd):
    plain_name = "selector_or"


class SelectorNot(Selector):
    plain_name = "selector_not"

    def __init__(self, inner: Selector):
        super().__init__()
        self.inner = inner


class SelectorWidth(SOp):
    plain_name = "selector_width"

    def __init__(self, selector: Selector):
        super().__init__()
        self.selector = selector


class Aggregate(SOp):
    plain_name = "aggregate"

    def __init__(self, selector: Selector, sop: SOp, default: Any = None):
        super().__init__()
        self.selector, self.sop, self.default = selector, sop, default


def numerical(sop: Any) -> Any:
    sop.annotations = Annotations(sop, **{**sop.annotations.given, "encoding": Encoding.NUMERICAL})
    return sop


def mean(chosen: list[Any], default: Any) -> Any:
    if not chosen:
        return default
    if isinstance(chosen[0], int):
        return sum(chosen) / len(chosen)
    if len(chosen) == 1:
        return chosen[0]
    raise ValueError(f"Unsupported type for aggregation: {chosen}")


def evaluate(expr: Any, xs: Sequence[Any]) -> Any:
    """What Tracr's evaluator gives."""
    n = len(xs)
    if isinstance(expr, LengthType):
        return [n] * n
    if isinstance(expr, TokensType | IndicesType):
        return list(xs) if isinstance(expr, TokensType) else list(range(n))
    if isinstance(expr, Map):
        return [None if x is None else expr.f(x) for x in evaluate(expr.inner, xs)]
    if isinstance(expr, SequenceMap):
        pairs = zip(evaluate(expr.fst, xs), evaluate(expr.snd, xs), strict=True)
        return [None if x is None or y is None else expr.f(x, y) for x, y in pairs]
    if isinstance(expr, Full):
        return [expr.fill] * n
    if isinstance(expr, ConstantSOp | ConstantSelector):
        return expr.value
    if isinstance(expr, Select):
        keys, queries = evaluate(expr.keys, xs), evaluate(expr.queries, xs)
        return [[bool(expr.predicate(k, q)) for k in keys] for q in queries]
    if isinstance(expr, SelectorAnd):
        rows = zip(evaluate(expr.fst, xs), evaluate(expr.snd, xs), strict=True)
        both = any if isinstance(expr, SelectorOr) else all
        return [[both(pair) for pair in zip(a, b, strict=True)] for a, b in rows]
    if isinstance(expr, SelectorNot):
        return [[not hit for hit in row] for row in evaluate(expr.inner, xs)]
    rows = evaluate(expr.selector, xs)
    if isinstance(expr, SelectorWidth):
        return [sum(row) for row in rows]
    values = evaluate(expr.sop, xs)
    return [mean([v for v, hit in zip(values, row, strict=True) if hit], expr.default) for row in rows]


def make_length() -> Any:
    return SelectorWidth(Select(tokens, tokens, Comparison.TRUE)).named("length")


def make_reverse() -> Any:
    opposite = ((make_length() - indices).named("opp_idx") - 1).named("opp_idx-1")
    return Aggregate(Select(indices, opposite, Comparison.EQ), tokens).named("reverse")


def make_hist() -> Any:
    return SelectorWidth(Select(tokens, tokens, Comparison.EQ).named("same_tok")).named("hist")


def make_sort(keys: SOp, least: float = 1, longest: int = 20) -> Any:
    apart = SequenceMap(lambda x, i: x + least * i / longest, keys, indices)
    place = SelectorWidth(Select(apart, apart, Comparison.LT).named("smaller")).named("target_pos")
    return Aggregate(Select(place, indices, Comparison.EQ), tokens).named("sort")


def make_frac_prevs(bools: SOp) -> Any:
    seen = Select(indices, indices, Comparison.LEQ)
    return numerical(Aggregate(seen, numerical(bools), default=0)).named("frac_prevs")


def make_pair_balance(opening: str, closing: str) -> Any:
    opens, closes = (make_frac_prevs(tokens == bracket) for bracket in (opening, closing))
    return numerical(LinearSequenceMap(opens, closes, 1, -1)).named("pair_balance")


def shift_by(offset: int, sop: SOp) -> Any:
    return Aggregate(Select(indices, indices, lambda k, q: q == k + offset), sop).named(f"shift_by({offset})")


def detect_pattern(pattern: str) -> Any:
    detectors = [tokens == t if i == 0 else shift_by(i, tokens == t) for i, t in enumerate(reversed(pattern))]
    found = detectors.pop()
    while detectors:
        found = found & detectors.pop()
    return found.named(f"detect_pattern({pattern})")


def make_shuffle_dyck(pairs: Sequence[str]) -> Any:
    balances = [make_pair_balance(*pair) for pair in pairs]
    fell, ends = balances[0] < 0, balances[0] == 0
    for balance in balances[1:]:
        fell, ends = fell | (balance < 0), ends & (balance == 0)
    everywhere = Select(indices, indices, Comparison.TRUE)
    has_neg = numerical(Aggregate(everywhere, numerical(Map(lambda x: x, fell)), default=0))
    at_end = Aggregate(Select(indices, make_length() - 1, Comparison.EQ), ends)
    return (at_end & ~has_neg).named("shuffle_dyck")
