"""How norms err in a network: lemma G1 for the stored heads, and what becomes of errors that come in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...certificates.rounding import up
from ...dtypes import Array
from ...errors import CertificateError
from ...programs.enclose import Range, normalised_size
from ...programs.ops import Normalise
from ..rule import Copies, Local, Moved, Passed, Rule, Setting, scaled
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


def table_of(heads: StoredHeads, width: int) -> tuple[Array, Array, Array]:
    """Scales, shifts and amounts as stored; everything else of a norm's heads is structure."""
    if heads.scope != "self" or heads.tables["W_O"].shape[1:] != (width, width):
        raise CertificateError(f"'{heads.purpose}' must be heads over their own token that norm {width} channels")
    count, wide = len(heads.tables["W_Q"]), np.eye(width, width + 1)
    scale = -heads.only("W_Q")[:, 0, 0]
    shift, amount = heads.table("b_Q", count, width + 1)[:, -1], heads.tables["W_O"][:, 0, 0]
    one = np.zeros((1, width + 1))
    one[0, -1] = 1.0
    heads.expect("W_Q", -scale[:, None, None] * wide)
    heads.require("b_Q", heads.table("b_Q", count, width + 1), shift[:, None] * one)
    heads.expect("W_K", wide[None])
    heads.require("b_K", heads.table("b_K", count, width + 1), np.repeat(one, count, 0))
    heads.expect("W_V", np.eye(width)[None])
    heads.require("W_O", heads.tables["W_O"], amount[:, None, None] * np.eye(width))
    heads.require("M_K", heads.table("M_K", count, 1, width + 1), np.zeros((count, 1, width + 1)))
    heads.absent("b_V", "M_V")
    heads.no_skip()
    return scale, shift, amount


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
        if not isinstance(op, Normalise) or op.centred:
            raise CertificateError(f"operation %{site.op} is {op.word}, its heads norm rows without centring them")
        return op

    def local(self, site: NormSite, setting: Setting, heads: Sequence[StoredHeads]) -> NormLocal:
        op = self._op(site, setting)
        scale, shift, amount = table_of(heads[0], op.width)
        low, high = site.variance
        error, evaluation = layer_error(scale, shift, amount, op.width, op.eps, low, high, setting.u)
        dying = 4 * setting.tiny * (len(amount) + np.abs(amount).sum() * math.sqrt(high + op.eps))
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
        slip = (op.width + 16) * 2.0**-52
        total = e.sum(-1) * (1 + e.shape[-1] * 2.0**-52)
        wide = Range(c.low - total, c.high + total)
        size = normalised_size(wide, op.eps)
        least = np.mean(wide.least**2, -1, keepdims=True) * (1 - slip)
        most = np.mean(wide.size**2, -1, keepdims=True) * (1 + slip)
        length = np.sqrt(np.sum(total**2, -1, keepdims=True)) * (1 + slip)
        far = (size / math.sqrt(op.width) * length + total) / np.sqrt(least + op.eps)
        share = np.clip((1 - total / np.where(length > 0, length, 1.0)) / 1.5, 0.0, 1.0)
        at = np.clip(op.eps * share / (1 - share), least, most)
        root = np.sqrt(at + op.eps)
        near = (total + 0.5 * length * at / (at + op.eps)) / root
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
        (low, high), d = arguments[0], self._op(site, setting).width
        scale, shift, amount = table_of(heads[0], d)
        least = np.maximum(np.maximum(low, -high), 0.0) ** 2
        most = np.maximum(low**2, high**2)
        slip = 1 + (d + 8) * 2.0**-52
        v = least.mean(-1) / slip, most.mean(-1) * slip
        start, end = site.variance
        inside = (v[0] >= start) & (v[1] <= end)
        v = np.where(inside, v[0], start), np.where(inside, v[1], start)
        curve = slopes_of(d * scale, shift, amount, site.variance, self._op(site, setting).eps)
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
        op, row = self._op(site, setting), ranges[0]
        d = op.width
        scales, _, amounts = table_of(heads[0], d)
        scales = np.abs(scales)
        if amounts.min() < 0 or scales.min() <= 0:
            moved.broken[:] = True
            return
        total = moved.inputs[0].sum(-1)
        size = row.size + total
        least = np.mean(np.maximum(row.least - total, 0.0) ** 2, -1, keepdims=True)  # of v
        most = np.mean(size**2, -1, keepdims=True)
        low, high = site.variance
        alpha, beta, value = (np.zeros(size.shape) for _ in range(3))
        for number, (rho, _) in enumerate(copies.heads):
            alpha = np.maximum(alpha, rho["query"][..., :d] / (scales[number] * (1 - 2 * setting.u)))
            beta, value = np.maximum(beta, rho["key"][..., :d]), np.maximum(value, rho["value"])
            moved.broken[:] |= rho["query"][..., d:].any((1, 2)) | rho["key"][..., d:].any((1, 2))
        norms = [np.sqrt(np.sum(x**2, -1, keepdims=True)) * 1.001 for x in (alpha, beta)]
        A, B = norms[0] + norms[1], norms[0] * norms[1]
        m = least * (1 - 2.0**-40) + op.eps
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            k = A / np.sqrt(d * m) + B / (d * m)
            moved.broken[:] |= ~(k <= 0.125).all((1, 2))
            left = 1 - np.minimum(k, 0.125)
            near = value / np.sqrt(m * left) + (A / np.sqrt(m) + B / (np.sqrt(d) * m)) / (2 * left**1.5)
            below, above = 2 * np.sqrt(low / d) * A + (A**2 + 2 * B) / d, np.sqrt(high / d) * A + B / d
            moved.broken[:] |= ~(most + above <= high).all((1, 2))
            beyond = (least - below < low) * below
            far = np.sqrt(d) * np.expm1(np.minimum(float(scales.max()) * d * beyond * 1.01, 1e3))  # infinite there
            again = local.total * k  # the fit's error, at v -+ delta
            moved.extra[:] += (near + far + again) * 1.01


RULES: dict[str, Rule] = {"norm": NormRule()}
