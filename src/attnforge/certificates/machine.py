"""What a certificate assumes of the machine, measured: the exponential, IEEE operations, inner products, underflow.

A certificate is proved for every machine that keeps its `assumptions`. Whether this one does is a question of fact:
`survey` asks it, for each dtype and device, and says what was looked at. It can find that an assumption fails; that one
holds it shows for the arguments that it tried.

>>> import torch
>>> [found.name for found in survey("cpu", torch.float32, effort=2000) if not found.holds]
[]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from flint import arb, ctx
from torch import Tensor

from ..dtypes import Array, dtype_name
from .rounding import EXP_ULPS, TINY, UNIT, matmul_precision

#: Bits of the balls that judge exponentials: float64 has 53, so these leave 60 for the error.
BITS = 113
EFFORT = 20_000  # arguments of an exponential whose error is a ball: half a second
SETTLED = 512  # of the float32 arguments, the worst that are judged by balls as well
POINT = 140  # binary digits after the point in exact inner products of numbers of size about 1
PAIRS = 600  # of numbers for each operation, judged as fractions
#: Lengths of rows of a softmax, and of inner products: kernels treat ends of rows and short ones in their own ways.
LENGTHS = (2, 3, 8, 17, 64, 1000)
ROWS = 1 << 14  # rows of a softmax alive at once
#: Roundings of a weight beside those of exponentials: the sum of two terms, its reciprocal, the scaling (R5).
NORMALISING = 3.0
Reference = Callable[[Array], tuple[Array, Array]]


@dataclass(frozen=True)
class Assumption:
    """One assumption on one device: what was measured, what a certificate allows, and what was looked at."""

    name: str
    device: str
    dtype: str
    measured: float
    allowed: float
    unit: str
    covered: str

    @property
    def holds(self) -> bool:
        """Whether the measurement lies within what is allowed; NaN does not."""
        return self.measured <= self.allowed

    def to_json(self) -> dict[str, Any]:
        """All fields, and whether it holds; what is not finite as text."""
        plain = {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in asdict(self).items()}
        return {**plain, "holds": self.holds}


def devices() -> tuple[str, ...]:
    """The devices of this machine that networks run on."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def ball_exp(x: Array) -> tuple[Array, Array]:
    """exp(x) as pairs high + low of float64 numbers, by ball arithmetic.

    >>> high, low = ball_exp(np.array([1.0]))
    >>> float(high[0]) == math.e, bool(0 < low[0] < 2.0**-52)
    (True, True)
    """
    high, low = np.empty(len(x)), np.empty(len(x))
    with ctx.workprec(BITS):
        for i, value in enumerate(x.tolist()):
            exact = arb(value).exp()
            high[i] = float(exact)
            low[i] = float(exact - arb(high[i]))
    return high, low


def survey(
    device: str, dtype: torch.dtype, effort: int = EFFORT, reference: Reference = ball_exp, seed: int = 0
) -> tuple[Assumption, ...]:
    """Every assumption of the certificates of a dtype, measured on a device."""
    rng = np.random.default_rng(seed)
    parts = (_exponential, _softmax, _underflow, _operations, _products)
    with torch.no_grad():
        found = [each for part in parts for each in part(device, dtype, effort, reference, rng)]
    return (_switches(device, dtype), *found)


def _switches(device: str, dtype: torch.dtype) -> Assumption:
    """Global switches that make products coarser than the dtype says."""
    coarse = [torch.is_autocast_enabled(device)]
    if dtype == torch.float32:
        coarse.append(matmul_precision() != "highest")
        coarse.append(device == "cuda" and torch.backends.cuda.matmul.allow_tf32)
    coarse.append(not float(torch.tensor([TINY[dtype] * 0.5], dtype=dtype).to(device) * 2.0**30))
    name = "switches for reduced precision"
    covered = "autocast, float32_matmul_precision, allow_tf32; subnormal numbers are read as they are"
    return Assumption(name, device, dtype_name(dtype), float(sum(coarse)), 0.0, "switched on", covered)


def _arguments(dtype: torch.dtype, effort: int, rng: np.random.Generator) -> Array:
    """Numbers of the dtype where exp is normal and finite: spread evenly, over all exponents, and near its ends."""
    low, high = math.log(TINY[dtype]), math.log(torch.finfo(dtype).max)
    even = rng.uniform(low, high, effort // 2)
    exponents = np.exp2(rng.uniform(-40, math.log2(-low), effort // 2)) * rng.choice([-1.0, 1.0], effort // 2)
    halves = (np.arange(-300, 300) + 0.5) * math.log(2)  # where the reduction of arguments changes sides
    shaken = np.concatenate([halves * (1 + k * 2.0**-23) for k in (-1, 0, 1)])
    found = np.concatenate([even, exponents, shaken])
    narrow: Array = torch.from_numpy(found).to(dtype).double().numpy()
    return np.unique(narrow[(narrow > low) & (narrow < high)])


def _in_units(found: Array, high: Array, low: Array, u: float) -> Array:
    """Relative errors of computed numbers against high + low, in units of roundoff."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(np.abs((found - high) - low) / (u * np.abs(high)))


def _worst(x: Array, found: Array, dtype: torch.dtype, reference: Reference) -> tuple[float, float]:
    """The largest error in u and its argument. For float32, float64's exponential picks those that are judged."""
    if dtype == torch.float32 and len(x) > SETTLED:
        with np.errstate(under="ignore"):
            rough = _in_units(found, np.exp(x), np.zeros(len(x)), UNIT[dtype])
        kept = np.argsort(np.where(np.isnan(rough), np.inf, rough))[-SETTLED:]
        x, found = x[kept], found[kept]
    errors = _in_units(found, *reference(x), UNIT[dtype])
    at = int(np.argmax(np.where(np.isnan(errors), np.inf, errors)))
    return float(errors[at]), float(x[at])


def _exponential(
    device: str, dtype: torch.dtype, effort: int, reference: Reference, rng: np.random.Generator
) -> list[Assumption]:
    """torch.exp wherever its result is a normal number."""
    x = _arguments(dtype, effort * (64 if dtype == torch.float32 else 1), rng)
    found = torch.from_numpy(x).to(dtype).to(device).exp().double().cpu().numpy()
    most, at = _worst(x, found, dtype, reference)
    covered = f"{len(x):,} arguments in [{x[0]:.4g}, {x[-1]:.4g}] over all exponents; worst at {at:.9g}"
    return [Assumption("exp", device, dtype_name(dtype), most, EXP_ULPS, "u", covered)]


def _weights(x: Tensor, length: int) -> Tensor:
    """The softmax weights of x in rows [0, ..., x, ...] with -inf elsewhere: exp(x)/(1 + exp(x))."""
    out = []
    for part in x.split(ROWS):
        at = 1 + torch.arange(len(part), device=x.device)[:, None] % (length - 1)
        rows = part.new_full((len(part), length), -math.inf)
        rows[:, 0] = 0.0
        out.append(torch.softmax(rows.scatter_(1, at, part[:, None]), -1).gather(1, at)[:, 0])
    return torch.cat(out)


def _softmax(
    device: str, dtype: torch.dtype, effort: int, reference: Reference, rng: np.random.Generator
) -> list[Assumption]:
    """The exponential inside of softmax, which need not be torch.exp: weights of rows with two finite logits."""
    u, name, count = UNIT[dtype], dtype_name(dtype), 0
    bare = whole = (0.0, 0.0)
    for length in LENGTHS:
        x = _arguments(dtype, effort * (16 if dtype == torch.float32 else 1) // len(LENGTHS), rng)
        x = x[x < 0]
        found = _weights(torch.from_numpy(x).to(dtype).to(device), length).double().cpu().numpy()
        count += len(x)
        far = x < math.log(u / 2)  # there the sum rounds to 1, and the weight is the exponential itself
        bare = max(bare, _worst(x[far], found[far], dtype, reference))
        some = np.flatnonzero(~far)[:: max(1, int((~far).sum()) // SETTLED)]
        exact = 1 / (1 + 1 / reference(x[some])[0])
        allowed = EXP_ULPS * (1 + exact) + NORMALISING + 4 * 2.0**-53 / u  # the last for the line above
        share = np.abs(found[some] - exact) / (u * exact * allowed)
        at = int(np.argmax(np.where(np.isnan(share), np.inf, share)))
        whole = max(whole, (float(share[at]), float(x[some][at])))
    where = f"{count:,} arguments below 0 in rows of {', '.join(map(str, LENGTHS))} slots; worst at"
    return [
        Assumption("exponential of softmax", device, name, bare[0], EXP_ULPS, "u", f"{where} {bare[1]:.9g}"),
        Assumption("weights of softmax", device, name, whole[0], 1.0, "of lemma R5", f"{where} {whole[1]:.9g}"),
    ]


def _underflow(
    device: str, dtype: torch.dtype, effort: int, reference: Reference, rng: np.random.Generator
) -> list[Assumption]:
    """Where exp(x) is below the normal numbers: nothing worse than `tiny` may come out, however far out x is."""
    tiny, edge = TINY[dtype], math.log(TINY[dtype])
    x = np.concatenate([edge * np.geomspace(1, 1.2, 2000), edge * np.geomspace(1.2, 1e30, 2000), [-math.inf]])
    given = torch.from_numpy(x).to(dtype).to(device)
    given = given[given.double() <= edge]
    found = torch.stack([given.exp(), *(_weights(given, length) for length in LENGTHS)]).double().cpu().numpy()
    with np.errstate(under="ignore"):
        gaps = np.abs(found - np.exp(given.double().cpu().numpy())) / tiny
    half = torch.tensor([tiny], dtype=dtype, device=device) * 0.5
    mode = "kept" if float(half) else "flushed to zero (allowed: they count as 0)"
    covered = f"exp and softmax at {len(given):,} arguments from {edge:.4g} to -inf; subnormal numbers are {mode}"
    most = float(np.max(np.where(np.isnan(gaps), np.inf, gaps)))
    return [
        Assumption("underflow of the exponential", device, dtype_name(dtype), most, 1.0, "smallest normal", covered)
    ]


def _operations(
    device: str, dtype: torch.dtype, effort: int, reference: Reference, rng: np.random.Generator
) -> list[Assumption]:
    """Sums, differences, products and quotients of pairs of many sizes, against exact fractions."""
    u, most = UNIT[dtype], 0.0
    size = np.exp2(rng.uniform(-30, 30, (2, PAIRS))) * rng.choice([-1.0, 1.0], (2, PAIRS))
    size[1, ::3] = size[0, ::3] * (1 + 2.0 ** -rng.uniform(1, 60, len(size[0, ::3])))  # nearly equal: cancellation
    x, y = torch.from_numpy(size).to(dtype).to(device)
    exact: tuple[Callable[[Fraction, Fraction], Fraction], ...] = (
        lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: a / b,
    )  # fmt: skip
    for found, by in zip((x + y, x - y, x * y, x / y), exact, strict=True):
        for a, b, mine in zip(x.tolist(), y.tolist(), found.tolist(), strict=True):
            wanted = by(Fraction(a), Fraction(b))
            gap = abs(Fraction(mine) - wanted) if math.isfinite(mine) else Fraction(10)
            most = max(most, float(gap / (abs(wanted) or 1)) / u)
    covered = f"{PAIRS:,} pairs each of sums, differences, products and quotients, a third of them nearly equal"
    return [Assumption("IEEE operations", device, dtype_name(dtype), most, 1.0, "u", covered)]


def _whole(x: float) -> int:
    """x 2^POINT, which is a whole number unless x is tiny; what is cut off then is far below any rounding."""
    return int(math.ldexp(x, POINT))


def _products(
    device: str, dtype: torch.dtype, effort: int, reference: Reference, rng: np.random.Generator
) -> list[Assumption]:
    """Matrix products and einsum, as networks call them: n roundings for a sum of n products, in any order."""
    u, most = UNIT[dtype], 0.0
    for length in LENGTHS:
        a, b = (torch.from_numpy(rng.normal(size=shape)).to(dtype).to(device) for shape in ((32, length), (length, 24)))
        left, right = (np.vectorize(_whole, otypes=[object])(t.double().cpu().numpy()) for t in (a[:4], b[:, :4]))
        exact, sizes = left @ right, np.abs(left) @ np.abs(right)  # whole numbers: the sums have no rounding
        heads = torch.einsum("...hk,hmk->...hm", a[:, None], b.mT[None]).squeeze(1)
        for found in (a @ b, heads, torch.addmm(torch.zeros_like(b[0]), a, b)):
            for mine, wanted, size in zip(found[:4, :4].flatten().tolist(), exact.flat, sizes.flat, strict=True):
                gap = abs(Fraction(mine) * 4**POINT - wanted) if math.isfinite(mine) else Fraction(size)
                most = max(most, float(gap / size) / (u * length))
    covered = f"matmul, einsum and addmm of normal numbers, sums of {', '.join(map(str, LENGTHS))}"
    return [Assumption("inner products", device, dtype_name(dtype), most, 1.0, "of n u", covered)]
