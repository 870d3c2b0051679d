"""Ramps of the theorems (lemmas K30 and K45): files of the family "theorem-ramp", clip(w.x + t, a, b).

Whatever form they are laid out in, a token's y = w.x + t is computed, and heads with constant keys read it. So they are
a network of an affine map, a row for each token that has weights of its own, and a layer of heads over its results.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from flint import arb, fmpq

from ...errors import CertificateError
from ..balls import ZERO, NotProved, largest, size, up
from ..file import Saved, Tensor, outward
from ..functions import Function, Node
from ..program import Op, Program, number, whole
from ..programs.prove import DEAD
from ..rounding import MACHINES, affine_rounding
from ..scalar import Head, HeadSum, error_on
from .heads import MEMORY, SELF, Alone, flat, on_cells, renamed, shape_of

MOST = 1 << 12  # inputs of all tokens, slots of all heads, channels
ALWAYS = ("W_Q", "W_O", "M_K", "M_V")
NOTHING = Function("nothing", (), (("number", Fraction(0)),))  # what a channel is to get that is not written
Rows = list[list[float]]
Tables = dict[str, Any]  # of heads, as nested lists, one entry for each head


def ramped(saved: Saved) -> Alone:
    """The network of an affine map and a clip that a ramp's file describes."""
    try:
        return _ramped(saved.header["config"], dict(saved.tensors))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise CertificateError(f"the file describes no ramp: {error!r}") from error


@dataclass(frozen=True)
class _Given:
    """The numbers of a ramp's file: an affine map for each of n tokens as it is stored and as it is meant, the heads,
    and by how much what the heads read is less than y."""

    rows: Rows
    biases: list[float]
    w: Rows
    meant: list[float]
    tables: Tables
    shift: Fraction
    radius: float
    dtype: str


def _given(config: Any, tensors: dict[str, Tensor]) -> _Given:
    dtype, body = config["dtype"], config["body"]
    if dtype not in MACHINES or any(tensor.dtype != dtype for tensor in tensors.values()):
        raise NotProved(f"the kernel speaks of networks stored and run in float32 or float64, not {dtype!r}")
    for name, tensor in tensors.items():
        if not all(size(arb(x)) < MACHINES[dtype].huge for x in tensor.numbers):
            raise CertificateError(f"no bound holds for weights that are not finite, or may overflow: {name}")
    if type(config["causal"]) is not bool:
        raise ValueError("it is neither causal nor not")
    wanted = config["w"] if isinstance(config["w"][0], list) else [config["w"]]
    shifts = config["t"] if isinstance(config["t"], list) else [config["t"]]
    n = max(len(wanted), len(shifts))
    wanted, shifts = (given * n if len(given) == 1 else given for given in (wanted, shifts))
    w, t = [[number(x) for x in row] for row in wanted], [number(x) for x in shifts]
    d, radius = len(w[0]), number(config["radius"])
    if not len(w) == len(t) == n or any(len(row) != d for row in w) or not radius > 0 or not n * d <= MOST:
        raise ValueError("its numbers are not those of a ramp")
    made = _paper if body in ("PaperHead", "PaperHeads") else _tokens
    rows, biases, tables, beside = made(body, config, tensors, n)
    if len(rows) != n or len(biases) != n or any(len(row) != d for row in rows):
        raise ValueError("its weights are not those of such tokens")
    if len(tables["W_Q"]) * n * len(tables["M_K"][0]) > MOST:
        raise NotProved(f"the kernel takes its time beyond {MOST} slots")
    shift = Fraction(t[0]) - Fraction(biases[0]) if beside else Fraction(0)
    return _Given(rows, biases, w, biases if beside else t, tables, shift, radius, dtype)


def _ramped(config: Any, tensors: dict[str, Tensor]) -> Alone:
    given = _given(config, tensors)
    rows, biases, w, dtype, radius = given.rows, given.biases, given.w, given.dtype, given.radius
    n, d, scope = len(w), len(w[0]), "self" if "b_K" in given.tables else "memory"
    one = _one_channel(given.tables, whole(config["channel"][0], 0), whole(config["channels"], 1, MOST))
    clip, apart = _clip(config, given.shift)
    line = {"weights": [[[w[c // d][c % d] * (c // d == i) for i in range(n)] for c in range(n * d)]],
            "bias": given.meant, "off": [[[0.0] * n] * (n * d), [0.0] * n]}  # fmt: skip
    ops = (Op("input", (), n * d), Op("linear", (0,), n, line), Op("apply", (1,), n, {"function": clip}))
    first = tuple(rows[c // d][c % d] * (c // d == i) for c in range(n * d) for i in range(n))
    found = {"network.layers.0.S": Tensor(dtype, (n * d, n), first),
             "network.layers.0.s": Tensor(dtype, (n,), tuple(biases))}  # fmt: skip
    found |= {f"network.layers.1.groups.0.{name}": _stored(dtype, table) for name, table in _copies(one, n).items()}
    ends = (-radius,) * (n * d), (radius,) * (n * d)
    return Alone(Program(*ends, 1, ops, 2, 1), found, ((), SELF if scope == "self" else MEMORY), dtype, apart)


def _tokens(body: str, config: Any, tensors: dict[str, Tensor], n: int) -> tuple[Rows, list[float], Tables, bool]:
    """The affine map and the heads of a token-wise form, and whether the heads' query is that map (lemma K45)."""
    for name in ("w", "t"):  # a description of what the layers hold themselves
        tensors.pop(name, None)
    causal = config["causal"]
    if body == "AfterAffine":
        prefix = "net." if causal else "net.layers."
        (rows, biases), last = (tensors.pop(f"{prefix}0.{name}").rows() for name in "Ss"), f"{prefix}1."
    elif body == "Slots":
        rows, biases, last = [], [], "layer."
    else:
        raise ValueError(f"there is no form {body!r}")
    if causal:
        radius = arb(number(config["radius"])) * (1 + arb(2.0**-10))
        reach = [radius] * len(config["w"])
        if rows:
            reach = [sum((size(arb(x)) * radius for (x,) in rows), size(arb(biases[0])))]
        tables = _registers(tensors, last, reach, config["dtype"])
    else:
        named = renamed(tensors, f"{last}groups.0.", 0)
        tables = {name.rpartition(".")[2]: tensor.rows() for name, tensor in named.items()}
    if rows:
        return [[x for (x,) in rows]], biases, tables, False
    if any(query[1:] != [0.0] * (len(query) - 1) for head in tables["W_Q"] for query in head) or len(tables["W_Q"]) > 1:
        raise CertificateError("the queries of a ramp read its scalar alone")
    rows, (bias, *more) = [[query[0] for query in tables["W_Q"][0]]], tables["b_Q"][0]
    width = len(more)
    return rows, [bias], {**tables, "W_Q": [[[1.0] + [0.0] * width]], "b_Q": [[0.0, *more]]}, True


def _paper(body: str, config: Any, tensors: dict[str, Tensor], n: int) -> tuple[Rows, list[float], Tables, bool]:
    """The same of the paper's form, whose query is (2 y, -1); keys of one head are products that are rounded."""
    if config["causal"]:
        raise ValueError("the paper's form has no mask")
    w, t = (tensors.pop(name).rows() for name in ("w", "t"))
    rows = w if isinstance(w[0], list) else [w] * n
    biases = t if len(t) == n else t * n
    if body == "PaperHead":
        (factor,), index, square, value = (tensors.pop(name).rows() for name in ("B", "index", "square", "value"))
        dtype = config["dtype"]
        keys = [[[_product(factor, a, dtype), _product(factor, b, dtype)] for a, b in zip(index, square, strict=True)]]
        values, channels = [value], len(value[0])
        out = [[[float(i == j) for j in range(channels)] for i in range(channels)]]
    else:
        keys, heads = tensors.pop("key").rows(), tensors.pop("value").rows()
        values, channels = [[[x] for x in head] for head in heads], whole(config["channels"], 1, MOST)
        out = [[[float(j == 0) for j in range(channels)]]] * len(keys)
    if tensors or any(len(key) != 2 for head in keys for key in head):
        raise ValueError(f"it has the tensors {', '.join(sorted(tensors))}, or keys of another width")
    count = len(keys)
    query, shift = [[[2.0, 0.0]]] * count, [[0.0, -1.0]] * count
    return rows, biases, {"W_Q": query, "b_Q": shift, "M_K": keys, "M_V": values, "W_O": out}, False


def _product(a: float, b: float, dtype: str) -> float:
    """fl(a b): a product of two float32 numbers is a float64 number."""
    found = a * b if dtype == "float64" else float(struct.unpack("<f", struct.pack("<f", a * b))[0])
    if found != a * b and abs(found) < 2.0**-100:
        raise NotProved("a key is too small for a normal number")
    return found


def _registers(tensors: dict[str, Tensor], prefix: str, reach: list[arb], dtype: str) -> Tables:
    """Slots as the first tokens of a sequence: what tells them from data is as it must be, and hides data (K45).

    `reach` are sizes of what the heads read."""
    names = ("first", "mark", "heads.W_Q", "heads.b_Q", "heads.W_K", "heads.W_V", "heads.W_O")
    first, mark, query, bias, key, read, out = (tensors.pop(prefix + name).rows() for name in names)
    inner, width = len(bias[0]) - 1, len(read[0][0])
    keys, values = len(key), len(read)
    d = len(query[0]) - 1 - keys * inner - values * width
    same = all(len(row) == len(query[0]) for row in (*first, *key, *read, [0.0] * d + mark))
    if tensors or d < 1 or not same or len(key[0][0]) != inner + 1 or len(query[0][0]) != inner + 1:
        raise ValueError("its registers do not fit")
    tables: Tables = {
        "W_Q": [[row[:inner] for row in head[:d]] for head in query], "b_Q": [row[:inner] for row in bias],
        "M_K": [[row[d + 1 + h * inner :][:inner] for row in first] for h in range(keys)],
        "M_V": [[row[d + 1 + keys * inner + h * width :][:width] for row in first] for h in range(values)], "W_O": out,
    }  # fmt: skip
    depth = min(-head[d][inner] for head in key)
    told = [x for row in first for x in row[: d + 1]] + [x for head in query for row in head for x in row[inner:]]
    told += [x for head in query for row in head[d:] for x in row] + [mark[0] - 1, *mark[1:]]
    told += [row[inner] - 1 for row in bias]
    for tables_of, start, size_of in ((key, d + 1, inner), (read, d + 1 + keys * inner, width)):
        for h, head in enumerate(tables_of):
            at = start + h * size_of
            told += [x - float(c == i - at and c < size_of) for i, row in enumerate(head) for c, x in enumerate(row)
                     if (i, c) != (d, inner) or tables_of is read]  # fmt: skip
    if any(x != 0 for x in told):
        raise CertificateError("weights that tell registers from data are not those of registers")
    queries = [sum((size(arb(x)) * e for x, e in zip(column, reach, strict=True)), size(arb(b)))
               for head, row in zip(tables["W_Q"], tables["b_Q"] * len(query), strict=False)
               for column, b in zip(zip(*head, strict=True), row, strict=True)]  # fmt: skip
    most = largest(queries) * largest([size(arb(x)) for head in tables["M_K"] for row in head for x in row])
    if not arb(depth) * (1 - arb(2.0**-10)) - 2 * inner * most > DEAD[dtype]:
        raise NotProved("it cannot be shown that a token sees registers alone")
    return tables


class Channels:
    """A ramp whose anchors write several channels, and its error on cells of what its heads read (lemma K48)."""

    def __init__(self, saved: Saved):
        config = saved.header["config"]
        given, places = _given(config, dict(saved.tensors)), [whole(c, 0, MOST - 1) for c in config["channel"]]
        self.machine, self.dtype = MACHINES[given.dtype], given.dtype
        side, most, apart = arb(outward(given.radius, given.dtype, above=True)), [], []
        for row, bias, w, t in zip(given.rows, given.biases, given.w, given.meant, strict=True):
            most.append(sum((size(arb(x)) for x in row), ZERO) * side + size(arb(bias)))
            off = [size(arb(x) - arb(y)) for x, y in zip(row, w, strict=True)]
            apart.append(sum(off, ZERO) * side + size(arb(bias) - arb(t)))
            apart[-1] += affine_rounding(self.machine, row, bias, most[-1])
        self.moved, self.span = largest(apart), up(largest(most) + largest(apart))
        clip, knots = _clip(config, given.shift)
        a, b, margin = (Fraction(number(config[key])) for key in ("a", "b", "margin"))
        step, channels = (b - a) / (len(places) - 1), whole(config["channels"], 1, MOST)
        if not 0 < margin < Fraction(1, 2) or max(places) >= channels or "b_K" in given.tables:
            raise ValueError("its channels are not those of a ramp")
        self.turns = [a + (k + Fraction(1, 2)) * step - given.shift for k in range(len(places) - 1)]
        self.wide, self.off = margin * step, arb(knots)
        slope = 1 if config["slope"] is None else max(1.0, abs(number(config["slope"])))
        self.steep = self.moved * arb(slope)
        self.parts: list[tuple[HeadSum, Fraction | None, Fraction | None]] = []
        for c in range(channels):
            heads = tuple(_head(head) for head in _of_channel(given.tables, c, channels))
            first = 0
            for k in range(1, len(places) + 1):
                if k == len(places) or (places[k] == c) != (places[first] == c):
                    site = HeadSum(heads, (0.0,) * 3, clip if places[first] == c else NOTHING, 0.0, given.dtype)
                    ends = (self.turns[first - 1] + self.wide if first else None,
                            self.turns[k - 1] - self.wide if k < len(places) else None)  # fmt: skip
                    self.parts.append((site, *ends))
                    first = k

    def error(self, low: float, high: float) -> float:
        """How far a channel is from what it should be where low <= y <= high as computed, y being nowhere excluded."""
        worst = 0.0
        for site, start, stop in self.parts:
            before = start is not None and arb(high) + self.moved < _ball(start)
            if not before and not (stop is not None and arb(low) - self.moved > _ball(stop)):
                worst = max(worst, error_on(site, low, high)[1])
        return up(arb(worst) + self.steep + self.off)


def prove_channels(saved: Saved, chosen: Any) -> tuple[float, str, tuple[str, ...], int]:
    """The bound of a ramp whose anchors write several channels, the dtype, what it is, and its cells."""
    try:
        ramp = Channels(saved)
        found, cells = on_cells(chosen, (-ramp.span, ramp.span), ramp.error)
        return found, ramp.dtype, ("a ramp of several channels",), cells
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise CertificateError(f"the file describes no ramp: {error!r}") from error


def writes_several(saved: Saved) -> bool:
    """Whether a file is one of a ramp whose anchors write several channels."""
    config: Any = saved.header.get("config")
    given = config.get("channel") if isinstance(config, dict) and saved.header.get("family") == "theorem-ramp" else None
    return isinstance(given, list) and any(c != given[0] for c in given)


def _ball(x: Fraction) -> arb:
    return arb(fmpq(x.numerator, x.denominator))


def _head(tables: Tables) -> Head:
    """Heads of one channel as they read y."""
    ((query,), bias), ((out,),) = (tables["W_Q"], tables["b_Q"]), tables["W_O"]
    keys, values = tuple(map(tuple, tables["M_K"])), tuple(row[0] for row in tables["M_V"])
    return Head(tuple(zip(query, bias, strict=True)), keys, False, (0.0,) * 3, values, out)


def _one_channel(tables: Tables, at: int, channels: int) -> Tables:
    """Heads of the one channel that they write, all others being shown to stay 0."""
    own = _of_channel(tables, at, channels, alone=True)
    return {name: [head[name] for head in own] for name in tables}


def _of_channel(tables: Tables, at: int, channels: int, alone: bool = False) -> list[Tables]:
    """Heads with what they write to one channel; refused if they are to write that `alone`, and may write others."""
    count = len(tables["W_Q"])
    if any(len(table) not in (1, count) for table in tables.values()) or not {*ALWAYS} <= set(tables):
        raise ValueError("its tables do not fit its heads")
    own: list[Tables] = [{name: table[h % len(table)] for name, table in tables.items()} for h in range(count)]
    for head in own:
        if any(len(row) != channels for row in head["W_O"]) or not at < channels:
            raise ValueError("its outputs are not its channels")
        width = len(head["W_O"])
        used = [j for j, row in enumerate(head["W_O"]) if row[at] != 0] or [0]
        columns = [[*head["M_V"], *head.get("W_V", []), *([head["b_V"]] if "b_V" in head else [])]]
        if any(len(row) != width for row in columns[0]):
            raise ValueError("its values are not as many as its outputs read")
        silent = [all(row[j] == 0 for row in columns[0]) for j in range(width)]
        stray = alone and any(x != 0 and c != at and not silent[j]
                              for j, row in enumerate(head["W_O"]) for c, x in enumerate(row))  # fmt: skip
        if len(used) > 1 or stray:
            raise NotProved("the kernel has no rule for ramps that write more than one channel")
        (j,) = used
        head["W_O"] = [[head["W_O"][j][at]]]
        for name in ("M_V", "W_V"):
            if name in head:
                head[name] = [[row[j]] for row in head[name]]
        if "b_V" in head:
            head["b_V"] = [head["b_V"][j]]
    return own


def _copies(tables: Tables, n: int) -> Tables:
    """Heads for each of n scalars in a row, where those for one are given."""
    if n == 1:
        return tables
    if set(tables) != {*ALWAYS, "b_Q"}:
        raise ValueError("tokens have weights of their own only where keys are slots")
    found = {name: table * n for name, table in tables.items()}
    heads = len(tables["W_Q"])
    zeros = [0.0] * len(tables["W_Q"][0][0])
    found["W_Q"] = [[row if i == h // heads else zeros for i in range(n)] for h, (row,) in enumerate(found["W_Q"])]
    found["W_O"] = [[[x * (i == h // heads) for i in range(n)]] for h, ((x,),) in enumerate(found["W_O"])]
    return found


def _clip(config: Any, shift: Fraction) -> tuple[Function, float]:
    """What is meant as a function of y - shift, its knots numbers, and how far that may take it from what is meant."""
    a, b = (Fraction(number(config[key])) for key in ("a", "b"))
    slope = Fraction(1) if config["slope"] is None else Fraction(number(config["slope"]))
    if not a < b:
        raise ValueError("its numbers are not those of a ramp")
    places = [a, Fraction(0), b] if a < 0 < b and slope != 1 else [a, b]
    steep = [slope if first < 0 else Fraction(1) for first in places[:-1]]
    ends = [x if x > 0 else slope * x for x in (a, b)]
    lines: list[Node] = [("number", ends[0])]
    for rate in steep:
        lines.append(("+", ("*", ("number", rate), ("y",)), ("number", rate * shift)))
    knots = [float(x - shift) for x in places]
    if any(not c < d for c, d in itertools.pairwise(knots)):
        raise NotProved("the knots of a ramp cannot be told apart")
    moved = max(abs(Fraction(knot) - (x - shift)) for knot, x in zip(knots, places, strict=True))
    off = 3 * (1 + abs(slope)) * moved
    return Function("ramp", tuple(knots), (*lines, ("number", ends[1]))), up(arb(fmpq(off.numerator, off.denominator)))


def _stored(dtype: str, table: Any) -> Tensor:
    return Tensor(dtype, shape_of(table), tuple(flat(table)))
