"""Families of models, at random and small: converted at both levels, pure where that is asked, and still themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnforge as af
from attnforge.conversion.engine import outputs
from attnforge.conversion.norm import ConvertedNorm
from attnforge.conversion.record import Conversion
from attnforge.conversion.site import ConvertedActivation, GatedUnit
from attnforge.heads.fast.activation import FastActivation

transformers = pytest.importorskip("transformers", reason="pip install 'attnforge[convert]'")

SIZES = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
TEXT = dict(vocab_size=99, max_position_embeddings=32, **SIZES)
Made = tuple[nn.Module, Any]


def ids() -> Tensor:
    return torch.randint(3, 99, (6, 7), generator=torch.Generator().manual_seed(1))


def bert() -> Made:
    mask = torch.ones(6, 7, dtype=torch.long)
    mask[2, 4:] = 0
    return transformers.BertModel(transformers.BertConfig(**TEXT)), dict(input_ids=ids(), attention_mask=mask)


def roberta() -> Made:
    return transformers.RobertaModel(transformers.RobertaConfig(**TEXT)), dict(input_ids=ids())


def distilbert() -> Made:
    config = transformers.DistilBertConfig(vocab_size=99, dim=24, n_layers=2, n_heads=4, hidden_dim=48)
    return transformers.DistilBertModel(config), dict(input_ids=ids())


def albert() -> Made:
    config = transformers.AlbertConfig(**{**TEXT, "num_hidden_layers": 3}, embedding_size=16)
    return transformers.AlbertModel(config), dict(input_ids=ids())


def gpt2() -> Made:
    config = transformers.GPT2Config(vocab_size=99, n_embd=24, n_layer=2, n_head=4, n_positions=32)
    return transformers.GPT2LMHeadModel(config), dict(input_ids=ids())


def llama() -> Made:
    config = transformers.LlamaConfig(**TEXT, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config), dict(input_ids=ids())


def gemma() -> Made:
    config = transformers.GemmaConfig(**TEXT, num_key_value_heads=2, head_dim=6)
    return transformers.GemmaForCausalLM(config), dict(input_ids=ids())


def phi3() -> Made:
    config = transformers.Phi3Config(**TEXT, num_key_value_heads=2, pad_token_id=0)
    return transformers.Phi3ForCausalLM(config), dict(input_ids=ids())


def t5() -> Made:
    sizes = dict(vocab_size=99, d_model=24, d_kv=6, d_ff=48, num_layers=2, num_heads=4)
    config = transformers.T5Config(**sizes, feed_forward_proj="gated-gelu")
    return transformers.T5EncoderModel(config), dict(input_ids=ids())


def vit() -> Made:
    config = transformers.ViTConfig(image_size=16, patch_size=8, **SIZES)
    return transformers.ViTModel(config), torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def encoder(**options: Any) -> Made:
    layer = nn.TransformerEncoderLayer(24, 4, 48, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2), torch.randn(6, 5, 24, generator=torch.Generator().manual_seed(1))


def mlp() -> Made:
    net = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    return net, torch.randn(20, 4, generator=torch.Generator().manual_seed(1))


PURE = {  # how many sites of each operation there must be
    bert: {"layer_norm": 5, "gelu": 2, "tanh": 1},
    gpt2: {"layer_norm": 5, "gelu_tanh": 2},
    llama: {"product": 2, "silu": 2, "rms_norm": 5},
    vit: {"layer_norm": 5, "gelu": 2, "tanh": 1},
    encoder: {"layer_norm": 4, "relu": 2},
    mlp: {"gelu": 1, "layer_norm": 1, "relu": 1},
}
FFN = {
    roberta: {"gelu": 2, "tanh": 1},
    distilbert: {"gelu": 2},
    albert: {"gelu_tanh": 1, "tanh": 1},
    gemma: {"gelu_tanh": 2},
    phi3: {"silu": 2},
    t5: {"gelu_tanh": 2},
}


def made(build: Callable[[], Made]) -> Made:
    torch.manual_seed(0)
    model, data = build()
    return model.eval(), data


def run(model: nn.Module, data: Any) -> Any:
    with torch.no_grad():
        return model(**data) if isinstance(data, dict) else model(data)


def apart(model: nn.Module, other: nn.Module, data: Any) -> float:
    pairs = zip(outputs(run(model, data)), outputs(run(other, data)), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@functools.cache
def pure(build: Callable[[], Made]) -> tuple[nn.Module, Any, nn.Module, Conversion, dict[str, Tensor]]:
    """Model, data, converted model, report, and the weights from before; purity is proved inside."""
    model, data = made(build)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return model, data, *af.convert(model, data, level="pure"), before


@pytest.mark.parametrize("build", PURE, ids=lambda f: f.__name__)
def test_pure_models_keep_their_outputs_and_their_class(build: Callable[[], Made]) -> None:
    model, data, result, report, before = pure(build)
    assert type(result) is type(model)
    assert report.by_operation == {op: report.by_operation[op] for op in PURE[build]} == PURE[build]
    assert report.left == ()
    assert report.worst <= 1e-4
    assert report.most_anchors <= 64
    assert report.change is not None
    assert report.change < 2e-5
    assert apart(model, result, data) < 2e-5
    own = dict(result.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters():
        assert own[name] is parameter, "weights are shared, under their names"
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), "the original is not touched"


@pytest.mark.parametrize("build", FFN, ids=lambda f: f.__name__)
def test_activations_become_heads_and_the_rest_is_listed(build: Callable[[], Made]) -> None:
    model, data = made(build)
    result, report = af.convert(model, data)
    assert report.by_operation == FFN[build]
    assert report.change is not None
    assert report.change < 1e-5
    assert apart(model, result, data) < 1e-5
    norms = [left for left in report.left if left.operation.endswith("norm")]
    assert norms
    assert all("level='pure'" in left.reason for left in report.left)
    assert not any(isinstance(module, ConvertedNorm) for module in result.modules())


@pytest.mark.parametrize("build", [bert, encoder, llama], ids=lambda f: f.__name__)
def test_a_changed_head_changes_the_output(build: Callable[[], Made]) -> None:
    """Also where a fused evaluation path would compute the activation itself."""
    model, data = made(build)
    if build is encoder:
        model, data = made(lambda: encoder(activation="gelu"))
    result, _ = af.convert(model, data)
    whole = run(result, data)
    site = next(module for module in result.modules() if isinstance(module, ConvertedActivation))
    with torch.no_grad():
        for parameter in site.head.parameters():
            parameter.mul_(1.5)
    if build is llama:  # a gate alone: its slope is part of its form, no table
        assert isinstance(site.head, FastActivation)
        site.head.table = replace(site.head.table, gate=1.5)
    moved = [float((a - b).abs().max()) for a, b in zip(outputs(whole), outputs(run(result, data)), strict=True)]
    assert max(moved) > 1e-4


def test_padding_masks_and_nested_tensors_of_the_torch_encoder() -> None:
    model, data = made(lambda: encoder(activation="gelu"))
    result, _ = af.convert(model, data)
    mask = torch.zeros(6, 5, dtype=torch.bool)
    mask[1, 3:] = True
    with torch.no_grad():
        wanted, found = (m(data, src_key_padding_mask=mask) for m in (model, result))
    assert found.shape == data.shape
    assert float((wanted - found)[~mask].abs().max()) < 1e-5


@pytest.mark.parametrize("build", [gpt2, llama], ids=lambda f: f.__name__)
def test_generation_with_a_cache(build: Callable[[], Made]) -> None:
    model, data = made(build)
    result, _ = af.convert(model, data)
    prompt = data["input_ids"][:2, :4]
    options = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    with_cache = result.generate(prompt, use_cache=True, **options)
    assert torch.equal(with_cache, result.generate(prompt, use_cache=False, **options))
    assert torch.equal(with_cache, model.generate(prompt, **options))
    # one token at a time, the rest from the cache, gives what all tokens at once give
    with torch.no_grad():
        whole = result(data["input_ids"]).logits
        first = result(data["input_ids"][:, :-1], use_cache=True)
        last = result(data["input_ids"][:, -1:], past_key_values=first.past_key_values).logits
    assert float((last[:, 0] - whole[:, -1]).abs().max()) < 1e-5


def test_gated_units_keep_their_names() -> None:
    model, _, result, report, _ = pure(llama)
    units = [module for module in result.modules() if isinstance(module, GatedUnit)]
    assert len(units) == 2
    assert set(model.state_dict()) <= set(result.state_dict())
    site = next(site for site in report.sites if site.kind == "gated")
    assert site.path == "model.layers.0.mlp"
    assert site.bound <= 1e-4 * site.scale


def test_shared_layers_are_one_site_seen_often() -> None:
    model, data = made(albert)
    result, report = af.convert(model, data)
    site = next(site for site in report.sites if site.operation == "gelu_tanh")
    assert site.calls == 3, "three layers, one module"
    assert any("shared" in note for note in report.notes)
    assert sum(isinstance(module, ConvertedActivation) for module in result.modules()) == 2


def test_fine_tuning_reaches_every_table() -> None:
    _, data, result, _, _ = pure(bert)
    result.train()
    out = result(**data)
    (out.last_hidden_state.square().mean() + out.pooler_output.square().mean()).backward()
    for name, parameter in result.named_parameters():
        assert parameter.grad is not None or not parameter.requires_grad, name
        assert parameter.grad is None or bool(parameter.grad.isfinite().all()), name
    converted = [m for m in result.modules() if isinstance(m, (ConvertedActivation, ConvertedNorm))]
    tables = [p for m in converted for p in m.head.parameters()]
    trained = [p for p in tables if p.requires_grad]
    assert trained
    assert all(float(p.grad.abs().max()) > 0 for p in trained if p.grad is not None)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-9), (torch.bfloat16, 0.1)])
def test_other_dtypes(dtype: torch.dtype, close: float) -> None:
    model, data = made(bert)
    model = model.to(dtype)
    result, report = af.convert(model, data, eps=1e-4 if dtype == torch.float64 else 1e-2)
    assert report.dtype == str(dtype).removeprefix("torch.")
    assert apart(model, result, data) < close
    own = {p.dtype for p in result.parameters()}
    assert own == ({torch.float64} if dtype == torch.float64 else {torch.bfloat16, torch.float32})
    if dtype == torch.bfloat16:
        assert any("rounded to bfloat16" in note for note in report.notes)
        assert all(site.relative > 2.0**-10 for site in report.sites), "honest: rounding the result is counted"


def test_norms_that_compute_in_float32_are_named_in_float64() -> None:
    """Llama's norms compute in float32: in float64 they are no norm; what the refusal says to do works."""
    model, data = made(llama)
    with pytest.raises(af.UnsupportedOperation) as caught:
        af.convert(model.double(), data, level="pure")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("5 operations") and sum("computes in float32" in line for line in lines) == 5
    assert "model.norm: LlamaRMSNorm" in str(caught.value) and "pow" not in str(caught.value)
    result, report = af.convert(made(llama)[0], data, level="pure")
    assert report.left == () and apart(model, result.double(), data) < 1e-5
