"""`Artefact`, what an export wrote, and `verify`: an artefact, loaded by a fresh process, against its network.

The two are compared at random points, at corners, and at points that a local search finds by climbing the difference.
This is a measurement, not a proof: it finds a wrong weight, a wrong order of inputs, a mask upside down, a kernel that
computes in less than the stated precision.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..box import Box
from ..certificates.certified import CertifiedModule
from ..certificates.storage import MAX_HEADER
from ..compiler.compiled import CompiledNetwork
from ..dtypes import dtype_name
from ..errors import ArgumentError, CertificateError, closest
from ..heads.norm.head import NormHead
from ..rasp.network.compiled import CompiledProgram
from ..theorems.result import Construction
from . import fresh
from .fresh import KINDS, receive, send
from .plain.transformer import PlainTransformer
from .writing import network_of, steps

Run = Callable[..., Tensor]
TOKENS = 2  # of a sequence, where any number will do: the smallest at which tokens can look at each other
#: How far two evaluations of one network may differ, as a part of its largest output (at least 1): some hundred
#: roundings in float32; a million in float64, far below what kernels of less than float64 are off by (2e-8).
CLOSE = {torch.float32: 1e-5, torch.float64: 1e-10}
POINTS, LEAST = 4096, 64  # random points, if nobody says how many: as many as `SECONDS` allow, but so many at least
SECONDS = 3.0  # spent on random points: an export is waited for
CORNERS = 256  # of the box, at most: all of them up to eight variables
STARTS = 32  # how many points the climb goes on from: the worst ones often lie in one place
RADII = (0.1, 0.03, 0.01, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7)  # of a climb's moves, in sides of the box, down to rounding
PATIENCE = 30  # seconds that a process may take to end once nothing is asked of it
ROUNDINGS = 8  # times the network's own rounding that another order of adding may be away, in float32
LENS_HEADER = "attnforge_lens"  # the key in a safetensors file that tells a lens from a network


@dataclass(frozen=True, eq=False)
class InputDomain:
    """The inputs of a network: the shape of each without its batch, and the box of all of them one after the other."""

    shapes: tuple[tuple[int, ...], ...]
    lower: Tensor
    upper: Tensor
    dtype: torch.dtype

    @property
    def dim(self) -> int:
        """How many numbers one point has."""
        return self.lower.numel()

    def split(self, points: Tensor) -> tuple[Tensor, ...]:
        """Flat points (count, dim) as the inputs of the network."""
        sizes = [math.prod(shape) for shape in self.shapes]
        parts = points.to(self.dtype).split(sizes, -1)
        return tuple(part.reshape(-1, *shape) for part, shape in zip(parts, self.shapes, strict=True))

    def sample(self, count: int, seed: int = 0) -> Tensor:
        """Points drawn uniformly, numbers of the network's dtype."""
        return self.box.sample(count, seed, self.dtype)

    def corners(self, limit: int) -> Tensor:
        """Corners of the box, at most `limit` of them, spread evenly."""
        return self.box.corners(limit, self.dtype)

    def around(self, points: Tensor, radius: float, moves: int, generator: torch.Generator) -> Tensor:
        """Trials around each point: some coordinates moved by up to `radius` of their side, kept inside the box."""
        shape = (len(points), moves, self.dim)
        move = 2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1
        move *= torch.rand(shape, generator=generator) < 0.5
        moved = points.double().unsqueeze(1) + move * (self.upper - self.lower) * radius
        return torch.minimum(torch.maximum(moved.reshape(-1, self.dim), self.lower), self.upper).to(self.dtype)

    @property
    def box(self) -> Box:
        """The box of flat points, its bounds numbers of the network's dtype."""
        return Box.between(self.lower, self.upper)


@dataclass(frozen=True, eq=False)
class TokenDomain(InputDomain):
    """Sequences of token ids, padded to the longest; `known` is how many tokens there are, and the id of padding."""

    known: int = 0

    def split(self, points: Tensor) -> tuple[Tensor, ...]:
        return (points.long().reshape(-1, *self.shapes[0]),)

    def sample(self, count: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(self.known, (count, self.dim), generator=generator)
        lengths = torch.randint(1, self.dim + 1, (count, 1), generator=generator)
        return torch.where(torch.arange(self.dim) < lengths, ids, self.known).to(self.dtype)

    def corners(self, limit: int) -> Tensor:
        """Full sequences of one token, and single tokens."""
        one = torch.arange(self.known).unsqueeze(-1).expand(-1, self.dim)
        return torch.cat([one, torch.where(torch.arange(self.dim) < 1, one, self.known)])[:limit].to(self.dtype)

    def around(self, points: Tensor, radius: float, moves: int, generator: torch.Generator) -> Tensor:
        """A token of each sequence replaced."""
        near = points.long().repeat_interleave(moves, 0)
        lengths = (near != self.known).sum(-1)
        at = (torch.rand(len(near), generator=generator) * lengths).long()
        near[torch.arange(len(near)), at] = torch.randint(self.known, (len(near),), generator=generator)
        return near.to(self.dtype)


def domain(net: CertifiedModule) -> InputDomain:
    """What a network takes, from its own example and its box.

    >>> import attnforge as af
    >>> found = domain(af.ProductHead.symmetric(2, 3))
    >>> found.shapes, found.lower.tolist()
    (((), ()), [-2.0, -3.0])
    """
    if isinstance(net, CompiledProgram) or (isinstance(net, PlainTransformer) and net.spec.ids):
        longest, known = net.box.shape[0], net.box.shape[1] - 1
        ends = torch.zeros(longest, dtype=torch.float64)
        return TokenDomain(((longest,),), ends, ends + known, net.dtype, known)
    shapes = tuple(tuple(x.shape[1:]) for x in net.example_input())
    if isinstance(net, Construction) and len(shapes[0]) == 1:  # a theorem takes sequences, whatever its example
        shapes = ((TOKENS, *shapes[0]),)
    sides = [side for box in _boxes(net, shapes) for side in [box.outward(net.dtype)]]
    lower = torch.cat([s.lower.expand(shape).reshape(-1) for s, shape in zip(sides, shapes, strict=True)])
    upper = torch.cat([s.upper.expand(shape).reshape(-1) for s, shape in zip(sides, shapes, strict=True)])
    return InputDomain(shapes, lower, upper, net.dtype)


def _boxes(net: CertifiedModule, shapes: Sequence[tuple[int, ...]]) -> list[Box]:
    """One box for each input, whose shape can be repeated to that of the input."""
    if isinstance(net, NormHead):  # its box is of the variance: rows drawn from here have the middle one on average
        side = math.sqrt(3.0 * math.sqrt(net.variance[0] * net.variance[1]))
        return [Box.cube(-side, side, shape=(net.channels,))]
    if isinstance(net, CompiledNetwork):
        return list(net.boxes)
    if isinstance(net, PlainTransformer):
        return list(net.spec.boxes)
    box = net.box
    if box.names and len(box.names) == len(shapes) and shapes[0][-1:] != box.shape:
        return [Box.cube(lo, hi, shape=()) for lo, hi in box.intervals()]
    return [box]


class InMemory(Protocol):
    """What is compared through a file of its own: a plain network, a lens."""

    kind: str

    def save(self, path: str | Path) -> None: ...


@dataclass(frozen=True)
class Verification:
    """How far an artefact and its network differ at the points that were looked at; `bound` is what was allowed."""

    kind: str
    largest: float  # largest difference of an output coordinate
    at: tuple[float, ...]  # the point where it was found
    points: int
    bound: float
    scale: float  # the largest output of the network at these points
    dtype: str

    def __post_init__(self) -> None:
        if self.points < 1:
            raise ArgumentError("a verification looks at one point at least")

    @property
    def passed(self) -> bool:
        """Whether the largest difference is at most what was allowed; NaN is not."""
        return self.largest <= self.bound

    def __str__(self) -> str:
        word = "agrees with" if self.passed else "DIFFERS from"
        return (
            f"{self.kind} {word} the network: largest difference {self.largest:.3e} (allowed {self.bound:.3e}) at "
            f"{self.points:,} random, corner and adversarial points, {self.dtype}"
        )


@dataclass(frozen=True)
class Artefact:
    """What an export wrote: its kind ("onnx", "hf", "plain", "lens"), where, and how it compared with the network.

    It can be used wherever a path is expected.
    """

    kind: str
    path: Path
    verification: Verification | None = None

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def __str__(self) -> str:
        return str(self.path)

    def verified(self, net: CertifiedModule, wanted: bool = True) -> Artefact:
        """The same with its verification, which raises if the artefact does something else than the network."""
        return dataclasses.replace(self, verification=verify(self, net)) if wanted else self


def verify(
    artefact: Artefact | InMemory | str | Path,
    net: CertifiedModule,
    *,
    kind: str | None = None,
    points: int | None = None,
    bound: float | None = None,
    seed: int = 0,
) -> Verification:
    """Load an artefact in a fresh process and compare it with the network; `CertificateError` if they differ.

    `artefact` is what an export returned, a path (.onnx, .safetensors or a folder), a plain network or a lens. There
    are 4096 random `points` by default, fewer where they would take long, and about as many adversarial ones. `bound`
    is the largest difference allowed. By default it is 1e-5 (float32) or 1e-10 (float64) of the largest output, or what
    rounding makes unavoidable where that is more: a loose network has large tables, and two ways of adding them up
    differ.

    >>> import attnforge as af, tempfile
    >>> net = af.compile("x**2", af.Box(x=(-1, 1)), eps=1e-3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = af.export.to_onnx(net, f"{folder}/square.onnx", verify=False)
    ...     af.export.verify(file, net).passed
    True
    """
    network_of(net)
    if points is not None and points < 1:
        raise ArgumentError(f"points must be at least 1, got {points}")
    with steps() as step, _on_disk(artefact, kind) as (found, path):
        step(f"a fresh process loads {found}")
        with _process(found, path) as other:
            step("comparing")
            return _compared(_Pairing(found, other, net, domain(net)), points, bound, seed)


def _compared(pair: _Pairing, count: int | None, bound: float | None, seed: int) -> Verification:
    """Random points and corners first, then smaller and smaller moves around the worst of them."""
    net, where = pair.net, pair.where
    generator = torch.Generator().manual_seed(seed)
    first = where.sample(LEAST, seed)
    begin = time.perf_counter()
    values = pair.differences(first)
    speed = LEAST / max(time.perf_counter() - begin, 1e-9)
    count = max(LEAST, min(POINTS, int(SECONDS * speed))) if count is None else count
    start = torch.cat([where.sample(count, seed + 1), where.corners(min(CORNERS, count))])
    worst = _Worst.of(torch.cat([first, start]), torch.cat([values, pair.differences(start)]))
    moves = max(1, count // (len(RADII) * STARTS))
    for radius in RADII:
        around = where.around(worst.points, radius, moves, generator)
        worst = worst.joined(around, pair.differences(around))
    allowed = _allowed(pair, torch.cat([first, worst.points])) if bound is None else bound
    record = Verification(
        pair.kind, float(worst.values[0]), tuple(worst.points[0].double().tolist()), pair.seen, allowed, pair.scale,
        dtype_name(net.dtype),
    )  # fmt: skip
    if not record.passed:
        shown = ", ".join(f"{v:.9g}" for v in record.at[:8]) + (", ..." if len(record.at) > 8 else "")
        raise CertificateError(f"{record}\nthe largest is at ({shown}); export again, and do not edit what was written")
    return record


@dataclass
class _Pairing:
    """The network and the artefact in its process; what was seen of them so far."""

    kind: str
    other: _Other
    net: CertifiedModule
    where: InputDomain
    scale: float = 0.0
    seen: int = 0

    def differences(self, points: Tensor) -> Tensor:
        """The largest difference of an output coordinate at each point; infinite where one of them is no number."""
        return torch.cat([self._some(part) for part in points.split(self.other.most)])

    def _some(self, points: Tensor) -> Tensor:
        inputs = self.where.split(points)
        with torch.no_grad():
            ours = self.net.core(*inputs)
        theirs = self.other.run(*inputs)
        if theirs.shape != ours.shape:
            raise CertificateError(
                f"the {self.kind} artefact returns shape {tuple(theirs.shape)} where the network returns "
                f"{tuple(ours.shape)}"
            )
        self.scale, self.seen = max(self.scale, float(ours.abs().max())), self.seen + len(points)
        gap = (theirs.double() - ours.double()).abs().reshape(len(points), -1).amax(-1)
        return gap.nan_to_num(nan=torch.inf, posinf=torch.inf)


@dataclass(frozen=True, eq=False)
class _Worst:
    """The points with the largest differences, worst first."""

    points: Tensor
    values: Tensor

    @classmethod
    def of(cls, points: Tensor, values: Tensor) -> _Worst:
        best = values.topk(min(STARTS, len(values))).indices
        return cls(points[best], values[best])

    def joined(self, points: Tensor, values: Tensor) -> _Worst:
        return self.of(torch.cat([self.points, points]), torch.cat([self.values, values]))


def _allowed(pair: _Pairing, points: Tensor) -> float:
    """What two ways of rounding may differ by: 1e-5 or 1e-10 of the largest output, more for steep tables.

    In float32 the network's own rounding is measured, against the same weights in float64, and eight times as much is
    allowed. In float64 there is nothing to measure it against: twice what the certificate states is allowed.
    """
    net, close = pair.net, CLOSE[pair.net.dtype] * max(1.0, pair.scale)
    if net.dtype == torch.float32:
        inputs = pair.where.split(points)
        wide = copy.deepcopy(net).double()
        with torch.no_grad():
            wider = (x.double() if x.is_floating_point() else x for x in inputs)
            rounding = (net.core(*inputs) - wide.core(*wider)).abs().max()
        return max(close, ROUNDINGS * float(rounding))
    certificate = net.certificate
    return max(close, 2 * certificate.by_source()["rounding"] * (pair.scale if certificate.relative else 1.0))


# -- the fresh process ----------------------------------------------------------------------------------------------


@contextmanager
def _on_disk(artefact: Artefact | InMemory | str | Path, kind: str | None) -> Iterator[tuple[str, Path]]:
    """The kind of an artefact and where it lies; what lives in memory is written to a file that goes away again."""
    if kind is not None and kind not in KINDS:
        raise ArgumentError(f"unknown kind '{kind}'{closest(kind, KINDS)}; known are {', '.join(KINDS)}")
    if isinstance(artefact, Artefact):
        yield artefact.kind, artefact.path
    elif isinstance(artefact, str | Path):
        path = Path(artefact)
        if not path.exists():
            raise ArgumentError(f"there is no file or folder '{path}'")
        yield kind or _kind_of(path), path
    elif hasattr(artefact, "save"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "artefact.safetensors"
            artefact.save(path)
            yield kind or str(getattr(artefact, "kind", "plain")), path
    else:
        raise ArgumentError(
            f"expected what an export returned or a path (.onnx, .safetensors, a folder), got {type(artefact).__name__}"
        )


def _kind_of(path: Path) -> str:
    if path.is_dir():
        return "hf"
    if path.suffix.lower() == ".onnx":
        return "onnx"
    if path.suffix.lower() == ".safetensors":
        return "lens" if is_lens_file(path) else "plain"
    raise ArgumentError(f"cannot tell what '{path}' is: expected .onnx, .safetensors or a folder; say it with kind=...")


def is_lens_file(path: Path) -> bool:
    """Whether a safetensors file has the header that `Lens.save` writes."""
    try:
        with safe_open(str(path), framework="pt") as file:
            text = (file.metadata() or {}).get(LENS_HEADER, "")
    except (SafetensorError, OSError, ValueError):
        return False
    return 0 < len(text) <= MAX_HEADER


@dataclass(frozen=True)
class _Other:
    """An artefact in a fresh process, as a function of tensors, and how many points it takes at once."""

    run: Run
    most: int


@contextmanager
def _process(kind: str, path: Path) -> Iterator[_Other]:
    """A fresh interpreter that holds the artefact, as a function of tensors."""
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    env.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
    # -P: this folder holds one called onnx, which must not hide the package of that name
    command = [sys.executable, "-P", "-W", "ignore", fresh.__file__, kind, str(path.resolve())]
    with tempfile.TemporaryFile() as words, subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words, env=env
    ) as child:  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None

        def answer() -> Tensor:
            try:
                found = receive(child.stdout)  # type: ignore[arg-type]
            except (OSError, ValueError) as error:
                raise CertificateError(f"the process that runs '{path.name}' broke off: {error}") from error
            if found is None or not found[0]:
                words.seek(0)
                last = words.read().decode(errors="replace").strip().splitlines()[-1:] or ["it ended without a word"]
                reason = found[1] if found else last[0]
                raise CertificateError(f"'{path.name}' cannot be run by a fresh process: {reason}")
            return torch.from_numpy(found[0][0])

        def run(*inputs: Tensor) -> Tensor:
            send(child.stdin, [x.detach().cpu().numpy() for x in inputs])  # type: ignore[arg-type]
            return answer()

        try:
            yield _Other(run, int(answer()))  # the first answer comes when it is loaded
        finally:
            child.stdin.close()
            child.stdout.close()
            try:
                child.wait(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                child.kill()
