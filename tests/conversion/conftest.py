"""A Hugging Face folder with a small random encoder and its tokenizer, as `save_pretrained` writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

WORDS = [
    "the", "cat", "dog", "sat", "on", "a", "mat", "and", "ran", "home", "in", "rain", "sun", "red", "blue", "big",
    "one", "two", "three", "?", ".", ",", "is", "it", "why",
]  # fmt: skip
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LINES = (
    "the cat sat on a mat .", "why is it red ?", "a big dog ran home", "one two three", "the sun and the rain", "blue ,"
)  # fmt: skip


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers", reason="pip install 'attnforge[convert]'")
    folder = tmp_path_factory.mktemp("models") / "tiny-bert"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *WORDS]) + "\n", encoding="utf-8")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(SPECIAL) + len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32, initializer_range=0.5,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "texts.txt"
    file.write_text("\n".join(LINES) + "\n\n", encoding="utf-8")
    return file
