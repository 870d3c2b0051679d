"""Errors seen from the output (lemma H8): differences of every operation lie in what its influence says."""

from __future__ import annotations

from collections.abc import Callable

import mpmath
import numpy as np
import pytest
import torch

import attnforge as af
from attnforge.compiler.adjoint import BACK, Influence, behind, derivatives
from attnforge.compiler.course import Course
from attnforge.compiler.propagation import Propagation
from attnforge.functions.registry import get
from attnforge.programs.enclose import Range, ranges
from attnforge.programs.ops import (
    OPS,
    Apply,
    Attention,
    Constant,
    Input,
    Linear,
    MaxTokens,
    Mix,
    Normalise,
    Op,
    Product,
)
from attnforge.programs.ops import Softmax as Soft

N, D, OUT = 3, 4, 2
Long = np.ndarray
MASK = np.array([[0.0, -np.inf, 0.5], [-0.25, 0.0, -1.0], [-np.inf, -np.inf, 0.0]])
MIXING = np.array([[1.0, -2.0, 0.0], [0.5, 0.0, 0.25], [0.0, 3.0, -0.125]])


def soft(z: Long) -> Long:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attend(mask: Long) -> Callable[..., Long]:
    return lambda q, k, v: soft(np.longdouble(0.7) * q @ k.swapaxes(-1, -2) + mask) @ v


CASES: dict[str, tuple[Op, int, Callable[..., Long]]] = {
    "tanh": (Apply(0, "tanh", D), 1, np.tanh),
    "relu": (Apply(0, "relu", D), 1, lambda x: np.maximum(x, 0)),
    "product": (Product(0, 1, D), 2, lambda x, y: x * y),
    "softmax": (Soft(0, D), 1, soft),
    "max": (MaxTokens(0, D), 1, lambda x: x.max(-2, keepdims=True) + 0 * x),
    "mix": (Mix(0, MIXING, D), 1, lambda x: MIXING.astype(np.longdouble) @ x),
    "norm": (
        Normalise(0, D, 0.01, False), 1, lambda x: x / np.sqrt((x**2).mean(-1, keepdims=True) + np.longdouble(0.01))
    ),
    "attention": (Attention(0, 1, 2, D, 0.7), 3, attend(np.zeros((N, N)))),
    "masked": (Attention(0, 1, 2, D, 0.7, mask=MASK), 3, attend(MASK)),
}  # fmt: skip


def test_every_operation_of_heads_has_a_rule() -> None:
    assert set(BACK) == set(OPS) - {Input, Constant, Linear}


def sampled(name: str, size: float, wide: float, seed: int) -> tuple[float, float]:
    """The largest difference of a functional of an operation's results, over what its influence allows; and how much of
    the allowance is used at most."""
    op, count, run = CASES[name]
    rng = np.random.default_rng(seed)
    centres = [rng.normal(size=(1, N, D)) * size for _ in range(count)]
    half = wide * size * rng.uniform(0, 1, (1, N, D))
    arguments = [Range(c - half, c + half) for c in centres]
    middle, radius = rng.normal(size=(1, OUT, N, D)), 0.3 * rng.uniform(size=(1, OUT, N, D)) * (rng.uniform() < 0.5)
    back = BACK[type(op)](op, arguments, Influence(middle, radius))
    worst, used = -np.inf, 0.0
    for i in range(40):
        first, last = ([c + half * rng.choice([-1, 1, rng.uniform(-1, 1)], c.shape) for c in centres] for _ in "ab")
        if i % 2:  # close to each other: a derivative
            last = [a + 1e-6 * (b - a) for a, b in zip(first, last, strict=True)]
        after = middle + radius * rng.choice([-1, 1], radius.shape)
        ends = [run(*(x.astype(np.longdouble) for x in xs)) for xs in (first, last)]
        moved = (after * (ends[1] - ends[0])[:, None]).sum((2, 3))
        steps = [(b - a)[:, None] for a, b in zip(first, last, strict=True)]
        said = sum((b.middle * s).sum((2, 3)) for b, s in zip(back, steps, strict=True))
        room = sum((b.radius * np.abs(s)).sum((2, 3)) for b, s in zip(back, steps, strict=True))
        scale = sum((b.size * np.abs(s)).sum((2, 3)) for b, s in zip(back, steps, strict=True))
        worst = max(worst, float((np.abs(moved - said) - room - 1e-12 * scale).max()))
        used = max(used, float((np.abs(moved - said) / np.where(room > 0, room, np.inf)).max()))
    return worst, used


@pytest.mark.parametrize("name", CASES)
def test_differences_lie_in_what_an_influence_says(name: str) -> None:
    most = 0.0
    for seed in range(3):
        for size in (0.01, 1.0, 5.0):
            for wide in (0.0, 0.01, 1.0, 3.0):
                worst, used = sampled(name, size, wide, seed)
                assert worst <= 0, (name, size, wide)
                most = max(most, used)
    assert most > 0.05 or name == "mix"  # it says something; a mixing is linear, and no more than rounding is left


def test_derivatives_beyond_a_domain_and_without_bounds() -> None:
    root = get("sqrt")
    low, high = derivatives(root, np.array([-1.0, 1.0]), np.array([4.0, 4.0]))
    assert high[0] == np.inf and low[1] <= 0.25 and high[1] >= 0.5
    low, high = derivatives(get("relu"), np.array([-1.0, 1.0, -2.0]), np.array([1.0, 2.0, -1.0]))
    assert (low <= [0, 1, 0]).all() and (high >= [1, 1, 0]).all() and low[1] > 0.9 and high[2] < 0.1
    assert np.isneginf(derivatives(root, np.array([0.0]), np.array([np.inf]))[0]).all()


def test_signs_are_kept_where_forward_rules_lose_them() -> None:
    """Every neuron of the first layer errs by 1e-4: what comes of it is a product with W2 W1, not with |W2| |W1|."""
    torch.manual_seed(0)
    layers = (torch.nn.Linear(3, 12), torch.nn.Tanh(), torch.nn.Linear(12, 12), torch.nn.Tanh(), torch.nn.Linear(12, 1))
    module = torch.nn.Sequential(*layers)
    net = af.compile(module, af.Box.cube(-0.1, 0.1, 3), 1e-5)
    slopes = layers[4].weight @ layers[2].weight
    with torch.no_grad():
        net.network.layers[0].s += 1e-4 * slopes[0].sign()  # tanh' is close to 1 here
    propagation, course = Propagation(net.reading(0.1)), Course([], [], {})
    low = np.full((1, 1, 3), -0.1)
    with np.errstate(invalid="ignore"):
        found = ranges(net.program, low, -low)
        forward = propagation.errors(found, course)
        backward = behind(net.layout, propagation.reading, found, course)
        outcome = propagation.run(found)
    assert backward is not None and outcome.largest[0] <= backward.sum() * (1 + 1e-9) and outcome.gain[0] > 1.5
    with torch.no_grad():
        x = net.box.sample(2000, dtype=torch.float32)
        measured = float((net.network(x).double() - module.double()(x.double())).abs().max())
    assert 0.8 * backward.sum() < measured <= backward.sum() < 0.6 * forward.sum()


class Faint(torch.nn.Module):
    """1e-170 sin(1e-170 exp(x + 391.4) + x): the output moves by 1e-340 of what exp errs, which is no float64."""

    def __init__(self) -> None:
        super().__init__()
        self.least, self.shift = (torch.nn.Parameter(torch.tensor(x, dtype=torch.float64)) for x in (1e-170, 391.4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.least * torch.sin(self.least * torch.exp(x + self.shift) + x)


def test_influences_that_underflow_are_no_zeros() -> None:
    """The error that exp adds is 1e154: 4.6e-184 of it reaches the output, where 4.5e-184 was certified once."""
    net = af.compile(Faint(), af.Box.cube(-1, 0, shape=1), eps=1e-180, dtype="float64")
    x = torch.linspace(-1, 0, 300, dtype=torch.float64)[:, None]
    with mpmath.workdps(60):
        least, shift = mpmath.mpf(1e-170), mpmath.mpf(391.4)
        wanted = [least * mpmath.sin(least * mpmath.exp(mpmath.mpf(t) + shift) + t) for t in x.flatten().tolist()]
        worst = float(max(abs(a - mpmath.mpf(b)) for a, b in zip(wanted, net(x).flatten().tolist(), strict=True)))
    assert net.bound is not None and 4e-184 < worst <= net.bound


def test_what_is_not_known_is_never_taken_for_nothing() -> None:
    """Logits so wide that their exponentials underflow, rows that may be 0 without eps, slopes without bounds."""
    ones = Influence(np.ones((1, 1, N, D)), np.zeros((1, 1, N, D)))
    far = Range(np.full((1, N, D), -1e3), np.full((1, N, D), 1e3))
    lost = Influence(np.zeros((1, 1, N, D)), np.full((1, 1, N, D), np.nan))
    with np.errstate(all="ignore"):
        for name, (op, count, _) in CASES.items():
            for part in BACK[type(op)](op, [far] * count, lost):
                assert not (part.size == 0).any() and not np.isfinite(part.size).all(), name
        for part in BACK[Attention](CASES["attention"][0], [far] * 3, ones):
            assert not (part.size == 0).any()
        bare = Normalise(0, D, 0.0, False)
        (part,) = BACK[Normalise](bare, [Range(far.low * 0 - 1, far.high * 0 + 1)], ones)
        assert not np.isfinite(part.size).any()
        (part,) = BACK[Apply](Apply(0, "sqrt", D), [Range(far.low * 0, far.high)], ones)
        assert not np.isfinite(part.size).any()
