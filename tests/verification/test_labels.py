"""Graphs, balls and proofs: what is enclosed is there, in real numbers and in rounded ones, and no label is free."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import attnforge as af
from attnforge import ArgumentError, CertificateError
from attnforge.compiler.compiled import CompiledNetwork
from attnforge.programs.interpret import values
from attnforge.verification import Atom, Property
from attnforge.verification.graph import OPERATORS, model, of_model, read
from attnforge.verification.proof import enclosed, propagated, refuted, witnessed


class Mixed(nn.Module):
    """Heads of every scope: a gate, a largest token, attention; and constants beside the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) + x.amax(0) + torch.softmax(x @ x.T, -1) @ x + torch.tensor([[0.0, 1], [2, 3]])


@pytest.fixture(scope="module", params=["scalar", "tokens", "float64"])
def net(request: pytest.FixtureRequest) -> CompiledNetwork:
    if request.param == "tokens":
        return af.compile(Mixed(), af.Box.cube(-1, 1, shape=(2, 2)), eps=1e-2)
    formulas = ["max(x*y, 0) + exp(-y**2)", "tanh(2*x) - y"]
    return af.compile(formulas, af.Box(x=(-1, 1), y=(0.5, 2)), eps=1e-2,
                      dtype="float64" if request.param == "float64" else "float32")  # fmt: skip


def points_of(net: CompiledNetwork, count: int) -> np.ndarray:
    low, high = (end.numpy().reshape(-1) for end in (net.box.lower, net.box.upper))
    ends = np.stack([low, high, 0.5 * low + 0.5 * high, np.where(np.arange(len(low)) % 2, low, high)])
    found = np.concatenate([ends, np.random.default_rng(1).uniform(low, high, (count, len(low)))])
    return torch.from_numpy(found).to(net.dtype).double().numpy()


def test_the_graph_computes_the_network(net: CompiledNetwork) -> None:
    made = model(net)
    assert {node.op_type for node in made.graph.node} <= set(OPERATORS)
    assert [o.version for o in made.opset_import] == [13]
    session = onnxruntime.InferenceSession(made.SerializeToString())
    points = points_of(net, 50)
    given = torch.from_numpy(points).to(net.dtype)
    with torch.no_grad():
        wanted = net.core(given.reshape(-1, *net.boxes[0].shape)).reshape(len(points), -1).numpy()
    found = np.concatenate([session.run(None, {"X": x[None].numpy()})[0] for x in given])
    assert np.abs(found - wanted).max() <= net.bound


def test_balls_hold_what_is_computed_and_what_is_meant(net: CompiledNetwork) -> None:
    made = model(net)
    graph, session = of_model(made), onnxruntime.InferenceSession(made.SerializeToString())
    points = points_of(net, 12)
    target = values(net.program, torch.from_numpy(points).reshape(-1, *net.program.box.shape)).reshape(len(points), -1)
    for x, meant in zip(points, target.tolist(), strict=True):
        both, real = enclosed(graph, x, x), enclosed(graph, x, x, real=True)
        computed = session.run(None, {"X": x[None].astype(graph.dtype)})[0][0]
        for ball, exact, y, t in zip(both, real, computed, meant, strict=True):
            assert ball.contains(exact) and ball.contains(float(y))
            assert float(exact.rad()) < 1e-20, "without rounding almost nothing is lost"
            # the certificate holds for the network of real numbers, too; the interpreter itself rounds to float64
            assert abs(float(exact) - t) <= net.bound + 1e-13 * (1 + abs(t))


def test_balls_hold_sums_in_every_order(net: CompiledNetwork) -> None:
    graph, rng = of_model(model(net)), np.random.default_rng(2)
    kind = np.dtype(graph.dtype).type

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a, b = np.broadcast_arrays(a[..., :, :, None], b[..., None, :, :])
        order = rng.permutation(a.shape[-2])
        total = np.zeros((*a.shape[:-2], a.shape[-1]), dtype=kind)
        for k in order:
            total = (total + a[..., k, :] * b[..., k, :]).astype(kind)
        return total

    for x in points_of(net, 6):
        found = dict(graph.constants) | {"X": x[None].astype(kind)}
        for node in graph.nodes:
            given = [found[name] for name in node.inputs]
            if node.op == "MatMul":
                found[node.output] = product(*given)
            elif node.op == "Add":
                found[node.output] = given[0] + given[1]
            elif node.op == "Softmax":  # exponentials wrong by as much as is allowed
                u = np.finfo(kind).eps / 2
                e = np.exp(given[0] - given[0].max(-1, keepdims=True)) * (1 + rng.choice([-2, 2], given[0].shape) * u)
                e = e.astype(kind)
                found[node.output] = (e / e.sum(-1, keepdims=True, dtype=kind)).astype(kind)
            else:
                found[node.output] = (
                    given[0].transpose(node.numbers) if node.op == "Transpose" else given[0].reshape(node.numbers)
                )
        for ball, y in zip(enclosed(graph, x, x), found["Y"][0], strict=True):
            assert ball.contains(float(y))


def test_balls_over_a_box_hold_its_points(net: CompiledNetwork) -> None:
    graph = of_model(model(net))
    low, high = (end.numpy().reshape(-1) for end in (net.box.lower, net.box.upper))
    middle = 0.5 * low + 0.5 * high
    for a, b in ((low, high), (middle, middle + (high - middle) / 64)):
        whole = enclosed(graph, a, b)
        for x in (a, b, 0.25 * a + 0.75 * b):
            assert all(w.contains(y) for w, y in zip(whole, enclosed(graph, x, x, real=True), strict=True))


def graph_of(op: str, inputs: list[str], constants: dict[str, np.ndarray], width: int, out: int, **more: int) -> bytes:
    from onnx import helper, numpy_helper

    node = helper.make_node(op, inputs, ["Y"], **more)
    body = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("X", 1, (1, width))],
        [helper.make_tensor_value_info("Y", 1, (1, out))],
        [numpy_helper.from_array(table, name) for name, table in constants.items()],
    )  # fmt: skip
    return helper.make_model(body, opset_imports=[helper.make_opsetid("", 13)]).SerializeToString()


def test_softmax_at_the_ends_of_the_range() -> None:
    graph = read(graph_of("Softmax", ["X"], {}, 3, 3, axis=-1))
    for x in ([0.0, 0.0, 0.0], [1e30, -1e30, 0.0], [-1e-30, 1e-30, 0.0], [88.0, -88.0, 1.0], [1e4, 1e4, 0.0]):
        given = torch.tensor(x, dtype=torch.float32)
        for ball, y in zip(enclosed(graph, *[given.double().tolist()] * 2), torch.softmax(given, -1), strict=True):
            assert ball.contains(float(y)) and ball <= 1.001 and ball >= -1e-30
    wide = enclosed(graph, [-1.0, 0.0, 0.0], [1.0, 0.5, 0.0])
    for x in ([-1.0, 0.0, 0.0], [1.0, 0.5, 0.0], [1.0, 0.0, 0.0], [-1.0, 0.5, 0.0]):
        exact = torch.softmax(torch.tensor(x, dtype=torch.float64), -1)
        assert all(ball.contains(float(y)) for ball, y in zip(wide, exact, strict=True))
    assert float(wide[0].upper()) == pytest.approx(math.e / (math.e + 2), rel=1e-5), "the best case, and no more"


def test_numbers_that_overflow_are_refused() -> None:
    graph = read(graph_of("MatMul", ["X", "w"], {"w": np.full((2, 1), 1e30, np.float32)}, 2, 1))
    for x in ([1e10, 0.0], [1e10, -1e10]):  # the latter cancels, if it comes so far
        with pytest.raises(CertificateError, match="overflow"):
            enclosed(graph, x, x)


@pytest.mark.parametrize(
    "bad",
    [
        b"", b"no model", graph_of("Relu", ["X"], {}, 2, 2), graph_of("Softmax", ["X"], {}, 2, 2, axis=0),
        graph_of("Add", ["X", "b"], {"b": np.array([[np.nan, 0]], np.float32)}, 2, 2),
        graph_of("Add", ["X", "b"], {"b": np.zeros((1, 2))}, 2, 2),  # float64 in a graph of float32
        graph_of("Add", ["X", "unknown"], {}, 2, 2), graph_of("Reshape", ["X", "X"], {}, 2, 2),
    ],
)  # fmt: skip
def test_other_files_are_refused(bad: bytes) -> None:
    with pytest.raises(CertificateError):
        read(bad)


def test_shapes_that_do_not_fit_are_refused() -> None:
    graph = read(graph_of("MatMul", ["X", "w"], {"w": np.ones((3, 1), np.float32)}, 2, 1))
    with pytest.raises(CertificateError, match="shapes"):
        enclosed(graph, [0.0, 0.0], [0.0, 0.0])
    with pytest.raises(CertificateError, match="takes 2 numbers"):
        enclosed(graph, [0.0], [0.0])


def test_causal_heads_are_refused() -> None:
    causal = af.compile(
        lambda x: nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True),
        af.Box.cube(-1, 1, shape=(2, 1)), eps=1e-2,
    )  # fmt: skip
    with pytest.raises(ArgumentError, match="causal"):
        model(causal)


# -- proofs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def square() -> CompiledNetwork:
    return af.compile(["x**2", "x + y"], af.Box(x=(-1, 1), y=(-1, 1)), eps=1e-2)


def claim(
    *clauses: tuple[Atom, ...], low: tuple[float, ...] = (-1.0, -1.0), high: tuple[float, ...] = (1.0, 1.0)
) -> Property:
    return Property(low, high, 2, clauses)


def test_margins_are_what_they_should_be(square: CompiledNetwork) -> None:
    """On boxes whose largest value is known, the margin comes close to it and never beyond."""
    bound = square.bound
    for given, exact in (
        (claim((Atom(0, True, 1.5),)), 0.5 - bound),
        (claim((Atom(0, False, -0.25),)), 0.25 - bound),
        (claim((Atom(1, True, 2.5),), (Atom(0, False, -1.0),)), 0.5 - bound),  # the nearer one counts
        (claim((Atom(1, True, 1.9), Atom(1, False, 1.0))), None),  # never both: 0.45 apart from either
        (claim((Atom(0, True, other=1),), low=(0.5, 0.25), high=(0.5, 0.25)), 0.5 - 2 * bound),  # 0.25 against 0.75
        (claim((Atom(0, True, other=1),), low=(0.25, 0.0), high=(0.5, 0.5)), 0.1875 - 2 * bound),  # x - x^2 at 1/4
    ):
        wanted = 0.44 if exact is None else exact * (1 - 1e-2)
        found = refuted(square.program, bound, given, goal=wanted)
        assert wanted <= found.margin and (exact is None or found.margin <= exact)


def test_what_is_true_somewhere_is_never_refuted(square: CompiledNetwork) -> None:
    rng, graph = np.random.default_rng(3), of_model(model(square))
    for _ in range(20):
        low = rng.uniform(-1, 0.9, 2)
        high = low + rng.uniform(0, 1, 2) * (1 - low)
        x = np.clip(rng.uniform(low, high).astype(np.float32).astype(float), low, high)
        y = [float(ball.mid()) for ball in enclosed(graph, x, x, real=True)]
        atoms = tuple(Atom(i, bool(rng.random() < 0.5), y[i]) for i in range(2))
        touched = Property(tuple(low), tuple(high), 2, (atoms,))
        assert refuted(square.program, square.bound, touched, goal=1e-9, effort=64).margin <= 0
        assert not propagated(graph, touched)
        assert witnessed(graph, touched, x).margin <= 0, "rounding may go either way: no label is given away"


def test_a_point_and_an_effort_that_ends(square: CompiledNetwork) -> None:
    at = claim((Atom(0, True, 0.25),), low=(0.5, 0.0), high=(0.5, 0.0))
    assert refuted(square.program, square.bound, at, goal=1.0).margin == pytest.approx(-square.bound, rel=1e-6)
    hard = claim((Atom(0, True, 1.0 + 2 * square.bound),))
    assert refuted(square.program, square.bound, hard, goal=10.0, effort=64).cells <= 64


def test_readings_differ_where_numbers_do(square: CompiledNetwork) -> None:
    made = model(square)
    graph = of_model(made)
    other = onnx.ModelProto()
    other.CopyFrom(made)
    tensor = next(t for t in other.graph.initializer if t.data_type == 1)
    table = bytearray(tensor.raw_data)
    table[0] ^= 1  # the last bit of a weight
    tensor.raw_data = bytes(table)
    assert graph.same(of_model(made)) and not graph.same(of_model(other))
