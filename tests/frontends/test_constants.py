"""Constants of a module are meant as real numbers, masks as they stand, and data does not leave torch unseen."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from flint import arb, ctx
from torch import Tensor

import attnforge as af
from attnforge.box import Box
from attnforge.compiler.pipeline import compile_program
from attnforge.frontends.module.program import capture_module
from attnforge.heads.token.bound import fixed_terms
from attnforge.programs.ops import Linear, Normalise
from attnforge.programs.program import Builder

WEIGHT = torch.tensor([[0.3, -1.7, 2.1], [0.81, 0.13, -0.4], [0.98, 3.3, 0.7]], dtype=torch.float64)
C = WEIGHT[:, 0]
CUBE = Box.cube(-1, 1, shape=3)


def dot(a: list[arb], b: list[arb]) -> arb:
    return sum((x * y for x, y in zip(a, b, strict=True)), arb(0))


def each(function: Callable[[arb], arb]) -> Callable[[], list[arb]]:
    return lambda: [function(arb(x)) for x in C.tolist()]


def column(function: Callable[[list[arb]], arb]) -> Callable[[], list[arb]]:
    return lambda: [function([arb(x) for x in entries]) for entries in WEIGHT.T.tolist()]


MADE: dict[str, tuple[Callable[[], Tensor], Callable[[], list[arb]]]] = {
    "exp": (lambda: torch.exp(C), each(lambda x: x.exp())),
    "quotient": (lambda: C / 3, each(lambda x: x / 3)),
    "minus exp": (lambda: -torch.exp(C), each(lambda x: -x.exp())),
    "power": (lambda: C**0.3, each(lambda x: x ** arb(0.3))),
    "sum": (lambda: WEIGHT.sum(0), column(lambda c: sum(c, arb(0)))),
    "mean": (lambda: WEIGHT.mean(0), column(lambda c: sum(c, arb(0)) / 3)),
    "norm": (lambda: WEIGHT.norm(dim=0), column(lambda c: dot(c, c).sqrt())),
    "softmax": (lambda: torch.softmax(WEIGHT, 0)[0], column(lambda c: c[0].exp() / sum((x.exp() for x in c), arb(0)))),
    "product": (lambda: (C[None] @ WEIGHT)[0], column(lambda c: dot([arb(x) for x in C.tolist()], c))),
}


@pytest.mark.parametrize("name", MADE)
def test_what_torch_rounds_in_a_constant_is_charged(name: str) -> None:
    made, meant = MADE[name]
    program = capture_module(lambda x: x * made(), CUBE)
    (op,) = (op for op in program.ops if isinstance(op, Linear))
    weight, off = np.diag(op.weights[0]), np.diag(op.slack[0])
    saved, ctx.prec = ctx.prec, 200
    try:
        for number, far, wanted in zip(weight.tolist(), off.tolist(), meant(), strict=True):
            assert abs(arb(number) - wanted) <= far <= 64 * 2.0**-53 * (1 + abs(number))
    finally:
        ctx.prec = saved


def test_a_network_with_rounded_constants_keeps_its_bound() -> None:
    """exp(0.81) as torch computes it is off by as much as the product rounds: the bound counts both."""
    c = torch.tensor(0.81, dtype=torch.float64)
    net = af.compile(lambda x: x * torch.exp(c), Box.cube(1, 2, shape=1), eps=1e-9, dtype="float64")
    x = torch.linspace(1, 2, 3001, dtype=torch.float64)[:, None]
    saved, ctx.prec = ctx.prec, 200
    try:
        factor = arb(0.81).exp()
        pairs = zip(x.flatten().tolist(), net(x).flatten().tolist(), strict=True)
        worst = max(float(abs(arb(point) * factor - arb(value))) for point, value in pairs)
    finally:
        ctx.prec = saved
    assert net.bound is not None and 5e-16 < worst <= net.bound  # 4.99e-16 was certified once


def test_a_decision_by_rounded_constants_is_refused_where_it_is_close() -> None:
    assert len(capture_module(lambda x: torch.where(torch.exp(C) > 2, x, 2 * x), CUBE).ops) == 2
    with pytest.raises(af.UnsupportedOperation, match="too close to call"):
        capture_module(lambda x: torch.where(torch.exp(C) - torch.exp(C) >= 0, x, 2 * x), CUBE)


def test_constants_that_nothing_is_known_of_are_told() -> None:
    with pytest.warns(UserWarning, match="computes constants with linalg_inv_ex"):
        capture_module(lambda x: x @ torch.linalg.inv(WEIGHT), CUBE)


@pytest.mark.parametrize("leave", [
    lambda x: x + float(np.asarray(x.detach()).max() > 0.99999),
    lambda x: x + float(max(map(max, x.tolist())) > 0.99999),
    lambda x: x + torch.from_numpy(np.where(x.detach().numpy() > 0.99999, 1.0, 0.0)),
    lambda x: x + float(np.from_dlpack(x.detach()).max() > 0.99999),
])  # fmt: skip
def test_data_that_leaves_torch_is_refused(leave: Callable[[Tensor], Tensor]) -> None:
    """What Python makes of a number is in no graph: at the points that were tried it was 0."""
    with pytest.raises(af.UnsupportedOperation, match="depend on data out of torch"):
        capture_module(leave, CUBE)


def masked(x: Tensor) -> Tensor:
    query, key, value = x[..., :1], x[..., 1:2], x[..., 2:]
    return torch.softmax(query @ key.mT + torch.tensor([[0.0, -1e8], [-1e8, 0.0]]), -1) @ value


def test_a_finite_mask_hides_only_where_scores_are_small() -> None:
    """At 7072 a hidden token is seen; no random point shows it."""
    with pytest.raises(af.UnsupportedOperation, match="hides tokens by a mask of -1e\\+08"):
        capture_module(masked, Box.cube(-7072.0, 7072.0, shape=(2, 3)))
    assert capture_module(masked, Box.cube(-100.0, 100.0, shape=(2, 3))).tokens == 2


def test_a_mean_over_tokens_is_that_of_real_numbers() -> None:
    """1/3 is no float: a matrix is meant to 8 roundings, and the bound counts them."""
    make, matrix = Builder(Box.cube(1, 2, shape=(3, 1)), 3), np.full((3, 3), 1 / 3)
    net = compile_program(make.program(make.mix(0, matrix), "mean"), 1e-9, dtype=torch.float64)
    (heads,) = net.network.layers[1].heads()  # type: ignore[operator, union-attr]
    of_the_floats = sum(term.value for term in fixed_terms(heads, matrix, 1, 1.0, 2.0))
    assert net.bound is not None and net.bound >= of_the_floats + 2 * 2.0**-50


def test_products_that_underflow_are_no_zeros() -> None:
    """The weight is off by 1e-19, the box 1e-310: their product is below float64, and not 0."""
    net = af.compile("1.0000000000000000001*x", {"x": (1e-310, 2e-310)}, eps=1e-3, dtype="float64")
    assert net.bound is not None and net.bound > 2e-329


class Norm(torch.nn.Module):
    """A module that is made for float32, with the norm of one's choice."""

    def __init__(self, norm: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32):
        super().__init__()
        self.norm, self.weight = norm, torch.nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.weight


@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        (lambda x: torch.nn.functional.rms_norm(x, (3,)), af.UnsupportedOperation, "give one, or use torch.nn.RMSNorm"),
        (lambda x: x + torch.finfo(x.dtype).eps, af.ArgumentError, "numbers that torch does not see"),
        (lambda x: x @ WEIGHT.bfloat16().to(x.dtype), af.UnsupportedOperation, "it rounds constants to bfloat16"),
        (lambda x: x * torch.exp(C.half()).to(x.dtype), af.UnsupportedOperation, "it rounds constants to float16"),
        (lambda x: x.half().to(x.dtype), af.UnsupportedOperation, "it rounds data to float16"),
        (lambda x: x.softmax(-1, dtype=torch.bfloat16).float(), af.UnsupportedOperation, "it rounds data to bfloat16"),
        (lambda x: x.cumsum(-1, dtype=torch.half).float(), af.UnsupportedOperation, "it rounds data to float16"),
        (lambda x: x.type_as(C.half()).float(), af.UnsupportedOperation, "it rounds data to float16"),
        (lambda x: x.cumsum(-1, dtype=torch.int32).float(), af.UnsupportedOperation, "it turns data into integers"),
        (lambda x: torch.zeros_like(x).long().copy_(x), af.UnsupportedOperation, "it turns data into integers"),
        (lambda x: (x + 1j).real, af.UnsupportedOperation, "complex"),
    ],
)
def test_what_depends_on_the_dtype_is_refused(
    target: Callable[[Tensor], Tensor], error: type[Exception], words: str
) -> None:
    """In float32 such a target is another function than the one in float64 that would be certified."""
    with pytest.raises(error, match=words):
        capture_module(Norm(target), Box.cube(1e-4, 2e-4, shape=3))


def test_a_target_in_float64_that_rounds_to_float32_is_refused() -> None:
    target = Norm(lambda x: x.float().double(), torch.float64)
    with pytest.raises(af.UnsupportedOperation, match="it rounds data to float32, and the target is made for float64"):
        capture_module(target, CUBE)
    assert len(capture_module(Norm(lambda x: x.float()), CUBE).ops) == 1  # made for float32, which holds it


def test_casts_that_change_nothing_are_free() -> None:
    whole = torch.tensor([1.0, 2.5, -3.0])
    assert len(capture_module(lambda x: x * whole.bfloat16().to(x.dtype), CUBE).ops) == 2
    assert len(capture_module(lambda x: x.double().to(torch.float32), CUBE).ops) == 1
    half = Norm(lambda x: torch.nn.functional.rms_norm(x, (3,)), torch.float64)
    (norm,) = (op for op in capture_module(half, CUBE).ops if isinstance(op, Normalise))
    assert norm.eps == torch.finfo(torch.float64).eps


NEAR, FAR = 25.0, 25.0 - 1e-11
ROUNDED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[arb, arb], list[arb]]]] = {
    "difference": (lambda x, c: x - c, lambda x, c: [x - c]),
    "multiple": (lambda x, c: torch.add(x, c, alpha=3.0), lambda x, c: [x + 3 * c]),
    "clamp": (lambda x, c: torch.clamp(x, max=c + 0.5), lambda x, c: [min(x, c + arb(0.5))]),
    "exponent": (lambda x, c: x**c, lambda x, c: [x**c]),
    "base": (lambda x, c: c**x, lambda x, c: [c**x]),
    "batch norm": (
        lambda x, c: torch.nn.functional.batch_norm(x, c, torch.ones_like(c), eps=0.0),
        lambda x, c: [x - c],
    ),
    "row of a softmax": (
        lambda x, c: torch.stack([torch.cat([x, x * 0], -1), torch.stack([c, 0 * c], -1).expand(len(x), 2)], 1)
        .softmax(-1)[:, 1],
        lambda x, c: [c.exp() / (1 + c.exp()), 1 / (1 + c.exp())],
    ),
    "row of a layer norm": (
        lambda x, c: torch.nn.functional.layer_norm(
            torch.stack([torch.cat([x, -x], -1), torch.stack([c, 0 * c], -1).expand(len(x), 2)], 1), (2,), eps=1.0
        )[:, 1],
        lambda x, c: [sign * c / 2 / ((c / 2) ** 2 + 1).sqrt() for sign in (1, -1)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUNDED)
def test_constants_that_cancel_are_charged_wherever_they_go(name: str) -> None:
    """A difference of exponentials of which five digits are left: the number that is meant is 1e-5 off."""
    target, meant = ROUNDED[name]
    near, far = (torch.tensor([end], dtype=torch.float64) for end in (NEAR, FAR))
    net = af.compile(
        lambda x: target(x, torch.exp(near) - torch.exp(far)), Box.cube(0.5, 2, shape=1), eps=1e-2, dtype="float64"
    )
    x = torch.linspace(0.5, 2, 9, dtype=torch.float64)[:, None]
    saved, ctx.prec = ctx.prec, 200
    try:
        constant = arb(NEAR).exp() - arb(FAR).exp()
        wanted = [meant(arb(point), constant) for point in x.flatten().tolist()]
        rows = zip(wanted, net(x).tolist(), strict=True)
        worst = max(float(abs(a - arb(b))) for row, out in rows for a, b in zip(row, out, strict=True))
    finally:
        ctx.prec = saved
    assert net.bound is not None and 1e-7 < worst <= net.bound


def test_what_may_be_divided_by_zero_is_refused() -> None:
    a, b, c = (torch.tensor(x, dtype=torch.float64) for x in (0.1, 0.2, 0.3))
    with pytest.raises(af.UnsupportedOperation, match="was rounded, and that may be 0"):
        capture_module(lambda x: x / ((a + b) - c), CUBE)
    with pytest.raises(af.UnsupportedOperation, match="which quantile it gives is a constant that was rounded"):
        capture_module(lambda x: x.quantile(a * b, -1), CUBE)


@pytest.mark.parametrize("target", [
    lambda x: torch.copysign(x + 1, 0 * x),
    lambda x: torch.copysign(x + 1, x.clamp(min=0)),
    lambda x: x + torch.signbit(x.clamp(min=0)).double(),
])  # fmt: skip
def test_the_sign_of_zero_is_not_read(target: Callable[[Tensor], Tensor]) -> None:
    """0 * x is minus zero below 0, on a part of the box that no random point meets."""
    with pytest.raises(af.UnsupportedOperation, match="settled"):
        capture_module(target, Box.cube(-1e-9, 1, shape=3))


@pytest.mark.parametrize("target", [
    lambda x: x + torch.signbit(0 * x).double(),
    lambda x: x + torch.atan(1 / (0 * x)),
    lambda x: x + torch.tanh(torch.rsqrt(0 * x)),
])  # fmt: skip
def test_the_sign_of_a_zero_that_was_data_is_not_read(target: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(af.UnsupportedOperation, match="the sign of a constant 0"):
        capture_module(target, Box.cube(-1e-9, 1, shape=3))
    assert len(capture_module(lambda x: x + torch.log(torch.zeros(3)).exp(), Box.cube(-1, 1, shape=3)).ops) > 0


def test_pieces_that_meet_up_to_rounding_are_charged_with_the_gap() -> None:
    """exp(0.3) as torch has it is not the number that is meant, and so the pieces are 2e-17 apart."""
    number = math.exp(0.3)
    program = capture_module(lambda x: torch.where(x > 0.3, torch.exp(x), number), Box.cube(0, 1, shape=1))
    saved, ctx.prec = ctx.prec, 200
    try:
        gap = float(abs(arb(0.3).exp() - arb(number)))
    finally:
        ctx.prec = saved
    assert 0 < gap <= max(float(op.slack[-1].max()) for op in program.ops if isinstance(op, Linear)) < 1e-14
    joined = capture_module(lambda x: torch.where(x > 0, x.sin(), x), Box.cube(-1, 1, shape=1))
    assert all(not off.any() for op in joined.ops if isinstance(op, Linear) for off in op.slack)


def test_the_ends_of_a_clipped_logit_are_those_of_real_numbers() -> None:
    """In float64 1 - 1e-6 is off by 2e-17, and the logit there by 3e-11."""
    net = af.compile(lambda x: torch.logit(x, eps=1e-6), Box.cube(0.5, 2, shape=1), eps=1e-8, dtype="float64")
    saved, ctx.prec = ctx.prec, 200
    try:
        eps = arb(1e-6)
        wanted = ((1 - eps) / eps).log()
        worst = float(abs(wanted - arb(net(torch.full((1, 1), 1.5, dtype=torch.float64)).item())))
    finally:
        ctx.prec = saved
    assert net.bound is not None and worst <= net.bound
    with pytest.raises(af.UnsupportedOperation, match="where 1 - eps is not 1"):
        capture_module(lambda x: torch.logit(x, eps=1e-12), CUBE)
