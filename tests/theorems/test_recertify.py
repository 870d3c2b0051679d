"""The law of certificates: whatever was done to a theorem's tensors, the bound after `af.certify` holds, or is refused.

The truth is exact: the ramps that were asked for in rational arithmetic, other targets with 50 digits. Inputs are
numbers of the dtype in hand: kinks, ends, anchors, the middles between them, corners of the box, random points.
"""

from __future__ import annotations

import ast
import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor

import attnforge as af
from attnforge import theorems
from attnforge.errors import CertificateError, PrecisionError

W, T = [0.7, -1.3], 0.3  # not numbers of float32
OTHER_W, OTHER_T = [-0.4, 0.9], -0.1
A, B = -1.1, 0.9
RAMPS: dict[str, dict[str, Any]] = {
    "paper": {"anchors": 12, "eps0": 1e-2},
    "paper, per token": {"anchors": 12, "eps0": 1e-2, "w": [W, [0.3, 0.9], [1.1, 0.2]], "t": [0.3, -0.2, 0.1]},
    "paper, channels": {"anchors": 12, "eps0": 1e-2, "G": lambda k: k // 6, "channels": 3},
    "paper, one of four channels": {"anchors": 12, "eps0": 1e-2, "G": 2, "channels": 4},
    "tokens": {"anchors": 12, "eps0": 1e-2, "form": "tokens"},
    "tokens, channels": {"anchors": 12, "eps0": 1e-2, "form": "tokens", "G": lambda k: k // 6, "channels": 3},
    "registers": {"anchors": 12, "eps0": 1e-2, "form": "tokens", "causal": True},
    "warm": {"anchors": 12, "variant": "warm", "channels": 2},
    "warm registers": {"anchors": 9, "variant": "warm", "causal": True},
    "gate": {"variant": "gate"},
    "gate, channels": {"variant": "gate", "channels": 3},
    "paper heads": {"heads": 4, "tokens": 5, "eps0": 1e-2, "channels": 2},
    "paper heads of one anchor": {"heads": 3, "tokens": 3, "eps0": 1e-2},
    "token heads": {"heads": 4, "tokens": 5, "eps0": 1e-2, "form": "tokens", "channels": 2},
    "register heads": {"heads": 3, "tokens": 5, "eps0": 1e-2, "form": "tokens", "causal": True},
    "warm heads": {"heads": 3, "tokens": 8, "variant": "warm"},
}
BOX, TOKENS = af.Box.cube(0.1, 1.2, shape=(2, 1)), af.Box.cube(-0.3, 1.2, shape=2)
MAPS: dict[str, dict[str, Any]] = {
    "two layers": {"build": "two_layer", "spacing": 0.4},
    "two layers, tokens": {"build": "two_layer", "spacing": 0.4, "form": "tokens"},
    "softmax": {"build": "attention_then_softmax", "spacing": 0.4},
    "softmax, tokens": {"build": "attention_then_softmax", "spacing": 0.4, "form": "tokens"},
    "cells": {"build": "max_affine", "box": TOKENS, "cells": 16},
    "cells, causal": {"build": "max_affine", "box": TOKENS, "cells": 16, "causal": True},
    "cells, cross": {"build": "max_affine", "box": TOKENS, "cells": 16, "attention": "cross"},
    "cells of sequences": {"build": "max_affine", "cells": 16},
    "cells of sequences, tokens": {"build": "max_affine", "cells": 16, "form": "tokens"},
    "cells of sequences, cross": {"build": "max_affine", "cells": 16, "form": "tokens", "attention": "cross"},
}
NAMES = [*RAMPS, *MAPS]
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def turned(X: Tensor) -> Tensor:
    """The sine of the other coordinate: along the sequence where there is one."""
    return X.flip(-2 if X.dim() == 3 and X.shape[-1] == 1 else -1).sin()


def build(name: str, dtype: torch.dtype, other: bool = False) -> Any:
    """A copy of a construction; with `other`, of one of the same shapes for another target."""
    return copy.deepcopy(made(name, dtype, other))


@functools.cache
def made(name: str, dtype: torch.dtype, other: bool) -> Any:
    if name in RAMPS:
        given = {"w": W, "t": T, "radius": 1.6, **RAMPS[name]}
        if other:
            given["w"] = OTHER_W if name != "paper, per token" else [OTHER_W] * 3
            given["t"] = OTHER_T if name != "paper, per token" else [OTHER_T] * 3
        ends = (A - 0.2, B - 0.3) if other else (A, B)
        given["w"] = torch.tensor(given["w"], dtype=dtype)
        return (theorems.ramp_heads if "heads" in given else theorems.ramp)(a=ends[0], b=ends[1], **given)
    given = {"box": BOX, "lipschitz": 1.0, "dtype": dtype, **MAPS[name]}
    f = (lambda X: 0.5 * turned(X).cos()) if other else turned
    return getattr(theorems, given.pop("build"))(f, **given)


def asked(name: str, dtype: torch.dtype) -> tuple[list[list[Fraction]], list[Fraction]]:
    """w and t of a ramp as they were given, one per token or one for all."""
    given = {"w": W, "t": T, **RAMPS[name]}
    w, t = (torch.tensor(given[key], dtype=dtype).double() for key in ("w", "t"))
    rows = [[Fraction(x) for x in row] for row in w.reshape(-1, 2).tolist()]
    return rows, [Fraction(x) for x in t.reshape(-1).tolist()]


def inputs(name: str, m: Any, built_in: torch.dtype) -> Tensor:
    """A few dozen inputs, numbers of the dtype that the network has now, inside its box."""
    generator = torch.Generator().manual_seed(7)
    if name in RAMPS:
        places = sorted({*m.anchors.tolist(), A, B})
        middles = [(x + y) / 2 for x, y in itertools.pairwise(places)]
        beside = [x + s for x in (A, B, *middles[:6]) for s in (-0.3, -1e-3, 1e-7, 0.04)]
        y = torch.tensor([*places, *middles, *beside, A - 1.5, B + 1.5, A - 0.5, B + 0.5], dtype=torch.float64)
        n = m.tokens_shown()
        y = torch.cat([y, y[: -len(y) % n]]).reshape(-1, n)
        rows, shifts = asked(name, built_in)
        w = torch.tensor([[float(x) for x in row] for row in rows], dtype=torch.float64).expand(n, 2)
        t = torch.tensor([float(x) for x in shifts], dtype=torch.float64).expand(n)
        X = ((y - t) / (w * w).sum(-1)).unsqueeze(-1) * w
        X = torch.cat([X, 1.6 * (2 * torch.rand(8, n, 2, generator=generator, dtype=torch.float64) - 1)])
        corners = torch.tensor([[1.6, -1.6], [-1.6, 1.6], [1.6, 1.6], [0.0, -1.6]]).double()
        X = torch.cat([X, corners[torch.randint(0, 4, (2, n), generator=generator)]])
        return X.to(m.dtype).clamp(-1.6, 1.6)
    X = m.box.sample(24, 3, torch.float64)
    near = ((X - m.box.lower) / 0.1).round() * 0.1 + m.box.lower
    X = torch.cat([X, near, m.box.corners(4)])
    X = torch.minimum(torch.maximum(X, m.box.lower), m.box.upper).to(m.dtype)
    return X.unsqueeze(-2) if len(m.box.shape) == 1 else X


Truth = list[list[list[Any] | None]]
TRUTHS: dict[Any, Truth] = {}


def truth(name: str, m: Any, X: Tensor, built_in: torch.dtype) -> Truth:
    """The target at every token, one number per channel; None where the bound does not speak. Computed once for all
    networks that take the same numbers for the same target."""
    stated = () if name in MAPS else (m.excluded, m.step, m.channels, tuple(m.wanted.channel))
    key = (name, built_in, X.dtype, tuple(X.shape), X.numpy().tobytes(), stated)
    if key not in TRUTHS:
        rows = computed_truth(name, m, X, built_in)
        TRUTHS[key] = [[v if v is None else [exactly(x) for x in v] for v in row] for row in rows]
    return TRUTHS[key]


def computed_truth(name: str, m: Any, X: Tensor, built_in: torch.dtype) -> Truth:
    if name in MAPS:
        found = []
        for row in X.double().tolist():
            flat = [x[::-1] for x in row] if len(m.box.shape) == 1 else row[::-1]
            found.append([[mpmath.sin(mpmath.mpf(v)) for v in token] for token in flat])
        return found
    rows, shifts = asked(name, built_in)
    low, high, channels, found = Fraction(A), Fraction(B), m.channels, []
    for sequence in X.double().tolist():
        line: list[list[Any] | None] = []
        for i, x in enumerate(sequence):
            w, t = rows[i % len(rows)], shifts[i % len(shifts)]
            y = sum((a * Fraction(b) for a, b in zip(w, x, strict=True)), t)
            if any(left <= y <= right for left, right in m.excluded):
                line.append(None)
                continue
            number = round((y - low) / m.step) if name.endswith(", channels") and "gate" not in name else 0
            chosen = m.wanted.channel[min(max(number, 0), len(m.wanted.channel) - 1)]
            value = min(max(y, low), high)
            line.append([value if c == chosen else Fraction(0) for c in range(channels)])
        found.append(line)
    return found


def exactly(value: Any) -> Any:
    return mpmath.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else mpmath.mpf(value)


def check(name: str, m: Any, built_in: torch.dtype) -> float | None:
    """The bound, after it held at all inputs; None where there is no certificate."""
    try:
        bound = af.certify(m).bound
    except (CertificateError, PrecisionError):
        return None
    assert bound is not None
    X = inputs(name, m, built_in)
    with torch.no_grad():
        output = m.core(X).double().tolist()
    for expected, got in zip(truth(name, m, X, built_in), output, strict=True):
        for wanted, token in zip(expected, got, strict=True):
            if wanted is not None:
                for value, computed in zip(wanted, token, strict=True):
                    assert abs(exactly(computed) - value) <= bound, (computed, float(value), bound)
    return bound


@pytest.fixture(autouse=True)
def digits() -> Iterator[None]:
    with mpmath.workdps(50):
        yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_copies_and_casts(name: str, dtype: str) -> None:
    built_in = DTYPES[dtype]
    m = build(name, built_in)
    before = m.bound
    assert check(name, m, built_in) == before, "certifying what was built changes nothing"
    assert check(name, copy.deepcopy(m), built_in) == before
    other = copy.deepcopy(m).to(torch.float64 if dtype == "float32" else torch.float32)
    with pytest.raises(CertificateError, match="stale"):
        _ = other.bound
    assert check(name, other, built_in) is not None, "a cast between the two has a certificate of its own"
    coarse = copy.deepcopy(m).bfloat16()
    with pytest.raises(CertificateError, match="all float32 or all float64"):
        af.certify(coarse)
    found = check(name, coarse.to(built_in), built_in)
    assert found is None or found >= before
    assert m.bound == before, "the network itself is as it was"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_the_weights_of_another_network(name: str, dtype: str) -> None:
    m = build(name, DTYPES[dtype])
    before, harmed = m.bound, copy.deepcopy(m)
    harmed.load_state_dict(build(name, DTYPES[dtype], other=True).state_dict())
    found = check(name, harmed, DTYPES[dtype])
    assert found is None or found > before
    harmed.load_state_dict(m.state_dict())
    assert check(name, harmed, DTYPES[dtype]) == before


CHANGES: dict[str, Callable[[float], float]] = {
    "a little": lambda x: x * 1.01 if x else 1e-3,
    "the sign": lambda x: -2 * x if x else 40.0,
    "gone": lambda x: 0.0 if x else -0.5,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", NAMES)
def test_one_changed_number_of_every_tensor(name: str, change: str) -> None:
    fresh = build(name, torch.float64)
    before, caught = fresh.bound, 0
    for at, (key, values) in enumerate(fresh.state_dict().items()):
        generator = torch.Generator().manual_seed(100 * at + len(change))
        some = torch.randint(0, values.numel(), (2,), generator=generator).tolist()
        nonzero = values.flatten().nonzero().flatten().tolist()
        for index in dict.fromkeys([*some, *nonzero[:1], *nonzero[-1:]]):
            m = copy.deepcopy(fresh)
            with torch.no_grad():
                flat = m.state_dict()[key].view(-1)
                flat[index] = CHANGES[change](float(flat[index]))
            found = check(name, m, torch.float64)
            caught += found is None or found > before
    assert caught > 0 and fresh.bound == before


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_or_mixed_has_no_certificate(name: str) -> None:
    for value in (float("nan"), float("inf")):
        m = build(name, torch.float64)
        with torch.no_grad():
            list(m.state_dict().values())[-1].view(-1)[0] = value
        with pytest.raises(CertificateError, match="not finite"):
            af.certify(m)
    m = build(name, torch.float64)
    first = next(x for x in m.parameters() if x.dim() > 1)
    first.data = first.data.float()
    with pytest.raises(CertificateError, match="all float32 or all float64"):
        af.certify(m)


def siblings() -> dict[str, set[str]]:
    """Which modules of the package each of them imports, at its top or inside functions, but not for types only."""
    found: dict[str, set[str]] = {}
    for path in Path(theorems.__file__).parent.glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
        guarded = [n for n in nodes if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
        skipped = {id(x) for n in guarded for x in ast.walk(n)}
        local = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.level == 1 and id(n) not in skipped]
        found[path.stem] = {name for n in local for name in ([n.module] if n.module else [a.name for a in n.names])}
    return found


def reached(start: str, imports: dict[str, set[str]]) -> set[str]:
    """All modules that a module imports, directly or through others."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for name in imports[waiting.pop()] - found:
            found.add(name)
            waiting.append(name)
    return found


def test_bounds_import_nothing_that_builds_weights_and_there_are_no_cycles() -> None:
    imports = siblings()
    assert reached("bounds", imports) == {"grid", "result"}
    assert {"bounds", "slots"} <= imports["ramps"], "imports are seen"
    assert [name for name in imports if name in reached(name, imports)] == []


def test_no_function_hides_a_module() -> None:
    modules = set(siblings()) - {"__init__"}
    assert [name for name in modules if callable(getattr(theorems, name, None))] == []
