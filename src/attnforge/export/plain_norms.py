"""What separate rounding of queries, keys and values does to norm heads in plain form (lemma G1 of docs/theory.md).

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
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..ir.enclose import Range
from ..ir.ops import Array, Normalise
from ..lower.layout import Site
from .plain_layout import HeadTables

if TYPE_CHECKING:
    from .plain_rules import PlainPropagation

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
