"""Token programs on the command line: rasp, run, check, explain; and how they answer mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import attnforge as af
from attnforge import rasp
from attnforge.cli import app
from attnforge.rasp import library


def call(*args: str, text: str | None = None) -> Any:
    result = CliRunner().invoke(app, list(args), prog_name="attnforge", input=text)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result


@pytest.fixture(scope="module")
def reverse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("net") / "reverse.safetensors"
    result = call("rasp", "reverse", "--vocabulary", "abcd", "--length", "12", "-o", str(path))
    assert result.exit_code == 0, result.output
    assert (
        "exact: the decoded output of the network is the target's" in result.stdout and f"wrote {path}" in result.stdout
    )
    return path


def test_a_saved_program_runs(reverse: Path, tmp_path: Path) -> None:
    result = call("run", str(reverse), "abcd", "a")
    assert result.exit_code == 0 and result.stdout == "dcba\na\n"
    assert call("run", str(reverse), "a,b,c").stdout == "cba\n"
    lines, out = tmp_path / "in.txt", tmp_path / "out.csv"
    lines.write_text("ab\n\nabc\n")
    assert call("run", str(reverse), "-i", str(lines), "-o", str(out)).exit_code == 0
    assert out.read_text() == "ba\ncba\n"
    assert call("run", str(reverse), "-i", "-", text="dda\n").stdout == "add\n"


def test_check_and_explain(reverse: Path) -> None:
    assert "the certificate holds" in call("check", str(reverse)).stdout
    explained = call("explain", str(reverse)).stdout
    assert "reverse on Sequences(vocabulary=('a', 'b', 'c', 'd'), max_length=12" in explained and "layer 1" in explained
    assert json.loads(call("check", str(reverse), "--json").stdout)["certificate"]["kind"] == "exact"


def test_python_gives_the_same_file(reverse: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.safetensors"
    af.compile(library.reverse().named("reverse"), rasp.Sequences("abcd", 12)).save(again)
    assert again.read_bytes() == reverse.read_bytes()


def test_a_program_from_a_file(tmp_path: Path) -> None:
    source, net = tmp_path / "hist.rasp", tmp_path / "hist.safetensors"
    source.write_text("# how often each token occurs\nhist = selector_width(select(tokens, tokens, eq))\n")
    result = call("rasp", "--file", str(source), "--vocabulary", "red,green", "--length", "4", "-o", str(net), "--json")
    found = json.loads(result.stdout)
    assert found["target"] == "hist" and found["kind"] == "exact" and found["size"]["layers"] >= 1
    assert call("run", str(net), "red,green,red").stdout == "2,1,2\n"


def test_settings_numbers_and_markers(tmp_path: Path) -> None:
    net = tmp_path / "net.safetensors"
    call("rasp", "count", "token=2", "--vocabulary", "1,2,3", "--length", "5", "-o", str(net))
    assert call("run", str(net), "2,2,3").stdout == "2,2,2\n"
    options = ("--vocabulary", "ab", "--length", "5", "--bos", "BOS", "--causal", "-o", str(net), "--force")
    result = call("rasp", "shift_by", "offset=2", *options)
    assert result.exit_code == 0, result.output
    assert call("run", str(net), "a,b,a").stdout == "BOS,None,None,a\n"


def test_a_page_is_written(tmp_path: Path) -> None:
    page = tmp_path / "sort.html"
    result = call("rasp", "sort", "--vocabulary", "ab", "--length", "3", "--report", str(page))
    assert result.exit_code == 0 and f"wrote {page}" in result.stdout
    assert "sort" in page.read_text("utf-8")


def test_list_and_show() -> None:
    listed = call("rasp", "--list").stdout
    assert all(name in listed for name in library.PROGRAMS)
    assert json.loads(call("rasp", "--list", "--json").stdout)["count"]["parameters"] == ["token"]
    shown = call("rasp", "sort_freq", "--show").stdout
    assert rasp.parse(shown) == library.sort_freq()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("rasp",), ["which program?", "--list"]),
        (("rasp", "revers"), ["no program 'revers'", "did you mean 'reverse'?"]),
        (("rasp", "reverse", "abcd"), ["expected name=value after the program, got 'abcd'"]),
        (("rasp", "count", "letter=a"), ["count has no parameter 'letter'", "its parameters: token"]),
        (("rasp", "reverse", "--vocabulary", "aba"), ["the vocabulary has 'a' twice"]),
        (("rasp", "reverse", "--length", "0"), ["--length must be a whole number"]),
        (("rasp", "reverse", "--length", "ten"), ["'ten' is not a whole number"]),
        (("rasp", "reverse", "--causal", "--length", "4"), ["later"]),
        (("rasp", "reverse", "-o", "net.bin"), ["ends with .safetensors"]),
        (("rasp", "--file", "missing.rasp", "--vocabulary", "ab"), ["there is no file 'missing.rasp'"]),
        (("rasp", "--file", "missing.rasp"), ["needs --vocabulary"]),
        (("rasp", "reverse", "--file", "x.rasp"), ["not both"]),
        (("rasp", "cumulative_sum", "--vocabulary", "ab"), ["token 0 of the vocabulary must be a whole number"]),
    ],
)
def test_mistakes_are_answered_in_words(args: tuple[str, ...], words: list[str]) -> None:
    result = call(*args)
    assert result.exit_code == 2, result.output
    for word in words:
        assert word in result.stderr


def test_mistakes_in_sequences(reverse: Path, tmp_path: Path) -> None:
    for args, word in (
        (("abx",), "token 2 of the sequence is 'x'; the vocabulary is 'a', 'b', 'c', 'd'"),
        (("a" * 13,), "has 13 tokens, and the domain ends at --length 12"),
        ((), "which sequences?"),
    ):
        result = call("run", str(reverse), *args)
        assert result.exit_code == 2 and word in result.stderr, result.output
    formula = tmp_path / "formula.safetensors"
    af.compile("2*x", af.Box(x=(0, 1)), eps=0.1).save(formula)
    assert "is no token program" in call("run", str(formula), "abc").stderr
    assert "give --input" in call("run", str(formula)).stderr


def test_mistakes_in_files_have_a_caret(tmp_path: Path) -> None:
    source = tmp_path / "bad.rasp"
    source.write_text("a = 1\nb = tokens + c\n")
    result = call("rasp", "--file", str(source), "--vocabulary", "ab")
    assert result.exit_code == 2 and "line 2: the name c means nothing" in result.stderr
    assert result.stderr.splitlines()[-1].index("^") == result.stderr.splitlines()[-2].index("c")
    source.write_bytes(b"\xff\xfe\x00")
    assert "is not text in UTF-8" in call("rasp", "--file", str(source), "--vocabulary", "ab").stderr
    source.write_text("#" * 1_100_000)
    assert "more than 1,000,000 bytes" in call("rasp", "--file", str(source), "--vocabulary", "ab").stderr
