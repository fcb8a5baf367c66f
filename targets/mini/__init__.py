"""The embedded model family: small Gemma 4 checkpoints in Hugging Face form, trained from scratch
by `training/pretrain.py`. See `assets/*/CARD.md`."""

from __future__ import annotations

from pathlib import Path

NAMES = ("mini", "mini-e")


def path(name: str) -> Path:
    """The checkpoint folder of an embedded model; `name` is one of NAMES."""
    assert name in NAMES, name
    return Path(__file__).parent / "assets" / name
