"""The data of a manifest: to JSON and back, the published schema, what is refused on reading, hashes."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

import attnforge as af
from attnforge.certificates.certificate import weights_hash
from attnforge.groundtruth import Claim, Edge, HeadEntry, Inputs, Manifest, Output, Witness, schema
from attnforge.groundtruth.manifest import Channel, hashes, require_weights

TENSORS = {"a": torch.ones(2, 3), "b": torch.zeros(4)}


def small() -> Manifest:
    everything, each = hashes(TENSORS)
    heads = (
        HeadEntry("L0.H0", 0, 0, "blocks.0", 0, "function", "sin(x)", "sin(x)", "memory", ((0,), (1,), (1,)), (2,),
                  (Witness("f", 0, 1, 0.5),)),
        HeadEntry("L0.H1", 0, 1, "blocks.0", 1, "padding", "nothing", "", "tokens", still=("f",)),
    )  # fmt: skip
    edges = (Edge("input", "L0.H0", (0,), ("query",)), Edge("L0.H0", "output", (2,), ("output",)))
    channels = (Channel("x", "input"), Channel("1", "constant"), Channel("sin(x)", "written"))
    inputs = Inputs("numbers", ("x",), ((1,),), (-1.0,), (1.0,))
    claim = Claim("certified", 1e-3, "float32", "analysis", 1e-6)
    return Manifest("sin(x)", "plain", inputs, (Output("f"),), channels, heads, edges, ((0.25,), (-1.0,)), claim,
                    everything, each)  # fmt: skip


def test_json_and_back(tmp_path: Path) -> None:
    found = small().beside("onnx", "ab" * 32)
    assert Manifest.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert Manifest.load(found.save(tmp_path / "manifest.json")) == found
    with pytest.raises(af.ArgumentError, match="there already"):
        found.save(tmp_path / "manifest.json")
    assert found.components() == [
        {"id": "L0.H0", "hook": "blocks.0", "at": 0, "role": {"tag": "function"}, "note": "sin(x)"}
    ]
    assert found.head("L0.H1").relevant == () and found.head("L0.H0").relevant == ("f",)
    with pytest.raises(af.ArgumentError, match=r"no head 'L9.H9'; ids are such as 'L0.H0'"):
        found.head("L9.H9")


def test_the_published_schema_takes_what_is_written_and_refuses_the_rest() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    check = jsonschema.Draft202012Validator(schema())
    data = small().to_json()
    check.validate(data)
    for path, value, words in WRONG:
        changed = put(data, path, value)
        assert not check.is_valid(changed), path
        with pytest.raises(af.CertificateError, match=words):
            Manifest.from_json(changed)


WRONG: tuple[tuple[tuple[Any, ...], Any, str], ...] = (
    (("version",), 2, "has version 2, and this attnforge reads 1"),
    (("format",), "other", "format must be one of attnforge-manifest"),
    (("heads", 0, "role", "tag"), "wizard", r"heads\[0\].role.tag must be one of function"),
    (("heads", 0, "layer"), -1, r"heads\[0\].layer must be a whole number"),
    (("heads", 0, "moves", 0, "effect"), "big", r"effect must be a finite number"),
    (("edges", 0, "into"), ["mind"], r"into\[0\] must be one of query"),
    (("certificate",), None, "certificate must be an object"),
    (("samples", 0, 0), None, r"samples\[0\]\[0\] must be a finite number"),
)


def put(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = inner = copy.deepcopy(data)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("heads", 1, "id"), "L0.H0", "not different from each other"),
        (("edges", 0, "to"), "L7.H0", "joins nodes that the manifest does not have"),
        (("heads", 0, "writes"), [3], "channels or samples that the manifest does not have"),
        (("heads", 0, "moves", 0, "base"), 2, "channels or samples that the manifest does not have"),
        (("heads", 0, "moves", 0, "output"), "g", "there is no output 'g'"),
        (("samples", 0), [0.1, 0.2], "every sample of this manifest has 1 numbers"),
        (("outputs",), [], "names its outputs"),
        (("edges", 1), small().to_json()["edges"][0], "states every edge once"),
        (("heads", 0, "still"), ["f"], "states an effect twice, or both"),
        (("weights", "tensors", "a"), 3, "the hash of 'a' must be a text"),
    ],
)
def test_what_does_not_hang_together_is_refused(path: tuple[Any, ...], value: Any, words: str) -> None:
    with pytest.raises(af.CertificateError, match=words):
        Manifest.from_json(put(small().to_json(), path, value))


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    for text in ("{", "[" * 100_000, "[]", '{"format": NaN}', "\x00"):
        path.write_text(text)
        with pytest.raises(af.CertificateError, match=r"manifest\.json"):
            Manifest.load(path)
    with pytest.raises(af.ArgumentError, match="there is no file"):
        Manifest.load(tmp_path / "none.json")


def test_the_tensor_that_does_not_fit_is_named() -> None:
    found = small()
    require_weights(found, TENSORS)
    for tensors, words in (
        ({**TENSORS, "b": torch.full((4,), -0.0)}, "the tensor 'b' has the hash"),
        ({**TENSORS, "b": torch.zeros(4, dtype=torch.float64)}, "the tensor 'b' has the hash"),
        ({"a": TENSORS["a"]}, "there is no tensor 'b'"),
        ({**TENSORS, "c": torch.zeros(1)}, "does not know the tensor 'c'"),
    ):
        with pytest.raises(af.CertificateError, match=words):
            require_weights(found, tensors)
    with pytest.raises(af.CertificateError, match="hash of all weights"):
        require_weights(replace(found, weights="0" * 64), TENSORS)
    net = torch.nn.Linear(2, 2)
    assert hashes(net.state_dict())[0] == weights_hash(net)


def test_a_program_with_more_slots_than_registers_has_a_manifest():
    """Registers are a matter of exports with token ids; in the network itself slots are slots."""
    listed = af.rasp.library.get("tomita5")
    domain = listed.domain(40)
    net = af.compile(listed.program(domain), domain)
    assert max(group.slots for group in net.network.groups()) > 512
    truth = af.manifest(net)
    assert [head.role for head in truth.heads] == ["count", "map"]
    assert af.groundtruth.check(truth, net).witnesses > 0
    with pytest.raises(af.UnsupportedOperation, match="860 memory slots, and at most 511"):
        af.export.to_plain(net)
