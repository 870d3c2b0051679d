"""What a conversion did: `Replacement`, `Left` and the report `Conversion`, frozen and printable, to JSON and back.

Two words are kept apart. *Certified* is the sup error of one site's heads on the site's range, proved, rounding
included. *Measured* is how far the outputs of the whole model moved on data that was held out: no proof.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..arguments import is_number
from ..certificates.certificate import aligned, upper_text
from ..certificates.rounding import EXP_ULPS, LEAST_ULPS
from ..errors import ArgumentError
from ..saving import free_file, write_whole
from .page import write

LEVELS = ("ffn", "pure")
FAMILIES = ("anchor", "gate", "chain", "fast", "product", "norm")
KINDS = ("activation", "norm", "gated")


@dataclass(frozen=True)
class Replacement:
    """One place of the model whose nonlinearity became attention.

    `low` to `high` is where the certificate holds, `low_seen` to `high_seen` what calibration met there (None without
    calibration): values that enter an activation, variances of rows for a norm, the second factor of a product.
    `bound` is the certified sup error on that range, `scale` the size of the site's output and `relative` their
    quotient, which is what `eps` asks for.
    """

    path: str
    operation: str
    level: str
    family: str
    low: float
    high: float
    margin: float
    anchors: int
    parameters: int
    bound: float
    scale: float
    low_seen: float | None = None
    high_seen: float | None = None
    kappa: float | None = None
    everywhere: bool = False
    """Whether the heads are right on the whole line: beyond the range the error grows like rounding, not faster."""
    kind: str = "activation"
    """Which module stands there now: "activation", "norm" or "gated"."""
    ranged: str = "input"
    """What the range is of: "input", "variance" or "mean square"."""
    calls: int = 0
    """How often one calibration pass over a batch came by; more than 1 where layers are shared."""
    aliases: tuple[str, ...] = ()
    """Other paths at which the same module hangs."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What rebuilds the module, besides the tensors of its state_dict; JSON only."""

    def __post_init__(self) -> None:
        texts = (self.path, self.operation, self.level, self.family, self.kind, self.ranged)
        if not all(isinstance(text, str) for text in texts) or self.kind not in KINDS:
            raise ArgumentError(f"{self.path!r} is no site: expected texts, and one of {', '.join(KINDS)}")
        if self.level not in LEVELS:
            raise ArgumentError(f"{self.path}: level must be one of {', '.join(LEVELS)}, got {self.level!r}")
        if self.family not in FAMILIES:
            raise ArgumentError(f"{self.path}: family must be one of {', '.join(FAMILIES)}, got {self.family!r}")
        if not self.low < self.high:
            raise ArgumentError(f"{self.path}: a range needs low < high, got [{self.low:g}, {self.high:g}]")
        if not (self.bound >= 0 and math.isfinite(self.bound)):
            raise ArgumentError(f"{self.path}: a bound is a finite number >= 0, got {self.bound}")
        if not self.scale > 0:
            raise ArgumentError(f"{self.path}: a scale is greater than 0, got {self.scale}")
        if min(self.anchors, self.parameters, self.calls) < 0:
            raise ArgumentError(f"{self.path}: anchors, parameters and calls are counts, at least 0")

    @property
    def relative(self) -> float:
        """The certified bound over the output's scale, rounded up."""
        return math.nextafter(self.bound / self.scale, math.inf)

    def to_json(self) -> dict[str, Any]:
        """Plain data; infinite ends become the words "inf" and "-inf"."""
        return {name: _plain(value) for name, value in asdict(self).items()} | {"relative": self.relative}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Replacement:
        known = {f.name: data[f.name] for f in fields(cls)}
        for name in ("low", "high", "margin", "bound", "scale", "low_seen", "high_seen", "kappa"):
            known[name] = None if known[name] is None else float(known[name])
        if not isinstance(known["aliases"], (list, tuple)):
            raise ArgumentError(f"the aliases of a site are a list of paths, got {type(known['aliases']).__name__}")
        known["aliases"] = tuple(map(str, known["aliases"]))
        return cls(**known)


@dataclass(frozen=True)
class Left:
    """A nonlinear operation that stays as it was, and why."""

    path: str
    operation: str
    reason: str


@dataclass(frozen=True)
class Conversion:
    """The report of `attnforge.convert`: what was replaced, what is certified of it, what was measured.

    >>> site = Replacement("1", "gelu", "ffn", "anchor", -8.0, 8.0, 2.0, 32, 96, 1e-6, 4.0, -3.1, 4.0)
    >>> report = Conversion("Sequential", "ffn", 1e-4, "float32", (site,), (), 1000, 1096, change=2e-6, held_out=1)
    >>> report.by_family, Conversion.from_json(report.to_json()) == report
    ({'anchor': 1}, True)
    """

    model: str
    level: str
    eps: float
    dtype: str
    sites: tuple[Replacement, ...]
    left: tuple[Left, ...]
    parameters_before: int
    parameters_after: int
    change: float | None = None
    """Measured: the largest change of any output on the held-out data; None where nothing could be measured."""
    output: float | None = None
    """Measured: the largest size of any output there."""
    batches: int = 0
    """How many batches set the ranges."""
    held_out: int = 0
    """How many batches `change` was measured on."""
    seconds: float = 0.0
    census: Mapping[str, int] = field(default_factory=dict)
    """At level "pure": how many operations of each category the exported graph has, as `attnforge.purity` counts."""
    notes: tuple[str, ...] = ()
    exponential: float = EXP_ULPS
    """What the bounds allow the exponential, in units of roundoff."""

    def __post_init__(self) -> None:
        if not is_number(self.exponential) or self.exponential < LEAST_ULPS:
            raise ArgumentError(f"bounds allow the exponential at least {LEAST_ULPS:g} u, got {self.exponential!r}")
        if self.level not in LEVELS:
            raise ArgumentError(f"level must be one of {', '.join(LEVELS)}, got {self.level!r}")
        if not self.eps > 0:
            raise ArgumentError(f"eps must be greater than 0, got {self.eps!r}")
        paths = [site.path for site in self.sites]
        if len(set(paths)) < len(paths):
            raise ArgumentError(f"a path may hold one site only, got {sorted(p for p in paths if paths.count(p) > 1)}")
        if self.change is not None and not self.change >= 0:
            raise ArgumentError(f"a measured change is a number >= 0, got {self.change}")

    @property
    def by_family(self) -> dict[str, int]:
        """The number of sites of each head family."""
        return {name: n for name in FAMILIES if (n := sum(site.family == name for site in self.sites))}

    @property
    def by_operation(self) -> dict[str, int]:
        """The number of sites of each operation, in the order of the model."""
        counts: dict[str, int] = {}
        for site in self.sites:
            counts[site.operation] = counts.get(site.operation, 0) + 1
        return counts

    @property
    def worst(self) -> float:
        """The largest certified relative bound of any site; 0 without sites."""
        return max((site.relative for site in self.sites), default=0.0)

    @property
    def most_anchors(self) -> int:
        """The largest table of any site."""
        return max((site.anchors for site in self.sites), default=0)

    @property
    def added(self) -> int:
        """How many parameters the heads added."""
        return self.parameters_after - self.parameters_before

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` turns back into an equal report."""
        plain = {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name not in ("sites", "left")}
        plain["sites"] = [site.to_json() for site in self.sites]
        plain["left"] = [asdict(left) for left in self.left]
        return plain

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Conversion:
        """The report that `to_json` described; raises `ArgumentError` on anything else."""
        try:
            given = {f.name: data[f.name] for f in fields(cls) if f.name != "exponential"}
            given["exponential"] = data.get("exponential", LEAST_ULPS)  # which version 0.1 did not write down
            given["sites"] = tuple(map(Replacement.from_json, given["sites"]))
            given["left"] = tuple(Left(**left) for left in given["left"])
            given["notes"] = tuple(map(str, given["notes"]))
            return cls(**given)
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(f"this is not the description of a conversion: {error!r}") from error

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the report: one self-contained page for `.html`, plain data for `.json`.

        A file that is there already is refused unless `force=True`.
        """
        target = free_file(path, (".html", ".htm", ".json"), force, make=True)
        if target.suffix.lower() == ".json":
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")
        else:
            write(self, target, force)

    def __str__(self) -> str:
        rows = [row(site) for site in self.sites]
        lines = [
            f"{self.model}, level {self.level}, {self.dtype}: {len(self.sites)} sites became attention "
            f"({', '.join(f'{n} {name}' for name, n in self.by_family.items())})",
            "",
            *aligned(HEADER, rows),
            "",
            f"certified per site: sup error at most {upper_text(self.worst)} of the output's scale "
            f"(asked: {self.eps:g}), by the analysis alone: the kernel reads files, not models",
            self.measured_text,
            f"parameters {self.parameters_before:,} + {self.added:,} "
            f"({100 * self.added / max(1, self.parameters_before):+.3f} %), at most {self.most_anchors} anchors a site",
        ]
        if self.left:
            shown = [(left.path, left.operation, left.reason) for left in self.left]
            lines += ["", f"left as it was: {len(self.left)}", *aligned(("path", "operation", "why"), shown)]
        if self.census:
            counted = ", ".join(f"{n} {name}" for name, n in self.census.items() if n)
            lines.append(f"exported graph: {sum(self.census.values())} operations ({counted}), nothing else")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    @property
    def measured_text(self) -> str:
        """The measured change in words."""
        if self.change is None:
            return "measured end to end: nothing (no data was given)"
        size = "" if self.output is None else f" (outputs up to {self.output:.3g})"
        plural = "es" if self.held_out != 1 else ""
        return f"measured end to end: outputs moved by {self.change:.2e} at most{size}, {self.held_out} batch{plural}"


HEADER = ("path", "operation", "heads", "anchors", "kappa", "range seen", "certified on", "bound", "of scale")


def row(site: Replacement) -> tuple[str, ...]:
    """One line of the table, as `HEADER` names its cells."""
    seen = "–" if site.low_seen is None or site.high_seen is None else f"{site.low_seen:.3g} .. {site.high_seen:.3g}"
    held = f"{site.low:.3g} .. {site.high:.3g}{' and on' if site.everywhere else ''}"
    kappa = "–" if site.kappa is None else f"{site.kappa:.3g}"
    bounds = upper_text(site.bound), upper_text(site.relative)
    return (site.path, site.operation, site.family, str(site.anchors), kappa, seen, held, *bounds)


def _plain(value: Any) -> Any:
    """JSON has no infinity: floats that are not finite become words."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return value
