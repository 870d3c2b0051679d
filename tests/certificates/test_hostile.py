"""Files are hostile: whatever a header says, reading it ends soon, in a bound that holds or in `CertificateError`."""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

import attnforge as af
from attnforge import theorems
from attnforge.certificates import storage
from attnforge.certificates.certificate import weights_hash
from attnforge.certificates.schema import MOST_DEPTH, Either, Whole, require
from attnforge.export import to_plain
from attnforge.heads.chain.head import ChainHead
from attnforge.heads.fast.activation import FastActivation

FILES = Path(__file__).parent.parent / "files"
OLD = ("anchor", "gate", "product", "norm", "token", "formula", "formula64", "softmax", "mix", "maximum", "plain")
UNIT, INTERVAL, SEQUENCE = (af.Box.cube(low, 1, shape=shape) for low, shape in ((0, 1), (-1, 1), (-1, (1, 1))))
#: Made here, since version 0.1 left no file of them.
NEW: dict[str, Callable[[], Any]] = {
    "chain": lambda: ChainHead.fit("hardswish", -8, 8),
    "fast": lambda: FastActivation.fit("gelu", -2, 3, anchors=12),
    "grid": lambda: af.approximate(torch.sin, UNIT, route="grid", anchors=16, lipschitz=1.0),
    "ramp": lambda: theorems.ramp([1.0, -2.0], 0.5, -1, 1, anchors=9),
    "warm ramp": lambda: theorems.ramp([1.0, -2.0], 0.5, -1, 1, anchors=9, variant="warm"),
    "hats": lambda: theorems.two_layer(torch.sin, SEQUENCE, 0.5, lipschitz=1.0),
    "cells": lambda: theorems.max_affine(torch.sin, INTERVAL, cells=9, lipschitz=1.0),
    # of functions that were only measured
    "ridge": lambda: af.approximate(torch.sin, UNIT, route="ridge", width=4, samples=500),
    "table": lambda: af.approximate(torch.sin, UNIT, route="spectral", anchors=6),
    "plain ramp": lambda: to_plain(theorems.ramp([1.0, -2.0], 0.5, -1, 1, anchors=9, form="tokens")),
    "plain cells": lambda: to_plain(theorems.max_affine(torch.sin, INTERVAL, cells=9, lipschitz=1.0)),
}
NESTED: Any = 1
for _ in range(4 * MOST_DEPTH):
    NESTED = [NESTED]
VALUES = st.sampled_from(
    [
        *(None, True, 0, -1, 2, 10**6, 10**12, 2**63 + 1, 10**400, 1e308, -1e308, 5e-324, 0.5, -0.0),
        *(float("nan"), float("inf"), "", "x", "sin", "nan", "float16", "power(1000)", "expr: " + "exp(" * 60),
        *([], {}, [[]], [1], [1.0, 0.0], [None], {"a": 1}, list(range(3000)), NESTED, "a" * 70_000),
    ]
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places in a header, of long lists the first few."""
    keys = value if isinstance(value, dict) else range(min(len(value), 5)) if isinstance(value, list) else ()
    for key in keys:
        yield (*at, key)
        yield from places(value[key], (*at, key))


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], str]]:
    """Headers, tensors and hashes of networks of every family."""
    folder = tmp_path_factory.mktemp("hosts")
    found = {name: FILES / f"{name}.safetensors" for name in OLD}
    for name, make in NEW.items():
        found[name] = folder / f"{name}.safetensors"
        make().save(found[name])
    return {name: (*storage.read(path), weights_hash(af.load(path))) for name, path in found.items()}


def written(path: Path, header: dict[str, Any], tensors: dict[str, torch.Tensor], weights: str) -> Path:
    """A file with a header as it is, NaN and all, and the digest that belongs to it."""
    full = {key: value for key, value in header.items() if key != "digest"}
    plain = json.dumps(full, sort_keys=True, separators=(",", ":"))
    digest = storage.hashlib.sha256((weights + plain).encode()).hexdigest()  # type: ignore[attr-defined]
    path.write_bytes(save(tensors, metadata={"attnforge": json.dumps({**full, "digest": digest})}))
    return path


def tried(path: Path) -> str:
    """What becomes of a file: nothing but a bound or `CertificateError`, also where it is only read."""
    try:
        af.load(path)
        af.check(path)
    except af.CertificateError:
        return "refused"
    return "proved"


@settings(max_examples=80, deadline=20_000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_headers_that_were_changed(hosts: dict[str, Any], tmp_path: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(hosts)))
    header, tensors, weights = hosts[name]
    header = copy.deepcopy({key: value for key, value in header.items() if key != "digest"})
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.sampled_from(sorted(places(header), key=str)))
        inner = header
        for key in at[:-1]:
            inner = inner[key]
        old, kind = inner[at[-1]], data.draw(st.sampled_from(["value", "value", "scale", "drop", "twice"]))
        if kind == "scale" and isinstance(old, (int, float)) and not isinstance(old, bool):
            inner[at[-1]] = old * data.draw(st.sampled_from([2, -1, 1000, 1e6, 1e300]))
        elif kind == "drop" and isinstance(inner, dict):
            del inner[at[-1]]
        elif kind == "twice" and isinstance(inner, list):
            inner.append(copy.deepcopy(old))
        else:
            inner[at[-1]] = copy.deepcopy(data.draw(VALUES))
    tried(written(tmp_path / "changed.safetensors", header, tensors, weights))


def test_files_that_were_not_changed(hosts: dict[str, Any], tmp_path: Path) -> None:
    for name, (header, tensors, weights) in hosts.items():
        same = written(tmp_path / "same.safetensors", header, tensors, weights)
        assert tried(same) == "proved" and af.load(same) is not None, name


SIZES: tuple[tuple[str, tuple[Any, ...], Any], ...] = (
    ("formula", ("config", "grid"), 10**9),
    ("formula", ("config", "program", "tokens"), 10**6),
    ("formula", ("config", "program", "ops", 0, "width"), 10**9),
    ("softmax", ("config", "sites", 0, 0), 10**9),
    ("norm", ("config", "channels"), 10**12),
    ("token", ("config", "tokens"), 10**7),
    ("token", ("config", "channels"), 10**9),
    ("product", ("config", "nodes"), 10**7),
    ("product", ("config", "width"), 10**9),
    ("anchor", ("config", "shape", 1), 10**12),
    ("anchor", ("config", "function"), "expr: " + "+".join(f"sin({i}*y)" for i in range(9000))),
    ("anchor", ("config", "function"), f"piecewise_linear({[*range(9000)]}, {[0] * 9000})"),
    ("plain", ("config", "stream"), 10**6),
    ("plain", ("config", "registers"), 60_000),
    ("fast", ("config", "table", "anchors"), 10**12),
    ("grid", ("config", "grid", 2), [10**6]),
)


@pytest.mark.parametrize(("name", "at", "value"), SIZES, ids=[f"{n}.{'.'.join(map(str, p))}" for n, p, _ in SIZES])
def test_sizes_that_no_file_needs(hosts: dict[str, Any], tmp_path: Path, name: str, at: Any, value: Any) -> None:
    header, tensors, weights = hosts[name]
    header = copy.deepcopy(header)
    inner = header
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    assert tried(written(tmp_path / "large.safetensors", header, tensors, weights)) == "refused"


def test_a_head_that_has_no_tensors(tmp_path: Path) -> None:
    made = ChainHead.fit("elu", -3, 3, eps=1e-2)
    made.save(tmp_path / "chain.safetensors")
    header, tensors = storage.read(tmp_path / "chain.safetensors")
    for name in list(header["config"]["heads"]):
        header["config"]["heads"][f"more {name}"] = header["config"]["heads"][name]
    assert tried(written(tmp_path / "more.safetensors", header, tensors, weights_hash(made))) == "refused"


def test_less_is_not_allowed_the_exponential(hosts: dict[str, Any], tmp_path: Path) -> None:
    """A file says for which arithmetic its bound holds, and cannot say that exponentials are exact."""
    header, tensors, weights = hosts["anchor"]
    stated = header["certificate"]["assumptions"]
    assert "exponential within 2 u" in stated
    for said, becomes in (("2.5", "refused"), ("1", "refused"), ("0", "refused")):
        changed = copy.deepcopy(header)
        changed["certificate"]["assumptions"] = [f"exponential within {said} u"]
        assert tried(written(tmp_path / "said.safetensors", changed, tensors, weights)) == becomes


def test_forms() -> None:
    form = {"a": [Whole(1, 3)], "b?": (float, str), "c": Either(None, {"d": bool})}
    require({"a": [1, 2], "c": None, "more": 1}, form, "it")
    require({"a": [], "b": [1, "x"], "c": {"d": True}}, form, "it")
    wrong: list[tuple[Any, str]] = [
        ([], "an object"), ({"c": None}, "no 'a'"), ({"a": [0], "c": None}, r"it\.a\[0\] must be a whole number"),
        ({"a": [True], "c": None}, "whole"), ({"a": [], "b": [1], "c": None}, "a list of 2"),
        ({"a": [], "b": [10**400, ""], "c": None}, "a finite number"), ({"a": [], "c": {"d": 1}}, "true or false"),
        ({"a": [], "b": [1.0, 2.0], "c": None}, "a text"),
    ]  # fmt: skip
    for value, message in wrong:
        with pytest.raises(af.CertificateError, match=message):
            require(value, form, "it")
