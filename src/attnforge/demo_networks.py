"""The networks of the demonstration: a formula, an MLP and a sequence function, compiled, saved, checked and shown."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import files
from .box import Box
from .certificates.certificate import upper_text
from .compiler.compiled import CompiledNetwork
from .compiler.pipeline import compile
from .errors import CertificateError
from .report.errors import Measured, measure
from .report.network import network_page

Step = Callable[[str], None]
HEADER = ("network for", "box", "asked", "certified", "measured", "layers", "heads", "anchors", "seconds")
NOTE = (
    "asked: the largest error allowed. certified: proved for every point of the box, in float32, rounding\n"
    "included. measured: the largest error seen on thousands of points. Attention and affine maps only."
)


class Block(nn.Module):
    """Attention between tokens, then a small MLP for each of them, both with a skip: a block of a transformer."""

    def __init__(self, width: int):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        mixed = nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        x = x + self.out(mixed)
        return x + self.mlp(x)


@dataclass(frozen=True)
class Target:
    """What is compiled: a name for its files, a title for people, how it is made, its box and its tolerance."""

    name: str
    title: str
    make: Callable[[], Any]
    box: Box
    where: str
    eps: float


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A module whose random weights are the same every time."""

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make()

    return build


GRAVITY = "G*m1*m2/((x2-x1)**2 + (y2-y1)**2 + (z2-z1)**2)"
TARGETS = (
    Target(
        "formula",
        GRAVITY,
        lambda: GRAVITY,
        Box(dict.fromkeys(["G", "m1", "m2", "x1", "y1", "z1"], (1, 2)) | dict.fromkeys(["x2", "y2", "z2"], (3, 4))),
        "9 intervals",
        1e-3,
    ),
    Target(
        "mlp",
        "an MLP 8-32-32-1 with gelu",
        _seeded(lambda: nn.Sequential(
            nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1)
        )),
        Box.cube(-1, 1, shape=8),
        "[-1, 1]^8",
        1e-3,
    ),
    Target(
        "sequence",
        "a transformer block, 6 tokens of 4 channels",
        _seeded(lambda: Block(4)),
        Box.cube(-1, 1, shape=(6, 4)),
        "[-1, 1]^(6x4)",
        1e-3,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """A target's network, how long it took, and what was measured on it."""

    target: Target
    net: CompiledNetwork
    seconds: float
    found: Measured

    @property
    def cells(self) -> tuple[str, ...]:
        """This network as a row of the table."""
        size = self.net.size
        return (
            self.target.title, self.target.where, f"{self.target.eps:g}", upper_text(self.net.bound),
            f"{self.found.worst:.2g}", str(size.layers), str(size.heads), str(size.anchors), f"{self.seconds:.1f}",
        )  # fmt: skip

    @property
    def numbers(self) -> dict[str, Any]:
        """This network for other programs."""
        return {
            "name": self.target.name, "target": self.target.title, "eps": self.target.eps, "bound": self.net.bound,
            "measured": self.found.worst, "size": vars(self.net.size), "seconds": self.seconds,
        }  # fmt: skip


def build(targets: Sequence[Target], step: Step) -> tuple[Compiled, ...]:
    """Compile every target; `step` is told what comes next."""
    done = []
    for target in targets:
        step(f"compiling {target.title}")
        start = time.perf_counter()
        net = compile(target.make(), target.box, target.eps, progress=lambda stage: None)
        seconds = time.perf_counter() - start
        done.append(Compiled(target, net, seconds, measure(net)))
    return tuple(done)


def write(networks: Sequence[Compiled], folder: Path, step: Step) -> tuple[list[Path], list[Path]]:
    """Save every network, compute its certificate again from the file, and write its page: files and pages."""
    saved, pages = [], []
    for made in networks:
        step(f"checking {made.target.name}.safetensors")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{made.target.name}.safetensors"
        made.net.save(path)
        again = files.check(path)
        if again != made.net.certificate:
            raise CertificateError(f"{path.name}: the file does not give the certificate that the compiler gave")
        saved.append(path)
        step(f"writing {made.target.name}.html")
        pages.append(network_page(made.net).save(folder / f"{made.target.name}.html"))
    return saved, pages
