"""Small JSON files of a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specdec.core.errors import UserError


def read_object(path: Path) -> dict[str, Any]:
    """The object in `path`; {} when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): download it again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold one JSON object: download it again")
    return value
