"""Comparing an artefact with its network: where is looked, what is found, how a fresh process is talked to."""

from __future__ import annotations

import dataclasses
import importlib
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import attnforge as af
from attnforge import theorems
from attnforge.compiler.compiled import CompiledNetwork
from attnforge.export import Artefact, Verification, fresh, load_plain, to_plain, verify
from attnforge.export.fresh import receive, send
from attnforge.export.verification import _compared, _Other, _Pairing, domain
from attnforge.saving import free_file, free_folder

BOX = af.Box(x=(-1, 1), y=(0.5, 2))


@pytest.fixture(scope="module")
def net() -> CompiledNetwork:
    return af.compile("sin(x*y)", BOX, 1e-3)


@pytest.fixture(scope="module")
def saved(net: CompiledNetwork, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "plain.safetensors"
    to_plain(net).save(path)
    return path


def against(net: CompiledNetwork, change: object, bound: float | None = None) -> Verification:
    """The comparison with an artefact that adds something to the network's output, in this process."""

    def changed(*x: Tensor) -> Tensor:
        with torch.no_grad():  # as the network is run: where gradients are wanted, sums have another order
            return net.core(*x) + change(*x)  # type: ignore[operator]

    other = _Other(changed, 4096)
    return _compared(_Pairing("onnx", other, net, domain(net)), 512, bound, 0)


def test_a_plain_file_agrees_and_can_be_loaded(net: CompiledNetwork, saved: Path) -> None:
    record = verify(saved, net, points=256)
    assert record.passed and record.kind == "plain" and record.dtype == "float32"
    assert record.largest <= record.bound and record.points >= 512
    x = BOX.sample(50, dtype=torch.float32)
    for loaded in (load_plain(saved), af.load(saved)):
        assert torch.equal(loaded(x), to_plain(net)(x))
        assert loaded.certificate.bound is not None and loaded.certificate.bound >= net.certificate.bound / 2


def test_a_changed_weight_is_found(net: CompiledNetwork) -> None:
    plain = to_plain(net)
    with torch.no_grad():
        plain.readout.weight *= 1.001
    plain.attach(net.certificate)
    with pytest.raises(af.CertificateError, match="plain DIFFERS from the network") as found:
        verify(plain, net, points=64)
    assert "the largest is at (" in str(found.value)


def test_a_changed_file_is_refused_by_the_fresh_process(net: CompiledNetwork, saved: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.safetensors"
    data = bytearray(saved.read_bytes())
    data[-5] ^= 0x40
    broken.write_bytes(data)
    with pytest.raises(af.CertificateError, match=r"cannot be run by a fresh process: CertificateError.*hash"):
        verify(broken, net)


def test_the_climb_finds_a_narrow_difference(net: CompiledNetwork) -> None:
    spot = torch.tensor([0.3, 1.1])

    def bump(x: Tensor) -> Tensor:
        return 1e-3 / (1 + 100 * ((x - spot) ** 2).sum(-1))

    flat = domain(net).sample(600, 1)
    record = against(net, bump, bound=1.0)
    assert float(bump(flat).max()) < record.largest <= 1e-3 * (1 + 1e-6)
    assert record.largest > 0.99e-3 and abs(record.at[0] - 0.3) < 0.02 and abs(record.at[1] - 1.1) < 0.02


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_differs(net: CompiledNetwork, value: float) -> None:
    with pytest.raises(af.CertificateError, match="DIFFERS"):
        against(net, lambda x: torch.where(x[:, 0] > 0.9, value, 0.0))


def test_another_shape_is_named(net: CompiledNetwork) -> None:
    with pytest.raises(af.CertificateError, match=r"returns shape \(64, 64\) where the network returns \(64,\)"):
        against(net, lambda x: x[:, :1])


def test_the_bound_follows_the_dtype_and_can_be_given(net: CompiledNetwork) -> None:
    record = against(net, lambda x: 0 * x[:, 0])
    assert record.largest == 0 and record.bound >= 1e-5 and record.points == 64 + 512 + 4 + 8 * 32 * 2
    with pytest.raises(af.CertificateError, match=r"allowed 1\.000e-08"):
        against(net, lambda x: torch.full((len(x),), 1e-6), bound=1e-8)
    with pytest.raises(af.ArgumentError, match="one point at least"):
        dataclasses.replace(record, points=0)


@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        (lambda: af.ProductHead.symmetric(2, 3), ((), ())),
        (lambda: af.AnchorHead.fit("sin", -1, 1, anchors=8), ((),)),
        (lambda: af.NormHead.fit(8, (0.5, 2)), ((8,),)),
        (lambda: af.compile("x*y", BOX, 1e-3), ((2,),)),
        (lambda: theorems.ramp([1.0, 2.0], 0.0, -1, 1, variant="gate"), ((2, 2),)),
    ],
)
def test_domains_have_the_shapes_that_networks_take(build: object, shapes: tuple[tuple[int, ...], ...]) -> None:
    net = build()  # type: ignore[operator]
    where = domain(net)
    assert where.shapes == shapes
    inputs = where.split(torch.cat([where.sample(5), where.corners(4)]))
    assert torch.isfinite(net.core(*inputs)).all() and inputs[0].dtype == net.dtype
    points = where.sample(200).double()
    assert (points >= where.lower).all() and (points <= where.upper).all()


@settings(max_examples=20)
@given(
    st.lists(st.lists(st.floats(allow_nan=False, width=64), max_size=5), max_size=3),
    st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=20),
)
def test_messages_survive_the_pipe(lists: list[list[float]], words: str) -> None:
    stream = io.BytesIO()
    arrays = [np.array(values) for values in lists]
    send(stream, arrays, words)
    stream.seek(0)
    found = receive(stream)
    assert found is not None and len(found[0]) == len(arrays)
    assert all(np.array_equal(a, b) for a, b in zip(found[0], arrays, strict=True))
    if not arrays:
        assert found[1] == ("-" + words.replace("\n", " ")).strip()[1:]
    assert receive(io.BytesIO()) is None


def test_the_fresh_process_needs_neither_torch_nor_attnforge_for_onnx() -> None:
    code = (
        "import runpy, sys\n"
        "found = runpy.run_path(sys.argv[1])\n"
        "sys.stdout.write(f\"{found['KINDS']} {[m for m in ('torch', 'attnforge') if m in sys.modules]}\")"
    )
    command = [sys.executable, "-P", "-c", code, fresh.__file__]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == "('plain', 'lens', 'hf', 'onnx') []"
    for module, load, method in fresh.LOADERS.values():
        loader = getattr(importlib.import_module(f"attnforge.export.{module}"), load)
        assert callable(loader) and (method == "__call__" or method.isidentifier())


def test_mistakes(net: CompiledNetwork, tmp_path: Path) -> None:
    (tmp_path / "net.txt").write_text("x")
    for artefact, words in (
        (tmp_path / "nothing.onnx", "there is no file or folder"),
        (tmp_path / "net.txt", "cannot tell what"),
        (object(), "expected what an export returned or a path"),
    ):
        with pytest.raises(af.ArgumentError, match=words):
            verify(artefact, net)  # type: ignore[arg-type]
    with pytest.raises(af.ArgumentError, match="unknown kind 'onxn'; did you mean 'onnx'"):
        verify(tmp_path / "net.txt", net, kind="onxn")
    with pytest.raises(af.ArgumentError, match="points must be at least 1"):
        verify(tmp_path / "net.txt", net, points=0)
    with pytest.raises(af.ArgumentError, match="expected a network built by attnforge"):
        verify(tmp_path / "net.txt", torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_paths(tmp_path: Path) -> None:
    assert free_folder(tmp_path / "new") == tmp_path / "new"
    (tmp_path / "new").mkdir()
    assert free_folder(tmp_path / "new") == tmp_path / "new", "empty"
    (tmp_path / "new" / "file.onnx").write_text("x")
    with pytest.raises(af.ArgumentError, match="there already"):
        free_folder(tmp_path / "new")
    assert free_folder(tmp_path / "new", force=True)
    with pytest.raises(af.ArgumentError, match="is a file; expected a folder"):
        free_folder(tmp_path / "new" / "file.onnx")
    assert free_file(tmp_path / "new" / "file.onnx", ".onnx", force=True)
    held = Artefact("onnx", tmp_path / "new" / "file.onnx")
    assert Path(held) == held.path and str(held) == str(held.path)
