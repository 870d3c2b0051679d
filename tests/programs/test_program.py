"""Programs: valid by construction, printable, written and read without loss, with a value for every operation."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnforge.box import Box
from attnforge.errors import ArgumentError
from attnforge.functions.registry import from_callable
from attnforge.programs.interpret import VALUES, every_value, values
from attnforge.programs.ops import OPS, Apply, Attention, Constant, Input, Linear, Mix, Normalise, Product
from attnforge.programs.program import _READERS, Builder, Program


def everything(tokens: int = 3, width: int = 2) -> Program:
    """A program with every operation."""
    rng = np.random.default_rng(0)
    build = Builder(Box.cube(-1, 1, shape=(tokens, width)), tokens)
    x = build.input
    a = build.linear([(x, rng.normal(size=(width, 4)))], rng.normal(size=4), "affine")
    b = build.mix(build.apply(a, "tanh", "tanh"), rng.normal(size=(tokens, tokens)), "mixed")
    c = build.product(a, b, "product")
    d = build.attention(a, b, c, scale=0.5, causal=True, label="attention")
    mask = np.where(rng.random((tokens, tokens)) < 0.4, -np.inf, 0.5)
    np.fill_diagonal(mask, 0.0)
    e = build.attention(a, b, d, mask=mask)
    f = build.normalise(e, eps=1e-3)
    g = build.max_tokens(build.softmax(f))
    h = build.combination([(g, 2.0), (build.constant([1.0, 2.0, 3.0, 4.0]), -1.0)], 0.25, "last")
    return build.program(h, "everything", (tokens, 4))


def test_every_operation_is_in_every_table_and_in_the_example() -> None:
    assert set(VALUES) == set(OPS) == set(_READERS)
    assert {type(op) for op in everything().ops} == set(OPS)
    assert len({kind.word for kind in OPS}) == len(OPS)


def test_values_are_those_of_torch() -> None:
    program = everything()
    x = program.box.sample(5, seed=1)
    ops = {op.word: op for op in program.ops}
    found = every_value(program, x)
    index = {id(op): i for i, op in enumerate(program.ops)}
    for op in program.ops:
        if isinstance(op, Attention):
            q, k, v = (found[i] for i in op.inputs)
            mask = torch.from_numpy(op.logit_mask(3))
            wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=op.scale)
            assert torch.allclose(found[index[id(op)]], wanted, rtol=0, atol=1e-13)
        if isinstance(op, Normalise):
            wanted = torch.nn.functional.layer_norm(found[op.input], (op.width,), eps=op.eps)
            assert torch.allclose(found[index[id(op)]], wanted, rtol=0, atol=1e-13)
    rms = Normalise(0, 2, eps=1e-6, centred=False)
    value = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    assert torch.allclose(VALUES[Normalise](rms, value, value), value / (12.5 + 1e-6) ** 0.5)
    assert values(program, x).shape == (5, 3, 4)
    assert values(program, x.reshape(1, 5, 3, 2)).shape == (1, 5, 3, 4)
    assert torch.equal(values(program, x[0]), values(program, x)[0])
    assert values(program, x.float()).dtype == torch.float32
    assert "mix" in ops


def test_the_output_may_be_the_first_row() -> None:
    build = Builder(Box.cube(-1, 1, shape=(3, 2)), 3)
    program = build.program(build.apply(build.input, "sin"), "s", (2,), output_rows="first")
    x = program.box.sample(4)
    assert torch.equal(values(program, x), x[:, 0].sin())


def test_round_trip_through_json_text() -> None:
    program = everything()
    header, arrays = program.to_json()
    again = Program.from_json(json.loads(json.dumps(header)), {k: v.copy() for k, v in arrays.items()})
    assert again == program and hash(again) == hash(program) and str(again) == str(program)
    assert not any(isinstance(v, np.ndarray) for op in header["ops"] for v in op.values())


def test_a_changed_array_makes_another_program() -> None:
    program = everything()
    header, arrays = program.to_json()
    name = "op1.bias"
    assert Program.from_json(header, {**arrays, name: arrays[name] + 1e-9}) != program


@given(st.data())
def test_damaged_descriptions_are_refused(data: st.DataObject) -> None:
    header, arrays = everything().to_json()
    text = json.dumps(header)
    broken = json.loads(text)
    where = data.draw(st.sampled_from(["ops", "op", "field", "arrays", "box", "tokens", "output", "format", "sites"]))
    i = data.draw(st.integers(0, len(header["ops"]) - 1))
    if where == "ops":
        broken["ops"].insert(0, broken["ops"][i])
    elif where == "op":
        broken["ops"][i]["op"] = data.draw(st.sampled_from(["exec", "", None, 3]))
    elif where == "field":
        field = data.draw(st.sampled_from(sorted(set(broken["ops"][i]) - {"op"})))
        values_ = ["nonsense", {}, [[]], {"array": "no"}] + ([] if field in ("scale", "eps") else [-7])
        broken["ops"][i][field] = data.draw(st.sampled_from(values_))
    elif where == "arrays":
        arrays = {k: v for n, (k, v) in enumerate(sorted(arrays.items())) if n != i % len(arrays)}
    else:
        broken[where] = data.draw(st.sampled_from(["nonsense", 99, None, -1]))
    if broken != header or len(arrays) != len(everything().to_json()[1]):
        try:
            again = Program.from_json(broken, arrays)
        except ArgumentError:
            return
        assert again == everything(), "only a field that says nothing new (a width that follows) may be damaged"


def test_equal_operations_are_shared_and_dead_ones_dropped() -> None:
    build = Builder(Box(x=(0, 1), y=(0, 1)))
    x, y = build.column(0), build.column(1)
    assert build.product(x, y) == build.product(x, y) != build.product(y, x)
    build.apply(x, "exp")
    program = build.program(build.apply(build.product(x, y), "sin"), "sin(x*y)")
    assert [op.word for op in program.ops] == ["input", "linear", "linear", "product", "apply"]
    assert program.depth() == 2 and program.count(Apply, Product) == 2


def test_text_shows_the_labels() -> None:
    text = str(everything())
    assert "%1 = linear %0 [2x4]" in text and "# affine" in text
    assert "apply tanh %1" in text and "causal" in text and "output %" in text


BAD = {
    "reads value": lambda p: replace(p, ops=(p.ops[0], Apply(5, "sin", 2), *p.ops[2:])),
    "does not fit": lambda p: replace(p, ops=(*p.ops[:2], Apply(1, "sin", 3), *p.ops[3:])),
    "first operation": lambda p: replace(p, ops=p.ops[1:], labels=p.labels[1:]),
    "one input": lambda p: replace(p, ops=(*p.ops, Input(2)), labels=(*p.labels, "")),
    "labels": lambda p: replace(p, labels=()),
    "the output is value": lambda p: replace(p, output=99),
    "do not fit its shape": lambda p: replace(p, output_shape=(5,)),
    "output_rows": lambda p: replace(p, output_rows="last"),
    "but the box has": lambda p: replace(p, tokens=2),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_programs_are_refused(message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        BAD[message](everything())


def test_bad_operations_are_refused() -> None:
    with pytest.raises(ArgumentError, match="finite"):
        Constant([[np.nan]])
    with pytest.raises(ArgumentError, match="one for each"):
        Linear((), (), [0.0])
    with pytest.raises(ArgumentError, match="shape"):
        Linear((0,), (np.zeros((2, 3)),), [0.0])
    with pytest.raises(ArgumentError, match="width"):
        Product(0, 0, 0)
    with pytest.raises(ArgumentError, match="dimensions"):
        Mix(0, [1.0], 1)
    with pytest.raises(ArgumentError, match="eps"):
        Normalise(0, 1, eps=-1.0)
    build = Builder(Box.cube(0, 1, shape=(2, 1)), 2)
    blind = build.attention(0, 0, 0, causal=True, mask=[[-np.inf, 0.0], [0.0, 0.0]])
    with pytest.raises(ArgumentError, match="hides every token"):
        build.program(blind, "", (2, 1))
    with pytest.raises(ArgumentError, match="laid out"):
        Builder(Box.cube(0, 1, shape=(3,)), 2)


def test_arrays_are_copies_and_read_only() -> None:
    weight = np.ones((1, 1))
    op = Linear((0,), (weight,), [0.0])
    weight[0, 0] = 5
    assert op.weights[0][0, 0] == 1
    with pytest.raises(ValueError, match="read-only"):
        op.weights[0][0, 0] = 2


def test_bad_points_are_refused() -> None:
    program = everything()
    with pytest.raises(ArgumentError, match="expected points of shape"):
        values(program, torch.zeros(2, 3))
    with pytest.raises(ArgumentError, match="floating"):
        values(program, torch.zeros(3, 2, dtype=torch.int64))


def test_callables_cannot_be_written() -> None:
    build = Builder(Box(x=(0, 1)))
    mine = from_callable(lambda y: y * y, second_derivative=2.0, name="mine")
    program = build.program(build.apply(build.column(0), mine), "mine(x)")
    with pytest.raises(ArgumentError, match="Python callable"):
        program.to_json()
