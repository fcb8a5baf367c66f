"""Option handling beyond cyclopts: checks of whole numbers, and TOML files of options."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from cyclopts.argument import ArgumentCollection
from cyclopts.config import Dict

from specdec.core.errors import UserError


def take_config(arguments: list[str]) -> tuple[list[str], Path | None]:
    """Cut `--config FILE` out of the arguments: it is read before any command is chosen."""
    for i, argument in enumerate(arguments):
        name, has_value, value = argument.partition("=")
        if name != "--config":
            continue
        if not has_value and i + 1 == len(arguments):
            raise UserError("--config needs a TOML file")
        file = Path(value if has_value else arguments[i + 1])
        if not file.is_file():
            raise UserError(f"--config: {file} does not exist")
        return arguments[:i] + arguments[i + (1 if has_value else 2) :], file
    return arguments, None


def read_config(file: Path, commands: Collection[str]) -> Dict:
    """A TOML file's options, for whatever command is chosen. Raises UserError."""
    from specdec.core.toml import read_toml  # pydantic takes a moment, and --help should not

    values = read_toml(file)
    for name in commands:  # cyclopts would pass over these tables
        if name in values:
            raise UserError(f"{file}: options belong at the top, not in a table [{name}]")
    return Dict(values, use_commands_as_keys=False, source=str(file))


def check_whole(_app: Any, _commands: Any, arguments: ArgumentCollection) -> None:
    """Raise UserError where a count isn't one: cyclopts rounds 1.5 to 2."""
    for argument in arguments:
        kinds = {*get_args(argument.hint)} or {argument.hint}
        if kinds - {NoneType} != {int}:
            continue
        for token in argument.tokens:
            if not re.fullmatch(r"[+-]?\d+", token.value):
                where = f"{token.source}: " if token.source != "cli" else ""
                name = token.keyword or argument.name
                raise UserError(f"{where}{name} must be a whole number, got {token.value}")
