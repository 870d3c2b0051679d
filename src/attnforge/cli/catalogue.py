"""`attnforge catalogue`: write a catalogue of networks whose every head is known."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import FAILED, Command, console, group, say, whole
from .lab import Backend, terminated_is_interrupted

catalogue = group("catalogue", "Networks with proofs, manifests and counterfactual pairs, by the hundred.")


@catalogue.command("build", cls=Command, short_help="Write a catalogue, or go on with one.")
def build(
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the catalogue goes.")],
    count: Annotated[int, typer.Option(parser=whole, metavar="COUNT", help="Models; three for each network.")] = 210,
    seed: Annotated[int, typer.Option(parser=whole, metavar="NUMBER", help="Of random programs and variants.")] = 0,
    jobs: Annotated[
        int | None, typer.Option(parser=whole, metavar="COUNT", help="Models at once; by default one for each core.")
    ] = None,
    backend: Annotated[Backend, typer.Option(help="Processes of this machine, or a dask cluster.")] = Backend.processes,
    scheduler: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Of a dask scheduler; without it a cluster is started here.")
    ] = None,
) -> None:
    """Write a folder for each model, and an index to browse. What is finished is kept: the same command goes on.

    \b
    attnforge catalogue build --out catalogue/
    attnforge catalogue build --out small/ --count 12 --jobs 2
    """
    from ..catalogue import build as making
    from ..lab.engine import Progress, bar

    try:
        with terminated_is_interrupted(), bar() as tell:
            done = making.build(
                out, count=count, seed=seed, jobs=jobs, backend=backend.value, scheduler=scheduler,
                progress=lambda n, total, last: tell(Progress(n, total, 0, last)),
            )  # fmt: skip
    except KeyboardInterrupt:
        console(stderr=True).out(
            f"stopped; finished models are kept in {out}, and the same command continues from them"
        )
        raise
    for name, problem in done.failures:
        console(stderr=True).out(f"failed: {name}: {problem}", highlight=False)
    say(f"made {done.made} models, kept {done.kept} that were there")
    say(f"page   {out / 'index.html'}  (open it in a browser)")
    say(f"index  {out / making.INDEX}")
    if done.failures:
        raise typer.Exit(FAILED)
