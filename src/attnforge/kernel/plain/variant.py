"""Variants of plain transformers (lemma K34): files of the family "variant", whose columns stand in another order and
with other signs, whose heads may be split, and which have heads that nothing depends on."""

from __future__ import annotations

from typing import Any

from flint import arb, arb_mat

from ...errors import CertificateError
from ..balls import NotProved, largest, size
from ..file import Saved, Tensor, outward
from ..program import number, whole
from ..rounding import MACHINES
from .stream import WIDEST

NOTHING = {"purpose": "", "place": [-1, -1, -1], "slots": 0}  # what fills a block
Rows = list[list[float]]
Seat = tuple[int, int, int]  # block, first coordinate, number of coordinates


def straightened(saved: Saved) -> Saved:
    """The plain transformer that a variant is, up to the order and signs of columns; other files as they are."""
    if saved.header.get("family") != "variant":
        return saved
    try:
        return _straightened(saved)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise CertificateError(f"the file describes no variant of a plain transformer: {error!r}") from error


def _straightened(saved: Saved) -> Saved:
    config, tensors = saved.header["config"], dict(saved.tensors)
    dtype, width = config["dtype"], whole(config["stream"], 1, WIDEST)
    if dtype not in MACHINES or any(t.dtype != dtype for t in tensors.values()):
        raise NotProved(f"the kernel speaks of networks stored and run in float32 or float64, not {dtype!r}")
    rows = {name: t.rows() for name, t in tensors.items()}
    places = _places(config["basis"], width)
    blocks = [list(row) for row in config["heads"]]
    into = [rows[f"blocks.{b}.attention.in_proj_weight"] for b in range(len(blocks))]
    out = [rows[f"blocks.{b}.attention.out_proj.weight"] for b in range(len(blocks))]
    if any(len(row) != width for part in (*into, *out) for row in part) or any(not row for row in blocks):
        raise ValueError("a block has another width")
    _finite(config, rows, into, out, dtype)
    layers = [{about["place"][0] for about in row} - {-1} for row in blocks]
    order = [i for found in layers for i in found]
    if any(len(found) > 1 for found in layers) or order != sorted(order):
        raise CertificateError("heads of a variant stand in other blocks than the layers that they are of")
    first: dict[tuple[int, ...], Seat] = {}
    free: list[tuple[int, range]] = []
    for b, row in enumerate(blocks):
        if width % len(row):
            raise ValueError("a stream cannot be shared by the heads of a block")
        d = width // len(row)
        for h, about in enumerate(row):
            place, inside = tuple(about["place"]), range(h * d, (h + 1) * d)
            if place[0] < 0:
                free.append((b, inside))
            elif place in first:
                _join(into, out, width, first[place], (b, h * d, d))
            else:
                first[place] = b, h * d, d
                continue
            row[h] = NOTHING
    _ignored(rows, into, out, free, width)
    for b, row in enumerate(blocks):  # what nothing depends on is left out
        d = width // len(row)
        for j in (j for h, about in enumerate(row) if about is NOTHING for j in range(h * d, (h + 1) * d)):
            for third in range(3):
                into[b][third * width + j] = [0.0] * width
            for line in out[b]:
                line[j] = 0.0
    for name, table in rows.items():
        if name.endswith(("in_proj_weight", "positions", "readout.weight")):
            rows[name] = [[sign * row[c] for c, sign in places] for row in table]
        elif name.endswith(("embed.weight", "out_proj.weight")):
            rows[name] = [[sign * x for x in table[c]] for c, sign in places]
    again = {name: Tensor(t.dtype, t.shape, tuple(_flat(rows[name]))) for name, t in tensors.items()}
    return Saved({**saved.header, "family": "plain", "config": {**config, "heads": blocks}}, again, saved.weights)


def _places(basis: Any, width: int) -> list[tuple[int, float]]:
    """For every column the direction that it is, and its sign; directions that are no column come last."""
    found: list[tuple[int, float]] = []
    for at, numbers in zip(basis["at"], basis["numbers"], strict=True):
        if len(at) != 1 or len(numbers) != 1 or number(numbers[0]) not in (-1.0, 1.0):
            raise NotProved("the kernel has no rule for variants whose columns are mixed")
        found.append((whole(at[0], 0, width - 1), float(numbers[0])))
    used = {c for c, _ in found}
    if len(used) < len(found):
        raise ValueError("two columns are one direction")
    return found + [(c, 1.0) for c in range(width) if c not in used]


def _join(into: list[Rows], out: list[Rows], width: int, one: Seat, other: Seat) -> None:
    """Let a head write what another part of it writes: both compute the same weights of the same values."""
    (b, at, d), (b2, at2, d2) = one, other
    for third in range(3):
        by = (d / d2) ** 0.5 if third == 0 else 1.0  # queries are stored times the root of their number of coordinates
        for j in range(max(d, d2)):
            mine = into[b][third * width + at + j] if j < d else [0.0] * width
            theirs = into[b2][third * width + at2 + j] if j < d2 else [0.0] * width
            if mine != [by * x for x in theirs]:
                raise CertificateError("a part of a head is not the same head")
    for line, other_line in zip(out[b], out[b2], strict=True):
        mine, theirs = line[at : at + d], other_line[at2 : at2 + d2]
        if any(mine) and any(theirs):
            raise CertificateError("two parts of a head write the same column")
        if any(theirs):
            line[at : at + d] = (theirs + [0.0] * d)[:d]


def _ignored(
    rows: dict[str, Any], into: list[Rows], out: list[Rows], free: list[tuple[int, range]], width: int
) -> None:
    """Refuse heads that stand for nothing unless what they write is 0, or is read by nobody."""
    touched = {c for b, inside in free for c in range(width) if any(out[b][c][j] for j in inside)}
    own = {(b, third * width + j) for b, inside in free for third in range(3) for j in inside}
    written = {c for b, part in enumerate(out) for c, line in enumerate(part)
               if any(x for j, x in enumerate(line) if (b, j) not in own)}  # fmt: skip
    given = {c for table in (rows["positions"], list(zip(*rows["embed.weight"], strict=True))) for row in table
             for c, x in enumerate(row) if x}  # fmt: skip
    alive = touched | written | given
    loud = set()  # columns that are written by heads whose values are not all zeros
    for b, inside in free:
        if any(into[b][2 * width + j][c] for j in inside for c in alive):
            loud |= {c for c in range(width) if any(out[b][c][j] for j in inside)}
    read = {c for b, part in enumerate(into) for i, row in enumerate(part) if (b, i) not in own
            for c in loud if row[c]}  # fmt: skip
    read |= {c for row in rows["readout.weight"] for c in loud if row[c]} | (loud & (written | given))
    if read:
        raise CertificateError("a head that should do nothing changes what other heads read")


def _finite(config: Any, rows: dict[str, Any], into: list[Rows], out: list[Rows], dtype: str) -> None:
    """Refuse numbers that may overflow anywhere: 0 times infinity is not 0."""
    machine = MACHINES[dtype]
    ends = [outward(number(x), dtype, above) for box in config["boxes"]
            for key, above in (("lower", False), ("upper", True)) for x in _flat(box[key])]  # fmt: skip
    most = largest([size(arb(x)) for x in ends]).max(1)
    width = len(rows["positions"][0])
    sizes = [size(sum((size(arb(x)) for x in row), arb(0))) * most * 2 for row in rows["embed.weight"]]
    sizes = [a + largest([size(arb(row[c])) for row in rows["positions"]]) for c, a in enumerate(sizes)]
    for part, back in zip(into, out, strict=True):
        size_of = arb_mat(width, 1, sizes)
        thirds = arb_mat(3 * width, width, [size(arb(x)) for row in part for x in row]) * size_of
        q, k, v = ([thirds[third * width + j, 0] for j in range(width)] for third in range(3))
        grown = arb_mat(width, width, [size(arb(x)) for row in back for x in row]) * arb_mat(width, 1, v)
        sizes = [a + 2 * grown[c, 0] for c, a in enumerate(sizes)]
        logit = 2 * sum((a * b for a, b in zip(q, k, strict=True)), arb(0))
        if not largest([logit, *(2 * x for x in (*q, *k, *v)), *sizes]) < machine.huge:
            raise NotProved("numbers of a variant may overflow")


def _flat(x: Any) -> list[Any]:
    return [number for entry in x for number in _flat(entry)] if isinstance(x, (list, tuple)) else [x]
