"""The certificate of a plain transformer: the bound of its source, recomputed for what the plain form computes.

*Exclusion.* A head's content logits are at most L in size, so that the best allowed one is at least -L, and an excluded
one at most L - Omega. Omega is at least 2 L plus 104 (float32) or 746 (float64) and a little: the exponential of what
is excluded underflows to an exact 0. Allowed logits gain exact zeros, and registers, whose rows no head changes, give
exact keys and values. So a head computes what it does in tier `memory`, up to the order of its sums, which no
certificate counts on.

*Theorems*: the embedding computes y = w.x + t as the first layer does, and every later query is a sum of the same
terms, so that the construction's own certificate, which allows any order, holds.

*Compiled networks* (`FoldedLayers`). The plain form has no state of its own between steps. Call *virtual* the value
that an atom (a result of heads) would have if its column, as computed, were joined by its linear part in real
arithmetic; and virtual reads the program's affine forms of virtual atoms. Errors of virtual values travel as in
`compiler.propagation`. What is new is that every coordinate of every query, key and value is a folded inner product of
its own, so that the copies of one read differ by rounding: coordinate = exact function of the virtual read + rho, with
rho from `Stored`. What rho does to a head is its family's to say (`Rule.loosened`, `Rule.copied`). Everything else
about a head is as in tier `memory`: the keys and values of registers are single products of a one-hot id, exact;
excluded keys weigh an exact 0 and allowed logits gain exact zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from ...certificates.certificate import Certificate
from ...certificates.certified import CertifiedModule
from ...certificates.rounding import gamma, unit, up
from ...compiler.compiled import CompiledNetwork
from ...compiler.layout import Step
from ...compiler.propagation import Errors, Propagation, Reading, roundings
from ...compiler.split import EFFORT, network_bound
from ...dtypes import Array, dtype_name, rounded, stored
from ...errors import CertificateError, PrecisionError
from ...heads.families import rule_of
from ...heads.rule import Copies, Local, Moved, Setting
from ...heads.self_head import power_of_two
from ...heads.site import Site
from ...heads.stored import refuse_endless, skip_of
from ...heads.token.bound import DEAD, UNDERFLOW
from ...programs.affine import Column, affine_map, folding_error
from ...programs.enclose import Range
from .layout import HeadTables, PlainLayout
from .sizes import first_sizes, written_sizes
from .spec import FLAG
from .transformer import PlainTransformer


@dataclass(frozen=True, eq=False)
class Fold:
    """An affine function of the stream, (column, coordinate), constants in the flag's row.

    `matrix` is what float64 makes of it, within `error` of the exact one; `size` adds up absolute values.
    """

    matrix: Array
    size: Array
    error: Array

    @classmethod
    def columns(cls, places: list[int], width: int) -> Fold:
        """Columns of the stream themselves."""
        matrix = np.zeros((width, len(places)))
        matrix[places, range(len(places))] = 1.0
        return cls(matrix, matrix, np.zeros_like(matrix))

    def then(
        self, weight: Array, bias: Array | None, slack: Array | None = None, slack_bias: Array | None = None
    ) -> Fold:
        """This, times a weight that is itself only known up to `slack`, plus a bias."""
        matrix, size = self.matrix @ weight, self.size @ np.abs(weight)
        used = (self.matrix != 0) * 1.0 @ ((weight != 0) * 1.0)
        left, right = (self.matrix != 0) & power_of_two(self.matrix), (weight != 0) & power_of_two(weight)
        clean = (left * 1.0) @ ((weight != 0) * 1.0) + ((self.matrix != 0) * 1.0) @ (right * 1.0)
        exact = (used == 0) | ((used == 1) & (clean > 0))
        own = np.where(exact, 0.0, (weight.shape[0] + 4) * 2.0**-52 * size)
        error = self.error @ np.abs(weight) + own
        if slack is not None:
            error = error + self.size @ slack
        if bias is not None:
            added = (bias != 0) & (matrix[FLAG] != 0)
            matrix[FLAG] += bias
            size[FLAG] += np.abs(bias)
            error[FLAG] += added * 2.0**-52 * size[FLAG]
        if slack_bias is not None:
            error[FLAG] += slack_bias
        return Fold(matrix, size, error * (1 + weight.shape[0] * 2.0**-50))

    def with_fresh(self, fresh: dict[int, int]) -> Fold:
        """The same over a stream with more columns, fresh ones added to the coordinates they belong to."""
        more = np.zeros((len(fresh), self.matrix.shape[1]))
        matrix, size, error = (np.concatenate([x, more]) for x in (self.matrix, self.size, self.error))
        for coordinate, place in fresh.items():
            matrix[place, coordinate] = size[place, coordinate] = 1.0
        return Fold(matrix, size, error)


@dataclass(frozen=True, eq=False)
class Stored:
    """Folded weights as a dtype stores them, beside the exact ones: how far computed coordinates can be off."""

    off: Array  # (column, coordinate)
    weight: Array
    rate: Array  # (coordinate,)
    lost: Array

    @classmethod
    def of(cls, stored: Array, exact: Fold, u: float, tiny: float, hot: tuple[int, ...] = ()) -> Stored:
        """Rounding of sums in any order. The flag is 1 and of the columns `hot` one is 1, the others 0: such products
        are exact, and of all hot columns one is a term."""
        off = np.abs(stored - exact.matrix) * (1 + 2.0**-50) + exact.error
        fixed = np.stack([stored[FLAG] != 0, stored[list(hot)].any(0)]).sum(0)
        rest = stored.copy()
        rest[[FLAG, *hot]] = 0.0
        terms = roundings(rest, fixed.astype(float)) + np.maximum(fixed - 1, 0)
        rate = np.where(terms > 0, gamma(terms, u), 0.0)
        return cls(off, np.abs(stored), rate, np.where(terms > 0, (terms + 2) * tiny, 0.0))

    @classmethod
    def joined(cls, parts: list[Stored]) -> Stored:
        """Side by side."""
        off, weight = (np.concatenate([getattr(p, name) for p in parts], 1) for name in ("off", "weight"))
        return cls(off, weight, np.concatenate([p.rate for p in parts]), np.concatenate([p.lost for p in parts]))

    def error(self, size: Array) -> Array:
        """|computed - exact| (..., coordinate) for columns of at most `size` (..., column); an exact 0 stays."""
        found = size @ self.off + self.rate * (size @ self.weight) + self.lost
        return found * (1 + (len(self.off) + 8) * 2.0**-51)


class FoldedLayers(Reading):
    """The plain form that a layout describes, read as folded weights over one residual stream."""

    def __init__(self, net: CompiledNetwork, plain: PlainLayout, stretch: float = 0.0):
        self.plain, self.layout, self.network, self.constants = plain, net.layout, net.network, net.constants
        self.setting = Setting(net.program, net.dtype, stretch)
        refuse_endless(net)
        self.raw = np.zeros((0, 0, 0))  # (cell, token, column): sizes of the stream's columns as computed
        self.bad = np.zeros(0, dtype=bool)  # cells where a size is beyond what the weights were made for
        self.rho = np.zeros((0, 0, 0))
        self.state: Errors = {}  # errors of the virtual state before the present step
        self.coming: dict[Column, Array] = {}  # errors of the virtual reads of the present step
        self._fold()

    def _fold(self) -> None:
        """What the coordinates of all heads and of the read-out should be, and how far stored ones are from that."""
        plain, layout, (u, tiny) = self.plain, self.layout, (self.setting.u, self.setting.tiny)
        places = [*plain.columns.inputs, *plain.columns.constants]
        state = Fold.columns(places, plain.columns.first)
        self.stacks: list[Stored] = []  # of every step, all coordinates side by side; last the read-out
        self.where: list[dict[tuple[int, str], slice]] = []
        self.writers: dict[int, list[tuple[int, HeadTables, tuple[int, ...]]]] = {}
        self.step_of: dict[int, int] = {}
        before: Sequence[Column] = layout.first
        for number, step in enumerate(layout.steps):
            maps = affine_map(self.forms, before, step.columns), folding_error(self.forms, before, step.columns)
            reads = state.then(*maps[0], *maps[1])
            self._stack(number, step, reads)
            skip, bias = skip_of(self.layer(2 * number + 1), len(step.columns))
            count = len(step.carried)
            if not np.array_equal(skip[:, :count], np.eye(len(step.columns), count)) or bias[:count].any():
                raise CertificateError("columns that a layer carries on were changed: there is no certificate for that")
            state = reads.then(skip, bias).with_fresh(plain.fresh[2 * number + 1])
            before = step.after
        exact, slack = (of(self.forms, before, layout.output) for of in (affine_map, folding_error))
        out = state.then(*exact, *slack)
        self.stacks.append(Stored.of(rounded(plain.states[-1], self.setting.dtype), out, u, tiny))
        for each in self.writers.values():
            each.sort(key=lambda writer: writer[1].place[2])

    def _stack(self, number: int, step: Step, reads: Fold) -> None:
        parts: list[Stored] = []
        where: dict[tuple[int, str], slice] = {}
        index, dtype = 2 * number + 1, self.setting.dtype
        column = {place: c for c, place in self.plain.fresh[index].items()}
        start = 0
        for h, head in enumerate(self.plain.layers[index]):
            group = self.layer(index).heads()[head.place[1]]
            for kind, table in (("query", head.query), ("key", head.key), ("value", head.value)):
                weight, bias = (getattr(group, f"{x}_{kind[0].upper()}") for x in ("W", "b"))
                w, b = (None if x is None else x[min(head.place[2], len(x) - 1)] for x in (weight, bias))
                k = table.shape[1] - (head.hiding if kind != "value" else 0)
                exact_w = np.zeros((reads.matrix.shape[1], k)) if w is None else stored(w)
                exact = reads.then(exact_w, None if b is None else stored(b))
                tokens = rounded(table[:, :k], dtype)
                tokens[list(self.plain.columns.ids)] = 0.0  # registers have keys and values of their own
                hot = self.plain.columns.hot
                parts.append(Stored.of(tokens, exact, self.setting.u, self.setting.tiny, hot))
                where[h, kind] = slice(start, start + k)
                start += k
            targets = [step.after[column[int(c)]] for c in np.flatnonzero(head.output.any(0))]
            self.writers.setdefault(targets[0][0], []).append((h, head, tuple(c for _, c in targets)))
            self.step_of[targets[0][0]] = number
        self.stacks.append(Stored.joined(parts))
        self.where.append(where)

    # -- sizes and rounding on cells ------------------------------------------------------------------------------

    def reads(self, number: int, errors: Errors, found: list[Range]) -> Errors:
        """Errors of virtual reads; only the read-out is rounded here. Keeps sizes and rho for the sites that follow."""
        steps, self.state = self.layout.steps, errors
        self._grow(number, errors, found)
        self.rho = self.stacks[number].error(self.raw)
        before = self.layout.last if number == len(steps) else steps[number].before
        after = self.layout.output if number == len(steps) else steps[number].columns
        coming = np.stack([errors[column] for column in before], 2)
        weight = np.abs(affine_map(self.forms, before, after)[0]) + folding_error(self.forms, before, after)[0]
        out = np.einsum("ctbs,bw->ctws", coming, weight)
        if number == len(steps):
            out[..., -1] += self.rho
        out *= 1 + (len(before) + out.shape[-1] + 8) * 2.0**-52
        out[self.bad] = np.inf
        self.coming = {column: up(out[:, :, i].sum(-1), out.shape[-1]) for i, column in enumerate(after)}
        return {column: out[:, :, i] for i, column in enumerate(after)}

    def carry(self, number: int, seen: Errors, found: list[Range]) -> Errors:
        return {column: self.state[column] for column in self.layout.steps[number].carried}

    def _grow(self, number: int, errors: Errors, found: list[Range]) -> None:
        """The sizes of the columns that the step before has written: at most its values, and its result less the
        linear part; cells on which they are beyond the sizes that Omega was chosen for are bad."""
        if number == 0:
            self.raw = first_sizes(self.layout, self.plain.columns, errors, found)
            self.bad = np.zeros(len(self.raw), dtype=bool)
        else:
            index = 2 * number - 1
            wanted = list(self.plain.fresh[index])
            grown = written_sizes(self.layout, number - 1, self.layer(index), wanted, self.coming, errors, found)
            self.raw = np.concatenate([self.raw, np.fmin(grown, self.plain.convex[index])], -1)
        allowed = self.plain.sizes[2 * number] * (1 + 2.0**-40)
        self.bad |= ~np.all(self.raw <= allowed, axis=(1, 2))

    # -- heads whose coordinates err separately -------------------------------------------------------------------

    def _known(self, site: Site) -> dict[str, float]:
        """What rho of a site's queries and values can be at most, by the sizes that the weights were made for."""
        number = self.step_of[site.op]
        most = self.stacks[number].error(self.plain.sizes[2 * number + 1])
        known = {}
        for kind in ("query", "value"):
            rows = [self.where[number][h, kind] for h, _, _ in self.writers[site.op]]
            known[kind] = max(float(most[:, row].max(initial=0.0)) for row in rows) * (1 + 2.0**-30)
        return known

    def local(self, site: Site) -> Local:
        return rule_of(site.family).loosened(site, self.setting, self.heads[site.op], self._known(site))

    def moved(self, site: Site, inputs: list[Array], ranges: list[Range]) -> Moved:
        number, known = self.step_of[site.op], self._known(site)
        width = self.layout.program.ops[site.op].width
        moved = Moved([e.copy() for e in inputs], np.zeros((*inputs[0].shape[:2], width)), self.bad.copy())
        heads = []
        for h, _, channels in self.writers[site.op]:
            rho = {kind: self.rho[..., self.where[number][h, kind]] for kind in ("query", "key", "value")}
            for kind, most in known.items():
                moved.broken[:] |= rho[kind].max((1, 2), initial=0.0) > most
            heads.append((rho, channels))
        rule, copies = rule_of(site.family), Copies(tuple(heads), known)
        rule.copied(site, self.setting, self.bounds[site.op], self.heads[site.op], copies, ranges, moved)
        return moved


STRETCHES = (0.0, 0.02)  # folded arguments may leave the intervals of their heads by a little more than before
COMPARED = 256  # points at which layers without a target are compared with their plain form
EXPLICIT = "torch.nn.MultiheadAttention with need_weights=True: an explicit softmax"


def certificate_of(net: nn.Module, layout: PlainLayout) -> Certificate:
    """The certificate of the plain form that a layout of this network describes."""
    refuse_leaks(layout)
    if isinstance(net, CompiledNetwork):
        found = _compiled(net, layout)
    else:
        assert isinstance(net, CertifiedModule)
        found = net.recertify()
    lemmas = tuple(dict.fromkeys((*found.lemmas, "B6")))
    extra = (name for name in (UNDERFLOW, EXPLICIT) if name not in found.assumptions)
    return replace(found, lemmas=lemmas, assumptions=(*found.assumptions, *extra))


@torch.no_grad()
def compared(plain: PlainTransformer, net: nn.Module, layout: PlainLayout) -> Certificate:
    """For layers without a target: how far their plain form was from them at points of the box, measured."""
    refuse_leaks(layout)
    points = torch.cat([plain.box.sample(COMPARED, dtype=plain.dtype), plain.box.corners(16, plain.dtype)])
    measured = float((plain.core(points).double() - net(points).double()).abs().max())
    name = dtype_name(plain.dtype)
    return Certificate("calibrated", None, name, "the layers it was made from", plain.box, measured=measured)


def _compiled(net: CompiledNetwork, layout: PlainLayout) -> Certificate:
    before = net._certificate.bound if net._certificate is not None else None
    goal = max(net.eps, 1.05 * (before or 0.0))
    for stretch in STRETCHES:
        analysis = Propagation(FoldedLayers(net, layout, stretch))
        found = network_bound(analysis, goal, net.rtol, EFFORT, net.grid)
        if math.isfinite(found.bound):
            return net.certificate_of(analysis, found)
    raise PrecisionError(
        f"no bound can be proved for the plain form in {dtype_name(layout.dtype)}: its folded weights "
        "round more than the heads allow; compile with a smaller eps, or with dtype=torch.float64"
    )


def refuse_leaks(layout: PlainLayout) -> None:
    """Raise `PrecisionError` unless every excluded key of every head weighs an exact 0."""
    u = unit(layout.dtype)
    for head in (head for heads in layout.layers for head in heads):
        slip = float(gamma(head.width + 4, u)) * (head.logit + head.hiding * head.omega)
        if not head.omega - 2.02 * head.logit - 4 * slip > DEAD[layout.dtype]:
            raise PrecisionError(
                f"'{head.purpose}' has logits up to {head.logit:.3g}: {layout.dtype} cannot tell them from what is "
                "excluded; compile with dtype=torch.float64"
            )


def recertified(plain: PlainTransformer, net: CertifiedModule) -> Certificate:
    """The certificate of present weights; `CertificateError` unless they are what the network's export gives."""
    from .build import assembled

    if plain.dtype != net.dtype:
        raise CertificateError(
            f"the plain transformer is {plain.dtype} and the network it was made from {net.dtype}: convert the "
            "network, certify it, and export it again"
        )
    fresh, layout = assembled(net, plain.tokens, plain.causal, max(plain.spec.stream, plain.registers + plain.tokens))
    mine, built = plain.state_dict(), fresh.state_dict()
    changed = [name for name, tensor in built.items() if not torch.equal(mine[name].cpu(), tensor)]
    if changed or plain.spec != fresh.spec:
        raise CertificateError(
            f"{', '.join(changed) or 'the description'} of the plain transformer was changed since it was exported: "
            "the certificate is for the exported weights; train the network itself, certify it and export it again"
        )
    return certificate_of(net, layout)
