"""A pack: every label against ONNX Runtime, the same bytes again, and mutants that are refused."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from attnforge import ArgumentError, CertificateError, verification
from attnforge.cli import app
from attnforge.verification import Instance, Pack
from attnforge.verification.proof import propagated

COUNT, SEED = 18, 1
POINTS, STEPS = 400, 300  # of sampling and of local search, for each instance


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return verification.pack(tmp_path_factory.mktemp("packs") / "pack", COUNT, SEED)


@pytest.fixture
def copy(made: Pack, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made.root, tmp_path / "copy"))


def bytes_of(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_labels_and_levels_take_turns(made: Pack) -> None:
    assert (made.count("sat"), made.count("unsat")) == (COUNT // 2, COUNT // 2)
    assert {i.family for i in made.instances} == {"formula", "mlp", "tokens"}
    multiples = [i.multiple for i in made.instances]
    assert 0 < min(multiples) < 1 and max(multiples) > 100, "from hard to easy"


def held(made: Pack, instance: Instance) -> Callable[[np.ndarray], float]:
    """By how much a property is true at a point, by ONNX Runtime; below 0 it is not."""
    session = onnxruntime.InferenceSession(instance.places(made.root)["onnx"])
    clauses = made.property(instance).clauses

    def at(x: np.ndarray) -> float:
        y = session.run(None, {"X": x[None].astype(instance.dtype)})[0][0].astype(float)
        forms = [[atom.form() for atom in clause] for clause in clauses]
        return max(min(sum(s * y[i] for i, s in w.items()) - t for w, t in clause) for clause in forms)

    return at


def test_every_label_against_onnx_runtime(made: Pack) -> None:
    for number, instance in enumerate(made.instances):
        reached, claim, rng = held(made, instance), made.property(instance), np.random.default_rng(number)
        low, high = np.array(claim.low), np.array(claim.high)
        if instance.label == "sat":
            assert reached(np.array(instance.witness)) >= instance.margin
            assert not propagated(made.graph(instance), claim)
            continue
        points = np.concatenate([rng.uniform(low, high, (POINTS, len(low))), [low, high]])
        points = np.concatenate([points, np.where(rng.random((64, len(low))) < 0.5, low, high)])
        values = [reached(x) for x in points]
        best, value = points[int(np.argmax(values))], max(values)
        for step in range(STEPS):
            near = np.clip(best + rng.normal(size=len(low)) * (high - low) * 10 ** -(1 + 5 * step / STEPS), low, high)
            if (found := reached(near)) > value:
                best, value = near, found
        assert value <= -instance.margin, f"{instance.name} comes closer than its margin"
        assert instance.gap is not None and instance.gap >= instance.margin


def test_the_list_is_that_of_vnn_comp(made: Pack) -> None:
    with (made.root / "instances.csv").open() as file:
        rows = list(csv.reader(file))
    assert len(rows) == COUNT
    for row in rows:
        graph, text, seconds = row
        assert (made.root / graph).is_file() and (made.root / text).is_file() and float(seconds) > 0


def test_a_pack_is_checked(made: Pack) -> None:
    assert verification.check(made.root).instances == made.instances == verification.read(made.root).instances


def test_what_is_lost_is_made_again_byte_for_byte(made: Pack, copy: Path) -> None:
    lines = (copy / "labels.jsonl").read_text().splitlines()
    (copy / "labels.jsonl").write_text("\n".join(lines[:15]) + "\n")  # stopped in the third network
    (copy / "instances.csv").unlink()
    with pytest.raises(CertificateError, match="15 of 18"):
        verification.read(copy)
    assert verification.pack(copy, COUNT, SEED).instances == made.instances
    assert bytes_of(copy) == bytes_of(made.root)


def test_folders_that_cannot_be_written(made: Pack, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="seed 1"):
        verification.pack(made.root, COUNT, 2)
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ArgumentError, match="no pack"):
        verification.pack(tmp_path, 1)
    with pytest.raises(ArgumentError, match="no pack"):
        verification.pack(tmp_path / "letter.txt", 1)
    with pytest.raises(ArgumentError, match="cannot write"):
        verification.pack(tmp_path / "letter.txt" / "below", 1)
    with pytest.raises(ArgumentError, match="count"):
        verification.pack(tmp_path / "new", 0)
    with pytest.raises(ArgumentError, match="proof"):
        verification.pack(tmp_path / "new", 1, proof="belief")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="there is no pack"):
        verification.read(tmp_path)
    assert not (tmp_path / "new").exists()


def relabelled(root: Path, wanted: str, change: Callable[[dict[str, Any]], None], label: str) -> None:
    """Change the first instance with a label, hashes of all files brought up to date: what an attacker would do."""
    lines = [json.loads(line) for line in (root / "labels.jsonl").read_text().splitlines()]
    chosen = next(line for line in lines if line["label"] == label)
    change(chosen)
    for line in lines:
        network = line["name"].rpartition("_")[0]
        places = {
            "onnx": f"onnx/{network}.onnx", "networks": f"networks/{network}.safetensors",
            "vnnlib": f"vnnlib/{line['name']}.vnnlib", "vnnlib2": f"vnnlib2/{line['name']}.vnnlib",
        }  # fmt: skip
        line["sha256"] = {key: hashlib.sha256((root / path).read_bytes()).hexdigest() for key, path in places.items()}
    (root / "labels.jsonl").write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in lines))
    with pytest.raises(CertificateError, match=wanted):
        verification.check(root)


def larger(line: dict[str, Any]) -> None:
    line["margin"] *= 1.01
    line["multiple"] = line["margin"] / line["bound"]


def flipped(line: dict[str, Any]) -> None:
    line["label"] = {"sat": "unsat", "unsat": "sat"}[line["label"]]


def set_to(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda line: line.update({key: value})


@pytest.mark.parametrize(
    ("label", "change", "wanted"),
    [
        ("unsat", flipped, "witness"), ("sat", flipped, "does not follow"),
        ("unsat", larger, "does not follow"), ("sat", larger, "does not follow"),
        ("unsat", set_to("bound", 1e-12), "different bounds"), ("sat", set_to("dtype", "float64"), "different bounds"),
        ("sat", set_to("multiple", 7.0), "in bounds"), ("unsat", set_to("margin", -1.0), "above 0"),
        ("sat", set_to("witness", None), "witness"), ("sat", set_to("witness", [1e9] * 3), "outside"),
        ("sat", set_to("inputs", 7), "inputs"), ("unsat", set_to("outputs", 7), "outputs"),
        ("sat", set_to("enclosed", None), "enclosed"),
        ("sat", lambda line: line["enclosed"][0].__setitem__(0, line["enclosed"][0][1]), "enclosed"),
        ("sat", lambda line: line["witness"].__setitem__(0, line["witness"][0] + 1e-12), "outside|numbers of float32"),
    ],
)  # fmt: skip
def test_mutants_of_labels_are_refused(copy: Path, label: str, change: Any, wanted: str) -> None:
    relabelled(copy, wanted, change, label)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "../x"), ("name", 7), ("margin", "much"), ("margin", 10**400), ("colour", "red"), ("witness", [True]),
        ("witness", {"x": 1}), ("bound", 0.0), ("sha256", []), ("label", "yes"),
        ("enclosed", [[0.0]]), ("enclosed", [[0.0, "1"]]),
    ],
    ids=lambda x: str(x)[:10],
)  # fmt: skip
def test_lines_of_another_form_are_refused(copy: Path, key: str, value: Any) -> None:
    lines = (copy / "labels.jsonl").read_text().splitlines()
    lines[0] = json.dumps(json.loads(lines[0]) | {key: value})
    (copy / "labels.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(CertificateError, match=r"line 1 of .* is no label"):
        verification.check(copy)


def test_a_changed_threshold_is_refused(copy: Path) -> None:
    """The property asks for a little more than the label says: what is proved is less than what is stated."""

    def nearer(line: dict[str, Any]) -> None:
        first, second = (copy / folder / f"{line['name']}.vnnlib" for folder in ("vnnlib", "vnnlib2"))
        claim = verification.parse(first.read_text())
        step = line["margin"] / 2
        closer = tuple(
            tuple(replace(a, threshold=a.threshold - step if a.above else a.threshold + step) for a in clause)
            for clause in claim.clauses
        )
        assert all(atom.other is None for clause in claim.clauses for atom in clause)
        moved = replace(claim, clauses=closer)
        first.write_text(moved.text() + "\n")
        second.write_text(moved.text2(line["dtype"]) + "\n")

    relabelled(copy, "does not follow", nearer, "unsat")


def test_a_changed_weight_is_refused(copy: Path) -> None:
    path = next((copy / "onnx").iterdir())
    data = onnx.load(path)
    tensor = max(data.graph.initializer, key=lambda t: len(t.raw_data))
    table = numpy_helper.to_array(tensor).copy()
    table.flat[0] = np.nextafter(table.flat[0], np.float32(9))
    tensor.CopyFrom(numpy_helper.from_array(table, tensor.name))
    onnx.save(data, path)
    with pytest.raises(CertificateError, match="not the one that was labelled"):
        verification.read(copy)
    relabelled(copy, "graph is not that of", lambda line: None, "sat")


def test_a_changed_network_is_refused(copy: Path) -> None:
    path = next((copy / "networks").iterdir())
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    relabelled(copy, "digest|changed|certificate", lambda line: None, "sat")


def test_the_command(made: Pack, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as left:
            app(list(words), prog_name="attnforge")
        shown = capsys.readouterr()
        return int(left.value.code or 0), shown.out + shown.err

    code, text = run("verify-pack", "--check", str(made.root), "--json")
    found = json.loads(text)
    assert code == 0 and (found["instances"], found["sat"]) == (COUNT, COUNT // 2)
    code, text = run("verify-pack")
    assert code == 2 and "--out DIR" in text
    code, text = run("verify-pack", "--check", str(tmp_path))
    assert code == 2 and "there is no pack" in text
    broken = Path(shutil.copytree(made.root, tmp_path / "broken"))
    (broken / "instances.csv").write_text("")
    code, text = run("verify-pack", "--check", str(broken))
    assert code == 1 and "instances.csv" in text
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(stat.S_IRUSR | stat.S_IXUSR)
    if not _writable(closed):  # a superuser may write everywhere
        assert run("verify-pack", "--out", str(closed / "pack"))[0] == 2


def _writable(folder: Path) -> bool:
    try:
        (folder / "x").touch()
    except OSError:
        return False
    return True
