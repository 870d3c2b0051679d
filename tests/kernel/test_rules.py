"""Every rule of the kernel alone, at errors from 1e-300 to 1 (docs/kernel.md): what is true, in thousands of bits and
as badly as it can be arranged, against what the rule says; and the same rule made a little weaker, which must fail."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from flint import arb, ctx, fmpq

import attnforge as af
from attnforge import theorems
from attnforge.compiler.alone import derive as derive_head
from attnforge.compiler.derivation import derive
from attnforge.heads.anchor.head import AnchorHead
from attnforge.heads.fast.activation import FastActivation
from attnforge.heads.gate.head import GateHead
from attnforge.heads.token.head import TokenHead
from attnforge.kernel.alone import chain, fast, norm
from attnforge.kernel.alone.pair import Pair
from attnforge.kernel.alone.ramp import Channels, _clip, ramped
from attnforge.kernel.balls import ZERO, NotProved, hull, reach, supremum, working
from attnforge.kernel.file import Saved, parse
from attnforge.kernel.functions import Function, evaluate, function
from attnforge.kernel.functions import parse as formula
from attnforge.kernel.programs.prove import Prover as ProgramProver
from attnforge.kernel.prove import Prover
from attnforge.kernel.rounding import Machine
from attnforge.kernel.scalar import Cell, Head, _decided
from attnforge.kernel.values import _cut, plain

ROOT = Path(__file__).resolve().parents[2]
SIZES = [1e-300, 1e-100, 1e-30, 1e-10, 1e-4, 1e-1, 1.0]  # of errors: from what hardly is one to all there is
EXACT = 3000  # bits of what is true: squares of 1e-300 against 1 are 2000
HUGE = arb(2.0**1015)
STILL = Machine(ZERO, ZERO, HUGE)  # a machine that does not round: nothing else can cover an error then
Pairs = Iterator[tuple[arb, arb]]  # what is true, and what the rule says


@dataclass(frozen=True)
class Rule:
    """What a lemma's function says of cases with errors of a size; `weak` times that is too little for one of them,
    where the errors are no less than `least`: others are lost in the 128 bits of a proof, whose upper ends count."""

    lemma: str
    pairs: Callable[[float, random.Random], Pairs]
    weak: float
    least: float = 0.0


def covered(true: arb, bound: arb) -> bool:
    """Whether nothing that is known to be true lies above the bound, which counts with its upper end."""
    return bool(true.is_finite() and true.lower() <= bound.upper())


def coarse(u: float) -> Machine:
    """A machine whose operations err by u: the rules do not ask which u it is."""
    return Machine(arb(u), ZERO, HUGE)


# -- functions ---------------------------------------------------------------------------------------------------------

CURVES: dict[str, Callable[[arb], arb]] = {
    "exp(y)": arb.exp, "sin(y)": arb.sin, "log(y)": arb.log, "1/y": lambda y: 1 / y, "sqrt(y)": arb.sqrt,
    "tanh(y)": arb.tanh, "y*erfc(-y)": lambda y: y * (-y).erfc(), "y**3 - y": lambda y: y**3 - y,
}  # fmt: skip


def taylor(e: float, source: random.Random) -> Pairs:
    """K5: f less its value in the middle of a cell of radius e."""
    for text, exact in CURVES.items():
        node, middle = formula(text), arb(source.choice([2.5, 3.0, 3.25]))
        near, far = (evaluate(node, ball, 10) for ball in (middle, middle + arb(0, e)))
        with ctx.workprec(EXACT):
            true = max((abs(exact(middle + s * arb(e)) - exact(middle)) for s in (-1.0, -0.3, 0.7, 1.0)), key=_upper)
        for rule in (reach, supremum):
            yield true, rule([ZERO, *near[1:-1]], far[-1], arb(e))


def _upper(x: arb) -> fmpq:
    return x.upper().fmpq()


def continued(e: float, source: random.Random) -> Pairs:
    """K6: roots and arcs of arguments that are up to e beyond their domain, and ranges that are cut to it."""
    for text, root in (("sqrt(y)", arb.sqrt), ("y**0.25", lambda y: y.sqrt().sqrt())):
        found = evaluate(formula(text), hull(-e * source.random(), e), 1)[0]
        with ctx.workprec(EXACT):
            true = root(arb(e))
        assert found.contains(0) and evaluate(formula(text), hull(-e, -e / 2), 1)[0].is_zero()
        yield true, found.upper() - found.lower()
    if e > 1e-15:  # nearer to 1 there is no number
        for name, end in (("asin", 1.0), ("acos", -1.0)):
            found = evaluate(formula(f"{name}(y)"), hull(end - e, end + e), 1)[0]
            with ctx.workprec(EXACT):
                true = abs(getattr(arb(end) * (1 - arb(e)), name)() - getattr(arb(end), name)())
            beyond = evaluate(formula(f"{name}(y)"), hull(end * (1 + e), end * (1 + 2 * e)), 3)
            assert beyond[0].overlaps(getattr(arb(end), name)()) and beyond[1].is_zero() and beyond[2].is_zero()
            yield true, found.upper() - found.lower()
    cut = _cut(plain(-e, 2 * e, None), 0.0, math.inf)
    yield arb(2 * e), arb(cut.high) - arb(cut.low)


def decided(e: float, source: random.Random) -> Pairs:
    """K9: slots that are behind, with weights up to e, move a head off the line of the one that is ahead."""
    for others in (1, 2, 5):
        gap, slopes = -math.log(e), [0.0, *(source.choice([-2.0, 2.0]) for _ in range(others))]
        keys = tuple((s, -gap - 1.0 if s else 0.0) for s in slopes)  # y is within 1/2 of 0: slopes add up to 1
        values = tuple(source.choice([-1.0, 1.0]) * source.uniform(0.5, 2) for _ in keys)
        head = Head(((1.0, 0.0), (0.0, 1.0)), keys, False, (0.0, 0.0, 0.0), values, 1.0)
        found = _decided(head, STILL, ZERO, arb(0.5), ZERO)
        assert found is not None
        line, error = found[1][0][1][0][0], found[1][1].rest
        with ctx.workprec(EXACT):
            true = ZERO
            for y in (-0.5, -0.25, 0.0, 0.25, 0.5):
                powers = [(arb(s) * y + arb(b)).exp() for s, b in keys]
                mean = sum((p * arb(v) for p, v in zip(powers, values, strict=True)), ZERO) / sum(powers, ZERO)
                true = max(true, abs(mean - line), key=_upper)
        yield true, error


# -- networks ----------------------------------------------------------------------------------------------------------


def leaves(e: float, source: random.Random) -> Pairs:
    """K12: every point of the box, corners and splits among them, lies in a leaf whose bound covers it."""
    base = af.compile("2*x - y", af.Box(x=(-1, 1), y=(-1, 1)), eps=1e-3, dtype=torch.float64)
    saved = parse(base.written())
    chosen, config = derive(base, saved, 1e-3), saved.header["config"]
    ends = [-e, e]
    chosen["tree"] = [0, e * source.uniform(-0.9, 0.9), [1, e * source.uniform(-0.9, 0.9), [], []], [1, 0.0, [], []]]
    box = {**config["program"]["box"], "lower": [-e, -e], "upper": ends[1:] * 2}
    header = {**saved.header, "config": {**config, "program": {**config["program"], "box": box}}}
    name = next(key for key in saved.tensors if key.endswith(".S"))
    stored = (2.0 + 2.0**-20, -1.0 + 2.0**-30)
    wrong = Saved(header, {**saved.tensors, name: type(saved.tensors[name])("float64", (2, 1), stored)}, "")
    prover = Prover.of(wrong, chosen)
    prover.machine = STILL
    parts = list(prover.leaves())
    corners = [p for low, high in parts for p in itertools.product(*zip(low, high, strict=True))]
    inner = [(source.uniform(-e, e), source.uniform(-e, e)) for _ in range(8)]
    bound = arb(prover.prove().bound)
    for x, y in [*corners, *inner]:
        holds = [part for part in parts if part[0][0] <= x <= part[1][0] and part[0][1] <= y <= part[1][1]]
        within = [prover.leaf(*part) for part in holds]
        true = abs(arb(2.0**-20) * arb(x) + arb(2.0**-30) * arb(y))
        assert within and covered(true, bound)
        yield true, arb(max(within))


# -- token programs ----------------------------------------------------------------------------------------------------


def sums(e: float, source: random.Random) -> Pairs:
    """K22: columns that err by up to e, with the worst signs, in the sums that heads read."""
    prover = ProgramProver.__new__(ProgramProver)
    prover.machine, prover.dtype = STILL, "float64"
    for _ in range(5):
        errors = [arb(e) * source.random() for _ in range(4)]
        weights = [source.gauss(0, 1) for _ in errors]
        bound = prover._sum_error(errors, weights, source.gauss(0, 1), {fmpq(1, 3)}, fmpq(3))
        with ctx.workprec(EXACT):
            yield sum((x * abs(arb(w)) for x, w in zip(errors, weights, strict=True)), ZERO), bound


def lost(e: float, source: random.Random) -> Pairs:
    """K23: n keys that are behind by so much that they weigh e together, on a machine on which that is little."""
    prover = ProgramProver.__new__(ProgramProver)
    u = max(3 * e, 2.0**-53)
    prover.machine, prover.dtype = coarse(u), "float64"
    for n in (1, 3, 40):
        lead = -(arb(e) / n).log()
        try:
            weight, dead = prover._lost(lead, n, "a slot")
        except NotProved:
            assert e > 1e-3  # too much to be lost in a sum: no rule
            continue
        with ctx.workprec(EXACT):
            power = (-lead * (1 - arb(u))).exp() * (1 + 3 * arb(u)) / (1 - 3 * arb(u))  # of what is rounded, computed
            true = n * power / (1 + n * power)
            yield (ZERO if dead else true), weight
            far = 5 * weight * 2 + 2 * (n + 1) * 3 * prover.machine.tiny  # K23's bound of a value, for values up to 2
            yield true * 4, (far if not dead else true * 4)


# -- heads on their own ------------------------------------------------------------------------------------------------


def relative(e: float, source: random.Random) -> Pairs:
    """K27: an error of e, of values of every size: over the least of them."""
    prover = Prover.__new__(Prover)
    prover.apart = 0.0
    prover.program = type("Rows", (), {"rows": 1})()  # type: ignore[assignment]
    for _ in range(5):
        low = 10.0 ** source.uniform(-5, 5)
        sign = source.choice([-1, 1])
        ends = sorted((sign * low, sign * low * source.uniform(1, 9)))
        found = prover._relative([[arb(e)]], [[plain(*ends, None)]])
        yield arb(e) / arb(low), arb(found)
    assert prover._relative([[arb(e)]], [[plain(-1.0, 1.0, None)]]) == math.inf


def mixtures(e: float, source: random.Random) -> Pairs:
    """K27: a mixture of tokens whose entries are of the size e, and whose gain is a little off."""
    matrix = [[e * source.uniform(0.5, 1) for _ in range(3)] for _ in range(3)]
    head = TokenHead.mix(torch.tensor([[1.0, 0.5, 0.25]] * 3, dtype=torch.float64), 1, dtype=torch.float64)
    saved = parse(head.written())
    config = {**saved.header["config"], "matrix": matrix, "lo": -1.0, "hi": 1.0}
    prover = Prover.of(Saved({**saved.header, "config": config}, saved.tensors, ""), derive_head(head, saved, 1.0))
    prover.machine = STILL
    with ctx.workprec(EXACT):
        shares = [arb(1) / 7 * k for k in (4, 2, 1)]
        gain = arb(1.75)
        rows = [sum((abs(gain * w - arb(m)) for w, m in zip(shares, row, strict=True)), ZERO) for row in matrix]
    yield max(rows, key=_upper), arb(prover.prove().bound)


def smallest(e: float, source: random.Random) -> Pairs:
    """K27, K15: minima as maxima of what has the other sign; e is about what they may be off."""
    if e < 1e-100:
        return  # a sharpness beyond the dtype
    head = TokenHead.min(3, 1, -1, 1, eps=max(e, 1e-3), dtype=torch.float64)
    saved = parse(head.written())
    key = next(name for name in saved.tensors if name.endswith("W_K"))
    beta = 1 / e
    numbers = tuple(math.copysign(beta, x) if x else 0.0 for x in saved.tensors[key].numbers)
    tensors = {**saved.tensors, key: type(saved.tensors[key])("float64", saved.tensors[key].shape, numbers)}
    prover = Prover.of(Saved(saved.header, tensors, ""), derive_head(head, saved, 1.0))
    prover.machine = STILL
    _still(prover)
    with ctx.workprec(EXACT):
        true = ZERO
        for t in (1.0, 1.2, 1.4, 1.6, 2.0):
            x = [arb(0), arb(t) * arb(e), arb(t) * arb(e)]
            powers = [(-v / arb(e)).exp() for v in x]
            true = max(true, sum((p * v for p, v in zip(powers, x, strict=True)), ZERO) / sum(powers, ZERO), key=_upper)
    yield true, arb(prover.prove().bound)


def _still(prover: Prover) -> None:
    """Rules that were made with a machine, made again with one that does not round."""
    prover.sites = [[prover._site(layer, place) for place in layer.places] for layer in prover.layers]


def centred(e: float, source: random.Random) -> Pairs:
    """K28: a row centred twice on a machine whose every operation errs by e, with the worst signs that are found."""
    if e > 1e-3:  # no row is known well enough, and the rule says so
        assert e < 1 or not norm._centred(coarse(e), 3, True, arb(3), arb(1e-3))[1].is_finite()
        return
    for d in (3, 8):
        entry, moved, _ = norm._centred(coarse(e), d, True, arb(3), arb(1e-3))
        with ctx.workprec(EXACT):
            given = [arb(source.gauss(0, 1)) for _ in range(d)]
            mean = sum(given, ZERO) / d
            exact = [v - mean for v in given]
            top, length = max(map(abs, exact), key=_upper), sum((c * c for c in exact), ZERO)
            x = [c + 3 * (length / d).sqrt() for c in exact]  # as far from 0 as is said
            worst = square = ZERO
            for _ in range(40):
                signs = [source.choice([-1, 1]) * arb(e) for _ in range(6 * d + 8)]
                found = _twice(x, signs)
                worst = max(worst, max((abs(a - b) for a, b in zip(found, exact, strict=True)), key=_upper) / top,
                            key=_upper)  # fmt: skip
                square = max(square, abs(sum((c * c for c in found), ZERO) / length - 1), key=_upper)
        yield worst, entry
        yield square, moved


def _twice(x: list[arb], signs: list[arb]) -> list[arb]:
    """A row less its mean, twice; every operation takes one of the errors."""
    given = iter(signs)
    for _ in range(2):
        terms = list(x)
        while len(terms) > 1:  # pairs, as a tree
            terms = [(terms[i] + terms[i + 1]) * (1 + next(given)) if i + 1 < len(terms) else terms[i]
                     for i in range(0, len(terms), 2)]  # fmt: skip
        mean = terms[0] / len(x) * (1 + next(given))
        x = [(v - mean) * (1 + next(given)) for v in x]
    return x


def scales(e: float, source: random.Random) -> Pairs:
    """K28: a mixture of sigmoids beside the same and e times the square's length, relatively."""
    b, s, a = 0.5, 0.75, 1.5
    target = Function("norm", (), (formula(f"{a}*sigmoid({b} - {s}*y) + {_exact(e)}*y"),))
    head = Head(((1.0, 0.0), (0.0, 1.0)), ((-s, b), (0.0, 0.0)), False, (0.0,) * 3, (1.0, 0.0), a)
    low = source.uniform(1, 2)
    found = norm._cell([head], _free(), low, low + 2.0**-30, target, 4, arb(0.25))
    with ctx.workprec(EXACT):
        yield max((arb(e) * y * (y / 4 + arb(0.25)).sqrt() for y in (arb(low), arb(low + 2.0**-30))), key=_upper), found


def _free() -> Machine:
    """A machine of almost no rounding, and of exponentials that are exact to it."""
    return Machine(arb(2) ** -1200, ZERO, HUGE)


def _exact(x: float) -> str:
    top, bottom = x.as_integer_ratio()
    return f"({top}/{bottom})" if len(str(bottom)) < 390 else f"({top}/{2**500}/{bottom // 2**500})"


def chains(e: float, source: random.Random) -> Pairs:
    """K29: a chain's program beside a function that is off by e times a sine, and a line of the slope e."""
    low = source.uniform(-3, 3)
    with ctx.workprec(EXACT):
        true = max((abs(arb(e) * (arb(low) + arb(t)).sin()) for t in (0.0, 0.03125, 0.0625)), key=_upper)
    target = function(f"expr: y*sigmoid(2*y) + {_exact(e)}*sin(y)")
    yield true, chain._cell(low, low + 0.0625, target, {"gate": function("expr: sigmoid(2*y)")}, product=True)
    clip = function("piecewise_linear([-2, -1, 1, 2], [-1, -1, 1, 1])")
    gates = {"lines": function(f"expr: {_exact(e)}*y"), "clip0": clip}
    inside = chain._cell(0.5, 0.75, function("exp"), gates, product=False)  # where a clip is its argument
    yield arb(0.75) * arb(e), inside
    outside = chain._cell(1.5, 1.75, function("expr: 2 + 0*y"), gates, product=False)
    yield arb(1.75) * arb(e), outside


def ramps(e: float, source: random.Random) -> Pairs:
    """K30: an affine map and a clip of the size e; how far its program is from the clip that is asked for: nowhere."""
    head = theorems.ramp(torch.tensor([1.0, -2.0]), 0.3, -1, 1, 16, variant="gate", radius=2.0)
    saved = parse(head.written())
    w, t = [e * source.uniform(-1, 1) for _ in "ab"], e * source.uniform(-1, 1)
    for a, b in ((-e, e), (-e, 0.0), (e / 3, e / 2)):
        config = {**saved.header["config"], "w": w, "t": t, "a": a, "b": b}
        program = ramped(Saved({**saved.header, "config": config}, saved.tensors, "")).program
        (form,), clip = program.forms()[1], program.ops[2].function
        with ctx.workprec(EXACT):
            for x in ((2.0, 2.0), (-2.0, 2.0), (0.0, 0.0), (source.uniform(-2, 2), source.uniform(-2, 2))):
                line = sum((arb(v) * arb(c) for v, c in zip(w, x, strict=True)), arb(t))
                own = sum((arb(form.weights.get((0, i), fmpq(0))) * arb(c) for i, c in enumerate(x)), arb(form.bias))
                assert own.overlaps(line)
                sharp = line.max(arb(a)).min(arb(b))
                for k, node in enumerate(clip.pieces):
                    after = k == 0 or line >= clip.knots[k - 1]
                    if after and (k == len(clip.knots) or line <= clip.knots[k]):
                        yield abs(evaluate(node, line, 1)[0] - sharp), arb(e) * arb(2) ** -2000
                        yield abs(line - own) + arb(e), arb(e)  # and an error of e is seen


def knots(e: float, source: random.Random) -> Pairs:
    """K45: the clip as a function of what heads read themselves, whose knots are rounded; at these, on both sides."""
    for slope in (None, 0.25, -0.5):
        shift = Fraction(e) * Fraction(source.randrange(1, 99), 97)
        found, apart = _clip({"a": -e, "b": 1.5 * e, "slope": slope}, shift)
        for k, knot in enumerate(found.knots):
            y = Fraction(knot) + shift
            kept = min(max(y, -Fraction(e)), Fraction(1.5 * e))
            meant = kept if slope is None or kept >= 0 else Fraction(slope) * kept
            with ctx.workprec(EXACT):
                exact = arb(fmpq(meant.numerator, meant.denominator))
                pairs = [(abs(evaluate(node, arb(knot), 1)[0] - exact), arb(apart)) for node in found.pieces[k : k + 2]]
            yield from pairs


def channels(e: float, source: random.Random) -> Pairs:
    """K48: weights that are e off, so that heads read e times as much beside y; where a channel is excluded that is all
    there is, and one step of e before the middle between channels is not excluded."""
    w = torch.tensor([1.0, -2.0], dtype=torch.float64)
    head = theorems.ramp(w, 0.0, -1, 1, 8, radius=2.0, G=[0] * 4 + [1] * 4, form="tokens")
    saved, wrong = parse(head.written()), [e, -2.0 * e]  # the tensors hold none
    (name,) = (name for name in saved.tensors if name.endswith("W_Q"))
    for slope in (None, 3.0):
        numbers = tuple(0.0 if x in (1.0, -2.0) else x for x in saved.tensors[name].numbers[:4])
        tensors = {**saved.tensors, name: replace(saved.tensors[name], numbers=numbers)}
        config = {**saved.header["config"], "w": wrong, "slope": slope}
        ramp = Channels(Saved({**saved.header, "config": config}, tensors, ""))
        with ctx.workprec(EXACT):
            off = arb(wrong[0]) * 2 - arb(wrong[1]) * 2
            yield off, ramp.moved
            yield arb(slope or 1) * off, arb(ramp.error(-1e-9, 1e-9))  # around the middle
            assert ramp.error(0.3, 0.31) > 0.01  # where nothing is excluded, heads differ from what is meant


# -- one exponential ---------------------------------------------------------------------------------------------------


def readings(e: float, source: random.Random) -> Pairs:
    """K36: what is read with one exponential on a machine whose every operation errs by e, made of coefficients that
    err by as much, with the worst signs that are found; against the heads in exact arithmetic."""
    if e > 1e-3:
        return  # the denominator is not known
    for name, low, high, anchors in (("tanh", -3, 3, 9), ("gelu", -2, 3, 12)):
        head = FastActivation.fit(name, low, high, anchors=anchors)
        own = fast.Fast(parse(head.written()))
        machine, was = coarse(e), fast.COARSE
        fast.COARSE = arb(e)
        try:
            given = fast._coefficients(own.read)
            for at in (0.5, 1.75):
                cell = Cell.of(at, at + 2.0**-10, own.site.function)
                bound = fast._reading(own.read, machine, given, cell)
                yield _read_badly(own.read, arb(at), arb(e), given[2], source), bound
        finally:
            fast.COARSE = was


def two_readings(e: float, source: random.Random) -> Pairs:
    """K47: the same of the table that a network's file names, in cells that are divided anew."""
    if e > 1e-3:
        return
    read, was = fast.Fast(parse(FastActivation.fit("tanh", -3, 3, anchors=9).written())).read, fast.COARSE
    fast.COARSE = arb(e)
    try:
        even = fast.Even(read.heads[-1], read.rate, read.kappa, read.centre, read.work)
        assert even.table is not None
        for at in (0.5, 1.75):
            true = _read_badly(replace(read, gate=0.0), arb(at), arb(e), even.table[1][2], source)
            yield true, even(coarse(e), Cell.of(at, at + 2.0**-10, None))
    finally:
        fast.COARSE = was


def _read_badly(read: fast.Read, y: arb, u: arb, masses: list[arb], source: random.Random) -> arb:
    """The largest difference found between the computed quotient and the softmax that it stands for, y >= 0."""
    with ctx.workprec(EXACT):
        head, v, count = read.heads[-1], read.values, len(read.values)
        theta = arb(read.rate) * (y - arb(read.centre))
        powers = [(arb(a) * (y - arb(read.centre)) + arb(b)).exp() for a, b in head.keys]
        exact = sum((p * arb(x) for p, x in zip(powers, v, strict=True)), ZERO) / sum(powers, ZERO)
        gate = y / (1 + (-arb(read.gate) * y).exp()) if read.gate else ZERO
        even, odd = fast._families(count)
        rows = (count + 1) // 2
        shift = (arb(read.kappa) * (arb(count - 1) / 2) ** 2).min(arb(fast.LARGEST[read.work]))
        worst = ZERO
        for _ in range(60):
            d = lambda: u * source.choice([-1, 1])  # noqa: E731
            mass = [(shift - arb(read.kappa) * fast._place(read, i) ** 2 + 3 * d()).exp() for i in range(rows)]
            pairs = [(arb(v[count // 2 + i]), arb(v[rows - 1 - i])) for i in range(rows)]
            q = [sum((m * row[j] for m, row in zip(mass, even, strict=True)), ZERO) * (1 + d()) for j in range(rows)]
            p = [sum((m * (a + b) / 2 * row[j] for m, (a, b), row in zip(mass, pairs, even, strict=True)), ZERO)
                 * (1 + d()) for j in range(rows)]  # fmt: skip
            r = [sum((m * (a - b) / 2 * row[j] for m, (a, b), row in zip(mass, pairs, odd, strict=True)), ZERO)
                 * (1 + d()) for j in range(rows)]  # fmt: skip
            power = (-abs(theta * (1 + d()))).exp() * (1 + 3 * d())
            low = (1 + power * power * (1 + d())) * (1 + d())
            s = power / low * (1 + d())
            t = (1 - power * power * (1 + d())) * (1 + d()) / low * (1 + d())
            if count % 2 == 0:
                t = (1 - power) * (1 + d()) / ((1 + power) * (1 + d())) * (1 + d())
            t = t if theta >= 0 else -t
            top, bottom = ZERO, ZERO
            for a, b, c in zip(reversed(p), reversed(r), reversed(q), strict=True):
                top = (top * s * (1 + d()) + (a + t * b * (1 + d())) * (1 + d())) * (1 + d())
                bottom = (bottom * s * (1 + d()) + c) * (1 + d())
            found, whole = top / bottom * (1 + d()), exact
            if read.gate:
                back = (-arb(read.gate) * y * (1 + d())).exp() * (1 + 3 * d())
                fall = y * (back / ((1 + back) * (1 + d())) * (1 + d())) * (1 + d())
                found, whole = (y + (found - fall) * (1 + d())) * (1 + d()), exact + gate
            worst = max(worst, abs(found - whole), key=_upper)
        return worst


def pairs(e: float, source: random.Random) -> Pairs:
    """K37: a larger and a smaller number on a machine whose every operation errs by e, far from where they are equal;
    and on one that does not round, with a skip that adds e times the other number."""
    for name, result in (("max", 3.0), ("min", -2.0)):
        saved = parse(GateHead.fit(name, -2, 3, dtype=torch.float64).written())
        own, z = Pair(saved), 5.0
        own.machine = STILL
        own.skip = (own.skip[0] or e, own.skip[1] or e)
        yield arb(e) * 3, arb(own.error(z - 2.0**-10, z))
        own = Pair(saved)
        own.machine = coarse(e)
        if e < 1e-3:
            with ctx.workprec(EXACT):
                found = arb(result) - arb(z) if name == "max" else arb(result) + arb(z)
                sign = 1 if name == "max" else -1
                found = (found + sign * arb(z) * (1 + arb(e))) * (1 + arb(e))
                yield abs(found - arb(result)), arb(own.error(z - 2.0**-10, z))


def drifts(e: float, source: random.Random) -> Pairs:
    """K38: a table whose keys are e from those that are read, with the worst signs that are found; nothing rounds."""
    head = AnchorHead.fit("sin", -3, 3, anchors=9, potential="square", fast=True, dtype=torch.float64)
    read, was = fast.Fast(parse(head.written())).read, fast.COARSE
    fast.COARSE = ZERO
    try:
        read = replace(read, apart=((ZERO, arb(e)),) * 9)
        for at in (-1.0, 0.25):
            found = fast.Near.of(read, arb(at), arb(2.0**-30), ZERO).error
            with ctx.workprec(EXACT):
                y, worst = arb(at) - arb(read.centre), ZERO
                logits = [arb(a) * y + arb(b) for a, b in read.heads[0].keys]
                exact = _mean(logits, read.values)
                for k in range(10):  # the largest values are lifted, or the smallest
                    order = sorted(range(9), key=lambda i: read.values[i])
                    moved = [x + (arb(e) if i in order[k:] else -arb(e)) for i, x in enumerate(logits)]
                    worst = max(worst, abs(_mean(moved, read.values) - exact), key=_upper)
            yield worst, found
    finally:
        fast.COARSE = was


def _mean(logits: list[arb], values: tuple[float, ...]) -> arb:
    powers = [x.exp() for x in logits]
    return sum((p * arb(v) for p, v in zip(powers, values, strict=True)), ZERO) / sum(powers, ZERO)


def _table(kappa: float, count: int, side: int, form: str) -> fast.Read:
    """A table of alternating values, whose weights that are left out are nothing at all."""
    keys = tuple((k, -kappa * k * k) for k in (i - (count - 1) / 2 for i in range(count)))
    values = tuple(1.0 - 2.0 * (i % 2) for i in range(count))
    head = Head(((1.0, 0.0), (0.0, 1.0)), keys, False, (0.0,) * 3, values, 1.0)
    heads, apart, work = (head,), ((ZERO, ZERO),) * count, "float64"
    return fast.Read("sin", (-1.0, 1.0), 1.0, kappa, 0.0, 0.0, heads, work, work, apart, form=form, side=side)


def windows(e: float, source: random.Random) -> Pairs:
    """K39: a table read through a window on a machine whose every operation errs by e, with the worst signs found."""
    if e > 1e-4:
        return  # the denominator is not known
    kappa, side, was = 40.0, 5, fast.COARSE  # e^(-40 * 30) is left out
    read = _table(kappa, 21, side, "window")
    fast.COARSE = arb(e)
    try:
        for at in (30.0, 1.0, 2 * kappa * 9.75):
            bound = fast._window(read, coarse(e), arb(at), arb(2.0**-40) * arb(e))[0]
            with ctx.workprec(EXACT):
                exact = _mean([arb(a) * arb(at) + arb(b) for a, b in read.heads[0].keys], read.values)
                middle = min(round(at / (2 * kappa)), 10 - side)
                worst = ZERO
                for _ in range(60):
                    d = lambda: arb(e) * source.choice([-1, 1])  # noqa: E731
                    r = (arb(at) / (2 * kappa) * (1 + d()) * (1 + d()) - middle) * (1 + d())
                    v = (-abs(r) * 2 * kappa * (1 + d()) * (1 + d())).exp() * (1 + 3 * d())
                    top = bottom = ZERO
                    for j in range(-side, side + 1):
                        c = (-arb(kappa) * j * j * (1 + d())).exp() * (1 + d())
                        value = arb(read.values[10 + middle + (j if r > 0 else -j)])
                        top = (top * v * (1 + d()) + c * value * (1 + d())) * (1 + d())
                        bottom = (bottom * v * (1 + d()) + c * (1 + d())) * (1 + d())
                    worst = max(worst, abs(top / bottom * (1 + d()) - exact), key=_upper)
            yield worst, bound
    finally:
        fast.COARSE = was


def two_anchors(e: float, source: random.Random) -> Pairs:
    """K39: a table of which two anchors are read on a machine whose every operation errs by e."""
    if e > 1e-4:
        return  # the place is not known
    kappa, was = 1000.0, fast.COARSE
    read = _table(kappa, 5, 0, "pair")
    fast.COARSE = ZERO
    try:
        for at in (1000.0, 1000.25, 999.5):
            bound = fast._pair(read, coarse(e), arb(at), arb(2.0**-40) * arb(e))[0]
            with ctx.workprec(EXACT):
                exact = _mean([arb(a) * arb(at) + arb(b) for a, b in read.heads[0].keys], read.values)
                worst = ZERO
                for _ in range(60):
                    d = lambda: arb(e) * source.choice([-1, 1])  # noqa: E731
                    r = ((arb(at) / (2 * kappa) * (1 + d()) * (1 + d())) * (1 + d()) - arb(0.5)) * (1 + d())
                    t = r * 2 * kappa * (1 + d()) * (1 + d())
                    share = 1 / ((1 + (-t).exp() * (1 + 3 * d())) * (1 + d())) * (1 + d())
                    a, b = (arb(read.values[i]) for i in (2, 3))
                    worst = max(worst, abs((a + (b - a) * share * (1 + d())) * (1 + d()) - exact), key=_upper)
            yield worst, bound
    finally:
        fast.COARSE = was


def halves(e: float, source: random.Random) -> Pairs:
    """K38: a result that is rounded once more, to numbers e apart relatively; 0 and y are such numbers."""
    own = fast.Fast(parse(FastActivation.fit("silu", -6, 6, dtype=torch.bfloat16).written()))
    was = fast.HALVES["bfloat16"]
    fast.HALVES["bfloat16"] = arb(e), ZERO
    try:
        for at in (-1.0, 1.0, 4.0):
            cell = Cell.of(at, at + 2.0**-20 * e, None)
            with ctx.workprec(EXACT):
                exact = arb(at) / (1 + (-arb(at)).exp())
                true = min(arb(e) * abs(exact), abs(exact - max(at, 0.0)), key=_upper)
            yield true, fast._reading(own.read, STILL, None, cell)
    finally:
        fast.HALVES["bfloat16"] = was


RULES = {
    "Taylor": Rule("K5", taylor, 0.95),
    "continuation": Rule("K6", continued, 0.9),
    "one slot": Rule("K9", decided, 0.45),
    "leaves": Rule("K12", leaves, 0.999),
    "sums": Rule("K22", sums, 0.999),
    "lost keys": Rule("K23", lost, 0.95),
    "relative bounds": Rule("K27", relative, 0.999),
    "mixtures": Rule("K27", mixtures, 0.999),
    "minima": Rule("K27", smallest, 0.99),
    "centred rows": Rule("K28", centred, 0.3),
    "scales of rows": Rule("K28", scales, 0.95, least=1e-30),
    "chains": Rule("K29", chains, 0.95),
    "ramps": Rule("K30", ramps, 0.999),
    "knots": Rule("K45", knots, 0.1),
    "channels": Rule("K48", channels, 0.999),
    "one exponential": Rule("K36", readings, 0.2, least=1e-30),
    "two readings": Rule("K47", two_readings, 0.1, least=1e-30),
    "two numbers": Rule("K37", pairs, 0.95),
    "keys apart": Rule("K38", drifts, 0.1),
    "half precision": Rule("K38", halves, 0.5),
    "windows": Rule("K39", windows, 0.1, least=1e-30),
    "two anchors": Rule("K39", two_anchors, 0.02, least=1e-30),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_a_rule_covers_errors_of_every_size_and_made_weaker_does_not(name: str) -> None:
    """K5, K6, K9, K12, K22, K23, K27 to K30, K36 to K39, K45, K47, K48, each by itself."""
    rule = RULES[name]
    for e in SIZES:
        with working():
            pairs = list(rule.pairs(e, random.Random(f"{name} {e}")))
        assert all(covered(*pair) for pair in pairs), e
        if e >= rule.least and pairs:
            assert not all(covered(true, bound * arb(rule.weak)) for true, bound in pairs), (e, "far above the truth")
        assert pairs or e > 1e-3 or e < 1e-100
