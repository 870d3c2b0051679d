"""`vary`: a network as one that is harder to read and computes the same, with a certificate of its own.

Kinds of change, in any combination:

- "permuted": heads of a block in another order, columns of the stream in another order and with other signs;
- "split": a head that writes several columns becomes two heads with equal attention, which share the columns;
- "distractor": heads that attend to tokens and write directions that nobody reads;
- "idle": heads that attend and would write what others read, but find values that are always 0;
- "rotated": the stream in a random orthonormal basis;
- "superposed": one-hot codes as unit vectors, more of them than they have dimensions, then a rotation;
- "cleaned", with "superposed": heads that write codes again before anyone else reads them, so that codes of means and
  counts are superposed, too, and in fewer dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch

from ...arguments import whole
from ...certificates.certified import CertifiedModule
from ...compiler.compiled import CompiledNetwork
from ...dtypes import Array, dtype_name, stored
from ...errors import ArgumentError, PrecisionError, closest
from ...export.plain.build import LIMIT, power_of_four, source_of, to_plain
from ...export.plain.spec import FLAG, PlainHead, PlainSpec, scale_of
from ...export.plain.stream import Stream
from ...export.plain.transformer import PlainTransformer
from ...heads.token.bound import DEAD
from ...rasp.network.compiled import CompiledProgram
from ...rasp.network.proof import Column, Loose, prove
from .clean import cleaned
from .simulation import Virtual, VirtualTable, reaches, wanted_tables
from .variant import KINDS, Variant, free_head

MIXING = ("rotated", "superposed")
SPARE = 2  # virtual columns that stay 0, which idle heads read: one would be plain to see
WRITTEN = 2  # columns that a distractor writes, of its own
SHARP = 8.0  # logits of distractors: attention that is neither uniform nor one-hot
SUPERPOSED = 77  # the stream of random numbers that frames are drawn from: another than that of rotations
CODES = 6  # that are tried, in the order of layers: each costs two proofs at most
FEW = (0.4, 0.5, 0.75)  # of the values of a code that only maps read: with less, products of vectors are above 1/2
WORSE = 2.0  # times the bound of a rotated program that superposed codes may cost: rounding, and no interference
PUSHES = 400  # steps in which the vectors of a code are pushed apart: more change the third digit of their products
SHARPNESS = 12.0  # how much more the nearest vectors count than others: products then differ by some hundredths
KEPT = 1.25  # of its bound that a network may lose in a rotated stream: more is for float64 to mend
ROOM = 1.25  # of what hides keys beyond what content can do: rounding of a rotated stream eats some of it


@dataclass(frozen=True, eq=False)
class BlockHead:
    """A head to be put into a block: tables over the virtual columns, (column, coordinate), output (coordinate,
    column); queries have no scale yet."""

    about: PlainHead
    query: Array
    key: Array
    value: Array
    output: Array

    @property
    def width(self) -> int:
        """The head dimension that it needs."""
        used = [np.flatnonzero(np.abs(t).sum(0)) for t in (self.query, self.key, self.value, self.output.T)]
        return max((int(u[-1]) + 1 for u in used if len(u)), default=1)


def vary(net: CertifiedModule, kinds: str | Iterable[str] = ("rotated",), seed: int = 0) -> Variant:
    """A network that computes what `net` does and is harder to read, certified from its own weights.

    >>> from attnforge import rasp
    >>> import attnforge as af
    >>> net = af.compile(rasp.library.reverse(), rasp.Sequences("ab", max_length=4), dtype=torch.float64)
    >>> hidden = vary(net, ["rotated", "distractor"], seed=1)
    >>> hidden.certificate.kind, hidden.bound == net.bound
    ('exact', True)

    Kinds are "permuted", "split", "distractor", "idle", "rotated" and, for token programs, "superposed" and "cleaned".
    Equal seeds give equal weights. Where the margins of a program do not survive in its dtype, `PrecisionError` names
    the head; where a formula loses more than a quarter of its tolerance, it says what can be proved.
    """
    wanted = _kinds(kinds)
    seed = whole("seed", seed, 0)
    if not isinstance(net, CertifiedModule) or isinstance(net, Variant):
        raise ArgumentError(f"vary takes a network of attnforge.compile, or its plain form, got {type(net).__name__}")
    plain = net if isinstance(net, PlainTransformer) else to_plain(net)
    if "cleaned" in wanted:
        plain = _cleaned(plain, wanted)
    if not plain.blocks:
        raise ArgumentError("this network has no attention at all (it is affine): there is nothing to vary")
    source = plain.source
    if source is None:
        raise ArgumentError("vary takes the network itself: this plain form was read from a file; load that network")
    rng = np.random.default_rng([seed, len(wanted), *(KINDS.index(kind) for kind in wanted)])
    mixing = any(kind in MIXING for kind in wanted)
    if "superposed" in wanted and not isinstance(source, CompiledProgram):
        raise ArgumentError(
            "'superposed' is for token programs, whose columns are codes; take 'rotated', 'permuted', 'split', "
            "'distractor' and 'idle'"
        )
    if mixing and not isinstance(source, CompiledProgram | CompiledNetwork):
        raise ArgumentError("'rotated' is for networks of attnforge.compile; theorems take 'permuted', 'split', "
                            "'distractor' and 'idle'")  # fmt: skip
    used = _used(plain.spec)
    layers = (
        _program_seats(plain, source) if isinstance(source, CompiledProgram) and mixing else _plain_seats(plain, used)
    )
    if "split" in wanted:
        layers = [[part for seat in layer for part in _split(seat, rng)] for layer in layers]
    inputs = _inputs(plain)
    extra: list[str] = []  # names of virtual columns beyond those of the plain form
    for layer in layers:
        if "distractor" in wanted:
            layer.append(_distractor(inputs, used + len(extra), rng))
            extra += [f"distractor {len(extra) + j}" for j in range(WRITTEN)]
    if "idle" in wanted:
        spare = range(used + len(extra), used + len(extra) + SPARE)
        extra += [f"nothing {j}" for j in range(SPARE)]
        for layer in layers:
            layer.append(_idle(layer[0], inputs, spare, rng))
    count = used + len(extra)
    layers = [[_padded(seat, count) for seat in layer] for layer in layers]
    if "permuted" in wanted:
        layers = [[layer[i] for i in rng.permutation(len(layer))] for layer in layers]
    width, dims = _sizes(layers, count)
    if mixing and isinstance(source, CompiledProgram):
        return _mixed(plain, layers, dims, width, count, wanted, seed)
    if mixing:
        return _turned(plain, layers, dims, width, count, wanted, seed)
    if "permuted" in wanted:
        basis = np.zeros((count, width))
        basis[range(count), rng.permutation(width)[:count]] = rng.choice([-1.0, 1.0], count)
    else:
        basis = np.eye(count, width)
    built = _built(plain, layers, dims, basis, basis, wanted, seed)
    built.attach(built.recertify())
    return built


def _kinds(kinds: str | Iterable[str]) -> tuple[str, ...]:
    if not isinstance(kinds, Iterable):
        raise ArgumentError(f"kinds of variants are words, one or several of {', '.join(KINDS)}, got {kinds!r}")
    asked = [kinds] if isinstance(kinds, str) else list(kinds)
    for kind in asked:
        if kind not in KINDS:
            raise ArgumentError(
                f"there is no kind of variant {kind!r}{closest(str(kind), KINDS)}; there are {', '.join(KINDS)}"
            )
    if not asked:
        raise ArgumentError(f"name one kind of variant at least: {', '.join(KINDS)}")
    return tuple(kind for kind in KINDS if kind in asked)


def _cleaned(plain: PlainTransformer, wanted: Sequence[str]) -> PlainTransformer:
    """The plain form of a program whose codes are written again."""
    if "superposed" not in wanted or not isinstance(plain.source, CompiledProgram):
        raise ArgumentError("'cleaned' repairs the superposed codes of a token program: name 'superposed' beside it")
    return to_plain(cleaned(plain.source))


def _used(spec: PlainSpec) -> int:
    return max((i for i, name in enumerate(spec.channels) if name != "unused"), default=-1) + 1


def _inputs(plain: PlainTransformer) -> list[int]:
    """The columns of the plain form that the embedding writes, or all that positions write where it writes none."""
    return [int(c) for c in torch.nonzero(plain.embed.weight.abs().sum(1))[:, 0]]


# ---- the heads there are


def _plain_seats(plain: PlainTransformer, used: int) -> list[list[BlockHead]]:
    """The heads of a plain form, bit by bit, those of one layer together."""
    layers: dict[int, list[BlockHead]] = {}
    for block, row in zip(plain.blocks, plain.heads, strict=True):
        attention = cast(torch.nn.MultiheadAttention, block.attention)
        d = plain.spec.stream // len(row)
        into = stored(attention.in_proj_weight).reshape(3, len(row), d, -1)
        back = stored(attention.out_proj.weight).T.reshape(len(row), d, -1)
        for h, about in enumerate(row):
            if about.purpose:
                query, key, value = (into[third, h, :, :used].T for third in range(3))
                seat = BlockHead(about, query / scale_of(d), key, value, back[h, :, :used])
                layers.setdefault(about.place[0], []).append(seat)
    return [layers[number] for number in sorted(layers)]


def _program_seats(plain: PlainTransformer, net: CompiledProgram) -> list[list[BlockHead]]:
    """The heads of a program, with what hides keys chosen anew: as little as the program's own sizes ask for."""
    about = {head.place: head for row in plain.heads for head in row}
    recorder = _Recorder(_stream(plain, net), net)
    prove(net.facts, net.layout, net.network, net.positions, recorder)
    layers = []
    for heads in (heads for heads in recorder.stream.layers if heads):
        seats = []
        for head in heads:
            omega, width = recorder.omega[head.place], recorder.stream.width
            d = max(head.used, head.value.shape[1])
            query, key, value = wanted_tables(recorder.stream, head, omega, d, width)
            output = np.zeros((d, width))
            fresh = list(recorder.stream.fresh[head.place[0]].values())
            output[: len(head.output), fresh] = head.output
            described = replace(about[head.place], omega=omega, hiding=head.hiding, width=head.used)
            seats.append(BlockHead(described, query, key, value, output))
        layers.append(seats)
    return layers


class _Recorder:
    """Follows the proof of a program's own network, and chooses for every head what hides keys."""

    def __init__(self, stream: Stream, net: CompiledProgram):
        self.stream = stream
        self.virtual = Virtual(stream, net, stream.width)
        self.omega: dict[tuple[int, int, int], float] = {}

    def head(self, layer: int, group: int, state: Sequence[Column]) -> Loose:
        head = next(h for h in self.stream.layers[layer] if h.place[1] == group)
        k, v = head.query.shape[1], head.value.shape[1]
        query, key, _ = wanted_tables(self.stream, head, 0.0, head.width, self.stream.width)
        tables = [VirtualTable(t, 0 * t, 0 * t, np.zeros((1, t.shape[1]))) for t in (query, key)]
        nothing = [np.zeros(head.width)] * 3
        needed = ROOM * max(reaches(self.virtual, head, tables, nothing, nothing)) + 2 * DEAD[self.stream.dtype]
        self.omega[head.place] = 2.0 ** math.ceil(math.log2(needed))
        return Loose(np.zeros(k), np.zeros(k), np.zeros(k), np.zeros((head.slots, k)), np.zeros(v), np.zeros(v),
                     np.zeros(v), 0.0, 0.0, k)  # fmt: skip

    def after(self, layer: int, state: Sequence[Column], sizes: Sequence[float]) -> None:
        self.virtual.grow(self.stream.fresh[layer], state, sizes)

    def readout(self, state: Sequence[Column]) -> Array:
        return np.zeros(self.stream.readout.shape[1])


# ---- heads that are added


def _split(seat: BlockHead, rng: np.random.Generator) -> list[BlockHead]:
    """Two heads that attend alike and share the columns; one that writes a single column stays whole."""
    columns = np.flatnonzero(np.abs(seat.output).sum(0))
    if len(columns) < 2:
        return [seat]
    chosen = rng.permutation(columns)
    parts = (chosen[: len(chosen) // 2], chosen[len(chosen) // 2 :])
    found = []
    for part in parts:
        output = np.zeros_like(seat.output)
        output[:, part] = seat.output[:, part]
        about = replace(seat.about, writes=tuple(sorted(int(c) for c in part)))
        found.append(replace(seat, about=about, output=output))
    return found


def _distractor(inputs: Sequence[int], start: int, rng: np.random.Generator) -> BlockHead:
    """Attends to what tokens hold, by a random form of them, and writes a mean of them where nobody looks."""
    total = start + WRITTEN
    query, key = _attending(total, inputs, rng)
    value, output = np.zeros((total, WRITTEN)), np.zeros((WRITTEN, total))
    value[inputs] = _coarse(rng.normal(size=(len(inputs), WRITTEN)))
    output[range(WRITTEN), range(start, total)] = 1.0
    about = free_head("distractor: a mean of inputs that nobody reads", "tokens", tuple(range(start, total)))
    return BlockHead(about, query, key, value, output)


def _idle(like: BlockHead, inputs: Sequence[int], spare: range, rng: np.random.Generator) -> BlockHead:
    """Attends to tokens, and would write what another head writes, of values that are always 0."""
    total, k = spare.stop, 2
    query, key = _attending(total, inputs, rng)
    value, output = np.zeros((total, k)), np.zeros((k, total))
    value[list(spare)] = _coarse(rng.normal(size=(len(spare), k)))
    columns = np.flatnonzero(np.abs(like.output).sum(0))
    output[:, columns] = _coarse(rng.normal(size=(k, len(columns))))
    return BlockHead(free_head("idle: reads what is always 0", "tokens"), query, key, value, output)


def _attending(total: int, inputs: Sequence[int], rng: np.random.Generator) -> tuple[Array, Array]:
    """Query and key of a head that attends to what columns hold: logits of about SHARP, whatever their number."""
    query, key = np.zeros((2, total, 2))
    size = math.sqrt(SHARP) / max(1.0, math.sqrt(len(inputs)))
    query[inputs], key[inputs] = _coarse(rng.normal(size=(2, len(inputs), 2)) * size)
    return query, key


def _coarse(x: Array) -> Array:
    """Numbers of 12 binary digits: both dtypes hold them as they are."""
    mantissa, exponent = np.frexp(x)
    return np.asarray(np.ldexp(np.round(mantissa * 4096) / 4096, exponent))


def _padded(seat: BlockHead, count: int) -> BlockHead:
    query, key, value, output = (
        np.concatenate([table, np.zeros((count - len(table), table.shape[1]))])
        for table in (seat.query, seat.key, seat.value, seat.output.T)
    )
    return BlockHead(seat.about, query, key, value, np.ascontiguousarray(output.T))


# ---- bases and blocks


def _sizes(layers: Sequence[Sequence[BlockHead]], count: int) -> tuple[int, list[int]]:
    """The width of the stream, and the head dimension of each block: all heads of a layer stand in one."""
    dims = [power_of_four(max(seat.width for seat in layer)) for layer in layers]
    unit = max(dims)
    width = max(count, *(len(layer) * d for layer, d in zip(layers, dims, strict=True)))
    width = -(-width // unit) * unit
    if width > LIMIT:
        raise ArgumentError(
            f"this variant would have {width} channels, and the limit is {LIMIT}: choose a smaller network"
        )
    for i, layer in enumerate(layers):
        while width % (4 * dims[i]) == 0 and width // (4 * dims[i]) >= len(layer):
            dims[i] *= 4
    return width, dims


def _mixed(
    plain: PlainTransformer, layers: Sequence[Sequence[BlockHead]], dims: Sequence[int], width: int, count: int,
    kinds: tuple[str, ...], seed: int,
) -> Variant:  # fmt: skip
    """One rotation of the whole stream, or, where margins do not survive that, one for each kind of columns; then as
    many codes superposed as can be."""
    net, problem = plain.source, None
    assert isinstance(net, CompiledProgram)
    stream = _stream(plain, net)
    for apart in _kinds_apart(plain, stream, net, count):

        def tried(codes: Mapping[int, Array], apart: list[list[int]] = apart) -> Variant:
            rng = np.random.default_rng([seed, len(apart)])
            basis, dual = _basis(apart, codes, stream.columns.inputs[-1], count, width, rng)
            built = _built(plain, layers, dims, basis, dual, kinds, seed)
            built.attach(built.recertify())
            return built

        try:
            built = tried({})
        except PrecisionError as error:
            problem = error  # the last one is of what mixes least
            continue
        few = "cleaned" in kinds
        return built if "superposed" not in kinds else _superposed(built, tried, _codes(stream, net), seed, few)
    assert problem is not None
    raise problem


def _turned(
    plain: PlainTransformer, layers: Sequence[Sequence[BlockHead]], dims: Sequence[int], width: int, count: int,
    kinds: tuple[str, ...], seed: int,
) -> Variant:  # fmt: skip
    """One rotation of the whole stream of a network of numbers, or, where that costs too much of its bound, one for
    each kind of columns."""
    registers, rest = list(range(1, 1 + plain.registers)), list(range(1 + plain.registers, count))
    source, best, least = cast(CompiledNetwork, plain.source), None, math.inf
    wanted = max(cast(float, plain.bound), source.eps)
    for apart in ([list(range(count))], [registers, [FLAG, *rest]], [registers, [FLAG], rest]):
        basis, _ = _basis(apart, {}, FLAG, count, width, np.random.default_rng([seed, len(apart)]))
        built = _built(plain, layers, dims, basis, basis, kinds, seed)
        try:
            built.attach(built.recertify())
        except PrecisionError:
            continue
        found = cast(float, built.bound)
        if found <= wanted or source.rtol:
            return built
        if found < least:
            best, least = built, found
    if best is not None and least <= KEPT * wanted:
        return best
    wider = "a larger eps" if plain.dtype == torch.float64 else "dtype=torch.float64"
    what = "nothing" if best is None else f"no more than {least:.3g}"
    raise PrecisionError(
        f"{what} can be proved of this network in a rotated stream in {dtype_name(plain.dtype)}, and {wanted:.3g} is "
        f"asked for; compile with {wider}"
    )


def _superposed(
    built: Variant, tried: Callable[[Mapping[int, Array]], Variant], codes: Sequence[Sequence[int]], seed: int,
    few: bool,
) -> Variant:  # fmt: skip
    """Code after code in as few dimensions as the proof allows; those that it does not allow stay one-hot."""
    rng, chosen, problem = np.random.default_rng([seed, SUPERPOSED]), dict[int, Array](), None
    enough = WORSE * cast(float, built.bound)
    for group in codes:
        for d in _dimensions(len(group), few):
            frame = dict(zip(group, _frame(len(group), d, rng), strict=True))
            try:
                found = tried({**chosen, **frame})
            except PrecisionError as error:
                problem = error
                continue
            if cast(float, found.bound) > enough:  # a mean of vectors that interfere
                problem = PrecisionError(f"its output would be within {found.bound:.3g}, and {enough:.3g} is asked for")
                continue
            built, chosen = found, {**chosen, **frame}
            break
    if not chosen:
        why = f": {problem}" if problem else ", since it has no code of three values or more"
        raise PrecisionError(f"no code of this program can be superposed{why}")
    return built


def _codes(stream: Stream, net: CompiledProgram) -> list[list[int]]:
    """Columns that are one-hot codes of three values or more, the tokens' first."""
    found: dict[int, list[int]] = {-1: list(stream.columns.inputs[:-1])}
    for number, layer in enumerate(net.layout.layers):
        for c, place in stream.fresh[number].items():
            if layer.after[c].kind == "is":
                found.setdefault(layer.after[c].op, []).append(place)
    return [group for group in found.values() if len(group) > 2][:CODES]


def _dimensions(size: int, few: bool) -> list[int]:
    """Dimensions to try for a code of so many values: three quarters of them, then one less than there are values; for
    a `few` of them, which maps can tell apart, less before."""
    return sorted({max(2, math.ceil(share * size)) for share in (FEW if few else (0.75,))} | {size - 1})


def _frame(size: int, d: int, rng: np.random.Generator) -> Array:
    """Unit vectors in few dimensions, pushed apart until products of two of them are small, or, in one dimension less
    than there are vectors, all equal: the corners of a simplex."""
    found = rng.normal(size=(size, d))
    for step in range(PUSHES):
        found /= np.sqrt((found * found).sum(1))[:, None]
        away = np.einsum("id,jd->ij", found, found)
        np.fill_diagonal(away, 0.0)
        push = np.exp(SHARPNESS * (away if d == size - 1 else np.abs(away)))
        np.fill_diagonal(push, 0.0)
        push = push / push.sum(1)[:, None] * (1.0 if d == size - 1 else np.sign(away))
        found = found - 0.3 * (1 - step / PUSHES) * np.einsum("ij,jd->id", push, found)
    return np.asarray(found / np.sqrt((found * found).sum(1))[:, None])


def _basis(
    apart: Sequence[Sequence[int]], codes: Mapping[int, Array], real: int, count: int, width: int,
    rng: np.random.Generator,
) -> tuple[Array, Array]:  # fmt: skip
    """What columns are written as, and by what they are read: the same, but for codes that share dimensions.

    A code's vectors are read by themselves, less what the others have in common on tokens, and scaled to give 1.
    """
    basis, order, start = np.zeros((count, width)), rng.permutation(width), 0
    groups = _groups(codes)
    for i, columns in enumerate(apart):
        inner = np.zeros((len(columns), len(columns)))
        at = 0
        for group in [g for g in groups if g[0] in columns]:
            d = len(codes[group[0]])
            inner[np.ix_([columns.index(c) for c in group], range(at, at + d))] = [codes[c] for c in group]
            at += d
        for r, c in enumerate(columns):
            if c not in codes:
                inner[r, at], at = 1.0, at + 1
        size = len(columns) if i < len(apart) - 1 else width - start
        places = order[start : start + size]
        basis[np.ix_(np.array(columns), places)] = _times(inner, _rotation(size, rng)[: len(columns)])
        start += size
    dual = basis.copy()
    for group in groups:
        gram = np.array([codes[c] for c in group]) @ np.array([codes[c] for c in group]).T
        others = gram[~np.eye(len(group), dtype=bool)]
        middle = (others.min() + others.max()) / 2
        for c in group:
            dual[c] = (basis[c] - middle * basis[real]) / (1 - middle)
    return basis, dual


def _groups(codes: Mapping[int, Array]) -> list[list[int]]:
    """Columns that were made one frame: neighbours in the order of making, by the identity of their frame."""
    found: dict[int, list[int]] = {}
    for column, vector in codes.items():
        found.setdefault(id(vector.base), []).append(column)
    return list(found.values())


def _kinds_apart(plain: PlainTransformer, stream: Stream, net: CompiledProgram, count: int) -> list[list[list[int]]]:
    """Ways to tell columns apart, from none to all: ids of registers, the flag of tokens, numbers, and the rest."""
    registers = list(range(1, 1 + plain.registers))
    kinds = {}
    for feature, place in zip(net.layout.positions, stream.columns.constants, strict=True):
        kinds[place] = feature.kind
    for number, layer in enumerate(net.layout.layers):
        kinds.update({place: layer.after[c].kind for c, place in stream.fresh[number].items()})
    numbers = [c for c in range(count) if kinds.get(c, "is") not in ("is", "real")]
    rest = [c for c in range(count) if c not in registers and c not in numbers and c != FLAG]
    found = [[list(range(count))], [registers, sorted([FLAG, *numbers, *rest])],
             [registers, [FLAG], sorted([*numbers, *rest])], [registers, [FLAG], numbers, rest]]  # fmt: skip
    return found if numbers else found[:3]


def _stream(plain: PlainTransformer, net: CompiledProgram) -> Stream:
    """The stream of a plain form, of a program's own tables."""
    same = Variant(plain.spec, plain.spec, torch.eye(1), (), 0, plain.dtype)
    return same.stream_of(net)


def _rotation(width: int, rng: np.random.Generator) -> Array:
    """A random orthogonal matrix: a product of reflections, without a library of matrices, whose digits may differ."""
    found = np.diag(rng.choice([-1.0, 1.0], width))
    for i in range(width):
        v = np.zeros(width)
        v[i:] = rng.normal(size=width - i)
        v /= math.sqrt(math.fsum((v * v).tolist()))
        found -= 2.0 * v[:, None] * (v[:, None] * found).sum(0)
    return found


def _times(a: Array, b: Array) -> Array:
    return np.einsum("ij,jk->ik", a, b)


@torch.no_grad()
def _built(
    plain: PlainTransformer, layers: Sequence[Sequence[BlockHead]], dims: Sequence[int], basis: Array, dual: Array,
    kinds: tuple[str, ...], seed: int,
) -> Variant:  # fmt: skip
    """The module: reads go through `dual`, writes through `basis`."""
    base, count, width = plain.spec, len(basis), basis.shape[1]
    rows = [tuple([seat.about for seat in layer] + [PlainHead()] * (width // d - len(layer)))
            for layer, d in zip(layers, dims, strict=True)]  # fmt: skip
    names = tuple(f"direction {i}" for i in range(width))
    spec = replace(base, stream=width, channels=names, heads=tuple(rows))
    built = Variant(spec, base, torch.from_numpy(basis.copy()), kinds, seed, plain.dtype)
    built.strict = plain.strict
    tensors = {name: np.zeros(t.shape) for name, t in built.state_dict().items()}
    used = min(count, base.stream)
    state = {name: stored(t) for name, t in plain.state_dict().items()}
    tensors["embed.weight"] = _times(basis[:used].T, state["embed.weight"][:used])
    tensors["positions"] = _times(state["positions"][:, :used], basis[:used])
    tensors["readout.weight"] = _times(state["readout.weight"][:, :used], dual[:used])
    tensors["readout.bias"] = state["readout.bias"]
    for b, (layer, d) in enumerate(zip(layers, dims, strict=True)):
        into = tensors[f"blocks.{b}.attention.in_proj_weight"].reshape(3, -1, d, width)
        back = tensors[f"blocks.{b}.attention.out_proj.weight"].T.reshape(-1, d, width)
        for h, seat in enumerate(layer):
            for third, (table, scale) in enumerate(((seat.query, scale_of(d)), (seat.key, 1.0), (seat.value, 1.0))):
                w = min(d, table.shape[1])
                into[third, h, :w] = scale * _times(table[:, :w].T, dual)
            w = min(d, len(seat.output))
            back[h, :w] = _times(seat.output[:w], basis)
        tensors[f"blocks.{b}.attention.out_proj.weight"] = np.ascontiguousarray(back.reshape(-1, width).T)
    given = {name: torch.from_numpy(np.ascontiguousarray(table)).to(plain.dtype) for name, table in tensors.items()}
    built.load_state_dict(given)
    assert plain.source is not None
    built.made_from(plain.source, source_of)
    return built.eval()
