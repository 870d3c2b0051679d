"""Affine functions of the residual stream, exactly: what folded weights should be, and what rounding makes of them.

What separate rounding of queries, keys and values does to norm heads in plain form (lemma G1 of docs/theory.md).

Head j has the logit b_j - s_j q.k with q = c + alpha, k = c + beta, and the value c + gamma, where c is the row, of d
entries and mean square v. So it computes (c + gamma) sigmoid(b_j - s_j d v_j), and with A = |alpha| + |beta| and
B = |alpha| |beta| (Euclidean norms) |v_j - v| <= delta = sqrt(v/d) A + B/d. With all amounts positive the sum over j is
monotone in every v_j: it lies between the sums at v - delta and at v + delta, which are (v -+ delta + eps)^(-1/2) up to
the fit's error. Let m be the least v + eps and k = A/sqrt(d m) + B/(d m); then delta <= k (v + eps), and if k <= 1/8
the result errs by at most

    |gamma| / sqrt(m (1-k))  +  [ A/sqrt(m) + B/(sqrt(d) m) ] / (2 (1-k)^(3/2))

more than with one row, because |c_i| <= sqrt(d v), and by k times the fit's error. v + delta must stay within the
interval of the fit. Where v - delta leaves it by t, sigmoids grow by at most the factor exp(s d t);
|c_i| (v + eps)^(-1/2) <= sqrt(d) of that. There v <= l + delta, l the interval's lower end, gives
delta <= 2 sqrt(l/d) A + (A^2 + 2 B)/d.

The error analysis of a compiled network in plain form: the rules of `compiler.propagation` for what it computes.

The plain form has no state of its own between stages. Call *virtual* the value that an atom (a result of heads) would
have if its column, as computed, were joined by its linear part in real arithmetic; and virtual reads the program's
affine forms of virtual atoms. Errors of virtual values travel as in `compiler.propagation`. What is new is that every
coordinate of every query, key and value is a folded inner product of its own, so that the copies of one read differ by
rounding: coordinate = exact function of the virtual read + rho, with rho from `plain_fold.Stored`. Each family below
says what rho does to it. Everything else about a head is as in tier `memory`: the keys and values of registers are
single products of a one-hot id, exact; excluded keys weigh an exact 0 and allowed logits gain exact zeros.

- anchor, softmax, attention, mix, max: rho moves the argument. An anchor head's linear part does not see rho: slope
  times rho more. A max head's values have a rho of their own: keys' and values' rho more (a mean of values).
- gate of one head and one query coordinate: that coordinate is the argument; the value, where it is one, differs from
  it by the rho of both. Other gates: rho moves every coordinate of query and value separately, and `gate_error` bounds
  heads whose coordinates err by it.
- product, square: likewise for the query, `product_error`; the value's rho goes through w_self |W_O|, w_self at most
  the self slot's weight at the largest logit.
- norm: `plain_norms`.

The certificate of a plain transformer: the bound of its source, recomputed for what the plain form computes.

*Exclusion.* A head's content logits are at most L in size, so that the best allowed one is at least -L, and an excluded
one at most L - Omega. Omega is at least 2 L plus 104 (float32) or 746 (float64) and a little: the exponential of what
is excluded underflows to an exact 0. Allowed logits gain exact zeros, and registers, whose rows no head changes, give
exact keys and values. So a head computes what it does in tier `memory`, up to the order of its sums, which no
certificate counts on.

*Compiled networks*: `plain_rules`. *Theorems*: the embedding computes y = w.x + t as the first layer does, and every
later query is a sum of the same terms, so that the construction's own certificate, which allows any order, holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ...certificates.certificate import Certificate
from ...certificates.certified import CertifiedModule
from ...certificates.rounding import TINY, gamma, unit, up
from ...compiler.assemble import affine_map, folding_error, site_spec
from ...compiler.compiled import CompiledNetwork
from ...compiler.layout import Column, Site, Stage
from ...compiler.propagation import Errors, Local, Propagation, rounded
from ...compiler.propagation import _roundings as affine_roundings
from ...compiler.split import EFFORT, network_bound
from ...dtypes import Array
from ...errors import CertificateError, PrecisionError
from ...heads.gate.bound import gate_error
from ...heads.gate.construction import gate_spec
from ...heads.gate.head import gate_domain
from ...heads.product.bound import Sides, product_error
from ...heads.self_head import SelfSpec, power_of_two
from ...heads.token.bound import DEAD, UNDERFLOW
from ...programs.enclose import Range
from ...programs.ops import Attention, Normalise
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
        terms = affine_roundings(rest, fixed.astype(float)) + np.maximum(fixed - 1, 0)
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


if TYPE_CHECKING:
    pass

Mask = npt.NDArray[np.bool_]


def norm_extra(
    analysis: PlainPropagation,
    site: Site,
    row: Range,
    coming: Array,
    rhos: list[tuple[dict[str, Array], HeadTables]],
    extra: Array,
    broken: Mask,
) -> None:
    """Add the lemma's two terms to `extra` (cell, token, channel); mark cells where it does not apply in `broken`."""
    op = analysis.layout.program.ops[site.op]
    assert isinstance(op, Normalise)
    d = op.width
    scales = np.array([abs(float(s)) for s in site.config["scales"]])
    if min(float(a) for a in site.config["amounts"]) < 0 or scales.min() <= 0:
        broken[:] = True
        return
    total = coming.sum(-1)
    size = row.size + total
    least = np.mean(np.maximum(row.least - total, 0.0) ** 2, -1, keepdims=True)  # of v
    most = np.mean(size**2, -1, keepdims=True)
    low, high = (float(x) for x in site.config["variance"])
    alpha, beta, value = (np.zeros(size.shape) for _ in range(3))
    for rho, head in rhos:
        alpha = np.maximum(alpha, rho["query"][..., :d] / (scales[head.place[2]] * (1 - 2 * analysis.u)))
        beta, value = np.maximum(beta, rho["key"][..., :d]), np.maximum(value, rho["value"])
        broken |= rho["query"][..., d:].any((1, 2)) | rho["key"][..., d:].any((1, 2))
    norms = [np.sqrt(np.sum(x**2, -1, keepdims=True)) * 1.001 for x in (alpha, beta)]
    A, B = norms[0] + norms[1], norms[0] * norms[1]
    m = least * (1 - 2.0**-40) + op.eps
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        k = A / np.sqrt(d * m) + B / (d * m)
        broken |= ~(k <= 0.125).all((1, 2))
        left = 1 - np.minimum(k, 0.125)
        near = value / np.sqrt(m * left) + (A / np.sqrt(m) + B / (np.sqrt(d) * m)) / (2 * left**1.5)
        below, above = 2 * np.sqrt(low / d) * A + (A**2 + 2 * B) / d, np.sqrt(high / d) * A + B / d
        broken |= ~(most + above <= high).all((1, 2))
        beyond = (least - below < low) * below
        far = np.sqrt(d) * np.expm1(np.minimum(float(scales.max()) * d * beyond * 1.01, 700.0))
        again = analysis.local[site.op].total * k  # the fit's error, at v -+ delta
        extra += (near + far + again) * 1.01


Rho = dict[str, Array]  # "query", "key", "value" -> (cell, token, coordinate)


class PlainPropagation(Propagation):
    """`compiler.propagation.Propagation` for the plain form that a layout describes."""

    def __init__(self, net: CompiledNetwork, plain: PlainLayout, stretch: float = 0.0):
        self.plain, self.tiny = plain, TINY[net.dtype]
        self.layout, self.network, self.dtype, self.origin = net.layout, net.network, net.dtype, net.origin
        self.u = 2.0**-24 if str(net.dtype) == "torch.float32" else 2.0**-53
        self._fold(net)
        self.raw = np.zeros((0, 0, 0))  # (cell, token, column): sizes of the stream's columns as computed
        self.bad = np.zeros(0, dtype=bool)  # cells where a size is beyond what the weights were made for
        self.rho = np.zeros((0, 0, 0))
        self.coming: dict[Column, Array] = {}  # errors of the virtual reads of the present stage
        super().__init__(net.layout, net.network, net.flats, net.dtype, net.origin, stretch)

    def _fold(self, net: CompiledNetwork) -> None:
        """What the coordinates of all heads and of the read-out should be, and how far stored ones are from that."""
        from ...compiler.layout import forms

        of, plain, layout = forms(net.program), self.plain, net.layout
        places = [*plain.columns.inputs, *plain.columns.constants]
        state = Fold.columns(places, plain.columns.first)
        self.linear: list[Fold] = []  # of every stage: the part of its results that is no head's
        self.stacks: list[Stored] = []  # of every stage, all coordinates side by side; last the read-out
        self.where: list[dict[tuple[int, str], slice]] = []
        self.writers: dict[int, list[tuple[int, HeadTables, list[int]]]] = {}
        before: Sequence[Column] = layout.first
        for i, stage in enumerate(layout.stages):
            reads = state.then(*affine_map(of, before, stage.columns), *folding_error(of, before, stage.columns))
            self._stack(2 * i + 1, stage, reads)
            layer = self.layer(2 * i + 1)
            assert layer.S is not None
            assert layer.s is not None
            skip, bias = (x.detach().cpu().double().numpy() for x in (layer.S, layer.s))
            self.linear.append(reads.then(skip, bias))
            state = self.linear[-1].with_fresh(plain.fresh[2 * i + 1])
            before = stage.after
        out = state.then(*affine_map(of, before, layout.output), *folding_error(of, before, layout.output))
        self.stacks.append(Stored.of(rounded(plain.states[-1], self.dtype), out, self.u, self.tiny))

    def _stack(self, number: int, stage: Stage, reads: Fold) -> None:
        parts: list[Stored] = []
        where: dict[tuple[int, str], slice] = {}
        column = {place: c for c, place in self.plain.fresh[number].items()}
        start = 0
        for h, head in enumerate(self.plain.layers[number]):
            group = self.layer(number).heads()[head.place[1]]
            for kind, table in (("query", head.query), ("key", head.key), ("value", head.value)):
                weight, bias = (getattr(group, f"{x}_{kind[0].upper()}") for x in ("W", "b"))
                w, b = (None if x is None else x[min(head.place[2], len(x) - 1)] for x in (weight, bias))
                k = table.shape[1] - (head.hiding if kind != "value" else 0)
                exact_w = np.zeros((reads.matrix.shape[1], k)) if w is None else w.detach().cpu().double().numpy()
                exact = reads.then(exact_w, None if b is None else b.detach().cpu().double().numpy())
                tokens = rounded(table[:, :k], self.dtype)
                tokens[list(self.plain.columns.ids)] = 0.0  # registers have keys and values of their own
                parts.append(Stored.of(tokens, exact, self.u, self.tiny, self.plain.columns.hot))
                where[h, kind] = slice(start, start + k)
                start += k
            targets = [stage.after[column[int(c)]] for c in np.flatnonzero(head.output.any(0))]
            self.writers.setdefault(targets[0][0], []).append((h, head, [c for _, c in targets]))
        self.stacks.append(Stored.joined(parts))
        self.where.append(where)

    # -- sizes and rounding on cells ------------------------------------------------------------------------------

    def _affine(
        self, index: int, before: Sequence[Column], after: Sequence[Column], errors: Errors, found: list[Range]
    ) -> dict[Column, Array]:
        """Errors of virtual reads; only the read-out is rounded here. Keeps sizes and rho for the sites that follow."""
        stage = index // 2
        self._grow(stage, errors, found)
        self.rho = self.stacks[stage].error(self.raw)
        coming = np.stack([errors[v][..., c, :] for v, c in before], 2)
        weight = np.abs(affine_map(self.forms, before, after)[0]) + folding_error(self.forms, before, after)[0]
        out = np.einsum("ctbs,bw->ctws", coming, weight)
        if stage == len(self.layout.stages):
            out[..., -1] += self.rho
        out *= 1 + (len(before) + out.shape[-1] + 8) * 2.0**-52
        out[self.bad] = np.inf
        self.coming = {column: up(out[:, :, i].sum(-1), out.shape[-1]) for i, column in enumerate(after)}
        return {column: out[:, :, i] for i, column in enumerate(after)}

    def _grow(self, stage: int, errors: Errors, found: list[Range]) -> None:
        """The sizes of the columns that the stage before has written: at most its values, and its result less the
        linear part; cells on which they are beyond the sizes that Omega was chosen for are bad."""
        if stage == 0:
            self.raw = first_sizes(self.layout, self.plain.columns, errors, found)
            self.bad = np.zeros(len(self.raw), dtype=bool)
        else:
            number = 2 * stage - 1
            wanted, layer = list(self.plain.fresh[number]), self.layer(number)
            grown = written_sizes(self.layout, stage - 1, layer, wanted, self.coming, errors, found)
            self.raw = np.concatenate([self.raw, np.fmin(grown, self.plain.convex[number])], -1)
        allowed = self.plain.sizes[2 * stage] * (1 + 2.0**-40)
        self.bad |= ~np.all(self.raw <= allowed, axis=(1, 2))

    def _of(self, site: Site, head: int) -> Rho:
        stage = next(i for i, s in enumerate(self.layout.stages) if site in s.sites)
        return {kind: self.rho[..., self.where[stage][head, kind]] for kind in ("query", "key", "value")}

    # -- families -------------------------------------------------------------------------------------------------

    def _site(self, site: Site, inputs: list[Array], found: list[Range]) -> Array:
        moved = [e.copy() for e in inputs]
        extra = np.zeros((*inputs[0].shape[:2], self.layout.program.ops[site.op].width))
        broken = self.bad.copy()
        {
            "anchor": self._anchor, "softmax": self._softmax, "attention": self._attention, "mix": self._mix,
            "max": self._max, "gate": self._gate, "product": self._product, "square": self._product,
            "norm": self._norm,
        }[site.family](site, moved, extra, broken, found)  # fmt: skip
        out = super()._site(site, moved, found)
        out[..., self.sites.index(site)] += up(extra, 8) * (extra > 0)
        out[broken] = np.inf
        return out

    def _anchor(self, site: Site, moved: list[Array], extra: Array, broken: Mask, found: list[Range]) -> None:
        slope = abs(float(rounded(rounded(np.array(site.config["skip"], float), self.origin), self.dtype)[0]))
        for h, _, (c,) in self.writers[site.op]:
            rho = self._of(site, h)["query"]
            moved[0][..., c, -1] += rho[..., 0]
            extra[..., c] += slope * rho[..., 0]
            broken |= rho[..., 1].any(-1)

    def _softmax(self, site: Site, moved: list[Array], extra: Array, broken: Mask, found: list[Range]) -> None:
        ((h, _, _),) = self.writers[site.op]
        moved[0][..., -1] += self._of(site, h)["query"]

    def _attention(self, site: Site, moved: list[Array], extra: Array, broken: Mask, found: list[Range]) -> None:
        ((h, _, _),) = self.writers[site.op]
        op, rho, width = self.layout.program.ops[site.op], self._of(site, h), int(site.config["width"])
        assert isinstance(op, Attention)
        scale = abs(float(rounded(np.array([op.scale]), self.origin)[0])) * (1 - 2 * self.u)
        moved[0][..., -1] += rho["query"][..., :width] / scale
        moved[1][..., -1] += rho["key"][..., :width]
        moved[2][..., -1] += rho["value"]
        broken |= (rho["query"][..., width:].any((1, 2))) | (rho["key"][..., width:].any((1, 2)))

    def _mix(self, site: Site, moved: list[Array], extra: Array, broken: Mask, found: list[Range]) -> None:
        rhos = [self._of(site, h) for h, _, _ in self.writers[site.op]]
        moved[0][..., -1] += np.max([rho["value"] for rho in rhos], 0)
        for rho in rhos:
            broken |= rho["query"].any((1, 2)) | rho["key"].any((1, 2))

    def _max(self, site: Site, moved: list[Array], extra: Array, broken: Mask, found: list[Range]) -> None:
        for h, _, (c,) in self.writers[site.op]:
            rho = self._of(site, h)
            key = rho["key"][..., 0] / float(site.config["sharpness"])
            moved[0][..., c, -1] += key
            worst = (key + rho["value"][..., 0]).max(-1, keepdims=True)  # of all tokens that are looked at
            extra[..., c] += worst
            broken |= rho["query"].any((1, 2))

    def _gate(self, site: Site, moved: list[Array], extra: Array, broken: Mask, found: list[Range]) -> None:
        for h, head, channels in self.writers[site.op]:
            rho = self._of(site, h)
            if site.op not in self.assumed:  # one coordinate: it is the argument, and the value differs from it
                (c,), value = channels, bool(head.value[FLAG + 1 + self.plain.columns.registers :].any())
                moved[0][..., c, -1] += rho["query"][..., 0]
                amount = np.abs(head.output).sum()
                extra[..., c] += amount * value * (rho["query"][..., 0] + rho["value"][..., 0])
                broken |= rho["key"].any((1, 2))
                continue
            for kind in ("query", "value"):
                broken |= rho[kind].max((1, 2)) > self.assumed[site.op]
            broken |= rho["key"].any((1, 2))

    def _product(self, site: Site, moved: list[Array], extra: Array, broken: Mask, found: list[Range]) -> None:
        gain = self.gains[site.op]
        for h, _, (c,) in self.writers[site.op]:
            rho = self._of(site, h)
            broken |= (rho["query"][..., 0].max(-1) > self.assumed[site.op]) | rho["query"][..., 1].any(-1)
            broken |= rho["key"].any((1, 2))
            extra[..., c] += gain * rho["value"][..., 0]

    def _norm(self, site: Site, moved: list[Array], extra: Array, broken: Mask, found: list[Range]) -> None:
        rhos = [(self._of(site, h), head) for h, head, _ in self.writers[site.op]]
        (value,) = self.layout.program.ops[site.op].inputs
        norm_extra(self, site, found[value], moved[0], rhos, extra, broken)

    # -- heads whose coordinates err separately -------------------------------------------------------------------

    def _local(self, stage: Stage, index: int, site: Site, flats: Sequence[Array]) -> Local:
        if not hasattr(self, "assumed"):
            self.assumed: dict[int, float] = {}
            self.gains: dict[int, float] = {}
        if site.family not in ("gate", "product", "square") or self._single(site):
            return super()._local(stage, index, site, flats)
        known = self.stacks[index].error(self.plain.sizes[2 * index + 1])
        rows = [self.where[index][h, kind] for h, _, _ in self.writers[site.op] for kind in ("query", "value")]
        queries = rows if site.family == "gate" else rows[::2]
        most = max(float(known[:, row].max(initial=0.0)) for row in queries) * (1 + 2.0**-30)
        self.assumed[site.op] = most
        if site.family == "gate":
            return self._gate_local(site, most)
        stored = site_spec(site).rounded(self.origin).rounded(self.dtype)
        x, y = (self._stretched(interval) for interval in site.config["intervals"])
        sides = Sides(x, y)
        self.gains[site.op] = _self_gain(stored, sides, most)
        error = product_error(_erring_queries(stored, sides, most), sides, self.dtype)
        scale = None if site.config["centre"] != [0.0, 0.0] else max(abs(v) for v in x)
        return Local((y, x) if site.config["swapped"] else (x, y), error.total, error.rounding, scale=scale)

    def _single(self, site: Site) -> bool:
        """Whether a site is a gate of one head with one query coordinate that reads its argument as it is."""
        if site.family != "gate":
            return False
        spec = gate_spec(site.config["name"], float(site.config["sharpness"]), **site.config["parameters"]).heads
        return spec.W_Q.shape == (1, 1, 1) and float(spec.W_Q.item()) == 1.0

    def _gate_local(self, site: Site, most: float) -> Local:
        """A gate whose coordinates err by at most `most`: a second channel, at most that large, that they see as well
        but that their scalar does not hold."""
        low, high = self._stretched(site.config["interval"])
        spec = gate_spec(site.config["name"], float(site.config["sharpness"]), **site.config["parameters"])
        heads, domain = spec.heads.rounded(self.origin).rounded(self.dtype), gate_domain(spec, low, high, self.dtype)
        if most > 0:
            W_Q, W_V = (np.concatenate([w, (w != 0) - w], 1) for w in (heads.W_Q, heads.W_V))
            heads = replace(heads, W_Q=W_Q, W_V=W_V, S=np.concatenate([heads.S, 1 - heads.S]))
            domain = replace(domain, sizes=(max(abs(domain.lo), abs(domain.hi)), most))
        error = gate_error(heads, spec.target, domain, self.dtype)
        return Local(((low, high),), error.total, error.rounding)


def _erring_queries(spec: SelfSpec, sides: Sides, most: float) -> SelfSpec:
    """The same heads with queries that also read x, which `product_error` counts as an error: one of size `most`."""
    query = spec.W_Q.copy()
    query[:, 0, 0] += most / sides.sizes[0] * (1 + 2.0**-40)
    return replace(spec, W_Q=query)


def _self_gain(spec: SelfSpec, sides: Sides, most: float) -> float:
    """How much of an error of its value a head passes on: |W_O| times the self slot's weight at the largest logit."""
    gains = []
    for h in range(len(spec.W_Q)):
        z = max(abs(float(spec.W_Q[h, -1, 0]) * y + float(spec.b_Q[h, 0])) for y in sides.query) + most
        rest = math.fsum(math.exp((tau - 1) * z + log) for tau, log in spec.M_K[h])
        gains.append(abs(float(spec.W_O[h, 0, 0])) / (1 + rest))
    return max(gains) * (1 + 2.0**-20) * (1 + 2.0**-10)


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
    name = str(plain.dtype).removeprefix("torch.")
    return Certificate("calibrated", None, name, "the layers it was made from", plain.box, measured=measured)


def _compiled(net: CompiledNetwork, layout: PlainLayout) -> Certificate:
    before = net._certificate.bound if net._certificate is not None else None
    goal = max(net.eps, 1.05 * (before or 0.0))
    for stretch in STRETCHES:
        analysis = PlainPropagation(net, layout, stretch)
        found = network_bound(analysis, goal, net.rtol, EFFORT, net.grid)
        if math.isfinite(found.bound):
            return net.certificate_of(analysis, found)
    raise PrecisionError(
        f"no bound can be proved for the plain form in {str(layout.dtype).removeprefix('torch.')}: its folded weights "
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
