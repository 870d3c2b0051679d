"""Hats of every coordinate, then a selection among grid points (lemmas K40, K41 and K44): files of the family
"theorem-universal"."""

from __future__ import annotations

import itertools
import math
from typing import Any

from flint import arb, fmpq

from ...errors import CertificateError
from ..balls import ZERO, NotProved, largest, size
from ..file import Saved, Tensor
from ..functions import function
from ..program import exact, number, whole
from ..rounding import Machine, power_of_two
from ..scalar import Head, HeadSum, error_on
from . import hypothesis as hypotheses
from .hypothesis import counted, taken, widened
from .selection import (
    Sides,
    averaged,
    expect,
    eye,
    first,
    gathered,
    loosened,
    own_rows,
    settled,
    unseen,
    values_error,
)

PARTS = 4096  # of a cell, on each of which the spread of the selection is bounded
MOST_EDGES = 1 << 14  # of cells of the ramp: a millisecond each
RAMP = "piecewise_linear([-1.5, -0.5, 0.5, 1.5], [0.0, 0.0, 1.0, 1.0])"  # clip(y, -1/2, 1/2) + 1/2


def prove_hats(saved: Saved, chosen: Any) -> tuple[arb, str, str]:
    """The bound of a file of hats, its dtype, and the hypothesis; the choice is where the cells of the ramp end."""
    config = saved.header["config"]
    counts = counted(config["counts"])
    given, shape, form = hypotheses.stated(config, hypotheses.of_grid(counts)), config["box"]["shape"], config["form"]
    tensors, machine = taken(saved, config["dtype"])
    D, hats, n = len(counts), sum(counts), whole(shape[0], 1)
    if len(shape) != 2 or min(counts) < 2 or len(given.low) != D or len(given.samples) != math.prod(counts):
        raise CertificateError("the samples are not one for each point of the grid")
    if form not in ("paper", "tokens") or not all(a < b for a, b in zip(given.low, given.high, strict=True)):
        raise ValueError("its form is none, or its box has a side of no length")
    tokens = n if form == "tokens" else 0
    if tokens:
        gathered(tensors, "net.", config["dtype"], tokens, D // tokens)
    sides = widened(given.low, given.high, config["dtype"])
    off = _hat_error(tensors, machine, given, counts, tokens, sides, chosen["edges"], config["dtype"])
    sharp, rows, values = _selection(config, tensors, D, hats, tokens)
    if tensors:
        raise CertificateError(f"nothing is known of the tensors {', '.join(sorted(tensors)[:4])}")
    keys, depth = own_rows(rows, tokens, hats)
    points = _points(counts)
    if any(rows != points for rows in keys):
        raise CertificateError("keys of grid points do not read the hats of their coordinates")
    beta = arb(sharp)
    logit = beta * D * (1 + off)
    slots, roundings = len(points), D - 1 + 2 * (not power_of_two(sharp))
    error = machine.gamma(roundings) * logit + (D + 2) * machine.tiny
    unseen(machine, config["dtype"], depth, logit, D + 2 + tokens)
    d = loosened(machine, error) + machine.u * beta * D * (1 + 2 * off)
    steps = [(exact(b) - exact(a)) / (k - 1) for a, b, k in zip(given.low, given.high, counts, strict=True)]
    astray = (2 * d - beta * (arb(0.5) - 2 * off)).exp()
    square = ZERO
    for h, k in zip(steps, counts, strict=True):
        square += arb(h * h) * (between(beta, off, d) + (k - 2) * (k - 1) ** 2 * astray)
    light = slots * astray
    heavy = min(2**D, slots) if light <= machine.u / 8 else slots
    parts, worst = max(tokens, 1), ZERO
    outputs = len(given.samples[0]) // parts
    for t in range(parts):
        own = range(t * outputs, (t + 1) * outputs)
        lost, most = values_error(values[t::parts], [0.0] * outputs, given.samples, own)
        if not largest([logit, 4 * most, *(size(arb(x)) for side in sides for x in side)]) < machine.huge:
            raise NotProved("numbers of the hats may overflow")
        rounding = averaged(machine, slots * parts, heavy, light if heavy < slots else ZERO, most)
        worst = worst.max(settled(machine, given, square, lost, most, rounding, []))
    return worst, config["dtype"], given.text


def between(beta: arb, off: arb, d: arb) -> arb:
    """The largest of t^2 + z s, z = 1 - 2t the difference of two neighbouring hats, s the share of the further one: at
    most E|x - v|^2 of the two grid points around x, in steps (lemma K44)."""
    found = ZERO
    for i in range(PARTS):
        z, last = arb(i) / PARTS, arb(i + 1) / PARTS  # the share falls with z
        share = 1 / (1 + (beta * (z - 2 * off) - 2 * d).exp())
        found = found.max(((1 - z) / 2) ** 2 + last * share)
    return size(found)


def _points(counts: list[int]) -> list[list[float]]:
    """For every grid point ones at the hats of its coordinates, the last coordinate running fastest."""
    axes = [[[float(j == k) for j in range(n)] for k in range(n)] for n in counts]
    return [[x for row in rows for x in row] for rows in itertools.product(*axes)]


def _hat_error(
    tensors: dict[str, Tensor], machine: Machine, given: hypotheses.Hypothesis, counts: list[int], tokens: int,
    sides: Sides, edges: Any, dtype: str,
) -> arb:  # fmt: skip
    """How far computed hats are from hat functions, on the box (lemma K44); takes the tensors of the first layer."""
    start, D, hats = "net.first.groups.0.", len(counts), sum(counts)
    ramps, after = hats - D, hats + tokens
    query, bias = (tensors.pop(start + name) for name in ("W_Q", "b_Q"))
    (keys,), (values,) = (tensors.pop(start + name).rows() for name in ("M_K", "M_V"))
    if query.shape != (ramps, D + tokens, 2) or bias.shape != (ramps, 2) or any(len(row) != 1 for row in values):
        raise CertificateError("there is not one ramp between neighbouring points of each coordinate")
    out, constant = {}, {}
    ramp = hat = 0
    for n in counts:
        constant[hat,] = 1.0
        for k in range(n - 1):
            out[ramp + k, 0, hat + k], out[ramp + k, 0, hat + k + 1] = -1.0, 1.0
        ramp, hat = ramp + n - 1, hat + n
    expect(tensors, start + "W_O", (ramps, 1, after), out)
    expect(tensors, "net.first.s", (after,), constant)
    if tokens:
        expect(tensors, "net.first.S", (D + tokens, after), eye((D + tokens, after), D, hats))
    lost, reach, r = ZERO, ZERO, 0
    for i, n in enumerate(counts):
        a, b = exact(given.low[i]), exact(given.high[i])
        step = (b - a) / (n - 1)
        far = size(arb(sides[i][0])).max(size(arb(sides[i][1])))
        for k in range(n - 1):
            rows, shift = _row(query, r), bias.numbers[2 * r : 2 * r + 2]
            rate = rows[i][0]
            if any(x for j, row in enumerate(rows) for c, x in enumerate(row) if (j, c) != (i, 0)) or shift[1] != 1:
                raise CertificateError("the query of a ramp reads more than its coordinate and 1")
            meant = -(a + k * step) / step - fmpq(1, 2)
            moved = arb(abs(exact(rate) - 1 / step)) * far + arb(abs(exact(shift[0]) - meant))
            span = arb(abs(rate)) * far + arb(abs(shift[0]))
            lost = lost.max(size(moved + machine.gamma(2) * span + 2 * machine.tiny))
            for x in sides[i]:  # the query is monotone in its coordinate
                reach = reach.max(size(arb(rate) * arb(x) + arb(shift[0])))
            r += 1
    most = (reach + lost).upper()
    ends = [number(x) for x in edges]
    pairs = list(itertools.pairwise(ends))
    if not 2 <= len(ends) <= MOST_EDGES or any(not a < b for a, b in pairs):
        raise ValueError("the cells of the ramp are not in order, or too many")
    if not (arb(ends[0]) <= -most and most <= arb(ends[-1])):
        raise CertificateError("the cells of the derivation do not cover what a ramp reads")
    memory = tuple(row[0] for row in values)
    head = Head(((1.0, 0.0), (0.0, 1.0)), tuple(map(tuple, keys)), False, (0.0,) * 3, memory, 1.0)
    site = HeadSum((head,), (0.0, 0.0, 0.0), function(RAMP), 0.0, dtype)
    found = lost + arb(max(error_on(site, a, b)[1] for a, b in pairs))
    return size(2 * found + machine.u * (1 + 2 * found))


def _row(query: Tensor, r: int) -> list[list[float]]:
    each = query.shape[1] * query.shape[2]
    flat = query.numbers[r * each : (r + 1) * each]
    return [list(flat[i : i + query.shape[2]]) for i in range(0, each, query.shape[2])]


def _selection(
    config: Any, tensors: dict[str, Tensor], D: int, hats: int, tokens: int
) -> tuple[float, list[list[float]], list[list[float]]]:
    """How sharp the selection is, its keys without that, and values: by attention, or by a softmax over channels."""
    both = hats + tokens
    if config["second"] == "softmax":
        columns, values = tensors.pop("net.select.logits"), tensors.pop("net.select.read").rows()
        if columns.shape[0] != both:
            raise CertificateError("the softmax reads other columns than hats and positions")
        sharp = max(columns.numbers[: columns.shape[1]])
        rows = [list(row) for row in zip(*columns.rows(), strict=True)]
        if not sharp > 0 or any(x not in (0.0, sharp) for row in rows for x in row[:hats]):
            raise CertificateError("hats are not all read with one weight")
        keys = [[*(x / sharp for x in row[:hats]), *row[hats:]] for row in rows]
        return sharp, keys, values
    if config["second"] != "attention":
        raise ValueError("its second layer is none")
    start = "net.select.groups.0."
    (keys,), (values,) = (tensors.pop(start + name).rows() for name in ("M_K", "M_V"))
    width, sharp = len(values[0]), tensors[start + "W_Q"].numbers[0]
    if not sharp > 0:
        raise CertificateError("the selection prefers what is far")
    diagonal = {(0, c, c): sharp if c < hats else 1.0 for c in range(both)}
    expect(tensors, start + "W_Q", (1, both, both), diagonal)
    expect(tensors, start + "W_O", (1, width, width), first(eye((width, width))))
    return sharp, keys, values
