"""Route `ridge`: a ReLU expansion fitted to samples, then built exactly with gates by the compiler.

    expansion(x) = relu(x W + b) V + x S + s

Two statements, two words. Between network and expansion the compiler *certifies* a bound, over the whole box and with
rounding (`net.expansion`). Between expansion and black box there is a fit to samples: *calibrated*, measured on points
that the fit has not seen. Fits of this kind converge in the mean square, at a rate that does not know the dimension
(Barron); no sample can bound their largest error.

A map from sequences to sequences whose rows are treated alike and apart is recognised, and fitted on rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..arguments import whole
from ..certificates.certificate import Certificate
from ..certificates.schema import CERTIFICATE
from ..compiler.compiled import CompiledNetwork, Size
from ..compiler.pipeline import compile_program
from ..dtypes import Array
from ..errors import PrecisionError
from ..programs.program import Builder, Program
from .result import FORM, About, Approximation, Held
from .target import Target

WIDTHS = (8, 16, 32, 64, 128, 256)  # ridges that are tried: twice as many halve the mean square error (Barron)
SAMPLES = 50_000  # of the black box for a fit: two hundred for each ridge of the widest expansion
BATCH = 512  # rows of a minibatch, drawn at random
STEPS, PASSES = 3000, 40  # minibatches of one fit, at most; and how often it sees every row, about
LEAST_STEPS = 600  # and at least, however few rows there are
RATE = 0.02  # of Adam at the top of its one cycle, for rows and values that are scaled to a spread of 1
RIDGE = 1e-10  # of the largest eigenvalue, added when the outer weights are solved for


@dataclass(frozen=True)
class Expansion:
    """relu(x W + b) V + x S + s, in float64, on rows of the input (the whole point, or one token)."""

    W: Array
    b: Array
    V: Array
    S: Array
    s: Array

    def __call__(self, x: Array) -> Array:
        return np.maximum(x @ self.W + self.b, 0.0) @ self.V + x @ self.S + self.s

    def program(self, target: Target, tokens: int) -> Program:
        """The expansion as a program for the compiler."""
        build = Builder(target.box, tokens)
        hidden = build.apply(build.linear([(build.input, self.W)], self.b, "ridges"), "relu", "relu")
        out = build.linear([(hidden, self.V), (build.input, self.S)], self.s, "output")
        shape = target.output_shape or ()
        source = f"ReLU expansion of {self.W.shape[1]} ridges fitted to {target.name}"
        return build.program(out, source, output_shape=shape)


class RidgeApproximation(Approximation):
    """A black box by a fitted ReLU expansion: calibrated against the black box, certified against the expansion."""

    family: ClassVar[str] = "blackbox-ridge"
    called = "fitted ridges, compiled"
    schema: ClassVar[Any] = {**FORM, "network": CompiledNetwork.schema, "expansion": CERTIFICATE}

    def __init__(self, about: About, network: CompiledNetwork, points: Tensor, wanted: Tensor):
        super().__init__(about, points, wanted)
        self.network: CompiledNetwork = network

    @property
    def expansion(self) -> Certificate:
        """The certificate of the network against the fitted expansion (not against the black box)."""
        return self.network.certificate

    @property
    def size(self) -> Size:
        return self.network.size

    def core(self, *inputs: Tensor) -> Tensor:
        return self.network.core(*inputs)

    def recertify(self) -> Certificate:
        """Certified anew against the expansion, measured anew against the held-out sample."""
        self.network.attach(self.network.recertify())
        return super().recertify()

    def config(self) -> dict[str, Any]:
        return {**super().config(), "network": self.network.config(), "expansion": self.expansion.to_json()}

    @classmethod
    def rebuild(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> RidgeApproximation:
        own = {name.removeprefix("network."): t for name, t in tensors.items() if name.startswith("network.")}
        network = CompiledNetwork.rebuild(config["network"], own)
        network.load_state_dict(own, strict=True)
        network.attach(Certificate.from_json(config["expansion"]))
        net = cls(About.from_json(config["about"]), network, tensors["points"], tensors["wanted"])
        net.strict = bool(config["strict"])
        return net


@dataclass(frozen=True)
class SampleRows:
    """Samples as the fit sees them: rows x with values y; `tokens` rows make one point when they are treated alike."""

    x: Array
    y: Array
    tokens: int


def draw_rows(target: Target, samples: int, seed: int) -> SampleRows:
    """Evenly drawn samples; one row for each token where rows of the input are treated alike and apart."""
    points = target.box.sample(samples, seed=seed + 101).reshape(samples, -1).numpy()
    values = target(points, f"f on {samples} samples")
    tokens = token_count(target)
    return SampleRows(points.reshape(samples * tokens, -1), values.reshape(samples * tokens, -1), tokens)


def token_count(target: Target) -> int:
    """The number of tokens if f maps sequences to sequences row by row, with one function for all rows; else 1.

    Looked at on a few points: permuting the rows of the input must permute those of the output, and a new row must
    change no other row.
    """
    shape, out = target.box.shape, target.output_shape or ()
    if len(shape) != 2 or len(out) < 1 or out[0] != shape[0] or shape[0] < 2 or target.box.names is not None:
        return 1
    sides = np.array(target.box.intervals()).reshape(shape[0], -1)
    if not (sides == sides[0]).all():
        return 1
    count, n = 16, shape[0]
    points = target.box.sample(count, seed=77).reshape(count, n, -1).numpy()
    other = target.box.sample(count, seed=78).reshape(count, n, -1).numpy()
    order = np.roll(np.arange(n), 1)
    changed = points.copy()
    changed[:, 0] = other[:, 0]
    f = lambda x: target(x.reshape(len(x), -1), "probing rows").reshape(len(x), n, -1)  # noqa: E731
    plain, turned, moved = f(points), f(points[:, order]), f(changed)
    slack = 64 * target.unit * max(float(np.abs(plain).max()), 1e-300)
    alike = float(np.abs(turned - plain[:, order]).max()) <= slack
    return n if alike and float(np.abs(moved - plain)[:, 1:].max()) <= slack else 1


def fit(rows: SampleRows, width: int, seed: int = 0, steps: int | None = None) -> Expansion:
    """A ReLU expansion of so many ridges: a short training in float32, then the outer weights solved in float64."""
    whole("width", width, 1)
    middle, spread = rows.x.mean(0), np.maximum(rows.x.std(0), 1e-12 * (1 + np.abs(rows.x).max()))
    spread = np.where(rows.x.std(0) > 0, spread, 1.0)
    z = (rows.x - middle) / spread
    affine = np.concatenate([z, np.ones((len(z), 1))], -1)
    line = solve(affine, rows.y)
    rest = rows.y - affine @ line
    scale = np.maximum(rest.std(0), 1e-12 * (1e-300 + np.abs(rows.y).max()))
    steps = steps or min(STEPS, max(LEAST_STEPS, PASSES * len(z) // BATCH))
    W, b = _train(torch.from_numpy(z).float(), torch.from_numpy(rest / scale).float(), width, seed, steps)
    features = np.concatenate([np.maximum(z @ W + b, 0.0), affine], -1)
    outer = solve(features, rows.y)
    V, S, s = outer[:width], outer[width:-1], outer[-1]
    inner, slope = W / spread[:, None], S / spread[:, None]  # back to the coordinates of the box
    return Expansion(inner, b - middle @ inner, V, slope, s - middle @ slope)


def _train(z: Tensor, y: Tensor, width: int, seed: int, steps: int) -> tuple[Array, Array]:
    """Inner weights and biases by Adam, one cycle of the learning rate, on the values less their affine part."""
    generator = torch.Generator().manual_seed(seed)
    count, dim = z.shape
    random = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    W = (random(dim, width) / dim**0.5).requires_grad_()
    b = random(width).requires_grad_()
    V = (random(width, y.shape[1]) / width**0.5).requires_grad_()
    S, s = torch.zeros(dim, y.shape[1], requires_grad=True), torch.zeros(y.shape[1], requires_grad=True)
    adam = torch.optim.Adam([W, b, V, S, s], lr=RATE, betas=(0.9, 0.99))
    cycle = torch.optim.lr_scheduler.OneCycleLR(adam, RATE, total_steps=steps, pct_start=0.1)
    batch = min(BATCH, count)
    with torch.enable_grad():
        for _ in range(steps):
            pick = torch.randint(count, (batch,), generator=generator)
            x = z[pick]
            loss = (torch.relu(x @ W + b) @ V + x @ S + s - y[pick]).square().mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
            cycle.step()
    return W.detach().double().numpy(), b.detach().double().numpy()


def solve(features: Array, wanted: Array) -> Array:
    """Least squares by the normal equations with a touch of ridge: features may be dead or alike."""
    gram = features.T @ features
    gram[np.diag_indices(len(gram))] += RIDGE * float(np.linalg.eigvalsh(gram)[-1])
    found = np.linalg.solve(gram, features.T @ wanted)
    return found + np.linalg.solve(gram, features.T @ (wanted - features @ found))


def largest_error(expansion: Expansion, rows: SampleRows, held: Held) -> float:
    """The expansion's largest error on the held-out sample."""
    x = held.points.reshape(len(held.points) * rows.tokens, -1)
    return float(np.abs(expansion(x).reshape(held.values.shape) - held.values).max())


def build_ridge(
    target: Target, rows: SampleRows, expansion: Expansion, held: Held, dtype: torch.dtype, eps: float | None = None
) -> RidgeApproximation:
    """Compile a fitted expansion, certify against it and measure against the black box."""
    program = expansion.program(target, rows.tokens)
    scale = max(float(np.abs(rows.y).max()), 1e-300)
    network = _compiled(program, max(0.02 * (eps or 1e-3 * scale), 64 * torch.finfo(dtype).eps * scale), dtype)
    return RidgeApproximation(About.of(target, held, "ridge"), network, *held.tensors).sealed()


def _compiled(program: Program, eps: float, dtype: torch.dtype) -> CompiledNetwork:
    """The network of an expansion, to eps or to what its dtype allows."""
    for _ in range(3):
        try:
            return compile_program(program, eps, dtype)
        except PrecisionError as problem:
            if problem.reachable is None or not math.isfinite(problem.reachable):
                raise
            eps = 1.05 * problem.reachable
    return compile_program(program, 10 * eps, dtype)


def because(net: Approximation, reason: str) -> Approximation:
    """The same network with its reason."""
    net.about = replace(net.about, reason=reason)
    return net
