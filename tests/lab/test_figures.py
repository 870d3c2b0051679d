"""Every figure of every experiment, from records of a real run: legible, told apart by everyone, and on the page."""

from __future__ import annotations

import re

import pytest

from attnforge.charts.drawing import interactive
from attnforge.lab.experiment import VERDICTS, find, names
from attnforge.lab.page import page_of
from attnforge.lab.store import Gathered, result
from charts.images import check
from lab.kept import records


def gathered(name: str) -> Gathered:
    experiment = find(name)
    kept = records(experiment)
    have = {r.cell.key for r in kept}
    return Gathered(experiment, True, kept, tuple(c for c in experiment.grid(True) if c.key not in have))


@pytest.mark.parametrize("name", names())
def test_every_figure_is_good_as_an_image(name: str) -> None:
    found = gathered(name)
    half = len(found.records) >= len(found.missing)
    assert half, f"the grid of {name} has changed: keep the records of a new run (see kept.py)"
    drawn = result(found)
    assert drawn.figures and drawn.findings and all(finding.verdict in VERDICTS for finding in drawn.findings)
    for figure in drawn.figures:
        check(figure)
        assert len(interactive(figure).data) == sum(len(p.series) + (p.heat is not None) for p in figure.panels)
        assert len(figure.caption) > 20 and all(p.title and p.x and p.y for p in figure.panels)


def test_the_page_has_the_experiments_that_have_records() -> None:
    found = [result(gathered(name)) for name in ("range", "heatmap", "training-from-construction")]
    page = page_of(found)
    html = page.html()
    text = re.sub(r"<script.*?</script>|<style.*?</style>|<[^>]*>", " ", html, flags=re.DOTALL)
    assert html.count('class="plot"') == html.count('class="still"') == sum(len(one.figures) for one in found)
    assert len(re.findall(r'<a href="#[^"]*">', html)) == len(found) + 3, "a list of contents"
    for one in found:
        assert one.experiment.name in text and "quick grid" in text
