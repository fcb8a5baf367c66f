"""Reads users' TOML files strictly; an error is one line with the file and the key."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from specdec.core.errors import UserError

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""For `__pydantic_config__` of a dataclass to be read: "3" is no number, and an unknown key is an
error."""
MOST_FAULTS = 4
"""Most faults in one error message."""
Read = TypeVar("Read")


def read_toml(file: Path) -> dict[str, Any]:
    """Raises UserError that names the file."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise UserError(f"{file} is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as problem:
        raise UserError(f"{file} is not valid TOML: {problem}") from None
    except OSError as problem:
        raise UserError(f"cannot read {file}: {problem.strerror}") from None


def read_recipe_as(kind: type[Read], file: Path, example: str) -> Read:
    """A file as a dataclass, by its annotations. example: a file that errors refer to. Raises
    UserError that names the file and each unknown, missing or invalid key."""
    if not file.is_file():
        raise UserError(f"{file} is missing: name a recipe such as {example}")
    # by way of JSON, as strict validation accepts a JSON list for a tuple
    values = json.dumps(read_toml(file), default=str)
    try:
        return TypeAdapter(kind).validate_json(values)
    except ValidationError as problem:
        faults = [_described(dict(e)) for e in problem.errors(include_url=False)[:MOST_FAULTS]]
    raise UserError(f"{file}: {'; '.join(faults)}: compare with {example}")


def _described(fault: dict[str, Any]) -> str:
    """A short message for one of pydantic's errors."""
    key = ".".join(map(str, fault["loc"]))
    if fault["type"] in ("missing", "missing_argument"):
        return f"{key} is missing"
    if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{key} is not a key that is known"
    rule = fault["msg"].removeprefix("Input ").removeprefix("Value error, ")
    return f"{key} {rule}, got {fault['input']!r}"
