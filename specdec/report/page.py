"""The receipt as one HTML page that needs no other file and no script."""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from html import escape
from pathlib import Path
from typing import Any

from specdec.report import figures, tables
from specdec.report.parts import Section

Row = dict[str, Any]

STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content-Security-Policy: nothing from outside, and no script."""


def html(receipt: Section) -> str:
    """The page. receipt: as `run.receipt` makes it."""
    identity = receipt["identity"]
    title = f"specdec receipt: {identity['arch']}"
    body = "\n".join(
        part
        for part in (
            _head(receipt, title),
            _notes("Warnings", receipt["warnings"], "warning"),
            tables.equality(receipt["equality"]),
            figures.acceptance(receipt),
            tables.acceptance(receipt["acceptance"]),
            figures.speed(receipt["speed"]),
            tables.speed(receipt["speed"]),
            tables.parity(receipt["parity"]),
            tables.perplexity(receipt.get("perplexity")),
            tables.memory(receipt["memory"]),
            tables.doctor(receipt["doctor"]),
            tables.identity(identity),
            _notes("Left out", receipt["skipped"], "left"),
        )
        if part
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def _head(receipt: Section, title: str) -> str:
    identity, equal = receipt["identity"], receipt["equal"]
    verdict = "answers equal plain decoding" if equal else "answers DIFFER from plain decoding"
    facts = (
        f"{identity['device']}, {identity['dtype']}, {identity['slots']} slots of "
        f"{identity['max_len']:,} tokens, drafter {identity['drafter']}"
        f"{' with ' + identity['assistant'] if identity['assistant'] else ''}, K = {identity['k']}"
    )
    made = f"specdec {identity['specdec']}, profile {identity['profile']}, {receipt['made']}"
    return (
        f'<header><h1>{escape(title)}</h1><p class="{"good" if equal else "bad"} verdict">'
        f"{verdict}</p>{tables.paragraph(facts)}<p class='dim'>{escape(made)}</p></header>"
    )


def _notes(title: str, notes: Seqs[Row], kind: str) -> str:
    if not notes:
        return ""
    items = "".join(
        f"<li><b>{escape(note['code'])}</b> {escape(note['sentence'])}{_numbers(note['numbers'])}"
        "</li>"
        for note in notes
    )
    return tables.boxed(title, f'<ul class="{kind}">{items}</ul>')


def _numbers(numbers: Row) -> str:
    if not numbers:
        return ""
    listed = ", ".join(f"{name} {_short(value)}" for name, value in numbers.items())
    return f' <span class="dim">({escape(listed)})</span>'


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
