"""TransformerLens models: equal outputs and patterns, hooks that work, files, and the wrong version of the package."""

from __future__ import annotations

import runpy
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

import attnforge as af
from attnforge import theorems
from attnforge.cli import app
from attnforge.export import Lens, load_lens, to_lens, to_plain, verify
from attnforge.export.verification import is_lens_file
from here import verified_here

ROOT = Path(__file__).resolve().parents[2]
BOX = af.Box(x=(-1, 1), y=(0.5, 2))
FORMULA = "sin(x*y) + exp(-x**2)/y"


@pytest.fixture(scope="module")
def lens() -> Lens:
    return to_lens(af.compile(FORMULA, BOX, 1e-3), verify=False)


def causal_ramp() -> Lens:
    m = theorems.ramp([1.0, -0.5], 0.1, -1, 1, anchors=12, form="tokens")
    return to_lens(to_plain(m, tokens=3, causal=True), verify=False)


def sequence() -> Lens:
    net = af.compile(lambda x: torch.sin(x) - x.mean(-2, keepdim=True), af.Box.cube(-1, 1, shape=(3, 2)), 1e-3)
    return to_lens(net, verify=False)


@pytest.mark.parametrize("build", [causal_ramp, sequence, None])
def test_outputs_and_patterns_are_those_of_the_plain_transformer(build: Any, lens: Lens) -> None:
    lens = lens if build is None else build()
    inputs = lens.plain.example_input()
    with torch.no_grad():
        found, cache = lens.run_with_cache(*inputs)
        assert torch.allclose(found, lens.plain(*inputs), rtol=0, atol=1e-6)
        assert torch.allclose(lens(*inputs), found, rtol=0, atol=1e-6)
        for layer, wanted in enumerate(lens.plain.attention(*inputs)):
            heads = wanted.shape[1]
            assert (cache["pattern", layer][:, :heads] - wanted).abs().max() <= 1e-6
        assert torch.equal(cache["resid_pre", 0], lens.residual(*inputs))
        count, after = lens.cfg.n_layers, None
        for layer in range(count + 1):  # TransformerLens gives logits where it should stop after the last block
            wanted = cache["resid_pre", layer] if layer < count else cache["resid_post", count - 1]
            found, after = lens.run_with_cache(*inputs, stop_at_layer=layer)
            assert torch.equal(found, wanted)
            assert torch.equal(lens.run_with_hooks(*inputs, fwd_hooks=[], stop_at_layer=layer), wanted)
        assert torch.equal(after["pattern", 0], cache["pattern", 0])
        assert torch.equal(lens.readout(wanted), lens(*inputs)), "nothing is left behind"
        with pytest.raises(af.ArgumentError, match="stop_at_layer is"):
            lens.run_with_cache(*inputs, stop_at_layer=count + 1)
    assert lens.cfg.attention_dir == ("causal" if lens.plain.causal else "bidirectional")
    assert lens.cfg.attn_only and lens.cfg.normalization_type is None
    assert lens.cfg.dtype == lens.plain.dtype


def test_blocks_of_different_sizes_are_padded_with_nothing() -> None:
    net = af.compile(["sin(x)*y", "exp(x)", "cos(y)", "x**2"], BOX, 1e-3, dtype=torch.float64)
    lens = to_lens(net, verify=False)
    sizes = [(block.attention.num_heads, block.attention.head_dim) for block in lens.plain.blocks]
    assert lens.cfg.n_heads == max(n for n, _ in sizes) and lens.cfg.d_head == max(d for _, d in sizes)
    x = BOX.sample(20, dtype=torch.float64)
    with torch.no_grad():
        clean = lens(x)
        assert torch.allclose(clean, net(x), rtol=0, atol=1e-10)
        for layer, row in enumerate(lens.heads):
            unused = [h for h in range(lens.cfg.n_heads) if h >= len(row) or not row[h].purpose]
            out = lens.run_with_hooks(x, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", without(unused))])
            assert torch.equal(out, clean)


def without(heads: list[int]) -> Any:
    def cut(z: Tensor, hook: Any) -> Tensor:
        z = z.clone()
        z[:, :, heads] = 0
        return z

    return cut


def test_hooks_reach_every_head_that_does_something(lens: Lens) -> None:
    x = BOX.sample(50, dtype=torch.float32)
    with torch.no_grad():
        clean = lens(x)
        for layer, row in enumerate(lens.heads):
            for head, known in enumerate(row):
                out = lens.run_with_hooks(x, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", without([head]))])
                assert ((out - clean).abs().max() > 1e-3) == bool(known.purpose), known


def test_files_hold_model_and_ground_truth(lens: Lens, tmp_path: Path) -> None:
    path = tmp_path / "lens.safetensors"
    lens.save(path)
    again = load_lens(path)
    x = BOX.sample(50, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(again(x), lens(x))
    assert again.heads == lens.heads and again.channels == lens.channels and again.registers == lens.registers
    assert is_lens_file(path) and not is_lens_file(Path(__file__))
    data = path.read_bytes()
    stream = lens.plain.spec.stream
    path.write_bytes(data.replace(f'\\"stream\\": {stream}'.encode(), f'\\"stream\\": {99 - stream}'.encode()))
    with pytest.raises(af.CertificateError, match=r"channels are named|does not fit the tensors"):
        load_lens(path)
    path.write_bytes(data)
    tensors = load_file(path)
    with safe_open(str(path), framework="pt") as file:
        metadata = file.metadata()
    tensors["plain.readout.weight"] *= 1.5
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(af.CertificateError, match="its weights are not those that were certified"):
        load_lens(path)
    path.write_bytes(data[:-40])
    with pytest.raises(af.CertificateError, match="does not hold a TransformerLens model"):
        load_lens(path)
    lens.plain.save(path, force=True)
    with pytest.raises(af.CertificateError, match="does not hold a TransformerLens model"):
        load_lens(path)


def test_a_broken_weight_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    verified_here(monkeypatch, "lens")  # a fresh process verifies the one of docs/export.md, which is whole
    net = af.compile("x*y", BOX, 1e-3)
    lens = to_lens(net, verify=False)
    lens.weights["blocks.0.attn.W_O"].mul_(1.01)
    with pytest.raises(af.CertificateError, match="lens DIFFERS"):
        verify(lens, net, points=64)


def test_an_affine_network_has_no_heads() -> None:
    with pytest.raises(af.ArgumentError, match="no attention at all"):
        to_lens(af.compile("2*x + 1", af.Box(x=(0, 1)), 1e-3), verify=False)


@pytest.mark.parametrize(
    ("installed", "words"),
    [(None, r"attnforge\[lens\]"), ("9.0.1", r"transformer-lens 9\.0\.1 .*neither TransformerBridge.boot_native nor")],
)
def test_without_the_right_package(installed: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = af.compile("x*y", BOX, 1e-3)
    later = types.ModuleType("transformer_lens")
    later.__version__ = installed  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_lens", None if installed is None else later)
    with pytest.raises(af.MissingExtra, match=words):
        to_lens(net)


def test_the_example_finds_the_sine() -> None:
    example = runpy.run_path(str(ROOT / "examples" / "find_the_sine.py"))
    best = example["main"]()
    assert best.purpose.endswith("sin(x)") and best.correlation > 0.99


def test_the_command_writes_a_lens(tmp_path: Path) -> None:
    af.compile("x*y", BOX, 1e-3).save(tmp_path / "net.safetensors")
    out = tmp_path / "lens.safetensors"
    done = CliRunner().invoke(app, ["export", str(tmp_path / "net.safetensors"), "--to", "lens", "-o", str(out),
                                    "--no-verify"])  # fmt: skip
    assert done.exit_code == 0 and is_lens_file(out)
