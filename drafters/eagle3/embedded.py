"""The EAGLE-3 head that comes with specdec, in the flat form: `assets/mini/CARD.md`."""

from __future__ import annotations

from pathlib import Path

NAMES = {"mini-eagle3": "mini"}
"""Heads, and the embedded model that each is for."""


def path(name: str) -> Path:
    """The folder of an embedded head; `name` is one of NAMES."""
    return Path(__file__).parent / "assets" / NAMES[name]
