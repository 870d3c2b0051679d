"""Saving: files are written whole or not at all, and over what is there only with force, in Python and on the command
line."""

from __future__ import annotations

import errno
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
        "program.safetensors": ["rasp", "reverse", "--length", "4", "-o", folder / "program.safetensors"],
        "out.txt": ["run", folder / "program.safetensors", *["abba"] * 5, "-o", folder / "out.txt"],
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


def test_names_that_lead_nowhere_are_refused_before_the_work(
    tmp_path: Path, net: CompiledNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, dangling, file = tmp_path / "loop.html", tmp_path / "dangling", tmp_path / "file"
    loop.symlink_to(loop)
    dangling.symlink_to(tmp_path / "nothing")
    file.write_text("mine")
    odd: Any = (b"net.html", None, 3)
    with monkeypatch.context() as patch:
        patch.setattr("attnforge.report.html.Page.html", None)  # no page is drawn for a name that cannot be
        refused = {loop: "leads back to itself", "a\0.html": "expected the name"}
        refused |= dict.fromkeys((file / "a.html", file / "b" / "a.html"), "file' is a file, not a folder")
        for path, words in refused.items():
            with pytest.raises(af.ArgumentError, match=words):
                net.report(path)
    for path in odd:
        with pytest.raises(af.ArgumentError, match="expected the name of a file or folder"):
            net.save(path)
    for write in (storage.prepare, lambda folder: af.export.to_hf(net, folder, verify=False)):
        with pytest.raises(af.ArgumentError, match="is a link to nothing"):
            write(dangling)
    closed = tmp_path / "closed"
    closed.mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != closed)  # tests may run as root
    with pytest.raises(af.ArgumentError, match="closed' may not be written"):
        net.save(closed / "net.safetensors")
    assert contents(tmp_path) == {"file": b"mine"}


def test_a_folder_for_others_is_whole_or_not_there(
    tmp_path: Path, net: CompiledNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"

    def full(path: Path, data: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("attnforge.export.hf.folder.write_whole", full)  # the card comes last
        with pytest.raises(OSError, match=str(target)):
            af.export.to_hf(net, target, verify=False)
    assert not list(tmp_path.iterdir())
    (target / "README.md").mkdir(parents=True)
    with pytest.raises(OSError, match=r"'README.md' is a folder, where a file belongs: '.*model'"):
        af.export.to_hf(net, target, verify=False, force=True)
    assert not contents(tmp_path), "no file of it has moved"


@pytest.mark.parametrize("kind", ["catalogue", "pack", "lab"])
def test_what_a_full_disk_stops_goes_on_later(tmp_path: Path, kind: str) -> None:
    from attnforge.catalogue.build import _opened as catalogue
    from attnforge.lab.store import Store
    from attnforge.verification.folder import _opened as pack

    openers: dict[str, Callable[[Path], object]] = {
        "catalogue": lambda path: catalogue(path, 0), "pack": lambda path: pack(path, {"seed": 0}), "lab": Store.create,
    }  # fmt: skip
    with pytest.raises(OSError, match=str(tmp_path / "new")) as told, full_disk(2):
        openers[kind](tmp_path / "new")
    assert told.value.errno == errno.EFBIG and not isinstance(told.value, af.AttnforgeError), "nobody's mistake"
    openers[kind](tmp_path / "new")
    assert contents(tmp_path / "new")


def test_links_devices_and_modes_stay(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    write_whole(real, "old")
    real.chmod(0o600)
    link.symlink_to(real)
    assert write_whole(link, b"new") == link
    assert link.is_symlink() and real.read_text() == "new" and real.stat().st_mode & 0o777 == 0o600
    long = tmp_path / ("\U0001f600" * 60)  # of four bytes each: a name may have 255
    assert write_whole(long, "short").read_text() == "short"
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
