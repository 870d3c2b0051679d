"""Converted models on disk: they come back as they were, and files that were changed are found out."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import attnforge as af
from attnforge.conversion import storage
from attnforge.conversion.folder import read_model, read_tokenizer, token_batches
from attnforge.conversion.record import Conversion

transformers = pytest.importorskip("transformers", reason="pip install 'attnforge[convert]'")


class Made:
    """A small encoder, converted and saved once."""

    def __init__(self, source: Path, folder: Path):
        self.original, tokenizer = read_model(source), read_tokenizer(source)
        lines = ["the cat sat on a mat .", "why is it red ?", "a big dog ran home", "one two three"]
        self.batch = token_batches(tokenizer, lines)[0]
        self.model, self.report = af.convert(self.original, self.batch, level="pure")
        self.folder = storage.save(self.model, self.report, folder, tokenizer=tokenizer)
        self.out = output(self.model, self.batch)


@torch.no_grad()
def output(model: nn.Module, batch: Any) -> Tensor:
    found = model(**batch)
    return torch.cat([found.last_hidden_state.flatten(), found.pooler_output.flatten()])


@pytest.fixture(scope="module")
def made(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tiny_folder, tmp_path_factory.mktemp("out") / "converted")


@pytest.fixture
def copied(made: Made, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made.folder, tmp_path / "copy"))


def test_a_folder_comes_back_bit_by_bit(made: Made) -> None:
    again = af.load(made.folder)
    assert type(again) is type(made.original) and not again.training
    assert torch.equal(output(again, made.batch), made.out)
    mine, other = made.model.state_dict(), again.state_dict()
    assert mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)
    sites = {site.path for site in made.report.sites}
    assert {path for path, m in again.named_modules() if path in sites and "attnforge" in type(m).__module__} == sites
    assert read_tokenizer(made.folder)("the cat")["input_ids"]


def test_check_computes_the_certificates_again(made: Made) -> None:
    found = af.check(made.folder)
    assert isinstance(found, Conversion) and found == made.report
    assert found.worst <= found.eps


def plain_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [nn.Linear(3, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)]
    return nn.Sequential(*parts).to(dtype)


@pytest.mark.parametrize("start", [torch.float32, torch.float64])
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_model_in_another_dtype_has_the_bounds_of_that_dtype(
    start: torch.dtype, cast: torch.dtype, tmp_path: Path
) -> None:
    model = plain_model(start)
    converted, report = af.convert(model, torch.randn(64, 3, dtype=start), level="pure")
    folder = storage.save(converted.to(cast), report, tmp_path / "cast")
    if cast in (start, torch.float64):
        found = storage.check(folder, model)
        assert found.dtype == str(cast).removeprefix("torch.") and found.worst <= report.worst
        return
    with pytest.raises(af.CertificateError, match=r"is stated, only .* can be proved") as refused:
        storage.check(folder, model)
    assert all(site.path in str(refused.value) for site in report.sites if site.family != "norm")


def test_tables_in_another_dtype_than_their_model_are_refused() -> None:
    converted, report = af.convert(plain_model(), torch.randn(64, 3), level="pure")
    converted[2].head.double()
    with pytest.raises(af.CertificateError, match=r"2: its tables are torch.float64, the model around it is torch.f"):
        storage.recertified(converted, report)
    converted[2].head.float()
    assert storage.recertified(converted, report).dtype == "float32"
    converted[0].double()
    with pytest.raises(af.CertificateError, match=r"no bound speaks of a model in torch.float32, torch.float64"):
        storage.recertified(converted, report)


def test_nothing_is_pickled(made: Made) -> None:
    kinds = {path.suffix for path in made.folder.iterdir()}
    assert kinds <= {".json", ".safetensors", ".txt"}, "readable files only"
    assert {"config.json", "model.safetensors", "conversion.json"} <= {path.name for path in made.folder.iterdir()}


def test_save_pretrained_is_enough(made: Made, tmp_path: Path) -> None:
    made.model.save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    assert not (tmp_path / "hf" / "conversion.json").exists()
    assert torch.equal(output(af.load(tmp_path / "hf"), made.batch), made.out)
    assert af.check(tmp_path / "hf") == made.report


def test_saving_again_gives_the_same_files(made: Made, tmp_path: Path) -> None:
    again = storage.save(af.load(made.folder), made.report, tmp_path / "again")
    for name in ("model.safetensors", "config.json", "conversion.json"):
        assert (again / name).read_bytes() == (made.folder / name).read_bytes()


def test_transformers_alone_reads_the_original_weights(made: Made) -> None:
    plain = transformers.BertModel.from_pretrained(made.folder, local_files_only=True).eval()
    assert torch.allclose(output(plain, made.batch), output(made.original, made.batch), atol=1e-6)


def test_state_dict_round_trip(made: Made) -> None:
    other = af.load(made.folder)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    assert not torch.equal(output(other, made.batch), made.out)
    other.load_state_dict(made.model.state_dict())
    assert torch.equal(output(other, made.batch), made.out)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_dtypes_come_back(made: Made, dtype: torch.dtype, tmp_path: Path) -> None:
    model, report = af.convert(copy.deepcopy(made.original).to(dtype), made.batch)
    storage.save(model, report, tmp_path / "out")
    again = af.load(tmp_path / "out")
    assert torch.equal(output(again, made.batch), output(model, made.batch))
    assert af.check(tmp_path / "out") == report and report.dtype == str(dtype).removeprefix("torch.")


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2), nn.SiLU())


def test_a_model_of_ones_own_is_read_into_its_architecture(tmp_path: Path) -> None:
    original, x = mlp(), torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    model, report = af.convert(original, x, level="pure")
    storage.save(model, report, tmp_path / "mlp")
    with pytest.raises(af.CertificateError, match=r"storage\.load\(folder, model\)"):
        af.load(tmp_path / "mlp")
    blank = mlp().requires_grad_(False)
    for parameter in blank.parameters():
        parameter.zero_()
    again = storage.load(tmp_path / "mlp", blank)
    with torch.no_grad():
        assert torch.equal(again(x), model(x)) and not torch.equal(blank(x), model(x))
    assert storage.check(tmp_path / "mlp", blank) == report
    careful, record = af.convert(original, x, level="pure", strict=True)
    storage.save(careful, record, tmp_path / "strict")
    with pytest.raises(af.DomainError, match="outside"):
        storage.load(tmp_path / "strict", blank)(1e6 * x)
    with pytest.raises(af.CertificateError, match="holds a Sequential, the model given is a Linear"):
        storage.load(tmp_path / "mlp", nn.Linear(1, 1))
    wrong = nn.Sequential(*[nn.ReLU() if isinstance(m, nn.GELU) else m for m in mlp()])
    with pytest.raises(af.CertificateError, match="'1' of Sequential is not the gelu described"):
        storage.load(tmp_path / "mlp", wrong)


def test_decoders_with_tied_weights_and_gated_units(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True, initializer_range=0.4,
    )  # fmt: skip
    original = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 40, (4, 9), generator=torch.Generator().manual_seed(1))
    model, report = af.convert(original, {"input_ids": ids}, level="pure")
    assert set(report.by_operation) == {"rms_norm", "silu", "product"}
    for folder, write in (
        (tmp_path / "ours", lambda f: storage.save(model, report, f)),
        (tmp_path / "theirs", lambda f: model.save_pretrained(f)),
    ):
        write(folder)
        again = af.load(folder)
        with torch.no_grad():
            assert torch.equal(again(ids).logits, model(ids).logits)
            assert again.lm_head.weight is again.model.embed_tokens.weight
            tokens = again.generate(ids[:1], max_new_tokens=5, do_sample=False)
            assert torch.equal(tokens, original.generate(ids[:1], max_new_tokens=5, do_sample=False))
        assert af.check(folder) == report


SMALL = {"num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 24, "hidden_size": 16}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "AlbertModel": ("AlbertConfig", {**SMALL, "vocab_size": 40, "embedding_size": 8}),
    "RobertaModel": ("RobertaConfig", {**SMALL, "vocab_size": 40, "max_position_embeddings": 20}),
    "DistilBertModel": ("DistilBertConfig", {"dim": 8, "hidden_dim": 24, "n_layers": 2, "n_heads": 2, "vocab_size": 9}),
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 20}),
    "ViTModel": ("ViTConfig", {**SMALL, "image_size": 8, "patch_size": 4}),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_other_architectures_come_back(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    settings, options = ARCHITECTURES[name]
    original = getattr(transformers, name)(getattr(transformers, settings)(**options)).eval()
    draw = torch.Generator().manual_seed(1)
    batch = {"pixel_values": torch.randn(4, 3, 8, 8, generator=draw)} if name == "ViTModel" else {
        "input_ids": torch.randint(3, 9, (4, 7), generator=draw)}  # fmt: skip
    model, report = af.convert(original, batch)
    storage.save(model, report, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")  # type: ignore[operator]
    with torch.no_grad():
        wanted = model(**batch)[0]
        assert float((wanted - original(**batch)[0]).abs().max()) < 1e-4
        for folder in ("ours", "theirs"):
            assert torch.equal(af.load(tmp_path / folder)(**batch)[0], wanted), folder
            assert af.check(tmp_path / folder) == report


# ------------------------------------------------------------------------------------------------ changed files


def edit(file: Path, change: Callable[[Any], None], seal: bool = False) -> None:
    """Changes a JSON file; `seal` also renews the digest, as somebody would who knows the format."""
    data = json.loads(file.read_text("utf-8"))
    change(data)
    if seal:
        data["digest"] = storage._digest({k: v for k, v in data.items() if k != "digest"})
    file.write_text(json.dumps(data), encoding="utf-8")


@pytest.mark.parametrize("name", ["conversion.json", "model.safetensors", "config.json"])
def test_missing_and_truncated_files(copied: Path, name: str) -> None:
    file = copied / name
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(af.CertificateError, match=name.replace(".", r"\.")):
        af.load(copied)
    file.unlink()
    if name == "conversion.json":
        assert af.check(copied), "config.json says what was converted, too"
        return
    with pytest.raises(af.CertificateError, match=name.replace(".", r"\.")):
        af.load(copied)


def test_no_folder_and_other_folders(tmp_path: Path, tiny_folder: Path) -> None:
    with pytest.raises(af.CertificateError, match="no file"):
        af.load(tmp_path / "nowhere")
    for folder in (tmp_path, tiny_folder):
        with pytest.raises(af.CertificateError, match="holds no converted model"):
            af.load(folder)


def test_changed_weights_are_found(copied: Path, made: Made) -> None:
    tensors = load_file(copied / "model.safetensors")
    name = next(name for name in tensors if ".head." in name)
    tensors[name] = tensors[name] + 1e-3
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(af.CertificateError, match=r"model\.safetensors' was changed"):
        af.load(copied)


def test_a_changed_description_is_found(copied: Path) -> None:
    edit(copied / "conversion.json", lambda d: d["conversion"].update(eps=1.0))
    with pytest.raises(af.CertificateError, match="digest"):
        af.load(copied)


def _first(kind: str) -> Callable[[Any], Any]:
    return lambda d: next(site for site in d["conversion"]["sites"] if site["kind"] == kind)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: _first("activation")(d).update(bound=1e-12), "only"),
        (lambda d: _first("norm")(d).update(bound=1e-12), "only"),
        (lambda d: _first("activation")(d).update(low=-1e3), "its heads are for"),
        (lambda d: _first("norm")(d).update(high=1e9), "its heads are for"),
        (lambda d: _first("activation")(d).update(operation="relu"), "is not the relu described"),
        (lambda d: _first("norm")(d)["config"]["head"].update(eps_norm=1e-3), "is not the layer_norm described"),
        (lambda d: _first("activation")(d).update(path="encoder.nowhere"), "does not fit"),
        (lambda d: _first("activation")(d)["config"].update(family="network"), "unknown family of heads 'network'"),
        (lambda d: _first("activation")(d)["config"].update(config={}), "a head has no 'function'"),
        (lambda d: d["conversion"].pop("sites"), "does not describe"),
        (lambda d: d["conversion"].update(sites=[]), "does not fit"),
        (lambda d: d.update(aliases={"a": "b"}), "does not describe"),
        (lambda d: d.update(format=99), "format 1"),
    ],
)  # fmt: skip
def test_a_sealed_lie_is_found_by_check(copied: Path, change: Callable[[Any], None], words: str) -> None:
    edit(copied / "conversion.json", change, seal=True)
    with pytest.raises(af.CertificateError) as caught:
        af.check(copied)
    assert words in str(caught.value)


def test_tables_that_were_changed_and_sealed_are_certified_as_they_are(copied: Path, made: Made) -> None:
    site = next(site for site in made.report.sites if site.operation == "gelu")
    tensors = load_file(copied / "model.safetensors")
    name = next(n for n in tensors if n.startswith(site.path) and tensors[n].numel() >= site.anchors)
    tensors[name] = tensors[name] + 0.25
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    edit(copied / "conversion.json", lambda d: d.update(weights=None), seal=True)
    with pytest.raises(af.CertificateError, match=site.path):
        af.check(copied)


def test_a_configuration_cannot_make_us_allocate(copied: Path) -> None:
    for key, value in (("num_hidden_layers", 10**9), ("hidden_size", 10**6), ("vocab_size", 10**12)):
        kept = (copied / "config.json").read_bytes()
        edit(copied / "config.json", lambda d, k=key, v=value: d.update({k: v}))
        edit(copied / "conversion.json", lambda d: d.update(config=None), seal=True)
        with pytest.raises(af.CertificateError, match=r"layers|does not fit|does not describe"):
            af.load(copied)
        (copied / "config.json").write_bytes(kept)


def test_classes_of_others_are_refused(copied: Path) -> None:
    edit(copied / "config.json", lambda d: d.update(architectures=["Trainer"]))
    edit(copied / "conversion.json", lambda d: d.update(config=None), seal=True)
    with pytest.raises(af.CertificateError, match="'Trainer'"):
        af.load(copied)


# ------------------------------------------------------------------------------------------------ where to write


def test_prepare(tmp_path: Path, copied: Path) -> None:
    assert storage.prepare(tmp_path / "new") == tmp_path / "new"
    (tmp_path / "file").write_text("x")
    with pytest.raises(af.ArgumentError, match="is a file"):
        storage.prepare(tmp_path / "file", force=True)
    with pytest.raises(af.ArgumentError, match="holds other files"):
        storage.prepare(tmp_path, force=True)
    with pytest.raises(af.ArgumentError, match="force=True replaces it"):
        storage.prepare(copied)
    assert storage.prepare(copied, force=True) == copied


def test_descriptions_that_were_changed(tmp_path: Path) -> None:
    """Whatever conversion.json says, with the digest that belongs to it: a report that holds, or `CertificateError`."""
    converted, report = af.convert(plain_model(), torch.randn(64, 3), level="ffn")
    folder = storage.save(converted, report, tmp_path / "hostile")
    file = folder / storage.DESCRIPTION
    header = json.loads(file.read_text("utf-8"))
    sites, rng = header["conversion"]["sites"], random.Random(0)
    at = next(i for i, site in enumerate(sites) if "config" in site["config"])
    site = ("conversion", "sites", at)
    named: list[tuple[Any, ...]] = [
        (*site, "bound"), (*site, "kind"), (*site, "operation"), ("conversion", "exponential"),
        *((*site, "config", "config", *more) for more in (("interval", 1), ("table", "anchors"), ("function",))),
    ]  # fmt: skip
    every = sorted(_places(header), key=str)
    values = (None, True, -1, 10**9, 10**400, 1e308, "", "x", [], {}, [None], {"a": 1}, "a" * 9000)
    tries = [(place, value) for place in named for value in (-1, 10**400, [None])]
    tries += [(rng.choice(every), rng.choice(values)) for _ in range(12)]
    kept = 0
    for place, value in tries:
        changed = copy.deepcopy({key: part for key, part in header.items() if key != "digest"})
        inner: Any = changed
        for key in place[:-1]:
            inner = inner.setdefault(key, {}) if isinstance(inner, dict) else inner[key]
        inner[place[-1]] = value
        text = json.dumps(changed, sort_keys=True, separators=(",", ":"))
        changed["digest"] = hashlib.sha256(text.encode()).hexdigest()
        file.write_text(json.dumps(changed), encoding="utf-8")
        try:
            found = storage.check(folder, plain_model())
        except af.CertificateError:
            continue
        kept += 1
        assert all(0 <= site.bound < 1 and isinstance(site.operation, str) for site in found.sites)
    assert kept < len(tries) / 2


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = value if isinstance(value, dict) else range(min(len(value), 4)) if isinstance(value, list) else ()
    for key in keys:
        if key != "digest":
            yield (*at, key)
            yield from _places(value[key], (*at, key))
