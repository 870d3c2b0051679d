"""Norm heads on their own (lemma K28): files of the family "norm".

A row is centred twice, c.c is computed once, every head reads a sigmoid of it, and the mixture of these scales the row.
The bound is relative: to the largest result of a row times |weight|, plus |bias|.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

from flint import arb

from ...errors import CertificateError
from ..balls import ONE, ZERO, NotProved, largest, size, supremum, up
from ..file import Saved
from ..functions import Function, parse
from ..program import number, whole
from ..rounding import EXPONENTIAL, MACHINES, Machine
from ..scalar import Cell, Head, Weights, taylor_head

GROUP, BLOCK = 4, 8  # heads that are mixed together, and channels of one inner product, as norms are computed
WIDER = 2.0**-7  # of the interval of variances: rows at its ends are admitted by variances that are rounded
MOST = 1 << 14  # channels: sums are trees, so that more would cost nothing; but each has a weight and a bias
MOST_HEADS, MOST_EDGES = 256, 1 << 14  # work is bounded for every file: a head on a cell costs a tenth of a millisecond


def prove_norm(saved: Saved, chosen: Any) -> tuple[float, str, tuple[str, ...]]:
    """The bound of a norm head, the dtype, and what it is."""
    try:
        return _prove(saved, chosen["edges"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise CertificateError(f"the file describes no norm, or a derivation that does not fit: {error!r}") from error


def _prove(saved: Saved, edges: Any) -> tuple[float, str, tuple[str, ...]]:
    config, tensors = saved.header["config"], dict(saved.tensors)
    d, kind = whole(config["channels"], 1, MOST), config["kind"]
    eps, off = (number(config[key]) for key in ("eps_norm", "offset"))
    scale, shift, mix = (tensors.pop(name) for name in ("scale", "shift", "mix"))
    weight, bias = (tensors.pop(name, None) for name in ("weight", "bias"))
    count = whole(len(scale.numbers), 1, MOST_HEADS)
    if tensors or kind not in ("layer", "rms") or eps < 0 or off < 0:
        raise ValueError(f"it has the kind {kind!r} and the tensors {', '.join(sorted(saved.tensors))}")
    if any(t.shape != (count,) for t in (scale, shift, mix)) or any(t and t.shape != (d,) for t in (weight, bias)):
        raise ValueError("its tensors do not have one number for each head, or channel")
    dtype = scale.dtype
    if dtype not in MACHINES or any(t.dtype != dtype for t in saved.tensors.values()):
        raise NotProved(f"the kernel speaks of networks stored and run in float32 or float64, not {dtype!r}")
    machine = MACHINES[dtype]
    for name, tensor in saved.tensors.items():
        if not all(map(math.isfinite, tensor.numbers)):
            raise CertificateError(f"no bound holds for weights that are not finite: {name}")
    low, high = (arb(number(x)) for x in config["variance"])
    if not (low > 0 and low < high):
        raise ValueError("its interval of variances is none")
    low, high = low * (1 - arb(WIDER)), high * (1 + arb(WIDER))
    off_centre, moved, reach = _centred(machine, d, kind == "layer", 2 * arb(off) + 1, low)
    dot = machine.gamma(_block(d) + _depth(_tree(d) // _block(d)))
    eta = (1 + moved) * (1 + dot) - 1 + 4 * _tree(d) * machine.tiny / (d * low)
    if not eta < WIDER:
        raise NotProved("the variance of a row is not known well enough")
    ends = [number(x) for x in edges]
    first, last = d * low * (1 - eta), d * high * (1 + eta)
    if not 2 <= len(ends) <= MOST_EDGES or any(not a < b for a, b in itertools.pairwise(ends)):
        raise ValueError("the edges of its cells are not in order, or too many")
    if not (arb(ends[0]) <= first and last <= arb(ends[-1]) and ends[0] > 0):
        raise CertificateError("the cells of the derivation do not cover what a norm reads")
    heads = [Head(((1.0, 0.0), (0.0, 1.0)), ((-s, b), (0.0, 0.0)), False, (0.0,) * 3, (1.0, 0.0), a)
             for s, b, a in zip(scale.numbers, shift.numbers, mix.numbers, strict=True)]  # fmt: skip
    target = Function("norm", (), (parse(f"1/sqrt(y/{d} + {Fraction(eps)})"),))
    fitted = largest([_cell(heads, machine, *pair, target, d, arb(eps)) for pair in itertools.pairwise(ends)])
    drift = 1 / (1 - eta).sqrt() - 1
    smallest = (low / (low + arb(eps))).sqrt()  # the largest result of a row is no less
    amounts = sum((1 + size(arb(x)) for x in mix.numbers), ONE)
    lost = 8 * machine.tiny * amounts * (1 + high + arb(eps)).sqrt() / smallest
    whole_error = (1 + off_centre) * (1 + drift) * (1 + fitted) - 1 + lost
    most = largest([d * high.sqrt() * (2 + reach), last, largest([size(arb(s)) * last + size(arb(b)) for s, b in
                    zip(scale.numbers, shift.numbers, strict=True)]), amounts * (last.sqrt() + 1)])  # fmt: skip
    if weight or bias:
        by = [arb(x) for x in weight.numbers] if weight else [ONE] * d
        add = [arb(x) for x in bias.numbers] if bias else [ZERO] * d
        pairs = [(size(w), size(b)) for w, b in zip(by, add, strict=True)]
        sunk = [2 * machine.tiny / (w * smallest + b) for w, b in pairs if weight and w > 0]
        whole_error += machine.gamma(2) * (1 + whole_error) + largest(sunk)
        most = largest([most, *(w * amounts * (last.sqrt() + 1) + b for w, b in pairs)])
    if not most < machine.huge:
        raise NotProved("numbers of a norm may overflow")
    found = up(whole_error)
    if not math.isfinite(found):
        raise NotProved("nothing can be proved of this norm")
    return found, dtype, (f"{kind} norm",)


def _tree(d: int) -> int:
    """The length that a row is padded to: 2^a or 3 * 2^a."""
    power = 1 << (d - 1).bit_length()
    return power * 3 // 4 if power >= 4 and power * 3 // 4 >= d else power


def _depth(width: int) -> int:
    """How many additions in a row halves added to halves take, at the end three numbers or one."""
    halvings = (width & -width).bit_length() - 1
    return halvings + (width >> halvings) - 1


def _block(d: int) -> int:
    return math.gcd(_tree(d), BLOCK)


def _centred(machine: Machine, d: int, layer: bool, off: arb, low: arb) -> tuple[arb, arb, arb]:
    """How far entries of a centred row are off, in units of its largest; its c.c, relatively; and |mean| / std."""
    if not layer:
        return ZERO, ZERO, ZERO
    u, lost = machine.u, 2 * d * machine.tiny / low.sqrt()
    gamma = machine.gamma(_depth(_tree(d)) + 1)
    first = gamma * (1 + off * off).sqrt() + lost
    common = u * (1 + first) + gamma * (1 + u) * (1 + first) + lost
    entry = (u * (1 + first) + common) * (1 + u) + u
    moved = 2 * u * (1 + first) + (u * (1 + first) + common) ** 2
    return entry, (1 + moved) * (1 + u) ** 2 - 1, off + 1


def _cell(heads: list[Head], machine: Machine, low: float, high: float, target: Function, d: int, eps: arb) -> arb:
    """How far the computed mixture of sigmoids is from 1/sqrt(y/d + eps) on a cell of y, relatively."""
    cell = Cell.of(low, high, target)
    sums = [[-x for x in cell.thin], [-x for x in cell.wide]]
    groups = -(-len(heads) // GROUP)
    reads = machine.gamma(2 + GROUP - 1 + (groups - 1).bit_length())
    error, u = ZERO, machine.u
    for head in heads:
        weights = Weights.of(head, cell.centre, cell.radius)
        (_, parts), _, _ = taylor_head(head, machine, weights, cell.centre, cell.radius, ZERO)
        amount = arb(head.out)
        for i in (0, 1):
            sums[i] = [s + amount * x for s, x in zip(sums[i], parts[i], strict=True)]
        slope, level = (size(arb(x)) for x in head.keys[0])
        step = machine.gamma(2) * (slope * arb(high) + level) + 2 * machine.tiny - (1 - EXPONENTIAL * u).log()
        relative = weights.most[1] * step.expm1() * (1 + machine.gamma(3)) + machine.gamma(3)
        error += size(amount) * weights.most[0] * ((1 + relative) * (1 + reads) - 1)
    return (supremum(sums[0][:-1], sums[1][-1], cell.radius) + error) * (arb(high) / d + eps).sqrt()
