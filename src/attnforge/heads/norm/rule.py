"""How norms err in a network: lemma G1 for the stored heads, and what becomes of errors that come in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...certificates.rounding import gamma, up
from ...dtypes import Array
from ...errors import CertificateError
from ...programs.enclose import Range, centred, normalised_size
from ...programs.ops import Normalise
from ..rule import Arguments, Copies, Local, Mask, Moved, Passed, Ratios, Rule, Setting, scaled
from ..slopes import Enclosure, Steepness, Tangent, combined, plus, scaled_by, stacked, times, within
from ..stored import StoredHeads
from .bound import layer_error, slopes_of
from .site import NormSite

NORM_CELLS = 24  # on which the kernel looks, for each factor e of the mean square: sigmoids move by less than 1 on each


@dataclass(frozen=True)
class NormLocal(Local):
    """`total` is the error of the largest entry a normed row can have; `lost` is what underflow takes from any entry:
    once after the value, once after the output projection, in every head."""

    lost: float


@dataclass(frozen=True, eq=False)
class NormTable:
    """The scales, shifts and amounts of norm heads, and how far, relatively, queries may be from the scaled row."""

    scale: Array
    shift: Array
    amount: Array
    drift: float


def table_of(heads: StoredHeads, op: Normalise) -> NormTable:
    """What is a number in a norm's heads; everything else is structure: the row is what they read times a matrix."""
    width, matrix = op.width, op.centring[0]
    if heads.scope != "self" or heads.tables["W_O"].shape[1:] != (width, width):
        raise CertificateError(f"'{heads.purpose}' must be heads over their own token that norm {width} channels")
    queries, count = heads.only("W_Q"), len(heads.tables["W_Q"])
    if queries.shape[1:] != (width, width + 1):
        raise heads.changed("W_Q")
    scale = -queries[:, 0, 0] / (matrix[0, 0] or 1.0)
    shift, amount = heads.table("b_Q", count, width + 1)[:, -1], heads.tables["W_O"][:, 0, 0]
    one, rows = np.zeros((1, width + 1)), np.concatenate([matrix, np.zeros((width, 1))], 1)
    one[0, -1] = 1.0
    drift = _drift(queries, -scale[:, None, None] * rows)
    if not drift < WORST:
        raise heads.changed("W_Q")
    heads.require("b_Q", heads.table("b_Q", count, width + 1), shift[:, None] * one)
    heads.expect("W_K", rows[None])
    heads.require("b_K", heads.table("b_K", count, width + 1), np.repeat(one, count, 0))
    heads.expect("W_V", matrix[None])
    heads.require("W_O", heads.tables["W_O"], amount[:, None, None] * np.eye(width))
    heads.require("M_K", heads.table("M_K", count, 1, width + 1), np.zeros((count, 1, width + 1)))
    heads.absent("b_V", "M_V")
    heads.no_skip()
    return NormTable(scale, shift, amount, drift)


WORST = 2.0**-20  # scales that are off by more, some units of float32, are no scaled rows


def _drift(found: Array, wanted: Array) -> float:
    """How far numbers are from others, relatively; 0 where they are the same, endless where one is 0 alone."""
    off = np.abs(found - wanted)
    if not off.any():
        return 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.max(np.where(off > 0, off / np.abs(wanted), 0.0))) * (1 + 2.0**-50) + 2.0**-51


class NormRule(Rule):
    """Rows whose mean square stays in the interval of the fit are normed up to a relative error."""

    def edges(self, site: NormSite, setting: Setting, heads: StoredHeads) -> tuple[float, ...]:
        """Cells of the squared length of a row, each as wide relative to itself."""
        op = self._op(site, setting)
        low, high = (math.log(end + op.eps) for end in site.variance)
        inner = np.exp(np.linspace(low, high, max(16, math.ceil(NORM_CELLS * (high - low))) + 1)) - op.eps
        inner[0], inner[-1] = site.variance
        return tuple(np.unique(op.width * np.maximum(inner, 0.0)).tolist())

    def _op(self, site: NormSite, setting: Setting) -> Normalise:
        op = setting.op(site)
        if not isinstance(op, Normalise):
            raise CertificateError(f"operation %{site.op} is {op.word}, its heads norm rows")
        return op

    def local(self, site: NormSite, setting: Setting, heads: Sequence[StoredHeads]) -> NormLocal:
        op = self._op(site, setting)
        table, eps = table_of(heads[0], op), op.centring[1]
        if table.drift and not op.centred:
            raise heads[0].changed("W_Q")
        low, high, amount = *site.variance, table.amount
        error, evaluation = layer_error(table.scale, table.shift, amount, op.width, eps, low, high, setting.u)
        dying = 4 * setting.tiny * (len(amount) + np.abs(amount).sum() * math.sqrt(high + eps))
        most = math.sqrt(op.width) * (1 + 2.0**-50)
        lost = 4 * setting.tiny * (len(amount) + math.fsum(abs(float(a)) for a in amount))
        total = float(up((error + evaluation + dying + 2.0**-50) * most + lost, 16))
        if not math.isfinite(total):
            raise CertificateError(f"no bound holds for the norm %{site.op} with these weights")
        return NormLocal((), total, float(up(evaluation * most)), lost)

    def passes(self, site: NormSite, setting: Setting, local: Any, ranges: list[Range], inputs: list[Array]) -> Passed:
        """n(c) = c / r, r = sqrt(v + eps), v = mean c^2, has the derivative J h = (h - n (n.h)/d) / r.

        |J h|_i <= (|h_i| + |n_i| |m| |h| / d) / r with m the other entries of n. Two bounds of |n_i| |m| / d: half of
        |n|^2 / d = v / (v + eps), and the largest |n_i| over sqrt(d). With the first, the largest
        (|h_i| + t |h| / 2) / r, t = v / (v + eps), is where t = 2/3 (1 - |h_i| / |h|), or at an end of v's range. By
        the mean value theorem a row that errs by e moves by at most that on the way, and by at most 2 |n_i|. (eps may
        have been rounded by 2^-53 of itself when a centred row was scaled; `local` counts that.)
        """
        (c,), (e,), op = ranges, inputs, self._op(site, setting)
        eps = op.centring[1]
        slip = (op.width + 16) * 2.0**-52
        total = e.sum(-1) * (1 + e.shape[-1] * 2.0**-52)
        wide = Range(c.low - total, c.high + total)
        size = normalised_size(wide, eps)
        least = np.mean(wide.least**2, -1, keepdims=True) * (1 - slip)
        most = np.mean(wide.size**2, -1, keepdims=True) * (1 + slip)
        length = np.sqrt(np.sum(total**2, -1, keepdims=True)) * (1 + slip)
        far = (size / math.sqrt(op.width) * length + total) / np.sqrt(least + eps)
        share = np.clip((1 - total / np.where(length > 0, length, 1.0)) / 1.5, 0.0, 1.0)
        at = np.clip(eps * share / (1 - share), least, most)
        root = np.sqrt(at + eps)
        near = (total + 0.5 * length * at / (at + eps)) / root
        bound = np.minimum(np.minimum(near * (1 + 2.0**-20), far * (1 + slip)), 2 * size)
        low, high = site.variance
        known = (least >= low) & (most <= high)
        own = up(local.total / math.sqrt(op.width) * size + local.lost, 8)
        parts = e + np.sqrt(np.mean(e**2, 2))[:, :, None] * (1 + slip)  # how the sources share it
        return scaled(parts, bound), np.where(known, own, np.inf)

    def through(
        self, site: NormSite, setting: Setting, local: Any, heads: Sequence[StoredHeads], arguments: list[Enclosure],
        tangents: list[Tangent],
    ) -> Tangent:  # fmt: skip
        """n_i = c_i S(v), v = mean c^2, has n_i' = S c_i' + (2/d) c_i S'(v) sum_k c_k c_k' (lemma H2).

        |c_i c_k| <= d v / 2 for i != k and c_i^2 <= d v: the coefficients are also at most |v S'| there, and between
        S + 2 v S' and S on the diagonal, whatever the row is.
        """
        op, (low, high) = self._op(site, setting), arguments[0]  # centred already
        d, eps, table = op.width, op.centring[1], table_of(heads[0], op)
        least = np.maximum(np.maximum(low, -high), 0.0) ** 2
        most = np.maximum(low**2, high**2)
        slip = 1 + (d + 8) * 2.0**-52
        v = least.mean(-1) / slip, most.mean(-1) * slip
        start, end = site.variance
        inside = (v[0] >= start) & (v[1] <= end)
        v = np.where(inside, v[0], start), np.where(inside, v[1], start)
        curve = slopes_of(d * table.scale, table.shift, table.amount, site.variance, eps)
        twice = times((2 * curve.edges[:-1], 2 * curve.edges[1:]), curve.slope)  # 2 v S'
        products = Steepness(curve.edges, plus(twice, curve.value), twice)
        size, slope, double, diagonal = curve.values(*v), curve.slopes(*v), products.values(*v), products.slopes(*v)
        half = 0.5 * np.maximum(np.abs(double[0]), np.abs(double[1]))[..., None]
        share = scaled_by(slope, 2.0 / d)
        own = times((least / slip, most * slip), (share[0][..., None], share[1][..., None]))
        squares = plus(own, (np.repeat(size[0][..., None], d, -1), np.repeat(size[1][..., None], d, -1)))
        squares = within(squares, (np.minimum(*(s[0] for s in (diagonal, size)))[..., None],
                                   np.maximum(*(s[1] for s in (diagonal, size)))[..., None]))  # fmt: skip
        found = []
        for i in range(d):
            one = times((low[..., i], high[..., i]), share)
            by = within(times((one[0][..., None], one[1][..., None]), (low, high)), (-half, half))
            by[0][..., i], by[1][..., i] = squares[0][..., i], squares[1][..., i]
            found.append(combined(by, tangents[0]).where(inside.all(1)))
        return stacked(found, 2)

    def copied(
        self, site: NormSite, setting: Setting, local: Any, heads: Sequence[StoredHeads], copies: Copies,
        ranges: list[Range], moved: Moved,
    ) -> None:  # fmt: skip
        """What separate rounding of queries, keys and values does to norm heads (lemma G1).

        Head j has the logit b_j - s_j q.k with q = c + alpha, k = c + beta, and the value c + gamma, where c is the
        row, of d entries and mean square v. So it computes (c + gamma) sigmoid(b_j - s_j d v_j), and with
        A = |alpha| + |beta| and B = |alpha| |beta| (Euclidean norms) |v_j - v| <= delta = sqrt(v/d) A + B/d. With all
        amounts positive the sum over j is monotone in every v_j: it lies between the sums at v - delta and at
        v + delta, which are (v -+ delta + eps)^(-1/2) up to the fit's error. Let m be the least v + eps and
        k = A/sqrt(d m) + B/(d m); then delta <= k (v + eps), and if k <= 1/8 the result errs by at most

            |gamma| / sqrt(m (1-k))  +  [ A/sqrt(m) + B/(sqrt(d) m) ] / (2 (1-k)^(3/2))

        more than with one row, because |c_i| <= sqrt(d v), and by k times the fit's error. v + delta must stay within
        the interval of the fit. Where v - delta leaves it by t, sigmoids grow by at most the factor exp(s d t);
        |c_i| (v + eps)^(-1/2) <= sqrt(d) of that. There v <= l + delta, l the interval's lower end, gives
        delta <= 2 sqrt(l/d) A + (A^2 + 2 B)/d.
        """
        op, row, total = self._op(site, setting), ranges[0], moved.inputs[0].sum(-1)
        d, scales = op.width, table_of(heads[0], op).scale
        alpha, beta, value = (np.zeros(total.shape) for _ in range(3))
        for number, (rho, _) in enumerate(copies.heads):
            alpha = np.maximum(alpha, rho["query"][..., :d] / (np.abs(scales[number]) * (1 - 2 * setting.u)))
            beta, value = np.maximum(beta, rho["key"][..., :d]), np.maximum(value, rho["value"])
            moved.broken[:] |= rho["query"][..., d:].any((1, 2)) | rho["key"][..., d:].any((1, 2))
        none = np.zeros((d, d))
        extra, _, broken = self._apart(site, setting, local, heads[0], [none] * 3, [alpha, beta, value], row, total)
        moved.extra[:] += extra
        moved.broken[:] |= broken

    def _apart(
        self, site: NormSite, setting: Setting, local: Any, heads: StoredHeads, relative: Sequence[Array],
        absolute: Sequence[Array], row: Range, total: Array,
    ) -> tuple[Array, Array, Mask]:  # fmt: skip
        """What it adds to a norm's error that queries, keys and values are not the row c itself (lemma G3), by channel
        and in length, and where nothing holds.

        Coordinate i of each is within sum_k M_ik |c_k| + r_i of c_i, with M `relative` and r `absolute`, queries
        divided by their scales; c is within `total` of `row`.
        """
        op, table = self._op(site, setting), table_of(heads, self._op(site, setting))
        d, eps, (low, high) = op.width, op.centring[1], site.variance
        scales = np.abs(table.scale)
        monotone = bool(table.amount.min() >= 0 and table.scale.min() > 0)
        size = row.size + total
        least = np.mean(np.maximum(row.least - total, 0.0) ** 2, -1, keepdims=True) * (1 - 2.0**-40)  # of v
        most = np.mean(size**2, -1, keepdims=True) * (1 + 2.0**-40)
        n = normalised_size(Range(row.low - total, row.high + total), eps)
        slip = 1 + (d + 16) * 2.0**-50
        query, key = (float(np.sqrt(np.sum(x**2))) * slip for x in relative[:2])
        a, b = (np.sqrt(np.sum(x**2, -1, keepdims=True)) * slip for x in absolute[:2])
        steady = (query + key + query * key) * slip  # what of v may move v
        A, B, m = (a + b) * (1 + max(query, key)) * slip, a * b * slip, least + eps
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            moves = most * steady + np.sqrt(most / d) * A + B / d  # of v, at most
            k = np.minimum(steady + A / np.sqrt(d * m) + B / (d * m), moves / m)
            steep = gamma(d + 2, setting.u) * float(scales.max()) * d * eps  # 1% covers what logits round near v = 0
            broken = ~((k <= 0.125) & (steady * d < 0.125) & (steep < 2.0**-9)).all((1, 2))
            left = 1 - np.minimum(k, 0.125)
            grown = np.minimum(k, 0.125) / (2 * left**1.5)  # of 1 / sqrt(v + eps), relatively
            if not monotone:  # every sigmoid by itself
                sizes = np.abs(table.amount) / (1 + np.exp(np.minimum(d * table.scale * low - table.shift, 700.0)))
                sizes = np.where(table.scale < 0, np.abs(table.amount), sizes)
                stretch = np.expm1(float(scales.max()) * d * np.minimum(k * (high + eps), moves) * 1.01)
                grown = stretch * float(sizes.sum()) * math.sqrt(high + eps) * 1.01
                left = (1 + grown) ** -2.0
            length = math.sqrt(d) * np.sqrt(np.sum(relative[2] ** 2, 1))  # of n: at most sqrt(d)
            own = np.minimum(n @ relative[2].T, length) * slip / np.sqrt(left) + absolute[2] / np.sqrt(m * left)
            share = own + n * grown
            whole = np.sqrt(np.sum(own**2, -1)) * slip + math.sqrt(d) * grown[..., 0]
            off = A / np.sqrt(1 - min(steady, 0.125))
            below, above = 2 * np.sqrt(low / d) * off + (off**2 + 2 * B) / d, np.sqrt(high / d) * A + B / d
            if monotone:
                broken |= ~((least * (1 - steady) >= low) & (most * (1 + steady) + above <= high)).all((1, 2))
            beyond = (least * (1 - steady) - below < low) * below
            beyond = beyond if monotone else np.zeros_like(beyond)
            far = np.sqrt(d) * np.expm1(np.minimum(float(scales.max()) * d * beyond * 1.01, 1e3))  # infinite there
            heads_own, again = local.total / math.sqrt(d), 2 * (k + grown)  # what heads err anyhow, at other arguments
            extra = ((share + far) * (1 + heads_own) + again * heads_own * n + 2 * local.lost) * 1.01
            whole = (whole + far[..., 0] * math.sqrt(d)) * (1 + heads_own) + again[..., 0] * local.total
            whole = (whole + 2 * local.lost * math.sqrt(d)) * 1.01
        return np.where(broken[:, None, None], np.inf, extra), np.where(broken[:, None], np.inf, whole), broken

    def proportional(self, site: NormSite, setting: Setting) -> bool:
        return self._op(site, setting).centred

    def rows(
        self, site: NormSite, setting: Setting, local: Any, heads: Sequence[StoredHeads], ranges: list[Range],
        inputs: list[Array], ratios: Callable[[], Ratios | None] | None,
    ) -> Arguments:  # fmt: skip
        """Rows that heads centre themselves (lemma G3): rounding of that is in proportion to what is read, and also to
        the row where each channel of what is read is off in proportion to itself, and one is 0."""
        op, (y,), (e,) = self._op(site, setting), ranges, inputs
        if not op.centred:
            return super().rows(site, setting, local, heads, ranges, inputs, ratios)
        d, matrix = op.width, op.centring[0]
        size, row = np.abs(matrix), centred(op, y)
        passed = np.einsum("ctks,ki->ctis", e, size) * (1 + (d + 8) * 2.0**-52)
        if ratios is None:
            return replace(
                super().rows(site, setting, local, heads, ranges, inputs, None), ranges=[row], inputs=[passed]
            )
        table, known, none = table_of(heads[0], op), ratios(), np.zeros((d, d))
        drifts, tiny = (table.drift, 0.0, 0.0), (d + 1) * setting.tiny * np.array([1 / (table.scale.min() or 1), 1, 1])

        def rounded(x: float, read: Array | float = 0.0) -> Array:
            """What becomes of a product of the matrix, relatively: read, multiplied by a stored number, added up."""
            terms = d - (known is not None)
            return np.asarray((1 + read) * (1 + gamma(terms, setting.u)) * (1 + x) - 1 + 2.0**-50)

        slip = 1 + (d + 8) * 2.0**-52
        if known is None:
            reach = (y.size + e.sum(-1)) @ size * slip
            sums = [rounded(x) * reach + t for x, t in zip(drifts, tiny, strict=True)]
            found = self._apart(site, setting, local, heads[0], [none] * 3, sums, row, passed.sum(-1))
            return Arguments([row], [passed], *found)
        scale = abs(matrix[0, 0] - matrix[0, 1])  # c_i - c_k = scale (y_i - y_k)
        relative, alone, absolute = [], [], []
        for x, t in zip(drifts, tiny, strict=True):
            each = size.T * rounded(x, known.relative) * slip
            each[:, known.zero] = 0.0
            alone.append(y.size @ each.T * slip + t + size.sum(0).max() * known.lost)
            each[:, known.zero] = each.sum(1)
            relative.append(each / scale * slip)
            absolute.append(np.full(y.low.shape, t + size.sum(0).max() * known.lost))
        nowhere = np.zeros(y.low.shape)
        extra, length, broken = self._apart(site, setting, local, heads[0], relative, absolute, row, nowhere)
        other = self._apart(site, setting, local, heads[0], [none] * 3, alone, row, nowhere)
        extra, length = np.minimum(extra, other[0]), np.minimum(length, other[1])
        unknown = ~np.isfinite(e).all((1, 2, 3))
        return Arguments([row], [np.zeros_like(passed)], extra, length, (broken & other[2]) | unknown)

    def length(
        self, site: NormSite, setting: Setting, local: Any, ranges: list[Range], inputs: list[Array], added: Array
    ) -> Array:
        """Up to what dies out, errors are in proportion to a row of length sqrt(d v / (v + eps)) at most."""
        op, (c,), (e,) = self._op(site, setting), ranges, inputs
        most = np.mean((c.size + e.sum(-1)) ** 2, -1) * (1 + (op.width + 8) * 2.0**-50)
        share = np.sqrt(most / (most + op.centring[1])) if op.centring[1] else np.ones_like(most)
        own = up(local.total * share + math.sqrt(op.width) * local.lost, 16)
        direct = np.sqrt(np.sum(added**2, -1)) * (1 + 2.0**-40)
        return np.minimum(np.where(np.isfinite(direct), own, np.inf), direct)


RULES: dict[str, Rule] = {"norm": NormRule()}
