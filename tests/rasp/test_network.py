"""Token programs as networks: the same answers as the interpreter on every sequence, and a proof from the weights."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

import attnforge as af
from attnforge import rasp
from attnforge.certificates import storage
from attnforge.rasp import aggregate, indices, length, library, select, selector_width, tokens, where
from attnforge.rasp.network.compiled import CompiledProgram
from attnforge.rasp.network.data import read_value, value_json
from attnforge.rasp.network.facts import Facts, undefined
from attnforge.rasp.network.normal import normal
from attnforge.report.program import program_page

FEW = 1200  # sequences of a domain that is looked at completely here; more are for the benchmark


def small(listed: library.Listed) -> rasp.Sequences:
    """The longest domain of a program with at most FEW sequences, of a vocabulary that is cut where it is large."""
    known = len(listed.vocabulary)
    return listed.domain(max(n for n in range(1, 8) if known == 1 or ((known**n <= FEW or n == 2) and n <= 6)))


def meant(program: rasp.SOp, sequences: list[Any]) -> tuple[list[Any], list[Any]]:
    """The sequences on which a program is defined, and what it gives there."""
    given, wanted = [], []
    for sequence in sequences:
        try:
            wanted.append(program(sequence))
        except af.DomainError:
            continue
        given.append(list(sequence))
    return given, wanted


def wrong(net: CompiledProgram, given: list[Any], wanted: list[Any]) -> int:
    """How many sequences a network gets wrong; numbers may be off by its bound."""
    found = net.run(given)
    if net.outputs is not None:
        return sum(f != w for f, w in zip(found, wanted, strict=True))
    bound = net.bound
    assert bound is not None
    pairs = zip(found, wanted, strict=True)
    return sum(any(abs(a - float(b)) > bound for a, b in zip(f, w, strict=True)) for f, w in pairs)


def compiled(program: rasp.SOp, domain: rasp.Sequences, dtype: torch.dtype = torch.float32) -> CompiledProgram:
    net = af.compile(program, domain, dtype=dtype)
    assert isinstance(net, CompiledProgram)
    return net


@pytest.mark.parametrize("name", list(library.PROGRAMS))
def test_library_programs_are_right_on_every_sequence(name: str) -> None:
    listed = library.get(name)
    domain = small(listed)
    program = listed.program(domain)
    net = compiled(program, domain)
    sequences = list(itertools.islice(domain, 4 * FEW)) if domain.size <= 4 * FEW else list(domain.sample(FEW))
    given, wanted = meant(program, sequences)
    assert len(given) > 10 and wrong(net, given, wanted) == 0
    assert net.certificate.kind == ("certified" if net.outputs is None else "exact")
    assert all(m.margin >= m.needed for m in net.certificate.margins)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["length", "reverse", "hist", "sort", "sort_freq", "induction", "frac_prevs"])
def test_long_sequences(name: str, dtype: torch.dtype) -> None:
    listed = library.get(name)
    domain = listed.domain(60)
    program = listed.program(domain)
    net = compiled(program, domain, dtype)
    some = list(listed.vocabulary)
    hard = [
        some[:1] * 60,
        (some * 60)[:60],
        sorted(some * 60, key=repr)[:60],
        some[-1:],
        some[:1],
        (some[:2] * 60)[:60],
    ]
    given, wanted = meant(program, [*hard, *domain.sample(24)])
    assert wrong(net, given, wanted) == 0


def test_a_thousand_tokens_in_float32() -> None:
    domain = rasp.Sequences("abcd", 1000)
    for name in ("length", "hist"):
        program = library.get(name).program(domain)
        net = compiled(program, domain)
        full = random.Random(0).choices("abcd", k=1000)
        assert net.certificate.kind == "exact" and net(full) == rasp.run_many(program, [full])[0]
        assert net.size.parameters < 3000


def test_one_batch_holds_every_length() -> None:
    domain = rasp.Sequences("abc", 7)
    net = compiled(library.sort(), domain)
    batch = ["abcabca"[:n][::-1] for n in (7, 1, 3, 5, 2, 7)]
    assert net(batch) == [sorted(s) for s in batch] == [net(s) for s in batch]
    together = net.tensors(net.encode([tuple(s) for s in batch]))
    alone = net.tensors(net.encode([tuple(batch[2])]))
    assert torch.equal(together[2, :3], alone[0]), "padding changes nothing, to the last bit"


def test_calls_take_sequences_and_lists_of_them() -> None:
    net = compiled(library.reverse(), rasp.Sequences("abc", 4))
    assert net("abc") == net(["a", "b", "c"]) == net(("a", "b", "c")) == ["c", "b", "a"]
    assert net(["abc", "ab"]) == [["c", "b", "a"], ["b", "a"]]
    for mistake, words in (
        ("abx", "'x'"),
        ("", "empty"),
        ("abcab", "5 tokens"),
        (["a", "x"], "'x'"),
        ([["a"], []], "empty"),
    ):
        with pytest.raises(af.DomainError, match=words):
            net(mistake)
    with pytest.raises(af.ArgumentError, match="int"):
        net(3)
    with pytest.raises(af.ArgumentError, match="shape"):
        net(torch.zeros(2, 5, 4))
    for bad in (torch.ones(1, 2, 4), torch.zeros(1, 2, 4), torch.eye(4)[None] * 0.5):
        with pytest.raises(af.DomainError, match="one-hot"):
            net(bad)


def test_bos_is_given_and_returned_and_not_counted() -> None:
    net = compiled(library.reverse(), rasp.Sequences("abc", 4, bos="$"))
    assert net(["$", "a", "b"]) == ["$", "b", "a"]
    with pytest.raises(af.DomainError, match="bos"):
        net("ab")


# Selectors and codes, one by one: every sequence of a small domain.

near = select(indices, indices, lambda k, q: abs(k - q) <= 1)
PARTS: dict[str, rasp.SOp] = {
    "not": selector_width(~select(tokens, tokens, rasp.eq)),
    "or": selector_width(select(tokens, tokens, rasp.lt) | select(indices, indices, rasp.gt)),
    "and not": selector_width(near & ~select(tokens, tokens, rasp.eq)),
    "later": selector_width(select(tokens, tokens, rasp.leq) & select(indices, indices, rasp.gt)),
    "from here": selector_width(select(indices, indices, rasp.geq)),
    "never": selector_width(select(tokens, tokens, rasp.lt) & select(tokens, tokens, rasp.gt)),
    "python predicate": aggregate(near, tokens.equals("a"), default=0),
    "aggregate earlier": aggregate(select(indices, indices, rasp.lt), tokens.equals("b"), default=-1),
    "default": aggregate(select(indices, indices - 2, rasp.eq), tokens, default="none"),
    "default number": aggregate(select(indices, indices + 1, rasp.eq), indices * indices, default=99),
    "two conditions": aggregate(select(indices, indices - 1) & select(tokens, tokens), tokens, default="-"),
    "map of two": rasp.apply(lambda t, i: f"{t}{i % 2}", tokens, indices),
    "map of counts": rasp.apply(lambda n, w: (n - w) % 3, length, selector_width(select(tokens, tokens, rasp.eq))),
    "constant": rasp.where(length > 0, 7, 8),
    "index": indices,
    "linear": 3 * length - 2 * indices + 1,
    "fraction": length / 2 + rasp.Constant(0.25),
    "mean": aggregate(select(tokens, tokens, rasp.leq), indices),
    "mean map": aggregate(select(indices, indices, rasp.leq), tokens.equals("a")) < 0.5,
    "means in sum": aggregate(library.so_far, indices) - 2 * aggregate(select(tokens, tokens), indices),
    "count of counts": selector_width(select(selector_width(select(tokens, tokens)), length - indices, rasp.eq)),
    "product": length * indices,
    "tuple": rasp.apply(lambda t, n: (t, n), tokens, length),
    "none": aggregate(select(indices, 5, rasp.eq), tokens),
}  # fmt: skip


@pytest.mark.parametrize("name", list(PARTS))
def test_parts_of_the_language(name: str) -> None:
    domain = rasp.Sequences("abc", 5)
    net = compiled(PARTS[name], domain)
    given, wanted = meant(PARTS[name], list(domain))
    assert len(given) == domain.size and wrong(net, given, wanted) == 0


# Certificates.


def spoiled(net: CompiledProgram, change: Callable[[torch.nn.Parameter], None], name: str) -> CompiledProgram:
    other = copy.deepcopy(net)
    with torch.no_grad():
        change(dict(other.network.named_parameters())[name])
    return other


@pytest.mark.parametrize("name", ["length", "reverse", "sort", "hist2", "shift_by", "parity"])
def test_scaled_keys_and_changed_values_are_noticed(name: str) -> None:
    """Whatever is done to one table: there is no certificate any more, or the answers are still right, all of them."""
    listed = library.get(name)
    domain = listed.domain(4)
    program = listed.program(domain)
    whole = compiled(program, domain)
    state = whole.network.state_dict()
    given, wanted = meant(program, list(domain))
    draw, failed, kept = random.Random(3), 0, 0
    changes: list[tuple[str, Callable[[torch.nn.Parameter], None]]] = []
    for key, table in state.items():
        if key.rsplit(".", 1)[-1] in ("M_K", "W_K", "W_Q"):
            changes.append((key, lambda p: p.mul_(0.01)))
        places = table.nonzero().tolist() or [[0] * table.dim()]
        at, by = tuple(draw.choice(places)), draw.choice([0.0, 0.5, 1.01, -1.0, 3.0])
        changes.append((key, lambda p, at=at, by=by: p.__setitem__(at, p[at] * by)))  # type: ignore[misc]
        anywhere = tuple(draw.randrange(size) for size in table.shape)
        changes.append((key, lambda p, at=anywhere: p.__setitem__(at, p[at] + 1.0)))  # type: ignore[misc]
    for key, change in changes:
        net = spoiled(whole, change, key)
        if torch.equal(state[key], net.network.state_dict()[key]):
            continue  # a table of zeros
        with pytest.raises(af.CertificateError, match="stale"):
            _ = net.certificate
        try:
            af.certify(net)
        except af.CertificateError:
            failed += 1
        else:
            kept += 1
            assert wrong(net, given, wanted) == 0, key
    assert failed > kept


def test_a_failing_head_is_named_with_its_margin() -> None:
    net = compiled(library.sort(), rasp.Sequences("abc", 6))
    with torch.no_grad():
        list(net.network.groups())[2].M_K.mul_(0.01)
    with pytest.raises(af.CertificateError, match=r"'map: .*ahead of the others by 2\.\d+, of which 104\.5 are needed"):
        af.certify(net)


def test_weights_of_another_dtype_need_their_own_proof() -> None:
    net = compiled(library.reverse(), rasp.Sequences("ab", 5), torch.float64).float()
    assert af.certify(net).dtype == "float32" and net("aab") == ["b", "a", "a"]
    with pytest.raises(af.CertificateError, match="ahead of the others"):
        af.certify(compiled(library.reverse(), rasp.Sequences("ab", 5)).double())
    with pytest.raises(af.CertificateError, match="proved in float32 and float64, not in bfloat16"):
        af.certify(compiled(library.reverse(), rasp.Sequences("ab", 5)).to(torch.bfloat16))


def test_what_cannot_be_proved_says_how_far_it_can() -> None:
    program = selector_width(select(tokens, tokens)) * 2
    words = r"max_length = (\d+) can be proved, (\d+) cannot; use dtype=torch.float64"
    with pytest.raises(af.PrecisionError, match=words) as caught:
        compiled(program, rasp.Sequences("ab", 2100))
    longest = int(caught.value.reachable or 0)
    assert 1000 < longest < 2100 and f"= {longest} can be proved, {longest + 1} cannot" in str(caught.value)
    assert compiled(program, rasp.Sequences("ab", longest)).certificate.kind == "exact"
    with pytest.raises(af.PrecisionError, match=f"= {longest} can be proved"):
        compiled(program, rasp.Sequences("ab", longest + 1))


def test_a_certificate_leaves_out_sequences_without_a_value() -> None:
    """Letters that differ have no mean: the interpreter raises, and the certificate does not speak of them."""
    domain = rasp.Sequences("ab", 3)
    every = aggregate(select(tokens, tokens, rasp.true), tokens).named("every")
    cases = {
        "every": every, "where(every.equals(every), 1, 0)": where(every.equals(every), 1, 0),
        "1 / 0, which nobody asks": (tokens.equals("a") / 0).equals(tokens.equals("a") / 0),
        "a select that nobody asks": selector_width(select(tokens - 1, tokens) | select(tokens, tokens, rasp.true)),
    }  # fmt: skip
    for name, program in cases.items():
        net = compiled(program, domain)
        raised = 0
        for sequence in domain:
            try:
                assert net(list(sequence)) == program(sequence), name
            except af.DomainError:
                raised += 1
        assert raised and net.certificate.domain.startswith(f"{domain!r} where "), name
        assert "a value" in str(net.certificate) and af.certify(net).domain == net.certificate.domain
    found = af.compile({"every": every, "same": tokens}, domain)
    assert found.certificate.domain == f"{domain!r} where 'every' has a value"
    assert found["same"].certificate.domain == repr(domain)


@pytest.mark.parametrize("name", library.PROGRAMS)
def test_library_programs_have_values_on_every_sequence(name: str) -> None:
    domain = library.PROGRAMS[name].domain(4)
    program = library.PROGRAMS[name].program(domain)
    assert undefined(program, Facts(normal(program, domain), domain)) == ()


def test_networks_are_attention_and_affine_maps_alone() -> None:
    af.purity(compiled(library.length(), rasp.Sequences("abc", 5)))


def test_margins_are_the_ledger() -> None:
    certificate = compiled(library.sort(), rasp.Sequences("abcd", 20)).certificate
    assert [m.site.split(":")[0] for m in certificate.margins] == ["count", "count", "map", "aggregate", "read-out"]
    assert certificate.bound == 0 and "exact" in str(certificate) and "ahead by" in str(certificate)
    assert any("underflows" in assumption for assumption in certificate.assumptions)
    assert af.Certificate.from_json(json.loads(json.dumps(certificate.to_json()))) == certificate


# Files.


def test_files_hold_the_program_as_data(tmp_path: Any) -> None:
    domain = rasp.Sequences("abc", 5)
    program = rasp.apply(lambda t, n: f"{t}{n}", tokens, selector_width(select(tokens, tokens, lambda k, q: k <= q)))
    net = compiled(program, domain)
    path = tmp_path / "program.safetensors"
    net.save(path)
    again = af.load(path)
    assert again("acbba") == net("acbba") == program("acbba") and again.program == net.program
    assert af.check(path) == net.certificate and again.domain == domain
    assert b"lambda" not in path.read_bytes()


def test_a_file_with_another_program_does_not_check(tmp_path: Any) -> None:
    """The tensors of one program under the description of another: tables come from the program, not from claims."""
    domain, path = rasp.Sequences("abc", 5), tmp_path / "program.safetensors"
    net = compiled(aggregate(select(indices, indices - 1, rasp.eq), tokens, default="a"), domain)
    net.save(path)
    header, tensors = storage.read(path)
    ops = header["config"]["program"]
    (default,) = [op for op in ops if op[0] == "Aggregate"]
    default[3]["value"] = "b"
    digest = header["certificate"]["weights"]
    storage.write(path, {key: header[key] for key in ("family", "config", "certificate")}, digest, tensors, force=True)
    with pytest.raises(af.CertificateError):
        af.check(path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("program", 0, 0), "Exec"), (("program", -1, 2, 0), 99), (("program",), []), (("domain", "max_length"), 3),
        (("layout", "layers", 0, "heads", 0, 1), 77), (("layout", "layers", 0, "after", 0, 1), 4000),
        (("layout", "positions"), []), (("domain", "vocabulary"), ["a", "a", "b"]), (("purposes",), []),
        (("program", -1, 3), {"operator": "__import__"}), (("layout", "layers", 0, "after", 0, 0), "soul"),
    ],
)  # fmt: skip
def test_hostile_headers(tmp_path: Any, place: tuple[Any, ...], value: Any) -> None:
    path = tmp_path / "program.safetensors"
    compiled(select_previous(), rasp.Sequences("abc", 5)).save(path)
    header, tensors = storage.read(path)
    part = header["config"]
    for step in place[:-1]:
        part = part[step]
    part[place[-1]] = value
    storage.write(
        path, {k: header[k] for k in ("family", "config", "certificate")}, header["certificate"]["weights"], tensors,
        force=True,
    )  # fmt: skip
    with pytest.raises(af.CertificateError):
        af.check(path)


def select_previous() -> rasp.SOp:
    return rasp.apply({"a": "A", "b": "B", "c": "C", "-": "D"}, aggregate(select(indices, indices - 1), tokens, "-"))


# Causal domains, mistakes, explanations.


def test_causal_programs_do_not_see_later_tokens() -> None:
    domain = rasp.Sequences("ab", 6, causal=True)
    program = selector_width(select(tokens, tokens) & select(indices, indices, rasp.leq))
    net = compiled(program, domain)
    assert all(group.causal for group in net.network.groups() if group.scope == "tokens")
    given, wanted = meant(program, list(domain))
    assert wrong(net, given, wanted) == 0
    for looks_ahead in (length, library.reverse(), aggregate(select(indices, indices + 1), tokens)):
        with pytest.raises(af.DomainError, match=r"later tokens.*causal"):
            compiled(looks_ahead, domain)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (rasp.apply(lambda t: t / 2, tokens), "TypeError.*'a'|'a'.*TypeError|raises"),
        (aggregate(select(tokens, tokens, lambda k, q: k < 3), tokens), "raises"),
        (aggregate(select(tokens, tokens, lambda k, q: "yes"), tokens), "True or False"),
        (rasp.apply(lambda i, n: (i, n), indices, length) , "limit is"),
        (select(tokens, tokens), "selector"),
        ("reverse", "the name reverse means nothing"),
        (3, "got int"),
    ],
)  # fmt: skip
def test_mistakes_name_the_op(program: Any, words: str) -> None:
    with pytest.raises((af.DomainError, af.ArgumentError, af.FormulaError), match=words):
        af.compile(program, rasp.Sequences("abc", 400))


def test_trace_and_explain() -> None:
    net = compiled(library.sort().named("sort"), rasp.Sequences("abc", 6))
    trace = net.trace("cabba")
    assert trace.agrees and trace.rows[-1].network == list("aabbc") and "sort" in str(trace)
    assert {row.layer for row in trace.rows} == {1, 2, 3}
    text = net.explain()
    assert "layer 3" in text and "ahead by" in text and "parameters" in text and "sort" in repr(net)
    with torch.no_grad():
        list(net.network.groups())[2].M_V.add_(1.0)
    assert not net.trace("cabba").agrees


#: Parameters and sublayers (attention and MLP) of Tracr's networks.
TRACR = {
    "length": (806, 2), "hist": (1200, 2), "frac_prevs": (1100, 4), "sort_unique": (2800, 4), "pair_balance": (5400, 4),
    "detect_pattern": (6600, 6), "sort": (17_500, 6), "reverse": (19_700, 8), "sort_freq": (64_000, 10),
    "shuffle_dyck2": (247_000, 16), "shuffle_dyck3": (725_000, 18),
}  # fmt: skip


@pytest.mark.parametrize("name", list(TRACR))
def test_smaller_than_tracr(name: str) -> None:
    listed = library.get(name)
    domain = listed.domain(10, listed.vocabulary[:5] if name == "sort_unique" else None)
    size = compiled(listed.program(domain), domain).size
    assert size.parameters < TRACR[name][0] and size.layers < TRACR[name][1]


def test_page(tmp_path: Any) -> None:
    pytest.importorskip("jinja2")
    net = compiled(library.sort().named("<sort>"), rasp.Sequences("ab<", 6))
    path = tmp_path / "page.html"
    program_page(net).save(path)
    text = path.read_text("utf-8")
    assert "&lt;sort&gt;" in text and "<sort>" not in text and "ahead by" in text and "count:" in text


def test_positions_numbered_by_how_many_there_were() -> None:
    """A running count of all positions is their number: what is picked by it is single."""
    so_far = selector_width(select(indices, indices, rasp.leq))
    program = aggregate(select(so_far, indices + 1), tokens)
    net = compiled(program, rasp.Sequences("ab", 4))
    given, wanted = meant(program, list(net.domain))
    assert wrong(net, given, wanted) == 0 and net.certificate.margins[-2].note == "one key"


def test_a_trace_of_means_agrees_within_what_is_proved() -> None:
    mean = aggregate(library.so_far, tokens.equals("a"))
    net = compiled(aggregate(library.so_far, mean), rasp.Sequences("ab", 6))
    trace = net.trace("abba")
    last = trace.rows[-1]
    assert trace.agrees and 0 < last.within <= net.bound and last.network != last.interpreter
    with torch.no_grad():
        next(iter(net.network.groups())).W_O.mul_(1.001)
    assert not net.trace("abba").agrees


def test_large_vocabularies_are_refused_before_memory_is() -> None:
    with pytest.raises(af.DomainError, match="stands in 5000 columns, and a table over them would have 5001 by"):
        compiled(tokens, rasp.Sequences(range(5000), 2))
    net = compiled(tokens, rasp.Sequences(range(200), 2))
    assert net([7, 199]) == [7, 199]


def test_a_trace_of_numbers_that_no_float64_tells_apart() -> None:
    program = aggregate(select(indices, indices - 1), tokens, default=0) > 1
    net = compiled(program, rasp.Sequences((2**60, 2**60 + 1), 3))
    assert net.trace([2**60 + 1, 2**60, 2**60]).agrees


def test_numbers_of_more_than_64_bits_are_kept_in_files(tmp_path: Path) -> None:
    domain = rasp.Sequences([10**30, -(2**63), 5], 2)
    net = compiled(aggregate(select(indices, length - 1 - indices), tokens, default=2**70), domain)
    net.save(tmp_path / "large.safetensors")
    checked = af.check(tmp_path / "large.safetensors")
    assert checked.kind == "exact" and checked.kernel == 0.0
    assert af.load(tmp_path / "large.safetensors")([10**30, 5]) == [5, 10**30]
    for value in (2**63, -(2**63), Fraction(1, 2**80), Fraction(-(2**70), 3), (1, (2**64, None))):
        assert read_value(json.loads(json.dumps(value_json(value)))) == value
    for text in ("1", "1/0", "0x1/1", "1/" + "1" * 1400, 3):
        with pytest.raises(af.ArgumentError, match="no values of the kind 'number'"):
            read_value({"number": text})


def test_the_kernel_reads_no_padding_into_a_mean() -> None:
    """Counts of padding are as large as 2^40, and have no weight in a mean."""
    mean = aggregate(select(tokens, tokens, rasp.ne), selector_width(select(tokens, tokens)), default=7)
    assert compiled(mean < 2, rasp.Sequences("abc", 3)).certificate.kind == "exact"
    assert af.compile(mean < 2, rasp.Sequences("abc", 3), proof="kernel").certificate.kernel == 0.0


SAVED: dict[str, rasp.SOp] = {
    "one op under two names": tokens.equals("a").named("x") + tokens.equals("a").named("y"),
    "two functions that say the same": rasp.apply(lambda t: t + "!", tokens).equals(rasp.apply("{}!".format, tokens)),
    "a mean that somebody lists": aggregate(library.so_far, indices) * 3 - aggregate(library.so_far, indices) ** 2,
    "a mean of counts": aggregate(library.so_far, selector_width(select(tokens, tokens)), default=7) * (1 / 3),
}  # fmt: skip


@pytest.mark.parametrize("name", list(SAVED))
def test_a_file_states_what_is_proved_of_it_again(name: str, tmp_path: Path) -> None:
    """Names, order and what has been asked of the facts before make no difference."""
    net = compiled(SAVED[name], rasp.Sequences("ab", 3))
    net.save(tmp_path / "net.safetensors")
    checked = af.check(tmp_path / "net.safetensors")
    assert (checked.kind, checked.target) == (net.certificate.kind, net.certificate.target)
    assert net.recertify().bound == net.bound == af.load(tmp_path / "net.safetensors").recertify().bound
