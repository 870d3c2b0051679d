"""Operations on constants of the target: torch computes them in float64, and what that rounds is charged.

The constants of a module are meant as real numbers: 1/3 is a third, and torch.exp(w) the exponential of the stored
number w. What torch makes of them is off by at most what the rules here say; `Tape.doubt` keeps how far each number may
be from the one that is meant, and the certificate counts it. Moving numbers about rounds nothing, and numbers are known
by their value wherever they go. A decision by rounded numbers is refused where they are too close to call. An operation
for which nothing is known here (a factorisation, say) is taken as torch computed it, with a warning: the certificate is
about these numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload

from ...dtypes import Array, dtype_name
from ...functions.directed import U, down, up
from .atoms import Refusal, Tape
from .handlers import TABLE
from .handlers.movement import coarser
from .handlers.table import Operation, words
from .values import Atoms, leaves, substitute

#: Operations that choose or copy entries, or make simple numbers; those of `handlers.movement` are among them.
MOVES = {
    *words("""zeros ones full scalar_tensor empty eye arange iota embedding broadcast_in_dim collapse collapse_view
    split_dim as_strided convert_element_type device_put one_hot view_of empty_permuted empty_strided"""),
    *(name for name, handler in TABLE.items() if handler.write.__module__.endswith("movement")),
}
#: Operations whose results move by no more than the entry that moves most.
SHORT = {*words("neg negative abs relu clamp clip clamp_min clamp_max maximum minimum fmax fmin amax amin max min")}
COMPARISONS = {*words("gt ge lt le eq ne")}
STEPS = {*words("floor ceil round trunc sign sgn")}  # of one number, and growing with it
LIFTED = 1 << 16  # numbers in a tensor that go through a handler one by one: that takes a second


def computed(tape: Tape, name: str, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The result of an operator on constants in float64, its doubts with the tape.

    >>> from attnforge.box import Box
    >>> tape, one = Tape(Box.cube(0, 1, shape=1), 1, 1), torch.ones(1, dtype=torch.float64)
    >>> third = computed(tape, "div", torch.ops.aten.div.Tensor, [one, 3 * one], {})
    >>> bool(tape.off(third.numpy())[0] > 0), tape.off(one.numpy()).tolist()
    (True, [0.0])
    """
    result = evaluated(target, args, kwargs)
    _refuse_signs_of_zero(name, result, [*leaves([args, kwargs])])
    _kept(tape, result, [*leaves([args, kwargs])])
    call = Operation(name, target, named(target, args, kwargs)) if isinstance(target, OpOverload) else None
    given = [leaf for leaf in leaves([args, kwargs]) if _real(leaf)]
    doubted = any(tape.off(leaf.numpy()).any() for leaf in given)
    if name in STEPS or not any(map(_real, leaves(result))):
        if doubted:
            _decided(tape, call, given)
        return result
    if name == "linspace" or (name in ("arange", "iota") and not _all_whole(result)):
        return _with(tape, result, 8 * U * np.abs(result.numpy()).max() * np.ones(result.shape))
    if name in MOVES or not given or (name in SHORT and not doubted):
        return result
    if name in SHORT:
        return _with(tape, result, max(float(tape.off(leaf.numpy()).max()) for leaf in given))
    if call is not None and name in RULES:
        return _with(tape, result, RULES[name](tape, call, result))
    for way in (_lifted, _inside):
        if call is not None and (found := way(tape, call, args, kwargs)) is not None:
            return found
    tape.unproved.add(name)
    return result


#: What tells 0 from minus 0, by its results or by infinities of either sign. Where it is 0 times data, as in 0 * x, its
#: sign is that of the data, and not known here.
SIGNED = {*words("signbit copysign atan2 arctan2 div divide true_divide reciprocal rsqrt pow")}


def _refuse_signs_of_zero(name: str, result: Any, given: list[Any]) -> None:
    """Raise for an operation whose result hangs on the sign of a zero."""
    zero = any(_real(leaf) and bool((leaf == 0).any()) for leaf in given)
    if name not in SIGNED or not zero:
        return
    wild = any(_real(leaf) and bool(leaf.isinf().any()) for leaf in leaves(result))
    finite = all(not _real(leaf) or bool(leaf.isfinite().all()) for leaf in given)
    if name in ("signbit", "copysign", "atan2", "arctan2") or (wild and finite):
        raise Refusal("it reads the sign of a constant 0, which has two, or divides by it")


def _kept(tape: Tape, result: Any, given: list[Any]) -> None:
    """Raise where the target rounds constants to fewer digits than it is made for, as weights that are quantised."""
    coarse = coarser(tape, given)
    if coarse is None:
        return
    for leaf in leaves(result):
        if _real(leaf) and not torch.equal(leaf.nan_to_num(), leaf.to(coarse).double().nan_to_num()):
            low, own = dtype_name(coarse), dtype_name(tape.own)
            raise Refusal(f"it rounds constants to {low}, and the target is made for {own}: round them before")


def evaluated(target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """An operation on constants, in float64."""

    def widen(leaf: Any) -> Any:
        narrow = isinstance(leaf, torch.dtype) and leaf.is_floating_point
        device = isinstance(leaf, torch.device)
        return torch.float64 if narrow else torch.device("cpu") if device else leaf

    with torch.no_grad():
        result = target(*substitute(args, widen), **{key: substitute(v, widen) for key, v in kwargs.items()})
    return substitute(result, promoted) if isinstance(result, (list, tuple)) else promoted(result)


def promoted(value: Any) -> Any:
    """Constants as the walk wants them: on the CPU, detached, float64 where they are floating-point."""
    if not isinstance(value, Tensor):
        return value
    plain = value.detach().cpu()
    return plain.double() if plain.is_floating_point() else plain


def named(target: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the operator's schema, defaults included."""
    schema = target._schema.arguments
    given = dict(zip((a.name for a in schema), args, strict=False)) | kwargs
    return {a.name: given.get(a.name, a.default_value) for a in schema if a.name in given or a.has_default_value()}


def _real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel() > 0


def _all_whole(result: Any) -> bool:
    return not _real(result) or bool((result == result.floor()).all())


def _with(tape: Tape, result: Any, off: Array | float) -> Any:
    """A result each entry of which may be off."""

    def change(leaf: Any) -> Any:
        if not _real(leaf):
            return leaf
        numbers = leaf.numpy()
        known = np.isfinite(numbers)
        far = np.where(known, np.broadcast_to(off, numbers.shape), 0.0)
        if not np.isfinite(far).all():
            raise Refusal("a constant in it is computed from rounded numbers, and cannot be known")
        return torch.from_numpy(tape.doubt(numbers, np.where(far > 0, up(far), 0.0)))

    return substitute(result, change) if isinstance(result, (list, tuple)) else change(result)


def _decided(tape: Tape, call: Operation | None, given: list[Tensor]) -> None:
    """Raise where a decision could be another one for the numbers that are meant."""
    name, settled = "" if call is None else call.name, False
    if call is not None and name in COMPARISONS:
        one, off, two, other = _pair(tape, call)
        far = up(off + other) * (1 + 4 * U)
        settled = not ((np.abs(one - two) <= far) & (off + other > 0)).any()
    elif call is not None and name in STEPS and len(given) == 1:
        numbers, off = given[0].numpy(), tape.off(given[0].numpy())
        ends = (np.where(off > 0, end, numbers) for end in (down(numbers - off), up(numbers + off)))
        settled = torch.equal(*(call.target(torch.from_numpy(end)) for end in ends))
    if not settled and name not in ("isnan", "isinf", "isfinite"):
        raise Refusal("it decides by constants that were rounded, and they are too close to call")


def _simple(numbers: Array) -> Any:
    """Whether a product with a number rounds nothing: 0 and powers of two."""
    return (numbers == 0) | (np.abs(np.frexp(numbers)[0]) == 0.5)


def _pair(tape: Tape, call: Operation) -> tuple[Array, Array, Array, Array]:
    """Two operands and how far each may be off."""
    one, two = (torch.as_tensor(value, dtype=torch.float64).numpy() for value in list(call.arguments.values())[:2])
    return one, tape.off(one), two, tape.off(two)


def _added(tape: Tape, call: Operation, result: Tensor) -> Array:
    one, off, two, other = _pair(tape, call)
    alpha = float(call.get("alpha", 1))
    one, off, two, other = (two, other, one, off) if call.name == "rsub" else (one, off, two, other)
    size = np.abs(one) + np.abs(alpha * two)
    exact = ((one == 0) | (two == 0)) & (abs(alpha) == 1)
    whole = (one == np.floor(one)) & (two == np.floor(two)) & (size < 2.0**53) & (abs(alpha) == 1)
    found: Array = (off + abs(alpha) * other) * (1 + 4 * U) + np.where(exact | whole, 0.0, 2 * U * size)
    return found


def _multiplied(tape: Tape, call: Operation, result: Tensor) -> Array:
    one, off, two, other = _pair(tape, call)
    rounding = np.where(_simple(one) | _simple(two) | _products_whole(one, two), 0.0, U * np.abs(result.numpy()))
    lost = np.where((one != 0) & (two != 0) & (np.abs(result.numpy()) < 2.0**-1021), 2.0**-1073, 0.0)
    found: Array = (np.abs(one) * other + off * (np.abs(two) + other)) * (1 + 8 * U) + rounding + lost
    return found


def _products_whole(one: Array, two: Array) -> Any:
    whole = (one == np.floor(one)) & (two == np.floor(two))
    return whole & (np.abs(one) < 2.0**26) & (np.abs(two) < 2.0**26)


def _divided(tape: Tape, call: Operation, result: Tensor) -> Array:
    if call.get("rounding_mode"):
        raise Refusal("it rounds constants")
    one, off, two, other = _pair(tape, call)
    size, room = np.abs(result.numpy()), np.maximum(np.abs(two) - other, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        moved = np.where(off + other > 0, (off + size * other) / room * (1 + 8 * U), 0.0)
    exact = (_simple(two) & (size >= 2.0**-1021)) | (one == 0)
    return moved + np.where(exact, 0.0, 2 * U * size + 2.0**-1073)


def _summed(tape: Tape, call: Operation, result: Tensor) -> Array:
    """Sums along axes: |x| in place of x says what rounding can do, and the doubts in place of x what they do."""
    x = next(iter(call.arguments.values()))
    size, far = _again(call, x.abs()), _again(call, torch.from_numpy(tape.off(x.numpy())))
    terms = x.numel() if call.name == "cumsum" else max(1.0, x.numel() / result.numel())
    whole = call.name != "mean" and bool((x == x.floor()).all()) and float(size.max()) < 2.0**53
    return far * (1 + 2 * terms * U) + (0.0 if whole or terms == 1 else 2 * (terms + 1) * U * size)


def _contracted(tape: Tape, call: Operation, result: Tensor) -> Array:
    one, two, *_ = call.arguments.values()
    off, other = (torch.from_numpy(tape.off(x.numpy())) for x in (one, two))
    terms = 1 if call.name in ("outer", "ger") else one.shape[-1]
    size = _again(call, one.abs(), two.abs())
    moved = _again(call, one.abs(), other) + _again(call, off, two.abs() + other)
    return moved * (1 + 2 * (terms + 2) * U) + 2 * terms * U * size + np.where(size > 0, terms * 2.0**-1073, 0.0)


def _again(call: Operation, *first: Tensor) -> Array:
    """The operator with other tensors as its first arguments."""
    schema, given = call.target._schema.arguments, dict(call.arguments)
    given |= dict(zip(given, first, strict=False))
    places = [given[a.name] for a in schema if not a.kwarg_only and a.name in given]
    found: Array = evaluated(
        call.target, places, {a.name: given[a.name] for a in schema if a.kwarg_only and a.name in given}
    ).numpy()
    return found


Rule = Callable[[Tape, Operation, Tensor], Array]
RULES: dict[str, Rule] = {
    **dict.fromkeys(words("add sub subtract rsub"), _added),
    **dict.fromkeys(words("mul multiply"), _multiplied),
    **dict.fromkeys(words("div divide true_divide"), _divided),
    **dict.fromkeys(words("sum mean cumsum"), _summed),
    **dict.fromkeys(words("mm bmm mv dot vdot matmul outer ger"), _contracted),
}


def _lifted(tape: Tape, call: Operation, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """What the operator's handler makes of the numbers, one by one: functions are enclosed in ball arithmetic."""
    handler = TABLE.get(call.name)
    real = [leaf for leaf in leaves([args, kwargs]) if _real(leaf)]
    if handler is None or not handler.write.__module__.endswith(("pointwise", "reduce")):
        return None
    if "self" not in call.arguments or (call.target.namespace != "aten" and len(call.arguments) > 1):
        return None  # a step of a definition may have other arguments than the operator of its name
    if sum(leaf.numel() for leaf in real) > LIFTED:
        return None

    def lift(leaf: Any) -> Any:
        return Atoms(tape.lift(leaf)) if _real(leaf) and bool(leaf.isfinite().all()) else leaf

    try:
        found = handler.write(
            tape, Operation(call.name, call.target, {k: substitute(v, lift) for k, v in call.arguments.items()})
        )
    except Refusal:
        return None
    return found if all(isinstance(leaf, Tensor) for leaf in leaves(found)) else None


def _inside(tape: Tape, call: Operation, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The operator step by step, as torch itself defines it in terms of simpler ones; None where it does not."""
    from torch._decomp import decomposition_table
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.node import map_arg

    tensors = [leaf for leaf in leaves([args, kwargs]) if isinstance(leaf, Tensor)]

    def again(*given: Tensor) -> Any:
        rest = iter(given)

        def swap(leaf: Any) -> Any:
            return next(rest) if isinstance(leaf, Tensor) else leaf

        return call.target(*substitute(args, swap), **{k: substitute(v, swap) for k, v in kwargs.items()})

    try:
        graph = make_fx(again, decomposition_table)(*tensors).graph  # type: ignore[arg-type]
    except Exception:  # whatever a definition cannot cope with: nothing is known of the operator then
        return None
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    if not nodes or any(node.target is call.target or node.op == "get_attr" or _writes(node) for node in graph.nodes):
        return None
    values: dict[Any, Any] = dict(zip((n for n in graph.nodes if n.op == "placeholder"), tensors, strict=True))
    for node in nodes:
        steps = list(map_arg(node.args, lambda n: values[n])), dict(map_arg(node.kwargs, lambda n: values[n]))
        short = node.target._schema.name.partition("::")[2] if isinstance(node.target, OpOverload) else ""
        values[node] = computed(tape, short, node.target, *steps) if short else node.target(*steps[0])
    output = graph.output_node().args[0]
    return map_arg(output, lambda n: values[n])


def _writes(node: Any) -> bool:
    """Whether a step of a definition writes into a tensor, which may be part of another."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable
