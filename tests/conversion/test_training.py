"""Fine-tuning: a classifier on top of a converted encoder learns what it learns on top of the original."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import attnforge as af

transformers = pytest.importorskip("transformers", reason="pip install 'attnforge[convert]'")
VOCAB, LENGTH = 30, 12


def encoder(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=LENGTH, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        initializer_range=0.2,
    )  # fmt: skip
    model: nn.Module = transformers.BertModel(config, add_pooling_layer=False)
    return model


def task(count: int) -> tuple[Tensor, Tensor]:
    """Random words; the label says whether words above the middle of the vocabulary are in the majority."""
    ids = torch.randint(0, VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    return ids, ((ids >= VOCAB // 2).sum(-1) > LENGTH // 2).long()


def epoch(model: nn.Module, ids: Tensor, labels: Tensor) -> tuple[list[float], float]:
    """One pass over three quarters of the data; the losses, and the accuracy on the rest."""
    torch.manual_seed(2)
    head, cut, size = nn.Linear(24, 2), 3 * len(ids) // 4, 16
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=3e-3)
    losses = []
    model.train()
    for start in range(0, cut, size):
        rows = slice(start, start + size)
        loss = nn.functional.cross_entropy(head(model(ids[rows]).last_hidden_state.mean(1)), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        guesses = head(model(ids[cut:]).last_hidden_state.mean(1)).argmax(-1)
    return losses, float((guesses == labels[cut:]).float().mean())


@pytest.mark.parametrize("level", ["ffn", "pure"])
def test_a_converted_encoder_trains_as_well(level: str) -> None:
    ids, labels = task(1024)
    model, _ = af.convert(encoder(), ids[:8], level=level)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    wanted, right = epoch(encoder(), ids, labels)
    found, right_too = epoch(model, ids, labels)
    assert abs(found[0] - wanted[0]) < 1e-4, "the same network before the first step"
    last, last_too = (sum(losses[-8:]) / 8 for losses in (wanted, found))
    assert last < 0.8 * wanted[0], "the task can be learned in an epoch"
    assert last_too <= last + 0.03 and right_too >= right - 0.03
    moved = [name for name, p in model.named_parameters() if p.requires_grad and not torch.equal(p, start[name])]
    assert any("intermediate.dense" in name for name in moved), "gradients pass through the heads"
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("level", ["ffn", "pure"])
def test_gradients_are_those_of_the_original(level: str) -> None:
    original, (ids, _) = encoder().double().eval(), task(8)
    model, _ = af.convert(copy.deepcopy(original), ids, level=level, eps=1e-6)
    weights = torch.randn(8, LENGTH, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for net in (original, model):
        (net(ids).last_hidden_state * weights).sum().backward()
    pairs = [(name, p.grad, model.get_parameter(name).grad) for name, p in original.named_parameters()]
    assert len(pairs) > 20
    for name, wanted, found in pairs:
        if wanted is None:
            assert found is None, name
            continue
        assert found is not None, name
        assert float((found - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max()) + 1e-9, name


def test_optimisers_leave_the_fit_of_a_norm_alone() -> None:
    ids, _ = task(8)
    model, report = af.convert(encoder(), ids, level="pure")
    for site in report.sites:
        trained = {name for name, p in model.get_submodule(site.path).named_parameters() if p.requires_grad}
        if site.kind == "norm":  # a table over decades of variances: steps of one size would wreck it
            assert trained == {"weight", "bias"}
        else:
            assert len(trained) == 1 and next(iter(trained)).endswith("M_V")


def test_dropout_stays_and_is_told() -> None:
    ids, _ = task(8)
    original = encoder(dropout=0.5).train()
    model, report = af.convert(original, ids)
    assert model.training and any("dropout" in note for note in report.notes)
    with torch.no_grad():
        torch.manual_seed(0)
        one = model(ids).last_hidden_state
        assert not torch.equal(one, model(ids).last_hidden_state)
        torch.manual_seed(0)
        assert torch.equal(one, model(ids).last_hidden_state)
