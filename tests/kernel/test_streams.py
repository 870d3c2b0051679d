"""Rules about plain transformers alone, with errors from 1e-300 to 1 (docs/kernel.md): what the stored tensors compute
is worked out here once more, in thousands of bits."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from flint import arb, arb_mat, ctx, fmpq

import attnforge as af
from attnforge import rasp
from attnforge.compiler.derivation import derive as derive_network
from attnforge.compiler.pipeline import compile_program
from attnforge.errors import CertificateError
from attnforge.export.plain.build import to_plain
from attnforge.export.plain.derivation import derive
from attnforge.groundtruth import vary
from attnforge.kernel.balls import ZERO, working
from attnforge.kernel.file import Saved, Tensor, parse
from attnforge.kernel.plain.fold import Folded, _sees
from attnforge.kernel.plain.stream import KEY, QUERY, VALUE, Head, Stream
from attnforge.kernel.plain.variant import straightened
from attnforge.kernel.plain.words import unfolded
from attnforge.kernel.program import exact
from attnforge.kernel.programs.prove import DEAD
from attnforge.kernel.prove import Prover
from attnforge.kernel.rounding import Machine
from attnforge.kernel.tokens import norm
from attnforge.kernel.values import Blind, values
from attnforge.programs.positions import prepared
from attnforge.programs.program import Builder

SIZES = [1e-300, 1e-100, 1e-30, 1e-10, 1e-4, 1e-1, 1.0]
EXACT = 2400
STILL = Machine(ZERO, ZERO, arb(2.0**1015))


def _upper(x: arb) -> fmpq:
    return x.upper().fmpq()


@functools.cache
def formula() -> tuple[Any, Saved, Any]:
    plain = to_plain(af.compile("x*y", af.Box(x=(-1, 1), y=(0, 2)), eps=1e-2, dtype=torch.float64))
    return plain, parse(plain.written()), derive(plain, parse(plain.written()), plain.bound or 0.0, 1)


def outputs(saved: Saved, inputs: list[list[float]]) -> list[arb]:
    """What a plain transformer, or a variant of one, computes of rows of inputs, nothing rounded; what is as far behind
    as is said to weigh nothing does."""
    config, tables = saved.header["config"], {name: t.rows() for name, t in saved.tensors.items()}
    width, registers, dead = config["stream"], config["registers"], DEAD[config["dtype"]]
    with ctx.workprec(EXACT):
        rows = [[arb(x) for x in row] for row in tables["positions"]]
        for row, given in zip(rows[registers:], inputs, strict=True):
            for c, weights in enumerate(tables["embed.weight"]):
                row[c] += sum((arb(w) * arb(x) for w, x in zip(weights, given, strict=True)), ZERO)
        state = arb_mat(rows)
        for b, heads in enumerate(config["heads"]):
            into, out = (arb_mat([[arb(x) for x in row] for row in tables[f"blocks.{b}.attention.{name}"]])
                         for name in ("in_proj_weight", "out_proj.weight"))  # fmt: skip
            read = (state * into.transpose()).tolist()
            d, means = width // len(heads), [[ZERO] * width for _ in rows]
            for h in range(len(heads)):
                at = h * d
                q, k, v = ([row[n + at : n + at + d] for row in read] for n in (0, width, 2 * width))
                for i, query in enumerate(q):
                    seen = range(i + 1) if config["causal"] else range(len(q))
                    logits = [_dot(query, k[j]) / arb(d).sqrt() for j in seen]
                    top = max(logits, key=_upper)
                    powers = [(x - top).exp() if x - top > -dead else ZERO for x in logits]
                    total = sum(powers, ZERO)
                    for c in range(d):
                        means[i][at + c] = _dot(powers, [v[j][c] for j in seen]) / total
            state = state + arb_mat(means) * out.transpose()
        last = state.tolist()[registers:]
        outs = list(zip(tables["readout.weight"], tables["readout.bias"], strict=True))
        return [_dot(row, map(arb, weights)) + arb(bias) for row in last for weights, bias in outs]


def _dot(a: Iterable[arb], b: Iterable[arb]) -> arb:
    return sum((x * y for x, y in zip(a, b, strict=True)), ZERO)


def moved(saved: Saved, name: str, at: int, by: float) -> Saved:
    """A file one of whose numbers is larger by something."""
    old = saved.tensors[name]
    numbers = (*old.numbers[:at], old.numbers[at] + by, *old.numbers[at + 1 :])
    return Saved(saved.header, {**saved.tensors, name: Tensor(old.dtype, old.shape, numbers)}, "")


def places(saved: Saved) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Where the numbers are that are not 0, and the zeros in rows beside them."""
    full, zero = [], []
    for name, t in saved.tensors.items():
        for i, x in enumerate(t.numbers):
            row = i - i % t.shape[-1]
            if x != 0:
                full.append((name, i))
            elif any(t.numbers[row : row + t.shape[-1]]):
                zero.append((name, i))
    return full, zero


# -- what is hidden ----------------------------------------------------------------------------------------------------


def ahead(stream: Stream, head: Head, content: int, wanted: Any, sizes: list[arb], draw: random.Random) -> arb:
    """How far the best that a token should see is ahead of the rest, at the worst rows that are found."""
    worst = arb(1e30)
    width, ids = stream.width, stream.ids
    for _ in range(6):
        rows = [[arb(int(c == r)) for c in range(width)] for r in ids]
        for given in stream.given:
            rows.append([arb(given[c]) if c in given else draw.choice([-1, 1]) * sizes[c] if c not in stream.fixed
                         and c not in ids else ZERO for c in range(width)])  # fmt: skip
        q, k = ([[sum((arb(w) * x for w, x in zip(stream.coordinate(head, third, j), row, strict=True) if w), ZERO)
                  for j in range(head.width)] for row in rows] for third in (QUERY, KEY))  # fmt: skip
        for t in range(stream.tokens):
            i = stream.registers + t
            logits = [sum((x * y for x, y in zip(q[i], key, strict=True)), ZERO) for key in k[: i + 1]]
            seen = [x for j, x in enumerate(logits) if wanted(t, j)]
            rest = [x for j, x in enumerate(logits) if not wanted(t, j)]
            worst = min([worst, *(max(seen, key=_upper) - x for x in rest)], key=_upper)
    return worst


@pytest.mark.parametrize("e", SIZES)
def test_what_is_hidden_weighs_nothing_or_the_head_is_refused(e: float) -> None:
    """K31: queries whose content is e times as large, hidden by less and less; and how large columns become."""
    _, saved, chosen = formula()
    draw, decided = random.Random(e), []
    with working():
        folded = Folded.read(saved, chosen)
        stream, dead = folded.stream, arb(DEAD["float64"])
        for place, head in stream.heads.items():
            layer, g, _ = place
            group = stream.source.groups[layer][g]
            content, reads = group["W_Q"].shape[2], group["W_O"].shape[1]
            sees = _sees(*chosen["network"]["scopes"][layer][g])
            before = [list(row) for row in stream.into[head.block]]
            scaled, refused, tight = stream.into[head.block], 0, 0

            def wanted(t: int, j: int, head: Head = head, sees: Any = sees) -> bool:
                return 1 <= j <= head.slots or (j >= stream.registers and sees(t, j - stream.registers))

            for k in range(0, 24):
                for j in range(head.width):
                    row = before[QUERY * stream.width + head.first + j]
                    by = e if j < content else 2.0**-k
                    scaled[QUERY * stream.width + head.first + j] = [x * by for x in row]
                gap = ahead(stream, head, content, wanted, folded.sizes, draw)
                try:
                    stream.hidden(head, content, reads, sees, folded.sizes)
                except CertificateError:
                    refused += 1
                    tight += bool(gap < 3 * dead)
                    continue
                assert not refused and gap >= dead
            stream.into[head.block] = before
            decided.append((refused, tight))
            most = stream.convex(layer, {p: stream.source.groups[p[0]][p[1]]["W_O"].shape[1] for p in stream.heads},
                                 [arb(e)] * stream.width)  # fmt: skip
            for c, bound in most.items():
                true = ZERO
                for one in (h for h in stream.heads.values() if h.place[0] == layer):
                    for j in range(stream.source.groups[layer][one.place[1]]["W_O"].shape[1]):
                        row, out = stream.row(one, VALUE, j), abs(arb(stream.out[one.block][c][one.first + j]))
                        slots = [abs(arb(row[r])) for r in stream.ids]
                        used = [(i, abs(arb(w))) for i, w in enumerate(row) if w and i not in stream.ids]
                        own = [sum((w * (abs(arb(given[i])) if i in given else arb(e) * (i not in stream.fixed))
                                    for i, w in used), ZERO) for given in stream.given]  # fmt: skip
                        true += out * max([*slots, *own], key=_upper)
                assert (true.lower() <= bound and not true > 0.0) or bound * 0.99 < true or true == 0
    assert all(refused and tight >= refused - 1 for refused, tight in decided)


# -- folds -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("e", SIZES)
def test_coordinates_are_off_by_what_their_weights_are(e: float) -> None:
    """K32: weights that differ from an exact fold by up to e, columns as large as they may be, with the worst signs."""
    _, saved, chosen = formula()
    draw = random.Random(e)
    with working():
        folded = Folded.read(saved, chosen)
        folded.stream.machine = STILL
        for _ in range(20):
            weights = [draw.choice([0.0, draw.gauss(0, 1)]) for _ in range(folded.stream.width)]
            off = [draw.choice([-1, 0, 1]) * fmpq(*e.as_integer_ratio()) * draw.randint(1, 9) / 9 for _ in weights]
            found = folded._off(weights, [exact(w) + x for w, x in zip(weights, off, strict=True)])
            with ctx.workprec(EXACT):
                true = sum((abs(arb(x)) * size for c, (x, size) in enumerate(zip(off, folded.sizes, strict=True))
                            if c not in folded.stream.ids), ZERO)  # fmt: skip
            assert true.lower() <= found and (true == 0 or not true <= found * 0.99)


@functools.cache
def normed() -> tuple[Saved, Any]:
    build = Builder(af.Box.cube(-1, 1, shape=(1, 2)), tokens=1)
    moved = build.linear([(0, [[1.0, 0.5], [0.0, 1.0]])], [2.0, -3.0])
    program = prepared(build.program(build.normalise(moved, 1e-3, centred=False), "norm", (1, 2)))
    net = compile_program(program, 1e-3, torch.float64)
    return parse(net.written()), derive_network(net, parse(net.written()), 1e-3, effort=150)


@pytest.mark.parametrize("e", SIZES)
def test_norms_of_rows_that_are_read_apart(e: float) -> None:
    """K32: queries and keys of a norm that are off a row by e together, and values by e."""
    saved, chosen = normed()
    draw, worst = random.Random(e), ZERO
    with working():
        prover = Prover.of(saved, chosen)
        layer, place = next((layer, place) for layer in prover.layers for place in layer.places)
        (group,) = (g for g in layer.groups if g.heads == place.heads)
        rule = norm(prover.program, layer, place, STILL, prover.chosen.tables, arb(e), arb(e))
        at = [draw.uniform(-0.1, 0.1) for _ in range(2)]
        ends = tuple(x - 2.0**-20 for x in at), tuple(x + 2.0**-20 for x in at)
        bounds = [[ZERO] * len(layer.after)]
        try:
            rule([[ZERO] * len(layer.before)], values(prover.program, *ends, prover.by_op), bounds)
        except Blind:
            assert e == 1.0  # the squares are beyond the cells of the table
            return
        columns = [layer.after.index((place.op, c)) for c in range(2)]
        with ctx.workprec(EXACT):
            row = [arb(at[0]) + 2, arb(at[0]) / 2 + arb(at[1]) - 3]
            root = (sum((c * c for c in row), ZERO) / 2 + arb(1e-3)).sqrt()
            for _ in range(40):
                share, turn = draw.choice([0.0, 0.5, 1.0]), draw.uniform(0, 7)
                away = [arb(e) * arb(turn).cos(), arb(e) * arb(turn).sin()]
                q, k = ([c + part * a for c, a in zip(row, away, strict=True)] for part in (share, 1 - share))
                length = sum((x * y for x, y in zip(q, k, strict=True)), ZERO)
                scale = ZERO
                for h in range(group.heads):
                    steep = arb(group.table("W_Q", h)[layer.before.index((place.op - 1, 0))][0])
                    logit = steep * length + arb(group.table("b_Q", h)[-1])
                    scale += arb(group.table("W_O", h)[0][columns[0]]) / (1 + (-logit).exp())
                for c, column in zip(row, columns, strict=True):
                    off = abs(scale * (c + draw.choice([-1, 1]) * arb(e)) - c / root)
                    assert off.is_finite() and off.lower() <= bounds[0][column]
                    worst = max(worst, off / bounds[0][column], key=_upper)
    assert e < 1e-2 or worst > 0.15


def _tokens(saved: Saved) -> dict[str, tuple[float, ...]]:
    return {name: t.numbers for name, t in saved.tensors.items()}


@pytest.mark.parametrize("e", SIZES)
def test_a_program_in_plain_form_has_the_numbers_of_its_network(e: float) -> None:
    """K33: the layers that are read out of the stream are the network's; a number that is changed by e is changed there
    by as much, or the file is refused, or nothing reads it."""
    net = af.compile(rasp.library.reverse(), rasp.Sequences("ab", 3), dtype=torch.float64)
    saved, plain = parse(net.written()), to_plain(net)
    given = parse(plain.written())
    draw, kept, refused, idle = random.Random(e), 0, 0, 0
    rows = [[1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]  # tokens, and that they are some
    with working():
        right = outputs(given, rows)
        own = _tokens(unfolded(given))
        wanted = _tokens(saved)
        assert {name: sorted(x for x in own[name] if x) for name in own} == {
            name: sorted(x for x in wanted[name] if x) for name in own if name in wanted
        } | {name: [] for name in own if name not in wanted}
        full, zero = places(given)
        for name, at in [*draw.sample(zero, 200), *(full if e > 1e-3 else [])]:
            changed = moved(given, name, at, e)
            by = 1.0
            if name.endswith("in_proj_weight") and at // given.tensors[name].shape[1] < plain.spec.stream:
                heads = len(plain.heads[int(name.split(".")[1])])
                by = math.isqrt(plain.spec.stream // heads)
            try:
                found = _tokens(unfolded(changed))
            except CertificateError:
                refused += 1
                continue
            apart = [abs(exact(a) - exact(b)) for n in own for a, b in zip(own[n], found[n], strict=True) if a != b]
            change = abs(exact(changed.tensors[name].numbers[at]) - exact(given.tensors[name].numbers[at]))
            if apart:
                assert sum(apart, fmpq(0)) == change / int(by) and len(apart) == 1
                kept += 1
            elif idle < 4:  # what hides keys, still well enough, or what nobody reads
                assert all(a.overlaps(b) for a, b in zip(outputs(changed, rows), right, strict=True))
                idle += 1
    assert kept and refused and idle


@functools.cache
def variant() -> Saved:
    net = af.compile("x*y", af.Box(x=(-1, 1), y=(0, 2)), eps=1e-2, dtype=torch.float64)
    return parse(vary(net, ["permuted", "split", "distractor", "idle"], seed=2).written())


@pytest.mark.parametrize("e", SIZES)
def test_a_variant_computes_what_is_made_of_it(e: float) -> None:
    """K34: a number that is changed by e: refused, or the straightened transformer computes the same, to 2^-2000."""
    saved, draw = variant(), random.Random(e)
    inputs = [[0.75, 1.25]]
    with working():
        right = outputs(straightened(saved), inputs)
        seen = refused = 0
        for old, new in zip(outputs(saved, inputs), right, strict=True):
            assert abs(old - new) < arb(2) ** -2000
        full, zero = places(saved)
        for name, at in [*draw.sample(zero, 30), *draw.sample(full, 3)]:
            changed = moved(saved, name, at, e)
            try:
                made = straightened(changed)
            except CertificateError:
                refused += 1
                continue
            found = outputs(changed, inputs)
            for old, new, before in zip(found, outputs(made, inputs), right, strict=True):
                assert abs(old - new) < arb(2) ** -2000
                seen += not abs(old - before) < arb(2) ** -2000
    assert refused + seen
