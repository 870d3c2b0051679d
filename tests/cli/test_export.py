"""`attnforge export`: what it writes and prints, and how it answers mistakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import attnforge as af
from attnforge.cli import app
from attnforge.export import run_onnx

BOX = af.Box(x=(-1, 1), y=(0.5, 2))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    af.compile("x*y", BOX, 1e-3).save(tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


def call(*args: object) -> Any:
    result = CliRunner().invoke(app, ["export", *map(str, args)], prog_name="attnforge")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result


def test_onnx(saved: Path) -> None:
    out = saved.with_name("net.onnx")
    done = call(saved, "--to", "onnx", "-o", out)
    assert done.exit_code == 0 and f"wrote {out}" in done.output and "agrees with the network" in done.output
    x = BOX.sample(10, dtype=torch.float32)
    assert torch.allclose(run_onnx(out, x), af.load(saved)(x), atol=1e-5)


def test_plain_is_a_network_file_like_any_other(saved: Path) -> None:
    out = saved.with_name("plain.safetensors")
    done = call(saved, "--to", "plain", "-o", out, "--json")
    assert done.exit_code == 0
    data = json.loads(done.stdout)
    assert data["kind"] == "plain" and data["verification"]["passed"] and data["bytes"] == out.stat().st_size
    saved.with_name("points.csv").write_text("y,x\n2,0.5\n")
    ran = CliRunner().invoke(app, ["run", str(out), "-i", str(saved.with_name("points.csv"))])
    assert ran.exit_code == 0 and abs(float(ran.stdout.splitlines()[1]) - 1.0) < 1e-3
    again = call(out, "--to", "onnx", "-o", saved.with_name("plain.onnx"))
    assert again.exit_code == 0, again.output


def test_mistakes(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = saved.with_name("net.onnx")
    out.write_text("mine")
    other = saved.with_name("head.safetensors")
    af.AnchorHead.fit("sin", -1, 1, anchors=8).save(other)
    for args, words in (
        ((saved, "--to", "onnx", "-o", out), ["there already", "--force"]),
        ((saved, "--to", "onxn", "-o", out), ["'onxn' is unknown; did you mean 'onnx'?", "plain, lens, onnx, hf"]),
        ((saved, "--to", "onnx", "-o", saved.with_name("net.txt")), ["ends with .onnx"]),
        ((saved, "--to", "hf", "-o", saved), ["is a file; expected a folder"]),
        ((saved, "--to", "plain", "-o", saved.parent / "no" / "plain.safetensors"), ["does not exist"]),
        ((saved.with_name("nothing"), "--to", "onnx", "-o", out), ["there is no file"]),
        ((other, "--to", "plain", "-o", saved.with_name("p.safetensors")), ["AnchorHead is not exported by itself"]),
        ((saved, "--onnx"), ["no such option"]),
    ):
        done = call(*args)
        assert done.exit_code == 2 and all(word in done.output for word in words), done.output
    assert out.read_text() == "mine"
    broken = saved.with_name("broken.safetensors")
    broken.write_bytes(saved.read_bytes()[:-9])
    assert call(broken, "--to", "onnx", "-o", saved.with_name("b.onnx")).exit_code == 1
    monkeypatch.setitem(sys.modules, "onnx", None)
    done = call(saved, "--to", "onnx", "-o", saved.with_name("c.onnx"))
    assert done.exit_code == 2 and "attnforge[onnx]" in done.output
