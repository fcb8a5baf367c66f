"""Charts as SVG, to stand in a page: coloured by its style sheet, with a title for readers that do
not see them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence as Seqs
from html import escape
from typing import NamedTuple

WIDTH = 640
"""Of every chart, in its own units; the page scales it."""
LEFT = 150
"""Room for labels of rows."""
RIGHT = 110
"""Room behind the longest bar, for its figure."""
ROW = 16
"""Height of a bar or an interval."""
GAP = 10
"""Between two rows of labels."""
TOP = 34
"""Room for the legend."""
BOTTOM = 26
"""Room for the axis."""
HEIGHT = 220
"""Of a chart of lines, without legend and axis."""
TICKS = 5
"""Parts of an axis."""


class Interval(NamedTuple):
    low: float
    middle: float
    high: float


def intervals(
    title: str, rows: Mapping[str, Mapping[str, Interval]], least: float, form: str
) -> str:
    """A dot with its interval for each series of each row. least: where the axis begins; form: of
    its figures."""
    series = _series(rows)
    most = max(part.high for row in rows.values() for part in row.values())
    axis = _Axis(least, max(most, least + 1e-9))
    marks, y = [], TOP
    for label, row in rows.items():
        marks.append(_label(label, y, len(row)))
        for name, part in row.items():
            middle, colour = y + ROW / 2, series.index(name)
            x1, x2 = axis.x(part.low), axis.x(part.high)
            marks.append(
                f'<line class="c{colour} thick" x1="{x1:.1f}" x2="{x2:.1f}" y1="{middle}" '
                f'y2="{middle}"/><circle class="c{colour}" cx="{axis.x(part.middle):.1f}" '
                f'cy="{middle}" r="4.5"/>'
            )
            marks.append(_figure(x2 + 10, middle, form.format(part.middle)))
            y += ROW
        y += GAP
    return _svg(title, y + BOTTOM, [*_legend(series), *axis.marks(y, form), *marks])


def bars(
    title: str, rows: Mapping[str, Mapping[str, float]], notes: Mapping[tuple[str, str], str]
) -> str:
    """A bar for each series of each row. notes: by row and series, a text behind its figure."""
    series = _series(rows)
    axis = _Axis(0.0, max(value for row in rows.values() for value in row.values()) or 1.0)
    marks, y = [], TOP
    for label, row in rows.items():
        marks.append(_label(label, y, len(row)))
        for name, value in row.items():
            x, colour = axis.x(value), series.index(name)
            marks.append(
                f'<rect class="c{colour}" x="{LEFT}" y="{y + 2}" width="{x - LEFT:.1f}" '
                f'height="{ROW - 4}" rx="2"/>'
            )
            note = notes.get((label, name), "")
            marks.append(_figure(x + 6, y + ROW / 2, f"{value:,.0f} {note}".strip()))
            y += ROW
        y += GAP
    return _svg(title, y + 4, [*_legend(series), *marks])


def lines(title: str, series: Mapping[str, Seqs[float]], below: str) -> str:
    """A line per series over 1, 2, 3, …; values are shares, 0 to 1. below: the axis' name."""
    count = max(map(len, series.values()))
    bottom, names = TOP + HEIGHT, list(series)
    step = (WIDTH - LEFT - RIGHT) / max(1, count - 1)

    def place(i: int, value: float) -> tuple[float, float]:
        return LEFT + i * step, bottom - value * HEIGHT

    marks = []
    for part in range(TICKS + 1):
        _, y = place(0, part / TICKS)
        marks.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        marks.append(f'<text class="end" x="{LEFT - 8}" y="{y + 4}">{part / TICKS:.0%}</text>')
    for i in range(count):
        x, _ = place(i, 0)
        marks.append(f'<text class="mid" x="{x:.1f}" y="{bottom + 16}">{i + 1}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    marks.append(f'<text class="mid" x="{middle}" y="{bottom + 34}">{escape(below)}</text>')
    for name, values in series.items():
        colour, spots = names.index(name), [place(i, v) for i, v in enumerate(values)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        marks.append(f'<polyline class="c{colour} line" points="{path}"/>')
        marks += [f'<circle class="c{colour}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in spots]
    return _svg(title, bottom + BOTTOM + 16, [*_legend(names), *marks])


class _Axis(NamedTuple):
    """From the left edge of the drawing to its right one."""

    least: float
    most: float

    def x(self, value: float) -> float:
        share = (value - self.least) / (self.most - self.least)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def marks(self, bottom: float, form: str) -> Iterator[str]:
        for part in range(TICKS + 1):
            value = self.least + part * (self.most - self.least) / TICKS
            x = self.x(value)
            yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{bottom}"/>'
            yield f'<text class="mid" x="{x:.1f}" y="{bottom + 16}">{form.format(value)}</text>'


def _series(rows: Mapping[str, Mapping[str, object]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows.values() for name in row))


def _legend(names: Seqs[str]) -> Iterator[str]:
    x = LEFT
    for colour, name in enumerate(names):
        yield f'<rect class="c{colour}" x="{x}" y="8" width="12" height="12" rx="2"/>'
        yield f'<text x="{x + 17}" y="18">{escape(name)}</text>'
        x += 34 + 7 * len(name)


def _label(text: str, y: float, lines_: int) -> str:
    return f'<text class="end" x="{LEFT - 10}" y="{y + lines_ * ROW / 2 + 4}">{escape(text)}</text>'


def _figure(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y + 4}">{escape(text)}</text>'


def _svg(title: str, height: float, marks: Seqs[str]) -> str:
    name = escape(title, quote=True)
    return (
        f'<svg role="img" aria-label="{name}" viewBox="0 0 {WIDTH} {height:.0f}">'
        f"<title>{name}</title>{''.join(marks)}</svg>"
    )
