"""How far a token head can be from its target: read off the stored weights (lemmas D1 to D4 and A5 of docs/theory.md).

`fixed_terms` is for heads whose logits come from positions: gather, mean, prefix mean, any fixed matrix. It holds for
whatever the weights are, trained ones included. `peak_terms` is for max and min.

One rule goes beyond `certificates.rounding`: exp(0) = 1 and exp(x) = 0 for x < -104 (float32) or x < -745.2 (float64),
exactly. A slot that far below the best one of its row is *dead*; a row with one live slot reads that slot's value bit
by bit, and a row whose m live logits are equal has weights 1/m up to one quotient.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from ...certificates.certificate import Term
from ...certificates.rounding import TINY, UNIT, exp_ulps, gamma, softmax_rounding, up
from ...dtypes import Array, stored
from ...errors import CertificateError
from ...network import Heads

DEAD = {torch.float32: 104.5, torch.float64: 746.0}  # a little more than 104 and 745.2, below which exp gives 0
UNDERFLOW = "exp(0) = 1, and exp underflows to 0 below -104 (float32) or -745.2 (float64)"
U64 = 2.0**-53  # the roundoff of what is computed here


def fixed_terms(heads: Heads, target: Array, channels: int, lo: float, hi: float) -> tuple[Term, ...]:
    """The ledger for sup |heads(x) - target x| over x with entries in [lo, hi], `target` an n x n matrix.

    Exact attention weights w_h (over live slots) and value maps V_j = x_j A_h + r_hj give sum_h w_h V O_h. With
    A_h O_h = g_h I + E_h the part sum_h g_h w_h is compared with the target, E_h and the constants r_hj O_h are
    remainders that a constructed head does not have. Logits may depend on the tokens (trained heads): by how much
    at most is added to their error, and lemma A5 turns that into an error of the output.
    """
    dtype = heads.W_Q.dtype
    u, tiny = UNIT[dtype], TINY[dtype]
    n, size = target.shape[0], max(abs(lo), abs(hi))
    q, q_moves = _table(heads.W_Q, heads.b_Q, n, channels, size, u)
    k, k_moves = _table(heads.W_K, heads.b_K, n, channels, size, u)
    logit, error = _products(q, q_moves, k, k_moves, u)
    if heads.causal:
        logit = np.where(np.triu(np.ones((n, n), dtype=bool), 1), -np.inf, logit)
    if heads.M_K is not None:
        memory = stored(heads.M_K)
        to_memory = _products(q, q_moves, memory, np.zeros_like(memory), u)
        logit, error = (np.concatenate(pair, -1) for pair in zip((logit, error), to_memory, strict=True))
    best = (logit - error).max(-1, keepdims=True)
    live = logit + error >= best - DEAD[dtype]
    gap = np.where(live, logit - logit.max(-1, keepdims=True), -np.inf)
    weight = np.exp(gap) / np.exp(gap).sum(-1, keepdims=True)
    even = (np.isin(gap, (0.0, -np.inf)) & (np.where(live, error, 0.0) == 0)).all(-1)
    error = np.where(live, up(error + (u + 8 * U64) * np.abs(np.where(live, gap, 0)) + 16 * U64), 0.0)
    low, high, slip = _values(heads, n, channels, lo, hi, u)
    out = stored(heads.W_O)
    fitted = _distance(heads, weight, even, target, channels, size)
    spread = (high.max(1) - low.min(1)).max(-1)  # over slots, for the worst value column of a head
    value = np.maximum(np.abs(low), np.abs(high)).max(1).max(-1)
    rounding = np.zeros(n)
    for h in range(weight.shape[0]):
        g = min(h, len(value) - 1)
        count = live[h].sum(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            like = np.ones_like(weight[h])
            rows = softmax_rounding(weight[h], error[h], value[g] * like, spread[g] * like, u, tiny)
        # Whatever the weights are, they are weights: the output stays among the values.
        rows = np.fmin(rows, up(spread[g] + gamma(2 * like.shape[-1] + 8, u) * value[g]))
        rows = np.where(even[h], up(gamma(count + 2, u) * value[g] + 2 * count * tiny), rows)
        read = np.where(count == 1, 0.0, rows) + slip[g] * (1 + exp_ulps() * u)
        through = np.abs(out[h]).sum(0).max()
        rounding += _up(read * through + _matrix_slip(out[h], u) * through * (value[g] + read))
    mixed = (out != 0).sum((0, 1)).max()
    if mixed > 1:
        rounding = _up(rounding + gamma(mixed, u) * (np.abs(out).sum((0, 1)).max() * value.max() + rounding))
    worst = int(np.argmax(fitted + rounding))
    rows_ = [("attention weights", "interpolation", fitted[worst]), ("evaluation", "rounding", rounding[worst])]
    return tuple(Term(site, source, float(x), f"row {worst}") for site, source, x in rows_ if x > 0)  # type: ignore[arg-type]


def mixing(heads: Heads, n: int, channels: int) -> float:
    """The largest sum of |coefficients| of an output, for heads whose weights depend on positions alone."""
    tables = {name: stored(tensor) for name, tensor in heads.named_parameters()}
    if any(tables[name][:, :channels].any() for name in ("W_Q", "W_K") if name in tables):
        raise CertificateError("the weights of these heads depend on tokens: ask the network that uses them")
    if not all(np.isfinite(table).all() for table in tables.values()):
        raise CertificateError("a token head holds NaN or infinity: nothing can be said of it")
    rows, none = tables["W_Q"].shape[1] - channels, np.zeros((1, n, tables["W_Q"].shape[2]))
    q, k = none, none
    for name, bias in (("W_Q", "b_Q"), ("W_K", "b_K")):
        moved = none + (np.eye(n)[:, :rows] @ tables[name][:, channels:] if rows and name in tables else 0.0)
        moved = moved + (tables[bias][:, None] if bias in tables else 0.0)
        q, k = (moved, k) if name == "W_Q" else (q, moved)
    logit = q @ k.swapaxes(-1, -2)
    error = (q.shape[-1] + 2) * 2 * U64 * (np.abs(q) @ np.abs(k).swapaxes(-1, -2))
    if heads.causal:
        logit = np.where(np.triu(np.ones((n, n), dtype=bool), 1), -np.inf, logit)
    if "M_K" in tables:
        sink = tables["M_K"].swapaxes(-1, -2)
        more = (q.shape[-1] + 2) * 2 * U64 * (np.abs(q) @ np.abs(sink))
        logit, error = np.concatenate([logit, q @ sink], -1), np.concatenate([error, more], -1)
    weight = np.exp(logit - logit.max(-1, keepdims=True))
    weight = weight / weight.sum(-1, keepdims=True)
    # The error of the largest logit is 6 U of every one: what their differences lose. 8 U a slot are the exponential's,
    # the sum's and the quotient's.
    slip = np.expm1(2 * error.max(-1, keepdims=True) + 8 * U64 * weight.shape[-1])
    if not np.isfinite(slip).all():
        raise CertificateError("the logits of these heads are too large: nothing can be said of their weights")
    passed, whole = (f(tables["W_V"][:, :channels]) @ f(tables["W_O"]) for f in (np.asarray, np.abs))
    weight, slip = weight[..., :n], (weight * slip + 1e-300)[..., :n]
    found = np.abs(np.einsum("hij,hco->ijco", weight, passed)).sum((1, 2))
    # What sums of so many terms lose, twice: of those above and of these.
    lost = 2 * (tables["W_V"].shape[-1] + heads.heads + n * channels + 8) * U64
    off = np.einsum("hij,hco->io", slip + lost * (weight + slip), whole)
    return float(up((found + off).max() * (1 + 2 * lost), 16))


def peak_terms(heads: Heads, n: int, channels: int, lo: float, hi: float, sign: float) -> tuple[Term, ...]:
    """The ledger of a max (sign 1) or min (sign -1) head: one head per channel, logits beta x_j, values x_j.

    D4: max - head <= W0((n-1)/e) / beta. A5: the logits err by d = u beta (|x| + hi - lo), which moves the output by at
    most exp(d) expm1(d) E|V - head|, and E|V - head| <= 2 (max - head) <= 2 W0((n-1)/e) / beta.
    """
    u, tiny = UNIT[heads.W_Q.dtype], TINY[heads.W_Q.dtype]
    errors = {beta: peak_error(n, beta, lo, hi, u, tiny) for beta in sharpnesses(heads, channels, sign)}
    beta, (leak, rounding) = max(errors.items(), key=lambda found: sum(found[1]))
    rows = (("softmax", "leak", leak), ("evaluation", "rounding", rounding))
    return tuple(Term(site, source, x, f"sharpness {beta:g}") for site, source, x in rows if x > 0)  # type: ignore[arg-type]


def peak_error(n: int, beta: float, lo: float, hi: float, u: float, tiny: float) -> tuple[float, float]:
    """What softness and what rounding cost a max head of sharpness beta over n tokens with entries in [lo, hi].

    Computed logits l_j are within d of beta x_j. A5 bounds what that does to the output; so does D4 itself: the head's
    mean of l is within W0((n-1)/e) of the largest, so its mean of x is within (W0((n-1)/e) + 2 d) / beta of the
    maximum.
    """
    if n == 1:
        return 0.0, 0.0
    size = max(abs(lo), abs(hi))
    leak = up(lambert_upper(n) / beta)
    d = up(u * beta * (size + (hi - lo) * (1 + 2 * u)) + exp_ulps() * u + 4 * tiny, 8)
    with np.errstate(over="ignore", invalid="ignore"):
        moved = np.fmin(up(np.exp(d) * np.expm1(d) * 2 * leak, 16), up(2 * d / beta, 8))
        rounding = up(moved + gamma(2 * n + 4, u) * (size + moved) + 2 * n * tiny, 8)
    return float(leak), float(rounding) if np.isfinite(rounding) else math.inf


def lambert_upper(n: int) -> float:
    """An upper bound of W0((n-1)/e), the w with w e^w = (n-1)/e: 0.2785 for two tokens, 2.63 for a hundred.

    >>> round(lambert_upper(2), 4), round(lambert_upper(100), 2)
    (0.2785, 2.63)
    """
    if n <= 1:
        return 0.0
    goal = (n - 1) / math.e
    w = math.log1p(goal)
    for _ in range(60):
        w -= (w * math.exp(w) - goal) / (math.exp(w) * (1 + w))
    w *= 1 + 1e-14
    while w * math.exp(w) < goal * (1 + 1e-14):
        w *= 1 + 1e-14
    return w


def sharpnesses(heads: Heads, channels: int, sign: float) -> tuple[float, ...]:
    """The sharpness of each head; raises `CertificateError` when they are not those of a max or min head."""
    one = torch.eye(channels, dtype=heads.W_Q.dtype, device=heads.W_Q.device)
    ones = torch.ones_like(one[:, :1])
    keys = None if heads.W_K is None else heads.W_K.detach()
    wanted = {"W_Q": torch.zeros_like(heads.W_Q), "b_Q": ones, "W_V": one.unsqueeze(-1), "W_O": one.unsqueeze(1)}
    for name, tensor in wanted.items():
        found = getattr(heads, name)
        if found is None or found.shape != tensor.shape or not torch.equal(found.detach(), tensor):
            raise CertificateError(
                f"'{name}' has changed: a max or min head is certified with its constructed {name} only"
            )
    if keys is None or keys.shape != (channels, channels, 1) or (keys.squeeze(-1) * (1 - one)).count_nonzero():
        raise CertificateError("'W_K' has changed: each head of a max or min head must read its own channel only")
    betas = tuple((sign * keys.squeeze(-1).diagonal()).double().tolist())
    if not all(0 < beta < math.inf for beta in betas):
        raise CertificateError(f"'W_K' has changed: the sharpness must be a positive number, found {min(betas):g}")
    return betas


def _up(x: Array) -> Array:
    """`up`, with an exact zero kept."""
    return np.where(x == 0, 0.0, up(x, 16))


def _power_of_two(x: Array) -> Array:
    return np.frexp(np.abs(x))[0] == 0.5


def _table(
    W: torch.Tensor | None, b: torch.Tensor | None, n: int, channels: int, size: float, u: float
) -> tuple[Array, Array]:
    """Queries or keys (head, token, k) as the dtype computes them for zero tokens, and how far tokens can move them.

    A position is a one-hot row: its product with W is a row of W, exactly, and one addition of b.
    """
    if W is None:
        assert b is not None
        return np.repeat(stored(b)[:, None, :], n, 1), np.zeros((b.shape[0], n, b.shape[1]))
    W = W.detach()
    at = W[:, channels:, :] if W.shape[1] > channels else W.new_zeros(W.shape[0], n, W.shape[2])
    at = at if b is None else at + b.detach().unsqueeze(1)
    reach = np.abs(stored(W[:, :channels, :])).sum(1, keepdims=True) * size
    rounding = gamma(channels + 3, u) * (reach + np.abs(stored(W)).max(1, keepdims=True) + np.abs(stored(at)))
    return stored(at), np.where(reach > 0, up(reach + rounding, 16 + channels), np.zeros(at.shape))


def _products(q: Array, q_moves: Array, k: Array, k_moves: Array, u: float) -> tuple[Array, Array]:
    """Logits (head, query, slot), and how far computed ones can be from them: tokens, rounding, this evaluation."""
    pair = "hik,hjk->hij" if q.shape[0] == k.shape[0] else "hik,gjk->hij"
    logit = np.einsum(pair, q, k)
    terms = np.einsum(pair, (q != 0) * 1.0, (k != 0) * 1.0)
    plain = np.einsum(pair, _power_of_two(q) * 1.0, (k != 0) * 1.0) + np.einsum(
        pair, (q != 0) * 1.0, _power_of_two(k) * 1.0
    )
    absolute = np.einsum(pair, np.abs(q), np.abs(k))
    exact = (terms == 0) | ((terms == 1) & (plain > 0))  # a single product with a power of two is not rounded
    rounding = np.where(exact, 0.0, up(gamma(terms, u) * absolute + 2 * (terms + 2) * U64 * absolute, 16))
    moves = (
        np.einsum(pair, q_moves, np.abs(k)) + np.einsum(pair, np.abs(q), k_moves) + np.einsum(pair, q_moves, k_moves)
    )
    if moves.any():
        moves = up(moves * (1 + gamma(q.shape[-1] + 2, u)) + gamma(q.shape[-1] + 2, u) * absolute, 64 + 4 * q.shape[-1])
    return logit, _up(rounding + moves)


def _values(heads: Heads, n: int, channels: int, lo: float, hi: float, u: float) -> tuple[Array, Array, Array]:
    """Bounds (head, slot, column) of the values, memory included, and how far computed ones can be off, per head."""
    assert heads.W_V is not None
    W = stored(heads.W_V)
    at = W[:, channels:, :] if W.shape[1] > channels else np.zeros((W.shape[0], n, W.shape[2]))
    at = at if heads.b_V is None else at + stored(heads.b_V)[:, None, :]
    content = W[:, :channels, :]
    rise, fall = np.maximum(content, 0).sum(1), np.minimum(content, 0).sum(1)
    noise = 4 * (channels + 2) * U64 * ((rise - fall) * max(abs(lo), abs(hi)) + np.abs(at).max(1))
    noise = np.where(np.isin(content, (-1.0, 0.0, 1.0)).all(1) & ((content != 0).sum(1) <= 1) & ~at.any(1), 0.0, noise)
    low = at + (rise * lo + fall * hi - noise)[:, None, :]
    high = at + (rise * hi + fall * lo + noise)[:, None, :]
    size = np.maximum(np.abs(low), np.abs(high)).max((1, 2))
    whole = W if heads.b_V is None else np.concatenate([W, stored(heads.b_V)[:, None, :]], 1)
    slip = np.array([_matrix_slip(w, u) for w in whole])
    absolute = np.array([(np.abs(w[:channels]).sum(0) * max(abs(lo), abs(hi))).max() for w in whole]) + np.abs(at).max(
        (1, 2)
    )
    if heads.M_V is not None:
        memory = stored(heads.M_V)
        count = max(len(low), len(memory))
        low, high = (np.concatenate([np.repeat(x, count // len(x), 0), np.repeat(memory, count // len(memory), 0)], 1)
                     for x in (low, high))  # fmt: skip
        slip, absolute, size = (np.repeat(x, count // len(x)) for x in (slip, absolute, size))
    return low, high, _up(slip * np.maximum(absolute, size))


def _matrix_slip(W: Array, u: float) -> float:
    """The relative rounding of x W: none for a selection scaled by powers of two, else that of its longest column."""
    count = (W != 0).sum(0)
    exact = (count == 0) | ((count == 1) & (_power_of_two(W) | (W == 0)).all(0))
    return 0.0 if exact.all() else float(gamma(max(2, int(count.max())), u))


def _distance(heads: Heads, weight: Array, even: Array, target: Array, channels: int, size: float) -> Array:
    """For each token an upper bound of |sum_h w_h V O_h - target x|, in real arithmetic."""
    assert heads.W_V is not None
    n, W, out = target.shape[0], stored(heads.W_V), stored(heads.W_O)
    mixed, rest = np.zeros_like(target), np.zeros(n)
    noise = np.zeros(n)
    for h in range(weight.shape[0]):
        own = W[min(h, len(W) - 1)]
        whole = own[:channels] @ out[h]
        gain = whole[0, 0]
        other = np.abs(whole - gain * np.eye(channels)).sum(0).max()
        at = own[channels:] if own.shape[0] > channels else np.zeros((n, own.shape[1]))
        if heads.b_V is not None:
            at = at + stored(heads.b_V)[min(h, len(heads.b_V) - 1)]
        if heads.M_V is not None:
            at = np.concatenate([at, stored(heads.M_V)[min(h, len(heads.M_V) - 1)]])
        constant = np.abs(at) @ np.abs(out[h])
        mixed = mixed + gain * weight[h][:, :n]
        rest = rest + weight[h][:, :n].sum(-1) * other * size + weight[h] @ constant.max(-1)
        selects = _matrix_slip(own[:channels], U64) == _matrix_slip(out[h], U64) == 0
        exact = np.isin(weight[h], (0.0, 1.0)).all(-1) & selects
        steps = 8 + np.where(even[h], 0, 2 * n + 16) + (0 if selects else 2 * channels + 8)
        scale = np.abs(own[:channels]).sum(0).max() * np.abs(out[h]).sum(0).max()
        noise = noise + np.where(exact, 0.0, steps * U64 * (size * scale + constant.max()))
    far = np.abs(mixed - target).sum(-1)
    return _up((far + n * U64 * far) * size + rest + noise)
