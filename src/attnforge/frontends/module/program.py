"""The front end for functions of tensors and PyTorch modules: `capture_module` turns one into a `Program`.

The target is captured on a small batch of points and then executed on symbols. Programs of one token treat the input as
one vector; where the input has shape (tokens, channels), a program that keeps the tokens apart is tried as well.
What comes of it is simplified: affine maps folded, columns that nobody reads dropped, equal ones shared.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ...box import Box
from ...dtypes import Array
from ...errors import ArgumentError, DomainError, UnsupportedOperation
from ...functions.directed import dot_up, up
from ...functions.univariate import REALS
from ...programs.affine import Form, folded, selects
from ...programs.enclose import Range, cells, ranges
from ...programs.interpret import every_value
from ...programs.ops import Apply, Attention, Constant, Input, Linear, MaxTokens, Mix, Normalise, Op, Product, Softmax
from ...programs.program import Builder, Program, depths
from .atoms import BatchRefusal, Refusal, Tape, broadcast
from .attention import GONE
from .capture import (
    BATCH,
    Captured,
    CaptureError,
    Convention,
    FunctionModule,
    describe,
    difference,
    evaluation,
    exported,
    join,
    point_text,
    probes,
    traced,
    unfaithful,
    warn_of_training,
)
from .handlers import supported_operations
from .surroundings import asked, others, read_training, same
from .values import Atoms, Unknown, atoms
from .walk import Execution, Obstacle

Mask = npt.NDArray[np.bool_]


def simplify(build: Builder, output: int) -> tuple[Builder, int]:
    """The same computation with fewer operations, and its output."""
    needed = _needed(build.ops, output)
    new = Builder(build.box, build.tokens)
    names: dict[int, int] = {0: new.input}
    for i, op in enumerate(build.ops):
        if i > 0 and needed[i].any():
            names[i] = _rebuilt(new, op, names, needed, i, build.labels[i])
    return new, names[output]


def _needed(ops: list[Op], output: int) -> list[Mask]:
    """For each value the columns that the output depends on; all of the input's."""
    needed = [np.zeros(op.width, dtype=bool) for op in ops]
    needed[output][:] = True
    for i in range(output, 0, -1):
        op, wanted = ops[i], needed[i]
        if not wanted.any():
            continue
        match op:
            case Linear():
                for j, weight in zip(op.inputs, op.weights, strict=True):
                    needed[j] |= (weight[:, wanted] != 0).any(1)
            case Mix() | Apply() | MaxTokens() | Product():
                for j in op.inputs:
                    needed[j] |= wanted
            case Softmax() | Normalise():
                wanted[:] = True
                needed[op.input][:] = True
            case Attention():
                needed[op.query][:] = needed[op.key][:] = True
                needed[op.value] |= wanted
    needed[0][:] = True
    return needed


def _rebuilt(new: Builder, op: Op, names: dict[int, int], needed: list[Mask], i: int, label: str) -> int:
    """The operation without the columns that nobody needs, in the new program."""
    kept = needed[i]

    def pick(j: int) -> int:
        """The columns of value j that this operation keeps; others may be there for somebody else."""
        if (needed[j] == kept).all():
            return names[j]
        chosen = np.eye(len(kept))[np.ix_(needed[j], kept)]
        nothing = np.zeros(int(kept.sum()))
        return _linear(new, [(names[j], chosen, np.zeros_like(chosen))], nothing, nothing, label)

    match op:
        case Constant():
            return new.add(Constant(op.value[:, kept], op.slack[:, kept]), label)
        case Linear():
            *offs, bias_off = op.slack
            terms = [
                (names[j], weight[np.ix_(needed[j], kept)], off[np.ix_(needed[j], kept)])
                for j, weight, off in zip(op.inputs, op.weights, offs, strict=True)
                if needed[j].any() and j in names
            ]
            return _linear(new, terms, op.bias[kept], bias_off[kept], label)
        case Mix():
            j = pick(op.input)
            inner = new.ops[j]
            if isinstance(inner, Mix) and (selects(op.matrix) or selects(inner.matrix.T)):
                return new.mix(inner.input, op.matrix @ inner.matrix, label)
            if isinstance(inner, Constant):
                size, count = np.abs(op.matrix) @ np.abs(inner.value), len(op.matrix)
                rounding = np.zeros_like(size) if selects(op.matrix) else up(count * 2.0**-52 * size)
                return new.constant(op.matrix @ inner.value, label, rounding + dot_up(np.abs(op.matrix), inner.slack))
            return new.mix(j, op.matrix, label)
        case Apply():
            return new.apply(pick(op.input), op.function, label)
        case Product():
            return _product(new, pick(op.left), pick(op.right), label)
        case MaxTokens():
            return new.max_tokens(pick(op.input), label)
        case Softmax():
            return new.softmax(names[op.input], label)
        case Normalise():
            return new.normalise(names[op.input], op.eps, op.centred, label)
        case Attention():
            return new.attention(
                names[op.query], names[op.key], pick(op.value), op.scale, op.causal, op.mask, label=label
            )
        case Input():
            return new.input
    raise AssertionError(f"{op.word} is not known here")


def _product(new: Builder, left: int, right: int, label: str) -> int:
    """A product; a scaling where one factor is the same number for every token."""
    for factor, other in ((left, right), (right, left)):
        op = new.ops[factor]
        if isinstance(op, Constant) and (op.value == op.value[0]).all():
            weight, off, nothing = np.diag(op.value[0]), np.diag(op.slack.max(0)), np.zeros(op.width)
            return _linear(new, [(other, weight, off)], nothing, nothing, label)
    return new.product(left, right, label)


def _linear(new: Builder, terms: list[tuple[int, Array, Array]], bias: Array, bias_off: Array, label: str) -> int:
    """An affine map; affine maps and constants that it reads are folded into it, and what that rounds is charged."""
    form = folded([(_read(new, j), weight, off) for j, weight, off in terms if weight.any()], bias, bias_off)
    off = {k: form.error(k) for k in form.weight}
    total = {k: w for k, w in sorted(form.weight.items()) if w.any() or off[k].any()}
    if not total:
        return new.constant(form.bias, label, form.error())
    if len(total) == 1 and not form.bias.any() and not form.error().any():
        ((k, w),) = total.items()
        if w.shape[0] == w.shape[1] and (w == np.eye(len(w))).all() and not off[k].any():
            return k
    return new.linear(list(total.items()), form.bias, label, (*(off[k] for k in total), form.error()))


def _read(new: Builder, j: int) -> int | Form:
    """A value, as an affine function of other values where it is one."""
    op = new.ops[j]
    if isinstance(op, Linear):
        *offs, far = op.slack
        weights, slip = (dict(zip(op.inputs, each, strict=True)) for each in (op.weights, offs))
        return Form(weights, {k: np.abs(w) for k, w in weights.items()}, slip, op.bias, np.abs(op.bias), far, 0)
    if isinstance(op, Constant) and (op.value == op.value[0]).all():
        return Form({}, {}, {}, op.value[0], np.abs(op.value[0]), op.slack.max(0), 0)
    return j


__all__ = ["capture_module", "join", "supported_operations"]


def capture_module(target: nn.Module | Callable[..., Tensor], boxes: Box | tuple[Box, ...]) -> Program:
    """The program that computes what a module or function of tensors does, on the box of its input.

    The target gets a batch of points, batch dimension first; a function that cannot treat a batch point by point gets
    one point at a time. Several boxes mean several arguments; `join` lays their tensors out for the program. What
    cannot be captured is listed in one `UnsupportedOperation`, with source lines.

    >>> print(capture_module(lambda x: torch.tanh(2 * x + 1), Box.cube(-1, 1, shape=3)))
    program of 1 token: <lambda>
      %0 = input : 3
      %1 = linear %0 [3x3]         # add...
      %2 = apply tanh %1           # tanh...
      output %2 : 3
    """
    boxes = (boxes,) if isinstance(boxes, Box) else tuple(boxes)
    if not boxes or not all(isinstance(box, Box) for box in boxes):
        raise ArgumentError("expected a box, or a tuple of boxes, one for each argument of the target")
    if isinstance(target, torch.export.ExportedProgram):
        target = target.module()
    if not callable(target):
        raise ArgumentError(f"expected a module or a function of tensors, got {type(target).__name__}")
    net = target if isinstance(target, nn.Module) else FunctionModule(target)
    _refuse_weightless(net)
    warn_of_training(net)
    if modes := read_training(net):
        warnings.warn(
            f"the module is in training mode, and the code of {', '.join(sorted(modes))} reads that; what is captured "
            "is its evaluation mode: call module.eval() first",
            UserWarning,
            stacklevel=2,
        )
    unproved: set[str] = set()
    with evaluation(net):
        program = _read_either_way(net, boxes, unproved)
        _refuse_asking(net, boxes, program)
    if unproved:
        warnings.warn(
            f"{describe(net)} computes constants with {', '.join(sorted(unproved))}, and how torch rounds there is not "
            "known: the certificate is about the numbers that it gave",
            UserWarning,
            stacklevel=2,
        )
    return program


def _refuse_asking(net: nn.Module, boxes: tuple[Box, ...], program: Program) -> None:
    """Raise for a target that asks where it is called, and computes something else elsewhere."""
    questions = asked(net, Convention(net, boxes, BATCH, set()).examples(torch.float64))
    for other in others(net, questions):
        why = ""
        try:
            with other.enter():
                again = _read_either_way(net, boxes, set())
            why = "" if same(program, again) else "computes something else"
        except (ArgumentError, DomainError, UnsupportedOperation) as error:
            why = f"cannot be read ({str(error).splitlines()[0]})"
        if why:
            raise UnsupportedOperation(
                f"{describe(net)} asks torch for {other.question} when it is called, and {why} where {other.where}: "
                "a network is one function for every call; write the target so that it does not ask"
            )


def _refuse_weightless(net: nn.Module) -> None:
    """Raise for a module whose weights have no values yet."""
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        lazy = isinstance(tensor, (UninitializedBuffer, UninitializedParameter))
        if lazy or tensor.is_meta:
            do = "run it once on an example" if lazy else "give it a device, module.to_empty(device='cpu'), and weights"
            raise ArgumentError(f"'{name}' of {describe(net)} has no values yet: {do}, then compile it")


def _read_either_way(net: nn.Module, boxes: tuple[Box, ...], unproved: set[str]) -> Program:
    """With a batch of points, or else one point at a time."""
    failure: Exception | None = None
    for batch in (BATCH, None):
        try:
            return _written(Convention(net, boxes, batch, unproved))
        except _Failure as problem:
            failure = failure if failure and problem.weak else problem.error
            if not problem.retry:
                break
    assert failure is not None
    raise failure


class _Failure(Exception):
    """A reading that did not work; `retry`: another one might; `weak`: the error of another one says more."""

    def __init__(self, error: Exception, retry: bool, weak: bool = False):
        super().__init__(str(error))
        self.error, self.retry, self.weak = error, retry, weak


def _written(reading: Convention) -> Program:
    """By torch.export; by a trace where export fails or what it gave is not the target."""
    problem: _Failure | None = None
    for capture in (exported, traced):
        try:
            captured = _captured(capture, reading)
            program = _best(captured, reading)
            wrong = difference(program, reading)
            if wrong is None:
                return program
            problem = _Failure(unfaithful(captured, reading) or wrong, retry=False)
        except CaptureError as error:
            problem = _Failure(error.error, retry=True, weak=reading.batch is None)
    assert problem is not None
    raise problem


def _captured(capture: Callable[[nn.Module, tuple[Tensor, ...]], Captured], reading: Convention) -> Captured:
    """In the dtype of the target's parameters; in float64 where its own constants ask for that."""
    try:
        return capture(reading.net, reading.examples(reading.own))
    except CaptureError as error:
        if reading.own == torch.float64 or not any(word in str(error) for word in ("dtype", "scalar type", "Double")):
            raise
        return capture(reading.net, reading.examples(torch.float64))


def _best(captured: Captured, reading: Convention) -> Program:
    """The cheaper one of the programs with and without tokens."""
    attempts = []
    for tokens in _layouts(reading.boxes):
        program, problems = _attempt(captured, reading, tokens)
        if program is not None:
            attempts.append(program)
            if _attends(program):
                break  # as one vector it would cost many times as much
    if attempts:
        return min(attempts, key=_cost)
    name, batch = describe(reading.net), [p for p in problems if p.batch]
    if len(batch) == len(problems):
        what = "".join(f"\n  {problem}" for problem in problems)
        error: Exception = ArgumentError(f"{name} does not treat a batch point by point{what}")
        raise _Failure(error, retry=True, weak=reading.batch is None)
    lines = "\n".join(f"  {problem}" for problem in problems)
    count = f"{len(problems)} operation{'s' if len(problems) > 1 else ''}"
    verb = "have" if len(problems) > 1 else "has"
    error = UnsupportedOperation(
        f"{name} uses {count} that {verb} no attention-only form here\n{lines}\n"
        "attnforge.frontends.module.supported_operations() lists what can be used"
    )
    raise _Failure(error, retry=bool(batch))


def _layouts(boxes: tuple[Box, ...]) -> Iterator[int]:
    """The numbers of tokens to try, the larger one first; several tensors are always one vector, end to end."""
    if len(boxes) == 1 and len(boxes[0].shape) == 2 and boxes[0].shape[0] > 1:
        yield boxes[0].shape[0]
    yield 1


def _joined(boxes: tuple[Box, ...]) -> Box:
    if len(boxes) == 1:
        return boxes[0]
    low, high = (torch.cat([getattr(box, side).reshape(-1) for box in boxes]) for side in ("lower", "upper"))
    return Box.between(low, high)


def _attends(program: Program) -> bool:
    """Whether tokens attend to tokens: not only to read the weights of a softmax over them."""
    heads = [op for op in program.ops if isinstance(op, Attention)]
    return bool(heads) and not any(isinstance(program.ops[head.value], Constant) for head in heads)


def _cost(program: Program) -> int:
    """Heads, roughly, and layers: a column of an operation that is not affine is a head, a mixing of tokens two."""
    heads = [2 if isinstance(op, Mix) else op.width for op in program.ops[1:] if not isinstance(op, (Constant, Linear))]
    return sum(heads) + 4 * depths(program.ops)[program.output]


def _attempt(captured: Captured, reading: Convention, tokens: int) -> tuple[Program | None, list[Obstacle]]:
    """The program with this many tokens, or why there is none."""
    tape = Tape(_joined(reading.boxes), tokens, reading.batch or 1, reading.own)
    walk = Execution(tape, captured.places)
    bound: dict[str, Any] = dict(captured.constants)
    bound |= dict(zip(captured.inputs, _inputs(tape, reading), strict=True))
    wanted = [captured.output, *captured.stored]
    result, *_ = walk.run(captured.module.graph, bound, wanted, captured.module)
    problems = list(walk.problems)
    for node in captured.stored:
        where = captured.places.source(node), captured.places.module(node)
        problems.append(Obstacle(str(node), "its result is kept for the next call: the target has a state", *where))
    if problems or isinstance(result, Unknown):
        return None, problems
    try:
        ids = _one_point(tape, atoms(tape, result), reading.batch)
        output, rows = _output(tape, ids)
    except Refusal as refusal:
        why, batch = str(refusal), isinstance(refusal, BatchRefusal)
        return None, [Obstacle("the output", why, captured.places.source(captured.output), batch=batch)]
    reading.unproved.update(tape.unproved)
    build, simple = simplify(tape.build, output)
    program = build.program(simple, describe(reading.net), tuple(ids.shape), rows)
    _refuse_cancelled(tape, output, program)
    _refuse_seen(tape, output, program.source)
    return _below_thresholds(program), []


def _below_thresholds(program: Program) -> Program:
    """A softplus that never meets its threshold is the smooth function, which has shorter heads."""
    bent = [i for i, op in enumerate(program.ops) if isinstance(op, Apply) and op.function.name.startswith("softplus(")]
    if not bent:
        return program
    with np.errstate(invalid="ignore", over="ignore"):
        found = ranges(program, *cells(replace(program, box=program.box.outward(torch.float32)), _CELLS[1]))
    ops = list(program.ops)
    for i in bent:
        op = ops[i]
        assert isinstance(op, Apply)
        if float(found[op.input].high.max()) < float(op.function.name[9:-1]):
            ops[i] = replace(op, function="softplus")
    return replace(program, ops=tuple(ops))


_CELLS = (1, 64, 2048)  # of the box, coarse to fine: how hard cancelled terms are shown to be defined


def _refuse_cancelled(tape: Tape, output: int, result: Program) -> None:
    """Raise `DomainError` where what is read with weight zero, in the end, is not shown to have a value on the box."""
    name, ops = result.source, tape.build.ops
    partial = [i for i, op in enumerate(ops) if isinstance(op, Apply) and op.function.domain != REALS]
    if not partial:
        return
    needed = _needed(ops, output)
    read = {i: tape.register(i)[needed[i]] for i in partial}
    kept = sum(op.width for op in result.ops if isinstance(op, Apply) and op.function.domain != REALS)
    slots = [*tape.cancelled, *(read.values() if sum(map(len, read.values())) > kept else ())]
    if not sum(map(len, slots)):
        return
    build, every = simplify(tape.build, tape.columns(np.unique(np.concatenate(slots))))
    program = build.program(every, name)
    undefined: list[int] = []
    for wanted in _CELLS:
        with np.errstate(invalid="ignore", over="ignore"):
            found = ranges(program, *cells(program, wanted))
        undefined = [i for i, op in enumerate(program.ops) if isinstance(op, Apply) and not _defined(op, found)]
        if not undefined:
            return
    op = program.ops[undefined[0]]
    assert isinstance(op, Apply)
    raise _Failure(
        DomainError(
            f"'{program.labels[undefined[0]]}' of {name} cancels in the result, but {op.function.name} cannot be shown "
            f"to be defined on {program.box!r}{_witness(program, op)}; choose a smaller box"
        ),
        retry=False,
    )


def _refuse_seen(tape: Tape, output: int, name: str) -> None:
    """Raise `UnsupportedOperation` where a finite mask does not hide its tokens from every query of the box."""
    needed = _needed(tape.build.ops, output)
    masked = {i: most for i, most in tape.hidden.items() if needed[i].any()}
    if not masked:
        return
    program = tape.build.program(output, name)
    with np.errstate(invalid="ignore", over="ignore"):
        found = ranges(program, *cells(program, _CELLS[0]))
    for i, most in masked.items():
        op = program.ops[i]
        assert isinstance(op, Attention)
        query, key = (found[j].size.max((0, 1)) for j in (op.query, op.key))
        reach = abs(op.scale) * float(query @ key) * (1 + op.width * 2.0**-40)
        mask = op.logit_mask(program.tokens)
        lowest = float(np.min(mask, initial=0.0, where=np.isfinite(mask)))
        if not most + reach < lowest - reach - GONE:
            raise _Failure(
                UnsupportedOperation(
                    f"'{program.labels[i]}' of {name} hides tokens by a mask of {most:g}, and its scores may be as "
                    f"large as {reach:.3g} on the box: use -inf, or a smaller box"
                ),
                retry=False,
            )


def _defined(op: Apply, found: list[Range]) -> bool:
    """Whether the arguments of a function stay away from its poles and open ends; closed ones they may touch."""
    whole = op.function.domain
    domain = replace(whole, lo=-math.inf if whole.lo_closed else whole.lo, hi=math.inf if whole.hi_closed else whole.hi)
    if domain == REALS:
        return True
    pairs = np.unique(np.stack([found[op.input].low.ravel(), found[op.input].high.ravel()], 1), axis=0)
    return bool(np.isfinite(pairs).all()) and not any(domain.offence("", *pair) for pair in pairs.tolist())


def _witness(program: Program, op: Apply) -> str:
    """Where the argument of a function leaves its domain, as far as a few points show it."""
    points = torch.cat([probes(program.box), program.box.sample(256, seed=300)])
    arguments = every_value(program, points)[op.input].reshape(len(points), -1)
    for point, row in zip(points, arguments.tolist(), strict=True):
        for y in row:
            if not math.isfinite(y) or op.function.domain.offence("", y, y):
                return f": its argument is {y:.6g} at {point_text((point,))}"
    return ""


def _inputs(tape: Tape, reading: Convention) -> list[Atoms]:
    """The atoms of the target's arguments."""
    found, start = [], 0
    for box in reading.boxes:
        width = box.dim // tape.tokens
        slots = tape.input_slots[start : start + width]
        start += width
        slot, token = np.tile(slots, tape.tokens), np.repeat(np.arange(1, tape.tokens + 1), width)
        points = [tape.pack(slot, token, i + 1).reshape(box.shape) for i in range(tape.batch)]
        found.append(Atoms(torch.stack(points) if reading.batch else points[0]))
    return found


def _one_point(tape: Tape, ids: Tensor, batch: int | None) -> Tensor:
    """The atoms of the first point's output; every other point's must be the same, of that point."""
    if batch is None:
        return ids
    if ids.dim() == 0 or len(ids) != batch:
        raise BatchRefusal(f"its shape {tuple(ids.shape)} does not begin with the batch dimension, {batch}")
    parts = tape.unpack(ids)
    own = np.arange(1, batch + 1).reshape(-1, *[1] * (ids.dim() - 1))
    like = all((part == part[:1]).all() for part in (parts.slot, parts.token))
    if not like or ((parts.point != own) & (parts.point != 0)).any():
        raise BatchRefusal("its points depend on one another, or on their place in the batch")
    return ids[0]


def _output(tape: Tape, ids: Tensor) -> tuple[int, Any]:
    """The output's value and rows: one row for each token where the tokens make up the result, else only the first."""
    parts, n = tape.unpack(ids.reshape(-1)), tape.tokens
    if not len(parts.slot):
        raise Refusal("it has no entries")
    if n > 1 and parts.token.any() and len(parts.slot) % n == 0:
        slot, token = parts.slot.reshape(n, -1), parts.token.reshape(n, -1)
        own = np.arange(1, n + 1)[:, None]
        if (slot == slot[0]).all() and ((token == own) | (token == 0)).all():
            return tape.columns(slot[0]), "all"
    tape.label = "output"
    if ((parts.token != 0) & (parts.token != 1)).any():
        parts = broadcast(tape, parts)
    return tape.columns(parts.slot), "all" if n == 1 else "first"
