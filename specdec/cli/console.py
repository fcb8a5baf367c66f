"""Shared by the commands: the console, and reading and writing of files and records."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from rich.console import Console

from specdec.assembly.model import Model
from specdec.assembly.prefix import budget_for
from specdec.core.config import ModelConfig, PrefixConfig
from specdec.core.errors import UserError
from specdec.core.pages import PagePlan
from specdec.core.provenance import run_record
from specdec.core.writing import is_in_place
from targets.backend import Backend, backend_of

console = Console(stderr=True, highlight=False)
"""People read stderr; stdout carries text and, last, JSON."""


def read_text(file: Path) -> str:
    """A UTF-8 text file that a user named. Raises UserError."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"cannot read {file} as UTF-8 text: {problem}") from None


def check_folder(folder: Path, option: str = "--out") -> None:
    """Make sure that results can be written, before the work: try it. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            file.write(b"specdec")
            file.flush()
    except OSError as problem:
        raise UserError(
            f"{option}: cannot write to {folder} ({problem.strerror}): name another folder"
        ) from None


def check_file(file: Path, option: str) -> None:
    """The same for one file. Raises UserError."""
    if file.is_dir():
        raise UserError(f"{option}: {file} is a folder: name a file")
    if file.exists() and not os.access(file, os.W_OK):
        raise UserError(f"{option}: {file} may not be written: name another file")
    if not is_in_place(file):
        check_folder(Path(os.path.realpath(file)).parent, option)


def command_record(command: str, model: ModelConfig, **configs: Any) -> dict[str, Any]:
    """The run's record, with the command and its resolved configuration."""
    resolved = {name: _plain(asdict(value)) for name, value in {"model": model, **configs}.items()}
    return run_record(backend_of(model).device(model), command=command, config=resolved)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """The values with paths as strings, for JSON."""
    return {name: str(v) if isinstance(v, Path) else v for name, v in values.items()}


def print_json(document: dict[str, Any]) -> None:
    """The one JSON document that ends stdout."""
    print(json.dumps(document))


ROOM_FOR = (4_000, 32_000)
"""Tokens of texts for which the start says how many there is room for."""
ROUNDED_INPUTS = (
    "8-bit weights meet 8-bit inputs (fp8-w8a8), for so many slots and guesses; --dtype fp8 keeps "
    "16-bit inputs"
)


def say_model(model: Model) -> None:
    """Print which model runs where, that mini is the small embedded one, and what there is to note
    about the drafter."""
    config, target = model.config, model.target
    device = model.backend.device(config)
    embedded = " (embedded; --model PATH runs another)" if config.model == "mini" else ""
    console.print(f"[dim]model {model.name}{embedded} on {device}[/dim]")
    sizes = f"{target.slots} x {target.max_len:,} tokens of context (--slots, --max-len)"
    console.print(f"[dim]{sizes}; the model's limit is {target.arch.max_position:,}[/dim]")
    if target.pages is not None:
        console.print(f"[dim]{_room(model, target.pages.plan)}[/dim]")
    if config.dtype is None and str(target.dtype) == "fp8-w8a8":
        console.print(f"[dim]{ROUNDED_INPUTS}[/dim]")
    for note in model.notes:
        console.print(note, style="dim", markup=False, soft_wrap=True)


def _room(model: Model, plan: PagePlan) -> str:
    """How many texts of which length fit at once."""
    target = model.target
    lengths = [n for n in ROOM_FOR if n < target.max_len] + [target.max_len]
    counts = [f"{plan.texts(n, target.slots):,} of {n:,}" for n in lengths]
    narrower = "" if "8" in str(target.kv_dtype) else " (--kv-dtype fp8 holds twice as much)"
    return (
        f"K/V memory holds so many texts of so many tokens at once: {', '.join(counts)}{narrower}; "
        "where they need more, the last to join waits"
    )


def say_prefix_cache(model: Model, config: PrefixConfig) -> None:
    """Print the prefix cache's memory budget, once everything is warm."""
    console.print(f"[dim]prefix cache: {budget_for(model, config)}[/dim]")


def say_pictures(model: Model) -> None:
    """Print how many tokens a picture becomes, if any are taken."""
    vision = model.target.vision
    if vision is not None:
        largest = f", {vision.budget} with detail: high" * (vision.budget > vision.usual)
        console.print(f"[dim]pictures: up to {vision.usual} tokens each{largest}[/dim]")


def say_compiled(backend: Backend) -> None:
    """Print how many programs came from the cache and how many were compiled, if the backend counts
    them."""
    counts = backend.compiled()
    if counts is not None:
        console.print(f"[dim]programs: {counts[0]} from the cache, {counts[1]} compiled[/dim]")
