"""Ramps by one head and by many: the bound holds everywhere, the matrices are the theorem's, bad input is named."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import attnforge as af
from attnforge import theorems
from attnforge.errors import ArgumentError, CertificateError, DomainError, PrecisionError
from attnforge.network import Heads
from attnforge.theorems import Ramp
from attnforge.theorems.bounds import seams
from attnforge.theorems.slots import Registers

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def inputs(m: Any, tokens: int, seed: int, rows: int = 60) -> Tensor:
    """Tokens drawn from the box, and tokens whose y lies at anchors, between them, and at the ends."""
    d, dtype, radius = m.w.shape[-1], m.dtype, m.radius
    generator = torch.Generator().manual_seed(seed)
    X = (2 * torch.rand(rows, tokens, d, generator=generator, dtype=torch.float64) - 1) * radius
    w, t = m.w.detach().double().expand(tokens, d), m.t.detach().double().expand(tokens)
    norm = (w * w).sum(-1).clamp_min(1e-300)
    step = (m.anchors[-1] - m.anchors[0]) / (len(m.anchors) - 1)
    picks = torch.randint(0, len(m.anchors), (rows, tokens), generator=generator)
    kappa = max(getattr(m, "kappa", 2.0), 1.0)
    worst = math.log(2 * kappa) / (2 * kappa)  # where a cold head errs most, from the middle
    shifts = torch.tensor([0.0, 0.5, 0.5 - worst, 0.5 + worst, 1e-7, 0.5 - 1e-6, 0.5 + 1e-6])
    wanted = torch.from_numpy(np.asarray(m.anchors))[picks]
    wanted = wanted + step * shifts[torch.randint(0, len(shifts), (rows, tokens), generator=generator)]
    aimed = X + ((wanted - (X * w).sum(-1) - t) / norm).unsqueeze(-1) * w  # now w.x + t is what was wanted
    both = torch.cat([X, aimed]).clamp(-radius, radius).to(dtype)
    return both.clamp(-radius, radius)


def worst(m: Any, X: Tensor, keep: Tensor | None = None) -> float:
    with torch.no_grad():
        error = (m(X).double() - m.target(X)).abs().amax(-1)
    return float(error.max() if keep is None else error[keep].max())


numbers = st.floats(-30, 30)


@st.composite
def ramps(draw: Any) -> dict[str, Any]:
    d, dtype = draw(st.integers(1, 6)), DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    seed, scale = draw(st.integers(0, 10**6)), draw(st.sampled_from([0.1, 1.0, 7.0]))
    n = draw(st.integers(3, 12))
    per_token = draw(st.booleans())
    generator = torch.Generator().manual_seed(seed)
    w = scale * torch.randn((n, d) if per_token else (d,), generator=generator, dtype=torch.float64)
    a = draw(numbers)
    return {
        "w": w.to(dtype), "t": torch.randn((n,) if per_token else (), generator=generator).to(dtype),
        "a": a, "b": a + draw(st.floats(0.1, 60)), "n": n, "seed": seed, "per_token": per_token,
        "eps0": draw(st.sampled_from([1e-9, 1e-4, 0.3])),
    }  # fmt: skip


@given(ramps(), st.integers(12, 90), st.sampled_from(["paper", "tokens"]))
@settings(max_examples=40)
def test_one_head_stays_within_its_bound(case: dict[str, Any], p: int, form: str) -> None:
    n, seed, per_token = (case.pop(key) for key in ("n", "seed", "per_token"))
    if per_token and form == "tokens":
        with pytest.raises(ArgumentError, match="shares its weights between tokens"):
            theorems.ramp(anchors=p, form=form, **case)
        return
    m = theorems.ramp(anchors=p, form=form, **case)
    assert m.form == form and m.paper_bound is not None
    assert worst(m, inputs(m, n, seed)) <= m.bound
    step = (case["b"] - case["a"]) / (p - 1)
    if m.dtype == torch.float64:
        assert step / 2 <= m.bound <= step / 2 * (1 + 1e-6) + 1e-9 <= m.paper_bound


@given(ramps(), st.integers(1, 9), st.sampled_from(["paper", "tokens"]))
@settings(max_examples=30)
def test_many_heads_stay_within_their_bound(case: dict[str, Any], heads: int, form: str) -> None:
    n, seed, per_token = (case.pop(key) for key in ("n", "seed", "per_token"))
    if per_token and form == "tokens":
        case["w"], case["t"] = case["w"][0], case["t"][0]
    try:
        m = theorems.ramp_heads(heads=heads, tokens=n, form=form, **case)
    except PrecisionError:  # a bound that says nothing: leaks of 0.3, or float32 seams far from 0
        m = None
    if m is None:
        assert case["eps0"] == 0.3 or case["w"].dtype == torch.float32
        return
    assert worst(m, inputs(m, n, seed)) <= m.bound
    if m.dtype == torch.float64:
        assert m.bound <= m.paper_bound * (1 + 1e-9)


@given(ramps(), st.sampled_from(["warm", "gate"]))
@settings(max_examples=6)
def test_variants_stay_within_their_bound(case: dict[str, Any], variant: str) -> None:
    n, seed, _ = (case.pop(key) for key in ("n", "seed", "per_token"))
    w, t = (case[key][0] if case[key].dim() > dim else case[key] for key, dim in (("w", 1), ("t", 0)))
    m = theorems.ramp(w, t, case["a"], case["b"], anchors=40, variant=variant)
    assert worst(m, inputs(m, n, seed)) <= m.bound
    cold = theorems.ramp(w, t, case["a"], case["b"], anchors=40, form="tokens")
    assert m.bound < (0.2 if variant == "warm" else 0.05) * cold.bound
    X = inputs(m, n, seed)[:2]
    assert m.attention(X).sum(-1).allclose(torch.ones((), dtype=m.dtype))


def by_the_paper(matrices: dict[str, Tensor], X: Tensor) -> Tensor:
    """The theorems' formula on columns, word by word; the output as (tokens, channels)."""
    Z = torch.einsum("cpnd,nd->cp", matrices["A"], X) + matrices["A_0"]
    if matrices["W_K"].dim() == 2:
        S = torch.softmax((matrices["W_K"] @ Z).T @ (matrices["W_Q"] @ Z), dim=0)
        return (matrices["W_V"] @ Z @ S @ matrices["W_O"]).T
    out = 0.0
    for W_K, W_Q, W_V, W_O in zip(*(matrices[k] for k in ("W_K", "W_Q", "W_V", "W_O")), strict=True):
        out = out + W_O @ (W_V @ Z) @ torch.softmax((W_K @ Z).T @ (W_Q @ Z), dim=0)
    return out.T


@pytest.mark.parametrize("per_token", [False, True])
def test_matrices_multiply_out_to_the_network(per_token: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    n, d = 5, 3
    w = torch.randn((n, d) if per_token else (d,), generator=generator, dtype=torch.float64)
    t = torch.randn((n,) if per_token else (), generator=generator, dtype=torch.float64)
    one = theorems.ramp(w, t, -2, 3, anchors=17, channels=4)
    many = theorems.ramp_heads(w, t, -2, 3, heads=3, tokens=n, channels=2)
    for m in (one, many):
        X = inputs(m, n, 1)[:20]
        X = X[:, : m.tokens_shown()] if m is one else X
        for x, expected in zip(X, m(X), strict=True):
            assert torch.allclose(by_the_paper(m.matrices, x), expected, atol=1e-8)
    assert set(one.matrices) == {"A", "A_0", "W_K", "W_Q", "W_V", "W_O"}
    assert one.matrices["W_O"].shape == (17, one.tokens_shown())


def test_token_matrices_multiply_out() -> None:
    m = theorems.ramp([1.0, -2.0], 0.3, -1, 2, anchors=12, form="tokens")
    X, M = inputs(m, 4, 0)[:7], m.matrices
    query = X @ M["W_Q"].T + M["b_Q"]
    assert torch.allclose(torch.softmax(query @ M["M_K"].T, -1) @ M["M_V"] @ M["W_O"], m(X), atol=1e-10)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_the_papers_bound_fails_in_float32_and_ours_does_not(dtype: torch.dtype) -> None:
    w = torch.tensor([1.0], dtype=dtype)
    m = theorems.ramp(w, 0.0, -25, 25, anchors=4096, radius=25.0)
    y = (50 * torch.rand(10, 500, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 25).to(dtype)
    error = worst(m, y)
    assert error <= m.bound
    assert (error > m.paper_bound) == (dtype == torch.float32)
    assert (m.bound > m.paper_bound) == (dtype == torch.float32)


def test_channel_map_and_its_excluded_set() -> None:
    G = [0, 0, 1, 1, 2, 0, 0, 1, 2, 2, 2, 0]
    m = theorems.ramp([1.0], 0.0, -3, 3, anchors=12, G=G)
    assert isinstance(m, Ramp) and len(m.excluded) == 6
    y = torch.linspace(-4, 4, 20001, dtype=torch.float64).reshape(-1, 1, 1)
    keep = torch.ones(len(y), 1, dtype=torch.bool)
    for low, high in m.excluded:
        keep &= ~((y[..., 0] > low) & (y[..., 0] < high))
    assert m(y).shape == (20001, 1, 3)
    assert 0.9 < keep.double().mean() < 1
    assert worst(m, y, keep) <= m.bound < worst(m, y, ~keep), "the excluded set is where no bound can hold"
    constant = theorems.ramp([1.0], 0.0, -3, 3, anchors=12, G=2, channels=5)
    assert constant.excluded == () and bool((constant(y)[..., [0, 1, 3, 4]] == 0).all())
    assert worst(constant, y) <= constant.bound


def test_instances() -> None:
    w, X = torch.tensor([1.0, -2.0, 0.5]), torch.rand(200, 6, 3) * 2 - 1
    y = X.double() @ w.double() + 0.25
    functions = {
        "relu": (theorems.relu(w, 0.25, 1.0, anchors=200), y.relu()),
        "leaky": (theorems.leaky_relu(w, 0.25, 1.0, anchors=200, slope=0.2), torch.where(y > 0, y, 0.2 * y)),
        "hard_tanh": (theorems.hard_tanh(w, 0.25, anchors=200), y.clamp(-1, 1)),
        "clipped": (theorems.clipped_relu(w, 0.25, 2.0, anchors=200), y.clamp(0, 2)),
        "tokens": (theorems.relu(w, 0.25, 1.0, anchors=200, form="tokens"), y.relu()),
        "gate": (theorems.relu(w, 0.25, 1.0, variant="gate"), y.relu()),
    }
    for name, (m, expected) in functions.items():
        error = float((m(X).detach()[..., 0].double() - expected).abs().max())
        assert error <= m.bound < 0.035, name


CAUSAL: dict[str, Any] = {
    "ramp": lambda causal: theorems.ramp([1.0, -1.0], 0.2, -2, 2, anchors=40, form="tokens", causal=causal),
    "warm": lambda causal: theorems.ramp([1.0, -1.0], 0.2, -2, 2, anchors=40, variant="warm", causal=causal),
    "leaky": lambda causal: theorems.leaky_relu([1.0, -1.0], 0.2, 1.0, anchors=40, form="tokens", causal=causal),
    "G": lambda causal: theorems.ramp(
        [1.0, -1.0], 0.2, -2, 2, anchors=40, form="tokens", causal=causal, G=lambda k: k // 20
    ),
    "warm heads": lambda causal: theorems.ramp_heads(
        [1.0, -1.0], 0.2, -2, 2, heads=3, tokens=9, variant="warm", causal=causal
    ),
    "heads": lambda causal: theorems.ramp_heads(
        [1.0, -1.0], 0.2, -2, 2, heads=5, tokens=8, form="tokens", channels=2, causal=causal
    ),
}


@pytest.mark.parametrize("name", sorted(CAUSAL))
def test_anchors_first_under_a_causal_mask(name: str) -> None:
    m, memory = CAUSAL[name](True), CAUSAL[name](False)
    X = inputs(m, 6, 0)[:50].clamp(-m.radius, m.radius)
    rounding = sum(value for source, value in m.bound_terms.items() if source.endswith("rounding"))
    assert float((m(X) - memory(X)).detach().abs().max()) <= 2 * rounding, "the same head, but for the order of sums"
    assert m.bound == memory.bound
    changed = X.clone()
    changed[:, -1] = 0.0
    assert torch.equal(m(X)[:, :-1], m(changed)[:, :-1]), "no token sees a later one"
    assert m.attention(X).shape == memory.attention(X).shape
    assert torch.allclose(m.attention(X), memory.attention(X), rtol=0, atol=1e-10)
    assert af.purity(m).attention
    if not getattr(m, "excluded", ()):
        assert worst(m, X) <= m.bound


@pytest.mark.parametrize("name", ["ramp", "warm", "heads"])
def test_a_register_that_leaks_has_no_certificate(name: str) -> None:
    m = CAUSAL[name](True)
    layer = next(x for x in m.modules() if isinstance(x, Registers))
    with torch.no_grad():
        layer.heads.W_K[..., layer.d, -1] = 1e9  # data tokens are keys now
    X = inputs(m, 6, 0)[:50]
    assert worst(m, X) > CAUSAL[name](True).bound, "the change does harm"
    with pytest.raises(CertificateError, match="registers from data"):
        af.certify(m)


@pytest.mark.parametrize("table", ["W_Q", "W_O"])
def test_weights_around_the_anchors_are_checked(table: str) -> None:
    for name in ("ramp", "warm", "heads"):
        m = CAUSAL[name](False)
        group = next(x for x in m.modules() if isinstance(x, Heads))
        with torch.no_grad():
            getattr(group, table)[0] *= 1.25
        if name == "ramp" and table == "W_Q":
            af.certify(m)  # the query is w itself here: a wrong one is paid for
            assert worst(m, inputs(m, 6, 0)) <= m.bound
        else:
            with pytest.raises((CertificateError, ArgumentError)):
                af.certify(m)


@given(ramps(), st.integers(1, 9), st.booleans())
@settings(max_examples=10)
def test_warm_heads_stay_within_their_bound(case: dict[str, Any], heads: int, causal: bool) -> None:
    n, seed, _ = (case.pop(key) for key in ("n", "seed", "per_token"))
    w, t = (case[key][0] if case[key].dim() > dim else case[key] for key, dim in (("w", 1), ("t", 0)))
    m = theorems.ramp_heads(w, t, case["a"], case["b"], heads=heads, tokens=9, variant="warm", causal=causal)
    X = inputs(m, n, seed)
    assert worst(m, X) <= m.bound < 0.4 * float(m.step), "a cold head errs by half of a spacing"
    if m.dtype == torch.float64:
        assert m.bound < 0.13 * float(m.step)
    assert m.attention(X[:2]).shape == (2, heads, n, 9)
    assert m.size.heads == heads and (heads == 1 or af.purity(m).attention)


def test_warm_heads_need_room_and_say_so() -> None:
    with pytest.raises(ArgumentError, match="at least 6 for warm heads"):
        theorems.ramp_heads([1.0], 0.0, 0, 1, heads=2, tokens=5, variant="warm")
    with pytest.raises(ArgumentError, match="variant must be 'cold' or 'warm'"):
        theorems.ramp_heads([1.0], 0.0, 0, 1, heads=2, tokens=9, variant="gate")
    with pytest.raises(ArgumentError, match="shares its weights between tokens"):
        theorems.ramp_heads([[1.0]] * 9, 0.0, 0, 1, heads=2, tokens=9, variant="warm")


def test_what_has_no_causal_form_is_refused() -> None:
    with pytest.raises(ArgumentError, match="anchors come first"):
        theorems.ramp([1.0], 0.0, 0, 1, anchors=9, causal=True)
    with pytest.raises(ArgumentError, match="anchors come first"):
        theorems.ramp_heads([1.0], 0.0, 0, 1, heads=2, tokens=5, causal=True)
    with pytest.raises(ArgumentError, match="causal as it is"):
        theorems.ramp([1.0], 0.0, 0, 1, variant="gate", causal=True)


def test_networks_are_attention_only() -> None:
    for m in (
        theorems.ramp_heads([1.0, 2.0], 0.1, -1, 1, heads=2, tokens=5, form="tokens"),
        theorems.ramp([1.0, 2.0], 0.1, -1, 1, anchors=9, form="tokens"),
        theorems.ramp([1.0, 2.0], 0.1, -1, 1, variant="gate"),
    ):
        assert af.purity(m).attention


def test_attention_is_nearly_one_hot_when_cold() -> None:
    m = theorems.ramp([1.0], 0.0, 0, 1, anchors=11)
    at = m.attention(torch.tensor([[[0.3], [0.71], [0.35]]], dtype=torch.float64))[0].detach()
    assert at.argmax(-1).tolist()[:2] == [3, 7] and bool((at.amax(-1)[:2] > 0.999).all())
    assert abs(float(at[2, 3]) - 0.5) < 1e-6, "a tie is shared"


def test_seams_cover_what_is_measured() -> None:
    for kappa in (1.0, 1.7, 3.0):
        for own in (1, 2, 5):
            count = own * 4 + 2
            y = np.linspace(-3, count + 2, 3001)[:, None]
            logits = -kappa * (y - np.arange(count)) ** 2
            full, total = _softmax(logits), np.zeros(len(y))
            for h in range(4):
                window = slice(h * own, h * own + own + 2)
                live = slice(0 if h == 0 else 1, own + 2 if h == 3 else own + 1)
                out = full[:, : window.start].sum(1) + full[:, window.stop :].sum(1)
                total += _softmax(logits[:, window])[:, live].sum(1) * out
            assert total.max() <= seams(kappa, own, 4)


def _softmax(x: Any) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("name", ["index", "square", "value", "B"])
def test_a_sabotaged_weight_is_noticed(name: str) -> None:
    m = theorems.ramp([1.0], 0.0, -1, 1, anchors=21, radius=2.0)
    X = torch.linspace(-2, 2, 4001, dtype=torch.float64).reshape(1, 4001, 1)[:, ::200]
    dense = torch.linspace(-2, 2, 8001, dtype=torch.float64).reshape(-1, 1, 1)
    before = m.bound
    with torch.no_grad():
        getattr(m, name).reshape(-1, 1)[0 if name == "B" else 9] *= 0.01 if name == "B" else 1.3
    with pytest.raises(CertificateError, match="stale"):
        _ = m.bound
    assert worst(m, dense) > before, "the change does harm"
    try:
        af.certify(m)
    except PrecisionError:
        return
    assert worst(m, dense) <= m.bound and m.bound > before and worst(m, X) <= m.bound


BAD: list[tuple[dict[str, Any], str]] = [
    ({"a": 1.0, "b": 1.0}, "a must be smaller than b"),
    ({"a": 2.0, "b": 1.0}, "a must be smaller than b"),
    ({"a": math.nan}, "a must be finite"),
    ({"b": "x"}, "b must be a number"),
    ({"anchors": 2}, "anchors must be a whole number, at least 3"),
    ({"anchors": 7.5}, "anchors must be a whole number"),
    ({"eps0": 0.0}, "eps0 must be positive"),
    ({"eps0": 0.5}, "eps0 must be at most 0.36"),
    ({"w": [[[1.0]]]}, r"w must have shape \(d,\)"),
    ({"w": [1.0, math.inf]}, "w must be finite"),
    ({"w": "ab"}, "w must be a number, a list or a tensor"),
    ({"w": [[1.0], [2.0]], "t": [1.0, 2.0, 3.0]}, "w is for 2 tokens and t for 3"),
    ({"t": [[1.0]]}, "t must be a number"),
    ({"form": "plain"}, "form must be"),
    ({"variant": "hot"}, "variant must be one of"),
    ({"kappa": 0.5}, "kappa must be at least 1"),
    ({"G": [0, 1]}, "G must name a channel for each of the 16 anchors"),
    ({"G": -1}, "G must map anchors to channels"),
    ({"G": 3, "channels": 2}, "G sends an anchor to channel 3"),
    ({"radius": -1.0}, "radius must be positive"),
    ({"w": [[1.0]] * 20, "anchors": 16}, r"anchors must be at least the number of tokens \(20\)"),
    ({"w": torch.ones(2, dtype=torch.float16)}, "w must be float32 or float64"),
    ({"w": [[1.0], [2.0]], "variant": "gate"}, "shares its weights"),
]


@pytest.mark.parametrize(("change", "words"), BAD, ids=lambda x: str(x)[:40])
def test_bad_input_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        theorems.ramp(**{"w": [1.0, 2.0], "t": 0.0, "a": -1.0, "b": 1.0, "anchors": 16, **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": 0}, r"heads must be a whole number, at least 1"),
        ({"tokens": 2}, r"tokens must be a whole number, at least 3"),
        ({"w": [[1.0]] * 4}, "w is for 4 tokens, tokens = 5"),
        ({"a": 3.0}, "a must be smaller than b"),
        ({"channels": 0}, "channels"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_bad_input_of_many_heads_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        theorems.ramp_heads(**{"w": [1.0], "t": 0.0, "a": -1.0, "b": 1.0, "heads": 2, "tokens": 5, **change})


def test_wrong_tensors_are_named() -> None:
    m = theorems.ramp([1.0, 2.0], 0.0, -1, 1, anchors=5)
    for X, words in (
        (torch.zeros(1, 2, 3, dtype=torch.float64), r"expected X of shape \(batch, tokens, 2\)"),
        (torch.zeros(1, 6, 2, dtype=torch.float64), "at least as many anchors as tokens"),
        (torch.zeros(1, 2, 2), "float32"),
    ):
        with pytest.raises(ArgumentError, match=words):
            m(X)
    with pytest.raises(DomainError, match="NaN"):
        m(torch.full((1, 2, 2), math.nan, dtype=torch.float64))
    with pytest.warns(af.DomainWarning, match="outside"):
        m(torch.full((1, 2, 2), 1e6, dtype=torch.float64))


def test_float32_refuses_when_nothing_is_left() -> None:
    with pytest.raises(PrecisionError, match="float64") as caught:
        theorems.ramp_heads(torch.tensor([1.0]), 0.0, -25, 25, heads=64, tokens=50)
    assert caught.value.reachable is not None and caught.value.reachable > 25
    with pytest.raises(PrecisionError, match="float64"):
        theorems.ramp(torch.tensor([1.0]), 0.0, 1e6, 1e6 + 1, anchors=100)


def test_dtype_follows_w_and_nothing_is_lost_on_the_way() -> None:
    assert theorems.ramp([0.1], 0.3, -1, 1, anchors=5).dtype == torch.float64
    assert theorems.ramp([0.1], 0.3, -1, 1, anchors=5).t.item() == 0.3
    assert theorems.ramp(np.array([0.1], dtype=np.float32), 0.3, -1, 1, anchors=5).dtype == torch.float32
    assert theorems.ramp([1, 2], 0, -1, 1, anchors=5).dtype == torch.float64


def test_terms_add_up_and_size_counts() -> None:
    m = theorems.ramp([1.0, 2.0], 0.1, -1, 1, anchors=50)
    assert math.fsum(m.bound_terms.values()) <= m.bound <= math.fsum(m.bound_terms.values()) * (1 + 1e-9)
    assert m.size.anchors == 50 and m.size.heads == 1 and m.size.layers == 1
    X = m.points(500)
    y = m.scalar(X).unsqueeze(-1)
    table = m.table()
    largest = (y * torch.from_numpy(table.slope) + torch.from_numpy(table.offset)).abs().max()
    assert 0.2 * m.size.logit < float(largest) <= m.size.logit
    measured = m.measure(500, p=1.0)
    assert 0 < measured.mean < measured.largest <= m.bound and "L1" in str(measured)
