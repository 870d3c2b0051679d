"""`attnforge verify-pack`: networks and properties with proved labels, for verifiers; and checking such a pack."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ..arguments import counted
from ..errors import ArgumentError
from .common import AS_JSON, DType, console, say, say_json, whole


class By(StrEnum):
    """What proves the bounds of networks."""

    analysis = "analysis"
    kernel = "kernel"


def verify_pack(
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="The folder to write.")] = None,
    count: Annotated[int, typer.Option(parser=whole, metavar="COUNT", help="Instances, six for each network.")] = 60,
    seed: Annotated[int, typer.Option(parser=whole, metavar="NUMBER", help="Another seed, other problems.")] = 0,
    dtype: Annotated[DType, typer.Option(help="Of the graphs, and what the labels hold for.")] = DType.float32,
    proof: Annotated[By, typer.Option(help="kernel: every bound is proved a second time.")] = By.analysis,
    families: Annotated[
        str, typer.Option(metavar="NAMES", help="Of networks: some of formula, mlp, tokens, program.")
    ] = "formula,mlp,tokens",
    check: Annotated[
        Path | None, typer.Option("--check", metavar="DIR", help="Prove every label of a pack again instead.")
    ] = None,
    as_json: Annotated[bool, AS_JSON] = False,
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
