"""`attnforge manifest`, and the manifests that `attnforge export` writes beside what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import attnforge as af
from attnforge import rasp
from attnforge.cli import app
from attnforge.groundtruth import Manifest

BOX = af.Box(x=(-1, 1), y=(0.5, 2))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    af.compile("x*y*y", BOX, 1e-2).save(tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


def call(*args: object) -> Any:
    result = CliRunner().invoke(app, list(map(str, args)), prog_name="attnforge")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result


def test_written_and_checked(saved: Path) -> None:
    out, pairs = saved.with_name("manifest.json"), saved.with_name("pairs.json")
    done = call("manifest", saved, "-o", out, "--pairs", pairs, "--count", 2)
    assert done.exit_code == 0 and "product" in done.output and f"wrote {pairs}" in done.output
    assert Manifest.load(out) == af.manifest(af.load(saved))
    assert len(json.loads(pairs.read_text())["pairs"]) == 2
    done = call("manifest", saved, "--check", out)
    assert done.exit_code == 0 and "the manifest holds" in done.output and "proved by zeros" in done.output
    data = json.loads(out.read_text())
    data["heads"][0]["moves"] = []
    out.write_text(json.dumps(data))
    done = call("manifest", saved, "--check", out)
    assert done.exit_code == 1 and "does not say that it moves" in done.output
    assert json.loads(call("manifest", "--schema").stdout)["properties"]["version"]["maximum"] == 1
    program = saved.with_name("reverse.safetensors")
    af.compile(rasp.library.reverse(), rasp.Sequences("ab", max_length=3)).save(program)
    assert json.loads(call("manifest", program, "--json").stdout)["inputs"]["vocabulary"] == ["a", "b"]


def test_every_export_has_one(saved: Path) -> None:
    for to, name, where in (
        ("plain", "plain.safetensors", "plain.safetensors.manifest.json"),
        ("lens", "lens.safetensors", "lens.safetensors.manifest.json"),
        ("onnx", "net.onnx", "net.onnx.manifest.json"),
        ("hf", "folder", "folder/manifest.json"),
    ):
        out, said = saved.with_name(name), saved.parent / where
        done = call("export", saved, "--to", to, "-o", out, "--no-verify", "--json")
        assert done.exit_code == 0 and json.loads(done.stdout)["manifest"] == str(said), done.output
        assert Manifest.load(said).artefact is not None
        done = call("manifest", out, "--check", said, "--json")
        assert done.exit_code == 0 and json.loads(done.stdout)["holds"], done.output
    assert call("manifest", saved, "--check", saved.with_name("net.onnx.manifest.json")).exit_code == 0
    onnx = saved.with_name("net.onnx")
    onnx.write_bytes(onnx.read_bytes() + b" ")
    done = call("manifest", onnx, "--check", saved.with_name("net.onnx.manifest.json"))
    assert done.exit_code == 1 and "lies beside another onnx file" in done.output


def test_mistakes(saved: Path) -> None:
    out = saved.with_name("m.json")
    out.write_text("mine")
    head = saved.with_name("head.safetensors")
    af.AnchorHead.fit("sin", -1, 1, anchors=8).save(head)
    for args, words in (
        ((saved, "-o", out), ["there already", "--force"]),
        ((saved, "-o", saved.with_name("m.txt")), ["ends with .json"]),
        ((saved, "-o", saved.with_name("a.json"), "--pairs", saved.with_name("a.json")), ["give two names"]),
        ((), ["which network?"]),
        ((saved.with_name("no.safetensors"),), ["there is no file"]),
        ((saved, "--check", saved.with_name("no.json")), ["there is no file"]),
        ((saved, "--check", out, "-o", out), ["writes nothing"]),
        ((head,), ["no manifest of this network"]),
        ((saved, "--count", "0", "--pairs", saved.with_name("p.json")), ["count must be a whole number"]),
    ):
        done = call("manifest", *args)
        assert done.exit_code == 2 and all(word in done.output for word in words), done.output
    assert call("manifest", saved, "--check", out).exit_code == 1
    assert out.read_text() == "mine"
    done = call("export", head, "--to", "onnx", "-o", saved.with_name("head.onnx"), "--no-verify")
    assert done.exit_code == 0 and "no manifest of this network" in done.output
