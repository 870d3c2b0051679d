"""Fewer operations with the same meaning: affine maps folded, columns that nobody reads dropped, equal ones shared."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...dtypes import Array
from ...programs.affine import Affine, fold_affine
from ...programs.ops import Apply, Attention, Constant, Input, Linear, MaxTokens, Mix, Normalise, Op, Product, Softmax
from ...programs.program import Builder

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
        return _linear(new, [(names[j], np.eye(len(kept))[np.ix_(needed[j], kept)])], np.zeros(int(kept.sum())), label)

    match op:
        case Constant():
            return new.add(Constant(op.value[:, kept]), label)
        case Linear():
            terms = [
                (names[j], weight[np.ix_(needed[j], kept)])
                for j, weight in zip(op.inputs, op.weights, strict=True)
                if needed[j].any() and j in names
            ]
            return _linear(new, terms, op.bias[kept], label)
        case Mix():
            j = pick(op.input)
            inner = new.ops[j]
            if isinstance(inner, Mix):
                return new.mix(inner.input, op.matrix @ inner.matrix, label)
            if isinstance(inner, Constant):
                return new.constant(op.matrix @ inner.value, label)
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
            return _linear(new, [(other, np.diag(op.value[0]))], np.zeros(op.width), label)
    return new.product(left, right, label)


def _linear(new: Builder, terms: list[tuple[int, Array]], bias: Array, label: str) -> int:
    """An affine map; affine maps and constants that it reads are folded into it."""
    reads = [(_read(new, j), weight) for j, weight in terms if weight.any()]
    folded = fold_affine(reads, bias)
    total = {k: w for k, w in sorted(folded.weight.items()) if w.any()}
    if not total:
        return new.constant(folded.bias, label)
    if len(total) == 1 and not folded.bias.any():
        ((k, w),) = total.items()
        if w.shape[0] == w.shape[1] and (w == np.eye(len(w))).all():
            return k
    return new.linear(list(total.items()), folded.bias, label)


def _read(new: Builder, j: int) -> int | Affine[int, Array]:
    """A value, as an affine function of other values where it is one."""
    op = new.ops[j]
    if isinstance(op, Linear):
        return Affine(dict(zip(op.inputs, op.weights, strict=True)), op.bias)
    if isinstance(op, Constant) and (op.value == op.value[0]).all():
        return Affine({}, op.value[0])
    return j
