"""Token programs before the kernel: what it proves, what it refuses, and the rules it does so by."""

from __future__ import annotations

import copy
import itertools
import json
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from flint import arb, fmpq

import attnforge as af
from attnforge import rasp
from attnforge.errors import CertificateError
from attnforge.kernel.balls import working
from attnforge.kernel.file import Saved, parse, read
from attnforge.kernel.programs.facts import Facts
from attnforge.kernel.programs.language import Domain, reached, read_ops
from attnforge.kernel.programs.logits import Logits, exact_sums, rows_of
from attnforge.kernel.programs.terms import Terms
from attnforge.kernel.prove import prove
from attnforge.kernel.rounding import MACHINES
from attnforge.rasp import aggregate, indices, length, library, select, selector_width, tokens
from attnforge.rasp.network.compiled import CompiledProgram
from attnforge.rasp.network.data import program_json
from attnforge.rasp.network.derivation import derive

LONG = ("tomita3", "dyck2", "dyck3", "addition_scan", "bigram_copy")  # seconds at 10: the benchmark has them


def sequences(net: CompiledProgram) -> list[tuple[Any, ...]]:
    return list(net.domain)


def wrong(net: CompiledProgram, program: Any) -> float:
    """How wrong a network is on all sequences: 1 for another value, the difference for numbers."""
    worst = 0.0
    given = sequences(net)
    for sequence, found in zip(given, net.run(given), strict=True):
        try:
            meant = program(sequence)
        except af.DomainError:
            continue
        for a, b in zip(found, meant, strict=True):
            worst = max(worst, abs(float(a) - float(b)) if net.outputs is None else float(a != b))
    return worst


@pytest.mark.parametrize("name", [name for name in library.PROGRAMS if name not in LONG])
def test_library_programs_are_proved(name: str) -> None:
    listed = library.get(name)
    domain = listed.domain(10)
    net = af.compile(listed.program(domain), domain)
    found = prove(parse(net.written()), derive(net))
    assert found.bound == 0 if net.certificate.kind == "exact" else 0 < found.bound <= net.bound  # type: ignore[operator]


def test_compile_and_check_say_what_a_program_is_proved_by(tmp_path: Path) -> None:
    domain = rasp.Sequences("abc", 5)
    net = af.compile(library.reverse(), domain, proof="kernel")
    assert net.certificate.proof == "kernel" and net.certificate.kernel == 0
    net.save(tmp_path / "net.safetensors")
    assert read(tmp_path / "net.safetensors").header["format"] == 2
    found = af.check(tmp_path / "net.safetensors")
    assert found.kind == "exact" and found.proof == "kernel" and "the kernel proves it" in str(found)
    plain = af.compile(library.frac_prevs(), domain)
    plain.save(tmp_path / "plain.safetensors")
    found = af.check(tmp_path / "plain.safetensors")
    assert found.kind == "certified" and found.proof == "kernel" and 0 < found.kernel <= found.bound
    with pytest.raises(af.ArgumentError, match="proof must be"):
        af.compile(library.reverse(), domain, proof="faith")  # type: ignore[call-overload]


PROGRAMS = {
    "reverse": library.reverse(), "sort": library.sort(), "hist2": library.hist2(), "frac_prevs": library.frac_prevs(),
    "shifted": aggregate(select(indices, indices - 1) | select(tokens, "a"), tokens, default="b"),
    "late": selector_width(~select(indices, indices, "<=") & select(tokens, tokens)),
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled() -> dict[str, tuple[CompiledProgram, Saved, Any]]:
    domain = rasp.Sequences("ab", 4)
    nets = {name: af.compile(program, domain) for name, program in PROGRAMS.items()}
    return {name: (net, parse(net.written()), derive(net)) for name, net in nets.items()}


def again(net: CompiledProgram, saved: Saved) -> CompiledProgram:
    """The network that changed contents of a file describe."""
    kinds = {"float32": torch.float32, "float64": torch.float64}
    given = {name: torch.tensor(t.numbers, dtype=kinds[t.dtype]).reshape(t.shape) for name, t in saved.tensors.items()}
    return CompiledProgram.rebuild(saved.header["config"], given)


@pytest.mark.parametrize("name", PROGRAMS)
def test_changed_numbers_are_refused_or_change_nothing(name: str, compiled: Any) -> None:
    """Every kind of entry, scaled keys, zeros: a proof is found only of networks that are right on all sequences."""
    net, saved, chosen = compiled[name]
    assert prove(saved, chosen).bound == (0 if net.outputs is not None else pytest.approx(net.bound, rel=1))
    draw, refused, kept = random.Random(name), 0, 0
    for tensor in sorted(saved.tensors):
        old = saved.tensors[tensor]
        changes = [tuple(0.01 * x for x in old.numbers), tuple(-x for x in old.numbers)]
        for at in draw.sample(range(len(old.numbers)), min(len(old.numbers), 1)):
            x = old.numbers[at]
            for new in (1.01 * x, x + 1, 0.0, float("nan")):
                changes.append((*old.numbers[:at], new, *old.numbers[at + 1 :]))
        for numbers in changes:
            new = type(old)(old.dtype, old.shape, tuple(torch.tensor(numbers, dtype=net.dtype).double().tolist()))
            mutant = Saved(saved.header, {**saved.tensors, tensor: new}, saved.weights)
            try:
                found = prove(mutant, chosen)
            except CertificateError:
                refused += 1
                continue
            kept += 1
            assert wrong(again(net, mutant), PROGRAMS[name]) <= found.bound
    full = sum(bool(t.numbers) for t in saved.tensors.values())  # each had a NaN; a bound may cover all else
    assert refused >= (full if net.outputs is None else 2 * full) and kept


def test_changed_headers_are_refused_or_change_nothing(compiled: Any) -> None:
    """Other operators, constants, tables, defaults, domains, masks and words; the derivation is kept."""
    seen = refused = 0
    for net, saved, chosen in compiled.values():
        headers = []
        config = saved.header["config"]
        for i, (kind, _, children, rest) in enumerate(config["program"]):
            for name in ("eq", "lt", "geq", "add", "sub", "ne"):
                if rest.get("operator") not in (None, name) and len(children) == 2:
                    headers.append((("config", "program", i, 3, "operator"), name))
            if "value" in rest:
                headers.append((("config", "program", i, 3, "value"), 1 if kind == "Constant" else "a"))
            if len(children) == 2:
                headers.append((("config", "program", i, 2), children[::-1]))
        headers += [(("config", "domain", "max_length"), n) for n in (3, 5)]
        headers += [(("config", "domain", "vocabulary"), v) for v in (["b", "c"], ["a", "b", "c"], ["b", "a"])]
        for i, layer in enumerate(config["layout"]["layers"]):
            for j, (_, _, causal) in enumerate(layer["heads"]):
                headers.append((("config", "layout", "layers", i, "heads", j, 2), not causal))
        words = [(("outputs",), chosen["outputs"][::-1])] if chosen["outputs"] else []
        for i, layer in enumerate(chosen["layers"]):
            words += [(("layers", i, "after"), layer["after"][::-1]), (("layers", i, "heads"), layer["heads"][::-1])]
        for path, value in headers:
            header = edited(saved.header, path, value)
            seen += 1
            try:
                found = prove(Saved(header, saved.tensors, saved.weights), chosen)
            except CertificateError:
                refused += 1
                continue
            mutant = again(net, Saved(header, saved.tensors, saved.weights))
            assert derive(mutant)["outputs"] != chosen["outputs"] or wrong(mutant, mutant.program) <= found.bound
        for path, value in words:
            if edited(chosen, path, value) == chosen:
                continue
            seen += 1
            try:
                found = prove(saved, edited(chosen, path, value))
            except CertificateError:
                refused += 1
                continue
            assert path != ("outputs",) and wrong(net, net.program) <= found.bound
    assert seen > 60 and refused > seen / 2


def edited(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with one entry changed."""
    copied = copy.deepcopy(data)
    at = copied
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return copied


def test_nothing_but_certificate_errors_comes_out(compiled: Any) -> None:
    _, saved, chosen = compiled["shifted"]
    for broken in (None, 1, [], {}, {"ops": []}, {**chosen, "ops": 3}, {**chosen, "positions": [["is", 0, 0]]},
                   {**chosen, "output": -1}, {**chosen, "layers": chosen["layers"][:-1]}):  # fmt: skip
        with pytest.raises(CertificateError):
            prove(saved, broken)
    draw = random.Random(0)
    for _ in range(200):
        path: list[Any] = []
        at: Any = {"config": saved.header["config"], "chosen": chosen}
        while isinstance(at, (dict, list)) and at and (len(path) < 2 or draw.random() < 0.9):
            key = draw.choice(list(at)) if isinstance(at, dict) else draw.randrange(len(at))
            path.append(key)
            at = at[key]
        value = draw.choice([None, -1, 2**40, "x", [], {}, [[]], 1.5, {"tuple": [1]}])
        both = edited({"config": saved.header["config"], "chosen": chosen}, tuple(path), value)
        try:
            prove(Saved({**saved.header, "config": both["config"]}, saved.tensors, saved.weights), both["chosen"])
        except CertificateError:
            continue


# ---- rules


def facts_of(program: Any, domain: rasp.Sequences) -> tuple[Facts, list[Any]]:
    ops = reached(read_ops(json.loads(json.dumps(program_json(program)))))
    terms = Terms(Domain(tuple(sorted(domain.vocabulary)), domain.max_length))  # type: ignore[type-var]
    found = terms.read(ops)
    given = {*terms.asked, *(t for t, op in zip(found, ops, strict=True) if op.kind == "Aggregate")}
    return Facts(ops, terms, found, terms.domain, given), found


SAME = [
    (selector_width(~select(tokens, tokens)), length - selector_width(select(tokens, tokens))),
    (selector_width(select(tokens, "a") | select(indices, indices, "<")),
     selector_width(select(indices, indices, "<") | select(tokens, "a"))),
    (selector_width(select(tokens, tokens) & select(indices, indices, "<")),
     selector_width(select(tokens, tokens) & select(indices, indices, "<=")) - 1),
    (selector_width(select(indices, indices, ">")), length - selector_width(select(indices, indices, "<="))),
    (aggregate(select(indices, indices, "<="), indices) * 2,
     aggregate(select(indices, indices, "<="), indices + indices)),
]  # fmt: skip


@pytest.mark.parametrize("pair", range(len(SAME)))
def test_equal_terms_mean_the_same(pair: int) -> None:
    """K18: rewritten forms have one term; and ops whose terms are equal agree on every sequence."""
    domain = rasp.Sequences("ab", 4)
    terms = Terms(Domain(("a", "b"), 4))
    first, second = (terms.read(read_ops(json.loads(json.dumps(program_json(one)))))[-1] for one in SAME[pair])
    assert first == second
    for sequence in domain:
        assert SAME[pair][0](sequence) == SAME[pair][1](sequence)


def random_program(draw: random.Random, depth: int) -> Any:
    """A program of whole numbers on the tokens 0 and 1."""
    if not depth:
        return draw.choice([tokens, indices, length, rasp.Constant(draw.randrange(-1, 3))])
    a, b = random_program(draw, depth - 1), random_program(draw, depth - 1)
    kind = draw.randrange(7)
    if kind < 2:
        return draw.choice([a + b, a - b, a * 2, -a])
    if kind == 2:
        return draw.choice([a < b, a.equals(b), a >= b, (a < b) & (b.equals(1)), ~(a <= b) | (a.equals(0))])
    key, query = random_program(draw, depth - 1), random_program(draw, depth - 1)
    chosen = select(key, query, draw.choice(["==", "<", "<=", "!=", ">", ">="]))
    order = select(indices, indices, draw.choice(["<", "<=", ">", ">=", "=="]))
    selector = draw.choice([chosen, ~chosen, chosen & order, chosen | order, ~(chosen & order)])
    return selector_width(selector) if kind < 6 else aggregate(selector, a, default=0)


def test_facts_hold_on_every_sequence() -> None:
    """K18 to K20 on random programs: values, combinations, and what is said of selectors; equal terms, equal values."""
    domain = rasp.Sequences((0, 1), 3)
    draw = random.Random(5)
    said = {"single": 0, "nonempty": 0, "until": 0, "distinct": 0, "permutes": 0, "equal": 0}
    for _ in range(60):
        program = random_program(draw, 2)
        try:
            facts, found = facts_of(program, domain)
            values = [None if op.selects else set(facts.values(i)) for i, op in enumerate(facts.ops)]
        except CertificateError:
            continue
        order = rasp.language.walk(program)
        pairs = [(i, j) for i, j in itertools.combinations(range(len(order)), 2) if values[i] and values[j]]
        joints = {pair: {tuple(facts.values(i)[n] for i, n in zip(pair, row, strict=True)) for row in facts.joint(pair)}
                  for pair in pairs}  # fmt: skip
        for sequence in domain:
            try:
                meant = rasp.language.evaluate(program, sequence)
            except af.DomainError:
                continue
            for i, node in enumerate(order):
                got = meant[node]
                if values[i] is not None:
                    assert set(got) <= values[i]
                    if facts.distinct(i):
                        said["distinct"] += 1
                        assert len(set(got)) == len(got)
                    if facts.permutes(found[i]):
                        said["permutes"] += 1
                        assert sorted(got) == list(range(len(got)))
                    continue
                counts = [sum(row) for row in got]
                if facts.single(i):
                    said["single"] += 1
                    assert max(counts) <= 1
                if facts.nonempty(i):
                    said["nonempty"] += 1
                    assert min(counts) >= 1
                limit = {"": len(got), "not later": 1, "earlier": 0}[facts.until(i)]
                said["until"] += limit < 2
                assert not any(one for q, row in enumerate(got) for one in row[q + limit :])
            for i, j in pairs:
                assert set(zip(meant[order[i]], meant[order[j]], strict=True)) <= joints[i, j]
                if found[i] == found[j]:
                    said["equal"] += 1
                    assert meant[order[i]] == meant[order[j]]
    assert all(count > 20 for count in said.values()), said


@pytest.mark.parametrize("size", [1e-300, 1e-30, 1e-8, 1.0])
def test_leads_cover_computed_logits(size: float) -> None:
    """K21: moved queries and keys, computed in float32 and float64, against exact leads less their allowance."""
    generator = torch.Generator().manual_seed(3)
    with working():
        for name, dtype in (("float32", torch.float32), ("float64", torch.float64)):
            for _ in range(20):
                q, k = (torch.randn(n, 3, generator=generator, dtype=dtype) * 2**6 for n in (4, 5))
                moves = [(2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1) * size for x in (q, k)]
                errors = [[arb(size) + MACHINES[name].u * 2**10] * 3] * 2
                exact = [[[fmpq(*x.as_integer_ratio()) for x in row] for row in t.double().tolist()] for t in (q, k)]
                rows = [rows_of(t, e, [{}] * 5) for t, e in zip(exact, errors, strict=True)]
                logits = Logits(MACHINES[name], name, rows[0], rows[1])
                seen = (q.double() + moves[0]).to(dtype) @ (k.double() + moves[1]).to(dtype).T
                for i, j in itertools.product(range(4), range(5)):
                    others = [n for n in range(5) if n != j]
                    least = float(seen[i, j] - seen[i, others].max())
                    assert logits.lead(i, j, others) <= arb(least) + abs(least) * 2 * MACHINES[name].u
                    apart = Fraction(float(seen[i, j])) - Fraction(float(seen[i, 0]))
                    real = logits.real(logits.at[i][j] - logits.at[i][0])
                    assert abs(arb(fmpq(apart.numerator, apart.denominator)) - real) <= logits.off(i, j, 0)


def test_sums_on_a_grid_are_not_rounded() -> None:
    """K21: where the rule says so, float32 adds in any order to the last bit; one unit more and it may not."""
    draw = random.Random(1)
    for _ in range(300):
        terms = [draw.randrange(-(2**20), 2**20) << draw.randrange(6) for _ in range(8)]
        if exact_sums("float32", terms, sum(map(abs, terms)), 10):
            shuffled = draw.sample(terms, len(terms))
            total = torch.tensor(0.0)
            for term in shuffled:
                total = total + torch.tensor(term / 2**10, dtype=torch.float32)
            assert float(total) == sum(terms) / 2**10
    assert exact_sums("float32", [1], 2**24, 0) and not exact_sums("float32", [1], 2**24 + 1, 0)
    assert not exact_sums("float32", [1], 1, 150) and exact_sums("float64", [1], 1, 150)
