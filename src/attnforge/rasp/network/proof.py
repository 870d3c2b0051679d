"""The proof that stored weights compute a program, layer by layer (lemmas P1 to P6 of docs/rasp_theory.md).

What is kept of the state after each layer is, for every column, how far it can be from the feature that it stands for,
on every position of every sequence of the domain, and how large it can be on padding. A head is followed for every
combination of values that can stand at its position (and at the position of a key): its logits are computed from the
stored tables, with bounds of what errors of codes and rounding can do to them, and compared with what the program says
is selected. Where the right slot is ahead of all others by more than `DEAD`, the others have weight 0 and the head
reads one stored value to the last bit. Nothing is taken from whoever built the weights but the words of the layout; a
wrong word is a large error, and no proof.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Protocol

import numpy as np
import torch

from ...certificates.certificate import Margin
from ...certificates.rounding import TINY, UNIT, exp_ulps, gamma, up
from ...dtypes import Array, dtype_name, stored
from ...errors import CertificateError, DomainError
from ...heads.stored import refuse_endless, require_shapes
from ...heads.token.bound import DEAD
from ...network import AttentionLayer, AttentionOnly, Heads
from ..language import Aggregate, SelectorWidth, SOp
from .facts import MARKED, Facts, Ids, Mask, combined
from .layout import Feature, HeadRole, ProgramLayout, first_columns, ideal, inexact
from .normal import ALL, order_free

DIGITS = {torch.float32: 24, torch.float64: 53}  # binary digits of a significand
U64 = 2.0**-53  # the roundoff of what is computed here
LARGEST = {torch.float32: 2.0**100, torch.float64: 2.0**900}  # numbers that are summed and multiplied without overflow
CHUNK = 1 << 22  # logits alive at once: 32 MB
LOOSE = 64  # coordinates of queries whose errors are followed one by one
PAIRS = 1 << 28  # logits that are looked at for one head: some seconds
NUMBERS = 1 << 25  # numbers of one table or of all its rows: 256 MB, so that small files cannot ask for large memories


@dataclass(frozen=True)
class Column:
    """A column of the state: what it stands for, how far it can be from that, and how large it is on padding."""

    feature: Feature
    error: float
    pad: float


@dataclass(frozen=True, eq=False)
class Rows:
    """Vectors at one position, one for each combination of values: exact ones, and how far computed ones can be off."""

    at: Array
    error: Array
    ids: dict[SOp, Ids]


@dataclass(frozen=True)
class Proof:
    """What was proved: the margins of all heads, the largest error of the output (0 where it is decoded), and how far
    each column is from what it stands for after each layer."""

    margins: tuple[Margin, ...]
    bound: float
    errors: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, eq=False)
class Loose:
    """How far the coordinates of one head can be from what its tables make of the state, where others compute them.

    `query`, `key` and `value` are for tokens, a number for each coordinate; `pad_key` and `pad_value` are for padding,
    `slot_key` (slot, coordinate) and `slot_value` for memory slots and whatever else a head may read instead; `logit`
    is what else may move a logit, `pad_logit` one of padding, and `terms` how many products are added up to one. Where
    it is known what else the columns before a layer do to queries and keys of tokens, `more_query` and `more_key`
    (column, coordinate) say it, and the numbers are what is left.
    """

    query: Array
    key: Array
    pad_key: Array
    slot_key: Array
    value: Array
    pad_value: Array
    slot_value: Array
    logit: float
    pad_logit: float
    terms: int
    more_query: Array | float = 0.0
    more_key: Array | float = 0.0


class Simulation(Protocol):
    """Another network that computes what this one does, up to errors that it bounds layer by layer."""

    def head(self, layer: int, group: int, state: Sequence[Column]) -> Loose:
        """How loose a head is, given the columns before its layer."""

    def after(self, layer: int, state: Sequence[Column], sizes: Sequence[float]) -> None:
        """Told of the columns after a layer and how large what they stand for is, when its heads were looked at."""

    def readout(self, state: Sequence[Column]) -> Array:
        """How far the coordinates of the output can be off."""


@np.errstate(over="ignore", invalid="ignore")  # what is not finite is refused afterwards
def prove(
    facts: Facts, layout: ProgramLayout, network: AttentionOnly, positions: torch.Tensor, by: Simulation | None = None,
    radius: float = 0.0,
) -> Proof:  # fmt: skip
    """Prove that a network, or another one that simulates it, computes a program, or raise `CertificateError` that
    names the head which does not. Entries of one-hot tokens may be off by `radius`."""
    try:
        return _Checker(facts, layout, network, positions, by, radius).run()
    except DomainError as error:  # of weights that read what the program does not, such as means too many to list
        raise CertificateError(f"a head reads what cannot be followed: {error}") from error


class _Checker:
    def __init__(
        self, facts: Facts, layout: ProgramLayout, network: AttentionOnly, positions: torch.Tensor,
        by: Simulation | None, radius: float,
    ):  # fmt: skip
        self.facts, self.layout, self.network, self.by, self.radius = facts, layout, network, by, radius
        self.loose: Loose | None = None  # of the head that is looked at
        self.dtype = positions.dtype
        if self.dtype not in DIGITS:
            raise CertificateError(f"programs are proved in float32 and float64, not in {dtype_name(self.dtype)}")
        self.u, self.dead, self.digits = UNIT[self.dtype], DEAD[self.dtype], DIGITS[self.dtype]
        self.margins: list[Margin] = []
        self.work = 0
        self.positions = stored(positions)
        for name, tensor in network.state_dict().items():
            if tensor.dtype != self.dtype:
                raise CertificateError(f"{name} is {tensor.dtype} and the positions are {self.dtype}")
        refuse_endless(network)
        if not np.isfinite(self.positions).all():
            raise CertificateError("no bound holds for positions that are not finite")
        for op, kind in ((f.op, f.kind) for f in (*layout.positions, *(f for la in layout.layers for f in la.after))):
            if kind != "real" and not (0 <= op < len(facts.order) and isinstance(facts.order[op], SOp)):
                raise CertificateError(f"the layout speaks of op {op}, and the program has {len(facts.order)}")

    def run(self) -> Proof:
        layers = list(self.network.layers)
        if len(layers) != len(self.layout.layers) + 1:
            raise CertificateError(f"the network has {len(layers)} layers, its layout {len(self.layout.layers) + 1}")
        state, errors = self._first(), list[tuple[float, ...]]()
        for number, (plan, module) in enumerate(zip(self.layout.layers, layers, strict=False)):
            assert isinstance(module, AttentionLayer)
            require_shapes(module, len(state), len(plan.after))
            state = self._through(number, state, plan.heads, plan.after, module)
            errors.append(tuple(column.error for column in state))
            if self.by is not None:
                self.by.after(number, state, [self._size(column.feature) for column in state])
        last = layers[-1]
        assert isinstance(last, AttentionLayer)
        bound = self._readout(state, last)
        return Proof(tuple(self.margins), bound, tuple(errors))

    # ---- the state

    def _first(self) -> list[Column]:
        """Tokens are within the radius, the flag is exact, both are 0 on padding; positions are what is stored."""
        columns = [Column(f, self.radius if f.kind == "is" else 0.0, 0.0) for f in first_columns(self.facts)]
        wanted = (self.facts.domain.max_length, len(self.layout.positions))
        if self.positions.shape != wanted:
            raise CertificateError(f"the positions have the shape {self.positions.shape}, expected {wanted}")
        at = np.arange(wanted[0])
        for i, feature in enumerate(self.layout.positions):
            node = self.facts.sop(feature.op)
            found = self.positions[:, i]
            if node.children or len(self.facts.values(node)) != len(at):  # type: ignore[arg-type]
                raise CertificateError(f"the position column {i} stands for {node.label}, which depends on more")
            off = _most(found - ideal(self.facts, feature, at)) + inexact(self.facts, feature)
            columns.append(Column(feature, off, _most(found)))
        return columns

    def _node(self, column: Column) -> SOp | None:
        if column.feature.op < 0:
            return None
        return self.facts.sop(column.feature.op)

    def _rows(self, state: Sequence[Column], W: Array, b: Array, nodes: Sequence[SOp], what: str) -> Rows:
        """What W and b make of the columns that W reads, for all combinations of the ops there and of others."""
        used = np.flatnonzero(W.any(1)).tolist()
        _refuse_large(len(used), W.shape[1], what)
        if any(state[j].feature.op < 0 and state[j].feature.kind != "real" for j in used):
            raise CertificateError(f"{what or 'a head'!r} reads tokens, of which the program does not speak")
        read = [self._node(state[j]) for j in used]
        wanted = [*dict.fromkeys([*nodes, *(node for node in read if node is not None)])]
        ids = self.facts.joint(wanted) if wanted else []
        sizes = [len(self.facts.values(node)) for node in wanted]
        if wanted and math.prod(sizes) < 2**62:
            key = combined(ids, sizes)
            every = math.prod(sizes)
            if every <= MARKED:
                first = np.full(every, -1)
                first[key[::-1]] = np.arange(len(key))[::-1]
                keep = first[first >= 0]
            else:
                keep = np.unique(key, return_index=True)[1]
            ids = [column[keep] for column in ids]
        here = dict(zip(wanted, ids, strict=True))
        count = len(ids[0]) if wanted else 1  # a row that reads nothing, or the tokens' flag alone
        _refuse_large(count, max(len(used), W.shape[1]), what)
        codes = np.ones((count, len(used)))
        for i, (j, node) in enumerate(zip(used, read, strict=True)):
            if node is not None:
                codes[:, i] = ideal(self.facts, state[j].feature, here[node])
        errors = np.array([state[j].error + inexact(self.facts, state[j].feature) for j in used])
        at, error = self._affine(codes, errors, W[used], b)
        kept = [here[node] for node in nodes]
        if len(kept) < len(wanted) or len(used) != len(wanted):  # other combinations may come to the same
            names = np.concatenate([at, *(column[:, None] for column in kept)], 1)
            _, first, same = np.unique(_bytes(names), return_index=True, return_inverse=True)
            worst = np.zeros((len(first), error.shape[1]))
            np.maximum.at(worst, same.reshape(-1), error)
            at, error, kept = at[first], worst, [column[first] for column in kept]
        return Rows(at, error, dict(zip(nodes, kept, strict=True)))

    # ---- arithmetic

    def _affine(self, codes: Array, errors: Array, W: Array, b: Array) -> tuple[Array, Array]:
        """codes W + b, and how far the computed one can be off, given how far columns of codes can be."""
        at = codes @ W + b
        size = np.abs(codes) @ np.abs(W) + np.abs(b)
        moved = errors @ np.abs(W)
        terms = (W != 0).sum(0) + (b != 0)
        low = np.full(W.shape[1], np.inf)
        for j in range(len(W)):
            low = np.minimum(low, _grid(codes[:, j]) + _grids(W[j]))
        low = np.minimum(low, _grids(b))
        same = ((W == 0) | (errors[:, None] == 0)).all(0)
        exact = same & (size.max(0, initial=0.0) <= 2.0 ** np.minimum(self.digits + low, 1000))
        exact &= low >= math.log2(TINY[self.dtype])  # what is finer may underflow
        scaled = (terms == 1) & (_powers(W) | (W == 0)).all(0)  # one product with a power of two is not rounded
        noise = np.where(exact, 0.0, 4 * (terms + 2) * U64 * size)
        rounding = np.where(exact | scaled | (terms == 0), 0.0, gamma(terms, self.u) * (size + moved))
        return at, _up(moved + rounding + noise + np.where(exact, 0.0, TINY[self.dtype]))

    def _products(self, q: Rows, k: Rows, part: slice) -> tuple[Array, Array, Array]:
        """Logits (query, key), and how far computed ones can be off by errors of what comes in, and by rounding."""
        Q, K, EQ, EK = q.at[part], k.at, q.error[part], k.error
        logits, size = Q @ K.T, np.abs(Q) @ np.abs(K).T
        moved = EQ @ np.abs(K).T + (np.abs(Q) + EQ) @ EK.T
        low = min((_grid(q.at[:, c]) + _grid(K[:, c]) for c in range(Q.shape[1])), default=math.inf)
        fits = size.max(initial=0.0) <= 2.0 ** min(self.digits + low, 1000) and low >= math.log2(TINY[self.dtype])
        if fits and not moved.any() and self.loose is None:
            return logits, moved, np.zeros_like(logits)
        terms, more = (Q.shape[1], 0.0) if self.loose is None else (self.loose.terms, self.loose.logit)
        rounding = more + gamma(terms, self.u) * (size + moved + more) + 4 * (terms + 2) * U64 * size
        return logits, _up(moved), _up(rounding + TINY[self.dtype])

    def _ahead(self, q: Rows, k: Rows, top: Ids, part: slice) -> tuple[Array, Array]:
        """By how much the key `top` of each query is ahead of every key: errors taken off, and without them.

        An error of the query moves both logits: what counts is how far the two keys are apart.
        """
        logits, moved, rounding = self._products(q, k, part)
        row, EQ = np.arange(len(top)), q.error[part]
        gap = logits[row, top][:, None] - logits
        loose = np.flatnonzero(EQ.any(0))
        if len(loose) <= LOOSE:
            from_keys = (np.abs(q.at[part]) + EQ) @ k.error.T
            moved = from_keys + from_keys[row, top][:, None]
            for c in loose:
                moved += EQ[:, c, None] * np.abs(k.at[top, c][:, None] - k.at[:, c])
        else:
            moved = moved + moved[row, top][:, None]
        return gap - _up(moved + rounding + rounding[row, top][:, None]), gap

    def _parts(self, rows: int, columns: int) -> list[slice]:
        self.work += rows * columns
        if max(8 * rows * columns, self.work) > 8 * PAIRS:
            raise CertificateError(
                f"a head has {rows * columns} pairs of queries and keys to look at, and the limit is {PAIRS} "
                f"({8 * PAIRS} for a network); choose a smaller max_length"
            )
        step = max(1, CHUNK // max(columns, 1))
        return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]

    # ---- layers

    def _through(
        self,
        number: int,
        state: Sequence[Column],
        seats: Sequence[HeadRole],
        after: Sequence[Feature],
        layer: AttentionLayer,
    ) -> list[Column]:
        """The columns after a layer. Each is carried on, or written by one head, and never both."""
        groups = layer.heads()
        if len(groups) != len(seats):
            raise CertificateError(f"a layer has {len(groups)} heads, its layout {len(seats)}")
        _refuse_large(len(state), len(after), "a layer")
        S = np.zeros((len(state), len(after))) if layer.S is None else stored(layer.S)
        if layer.s is not None and stored(layer.s).any():
            raise CertificateError("a layer adds a constant to its columns, which no lemma speaks of")
        writers = [np.flatnonzero(stored(group.W_O)[0].any(0)) for group in groups]
        found: list[Column | None] = [None] * len(after)
        for c, feature in enumerate(after):
            carried = np.flatnonzero(S[:, c]).tolist()
            if len(carried) + sum(c in columns for columns in writers) != 1:
                raise CertificateError(f"the column of {self._name(feature)} is not written exactly once")
            if len(carried):
                (j,) = carried
                by, old = float(S[j, c]), state[j]
                if old.feature != feature:
                    raise CertificateError(
                        f"the column of {self._name(feature)} is a copy of {self._name(old.feature)}"
                    )
                off = abs(by - 1.0) * self._size(feature) + abs(by) * old.error
                off += 0.0 if _powers(np.array(by)) else 2 * self.u * (self._size(feature) + off)
                off += 0.0 if by == 1 else TINY[self.dtype]
                found[c] = Column(feature, float(_up(np.array(off))), abs(by) * old.pad)
        for g, (group, seat, columns) in enumerate(zip(groups, seats, writers, strict=True)):
            self.loose = None if self.by is None else self.by.head(number, g, state)
            self._refuse_overflow(state, group)
            written = [after[c] for c in columns.tolist()]
            rule = {"map": self._map, "aggregate": self._aggregate, "count": self._count}[seat.kind]
            errors, pads = rule(state, group, seat, written, columns)
            for c, feature, error, pad in zip(columns.tolist(), written, errors, pads, strict=True):
                found[c] = Column(feature, float(error), float(pad))
        self.loose = None
        if any(column.pad > LARGEST[self.dtype] or not math.isfinite(column.error) for column in found if column):
            raise CertificateError("numbers of a layer may overflow")
        return [column for column in found if column is not None]

    def _refuse_overflow(self, state: Sequence[Column], group: Heads) -> None:
        """Raise where a sum of a head may leave the range of its dtype, on tokens or on padding: inf - inf is NaN."""
        t, most = self._tables(group, len(state)), self._reach(state)
        q = most @ np.abs(t["W_Q"]) + np.abs(t["b_Q"])
        k = np.maximum(most @ np.abs(t["W_K"]) + np.abs(t["b_K"]), np.abs(t["M_K"]).max(0, initial=0.0))
        v = np.maximum(most @ np.abs(t["W_V"]) + np.abs(t["b_V"]), np.abs(t["M_V"]).max(0, initial=0.0))
        largest = max(float(q @ k), _most(q), _most(k), _most(v), _most(v @ np.abs(t["W_O"])))
        if not largest <= LARGEST[self.dtype]:
            raise CertificateError(
                f"'{group.purpose}' may meet numbers up to {largest:.3g}, and beyond {LARGEST[self.dtype]:.3g} they "
                "may overflow"
            )

    def _reach(self, state: Sequence[Column]) -> Array:
        """How large each column can be, on tokens and on padding."""
        return np.array([max(self._size(column.feature) + column.error, column.pad) for column in state])

    def _name(self, feature: Feature) -> str:
        if feature.op < 0:
            return "the tokens' flag"
        node = self.facts.sop(feature.op)
        what = f" = {self.facts.values(node)[feature.value]!r}" if feature.kind == "is" else ""  # type: ignore[arg-type]
        return f"{node.label}{what} ({feature.kind})"

    def _size(self, feature: Feature) -> float:
        if feature.kind in ("is", "real"):
            return 1.0
        node = self.facts.sop(feature.op)
        ends = [abs(float(end)) for end in self.facts.span(node)]  # type: ignore[arg-type]
        return float(up(max(ends) ** (2 if feature.kind == "square" else 1)))

    def _tables(self, group: Heads, inputs: int) -> dict[str, Array]:
        """The tables of a group of one head, with zeros for those that it does not have."""
        if group.heads != 1:
            raise CertificateError(f"'{group.purpose}' has {group.heads} heads, expected 1")
        found = {name: stored(tensor)[0] for name, tensor in group.named_parameters()}
        k, v = found["W_Q"].shape[1], found["W_O"].shape[0]
        empty = {"W_Q": (inputs, k), "b_Q": (k,), "W_K": (inputs, k), "b_K": (k,), "W_V": (inputs, v), "b_V": (v,),
                 "M_K": (0, k), "M_V": (0, v)}  # fmt: skip
        return {**{name: np.zeros(shape) for name, shape in empty.items()}, **found}

    def _note(self, group: Heads, gap: float, margin: float, needed: float, note: str) -> None:
        """A line of the ledger, or the end of the proof."""
        if not margin >= needed:
            raise HeadError(
                f"'{group.purpose}': the right slot is ahead of the others by {margin:.4g}, of which {needed:.4g} are "
                f"needed (by its keys it would be {gap:.4g}; errors of codes and rounding take the rest)",
                group.purpose, margin, needed,
            )  # fmt: skip
        self.margins.append(
            Margin(group.purpose, float(margin), needed, max(float(gap - margin), 0.0) if gap < math.inf else 0.0, note)
        )

    def _out(self, values: Array, errors: Array, t: dict[str, Array], columns: Ids) -> tuple[Array, Array]:
        """Values through the output projection: what is written to the columns, and how far it can be off."""
        W = t["W_O"][:, columns]
        at, error = self._affine(values, np.zeros(len(W)), W, np.zeros(len(columns)))
        return at, _up(error + (errors @ np.abs(W)) * (1 + gamma(len(W) + 1, self.u)))

    def _map(
        self, state: Sequence[Column], group: Heads, seat: HeadRole, written: Sequence[Feature], columns: Ids
    ) -> tuple[Array, Array]:
        """P1, P2: one slot is ahead for each combination; what it holds is compared with what the columns mean."""
        if group.scope != "memory":
            raise CertificateError(f"'{group.purpose}' must see memory slots only")
        t = self._tables(group, len(state))
        nodes = [*dict.fromkeys(self._op(f) for f in written)]
        q = self._seen("query", state, t, nodes, group)
        slots = self._loosened("slot_key", Rows(t["M_K"], np.zeros_like(t["M_K"]), {}))
        out, slip = self._out(t["M_V"], self._slack("slot_value", t["M_V"]), t, columns)
        least, gap, errors = math.inf, math.inf, np.zeros(len(columns))
        for part in self._parts(len(q.at), len(slots.at)):
            top = (q.at[part] @ slots.at.T).argmax(1)
            lead, plain = self._ahead(q, slots, top, part)
            lead[np.arange(len(top)), top] = np.inf
            least, gap = _least(lead, plain, least, gap)
            for i, feature in enumerate(written):
                wanted = ideal(self.facts, feature, q.ids[self._op(feature)][part])
                off = np.abs(out[top, i] - wanted) + slip[top, i] + inexact(self.facts, feature)
                errors[i] = max(errors[i], _most(_up(off)))
        self._note(group, gap, least, self.dead, f"{len(slots.at)} slots, {len(q.at)} combinations")
        pads = np.abs(t["M_V"]).max(0, initial=0.0) @ np.abs(t["W_O"][:, columns]) + slip.max(0, initial=0.0)
        return errors, _up(pads * (1 + gamma(2 * len(slots.at) + 8, self.u)))

    def _slack(self, name: str, like: Array) -> Array:
        """How loose coordinates are, in the shape of a table of them."""
        return np.zeros_like(like) if self.loose is None else np.broadcast_to(getattr(self.loose, name), like.shape)

    def _seen(
        self, name: str, state: Sequence[Column], t: dict[str, Array], nodes: Sequence[SOp], group: Heads
    ) -> Rows:
        """The queries or the keys of a head, as whoever simulates this network computes them."""
        letter = name[0].upper()
        more = 0.0 if self.loose is None else getattr(self.loose, f"more_{name}")
        return self._loosened(name, self._rows(state, t[f"W_{letter}"] + more, t[f"b_{letter}"], nodes, group.purpose))

    def _loosened(self, name: str, rows: Rows) -> Rows:
        """Rows that are computed by whoever simulates this network."""
        return rows if self.loose is None else replace(rows, error=_up(rows.error + self._slack(name, rows.error)))

    def _op(self, feature: Feature) -> SOp:
        if feature.op < 0:
            raise CertificateError("a head writes the tokens' flag, which is the input's")
        return self.facts.sop(feature.op)

    # ---- heads over tokens

    def _selection(
        self, state: Sequence[Column], group: Heads, t: dict[str, Array], op: Aggregate | SelectorWidth
    ) -> tuple[Rows, Rows, Rows, Array, Mask]:
        """Queries, keys, slots, a bound of the logits of padding for each query, and what the program selects."""
        if group.scope != "tokens":
            raise CertificateError(f"'{group.purpose}' must see all tokens")
        selector = op.selector
        if group.causal:
            rest, masked = order_free(selector)
            if not masked and not self.facts.until(selector):
                raise CertificateError(f"'{group.purpose}' is masked, and its selector may select later keys")
            selector = rest
        queries, keys = self.facts.sides(selector)
        q = self._seen("query", state, t, queries, group)
        k = self._seen("key", state, t, keys, group)
        pads = np.full(len(q.at), -np.inf)
        if not group.causal:
            reach = np.array([column.pad for column in state]) @ np.abs(t["W_K"]) + self._slack("pad_key", t["b_K"])
            size = np.abs(q.at) + q.error
            most = q.at @ t["b_K"] + q.error @ np.abs(t["b_K"]) + size @ reach
            terms = len(reach) + len(state)
            terms, extra = 4 * terms + 16, 0.0
            if self.loose is not None:
                terms, extra = terms + self.loose.terms, self.loose.pad_logit
            pads = _up(most + extra + gamma(terms, self.u) * (size @ (reach + np.abs(t["b_K"])) + extra) + 1e-9)
        every = np.ones((len(q.at), len(k.at)), dtype=bool)
        chosen = every if selector == ALL else self.facts.selected(selector, q.ids, k.ids)
        return q, k, self._loosened("slot_key", Rows(t["M_K"], np.zeros_like(t["M_K"]), {})), pads, chosen

    def _aggregate(
        self, state: Sequence[Column], group: Heads, seat: HeadRole, written: Sequence[Feature], columns: Ids
    ) -> tuple[Array, Array]:
        """P3, P4: selected keys are ahead of all others, or a sink is, where there are none."""
        node = self.facts.order[seat.op] if seat.op < len(self.facts.order) else None
        if not isinstance(node, Aggregate) or any(f.op != seat.op for f in written):
            raise CertificateError(f"'{group.purpose}' is no head of the op it writes")
        facts, t = self.facts, self._tables(group, len(state))
        q, k, slots, pads, chosen = self._selection(state, group, t, node)
        full, single = facts.nonempty(node.selector), facts.single(node.selector)
        mean = facts.averages(node)
        least = gap = math.inf
        spread = 0.0
        both = Rows(np.concatenate([k.at, slots.at]), np.concatenate([k.error, slots.error]), {})
        for part in self._parts(len(q.at), len(both.at)):
            logits, moved, rounding = self._products(q, both, part)
            off, row = moved + rounding, np.arange(len(logits))
            hit = np.concatenate([chosen[part], np.zeros((len(row), len(slots.at)), dtype=bool)], 1)
            token = np.arange(len(both.at)) < len(k.at)
            some, once = np.asarray(hit.any(1)), np.asarray(hit.sum(1) == 1)
            low = np.where(hit, logits - off, np.inf).min(1)
            lead = low[:, None] - (logits + off)
            plain = np.where(hit, logits, np.inf).min(1)[:, None] - logits
            if once.any():
                top = hit.argmax(1)
                lead, plain = (
                    np.where(once[:, None], x, y)
                    for x, y in zip(self._ahead(q, both, top, part), (lead, plain), strict=True)
                )
            lead = np.where(hit | ~some[:, None], np.inf, lead)
            beyond = np.where(some, low - pads[part], np.inf)
            if not full:
                if not len(slots.at):
                    raise CertificateError(f"'{group.purpose}' has no slot for a selection of nothing")
                sink = len(k.at) + logits[:, len(k.at) :].argmax(1)
                under, bare = self._ahead(q, both, sink, part)
                under = np.where(hit | ~token, np.inf, under)
                lead, plain = np.where(under < lead, under, lead), np.where(under < lead, bare, plain)
                beyond = np.minimum(beyond, (logits - off)[row, sink] - pads[part])
            least, gap = _least(lead, plain, least, gap)
            least = min(least, float(beyond.min()))
            if mean:
                high = np.where(hit, logits + off, -np.inf).max(1)
                spread = max(spread, float(np.where(some, high - low, 0.0).max()))
        self._note(group, gap, least, self.dead, "a mean" if mean else "one key" if single else "keys that agree")
        return self._read(state, node, written, columns, t, single, mean, spread, full)

    def _read(
        self, state: Sequence[Column], node: Aggregate, written: Sequence[Feature], columns: Ids, t: dict[str, Array],
        single: bool, mean: bool, spread: float, full: bool,
    ) -> tuple[Array, Array]:  # fmt: skip
        """How far what is read from the selected values can be from what the columns mean."""
        facts = self.facts
        v = self._rows(state, t["W_V"], t["b_V"], [node.operand] if facts.listed(node.operand) else [], "")
        v = self._loosened("value", v)
        out, slip = self._out(v.at, v.error, t, columns)
        most = facts.domain.max_length
        sinks, sink_slip = self._out(t["M_V"], self._slack("slot_value", t["M_V"]), t, columns)
        W = np.abs(t["W_O"][:, columns])  # sums are rounded in each coordinate, before one may cancel another
        reach, sunk = ((np.abs(x).max(0, initial=0.0) @ W) for x in (v.at, t["M_V"]))
        errors = np.zeros(len(columns))
        place = np.zeros(0, dtype=np.int64)
        if not mean:
            index = facts.index(node)
            place = np.array([index[value] for value in facts.values(node.operand)])
        for i, feature in enumerate(written):
            if mean and feature.kind != "number":
                raise CertificateError(f"{self._name(feature)} is not the mean of anything")
            off = inexact(facts, feature)
            if mean:
                one = Feature("number", facts.at[node.operand])
                wanted, off = ideal(facts, one, v.ids[node.operand]), max(off, inexact(facts, one))
            else:
                wanted = ideal(facts, feature, place[v.ids[node.operand]])
            size = float(reach[i]) + _most(slip[:, i])
            error = _most(_up(np.abs(out[:, i] - wanted) + slip[:, i] + off))
            if not single:
                error += float(gamma(most + 8, self.u)) * size + (most + 2) * TINY[self.dtype] * (1 + 2 * size)
            if mean:
                d = 2 * (spread + (exp_ulps() + 1) * self.u)
                error += math.tanh(d) * 2 * size if spread else 0.0
            if not full:
                ideal_default = _default(facts, node, feature)
                sink_error = _most(_up(np.abs(sinks[:, i] - ideal_default) + sink_slip[:, i] + off))
                sink_error += 0.0 if len(sinks) == 1 else float(gamma(len(sinks) + 8, self.u)) * float(sunk[i])
                error = max(error, sink_error)
            errors[i] = float(_up(np.array(error)))
        pads = np.array([column.pad for column in state]) @ np.abs(t["W_V"]) + np.abs(t["b_V"])
        pads = np.maximum(pads + self._slack("pad_value", pads), self._slack("slot_value", pads))
        size = np.maximum(reach + slip.max(0, initial=0.0), pads @ W)
        size = np.maximum(size, sunk + sink_slip.max(0, initial=0.0))
        return errors, _up(size * (1 + gamma(4 * most + 64, self.u)))

    def _count(
        self, state: Sequence[Column], group: Heads, seat: HeadRole, written: Sequence[Feature], columns: Ids
    ) -> tuple[Array, Array]:
        """P5: selected keys share a little weight, evenly, with a sink that has the rest."""
        facts, t = self.facts, self._tables(group, len(state))
        node = facts.order[seat.op] if seat.op < len(facts.order) else None
        if not isinstance(node, SelectorWidth) or any(f != Feature("number", seat.op) for f in written):
            raise CertificateError(f"'{group.purpose}' is no head of the op it writes")
        if len(t["M_K"]) != 1 or t["W_V"].any():
            raise CertificateError(f"'{group.purpose}' must have one sink, and one value for all tokens")
        q, k, slots, pads, chosen = self._selection(state, group, t, node)
        gain, slip = self._out(t["b_V"][None], self._slack("value", t["b_V"][None]), t, columns)
        rest, rest_slip = self._out(t["M_V"], self._slack("slot_value", t["M_V"]), t, columns)
        most = float(facts.span(node)[1])
        W = np.abs(t["W_O"][:, columns])  # sums are rounded in each coordinate, before one may cancel another
        gains, rests = np.abs(t["b_V"]) @ W, np.abs(t["M_V"][0]) @ W
        round_off = float(gamma(most + 8, self.u))
        left = np.abs(rest[0]) + rest_slip[0] + round_off * rests
        errors = _up(left)  # where nothing is selected, the sink alone is read
        least = gap = math.inf
        for part in self._parts(len(q.at), len(k.at) + 1):
            logits, moved, rounding = self._products(q, k, part)
            sink, sink_moved, sink_rounding = self._products(q, slots, part)
            off, sink_off = moved + rounding, sink_moved + sink_rounding
            hit = chosen[part]
            others = np.maximum(np.where(hit, -np.inf, logits + off).max(1, initial=-np.inf), pads[part])
            lead = (sink - sink_off)[:, 0] - others
            plain = np.where(hit, -np.inf, logits).max(1, initial=-np.inf)
            worst = int(lead.argmin())
            if lead[worst] < least:
                least, gap = float(lead[worst]), float(sink[worst, 0] - plain[worst])
            if not hit.any():
                continue
            below = (logits - sink)[hit]  # exactly: both are stored numbers; their errors follow
            d = (off + sink_off)[hit] + (self.u + 8 * U64) * np.abs(below) + (exp_ulps() + 1) * self.u
            with np.errstate(over="ignore"):
                low, high = np.exp(below - d), np.exp(below + d)
            share = float(up(most * high.max(), 16))
            if not share < 0.5:
                raise HeadError(
                    f"'{group.purpose}': its sink is too light to count {most:g} keys", group.purpose, 0.0, 1.0
                )
            total = share if share < self.u else share + float(gamma(most + 2, self.u))
            for i in range(len(columns)):
                one = np.maximum(np.abs(low * gain[0, i] - 1.0), np.abs(high * gain[0, i] - 1.0)).max()
                one = one + high.max() * slip[0, i] + 64 * U64
                widest = max(1 + one, high.max() * gains[i])
                each = most * (one + (1 + one) * total + widest * round_off)
                errors[i] = max(errors[i], float(_up(np.array(each + left[i]))))
        self._note(group, gap, least, self.dead, f"counts to {most:g}, each within {errors.max(initial=0.0):.2g}")
        size = np.maximum(gains + slip[0], rests + rest_slip[0])
        size = size + self._out(t["b_V"][None], self._slack("pad_value", t["b_V"][None]), t, columns)[1][0]
        return errors, _up(size * (1 + gamma(4 * facts.domain.max_length + 64, self.u)))

    # ---- the output

    def _readout(self, state: Sequence[Column], layer: AttentionLayer) -> float:
        """The largest logit is that of the program's value; or, for a number, how far it can be off."""
        if layer.heads() or layer.S is None or layer.s is None:
            raise CertificateError("the last layer must be an affine map")
        facts, output = self.facts, self.facts.program
        width = 1 if facts.numeric_output else len(facts.values(output))
        require_shapes(layer, len(state), width)
        W, b = stored(layer.S), stored(layer.s)
        if not _most(self._reach(state) @ np.abs(W) + np.abs(b)) <= LARGEST[self.dtype]:
            raise CertificateError(f"the read-out may meet numbers above {LARGEST[self.dtype]:.3g}, which may overflow")
        slack = np.zeros(width) if self.by is None else self.by.readout(state)
        if facts.numeric_output and all(
            c.feature.kind in ("number", "clean") for w, c in zip(W[:, 0], state, strict=True) if w
        ):
            return float(_up(np.array(self._sum(state, W[:, 0], float(b[0])) + slack[0])))
        if facts.numeric_output:
            rows = self._rows(state, W, b, [output], "read-out")
            right = rows.ids[output]
            off = rows.error[:, 0] + facts.rounded(output) + slack[0]
            return _most(_up(np.abs(rows.at[:, 0] - facts.numbers(output)[right]) + off))
        used = np.flatnonzero(W.any(1))
        _refuse_large(len(state), len(used), "the read-out")
        picked = np.zeros((len(state), len(used)))
        picked[used, np.arange(len(used))] = 1.0
        codes = self._rows(state, picked, np.zeros(len(used)), [output], "read-out")
        one = np.ones((len(codes.at), 1))
        q = Rows(np.concatenate([codes.at, one], 1), np.concatenate([codes.error, 0 * one], 1), codes.ids)
        keys = np.concatenate([W[used], b[None]]).T
        least = gap = math.inf
        for part in self._parts(len(q.at), width):
            right = codes.ids[output][part]
            lead, plain = self._ahead(q, Rows(keys, np.zeros_like(keys), {}), right, part)
            lead = lead - _up(slack[right][:, None] + slack)
            lead[np.arange(len(right)), right] = np.inf
            least, gap = _least(lead, plain, least, gap)
        if not least > 0:
            raise HeadError(
                f"the read-out: the right value is ahead of the others by {least:.4g}, and must be by more than 0",
                "read-out", least, 0.0,
            )  # fmt: skip
        if width > 1:
            self.margins.append(Margin("read-out", least, 0.0, max(gap - least, 0.0), f"{width} values"))
        return 0.0

    def _sum(self, state: Sequence[Column], W: Array, b: float) -> float:
        """The error of a linear output whose values are too many to list."""
        terms, constant = self.facts.linear(self.facts.program)
        left = {self.facts.at[atom]: c for atom, c in terms.items()}
        error, size, used = _apart(b, constant), abs(b), 0
        for w, column in zip(W.tolist(), state, strict=True):
            if w:
                wanted = left.pop(column.feature.op, Fraction(0))  # of numbers alone: see where this is called
                reach = self._size(column.feature)
                error += _apart(w, wanted) * reach + abs(w) * column.error
                size, used = size + abs(w) * (reach + column.error), used + 1
        if left:
            raise CertificateError("the read-out does not read what the output is a sum of")
        plain = used == 1 and not b and bool(_powers(W[W != 0]).all()) and bool((np.abs(W[W != 0]) >= 1).all())
        rounding = 0.0 if plain else float(gamma(used + 2, self.u)) * size + (used + 1) * TINY[self.dtype]
        return float(_up(np.array(error + rounding)))


class HeadError(CertificateError):
    """A head whose margin is too small: its name, the margin, and what would be needed."""

    def __init__(self, message: str, head: str, margin: float, needed: float):
        super().__init__(message)
        self.head, self.margin, self.needed = head, margin, needed


def _refuse_large(rows: int, columns: int, what: str) -> None:
    if rows * columns > NUMBERS:
        raise CertificateError(
            f"'{what or 'a head'}' needs a table of {rows} by {columns} numbers looked at; the limit is {NUMBERS}: "
            "choose a smaller vocabulary or max_length"
        )


def _default(facts: Facts, node: Aggregate, feature: Feature) -> float:
    if feature.kind == "is":
        return float(facts.values(node)[feature.value] == node.default)
    value = float(node.default)  # type: ignore[arg-type]
    return value * value if feature.kind == "square" else value


def _apart(x: float, exact: Fraction) -> float:
    """How far a number is from a fraction, rounded upwards."""
    gap = abs(Fraction(x) - exact)
    return float(_up(np.array(float(gap) or 2.0**-1074))) if gap else 0.0


def _least(lead: Array, plain: Array, least: float, gap: float) -> tuple[float, float]:
    """The smallest lead so far, and how large it is without errors."""
    worst = np.unravel_index(int(lead.argmin()), lead.shape)
    return (float(lead[worst]), float(plain[worst])) if lead[worst] < least else (least, gap)


def _most(x: Array) -> float:
    return float(np.abs(x).max(initial=0.0))


def _up(x: Array) -> Array:
    """`up`, with an exact zero kept."""
    return np.where(x == 0, 0.0, up(x, 32))


def _powers(x: Array) -> Mask:
    return np.asarray(np.frexp(np.abs(np.asarray(x)))[0] == 0.5)


def _grids(x: Array) -> Array:
    """For each number the exponent of its last binary digit: it is a whole multiple of that power of two."""
    mantissa, exponent = np.frexp(x)
    whole = (mantissa * 2.0**53).astype(np.int64)
    last = np.frexp((whole & -whole).astype(np.float64))[1] - 1
    return np.where(x == 0, np.inf, last + exponent - 53.0)


def _grid(x: Array) -> float:
    """The exponent of the coarsest power of two of which all numbers are multiples."""
    return float(_grids(np.asarray(x)).min(initial=np.inf))


def _bytes(rows: Array) -> np.ndarray:
    """Each row as one item that can be sorted."""
    rows = np.ascontiguousarray(rows + 0.0)  # one zero
    return rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).reshape(-1)
