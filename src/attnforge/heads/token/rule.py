"""How operations on whole tokens and between tokens err in a network (sections A5, D and H of docs/theory.md).

Keys, values and projections of these heads are selections, scaled at most; what a lemma takes for granted is required
of the stored tables entry by entry, and what is a number (a scale, a mask, a sharpness, log weights) is read from them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...certificates.rounding import exp_ulps, gamma, up
from ...dtypes import Array, stored
from ...errors import CertificateError
from ...network import Heads
from ...programs.enclose import RULES as ENCLOSURES
from ...programs.enclose import Range
from ...programs.ops import MEANT, Attention, MaxTokens, Mix, Op, Softmax, meant_within
from ..rule import Copies, Local, Moved, Passed, Rule, Setting, or_endless, scaled, weights_move, worst
from ..slopes import (
    Enclosure,
    Tangent,
    U,
    added,
    combined,
    plus,
    scaled_by,
    shares,
    spread_of,
    stacked,
    times,
    within,
)  # fmt: skip
from ..stored import StoredHeads
from .bound import DEAD, fixed_terms, lambert_upper, peak_error, sharpnesses
from .site import AttentionSite, MaxSite, MixSite, SoftmaxSite


def _op(site: Any, setting: Setting, kind: type[Op]) -> Any:
    op = setting.op(site)
    if not isinstance(op, kind):
        raise CertificateError(f"operation %{site.op} is {op.word}, its heads are for {kind.__name__.lower()}")
    return op


class SoftmaxRule(Rule):
    """Softmax over channels: a query of all channels against the identity as keys and values."""

    def local(self, site: SoftmaxSite, setting: Setting, heads: Sequence[StoredHeads]) -> Local:
        width = _op(site, setting, Softmax).width
        (own,), eye = heads, np.eye(width)[None]
        if own.scope != "memory":
            raise CertificateError(f"'{own.purpose}' must be a head over memory slots")
        own.expect("W_Q", eye)
        for name in ("M_K", "M_V", "W_O"):
            own.require(name, own.tables[name], eye)
        own.absent("b_Q")
        own.no_skip()
        low, high = site.interval
        error = float(self._rounding(setting, width, np.array(high - low), np.array(1.0)))
        return Local(((low, high),), error, error)

    def _rounding(self, setting: Setting, width: int, reach: Array, weight: Array) -> Array:
        """What evaluating a softmax costs a weight: shifted logits err by u reach, the exponential by its units, sum
        and quotient by `width` + 3 roundings, underflow by `tiny`; selections cost nothing."""
        u = setting.u
        d = up(u * reach + exp_ulps() * u)
        moved = np.minimum(up(weight * np.expm1(2 * d), 8), weights_move(d))
        return up(moved + gamma(width + 3, u) * (weight + moved) + 4 * width * setting.tiny, 8)

    def passes(
        self, site: SoftmaxSite, setting: Setting, local: Any, ranges: list[Range], inputs: list[Array]
    ) -> Passed:
        """Logits that err by at most d change p_i by at most p_i (e^2d - 1), and by at most tanh(d/2)."""
        (z,), (e,), op = ranges, inputs, setting.op(site)
        weight = ENCLOSURES[type(op)](op, ranges, z.low, z.high).high
        parts, total = worst(e, 2), e.sum(-1)
        d = up(parts.sum(-1), parts.shape[-1] + 4)[..., None]
        with np.errstate(over="ignore"):
            moved = np.minimum(up(weight * np.expm1(2 * d), 8), weights_move(d))
        passed = scaled(np.broadcast_to(parts[:, :, None], e.shape), moved)
        reach = np.max(z.high + total, -1, keepdims=True) - np.min(z.low - total, -1, keepdims=True)
        return passed, self._rounding(setting, op.width, up(reach), np.minimum(weight + moved, 1.0))

    def through(
        self, site: SoftmaxSite, setting: Setting, local: Any, heads: Sequence[StoredHeads],
        arguments: list[Enclosure], tangents: list[Tangent],
    ) -> Tangent:  # fmt: skip
        """p_i' = sum_j p_i (delta_ij - p_j) z_j', coefficients that add up to 0 and, in size, to 2 p_i (1 - p_i)."""
        weight = shares(*arguments[0])
        own, found = spread_of(weight), []
        for i in range(weight[0].shape[-1]):
            by = times((weight[0][..., i, None], weight[1][..., i, None]), (-weight[1], -weight[0]))
            by[0][..., i], by[1][..., i] = own[0][..., i], own[1][..., i]
            found.append(combined(by, tangents[0], 0.0, 2 * own[1][..., i]))
        return stacked(found, 2)

    def copied(
        self, site: SoftmaxSite, setting: Setting, local: Any, heads: Sequence[StoredHeads], copies: Copies,
        ranges: list[Range], moved: Moved,
    ) -> None:  # fmt: skip
        ((rho, _),) = copies.heads
        moved.inputs[0][..., -1] += rho["query"]


@dataclass(frozen=True, eq=False)
class AttentionLocal(Local):
    """How the stored head differs from the operation: its scale, and the mask that ships, (query, key) or None.

    `stretch` is how much larger the stored scale is, `drift` (a share of the content) and `offset` (query, key) how far
    scale and mask are off beyond one rounding each, which every bound here counts anyway. `plain` says that the scale
    is exactly the operation's, and a power of two: nothing is rounded on its account.
    """

    scale: float
    plain: bool
    mask: Array | None
    stretch: float
    drift: float
    offset: Array


class AttentionRule(Rule):
    """softmax(s q.k + m) v. Logits err by d_ij = |s| sum (|q_i| e_kj + |k_j - c + e_kj| e_qi), for any c, since weights
    do not see what all logits of a token have in common; the weights of token i err by tanh(max_j d_ij / 2) in total
    variation, so the result by that times the spread of v, and by max_j e_vj.

    The mask is the product of one-hot positions with its rows, and joins q and k as further channels. Hidden tokens
    must lie so far below the best visible one that their exponential is an exact 0; else nothing is certified.
    """

    def local(self, site: AttentionSite, setting: Setting, heads: Sequence[StoredHeads]) -> AttentionLocal:
        op = _op(site, setting, Attention)
        (own,) = heads
        scale, mask = self._stored(site, setting, own, op)
        tokens, u = setting.program.tokens, setting.u
        exact = op.logit_mask(tokens)
        visible = exact > -site.omega
        if not visible.any(1).all():
            raise CertificateError(f"the mask of %{site.op} hides every token from some token")
        shipped = np.zeros((tokens, tokens)) if mask is None else mask
        off = np.where(visible, np.abs(shipped - np.where(visible, exact, 0.0)) * (1 + 2.0**-50), 0.0)
        beyond = np.maximum(off - u * np.abs(np.where(visible, exact, 0.0)), 0.0)
        beyond = beyond + meant_within(np.where(visible, exact, 0.0))
        ratio = abs(scale / op.scale) if op.scale else (1.0 if scale == 0 else math.inf)
        drift = max(abs(scale - op.scale) / abs(op.scale) * (1 + 2.0**-50) - u, 0.0) if op.scale else 0.0
        if not math.isfinite(ratio):
            raise CertificateError(f"the scale of %{site.op} is 0 and that of its heads is not")
        stretch = max(1.0, ratio / (1 + 2 * u)) * (1 + (2.0**-50 if ratio > 1 + 2 * u else 0.0))
        plain = scale == op.scale and math.frexp(abs(scale))[0] == 0.5
        about = AttentionLocal(site.intervals, 0.0, 0.0, scale, plain, mask, stretch, drift, beyond)
        query, key, value = (np.full((1, tokens, 1), max(abs(a), abs(b))) for a, b in site.intervals)
        logit = abs(op.scale) * stretch * site.width * query * key.transpose(0, 2, 1)
        offset = np.where(visible, np.abs(np.where(visible, exact, 0.0)), 0.0)
        d = np.where(visible, self._logits(setting, about, logit, offset, site.width), 0.0).max(-1)[..., None]
        low, high = site.intervals[2]
        error = float(np.max(self._reading(setting, d, high - low, value[:, :1])))
        return replace(about, total=error, rounding=error)

    def _stored(
        self, site: AttentionSite, setting: Setting, own: StoredHeads, op: Attention
    ) -> tuple[float, Array | None]:
        """The scale and the mask of the stored head; everything else must be selections."""
        query, key, value, *positions = (setting.program.ops[j].width for j in site.operands(setting.program))
        tokens = setting.program.tokens
        if own.scope != "tokens" or own.causal != op.causal or query != key or query != site.width:
            raise CertificateError(f"'{own.purpose}' must be a head over tokens, causal as its operation is")
        n = tokens if positions else 0
        rows, width = query + key + value + n, query + n
        if own.tables["W_Q"].shape[2] != width or own.tables["W_O"].shape[1:] != (value, value):
            raise CertificateError(f"'{own.purpose}' has queries or values of another width than its operation")
        scale = float(own.tables["W_Q"][0, own.reads[0], 0])
        wanted_q, wanted_k, wanted_v = (np.zeros((1, rows, w)) for w in (width, width, value))
        wanted_q[0, :query, :query] = scale * np.eye(query)
        wanted_k[0, query : query + key, :key] = np.eye(key)
        wanted_v[0, query + key : query + key + value] = np.eye(value)
        mask: Array | None = None
        if n:
            mask = own.tables["W_K"][0][list(own.reads[-n:]), query:].T.copy()
            wanted_q[0, -n:, query:], wanted_k[0, -n:, query:] = np.eye(n), mask.T
        own.expect("W_Q", wanted_q)
        own.expect("W_K", wanted_k)
        own.expect("W_V", wanted_v)
        own.require("W_O", own.tables["W_O"], np.eye(value)[None])
        own.absent("b_Q", "b_K", "b_V", "M_K", "M_V")
        if "M_K" in own.tables:
            raise CertificateError(f"'{own.purpose}' must have no memory slots")
        own.no_skip()
        return scale, mask

    def _logits(self, setting: Setting, local: AttentionLocal, content: Array, offset: Array, terms: int) -> Array:
        """How far computed logits (cell, query, key) are from the exact ones of the same queries and keys.

        `content` bounds |scale| sum |q| |k|, `offset` is |mask|. An inner product of `terms` in any order; a scale that
        is no power of two is rounded, and so is its product with q; a mask is rounded, and joins the sum. For the
        softmax, the difference to the largest logit is rounded, at most the sum of both (which 2^-10 lets err), and the
        exponential.
        """
        u = setting.u
        size = content + offset
        largest = size.max(-1, keepdims=True)
        more = (not local.plain) + (local.mask is not None)
        inexact = gamma(terms + more, u) + more * u
        meant = 0.0 if local.plain else MEANT * content  # of the scale; that of the mask is in local.offset
        rounding = inexact * size + meant + u * (1 + 2.0**-10) * (size + largest) + exp_ulps() * u
        return up(rounding + local.drift * content + local.offset, 16)

    def _reading(self, setting: Setting, d: Array, spread: Array | float, value: Array) -> Array:
        """What evaluating a head over n tokens adds: weights off by logits, their sum, and the sum over values."""
        n, tiny = setting.program.tokens, setting.tiny
        return up(weights_move(d) * spread + gamma(2 * n + 4, setting.u) * value + 4 * n * tiny * (1 + value), 8)

    def passes(
        self, site: AttentionSite, setting: Setting, local: Any, ranges: list[Range], inputs: list[Array]
    ) -> Passed:
        op = _op(site, setting, Attention)
        value, e_v = ranges[2], inputs[2]
        q, e_q = abs(op.scale) * ranges[0].size, abs(op.scale) * inputs[0]
        k, e_k = ranges[1].size, inputs[1]
        middle = 0.5 * ranges[1].low.min(1, keepdims=True) + 0.5 * ranges[1].high.max(1, keepdims=True)
        apart = up(np.maximum(ranges[1].high - middle, middle - ranges[1].low))
        tokens, width, mask = value.low.shape[1], q.shape[-1], local.mask
        content = np.einsum("cik,cjk->cij", q + e_q.sum(-1), k + e_k.sum(-1)) * (1 + (width + 16) * 2.0**-52)
        content = content * local.stretch
        terms = width
        if mask is not None:
            e_p = inputs[3]
            e_row = np.einsum("cjts,pt->cjps", e_p, np.abs(mask))
            q, apart = _wider(q, np.eye(tokens)), _wider(apart, np.abs(mask).T)
            e_q, e_k = np.concatenate([e_q, e_p], 2), np.concatenate([e_k, e_row], 2)
            terms += 2 * tokens if e_p.any() else 0
        parts = np.einsum("cik,cjks->cijs", q, e_k) + np.einsum("cjk,ciks->cijs", apart + e_k.sum(-1), e_q)
        parts *= 1 + (2 * q.shape[-1] + parts.shape[-1] + 8) * 2.0**-52
        exact_mask = op.logit_mask(tokens)
        visible = exact_mask > -site.omega
        offset = np.where(visible, exact_mask, 0.0)
        rounding = self._logits(setting, local, content, np.abs(offset), terms)
        moving = worst(parts, 2, visible)
        d = up(moving.sum(-1), parts.shape[-1] + 4)[..., None]
        shown = visible[None, :, :, None]
        high = np.where(shown, value.high[:, None], -np.inf).max(2)
        low = np.where(shown, value.low[:, None], np.inf).min(2)
        spread = up(high - low)
        moved = np.broadcast_to(moving[:, :, None], (*spread.shape, parts.shape[-1]))
        passed = scaled(moved, weights_move(d) * spread)
        wide = np.broadcast_to(e_v[:, None], (len(e_v), tokens, *e_v.shape[1:]))
        passed = passed + worst(wide, 2, shown)
        size = np.where(shown, (value.size + e_v.sum(-1))[:, None], 0.0).max(2)
        own = np.where(visible, rounding, 0.0).max(-1)[..., None]
        added = self._reading(setting, own, spread + 2 * e_v.sum(-1).max(1)[:, None], size)
        hidden = ~visible & (np.tril(np.ones((tokens, tokens), dtype=bool)) if op.causal else True)
        if hidden.any():
            if mask is None:
                return passed, np.full_like(added, np.inf)
            deepest = float(np.abs(mask).max())
            slip = content + parts.sum(-1) + 4 * gamma(terms + 7, setting.u) * (content + deepest)
            above = np.where(hidden, slip + mask, -np.inf).max(-1)
            best = np.where(visible, mask - slip, -np.inf).max(-1)
            dead = (above + DEAD[setting.dtype] < best)[..., None]
            added = np.where(dead, added, self._leaking(setting, hidden, above - best, own, value, e_v))
        return passed, added

    def through(
        self, site: AttentionSite, setting: Setting, local: Any, heads: Sequence[StoredHeads],
        arguments: list[Enclosure], tangents: list[Tangent],
    ) -> Tangent:  # fmt: skip
        """o_i' = sum_j w_ij v_j' + sum_j w_ij (v_j - o_i) l_ij', coefficients that add up to 1 and to 0, with
        l_ij' = s sum_k (q_ik k_jk' + k_jk q_ik'). Masks come from positions, which must be exact constants."""
        query, key, value = arguments[:3]
        tokens = value[0].shape[1]
        mask = np.zeros((tokens, tokens)) if local.mask is None else local.mask
        seen = np.tril(np.ones((tokens, tokens), dtype=bool)) | (not heads[0].causal)
        found = []
        for i in range(tokens):
            q = query[0][:, i, None], query[1][:, i, None]  # (cell, 1, k) beside the keys' (cell, token, k)
            low, high = scaled_by(added(times(q, key)), local.scale)
            slack = 4 * U * (np.maximum(np.abs(low), np.abs(high)) + np.abs(mask[i]))
            low, high = (np.where(seen[i], x, -np.inf) for x in (low + mask[i] - slack, high + mask[i] + slack))
            by = (np.broadcast_to(end, key[0].shape) for end in scaled_by(q, local.scale))
            logits = combined((next(by), next(by)), tangents[1])
            logits += combined(scaled_by(key, local.scale), tangents[0][:, i, None])
            weight = shares(low, high)
            means = [_mean(weight, (value[0][..., c], value[1][..., c]), tangents[2][:, :, c], logits)
                     for c in range(value[0].shape[-1])]  # fmt: skip
            found.append(stacked(means, 1))
        return stacked(found, 1).where(_constant(arguments[3:], tangents[3:]))

    def _leaking(
        self, setting: Setting, hidden: Array, gap: Array, d: Array, value: Range, e_v: Array
    ) -> Array:
        """What evaluating a head adds where hidden tokens keep some weight (weights made for another dtype): together
        at most their number times e^gap, which moves the result by as much of the spread of all values."""
        wide = e_v.sum(-1)
        spread = up(np.max(value.high + wide, 1) - np.min(value.low - wide, 1), 8)[:, None]
        size = np.max(value.size + wide, 1)[:, None]
        above = np.clip(gap, -1e4, 1.0)  # endless where nothing is hidden; above 0 all weight may be lost
        share = np.fmin(up(hidden.sum(-1) * np.exp(up(above, 8)), 16), 1.0)[..., None]
        return self._reading(setting, d, spread, size) + up(share * spread, 8)

    def copied(
        self, site: AttentionSite, setting: Setting, local: Any, heads: Sequence[StoredHeads], copies: Copies,
        ranges: list[Range], moved: Moved,
    ) -> None:  # fmt: skip
        ((rho, _),) = copies.heads
        width, scale = site.width, abs(local.scale) * (1 - 2 * setting.u)
        moved.inputs[0][..., -1] += rho["query"][..., :width] / scale
        moved.inputs[1][..., -1] += rho["key"][..., :width]
        moved.inputs[2][..., -1] += rho["value"]
        moved.broken[:] |= rho["query"][..., width:].any((1, 2)) | rho["key"][..., width:].any((1, 2))


def _mean(weight: Enclosure, value: Enclosure, moving: Tangent, logits: Tangent) -> Tangent:
    """The derivative of a mean of values, (cell, token), under weights whose logits move.

    w_j (v_j - o) is also w_j (1 - w_j) times the distance of v_j from a mean of the others; and E|v - o| is at most
    half of the spread of the values.
    """
    visible, own = weight[1] > 0, np.eye(weight[0].shape[-1], dtype=bool)
    low, high = np.where(visible, value[0], np.inf), np.where(visible, value[1], -np.inf)
    mean = within(added(times(weight, value)), (low.min(-1), high.max(-1)))
    direct = value[0] - mean[1][:, None], value[1] - mean[0][:, None]
    most, least = np.where(own, -np.inf, high[:, None]).max(-1), np.where(own, np.inf, low[:, None]).min(-1)
    apart = np.where(most == -np.inf, 0.0, value[0] - most), np.where(least == np.inf, 0.0, value[1] - least)
    slip = 4 * U * (np.where(visible, np.maximum(np.abs(low), np.abs(high)), 0.0).max(-1, keepdims=True))
    slip = slip + 4 * U * np.maximum(np.abs(value[0]), np.abs(value[1]))
    others = times(spread_of(weight), (apart[0] - slip, apart[1] + slip))
    gain = within(others, times(weight, (direct[0] - slip, direct[1] + slip)))
    half = 0.5 * np.maximum(high.max(-1) - low.min(-1), 0.0) * (1 + 4 * U)
    return combined(gain, logits, 0.0, half) + combined(weight, moving, 1.0, np.ones_like(half))


def _constant(arguments: Sequence[Enclosure], tangents: Sequence[Tangent]) -> Array:
    """Cells on which positions arrive exactly and do not move with the inputs."""
    good = np.ones(len(arguments[0][0]) if arguments else 1, dtype=bool)
    for (low, high), tangent in zip(arguments, tangents, strict=True):
        good &= (low == high).all((1, 2)) & ~tangent.low.any((1, 2, 3)) & ~tangent.high.any((1, 2, 3))
    return good


def _wider(x: Array, more: Array) -> Array:
    return np.concatenate([x, np.broadcast_to(more, (len(x), *more.shape))], -1)


@dataclass(frozen=True, eq=False)
class MixLocal(Local):
    """The stored heads over the columns of data and, where they are read, positions."""

    heads: Heads


class MixRule(Rule):
    """|M| e; where positions do not arrive exactly (after training), what that does to the weights of the heads."""

    def local(self, site: MixSite, setting: Setting, heads: Sequence[StoredHeads]) -> MixLocal:
        op = _op(site, setting, Mix)
        (own,), low, high = heads, *site.interval
        if own.scope != "tokens" or "W_V" not in own.tables:
            raise CertificateError(f"'{own.purpose}' must be heads over tokens")
        own.no_skip()
        every = range(len(own.reads))
        found = own.heads(every, every, every, setting.dtype)
        terms = fixed_terms(found, op.matrix, op.width, low, high)
        rounding = math.fsum(t.value for t in terms if t.source == "rounding")
        far = float(meant_within(op.matrix).sum(1).max()) * max(abs(low), abs(high))
        return MixLocal(((low, high),), float(up(math.fsum([far, *(t.value for t in terms)]))), rounding, found)

    def passes(self, site: MixSite, setting: Setting, local: Any, ranges: list[Range], inputs: list[Array]) -> Passed:
        op = _op(site, setting, Mix)
        matrix = np.abs(op.matrix) + meant_within(op.matrix)
        passed = np.einsum("ij,cjks->ciks", matrix, inputs[0]) * (1 + (len(matrix) + 4) * 2.0**-52)
        if len(inputs) > 1 and inputs[1].any():
            size = (ranges[0].size + inputs[0].sum(-1)).max(1, keepdims=True)
            passed = passed + self._moved_positions(setting, op, local.heads, inputs[1], size)
        return passed, np.full(passed.shape[:-1], local.total)

    def through(
        self, site: MixSite, setting: Setting, local: Any, heads: Sequence[StoredHeads],
        arguments: list[Enclosure], tangents: list[Tangent],
    ) -> Tangent:  # fmt: skip
        """Weights come from positions alone: the heads are linear, sum_h g_h w_h over tokens."""
        op, own = _op(site, setting, Mix), local.heads
        n, width, count = setting.program.tokens, op.width, own.heads
        positions = n if len(arguments) > 1 else 0

        def coordinates(name: str) -> Array:
            weight, bias = getattr(own, f"W_{name}"), getattr(own, f"b_{name}")
            found = np.zeros((count, n, own.W_Q.shape[-1]))
            if weight is not None:
                if stored(weight)[:, :width].any():
                    raise heads[0].changed(f"W_{name}")
                found[:, :positions] += stored(weight)[:, width:]
            return found if bias is None else found + stored(bias)[:, None]

        query, key = coordinates("Q"), coordinates("K")
        if own.M_K is not None:
            memory = stored(own.M_K)
            key = np.concatenate([key, np.broadcast_to(memory, (count, *memory.shape[1:]))], 1)
        logit = np.einsum("hik,hjk->hij", query, key)
        off = 4 * (query.shape[-1] + 4) * U * np.einsum("hik,hjk->hij", np.abs(query), np.abs(key))
        hidden = np.triu(np.ones(logit.shape[1:], dtype=bool), 1) & own.causal
        hidden[:, n:] = False
        weight = shares(np.where(hidden, -np.inf, logit - off), np.where(hidden, -np.inf, logit + off))
        values, out = (np.broadcast_to(stored(x), (count, *x.shape[1:])) for x in (own.W_V[:, :width], own.W_O))
        gains = np.einsum("hcv,hvd->hcd", values, out)
        heads[0].require("W_O", gains, gains[:, :1, :1] * np.eye(width))
        ends = (scaled_by((w[:, :n], v[:, :n]), g) for w, v, g in zip(*weight, gains[:, 0, 0], strict=True))
        by = plus(*ends)
        mixed = [combined(by, tangents[0][:, None, :, c]) for c in range(width)]
        return stacked(mixed, 2).where(_constant(arguments[1:], tangents[1:]))

    def _moved_positions(self, setting: Setting, op: Mix, heads: Heads, e: Array, size: Array) -> Array:
        """How far a fixed mixing of values of at most `size` moves when one-hot positions err by e.

        Head h has logits p_i . (p_j L) and p_i . sink. They err by d, rounding of what is no longer one-hot included;
        its values lie among [-size, size] and 0, so its result moves by 2 tanh(d/2) size times its gain.
        """
        keys, sinks = stored(heads.W_K[:, op.width :]), stored(heads.M_K[:, 0])
        gains = np.abs(stored(heads.W_O)).max((1, 2))
        n, total = len(op.matrix), e.sum(-1)
        out = np.zeros((*e.shape[:2], op.width, e.shape[-1]))
        for key, sink, gain in zip(np.abs(keys), np.abs(sinks), gains, strict=True):
            row = np.einsum("cjts,tp->cjps", e, key)  # of the keys
            tokens = np.einsum("cjps,ip->cijs", row, np.eye(n)) + np.einsum("cjp,cips->cijs", key + row.sum(-1), e)
            parts = worst(np.concatenate([tokens, np.einsum("p,cips->cis", sink, e)[:, :, None]], 2), 2)
            largest = max(float(key.max()), float(sink.max())) * (1 + total.sum(-1).max(1, keepdims=True)) ** 2
            slip = 4 * gamma(2 * n + 4, setting.u) * largest[..., None] * np.ones_like(total[..., :1])
            parts[..., -1] += slip[..., 0]
            moved = 2 * gain * weights_move(up(parts.sum(-1), 64 + 8 * n))[..., None] * size
            out += scaled(np.broadcast_to(parts[:, :, None], out.shape), moved)
        return out * (1 + (8 * n + 64) * 2.0**-52)

    def copied(
        self, site: MixSite, setting: Setting, local: Any, heads: Sequence[StoredHeads], copies: Copies,
        ranges: list[Range], moved: Moved,
    ) -> None:  # fmt: skip
        rhos = [rho for rho, _ in copies.heads]
        moved.inputs[0][..., -1] += np.max([rho["value"] for rho in rhos], 0)
        for rho in rhos:
            moved.broken[:] |= rho["query"].any((1, 2)) | rho["key"].any((1, 2))


@dataclass(frozen=True)
class MaxLocal(Local):
    """The smallest sharpness of the stored heads."""

    sharpness: float


class MaxRule(Rule):
    """The maximum moves by at most what the token that moves most does."""

    def local(self, site: MaxSite, setting: Setting, heads: Sequence[StoredHeads]) -> MaxLocal:
        op = _op(site, setting, MaxTokens)
        (own,), (low, high) = heads, site.interval
        own.no_skip()
        own.absent("M_K", "M_V", "b_K", "b_V")
        every = range(len(own.reads))
        betas = sharpnesses(own.heads(every, every, every, setting.dtype), op.width, 1.0)
        tokens, u, tiny = setting.program.tokens, setting.u, setting.tiny
        found = [peak_error(tokens, beta, low, high, u, tiny) for beta in set(betas)]
        leak, rounding = max(found, key=lambda two: or_endless(sum(two)))
        return MaxLocal(((low, high),), float(up(leak + rounding)), rounding, min(betas))

    def passes(self, site: MaxSite, setting: Setting, local: Any, ranges: list[Range], inputs: list[Array]) -> Passed:
        (e,) = inputs
        passed = np.broadcast_to(worst(e, 1)[:, None], e.shape).copy()
        return passed, np.full(e.shape[:-1], local.total)

    def through(
        self, site: MaxSite, setting: Setting, local: Any, heads: Sequence[StoredHeads],
        arguments: list[Enclosure], tangents: list[Tangent],
    ) -> Tangent:  # fmt: skip
        """h' = sum_j f_j x_j', f_j = w_j (1 + beta (x_j - h)). With D the logit less the log-sum-exp of the others' and
        H their entropy f_j = sigmoid(D) (1 + sigmoid(-D) (D + H)), 0 <= H <= ln(n-1) (lemma H2)."""
        ((low, high),), (moving,) = arguments, tangents
        n, every = low.shape[1], range(len(heads[0].reads))
        betas = sharpnesses(heads[0].heads(every, every, every, setting.dtype), low.shape[-1], 1.0)
        found = []
        for c, beta in enumerate(betas):
            by = peak_slopes(*scaled_by((low[..., c], high[..., c]), beta))
            least = np.maximum(-by[0], 0.0)  # some token is the largest, and its coefficient is not negative
            rest = np.fmin((least.sum(-1) - least.min(-1)) * (1 + 4 * n * U), lambert_upper(n))
            found.append(combined(by, moving[:, :, c], 1.0, 1 + 2 * rest))
        return stacked([stacked(found, 1)] * n, 1)

    def describe(self, site: MaxSite, heads: Sequence[StoredHeads]) -> str:
        return f"sharpness {site.sharpness:.3g}"

    def copied(
        self, site: MaxSite, setting: Setting, local: Any, heads: Sequence[StoredHeads], copies: Copies,
        ranges: list[Range], moved: Moved,
    ) -> None:  # fmt: skip
        for rho, (c,) in copies.heads:
            key = rho["key"][..., 0] / local.sharpness
            moved.inputs[0][..., c, -1] += key
            moved.extra[..., c] += (key + rho["value"][..., 0]).max(-1, keepdims=True)  # of all tokens looked at
            moved.broken[:] |= rho["query"].any((1, 2))


def peak_slopes(low: Array, high: Array) -> Enclosure:
    """The coefficients f_j of a head over tokens with logits l_j in [low, high], values l_j / beta (lemma H2).

    sigmoid(D) (1 + sigmoid(-D) (D + H)) grows with H. In D it falls up to some point below -H, where
    (D+H) tanh(D/2) = 2, rises up to the other point where that is so, which is positive, and falls again.
    """
    n = low.shape[-1]
    if n == 1:
        return np.ones_like(low), np.ones_like(low)
    weight = shares(low, high)
    with np.errstate(divide="ignore"):
        ends = [np.log(w) - np.log1p(-np.minimum(w, 1 - U)) for w in weight]  # D, from the weight sigmoid(D)
    below = np.where(weight[0] > 0, ends[0] - 1e-12 * (1 + np.abs(ends[0])), -np.inf)
    above = np.where(weight[1] < 1 - 1e-9, ends[1] + 1e-12 * (1 + np.abs(ends[1])), np.inf)
    return _peak(below, above, 0.0, False), _peak(below, above, math.log(n - 1) * (1 + U), True)


def _peak(below: Array, above: Array, entropy: float, largest: bool) -> Array:
    """The smallest value of a coefficient for D in [below, above], or the largest."""

    def slope(D: Array) -> Array:
        D = np.clip(D, -700.0, 700.0)  # beyond, it is 0 or 1 up to less than what is added below
        one = 1 / (1 + np.exp(-D))
        return np.asarray(one * (1 + (D + entropy) / (1 + np.exp(D))))

    left, right = (0.0, 60.0) if largest else (-60.0, 0.0)
    for _ in range(60):  # halvings: the point to the last bit
        middle = 0.5 * (left + right)
        beyond = (middle + entropy) * math.tanh(0.5 * middle) > 2
        left, right = (left, middle) if beyond == largest else (middle, right)
    turning = np.clip(np.full_like(below, left), below, above)
    ends = np.stack([slope(below), slope(turning), slope(above)])
    slack = 1e-12 * (1 + entropy)  # rounding of sums and products of numbers below 2 + entropy, and of the point
    return ends.max(0) + slack if largest else ends.min(0) - slack


RULES: dict[str, Rule] = {
    "softmax": SoftmaxRule(),
    "mix": MixRule(),
    "max": MaxRule(),
    "attention": AttentionRule(),
}
