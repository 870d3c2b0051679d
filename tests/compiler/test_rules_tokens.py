"""Error rules of operations on and between tokens, against what perturbed arguments really do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnforge as af
from attnforge.compiler.pipeline import compile_program as build
from attnforge.compiler.propagation import Propagation
from attnforge.heads.families import rule_of
from attnforge.heads.rule import scaled, worst
from attnforge.programs.enclose import Range, ranges
from attnforge.programs.ops import Op
from attnforge.programs.program import Builder, Program

N, D, SOURCES = 3, 4, 2
Long = np.ndarray
MASK = np.array([[0.0, -np.inf, 0.5], [-0.25, 0.0, -1.0], [-np.inf, -np.inf, 0.0]])
MIXING = np.array([[1.0, -2.0, 0.0], [0.5, 0.0, 0.25], [0.0, 3.0, -0.125]])


def soft(z: Long) -> Long:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


#: One operation on the columns of a wide input: the family, how to build it, and the exact operation on its reads.
CASES: dict[str, tuple[str, Callable[[Builder, list[int]], int], int, Callable[..., Long]]] = {
    "softmax": ("softmax", lambda make, i: make.softmax(i[0]), 1, soft),
    "max": ("max", lambda make, i: make.max_tokens(i[0]), 1, lambda x: x.max(-2, keepdims=True) + 0 * x),
    "mix": ("mix", lambda make, i: make.mix(i[0], MIXING), 1, lambda x: MIXING.astype(np.longdouble) @ x),
    "norm": (
        "norm",
        lambda make, i: make.normalise(i[0], 0.01, centred=False),
        1,
        lambda x: x / np.sqrt((x**2).mean(-1, keepdims=True) + np.longdouble(0.01)),
    ),
    "attention": (
        "attention",
        lambda make, i: make.attention(i[0], i[1], i[2], scale=0.7),
        3,
        lambda q, k, v: soft(np.longdouble(0.7) * q @ k.swapaxes(-1, -2)) @ v,
    ),
    "causal": (
        "attention",
        lambda make, i: make.attention(i[0], i[1], i[2], scale=-0.5, causal=True),
        3,
        lambda q, k, v: soft(np.longdouble(-0.5) * q @ k.swapaxes(-1, -2) + np.triu(np.full((N, N), -np.inf), 1)) @ v,
    ),
    "masked": (
        "attention",
        lambda make, i: make.attention(i[0], i[1], i[2], scale=0.7, mask=MASK),
        3,
        lambda q, k, v: soft(np.longdouble(0.7) * q @ k.swapaxes(-1, -2) + MASK) @ v,
    ),
}


def compiled(name: str) -> tuple[Propagation, Program, int]:
    _, make_op, count, _ = CASES[name]
    make = Builder(af.Box.cube(-4, 4, shape=(N, count * D)), tokens=N)
    picks = [make.linear([(0, np.eye(count * D)[:, k * D : (k + 1) * D])], np.zeros(D)) for k in range(count)]
    net = build(make.program(make_op(make, picks), name), 1.0, torch.float64)
    return net.analyse()[0], net.program, net.layout.sites[0].op


def passes(
    propagation: Propagation, family: str, op: int, reads: list[Range], errors: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """The family's rule for one operation of the compiled network."""
    site = next(site for site in propagation.layout.sites if site.op == op)
    assert site.family == family
    return rule_of(family).passes(site, propagation.setting, propagation.local[op], reads, errors)


def dyadic(x: np.ndarray) -> np.ndarray:
    """Numbers with few bits: their sums and simple multiples are exact in long double."""
    return np.round(x * 2.0**30) * 2.0**-30


BUILT = {name: compiled(name) for name in CASES}


@pytest.mark.parametrize("name", CASES)
@given(seed=st.integers(0, 10**6), decades=st.tuples(st.floats(-5, 0.3), st.floats(-7, 0)))
def test_what_is_passed_on_covers_what_happens(name: str, seed: int, decades: tuple[float, float]) -> None:
    """Exact arguments anywhere in their ranges, computed ones within the errors: the results differ by no more."""
    family, _, count, exact = CASES[name]
    propagation, program, op = BUILT[name]
    rng = np.random.default_rng(seed)
    width, size = (10.0**d for d in decades)
    middle = dyadic(rng.uniform(-1.5, 1.5, (count, 1, N, D)))
    half = dyadic(width * rng.random((count, 1, N, D)))
    reads = [Range(m - h, m + h) for m, h in zip(middle, half, strict=True)]
    errors = [dyadic(size * rng.random((1, N, D, SOURCES)) * (rng.random((1, N, D, 1)) < 0.7)) for _ in range(count)]
    if len(program.ops[1:]) > 1 and name in ("mix", "masked"):  # positions arrive exactly
        reads.append(Range(np.eye(N)[None], np.eye(N)[None]))
        errors.append(np.zeros((1, N, N, SOURCES)))
    with np.errstate(all="ignore"):
        passed, added = passes(propagation, family, op, reads, errors)
    bound = passed.sum(-1)[0]
    assert passed.shape == (1, N, D, SOURCES)
    assert np.all(added >= 0)
    total = np.stack([e.sum(-1)[0] for e in errors[:count]])
    for _ in range(40):
        at = (middle + half * rng.choice([-1.0, 1.0, 0.0, rng.uniform(-1, 1)], middle.shape))[:, 0]
        at = np.clip(dyadic(at), (middle - half)[:, 0], (middle + half)[:, 0])
        off = total * rng.choice([-1.0, 1.0], total.shape)
        before, after = (exact(*x.astype(np.longdouble)) for x in (at, at.astype(np.longdouble) + off))
        assert np.all(np.abs(after - before) <= bound)


@pytest.mark.parametrize("name", CASES)
def test_what_is_passed_on_is_not_far_from_what_happens(name: str) -> None:
    """At a point, for small errors, the largest change found is a fair share of the bound: the test above can fail."""
    family, _, count, exact = CASES[name]
    propagation, _, op = BUILT[name]
    rng = np.random.default_rng(1)
    middle = rng.uniform(-0.5, 0.5, (count, 1, N, D))
    errors = [np.full((1, N, D, SOURCES), 1e-6) for _ in range(count)]
    reads = [Range(m, m) for m in middle]
    if name in ("mix", "masked"):
        reads.append(Range(np.eye(N)[None], np.eye(N)[None]))
        errors.append(np.zeros((1, N, N, SOURCES)))
    bound = passes(propagation, family, op, reads, errors)[0].sum(-1)[0]
    before = exact(*middle[:, 0].astype(np.longdouble))
    found = np.zeros((N, D))
    for _ in range(3000):
        off = 2e-6 * rng.choice([-1.0, 1.0], (count, N, D))
        found = np.maximum(found, np.abs(exact(*(middle[:, 0].astype(np.longdouble) + off)) - before))
    assert found.max() > 0.05 * bound.max()


@given(seed=st.integers(0, 10**6), axis=st.sampled_from([1, 2]))
def test_the_worst_parts_add_up_to_the_largest_total(seed: int, axis: int) -> None:
    e = np.random.default_rng(seed).random((2, 3, 4, 5)) ** 8
    assert np.allclose(worst(e, axis).sum(-1), e.sum(-1).max(axis), rtol=1e-15)
    among = np.zeros((3, 4), dtype=bool)
    among[1, 2] = True
    only = among.any(1 if axis == 2 else 0)
    picked = np.moveaxis(worst(e, axis, among), 0, -1)[only]
    assert np.array_equal(np.moveaxis(picked, -1, 1)[0], e[:, 1, 2])


def test_scaled_parts_add_up_to_a_bound() -> None:
    parts = np.array([[1.0, 3.0], [0.0, 0.0], [1e-300, 1e-300]])
    bound = np.array([2.0, 5.0, 7.0])
    out = scaled(parts, bound)
    assert np.all(out.sum(-1) >= np.where(parts.any(-1), bound, 0.0))
    assert np.allclose(out, [[0.5, 1.5], [0.0, 0.0], [3.5, 3.5]], rtol=1e-13)


def test_leaving_what_was_certified_is_infinite() -> None:
    """A variance outside the fitted interval, and a mask that content can outweigh."""
    propagation, _, op = BUILT["norm"]
    far = np.full((1, N, D), 100.0)
    nothing = np.zeros((1, N, D, SOURCES))
    assert np.isinf(passes(propagation, "norm", op, [Range(far, far)], [nothing])[1]).all()
    near = np.full((1, N, D), 1.0)
    assert np.isfinite(passes(propagation, "norm", op, [Range(near, near)], [nothing])[1]).all()
    propagation, _, op = BUILT["masked"]
    eye = Range(np.eye(N)[None], np.eye(N)[None])
    values = np.arange(N * D, dtype=float).reshape(1, N, D)
    nowhere = [nothing] * 3 + [np.zeros((1, N, N, SOURCES))]
    reads = [Range(far, far), Range(far, far), Range(values, values), eye]
    added = passes(propagation, "attention", op, reads, nowhere)[1]
    assert (added[0, [0, 2]] >= 2 * D).all(), "tokens 0 and 2 have hidden keys, which may have taken all of the weight"
    assert (added[0, 1] < 1).all(), "token 1 sees everything"
    reads = [Range(0.01 * near, 0.01 * near)] * 2 + [Range(values, values), eye]
    added = passes(propagation, "attention", op, reads, nowhere)[1]
    assert (added < 1e-9).all(), "content that cannot outweigh the mask"


@given(seed=st.integers(0, 10**6), spread=st.floats(-3, 1))
def test_ranges_of_norms_and_attention_hold_their_values(seed: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    make = Builder(af.Box.cube(-3, 3, shape=(N, D)), tokens=N)
    outs = [
        make.normalise(0, 0.01, centred=False),
        make.normalise(0, 0.0, centred=True),
        make.attention(0, 0, 0, 0.8, mask=MASK),
        make.attention(0, 0, make.linear([(0, rng.normal(size=(D, D)))], rng.normal(size=D)), 0.1, causal=True),
        make.softmax(0),
        make.max_tokens(0),
    ]
    ops: list[Op] = make.ops
    total = make.linear([(i, np.eye(D)) for i in outs], np.zeros(D))
    program = make.program(total, "all of them")
    middle, half = rng.uniform(-1, 1, (5, N, D)), 10.0**spread * rng.random((5, N, D))
    found = ranges(program, middle - half, middle + half)
    from attnforge.programs.interpret import every_value

    for _ in range(20):
        x = torch.from_numpy(
            np.clip(middle + half * rng.uniform(-1.3, 1.3, middle.shape), middle - half, middle + half)
        )
        for value, r in zip(every_value(program, x), found, strict=True):
            slack = 1e-13 * np.maximum(1.0, np.abs(value.numpy()))  # of this evaluation, not of the range
            assert np.all(r.low - slack <= value.numpy())
            assert np.all(value.numpy() <= r.high + slack)
    assert len(ops) == len(program.ops)
