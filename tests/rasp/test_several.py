"""Several token programs in one network: outputs by name, each right on every sequence and proved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import attnforge as af
from attnforge import rasp
from attnforge.cli import app
from attnforge.rasp import aggregate, indices, library, select, selector_width, tokens
from attnforge.rasp.network.several import CompiledPrograms

DOMAIN = rasp.Sequences("abc", 4)
FRACTION = rasp.numerical(aggregate(select(indices, indices, rasp.leq), tokens.equals("a")))


def compiled(programs: Any, domain: rasp.Sequences = DOMAIN, **more: Any) -> CompiledPrograms:
    net: Any = af.compile(programs, domain, **more)
    assert isinstance(net, CompiledPrograms)
    return net


@pytest.fixture(scope="module")
def net() -> CompiledPrograms:
    return compiled({"sorted": library.sort(), "rank": "selector_width(select(tokens, tokens, lt))",
                     "reversed": library.reverse(), "fraction": FRACTION})  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("causal", [False, True])
def test_every_output_is_right_on_every_sequence(dtype: torch.dtype, causal: bool) -> None:
    so_far = select(indices, indices, rasp.leq)
    programs = {
        "same": selector_width(select(tokens, tokens) & so_far), "fraction": FRACTION, "token": tokens,
        "first": selector_width(select(tokens, tokens) & so_far).equals(1),
    } | ({} if causal else {"sorted": library.sort(), "length": rasp.length})  # fmt: skip
    net = compiled(programs, rasp.Sequences("abc", 4, causal), dtype=dtype)
    assert net.certificate.kind == "certified" and net.certificate.dtype == str(dtype).removeprefix("torch.")
    every = list(net.domain)
    for sequence, found in zip(every, net(every), strict=True):
        assert list(found) == list(programs)
        for name, program in programs.items():
            wanted = program(sequence)
            if name == "fraction":
                assert all(abs(a - float(b)) <= net.certificate.bound for a, b in zip(found[name], wanted, strict=True))
            else:
                assert found[name] == wanted


def test_traces_and_text(net: CompiledPrograms) -> None:
    traces = net.trace("cab")
    assert list(traces) == list(net.programs) and all(trace.agrees for trace in traces.values())
    assert repr(net).startswith("CompiledPrograms(sorted, rank, reversed, fraction on Sequences(")
    assert ", float32, bound " in repr(net)
    assert repr(net["sorted"]).endswith(", float32, exact)")


def test_heads_are_shared(net: CompiledPrograms) -> None:
    alone = [af.compile(program, DOMAIN).size.heads for program in net.programs.values()]
    assert net.size.heads < sum(alone) and net.certificate.kind == "certified"
    sites = [m.site for m in net.certificate.margins]
    assert len(sites) == net.size.heads + 3 and {"read-out: sorted", "read-out: rank", "read-out: reversed"} <= {*sites}
    exact = compiled({"a": library.sort(), "b": library.hist()})
    assert exact.certificate.kind == "exact" and exact.bound == 0
    assert net.size.heads == len(net.certificate.margins) - 3


def test_one_output_is_a_program_of_its_own(net: CompiledPrograms, tmp_path: Path) -> None:
    one = net["sorted"]
    assert one.certificate.kind == "exact" and one("cab") == net("cab")["sorted"] == ["a", "b", "c"]
    assert one.trace("cab").agrees and len(af.manifest(one).heads) == net.size.heads
    one.save(tmp_path / "one.safetensors")
    assert af.load(tmp_path / "one.safetensors")("cba") == ["a", "b", "c"]
    checked = af.check(tmp_path / "one.safetensors")
    assert checked.kind == "exact" and checked.proof == "kernel" and checked.kernel == 0.0
    with pytest.raises(af.ArgumentError, match="no output 'sort'; did you mean 'sorted'"):
        net["sort"]
    with pytest.raises(af.UnsupportedOperation, match=r"take net\['name'\] of an output"):
        af.export.to_plain(net)


def test_files_and_the_command(net: CompiledPrograms, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "several.safetensors"
    net.save(path)
    checked = af.check(path)
    assert checked.kind == "certified" and checked.kernel is not None and af.load(path)("cab") == net("cab")
    app(["run", str(path), "cab"], standalone_mode=False)
    assert capsys.readouterr().out.splitlines()[:3] == ["sorted: abc", "rank: 2,0,1", "reversed: bac"]


def test_what_cannot_be_proved_says_how_long_it_could_be() -> None:
    words = r"these programs cannot be .* can be proved, \d+ cannot; use dtype"
    with pytest.raises(af.PrecisionError, match=words) as caught:
        compiled({"twice": rasp.length * 2, "token": tokens}, rasp.Sequences("a", 1400))
    reachable = caught.value.reachable
    assert reachable is not None and 650 < reachable < 1400


def test_changed_weights_are_noticed() -> None:
    net = compiled({"a": library.hist(), "b": library.reverse()})
    last = net.network.layers[-1]
    with torch.no_grad():
        last.S[:, -1] = last.S[:, 0]  # type: ignore[index]  # what only the second output reads
    with pytest.raises(af.CertificateError, match="stale"):
        _ = net.certificate
    with pytest.raises(af.CertificateError):
        net.recertify()
    with pytest.raises(af.CertificateError):
        net["b"]
    assert net["a"].certificate.kind == "exact"


@pytest.mark.parametrize(
    ("programs", "more", "words"),
    [
        ({}, {}, "1 to 64 outputs"), ({"": tokens}, {}, "line of text"), ({1: tokens}, {}, "line of text"),
        ({"a": select(tokens, tokens)}, {}, "got a selector"), ({"a": tokens, "b": 3}, {}, "got int"),
        ({"a": tokens}, {"proof": "kernel"}, "the kernel proves one output"),
    ],
)  # fmt: skip
def test_mistakes(programs: Any, more: Any, words: str) -> None:
    with pytest.raises(af.ArgumentError, match=words):
        af.compile(programs, DOMAIN, **more)


def test_a_file_whose_program_is_not_among_its_outputs_is_refused(net: CompiledPrograms) -> None:
    one = net["sorted"]
    config, tensors = one.config(), one.state_dict()
    for beside in ([config["beside"][0]] * 65, config["beside"][1:]):
        with pytest.raises(af.CertificateError, match="more than 64 outputs, or its own"):
            type(one).rebuild({**config, "beside": beside}, tensors)
    with pytest.raises(af.CertificateError, match="other outputs than it has programs"):
        CompiledPrograms.rebuild({**net.config(), "order": ["sorted"]}, net.state_dict())


def test_the_marker_stands_before_every_output() -> None:
    net = compiled({"a": library.sort(), "b": tokens}, rasp.Sequences("ab", 3, bos="^"))
    assert net(["^", "b", "a"]) == {"a": ["^", "a", "b"], "b": ["^", "b", "a"]}
