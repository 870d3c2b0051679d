"""Taylor tables: the truth at 60 digits lies inside, without tolerance, and a perturbed table is caught."""

from __future__ import annotations

import dataclasses
import math
import threading

import numpy as np
import pytest
import torch
from flint import arb, arb_series, ctx
from hypothesis import given
from hypothesis import strategies as st

from attnforge.errors import ArgumentError, DomainError
from attnforge.functions import registry as F
from attnforge.functions.directed import high_end, low_end, precision, split

SPAN = {
    "log": (1e-6, 1e6),
    "log2": (1e-6, 1e6),
    "log10": (1e-6, 1e6),
    "log1p": (-0.999, 1e4),
    "sqrt": (0.0, 1e6),
    "xlogx": (0.0, 1e6),
    "rsqrt": (1e-6, 1e6),
    "reciprocal": (1e-4, 1e4),
    "asin": (-1.0, 1.0),
    "acos": (-1.0, 1.0),
    "acosh": (1.0, 1e3),
    "atanh": (-0.999, 0.999),
    "tan": (-1.57, 1.57),
    "power(2.5)": (0.0, 100.0),
    "power(-0.3)": (1e-3, 100.0),
    "power(-3)": (-50.0, -1e-3),
    "shifted_log(1e-20)": (0.0, 1e6),
}
EXTRA = (
    "power(0)", "power(5)", "power(-3)", "power(2.5)", "power(-0.3)", "leaky_relu(0.2)", "elu(1.5)",
    "shifted_log(1e-20)",
)  # fmt: skip
LINES = "piecewise_linear([-2.0, -0.5, 1.0, 4.0], [1.0, -1.0, 0.25, 0.5])"
ALL = (*F.names(), *EXTRA, LINES)


def inside(fn: F.Univariate, table: F.Taylor, row: int, y: float) -> bool:
    """Whether the 60-digit value at y is compatible with row `row` of the table; exact arithmetic throughout."""
    with precision(400):
        value = F.reference(fn, y)
        if not (value.upper() >= table.low[row] and value.lower() <= table.high[row]):
            return False
        t = arb(y) - arb(float(table.centre[row]))
        if not abs(t) <= float(table.radius[row]):
            return False
        if not math.isfinite(table.remainder[row]) or not np.isfinite(table.error[row]).all():
            return True
        middle, width = arb(0), arb(0)
        for j in range(table.order + 1):
            middle += float(table.coefficient[row, j]) * t**j
            width += float(table.error[row, j]) * abs(t) ** j
        width += float(table.remainder[row]) * abs(t) ** (table.order + 1)
        # `not >` rather than `<=`: the reference is a ball itself, of radius about 1e-60 of its value
        return not abs(value - middle) > width


@st.composite
def function_and_cell(draw: st.DrawFn) -> tuple[F.Univariate, float, float]:
    fn = F.get(draw(st.sampled_from(ALL)))
    lo, hi = SPAN.get(fn.name, (-40.0, 40.0))
    a = draw(st.floats(lo, hi, allow_subnormal=False))
    width = draw(st.sampled_from([0.0, 1e-12, 1e-3, 0.05, 0.5, 5.0])) * draw(st.floats(0, 1)) * max(1.0, abs(a))
    b = min(a + width, hi, *(k for k in fn.knots if k > a)) if fn.knots else min(a + width, hi)
    return fn, a, b


@given(function_and_cell(), st.integers(0, 12), st.lists(st.floats(0, 1), max_size=4))
def test_truth_lies_in_the_table(case: tuple[F.Univariate, float, float], order: int, inner: list[float]) -> None:
    fn, a, b = case
    table = F.taylor(fn, np.array([a]), np.array([b]), order)
    assert table.coefficient.shape == (1, order + 1) and table.order == order
    assert np.isfinite(table.low).all() and np.isfinite(table.high).all()
    for s in (0.0, 1.0, *inner):
        assert inside(fn, table, 0, min(max(a + s * (b - a), a), b))


@pytest.mark.parametrize("name", ALL)
def test_narrow_cells_are_resolved(name: str) -> None:
    """On cells of the usual width the tables are finite and as accurate as float64 allows."""
    fn = F.get(name)
    lo, hi = SPAN.get(name, (-8.0, 8.0))
    a = lo + 0.3 * (hi - lo) + 0.001
    cell = np.array([a, a + 0.01 * min(1.0, abs(a))])
    table = F.taylor(fn, cell[:1], cell[1:], 8)
    assert np.isfinite(table.remainder).all()
    tail = table.remainder * table.radius**9
    assert (tail <= 1e-12 * np.maximum(1.0, np.abs(table.coefficient[:, 0]))).all()
    assert (table.error <= np.spacing(np.abs(table.coefficient)) * 1.01 + 1e-28).all()


@pytest.mark.parametrize("column", ["coefficient", "error", "remainder", "low", "radius"])
def test_a_perturbed_table_is_caught(column: str) -> None:
    fn, ends = F.get("gelu"), np.linspace(-2, 2, 9)
    table = F.taylor(fn, ends[:-1], ends[1:], 5)
    changed = np.array(getattr(table, column))
    if column == "coefficient":
        changed[3, 2] *= 1 + 1e-6
    elif column == "low":
        changed[3] = np.nextafter(table.high[3], np.inf)
    else:
        changed[3] = 0.0
    if column == "error":  # rounding errors are only seen where the remainder does not hide them
        table = dataclasses.replace(table, remainder=np.zeros(8))
    wrong = dataclasses.replace(table, **{column: changed})
    points = np.linspace(ends[3], ends[4], 41)
    assert not all(inside(fn, wrong, 3, float(y)) for y in points)
    if column != "error":
        assert all(inside(fn, table, 3, float(y)) for y in points)


ENDS = [("sqrt", 0.0), ("xlogx", 0.0), ("power(0.3)", 0.0), ("asin", -1.0), ("acosh", 1.0)]


@pytest.mark.parametrize(("name", "at"), ENDS)
def test_branch_points_have_a_range_but_no_remainder(name: str, at: float) -> None:
    table = F.taylor(name, np.array([at]), np.array([at + 0.01]), 4)
    assert np.isinf(table.remainder[0])
    value = F.reference(name, at + 0.01)
    assert np.isfinite([table.low[0], table.high[0]]).all()
    assert table.high[0] - table.low[0] <= 1.01 * float(abs(value - F.reference(name, at)))


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "softplus", "logsigmoid", "silu", "gelu_tanh", "mish", "cosh"])
@pytest.mark.parametrize("y", [-700.0, 700.0])
def test_far_out_the_balls_stay_useful(name: str, y: float) -> None:
    table = F.taylor(name, np.array([y - 0.1]), np.array([y + 0.1]), 6)
    assert np.isfinite(table.error).all() and np.isfinite(table.remainder).all()
    scale = np.abs(table.coefficient[0]).max()
    assert table.error.max() <= 1e-15 * scale + 1e-300 and table.remainder[0] <= scale + 1e-300


@pytest.mark.parametrize("name", ["erf", "erfc", "gelu"])
@pytest.mark.parametrize("y", [-40.0, 40.0])
def test_gaussian_tails_stay_useful(name: str, y: float) -> None:
    table = F.taylor(name, np.array([y - 0.01]), np.array([y + 0.01]), 6)
    assert table.error.max() <= 1e-14 and table.remainder[0] <= 1e-200
    assert table.high[0] - table.low[0] <= 0.0201


def test_a_cell_takes_the_branch_of_its_own_side() -> None:
    table = F.taylor("abs", np.array([-1.0, 0.0]), np.array([0.0, 2.0]), 2)
    assert table.coefficient[:, 1].tolist() == [-1.0, 1.0]
    assert (table.remainder < 1e-300).all() and table.low.tolist() == [0.0, 0.0]
    with pytest.raises(ArgumentError, match="kink of abs at 0"):
        F.taylor("abs", np.array([-1.0]), np.array([1.0]), 2)


def planck() -> F.Univariate:
    """A function that is not registered, as the compiler makes them: series and ball are all it has."""
    return F.Univariate(
        "1/(exp(y)-1)",
        lambda y: 1 / torch.expm1(y),
        lambda x: 1 / (x.exp() - 1),
        lambda x: 1 / x.expm1(),
        F.Domain(poles=(0.0,)),
    )


def test_composites_get_tables_and_ranges() -> None:
    fn, ends = planck(), np.linspace(0.5, 3, 33)
    table = F.taylor(fn, ends[:-1], ends[1:], 6)
    for row, y in enumerate(ends[:-1] + 0.01):
        assert inside(fn, table, row, float(y))
    low, high = F.enclose(fn, 0.5, 3.0)
    assert low <= 1 / math.expm1(3) and 1 / math.expm1(0.5) <= high
    assert high - low <= (1 / math.expm1(0.5) - 1 / math.expm1(3)) * (1 + 1e-7)
    # python-flint refuses the division on a ball that holds the pole: unknown, not an exception
    wild = F.taylor(fn, np.array([-1.0]), np.array([1.0]), 3)
    assert np.isinf(wild.remainder[0]) and np.isinf(wild.high[0])
    with pytest.raises(DomainError, match="pole at y = 0"):
        F.check_domain(fn, -1, 1)
    hidden = dataclasses.replace(fn, name="hidden pole", domain=F.Domain())
    with pytest.raises(DomainError, match="cannot be shown to be bounded"):
        F.check_domain(hidden, -1, 1.5)


def test_a_short_series_is_unknown_not_zero() -> None:
    lossy = F.Univariate("lossy", torch.sin, lambda x: arb_series(x.sin().coeffs()[:2], prec=2), arb.sin)
    table = F.taylor(lossy, np.array([0.5]), np.array([0.6]), 3)
    assert np.isinf(table.error[0, 2:]).all() and np.isinf(table.remainder[0])
    assert np.isfinite([table.low[0], table.high[0]]).all()


# ---- a user's own callable


def bump(y: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + y * y)


@given(st.floats(-5, 5), st.floats(0, 2), st.integers(0, 6), st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_a_callable_stays_within_its_chord(a: float, width: float, order: int, inner: list[float]) -> None:
    fn = F.from_callable(bump, second_derivative=2.0)
    table = F.taylor(fn, np.array([a]), np.array([a + width]), order)
    for s in (0.0, 1.0, *inner):
        y = min(max(a + s * width, a), a + width)
        with precision(400):
            value, t = 1 / (1 + arb(y) ** 2), arb(y) - arb(float(table.centre[0]))
            line = sum((float(c) * t**j for j, c in enumerate(table.coefficient[0])), arb(0))
            assert abs(value - line) <= float(table.error[0, 0])
            assert table.low[0] <= value.lower() and value.upper() <= table.high[0]
    assert table.error[0, 0] >= (table.radius[0] ** 2)
    low, high = F.enclose(fn, a, a + width)
    assert low <= bump(torch.tensor(a)).item() + 1e-7 and high >= low


def test_a_false_second_derivative_is_visible() -> None:
    fn = F.from_callable(bump, second_derivative=0.01)
    table = F.taylor(fn, np.array([-1.0]), np.array([1.0]), 1)
    assert abs(1.0 - table.coefficient[0, 0]) > table.error[0, 0]


def test_numpy_callables_work_and_others_explain() -> None:
    fn = F.from_callable(lambda y: np.sin(np.asarray(y)), second_derivative=1.0, name="npsin")
    y = torch.tensor([[0.5, 1.0]])
    assert torch.equal(fn(y), torch.from_numpy(np.sin(y.numpy())))
    for bad in (lambda y: math.sin(y), lambda y: y.sum(), lambda y: 1.0, lambda y: y > 0, lambda y: y[:1]):
        with pytest.raises(ArgumentError, match="must"):
            F.from_callable(bad, name="bad")(torch.ones(3))
    with pytest.raises(ArgumentError, match="finite"):
        F.taylor(F.from_callable(torch.log, second_derivative=1.0), np.array([-1.0]), np.array([1.0]), 2)


def test_without_a_second_derivative_nothing_is_certified() -> None:
    fn = F.get(bump)
    assert not fn.certifiable and F.from_callable(bump, second_derivative=2).certifiable
    assert F.check_domain(fn, -1, 1) is None
    for ask in (
        lambda: F.taylor(fn, np.zeros(1), np.ones(1), 2),
        lambda: F.enclose(fn, 0, 1),
        lambda: F.reference(fn, 0.5),
    ):
        with pytest.raises(ArgumentError):
            ask()


def test_callables_are_equal_by_identity_not_by_name() -> None:
    one, two = (
        F.from_callable(lambda y: y, name="f", second_derivative=0),
        F.from_callable(lambda y: 2 * y, name="f", second_derivative=0),
    )
    assert one != two and one == dataclasses.replace(one)
    cells = np.zeros(1), np.ones(1)
    assert F.taylor(one, *cells, 1).coefficient[0, 1] == 1 and F.taylor(two, *cells, 1).coefficient[0, 1] == 2


# ---- rounding and the cache


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(0, 1e300))
def test_balls_round_outward(mid: float, rad: float) -> None:
    with precision(200):
        ball = arb(mid, rad) / 3
        assert arb(low_end(ball)) <= ball.lower() if math.isfinite(low_end(ball)) else low_end(ball) < 0
        assert arb(high_end(ball)) >= ball.upper() if math.isfinite(high_end(ball)) else high_end(ball) > 0
        middle, width = (float(x[0]) for x in split([ball]))
        assert arb(middle) + arb(width) >= ball.upper() and arb(middle) - arb(width) <= ball.lower()


def test_float_of_a_ball_rounds_its_midpoint_to_nearest() -> None:
    """What `rounding` relies on, checked for the installed python-flint: ties go to even, on both signs."""
    with precision(200):
        half = arb(2) ** -53
        for sign in (1, -1):
            assert float(sign * (1 + half)) == sign and float(sign * (1 + half + half**2)) == sign * (1 + 2**-52)
            assert float(sign * (1 + 3 * half)) == sign * (1 + 2**-51)
        assert float(arb(2) ** -1080) == 0.0 and math.isinf(float(arb(2) ** 1024))
        assert low_end(arb(2) ** 1024) == np.finfo(np.float64).max and high_end(arb(2) ** 1024) == math.inf
        assert (low_end(arb.nan()), high_end(arb.nan())) == (-math.inf, math.inf)


def test_tables_are_cached_and_read_only() -> None:
    ends = np.linspace(0, 1, 5)
    table = F.taylor("sin", ends[:-1], ends[1:], 3)
    assert F.taylor("sin", ends[:-1].copy(), ends[1:].copy(), 3) is table
    with pytest.raises(ValueError, match="read-only"):
        table.coefficient[0, 0] = 1.0


def test_the_context_of_python_flint_is_left_alone() -> None:
    saved = ctx.prec, ctx.cap
    ends = np.linspace(0.1, 1, 50)
    results: list[F.Taylor] = []
    workers = [
        threading.Thread(target=lambda k=k: results.append(F.taylor("gelu", ends[:-1] + k, ends[1:] + k, 4 + k)))
        for k in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 4 and (ctx.prec, ctx.cap) == saved
    assert all(np.isfinite(table.remainder).all() for table in results)


@pytest.mark.parametrize("order", [-1, 1.5, True, 100])
def test_bad_orders(order: object) -> None:
    with pytest.raises(ArgumentError, match="order"):
        F.taylor("sin", np.zeros(1), np.ones(1), order)  # type: ignore[arg-type]


def test_bad_cells() -> None:
    for lo, hi in (
        (np.zeros(2), np.ones(3)),
        (np.ones(1), np.zeros(1)),
        (np.zeros(0), np.zeros(0)),
        (np.zeros((1, 1)),) * 2,
    ):
        with pytest.raises(ArgumentError, match="lo"):
            F.taylor("sin", lo, hi, 3)
    with pytest.raises(ArgumentError, match="finite"):
        F.taylor("sin", np.array([np.nan]), np.ones(1), 3)


@pytest.mark.parametrize("threshold", [1.0, 2.0, 20.0])
def test_a_cell_that_reaches_a_jump_holds_both_branches(threshold: float) -> None:
    """Its centre lies before the jump, where softplus has one branch; beyond it the function is y."""
    fn, ends = F.parse(f"softplus({threshold})"), (threshold - 4, threshold + 1)
    table = F.taylor(fn, np.array(ends[:1]), np.array(ends[1:]), 6)
    balls = [arb(c, e) for c, e in zip(table.coefficient[0], table.error[0], strict=True)]
    for y in np.linspace(*ends, 41).tolist():
        exact = arb(y) if y > threshold else (1 + arb(y).exp()).log()
        step = arb(y) - arb(table.centre[0])
        found = sum((ball * step**k for k, ball in enumerate(balls)), arb(0))
        assert (found + arb(0, table.remainder[0]) * step**7).overlaps(exact)
