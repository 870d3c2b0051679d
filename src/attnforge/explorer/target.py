"""What a network should compute, as data that a page can evaluate: programs of operations, and token programs.

Functions travel by name and arguments, composites as the nodes of their expression. Nothing here is code: the page has
its own meaning for every word (`template/target.js`, `template/tokens.js`), and tests compare it with ours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from ..errors import UnsupportedOperation
from ..expressions.composite import Composed
from ..expressions.expression import Call, Expr, Monomial, Number, Sum, Variable
from ..functions.registry import names
from ..functions.univariate import Univariate
from ..programs.ops import Apply, Attention, Constant, Linear, Mix, Normalise
from ..programs.program import Program
from ..rasp.network.compiled import CompiledProgram
from ..rasp.network.data import program_json, value_json

#: Functions of the registry that take arguments, which their names carry.
MADE = ("power", "piecewise_linear", "leaky_relu", "elu", "softplus")

EXACT = 2**53  # whole numbers up to this are doubles


def program_target(program: Program) -> dict[str, Any]:
    """A program as data; `UnsupportedOperation` where a function of it is a Python callable."""
    ops = []
    for op in program.ops:
        data: dict[str, Any] = {"op": op.word, "width": op.width, "in": list(op.inputs)}
        match op:
            case Constant():
                data["value"] = op.value.tolist()
            case Linear():
                data |= {"weights": [w.tolist() for w in op.weights], "bias": op.bias.tolist()}
            case Mix():
                data["matrix"] = op.matrix.tolist()
            case Apply():
                data["function"] = function_json(op.function)
            case Attention():
                rows = op.logit_mask(program.tokens).tolist()
                mask = [[None if logit == -math.inf else logit for logit in row] for row in rows]
                data |= {"scale": op.scale, "mask": mask}
            case Normalise():
                data |= {"eps": op.eps, "centred": op.centred}
        ops.append(data)
    kept = 1 if program.output_rows == "first" else program.tokens
    return {"kind": "program", "tokens": program.tokens, "ops": ops, "output": program.output, "rows": kept}


def token_target(net: CompiledProgram) -> dict[str, Any]:
    """A token program as data, and the values that its network's logits stand for."""
    outputs = None if net.outputs is None else [value_json(value) for value in net.outputs]
    return {"kind": "tokens", "program": _large(program_json(net.program)), "outputs": _large(outputs)}


def several_target(nets: Mapping[str, CompiledProgram]) -> dict[str, Any]:
    """The programs of one network as data, by name, in the order of their columns."""
    return {"kind": "several", "each": [{"name": name, **token_target(net)} for name, net in nets.items()]}


def _large(data: Any) -> Any:
    """The same data with whole numbers that doubles do not hold as fractions of texts, which a page reads exactly."""
    if isinstance(data, list):
        return [_large(part) for part in data]
    if isinstance(data, dict):
        return {key: [str(n) for n in part] if key == "fraction" else _large(part) for key, part in data.items()}
    return {"fraction": [str(data), "1"]} if isinstance(data, int) and abs(data) > EXACT else data


def function_json(function: Univariate) -> dict[str, Any]:
    """A function of one number: its name and arguments, or its expression, and the closed ends of its domain."""
    domain = function.domain
    ends = {
        "lo": domain.lo if domain.lo_closed and math.isfinite(domain.lo) else None,
        "hi": domain.hi if domain.hi_closed and math.isfinite(domain.hi) else None,
    }
    if isinstance(function.value, Composed):
        patches = [{"at": at, "radius": radius, "terms": terms} for at, radius, terms in function.value.patches]
        return {"nodes": _nodes(function.value), "patches": patches, **ends}
    if isinstance(function.source, Univariate):  # continued by constants beyond its domain
        return function_json(function.source)
    word, _, rest = function.name.partition("(")
    if function.source is not None or (word not in names() and word not in MADE):
        raise UnsupportedOperation(f"{function.name} is a Python function: a page cannot evaluate it")
    arguments = rest.removesuffix(")")
    if word == "power" and "/" in arguments:
        return {"name": word, "args": [float(Fraction(arguments))], **ends}
    return {"name": word, "args": json.loads(f"[{arguments}]"), **ends}


def _nodes(composed: Composed) -> list[Any]:
    """The nodes of an expression in y, children first, each with a word and the numbers of what it reads."""
    order = composed.formula.order
    at = {node: i for i, node in enumerate(order)}
    return [_node(node, at, composed) for node in order]


def _node(node: Expr, at: dict[Expr, int], composed: Composed) -> list[Any]:
    match node:
        case Number():
            return ["number", float(node.value)]
        case Variable():
            return ["y"]
        case Sum():
            return _sum(node, at)
        case Monomial():
            return ["product", [[at[base], function_json(fn)] for base, fn in composed.formula.powers[node]]]
        case Call():
            u = node.argument
            if node.function.name == "log" and isinstance(u, Sum) and u.constant == 1:
                return ["log1p", [[at[term], float(c)] for term, c in u.terms]]
            return ["call", at[u], function_json(node.function)]
        case _:
            raise UnsupportedOperation(f"a page does not know nodes of the kind {type(node).__name__}")


def _sum(node: Sum, at: dict[Expr, int]) -> list[Any]:
    """A sum; exp(u) - 1 and 1 - cos(u) keep their relative accuracy near 0, as they do in `expressions.evaluate`."""
    constant, terms = node.constant, []
    for term, coefficient in node.terms:
        factor = float(coefficient)
        near = isinstance(term, Call) and term.function.name in ("exp", "cos") and constant == -coefficient
        if constant and near and isinstance(term, Call):
            exponential, constant = term.function.name == "exp", Fraction(0)
            word, factor = ("expm1", factor) if exponential else ("sine squared", -2 * factor)
            terms.append([word, at[term.argument], factor])
        else:
            terms.append(["", at[term], factor])
    return ["sum", float(constant), terms]
