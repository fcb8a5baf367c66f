"""Where a model's assistant lies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from drafters.assistant import embedded
from specdec.core.errors import UserError
from targets import hub

SUFFIX = "-assistant"
"""How the hub's assistants are called after their models."""


def nearby(model: Path) -> Path | None:
    """The assistant in or beside a model's folder, if there is one."""
    return next((folder for folder in _places(model) if (folder / "config.json").is_file()), None)


def lies_by(model: str) -> bool:
    """Whether an assistant lies in or beside the folder of that name; not of an embedded model."""
    named = model in embedded.OF or hub.is_name(model)
    return not named and nearby(Path(model)) is not None


def _places(model: Path) -> Iterator[Path]:
    name = model.resolve().name
    yield model / "assistant"
    yield model / (name + SUFFIX)
    yield model.resolve().parent / (name + SUFFIX)


def default_name(model: str) -> str:
    """What to draft with where only the model was named: an embedded assistant, a folder, or a name
    of the hub. Raises UserError."""
    if model in embedded.OF:
        return embedded.OF[model]
    if hub.is_name(model):
        return hub.repo_of(model) + SUFFIX
    found = nearby(Path(model))
    if found is None:
        listed = ", ".join(map(str, _places(Path(model))))
        raise UserError(
            f"no assistant in or beside {model} (looked for {listed}): name one with "
            "--draft-model, a folder or org/name of the Hugging Face hub"
        )
    return str(found)


def folder_of(name: str) -> Path:
    """The folder of an assistant, downloaded if need be. Raises UserError."""
    if name in embedded.NAMES:
        return embedded.path(name)
    return hub.folder_of(
        name,
        f"no folder {name}: --draft-model names an assistant's folder, or one of the Hugging "
        "Face hub's as org/name",
    )
