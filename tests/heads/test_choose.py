"""Which head computes which function: every exact form is the function, and everybody who asks gets the same."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from flint import arb, arb_series
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import attnforge as af
from attnforge.conversion import storage
from attnforge.conversion.build import Options, activation_head
from attnforge.functions.directed import precision
from attnforge.functions.parts import piece_of
from attnforge.functions.piecewise import piecewise
from attnforge.functions.registry import (
    Univariate,
    enclose,
    from_callable,
    get,
    names,
    parse,
    piecewise_linear,
    reference,
)
from attnforge.heads import FastActivation
from attnforge.heads.build import computes, head_for
from attnforge.heads.chain.head import ChainHead
from attnforge.heads.choose import (
    FAST,
    LOGISTIC,
    Anchors,
    Choice,
    Gate,
    GateProduct,
    Pieces,
    Polyline,
    choose,
    expanded,
    fast_form,
    gate_of,
    line_of,
    straight,
)
from attnforge.heads.gate.head import GateHead
from attnforge.programs.enclose import cells, ranges
from attnforge.programs.interpret import values
from attnforge.programs.ops import Apply, Product
from attnforge.programs.program import Builder, Program
from laws import FUNCTIONS

PARAMETRIC = (
    "leaky_relu(0.2)", "leaky_relu(-1.0)", "elu(1.5)", "piecewise_linear([-1, 0, 1], [0, 1, 0])",
    "piecewise_linear([0.1, 0.37, 0.9], [0.2, 0.7, 0.1])", "piecewise_linear([-4, -0.5, 2, 3], [-0.5, -0.5, 2, 2])",
    "expr: abs(y) + relu(2*y - 1)", "expr: y*abs(y)", "expr: sin(y) + abs(y)", "expr: exp(-abs(y - 0.5))",
    "expr: y*relu(y) - 3*y", "expr: abs(y) - abs(y - 1) + abs(y + 2)", "expr: max(y, 0)*exp(-y)",
)  # fmt: skip
FAMILY = {
    "abs": "gate", "hardsigmoid": "gate", "hardtanh": "gate", "leaky_relu": "gate", "relu": "gate", "relu6": "gate",
    "sigmoid": "gate", "silu": "gate", "tanh": "gate", "hardswish": "chain", "squared_relu": "chain", "elu": "chain",
    "selu": "chain", "softsign": "chain",
}  # fmt: skip


def drawn(gate: Gate, y: arb) -> arb:
    """A gate at an exact point, from its own data and not from the function that asked for it."""
    if gate.line is None:
        rise = 1 / (1 + (-y).exp())
        return {"sigmoid": rise, "silu": y * rise, "tanh": 2 / (1 + (-2 * y).exp()) - 1}[gate.name]
    piece = sum(bool(y > knot) for knot in gate.line.knots)
    slope, intercept = (arb(c.numerator) / c.denominator for c in gate.line.lines[piece])
    return slope * y + intercept


def made(choice: Choice, function: Univariate, y: arb) -> arb:
    """What a choice says that a function is, in ball arithmetic."""
    if isinstance(choice, Gate):
        return drawn(choice, y)
    if isinstance(choice, GateProduct):
        return y * drawn(choice.gate, y)
    assert isinstance(choice, Pieces)
    total = arb(0) if choice.lines is None else drawn(choice.lines, y)
    for part in choice.parts:
        total += function.ball(drawn(part.clip, y))
    return total


def gates(choice: Choice) -> list[Gate]:
    """Every gate of a choice."""
    if isinstance(choice, Pieces):
        return [part.clip for part in choice.parts]
    return [choice] if isinstance(choice, Gate) else [choice.gate] if isinstance(choice, GateProduct) else []


def points(function: Univariate) -> list[float]:
    near = [k + d for k in function.knots for d in (-1e-3, -1e-9, 0.0, 1e-9, 1e-3)]
    return [*np.linspace(-9.7, 9.9, 57).tolist(), -1e4, 1e4, 300.25, *near]


@pytest.mark.parametrize("name", [*names(), *PARAMETRIC])
def test_an_exact_form_is_the_function(name: str) -> None:
    function = parse(name)
    choice = choose(function)
    if isinstance(choice, Anchors):
        return
    with precision(256):
        for y in points(function):
            truth = FUNCTIONS[name](arb(y)) if name in FUNCTIONS else function.ball(arb(y))
            found = made(choice, function, arb(y))
            assert found.overlaps(truth) and (found - truth).rad() < 1e-60 * (1 + abs(y)), y


@pytest.mark.parametrize("name", names())
def test_families_of_the_registered_functions(name: str) -> None:
    assert choose(parse(name)).family == FAMILY.get(name, "anchor")


@pytest.mark.parametrize("name", [*names(), *PARAMETRIC])
def test_a_gate_is_chosen_again_as_itself(name: str) -> None:
    """What a program applies for a gate is that gate, so that the compiler can ask again."""
    choice = choose(parse(name))
    for gate in gates(choice):
        again = choose(gate.function)
        assert isinstance(again, Gate) and (again.name, again.arguments) == (gate.name, gate.arguments)
        line = line_of(gate.name, gate.arguments)
        assert (line is None and gate.name in LOGISTIC) or (gate.line is not None and gate.line.draws(line))
        target = GateHead.fit(gate.name, -8, 8, **gate.arguments).certificate.target
        assert target.partition("(")[0] in (gate.name, "clip")


def test_the_smallest_gate_is_taken() -> None:
    smallest = {
        "relu": "relu", "abs": "abs", "relu6": "ramp", "hardtanh": "hard_tanh", "leaky_relu(0.5)": "leaky_relu",
        "hardsigmoid": "piecewise_linear", "leaky_relu(0.0)": "relu", "leaky_relu(-1.0)": "abs",
        "piecewise_linear([-0.5, 0, 2], [0, 0, 2])": "relu",
        "piecewise_linear([-3, -1, 1, 2], [-1, -1, 1, 1])": "hard_tanh",
    }  # fmt: skip
    for name, wanted in smallest.items():
        choice = choose(parse(name))
        assert isinstance(choice, Gate) and choice.name == wanted
    assert gate_of(Polyline((-9.0, 0.0, 6.0, 8.0), (0.0, 0.0, 6.0, 6.0))).arguments == {"a": 0.0, "b": 6.0}
    bent = piecewise_linear([-2, -1, 0, 1], [-2, -1, 0, 0])  # one of its knots is no kink
    found = choose(bent)
    assert isinstance(found, Gate) and found.line is not None and found.line.knots == (0.0,)
    assert isinstance(choose(piecewise_linear([0, 1], [0, 2])), Anchors), "a line is the skip of an anchor head"


def test_the_interval_counts() -> None:
    """A kink outside costs nothing; an end at a kink is outside."""
    hardswish, elu = parse("hardswish"), parse("elu")
    assert isinstance(choose(hardswish, -8, 8), GateProduct)
    assert isinstance(choose(hardswish, -3, 3), Anchors) and isinstance(choose(hardswish, 3.5, 8), Anchors)
    assert isinstance(choose(elu, -8, 8), Pieces)
    assert isinstance(choose(elu, -8, 0), Anchors) and isinstance(choose(elu, 0, 8), Anchors)
    # 0.1 is no float32: a head for [0.1, 1] is certified from the number below it on
    bent = piecewise("bent", lambda y: (y - 0.1).clamp(min=0), (0.1,), (lambda x: (x - 0.1) ** 3, lambda x: x - 0.1))
    assert isinstance(choose(bent, 0.25, 1), Anchors) and isinstance(choose(bent, 0.1, 1), Pieces)
    both = choose(parse("expr: abs(y)**3 - relu(y - 1)*y**2"), -0.5, 4)
    assert isinstance(both, Pieces) and [(part.lo, part.hi) for part in both.parts] == [(-0.5, 0), (0, 1), (1, 4)]


def test_what_is_not_proved_is_a_table() -> None:
    """Vertical kinks, callables, values that no float64 holds, and what only looks straight."""
    assert isinstance(choose(parse("expr: sqrt(abs(y))")), Anchors)
    assert isinstance(choose(from_callable(torch.relu)), Anchors)
    liar = replace(get("exp"), name="tanh", source=torch.exp)  # a callable may have any name
    assert isinstance(choose(liar), Anchors) and fast_form(liar) is None
    assert isinstance(choose(parse("expr: exp(abs(y - 0.5))/7")), Anchors), "1/7 is the value at the kink"
    assert straight(parse("expr: relu(y) + 1e-30*y**2")) is None
    assert isinstance(choose(parse("expr: y*abs(y) + 1e-30*y**3")), Pieces)


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=6, unique=True), st.data())
@settings(max_examples=60, deadline=None)
def test_any_polyline_is_found_exactly(xs: list[float], data: st.DataObject) -> None:
    xs = sorted(xs)
    ys = [data.draw(st.floats(-20, 20)) for _ in xs]
    line = straight(piecewise_linear(xs, ys))
    assert line is not None and line.draws(Polyline(tuple(xs), tuple(ys)))
    knots = line.plain().knots
    assert isinstance(choose(piecewise_linear(xs, ys)), Gate if knots else Anchors)
    at = Fraction(data.draw(st.floats(-100, 100)))
    piece = sum(at > Fraction(k) for k in line.knots)
    slope, intercept = line.lines[piece]
    exact = slope * at + intercept
    with precision(400):
        found = piecewise_linear(xs, ys).ball(arb(float(at)))
        assert found.overlaps(arb(exact.numerator) / exact.denominator)


def test_everybody_gets_the_same_family() -> None:
    """Conversion and command line ask the same place (and so does the compiler)."""
    slow = Options(1e-4, torch.float32, fast=False)
    for name in ("hardsigmoid", "hardswish", "relu6", "hardtanh", "selu", "tanh", "gelu", "leaky_relu(0.3)"):
        function = parse(name)
        wanted = choose(function, -5, 5).family
        assert activation_head(function, -5.0, 5.0, 1e-3, slow).family == wanted
        assert head_for(name, -5, 5, 1e-3).family == wanted


@pytest.mark.parametrize("name", FAST)
def test_fast_forms_are_asked_for(name: str) -> None:
    assert fast_form(get(name)) is not None
    assert isinstance(head_for(name, -9, 9, fast=True), FastActivation)
    assert not isinstance(head_for("exp", -1, 1, fast=True), FastActivation)


def test_a_head_knows_what_it_computes() -> None:
    for name in ("relu6", "hardsigmoid", "leaky_relu(0.2)", "tanh", "elu", "hardswish", "exp"):
        assert computes(head_for(name, -8, 8), get(name))
    for one, other in [("relu6", "relu"), ("leaky_relu(0.2)", "leaky_relu(0.3)"), ("elu", "selu"), ("tanh", "sigmoid")]:
        assert not computes(head_for(one, -8, 8, 1e-2), get(other))


CHAINS = [("hardswish", -8.0, 8.0), ("squared_relu", -2.0, 3.0), ("selu", -6.0, 9.0), ("elu(0.5)", -9.0, 4.0),
          ("softsign", -5.0, 5.0), ("expr: exp(-abs(y - 0.5))", -2.0, 3.0), ("expr: y*abs(y)", -3.0, 3.0)]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "lo", "hi"), CHAINS)
def test_chains_stay_within_their_bound_at_60_digits(name: str, lo: float, hi: float, dtype: torch.dtype) -> None:
    head = ChainHead.fit(name, lo, hi, 1e-4 if dtype == torch.float32 else 1e-7, dtype)
    function = head.function
    knots = [k + d for k in function.knots for d in (-1e-3, -1e-7, 0.0, 1e-7, 1e-3)]
    y = torch.tensor([*np.linspace(lo, hi, 301), *knots], dtype=dtype).clamp(lo, hi)
    with torch.no_grad():
        out = head(y)
    worst = max(abs(reference(function, float(a)) - float(b)) for a, b in zip(y, out, strict=True))
    assert head.bound is not None and worst <= head.bound
    census = af.purity(head)
    assert census.by_operation["softmax"] == len(head.heads)


@pytest.mark.parametrize("name", ["hardswish", "selu"])
def test_chains_are_saved_cast_and_sabotaged(name: str, tmp_path: Path) -> None:
    head = ChainHead.fit(name, -8, 8, 1e-4)
    path = tmp_path / "chain.safetensors"
    head.save(path)
    back, y = af.load(path), torch.linspace(-8, 8, 101)
    assert torch.equal(back(y), head(y)) and af.check(path).bound == head.bound
    wide = copy.deepcopy(head).double()
    wanted = [reference(head.function, float(v)) for v in y]
    bound = af.certify(wide).bound
    assert bound is not None
    assert all(abs(a - float(b)) <= bound for a, b in zip(wanted, wide(y.double()).detach(), strict=True))
    with pytest.raises(af.CertificateError, match="float32 or float64"):
        af.certify(copy.deepcopy(head).bfloat16())
    for key, parameter in head.named_parameters():
        broken = copy.deepcopy(head)
        with torch.no_grad():
            dict(broken.named_parameters())[key].view(-1)[0].add_(0.01)
        try:
            bound = af.certify(broken).bound
        except af.AttnforgeError:
            continue
        assert bound is not None and parameter.numel()
        with torch.no_grad():
            out = broken.core(y)
        assert all(abs(a - float(b)) <= bound for a, b in zip(wanted, out, strict=True)), key


def test_a_chain_of_other_heads_has_no_certificate() -> None:
    """Sabotage: heads that are certified for something else, or for less than they are given."""
    head, other = ChainHead.fit("hardswish", -8, 8), ChainHead.fit("squared_relu", -8, 8)
    mixed = copy.deepcopy(head)
    mixed.heads["gate"] = other.heads["gate"]
    with pytest.raises(af.CertificateError, match="gate is the gate relu, not piecewise_linear"):
        af.certify(mixed)
    narrow = copy.deepcopy(head)
    narrow.heads["product"] = af.ProductHead.fit((-8, 8), (0, 0.5))
    with pytest.raises(af.CertificateError, match=r"product is certified on \[0, 0.5\] and reads numbers"):
        af.certify(narrow)
    short = copy.deepcopy(head)
    short.heads["product"] = af.ProductHead.fit((-4, 4), (-0.5, 1.5))
    with pytest.raises(af.CertificateError, match="product is certified on"):
        af.certify(short)
    elu, selu = (ChainHead.fit(name, -8, 8, 1e-2) for name in ("elu", "selu"))
    elu.heads["table0"] = selu.heads["table0"]
    with pytest.raises(af.CertificateError, match="table0 is no table of elu"):
        af.certify(elu)
    with pytest.raises(af.ArgumentError, match="is no chain"):
        ChainHead.fit("gelu", -8, 8)


def test_what_cannot_be_reached_says_what_can() -> None:
    for name in ("hardswish", "selu"):
        with pytest.raises(af.PrecisionError, match="the smallest bound found is") as refused:
            ChainHead.fit(name, -8, 8, 1e-9)
        reachable = refused.value.reachable
        assert reachable is not None and math.isfinite(reachable)
        assert ChainHead.fit(name, -8, 8, 1.01 * reachable).bound <= 1.01 * reachable  # type: ignore[operator]


def test_converted_chains_are_saved_and_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    activations = (nn.Hardswish(), nn.SELU(), nn.ReLU6(), nn.Hardsigmoid())
    layers = [layer for activation in activations for layer in (nn.Linear(8, 8), activation)]
    model = nn.Sequential(nn.Linear(3, 8), *layers).eval()
    x = torch.randn(40, 3)
    result, report = af.convert(model, x)
    assert [site.family for site in report.sites] == ["chain", "chain", "gate", "gate"]
    assert all(site.relative <= 1e-4 for site in report.sites)
    folder = storage.save(result, report, tmp_path / "converted")
    again = storage.load(folder, model)
    with torch.no_grad():
        assert torch.equal(again(x), result(x)) and float((result(x) - model(x)).abs().max()) < 1e-3
    checked = storage.check(folder, model)
    assert [site.bound for site in checked.sites] == [site.bound for site in report.sites]


@pytest.mark.parametrize(("name", "index"), [("elu(1.5)", 0), ("selu", 0), ("softsign", 1), ("hardswish", 1)])
def test_a_piece_is_the_function_on_its_own_part_and_smooth_beyond(name: str, index: int) -> None:
    function = parse(name)
    piece = piece_of(function, index)
    assert parse(piece.name) == piece and isinstance(choose(piece, -8, 8), Anchors)
    low, high = (-9.0, *function.knots, 9.0)[index : index + 2]
    with precision(200):
        for y in np.linspace(low, high, 41):
            assert piece.ball(arb(float(y))).overlaps(function.ball(arb(float(y))))
    with precision(200, 4):
        for i, knot in enumerate(piece.knots):
            left, right = (branch(arb_series([knot, 1], prec=4)) for branch in piece.branches[i : i + 2])
            assert all(left[j].overlaps(right[j]) and (left[j] - right[j]).rad() < 1e-40 for j in range(4))
    y = torch.linspace(-9, 9, 501, dtype=torch.float64)
    least, most = enclose(piece, -9.0, 9.0)
    found = piece(y)
    assert least <= float(piece.ball(arb(-7.5))) <= most and least <= float(piece.ball(arb(8.25))) <= most
    assert all(abs(float(piece.ball(arb(float(a)))) - float(b)) < 1e-9 for a, b in zip(y, found, strict=True))
    with pytest.raises(af.ArgumentError, match="has no piece"):
        piece_of(function, 9)
    with pytest.raises(af.ArgumentError, match="piece 0 of elu"):
        parse("piece x of elu")


WRITTEN = ["hardswish", "squared_relu", "selu", "elu(0.5)", "softsign", "expr: exp(-abs(y - 0.5))"]


@pytest.mark.parametrize("name", WRITTEN)
def test_a_program_is_written_out_exactly(name: str) -> None:
    function, box = parse(name), af.Box(x=(-3, 4), z=(-1, 1))
    build = Builder(box)
    inner = build.combination([(build.column(0), 1.0), (build.column(1), 0.5)], 0.25, "x + z/2 + 1/4")
    program = build.program(build.apply(build.apply(inner, name, "f"), "sin", "sin(f)"), f"sin({name})")
    found = ranges(program, *cells(program, 1))
    other = expanded(program, found)
    assert (other.source, other.labels[other.output]) == (program.source, "sin(f)")
    assert len(other.ops) > len(program.ops)
    assert all(choose(op.function, -9, 9).family != "chain" for op in other.ops if isinstance(op, Apply))
    assert Program.from_json(*other.to_json()) == other, "functions are read back by name"
    assert expanded(other, ranges(other, *cells(other, 1))) is other, "nothing is left to write out"
    points = box.sample(200, dtype=torch.float64)
    mine, theirs = (values(each, points) for each in (program, other))
    assert float((mine - theirs).abs().max()) < 1e-13
    smooth = build.program(build.apply(inner, "gelu"), "gelu")
    assert function.knots and expanded(smooth, ranges(smooth, *cells(smooth, 1))) is smooth


def test_a_margin_makes_kinks_at_the_end_count() -> None:
    build = Builder(af.Box(x=(0, 3)))
    program = build.program(build.apply(build.column(0), "hardswish"), "hardswish(x)")
    found = ranges(program, *cells(program, 1))
    assert expanded(program, found) is program and expanded(program, found, 2.0**-9).count(Product) == 1


@pytest.mark.parametrize("name", ["elu", "selu", "softsign", "expr: exp(-abs(y))"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_boxes_that_end_at_a_kink_or_just_beside_it(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    function = parse(name)
    for low, high in ((0.0, 1.0), (-1.0, 0.0), (2.0**-10, 1.0)):
        build = Builder(af.Box(x=(low, high)))
        program = build.program(build.apply(build.column(0), name), name)
        other = expanded(program, ranges(program, *cells(program, 1)), 2.0**-9)
        assert len(other.ops) == len(program.ops), "one piece, continued"
        assert expanded(other, ranges(other, *cells(other, 1)), 2.0**-9) is other
        text = name.removeprefix("expr: ").replace("y", "x") if "expr" in name else f"{name}(x)"
        net = af.compile(text, af.Box(x=(low, high)), eps=1e-3, dtype=dtype)
        x = torch.cat([torch.linspace(low, high, 2001, dtype=dtype), torch.tensor([low, high], dtype=dtype)])
        exact = [float(reference(function, float(a), 60)) for a in x[::20]]
        found = net(x[::20].reshape(-1, 1)).detach().double().reshape(-1)
        assert float((found - torch.tensor(exact, dtype=torch.float64)).abs().max()) <= (net.bound or 0) <= 1e-3
        assert net.certificate.verified
        net.save(tmp_path / "net.safetensors", force=True)
        proved = af.check(tmp_path / "net.safetensors")
        assert proved.bound == net.bound and (proved.kernel or math.inf) <= 1.01 * net.bound
