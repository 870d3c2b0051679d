"""Token programs in other tools: token ids in, logits out, the same values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import attnforge as af
from attnforge import export, rasp
from attnforge.rasp import library
from attnforge.rasp.network.compiled import CompiledProgram

DOMAIN = rasp.Sequences("abc", 5)


@pytest.fixture(scope="module")
def sort() -> CompiledProgram:
    return af.compile(library.sort().named("sort"), DOMAIN)


@pytest.fixture(scope="module")
def plain(sort: CompiledProgram) -> export.PlainTransformer:
    return export.to_plain(sort)


SEQUENCES = list(DOMAIN)[::7]


def right(net: CompiledProgram, logits: torch.Tensor) -> bool:
    found = net.decode(logits, [len(s) for s in SEQUENCES])
    return found == [sorted(s) for s in SEQUENCES]


def test_ids_are_places_in_the_vocabulary(sort: CompiledProgram) -> None:
    ids = sort.ids([("c", "a"), ("b",)], 3)
    assert ids.tolist() == [[2, 0, 3], [1, 3, 3]]
    assert torch.equal(
        sort.tensors(ids), sort.tensors(torch.cat([sort.encode([("c", "a"), ("b",)]), torch.zeros(2, 1, 4)], 1))
    )
    with pytest.raises(af.DomainError, match="0 to 2, and 3 for padding"):
        sort.tensors(torch.tensor([[4]]))
    with pytest.raises(af.DomainError, match="one-hot"):
        sort.tensors(torch.tensor([[3, 1]]))


WIDTHS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.uint16, torch.int64)


@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_ids_are_integers_of_any_width(
    sort: CompiledProgram, plain: export.PlainTransformer, width: torch.dtype
) -> None:
    ids = sort.ids(SEQUENCES, 5)
    assert torch.equal(sort.tensors(ids.to(width)), sort.tensors(ids))
    assert torch.equal(plain(ids.to(width)), plain(ids))


@pytest.mark.parametrize("kind", [torch.bool, torch.complex64], ids=str)
def test_masks_are_no_ids(sort: CompiledProgram, plain: export.PlainTransformer, kind: torch.dtype) -> None:
    for net in (sort.tensors, plain):
        with pytest.raises(af.ArgumentError, match=f"integers, 0 to 2, and 3 for padding, got {kind}"):
            net(torch.ones(2, 5, dtype=kind))


def test_plain(sort: CompiledProgram, plain: export.PlainTransformer, tmp_path: Path) -> None:
    assert plain.certificate.kind == "exact" and "B6" in plain.certificate.lemmas
    assert right(sort, plain(sort.ids(SEQUENCES, 5)))
    assert any(head.purpose.startswith("count") for head in plain.heads[0])
    path = tmp_path / "plain.safetensors"
    plain.save(path)
    assert af.check(path).kind == "exact" and right(sort, af.load(path)(sort.ids(SEQUENCES, 5)))
    with torch.no_grad():
        plain.blocks[0].attention.in_proj_weight[0, 1] += 1.0  # type: ignore[union-attr, index, operator]
    with pytest.raises(af.CertificateError):
        af.certify(plain)
    with torch.no_grad():
        plain.blocks[0].attention.in_proj_weight[0, 1] -= 1.0  # type: ignore[union-attr, index, operator]
    with pytest.raises(af.ArgumentError, match="token ids of shape"):
        plain(torch.zeros(2, 4, dtype=torch.long))


def test_onnx(sort: CompiledProgram, plain: export.PlainTransformer, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    for number, net in enumerate((sort, plain)):
        file = export.to_onnx(net, tmp_path / f"{number}.onnx", verify=False)
        assert right(sort, export.run_onnx(file, sort.ids(SEQUENCES, 5)))
    assert right(sort, export.run_onnx(tmp_path / "0.onnx", sort.ids(SEQUENCES)))


def test_hugging_face(sort: CompiledProgram, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    export.to_hf(sort, tmp_path / "hf", verify=False)
    model = export.load_hf(tmp_path / "hf")
    assert right(sort, model(input_ids=sort.ids(SEQUENCES, 5)).output) and model.certificate.kind == "exact"
    card = (tmp_path / "hf" / "README.md").read_text("utf-8")
    assert "Exact" in card and "input_ids" in card and "Sequences(" in card


def test_transformer_lens(sort: CompiledProgram) -> None:
    pytest.importorskip("transformer_lens")
    lens = export.to_lens(sort, verify=False)
    ids = sort.ids(SEQUENCES, 5)
    assert right(sort, lens(ids)) and right(sort, lens.model(lens.ids(ids))[:, lens.registers :])
    assert lens.cfg.d_vocab == 4 + lens.registers and lens.cfg.d_vocab_out == 3


def test_too_many_slots_for_registers_are_refused_with_the_op() -> None:
    net = af.compile(rasp.apply(lambda n: n * n % 7, rasp.length).named("squares"), rasp.Sequences("ab", 600))
    with pytest.raises(af.UnsupportedOperation, match=r"'map: squares' has \d+ memory slots, and at most 511"):
        export.to_plain(net)
