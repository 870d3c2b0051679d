"""The compiler on one page: capture, enclose, plan, lower, assemble, certify.

Each stage reads only what the one before it gave. `compile` walks through them; where the bound of what was built is
larger than the tolerance, `Search` says what to try next: other shares of the tolerance, other tactics, another way of
writing the target.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np
import torch
from torch import nn

from ..arguments import is_number
from ..box import Box, Interval, boxes_of
from ..census import structural
from ..certificates.certificate import Proof, upper_text
from ..dtypes import shipped
from ..errors import ArgumentError, AttnforgeError, DomainError, PrecisionError
from ..frontends.module.regressor import regressor
from ..programs.interpret import values
from ..programs.ops import Apply
from ..programs.positions import prepared
from ..programs.program import Program
from ..progress import stages
from ..threads import one_thread
from .assemble import assemble
from .compiled import CompiledNetwork
from .derivation import proved
from .enclosure import taken_apart
from .layout import lower
from .plan import make_plan
from .propagation import NetworkBound
from .search import Attempt, Problem, Search, Task, Tolerance
from .shorten import shortened

if TYPE_CHECKING:
    from ..rasp.domain import Sequences
    from ..rasp.network.compiled import CompiledProgram

KERNEL_TRIES, KERNEL_ROOM = 3, 0.97  # a network is built again, for 3 % less, where the kernel proves a little more
PIECES_GAIN = 100.0  # times: eight pieces for a table of 256 anchors round 8 times less; more are rarely cut
LOST = 0.1  # of the range: a table that is off by more has lost the wave, whatever its rounding
ASIDE = 4  # tries in float64 before it is advised: what needs more is no advice to give in passing
SEEN = 4096  # points of the box that the range of the target is read from, for advice alone
Say = Callable[[str], None]  # told the name of every stage as it begins
Way = Callable[[], Program]  # one way of writing the target, made when it is wanted


@overload
def compile(
    target: Any,
    box: Box | Mapping[str, Interval] | tuple[Box, ...],
    eps: float | None = None,
    *,
    rtol: float = 0.0,
    dtype: torch.dtype | str = torch.float32,
    strict: bool = False,
    proof: Proof = "analysis",
    progress: Callable[[str], None] | None = None,
) -> CompiledNetwork: ...


@overload
def compile(
    target: Any,
    box: Sequences,
    *,
    dtype: torch.dtype | str = torch.float32,
    proof: Proof = "analysis",
    progress: Callable[[str], None] | None = None,
) -> CompiledProgram: ...


def compile(
    target: Any,
    box: Box | Mapping[str, Interval] | tuple[Box, ...] | Sequences,
    eps: float | None = None,
    *,
    rtol: float = 0.0,
    dtype: torch.dtype | str = torch.float32,
    strict: bool = False,
    proof: Proof = "analysis",
    progress: Callable[[str], None] | None = None,
) -> CompiledNetwork | CompiledProgram:
    """An attention-only network for a target, with |network - target| <= eps + rtol |target| certified on the box.

    `target` is a formula, a list of formulas (several outputs, last dimension) or a dict of them (outputs with names),
    a sympy expression or vector, a Python function of numbers (with a named box), a scikit-learn MLPRegressor, or a
    module or function of tensors (captured with torch.export); `box` bounds its input, a tuple of boxes the inputs of a
    function of several tensors. A dict such as {"x": (-1, 1)} is a box. `dtype` is what ships and what the certificate
    is for. If the tolerance cannot be proved, `PrecisionError` says what can be. With `proof="kernel"` the bound is
    proved a second time from the stored numbers (docs/kernel.md), and is what the kernel proves.

    A token program (`attnforge.rasp`) has a `rasp.Sequences` for its box and needs no eps: its network is exact, or,
    where the output is a mean, within a bound that is compared with eps where one is given. A dict of them becomes one
    network with several outputs.

    >>> net = compile("sin(x*y) + exp(-x**2)/y", Box(x=(-1, 1), y=(0.5, 2)), eps=1e-3)
    >>> net.certificate.kind, net.bound <= 1e-3, net(torch.tensor([[0.5, 1.0]])).shape
    ('certified', True, torch.Size([1]))
    """
    if proof not in ("analysis", "kernel"):
        raise ArgumentError(f"proof must be 'analysis' or 'kernel', got {proof!r}")
    if not isinstance(box, (Box, tuple)):
        from ..rasp.domain import Sequences as Domain

        if isinstance(box, Domain):
            from ..rasp.network.pipeline import compile_program as compile_tokens

            if rtol or strict:
                raise ArgumentError(
                    "a token program takes neither rtol nor strict: give eps where its output is a mean"
                )
            wanted = math.inf if eps is None else tolerance_of(eps, 0.0, dtype).eps
            made: CompiledProgram = compile_tokens(target, box, shipped(dtype), progress, proof)
            if cast(float, made.bound) > wanted:
                raise PrecisionError(
                    f"the output is certified to {made.bound:.3g} in {made.certificate.dtype}, and eps = {eps:g} was "
                    "asked for; use a smaller max_length or dtype=torch.float64", reachable=made.bound,
                )  # fmt: skip
            return made
    if str(type(target).__module__).startswith("attnforge.rasp."):  # not loaded for the sake of this question
        raise ArgumentError(
            "a token program is compiled for sequences, af.compile(program, rasp.Sequences('abcd', max_length=10)), "
            f"got a box: {box!r}"
        )
    boxes = boxes_of(box)
    tolerance, several = tolerance_of(eps, rtol, dtype), boxes if len(boxes) > 1 else ()
    net = compiled(ways(target, boxes), tolerance, several, progress)
    if proof == "kernel":
        net = by_kernel(net, lambda t: compiled(ways(target, boxes), t, several, progress), tolerance)
    net.strict, net.outputs = strict, tuple(map(str, target)) if isinstance(target, Mapping) else ()
    return net


def by_kernel(
    net: CompiledNetwork, again: Callable[[Tolerance], CompiledNetwork], wanted: Tolerance
) -> CompiledNetwork:
    """A network whose bound the kernel proves; compiled `again` for less where that is more than was wanted."""
    reached = math.inf
    for _ in range(KERNEL_TRIES):
        certificate = proved(net, net.certificate)
        if certificate.kernel is None:
            raise PrecisionError(f"the kernel proves no bound: {certificate.remark}; leave proof='kernel' out")
        bound, chosen = max(certificate.kernel, certificate.bound or 0.0), net.derivation
        if bound <= wanted.eps or wanted.rtol:
            net.attach(replace(certificate, bound=bound, proof="kernel"))
            net.derivation = chosen
            return net
        reached = min(reached, bound)
        net = again(replace(wanted, eps=KERNEL_ROOM * net.eps * min(wanted.eps / bound, 1.0)))
    raise PrecisionError(
        f"the kernel proves {reached:.3e}, not eps = {wanted.eps:g}; ask for that much, or leave proof='kernel' out",
        reachable=reached,
    )


def compile_program(program: Program, eps: float, dtype: torch.dtype = torch.float32) -> CompiledNetwork:
    """The network of a program: `compile` for what is captured already."""
    return compiled([lambda: program], tolerance_of(eps, 0.0, dtype))


def compiled(
    ways: list[Way], tolerance: Tolerance, boxes: tuple[Box, ...] = (), progress: Say | None = None
) -> CompiledNetwork:
    """A network that keeps the tolerance, for the first of several ways of writing the target that allows one."""
    with stages(progress) as say, one_thread():
        search = searched(ways, tolerance, boxes, say)
        if not search.done:
            raise search.refusal(_reachable(search, say), _wider(search, say))
        net = search.result()
    structural(net.network)
    return net


def searched(ways: list[Way], tolerance: Tolerance, boxes: tuple[Box, ...], say: Say) -> Search:
    """Everything that the compiler tries: each way of writing the target, then each with waves cut into pieces."""
    search = Search(tolerance)
    problems: list[Problem] = []
    for program in capture(ways, say):
        if search.knows(program):
            continue
        if search.done:  # with kinks in fused functions: functions of gates may be smaller, and are the next writing
            return _smaller(search, program, boxes, say)
        try:
            problem = enclose(program, tolerance, boxes, say)
            _attempts(search, problem, say)
        except (DomainError, PrecisionError) as error:  # the first writing is the target as given; others are tries
            if isinstance(error, DomainError) and not (problems or search.failures):
                raise
            search.failures.append(error)
            continue
        problems.append(problem)
        if search.done and not any(isinstance(op, Apply) and op.function.knots for op in program.ops):
            return search
    if search.done:
        return search
    if search.best is None:
        raise search.failures[0]
    for problem in problems:
        if not search.done and _wavy(search, problem):
            short = shortened(problem.program, problem.found)
            if short is not problem.program:
                _attempts(search, enclose(short, tolerance, boxes, say), say)
    return search


def _smaller(search: Search, program: Program, boxes: tuple[Box, ...], say: Say) -> Search:
    """The search that is done, or one over another writing, where that ends with a smaller network."""
    other = Search(search.tolerance)
    try:
        _attempts(other, enclose(program, search.tolerance, boxes, say), say)
    except (DomainError, PrecisionError):  # a writing that is no better
        return search
    return other if other.done and other.size < search.size else search


def _wavy(search: Search, problem: Problem) -> bool:
    """Whether pieces may help: a little is missing, or so much that waves were not followed at all."""
    assert search.best is not None
    output, bound = problem.found[problem.program.output], search.best.bound.bound
    width = float(np.max(output.high) - np.min(output.low))
    return bound <= PIECES_GAIN * search.tolerance.eps or bound >= LOST * width


def _attempts(search: Search, problem: Problem, say: Say, most: int | None = None) -> None:
    for task in itertools.islice(search.tasks(problem), most):
        search.learn(attempt(problem, task, say))


def _reachable(search: Search, say: Say) -> float | None:
    """A tolerance that the same search keeps, found by trying the writing that came nearest; None if there is none
    below the target's range."""
    assert search.best is not None
    assert search.home is not None
    program, eps = search.best.net.program, search.best.bound.bound
    seen = values(program, program.box.sample(SEEN))
    width = float((seen.amax(0) - seen.amin(0)).max())
    more = 2  # ever larger steps, so that there are few
    while eps < width:
        eps = float(upper_text(eps))
        if _kept(search.home, replace(search.tolerance, eps=eps), say):
            return eps
        eps, more = more * eps, 2 * more
    return None


def _wider(search: Search, say: Say) -> bool:
    """Whether float64 keeps the tolerance, in the writing that came nearest: nothing is advised that was not tried."""
    assert search.home is not None
    wanted = replace(search.tolerance, dtype=torch.float64)
    if search.tolerance.dtype == torch.float64:
        return False
    try:
        return _kept(enclose(search.home.program, wanted, search.home.boxes, say), wanted, say, ASIDE)
    except AttnforgeError:
        return False


def _kept(problem: Problem, tolerance: Tolerance, say: Say, most: int | None = None) -> bool:
    """Whether a search over one writing, of so many tries at most, keeps a tolerance."""
    search = Search(tolerance)
    _attempts(search, replace(problem, tolerance=tolerance), say, most)
    return search.done


def attempt(problem: Problem, task: Task, say: Say) -> Attempt:
    """Plan, lower and assemble as a task asks, then see what can be proved."""
    program, tolerance = problem.program, problem.tolerance
    say("plan")
    with np.errstate(over="ignore", invalid="ignore"):  # what the dtype cannot hold has no bound
        plan = make_plan(program, problem.found, problem.worth, tolerance.dtype, task.shares, task.tactics)
    say("lower")
    layout = lower(program, plan.sites)
    say("assemble")
    network = assemble(layout, plan.planned, tolerance.dtype)
    net = CompiledNetwork(
        layout, network, tolerance.dtype, tolerance.eps, problem.boxes, problem.grid, tolerance.rtol
    )  # fmt: skip
    useless = task.fewer is not None and net.size.anchors >= task.fewer
    if useless or not all(bool(torch.isfinite(p).all()) for p in net.state_dict().values()):  # beyond the dtype
        middle = 0.5 * (program.box.lower + program.box.upper).numpy().reshape(problem.found[0].low.shape[1:])
        return Attempt(net, None, NetworkBound(math.inf, math.inf, np.zeros(len(layout.sites) + 1), middle, middle, 0))
    say("certify")
    with np.errstate(over="ignore", invalid="ignore"):
        return Attempt(net, *net.analyse(stretches=(0.0,)))  # what does not fit is planned again


def ways(target: Any, boxes: tuple[Box, ...]) -> list[Way]:
    """The ways in which a target can be written as a program."""
    target = list(target.values()) if isinstance(target, Mapping) else regressor(target, boxes[0].names) or target
    tensors = isinstance(target, nn.Module) or (callable(target) and boxes[0].names is None)
    if isinstance(target, (str, list)) or not tensors:
        from ..frontends.formula.normal import WRITINGS
        from ..frontends.formula.program import capture_formula

        if len(boxes) != 1:
            raise ArgumentError("a formula has one box, with an interval for each variable")
        return [partial(capture_formula, target, boxes[0], style) for style in WRITINGS]
    from ..frontends.module.program import capture_module

    return [partial(capture_module, target, boxes if len(boxes) > 1 else boxes[0])]


def capture(ways: list[Way], say: Say) -> Iterator[Program]:
    """The target as programs, made ready for attention, each when it is asked for."""
    for write in ways:
        say("capture")
        yield prepared(write())


def enclose(program: Program, tolerance: Tolerance, boxes: tuple[Box, ...], say: Say) -> Problem:
    """The ranges of all values, on a grid fine enough that every one is finite."""
    say("enclose")
    apart, found, grid = taken_apart(program, tolerance.dtype)
    return Problem(apart, found, grid, tolerance, boxes)


def tolerance_of(eps: float | None, rtol: float, dtype: torch.dtype | str) -> Tolerance:
    """The tolerance that was asked for, or an error that names the argument."""
    if eps is None and not rtol:
        raise ArgumentError("how large may the error be? give eps, rtol or both, such as eps=1e-3")
    for name, value, positive in (("eps", eps, not rtol), ("rtol", rtol, False)):
        if value is None:
            continue
        if not is_number(value) or value < 0 or (positive and value == 0):  # type: ignore[operator]
            raise ArgumentError(f"{name} must be a {'positive' if positive else 'non-negative'} number, got {value!r}")
    return Tolerance(float(eps or 0.0), float(rtol), shipped(dtype))
