"""The purity check: what it lets through, what it refuses, and that each of its rules is needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from attnforge.census import Census, Offence, allow_custom, offences, purity, structural
from attnforge.census import findings as tables
from attnforge.census.graph import capture
from attnforge.census.walk import Walk
from attnforge.errors import ArgumentError, PurityError
from attnforge.network import AttentionLayer, AttentionOnly, Heads

N, C = 5, 8
Function = Callable[..., Tensor]


class Apply(nn.Module):
    """A function of the input as a network; `example_input` is a batch of N tokens with C channels."""

    def __init__(self, function: Function):
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)

    def example_input(self) -> Tensor:
        return torch.zeros(2, N, C)


def weight(rows: int = C, columns: int = C) -> Tensor:
    return torch.linspace(-1, 1, rows * columns).reshape(rows, columns)


def line_of(function: Function) -> str:
    return f"{Path(__file__).name}:{function.__code__.co_firstlineno}"


@cache
def examine(group: str) -> tuple[Census, tuple[Offence, ...]]:
    """One export for all functions of a table, since an export takes a moment; the results are told apart by line."""
    walk = Walk(capture(Together([(f, which) for f, which in GROUPS[group]()]), (X, IDS["ids"], IDS["mask"])))
    return walk.census, tuple(walk.offences)


def offences_at(function: Function, group: str) -> list[str]:
    return [o.operation for o in examine(group)[1] if f"{line_of(function)}  " in o.source]


class Together(nn.Module):
    """Many functions as one network, each given the input it asks for by its number."""

    def __init__(self, functions: list[tuple[Function, int]]):
        super().__init__()
        self.functions = functions

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return [function(inputs[which]) for function, which in self.functions]


# -- networks that are attention-only ---------------------------------------------------------------------------------


class MultiHead(nn.Module):
    """Explicit multi-head attention with a causal mask from torch.tril and a linear skip."""

    def __init__(self, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.qkv, self.out, self.skip = nn.Linear(C, 3 * C), nn.Linear(C, C), nn.Linear(C, C)
        self.register_buffer("causal", torch.tril(torch.ones(N, N, dtype=torch.bool)))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~self.causal, -math.inf)
        weights = self.drop(torch.softmax(scores, -1, dtype=torch.float64).to(v.dtype))
        return self.skip(x) + self.out((weights @ v).transpose(1, 2).flatten(2))

    def example_input(self) -> Tensor:
        return torch.zeros(2, N, C)


class Memory(nn.Module):
    """Multi-query attention over one shared table of constant slots, with no token keys."""

    def __init__(self, slots: int = 7):
        super().__init__()
        self.query = nn.Linear(C, 2 * C)
        self.keys, self.values = nn.Parameter(torch.randn(slots, 2)), nn.Parameter(torch.randn(slots, 1))

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, (C, 2))
        return ((q @ self.keys.T).softmax(-1) @ self.values).squeeze(-1)


class SelfSlot(nn.Module):
    """One self slot and m memory slots, every token its own little attention: (.., 1, dk) @ (.., dk, 1 + m)."""

    def __init__(self, slots: int = 3):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(C, 4), nn.Linear(C, 4), nn.Linear(C, C)
        self.keys, self.values = nn.Parameter(torch.randn(slots, 4)), nn.Parameter(torch.randn(slots, C))

    def forward(self, x: Tensor) -> Tensor:
        keys = torch.cat([self.k(x).unsqueeze(-2), self.keys.expand(*x.shape[:-1], -1, -1)], -2)
        values = torch.cat([self.v(x).unsqueeze(-2), self.values.expand(*x.shape[:-1], -1, -1)], -2)
        scores = self.q(x).unsqueeze(-2) @ keys.transpose(-1, -2)
        return (scores.softmax(-1) @ values).squeeze(-2)


class SplitSelfSlot(SelfSlot):
    """The same attention with the logits concatenated and the weights sliced, so that memory is never copied."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unsqueeze(-2)
        own = q @ self.k(x).unsqueeze(-1)
        w = torch.cat([own, q @ self.keys.T], -1).softmax(-1)
        return (w[..., :1] @ self.v(x).unsqueeze(-2) + w[..., 1:] @ self.values).squeeze(-2)


class Fused(MultiHead):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=self.causal).transpose(1, 2).flatten(2))


class Einsum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        weights = torch.einsum("...ic,...jc->...ij", x, x).softmax(-1)
        return torch.einsum("bij,bjc->bic", weights, x) + torch.einsum("...ij,...jc->...ic", weights, x)


class Chunked(nn.Module):
    """Attention over chunks of queries, written into a preallocated result."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for start in range(0, N, 2):
            rows = slice(start, start + 2)
            out[:, rows] = (x[:, rows] @ x.transpose(-1, -2)).softmax(-1) @ x
        return out.add_(x)


class Tokens(nn.Module):
    """Token ids and an attention mask in, rotary positions, mean pooling over the mask out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, C)
        self.register_buffer("frequency", torch.tensor([1.0, 0.1, 0.01, 0.001]))

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = (self.frequency[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
        angles = torch.cat([angles, angles], -1)
        turned = torch.cat([-x[..., C // 2 :], x[..., : C // 2]], -1)
        return x * angles.cos() + turned * angles.sin()

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        x = self.embed(ids)
        q = self.rotate(x, positions)
        bias = (1.0 - mask[:, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        hidden = (q @ q.transpose(-1, -2) + bias).softmax(-1) @ x
        keep = mask.unsqueeze(-1).to(x.dtype)
        return (hidden * keep).sum(1) / keep.sum(1).clamp(min=1e-9)


def no_grad_region(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x @ weight()
    return F.linear(y, weight())


IDS = {"ids": torch.zeros(2, N, dtype=torch.int64), "mask": torch.ones(2, N, dtype=torch.int64)}
X = torch.zeros(2, N, C)
PURE: dict[str, tuple[nn.Module, Any]] = {
    "multi-head": (MultiHead(), X),
    "memory": (Memory(), X),
    "self slot": (SelfSlot(), X),
    "split self slot": (SplitSelfSlot(), X),
    "fused": (Fused(), X),
    "einsum": (Einsum(), X),
    "chunked": (Chunked(), X),
    "tokens": (Tokens(), IDS),
    "torch": (nn.MultiheadAttention(C, 2, batch_first=True), (X, X, X)),
    "batch norm": (nn.Sequential(nn.BatchNorm1d(N), nn.Softmax(-1)), X),
    "convolution": (nn.Sequential(nn.Conv1d(N, N, 3), nn.Softmax(-1)), X),
}


@pytest.mark.parametrize("name", PURE)
def test_attention_only_networks_pass(name: str) -> None:
    net, example = PURE[name]
    census = purity(net, example)
    assert census.attention >= 1
    assert census.total == sum(census.by_category.values()) == sum(census.by_operation.values())


def test_census_counts_what_the_network_does() -> None:
    census = purity(MultiHead())
    assert census.by_operation["softmax"] == 1 and census.by_operation["linear"] == 3
    assert census.attention == 3  # scores, softmax, weights times values
    tokens = purity(Tokens(), IDS)
    assert tokens.lookup == 1 and tokens.positions == 3 and tokens.mask > 0
    assert purity(Apply(no_grad_region)).affine == 2
    assert purity(Fused()).attention == 1


def test_the_network_is_left_as_it_was() -> None:
    net = MultiHead().train()
    net.drop.eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    purity(net)
    assert net.training and net.qkv.training and not net.drop.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    with pytest.raises(PurityError):
        purity(nn.Sequential(net, nn.ReLU()), X)
    assert net.training and not net.drop.training


# -- networks that are not --------------------------------------------------------------------------------------------

IMPURE: list[tuple[str, Function]] = [
    ("relu", lambda x: x.relu()),
    ("relu", lambda x: x.clone().relu_()),
    ("gelu", lambda x: F.gelu(x)),
    ("sigmoid", lambda x: x * x.sigmoid()),
    ("mul", lambda x: x * x),
    ("mul", lambda x: x.softmax(-1) * x),
    ("mul", lambda x: x * x.mean(-1, keepdim=True)),
    ("pow", lambda x: x**2),
    ("square", lambda x: x.square()),
    ("exp", lambda x: x.exp() / 10),
    ("abs", lambda x: x.abs()),
    ("layer_norm", lambda x: F.layer_norm(x, (C,))),
    ("rms_norm", lambda x: F.rms_norm(x, (C,))),
    ("group_norm", lambda x: F.group_norm(x, 5)),
    ("div", lambda x: x / x.sum(-1, keepdim=True)),
    ("linalg_vector_norm", lambda x: x / x.norm(dim=-1, keepdim=True)),
    ("rsqrt", lambda x: x.mean(-1).rsqrt()),
    ("gt", lambda x: torch.where(x > 0, x, 0 * x)),
    ("argmax", lambda x: x.gather(-1, x.argmax(-1, keepdim=True))),
    ("gather", lambda x: x.gather(-1, x.argmax(-1, keepdim=True))),
    ("_to_copy", lambda x: weight()[x[0, :, 0].long() % C]),
    ("_to_copy", lambda x: x.to(torch.int32).to(x.dtype)),
    ("max", lambda x: x.max(-1).values),
    ("maximum", lambda x: torch.maximum(x, -x)),
    ("clamp", lambda x: x.clamp(0, 1)),
    ("max_pool1d", lambda x: F.max_pool1d(x, 2)),
    ("sort", lambda x: x.sort(-1).values),
    ("round", lambda x: x.round()),
    ("log_softmax", lambda x: x.log_softmax(-1)),
    ("logsumexp", lambda x: x.logsumexp(-1)),
    ("var", lambda x: x.var(-1)),
    ("matmul", lambda x: x @ x.transpose(-1, -2)),
    ("matmul", lambda x: (x @ x.transpose(-1, -2)).sum(-1)),
    ("matmul", lambda x: (x @ x.transpose(-1, -2)) @ x),
    ("matmul", lambda x: (x @ x.transpose(-1, -2)).softmax(-1).transpose(-1, -2) @ x),
    ("matmul", lambda x: (x.softmax(-1) + x) @ weight() @ x.transpose(-1, -2)),
    ("matmul", lambda x: x.unsqueeze(-1) @ x.unsqueeze(-2)),
    ("bmm", lambda x: torch.cat([(s := torch.bmm(x, x.mT)).softmax(-1), s], -1)),
    ("baddbmm", lambda x: torch.baddbmm(x @ weight(C, N), x, x.mT)),
    ("bmm", lambda x: torch.baddbmm(torch.bmm(x, x.mT), x.softmax(-1), x.mT)),
    ("einsum", lambda x: torch.einsum("bij,bij->bij", x.softmax(-1) + x, x)),
    ("einsum", lambda x: torch.einsum("bij,bkj,blj->bikl", x, x, x)),
    ("einsum", lambda x: torch.einsum("bij,bkj->b", x.softmax(-1), x)),
    ("linear", lambda x: F.linear(x, x[0])),
    ("conv1d", lambda x: F.conv1d(x, x[:1])),
    ("mul", lambda x: F.scaled_dot_product_attention(x, x, x) * x.softmax(-1)),
    ("scaled_dot_product_attention", lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)),
    ("bernoulli", lambda x: x * torch.bernoulli(torch.full((C,), 0.5))),
    ("rand_like", lambda x: x + torch.rand_like(x)),
    ("div", lambda x: torch.div(x, 2, rounding_mode="floor")),
    ("view", lambda x: x.view(torch.int32).to(torch.float32)),
    ("sin", lambda x: x.sin()),
    ("_to_copy", lambda x: x.mean(-1).bool().float()),
    ("instance_norm", lambda x: F.instance_norm(x)),
    ("cumprod", lambda x: x.cumprod(-1)),
    ("topk", lambda x: x.topk(2).values),
    ("fft_rfft", lambda x: torch.fft.rfft(x).real),
]


@pytest.mark.parametrize(("operation", "function"), IMPURE, ids=[f"{i}-{row[0]}" for i, row in enumerate(IMPURE)])
def test_every_other_operation_is_named_with_its_line(operation: str, function: Function) -> None:
    assert operation in offences_at(function, "impure")


def test_the_error_says_what_why_and_where() -> None:
    operation, function = IMPURE[0]
    with pytest.raises(PurityError) as caught:
        purity(Apply(function))
    assert str(caught.value).splitlines()[:3] == [
        "Apply is not attention-only: 1 operation beyond affine maps and softmax attention",
        f"  {operation}: an activation function; only softmax may be nonlinear",
        f'      tests/{line_of(function)}  ("relu", lambda x: x.relu()),',
    ]


def test_all_offences_are_listed_at_once_and_counted() -> None:
    layer = nn.TransformerEncoderLayer(C, 2, batch_first=True)
    with pytest.raises(PurityError) as caught:
        purity(layer, X)
    message = str(caught.value)
    assert "layer_norm in norm1" in message and "layer_norm in norm2" in message and "relu" in message
    assert "torch/nn/modules/normalization.py:" in message and "F.layer_norm" in message

    def twice(x: Tensor) -> Tensor:
        for _ in range(3):
            x = x.tanh()
        return x.exp()

    with pytest.raises(PurityError, match=r"4 operations[^$]*3 x tanh[^$]*exp"):
        purity(Apply(twice))


def test_the_line_is_found_in_helpers_and_under_no_grad() -> None:
    def impure(x: Tensor) -> Tensor:
        with torch.no_grad():
            return x.tanh()  # the line

    expected = impure.__code__.co_firstlineno + 2
    (offence,) = offences(Apply(impure))
    assert offence.source == f"tests/test_census.py:{expected}  return x.tanh()  # the line"
    (offence,) = offences(nn.Sequential(nn.Linear(C, C), nn.LSTM(C, C)), X)
    assert offence.operation == "lstm" and offence.module == "1"
    assert offence.source.startswith("torch/nn/modules/rnn.py:")


# -- minimal pairs: each rule with what it lets through and what it is there to stop ----------------------------------


def attend(x: Tensor) -> Tensor:
    return (x @ x.mT).softmax(-1)


MASK = torch.ones(N, N).tril().bool()
PAIRS: dict[str, tuple[Function, Function, int]] = {
    "scores end in a softmax": (lambda x: attend(x) @ x, lambda x: (x @ x.mT) @ x, 0),
    "scores may be scaled": (lambda x: (x @ x.mT / 3).softmax(-1), lambda x: (x @ x.mT / x.sum()).softmax(-1), 0),
    "scores may be added": (lambda x: (x @ x.mT + x @ weight(C, N)).softmax(-1), lambda x: (x @ x.mT).exp(), 0),
    "scores may be masked": (
        lambda x: torch.where(MASK, x @ x.mT, -1e9).softmax(-1),
        lambda x: torch.where(x @ x.mT > 0, x @ x.mT, -1e9).softmax(-1),
        0,
    ),
    "scores are not mixed": (lambda x: (x @ x.mT).mT.softmax(-1), lambda x: (x @ x.mT @ weight(N, N)).softmax(-1), 0),
    "softmax takes affine logits": (lambda x: (x @ weight()).softmax(-1), lambda x: x.tanh().softmax(-1), 0),
    "the sum runs within a row": (lambda x: attend(x) @ x, lambda x: attend(x).mT @ x, 0),
    "the row follows reshapes": (
        lambda x: attend(x).reshape(2, N * N).view(2, N, N)[:, :, :2] @ x[:, :2],
        lambda x: attend(x).reshape(2, N * N)[:, None] @ x.repeat(1, N, 1),
        0,
    ),
    "the row follows splits": (
        lambda x: sum(w @ v for w, v in zip(attend(x).split(2, -1), x.split(2, -2), strict=True)),
        lambda x: sum(w.mT @ v for w, v in zip(attend(x).split(2, -2), x.split(2, -2), strict=True)),
        0,
    ),
    "the row follows padding": (
        lambda x: F.pad(attend(x), (0, 1)) @ F.pad(x, (0, 0, 0, 1)),
        lambda x: F.pad(attend(x), (0, 1), value=1.0) @ F.pad(x, (0, 0, 0, 1)),
        0,
    ),
    "the row follows an einsum": (
        lambda x: torch.einsum("bij,bjc->bic", attend(x), x),
        lambda x: torch.einsum("bij,bjc->bc", attend(x), x),
        0,
    ),
    "values on the left": (lambda x: x.mT @ attend(x).mT, lambda x: x.mT @ attend(x), 0),
    "weights are only moved": (lambda x: attend(x)[..., :1] @ x[:, :1], lambda x: (attend(x) * 2 - 1) @ x, 0),
    "one factor is constant": (lambda x: x * weight(1, C), lambda x: x * x.flip(-1), 0),
    "the divisor is constant": (lambda x: x / weight(1, C), lambda x: weight(1, C) / x, 0),
    "weights are constant": (lambda x: F.linear(x, weight()), lambda x: F.linear(x, x[0, 1:]), 0),
    "masks are constant": (lambda x: x.mT.masked_fill(~MASK[0], 0.0), lambda x: x.masked_fill(x.bool(), 0.0), 0),
    "indices are constant": (lambda x: x[:, torch.tensor([2, 0])], lambda x: x[:, x[0, 0, :2].long()], 0),
    "data stays floating-point": (lambda x: x.half().double(), lambda x: x.char().double(), 0),
    "bits are not data": (lambda x: x.view(2, -1), lambda x: x.view(torch.int32).view(torch.float32), 0),
    "shapes are constants": (lambda x: x * torch.full_like(x, 2).exp(), lambda x: x * torch.fill(x, 2).exp() * x, 0),
    "dtypes are constants": (lambda x: x * torch.arange(C).type_as(x), lambda x: x * x.type_as(x), 0),
    "dropout sleeps in evaluation": (lambda x: F.dropout(x, 0.5, False), lambda x: F.dropout(x, 0.5, True), 0),
    "batch norm is frozen": (
        lambda x: F.batch_norm(x, torch.zeros(N), torch.ones(N)),
        lambda x: F.batch_norm(x, None, None, training=True),
        0,
    ),
    "writing is followed": (lambda x: torch.zeros_like(x).copy_(x), lambda x: torch.ones_like(x).copy_(x).mul_(x), 0),
    "integers make masks": (lambda m: (1.0 - m.float()) * -1e9, lambda m: (1.0 - m.float()).relu(), 2),
    "integers are looked up": (
        lambda i: F.embedding(i, weight()),
        lambda i: F.embedding(i, weight()).sin(),
        1,
    ),
    "integers give positions": (
        lambda i: (i[..., None] * weight(1, C)).cos(),
        lambda i: (i[..., None] * weight(1, C)).tanh(),
        1,
    ),
    "integers compare": (lambda i: (i[:, None] <= i).float(), lambda i: (i[:, None] <= i).float().exp(), 1),
    "one-hot rows are data": (
        lambda i: F.one_hot(i, C).float() @ weight(),
        lambda i: (F.one_hot(i, C).float() @ weight()) ** 2,
        1,
    ),
}


@pytest.mark.parametrize("rule", PAIRS)
def test_rules_come_in_pairs(rule: str) -> None:
    allowed, refused, _ = PAIRS[rule]
    assert offences_at(allowed, "allowed") == []
    assert offences_at(refused, "refused") != []


def test_what_the_rules_allow_makes_a_pure_network() -> None:
    census, found = examine("allowed")
    assert found == () and census.attention > 20


class TrainedOnIntegers(nn.Module):
    """Trained weights acting on an integer input make data of it, whether it is looked up or multiplied."""

    def __init__(self, square: bool, table: bool):
        super().__init__()
        self.weight, self.square, self.table = nn.Parameter(torch.randn(C, C)), square, table

    def forward(self, ids: Tensor) -> Tensor:
        y = self.weight[ids] if self.table else ids[..., None] * self.weight[0]
        return y * y if self.square else y + 1


@pytest.mark.parametrize("table", [False, True])
def test_trained_weights_make_integers_data(table: bool) -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    assert purity(TrainedOnIntegers(False, table), ids).lookup == table
    with pytest.raises(PurityError, match="mul: an elementwise product"):
        purity(TrainedOnIntegers(True, table), ids)


class Counter(nn.Module):
    def __init__(self, write: bool):
        super().__init__()
        self.write = write
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.write:
            self.calls += 1
        return x + self.calls


def test_a_network_has_no_state() -> None:
    assert purity(Counter(False), X).affine == 1
    net = Counter(True)
    with pytest.raises(PurityError, match="stored in 'calls'"):
        purity(net, X)
    assert net.calls == 0
    with pytest.raises(PurityError, match="mul: its result is stored in"):
        purity(Apply(lambda x: x.mul_(2) + 1))


# -- each table is needed: without its entries a network that passes is refused ---------------------------------------

NEEDED: list[tuple[str, str, Any]] = [
    ("SOFTMAX", "softmax", PURE["multi-head"]),
    ("FUSED_ATTENTION", "scaled_dot_product_attention", PURE["fused"]),
    ("AFFINE", "linear", PURE["multi-head"]),
    ("MOVEMENT", "transpose", PURE["multi-head"]),
    ("IDENTITY", "clone", PURE["multi-head"]),
    ("SCORE_PATH", "matmul", PURE["multi-head"]),
    ("MASKS", "cumsum", PURE["tokens"]),
    ("POSITIONS", "cos", PURE["tokens"]),
    ("LOOKUP", "embedding", PURE["tokens"]),
    ("CREATION", "zeros_like", (Apply(lambda x: x * torch.zeros_like(x)), X)),
]


@pytest.mark.parametrize(("table", "operation", "network"), NEEDED, ids=[row[0] for row in NEEDED])
def test_every_table_is_needed(table: str, operation: str, network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = capture(*network)
    assert Walk(trace).offences == []
    monkeypatch.setattr(tables, table, frozenset())
    assert operation in [offence.operation for offence in Walk(trace).offences]


def test_the_tables_speak_of_arguments_that_exist() -> None:
    """A misspelt argument would never be found to depend on data."""
    wrong = []
    for table in (tables.CONTRACTIONS, tables.FACTORS, tables.FIXED):
        for name, keys in table.items():
            packet = getattr(torch.ops.aten, name)
            schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
            on_tensors = [s for s in schemas if any(str(argument.type) == "Tensor" for argument in s.arguments)]
            wrong += [str(s) for s in on_tensors if not set(keys) <= {argument.name for argument in s.arguments}]
            wrong += [] if on_tensors else [name]
    assert wrong == []


def test_no_refused_operation_is_in_a_table_of_allowed_ones() -> None:
    allowed = tables.AFFINE | tables.MOVEMENT | tables.IDENTITY | tables.SOFTMAX | tables.CONTRACTIONS.keys()
    assert [name for name in sorted(allowed) if tables.reason(name) != tables.UNKNOWN] == []


# -- the tables are right: what passes without attention is affine ----------------------------------------------------

ROWS, COLUMNS = torch.tensor([3, 0, 2]), torch.tensor([[[1], [0], [2], [4], [3]]]).expand(2, N, 1)
LINEAR: list[Function] = [
    lambda x: x @ weight() + 1 - 2 * x,
    lambda x: torch.rsub(x, 1) / 3,
    lambda x: F.conv1d(x, weight(3, 15).reshape(3, 5, 3), torch.ones(3)),
    lambda x: F.conv_transpose1d(x, weight(5, 6).reshape(5, 2, 3)),
    lambda x: torch.addmm(x[0], x[1], weight()),
    lambda x: torch.baddbmm(x, x, weight().expand(2, C, C), beta=0.5, alpha=2),
    lambda x: torch.einsum("...ij,jk,k->...i", x, weight(), weight(1, C)[0]),
    lambda x: torch.lerp(x, x.flip(-1), weight(1, C)) + torch.addcmul(x, x, weight(1, C)),
    lambda x: torch.addcdiv(x, x, weight(1, C)),
    lambda x: x.cumsum(-1).diff(dim=-1).sum(-1) + x.mean((1, 2), keepdim=True).squeeze(-1),
    lambda x: F.avg_pool1d(x, 2) + F.adaptive_avg_pool1d(x, 4),
    lambda x: F.batch_norm(x, torch.ones(N), torch.full((N,), 2.0), torch.ones(N), torch.ones(N)),
    lambda x: torch.cat([x.permute(2, 0, 1).flatten(1), x.transpose(0, 2).reshape(C, -1)], -1),
    lambda x: torch.stack([x.roll(1, -1), x.flip(1), x.tile(1, 1, 1), x.rot90(2, (1, 2))]),
    lambda x: x.index_select(1, ROWS) + x[:, ROWS] + x[:, [0, 1, 2]],
    lambda x: x.gather(-1, COLUMNS) + torch.take_along_dim(x, COLUMNS, -1) + x.repeat_interleave(2, 0)[:2, :, :1],
    lambda x: torch.where(MASK[:, :1], x, -x).masked_fill(MASK[0, 0], 2.0),
    lambda x: F.pad(x, (1, 1)) + F.pad(x, (1, 1), mode="replicate") + F.pad(x, (1, 1), mode="circular"),
    lambda x: x.tril() + x.triu(1) + torch.diag_embed(x[..., :N].diagonal(dim1=1, dim2=2))[..., :1],
    lambda x: torch.zeros_like(x).index_put((torch.tensor([0, 1]),), x),
    lambda x: torch.zeros_like(x).index_add(1, ROWS, x[:, :3]),
    lambda x: torch.zeros_like(x).scatter(-1, COLUMNS, x) + torch.zeros_like(x).scatter_add(-1, COLUMNS, x),
    lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * (1 + 2j)).conj().real,
    lambda x: x.unfold(-1, 3, 2).sum(-1) + sum(x.unbind(1))[:, None, :3] + x.chunk(2, -1)[0][..., :3],
    lambda x: x.split(3, -1)[0] + x.split([3, 5], -1)[0] + x.narrow(-1, 1, 3) + torch.hstack([x, x])[:, :N, :3],
    lambda x: x.to(torch.float64).clone().detach().expand_as(x).contiguous().movedim(0, 1),
    lambda x: torch.kron(x[0], weight(2, 2)) + torch.outer(x[0, 0], torch.ones(2)).sum(),
    lambda x: torch.tensordot(x, weight(), dims=1) + torch.inner(x, weight()) + (x[0, 0] @ weight()[0]),
]


@pytest.mark.parametrize("function", LINEAR, ids=range(len(LINEAR)))
def test_what_passes_without_attention_is_affine(function: Function) -> None:
    assert offences_at(function, "affine") == []
    x, y = torch.randint(-8, 8, (2, 2, N, C), generator=torch.Generator().manual_seed(0)).double().unbind()
    # The second difference of an affine map vanishes; here up to rounding, while a nonlinearity would leave some units.
    torch.set_default_dtype(torch.float64)
    try:
        defect = function(x + y) - function(x) - function(y) + function(torch.zeros_like(x))
    finally:
        torch.set_default_dtype(torch.float32)
    assert defect.abs().max() < 1e-9


def test_no_attention_was_needed_for_affine_maps() -> None:
    assert examine("affine")[0].attention == 0


GROUPS: dict[str, Callable[[], list[tuple[Function, int]]]] = {
    "impure": lambda: [(function, 0) for _, function in IMPURE],
    "allowed": lambda: [(allowed, which) for allowed, _, which in PAIRS.values()],
    "refused": lambda: [(refused, which) for _, refused, which in PAIRS.values()],
    "affine": lambda: [(function, 0) for function in LINEAR],
}

PARTS: list[tuple[str, Function]] = [
    ("", lambda x: x @ weight() / 8),
    ("", lambda x: attend(x) @ x),
    ("", lambda x: x.softmax(-1) + x.flip(1)),
    ("", lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True)),
    ("", lambda x: torch.cat([x[..., 1:], x[..., :1]], -1)),
    ("gelu", lambda x: F.gelu(x)),
    ("mul", lambda x: x * x.roll(1, -1)),
    ("clamp_min", lambda x: x.clamp_min(0)),
    ("matmul", lambda x: x + (x @ x.mT).mean(-1, keepdim=True)),
]


@settings(max_examples=8, deadline=None)
@given(st.lists(st.sampled_from(PARTS), min_size=1, max_size=6))
def test_a_chain_offends_where_its_parts_do(parts: list[tuple[str, Function]]) -> None:
    def chain(x: Tensor) -> Tensor:
        for _, part in parts:
            x = part(x)
        return x

    expected = [(name, line_of(part)) for name, part in parts if name]
    found = [(o.operation, Path(o.source.split("  ")[0]).name) for o in offences(Apply(chain))]
    assert found == expected


# -- what cannot be examined ------------------------------------------------------------------------------------------


def branch(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x
    return -x


def test_control_flow_on_data_is_refused() -> None:
    with pytest.raises(PurityError, match="depends on data") as caught:
        purity(Apply(branch))
    assert f"test_census.py:{branch.__code__.co_firstlineno + 1}  if x.sum() > 0:" in str(caught.value)
    with pytest.raises(PurityError, match=r"depends on data|nonzero"):
        purity(Apply(lambda x: x[x > 0]))


def test_an_example_is_needed_and_must_fit() -> None:
    with pytest.raises(ArgumentError, match="example="):
        purity(nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match="example must be"):
        purity(nn.Linear(2, 2), "x")  # type: ignore[arg-type]
    with pytest.raises(PurityError, match=r"Linear cannot be exported.*\n.*\n.*example="):
        purity(nn.Linear(2, 2), torch.zeros(3, 3))


# -- custom operators -------------------------------------------------------------------------------------------------


def test_custom_operators_count_as_attention_once_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    @torch.library.custom_op("attnforge::purity_test_attention", mutates_args=())
    def operator(x: Tensor) -> Tensor:
        return x.softmax(-1)

    operator.register_fake(torch.empty_like)
    monkeypatch.setattr(tables, "_custom", {})
    net = Apply(lambda x: operator(x))
    with pytest.raises(PurityError, match="attnforge::purity_test_attention: not in the table of allowed operations"):
        purity(net)
    allow_custom("attnforge::purity_test_attention", "softmax over the last axis")
    assert purity(net).attention == 1
    with pytest.raises(PurityError, match="bmm: a product"):
        purity(Apply(lambda x: operator(torch.bmm(x, x.mT))))
    with pytest.raises(ArgumentError, match="namespace"):
        allow_custom("other::relu", "it is mine")
    with pytest.raises(ArgumentError, match="empty"):
        allow_custom("attnforge::relu", " ")


def test_a_score_may_be_summed_in_blocks_and_only_into_a_softmax() -> None:
    def blocks(x: torch.Tensor) -> torch.Tensor:
        parts = x.unflatten(-1, (2, -1))
        return (parts.unsqueeze(-2) @ parts.unsqueeze(-1)).flatten(-3).sum(-1, keepdim=True)

    table = torch.linspace(-1, 1, 3)
    assert purity(Apply(lambda x: (table * blocks(x)).softmax(-1))).attention == 2
    with pytest.raises(PurityError, match="ends in the output"):
        purity(Apply(blocks))
    with pytest.raises(PurityError, match=r"ends in mul|elementwise product"):
        purity(Apply(lambda x: (x * blocks(x)).softmax(-1)))
    with pytest.raises(PurityError, match="ends in mean"):
        purity(Apply(lambda x: (blocks(x).mean(-1, keepdim=True) * table).softmax(-1)))


# -- decoders that keep keys and values -------------------------------------------------------------------------------


def test_a_decoder_that_returns_a_cache_is_examined_without_it() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=8)
    net = transformers.GPT2Model(transformers.GPT2Config(**sizes))
    with pytest.raises(PurityError) as caught:
        purity(net, {"input_ids": torch.ones(1, 3, dtype=torch.long)})
    told = str(caught.value)
    assert "tanh" in told or "pow" in told, "the activation is still seen"
    assert "layer_norm" in told and "cannot be exported" not in told
    assert net.config.use_cache is True, "everything is as it was"


def test_only_a_cache_that_cannot_be_exported_is_left_out() -> None:
    """A network that computes more while it keeps a cache must not get away with it."""

    class Sly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = pytest.importorskip("transformers").GPT2Config()
            self.linear = nn.Linear(C, C)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(x)
            return out.relu() if self.config.use_cache else out

    with pytest.raises(PurityError, match="relu"):
        purity(Sly(), X)


# -- census and structure ---------------------------------------------------------------------------------------------


def test_census_prints_an_aligned_table() -> None:
    census = Census.of([("affine", "linear")] * 12 + [("attention", "scaled_dot_product_attention")])
    lines = str(census).splitlines()
    assert lines[0].split() == ["category", "operation", "count"]
    assert len({len(line) for line in lines}) == 1
    assert [line.split() for line in lines[1:]] == [
        ["attention", "scaled_dot_product_attention", "1"],
        ["affine", "linear", "12"],
        ["total", "13"],
    ]
    with pytest.raises(ArgumentError, match="category"):
        Census((("magic", "relu", 1),))
    with pytest.raises(ArgumentError, match="at least 1"):
        Census((("affine", "linear", 0),))
    assert str(Offence("relu", "no", "")) == "relu: no"


@pytest.mark.parametrize("scope", ["memory", "self", "tokens"])
def test_the_runtime_is_attention_only(scope: Any) -> None:
    token = {} if scope == "memory" else {"W_K": torch.ones(2, C, 3), "W_V": torch.ones(2, C, 4)}
    memory = {"M_K": torch.ones(1, 6, 3), "M_V": torch.ones(1, 6, 4)}
    causal = scope == "tokens"
    heads = Heads(scope, W_Q=torch.ones(2, C, 3), W_O=torch.ones(2, 4, C), **token, **memory, causal=causal)
    net = AttentionOnly([AttentionLayer([heads], S=torch.eye(C)), AttentionLayer([heads])])
    assert purity(net, X).by_operation["softmax"] == 2
    structural(net)


def test_structural_knows_classes_and_notices_changes() -> None:
    structural(nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Embedding(2, 2), nn.Dropout(), nn.Identity()])))
    with pytest.raises(PurityError) as caught:
        structural(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.LayerNorm(2))))
    assert "ReLU in 1" in str(caught.value) and "LayerNorm in 2.0" in str(caught.value)

    class Linear(nn.Linear):
        pass

    with pytest.raises(PurityError, match=r"Linear.*not in the table"):
        structural(Linear(2, 2))
    replaced = nn.Linear(2, 2)
    replaced.forward = torch.relu  # type: ignore[method-assign, assignment]
    with pytest.raises(PurityError, match="replaced"):
        structural(replaced)
    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda module, args, output: output.relu())
    with pytest.raises(PurityError, match="hooks"):
        structural(hooked)
