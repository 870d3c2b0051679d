"""Functions and modules captured as programs: the same values, few operations, errors that name everything at once."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attnforge as af
from attnforge.box import Box
from attnforge.errors import ArgumentError, DomainError, UnsupportedOperation
from attnforge.frontends.module.program import capture_module, simplify
from attnforge.programs.interpret import values
from attnforge.programs.ops import Apply, Attention, Linear, Mix, Normalise, Product, Softmax
from attnforge.programs.program import Builder
from captures import VECTOR, agree, words

torch.manual_seed(0)
MATRIX, ROW = torch.randn(4, 4).double(), torch.tensor([0.5, -0.25, 1.0, -2.0]).double()


# -- networks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh])
def test_an_mlp_is_three_affine_maps_and_two_functions(activation: type[nn.Module]) -> None:
    net = nn.Sequential(nn.Linear(10, 64), activation(), nn.Linear(64, 64), activation(), nn.Linear(64, 1))
    program = agree(net, Box.cube(-1, 1, shape=10))
    assert words(program) == ["linear", "apply", "linear", "apply", "linear"]
    first = program.ops[1]
    assert isinstance(first, Linear)
    assert np.array_equal(first.weights[0], net[0].weight.detach().double().numpy().T), "parameters are exact"
    assert program.output_shape == (1,) and program.labels[2] == "1." + activation.__name__.lower()


class Block(nn.Module):
    def __init__(self, norm: bool, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.first, self.second = (nn.LayerNorm(width) if norm else nn.Identity() for _ in range(2))
        self.ffn = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.ffn(self.second(x))


@pytest.mark.parametrize("norm", [True, False])
def test_a_transformer_block_keeps_its_attention(norm: bool) -> None:
    program = agree(Block(norm), Box.cube(-1, 1, shape=(5, 8)))
    assert program.tokens == 5 and program.output_rows == "all" and program.output_shape == (5, 8)
    assert program.count(Attention) == 2 and program.count(Apply) == 1
    assert program.count(Normalise) == (2 if norm else 0)
    assert program.count(Mix, Product, Softmax) == 0
    assert all(op.causal and op.mask is None for op in program.ops if isinstance(op, Attention))


def test_torchs_own_attention_layers() -> None:
    box = Box.cube(-1, 1, shape=(5, 8))
    layer = agree(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), box)
    assert (layer.count(Attention), layer.count(Normalise), layer.count(Product)) == (2, 2, 0)
    mha = nn.MultiheadAttention(8, 2, batch_first=True).double()
    assert agree(lambda x: mha(x, x, x)[0], box).count(Attention) == 2
    assert agree(lambda x: mha(x, x, x, need_weights=False)[0], box).count(Attention) == 2
    weights = agree(lambda x: mha(x, x, x)[1], box)
    assert weights.output_shape == (5, 5)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.token = nn.Linear(3, 4), nn.Parameter(torch.randn(1, 1, 4))
        self.block, self.head = nn.TransformerEncoderLayer(4, 1, 8, batch_first=True, norm_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], 1)
        return self.head(self.block(tokens)[:, 0])


def test_a_token_of_the_modules_own_makes_the_input_a_vector() -> None:
    program = agree(Classifier(), Box.cube(-1, 1, shape=(2, 3)))
    assert program.tokens == 1 and program.count(Softmax) == 1, "only the class token's row is needed"
    assert program.count(Normalise) == 3, "of the class token itself the norm is a constant"


def test_a_layer_that_wants_its_batch_second_is_run_point_by_point() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    program = agree(layer, Box.cube(-1, 1, shape=(5, 8)), one_point=True)
    assert program.count(Attention) == 2


def test_recurrent_cells() -> None:
    rnn, gru, lstm = nn.RNNCell(3, 4).double(), nn.GRUCell(3, 4).double(), nn.LSTM(3, 2, batch_first=True).double()

    def unrolled(cell: nn.Module) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            state = x.new_zeros(x.shape[0], 4)
            for t in range(x.shape[1]):
                state = cell(x[:, t], state)
            return state

        return run

    box = Box.cube(-1, 1, shape=(5, 3))
    program = agree(unrolled(rnn), box)
    assert words(program) == ["linear", "apply"] * 5
    assert agree(unrolled(gru), Box.cube(-1, 1, shape=(2, 3))).count(Product) == 3, "the first state is zero"
    assert agree(lambda x: lstm(x)[0][:, -1], Box.cube(-1, 1, shape=(2, 3))).count(Apply) == 9


def test_classifier_kernels_and_convolution() -> None:
    classifier = agree(nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1)), VECTOR)
    assert words(classifier) == ["linear", "softmax"]
    kernel = agree(lambda x: (x @ x.mT + 1) ** 3, Box.cube(-1, 1, shape=(3, 2)))
    assert kernel.count(Product, Apply) >= 2 and kernel.output_shape == (3, 3)
    pair = agree(lambda x, y: (x * y).sum(-1).add(1).square(), VECTOR, VECTOR)
    assert words(pair) == ["linear", "linear", "product", "linear", "apply"]
    conv = agree(nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.SiLU(), nn.Flatten(), nn.Linear(18, 1)),
                 Box.cube(-1, 1, shape=(2, 6)))  # fmt: skip
    assert words(conv) == ["linear", "apply", "linear"]


def lorenz(state: Tensor) -> Tensor:
    x, y, z = state.unbind(-1)
    return torch.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z], -1)


def pendulum(state: Tensor) -> Tensor:
    angle, speed = state[..., 0], state[..., 1]
    return torch.stack([speed, -9.81 * torch.sin(angle) - 0.1 * speed], -1)


def test_right_hand_sides_of_differential_equations() -> None:
    assert agree(lorenz, Box.cube(-20, 20, shape=3)).count(Product) == 2
    assert words(agree(pendulum, Box(angle=(-3, 3), speed=(-1, 1)))) == ["linear", "apply", "linear"]


# -- gradients inside -----------------------------------------------------------------------------------------------

A = torch.randn(4, 4, dtype=torch.float64)


def loss(x: Tensor) -> Tensor:
    return torch.tanh(x @ A).square().sum()


def by_autograd(x: Tensor) -> Tensor:
    y = x.detach().requires_grad_()
    return torch.autograd.grad(F.gelu(y @ A).square().sum(), y, create_graph=True)[0]


@pytest.mark.parametrize(
    "target",
    [
        lambda x: torch.func.grad(loss)(x),
        lambda x: torch.func.vmap(torch.func.grad(loss))(x),
        lambda x: torch.func.vmap(torch.func.hessian(loss))(x),
        lambda x: torch.func.jvp(lambda y: torch.sin(y @ A), (x,), (x,))[1],
        lambda x: x - 0.1 * torch.func.grad(lambda y: -F.log_softmax(y @ A, -1)[..., 0].sum())(x),
        by_autograd,
    ],
)
def test_gradients_taken_inside(target: Callable[[Tensor], Tensor]) -> None:
    agree(target, VECTOR)
    assert torch.ones(2).numpy().sum() == 2, "a failed export leaves no transform behind"


# -- inputs ------------------------------------------------------------------------------------------------------------


def test_several_inputs() -> None:
    def target(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x * y[:, :, 0], x.sum(-1, keepdim=True)], -1)

    program = agree(target, Box.cube(-1, 1, shape=2), Box.cube(0, 1, shape=(2, 3)))
    assert program.box.shape == (8,) and program.box.intervals()[2] == (0, 1) and program.output_shape == (3,)
    box = Box.cube(-1, 1, shape=(2, 2))
    crossed = agree(lambda x, y: F.scaled_dot_product_attention(x, y, y), box, box)
    assert crossed.tokens == 1 and crossed.box.shape == (8,) and crossed.count(Softmax) == 2


def test_a_function_of_one_point() -> None:
    program = agree(lambda x: x[0] * x[1] + x.sum(), VECTOR, one_point=True)
    assert program.output_shape == () and program.count(Product) == 1
    assert agree(lambda x: x.softmax(0), VECTOR, one_point=True).count(Softmax) == 1


# -- what is refused --------------------------------------------------------------------------------------------------


def unsupported(x: Tensor) -> Tensor:
    y = torch.sort(x)[1] * x
    z = torch.fft.rfft(x).abs()
    w = torch.where(x > 0, x, y)
    return w.argmax(-1) + z.sum(-1)


def test_everything_unsupported_is_listed_with_its_line() -> None:
    start = inspect.getsourcelines(unsupported)[1]
    with pytest.raises(UnsupportedOperation) as caught:
        capture_module(unsupported, VECTOR)
    text = str(caught.value)
    assert text.startswith("unsupported uses 4 operations")
    for word, offset in (("sort:", 1), ("fft_rfft:", 2), ("gt:", 3), ("argmax:", 4)):
        assert word in text and f"test_module.py:{start + offset} " in text
    assert "torch.where(x > 0, x, y)" in text and "supported_operations()" in text


@pytest.mark.parametrize(
    ("target", "word"),
    [
        (lambda x: F.dropout(x, 0.5, training=True), "random"),
        (lambda x: x + torch.rand(4), "rand: it draws random numbers"),
        (lambda x: x.max(-1)[1] + x, "indices"),
        (lambda x: torch.func.grad(lambda y: torch.relu(y @ MATRIX).sum())(x), "threshold_backward"),
        (lambda x: torch.linalg.inv(x.view(-1, 2, 2)), "linalg_inv"),
        (lambda x: x if x.sum() > 0 else -x, "control flow"),
        (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), "control flow"),
    ],
)
def test_single_refusals(target: Callable[[Tensor], Tensor], word: str) -> None:
    with pytest.raises(UnsupportedOperation, match=word):
        capture_module(target, VECTOR)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


def test_a_state_is_refused() -> None:
    with pytest.raises(UnsupportedOperation, match="state"):
        capture_module(Counter(), VECTOR)


@pytest.mark.parametrize(
    ("target", "word"),
    [
        (lambda x: (x, x), "one tensor"),
        (lambda x: x / x.shape[0], "how many points"),
        (lambda x: torch.from_numpy(x.detach().numpy() ** 2), "torch does not see"),
        (nn.Linear(3, 2), "cannot be run"),
        (3, "a module or a function"),
        (lambda x: torch.zeros(len(x), 0), "output"),
    ],
)
def test_bad_arguments(target: Any, word: str) -> None:
    with pytest.raises((ArgumentError, UnsupportedOperation), match=word):
        capture_module(target, VECTOR)


def test_bad_boxes() -> None:
    for boxes in ((), ((-1, 1),), "x"):
        with pytest.raises(ArgumentError, match="box"):
            capture_module(nn.ReLU(), boxes)  # type: ignore[arg-type]


# -- laws -----------------------------------------------------------------------------------------------------------


def test_lowering_changes_nothing_and_is_reproducible() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Tanh())
    before = copy.deepcopy(net.state_dict())
    first, second = (capture_module(net, VECTOR).to_json() for _ in range(2))
    assert first[0] == second[0] and all(np.array_equal(first[1][key], second[1][key]) for key in first[1])
    assert net.training and net[1].training
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())


def test_modules_used_by_a_function_are_evaluated_and_restored() -> None:
    layer = nn.Dropout(0.5)
    program = capture_module(lambda x: layer(x) + 1, VECTOR)
    assert words(program) == ["linear"] and layer.training


def test_a_builtin_function_has_no_line_of_its_own() -> None:
    assert capture_module(torch.tanh, VECTOR).labels[1:] == ("tanh",)
    assert "layer_norm" in capture_module(nn.LayerNorm(4), VECTOR).labels, "not a line of PyTorch, cut in a call"
    labels = capture_module(lambda x: torch.sin(x) + torch.cos(x) * torch.exp(x) - torch.sigmoid(x), VECTOR).labels
    assert any(label.endswith("…") for label in labels), "a line that is cut says so"


def test_a_wrong_program_does_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnforge.frontends.module.handlers import pointwise as ops_pointwise

    monkeypatch.setitem(ops_pointwise._UNARY, "sin", "cos")
    with pytest.raises(AssertionError, match="differs from it by"):
        capture_module(torch.sin, VECTOR)


def test_double_precision_is_used_throughout() -> None:
    third = 1 / 3
    program = capture_module(lambda x: F.softplus(x, beta=3) * third, VECTOR)
    x = torch.full((1, 4), 0.1, dtype=torch.float64)
    assert torch.allclose(values(program, x), torch.log1p(torch.exp(3 * x)) / 9, rtol=1e-15)


def test_simplify_keeps_values_and_drops_what_nobody_reads() -> None:
    build = Builder(VECTOR)
    wide = build.linear([(0, np.ones((4, 5)))], np.arange(5.0))
    bent = build.apply(wide, "sin")
    product = build.product(bent, build.constant(np.full(5, 2.0)))
    output = build.linear([(product, np.eye(5)[:, :2]), (wide, np.eye(5)[:, :2])], np.zeros(2))
    plain = build.program(output, "", (2,))
    small, where = simplify(build, output)
    folded = small.program(where, "", (2,))
    x = VECTOR.sample(5)
    assert torch.allclose(values(plain, x), values(folded, x), rtol=1e-14)
    assert words(folded) == ["linear", "apply", "linear"] and folded.ops[2].width == 2
    assert math.prod(folded.ops[1].bias.shape) == 2  # type: ignore[attr-defined]


NO_VALUE: dict[str, Callable[[Tensor], Tensor]] = {
    "0*log(x)": lambda x: 0 * torch.log(x),
    "x + 0*log(x)": lambda x: x + 0 * torch.log(x),
    "1/x - 1/x": lambda x: 1 / x - 1 / x,
    "x/x": lambda x: x / x,
    "0/x": lambda x: 0 / x,
    "|x|/|x|": lambda x: x.abs() / x.abs(),
    "0*rsqrt(x)": lambda x: 0 * torch.rsqrt(x),
    "log(x) @ (1, 0)": lambda x: torch.log(x) @ torch.tensor([1.0, 0.0], dtype=x.dtype),
}


@pytest.mark.parametrize("name", NO_VALUE)
@pytest.mark.parametrize("low", [-1.0, 0.0])
def test_what_has_no_value_is_refused_even_where_it_cancels(name: str, low: float) -> None:
    with pytest.raises(DomainError, match=r"at \((-1|0), (-1|0)\)"):
        capture_module(NO_VALUE[name], Box.cube(low, 1, shape=(2,)))
    capture_module(NO_VALUE[name], Box.cube(0.5, 1, shape=(2,)))


def test_what_cancels_must_be_shown_to_be_defined() -> None:
    box = Box.cube(-1, 1, shape=(2,))
    for function in (lambda x: x + 1 / (x - 0.3) - 1 / (x - 0.3), lambda x: x + 0 * torch.tan(2 * x)):
        with pytest.raises(DomainError, match="cancels in the result"):
            capture_module(function, box)
    capture_module(lambda x: x + 0 * torch.rsqrt(x * x + 0.1), box)
    # what is not read does not count: torch.where chooses, and a slice leaves out
    capture_module(lambda x: torch.where(torch.tensor([True, False]), x, torch.log(x + 1.5)), box)
    capture_module(lambda x: torch.log(x + torch.tensor([2.0, 0.0]))[..., :1], Box.cube(-1, 1, shape=(2,)))


@pytest.mark.parametrize(("threshold", "beta", "half", "eps"), [(20, 1, 30, 1e-8), (20, 2, 15, 1e-8), (5, 1, 8, 0.1)])
def test_the_threshold_of_softplus_is_honoured(threshold: float, beta: float, half: float, eps: float) -> None:
    """The module jumps there by log(1 + exp(-threshold)): the bound covers it, and no bound below half of it exists."""
    module, box = nn.Softplus(beta, threshold), Box.cube(-half, half, shape=(1,))
    net, jump = af.compile(module, box, eps, dtype=torch.float64), math.log1p(math.exp(-threshold)) / beta
    place = threshold / beta
    near = [torch.linspace(place - w, place + w, 2001, dtype=torch.float64) for w in (1e-12, 1e-8, 1e-3)]
    x = torch.cat([torch.linspace(-half, half, 20001, dtype=torch.float64), *near])[:, None]
    assert jump / 2 <= float((net(x) - module(x)).abs().max().detach()) <= net.bound
    with pytest.raises(af.PrecisionError):
        af.compile(module, box, jump / 3, dtype=torch.float64)


def test_a_cell_across_the_threshold_of_softplus_has_both_branches() -> None:
    """The head lies 0.7 of the jump above y, where the bound took it for 0.3 of the jump below softplus."""
    module, box = nn.Softplus(20, 20), Box.cube(0.9385828958444955, 1.2468905320526844, shape=1)
    net = af.compile(module, box, 1e-2, dtype=torch.float64)
    x = torch.tensor([[1.0000000000220506]], dtype=torch.float64)
    assert float((net(x) - module(x)).abs().detach()) <= net.bound


def test_a_softplus_below_its_threshold_is_smooth() -> None:
    names = [op.function.name for op in capture_module(nn.Softplus(), VECTOR).ops if isinstance(op, Apply)]
    assert names == ["softplus"]
    with pytest.raises(UnsupportedOperation, match="jumps at its threshold"):
        capture_module(nn.Softplus(threshold=0), VECTOR)


class Keeps(nn.Module):
    """A module that keeps something of a call in an attribute, as `keep` says, and gives tanh of what was kept."""

    def __init__(self, keep: str) -> None:
        super().__init__()
        self.keep, self.last, self.seen = keep, None, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if self.keep == "first" and self.last is not None:
            return torch.tanh(self.last)
        self.last = x * 2
        self.seen.append(self.last)
        return torch.tanh(self.seen[0] if self.keep == "list" else self.last)


@pytest.mark.parametrize("keep", ["last", "first", "list"])
def test_what_a_module_keeps_of_a_call_is_not_read_by_the_next(keep: str) -> None:
    module = Keeps(keep)
    points = VECTOR.sample(20)
    assert torch.allclose(values(capture_module(module, VECTOR), points), torch.tanh(2 * points), rtol=1e-12)
    assert module.last is None and not module.seen


class Learns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data.mul_(0.5)
        out: Tensor = self.linear(x)
        return out


def test_a_module_that_changes_its_own_weights_is_refused_and_left_alone() -> None:
    module = Learns()
    before = module.linear.weight.detach().clone()
    with pytest.raises(ArgumentError, match="changes its parameter 'linear"):
        capture_module(module, Box.cube(-1, 1, shape=3))
    assert torch.equal(module.linear.weight, before)


@pytest.mark.parametrize(
    ("target", "word"),
    [
        (lambda x: x + torch.rand(3, generator=torch.Generator().manual_seed(1)), "random numbers"),
        (lambda x: x[..., torch.randperm(3, generator=torch.Generator())], "random numbers"),
        (lambda x: F.batch_norm(x, None, None, training=True), "point by point"),
        (nn.CELU(0.0), "other than 0"),
    ],
)
def test_refusals_that_are_ours(target: Callable[[Tensor], Tensor], word: str) -> None:
    with pytest.raises((UnsupportedOperation, ArgumentError), match=word):
        capture_module(target, Box.cube(-1, 1, shape=3))


def written_through_a_view(x: Tensor) -> Tensor:
    y = torch.tanh(x)
    y.view(-1)[0] = 1.0  # of one point: a batch would be mixed
    return y


@pytest.mark.parametrize("target", [nn.CELU(-0.5), nn.CELU(-2.0), F.celu, written_through_a_view])
def test_bends_of_either_sign_and_writing_through_views(target: Callable[[Tensor], Tensor]) -> None:
    box = Box.cube(-1, 1, shape=3)
    points = box.sample(50)
    expected = torch.stack([target(point) for point in points])
    assert torch.allclose(values(capture_module(target, box), points), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("module", "words"), [(nn.Linear(3, 2, device="meta"), "to_empty"), (nn.LazyLinear(2), "run it once")]
)
def test_modules_whose_weights_have_no_values_are_named(module: nn.Module, words: str) -> None:
    with pytest.raises(ArgumentError, match=f"'weight' of .*Linear has no values yet: .*{words}"):
        capture_module(module, Box.cube(-1, 1, 3))


@pytest.mark.parametrize("ends", [(-1.0, 2.0), (-0.3, 0.7), (-2.0, 1e-39), (-1e-38, 1.0)])
@pytest.mark.parametrize("interval", [(1e-40, 1e-38), (-1e-38, 1e-38), (1e-300, 1e-250)])
def test_clamps_keep_small_numbers(ends: tuple[float, float], interval: tuple[float, float]) -> None:
    """A clamp far wider than its box is the identity there, bit for bit: its middle line starts at 0."""
    target = nn.Hardtanh(*ends)
    box = Box(x=interval)
    X = box.sample(64, seed=3)
    assert torch.equal(values(capture_module(target, box), X), target(X))
