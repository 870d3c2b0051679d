"""The page of a network of token programs: the programs, heads layer by layer, all margins, a sequence traced."""

from __future__ import annotations

from typing import cast

from ..certificates.certificate import upper_text
from ..errors import UnsupportedOperation
from ..network import AttentionLayer
from ..rasp.language import SOp
from ..rasp.network.compiled import CompiledProgram
from ..rasp.network.several import CompiledPrograms
from .html import Page

SHOWN = 12  # tokens of the traced sequence: what fits into a row of a table
LINES = 120  # heads and columns that are listed before the rest is counted


def program_page(net: CompiledProgram | CompiledPrograms) -> Page:
    """All there is to say about a program's network, on one page; raises `CertificateError` if its certificate is
    stale."""
    certificate, size = net.certificate, net.size
    if isinstance(net, CompiledPrograms):
        programs = net.programs
        title = f"{', '.join(programs)}: {_counted(len(programs), 'token program')} in one network"
    else:
        programs = {net.program.name or "": net.program}
        title = f"{net.program.name}: a token program" if net.program.name else "A token program"
    page = Page(title, f"As an attention-only network, {certificate.dtype}.")
    least = certificate.margin
    exact = certificate.kind == "exact"
    bound = upper_text(certificate.bound or 0.0)
    proved = ("certificate", "exact" if exact else f"error at most {bound}", "for every sequence")
    cards = [proved, ("attention layers", size.layers, f"{_counted(size.heads, 'head')}, no MLP")]
    cards += [("smallest margin to spare", f"{least.margin - least.needed:.4g}", least.site)] if least else []
    cards += [("parameters", f"{size.parameters:,}", _counted(size.slots, "memory slot"))]
    page.cards(cards)
    page.section("What it computes")
    for name, program in programs.items():
        if len(programs) > 1:
            page.text(f"`{name}`")
        page.code(_text(program))
    domain = net.domain
    rows = [("tokens", " ".join(map(repr, domain.vocabulary[:LINES]))), ("longest sequence", str(domain.max_length)),
            ("sequences", f"{float(domain.size):.4g}"), ("causal", "yes" if domain.causal else "no")]  # fmt: skip
    page.table(["domain", "here"], rows, "Every sequence of 1 to the largest number of tokens.", "ll")
    page.section("The network")
    heads = []
    for number, layer in enumerate(net.network.layers, 1):
        for group in cast(AttentionLayer, layer).heads():
            sees = "memory" if group.scope == "memory" else "tokens, causal" if group.causal else "tokens"
            heads.append((number, group.purpose, sees, group.slots))
    page.table(["layer", "head", "sees", "slots"], heads[:LINES], "Heads in the order of layers.", "rllr")
    page.section("The certificate")
    page.text(
        f"On every sequence of the domain, in {certificate.dtype} and with any order of summation, the network's "
        + ("answer **is** the program's: "if exact else f"answer differs from the program's by at most **{bound}**: ")
        + "the right slot of every head is so far ahead that the weights of all others vanish."
    )
    ledger = [(m.site, f"{m.margin:.5g}", f"{m.needed:.5g}", f"{m.eaten:.3g}", m.note) for m in certificate.margins]
    caption = "By how much the right slot of each head is ahead of the others, errors of codes and rounding taken off."
    page.table(["head", "ahead by", "needed", "eaten by errors", "note"], ledger[:LINES], caption, "lrrrl")
    page.section("One sequence")
    sequence = (domain.sample(1, seed=1)[0] * SHOWN)[: min(SHOWN, domain.max_length)]
    given = sequence if domain.bos is None else (domain.bos, *sequence)
    traces = net.trace(given) if isinstance(net, CompiledPrograms) else dict.fromkeys(programs, net.trace(given))
    held = {(row.op, row.layer): row for trace in traces.values() for row in trace.rows[:-1]}  # programs share heads
    named = [*((row.op, row) for row in held.values()),
             *(((f"output {name}").strip(), trace.rows[-1]) for name, trace in traces.items())]  # fmt: skip
    traced = [(name, row.layer, *(" ".join(map(_short, values)) for values in (row.interpreter, row.network)),
               "yes" if row.agrees else "no") for name, row in named]  # fmt: skip
    page.text(f"The sequence `{' '.join(map(str, sequence))}`, and what the network holds after each layer.")
    header = ["op", "layer", "in the interpreter", "in the network", "the same"]
    page.table(header, traced[:LINES], "Program and network beside each other: decoded columns.", "lrlll")
    return page


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _text(program: SOp) -> str:
    try:
        return program.to_text()
    except UnsupportedOperation:
        return repr(program)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
