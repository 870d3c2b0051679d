"""Reading records: picking some out, one value over another, means over seeds, slopes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..chart import Series
from ..experiment import Record
from ..verdicts import Slope, mean, slope


def where(records: Sequence[Record], **wanted: Any) -> list[Record]:
    """The records whose settings have these values; a tuple of values means any of them.

    >>> made = [Record("x", {"p": p}, 0, {"error": 1 / p}) for p in (1, 2, 4)]
    >>> [r["error"] for r in where(made, p=(2, 4))]
    [0.5, 0.25]
    """

    def fits(record: Record) -> bool:
        return all(
            name in record.settings
            and (record.settings[name] in value if isinstance(value, tuple) else record.settings[name] == value)
            for name, value in wanted.items()
        )

    return [record for record in records if fits(record)]


def column(records: Sequence[Record], x: str, y: str) -> dict[Any, list[float]]:
    """The values of y for each x, in order of x; records in which y is None are left out."""
    found: dict[Any, list[float]] = {}
    for record in records:
        if record[y] is not None:
            found.setdefault(record[x], []).append(float(record[y]))
    return dict(sorted(found.items()))


def line(
    name: str, records: Sequence[Record], x: str, y: str, style: str = "line", group: str | None = None
) -> list[Series]:
    """Means over seeds against x, the smallest and largest as an interval; empty when there is nothing to draw.

    Every axis of errors is logarithmic: an error of exactly 0 has no place on it and is left out.
    """
    found = {at: kept for at, values in column(records, x, y).items() if (kept := [v for v in values if v > 0])}
    if not found:
        return []
    centre = [mean(values).value for values in found.values()]
    if style == "bound" or all(len(values) == 1 for values in found.values()):
        return [Series(name, list(found), centre, style=style, group=group)]
    low, high = [min(v) for v in found.values()], [max(v) for v in found.values()]
    return [Series(name, list(found), centre, low, high, style, group)]


def fitted(records: Sequence[Record], x: str, y: str, least: int = 3) -> Slope | None:
    """The slope of y against x on logarithmic axes, over all seeds; None with fewer than `least` places."""
    points = [(a, b) for a, values in column(records, x, y).items() for b in values if b > 0]
    if len({a for a, _ in points}) < least:
        return None
    return slope([a for a, _ in points], [b for _, b in points])


def pairs(records: Sequence[Record], measured: str, limit: str) -> list[tuple[float, float]]:
    """(measured, bound) of every record that has both."""
    return [(float(r[measured]), float(r[limit])) for r in records if r[measured] is not None and r[limit] is not None]
