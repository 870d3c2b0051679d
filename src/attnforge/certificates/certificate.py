"""`Certificate`: a bound with its ledger, and the hash that ties it to the weights it speaks of."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any, Literal

import torch

from ..box import Box
from ..dtypes import DTYPES
from ..errors import ArgumentError

Kind = Literal["certified", "analysed", "calibrated", "exact"]
Proof = Literal["analysis", "kernel"]
Source = Literal["interpolation", "leak", "rounding", "propagation"]
SOURCES: tuple[Source, ...] = ("interpolation", "leak", "rounding", "propagation")


@dataclass(frozen=True)
class Term:
    """One line of the ledger: how much one site adds to the bound, and from which source."""

    site: str
    source: Source
    value: float
    note: str = ""

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ArgumentError(f"a term's source is one of {', '.join(SOURCES)}, not {self.source!r}")
        if not self.value >= 0:
            raise ArgumentError(f"a term of a bound cannot be negative or NaN, got {self.value} for {self.site}")


@dataclass(frozen=True)
class Margin:
    """One line of the ledger of margins: by how much the right slot of a head is ahead of all others (`margin`), errors
    of codes and rounding taken off (`eaten`), and how much the head needs. Infinite where there are no others."""

    site: str
    margin: float
    needed: float
    eaten: float = 0.0
    note: str = ""

    def __post_init__(self) -> None:
        if not (self.margin >= self.needed >= 0 and self.eaten >= 0):
            raise ArgumentError(f"'{self.site}' needs {self.needed} and has a margin of {self.margin}")


@dataclass(frozen=True)
class Certificate:
    """How far a network and its target can differ on a box, rounding included.

    `kind` is "certified" when `bound` is proved for every point of the box and every way of rounding that the stated
    `assumptions` allow, and the kernel has proved it too or can be run; "analysed" when it is proved, but the kernel
    has no rule for it or found none: `remark` says why, and which of the two it is follows from that.
    "calibrated" is when there is only `measured`, the largest error seen: then `bound` is None.
    The terms add up to the bound (they are the error at the worst place, split by site and source).
    "exact" is for targets with finitely many values on a `domain` of sequences: what the network gives, decoded, is the
    target's value, always; the bound is 0, and `margins` say how far each head is from going wrong.

    Where the target is a `program`, that is what was checked, printed in full; `verified` says whether the text of the
    target was parsed again and found to be that program. Neither is written to files: a reader finds out for itself.

    `proof` says what the bound comes from: the "analysis" of the compiler, or the "kernel", which proves it a second
    time from what is stored. `kernel` is the bound that the kernel proves, None where it was not run or has no rule;
    then `remark` says why, and everything that is printed says "analysed", or "exact by the analysis alone".

    `hypothesis` says of which functions a bound speaks that was made from samples: every one that has them and is no
    steeper than stated. Whether the target is one of these is the user's word; everything else is proved.
    """

    kind: Kind
    bound: float | None
    dtype: str
    target: str
    box: Box
    terms: tuple[Term, ...] = ()
    relative: bool = False
    measured: float | None = None
    weights: str = ""
    lemmas: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = field(default=())
    margins: tuple[Margin, ...] = ()
    domain: str = ""
    proof: Proof = field(default="analysis", compare=False)  # two certificates that say the same are equal,
    kernel: float | None = field(default=None, compare=False)  # whoever has proved them
    remark: str = field(default="", compare=False)
    program: str = field(default="", compare=False)
    verified: bool = field(default=False, compare=False)
    hypothesis: str = field(default="", compare=False)  # files of earlier versions do not say it

    def __post_init__(self) -> None:
        if self.kind not in ("certified", "analysed", "calibrated", "exact"):
            raise ArgumentError(f"a certificate is 'exact', 'certified', 'analysed' or 'calibrated', not {self.kind!r}")
        if self.kind in ("certified", "analysed"):  # files of earlier versions say "certified" of both
            object.__setattr__(self, "kind", "analysed" if self.alone else "certified")
        if self.dtype not in DTYPES:
            raise ArgumentError(f"unknown dtype {self.dtype!r}; expected one of {', '.join(DTYPES)}")
        if (self.kind == "calibrated") != (self.bound is None):
            raise ArgumentError("a certified result has a bound, an exact one the bound 0, a calibrated one has none")
        if self.kind == "exact" and self.bound != 0:
            raise ArgumentError(f"the bound of an exact result is 0, got {self.bound}")
        if self.kind == "calibrated" and self.measured is None:
            raise ArgumentError("a calibrated result states what was measured")
        if self.bound is not None and not (self.bound >= 0 and math.isfinite(self.bound)):
            raise ArgumentError(f"a bound is a finite number >= 0, got {self.bound}")
        if self.proof not in ("analysis", "kernel"):
            raise ArgumentError(f"a proof is by 'analysis' or by the 'kernel', not {self.proof!r}")
        if self.proof == "kernel" and not (self.bound is not None and self.kernel is not None):
            raise ArgumentError("a proof by the kernel states what the kernel proves")
        if self.kernel is not None and not (math.isfinite(self.kernel) and self.kernel >= 0):
            raise ArgumentError(f"what the kernel proves is a finite number >= 0, got {self.kernel}")
        if self.proof == "kernel" and self.kernel > self.bound:  # type: ignore[operator]
            raise ArgumentError(f"the kernel proves {self.kernel}, not {self.bound}")
        if self.bound is not None and total(t.value for t in self.terms) > self.bound:
            raise ArgumentError("the terms of the ledger add up to more than the bound")

    def by_source(self) -> dict[str, float]:
        """The bound split by source."""
        return {s: total(t.value for t in self.terms if t.source == s) for s in SOURCES}

    @property
    def margin(self) -> Margin | None:
        """The line of the ledger with the least to spare, where there are margins."""
        return min(self.margins, key=lambda m: m.margin - m.needed, default=None)

    @property
    def alone(self) -> bool:
        """Whether the analysis alone speaks: the kernel has not proved the bound, and the remark says why."""
        return self.bound is not None and self.kernel is None and bool(self.remark)

    @property
    def word(self) -> str:
        """The kind in words: what is exact by the analysis alone says so."""
        return f"{self.kind} by the analysis alone" if self.alone and self.kind == "exact" else self.kind

    def says_as(self, other: Certificate) -> bool:
        """Whether two certificates speak of the same thing, whoever proves them: target, box, dtype and unit, and
        whether they are exact, have a bound, or neither."""
        fields = ("target", "box", "dtype", "relative")
        same = {self.kind, other.kind} <= {"certified", "analysed"} or self.kind == other.kind
        return same and all(getattr(self, field) == getattr(other, field) for field in fields)

    def to_json(self) -> dict[str, Any]:
        """A description that `from_json` turns back into an equal certificate."""
        ledger = [[m.site, m.margin if m.margin < math.inf else None, m.needed, m.eaten, m.note] for m in self.margins]
        more: dict[str, Any] = {"margins": ledger} if ledger else {}
        more |= {"domain": self.domain} if self.domain else {}
        more |= {"hypothesis": self.hypothesis} if self.hypothesis else {}
        return {
            "kind": self.kind,
            "bound": self.bound,
            "dtype": self.dtype,
            "target": self.target,
            "box": self.box.to_json(),
            "terms": [[t.site, t.source, t.value, t.note] for t in self.terms],
            "relative": self.relative,
            "measured": self.measured,
            "weights": self.weights,
            "lemmas": list(self.lemmas),
            "assumptions": list(self.assumptions),
            "proof": self.proof,
            "kernel": self.kernel,
            "remark": self.remark,
            **more,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Certificate:
        """The certificate that `to_json` described; raises `ArgumentError` on anything else."""
        try:
            return cls(
                kind=data["kind"],
                bound=None if data["bound"] is None else float(data["bound"]),
                dtype=str(data["dtype"]),
                target=str(data["target"]),
                box=Box.from_json(data["box"]),
                terms=tuple(Term(str(s), k, float(v), str(n)) for s, k, v, n in data["terms"]),
                relative=bool(data["relative"]),
                measured=None if data["measured"] is None else float(data["measured"]),
                weights=str(data["weights"]),
                lemmas=tuple(map(str, data["lemmas"])),
                assumptions=tuple(map(str, data["assumptions"])),
                proof=data.get("proof", "analysis"),
                kernel=None if data.get("kernel") is None else float(data["kernel"]),
                remark=str(data.get("remark", "")),
                margins=tuple(
                    Margin(str(s), math.inf if m is None else float(m), float(w), float(e), str(n))
                    for s, m, w, e, n in data.get("margins", ())
                ),
                domain=str(data.get("domain", "")),
                hypothesis=str(data.get("hypothesis", "")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(f"this is not the description of a certificate: {error}") from error

    def __str__(self) -> str:
        unit = " of the target's size" if self.relative else ""
        if self.bound is None:
            head = f"calibrated, not certified: largest error measured {self.measured:.3e}{unit}"
        elif self.kind == "exact":
            head = f"{self.word}: the decoded output of the network is the target's, on every sequence of the domain"
        else:
            head = f"{self.word}: |network - target| <= {upper_text(self.bound, 4)}{unit}"
        doubt = ", text not verified: the target is the program below" if self.program and not self.verified else ""
        lines = [head, f"target {self.target} on {self.domain or repr(self.box)}, {self.dtype}{doubt}"]
        lines += [self.hypothesis] if self.hypothesis else []
        if self.margins:
            rows = [(m.site, f"{m.margin:.5g}", f"{m.needed:.5g}", f"{m.eaten:.3g}", m.note) for m in self.margins]
            lines += ["", *aligned(("head", "ahead by", "needed", "eaten by errors", "note"), rows)]
        if self.terms:
            shown: list[tuple[str, ...]] = [(t.site, t.source, upper_text(t.value, 4), t.note) for t in self.terms]
            shown.append(("total", "", upper_text(self.bound, 4), ""))
            *table, total_row = aligned(("site", "source", "at most", "note"), shown)
            lines += ["", *table, table[1], total_row]
        if self.lemmas:
            lines.append(f"by {', '.join(self.lemmas)}")
        if self.kernel is not None:
            what = "it" if self.kind == "exact" else upper_text(self.kernel, 4)
            again = f"the kernel proves {what} from the stored numbers"
            lines.append(again if self.proof == "kernel" else f"by the analysis; {again}")
        elif self.remark:
            lines.append(f"by the analysis alone: {self.remark}")
        if self.assumptions:
            lines.append(f"assuming {'; '.join(self.assumptions)}")
        if self.program:
            lines += ["", self.program]
        return "\n".join(lines)


def total(values: Any) -> float:
    """The sum of non-negative numbers, rounded up.

    >>> total([0.1, 0.2]) >= 0.3
    True
    """
    exact = math.fsum(values)
    return math.nextafter(exact, math.inf) if exact > 0 else exact


def upper_text(value: float | None, digits: int = 3) -> str:
    """An upper bound in few digits, rounded up: what is shown, read back as a number, is a bound as well.

    >>> upper_text(1.6012e-10), upper_text(0.25), upper_text(9.999e-7), upper_text(None)
    ('1.61e-10', '0.25', '1e-06', '–')
    """
    if value is None:
        return "–"
    nearest = f"{value:.{digits}g}"
    if float(nearest) >= value or value != value:
        return nearest
    up = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(Decimal(value))
    return f"{float(up):.{digits}g}"


def weights_hash(module: torch.nn.Module) -> str:
    """A hash of every parameter and buffer of a module: names, dtypes, shapes and bytes."""
    return hashed(module.state_dict())


def hashed(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash of tensors: names, dtypes, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return digest.hexdigest()


def aligned(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A table of text whose columns line up: header, rule, rows.

    >>> aligned(("name", "n"), [("gelu", "32"), ("sin", "8")])
    ['name  n', '----  --', 'gelu  32', 'sin   8']
    """
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [header, *rows]]
    return [lines[0], "  ".join("-" * w for w in widths), *lines[1:]]
