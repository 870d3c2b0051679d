"""The compiler of token programs on one page: normal form, facts, plan, weights, proof."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ...census import structural
from ...certificates.certificate import Proof
from ...dtypes import dtype_name, shipped
from ...errors import ArgumentError, AttnforgeError, DomainError, PrecisionError
from ...progress import stages
from ...threads import one_thread
from ..domain import Sequences
from ..language import Operator, Select, SOp, walk
from ..text import as_program
from .assemble import assemble
from .compiled import CompiledProgram
from .data import tabulated
from .derivation import proved
from .facts import Facts
from .layout import position_table
from .normal import normal
from .plan import make_plan
from .proof import HeadError
from .several import CompiledPrograms, named

REFINED = 3  # halvings, at least, of the range in which the longest length is that can be proved: to an eighth of it
SEARCHED = 20.0  # seconds of a processor after which the longest length need not be found to the token


def compile_program(
    program: object,
    domain: Sequences,
    dtype: torch.dtype = torch.float32,
    progress: Callable[[str], None] | None = None,
    proof: Proof = "analysis",
) -> Any:
    """An attention-only network that computes a token program on every sequence of a domain, with the proof; or several
    programs, given as a dict of them.

    With `proof="kernel"` the kernel proves it too, from what a file of it holds (docs/kernel.md).

    >>> from attnforge import rasp
    >>> net = compile_program(rasp.library.reverse(), rasp.Sequences("abcd", max_length=10))
    >>> net(["a", "b", "c"]), net.certificate.kind
    (['c', 'b', 'a'], 'exact')
    """
    if isinstance(program, Mapping):
        return _several(program, domain, shipped(dtype), progress, proof)
    given = as_program(program)
    with stages(progress) as say, one_thread():
        try:
            net = _built(given, domain, shipped(dtype), say)
            say("certify")
            net.attach(net.recertify())
            if proof == "kernel":
                _by_kernel(net)
        except HeadError as error:
            found = _unproved(
                lambda shorter: _built(given, shorter, shipped(dtype), _quiet).prove(), domain, dtype, error
            )
            raise found from error
        except RecursionError:
            raise _too_deep(given) from None
    structural(net.network)
    return net.eval()


def _several(
    programs: Mapping[Any, object], domain: Sequences, dtype: torch.dtype, progress: Callable[[str], None] | None,
    proof: Proof,
) -> CompiledPrograms:  # fmt: skip
    """One network for several programs, each output proved."""
    given = {name: as_program(programs[name]) for name in named(list(programs))}
    if proof == "kernel":
        raise ArgumentError("the kernel proves one output: take net['name'] of a network that is proved by analysis")
    with stages(progress) as say, one_thread():
        try:
            net = _built_together(given, domain, dtype, say)
            say("certify")
            net.attach(net.recertify())
        except HeadError as error:
            found = _unproved(lambda shorter: _built_together(given, shorter, dtype, _quiet).recertify(),
                              domain, dtype, error, "these programs")  # fmt: skip
            raise found from error
        except RecursionError:
            raise _too_deep(max(given.values(), key=lambda program: len(walk(program)))) from None
    structural(net.network)
    return net.eval()


def _built_together(
    programs: Mapping[str, SOp], domain: Sequences, dtype: torch.dtype, say: Callable[[str], None]
) -> CompiledPrograms:
    say("capture")
    plain = {name: _plain(program, domain) for name, program in programs.items()}
    say("enclose")
    outputs = [normal(program, domain) for program in plain.values()]
    return CompiledPrograms(*_assembled(Facts(outputs[0], domain, outputs), dtype, say, plain))


def _quiet(stage: str) -> None:
    """Tell nobody about a stage."""


def _too_deep(program: SOp) -> DomainError:
    return DomainError(
        f"the op {program.label} is too deep: its {len(walk(program))} ops stand in each other further than Python "
        "can follow; put parts of it into tables (rasp.apply of a dictionary)"
    )


def _built(program: SOp, domain: Sequences, dtype: torch.dtype, say: Callable[[str], None]) -> CompiledProgram:
    say("capture")
    plain = _plain(program, domain)
    say("enclose")
    return CompiledProgram(*_assembled(Facts(normal(plain, domain), domain), dtype, say, plain))


def _plain(program: SOp, domain: Sequences) -> SOp:
    """The program with its Python functions as tables."""
    return tabulated(program, lambda asking: _ask_all(Facts(normal(asking, domain), domain)))


def _assembled(facts: Facts, dtype: torch.dtype, say: Callable[[str], None], meant: Any) -> tuple[Any, ...]:
    """Facts, what they are of, layout, network and positions."""
    say("plan")
    plan = make_plan(facts, dtype)
    say("assemble")
    layout, network = assemble(plan, facts, dtype)
    return facts, meant, layout, network, torch.from_numpy(position_table(facts, layout.positions)).to(dtype)


def _ask_all(facts: Facts) -> None:
    """Ask every predicate for every pair of values: maps have been asked, and tables are made of the answers."""
    for node in facts.order:
        if isinstance(node, Select) and not isinstance(node.predicate, Operator):
            facts.table(node)


def _by_kernel(net: CompiledProgram) -> None:
    """Attach what the kernel proves; `PrecisionError` where that is nothing."""
    found = proved(net, net.certificate)
    if found.kernel is None:
        raise PrecisionError(f"the kernel proves nothing of the program: {found.remark}; leave proof='kernel' out")
    bound, chosen = max(found.kernel, found.bound or 0.0), net.derivation
    net.attach(replace(found, bound=bound, proof="kernel"))
    net.derivation = chosen


def _unproved(
    build: Callable[[Sequences], object], domain: Sequences, dtype: torch.dtype, error: HeadError,
    what: str = "the program",
) -> PrecisionError:  # fmt: skip
    """What cannot be proved, and the longest sequences for which it can, as far as `build` raises nothing for them."""

    def holds(length: int) -> bool:
        try:
            build(Sequences(domain.vocabulary, length, domain.causal, domain.bos))
        except AttnforgeError:
            return False
        return True

    start, halved = time.process_time(), 0
    low, high = domain.max_length // 2, domain.max_length
    while low and not holds(low):  # shorter ones are proved, or refused, faster
        low, high = low // 2, low
    while low and high - low > 1 and (halved < REFINED or time.process_time() - start < SEARCHED):
        middle, halved = (low + high) // 2, halved + 1
        low, high = (middle, high) if holds(middle) else (low, middle)
    beyond = f", {high} cannot" if high - low == 1 else ""
    length = f"max_length = {low} can be proved{beyond}" if low else "no length can be proved"
    wider = "" if dtype == torch.float64 else "; use dtype=torch.float64"
    return PrecisionError(
        f"in {dtype_name(dtype)} {what} cannot be proved exact up to max_length = {domain.max_length}: {error}; "
        f"{length}{wider}",
        reachable=float(low),
    )
