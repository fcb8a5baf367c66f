"""Where a model's assistant lies, and what Google calls it on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from drafters.assistant import embedded
from specdec.core.errors import UserError
from targets import hub
from targets.arch import Arch, parse_arch, read_config
from targets.published import UNPACKED, instruct, size_of

SUFFIX = "-assistant"
"""How the hub's assistants are called after their models."""


def nearby(model: Path) -> Path | None:
    """The assistant in or beside a model's folder, if there is one."""
    return next((folder for folder in _places(model) if (folder / "config.json").is_file()), None)


def lies_by(model: str) -> bool:
    """Whether an assistant comes with the embedded model of that name, lies in or beside the folder
    of that name, or is published for it and was downloaded before."""
    return model in embedded.OF or _at_hand(model) is not None


def _at_hand(model: str) -> str | None:
    if not hub.is_name(model) and (found := nearby(Path(model))) is not None:
        return str(found)
    name = published(model)
    return name if name is not None and hub.is_kept(name) else None


def _places(model: Path) -> Iterator[Path]:
    name = model.resolve().name
    yield model / "assistant"
    yield model / (name + SUFFIX)
    yield model.resolve().parent / (name + SUFFIX)


def published(model: str) -> str | None:
    """The hub's name of the assistant that Google publishes for a model: by the architecture, where
    its config.json is at hand, for repacked models have names of their own; else by its name."""
    if model in embedded.OF:
        return None
    size = size_of(model, _arch_at_hand(model))
    if size is None:
        return None
    return f"{instruct(size)}{UNPACKED if 'qat' in model.lower() else ''}{SUFFIX}"


def _arch_at_hand(model: str) -> Arch | None:
    folder = hub.kept_folder(model, "config.json") if hub.is_name(model) else Path(model)
    if folder is None or not (folder / "config.json").is_file():
        return None
    try:
        return parse_arch(read_config(folder))
    except UserError:  # reported when the model is loaded
        return None


def default_name(model: str) -> str:
    """The assistant of a model, where it was not named: an embedded one, a folder, or a name of the
    hub. Raises UserError."""
    if model in embedded.OF:
        return embedded.OF[model]
    if (found := _at_hand(model)) is not None:
        return found
    name = published(model)
    if hub.is_name(model):
        return name or hub.repo_of(model) + SUFFIX
    listed = ", ".join(map(str, _places(Path(model))))
    known = name and f": {name} is published for it, and --draft-model {name} downloads it"
    raise UserError(
        f"no assistant in or beside {model} (looked for {listed})"
        f"{known or ': name one with --draft-model, a folder or org/name of the hub'}"
    )


def folder_of(name: str) -> Path:
    """The folder of an assistant, downloaded if need be. Raises UserError."""
    if name in embedded.NAMES:
        return embedded.path(name)
    return hub.folder_of(
        name,
        f"no folder {name}: --draft-model names an assistant's folder, or one of the Hugging "
        "Face hub's as org/name",
    )
