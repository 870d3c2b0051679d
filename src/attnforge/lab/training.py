"""Networks trained as published (arXiv 2504.15956, its experiments): the networks, the ramp task, the loop, the errors.

Three networks of affine maps, learned extra tokens and attention: one layer for ramps, two layers for sequence maps,
and one layer whose keys carry the theorem's coordinate, for the heat maps. Weights start where the published scripts
start them: uniform in +-1/sqrt(inputs), extra tokens evenly spaced in [-1, 1], every token scaled by ones.
`RandomStream` draws in the published order, so that a seed means the same data, the same split and the same first
weights here and there.

The task: x uniform in [-5, 5], one standard normal w_i and t_i for each of n tokens,
y_i = clip(w_i.x_i + t_i, a, b); 1,000 samples, 80 % for training; Adam at 1e-3, batches of 32, 50 epochs; mean squared
error over 32 output channels, of which the first should be y and the others 0. Only the first n queries are evaluated,
which changes no number and saves what the published code spends on the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, pad, scaled_dot_product_attention

from ..errors import ArgumentError
from .machine import device


class RandomStream:
    """Random numbers of one seed, in the order in which the published scripts draw them.

    >>> RandomStream(1234).order(5) == RandomStream(1234).order(5)
    True
    """

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def split(self, count: int, share: float) -> tuple[Tensor, Tensor]:
        """Which samples are for training and which for testing."""
        order = torch.randperm(count, generator=self.generator)
        return order[: int(share * count)], order[int(share * count) :]

    def number(self) -> int:
        """A whole number, as a data loader draws one for its workers or for its order."""
        return int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item())

    def order(self, count: int) -> list[int]:
        """The order of one epoch: a number for workers that there are none of, then a seed for the shuffle."""
        self.number()
        shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(self.number()))
        return [int(i) for i in shuffled]

    def linear(self, inputs: int, outputs: int) -> nn.Linear:
        """An affine map with weights, then biases, uniform in +-1/sqrt(inputs)."""
        layer = nn.utils.skip_init(nn.Linear, inputs, outputs)
        reach = 1 / math.sqrt(inputs)
        with torch.no_grad():
            for table in (layer.weight, layer.bias):
                table.uniform_(-reach, reach, generator=self.generator)
        return layer


class Extended(nn.Module):
    """The paper's map A, learned: tokens are projected and scaled one by one, extra tokens are appended."""

    def __init__(self, stream: RandomStream, channels: int, hidden: int, tokens: int, anchors: int):
        super().__init__()
        if anchors < tokens:
            raise ArgumentError(f"anchors (p) must be at least the number of tokens ({tokens}), got {anchors}")
        self.project = stream.linear(channels, hidden)
        self.scale = nn.Parameter(torch.ones(tokens, hidden))
        self.extra = nn.Parameter(torch.linspace(-1, 1, anchors - tokens)[:, None].repeat(1, hidden))

    def forward(self, X: Tensor) -> Tensor:
        tokens = self.project(X) * self.scale
        return torch.cat([tokens, self.extra.expand(*X.shape[:-2], *self.extra.shape)], -2)


class TrainedAttention(nn.Module):
    """Softmax attention with H heads. Their width is hidden/H as published, or a given one whatever H is."""

    def __init__(self, stream: RandomStream, hidden: int, heads: int, width: int | None = None):
        super().__init__()
        if width is None and hidden % heads:
            raise ArgumentError(f"heads must divide hidden = {hidden}, got {heads}; or give width=")
        self.heads, self.width = heads, hidden // heads if width is None else width
        inner = self.heads * self.width
        self.query, self.key, self.value = (stream.linear(hidden, inner) for _ in range(3))
        self.out = stream.linear(inner, hidden)

    def parts(self, Z: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the first rows, keys and values of all, each (batch, head, token, width)."""
        apart = lambda x: x.unflatten(-1, (self.heads, self.width)).transpose(-3, -2)  # noqa: E731
        return apart(self.query(Z[..., :rows, :])), apart(self.key(Z)), apart(self.value(Z))

    def forward(self, Z: Tensor, rows: int) -> Tensor:
        """The output of the first `rows` tokens: nobody reads the others."""
        q, k, v = self.parts(Z, rows)
        if Z.is_cuda:  # the fused kernels there add up in an order that changes from run to run
            read = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(self.width), -1) @ v
        else:
            read = scaled_dot_product_attention(q, k, v)
        return self.out(read.transpose(-3, -2).flatten(-2))

    def weights(self, Z: Tensor, rows: int) -> Tensor:
        """The attention of the first `rows` tokens, (batch, head, token, key)."""
        q, k, _ = self.parts(Z, rows)
        return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(self.width), -1)


class OneLayer(nn.Module):
    """Tokens and extra tokens, one attention layer; the wanted number is in the first of `hidden` channels.

    >>> model = OneLayer(RandomStream(0), channels=3, tokens=4, anchors=6, heads=2)
    >>> model(torch.zeros(5, 4, 3)).shape, model.weights(torch.zeros(5, 4, 3)).shape
    (torch.Size([5, 4, 32]), torch.Size([5, 2, 4, 6]))
    """

    def __init__(
        self, stream: RandomStream, channels: int, tokens: int, anchors: int, heads: int, width: int | None = None,
        hidden: int = 32,
    ):  # fmt: skip
        super().__init__()
        self.tokens = tokens
        self.extend = Extended(stream, channels, hidden, tokens, anchors)
        self.attend = TrainedAttention(stream, hidden, heads, width)

    def forward(self, X: Tensor) -> Tensor:
        return self.attend(self.extend(X), self.tokens)

    def weights(self, X: Tensor) -> Tensor:
        return self.attend.weights(self.extend(X), self.tokens)


class TwoLayer(nn.Module):
    """The published sequence-to-sequence network: two attention layers, affine maps between and after them."""

    def __init__(
        self, stream: RandomStream, channels: int, tokens: int, anchors: int, heads: int, hidden: int,
        width: int | None = None,
    ):  # fmt: skip
        super().__init__()
        self.tokens, self.anchors = tokens, anchors
        self.extend = Extended(stream, channels, hidden, tokens, anchors)
        self.first = TrainedAttention(stream, hidden, heads, width)
        self.between = stream.linear(hidden, hidden)
        self.second = TrainedAttention(stream, hidden, heads, width)
        self.last = stream.linear(hidden, channels)

    def forward(self, X: Tensor) -> Tensor:
        Z = self.between(self.first(self.extend(X), self.anchors))
        return self.last(self.second(Z, self.tokens))


class KeyedLayer(nn.Module):
    """The published heat-map network: one learned head in which the theorem's key coordinate and values are put in.

    Key k carries k (L_k + L_0) - 2k in its last coordinate and L_k in the first value channel; all else is learned, the
    query too. Logits are multiplied by beta = 25.
    """

    BETA = 25.0
    ends: Tensor
    coordinate: Tensor

    def __init__(self, stream: RandomStream, channels: int, tokens: int, a: float, b: float, hidden: int = 11):
        super().__init__()
        self.extend = Extended(stream, channels, hidden, tokens, tokens)
        self.attend = TrainedAttention(stream, hidden, 1)
        places, k = torch.linspace(a, b, tokens), torch.arange(tokens, dtype=torch.float32)
        self.register_buffer("ends", places[:, None])
        self.register_buffer("coordinate", (k * (places + places[0]) - 2 * k)[:, None])

    def weights(self, X: Tensor) -> Tensor:
        """(batch, token, key)."""
        Z = self.extend(X)
        learned = self.attend.key(Z)[..., :-1]
        keys = torch.cat([learned, self.coordinate.expand(*learned.shape[:-1], 1)], -1)
        scores = self.attend.query(Z) @ keys.transpose(-2, -1)
        return torch.softmax(self.BETA / math.sqrt(keys.shape[-1]) * scores, -1)

    def forward(self, X: Tensor) -> Tensor:
        learned = self.attend.value(self.extend(X))[..., 1:]
        values = pad(learned, (1, 0)) + pad(self.ends, (0, learned.shape[-1]))
        out: Tensor = self.attend.out(self.weights(X) @ values)
        return out


SEEDS = tuple(range(1234, 1245))  # as published
RATE, BATCH, SHARE = 1e-3, 32, 0.8  # as published: Adam's rate, samples of a step, samples for training
RADIUS = 5.0  # as published: x is uniform within it
SAMPLES_AT_ONCE = 256  # evaluated together: some MB of weights


@dataclass(frozen=True, eq=False)
class TaskData:
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

    def to(self, place: torch.device) -> TaskData:
        return TaskData(*(part.to(place) for part in (self.X, self.wanted, self.train, self.test)))


@dataclass(frozen=True, eq=False)
class RampData(TaskData):
    """The published ramp task; `w` is (tokens, channels) and `t` (tokens,)."""

    w: Tensor
    t: Tensor

    @property
    def scalars(self) -> Tensor:
        """w_i.x_i + t_i of the samples for testing, before they are clipped."""
        return (self.test_X * self.w).sum(-1) + self.t


def ramp_data(
    stream: RandomStream, a: float, b: float, tokens: int = 50, channels: int = 10, samples: int = 1000
) -> RampData:
    """The task of one seed.

    >>> data = ramp_data(RandomStream(1234), -25, 25)
    >>> data.wanted.shape, len(data.train), float(data.wanted.abs().max())
    (torch.Size([1000, 50, 1]), 800, 25.0)
    """
    X = 2 * RADIUS * stream.uniform(samples, tokens, channels) - RADIUS
    w, t = stream.normal(1, tokens, channels), stream.normal(1, tokens, 1)
    wanted = ((w * X).sum(-1, keepdim=True) + t).clamp(a, b)
    return RampData(X, wanted, *stream.split(samples, SHARE), w[0], t[0, :, 0])


def fit(
    model: nn.Module, data: TaskData, stream: RandomStream, epochs: int, rate: float = RATE,
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
def held_out(model: nn.Module, data: TaskData) -> Errors:
    """What a model errs on the samples that it was not trained on."""
    near = data.to(device())
    outputs = [model(part) for part in near.test_X.split(SAMPLES_AT_ONCE)]
    return Errors.of(torch.cat(outputs), near.test_wanted)


def trained_ramp(
    seed: int, a: float = -25.0, b: float = 25.0, anchors: int = 60, heads: int = 1, width: int | None = None,
    epochs: int = 50,
) -> tuple[OneLayer, RampData]:  # fmt: skip
    """The published one-layer network, trained on the task of its seed."""
    stream = RandomStream(seed)
    data = ramp_data(stream, a, b)
    model = OneLayer(stream, data.X.shape[-1], data.X.shape[-2], anchors, heads, width)
    fit(model, data, stream, epochs)
    return model, data


def trained_map(seed: int, a: float, b: float, epochs: int = 100, tokens: int = 30) -> tuple[KeyedLayer, RampData]:
    """The published heat-map network: 30 tokens and as many keys, 11 channels, 100 epochs."""
    stream = RandomStream(seed)
    data = ramp_data(stream, a, b, tokens)
    stream.number()  # the published script looks at one test batch first, and its loader draws a number for that
    model = KeyedLayer(stream, data.X.shape[-1], tokens, a, b)
    fit(model, data, stream, epochs)
    return model, data
