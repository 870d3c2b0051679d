"""One head over centres (lemmas K40, K41 and K43): files of the family "theorem-cells"."""

from __future__ import annotations

import math
from typing import Any

from flint import arb, fmpq

from ...errors import CertificateError
from ..balls import ZERO, NotProved, largest, size
from ..file import Saved, Tensor
from ..program import ends, exact, number, whole
from ..rounding import Machine
from ..tokens import lambert
from . import hypothesis as hypotheses
from .hypothesis import MOST_POINTS, taken, widened
from .selection import (
    Sides,
    Slots,
    Table,
    averaged,
    expect,
    eye,
    first,
    gathered,
    logit_errors,
    loosened,
    own_rows,
    settled,
    unseen,
    values_error,
)

MOST_LEAVES = 1 << 20  # of a tree of the box: ten microseconds each


def prove_cells(saved: Saved, chosen: Any) -> tuple[arb, str, str]:
    """The bound of a file of cells, its dtype, and the hypothesis; choices are a sharpness, and a tree of the box whose
    leaves name the centre that is near."""
    config = saved.header["config"]
    low, high = ends(config["box"])
    centres, points = _centres(config, low, high)
    given, D = hypotheses.stated(config, points), len(low)
    tensors, machine = taken(saved, config["dtype"])
    if len(given.samples) != len(centres):
        raise CertificateError("there is not one sample for each centre")
    heads, depth = _heads(config, tensors, D)
    sharp, sides = exact(number(chosen["sharpness"])), widened(low, high, config["dtype"])
    if not sharp > 0:
        raise ValueError("the sharpness is not positive")
    reach = covered(chosen["tree"], sides, centres)
    outputs = len(given.samples[0]) // len(heads)
    worst = ZERO
    for t, slots in enumerate(heads):
        wanted = _keys(centres, [exact(m) for m in slots.middle], sharp)
        error, logit = logit_errors(machine, slots, wanted, sides)
        own = range(t * outputs, (t + 1) * outputs)
        off, most = values_error(slots.values, [0.0] * outputs, given.samples, own)
        if not largest([logit, 4 * most, *(size(arb(x)) for side in sides for x in side)]) < machine.huge:
            raise NotProved("numbers of the cells may overflow")
        unseen(machine, config["dtype"], depth, logit, D + 1 + len(heads))
        far = beyond(machine, loosened(machine, error), len(centres))
        rounding = averaged(machine, len(centres) * len(heads), len(centres), ZERO, most)
        worst = worst.max(settled(machine, given, reach + far / arb(sharp), off, most, rounding, []))
    return worst, config["dtype"], given.text


def beyond(machine: Machine, d: arb, slots: int) -> arb:
    """E G of lemma K43: by how much slots that are selected are behind the nearest, in the mean of computed weights."""
    return (lambert(slots) + 2 * d) / (1 - machine.u)


def covered(tree: Any, sides: Sides, centres: list[list[fmpq]]) -> arb:
    """The largest square of the distance of a point from the centre that its leaf names: the leaves cover the box."""
    exactly = [[arb(x) for x in row] for row in centres]
    worst, leaves = ZERO, 0
    waiting: list[tuple[Any, list[tuple[float, float]]]] = [(tree, list(sides))]
    while waiting:
        node, part = waiting.pop()
        if isinstance(node, list):
            axis, at, below, above = node
            i, place = whole(axis, 0, len(part) - 1), number(at)
            if not part[i][0] <= place <= part[i][1]:
                raise CertificateError("the tree splits the box outside of a part of it")
            waiting.append((below, [*part[:i], (part[i][0], place), *part[i + 1 :]]))
            waiting.append((above, [*part[:i], (place, part[i][1]), *part[i + 1 :]]))
            continue
        leaves += 1
        if leaves > MOST_LEAVES:
            raise NotProved(f"the tree has more than {MOST_LEAVES} leaves")
        centre = exactly[whole(node, 0, len(centres) - 1)]
        far = ZERO
        for (a, b), c in zip(part, centre, strict=True):
            far += size(arb(a) - c).max(size(arb(b) - c)) ** 2
        worst = worst.max(far)
    return worst.upper()


def _centres(config: Any, low: tuple[float, ...], high: tuple[float, ...]) -> tuple[list[list[fmpq]], str]:
    """Where samples were taken: at centres that are listed, or in the middles of equal cells; and that in words."""
    given = config["cells"]
    if isinstance(given, list):
        rows = [[exact(number(x)) for x in (row if isinstance(row, list) else [row])] for row in given]
        if not 1 <= len(rows) <= MOST_POINTS or any(len(row) != len(low) for row in rows):
            raise ValueError("its centres are not points of the box")
        return rows, hypotheses.of_centres(len(rows))
    most, counts = whole(given, 1, MOST_POINTS), [1] * len(low)
    sides = [b - a for a, b in zip(low, high, strict=True)]
    while True:  # one more where cells are longest, as long as there are not too many
        i = max(range(len(sides)), key=lambda k: sides[k] / counts[k])
        if math.prod(counts) // counts[i] * (counts[i] + 1) > most:
            break
        counts[i] += 1
    rows = [[]]
    for a, b, n in zip(map(exact, low), map(exact, high), counts, strict=True):
        rows = [[*row, a + (b - a) * (2 * k + 1) / (2 * n)] for row in rows for k in range(n)]
    return rows, hypotheses.of_cells(counts)


def _keys(centres: list[list[fmpq]], middle: list[fmpq], sharp: fmpq) -> list[list[arb]]:
    """2 beta (c - m) and -beta |c - m|^2."""
    found = []
    for row in centres:
        away = [c - m for c, m in zip(row, middle, strict=True)]
        found.append([*(arb(2 * sharp * x) for x in away), arb(-sharp * sum((x * x for x in away), fmpq(0)))])
    return found


# -- how files hold the head -----------------------------------------------------------------------------------------


def _heads(config: Any, tensors: dict[str, Tensor], D: int) -> tuple[list[Slots], float | None]:
    """The head as each token has it, one for all where tokens are alike; and how far below are slots that no token may
    see, None where there are none."""
    shape, form, dtype = config["box"]["shape"], config["form"], str(config["dtype"])
    if form not in ("paper", "tokens") or len(shape) not in (1, 2) or (form == "paper" and len(shape) == 1):
        raise ValueError("its form is none")
    tokens = whole(shape[0], 1) if form == "tokens" and len(shape) == 2 else 0
    if tokens:
        gathered(tensors, "", dtype, tokens, D // tokens)
    depth: float | None = None
    if config["attention"] == "cross" and config["causal"] is False:
        bias, rows, values = _across(tensors, D, tokens)
    elif config["attention"] == "self" and config["causal"] is True and not tokens:
        bias, rows, values, depth = _registers(tensors, D)
    elif config["attention"] == "self" and config["causal"] is False:
        bias, rows, values = _memory(tensors, D, tokens)
    else:
        raise ValueError("there are no such cells")
    if tensors or len(bias) != D + 1 + tokens or bias[D:] != [1.0, *[0.0] * tokens]:
        raise CertificateError("the query of the cells reads more than x and 1")
    keys, dead = own_rows(rows, tokens, D + 1)
    values_of = [values[t :: max(tokens, 1)] for t in range(max(tokens, 1))]
    middle = [-x for x in bias[:D]]
    return [Slots(middle, k, v) for k, v in zip(keys, values_of, strict=True)], dead if tokens else depth


def _reads(D: int, tokens: int) -> dict[tuple[int, ...], float]:
    """The query (x, 1, position)."""
    shape = D + tokens, D + 1 + tokens
    return {**eye(shape, count=D), **eye(shape, D, D + 1, tokens)}


def _memory(tensors: dict[str, Tensor], D: int, tokens: int) -> tuple[list[float], Table, Table]:
    start = "layer.groups.0."
    (bias,), (rows,), (values,) = (tensors.pop(start + name).rows() for name in ("b_Q", "M_K", "M_V"))
    width = len(values[0])
    expect(tensors, start + "W_Q", (1, D + tokens, D + 1 + tokens), first(_reads(D, tokens)))
    expect(tensors, start + "W_O", (1, width, width), first(eye((width, width))))
    return bias, rows, values


def _across(tensors: dict[str, Tensor], D: int, tokens: int) -> tuple[list[float], Table, Table]:
    """Keys and values of a second sequence, the one that the file holds."""
    context, inner = tensors.pop("layer.context").rows(), D + 1 + tokens
    whole_width = len(context[0])
    expect(tensors, "layer.W_Q", (D + tokens, inner), _reads(D, tokens))
    expect(tensors, "layer.W_K", (whole_width, inner), eye((whole_width, inner)))
    values = whole_width - inner
    expect(tensors, "layer.W_V", (whole_width, values), eye((whole_width, values), inner))
    bias = list(tensors.pop("layer.b_Q").numbers)
    return bias, [row[:inner] for row in context], [row[inner:] for row in context]


def _registers(tensors: dict[str, Tensor], D: int) -> tuple[list[float], Table, Table, float]:
    """Slots that are tokens, before all others; these have a mark, and weigh nothing as keys."""
    rows, inner = tensors.pop("layer.first").rows(), D + 1
    width, values = len(rows[0]), len(rows[0]) - 2 * (D + 1)
    (bias,) = tensors.pop("layer.heads.b_Q").rows()
    (key,) = tensors["layer.heads.W_K"].rows()
    depth = -key[D][inner]
    if any(any(row[: D + 1]) for row in rows) or len(bias) != inner + 1 or bias[inner] != 1 or values < 1:
        raise CertificateError("registers are told from data by more than their mark")
    expect(tensors, "layer.mark", (width - D,), {(0,): 1.0})
    expect(tensors, "layer.heads.W_Q", (1, width, inner + 1), first(eye((width, inner + 1), count=D)))
    marked = {**eye((width, inner + 1), D + 1, 0, inner), (D, inner): -depth}
    expect(tensors, "layer.heads.W_K", (1, width, inner + 1), first(marked))
    expect(tensors, "layer.heads.W_V", (1, width, values), first(eye((width, values), D + 1 + inner)))
    expect(tensors, "layer.heads.W_O", (1, values, values), first(eye((values, values))))
    return bias[:inner], [row[D + 1 : D + 1 + inner] for row in rows], [row[D + 1 + inner :] for row in rows], depth
