"""The compiler on the command line: compile, check, run, explain, plan; and how they answer mistakes."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import attnforge as af
from attnforge.cli import app
from attnforge.cli.common import as_options
from attnforge.progress import PATIENCE, stages

FORMULA = "sin(x*y) + exp(-x**2)/y"
BOX = ("--box", "x=-1:1", "--box", "y=0.5:2")
HUGE = "x+" * 50_000 + "x"


def call(*args: str, text: str | None = None) -> Any:
    result = CliRunner().invoke(app, list(args), prog_name="attnforge", input=text)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("net") / "net.safetensors"
    result = call("compile", FORMULA, *BOX, "--eps", "1e-3", "-o", str(path))
    assert result.exit_code == 0, result.output
    return path


def truth(x: float, y: float) -> float:
    return math.sin(x * y) + math.exp(-(x**2)) / y


def test_compile_prints_and_saves_what_python_gives(network: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.safetensors"
    result = call("compile", FORMULA, *BOX, "--eps", "1e-3", "-o", str(again))
    assert result.exit_code == 0 and result.stderr == ""
    assert "certified: |network - target| <= " in result.stdout and f"wrote {again}" in result.stdout
    assert again.read_bytes() == network.read_bytes(), "the same input gives the same file"
    net = af.compile(FORMULA, af.Box(x=(-1, 1), y=(0.5, 2)), eps=1e-3)
    assert af.load(again).certificate == net.certificate


def test_json_is_one_object(tmp_path: Path) -> None:
    result = call("compile", "-x*y", "x + y", *BOX, "--eps", "1e-3", "--dtype", "float64", "--json")
    assert result.stdout.count("\n") == 1
    found = json.loads(result.stdout)
    assert found["measured"] <= found["bound"] <= 1e-3 and found["dtype"] == "float64" and found["written"] == []
    assert found["size"]["layers"] == 1 and found["target"] == "[-x*y, x + y]"
    assert af.Certificate.from_json(found["certificate"]).bound == found["bound"]


def test_options_reach_the_compiler() -> None:
    found = json.loads(call("compile", "exp(x)", "--box", "x=0:3", "--rtol", "1e-3", "--json").stdout)
    assert found["rtol"] == 1e-3 and found["eps"] == 0 and 1e-4 < found["bound"] <= 1e-3 * math.exp(3)


def test_nothing_is_overwritten_unless_forced(network: Path, tmp_path: Path) -> None:
    kept = network.read_bytes()
    refused = call("compile", "x*y", *BOX, "--eps", "1e-3", "-o", str(network))
    assert refused.exit_code == 2 and "--force" in refused.stderr and network.read_bytes() == kept
    target = tmp_path / "net.safetensors"
    target.write_bytes(b"old")
    assert call("compile", "x*y", *BOX, "--eps", "1e-3", "-o", str(target), "--force").exit_code == 0
    assert call("check", str(target)).exit_code == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((FORMULA, "--eps", "1e-3"), ["no box", "--box x=-1:1"]),
        ((FORMULA, *BOX), ["--eps"]),
        ((*BOX, "--eps", "1e-3"), ["missing argument 'FORMULA...'", "attnforge compile --help"]),
        ((FORMULA, *BOX, "--eps", "0"), ["eps must be a positive number", "0"]),
        ((FORMULA, *BOX, "--eps", "-1e-3"), ["eps must be a positive number", "-0.001"]),
        ((FORMULA, *BOX, "--eps", "small"), ["--eps", "'small' is not a number"]),
        ((FORMULA, *BOX, "--eps", "1e-9"), ["eps = 1e-09 cannot be certified", "can be", "--dtype float64"]),
        ((FORMULA, *BOX, "--eps", "1e-3", "--dtype", "float16"), ["--dtype", "float16"]),
        ((FORMULA, *BOX, "--eps", "1e-3", "-o", "net.pt"), [".safetensors", "net.pt"]),
        ((FORMULA, *BOX, "--eps", "1e-3", "-o", "no/where/net.safetensors"), ["'no/where' does not exist"]),
        ((FORMULA, *BOX, "--eps", "1e-3", "--report", "net.pdf"), [".html", "net.pdf"]),
        ((FORMULA, "--box", "x=-1:1", "--eps", "1e-3"), ["no interval for 'y'", "--box y=-1:1", "\n  " + FORMULA, "^"]),
        ((FORMULA, *BOX, "--box", "z=0:1", "--eps", "1e-3"), ["does not use z"]),
        ((FORMULA, *BOX, "--box", "x=0:1", "--eps", "1e-3"), ["'x' is bounded twice"]),
        ((FORMULA, *BOX[:3], "y=2:0.5", "--eps", "1e-3"), ["interval of 'y' is empty", "2", "0.5"]),
        ((FORMULA, *BOX[:3], "y=0.5", "--eps", "1e-3"), ["'--box y=0.5'", "not an interval"]),
        ((FORMULA, *BOX[:3], "y:0.5:2", "--eps", "1e-3"), ["'--box y:0.5:2'", "name=lo:hi"]),
        ((FORMULA, *BOX[:3], "y=0:inf", "--eps", "1e-3"), ["interval of 'y' must be finite"]),
        ((FORMULA, "--box", "x=-1:1", "--box", "y=0:1", "--eps", "1e-3"), ["unbounded", "y = 0"]),
        (("log(x)", "--box", "x=-1:1", "--eps", "1e-3"), ["log(x)", "x = "]),
        (("1/x", "--box", "x=-1:1", "--eps", "1e-3"), ["1/x is unbounded", "x = 0"]),
        (("1/sqrt(1-v**2)", "--box", "v=0:1", "--eps", "1e-3"), ["v = 1"]),
        (("x +* 2", "--box", "x=-1:1", "--eps", "1e-3"), ["  x +* 2\n     ^"]),
        (("(x", "--box", "x=-1:1", "--eps", "1e-3"), ["never closed"]),
        (("sni(x)", "--box", "x=-1:1", "--eps", "1e-3"), ["unknown function 'sni'", "did you mean 'sin'?"]),
        (("9**9**9**9*x", "--box", "x=-1:1", "--eps", "1e-3"), ["too large"]),
        (("x**1e308", "--box", "x=0:1", "--eps", "1e-3"), ["exponents", "1e+308"]),
        (("1e999*x", "--box", "x=0:1", "--eps", "1e-3"), ["beyond float64"]),
        (("__import__('os').system('x')", "--box", "x=0:1", "--eps", "1e-3"), ["__import__"]),
        ((HUGE, "--box", "x=0:1", "--eps", "1e-3"), ["100001 characters"]),
        (("(" * 9000 + "x" + ")" * 9000, "--box", "x=0:1", "--eps", "1e-3"), ["nested", "deep"]),
        (("", "--box", "x=0:1", "--eps", "1e-3"), ["empty"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_wrong_use_is_answered_in_words(
    args: tuple[str, ...], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("compile", *args)
    assert result.exit_code == 2
    assert result.stdout == "" and result.stderr.startswith("error: ")
    assert [word for word in words if word not in result.stderr] == []
    assert list(tmp_path.iterdir()) == []
    assert len(result.stderr) < 1500


def test_a_formula_may_begin_with_a_minus_sign() -> None:
    sides = ("--box", "omega=0:1", "--box", "t=-1:1")
    found = json.loads(call("compile", "-omega*t", *sides, "--eps", "1e-3", "--json").stdout)
    assert found["target"] == "-omega*t" and found["bound"] <= 1e-3
    assert "no such option: --esp" in call("compile", "-x", "--box", "x=-1:1", "--esp", "1").stderr


def test_check_and_what_was_changed(network: Path, tmp_path: Path) -> None:
    fine = call("check", str(network))
    assert fine.exit_code == 0 and "the certificate holds" in fine.stdout and "exp(-x**2)/y" in fine.stdout
    data = network.read_bytes()
    header = data.replace(b'\\"eps\\":0.001', b'\\"eps\\":0.002')
    assert header != data
    bad = tmp_path / "net.safetensors"
    for spoiled in (data[:-20] + bytes([data[-20] ^ 1]) + data[-19:], header, data[:-9], data[:100], b""):
        bad.write_bytes(spoiled)
        for command in ("check", "explain"):
            result = call(command, str(bad))
            assert result.exit_code == 1 and result.stdout == "" and result.stderr.startswith("error: net.safetensors")
        assert call("run", str(bad), "-i", "-", text="x,y\n0,1\n").exit_code == 1


def test_explain_accounts_for_the_bound(network: Path) -> None:
    shown = call("explain", str(network)).stdout
    assert all(word in shown for word in ("layer 1", "layer 2", "exp(-x**2)", "sin(x*y)", "anchor", "product", "kappa"))
    found = json.loads(call("explain", str(network), "--json").stdout)
    net = af.load(network)
    parts = sum(unit["share"] for unit in found["units"]) + found["affine"]
    assert 0.999 * net.certificate.bound <= parts <= 1.001 * net.certificate.bound
    assert sum(unit["heads"] for unit in found["units"]) == net.size.heads
    assert all(unit["error"] > 0 for unit in found["units"])


def test_explain_takes_heads_too(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    af.AnchorHead.fit("sin", -1, 1, anchors=8).save(path)
    assert "one head of the family 'anchor'" in call("explain", str(path)).stdout
    assert json.loads(call("explain", str(path), "--json").stdout)["family"] == "anchor"


def test_run_reads_columns_in_any_order(network: Path, tmp_path: Path) -> None:
    rows = [(0.25, -0.5), (1.0, 0.75), (2.0, 1.0)]
    points = tmp_path / "points.csv"
    points.write_text("label,y,x\n" + "".join(f"{i},{y},{x}\n" for i, (y, x) in enumerate([(0.5, 0.1), *rows[1:]])))
    result = call("run", str(network), "--input", str(points), "-o", str(tmp_path / "out.csv"))
    assert result.exit_code == 0 and result.stderr == "" and "3 rows" in result.stdout
    lines = list(csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text("utf-8"))))
    found = [float(line["output"]) for line in lines]
    wanted = [truth(0.1, 0.5), *(truth(x, y) for y, x in rows[1:])]
    assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) <= 1e-3
    again = call("run", str(network), "--input", str(points), "-o", str(tmp_path / "out.csv"))
    assert again.exit_code == 2 and "--force" in again.stderr


def test_run_through_pipes_and_npy(network: Path, tmp_path: Path) -> None:
    piped = call("run", str(network), "-i", "-", text="x,y\n0.5,1\n")
    assert piped.exit_code == 0 and piped.stdout.splitlines()[0] == "output"
    net = af.load(network)
    one = float(net(torch.tensor([[0.5, 1.0]])).detach()[0])
    assert np.float32(piped.stdout.splitlines()[1]) == np.float32(one)
    np.save(tmp_path / "p.npy", np.array([[0.5, 1.0], [0.0, 2.0]]))
    assert call("run", str(network), "-i", str(tmp_path / "p.npy"), "-o", str(tmp_path / "o.npy")).exit_code == 0
    out = np.load(tmp_path / "o.npy", allow_pickle=False)
    assert out.shape == (2,) and out.dtype == np.float32 and out[0] == np.float32(one)
    empty = call("run", str(network), "-i", "-", text="x,y\n")
    assert empty.exit_code == 0 and empty.stdout == "output\n"


def test_rows_outside_of_the_box_are_counted(network: Path) -> None:
    result = call("run", str(network), "-i", "-", text="x,y\n0,1\n0,3\n-2,1\n")
    assert result.exit_code == 0 and len(result.stdout.splitlines()) == 4
    assert "2 of 3 rows lie outside" in result.stderr and "row 2 with y = 3, outside [0.5, 2]" in result.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["empty"]),
        ("x,Y\n0,1\n", ["no column 'y'", "its columns are 'x', 'Y'"]),
        ("x;y\n0;1\n", ["no column 'x', 'y'", "separated by commas"]),
        ("0.5,1\n0,1\n", ["no column 'x', 'y'", "first line must be the names"]),
        ("x,y\n0,one\n", ["line 2, column y", "'one'", "not a number"]),
        ("x,y\n0\n", ["line 2", "1 cell,", "header 2"]),
        ("x,y\n0,nan\n", ["row 1", "y = nan", "finite"]),
        ("x,y\n0,1e999\n", ["row 1", "y = inf"]),
    ],
)
def test_bad_points_are_refused(network: Path, text: str, words: list[str]) -> None:
    result = call("run", str(network), "-i", "-", text=text)
    assert result.exit_code == 2 and result.stdout == ""
    assert [word for word in words if word not in result.stderr] == []


def test_bad_files_of_points_are_refused(network: Path, tmp_path: Path) -> None:
    (tmp_path / "p.npy").write_bytes(b"no array")
    np.save(tmp_path / "q.npy", np.zeros((3, 5)))
    np.save(tmp_path / "o.npy", np.array([{}]), allow_pickle=True)
    (tmp_path / "p.xlsx").write_bytes(b"")
    (tmp_path / "p.csv").write_bytes(b"\xff\xfe\x00x")
    for name, word in (("p.npy", "numpy"), ("q.npy", "5 numbers"), ("o.npy", "numpy"), ("p.xlsx", ".csv"),
                       ("p.csv", "UTF-8"), ("none.csv", "no file")):  # fmt: skip
        result = call("run", str(network), "-i", str(tmp_path / name))
        assert result.exit_code == 2 and word in result.stderr


def test_parquet_needs_its_package(network: Path, tmp_path: Path) -> None:
    points = tmp_path / "p.parquet"
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        points.write_bytes(b"PAR1")
        result = call("run", str(network), "-i", str(points))
        assert result.exit_code == 2 and "attnforge[parquet]" in result.stderr
        return
    pyarrow.parquet.write_table(pyarrow.table({"y": [1.0], "x": [0.5]}), points)
    assert call("run", str(network), "-i", str(points), "-o", str(tmp_path / "o.parquet")).exit_code == 0
    found = pyarrow.parquet.read_table(tmp_path / "o.parquet")["output"].to_pylist()
    assert abs(found[0] - truth(0.5, 1.0)) <= 1e-3


def test_run_takes_modules_and_heads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh())
    af.compile(layer, af.Box.cube(-1, 1, shape=3), eps=1e-3).save(tmp_path / "m.safetensors")
    result = call("run", str(tmp_path / "m.safetensors"), "-i", "-", text="a,b,c\n0.1,0.2,0.3\n")
    head, row = result.stdout.splitlines()
    assert head == "output0,output1,output2,output3"
    wanted = layer(torch.tensor([[0.1, 0.2, 0.3]]))[0].tolist()
    assert max(abs(float(a) - b) for a, b in zip(row.split(","), wanted, strict=True)) <= 1e-3
    wrong = call("run", str(tmp_path / "m.safetensors"), "-i", "-", text="a,b\n0.1,0.2\n")
    assert wrong.exit_code == 2 and "2 columns" in wrong.stderr and "3 numbers" in wrong.stderr
    af.AnchorHead.fit("sin", -1, 1, eps=1e-4).save(tmp_path / "h.safetensors")
    name = af.load(tmp_path / "h.safetensors").box.names[0]
    found = call("run", str(tmp_path / "h.safetensors"), "-i", "-", text=f"{name}\n0.5\n").stdout.splitlines()[1]
    assert abs(float(found) - math.sin(0.5)) <= 1e-4


def test_plan_shows_every_route() -> None:
    result = call("plan", "sin(x*y)", "--box", "x=0:1", "--box", "y=0:1", "--eps", "1e-3")
    assert result.exit_code == 0 and "compile" in result.stdout and "grid" in result.stdout
    found = json.loads(call("plan", "sin(x)", "--box", "x=0:1", "--anchors", "8", "--json").stdout)
    assert found["eps"] < 1e-3 and all(route["anchors"] <= 8 for route in found["routes"] if route["name"] == "compile")
    both = call("plan", "sin(x)", "--box", "x=0:1", "--anchors", "8", "--eps", "1")
    assert both.exit_code == 2 and "not both" in both.stderr


def test_messages_speak_of_options() -> None:
    assert as_options("Box(x=(-1, 1), y=(0.5, 2))") == "--box x=-1:1 --box y=0.5:2"
    assert as_options("Box.cube(-1, 1, shape=(2,))") == "Box.cube(-1, 1, shape=(2,))"


def test_stages_are_shown_only_to_those_who_wait(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert PATIENCE == 2.0
    seen: list[str] = []
    af.compile("sin(x)", af.Box(x=(0, 1)), eps=1e-3, progress=seen.append)
    assert seen[0] == "capture" and "certify" in seen and "plan" in seen
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with stages() as stage:
        stage("plan")
    assert capsys.readouterr().err == "", "nobody has waited yet"
