"""Verifiers on a pack of `attnforge verify-pack`: which instances each of them proves, by difficulty.

python benchmarks/verification.py               makes a pack, runs what is installed, writes results/verification.json
python benchmarks/verification.py --quick       18 instances, nothing written
python benchmarks/verification.py --lirpa PYTHON --marabou PYTHON
                                                interpreters that have auto-LiRPA 0.3, and maraboupy 2.0.0
python benchmarks/verification.py --programs    60 instances of token programs instead, kept beside the others
python benchmarks/verification.py --markdown    prints the last run as docs/verification.md shows it; --fill does it

Both packages need others than attnforge's own, so each runs in an interpreter of its own, which needs onnx, numpy and
vnnlib 1.0.2 besides: that reads the properties, and what it reads is compared with ours. A verdict against a label is
looked into: a point that a verifier returns is evaluated in ball arithmetic, and so is the witness of a label.

auto-LiRPA gets the graph as a module of PyTorch with softmax as exp(x - c) / sum exp(x - c), where c is a number: its
own softmax subtracts the largest logit, for which it has no linear bounds (with fixed_reducemax_index, wrong ones).
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results" / "verification.json"
PAGE = ROOT / "docs" / "verification.md"
COUNT, QUICK, SEED = 120, 18, 0
PROGRAMS = 60  # instances of token programs
SECONDS = 10.0  # for a query of Marabou: on these networks it answers at once or not at all
DECADES = (0, 2, 4, math.inf)  # of margins in bounds: below 1, below 100, below 10,000, above
LIRPA = {"auto-LiRPA IBP": "IBP", "auto-LiRPA CROWN-IBP": "CROWN-IBP", "auto-LiRPA CROWN": "backward"}
TOOLS = ("intervals", *LIRPA, "Marabou")


# -- inside of another interpreter: nothing of attnforge here ----------------------------------------------------------


def asked(root: Path, name: str) -> tuple[list[Any], list[Any]]:
    """Box and polytopes (rows, right sides) of a property, as the package vnnlib reads them."""
    import vnnlib
    from vnnlib import compat

    (case,) = compat.transform(vnnlib.parse_query_file(str(root / "vnnlib2" / f"{name}.vnnlib")))
    return [list(pair) for pair in case.input_box], [[p.coeff_matrix, p.rhs] for p in case.output_constraints]


def worker(tool: str, root: Path) -> None:
    """One line of JSON for each instance and method: what it says, in how many seconds, and why not."""
    names = [json.loads(line)["name"] for line in (root / "labels.jsonl").read_text().splitlines()]
    judge = {"lirpa": lirpa, "marabou": marabou, "vnnlib": lambda *given: [{"tool": "vnnlib"}]}[tool]
    for name in names:
        box, polytopes = asked(root, name)
        graph = root / "onnx" / f"{name.rpartition('_')[0]}.onnx"
        for found in judge(graph, box, polytopes):
            line = {"name": name, "box": box, "polytopes": polytopes} | found
            sys.__stdout__.write(json.dumps(line) + "\n")  # type: ignore[union-attr]
            sys.__stdout__.flush()  # type: ignore[union-attr]


def because(error: BaseException) -> str:
    """An error in a line, with its place."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    place = "" if at is None else f" ({Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno})"
    return f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}{place}"


def lirpa(graph: Path, box: list[Any], polytopes: list[Any]) -> list[dict[str, Any]]:
    import numpy as np
    import onnx
    import torch
    from auto_LiRPA import BoundedModule, BoundedTensor
    from auto_LiRPA.perturbations import PerturbationLpNorm
    from onnx import numpy_helper

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            body = onnx.load(str(graph)).graph
            self.nodes, self.whole, self.shift, self.fixed = list(body.node), {}, {}, False
            for tensor in body.initializer:
                table = numpy_helper.to_array(tensor)
                if table.dtype == np.int64:
                    self.whole[tensor.name] = table.tolist()
                else:
                    self.register_parameter(f"p_{tensor.name}", torch.nn.Parameter(torch.from_numpy(table.copy())))

        def forward(self, x: Any) -> Any:
            found = {"X": x}
            for node in self.nodes:
                a, *b = (found[i] if i in found else getattr(self, f"p_{i}", None) for i in node.input)
                if node.op_type == "MatMul":
                    out = torch.matmul(a, b[0])
                elif node.op_type == "Add":
                    out = a + b[0]
                elif node.op_type == "Transpose":
                    out = a.permute(*node.attribute[0].ints)
                elif node.op_type == "Reshape":
                    out = a.reshape(self.whole[node.input[1]])
                else:
                    if not self.fixed:
                        self.shift[node.name] = float(a.max())
                    e = torch.exp(a - self.shift[node.name])
                    out = e / e.sum(-1, keepdim=True)
                found[node.output[0]] = out
            return found["Y"]

    net = Net()
    kind = next(net.parameters()).dtype
    low, high = (torch.tensor([[pair[i] for pair in box]], dtype=kind) for i in range(2))
    middle = 0.5 * low + 0.5 * high
    net(middle)
    net.fixed = True
    rows = torch.tensor([[row for matrix, _ in polytopes for row in matrix]], dtype=kind)
    answers = []
    for tool, method in LIRPA.items():
        start, found = time.perf_counter(), {"tool": tool}
        try:
            bounded = BoundedModule(net, middle, bound_opts={"conv_mode": "matrix"})
            x = BoundedTensor(middle, PerturbationLpNorm(norm=np.inf, x_L=low, x_U=high))
            least = iter(bounded.compute_bounds(x=(x,), method=method, C=rows, bound_upper=False)[0][0].tolist())
            fails = [any([next(least) > end for end in ends]) for _, ends in polytopes]
            found["says"] = "unsat" if all(fails) else "unknown"
        except Exception as error:  # whatever it does not support
            found |= {"says": "error", "why": because(error)}
        answers.append(found | {"seconds": time.perf_counter() - start})
    return answers


def marabou(graph: Path, box: list[Any], polytopes: list[Any]) -> list[dict[str, Any]]:
    import numpy as np
    from maraboupy import Marabou

    options = Marabou.createOptions(timeoutInSeconds=int(SECONDS), verbosity=0)
    start, found = time.perf_counter(), {"tool": "Marabou"}
    try:
        said = []
        for matrix, ends in polytopes:
            net = Marabou.read_onnx(str(graph))
            x, y = (np.array(v).flatten() for v in (net.inputVars[0], net.outputVars[0]))
            for v, (a, b) in zip(x, box, strict=True):
                net.setLowerBound(v, a)
                net.setUpperBound(v, b)
            for row, end in zip(matrix, ends, strict=True):
                used = [(int(v), float(c)) for v, c in zip(y, row, strict=True) if c]
                net.addInequality([v for v, _ in used], [c for _, c in used], float(end))
            word, values, _ = net.solve(options=options, verbose=False)
            said.append(word)
            if word == "sat":
                found["point"] = [float(values[int(v)]) for v in x]
                break
        found["says"] = "sat" if "sat" in said else "unsat" if set(said) == {"unsat"} else "unknown"
    except Exception as error:  # whatever it does not support
        found |= {"says": "error", "why": because(error)}
    return [found | {"seconds": time.perf_counter() - start}]


# -- here --------------------------------------------------------------------------------------------------------------


def run_elsewhere(tool: str, python: str, root: Path) -> tuple[list[dict[str, Any]], str]:
    """The lines of a worker, and why there are none."""
    command = [python, "-W", "ignore", str(Path(__file__)), "--worker", tool, "--pack", str(root)]
    with tempfile.TemporaryDirectory() as elsewhere:  # what tools leave behind goes away again
        done = subprocess.run(command, capture_output=True, text=True, cwd=elsewhere, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    if lines and not done.returncode:
        return lines, ""
    last = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
    return lines, last[:200]


def looked_into(pack: Any, instance: Any, line: dict[str, Any]) -> dict[str, Any]:
    """A verdict against a label: what the graph's own numbers, in balls, say of the point in question."""
    from attnforge.verification.proof import witnessed

    claim, graph = pack.property(instance), pack.graph(instance)
    found = {"name": instance.name, "label": instance.label, "tool": line["tool"], "margin": instance.margin,
             "multiple": instance.multiple}  # fmt: skip
    if instance.label == "sat":
        proved = witnessed(graph, claim, instance.witness).margin
        return found | {"against the label": proved <= 0, "evidence": f"at the witness it is true by {proved:.3g}"}
    point = line["point"]
    out = max(max(a - x, x - b, 0.0) for a, x, b in zip(claim.low, point, claim.high, strict=True))
    inside = [min(max(x, a), b) for a, x, b in zip(claim.low, point, claim.high, strict=True)]
    proved = witnessed(graph, claim, inside).margin
    shown = f"its point is {out:.3g} outside of the box; moved into it, the property is true by {proved:.3g}"
    return found | {"against the label": proved > 0, "evidence": shown}


def same_property(instance: Any, claim: Any, line: dict[str, Any]) -> bool:
    """Whether the package vnnlib reads a property as we wrote it."""
    box = [[a, b] for a, b in zip(claim.low, claim.high, strict=True)]
    mine = []
    for clause in claim.clauses:
        rows = []
        for atom in clause:
            weights, number = atom.form()  # weights . Y >= number
            rows.append(([-float(weights.get(i, 0)) + 0.0 for i in range(claim.outputs)], -number + 0.0))
        mine.append([[row for row, _ in rows], [end for _, end in rows]])
    return bool(line["box"] == box and line["polytopes"] == mine)


def measured(arguments: argparse.Namespace, root: Path) -> dict[str, Any]:
    from attnforge import verification
    from attnforge.verification.programs import SHARES
    from attnforge.verification.proof import propagated
    from attnforge.verification.sampler import FAMILIES

    start = time.perf_counter()
    count = QUICK if arguments.quick else PROGRAMS if arguments.programs else COUNT
    pack = verification.pack(root, count, SEED, families=["program"] if arguments.programs else FAMILIES)
    made = time.perf_counter() - start
    start = time.perf_counter()
    verification.check(root)
    checked = time.perf_counter() - start
    by_name = {instance.name: instance for instance in pack.instances}
    lines: list[dict[str, Any]] = []
    for instance in pack.instances:
        start = time.perf_counter()
        says = "unsat" if propagated(pack.graph(instance), pack.property(instance)) else "unknown"
        seconds = time.perf_counter() - start
        lines.append({"name": instance.name, "tool": "intervals", "says": says, "seconds": seconds})
    missing, read = {}, 0
    for tool, python in (("lirpa", arguments.lirpa), ("marabou", arguments.marabou), ("vnnlib", arguments.marabou)):
        found, why = run_elsewhere(tool, python, root)
        if why:
            missing[tool] = why
        if tool == "vnnlib":
            read = sum(same_property(by_name[x["name"]], pack.property(by_name[x["name"]]), x) for x in found)
        else:
            lines += found
    against = [
        looked_into(pack, by_name[line["name"]], line) for line in lines
        if line["says"] in ("sat", "unsat") and line["says"] != by_name[line["name"]].label
    ]  # fmt: skip
    rows = [
        {"name": i.name, "family": i.family, "kind": i.kind, "size": i.size, "label": i.label, "multiple": i.multiple,
         "gap": i.gap, "says": {x["tool"]: x["says"] for x in lines if x["name"] == i.name}}
        | ({"share": SHARES[n // 2 % len(SHARES)]} if arguments.programs else {}) for n, i in enumerate(pack.instances)
    ]  # fmt: skip
    return {
        "machine": f"{platform.system()} {platform.machine()}", "instances": len(pack), "seed": SEED,
        "seconds": {"pack": made, "check": checked} | {
            tool: sum(x["seconds"] for x in lines if x["tool"] == tool) for tool in TOOLS
        },
        "read by vnnlib": read, "missing": missing, "against": against, "rows": rows,
        "why": Counter(f"{x['tool']}: {x['why']}" for x in lines if x["says"] == "error"),
    }  # fmt: skip


def decade(multiple: float) -> int:
    return next(i for i, top in enumerate(DECADES) if multiple < 10.0**top)


def markdown(found: dict[str, Any]) -> str:
    """The tables of the page."""
    unsat = [row for row in found["rows"] if row["label"] == "unsat"]
    names = ["below 1", "1 to 100", "100 to 10,000", "above 10,000"]
    groups = [(name, [row for row in unsat if decade(row["multiple"]) == i]) for i, name in enumerate(names)]
    for size in sorted({row["size"] for row in found["rows"]}):
        groups.append((f"box: {size:.3g} of each side", [row for row in unsat if row["size"] == size]))
    text = shown(found, "unsat, margin in bounds", groups)
    if "programs" not in found:
        return text
    some = [row for row in found["programs"]["rows"] if row["label"] == "unsat"]
    shares = sorted({row["share"] for row in some}, reverse=True)
    radii = [(f"{share:g} of the largest", [row for row in some if row["share"] == share]) for share in shares]
    return text + "\n\nToken programs:\n\n" + shown(found["programs"], "unsat, radius", radii)


def shown(found: dict[str, Any], head: str, groups: list[tuple[str, list[Any]]]) -> str:
    """A table of what tools say of some groups of unsat instances, of all, and what did not run and why."""
    rows = found["rows"]
    tools = [tool for tool in TOOLS if any(tool in row["says"] for row in rows)]
    faults = Counter(a["tool"] for a in found["against"] if not a["against the label"])
    lines = [f"| {head} | instances | {' | '.join(tools)} |", "| --- " * (2 + len(tools)) + "|"]

    def counts(chosen: list[Any], word: str) -> str:
        return " | ".join(str(sum(row["says"].get(tool) == word for row in chosen)) for tool in tools)

    lines += [f"| {name} | {len(chosen)} | {counts(chosen, 'unsat')} |" for name, chosen in groups]
    unsat, sat = ([row for row in rows if row["label"] == label] for label in ("unsat", "sat"))
    lines.append(f"| all unsat | {len(unsat)} | {counts(unsat, 'unsat')} |")
    lines.append(f"| all sat | {len(sat)} | {counts(sat, 'sat')} |")
    lines.append(f"| did not run | {len(rows)} | {counts(rows, 'error')} |")
    lines.append(f"| faults of the verifier | {len(rows)} | {' | '.join(str(faults[tool]) for tool in tools)} |")
    wrong = sum(a["against the label"] for a in found["against"])
    made, checked = (found["seconds"][word] for word in ("pack", "check"))
    lines += ["", f"{found['instances']} instances, written in {made:.0f} s and checked in {checked:.0f} s. "
              f"Labels that a verifier refutes: {wrong}. vnnlib 1.0.2 reads {found['read by vnnlib']} as they "
              "were written."]  # fmt: skip
    for tool, count in sorted(faults.items()):
        margins = [a["margin"] for a in found["against"] if a["tool"] == tool and not a["against the label"]]
        lines.append(f"{tool} contradicts {count} labels; looked into, each of them holds, by {min(margins):.2g} to "
                     f"{max(margins):.2g}.")  # fmt: skip
    if found["why"] or found["missing"]:
        lines += ["", "What did not run:", ""]
        lines += [f"- {why} ({count} instances)" for why, count in sorted(found["why"].items())]
        lines += [f"- {tool}: {why}" for tool, why in found["missing"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--programs", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--fill", action="store_true")
    parser.add_argument("--lirpa", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--marabou", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--pack", type=Path, help="where the pack goes, or is already; a temporary folder by default")
    parser.add_argument("--worker", choices=("lirpa", "marabou", "vnnlib"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker, arguments.pack)
        return
    if not (arguments.markdown or arguments.fill):
        sys.path.insert(0, str(ROOT / "src"))
        with tempfile.TemporaryDirectory() as folder:
            found = measured(arguments, arguments.pack or Path(folder) / "pack")
        before = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
        if arguments.programs:
            found = {**before, "programs": found}
        elif "programs" in before:
            found["programs"] = before["programs"]
        if found["missing"] and RESULTS.exists():
            print(f"{RESULTS.name} stays as it is, because not everything ran")
        elif not arguments.quick:
            RESULTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", "utf-8")
    else:
        found = json.loads(RESULTS.read_text("utf-8"))
    if arguments.fill:
        from readme import filled

        PAGE.write_text(filled(PAGE.read_text("utf-8"), "verifiers", markdown(found)), "utf-8")
    else:
        print(markdown(found))
        for against in (*found["against"], *found.get("programs", {}).get("against", ())):
            print(f"{against['tool']} against {against['name']} ({against['label']}): {against['evidence']}")


if __name__ == "__main__":
    main()
