"""Token programs in numbers: wrong outputs, certificates, sizes beside Tracr's, seconds, growth, sabotage.

python benchmarks/programs.py                    measures, prints the tables, writes benchmarks/results/programs.json;
                                                 goes on where it was stopped, while the sources are the same
python benchmarks/programs.py --quick            L = 10 and 40 alone, and a hundredth of the random sequences
python benchmarks/programs.py --only sort hist   some programs; nothing is written
python benchmarks/programs.py --kernel           the kernel on every program at L = 10 and 40: seconds and outcomes
python benchmarks/programs.py --variants         every program at L = 4 in a rotated stream and with superposed codes
python benchmarks/programs.py --markdown         prints the tables of the last run
python benchmarks/programs.py --write            puts them into docs/rasp.md

Every program of `attnforge.rasp.library` is compiled at L = 10, 40, 100 and 200 (five of them at 1000) in float32, and
in float64 where float32 cannot be proved. The network is compared with the interpreter on all sequences where there are
at most 10^5, else on random ones, and on adversarial ones: constant, sorted, alternating, longest, shortest. Tracr's
numbers (its HEAD of 2024-02, its defaults and the lengths of its own tests) were measured beforehand and are stated.
Seconds are those of one processor, so that a busy machine does not count.
"""

from __future__ import annotations

import argparse
import copy
import functools
import hashlib
import json
import math
import multiprocessing
import platform
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

import attnforge as af  # noqa: E402
from attnforge import rasp  # noqa: E402
from attnforge.rasp.library import PROGRAMS, Listed  # noqa: E402
from attnforge.rasp.network.derivation import proved  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "programs.json"
PAGE = ROOT / "docs" / "rasp.md"
PARTIAL = RESULTS.with_suffix(".partial")  # a line for each row that is done, until all are
LENGTHS = (10, 40, 100, 200)
KERNEL = (10, 40)  # the lengths at which the kernel proves every program, too
VARIED = 4  # the length at which programs are rotated and superposed
LONG = ("length", "hist", "reverse", "sort", "frac_prevs")  # also at 1000
ALL = 10**5  # domains up to this size are run completely
RANDOM = {10: 10**5, 20: 10**4, 40: 10**4, 100: 10**3, 200: 10**3, 1000: 20}
PATIENCE = 240  # seconds of a processor that a row may take, runs included; longer sequences are then not tried
MEMORY = 12 << 30  # bytes of address space that a row may take
#: Tracr's layers, heads, width, MLP width and parameters, with the vocabulary and the length of its test.
TRACR: dict[str, tuple[str, int, tuple[int, int, int, int, float]]] = {
    "length": ("abcd", 3, (1, 1, 15, 8, 806)),
    "hist": ("abcd", 5, (1, 1, 19, 12, 1.2e3)),
    "frac_prevs": ("ahel", 5, (2, 1, 14, 1, 1.1e3)),
    "sort_unique": ("abcd", 5, (2, 1, 23, 12, 2.8e3)),
    "pair_balance": ("abc()", 10, (2, 2, 23, 4, 5.4e3)),
    "detect_pattern": ("abc", 6, (3, 2, 26, 6, 6.6e3)),
    "sort": ("abcd", 5, (3, 1, 43, 20, 17.5e3)),
    "reverse": ("abcd", 5, (4, 1, 43, 30, 19.7e3)),
    "sort_freq": ("abcd", 5, (5, 1, 66, 30, 64e3)),
    "shuffle_dyck2": ("(){}", 5, (8, 4, 55, 212, 247e3)),
    "shuffle_dyck3": ("(){}[]", 6, (9, 6, 73, 438, 725e3)),
}
#: Tracr's wrong outputs among 40 inputs of its default compiler, vocabulary of 4 letters; it compiles in 3 to 10 s.
TRACR_WRONG: dict[str, dict[int, int]] = {
    "length": {10: 5, 20: 17, 40: 29}, "reverse": {10: 5, 20: 17, 40: 29}, "sort": {10: 0, 20: 13, 40: 25},
    "hist": {10: 0, 20: 0, 40: 15},
}  # fmt: skip
SABOTAGED = ("length", "hist", "reverse", "sort", "shift_by", "parity", "tomita4")
TRIALS = 12  # changed values a program


def adversarial(domain: rasp.Sequences) -> Iterator[tuple[Any, ...]]:
    """Constant, sorted, alternating, longest and shortest sequences."""
    tokens, longest = domain.vocabulary, domain.max_length
    for token in tokens:
        yield (token,)
        yield (token,) * longest
        yield (token,) * (longest - 1) + (tokens[0],)
        yield (tokens[-1],) + (token,) * (longest - 1)
    for order in (tokens, tokens[::-1]):
        yield tuple(order[i * len(order) // longest] for i in range(longest))
        yield tuple((order * longest)[:longest])
        yield tuple((order[:2] * longest)[: max(1, longest - 1)])


def inputs(domain: rasp.Sequences, share: float) -> tuple[list[tuple[Any, ...]], str]:
    if domain.size <= ALL:
        return list(domain), "all"
    count = max(10, int(RANDOM[domain.max_length] * share))
    return [*domain.sample(count, seed=domain.max_length), *adversarial(domain)], f"{count} random"


def wrong(net: Any, program: rasp.SOp, sequences: Sequence[tuple[Any, ...]]) -> tuple[int, float]:
    """How many sequences come out wrong (or further off than the bound), and the largest error of numbers."""
    bad, worst, certificate = 0, 0.0, net.certificate
    for start in range(0, len(sequences), 5000):
        some = sequences[start : start + 5000]
        for got, wanted in zip(net.run([list(s) for s in some]), rasp.run_many(program, some), strict=True):
            if certificate.kind == "exact":
                bad += got != wanted
            else:
                error = max(abs(float(a) - float(b)) for a, b in zip(got, wanted, strict=True))
                bad, worst = bad + (error > certificate.bound), max(worst, error)
    return bad, worst


def compiled(program: rasp.SOp, domain: rasp.Sequences) -> tuple[Any, float, str]:
    """The network in the smallest dtype that can be proved, the seconds it took, and what was refused."""
    said = ""
    for dtype in (torch.float32, torch.float64):
        start = time.process_time()
        try:
            return af.compile(program, domain, dtype=dtype), time.process_time() - start, said
        except af.PrecisionError as error:
            said = str(error)
        except af.AttnforgeError as error:
            return None, time.process_time() - start, str(error)
    return None, time.process_time() - start, said


def measured(entry: Listed, length: int, share: float, vocabulary: Any = None) -> dict[str, Any]:
    """One row: a program at a length."""
    domain = entry.domain(length, vocabulary)
    program = entry.program(domain)
    net, seconds, said = compiled(program, domain)
    row: dict[str, Any] = {"program": entry.name, "length": length, "seconds": round(seconds, 3)}
    if net is None:
        return {**row, "refused": said[:300]}
    sequences, which = inputs(domain, share)
    bad, worst = wrong(net, program, sequences)
    size, certificate = net.size, net.certificate
    margins = [m.margin for m in certificate.margins if m.needed and m.margin < math.inf]  # of heads
    return {
        **row, "kind": certificate.kind, "dtype": certificate.dtype,
        "wrong": bad, "of": len(sequences), "inputs": which, "layers": size.layers, "heads": size.heads,
        "width": size.width, "slots": size.slots, "parameters": size.parameters, "bound": certificate.bound,
        "measured": worst, "margin": min(margins, default=None), "refused in float32": said[:300],
    }  # fmt: skip


def by_kernel(entry: Listed, length: int, share: float, vocabulary: Any = None) -> dict[str, Any]:
    """One row: what the kernel proves of a program at a length, from what a file of its network holds."""
    domain = entry.domain(length, vocabulary)
    net, _, said = compiled(entry.program(domain), domain)
    row: dict[str, Any] = {"program": entry.name, "length": length}
    if net is None:
        return {**row, "refused": said[:300]}
    start = time.process_time()
    found = proved(net, net.certificate)
    row |= {"seconds": round(time.process_time() - start, 3), "kind": found.kind, "dtype": found.dtype}
    return {**row, "proved": found.kernel, "analysis": found.bound, "remark": found.remark}


def varied(entry: Listed, length: int, share: float, vocabulary: Any = None) -> dict[str, Any]:
    """One row: in which dtypes a program's variants are proved, and, where not, which head stands in the way."""
    domain = entry.domain(length, vocabulary)
    program, start = entry.program(domain), time.process_time()
    row: dict[str, Any] = {"program": entry.name, "length": length}
    for dtype in (torch.float32, torch.float64):
        for kinds in (("rotated",), ("superposed",), ("superposed", "cleaned")):
            try:
                net = af.groundtruth.vary(af.compile(program, domain, dtype=dtype), kinds)
                rank = int(torch.linalg.matrix_rank(net.basis))
                found = {"kind": net.certificate.kind, "bound": net.bound, "columns": len(net.basis), "rank": rank}
            except af.AttnforgeError as error:
                head = error.__cause__
                found = {"refused": str(error)[:400], "head": getattr(head, "head", None),
                         "margin": getattr(head, "margin", None), "needed": getattr(head, "needed", None)}  # fmt: skip
            row[f"{str(dtype).removeprefix('torch.')} {' '.join(kinds)}"] = found
    return {**row, "seconds": round(time.process_time() - start, 2)}


def variants_table(rows: Sequence[dict[str, Any]]) -> tuple[str, list[str], list[list[str]]]:
    """What is proved of variants: columns and dimensions, or how far the head in the way falls short."""

    def told(found: dict[str, Any]) -> str:
        if "refused" in found:
            margin = found["margin"]
            none = (
                "no code"
                if "three values" in found["refused"]
                else "no attention"
                if "affine" in found["refused"]
                else "-"
            )
            return none if margin is None else f"{margin:.3g} of {found['needed']:.4g}"
        bound = f", within {found['bound']:.1g}" if found["bound"] else ""
        return f"{found['columns']} in {found['rank']}{bound}"

    words = [key for key in rows[0] if key.startswith("float")]
    return (
        "variants",
        ["program", *words],
        [[r["program"], *(told(r[w]) if w in r else r.get("refused", "")[:30] for w in words)] for r in rows],
    )


def patiently(
    entry: Listed, length: int, share: float, vocabulary: Any = None, measured: Callable[..., Any] = measured
) -> dict[str, Any]:
    """A row in a process of its own, which may take so many seconds of a processor and so much memory."""
    here, there = multiprocessing.Pipe()

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (PATIENCE, PATIENCE + 5))
        try:
            there.send(measured(entry, length, share, vocabulary))
        except (MemoryError, RuntimeError) as error:  # torch says it cannot allocate by a RuntimeError
            there.send({"program": entry.name, "length": length, "refused": f"{type(error).__name__}: {error}"[:300]})

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    there.close()
    try:
        found = here.recv()
    except EOFError:
        found = {"program": entry.name, "length": length, "refused": f"not done in {PATIENCE} s"}
    process.join()
    return {"seconds": float(PATIENCE), **found}


def sabotage(name: str, rng: random.Random) -> dict[str, Any]:
    """Weights changed after the fact: the proof fails, or the outputs are still right on every sequence."""
    entry = PROGRAMS[name]
    domain = entry.domain(4, entry.vocabulary[:2] if len(entry.vocabulary) > 2 else None)
    program = entry.program(domain)
    net = af.compile(program, domain)
    everything = list(domain)
    wanted = rasp.run_many(program, everything)
    counts = {"refused": 0, "still right": 0, "wrong": 0}
    groups = len(list(net.network.groups()))
    for trial in range(groups + TRIALS):
        other = copy.deepcopy(net)
        with torch.no_grad():
            if trial < groups:
                group = list(other.network.groups())[trial]
                for table in ("W_K", "b_K", "M_K"):
                    if getattr(group, table) is not None:
                        getattr(group, table).mul_(0.01)
            else:
                tensor = rng.choice([p for p in other.parameters() if p.numel()]).view(-1)
                place = rng.randrange(len(tensor))
                tensor[place] = tensor[place] * rng.choice([0.5, 0.9, -1.0, 2.0]) + rng.choice([0.0, 0.5, -1.0])
        try:
            other.recertify()
        except af.CertificateError:
            counts["refused"] += 1
            continue
        right = other.run([list(s) for s in everything]) == wanted
        counts["still right" if right else "wrong"] += 1
    return {"program": name, **counts}


class Done:
    """Rows that were measured before, with these sources; a file of lines that grows, or nothing at all."""

    def __init__(self, path: Path | None):
        files = sorted(
            p for part in ("rasp", "network", "certificates") for p in (ROOT / "src/attnforge" / part).rglob("*.py")
        )
        sources = hashlib.sha256(b"".join(p.read_bytes() for p in (*files, Path(__file__)))).hexdigest()
        self.path, self.rows = path, dict[str, Any]()
        lines = path.read_text("utf-8").splitlines() if path is not None and path.exists() else []
        if lines and json.loads(lines[0]) == sources:
            self.rows = dict(map(json.loads, lines[1:]))
        elif path is not None:
            path.write_text(json.dumps(sources) + "\n", encoding="utf-8")

    def row(self, key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The row of a key, measured if it is not known."""
        if key not in self.rows:
            self.rows[key] = measure()
            if self.path is not None:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([key, self.rows[key]]) + "\n")
            row = {k: v for k, v in self.rows[key].items() if k != "refused in float32"}
            print(json.dumps(row), flush=True)
        found: dict[str, Any] = self.rows[key]
        return found


def growth(name: str, lengths: Sequence[int], share: float, done: Done) -> list[dict[str, Any]]:
    """The rows of a program at all lengths, up to the first that is refused."""
    rows = []
    for length in (*lengths, *((1000,) if name in LONG and max(lengths) >= 200 else ())):
        row = done.row(f"{name} {length}", functools.partial(patiently, PROGRAMS[name], length, share))
        rows.append(row)
        if "refused" in row:
            break
    return rows


def run(names: Sequence[str], lengths: Sequence[int], share: float, done: Done, jobs: int = 1) -> dict[str, Any]:
    beside, errors = [], []
    af.compile(PROGRAMS["hist"].build(), rasp.Sequences("ab", 2))  # what is loaded once is no one's compile time
    with ThreadPoolExecutor(jobs) as pool:  # threads that wait for processes
        rows = [row for own in pool.map(lambda name: growth(name, lengths, share, done), names) for row in own]
    for name, (vocabulary, length, theirs) in TRACR.items():
        if name in names:
            ask = functools.partial(patiently, PROGRAMS[name], length, 1.0, vocabulary)
            beside.append({**done.row(f"{name} beside Tracr", ask), "tracr": theirs})
    for name, counts in TRACR_WRONG.items():
        for length, count in counts.items() if name in names else ():
            row = done.row(f"{name} {length}", functools.partial(patiently, PROGRAMS[name], length, share))
            errors.append({**row, "tracr": count})
    rng = random.Random(0)
    broken = [
        done.row(f"{name} changed", functools.partial(sabotage, name, rng)) for name in SABOTAGED if name in names
    ]
    machine = {"python": platform.python_version(), "torch": torch.__version__, "processor": platform.machine(),
               "threads": torch.get_num_threads(),
               "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}  # fmt: skip
    return {"rows": rows, "beside tracr": beside, "errors": errors, "sabotage": broken, "machine": machine}


def tables(found: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """The tables, as titles, headers and cells."""
    rows: list[list[str]] = []
    for name in dict.fromkeys(row["program"] for row in found["rows"]):
        own = [row for row in found["rows"] if row["program"] == name]
        done = [row for row in own if "refused" not in row]
        last = done[-1] if done else None
        kinds = " ".join(dict.fromkeys(f"{r['kind']} {r['dtype']}" for r in done)) or "refused"
        rows.append([
            name, kinds, str(sum(r["wrong"] for r in done)), f"{sum(r['of'] for r in done):,}",
            " ".join(str(r["length"]) for r in done), " ".join(str(r["layers"]) for r in done),
            " ".join(f"{r['parameters']:,}" for r in done), " ".join(f"{r['seconds']:.2f}" for r in own),
            own[-1]["refused"][:60] if last is None else f"{last['bound']:.2g}" if last["bound"] else
            f"{last['margin'] or 0:.3g}",
        ])  # fmt: skip
    header = ["program", "certificate", "wrong", "of", "L", "layers", "parameters", "seconds", "least margin, or bound"]
    beside = [
        [r["program"], str(r["length"]), f"{r['tracr'][4]:,.0f}", f"{r['parameters']:,}", str(2 * r["tracr"][0]),
         str(r["layers"]), f"{r['seconds']:.2f}", f"{r['wrong']} of {r['of']:,}"]
        for r in found["beside tracr"]
    ]  # fmt: skip
    columns = ["program", "L", "parameters, Tracr", "here", "sublayers, Tracr", "here", "seconds", "wrong"]
    errors = [
        [r["program"], str(r["length"]), f"{r['tracr']} of 40", f"{r['wrong']} of {r['of']:,}", r["kind"]]
        for r in found["errors"]
    ]
    kernel = []
    for name in dict.fromkeys(row["program"] for row in found.get("kernel", ())):
        own = [row for row in found["kernel"] if row["program"] == name]
        told = [text for row in own for text in (f"{row['seconds']:.2f}", _outcome(row))]
        kernel.append([name, own[0].get("kind", "refused"), *told])
    broken = [[r["program"], str(r["refused"]), str(r["still right"]), str(r["wrong"])] for r in found["sabotage"]]
    kernel_header = ["program", "certificate", *(x for n in KERNEL for x in (f"seconds at L = {n}", "the kernel"))]
    return [
        ("every program", header, rows),
        ("beside Tracr, at the lengths of its tests", columns, beside),
        ("wrong outputs", ["program", "L", "wrong, Tracr", "wrong, here", "certificate"], errors),
        ("weights changed after the fact", ["program", "proof fails", "proved and right", "proved and wrong"], broken),
        ("what the kernel proves", kernel_header, kernel),
    ]


def _outcome(row: dict[str, Any]) -> str:
    """What the kernel says of a program, in a few words."""
    if row.get("proved") is None:
        return str(row.get("refused") or row["remark"])[:90]
    return "proves it" if row["kind"] == "exact" else f"proves {row['proved']:.2g}"


def markdown(found: dict[str, Any]) -> str:
    """The tables as a page shows them."""
    parts = []
    for title, header, rows in tables(found):
        lines = (f"| {' | '.join(row)} |" for row in rows)
        parts.append("\n".join([f"*{title}*", "", f"| {' | '.join(header)} |", f"|{'---|' * len(header)}", *lines]))
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kernel", action="store_true")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", nargs="*", metavar="PROGRAM")
    parser.add_argument("--share", type=float, default=1.0, help="which part of the random sequences to run")
    parser.add_argument("--jobs", type=int, default=1, help="how many rows to measure at a time")
    given = parser.parse_args()
    if given.markdown or given.write:
        text = markdown(json.loads(RESULTS.read_text("utf-8")))
        if given.write:
            begin, end = (f"<!-- programs:{side} -->" for side in ("begin", "end"))
            before, rest = PAGE.read_text("utf-8").split(begin)
            page = f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"
            PAGE.write_text(page, encoding="utf-8", newline="\n")
        else:
            print(text)
        return
    names = [rasp.library.get(name).name for name in given.only] if given.only else list(PROGRAMS)
    if given.kernel or given.variants:
        key, lengths, measure = ("kernel", KERNEL, by_kernel) if given.kernel else ("variants", (VARIED,), varied)
        rows = measured_rows(names, lengths, measure, given.jobs)
        show({"rows": [], "beside tracr": [], "errors": [], "sabotage": [], key: rows})
        if not given.only:
            found = {**json.loads(RESULTS.read_text("utf-8")), key: rows}
            RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return
    share = 0.01 if given.quick else given.share
    complete = not (given.quick or given.only or given.share != 1.0)
    done = Done(PARTIAL if complete else None)
    found = run(names, LENGTHS[:2] if given.quick else LENGTHS, share, done, given.jobs)
    if RESULTS.exists():
        before = json.loads(RESULTS.read_text("utf-8"))
        found |= {key: before[key] for key in ("kernel", "variants") if key in before}
    show(found)
    if complete:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        PARTIAL.unlink()
        print(f"wrote {RESULTS.relative_to(ROOT)}")


def measured_rows(
    names: Sequence[str], lengths: Sequence[int], measure: Callable[..., Any], jobs: int
) -> list[dict[str, Any]]:
    """Rows of some programs at some lengths."""
    ask = functools.partial(patiently, share=1.0, measured=measure)
    with ThreadPoolExecutor(jobs) as pool:
        return list(
            pool.map(lambda at: ask(PROGRAMS[at[0]], at[1]), [(n, length) for n in names for length in lengths])
        )


def show(found: dict[str, Any]) -> None:
    """The tables, on a terminal."""
    console = Console(width=200)
    more = [variants_table(found["variants"])] if found.get("variants") else []
    for title, header, rows in (*tables(found), *more):
        if not rows:
            continue
        shown = Table(*header, title=title)
        for cells in rows:
            shown.add_row(*cells)
        console.print(shown)


if __name__ == "__main__":
    main()
