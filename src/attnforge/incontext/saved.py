"""Files of fitted estimators: the data, the weights and what is stated of them, one safetensors file, no code.

    config       the class, its parameters, classes, columns' names, how many steps were made, of each fit the network's
                 class of condition numbers and the step size
    certificate  the certificates of all fits, and which one speaks for them
    tensors      rows, labels, sample weights as given; means and scales; weights in the prompt's units; coefficients
                 and intercepts in those of the data

Nothing in a file is believed. `load` rebuilds the estimator from its frozen network, which depends on the description
alone; `check` has the kernel prove the distance of the stored weights from the optimum of the stored data, again from
the numbers in the file (docs/kernel.md).
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..certificates import storage
from ..certificates.certificate import hashed
from ..certificates.schema import Either, Whole, Word, require
from ..dtypes import DTYPES, Array
from ..errors import ArgumentError, AttnforgeError, CertificateError
from ..kernel.balls import NotProved
from ..kernel.file import parse
from ..kernel.incontext.prove import prove_estimator
from ..progress import shown
from ..saving import free_file, write_whole
from . import prompt
from .blocks import frozen
from .certificate import ConvergenceCertificate, kernel_mean
from .estimator import LARGEST, Given, InContextEstimator, too_wide
from .generalised import SCALE_CHOICE, HuberRegressor, LogisticRegression, PoissonRegressor
from .kernel import LARGEST_SUM, KernelRegressor, kernel_network
from .linear import ElasticNet, Lasso, LinearModel, LinearRegression, Ridge, spoken_for
from .losses import HUBER, LINEAR, LOGISTIC, LOSSES, POISSON, SOFTMAX, Loss
from .prompt import Scaling

FAMILY = "estimator"
CLASSES: dict[str, type[Any]] = {
    each.__name__: each
    for each in (LinearRegression, Ridge, Lasso, ElasticNet, LogisticRegression, PoissonRegressor, HuberRegressor,
                 KernelRegressor)
}  # fmt: skip
OUTSIDE = (prompt.AFFINE, prompt.STOPPING, prompt.SMALLEST_CURVATURE, prompt.LIVE_CURVATURE, prompt.STEP_CHOICE,
           prompt.HELD, SCALE_CHOICE, LARGEST_SUM)  # fmt: skip
ALMOST = 1e-12  # by which rounded units may be off: far below what any bound of a kernel allows for
DUAL = ("kernel ridge", "kernel mean")  # what certificates of kernel estimators call their loss
TENSORS: dict[str, int] = {
    "rows": 2, "labels": 2, "sample weight": 1, "weights": 3, "coefficients": 2, "intercepts": 1, "x mean": 1,
    "x scale": 2, "y mean": 1, "y scale": 1, "scale": 1,
}  # fmt: skip
LABEL = Either(bool, float, str)  # of a class
NUMBER = Either(None, float)  # null is infinity, or what the estimator makes of None
STATED = {
    "kind": Word("certified", "analysed", "calibrated"), "rho": float, "depth": Whole(0, 2**53), "distance": NUMBER,
    "step_error": NUMBER, "growth": NUMBER, "amplification": NUMBER, "residual": NUMBER, "measured": NUMBER,
    "posterior": NUMBER, "curvature": (NUMBER, NUMBER), "dtype": Word("float32", "float64"),
    "loss": Word(*LOSSES, *DUAL), "reason": str, "aside": NUMBER, "domain": str,
}  # fmt: skip
FIT = {"spectrum": (float, float), "doublings": Whole(0, 64), "step": float, "outside": [Word(*OUTSIDE)]}
CONFIG = {
    "estimator": Word(*CLASSES), "params": {}, "classes": Either(None, [LABEL]), "columns": Either(None, [str]),
    "steps": Whole(0, 2**53), "radius": float, "single": bool, "shared": bool, "fits": [FIT],
}  # fmt: skip
FORM = {
    "format": Whole(), "family": Word(FAMILY), "config": CONFIG, "digest": str,
    "certificate": {"each": [STATED], "chosen": Whole()},
}  # fmt: skip
PARAMS: dict[str, Any] = {
    "tol": float, "max_iter": Whole(1, 2**53), "condition": NUMBER, "dtype": Word("float32", "float64"),
    "alpha": Either(float, [float]), "fit_intercept": bool, "l1_ratio": float, "C": NUMBER, "epsilon": float,
    "gamma": NUMBER, "method": Word("ridge", "mean"), "class_weight": Either(None, Word("balanced"), [(LABEL, float)]),
}  # fmt: skip
WRONG = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RuntimeError, AttnforgeError)


def save(est: InContextEstimator, path: str | Path, force: bool = False) -> None:
    """Write a fitted estimator; a file that is there already is refused unless `force`."""
    write_whole(free_file(path, force=force), written(est))


def written(est: InContextEstimator) -> bytes:
    """The bytes of a file."""
    name = type(est).__name__
    if CLASSES.get(name) is not type(est):
        raise ArgumentError(f"files are for attnforge's own estimators, {', '.join(CLASSES)}; got {name}")
    tensors = {key: torch.from_numpy(np.ascontiguousarray(a, dtype=np.float64)) for key, a in _tensors(est).items()}
    if too_wide(est._given):
        raise ArgumentError(too_wide(est._given))
    linear = isinstance(est, LinearModel)
    each = est.certificates_ if linear else (est.certificate_,) * len(est._weights)
    chosen = next((k for k, one in enumerate(_scalings(est)) if one is est.scaling_), 0)
    config, stated = _described(est), {"each": [_to_json(one) for one in each], "chosen": chosen}
    header = {"family": FAMILY, "config": config, "certificate": stated}
    try:
        found = storage.written(header, hashed(tensors), tensors)
        require({"format": 0, "digest": "", **header}, FORM, "the file")
        _parameters(CLASSES[name], config["params"])
        return found
    except (TypeError, ValueError, CertificateError) as error:
        raise ArgumentError(f"a parameter or a label of {name} has no place in a file: {error}") from error


def _scalings(est: InContextEstimator) -> list[Scaling]:
    """One for every fit."""
    return list(est.scalings_) if isinstance(est, LinearModel) else [est.scaling_] * len(est._weights)


def _tensors(est: InContextEstimator) -> dict[str, Array]:
    given, scalings, scale = est._given, _scalings(est), est.scaling_
    dual = isinstance(est, KernelRegressor)
    means = [each.y_mean[min(k, len(each.y_mean) - 1)] for k, each in enumerate(scalings)]
    return {
        "rows": given.rows, "labels": given.labels, "sample weight": given.weight, "weights": est._weights,
        "coefficients": est._weights[:, 0] * scale.y_scale if dual else np.atleast_2d(est.coef_),
        "intercepts": np.zeros(0) if dual or not est.get_params()["fit_intercept"] else np.atleast_1d(est.intercept_),
        "x mean": scale.x_mean, "x scale": np.stack([each.x_scale for each in scalings]), "y mean": np.array(means),
        "y scale": np.array([each.y_scale for each in scalings]), "scale": np.array([getattr(est, "scale_", 0.0)]),
    }  # fmt: skip


def _described(est: InContextEstimator) -> dict[str, Any]:
    scalings, classes = _scalings(est), getattr(est, "classes_", None)
    return {
        "estimator": type(est).__name__, "params": {name: _plain(value) for name, value in est.get_params().items()},
        "classes": None if classes is None else [_plain(label) for label in classes.tolist()],
        "columns": list(getattr(est, "feature_names_in_", ())) or None, "steps": int(est.n_iter_),
        "radius": float(getattr(est, "radius_", 0.0)), "shared": all(each is scalings[0] for each in scalings),
        "single": est.single_ if isinstance(est, KernelRegressor) else np.ndim(getattr(est, "coef_", 0)) == 1,
        "fits": [{"spectrum": [float(end) for end in each.spectrum], "doublings": each.doublings,
                  "step": float(each.step), "outside": list(each.outside)} for each in scalings],
    }  # fmt: skip


def _plain(value: Any) -> Any:
    """A parameter as JSON: infinity is null, a dict a list of pairs."""
    if isinstance(value, dict):
        return [[_plain(key), float(weight)] for key, weight in value.items()]
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [float(each) for each in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def _to_json(certificate: ConvergenceCertificate) -> dict[str, Any]:
    def finite(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    out = {name: getattr(certificate, name) for name in STATED}
    return {name: [finite(each) for each in value] if isinstance(value, tuple) else finite(value)
            for name, value in out.items()}  # fmt: skip


def _from_json(data: dict[str, Any]) -> ConvergenceCertificate:
    found: dict[str, Any] = {name: math.inf if data[name] is None else data[name] for name in STATED}
    low, high = (math.inf if end is None else end for end in data["curvature"])
    return ConvergenceCertificate(**{**found, "curvature": (low, high)})


def load(path: str | Path) -> InContextEstimator:
    """A fitted estimator from its file; raises `CertificateError` when it is unreadable, truncated or tampered with."""
    header, tensors = storage.read(path, FORM)
    name = Path(path).name
    weights = hashed(tensors)
    if header["digest"] != storage.digest(header, weights):
        raise CertificateError(f"{name}: the file does not have the digest it states: it was changed after saving")
    try:
        return _rebuilt(header, {key: _array(key, tensors) for key in TENSORS if tensors})
    except CertificateError as error:
        raise CertificateError(f"{name}: {error}") from error
    except WRONG as error:
        raise CertificateError(f"{name} does not describe an estimator of this version: {error}") from error


def _array(key: str, tensors: dict[str, torch.Tensor]) -> Array:
    if key not in tensors or set(tensors) != set(TENSORS):
        raise CertificateError(f"missing or unknown tensors {sorted(set(tensors) ^ set(TENSORS))}")
    found = tensors[key]
    if found.dtype != torch.float64 or found.dim() != TENSORS[key] or not bool(torch.isfinite(found).all()):
        raise CertificateError(f"'{key}' must be finite float64 numbers of {TENSORS[key]} dimensions")
    return np.asarray(found.numpy())


def _rebuilt(header: dict[str, Any], found: dict[str, Array]) -> InContextEstimator:
    """The estimator, every shape compared with every other first."""
    config = header["config"]
    kind = CLASSES[config["estimator"]]
    est = kind(**_parameters(kind, config["params"]))
    est._check_common()
    (n, d), (fits, states, _) = found["rows"].shape, found["weights"].shape
    dual, linear = kind is KernelRegressor, issubclass(kind, LinearModel)
    classes = config["classes"]
    outputs = found["labels"].shape[1]
    wanted = {
        "labels": (n, outputs), "sample weight": (n,), "coefficients": (fits * states, n if dual else d),
        "x mean": (d,), "x scale": (fits, d), "y mean": (fits,), "y scale": (fits,), "scale": (1,),
        "intercepts": (0 if dual or not est.fit_intercept else fits * states,),
        "weights": (outputs if dual or linear else 1, states, n if dual else d if linear else d + 1),
    }  # fmt: skip
    wrong = [key for key, shape in wanted.items() if found[key].shape != shape]
    if wrong or not 0 < d <= LARGEST or n < 1 or outputs < 1 or not (outputs == 1 or dual or linear):
        raise CertificateError(f"the sizes of its numbers do not fit together: {', '.join(wrong) or 'rows'}")
    if (classes is None) != (kind is not LogisticRegression) or not (
        states == 1 if classes is None else states == (1 if len(classes) == 2 else len(classes)) and len(classes) > 1
    ):
        raise CertificateError("classes are for logistic regression, and there is a state for each of them")
    if states > LARGEST or not ((found["x scale"] > 0).all() and (found["y scale"] > 0).all()):
        raise CertificateError("scales are positive, and there are no more states than columns may be")
    if len(config["fits"]) != fits or len(header["certificate"]["each"]) != fits:
        raise CertificateError("there is not one certificate for each fit")
    est.n_features_in_, est.n_iter_ = d, config["steps"]
    if config["columns"]:
        if len(config["columns"]) != d:
            raise CertificateError("there are not as many names as columns")
        est.feature_names_in_ = np.array(config["columns"], dtype=object)
    est._given = Given(found["rows"], found["labels"], found["sample weight"])
    est._weights = found["weights"]
    _restore(est, header, found)
    return est  # type: ignore[no-any-return]


def _parameters(kind: type[Any], stated: dict[str, Any]) -> dict[str, Any]:
    known = kind().get_params()
    if set(stated) != set(known):
        raise CertificateError(f"missing or unknown parameters {sorted(set(stated) ^ set(known))}")
    require(stated, {name: PARAMS[name] for name in known}, "parameters")
    out = dict(stated)
    if "C" in out and out["C"] is None:
        out["C"] = math.inf
    if isinstance(out.get("class_weight"), list):
        out["class_weight"] = {label: weight for label, weight in out["class_weight"]}
    return out


def _restore(est: Any, header: dict[str, Any], found: dict[str, Array]) -> None:
    config, stated = header["config"], header["certificate"]
    fits, chosen = config["fits"], stated["chosen"]
    count, dtype = len(fits), DTYPES[est.dtype]
    means = [found["y mean"] if config["shared"] else found["y mean"][[k]] for k in range(count)]
    scalings = [
        Scaling(found["x mean"], found["x scale"][k], means[k], float(found["y scale"][k]),
                (fits[k]["spectrum"][0], fits[k]["spectrum"][1]), fits[k]["doublings"], fits[k]["step"],
                tuple(fits[k]["outside"])) for k in range(count)
    ]  # fmt: skip
    each = [_from_json(one) for one in stated["each"]]
    losses = {_loss(est, found["weights"].shape[1]).name if not isinstance(est, KernelRegressor) else
              f"kernel {est.method}"}  # fmt: skip
    if {(one.loss, one.dtype) for one in each} != {(loss, est.dtype) for loss in losses}:
        raise CertificateError("the certificates speak of another loss or dtype")
    if config["shared"]:
        if any(one != each[0] for one in each) or (found["x scale"] != found["x scale"][0]).any():
            raise CertificateError("fits that share their units have one certificate")
        scalings, each = [scalings[0]] * count, [each[0]] * count
    d, outputs = found["x mean"].size, found["labels"].shape[1]
    est.scaling_, doublings = scalings[chosen], scalings[chosen].doublings
    est.certificate_ = each[chosen]
    rows, y_scale, states = found["coefficients"], est.scaling_.y_scale, found["weights"].shape[1]
    if isinstance(est, KernelRegressor):
        ridge = est.method == "ridge"
        if not 0 < config["radius"] < math.inf or (est.gamma is not None and not est.gamma > 0) or not est.alpha > 0:
            raise CertificateError("radius, gamma and alpha are positive")
        gamma = 1 / d if est.gamma is None else float(est.gamma)
        reach = float(np.linalg.norm(est.scaling_.scaled(est._given.rows), axis=1).max())
        wide = math.sqrt(2 * gamma) * found["x scale"] / config["radius"]
        if not (reach <= 1 + ALMOST and np.abs(wide - 1).max() <= ALMOST):
            raise CertificateError("rows lie within the stated radius, in units of the kernel's length")
        est.network_ = kernel_network(est.method, d, outputs, doublings if ridge else 0, dtype)
        est.rows_, est.radius_, est.single_ = est.scaling_.scaled(est._given.rows), config["radius"], config["single"]
        est.values_ = np.ascontiguousarray(found["weights"][:, 0].T) if ridge else est._given.labels / y_scale
        if ridge:
            est.dual_coef_ = np.ascontiguousarray(rows.T)
        est.settled()
        return
    loss = _loss(est, states)
    linear = isinstance(est, LinearModel)
    kind = "nesterov" if not linear or isinstance(est, ElasticNet) else "heavy ball"
    width = found["weights"].shape[2]
    est.network_ = frozen(loss, kind, doublings, width, states if loss.joint else 1, dtype, isinstance(est, ElasticNet))  # type: ignore[arg-type]
    single = config["single"] and len(rows) == 1
    est.coef_ = rows[0] if single or not (linear or states > 1 or loss is LOGISTIC) else rows
    fitted = found["intercepts"] if est.fit_intercept else np.zeros(len(rows))
    est.intercept_ = float(fitted[0]) if single else fitted
    if linear:
        est.certificates_, est.scalings_ = tuple(each), tuple(scalings)
        est.intercept_ = est.intercept_ if est.fit_intercept else 0.0
        est.certificate_ = each[0] if config["shared"] else spoken_for(each, chosen)
    if loss in (LOGISTIC, SOFTMAX):
        est.classes_ = np.array(config["classes"])
    if loss is HUBER:
        est.scale_ = float(found["scale"][0])
        est.outliers_ = est.far(est._given.rows, est._given.labels[:, 0])
    est.settled()


def _loss(est: Any, states: int) -> Loss:
    if isinstance(est, LogisticRegression):
        return LOGISTIC if states == 1 else SOFTMAX
    return POISSON if isinstance(est, PoissonRegressor) else HUBER if isinstance(est, HuberRegressor) else LINEAR


@shown("checking")
def check(path: str | Path) -> ConvergenceCertificate:
    """What a file states, after the kernel has proved it; `CertificateError` where it does not hold.

    Every fit is proved. The certificate that speaks for all comes back, with what the kernel proves of the fits that it
    shares its units with in `kernel`; `remark` says why where it proves nothing.
    """
    est, name = load(path), Path(path).name
    each = est.certificates_ if isinstance(est, LinearModel) else (est.certificate_,) * len(est._weights)
    return proved(est, each, Path(path).read_bytes(), name)


def proved(
    est: InContextEstimator, each: tuple[ConvergenceCertificate, ...], data: bytes, name: str
) -> ConvergenceCertificate:
    """The certificate that speaks for all fits, after the kernel has looked at each of them."""
    if isinstance(est, KernelRegressor) and est.method == "mean":
        scale = float(est.scaling_.x_scale[0])
        found = kernel_mean(est.rows_, est.values_, est.radius_, scale, est.network_.dtype)
        found = replace(found, remark=est.certificate_.remark)
        if found != est.certificate_:
            raise CertificateError(f"{name}: the file states another bound or domain than can be computed: {found}")
        return est.certificate_
    try:
        distances = prove_estimator(parse(data, name))
    except NotProved as error:
        return replace(est.certificate_, remark=str(error))
    most = max(far.most for far, units in zip(distances, _scalings(est), strict=True) if units is est.scaling_)
    for k, (stated, far) in enumerate(zip(each, distances, strict=True)):
        shared = max(other.most for one, other in zip(each, distances, strict=True) if one == stated)
        if stated.kind != "calibrated" and not far.most <= min(stated.bound, stated.posterior):
            raise CertificateError(
                f"{name}: fit {k} is stated to be within {min(stated.bound, stated.posterior)!r} of its optimum, but "
                f"only {far.most!r} can be proved"
            )
        if stated.kind != "calibrated" and not far.scale <= stated.posterior * (1 + 2.0**-40) + 2.0**-48:
            raise CertificateError(f"{name}: the scale is off by up to {far.scale!r}, more than is stated")
        if stated.measured > shared:
            raise CertificateError(
                f"{name}: fit {k} is stated to be {stated.measured!r} away, at most {shared!r} is so"
            )
    own = replace(est.certificate_, kernel=most)
    return own if own.kind == "calibrated" else replace(own, proof="kernel")
