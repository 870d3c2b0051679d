"""A line for each thing that the package does, from the last run of each benchmark: all of them for docs/measured.md,
five for the README.

python benchmarks/summary.py          prints the README's table, as markdown
python benchmarks/summary.py --all    prints the whole of it
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
Line = tuple[str, str, str]
Data = Any


def _one(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """The first row that holds these values."""
    return next(row for row in rows if all(row[key] == value for key, value in wanted.items()))


def heads(d: Data) -> list[Line]:
    gelu = _one(d["heads"], name="gelu")
    return [(
        f"gelu on {gelu['on']} by one head of {gelu['float64']['size']}",
        f"{gelu['float64']['certified']:.1e} certified (float64)",
        f"{gelu['float64']['cold']:.2g} certified when anchors are selected, as in the paper",
    )]  # fmt: skip


def formulas(d: Data) -> list[Line]:
    f32, f64 = d["summary"]["float32"], d["summary"]["float64"]
    return [
        (f"{f32['formulas']} formulas, to 1e-3 (float32) and 1e-6 (float64) of their range",
         f"{f32['compiled']} and {f64['compiled']} compiled, in {f32['median seconds']:.1f} s and "
         f"{f32['median heads']:.0f} heads (medians)",
         f"{f32['broken bounds'] + f64['broken bounds']} violations in {f32['evaluations'] + f64['evaluations']:.1e} "
         "evaluations"),
        ("an MLP 10-64-64-1 with gelu (float32)", f"{d['mlp']['bound']:.1e} certified",
         f"{d['mlp']['found']:.1e} found"),
    ]  # fmt: skip


def conversion(d: Data) -> list[Line]:
    lines = []
    for level, what in (("ffn", "its feed-forward layers as attention"), ("pure", "every nonlinearity as attention")):
        row, cost = _one(d["levels"], level=level, dtype="float32"), _one(d["cost"], level=level)
        kept = "unchanged" if not row["ranking changed"] else f"changed for {row['ranking changed']}"
        lines.append((
            f"a trained sentence encoder ({row['parameters'] / 1e6:.1f} M parameters), {what}",
            f"embeddings of {row['sentences']} sentences move by {row['change']:.1e} at most, nearest ones {kept}",
            f"{cost['time ratio']:.1f} times the time, +{100 * row['added'] / row['parameters']:.3f} % parameters",
        ))  # fmt: skip
    return lines


def exports(d: Data) -> list[Line]:
    def worst(dtype: str) -> float:
        return max(max(r["relative"].values()) for r in d["cases"] if r["dtype"] == dtype)

    count = len({r["name"] for r in d["cases"]})
    return [(
        f"{count} networks as stock transformers, for TransformerLens, ONNX Runtime and Hugging Face",
        f"within {worst('float32'):.1e} (float32) and {worst('float64'):.1e} (float64) of the network",
        f"150 heads exported in {d['large']['seconds']:.1f} s",
    )]  # fmt: skip


def theorem(d: Data) -> list[Line]:
    row = d["published"]["float64"][0]
    return [(
        f"the paper's ramp experiment ({row['name']}), mean squared error",
        f"{row['cold']:.1e} by the theorem's weights, {row['gate']:.0g} by a gate",
        f"{row['trained']:.2g} when trained as published",
    )]  # fmt: skip


def in_context(d: Data) -> list[Line]:
    ridge, logistic = _one(d["estimators"], task="ridge 0.1, cond(X) 100"), _one(d["estimators"], task="logistic")
    name = "relative coefficient error"
    return [(
        "ridge and logistic regression fitted in the prompt by frozen attention",
        f"coefficients within {ridge[name]:.0e} and {logistic[name]:.0e} of scikit-learn's",
        f"{ridge['times scikit-learn']:.0f} and {logistic['times scikit-learn']:.0f} times its time",
    )]  # fmt: skip


def programs(d: Data) -> list[Line]:
    rows, longest = d["rows"], max(row["length"] for row in d["rows"])
    names, tracr = {row["program"] for row in rows}, [row for row in d["errors"] if row["length"] == 40]
    wrong = sum(row["tracr"] for row in tracr) / (40 * len(tracr))  # of 40 inputs each
    return [(
        f"{len(names)} RASP programs on sequences of up to 10, 40, 100 and 200 tokens, five of them of {longest:,}",
        f"{sum(row['wrong'] for row in rows)} wrong of {sum(row['of'] for row in rows):.1e} outputs tried; "
        f"{', '.join(sorted({row['kind'] for row in rows}, reverse=True))} in float32",
        f"Tracr errs on {100 * wrong:.0f} % of inputs at 40 tokens ({', '.join(row['program'] for row in tracr)})",
    )]  # fmt: skip


def circuits(d: Data) -> list[Line]:
    rows = {(row["method"], row["form"]): row for row in d["summary"]}
    methods, forms = (list(dict.fromkeys(key[i] for key in rows)) for i in range(2))
    shares = [", ".join(f"{100 * rows[m, form]['edges recall']:.0f}" for form in forms) for m in methods]
    found = [f"{share} % by {method}" for share, method in zip(shares, methods, strict=True)]
    whole = ["/".join(str(rows[m, form]["all edges right"]) for form in forms) for m in methods]
    return [(
        f"edges of {sum(rows[methods[0], form]['models'] for form in forms)} known circuits that methods find: "
        f"{', '.join(forms)}",
        "; ".join(found),
        f"all edges of a model: {', '.join(whole)} of {rows[methods[0], forms[0]]['models']} models",
    )]  # fmt: skip


def verifiers(d: Data) -> list[Line]:
    unsat = [row["says"] for row in d["rows"] if row["label"] == "unsat"]
    tools = sorted({tool for says in unsat for tool in says})
    found = (f"{tool} {sum(says.get(tool) == 'unsat' for says in unsat)}" for tool in tools)
    return [(
        f"{d['instances']} problems for verifiers with labels proved both ways",
        f"{sum(row['against the label'] for row in d['against'])} labels refuted by a verifier",
        f"of {len(unsat)} unsat, found so: {', '.join(found)}",
    )]  # fmt: skip


PARTS: tuple[tuple[str, Callable[[Data], list[Line]]], ...] = (
    ("heads", heads), ("compile", formulas), ("convert", conversion), ("export", exports), ("theorems", theorem),
    ("incontext", in_context), ("programs", programs), ("groundtruth", circuits), ("verification", verifiers),
)  # fmt: skip


#: What the README has room for: of each part, its first or its last line.
SHORT = {"heads": 0, "compile": 0, "convert": -1, "programs": 0, "verification": 0}


def table(whole: bool = False) -> str:
    """The table as markdown; a benchmark that was never run is an error, not an empty line."""
    lines = [("job", "result", "for comparison"), ("---", "---", "---")]
    for name, part in PARTS:
        found = part(json.loads((RESULTS / f"{name}.json").read_text("utf-8")))
        lines += found if whole else [found[SHORT[name]]] if name in SHORT else []
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(table("--all" in sys.argv[1:]) + "\n")
