"""Files: the same bytes for the same network, and a clear refusal of everything that is not as it was saved."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import attnforge as af

Change = Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "gelu.safetensors"
    af.AnchorHead.fit("gelu", -4, 4, anchors=12).save(path)
    return path


def parts(path: Path) -> tuple[dict[str, Any], bytes]:
    """A safetensors file: eight bytes of length, a JSON header, the tensors."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def write(path: Path, header: dict[str, Any], body: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


def ours(header: dict[str, Any]) -> dict[str, Any]:
    return json.loads(header["__metadata__"]["attnforge"])


def with_ours(header: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    return {**header, "__metadata__": {"attnforge": json.dumps(changed)}}


def refused(path: Path, words: str = ".") -> None:
    for read in (af.load, af.check):
        with pytest.raises(af.CertificateError, match=words):
            read(path)


def test_a_file_gives_the_network_back(saved: Path, tmp_path: Path) -> None:
    head = af.load(saved)
    assert isinstance(head, af.AnchorHead) and not head.training
    assert af.check(saved) == head.certificate
    head.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == saved.read_bytes()
    other = af.AnchorHead.fit("gelu", -4, 4, anchors=12)
    other.save(tmp_path / "other.safetensors")
    assert (tmp_path / "other.safetensors").read_bytes() == saved.read_bytes(), "fitting again gives the same bytes"


def test_nothing_in_a_file_can_run(saved: Path) -> None:
    header, _ = parts(saved)
    assert set(header["__metadata__"]) == {"attnforge"} and set(ours(header)) == {
        "format", "family", "config", "certificate", "digest",
    }  # fmt: skip


def test_one_changed_bit_of_a_weight_is_found(saved: Path, tmp_path: Path) -> None:
    header, body = parts(saved)
    for place in (0, len(body) // 2, len(body) - 1):
        spoilt = bytearray(body)
        spoilt[place] ^= 1
        refused(write(tmp_path / "bit.safetensors", header, bytes(spoilt)), "hash|digest|not finite")


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("certificate", "bound"), 1e-12),
        (("certificate", "target"), "silu"),
        (("certificate", "kind"), "calibrated"),
        (("certificate", "weights"), "0" * 64),
        (("certificate", "dtype"), "float64"),
        (("config", "function"), "silu"),
        (("config", "interval"), [-4.0, 5.0]),
        (("config", "interval"), [4.0]),
        (("config", "relative"), True),
        (("config", "shape"), None),
        (("config", "dtype"), "int8"),
        (("config", "skip"), False),
        (("config",), []),
        (("digest",), "0" * 64),
        (("digest",), None),
        (("format",), 99),
        (("family",), "nothing"),
        (("family",), ["anchor"]),
        (("certificate",), None),
    ],
)
def test_a_changed_header_is_found(saved: Path, tmp_path: Path, keys: tuple[str, ...], value: object) -> None:
    header, body = parts(saved)
    changed = ours(header)
    inner = changed
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    refused(write(tmp_path / "header.safetensors", with_ours(header, changed), body))


def test_a_bound_that_cannot_be_proved_is_found_even_with_a_right_digest(saved: Path, tmp_path: Path) -> None:
    """Whoever can compute the digest can also write a false bound: `load` cannot know, `check` recomputes."""
    head = af.AnchorHead.fit("gelu", -4, 4, anchors=12)
    true = head.certificate
    head._certificate = af.Certificate.from_json({**true.to_json(), "bound": true.bound / 2, "terms": []})  # type: ignore[operator]
    head.save(tmp_path / "false.safetensors")
    assert af.load(tmp_path / "false.safetensors").bound < true.bound
    with pytest.raises(af.CertificateError, match="can be proved"):
        af.check(tmp_path / "false.safetensors")


@pytest.mark.parametrize(
    "lie", [{"relative": False}, {"target": "log"}, {"kind": "calibrated", "bound": None}, {"box": {"lower": [0.2]}}]
)
def test_a_certificate_of_something_else_is_found(tmp_path: Path, lie: dict[str, Any]) -> None:
    head = af.AnchorHead.fit("reciprocal", 0.5, 8, anchors=12, relative=True)
    data = head.certificate.to_json()
    lie = {"box": {**data["box"], **lie["box"]}} if "box" in lie else lie
    head._certificate = af.Certificate.from_json({**data, **lie, "terms": []})
    head.save(tmp_path / "lie.safetensors")
    with pytest.raises(af.CertificateError, match="speaks of another"):
        af.check(tmp_path / "lie.safetensors")


@pytest.mark.parametrize("text", ["", "not json", "[1, 2]", "{}", "null", "[" * 100_000, '{"format": 1}'])
def test_a_header_that_is_not_ours(saved: Path, tmp_path: Path, text: str) -> None:
    header, body = parts(saved)
    refused(write(tmp_path / "x.safetensors", {**header, "__metadata__": {"attnforge": text}}, body))


def test_files_of_others(tmp_path: Path) -> None:
    refused(tmp_path / "missing.safetensors", "no file")
    refused(tmp_path, "no file")
    for name, content in (("empty", b""), ("text", b"hello, world"), ("zeros", bytes(64)), ("huge", b"\xff" * 64)):
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name, "not a readable safetensors file")
    save_file({"x": torch.ones(2)}, tmp_path / "foreign.safetensors")
    refused(tmp_path / "foreign.safetensors", "not written by attnforge")


@given(st.data())
@settings(max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_truncated_and_damaged_files_never_pass(saved: Path, tmp_path: Path, data: st.DataObject) -> None:
    raw = saved.read_bytes()
    if data.draw(st.booleans()):
        spoilt = raw[: data.draw(st.integers(0, len(raw) - 1))]
    else:
        place = data.draw(st.integers(0, len(raw) - 1))
        spoilt = raw[:place] + bytes([raw[place] ^ data.draw(st.integers(1, 255))]) + raw[place + 1 :]
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(spoilt)
    with pytest.raises(af.CertificateError):
        af.check(path)


def test_missing_and_extra_tensors(saved: Path, tmp_path: Path) -> None:
    head = af.load(saved)
    state = {name: t.clone() for name, t in head.state_dict().items()}
    metadata = parts(saved)[0]["__metadata__"]
    less = {name: t for name, t in state.items() if not name.endswith("M_V")}
    for tensors in (less, {**state, "more": torch.ones(1)}, {}, {**state, "anchors": torch.ones(3)}):
        save_file(tensors, tmp_path / "t.safetensors", metadata=metadata)
        refused(tmp_path / "t.safetensors")


def test_saving_needs_a_valid_certificate_and_a_folder(tmp_path: Path) -> None:
    head = af.AnchorHead.fit("sin", -1, 1, anchors=6)
    with pytest.raises(af.ArgumentError, match="does not exist"):
        head.save(tmp_path / "no" / "such" / "folder" / "x.safetensors")
    with torch.no_grad():
        head.values[0] += 1
    with pytest.raises(af.CertificateError, match="stale"):
        head.save(tmp_path / "stale.safetensors")
    assert not (tmp_path / "stale.safetensors").exists()
    mine = af.AnchorHead.fit(torch.sin, -1, 1, anchors=6)
    with pytest.raises(af.ArgumentError, match="callable"):
        mine.save(tmp_path / "mine.safetensors")
