"""Charts to be explored in a page: plotly figures from the same data and with the same looks as the pictures."""

from __future__ import annotations

import math
from typing import Any

from ..errors import ArgumentError
from ..extras import require
from .chart import Figure, Heat, Panel, Series
from .looks import CURVE, SYMBOLS, Look, looks, places, shape, tick, visible

HEIGHT = 400  # pixels of a row of panels
EXPLORED = ("line", "points", "bound")  # styles of series; the others, and marks, are for pictures only


def interactive(figure: Figure) -> Any:
    """The figure for `Page.plotly`. Colours are indices into the page's cycle and follow its theme."""
    for panel in figure.panels:
        if panel.marks or any(series.style not in EXPLORED for series in panel.series):
            raise ArgumentError(f"the panel '{panel.title}' can only be drawn as a picture: it shows more than lines")
    go, subplots = require("plotly.graph_objects", "report"), require("plotly.subplots", "report")
    rows, columns = shape(len(figure.panels))
    columns = min(columns, 2)  # a page is narrower than paper is wide
    rows = -(-len(figure.panels) // columns)
    drawn = subplots.make_subplots(
        rows, columns, subplot_titles=[panel.title for panel in figure.panels], horizontal_spacing=0.12,
        vertical_spacing=0.3 / rows if rows > 1 else 0,
    )  # fmt: skip
    appearance, shown = looks(figure), set[str]()
    for number, panel in enumerate(figure.panels):
        row, column = number // columns + 1, number % columns + 1
        if panel.heat is not None:
            drawn.add_trace(_heat(go, drawn, panel.heat, row, column), row, column)
            drawn.update_yaxes(autorange="reversed", row=row, col=column)
        for series in panel.series:
            trace = _series(go, series, appearance[series.name], series.name not in shown)
            drawn.add_trace(trace, row, column)
            shown.add(series.name)
        _axes(drawn, panel, row, column)
    drawn.update_annotations(font={"size": 14})
    legend = {"orientation": "h", "yanchor": "bottom", "y": 1 + 0.12 / rows, "x": 0, "xanchor": "left"}
    lines = 1 + len(shown) // 4
    drawn.update_layout(template="none", height=HEIGHT * rows + 22 * lines, legend=legend, hovermode="closest",
                        margin={"l": 64, "r": 20, "t": 70 + 22 * lines, "b": 56})  # fmt: skip
    return drawn


def _series(go: Any, series: Series, look: Look, first: bool) -> Any:
    lines = series.style != "points"
    marked = series.style == "points" or (series.style == "line" and len(series.x) <= CURVE)
    error = None
    if series.low is not None and series.high is not None:
        rows = list(zip(series.y, series.low, series.high, strict=True))
        up = [None if y is None or high is None else max(0.0, high - y) for y, _, high in rows]
        down = [None if y is None or low is None else max(0.0, y - low) for y, low, _ in rows]
        error = {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1.2, "width": 3}
    dash = ",".join(f"{1.6 * part:g}px" for part in look.dash) or "solid"
    return go.Scatter(
        x=series.x, y=series.y, name=series.name, legendgroup=series.name, showlegend=first, connectgaps=False,
        mode="+".join([*(["lines"] if lines else []), *(["markers"] if marked else [])]) or "lines",
        line={"dash": dash, "width": 2}, marker={"symbol": SYMBOLS[look.marker], "size": 8}, error_y=error,
        meta={"cycle": -1 if look.colour is None else look.colour},
    )  # fmt: skip


def _heat(go: Any, drawn: Any, heat: Heat, row: int, column: int) -> Any:
    x, y = next(drawn.select_xaxes(row=row, col=column)).domain, next(drawn.select_yaxes(row=row, col=column)).domain
    bar = {
        "x": x[1] + 0.005,
        "y": (y[0] + y[1]) / 2,
        "len": y[1] - y[0],
        "thickness": 12,
        "title": {"text": heat.label},
    }
    return go.Heatmap(z=heat.z, zmin=heat.low, zmax=heat.high, colorscale="Viridis", colorbar=bar)


def _axes(drawn: Any, panel: Panel, row: int, column: int) -> None:
    x: dict[str, Any] = {"title": {"text": panel.x}, "automargin": True, "zeroline": False}
    y: dict[str, Any] = {"title": {"text": panel.y}, "automargin": True, "zeroline": False}
    if panel.log_x:
        x |= {"type": "log", "exponentformat": "power"}
    if chosen := places(panel, 3.5) if panel.series else []:
        x |= {"tickvals": chosen, "ticktext": [tick(v) for v in chosen]}
    if panel.ticks:
        x |= {"tickvals": [at for at, _ in panel.ticks], "ticktext": [text for _, text in panel.ticks]}
    if panel.log_y:
        y |= {"type": "log", "exponentformat": "power"}
        if shown := visible(panel):
            low, high = math.log10(shown[0] / 1.7), math.log10(shown[1] * 1.7)
            # D2 labels 1, 2 and 5 of every power of ten; over many powers, every second or third is enough.
            y |= {"range": [low, high], "dtick": "D2" if high - low < 2 else math.ceil((high - low) / 8)}
    drawn.update_xaxes(x, row=row, col=column)
    drawn.update_yaxes(y, row=row, col=column)
    for number, zone in enumerate(panel.zones):
        _zone(drawn, panel, zone.low, zone.high, zone.text, number, row, column)


def _zone(
    drawn: Any, panel: Panel, low: float | None, high: float | None, text: str, number: int, row: int, column: int
) -> None:
    places_of_all = [x for series in panel.series for x in series.x]
    start = min(places_of_all) if low is None else low
    end = max(places_of_all) if high is None else high
    drawn.add_vrect(
        start, end, row=row, col=column, fillcolor="#8a94a3", opacity=0.16 if number % 2 == 0 else 0.0, line_width=0,
        annotation={"text": text, "font": {"size": 11}, "showarrow": False}, annotation_position="inside top",
        layer="below",
    )  # fmt: skip
