"""The published networks: the published order of random numbers, the published result, and the same numbers twice."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, random_split

from attnforge.errors import ArgumentError
from attnforge.lab.training import (
    SEEDS,
    Errors,
    KeyedLayer,
    OneLayer,
    RandomStream,
    TrainedAttention,
    TwoLayer,
    fit,
    held_out,
    loss_of,
    ramp_data,
    trained_ramp,
)


def test_numbers_come_in_the_order_of_a_data_loader() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        x = torch.rand(40, 1)
        train, test = random_split(TensorDataset(x), [32, 8])
        linear = torch.nn.Linear(3, 5)
        loader = DataLoader(train, batch_size=8, shuffle=True)
        epochs = [[int(v) for (batch,) in loader for v in (batch[:, 0] * 1e6).long()] for _ in range(2)]
    stream = RandomStream(7)
    mine = stream.uniform(40, 1)
    kept, held = stream.split(40, 0.8)
    layer = stream.linear(3, 5)
    orders = [[int(v) for v in (mine[kept[stream.order(32)], 0] * 1e6).long()] for _ in range(2)]
    assert torch.equal(mine, x)
    assert kept.tolist() == list(train.indices) and held.tolist() == list(test.indices)
    assert torch.equal(layer.weight, linear.weight) and torch.equal(layer.bias, linear.bias)
    assert orders == epochs and orders[0] != orders[1]


def test_the_published_network_reaches_the_published_error() -> None:
    model, data = trained_ramp(SEEDS[0])
    found = held_out(model, data)
    assert abs(found.mse - 0.129) < 2 * 0.027  # mean and spread of the published scripts over their seeds
    assert found.mse == pytest.approx(0.1351, abs=2e-3)  # and of this seed alone
    assert found.mse >= found.rms**2 / 32  # 31 of the channels should be 0


def test_training_twice_gives_the_same_numbers_and_another_seed_others() -> None:
    first, second, other = (held_out(*trained_ramp(seed, anchors=52, epochs=1)) for seed in (1, 1, 2))
    assert first == second != other


def test_training_learns() -> None:
    stream = RandomStream(3)
    data = ramp_data(stream, -5, 5, tokens=4, channels=2, samples=200)
    model, seen = OneLayer(stream, 2, 4, 12, 2), []
    fit(model, data, stream, 6, rate=1e-2, watch=lambda epoch: seen.append((epoch, held_out(model, data).mse)))
    assert [epoch for epoch, _ in seen] == list(range(7))
    assert seen[-1][1] < 0.7 * seen[0][1]


def test_only_the_queries_that_are_read_are_evaluated() -> None:
    stream = RandomStream(0)
    model, X = OneLayer(stream, 3, 5, 9, 4), stream.normal(2, 5, 3)
    Z = model.extend(X)
    assert torch.allclose(model.attend(Z, 9)[:, :5], model(X), atol=1e-6)
    assert torch.allclose(model.weights(X).sum(-1), torch.ones(()), atol=1e-6)


def test_head_widths() -> None:
    assert [TrainedAttention(RandomStream(0), 32, H).width for H in (1, 4, 16)] == [32, 8, 2]
    assert [TrainedAttention(RandomStream(0), 32, H, width=2).out.in_features for H in (1, 4, 16)] == [2, 8, 32]
    with pytest.raises(ArgumentError, match="divide"):
        TrainedAttention(RandomStream(0), 32, 5)
    with pytest.raises(ArgumentError, match="at least the number of tokens"):
        OneLayer(RandomStream(0), 3, 5, 4, 1)


def test_the_heat_map_network_has_the_theorems_key_coordinate() -> None:
    model = KeyedLayer(RandomStream(0), 10, 30, -1.5, 1.5)
    places, k = torch.linspace(-1.5, 1.5, 30), torch.arange(30.0)
    assert torch.allclose(model.coordinate[:, 0], k * (places - 1.5) - 2 * k)
    X = RandomStream(1).normal(2, 30, 10)
    assert model(X).shape == (2, 30, 11) and torch.allclose(model.weights(X).sum(-1), torch.ones(()), atol=1e-5)
    assert not any(p is model.coordinate for p in model.parameters())


def test_two_layers_read_all_tokens() -> None:
    model = TwoLayer(RandomStream(0), 5, 10, 14, 8, 16)
    X = RandomStream(1).uniform(1, 10, 5)
    other = X.clone()
    other[0, 9] += 1.0
    assert model(X).shape == (1, 10, 5) and (model(X) - model(other))[0, 0].abs().max() > 0


def test_errors_count_every_channel() -> None:
    wanted, output = torch.ones(2, 3, 1), torch.ones(2, 3, 4)
    assert float(loss_of(output, wanted)) == 0.75
    assert Errors.of(output, wanted) == Errors(0.75, 0.0, 0.0)
