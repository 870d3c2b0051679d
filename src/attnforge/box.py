"""`Box`: the compact domain on which a network and its target are compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from .errors import ArgumentError

Interval = tuple[float, float]


@dataclass(frozen=True, init=False, repr=False)
class Box:
    """A product of closed intervals, named (for formulas) or shaped (for tensors).

    >>> box = Box(x=(-1, 1), y=(0.5, 2))
    >>> box.names, box["y"], box.dim
    (('x', 'y'), (0.5, 2.0), 2)
    >>> Box({"x": (-1, 1)}) == Box(x=(-1, 1))
    True
    >>> Box.cube(-1, 1, shape=(3, 2)).shape
    (3, 2)

    The order of the names is the order of the input columns. Bounds are exact float64 numbers; `outward` widens them to
    the next number of a smaller dtype, so that `float32(0.8)`, which is larger than 0.8, is inside a box that ends at
    0.8.
    """

    names: tuple[str, ...] | None
    shape: tuple[int, ...]
    _lower: tuple[float, ...]
    _upper: tuple[float, ...]

    def __init__(self, intervals: Mapping[str, Interval] | None = None, /, **named: Interval):
        if intervals is not None and not isinstance(intervals, Mapping):
            raise ArgumentError(
                f"Box takes intervals by name, Box(x=(-1, 1)) or Box({{'x': (-1, 1)}}), "
                f"not {type(intervals).__name__}; for tensors use Box.cube(lo, hi, shape=...)"
            )
        merged = {_name(key): pair for key, pair in (intervals or {}).items()} | named
        if not merged:
            raise ArgumentError("Box needs at least one interval, for example Box(x=(-1, 1))")
        pairs = [_interval(name, pair) for name, pair in merged.items()]
        self._set(tuple(merged), (len(pairs),), [p[0] for p in pairs], [p[1] for p in pairs])

    @classmethod
    def cube(cls, lo: float, hi: float, shape: tuple[int, ...] | int) -> Box:
        """The box of all tensors of `shape` with entries in [lo, hi] (batch dimensions are not part of it)."""
        size = (shape,) if isinstance(shape, int) else tuple(shape)
        low, high = _interval("cube", (lo, hi))
        if not all(isinstance(s, int) and s > 0 for s in size):
            raise ArgumentError(f"shape must hold positive whole numbers, got {shape!r}")
        count = math.prod(size)
        return cls._make(None, size, [low] * count, [high] * count)

    @classmethod
    def between(cls, lower: torch.Tensor | np.ndarray, upper: torch.Tensor | np.ndarray) -> Box:
        """The box of all tensors between two tensors of one shape, entry by entry.

        >>> Box.between(torch.tensor([0.0, -1.0]), torch.tensor([1.0, 1.0])).intervals()
        [(0.0, 1.0), (-1.0, 1.0)]
        """
        low, high = np.asarray(lower, dtype=np.float64), np.asarray(upper, dtype=np.float64)
        if low.shape != high.shape or low.size == 0:
            raise ArgumentError(f"lower has shape {low.shape} and upper {high.shape}; they must agree and not be empty")
        pairs = [_interval(f"entry {i}", pair) for i, pair in enumerate(zip(low.ravel(), high.ravel(), strict=True))]
        return cls._make(None, low.shape, [p[0] for p in pairs], [p[1] for p in pairs])

    @classmethod
    def _make(cls, names: tuple[str, ...] | None, shape: tuple[int, ...], low: list[float], high: list[float]) -> Box:
        box = cls.__new__(cls)
        box._set(names, shape, low, high)
        return box

    def _set(self, names: tuple[str, ...] | None, shape: tuple[int, ...], low: list[float], high: list[float]) -> None:
        for field, value in (("names", names), ("shape", shape), ("_lower", tuple(low)), ("_upper", tuple(high))):
            object.__setattr__(self, field, value)

    @property
    def dim(self) -> int:
        """The number of intervals."""
        return len(self._lower)

    @property
    def lower(self) -> torch.Tensor:
        """Lower bounds, float64, in the box's shape."""
        return torch.tensor(self._lower, dtype=torch.float64).reshape(self.shape)

    @property
    def upper(self) -> torch.Tensor:
        """Upper bounds, float64, in the box's shape."""
        return torch.tensor(self._upper, dtype=torch.float64).reshape(self.shape)

    def intervals(self) -> list[Interval]:
        """All intervals in order."""
        return list(zip(self._lower, self._upper, strict=True))

    def __getitem__(self, name: str) -> Interval:
        if self.names is None or name not in self.names:
            raise ArgumentError(f"the box has no interval '{name}'; it has {', '.join(self.names or ()) or 'no names'}")
        i = self.names.index(name)
        return self._lower[i], self._upper[i]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names or ())

    def outward(self, dtype: torch.dtype) -> Box:
        """The smallest box around this one whose bounds are numbers of `dtype`."""
        low, high = round_outward(np.array(self._lower), np.array(self._upper), dtype)
        return self._make(self.names, self.shape, list(low), list(high))

    def contains(self, x: torch.Tensor) -> torch.Tensor:
        """For each point of a batch (batch dimensions first) whether it lies in the box; NaN does not."""
        kept = x.shape[: x.dim() - len(self.shape)]
        if x.shape[len(kept) :] != self.shape:
            raise ArgumentError(
                f"expected points of shape (..., {', '.join(map(str, self.shape))}), got {tuple(x.shape)}"
            )
        wide = x.to(torch.float64)
        inside = (wide >= self.lower.to(x.device)) & (wide <= self.upper.to(x.device))
        return inside.reshape(*kept, self.dim).all(-1)

    def sample(self, count: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """`count` points drawn uniformly, reproducibly, and inside the box after rounding to `dtype`."""
        generator = torch.Generator().manual_seed(seed)
        unit = torch.rand((count, *self.shape), generator=generator, dtype=torch.float64)
        points = self.lower + unit * (self.upper - self.lower)
        wide = self.outward(dtype)
        return torch.minimum(torch.maximum(points, wide.lower), wide.upper).to(dtype)

    def corners(self, limit: int = 4096, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """The corners, all of them when there are at most `limit`, else `limit` of them, spread evenly."""
        total = 2**self.dim
        index = range(total) if total <= limit else [i * total // limit for i in range(limit)]
        bits = torch.tensor([[(i >> k) & 1 for k in range(self.dim)] for i in index], dtype=torch.bool)
        wide = self.outward(dtype)
        points = torch.where(bits, wide.upper.reshape(-1), wide.lower.reshape(-1))
        return points.reshape(-1, *self.shape).to(dtype)

    def to_json(self) -> dict[str, object]:
        """A description that `from_json` turns back into an equal box."""
        return {
            "names": list(self.names) if self.names else None,
            "shape": list(self.shape),
            "lower": list(self._lower),
            "upper": list(self._upper),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Box:
        """The box that `to_json` described; raises `ArgumentError` on anything else."""
        try:
            names, shape, low, high = (data[key] for key in ("names", "shape", "lower", "upper"))
            shape = tuple(int(s) for s in shape)  # type: ignore[attr-defined]
            pairs = [_interval(f"entry {i}", pair) for i, pair in enumerate(zip(low, high, strict=True))]  # type: ignore[call-overload]
            named: tuple[str, ...] | None = None if names is None else tuple(names)  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(f"this is not the description of a box: {error}") from error
        if min(shape, default=1) < 1 or math.prod(shape) != len(pairs):
            raise ArgumentError(f"the description of a box has the shape {shape}, which does not fit its bounds")
        if named is not None and (
            isinstance(names, str) or not all(isinstance(name, str) for name in named) or shape != (len(set(named)),)
        ):
            raise ArgumentError(f"the description of a box has names that do not fit its bounds: {names!r}")
        return cls._make(named, shape, [p[0] for p in pairs], [p[1] for p in pairs])

    def __repr__(self) -> str:
        if self.names:
            named = zip(self.names, self.intervals(), strict=True)
            return f"Box({', '.join(f'{name}=({lo:g}, {hi:g})' for name, (lo, hi) in named)})"
        if len(set(self.intervals())) == 1:
            return f"Box.cube({self._lower[0]:g}, {self._upper[0]:g}, shape={self.shape})"
        return f"Box(shape={self.shape}, within=({min(self._lower):g}, {max(self._upper):g}))"


def _name(key: object) -> str:
    """A name, which sympy's symbols have as well."""
    if isinstance(key, str) or type(key).__module__.startswith("sympy."):
        return str(key)
    raise ArgumentError(f"the intervals of a box go by name, {{'x': (-1, 1)}}, got the key {key!r}")


def boxes_of(box: object) -> tuple[Box, ...]:
    """One box or several, each a `Box` or a dict of intervals by name.

    >>> boxes_of({"x": (0, 1)})
    (Box(x=(0, 1)),)
    """
    given = tuple(Box(b) if isinstance(b, Mapping) else b for b in (box if isinstance(box, tuple) else (box,)))
    if not given or not all(isinstance(b, Box) for b in given):
        raise ArgumentError(
            "box must be a Box, a dict such as {'x': (-1, 1)}, or a tuple of boxes for a function of several tensors, "
            f"got {box!r}"
        )
    return given


def round_outward(low: np.ndarray, high: np.ndarray, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Bounds moved outward to numbers of `dtype`; exact where they already are such numbers."""
    if dtype == torch.float64:
        return low, high
    exact_low, exact_high = torch.from_numpy(np.array(low)), torch.from_numpy(np.array(high))
    near_low, near_high = exact_low.to(dtype), exact_high.to(dtype)
    below = torch.nextafter(near_low, torch.full_like(near_low, -math.inf))
    above = torch.nextafter(near_high, torch.full_like(near_high, math.inf))
    out_low = torch.where(near_low.double() <= exact_low, near_low, below)
    out_high = torch.where(near_high.double() >= exact_high, near_high, above)
    return out_low.double().numpy(), out_high.double().numpy()


def _interval(name: str, pair: object) -> Interval:
    try:
        low, high = map(float, pair)  # type: ignore[call-overload]
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"the interval of '{name}' must be a pair of numbers (lo, hi), got {pair!r}") from error
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ArgumentError(f"the interval of '{name}' must be finite, got ({low}, {high})")
    if low > high:
        raise ArgumentError(f"the interval of '{name}' is empty: lo = {low:g} is larger than hi = {high:g}")
    return low, high
