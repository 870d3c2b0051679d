"""What is published: a wheel, built from the sdist, that works in an environment with what it requires and no more."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
CLEAN = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
CLEAN |= {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

USED = """
import sys, attnforge as af
net = af.load(sys.argv[1])
print(net(x=1.0, y=0.5).item())
print(af.__file__)
try:
    net.report()
except af.MissingExtra as error:
    print(error)
"""


def run(*command: str | Path, code: int = 0, **env: str) -> str:
    """What a program says, on both streams; its exit code is as expected."""
    done = subprocess.run(list(map(str, command)), env=CLEAN | env, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    assert "Traceback" not in said
    return said


def required(name: str, asked: frozenset[str], found: dict[str, metadata.Distribution]) -> None:
    """Adds a distribution and all that it requires here, without extras nobody asked for, by name."""
    if (key := re.sub(r"[-_.]+", "-", name).lower()) in found and not asked:
        return
    found[key] = metadata.distribution(name)
    for line in found[key].requires or ():
        need = Requirement(line)
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *asked)):
            required(need.name, frozenset(need.extras), found)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of a new environment: attnforge from its wheel, and its requirements by links."""
    place = tmp_path_factory.mktemp("packaging")
    source = place / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", place / "dist", source)
    (wheel,), (sdist,) = (place / "dist").glob("*.whl"), (place / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        held = {name.partition("/")[2] for name in file.getnames()}
    package = [p.relative_to(source).as_posix() for p in (source / "src").rglob("*") if p.is_file()]
    package = [name for name in package if ".egg-info/" not in name]
    assert {"pyproject.toml", "README.md", "LICENSE", *package} <= held, "the sdist holds every file of the package"
    venv.create(place / "env", with_pip=False)
    python = place / "env" / "bin" / "python"
    options = ("--quiet", "--no-compile", "--no-deps", "--no-index")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    kept = {p.relative_to(site).as_posix() for p in (site / "attnforge").rglob("*") if p.suffix != ".pyc"}
    assert {name.removeprefix("src/") for name in package} <= kept, "and so does the wheel"
    links = place / "links"
    links.mkdir()
    (site / "requirements.pth").write_text(f"{links}\n")
    own = next(site.glob("attnforge-*.dist-info"))
    parts: dict[str, metadata.Distribution] = {}
    for need in map(Requirement, metadata.Distribution.at(own).requires or ()):
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            required(need.name, frozenset(need.extras), parts)
    for part in parts.values():
        for top in {file.parts[0] for file in part.files or ()} - {"..", "__pycache__"}:
            if not (links / top).exists():
                (links / top).symlink_to(str(part.locate_file(top)))
    assert (links / "torch").exists() and not (links / "matplotlib").exists(), "no extras"
    return python.parent


def test_it_works_without_extras(installed: Path, tmp_path: Path) -> None:
    program, file = installed / "attnforge", tmp_path / "net.safetensors"
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert version is not None and run(program, "--version") == f"attnforge {version[1]}\n"
    box = ("--box", "x=-1:1", "--box", "y=0:2")
    assert "certified" in run(program, "compile", "x*y + sin(x)", *box, "--eps", "1e-3", "-o", file)
    value, where, missing = run(installed / "python", "-c", USED, file).splitlines()
    assert abs(float(value) - 1.3414709848) <= 1.1e-3 and str(installed.parent) in where
    assert "pip install 'attnforge[report]'" in missing


def test_the_shell_completes_commands_options_and_choices(installed: Path) -> None:
    def offered(line: str) -> list[str]:
        words = line.split(" ")
        env = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1), "_ATTNFORGE_COMPLETE": "complete_bash"}
        return run(installed / "attnforge", **env).split()

    assert offered("attnforge co") == ["compile", "convert"]
    assert offered("attnforge compile --dt") == ["--dtype"]
    assert offered("attnforge compile --dtype ") == ["float32", "float64"]
    assert "complete -o default" in run(installed / "attnforge", _ATTNFORGE_COMPLETE="source_bash")


@pytest.mark.parametrize(
    ("module", "body", "arguments", "code", "words"),
    [
        ("typer", "raise ImportError('libodd.so is missing')", ["--version"], 1, "cannot start: libodd.so is missing"),
        ("typer", "raise KeyboardInterrupt", ["--version"], 130, ""),
        ("torch", "raise ImportError('libodd.so is missing')", ["functions"], 1, "error: libodd.so is missing"),
    ],
)
def test_what_goes_wrong_before_it_is_up_is_said_in_words(
    tmp_path: Path, module: str, body: str, arguments: list[str], code: int, words: str
) -> None:
    (tmp_path / f"{module}.py").write_text(body)
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    said = run(sys.executable, "-m", "attnforge", *arguments, code=code, PYTHONPATH=path)
    assert (words in said) if words else said == ""
