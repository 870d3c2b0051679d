"""Proofs of whole networks: what the kernel accepts, what it refuses, and what a certificate says of it."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import attnforge as af
from attnforge import groundtruth
from attnforge.compiler.compiled import CompiledNetwork
from attnforge.compiler.derivation import derive
from attnforge.errors import CertificateError
from attnforge.kernel.file import Saved, parse, read
from attnforge.kernel.prove import prove

BOX = af.Box(x=(-1, 1), y=(0.5, 2))
FORMULAS = {
    "anchor": ("exp(x) + 1/y", torch.float32, 1e-3),
    "product": ("x*y + 0.7*x", torch.float32, 1e-4),
    "gates": ("max(x, y) + abs(x)", torch.float32, 1e-4),
    "root": ("sqrt(x**2 + y**2)", torch.float64, 1e-5),
    "removable": ("sin(3*x)/x + y", torch.float64, 1e-5),
}


@pytest.fixture(scope="module")
def proved() -> tuple[CompiledNetwork, Saved, dict[str, Any]]:
    net = af.compile("exp(x)*y", BOX, eps=1e-2)
    saved = parse(net.written())
    assert net.bound is not None
    return net, saved, derive(net, saved, net.bound, effort=30)


@pytest.mark.parametrize("name", FORMULAS)
def test_bounds_are_near_those_of_the_analysis_and_hold(name: str, benchmark: ModuleType) -> None:
    formula, dtype, eps = FORMULAS[name]
    net = af.compile(formula, BOX, eps=eps, dtype=dtype)
    assert net.bound is not None
    saved = parse(net.written())
    found = prove(saved, derive(net, saved, net.bound, effort=200))
    assert benchmark.network_error(net, net.program) <= found.bound <= 1.1 * net.bound and found.dtype == str(dtype)[6:]


def test_a_small_mlp(benchmark: ModuleType) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 4), nn.GELU(), nn.Linear(4, 1))
    net = af.compile(module, af.Box.cube(-1, 1, shape=(2,)), eps=1e-2)
    saved = parse(net.written())
    assert net.bound is not None
    found = prove(saved, derive(net, saved, net.bound, effort=20))
    assert benchmark.network_error(net, net.program) <= found.bound <= 1.5 * net.bound


def test_compile_and_check_say_what_a_bound_comes_from(tmp_path: Path) -> None:
    net = af.compile("x*y", BOX, eps=1e-4, proof="kernel")
    path = tmp_path / "net.safetensors"
    net.save(path)
    assert read(path).header["format"] == 2 and read(path).header["derivation"] == net.derivation
    found = af.check(path)
    assert found.proof == net.certificate.proof == "kernel" and found.kernel == net.certificate.kernel
    assert found.bound == net.bound <= 1e-4 and "the kernel proves" in str(found)
    assert af.load(path).derivation == net.derivation
    af.certify(net)
    assert net.certificate.proof == "analysis" and net.derivation is None  # made for what was there before
    with pytest.raises(af.ArgumentError, match="proof must be"):
        af.compile("x*y", BOX, eps=1e-4, proof="faith")  # type: ignore[arg-type]


def test_files_of_before_get_a_derivation_in_memory(tmp_path: Path) -> None:
    net = af.compile("x*y", BOX, eps=1e-4)
    net.save(tmp_path / "net.safetensors")
    assert read(tmp_path / "net.safetensors").header["format"] == 1
    found = af.check(tmp_path / "net.safetensors")
    assert found.bound == net.bound and found.kernel is not None and found.kernel <= 1.1 * net.bound
    other = groundtruth.vary(af.export.to_plain(af.compile("x*y", BOX, eps=1e-4, dtype="float64")), ["rotated"], seed=1)
    other.save(tmp_path / "other.safetensors")
    found = af.check(tmp_path / "other.safetensors")
    assert found.proof == "analysis" and found.kernel is None and found.remark == other.beyond != ""
    assert f"by the analysis alone: {other.beyond}" in str(found)


def test_a_file_that_boasts_of_the_kernel_is_refused(tmp_path: Path) -> None:
    from attnforge.certificates import storage
    from attnforge.certificates.certificate import weights_hash

    net = af.compile("x*y", BOX, eps=1e-4, proof="kernel")
    net.save(tmp_path / "net.safetensors")
    header, tensors = storage.read(tmp_path / "net.safetensors")
    del header["digest"]
    for wrong in ("bound", "derivation"):
        boast = copy.deepcopy(header)
        if wrong == "bound":
            boast["certificate"] |= {"bound": 0.5 * net.bound, "kernel": 0.4 * net.bound, "terms": []}
        else:
            boast["derivation"]["scopes"][1][0][0] = "memory"
        storage.write(tmp_path / f"{wrong}.safetensors", boast, weights_hash(net), tensors)
        with pytest.raises(CertificateError):
            af.check(tmp_path / f"{wrong}.safetensors")


def test_nothing_but_certificate_errors_comes_out_of_hostile_files(tmp_path: Path, proved: Any) -> None:
    net, saved, chosen = proved
    data = net.written()
    path = tmp_path / "x.safetensors"
    for bad in (b"", data[:100], data[: len(data) // 2], data[:-1] + bytes([data[-1] ^ 1]), b"\xff" * 64):
        path.write_bytes(bad)
        with pytest.raises(CertificateError):
            read(path)
    trees = [[0, 5.0, [], []], [0, 0.0, []], [9, 0.0, [], []], [0, 0.0, [], None], 3]
    others = {"tables": [[[0.0, 0.0]], []], "states": [[], None], "sites": [[]], "scopes": [[]], "tree": trees}
    for key, value in ((key, value) for key, several in others.items() for value in several):
        with pytest.raises(CertificateError):
            prove(saved, {**chosen, key: value})
    for value in (None, [], {}, 3, {**chosen, "more": 1}):
        with pytest.raises(CertificateError):
            prove(saved, value)


def test_every_number_of_the_file_is_looked_at(proved: Any) -> None:
    """NaN anywhere is refused; a carried column that is changed costs what it changes."""
    _, saved, chosen = proved
    good = prove(saved, chosen).bound
    for name, tensor in saved.tensors.items():
        for i in range(0, len(tensor.numbers), max(1, len(tensor.numbers) // 3)):
            numbers = (*tensor.numbers[:i], float("nan"), *tensor.numbers[i + 1 :])
            wrong = Saved(saved.header, {**saved.tensors, name: type(tensor)(tensor.dtype, tensor.shape, numbers)}, "")
            with pytest.raises(CertificateError):
                prove(wrong, chosen)
    tensor = saved.tensors["network.layers.0.S"]
    numbers = tuple(x + 0.25 for x in tensor.numbers)
    moved = type(tensor)(tensor.dtype, tensor.shape, numbers)
    wrong = Saved(saved.header, {**saved.tensors, "network.layers.0.S": moved}, "")
    with suppress(CertificateError):  # an argument may leave its table: refused as well
        assert prove(wrong, chosen).bound > good + 0.1


def test_mutants_are_covered_or_refused(benchmark: ModuleType) -> None:
    files = ("head: relative", "head: minimum", "chain: elu", "plain: gate", "variant: program")
    found = benchmark.mutation(3, Console(quiet=True), seed=7, names=("product", "gate", *files))
    results = sum(found.values(), type(next(iter(found.values())))())
    assert results["BROKEN"] == 0 and results["covered"] > 15 and results["refused"] > 15


def test_the_page_shows_the_mutants_of_the_last_run(benchmark: ModuleType) -> None:
    kept = json.loads(benchmark.RESULTS.read_text("utf-8"))["mutants"]
    files = {*dict(benchmark.NETWORKS), *benchmark.TOKENS, "mlp", *benchmark.FILES}
    assert files <= set(kept) and "and 0 neither" in benchmark.markdown(kept)
    assert benchmark.markdown(kept) in benchmark.PAGE.read_text("utf-8")


def test_a_derivation_is_plain_json(proved: Any) -> None:
    _, saved, chosen = proved
    assert prove(saved, json.loads(json.dumps(chosen))).bound == prove(saved, chosen).bound


def test_a_piece_of_a_function_proves_nothing_beyond_its_ends() -> None:
    net = af.compile("elu(x)", af.Box(x=(0, 1)), eps=1e-3)
    saved = parse(net.written())
    assert net.bound is not None and prove(saved, derive(net, saved, net.bound)).bound <= net.bound
    header = copy.deepcopy(dict(saved.header))
    ops = header["config"]["program"]["ops"]
    assert [op.get("function") for op in ops] == [None, "piece 1 of elu"]
    ops[1]["function"] = "piece 0 of elu"  # of arguments below 0 alone, and close to it above
    with pytest.raises(CertificateError, match="beyond its ends"):
        prove(Saved(header, saved.tensors, ""), derive(net, saved, net.bound))
