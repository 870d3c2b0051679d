"""Hugging Face folders: round trips, model cards, no pickle, and folders that are something else."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import attnforge as af
from attnforge import theorems
from attnforge.certificates.certificate import upper_text
from attnforge.cli import app
from attnforge.compiler.compiled import CompiledNetwork
from attnforge.export import load_hf, to_hf, to_plain
from attnforge.export.hf import folder as module
from attnforge.export.hf.folder import card

BOX = af.Box(x=(-1, 1), y=(0.5, 2))
FORMULA = "sin(x*y) + abs(x)/y"


@pytest.fixture(scope="module")
def net() -> CompiledNetwork:
    return af.compile(FORMULA, BOX, 1e-3)


@pytest.fixture(scope="module")
def folder(net: CompiledNetwork, tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = to_hf(net, tmp_path_factory.mktemp("hf") / "sine")
    assert written.verification is not None and written.verification.passed and written.kind == "hf"
    return written.path


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def test_from_pretrained_brings_the_network_back(net: CompiledNetwork, folder: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModel

    from attnforge.export.hf.model import AttnforgeModel

    x, plain = BOX.sample(50, dtype=torch.float32), to_plain(net)
    models = [AttnforgeModel.from_pretrained(folder), AutoModel.from_pretrained(folder), load_hf(folder)]
    models[0].save_pretrained(tmp_path / "again")
    models.append(AttnforgeModel.from_pretrained(tmp_path / "again"))
    for model in models:
        with torch.no_grad():
            found = model(x, output_attentions=True)
        assert torch.equal(found.output, plain(x)) and model.dtype == torch.float32
        assert all(torch.equal(a, b) for a, b in zip(found.attentions, plain.attention(x), strict=True))
        assert model.certificate == plain.certificate
        assert model.plain.heads == plain.heads and model.plain.channels == plain.channels
    assert AutoConfig.from_pretrained(folder).model_type == "attnforge"
    with torch.no_grad():
        assert torch.equal(models[0](x=x, return_dict=False)[0], plain(x))


def test_nothing_in_a_folder_can_run(folder: Path) -> None:
    names = {file.name for file in folder.iterdir()}
    assert names == {"config.json", "model.safetensors", "README.md", "error.png"}
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert "auto_map" not in config and config["dtype"] == "float32"


def test_the_card_says_what_it_is(net: CompiledNetwork, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (folder / "README.md").read_text("utf-8")
    assert text.startswith("---\nlibrary_name: transformers\n") and FORMULA in text
    assert "| x | -1 | 1 |" in text and "| y | 0.5 | 2 |" in text
    assert f"**{upper_text(to_plain(net).certificate.bound)}**" in text and "Certified" in text
    assert "differ from the network they were exported from by at most" in text
    assert "![Output and error" in text and (folder / "error.png").stat().st_size > 10_000
    assert "| largest \\|logit\\| |" in text and "| heads |" in text
    code = text.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(folder.parent)
    (folder.parent / "use.py").write_text(code, "utf-8")
    shown = runpy.run_path(str(folder.parent / "use.py"))
    assert torch.isfinite(shown["y"]).all() and shown["model"].certificate.bound is not None


@pytest.mark.parametrize("name", ["float64", "two inputs", "sequence", "theorem"])
def test_every_kind_of_input(name: str, tmp_path: Path) -> None:
    pair = (af.Box.cube(-1, 1, shape=3), af.Box.cube(0, 2, shape=3))
    net = {
        "float64": lambda: af.compile("x*y", BOX, 1e-9, dtype=torch.float64),
        "two inputs": lambda: af.compile(lambda a, b: (a * b).sum(-1), pair, 1e-3),
        "sequence": lambda: af.compile(lambda x: x - x.mean(-2, keepdim=True), af.Box.cube(-1, 1, shape=(3, 2)), 1e-3),
        "theorem": lambda: theorems.ramp([1.0, -0.5], 0.1, -1, 1, anchors=12, form="tokens"),
    }[name]()
    plain = to_plain(net)
    model = load_hf(to_hf(plain, tmp_path / "net", verify=False))
    inputs = plain.example_input()
    with torch.no_grad():
        assert torch.equal(model(*inputs).output, plain(*inputs)) and model.dtype == plain.dtype
    code = (tmp_path / "net" / "README.md").read_text("utf-8").split("```python\n")[1].split("```")[0]
    (tmp_path / "use.py").write_text(code.replace('"net"', repr(str(tmp_path / "net"))), "utf-8")
    assert torch.isfinite(runpy.run_path(str(tmp_path / "use.py"))["y"]).all()


def test_changed_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    broken = copied(folder, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["plain.readout.weight"] += 1e-3
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(af.CertificateError, match="stale"):
        load_hf(broken)


def test_other_folders_are_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = copied(folder, tmp_path / "other")
    (other / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(af.CertificateError, match="type 'bert', not 'attnforge'"):
        load_hf(other)
    (other / "config.json").write_text("{")
    with pytest.raises(af.CertificateError, match="is not JSON"):
        load_hf(other)
    (other / "config.json").write_text('{"model_type": "attnforge", "network": {}}')
    with pytest.raises(af.CertificateError, match="does not hold a network written by attnforge"):
        load_hf(other)
    (other / "model.safetensors").unlink()
    with pytest.raises(af.CertificateError, match=r"holds no model\.safetensors"):
        load_hf(other)
    monkeypatch.setattr(module, "MAX_WEIGHTS", 100)
    with pytest.raises(af.CertificateError, match="at most 100 are read"):
        load_hf(folder)


def test_paths_and_packages(net: CompiledNetwork, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(af.ArgumentError, match="there already; force=True"):
        to_hf(net, folder)
    with pytest.raises(af.ArgumentError, match="is a file"):
        to_hf(net, folder / "config.json")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(af.MissingExtra, match=r"attnforge\[convert\]"):
        to_hf(net, folder.parent / "new")
    assert not (folder.parent / "new").exists()


def test_cards_of_long_targets_and_measurements(net: CompiledNetwork) -> None:
    wide = af.compile(" + ".join(f"sin(v{i})" for i in range(14)), af.Box({f"v{i}": (0, 1) for i in range(14)}), 1e-2)
    text = card(wide, {}, None, "pass")
    assert "| 2 more | | |" in text and "..." in text.split("\n# ")[1].splitlines()[0] and " more | | " in text
    assert "Measured" not in text


def test_the_command_writes_a_folder(net: CompiledNetwork, tmp_path: Path) -> None:
    net.save(tmp_path / "net.safetensors")
    args = ["export", str(tmp_path / "net.safetensors"), "--to", "hf", "-o", str(tmp_path / "out"), "--no-verify"]
    assert CliRunner().invoke(app, args).exit_code == 0
    assert (tmp_path / "out" / "config.json").is_file()
    again = CliRunner().invoke(app, args)
    assert again.exit_code == 2 and "there already" in again.output
    assert CliRunner().invoke(app, [*args, "--force"]).exit_code == 0
