"""The error analysis of a compiled network in plain form: the rules of `certify.rules` for what it computes.

The plain form has no state of its own between stages. Call *virtual* the value that an atom (a result of heads) would
have if its column, as computed, were joined by its linear part in real arithmetic; and virtual reads the program's
affine forms of virtual atoms. Errors of virtual values travel as in `certify.rules`. What is new is that every
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
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..certify.rounding import TINY, up
from ..certify.rules import Errors, Local, Propagation, rounded
from ..compiled import CompiledNetwork
from ..heads.gate import gate_domain
from ..heads.gate_bounds import gate_error
from ..heads.gate_specs import gate_spec
from ..heads.product_bounds import Sides, product_error
from ..heads.self_head import SelfSpec
from ..ir.enclose import Range
from ..ir.ops import Array, Attention
from ..lower.assemble import affine_map, folding_error, site_spec
from ..lower.forms import Column
from ..lower.layout import Site, Stage
from .plain_columns import FLAG
from .plain_fold import Fold, Stored
from .plain_layout import HeadTables, PlainLayout
from .plain_norms import Mask, norm_extra
from .plain_sizes import first_sizes, written_sizes

Rho = dict[str, Array]  # "query", "key", "value" -> (cell, token, coordinate)


class PlainPropagation(Propagation):
    """`certify.rules.Propagation` for the plain form that a layout describes."""

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
        from ..lower.forms import forms

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
