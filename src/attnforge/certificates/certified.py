"""`CertifiedModule`: a network that carries a certificate, guards its domain, and knows when the certificate is
stale; and `tensors`, which reads what people hand to one: numbers, lists, arrays, data frames, keyword arguments."""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable, without loading the compiler

from ..arguments import shortened
from ..box import Box
from ..dtypes import SHIPPED, dtype_name, transformed, underlying
from ..errors import (
    ArgumentError,
    AttnforgeError,
    CertificateError,
    DomainError,
    DomainWarning,
    PrecisionError,
    closest,
)
from ..progress import shown
from . import storage
from .certificate import Certificate, upper_text, weights_hash
from .rounding import (
    EXP_ULPS,
    exponential_within,
    refuse_flushed_numbers,
    refuse_reduced_precision,
    stated_ulps,
)
from .schema import require

#: What a description that fits its form but makes no sense may raise on the way to a network, or to its bound.
WRONG = (
    *(AttnforgeError, ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RecursionError),
    *(RuntimeError, StopIteration, TypeError, ValueError),
)
#: Where the classes of families are defined that a file may name before anyone has loaded them: family -> module.
HOMES: dict[str, str] = {}
FILES = "attnforge.files"  # which fills it
#: Which modules put what files of earlier versions say into the words of this one: family -> module with `today`.
EARLIER: dict[str, str] = {}
VIEWS = "attnforge.report.views"  # where the methods live that draw and explain networks
EXPLORER = "attnforge.explorer"  # and those that show them running
SHOWN = 60  # letters of a target in a repr: what leaves room for the box on a line


class CertifiedModule(nn.Module):
    """Base of everything that ships with a certificate: heads, compiled networks, theorem constructions.

    A subclass gives `core` (attention and affine maps only: what is exported, saved and certified), `recertify`,
    `config` and `rebuild`. Checks of the input live in `forward`, around the core; exported graphs have none,
    and under torch.compile they run before the graph; where fullgraph=True leaves no place for them, a warning says so.
    """

    family: ClassVar[str] = ""
    #: What pages call such a network, after its target.
    called: ClassVar[str] = "a network"
    #: The form of `config` in files (see `schema`).
    schema: ClassVar[Any] = Any
    families: ClassVar[dict[str, type[CertifiedModule]]] = {}
    box: Box
    strict: bool = False
    #: The choices of the kernel's proof, where one was made for these weights (docs/kernel.md).
    derivation: dict[str, Any] | None = None
    _certificate: Certificate | None = None
    _warned: bool = False
    _ulps: float = EXP_ULPS  # what the certificate allows the exponential

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.family:
            CertifiedModule.families[cls.family] = cls

    def core(self, *inputs: Tensor) -> Tensor:
        """The attention-only computation itself."""
        raise NotImplementedError

    def recertify(self) -> Certificate:
        """A certificate computed anew from the weights as they are now."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """What, besides the tensors of `state_dict`, describes this module; JSON only."""
        raise NotImplementedError

    @classmethod
    def rebuild(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> CertifiedModule:
        """The module that `config` and `state_dict` describe."""
        raise NotImplementedError

    @classmethod
    def earlier(cls, config: dict[str, Any]) -> bool:
        """Whether a description is one of an earlier version, in other words than `config` gives today."""
        return False

    def example_input(self) -> tuple[Tensor, ...]:
        """A small input for tracing: two points of the box."""
        points = self.box.sample(2, dtype=self.dtype)
        return tuple(points.unbind(-1)) if self.box.names else (points,)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        found = _first_parameter(self)  # PyTorch's own iterator takes as long as a small network
        return next(self.parameters()).dtype if found is None else found.dtype

    @property
    def certificate(self) -> Certificate:
        """The certificate of these weights; raises `CertificateError` once the weights or their dtype have changed."""
        if self._certificate is None:
            raise CertificateError("this network has no certificate yet: af.certify(net) computes one")
        if self._certificate.weights != weights_hash(self):
            raise CertificateError(
                f"the certificate is stale: it was made for other weights ({self._certificate.dtype}, "
                f"{self._certificate.weights[:12]}), and these have changed since "
                "(training, .to(dtype) or load_state_dict); "
                "af.certify(net) computes a new one"
            )
        return self._certificate

    @property
    def bound(self) -> float | None:
        """The certified bound, or None where there is only a measurement."""
        return self.certificate.bound

    @property
    def measured(self) -> float | None:
        """The largest error that was measured, where it was."""
        return self.certificate.measured

    @property
    def beyond(self) -> str:
        """Why the kernel has no rule for this, "" where it has one (docs/kernel.md)."""
        return ""

    @property
    def storable(self) -> bool:
        """Whether a file can hold all that the certificate speaks of."""
        return True

    def attach(self, certificate: Certificate) -> Certificate:
        """Tie a certificate to the weights as they are now; it says so where the kernel could not prove its bound."""
        refuse_flushed_numbers()
        alone = certificate.bound is not None and certificate.kernel is None and not certificate.remark
        remark = self.beyond if alone else certificate.remark
        self._certificate = dataclasses.replace(certificate, weights=weights_hash(self), remark=remark)
        self.derivation = None
        self._ulps = stated_ulps(certificate.assumptions)
        return self._certificate

    #: Whether the numbers of a named box are the last dimension of one input, or an input each.
    stacked: ClassVar[bool] = False

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """The output for tensors; numbers, lists, arrays and data frames are rounded to the network's dtype.

        Inputs with names can be given by name: `net(x=0.5, y=1.0)`, a dict, or a data frame with such columns.
        """
        if not torch.compiler.is_compiling():
            inputs = self.as_tensors(inputs, named)
            if not transformed(*inputs):
                self.guard(*inputs)
            else:
                self._guard_within(*inputs)
        elif not torch.compiler.is_exporting() and not _one_graph():
            _guard_outside(self, *inputs)
        return self.core(*inputs)

    def _guard_within(self, *inputs: Tensor) -> None:
        """The guard where torch.func passes points on: on the numbers below, unless these are a tracer's."""
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

        below = tuple(map(underlying, inputs))
        if all(type(x) is Tensor for x in below):
            with temporarily_clear_interpreter_stack():  # type: ignore[no-untyped-call]
                self.guard(*below)

    def as_tensors(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Tensor, ...]:
        """The input tensors that arguments of `forward` stand for."""
        if not named and all(isinstance(x, Tensor) for x in inputs):
            return inputs
        return tensors(inputs, named, self.box.names, self.stacked, next(self.parameters()))

    def predict(self, *inputs: Any, **named: Any) -> np.ndarray:
        """The output as an array, for whatever `forward` takes and for tensors of any dtype, without gradients.

        >>> import attnforge as af
        >>> af.compile("2*x + y", {"x": (0, 1), "y": (0, 1)}, eps=1e-3).predict(x=[0.0, 0.5], y=1)
        array([1., 2.], dtype=float32)
        """
        with torch.no_grad():
            given = (x if x.is_complex() else x.to(self.dtype) for x in self.as_tensors(inputs, named))
            return self(*given).cpu().numpy()  # type: ignore[no-any-return]

    def written_out(self) -> Certificate | None:
        """The certificate of the core as exports hold it, heads written out; None where there is none, because what is
        certified is another reading of these heads, which rounds otherwise."""
        return self.certificate

    def stands_for(self) -> CertifiedModule | None:
        """The network that this one is another form of; None where it is none, or where that is not known."""
        return None

    def plot(self, path: str | Path | None = None, *, force: bool = False) -> Any:
        """Output, target and error as a figure; written to `path` (.png, .svg, .pdf) if one is given."""
        return _view("plot")(self, path, force=force)

    def report(self, path: str | Path | None = None, *, force: bool = False) -> Any:
        """The page about this network; written to `path` (.html) if one is given."""
        return _view("report")(self, path, force=force)

    def explore(self, path: str | Path | None = None, *, force: bool = False) -> Any:
        """The page in which this network runs; written to `path` (.html) if one is given, else its text."""
        return _view("explore", EXPLORER)(self, path, force=force)

    def _repr_html_(self) -> str:
        """What notebooks show, without JavaScript."""
        return str(_view("compact", EXPLORER)(self))

    def explain(self) -> str:
        """What computes what, at which error, in words: what `attnforge explain` prints."""
        return str(_view("explain")(self))

    def measure(self, points: int = 4096, *, seed: int = 0) -> Any:
        """The error at random points and corners of the box: `worst` and `count`. A measurement, not a bound."""
        return _view("measure")(self, points, seed)

    def __repr__(self) -> str:
        found, extra = self._certificate, self.extra_repr()
        more = f"; {extra}" if extra else ""
        if found is None or found.weights != weights_hash(self):
            return f"{type(self).__name__}(on {self.box!r}, {dtype_name(self.dtype)}, no certificate{more})"
        bound = f"bound {upper_text(found.bound)}" if found.bound is not None else f"measured {found.measured:.3g}"
        target = shortened(found.target, SHOWN)
        return f"{type(self).__name__}({target} on {self.box!r}, {found.dtype}, {bound}{more})"

    def guard(self, *inputs: Tensor) -> None:
        """Refuse what cannot be evaluated; warn once about (or, if `strict`, refuse) what lies outside the box."""
        expected = len(self.box.names) if self.box.names else 1
        if len(inputs) != expected:
            raise ArgumentError(f"expected {expected} input tensor(s), got {len(inputs)}")
        outward = self.box.outward(self.dtype)
        for i, x in enumerate(inputs):
            name = self.box.names[i] if self.box.names else "input"
            self.check_tensor(x, name)
            if self.box.names:
                lo, hi = outward.intervals()[i]
                low, high = (float(v) for v in torch.aminmax(x.detach())) if x.numel() else (lo, hi)
                self.check_range(name, low, high, lo, hi)
            else:
                self.check_shape(x)
                low, high = (float(v) for v in torch.aminmax(x.detach())) if x.numel() else (0.0, 0.0)
                self.check_range(name, low, high, float(outward.lower.min()), float(outward.upper.max()))

    def check_tensor(self, x: Tensor, name: str) -> None:
        """Raise unless x is a floating tensor of this module's dtype, evaluated without reduced precision."""
        if not isinstance(x, Tensor):
            raise ArgumentError(f"'{name}' must be a torch tensor, got {type(x).__name__}; use torch.tensor(...)")
        if not x.is_floating_point():
            raise ArgumentError(
                f"'{name}' must be a floating tensor ({self.dtype}), got {x.dtype}; use x.to({self.dtype})"
            )
        if x.dtype != self.dtype:
            raise ArgumentError(
                f"'{name}' is {x.dtype} and the weights are {self.dtype}: "
                f"convert the input (x.to({self.dtype}), or net.predict(x))"
                + (f", or build with dtype={x.dtype}" if x.dtype in SHIPPED else "")
            )
        if x.layout != torch.strided:
            raise ArgumentError(f"'{name}' is sparse ({x.layout}); use x.to_dense()")
        refuse_reduced_precision(x)
        if x.device.type != "cpu" and self._ulps < EXP_ULPS:
            raise PrecisionError(
                f"the certificate of this network allows exponentials within {self._ulps:g} u, which '{x.device}' may "
                f"not keep; af.certify(net) computes one that allows {EXP_ULPS:g} u, or use the CPU"
            )

    def check_shape(self, x: Tensor) -> None:
        """Raise unless x is a batch of points of the box."""
        shape = self.box.shape
        if x.dim() < len(shape) or x.shape[x.dim() - len(shape) :] != shape:
            wanted = ", ".join(["...", *map(str, shape)])
            raise ArgumentError(f"expected an input of shape ({wanted}), got {tuple(x.shape)}")

    def check_range(self, name: str, low: float, high: float, lo: float, hi: float) -> None:
        """Raise on NaN and infinity; warn once, or raise if `strict`, when [low, high] leaves [lo, hi]."""
        if not (abs(low) < float("inf") and abs(high) < float("inf")):
            raise DomainError(f"'{name}' holds NaN or infinity; this network is defined on {self.box!r}")
        if low >= lo and high <= hi:
            return
        worst = low if low < lo else high
        message = f"'{name}' reaches {worst:.9g}, outside [{lo:.9g}, {hi:.9g}]: there the certificate says nothing"
        if self.strict:
            raise DomainError(message + "; clamp the input or build for a larger interval")
        if not self._warned:
            self._warned = True
            warnings.warn(message + " (warned once; strict=True raises instead)", DomainWarning, stacklevel=4)

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write weights, description and certificate to one safetensors file; `attnforge.load` reads it back.

        A file that is there already is refused unless `force=True`; until the new one is whole, it stays as it is.
        """
        storage.write(path, self._header(), weights_hash(self), self.state_dict(), force)

    def written(self) -> bytes:
        """What `save` writes."""
        return storage.written(self._header(), weights_hash(self), self.state_dict())

    def _header(self) -> dict[str, Any]:
        header = {"family": self.family, "config": self.config(), "certificate": self.certificate.to_json()}
        return header if self.derivation is None else {**header, "derivation": self.derivation}


def _first_parameter(module: nn.Module) -> nn.Parameter | None:
    """What `parameters()` gives first."""
    for own in module._parameters.values():
        if own is not None:
            return own
    for child in module._modules.values():
        if child is not None and (found := _first_parameter(child)) is not None:
            return found
    return None


def _one_graph() -> bool:
    """Whether torch.compile was asked for one whole graph, which has no place for a guard: then a warning says so.

    Asked once, while the graph is traced.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    whole = bool(InstructionTranslator.current_tx().one_graph)
    if whole:
        warnings.warn(
            "compiled with fullgraph=True, this network is not guarded: autocast, NaN and points outside of the box "
            "pass unnoticed, and there the certificate says nothing; leave fullgraph out to keep the guard",
            DomainWarning,
            stacklevel=2,
        )
    return whole


_one_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result


@_disable_dynamo
def _guard_outside(module: CertifiedModule, *inputs: Tensor) -> None:
    """The guard of a network under torch.compile: outside of its graph, so that it sees every call."""
    module.guard(*inputs)


def _view(name: str, module: str = VIEWS) -> Any:
    """What shows a network: a function of a module above this one, loaded when it is wanted."""
    return getattr(importlib.import_module(module), name)


@shown("certifying")
def certify(net: CertifiedModule) -> Certificate:
    """Recompute the certificate of a network's present weights, attach it and return it; `CertificateError` says why
    there is none."""
    if not isinstance(net, CertifiedModule):
        raise ArgumentError(f"certify takes a network built by attnforge, got {type(net).__name__}")
    _require_own_weights(net)
    try:
        return net.attach(net.recertify())
    except (DomainError, PrecisionError) as error:  # what says of weights being built that they cannot be
        raise CertificateError(f"no certificate can be computed for these weights: {error}") from error


def _require_own_weights(net: CertifiedModule) -> None:
    """Raise where what is computed need not be what the stored weights say: hooks and parametrizations (pruning, weight
    norm) make others of them before every call, and a bound would speak of those that happen to be there now."""
    for name, module in net.named_modules():
        where = f"'{name}'" if name else "the network"
        hooks = (module._forward_pre_hooks, module._forward_hooks)
        if any(hooks) or "forward" in vars(module) or "parametrizations" in module._modules:
            raise CertificateError(
                f"{where} has hooks, a parametrization or another forward: what it computes is not in the weights that "
                "a certificate speaks of; take them off first (handle.remove(), torch.nn.utils.prune.remove, "
                "remove_weight_norm, remove_parametrizations)"
            )
        loose = [key for key, x in vars(module).items() if isinstance(x, Tensor) and not key.startswith("_")]
        if loose and not isinstance(module, CertifiedModule):  # which holds what it is for beside its layers
            raise CertificateError(
                f"'{loose[0]}' of {where} is a tensor and no parameter: a certificate "
                "could not tell when it changes; make it an nn.Parameter"
            )


def family_of(stated: object, name: str) -> type[CertifiedModule]:
    """The class of the family that the file `name` states; `CertificateError` if there is none."""
    family = str(stated)
    if family not in CertifiedModule.families and not HOMES:
        importlib.import_module(FILES)
    if family not in CertifiedModule.families and family in HOMES:
        importlib.import_module(HOMES[family])
    if family not in CertifiedModule.families:
        raise CertificateError(f"{name}: unknown kind of network {stated!r}")
    return CertifiedModule.families[family]


def rebuilt(kind: type[CertifiedModule], config: dict[str, Any], tensors: dict[str, Tensor]) -> CertifiedModule:
    """The module of a description, which is put into today's words first where an earlier version wrote it."""
    if kind.earlier(config):
        config = importlib.import_module(EARLIER[kind.family]).today(config, tensors)
    return kind.rebuild(config, tensors)


def load(path: str | Path) -> CertifiedModule:
    """Read a network back; raises `CertificateError` when the file is unreadable, truncated or tampered with."""
    header, tensors = storage.read(path)
    name = Path(path).name
    kind = family_of(header.get("family"), name)
    require(header["config"], kind.schema, f"the description in {name}")
    try:
        module = rebuilt(kind, header["config"], tensors)
        expected, given = set(module.state_dict()), set(tensors)
        if expected != given:
            raise CertificateError(f"{name}: missing or unknown tensors {sorted(expected ^ given)}")
        module.load_state_dict(tensors, strict=True)
        certificate = Certificate.from_json(header["certificate"])
    except CertificateError:
        raise
    except WRONG as error:
        raise CertificateError(f"{name} does not describe a network of this version: {error}") from error
    found = weights_hash(module)
    if found != certificate.weights:
        raise CertificateError(
            f"{name}: the weights do not have the hash that the certificate states "
            f"({found[:12]} instead of {certificate.weights[:12]}): the file was changed after it was certified"
        )
    if header.get("digest") != storage.digest(header, found):
        raise CertificateError(f"{name}: the header does not have the digest it states: it was changed after saving")
    module.attach(certificate)
    module.derivation = header.get("derivation")
    return module.eval()


@shown("checking")
def check(path: str | Path) -> Certificate:
    """Recompute a file's certificate from its weights and description; raises `CertificateError` if it does not
    hold."""
    module, name = load(path), Path(path).name
    stated = module.certificate
    try:
        with exponential_within(stated_ulps(stated.assumptions)):
            found = module.recertify()
    except CertificateError:
        raise
    except WRONG as error:
        raise CertificateError(f"{name}: no certificate can be computed for this file: {error}") from error
    if not stated.says_as(found):
        raise CertificateError(f"{name}: the stated certificate speaks of another target, box, dtype, unit")
    if stated.hypothesis and stated.hypothesis != found.hypothesis:
        raise CertificateError(f"{name}: the stated certificate speaks of other functions than: {found.hypothesis}")
    if found.bound is not None and (stated.bound is None or found.bound > stated.bound):
        raise CertificateError(
            f"{name}: the file states the bound {stated.bound}, but only {found.bound:.6e} can be proved"
        )
    return module.attach(found)


def tensors(
    inputs: Sequence[Any], named: Mapping[str, Any], names: Sequence[str] | None, stacked: bool, like: Tensor
) -> tuple[Tensor, ...]:
    """The input tensors of a network, in the dtype and on the device of `like`, a tensor of its own.

    Tensors stay as they are; numbers, lists and arrays are rounded to the dtype. Columns of a data frame, entries of a
    dict and keyword arguments go by `names`: as the last dimension of one tensor where `stacked`, else one tensor each.
    """
    columns = _columns(inputs[0], names) if len(inputs) == 1 and not named else None
    if columns is not None:
        frame = inputs[0]
        named, inputs = {name: frame[name] for name in (names or columns) if name in columns}, ()
        twice = [name for name in named if columns.count(name) > 1]
        if twice:
            raise ArgumentError(f"the column '{twice[0]}' is there more than once: which one is meant?")
        if names is not None and len(named) < len(names):
            missing = [name for name in names if name not in named]
            raise ArgumentError(
                f"there is no column '{missing[0]}'{closest(missing[0], columns)}; the network takes {', '.join(names)}"
            )
    if not named:
        return tuple(_tensor(f"input {i}", x, like) for i, x in enumerate(inputs))
    if names is None:
        raise ArgumentError("the inputs of this network have no names: give one tensor, array or list for each")
    strange = [name for name in named if name not in names]
    missing = [name for name in names if name not in named]
    if strange or missing or inputs:
        what = "give the inputs by name or by place, not both"
        if strange or missing:
            hint = f"{closest(strange[0], names)}" if strange else ""
            what = f"'{strange[0]}' is not an input{hint}" if strange else f"the input '{missing[0]}' is missing"
        raise ArgumentError(f"{what}; the network takes {', '.join(names)}")
    found = [_tensor(name, named[name], like) for name in names]
    if not stacked:
        return tuple(found)
    try:
        return (torch.stack(torch.broadcast_tensors(*found), -1),)
    except RuntimeError as error:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip(names, found, strict=True))
        raise ArgumentError(f"the inputs must have one shape, or shapes that broadcast, got {shapes}") from error


def _columns(x: Any, names: Sequence[str] | None) -> list[str] | None:
    """The names that an argument has for what it holds: those of a dict, of a data frame, and of a row of one where
    there are several to tell apart; None where it goes by place."""
    if isinstance(x, Mapping):
        return list(x)
    if names is None or not hasattr(x, "to_numpy"):
        return None
    if hasattr(x, "columns"):
        return [str(name) for name in x.columns]
    entries = list(getattr(x, "index", ())) if len(names) > 1 else []
    return entries if entries and all(isinstance(name, str) for name in entries) else None


def _tensor(name: str, x: Any, like: Tensor) -> Tensor:
    if isinstance(x, Tensor):
        return x
    try:
        if np.ma.is_masked(x):
            raise TypeError("some of its entries are masked")
        array = np.asarray(x)
        if array.dtype.kind not in "fiu":
            raise TypeError(f"it holds {array.dtype}")
        return torch.from_numpy(np.array(array, dtype=np.float64)).to(like.device, like.dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"'{name}' must be a tensor, an array, a list or a number, got {type(x).__name__}: {error}"
        ) from error
