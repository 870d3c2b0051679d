"""Every law over every head family; and for every law a broken head that it catches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from laws import FUNCTIONS, LAWS, Instance, of_scalar, scalars

import attnforge as af
from attnforge.certify.certified import CertifiedModule
from attnforge.ir import functions as F

# Where each registered function is tried; everything else on [-4, 4].
INTERVALS = {
    "acos": (-1.0, 1.0),
    "acosh": (1.0, 50.0),
    "asin": (-1.0, 1.0),
    "atanh": (-0.99, 0.99),
    "exp": (-4.0, 2.0),
    "gelu": (-8.0, 8.0),
    "log": (1e-3, 1e3),
    "log10": (0.1, 40.0),
    "log1p": (-0.9, 30.0),
    "log2": (0.1, 40.0),
    "reciprocal": (0.3, 200.0),
    "relu6": (-2.0, 8.0),
    "rsqrt": (1e-3, 1e3),
    "sigmoid": (-30.0, 30.0),
    "sin": (-6.3, 6.3),
    "sqrt": (0.0, 1.0),
    "tan": (-1.3, 1.3),
    "tanh": (-12.0, 12.0),
}
RELATIVE = ("reciprocal", "rsqrt")


def once(build: Callable[..., CertifiedModule]) -> Callable[..., Any]:
    """Build each head once per process: the laws that change a head work on copies."""
    return functools.lru_cache(maxsize=None)(build)


def anchor(name: str) -> Instance:
    lo, hi = INTERVALS.get(name, (-4.0, 4.0))
    relative = name in RELATIVE
    knots = F.get(name).knots

    def build(dtype: torch.dtype) -> CertifiedModule:
        return af.AnchorHead.fit(name, lo, hi, anchors=24, dtype=dtype, relative=relative)

    def to_eps(eps: float, dtype: torch.dtype) -> CertifiedModule:
        return af.AnchorHead.fit(name, lo, hi, eps=eps, dtype=dtype, relative=relative)

    low, high = F.enclose(name, lo, hi)
    scale = 1.0 if relative else high - low
    eps = (0.03 * scale, 0.01 * scale) if knots else (1e-2 * scale, 1e-5 * scale)
    truth = of_scalar(FUNCTIONS[name], relative)
    return Instance(f"anchor-{name}", once(build), truth, scalars(*knots), once(to_eps), eps)


ANCHORS = [anchor(name) for name in F.names()]
INSTANCES = ANCHORS


def test_every_registered_function_has_a_truth() -> None:
    assert set(F.names()) == set(FUNCTIONS)


@pytest.mark.parametrize("instance", INSTANCES, ids=str)
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_law(law: Callable[[Instance], None], instance: Instance) -> None:
    law(instance)
