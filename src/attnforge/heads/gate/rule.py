"""How gates err in a network: the bound of `bound` for the stored heads, and what becomes of errors that come in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...errors import CertificateError
from ...functions.piecewise import clipped
from ...programs.enclose import Range
from ...programs.ops import Apply
from ..rule import (
    SMOOTH_CELLS,
    ApplyLocal,
    ApplyRule,
    Copies,
    Moved,
    Rule,
    Setting,
    crossings,
    first_cells,
    slopes_of,
)  # fmt: skip
from ..slopes import Steepness
from ..stored import StoredHeads
from .bound import gate_domain, gate_error, steepness_of
from .site import GateSite
from .target import GateTarget, target_of

#: Cells of equal width for the slopes of a gate's function, besides those around its kinks.
CELLS = 512


class GateRule(ApplyRule):
    """Gates are compared with the lines or the logistic values of the operation's own function."""

    def target(self, site: GateSite, setting: Setting) -> GateTarget:
        """What the operation asks for, as a gate; `CertificateError` where no gate computes it."""
        op = setting.op(site)
        found = target_of(op.function) if isinstance(op, Apply) else None
        if found is None or found.pair:
            raise CertificateError(f"operation %{site.op} ({op.word}) has a gate for heads, but no gate computes it")
        return found

    def local(self, site: GateSite, setting: Setting, heads: Sequence[StoredHeads]) -> ApplyLocal:
        return self._local(site, setting, heads, 0.0)

    def _local(self, site: GateSite, setting: Setting, heads: Sequence[StoredHeads], most: float) -> ApplyLocal:
        """The error when coordinates of queries and values err by at most `most`: a second channel, at most that large,
        that they see as well but that their scalar does not hold."""
        target = self.target(site, setting)
        low, high = setting.stretched(site.interval)
        totals, roundings = [], []
        for spec in {each.identity: each.self_spec() for each in heads}.values():
            domain = gate_domain(target, low, high, setting.dtype)
            if most > 0:
                W_Q, W_V = (np.concatenate([w, (w != 0) - w], 1) for w in (spec.W_Q, spec.W_V))
                spec = replace(spec, W_Q=W_Q, W_V=W_V, S=np.concatenate([spec.S, 1 - spec.S]))
                domain = replace(domain, sizes=(max(abs(domain.lo), abs(domain.hi)), most))
            error = gate_error(spec, target.shape, domain, setting.dtype)
            totals.append(error.total)
            roundings.append(error.rounding)
        fn = self.function(site, setting)
        slopes = slopes_of(fn, first_cells(fn, low, high, np.linspace(low, high, CELLS + 1)))
        return ApplyLocal(((low, high),), max(totals), max(roundings), slopes=slopes)

    def edges(self, site: GateSite, setting: Setting, heads: StoredHeads) -> tuple[float, ...]:
        low, high = site.interval
        inner = np.concatenate([np.linspace(low, high, SMOOTH_CELLS + 1), *crossings(heads.self_spec())])
        inside = inner[(inner > low) & (inner < high)]
        return tuple(first_cells(clipped(self.function(site, setting)), low, high, inside).tolist())

    def steepness(self, site: GateSite, setting: Setting, heads: StoredHeads) -> Steepness:
        low, high = setting.stretched(site.interval)
        fn = self.function(site, setting)
        return steepness_of(heads.self_spec(), first_cells(fn, low, high, np.linspace(low, high, CELLS + 1)))

    def describe(self, site: GateSite, heads: Sequence[StoredHeads]) -> str:
        return "exact" if site.target.exact else f"sharpness {site.sharpness:.3g}"

    # -- the plain form -------------------------------------------------------------------------------------------

    def _single(self, heads: Sequence[StoredHeads]) -> bool:
        """Whether these are gates of one head with one query coordinate that reads its argument as it is."""
        specs = [each.self_spec() for each in heads]
        return all(s.W_Q.shape == (1, 1, 1) and float(s.W_Q.item()) == 1.0 for s in specs)

    def loosened(
        self, site: GateSite, setting: Setting, heads: Sequence[StoredHeads], known: dict[str, float]
    ) -> ApplyLocal:
        most = 0.0 if self._single(heads) else max(known["query"], known["value"])
        return self._local(site, setting, heads, most)

    def copied(
        self, site: GateSite, setting: Setting, local: Any, heads: Sequence[StoredHeads], copies: Copies,
        ranges: list[Range], moved: Moved,
    ) -> None:  # fmt: skip
        """One coordinate: it is the argument, and the value, where it is one, differs from it by the rho of both.
        Several: `loosened` has counted them."""
        single = self._single(heads)
        for rho, channels in copies.heads:
            moved.broken[:] |= rho["key"].any((1, 2))
            if single:
                (c,) = channels
                spec = heads[c].self_spec()
                moved.inputs[0][..., c, -1] += rho["query"][..., 0]
                amount = float(np.abs(spec.W_O).sum()) * bool(spec.W_V.any())
                moved.extra[..., c] += amount * (rho["query"][..., 0] + rho["value"][..., 0])


RULES: dict[str, Rule] = {"gate": GateRule()}
