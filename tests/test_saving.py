"""Saving: files are written whole or not at all, and over what is there only with force, in Python and on the command
line."""

from __future__ import annotations

import errno
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import attnforge as af
from attnforge.cli import app
from attnforge.compiler.compiled import CompiledNetwork
from attnforge.conversion import storage
from attnforge.saving import whole_folder, write_whole

Save = Callable[[Path, bool], object]


@contextmanager
def full_disk(free: int = 64) -> Iterator[None]:
    """No file may grow beyond `free` bytes: writing fails as it does on a full disk, half way through."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture(scope="module")
def net() -> CompiledNetwork:
    return af.compile("x**2", af.Box(x=(-1, 1)), eps=1e-2)


@pytest.fixture(scope="module")
def conversion() -> tuple[nn.Module, object]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.GELU(), nn.Linear(3, 1)).eval()
    return af.convert(model, calibration=torch.rand(8, 2), eps=1e-2)


@pytest.fixture(params=["network", "onnx", "hf", "conversion", "report", "json", "figure"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def save(kind: str, net: CompiledNetwork, request: pytest.FixtureRequest) -> tuple[str, Save]:
    """A name to save under, and how."""
    if kind == "network":
        return "a.safetensors", lambda path, force: net.save(path, force=force)
    if kind == "onnx":
        return "a.onnx", lambda path, force: af.export.to_onnx(net, path, verify=False, force=force)
    if kind == "hf":
        return "folder", lambda path, force: af.export.to_hf(net, path, verify=False, force=force)
    if kind == "figure":
        built = af.theorems.ramp([1.0], 0.0, -1.0, 1.0, anchors=5)
        return "a.svg", lambda path, force: built.plot(path, force=force)
    model, found = request.getfixturevalue("conversion")
    if kind == "conversion":
        return "folder", lambda path, force: storage.save(model, found, path, force=force)
    return f"a.{'html' if kind == 'report' else 'json'}", lambda path, force: found.save(path, force=force)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_what_is_there_is_replaced_only_with_force_and_by_a_whole_file(tmp_path: Path, save: tuple[str, Save]) -> None:
    name, write = save
    write(tmp_path / name, False)
    good = contents(tmp_path)
    assert good and all(good.values())
    with pytest.raises(af.ArgumentError, match=r"already.*force=True"):
        write(tmp_path / name, False)
    with pytest.raises(OSError, match="File too large") as told, full_disk():
        write(tmp_path / name, True)
    assert contents(tmp_path) == good
    assert str(tmp_path / name) in str(told.value) and told.value.errno == errno.EFBIG


def run(*args: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(arg) for arg in args])
    return done.exit_code, done.output


def commands(folder: Path) -> dict[str, list[object]]:
    """Commands that write one file, by the file's name."""
    (folder / "points.csv").write_text("x\n0.25\n0.5\n")
    square = ["x**2", "--box", "x=-1:1", "--eps", "1e-2"]
    head = ["head", "tanh", "--lo", "-1", "--hi", "1", "--eps", "1e-3"]
    saved = [folder / "net.safetensors"]
    return {
        "net.safetensors": ["compile", *square, "-o", *saved],
        "out.csv": ["run", *saved, "-i", folder / "points.csv", "-o", folder / "out.csv"],
        "out.parquet": ["run", *saved, "-i", folder / "points.csv", "-o", folder / "out.parquet"],
        "net.onnx": ["export", *saved, "--to", "onnx", "--no-verify", "-o", folder / "net.onnx"],
        "head.svg": [*head, "--plot", folder / "head.svg"],
    }


def test_the_command_line_on_a_full_disk(tmp_path: Path) -> None:
    for name, command in commands(tmp_path).items():
        with full_disk(16):
            code, text = run(*command)
        assert (code, (tmp_path / name).exists()) == (1, False), (name, text)
        assert text.startswith("error:") and name in text and "too large" in text, text
        assert run(*command)[0] == 0, name
        good = (tmp_path / name).read_bytes()
        code, text = run(*command)
        assert code == 2 and "is there already; --force overwrites it" in text, text
        with full_disk(16):
            code, text = run(*command, "--force")
        assert code == 1 and name in text, text
        assert (tmp_path / name).read_bytes() == good
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")], "nothing is left behind"


def test_a_name_that_cannot_be_written_is_wrong_use(tmp_path: Path) -> None:
    code, text = run("compile", "x", "--box", "x=0:1", "--eps", "1e-2", "-o", tmp_path / "no" / "net.safetensors")
    assert code == 2 and "does not exist" in text


def test_links_devices_and_modes_stay(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    write_whole(real, "old")
    real.chmod(0o600)
    link.symlink_to(real)
    assert write_whole(link, b"new") == link
    assert link.is_symlink() and real.read_text() == "new" and real.stat().st_mode & 0o777 == 0o600
    write_whole("/dev/null", "away")
    assert not Path("/dev/null").is_file()
    fresh = tmp_path / "fresh"
    (tmp_path / "plain").write_text("")
    write_whole(fresh, "x")
    assert fresh.stat().st_mode == (tmp_path / "plain").stat().st_mode


def interrupted(target: Path) -> None:
    with whole_folder(target) as staged:
        (staged / "index").write_text("3")
        raise KeyboardInterrupt


def test_other_files_of_a_folder_stay(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with whole_folder(target, last="index") as staged:
        (staged / "sub").mkdir()
        (staged / "sub" / "part").write_text("1")
        (staged / "index").write_text("2")
        assert contents(target) == {"notes.txt": b"mine"}
    assert contents(target) == {"notes.txt": b"mine", "sub/part": b"1", "index": b"2"}
    with pytest.raises(KeyboardInterrupt):
        interrupted(target)
    assert contents(tmp_path) == {"model/notes.txt": b"mine", "model/sub/part": b"1", "model/index": b"2"}


def test_values_of_a_black_box_are_kept_whole(tmp_path: Path) -> None:
    from attnforge.blackbox.target import ValueFile

    kept = ValueFile(tmp_path / "values.npz")
    kept.write("a", np.ones((3, 1)))
    good = contents(tmp_path)
    with pytest.raises(OSError, match=r"values\.npz"), full_disk():
        kept.write("a", np.ones((9, 1)))
    assert contents(tmp_path) == good
