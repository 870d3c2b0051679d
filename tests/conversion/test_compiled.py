"""Converted models under torch.compile: whole graphs, dtype after dtype in a process, the numbers of eager mode."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnforge as af

transformers = pytest.importorskip("transformers", reason="pip install 'attnforge[convert]'")

SIZES = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
TEXT = dict(vocab_size=40, max_position_embeddings=16, **SIZES)
# dtypes, one after the other in one process, and whether with gradients
WAYS = ((torch.float32, False), (torch.float32, True), (torch.bfloat16, False), (torch.float64, True))
IDS = torch.randint(3, 40, (3, 5), generator=torch.Generator().manual_seed(1))
UNITS = 16  # of the dtype, relative to the largest number: graphs take sums in another order


def model_of(family: str) -> nn.Module:
    torch.manual_seed(0)
    if family == "bert":
        model: nn.Module = transformers.BertModel(transformers.BertConfig(**TEXT), add_pooling_layer=False)
    elif family == "gpt2":
        config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=16)
        model = transformers.GPT2Model(config)
    else:
        model = transformers.LlamaModel(transformers.LlamaConfig(**TEXT, num_key_value_heads=1))
    return model.eval()


def run(model: Any, steep: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The states, and with gradients those of their cubes' sum: a norm keeps the sum of squares."""
    with torch.set_grad_enabled(steep):
        out: Tensor = model(input_ids=IDS, use_cache=False)[0]
    model.zero_grad()
    if steep:
        out.double().pow(3).sum().backward()
    gradients = {name.removeprefix("_orig_mod."): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return out.detach(), gradients


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max())


@pytest.mark.filterwarnings("ignore:compiled, a converted model does not watch:attnforge.DomainWarning")
@pytest.mark.parametrize(("family", "level"), [("bert", "pure"), ("gpt2", "ffn"), ("llama", "pure")])
def test_whole_graphs_give_the_numbers_of_eager_mode(family: str, level: str) -> None:
    torch.compiler.reset()  # what was compiled before counts against a limit for the class, not for the model
    converted, report = af.convert(model_of(family), dict(input_ids=IDS), level=level)
    for dtype, steep in WAYS:
        model = copy.deepcopy(converted).to(dtype)
        wanted, slopes = run(model, steep)
        found, others = run(torch.compile(model, backend="aot_eager", fullgraph=True), steep)
        assert wanted.dtype == found.dtype == dtype and slopes.keys() == others.keys() and bool(slopes) == steep
        # a compiled product has the numbers of its lemma, an eager one those stored, which were float32 at conversion
        stored = torch.float32 if "product" in report.by_operation and dtype == torch.float64 else dtype
        slack = UNITS * torch.finfo(stored).eps
        assert apart(found, wanted) <= slack * float(wanted.abs().max())
        steepest = max((float(g.abs().max()) for g in slopes.values()), default=0.0)
        assert (steepest > 0) == steep and all(apart(others[name], g) <= slack * steepest for name, g in slopes.items())
