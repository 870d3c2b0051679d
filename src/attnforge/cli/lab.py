"""`attnforge lab`: list the experiments, run them, and write the page that shows what they found."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ArgumentError
from .common import COUNT, FAILED, Command, console, group, say, table, waiting

if TYPE_CHECKING:
    from ..lab.store import Result

PAGE = "report.html"  # of a folder of records, where no other name is given
SOME = 10  # problems that are named one by one: what fits on a screen beside the rest
lab = group("lab", "Measure the claims of the theory: constructed networks beside trained ones, with verdicts by rule.")


class Backend(StrEnum):
    """Where cells run."""

    processes = "processes"
    dask = "dask"


@lab.command("list", cls=Command, short_help="List the experiments.")
def listing() -> None:
    """List the experiments: what each is about, and how many cells its quick and its full grid have."""
    from ..lab import experiment as registry

    rows = []
    for experiment in registry.select("all"):
        quick, full = (str(len(experiment.grid(q))) for q in (True, False))
        rows.append((experiment.name, experiment.label, quick, full, experiment.title))
    table(("name", "label", "quick", "full", "title"), rows, right=("quick", "full"))


@lab.command("run", cls=Command, short_help="Run an experiment, or all of them.")
def run(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Experiments by name, or all.")],
    quick: Annotated[bool, typer.Option("--quick", help="Small grids: minutes instead of hours.")] = False,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where records, figures and the page go.")] = Path(
        "out/lab"
    ),
    jobs: Annotated[int | None, typer.Option(help="Cells at once; by default one for each core.", **COUNT)] = None,
    threads: Annotated[int, typer.Option(help="Threads of a cell.", **COUNT)] = 1,
    backend: Annotated[Backend, typer.Option(help="Processes of this machine, or a dask cluster.")] = Backend.processes,
    scheduler: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Of a dask scheduler; without it a cluster is started here.")
    ] = None,
) -> None:
    """Run experiments and write records, figures and a page. What has a record is not run again.

    \b
    attnforge lab run rate-anchors --out results/
    attnforge lab run all --quick
    attnforge lab run all --backend dask --scheduler tcp://10.0.0.1:8786
    """
    from ..lab import engine

    try:
        with terminated_is_interrupted():
            done = engine.run(
                names, out, quick=quick, jobs=jobs, backend=backend.value, scheduler=scheduler, threads=threads
            )
    except KeyboardInterrupt:
        console(stderr=True).out(f"stopped; finished cells are kept in {out}, and the same command continues from them")
        raise
    _complain(done.problems, "measured again")
    for failure in done.failures:
        console(stderr=True).out(f"failed: {failure}\n{failure.trace}", highlight=False)
    say(f"measured {done.measured} cells, kept {done.kept} that had a record")
    if done.measured + done.kept:
        _show(out, out / PAGE, {experiment.name for experiment in done.experiments})
    if done.failures:
        raise typer.Exit(FAILED)


@contextmanager
def terminated_is_interrupted() -> Iterator[None]:
    """Batch systems and `timeout` stop a job with SIGTERM: inside this block that ends a run as cleanly as Ctrl-C."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@lab.command("report", cls=Command, short_help="Write the page of a results folder.")
def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What `attnforge lab run` has written.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The page; FOLDER/report.html by default.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is no such page.")] = False,
) -> None:
    """Draw every figure and judge every claim again, from the records alone, and write one self-contained page."""
    from ..lab.page import TITLE

    path = output or folder / PAGE
    if path.suffix.lower() != ".html":
        raise ArgumentError(f"expected a file name that ends with .html, got '{path}'")
    foreign = path.is_file() and f"<title>{TITLE}</title>" not in path.read_text("utf-8", errors="replace")[:5000]
    if path.is_dir() or (foreign and not force):
        raise ArgumentError(f"'{path}' is a folder" if path.is_dir() else
                            f"'{path}' is there already and is no page of the lab; --force overwrites it")  # fmt: skip
    _show(folder, path)


def _show(folder: Path, path: Path, names: Collection[str] = ()) -> None:
    """Figures, page and verdicts of a folder; on the terminal only those of some experiments, where any are named."""
    from ..lab.page import page_of
    from ..lab.store import results, write

    with waiting("drawing"):
        found, problems = results(folder)
        files = write(found, folder)
        page_of(found, problems).save(path, force=True)
    _verdicts(tuple(one for one in found if not names or one.experiment.name in names))
    _complain(problems, "left out")
    say(f"\npage     {path}  (open it in a browser)")
    say(f"figures  {len(files) - 1} files beside the records, in {folder}")
    say(f"numbers  {files[-1]}")


def _complain(problems: tuple[str, ...], done: str) -> None:
    """Names files that are no records, the first of them one by one."""
    output = console(stderr=True)
    for problem in problems[:SOME]:
        output.out(f"{problem}; {done}", highlight=False)
    if len(problems) > SOME:
        output.out(f"and {len(problems) - SOME} more files that are no records; {done}", highlight=False)


def _verdicts(found: tuple[Result, ...]) -> None:
    from ..lab.page import HEADER, row
    from ..lab.store import tally

    rows = [(one.experiment.name, *row(finding)) for one in found for finding in one.findings]
    say()
    table(("experiment", *HEADER), rows, right=("predicted",))
    say(f"\n{', '.join(f'{count} {verdict}' for verdict, count in tally(found).items())}")
    for one in found:
        if one.note:
            say(f"{one.experiment.name}: {one.note}")
