"""Tier `plain`: what the stock transformer computes, what it is made of, and that columns and heads tell the truth."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import attnforge as af
from attnforge.compiler.compiled import CompiledNetwork
from attnforge.export import PlainSpec, PlainTransformer, to_plain
from attnforge.export.plain.spec import FLAG, exclusion, lay_columns
from attnforge.export.plain.transformer import MANY

FORMULAS = {
    "mixed": ("sin(x*y) + exp(-x**2)/y", {"x": (-1.0, 1.0), "y": (0.5, 2.0)}),
    "kinks": ("max(x, y)*abs(x) + relu(x - 0.3)", {"x": (-1.0, 1.0), "y": (0.5, 2.0)}),
    "clip": ("clip(x*y, -0.5, 0.5) + sigmoid(3*x)", {"x": (-2.0, 2.0), "y": (-1.0, 3.0)}),
    "line": ("2*x - 3*y + 1", {"x": (-2.0, 2.0), "y": (-1.0, 3.0)}),
}
TRUTH = {
    "mixed": lambda x, y: torch.sin(x * y) + torch.exp(-(x**2)) / y,
    "kinks": lambda x, y: torch.maximum(x, y) * x.abs() + (x - 0.3).relu(),
    "clip": lambda x, y: (x * y).clamp(-0.5, 0.5) + torch.sigmoid(3 * x),
    "line": lambda x, y: 2 * x - 3 * y + 1,
}
CASES = [(name, dtype) for name in FORMULAS for dtype in (torch.float32, torch.float64)]
BUILT: dict[tuple[str, torch.dtype], tuple[CompiledNetwork, PlainTransformer]] = {}


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def built(name: str, dtype: torch.dtype) -> tuple[CompiledNetwork, PlainTransformer]:
    if (name, dtype) not in BUILT:
        formula, box = FORMULAS[name]
        net = af.compile(formula, af.Box(box), eps=1e-3 if dtype == torch.float32 else 1e-7, dtype=dtype)
        BUILT[name, dtype] = net, to_plain(net)
    return BUILT[name, dtype]


def points(net: CompiledNetwork, count: int = 2000) -> Tensor:
    return torch.cat([net.box.sample(count, dtype=net.dtype), net.box.corners(64, net.dtype)])


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_many_points_at_once_are_those_points_one_by_one(name: str, dtype: torch.dtype) -> None:
    net, plain = built(name, dtype)
    x = points(net, 200)
    slack = (1e-5 if dtype == torch.float32 else 1e-12) * (1 + float(net(x).abs().max()))

    def apart(given: PlainTransformer) -> float:
        return float((given.core(x) - torch.cat([given.core(part) for part in x.split(MANY - 1)])).abs().max())

    assert plain._settled(x) and not plain._settled(2 * x + 9) and apart(plain) <= slack
    with torch.enable_grad():
        assert not plain._settled(x) and plain.core(x[:MANY]).requires_grad
    for block in plain.blocks:
        seen: list[Tensor] = []
        handle = block.attention.register_forward_hook(lambda _, given, found, seen=seen: seen.append(found[1]))  # type: ignore[union-attr, misc]
        plain.core(x)
        handle.remove()
        assert len(torch.cat(seen)) == len(x), "whoever looks inside sees every row"
    changed = copy.deepcopy(plain)
    for block in changed.blocks:  # register 0, which nobody may read from, gets values: rows of registers change
        block.attention.in_proj_weight.data[2 * plain.spec.stream :, 1] = 3.0  # type: ignore[union-attr, operator, index]
    assert changed._settled(x) == (not plain.blocks) and apart(changed) <= slack
    assert not torch.equal(changed.core(x), plain.core(x)) or name != "mixed"


class Tokens(nn.Module):
    """Sequence functions of every kind of head between tokens."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "max":
            return x.amax(-2, keepdim=True) * x
        if self.kind == "swap":
            return torch.tanh(x.flip(-2)) * x
        if self.kind == "mean":
            return (x.mean(-2, keepdim=True) - x).abs()
        if self.kind == "softmax":
            return x.softmax(-1) * x
        score = x @ x.transpose(-2, -1)
        if self.kind == "attention":
            return score.softmax(-1) @ x.sin()
        hidden = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).triu(1)
        back = score.masked_fill(hidden, -torch.inf).softmax(-1) @ x
        return back.relu() if self.kind == "causal" else back.relu() + score.softmax(-1) @ x


SEQUENCES: dict[str, tuple[CompiledNetwork, PlainTransformer]] = {}


def sequence(kind: str) -> tuple[CompiledNetwork, PlainTransformer]:
    if kind not in SEQUENCES:
        net = af.compile(Tokens(kind), af.Box.cube(-1, 1, shape=(5, 2)), eps=1e-2)
        SEQUENCES[kind] = net, to_plain(net)
    return SEQUENCES[kind]


KINDS = ("max", "swap", "mean", "softmax", "attention", "causal", "both")


# -- the same function --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_formulas_stay_what_they_are(name: str, dtype: torch.dtype) -> None:
    net, plain = built(name, dtype)
    x = points(net)
    assert plain(x).shape == net(x).shape
    assert float((plain(x) - net(x)).abs().max()) <= (1e-5 if dtype == torch.float32 else 1e-10)
    truth = TRUTH[name](*x.double().unbind(-1))
    assert plain.certificate.kind == "certified"
    assert float((plain(x).double() - truth).abs().max()) <= plain.certificate.bound


@pytest.mark.parametrize("kind", KINDS)
def test_sequence_functions_stay_what_they_are(kind: str) -> None:
    net, plain = sequence(kind)
    x = points(net, 500)
    assert plain(x).shape == net(x).shape == x.shape
    assert float((plain(x) - net(x)).abs().max()) <= 1e-5
    assert float((plain(x).double() - Tokens(kind)(x.double())).abs().max()) <= plain.certificate.bound
    assert plain.causal == (kind == "causal")


def test_batches_of_any_shape_and_single_points() -> None:
    net, plain = built("mixed", torch.float32)
    x = points(net)[:24]
    assert torch.allclose(plain(x.reshape(2, 3, 4, 2)), plain(x).reshape(2, 3, 4), atol=1e-6)
    assert plain(x[0]).shape == net(x[0]).shape == ()
    assert plain(x[:0]).shape == (0,)


def test_several_inputs_and_outputs_of_one_row() -> None:
    boxes = (af.Box.cube(-1, 1, shape=(2, 3)), af.Box.cube(0, 2, shape=(2, 3)))
    net = af.compile(lambda a, b: torch.sin(a) * b, boxes, eps=1e-3)
    plain = to_plain(net)
    given = [box.sample(40, dtype=torch.float32) for box in boxes]
    assert float((plain(*given) - net(*given)).abs().max()) <= 1e-5
    mean = af.compile(lambda x: x.mean((-2, -1)).exp(), af.Box.cube(-1, 1, shape=(3, 2)), eps=1e-3)
    x = points(mean, 100)
    assert to_plain(mean)(x).shape == mean(x).shape == (len(x),)
    assert float((to_plain(mean)(x) - mean(x)).abs().max()) <= 1e-5
    pair = af.compile(["sin(x)", "x*y"], af.Box(x=(-1, 1), y=(0, 1)), eps=1e-3)
    assert float((to_plain(pair)(points(pair)) - pair(points(pair))).abs().max()) <= 1e-5


def test_many_points_are_evaluated_in_pieces() -> None:
    net, plain = built("mixed", torch.float32)
    x = points(net, 5000)[:5000]
    rows = plain.registers + plain.tokens
    assert 5000 * rows * rows * len(plain.heads[0]) > 1 << 21, "more than fits into one piece"
    assert torch.allclose(plain(x)[-500:], plain(x[-500:]), atol=1e-6)


# -- a stock transformer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixed", "kinks"])
def test_it_is_made_of_the_module_everybody_knows(name: str) -> None:
    net, plain = built(name, torch.float32)
    assert [type(block.attention) for block in plain.blocks] == [nn.MultiheadAttention] * len(plain.blocks)
    x = points(net, 50)
    stream = plain.residual(x)
    for block in plain.blocks:  # no mask, nothing but attention and addition
        out, weights = block.attention(stream, stream, stream, need_weights=True, average_attn_weights=False)
        assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-6)
        stream = stream + out
    assert torch.equal(plain.readout(stream[..., plain.registers :, :]).reshape(plain(x).shape), plain(x))


@pytest.mark.parametrize("name", ["mixed", "kinks"])
def test_fused_attention_computes_it_too(name: str) -> None:
    """need_weights=False takes PyTorch's fused kernels: same function, rounding not covered by the certificate."""
    net, plain = built(name, torch.float32)
    x = points(net, 50)
    stream = plain.residual(x)
    for block in plain.blocks:
        stream = stream + block.attention(stream, stream, stream, need_weights=False)[0]
    assert float((plain.readout(stream[..., plain.registers :, :]).squeeze() - plain(x)).abs().max()) < 1e-5


def test_the_scale_is_a_power_of_two_in_every_block() -> None:
    for plain in (built("mixed", torch.float32)[1], sequence("attention")[1], sequence("swap")[1]):
        for block in plain.blocks:
            width = block.attention.head_dim
            assert math.log(width, 4).is_integer()
            assert block.attention.in_proj_bias is None, "constants come from the flag's column"


def test_attention_only_by_the_graph() -> None:
    _, plain = built("mixed", torch.float32)
    counts = {name: count for _, name, count in af.purity(plain).counts}
    assert counts["softmax"] == len(plain.blocks)


def test_causal_sequences_do_not_look_ahead() -> None:
    net, plain = sequence("causal")
    x = points(net, 20)
    other = x.clone()
    other[:, 3:] = -other[:, 3:]
    assert torch.equal(plain(x)[:, :3], plain(other)[:, :3])
    assert not torch.equal(plain(x)[:, 3:], plain(other)[:, 3:])
    for weights in plain.attention(x):
        assert float(weights.triu(1).abs().max()) == 0.0


def test_causal_heads_without_a_causal_mask_are_hidden_by_positions() -> None:
    net, _ = sequence("causal")
    plain = to_plain(net, causal=False)
    assert not plain.causal
    assert float((plain(points(net, 100)) - net(points(net, 100))).abs().max()) <= 1e-5


def test_a_formula_under_a_causal_mask() -> None:
    net, plain = built("mixed", torch.float32)
    causal = to_plain(net, causal=True)
    x = points(net, 100)
    assert causal.causal
    assert float((causal(x) - plain(x)).abs().max()) <= 1e-6


# -- what a head sees -----------------------------------------------------------------------------------------------


def seen(plain: PlainTransformer, scope: str, slots: int, causal: bool) -> Tensor:
    """Which keys a token's query may see, (token, key)."""
    n, r = plain.tokens, plain.registers
    allowed = torch.zeros(n, r + n, dtype=torch.bool)
    allowed[:, 1 : slots + 1] = True
    if scope == "self":
        allowed[:, r:] = torch.eye(n, dtype=torch.bool)
    if scope == "tokens":
        allowed[:, r:] = torch.ones(n, n, dtype=torch.bool).tril() if causal else True
    return allowed


@pytest.mark.parametrize("which", ["mixed", "kinks", "max", "swap", "attention", "causal", "both"])
def test_excluded_keys_weigh_zero_bit_by_bit(which: str) -> None:
    net, plain = built(which, torch.float32) if which in FORMULAS else sequence(which)
    x = points(net, 100)
    checked = 0
    for weights, row in zip(plain.attention(x), plain.heads, strict=True):
        for h, head in enumerate(row):
            if not head.purpose:
                continue
            group = net.network.layers[head.place[0]].heads()[head.place[1]]
            allowed = seen(plain, head.scope, head.slots, group.causal)
            tokens = weights[:, h, plain.registers :]
            hidden = tokens[:, ~allowed]
            assert torch.equal(hidden, torch.zeros_like(hidden)), head
            assert float(tokens[:, allowed].max()) > 0
            registers = weights[:, h, : plain.registers, 1 : head.slots + 1]
            assert torch.equal(registers, torch.zeros_like(registers)), "registers look at excluded registers only"
            checked += hidden.numel()
    assert checked > 1000


@pytest.mark.parametrize("which", ["mixed", "kinks", "max", "swap", "attention", "causal"])
def test_nothing_is_overwritten_and_registers_never_change(which: str) -> None:
    net, plain = built(which, torch.float32) if which in FORMULAS else sequence(which)
    x = plain.residual(points(net, 50))
    mask, written = plain.mask(x), {}
    for number, (block, row) in enumerate(zip(plain.blocks, plain.heads, strict=True)):
        after = block(x, mask)
        touched = {c for head in row for c in head.writes}
        kept = [c for c in range(x.shape[-1]) if c not in touched]
        assert torch.equal(after[..., kept], x[..., kept])
        assert torch.equal(after[..., : plain.registers, :], x[..., : plain.registers, :])
        for head in row:
            for c in head.writes:
                assert written.setdefault(c, head.place[0]) == head.place[0], "one layer of the source writes a column"
        assert number >= 0
        x = after
    names = plain.channels
    assert all(names[c] != "unused" and not names[c].startswith(("register", "token", "position")) for c in written)


@given(st.integers(1, 20), st.sampled_from(["memory", "self", "tokens"]), st.integers(0, 3), st.booleans())
@settings(deadline=None, max_examples=60)
def test_exclusion_penalises_and_never_rewards(tokens: int, scope: str, slots: int, causal: bool) -> None:
    columns = lay_columns(4, tokens, ("x",), None, (), True)
    query, key = exclusion(columns, scope, slots, causal)  # type: ignore[arg-type]
    rows = np.zeros((4 + tokens, len(columns.names)))
    rows[range(4), list(columns.ids)] = 1.0
    rows[4:, FLAG] = 1.0
    rows[range(4, 4 + tokens), list(columns.positions)] = 1.0
    q, k = rows @ query, rows @ key
    for i in range(tokens):
        for j in range(4 + tokens):
            own = j >= 4 and (scope == "tokens" or (scope == "self" and j == 4 + i))
            ahead = scope == "tokens" and causal and j > 4 + i
            allowed = (1 <= j <= slots) or (own and not ahead)
            products = q[4 + i] * k[j]
            assert products.sum() <= -1 if not allowed else not products.any(), (i, j)
    for r in range(4):  # a register prefers register 0, and its like, to everything that may hold a value
        preferred = q[r] @ k[0]
        assert all(q[r] @ k[j] <= preferred - 1 for j in range(1, slots + 1))
        assert scope == "memory" or all(q[r] @ k[4 + j] <= preferred - 1 for j in range(tokens))


# -- ground truth -----------------------------------------------------------------------------------------------------


def test_channels_carry_what_their_names_say() -> None:
    net, plain = built("mixed", torch.float64)
    x = points(net, 200)
    stream = plain.residual(x)
    for block in plain.blocks:
        stream = block(stream)
    token = stream[:, plain.registers]
    column = {name: token[:, c] for c, name in enumerate(plain.channels)}
    a, b = x.unbind(-1)
    assert torch.equal(column["x"], a)
    assert torch.equal(column["y"], b)
    assert torch.equal(column["token"], torch.ones_like(a))
    found = column.get("x*y", column.get("x*y, less its linear part"))
    assert found is not None
    rest = a * b - found  # what a product head leaves to the linear part is affine in x and y
    design = torch.stack([a, b, torch.ones_like(a)], -1)
    fit = torch.linalg.lstsq(design, rest.detach().unsqueeze(-1)).solution
    assert float((design @ fit - rest.unsqueeze(-1)).abs().max()) < 1e-9


def test_the_head_that_computes_the_sine_is_the_one_that_says_so() -> None:
    net = af.compile("sin(3*x) + y**2", af.Box(x=(-1, 1), y=(-1, 1)), eps=1e-4)
    plain = to_plain(net)
    places = [(b, h) for b, row in enumerate(plain.heads) for h, head in enumerate(row) if "sin" in head.purpose]
    assert len(places) == 1
    (block, head) = places[0]
    x = points(net, 300)
    before = plain(x)
    width = plain.blocks[block].attention.head_dim
    with torch.no_grad():
        plain.blocks[block].attention.out_proj.weight[:, head * width : (head + 1) * width] = 0
    lost = (before - plain.core(x)).detach()
    sine = torch.sin(3 * x[:, 0])
    design = torch.stack([sine, x[:, 0], torch.ones_like(sine)], -1)
    fit = torch.linalg.lstsq(design, lost.unsqueeze(-1)).solution
    assert float((design @ fit - lost.unsqueeze(-1)).abs().max()) < 1e-3, "a sine and a line, and no y"
    assert abs(float(fit[0])) > 0.5


def test_every_head_has_a_purpose_and_padding_has_none() -> None:
    net, plain = built("mixed", torch.float32)
    used = [head for row in plain.heads for head in row if head.purpose]
    assert len(used) == net.size.heads == plain.size.heads
    assert {head.purpose.split(":")[0] for head in used} == {"anchor", "product"}
    for block, row in zip(plain.blocks, plain.heads, strict=True):
        width = block.attention.head_dim
        for h, head in enumerate(row):
            out = block.attention.out_proj.weight[:, h * width : (h + 1) * width]
            assert bool(out.any()) == bool(head.purpose)


def test_sizes_are_bounds() -> None:
    for net, plain in (built("mixed", torch.float32), sequence("attention")):
        x = plain.residual(points(net, 500))
        size, mask = plain.size, plain.mask(x)
        for block in plain.blocks:
            x = block(x, mask)
        assert float(x.abs().max()) <= size.largest_activation
        assert size.channels == len(plain.channels) == x.shape[-1]
        assert size.registers == plain.registers
        assert size.parameters == sum(p.numel() for p in plain.parameters())
        assert f"{size.parameters} parameters" in str(size)


# -- description, input, errors -----------------------------------------------------------------------------------


def test_description_goes_through_json_and_back() -> None:
    for plain in (built("mixed", torch.float64)[1], sequence("both")[1]):
        text = json.dumps(plain.config())
        assert PlainSpec.from_json(json.loads(text)) == plain.spec
        again = PlainTransformer.rebuild(json.loads(text), plain.state_dict())
        x = plain.example_input()[0]
        assert torch.equal(again(x), plain(x))


def test_bad_input_is_refused_like_the_network_does() -> None:
    _, plain = built("mixed", torch.float32)
    with pytest.raises(af.ArgumentError, match="expected input of shape"):
        plain(torch.zeros(3))
    with pytest.raises(af.ArgumentError, match="float64"):
        plain(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(af.DomainError, match="NaN"):
        plain(torch.tensor([float("nan"), 1.0]))
    with pytest.warns(af.DomainWarning, match="'x' reaches 3"):
        plain(torch.tensor([3.0, 1.0]))
    with pytest.raises(af.ArgumentError, match="1 input"):
        plain(torch.zeros(2), torch.zeros(2))


def test_too_large_says_how_large_and_what_the_limit_is() -> None:
    net, plain = built("mixed", torch.float32)
    with pytest.raises(af.ArgumentError, match=rf"{plain.registers} registers.*channels; the limit is 8 rows"):
        to_plain(net, limit=8)
    huge = af.compile("x", af.Box(x=(-1e38, 1e38)), eps=1e36)
    with pytest.raises(af.PrecisionError, match="cannot hold"):
        to_plain(huge)


def test_bad_arguments() -> None:
    net, _ = built("mixed", torch.float32)
    for tokens in (0, True, "2"):
        with pytest.raises(af.ArgumentError, match="tokens"):
            to_plain(net, tokens=tokens)  # type: ignore[arg-type]
    with pytest.raises(af.ArgumentError, match="compiled for 1 token"):
        to_plain(net, tokens=3)
    with pytest.raises(af.UnsupportedOperation, match="hide later tokens"):
        to_plain(sequence("max")[0], causal=True)
    with pytest.raises(af.ArgumentError, match="causal must be"):
        to_plain(net, causal=1)  # type: ignore[arg-type]
    with pytest.raises(af.ArgumentError, match="got Linear"):
        to_plain(nn.Linear(2, 2))
    with pytest.raises(af.UnsupportedOperation, match="AnchorHead"):
        to_plain(af.AnchorHead.fit("sin", -1, 1, eps=1e-2))


def test_a_hundred_and_fifty_heads_in_ten_seconds() -> None:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(3, 75), nn.Tanh(), nn.Linear(75, 75), nn.GELU(), nn.Linear(75, 2))
    net = af.compile(mlp, af.Box.cube(-1, 1, shape=(3,)), eps=1e-2)
    assert net.size.heads >= 150
    start = time.perf_counter()
    plain = to_plain(net)
    assert time.perf_counter() - start < 10
    x = points(net, 500)
    assert float((plain(x) - net(x)).abs().max()) <= 1e-5
    assert float((plain(x).double() - mlp.double()(x.double())).abs().max()) <= plain.certificate.bound
