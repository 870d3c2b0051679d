"""How anchor heads err in a network: lemma A4 for the stored table and skip, and how errors that come in pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...dtypes import Array
from ...errors import CertificateError
from ...functions.piecewise import clipped
from ...functions.queries import Largest
from ...programs.enclose import Range
from ..fast.even import EvenTable
from ..rule import ApplyLocal, ApplyRule, Copies, Moved, Rule, Setting, first_cells, or_endless, slopes_of
from ..slopes import Steepness
from ..stored import StoredHeads
from .bound import AnchorBound, AnchorWeights, anchor_bound, steepness_of
from .site import AnchorSite

ANCHOR_CELLS = 64  # on which the kernel looks at a table, at least; twice the anchors where those are many


def weights_of(heads: StoredHeads) -> AnchorWeights:
    """One head over anchors, as stored: its query is (y - centre, 1), its output one column; others are refused."""
    if heads.scope != "memory" or heads.s.shape != (1,):
        raise CertificateError(f"'{heads.purpose}' must be a head over memory slots that writes one column")
    heads.expect("W_Q", np.array([[[1.0, 0.0]]]))
    heads.require("W_O", heads.tables["W_O"], np.ones((1, 1, 1)))
    query, keys = heads.table("b_Q", 1, 2), heads.tables["M_K"]
    heads.require("b_Q", query[:, 1], np.ones(1))
    skip = float(heads.only("S")[0, 0]), float(heads.s[0])
    return AnchorWeights(keys[0, :, 0], keys[0, :, 1], heads.tables["M_V"][0, :, 0], -float(query[0, 0]), skip)


class AnchorRule(ApplyRule):
    """Heads over anchors are compared with the operation's function, continued beyond the closed ends of its domain.
    Where the site names an even table that the stored one still is, the bound is of both ways to read it."""

    def edges(self, site: AnchorSite, setting: Setting, heads: StoredHeads) -> tuple[float, ...]:
        (low, high), wanted = site.interval, max(ANCHOR_CELLS, 2 * site.anchors)
        # 0 is an edge: next to a removable singularity a quotient has a series around the middle of a cell, not closer
        inner = np.append(np.array(site.edges)[:: max(1, (len(site.edges) - 1) // wanted)], 0.0)
        inside = inner[(inner > low) & (inner < high)]
        return tuple(first_cells(clipped(self.function(site, setting)), low, high, inside).tolist())

    def local(self, site: AnchorSite, setting: Setting, heads: Sequence[StoredHeads]) -> ApplyLocal:
        fn = self.function(site, setting)
        target = clipped(fn)
        low, high = setting.stretched(site.interval, fn)
        if not low < high:
            raise CertificateError(f"the heads of %{site.op} are meant for no interval: [{low:g}, {high:g}]")
        edges = first_cells(target, low, high, np.array(site.edges))
        different = {each.identity: weights_of(each) for each in heads}
        even = EvenTable.named(site.even)
        found: list[AnchorBound] = []
        lemmas: set[str] = set()
        for weights in different.values():
            ends = float(edges[0]), float(edges[-1])
            reading = None if even is None else even.reading(weights, *ends, setting.dtype)
            lemmas |= set() if reading is None else {"A8"}
            found.append(anchor_bound(weights, target, edges, setting.dtype, reading=reading))
        profiles = []
        for each in found:
            order = np.argsort(each.low)
            profiles.append(Largest(each.low[order], each.error[order]))
        slopes = slopes_of(fn, first_cells(fn, low, high, np.array(site.edges)))
        worst = max(found, key=lambda each: or_endless(each.bound))
        sizes = worst.bound, worst.rounding
        return ApplyLocal(((low, high),), *sizes, tuple(profiles), slopes=slopes, lemmas=tuple(lemmas))

    def steepness(self, site: AnchorSite, setting: Setting, heads: StoredHeads) -> Steepness:
        edges = first_cells(self.function(site, setting), *setting.stretched(site.interval), np.array(site.edges))
        return steepness_of(weights_of(heads), edges)

    def describe(self, site: AnchorSite, heads: Sequence[StoredHeads]) -> str:
        weights = weights_of(heads[0])
        warmth = kappa(weights.slope, weights.offset)
        return "" if warmth is None else f"kappa {warmth:.3g}"

    def anchors(self, heads: Sequence[StoredHeads]) -> int:
        return int(heads[0].tables["M_K"].shape[1])

    def copied(
        self, site: AnchorSite, setting: Setting, local: Any, heads: Sequence[StoredHeads], copies: Copies,
        ranges: list[Range], moved: Moved,
    ) -> None:  # fmt: skip
        """Separate rounding moves the argument; the linear part does not see it: its slope times as much more."""
        for rho, (c,) in copies.heads:
            moved.inputs[0][..., c, -1] += rho["query"][..., 0]
            moved.extra[..., c] += abs(weights_of(heads[c]).skip[0]) * rho["query"][..., 0]
            moved.broken[:] |= rho["query"][..., 1].any(-1)


def kappa(slope: Array, offset: Array) -> float | None:
    """The scale-free inverse temperature of a table of logits slope * y + offset, from the table alone.

    Neighbouring logits cross half way between their anchors, so the distance of two crossings is the local spacing h,
    and the slopes of neighbours differ by beta phi'' h: half their product is kappa (lemma A1).

    >>> places = np.arange(5.0)
    >>> round(kappa(2 * 0.3 * places, -0.3 * places**2), 6)
    0.3
    """
    order = np.argsort(slope)
    step = np.diff(slope[order])
    if len(step) < 2 or not (step > 0).all():
        return None
    crossing = -np.diff(offset[order]) / step
    found = 0.25 * (step[:-1] + step[1:]) * np.diff(crossing)
    return float(np.median(found))


RULES: dict[str, Rule] = {"anchor": AnchorRule()}
