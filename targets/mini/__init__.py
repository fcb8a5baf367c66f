"""The embedded model family: small Gemma 4 checkpoints in Hugging Face form, trained from scratch
by `training/pretrain.py`. See `assets/*/CARD.md`."""

from __future__ import annotations

from pathlib import Path

from targets import hub

NAMES = ("mini", "mini-e")


def path(name: str) -> Path:
    """The checkpoint folder of an embedded model; `name` is one of NAMES."""
    assert name in NAMES, name
    return Path(__file__).parent / "assets" / name


def checkpoint_path(model: str) -> Path:
    """A folder, the embedded model of that name, or one of the hub's (`org/name`), downloaded if
    need be. Raises UserError."""
    if model in NAMES:
        return path(model)
    return hub.folder_of(
        model,
        f"no checkpoint folder {model!r}: name one, or a model of the Hugging Face hub as "
        f"org/name, or {' or '.join(NAMES)}, which come with specdec",
    )
