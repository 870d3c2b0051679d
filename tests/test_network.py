"""The runtime against a reference written straight from its formula, one head and one token at a time."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import attnforge.network
from attnforge.errors import ArgumentError
from attnforge.network import AttentionLayer, AttentionOnly, Heads

SCOPES = ("memory", "self", "tokens")


def weights(
    scope: str, heads: int, channels: int, key: int, value: int, out: int, slots: int, shared: bool, seed: int = 0,
    bias: bool = True, constant_keys: bool = False, mixed: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    table = 1 if shared else heads

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    given = dict(W_Q=draw(heads, channels, key), W_O=draw(table, value, out))
    if bias:
        given["b_Q"] = draw(heads, key)
    if scope == "memory" or slots:
        given |= dict(M_K=draw(table, max(1, slots), key), M_V=draw(table, max(1, slots), value))
    if scope != "memory":
        given |= dict(W_V=draw(table, channels, value))
        given |= dict(b_K=draw(table, key)) if constant_keys else dict(W_K=draw(table, channels, key))
        if bias:
            given |= dict(b_K=draw(table, key), b_V=draw(table, value))
    if mixed:  # some tables are shared by all heads, others are not
        several = [name for name in given if torch.rand((), generator=generator) < 0.5 and name != "W_Q"]
        given |= {name: given[name][:1] for name in several}
    return given


def reference(given: dict[str, Tensor], Z: Tensor, scope: str, causal: bool = False) -> Tensor:
    """sum_h softmax(Q_h K_h^T + mask) V_h O_h for one sequence Z of shape (token, channel)."""
    tokens, heads = Z.shape[0], given["W_Q"].shape[0]

    def of(name: str, h: int) -> Tensor | None:
        tensor = given.get(name)
        return None if tensor is None else tensor[h if len(tensor) > 1 else 0]

    def affine(x: Tensor, W: Tensor | None, b: Tensor | None) -> Tensor:
        return (0 if W is None else x @ W) + (0 if b is None else b)  # type: ignore[return-value]

    out = []
    for i in range(tokens):
        total = torch.zeros(given["W_O"].shape[-1], dtype=Z.dtype)
        seen = {"memory": [], "self": [i], "tokens": list(range(i + 1 if causal else tokens))}[scope]
        for h in range(heads):
            q = affine(Z[i], of("W_Q", h), of("b_Q", h))
            keys = [affine(Z[j], of("W_K", h), of("b_K", h)) for j in seen]
            values = [affine(Z[j], of("W_V", h), of("b_V", h)) for j in seen]
            if given.get("M_K") is not None:
                keys += list(of("M_K", h))  # type: ignore[arg-type]
                values += list(of("M_V", h))  # type: ignore[arg-type]
            weight = torch.softmax(torch.stack([q @ k for k in keys]), 0)
            total = total + (weight @ torch.stack(values)) @ of("W_O", h)
        out.append(total)
    return torch.stack(out)


def chunks(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for name in ("CHUNK", "CACHED"):
        monkeypatch.setattr(attnforge.network, name, size)


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-12 * (1 + b.abs().max()))


@given(
    st.sampled_from(SCOPES), st.booleans(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3),
    st.integers(1, 3), st.integers(0, 3), st.sampled_from(["none", "all", "some"]), st.booleans(), st.booleans(),
    st.integers(0, 1000),
)  # fmt: skip
@settings(max_examples=150, derandomize=True, deadline=None)
def test_every_scope_is_its_formula(
    scope: str, causal: bool, heads: int, channels: int, key: int, value: int, out: int, slots: int, shared: str,
    bias: bool, constant_keys: bool, seed: int,
) -> None:  # fmt: skip
    causal = causal and scope == "tokens"
    options = (seed, bias, constant_keys, shared == "some")
    given = weights(scope, heads, channels, key, value, out, slots, shared == "all", *options)
    group = Heads(scope, **given, causal=causal)  # type: ignore[arg-type]
    Z = torch.randn(4, channels, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    assert close(group(Z), reference(given, Z, scope, causal))
    batch = torch.stack([Z, -Z, 2 * Z]).reshape(3, 1, 4, channels)
    assert close(group(batch)[1, 0], group(-Z)) and group(batch).shape == (3, 1, 4, out)
    assert group(batch[:0]).shape == (0, 1, 4, out), "an empty batch"


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("shared", [False, True])
def test_weights_are_a_distribution_over_slots(scope: str, shared: bool) -> None:
    group = Heads(scope, **weights(scope, 2, 3, 2, 2, 2, 4, shared))  # type: ignore[arg-type]
    Z = torch.randn(5, 3, dtype=torch.float64)
    slots = {"memory": 4, "self": 5, "tokens": 9}[scope]
    assert group.weights(Z).shape == (5, 2, slots)
    assert close(group.weights(Z).sum(-1), torch.ones(5, 2, dtype=torch.float64))
    assert group.slots == 4 and group.heads == 2 and scope in repr(group)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_chunks_change_nothing(scope: str, causal: bool, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Heads(scope, **weights(scope, 2, 3, 2, 2, 3, 4, shared), causal=causal and scope == "tokens")  # type: ignore[arg-type]
    Z = torch.randn(2, 3, 11, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = group(Z)
    for chunk in (1, 37, 101, 1000):
        chunks(monkeypatch, chunk)
        parts = group(Z)
        assert parts.shape == whole.shape and close(parts, whole)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_in_chunks_are_those_of_the_whole(scope: str, frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Heads(scope, **weights(scope, 2, 3, 2, 2, 3, 4, False), causal=scope == "tokens")  # type: ignore[arg-type]
    group.W_O.requires_grad_(not frozen)
    Z = torch.randn(2, 9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    factor = torch.randn(2, 9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def gradients(module: Heads) -> list[Tensor]:
        inputs = [Z.clone().requires_grad_(), *(p for p in module.parameters() if p.requires_grad)]
        return list(torch.autograd.grad((module(inputs[0]) * factor).sum(), inputs))

    whole = gradients(group)
    chunks(monkeypatch, 61)
    chunked = gradients(group)
    assert len(whole) == len(chunked) and all(close(a, b) for a, b in zip(chunked, whole, strict=True))
    swapped = {name: 2 * p.detach() for name, p in group.named_parameters()}
    for table in swapped.values():
        table.requires_grad_()
    torch.func.functional_call(group, swapped, (Z,)).sum().backward()
    other = copy.deepcopy(group)
    other.load_state_dict(swapped)
    chunks(monkeypatch, 1 << 20)
    other.requires_grad_()(Z).sum().backward()
    for name, parameter in other.named_parameters():
        assert close(swapped[name].grad, parameter.grad), f"gradient of {name} at the weights that were swapped in"  # type: ignore[arg-type]


def test_a_causal_head_does_not_see_what_comes_later() -> None:
    group = Heads("tokens", **weights("tokens", 2, 3, 2, 2, 3, 0, False), causal=True)
    Z = torch.randn(6, 3, dtype=torch.float64)
    later = Z.clone()
    later[4:] += 1.0
    assert torch.equal(group(Z)[:4], group(later)[:4]) and not torch.equal(group(Z)[4:], group(later)[4:])
    assert bool((group.weights(Z)[0, :, 1:] == 0).all()), "the first token sees itself"


@pytest.mark.parametrize("scope", SCOPES)
def test_gradients(scope: str) -> None:
    given = weights(scope, 2, 2, 2, 2, 2, 2, False)
    group = Heads(scope, **given)  # type: ignore[arg-type]
    Z = torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(group, (Z,))
    names = [name for name, _ in group.named_parameters()]
    assert set(names) == set(given)
    values = tuple(p.detach().clone().requires_grad_() for p in group.parameters())

    def by_weights(*tensors: Tensor) -> Tensor:
        return torch.func.functional_call(group, dict(zip(names, tensors, strict=True)), (Z.detach(),))

    assert torch.autograd.gradcheck(by_weights, values)


def test_a_layer_is_heads_plus_skip_and_a_network_is_layers_in_a_row() -> None:
    groups = [Heads(scope, **weights(scope, 2, 3, 2, 2, 3, 2, False, seed)) for seed, scope in enumerate(SCOPES)]  # type: ignore[arg-type]
    S, s = torch.randn(3, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    Z = torch.randn(2, 4, 3, dtype=torch.float64)
    layer = AttentionLayer(groups, S=S, s=s)
    wanted = sum((group(Z) for group in groups), Z @ S + s)
    assert close(layer(Z), wanted)
    assert close(AttentionLayer(groups)(Z), wanted - Z @ S - s)
    assert close(AttentionLayer([], S=S)(Z), Z @ S)
    network = AttentionOnly([layer, AttentionLayer([], S=S, s=s), layer])
    assert close(network(Z), layer(layer(Z) @ S + s))
    assert [*network.groups()] == [*groups, *groups]
    state = {name: t.clone() for name, t in network.state_dict().items()}
    other = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(state)
    assert torch.equal(other(Z), network(Z)) and other.to(torch.float32)(Z.float()).dtype == torch.float32


def rowwise(shared: bool, mixed: bool, bias: bool) -> tuple[AttentionOnly, list[tuple[Any, ...]]]:
    """A network whose heads read their own row, and what it was made of: groups and skips."""
    made: list[tuple[Any, ...]] = []
    layers = []
    for seed, (inputs, out, skip) in enumerate([(3, 4, True), (4, 2, False), (2, 3, True)]):
        tables = [
            ("memory", weights("memory", 3, inputs, 2, 2, out, 4, shared, seed, bias, mixed=mixed)),
            ("self", weights("self", 2, inputs, 2, 1, out, 2, shared, seed + 9, bias, True, mixed)),
        ]
        if seed == 1:
            tables = tables[:1]
        S = torch.randn(inputs, out, dtype=torch.float64) if skip else None
        s = torch.randn(out, dtype=torch.float64) if bias or not skip else None
        made.append((tables, S, s))
        layers.append(AttentionLayer([Heads(scope, **given) for scope, given in tables], S=S, s=s))  # type: ignore[arg-type]
    return AttentionOnly(layers), made


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_rows_by_themselves_are_the_formula_in_every_form(
    shared: bool, mixed: bool, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    network, made = rowwise(shared, mixed, bias)
    Z = torch.randn(5, 7, 3, dtype=torch.float64)
    wanted = Z.reshape(-1, 3)
    for tables, S, s in made:
        total = sum((reference(given, wanted, scope) for scope, given in tables), torch.zeros((), dtype=torch.float64))
        wanted = total + (0 if S is None else wanted @ S) + (0 if s is None else s)
    wanted = wanted.reshape(5, 7, 3)
    assert network.constant and close(network(Z), wanted) and close(network.unrolled(Z), wanted)
    assert all(close(group._by_slots(Z), group(Z)) for group in network.layers[0].heads())  # type: ignore[operator, union-attr]
    assert network(Z).is_contiguous() and network(Z[:0]).shape == (0, 7, 3)
    by_layers = Z
    for layer in network.layers:
        by_layers = layer(by_layers)
    assert close(by_layers, wanted)

    def gradients(call: Any) -> tuple[Tensor, ...]:
        inputs = [Z.clone().requires_grad_(), *network.parameters()]
        return torch.autograd.grad((call(inputs[0]) * wanted).sum(), inputs)

    whole = gradients(network)
    assert all(close(a, b) for a, b in zip(gradients(network.unrolled), whole, strict=True))
    chunks(monkeypatch, 61)
    assert close(network(Z), wanted)
    assert all(close(a, b) for a, b in zip(gradients(network), whole, strict=True))


def test_hooks_inside_a_network_are_heard() -> None:
    network, _ = rowwise(False, False, True)
    Z = torch.randn(6, 3, dtype=torch.float64)
    group, layer = network.layers[0].groups[1], network.layers[1]  # type: ignore[union-attr, index]
    plain, out = network(Z), []
    handle = group.register_forward_hook(lambda module, given, found: out.append(found))
    assert close(network(Z), plain) and out[0].shape == (6, 4)
    handle.remove()
    handle = layer.register_forward_hook(lambda module, given, found: 0 * found)  # type: ignore[union-attr]
    assert close(network(Z), network.layers[2](torch.zeros(6, 2, dtype=torch.float64)))
    handle.remove()
    assert torch.equal(network(Z), plain)


def test_hooks_hear_of_a_call_once_and_never_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    network, _ = rowwise(False, False, True)
    layer = network.layers[1]
    Z = torch.randn(40, 3, dtype=torch.float64)
    wanted = network(Z)
    chunks(monkeypatch, 61)
    for module in (network, layer, layer.groups[0]):  # type: ignore[union-attr, index]
        shapes: list[int] = []
        handle = module.register_forward_hook(lambda _, given, found, seen=shapes: seen.append(len(found)) or -found)  # type: ignore[func-returns-value, misc]
        changed = network(Z)
        handle.remove()
        assert shapes == [40] and not close(changed, wanted), "asked once, of all rows, and its answer counts"
        if module is network:
            assert close(changed, -wanted)


def test_torch_func_passes_through_where_chunks_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    network, _ = rowwise(True, True, True)
    tables = {name: table.detach() for name, table in network.named_parameters()}
    Z, tangent = torch.randn(2, 3, 6, 3, dtype=torch.float64)

    def total(x: Tensor) -> Tensor:
        return network(x).sum()

    def by_tables(given: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(network, given, (Z,)).sum()

    wanted, slopes = network(Z), torch.func.grad(by_tables)(tables)
    steep = torch.func.jvp(total, (Z,), (tangent,))[1]
    chunks(monkeypatch, 61)
    assert close(torch.func.vmap(network)(Z), wanted)
    assert close((torch.func.grad(total)(Z) * tangent).sum(), steep)
    assert close(torch.func.jvp(total, (Z,), (tangent,))[1], steep)
    again = torch.func.grad(by_tables)(tables)
    assert all(close(again[name], slope) for name, slope in slopes.items())


def test_gradients_of_gradients_pass_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    network, _ = rowwise(True, True, True)
    points = torch.randn(4, 6, 3, dtype=torch.float64)

    def penalised() -> tuple[Tensor, ...]:
        Z = points.clone().requires_grad_()
        (slope,) = torch.autograd.grad(network(Z).square().sum(), Z, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), [Z, *network.parameters()], allow_unused=True)

    whole = penalised()
    chunks(monkeypatch, 61)
    for found, wanted in zip(penalised(), whole, strict=True):
        assert found is wanted is None or close(found, wanted)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_tables_that_pick_rows_are_products_with_them(
    shared: bool, several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, _ = rowwise(shared, False, True)
    with torch.no_grad():
        for name, table in network.named_parameters():
            if name.split(".")[-1] in ("W_Q", "W_V", "W_O", "S"):  # at most one entry for each result; some have none
                inputs = table.movedim(-2, 0) if "W_O" not in name else table.flatten(0, 1)
                place = torch.randint(-1, len(inputs), inputs.shape[1:])
                inputs[place != torch.arange(len(inputs)).view(-1, *[1] * place.dim())] = 0.0
                inputs[:2] += several  # two entries: a sum is not left out
    Z = torch.randn(40, 3, dtype=torch.float64)
    wanted = network(Z)
    picked: list[bool] = []  # whether there was more than one channel to pick from
    watched = attnforge.network._picking

    def counted(place: Tensor, scale: Tensor) -> Any:
        picked.append(bool(place.any()))
        return watched(place, scale)

    monkeypatch.setattr(attnforge.network, "_picking", counted)
    monkeypatch.setattr(attnforge.network, "PICKED", 1)
    chunks(monkeypatch, 61)
    assert close(network(Z), wanted) and any(picked) != several


@pytest.mark.parametrize("most", [0, 10_000])
def test_what_is_unrolled_is_what_eager_takes(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attnforge.network, "UNROLLED", most)  # beyond it every slot is written out, for all heads
    torch.compiler.reset()
    network, _ = rowwise(False, False, True)
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    Z = torch.randn(5, 3, dtype=torch.float64)
    with torch.no_grad():
        assert close(compiled(Z), network(Z))
        with pytest.raises(RuntimeError, match="dtype"):
            network(Z.float())
        with pytest.raises((RuntimeError, TypeError), match="dtype"):
            compiled(Z.float())
    group = Heads("self", **weights("self", 2, 3, 2, 2, 3, 2, False, constant_keys=True))  # type: ignore[arg-type]
    group.b_V = group.b_Q  # one table under two names
    tied = AttentionOnly([AttentionLayer([group])])
    assert close(tied.unrolled(Z), tied(Z))


def one(*shape: int) -> Tensor:
    return torch.ones(*shape)


MEMORY: dict[str, Any] = dict(W_Q=one(2, 3, 1), W_O=one(2, 1, 1), M_K=one(2, 4, 1), M_V=one(2, 4, 1))
SELF: dict[str, Any] = dict(W_Q=one(2, 3, 1), W_O=one(2, 1, 1), W_K=one(2, 3, 1), W_V=one(2, 3, 1))


@pytest.mark.parametrize(
    ("scope", "given", "words"),
    [
        ("everything", MEMORY, "scope must be"),
        ("memory", {**MEMORY, "W_Q": one(3, 1)}, "W_Q must have 3 dimensions"),
        ("memory", {**MEMORY, "b_Q": one(1)}, "b_Q must have 2 dimensions"),
        ("memory", {**MEMORY, "M_V": one(3, 4, 1)}, "M_V is for 3 heads"),
        ("memory", {**MEMORY, "M_V": None}, "both M_K and M_V"),
        ("memory", {**MEMORY, "M_K": None, "M_V": None}, "only memory slots"),
        ("memory", {**MEMORY, "W_K": one(2, 3, 1)}, "no token slots"),
        ("memory", {**MEMORY, "b_V": one(2, 1)}, "no token slots"),
        ("self", {**SELF, "W_K": None}, "needs token keys"),
        ("tokens", {**SELF, "W_V": None}, "needs token keys"),
        ("memory", {**MEMORY, "M_K": one(2, 4, 2)}, "key"),
        ("memory", {**MEMORY, "b_Q": one(2, 2)}, "key"),
        ("self", {**SELF, "W_K": one(2, 3, 2)}, "key"),
        ("memory", {**MEMORY, "M_V": one(2, 4, 2)}, "value"),
        ("self", {**SELF, "W_O": one(2, 2, 1)}, "value"),
        ("memory", {**MEMORY, "M_K": one(2, 5, 1)}, "slots"),
        ("self", {**SELF, "W_V": one(2, 4, 1)}, "channels"),
    ],
)
def test_tables_that_do_not_fit_are_refused(scope: Any, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Heads(scope, **given)


def test_an_empty_layer_is_refused() -> None:
    with pytest.raises(ArgumentError, match="heads or a linear skip"):
        AttentionLayer([])


def test_weights_are_copied_and_trainable() -> None:
    table = one(2, 4, 1)
    group = Heads("memory", **{**MEMORY, "M_V": table})
    table += 1
    assert float(group.M_V.detach().sum()) == 8.0 and all(p.requires_grad for p in group.parameters())


def test_far_logits_underflow_to_an_exact_zero() -> None:
    for dtype, omega in ((torch.float32, 104.0), (torch.float64, 745.2)):
        key = torch.tensor([[[0.0], [-omega]]], dtype=dtype)
        value = torch.tensor([[[1.0], [math.pi]]], dtype=dtype)
        unit = torch.ones(1, 1, 1, dtype=dtype)
        group = Heads("memory", W_Q=unit, M_K=key, M_V=value, W_O=unit)
        assert group(unit[0]).item() == 1.0
