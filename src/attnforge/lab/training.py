"""Training as published: the ramp task, the loop, and what is measured of a trained network.

The task (arXiv 2504.15956, experiments): x uniform in [-5, 5], one standard normal w_i and t_i for each of n tokens,
y_i = clip(w_i.x_i + t_i, a, b); 1,000 samples, 80 % for training; Adam at 1e-3, batches of 32, 50 epochs; mean squared
error over 32 output channels, of which the first should be y and the others 0. Only the first n queries are evaluated,
which changes no number and saves what the published code spends on the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, pad

from .machine import device
from .training_models import KeyedLayer, OneLayer, Stream

SEEDS = tuple(range(1234, 1245))
RATE, BATCH, SHARE = 1e-3, 32, 0.8
RADIUS = 5.0
SAMPLES_AT_ONCE = 256


@dataclass(frozen=True, eq=False)
class Data:
    """Samples, what is wanted for each, and which of them are for training and for testing."""

    X: Tensor
    wanted: Tensor
    train: Tensor
    test: Tensor

    @property
    def test_X(self) -> Tensor:
        return self.X[self.test]

    @property
    def test_wanted(self) -> Tensor:
        return self.wanted[self.test]

    def to(self, place: torch.device) -> Data:
        return Data(*(part.to(place) for part in (self.X, self.wanted, self.train, self.test)))


@dataclass(frozen=True, eq=False)
class RampData(Data):
    """The published ramp task; `w` is (tokens, channels) and `t` (tokens,)."""

    w: Tensor
    t: Tensor

    @property
    def scalars(self) -> Tensor:
        """w_i.x_i + t_i of the samples for testing, before they are clipped."""
        return (self.test_X * self.w).sum(-1) + self.t


def ramp_data(
    stream: Stream, a: float, b: float, tokens: int = 50, channels: int = 10, samples: int = 1000
) -> RampData:
    """The task of one seed.

    >>> data = ramp_data(Stream(1234), -25, 25)
    >>> data.wanted.shape, len(data.train), float(data.wanted.abs().max())
    (torch.Size([1000, 50, 1]), 800, 25.0)
    """
    X = 2 * RADIUS * stream.uniform(samples, tokens, channels) - RADIUS
    w, t = stream.normal(1, tokens, channels), stream.normal(1, tokens, 1)
    wanted = ((w * X).sum(-1, keepdim=True) + t).clamp(a, b)
    return RampData(X, wanted, *stream.split(samples, SHARE), w[0], t[0, :, 0])


def fit(
    model: nn.Module, data: Data, stream: Stream, epochs: int, rate: float = RATE,
    watch: Callable[[int], None] | None = None,
) -> None:  # fmt: skip
    """Adam on the mean squared error of all output channels; channels beyond the wanted ones should be 0.

    `watch` is called before the first epoch and after each, with the number of epochs done.
    """
    near = data.to(device())
    model.to(device())
    chosen = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(chosen, lr=rate, fused=True)
    if watch is not None:
        watch(0)
    for epoch in range(epochs):
        order = torch.tensor(stream.order(len(data.train)), device=near.X.device)
        for batch in near.train[order].split(BATCH):
            optimizer.zero_grad()
            loss_of(model(near.X[batch]), near.wanted[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if watch is not None:
            watch(epoch + 1)


def loss_of(output: Tensor, wanted: Tensor) -> Tensor:
    """The mean squared error over all channels, wanted ones first."""
    return mse_loss(output, pad(wanted, (0, output.shape[-1] - wanted.shape[-1])))


@dataclass(frozen=True)
class Errors:
    """Errors on the samples for testing: `mse` over all channels, `rms` and `sup` over the wanted ones."""

    mse: float
    rms: float
    sup: float

    @classmethod
    def of(cls, output: Tensor, wanted: Tensor) -> Errors:
        away = output[..., : wanted.shape[-1]].double() - wanted.double()
        whole = loss_of(output.double(), wanted.double())
        return cls(float(whole), float(away.square().mean().sqrt()), float(away.abs().max()))


@torch.no_grad()
def held_out(model: nn.Module, data: Data) -> Errors:
    """What a model errs on the samples that it was not trained on."""
    near = data.to(device())
    outputs = [model(part) for part in near.test_X.split(SAMPLES_AT_ONCE)]
    return Errors.of(torch.cat(outputs), near.test_wanted)


def trained_ramp(
    seed: int, a: float = -25.0, b: float = 25.0, anchors: int = 60, heads: int = 1, width: int | None = None,
    epochs: int = 50,
) -> tuple[OneLayer, RampData]:  # fmt: skip
    """The published one-layer network, trained on the task of its seed."""
    stream = Stream(seed)
    data = ramp_data(stream, a, b)
    model = OneLayer(stream, data.X.shape[-1], data.X.shape[-2], anchors, heads, width)
    fit(model, data, stream, epochs)
    return model, data


def trained_map(seed: int, a: float, b: float, epochs: int = 100, tokens: int = 30) -> tuple[KeyedLayer, RampData]:
    """The published heat-map network: 30 tokens and as many keys, 11 channels, 100 epochs."""
    stream = Stream(seed)
    data = ramp_data(stream, a, b, tokens)
    stream.number()  # the published script looks at one test batch first, and its loader draws a number for that
    model = KeyedLayer(stream, data.X.shape[-1], tokens, a, b)
    fit(model, data, stream, epochs)
    return model, data
