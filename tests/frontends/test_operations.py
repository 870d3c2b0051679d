"""Single operations captured as programs: the same values, and no more operations than they need."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from attnforge.box import Box
from attnforge.errors import ArgumentError, UnsupportedOperation
from attnforge.frontends.module.capture import FunctionModule, traced
from attnforge.frontends.module.program import Convention, _attempt, capture_module, supported_operations
from attnforge.functions.registry import names
from attnforge.programs.interpret import values
from attnforge.programs.ops import Apply, Attention, Linear, MaxTokens, Mix, Product, Softmax
from captures import POSITIVE, SEQUENCE, VECTOR, agree, words

torch.manual_seed(0)
MATRIX, ROW = torch.randn(4, 4).double(), torch.tensor([0.5, -0.25, 1.0, -2.0]).double()


def rotated(x: Tensor) -> Tensor:
    """Two of the channels turned by an angle that grows with the position."""
    angle = torch.arange(4).double() * 0.3
    a, b, rest = x[..., 0], x[..., 1], x[..., 2]
    return torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos(), rest], -1)


@pytest.mark.parametrize(
    ("attention", "heads"),
    [
        (lambda x: torch.softmax(x @ x.mT / 3**0.5, -1) @ x, 1),
        (lambda x: torch.einsum("bij,bjd->bid", (x @ x.mT).softmax(-1), x), 1),
        (lambda x: ((x @ x.mT) * 0.5 + torch.arange(4.0) * 0.1).softmax(-1) @ x, 1),
        (lambda x: (x @ x.mT).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf).softmax(-1) @ x, 1),
        (lambda x: (x @ x.mT).masked_fill(torch.ones(4, 4).triu(1).bool(), -1e9).softmax(-1) @ x, 1),
        (lambda x: (x @ x.mT).softmax(-2).mT @ x.tanh(), 1),
        (lambda x: torch.stack([(x @ x.mT).softmax(-1), (2 * x @ x.mT).softmax(-1)], 1).sum(1) @ x, 2),
        (lambda x: ((x @ ROW[:3]).softmax(-1)[..., None] * x).sum(1), 1),
        (lambda x: torch.einsum("bn,bnd->bd", (x @ ROW[:3]).softmax(-1), x), 1),
        (lambda x: F.scaled_dot_product_attention(x[:, -1:], x, x), 1),
        (lambda x: F.scaled_dot_product_attention(rotated(x), rotated(x), x), 1),
        (lambda x: F.scaled_dot_product_attention(MATRIX[:2, :3].expand(len(x), 2, 3), x, x), 2),
    ],
)
def test_attention_is_found_however_it_is_written(attention: Callable[[Tensor], Tensor], heads: int) -> None:
    program = agree(attention, SEQUENCE)
    assert program.tokens == 4 and program.count(Attention) == heads


def test_attention_within_a_vector_is_built_from_parts() -> None:
    def inner(x: Tensor) -> Tensor:
        parts = x.view(-1, 2, 2)
        return F.scaled_dot_product_attention(parts, parts, parts, is_causal=True).flatten(1)

    program = agree(inner, VECTOR)
    assert program.tokens == 1 and program.count(Softmax) == 1, "the first row sees one token only: its weight is 1"


# -- operations -----------------------------------------------------------------------------------------------------


def written_into(x: Tensor) -> Tensor:
    y = torch.zeros(x.shape[0], 6)
    y[:, 1:5] = x
    y[:, 0] = x.sum(-1)
    return y.relu_()


IMAGE = Box.cube(-1, 1, shape=(1, 3, 4))
GRID = torch.linspace(-0.9, 1.1, 16).double().view(1, 2, 4, 2)

OPERATIONS: dict[str, tuple[Callable[..., Tensor], Box, list[str] | None]] = {
    "cumsum of channels": (lambda x: x.cumsum(-1), VECTOR, ["linear"]),
    "cumsum of tokens": (lambda x: x.cumsum(1).tanh(), SEQUENCE, ["mix", "apply"]),
    "var": (lambda x: x.var(-1), VECTOR, ["linear", "apply", "linear"]),
    "std over all": (lambda x: x.std((1, 2)), SEQUENCE, None),
    "amax": (lambda x: x.amax(-1), VECTOR, ["linear", "apply", "linear", "apply", "linear"]),
    "max and min over tokens": (lambda x: x.amax(1) - x.min(1).values, SEQUENCE, None),
    "mean over tokens": (lambda x: torch.exp(x.mean(1)), SEQUENCE, None),
    "where": (lambda x: torch.where(ROW > 0, x.sin(), x), VECTOR, ["linear", "apply", "linear"]),
    "mask of tokens": (lambda x: (x.exp() * torch.tensor([1.0, 1, 0, 1])[:, None]).sum(1), SEQUENCE, None),
    "token scales": (lambda x: (x * torch.tensor([1.0, 2, 3, 1])[:, None]).tanh(), SEQUENCE, ["mix", "apply"]),
    "positions": (lambda x: (x + MATRIX[:, :3]).tanh(), SEQUENCE, ["constant", "linear", "apply"]),
    "finite difference": (lambda x: (x[:, 1:] - x[:, :-1]).square(), SEQUENCE, None),
    "logarithm of one token": (lambda x: torch.log(x[:, 0] + 2) + 0 * x[:, 1], SEQUENCE, None),
    "logsumexp": (lambda x: x.logsumexp(-1), VECTOR, None),
    "norms": (lambda x: x.norm(dim=-1) + torch.linalg.vector_norm(x, 1, -1), POSITIVE, None),
    "products": (lambda x: x.prod(-1) + x.cumprod(-1)[:, 2], VECTOR, None),
    "quotient": (lambda x: x / x.flip(-1), POSITIVE, None),
    "x - x": (lambda x: x - x, VECTOR, ["constant"]),
    "square": (lambda x: x * x, VECTOR, ["apply"]),
    "outer": (lambda x: x[:, :, None] * x[:, None, :], VECTOR, None),
    "linear attention": (lambda x: x @ (x.mT @ x), SEQUENCE, None),
    "einsum": (lambda x: torch.einsum("bij,kj->bik", x, MATRIX[:, :3]), SEQUENCE, ["linear"]),
    "layer norm of rows": (lambda x: F.layer_norm(x, (3,)), SEQUENCE, ["normalise"]),
    "group norm": (lambda x: F.group_norm(x, 2), SEQUENCE, None),
    "clamp": (lambda x: x.clamp(-0.3, 0.4) + x.clamp(min=0.1), VECTOR, None),
    "powers": (lambda x: x**3 + x**-2 + 2**x + x**0.5, POSITIVE, None),
    "pad, roll, flip": (lambda x: F.pad(x.roll(1, -1).flip(-1), (1, 2), value=3.0), VECTOR, ["linear"]),
    "cat of constants": (lambda x: torch.cat([x, torch.ones(len(x), 1)], -1).exp(), VECTOR, None),
    "written into": (written_into, VECTOR, ["linear", "apply", "linear"]),
    "settled comparison": (lambda x: torch.where(x > -1.5, x.sin(), x), VECTOR, ["apply"]),
    "settled steps": (lambda x: torch.sign(x + 2) * torch.floor(x / 4 + 0.5).add(1) * x.exp(), VECTOR, ["apply"]),
    "atan2": (lambda x: torch.atan2(x[:, 0], x[:, 1] + 2), VECTOR, None),
    "huber": (lambda x: F.huber_loss(x, torch.zeros_like(x), reduction="none", delta=0.3), VECTOR, None),
    "distances": (lambda x: torch.exp(-torch.cdist(x, 2 + x.flip(1))), SEQUENCE, None),
    "adaptive pooling": (lambda x: F.adaptive_avg_pool1d(x, 2).square(), Box.cube(-1, 1, shape=(2, 5)), None),
    "adaptive maxima": (lambda x: F.adaptive_max_pool1d(x, 2) * 2, Box.cube(-1, 1, shape=(2, 5)), None),
    "maxima with places": (lambda x: F.max_pool1d(x, 2, return_indices=True)[0], Box.cube(-1, 1, shape=(2, 4)), None),
    "softshrink": (lambda x: F.softshrink(x, 0.3) + F.softshrink(x, 0.0), VECTOR, None),
    "nearest": (lambda x: F.interpolate(x, scale_factor=3).sin(), Box.cube(-1, 1, shape=(2, 4)), None),
    "nearest of a size": (lambda x: F.interpolate(x, 5, mode="nearest-exact"), Box.cube(-1, 1, shape=(2, 3)), None),
    "sort of channels and tokens": (lambda x: x.sort(-1).values - torch.sort(x, 1, True)[0], SEQUENCE, None),
    "sort of seven": (lambda x: x.sort().values, Box.cube(-1, 1, shape=7), ["linear", "apply"] * 6 + ["linear"]),
    "order of few": (lambda x: x.topk(3)[0][:, 2] + x.kthvalue(2)[0] - x.topk(1, largest=False)[0][:, 0], VECTOR, None),
    "medians": (lambda x: x.median(-1).values + x[:, :3].nanmedian(1, keepdim=True).values[:, 0], VECTOR, None),
    "quantiles": (lambda x: x.quantile(torch.tensor([0.125, 0.5]).double(), 1).T, VECTOR, None),
    "quantile of a kind": (lambda x: x.quantile(0.3, -1, keepdim=True, interpolation="nearest"), VECTOR, None),
    "running extremes": (lambda x: x.cummax(-1).values * x.cummin(1)[0], VECTOR, None),
    "running logarithm": (lambda x: x.logcumsumexp(-1), VECTOR, None),
    "linear": (lambda x: F.interpolate(x, scale_factor=3, mode="linear"), Box.cube(-1, 1, shape=(2, 4)), ["linear"]),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"), IMAGE, ["linear"]),
    "bilinear with corners": (
        lambda x: F.interpolate(x, (5, 2), mode="bilinear", align_corners=True) * 2, IMAGE, ["linear"]
    ),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), IMAGE, ["linear"]),
    "shrunk smoothly": (lambda x: F.interpolate(x, (2, 2), mode="bilinear", antialias=True), IMAGE, ["linear"]),
    "shrunk by cubics": (lambda x: F.interpolate(x, (2, 3), mode="bicubic", antialias=True), IMAGE, ["linear"]),
    "trilinear": (
        lambda x: F.interpolate(x, (3, 2, 3), mode="trilinear"), Box.cube(-1, 1, shape=(1, 2, 2, 2)), ["linear"]
    ),
    "on a grid": (lambda x: F.grid_sample(x, GRID.expand(len(x), 2, 4, 2), align_corners=False), IMAGE, ["linear"]),
    "folded": (lambda x: F.fold(x, (3, 3), 2, padding=1, stride=2), Box.cube(-1, 1, shape=(8, 4)), None),
    "added at places": (
        lambda x: torch.zeros(len(x), 3).double().scatter_add(1, torch.tensor([[2, 0, 2, 1]]).expand(len(x), 4), x),
        VECTOR, ["linear"],
    ),
    "added by index": (lambda x: x.index_add(1, torch.tensor([0, 0, 3, 1]), x.square(), alpha=2), VECTOR, None),
    "padded maxima": (lambda x: F.max_pool2d(x, 3, stride=2, padding=1), IMAGE, None),
    "maxima of what is left": (lambda x: F.max_pool2d(x[:, 0], 2, ceil_mode=True), IMAGE, None),
    "means with padding": (lambda x: F.avg_pool2d(x, 2, padding=1, ceil_mode=True), IMAGE, ["linear"]),
    "means without padding": (
        lambda x: F.avg_pool2d(x, 3, 2, padding=1, count_include_pad=False, ceil_mode=True), IMAGE, ["linear"]
    ),
    "cut transposed": (
        lambda x: F.conv_transpose1d(x, torch.ones(2, 1, 2).double(), padding=2), Box.cube(-1, 1, shape=(2, 6)), None
    ),
    "shrunk or not": (lambda x: F.hardshrink(x + 2, 0.5) + F.hardshrink(x / 4, 0.3), VECTOR, ["linear"]),
    "logits": (lambda x: torch.logit(x) + torch.logit(x - 0.5, eps=0.1), POSITIVE, None),
    "logarithms to 2": (lambda x: torch.logaddexp2(x, -x), VECTOR, None),
    "signs": (lambda x: torch.copysign(x, torch.tensor(-2.0)) + torch.copysign(x, x - 5), VECTOR, None),
    "entropies": (lambda x: torch.special.entr(x), POSITIVE, ["apply", "linear"]),
    "finite": (lambda x: torch.nan_to_num(x).exp(), VECTOR, ["apply"]),
    "one point": (lambda x: x[..., 0] * x[..., 1] + x.sum(-1), VECTOR, None),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name: str) -> None:
    target, box, expected = OPERATIONS[name]
    program = agree(target, box)
    assert expected is None or words(program) == expected


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (
            lambda x: F.max_pool1d(x, 2, return_indices=True)[1] * x[..., :2],
            "places that max-pooling gives .* comparing data",
        ),
        (lambda x: F.adaptive_max_pool1d(x, 2, return_indices=True)[1] * x[..., :2], "places that max-pooling gives"),
        (lambda x: F.interpolate(x, scale_factor=41), "differs between float32 and float64"),
        (lambda x: x.topk(2)[1] * x[..., :2], "topk: the places that topk gives .* two entries are equal"),
        (lambda x: x.topk(2, sorted=False)[0], "left to the machine"),
        (lambda x: torch.cat([x] * 9, -1).sort()[0], "36 entries in order; .* 32 at most"),
        (lambda x: x.quantile(1 / 3 + 1e-12, -1, interpolation="higher"), "decided by rounding"),
        (lambda x: F.hardshrink(x, 0.2), r"hardshrink: it jumps at -0.2 and 0.2, and no network"),
        (lambda x: torch.where(x > 0.5, x, x - 1), r"torch.where jumps at 0.5, from -0.5 to 0.5: no network"),
        (lambda x: torch.copysign(x, x[..., :1]), "the sign that it copies is not settled"),
        (lambda x: x.scatter_reduce(-1, torch.zeros(x.shape).long(), x, "amax"), "only its sums"),
    ],
)
def test_places_that_depend_on_data_or_on_rounding_are_refused(target: Callable[[Tensor], Tensor], why: str) -> None:
    with pytest.raises(UnsupportedOperation, match=why):
        capture_module(target, Box.cube(-1, 1, shape=(2, 4)))


def test_pairs_of_rows_and_rows_of_a_table_of_one_point() -> None:
    agree(lambda x: torch.exp(F.pdist(x)), SEQUENCE, one_point=True)
    agree(lambda x: F.embedding(torch.tensor([1, 0, 1]), x), SEQUENCE, one_point=True)


def test_what_torch_interpolates_in_float64_is_not_what_is_meant() -> None:
    program = capture_module(nn.Upsample(scale_factor=3, mode="linear"), Box.cube(-1, 1, shape=(1, 2)))
    op = program.ops[-1]
    assert isinstance(op, Linear) and op.off is not None
    thirds = [[3, 3, 2, 1, 0, 0], [0, 0, 1, 2, 3, 3]]
    for row, wanted, room in zip(op.weights[0].tolist(), thirds, op.off[0].tolist(), strict=True):
        gaps = [abs(Fraction(x) - Fraction(y, 3)) for x, y in zip(row, wanted, strict=True)]
        assert all(gap <= Fraction(most) for gap, most in zip(gaps, room, strict=True)) and max(gaps) > 0


def test_exported_modules() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Dropout(0.1)).eval()
    batch = {0: torch.export.Dim("batch")}
    exported = torch.export.export(net, (torch.zeros(3, 4),), dynamic_shapes=(batch,))
    for target in (exported, exported.module()):
        program = capture_module(target, VECTOR)
        assert torch.allclose(values(program, points := VECTOR.sample(5)), net.double()(points).detach(), rtol=1e-6)
        net.float()
    with pytest.raises(ArgumentError, match=r"one size of batch: .*dynamic_shapes"):
        capture_module(torch.export.export(net, (torch.zeros(3, 4),)), VECTOR)


def test_maxima_over_tokens_are_native() -> None:
    assert capture_module(lambda x: x.amax(1) - x.amin(1), SEQUENCE).count(MaxTokens) == 2


def test_every_registered_function_can_be_used() -> None:
    table = dict(supported_operations())
    spelled = {"identity": "clone", "cube": "pow", "squared_relu": "relu", "quick_gelu": "sigmoid",
               "gelu_tanh": "gelu", "softsign": "div", "logsigmoid": "log_sigmoid",
               "xlogx": "special_entr"}  # fmt: skip
    assert [name for name in names() if spelled.get(name, name) not in table] == []
    assert len(table) > 200 and all(note for note in table.values())


MOVES = ("transpose", "flip", "roll", "view", "slice", "cat", "expand")


@given(st.lists(st.sampled_from(MOVES), max_size=6), st.data())
@settings(max_examples=8, deadline=None)
def test_moving_data_costs_one_affine_map(moves: list[str], data: Any) -> None:
    steps = [(move, data.draw(st.integers(1, 2))) for move in moves]

    def target(x: Tensor) -> Tensor:
        for move, i in steps:
            match move:
                case "transpose":
                    x = x.transpose(1, -1)
                case "flip":
                    x = x.flip(i % x.dim() or 1)
                case "roll":
                    x = x.roll(i, 1)
                case "view":
                    x = x.reshape(x.shape[0], -1, 2) if x[0].numel() % 2 == 0 else x
                case "slice":
                    x = x[:, : max(1, x.shape[1] - 1)]
                case "cat":
                    x = torch.cat([x, x], 1)
                case "expand":
                    x = x.unsqueeze(1).expand(-1, 2, *x.shape[1:]).flatten(1, 2)
        return x

    program = agree(target, SEQUENCE)
    assert program.count(Mix, Product, Apply) == 0 and len(program.ops) <= 2


STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "affine": lambda x: x @ MATRIX[: x.shape[-1], :3] + ROW[:3],
    "tanh": torch.tanh,
    "logarithm": lambda x: torch.log(x.tanh() + 2),
    "token product": lambda x: (x * x.flip(1)).tanh(),
    "channel softmax": lambda x: x.softmax(-1),
    "token softmax": lambda x: x.softmax(1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x.flip(2), x, is_causal=True),
    "centre": lambda x: x - x.mean(1, keepdim=True),
    "prefix": lambda x: x.cumsum(1),
    "largest": lambda x: torch.cat([x, x.amax(1, keepdim=True).expand_as(x)], 2)[..., :3],
    "shorter": lambda x: x[:, 1:] - x[:, :-1] if x.shape[1] > 2 else x,
    "norm": lambda x: F.layer_norm(x, x.shape[2:]),
    "positions": lambda x: x + MATRIX[: x.shape[1], :1],
    "mask": lambda x: x * (MATRIX[: x.shape[1], :1] > 0),
    "some entries": lambda x: torch.where(MATRIX[: x.shape[1], : x.shape[2]] > 0, x, 0.5),
    "constant token": lambda x: torch.cat([ROW[: x.shape[2]].expand(len(x), 1, -1), x], 1)[:, :4],
    "swap": lambda x: x.mT,
    "kernel": lambda x: (x @ x.mT @ x).tanh(),
    "mixing": lambda x: MATRIX[: x.shape[1], : x.shape[1]] @ x,
    "pooling": lambda x: x + ((x @ ROW[: x.shape[2]]).softmax(-1)[..., None] * x).sum(1, keepdim=True),
    "last token": lambda x: x[:, -1:] + x,
}


@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=2, max_size=6))
@settings(max_examples=25, deadline=None)
def test_chains_mean_the_same_with_and_without_tokens(chain: list[str]) -> None:
    def target(x: Tensor) -> Tensor:
        for step in chain:
            x = STEPS[step](x)
        return x

    reading = Convention(FunctionModule(target), (SEQUENCE,), 2, set())
    captured = traced(reading.net, reading.examples(torch.float64))
    x = SEQUENCE.sample(5)
    truth = target(x)
    for tokens in (4, 1):
        program, problems = _attempt(captured, reading, tokens)
        assert program is not None or (tokens == 4 and problems), "one vector always works"
        if program is not None:
            found = values(program, x)
            assert found.shape == truth.shape
            assert float((found - truth).abs().max()) <= 1e-9 * max(1.0, float(truth.abs().max()))
