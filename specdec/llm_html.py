"""An answer as HTML for a notebook: who guessed each token, by colour and by an underline."""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from html import escape

STYLES = ("solid #2a78d6", "dashed #1a9850", "dotted #b8611b", "double #8b4fc0")
"""Underlines of sources, in the order in which they first guess."""


def provenance_html(texts: Seqs[str], guessed_by: Seqs[str | None], tau: float) -> str:
    """texts, guessed_by: of each token."""
    names = list(dict.fromkeys(name for name in guessed_by if name is not None))
    styles = {name: STYLES[i % len(STYLES)] for i, name in enumerate(names)}
    pairs = zip(texts, guessed_by, strict=True)
    text = "".join(_token(part, name, styles) for part, name in pairs)
    legend = "".join(f" {_token(name, name, styles)}" for name in names) or " nothing was guessed"
    return (
        f'<pre style="white-space:pre-wrap">{text}</pre>'
        f"<small>guessed by:{legend}; plain: the model's own choice; tau {tau:.2f}</small>"
    )


def _token(text: str, name: str | None, styles: dict[str, str]) -> str:
    if name is None:
        return escape(text)
    return (
        f'<span title="{escape(name)}" style="text-decoration:underline {styles[name]}">'
        f"{escape(text)}</span>"
    )
