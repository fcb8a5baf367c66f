"""The assistant that comes with specdec, in transformers' form: `assets/mini/CARD.md`."""

from __future__ import annotations

from pathlib import Path

NAMES = {"mini-assistant": "mini"}
"""Assistants, and the embedded model that each is for."""
OF = {model: name for name, model in NAMES.items()}
"""The other way round."""


def path(name: str) -> Path:
    """The folder of an embedded assistant; `name` is one of NAMES."""
    return Path(__file__).parent / "assets" / NAMES[name]
