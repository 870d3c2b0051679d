"""Token programs in the manner of RASP: a language of sequence operations, its meaning, and its domains.

>>> from attnforge import rasp
>>> from attnforge.rasp import aggregate, indices, length, select, tokens
>>> reverse = aggregate(select(indices, length - 1 - indices, rasp.eq), tokens).named("reverse")
>>> reverse(["a", "b", "c"])
['c', 'b', 'a']
>>> reverse
aggregate(select(indices, length - 1 - indices, eq), tokens)
"""

from . import library
from .domain import Sequences
from .interpret import run_many
from .language import (
    Aggregate,
    And,
    Constant,
    Indices,
    Map,
    Node,
    Not,
    Operator,
    Or,
    Select,
    Selector,
    SelectorWidth,
    SOp,
    Table,
    Tokens,
    aggregate,
    apply,
    categorical,
    eq,
    evaluate,
    false,
    geq,
    gt,
    indices,
    length,
    leq,
    lt,
    ne,
    numerical,
    select,
    selector_width,
    to_text,
    tokens,
    true,
    walk,
    where,
)
from .text import Lambda, as_program, parse
from .tracr import from_tracr
from .values import Value

__all__ = [
    "Aggregate",
    "And",
    "Constant",
    "Indices",
    "Lambda",
    "Map",
    "Node",
    "Not",
    "Operator",
    "Or",
    "SOp",
    "Select",
    "Selector",
    "SelectorWidth",
    "Sequences",
    "Table",
    "Tokens",
    "Value",
    "aggregate",
    "apply",
    "as_program",
    "categorical",
    "eq",
    "evaluate",
    "false",
    "from_tracr",
    "geq",
    "gt",
    "indices",
    "length",
    "leq",
    "library",
    "lt",
    "ne",
    "numerical",
    "parse",
    "run_many",
    "select",
    "selector_width",
    "to_text",
    "tokens",
    "true",
    "walk",
    "where",
]
