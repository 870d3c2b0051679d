"""What a page runs: any network as layers of heads and affine maps, with the way in, the way out and the target.

Every family of networks has one function here, which reads finished weights and never makes any: a compiled network, a
token program, a theorem in token-wise form, a plain transformer, a head on its own.

What it should compute goes along as data that a page can evaluate: functions travel by name and arguments, composites
as the nodes of their expression. Nothing here is code: the page has its own meaning for every word
(`template/target.js`, `template/tokens.js`), and tests compare it with ours.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..blackbox.result import Approximation
from ..blackbox.ridge import RidgeApproximation
from ..box import Box
from ..certificates.certificate import upper_text
from ..certificates.certified import CertifiedModule
from ..compiler.compiled import CompiledNetwork
from ..dtypes import SHIPPED, dtype_name
from ..errors import AttnforgeError, UnsupportedOperation
from ..export.plain.build import source_of, to_plain
from ..export.plain.theorem import selection
from ..export.plain.transformer import PlainBlock, PlainTransformer
from ..expressions.composite import Composed
from ..expressions.expression import Call, Expr, Monomial, Number, Sum, Variable
from ..functions.registry import names
from ..functions.univariate import Univariate
from ..heads.anchor.head import AnchorHead
from ..heads.chain.head import ChainHead
from ..heads.fast.activation import FastActivation
from ..heads.gate.head import GateHead
from ..heads.gate.target import Lines
from ..heads.norm.head import NormHead
from ..heads.product.head import ProductHead
from ..heads.token.head import TokenHead
from ..network import AttentionLayer, Heads
from ..programs.ops import Apply, Attention, Constant, Linear, Mix, Normalise
from ..programs.program import Builder, Program
from ..rasp.language import Node
from ..rasp.network.compiled import CompiledProgram
from ..rasp.network.data import program_json, value_json
from ..rasp.network.several import CompiledPrograms
from ..report.structure import MEANING, structure, title
from ..theorems.partition import Cross, MaxAffine
from ..theorems.ramps import Ramp
from ..theorems.result import Construction
from ..theorems.universal import Universal

HOOKED = 1 << 18  # parameters up to which the plain form is worked out for the names of its hooks: a second or two
FIRST = 8  # tokens of the first sequence that a page shows
TARGETED = 1 << 18  # numbers of a target that a page carries as text: 5 MB
WRITTEN = 1 << 25  # numbers of a norm's tables, nearly all of them 0: 128 MB in float32 for a moment
SPREAD = 4.0  # how many of its largest standard deviations a number of a row may be from 0: rows are seldom wider


@dataclass(frozen=True, eq=False)
class PageLayer:
    """One layer as a page runs it: `residual` adds the state itself, S and s are its linear skip."""

    groups: tuple[Heads, ...]
    names: tuple[str, ...]  # of the columns after it
    S: Tensor | None = None
    s: Tensor | None = None
    residual: bool = False

    @classmethod
    def of(cls, layer: AttentionLayer, names: Sequence[str]) -> PageLayer:
        return cls(tuple(layer.heads()), tuple(names), layer.S, layer.s)


@dataclass(frozen=True)
class PageUnit:
    """Heads that compute one thing: `heads` are (group, head) of layer `layer`, `hooks` their names in
    TransformerLens, `facts` what a page says of them."""

    layer: int
    label: str
    family: str
    heads: tuple[tuple[int, int], ...]
    facts: tuple[tuple[str, str], ...] = ()
    hooks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Line:
    """A line of the program, and the units that compute it."""

    text: str
    units: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Model:
    """A network as a page runs it.

    `inputs` are (name, low, high) for every number of a flat point, laid out as (tokens, width); a token program has
    none. `constants` stand beside the input. Of a plain transformer, `embed` and `positions` make the stream, whose
    first `registers` rows are no tokens.
    """

    layers: tuple[PageLayer, ...]
    columns: tuple[str, ...]
    tokens: int
    width: int
    inputs: tuple[tuple[str, float, float], ...]
    outputs: tuple[str, ...]
    first_row: bool
    units: tuple[PageUnit, ...]
    lines: tuple[Line, ...]
    target: dict[str, Any] | None
    without: str = ""  # why there is no target
    remark: str = ""  # what must be known of the certificate
    constants: Tensor | None = None
    embed: Tensor | None = None
    positions: Tensor | None = None
    registers: int = 0
    vocabulary: tuple[Any, ...] | None = None
    sequence: tuple[Any, ...] = ()
    rows: dict[str, Any] | None = None  # of a norm: which rows its certificate speaks of, and what errors are of
    dtype: torch.dtype = torch.float32  # in which heads are evaluated
    handed: str = ""  # the dtype of input and output, where it is another one
    title: str = ""  # where the certificate's target is too short for one
    apart: bool = False  # whether the page rounds where the certificate does not: an error above it is no news
    start: tuple[float, ...] = ()  # where the page begins, if there is a place worth it


def model(net: CertifiedModule) -> Model:
    """The network as a page runs it; `UnsupportedOperation` for what has no form of layers over tokens."""
    if net.dtype not in SHIPPED and not isinstance(net, FastActivation):
        raise UnsupportedOperation(f"a page runs networks in float32 or float64, not in {dtype_name(net.dtype)}")
    found = _read(net)
    return found if found.handed else replace(found, dtype=net.dtype)


def _read(net: CertifiedModule) -> Model:
    if isinstance(net, RidgeApproximation):
        return replace(_read(net.network), without=_WITHOUT, target=None)
    for kind, reads in READERS:
        if isinstance(net, kind):
            return reads(net)
    raise UnsupportedOperation(
        f"a {type(net).__name__} has no form of layers and heads that a page could run; networks of attnforge.compile, "
        "plain exports, theorems and heads on their own have one"
    )


# ---- networks of attnforge.compile


def _compiled(net: CompiledNetwork) -> Model:
    program, hooks, parts = net.program, _hooks(net), structure(net)
    units: list[PageUnit] = []
    for number, step in enumerate(net.layout.steps):
        found = {unit.number: unit for unit in parts.units if unit.layer == number + 1}
        for site in step.sites:
            unit, layer = found[site.op], 2 * number + 1
            heads = tuple((p.group, p.first + h) for p in step.places(site) for h in range(p.heads))
            facts = [("computes", unit.operation), ("of arguments in", unit.interval),
                     ("temperature", unit.temperature),
                     *((word, meaning) for word, meaning in MEANING.items() if word in unit.temperature),
                     ("lemmas", ", ".join(site.lemmas)),
                     ("its own error is at most", upper_text(unit.error)),
                     ("its share of the bound", upper_text(unit.share))]  # fmt: skip
            named = tuple(hooks.get((layer, *head), "") for head in heads)
            units.append(PageUnit(layer, unit.name, unit.family, heads, tuple(f for f in facts if f[1]), named))
    at = {unit.number: i for i, unit in enumerate(parts.units)}
    rows = str(program).split("\n")[1:-1]
    lines = (Line(t.strip(), (at[i],) if i in at else ()) for i, t in enumerate(rows))
    return replace(_compiled_frame(net), units=tuple(units), lines=(Line(program.source), *lines), title=title(net))


def _compiled_frame(net: CompiledNetwork) -> Model:
    """The layers with their way in and out, and the target: all but what is known of single heads."""
    program, source = net.program, source_of(net)
    shape = program.output_shape
    named = [f"output[{', '.join(map(str, place))}]" for place in _places(shape)] if shape else ["output"]
    target, without = _program(program)
    return Model(
        layers=tuple(PageLayer.of(la, n) for la, n in zip(source.layers, source.names, strict=True)),
        columns=source.columns, tokens=program.tokens, width=program.ops[0].width, inputs=_entries(net.boxes),
        outputs=net.outputs if len(net.outputs) == len(named) else tuple(named),
        first_row=program.output_rows == "first", units=(), lines=(Line(program.source),), target=target,
        without=without, constants=net.constants,
    )  # fmt: skip


def _program(program: Program) -> tuple[dict[str, Any] | None, str]:
    """The target of a program as data, or why a page has none."""
    arrays = [array for op in program.ops for array in getattr(op, "weights", ())]
    arrays += [getattr(op, word) for op in program.ops for word in ("value", "matrix", "mask") if hasattr(op, word)]
    size = sum(np.size(array) for array in arrays)
    if size > TARGETED:
        return None, f"The target has {size:,} numbers, more than the {TARGETED:,} that a page carries."
    try:
        return program_target(program), ""
    except UnsupportedOperation as error:
        return None, f"The target is not on this page: {error}."


def _entries(boxes: Sequence[Box]) -> tuple[tuple[str, float, float], ...]:
    """Every number that enters: its name and its interval."""
    found: list[tuple[str, float, float]] = []
    for number, box in enumerate(boxes):
        stem = "x" if len(boxes) == 1 else f"x{number + 1}"
        names = box.names or [f"{stem}[{', '.join(map(str, place))}]" for place in _places(box.shape)]
        found += [(name, *pair) for name, pair in zip(names, box.intervals(), strict=True)]
    return tuple(found)


def _places(shape: Sequence[int]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, shape)))


def _hooks(net: CertifiedModule) -> dict[tuple[int, int, int], str]:
    """For (layer, group, head) the place of a head in TransformerLens; none where the plain form is too large."""
    if sum(p.numel() for p in net.parameters()) > HOOKED:
        return {}
    try:
        plain = to_plain(net)
    except AttnforgeError:
        return {}
    return {head.place: f"blocks.{b}.attn.hook_z[:, :, {h}]"
            for b, row in enumerate(plain.heads) for h, head in enumerate(row) if head.purpose}  # fmt: skip


# ---- token programs


def _tokens(net: CompiledProgram) -> Model:
    hooks = _hooks(net)
    margins = {margin.site: margin for margin in net.certificate.margins}
    units: list[PageUnit] = []
    computed: dict[int, list[int]] = {}
    for number, layer in enumerate(net.layout.layers):
        groups = cast(AttentionLayer, net.network.layers[number]).heads()
        for g, (seat, group) in enumerate(zip(layer.heads, groups, strict=True)):
            margin = margins.get(group.purpose)
            about = [("computes", seat.kind), ("lemmas", ", ".join(net.certificate.lemmas))]
            if margin is not None:
                about += [("the right slot is ahead by", f"{margin.margin:.5g}"), ("it needs", f"{margin.needed:.5g}")]
            heads = tuple((g, h) for h in range(group.heads))
            named = tuple(hooks.get((number, *head), "") for head in heads)
            computed.setdefault(seat.op, []).append(len(units))
            label = group.purpose.partition(": ")[2] or group.purpose
            units.append(PageUnit(number, label, seat.kind, heads, tuple(about), named))
    lines = (*_program_text(net), Line(""), *_token_lines(net.facts.order, computed))
    return replace(_tokens_frame(net), units=tuple(units), lines=lines)


def _tokens_frame(net: CompiledProgram) -> Model:
    source = source_of(net)
    return Model(
        layers=tuple(PageLayer.of(la, n) for la, n in zip(source.layers, source.names, strict=True)),
        columns=source.columns, tokens=net.domain.max_length, width=len(net.vocabulary) + 1, inputs=(),
        outputs=source.names[-1], first_row=False, units=(), lines=_program_text(net), target=token_target(net),
        constants=net.positions, vocabulary=tuple(net.vocabulary),
        sequence=(net.domain.sample(1, seed=1)[0] * FIRST)[: min(FIRST, net.domain.max_length)],
    )  # fmt: skip


def _several(net: CompiledPrograms) -> Model:
    """All heads once, as any one of the programs has them, and the columns of every output side by side."""
    ones = {name: net[name] for name in net.programs}
    found = _tokens(next(iter(ones.values())))
    frames = {name: _tokens_frame(one) for name, one in ones.items()}
    outputs = tuple(f"{name}: {column}" for name, frame in frames.items() for column in frame.outputs)
    last = PageLayer.of(cast(AttentionLayer, net.network.layers[-1]), outputs)
    texts = [line for name, frame in frames.items() for line in (Line(f"# {name}"), *frame.lines)]
    normal_form = found.lines[len(next(iter(frames.values())).lines) :]
    return replace(
        found, layers=(*found.layers[:-1], last), outputs=outputs, target=several_target(ones),
        lines=(*texts, *normal_form), title=", ".join(ones),
    )  # fmt: skip


def _token_lines(order: Sequence[Node], computed: dict[int, list[int]]) -> list[Line]:
    """The normal form, one op a line; what is computed inside of other heads lights up those."""
    at, units = {node: i for i, node in enumerate(order)}, {i: list(found) for i, found in computed.items()}
    for i in reversed(range(len(order))):
        for child in order[i].children:
            if at[child] not in computed and order[at[child]].children:
                units.setdefault(at[child], []).extend(units.get(i, []))
    short: dict[Node, str] = {}
    lines = []
    for i, node in enumerate(order):
        name = node.name if node.name and node.name.isidentifier() else f"%{i}"
        if not node.children:
            short[node] = repr(node)
            continue
        short[node] = name
        word = {"SelectorWidth": "selector_width"}.get(type(node).__name__, type(node).__name__.lower())
        rule = getattr(node, "function", None) or getattr(node, "predicate", None)
        named = [getattr(rule, "name", "") or type(rule).__name__.lower()] if rule is not None else []
        parts = [*named, *(short[child] for child in node.children)] if word == "map" else [
            *(short[child] for child in node.children), *named]  # fmt: skip
        lines.append(Line(f"{name} = {word}({', '.join(parts)})", tuple(sorted(set(units.get(i, ()))))))
    return lines


def _program_text(net: CompiledProgram) -> tuple[Line, ...]:
    try:
        return tuple(map(Line, net.program.to_text().split("\n")))
    except UnsupportedOperation:
        return (Line(repr(net.program)),)


# ---- plain transformers


def _plain(net: PlainTransformer) -> Model:
    """The blocks as heads over all rows."""
    spec, layers, units = net.spec, [], []
    for b, (block, row) in enumerate(zip(net.blocks, net.heads, strict=True)):
        heads = cast(PlainBlock, block).as_heads(net.causal, f"block {b}")
        layers.append(PageLayer((heads,), net.channels, residual=True))
        for h, head in enumerate(row):
            if head.purpose:
                family, _, label = head.purpose.partition(": ")
                sees = {"memory": "registers", "self": "its own token and registers"}.get(head.scope, "tokens")
                facts = (("sees", sees), ("excluded keys lose", f"{head.omega:g}"),
                         ("|logit| at most", f"{head.logit:.3g}"))  # fmt: skip
                hook = f"blocks.{b}.attn.hook_z[:, :, {h}]"
                units.append(PageUnit(b, label or family, family, ((0, h),), facts, (hook,)))
    outputs = _numbered(spec.outputs)
    layers.append(PageLayer((), outputs, S=net.readout.weight.detach().T, s=net.readout.bias.detach()))
    lines = (Line(f"block {u.layer}, head {u.heads[0][1]}: {u.family} {u.label}", (i,)) for i, u in enumerate(units))
    frame = _plain_frame(net, outputs)
    return replace(
        frame, layers=tuple(layers), columns=net.channels, units=tuple(units), lines=(*frame.lines, Line(""), *lines),
        constants=None, embed=net.embed.weight.detach(), positions=net.positions.detach(), registers=net.registers,
        title=f"{net.certificate.target}, as a plain transformer",
    )  # fmt: skip


def _plain_frame(net: PlainTransformer, outputs: tuple[str, ...]) -> Model:
    """The way in and out, and the target, of the network that a plain transformer was made from, where it is known."""
    origin = net.stands_for()
    if isinstance(origin, CompiledNetwork):
        return _compiled_frame(origin)
    if isinstance(origin, CompiledProgram):
        return _tokens_frame(origin)
    spec, tokens = net.spec, net.tokens
    names = [name if tokens == 1 else f"token {t}, {name}" for t in range(tokens) for name in spec.inputs]
    ends = net.box.intervals() * (len(names) // net.box.dim)
    return Model(
        layers=(), columns=(), tokens=tokens, width=len(spec.inputs), first_row=spec.first_row, units=(),
        inputs=tuple((name, *pair) for name, pair in zip(names, ends, strict=True)),
        outputs=_spread(outputs, 1 if spec.first_row else tokens), lines=(Line(net.certificate.target),), target=None,
        without=_WITHOUT,
    )  # fmt: skip


def _numbered(count: int) -> tuple[str, ...]:
    return ("output",) if count == 1 else tuple(f"output {i}" for i in range(count))


def _spread(names: tuple[str, ...], tokens: int) -> tuple[str, ...]:
    return names if tokens == 1 else tuple(f"token {t}, {name}" for t in range(tokens) for name in names)


# ---- theorems, black boxes and heads on their own


_WITHOUT = "The target is a Python function, which a page cannot hold: only the network is drawn."


_FAST = (
    "The certificate is for an evaluation with one exponential per number. The page runs the same weights as softmax "
    "attention written out, whose rounding differs."
)


def _construction(net: Construction) -> Model:
    found = _built(net)
    return replace(found, title=f"{net.theorem}: {net.certificate.target}")


def _built(net: Construction) -> Model:
    if net.form != "tokens" or (isinstance(net, MaxAffine) and isinstance(net.layer, Cross)):
        return _paper_ramp(net) if isinstance(net, Ramp) else _paper_cells(cast(MaxAffine | Universal, net))
    source = source_of(net)
    names = (*source.names[:-1], _numbered(len(source.names[-1])))
    layers = [PageLayer.of(la, n) for la, n in zip(source.layers, names, strict=True)]
    if source.lead is not None:
        layers.insert(0, PageLayer.of(source.lead, source.lead_names))
    hooks = {(la + (source.lead is not None), g, h): name for (la, g, h), name in _hooks(net).items()}
    inputs = _spread(source.inputs, source.tokens)
    ends = list(zip(source.low.reshape(-1).tolist(), source.high.reshape(-1).tolist(), strict=True))
    found = _alone(net, layers, inputs, ends, source.tokens, None, constants=source.constants, hooks=hooks)
    return _with_ramp(net, found) if isinstance(net, Ramp) else found


_ALONG = (
    "In the paper's form linear maps along the sequence come before attention: they put anchors beside the tokens, or "
    "all tokens into one column. The page shows what the heads see then: constant slots, and rows that are made so."
)


def _paper_ramp(net: Ramp) -> Model:
    """y = w.x + t of every token, then heads over the anchors that A puts beside the tokens.

    Where every token has a w or a t of its own, one row holds all tokens, and each has heads of its own.
    """
    n, d, channels, dtype = net.tokens_shown(), net.w.shape[-1], net.channels, net.dtype
    w, t = net.w.detach(), net.t.detach()
    each = w.dim() > 1 or t.dim() > 0
    count = n if each else 1  # rows of y that a row of the page holds
    S, s = torch.zeros(count, d, count, dtype=dtype), t.expand(count).contiguous()
    S[range(count), :, range(count)] = w.expand(count, d)
    W_Q, W_O, keys, values = [], [], [], []
    for i in range(count):
        for head in net.stored().heads:
            query = torch.zeros(count, 2, dtype=dtype)
            query[i, 0] = 1.0
            out = torch.zeros(head.value.shape[1], count * channels, dtype=dtype)
            out[:, i * channels : i * channels + out.shape[0]] = torch.eye(out.shape[0], dtype=dtype)
            W_Q.append(query)
            W_O.append(out)
            keys.append(torch.from_numpy(np.stack([head.slope, head.offset], -1)).to(dtype))
            values.append(torch.from_numpy(head.value).to(dtype))
    b_Q = torch.tensor([[0.0, 1.0]], dtype=dtype).expand(len(W_Q), 2)
    group = Heads("memory", W_Q=torch.stack(W_Q), b_Q=b_Q, M_K=torch.stack(keys), M_V=torch.stack(values),
                  W_O=torch.stack(W_O), purpose="ramp")  # fmt: skip
    outputs = [f"output {c}" for c in range(channels)] if channels > 1 else ["output"]
    lead = tuple(f"w.x + t, token {i}" for i in range(n)) if each else ("w.x + t",)
    made = PageLayer((), lead, S.reshape(count * d, count), s)
    names, ends = _spread(tuple(f"x[{c}]" for c in range(d)), n), [(-net.radius, net.radius)] * (n * d)
    last = PageLayer((group,), _spread(tuple(outputs), n) if each else tuple(outputs))
    found = _alone(net, [made, last], names, ends, 1 if each else n, None)
    return replace(_with_ramp(net, found), remark=_ALONG)


def _paper_cells(net: MaxAffine | Universal) -> Model:
    """One row with all coordinates of the sequence; cross-attention over a box of tokens has a row for each."""
    shape, tokens, constants, between = net.box.shape, 1, None, "hat"
    if isinstance(net, Universal):
        layers = [net.net.first, selection(net.net.select)]
    else:
        W_Q, b_Q, keys, values = (table[None] for table in net.tables())
        eye = torch.eye(values.shape[-1], dtype=net.dtype)[None]
        layers = [AttentionLayer([Heads("memory", W_Q=W_Q, b_Q=b_Q, M_K=keys, M_V=values, W_O=eye, purpose="cells")])]
        tokens = 1 if len(shape) == 2 else int(net.points(1).shape[-2])
        if net.tokens:  # sequences, gathered into every token first
            constants, layers, tokens, between = net.positions.detach(), [net.gather, *layers], net.tokens, "gathered"
    one = len(shape) == 2 and tokens == 1
    names = _spread(tuple(f"x[{c}]" for c in range(shape[-1])), shape[0] if one else tokens)
    ends = net.box.intervals() * (len(names) // net.box.dim)
    columns = [layer.heads()[0].W_O.shape[-1] for layer in layers]
    outputs = _numbered(columns[-1] // shape[0] if one else columns[-1])
    each = [
        *(tuple(f"{between} {c}" for c in range(width)) for width in columns[:-1]),
        _spread(outputs, shape[0] if one else 1),
    ]
    made = [PageLayer.of(layer, name) for layer, name in zip(layers, each, strict=True)]
    return replace(_alone(net, made, names, ends, tokens, None, constants), remark=_ALONG if one else "")


def _with_ramp(net: Ramp, found: Model) -> Model:
    """The target of a ramp: w.x + t, clipped and bent, on its channel; none where the channel changes."""
    wanted = net.wanted
    if not wanted.constant:
        return found
    shape, build = wanted.shape, Builder(Box.cube(-1, 1, shape=(found.tokens, found.width)), tokens=found.tokens)
    count = found.width // wanted.w.shape[-1]  # tokens in a row of the page
    weight = np.zeros((count, wanted.w.shape[-1], count))
    weight[range(count), :, range(count)] = wanted.w
    bias = np.broadcast_to(wanted.t, count)
    bent = build.apply(build.linear([(build.input, weight.reshape(found.width, count))], bias), "identity")
    channel = np.kron(np.eye(count), np.eye(wanted.channels)[wanted.channel[0]][None])
    target, _ = _program(build.program(build.linear([(bent, channel)], np.zeros(count * wanted.channels)), "ramp"))
    knots = sorted({shape.a, shape.b} | ({Fraction(0)} if shape.slope is not None and shape.a < 0 < shape.b else set()))
    ends = [(Fraction(0), shape.exact(shape.a)), (Fraction(0), shape.exact(shape.b))]
    slopes = [(shape.exact(y) - shape.exact(x)) / (y - x) for x, y in itertools.pairwise(knots)]
    inner = [(slope, shape.exact(x) - slope * x) for slope, x in zip(slopes, knots, strict=False)]
    lines = [_floats(line) for line in (ends[0], *inner, ends[1])]
    rows = found.tokens * count  # tokens that begin along the ramp, from near a to near b: most of the box is flat
    wanted_y = np.linspace(float(shape.a), float(shape.b), rows + 2)[1:-1]
    w = np.broadcast_to(wanted.w, (rows, wanted.w.shape[-1]))
    start = (wanted_y - wanted.t)[:, None] * w / np.maximum((w * w).sum(-1, keepdims=True), 1e-300)
    return replace(found, target=_applying(target, "lines", _floats(knots), lines), without="",
                   start=tuple(np.clip(start, -net.radius, net.radius).round(3).ravel().tolist()))  # fmt: skip


def _alone(
    net: CertifiedModule,
    layers: Sequence[PageLayer],
    names: Sequence[str],
    ends: Sequence[tuple[float, float]],
    tokens: int,
    program: Program | None,
    constants: Tensor | None = None,
    hooks: dict[tuple[int, int, int], str] | None = None,
) -> Model:
    """Layers with a unit for every group of heads."""
    target, without = (None, _WITHOUT) if program is None else _program(program)
    lemmas, units = ", ".join(net.certificate.lemmas), []
    for number, layer in enumerate(layers):
        for g, group in enumerate(layer.groups):
            heads = tuple((g, h) for h in range(group.heads))
            facts = (("lemmas", lemmas),) if lemmas else ()
            named = tuple((hooks or {}).get((number, *head), "") for head in heads)
            units.append(PageUnit(number, group.purpose or f"layer {number + 1}", net.family, heads, facts, named))
    outputs, target_line = _spread(layers[-1].names, tokens), Line(net.certificate.target)
    numbers = {layer: i + 1 for i, layer in enumerate(dict.fromkeys(u.layer for u in units))}
    lines = (target_line, *(Line(f"layer {numbers[u.layer]}: {u.label}", (i,)) for i, u in enumerate(units)))
    width = len(names) // tokens
    columns = tuple(names[:width]) if tokens == 1 else tuple(f"x[{c}]" for c in range(width))
    extra = () if constants is None else tuple(f"position {i}" for i in range(constants.shape[1]))
    return Model(
        layers=tuple(layers), columns=columns + extra, tokens=tokens, width=width,
        inputs=tuple((n, *e) for n, e in zip(names, ends, strict=True)), outputs=outputs, first_row=False,
        units=tuple(units), lines=lines, target=target, without=without, constants=constants,
    )  # fmt: skip


def _scalar(net: CertifiedModule, layer: AttentionLayer, program: Program) -> Model:
    names = net.box.names or ("y",)
    return _alone(net, [PageLayer.of(layer, (net.certificate.target,))], names, net.box.intervals(), 1, program)


def _anchor(net: AnchorHead | FastActivation) -> Model:
    build = Builder(Box(y=net.box.intervals()[0]))
    layer, half = net.layer, net.dtype not in SHIPPED
    if half and isinstance(net, FastActivation):  # half precision is computed in float32, with keys that are exact
        layer = FastActivation(net.function, net.lo, net.hi, net.stored_table(), torch.float32).layer
    found = _scalar(net, layer, build.program(build.apply(build.column(0), net.function), net.function.name))
    fast = isinstance(net, FastActivation) or net.lattice is not None
    return replace(found, remark=_FAST if fast else "", apart=fast, handed=dtype_name(net.dtype) if half else "")


def _gate(net: GateHead) -> Model:
    """A gate is compared with its own lines or values; of a pair, max(x, y) and min(x, y) are y and a part of x - y."""
    build, shape = Builder(net.box), net.spec.target.shape
    if net.spec.target.pair:
        x, y = build.column(0), build.column(1)
        value = build.combination([(y, 1.0), (build.apply(build.combination([(x, 1.0), (y, -1.0)]), "identity"), 1.0)])
    else:
        value = build.apply(build.column(0), "identity")
    found = _scalar(net, net.layer, build.program(value, net.certificate.target))
    if isinstance(shape, Lines):
        args: tuple[Any, ...] = ("lines", shape.knots, [_floats(line) for line in shape.lines])
    else:
        args = ("logistic", shape.rate, _floats(shape.high), _floats(shape.low))
    return replace(found, target=_applying(found.target, *args))


def _floats(numbers: Iterable[Fraction]) -> list[float]:
    return [float(number) for number in numbers]


def _applying(target: dict[str, Any] | None, name: str, *args: Any) -> dict[str, Any]:
    """A target with this function in the place of the identity."""
    assert target is not None
    function = {"name": name, "args": list(args), "lo": None, "hi": None}
    ops = [{**op, "function": function} if op["op"] == "apply" else op for op in target["ops"]]
    return {**target, "ops": ops}


def _chain(net: ChainHead) -> Model:
    """Gates side by side in one layer, what reads them in the next; lines go through as they are."""
    heads = cast(dict[str, Any], dict(net.heads.items()))
    if "product" in heads:
        columns = {"y": 0, "gate": 1}
        first = [([0], heads["gate"].layer, 1)]
        second = [([1, 0] if heads["product"].swapped else [0, 1], heads["product"].layer, 0)]
    else:
        gates = [key for key in heads if not key.startswith("table")]
        columns = {key: i for i, key in enumerate(gates)}
        first = [([0], heads[key].layer, i) for key, i in columns.items()]
        second = [([columns[f"clip{key[5:]}"]], head.layer, 0) for key, head in heads.items() if key not in columns]
    carried = [columns[key] for key in ("y", "lines") if key in columns]
    one, width = _side_by_side(first, 1, len(columns), net.dtype), len(columns)
    two = _side_by_side(second, width, 1, net.dtype)
    assert one.S is not None
    assert two.S is not None
    if "y" in columns:
        one.S[0, 0] = 1.0
    elif carried:
        two.S[carried[0], 0] += 1.0
    build = Builder(Box(y=net.box.intervals()[0]))
    program = build.program(build.apply(build.column(0), net.function), net.function.name)
    layers = [replace(one, names=tuple(columns)), replace(two, names=(net.function.name,))]
    return _alone(net, layers, ("y",), net.box.intervals(), 1, program)


def _side_by_side(
    parts: Sequence[tuple[list[int], AttentionLayer, int]], width: int, outputs: int, dtype: torch.dtype
) -> PageLayer:
    """Layers of one output each as one layer: each reads columns of its own and writes a column of its own."""
    S, s, groups = torch.zeros(width, outputs, dtype=dtype), torch.zeros(outputs, dtype=dtype), []
    for reads, layer, write in parts:
        if layer.S is not None:
            S[reads, write] += layer.S.detach()[:, 0]
        if layer.s is not None:
            s[write] += layer.s.detach()[0]
        for group in layer.heads():
            tables = {name: table.detach() for name, table in group.named_parameters()}
            for name in ("W_Q", "W_K", "W_V"):
                if name in tables:
                    wide = tables[name].new_zeros(tables[name].shape[0], width, tables[name].shape[2])
                    wide[:, reads] = tables[name]
                    tables[name] = wide
            out = tables["W_O"].new_zeros(*tables["W_O"].shape[:2], outputs)
            out[..., write] = tables["W_O"][..., 0]
            groups.append(Heads(group.scope, causal=group.causal, purpose=group.purpose, **{**tables, "W_O": out}))
    return PageLayer(tuple(groups), (), S, s)


def _product(net: ProductHead) -> Model:
    build = Builder(net.box if net.width is None else Box.cube(-1, 1, shape=net.width + 1))
    if net.width is not None:
        names = tuple(f"x[{i}]" for i in range(net.width))
        parts = [build.product(build.column(i), build.column(net.width)) for i in range(net.width)]
        value = build.linear([(part, row[None]) for part, row in zip(parts, np.eye(net.width), strict=True)],
                             np.zeros(net.width))  # fmt: skip
        layer = PageLayer.of(net.layer, tuple(f"{name} y" for name in names))
        ends, program = [*[net.box["x"]] * net.width, net.box["y"]], build.program(value, "x y")
        return _alone(net, [layer], (*names, "y"), ends, 1, program)
    x, y = build.column(0), build.column(1)
    found = _scalar(net, net.layer, build.program(build.product(x, y), "x*y"))
    if not net.swapped:
        return found
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=net.dtype)
    first, units = PageLayer((), ("y", "x"), S=swap), (replace(u, layer=u.layer + 1) for u in found.units)
    return replace(found, layers=(first, *found.layers), units=tuple(units))


_NORM = (
    "The certificate is for means and squares that are summed as trees, or in two stages. The page centres rows by a "
    "matrix: its rounding differs."
)


def _norm(net: NormHead) -> Model:
    """Rows centred twice by affine maps; heads whose own slot has logit shift - scale c.c and value c; weight and bias.

    Its certificate is for rows whose variance lies in an interval, which no box says: the page keeps rows there.
    """
    d, heads, dtype, centred = net.channels, net.heads, net.dtype, net.kind == "layer"
    if (size := heads * d * (2 * d + 1)) > WRITTEN:
        told = f"a norm of {d} channels, written out as {heads} heads, has {size:,} numbers"
        raise UnsupportedOperation(f"{told}; pages show norms of up to {WRITTEN:,}")
    eye, last = torch.eye(d, dtype=dtype), torch.eye(d + 1, dtype=dtype)[-1:]
    own = torch.cat([eye, torch.zeros(d, 1, dtype=dtype)], 1)
    scale, shift, mix = (table.detach()[:, None] for table in (net.scale, net.shift, net.mix))
    group = Heads(
        "self", W_Q=-scale[..., None] * own, b_Q=shift * last, W_K=own[None], b_K=last, W_V=eye[None],
        M_K=torch.zeros(1, 1, d + 1, dtype=dtype), M_V=torch.zeros(1, 1, d, dtype=dtype), W_O=mix[..., None] * eye,
        purpose="layer norm" if centred else "rms norm",
    )  # fmt: skip
    names = tuple(f"x[{i}]" for i in range(d))
    rows = tuple(f"{name} less the mean" for name in names) if centred else names
    layers = [PageLayer((), rows, S=eye - 1 / d)] * (2 if centred else 0)
    layers.append(PageLayer((group,), tuple(f"output[{i}]" for i in range(d))))
    weight, bias = (None if table is None else table.detach() for table in (net.weight, net.bias))
    if weight is not None or bias is not None:
        layers.append(PageLayer((), layers[-1].names, S=eye if weight is None else torch.diag(weight), s=bias))
    build = Builder(Box.cube(-1, 1, shape=d))
    value = build.normalise(build.input, net.eps_norm, centred)
    scales = np.ones(d) if weight is None else weight.double().numpy()
    shifts = np.zeros(d) if bias is None else bias.double().numpy()
    if weight is not None or bias is not None:  # a matrix only where there is need of one: rows are wide
        value = build.linear([(value, np.diag(scales))], shifts)
    program = build.program(value, "norm")
    reach = SPREAD * math.sqrt(net.variance[1])
    found = _alone(net, layers, names, [(-reach, reach)] * d, 1, program)
    known = {"variance": list(net.variance), "offset": net.offset if centred else None, "eps": net.eps_norm,
             "weight": np.abs(scales).tolist(), "bias": np.abs(shifts).tolist()}  # fmt: skip
    return replace(found, rows=known, remark=_NORM, apart=True)


def _token(net: TokenHead) -> Model:
    build = Builder(net.box, tokens=net.tokens)
    if net.target is not None:
        value = build.mix(build.input, net.target.double().numpy())
    else:
        sign = 1.0 if net.mode == "max" else -1.0
        value = build.combination([(build.max_tokens(build.combination([(build.input, sign)])), sign)])
    program = build.program(value, net.mode, net.box.shape, "all")
    names = [f"token {t}, channel {c}" for t in range(net.tokens) for c in range(net.channels)]
    layer = PageLayer((net.attention,), tuple(f"{net.mode}[{c}]" for c in range(net.channels)))
    constants = net.positions if net.positions.shape[0] else None
    return _alone(net, [layer], names, net.box.intervals(), net.tokens, program, constants)


def _black(net: Approximation) -> Model:
    layer = getattr(net, "layer", None)
    if not isinstance(layer, AttentionLayer):
        raise UnsupportedOperation(f"a {type(net).__name__} is not made of one layer that a page could run")
    outputs, names = _numbered(math.prod(net.about.output_shape)), [name for name, *_ in _entries([net.box])]
    return _alone(net, [PageLayer.of(layer, outputs)], names, net.box.intervals(), 1, None)


#: Which function reads which kind of network; the first that fits.
READERS: tuple[tuple[type | tuple[type, ...], Callable[[Any], Model]], ...] = (
    (CompiledNetwork, _compiled), (CompiledProgram, _tokens), (CompiledPrograms, _several), (PlainTransformer, _plain),
    (Construction, _construction), ((AnchorHead, FastActivation), _anchor), (GateHead, _gate), (ProductHead, _product),
    (TokenHead, _token), (ChainHead, _chain), (NormHead, _norm), (Approximation, _black),
)  # fmt: skip


#: Functions of the registry that take arguments, which their names carry.
MADE = ("power", "piecewise_linear", "leaky_relu", "elu", "shifted_log", "softplus")

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
