"""Folders of networks of which the truth is known: `attnforge catalogue`, where every head is, and `attnforge
verify-pack`, problems with proved labels for verifiers."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ..arguments import counted
from ..errors import ArgumentError
from .common import COUNT, FAILED, AsJson, Command, DType, console, group, say, say_json, whole
from .lab import Backend, terminated_is_interrupted

catalogue = group("catalogue", "Networks with proofs, manifests and counterfactual pairs, by the hundred.")


@catalogue.command("build", cls=Command, short_help="Write a catalogue, or go on with one.")
def build(
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the catalogue goes.")],
    count: Annotated[int, typer.Option(help="Models; three for each network.", **COUNT)] = 210,
    seed: Annotated[int, typer.Option(parser=whole, metavar="NUMBER", help="Of random programs and variants.")] = 0,
    jobs: Annotated[int | None, typer.Option(help="Models at once; by default one for each core.", **COUNT)] = None,
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


class By(StrEnum):
    """What proves the bounds of networks."""

    analysis = "analysis"
    kernel = "kernel"


def verify_pack(
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="The folder to write.")] = None,
    count: Annotated[int, typer.Option(help="Instances, six for each network.", **COUNT)] = 60,
    seed: Annotated[int, typer.Option(parser=whole, metavar="NUMBER", help="Another seed, other problems.")] = 0,
    dtype: Annotated[DType, typer.Option(help="Of the graphs, and what the labels hold for.")] = DType.float32,
    proof: Annotated[By, typer.Option(help="kernel: every bound is proved a second time.")] = By.analysis,
    families: Annotated[
        str, typer.Option(metavar="NAMES", help="Of networks: some of formula, mlp, tokens, program.")
    ] = "formula,mlp,tokens",
    check: Annotated[
        Path | None, typer.Option("--check", metavar="DIR", help="Prove every label of a pack again instead.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write ONNX graphs and VNN-LIB properties whose labels, sat or unsat, are proved; or check such a pack.

    The same options give the same bytes, and a run that was stopped goes on where it was. Exit code 1 if a label of a
    checked pack does not hold.

    \b
    attnforge verify-pack --out problems --count 60
    attnforge verify-pack --out problems --families program
    attnforge verify-pack --check problems
    """
    from .. import verification

    if (out is None) == (check is None):
        raise ArgumentError("expected --out DIR to write a pack, or --check DIR to check one")
    start = time.perf_counter()
    if check is not None:
        found, word = verification.check(check), "proved again"
    else:
        assert out is not None
        try:
            asked = [name.strip() for name in families.split(",")]
            found = verification.pack(out, count, seed, dtype=dtype.value, proof=proof.value, families=asked)
            word = "wrote"
        except KeyboardInterrupt:
            console(stderr=True).out(f"stopped; what is done is kept in {out}, and the same command goes on from it")
            raise
    seconds = time.perf_counter() - start
    networks, easiest = len({i.network for i in found.instances}), max(i.multiple for i in found.instances)
    hardest = min(i.multiple for i in found.instances)
    if as_json:
        say_json({
            "path": str(found.root), "instances": len(found), "networks": networks, "sat": found.count("sat"),
            "unsat": found.count("unsat"), "hardest": hardest, "easiest": easiest, "seconds": seconds,
        })  # fmt: skip
        return
    say(f"{word} {counted(len(found), 'instance')} of {counted(networks, 'network')} in {seconds:.1f} s: "
        f"{found.count('sat')} sat, {found.count('unsat')} unsat")  # fmt: skip
    exact = "" if all(i.bound for i in found.instances) else " (of programs, which are exact: of their logits)"
    say(f"margins from {hardest:.3g} to {easiest:.3g} times the certified bound{exact}")
    say(f"{found.root / 'instances.csv'} lists them, {found.root / 'labels.jsonl'} has labels and proofs")
