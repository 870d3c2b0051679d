"""The page of the lab: for each experiment the claim, the figures, the slope beside the predicted one, the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ..charts.chart import Figure
from ..charts.drawing import drawn, interactive
from ..report.html import Page, PageBlock
from .experiment import FAILS, VERDICTS, Experiment, Finding, Record
from .store import Result, results, tally

TITLE = "The theory of softmax attention, measured"
MOST_ROWS = 200  # of records shown in a table: a page stays a few MB, the folder has them all
LONGEST = 40  # letters of a text that is still a cell of a table
HEADER = ("quantity", "predicted", "measured  [95 % interval]", "verdict")
_RELATIONS = {"equals": "", "at most": "≤ ", "at least": "≥ "}


def lab_page(folder: str | Path, experiments: Iterable[Experiment] | None = None) -> Page:
    """One page for all that a folder holds, drawn from its records alone."""
    found, problems = results(folder, experiments)
    return page_of(found, problems)


def page_of(found: Sequence[Result], problems: Sequence[str] = ()) -> Page:
    """The page of results that were gathered already."""
    page = Page(
        TITLE, "Every claim beside what was measured: constructed networks, trained ones, and a verdict by rule."
    )
    counts = tally(found)
    records = [record for one in found for record in one.gathered.records]
    page.cards(
        [
            *((verdict, count, "") for verdict, count in counts.items()),
            ("cells measured", len(records), f"in {_seconds(sum(r.time_s for r in records))} of computing"),
        ]
    )
    missed = [(one.experiment.name, finding) for one in found for finding in one.findings if finding.verdict == FAILS]
    if missed:
        page.section("What does not hold, and why")
        page.text("\n\n".join(f"**{name}**: {reason(finding)}" for name, finding in missed))
    page.section("Verdicts")
    page.text(
        "Each number counts quantities. **Agrees**, **better than predicted** and **does not hold** follow from rules "
        "that are stated with each experiment and applied by the program that wrote this page, never by hand. "
        "Intervals are 95 % confidence intervals of the fit or of the mean."
    )
    page.table(
        ["experiment", "label", *VERDICTS, "here"],
        [(one.experiment.name, _short(one.experiment.label), *tally([one]).values(), one.state) for one in found],
        align="llrrrl",
    )
    for one in found:
        _section(page, one)
    _provenance(page, found, records, problems)
    return page


#: What a verdict that does not hold is laid to, by its cause.
BLAMED = {
    "float32": "The arithmetic: the claim speaks of real numbers, and float32 rounds on top of it.",
    "training": "Training: weights that do it exist, and gradient descent did not find them.",
    "theory": "The theory itself: what was built does not do what is claimed.",
}


def reason(finding: Finding) -> str:
    """What was found where a claim does not hold, and whether float32, training or the theory itself is to blame.

    >>> reason(Finding("largest error", 1.0, 2.0, None, FAILS, "at most", "at most", cause="float32"))
    'largest error: predicted ≤ 1, measured 2. The arithmetic: the claim speaks of real numbers, and ...'
    """
    quantity, predicted, measured, _ = row(finding)
    return f"{quantity}: predicted {predicted}, measured {measured}. {BLAMED[finding.cause]}"


def _short(label: str) -> str:
    """The labels of the theory without the paper's own numbers, which stand with the experiment."""
    return label.partition(" (")[0]


def row(finding: Finding) -> tuple[str, ...]:
    """A finding as the cells of a table under HEADER."""
    digits = 3
    if finding.predicted is not None and finding.measured is not None and finding.predicted != finding.measured:
        # A measurement just above its bound must not look as if it met it; one just below may.
        most = 17 if finding.verdict == FAILS else 5
        while digits < most and number(finding.predicted, digits) == number(finding.measured, digits):
            digits += 1
    predicted = (
        "–" if finding.predicted is None else f"{_RELATIONS[finding.relation]}{number(finding.predicted, digits)}"
    )
    measured = "–" if finding.measured is None else number(finding.measured, digits)
    if finding.interval is not None and all(abs(end) < 1e300 for end in finding.interval):
        measured += f"  [{number(finding.interval[0])}, {number(finding.interval[1])}]"
    return finding.quantity, predicted, measured, finding.verdict


def number(value: float, digits: int = 3) -> str:
    """A few digits, as one reads them.

    >>> number(-1.0234), number(1.5e-9), number(4096.0)
    ('-1.02', '1.5e-09', '4096')
    """
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e6 else f"{value:.{digits}g}"


def _section(page: Page, one: Result) -> None:
    experiment = one.experiment
    page.section(experiment.title)
    page.text(f"**Claim** (`{experiment.label}`, experiment `{experiment.name}`): {experiment.claim}")
    page.text(
        f"**Varied:** {experiment.varies}\n\n**Measured:** {experiment.measured_how}\n\n"
        f"**Judged:** {experiment.judged_how}\n\n**Here:** {one.state}."
    )
    if one.note:
        page.text(f"**Unfinished:** {one.note}.")
    for figure in one.figures:
        _figure(page, figure)
    if one.findings:
        page.table(HEADER, [row(finding) for finding in one.findings], align="lrll")
        rules = page.details("By which rules")
        rules.table(
            ["quantity", "rule", "note"], [(f.quantity, f.rule, f.note or None) for f in one.findings], align="lll"
        )
    _records(page, one)


def _figure(page: PageBlock, figure: Figure) -> None:
    page.plotly(interactive(figure), figure.caption, figure.alt, fallback=drawn(figure).pair)


def _records(page: Page, one: Result) -> None:
    """The numbers themselves, where they are single numbers and not too many."""
    records = one.gathered.records
    time, memory = _cost(records)
    block = page.details(f"{len(records)} records, {time}, at most {memory} each")
    settings = list(dict.fromkeys(name for r in records for name in r.settings))
    values = [
        n for n in dict.fromkeys(n for r in records for n in r.values) if any(_single(r.values.get(n)) for r in records)
    ]
    rows = [
        [
            *(_cell(r.settings.get(n)) for n in settings),
            r.seed,
            *(_cell(r.values.get(n)) for n in values),
            f"{r.time_s:.2f}",
        ]
        for r in records[:MOST_ROWS]
    ]
    left_out = len(records) - len(rows)
    caption = f"The first {len(rows)}; {left_out} more are in the folder of the run." if left_out > 0 else None
    block.table([*settings, "seed", *values, "seconds"], rows, caption)


def _single(value: object) -> bool:
    return isinstance(value, bool | int | float | str) and not (isinstance(value, str) and len(value) > LONGEST)


def _cell(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value) if _single(value) else "…"


def _provenance(page: Page, found: Sequence[Result], records: Sequence[Record], problems: Sequence[str]) -> None:
    page.section("Where the numbers come from")
    page.text(
        "Every figure and every verdict is drawn from records, one JSON file for each cell of an experiment's grid. "
        "Cells are seeded and keep to a fixed number of threads: the same seeds give the same numbers on a machine."
    )
    places = _distinct(
        f"{r.machine.get('processor', '?')}, {r.machine.get('cores', '?')} cores, {r.device}" for r in records
    )
    versions = _distinct(", ".join(f"{name} {version}" for name, version in r.versions.items()) for r in records)
    threads = _distinct(f"{r.threads}" for r in records)
    days = sorted(r.finished for r in records if r.finished)
    rows = [("machine and device", one) for one in places] + [("versions", one) for one in versions]
    rows += [("threads of a cell", ", ".join(threads))]
    rows += [("measured", f"{days[0]} to {days[-1]}")] if days else []
    page.table(["what", "here"], rows, align="ll")
    page.table(
        ["experiment", "label", "grid", "computing", "largest memory"],
        [(one.experiment.name, one.experiment.label, one.state, *_cost(one.gathered.records)) for one in found],
        align="lllrr",
    )
    if problems:
        page.text("**Left out:** files that are no records, and will be measured again by the next run.")
        page.code("\n".join(problems))


def _cost(records: Sequence[Record]) -> tuple[str, str]:
    return _seconds(sum(r.time_s for r in records)), f"{max(r.memory_mb for r in records):.0f} MB"


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _seconds(value: float) -> str:
    """A duration in words.

    >>> _seconds(3.14), _seconds(200), _seconds(7300)
    ('3.1 s', '3.3 min', '2.0 h')
    """
    return f"{value:.1f} s" if value < 100 else f"{value / 60:.1f} min" if value < 6000 else f"{value / 3600:.1f} h"
