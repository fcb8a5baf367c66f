"""A receipt's charts: acceptance by category, position and length; speed by users."""

from __future__ import annotations

from typing import Any

from specdec.report import charts
from specdec.report.charts import Interval
from specdec.report.parts import Section
from specdec.report.questions import ALL

Row = dict[str, Any]


def acceptance(receipt: Section) -> str:
    """Three charts of the drafter with weights at K guesses; nothing where none was replayed."""
    section, drafter = receipt["acceptance"], receipt["equality"]["drafter"]
    k = receipt["equality"]["k"]
    rows = [row for row in section["rows"] if (row["drafter"], row["k"]) == (drafter, k)]
    if not rows:
        return ""
    parts = [
        _chart(f"tau of {drafter} by category, K = {k}", _by_category(rows)),
        _chart(f"share of {drafter}'s guesses accepted, by position", _by_position(rows)),
        _chart(f"tau of {drafter} by tokens of the text", _by_context(rows)),
    ]
    return f'<section class="charts"><h2>Acceptance</h2>{"".join(parts)}</section>'


def speed(section: Section) -> str:
    """Tokens per second of all users together, by drafter."""
    rows: dict[str, dict[str, float]] = {}
    notes: dict[tuple[str, str], str] = {}
    for row in section["rows"]:
        label = f"{row['users']} user{'s' if row['users'] > 1 else ''}"
        rows.setdefault(label, {})[row["drafter"]] = row["output_throughput"]
        notes[label, row["drafter"]] = f"({row['speedup']:.2f}x)"
    title = "tokens per second of all users together"
    drawn = _chart(f"{title} (speed-up over plain decoding)", charts.bars(title, rows, notes))
    return f'<section class="charts"><h2>Speed</h2>{drawn}</section>'


def _chart(caption: str, drawing: str) -> str:
    return f"<figure><figcaption>{caption}</figcaption>{drawing}</figure>" if drawing else ""


def _name(row: Row) -> str:
    return f"T = {row['temperature']:g}{', thinking' if row['thinking'] else ''}"


def _interval(row: Row) -> Interval:
    return Interval(row["low"], row["tau"], row["high"])


def _by_category(rows: list[Row]) -> str:
    shown: dict[str, dict[str, Interval]] = {}
    for row in rows:
        if row["context"] == ALL:
            shown.setdefault(row["category"], {})[_name(row)] = _interval(row)
    return charts.intervals("tau by category", shown, 1.0, "{:.1f}")


def _by_position(rows: list[Row]) -> str:
    whole = [row for row in rows if row["category"] == row["context"] == ALL]
    series = {_name(row): row["per_position_acceptance_rates"] for row in whole}
    return charts.lines("accepted by position", series, "position in the draft")


def _by_context(rows: list[Row]) -> str:
    shown: dict[str, dict[str, Interval]] = {}
    for row in rows:
        if row["category"] == ALL and row["context"] != ALL:
            shown.setdefault(row["context"], {})[_name(row)] = _interval(row)
    return charts.intervals("tau by length of the text", shown, 1.0, "{:.1f}") if shown else ""
