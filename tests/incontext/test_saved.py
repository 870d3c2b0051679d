"""Files of fitted estimators: what comes back, what the kernel proves of it, and what a hostile file can do."""

from __future__ import annotations

import copy
import json
import math
import pickle
import random
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from typer.testing import CliRunner

import attnforge as af
from attnforge.certificates import storage
from attnforge.certificates.certificate import hashed
from attnforge.cli import app
from attnforge.errors import ArgumentError, CertificateError
from attnforge.incontext import (
    ElasticNet,
    HuberRegressor,
    KernelRegressor,
    Lasso,
    LinearRegression,
    LogisticRegression,
    PoissonRegressor,
    Ridge,
)
from attnforge.incontext.estimator import Given
from attnforge.incontext.saved import FORM, written
from attnforge.kernel.file import parse
from attnforge.kernel.incontext.prove import beyond_reach, prove_estimator

RNG = np.random.default_rng(3)
X = RNG.normal(size=(30, 3)) * [1.0, 1e3, 1e-3] + [0.0, 0.0, 1.0]
Z = (X - X.mean(0)) / X.std(0) @ [1.0, -2.0, 0.5]
Y = Z + RNG.normal(size=30)
MANY = np.stack([Y, 1e-6 * RNG.normal(size=30)], axis=1)
COUNTS = RNG.poisson(np.exp(0.3 * Z)).astype(float)
SPOILED = Y + 20.0 * (np.arange(30) % 7 == 0)
THREE = np.digitize(Y, [-1.0, 1.0])
NEAR = X / X.std(0)

#: Every estimator, with and without what changes the form of its problem.
FITS: dict[str, Callable[..., Any]] = {
    "least squares": lambda **o: LinearRegression(**o).fit(X, Y),
    "several targets": lambda **o: LinearRegression(fit_intercept=False, **o).fit(X, MANY),
    "ridge": lambda **o: Ridge(0.1, **o).fit(X, Y, np.arange(30.0)),
    "several alphas": lambda **o: Ridge([0.1, 3.0], **o).fit(X, MANY),
    "lasso": lambda **o: Lasso(0.3, **o).fit(X, Y),
    "elastic net": lambda **o: ElasticNet(0.1, fit_intercept=False, **o).fit(X, MANY),
    "elastic net, no penalty": lambda **o: ElasticNet(0.0, **o).fit(X, Y),
    "logistic": lambda **o: LogisticRegression(class_weight={False: 1.0, True: 2.0}, **o).fit(X, Y > 0),
    "logistic, no offset": lambda **o: LogisticRegression(fit_intercept=False, **o).fit(X, np.where(Y > 0, "a", "b")),
    "softmax": lambda **o: LogisticRegression(10.0, **o).fit(X, THREE),
    "softmax, no offset": lambda **o: LogisticRegression(fit_intercept=False, **o).fit(X, THREE),
    "poisson": lambda **o: PoissonRegressor(alpha=0.1, **o).fit(X, COUNTS),
    "poisson, no offset": lambda **o: PoissonRegressor(alpha=0.1, fit_intercept=False, **o).fit(NEAR, 1 + COUNTS),
    "huber": lambda **o: HuberRegressor(**o).fit(X, SPOILED),
    "huber, no offset": lambda **o: HuberRegressor(fit_intercept=False, **o).fit(X, SPOILED),
    "kernel ridge": lambda **o: KernelRegressor(gamma=0.3, alpha=0.2, **o).fit(NEAR, MANY),
}  # fmt: skip
SHORT = {"dtype": "float32", "tol": 1e-6}


def fitted(name: str, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return FITS[name](**options)


@pytest.mark.parametrize("name", FITS)
def test_a_file_holds_the_estimator_and_the_kernel_proves_it(name: str, tmp_path: Path) -> None:
    for options in ({}, SHORT):
        model, path = fitted(name, **options), tmp_path / f"{len(options)}.safetensors"
        assert model.certificate_.kind == "certified"
        model.save(path)
        found, again = af.check(path), af.load(path)
        assert found.kind == "certified" and found.proof == "kernel" and str(found).startswith("certified: ")
        assert 0 <= found.measured <= found.kernel <= min(found.bound, found.posterior), "and nothing is rounded up"
        assert type(again) is type(model) and again.certificate_ == model.certificate_ == found
        assert repr(again.scaling_) == repr(model.scaling_) and again.get_params() == model.get_params()
        rows = NEAR if name in ("kernel ridge", "poisson, no offset") else X
        for method in ("predict", "predict_proba", "decision_function"):
            if hasattr(model, method):
                assert np.array_equal(getattr(again, method)(rows), getattr(model, method)(rows))
        for value in ("coef_", "intercept_", "classes_", "outliers_", "scale_", "dual_coef_"):
            if hasattr(model, value):
                assert np.array_equal(getattr(again, value), getattr(model, value))
                assert np.shape(getattr(again, value)) == np.shape(getattr(model, value))
        assert written(again) == path.read_bytes() == written(pickle.loads(pickle.dumps(model)))
        with pytest.raises(ArgumentError, match="fit again"):
            again.plot()


def test_what_is_cut_short_is_calibrated_and_still_proved() -> None:
    """The distance that the kernel proves needs no run: two steps of one are far from the optimum, by so much."""
    for name in ("ridge", "logistic", "poisson", "lasso"):
        far, near = (prove_estimator(parse(written(fitted(name, max_iter=m))))[0] for m in (2, 5000))
        assert far.least > 1e3 * near.most and far.most <= far.least * (1 + 1e-9)


def changed(data: bytes, change: Callable[[dict[str, Any], dict[str, Any]], None], path: Path) -> Path:
    """A file with other contents and the digest that goes with them."""
    path.write_bytes(data)
    header, tensors = storage.read(path, FORM)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    change(header, tensors)
    for key in ("digest", "format"):
        header.pop(key, None)
    path.write_bytes(storage.written(header, hashed(tensors), tensors))
    return path


CHANGED = ("ridge", "several alphas", "lasso", "logistic", "softmax", "poisson", "huber", "kernel ridge")


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_number_is_refused_or_covered(name: str, tmp_path: Path) -> None:
    """Every number alone: what is said afterwards of the stored data and weights is what the kernel proves of them."""
    data, path, source = written(fitted(name)), tmp_path / "x.safetensors", random.Random(0)
    stated = storage.read(changed(data, lambda *_: None, path), FORM)
    refused = covered = 0
    for key in stated[1]:
        for act in (lambda v: 1.01 * v, lambda v: v + 1, lambda v: math.nan):
            if not stated[1][key].numel():
                continue
            at = source.randrange(stated[1][key].numel())

            def change(header: Any, tensors: Any, key: str = key, at: int = at, act: Any = act) -> None:
                flat = tensors[key].reshape(-1)
                flat[at] = act(float(flat[at]))

            try:
                found = af.check(changed(data, change, path))
            except CertificateError:
                refused += 1
                continue
            covered += 1
            assert found.kernel is not None or "kernel" in found.remark or found.remark
            assert found.kernel is None or found.kernel <= min(found.bound, found.posterior)
            # zeros stay what they are, and so does the unit of a column that is not in use; of everything else that a
            # prediction is made of each change is seen
            same = act(float(stated[1][key].reshape(-1)[at])) == float(stated[1][key].reshape(-1)[at])
            same |= key == "x scale" and not stated[1]["coefficients"][:, at % X.shape[1]].any()
            assert same or key not in ("weights", "coefficients", "intercepts", "x scale", "y scale"), (key, at)
    assert refused > 12 and covered > 0


def test_a_claim_that_is_too_small_is_refused(tmp_path: Path) -> None:
    data, path = written(fitted("ridge", **SHORT)), tmp_path / "x.safetensors"
    real = prove_estimator(parse(data))[0]
    for field, value in (("posterior", 0.99 * real.least), ("step_error", 0.0), ("measured", 1.01 * real.most)):

        def change(header: Any, tensors: Any, field: str = field, value: float = value) -> None:
            header["certificate"]["each"][0] |= {field: value}
            if field == "step_error":
                header["certificate"]["each"][0]["distance"] = real.least / 2

        with pytest.raises(CertificateError, match="fit 0 is stated"):
            af.check(changed(data, change, path))
    raw = bytearray(data)
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CertificateError, match="digest"):
        af.check(path)


@pytest.mark.parametrize("name", FITS)
def test_nothing_but_a_certificate_error_comes_out_of_a_file(name: str, tmp_path: Path) -> None:
    """Entries of the header are taken away, or are something else; tensors have other shapes."""
    data, path, source = written(fitted(name)), tmp_path / "x.safetensors", random.Random(name)
    (length,) = struct.unpack("<Q", data[:8])
    whole = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["attnforge"])
    values = (None, -1, 0, 1.5, 10**6, 2**62, "", "x", [], [1.0], {}, True, "Ridge", "HuberRegressor", "mean")

    def places(part: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        inner = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
        return [path, *(each for key, value in inner for each in places(value, (*path, key)))]

    found = [place for place in places({k: whole[k] for k in ("config", "certificate")}) if len(place) > 1]
    outcomes = {"refused": 0, "read": 0}
    for _ in range(40):
        place, value = source.choice(found), copy.deepcopy(source.choice(values))

        def change(header: Any, tensors: Any, place: Any = place, value: Any = value) -> None:
            part = header
            for key in place[:-1]:
                part = part[key]
            part[place[-1]] = value
            if source.random() < 0.2:
                some = source.choice(sorted(tensors))
                tensors[some] = torch.full(source.choice(((1,), (0,), (2, 1), (1, 1, 1))), 0.5, dtype=torch.float64)

        try:
            af.check(changed(data, change, path))
            outcomes["read"] += 1
        except CertificateError:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 15


def test_what_has_no_rule_says_so(tmp_path: Path) -> None:
    mean = KernelRegressor(method="mean", gamma=0.3).fit(NEAR, MANY)
    wide = fitted("ridge")
    wide._given = Given.of(np.zeros((2, 600)), Y[:2], Y[:2])
    wide.settled()
    for model in (mean, wide):
        assert model.certificate_.kind == "analysed" and model.certificate_.remark in str(model.certificate_)
        assert str(model.certificate_).startswith("analysed: ")
    assert "1,200 rows" in beyond_reach(1200, 1, pairs=True) and not beyond_reach(500, 1, pairs=True)
    assert "unknowns" in beyond_reach(10_000, 100) and not beyond_reach(10_000, 50)
    mean.save(tmp_path / "mean.safetensors")
    assert af.check(tmp_path / "mean.safetensors") == mean.certificate_
    assert np.array_equal(af.load(tmp_path / "mean.safetensors").predict(NEAR), mean.predict(NEAR))
    for radius in (0.5, 64.0):
        with pytest.raises(CertificateError, match="radius"):  # its bound is for rows within it
            af.check(changed(written(mean), lambda h, _, r=radius: h["config"].update(radius=r), tmp_path / "other"))
    with pytest.raises(ArgumentError, match="512"):
        wide.save(tmp_path / "wide.safetensors")

    class Own(Ridge):
        pass

    with pytest.raises(ArgumentError, match="own estimators"):
        Own().fit(X, Y).save(tmp_path / "own.safetensors")
    with pytest.raises(ArgumentError, match="no place"):
        LogisticRegression().fit(X, np.where(Y > 0, np.datetime64("2020-01-01"), np.datetime64("2021-01-01"))).save(
            tmp_path / "dates.safetensors"
        )


def test_the_command_line_checks_estimators(tmp_path: Path) -> None:
    path, runner = tmp_path / "x.safetensors", CliRunner()
    model = fitted("ridge")
    model.save(path)
    with pytest.raises(ArgumentError, match="force"):
        model.save(path)
    shown = runner.invoke(app, ["check", str(path)])
    assert shown.exit_code == 0 and "the kernel proves" in shown.output and "certificate holds" in shown.output
    told = json.loads(runner.invoke(app, ["check", str(path), "--json"]).output)
    assert told["certificate"]["kernel"] == af.check(path).kernel and told["certificate"]["kind"] == "certified"
    for command in (["explain", str(path)], ["lipschitz", str(path)], ["run", str(path), "1"],
                    ["explore", str(path), "-o", str(tmp_path / "p.html")],
                    ["export", str(path), "--to", "onnx", "-o", str(tmp_path / "x.onnx")]):  # fmt: skip
        found = runner.invoke(app, command)
        assert found.exit_code != 0 and not isinstance(found.exception, AttributeError), command
    with pytest.raises(ArgumentError, match="fitted estimator"):
        af.files.network(path)


def test_what_an_earlier_version_fitted_says_so(tmp_path: Path) -> None:
    model = fitted("ridge")
    del model._given, model._weights
    with pytest.raises(ArgumentError, match="fit again"):
        model.save(tmp_path / "x.safetensors")


def test_data_are_those_that_were_fitted() -> None:
    """A file has the data of the fit, whatever becomes of the caller's arrays."""
    rows, labels = X.copy(), Y.copy()
    model = Ridge(0.1).fit(rows, labels)
    before = written(model)
    rows += 1
    labels *= 2
    assert written(model) == before


@pytest.mark.parametrize("seed", range(4, 8))
def test_what_is_said_of_targets_side_by_side_is_so_of_all(seed: int) -> None:
    """The posterior is the largest of theirs: that of the target with the largest bound was false for another one."""
    source = np.random.default_rng(seed)
    rows, labels = source.normal(size=(20, 3)), source.normal(size=(20, 4)) * 10.0 ** source.uniform(-3, 0, 4)
    options = {"max_iter": int(source.integers(5, 40)), "dtype": str(source.choice(["float32", "float64"]))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = LinearRegression(**options).fit(rows, labels)
    stated, found = model.certificate_, prove_estimator(parse(written(model)))
    assert stated.kind == "calibrated" or max(far.most for far in found) <= min(stated.bound, stated.posterior)
    assert stated.measured <= max(far.most for far in found)


def test_a_calibrated_scale_claims_no_least_distance() -> None:
    """Huber: what was measured to the optimum at a fixed scale is no distance to the optimum of both."""
    source = np.random.default_rng(0)
    rows = source.normal(size=(12, 2))
    for labels in (rows @ [1.0, 2.0] + 1e-9 * source.normal(size=12), 5.0 * (source.random(12) < 0.3)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            found = HuberRegressor(epsilon=1.0, max_iter=60).fit(rows, labels).certificate_
        assert found.kind == "certified" or found.measured == 0
