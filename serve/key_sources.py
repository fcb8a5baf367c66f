"""Where API keys come from, and what one may hold."""

from __future__ import annotations

import os
from collections.abc import Iterable

from specdec.core.errors import UserError

VARIABLE = "SPECDEC_API_KEY"
"""A secret has no place in a command line, which every user of the machine can read."""


def checked_keys(keys: Iterable[str]) -> tuple[str, ...]:
    """Keys without white space around them, and no empty ones. Raises UserError for one that a
    client could not send."""
    found = tuple(key for key in (key.strip() for key in keys) if key)
    if not all(key.isascii() and key.isprintable() for key in found):
        raise UserError("an API key may hold visible ASCII characters only")
    return found


def environment_keys() -> tuple[str, ...]:
    """Of `VARIABLE`, with commas between. Raises UserError."""
    return checked_keys(os.environ.get(VARIABLE, "").split(","))
