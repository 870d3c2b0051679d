"""The page of the demonstration: words, tables and figures around finished results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..charts.themes import Pair
from .html import Page

Row = tuple[str, ...]
FORMULA = """
<math display="block"><mrow>
<mi>head</mi><mo>(</mo><mi>y</mi><mo>)</mo><mo>=</mo><mfrac>
<mrow><munder><mo largeop="true">∑</mo><mi>k</mi></munder><msub><mi>V</mi><mi>k</mi></msub>
<msup><mi>e</mi><mrow><msub><mi>a</mi><mi>k</mi></msub><mi>y</mi><mo>+</mo><msub><mi>b</mi><mi>k</mi></msub></mrow></msup></mrow>
<mrow><munder><mo largeop="true">∑</mo><mi>k</mi></munder>
<msup><mi>e</mi><mrow><msub><mi>a</mi><mi>k</mi></msub><mi>y</mi><mo>+</mo><msub><mi>b</mi><mi>k</mi></msub></mrow></msup></mrow>
</mfrac></mrow></math>
"""


@dataclass(frozen=True)
class Shown:
    """All that the page shows. `figures` has a picture for "bounds", "temperature", "relu" and every head."""

    network_header: Row
    network_rows: tuple[Row, ...]
    network_note: str
    header: Row
    rows: tuple[Row, ...]
    note: str
    other_header: Row
    other_rows: tuple[Row, ...]
    figures: Mapping[str, Pair]
    heads: tuple[tuple[str, Row, str], ...]
    seconds: float


def demo_page(shown: Shown) -> Page:
    """The page, from the idea to the certificate."""
    name, interval, anchors, double, single, cold = shown.rows[0]
    file = f"{name.split()[0]}.safetensors"
    page = Page("Functions from softmax attention", "One head, a table of constants, and a proof of the largest error.")
    page.cards(
        [
            (f"{name}, float64", double, f"certified on {interval}, {anchors} anchors"),
            (f"{name}, float32", single, "certified, rounding included"),
            ("cold selection", cold, "measured, as many anchors"),
            ("computed in", f"{shown.seconds:.1f} s", "everything on this page"),
        ]
    )
    if shown.network_rows:
        page.section("Networks")
        page.text(
            "A formula, an MLP and a block of a transformer, compiled. Each has a page of its own next to "
            "this one, `formula.html`, `mlp.html` and `sequence.html`, and a file that `attnforge check` proves again."
        )
        align = "ll" + "r" * (len(shown.network_header) - 2)
        page.table(shown.network_header, shown.network_rows, shown.network_note.replace("\n", " "), align)
    page.section("The idea")
    page.text(
        "A softmax head with query `(y, 1)` and constant keys `(a, b)` computes a smooth function of `y`: the values "
        "`V` of its anchors, mixed with weights that move as `y` moves."
    )
    page.math(FORMULA, "One attention head over constant memory slots, as a function of the scalar it is asked about.")
    page.text(
        "Cold heads put all weight on the nearest anchor: a staircase. **Warm** heads mix many anchors, and if the "
        "values are solved for instead of read off the function, the mixture interpolates: the error falls "
        "geometrically with the number of anchors until the rounding of the arithmetic is all that is left."
    )
    page.figure(
        shown.figures["temperature"],
        "Left: the outputs of two heads with the same anchors, a cold one and a warm one, over the function (grey). "
        "Middle: the largest error against temperature. Right: against the number of anchors, at the best temperature. "
        "Bounds are certified; the errors of cold selection are only measured, so the comparison favours it.",
        "A staircase and a curve; two charts of the largest error, against temperature and against anchors.",
    )
    page.section("Bounds")
    page.figure(
        shown.figures["bounds"],
        "The functions below on one axis: the certified bound in float64 and float32, and cold selection.",
        "Dots on a logarithmic axis, one line for each function.",
    )
    page.table(shown.header, shown.rows, shown.note.replace("\n", " "), "ll" + "r" * (len(shown.header) - 2))
    if shown.heads:
        page.section("Head by head")
        page.text("What ships in float32, for some of them: anchors, values, the error under its bound, the weights.")
    for i, (function, row, certificate) in enumerate(shown.heads):
        block = page.details(f"{row[0]} on {row[1]}: {row[2]} anchors, at most {row[4]}", open=i == 0)
        block.figure(shown.figures[function], alt=f"Function, values, error and weights of the head for {function}.")
        block.code(certificate, "The certificate, as print(head.certificate) shows it.")
    page.section("Kinks, products, norms")
    page.text(
        "A kink does not converge spectrally, and a product has two inputs. One slot for the token itself and a few "
        "constant slots build these directly, with an error near rounding. (Layer norm: of the row's largest output.)"
    )
    page.table(shown.other_header, shown.other_rows, align="ll" + "r" * (len(shown.other_header) - 2))
    page.figure(
        shown.figures["relu"],
        "relu from two slots: on its interval, and magnified around the kink, where the weights change over.",
        "The relu function, the weights of its two slots, and its error near 0.",
    )
    page.section("What is certified")
    page.text(
        "**Certified** means proved: for every number of the dtype in the interval, for the weights as stored, for any "
        "order of summation, with or without fused multiply-add, and for an exponential within two units of roundoff. "
        "Bounds are rounded up, also on this page.\n\n"
        "**Measured** is the largest error seen on a dense sample. It is not a bound. Outside the interval nothing is "
        "claimed, and a head says so; TF32, autocast and reduced-precision matrix products are refused.\n\n"
        f"`attnforge check {file}` recomputes the first head's certificate from the file that stands next to this page."
    )
    return page
